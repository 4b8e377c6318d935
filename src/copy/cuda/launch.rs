//! Chooses the kernel of kernels/copy.cu for a plan, and cuts the work into tiles.

use std::mem;

use crate::{
    copy::plan::{Conversion, CopyPlan, Layout},
    cuda::{
        Queue,
        divisor::{DividedLoop, Divisor},
        grid::{LOG_BLOCK, VECTOR, divide_up, width},
        launch::argument,
        layout::kernel_structs,
        module::{COPY, Kernel},
    },
    dlpack::{
        Dtype, Kind,
        loops::{Loop, Loops},
    },
    ffi::error::{Result, error},
};

/// Number of vectors (rows, fours), words (gather) or elements that a thread processes one after the other.
const ROW_ROUNDS: i64 = 4;
const FOURS_ROUNDS: i64 = 2;
const GATHER_ROUNDS: i64 = 4;
const ELEMENT_ROUNDS: i64 = 8;

/// Elements of a vector in the kernel for any cast, and the largest element size of that kernel, in bytes.
const FOUR: i64 = 4;

/// Bytes of a gathered word, and of the largest element that is gathered.
const WORD: i64 = 4;
const LARGEST_GATHERED: i64 = 8;

/// Innermost loops with fewer rounds are counted together with the next loop, if it continues them in the target.
const SHORT_LOOP: i64 = 512;

/// Shortest side of a matrix for the tiled kernels: a shorter one would leave most of a tile empty.
const SHORTEST_SIDE: i64 = 16;

/// Largest number of loops besides the two that make tiles.
const MOST_OUTER: usize = 60;

/// Element types, numbered as in kernels/convert.cuh.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Number {
    Uint = 0,
    Int = 1,
    Bool = 2,
    F16 = 3,
    BF16 = 4,
    F32 = 5,
    F64 = 6,
}

impl Number {
    fn of(dtype: Dtype) -> Self {
        match (dtype.kind, dtype.size) {
            (Kind::Bool, _) => Self::Bool,
            (Kind::Int, _) => Self::Int,
            (Kind::Uint, _) => Self::Uint,
            (Kind::Bfloat, _) => Self::BF16,
            (Kind::Float, 2) => Self::F16,
            (Kind::Float, 4) => Self::F32,
            (Kind::Float, _) => Self::F64,
        }
    }
}

kernel_structs! {
    #[derive(Clone, Copy)]
    struct Cast: gc_cast {
        from: Number,
        from_size: u32,
        to: Number,
        to_size: u32,
    }

    /// The kernels' argument as kernels/copy.cuh declares it, passed by value.
    #[derive(Clone)]
    struct Tiles: gc_copy {
        src: *const u8,
        dst: *mut u8,
        begin: usize,
        end: usize,
        /// Rounds of the innermost loop.
        count: i64,
        steps: [i64; 2],
        /// Rounds of the loop that counts rows.
        rows: i64,
        row_strides: [i64; 2],
        across: Divisor,
        along: Divisor,
        period: Divisor,
        wrap: i64,
        cast: Cast,
        log_width: u32,
        down: u32,
        vectors: u32,
        aligned: u32,
        n_outer: u32,
        joined: u32,
        outer: [DividedLoop<2>; MOST_OUTER],
    }
}

/// Launch of one of the kernels. It lies on the stack and is large, so it is built in place.
struct Work {
    kernel: &'static Kernel,
    tiles: Tiles,
    blocks: u64,
}

/// Launches the kernel for a plan with at least one round. `data`: addresses of element 0 of target and source. The
/// function is never inlined, so that the stack has the kernel's large argument only once.
///
/// # Safety
/// The plan and the addresses describe memory that the kernel may use until it is done.
#[inline(never)]
pub unsafe fn launch(queue: &mut Queue, plan: &CopyPlan, data: [*mut u8; 2]) -> Result<()> {
    let mut work = Work::NOTHING;
    work.set(plan, data)?;
    // A saturated item count exceeds the limit of a launch, which refuses it.
    let items = work.blocks.saturating_mul(u64::from(work.kernel.shape.items_per_block));
    // SAFETY: the argument is the kernel's struct, over memory that it may use until it is done, as the caller
    // promises.
    unsafe { queue.launch(work.kernel, items, &mut argument(&mut work.tiles)) }
}

