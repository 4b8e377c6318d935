//! Division on the device by a number that is known here.

use crate::plan::loops::Loop;

use super::layout::{kernel_structs, same_layout};

kernel_structs! {
    /// A number to divide by, as kernels/divisor.cuh declares it: the kernels multiply.
    #[derive(Clone, Copy)]
    pub struct Divisor: gc_divisor {
        by: u64,
        reciprocal: u64,
    }
}

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

/// A loop of a plan, which the kernels of each source declare as a struct of their own.
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

    /// Puts loops into the first of these places, of which there are enough. The result says how many they were.
    pub fn put(places: &mut [Self], loops: impl Iterator<Item = Loop<SIDES>>) -> u32 {
        let filled = places.iter_mut().zip(loops).map(|(place, Loop { count, strides })| {
            *place = Self { count: Divisor::new(count as u64), strides };
        });
        filled.count() as u32
    }
}

kernel_structs! {
    /// Division of less than 2^31 by a constant: a multiplication and a shift.
    #[derive(Clone, Copy, Default)]
    pub struct Division: gc_division {
        pub count: u32,
        multiplier: u32,
        shift: u32,
        reserved: u32,
    }
}

impl Division {
    /// By 1 to 2^31 - 1. The multiplier is 2^shift / count, rounded up: too much by less than 2^(shift - 31) / count,
    /// and so is a quotient by less than 1 / count, which changes none.
    pub fn by(count: i64) -> Self {
        let shift = 31 + (count as u64).next_power_of_two().ilog2();
        let multiplier = (1u64 << shift).div_ceil(count as u64) as u32;
        Self { count: count as u32, multiplier, shift, reserved: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::grid::MOST_BLOCKS;

    #[test]
    fn a_division_is_exact_below_2_to_the_31() {
        let counts = [1, 2, 3, 5, 7, 10, 25, 641, 65_535, 65_537, 1_000_003, (1 << 30) + 1, MOST_BLOCKS];
        for count in counts {
            let by = Division::by(count);
            let around = |at: i64| [at - 1, at, at + 1];
            let numbers =
                [0, MOST_BLOCKS, MOST_BLOCKS / count * count, MOST_BLOCKS / 2 / count * count, count, 2 * count];
            for number in numbers.into_iter().flat_map(around).filter(|number| (0..=MOST_BLOCKS).contains(number)) {
                let quotient = (number as u64 * u64::from(by.multiplier)) >> by.shift;
                assert_eq!(quotient, (number / count) as u64, "{number} / {count}");
            }
        }
    }
}
