//! Casts contiguous elements to another dtype. The rules are in the header.
//!
//! A cast has one step or two. float16 and bfloat16 are read as float32, which has all of their values. A result of
//! these dtypes is first a float32 that is rounded to odd, so that a second rounding gives the right value.

use std::{marker::PhantomData, mem::MaybeUninit};

use crate::{
    cpu::{
        InstructionSet,
        dispatch::multiversion,
        numbers::{BF16, F16, Number},
    },
    dlpack::{
        Dtype, Kind,
        floats::{NAN, canonical},
    },
};

/// Function that casts `count` elements.
///
/// # Safety
/// The elements can be read, there is room for the results, and the two do not overlap. The processor has `set`.
type Kernel = unsafe fn(set: InstructionSet, dst: *mut u8, src: *const u8, count: usize);

/// Number of elements that pass through the stack at once.
pub const BLOCK: usize = 256;

/// Cast from one dtype to another.
#[derive(Clone, Copy)]
pub struct Cast {
    set: InstructionSet,
    first: Kernel,
    /// Second step, from the float32 that the first one makes.
    second: Option<Kernel>,
    /// Bytes of an element, of the target and of the source.
    pub sizes: [usize; 2],
}

impl Cast {
    /// Makes a cast. `set` is one of [`InstructionSet::available`].
    pub fn new(set: InstructionSet, from: Dtype, to: Dtype) -> Self {
        let sizes = [to.size, from.size];
        let widened: Option<Kernel> = match from {
            Dtype::F16 => Some(each::<Widen<F16>>),
            Dtype::BF16 => Some(each::<Widen<BF16>>),
            _ => None,
        };
        let narrowed: Option<Kernel> = match to {
            Dtype::F16 => Some(each::<Narrow<F16>>),
            Dtype::BF16 => Some(each::<Narrow<BF16>>),
            _ => None,
        };
        let (first, second) = match (widened, narrowed) {
            (None, None) => (direct(from, to), None),
            (None, Some(narrowed)) if from == Dtype::F32 => (narrowed, None),
            (None, Some(narrowed)) => (to_middle(from), Some(narrowed)),
            (Some(widened), None) if to == Dtype::F32 => (widened, None),
            (Some(widened), None) => (widened, Some(direct(Dtype::F32, to))),
            (Some(widened), Some(narrowed)) => (widened, Some(narrowed)),
        };
        Self { set, first, second, sizes }
    }

    /// # Safety
    /// See [`Kernel`].
    pub unsafe fn run(&self, dst: *mut u8, src: *const u8, count: usize) {
        let Some(second) = self.second else {
            // SAFETY: `count` elements can be read and written, and the processor has the instructions.
            return unsafe { (self.first)(self.set, dst, src, count) };
        };
        let mut middle = [const { MaybeUninit::<f32>::uninit() }; BLOCK];
        let middle: *mut u8 = middle.as_mut_ptr().cast();
        for at in (0..count).step_by(BLOCK) {
            let some = BLOCK.min(count - at);
            // SAFETY: `count` elements can be read and written, of which these are the next; the block has room for
            // them.
            unsafe {
                (self.first)(self.set, middle, src.add(at * self.sizes[1]), some);
                second(self.set, dst.add(at * self.sizes[0]), middle, some);
            }
        }
    }
}

/// Conversion of one element.
pub trait Convert: 'static {
    type From: Copy;
    type To: Copy;
    fn convert(from: Self::From) -> Self::To;
}

multiversion! {
    /// Casts elements: a [`Kernel`].
    fn each<C: Convert>(dst: *mut u8, src: *const u8, count: usize) = each_on;
}

/// # Safety
/// See [`Kernel`].
#[allow(clippy::extra_unused_type_parameters, reason = "multiversion! names the set of every loop")]
#[inline(always)]
unsafe fn each_on<S, C: Convert>(dst: *mut u8, src: *const u8, count: usize) {
    let (dst, src) = (dst.cast::<C::To>(), src.cast::<C::From>());
    for index in 0..count {
        // SAFETY: `index` is below `count`, and `count` elements are readable and writable, at any address.
        unsafe { dst.add(index).write_unaligned(C::convert(src.add(index).read_unaligned())) };
    }
}

