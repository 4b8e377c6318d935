//! Loops over the elements of all tensors of a launch, merged to as few as possible, and their distribution to thread
//! blocks.

use arrayvec::ArrayVec;

use crate::ffi::error::{Result, error};

use super::{
    entries::{Access, Entries, Entry},
    layout::{ELEMENT_ROUNDS, HEAD, Layout, MOST_WORDS, SHORT_BYTES, THREADS, TILE_ROUNDS},
};

/// Maximum number of thread blocks of a reduction whose outputs are split, for all outputs together. The largest GPUs
/// run a fraction of them at once, so all multiprocessors finish at about the same time.
const MANY_BLOCKS: u64 = 4096;

/// Minimum number of vectors per thread if an output's elements are split over several thread blocks.
const VECTORS_A_THREAD: u64 = 16;

/// Binary logarithm of the neighbouring threads that read one row: they read 512 bytes of it.
const LOG_ROW: u32 = 5;

/// Binary logarithm of the threads of a thread block.
const LOG_THREADS: u32 = THREADS.ilog2();

/// Binary logarithm of the elements of a tile.
const LOG_TILE: u32 = LOG_THREADS + TILE_ROUNDS.ilog2();

/// Binary logarithms of the maximum number of columns of a tile if an input is transposed, and of the minimum number of
/// columns in wide matrices.
const LOG_TRANSPOSED: u32 = 6;
const LOG_NARROW: u32 = 5;

/// Nested loops over some tensors, outermost first. Each row has a loop's count, then the stride of each tensor in
/// bytes. The rows are stored in place, so a run allocates nothing.
pub struct Nest {
    width: usize,
    rows: ArrayVec<i64, MOST_WORDS>,
    /// Number of loops that did not fit, even after the others were merged; no launch has room for so many.
    left_out: usize,
    count: u64,
    /// Tensor by whose strides the loops are sorted, the widest outermost; None: the loops stay in their order.
    sorted_by: Option<usize>,
}

/// A tensor whose elements are loaded or stored one by one.
#[derive(Clone, Copy)]
pub struct Operand {
    pub address: u64,
    /// Size of an element in bytes.
    pub size: i64,
    pub is_input: bool,
}

impl Nest {
    /// Makes a nest without loops, which is one round.
    #[inline(always)] // constructed in place, without a copy
    pub fn new() -> Self {
        Self { width: 1, rows: ArrayVec::new(), left_out: 0, count: 1, sorted_by: None }
    }

    /// Sets the number of tensors. Must be called before the first loop is pushed.
    pub fn begin(&mut self, tensors: usize, sorted_by: Option<usize>) {
        (self.width, self.sorted_by) = (tensors + 1, sorted_by);
    }

    /// Adds an innermost loop. If a launch uses the nest, the product of all counts must be below 2^63, unless a count
    /// is 0.
    pub fn push(&mut self, count: i64, strides: impl Iterator<Item = i64>) {
        self.count = self.count.saturating_mul(count as u64);
        if count == 1 || self.count == 0 {
            return;
        }
        if self.rows.remaining_capacity() < self.width {
            self.finish();
        }
        if self.rows.remaining_capacity() < self.width {
            self.left_out += 1;
            return;
        }
        self.rows.push(count);
        self.rows.extend(strides.take(self.width - 1));
    }

    /// Sorts the loops and merges them to as few as possible. Must be called after the last loop is pushed.
    pub fn finish(&mut self) {
        self.sort();
        self.merge();
    }

    /// Returns the number of rounds of all loops.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the number of loops.
    pub fn len(&self) -> usize {
        self.rows.len() / self.width
    }

    /// Returns the number of loops, including those that did not fit.
    pub fn wanted(&self) -> usize {
        self.len() + self.left_out
    }

    fn row(&self, index: usize) -> &[i64] {
        &self.rows[index * self.width..(index + 1) * self.width]
    }

    fn all_rows(&self) -> impl Iterator<Item = &[i64]> {
        self.rows.chunks_exact(self.width)
    }

    fn last(&self) -> Option<&[i64]> {
        self.all_rows().last()
    }

    /// Sorts loops whose order is free by a tensor's strides, the widest outermost.
    fn sort(&mut self) {
        let Some(tensor) = self.sorted_by else { return };
        for end in 1..self.len() {
            let mut at = end;
            let step = |nest: &Self, index: usize| nest.row(index)[tensor + 1].unsigned_abs();
            while at > 0 && step(self, at - 1) < step(self, at) {
                let (one, other) = self.rows[(at - 1) * self.width..(at + 1) * self.width].split_at_mut(self.width);
                one.swap_with_slice(other);
                at -= 1;
            }
        }
    }

    /// Merges two loops into one where, for all tensors, the outer stride is the inner stride times the inner count.
    fn merge(&mut self) {
        let width = self.width;
        let mut kept = 0;
        for index in 0..self.len() {
            let merges = kept > 0 && {
                let (outer, inner) = (self.row(kept - 1), self.row(index));
                outer[0].checked_mul(inner[0]).is_some()
                    && (1..width).all(|k| outer[k] == inner[k].wrapping_mul(inner[0]))
            };
            let outer_count = if merges { self.row(kept - 1)[0] } else { 1 };
            kept -= usize::from(merges);
            self.rows.copy_within(index * width..(index + 1) * width, kept * width);
            self.rows[kept * width] *= outer_count;
            kept += 1;
        }
        self.rows.truncate(kept * width);
    }

    /// Returns the shortest non-zero stride of the inputs in the innermost loop.
    fn nearest(&self, operands: &[Operand]) -> u64 {
        let steps = self.last().into_iter().flat_map(|row| row[1..].iter().zip(operands));
        let steps = steps.filter(|(step, operand)| **step != 0 && operand.is_input);
        steps.map(|(step, _)| step.unsigned_abs()).min().unwrap_or(u64::MAX)
    }
}

