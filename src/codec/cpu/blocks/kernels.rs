//! The loops, generic over the instruction set that they are compiled for. The compiler vectorizes them.

#![allow(clippy::extra_unused_type_parameters, reason = "multiversion! names the set of every loop")]

use crate::{
    codec::{
        cpu::{
            sources::{FINITE, Source, magnitude},
            sum::Unit,
        },
        plan::Kind,
    },
    cpu::{
        InstructionSet,
        dispatch::multiversion,
        numbers::{Number, is_kept},
    },
    dlpack::floats::canonical,
};

use super::{
    coding::{Bf16, Coding, Int4, Int8, LIMIT, Mxfp4, Mxfp8},
    payload::{Coded, STEP_BLOCKS},
};

/// Code or scale of 1 or 2 bytes, little-endian.
trait Code: Copy {
    fn of(bits: u32) -> Self;
    fn bits(self) -> u32;
    fn all(bytes: &[u8]) -> &[Self];
    fn all_mut(bytes: &mut [u8]) -> &mut [Self];
}

macro_rules! codes {
    ($($integer:ident)*) => {$(
        impl Code for [u8; size_of::<$integer>()] {
            #[inline(always)]
            fn of(bits: u32) -> Self {
                (bits as $integer).to_le_bytes()
            }
            #[inline(always)]
            fn bits(self) -> u32 {
                $integer::from_le_bytes(self).into()
            }
            #[inline(always)]
            fn all(bytes: &[u8]) -> &[Self] {
                bytes.as_chunks().0
            }
            #[inline(always)]
            fn all_mut(bytes: &mut [u8]) -> &mut [Self] {
                bytes.as_chunks_mut().0
            }
        }
    )*};
}
codes!(u8 u16);

/// Computes the scales and codes of blocks and, if `errors`, replaces c by the errors. Sets a bit for each block that
/// is not finite; its errors are 0.
#[inline(always)]
unsafe fn quantize_on<S, C: Coding>(unit: &mut Unit, blocks: usize, coded: &mut Coded, errors: bool) -> u32 {
    let (mut largest, mut wrong) = ([0; STEP_BLOCKS], 0);
    for (number, c) in unit.0.chunks_exact_mut(C::BLOCK).take(blocks).enumerate() {
        let most = c.iter().fold(0, |most, &c| most.max(magnitude(c)));
        if most < LIMIT {
            largest[number] = most;
        } else {
            wrong |= 1 << number;
            c.fill(0.0);
        }
    }
    let (mut scales, mut inverses, mut steps) = ([0; STEP_BLOCKS], [0.0; STEP_BLOCKS], [0.0; STEP_BLOCKS]);
    for number in 0..STEP_BLOCKS {
        scales[number] = C::scale_for(f32::from_bits(largest[number]));
        inverses[number] = C::inverse(scales[number]);
        steps[number] = C::step(scales[number]);
    }
    let scaling = [inverses, steps];
    match (C::BITS, errors) {
        (16, true) => code_blocks::<C, [u8; 2], true>(unit, blocks, &scaling, &mut coded.codes),
        (16, false) => code_blocks::<C, [u8; 2], false>(unit, blocks, &scaling, &mut coded.codes),
        (8, true) => code_blocks::<C, [u8; 1], true>(unit, blocks, &scaling, &mut coded.codes),
        (8, false) => code_blocks::<C, [u8; 1], false>(unit, blocks, &scaling, &mut coded.codes),
        (_, true) => code_blocks::<C, [u8; 1], true>(unit, blocks, &scaling, &mut coded.wide),
        (_, false) => code_blocks::<C, [u8; 1], false>(unit, blocks, &scaling, &mut coded.wide),
    }
    if C::BITS == 4 {
        let pairs = coded.wide.as_chunks::<2>().0;
        for (byte, pair) in coded.codes.iter_mut().zip(pairs).take(blocks * C::BLOCK / 2) {
            let pair = u16::from_le_bytes(*pair);
            *byte = (pair & 0x0f | pair >> 4 & 0xf0) as u8;
        }
    }
    if wrong != 0 {
        for number in (0..blocks).filter(|number| wrong >> number & 1 != 0) {
            scales[number] = C::WRONG_SCALE;
            if C::WRONG_CODE != 0 {
                <[u8; 2]>::all_mut(&mut coded.codes)[number * C::BLOCK..][..C::BLOCK].fill(Code::of(C::WRONG_CODE));
            }
        }
    }
    match C::SCALE_BYTES {
        0 => {}
        1 => write_all::<[u8; 1]>(&scales, &mut coded.scales),
        _ => write_all::<[u8; 2]>(&scales, &mut coded.scales),
    }
    wrong
}

#[inline(always)]
fn write_all<W: Code>(from: &[u32], to: &mut [u8]) {
    for (to, &from) in W::all_mut(to).iter_mut().zip(from) {
        *to = W::of(from);
    }
}

