//! Elements from one place to another, as they are.
//!
//! A plane is what the two innermost loops of a plan visit: lines of elements, each side at steps of its own. Generic
//! functions over the width of an element, compiled for each instruction set.

use std::ptr;

use crate::backend::cpu::{
    dispatch::{Variant, compiled_for_each_set},
    simd::{Element, Simd},
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
    // SAFETY: the caller's promise.
    unsafe {
        match size {
            1 | 2 | 4 | 8 => move_elements(Variant::unpacking(set, size), dst, src, plane),
            16 => plane_of::<[u64; 2]>(dst, src, plane),
            _ => plane_of_any(size, dst, src, plane),
        }
    }
}

compiled_for_each_set! {
    fn move_elements(dst: *mut u8, src: *const u8, plane: &Plane) = self::plane_on;
}

/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn plane_on<S: Simd<T>, T: Element>(dst: *mut u8, src: *const u8, plane: &Plane) {
    // SAFETY: the caller's promise.
    unsafe { plane_of::<T>(dst, src, plane) };
}

/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn plane_of<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    let size = size_of::<T>() as isize;
    if plane.is_across() && plane.count > 1 {
        // SAFETY: the caller's promise.
        return unsafe { across::<T>(dst, src, plane) };
    }
    for line in 0..plane.lines {
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        unsafe {
            dst.offset(index * to).cast::<T>().write_unaligned(src.offset(index * from).cast::<T>().read_unaligned());
        }
    }
}

/// # Safety
/// As for [`move_plane`].
unsafe fn plane_of_any(size: usize, dst: *mut u8, src: *const u8, plane: &Plane) {
    for line in 0..plane.lines {
        // SAFETY: the caller's promise.
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

/// Copies a plane whose source's elements lie closer from line to line: in tiles, so that each of its cache lines is
/// used whole while it is there.
///
/// # Safety
/// As for [`move_plane`].
#[inline(always)]
unsafe fn across<T: Copy>(dst: *mut u8, src: *const u8, plane: &Plane) {
    const TILE: usize = 16;
    for line in (0..plane.lines).step_by(TILE) {
        for element in (0..plane.count).step_by(TILE) {
            let tile = plane.part(TILE.min(plane.lines - line), TILE.min(plane.count - element));
            // SAFETY: the caller's promise.
            unsafe {
                let dst = dst.offset(plane.offset(0, line, element));
                let src = src.offset(plane.offset(1, line, element));
                for line in 0..tile.lines {
                    let (dst, src) = (dst.offset(plane.offset(0, line, 0)), src.offset(plane.offset(1, line, 0)));
                    line_of::<T>(dst, src, tile.count, tile.steps);
                }
            }
        }
    }
}
