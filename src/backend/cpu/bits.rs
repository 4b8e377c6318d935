//! Packing and unpacking bits on the CPU.
//!
//! Memory is bound by its bandwidth, so each byte is touched once: contiguous rows go straight through the kernels,
//! everything else through a block on the stack that stays in the first cache.

use std::ptr;

use crate::{
    ops::{
        bits::{BitOrder, BitPlan, One, Test},
        loops::{Cursor, Run},
    },
    tensor::View,
};

/// Elements that pass through the stack at once when a side is not contiguous: 4 KiB of the widest.
const BLOCK: usize = 512;

/// An element as an unsigned integer of its width.
trait Word: Copy + Default + Ord {
    const SIZE: usize = size_of::<Self>();
    fn from_u64(value: u64) -> Self;
    fn wrapping_sub(self, other: Self) -> Self;
    /// `self` where `bit` is 1, 0 where it is 0.
    fn times(self, bit: u8) -> Self;
}

macro_rules! word {
    ($($t:ty)*) => {$(
        impl Word for $t {
            fn from_u64(value: u64) -> Self {
                value as $t
            }
            fn wrapping_sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            fn times(self, bit: u8) -> Self {
                self & (bit as $t).wrapping_neg()
            }
        }
    )*};
}
word!(u8 u16 u32 u64);

pub fn pack(plan: &BitPlan, test: Test, src: &View<'_>, dst: &View<'_>) {
    match test.size {
        1 => pack_rows::<u8>(plan, test, src, dst),
        2 => pack_rows::<u16>(plan, test, src, dst),
        4 => pack_rows::<u32>(plan, test, src, dst),
        _ => pack_rows::<u64>(plan, test, src, dst),
    }
}

pub fn unpack(plan: &BitPlan, one: One, src: &View<'_>, dst: &View<'_>) {
    match one.size {
        1 => unpack_rows::<u8>(plan, one, src, dst),
        2 => unpack_rows::<u16>(plan, one, src, dst),
        4 => unpack_rows::<u32>(plan, one, src, dst),
        _ => unpack_rows::<u64>(plan, one, src, dst),
    }
}

fn pack_rows<T: Word>(plan: &BitPlan, test: Test, src: &View<'_>, dst: &View<'_>) {
    let zeros = Zeros { first: T::from_u64(test.first_zero), span: T::from_u64(test.span) };
    let contiguous = is_contiguous::<T>(plan);
    for_each_row(plan, |element, byte| {
        // SAFETY: the plan was made of these two views, whose memory their makers vouched for: every offset that its
        // loops give lies within them, and they do not intersect.
        unsafe {
            let (src, dst) = (src.data().offset(element), dst.data().offset(byte));
            if contiguous {
                let bits = plan.elements.rounds() as usize;
                pack_words(zeros, plan.order, src, bits, dst);
                let used = bits.div_ceil(8);
                dst.add(used).write_bytes(0, plan.bytes.rounds() as usize - used);
            } else {
                pack_row::<T>(plan, zeros, src, dst);
            }
        }
    });
}

/// Packs one row of any strides.
///
/// # Safety
/// `src` and `dst` are the row's first element and byte.
unsafe fn pack_row<T: Word>(plan: &BitPlan, zeros: Zeros<T>, src: *const u8, dst: *mut u8) {
    let mut elements = [T::default(); BLOCK];
    let mut bytes = [0u8; BLOCK / 8];
    let (mut from, mut to) = (Cursor::new(&plan.elements), Cursor::new(&plan.bytes));
    let mut bits = plan.elements.rounds() as usize;
    let mut left = plan.bytes.rounds() as usize;
    while left > 0 {
        let count = bits.min(BLOCK);
        let filled = left.min(BLOCK / 8);
        bytes.fill(0);
        // SAFETY: the cursors stay within the row; the block holds `count` elements and their bits.
        unsafe {
            read(&mut from, src, &mut elements[..count]);
            pack_words(zeros, plan.order, elements.as_ptr().cast(), count, bytes.as_mut_ptr());
            write(&mut to, dst, &bytes[..filled]);
        }
        bits -= count;
        left -= filled;
    }
}

fn unpack_rows<T: Word>(plan: &BitPlan, one: One, src: &View<'_>, dst: &View<'_>) {
    let one = T::from_u64(one.pattern);
    let contiguous = is_contiguous::<T>(plan);
    for_each_row(plan, |element, byte| {
        // SAFETY: the plan was made of these two views, whose memory their makers vouched for: every offset that its
        // loops give lies within them, and they do not intersect.
        unsafe {
            let (src, dst) = (src.data().offset(byte), dst.data().offset(element));
            if contiguous {
                let elements = plan.elements.rounds() as usize;
                let bits = elements.min((plan.bytes.rounds() as usize).saturating_mul(8));
                unpack_words(one, plan.order, src, bits, dst);
                dst.add(bits * T::SIZE).write_bytes(0, (elements - bits) * T::SIZE);
            } else {
                unpack_row(plan, one, src, dst);
            }
        }
    });
}

/// Unpacks one row of any strides.
///
/// # Safety
/// `src` and `dst` are the row's first byte and element.
unsafe fn unpack_row<T: Word>(plan: &BitPlan, one: T, src: *const u8, dst: *mut u8) {
    let mut bytes = [0u8; BLOCK / 8];
    let mut elements = [T::default(); BLOCK];
    let (mut from, mut to) = (Cursor::new(&plan.bytes), Cursor::new(&plan.elements));
    let mut available = plan.bytes.rounds() as usize;
    let mut left = plan.elements.rounds() as usize;
    while left > 0 {
        let filled = left.min(BLOCK);
        let count = available.min(filled.div_ceil(8));
        bytes.fill(0);
        // SAFETY: the cursors stay within the row; the block holds `filled` elements and their bits.
        unsafe {
            read(&mut from, src, &mut bytes[..count]);
            unpack_words(one, plan.order, bytes.as_ptr(), filled, elements.as_mut_ptr().cast());
            write(&mut to, dst, &elements[..filled]);
        }
        available -= count;
        left -= filled;
    }
}