#[inline(always)]
fn code_blocks<C: Coding, W: Code, const ERRORS: bool>(
    unit: &mut Unit, blocks: usize, [inverses, steps]: &[[f32; STEP_BLOCKS]; 2], codes: &mut [u8],
) {
    let groups = unit.0.chunks_exact_mut(GROUP).zip(W::all_mut(codes).chunks_exact_mut(GROUP));
    for (number, (c, codes)) in groups.take((blocks * C::BLOCK).div_ceil(GROUP)).enumerate() {
        // These are two variables because an array of both would stay in memory.
        let (inverse, step) = (of_group::<C>(inverses, number), of_group::<C>(steps, number));
        for (index, (c, to)) in c.iter_mut().zip(codes).enumerate() {
            let (code, value) = C::code(*c * inverse[index]);
            *to = W::of(code);
            if ERRORS {
                *c -= value * step[index];
            }
        }
    }
}

/// Number of elements that loops over codes take at once: one block or two. The compiler unrolls loops over 32 elements
/// entirely before it vectorizes, and then does not vectorize many of them.
const GROUP: usize = 64;

/// Returns the value of `each` for every element of a group.
#[inline(always)]
fn of_group<C: Coding>(each: &[f32; STEP_BLOCKS], group: usize) -> [f32; GROUP] {
    let blocks = GROUP / C::BLOCK;
    let mut all = [each[group * blocks]; GROUP];
    all[C::BLOCK..].fill(each[group * blocks + blocks - 1]);
    all
}

/// Computes the values that blocks represent.
#[inline(always)]
unsafe fn values_on<S, C: Coding>(coded: &mut Coded, blocks: usize, unit: &mut Unit) {
    let mut steps = [0.0; STEP_BLOCKS];
    match C::SCALE_BYTES {
        2 => read_steps::<C, [u8; 2]>(&coded.scales, &mut steps),
        _ => read_steps::<C, [u8; 1]>(&coded.scales, &mut steps),
    }
    if C::BITS == 4 {
        let pairs = coded.wide.as_chunks_mut::<2>().0;
        for (&byte, pair) in coded.codes.iter().zip(pairs).take(blocks * C::BLOCK / 2) {
            let byte = u16::from(byte);
            *pair = (byte & 0x0f | byte << 4 & 0xf00).to_le_bytes();
        }
    }
    match C::BITS {
        16 => value_blocks::<C, [u8; 2]>(&coded.codes, blocks, &steps, unit),
        8 => value_blocks::<C, [u8; 1]>(&coded.codes, blocks, &steps, unit),
        _ => value_blocks::<C, [u8; 1]>(&coded.wide, blocks, &steps, unit),
    }
}

#[inline(always)]
fn read_steps<C: Coding, W: Code>(scales: &[u8], steps: &mut [f32; STEP_BLOCKS]) {
    for (step, scale) in steps.iter_mut().zip(W::all(scales)) {
        *step = C::step(scale.bits());
    }
}

#[inline(always)]
fn value_blocks<C: Coding, W: Code>(codes: &[u8], blocks: usize, steps: &[f32; STEP_BLOCKS], unit: &mut Unit) {
    let groups = unit.0.chunks_exact_mut(GROUP).zip(W::all(codes).chunks_exact(GROUP));
    for (number, (values, codes)) in groups.take((blocks * C::BLOCK).div_ceil(GROUP)).enumerate() {
        let step = of_group::<C>(steps, number);
        for (index, (value, code)) in values.iter_mut().zip(codes).enumerate() {
            *value = C::value(code.bits()) * step[index];
        }
    }
}

#[inline(always)]
unsafe fn form_on<S, C: Source>(source: &C, first: usize, unit: &mut Unit, count: usize) -> bool {
    // SAFETY: the source holds these elements.
    unsafe { source.form(first, unit, count) }
}

#[inline(always)]
unsafe fn settle_on<S>(unit: &mut Unit, count: usize, limit: u32, zero: bool) -> bool {
    let mut highest = 0;
    for c in &mut unit.0[..count] {
        highest = highest.max(magnitude(*c));
        *c = if zero && magnitude(*c) >= limit { 0.0 } else { canonical(*c) };
    }
    highest >= limit
}

#[inline(always)]
unsafe fn keep_on<S, E: Number>(unit: &Unit, kept: *mut u8, count: usize) {
    for (index, &error) in unit.0[..count].iter().enumerate() {
        // SAFETY: `kept` has room for `count` errors.
        unsafe { E::store(kept, index, error) };
    }
}

#[inline(always)]
unsafe fn add_on<S>(sums: &mut Unit, values: &Unit, count: usize, zero: bool) -> bool {
    let mut highest = 0;
    for (sum, &value) in sums.0[..count].iter_mut().zip(&values.0) {
        highest = highest.max(magnitude(value));
        *sum += if zero && magnitude(value) > FINITE { 0.0 } else { value };
    }
    highest > FINITE
}

