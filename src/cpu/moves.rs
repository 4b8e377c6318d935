//! Elements from one place to another, as they are.
//!
//! A plane is what the two innermost loops of a plan visit: lines of elements, each side at steps of its own. Generic
//! functions over the width of an element, compiled for each instruction set.

use std::{mem::MaybeUninit, ptr};

use crate::dlpack::loops::{Cursor, Loop, Loops, Run};

use super::{
    dispatch::{InstructionSet, Variant, multiversion},
    simd::{Element, LineAligned, Simd, prefetch, transpose_square},
};

/// Lines of elements. Steps are in bytes, the target's first.
#[derive(Clone, Copy, Debug)]
pub struct Plane {
    pub lines: usize,
    pub line_steps: [isize; 2],
    /// Elements of a line.
    pub count: usize,
    pub steps: [isize; 2],
}

impl Plane {
    /// Lines as a run of them has it, each all rounds of `inner`.
    pub fn new(run: &Run<2>, inner: &Loop<2>) -> Self {
        Self {
            lines: run.count as usize,
            line_steps: run.strides.map(|stride| stride as isize),
            count: inner.count as usize,
            steps: inner.strides.map(|stride| stride as isize),
        }
    }

    /// Whether the source's elements lie closer from line to line than along a line.
    pub fn is_across(&self) -> bool {
        self.lines > 1 && (1..self.steps[1].unsigned_abs()).contains(&self.line_steps[1].unsigned_abs())
    }

    /// Whether it goes in tiles: it is across, and has enough lines and elements, at least a square in registers.
    fn is_tiled(&self, size: usize) -> bool {
        let least = if self.is_dense_across(size) { side_of(size) / 4 } else { side_of(size) };
        self.is_across() && self.lines.min(self.count) >= least
    }

    /// Whether the target's lines are dense, and the source's elements from line to line.
    fn is_dense_across(&self, size: usize) -> bool {
        [self.steps[0], self.line_steps[1]] == [size as isize; 2]
    }

    /// Whether each line lies on several cache lines of its own, so that it is better read or written as a whole.
    fn is_on_several_cache_lines(&self, size: usize) -> bool {
        (0..2).any(|side| {
            let [line, step] = [self.line_steps[side], self.steps[side]].map(isize::unsigned_abs);
            line > step && step > size && self.count * step > TILE_BYTES
        })
    }

    /// Some of its lines, and of their elements, from `first` of each on.
    fn part(&self, lines: usize, count: usize) -> Self {
        Self { lines, count, ..*self }
    }

    /// With its elements as lines.
    fn turned(&self) -> Self {
        Self { lines: self.count, line_steps: self.steps, count: self.lines, steps: self.line_steps }
    }

    /// How far an element is from the first.
    pub fn offset(&self, side: usize, line: usize, element: usize) -> isize {
        line as isize * self.line_steps[side] + element as isize * self.steps[side]
    }
}

/// Takes out of a nest of loops over elements of these sizes the inner one, that of its planes. Last in `loops` is then
/// the planes' other one: that with the index which `choose` gives, or the next one.
pub fn take_plane(
    loops: &mut Loops<2>, sizes: [i64; 2], choose: impl Fn(&Loop<2>, &[Loop<2>]) -> Option<usize>,
) -> Loop<2> {
    let Some(last) = loops.as_slice().len().checked_sub(1) else {
        return Loop { count: 1, strides: sizes };
    };
    let inner = loops.remove(last);
    if let Some(chosen) = choose(&inner, loops.as_slice()) {
        let lines = loops.remove(chosen);
        loops.push(lines.count, lines.strides);
    }
    inner
}

/// With fewer lines than this, a plane takes longer to begin than to copy.
const FEW_LINES: i64 = 16;

/// Copies all elements of a nest of loops, which are changed, of `size` bytes: so few that the caches hold them in
/// whatever order.
///
/// # Safety
/// `set` is there; the elements can be read from `src` on, written from `dst` on, and do not overlap.
pub unsafe fn move_all(set: InstructionSet, size: usize, dst: *mut u8, src: *const u8, loops: &mut Loops<2>) {
    let inner = take_plane(loops, [size as i64; 2], |_, others| {
        let many = others.iter().rposition(|item| item.count >= FEW_LINES);
        many.or_else(|| (0..others.len()).max_by_key(|&index| others[index].count))
    });
    let mut cursor = Cursor::starting_at(loops, 0);
    while let Some(run) = cursor.next_run(i64::MAX) {
        let [to, from] = run.offsets.map(|offset| offset as isize);
        // SAFETY: these lines are some of the elements.
        unsafe {
            move_plane(set, size, dst.wrapping_offset(to), src.wrapping_offset(from), &Plane::new(&run, &inner));
        }
    }
}

