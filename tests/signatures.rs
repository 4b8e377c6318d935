//! Every exported function has the type that was promised for it. The promises are written down here a second time, by
//! hand: cbindgen derives the header from the definitions, so comparing those two would find no mistake in both.

use std::{
    collections::BTreeSet,
    ffi::{c_char, c_void},
    fs,
    path::Path,
};

use gradcodec::capi::{self, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor};

/// A pointer of exactly the promised type takes each function's address, or this file does not compile. The types are
/// those of C: `i32` stands for int32_t and for the typedefs gc_status_t and gc_bit_order_t, which are that.
macro_rules! promised {
    ($($name:ident($($parameter:ty),*) $(-> $result:ty)?;)*) => {
        const _: () = {
            $(let _: unsafe extern "C" fn($($parameter),*) $(-> $result)? = capi::$name;)*
        };
        const PROMISED: &[&str] = &[$(stringify!($name)),*];
    };
}

type Release = Option<unsafe extern "C" fn(*mut c_void)>;

promised! {
    gc_version() -> u32;
    gc_version_string() -> *const c_char;
    gc_status_name(i32) -> *const c_char;
    gc_last_error() -> *const c_char;
    gc_set_threads(u32) -> i32;
    gc_prepare(DLDevice) -> i32;
    gc_trim(DLDevice) -> i32;
    gc_kernel_image(i32, *mut *const c_char, *mut usize) -> i32;

    gc_chunk_bytes(i64, usize) -> i64;
    gc_pack_chunks(*const DLManagedTensor, usize, *mut *mut DLManagedTensor) -> i32;
    gc_unpack_chunks(*const *mut DLManagedTensor, usize, i64, *mut *mut DLManagedTensor) -> i32;
    gc_pack_bits(*const DLManagedTensor, i32, i32, *mut *mut DLManagedTensor) -> i32;
    gc_unpack_bits(*const DLManagedTensor, i32, i64, i32, *mut *mut DLManagedTensor) -> i32;
    gc_pack_chunks_into(*const DLTensor, i32, *mut DLTensor, *mut c_void) -> i32;
    gc_unpack_chunks_into(*const DLTensor, i32, *mut DLTensor, *mut c_void) -> i32;
    gc_pack_signs_into(*const DLTensor, i32, *mut DLTensor, *mut c_void) -> i32;
    gc_pack_bits_into(*const DLTensor, i32, i32, *mut DLTensor, *mut c_void) -> i32;
    gc_unpack_bits_into(*const DLTensor, i32, i32, *mut DLTensor, *mut c_void) -> i32;

    gc_tensor_empty(DLDevice, DLDataType, i32, *const i64, *mut *mut DLManagedTensor) -> i32;
    gc_tensor_from_pointer(
        *mut c_void, DLDevice, DLDataType, i32, *const i64, *const i64, Release, *mut c_void, *mut *mut DLManagedTensor
    ) -> i32;
    gc_tensor_to_versioned(*mut DLManagedTensor, *mut *mut DLManagedTensorVersioned) -> i32;
    gc_tensor_from_versioned(*mut DLManagedTensorVersioned, *mut *mut DLManagedTensor) -> i32;
    gc_tensor_free(*mut DLManagedTensor);
    gc_capsule_destructor(*mut c_void);
}

fn lines(path: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn every_exported_function_has_a_promise_here() {
    let exported: BTreeSet<String> = lines("tests/abi/symbols.txt").into_iter().collect();
    assert_eq!(PROMISED.iter().map(|name| name.to_string()).collect::<BTreeSet<_>>(), exported);
}

#[test]
fn every_exported_function_has_a_promise_in_c() {
    let exported: BTreeSet<String> = lines("tests/abi/symbols.txt").into_iter().collect();
    let promised = lines("tests/abi/signatures.h");
    let names = promised.iter().filter_map(|line| line.strip_prefix("SAME(")?.split(',').next());
    assert_eq!(names.map(str::to_owned).collect::<BTreeSet<_>>(), exported);
}
