//! Signs as bits: packing, unpacking to +scale and -scale, and votes.
#![forbid(unsafe_code)]

use dlpark::ffi::DLDataType;

use crate::{
    bits::{
        ops::{self, check_chunk_rows},
        plan::{BitOrder, BitPlan},
    },
    cuda::Stream,
    device::Queue,
    dlpack::{
        Dtype, Outputs, Shape, View,
        checks::{check_contiguous, check_dtype, check_same_device},
        rules::{BitRule, Patterns},
    },
    ffi::{
        error::{Error, Result, error},
        name::Name,
    },
};

use super::{cpu, cuda, plan::Poll};

/// Returns the rule that packs elements not below zero to 1; refuses all dtypes but floats.
fn not_below_zero(src: &View<'_>) -> Result<BitRule> {
    let dtype = src.dtype();
    if !dtype.is_float() {
        return Err(error!(
            UnsupportedDtype,
            "{}: {dtype} has no packed signs; float16, bfloat16, float32 and float64 have",
            src.name()
        ));
    }
    Ok(BitRule::not_below_zero(dtype))
}

/// Checks that the dtype of an argument has the value -1.
fn check_signed(name: &Name, dtype: Dtype) -> Result<()> {
    if dtype.is_signed() {
        return Ok(());
    }
    Err(error!(UnsupportedDtype, "{name}: {dtype} has no -1; floats and signed integers have"))
}

/// Packs the sign of every element to `n_chunks` new tensors.
pub fn pack_signs(src: &View<'_>, n_chunks: usize) -> Result<Outputs> {
    ops::pack_to_chunks(src, not_below_zero(src)?, n_chunks)
}

/// Packs the sign of every element to the chunks that are the rows of `dst`.
pub fn pack_signs_into(src: &View<'_>, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    ops::pack_rows_into(src, not_below_zero(src)?, order, dst, stream)
}

/// Unpacks chunks of `elements` signs to +1 and -1 in a new tensor.
pub fn unpack_signs(chunks: &[View<'_>], elements: i64, dtype: DLDataType) -> Result<Outputs> {
    let name = Name::new("dtype");
    let dtype = Dtype::from_dlpack(&name, dtype)?;
    check_signed(&name, dtype)?;
    ops::unpack_from_chunks(chunks, elements, dtype, |_| Patterns::signs(dtype))
}

/// Unpacks the chunks that are the rows of `src` to +scale and -scale in `dst`; to +1 and -1 without scales.
pub fn unpack_signs_into(
    src: &View<'_>, scales: Option<&View<'_>>, order: BitOrder, dst: &View<'_>, stream: Stream,
) -> Result<()> {
    check_chunk_rows(src, dst)?;
    let dtype = dst.dtype();
    check_signed(&dst.name(), dtype)?;
    check_same_device(dst, src)?;
    if let Some(scales) = scales {
        check_scales(scales, src, dst)?;
        dst.check_output(&[src, scales])?;
    } else {
        dst.check_output(&[src])?;
    }
    let mut queue = Queue::of(src.device(), stream)?;
    let mut plan = BitPlan::new(dtype.size, order);
    plan.flat(dst, src);
    let Some(scales) = scales else {
        return ops::unpack(&mut queue, &plan, Patterns::signs(dtype), src, dst);
    };
    match &mut queue {
        _ if dst.elements() == 0 => Ok(()),
        Queue::Cpu => {
            cpu::unpack(&plan, dtype, scales, src, dst);
            Ok(())
        }
        Queue::Cuda(queue) => cuda::unpack_scaled(queue, &plan, dtype, scales, src, dst),
    }
}

/// Checks that `scales` has one element, or one for each chunk (a row of `src`).
fn check_scales(scales: &View<'_>, src: &View<'_>, dst: &View<'_>) -> Result<()> {
    if !dst.dtype().is_float() {
        return Err(error!(
            UnsupportedDtype,
            "{}: {} takes no scales; float16, bfloat16, float32 and float64 do",
            dst.name(),
            dst.dtype()
        ));
    }
    check_dtype(scales, &[Dtype::F32])?;
    let n_chunks = src.shape()[0];
    if !matches!(scales.shape(), &[count] if count == 1 || count == n_chunks) {
        return Err(error!(
            ShapeMismatch,
            "{}: shape [1] or [{n_chunks}] expected for {n_chunks} chunks, got {}",
            scales.name(),
            Shape::of(scales.shape())
        ));
    }
    check_contiguous(scales)?;
    check_same_device(scales, src)
}

/// Writes the bit of more than half of the voters, the rows of `src`; in a tie, the bit of the voter in turn.
pub fn vote_signs_into(src: &View<'_>, turn: u64, dst: &View<'_>, stream: Stream) -> Result<()> {
    let poll = poll(src, turn)?;
    check_dtype(dst, &[Dtype::U8])?;
    if dst.shape() != [poll.bytes] {
        return Err(error!(
            ShapeMismatch,
            "{}: shape [{}] expected for {} of shape {}, got {}",
            dst.name(),
            poll.bytes,
            src.name(),
            Shape::of(src.shape()),
            Shape::of(dst.shape())
        ));
    }
    if !dst.is_contiguous() {
        return Err(not_side_by_side(dst));
    }
    check_same_device(dst, src)?;
    dst.check_output(&[src])?;
    match Queue::of(src.device(), stream)? {
        _ if poll.bytes == 0 => Ok(()),
        Queue::Cpu => {
            cpu::vote(&poll, src, dst);
            Ok(())
        }
        Queue::Cuda(mut queue) => cuda::vote(&mut queue, &poll, src, dst),
    }
}

/// Returns the poll in `src`, of shape [voters, bytes]; refuses bytes of a voter that are not contiguous.
fn poll(src: &View<'_>, turn: u64) -> Result<Poll> {
    check_dtype(src, &[Dtype::U8])?;
    let &[n_voters, bytes] = src.shape() else {
        return Err(error!(
            ShapeMismatch,
            "{}: two dimensions, voters and bytes, expected, got shape {}",
            src.name(),
            Shape::of(src.shape())
        ));
    };
    if n_voters == 0 {
        return Err(error!(InvalidArgument, "{}: at least 1 voter expected, got 0", src.name()));
    }
    let mut strides = src.dims().map(|(_, stride)| stride);
    let (row, byte) = (strides.next().unwrap_or(0), strides.next().unwrap_or(1));
    if bytes > 1 && byte != 1 {
        return Err(not_side_by_side(src));
    }
    let voters = n_voters as u64;
    Ok(Poll { voters, bytes, stride: if voters == 1 { 0 } else { row }, turn: turn % voters })
}

fn not_side_by_side(bytes: &View<'_>) -> Error {
    error!(
        NotContiguous,
        "{}: stride 1 expected along the bytes of shape {}, got strides {}",
        bytes.name(),
        Shape::of(bytes.shape()),
        bytes.strides()
    )
}
