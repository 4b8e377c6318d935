//! Packs a mask and the signs of a gradient, and uses a codec, with GradCodec as an ordinary dependency.
//!
//!     cargo run --manifest-path examples/rust/Cargo.toml
//!
//! The functions are the ones in gradcodec.h, and as unsafe as in C, because a tensor is a struct with pointers.
//! `gradcodec::capi` has all types that they use, so no other crate is needed.

use std::{
    error::Error,
    ffi::{CStr, c_void},
    mem, ptr,
};

use gradcodec::capi::{
    BitOrder, DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensor, DLTensor, Decode, Kind, Status,
    gc_bit_order_t, gc_chunk_bytes, gc_codec_create, gc_codec_decode, gc_codec_encode, gc_codec_free,
    gc_codec_options_t, gc_codec_payload_bytes, gc_codec_t, gc_last_error, gc_pack_chunks, gc_pack_signs_into,
    gc_status_t, gc_tensor_empty, gc_tensor_free, gc_unpack_chunks, gc_unpack_chunks_into,
};

const BIG: gc_bit_order_t = BitOrder::Big as gc_bit_order_t; // the first element is the highest bit of its byte
const CPU: DLDevice = DLDevice { device_type: DLDeviceType::CPU, device_id: 0 };
const CHUNKS: usize = 4;

/// Describes CPU memory as a tensor, which is valid while `data` and `shape` are.
fn describe(data: *mut c_void, code: DLDataTypeCode, bits: u8, shape: &mut [i64]) -> DLTensor {
    let dtype = DLDataType { code, bits, lanes: 1 };
    let (ndim, strides) = (shape.len() as i32, ptr::null_mut());
    DLTensor { data, device: CPU, ndim, dtype, shape: shape.as_mut_ptr(), strides, byte_offset: 0 }
}

/// Turns a failure into an error with the library's message, which is thread-local and valid until the next failure.
fn check(status: gc_status_t) -> Result<(), Box<dyn Error>> {
    if status == Status::Ok as gc_status_t {
        return Ok(());
    }
    // SAFETY: the string belongs to the library, is thread-local, and is copied before the next call.
    Err(unsafe { CStr::from_ptr(gc_last_error()) }.to_string_lossy().into())
}

/// Tensor of the library, released on drop.
struct Owned(*mut DLManagedTensor);

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the tensor came from the library, and only this line releases it.
        unsafe { gc_tensor_free(self.0) }
    }
}

/// Codec, released on drop.
struct Codec(*mut gc_codec_t);

impl Drop for Codec {
    fn drop(&mut self) {
        // SAFETY: the codec came from the library, and only this line releases it.
        unsafe { gc_codec_free(self.0) }
    }
}

/// Packs into four chunks and unpacks them. The simple functions allocate their results.
fn mask_there_and_back(mask: &mut [bool]) -> Result<(usize, Vec<bool>), Box<dyn Error>> {
    let mut shape = [mask.len() as i64];
    let dl_tensor = describe(mask.as_mut_ptr().cast(), DLDataTypeCode::BOOL, 8, &mut shape);
    let source = DLManagedTensor { dl_tensor, manager_ctx: ptr::null_mut(), deleter: None };
    let (mut chunks, mut back) = ([ptr::null_mut(); CHUNKS], ptr::null_mut());
    // SAFETY: the memory behind `source` outlives the calls, the outputs have room for all results, and each result is
    // read while its owner is alive.
    unsafe {
        check(gc_pack_chunks(&source, CHUNKS, chunks.as_mut_ptr()))?;
        let chunks = chunks.map(Owned);
        let pointers = [&chunks[0], &chunks[1], &chunks[2], &chunks[3]].map(|chunk| chunk.0);
        check(gc_unpack_chunks(pointers.as_ptr(), CHUNKS, shape[0], &mut back))?;
        let back = Owned(back);
        let bytes = chunks.iter().map(|chunk| *(*chunk.0).dl_tensor.shape as usize).sum();
        Ok((bytes, std::slice::from_raw_parts((*back.0).dl_tensor.data.cast::<bool>(), mask.len()).to_vec()))
    }
}

