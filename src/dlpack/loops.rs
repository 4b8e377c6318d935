//! Nested loops over strided memory, with as few loops as possible.
//!
//! ```text
//! shape [2, 3, 4], strides [12, 4, 1]:  one loop of 24        (contiguous)
//! shape [2, 3, 4], strides [16, 4, 1]:  2 at 16, 12 at 1      (the last two dimensions are one)
//! ```
#![forbid(unsafe_code)]

use std::cmp::Reverse;

use arrayvec::ArrayVec;

/// Largest number of loops: each counts at least 2, and the product of all counts stays below 2^63.
pub const MAX_LOOPS: usize = 62;

/// Loop: number of rounds, and the bytes that each round moves on every side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop<const SIDES: usize> {
    pub count: i64,
    pub strides: [i64; SIDES],
}

impl<const SIDES: usize> Loop<SIDES> {
    /// Returns true if a round of this is all rounds of `inner`, so that the two are one longer loop.
    fn is_outside(&self, inner: &Self) -> bool {
        self.strides == inner.strides.map(|stride| stride.wrapping_mul(inner.count))
    }
}

/// Nested loops, outermost first, in the order of C. Loops of one round are left out, and neighbours that make one
/// longer loop are merged, so contiguous memory of any shape is a single loop.
#[derive(Clone, Debug)]
pub struct Loops<const SIDES: usize> {
    items: ArrayVec<Loop<SIDES>, MAX_LOOPS>,
    count: i64,
}

impl<const SIDES: usize> Loops<SIDES> {
    /// Makes a nest without loops: a single round.
    #[inline]
    pub fn new() -> Self {
        Self { items: ArrayVec::new(), count: 1 }
    }

    /// Removes all loops.
    pub fn clear(&mut self) {
        self.items.clear();
        self.count = 1;
    }

    /// Adds a loop inside the existing ones. The product of all counts other than 0 must stay below 2^63.
    #[inline]
    pub fn push(&mut self, count: i64, strides: [i64; SIDES]) {
        self.count *= count;
        if count == 1 || self.count == 0 {
            return;
        }
        let item = Loop { count, strides };
        match self.items.last_mut() {
            Some(outer) if outer.is_outside(&item) => *outer = Loop { count: outer.count * count, strides },
            _ => self.items.push(item),
        }
    }

    /// Returns the number of rounds of all loops together: the product of their counts.
    pub fn count(&self) -> i64 {
        self.count
    }

    pub fn as_slice(&self) -> &[Loop<SIDES>] {
        &self.items
    }

    /// Removes the loop at this index, and returns it.
    pub fn remove(&mut self, index: usize) -> Loop<SIDES> {
        let found = self.items.remove(index);
        self.count /= found.count;
        found
    }

    /// Sorts loops whose rounds may run in any order: the larger a loop's step on the first side, the further outside.
    pub fn sort_by_step(&mut self) {
        if self.items.len() < 2 {
            return;
        }
        self.items.sort_unstable_by_key(|item| Reverse(item.strides[0].unsigned_abs()));
        // Neighbours are merged in place, because the loops are too large for a copy on the stack.
        let mut kept = 0;
        for index in 0..self.items.len() {
            let item = self.items[index];
            if kept > 0 && self.items[kept - 1].is_outside(&item) {
                self.items[kept - 1] = Loop { count: self.items[kept - 1].count * item.count, ..item };
            } else {
                self.items[kept] = item;
                kept += 1;
            }
        }
        self.items.truncate(kept);
    }

    /// Returns the stride of the only loop, or `any` if there is at most one round. None: there are several loops.
    pub fn single_stride(&self, any: [i64; SIDES]) -> Option<[i64; SIDES]> {
        match self.as_slice() {
            [] => Some(any),
            [only] => Some(only.strides),
            _ => None,
        }
    }
}

/// Rounds that follow each other at fixed strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run<const SIDES: usize> {
    /// Offset of the first round from round 0, in bytes.
    pub offsets: [i64; SIDES],
    pub count: i64,
    pub strides: [i64; SIDES],
}

