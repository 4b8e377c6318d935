//! Which of the kernels of kernels/strided.cu does a plan, and how the work is cut into tiles.

use std::ops::Range;

use crate::plan::{
    bits::{BitPlan, Layout},
    loops::Loop,
};

use super::{
    grid::{LOG_BLOCK, VECTOR, cover, divide_up, width},
    module::STRIDED,
    tiles::{Mode, Operation, Tiles, Work},
};

/// A transposed matrix of shorter rows is better off with the many small threads of the general kernels.
const FEWEST_ELEMENTS: i64 = 64;

/// Blocks that keep a large GPU busy to the end: with fewer, threads do less each.
const MANY_BLOCKS: i64 = 2048;

/// What does the plan, if one of the kernels can. `elements` and `bytes` are where the first row's begin, `readable`
/// all addresses of the side that is read.
pub fn work(
    plan: &BitPlan, operation: Operation, elements: *mut u8, bytes: *mut u8, readable: Range<usize>,
) -> Option<Work> {
    let tiles = Tiles::of(plan, operation, elements, bytes, readable)?;
    let needed = divide_up(plan.elements.count(), 8);
    if matches!(operation, Operation::Unpack(_)) && plan.bytes.count() < needed {
        return None; // zeros for the bits that are missing
    }
    let inner = plan.rows.as_slice().len().checked_sub(1);
    match plan.layout() {
        // More bytes than are needed are zeros.
        Layout::Columns { .. } | Layout::Transposed { .. }
            if matches!(operation, Operation::Pack(_)) && plan.bytes.count() > needed =>
        {
            None
        }
        Layout::Columns { across } => columns(tiles.over(plan, Some(across))?, plan, operation),
        Layout::Transposed { across } => columns(joined(tiles, plan, across)?, plan, operation),
        Layout::Rows => rows(tiles.over(plan, inner)?, plan, operation),
        Layout::OneStride if tiles.element_stride == -(plan.size as i64) => {
            rows(tiles.over(plan, inner)?, plan, operation)
        }
        Layout::OneStride => steps(tiles.over(plan, inner)?, plan, operation),
        Layout::Flat | Layout::General => None,
    }
}

/// One row of several loops, the two innermost of which are a transposed matrix, as rows whose bits follow each other.
fn joined(mut tiles: Tiles, plan: &BitPlan, across: usize) -> Option<Tiles> {
    let (&[rows, inner], outer) = plan.elements.as_slice().split_last_chunk().map(|(outer, inner)| (inner, outer))?;
    let mut bits = rows.count * inner.count;
    if across != outer.len() || (!outer.is_empty() && bits % 8 != 0) {
        return None;
    }
    // From the innermost outwards; they are added the other operation round.
    let mut byte_strides = [0; 6];
    for (item, stride) in outer.iter().rev().zip(&mut byte_strides) {
        *stride = bits / 8;
        bits *= item.count;
    }
    for (index, &Loop { count, strides: [element_stride] }) in outer.iter().enumerate() {
        tiles.push_outer(count, [element_stride, *byte_strides.get(outer.len() - 1 - index)?])?;
    }
    tiles.mode = Mode::Joined;
    (tiles.elements, tiles.element_stride) = (inner.count, inner.strides[0]);
    (tiles.rows, tiles.row_element_stride) = (rows.count, rows.strides[0]);
    Some(tiles)
}

/// Rows whose elements lie side by side.
fn columns(mut tiles: Tiles, plan: &BitPlan, operation: Operation) -> Option<Work> {
    let size = plan.size as i64;
    if tiles.mode != Mode::Joined {
        tiles.mode = match (tiles.row_byte_stride, tiles.byte_stride) {
            (1, _) => Mode::Columns,
            (_, 1) => Mode::Transposed,
            _ => return None,
        };
    }
    // A kernel reads a vector that is there in place of one that is not. Short rows that are turned leave most of a
    // block without work.
    let short = tiles.mode != Mode::Columns && tiles.elements < FEWEST_ELEMENTS;
    if short || tiles.rows * size < VECTOR || tiles.readable() < 64 {
        return None;
    }
    let (rows, groups) = (tiles.rows, divide_up(tiles.elements, 8));
    // Lines that begin behind a vector have what lies between in their first one, too.
    let vectors = match operation {
        Operation::Pack(_) if tiles.mode != Mode::Columns => divide_up(rows * size, VECTOR),
        Operation::Pack(_) if tiles.writes_aligned(operation, tiles.byte_stride, VECTOR / size) => {
            divide_up(rows * size, VECTOR)
        }
        Operation::Unpack(_) if tiles.writes_aligned(operation, tiles.element_stride, VECTOR) => {
            divide_up(rows * size, VECTOR)
        }
        _ => divide_up(rows * size + VECTOR - size, VECTOR),
    };
    if tiles.mode == Mode::Columns {
        let kernels =
            if matches!(operation, Operation::Pack(_)) { &STRIDED.pack_columns } else { &STRIDED.unpack_columns };
        tiles.log_width = width(vectors, 1);
        let (across, along) = (cover(vectors, tiles.log_width), cover(groups, LOG_BLOCK - tiles.log_width));
        let in_turn = tiles.byte_stride > 0;
        return Some(tiles.cut(kernels, plan.size, across, along)?.reading(in_turn));
    }
    // 128 bytes of a line, a line of a cache, and twice that where bits are read: on an H200 that was the fastest, and
    // more than one round a thread was slower. Less where rows are few, more where each is short.
    let mut log_x = if matches!(operation, Operation::Pack(_)) { 3 } else { 4 };
    while log_x > 1 && vectors <= 1 << (log_x - 1) {
        log_x -= 1;
    }
    while log_x < 5 && vectors > 1 << log_x && groups <= 1 << (LOG_BLOCK - log_x - 1) {
        log_x += 1;
    }
    let across = cover(vectors, log_x);
    let (kernels, overlap) = match operation {
        Operation::Pack(_) => (&STRIDED.pack_transposed, i64::from(tiles.mode == Mode::Joined)),
        Operation::Unpack(_) => (&STRIDED.unpack_transposed, 0),
    };
    tiles.log_width = log_x;
    tiles.cut(kernels, plan.size, across, divide_up(groups + overlap, (1 << (LOG_BLOCK - log_x)) - overlap))
}

