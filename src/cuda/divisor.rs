//! Division on the device by a number that the host sets.

use crate::dlpack::loops::Loop;

use super::layout::{kernel_structs, same_layout};

kernel_structs! {
    /// Divisor as kernels/divisor.cuh declares it: the kernels multiply by its reciprocal.
    #[derive(Clone, Copy)]
    pub struct Divisor: gc_divisor {
        by: u64,
        reciprocal: u64,
    }
}

impl Divisor {
    /// Makes a divisor; 0 stands for no division.
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

/// Loop of a plan. The kernels of each source declare it as a struct of their own.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DividedLoop<const SIDES: usize> {
    pub count: Divisor,
    pub strides: [i64; SIDES],
}

same_layout!(gc_line_loop, DividedLoop<2> { count, strides });
same_layout!(gc_copy_loop, DividedLoop<2> { count, strides });
same_layout!(gc_byte_loop, DividedLoop<1> { count, strides });
same_layout!(gc_sign_loop, DividedLoop<1> { count, strides });

impl<const SIDES: usize> DividedLoop<SIDES> {
    pub const NONE: Self = Self { count: Divisor::new(0), strides: [0; SIDES] };

    /// Puts loops into the first of `places`, which must be enough, and returns their number.
    pub fn put(places: &mut [Self], loops: impl Iterator<Item = Loop<SIDES>>) -> u32 {
        let filled = places.iter_mut().zip(loops).map(|(place, Loop { count, strides })| {
            *place = Self { count: Divisor::new(count as u64), strides };
        });
        filled.count() as u32
    }
}