/// Packs signs and unpacks them. The functions `_into` allocate nothing. A sign is 1 for positive numbers and zeros.
fn signs_there_and_back(gradient: &mut [f32]) -> Result<(usize, Vec<f32>), Box<dyn Error>> {
    let length = gradient.len() as i64;
    let chunk_bytes = gc_chunk_bytes(length, CHUNKS);
    let mut chunks = vec![0u8; CHUNKS * chunk_bytes as usize];
    let mut back = vec![0f32; gradient.len()];
    let (mut shape, mut chunks_shape, mut back_shape) = ([length], [CHUNKS as i64, chunk_bytes], [length]);
    let source = describe(gradient.as_mut_ptr().cast(), DLDataTypeCode::FLOAT, 32, &mut shape);
    let mut packed = describe(chunks.as_mut_ptr().cast(), DLDataTypeCode::UINT, 8, &mut chunks_shape);
    let mut unpacked = describe(back.as_mut_ptr().cast(), DLDataTypeCode::FLOAT, 32, &mut back_shape);
    // SAFETY: the memory of all three tensors outlives the calls and does not overlap.
    unsafe {
        check(gc_pack_signs_into(&source, BIG, &mut packed, ptr::null_mut()))?;
        check(gc_unpack_chunks_into(&packed, BIG, &mut unpacked, ptr::null_mut()))?;
    }
    Ok((chunks.len(), back))
}

/// Encodes and decodes steps. The codec sends signs and one scale, and adds the error of a step to the next one.
fn steps_there_and_back(steps: &mut [[f32; 2]]) -> Result<Vec<[f32; 2]>, Box<dyn Error>> {
    // SAFETY: all fields are numbers or pointers, and 0 is the default of each.
    let mut options: gc_codec_options_t = unsafe { mem::zeroed() };
    options.struct_size = size_of::<gc_codec_options_t>() as u32;
    (options.codec, options.n_elements) = (Kind::Onebit as i32, 2);
    let (mut codec, mut payload, mut received) = (ptr::null_mut(), ptr::null_mut(), Vec::new());
    // SAFETY: codec and payload outlive all calls, and the memory of each other tensor outlives the calls that use it.
    unsafe {
        check(gc_codec_create(&options, &mut codec))?;
        let codec = Codec(codec);
        let uint8 = DLDataType { code: DLDataTypeCode::UINT, bits: 8, lanes: 1 };
        check(gc_tensor_empty(CPU, uint8, 1, &gc_codec_payload_bytes(codec.0), &mut payload))?;
        let payload = Owned(payload);
        let sent = &mut (*payload.0).dl_tensor;
        for step in steps {
            let (mut back, mut shape, mut back_shape) = ([0f32; 2], [2], [2]);
            let gradient = describe(step.as_mut_ptr().cast(), DLDataTypeCode::FLOAT, 32, &mut shape);
            let mut result = describe(back.as_mut_ptr().cast(), DLDataTypeCode::FLOAT, 32, &mut back_shape);
            let (none, stream) = (ptr::null(), ptr::null_mut());
            check(gc_codec_encode(codec.0, [&raw const gradient].as_ptr(), 1, none, none, sent, stream))?;
            let results = [&raw mut result];
            check(gc_codec_decode(codec.0, sent, 1, none, Decode::Set as i32, results.as_ptr(), 1, stream))?;
            received.push(back);
        }
    }
    Ok(received)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut mask: Vec<bool> = (0..1000).map(|k| k % 3 == 0).collect();
    let (bytes, back) = mask_there_and_back(&mut mask)?;
    println!("{} bools, {bytes} bytes in {CHUNKS} chunks; unpacked as they were: {}", mask.len(), back == mask);
    assert!(bytes == 4 * 32 && back == mask);

    let mut gradient: Vec<f32> = (0..1000).map(|k| (k as f32).sin()).collect();
    let (bytes, back) = signs_there_and_back(&mut gradient)?;
    let signs: Vec<f32> = gradient.iter().map(|&x| if x >= 0.0 { 1.0 } else { 0.0 }).collect();
    println!("{} bytes of float32, {bytes} of signs; unpacked right: {}", 4 * gradient.len(), back == signs);
    assert!(bytes == 4 * 32 && back == signs);

    let received = steps_there_and_back(&mut [[1.0, -7.0], [2.0, 4.0]])?;
    println!("1 and -7, 2 and 4 are received as {received:?}: the sums are the same");
    assert_eq!(received, [[5.0, -5.0], [-2.0, 2.0]]);
    Ok(())
}
