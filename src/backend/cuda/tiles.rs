//! The argument of the kernels of kernels/strided.cu: work cut into tiles, one a block.

use std::ops::Range;

use crate::{
    error::Result,
    plan::{
        bits::{BitPlan, BitRule, Patterns},
        loops::Loop,
    },
};

use super::{launch::argument, layout::same_layout, module::Kernel, queue::Queue};

/// Threads of a block, as a power of 2.
pub const LOG_BLOCK: u32 = 8;

/// Most blocks of a launch.
pub const MOST_BLOCKS: i64 = i32::MAX as i64;

/// Bytes that so many blocks at least bring to the L2 cache together: prefetch_burst() in kernels/strided.cuh.
const BURST: i64 = 4 << 20;
const BURST_BLOCKS: i64 = 512;

/// The most loops over rows, apart from the inner one.
const MOST_OUTER: usize = 6;

/// Packing by a rule, or unpacking to a pattern.
#[derive(Clone, Copy)]
pub enum Way {
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

/// Division of less than 2^31 by a constant: a multiplication and a shift.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Division {
    count: u32,
    multiplier: u32,
    shift: u32,
    reserved: u32,
}

impl Division {
    /// By 1 to 2^31 - 1. The multiplier is 2^shift / count, rounded up: too much by less than 2^(shift - 31) / count,
    /// and so is a quotient by less than 1 / count, which changes none.
    fn by(count: i64) -> Self {
        let shift = 31 + (count as u64).next_power_of_two().ilog2();
        let multiplier = (1u64 << shift).div_ceil(count as u64) as u32;
        Self { count: count as u32, multiplier, shift, reserved: 0 }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct TileLoop {
    element_stride: i64,
    byte_stride: i64,
    division: Division,
}

/// As the kernels declare it, passed by value.
#[repr(C)]
#[derive(Clone)]
pub struct Tiles {
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

same_layout!(gc_division, Division { count, multiplier, shift, reserved });
same_layout!(gc_tile_loop, TileLoop { element_stride, byte_stride, division });
same_layout!(
    gc_tiles,
    Tiles {
        src,
        dst,
        begin,
        end,
        elements,
        bytes,
        element_stride,
        byte_stride,
        rows,
        row_element_stride,
        row_byte_stride,
        first_zero,
        span,
        one,
        order,
        log_width,
        mode,
        rounds,
        n_outer,
        burst,
        across,
        along,
        outer,
    }
);

impl Tiles {
    /// All but rows and tiles. `elements` and `bytes` are where the first row's begin, `readable` all addresses of the
    /// side that is read. None where elements are not at multiples of their size, or bytes are not packed by their
    /// truth.
    pub fn of(plan: &BitPlan, way: Way, elements: *mut u8, bytes: *mut u8, readable: Range<usize>) -> Option<Self> {
        let rows = plan.rows.as_slice().iter().map(|row| row.strides[0]);
        let mut strides = rows.chain(plan.elements.as_slice().iter().map(|item| item.strides[0]));
        let aligned = elements.addr().is_multiple_of(plan.size) && strides.all(|stride| stride % plan.size as i64 == 0);
        let (src, dst, first_zero, span, one) = match way {
            Way::Pack(rule) => (elements, bytes, rule.first_zero, rule.span, 0),
            Way::Unpack(patterns) => (bytes, elements, 0, 0, patterns.one),
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
    pub fn writes_aligned(&self, way: Way, stride: i64, bytes: i64) -> bool {
        let outer = self.outer[..self.n_outer as usize].iter().map(|item| match way {
            Way::Pack(_) => item.byte_stride,
            Way::Unpack(_) => item.element_stride,
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
        // SAFETY: the kernel's argument, and the caller's promise.
        unsafe { queue.launch(self.kernel, self.blocks as u64, &mut argument(&mut self.tiles)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_division_is_exact_below_2_to_the_31() {
        let counts = [1, 2, 3, 5, 7, 10, 25, 641, 65_535, 65_537, 1_000_003, (1 << 30) + 1, MOST_BLOCKS];
        for count in counts {
            let by = Division::by(count);
            let around = |at: i64| [at - 1, at, at + 1];
            let numbers =
                [0, MOST_BLOCKS, MOST_BLOCKS / count * count, MOST_BLOCKS / 2 / count * count, count, 2 * count];
            for number in numbers.into_iter().flat_map(around).filter(|number| (0..=MOST_BLOCKS).contains(number)) {
                let quotient = (number as u64 * u64::from(by.multiplier)) >> by.shift;
                assert_eq!(quotient, (number / count) as u64, "{number} / {count}");
            }
        }
    }
}