/// Copies the elements of a plane, of `size` bytes.
///
/// # Safety
/// `set` is there; the plane's elements can be read from `src` on, written from `dst` on, and do not overlap.
pub unsafe fn move_plane(set: InstructionSet, size: usize, dst: *mut u8, src: *const u8, plane: &Plane) {
    let variant = Variant::new(set, size);
    // SAFETY: the elements of the plane can be read and written, and the processor has the instructions.
    unsafe {
        match size {
            1 | 2 | 4 | 8 if plane.is_tiled(size) => move_across(variant, dst, src, plane),
            1 | 2 | 4 | 8 => move_lines(variant, dst, src, plane),
            16 if plane.is_tiled(size) => across::<[u64; 2]>(dst, src, plane),
            16 => lines::<[u64; 2]>(dst, src, plane),
            _ => plane_of_any(size, dst, src, plane),
        }
    }
}

multiversion! {
    fn move_across(dst: *mut u8, src: *const u8, plane: &Plane) for each element = self::across_on;
    fn move_lines(dst: *mut u8, src: *const u8, plane: &Plane) for each element = self::lines_on;
}

/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn across_on<S: Simd<T>, T: Element>(dst: *mut u8, src: *const u8, plane: &Plane) {
    // SAFETY: the elements of the plane can be read and written.
    unsafe { across::<T>(dst, src, plane) };
}

/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn lines_on<S: Simd<T>, T: Element>(dst: *mut u8, src: *const u8, plane: &Plane) {
    // SAFETY: the elements of the plane can be read and written.
    unsafe { lines::<T>(dst, src, plane) };
}

/// Copies line by line, the longer loop inside if lines are short.
///
/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn lines<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    let size = size_of::<T>();
    if plane.is_across() && plane.count > 1 {
        // The longer direction inside, as far as all lines stay in the first cache.
        let is_wide = plane.lines < plane.count;
        let (few, many) = if is_wide { (plane.lines, plane.count) } else { (plane.count, plane.lines) };
        let some = NEAR_BYTES / size / few;
        for first in (0..many).step_by(some) {
            let left = some.min(many - first);
            let (line, element, part) = match is_wide {
                true => (0, first, plane.part(plane.lines, left)),
                false => (first, 0, plane.part(left, plane.count).turned()),
            };
            // SAFETY: this part lies within the plane.
            unsafe {
                let dst = dst.offset(plane.offset(0, line, element));
                lines_of::<T>(dst, src.offset(plane.offset(1, line, element)), &part);
            }
        }
        return;
    }
    let is_short = plane.count < plane.lines && (plane.count < 8 || !plane.is_on_several_cache_lines(size));
    let turned = if is_short && plane.steps != [size as isize; 2] { plane.turned() } else { *plane };
    // SAFETY: the elements of the plane can be read and written.
    unsafe { lines_of::<T>(dst, src, &turned) };
}

/// Copies line by line.
///
/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn lines_of<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    let size = size_of::<T>() as isize;
    // SAFETY: the elements of the plane can be read and written, and its steps are these.
    unsafe {
        match plane.steps {
            [to, from] if to == size && from == size => dense_lines(dst, src, plane, plane.count * size_of::<T>()),
            // What the compiler knows becomes vectors.
            [to, 0] if to == size => lines_at::<T>(dst, src, plane, [size, 0]),
            [to, from] if to == size && from == -size => lines_at::<T>(dst, src, plane, [size, -size]),
            [to, from] if to == size && from == 2 * size => lines_at::<T>(dst, src, plane, [size, 2 * size]),
            [to, from] if to == size && from == 3 * size => lines_at::<T>(dst, src, plane, [size, 3 * size]),
            [to, from] if to == size && from == 4 * size => lines_at::<T>(dst, src, plane, [size, 4 * size]),
            // Bytes alone, which take half the time or less. For all widths it would be 45 KB of code more.
            [1, 5] if size == 1 => lines_at::<T>(dst, src, plane, [1, 5]),
            [1, 6] if size == 1 => lines_at::<T>(dst, src, plane, [1, 6]),
            [1, 7] if size == 1 => lines_at::<T>(dst, src, plane, [1, 7]),
            [1, 8] if size == 1 => lines_at::<T>(dst, src, plane, [1, 8]),
            [to, from] if to == size => lines_at::<T>(dst, src, plane, [size, from]),
            [to, from] if to == -size && from == size => lines_at::<T>(dst, src, plane, [-size, size]),
            _ => lines_apart::<T>(dst, src, plane),
        }
    }
}