/// Addresses of the first round, of the target and of the source.
#[derive(Clone, Copy)]
struct Sides([*mut u8; 2]);

impl Sides {
    fn are_at_multiples(self, plan: &CopyPlan, sizes: [i64; 2]) -> bool {
        (0..2).all(|side| {
            self.0[side].addr().is_multiple_of(sizes[side] as usize)
                && plan.loops.as_slice().iter().all(|item| item.strides[side] % sizes[side] == 0)
        })
    }
}

impl Work {
    const NOTHING: Self = Self { kernel: &COPY.rows, tiles: Tiles::NOTHING, blocks: 0 };

    /// Chooses the kernel for the plan and sets its argument.
    fn set(&mut self, plan: &CopyPlan, data: [*mut u8; 2]) -> Result<()> {
        let first = |side: usize| data[side].wrapping_offset(plan.starts[side] as isize);
        let sides = Sides([first(0), first(1)]);
        let units;
        let plan = match plan.conversion {
            Conversion::Bytes(size) => {
                units = in_units(plan, size, sides);
                &units
            }
            Conversion::Cast { .. } => plan,
        };
        let sizes = plan.conversion.sizes();
        let aligned = sides.are_at_multiples(plan, sizes);
        let last = plan.loops.as_slice().len().checked_sub(1);
        let shortest = |across: usize| {
            let loops = plan.loops.as_slice();
            loops.last().map_or(0, |inner| inner.count).min(loops[across].count)
        };
        match (plan.layout(), plan.conversion) {
            (Layout::Flat | Layout::Rows, Conversion::Bytes(_)) => self.rows_of_bytes(plan, sides),
            (Layout::Flat | Layout::Rows, Conversion::Cast { from, to }) => match usual_cast(from, to) {
                Some(index) if aligned => {
                    self.rows(plan, sides, &COPY.cast_rows[index], sizes, VECTOR / sizes[0].max(sizes[1]), ROW_ROUNDS)
                }
                None if aligned && sizes[0].max(sizes[1]) <= FOUR => {
                    self.rows(plan, sides, &COPY.cast_rows_any, sizes, FOUR, FOURS_ROUNDS)
                }
                _ => self.general(plan, sides, aligned, last.and_then(|last| last.checked_sub(1))),
            },
            (Layout::Transposed { across }, Conversion::Bytes(size))
                if shortest(across) < SHORTEST_SIDE && size <= LARGEST_GATHERED =>
            {
                self.gathered(plan, sides, Some(across), follows(plan))
            }
            (Layout::Transposed { across }, _) if shortest(across) < SHORTEST_SIDE || !aligned => {
                self.general(plan, sides, aligned, Some(across))
            }
            (Layout::Transposed { across }, Conversion::Bytes(size)) => {
                self.transposed(plan, sides, across, &COPY.transposed[size.ilog2() as usize])
            }
            (Layout::Transposed { across }, Conversion::Cast { from, to }) => {
                let kernel = usual_cast(from, to).and_then(|index| COPY.cast_transposed.get(index));
                self.transposed(plan, sides, across, kernel.unwrap_or(&COPY.cast_transposed_any))
            }
            (Layout::General, Conversion::Bytes(size))
                if is_gathered(plan, size) && (size < WORD || follows(plan).is_some()) =>
            {
                self.gathered(plan, sides, last.and_then(|last| last.checked_sub(1)), follows(plan))
            }
            (Layout::General, _) => self.general(plan, sides, aligned, last.and_then(|last| last.checked_sub(1))),
        }
    }

