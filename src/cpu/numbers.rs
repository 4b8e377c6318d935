//! Converts elements to float32 exactly, in the default floating-point environment, and back with one rounding.

use crate::dlpack::floats::{canonical, to_bf16, to_f16};

/// Returns `scale` times an element's sigma, which is -1 if the element is below 0, else 1.
#[inline(always)]
pub fn signed(scale: f32, element: f32) -> f32 {
    if element < 0.0 { -scale } else { scale }
}

/// Element type, whose bits lie in memory at any address.
pub trait Number: 'static {
    type Bits: Copy;

    fn widen(bits: Self::Bits) -> f32;
    /// Rounds to nearest even. NaN becomes the only NaN that is written.
    fn narrow(value: f32) -> Self::Bits;

    /// Like `narrow`, but a finite value stays finite in float16: it is clamped to 65504 in magnitude.
    #[inline(always)]
    fn narrow_finite(value: f32) -> Self::Bits {
        Self::narrow(value)
    }

    /// Returns the value that remains after `narrow`.
    #[inline(always)]
    fn round(value: f32) -> f32 {
        Self::widen(Self::narrow(value))
    }

    /// # Safety
    /// `src` holds an element number `index`.
    #[inline(always)]
    unsafe fn load(src: *const u8, index: usize) -> f32 {
        // SAFETY: `src` holds an element number `index`, at any address.
        Self::widen(unsafe { src.cast::<Self::Bits>().add(index).read_unaligned() })
    }

    /// # Safety
    /// `dst` has room for an element number `index`.
    #[inline(always)]
    unsafe fn store(dst: *mut u8, index: usize, value: f32) {
        // SAFETY: `dst` has room for an element number `index`, at any address.
        unsafe { dst.cast::<Self::Bits>().add(index).write_unaligned(Self::narrow(value)) };
    }
}

/// Returns true if elements are stored at all.
#[inline(always)]
pub const fn is_kept<E: Number>() -> bool {
    size_of::<E::Bits>() > 0
}

pub struct F32;
pub struct F16;
pub struct BF16;
/// Type of errors that are not kept: no element.
pub struct Nothing;

impl Number for F32 {
    type Bits = u32;
    #[inline(always)]
    fn widen(bits: u32) -> f32 {
        f32::from_bits(bits)
    }
    #[inline(always)]
    fn narrow(value: f32) -> u32 {
        canonical(value).to_bits()
    }
}

impl Number for BF16 {
    type Bits = u16;
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }
    #[inline(always)]
    fn narrow(value: f32) -> u16 {
        to_bf16(value)
    }
}

impl Number for F16 {
    type Bits = u16;
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        let (sign, rest) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff));
        // Exponents of float32 are 112 higher; Inf and NaN get its highest one. A denormal is a multiple of 2^-24, the
        // distance between neighbours of 0.5.
        let rebias = if rest >= 0x7c00 { 224 << 23 } else { 112 << 23 };
        let normal = (rest << 13) + rebias;
        let denormal = (f32::from_bits(0.5f32.to_bits() | rest) - 0.5).to_bits();
        f32::from_bits(sign | if rest < 0x400 { denormal } else { normal })
    }
    #[inline(always)]
    fn narrow(value: f32) -> u16 {
        to_f16(value)
    }
    #[inline(always)]
    fn narrow_finite(value: f32) -> u16 {
        Self::narrow(if value.is_finite() { value.clamp(-65504.0, 65504.0) } else { value })
    }
}

impl Number for Nothing {
    type Bits = ();
    #[inline(always)]
    fn widen(_: ()) -> f32 {
        0.0
    }
    #[inline(always)]
    fn narrow(_: f32) {}
    #[inline(always)]
    fn round(value: f32) -> f32 {
        canonical(value)
    }
}

/// Calls a generic function for element types chosen at run time: of values, and of kept errors.
macro_rules! with_numbers {
    ($values:expr, $kept:expr, |$G:ident, $E:ident| $work:expr) => {{
        use $crate::{
            cpu::numbers::{BF16, F16, F32, Nothing},
            dlpack::Dtype,
        };
        macro_rules! kept {
            () => {
                match $kept {
                    None => {
                        type $E = Nothing;
                        $work
                    }
                    Some(Dtype::BF16) => {
                        type $E = BF16;
                        $work
                    }
                    Some(_) => {
                        type $E = F32;
                        $work
                    }
                }
            };
        }
        match $values {
            Dtype::F16 => {
                type $G = F16;
                kept!()
            }
            Dtype::BF16 => {
                type $G = BF16;
                kept!()
            }
            _ => {
                type $G = F32;
                kept!()
            }
        }
    }};
}
pub(crate) use with_numbers;
