//! Rows that are contiguous on both sides.

use crate::{
    bits::plan::BitOrder,
    cpu::simd::{Element, Simd, Values, ZeroRange, in_order},
    dlpack::rules::{BitRule, Patterns},
};

/// Rows with equal strides: their number, and the strides in bytes of the element side and of the byte side.
#[derive(Clone, Copy)]
pub struct Rows {
    pub count: usize,
    pub steps: [isize; 2],
}

impl Rows {
    pub const ONE: Self = Self { count: 1, steps: [0, 0] };

    /// Returns the offsets of each row from the first.
    pub fn offsets(self) -> impl Iterator<Item = [isize; 2]> {
        (0..self.count as isize).map(move |row| self.steps.map(|step| row * step))
    }
}

/// Bytes of output from which packing streams past the caches: 10 to 20 % faster, and no slower at half of this.
const STREAM_PACKED: usize = 2 << 20;

/// Bytes of output from which unpacking streams past the caches. Smaller output is better kept in the caches.
const STREAM_UNPACKED: usize = 64 << 20;

/// Stores a word past the caches, if the processor can.
///
/// # Safety
/// `dst` has room for 8 bytes and is aligned to 8 bytes.
#[inline(always)]
unsafe fn stream(word: u64, dst: *mut u64) {
    // SAFETY: there is room, as the caller promises, and every x86-64 processor has the instruction.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        std::arch::x86_64::_mm_stream_si64(dst.cast(), word as i64);
        #[cfg(not(target_arch = "x86_64"))]
        dst.write(word);
    }
}

/// Orders streamed stores before this thread's later stores.
#[inline(always)]
fn end_of_stream() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}

