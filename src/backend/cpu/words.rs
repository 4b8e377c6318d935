//! The kernels: bits of elements that lie side by side, 64 at a time, for each instruction set.
//!
//! What differs between instruction sets is how 64 elements become 64 bits and back ([`Lanes`]); everything around that
//! is written once and compiled for each.

use std::{
    ffi::CStr,
    mem::MaybeUninit,
    ptr, slice,
    sync::atomic::{AtomicPtr, Ordering},
};

use crate::plan::{
    bits::{BitOrder, BitRule, OnePattern},
    loops::{Cursor, Run},
};

#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};

/// An element as an unsigned integer of its width.
pub trait Word: Copy + Default + Ord {
    const SIZE: usize = size_of::<Self>();
    fn from_u64(value: u64) -> Self;
    fn wrapping_sub(self, other: Self) -> Self;
    /// `self` where `bit` is 1, 0 where it is 0.
    fn times(self, bit: u8) -> Self;
}

macro_rules! word {
    ($($t:ty)*) => {$(
        impl Word for $t {
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
        }
    )*};
}
word!(u8 u16 u32 u64);

/// The elements whose bit is 0: `first ..= first + span`.
#[derive(Clone, Copy)]
pub struct Zeros<T> {
    pub first: T,
    pub span: T,
}

impl<T: Word> Zeros<T> {
    #[inline(always)]
    pub fn new(rule: BitRule) -> Self {
        Self { first: T::from_u64(rule.first_zero), span: T::from_u64(rule.span) }
    }

    /// The bit of an element.
    #[inline(always)]
    pub fn bit(self, word: T) -> u8 {
        u8::from(word.wrapping_sub(self.first) > self.span)
    }
}

/// What an instruction set does: elements to bits and back. The first element's bit is the lowest, or with BIG the
/// highest of the lowest byte and so on: the order of bits in memory.
pub trait Lanes<T: Word>: Sized {
    /// The bits of 64 elements side by side.
    ///
    /// # Safety
    /// `src` holds the elements, at any alignment, and the processor has the instructions.
    unsafe fn to_bits<const BIG: bool>(zeros: Zeros<T>, src: *const u8) -> u64;

    /// 64 elements side by side. With STREAM they go past the caches.
    ///
    /// # Safety
    /// `dst` has room for the elements, at any alignment (with STREAM, aligned to 64), and the processor has the
    /// instructions.
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(one: T, bits: u64, dst: *mut u8);

    /// The bits of up to 64 elements side by side, the first one lowest, zeros above.
    ///
    /// # Safety
    /// `src` holds `count` elements, at any alignment, and the processor has the instructions.
    #[inline(always)]
    unsafe fn some_to_bits(zeros: Zeros<T>, src: *const u8, count: usize) -> u64 {
        let mut words = [zeros.first; 64];
        // SAFETY: the caller's promise, and 64 elements on the stack.
        unsafe {
            ptr::copy_nonoverlapping(src, words.as_mut_ptr().cast(), count * T::SIZE);
            Self::to_bits::<false>(zeros, words.as_ptr().cast())
        }
    }

    /// Up to 64 elements side by side, of bits of which the lowest is the first.
    ///
    /// # Safety
    /// `dst` has room for `count` elements, at any alignment, and the processor has the instructions.
    #[inline(always)]
    unsafe fn some_from_bits(one: T, bits: u64, dst: *mut u8, count: usize) {
        let mut words = [T::default(); 64];
        // SAFETY: 64 elements on the stack, and the caller's promise.
        unsafe {
            Self::from_bits::<false, false>(one, bits, words.as_mut_ptr().cast());
            ptr::copy_nonoverlapping(words.as_ptr().cast(), dst, count * T::SIZE);
        }
    }

    /// Turns a square of bits round: bit j of word i becomes bit i of word j.
    ///
    /// # Safety
    /// The processor has the instructions.
    #[inline(always)]
    unsafe fn transpose(words: &mut [u64; TILE]) {
        transpose(words);
    }

    /// How many bytes apart elements may be for it to be faster to test all that lies between them than to collect them.
    const WIDEST_COMB: usize;

    /// Of some groups of 64 lanes' bits, those of a comb's elements, side by side; zeros above.
    ///
    /// # Safety
    /// The processor has the instructions.
    #[inline(always)]
    unsafe fn pick<const STEP: usize, const GROUPS: usize>(groups: &mut [u64; GROUPS]) {
        pick::<STEP>(groups);
    }

    /// Reads bits to elements that lie `stride` bytes apart.
    ///
    /// # Safety
    /// `dst` is the place of the first of `count` elements, at any alignment, and the processor has the instructions.
    #[inline(always)]
    unsafe fn unpack_apart<const BIG: bool>(
        one: T,
        reader: &mut BitReader<BIG>,
        dst: *mut u8,
        stride: isize,
        count: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe { unpack_one_by_one::<Self, T, BIG>(one, reader, dst, stride, count) }
    }
}

/// The order of bits within each byte turned round, if it is to be.
#[inline(always)]
pub fn in_order<const BIG: bool>(bits: u64) -> u64 {
    if BIG { bits.swap_bytes().reverse_bits() } else { bits }
}

/// How many of the elements at every `step`-th of some lanes are worked on together: a power of two, so that groups of
/// them make words.
pub const fn in_lanes(lanes: usize, step: usize) -> usize {
    1 << (lanes / step).ilog2()
}

/// The lanes of the elements in 64 lanes, of which every `step`-th is one, once groups of `together` of their bits have
/// come together; `together` is a power of two.
pub const fn comb(step: usize, together: usize) -> u64 {
    let (mut lanes, mut element) = (0, 0);
    while element < in_lanes(64, step) {
        lanes |= 1 << (element / together * together * step + element % together);
        element += 1;
    }
    lanes
}

/// See [`Lanes::pick`].
#[inline(always)]
fn pick<const STEP: usize>(groups: &mut [u64]) {
    // Neighbours come together, then pairs of them, and so on.
    groups.iter_mut().for_each(|bits| *bits &= const { comb(STEP, 1) });
    macro_rules! together {
        ($($count:literal)*) => {$(
            if $count <= in_lanes(64, STEP) {
                for bits in &mut *groups {
                    *bits = (*bits | *bits >> ($count / 2 * (STEP - 1))) & const { comb(STEP, $count) };
                }
            }
        )*};
    }
    together!(2 4 8 16 32);
}

/// Writes the bits of elements that lie `stride` bytes apart.
///
/// # Safety
/// `src` is the first of `count` elements, at any alignment; `writer` has room; the processor has L's instructions.
#[inline(always)]
unsafe fn pack_apart<L: Lanes<T>, T: Word>(
    zeros: Zeros<T>,
    src: *const u8,
    stride: isize,
    count: usize,
    writer: &mut BitWriter<'_>,
) {
    let distance = stride.unsigned_abs();
    let step = distance / T::SIZE;
    let lanes = (count - 1).saturating_mul(step) + 1;
    macro_rules! of_step {
        ($($step:literal)*) => {
            match step {
                $($step if $step * T::SIZE <= L::WIDEST_COMB && distance == step * T::SIZE && lanes >= 64 => {
                    pack_comb::<L, T, $step>(zeros, src, stride < 0, count, writer)
                })*
                _ => pack_one_by_one::<L, T>(zeros, src, stride, count, writer),
            }
        };
    }
    // SAFETY: the caller's promise.
    unsafe { of_step!(2 3 4 5 6 7 8) };
}

