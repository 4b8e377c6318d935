//! The kernels of every instruction set against the definition.

use super::{across::Lines, flat::Rows, kernels};
use crate::{
    backend::cpu::{
        dispatch::{InstructionSet, Variant},
        simd::TILE,
    },
    plan::{
        bits::{BitOrder, BitRule, OnePattern},
        loops::{Cursor, Loops},
    },
};

/// Elements that matter to a test: zero, one, the borders of what counts as 0, and noise.
fn element(index: usize, rule: BitRule) -> u64 {
    let noise = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    match noise >> 60 {
        0..=3 => 0,
        4 => rule.first_zero,
        5 => rule.first_zero.wrapping_sub(1),
        6 => rule.first_zero.wrapping_add(rule.span),
        7 => rule.first_zero.wrapping_add(rule.span).wrapping_add(1),
        _ => noise >> 17,
    }
}

fn rules_of(size: usize) -> Vec<BitRule> {
    let truth = BitRule { size, first_zero: 0, span: 0 };
    let signs: &[(u64, u64)] = match size {
        1 => &[(0x81, 0x7e), (3, 0)], // below zero, one value: no dtype has them yet
        2 => &[(0x8001, 0x7bff), (0x8001, 0x7f7f)],
        4 => &[(0x8000_0001, 0x7f7f_ffff)],
        8 => &[(0x8000_0000_0000_0001, 0x7fef_ffff_ffff_ffff)],
        _ => &[],
    };
    let signs = signs.iter().map(|&(first_zero, span)| BitRule { size, first_zero, span });
    std::iter::once(truth).chain(signs).collect()
}

/// Every instruction set, width, rule, order and length around a word, at an odd address.
fn for_every_case(mut check: impl FnMut(InstructionSet, BitRule, BitOrder, usize, &[u8])) {
    for set in InstructionSet::available() {
        for size in [1, 2, 4, 8] {
            for rule in rules_of(size) {
                let bytes: Vec<u8> =
                    (0..200).flat_map(|index| element(index, rule).to_le_bytes()[..size].to_vec()).collect();
                for order in [BitOrder::Big, BitOrder::Little] {
                    for bits in (0..=200).filter(|bits| bits % 64 < 18 || bits % 64 > 46) {
                        check(set, rule, order, bits, &bytes);
                    }
                }
            }
        }
    }
}

/// The bit of an element by the definition, and its mask in a byte.
fn model(bytes: &[u8], index: usize, rule: BitRule) -> bool {
    let mut word = [0; 8];
    word[..rule.size].copy_from_slice(&bytes[index * rule.size..][..rule.size]);
    let word = u64::from_le_bytes(word);
    word < rule.first_zero || word > rule.first_zero + rule.span
}

fn mask(order: BitOrder, index: usize) -> u8 {
    if order == BitOrder::Big { 0x80 >> (index % 8) } else { 1 << (index % 8) }
}

#[test]
fn packing_is_the_definition_in_every_instruction_set() {
    for_every_case(|set, rule, order, bits, bytes| {
        let mut src = vec![0xff; 1];
        src.extend(&bytes[..bits * rule.size]);
        let mut expected = vec![0; bits.div_ceil(8)];
        (0..bits)
            .filter(|&index| model(bytes, index, rule))
            .for_each(|index| expected[index / 8] |= mask(order, index));
        expected.push(0xee);
        let mut dst = vec![0xee; 1 + expected.len()];
        // SAFETY: the elements, and room for their bytes.
        unsafe {
            kernels::pack_rows(
                Variant::packing(set, rule),
                rule,
                order,
                src[1..].as_ptr(),
                bits,
                dst[1..].as_mut_ptr(),
                &Rows::ONE,
            )
        };
        assert_eq!(dst[1..], expected, "{} {rule:x?} {order:?} {bits}", set.name());
    });
}

#[test]
fn unpacking_is_the_definition_in_every_instruction_set() {
    for_every_case(|set, rule, order, bits, bytes| {
        let one = OnePattern { size: rule.size, pattern: 0x3ff0_1234_3f80_3c01 & (u64::MAX >> (64 - 8 * rule.size)) };
        let mut expected = Vec::new();
        for index in 0..bits {
            let set = bytes[index / 8] & mask(order, index) != 0;
            expected.extend(&(if set { one.pattern } else { 0 }).to_le_bytes()[..rule.size]);
        }
        expected.push(0xee);
        let mut dst = vec![0xee; 1 + expected.len()];
        // SAFETY: the bytes, and room for the elements.
        unsafe {
            kernels::unpack_rows(
                Variant::unpacking(set, rule.size),
                one,
                order,
                bytes.as_ptr(),
                bits,
                dst[1..].as_mut_ptr(),
                &Rows::ONE,
            )
        };
        assert_eq!(dst[1..], expected, "{} {one:x?} {order:?} {bits}", set.name());
    });
}

