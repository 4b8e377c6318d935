//! Packing and unpacking bits on CUDA.
//!
//! Memory that is contiguous on both sides goes through kernels of its own width at the speed of memory; other layouts that
//! are usual through those of their class (strided.rs); everything else through one kernel each way that walks the loops of
//! the plan.

use std::ptr;

use crate::{
    error::Result,
    plan::{
        bits::{BitPlan, BitRule, Layout, Patterns},
        loops::{Loop, MAX_LOOPS},
    },
    tensor::{Dtype, View},
};

use super::{
    module::{BITS, Kernel},
    queue::Queue,
    signs, strided,
    tiles::Way,
};

/// Writes the bits of the elements of `src` to the bytes of `dst`. `plan` was made from these two views.
pub fn pack(queue: &mut Queue, plan: &BitPlan, rule: BitRule, src: &View<'_>, dst: &View<'_>) -> Result<()> {
    let elements = src.data().wrapping_offset(plan.start as isize);
    if is_contiguous(plan, elements)
        && let Some(kernel) = contiguous_packing(rule)
    {
        let (mut src, mut dst, mut order) = (elements, dst.data(), plan.order as u32);
        let (mut count, mut bytes) = (plan.elements.count() as u64, plan.bytes.count() as u64);
        let mut arguments = [
            ptr::from_mut(&mut src).cast(),
            ptr::from_mut(&mut dst).cast(),
            ptr::from_mut(&mut count).cast(),
            ptr::from_mut(&mut bytes).cast(),
            ptr::from_mut(&mut order).cast(),
        ];
        // SAFETY: the kernel's arguments (kernels/README.md), over memory that the makers of the views vouched for.
        return unsafe { queue.launch(kernel, bytes, &mut arguments) };
    }
    let rows = plan.in_rows();
    let plan = rows.as_ref().unwrap_or(plan);
    if let Some(work) = strided::work(plan, Way::Pack(rule), elements, dst.data(), src.extent()) {
        // SAFETY: it is of the plan of these views, over memory that their makers vouched for.
        return unsafe { work.launch(queue) };
    }
    let mut strided = Strided::of(plan, elements, dst.data(), elements);
    strided.first_zero = rule.first_zero;
    strided.span = rule.span;
    let items = strided.rows.saturating_mul(strided.bytes);
    let mut arguments = [ptr::from_mut(&mut strided).cast()];
    // SAFETY: the kernel's argument, made of the plan of these views, over memory that their makers vouched for.
    unsafe { queue.launch(&BITS.strided[0], items, &mut arguments) }
}

/// Writes the bits in the bytes of `src` to the elements of `dst`. `plan` was made from these two views.
pub fn unpack(queue: &mut Queue, plan: &BitPlan, patterns: Patterns, src: &View<'_>, dst: &View<'_>) -> Result<()> {
    if patterns.zero != 0 {
        return signs::unpack(queue, plan, patterns, src, dst);
    }
    let elements = dst.data().wrapping_offset(plan.start as isize);
    if is_contiguous(plan, elements) {
        let kernel = &BITS.unpack[patterns.size.ilog2() as usize];
        let (mut src, mut dst) = (src.data(), elements);
        let (mut count, mut bytes) = (plan.elements.count() as u64, plan.bytes.count() as u64);
        // Little-endian, so an argument of fewer bytes is the beginning of it.
        let (mut pattern, mut order) = (patterns.one, plan.order as u32);
        let mut arguments = [
            ptr::from_mut(&mut src).cast(),
            ptr::from_mut(&mut dst).cast(),
            ptr::from_mut(&mut count).cast(),
            ptr::from_mut(&mut bytes).cast(),
            ptr::from_mut(&mut pattern).cast(),
            ptr::from_mut(&mut order).cast(),
        ];
        // SAFETY: the kernel's arguments (kernels/README.md), over memory that the makers of the views vouched for.
        return unsafe { queue.launch(kernel, count, &mut arguments) };
    }
    let rows = plan.in_rows();
    let plan = rows.as_ref().unwrap_or(plan);
    if let Some(work) = strided::work(plan, Way::Unpack(patterns), elements, src.data(), src.extent()) {
        // SAFETY: it is of the plan of these views, over memory that their makers vouched for.
        return unsafe { work.launch(queue) };
    }
    let mut strided = Strided::of(plan, src.data(), elements, elements);
    strided.one = patterns.one;
    let items = strided.rows.saturating_mul(strided.elements.div_ceil(8));
    let mut arguments = [ptr::from_mut(&mut strided).cast()];
    // SAFETY: the kernel's argument, made of the plan of these views, over memory that their makers vouched for.
    unsafe { queue.launch(&BITS.strided[1], items, &mut arguments) }
}

