//! A tensor whose elements nobody here reads: of any dtype and any device.

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

/// How far elements of so many bits reach, in bits, before the beginning of the first and behind it: of sizes that are not 0,
/// each with its stride.
///
/// As 128-bit integers: a product of two 64-bit ones and a 24-bit one fits, so sums of as many as there can be do not overflow
/// unless they are far beyond what is allowed.
pub fn reach(dims: impl Iterator<Item = (i64, i64)>, bits: i128) -> (i128, i128) {
    let (mut low, mut high) = (0i128, bits);
    for (count, stride) in dims {
        let reach = i128::from(count - 1) * i128::from(stride);
        let end = if reach < 0 { &mut low } else { &mut high };
        *end = end.saturating_add(reach.saturating_mul(bits));
    }
    (low, high)
}

/// A borrowed descriptor that holds together: dimensions not negative, the element count within 63 bits, an element of at
/// least one bit and, on the devices of ours, every element within the address space.
///
/// Elsewhere `data` may be a handle that is no address (OpenCL's, Metal's), so it is passed on as it is.
#[derive(Clone, Copy)]
pub struct Described<'a> {
    /// As it came in, but for `data` and `byte_offset`, which are one where that is an address.
    pub tensor: DLTensor,
    shape: &'a [i64],
    strides: Option<&'a [i64]>,
    elements: i64,
    /// Addresses from the lowest to past the highest byte; empty where there is no element, or `data` is no address.
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

    /// The addresses from the lowest to past the highest byte of any element; none where there is no element.
    pub fn extent(&self) -> Range<usize> {
        self.extent.0..self.extent.1
    }

    pub fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Size and stride (in elements) of each dimension, outermost first.
    pub fn dims(&self) -> impl ExactSizeIterator<Item = (i64, i64)> + Clone + 'a {
        dims(self.shape, self.strides)
    }
}