/// Bool, as its byte.
#[derive(Clone, Copy)]
struct Truth(u8);

/// Cast of this type to another in one step.
trait CastTo<To> {
    fn cast(self) -> To;
}

/// Implements casts by Rust's `as`. It follows the header, except for NaN: integers wrap or are rounded once to floats.
macro_rules! casts {
    ($($from:ty: $($to:ty)*;)*) => {$($(
        impl CastTo<$to> for $from {
            #[inline(always)]
            fn cast(self) -> $to {
                self as $to
            }
        }
    )*)*};
}
casts! {
    i8: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    u8: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    i16: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    u16: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    i32: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    u32: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    i64: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
    u64: i8 u8 i16 u16 i32 u32 i64 u64 f32 f64;
}

/// Implements casts of floats to integers. `as` has the same results, but does not become vectors.
macro_rules! truncations {
    ($($from:ident, $through:ident: $($to:ident)*;)*) => {$($(
        impl CastTo<$to> for $from {
            #[inline(always)]
            fn cast(self) -> $to {
                const LEAST: $from = $to::MIN as $from;
                // The greatest value is rounded up if the float has too few bits for it.
                const ABOVE: $from = $to::MAX as $from;
                const IS_EXACT: bool = ABOVE as i128 == $to::MAX as i128;
                const MOST: $from = if IS_EXACT { ABOVE } else { ABOVE.next_down() };
                let within = if self > LEAST { self } else { LEAST };
                let within = if within < MOST { within } else { MOST };
                // SAFETY: `within` lies between the least and the greatest value, and is not NaN.
                let whole = unsafe { within.to_int_unchecked::<$through>() } as $to;
                let whole = if !IS_EXACT && self >= ABOVE { $to::MAX } else { whole };
                if self.is_nan() { 0 } else { whole }
            }
        }
    )*)*};
}
truncations! {
    f32, i32: i8 u8 i16 u16 i32;
    f32, u32: u32;
    f32, i64: i64;
    f32, u64: u64;
    f64, i32: i8 u8 i16 u16 i32;
    f64, u32: u32;
    f64, i64: i64;
    f64, u64: u64;
}

macro_rules! floats {
    ($($from:ty, $to:ty: |$value:ident| $cast:expr;)*) => {$(
        impl CastTo<$to> for $from {
            #[inline(always)]
            fn cast(self) -> $to {
                let $value = self;
                $cast
            }
        }
    )*};
}
floats! {
    f32, f32: |value| canonical(value);
    f32, f64: |value| canonical_f64(f64::from(value));
    f64, f32: |value| if value.is_nan() { NAN } else { value as f32 };
    f64, f64: |value| canonical_f64(value);
}

#[inline(always)]
fn canonical_f64(value: f64) -> f64 {
    if value.is_nan() { f64::from_bits(0x7ff8_0000_0000_0000) } else { value }
}

macro_rules! truths {
    ($($other:ty)*) => {$(
        impl CastTo<Truth> for $other {
            #[inline(always)]
            fn cast(self) -> Truth {
                Truth(u8::from(self != 0 as $other))
            }
        }
        impl CastTo<$other> for Truth {
            #[inline(always)]
            fn cast(self) -> $other {
                u8::from(self.0 != 0) as $other
            }
        }
    )*};
}
truths!(i8 u8 i16 u16 i32 u32 i64 u64 f32 f64);

impl CastTo<Truth> for Truth {
    #[inline(always)]
    fn cast(self) -> Truth {
        Truth(u8::from(self.0 != 0))
    }
}

struct Direct<From, To>(PhantomData<(From, To)>);

