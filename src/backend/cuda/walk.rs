//! The argument of the kernels that take any strides (kernels/walk.cuh): a plan in lines, and its threads.

use crate::{
    error::Result,
    plan::{
        bits::{BitPlan, bytes_for},
        loops::{Loop, Loops, MAX_LOOPS},
    },
};

use super::{
    divisor::{DividedLoop, Divisor},
    launch::argument,
    layout::kernel_structs,
    module::BITS,
    queue::Queue,
    tiles::Operation,
};

/// Bytes of bits that a thread has at most.
const PIECE: u64 = 4;

/// With fewer threads than this a large GPU waits for memory: then each has one byte.
const MANY_THREADS: u64 = 1 << 18;

/// Lines of fewer bytes of bits are not cut at boundaries: their first and last pieces would be most of them.
const LONG_LINE: u64 = 16;

kernel_structs! {
    /// As the kernels declare it: at most 4096 bytes, passed by value.
    pub struct Walk: gc_strided_plan {
        src: *const u8,
        dst: *mut u8,
        lines: u64,
        /// Of a line.
        elements: u64,
        /// Of a line, or of all where they are joined.
        bytes: u64,
        first_byte: u64,
        element_stride: i64,
        byte_stride: i64,
        first_zero: u64,
        span: u64,
        one: u64,
        width: Divisor,
        pieces: Divisor,
        between: Divisor,
        size: u32,
        order: u32,
        /// 1: every element lies at a multiple of its size.
        aligned: u32,
        /// 1: the bits of each line follow those of the line before.
        joined: u32,
        /// Bytes of a piece.
        piece: u32,
        boundary: u32,
        n_line_loops: u32,
        n_byte_loops: u32,
        line_loops: [DividedLoop<2>; MAX_LOOPS],
        byte_loops: [DividedLoop<1>; MAX_LOOPS],
    }
}

/// Which of a row's bytes, and whether with its elements.
#[derive(Clone, Copy)]
enum Part {
    /// All, with zeros behind.
    All,
    /// Those with bits of elements.
    Bits,
    /// What is behind, zeros.
    Zeros,
}

/// Packs or unpacks. `elements` and `bytes` are where the first row's begin.
///
/// # Safety
/// The plan and the addresses describe memory that a kernel may use until it is done.
pub unsafe fn walk(
    queue: &mut Queue, plan: &BitPlan, operation: Operation, elements: *mut u8, bytes: *mut u8,
) -> Result<()> {
    // Behind joined lines nothing is the line's that a thread has.
    if matches!(operation, Operation::Pack(_))
        && is_joined(plan)
        && plan.bytes.count() > bytes_for(plan.elements.count())
    {
        // SAFETY: the plan and the addresses describe memory that a kernel may use, as the caller promises.
        return unsafe {
            Walk::of(plan, operation, Part::Bits, elements, bytes).launch(queue, operation)?;
            Walk::of(plan, operation, Part::Zeros, elements, bytes).launch(queue, operation)
        };
    }
    // SAFETY: the plan and the addresses describe memory that a kernel may use, as the caller promises.
    unsafe { Walk::of(plan, operation, Part::All, elements, bytes).launch(queue, operation) }
}

/// Packs nothing to the bytes of a plan that no element has a bit in.
///
/// # Safety
/// As for [`walk`].
pub unsafe fn zero_behind(
    queue: &mut Queue, plan: &BitPlan, operation: Operation, elements: *mut u8, bytes: *mut u8,
) -> Result<()> {
    // SAFETY: the plan and the addresses describe memory that a kernel may use, as the caller promises.
    unsafe { Walk::of(plan, operation, Part::Zeros, elements, bytes).launch(queue, operation) }
}

/// Whether lines share bytes: a single row of several loops. Rows that are several have one loop each.
fn is_joined(plan: &BitPlan) -> bool {
    debug_assert!(plan.rows.as_slice().is_empty() || plan.elements.as_slice().len() <= 1, "{plan:?}");
    plan.elements.as_slice().len() > 1
}

