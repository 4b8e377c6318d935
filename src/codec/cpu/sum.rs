//! Sums in the specification's order: columns of float32 within a unit, a tree of float64 above.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    codec::plan::{ScaleRule, UNIT},
    dlpack::floats::canonical,
};

pub const UNIT_ELEMENTS: usize = UNIT as usize;

/// Number of units that one thread sums: a power of two, so that their sum is a node of the tree.
pub const TILE_UNITS: usize = 64;

/// Elements of a unit, aligned to a cache line for vectors.
#[repr(align(64))]
pub struct Unit(pub [f32; UNIT_ELEMENTS]);

const COLUMNS: usize = 256;

/// Returns the sum of a unit's terms.
#[inline(always)]
pub fn of_unit(unit: &Unit, rule: ScaleRule) -> f32 {
    match rule {
        ScaleRule::Rms => of_terms(unit, |c| c * c),
        ScaleRule::Mean => of_terms(unit, f32::abs),
    }
}

#[inline(always)]
fn of_terms(unit: &Unit, term: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0.0; COLUMNS];
    for (column, sum) in sums.iter_mut().enumerate() {
        let row = |row: usize| term(unit.0[row * COLUMNS + column]);
        *sum = row(0) + row(1) + row(2) + row(3);
    }
    macro_rules! halves {
        ($($half:literal)*) => {$(
            for column in 0..$half {
                sums[column] += sums[column + $half];
            }
        )*};
    }
    halves!(128 64 32 16 8 4 2 1);
    sums[0]
}

/// Returns the sum of a tile's first `units` units. Absent units are 0 and add nothing, because no sum is -0.
#[inline(always)]
pub fn of_tile(mut sums: [f64; TILE_UNITS], units: usize) -> f64 {
    let mut left = units.next_power_of_two();
    while left > 1 {
        left /= 2;
        for index in 0..left {
            sums[index] = sums[2 * index] + sums[2 * index + 1];
        }
    }
    sums[0]
}

/// Returns the sum of some tiles, and overwrites `partials`. They are atomics because several threads wrote them.
pub fn of_tiles(partials: &[AtomicU64]) -> f64 {
    let get = |index: usize| f64::from_bits(partials[index].load(Ordering::Relaxed));
    let set = |index: usize, sum: f64| partials[index].store(sum.to_bits(), Ordering::Relaxed);
    let mut left = partials.len();
    while left > 1 {
        for index in 0..left / 2 {
            set(index, get(2 * index) + get(2 * index + 1));
        }
        if !left.is_multiple_of(2) {
            set(left / 2, get(left - 1)); // the absent neighbour is 0, and no sum is -0
        }
        left = left.div_ceil(2);
    }
    if partials.is_empty() { 0.0 } else { get(0) }
}

/// Returns the scale of `elements` elements whose terms have this sum.
pub fn scale(rule: ScaleRule, sum: f64, elements: i64) -> f32 {
    if elements == 0 {
        return 0.0;
    }
    let mean = sum / elements as f64;
    canonical(match rule {
        ScaleRule::Rms => mean.sqrt(),
        ScaleRule::Mean => mean,
    } as f32)
}
