//! Libraries that are found at run time: opening them, which of them are loaded, and tables of their functions.

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

/// The address of a function of a library.
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
    // SAFETY: a text that ends with a NUL; that the file is a library is its name's promise, or the user's who named it.
    let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) };
    (!library.is_null()).then_some(library)
}

/// A library that is loaded already: its handle, to be closed or kept.
pub fn loaded(file: &CStr) -> Option<*mut c_void> {
    // SAFETY: a text that ends with a NUL; RTLD_NOLOAD loads nothing.
    let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    (!library.is_null()).then_some(library)
}

/// Why [`load`] failed just now, on this thread.
pub fn failure() -> Cow<'static, str> {
    // SAFETY: dlerror() gives NULL, or a text that stays until this thread's next call of the dynamic loader; it is read
    // before that, in the sentence of a refusal.
    unsafe { libc::dlerror().as_ref().map_or(c"no reason was given", |text| CStr::from_ptr(text)) }.to_string_lossy()
}

/// The file of the library that has an address.
///
/// # Safety
/// The library stays loaded as long as the name is used.
pub unsafe fn file_of<'a>(address: *mut c_void) -> Option<&'a CStr> {
    let mut about = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `about` outlives the call, and zeros are a value of it. Any address may be asked about.
    let (found, about) = unsafe { (libc::dladdr(address, about.as_mut_ptr()), about.assume_init()) };
    // SAFETY: the name is a text of the loader's, there as long as the library is loaded.
    (found != 0 && !about.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(about.dli_fname) })
}

/// The libraries of this process, also those whose names others do not see.
pub struct Loaded(Vec<u8>);

impl Loaded {
    pub fn list() -> Result<Self> {
        let mut names = Vec::<u8>::new();
        // SAFETY: the function takes such a list, and it outlives the call.
        if unsafe { libc::dl_iterate_phdr(Some(note_name), ptr::from_mut(&mut names).cast()) } != 0 {
            return Err(error!(OutOfMemory, "cannot allocate a list of the libraries of this process"));
        }
        Ok(Self(names))
    }

    /// Such names, each with its NUL.
    #[cfg(test)]
    pub fn of_names(names: &[u8]) -> Self {
        Self(names.to_vec())
    }

    /// Their names, as dlopen knows them.
    pub fn names(&self) -> impl Iterator<Item = &CStr> {
        self.0.split_inclusive(|&byte| byte == 0).filter_map(|name| CStr::from_bytes_with_nul(name).ok())
    }
}

/// Adds a library's name, with its NUL, to a list.
unsafe extern "C" fn note_name(library: *mut libc::dl_phdr_info, _size: usize, names: *mut c_void) -> c_int {
    boundary(|| {
        // SAFETY: the list of `Loaded::list`, which nobody else uses now, and a library whose name is text.
        let (names, name) = unsafe { (&mut *names.cast::<Vec<u8>>(), CStr::from_ptr((*library).dlpi_name)) };
        let name = name.to_bytes_with_nul();
        names
            .try_reserve(name.len())
            .map_err(|_| error!(OutOfMemory, "cannot allocate {} bytes for a name", name.len()))?;
        names.extend_from_slice(name);
        Ok(())
    })
}

/// A name with the NUL that C wants.
pub const fn with_nul(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("an identifier has no NUL"),
    }
}

/// Declares a table of a library's functions, which all answer an int. Those that are *required* are there, or the table is
/// not made; each is checked against its declaration in a crate's `sys`. Those that are *optional*, which newer libraries
/// have, may be None: whoever calls one has a way without it.
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
            /// The functions of a library; the name of one that is required and not there.
            ///
            /// # Safety
            /// `library` is RTLD_DEFAULT or came from dlopen, and stays loaded as long as the table is used.
            unsafe fn of(library: *mut c_void) -> std::result::Result<Self, &'static std::ffi::CStr> {
                use $crate::ffi::dynamic::{address, with_nul};
                // SAFETY: `library` is open. Its functions of these names have these types: the constants
                // below hold them against the declarations that were made from its header, where the answer is an enum
                // and so an int; those of the optional ones are copied from its reference.
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
