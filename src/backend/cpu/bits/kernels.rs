//! The kernels of packing and unpacking, compiled for each instruction set and width of element. Arguments and promises
//! are those of the functions that they are made of; besides, the variant is of elements of that width.

use crate::{
    backend::cpu::{dispatch::multiversion, simd::TILE},
    plan::{
        bits::{BitOrder, BitRule, Patterns},
        loops::Cursor,
    },
};

use super::{
    across::{self, Lines},
    bodies::{self, Groups, PACKED, SLACK, STRING},
    flat::{self, Rows},
    runs,
};

multiversion! {
    fn pack_rows(rule: BitRule, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows) for each element = flat::pack_rows;
    fn unpack_rows(patterns: Patterns, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows) for each element = flat::unpack_rows;

    fn pack_runs(rule: BitRule, order: BitOrder, from: &mut Cursor<'_, 1>, base: *const u8, bits: usize, dst: *mut u8) for each element = runs::pack_runs;
    fn unpack_runs(patterns: Patterns, order: BitOrder, bytes: (*const u8, usize), to: &mut Cursor<'_, 1>, base: *mut u8, bits: usize) for each element = runs::unpack_runs;

    fn pack_across(rule: BitRule, order: BitOrder, src: *const u8, lines: Lines, dst: *mut u8) for each element = across::pack_across;
    fn unpack_across(patterns: Patterns, order: BitOrder, src: *const u8, dst: *mut u8, lines: Lines) for each element = across::unpack_across;

    fn pack_tile(rule: BitRule, order: BitOrder, src: *const u8, lines: Lines, words: &mut [u64; TILE]) for each element = bodies::pack_tile;
    fn unpack_tile(patterns: Patterns, order: BitOrder, words: &mut [u64; TILE], dst: *mut u8, lines: Lines) for each element = bodies::unpack_tile;

    fn string_to_columns(order: BitOrder, string: &[u8; STRING + SLACK], groups: Groups, count: (usize, usize), packed: &mut [u8; PACKED + SLACK]) for each element = bodies::string_to_columns;
    fn columns_to_string(order: BitOrder, packed: &[u8; PACKED + SLACK], groups: Groups, count: (usize, usize), string: &mut [u8; STRING + SLACK]) for each element = bodies::columns_to_string;
    fn string_to_rows(order: BitOrder, string: &[u8; STRING + SLACK], groups: Groups, count: usize, packed: &mut [u8; PACKED + SLACK]) for each element = bodies::string_to_rows;
    fn rows_to_string(order: BitOrder, packed: &mut [u8; PACKED + SLACK], groups: Groups, count: usize, string: &mut [u8; STRING + SLACK]) for each element = bodies::rows_to_string;
}
