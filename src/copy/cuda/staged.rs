//! Copies through pinned staging buffers, in pieces. While one piece is transferred, the next one is gathered, or the
//! previous one is scattered.
//!
//! ```text
//! source, any strides  ->  piece in pinned memory, compact  ->  target, any strides
//! ```
//!
//! Either half may cast: the one that makes the pieces smaller does. Broadcast elements of the source are transferred
//! once. Loops follow the order of the host's side, where scattered accesses are slower.

use std::{cmp::Reverse, iter};

use arrayvec::ArrayVec;

use crate::{
    copy::plan::{Conversion, CopyPlan},
    cuda::{
        Queue, Stream,
        staging::{PIECE_BYTES, PIECES, Staging},
    },
    dlpack::loops::{Block, Cursor, Loop, Loops, MAX_LOOPS},
    ffi::error::Result,
};

use super::direct::{OnHost, with_pinned};

/// Copy in two halves.
struct Halves {
    /// Conversions of the source's elements to the piece, and of the piece's to the target.
    gather: Conversion,
    scatter: Conversion,
    /// Bytes of an element in a piece.
    size: i64,
    /// Loops over the transferred elements, and loops that repeat them in the target.
    loops: Loops<2>,
    repeats: ArrayVec<Loop<2>, MAX_LOOPS>,
    /// Addresses of the first round, of the target and of the source.
    first: [*mut u8; 2],
}

impl Halves {
    fn of(plan: &CopyPlan, data: [*mut u8; 2], host: usize) -> Self {
        let [to, from] = plan.conversion.sizes();
        let (gather, scatter) = match plan.conversion {
            Conversion::Cast { .. } if to < from => (plan.conversion, Conversion::Bytes(to)),
            conversion => (Conversion::Bytes(from), conversion),
        };
        let (mut travel, mut repeats) = (ArrayVec::<_, MAX_LOOPS>::new(), ArrayVec::new());
        for &item in plan.loops.as_slice() {
            if item.strides[1] == 0 { repeats.push(item) } else { travel.push(item) }
        }
        travel.sort_by_key(|item: &Loop<2>| Reverse(item.strides[host].unsigned_abs()));
        let mut loops = Loops::new();
        travel.iter().for_each(|item| loops.push(item.count, item.strides));
        let first = [0, 1].map(|side: usize| data[side].wrapping_offset(plan.starts[side] as isize));
        Self { gather, scatter, size: to.min(from), loops, repeats, first }
    }

    /// Returns the loops of a block, and the bytes that a round of each moves in a piece, where elements are compact.
    fn dims<'a>(&self, block: &Block<'a, 2>) -> impl Iterator<Item = (Loop<2>, i64)> + Clone + use<'a> {
        let (size, outer) = (self.size, Loop { count: block.count, strides: block.strides });
        let loops = iter::once(outer).chain(block.inside.iter().copied());
        let rounds: i64 = loops.clone().map(|item| item.count).product();
        loops.scan(rounds, move |inside, item| {
            *inside /= item.count;
            Some((item, size * *inside))
        })
    }

    /// Runs `work` on the first half of a block, into `piece`. Never inlined, so that its large plan leaves the stack.
    #[inline(never)]
    fn gather<T>(&self, block: &Block<'_, 2>, piece: *mut u8, work: impl FnOnce(&CopyPlan, [*mut u8; 2]) -> T) -> T {
        let dims = self.dims(block).map(|(item, compact)| (item.count, [compact, item.strides[1]]));
        work(&CopyPlan::new(self.gather, dims), [piece, self.first[1].wrapping_offset(block.offsets[1] as isize)])
    }

    /// Runs `work` on the second half of a block, from `piece`. Never inlined, like `gather`.
    #[inline(never)]
    fn scatter<T>(&self, block: &Block<'_, 2>, piece: *mut u8, work: impl FnOnce(&CopyPlan, [*mut u8; 2]) -> T) -> T {
        let dims = self.dims(block).map(|(item, compact)| (item.count, [item.strides[0], compact]));
        let repeated = self.repeats.iter().map(|item| (item.count, [item.strides[0], 0]));
        let plan = CopyPlan::new(self.scatter, dims.chain(repeated));
        work(&plan, [self.first[0].wrapping_offset(block.offsets[0] as isize), piece])
    }

    fn a_piece(&self) -> i64 {
        (PIECE_BYTES / self.size).max(1)
    }
}

/// Copies between pageable memory and a device. `host`: the pageable side, 0 for the target and 1 for the source.
///
/// # Safety
/// Both sides are memory as the plan describes it, and the host's stays until this returns.
pub unsafe fn between_host_and_device(
    queue: &mut Queue, plan: &CopyPlan, data: [*mut u8; 2], host: usize, on_host: OnHost,
) -> Result<()> {
    let staging = Staging::of(queue)?;
    let halves = Halves::of(plan, data, host);
    // SAFETY: both sides are memory as the plan describes it and stay until this returns, as the caller promises.
    let done = unsafe {
        if host == 1 { send(queue, &halves, &staging, on_host) } else { receive(queue, &halves, &staging, on_host) }
    };
    finish(queue, staging, done)
}

