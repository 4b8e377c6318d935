//! The kernels: bits of elements that lie side by side, 64 at a time, for each instruction set.
//!
//! What differs between instruction sets is how 64 elements become 64 bits and back ([`Lanes`]); everything around that
//! is written once and compiled for each.

use std::{ptr, sync::OnceLock};

use crate::ops::bits::{BitOrder, One, Test};

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
    pub fn new(test: Test) -> Self {
        Self { first: T::from_u64(test.first_zero), span: T::from_u64(test.span) }
    }

    /// The bit of an element.
    #[inline(always)]
    pub fn bit(self, word: T) -> u8 {
        u8::from(word.wrapping_sub(self.first) > self.span)
    }
}

/// 64 elements to 64 bits and back. Bit order is within each byte; the bytes are in memory's order.
pub trait Lanes<T: Word> {
    /// # Safety
    /// `src` holds 64 elements, at any alignment, and the processor has the instructions.
    unsafe fn to_bits<const BIG: bool>(zeros: Zeros<T>, src: *const u8) -> u64;

    /// # Safety
    /// `dst` has room for 64 elements, at any alignment, and the processor has the instructions.
    unsafe fn from_bits<const BIG: bool>(one: T, bits: u64, dst: *mut u8);
}

/// Rust alone: every processor has it, and the others are held to it.
pub struct Portable;

/// Multiplying 8 bytes of 0 or 1 by this gathers them in the top byte, the first byte's bit lowest ...
const GATHER_LITTLE: u64 = 0x0102_0408_1020_4080;
/// ... or highest.
const GATHER_BIG: u64 = 0x8040_2010_0804_0201;