/// Writes the bits of the elements at every `STEP`-th lane, in memory's order or against it, by testing all the lanes
/// from the lowest to the highest.
///
/// # Safety
/// As for [`pack_apart`], and there are at least 64 lanes.
#[inline(always)]
unsafe fn pack_comb<L: Lanes<T>, T: Word, const STEP: usize>(
    zeros: Zeros<T>,
    src: *const u8,
    backward: bool,
    count: usize,
    writer: &mut BitWriter<'_>,
) {
    /// Lanes, 64 each, whose bits are picked at once: neighbours come together in vectors where that takes steps.
    const GROUPS: usize = 16;
    let lanes = (count - 1) * STEP + 1;
    let bottom = if backward { src.wrapping_sub((lanes - 1) * T::SIZE) } else { src };
    let each = const { in_lanes(64, STEP) };
    let (whole, together) = (count / 64, GROUPS * each / 64);
    // SAFETY: the caller's promise. Of lanes: see `comb_word`.
    unsafe {
        for start in (0..whole).step_by(together) {
            let some = together.min(whole - start);
            let lowest = STEP * if backward { count - 64 * (start + some) } else { 64 * start };
            let mut words = [0; GROUPS / 2];
            if some == together && lowest + (64 * together - each) * STEP + 64 <= lanes {
                let mut groups = [0; GROUPS];
                for (index, bits) in groups.iter_mut().enumerate() {
                    *bits = L::to_bits::<false>(zeros, bottom.add((lowest + index * each * STEP) * T::SIZE));
                }
                L::pick::<STEP, GROUPS>(&mut groups);
                for (word, groups) in words.iter_mut().zip(groups.chunks_exact(64 / each)) {
                    for (index, bits) in groups.iter().enumerate() {
                        *word |= bits << (index * each);
                    }
                }
            } else {
                for (index, word) in words[..some].iter_mut().enumerate() {
                    *word = comb_word::<L, T, STEP>(zeros, bottom, lanes, lowest + 64 * index * STEP, 64);
                }
            }
            if backward {
                words[..some].reverse();
                words.iter_mut().for_each(|word| *word = word.reverse_bits());
            }
            let mut next = words.as_ptr();
            writer.push_words(some, || {
                next = next.add(1);
                next.sub(1).read()
            });
        }
        let rest = count % 64;
        if rest > 0 {
            let lowest = if backward { 0 } else { 64 * whole * STEP };
            let word = comb_word::<L, T, STEP>(zeros, bottom, lanes, lowest, rest);
            writer.push(if backward { word.reverse_bits() >> (64 - rest) } else { word }, rest);
        }
    }
}

/// The bits of `count` elements, at most 64, of [`pack_comb`], that of the one at lane `lowest` lowest. Where that is not
/// 64 of them, those above are of the elements that come next in memory, if any.
///
/// # Safety
/// As for [`pack_comb`]: so many lanes from `bottom` are between its first element and its last.
#[inline(always)]
unsafe fn comb_word<L: Lanes<T>, T: Word, const STEP: usize>(
    zeros: Zeros<T>,
    bottom: *const u8,
    lanes: usize,
    lowest: usize,
    count: usize,
) -> u64 {
    let each = const { in_lanes(64, STEP) };
    let mut word = 0;
    // SAFETY: all 64 lanes are between the run's lowest element and its highest, so near each other that there is no
    // page that none of them is in. What another thread may be writing between the elements meanwhile is left out of
    // the result.
    unsafe {
        for at in (0..count).step_by(each) {
            // Where fewer than 64 lanes are left, the last 64.
            let lane = lowest + at * STEP;
            let from = lane.min(lanes - 64);
            let mut bits = [L::to_bits::<false>(zeros, bottom.add(from * T::SIZE)) >> (lane - from)];
            L::pick::<STEP, 1>(&mut bits);
            word |= bits[0] << at;
        }
    }
    word
}

/// # Safety
/// As for [`pack_apart`].
#[inline(always)]
unsafe fn pack_one_by_one<L: Lanes<T>, T: Word>(
    zeros: Zeros<T>,
    src: *const u8,
    stride: isize,
    count: usize,
    writer: &mut BitWriter<'_>,
) {
    let whole = count - count % 64;
    // SAFETY: the caller's promise.
    unsafe {
        let at = |index: usize| src.offset(index as isize * stride);
        for first in (0..whole).step_by(64) {
            writer.push(collect::<L, T>(zeros, at(first), stride, 64), 64);
        }
        if whole < count {
            writer.push(collect::<L, T>(zeros, at(whole), stride, count - whole), count - whole);
        }
    }
}

/// # Safety
/// As for [`Lanes::unpack_apart`].
#[inline(always)]
pub unsafe fn unpack_one_by_one<L: Lanes<T>, T: Word, const BIG: bool>(
    one: T,
    reader: &mut BitReader<BIG>,
    dst: *mut u8,
    stride: isize,
    count: usize,
) {
    let whole = count - count % 64;
    // SAFETY: the caller's promise.
    unsafe {
        let at = |index: usize| dst.offset(index as isize * stride);
        for first in (0..whole).step_by(64) {
            distribute::<L, T, BIG>(one, reader.next_few(64), at(first), stride, 64);
        }
        if whole < count {
            distribute::<L, T, BIG>(one, reader.next_few(count - whole), at(whole), stride, count - whole);
        }
    }
}

/// The bits of up to 64 elements that lie `stride` bytes apart, the first one lowest, zeros above.
///
/// # Safety
/// `src` is the first of `count` elements, at any alignment, and the processor has L's instructions.
#[inline(always)]
unsafe fn collect<L: Lanes<T>, T: Word>(zeros: Zeros<T>, src: *const u8, stride: isize, count: usize) -> u64 {
    // SAFETY: the caller's promise, for every index below `count`, and 64 elements on the stack.
    unsafe {
        let element = |index: usize| src.offset(index as isize * stride).cast::<T>().read_unaligned();
        if count == 64 {
            let words: [T; 64] = std::array::from_fn(element);
            return L::to_bits::<false>(zeros, words.as_ptr().cast());
        }
        (0..count).fold(0, |bits, index| bits | u64::from(zeros.bit(element(index))) << index)
    }
}

/// The inverse, of bits in the order of memory; anything may be above.
///
/// # Safety
/// `dst` is the place of the first of `count` elements, at any alignment, and the processor has L's instructions.
#[inline(always)]
unsafe fn distribute<L: Lanes<T>, T: Word, const BIG: bool>(
    one: T,
    bits: u64,
    dst: *mut u8,
    stride: isize,
    count: usize,
) {
    // SAFETY: the caller's promise, for every index below `count`, and 64 elements on the stack.
    unsafe {
        let put = |index: usize, word: T| dst.offset(index as isize * stride).cast::<T>().write_unaligned(word);
        if count == 64 {
            let mut words = [T::default(); 64];
            L::from_bits::<BIG, false>(one, bits, words.as_mut_ptr().cast());
            return words.into_iter().enumerate().for_each(|(index, word)| put(index, word));
        }
        // From a table: a branch on a bit of data is foreseen half the time.
        let (bits, words) = (in_order::<BIG>(bits), [T::default(), one]);
        (0..count).for_each(|index| put(index, words[(bits >> index & 1) as usize]));
    }
}

/// Words that wait on the stack, 1 KiB: so the order of bits is turned round a vector at a time, where a single word
/// would take as long as the comparison of its 64 elements.
const BLOCK: usize = 128;

/// Bytes of output from which packing streams past the caches: 10 to 20 % faster there, and no slower at half that.
const STREAM_PACKED: usize = 2 << 20;

/// Bytes of output from which unpacking streams past the caches. What fits in them is better left there.
const STREAM_UNPACKED: usize = 64 << 20;

/// Takes bits in the order of elements, and puts them in memory in the order of bits asked for.
struct BitWriter<'a> {
    /// Apart from the rest, so that the rest can live in registers.
    block: &'a mut [MaybeUninit<u64>; BLOCK],
    /// Words in the block.
    words: usize,
    /// Bits that do not make a word yet.
    waiting: u64,
    filled: usize,
    dst: *mut u8,
    order: BitOrder,
}

impl<'a> BitWriter<'a> {
    /// # Safety
    /// `dst` has room for the bytes of all bits that will be pushed.
    #[inline(always)]
    unsafe fn new(block: &'a mut [MaybeUninit<u64>; BLOCK], dst: *mut u8, order: BitOrder) -> Self {
        Self { block, words: 0, waiting: 0, filled: 0, dst, order }
    }

    /// Writes the lowest `count` bits, at most 64, above which there are zeros.
    ///
    /// # Safety
    /// There is room: see `new`.
    #[inline(always)]
    unsafe fn push(&mut self, bits: u64, count: usize) {
        self.waiting |= bits << self.filled;
        self.filled += count;
        if self.filled >= 64 {
            // SAFETY: the caller's promise.
            unsafe { self.push_word(self.waiting) };
            self.filled -= 64;
            // What did not fit: the highest bits.
            self.waiting = if self.filled == 0 { 0 } else { bits >> (count - self.filled) };
        }
    }

    /// Writes so many words, one after the other. Only if `next` is short is it compiled into this function, as it must be
    /// to have the instructions.
    ///
    /// # Safety
    /// There is room: see `new`.
    #[inline(always)]
    unsafe fn push_words(&mut self, count: usize, mut next: impl FnMut() -> u64) {
        if self.filled > 0 {
            for _ in 0..count {
                // SAFETY: the caller's promise.
                unsafe { self.push(next(), 64) };
            }
            return;
        }
        let mut left = count;
        while left > 0 {
            let some = left.min(BLOCK - self.words);
            for slot in &mut self.block[self.words..self.words + some] {
                slot.write(next());
            }
            self.words += some;
            left -= some;
            if self.words == BLOCK {
                // SAFETY: the caller's promise.
                unsafe { self.flush() };
            }
        }
    }