#[test]
fn rows_are_packed_and_unpacked_each_for_itself() {
    for_every_case(|set, rule, order, bits, bytes| {
        // Row j begins at element 3 * j and byte 26 * j, with a byte between that is nobody's.
        let size = rule.size;
        let rows = Rows { count: 3, steps: [3 * size as isize, 26] };
        let bits = bits.min(200 - 6);
        let (mut expected, mut dst) = (vec![0xee; 3 * 26], vec![0xee; 3 * 26]);
        for row in 0..3 {
            let ones = (0..bits).filter(|index| model(bytes, 3 * row + index, rule));
            expected[26 * row..][..bits.div_ceil(8)].fill(0);
            ones.for_each(|index| expected[26 * row + index / 8] |= mask(order, index));
        }
        // SAFETY: the elements, and room for their bytes.
        unsafe {
            kernels::pack_rows(Variant::packing(set, rule), rule, order, bytes.as_ptr(), bits, dst.as_mut_ptr(), &rows)
        };
        assert_eq!(dst, expected, "{} {rule:x?} {order:?} {bits}", set.name());

        let rows = Rows { count: 3, steps: [201 * size as isize, 26] };
        let one = OnePattern { size, pattern: 1 };
        let (mut elements, mut model) = (vec![0xdd; 3 * 201 * size], vec![0xdd; 3 * 201 * size]);
        for (row, index) in (0..3).flat_map(|row| (0..bits).map(move |index| (row, index))) {
            let set = u64::from(expected[26 * row + index / 8] & mask(order, index) != 0);
            model[(201 * row + index) * size..][..size].copy_from_slice(&set.to_le_bytes()[..size]);
        }
        // SAFETY: the bytes, and room for the elements.
        unsafe {
            kernels::unpack_rows(
                Variant::unpacking(set, rule.size),
                one,
                order,
                expected.as_ptr(),
                bits,
                elements.as_mut_ptr(),
                &rows,
            )
        };
        assert!(elements == model, "{} {one:x?} {order:?} {bits}: unpacking", set.name());
    });
}

#[test]
fn packing_across_is_packing_each_column() {
    for_every_case(|set, rule, order, columns, bytes| {
        for lines in [0, 1, 5, 8] {
            // Line j begins at element j: overlapping, as inputs may.
            let columns = columns.min(200 - 8);
            let expected: Vec<u8> = (0..columns)
                .map(|column| {
                    let ones = (0..lines).filter(|line| model(bytes, line + column, rule));
                    ones.map(|line| mask(order, line)).sum()
                })
                .collect();
            let mut dst = vec![0xee; columns];
            let stride = rule.size as isize;
            // SAFETY: the elements, and room for a byte a column.
            unsafe {
                kernels::pack_across(
                    Variant::packing(set, rule),
                    rule,
                    order,
                    bytes.as_ptr(),
                    Lines { count: lines, columns, stride },
                    dst.as_mut_ptr(),
                );
            }
            assert_eq!(dst, expected, "{} {rule:x?} {order:?} {columns} x {lines}", set.name());
        }
    });
}

#[test]
fn unpacking_across_is_unpacking_each_column() {
    for_every_case(|set, rule, order, columns, bytes| {
        let one = OnePattern { size: rule.size, pattern: 1 };
        for lines in [0, 1, 5, 8] {
            let width = columns * rule.size + 3;
            let mut expected = vec![0xee; 8 * width];
            for (line, column) in (0..lines).flat_map(|line| (0..columns).map(move |column| (line, column))) {
                let set = u64::from(bytes[column] & mask(order, line) != 0);
                let place = line * width + column * rule.size;
                expected[place..place + rule.size].copy_from_slice(&set.to_le_bytes()[..rule.size]);
            }
            let mut dst = vec![0xee; 8 * width];
            // SAFETY: the bytes, and room for lines `width` bytes apart.
            unsafe {
                let lines = Lines { count: lines, columns, stride: width as isize };
                kernels::unpack_across(
                    Variant::unpacking(set, rule.size),
                    one,
                    order,
                    bytes.as_ptr(),
                    dst.as_mut_ptr(),
                    lines,
                );
            }
            assert_eq!(dst, expected, "{} {one:x?} {order:?} {columns} x {lines}", set.name());
        }
    });
}

