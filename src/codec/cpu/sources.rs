//! Sources of a tile's elements: the inputs from which each operation computes c.
//!
//! All functions are inlined into the functions of `kernels`, which are compiled for an instruction set.

use std::marker::PhantomData;

use crate::cpu::{
    numbers::{Number, is_kept, signed},
    simd::prefetch,
};

use super::sum::{UNIT_ELEMENTS, Unit};

/// Largest magnitude of a finite number, as an integer.
pub const FINITE: u32 = 0x7f7f_ffff;

/// Source of a tile's elements, c.
pub trait Source: Sync {
    /// Type in which c^ is kept.
    type Kept: Number;

    /// Writes c of `count` elements from index `first` of the tile, a multiple of 1024. Returns true if an input is not
    /// finite, which c need not show.
    ///
    /// # Safety
    /// The elements are in the memory that the source was made of.
    unsafe fn form(&self, first: usize, unit: &mut Unit, count: usize) -> bool;

    /// Prefetches part `part` of [`PARTS`] of the unit that begins at index `first`. The unit need not exist.
    #[inline(always)]
    fn prefetch_part(&self, _first: usize, _part: usize) {}
}

/// Number of parts in which the next unit is prefetched, between the loops over the current one. A unit is a page or
/// less, and processors stop reading ahead at the end of a page. Without this, `form` waits for memory, which is idle
/// in all other loops. The wait is a fifth to a third of the time of 2^20 and 2^24 float32 on Sapphire Rapids.
pub const PARTS: usize = 4;

/// Prefetches a part of the unit of elements that begins at index `first`.
#[inline(always)]
fn prefetch_part<N: Number>(elements: *const u8, first: usize, part: usize) {
    const LINE: usize = 64;
    let bytes = UNIT_ELEMENTS / PARTS * size_of::<N::Bits>();
    let start = elements.wrapping_add(first * size_of::<N::Bits>() + part * bytes);
    for offset in (0..bytes).step_by(LINE) {
        prefetch(start.wrapping_add(offset));
    }
}

/// Gradient and carried error.
pub struct Feedback<G, E> {
    pub gradient: *const u8,
    pub kept: *const u8,
    pub scale: f32,
    pub factors: [f32; 2],
    pub beta: f32,
    pub zero: bool,
    pub types: PhantomData<(G, E)>,
}

// SAFETY: threads only read through these addresses; meanwhile only the tile's own thread writes to that memory.
unsafe impl<G: Number, E: Number> Sync for Feedback<G, E> {}

impl<G: Number, E: Number> Source for Feedback<G, E> {
    type Kept = E;

    #[inline(always)]
    unsafe fn form(&self, first: usize, unit: &mut Unit, count: usize) -> bool {
        // These are copies, because reads through a reference would keep the loop from being vectorized.
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
    fn prefetch_part(&self, first: usize, part: usize) {
        prefetch_part::<G>(self.gradient, first, part);
        prefetch_part::<E>(self.kept, first, part);
    }
}

/// Parts of several payloads, and the server's error.
pub struct Parts<E> {
    /// Addresses in the first payload of the tile's first bit and of its scale; distance between payloads in bytes.
    pub bits: *const u8,
    pub scale: *const u8,
    pub stride: usize,
    pub payloads: usize,
    /// Divisor of a scale.
    pub divisor: f32,
    pub kept: *const u8,
    pub kept_scale: f32,
    pub beta: f32,
    pub zero: bool,
    pub types: PhantomData<E>,
}

// SAFETY: threads only read through these addresses; meanwhile only the tile's own thread writes to that memory.
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

/// Calls `work` for each 32 of `count` bits, with the index of the first bit and the bits as a word, the first bit
/// highest. Bits beyond the last byte are 0. Another process may change the bytes meanwhile, so they are read through
/// their address, never through a reference. Each byte is read once.
///
/// # Safety
/// `count` bits can be read at `bits`.
#[inline(always)]
pub unsafe fn for_each_word(bits: *const u8, count: usize, mut work: impl FnMut(usize, u32)) {
    let bytes = count.div_ceil(8);
    // `work` is called in one place, because a closure that is called in two places need not be inlined.
    for first in (0..bytes).step_by(4) {
        let mut word = [0; 4];
        // SAFETY: this reads at most 4 bytes from `first` on, none past `bytes`.
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

/// Returns a bit of a word; bit 0 is the highest. The word is not shifted by `index`, because not every instruction set
/// can shift lanes by different counts.
#[inline(always)]
pub fn has_bit(word: u32, index: usize) -> bool {
    word & (0x8000_0000 >> index) != 0
}

#[inline(always)]
pub fn magnitude(value: f32) -> u32 {
    value.to_bits() & 0x7fff_ffff
}
