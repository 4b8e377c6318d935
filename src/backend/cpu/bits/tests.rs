//! The kernels of every instruction set against the definition.

use super::{across::Lines, flat::Rows, gathered, kernels, narrow::Narrow};
use crate::{
    backend::cpu::{
        dispatch::{InstructionSet, Variant},
        simd::TILE,
    },
    plan::{
        bits::{BitOrder, BitPlan, BitRule, Layout, Patterns},
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
        let one =
            Patterns { size: rule.size, zero: 0, one: 0x3ff0_1234_3f80_3c01 & (u64::MAX >> (64 - 8 * rule.size)) };
        let mut expected = Vec::new();
        for index in 0..bits {
            let set = bytes[index / 8] & mask(order, index) != 0;
            expected.extend(&(if set { one.one } else { 0 }).to_le_bytes()[..rule.size]);
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
        let one = Patterns { size, zero: 0, one: 1 };
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
        let one = Patterns { size: rule.size, zero: 0, one: 1 };
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
        let one =
            Patterns { size: rule.size, zero: 0, one: 0x3ff0_1234_3f80_3c01 & (u64::MAX >> (64 - 8 * rule.size)) };
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
                    gathered::pack(Variant::packing(set, rule), rule, order, &mut cursor, base, bits, dst.as_mut_ptr());
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
                    let word = (if set { one.one } else { 0 }).to_le_bytes();
                    model[at..at + rule.size].copy_from_slice(&word[..rule.size]);
                }
                let mut cursor = Cursor::starting_at(&loops, 0);
                // SAFETY: the bytes, and room for the elements.
                unsafe {
                    let base = memory.as_mut_ptr().add(middle);
                    gathered::unpack(
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
                let one = Patterns { size, zero: 0, one: 1 };
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

/// Where memory of `counts` lies: from the outermost dimension in, so many elements from one to the next, with a gap
/// behind each of the innermost but one.
fn strides(counts: [i64; 3], gap: i64) -> [i64; 3] {
    [(counts[2] + gap) * counts[1], counts[2] + gap, 1]
}

/// A plan of packing `counts` elements along the axis 1 or 2 to bytes that lie `spacing` apart.
fn narrow_plan(size: usize, order: BitOrder, counts: [i64; 3], axis: usize, gap: i64, spacing: i64) -> BitPlan {
    let (mut packed, size_) = (counts, size as i64);
    packed[axis] = (counts[axis] + 7) / 8;
    let (from, to) = (strides(counts, gap), strides(packed, 0));
    let mut plan = BitPlan::new(size, order);
    for other in (0..3).filter(|&other| other != axis) {
        plan.rows.push(counts[other], [from[other] * size_, to[other] * spacing]);
    }
    plan.elements.push(counts[axis], [from[axis] * size_]);
    plan.bytes.push(packed[axis], [to[axis] * spacing]);
    plan
}

#[test]
fn narrow_rows_and_columns_are_packed_and_unpacked_by_the_definition() {
    let mut by_columns = 0;
    for set in InstructionSet::available() {
        for (case, width) in (2..=63).chain([2, 3, 4, 8, 9, 16]).enumerate() {
            let size = [1, 4, 2, 8][case % 4];
            let lines = [8, 2, 9, 15, 16, 17, 31, 64, 7][case % 9].max((16 / width + 1) * i64::from(case % 2 == 1));
            // So many groups that they are several blocks.
            let counts = [9000 / (lines * width) + 2, lines, width];
            for (axis, gap, spacing) in
                [(1, 0, 1), (1, 0, -3), (2, 0, 1), (2, 0, 2), (1, if width < 16 { 0 } else { 5 }, 1)]
            {
                for order in [BitOrder::Big, BitOrder::Little] {
                    let plan = narrow_plan(size, order, counts, axis, gap, spacing);
                    let Some(narrow) = Narrow::packing(&plan, plan.layout()) else {
                        assert!(axis == 2 && width > if size == 1 { 57 } else { 31 } || lines * width < 16, "{plan:?}");
                        continue;
                    };
                    by_columns += usize::from(matches!(plan.layout(), Layout::Columns { .. }));
                    let rule = *rules_of(size).last().unwrap();
                    let from = strides(counts, gap);
                    let elements: Vec<u8> = (0..(counts[0] * from[0]) as usize)
                        .flat_map(|index| element(index, rule).to_le_bytes()[..size].to_vec())
                        .collect();
                    let mut packed = counts;
                    packed[axis] = (counts[axis] + 7) / 8;
                    let to = strides(packed, 0);
                    let n_bytes = (packed[0] * to[0]) as usize;
                    let middle = if spacing < 0 { n_bytes * 3 } else { 0 };
                    // The definition: of every element, its bit.
                    let mut expected = vec![0xee; n_bytes * 3 + 1];
                    let place =
                        |at: [i64; 3]| (middle as i64 + (0..3).map(|d| at[d] * to[d]).sum::<i64>() * spacing) as usize;
                    let every = |counts: [i64; 3]| {
                        (0..counts[0] * counts[1] * counts[2])
                            .map(move |i| [i / counts[2] / counts[1], i / counts[2] % counts[1], i % counts[2]])
                    };
                    every(packed).for_each(|at| expected[place(at)] = 0);
                    for at in every(counts) {
                        let index = (0..3).map(|d| at[d] * from[d]).sum::<i64>() as usize;
                        let mut byte = at;
                        byte[axis] /= 8;
                        if model(&elements, index, rule) {
                            expected[place(byte)] |= mask(order, at[axis] as usize);
                        }
                    }
                    let case = format!("{} {rule:x?} {order:?} {counts:?} along {axis}, {gap}, {spacing}", set.name());
                    let mut dst = vec![0xee; expected.len()];
                    let (variant, half) = (Variant::packing(set, rule), narrow.count / 2 + 1);
                    for groups in [half..narrow.count, 0..half] {
                        // SAFETY: the elements of the plan, and room for its bytes.
                        unsafe {
                            let dst = dst.as_mut_ptr().add(middle);
                            narrow.pack(variant, rule, order, &groups, elements.as_ptr(), dst);
                        }
                    }
                    assert!(dst == expected, "{case}: packing");

                    let Some(narrow) = Narrow::unpacking(&plan, plan.layout()) else {
                        assert!(axis == 1 && width > 24, "{plan:?}");
                        continue;
                    };
                    let one = Patterns { size, zero: 0, one: 1 };
                    let mut unpacked = vec![0xdd; elements.len()];
                    let mut twin = unpacked.clone();
                    for at in every(counts) {
                        let index = (0..3).map(|d| at[d] * from[d]).sum::<i64>() as usize;
                        let bit = u64::from(model(&elements, index, rule));
                        twin[index * size..][..size].copy_from_slice(&bit.to_le_bytes()[..size]);
                    }
                    let variant = Variant::unpacking(set, size);
                    for groups in [half..narrow.count, 0..half] {
                        // SAFETY: the bytes of the plan, and room for its elements.
                        unsafe {
                            let src = expected.as_ptr().add(middle);
                            narrow.unpack(variant, one, order, &groups, src, unpacked.as_mut_ptr());
                        }
                    }
                    assert!(unpacked == twin, "{case}: unpacking");
                }
            }
        }
    }
    assert!(by_columns > 100, "only {by_columns} plans of columns");
}
