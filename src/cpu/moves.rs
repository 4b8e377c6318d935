//! Copies elements without conversion, at any strides.
//!
//! A plane is the elements of two loops of a plan: lines of elements, with separate steps on either side. The functions
//! are generic over the width of an element and compiled for each instruction set.

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
    /// Number of elements of a line.
    pub count: usize,
    pub steps: [isize; 2],
}

impl Plane {
    /// Makes a plane whose lines are the rounds of `run`, each with all rounds of `inner`.
    pub fn new(run: &Run<2>, inner: &Loop<2>) -> Self {
        Self {
            lines: run.count as usize,
            line_steps: run.strides.map(|stride| stride as isize),
            count: inner.count as usize,
            steps: inner.strides.map(|stride| stride as isize),
        }
    }

    /// Returns true if the source's elements lie closer from line to line than along a line.
    pub fn is_across(&self) -> bool {
        self.lines > 1 && (1..self.steps[1].unsigned_abs()).contains(&self.line_steps[1].unsigned_abs())
    }

    /// Returns true if it is copied in tiles: it is across, and large enough, at least a square in registers.
    fn is_tiled(&self, size: usize) -> bool {
        let least = if self.is_dense_across(size) { side_of(size) / 4 } else { side_of(size) };
        self.is_across() && self.lines.min(self.count) >= least
    }

    /// Returns true if the target is dense along lines and the source is dense from line to line.
    fn is_dense_across(&self, size: usize) -> bool {
        [self.steps[0], self.line_steps[1]] == [size as isize; 2]
    }

    /// Returns true if each line spans several cache lines of its own, so that whole lines are faster to read or write.
    fn is_on_several_cache_lines(&self, size: usize) -> bool {
        (0..2).any(|side| {
            let [line, step] = [self.line_steps[side], self.steps[side]].map(isize::unsigned_abs);
            line > step && step > size && self.count * step > TILE_BYTES
        })
    }

    /// Returns the plane with these numbers of lines and of elements per line.
    fn part(&self, lines: usize, count: usize) -> Self {
        Self { lines, count, ..*self }
    }

    /// Returns the plane with lines and elements exchanged.
    fn turned(&self) -> Self {
        Self { lines: self.count, line_steps: self.steps, count: self.lines, steps: self.line_steps }
    }

    /// Returns the offset of an element from the first one, in bytes.
    pub fn offset(&self, side: usize, line: usize, element: usize) -> isize {
        line as isize * self.line_steps[side] + element as isize * self.steps[side]
    }
}

/// Removes the innermost loop from a nest and returns it: the elements of a plane's lines, `sizes` apart if there is no
/// loop. The last of `loops` is then the loop over lines: the one at the index that `choose` returns, or the next one.
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

/// Number of lines below which a plane takes longer to begin than to copy.
const FEW_LINES: i64 = 16;

/// Copies all elements, of `size` bytes each, of a nest of loops, which it changes. They are few enough for the caches
/// to hold them in any order.
///
/// # Safety
/// The processor has `set`. The elements can be read from `src` on, written from `dst` on, and do not overlap.
pub unsafe fn move_all(set: InstructionSet, size: usize, dst: *mut u8, src: *const u8, loops: &mut Loops<2>) {
    let inner = take_plane(loops, [size as i64; 2], |_, others| {
        let many = others.iter().rposition(|item| item.count >= FEW_LINES);
        many.or_else(|| (0..others.len()).max_by_key(|&index| others[index].count))
    });
    let mut cursor = Cursor::starting_at(loops, 0);
    while let Some(run) = cursor.next_run(i64::MAX) {
        let [to, from] = run.offsets.map(|offset| offset as isize);
        // SAFETY: these lines are a part of the elements, for which the caller promises this.
        unsafe {
            move_plane(set, size, dst.wrapping_offset(to), src.wrapping_offset(from), &Plane::new(&run, &inner));
        }
    }
}

/// Copies the elements of a plane, of `size` bytes.
///
/// # Safety
/// The processor has `set`. The elements can be read from `src` on, written from `dst` on, and do not overlap.
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
/// See [`move_plane`].
#[inline(always)]
unsafe fn across_on<S: Simd<T>, T: Element>(dst: *mut u8, src: *const u8, plane: &Plane) {
    // SAFETY: the elements of the plane can be read and written.
    unsafe { across::<T>(dst, src, plane) };
}

