//! Shapes of tensors, also of new ones.

use std::fmt;

use crate::ffi::{
    error::{Result, error},
    name::Name,
};

/// Dimensions of another tensor, possibly with one of them changed.
#[derive(Clone, Copy)]
pub struct Shape<'a> {
    pub sizes: &'a [i64],
    pub changed: Option<(usize, i64)>,
}

impl<'a> Shape<'a> {
    pub fn of(sizes: &'a [i64]) -> Self {
        Self { sizes, changed: None }
    }

    pub fn ndim(&self) -> usize {
        self.sizes.len()
    }

    pub fn iter(self) -> impl ExactSizeIterator<Item = i64> + Clone + 'a {
        let Self { sizes, changed } = self;
        sizes.iter().enumerate().map(move |(axis, &size)| match changed {
            Some((changed, length)) if changed == axis => length,
            _ => size,
        })
    }

    /// Returns the number of elements. Refuses a negative dimension, and a product of more than 63 bits.
    #[inline(always)]
    pub fn elements(self, name: &Name) -> Result<i64> {
        // A 0 may follow sizes whose product is too large.
        let (mut product, mut empty) = (Some(1i64), false);
        for (axis, size) in self.iter().enumerate() {
            if size < 0 {
                return Err(error!(InvalidArgument, "{name}: dimension {axis} is negative, {size}"));
            }
            empty |= size == 0;
            product = product.and_then(|product| product.checked_mul(size));
        }
        if empty {
            return Ok(0);
        }
        product.ok_or_else(|| error!(SizeOverflow, "{name}: shape {self} has more than 2^63 - 1 elements"))
    }

    /// Returns the product of all sizes, with 0 counted as 1, as in NumPy and torch. If the product overflows beside a
    /// size of 0, it returns 0, since any strides are valid then.
    pub(super) fn span(self) -> i64 {
        self.iter().try_fold(1i64, |product, size| product.checked_mul(size.max(1))).unwrap_or(0)
    }

    /// Returns size and stride, in elements, of each dimension if the elements lie in C order without gaps.
    pub fn compact(self) -> impl ExactSizeIterator<Item = (i64, i64)> + Clone + 'a {
        let mut stride = self.span();
        self.iter().map(move |size| {
            stride /= size.max(1);
            (size, stride)
        })
    }
}

impl fmt::Display for Shape<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_list().entries(self.iter()).finish()
    }
}