/// # Safety
/// As for [`move_plane`], of a plane with these steps.
#[inline(always)]
unsafe fn lines_at<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane, [to, from]: [isize; 2]) {
    for line in 0..plane.lines {
        let dst = dst.wrapping_offset(plane.offset(0, line, 0));
        let src = src.wrapping_offset(plane.offset(1, line, 0));
        for index in 0..plane.count as isize {
            // SAFETY: an element of the plane on each side, at any address.
            unsafe {
                let element = src.offset(index * from).cast::<T>().read_unaligned();
                dst.offset(index * to).cast::<T>().write_unaligned(element);
            }
        }
    }
}

/// The same at any steps. As vectors, scattered elements would take longer than one by one.
///
/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn lines_apart<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    for line in 0..plane.lines {
        let mut dst = dst.wrapping_offset(plane.offset(0, line, 0));
        let mut src = src.wrapping_offset(plane.offset(1, line, 0));
        for _ in 0..plane.count {
            // SAFETY: an element of the plane on each side, at any address.
            unsafe { dst.cast::<T>().write_unaligned(src.cast::<T>().read_unaligned()) };
            (dst, src) = (dst.wrapping_offset(plane.steps[0]), src.wrapping_offset(plane.steps[1]));
        }
    }
}

/// Copies lines of `bytes` bytes side by side: short ones without a call, in two pieces that may overlap, the first bytes
/// and the last.
///
/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn dense_lines(dst: *mut u8, src: *const u8, plane: &Plane, bytes: usize) {
    macro_rules! in_pieces {
        ($($least:literal to $most:literal: $piece:ty,)*) => {
            match bytes {
                $($least..=$most => {
                    let last = bytes - size_of::<$piece>();
                    for line in 0..plane.lines {
                        let dst = dst.wrapping_offset(plane.offset(0, line, 0));
                        let src = src.wrapping_offset(plane.offset(1, line, 0));
                        // SAFETY: both pieces lie within the bytes of this line.
                        unsafe {
                            let low = src.cast::<$piece>().read_unaligned();
                            let high = src.add(last).cast::<$piece>().read_unaligned();
                            dst.cast::<$piece>().write_unaligned(low);
                            dst.add(last).cast::<$piece>().write_unaligned(high);
                        }
                    }
                })*
                _ => for line in 0..plane.lines {
                    let dst = dst.wrapping_offset(plane.offset(0, line, 0));
                    // SAFETY: a line of the plane.
                    unsafe { ptr::copy_nonoverlapping(src.wrapping_offset(plane.offset(1, line, 0)), dst, bytes) };
                },
            }
        };
    }
    in_pieces! {
        1 to 1: u8, 2 to 4: u16, 5 to 8: u32, 9 to 16: u64, 17 to 32: u128, 33 to 64: [u128; 2], 65 to 128: [u128; 4],
    }
}

/// # Safety
/// As for [`move_plane`].
unsafe fn plane_of_any(size: usize, dst: *mut u8, src: *const u8, plane: &Plane) {
    for line in 0..plane.lines {
        // SAFETY: `line` is one of the plane's, and each of its elements has `size` bytes on both sides.
        unsafe {
            if plane.steps == [size as isize; 2] {
                let (dst, src) = (dst.offset(plane.offset(0, line, 0)), src.offset(plane.offset(1, line, 0)));
                ptr::copy_nonoverlapping(src, dst, plane.count * size);
                continue;
            }
            for element in 0..plane.count {
                let to = dst.offset(plane.offset(0, line, element));
                ptr::copy_nonoverlapping(src.offset(plane.offset(1, line, element)), to, size);
            }
        }
    }
}

/// Bytes of a side of a tile: a cache line.
const TILE_BYTES: usize = 64;

/// The elements of a side of a tile, of so many bytes.
fn side_of(size: usize) -> usize {
    if size == 16 { 16 } else { TILE_BYTES / size }
}