/// Whether both sides of a row lie side by side.
fn is_contiguous<T: Word>(plan: &BitPlan) -> bool {
    let size = [T::SIZE as i64];
    plan.elements.single_stride(size) == Some(size) && plan.bytes.single_stride([1]) == Some([1])
}

/// Calls `work` with the offsets of each row's first element and first byte.
fn for_each_row(plan: &BitPlan, mut work: impl FnMut(isize, isize)) {
    let mut rows = Cursor::new(&plan.rows);
    while let Some(Run { offsets: [element, byte], count, strides: [element_stride, byte_stride] }) =
        rows.next_run(i64::MAX)
    {
        for row in 0..count {
            work((plan.start + element + row * element_stride) as isize, (byte + row * byte_stride) as isize);
        }
    }
}

/// Fills `block` with what the cursor passes over.
///
/// # Safety
/// Every offset of the cursor from `base` is a readable T, of any alignment.
unsafe fn read<T: Copy>(cursor: &mut Cursor<'_, 1>, base: *const u8, block: &mut [T]) {
    let mut done = 0;
    while let Some(Run { offsets: [offset], count, strides: [stride] }) = cursor.next_run((block.len() - done) as i64) {
        for (round, slot) in block[done..].iter_mut().take(count as usize).enumerate() {
            // SAFETY: the caller's promise.
            *slot = unsafe { base.offset((offset + round as i64 * stride) as isize).cast::<T>().read_unaligned() };
        }
        done += count as usize;
    }
}

/// Writes `block` to where the cursor passes.
///
/// # Safety
/// Every offset of the cursor from `base` is a writable T, of any alignment.
unsafe fn write<T: Copy>(cursor: &mut Cursor<'_, 1>, base: *mut u8, block: &[T]) {
    let mut done = 0;
    while let Some(Run { offsets: [offset], count, strides: [stride] }) = cursor.next_run((block.len() - done) as i64) {
        for (round, &value) in block[done..].iter().take(count as usize).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { base.offset((offset + round as i64 * stride) as isize).cast::<T>().write_unaligned(value) };
        }
        done += count as usize;
    }
}

/// The elements whose bit is 0: `first ..= first + span`.
#[derive(Clone, Copy)]
struct Zeros<T> {
    first: T,
    span: T,
}

/// Multiplying 8 bytes of 0 or 1 by this gathers them in the top byte, the first byte's bit lowest ...
const GATHER_LITTLE: u64 = 0x0102_0408_1020_4080;
/// ... or highest.
const GATHER_BIG: u64 = 0x8040_2010_0804_0201;

/// Packs `bits` elements side by side to ceil(bits / 8) bytes, zeros after the last bit.
///
/// # Safety
/// `src` holds the elements, at any alignment; `dst` has room for the bytes.
unsafe fn pack_words<T: Word>(zeros: Zeros<T>, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8) {
    let gather = match order {
        BitOrder::Big => GATHER_BIG,
        BitOrder::Little => GATHER_LITTLE,
    };
    let pack_byte = |words: [T; 8]| -> u8 {
        let truth = words.map(|word| u8::from(word.wrapping_sub(zeros.first) > zeros.span));
        (u64::from_le_bytes(truth).wrapping_mul(gather) >> 56) as u8
    };
    for byte in 0..bits / 8 {
        // SAFETY: 8 more elements and a byte more are there.
        unsafe { dst.add(byte).write(pack_byte(src.add(byte * 8 * T::SIZE).cast::<[T; 8]>().read_unaligned())) };
    }
    if !bits.is_multiple_of(8) {
        // Elements that count as 0 fill the last byte.
        let mut words = [zeros.first; 8];
        let whole = bits - bits % 8;
        // SAFETY: the elements after the whole bytes are there, and a byte for them.
        unsafe {
            ptr::copy_nonoverlapping(src.add(whole * T::SIZE), words.as_mut_ptr().cast(), bits % 8 * T::SIZE);
            dst.add(whole / 8).write(pack_byte(words));
        }
    }
}

/// Unpacks ceil(bits / 8) bytes to `bits` elements side by side: `one` for 1, 0 for 0.
///
/// # Safety
/// `src` holds the bytes; `dst` has room for the elements, at any alignment.
unsafe fn unpack_words<T: Word>(one: T, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8) {
    let unpack_byte = |byte: u8| -> [T; 8] {
        let byte = match order {
            BitOrder::Big => byte.reverse_bits(),
            BitOrder::Little => byte,
        };
        std::array::from_fn(|bit| one.times(byte >> bit & 1))
    };
    for byte in 0..bits / 8 {
        // SAFETY: a byte more and room for 8 more elements are there.
        unsafe { dst.add(byte * 8 * T::SIZE).cast::<[T; 8]>().write_unaligned(unpack_byte(src.add(byte).read())) };
    }
    if !bits.is_multiple_of(8) {
        let whole = bits - bits % 8;
        // SAFETY: the byte of the last elements is there, and room for them.
        unsafe {
            let words = unpack_byte(src.add(whole / 8).read());
            ptr::copy_nonoverlapping(words.as_ptr().cast(), dst.add(whole * T::SIZE), bits % 8 * T::SIZE);
        }
    }
}
