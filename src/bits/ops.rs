//! Packing to bits and unpacking from them.
//!
//! Every function here makes a [`BitPlan`] and runs it.
#![forbid(unsafe_code)]

use std::fmt;

use crate::{
    cuda::Stream,
    device::{Queue, tensors::results},
    dlpack::{
        Dtype, Outputs, Shape, View,
        checks::{check_contiguous, check_dtype, check_same_device},
        rules::{BitRule, Patterns},
    },
    ffi::error::{Error, Result, error},
};

use super::{
    cpu, cuda,
    plan::{BitOrder, BitPlan, bytes_for},
    signs,
};

/// Returns the rule that packs non-zero elements to 1; refuses floats.
fn nonzero(src: &View<'_>) -> Result<BitRule> {
    let dtype = src.dtype();
    if dtype.is_float() {
        return Err(error!(
            UnsupportedDtype,
            "{}: {dtype} cannot be packed as booleans; gc_pack_signs_into packs signs",
            src.name()
        ));
    }
    Ok(BitRule::nonzero(dtype))
}

/// Axis along which bits are packed or unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// All dimensions, flattened in C order.
    All,
    /// Single dimension; a negative number counts from the end.
    One(i32),
}

impl Axis {
    /// Returns the dimension; None for `All`. As in NumPy, a tensor without dimensions counts as one of one element.
    fn dimension(self, src: &View<'_>) -> Result<Option<usize>> {
        let Self::One(axis) = self else {
            return Ok(None);
        };
        let ndim = src.shape().len().max(1);
        let from_start = i64::from(axis) + if axis < 0 { ndim as i64 } else { 0 };
        match usize::try_from(from_start) {
            Ok(index) if index < ndim => Ok(Some(index).filter(|_| !src.shape().is_empty())),
            _ => Err(error!(InvalidArgument, "axis: {axis} is out of range for {}, of ndim {ndim}", src.name())),
        }
    }
}

/// Number of bits to unpack along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// All bits of the source.
    All,
    /// This number, with zeros after the last bit; if negative, all bits but this number at the end.
    Of(i64),
}

impl Count {
    /// Returns the number for a source of `bytes` bytes along the axis.
    fn of(self, bytes: i64) -> Result<i64> {
        let left_off = match self {
            Self::Of(count @ 0..) => return Ok(count),
            Self::Of(count) => count,
            Self::All => 0,
        };
        let total = bytes
            .checked_mul(8)
            .ok_or_else(|| error!(SizeOverflow, "src: {bytes} bytes along the axis have more than 2^63 - 1 bits"))?;
        if left_off < -total {
            return Err(error!(InvalidArgument, "count: {left_off} leaves off more than the {total} bits there are"));
        }
        Ok(total + left_off)
    }
}

/// Returns the length of `src` along a dimension; its number of elements without one.
fn length(src: &View<'_>, axis: Option<usize>) -> i64 {
    axis.map_or(src.elements(), |axis| src.shape()[axis])
}

/// Returns the shape of `src` with `length` along a dimension; a single dimension of `length` without one.
fn shape_with<'a>(src: &View<'a>, axis: Option<usize>, length: i64) -> Shape<'a> {
    match axis {
        None => Shape { sizes: &[0], changed: Some((0, length)) },
        Some(axis) => Shape { sizes: src.shape(), changed: Some((axis, length)) },
    }
}

/// Packs `src`, unless `dst` is empty. `plan` was made from these two views.
fn pack(queue: &mut Queue, plan: &BitPlan, rule: BitRule, src: &View<'_>, dst: &View<'_>) -> Result<()> {
    match queue {
        _ if dst.elements() == 0 => Ok(()),
        Queue::Cpu => {
            cpu::pack(plan, rule, src, dst);
            Ok(())
        }
        Queue::Cuda(queue) => cuda::pack(queue, plan, rule, src, dst),
    }
}