/// Rows that are contiguous on both sides, though elements may lie backwards.
fn rows(mut tiles: Tiles, plan: &BitPlan, operation: Operation) -> Option<Work> {
    let size = plan.size as i64;
    if tiles.byte_stride != 1 {
        return None;
    }
    let (kernels, pieces) = match operation {
        Operation::Pack(_) => {
            let at_once = i64::max(4 / size, 1);
            let aligned = tiles.writes_aligned(operation, tiles.row_byte_stride, at_once);
            (&STRIDED.pack_rows, divide_up(tiles.bytes + if aligned { 0 } else { at_once - 1 }, at_once))
        }
        Operation::Unpack(_) => {
            let aligned = tiles.element_stride > 0 && tiles.writes_aligned(operation, tiles.row_element_stride, VECTOR);
            (&STRIDED.unpack_rows, divide_up(tiles.elements * size + if aligned { 0 } else { VECTOR - size }, VECTOR))
        }
    };
    let cut = |rounds: i64| {
        let log_width = width(pieces, rounds);
        (log_width, divide_up(pieces, rounds << log_width), cover(tiles.rows, LOG_BLOCK - log_width))
    };
    // As much a thread as leaves a third of them without work at most: a block has to last.
    let rounds = [4, 2].into_iter().find(|&rounds| {
        let (log_width, across, along) = cut(rounds);
        across * (rounds << log_width) <= pieces + pieces / 2 && across * along >= MANY_BLOCKS
    });
    let rounds = rounds.unwrap_or(1);
    let (log_width, across, along) = cut(rounds);
    (tiles.rounds, tiles.log_width) = (rounds as u32, log_width);
    let in_turn = tiles.rows == 1 || tiles.row_byte_stride > 0;
    Some(tiles.cut(kernels, plan.size, across, along)?.reading(in_turn))
}