/// Returns the inputs with one element for a whole vector, as bits; None if the innermost loop cannot be processed
/// `vector` elements at a time. `others`: loops around `nest`. `partly`: the last vector may be incomplete.
fn vectors(
    nest: &Nest, others: Option<&Nest>, operands: &[Operand], vector: i64, partly: bool, looks_at: fn(&Operand) -> bool,
) -> Option<u32> {
    let inner = nest.last()?;
    if vector < 2 || inner[0] % vector != 0 && !(partly && nest.len() == 1) {
        return None;
    }
    let mut ones = 0;
    let around = || nest.all_rows().take(nest.len() - 1).chain(others.into_iter().flat_map(Nest::all_rows));
    for (k, operand) in operands.iter().enumerate().filter(|(_, operand)| looks_at(operand)) {
        let (step, bytes) = (inner[k + 1], operand.size * vector);
        if step == 0 && operand.is_input {
            ones |= 1 << k;
        } else if step != operand.size
            || operand.address % bytes as u64 != 0
            || around().any(|row| row[k + 1] % bytes != 0)
        {
            return None;
        }
    }
    Some(ones)
}

/// Returns true if some element is not aligned to its size.
fn is_unaligned(nests: &[&Nest], operands: &[Operand]) -> bool {
    operands.iter().enumerate().any(|(k, operand)| {
        operand.address % operand.size as u64 != 0
            || nests.iter().any(|nest| nest.all_rows().any(|row| row[k + 1] % operand.size != 0))
    })
}

/// Launch of an entry on a number of thread blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub entry: Entry,
    pub blocks: u64,
}

/// Launches of a call.
pub struct Launches {
    pub first: Launch,
    /// Launch that combines the partial results of the first.
    pub second: Option<Launch>,
}

impl Launches {
    pub fn iter(&self) -> impl Iterator<Item = Launch> {
        [self.first].into_iter().chain(self.second)
    }

    /// Returns the entries that the launches need.
    pub fn entries(&self) -> Entries {
        self.iter().fold(Entries::default(), |some, launch| some.with(launch.entry))
    }
}

fn two(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Argument of a kernel. The capacity suffices for every layout: see `Layout::of`.
pub type Words = ArrayVec<u64, MOST_WORDS>;

/// Writes the words before the loops. `values` writes those of raw and scalar parameters, in the parameters' order.
fn put_head(words: &mut Words, head: &[u64], layout: &Layout, operands: &[Operand], values: impl FnOnce(&mut Words)) {
    debug_assert_eq!(head.len(), HEAD[usize::from(layout.is_reduction)]);
    words.extend(head.iter().copied());
    words.extend(operands.iter().map(|operand| operand.address));
    words.extend((operands.len()..layout.tensors.max(1)).map(|_| 0));
    values(words);
    debug_assert_eq!(words.len(), layout.before_loops);
}

/// Writes the loops of a nest. The innermost loop advances `vector` rounds at a time.
fn put_loops(words: &mut Words, nest: &Nest, vector: i64) {
    let last = nest.len().saturating_sub(1);
    for (index, row) in nest.all_rows().enumerate() {
        let at_once = if index == last { vector } else { 1 };
        let count = (row[0] as u64).div_ceil(at_once as u64);
        words.extend([count, u64::MAX / count]);
        words.extend(row[1..].iter().map(|stride| stride.wrapping_mul(at_once) as u64));
    }
}

fn put_rest(words: &mut Words, layout: &Layout) {
    words.extend((words.len()..layout.words()).map(|_| 0));
}

/// Division of the two innermost loops of a nest into tiles, one per thread block.
struct Tiling {
    /// Number of rows and columns, in elements and in tiles.
    elements: [u64; 2],
    tiles: [u64; 2],
    log_width: u32,
    blocks: u64,
    /// Transposed inputs, as bits: their stride is shorter in the outer loop.
    transposed: u32,
}

impl Tiling {
    /// Returns None if there are no two loops, a count exceeds 2^31 - 1, or over half of the threads would be idle.
    fn of(nest: &Nest, operands: &[Operand]) -> Option<Self> {
        let outer = nest.len().checked_sub(2)?;
        let (down, beside) = (nest.row(outer), nest.row(outer + 1));
        let (rows, columns) = (down[0] as u64, beside[0] as u64);
        let mut transposed = 0;
        for (k, _) in operands.iter().enumerate().filter(|(_, operand)| operand.is_input) {
            let [below, next] = [down, beside].map(|row| row[k + 1].unsigned_abs());
            transposed |= u32::from((1..next).contains(&below)) << k;
        }
        let is_small = operands.iter().all(|operand| operand.size.unsigned_abs() < 4);
        let most = if transposed != 0 { LOG_TRANSPOSED - u32::from(is_small) } else { LOG_THREADS };
        let few_rows = LOG_TILE.saturating_sub(log_of(rows)).min(LOG_THREADS);
        let widest = log_of(columns).min(most.max(few_rows));
        let (count, most_blocks) = (nest.count(), i32::MAX as u64);
        let mut tilings = (LOG_NARROW.min(widest)..=widest).rev().filter_map(|log_width| {
            let tiles = [rows.div_ceil(1 << (LOG_TILE - log_width)), columns.div_ceil(1 << log_width)];
            let blocks = (count / rows / columns).checked_mul(tiles[0])?.checked_mul(tiles[1])?;
            let fits = rows.max(columns).max(blocks) <= most_blocks && blocks << LOG_TILE <= 2 * count;
            // A transposed tile's columns must not be longer than a thread block has threads.
            let transposed = if LOG_TILE - log_width <= LOG_THREADS { transposed } else { 0 };
            fits.then_some(Self { elements: [rows, columns], tiles, log_width, blocks, transposed })
        });
        // Wider tiles have fewer memory sectors that two thread blocks write. With small elements, threads are the
        // bottleneck, so fewer of them may be idle.
        let idle = if is_small { count / 4 } else { count };
        tilings.clone().find(|tiling| tiling.blocks << LOG_TILE <= count + idle).or_else(|| tilings.next_back())
    }
}

/// Returns the launch of an elementwise kernel and writes its argument. `nest` has no more loops than `layout`.
pub fn elementwise(
    layout: &Layout, nest: &Nest, operands: &[Operand], values: impl FnOnce(&mut Words), words: &mut Words,
) -> Launches {
    let vector = layout.vector as i64;
    let bytes = is_unaligned(&[nest], operands);
    // A broadcast input is read as one element, which must also be aligned.
    let ones = if bytes { None } else { vectors(nest, None, operands, vector, true, |_| true) };
    if ones.is_none()
        && !bytes
        && let Some(Tiling { elements: [rows, columns], tiles, log_width, blocks, transposed }) =
            Tiling::of(nest, operands)
    {
        let entry = if transposed == 0 { Entry::Tiles } else { Entry::TransposedTiles };
        let head =
            [nest.count(), columns | rows << 32, two(nest.len() as u32, transposed), two(blocks as u32, log_width)];
        put_head(words, &head, layout, operands, values);
        put_loops(words, nest, 1);
        let row = 2 + operands.len();
        for (k, count) in tiles.into_iter().rev().enumerate() {
            let at = words.len() - (k + 1) * row;
            (words[at], words[at + 1]) = (count, u64::MAX / count);
        }
        put_rest(words, layout);
        return Launches { first: Launch { entry, blocks }, second: None };
    }
    let (access, at_once, rounds) = match ones {
        Some(_) => (Access::Vectors, vector, layout.rounds),
        None if bytes => (Access::Bytes, 1, 1),
        None => (Access::Elements, 1, ELEMENT_ROUNDS),
    };
    let entry = Entry::elementwise(access, nest.len() > 1);
    // Elements that do not fill a vector get their own thread block. They exist only if there is one loop.
    let (units, rest) = (nest.count() / at_once as u64, nest.count() % at_once as u64);
    let blocks = units.div_ceil(u64::from(THREADS) * rounds as u64);
    let head = [nest.count(), units, two(nest.len() as u32, ones.unwrap_or(0)), two(blocks as u32, 0)];
    put_head(words, &head, layout, operands, values);
    put_loops(words, nest, at_once);
    put_rest(words, layout);
    Launches { first: Launch { entry, blocks: blocks + u64::from(rest > 0) }, second: None }
}

/// Division of a reduction among thread blocks. The division determines the order in which elements are combined, so it
/// depends neither on addresses nor on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// True if neighbouring threads have neighbouring outputs; false if they have neighbouring elements of one output.
    pub columns: bool,
    /// Binary logarithm of the number of different outputs of a thread block's threads.
    pub log_across: u32,
    /// Number of an output's elements that one thread block reduces.
    pub chunk: u64,
    /// Number of thread blocks per output.
    pub splits: u64,
}

