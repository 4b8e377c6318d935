//! BITS
//!
//! A rank sends one chunk of bits to each other rank. `n` elements are packed to ceil(n / 8) bytes, which are split
//! into n_chunks equal chunks of gc_chunk_bytes(n, n_chunks) bytes. Zero bits pad the last chunks. If the bytes divide
//! evenly, they equal those of DeepSpeed's compress_by_chunk. Booleans and integers: bit = (x != 0). For the signs of
//! floats see SIGNS.

use std::ffi::c_void;

use dlpark::ffi::{DLManagedTensor, DLTensor};

use crate::{
    cuda::Stream,
    dlpack::input,
    ffi::{
        api::gc_status_t,
        borrow::{self, Out},
        error::{Result, error},
        panics::boundary,
    },
};

use super::{
    ops::{self, Axis, Count},
    plan::BitOrder,
};

/// Order of the bits in a byte: one of GC_BIT_ORDER_*.
pub type gc_bit_order_t = i32;

/// Value of `axis` for all dimensions, flattened in C order.
pub const GC_AXIS_NONE: i32 = i32::MIN;

/// Value of `count` for all bits.
pub const GC_COUNT_ALL: i64 = i64::MIN;

fn to_axis(code: i32) -> Axis {
    if code == GC_AXIS_NONE { Axis::All } else { Axis::One(code) }
}

fn to_count(code: i64) -> Count {
    if code == GC_COUNT_ALL { Count::All } else { Count::Of(code) }
}

pub(super) fn to_order(code: gc_bit_order_t) -> Result<BitOrder> {
    match code {
        0 => Ok(BitOrder::Big),
        1 => Ok(BitOrder::Little),
        _ => Err(error!(InvalidArgument, "order: {code} is neither GC_BIT_ORDER_BIG 0 nor GC_BIT_ORDER_LITTLE 1")),
    }
}

/// Returns the bytes of one chunk: ceil(ceil(n_elements / 8) / n_chunks). -1, and the last error, for a negative
/// n_elements or 0 chunks.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub extern "C" fn gc_chunk_bytes(n_elements: i64, n_chunks: usize) -> i64 {
    boundary(|| ops::chunk_bytes(n_elements, n_chunks))
}

/// Packs booleans and integers to bits, 1 where an element is not zero, in equal chunks. The most significant bit of a
/// byte is first.
///
/// `src`: bool or integer, any shape and strides, flattened in C order. `out`: room for `n_chunks` pointers; each
/// receives a one-dimensional uint8 tensor of gc_chunk_bytes() bytes, yours to release, in any order. Bits past the
/// last element are 0. The chunks share one allocation, in which chunk k begins at `chunks[0].data + k * chunk_bytes`;
/// the first is aligned to 256 bytes, all are NULL when empty. The allocation is freed with the last chunk.
///
/// - GC_STATUS_INVALID_ARGUMENT: `n_chunks` is 0.
/// - GC_STATUS_UNSUPPORTED_DTYPE: `src` is a float; gc_pack_signs() packs signs.
/// - GC_STATUS_SIZE_OVERFLOW: there are more than 2^63 - 1 bytes, or pointers.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_pack_chunks(
    src: *const DLManagedTensor, n_chunks: usize, out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor, and room for `n_chunks` pointers.
        let (src, out) = unsafe {
            (input::managed("src", src)?, Out::several("out", out, borrow::Count::of("n_chunks", n_chunks))?)
        };
        out.fill(ops::pack_chunks(&src, n_chunks)?.into_raw());
        Ok(())
    })
}

/// Unpacks chunks to one bool tensor: the inverse of gc_pack_chunks().
///
/// `chunks`: `n_chunks` one-dimensional uint8 tensors of gc_chunk_bytes(n_elements, n_chunks) bytes each, in order, of
/// any stride, on one device. Their bits past `n_elements` are ignored. `*out`: one-dimensional, bool, `n_elements`
/// long, yours to release.
///
/// - GC_STATUS_INVALID_ARGUMENT: `n_chunks` is 0, or `n_elements` is negative.
/// - GC_STATUS_UNSUPPORTED_DTYPE: a chunk is not uint8.
/// - GC_STATUS_SHAPE_MISMATCH: a chunk has another length.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_unpack_chunks(
    chunks: *const *mut DLManagedTensor, n_chunks: usize, n_elements: i64, out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises `n_chunks` tensors, and room for a pointer.
        let (chunks, out) = unsafe {
            (input::managed_items("chunks", chunks, borrow::Count::of("n_chunks", n_chunks))?, Out::one("out", out)?)
        };
        out.fill(ops::unpack_chunks(&chunks, n_elements)?.into_raw());
        Ok(())
    })
}

/// Packs 8 elements along an axis to a byte, as numpy.packbits does. Zero bits pad the last byte of each row.
///
/// `src`: bool or integer, any shape and strides; non-zero is 1. `axis`: a dimension, negative numbers count from the
/// end; GC_AXIS_NONE flattens in C order. `order`: order of the bits in a byte. `*out`: uint8, of the shape of `src`
/// with ceil(size / 8) along the axis (one-dimensional when flattened), yours to release.
///
/// - GC_STATUS_INVALID_ARGUMENT: `axis` is out of range, or `order` is unknown.
/// - GC_STATUS_UNSUPPORTED_DTYPE: `src` is a float.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_pack_bits(
    src: *const DLManagedTensor, axis: i32, order: gc_bit_order_t, out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor, and room for a pointer.
        let (src, out) = unsafe { (input::managed("src", src)?, Out::one("out", out)?) };
        out.fill(ops::pack_bits(&src, to_axis(axis), to_order(order)?)?.into_raw());
        Ok(())
    })
}

