//! Packing and unpacking bits on CUDA.
//!
//! Memory that is contiguous on both sides goes through kernels of its own width at the speed of memory; everything else
//! through one kernel each way that walks the loops of the plan.

use std::ptr;

use crate::{
    backend::Stream,
    error::Result,
    ops::{
        bits::{BitPlan, One, Test},
        loops::{Loop, MAX_LOOPS},
    },
    tensor::{Dtype, View},
};

use super::Device;

pub fn pack(device: Device, plan: &BitPlan, test: Test, src: &View<'_>, dst: &View<'_>, stream: Stream) -> Result<()> {
    let entered = device.enter(stream)?;
    let kernels = entered.kernels()?;
    let elements = src.data().wrapping_offset(plan.start as isize);
    if let Some((count, bytes)) = contiguous(plan, test.size, elements) {
        let dtype = src.dtype();
        let kernel = match (dtype.is_float(), dtype.size) {
            (false, size) => kernels.pack_truth[size.ilog2() as usize],
            (true, 2) if dtype == Dtype::BF16 => kernels.pack_signs[1],
            (true, 2) => kernels.pack_signs[0],
            (true, size) => kernels.pack_signs[size.ilog2() as usize],
        };
        let (mut src, mut dst, mut count, mut bytes) = (elements, dst.data(), count, bytes);
        let mut order = plan.order as u32;
        let mut arguments = [
            ptr::from_mut(&mut src).cast(),
            ptr::from_mut(&mut dst).cast(),
            ptr::from_mut(&mut count).cast(),
            ptr::from_mut(&mut bytes).cast(),
            ptr::from_mut(&mut order).cast(),
        ];
        // SAFETY: the kernel's arguments (kernels/README.md), over memory that the makers of the views vouched for.
        return unsafe { entered.launch(kernel, bytes, &mut arguments, stream) };
    }
    let rows = plan.in_rows();
    let mut strided = Strided::of(rows.as_ref().unwrap_or(plan), elements, dst.data(), elements, test.size);
    strided.first_zero = test.first_zero;
    strided.span = test.span;
    let items = strided.rows.saturating_mul(strided.bytes);
    // SAFETY: as above.
    unsafe {
        let mut arguments = [ptr::from_mut(&mut strided).cast()];
        entered.launch(kernels.strided[0], items, &mut arguments, stream)
    }
}

pub fn unpack(device: Device, plan: &BitPlan, one: One, src: &View<'_>, dst: &View<'_>, stream: Stream) -> Result<()> {
    let entered = device.enter(stream)?;
    let kernels = entered.kernels()?;
    let elements = dst.data().wrapping_offset(plan.start as isize);
    if let Some((count, bytes)) = contiguous(plan, one.size, elements) {
        let kernel = kernels.unpack[one.size.ilog2() as usize];
        let (mut src, mut dst, mut count, mut bytes) = (src.data(), elements, count, bytes);
        // Little-endian, so an argument of fewer bytes is the beginning of it.
        let (mut pattern, mut order) = (one.pattern, plan.order as u32);
        let mut arguments = [
            ptr::from_mut(&mut src).cast(),
            ptr::from_mut(&mut dst).cast(),
            ptr::from_mut(&mut count).cast(),
            ptr::from_mut(&mut bytes).cast(),
            ptr::from_mut(&mut pattern).cast(),
            ptr::from_mut(&mut order).cast(),
        ];
        // SAFETY: the kernel's arguments (kernels/README.md), over memory that the makers of the views vouched for.
        return unsafe { entered.launch(kernel, count, &mut arguments, stream) };
    }
    let rows = plan.in_rows();
    let mut strided = Strided::of(rows.as_ref().unwrap_or(plan), src.data(), elements, elements, one.size);
    strided.one = one.pattern;
    let items = strided.rows.saturating_mul(strided.elements.div_ceil(8));
    // SAFETY: as above.
    unsafe {
        let mut arguments = [ptr::from_mut(&mut strided).cast()];
        entered.launch(kernels.strided[1], items, &mut arguments, stream)
    }
}

/// The elements and the bytes, if the contiguous kernels can do it: both sides are one run of memory, and elements lie at
/// multiples of their size.
fn contiguous(plan: &BitPlan, size: usize, elements: *mut u8) -> Option<(u64, u64)> {
    let (count, bytes) = plan.as_one_run(size)?;
    elements.addr().is_multiple_of(size).then_some((count as u64, bytes as u64))
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
    fn of(plan: &BitPlan, src: *const u8, dst: *mut u8, elements: *mut u8, size: usize) -> Self {
        let (rows, inner) = (plan.rows.as_slice(), plan.elements.as_slice());
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
            rows: plan.rows.rounds() as u64,
            elements: plan.elements.rounds() as u64,
            bytes: plan.bytes.rounds() as u64,
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