    /// Sets up a gather, contiguous on the target's side only. `within`: a loop that continues the innermost one in the
    /// target and counts together with it. `row`: the loop whose rounds are rows; if it is `within`, the next one out.
    fn gathered(&mut self, plan: &CopyPlan, sides: Sides, row: Option<usize>, within: Option<usize>) -> Result<()> {
        let size = plan.conversion.sizes()[0];
        let row = if within.is_some() && row == within { row.and_then(|row| row.checked_sub(1)) } else { row };
        let tiles = &mut self.tiles;
        tiles.set(plan, sides, row, within);
        let a_word = (WORD / size).max(1);
        let begins_aligned = sides.0[0].addr() as i64 % (a_word * size) == 0
            && tiles.other_strides().all(|strides| strides[0] % (a_word * size) == 0);
        let words = divide_up(tiles.count + if begins_aligned { 0 } else { a_word - 1 }, a_word);
        self.cut(&COPY.gathered[size.ilog2() as usize], words, GATHER_ROUNDS)
    }

    /// Sets up a copy of rows without a cast. It copies bytes, or aligned words if vectors are not aligned alike on
    /// both sides.
    fn rows_of_bytes(&mut self, plan: &CopyPlan, sides: Sides) -> Result<()> {
        self.rows(plan, sides, &COPY.rows, [1; 2], VECTOR, ROW_ROUNDS)?;
        let size = plan.conversion.sizes()[0];
        let count = plan.loops.as_slice().last().map_or(1, |inner| inner.count) * size;
        let word = [8, 4].into_iter().find(|&word| {
            let outer = plan.loops.as_slice().split_last().map_or(&[][..], |(_, outer)| outer);
            count % word == 0
                && sides.0.iter().all(|side| side.addr() as i64 % word == 0)
                && outer.iter().all(|item| item.strides.iter().all(|stride| stride % word == 0))
        });
        match word {
            Some(word) if self.tiles.vectors == 0 => {
                self.rows(plan, sides, &COPY.words[usize::from(word == 8)], [word; 2], VECTOR / word, ROW_ROUNDS)
            }
            _ => Ok(()),
        }
    }

    /// Sets up rows that are contiguous on both sides. `sizes`: bytes of an element on each side; `a_vector`: elements
    /// per vector. Without a cast, an element may be any unit that the kernel copies.
    fn rows(
        &mut self, plan: &CopyPlan, sides: Sides, kernel: &'static Kernel, sizes: [i64; 2], a_vector: i64, rounds: i64,
    ) -> Result<()> {
        let row = plan.loops.as_slice().len().checked_sub(2);
        let tiles = &mut self.tiles;
        tiles.set(plan, sides, row, None);
        tiles.count = tiles.count * plan.conversion.sizes()[0] / sizes[0];
        let elements = |side: usize| sides.0[side].addr() as i64 / sizes[side];
        let alike = (elements(1) - elements(0)) % a_vector == 0
            && tiles.other_strides().all(|strides| (strides[1] / sizes[1] - strides[0] / sizes[0]) % a_vector == 0);
        let width = a_vector * sizes[0];
        let begins_aligned =
            sides.0[0].addr() as i64 % width == 0 && tiles.other_strides().all(|strides| strides[0] % width == 0);
        let vectors = divide_up(tiles.count + if begins_aligned { 0 } else { a_vector - 1 }, a_vector);
        tiles.vectors = u32::from(alike);
        self.cut(kernel, vectors, rounds)
    }

    /// Sets up a copy with any strides. `row`: the loop next to the innermost one, whose rounds are rows.
    fn general(&mut self, plan: &CopyPlan, sides: Sides, aligned: bool, row: Option<usize>) -> Result<()> {
        let casts = matches!(plan.conversion, Conversion::Cast { .. });
        let kernel = if casts { &COPY.cast_general } else { &COPY.general };
        self.tiles.set(plan, sides, row, None);
        self.tiles.aligned = u32::from(aligned);
        self.cut(kernel, self.tiles.count, ELEMENT_ROUNDS)
    }

