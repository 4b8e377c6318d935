//! Rows that are contiguous on both sides.

use crate::{
    bits::plan::BitOrder,
    cpu::simd::{Element, Simd, Values, ZeroRange, in_order},
    dlpack::rules::{BitRule, Patterns},
};

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

/// Bytes of output from which packing streams past the caches: 10 to 20 % faster there, and no slower at half that.
const STREAM_PACKED: usize = 2 << 20;

/// Bytes of output from which unpacking streams past the caches. What fits in them is better left there.
const STREAM_UNPACKED: usize = 64 << 20;

/// Stores past the caches, where there is a way.
///
/// # Safety
/// `dst` has room and is aligned to 8.
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

/// Orders streamed stores before whatever this thread does next.
#[inline(always)]
fn end_of_stream() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}

/// Writes the lowest `count` bytes of a word, 1 to 8 of them, lowest first. A call of memcpy would take as long as a short
/// row does.
///
/// # Safety
/// There is room for them.
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

/// The inverse: 1 to 8 bytes as the lowest of a word, zeros above.
///
/// # Safety
/// They are there.
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

/// Packs `bits` elements side by side to ceil(bits / 8) bytes, zeros after the last bit.
///
/// # Safety
/// `src` holds the elements, at any alignment; `dst` has room for the bytes; the processor has S's instructions.
#[inline(always)]
unsafe fn pack<S: Simd<T>, T: Element, const BIG: bool>(
    zeros: ZeroRange<T>, src: *const u8, bits: usize, dst: *mut u8,
) {
    let (whole, rest) = (bits / 64, bits % 64);
    // SAFETY: 64 more elements and 8 bytes more are there, for every index below `whole`; then `rest` elements.
    unsafe {
        let words = dst.cast::<u64>();
        if bits / 8 >= STREAM_PACKED && dst.addr().is_multiple_of(8) {
            for index in 0..whole {
                stream(S::to_bits::<BIG>(zeros, src.add(index * 64 * T::SIZE)), words.add(index));
            }
            end_of_stream();
        } else {
            // By eights: the loop's own instructions are a third of one round.
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
            // The last 64 once more, where there are so many: less than to take part of them.
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

/// Unpacks ceil(bits / 8) bytes to `bits` elements side by side: a value for each.
///
/// # Safety
/// `src` holds the bytes; `dst` has room for the elements, at any alignment; the processor has S's instructions.
#[inline(always)]
unsafe fn unpack<S: Simd<T>, T: Element, const BIG: bool>(
    values: Values<T>, src: *const u8, bits: usize, dst: *mut u8,
) {
    let (whole, rest) = (bits / 64, bits % 64);
    // SAFETY: 8 bytes more and room for 64 more elements are there, for every index below `whole`; then the bytes of
    // `rest` elements, and room for them.
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
            // The last 64 once more: less than to write part of them.
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

/// Packs `bits` elements of each row to ceil(bits / 8) bytes, zeros after the last bit.
///
/// # Safety
/// `src` and `dst` are where the first row's elements and bytes lie, at any alignment; each row has `bits` elements, and
/// room for their bytes; the processor has S's instructions.
#[inline(always)]
pub unsafe fn pack_rows<S: Simd<T>, T: Element>(
    rule: BitRule, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows,
) {
    let zeros = ZeroRange::new(rule);
    for [element, byte] in rows.offsets() {
        // SAFETY: the offsets are those of a row's elements and of its bytes.
        unsafe {
            let (src, dst) = (src.offset(element), dst.offset(byte));
            match order {
                BitOrder::Big => pack::<S, T, true>(zeros, src, bits, dst),
                BitOrder::Little => pack::<S, T, false>(zeros, src, bits, dst),
            }
        }
    }
}

/// Unpacks ceil(bits / 8) bytes of each row to `bits` elements: the pattern of each bit.
///
/// # Safety
/// `src` and `dst` are where the first row's bytes and elements lie, at any alignment; each row has ceil(bits / 8) bytes,
/// and room for the elements; the processor has S's instructions.
#[inline(always)]
pub unsafe fn unpack_rows<S: Simd<T>, T: Element>(
    patterns: Patterns, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows,
) {
    let values = Values::new(patterns);
    for [element, byte] in rows.offsets() {
        // SAFETY: the offsets are those of a row's elements and of its bytes.
        unsafe {
            let (src, dst) = (src.offset(byte), dst.offset(element));
            match order {
                BitOrder::Big => unpack::<S, T, true>(values, src, bits, dst),
                BitOrder::Little => unpack::<S, T, false>(values, src, bits, dst),
            }
        }
    }
}
