//! The instruction set in use, and how a generic function is compiled for each.

use std::{
    ffi::CStr,
    sync::atomic::{AtomicUsize, Ordering},
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

    /// Whether this processor has it: all that [`multiversion`] enables for it.
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

/// The types of elements that functions are compiled for: `u8`, `u16`, `u32`, `u64`.
pub const TYPES: usize = 4;

/// Which of the compiled functions to call: for an instruction set that this processor has, and a type of element.
#[derive(Clone, Copy)]
pub struct Variant {
    set: InstructionSet,
    element: usize,
}

impl Variant {
    /// For elements of `size` bytes: 1, 2, 4 or 8. `set` is one of [`InstructionSet::available`].
    #[inline(always)]
    pub fn new(set: InstructionSet, size: usize) -> Self {
        Self { set, element: size.trailing_zeros() as usize }
    }

    /// The set that it is for.
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
/// All that a generic function calls must be `#[inline(always)]`, or it is compiled without the instructions of the
/// set, and takes many times as long. tests/abi/instructions.py looks for that in the library.
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
        /// That of the generic function; the variant is of such elements, and of a set that this processor has.
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
        /// That of the generic function, and the set is one that this processor has.
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
    // One function for each set, of the types that the two forms above leave open.
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
            // SAFETY: the conditions of the generic function are those of this one.
            unsafe { $($generic)*::<$crate::cpu::simd::$set, $($T),*>($($argument),*) }
        }
    };
}

pub(crate) use multiversion;