    /// Sets up a transpose: contiguous along the innermost loop on the target's side, along `across` on the source's.
    fn transposed(&mut self, plan: &CopyPlan, sides: Sides, across: usize, kernel: &'static Kernel) -> Result<()> {
        let tiles = &mut self.tiles;
        tiles.set(plan, sides, Some(across), None);
        let words = [tiles.steps[1]].into_iter().chain(tiles.outer().iter().map(|item| item.strides[1]));
        tiles.vectors =
            u32::from(sides.0[1].addr().is_multiple_of(4) && words.into_iter().all(|stride| stride % 4 == 0));
        let side = i64::from(kernel.shape.items_per_block);
        let [x, y] = [tiles.count, tiles.rows].map(|count| divide_up(count, side));
        self.tile(kernel, x, y)
    }

    /// Cuts `pieces` pieces of work along x into tiles; a thread does `rounds` pieces. Each round of the other loops
    /// has one row of pieces.
    fn cut(&mut self, kernel: &'static Kernel, pieces: i64, rounds: i64) -> Result<()> {
        let tiles = &mut self.tiles;
        let threads = 1 << LOG_BLOCK;
        // Small tiles would leave most of a thread block idle, so the rows of all loops are joined to one sequence.
        if tiles.n_outer > 0 && pieces.saturating_mul(tiles.rows) < threads * rounds && tiles.join(rounds) {
            tiles.joined = 1;
        } else {
            // Rounds also follow each other along y if rows are neighbours in the source, because they share cache
            // lines.
            let [row, step] = [tiles.row_strides, tiles.steps].map(|strides| strides[1].unsigned_abs());
            let are_beside = tiles.rows >= rounds / 2 && (1..step).contains(&row);
            tiles.down = u32::from(pieces < 32 * rounds || are_beside);
        }
        let (across, along);
        if tiles.down == 1 {
            tiles.log_width = (pieces as u64).next_power_of_two().ilog2().min(LOG_BLOCK);
            across = divide_up(pieces, 1 << tiles.log_width);
            let a_thread = if tiles.joined == 1 { 1 } else { rounds };
            along = divide_up(tiles.rows, (threads >> tiles.log_width) * a_thread);
        } else {
            tiles.log_width = width(pieces, rounds);
            across = divide_up(pieces, rounds << tiles.log_width);
            along = divide_up(tiles.rows, threads >> tiles.log_width);
        }
        self.tile(kernel, across, along)
    }

    /// Sets the numbers of tiles along x and y, and the number of thread blocks.
    fn tile(&mut self, kernel: &'static Kernel, across: i64, along: i64) -> Result<()> {
        let tiles = &mut self.tiles;
        let outer = if tiles.joined == 1 { &[] } else { tiles.outer() };
        let rounds = outer.iter().map(|item| item.count.by() as i64).fold(1, i64::saturating_mul);
        let blocks = across.checked_mul(along).and_then(|tiles| tiles.checked_mul(rounds)).ok_or_else(|| {
            error!(SizeOverflow, "dst: {rounds} rounds of {across} x {along} tiles are more than 2^63 - 1")
        })?;
        tiles.across = Divisor::new(across as u64);
        tiles.along = Divisor::new(along as u64);
        (self.kernel, self.blocks) = (kernel, blocks as u64);
        Ok(())
    }
}

impl Tiles {
    // SAFETY: all bytes may be 0: the fields are numbers, pointers, and an enum whose first variant is 0.
    const NOTHING: Self = unsafe { mem::zeroed() };

