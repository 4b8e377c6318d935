//! Copies on the CPU, with a cast or without.
//!
//! Two loops of a plan make a plane (`cpu::moves`); the others go from plane to plane. The target's elements lie
//! closest in the inner one, the source's in the other one, if that differs: such planes are copied in tiles.
//!
//! Casts (`casts`) take contiguous elements. Other elements pass through the stack, a block at a time: a copy gathers
//! them, they are cast, and a copy scatters them.

mod casts;

use std::{iter, mem::MaybeUninit, ops::Range, ptr};

use crate::{
    cpu::{
        InstructionSet,
        moves::{Plane, move_plane, take_plane},
        pool::{self, cut},
        simd::LineAligned,
    },
    dlpack::{
        Address, Dtype, Elements, View,
        loops::{Cursor, Loop, Loops},
    },
};

use super::plan::{Conversion, CopyPlan};

use casts::{BLOCK, Cast};

/// Bytes of both sides that are worth another thread, and the least bytes of a part, as in `bits`.
const BYTES_A_THREAD: i64 = 4 << 20;
const BYTES_A_PART: i64 = BYTES_A_THREAD / 4;

/// Copies the elements of `src` to `dst`. `plan` was made of these two.
pub fn copy(plan: &CopyPlan, src: &Elements<'_>, dst: &Elements<'_>) {
    // SAFETY: the makers of `src` and `dst` promised their memory.
    unsafe { copy_with(InstructionSet::chosen(), plan, src.data(), dst.data()) };
}

/// Like `copy`, but keeps the bits of the last byte of `dst` that are behind its elements.
pub fn copy_among_others(plan: &CopyPlan, src: &Elements<'_>, dst: &Elements<'_>) {
    let shared = SharedByte::of(dst);
    copy(plan, src, dst);
    if let Some(shared) = shared {
        shared.restore();
    }
}

/// Last byte of a tensor whose elements are smaller than a byte and do not fill it. The first element of a byte has its
/// lowest bits, so the highest bits belong to elements behind the tensor.
struct SharedByte {
    place: *mut u8,
    before: u8,
    /// Mask of the bits behind the tensor.
    behind: u8,
}

impl SharedByte {
    fn of(dst: &Elements<'_>) -> Option<Self> {
        let bits = i128::from(dst.elements()) * i128::from(dst.bits());
        let used = (bits % 8) as u32;
        if used == 0 {
            return None;
        }
        let place = dst.data().wrapping_add((bits / 8) as usize);
        // SAFETY: elements that share bytes are contiguous, and the maker of `dst` promised their memory.
        Some(Self { place, before: unsafe { place.read() }, behind: u8::MAX << used })
    }

    /// Restores the bits that are not the tensor's.
    fn restore(self) {
        // SAFETY: as in `of`, the byte is one of the target's.
        unsafe { self.place.write(self.place.read() & !self.behind | self.before & self.behind) };
    }
}

/// Like `copy`, for the addresses of element 0 of target and source.
///
/// # Safety
/// Both sides are memory as the plan describes it.
pub unsafe fn copy_at(plan: &CopyPlan, data: [*mut u8; 2]) {
    // SAFETY: both addresses are of memory as the plan describes it.
    unsafe { copy_with(InstructionSet::chosen(), plan, data[1], data[0]) };
}

/// Like `copy_at`, for a processor that has `set`.
///
/// # Safety
/// See [`copy_at`].
unsafe fn copy_with(set: InstructionSet, plan: &CopyPlan, src: *const u8, dst: *mut u8) {
    if plan.loops.count() == 0 {
        return;
    }
    // A clone would also copy the places of unused loops: 1.5 KiB.
    let mut lines = Loops::new();
    plan.loops.as_slice().iter().for_each(|item| lines.push(item.count, item.strides));
    let inner = take_plane(&mut lines, plan.conversion.sizes(), closest_in_source);
    let job = Job {
        set,
        conversion: match plan.conversion {
            Conversion::Bytes(size) => Step::Move(size as usize),
            Conversion::Cast { from, to } => Step::Cast(Cast::new(set, from, to)),
        },
        inner,
        lines: &lines,
        target: Address(dst.wrapping_offset(plan.starts[0] as isize)),
        source: Address(src.cast_mut().wrapping_offset(plan.starts[1] as isize)),
    };
    let bytes = plan.loops.count().saturating_mul(plan.conversion.sizes().iter().sum());
    job.split(bytes, |part| job.run(part));
}

