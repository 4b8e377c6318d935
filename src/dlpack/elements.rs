//! A tensor of any dtype whose elements are copied: what they are matters only where they are cast.

use std::{fmt, ops::Range, ptr};

use dlpark::ffi::{DLDataType, DLDeviceType, DLTensor};

use crate::ffi::{error::Result, name::Name};

use super::{
    described::Described,
    dtype::element_bits,
    shape::Shape,
    view::{Device, Strides, check_places, is_compact},
};

/// A borrowed tensor on a device of ours, whose descriptor holds together.
///
/// That the memory is there, and that nobody else writes it, was the caller's promise when this was made.
pub struct Elements<'a> {
    name: Name,
    device: Device,
    pinned: bool,
    bits: u32,
    contiguous: bool,
    described: Described<'a>,
}

impl<'a> Elements<'a> {
    /// Refuses devices that are not ours.
    ///
    /// # Safety
    /// For `'a`, and on CUDA until the stream has done what it is used for: the elements that are described are memory of
    /// that device, which nobody else writes (nor reads, if the tensor is an output).
    pub unsafe fn new(name: &Name, described: Described<'a>) -> Result<Self> {
        let device = Device::from_dlpack(name, described.tensor.device)?;
        let bits = element_bits(name, described.tensor.dtype)?;
        let contiguous = described.elements() == 0 || is_compact(described.shape(), described.strides());
        let pinned = described.tensor.device.device_type == DLDeviceType::CUDAHOST;
        Ok(Self { name: *name, device, pinned, bits, contiguous, described })
    }

    /// A compact tensor in memory that is not a tensor of the caller's.
    ///
    /// # Safety
    /// As for [`Self::new`]: `data` is where the elements are, or NULL if there is none.
    pub unsafe fn of_memory(
        name: &Name, device: Device, dtype: DLDataType, shape: &'a [i64], data: *mut u8,
    ) -> Result<Self> {
        let tensor = DLTensor {
            data: data.cast(),
            device: device.to_dlpack(),
            ndim: shape.len() as i32,
            dtype,
            shape: shape.as_ptr().cast_mut(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        // SAFETY: the shape is a slice; the rest is the caller's promise.
        unsafe { Self::new(name, Described::from_dlpack(name, &tensor)?) }
    }

    pub fn name(&self) -> &Name {
        &self.name
    }

    pub fn device(&self) -> Device {
        self.device
    }

    /// CUDAHost memory: the CPU's, where CUDA can write too.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    pub fn dtype(&self) -> DLDataType {
        self.described.tensor.dtype
    }

    /// Bits of an element, lanes counted in.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    pub fn shape(&self) -> Shape<'a> {
        Shape::of(self.described.shape())
    }

    /// The strides in words: as given, or that there are none.
    pub fn strides(&self) -> impl fmt::Display + 'a {
        Strides(self.described.strides())
    }

    pub fn elements(&self) -> i64 {
        self.described.elements()
    }

    /// Size and stride (in elements) of each dimension, outermost first.
    pub fn dims(&self) -> impl ExactSizeIterator<Item = (i64, i64)> + Clone + 'a {
        self.described.dims()
    }

    /// Element 0; NULL when empty.
    pub fn data(&self) -> *mut u8 {
        self.described.tensor.data.cast()
    }

    /// C-contiguous: sizes of 1 may carry any stride, and a tensor without elements always is.
    pub fn is_contiguous(&self) -> bool {
        self.contiguous
    }

    /// The addresses from the lowest to past the highest byte of any element.
    pub fn extent(&self) -> Range<usize> {
        self.described.extent()
    }

    /// Refuses an output two of whose elements share a place.
    pub fn check_places(&self) -> Result<()> {
        let described = &self.described;
        check_places(&self.name, described.shape(), described.strides(), described.elements(), self.contiguous)
    }
}
