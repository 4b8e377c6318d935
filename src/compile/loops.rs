//! Where the elements of a launch lie: loops over all tensors at once, as few as describe them, and how blocks share
//! them.

use crate::error::{Error, Result, error};

use super::source::{ELEMENT_ROUNDS, HEAD, Layout, THREADS};

/// Blocks that an output's elements are given to, all outputs together: several times what the largest cards run at
/// once, so that they end at about the same time.
const MANY_BLOCKS: u64 = 4096;

/// Vectors that a thread has at least before its output's elements are given to several blocks.
const VECTORS_A_THREAD: u64 = 16;

/// Threads side by side that read one row, as a power of two: 512 bytes of it.
const LOG_ROW: u32 = 5;

/// Binary logarithm of the threads of a block.
const LOG_THREADS: u32 = THREADS.ilog2();

/// Nested loops over some tensors, outermost first: rows of a count and a stride, in bytes, of each.
pub struct Nest {
    width: usize,
    rows: Vec<i64>,
    count: u64,
}

/// A tensor whose elements are loaded or stored one by one.
#[derive(Clone, Copy)]
pub struct Operand {
    pub address: u64,
    /// Bytes of an element.
    pub size: i64,
    pub is_input: bool,
}

impl Nest {
    /// No loop: one round.
    pub fn new(tensors: usize) -> Self {
        Self { width: tensors + 1, rows: Vec::new(), count: 1 }
    }

    /// Adds a loop inside those that are there. Unless some count is 0, their product must be below 2^63 where work is made
    /// of them.
    pub fn push(&mut self, count: i64, strides: impl Iterator<Item = i64>) -> Result<()> {
        self.count = self.count.saturating_mul(count as u64);
        if count == 1 || self.count == 0 {
            return Ok(());
        }
        self.rows.try_reserve(self.width).map_err(|_| out_of_memory())?;
        self.rows.push(count);
        self.rows.extend(strides.take(self.width - 1));
        Ok(())
    }