impl<From: CastTo<To> + Copy + 'static, To: Copy + 'static> Convert for Direct<From, To> {
    type From = From;
    type To = To;
    #[inline(always)]
    fn convert(from: From) -> To {
        from.cast()
    }
}

struct Widen<N>(PhantomData<N>);

impl<N: Number> Convert for Widen<N> {
    type From = N::Bits;
    type To = f32;
    #[inline(always)]
    fn convert(from: N::Bits) -> f32 {
        canonical(N::widen(from))
    }
}

struct Narrow<N>(PhantomData<N>);

impl<N: Number> Convert for Narrow<N> {
    type From = f32;
    type To = N::Bits;
    #[inline(always)]
    fn convert(from: f32) -> N::Bits {
        N::narrow(from)
    }
}

/// Rounding to odd: the last bit of the float32 is 1 if it is not exact. Rounded to a float of at least two bits less,
/// it gives the same result as the value itself.
trait Odd {
    fn odd(self) -> f32;
}

macro_rules! odd {
    ($($($from:ty)*: |$value:ident| $odd:expr;)*) => {$($(
        impl Odd for $from {
            #[inline(always)]
            fn odd(self) -> f32 {
                let $value = self;
                $odd
            }
        }
    )*)*};
}
odd! {
    Truth i8 u8 i16 u16 f32: |value| value.cast();
    i32 u32: |value| f64::from(value).odd();
    i64 u64: |value| {
        // Beyond 2^53 the low 11 bits are too many for a float64: one bit replaces them, which is 1 if any is 1.
        let some = if value & 0x7ff == 0 { 0 } else { 0x800 };
        let exact = if value.abs_diff(0) >> 53 == 0 { value } else { value & !0x7ff | some };
        (exact as f64).odd()
    };
    f64: |value| {
        let nearest = value as f32;
        let back = f64::from(nearest);
        let bits = nearest.to_bits();
        // Either the nearest neighbour of the value or the other one is odd.
        let other = if back.abs() > value.abs() { bits.wrapping_sub(1) } else { bits.wrapping_add(1) };
        f32::from_bits(if back != value && bits & 1 == 0 { other } else { bits })
    };
}

struct Middle<From>(PhantomData<From>);

impl<From: Odd + Copy + 'static> Convert for Middle<From> {
    type From = From;
    type To = f32;
    #[inline(always)]
    fn convert(from: From) -> f32 {
        from.odd()
    }
}

/// Calls `$kernel!(type)` for a dtype that has a Rust type; float16 and bfloat16 have none.
macro_rules! with_type {
    ($dtype:expr, $kernel:ident) => {
        match ($dtype.kind, $dtype.size) {
            (Kind::Bool, _) => $kernel!(Truth),
            (Kind::Int, 1) => $kernel!(i8),
            (Kind::Int, 2) => $kernel!(i16),
            (Kind::Int, 4) => $kernel!(i32),
            (Kind::Int, _) => $kernel!(i64),
            (Kind::Uint, 1) => $kernel!(u8),
            (Kind::Uint, 2) => $kernel!(u16),
            (Kind::Uint, 4) => $kernel!(u32),
            (Kind::Uint, _) => $kernel!(u64),
            (Kind::Float | Kind::Bfloat, 8) => $kernel!(f64),
            (Kind::Float | Kind::Bfloat, _) => $kernel!(f32),
        }
    };
}

/// Returns the kernel from a dtype to another, neither of them float16 or bfloat16.
fn direct(from: Dtype, to: Dtype) -> Kernel {
    macro_rules! from {
        ($from:ty) => {{
            macro_rules! to {
                ($to:ty) => {
                    each::<Direct<$from, $to>>
                };
            }
            with_type!(to, to)
        }};
    }
    with_type!(from, from)
}

/// Returns the kernel to a float32 that is rounded to odd, from a dtype other than float16 and bfloat16.
fn to_middle(from: Dtype) -> Kernel {
    macro_rules! from {
        ($from:ty) => {
            each::<Middle<$from>>
        };
    }
    with_type!(from, from)
}
