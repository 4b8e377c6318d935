//! The kernels of packing and unpacking, compiled for each instruction set and width of element. Arguments and promises
//! are those of the functions that they are made of; besides, the variant is of elements of that width.

use crate::{
    backend::cpu::{dispatch::compiled_for_each_set, simd::TILE},
    plan::{
        bits::{BitOrder, BitRule, Patterns},
        loops::Cursor,
    },
};

use super::{
    across::{self, Lines},
    flat::{self, Rows},
    narrow::{self, Groups, PACKED, SLACK, STRING},
    runs, tiles,
};

compiled_for_each_set! {
    fn pack_rows(rule: BitRule, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows) = flat::pack_rows;
    fn unpack_rows(patterns: Patterns, order: BitOrder, src: *const u8, bits: usize, dst: *mut u8, rows: &Rows) = flat::unpack_rows;

    fn pack_runs(rule: BitRule, order: BitOrder, from: &mut Cursor<'_, 1>, base: *const u8, bits: usize, dst: *mut u8) = runs::pack_runs;
    fn unpack_runs(patterns: Patterns, order: BitOrder, bytes: (*const u8, usize), to: &mut Cursor<'_, 1>, base: *mut u8, bits: usize) = runs::unpack_runs;

    fn pack_across(rule: BitRule, order: BitOrder, src: *const u8, lines: Lines, dst: *mut u8) = across::pack_across;
    fn unpack_across(patterns: Patterns, order: BitOrder, src: *const u8, dst: *mut u8, lines: Lines) = across::unpack_across;

    fn pack_tile(rule: BitRule, order: BitOrder, src: *const u8, lines: Lines, words: &mut [u64; TILE]) = tiles::pack_tile;
    fn unpack_tile(patterns: Patterns, order: BitOrder, words: &mut [u64; TILE], dst: *mut u8, lines: Lines) = tiles::unpack_tile;

    fn string_to_columns(order: BitOrder, string: &[u8; STRING + SLACK], groups: Groups, count: (usize, usize), packed: &mut [u8; PACKED + SLACK]) = narrow::string_to_columns;
    fn columns_to_string(order: BitOrder, packed: &[u8; PACKED + SLACK], groups: Groups, count: (usize, usize), string: &mut [u8; STRING + SLACK]) = narrow::columns_to_string;
    fn string_to_rows(order: BitOrder, string: &[u8; STRING + SLACK], groups: Groups, count: usize, packed: &mut [u8; PACKED + SLACK]) = narrow::string_to_rows;
    fn rows_to_string(order: BitOrder, packed: &mut [u8; PACKED + SLACK], groups: Groups, count: usize, string: &mut [u8; STRING + SLACK]) = narrow::rows_to_string;
}
