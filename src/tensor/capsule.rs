//! Python capsules, as far as releasing them goes.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
    sync::OnceLock,
};

use dlpark::ffi::{DLManagedTensor, DLManagedTensorVersioned};

use crate::error::{Result, error};

use super::release;

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
        static PYTHON: OnceLock<Option<Python>> = OnceLock::new();
        let python = PYTHON.get_or_init(|| {
            // SAFETY: these are the signatures that Python's stable ABI gives the names.
            unsafe {
                Some(Python {
                    is_valid: std::mem::transmute::<*mut c_void, IsValid>(symbol(c"PyCapsule_IsValid")?),
                    get_pointer: std::mem::transmute::<*mut c_void, GetPointer>(symbol(c"PyCapsule_GetPointer")?),
                    fetch: std::mem::transmute::<*mut c_void, Fetch>(symbol(c"PyErr_Fetch")?),
                    restore: std::mem::transmute::<*mut c_void, Restore>(symbol(c"PyErr_Restore")?),
                })
            }
        });
        python.as_ref().ok_or_else(|| error!(InvalidArgument, "py_capsule: there is no Python in this process"))
    }
}

/// The address of a symbol that the process has loaded.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a name that ends with a NUL, looked up in what is loaded.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

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