    /// Sets all fields except `across` and `along`. `row`: the outer loop whose rounds are rows. `within`: an outer
    /// loop that counts together with the innermost one.
    fn set(&mut self, plan: &CopyPlan, sides: Sides, row: Option<usize>, within: Option<usize>) {
        let sizes = plan.conversion.sizes();
        let (from, to, [to_size, from_size]) = match plan.conversion {
            Conversion::Bytes(_) => (Number::Uint, Number::Uint, sizes),
            Conversion::Cast { from, to } => (Number::of(from), Number::of(to), sizes),
        };
        let (inner, outer) = match plan.loops.as_slice().split_last() {
            Some((&inner, outer)) => (inner, outer),
            None => (Loop { count: 1, strides: sizes }, &[][..]),
        };
        let source = sides.0[1].addr();
        let (mut begin, mut end) = (source, source + from_size as usize);
        for &Loop { count, strides: [_, stride] } in plan.loops.as_slice() {
            let reach = (count - 1) * stride;
            begin = begin.wrapping_add_signed(reach.min(0) as isize);
            end = end.wrapping_add_signed(reach.max(0) as isize);
        }
        let row_loop = row.map_or(Loop { count: 1, strides: [0; 2] }, |row| outer[row]);
        (self.src, self.dst) = (sides.0[1], sides.0[0]);
        (self.begin, self.end) = (begin, end);
        (self.count, self.steps) = (inner.count, inner.strides);
        (self.period, self.wrap) = (Divisor::new(0), 0);
        if let Some(within) = within.map(|within| outer[within]) {
            self.count *= within.count;
            self.period = Divisor::new(inner.count as u64);
            self.wrap = within.strides[1] - inner.count * inner.strides[1];
        }
        (self.rows, self.row_strides) = (row_loop.count, row_loop.strides);
        self.cast = Cast { from, from_size: from_size as u32, to, to_size: to_size as u32 };
        (self.log_width, self.down, self.vectors, self.aligned, self.joined) = (0, 0, 0, 1, 0);
        // There are at most 62 loops, of which two are not outer ones.
        let others = (0..outer.len()).filter(|&index| ![row, within].contains(&Some(index)));
        self.n_outer = DividedLoop::put(&mut self.outer, others.map(|index| outer[index]));
    }

    fn outer(&self) -> &[DividedLoop<2>] {
        &self.outer[..self.n_outer as usize]
    }

    /// Returns the strides of the outer loops and of the rows.
    fn other_strides(&self) -> impl Iterator<Item = [i64; 2]> {
        self.outer().iter().map(|item| item.strides).chain([self.row_strides])
    }

    /// Counts the rounds of all outer loops as rows, unless they are too many. If `rounds` divides the number of rows,
    /// a thread takes `rounds` neighbouring rows and computes their place once.
    fn join(&mut self, rounds: i64) -> bool {
        let n = self.n_outer as usize;
        let together = if self.rows % rounds == 0 { rounds } else { 1 };
        let rows = self.rows / together;
        let Some(all) = self.outer().iter().try_fold(rows, |all, item| all.checked_mul(item.count.by() as i64)) else {
            return false;
        };
        let Some(place) = self.outer.get_mut(n) else { return false };
        let strides = self.row_strides.map(|stride| stride * together);
        *place = DividedLoop { count: Divisor::new(rows as u64), strides };
        self.n_outer += 1;
        self.rows = all;
        if together == 1 {
            self.row_strides = [0; 2];
        }
        self.down = u32::from(together > 1);
        true
    }
}

/// Returns true if elements of `size` bytes are contiguous on the target's side and small enough to be gathered.
fn is_gathered(plan: &CopyPlan, size: i64) -> bool {
    size <= LARGEST_GATHERED && plan.loops.as_slice().last().is_some_and(|inner| inner.strides[0] == size)
}

/// Returns the loop that continues a short innermost loop in the target.
fn follows(plan: &CopyPlan) -> Option<usize> {
    let (inner, outer) = plan.loops.as_slice().split_last()?;
    let next = outer.len().checked_sub(1)?;
    let is_next = inner.count < SHORT_LOOP && outer[next].strides[0] == inner.count * inner.strides[0];
    is_next.then_some(next)
}

/// Returns the plan in aligned units of 1, 2, 4, 8 or 16 bytes. A larger or unaligned element becomes several units.
fn in_units(plan: &CopyPlan, size: i64, sides: Sides) -> CopyPlan {
    let strides = plan.loops.as_slice().iter().flat_map(|item| item.strides);
    let addresses = sides.0.map(|side| side.addr() as i64);
    let all = strides.chain(addresses).fold(size | VECTOR, |all, number| all | number);
    let unit = 1 << all.trailing_zeros();
    let mut loops = Loops::new();
    plan.loops.as_slice().iter().for_each(|item| loops.push(item.count, item.strides));
    loops.push(size / unit, [unit; 2]);
    CopyPlan { conversion: Conversion::Bytes(unit), starts: plan.starts, loops }
}

