//! The sources of a tile's elements: what each operation makes c of.
//!
//! All of it is inlined into the functions of `kernels`, which have the instructions of a set.

use std::marker::PhantomData;

use crate::cpu::{
    numbers::{Number, is_kept, signed},
    simd::prefetch,
};

use super::sum::{UNIT_ELEMENTS, Unit};

/// The highest magnitude of a finite number, as an integer.
pub const FINITE: u32 = 0x7f7f_ffff;

/// The source of a tile's elements, c.
pub trait Source: Sync {
    /// What c^ is kept as.
    type Kept: Number;

    /// Writes c of `count` elements from number `first` of the tile, a multiple of 1024. Returns whether
    /// something is not finite and does not show in c.
    ///
    /// # Safety
    /// These elements are in the memory that this was made of.
    unsafe fn form(&self, first: usize, unit: &mut Unit, count: usize) -> bool;

    /// Asks for the memory of a part, one of [`PARTS`], of the unit that begins with an element, which need not be
    /// there.
    #[inline(always)]
    fn ask_for(&self, _first: usize, _part: usize) {}
}

/// In how many parts the next unit is asked for, between the loops over this one. Its elements are a page or less, at
/// whose end processors stop reading ahead by themselves: they would wait for memory in `form` and leave it idle in all
/// other loops (a fifth to a third of the time of 2^20 and 2^24 float32, on Sapphire Rapids).
pub const PARTS: usize = 4;

/// Asks for a part of the unit of elements that begins with number `first`.
#[inline(always)]
fn ask_for<N: Number>(elements: *const u8, first: usize, part: usize) {
    const LINE: usize = 64;
    let bytes = UNIT_ELEMENTS / PARTS * size_of::<N::Bits>();
    let start = elements.wrapping_add(first * size_of::<N::Bits>() + part * bytes);
    for offset in (0..bytes).step_by(LINE) {
        prefetch(start.wrapping_add(offset));
    }
}

/// A gradient and the error that was carried.
pub struct Feedback<G, E> {
    pub gradient: *const u8,
    pub kept: *const u8,
    pub scale: f32,
    pub factors: [f32; 2],
    pub beta: f32,
    pub zero: bool,
    pub types: PhantomData<(G, E)>,
}

// SAFETY: nothing is written through it, and its memory is not written meanwhile but by the tile's own thread.
unsafe impl<G: Number, E: Number> Sync for Feedback<G, E> {}

impl<G: Number, E: Number> Source for Feedback<G, E> {
    type Kept = E;

    #[inline(always)]
    unsafe fn form(&self, first: usize, unit: &mut Unit, count: usize) -> bool {
        // Copies: read through a reference in the loop they would keep it from being vectorized.
        let Self { gradient, kept, scale, factors: [of_gradient, of_error], beta, zero, .. } = *self;
        let mut highest = 0;
        for (index, c) in unit.0[..count].iter_mut().enumerate() {
            // SAFETY: the source holds `count` gradients from number `first` on.
            let element = unsafe { G::load(gradient, first + index) };
            highest = highest.max(magnitude(element));
            *c = of_gradient * if zero && magnitude(element) > FINITE { 0.0 } else { element };
            if is_kept::<E>() {
                // SAFETY: an element is kept for each of these gradients.
                let kept = unsafe { E::load(kept, first + index) };
                *c += beta * (of_error * (kept - signed(scale, kept)));
            }
        }
        highest > FINITE
    }

    #[inline(always)]
    fn ask_for(&self, first: usize, part: usize) {
        ask_for::<G>(self.gradient, first, part);
        ask_for::<E>(self.kept, first, part);
    }
}

/// The parts of several payloads, and the server's error.
pub struct Parts<E> {
    /// The bits of the tile's first element in the first payload, its scale, and from payload to payload.
    pub bits: *const u8,
    pub scale: *const u8,
    pub stride: usize,
    pub payloads: usize,
    /// What a scale is divided by.
    pub divisor: f32,
    pub kept: *const u8,
    pub kept_scale: f32,
    pub beta: f32,
    pub zero: bool,
    pub types: PhantomData<E>,
}

// SAFETY: nothing is written through it, and its memory is not written meanwhile but by the tile's own thread.
unsafe impl<E: Number> Sync for Parts<E> {}

impl<E: Number> Source for Parts<E> {
    type Kept = E;

    #[inline(always)]
    unsafe fn form(&self, first: usize, unit: &mut Unit, count: usize) -> bool {
        unit.0.fill(0.0);
        let mut nonfinite = false;
        for payload in 0..self.payloads {
            let at = payload * self.stride;
            // SAFETY: every payload has a scale of this part.
            let scale = unsafe { self.scale.add(at).cast::<f32>().read_unaligned() };
            let mut share = scale / self.divisor;
            if !share.is_finite() {
                nonfinite = true;
                share = if self.zero { 0.0 } else { share };
            }
            // SAFETY: every payload has the bits of these `count` elements.
            unsafe { add_signs(unit, self.bits.add(at + first / 8), count, share) };
        }
        if is_kept::<E>() {
            let Self { kept, kept_scale, beta, .. } = *self;
            for (index, d) in unit.0[..count].iter_mut().enumerate() {
                // SAFETY: an element is kept for each of the `count` from number `first` on.
                let kept = unsafe { E::load(kept, first + index) };
                *d += beta * (kept - signed(kept_scale, kept));
            }
        }
        nonfinite
    }
}

/// Adds `share` with the sign of each bit. Elements beyond the last byte are ignored.
///
/// # Safety
/// `count` bits can be read at `bits`.
#[inline(always)]
unsafe fn add_signs(unit: &mut Unit, bits: *const u8, count: usize, share: f32) {
    // SAFETY: `count` bits can be read at `bits`.
    unsafe {
        for_each_word(bits, count, |first, word| {
            for (index, d) in unit.0[first..first + 32].iter_mut().enumerate() {
                *d += if has_bit(word, index) { share } else { -share };
            }
        });
    }
}

/// Calls `work` with the number of the first bit of each 32 of `count`, and those bits, the first one highest; zeros
/// beyond the last byte. By address, for the bytes may be those of another process, which may change them meanwhile: of
/// such memory there must be no reference. Each byte is read once.
///
/// # Safety
/// `count` bits can be read at `bits`.
#[inline(always)]
pub unsafe fn for_each_word(bits: *const u8, count: usize, mut work: impl FnMut(usize, u32)) {
    let bytes = count.div_ceil(8);
    // One call in one loop: a closure that is called in two places need not be inlined into either.
    for first in (0..bytes).step_by(4) {
        let mut word = [0; 4];
        // SAFETY: at most 4 of `bytes` bytes, from `first` on.
        unsafe {
            let at = bits.add(first);
            match bytes - first {
                4.. => word = at.cast::<[u8; 4]>().read_unaligned(),
                left => at.copy_to_nonoverlapping(word.as_mut_ptr(), left),
            }
        }
        work(8 * first, u32::from_be_bytes(word));
    }
}

/// A bit of a word, the highest being number 0. The word is not shifted by the number: not every set can shift lanes by
/// different counts.
#[inline(always)]
pub fn has_bit(word: u32, index: usize) -> bool {
    word & (0x8000_0000 >> index) != 0
}

#[inline(always)]
pub fn magnitude(value: f32) -> u32 {
    value.to_bits() & 0x7fff_ffff
}