    /// # Safety
    /// There is room: see `new`.
    #[inline(always)]
    unsafe fn push_word(&mut self, word: u64) {
        self.block[self.words].write(word);
        self.words += 1;
        if self.words == BLOCK {
            // SAFETY: the caller's promise.
            unsafe { self.flush() };
        }
    }

    /// # Safety
    /// There is room: see `new`.
    #[inline(always)]
    unsafe fn flush(&mut self) {
        // SAFETY: so many words were written, and the caller promises room.
        unsafe {
            let bytes = 8 * self.words;
            let block = slice::from_raw_parts(self.block.as_ptr().cast::<u8>(), bytes);
            let dst = slice::from_raw_parts_mut(self.dst.cast::<MaybeUninit<u8>>(), bytes);
            match self.order {
                BitOrder::Big => dst.iter_mut().zip(block).for_each(|(dst, byte)| {
                    dst.write(byte.reverse_bits());
                }),
                BitOrder::Little => ptr::copy_nonoverlapping(block.as_ptr(), self.dst, bytes),
            }
            self.dst = self.dst.add(bytes);
        }
        self.words = 0;
    }

    /// Writes what waits, the last byte filled up with zeros.
    ///
    /// # Safety
    /// There is room: see `new`.
    #[inline(always)]
    unsafe fn finish(mut self) {
        // SAFETY: the caller's promise.
        unsafe {
            self.flush();
            let bytes = self.waiting.to_le_bytes().map(|byte| match self.order {
                BitOrder::Big => byte.reverse_bits(),
                BitOrder::Little => byte,
            });
            ptr::copy_nonoverlapping(bytes.as_ptr(), self.dst, self.filled.div_ceil(8));
        }
    }
}

/// Stores past the caches, where there is a way.
///
/// # Safety
/// `dst` has room and is aligned to 8.
#[inline(always)]
unsafe fn stream(word: u64, dst: *mut u64) {
    // SAFETY: the caller's promise, and every x86-64 processor has the instruction.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        std::arch::x86_64::_mm_stream_si64(dst.cast(), word as i64);
        #[cfg(not(target_arch = "x86_64"))]
        dst.write(word);
    }
}

/// Orders streamed stores before whatever this thread does next.
#[inline(always)]
fn end_of_stream() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}

/// Gives bits from bytes, in the order of bits that BIG says; zeros past the last byte.
pub struct BitReader<const BIG: bool> {
    src: *const u8,
    available: usize,
    /// The number of the next bit.
    position: usize,
}

impl<const BIG: bool> BitReader<BIG> {
    /// # Safety
    /// `src` holds `available` bytes, as long as this lives.
    #[inline(always)]
    unsafe fn new(src: *const u8, available: usize) -> Self {
        Self { src, available, position: 0 }
    }

    /// The next 64 bits as if they began a byte, in the order of memory. Zeros past the last byte.
    #[inline(always)]
    fn peek(&self) -> u64 {
        let (first, shift) = (self.position / 8, self.position % 8);
        if shift == 0 && first + 8 <= self.available {
            // SAFETY: 8 bytes are there.
            return unsafe { u64::from_le(self.src.add(first).cast::<u64>().read_unaligned()) };
        }
        let (word, last) = if first + 9 <= self.available {
            // SAFETY: 9 bytes are there.
            unsafe {
                let src = self.src.add(first);
                (u64::from_le(src.cast::<u64>().read_unaligned()), src.add(8).read())
            }
        } else {
            self.at_the_end(first)
        };
        Self::joined(word, last, shift)
    }

    /// The 9 bytes from number `first`, where they are not all there.
    #[cold]
    fn at_the_end(&self, first: usize) -> (u64, u8) {
        let mut bytes = [0; 8];
        let there = self.available.saturating_sub(first).min(8);
        // SAFETY: so many bytes are there; without any the pointer only has to exist.
        unsafe { ptr::copy_nonoverlapping(self.src.wrapping_add(first), bytes.as_mut_ptr(), there) };
        (u64::from_le_bytes(bytes), 0)
    }

    /// The next `count` bits, at most 64, in the order of memory, anything after them.
    #[inline(always)]
    pub fn next_few(&mut self, count: usize) -> u64 {
        let word = self.peek();
        self.position += count;
        word
    }

    /// Calls `work` with the next words, in the order of memory.
    #[inline(always)]
    fn for_each_word(&mut self, words: usize, mut work: impl FnMut(u64)) {
        let (first, shift) = (self.position / 8, self.position % 8);
        if first + 8 * words < self.available {
            for index in 0..words {
                // SAFETY: there are 8 bytes, and one more.
                unsafe {
                    let src = self.src.add(first + 8 * index);
                    let word = u64::from_le(src.cast::<u64>().read_unaligned());
                    work(Self::joined(word, src.add(8).read(), shift));
                }
            }
            self.position += 64 * words;
        } else {
            for _ in 0..words {
                work(self.peek());
                self.position += 64;
            }
        }
    }

    /// The 64 bits of 72 from number `shift`, at most 7.
    #[inline(always)]
    fn joined(word: u64, last: u8, shift: usize) -> u64 {
        if BIG {
            (word.swap_bytes() << shift | u64::from(last) >> (8 - shift)).swap_bytes()
        } else {
            word >> shift | u64::from(last) << 1 << (63 - shift)
        }
    }

    /// The next `count` bits, at most 64, in the order of elements, zeros above.
    #[inline(always)]
    pub fn next(&mut self, count: usize) -> u64 {
        let word = in_order::<BIG>(self.peek());
        self.position += count;
        word & (u64::MAX >> (64 - count))
    }

    /// The next `count` bits after the 64 - `count` before them, which there are, in the order of memory.
    #[inline(always)]
    fn word_up_to(&mut self, count: usize) -> u64 {
        self.position += count;
        Self { position: self.position - 64, ..*self }.peek()
    }
}

/// Writes the bits of elements side by side.
///
/// # Safety
/// As for [`pack_apart`].
#[inline(always)]
unsafe fn pack_side_by_side<L: Lanes<T>, T: Word>(
    zeros: Zeros<T>,
    mut src: *const u8,
    count: usize,
    writer: &mut BitWriter<'_>,
) {
    // SAFETY: the caller's promise: `count` elements, and room for their bits.
    unsafe {
        writer.push_words(count / 64, || {
            let word = L::to_bits::<false>(zeros, src);
            src = src.add(64 * T::SIZE);
            word
        });
        let rest = count % 64;
        if rest > 0 {
            // The last 64 once more, where there are so many: less than to take part of them.
            let bits = if count < 64 {
                L::some_to_bits(zeros, src, rest)
            } else {
                L::to_bits::<false>(zeros, src.sub((64 - rest) * T::SIZE)) >> (64 - rest)
            };
            writer.push(bits, rest);
        }
    }
}

/// Writes the bits of elements side by side, of which the first one is the last in memory.
///
/// # Safety
/// As for [`pack_apart`].
#[inline(always)]
unsafe fn pack_backward<L: Lanes<T>, T: Word>(
    zeros: Zeros<T>,
    src: *const u8,
    count: usize,
    writer: &mut BitWriter<'_>,
) {
    // SAFETY: the caller's promise: `count` elements, the first one at `src`, and room for their bits.
    unsafe {
        let mut end = src.add(T::SIZE);
        writer.push_words(count / 64, || {
            end = end.sub(64 * T::SIZE);
            // Bits turned round within bytes, and bytes turned round: all turned round.
            L::to_bits::<true>(zeros, end).swap_bytes()
        });
        let rest = count % 64;
        if rest > 0 {
            let src = end.sub(rest * T::SIZE);
            let bits = if count < 64 {
                L::some_to_bits(zeros, src, rest).reverse_bits()
            } else {
                L::to_bits::<true>(zeros, src).swap_bytes()
            };
            writer.push(bits >> (64 - rest), rest);
        }
    }
}

/// Reads bits to elements side by side, of which the first one is the last in memory.
///
/// # Safety
/// As for [`Lanes::unpack_apart`].
#[inline(always)]
unsafe fn unpack_backward<L: Lanes<T>, T: Word, const BIG: bool>(
    one: T,
    reader: &mut BitReader<BIG>,
    dst: *mut u8,
    count: usize,
) {
    // SAFETY: the caller's promise: room for `count` elements, the first one at `dst`.
    unsafe {
        let store = |word: u64, dst| {
            // Bytes turned round, and bits taken in the other order: all turned round.
            if BIG {
                L::from_bits::<false, false>(one, word.swap_bytes(), dst);
            } else {
                L::from_bits::<true, false>(one, word.swap_bytes(), dst);
            }
        };
        let mut end = dst.add(T::SIZE);
        reader.for_each_word(count / 64, |word| {
            end = end.sub(64 * T::SIZE);
            store(word, end);
        });
        let rest = count % 64;
        if rest > 0 {
            let dst = end.sub(rest * T::SIZE);
            if count < 64 {
                L::some_from_bits(one, reader.next(rest).reverse_bits() >> (64 - rest), dst, rest);
            } else {
                // The last 64 once more: less than to write part of them.
                store(reader.word_up_to(rest), dst);
            }
        }
    }
}

