//! The code that differs between instruction sets: it converts 64 contiguous elements to 64 bits and back, in a file
//! per set. Code on top of it (`bits`) is written once and compiled for each set (`dispatch`).
//!
//! **Assumptions about the platform.** Another process may write payloads while they are read (`codec::sources`,
//! `share`). In Rust's terms, a plain load of them is a race. On the processors that have these sets, such a load has
//! no effect but its value. Each vector is loaded once, by an intrinsic, so that no decision depends on two loads of
//! one byte. Bytes between strided elements are neither read nor written. ThreadSanitizer may report these loads.

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

/// Returns the bits; with BIG, in reverse order within each byte.
#[inline(always)]
pub fn in_order<const BIG: bool>(bits: u64) -> u64 {
    if BIG { bits.swap_bytes().reverse_bits() } else { bits }
}

/// Memory aligned to a cache line, for vectors on the stack. On Intel's processors, a vector that crosses two lines
/// takes twice the time, and many times as long if words of it were written just before.
#[repr(align(64))]
pub struct LineAligned<T>(pub T);

/// Element as an unsigned integer of its width. A byte is a bool or an integer, whose bit is 0 only for 0, so its zero
/// range is not read. Packing every third bool with AVX-512 then takes 0.7 of the time.
pub trait Element: Copy + Default + Ord {
    const SIZE: usize = size_of::<Self>();
    fn from_u64(value: u64) -> Self;
    fn wrapping_sub(self, other: Self) -> Self;
    /// Returns `self` if `bit` is 1, 0 if it is 0.
    fn times(self, bit: u8) -> Self;
    fn xor(self, other: Self) -> Self;
    /// Returns the bit of this element.
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

/// Elements that are written for a bit of 0 and of 1.
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

    /// Returns the element for a bit, without a branch.
    #[inline(always)]
    pub fn of(self, bit: u8) -> T {
        self.zero.xor(self.zero.xor(self.one).times(bit))
    }
}

/// Operations of an instruction set: elements to bits and back. The first element's bit is the lowest one, or with BIG
/// the highest of the lowest byte and so on: the order of bits in memory.
pub trait Simd<T: Element>: Sized {
    /// Returns the bits of 64 contiguous elements.
    ///
    /// # Safety
    /// `src` holds the elements, at any alignment, and the processor has the instructions.
    unsafe fn to_bits<const BIG: bool>(zeros: ZeroRange<T>, src: *const u8) -> u64;

    /// Writes 64 contiguous elements. With STREAM, the stores bypass the caches.
    ///
    /// # Safety
    /// `dst` has room for the elements, at any alignment (with STREAM, aligned to 64), and the processor has the
    /// instructions.
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(values: Values<T>, bits: u64, dst: *mut u8);

    /// Returns the bits of up to 64 contiguous elements, the first one lowest, zeros above.
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

    /// Writes up to 64 contiguous elements. The lowest bit is the first element's.
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

/// Prefetches the cache line at an address, which may be invalid.
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