/// Rows that are a multiple of so many bytes apart share at most four places of the first cache.
const SHARES: usize = 1024;

/// Bytes of a few lines that are copied one after the other.
const NEAR_BYTES: usize = 8 << 10;

/// Copies a plane whose source's elements lie closer from line to line: in tiles, so that each of its cache lines is
/// used whole while it is there.
///
/// # Safety
/// As for [`move_plane`]; the plane is one for tiles.
#[inline(always)]
unsafe fn across<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    let size = size_of::<T>();
    let (side, is_dense) = (side_of(size), plane.is_dense_across(size));
    // Some tiles beside each other, so that what is read of a page is more than a cache line.
    for lines in (0..plane.lines).step_by(4 * side) {
        for element in (0..plane.count).step_by(side) {
            for line in (lines..plane.lines.min(lines + 4 * side)).step_by(side) {
                let tile = plane.part(side.min(plane.lines - line), side.min(plane.count - element));
                // No prefetcher of a processor follows as many lines as a tile has.
                let ahead = if element + 2 * side <= plane.count { side } else { 0 };
                for next in 0..ahead {
                    prefetch(src.wrapping_offset(plane.offset(1, line, element + side + next)));
                    prefetch(dst.wrapping_offset(plane.offset(0, line + next, element + side)));
                }
                // SAFETY: this tile lies within the plane.
                unsafe {
                    let dst = dst.offset(plane.offset(0, line, element));
                    let src = src.offset(plane.offset(1, line, element));
                    match size {
                        1 if is_dense => transpose_tile::<T, 16>(dst, src, &tile),
                        2 if is_dense => transpose_tile::<T, 8>(dst, src, &tile),
                        4 if is_dense => transpose_tile::<T, 4>(dst, src, &tile),
                        8 if is_dense => transpose_tile::<T, 2>(dst, src, &tile),
                        _ => lines_apart::<T>(dst, src, &tile),
                    }
                }
            }
        }
    }
}

/// Transposes a tile, or what there is of one, whose lines are dense in the target and across them in the source: squares
/// of 16 bytes in registers, and what is left element by element.
///
/// # Safety
/// As for [`move_plane`]; 16 bytes hold `N` elements.
#[inline(always)]
unsafe fn transpose_tile<T: Copy, const N: usize>(dst: *mut u8, src: *const u8, tile: &Plane) {
    let size = size_of::<T>();
    let side = TILE_BYTES / size;
    // A whole one whose rows share few places of the first cache goes by the stack, so that each cache line is read once.
    let LineAligned(block) = &mut LineAligned([[MaybeUninit::<[u8; TILE_BYTES]>::uninit(); N]; TILE_BYTES / 16]);
    let (mut from, mut step) = (src, tile.steps[1]);
    if tile.lines == side && tile.count == side && step.unsigned_abs() % SHARES == 0 {
        for (row, copied) in block.as_flattened_mut().iter_mut().enumerate() {
            // SAFETY: a whole row of a tile: the caller's promise.
            copied.write(unsafe { src.offset(row as isize * step).cast::<[u8; TILE_BYTES]>().read_unaligned() });
        }
        (from, step) = (block.as_ptr().cast(), TILE_BYTES as isize);
    }
    let (lines, count) = (tile.lines / N * N, tile.count / N * N);
    for line in (0..lines).step_by(N) {
        for element in (0..count).step_by(N) {
            // SAFETY: a square within the tile.
            unsafe {
                let from = from.offset(element as isize * step).add(line * size);
                transpose_square::<N>(dst.offset(tile.offset(0, line, element)), tile.line_steps[0], from, step);
            }
        }
    }
    // SAFETY: what is left of each of these lines, and the lines that are left.
    unsafe {
        if count < tile.count {
            let left = tile.part(lines, tile.count - count);
            lines_at::<T>(
                dst.offset(tile.offset(0, 0, count)),
                src.offset(tile.offset(1, 0, count)),
                &left,
                [size as isize, left.steps[1]],
            );
        }
        if lines < tile.lines {
            let left = tile.part(tile.lines - lines, tile.count);
            lines_at::<T>(
                dst.offset(tile.offset(0, lines, 0)),
                src.offset(tile.offset(1, lines, 0)),
                &left,
                [size as isize, left.steps[1]],
            );
        }
    }
}