#[inline(always)]
unsafe fn finish_on<S, E: Number>(sums: &mut Unit, count: usize, divisor: f32, kept: *const u8, beta: f32) {
    for (index, sum) in sums.0[..count].iter_mut().enumerate() {
        *sum /= divisor;
        if is_kept::<E>() {
            // SAFETY: `kept` has `count` errors.
            *sum += beta * unsafe { E::load(kept, index) };
        }
    }
}

/// Scaling of the numbers of blocks to values.
#[derive(Clone, Copy)]
pub struct Scaling {
    pub divisor: f32,
    pub factor: f32,
}

#[inline(always)]
unsafe fn set_on<S, V: Number>(unit: &Unit, by: Scaling, dst: *mut u8, count: usize) -> bool {
    let Scaling { divisor, factor } = by;
    // SAFETY: `dst` has room for `count` values, at any address.
    unsafe {
        // The division takes as long as all the rest, so a divisor of 1 skips it.
        match divisor {
            1.0 => set_scaled::<V>(unit, dst, count, |value| value * factor),
            _ => set_scaled::<V>(unit, dst, count, |value| value / divisor * factor),
        }
    }
}

/// # Safety
/// `dst` has room for `count` values, at any address.
#[inline(always)]
unsafe fn set_scaled<V: Number>(unit: &Unit, dst: *mut u8, count: usize, scaled: impl Fn(f32) -> f32) -> bool {
    let mut highest = 0;
    for (index, &value) in unit.0[..count].iter().enumerate() {
        let bits = V::narrow_finite(scaled(value));
        highest = highest.max(magnitude(V::widen(bits)));
        // SAFETY: `dst` has room for `count` values.
        unsafe { dst.cast::<V::Bits>().add(index).write_unaligned(bits) };
    }
    highest > FINITE
}

#[inline(always)]
unsafe fn increase_on<S>(unit: &Unit, by: Scaling, dst: *mut u8, count: usize) -> bool {
    let (dst, mut highest) = (dst.cast::<f32>(), 0);
    for (index, &value) in unit.0[..count].iter().enumerate() {
        // SAFETY: `dst` has `count` values, at any address.
        unsafe {
            let sum = dst.add(index).read_unaligned() + value / by.divisor * by.factor;
            highest = highest.max(magnitude(sum));
            dst.add(index).write_unaligned(canonical(sum));
        }
    }
    highest > FINITE
}

multiversion! {
    /// Computes scales and codes and, if `errors`, replaces c by the errors. Returns a bit for each block that is not
    /// finite; its errors are 0.
    fn quantize<C: Coding>(unit: &mut Unit, blocks: usize, coded: &mut Coded, errors: bool) -> u32 = quantize_on;

    /// Writes the values that blocks represent.
    fn values<C: Coding>(coded: &mut Coded, blocks: usize, unit: &mut Unit) = values_on;

    /// Writes c of `count` elements from index `first` of a tile. Returns true if an input is not finite.
    fn form<C: Source>(source: &C, first: usize, unit: &mut Unit, count: usize) -> bool = form_on;

    /// Returns true if a magnitude, as an integer, is at least `limit`; if `zero`, such numbers become 0.
    fn settle(unit: &mut Unit, count: usize, limit: u32, zero: bool) -> bool = settle_on;

    /// Writes errors.
    fn keep<E: Number>(unit: &Unit, kept: *mut u8, count: usize) = keep_on;

    /// Adds values. Returns true if a value is not finite; if `zero`, such values count as 0.
    fn add(sums: &mut Unit, values: &Unit, count: usize, zero: bool) -> bool = add_on;

    /// Divides sums, and adds the errors that are kept.
    fn finish<E: Number>(sums: &mut Unit, count: usize, divisor: f32, kept: *const u8, beta: f32) = finish_on;

    /// Writes values. Returns true if a written value is not finite.
    fn set<V: Number>(unit: &Unit, by: Scaling, dst: *mut u8, count: usize) -> bool = set_on;

    /// Adds values to float32. Returns true if a sum is not finite.
    fn increase(unit: &Unit, by: Scaling, dst: *mut u8, count: usize) -> bool = increase_on;
}

/// The loops of a codec.
#[derive(Clone, Copy)]
pub struct Functions {
    pub quantize: unsafe fn(InstructionSet, &mut Unit, usize, &mut Coded, bool) -> u32,
    pub values: unsafe fn(InstructionSet, &mut Coded, usize, &mut Unit),
}

impl Functions {
    pub fn of(kind: Kind) -> Self {
        fn of<C: Coding>() -> Functions {
            Functions { quantize: quantize::<C>, values: values::<C> }
        }
        match kind {
            Kind::Mxfp8 => of::<Mxfp8>(),
            Kind::Int8 => of::<Int8>(),
            Kind::Int4 => of::<Int4>(),
            Kind::Mxfp4 => of::<Mxfp4>(),
            Kind::Bf16 | Kind::Onebit | Kind::Sign => of::<Bf16>(), // the last two have no blocks
        }
    }
}
