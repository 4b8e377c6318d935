//! Releases Python capsules.

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

/// Functions of Python's C API, from the Python that runs in this process.
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
        // Only a success is kept, because Python may be loaded after a call that found none.
        match Self::find() {
            Some(python) => Ok(PYTHON.get_or_init(|| python)),
            None => Err(error!(InvalidArgument, "py_capsule: there is no Python in this process")),
        }
    }

    fn find() -> Option<Self> {
        // Global symbols are searched first. A host may also have loaded Python with RTLD_LOCAL.
        Self::of(libc::RTLD_DEFAULT).or_else(|| (0..).map_while(path_of_python).find_map(|path| Self::at(&path)))
    }

    /// Returns the functions of the Python library at `path`, which then stays loaded. No library is loaded anew.
    fn at(path: &Path) -> Option<Self> {
        let library = dynamic::loaded(CStr::from_bytes_until_nul(path).ok()?)?;
        let python = Self::of(library);
        if python.is_none() {
            // SAFETY: opened above, and no address of it is kept.
            unsafe { libc::dlclose(library) };
        }
        python
    }

    /// Returns Python's functions, found through a handle of the dynamic loader.
    fn of(handle: *mut c_void) -> Option<Self> {
        // SAFETY: the handle is RTLD_DEFAULT, or the handle of a library that is open.
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

/// Returns the path of number `index` of the loaded libraries that are Python's by their file names.
fn path_of_python(index: usize) -> Option<Path> {
    let mut search = Search { others: index, found: None };
    // The loader holds a lock during the iteration, so the path is copied, and opened afterwards.
    // SAFETY: `look_at` gets the search, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look_at), ptr::from_mut(&mut search).cast()) };
    search.found
}

struct Search {
    /// Number of Python libraries before the one that is searched for.
    others: usize,
    found: Option<Path>,
}

/// Checks one loaded object. The loader calls it for each.
unsafe extern "C" fn look_at(loaded: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> c_int {
    boundary(|| {
        // SAFETY: the loader passes an object whose name ends with a NUL; `path_of_python` passed a Search.
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

/// Part of the file name of every shared Python: libpython3.13.so.1.0, libpython3.so, libpython3.13t.so.
const PYTHON: &[u8] = b"libpython";

/// Releases the tensor of a capsule that was not consumed.
///
/// # Safety
/// `capsule` is a PyCapsule with contents as its name requires, and the caller holds the GIL.
pub unsafe fn release_capsule(capsule: *mut c_void) -> Result<()> {
    const LEGACY: &CStr = c"dltensor";
    const VERSIONED: &CStr = c"dltensor_versioned";
    if capsule.is_null() {
        return Err(error!(InvalidArgument, "py_capsule: NULL"));
    }
    let python = Python::get()?;
    // SAFETY: the caller promises a capsule; one that is valid under these names holds a tensor that was not consumed.
    // A destructor may run while an exception is set, which a deleter written in Python must not find. The exception is
    // therefore fetched first and restored afterwards.
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
