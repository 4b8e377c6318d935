//! Chooses the instruction set, and compiles generic functions for each set.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::ffi::{
    error::{Result, error},
    variable::variable,
};

/// The instruction sets, in the order of the tables of [`multiversion`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

use InstructionSet::*;

/// All instruction sets, the best first.
#[cfg(target_arch = "x86_64")]
const ALL: [InstructionSet; 3] = [Avx512, Avx2, Portable];
#[cfg(not(target_arch = "x86_64"))]
const ALL: [InstructionSet; 1] = [Portable];

pub const SETS: usize = ALL.len();

/// Index in `ALL` of the set in use, plus 1; 0 until a set is chosen. There is no lock, because a child that is forked
/// during the choice could wait for it for ever. Threads that choose at the same time choose the same set.
static CHOSEN: AtomicUsize = AtomicUsize::new(0);

impl InstructionSet {
    /// Returns the set's name in GRADCODEC_CPU.
    pub fn name(self) -> &'static str {
        match self {
            Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Avx512 => "avx512",
        }
    }

    /// Returns true if this processor has all instructions that [`multiversion`] enables for the set.
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

    /// Returns the sets that this processor has, the best first.
    pub fn available() -> impl Iterator<Item = Self> {
        ALL.into_iter().filter(|set| set.is_available())
    }

    /// Returns the set to use: the one that GRADCODEC_CPU names, or the best one. If this processor has no set of that
    /// name: Portable.
    #[inline(always)]
    pub fn chosen() -> Self {
        Self::known().or_else(Self::choose).unwrap_or(Portable)
    }

    /// Checks GRADCODEC_CPU. Calls that work on CPU tensors begin with this.
    #[inline(always)]
    pub fn check() -> Result<()> {
        if Self::known().is_some() { Ok(()) } else { Self::check_name() }
    }

    #[inline(always)]
    fn known() -> Option<Self> {
        ALL.get(CHOSEN.load(Ordering::Relaxed).wrapping_sub(1)).copied()
    }

    #[cold]
    fn choose() -> Option<Self> {
        let wanted = variable(c"GRADCODEC_CPU");
        let named = |set: &Self| wanted.is_none_or(|name| name.to_bytes() == set.name().as_bytes());
        let place = ALL.iter().position(|set| set.is_available() && named(set))?;
        CHOSEN.store(place + 1, Ordering::Relaxed);
        Some(ALL[place])
    }

    #[cold]
    fn check_name() -> Result<()> {
        Self::choose().map(|_| ()).ok_or_else(|| {
            let wanted = variable(c"GRADCODEC_CPU").unwrap_or_default().to_bytes().escape_ascii();
            error!(
                InvalidArgument,
                "GRADCODEC_CPU is {wanted}; gc_build_info() lists the instruction sets of this processor"
            )
        })
    }
}

/// Number of element types that functions are compiled for: `u8`, `u16`, `u32`, `u64`.
pub const TYPES: usize = 4;

/// Choice of a compiled function: an instruction set that this processor has, and an element type.
#[derive(Clone, Copy)]
pub struct Variant {
    set: InstructionSet,
    element: usize,
}

impl Variant {
    /// Makes the choice for elements of `size` bytes: 1, 2, 4 or 8. `set` is one of [`InstructionSet::available`].
    #[inline(always)]
    pub fn new(set: InstructionSet, size: usize) -> Self {
        Self { set, element: size.trailing_zeros() as usize }
    }

    /// Returns the instruction set.
    pub fn set(self) -> InstructionSet {
        self.set
    }

    #[inline(always)]
    pub fn of<F: Copy>(self, table: &[[F; TYPES]; SETS]) -> F {
        table[self.set as usize][self.element.min(TYPES - 1)]
    }
}