/// `count` rounds of a loop at fixed strides, each with all rounds of the loops inside it.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a, const SIDES: usize> {
    /// Offset of the first round from round 0, in bytes.
    pub offsets: [i64; SIDES],
    pub count: i64,
    pub strides: [i64; SIDES],
    pub inside: &'a [Loop<SIDES>],
}

/// Iterator over all rounds of some loops in order, a run of the innermost loop at a time.
#[derive(Clone)]
pub struct Cursor<'a, const SIDES: usize> {
    loops: &'a [Loop<SIDES>],
    index: ArrayVec<i64, MAX_LOOPS>,
    offsets: [i64; SIDES],
    left: i64,
}

impl<'a, const SIDES: usize> Cursor<'a, SIDES> {
    /// Makes a cursor that begins at round number `first`.
    #[inline]
    pub fn starting_at(loops: &'a Loops<SIDES>, first: i64) -> Self {
        let left = (loops.count - first).max(0);
        let mut cursor = Self { loops: &loops.items, index: ArrayVec::new(), offsets: [0; SIDES], left };
        loops.items.iter().for_each(|_| cursor.index.push(0));
        let mut round = first;
        for (item, at) in loops.items.iter().zip(cursor.index.iter_mut()).rev() {
            *at = round % item.count;
            round /= item.count;
            step(&mut cursor.offsets, &item.strides, *at);
        }
        cursor
    }

    /// Returns the next run, of at most `limit` rounds; None past the last round.
    #[inline]
    pub fn next_run(&mut self, limit: i64) -> Option<Run<SIDES>> {
        let limit = limit.min(self.left);
        if limit <= 0 {
            return None;
        }
        let Some((inner, outer)) = self.loops.split_last() else {
            self.left = 0;
            return Some(Run { offsets: self.offsets, count: 1, strides: [0; SIDES] });
        };
        let count = limit.min(inner.count - self.index[outer.len()]);
        let run = Run { offsets: self.offsets, count, strides: inner.strides };
        self.left -= count;
        self.advance(outer.len(), count);
        Some(run)
    }

    /// Returns the largest block of at most `limit` of the next rounds: some rounds of one loop, with all rounds of the
    /// loops inside it. None past the last round.
    pub fn next_block(&mut self, limit: i64) -> Option<Block<'a, SIDES>> {
        let limit = limit.min(self.left);
        if limit <= 0 || self.loops.is_empty() {
            let run = self.next_run(limit)?;
            return Some(Block { offsets: run.offsets, count: run.count, strides: run.strides, inside: &[] });
        }
        let (mut depth, mut rounds) = (self.loops.len() - 1, 1);
        while depth > 0 && self.index[depth] == 0 && rounds * self.loops[depth].count <= limit {
            rounds *= self.loops[depth].count;
            depth -= 1;
        }
        let Loop { count, strides } = self.loops[depth];
        let count = (limit / rounds).min(count - self.index[depth]);
        let block = Block { offsets: self.offsets, count, strides, inside: &self.loops[depth + 1..] };
        self.left -= count * rounds;
        self.advance(depth, count);
        Some(block)
    }

    /// Advances `rounds` rounds in the loop at `depth`, at most to its end, and then a round in the loop around it.
    #[inline(always)]
    fn advance(&mut self, depth: usize, rounds: i64) {
        let mut rounds = rounds;
        for (item, at) in self.loops[..=depth].iter().zip(self.index.iter_mut()).rev() {
            *at += rounds;
            if *at < item.count {
                return step(&mut self.offsets, &item.strides, rounds);
            }
            *at = 0;
            step(&mut self.offsets, &item.strides, rounds - item.count);
            rounds = 1;
        }
    }
}

