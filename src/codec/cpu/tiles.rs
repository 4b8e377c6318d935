//! The work on several runs as one job of the pool: a flat list of tiles, so that many small runs share the threads.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use crate::{
    codec::plan::{Run, UNIT},
    cpu::pool,
    ffi::{error::Result, fallible},
};

use super::sum::TILE_UNITS;

pub const TILE_ELEMENTS: i64 = UNIT * TILE_UNITS as i64;

/// Bytes of memory for which another thread is woken, and the smallest number of bytes in a part, as in `bits`. Fewer
/// in tests, so that their inputs can be small.
const BYTES_A_THREAD: i64 = if cfg!(test) { 256 << 10 } else { 4 << 20 };
const BYTES_A_PART: i64 = BYTES_A_THREAD / 4;

/// A tile of a run: up to [`TILE_ELEMENTS`] elements.
#[derive(Clone, Copy)]
pub struct Tile {
    /// Number of the run.
    pub run: usize,
    /// Index of the tile's first element in the run.
    pub first: i64,
    pub elements: usize,
    /// Number of the tile among the tiles of all runs.
    pub number: usize,
}

impl Tile {
    /// Makes tile number `index` of a run of `elements`.
    fn new(run: usize, elements: i64, index: usize, number: usize) -> Self {
        let first = index as i64 * TILE_ELEMENTS;
        Self { run, first, elements: (elements - first).min(TILE_ELEMENTS) as usize, number }
    }
}

/// Division of runs into tiles.
pub struct Tiles {
    /// Number of each run's first tile, then the number of all tiles.
    firsts: Vec<usize>,
    elements: i64,
}

impl Tiles {
    pub fn new(runs: &[Run]) -> Result<Self> {
        let mut firsts = fallible::list(runs.len() + 1, "numbers")?;
        let mut tiles = 0;
        firsts.push(tiles);
        for run in runs {
            tiles += tiles_of(run.elements);
            firsts.push(tiles);
        }
        Ok(Self { firsts, elements: runs.iter().map(|run| run.elements).sum() })
    }

    pub fn count(&self) -> usize {
        self.firsts[self.firsts.len() - 1]
    }

    /// Returns the items of `of_tiles` for the tiles of a run.
    pub fn of_run<'a, T>(&self, run: usize, of_tiles: &'a [T]) -> &'a [T] {
        &of_tiles[self.firsts[run]..self.firsts[run + 1]]
    }

    /// Calls `work` with every tile. `bytes`: bytes of memory per element, which determine the number of threads.
    pub fn for_each(&self, runs: &[Run], bytes: i64, work: impl Fn(Tile) + Sync) {
        in_parts(self.count(), self.elements.saturating_mul(bytes), |tiles| {
            let mut run = self.firsts.partition_point(|&first| first <= tiles.start) - 1;
            for number in tiles {
                while number >= self.firsts[run + 1] {
                    run += 1;
                }
                work(Tile::new(run, runs[run].elements, number - self.firsts[run], number));
            }
        });
    }
}

/// Returns the number of tiles that `elements` elements take.
pub fn tiles_of(elements: i64) -> usize {
    (elements as u64).div_ceil(TILE_ELEMENTS as u64) as usize
}

/// Calls `work` with ranges that cover `tiles` tiles. `bytes`: bytes of memory, which determine the number of threads.
pub fn in_parts(tiles: usize, bytes: i64, work: impl Fn(Range<usize>) + Sync) {
    if tiles == 0 {
        return;
    }
    let most = tiles.min(u32::MAX as usize);
    let worth = most.min((bytes / BYTES_A_THREAD) as usize);
    let parts_for = |threads: usize| ((bytes / BYTES_A_PART) as usize).clamp(threads, most) as u32;
    pool::run(worth, parts_for, |index, parts| {
        let cut = |index: usize| (index as u128 * tiles as u128 / parts as u128) as usize;
        work(cut(index)..cut(index + 1));
    });
}

/// Allocates the partial sums of tiles.
pub fn partials(tiles: usize) -> Result<Vec<AtomicU64>> {
    let mut partials = fallible::list(tiles, "sums")?;
    partials.resize_with(tiles, AtomicU64::default);
    Ok(partials)
}

/// Flag that any thread may set.
#[derive(Default)]
pub struct AtomicFlag(AtomicBool);

impl AtomicFlag {
    pub fn note(&self, met: bool) {
        if met {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    pub fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