fn log_of(count: u64) -> u32 {
    count.checked_next_power_of_two().map_or(63, u64::ilog2)
}

impl Split {
    pub fn of(kept: &Nest, reduced: &Nest, operands: &[Operand], vector: usize) -> Self {
        let (outputs, elements, vector) = (kept.count(), reduced.count(), vector as u64);
        let columns = reduced.len() == 0 || kept.len() > 0 && kept.nearest(operands) < reduced.nearest(operands);
        let (log_across, at_once, tiles) = if columns {
            let pieces = outputs.div_ceil(vector);
            let log_down = log_of(elements.div_ceil(2)).min(LOG_THREADS - log_of(pieces).min(LOG_ROW));
            let log_across = LOG_THREADS - log_down;
            (log_across, 1, pieces.div_ceil(1 << log_across))
        } else {
            let log_along = log_of(elements.div_ceil(4 * vector)).min(LOG_THREADS);
            let log_across = LOG_THREADS - log_along;
            (log_across, vector, outputs.div_ceil(1 << log_across))
        };
        let a_round = u64::from(THREADS >> log_across) * at_once;
        let splits = (MANY_BLOCKS / tiles.max(1)).min(elements / (a_round * VECTORS_A_THREAD)).max(1);
        let chunk = elements.div_ceil(splits).next_multiple_of(a_round);
        Self { columns, log_across, chunk, splits: elements.div_ceil(chunk.max(1)).max(1) }
    }

    /// Returns the number of partial results that the second launch combines; 0 without a second launch.
    pub fn partials(&self, outputs: u64) -> u64 {
        if self.splits > 1 { self.splits.saturating_mul(outputs) } else { 0 }
    }
}

/// Returns true if shared memory is faster for a reduction: rows are adjacent, an output has at most two threads,
/// shared memory holds a row per thread, and elements have at least 4 bytes.
fn are_short(layout: &Layout, split: &Split, [kept, reduced]: [&Nest; 2], operands: &[Operand]) -> bool {
    let (Some(row), 1, 1) = (reduced.last(), kept.len(), reduced.len()) else { return false };
    let most = (SHORT_BYTES / layout.reduced_bytes / THREADS as usize) as u64;
    let side_by_side = |(k, operand): (usize, &Operand)| {
        let pitch = row[0].wrapping_mul(operand.size);
        operand.size >= 4 && row[k + 1] == operand.size && kept.row(0)[k + 1] == pitch
    };
    !split.columns
        && split.splits == 1
        && split.log_across + 1 >= LOG_THREADS
        && reduced.count() <= most
        && operands.iter().enumerate().filter(|(_, operand)| operand.is_input).all(side_by_side)
}