/// Reads bits to elements side by side.
///
/// # Safety
/// As for [`Lanes::unpack_apart`].
#[inline(always)]
unsafe fn unpack_side_by_side<L: Lanes<T>, T: Word, const BIG: bool>(
    one: T,
    reader: &mut BitReader<BIG>,
    mut dst: *mut u8,
    count: usize,
) {
    // SAFETY: the caller's promise: room for `count` elements.
    unsafe {
        reader.for_each_word(count / 64, |word| {
            L::from_bits::<BIG, false>(one, word, dst);
            dst = dst.add(64 * T::SIZE);
        });
        let rest = count % 64;
        if rest > 0 {
            if count < 64 {
                L::some_from_bits(one, reader.next(rest), dst, rest);
            } else {
                // The last 64 once more: less than to write part of them.
                L::from_bits::<BIG, false>(one, reader.word_up_to(rest), dst.sub((64 - rest) * T::SIZE));
            }
        }
    }
}

/// Writes the lowest `count` bytes of a word, 1 to 8 of them, lowest first. A call of memcpy would take as long as a short
/// row does.
///
/// # Safety
/// There is room for them.
#[inline(always)]
unsafe fn write_bytes(word: u64, dst: *mut u8, count: usize) {
    // SAFETY: the caller's promise: pieces that may overlap, from the first byte and to the last.
    unsafe {
        if count >= 4 {
            dst.cast::<u32>().write_unaligned((word as u32).to_le());
            dst.add(count - 4).cast::<u32>().write_unaligned(((word >> (8 * (count - 4))) as u32).to_le());
        } else if count >= 2 {
            dst.cast::<u16>().write_unaligned((word as u16).to_le());
            dst.add(count - 2).cast::<u16>().write_unaligned(((word >> (8 * (count - 2))) as u16).to_le());
        } else {
            dst.write(word as u8);
        }
    }
}

/// The inverse: 1 to 8 bytes as the lowest of a word, zeros above.
///
/// # Safety
/// They are there.
#[inline(always)]
unsafe fn read_bytes(src: *const u8, count: usize) -> u64 {
    // SAFETY: the caller's promise: pieces that may overlap, from the first byte and to the last.
    unsafe {
        if count >= 4 {
            let low = u64::from(u32::from_le(src.cast::<u32>().read_unaligned()));
            let high = u64::from(u32::from_le(src.add(count - 4).cast::<u32>().read_unaligned()));
            low | high << (8 * (count - 4))
        } else if count >= 2 {
            let low = u64::from(u16::from_le(src.cast::<u16>().read_unaligned()));
            let high = u64::from(u16::from_le(src.add(count - 2).cast::<u16>().read_unaligned()));
            low | high << (8 * (count - 2))
        } else {
            u64::from(src.read())
        }
    }
}

/// Packs `bits` elements side by side to ceil(bits / 8) bytes, zeros after the last bit.
///
/// # Safety
/// `src` holds the elements, at any alignment; `dst` has room for the bytes; the processor has L's instructions.
#[inline(always)]
unsafe fn pack<L: Lanes<T>, T: Word, const BIG: bool>(zeros: Zeros<T>, src: *const u8, bits: usize, dst: *mut u8) {
    let (whole, rest) = (bits / 64, bits % 64);
    // SAFETY: 64 more elements and 8 bytes more are there, for every index below `whole`; then `rest` elements.
    unsafe {
        let words = dst.cast::<u64>();
        if bits / 8 >= STREAM_PACKED && dst.addr().is_multiple_of(8) {
            for index in 0..whole {
                stream(L::to_bits::<BIG>(zeros, src.add(index * 64 * T::SIZE)), words.add(index));
            }
            end_of_stream();
        } else {
            // By eights: the loop's own instructions are a third of one round.
            for start in (0..whole - whole % 8).step_by(8) {
                for index in start..start + 8 {
                    words.add(index).write_unaligned(L::to_bits::<BIG>(zeros, src.add(index * 64 * T::SIZE)));
                }
            }
            for index in whole - whole % 8..whole {
                words.add(index).write_unaligned(L::to_bits::<BIG>(zeros, src.add(index * 64 * T::SIZE)));
            }
        }
        if rest > 0 {
            // The last 64 once more, where there are so many: less than to take part of them.
            let last = match (whole, BIG) {
                (0, _) => in_order::<BIG>(L::some_to_bits(zeros, src, rest)),
                (_, true) => {
                    let word = L::to_bits::<BIG>(zeros, src.add((bits - 64) * T::SIZE));
                    (word.swap_bytes() << (64 - rest)).swap_bytes()
                }
                (_, false) => L::to_bits::<BIG>(zeros, src.add((bits - 64) * T::SIZE)) >> (64 - rest),
            };
            write_bytes(last, dst.add(whole * 8), rest.div_ceil(8));
        }
    }
}

/// Unpacks ceil(bits / 8) bytes to `bits` elements side by side: `one` for 1, 0 for 0.
///
/// # Safety
/// `src` holds the bytes; `dst` has room for the elements, at any alignment; the processor has L's instructions.
#[inline(always)]
unsafe fn unpack<L: Lanes<T>, T: Word, const BIG: bool>(one: T, src: *const u8, bits: usize, dst: *mut u8) {
    let (whole, rest) = (bits / 64, bits % 64);
    // SAFETY: 8 bytes more and room for 64 more elements are there, for every index below `whole`; then the bytes of
    // `rest` elements, and room for them.
    unsafe {
        let words = src.cast::<u64>();
        if bits * T::SIZE >= STREAM_UNPACKED && dst.addr().is_multiple_of(64) {
            for index in 0..whole {
                let bits = words.add(index).read_unaligned();
                L::from_bits::<BIG, true>(one, bits, dst.add(index * 64 * T::SIZE));
            }
            end_of_stream();
        } else {
            for index in 0..whole {
                let bits = words.add(index).read_unaligned();
                L::from_bits::<BIG, false>(one, bits, dst.add(index * 64 * T::SIZE));
            }
        }
        if rest > 0 {
            let last = read_bytes(src.add(whole * 8), rest.div_ceil(8));
            if whole == 0 {
                return L::some_from_bits(one, in_order::<BIG>(last), dst, rest);
            }
            // The last 64 once more: less than to write part of them.
            let before = words.add(whole - 1).read_unaligned();
            let word = if BIG {
                (before.swap_bytes() << rest | last.swap_bytes() >> (64 - rest)).swap_bytes()
            } else {
                before >> rest | last << (64 - rest)
            };
            L::from_bits::<BIG, false>(one, word, dst.add((bits - 64) * T::SIZE));
        }
    }
}

/// Packs the next `bits` elements that the cursor passes over to ceil(bits / 8) bytes, zeros after the last bit.
///
/// # Safety
/// Every offset of the cursor from `base` is an element, at any alignment; `dst` has room for the bytes; the processor
/// has L's instructions.
#[inline(always)]
unsafe fn pack_runs<L: Lanes<T>, T: Word>(
    zeros: Zeros<T>,
    order: BitOrder,
    cursor: &mut Cursor<'_, 1>,
    base: *const u8,
    bits: usize,
    dst: *mut u8,
) {
    let mut left = bits;
    // SAFETY: the caller's promise.
    unsafe {
        let mut block = [MaybeUninit::uninit(); BLOCK];
        let mut writer = BitWriter::new(&mut block, dst, order);
        while let Some(Run { offsets: [offset], count, strides: [stride] }) = cursor.next_run(left as i64) {
            let (src, count) = (base.offset(offset as isize), count as usize);
            if stride == T::SIZE as i64 {
                pack_side_by_side::<L, T>(zeros, src, count, &mut writer);
            } else if stride == -(T::SIZE as i64) {
                pack_backward::<L, T>(zeros, src, count, &mut writer);
            } else {
                pack_apart::<L, T>(zeros, src, stride as isize, count, &mut writer);
            }
            left -= count;
        }
        writer.finish();
    }
}

