//! A mask and the signs of a gradient to bits and back, with GradCodec as a dependency like any other.
//!
//!     cargo run --manifest-path examples_rust/Cargo.toml
//!
//! The functions are those of gradcodec.h, and as unsafe as in C: a tensor is a description with pointers in it.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use gradcodec::capi::{
    DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensor, DLTensor, gc_chunk_bytes, gc_last_error,
    gc_pack_chunks, gc_pack_signs_into, gc_tensor_free, gc_unpack_chunks, gc_unpack_chunks_into,
};

const BIG: i32 = 0; // GC_BIT_ORDER_BIG: the first element is the highest bit of its byte
const CHUNKS: usize = 4;

/// Memory of the CPU as a tensor: good while `data` and `shape` are.
fn describe(data: *mut c_void, code: DLDataTypeCode, bits: u8, shape: &mut [i64]) -> DLTensor {
    DLTensor {
        data,
        device: DLDevice { device_type: DLDeviceType::CPU, device_id: 0 },
        ndim: shape.len() as i32,
        dtype: DLDataType { code, bits, lanes: 1 },
        shape: shape.as_mut_ptr(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    }
}

/// Every failure has a sentence, which says what was wrong.
fn must(status: i32) {
    // SAFETY: the sentence is the library's, and stays until this thread's next call.
    assert!(status == 0, "{}", unsafe { CStr::from_ptr(gc_last_error()) }.to_string_lossy());
}

/// The simple functions allocate their results: here four chunks, and the mask that they become again.
fn mask_there_and_back(mask: &mut [bool]) -> (usize, Vec<bool>) {
    let length = mask.len() as i64;
    let mut shape = [length];
    let dl_tensor = describe(mask.as_mut_ptr().cast(), DLDataTypeCode::BOOL, 8, &mut shape);
    let source = DLManagedTensor { dl_tensor, manager_ctx: ptr::null_mut(), deleter: None };
    let mut chunks = [ptr::null_mut(); CHUNKS];
    let mut back = ptr::null_mut();
    // SAFETY: what `source` describes stays until the calls are over, there is room for every result, and each result
    // is read before it is freed, once.
    unsafe {
        must(gc_pack_chunks(&source, CHUNKS, chunks.as_mut_ptr()));
        must(gc_unpack_chunks(chunks.as_ptr().cast(), CHUNKS, length, &mut back));
        let bytes = chunks.iter().map(|&chunk| *(*chunk).dl_tensor.shape as usize).sum();
        let unpacked = std::slice::from_raw_parts((*back).dl_tensor.data.cast::<bool>(), mask.len()).to_vec();
        chunks.into_iter().chain([back]).for_each(|tensor| gc_tensor_free(tensor));
        (bytes, unpacked)
    }
}

/// The functions `_into` allocate nothing: here they write to two vectors. A sign is 1 for positive numbers and zeros.
fn signs_there_and_back(gradient: &mut [f32]) -> (usize, Vec<f32>) {
    let length = gradient.len() as i64;
    let chunk_bytes = gc_chunk_bytes(length, CHUNKS);
    let mut chunks = vec![0u8; CHUNKS * chunk_bytes as usize];
    let mut back = vec![0f32; gradient.len()];
    let (mut shape, mut chunks_shape, mut back_shape) = ([length], [CHUNKS as i64, chunk_bytes], [length]);
    let source = describe(gradient.as_mut_ptr().cast(), DLDataTypeCode::FLOAT, 32, &mut shape);
    let mut packed = describe(chunks.as_mut_ptr().cast(), DLDataTypeCode::UINT, 8, &mut chunks_shape);
    let mut unpacked = describe(back.as_mut_ptr().cast(), DLDataTypeCode::FLOAT, 32, &mut back_shape);
    // SAFETY: what the three describe stays until the calls are over, and none of it overlaps.
    unsafe {
        must(gc_pack_signs_into(&source, BIG, &mut packed, ptr::null_mut()));
        must(gc_unpack_chunks_into(&packed, BIG, &mut unpacked, ptr::null_mut()));
    }
    (chunks.len(), back)
}

fn main() {
    let mut mask: Vec<bool> = (0..1000).map(|k| k % 3 == 0).collect();
    let (bytes, back) = mask_there_and_back(&mut mask);
    println!("{} bools, {bytes} bytes in {CHUNKS} chunks; unpacked as they were: {}", mask.len(), back == mask);
    assert!(bytes == 4 * 32 && back == mask);

    let mut gradient: Vec<f32> = (0..1000).map(|k| (k as f32).sin()).collect();
    let (bytes, back) = signs_there_and_back(&mut gradient);
    let signs: Vec<f32> = gradient.iter().map(|&x| if x >= 0.0 { 1.0 } else { 0.0 }).collect();
    println!("{} bytes of float32, {bytes} of signs; unpacked right: {}", 4 * gradient.len(), back == signs);
    assert!(bytes == 4 * 32 && back == signs);
}
