//! What differs between instruction sets: how 64 elements side by side become 64 bits and back. A file each; what is
//! built on it is written once (`bits`) and compiled for each of them (`dispatch`).
//!
//! **What is assumed of the platform.** Payloads may be memory that another process writes (`codec::sources`, `share`).
//! In Rust's terms a plain load of it is a race. On the processors that have these sets it is a load like any other: it
//! has no effect but its value. Each vector is loaded once, by an intrinsic, so that no decision depends on two loads of
//! one byte. What lies between strided elements is neither read nor written. ThreadSanitizer may report these loads.

mod portable;
mod transpose;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use std::ptr;

use crate::dlpack::rules::{BitRule, Patterns};

pub use portable::Portable;
pub use transpose::transpose_square;

#[cfg(target_arch = "x86_64")]
pub use {avx2::Avx2, avx512::Avx512};

/// The same bits with the order within each byte reversed, with BIG.
#[inline(always)]
pub fn in_order<const BIG: bool>(bits: u64) -> u64 {
    if BIG { bits.swap_bytes().reverse_bits() } else { bits }
}

/// Memory that begins at a cache line, as what vectors read and write on the stack should: a vector that crosses two lines
/// costs Intel's processors twice the time, and many times where words of it were written just before.
#[repr(align(64))]
pub struct LineAligned<T>(pub T);

/// An element as an unsigned integer of its width. A byte is a bool or an integer, whose bit is 0 only for 0: its range of
/// zeros is not looked at, with which packing every third bool with AVX-512 takes 0.7 of the time.
pub trait Element: Copy + Default + Ord {
    const SIZE: usize = size_of::<Self>();
    fn from_u64(value: u64) -> Self;
    fn wrapping_sub(self, other: Self) -> Self;
    /// `self` where `bit` is 1, 0 where it is 0.
    fn times(self, bit: u8) -> Self;
    fn xor(self, other: Self) -> Self;
    /// The bit of this element.
    #[inline(always)]
    fn bit(self, zeros: ZeroRange<Self>) -> u8 {
        let is_one =
            if Self::SIZE == 1 { self != Self::default() } else { self.wrapping_sub(zeros.first) > zeros.span };
        u8::from(is_one)
    }
}

macro_rules! element {
    ($($t:ty)*) => {$(
        impl Element for $t {
            #[inline(always)]
            fn from_u64(value: u64) -> Self {
                value as $t
            }
            #[inline(always)]
            fn wrapping_sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            #[inline(always)]
            fn times(self, bit: u8) -> Self {
                self & (bit as $t).wrapping_neg()
            }
            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
        }
    )*};
}
element!(u8 u16 u32 u64);

/// The elements whose bit is 0: `first ..= first + span`.
#[derive(Clone, Copy)]
pub struct ZeroRange<T> {
    pub first: T,
    pub span: T,
}

impl<T: Element> ZeroRange<T> {
    #[inline(always)]
    pub fn new(rule: BitRule) -> Self {
        Self { first: T::from_u64(rule.first_zero), span: T::from_u64(rule.span) }
    }
}

/// What is written for a bit of either value.
#[derive(Clone, Copy)]
pub struct Values<T> {
    pub zero: T,
    pub one: T,
}

impl<T: Element> Values<T> {
    #[inline(always)]
    pub fn new(patterns: Patterns) -> Self {
        Self { zero: T::from_u64(patterns.zero), one: T::from_u64(patterns.one) }
    }

    /// That of a bit, without a branch.
    #[inline(always)]
    pub fn of(self, bit: u8) -> T {
        self.zero.xor(self.zero.xor(self.one).times(bit))
    }
}

/// What an instruction set does: elements to bits and back. The first element's bit is the lowest, or with BIG the
/// highest of the lowest byte and so on: the order of bits in memory.
pub trait Simd<T: Element>: Sized {
    /// The bits of 64 elements side by side.
    ///
    /// # Safety
    /// `src` holds the elements, at any alignment, and the processor has the instructions.
    unsafe fn to_bits<const BIG: bool>(zeros: ZeroRange<T>, src: *const u8) -> u64;

    /// 64 elements side by side. With STREAM they go past the caches.
    ///
    /// # Safety
    /// `dst` has room for the elements, at any alignment (with STREAM, aligned to 64), and the processor has the
    /// instructions.
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(values: Values<T>, bits: u64, dst: *mut u8);

    /// The bits of up to 64 elements side by side, the first one lowest, zeros above.
    ///
    /// # Safety
    /// `src` holds `count` elements, at any alignment, and the processor has the instructions.
    #[inline(always)]
    unsafe fn some_to_bits(zeros: ZeroRange<T>, src: *const u8, count: usize) -> u64 {
        let mut elements = [zeros.first; 64];
        // SAFETY: `count` elements are at `src`, as the caller promises, and 64 on the stack.
        unsafe {
            ptr::copy_nonoverlapping(src, elements.as_mut_ptr().cast(), count * T::SIZE);
            Self::to_bits::<false>(zeros, elements.as_ptr().cast())
        }
    }

    /// Up to 64 elements side by side, of bits of which the lowest is the first.
    ///
    /// # Safety
    /// `dst` has room for `count` elements, at any alignment, and the processor has the instructions.
    #[inline(always)]
    unsafe fn some_from_bits(values: Values<T>, bits: u64, dst: *mut u8, count: usize) {
        let mut elements = [T::default(); 64];
        // SAFETY: 64 elements are on the stack, and at `dst` is room for `count`, as the caller promises.
        unsafe {
            Self::from_bits::<false, false>(values, bits, elements.as_mut_ptr().cast());
            ptr::copy_nonoverlapping(elements.as_ptr().cast(), dst, count * T::SIZE);
        }
    }
}

/// Asks for the cache line at an address, which may be any.
#[inline(always)]
pub fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, and it reads nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
