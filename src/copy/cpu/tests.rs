//! Every instruction set copies and casts alike, and to the byte what a model does.

use std::ops::Range;

use crate::{
    copy::plan::{Conversion, CopyPlan},
    cpu::InstructionSet,
    dlpack::{Dtype, Kind, floats},
};

use super::copy_with;

fn noise(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

fn below(state: &mut u64, range: Range<i64>) -> i64 {
    range.start + (noise(state) >> 8) as i64 % (range.end - range.start)
}

const DTYPES: [Dtype; 13] = {
    const fn dtype(kind: Kind, size: usize) -> Dtype {
        Dtype { kind, size }
    }
    use Kind::{Bfloat, Bool, Float, Int, Uint};
    [
        dtype(Bool, 1),
        dtype(Int, 1),
        dtype(Int, 2),
        dtype(Int, 4),
        dtype(Int, 8),
        dtype(Uint, 1),
        dtype(Uint, 2),
        dtype(Uint, 4),
        dtype(Uint, 8),
        dtype(Float, 2),
        dtype(Bfloat, 2),
        dtype(Float, 4),
        dtype(Float, 8),
    ]
};

/// A number as whole numbers: sign, count and exponent of 2. None: Inf; NaN is apart.
enum Number {
    NaN,
    Infinite { negative: bool },
    Finite { negative: bool, count: u64, exponent: i32 },
}

/// Bits of a significand, the first counted, the least exponent of a normal number, and that of Inf.
fn format(dtype: Dtype) -> (u32, i32, i32) {
    match dtype {
        Dtype::F16 => (11, -14, 16),
        Dtype::BF16 => (8, -126, 128),
        Dtype::F32 => (24, -126, 128),
        _ => (53, -1022, 1024),
    }
}

fn read(bits: u64, dtype: Dtype) -> Number {
    let width = 8 * dtype.size as u32;
    match dtype.kind {
        Kind::Bool => Number::Finite { negative: false, count: u64::from(bits != 0), exponent: 0 },
        Kind::Uint => Number::Finite { negative: false, count: bits, exponent: 0 },
        Kind::Int => {
            let value = (bits << (64 - width)) as i64 >> (64 - width);
            Number::Finite { negative: value < 0, count: value.unsigned_abs(), exponent: 0 }
        }
        Kind::Float | Kind::Bfloat => {
            let (digits, least, _) = format(dtype);
            let negative = bits >> (width - 1) == 1;
            let size = bits & ((1 << (width - 1)) - 1);
            let (place, rest) = (size >> (digits - 1), size & ((1 << (digits - 1)) - 1));
            let highest = (1 << (width - digits)) - 1;
            match place {
                _ if place == highest && rest != 0 => Number::NaN,
                _ if place == highest => Number::Infinite { negative },
                0 => Number::Finite { negative, count: rest, exponent: least - digits as i32 + 1 },
                _ => {
                    let exponent = place as i32 - 1 + least - digits as i32 + 1;
                    Number::Finite { negative, count: rest | 1 << (digits - 1), exponent }
                }
            }
        }
    }
}

/// The rules of the header, in whole numbers.
fn write(number: Number, dtype: Dtype) -> u64 {
    let width = 8 * dtype.size as u32;
    let all = u64::MAX >> (64 - width);
    match (dtype.kind, number) {
        (Kind::Bool, Number::Finite { count, .. }) => u64::from(count != 0),
        (Kind::Bool, _) => 1,
        (Kind::Int | Kind::Uint, Number::NaN) => 0,
        (Kind::Int | Kind::Uint, number) => {
            let (negative, size) = match number {
                Number::Finite { negative, count, exponent } => {
                    let size = match exponent {
                        0.. if exponent < 64 => u128::from(count) << exponent,
                        0.. if count == 0 => 0,
                        0.. => u128::MAX,
                        -63.. => u128::from(count >> -exponent),
                        _ => 0,
                    };
                    (negative, size)
                }
                Number::Infinite { negative } => (negative, u128::MAX),
                Number::NaN => unreachable!(),
            };
            let most = if dtype.kind == Kind::Int { all >> 1 } else { all };
            if !negative {
                size.min(u128::from(most)) as u64
            } else if dtype.kind == Kind::Int {
                (size.min(u128::from(most) + 1) as u64).wrapping_neg() & all
            } else {
                0
            }
        }
        (_, Number::NaN) => {
            let (digits, ..) = format(dtype);
            (all >> 1) & !((1 << (digits - 2)) - 1)
        }
        (_, number) => {
            let (digits, least, highest) = format(dtype);
            let infinity = ((highest - least + 1) as u64) << (digits - 1);
            let (negative, size) = match number {
                Number::Infinite { negative } => (negative, infinity),
                Number::Finite { negative, count: 0, .. } => (negative, 0),
                Number::Finite { negative, count, exponent } => {
                    let top = exponent + 63 - count.leading_zeros() as i32;
                    let unit = top.max(least) - digits as i32 + 1;
                    let wide = u128::from(count) << 60;
                    let down = unit - exponent + 60;
                    let counted = match down {
                        0..=127 => {
                            let (whole, rest) = (wide >> down, wide & ((1 << down) - 1));
                            let half = if down == 0 { u128::MAX } else { 1 << (down - 1) };
                            whole + u128::from(rest > half || (rest == half && whole & 1 == 1))
                        }
                        128.. => 0,
                        _ => u128::from(count) << (exponent - unit),
                    };
                    let size = counted as i128 + (i128::from(unit + digits as i32 - 1 - least) << (digits - 1));
                    (negative, size.min(i128::from(infinity)) as u64)
                }
                Number::NaN => unreachable!(),
            };
            size | u64::from(negative) << (width - 1)
        }
    }
}

/// What becomes of an element of these bits.
fn cast(bits: u64, from: Dtype, to: Dtype) -> u64 {
    let integer = |dtype: Dtype| matches!(dtype.kind, Kind::Int | Kind::Uint);
    if integer(from) && integer(to) {
        let up = 64 - 8 * from.size as u32;
        let wide = if from.kind == Kind::Int { ((bits << up) as i64 >> up) as u64 } else { bits };
        return wide & u64::MAX >> (64 - 8 * to.size as u32);
    }
    write(read(bits, from), to)
}

fn at(memory: &[u8], place: usize, size: usize) -> u64 {
    let mut word = [0; 8];
    word[..size].copy_from_slice(&memory[place..place + size]);
    u64::from_le_bytes(word)
}

/// Bits at which casts go wrong: any, and such as are near whole numbers, powers of two and what is not finite.
fn element(state: &mut u64, dtype: Dtype) -> u64 {
    let width = 8 * dtype.size as u32;
    let any = noise(state);
    let bits = match any % 4 {
        0 => any >> 3,
        1 => (1u64 << (any >> 8 & 63)).wrapping_add(any >> 20 & 7).wrapping_sub(3) ^ ((any >> 40 & 1) << 63),
        2 => floats::to_f64((any >> 8 & 0x3ff) as f32 / 8.0 - 40.0) >> (64 - width),
        _ => any & any >> 13 & any >> 29,
    };
    bits & u64::MAX >> (64 - width)
}

#[test]
fn the_model_rounds_as_the_processor() {
    let state = &mut 5;
    for _ in 0..100_000 {
        let (wide, whole) = (noise(state), noise(state) >> (noise(state) & 63));
        let number = f64::from_bits(wide);
        let expected = if number.is_nan() { 0x7fc0_0000 } else { (number as f32).to_bits() };
        assert_eq!(cast(wide, Dtype::F64, Dtype::F32), u64::from(expected), "{number:e}");
        assert_eq!(cast(whole, DTYPES[8], Dtype::F32), u64::from((whole as f32).to_bits()));
        assert_eq!(cast(whole, DTYPES[4], Dtype::F32), u64::from((whole as i64 as f32).to_bits()));
        assert_eq!(cast(wide, Dtype::F64, DTYPES[4]), number as i64 as u64);
        let single = f32::from_bits(wide as u32);
        assert_eq!(cast(wide & 0xffff_ffff, Dtype::F32, Dtype::F16), u64::from(floats::to_f16(single)));
        assert_eq!(cast(wide & 0xffff_ffff, Dtype::F32, Dtype::BF16), u64::from(floats::to_bf16(single)));
        assert_eq!(cast(wide & 0xffff_ffff, Dtype::F32, DTYPES[6]), u64::from(single as u16));
    }
}

#[test]
fn every_set_casts_as_the_model() {
    let state = &mut 11;
    let count = 3000;
    for (from, to) in DTYPES.iter().flat_map(|&from| DTYPES.map(|to| (from, to))).filter(|(from, to)| from != to) {
        let elements: Vec<u64> = (0..count).map(|_| element(state, from)).collect();
        let src: Vec<u8> = elements.iter().flat_map(|bits| bits.to_le_bytes()[..from.size].to_vec()).collect();
        let plan = CopyPlan::new(
            Conversion::Cast { from, to },
            std::iter::once((count as i64, [to.size as i64, from.size as i64])),
        );
        for set in InstructionSet::available() {
            let mut dst = vec![0; count * to.size];
            // SAFETY: so many elements are in both.
            unsafe { copy_with(set, &plan, src.as_ptr(), dst.as_mut_ptr()) };
            for (index, &bits) in elements.iter().enumerate() {
                let found = at(&dst, index * to.size, to.size);
                assert_eq!(found, cast(bits, from, to), "{bits:#x} of {from} as {to}, {}", set.name());
            }
        }
    }
}

/// Loops of some counts, with strides that keep elements apart: in an order, each way, with gaps.
fn strides(state: &mut u64, counts: &[i64], size: i64, repeats: bool) -> (Vec<i64>, i64, i64) {
    let mut order: Vec<usize> = (0..counts.len()).collect();
    for index in (1..order.len()).rev() {
        order.swap(index, below(state, 0..index as i64 + 1) as usize);
    }
    let (mut strides, mut step, mut low) = (vec![0; counts.len()], size, 0);
    for axis in order {
        step += size * [0, 0, 0, 1, 5][below(state, 0..5) as usize];
        strides[axis] = if below(state, 0..4) == 0 { -step } else { step };
        if repeats && below(state, 0..4) == 0 {
            strides[axis] = 0;
            continue;
        }
        low += (counts[axis] - 1) * strides[axis].min(0);
        step *= counts[axis];
    }
    (strides, low, step)
}

#[test]
fn every_set_copies_each_element_to_its_place_and_nothing_else() {
    let state = &mut 17;
    for round in 0..3000 {
        let conversion = match below(state, 0..3) {
            0 => {
                let pair = [0; 2].map(|_| DTYPES[below(state, 0..13) as usize]);
                if pair[0] == pair[1] { continue } else { Conversion::Cast { from: pair[0], to: pair[1] } }
            }
            _ => Conversion::Bytes([1, 2, 4, 8, 16, 3, 12][below(state, 0..7) as usize]),
        };
        let most = [3, 20, 70, 140, 600][below(state, 0..5) as usize];
        let mut counts = Vec::new();
        let mut left = 20_000;
        for _ in 0..below(state, 0..5) {
            let count = below(state, 1..most.min(left) + 1);
            left /= count;
            counts.push(count);
        }
        let [to, from] = conversion.sizes();
        let (targets, target_low, target_bytes) = strides(state, &counts, to, false);
        let (sources, source_low, source_bytes) = strides(state, &counts, from, true);
        let pad = below(state, 0..9) as usize;
        let src: Vec<u8> = (0..source_bytes as usize + pad).map(|_| noise(state) as u8).collect();
        let before: Vec<u8> = (0..target_bytes as usize + pad).map(|_| noise(state) as u8).collect();
        let first = |low: i64| (pad as i64 - low) as usize;
        let (source_first, target_first) = (first(source_low), first(target_low));
        let dims: Vec<_> = (0..counts.len()).map(|axis| (counts[axis], [targets[axis], sources[axis]])).collect();
        let plan = CopyPlan::new(conversion, dims.iter().copied());

        let mut expected = before.clone();
        let mut index = vec![0; counts.len()];
        for _ in 0..counts.iter().product() {
            let place = |first: usize, side: usize| {
                let steps = index.iter().zip(&dims).map(|(at, (_, strides))| at * strides[side]);
                (first as i64 + steps.sum::<i64>()) as usize
            };
            let (to_place, from_place) = (place(target_first, 0), place(source_first, 1));
            match conversion {
                Conversion::Bytes(size) => {
                    expected[to_place..][..size as usize].copy_from_slice(&src[from_place..][..size as usize]);
                }
                Conversion::Cast { from, to } => {
                    let made = cast(at(&src, from_place, from.size), from, to);
                    expected[to_place..][..to.size].copy_from_slice(&made.to_le_bytes()[..to.size]);
                }
            }
            for axis in (0..counts.len()).rev() {
                index[axis] += 1;
                if index[axis] < counts[axis] {
                    break;
                }
                index[axis] = 0;
            }
        }
        for set in InstructionSet::available() {
            let mut dst = before.clone();
            // SAFETY: within the memory.
            let (from, to) = unsafe { (src.as_ptr().add(source_first), dst.as_mut_ptr().add(target_first)) };
            // SAFETY: the plan's sides lie within the two.
            unsafe { copy_with(set, &plan, from, to) };
            assert!(dst == expected, "round {round}, {}: {plan:?}", set.name());
        }
    }
}
