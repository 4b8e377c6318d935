//! Transposes squares of elements in registers of 16 bytes: one row each, and as many rows as a row has elements.
//!
//! The code is the same for every instruction set: all x86-64 processors have these registers.

#[cfg(target_arch = "x86_64")]
mod register {
    use std::arch::x86_64::{
        __m128i, _mm_unpackhi_epi8, _mm_unpackhi_epi16, _mm_unpackhi_epi32, _mm_unpackhi_epi64, _mm_unpacklo_epi8,
        _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64,
    };

    pub type Register = __m128i;

    /// Interleaves the elements of two registers of `N` elements: the first halves, then the second halves.
    #[inline(always)]
    pub fn interleaved<const N: usize>(a: Register, b: Register) -> [Register; 2] {
        // SAFETY: instructions that every x86-64 has.
        unsafe {
            match N {
                16 => [_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)],
                8 => [_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b)],
                4 => [_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b)],
                _ => [_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b)],
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod register {
    pub type Register = [u8; 16];

    #[inline(always)]
    pub fn interleaved<const N: usize>(a: Register, b: Register) -> [Register; 2] {
        let (size, mut made) = (16 / N, [[0; 16]; 2]);
        for index in 0..N {
            let (half, at) = (index / (N / 2), index % (N / 2) * 2 * size);
            let element = index * size..(index + 1) * size;
            made[half][at..at + size].copy_from_slice(&a[element.clone()]);
            made[half][at + size..at + 2 * size].copy_from_slice(&b[element]);
        }
        made
    }
}

use register::{Register, interleaved};

/// Copies `N` rows of `N` elements, 16 bytes each, to `N` rows as columns. Rows lie `from` bytes apart in `src` and
/// `to` bytes apart in `dst`.
///
/// # Safety
/// The rows can be read and written.
#[inline(always)]
pub unsafe fn transpose_square<const N: usize>(dst: *mut u8, to: isize, src: *const u8, from: isize) {
    // SAFETY: there are N rows of N elements, `from` bytes apart, at any address.
    let mut rows: [Register; N] =
        std::array::from_fn(|row| unsafe { src.offset(row as isize * from).cast::<Register>().read_unaligned() });
    // Each pass interleaves the first half of all elements with the second half. log2(N) passes transpose the square.
    for _ in 0..N.trailing_zeros() {
        let before = rows;
        for pair in 0..N / 2 {
            [rows[2 * pair], rows[2 * pair + 1]] = interleaved::<N>(before[pair], before[pair + N / 2]);
        }
    }
    for (row, elements) in rows.into_iter().enumerate() {
        // SAFETY: there is room for N rows of N elements, `to` bytes apart, at any address.
        unsafe { dst.offset(row as isize * to).cast::<Register>().write_unaligned(elements) };
    }
}