/// Returns the index of a cast that has its own kernel for rows. The first four have one for transposed matrices, too.
fn usual_cast(from: Dtype, to: Dtype) -> Option<usize> {
    const F32: Dtype = Dtype::F32;
    [(F32, Dtype::BF16), (F32, Dtype::F16), (Dtype::BF16, F32), (Dtype::F16, F32), (Dtype::F64, F32), (F32, Dtype::F64)]
        .iter()
        .position(|&usual| usual == (from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: Conversion = Conversion::Bytes(4);
    const U8: Conversion = Conversion::Bytes(1);
    const TO_BF16: Conversion = Conversion::Cast { from: Dtype::F32, to: Dtype::BF16 };
    const TO_U8: Conversion = Conversion::Cast { from: Dtype::F32, to: Dtype::U8 };

    /// Returns the work for these dimensions, at addresses `beyond` bytes after a multiple of 4096.
    fn work(conversion: Conversion, beyond: [usize; 2], dims: &[(i64, [i64; 2])]) -> Work {
        let (plan, mut work) = (CopyPlan::new(conversion, dims.iter().copied()), Work::NOTHING);
        work.set(&plan, beyond.map(|beyond| std::ptr::without_provenance_mut((1 << 40) + beyond))).unwrap();
        work
    }

    #[test]
    fn a_plan_selects_the_kernel_of_its_class() {
        let transposed = [(100, [400, 4]), (100, [4, 400])];
        for (conversion, beyond, dims, expected) in [
            (F32, [0, 4], &[(100, [4, 4])][..], c"gc_copy_rows_u32"),
            (F32, [8, 0], &[(100, [4, 4])], c"gc_copy_rows_u64"),
            (F32, [16, 0], &[(100, [4, 4])], c"gc_copy_rows"),
            (F32, [0, 0], &[], c"gc_copy_rows"),
            (F32, [0, 1], &[(7, [80, 40]), (10, [4, 4])], c"gc_copy_rows"),
            (F32, [0, 0], &transposed, c"gc_copy_transposed_u32"),
            (F32, [0, 4], &transposed, c"gc_copy_transposed_u32"),
            (F32, [0, 0], &[(100, [60, 4]), (15, [4, 400])], c"gc_copy_gathered_u32"), // a short side
            (F32, [0, 0], &[(15, [400, 4]), (100, [4, 60])], c"gc_copy_gathered_u32"),
            (U8, [0, 0], &[(3, [100, 1]), (100, [1, 3])], c"gc_copy_gathered_u8"),
            (U8, [0, 0], &[(100, [1, 2])], c"gc_copy_gathered_u8"),
            (U8, [0, 0], &[(100, [2, 1])], c"gc_copy_general"),
            (Conversion::Bytes(2), [0, 0], &[(100, [2, -2])], c"gc_copy_gathered_u16"),
            (Conversion::Bytes(16), [0, 0], &[(100, [48, 16]), (3, [16, 1600])], c"gc_copy_general"),
            (F32, [0, 0], &[(100, [4, 8])], c"gc_copy_general"),
            (F32, [0, 0], &[(100, [4, -4])], c"gc_copy_general"),
            (F32, [0, 0], &[(100, [4, 0])], c"gc_copy_general"),
            (Conversion::Bytes(16), [0, 0], &[(100, [1600, 16]), (100, [16, 1600])], c"gc_copy_transposed_u128"),
            // An element of 16 bytes is copied as two of 8 bytes.
            (Conversion::Bytes(16), [0, 8], &[(100, [1600, 16]), (100, [16, 1600])], c"gc_copy_rows_u64"),
            (Conversion::Bytes(3), [0, 0], &[(100, [3, 6])], c"gc_copy_rows"),
            (TO_BF16, [0, 0], &[(100, [2, 4])], c"gc_cast_rows_f32_bf16"),
            (TO_BF16, [0, 1], &[(100, [2, 4])], c"gc_cast_general"),
            (TO_BF16, [0, 0], &[(100, [200, 4]), (100, [2, 400])], c"gc_cast_transposed_f32_bf16"),
            (TO_BF16, [1, 0], &[(100, [200, 4]), (100, [2, 400])], c"gc_cast_general"),
            (TO_U8, [0, 0], &[(100, [1, 4])], c"gc_cast_rows"),
            (TO_U8, [0, 2], &[(100, [1, 4])], c"gc_cast_general"),
            (TO_U8, [0, 0], &[(100, [100, 4]), (100, [1, 400])], c"gc_cast_transposed"),
        ] {
            assert_eq!(work(conversion, beyond, dims).kernel.name, expected, "{conversion:?} {beyond:?} {dims:?}");
        }
    }

    #[test]
    fn vectors_are_used_only_if_all_rows_are_aligned_alike() {
        for (conversion, beyond, dims, expected) in [
            (F32, [0, 0], &[(100, [4, 4])][..], 1),
            (F32, [4, 20], &[(100, [4, 4])], 1),
            (F32, [0, 4], &[(100, [4, 4])], 0),
            (F32, [0, 0], &[(7, [44, 60]), (10, [4, 4])], 1),
            (F32, [0, 0], &[(7, [44, 64]), (10, [4, 4])], 0),
            (TO_BF16, [2, 4], &[(100, [2, 4])], 1),
            (TO_BF16, [2, 8], &[(100, [2, 4])], 0),
            (TO_BF16, [0, 0], &[(7, [22, 60]), (10, [2, 4])], 1),
            (TO_BF16, [0, 0], &[(7, [22, 64]), (10, [2, 4])], 0),
        ] {
            assert_eq!(work(conversion, beyond, dims).tiles.vectors, expected, "{conversion:?} {beyond:?} {dims:?}");
        }
    }

    #[test]
    fn the_readable_range_ends_at_the_first_and_last_element() {
        let tiles = work(F32, [0, 4000], &[(10, [400, -100]), (100, [4, 8])]).tiles;
        let base = (1 << 40) + 4000;
        assert_eq!((tiles.begin, tiles.end), (base - 900, base + 792 + 4));
    }

    #[test]
    fn tiles_cover_every_element_and_hardly_more() {
        for (conversion, dims, blocks) in [
            (F32, &[(1 << 20, [4, 4])][..], 256),
            (TO_BF16, &[((1 << 20) + 1, [2, 4])], 257),
            (F32, &[(1000, [64, 128]), (8, [4, 4])], 2), // 2 vectors each, and 4 rows a thread
            (F32, &[(16384, [65536, 4]), (16384, [4, 65536])], 256 * 256),
            (F32, &[(1 << 20, [4, 8])], 512),
            // Short rows of several loops are joined. A thread takes four rows if four divides the number of rows.
            (F32, &[(64, [49152, 3072]), (3, [1024, 1 << 20]), (16, [64, 512]), (16, [4, 4])], 64 * 3 * 4 * 4 / 256),
            (F32, &[(64, [49152, 3072]), (3, [1024, 1 << 20]), (15, [64, 512]), (16, [4, 4])], 45), // 64 * 3 * 15 * 4 / 256
            // Channels last to channels first: three rows per thread, of words. And back: words of pixels and channels.
            (U8, &[(64, [3 << 18, 3 << 18]), (3, [1 << 18, 1]), (1 << 18, [1, 3])], 64 << 8),
            (U8, &[(64, [3 << 18, 3 << 18]), (1 << 18, [3, 1]), (3, [1, 1 << 18])], 64 * (3 << 18) / 4096),
        ] {
            assert_eq!(work(conversion, [0, 0], dims).blocks, blocks, "{conversion:?} {dims:?}");
        }
    }
}
