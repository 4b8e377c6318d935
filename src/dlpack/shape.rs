//! The shape of a tensor to be.

use std::fmt;

use crate::ffi::{
    error::{Result, error},
    name::Name,
};

/// The dimensions of another tensor, one of them possibly of another length.
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

    /// The number of elements: no dimension negative, the product within 63 bits.
    #[inline(always)]
    pub fn elements(self, name: &Name) -> Result<i64> {
        // A 0 may come after sizes whose product is too large.
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

    /// The product of all sizes, of which 0 counts as 1, as in NumPy and torch. Beside a 0 the others may overflow: then it
    /// is 0, for any strides will do.
    pub(super) fn span(self) -> i64 {
        self.iter().try_fold(1i64, |product, size| product.checked_mul(size.max(1))).unwrap_or(0)
    }

    /// Size and stride, in elements, of each dimension when the elements lie in C order without gaps.
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