/// Unpacks `src`, unless `dst` is empty. `plan` was made from these two views.
pub fn unpack(queue: &mut Queue, plan: &BitPlan, patterns: Patterns, src: &View<'_>, dst: &View<'_>) -> Result<()> {
    match queue {
        _ if dst.elements() == 0 => Ok(()),
        Queue::Cpu => {
            cpu::unpack(plan, patterns, src, dst);
            Ok(())
        }
        Queue::Cuda(queue) if patterns.zero != 0 => signs::cuda::unpack(queue, plan, patterns, src, dst),
        Queue::Cuda(queue) => cuda::unpack(queue, plan, patterns, src, dst),
    }
}

/// Waits for the enqueued work, also after an error: when a call without a stream returns, nothing uses its inputs any
/// more.
pub fn complete<T>(mut queue: Queue, enqueued: Result<T>) -> Result<T> {
    let waited = queue.wait();
    enqueued.and_then(|value| waited.map(|()| value))
}

/// Returns the bytes of one chunk when `elements` bits are split into `n_chunks` equal chunks of whole bytes.
pub fn chunk_bytes(elements: i64, n_chunks: usize) -> Result<i64> {
    if elements < 0 {
        return Err(error!(InvalidArgument, "n_elements: {elements} is negative"));
    }
    if n_chunks == 0 {
        return Err(error!(InvalidArgument, "n_chunks: at least 1 expected, got 0"));
    }
    // The value is at most 2^60, so the cast is exact.
    let bytes = bytes_for(elements) as u64;
    // The division is left out for one chunk because it takes longer than all checks of this function.
    Ok(if n_chunks == 1 { bytes } else { bytes.div_ceil(n_chunks as u64) } as i64)
}

/// Packs non-zero elements to 1 in `n_chunks` new tensors.
pub fn pack_chunks(src: &View<'_>, n_chunks: usize) -> Result<Outputs> {
    pack_to_chunks(src, nonzero(src)?, n_chunks)
}

pub fn pack_to_chunks(src: &View<'_>, rule: BitRule, n_chunks: usize) -> Result<Outputs> {
    let bytes = chunk_bytes(src.elements(), n_chunks)?;
    let mut queue = Queue::of(src.device(), Stream::LEGACY)?;
    let chunks = results(&mut queue, src.device(), Dtype::U8, Shape::of(&[bytes]), n_chunks)?;
    let packed = chunks.joined();
    let mut plan = BitPlan::new(rule.size, BitOrder::Big);
    plan.flat(src, &packed);
    let enqueued = pack(&mut queue, &plan, rule, src, &packed);
    complete(queue, enqueued)?;
    Ok(chunks.finished())
}

