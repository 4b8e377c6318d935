//! Copies, which may also cast: between tensors of any strides, and to new ones.
#![forbid(unsafe_code)]

use std::{fmt, iter};

use dlpark::ffi::{DLDataType, DLDevice, DLDeviceType};

use crate::{
    cpu::InstructionSet,
    cuda::Stream,
    device::{Queue, tensors},
    dlpack::{Device, Dtype, Elements, Kind, NewTensor, Outputs, check_apart},
    ffi::{
        error::{Result, error},
        name::Name,
    },
};

use super::{
    cpu, cuda,
    plan::{Conversion, CopyPlan},
};

/// Copies the elements of `src` to `dst`, cast to its dtype and broadcast to its shape.
pub fn copy_into(src: &Elements<'_>, dst: &Elements<'_>, stream: Stream) -> Result<()> {
    let queue = &mut queue_of(dst.device(), src.device(), stream)?;
    copy_by(cpu::copy_among_others, queue, src, dst)
}

/// Like `copy_into`, for memory that no stream of the caller uses. The copy is complete when this returns.
pub fn copy_now(src: &Elements<'_>, dst: &Elements<'_>) -> Result<()> {
    if let (Device::Cuda(from), Device::Cuda(to)) = (src.device(), dst.device())
        && from != to
        && src.elements() > 0
    {
        // The target's stream does not wait for the work that writes the source.
        Queue::of(src.device(), Stream::LEGACY)?.wait_for_all()?;
    }
    let mut queue = queue_of(dst.device(), src.device(), Stream::LEGACY)?;
    // Waits for the enqueued work also after a failure, because the caller then frees memory that the work uses.
    copy_on(&mut queue, src, dst).and(queue.wait())
}

/// Copies in the order of a queue on the target's device. Bytes that elements share are written completely.
pub fn copy_on(queue: &mut Queue, src: &Elements<'_>, dst: &Elements<'_>) -> Result<()> {
    copy_by(cpu::copy, queue, src, dst)
}

/// Checks a copy and does it. `on_cpu`: function for a copy with both sides on the CPU.
fn copy_by(on_cpu: OnCpu, queue: &mut Queue, src: &Elements<'_>, dst: &Elements<'_>) -> Result<()> {
    let conversion = conversion(src, dst)?;
    check_shapes(src, dst)?;
    let bytes = if conversion.is_none() { Some(packed(src, dst)?) } else { None };
    dst.check_no_self_overlap()?;
    let plan = plan(src, dst, conversion.unwrap_or(Conversion::Bytes(1)), bytes);
    if plan.loops.count() == 0 || stays(&plan, src, dst) {
        return Ok(());
    }
    check_apart(dst.name(), &dst.extent(), src.name(), &src.extent())?;
    match queue {
        Queue::Cpu => {
            on_cpu(&plan, src, dst);
            Ok(())
        }
        Queue::Cuda(queue) => cuda::copy(queue, &plan, src, dst, cpu::copy_at),
    }
}

type OnCpu = fn(&CopyPlan, &Elements<'_>, &Elements<'_>);

/// Returns a compact copy on this device.
pub fn to_device(src: &Elements<'_>, device: DLDevice) -> Result<Outputs> {
    let name = Name::new("device");
    let target = Device::from_dlpack(&name, device)?;
    if !matches!(device.device_type, DLDeviceType::CPU | DLDeviceType::CUDA) {
        return Err(error!(
            UnsupportedDevice,
            "{name}: device type {}; copies are made on CPU 1 and CUDA 2, and gc_copy_into writes to your memory of the others",
            device.device_type.0
        ));
    }
    let bytes = tensors::bytes_of(src.name(), src.shape(), src.bits())?;
    // A source on a device that does not exist may have any size. Refuse it before memory is allocated.
    Queue::of(src.device(), Stream::LEGACY)?;
    let memory = Queue::of(target, Stream::LEGACY)?.allocate(bytes)?;
    let copy = NewTensor::over(memory, target, src.dtype(), src.shape())?;
    copy_now(src, &copy.elements()?)?;
    Ok(copy.finished())
}

/// Returns the queue of the target's device, or of the source's device if the target is host memory.
fn queue_of(target: Device, source: Device, stream: Stream) -> Result<Queue> {
    if target == Device::Cpu || source == Device::Cpu {
        InstructionSet::check()?;
    }
    Queue::of(if target == Device::Cpu { source } else { target }, stream)
}

