//! The floating-point environment that the specification's arithmetic wants: to nearest, denormals kept, nothing
//! trapped. The caller may have another one, and the threads of the pool have that of whoever started them.

/// Does some work in the default environment. This thread's own is back when it returns.
pub fn in_default<R>(work: impl FnOnce() -> R) -> R {
    let _restored = Default::enter();
    within(work)
}

/// A function of its own, so that no operation of the work is moved to where the environment is still another.
#[inline(never)]
fn within<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// While it lives, its thread has the default environment.
struct Default {
    before: Control,
}

impl Default {
    fn enter() -> Self {
        let before = control();
        set_control(DEFAULT);
        Self { before }
    }
}

impl Drop for Default {
    fn drop(&mut self) {
        set_control(self.before);
    }
}

#[cfg(target_arch = "x86_64")]
mod register {
    use std::arch::asm;

    pub type Control = u32;

    /// MXCSR: all exceptions masked, to nearest, no flush to zero, denormals read as they are.
    pub const DEFAULT: Control = 0x1f80;

    pub fn control() -> Control {
        let mut control = 0;
        // SAFETY: writes the register's 4 bytes to the variable.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack, preserves_flags)) };
        control
    }

    pub fn set_control(control: Control) {
        // SAFETY: what is set is the default, or what this thread had before: both are valid.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack)) }; // flags are among it
    }
}

#[cfg(target_arch = "aarch64")]
mod register {
    use std::arch::asm;

    pub type Control = u64;

    /// FPCR: to nearest, no flush to zero, NaN as operands have them.
    pub const DEFAULT: Control = 0;

    pub fn control() -> Control {
        let control;
        // SAFETY: reads a register.
        unsafe { asm!("mrs {}, fpcr", out(reg) control, options(nostack, preserves_flags)) };
        control
    }

    pub fn set_control(control: Control) {
        // SAFETY: what is set is the default, or what this thread had before: both are valid.
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