impl<T: Word> Lanes<T> for Portable {
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
    unsafe fn from_bits<const BIG: bool>(one: T, bits: u64, dst: *mut u8) {
        let lane_bits: u64 = if BIG { 0x0102_0408_1020_4080 } else { 0x8040_2010_0804_0201 };
        let mut truth = [0u8; 64];
        for (truth, byte) in truth.as_chunks_mut().0.iter_mut().zip(bits.to_le_bytes()) {
            // Each lane has a copy of the byte and looks at one bit of it: if set, the sum carries into its top bit.
            let lanes = (u64::from(byte) * 0x0101_0101_0101_0101) & lane_bits;
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

/// Packs `bits` elements side by side to ceil(bits / 8) bytes, zeros after the last bit.
///
/// # Safety
/// `src` holds the elements, at any alignment; `dst` has room for the bytes; the processor has L's instructions.
#[inline(always)]
pub unsafe fn pack<L: Lanes<T>, T: Word, const BIG: bool>(zeros: Zeros<T>, src: *const u8, bits: usize, dst: *mut u8) {
    let whole = bits / 64;
    for index in 0..whole {
        // SAFETY: 64 more elements and 8 bytes more are there.
        unsafe {
            let packed = L::to_bits::<BIG>(zeros, src.add(index * 64 * T::SIZE));
            dst.add(index * 8).cast::<u64>().write_unaligned(packed);
        }
    }
    let rest = bits % 64;
    if rest > 0 {
        // Elements that count as 0 fill up the last ones.
        let mut words = [zeros.first; 64];
        // SAFETY: `rest` elements are left, and room for their bytes.
        unsafe {
            ptr::copy_nonoverlapping(src.add(whole * 64 * T::SIZE), words.as_mut_ptr().cast(), rest * T::SIZE);
            let packed = L::to_bits::<BIG>(zeros, words.as_ptr().cast()).to_le_bytes();
            ptr::copy_nonoverlapping(packed.as_ptr(), dst.add(whole * 8), rest.div_ceil(8));
        }
    }
}

/// Unpacks ceil(bits / 8) bytes to `bits` elements side by side: `one` for 1, 0 for 0.
///
/// # Safety
/// `src` holds the bytes; `dst` has room for the elements, at any alignment; the processor has L's instructions.
#[inline(always)]
pub unsafe fn unpack<L: Lanes<T>, T: Word, const BIG: bool>(one: T, src: *const u8, bits: usize, dst: *mut u8) {
    let whole = bits / 64;
    for index in 0..whole {
        // SAFETY: 8 bytes more and room for 64 more elements are there.
        unsafe {
            let packed = src.add(index * 8).cast::<u64>().read_unaligned();
            L::from_bits::<BIG>(one, packed, dst.add(index * 64 * T::SIZE));
        }
    }
    let rest = bits % 64;
    if rest > 0 {
        let (mut packed, mut words) = ([0; 8], [T::default(); 64]);
        // SAFETY: the bytes of `rest` elements are left, and room for them.
        unsafe {
            ptr::copy_nonoverlapping(src.add(whole * 8), packed.as_mut_ptr(), rest.div_ceil(8));
            L::from_bits::<BIG>(one, u64::from_le_bytes(packed), words.as_mut_ptr().cast());
            ptr::copy_nonoverlapping(words.as_ptr().cast(), dst.add(whole * 64 * T::SIZE), rest * T::SIZE);
        }
    }
}

/// Packs across: bit j of byte c is that of element c of the line that begins `j * stride` bytes after `src`. At most
/// 8 lines; bits of lines that are not there are 0.
///
/// # Safety
/// Every line holds `columns` elements, at any alignment; `dst` has room for `columns` bytes.
#[inline(always)]
pub unsafe fn pack_across<T: Word, const BIG: bool>(
    zeros: Zeros<T>,
    src: *const u8,
    stride: isize,
    lines: usize,
    columns: usize,
    dst: *mut u8,
) {
    const BLOCK: usize = 64;
    for start in (0..columns).step_by(BLOCK) {
        let width = BLOCK.min(columns - start);
        let mut bytes = [0u8; BLOCK];
        for line in 0..lines {
            let shift = if BIG { 7 - line } else { line };
            // SAFETY: `width` elements of this line are there.
            unsafe {
                let line = src.offset(line as isize * stride).add(start * T::SIZE);
                if width == BLOCK {
                    let words = line.cast::<[T; BLOCK]>().read_unaligned();
                    bytes.iter_mut().zip(words).for_each(|(byte, word)| *byte |= zeros.bit(word) << shift);
                } else {
                    for (column, byte) in bytes[..width].iter_mut().enumerate() {
                        *byte |= zeros.bit(line.add(column * T::SIZE).cast::<T>().read_unaligned()) << shift;
                    }
                }
            }
        }
        // SAFETY: there is room for `columns` bytes.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), dst.add(start), width) };
    }
}

/// Unpacks across: the inverse of [`pack_across`].
///
/// # Safety
/// `src` holds `columns` bytes; every line has room for `columns` elements, at any alignment.
#[inline(always)]
pub unsafe fn unpack_across<T: Word, const BIG: bool>(
    one: T,
    src: *const u8,
    columns: usize,
    dst: *mut u8,
    stride: isize,
    lines: usize,
) {
    const BLOCK: usize = 64;
    for start in (0..columns).step_by(BLOCK) {
        let width = BLOCK.min(columns - start);
        let mut bytes = [0u8; BLOCK];
        // SAFETY: there are `columns` bytes.
        unsafe { ptr::copy_nonoverlapping(src.add(start), bytes.as_mut_ptr(), width) };
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

/// Puts elements `stride` bytes apart side by side.
///
/// # Safety
/// `src` is the first of `count` elements, at any alignment; `dst` has room for them.
#[inline(always)]
pub unsafe fn gather<T: Word>(src: *const u8, stride: isize, count: usize, dst: *mut u8) {
    // SAFETY: the caller's promise, for every index below `count`.
    let copy = |stride: isize| unsafe {
        for index in 0..count {
            let word = src.offset(index as isize * stride).cast::<T>().read_unaligned();
            dst.add(index * T::SIZE).cast::<T>().write_unaligned(word);
        }
    };
    // The strides of every other element and the like are worth a loop of their own: known strides become shuffles.
    let size = T::SIZE as isize;
    match stride {
        _ if stride == size => copy(size),
        _ if stride == -size => copy(-size),
        _ if stride == 2 * size => copy(2 * size),
        _ if stride == 3 * size => copy(3 * size),
        _ if stride == 4 * size => copy(4 * size),
        _ => copy(stride),
    }
}

/// The inverse of [`gather`].
///
/// # Safety
/// `src` holds `count` elements side by side; `dst` is the place of the first, at any alignment.
#[inline(always)]
pub unsafe fn scatter<T: Word>(src: *const u8, dst: *mut u8, stride: isize, count: usize) {
    // SAFETY: the caller's promise, for every index below `count`.
    let copy = |stride: isize| unsafe {
        for index in 0..count {
            let word = src.add(index * T::SIZE).cast::<T>().read_unaligned();
            dst.offset(index as isize * stride).cast::<T>().write_unaligned(word);
        }
    };
    let size = T::SIZE as isize;
    match stride {
        _ if stride == size => copy(size),
        _ if stride == -size => copy(-size),
        _ => copy(stride),
    }
}

type Pack = unsafe fn(Test, BitOrder, src: *const u8, bits: usize, dst: *mut u8);
type Unpack = unsafe fn(One, BitOrder, src: *const u8, bits: usize, dst: *mut u8);
type PackAcross = unsafe fn(Test, BitOrder, src: *const u8, stride: isize, lines: usize, columns: usize, dst: *mut u8);
type Gather = unsafe fn(src: *const u8, stride: isize, count: usize, dst: *mut u8);
type Scatter = unsafe fn(src: *const u8, dst: *mut u8, stride: isize, count: usize);
type UnpackAcross = unsafe fn(One, BitOrder, src: *const u8, columns: usize, dst: *mut u8, stride: isize, lines: usize);

/// The kernels of one instruction set for one width of element; their arguments and promises are those of the functions
/// of the same names above.
#[derive(Clone, Copy)]
pub struct Kernels {
    pub pack: Pack,
    pub unpack: Unpack,
    pub pack_across: PackAcross,
    pub unpack_across: UnpackAcross,
    pub gather: Gather,
    pub scatter: Scatter,
}

/// Compiles the kernels above for an instruction set.
macro_rules! kernels {
    ($lanes:ty $(, $feature:literal)?) => {{
        $(#[target_feature(enable = $feature)])?
        unsafe fn pack_with<T: Word>(test: Test, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8)
        where
            $lanes: Lanes<T>,
        {
            // SAFETY: the caller's promise.
            unsafe {
                match order {
                    BitOrder::Big => pack::<$lanes, T, true>(Zeros::new(test), src, bits, dst),
                    BitOrder::Little => pack::<$lanes, T, false>(Zeros::new(test), src, bits, dst),
                }
            }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn unpack_with<T: Word>(one: One, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8)
        where
            $lanes: Lanes<T>,
        {
            let one = T::from_u64(one.pattern);
            // SAFETY: the caller's promise.
            unsafe {
                match order {
                    BitOrder::Big => unpack::<$lanes, T, true>(one, src, bits, dst),
                    BitOrder::Little => unpack::<$lanes, T, false>(one, src, bits, dst),
                }
            }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn pack_across_with<T: Word>(
            test: Test,
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
                    BitOrder::Big => pack_across::<T, true>(Zeros::new(test), src, stride, lines, columns, dst),
                    BitOrder::Little => pack_across::<T, false>(Zeros::new(test), src, stride, lines, columns, dst),
                }
            }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn unpack_across_with<T: Word>(
            one: One,
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
        unsafe fn gather_with<T: Word>(src: *const u8, stride: isize, count: usize, dst: *mut u8) {
            // SAFETY: the caller's promise.
            unsafe { gather::<T>(src, stride, count, dst) }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn scatter_with<T: Word>(src: *const u8, dst: *mut u8, stride: isize, count: usize) {
            // SAFETY: the caller's promise.
            unsafe { scatter::<T>(src, dst, stride, count) }
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
                gather: gather_with::<T>,
                scatter: scatter_with::<T>,
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

impl InstructionSet {
    /// The kernels for elements of `size` bytes.
    pub fn kernels(&self, size: usize) -> Kernels {
        self.kernels[size.trailing_zeros() as usize & 3]
    }

    /// The instruction sets that this processor has, the best first.
    pub fn available() -> impl Iterator<Item = &'static Self> {
        static PORTABLE: InstructionSet = InstructionSet { name: "portable", kernels: kernels!(Portable) };
        #[cfg(target_arch = "x86_64")]
        {
            static AVX512: InstructionSet =
                InstructionSet { name: "avx512", kernels: kernels!(Avx512, "avx512f,avx512bw,avx512vl,avx512dq") };
            static AVX2: InstructionSet = InstructionSet { name: "avx2", kernels: kernels!(Avx2, "avx2") };
            let has_avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            let has_avx2 = is_x86_feature_detected!("avx2");
            [has_avx512.then_some(&AVX512), has_avx2.then_some(&AVX2), Some(&PORTABLE)].into_iter().flatten()
        }
        #[cfg(not(target_arch = "x86_64"))]
        std::iter::once(&PORTABLE)
    }

    /// The one to use: the best there is, or the one that GRADCODEC_CPU names, if it is there.
    pub fn chosen() -> &'static Self {
        static CHOSEN: OnceLock<&InstructionSet> = OnceLock::new();
        CHOSEN.get_or_init(|| {
            let wanted = std::env::var_os("GRADCODEC_CPU");
            Self::available()
                .find(|set| wanted.as_ref().is_none_or(|name| name == set.name))
                .or_else(|| Self::available().next())
                .expect("the portable one is always there")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elements that matter to a test: zero, one, the borders of what counts as 0, and noise.
    fn element(index: usize, test: Test) -> u64 {
        let noise = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        match noise >> 60 {
            0..=3 => 0,
            4 => test.first_zero,
            5 => test.first_zero.wrapping_sub(1),
            6 => test.first_zero.wrapping_add(test.span),
            7 => test.first_zero.wrapping_add(test.span).wrapping_add(1),
            _ => noise >> 17,
        }
    }

    fn tests_of(size: usize) -> Vec<Test> {
        let truth = Test { size, first_zero: 0, span: 0 };
        let signs: &[(u64, u64)] = match size {
            2 => &[(0x8001, 0x7bff), (0x8001, 0x7f7f)],
            4 => &[(0x8000_0001, 0x7f7f_ffff)],
            8 => &[(0x8000_0000_0000_0001, 0x7fef_ffff_ffff_ffff)],
            _ => &[],
        };
        let signs = signs.iter().map(|&(first_zero, span)| Test { size, first_zero, span });
        std::iter::once(truth).chain(signs).collect()
    }

    /// Every instruction set, width, test, order and length around a word, at an odd address.
    fn for_every_case(mut check: impl FnMut(&InstructionSet, Test, BitOrder, usize, &[u8])) {
        for set in InstructionSet::available() {
            for size in [1, 2, 4, 8] {
                for test in tests_of(size) {
                    let bytes: Vec<u8> =
                        (0..200).flat_map(|index| element(index, test).to_le_bytes()[..size].to_vec()).collect();
                    for order in [BitOrder::Big, BitOrder::Little] {
                        for bits in (0..=200).filter(|bits| bits % 64 < 18 || bits % 64 > 46) {
                            check(set, test, order, bits, &bytes);
                        }
                    }
                }
            }
        }
    }

    /// The bit of an element by the definition, and its mask in a byte.
    fn model(bytes: &[u8], index: usize, test: Test) -> bool {
        let mut word = [0; 8];
        word[..test.size].copy_from_slice(&bytes[index * test.size..][..test.size]);
        let word = u64::from_le_bytes(word);
        word < test.first_zero || word > test.first_zero + test.span
    }

    fn mask(order: BitOrder, index: usize) -> u8 {
        if order == BitOrder::Big { 0x80 >> (index % 8) } else { 1 << (index % 8) }
    }

    #[test]
    fn packing_is_the_definition_in_every_instruction_set() {
        for_every_case(|set, test, order, bits, bytes| {
            let mut src = vec![0xff; 1];
            src.extend(&bytes[..bits * test.size]);
            let mut expected = vec![0; bits.div_ceil(8)];
            (0..bits)
                .filter(|&index| model(bytes, index, test))
                .for_each(|index| expected[index / 8] |= mask(order, index));
            expected.push(0xee);
            let mut dst = vec![0xee; 1 + expected.len()];
            // SAFETY: the elements, and room for their bytes.
            unsafe { (set.kernels(test.size).pack)(test, order, src[1..].as_ptr(), bits, dst[1..].as_mut_ptr()) };
            assert_eq!(dst[1..], expected, "{} {test:x?} {order:?} {bits}", set.name);
        });
    }

    #[test]
    fn unpacking_is_the_definition_in_every_instruction_set() {
        for_every_case(|set, test, order, bits, bytes| {
            let one = One { size: test.size, pattern: 0x3ff0_1234_3f80_3c01 & (u64::MAX >> (64 - 8 * test.size)) };
            let mut expected = Vec::new();
            for index in 0..bits {
                let set = bytes[index / 8] & mask(order, index) != 0;
                expected.extend(&(if set { one.pattern } else { 0 }).to_le_bytes()[..test.size]);
            }
            expected.push(0xee);
            let mut dst = vec![0xee; 1 + expected.len()];
            // SAFETY: the bytes, and room for the elements.
            unsafe { (set.kernels(test.size).unpack)(one, order, bytes.as_ptr(), bits, dst[1..].as_mut_ptr()) };
            assert_eq!(dst[1..], expected, "{} {one:x?} {order:?} {bits}", set.name);
        });
    }

    #[test]
    fn packing_across_is_packing_along_turned_round() {
        for_every_case(|set, test, order, columns, bytes| {
            for lines in [0, 1, 5, 8] {
                // Line j begins at element j: overlapping, as inputs may.
                let columns = columns.min(200 - 8);
                let expected: Vec<u8> = (0..columns)
                    .map(|column| {
                        let ones = (0..lines).filter(|line| model(bytes, line + column, test));
                        ones.map(|line| mask(order, line)).sum()
                    })
                    .collect();
                let mut dst = vec![0xee; columns];
                let stride = test.size as isize;
                // SAFETY: the elements, and room for a byte a column.
                unsafe {
                    let kernels = set.kernels(test.size);
                    (kernels.pack_across)(test, order, bytes.as_ptr(), stride, lines, columns, dst.as_mut_ptr());
                }
                assert_eq!(dst, expected, "{} {test:x?} {order:?} {columns} x {lines}", set.name);
            }
        });
    }

    #[test]
    fn unpacking_across_is_unpacking_along_turned_round() {
        for_every_case(|set, test, order, columns, bytes| {
            let one = One { size: test.size, pattern: 1 };
            for lines in [0, 1, 5, 8] {
                let width = columns * test.size + 3;
                let mut expected = vec![0xee; 8 * width];
                for (line, column) in (0..lines).flat_map(|line| (0..columns).map(move |column| (line, column))) {
                    let set = u64::from(bytes[column] & mask(order, line) != 0);
                    let place = line * width + column * test.size;
                    expected[place..place + test.size].copy_from_slice(&set.to_le_bytes()[..test.size]);
                }
                let mut dst = vec![0xee; 8 * width];
                // SAFETY: the bytes, and room for lines `width` bytes apart.
                unsafe {
                    let kernels = set.kernels(test.size);
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
    fn gathering_and_scattering_are_inverse_at_every_stride() {
        for set in InstructionSet::available() {
            for size in [1usize, 2, 4, 8] {
                let kernels = set.kernels(size);
                for stride in (-40isize..=40).filter(|stride| stride.unsigned_abs() >= size) {
                    for count in [0usize, 1, 7, 64, 131] {
                        let words: Vec<u8> = (0..count * size).map(|index| index as u8 | 1).collect();
                        let reach = stride.unsigned_abs() * count + size;
                        let first = if stride < 0 { reach } else { 0 };
                        let mut memory = vec![0u8; 2 * reach];
                        let mut expected = memory.clone();
                        for index in 0..count {
                            let place = first.wrapping_add_signed(index as isize * stride);
                            expected[place..place + size].copy_from_slice(&words[index * size..][..size]);
                        }
                        let mut again = vec![0u8; count * size];
                        // SAFETY: `memory` reaches as far as the strides go, either way.
                        unsafe {
                            (kernels.scatter)(words.as_ptr(), memory.as_mut_ptr().add(first), stride, count);
                            (kernels.gather)(memory.as_ptr().add(first), stride, count, again.as_mut_ptr());
                        }
                        assert_eq!(memory, expected, "{} size {size} stride {stride} count {count}", set.name);
                        assert_eq!(again, words, "{} size {size} stride {stride} count {count}", set.name);
                    }
                }
            }
        }
    }
}
