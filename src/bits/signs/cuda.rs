//! Signs on CUDA: unpacking to +scale and -scale, and votes. The structs are the kernels' arguments, as
//! kernels/signs.cu declares them.

use std::ptr;

use crate::{
    bits::plan::BitPlan,
    cuda::{
        Queue,
        divisor::{DividedLoop, Divisor},
        launch::{argument, arguments},
        layout::kernel_structs,
        module::SIGNS,
    },
    dlpack::{Dtype, Kind, View, loops::MAX_LOOPS, rules::Patterns},
    ffi::error::Result,
};

use super::plan::Poll;

kernel_structs! {
    /// Elements that bits are unpacked to.
    #[derive(Clone, Copy)]
    struct Signs: gc_signs {
        zero: u64,
        one: u64,
        scales: *const u8,
        chunk_bytes: Divisor,
        format: u32,
        order: u32,
    }

    /// Argument of unpacking to elements with any strides.
    struct Scattered: gc_scattered_signs {
        src: *const u8,
        dst: *mut u8,
        elements: u64,
        bytes: u64,
        byte_stride: i64,
        across: Divisor,
        width: Divisor,
        signs: Signs,
        size: u32,
        n_loops: u32,
        loops: [DividedLoop<1>; MAX_LOOPS],
    }

    struct Vote: gc_vote {
        src: *const u8,
        dst: *mut u8,
        voters: Divisor,
        bytes: u64,
        stride: i64,
        turn: u64,
        aligned: u32,
        reserved: u32,
    }
}

/// Writes a pattern for each bit in the bytes of `src` to the elements of `dst`. `plan` was made from these two views,
/// and has one row.
pub fn unpack(queue: &mut Queue, plan: &BitPlan, patterns: Patterns, src: &View<'_>, dst: &View<'_>) -> Result<()> {
    let signs = Signs {
        zero: patterns.zero,
        one: patterns.one,
        scales: ptr::null(),
        chunk_bytes: Divisor::new(0),
        format: 0,
        order: plan.order as u32,
    };
    launch_unpacking(queue, plan, signs, src, dst)
}

/// Unpacks like [`unpack`], to +scale and -scale. The scales are on the device: one, or one for each row of `src`.
pub fn unpack_scaled(
    queue: &mut Queue, plan: &BitPlan, dtype: Dtype, scales: &View<'_>, src: &View<'_>, dst: &View<'_>,
) -> Result<()> {
    let chunk_bytes = if scales.elements() == 1 { 0 } else { src.shape()[1] as u64 };
    let signs = Signs {
        zero: 0,
        one: 0,
        scales: scales.data(),
        chunk_bytes: Divisor::new(chunk_bytes),
        format: match (dtype.kind, dtype.size) {
            (Kind::Bfloat, _) => 1,
            (_, 2) => 0,
            (_, 4) => 2,
            _ => 3,
        },
        order: plan.order as u32,
    };
    launch_unpacking(queue, plan, signs, src, dst)
}

fn launch_unpacking(queue: &mut Queue, plan: &BitPlan, signs: Signs, src: &View<'_>, dst: &View<'_>) -> Result<()> {
    let elements = dst.data().wrapping_offset(plan.start as isize);
    let (count, bytes) = (plan.elements.count() as u64, plan.bytes.count() as u64);
    if plan.is_contiguous_at(elements.addr()) {
        let kernel = &SIGNS.unpack[plan.size.ilog2() as usize];
        // SAFETY: the arguments are the kernel's, and the makers of the views promised valid memory.
        return unsafe { queue.launch(kernel, count, arguments![src.data(), elements, count, bytes, signs]) };
    }
    let (across, width) = neighbours(plan);
    let mut scattered = Scattered {
        src: src.data(),
        dst: elements,
        elements: count,
        bytes,
        byte_stride: plan.bytes.single_stride([1]).map_or(1, |[stride]| stride),
        across: Divisor::new(across),
        width: Divisor::new(width),
        signs,
        size: plan.size as u32,
        n_loops: 0,
        loops: [DividedLoop::NONE; MAX_LOOPS],
    };
    scattered.n_loops = DividedLoop::put(&mut scattered.loops, plan.elements.as_slice().iter().copied());
    // SAFETY: the argument is the kernel's, made from the plan of these views, whose makers promised valid memory.
    unsafe { queue.launch(&SIGNS.unpack_strided, count.div_ceil(8), &mut argument(&mut scattered)) }
}

/// Returns the distance, in bytes of bits, between elements that are neighbours in memory, and their number in a line.
/// The line is the loop with the shortest stride, if the loops inside it cover whole bytes; otherwise both are 1.
fn neighbours(plan: &BitPlan) -> (u64, u64) {
    let loops = plan.elements.as_slice();
    let narrowest = (0..loops.len()).rev().min_by_key(|&index| loops[index].strides[0].unsigned_abs());
    let Some(narrowest) = narrowest else {
        return (1, 1);
    };
    let inside: i64 = loops[narrowest + 1..].iter().map(|item| item.count).product();
    if inside % 8 == 0 { (inside as u64 / 8, loops[narrowest].count as u64) } else { (1, 1) }
}

/// Writes the majority of the voters, the rows of `src`, in each bit. `poll` was made from `src`; `dst` is as long.
pub fn vote(queue: &mut Queue, poll: &Poll, src: &View<'_>, dst: &View<'_>) -> Result<()> {
    /// Maximum number of voters whose count, with a second vote, fits the planes of the kernel for few voters.
    const MOST_OF_VOTE_FEW: u64 = 30;
    let (kernel, vector) = if poll.voters <= MOST_OF_VOTE_FEW { (&SIGNS.vote_few, 16) } else { (&SIGNS.vote_many, 4) };
    let apart = src.data().addr().wrapping_sub(dst.data().addr());
    let mut vote = Vote {
        src: src.data(),
        dst: dst.data(),
        voters: Divisor::new(poll.voters),
        bytes: poll.bytes as u64,
        stride: poll.stride,
        turn: poll.turn,
        aligned: u32::from(apart.is_multiple_of(vector) && poll.stride % vector as i64 == 0),
        reserved: 0,
    };
    // An additional thread block processes the ends.
    let items = (poll.bytes as u64).saturating_add(kernel.shape.items_per_block.into());
    // SAFETY: the argument is the kernel's, and the makers of the views promised valid memory.
    unsafe { queue.launch(kernel, items, &mut argument(&mut vote)) }
}
