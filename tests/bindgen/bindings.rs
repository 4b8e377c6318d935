//! Tests bindgen's bindings of the header: values of constants, presence of functions, and some calls.

#[allow(non_camel_case_types, non_snake_case, non_upper_case_globals, dead_code, reason = "C's names, all of them")]
mod gradcodec {
    include!(concat!(env!("OUT_DIR"), "/gradcodec.rs"));
}

use std::{ffi::CStr, ptr};

use gradcodec::*;

include!(concat!(env!("OUT_DIR"), "/lists.rs"));

// The header writes these as expressions, because it cannot write them as literals.
const _: () = assert!(GC_AXIS_NONE as i64 == i32::MIN as i64 && GC_COUNT_ALL as i64 == i64::MIN);

fn main() {
    assert!(CONSTANTS.len() > 40, "{} constants", CONSTANTS.len());
    for (name, value, expected) in CONSTANTS {
        assert_eq!(value, expected, "{name}");
    }
    assert!(FUNCTIONS.len() >= 90, "{} functions", FUNCTIONS.len());
    for (name, function) in FUNCTIONS {
        assert!(!function.is_null(), "{name}");
    }

    let version = GRADCODEC_VERSION_MAJOR << 16 | GRADCODEC_VERSION_MINOR << 8 | GRADCODEC_VERSION_PATCH;
    let mut mask = [1u8, 0, 1, 0, 0, 0, 0, 0, 1];
    let mut length = [mask.len() as i64];
    let source = DLManagedTensor {
        dl_tensor: DLTensor {
            data: mask.as_mut_ptr().cast(),
            device: DLDevice { device_type: kDLCPU, device_id: 0 },
            ndim: 1,
            dtype: DLDataType { code: kDLBool as u8, bits: 8, lanes: 1 },
            shape: length.as_mut_ptr(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        },
        manager_ctx: ptr::null_mut(),
        deleter: None,
    };
    let mut chunks = [ptr::null_mut(); 2];
    // SAFETY: `source` describes `mask`, `chunks` has room for two results, and each result is released once.
    unsafe {
        assert_eq!(gc_version(), version);
        assert_eq!(gc_pack_chunks(&source, 2, chunks.as_mut_ptr()), GC_STATUS_OK as gc_status_t);
        let bytes = chunks.map(|chunk| *(*chunk).dl_tensor.data.cast::<u8>());
        assert_eq!(bytes, [0b1010_0000, 0b1000_0000]);
        chunks.into_iter().for_each(|chunk| gc_tensor_free(chunk));
        let refused = gc_pack_chunks(&source, 0, chunks.as_mut_ptr());
        assert_eq!(refused, GC_STATUS_INVALID_ARGUMENT as gc_status_t);
        println!("refused: {}", CStr::from_ptr(gc_last_error()).to_str().unwrap());
    }
    println!("bindgen: {} constants, {} functions, calls through them", CONSTANTS.len(), FUNCTIONS.len());
}
