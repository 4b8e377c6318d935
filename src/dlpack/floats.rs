//! Converts float32 to other floats with one rounding, to nearest even, in the floating-point environment that every
//! call sets (ffi/environment.rs). NaN becomes the only NaN that is written.
#![forbid(unsafe_code)]

/// The only NaN that is written.
pub const NAN: f32 = f32::from_bits(0x7fc0_0000);

/// Returns `value`, or the NaN that is written.
#[inline(always)]
pub fn canonical(value: f32) -> f32 {
    if value.is_nan() { NAN } else { value }
}

/// Returns a bfloat16. There are no branches, so that loops become vectors. (VCVTNEPS2BF16 would flush denormals.)
#[inline(always)]
pub fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    // The sum may carry into the exponent, up to the exponent of Inf. The result is then correct.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if value.is_nan() { 0x7fc0 } else { rounded }) as u16
}

/// Returns a float16. There is no branch, so loops over it become vectors.
#[inline(always)]
pub fn to_f16(value: f32) -> u16 {
    const OVERFLOWS: u32 = 65520f32.to_bits(); // the middle between 65504, the largest, and 65536: rounded to Inf
    const NORMAL: u32 = 0x3880_0000; // 2^-14
    let (sign, size) = (value.to_bits() >> 16 & 0x8000, value.to_bits() & 0x7fff_ffff);
    let normal = size.wrapping_sub(112 << 23).wrapping_add(0xfff + (size >> 13 & 1)) >> 13;
    // A denormal is a multiple of 2^-24, the distance between neighbours of 0.5: the sum is rounded to one.
    let denormal = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let finite = if size < NORMAL { denormal } else { normal };
    let rounded = if size >= OVERFLOWS { 0x7c00 } else { finite };
    (if value.is_nan() { 0x7e00 } else { sign | rounded }) as u16
}

/// Returns a float64, which can represent every float32.
pub fn to_f64(value: f32) -> u64 {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    let (sign, size) = (u64::from(value.to_bits() >> 31) << 63, value.to_bits() & 0x7fff_ffff);
    let wide = u64::from(size) << 29;
    let size = match size {
        _ if value.is_nan() => return 0x7ff8_0000_0000_0000,
        0 => 0,
        INFINITY.. => wide | f64::INFINITY.to_bits(),
        0x80_0000.. => wide + (896 << 52),
        _ => {
            // A denormal float32 is a normal float64: its leading 1 moves to the implicit bit.
            let up = size.leading_zeros() - 8;
            (wide << up) + (u64::from(896 - up) << 52)
        }
    };
    sign | size
}