/// The contiguous kernel that packs by this rule, if there is one.
fn contiguous_packing(rule: BitRule) -> Option<&'static Kernel> {
    const SIGNS: [Dtype; 4] = [Dtype::F16, Dtype::BF16, Dtype::F32, Dtype::F64];
    if (rule.first_zero, rule.span) == (0, 0) {
        return BITS.pack_truth.get(rule.size.ilog2() as usize);
    }
    let signs = SIGNS.iter().position(|&dtype| BitRule::not_below_zero(dtype) == rule)?;
    BITS.pack_signs.get(signs)
}

/// Whether the contiguous kernels can do it: both sides are one run of memory, and elements lie at multiples of their size.
pub(super) fn is_contiguous(plan: &BitPlan, elements: *mut u8) -> bool {
    plan.layout() == Layout::Flat && elements.addr().is_multiple_of(plan.size)
}

/// The argument of the strided kernels, as they declare it (kernels/bits.cu): at most 4096 bytes, passed by value.
#[repr(C)]
struct Strided {
    src: *const u8,
    dst: *mut u8,
    rows: u64,
    /// Of a row.
    elements: u64,
    /// Of a row.
    bytes: u64,
    first_zero: u64,
    span: u64,
    one: u64,
    size: u32,
    order: u32,
    /// 1: every element lies at a multiple of its size.
    aligned: u32,
    /// 1: neighbouring threads work on neighbouring rows, 0: on neighbouring bytes of a row.
    rows_first: u32,
    n_row_loops: u32,
    n_element_loops: u32,
    n_byte_loops: u32,
    reserved: u32,
    /// Those over rows, over the elements of a row, and over its bytes. Rows and elements together have at most
    /// [`MAX_LOOPS`], and so have rows and bytes.
    loops: [StridedLoop; 2 * MAX_LOOPS],
}

const _: () = assert!(size_of::<Strided>() == 3072);

#[repr(C)]
#[derive(Clone, Copy)]
struct StridedLoop {
    count: i64,
    element_stride: i64,
    byte_stride: i64,
}

impl Strided {
    /// Lays a plan out. `elements` is where the first row's elements begin, which are on the side `src` or `dst`.
    fn of(plan: &BitPlan, src: *const u8, dst: *mut u8, elements: *mut u8) -> Self {
        let (size, rows, inner) = (plan.size, plan.rows.as_slice(), plan.elements.as_slice());
        let loops = rows
            .iter()
            .map(|&Loop { count, strides: [element_stride, byte_stride] }| (count, element_stride, byte_stride))
            .chain(inner.iter().map(|&Loop { count, strides: [stride] }| (count, stride, 0)))
            .chain(plan.bytes.as_slice().iter().map(|&Loop { count, strides: [stride] }| (count, 0, stride)));
        let step = |stride: Option<i64>| stride.map_or(u64::MAX, i64::unsigned_abs);
        let element_strides = || rows.iter().map(|row| row.strides[0]).chain(inner.iter().map(|item| item.strides[0]));
        let mut strided = Self {
            src,
            dst,
            rows: plan.rows.count() as u64,
            elements: plan.elements.count() as u64,
            bytes: plan.bytes.count() as u64,
            first_zero: 0,
            span: 0,
            one: 0,
            size: size as u32,
            order: plan.order as u32,
            aligned: u32::from(
                elements.addr().is_multiple_of(size) && element_strides().all(|stride| stride % size as i64 == 0),
            ),
            // Neighbouring threads should touch neighbouring memory.
            rows_first: u32::from(
                step(rows.last().map(|row| row.strides[0])) < step(inner.last().map(|item| item.strides[0])),
            ),
            n_row_loops: rows.len() as u32,
            n_element_loops: inner.len() as u32,
            n_byte_loops: plan.bytes.as_slice().len() as u32,
            reserved: 0,
            loops: [StridedLoop { count: 0, element_stride: 0, byte_stride: 0 }; 2 * MAX_LOOPS],
        };
        for (place, (count, element_stride, byte_stride)) in strided.loops.iter_mut().zip(loops) {
            *place = StridedLoop { count, element_stride, byte_stride };
        }
        strided
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_goes_to_the_kernel_that_keeps_it_or_to_none() {
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
