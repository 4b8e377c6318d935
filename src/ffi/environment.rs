//! The floating-point environment that the specification and Rust expect: round to nearest, denormals kept, no traps.
//! The caller may have another one: every call leaves it at the boundary, and restores it at the end.

use std::cell::Cell;

thread_local! {
    /// Environment of the caller of the innermost call.
    static CALLERS: Cell<Control> = const { Cell::new(DEFAULT) };
}

/// Guard of the default environment of a thread. Dropping it restores the caller's environment, its flags too.
pub struct Default {
    /// Value of [`CALLERS`] before this call.
    outer: Control,
}

impl Default {
    #[inline(always)]
    pub fn enter() -> Self {
        let before = control();
        let outer = CALLERS.replace(before);
        if before != DEFAULT {
            set_control(DEFAULT);
        }
        Self { outer }
    }
}

impl Drop for Default {
    #[inline(always)]
    fn drop(&mut self) {
        let callers = CALLERS.replace(self.outer);
        if control() != callers {
            set_control(callers);
        }
    }
}

/// Calls a function of the caller in the caller's environment, within a call. The function may change it.
pub fn callers<R>(function: impl FnOnce() -> R) -> R {
    set_control(CALLERS.get());
    let result = function();
    CALLERS.set(control());
    set_control(DEFAULT);
    result
}

#[cfg(target_arch = "x86_64")]
mod register {
    use std::arch::asm;

    pub type Control = u32;

    /// MXCSR: all exceptions masked, round to nearest, no flush to zero, denormals read as they are.
    pub const DEFAULT: Control = 0x1f80;

    pub fn control() -> Control {
        let mut control = 0;
        // SAFETY: the instruction writes the register's 4 bytes to the variable.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack, preserves_flags)) };
        control
    }

    pub fn set_control(control: Control) {
        // SAFETY: the value is the default, or one that this thread had before: both are valid.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack)) }; // the register contains flags
    }
}

#[cfg(target_arch = "aarch64")]
mod register {
    use std::arch::asm;

    pub type Control = u64;

    /// FPCR: round to nearest, no flush to zero, NaN payloads of operands kept.
    pub const DEFAULT: Control = 0;

    pub fn control() -> Control {
        let control;
        // SAFETY: the instruction only reads a register.
        unsafe { asm!("mrs {}, fpcr", out(reg) control, options(nostack, preserves_flags)) };
        control
    }

    pub fn set_control(control: Control) {
        // SAFETY: the value is the default, or one that this thread had before: both are valid.
        unsafe { asm!("msr fpcr, {}", in(reg) control, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod register {
    pub type Control = ();
    pub const DEFAULT: Control = ();
    pub fn control() -> Control {}
    pub fn set_control(_: Control) {}
}

use register::{Control, DEFAULT, control, set_control};
