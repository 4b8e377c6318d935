//! Argument of the kernels for any layout (kernels/tiled.cuh): a plan in lines, cut into tiles.

use crate::{
    bits::plan::{BitPlan, bytes_for},
    cuda::{
        Queue,
        divisor::{DividedLoop, Divisor},
        launch::argument,
        layout::kernel_structs,
        module::BITS,
    },
    dlpack::{
        loops::{Loop, Loops, MAX_LOOPS},
        rules::{BitRule, Patterns},
    },
    ffi::error::Result,
};

/// Packing by a rule, or unpacking to a pattern.
#[derive(Clone, Copy)]
pub enum Operation {
    Pack(BitRule),
    Unpack(Patterns),
}

/// Binary logarithms of a tile's bytes: of the largest tile, and of a tile for less than `LITTLE_WORK` bytes, where a
/// large GPU needs more thread blocks.
const LOG_TILE: u32 = 12;
const LOG_SMALL_TILE: u32 = 10;
const LITTLE_WORK: u64 = 4 << 20;

/// Binary logarithms of a tile's lines: the maximum, and the number if neighbouring elements are in neighbouring lines.
/// Such a tile has a cache line of bools from each row of memory, and 32 bytes of bits of each line.
const MOST_LOG_LINES: u32 = 8;
const LOG_LINES_ACROSS: u32 = 7;

kernel_structs! {
    /// Argument as the kernels declare it: at most 4096 bytes, passed by value.
    struct Strided: gc_strided_plan {
        src: *const u8,
        dst: *mut u8,
        lines: u64,
        /// Number of elements of a line.
        elements: u64,
        /// Number of bytes of a line; of all lines if they are joined.
        bytes: u64,
        first_byte: u64,
        element_stride: i64,
        byte_stride: i64,
        first_zero: u64,
        span: u64,
        one: u64,
        tiles: Divisor,
        size: u32,
        order: u32,
        /// 1: every element is aligned to its size.
        aligned: u32,
        /// 1: the bits of each line follow the bits of the line before.
        joined: u32,
        log_lines: u32,
        log_bytes: u32,
        /// 1: neighbouring elements, or bytes, are in neighbouring lines.
        across: u32,
        bytes_across: u32,
        /// 1: elements of four neighbouring lines form an aligned word.
        words: u32,
        reserved: u32,
        n_line_loops: u32,
        n_byte_loops: u32,
        line_loops: [DividedLoop<2>; MAX_LOOPS],
        byte_loops: [DividedLoop<1>; MAX_LOOPS],
    }
}

/// Part of a row's bytes that a launch writes or reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// All bytes, with zeros after the last bit.
    All,
    /// Bytes with bits of elements.
    Bits,
    /// Bytes after them, which are zeros.
    Zeros,
}

/// Packs or unpacks. `elements` and `bytes` are the addresses of the first row's elements and bytes.
///
/// # Safety
/// The plan and the addresses describe memory that a kernel may use until it is done.
pub unsafe fn launch(
    queue: &mut Queue, plan: &BitPlan, operation: Operation, elements: *mut u8, bytes: *mut u8,
) -> Result<()> {
    // The lines of a row of several loops have only bytes with bits, so the zeros after them need another launch.
    let needed = bytes_for(plan.elements.count());
    let is_padded = matches!(operation, Operation::Pack(_)) && plan.bytes.count() > needed;
    let parts: &[Part] =
        if is_padded && plan.elements.as_slice().len() > 1 { &[Part::Bits, Part::Zeros] } else { &[Part::All] };
    parts.iter().try_for_each(|&part| {
        let mut strided = Strided::of(plan, operation, part, elements, bytes);
        let blocks = strided.cut(matches!(operation, Operation::Pack(_)));
        if blocks == 0 {
            return Ok(());
        }
        let kernel = if matches!(operation, Operation::Pack(_)) { &BITS.pack_strided } else { &BITS.unpack_strided };
        // SAFETY: the argument is the kernel's struct, over memory that it may use until it is done, as the caller
        // promises.
        unsafe { queue.launch(kernel, blocks, &mut argument(&mut strided)) }
    })
}