impl Walk {
    fn of(plan: &BitPlan, operation: Operation, part: Part, elements: *mut u8, bytes: *mut u8) -> Self {
        let packs = matches!(operation, Operation::Pack(_));
        let ((src, dst), (first_zero, span, one)) = match operation {
            Operation::Pack(rule) => ((elements, bytes), (rule.first_zero, rule.span, 0)),
            Operation::Unpack(patterns) => ((bytes, elements), (0, 0, patterns.one)),
        };
        let (all, needed) = (plan.bytes.count(), bytes_for(plan.elements.count()));
        let (first_byte, byte_count) = match part {
            Part::All => (0, all),
            Part::Bits => (0, needed),
            Part::Zeros => (needed, all - needed),
        };
        let without_elements = matches!(part, Part::Zeros) || plan.elements.count() == 0;
        let joined = is_joined(plan) && !without_elements;
        let inner = plan.elements.as_slice().last().filter(|_| !without_elements);
        let count = if without_elements { 0 } else { inner.map_or(1, |inner| inner.count) };
        let element_stride = inner.map_or(0, |inner| inner.strides[0]);
        let strides = plan.rows.as_slice().iter().map(|row| row.strides[0]);
        let mut strides = strides.chain(plan.elements.as_slice().iter().map(|item| item.strides[0]));
        let size = plan.size as i64;
        let aligned = elements.addr().is_multiple_of(plan.size) && strides.all(|stride| stride % size == 0);

        let mut walk = Self {
            src,
            dst,
            lines: 1,
            elements: count as u64,
            bytes: byte_count as u64,
            first_byte: first_byte as u64,
            element_stride,
            byte_stride: 0,
            first_zero,
            span,
            one,
            width: Divisor::new(1),
            pieces: Divisor::new(1),
            between: Divisor::new(1),
            size: size as u32,
            order: plan.order as u32,
            aligned: u32::from(aligned),
            joined: u32::from(joined),
            piece: 1,
            boundary: 1,
            n_line_loops: 0,
            n_byte_loops: 0,
            line_loops: [DividedLoop::NONE; MAX_LOOPS],
            byte_loops: [DividedLoop::NONE; MAX_LOOPS],
        };
        match plan.bytes.single_stride([1]) {
            Some([stride]) => walk.byte_stride = stride,
            None => {
                let loops = plan.bytes.as_slice().iter().copied();
                walk.n_byte_loops = DividedLoop::put(&mut walk.byte_loops, loops);
            }
        }
        if joined {
            walk.put_joined_lines(plan.elements.as_slice());
        } else {
            walk.put_rows(plan.rows.clone());
        }
        let per_line = if packs && !joined { byte_count } else { bytes_for(count) } as u64;
        if walk.lines.saturating_mul(per_line.div_ceil(PIECE)) >= MANY_THREADS {
            walk.piece = PIECE as u32;
        }
        walk.cut(packs, per_line);
        walk
    }

    /// A line for each row, those that lie close together next to each other.
    fn put_rows(&mut self, mut rows: Loops<2>) {
        self.lines = rows.count() as u64;
        rows.sort_by_step();
        self.n_line_loops = DividedLoop::put(&mut self.line_loops, rows.as_slice().iter().copied());
        let closer = |row: &Loop<2>| match self.elements {
            0 => row.strides[1].unsigned_abs() < self.byte_stride.unsigned_abs(),
            _ => row.strides[0].unsigned_abs() < self.element_stride.unsigned_abs(),
        };
        if rows.as_slice().last().is_some_and(closer) {
            self.width = Divisor::new(self.lines);
        }
    }

    /// The innermost loop is a line; those around it are in the order of bits.
    fn put_joined_lines(&mut self, loops: &[Loop<1>]) {
        let around = &loops[..loops.len() - 1];
        let lines = around.iter().map(|item| Loop { count: item.count, strides: [item.strides[0], 0] });
        self.n_line_loops = DividedLoop::put(&mut self.line_loops, lines);
        let count = |loops: &[Loop<1>]| loops.iter().map(|item| item.count).product::<i64>();
        self.lines = count(around) as u64;
        let step = |index: usize| around[index].strides[0].unsigned_abs();
        let closest = (0..around.len()).rev().min_by_key(|&index| step(index));
        if let Some(closest) = closest.filter(|&index| step(index) < self.element_stride.unsigned_abs()) {
            self.width = Divisor::new(around[closest].count as u64);
            self.between = Divisor::new(count(&around[closest + 1..]) as u64);
        }
    }

    /// Cuts a line of so many bytes of bits into pieces.
    fn cut(&mut self, packs: bool, per_line: u64) {
        let (piece, size) = (u64::from(self.piece), u64::from(self.size));
        let boundary = if per_line < LONG_LINE {
            1
        } else if packs {
            let side_by_side = self.n_byte_loops == 0 && self.byte_stride == 1;
            if piece == PIECE && side_by_side { PIECE } else { 1 }
        } else {
            let side_by_side = self.aligned == 1 && self.element_stride == i64::from(self.size);
            if side_by_side { u64::min(16, 8 * size) } else { 1 }
        };
        self.boundary = boundary as u32;
        // The first boundary may come after what is written of a line begins.
        let pieces = if packs {
            (per_line + boundary - 1).div_ceil(piece)
        } else {
            (self.elements + (boundary - 1) / size).div_ceil(8 * piece)
        };
        self.pieces = Divisor::new(pieces);
    }

    /// # Safety
    /// As for [`walk`].
    unsafe fn launch(mut self, queue: &mut Queue, operation: Operation) -> Result<()> {
        let items = self.lines.saturating_mul(self.pieces.by());
        if items == 0 {
            return Ok(());
        }
        let kernel = if matches!(operation, Operation::Pack(_)) { &BITS.pack_strided } else { &BITS.unpack_strided };
        // SAFETY: the argument is the kernel's struct, over memory that it may use until it is done, as the caller
        // promises.
        unsafe { queue.launch(kernel, items, &mut argument(&mut self)) }
    }
}