/// Unpacks `available` bytes to the next `bits` elements that the cursor passes over: `one` for 1, 0 for 0 and past the
/// last byte.
///
/// # Safety
/// Every offset of the cursor from `base` is the place of an element, at any alignment; `src` holds the bytes; the
/// processor has L's instructions.
#[inline(always)]
unsafe fn unpack_runs<L: Lanes<T>, T: Word, const BIG: bool>(
    one: T,
    src: *const u8,
    available: usize,
    cursor: &mut Cursor<'_, 1>,
    base: *mut u8,
    bits: usize,
) {
    let mut left = bits;
    // SAFETY: the caller's promise.
    unsafe {
        let mut reader = BitReader::<BIG>::new(src, available);
        while let Some(Run { offsets: [offset], count, strides: [stride] }) = cursor.next_run(left as i64) {
            let (dst, count) = (base.offset(offset as isize), count as usize);
            if stride == T::SIZE as i64 {
                unpack_side_by_side::<L, T, BIG>(one, &mut reader, dst, count);
            } else if stride == -(T::SIZE as i64) {
                unpack_backward::<L, T, BIG>(one, &mut reader, dst, count);
            } else {
                L::unpack_apart(one, &mut reader, dst, stride as isize, count);
            }
            left -= count;
        }
    }
}

/// The side of a tile: as many bits as a word has.
pub const TILE: usize = 64;

/// So few columns of a tile are faster done one element at a time than turned round.
pub const FEW_COLUMNS: usize = 3;

/// Turns a square of bits round: bit j of word i becomes bit i of word j.
#[inline(always)]
fn transpose(words: &mut [u64; TILE]) {
    // Quarters change places, then quarters of quarters, down to single bits.
    let mut mask = u64::MAX;
    let mut half = TILE / 2;
    while half > 0 {
        mask ^= mask << half;
        for block in words.chunks_exact_mut(2 * half) {
            let (upper, lower) = block.split_at_mut(half);
            for (upper, lower) in upper.iter_mut().zip(lower) {
                let changed = (*upper >> half ^ *lower) & mask;
                *lower ^= changed;
                *upper ^= changed << half;
            }
        }
        half /= 2;
    }
}

/// Asks for the line of the next square: no prefetcher of a processor follows 64 lines at once. Any address will do.
#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, and it reads nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// The words of the lines in a tile: after turning, the first line's bit is the lowest of each word, or the highest.
#[inline(always)]
fn words_of(order: BitOrder) -> impl Iterator<Item = usize> {
    let last = if order == BitOrder::Big { TILE - 1 } else { 0 };
    (0..TILE).map(move |line| line ^ last)
}