#[test]
fn runs_are_packed_and_unpacked_as_if_side_by_side() {
    for_every_case(|set, rule, order, bits, bytes| {
        // Every ninth length is all remainders of 64 that matter, in a tenth of the time.
        if !bits.is_multiple_of(9) {
            return;
        }
        let size = rule.size as i64;
        let one = OnePattern { size: rule.size, pattern: 0x3ff0_1234_3f80_3c01 & (u64::MAX >> (64 - 8 * rule.size)) };
        // Runs of 1 to 200 elements at small, negative, wide and odd strides.
        let runs =
            [(200, 2), (200, -1), (33, 1), (7, 3), (33, -5), (200, 9), (1, 1), (200, 3), (200, -4), (70, 7), (200, -8)];
        for (run, stride) in runs {
            for stride in [stride * size, stride * (size + 1)] {
                let mut loops = Loops::<1>::new();
                loops.push(200i64.div_euclid(run) + 1, [run * 73 * 8]);
                loops.push(run, [stride]);
                let mut places = Vec::new();
                let mut cursor = Cursor::starting_at(&loops, 0);
                while let Some(run) = cursor.next_run((bits - places.len()) as i64) {
                    places.extend((0..run.count).map(|index| run.offsets[0] + index * run.strides[0]));
                }
                // Memory with as much before the first element as negative strides need, and the elements spread.
                let middle = 200 * 81;
                let mut memory = vec![0xeeu8; 2 * middle + 400 * 73 * 8];
                for (index, place) in places.iter().enumerate() {
                    let at = (middle as i64 + place) as usize;
                    memory[at..at + rule.size].copy_from_slice(&bytes[index * rule.size..][..rule.size]);
                }
                let (mut expected, mut dst) = (vec![0xee; bits.div_ceil(8) + 1], vec![0xee; bits.div_ceil(8) + 1]);
                let mut cursor = Cursor::starting_at(&loops, 0);
                // SAFETY: the elements, and room for their bytes.
                unsafe {
                    kernels::pack_rows(
                        Variant::packing(set, rule),
                        rule,
                        order,
                        bytes.as_ptr(),
                        bits,
                        expected.as_mut_ptr(),
                        &Rows::ONE,
                    );
                    let base = memory.as_ptr().add(middle);
                    kernels::pack_runs(
                        Variant::packing(set, rule),
                        rule,
                        order,
                        &mut cursor,
                        base,
                        bits,
                        dst.as_mut_ptr(),
                    );
                }
                let case = format!("{} {rule:x?} {order:?} {bits} bits, runs of {run} at {stride}", set.name());
                assert_eq!(dst, expected, "{case}");

                // Back again, with the last byte missing: zeros there, and nothing else touched.
                memory.fill(0xdd);
                let mut model = memory.clone();
                let available = (bits / 8).saturating_sub(1);
                for (index, place) in places.iter().enumerate() {
                    let set = index / 8 < available && expected[index / 8] & mask(order, index) != 0;
                    let at = (middle as i64 + place) as usize;
                    let word = (if set { one.pattern } else { 0 }).to_le_bytes();
                    model[at..at + rule.size].copy_from_slice(&word[..rule.size]);
                }
                let mut cursor = Cursor::starting_at(&loops, 0);
                // SAFETY: the bytes, and room for the elements.
                unsafe {
                    let base = memory.as_mut_ptr().add(middle);
                    kernels::unpack_runs(
                        Variant::unpacking(set, rule.size),
                        one,
                        order,
                        (expected.as_ptr(), available),
                        &mut cursor,
                        base,
                        bits,
                    );
                }
                assert!(memory == model, "{case}: unpacking");
            }
        }
    });
}

#[test]
fn a_tile_is_transposed() {
    for set in InstructionSet::available() {
        for size in [1, 2, 4, 8] {
            let rule = BitRule { size, first_zero: 0, span: 0 };
            let bytes: Vec<u8> =
                (0..70 * 70).flat_map(|index| element(index, rule).to_le_bytes()[..size].to_vec()).collect();
            for (lines, columns) in [(64, 64), (64, 5), (64, 3), (3, 64), (63, 62), (1, 1)] {
                let (mut words, stride) = ([7; TILE], 70 * size);
                // SAFETY: 70 lines of 70 elements, of which the tile is a part.
                unsafe {
                    let tile = Lines { count: lines, columns, stride: stride as isize };
                    kernels::pack_tile(
                        Variant::packing(set, rule),
                        rule,
                        BitOrder::Little,
                        bytes.as_ptr(),
                        tile,
                        &mut words,
                    );
                };
                for (column, word) in words.iter().enumerate().take(columns) {
                    let ones = (0..lines).filter(|line| model(bytes[line * stride..].as_ref(), column, rule));
                    assert_eq!(*word, ones.map(|line| 1 << line).sum(), "{} {lines} x {columns}", set.name());
                }
                let mut expected = vec![0xee; bytes.len()];
                for (line, column) in (0..lines).flat_map(|line| (0..columns).map(move |column| (line, column))) {
                    let at = line * stride + column * size;
                    expected[at..at + size].copy_from_slice(&(words[column] >> line & 1).to_le_bytes()[..size]);
                }
                let mut dst = vec![0xee; bytes.len()];
                let one = OnePattern { size, pattern: 1 };
                // SAFETY: room for 70 lines of 70 elements, of which the tile is a part.
                unsafe {
                    let tile = Lines { count: lines, columns, stride: stride as isize };
                    kernels::unpack_tile(
                        Variant::unpacking(set, rule.size),
                        one,
                        BitOrder::Little,
                        &mut words,
                        dst.as_mut_ptr(),
                        tile,
                    );
                }
                assert!(dst == expected, "{} {lines} x {columns}", set.name());
            }
        }
    }
}