/// Returns the loop in which the source's elements lie closest, if they lie closer than in the inner one.
fn closest_in_source(inner: &Loop<2>, others: &[Loop<2>]) -> Option<usize> {
    let step = |item: &Loop<2>| item.strides[1].unsigned_abs();
    // A loop that repeats the source's elements (a stride of 0) needs no other order of reads.
    let closer = |&index: &usize| (1..step(inner)).contains(&step(&others[index]));
    (0..others.len()).filter(closer).min_by_key(|&index| step(&others[index]))
}

/// Operation on elements.
#[derive(Clone, Copy)]
enum Step {
    /// Copies elements of this many bytes.
    Move(usize),
    Cast(Cast),
}

/// Plan with its memory.
///
/// The accesses below are sound for these reasons. The makers of the plan's two tensors promised their memory. Every
/// offset of its loops lies within the tensors, which do not intersect. No two rounds of the target lie in the same
/// place, so parts of the work may run at the same time.
struct Job<'a> {
    set: InstructionSet,
    conversion: Step,
    inner: Loop<2>,
    lines: &'a Loops<2>,
    target: Address,
    source: Address,
}

/// Part of the work: some elements of some lines.
struct Part {
    elements: Range<i64>,
    lines: Range<i64>,
}

impl Job<'_> {
    /// Does the work, in a number of parts that depends on `bytes`.
    fn split(&self, bytes: i64, work: impl Fn(&Part) + Sync) {
        let (elements, lines) = (self.inner.count, self.lines.count());
        let parts_for = |threads: usize| (bytes / BYTES_A_PART).clamp(threads as i64, i64::from(u32::MAX)) as u32;
        pool::run((bytes / BYTES_A_THREAD) as usize, parts_for, |index, parts| {
            // Cuts along the longer direction.
            work(&if lines >= elements {
                Part { elements: 0..elements, lines: cut(lines, index, parts) }
            } else {
                Part { elements: cut(elements, index, parts), lines: 0..lines }
            });
        });
    }

    fn run(&self, part: &Part) {
        let count = part.elements.end - part.elements.start;
        let mut left = part.lines.end - part.lines.start;
        if count == 0 || left == 0 {
            return;
        }
        let mut cursor = Cursor::starting_at(self.lines, part.lines.start);
        while let Some(run) = cursor.next_run(left) {
            left -= run.count;
            let plane = Plane::new(&run, &Loop { count, ..self.inner });
            let first = part.elements.start as isize;
            let at = |side: Address, index: usize| {
                side.0.wrapping_offset(run.offsets[index] as isize + first * plane.steps[index])
            };
            let (dst, src) = (at(self.target, 0), at(self.source, 1));
            // SAFETY: see Job.
            unsafe {
                match &self.conversion {
                    Step::Move(size) => move_plane(self.set, *size, dst, src, &plane),
                    Step::Cast(cast) => self.cast_plane(cast, dst, src, &plane),
                }
            }
        }
    }

    /// # Safety
    /// The plane is a part of the job's plane.
    unsafe fn cast_plane(&self, cast: &Cast, dst: *mut u8, src: *const u8, plane: &Plane) {
        let sizes = cast.sizes.map(|size| size as isize);
        if plane.steps == sizes {
            for line in 0..plane.lines {
                // SAFETY: see Job; the elements of a line lie side by side.
                unsafe {
                    cast.run(dst.offset(plane.offset(0, line, 0)), src.offset(plane.offset(1, line, 0)), plane.count)
                };
            }
            return;
        }
        // A block is a tile, several whole short lines, or a part of a long line.
        let (lines, count) = match () {
            _ if plane.is_across() => {
                let lines = plane.lines.min(TILE_LINES);
                (lines, BLOCK / lines)
            }
            _ if plane.count < BLOCK => (BLOCK / plane.count, plane.count),
            _ => (1, BLOCK),
        };
        for line in (0..plane.lines).step_by(lines) {
            for element in (0..plane.count).step_by(count) {
                let block =
                    Plane { lines: lines.min(plane.lines - line), count: count.min(plane.count - element), ..*plane };
                // SAFETY: see Job: this is a part of the plane.
                unsafe {
                    let dst = dst.offset(plane.offset(0, line, element));
                    self.cast_block(cast, dst, src.offset(plane.offset(1, line, element)), &block);
                }
            }
        }
    }

    /// Casts at most [`BLOCK`] elements.
    ///
    /// # Safety
    /// See [`Self::cast_plane`].
    unsafe fn cast_block(&self, cast: &Cast, dst: *mut u8, src: *const u8, block: &Plane) {
        let (LineAligned(gathered), LineAligned(made)) =
            (&mut LineAligned([ROOM; BLOCK]), &mut LineAligned([ROOM; BLOCK]));
        let [dense, loose] = [0, 1].map(|side| {
            let size = cast.sizes[side] as isize;
            let line = size * block.count as isize;
            let is_dense = block.steps[side] == size && (block.lines == 1 || block.line_steps[side] == line);
            (is_dense, (line, size))
        });
        let mut from = src;
        // SAFETY: see Job; each block on the stack has room for [`BLOCK`] elements of 8 bytes, the most there are.
        unsafe {
            if !loose.0 {
                let (line, size) = loose.1;
                let gather = Plane { line_steps: [line, block.line_steps[1]], steps: [size, block.steps[1]], ..*block };
                move_plane(self.set, cast.sizes[1], gathered.as_mut_ptr().cast(), src, &gather);
                from = gathered.as_ptr().cast();
            }
            let count = block.lines * block.count;
            if dense.0 {
                return cast.run(dst, from, count);
            }
            let (line, size) = dense.1;
            if block.steps[0] == size && block.count >= LONG_LINE {
                for index in 0..block.lines as isize {
                    cast.run(dst.offset(index * block.line_steps[0]), from.offset(index * loose.1.0), block.count);
                }
                return;
            }
            let made: *mut u8 = made.as_mut_ptr().cast();
            cast.run(made, from, count);
            let scatter = Plane { line_steps: [block.line_steps[0], line], steps: [block.steps[0], size], ..*block };
            move_plane(self.set, cast.sizes[0], dst, made, &scatter);
        }
    }
}

/// Number of lines of a tile that is cast. They lie side by side in the source.
const TILE_LINES: usize = 32;

/// Number of contiguous elements in the target from which a line is cast directly.
const LONG_LINE: usize = 32;

/// Room for an element on the stack.
const ROOM: MaybeUninit<u64> = MaybeUninit::uninit();

/// Returns the only element of a view, cast to another dtype: its bytes, the lowest first.
pub fn cast(src: &View<'_>, dtype: Dtype) -> u64 {
    let mut bytes = 0u64;
    let conversion = match src.dtype() {
        same if same == dtype => Conversion::Bytes(dtype.size as i64),
        from => Conversion::Cast { from, to: dtype },
    };
    let plan = CopyPlan::new(conversion, iter::empty());
    // SAFETY: the view has one element, and `bytes` has room for one of up to 8 bytes.
    unsafe { copy_at(&plan, [ptr::from_mut(&mut bytes).cast(), src.data()]) };
    bytes
}
