//! Tensors whose elements are not read: of any dtype and any device.

use std::ops::Range;

use dlpark::ffi::DLTensor;

use crate::ffi::{
    error::{Result, error},
    name::Name,
};

use super::{
    dtype::element_bits,
    shape::Shape,
    view::{Device, Strides, dims, integers},
};

/// Returns the range of bits that elements of `bits` bits cover, relative to the first bit of element 0. `dims`: size,
/// not 0, and stride of each dimension.
///
/// The range is in 128-bit integers: a product of two 64-bit integers and a 24-bit one fits, and sums of them overflow
/// only far beyond the limits.
pub fn reach(dims: impl Iterator<Item = (i64, i64)>, bits: i128) -> (i128, i128) {
    let (mut low, mut high) = (0i128, bits);
    for (count, stride) in dims {
        let reach = i128::from(count - 1) * i128::from(stride);
        let end = if reach < 0 { &mut low } else { &mut high };
        *end = end.saturating_add(reach.saturating_mul(bits));
    }
    (low, high)
}

/// Borrowed, valid descriptor: no dimension is negative, the element count fits 63 bits, an element has at least one
/// bit, and on supported devices every element lies within the address space.
///
/// On other devices `data` may be a handle that is no address (OpenCL's, Metal's), so it stays as given.
#[derive(Clone, Copy)]
pub struct Described<'a> {
    /// Descriptor as given, except that `byte_offset` is added to `data` if `data` is an address.
    pub tensor: DLTensor,
    shape: &'a [i64],
    strides: Option<&'a [i64]>,
    elements: i64,
    /// Addresses from the lowest to past the highest byte; empty if there is no element, or if `data` is no address.
    extent: (usize, usize),
}

impl<'a> Described<'a> {
    /// Validates a descriptor.
    ///
    /// # Safety
    /// For `'a`: `shape`, and `strides` unless NULL, point at `ndim` integers that do not change.
    pub unsafe fn from_dlpack(name: &Name, tensor: &DLTensor) -> Result<Self> {
        // SAFETY: `shape`, and `strides` unless NULL, have `ndim` integers for `'a`.
        let (shape, strides) = unsafe { integers(name, tensor)? };
        let elements = Shape::of(shape).elements(name)?;
        let bits = i128::from(element_bits(name, tensor.dtype)?);
        let mut tensor = *tensor;
        if elements == 0 {
            (tensor.data, tensor.byte_offset) = (std::ptr::null_mut(), 0);
            return Ok(Self { tensor, shape, strides, elements, extent: (0, 0) });
        }
        if tensor.data.is_null() {
            return Err(error!(InvalidArgument, "{name}: data is NULL, with {elements} elements"));
        }
        let (low, high) = reach(dims(shape, strides), bits);
        let start = if Device::from_dlpack(name, tensor.device).is_ok() { tensor.data.addr() } else { 0 };
        let first = start as i128 + i128::from(tensor.byte_offset);
        let fits = |bits: i128| (0..=i128::from(u64::MAX)).contains(&(first + bits.div_euclid(8)));
        if high.saturating_sub(low) > 8 * i128::from(i64::MAX) || (start > 0 && !(fits(low) && fits(high + 7))) {
            return Err(error!(
                SizeOverflow,
                "{name}: shape {} of {bits}-bit elements with strides {} and byte_offset {} reaches past the address space",
                Shape::of(shape),
                Strides(strides),
                tensor.byte_offset
            ));
        }
        let mut extent = (0, 0);
        if start > 0 {
            tensor.data = tensor.data.wrapping_byte_add(tensor.byte_offset as usize);
            tensor.byte_offset = 0;
            let address = |bits: i128| (first + bits.div_euclid(8)) as usize; // it fits
            extent = (address(low), address(high + 7));
        }
        Ok(Self { tensor, shape, strides, elements, extent })
    }

    pub fn shape(&self) -> &'a [i64] {
        self.shape
    }

    pub fn strides(&self) -> Option<&'a [i64]> {
        self.strides
    }

    pub fn elements(&self) -> i64 {
        self.elements
    }

    /// Returns the addresses from the lowest to past the highest byte of any element; empty if there is no element.
    pub fn extent(&self) -> Range<usize> {
        self.extent.0..self.extent.1
    }

    pub fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// Returns true if there is no element.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Size and stride (in elements) of each dimension, outermost first.
    pub fn dims(&self) -> impl ExactSizeIterator<Item = (i64, i64)> + Clone + 'a {
        dims(self.shape, self.strides)
    }
}
