//! Strings of bits in memory that begin and end anywhere: a writer and a reader, a word of 64 bits at a time.

use std::{mem::MaybeUninit, ptr, slice};

use crate::plan::bits::BitOrder;

/// The same bits with the order within each byte reversed, with BIG.
#[inline(always)]
pub fn in_order<const BIG: bool>(bits: u64) -> u64 {
    if BIG { bits.swap_bytes().reverse_bits() } else { bits }
}

/// Words that wait on the stack, 1 KiB: so the order of bits is reversed a vector at a time, where that of a single word
/// would take as long as the comparison of its 64 elements.
pub const BLOCK: usize = 128;

/// What makes words one after the other, and what takes them. These are no closures: a closure cannot be told to be inlined,
/// and one that the compiler leaves as a function lacks the instructions of its set. Runs of int64 with AVX-512 then took 10
/// times as long.
pub trait Words {
    /// # Safety
    /// There is another.
    unsafe fn next(&mut self) -> u64;
}

pub trait TakesWords {
    /// # Safety
    /// There is room for a word of this number.
    unsafe fn take(&self, number: usize, word: u64);
}

/// Takes bits in the order of elements, and puts them in memory in the order of bits asked for.
pub struct BitWriter<'a> {
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
    pub unsafe fn new(block: &'a mut [MaybeUninit<u64>; BLOCK], dst: *mut u8, order: BitOrder) -> Self {
        Self { block, words: 0, waiting: 0, filled: 0, dst, order }
    }

    /// Writes the lowest `count` bits, at most 64, above which there are zeros.
    ///
    /// # Safety
    /// There is room: see `new`.
    #[inline(always)]
    pub unsafe fn push(&mut self, bits: u64, count: usize) {
        self.waiting |= bits << self.filled;
        self.filled += count;
        if self.filled >= 64 {
            // SAFETY: these bits have been pushed, so there is room for them.
            unsafe { self.push_word(self.waiting) };
            self.filled -= 64;
            // What did not fit: the highest bits.
            self.waiting = if self.filled == 0 { 0 } else { bits >> (count - self.filled) };
        }
    }

    /// Writes so many words, one after the other.
    ///
    /// # Safety
    /// There is room (see `new`), and `words` has so many.
    #[inline(always)]
    pub unsafe fn push_words(&mut self, count: usize, mut words: impl Words) {
        if self.filled > 0 {
            for _ in 0..count {
                // SAFETY: the caller promises `count` words, and room for them.
                unsafe { self.push(words.next(), 64) };
            }
            return;
        }
        let mut left = count;
        while left > 0 {
            let some = left.min(BLOCK - self.words);
            for slot in &mut self.block[self.words..self.words + some] {
                // SAFETY: the caller promises so many words.
                slot.write(unsafe { words.next() });
            }
            self.words += some;
            left -= some;
            if self.words == BLOCK {
                // SAFETY: these words have been pushed, so there is room for them.
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
            // SAFETY: these words have been pushed, so there is room for them.
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
    pub unsafe fn finish(mut self) {
        // SAFETY: all that waits has been pushed, so there is room for its bytes.
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

/// The 64 bits of 72 from number `shift`, at most 7, in the order of memory.
#[inline(always)]
pub fn joined<const BIG: bool>(word: u64, last: u8, shift: usize) -> u64 {
    if BIG {
        (word.swap_bytes() << shift | u64::from(last) >> (8 - shift)).swap_bytes()
    } else {
        word >> shift | u64::from(last) << 1 << (63 - shift)
    }
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
    pub unsafe fn new(src: *const u8, available: usize) -> Self {
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
        joined::<BIG>(word, last, shift)
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

    /// Gives the next words, in the order of memory.
    ///
    /// # Safety
    /// `taker` has room for so many.
    #[inline(always)]
    pub unsafe fn for_each_word(&mut self, words: usize, taker: impl TakesWords) {
        let (first, shift) = (self.position / 8, self.position % 8);
        if first + 8 * words < self.available {
            for index in 0..words {
                // SAFETY: there are 8 bytes, and one more; this is one of so many words.
                unsafe {
                    let src = self.src.add(first + 8 * index);
                    let word = u64::from_le(src.cast::<u64>().read_unaligned());
                    taker.take(index, joined::<BIG>(word, src.add(8).read(), shift));
                }
            }
            self.position += 64 * words;
        } else {
            for index in 0..words {
                // SAFETY: this is one of so many.
                unsafe { taker.take(index, self.peek()) };
                self.position += 64;
            }
        }
    }

    /// The next `count` bits, at most 64, in the order of elements, zeros above.
    #[inline(always)]
    pub fn next(&mut self, count: usize) -> u64 {
        let word = in_order::<BIG>(self.peek());
        self.position += count;
        word & (u64::MAX >> (64 - count))
    }

    /// The 64 bits from number `position`, in the order of memory. Zeros past the last byte.
    #[inline(always)]
    pub fn word_at(&self, position: usize) -> u64 {
        Self { position, ..*self }.peek()
    }

    /// The next `count` bits after the 64 - `count` before them, which there are, in the order of memory.
    #[inline(always)]
    pub fn word_up_to(&mut self, count: usize) -> u64 {
        self.position += count;
        self.word_at(self.position - 64)
    }
}