impl Strided {
    fn of(plan: &BitPlan, operation: Operation, part: Part, elements: *mut u8, bytes: *mut u8) -> Self {
        debug_assert!(plan.rows.as_slice().is_empty() || plan.elements.as_slice().len() <= 1, "{plan:?}");
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
        let without_elements = part == Part::Zeros || plan.elements.count() == 0;
        let loops = if without_elements { &[] } else { plan.elements.as_slice() };
        let inner = loops.last();
        let count = if without_elements { 0 } else { inner.map_or(1, |inner| inner.count) };
        let strides = plan.rows.as_slice().iter().map(|row| row.strides[0]);
        let mut strides = strides.chain(plan.elements.as_slice().iter().map(|item| item.strides[0]));
        let size = plan.size as i64;
        let aligned = elements.addr().is_multiple_of(plan.size) && strides.all(|stride| stride % size == 0);

        let mut strided = Self {
            src,
            dst,
            lines: 1,
            elements: count as u64,
            bytes: byte_count as u64,
            first_byte: first_byte as u64,
            element_stride: inner.map_or(0, |inner| inner.strides[0]),
            byte_stride: 0,
            first_zero,
            span,
            one,
            tiles: Divisor::new(1),
            size: size as u32,
            order: plan.order as u32,
            aligned: u32::from(aligned),
            joined: 0,
            log_lines: 0,
            log_bytes: 0,
            across: 0,
            bytes_across: 0,
            words: 0,
            reserved: 0,
            n_line_loops: 0,
            n_byte_loops: 0,
            line_loops: [DividedLoop::NONE; MAX_LOOPS],
            byte_loops: [DividedLoop::NONE; MAX_LOOPS],
        };
        match plan.bytes.single_stride([1]) {
            Some([stride]) => strided.byte_stride = stride,
            None => {
                let loops = plan.bytes.as_slice().iter().copied();
                strided.n_byte_loops = DividedLoop::put(&mut strided.byte_loops, loops);
            }
        }
        let mut rows = Loops::new();
        if loops.len() > 1 {
            strided.put_lines_of_row(loops, &mut rows);
        } else {
            plan.rows.as_slice().iter().for_each(|row| rows.push(row.count, row.strides));
        }
        if strided.joined == 0 {
            // The sort makes lines that are close in memory neighbours, whatever the order of the loops was.
            rows.sort_by_step();
        }
        strided.lines = rows.count() as u64;
        strided.n_line_loops = DividedLoop::put(&mut strided.line_loops, rows.as_slice().iter().copied());
        if let Some(row) = rows.as_slice().last() {
            strided.put_directions(row);
        }
        let is_truth = (first_zero, span) == (0, 0);
        strided.words = u32::from(is_truth && strided.is_of_words(elements, rows.as_slice()));
        strided
    }

    /// Adds the lines of a row of several loops: one for all rounds of the innermost loop. Lines have bytes of their
    /// own if they cover whole bytes; otherwise they are joined.
    fn put_lines_of_row(&mut self, loops: &[Loop<1>], lines: &mut Loops<2>) {
        let around = &loops[..loops.len() - 1];
        let mut step = around.iter().map(|item| item.count).product::<i64>() * (self.elements as i64 / 8);
        let is_whole = self.elements.is_multiple_of(8) && self.n_byte_loops == 0 && self.bytes as i64 >= step;
        self.joined = u32::from(!is_whole);
        for &Loop { count, strides: [stride] } in around {
            step /= count;
            lines.push(count, [stride, if is_whole { step * self.byte_stride } else { 0 }]);
        }
        if is_whole {
            self.bytes = self.elements / 8;
        }
    }

    /// Determines which neighbours are closest in memory; `row` is the innermost loop over lines.
    fn put_directions(&mut self, row: &Loop<2>) {
        let [element_step, byte_step] = row.strides.map(i64::unsigned_abs);
        let bytes_across = self.joined == 0 && byte_step < self.byte_stride.unsigned_abs();
        self.bytes_across = u32::from(bytes_across);
        let across = if self.elements == 0 { bytes_across } else { element_step < self.element_stride.unsigned_abs() };
        self.across = u32::from(across);
    }

    /// Returns true if elements have one byte, and the ones of four neighbouring lines always form an aligned word.
    fn is_of_words(&self, elements: *const u8, rows: &[Loop<2>]) -> bool {
        let Some((inner, outer)) = rows.split_last() else {
            return false;
        };
        let mut steps = outer.iter().map(|row| row.strides[0]).chain([self.element_stride]);
        self.size == 1
            && self.across == 1
            && self.joined == 0
            && (inner.strides[0], inner.count % 4) == (1, 0)
            && elements.addr().is_multiple_of(4)
            && steps.all(|step| step % 4 == 0)
    }

