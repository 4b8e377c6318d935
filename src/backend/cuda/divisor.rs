//! Division on the device by a number that is known here.

use super::layout::same_layout;

/// A number to divide by, as kernels/divisor.cuh declares it: the kernels multiply.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Divisor {
    by: u64,
    reciprocal: u64,
}

same_layout!(gc_divisor, Divisor { by, reciprocal });

impl Divisor {
    /// 0 is for no division at all.
    pub const fn new(by: u64) -> Self {
        Self {
            by,
            reciprocal: match u64::MAX.checked_div(by) {
                Some(reciprocal) => reciprocal,
                None => 0,
            },
        }
    }

    pub const fn by(self) -> u64 {
        self.by
    }
}
