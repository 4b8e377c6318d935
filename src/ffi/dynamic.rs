//! Libraries found at run time: opens them, lists those that are loaded, and makes tables of their functions.

use std::{
    borrow::Cow,
    ffi::{CStr, c_int, c_void},
    mem::MaybeUninit,
    ptr,
};

use super::{
    error::{Result, error},
    panics::boundary,
};

/// Returns the address of a function of a library.
///
/// # Safety
/// `library` is RTLD_DEFAULT, or came from dlopen and is still loaded.
pub unsafe fn address(library: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: `library` is open, and `name` ends with a NUL.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// Loads a library, which is never closed: its initializers run, as in every program that uses it.
pub fn load(file: &CStr) -> Option<*mut c_void> {
    // SAFETY: `file` ends with a NUL. Its name, or the user who named it, promises that the file is a library.
    let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) };
    (!library.is_null()).then_some(library)
}

/// Returns the handle of a library that is already loaded. The caller closes or keeps the handle.
pub fn loaded(file: &CStr) -> Option<*mut c_void> {
    // SAFETY: `file` ends with a NUL; RTLD_NOLOAD loads nothing.
    let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    (!library.is_null()).then_some(library)
}

/// Returns the reason why [`load`] just failed on this thread.
pub fn failure() -> Cow<'static, str> {
    // SAFETY: dlerror() returns NULL, or a text that stays until this thread's next call of the dynamic loader. The
    // message of an error copies the text before that.
    unsafe { libc::dlerror().as_ref().map_or(c"no reason was given", |text| CStr::from_ptr(text)) }.to_string_lossy()
}

/// Returns the file of the library that contains an address.
///
/// # Safety
/// The library stays loaded as long as the name is used.
pub unsafe fn file_of<'a>(address: *mut c_void) -> Option<&'a CStr> {
    let mut about = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `about` outlives the call, and zeros are a value of it. Any address is allowed.
    let (found, about) = unsafe { (libc::dladdr(address, about.as_mut_ptr()), about.assume_init()) };
    // SAFETY: the name is a text of the dynamic loader, which stays as long as the library is loaded.
    (found != 0 && !about.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(about.dli_fname) })
}

/// Names of the libraries of this process, also of those that were loaded with RTLD_LOCAL.
pub struct Loaded(Vec<u8>);

impl Loaded {
    pub fn list() -> Result<Self> {
        let mut names = Vec::<u8>::new();
        // SAFETY: `note_name` takes a list of this type, and the list outlives the call.
        if unsafe { libc::dl_iterate_phdr(Some(note_name), ptr::from_mut(&mut names).cast()) } != 0 {
            return Err(error!(OutOfMemory, "cannot allocate a list of the libraries of this process"));
        }
        Ok(Self(names))
    }

    /// Creates a list from names, each with its NUL.
    #[cfg(test)]
    pub fn of_names(names: &[u8]) -> Self {
        Self(names.to_vec())
    }

    /// Returns the names, as dlopen accepts them.
    pub fn names(&self) -> impl Iterator<Item = &CStr> {
        self.0.split_inclusive(|&byte| byte == 0).filter_map(|name| CStr::from_bytes_with_nul(name).ok())
    }
}

/// Adds a library's name, with its NUL, to a list.
unsafe extern "C" fn note_name(library: *mut libc::dl_phdr_info, _size: usize, names: *mut c_void) -> c_int {
    boundary(|| {
        // SAFETY: `names` is the list of `Loaded::list`, which nothing else uses now; the library's name is a text.
        let (names, name) = unsafe { (&mut *names.cast::<Vec<u8>>(), CStr::from_ptr((*library).dlpi_name)) };
        let name = name.to_bytes_with_nul();
        names
            .try_reserve(name.len())
            .map_err(|_| error!(OutOfMemory, "cannot allocate {} bytes for a name", name.len()))?;
        names.extend_from_slice(name);
        Ok(())
    })
}

/// Returns a name, which ends with a NUL, as a C string.
pub const fn with_nul(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("an identifier has no NUL"),
    }
}

/// Declares a table of a library's functions, which all return an int. If a *required* function is missing, the table
/// is not made; each is checked against its declaration in a crate's `sys`. An *optional* function, which newer
/// libraries have, may be None: its callers have an alternative.
macro_rules! table {
    (
        $(#[$about:meta])*
        $table:ident, declared in $sys:ident to answer $answer:ty,
        required { $($name:ident($($argument:ty),* $(,)?);)* }
        optional { $($(#[$since:meta])* $newer:ident($($its_argument:ty),* $(,)?);)* }
    ) => {
        $(#[$about])*
        #[allow(non_snake_case, reason = "the library's own names")]
        pub struct $table {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            $($(#[$since])* pub $newer: Option<unsafe extern "C" fn($($its_argument),*) -> c_int>,)*
        }

        impl $table {
            /// Returns the functions of a library, or the name of a required function that is missing.
            ///
            /// # Safety
            /// `library` is RTLD_DEFAULT or came from dlopen, and stays loaded as long as the table is used.
            unsafe fn of(library: *mut c_void) -> std::result::Result<Self, &'static std::ffi::CStr> {
                use $crate::ffi::dynamic::{address, with_nul};
                // SAFETY: `library` is open, and its functions of these names have these types. The constants below
                // compare the required ones with declarations that were made from its header, whose result is an enum
                // and so an int. Optional ones are copied from its reference.
                unsafe {
                    Ok(Self {
                        $($name: {
                            const NAME: &std::ffi::CStr = with_nul(concat!(stringify!($name), "\0"));
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(
                                address(library, NAME).ok_or(NAME)?,
                            )
                        },)*
                        $($newer: address(library, with_nul(concat!(stringify!($newer), "\0"))).map(|address| {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($its_argument),*) -> c_int>(address)
                        }),)*
                    })
                }
            }
        }

        $(const _: unsafe fn($($argument),*) -> $answer = $sys::$name;)*
    };
}
pub(crate) use table;