fn step<const SIDES: usize>(offsets: &mut [i64; SIDES], strides: &[i64; SIDES], times: i64) {
    for (offset, stride) in offsets.iter_mut().zip(strides) {
        *offset += stride * times;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loops(dims: &[(i64, i64)]) -> Vec<(i64, i64)> {
        let mut loops = Loops::new();
        dims.iter().for_each(|&(count, stride)| loops.push(count, [stride]));
        loops.as_slice().iter().map(|item| (item.count, item.strides[0])).collect()
    }

    #[test]
    fn contiguous_dimensions_are_one_loop() {
        assert_eq!(loops(&[(2, 12), (3, 4), (4, 1)]), [(24, 1)]);
        assert_eq!(loops(&[(2, -12), (3, -4), (4, -1)]), [(24, -1)]);
        assert_eq!(loops(&[(3, 0), (5, 0)]), [(15, 0)]);
    }

    #[test]
    fn dimensions_of_size_one_need_no_loop() {
        assert_eq!(loops(&[(1, 7), (3, 4), (1, -99), (4, 1), (1, 0)]), [(12, 1)]);
        assert_eq!(loops(&[(1, 5)]), []);
    }

    #[test]
    fn dimensions_that_are_not_contiguous_are_not_merged() {
        assert_eq!(loops(&[(2, 16), (3, 4), (4, 1)]), [(2, 16), (12, 1)]);
        assert_eq!(loops(&[(4, 1), (3, 4)]), [(4, 1), (3, 4)]);
    }

    #[test]
    fn sorted_loops_have_decreasing_strides_and_are_merged() {
        let sorted = |dims: &[(i64, i64)]| -> Vec<(i64, i64)> {
            let mut loops = Loops::new();
            dims.iter().for_each(|&(count, stride)| loops.push(count, [stride, 7 * stride]));
            loops.sort_by_step();
            assert_eq!(loops.count(), dims.iter().map(|&(count, _)| count).product::<i64>());
            loops.as_slice().iter().map(|item| (item.count, item.strides[0])).collect()
        };
        assert_eq!(sorted(&[(5, 1), (4, 100), (3, -20)]), [(4, 100), (3, -20), (5, 1)]);
        assert_eq!(sorted(&[(4, 1), (3, 4)]), [(12, 1)]);
    }

    #[test]
    fn two_sides_merge_only_together() {
        let mut both = Loops::new();
        both.push(2, [8, 100]);
        both.push(4, [2, 1]);
        assert_eq!(both.as_slice().len(), 2);
        assert_eq!(both.count(), 8);
    }

    #[test]
    fn a_cursor_visits_every_round_in_c_order_for_any_limit() {
        let mut nest = Loops::new();
        for (count, stride) in [(2, 100), (3, -10), (4, 3)] {
            nest.push(count, [stride]);
        }
        let expected: Vec<i64> =
            (0..2).flat_map(|a| (0..3).flat_map(move |b| (0..4).map(move |c| a * 100 - b * 10 + c * 3))).collect();
        for limit in 1..=25 {
            let mut cursor = Cursor::starting_at(&nest, 0);
            let mut seen = Vec::new();
            while let Some(run) = cursor.next_run(limit) {
                assert!(run.count <= limit);
                seen.extend((0..run.count).map(|i| run.offsets[0] + i * run.strides[0]));
            }
            assert_eq!(seen, expected, "limit {limit}");
        }
        for first in 0..=24 {
            let mut cursor = Cursor::starting_at(&nest, first);
            let mut seen = Vec::new();
            while let Some(run) = cursor.next_run(5) {
                seen.extend((0..run.count).map(|i| run.offsets[0] + i * run.strides[0]));
            }
            assert_eq!(seen, expected[first as usize..], "from {first}");
        }
        for (first, limit) in (0..=24).flat_map(|first| (1..=25).map(move |limit| (first, limit))) {
            let mut cursor = Cursor::starting_at(&nest, first);
            let mut seen = Vec::new();
            // Blocks and runs may follow each other in any order.
            while let Some(Block { offsets, count, strides, inside }) = cursor.next_block(limit) {
                let mut block = Loops::new();
                block.push(count, strides);
                inside.iter().for_each(|item| block.push(item.count, item.strides));
                assert!(block.count() <= limit);
                let mut rounds = Cursor::starting_at(&block, 0);
                while let Some(run) = rounds.next_run(1) {
                    seen.push(offsets[0] + run.offsets[0]);
                }
                seen.extend(cursor.next_run(1).map(|run| run.offsets[0]));
            }
            assert_eq!(seen, expected[first as usize..], "blocks of at most {limit} from {first}");
        }
    }
}
