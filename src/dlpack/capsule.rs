//! Python capsules, as far as releasing them goes.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    mem, ptr,
    sync::OnceLock,
};

use dlpark::ffi::{DLManagedTensor, DLManagedTensorVersioned};

use crate::ffi::{
    dynamic,
    error::{Result, error},
    panics::boundary,
};

use super::output::release;

type IsValid = unsafe extern "C" fn(capsule: *mut c_void, name: *const c_char) -> c_int;
type GetPointer = unsafe extern "C" fn(capsule: *mut c_void, name: *const c_char) -> *mut c_void;
type Fetch = unsafe extern "C" fn(kind: *mut *mut c_void, value: *mut *mut c_void, traceback: *mut *mut c_void);
type Restore = unsafe extern "C" fn(kind: *mut c_void, value: *mut c_void, traceback: *mut c_void);

/// What is needed of Python's C API, from the Python that runs in this process.
struct Python {
    is_valid: IsValid,
    get_pointer: GetPointer,
    fetch: Fetch,
    restore: Restore,
}

impl Python {
    fn get() -> Result<&'static Self> {
        static PYTHON: OnceLock<Python> = OnceLock::new();
        if let Some(python) = PYTHON.get() {
            return Ok(python);
        }
        // Only what was found is kept: Python may be loaded after a call that found none.
        match Self::find() {
            Some(python) => Ok(PYTHON.get_or_init(|| python)),
            None => Err(error!(InvalidArgument, "py_capsule: there is no Python in this process")),
        }
    }

    fn find() -> Option<Self> {
        // What every library sees goes first. A host may also have loaded Python for itself alone (RTLD_LOCAL).
        Self::of(libc::RTLD_DEFAULT).or_else(|| (0..).map_while(path_of_python).find_map(|path| Self::at(&path)))
    }

    /// The functions of the Python in the library at `path`, which then stays loaded. Nothing is loaded anew.
    fn at(path: &Path) -> Option<Self> {
        let library = dynamic::loaded(CStr::from_bytes_until_nul(path).ok()?)?;
        let python = Self::of(library);
        if python.is_none() {
            // SAFETY: opened above, and nothing of it is kept.
            unsafe { libc::dlclose(library) };
        }
        python
    }

    /// Python's functions, as a handle of the dynamic loader finds them.
    fn of(handle: *mut c_void) -> Option<Self> {
        // SAFETY: the handle is RTLD_DEFAULT, or that of a library that is open.
        let symbol = |name: &CStr| unsafe { dynamic::address(handle, name) };
        // SAFETY: these are the signatures that Python's stable ABI gives the names.
        unsafe {
            Some(Python {
                is_valid: mem::transmute::<*mut c_void, IsValid>(symbol(c"PyCapsule_IsValid")?),
                get_pointer: mem::transmute::<*mut c_void, GetPointer>(symbol(c"PyCapsule_GetPointer")?),
                fetch: mem::transmute::<*mut c_void, Fetch>(symbol(c"PyErr_Fetch")?),
                restore: mem::transmute::<*mut c_void, Restore>(symbol(c"PyErr_Restore")?),
            })
        }
    }
}

/// A path that ends with a NUL.
type Path = [u8; libc::PATH_MAX as usize];

/// The path of number `index` of those loaded libraries that are Python's by their file names.
fn path_of_python(index: usize) -> Option<Path> {
    let mut search = Search { others: index, found: None };
    // The loader is locked while it shows what it has loaded, so a path is copied, to be opened afterwards.
    // SAFETY: `look_at` gets the search, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look_at), ptr::from_mut(&mut search).cast()) };
    search.found
}

struct Search {
    /// How many of Python's libraries come before the one that is looked for.
    others: usize,
    found: Option<Path>,
}

/// Called for everything that is loaded.
unsafe extern "C" fn look_at(loaded: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> c_int {
    boundary(|| {
        // SAFETY: the loader shows an object whose name ends with a NUL; `path_of_python` passed a Search.
        let (path, search) = unsafe { (CStr::from_ptr((*loaded).dlpi_name), &mut *search.cast::<Search>()) };
        let file = path.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        if search.found.is_none() && file.windows(PYTHON.len()).any(|part| part == PYTHON) {
            let mut copy = [0; libc::PATH_MAX as usize];
            match (search.others.checked_sub(1), copy.get_mut(..path.count_bytes())) {
                (Some(others), _) => search.others = others,
                (None, Some(room)) => {
                    room.copy_from_slice(path.to_bytes());
                    search.found = Some(copy);
                }
                (None, None) => {} // the system opens no path of that length
            }
        }
        Ok(())
    })
}

/// In the file name of every shared Python: libpython3.13.so.1.0, libpython3.so, libpython3.13t.so.
const PYTHON: &[u8] = b"libpython";

/// Releases the tensor of a capsule that nobody consumed.
///
/// # Safety
/// `capsule` is a PyCapsule that holds what its name says, and the caller holds the GIL.
pub unsafe fn release_capsule(capsule: *mut c_void) -> Result<()> {
    const LEGACY: &CStr = c"dltensor";
    const VERSIONED: &CStr = c"dltensor_versioned";
    if capsule.is_null() {
        return Err(error!(InvalidArgument, "py_capsule: NULL"));
    }
    let python = Python::get()?;
    // SAFETY: a capsule by the caller's promise; one that is valid under these names holds a tensor that nobody has
    // consumed. A destructor may run while an exception is on its way, and a deleter written in Python must not see it:
    // it is put aside meanwhile.
    unsafe {
        let (mut kind, mut value, mut traceback) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        (python.fetch)(&mut kind, &mut value, &mut traceback);
        if (python.is_valid)(capsule, LEGACY.as_ptr()) != 0 {
            release((python.get_pointer)(capsule, LEGACY.as_ptr()).cast::<DLManagedTensor>());
        } else if (python.is_valid)(capsule, VERSIONED.as_ptr()) != 0 {
            release((python.get_pointer)(capsule, VERSIONED.as_ptr()).cast::<DLManagedTensorVersioned>());
        }
        (python.restore)(kind, value, traceback);
    }
    Ok(())
}