    /// Cuts the work into tiles and returns their number.
    fn cut(&mut self, packs: bool) -> u64 {
        let per_line = if packs && self.joined == 0 { self.bytes } else { self.elements.div_ceil(8) };
        if self.lines == 0 || per_line == 0 {
            return 0;
        }
        let log = |count: u64| count.next_power_of_two().ilog2();
        let is_little = self.lines.saturating_mul(per_line) < LITTLE_WORK;
        let log_tile = if is_little { LOG_SMALL_TILE } else { LOG_TILE };
        let (all_lines, all_bytes) = (log(self.lines).min(MOST_LOG_LINES), log(per_line).min(log_tile));
        // A tile gets the lines that the order of accesses needs, then as many bytes as fit, then more lines.
        let fewest = if self.across == 1 {
            LOG_LINES_ACROSS
        } else if self.bytes_across == 1 {
            log_tile / 2
        } else {
            0
        };
        self.log_bytes = all_bytes.min(log_tile - all_lines.min(fewest));
        self.log_lines = all_lines.min(log_tile - self.log_bytes);
        let [lines, bytes] = [self.lines.div_ceil(1 << self.log_lines), per_line.div_ceil(1 << self.log_bytes)];
        self.tiles = Divisor::new(if self.across == 1 { lines } else { bytes });
        lines.saturating_mul(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bits::plan::BitOrder;

    /// Makes the argument for elements of `size` bytes from counts and strides; also returns its thread blocks.
    fn strided(
        packs: bool, size: usize, rows: &[(i64, [i64; 2])], elements: &[(i64, i64)], bytes: (i64, i64),
    ) -> (Strided, u64) {
        let mut plan = BitPlan::new(size, BitOrder::Big);
        rows.iter().for_each(|&(count, strides)| plan.rows.push(count, strides));
        elements.iter().for_each(|&(count, stride)| plan.elements.push(count, [stride]));
        plan.bytes.push(bytes.0, [bytes.1]);
        let operation = if packs {
            Operation::Pack(BitRule { size, first_zero: 0, span: 0 })
        } else {
            Operation::Unpack(Patterns { size, zero: 0, one: 1 })
        };
        let address = std::ptr::without_provenance_mut(1 << 20);
        let mut strided = Strided::of(&plan, operation, Part::All, address, address);
        let blocks = strided.cut(packs);
        (strided, blocks)
    }

    #[test]
    fn a_tile_is_read_and_written_in_the_order_of_memory() {
        let n = 1 << 14;
        for (name, rows, elements, bytes, expected) in [
            ("axis 0", vec![(n, [1, 1])], vec![(n, n)], (n / 8, n), (1, 1, 1, 7, 5)),
            (
                "transposed, packed along the last axis",
                vec![(n, [1, n / 8])],
                vec![(n, n)],
                (n / 8, 1),
                (1, 0, 1, 7, 5),
            ),
            ("transposed, flattened", vec![], vec![(n, 1), (n, n)], (n * n / 8, 1), (1, 0, 1, 7, 5)),
            (
                "transposed, lines of odd length",
                vec![],
                vec![(n, 1), (n - 1, n)],
                (n * n / 8 - n / 8, 1),
                (1, 0, 0, 7, 5),
            ),
            ("every other element", vec![], vec![(n, 2)], (n / 8, 1), (0, 0, 0, 0, 10)),
            ("rows with gaps", vec![(n, [2 * n, n / 8])], vec![(n, 1)], (n / 8, 1), (0, 0, 0, 1, 11)),
            ("5 columns", vec![(5, [1, 1])], vec![(n, 5)], (n / 8, 5), (1, 1, 0, 3, 7)),
            ("rows of 5", vec![(n, [5, 1])], vec![(5, 1)], (1, 1), (0, 0, 0, 8, 0)),
            ("bytes across", vec![(n, [n, 1])], vec![(n, 1)], (n / 8, n), (0, 1, 0, 6, 6)),
        ] {
            let (it, blocks) = strided(true, 1, &rows, &elements, bytes);
            assert_eq!((it.across, it.bytes_across, it.words, it.log_lines, it.log_bytes), expected, "{name}");
            let per_line = if it.joined == 1 { it.elements.div_ceil(8) } else { it.bytes };
            assert_eq!(blocks, it.lines.div_ceil(1 << it.log_lines) * per_line.div_ceil(1 << it.log_bytes), "{name}");
        }
    }

    #[test]
    fn a_row_of_several_loops_is_merged_unless_its_lines_cover_whole_bytes() {
        for (packs, elements, bytes, joined) in [
            (true, [(3, 1), (16, 3)], (6, 1), 0),
            (true, [(3, 1), (16, 3)], (6, -2), 0),
            (true, [(3, 1), (15, 3)], (6, 1), 1),
            (false, [(3, 1), (16, 3)], (6, 1), 0),
            (false, [(3, 1), (16, 3)], (5, 1), 1), // the missing byte is unpacked to zeros
        ] {
            let (it, _) = strided(packs, 1, &[], &elements, bytes);
            assert_eq!((it.joined, it.lines), (joined, 3), "{elements:?} {bytes:?}");
            let [step, own] = [it.line_loops[0].strides[1], it.bytes as i64];
            assert_eq!((step, own), if joined == 0 { (2 * bytes.1, 2) } else { (0, bytes.0) });
        }
    }
}