/// The bits of a tile, turned round: word i has those of element i of each line; line j begins `j * stride` bytes after
/// `src`. The first line's bit is the lowest, or with [`BitOrder::Big`] the highest.
///
/// # Safety
/// There are `lines` lines of `columns` elements each, both at most [`TILE`], and the processor has L's instructions.
#[inline(always)]
unsafe fn pack_tile<L: Lanes<T>, T: Word>(
    zeros: Zeros<T>,
    order: BitOrder,
    src: *const u8,
    stride: isize,
    lines: usize,
    columns: usize,
    words: &mut [u64; TILE],
) {
    if columns <= FEW_COLUMNS {
        for (column, word) in words[..columns].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let bits = unsafe { collect::<L, T>(zeros, src.add(column * T::SIZE), stride, lines) };
            *word = if order == BitOrder::Big { bits.reverse_bits() } else { bits };
        }
        return;
    }
    if lines < TILE {
        words.fill(0);
    }
    // SAFETY: the caller's promise.
    unsafe {
        if columns == TILE {
            for (word, line) in words_of(order).zip(0..lines) {
                let src = src.offset(line as isize * stride);
                prefetch(src.wrapping_add(TILE * T::SIZE));
                words[word] = L::to_bits::<false>(zeros, src);
            }
        } else {
            for (word, line) in words_of(order).zip(0..lines) {
                words[word] = L::some_to_bits(zeros, src.offset(line as isize * stride), columns);
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe { L::transpose(words) };
}

/// The inverse: elements of a tile of the bits of [`pack_tile`].
///
/// # Safety
/// There is room for `lines` lines of `columns` elements each, both at most [`TILE`], and the processor has L's
/// instructions.
#[inline(always)]
unsafe fn unpack_tile<L: Lanes<T>, T: Word>(
    one: T,
    order: BitOrder,
    words: &mut [u64; TILE],
    dst: *mut u8,
    stride: isize,
    lines: usize,
    columns: usize,
) {
    if columns <= FEW_COLUMNS {
        for (column, &word) in words[..columns].iter().enumerate() {
            let bits = if order == BitOrder::Big { word.reverse_bits() } else { word };
            // SAFETY: the caller's promise.
            unsafe { distribute::<L, T, false>(one, bits, dst.add(column * T::SIZE), stride, lines) };
        }
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { L::transpose(words) };
    // SAFETY: the caller's promise.
    unsafe {
        if columns == TILE {
            for (word, line) in words_of(order).zip(0..lines) {
                let dst = dst.offset(line as isize * stride);
                prefetch(dst.wrapping_add(TILE * T::SIZE));
                L::from_bits::<false, false>(one, words[word], dst);
            }
        } else {
            for (word, line) in words_of(order).zip(0..lines) {
                L::some_from_bits(one, words[word], dst.offset(line as isize * stride), columns);
            }
        }
    }
}

/// Rust alone: every processor has it, and the others are held to it.
pub struct Portable;

/// Multiplying 8 bytes of 0 or 1 by this gathers them in the top byte, the first byte's bit lowest ...
const GATHER_LITTLE: u64 = 0x0102_0408_1020_4080;
/// ... or highest.
const GATHER_BIG: u64 = 0x8040_2010_0804_0201;

/// Bit k in byte k, or bit 7 - k: what each of 8 copies of a byte is asked for.
pub const fn lane_bits<const BIG: bool>() -> u64 {
    if BIG { 0x0102_0408_1020_4080 } else { 0x8040_2010_0804_0201 }
}

impl<T: Word> Lanes<T> for Portable {
    // None: what lies between elements may be written by others meanwhile, and plain loads must not see that.
    const WIDEST_COMB: usize = 1;

    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: Zeros<T>, src: *const u8) -> u64 {
        // SAFETY: the caller's promise; an array of T has no invalid values.
        let words = unsafe { src.cast::<[T; 64]>().read_unaligned() };
        let mut truth = [0u8; 64];
        for (byte, word) in truth.iter_mut().zip(words) {
            *byte = zeros.bit(word);
        }
        let gather = if BIG { GATHER_BIG } else { GATHER_LITTLE };
        let mut bits = [0u8; 8];
        for (byte, truth) in bits.iter_mut().zip(truth.as_chunks().0) {
            *byte = (u64::from_le_bytes(*truth).wrapping_mul(gather) >> 56) as u8;
        }
        u64::from_le_bytes(bits)
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(one: T, bits: u64, dst: *mut u8) {
        let mut truth = [0u8; 64];
        for (truth, byte) in truth.as_chunks_mut().0.iter_mut().zip(bits.to_le_bytes()) {
            // Each lane has a copy of the byte and looks at one bit of it: if set, the sum carries into its top bit.
            let lanes = (u64::from(byte) * 0x0101_0101_0101_0101) & lane_bits::<BIG>();
            *truth = ((lanes + 0x7f7f_7f7f_7f7f_7f7f) >> 7 & 0x0101_0101_0101_0101).to_le_bytes();
        }
        let mut words = [T::default(); 64];
        for (word, bit) in words.iter_mut().zip(truth) {
            *word = one.times(bit);
        }
        // SAFETY: the caller's promise.
        unsafe { dst.cast::<[T; 64]>().write_unaligned(words) };
    }
}

/// First column and width of blocks that cover all columns. Rather than a narrow last one there is a whole one that
/// overlaps the one before: what is done twice has the same result, and a narrow block takes longer than two whole ones.
#[inline(always)]
fn blocks<const BLOCK: usize>(columns: usize) -> impl Iterator<Item = (usize, usize)> {
    let width = BLOCK.min(columns);
    (0..columns).step_by(BLOCK).map(move |start| (start.min(columns - width), width))
}

/// Packs across: bit j of byte c is that of element c of the line that begins `j * stride` bytes after `src`. At most
/// 8 lines; bits of lines that are not there are 0.
///
/// # Safety
/// Every line holds `columns` elements, at any alignment; `dst` has room for `columns` bytes.
#[inline(always)]
unsafe fn pack_across<T: Word, const BIG: bool>(
    zeros: Zeros<T>,
    src: *const u8,
    stride: isize,
    lines: usize,
    columns: usize,
    dst: *mut u8,
) {
    const BLOCK: usize = 64;
    for (start, width) in blocks::<BLOCK>(columns) {
        let mut bytes = [0u8; BLOCK];
        for line in 0..lines {
            let shift = if BIG { 7 - line } else { line };
            // SAFETY: `width` elements of this line are there.
            unsafe {
                let line = src.offset(line as isize * stride).add(start * T::SIZE);
                let words = if width == BLOCK {
                    line.cast::<[T; BLOCK]>().read_unaligned()
                } else {
                    let mut words = [zeros.first; BLOCK];
                    ptr::copy_nonoverlapping(line, words.as_mut_ptr().cast(), width * T::SIZE);
                    words
                };
                bytes.iter_mut().zip(words).for_each(|(byte, word)| *byte |= zeros.bit(word) << shift);
            }
        }
        // SAFETY: there is room for `columns` bytes.
        unsafe {
            let dst = dst.add(start);
            if width == BLOCK {
                dst.cast::<[u8; BLOCK]>().write_unaligned(bytes);
            } else {
                ptr::copy_nonoverlapping(bytes.as_ptr(), dst, width);
            }
        }
    }
}

/// Unpacks across: the inverse of [`pack_across`].
///
/// # Safety
/// `src` holds `columns` bytes; every line has room for `columns` elements, at any alignment.
#[inline(always)]
unsafe fn unpack_across<T: Word, const BIG: bool>(
    one: T,
    src: *const u8,
    columns: usize,
    dst: *mut u8,
    stride: isize,
    lines: usize,
) {
    const BLOCK: usize = 64;
    for (start, width) in blocks::<BLOCK>(columns) {
        let mut bytes = [0u8; BLOCK];
        // SAFETY: there are `columns` bytes.
        unsafe {
            let src = src.add(start);
            if width == BLOCK {
                bytes = src.cast::<[u8; BLOCK]>().read_unaligned();
            } else {
                ptr::copy_nonoverlapping(src, bytes.as_mut_ptr(), width);
            }
        }
        for line in 0..lines {
            let shift = if BIG { 7 - line } else { line };
            let words: [T; BLOCK] = bytes.map(|byte| one.times(byte >> shift & 1));
            // SAFETY: there is room for `width` elements of this line.
            unsafe {
                let line = dst.offset(line as isize * stride).add(start * T::SIZE);
                if width == BLOCK {
                    line.cast::<[T; BLOCK]>().write_unaligned(words);
                } else {
                    ptr::copy_nonoverlapping(words.as_ptr().cast(), line, width * T::SIZE);
                }
            }
        }
    }
}

/// Rows alike: how many, and how many bytes lie from one to the next on the side of the elements and on that of the bytes.
#[derive(Clone, Copy)]
pub struct Rows {
    pub count: usize,
    pub steps: [isize; 2],
}

impl Rows {
    pub const ONE: Self = Self { count: 1, steps: [0, 0] };

    /// How far each row is from the first.
    pub fn offsets(self) -> impl Iterator<Item = [isize; 2]> {
        (0..self.count as isize).map(move |row| self.steps.map(|step| row * step))
    }
}

type Pack = unsafe fn(BitRule, BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows);
type Unpack = unsafe fn(OnePattern, BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows);
type PackAcross =
    unsafe fn(BitRule, BitOrder, src: *const u8, stride: isize, lines: usize, columns: usize, dst: *mut u8);
type PackRuns = unsafe fn(BitRule, BitOrder, cursor: &mut Cursor<'_, 1>, base: *const u8, bits: usize, dst: *mut u8);
type UnpackRuns = unsafe fn(
    OnePattern,
    BitOrder,
    src: *const u8,
    available: usize,
    cursor: &mut Cursor<'_, 1>,
    base: *mut u8,
    bits: usize,
);
type PackTile =
    unsafe fn(BitRule, BitOrder, src: *const u8, stride: isize, lines: usize, columns: usize, words: &mut [u64; TILE]);
type UnpackTile =
    unsafe fn(OnePattern, BitOrder, words: &mut [u64; TILE], dst: *mut u8, stride: isize, lines: usize, columns: usize);
type UnpackAcross =
    unsafe fn(OnePattern, BitOrder, src: *const u8, columns: usize, dst: *mut u8, stride: isize, lines: usize);

/// The kernels of one instruction set for one width of element; their arguments and promises are those of the functions
/// of the same names above. `pack` and `unpack` do so for each of some rows: fewer calls, where rows are short.
#[derive(Clone, Copy)]
pub struct Kernels {
    pub pack: Pack,
    pub unpack: Unpack,
    pub pack_across: PackAcross,
    pub unpack_across: UnpackAcross,
    pub pack_runs: PackRuns,
    pub unpack_runs: UnpackRuns,
    pub pack_tile: PackTile,
    pub unpack_tile: UnpackTile,
}

/// Compiles the kernels above for an instruction set.
macro_rules! kernels {
    ($lanes:ty $(, $feature:literal)?) => {{
        $(#[target_feature(enable = $feature)])?
        unsafe fn pack_with<T: Word>(
            rule: BitRule,
            order: BitOrder,
            src: *const u8,
            bits: usize,
            dst: *mut u8,
            rows: &Rows,
        ) where
            $lanes: Lanes<T>,
        {
            let zeros = Zeros::new(rule);
            for [element, byte] in rows.offsets() {
                // SAFETY: the caller's promise.
                unsafe {
                    let (src, dst) = (src.offset(element), dst.offset(byte));
                    match order {
                        BitOrder::Big => pack::<$lanes, T, true>(zeros, src, bits, dst),
                        BitOrder::Little => pack::<$lanes, T, false>(zeros, src, bits, dst),
                    }
                }
            }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn unpack_with<T: Word>(
            one: OnePattern,
            order: BitOrder,
            src: *const u8,
            bits: usize,
            dst: *mut u8,
            rows: &Rows,
        ) where
            $lanes: Lanes<T>,
        {
            let one = T::from_u64(one.pattern);
            for [element, byte] in rows.offsets() {
                // SAFETY: the caller's promise.
                unsafe {
                    let (src, dst) = (src.offset(byte), dst.offset(element));
                    match order {
                        BitOrder::Big => unpack::<$lanes, T, true>(one, src, bits, dst),
                        BitOrder::Little => unpack::<$lanes, T, false>(one, src, bits, dst),
                    }
                }
            }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn pack_across_with<T: Word>(
            rule: BitRule,
            order: BitOrder,
            src: *const u8,
            stride: isize,
            lines: usize,
            columns: usize,
            dst: *mut u8,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                match order {
                    BitOrder::Big => pack_across::<T, true>(Zeros::new(rule), src, stride, lines, columns, dst),
                    BitOrder::Little => pack_across::<T, false>(Zeros::new(rule), src, stride, lines, columns, dst),
                }
            }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn unpack_across_with<T: Word>(
            one: OnePattern,
            order: BitOrder,
            src: *const u8,
            columns: usize,
            dst: *mut u8,
            stride: isize,
            lines: usize,
        ) {
            let one = T::from_u64(one.pattern);
            // SAFETY: the caller's promise.
            unsafe {
                match order {
                    BitOrder::Big => unpack_across::<T, true>(one, src, columns, dst, stride, lines),
                    BitOrder::Little => unpack_across::<T, false>(one, src, columns, dst, stride, lines),
                }
            }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn pack_runs_with<T: Word>(
            rule: BitRule,
            order: BitOrder,
            cursor: &mut Cursor<'_, 1>,
            base: *const u8,
            bits: usize,
            dst: *mut u8,
        ) where
            $lanes: Lanes<T>,
        {
            // SAFETY: the caller's promise.
            unsafe {
                pack_runs::<$lanes, T>(Zeros::new(rule), order, cursor, base, bits, dst)
            }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn unpack_runs_with<T: Word>(
            one: OnePattern,
            order: BitOrder,
            src: *const u8,
            available: usize,
            cursor: &mut Cursor<'_, 1>,
            base: *mut u8,
            bits: usize,
        ) where
            $lanes: Lanes<T>,
        {
            // SAFETY: the caller's promise.
            unsafe {
                let one = T::from_u64(one.pattern);
                match order {
                    BitOrder::Big => unpack_runs::<$lanes, T, true>(one, src, available, cursor, base, bits),
                    BitOrder::Little => unpack_runs::<$lanes, T, false>(one, src, available, cursor, base, bits),
                }
            }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn pack_tile_with<T: Word>(
            rule: BitRule,
            order: BitOrder,
            src: *const u8,
            stride: isize,
            lines: usize,
            columns: usize,
            words: &mut [u64; TILE],
        ) where
            $lanes: Lanes<T>,
        {
            // SAFETY: the caller's promise.
            unsafe { pack_tile::<$lanes, T>(Zeros::new(rule), order, src, stride, lines, columns, words) }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn unpack_tile_with<T: Word>(
            one: OnePattern,
            order: BitOrder,
            words: &mut [u64; TILE],
            dst: *mut u8,
            stride: isize,
            lines: usize,
            columns: usize,
        ) where
            $lanes: Lanes<T>,
        {
            // SAFETY: the caller's promise.
            unsafe { unpack_tile::<$lanes, T>(T::from_u64(one.pattern), order, words, dst, stride, lines, columns) }
        }
        const fn of_width<T: Word>() -> Kernels
        where
            $lanes: Lanes<T>,
        {
            Kernels {
                pack: pack_with::<T>,
                unpack: unpack_with::<T>,
                pack_across: pack_across_with::<T>,
                unpack_across: unpack_across_with::<T>,
                pack_runs: pack_runs_with::<T>,
                unpack_runs: unpack_runs_with::<T>,
                pack_tile: pack_tile_with::<T>,
                unpack_tile: unpack_tile_with::<T>,
            }
        }
        [of_width::<u8>(), of_width::<u16>(), of_width::<u32>(), of_width::<u64>()]
    }};
}

/// An instruction set and its kernels for elements of 1, 2, 4 and 8 bytes.
pub struct InstructionSet {
    pub name: &'static str,
    kernels: [Kernels; 4],
}

/// What is in use, once it has been chosen. No lock: a child that is forked while another thread chooses would wait for it
/// for ever. Who comes at the same time chooses the same.
static CHOSEN: AtomicPtr<InstructionSet> = AtomicPtr::new(ptr::null_mut());

static PORTABLE: InstructionSet = InstructionSet { name: "portable", kernels: kernels!(Portable) };

impl InstructionSet {
    /// The kernels for elements of `size` bytes.
    pub fn kernels(&self, size: usize) -> &Kernels {
        &self.kernels[size.trailing_zeros() as usize & 3]
    }

    /// The instruction sets that this processor has, the best first.
    pub fn available() -> impl Iterator<Item = &'static Self> {
        #[cfg(target_arch = "x86_64")]
        {
            static AVX512: InstructionSet =
                InstructionSet { name: "avx512", kernels: kernels!(Avx512, "avx512f,avx512bw,bmi2") };
            static AVX2: InstructionSet = InstructionSet { name: "avx2", kernels: kernels!(Avx2, "avx2") };
            let has_avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("bmi2");
            let has_avx2 = is_x86_feature_detected!("avx2");
            [has_avx512.then_some(&AVX512), has_avx2.then_some(&AVX2), Some(&PORTABLE)].into_iter().flatten()
        }
        #[cfg(not(target_arch = "x86_64"))]
        std::iter::once(&PORTABLE)
    }

    /// The one to use: the best there is, or the one that GRADCODEC_CPU names, if it is there.
    #[inline(always)]
    pub fn chosen() -> &'static Self {
        // SAFETY: what is stored there is static.
        unsafe { CHOSEN.load(Ordering::Acquire).as_ref() }.unwrap_or_else(Self::choose)
    }

    #[cold]
    fn choose() -> &'static Self {
        // Not std::env::var_os, which allocates.
        // SAFETY: a name that ends with a NUL; what it stands for ends with one too, and is not used below.
        let wanted = unsafe { libc::getenv(c"GRADCODEC_CPU".as_ptr()).as_ref().map(|text| CStr::from_ptr(text)) };
        let named = Self::available().find(|set| wanted.is_none_or(|name| name.to_bytes() == set.name.as_bytes()));
        let chosen = named.or_else(|| Self::available().next()).unwrap_or(&PORTABLE);
        CHOSEN.store(ptr::from_ref(chosen).cast_mut(), Ordering::Release);
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::loops::Loops;

    /// Elements that matter to a test: zero, one, the borders of what counts as 0, and noise.
    fn element(index: usize, rule: BitRule) -> u64 {
        let noise = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        match noise >> 60 {
            0..=3 => 0,
            4 => rule.first_zero,
            5 => rule.first_zero.wrapping_sub(1),
            6 => rule.first_zero.wrapping_add(rule.span),
            7 => rule.first_zero.wrapping_add(rule.span).wrapping_add(1),
            _ => noise >> 17,
        }
    }

    fn rules_of(size: usize) -> Vec<BitRule> {
        let truth = BitRule { size, first_zero: 0, span: 0 };
        let signs: &[(u64, u64)] = match size {
            2 => &[(0x8001, 0x7bff), (0x8001, 0x7f7f)],
            4 => &[(0x8000_0001, 0x7f7f_ffff)],
            8 => &[(0x8000_0000_0000_0001, 0x7fef_ffff_ffff_ffff)],
            _ => &[],
        };
        let signs = signs.iter().map(|&(first_zero, span)| BitRule { size, first_zero, span });
        std::iter::once(truth).chain(signs).collect()
    }

    /// Every instruction set, width, rule, order and length around a word, at an odd address.
    fn for_every_case(mut check: impl FnMut(&InstructionSet, BitRule, BitOrder, usize, &[u8])) {
        for set in InstructionSet::available() {
            for size in [1, 2, 4, 8] {
                for rule in rules_of(size) {
                    let bytes: Vec<u8> =
                        (0..200).flat_map(|index| element(index, rule).to_le_bytes()[..size].to_vec()).collect();
                    for order in [BitOrder::Big, BitOrder::Little] {
                        for bits in (0..=200).filter(|bits| bits % 64 < 18 || bits % 64 > 46) {
                            check(set, rule, order, bits, &bytes);
                        }
                    }
                }
            }
        }
    }

    /// The bit of an element by the definition, and its mask in a byte.
    fn model(bytes: &[u8], index: usize, rule: BitRule) -> bool {
        let mut word = [0; 8];
        word[..rule.size].copy_from_slice(&bytes[index * rule.size..][..rule.size]);
        let word = u64::from_le_bytes(word);
        word < rule.first_zero || word > rule.first_zero + rule.span
    }

    fn mask(order: BitOrder, index: usize) -> u8 {
        if order == BitOrder::Big { 0x80 >> (index % 8) } else { 1 << (index % 8) }
    }

    #[test]
    fn packing_is_the_definition_in_every_instruction_set() {
        for_every_case(|set, rule, order, bits, bytes| {
            let mut src = vec![0xff; 1];
            src.extend(&bytes[..bits * rule.size]);
            let mut expected = vec![0; bits.div_ceil(8)];
            (0..bits)
                .filter(|&index| model(bytes, index, rule))
                .for_each(|index| expected[index / 8] |= mask(order, index));
            expected.push(0xee);
            let mut dst = vec![0xee; 1 + expected.len()];
            // SAFETY: the elements, and room for their bytes.
            unsafe {
                (set.kernels(rule.size).pack)(rule, order, src[1..].as_ptr(), bits, dst[1..].as_mut_ptr(), &Rows::ONE)
            };
            assert_eq!(dst[1..], expected, "{} {rule:x?} {order:?} {bits}", set.name);
        });
    }

    #[test]
    fn unpacking_is_the_definition_in_every_instruction_set() {
        for_every_case(|set, rule, order, bits, bytes| {
            let one =
                OnePattern { size: rule.size, pattern: 0x3ff0_1234_3f80_3c01 & (u64::MAX >> (64 - 8 * rule.size)) };
            let mut expected = Vec::new();
            for index in 0..bits {
                let set = bytes[index / 8] & mask(order, index) != 0;
                expected.extend(&(if set { one.pattern } else { 0 }).to_le_bytes()[..rule.size]);
            }
            expected.push(0xee);
            let mut dst = vec![0xee; 1 + expected.len()];
            // SAFETY: the bytes, and room for the elements.
            unsafe {
                (set.kernels(rule.size).unpack)(one, order, bytes.as_ptr(), bits, dst[1..].as_mut_ptr(), &Rows::ONE)
            };
            assert_eq!(dst[1..], expected, "{} {one:x?} {order:?} {bits}", set.name);
        });
    }

    #[test]
    fn rows_are_packed_and_unpacked_each_for_itself() {
        for_every_case(|set, rule, order, bits, bytes| {
            // Row j begins at element 3 * j and byte 26 * j, with a byte between that is nobody's.
            let (kernels, size) = (set.kernels(rule.size), rule.size);
            let rows = Rows { count: 3, steps: [3 * size as isize, 26] };
            let bits = bits.min(200 - 6);
            let (mut expected, mut dst) = (vec![0xee; 3 * 26], vec![0xee; 3 * 26]);
            for row in 0..3 {
                let ones = (0..bits).filter(|index| model(bytes, 3 * row + index, rule));
                expected[26 * row..][..bits.div_ceil(8)].fill(0);
                ones.for_each(|index| expected[26 * row + index / 8] |= mask(order, index));
            }
            // SAFETY: the elements, and room for their bytes.
            unsafe { (kernels.pack)(rule, order, bytes.as_ptr(), bits, dst.as_mut_ptr(), &rows) };
            assert_eq!(dst, expected, "{} {rule:x?} {order:?} {bits}", set.name);

            let rows = Rows { count: 3, steps: [201 * size as isize, 26] };
            let one = OnePattern { size, pattern: 1 };
            let (mut elements, mut model) = (vec![0xdd; 3 * 201 * size], vec![0xdd; 3 * 201 * size]);
            for (row, index) in (0..3).flat_map(|row| (0..bits).map(move |index| (row, index))) {
                let set = u64::from(expected[26 * row + index / 8] & mask(order, index) != 0);
                model[(201 * row + index) * size..][..size].copy_from_slice(&set.to_le_bytes()[..size]);
            }
            // SAFETY: the bytes, and room for the elements.
            unsafe { (kernels.unpack)(one, order, expected.as_ptr(), bits, elements.as_mut_ptr(), &rows) };
            assert!(elements == model, "{} {one:x?} {order:?} {bits}: unpacking", set.name);
        });
    }

    #[test]
    fn packing_across_is_packing_along_turned_round() {
        for_every_case(|set, rule, order, columns, bytes| {
            for lines in [0, 1, 5, 8] {
                // Line j begins at element j: overlapping, as inputs may.
                let columns = columns.min(200 - 8);
                let expected: Vec<u8> = (0..columns)
                    .map(|column| {
                        let ones = (0..lines).filter(|line| model(bytes, line + column, rule));
                        ones.map(|line| mask(order, line)).sum()
                    })
                    .collect();
                let mut dst = vec![0xee; columns];
                let stride = rule.size as isize;
                // SAFETY: the elements, and room for a byte a column.
                unsafe {
                    let kernels = set.kernels(rule.size);
                    (kernels.pack_across)(rule, order, bytes.as_ptr(), stride, lines, columns, dst.as_mut_ptr());
                }
                assert_eq!(dst, expected, "{} {rule:x?} {order:?} {columns} x {lines}", set.name);
            }
        });
    }

    #[test]
    fn unpacking_across_is_unpacking_along_turned_round() {
        for_every_case(|set, rule, order, columns, bytes| {
            let one = OnePattern { size: rule.size, pattern: 1 };
            for lines in [0, 1, 5, 8] {
                let width = columns * rule.size + 3;
                let mut expected = vec![0xee; 8 * width];
                for (line, column) in (0..lines).flat_map(|line| (0..columns).map(move |column| (line, column))) {
                    let set = u64::from(bytes[column] & mask(order, line) != 0);
                    let place = line * width + column * rule.size;
                    expected[place..place + rule.size].copy_from_slice(&set.to_le_bytes()[..rule.size]);
                }
                let mut dst = vec![0xee; 8 * width];
                // SAFETY: the bytes, and room for lines `width` bytes apart.
                unsafe {
                    let kernels = set.kernels(rule.size);
                    (kernels.unpack_across)(
                        one,
                        order,
                        bytes.as_ptr(),
                        columns,
                        dst.as_mut_ptr(),
                        width as isize,
                        lines,
                    );
                }
                assert_eq!(dst, expected, "{} {one:x?} {order:?} {columns} x {lines}", set.name);
            }
        });
    }

    #[test]
    fn runs_are_packed_and_unpacked_as_if_side_by_side() {
        for_every_case(|set, rule, order, bits, bytes| {
            // Every ninth length is all remainders of 64 that matter, in a tenth of the time.
            if !bits.is_multiple_of(9) {
                return;
            }
            let (size, kernels) = (rule.size as i64, set.kernels(rule.size));
            let one =
                OnePattern { size: rule.size, pattern: 0x3ff0_1234_3f80_3c01 & (u64::MAX >> (64 - 8 * rule.size)) };
            // Runs of 1 to 200 elements at small, negative, wide and odd strides.
            let runs = [
                (200, 2),
                (200, -1),
                (33, 1),
                (7, 3),
                (33, -5),
                (200, 9),
                (1, 1),
                (200, 3),
                (200, -4),
                (70, 7),
                (200, -8),
            ];
            for (run, stride) in runs {
                for stride in [stride * size, stride * (size + 1)] {
                    let mut loops = Loops::<1>::new();
                    loops.push(200i64.div_euclid(run) + 1, [run * 73 * 8]);
                    loops.push(run, [stride]);
                    let mut places = Vec::new();
                    let mut cursor = Cursor::starting_at(&loops, 0);
                    while let Some(run) = cursor.next_run((bits - places.len()) as i64) {
                        places.extend((0..run.count).map(|index| run.offsets[0] + index * run.strides[0]));
                    }
                    // Memory with as much before the first element as negative strides need, and the elements spread.
                    let middle = 200 * 81;
                    let mut memory = vec![0xeeu8; 2 * middle + 400 * 73 * 8];
                    for (index, place) in places.iter().enumerate() {
                        let at = (middle as i64 + place) as usize;
                        memory[at..at + rule.size].copy_from_slice(&bytes[index * rule.size..][..rule.size]);
                    }
                    let (mut expected, mut dst) = (vec![0xee; bits.div_ceil(8) + 1], vec![0xee; bits.div_ceil(8) + 1]);
                    let mut cursor = Cursor::starting_at(&loops, 0);
                    // SAFETY: the elements, and room for their bytes.
                    unsafe {
                        (kernels.pack)(rule, order, bytes.as_ptr(), bits, expected.as_mut_ptr(), &Rows::ONE);
                        let base = memory.as_ptr().add(middle);
                        (kernels.pack_runs)(rule, order, &mut cursor, base, bits, dst.as_mut_ptr());
                    }
                    let case = format!("{} {rule:x?} {order:?} {bits} bits, runs of {run} at {stride}", set.name);
                    assert_eq!(dst, expected, "{case}");

                    // Back again, with the last byte missing: zeros there, and nothing else touched.
                    memory.fill(0xdd);
                    let mut model = memory.clone();
                    let available = (bits / 8).saturating_sub(1);
                    for (index, place) in places.iter().enumerate() {
                        let set = index / 8 < available && expected[index / 8] & mask(order, index) != 0;
                        let at = (middle as i64 + place) as usize;
                        let word = (if set { one.pattern } else { 0 }).to_le_bytes();
                        model[at..at + rule.size].copy_from_slice(&word[..rule.size]);
                    }
                    let mut cursor = Cursor::starting_at(&loops, 0);
                    // SAFETY: the bytes, and room for the elements.
                    unsafe {
                        let base = memory.as_mut_ptr().add(middle);
                        (kernels.unpack_runs)(one, order, expected.as_ptr(), available, &mut cursor, base, bits);
                    }
                    assert!(memory == model, "{case}: unpacking");
                }
            }
        });
    }

    #[test]
    fn a_tile_is_turned_round() {
        for set in InstructionSet::available() {
            for size in [1, 2, 4, 8] {
                let (kernels, rule) = (set.kernels(size), BitRule { size, first_zero: 0, span: 0 });
                let bytes: Vec<u8> =
                    (0..70 * 70).flat_map(|index| element(index, rule).to_le_bytes()[..size].to_vec()).collect();
                for (lines, columns) in [(64, 64), (64, 5), (64, 3), (3, 64), (63, 62), (1, 1)] {
                    let (mut words, stride) = ([7; TILE], 70 * size);
                    // SAFETY: 70 lines of 70 elements, of which the tile is a part.
                    unsafe {
                        (kernels.pack_tile)(
                            rule,
                            BitOrder::Little,
                            bytes.as_ptr(),
                            stride as isize,
                            lines,
                            columns,
                            &mut words,
                        )
                    };
                    for (column, word) in words.iter().enumerate().take(columns) {
                        let ones = (0..lines).filter(|line| model(bytes[line * stride..].as_ref(), column, rule));
                        assert_eq!(*word, ones.map(|line| 1 << line).sum(), "{} {lines} x {columns}", set.name);
                    }
                    let mut expected = vec![0xee; bytes.len()];
                    for (line, column) in (0..lines).flat_map(|line| (0..columns).map(move |column| (line, column))) {
                        let at = line * stride + column * size;
                        expected[at..at + size].copy_from_slice(&(words[column] >> line & 1).to_le_bytes()[..size]);
                    }
                    let mut dst = vec![0xee; bytes.len()];
                    let one = OnePattern { size, pattern: 1 };
                    // SAFETY: as above.
                    unsafe {
                        (kernels.unpack_tile)(
                            one,
                            BitOrder::Little,
                            &mut words,
                            dst.as_mut_ptr(),
                            stride as isize,
                            lines,
                            columns,
                        );
                    }
                    assert!(dst == expected, "{} {lines} x {columns}", set.name);
                }
            }
        }
    }
}
