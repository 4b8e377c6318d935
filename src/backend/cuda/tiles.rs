//! The argument of the kernels of kernels/strided.cu: work cut into tiles, one a block.

use std::ops::Range;

use crate::{
    error::Result,
    plan::{
        bits::{BitPlan, BitRule, Patterns},
        loops::Loop,
    },
};

use super::{
    divisor::Division, grid::MOST_BLOCKS, launch::argument, layout::kernel_structs, module::Kernel, queue::Queue,
};

/// Bytes that so many blocks at least bring to the L2 cache together: prefetch_burst() in kernels/strided.cuh.
const BURST: i64 = 4 << 20;
const BURST_BLOCKS: i64 = 512;

/// The most loops over rows, apart from the inner one.
const MOST_OUTER: usize = 6;

/// Packing by a rule, or unpacking to a pattern.
#[derive(Clone, Copy)]
pub enum Operation {
    Pack(BitRule),
    Unpack(Patterns),
}

/// How the bytes lie, where the elements of neighbouring rows lie side by side. As kernels/strided.cuh counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Mode {
    /// The bytes of neighbouring rows lie side by side.
    Columns = 0,
    /// Those of each row lie side by side.
    Transposed = 1,
    /// So do the rows, and their bits follow each other even within a byte.
    Joined = 2,
}

kernel_structs! {
    #[derive(Clone, Copy, Default)]
    struct TileLoop: gc_tile_loop {
        element_stride: i64,
        byte_stride: i64,
        division: Division,
    }

    /// As the kernels declare it, passed by value.
    #[derive(Clone)]
    pub struct Tiles: gc_tiles {
        pub src: *const u8,
        pub dst: *mut u8,
        begin: usize,
        end: usize,
        /// Of a row.
        pub elements: i64,
        /// Of a row.
        pub bytes: i64,
        pub element_stride: i64,
        pub byte_stride: i64,
        /// Of the inner loop over rows.
        pub rows: i64,
        pub row_element_stride: i64,
        pub row_byte_stride: i64,
        first_zero: u64,
        span: u64,
        one: u64,
        order: u32,
        pub log_width: u32,
        pub mode: Mode,
        /// Pieces of work a thread.
        pub rounds: u32,
        n_outer: u32,
        /// Blocks that read `BURST` bytes; 0: they do not read in turn.
        burst: u32,
        across: Division,
        along: Division,
        outer: [TileLoop; MOST_OUTER],
    }
}

impl Tiles {
    /// All but rows and tiles. `elements` and `bytes` are where the first row's begin, `readable` all addresses of the
    /// side that is read. None where elements are not at multiples of their size, or bytes are not packed by their
    /// truth.
    pub fn of(
        plan: &BitPlan, operation: Operation, elements: *mut u8, bytes: *mut u8, readable: Range<usize>,
    ) -> Option<Self> {
        let rows = plan.rows.as_slice().iter().map(|row| row.strides[0]);
        let mut strides = rows.chain(plan.elements.as_slice().iter().map(|item| item.strides[0]));
        let aligned = elements.addr().is_multiple_of(plan.size) && strides.all(|stride| stride % plan.size as i64 == 0);
        let (src, dst, first_zero, span, one) = match operation {
            Operation::Pack(rule) => (elements, bytes, rule.first_zero, rule.span, 0),
            Operation::Unpack(patterns) => (bytes, elements, 0, 0, patterns.one),
        };
        if !aligned || (plan.size == 1 && (first_zero, span) != (0, 0)) {
            return None;
        }
        Some(Self {
            src,
            dst,
            begin: readable.start,
            end: readable.end,
            elements: plan.elements.count(),
            bytes: plan.bytes.count(),
            element_stride: plan.elements.single_stride([0]).map_or(0, |[stride]| stride),
            byte_stride: plan.bytes.single_stride([1]).map_or(0, |[stride]| stride),
            rows: 1,
            row_element_stride: 0,
            row_byte_stride: 0,
            first_zero,
            span,
            one,
            order: plan.order as u32,
            log_width: 0,
            mode: Mode::Columns,
            rounds: 1,
            n_outer: 0,
            burst: 0,
            across: Division::by(1),
            along: Division::by(1),
            outer: [TileLoop::default(); MOST_OUTER],
        })
    }

    /// Bytes of memory that may be read.
    pub fn readable(&self) -> usize {
        self.end - self.begin
    }

    /// Adds a loop over rows inside those that are there, outside of the inner one.
    pub fn push_outer(&mut self, count: i64, [element_stride, byte_stride]: [i64; 2]) -> Option<()> {
        if count > MOST_BLOCKS {
            return None;
        }
        let division = Division::by(count);
        *self.outer.get_mut(self.n_outer as usize)? = TileLoop { element_stride, byte_stride, division };
        self.n_outer += 1;
        Some(())
    }

    /// With the plan's loops over rows, of which this one is the inner.
    pub fn over(mut self, plan: &BitPlan, inner: Option<usize>) -> Option<Self> {
        for (index, &Loop { count, strides }) in plan.rows.as_slice().iter().enumerate() {
            if Some(index) == inner {
                self.rows = count;
                [self.row_element_stride, self.row_byte_stride] = strides;
            } else {
                self.push_outer(count, strides)?;
            }
        }
        Some(self)
    }

    /// Whether all that is written at this stride and those of the outer loops begins at multiples of so many bytes.
    pub fn writes_aligned(&self, operation: Operation, stride: i64, bytes: i64) -> bool {
        let outer = self.outer[..self.n_outer as usize].iter().map(|item| match operation {
            Operation::Pack(_) => item.byte_stride,
            Operation::Unpack(_) => item.element_stride,
        });
        self.dst.addr().is_multiple_of(bytes as usize) && outer.chain([stride]).all(|stride| stride % bytes == 0)
    }

    /// Work for one of the kernels, which are by the binary logarithm of an element's size: with so many tiles along x
    /// and along y.
    pub fn cut(mut self, kernels: &'static [Kernel; 4], size: usize, across: i64, along: i64) -> Option<Work> {
        let outer = self.outer[..self.n_outer as usize].iter().map(|item| i64::from(item.division.count));
        let blocks = outer.chain([across, along]).try_fold(1, i64::checked_mul)?;
        if blocks > MOST_BLOCKS || blocks == 0 {
            return None;
        }
        self.across = Division::by(across);
        self.along = Division::by(along);
        Some(Work { kernel: &kernels[size.ilog2() as usize], tiles: self, blocks })
    }
}

/// A launch of one of the kernels.
pub struct Work {
    pub kernel: &'static Kernel,
    pub tiles: Tiles,
    pub blocks: i64,
}

impl Work {
    /// Says whether blocks read memory one after the other. Then what later ones read can come to the L2 cache before.
    pub fn reading(mut self, in_turn: bool) -> Self {
        let bursts = (self.tiles.readable() as i64 / BURST).max(1);
        if in_turn && self.tiles.n_outer == 0 && self.blocks / bursts >= BURST_BLOCKS {
            self.tiles.burst = (self.blocks / bursts) as u32;
        }
        self
    }

    /// # Safety
    /// The plan and the addresses that this is of describe memory that the kernel may use until it is done.
    pub unsafe fn launch(mut self, queue: &mut Queue) -> Result<()> {
        // SAFETY: the argument is the kernel's struct, over memory that it may use until it is done, as the caller
        // promises.
        unsafe { queue.launch(self.kernel, self.blocks as u64, &mut argument(&mut self.tiles)) }
    }
}
