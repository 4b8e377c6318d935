//! The instruction set in use, and how a generic function is compiled for each.

use std::{
    ffi::CStr,
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::plan::bits::BitRule;

/// The instruction sets, in the order of the tables of [`compiled_for_each_set`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

use InstructionSet::*;

/// The best first.
#[cfg(target_arch = "x86_64")]
const ALL: [InstructionSet; 3] = [Avx512, Avx2, Portable];
#[cfg(not(target_arch = "x86_64"))]
const ALL: [InstructionSet; 1] = [Portable];

pub const SETS: usize = ALL.len();

/// The place in `ALL` of the one in use, and 1; 0 until it has been chosen. No lock: a child that is forked while another
/// thread chooses would wait for it for ever. Threads that choose at the same time choose the same.
static CHOSEN: AtomicUsize = AtomicUsize::new(0);

impl InstructionSet {
    /// What GRADCODEC_CPU calls it.
    pub fn name(self) -> &'static str {
        match self {
            Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Avx512 => "avx512",
        }
    }

    /// Whether this processor has it: all that [`compiled_for_each_set`] enables for it, and what casts use besides.
    fn is_available(self) -> bool {
        match self {
            Portable => true,
            #[cfg(target_arch = "x86_64")]
            Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("bmi2")
            }
        }
    }

    /// Those that this processor has, the best first.
    pub fn available() -> impl Iterator<Item = Self> {
        ALL.into_iter().filter(|set| set.is_available())
    }

    /// The one to use: the best there is, or the one that GRADCODEC_CPU names, if it is there.
    #[inline(always)]
    pub fn chosen() -> Self {
        match ALL.get(CHOSEN.load(Ordering::Relaxed).wrapping_sub(1)) {
            Some(&set) => set,
            None => Self::choose(),
        }
    }

    #[cold]
    fn choose() -> Self {
        // Not std::env::var_os, which allocates.
        // SAFETY: a name that ends with a NUL; what it stands for ends with one too, and is not used below.
        let wanted = unsafe { libc::getenv(c"GRADCODEC_CPU".as_ptr()).as_ref().map(|text| CStr::from_ptr(text)) };
        let named = Self::available().find(|set| wanted.is_none_or(|name| name.to_bytes() == set.name().as_bytes()));
        let chosen = named.or_else(|| Self::available().next()).unwrap_or(Portable);
        let place = ALL.iter().position(|&set| set == chosen).unwrap_or(SETS - 1);
        CHOSEN.store(place + 1, Ordering::Relaxed);
        chosen
    }
}

/// The types of elements that functions are compiled for: `BoolByte`, `u16`, `u32`, `u64`; `u8`.
pub const TYPES: usize = 5;

/// Which of the compiled functions to call: for an instruction set that this processor has, and a type of element.
#[derive(Clone, Copy)]
pub struct Variant {
    set: InstructionSet,
    element: usize,
}

impl Variant {
    /// For packing by a rule. `set` is one of [`InstructionSet::available`].
    #[inline(always)]
    pub fn packing(set: InstructionSet, rule: BitRule) -> Self {
        let variant = Self::unpacking(set, rule.size);
        if rule.size == 1 && (rule.first_zero, rule.span) != (0, 0) { Self { element: 4, ..variant } } else { variant }
    }

    /// For unpacking to elements of `size` bytes: 1, 2, 4 or 8.
    #[inline(always)]
    pub fn unpacking(set: InstructionSet, size: usize) -> Self {
        Self { set, element: size.trailing_zeros() as usize }
    }

    #[inline(always)]
    pub fn of<F: Copy>(self, table: &[[F; TYPES]; SETS]) -> F {
        table[self.set as usize][self.element.min(TYPES - 1)]
    }
}

/// Compiles generic functions, `unsafe fn name<S: Simd<T>, T: Element>(arguments)`, for each instruction set and width of
/// element. Of each it makes a function that takes a [`Variant`] before the arguments and calls the one that is meant.
///
/// All that such a function calls must be inlined into it, or it is compiled without the instructions of the set.
macro_rules! compiled_for_each_set {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) = $module:ident::$generic:ident;)*) => {$(
        /// # Safety
        /// That of the function that it is made of, and the variant is for such elements.
        #[inline(always)]
        pub unsafe fn $name(variant: $crate::backend::cpu::dispatch::Variant, $($argument: $type),*) {
            use $crate::backend::cpu::simd::{BoolByte, Element, Portable, Simd};

            unsafe fn portable<T: Element>($($argument: $type),*)
            where
                Portable: Simd<T>,
            {
                // SAFETY: the arguments are the same.
                unsafe { $module::$generic::<Portable, T>($($argument),*) }
            }

            #[cfg(target_arch = "x86_64")]
            use $crate::backend::cpu::simd::{Avx2, Avx512};

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            unsafe fn avx2<T: Element>($($argument: $type),*)
            where
                Avx2: Simd<T>,
            {
                // SAFETY: the arguments are the same.
                unsafe { $module::$generic::<Avx2, T>($($argument),*) }
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,bmi2")]
            unsafe fn avx512<T: Element>($($argument: $type),*)
            where
                Avx512: Simd<T>,
            {
                // SAFETY: the arguments are the same.
                unsafe { $module::$generic::<Avx512, T>($($argument),*) }
            }

            use $crate::backend::cpu::dispatch::{SETS, TYPES};

            type Compiled = unsafe fn($($type),*);
            static TABLE: [[Compiled; TYPES]; SETS] = [
                [portable::<BoolByte>, portable::<u16>, portable::<u32>, portable::<u64>, portable::<u8>],
                #[cfg(target_arch = "x86_64")]
                [avx2::<BoolByte>, avx2::<u16>, avx2::<u32>, avx2::<u64>, avx2::<u8>],
                #[cfg(target_arch = "x86_64")]
                [avx512::<BoolByte>, avx512::<u16>, avx512::<u32>, avx512::<u64>, avx512::<u8>],
            ];
            // SAFETY: the caller's promises; variants are of sets that the processor has.
            unsafe { variant.of(&TABLE)($($argument),*) }
        }
    )*};
}

pub(super) use compiled_for_each_set;
