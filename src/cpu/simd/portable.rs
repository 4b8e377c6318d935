//! Plain Rust for every processor. The results of the other sets must equal its results.

use super::{Element, Simd, Values, ZeroRange};

/// Instruction set of every processor.
pub struct Portable;

/// Factor whose product with 8 bytes of 0 or 1 has their bits in the top byte, the first byte's bit lowest.
const GATHER_LITTLE: u64 = 0x0102_0408_1020_4080;

/// Factor like `GATHER_LITTLE`, with the first byte's bit highest.
const GATHER_BIG: u64 = 0x8040_2010_0804_0201;

/// Returns a mask for 8 copies of a byte that keeps bit k of copy k, or with BIG bit 7 - k.
pub const fn lane_bits<const BIG: bool>() -> u64 {
    if BIG { 0x0102_0408_1020_4080 } else { 0x8040_2010_0804_0201 }
}

impl<T: Element> Simd<T> for Portable {
    #[inline(always)]
    unsafe fn to_bits<const BIG: bool>(zeros: ZeroRange<T>, src: *const u8) -> u64 {
        // SAFETY: the caller promises 64 elements, and an array of T has no invalid values.
        let elements = unsafe { src.cast::<[T; 64]>().read_unaligned() };
        let mut truth = [0u8; 64];
        for (byte, element) in truth.iter_mut().zip(elements) {
            *byte = element.bit(zeros);
        }
        let gather = if BIG { GATHER_BIG } else { GATHER_LITTLE };
        let mut bits = [0u8; 8];
        for (byte, truth) in bits.iter_mut().zip(truth.as_chunks().0) {
            *byte = (u64::from_le_bytes(*truth).wrapping_mul(gather) >> 56) as u8;
        }
        u64::from_le_bytes(bits)
    }

    #[inline(always)]
    unsafe fn from_bits<const BIG: bool, const STREAM: bool>(values: Values<T>, bits: u64, dst: *mut u8) {
        let mut truth = [0u8; 64];
        for (truth, byte) in truth.as_chunks_mut().0.iter_mut().zip(bits.to_le_bytes()) {
            // Each lane keeps one bit of a copy of the byte. If it is set, the sum carries into the lane's top bit.
            let lanes = (u64::from(byte) * 0x0101_0101_0101_0101) & lane_bits::<BIG>();
            *truth = ((lanes + 0x7f7f_7f7f_7f7f_7f7f) >> 7 & 0x0101_0101_0101_0101).to_le_bytes();
        }
        let mut elements = [T::default(); 64];
        for (element, bit) in elements.iter_mut().zip(truth) {
            *element = values.of(bit);
        }
        // SAFETY: the caller promises room for 64 elements.
        unsafe { dst.cast::<[T; 64]>().write_unaligned(elements) };
    }
}
