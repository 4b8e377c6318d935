//! Elements from one place to another, as they are.
//!
//! A plane is what the two innermost loops of a plan visit: lines of elements, each side at steps of its own. Generic
//! functions over the width of an element, compiled for each instruction set.

use std::{mem::MaybeUninit, ptr};

use crate::backend::cpu::{
    dispatch::{Variant, multiversion},
    simd::{Element, LineAligned, Simd, prefetch, transpose_square},
};

use super::InstructionSet;

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
    /// Whether the source's elements lie closer from line to line than along a line.
    pub fn is_across(&self) -> bool {
        self.lines > 1 && (1..self.steps[1].unsigned_abs()).contains(&self.line_steps[1].unsigned_abs())
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

/// Copies the elements of a plane, of `size` bytes.
///
/// # Safety
/// `set` is there; the plane's elements can be read from `src` on, written from `dst` on, and do not overlap.
pub unsafe fn move_plane(set: InstructionSet, size: usize, dst: *mut u8, src: *const u8, plane: &Plane) {
    // SAFETY: the elements of the plane can be read and written, and the processor has the instructions.
    unsafe {
        match size {
            1 | 2 | 4 | 8 => move_elements(Variant::unpacking(set, size), dst, src, plane),
            16 => plane_of::<[u64; 2]>(dst, src, plane),
            _ => plane_of_any(size, dst, src, plane),
        }
    }
}

multiversion! {
    fn move_elements(dst: *mut u8, src: *const u8, plane: &Plane) for each element = self::plane_on;
}

/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn plane_on<S: Simd<T>, T: Element>(dst: *mut u8, src: *const u8, plane: &Plane) {
    // SAFETY: the elements of the plane can be read and written.
    unsafe { plane_of::<T>(dst, src, plane) };
}

/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn plane_of<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    if plane.is_across() && plane.count > 1 {
        // SAFETY: the elements of the plane can be read and written.
        return unsafe { across::<T>(dst, src, plane) };
    }
    // SAFETY: the elements of the plane can be read and written.
    unsafe { lines_of::<T>(dst, src, plane) };
}

/// Copies line by line.
///
/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn lines_of<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    let size = size_of::<T>() as isize;
    for line in 0..plane.lines {
        // SAFETY: `line` is one of the plane's.
        unsafe {
            let (dst, src) = (dst.offset(plane.offset(0, line, 0)), src.offset(plane.offset(1, line, 0)));
            match plane.steps {
                [to, from] if to == size && from == size => {
                    ptr::copy_nonoverlapping(src, dst, plane.count * size_of::<T>())
                }
                // What the compiler knows becomes vectors.
                [to, 0] if to == size => line_of::<T>(dst, src, plane.count, [size, 0]),
                [to, from] if to == size && from == -size => line_of::<T>(dst, src, plane.count, [size, -size]),
                [to, from] if to == size && from == 2 * size => line_of::<T>(dst, src, plane.count, [size, 2 * size]),
                [to, from] if to == size && from == 3 * size => line_of::<T>(dst, src, plane.count, [size, 3 * size]),
                [to, from] if to == size && from == 4 * size => line_of::<T>(dst, src, plane.count, [size, 4 * size]),
                [to, from] if to == size => line_of::<T>(dst, src, plane.count, [size, from]),
                steps => line_of::<T>(dst, src, plane.count, steps),
            }
        }
    }
}

/// # Safety
/// As for [`move_plane`], of one line.
#[inline(always)]
unsafe fn line_of<T: Copy>(dst: *mut u8, src: *const u8, count: usize, [to, from]: [isize; 2]) {
    for index in 0..count as isize {
        // SAFETY: `index` is below `count`: one of the line's elements on each side, at any address.
        unsafe {
            dst.offset(index * to).cast::<T>().write_unaligned(src.offset(index * from).cast::<T>().read_unaligned());
        }
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

/// Rows that are a multiple of so many bytes apart share at most four places of the first cache.
const SHARES: usize = 1024;

/// Bytes of a few lines that are copied one after the other.
const NEAR_BYTES: usize = 8 << 10;

/// Copies a plane whose source's elements lie closer from line to line: in tiles, so that each of its cache lines is
/// used whole while it is there.
///
/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn across<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    let size = size_of::<T>();
    let (side, dense) = (if size == 16 { 16 } else { TILE_BYTES / size }, size as isize);
    let is_dense = plane.steps[0] == dense && plane.line_steps[1] == dense;
    // Few lines, or short ones: the longer direction inside, as far as all of them stay in the first cache.
    let (few, many) = if plane.lines < side { (plane.lines, plane.count) } else { (plane.count, plane.lines) };
    if few < side {
        let some = NEAR_BYTES / size / few;
        for first in (0..many).step_by(some) {
            let left = some.min(many - first);
            let (line, element, part) = match plane.lines < side {
                true => (0, first, plane.part(plane.lines, left)),
                false => (first, 0, plane.part(left, plane.count).turned()),
            };
            // SAFETY: this part lies within the plane.
            unsafe {
                let (dst, src) =
                    (dst.offset(plane.offset(0, line, element)), src.offset(plane.offset(1, line, element)));
                lines_of::<T>(dst, src, &part);
            }
        }
        return;
    }
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
                        _ => lines_of::<T>(dst, src, &tile),
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
            lines_of::<T>(dst.offset(tile.offset(0, 0, count)), src.offset(tile.offset(1, 0, count)), &left);
        }
        if lines < tile.lines {
            let left = tile.part(tile.lines - lines, tile.count);
            lines_of::<T>(dst.offset(tile.offset(0, lines, 0)), src.offset(tile.offset(1, lines, 0)), &left);
        }
    }
}