/// Elements at one stride, in bytes that follow each other.
fn steps(tiles: Tiles, plan: &BitPlan, operation: Operation) -> Option<Work> {
    // A warp takes 1024 elements of a row. Those that are all the same are read as fast by one thread as by all.
    if tiles.byte_stride != 1 || tiles.element_stride == 0 || tiles.elements < 512 {
        return None;
    }
    let kernels = match operation {
        Operation::Pack(_) => &STRIDED.pack_steps,
        Operation::Unpack(_) => &STRIDED.unpack_steps,
    };
    // Bytes that no element has a bit in are zeros.
    let (across, along) = (divide_up(i64::max(tiles.elements, tiles.bytes * 8), 1024 * 8), tiles.rows);
    tiles.cut(kernels, plan.size, across, along)
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use crate::plan::bits::{BitOrder, BitRule, Patterns};

    use super::*;

    fn truth(size: usize) -> Operation {
        Operation::Pack(BitRule { size, first_zero: 0, span: 0 })
    }

    fn ones(size: usize) -> Operation {
        Operation::Unpack(Patterns { size, zero: 0, one: 1 })
    }

    /// Of these rows, elements and bytes: counts and strides.
    fn work_of(
        operation: Operation, start: usize, rows: &[(i64, [i64; 2])], elements: &[(i64, i64)], bytes: (i64, i64),
    ) -> Option<Work> {
        let size = match operation {
            Operation::Pack(rule) => rule.size,
            Operation::Unpack(one) => one.size,
        };
        let mut plan = BitPlan::new(size, BitOrder::Big);
        rows.iter().for_each(|&(count, strides)| plan.rows.push(count, strides));
        elements.iter().for_each(|&(count, stride)| plan.elements.push(count, [stride]));
        plan.bytes.push(bytes.0, [bytes.1]);
        let at = |address: usize| ptr::without_provenance_mut(address);
        work(&plan, operation, at(4096 + start), at(1 << 20), 0..1 << 30)
    }

    #[test]
    fn a_plan_goes_to_the_kernel_of_its_class_or_to_none() {
        // Rows: count, stride of elements and of bytes; elements and bytes of each: count and stride.
        let columns = ([(100, [4, 1])], (80, 400), (10, 100));
        let transposed = ([(100, [4, 10])], (800, 400), (100, 1));
        for (operation, start, (rows, elements, bytes), expected) in [
            (truth(4), 0, columns, Some((c"gc_pack_columns_u32", Mode::Columns))),
            (ones(4), 0, columns, Some((c"gc_unpack_columns_u32", Mode::Columns))),
            (ones(2), 0, ([(100, [2, 1])], (80, 202), (10, 100)), Some((c"gc_unpack_columns_u16", Mode::Columns))),
            (truth(4), 0, ([(100, [4, 1])], (9, 400), (2, 100)), Some((c"gc_pack_columns_u32", Mode::Columns))),
            (truth(4), 0, ([(100, [4, 2])], (9, 400), (2, 1)), None), // short rows
            (truth(4), 2, columns, None),                             // elements that are not aligned
            (truth(4), 0, ([(100, [4, 1])], (80, 402), (10, 100)), None),
            (truth(4), 0, ([(100, [4, 1])], (80, 400), (11, 100)), None), // zeros behind
            (ones(4), 0, ([(100, [4, 1])], (80, 400), (9, 100)), None),   // bits are missing
            (truth(4), 0, transposed, Some((c"gc_pack_transposed_u32", Mode::Transposed))),
            (ones(4), 4, transposed, Some((c"gc_unpack_transposed_u32", Mode::Transposed))),
            (truth(4), 0, ([(3, [4, 10])], (800, 400), (100, 1)), None), // too few side by side
            (truth(4), 0, ([(100, [4, 20])], (800, 400), (100, 2)), None),
            (truth(8), 0, ([(7, [120, 2])], (15, 8), (2, 1)), Some((c"gc_pack_rows_u64", Mode::Columns))),
            (ones(8), 0, ([(7, [120, 2])], (15, 8), (2, 1)), Some((c"gc_unpack_rows_u64", Mode::Columns))),
            (truth(1), 0, ([(2, [-999, 125])], (999, -1), (125, 1)), Some((c"gc_pack_rows_u8", Mode::Columns))),
            (ones(1), 0, ([(2, [-999, 125])], (999, -1), (125, 1)), Some((c"gc_unpack_rows_u8", Mode::Columns))),
            (truth(1), 0, ([(2, [1998, 125])], (999, 2), (125, 1)), Some((c"gc_pack_steps_u8", Mode::Columns))),
            (ones(1), 0, ([(2, [1998, 125])], (999, -2), (125, 1)), Some((c"gc_unpack_steps_u8", Mode::Columns))),
            (truth(1), 0, ([(2, [1, 125])], (999, 0), (125, 1)), None),
            (truth(1), 0, ([(1 << 40, [999, 125])], (999, -1), (125, 1)), None), // more blocks than a launch has
            (Operation::Pack(BitRule { size: 1, first_zero: 1, span: 0 }), 0, ([(7, [15, 2])], (15, 1), (2, 1)), None),
        ] {
            let found = work_of(operation, start, &rows, &[elements], bytes);
            assert_eq!(
                found.map(|work| (work.kernel.name, work.tiles.mode)),
                expected,
                "{rows:?} {elements:?} {bytes:?}"
            );
        }
    }

    #[test]
    fn a_transposed_matrix_whose_rows_share_bytes_is_rows_that_are_joined() {
        let matrix = [(100, 4), (81, 400)];
        for (operation, elements, bytes, expected) in [
            (truth(4), &matrix[..], 1013, true),
            (ones(4), &matrix[..], 1013, true),
            (ones(4), &matrix[..], 2000, true),
            (truth(4), &matrix[..], 1014, false), // zeros behind
            (ones(4), &matrix[..], 1012, false),  // bits are missing
            (truth(4), &[(2, 40_000), (100, 4), (82, 400)], 2050, true),
            (truth(4), &[(2, 40_000), (100, 4), (81, 400)], 2025, false), // two matrices share a byte
            (truth(4), &[(100, 4), (2, 40_000), (81, 400)], 2025, false), // rows are not neighbours
        ] {
            let found = work_of(operation, 0, &[], elements, (bytes, 1));
            assert_eq!(found.is_some_and(|work| work.tiles.mode == Mode::Joined), expected, "{elements:?} {bytes}");
        }
    }
}
