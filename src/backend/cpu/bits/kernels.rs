//! The kernels that pack and unpack contiguous rows, compiled for each instruction set and width of element. Arguments
//! and promises are those of the functions that they are made of; besides, the variant is of elements of that width.

use crate::{
    backend::cpu::dispatch::multiversion,
    plan::bits::{BitOrder, BitRule, Patterns},
};

use super::flat::{self, Rows};

multiversion! {
    fn pack_rows(rule: BitRule, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows) for each element = flat::pack_rows;
    fn unpack_rows(patterns: Patterns, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows) for each element = flat::unpack_rows;
}
