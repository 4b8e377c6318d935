//! New tensors.
#![forbid(unsafe_code)]

use dlpark::ffi::DLDataType;

use crate::{
    cuda::Stream,
    dlpack::{Device, Dtype, NewTensors, Outputs, Shape, element_bits},
    ffi::{
        error::{Error, Result, error},
        name::Name,
    },
};

use super::Queue;

/// Creates a compact tensor of any dtype. Its elements are not initialized.
pub fn empty(device: Device, dtype: DLDataType, shape: Shape<'_>) -> Result<Outputs> {
    let bits = element_bits(&Name::new("dtype"), dtype)?;
    let bytes = bytes_of(&Name::new("shape"), shape, bits)?;
    let memory = Queue::of(device, Stream::LEGACY)?.allocate(bytes)?;
    Outputs::over(memory, device, dtype, shape, 1, 0)
}

/// Returns the bytes of a compact tensor of elements of `bits` bits.
pub fn bytes_of(name: &Name, shape: Shape<'_>, bits: u32) -> Result<i64> {
    // The number is at most 2^87, so it fits into 128 bits.
    let bytes = (i128::from(shape.elements(name)?) * i128::from(bits) + 7) / 8;
    i64::try_from(bytes)
        .map_err(|_| error!(SizeOverflow, "{name}: {shape} of {bits}-bit elements exceeds 2^63 - 1 bytes"))
}

/// Allocates `count` compact tensors side by side. The operation whose results they are writes them.
pub fn results(queue: &mut Queue, device: Device, dtype: Dtype, shape: Shape<'_>, count: usize) -> Result<NewTensors> {
    let too_large =
        || -> Error { error!(SizeOverflow, "out: {count} tensors of shape {shape} of {dtype} exceed 2^63 - 1 bytes") };
    let elements = shape.elements(&Name::new("out"))?;
    let bytes = elements.checked_mul(dtype.size as i64).ok_or_else(too_large)?;
    let total = i64::try_from(count).ok().and_then(|count| bytes.checked_mul(count)).ok_or_else(too_large)?;
    NewTensors::over(queue.allocate(total)?, device, dtype, shape, count, total)
}