    /// Rounds of all loops.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The number of loops.
    pub fn len(&self) -> usize {
        self.rows.len() / self.width
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

    /// Puts loops whose rounds may come in any order in that of a tensor's steps, the widest outside.
    pub fn sort_by_step_of(&mut self, tensor: usize) {
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

    /// Makes one loop of two where the inner one goes on where the outer one does.
    pub fn merge(&mut self) {
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

    /// Of the inputs, the shortest step of the innermost loop that is one.
    fn nearest(&self, operands: &[Operand]) -> u64 {
        let steps = self.last().into_iter().flat_map(|row| row[1..].iter().zip(operands));
        let steps = steps.filter(|(step, operand)| **step != 0 && operand.is_input);
        steps.map(|(step, _)| step.unsigned_abs()).min().unwrap_or(u64::MAX)
    }
}

/// Whether the innermost loop of `nest` can be gone through `vector` elements at a time, and which tensors have the
/// same element for all of them. `others`: loops around it. `partly`: whether the last vector may be cut short.
fn vectors(
    nest: &Nest,
    others: Option<&Nest>,
    operands: &[Operand],
    vector: i64,
    partly: bool,
    looks_at: fn(&Operand) -> bool,
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

/// Whether some element does not lie at a multiple of its size.
fn is_unaligned(nests: &[&Nest], operands: &[Operand]) -> bool {
    operands.iter().enumerate().any(|(k, operand)| {
        operand.address % operand.size as u64 != 0
            || nests.iter().any(|nest| nest.all_rows().any(|row| row[k + 1] % operand.size != 0))
    })
}

/// A launch: which of a source's kernels, on how many blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub kernel: usize,
    pub blocks: u64,
}

/// A kernel's argument, and its launches.
pub struct Work {
    pub words: Vec<u64>,
    pub first: Launch,
    /// Of partial results, once all are there.
    pub second: Option<Launch>,
}

/// Words of raw and scalar parameters, in the order of the parameters.
pub type Whole = Vec<u64>;

fn two(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn out_of_memory() -> Error {
    error!(OutOfMemory, "a list of loops could not be had")
}

/// On the heap: calls have little stack.
struct Words(Vec<u64>);

impl Words {
    /// With all that is the same in every kernel: the head's words are there, and those of loops follow.
    fn of(head: &[u64], layout: &Layout, operands: &[Operand], whole: &[u64]) -> Result<Self> {
        let mut words = Self(Vec::new());
        words.0.try_reserve_exact(layout.words()).map_err(|_| out_of_memory())?;
        debug_assert_eq!(head.len(), HEAD[usize::from(layout.is_reduction)]);
        words.put(head.iter().copied());
        words.put(operands.iter().map(|operand| operand.address));
        words.put((operands.len()..layout.tensors.max(1)).map(|_| 0));
        words.put(whole.iter().copied());
        Ok(words)
    }

    /// A layout has room for all: see `Layout::of`.
    fn put(&mut self, words: impl Iterator<Item = u64>) {
        words.for_each(|word| self.0.push(word));
    }

    /// The loops of a nest, the innermost in steps of so many rounds.
    fn loops(&mut self, nest: &Nest, vector: i64) {
        let last = nest.len().saturating_sub(1);
        for (index, row) in nest.all_rows().enumerate() {
            let at_once = if index == last { vector } else { 1 };
            let count = (row[0] as u64).div_ceil(at_once as u64);
            self.put([count, u64::MAX / count].into_iter());
            self.put(row[1..].iter().map(|stride| stride.wrapping_mul(at_once) as u64));
        }
    }

    fn finished(mut self, layout: &Layout) -> Vec<u64> {
        let left = layout.words() - self.0.len();
        self.put((0..left).map(|_| 0));
        self.0
    }
}

/// The work of an elementwise kernel over a nest with as many loops as its layout has, or fewer.
pub fn elementwise(layout: &Layout, nest: &Nest, operands: &[Operand], whole: &[u64]) -> Result<Work> {
    let vector = layout.vector as i64;
    let bytes = is_unaligned(&[nest], operands);
    // One that is broadcast is read as an element, which has to be aligned, too.
    let ones = if bytes { None } else { vectors(nest, None, operands, vector, true, |_| true) };
    let (kernel, at_once, rounds) = match ones {
        Some(_) if nest.len() > 1 => (3, vector, layout.rounds),
        Some(_) => (0, vector, layout.rounds),
        None if bytes => (2, 1, 1),
        None => (1, 1, ELEMENT_ROUNDS),
    };
    // What does not fill a vector is a block of its own, and there only where there is one loop.
    let (units, rest) = (nest.count() / at_once as u64, nest.count() % at_once as u64);
    let blocks = units.div_ceil(u64::from(THREADS) * rounds as u64);
    let head = [nest.count(), units, two(nest.len() as u32, ones.unwrap_or(0)), two(blocks as u32, u32::from(bytes))];
    let mut words = Words::of(&head, layout, operands, whole)?;
    words.loops(nest, at_once);
    let blocks = blocks + u64::from(rest > 0);
    Ok(Work { words: words.finished(layout), first: Launch { kernel, blocks }, second: None })
}

/// How blocks share a reduction. The order in which elements come together depends on it, so it does not depend on
/// addresses, nor on the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Whether threads side by side have neighbouring outputs, rather than neighbouring elements of one.
    pub columns: bool,
    /// Threads side by side that have different outputs, as a power of two.
    pub log_across: u32,
    /// Elements of an output that a block has.
    pub chunk: u64,
    /// Blocks that an output has.
    pub splits: u64,
}

fn log_of(count: u64) -> u32 {
    count.checked_next_power_of_two().map_or(63, u64::ilog2)
}

impl Share {
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

    /// Values that the second launch makes results of.
    pub fn partials(&self, outputs: u64) -> u64 {
        if self.splits > 1 { self.splits.saturating_mul(outputs) } else { 0 }
    }
}

/// The work of a reduction. `partials`: the address of the workspace.
pub fn reduction(
    layout: &Layout,
    share: &Share,
    [kept, reduced]: [&Nest; 2],
    operands: &[Operand],
    whole: &[u64],
    partials: u64,
) -> Result<Work> {
    let (vector, is_input): (_, fn(&Operand) -> bool) = (layout.vector as i64, |operand| operand.is_input);
    let bytes = is_unaligned(&[kept, reduced], operands);
    let ones = if bytes {
        None
    } else if share.columns {
        vectors(kept, Some(reduced), operands, vector, false, is_input)
    } else {
        vectors(reduced, Some(kept), operands, vector, true, is_input)
    };
    let nested = reduced.len() != 1;
    let (kernel, outputs_at_once, at_once) = match (share.columns, ones) {
        (false, Some(_)) => (if nested { 7 } else { 0 }, 1, vector),
        (true, Some(_)) => (if nested { 8 } else { 2 }, vector, 1),
        (false, None) if bytes => (5, 1, 1),
        (true, None) if bytes => (6, 1, 1),
        (false, None) => (if nested { 9 } else { 1 }, 1, 1),
        (true, None) => (if nested { 10 } else { 3 }, 1, 1),
    };
    let outputs = kept.count();
    let tiles = outputs.div_ceil((outputs_at_once as u64) << share.log_across);
    let blocks = tiles.checked_mul(share.splits).filter(|&blocks| blocks <= i32::MAX as u64).ok_or_else(|| {
        error!(SizeOverflow, "outputs: {outputs} elements take {tiles} blocks, more than one launch has")
    })?;
    let log_second = log_of(outputs).min(LOG_ROW);
    let head = [
        outputs,
        reduced.count(),
        share.chunk,
        tiles,
        two(share.splits as u32, share.log_across),
        two(log_second, u32::from(ones.is_some())),
        two(kept.len() as u32, reduced.len() as u32),
        two(ones.unwrap_or(0), outputs_at_once as u32),
        two(u32::from(bytes), 0),
        partials,
    ];
    let mut words = Words::of(&head, layout, operands, whole)?;
    words.loops(kept, outputs_at_once);
    words.loops(reduced, at_once);
    let second = Launch { kernel: 4, blocks: outputs.div_ceil(1 << log_second) };
    Ok(Work {
        words: words.finished(layout),
        first: Launch { kernel, blocks },
        second: (share.splits > 1).then_some(second),
    })
}