/// Writes the lowest `count` bytes of a word, 1 to 8 of them, lowest first. A call of memcpy would take as long as a
/// short row.
///
/// # Safety
/// `dst` has room for `count` bytes.
#[inline(always)]
unsafe fn write_bytes(word: u64, dst: *mut u8, count: usize) {
    // SAFETY: the pieces, which may overlap, begin at the first byte and end with the last.
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

/// Reads 1 to 8 bytes as the lowest bytes of a word; the other bytes are zeros.
///
/// # Safety
/// `src` has `count` bytes.
#[inline(always)]
unsafe fn read_bytes(src: *const u8, count: usize) -> u64 {
    // SAFETY: the pieces, which may overlap, begin at the first byte and end with the last.
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

/// Packs `bits` adjacent elements to ceil(bits / 8) bytes, with zeros after the last bit.
///
/// # Safety
/// `src` holds the elements, at any alignment; `dst` has room for the bytes; the processor has S's instructions.
#[inline(always)]
unsafe fn pack<S: Simd<T>, T: Element, const BIG: bool>(
    zeros: ZeroRange<T>, src: *const u8, bits: usize, dst: *mut u8,
) {
    let (whole, rest) = (bits / 64, bits % 64);
    // SAFETY: every index below `whole` has 64 elements and room for 8 bytes; `rest` elements and their bytes follow.
    unsafe {
        let words = dst.cast::<u64>();
        if bits / 8 >= STREAM_PACKED && dst.addr().is_multiple_of(8) {
            for index in 0..whole {
                stream(S::to_bits::<BIG>(zeros, src.add(index * 64 * T::SIZE)), words.add(index));
            }
            end_of_stream();
        } else {
            // The loop is unrolled by 8, since its own instructions are a third of a round.
            for start in (0..whole - whole % 8).step_by(8) {
                for index in start..start + 8 {
                    words.add(index).write_unaligned(S::to_bits::<BIG>(zeros, src.add(index * 64 * T::SIZE)));
                }
            }
            for index in whole - whole % 8..whole {
                words.add(index).write_unaligned(S::to_bits::<BIG>(zeros, src.add(index * 64 * T::SIZE)));
            }
        }
        if rest > 0 {
            // The last 64 elements, if there are as many, are packed again: that is faster than packing a part of them.
            let last = match (whole, BIG) {
                (0, _) => in_order::<BIG>(S::some_to_bits(zeros, src, rest)),
                (_, true) => {
                    let word = S::to_bits::<BIG>(zeros, src.add((bits - 64) * T::SIZE));
                    (word.swap_bytes() << (64 - rest)).swap_bytes()
                }
                (_, false) => S::to_bits::<BIG>(zeros, src.add((bits - 64) * T::SIZE)) >> (64 - rest),
            };
            write_bytes(last, dst.add(whole * 8), rest.div_ceil(8));
        }
    }
}

/// Unpacks ceil(bits / 8) bytes to `bits` adjacent elements, with a value for each bit.
///
/// # Safety
/// `src` holds the bytes; `dst` has room for the elements, at any alignment; the processor has S's instructions.
#[inline(always)]
unsafe fn unpack<S: Simd<T>, T: Element, const BIG: bool>(
    values: Values<T>, src: *const u8, bits: usize, dst: *mut u8,
) {
    let (whole, rest) = (bits / 64, bits % 64);
    // SAFETY: every index below `whole` has 8 bytes and room for 64 elements; the bytes of `rest` elements, and room
    // for these elements, follow.
    unsafe {
        let words = src.cast::<u64>();
        if bits * T::SIZE >= STREAM_UNPACKED && dst.addr().is_multiple_of(64) {
            for index in 0..whole {
                let bits = words.add(index).read_unaligned();
                S::from_bits::<BIG, true>(values, bits, dst.add(index * 64 * T::SIZE));
            }
            end_of_stream();
        } else {
            for index in 0..whole {
                let bits = words.add(index).read_unaligned();
                S::from_bits::<BIG, false>(values, bits, dst.add(index * 64 * T::SIZE));
            }
        }
        if rest > 0 {
            let last = read_bytes(src.add(whole * 8), rest.div_ceil(8));
            if whole == 0 {
                return S::some_from_bits(values, in_order::<BIG>(last), dst, rest);
            }
            // The last 64 elements are written again: that is faster than writing a part of them.
            let before = words.add(whole - 1).read_unaligned();
            let word = if BIG {
                (before.swap_bytes() << rest | last.swap_bytes() >> (64 - rest)).swap_bytes()
            } else {
                before >> rest | last << (64 - rest)
            };
            S::from_bits::<BIG, false>(values, word, dst.add((bits - 64) * T::SIZE));
        }
    }
}

/// Packs `bits` elements of each row to ceil(bits / 8) bytes, with zeros after the last bit.
///
/// # Safety
/// `src` and `dst` are the addresses of the first row's elements and bytes, at any alignment; each row has `bits`
/// elements, and room for their bytes; the processor has S's instructions.
#[inline(always)]
pub unsafe fn pack_rows<S: Simd<T>, T: Element>(
    rule: BitRule, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows,
) {
    let zeros = ZeroRange::new(rule);
    for [element, byte] in rows.offsets() {
        // SAFETY: the caller promises a row's elements and room for its bytes at these offsets.
        unsafe {
            let (src, dst) = (src.offset(element), dst.offset(byte));
            match order {
                BitOrder::Big => pack::<S, T, true>(zeros, src, bits, dst),
                BitOrder::Little => pack::<S, T, false>(zeros, src, bits, dst),
            }
        }
    }
}

/// Unpacks ceil(bits / 8) bytes of each row to `bits` elements, with the pattern of each bit.
///
/// # Safety
/// `src` and `dst` are the addresses of the first row's bytes and elements, at any alignment; each row has ceil(bits /
/// 8) bytes, and room for the elements; the processor has S's instructions.
#[inline(always)]
pub unsafe fn unpack_rows<S: Simd<T>, T: Element>(
    patterns: Patterns, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows,
) {
    let values = Values::new(patterns);
    for [element, byte] in rows.offsets() {
        // SAFETY: the caller promises a row's bytes and room for its elements at these offsets.
        unsafe {
            let (src, dst) = (src.offset(byte), dst.offset(element));
            match order {
                BitOrder::Big => unpack::<S, T, true>(values, src, bits, dst),
                BitOrder::Little => unpack::<S, T, false>(values, src, bits, dst),
            }
        }
    }
}