/// Returns sizes and strides of both sides, the target's first, with `src` broadcast to the shape of `dst`.
fn broadcast(src: &Elements<'_>, dst: &Elements<'_>) -> impl Iterator<Item = ((i64, i64), (i64, i64))> + Clone {
    let (from, to) = (src.dims(), dst.dims());
    let (more, fewer) = (from.len().saturating_sub(to.len()), to.len().saturating_sub(from.len()));
    to.zip(iter::repeat_n((1, 0), fewer).chain(from.skip(more)))
}

fn check_shapes(src: &Elements<'_>, dst: &Elements<'_>) -> Result<()> {
    let more = src.dims().len().saturating_sub(dst.dims().len());
    let fits = src.dims().take(more).all(|(size, _)| size == 1)
        && broadcast(src, dst).all(|((size, _), (src_size, _))| src_size == size || src_size == 1);
    if fits {
        return Ok(());
    }
    Err(error!(
        ShapeMismatch,
        "{}: shape {} cannot be broadcast to that of {}, {}",
        src.name(),
        src.shape(),
        dst.name(),
        dst.shape()
    ))
}

/// Makes the plan for shapes that fit. `bytes`: total bytes if elements share bytes, which are copied whole; else None.
fn plan(src: &Elements<'_>, dst: &Elements<'_>, conversion: Conversion, bytes: Option<i64>) -> CopyPlan {
    if let Some(bytes) = bytes {
        return CopyPlan::new(conversion, iter::once((bytes, [1, 1])));
    }
    let [to, from] = conversion.sizes();
    // The stride of a size of 1 may have any value.
    let dims = broadcast(src, dst).map(|((size, target), (src_size, source))| {
        (size, [target.wrapping_mul(to), if src_size == 1 { 0 } else { source.wrapping_mul(from) }])
    });
    CopyPlan::new(conversion, dims)
}

/// Returns the conversion of an element; None if elements share bytes.
fn conversion(src: &Elements<'_>, dst: &Elements<'_>) -> Result<Option<Conversion>> {
    let (from, to) = (src.dtype(), dst.dtype());
    if from == to {
        let bits = src.bits();
        return Ok(bits.is_multiple_of(8).then(|| Conversion::Bytes(i64::from(bits / 8))));
    }
    let [Ok(from), Ok(to)] = [(src, from), (dst, to)].map(|(side, dtype)| Dtype::from_dlpack(side.name(), dtype))
    else {
        return Err(error!(
            UnsupportedDtype,
            "{}: {} cannot be made of {} of {}; casts are between bool, integers, float16, bfloat16, float32 and \
             float64, others are copied as they are",
            dst.name(),
            Words(to),
            Words(from),
            src.name()
        ));
    };
    let integers = [from, to].iter().all(|dtype| matches!(dtype.kind, Kind::Int | Kind::Uint));
    // Integers wrap, so integers of the same width have the same bytes.
    Ok(Some(if integers && from.size == to.size {
        Conversion::Bytes(to.size as i64)
    } else {
        Conversion::Cast { from, to }
    }))
}

/// Checks elements that share bytes, and returns their bytes.
fn packed(src: &Elements<'_>, dst: &Elements<'_>) -> Result<i64> {
    for side in [src, dst] {
        if !side.is_contiguous() {
            return Err(error!(
                NotContiguous,
                "{}: elements of {} bits, packed: C-contiguous expected, got strides {} with shape {}",
                side.name(),
                side.bits(),
                side.strides(),
                side.shape()
            ));
        }
    }
    if src.elements() != dst.elements() {
        return Err(error!(
            ShapeMismatch,
            "{}: shape {} expected, got {}; elements of {} bits, packed, cannot be broadcast",
            src.name(),
            dst.shape(),
            src.shape(),
            src.bits()
        ));
    }
    tensors::bytes_of(dst.name(), dst.shape(), dst.bits())
}

/// Returns true if every element would be copied onto itself.
fn stays(plan: &CopyPlan, src: &Elements<'_>, dst: &Elements<'_>) -> bool {
    let same = |[target, source]: [i64; 2]| target == source;
    matches!(plan.conversion, Conversion::Bytes(_))
        && src.data() == dst.data()
        && same(plan.starts)
        && plan.loops.as_slice().iter().all(|item| same(item.strides))
}

/// Dtype as text for messages, known or not.
struct Words(DLDataType);

impl fmt::Display for Words {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DLDataType { code, bits, lanes } = self.0;
        match Dtype::from_dlpack(&Name::new("dtype"), self.0) {
            Ok(dtype) => dtype.fmt(out),
            Err(_) => write!(out, "dtype ({}, {bits}, {lanes})", code.0),
        }
    }
}