/// # Safety
/// See [`move_plane`].
#[inline(always)]
unsafe fn lines_on<S: Simd<T>, T: Element>(dst: *mut u8, src: *const u8, plane: &Plane) {
    // SAFETY: the elements of the plane can be read and written.
    unsafe { lines::<T>(dst, src, plane) };
}

/// Copies line by line, the longer loop inside if lines are short.
///
/// # Safety
/// See [`move_plane`].
#[inline(always)]
unsafe fn lines<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    let size = size_of::<T>();
    if plane.is_across() && plane.count > 1 {
        // Makes the longer direction the inner loop, in parts whose lines all stay in the L1 cache.
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
/// See [`move_plane`].
#[inline(always)]
unsafe fn lines_of<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    let size = size_of::<T>() as isize;
    // SAFETY: the elements of the plane can be read and written, and each arm passes the plane's steps.
    unsafe {
        match plane.steps {
            [to, from] if to == size && from == size => dense_lines(dst, src, plane, plane.count * size_of::<T>()),
            // The compiler emits vector code for steps that are constants.
            [to, 0] if to == size => lines_at::<T>(dst, src, plane, [size, 0]),
            [to, from] if to == size && from == -size => lines_at::<T>(dst, src, plane, [size, -size]),
            [to, from] if to == size && from == 2 * size => lines_at::<T>(dst, src, plane, [size, 2 * size]),
            [to, from] if to == size && from == 3 * size => lines_at::<T>(dst, src, plane, [size, 3 * size]),
            [to, from] if to == size && from == 4 * size => lines_at::<T>(dst, src, plane, [size, 4 * size]),
            // For bytes only, which then take half the time or less. All widths would add 45 KB of code.
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
/// See [`move_plane`]; the plane has these steps.
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

/// Copies line by line, at any steps. Vectors of scattered elements would take longer than single elements.
///
/// # Safety
/// See [`move_plane`].
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

/// Copies lines of `bytes` contiguous bytes. Short lines take no call: the first bytes and the last are two pieces that
/// may overlap.
///
/// # Safety
/// See [`move_plane`].
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
/// See [`move_plane`].
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

/// Returns the number of elements of `size` bytes on a side of a tile.
fn side_of(size: usize) -> usize {
    if size == 16 { 16 } else { TILE_BYTES / size }
}

/// Distance in bytes: rows that are a multiple of it apart share at most four sets of the L1 cache.
const SHARES: usize = 1024;

/// Bytes of the lines that are copied together and stay in the L1 cache.
const NEAR_BYTES: usize = 8 << 10;

/// Copies a plane that is across, in tiles, so that each cache line of the source is used completely while it is
/// cached.
///
/// # Safety
/// See [`move_plane`]; the plane is tiled ([`Plane::is_tiled`]).
#[inline(always)]
unsafe fn across<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    let size = size_of::<T>();
    let (side, is_dense) = (side_of(size), plane.is_dense_across(size));
    // Goes through four neighbouring tiles at a time, so that more than one cache line of a page is read.
    for lines in (0..plane.lines).step_by(4 * side) {
        for element in (0..plane.count).step_by(side) {
            for line in (lines..plane.lines.min(lines + 4 * side)).step_by(side) {
                let tile = plane.part(side.min(plane.lines - line), side.min(plane.count - element));
                // No hardware prefetcher follows as many lines as a tile has.
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

/// Transposes a tile, or a part of one, that is dense along lines in the target and across lines in the source. Squares
/// with sides of 16 bytes go through registers, the remaining elements are copied one by one.
///
/// # Safety
/// See [`move_plane`]; 16 bytes hold `N` elements.
#[inline(always)]
unsafe fn transpose_tile<T: Copy, const N: usize>(dst: *mut u8, src: *const u8, tile: &Plane) {
    let size = size_of::<T>();
    let side = TILE_BYTES / size;
    // A full tile whose rows share few sets of the L1 cache is first copied to the stack, to read each cache line once.
    let LineAligned(block) = &mut LineAligned([[MaybeUninit::<[u8; TILE_BYTES]>::uninit(); N]; TILE_BYTES / 16]);
    let (mut from, mut step) = (src, tile.steps[1]);
    if tile.lines == side && tile.count == side && step.unsigned_abs() % SHARES == 0 {
        for (row, copied) in block.as_flattened_mut().iter_mut().enumerate() {
            // SAFETY: a full row of the tile has `TILE_BYTES` bytes, which the caller promises.
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
    // SAFETY: both parts lie within the tile: the remaining elements of these lines, and the remaining lines.
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
