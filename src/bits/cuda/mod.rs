//! Packing and unpacking bits on CUDA.
//!
//! Memory that is contiguous on both sides has kernels for each element width, which run at memory speed. All other
//! layouts use one kernel for each operation, in tiles (tiled.rs).

pub mod tiled;

use crate::{
    cuda::{
        Queue,
        launch::arguments,
        module::{BITS, Kernel},
    },
    dlpack::{
        Dtype, View,
        rules::{BitRule, Patterns},
    },
    ffi::error::Result,
};

use super::plan::BitPlan;

use tiled::Operation;

/// Writes the bits of the elements of `src` to the bytes of `dst`. `plan` was made from these two views.
#[inline(never)] // keeps the frame of 9 KiB off the stack of calls on the CPU
pub fn pack(queue: &mut Queue, plan: &BitPlan, rule: BitRule, src: &View<'_>, dst: &View<'_>) -> Result<()> {
    let elements = src.data().wrapping_offset(plan.start as isize);
    if plan.is_contiguous_at(elements.addr())
        && let Some(kernel) = contiguous_packing(rule)
    {
        let (count, bytes) = (plan.elements.count() as u64, plan.bytes.count() as u64);
        // SAFETY: the arguments are the kernel's (docs/ABI.md), and the makers of the views promised valid memory.
        return unsafe {
            queue.launch(kernel, bytes, arguments![elements, dst.data(), count, bytes, plan.order as u32])
        };
    }
    // SAFETY: the plan was made from these views, whose makers promised valid memory.
    unsafe { tiled::launch(queue, plan, Operation::Pack(rule), elements, dst.data()) }
}

/// Writes zeros and `patterns.one` to the elements of `dst`, for the bits in the bytes of `src`. `plan` was made from
/// these two views.
#[inline(never)] // see `pack`
pub fn unpack(queue: &mut Queue, plan: &BitPlan, patterns: Patterns, src: &View<'_>, dst: &View<'_>) -> Result<()> {
    let elements = dst.data().wrapping_offset(plan.start as isize);
    if plan.is_contiguous_at(elements.addr()) {
        let kernel = &BITS.unpack[patterns.size.ilog2() as usize];
        let (count, bytes) = (plan.elements.count() as u64, plan.bytes.count() as u64);
        // SAFETY: the arguments are the kernel's (docs/ABI.md), and the makers of the views promised valid memory. On
        // little-endian CPUs, a kernel argument narrower than `one` gets its low bytes.
        return unsafe {
            let order = plan.order as u32;
            queue.launch(kernel, count, arguments![src.data(), elements, count, bytes, patterns.one, order])
        };
    }
    // SAFETY: the plan was made from these views, whose makers promised valid memory.
    unsafe { tiled::launch(queue, plan, Operation::Unpack(patterns), elements, src.data()) }
}

/// Returns the kernel for contiguous memory that packs by this rule, if there is one.
fn contiguous_packing(rule: BitRule) -> Option<&'static Kernel> {
    const SIGNS: [Dtype; 4] = [Dtype::F16, Dtype::BF16, Dtype::F32, Dtype::F64];
    if (rule.first_zero, rule.span) == (0, 0) {
        return BITS.pack_truth.get(rule.size.ilog2() as usize);
    }
    let signs = SIGNS.iter().position(|&dtype| BitRule::not_below_zero(dtype) == rule)?;
    BITS.pack_signs.get(signs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_selects_the_kernel_that_implements_it_or_none() {
        let signs = BitRule::not_below_zero;
        for (rule, expected) in [
            (BitRule::nonzero(Dtype::BOOL), Some(c"gc_pack_truth_u8")),
            (BitRule { size: 8, first_zero: 0, span: 0 }, Some(c"gc_pack_truth_u64")),
            (signs(Dtype::F16), Some(c"gc_pack_signs_f16")),
            (signs(Dtype::BF16), Some(c"gc_pack_signs_bf16")),
            (signs(Dtype::F32), Some(c"gc_pack_signs_f32")),
            (signs(Dtype::F64), Some(c"gc_pack_signs_f64")),
            (BitRule { size: 1, first_zero: 0x80, span: 0x7f }, None),
            (BitRule { size: 4, first_zero: 0, span: 1 }, None),
            (BitRule { span: 5, ..signs(Dtype::F32) }, None),
        ] {
            assert_eq!(contiguous_packing(rule).map(|kernel| kernel.name), expected, "{rule:?}");
        }
    }
}
