//! Tensors of any dtype whose elements are copied. The dtype matters only for casts.

use std::{fmt, ops::Range, ptr};

use dlpark::ffi::{DLDataType, DLDeviceType, DLTensor};

use crate::ffi::{error::Result, name::Name};

use super::{
    described::Described,
    dtype::element_bits,
    shape::Shape,
    view::{Device, Strides, check_no_self_overlap, is_compact},
};

/// Borrowed tensor on a supported device, with a valid descriptor.
///
/// The caller of the constructor promised that the memory exists and that nothing else writes it.
pub struct Elements<'a> {
    name: Name,
    device: Device,
    pinned: bool,
    bits: u32,
    contiguous: bool,
    described: Described<'a>,
}

impl<'a> Elements<'a> {
    /// Makes elements from a valid descriptor. Refuses unsupported devices.
    ///
    /// # Safety
    /// For `'a`, and on CUDA until the stream has done the work on them: the described elements are memory of that
    /// device, which nothing else writes (nor reads, if the tensor is an output).
    pub unsafe fn new(name: &Name, described: Described<'a>) -> Result<Self> {
        let device = Device::from_dlpack(name, described.tensor.device)?;
        let bits = element_bits(name, described.tensor.dtype)?;
        let contiguous = described.elements() == 0 || is_compact(described.shape(), described.strides());
        let pinned = described.tensor.device.device_type == DLDeviceType::CUDAHOST;
        Ok(Self { name: *name, device, pinned, bits, contiguous, described })
    }

    /// Makes elements of a compact tensor in memory that is not a caller's tensor.
    ///
    /// # Safety
    /// See [`Self::new`]. `data` is the address of the elements, or NULL if there is none.
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
        // SAFETY: the shape is a slice for `'a`, and the caller promises the elements.
        unsafe { Self::new(name, Described::from_dlpack(name, &tensor)?) }
    }

    pub fn name(&self) -> &Name {
        &self.name
    }

    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns true for CUDAHost memory, which the CPU works on and CUDA can write too.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    pub fn dtype(&self) -> DLDataType {
        self.described.tensor.dtype
    }

    /// Returns the bits of an element, lanes included.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    pub fn shape(&self) -> Shape<'a> {
        Shape::of(self.described.shape())
    }

    /// Returns the strides as text: as given, or "NULL".
    pub fn strides(&self) -> impl fmt::Display + 'a {
        Strides(self.described.strides())
    }

    pub fn elements(&self) -> i64 {
        self.described.elements()
    }

    /// Returns size and stride (in elements) of each dimension, outermost first.
    pub fn dims(&self) -> impl ExactSizeIterator<Item = (i64, i64)> + Clone + 'a {
        self.described.dims()
    }

    /// Returns the address of element 0; NULL when empty.
    pub fn data(&self) -> *mut u8 {
        self.described.tensor.data.cast()
    }

    /// Returns true if C-contiguous: sizes of 1 may have any stride, and a tensor without elements always is.
    pub fn is_contiguous(&self) -> bool {
        self.contiguous
    }

    /// Returns the addresses from the lowest to past the highest byte of any element.
    pub fn extent(&self) -> Range<usize> {
        self.described.extent()
    }

    /// Refuses an output in which two elements share an address.
    pub fn check_no_self_overlap(&self) -> Result<()> {
        let described = &self.described;
        check_no_self_overlap(&self.name, described.shape(), described.strides(), described.elements(), self.contiguous)
    }
}