/// Returns the launches of a reduction and writes their argument. `partials`: address of the workspace.
pub fn reduction(
    layout: &Layout, split: &Split, [kept, reduced]: [&Nest; 2], operands: &[Operand], values: impl FnOnce(&mut Words),
    partials: u64, words: &mut Words,
) -> Result<Launches> {
    let (vector, is_input): (_, fn(&Operand) -> bool) = (layout.vector as i64, |operand| operand.is_input);
    let bytes = is_unaligned(&[kept, reduced], operands);
    let ones = if bytes {
        None
    } else if split.columns {
        vectors(kept, Some(reduced), operands, vector, false, is_input)
    } else {
        vectors(reduced, Some(kept), operands, vector, true, is_input)
    };
    let access = match ones {
        Some(_) => Access::Vectors,
        None if bytes => Access::Bytes,
        None => Access::Elements,
    };
    let entry = if access == Access::Elements && are_short(layout, split, [kept, reduced], operands) {
        Entry::ShortRows
    } else {
        Entry::reduction(split.columns, access, reduced.len() != 1)
    };
    let (outputs_at_once, at_once) = match (split.columns, access) {
        (false, Access::Vectors) => (1, vector),
        (true, Access::Vectors) => (vector, 1),
        _ => (1, 1),
    };
    let outputs = kept.count();
    let of_block =
        if entry == Entry::ShortRows { THREADS.into() } else { (outputs_at_once as u64) << split.log_across };
    let tiles = outputs.div_ceil(of_block);
    let blocks = tiles.checked_mul(split.splits).filter(|&blocks| blocks <= i32::MAX as u64).ok_or_else(|| {
        error!(SizeOverflow, "outputs: {outputs} elements take {tiles} blocks, more than one launch has")
    })?;
    let log_second = log_of(outputs).min(LOG_ROW);
    let head = [
        outputs,
        reduced.count(),
        split.chunk,
        tiles,
        two(split.splits as u32, split.log_across),
        two(log_second, u32::from(bytes)),
        two(kept.len() as u32, reduced.len() as u32),
        two(ones.unwrap_or(0), outputs_at_once as u32),
        partials,
    ];
    put_head(words, &head, layout, operands, values);
    put_loops(words, kept, outputs_at_once);
    put_loops(words, reduced, at_once);
    put_rest(words, layout);
    let second = Launch { entry: Entry::Second, blocks: outputs.div_ceil(1 << log_second) };
    Ok(Launches { first: Launch { entry, blocks }, second: (split.splits > 1).then_some(second) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::error::Status;

    /// Counts with the strides of each tensor, outermost first.
    type Dims<'a> = &'a [(i64, &'a [i64])];

    const K31: i64 = 1 << 31;
    const K32: i64 = 1 << 32;
    const K33: i64 = 1 << 33;

    fn nest(tensors: usize, dims: Dims<'_>) -> Nest {
        let mut nest = Nest::new();
        nest.begin(tensors, None);
        dims.iter().for_each(|(count, strides)| nest.push(*count, strides.iter().copied()));
        nest
    }

    fn operand(address: u64, size: i64, is_input: bool) -> Operand {
        Operand { address, size, is_input }
    }

    fn layout(is_reduction: bool, tensors: usize, vector: usize) -> Layout {
        let before_loops = HEAD[usize::from(is_reduction)] + tensors;
        Layout { is_reduction, tensors, vector, rounds: 2, singles: 16, reduced_bytes: 4, before_loops, loops: 8 }
    }

    /// Returns the offset of a round by a reference computation from the original dimensions.
    fn place(dims: Dims<'_>, tensor: usize, round: u64) -> i64 {
        let (mut rest, mut offset) = (i128::from(round), 0i128);
        for (count, strides) in dims.iter().rev() {
            offset += rest % i128::from(*count) * i128::from(strides[tensor]);
            rest /= i128::from(*count);
        }
        assert_eq!(rest, 0, "{round} is beyond the last round");
        offset as i64 // addresses have 64 bits
    }

    /// Returns the offset of a round from the words of the loops, computed like `go` in kernels/compiled.cuh.
    fn found(words: &[u64], tensors: usize, loops: usize, tensor: usize, round: u64) -> i64 {
        let (mut rest, mut offset) = (round, 0i64);
        for (index, row) in words.chunks(2 + tensors).take(loops).enumerate().rev() {
            let (count, reciprocal) = (row[0], row[1]);
            let mut above = ((u128::from(rest) * u128::from(reciprocal)) >> 64) as u64;
            let mut at = rest - above * count;
            if at >= count {
                (above, at) = (above + 1, at - count);
            }
            if index == 0 {
                at = rest; // the outermost loop takes the rest
            } else {
                assert!(at < count, "{rest} / {count}");
            }
            offset = offset.wrapping_add((at as i64).wrapping_mul(row[2 + tensor] as i64));
            rest = above;
        }
        offset
    }

    /// Returns the first and last rounds, rounds around powers of two, and some in between.
    fn some_rounds(count: u64) -> impl Iterator<Item = u64> {
        let edges = (0..63).flat_map(|log| [(1u64 << log) - 1, 1 << log, (1 << log) + 1]);
        let some = (1..200u64).map(move |k| k.wrapping_mul(0x9e37_79b9_7f4a_7c15) % count.max(1));
        edges.chain(some).chain([count.wrapping_sub(1)]).filter(move |&round| round < count)
    }

    /// Dimensions of two tensors, and the minimum number of loops that keeps their order.
    const CASES: &[(Dims<'static>, usize)] = &[
        (&[], 0),
        (&[(1, &[5, 5])], 0),
        (&[(K32 + 3, &[1, 4])], 1),
        (&[(1 << 16, &[1 << 16, 1 << 18]), (1 << 16, &[1, 4])], 1),
        (&[(3, &[K32 + 3, K32 + 3]), (K32 + 3, &[1, 1])], 1),
        (&[(3, &[K32 + 4, K32 + 3]), (K32 + 3, &[1, 1])], 2),
        (&[(K31, &[0, 0]), (K31 - 1, &[0, 0])], 1),
        (&[(K33, &[0, 0]), (7, &[4, 4])], 2),
        (&[(7, &[4, 4]), (K33, &[0, 0]), (3, &[0, 0])], 2),
        (&[(5, &[-8 * K33, 8 * K33]), (K33, &[-8, 8])], 1),
        (&[(K31 + 1, &[12, 4]), (3, &[4, 0]), (1, &[9, 9])], 2),
        (&[(1 << 20, &[1 << 40, 1 << 40]), (1 << 20, &[1 << 20, 1 << 20]), (1 << 20, &[1, 1])], 1),
        (&[(1 << 20, &[1 << 41, 1 << 40]), (1 << 20, &[1 << 20, 1 << 20]), (1 << 20, &[1, 1])], 2),
        // The offset after the inner loop, 2^64 bytes, wraps to 0.
        (&[(4, &[0, 0]), (1 << 24, &[1 << 40, 1 << 40])], 1),
    ];

    #[test]
    fn merged_loops_visit_the_same_addresses() {
        for (dims, loops) in CASES {
            let mut nest = nest(2, dims);
            let count = dims.iter().map(|(count, _)| *count as u64).product::<u64>();
            nest.merge();
            assert_eq!((nest.len(), nest.count()), (*loops, count), "{dims:?}");
            let rows: Vec<(i64, &[i64])> = nest.all_rows().map(|row| (row[0], &row[1..])).collect();
            for round in some_rounds(count) {
                for tensor in 0..2 {
                    assert_eq!(place(&rows, tensor, round), place(dims, tensor, round), "{dims:?}, {round}");
                }
            }
        }
    }

    /// A nest of 30 tensors has room for 16 rows.
    #[test]
    fn too_many_loops_are_merged_or_counted() {
        let dims: Vec<(i64, [i64; 30])> = (0..18).map(|k| (2, [1 << (17 - k); 30])).collect();
        let (mut merged, mut wide) = (Nest::new(), Nest::new());
        for (nest, factor) in [(&mut merged, 1), (&mut wide, 3)] {
            nest.begin(30, None);
            for (k, (count, strides)) in dims.iter().enumerate() {
                nest.push(*count, strides.iter().map(|stride| if k % 2 == 0 { stride * factor } else { *stride }));
            }
            nest.finish();
            assert_eq!(nest.count(), 1 << 18);
        }
        assert_eq!((merged.len(), merged.wanted()), (1, 1));
        assert!(wide.len() < 18 && wide.wanted() == 18, "{} of {}", wide.len(), wide.wanted());
    }

    #[test]
    fn an_empty_loop_leaves_no_round() {
        let nest = nest(1, &[(i64::MAX, &[1]), (i64::MAX, &[1]), (0, &[1]), (i64::MAX, &[1])]);
        assert_eq!(nest.count(), 0);
    }

    #[test]
    fn sorted_loops_are_the_same_loops_with_decreasing_strides() {
        let dims: Dims<'_> =
            &[(2, &[1, 9]), (3, &[-K33, 8]), (5, &[K32, 7]), (7, &[i64::MIN, 6]), (11, &[K32, 5]), (13, &[0, 4])];
        let mut sorted = nest(2, dims);
        sorted.sorted_by = Some(0);
        sorted.sort();
        // Loops with equal strides keep their order.
        let expected = [(7, 6), (3, 8), (5, 7), (11, 5), (2, 9), (13, 4)];
        assert!(sorted.all_rows().map(|row| (row[0], row[2])).eq(expected), "{:?}", sorted.rows);
        sorted.sorted_by = Some(1);
        sorted.sort();
        assert!(sorted.all_rows().map(|row| row[2]).eq([9, 8, 7, 6, 5, 4]), "{:?}", sorted.rows);
        assert_eq!(sorted.count(), 2 * 3 * 5 * 7 * 11 * 13);
    }

    #[test]
    fn vectors_are_whole_aligned_and_side_by_side() {
        let all: fn(&Operand) -> bool = |_| true;
        let at = |address: u64| [operand(address, 4, true), operand(1 << 40, 4, false)];
        let row: &[i64] = &[4, 4];
        for (dims, operands, partly, expected) in [
            (&[(K32 + 4, row)] as Dims<'_>, at(K32 as u64), false, Some(0)),
            (&[(K32 + 3, row)], at(0), false, None),
            (&[(K32 + 3, row)], at(0), true, Some(0)),
            (&[(K32 + 4, row)], at(K32 as u64 + 4), true, None),
            (&[(K32 + 4, &[0, 4])], at(4), true, Some(1)),
            (&[(K32 + 4, &[4, 0])], at(0), true, None), // an output has no stride of 0
            (&[(K32 + 4, &[8, 4])], at(0), true, None),
            (&[(K32 + 4, &[-4, -4])], at(0), true, None),
            (&[(3, &[K33, K33]), (K32 + 4, row)], at(0), true, Some(0)),
            (&[(3, &[K33 + 4, K33]), (K32 + 4, row)], at(0), true, None),
            (&[(3, &[K33 + 4, K33]), (K32 + 4, &[0, 4])], at(0), true, Some(1)),
            (&[(3, &[K33, K33]), (K32 + 3, row)], at(0), true, None), // with several loops, rows must be whole vectors
            (&[], at(0), true, None),
        ] {
            assert_eq!(vectors(&nest(2, dims), None, &operands, 4, partly, all), expected, "{dims:?}");
        }
        let inner = nest(2, &[(K32, row)]);
        for (around, expected) in [(K33, Some(0)), (K33 + 4, None)] {
            let others = nest(2, &[(2, &[around, 0])]);
            assert_eq!(vectors(&inner, Some(&others), &at(0), 4, false, all), expected);
        }
        assert_eq!(vectors(&inner, None, &at(0), 1, true, all), None);
        let one = |operand: &Operand| operand.is_input;
        assert_eq!(vectors(&nest(2, &[(K32, &[4, 999])]), None, &at(0), 4, false, one), Some(0));
    }

    #[test]
    fn every_element_of_an_elementwise_kernel_has_one_thread_and_its_place() {
        let aligned = [operand(K32 as u64, 1, true), operand(1 << 40, 1, false)];
        let odd = [operand(1, 2, true), operand(2, 2, false)];
        for (dims, _) in CASES {
            for (operands, vector) in [(&aligned, 16), (&aligned, 1), (&odd, 8)] {
                let (layout, mut nest) = (layout(false, 2, vector), nest(2, dims));
                nest.merge();
                let mut words = Words::new();
                let Launches { first, second } = elementwise(&layout, &nest, operands, |_| {}, &mut words);
                let (count, units) = (words[0], words[1]);
                assert_eq!((count, words.len(), second), (nest.count(), layout.words(), None));
                assert_eq!(&words[4..6], [operands[0].address, operands[1].address]);
                let (at_once, rounds) = match first.entry {
                    Entry::Vectors | Entry::NestedVectors => (vector as u64, 2),
                    Entry::Bytes => (1, 1),
                    _ => (1, 4),
                };
                let a_block = 256 * rounds;
                let (n_loops, whole) = (words[2] as u32 as usize, u64::from(words[3] as u32));
                assert_eq!(n_loops, nest.len());
                assert_eq!(
                    first.entry == Entry::Bytes,
                    operands[0].address == 1,
                    "{dims:?}: only the odd ones go byte by byte"
                );
                let rest = count - units * at_once;
                assert!(rest < at_once && rest <= 256, "{dims:?}: {rest} elements are left");
                // The argument has the low 32 bits of the number of blocks; the launch refuses larger numbers.
                assert_eq!(whole, units.div_ceil(a_block) as u32 as u64);
                assert_eq!(first.blocks, units.div_ceil(a_block) + u64::from(rest > 0));
                let loops = &words[layout.before_loops..];
                for unit in some_rounds(units) {
                    for tensor in 0..2 {
                        let expected = place(dims, tensor, unit * at_once);
                        assert_eq!(found(loops, 2, n_loops, tensor, unit), expected, "{dims:?}, {unit}");
                    }
                }
            }
        }
        let (mut words, nest) = (Words::new(), nest(2, &[(K32 + 3, &[1, 1])]));
        let launches = elementwise(&layout(false, 2, 16), &nest, &aligned, |_| {}, &mut words);
        assert_eq!((launches.first, words[1]), (Launch { entry: Entry::Vectors, blocks: (1 << 19) + 1 }, 1 << 28));
    }

    #[test]
    fn every_element_of_tiles_has_one_thread_and_its_place() {
        let operands = [operand(0, 4, true), operand(0, 4, false)];
        let cases: [(Dims<'_>, u32, Entry); 9] = [
            (&[(13, &[0, 4 * 257]), (257, &[4, 4])], 7, Entry::Tiles),
            (&[(1300, &[4, 4 * 67]), (67, &[0, 4])], 7, Entry::Tiles),
            (&[(900, &[0, 12]), (3, &[4, 4])], 2, Entry::Tiles),
            (&[(5, &[4, 4 * 7 * 321]), (7, &[0, 4 * 321]), (321, &[4, 4])], 8, Entry::Tiles),
            (&[(637, &[4, 4 * 95]), (95, &[4 * 637, 4])], 6, Entry::TransposedTiles),
            (&[(3, &[1000, 4 * 8 * 301]), (8, &[-4, 4 * 301]), (301, &[-32, 4])], 8, Entry::TransposedTiles),
            (&[(301, &[4, 32]), (7, &[4 * 301, 4])], 3, Entry::TransposedTiles),
            (&[(900, &[4, 20]), (5, &[3600, 4])], 3, Entry::TransposedTiles),
            (&[(900, &[4, 12]), (4, &[3600, 4])], 2, Entry::Tiles), // columns longer than a thread block has threads
        ];
        for (dims, expected_width, entry) in cases {
            let (layout, nest, mut words) = (layout(false, 2, 1), nest(2, dims), Words::new());
            let Launches { first, second } = elementwise(&layout, &nest, &operands, |_| {}, &mut words);
            let (n_loops, ones) = (words[2] as u32 as usize, (words[2] >> 32) as u32);
            assert_eq!(
                (first.entry, second, n_loops, ones),
                (entry, None, dims.len(), u32::from(entry == Entry::TransposedTiles))
            );
            let (columns, rows, log_width) = (words[1] as u32 as u64, words[1] >> 32, (words[3] >> 32) as u32);
            assert_eq!((log_width, words[0]), (expected_width, nest.count()), "{dims:?}");
            let loops = &words[layout.before_loops..];
            let two = &loops[4 * (n_loops - 2)..];
            let divided = |number: u64, row: &[u64]| {
                assert_eq!(row[1], u64::MAX / row[0]);
                (number / row[0], number % row[0])
            };
            let mut seen = vec![0; nest.count() as usize];
            for block in 0..first.blocks {
                let (rest, across) = divided(block, &two[4..]);
                let (rest, down) = divided(rest, two);
                for unit in 0..1 << LOG_TILE {
                    let column = (across << log_width) + unit % (1 << log_width);
                    let row = (down << (LOG_TILE - log_width)) + (unit >> log_width);
                    if column >= columns || row >= rows {
                        continue;
                    }
                    let number = (rest * rows + row) * columns + column;
                    seen[number as usize] += 1;
                    for tensor in 0..2 {
                        let [below, beside] = [two[2 + tensor], two[6 + tensor]];
                        let at = row.wrapping_mul(below).wrapping_add(column.wrapping_mul(beside)) as i64
                            + found(loops, 2, n_loops - 2, tensor, rest);
                        assert_eq!(at, place(dims, tensor, number), "{dims:?}, {number}");
                    }
                }
            }
            assert!(seen.iter().all(|&threads| threads == 1), "{dims:?}");
        }
    }

    #[test]
    fn tiles_are_for_two_loops_that_fill_them_and_are_counted_in_32_bits() {
        let operands = [operand(0, 4, true), operand(0, 4, false)];
        let half = (1 << 10) + 2; // rows of 129 elements: about half of the threads and the last tile have little work
        let cases: [(Dims<'_>, bool); 9] = [
            (&[(1 << 20, &[8, 4])], false),
            (&[(K31 - 1, &[0, 4 * 301]), (301, &[4, 4])], true),
            (&[(K31, &[0, 4 * 301]), (301, &[4, 4])], false),
            (&[(301, &[0, 4 * (K31 - 1)]), (K31 - 1, &[4, 4])], true),
            (&[(301, &[0, 4 * K31]), (K31, &[4, 4])], false),
            (&[(3, &[0, 4 * 301]), (301, &[4, 4])], false),
            (&[(half, &[0, 4 * 129]), (129, &[4, 4])], true),
            (&[(1 << 20, &[4, 24]), (2, &[0, 12]), (3, &[4, 4])], false),
            (&[(K31 - 1, &[0, 4 * (K31 - 1)]), (K31 - 1, &[4, 4])], false), // too many thread blocks
        ];
        for (dims, expected) in cases {
            assert_eq!(Tiling::of(&nest(2, dims), &operands).is_some(), expected, "{dims:?}");
        }
    }

    #[test]
    fn tiles_of_small_elements_are_narrower() {
        for (size, [broadcast, transposed]) in [(2, [5, 5]), (4, [8, 6])] {
            let operands = [operand(0, size, true), operand(0, size, false)];
            for (width, first) in [(broadcast, [0, size]), (transposed, [size, size << 11])] {
                let dims: Dims<'_> = &[(1 << 11, &[first[0], size * 129]), (129, &[first[1], size])];
                assert_eq!(Tiling::of(&nest(2, dims), &operands).unwrap().log_width, width, "{size} bytes");
            }
        }
    }

    const COUNTS: [i64; 14] =
        [1, 2, 255, 257, 4099, 1 << 20, K31 - 1, K31, K31 + 1, K32 - 1, K32, K32 + 3, K33, 1 << 40];

    #[test]
    fn every_element_of_a_reduction_has_one_block() {
        for vector in [1, 4, 16] {
            for (outputs, elements) in COUNTS.iter().flat_map(|&one| COUNTS.map(|other| (one, other))) {
                for [of_kept, of_reduced] in [[elements, 1], [1, outputs], [0, 1], [1, 0]] {
                    let kept = nest(1, &[(outputs, &[of_kept])]);
                    let reduced = nest(1, &[(elements, &[of_reduced])]);
                    let split = |address| Split::of(&kept, &reduced, &[operand(address, 1, true)], vector);
                    let Split { columns, log_across, chunk, splits } = split(0);
                    assert_eq!(split(0), split(1), "sums would depend on where elements lie");
                    assert!((1..=MANY_BLOCKS).contains(&splits), "{splits} blocks an output");
                    assert!(u128::from(splits - 1) * u128::from(chunk) < elements as u128, "{chunk} in a block");
                    assert!(u128::from(splits) * u128::from(chunk) >= elements as u128, "{chunk} in a block");
                    let at_once = if columns { 1 } else { vector as u64 };
                    assert_eq!(chunk % (at_once * u64::from(THREADS >> log_across)), 0, "rounds of whole vectors");
                    assert_eq!(split(0).partials(outputs as u64), if splits > 1 { splits * outputs as u64 } else { 0 });
                    // With few outputs, elements are split so that the whole device has work.
                    if elements >= K31 && outputs < 1 << 11 {
                        assert!(splits > 1, "{outputs} of {elements}: {splits}");
                    }
                }
            }
        }
        let empty = Split::of(&nest(1, &[(5, &[4])]), &nest(1, &[(0, &[4])]), &[operand(0, 4, true)], 4);
        assert_eq!((empty.splits, empty.partials(5)), (1, 0));
    }

    #[test]
    fn every_element_and_output_of_a_reduction_has_its_place() {
        let operands = [operand(K32 as u64, 1, true), operand(1 << 40, 1, false)];
        let mut kernels = [0; 4]; // launches of rows and of columns, each in vectors and one by one
        // The output's strides are 0 in reduced dimensions.
        let cases: [[Dims<'_>; 2]; 8] = [
            [&[], &[(K33, &[0, 0])]],
            [&[], &[(K32 + 3, &[1, 0])]],
            [&[(3, &[K32 + 16, 1])], &[(K32 + 3, &[1, 0])]],
            [&[(3, &[K32 + 3, 1])], &[(K32 + 3, &[1, 0])]],
            [&[(K32 + 16, &[1, 1])], &[(3, &[K32 + 16, 0])]],
            [&[(K32 + 3, &[1, 1])], &[(3, &[K32 + 3, 0])]],
            [&[(5, &[K33, K33]), (1 << 16, &[16, 1])], &[(1 << 20, &[1 << 20, 0]), (16, &[1, 0])]],
            [&[(7, &[1, 1])], &[(K31 + 1, &[21, 0]), (3, &[7, 0])]],
        ];
        for [kept_dims, reduced_dims] in cases {
            let (kept, reduced) = (nest(2, kept_dims), nest(2, reduced_dims));
            let layout = layout(true, 2, 16);
            let split = Split::of(&kept, &reduced, &operands, layout.vector);
            let mut words = Words::new();
            let Launches { first, second } =
                reduction(&layout, &split, [&kept, &reduced], &operands, |_| {}, 0xabc0, &mut words).unwrap();
            let (kind, is_nested) = match first.entry {
                Entry::Rows => (0, false),
                Entry::NestedRows => (0, true),
                Entry::RowElements => (1, false),
                Entry::NestedRowElements => (1, true),
                Entry::Columns => (2, false),
                Entry::NestedColumns => (2, true),
                Entry::ColumnElements => (3, false),
                Entry::NestedColumnElements => (3, true),
                other => panic!("{other:?} of aligned elements"),
            };
            kernels[kind] += 1;
            assert_eq!(is_nested, reduced.len() != 1);
            assert_eq!(&words[..3], [kept.count(), reduced.count(), split.chunk]);
            assert_eq!((words[8], &words[9..11]), (0xabc0, &[operands[0].address, operands[1].address][..]));
            let (tiles, splits, log_across) = (words[3], words[4] as u32, (words[4] >> 32) as u32);
            let [outputs_at_once, at_once] = [[1, 16], [1, 1], [16, 1], [1, 1]][kind];
            assert_eq!(
                (words[7] >> 32, u64::from(splits), log_across),
                (outputs_at_once, split.splits, split.log_across)
            );
            assert_eq!(tiles, kept.count().div_ceil(outputs_at_once << log_across));
            assert_eq!(first.blocks, tiles * split.splits);
            assert!(first.blocks <= i32::MAX as u64 && split.chunk.is_multiple_of(at_once));
            let log_second = words[5] as u32;
            let expected = Launch { entry: Entry::Second, blocks: kept.count().div_ceil(1 << log_second) };
            assert_eq!(second, (split.splits > 1).then_some(expected));
            let (n_kept, n_reduced) = (words[6] as u32 as usize, (words[6] >> 32) as usize);
            assert_eq!((n_kept, n_reduced), (kept.len(), reduced.len()));
            let loops = &words[layout.before_loops..];
            for (loops, dims, n_loops, count, step) in [
                (loops, kept_dims, n_kept, kept.count(), outputs_at_once),
                (&loops[4 * n_kept..], reduced_dims, n_reduced, reduced.count(), at_once),
            ] {
                for unit in some_rounds(count / step) {
                    for tensor in 0..2 {
                        let expected = place(dims, tensor, unit * step);
                        assert_eq!(found(loops, 2, n_loops, tensor, unit), expected, "{dims:?}, {unit}");
                    }
                }
            }
        }
        assert!(kernels.iter().all(|&count| count > 0), "not each kernel was asked for: {kernels:?}");
    }

    #[test]
    fn short_rows_are_adjacent_and_fit() {
        let operands = [operand(4, 4, true), operand(0, 4, false)];
        for (columns, pitch, step, reduced_bytes, expected) in [
            (3, 4 * 3, 4, 4, Entry::ShortRows),
            (17, 4 * 17, 4, 4, Entry::ShortRows),
            (32, 4 * 32, 4, 4, Entry::ShortRows),
            (33, 4 * 33, 4, 1, Entry::RowElements), // an output has four threads
            (17, 4 * 17, 4, 8, Entry::RowElements), // no room in shared memory
            (17, 4 * 18, 4, 4, Entry::RowElements),
            (17, -4 * 17, 4, 4, Entry::RowElements),
            (17, 8 * 17, 8, 4, Entry::RowElements),
        ] {
            let layout = Layout { reduced_bytes, ..layout(true, 2, 4) };
            let (kept, reduced) = (nest(2, &[(1001, &[pitch, 4])]), nest(2, &[(columns, &[step, 0])]));
            let split = Split::of(&kept, &reduced, &operands, 4);
            let words = &mut Words::new();
            let launches = reduction(&layout, &split, [&kept, &reduced], &operands, |_| {}, 0, words).unwrap();
            assert_eq!(launches.first.entry, expected, "{columns} at {pitch} and {step}, {reduced_bytes} bytes");
            assert!(expected != Entry::ShortRows || launches.first.blocks == 4, "{columns}: {}", launches.first.blocks);
        }
    }

    #[test]
    fn outputs_that_take_more_blocks_than_a_launch_has_are_refused() {
        let operands = [operand(0, 4, true), operand(0, 4, false)];
        for (outputs, fits) in [(K31 * 64, true), (K31 * 1024, false), (i64::MAX, false)] {
            // A thread block has at most 32 columns of vectors of 4 elements.
            let (kept, reduced) = (nest(2, &[(outputs, &[4, 4])]), nest(2, &[(1 << 8, &[0, 0])]));
            let split = Split::of(&kept, &reduced, &operands, 4);
            let words = &mut Words::new();
            let done = reduction(&layout(true, 2, 4), &split, [&kept, &reduced], &operands, |_| {}, 0, words);
            assert_eq!(done.err().map(|error| error.status), (!fits).then_some(Status::SizeOverflow), "{outputs}");
        }
    }
}