/// Unpacks the bits of every byte along an axis to 0 and 1, as numpy.unpackbits does.
///
/// `src`: uint8, any shape and strides. `axis`, `order`: as for gc_pack_bits(). `count`: the number of bits along the
/// axis. GC_COUNT_ALL means all; zeros follow the last bit; a negative number removes that many bits at the end.
/// `*out`: uint8, of the shape of `src` with that many along the axis (one-dimensional when flattened), yours to
/// release.
///
/// - GC_STATUS_INVALID_ARGUMENT: `axis` is out of range, `order` is unknown, or `count` removes more bits than there
///   are.
/// - GC_STATUS_UNSUPPORTED_DTYPE: `src` is not uint8.
/// - GC_STATUS_SIZE_OVERFLOW: there are more than 2^63 - 1 bytes.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_unpack_bits(
    src: *const DLManagedTensor, axis: i32, count: i64, order: gc_bit_order_t, out: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor, and room for a pointer.
        let (src, out) = unsafe { (input::managed("src", src)?, Out::one("out", out)?) };
        let (axis, count) = (to_axis(axis), to_count(count));
        out.fill(ops::unpack_bits(&src, axis, count, to_order(order)?)?.into_raw());
        Ok(())
    })
}

/// Packs like gc_pack_chunks(), into your memory.
///
/// `src`: bool or integer, any shape and strides, flattened in C order. `dst`: uint8, C-contiguous, two-dimensional:
/// [n_chunks, gc_chunk_bytes(n, n_chunks)]; a row is a chunk. Every byte of it is written.
///
/// - GC_STATUS_INVALID_ARGUMENT: `order` is unknown, or `dst` has no chunks.
/// - GC_STATUS_UNSUPPORTED_DTYPE: `src` is a float, or `dst` is not uint8.
/// - GC_STATUS_SHAPE_MISMATCH, GC_STATUS_NOT_CONTIGUOUS: `dst` is not as described.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_pack_chunks_into(
    src: *const DLTensor, order: gc_bit_order_t, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises that `src` does not change during the call and nothing else uses `dst`'s memory.
        let (src, dst) = unsafe { (input::tensor("src", src)?, input::tensor("dst", dst)?) };
        ops::pack_chunks_into(&src, to_order(order)?, &dst, Stream::from_raw(stream))
    })
}

/// Unpacks chunks to 0 and 1 in your memory, in any dtype.
///
/// `src`: uint8, C-contiguous, two-dimensional: [n_chunks, gc_chunk_bytes(n, n_chunks)]. `dst`: n elements, any shape
/// and strides, written in C order; bool, any integer, float16, bfloat16, float32 or float64.
///
/// - GC_STATUS_INVALID_ARGUMENT: `order` is unknown, or `src` has no chunks.
/// - GC_STATUS_UNSUPPORTED_DTYPE: `src` is not uint8.
/// - GC_STATUS_SHAPE_MISMATCH, GC_STATUS_NOT_CONTIGUOUS: `src` is not as described.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_unpack_chunks_into(
    src: *const DLTensor, order: gc_bit_order_t, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises that `src` does not change during the call and nothing else uses `dst`'s memory.
        let (src, dst) = unsafe { (input::tensor("src", src)?, input::tensor("dst", dst)?) };
        ops::unpack_chunks_into(&src, to_order(order)?, &dst, Stream::from_raw(stream))
    })
}

/// Packs like gc_pack_bits(), into your memory.
///
/// `dst`: uint8, of the shape that gc_pack_bits() would return, any strides.
///
/// - All errors of gc_pack_bits().
/// - GC_STATUS_UNSUPPORTED_DTYPE: `dst` is not uint8.
/// - GC_STATUS_SHAPE_MISMATCH: `dst` has another shape than described.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_pack_bits_into(
    src: *const DLTensor, axis: i32, order: gc_bit_order_t, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises that `src` does not change during the call and nothing else uses `dst`'s memory.
        let (src, dst) = unsafe { (input::tensor("src", src)?, input::tensor("dst", dst)?) };
        ops::pack_bits_into(&src, to_axis(axis), to_order(order)?, &dst, Stream::from_raw(stream))
    })
}

/// Unpacks like gc_unpack_bits(), into your memory.
///
/// `dst`: of the shape that gc_unpack_bits() would return; its length along the axis is the count. Any strides; uint8,
/// or any other dtype that gc_unpack_chunks_into() writes.
///
/// - All errors of gc_unpack_bits().
/// - GC_STATUS_SHAPE_MISMATCH: `dst` has another shape than described.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_unpack_bits_into(
    src: *const DLTensor, axis: i32, order: gc_bit_order_t, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises that `src` does not change during the call and nothing else uses `dst`'s memory.
        let (src, dst) = unsafe { (input::tensor("src", src)?, input::tensor("dst", dst)?) };
        ops::unpack_bits_into(&src, to_axis(axis), to_order(order)?, &dst, Stream::from_raw(stream))
    })
}