/// Waits for all enqueued work, also after a failure. Then nothing uses the caller's memory or the pieces any more.
fn finish(queue: &mut Queue, staging: Staging, done: Result<()>) -> Result<()> {
    done.and(queue.wait())?;
    staging.keep();
    Ok(())
}

/// Copies from the host.
#[inline(never)]
unsafe fn send(queue: &mut Queue, halves: &Halves, staging: &Staging, on_host: OnHost) -> Result<()> {
    let gather = |block: &Block<'_, 2>, piece: *mut u8| {
        // SAFETY: the caller promises the source. The piece is not in use, and has room for the block's elements.
        halves.gather(block, piece, |plan, data| unsafe { on_host(plan, data) });
        Ok(())
    };
    // SAFETY: the caller promises memory as the plan describes it.
    unsafe { through_pieces(queue, halves, staging, gather) }
}

/// Fills piece after piece, and copies each to the queue's device. `gather`: puts the elements of a block into a piece.
unsafe fn through_pieces(
    queue: &mut Queue, halves: &Halves, staging: &Staging, mut gather: impl FnMut(&Block<'_, 2>, *mut u8) -> Result<()>,
) -> Result<()> {
    let mut cursor = Cursor::starting_at(&halves.loops, 0);
    let mut number = 0;
    while let Some(block) = cursor.next_block(halves.a_piece()) {
        if number >= PIECES {
            staging.wait(queue, number)?;
        }
        let piece = staging.piece(number);
        gather(&block, piece)?;
        // SAFETY: both sides are memory as the plan describes it; the piece holds the elements of the block.
        halves.scatter(&block, piece, |plan, data| unsafe { with_pinned(queue, plan, data) })?;
        staging.record(queue, number)?;
        number += 1;
    }
    Ok(())
}

/// Copies to the host.
#[inline(never)]
unsafe fn receive(queue: &mut Queue, halves: &Halves, staging: &Staging, on_host: OnHost) -> Result<()> {
    let mut cursor = Cursor::starting_at(&halves.loops, 0);
    let mut before: Option<(usize, Block<'_, 2>)> = None;
    loop {
        let number = before.map_or(0, |(number, _)| number + 1);
        let next = cursor.next_block(halves.a_piece()).map(|block| (number, block));
        if let Some((_, block)) = &next {
            // SAFETY: as in `send`; the last iteration scattered the piece's previous elements.
            halves.gather(block, staging.piece(number), |plan, data| unsafe { with_pinned(queue, plan, data) })?;
            staging.record(queue, number)?;
        }
        if let Some((number, block)) = &before {
            staging.wait(queue, *number)?;
            // SAFETY: the caller promises the target, and the wait ensures that the piece is complete.
            halves.scatter(block, staging.piece(*number), |plan, data| unsafe { on_host(plan, data) });
        }
        before = next;
        if before.is_none() {
            return Ok(());
        }
    }
}

/// Copies from the GPU with the number `from` to the queue's GPU, which cannot access its memory.
///
/// # Safety
/// Both sides are memory as the plan describes it, and stay until this returns.
pub unsafe fn between_devices(queue: &mut Queue, plan: &CopyPlan, data: [*mut u8; 2], from: i32) -> Result<()> {
    // The other GPU's stream does not wait for the work that the caller's stream waits for.
    queue.wait()?;
    let mut staging = Staging::of(queue)?;
    let source = staging.source(from)?;
    let halves = Halves::of(plan, data, 0);
    // SAFETY: both sides are memory as the plan describes it and stay until this returns, as the caller promises.
    let done = unsafe { relay(queue, (from, source), &halves, &staging) };
    finish(queue, staging, done)
}

/// Copies from another GPU through the pieces. `from`, `stream`: the source's GPU, and a stream on it.
#[inline(never)]
unsafe fn relay(queue: &mut Queue, (from, stream): (i32, Stream), halves: &Halves, staging: &Staging) -> Result<()> {
    let gather = |block: &Block<'_, 2>, piece: *mut u8| {
        // `other` is dropped before the target's context is needed again, because contexts are a stack.
        let mut other = Queue::of(from, stream)?;
        // SAFETY: the caller promises the source; pinned memory may be used in every context.
        halves.gather(block, piece, |plan, data| unsafe { with_pinned(&mut other, plan, data) })?;
        other.wait()
    };
    // SAFETY: the caller promises memory as the plan describes it.
    unsafe { through_pieces(queue, halves, staging, gather) }
}
