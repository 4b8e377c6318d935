//! Kernels that pack and unpack contiguous rows, and lines across rows, compiled for each instruction set and element
//! width. Each has the arguments and safety conditions of the function that it is made from. In addition, the variant
//! must be for elements of that width.

use crate::{
    bits::plan::BitOrder,
    cpu::dispatch::multiversion,
    dlpack::rules::{BitRule, Patterns},
};

use super::{
    across,
    flat::{self, Rows},
};

multiversion! {
    fn pack_rows(rule: BitRule, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows) for each element = flat::pack_rows;
    fn unpack_rows(patterns: Patterns, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows) for each element = flat::unpack_rows;
    fn pack_across(rule: BitRule, order: BitOrder, src: *const u8, groups: usize, dst: *mut u8, columns: usize) for each element = across::pack;
    fn unpack_across(patterns: Patterns, order: BitOrder, src: *const u8, groups: usize, dst: *mut u8, columns: usize) for each element = across::unpack;
}