/// Compiles generic functions, `unsafe fn generic<S: Simd<_>, ...>(arguments) -> result`, for each instruction set:
///
/// - `fn name<T: Bound, ...>(arguments) -> result = module::generic;` makes a function that takes an [`InstructionSet`]
///   before the arguments and calls the one for that set;
/// - `fn name(arguments) for each element = module::generic;` is for a `generic<S: Simd<T>, T: Element>`: the function
///   takes a [`Variant`], and calls the one for that set and that type.
///
/// Every function that a generic function calls must be `#[inline(always)]`. Otherwise it is compiled without the set's
/// instructions, and takes many times as long. tests/abi/instructions.py checks this in the library.
macro_rules! multiversion {
    () => {};
    (
        $(#[$attribute:meta])*
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) for each element = $($generic:ident)::+;
        $($others:tt)*
    ) => {
        $(#[$attribute])*
        ///
        /// # Safety
        /// See the generic function. The variant has these elements, and a set that this processor has.
        #[inline(always)]
        pub unsafe fn $name(variant: $crate::cpu::dispatch::Variant, $($argument: $type),*) {
            use $crate::cpu::{dispatch::{SETS, TYPES}, simd::{Element, Simd}};
            multiversion!(@compile [T: Element] [Simd<T>] ($($argument: $type),*) () ($($generic)::+));
            type Compiled = unsafe fn($($type),*);
            static TABLE: [[Compiled; TYPES]; SETS] = [
                [portable::<u8>, portable::<u16>, portable::<u32>, portable::<u64>],
                #[cfg(target_arch = "x86_64")]
                [avx2::<u8>, avx2::<u16>, avx2::<u32>, avx2::<u64>],
                #[cfg(target_arch = "x86_64")]
                [avx512::<u8>, avx512::<u16>, avx512::<u32>, avx512::<u64>],
            ];
            // SAFETY: the conditions of the generic function hold, and the processor has the variant's instructions.
            unsafe { variant.of(&TABLE)($($argument),*) }
        }
        multiversion! { $($others)* }
    };
    (
        $(#[$attribute:meta])*
        fn $name:ident $(<$($T:ident: $bound:ident),+>)? ($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?
            = $($generic:ident)::+;
        $($others:tt)*
    ) => {
        $(#[$attribute])*
        ///
        /// # Safety
        /// See the generic function. The processor has the set.
        pub unsafe fn $name $(<$($T: $bound),+>)? (
            set: $crate::cpu::dispatch::InstructionSet,
            $($argument: $type),*
        ) $(-> $result)? {
            multiversion!(@compile [$($($T: $bound),+)?] [Sized] ($($argument: $type),*) ($(-> $result)?) ($($generic)::+));
            // SAFETY: the conditions of the generic function hold, and the processor has the set's instructions.
            unsafe {
                use $crate::cpu::dispatch::InstructionSet;
                match set {
                    InstructionSet::Portable => portable::<$($($T),+)?>($($argument),*),
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::Avx2 => avx2::<$($($T),+)?>($($argument),*),
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::Avx512 => avx512::<$($($T),+)?>($($argument),*),
                }
            }
        }
        multiversion! { $($others)* }
    };
    // Makes one function for each set, generic over the types that the two forms above leave open.
    (@compile [$($T:ident: $bound:ident),*] $simd:tt $arguments:tt $result:tt $generic:tt) => {
        multiversion!(@one portable Portable [] [$($T: $bound),*] $simd $arguments $result $generic);
        #[cfg(target_arch = "x86_64")]
        multiversion!(@one avx2 Avx2 [#[target_feature(enable = "avx2")]] [$($T: $bound),*] $simd $arguments $result $generic);
        #[cfg(target_arch = "x86_64")]
        multiversion!(
            @one avx512 Avx512 [#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi2")]]
            [$($T: $bound),*] $simd $arguments $result $generic
        );
    };
    (
        @one $name:ident $set:ident [$($feature:tt)*] [$($T:ident: $bound:ident),*] [$($simd:tt)*]
        ($($argument:ident: $type:ty),*) ($($result:tt)*) ($($generic:tt)*)
    ) => {
        $($feature)*
        unsafe fn $name<$($T: $bound),*>($($argument: $type),*) $($result)*
        where
            $crate::cpu::simd::$set: $($simd)*,
        {
            // SAFETY: this function has the same conditions as the generic function.
            unsafe { $($generic)*::<$crate::cpu::simd::$set, $($T),*>($($argument),*) }
        }
    };
}

pub(crate) use multiversion;