/// Unpacks chunks of `elements` bits to a new bool tensor.
pub fn unpack_chunks(chunks: &[View<'_>], elements: i64) -> Result<Outputs> {
    unpack_from_chunks(chunks, elements, Dtype::BOOL, |_| Patterns::of(Dtype::BOOL))
}

/// Unpacks chunks of `elements` bits to a new tensor, with the patterns of each chunk.
pub fn unpack_from_chunks(
    chunks: &[View<'_>], elements: i64, dtype: Dtype, patterns: impl Fn(usize) -> Patterns,
) -> Result<Outputs> {
    let bytes = chunk_bytes(elements, chunks.len())?;
    for chunk in chunks {
        check_dtype(chunk, &[Dtype::U8])?;
        if chunk.shape() != [bytes] {
            return Err(error!(
                ShapeMismatch,
                "{}: shape [{bytes}] expected for {elements} elements in {} chunks, got {}",
                chunk.name(),
                chunks.len(),
                Shape::of(chunk.shape())
            ));
        }
        check_same_device(chunk, &chunks[0])?;
    }
    let device = chunks[0].device();
    let mut queue = Queue::of(device, Stream::LEGACY)?;
    let elements = results(&mut queue, device, dtype, Shape::of(&[elements]), 1)?;
    let enqueued = unpack_each(&mut queue, patterns, chunks, bytes, &elements.view());
    complete(queue, enqueued)?;
    Ok(elements.finished())
}

/// Unpacks chunks of `bytes` bytes, one after the other, to all of `unpacked`.
fn unpack_each(
    queue: &mut Queue, patterns: impl Fn(usize) -> Patterns, chunks: &[View<'_>], bytes: i64, unpacked: &View<'_>,
) -> Result<()> {
    let (mut first, mut done) = (0, 0);
    while let Some(chunk) = chunks.get(done).filter(|_| first < unpacked.elements()) {
        // Adjacent chunks, as gc_pack_chunks() makes them, are unpacked together if their patterns are equal.
        let stride = chunk.dims().next().filter(|&(size, _)| size > 1).map_or(1, |(_, stride)| stride);
        let of_chunk = patterns(done);
        let goes_on = |&next: &usize| is_behind(&chunks[next], &chunks[next - 1]) && patterns(next) == of_chunk;
        let together = if stride == 1 { 1 + (done + 1..chunks.len()).take_while(goes_on).count() } else { 1 };
        let bytes = bytes * together as i64;
        let count = (unpacked.elements() - first).min(bytes.saturating_mul(8));
        let mut plan = BitPlan::new(of_chunk.size, BitOrder::Big);
        plan.slice(first, count, bytes, stride);
        unpack(queue, &plan, of_chunk, chunk, unpacked)?;
        first += count;
        done += together;
    }
    Ok(())
}

/// Returns true if a chunk is contiguous and begins where another contiguous chunk ends.
fn is_behind(chunk: &View<'_>, before: &View<'_>) -> bool {
    chunk.is_contiguous() && chunk.data() == before.data().wrapping_add(before.elements() as usize)
}

/// Packs like `numpy.packbits` to a new tensor.
pub fn pack_bits(src: &View<'_>, axis: Axis, order: BitOrder) -> Result<Outputs> {
    let axis = axis.dimension(src)?;
    let rule = nonzero(src)?;
    let shape = shape_with(src, axis, bytes_for(length(src, axis)));
    let mut queue = Queue::of(src.device(), Stream::LEGACY)?;
    let bytes = results(&mut queue, src.device(), Dtype::U8, shape, 1)?;
    let packed = bytes.view();
    let mut plan = BitPlan::new(rule.size, order);
    plan.along(axis, src, &packed);
    let enqueued = pack(&mut queue, &plan, rule, src, &packed);
    complete(queue, enqueued)?;
    Ok(bytes.finished())
}

/// Unpacks like `numpy.unpackbits` to a new uint8 tensor.
pub fn unpack_bits(src: &View<'_>, axis: Axis, count: Count, order: BitOrder) -> Result<Outputs> {
    check_dtype(src, &[Dtype::U8])?;
    let axis = axis.dimension(src)?;
    let shape = shape_with(src, axis, count.of(length(src, axis))?);
    let mut queue = Queue::of(src.device(), Stream::LEGACY)?;
    let elements = results(&mut queue, src.device(), Dtype::U8, shape, 1)?;
    let unpacked = elements.view();
    let patterns = Patterns::of(Dtype::U8);
    let mut plan = BitPlan::new(patterns.size, order);
    plan.along(axis, &unpacked, src);
    let enqueued = unpack(&mut queue, &plan, patterns, src, &unpacked);
    complete(queue, enqueued)?;
    Ok(elements.finished())
}

/// Packs non-zero elements to 1 in the chunks that are the rows of `dst`.
pub fn pack_chunks_into(src: &View<'_>, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    pack_rows_into(src, nonzero(src)?, order, dst, stream)
}

/// Packs elements by a rule to the chunks that are the rows of `dst`.
pub fn pack_rows_into(src: &View<'_>, rule: BitRule, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    check_chunk_rows(dst, src)?;
    check_same_device(dst, src)?;
    dst.check_output(&[src])?;
    let mut queue = Queue::of(src.device(), stream)?;
    let mut plan = BitPlan::new(rule.size, order);
    plan.flat(src, dst);
    pack(&mut queue, &plan, rule, src, dst)
}

/// Unpacks the chunks that are the rows of `src` to 0 and 1 in `dst`.
pub fn unpack_chunks_into(src: &View<'_>, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    check_chunk_rows(src, dst)?;
    check_same_device(dst, src)?;
    dst.check_output(&[src])?;
    let mut queue = Queue::of(src.device(), stream)?;
    let patterns = Patterns::of(dst.dtype());
    let mut plan = BitPlan::new(patterns.size, order);
    plan.flat(dst, src);
    unpack(&mut queue, &plan, patterns, src, dst)
}

/// Packs like `numpy.packbits` to `dst`.
pub fn pack_bits_into(src: &View<'_>, axis: Axis, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    let axis = axis.dimension(src)?;
    let rule = nonzero(src)?;
    check_dtype(dst, &[Dtype::U8])?;
    check_shape(dst, shape_with(src, axis, bytes_for(length(src, axis))), src)?;
    check_same_device(dst, src)?;
    dst.check_output(&[src])?;
    let mut queue = Queue::of(src.device(), stream)?;
    let mut plan = BitPlan::new(rule.size, order);
    plan.along(axis, src, dst);
    pack(&mut queue, &plan, rule, src, dst)
}

/// Unpacks like `numpy.unpackbits` to 0 and 1 in `dst`, whose length along the axis is the count.
pub fn unpack_bits_into(src: &View<'_>, axis: Axis, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    check_dtype(src, &[Dtype::U8])?;
    let axis = axis.dimension(src)?;
    let count = dst.shape().get(axis.unwrap_or(0)).copied().unwrap_or(0);
    check_shape(dst, shape_with(src, axis, count), src)?;
    check_same_device(dst, src)?;
    dst.check_output(&[src])?;
    let mut queue = Queue::of(src.device(), stream)?;
    let patterns = Patterns::of(dst.dtype());
    let mut plan = BitPlan::new(patterns.size, order);
    plan.along(axis, dst, src);
    unpack(&mut queue, &plan, patterns, src, dst)
}

fn check_shape(dst: &View<'_>, expected: Shape<'_>, src: &View<'_>) -> Result<()> {
    if expected.iter().eq(dst.shape().iter().copied()) {
        return Ok(());
    }
    Err(error!(
        ShapeMismatch,
        "{}: shape {expected} expected for {} of shape {}, got {}",
        dst.name(),
        src.name(),
        Shape::of(src.shape()),
        Shape::of(dst.shape())
    ))
}

/// Checks that `bytes` is uint8, C-contiguous, [n_chunks, chunk_bytes] for the elements of `elements`.
pub fn check_chunk_rows(bytes: &View<'_>, elements: &View<'_>) -> Result<()> {
    check_dtype(bytes, &[Dtype::U8])?;
    let refusal = |expected: fmt::Arguments<'_>| -> Error {
        error!(
            ShapeMismatch,
            "{}: {expected} expected for {} elements, got shape {}",
            bytes.name(),
            elements.elements(),
            Shape::of(bytes.shape())
        )
    };
    let &[n_chunks, got] = bytes.shape() else {
        return Err(refusal(format_args!("two dimensions, n_chunks and gc_chunk_bytes,")));
    };
    let expected = chunk_bytes(elements.elements(), n_chunks as usize)?;
    if got != expected {
        return Err(refusal(format_args!("{n_chunks} chunks of {expected} bytes")));
    }
    check_contiguous(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_bytes_is_two_roundings_up() {
        for (elements, n_chunks, expected) in [
            (0, 1, 0),
            (0, 7, 0),
            (1, 1, 1),
            (8, 1, 1),
            (9, 1, 2),
            (400, 3, 17),
            (2410, 4, 76),
            (1, 5, 1),
            (i64::MAX, 1, 1 << 60),
            (i64::MAX, usize::MAX, 1),
        ] {
            assert_eq!(chunk_bytes(elements, n_chunks).unwrap(), expected, "{elements} in {n_chunks}");
        }
    }
}
