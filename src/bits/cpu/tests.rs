//! Both paths against the definition, in every instruction set.

use crate::{
    bits::plan::{BitOrder, BitPlan},
    cpu::{InstructionSet, dispatch::Variant},
    dlpack::rules::{BitRule, Patterns},
};

use super::{Job, flat::Rows, kernels};
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
fn rows_at_odd_addresses_are_packed_and_unpacked_by_the_definition_each_for_itself() {
    for_every_case(|set, rule, order, bits, bytes| {
        // Row j begins at element 3 * j and byte 26 * j, with an unused byte between rows.
        let size = rule.size;
        let rows = Rows { count: 3, steps: [3 * size as isize, 26] };
        let bits = bits.min(200 - 6);
        let src: Vec<u8> = [0xff].iter().chain(bytes).copied().collect();
        let (mut expected, mut dst) = (vec![0xee; 3 * 26], vec![0xee; 1 + 3 * 26]);
        for row in 0..3 {
            let ones = (0..bits).filter(|index| model(bytes, 3 * row + index, rule));
            expected[26 * row..][..bits.div_ceil(8)].fill(0);
            ones.for_each(|index| expected[26 * row + index / 8] |= mask(order, index));
        }
        let (variant, to) = (Variant::packing(set, rule), dst[1..].as_mut_ptr());
        // SAFETY: the elements, and room for their bytes.
        unsafe { kernels::pack_rows(variant, rule, order, src[1..].as_ptr(), bits, to, &rows) };
        assert_eq!(dst[1..], expected, "{} {rule:x?} {order:?} {bits}", set.name());

        let rows = Rows { count: 3, steps: [201 * size as isize, 26] };
        let one = Patterns { size, zero: 0, one: 0x3ff0_1234_3f80_3c01 & (u64::MAX >> (64 - 8 * size)) };
        let (mut elements, mut model) = (vec![0xdd; 1 + 3 * 201 * size], vec![0xdd; 3 * 201 * size]);
        for (row, index) in (0..3).flat_map(|row| (0..bits).map(move |index| (row, index))) {
            let word = if expected[26 * row + index / 8] & mask(order, index) != 0 { one.one } else { 0 };
            model[(201 * row + index) * size..][..size].copy_from_slice(&word.to_le_bytes()[..size]);
        }
        let (variant, to) = (Variant::unpacking(set, size), elements[1..].as_mut_ptr());
        // SAFETY: the bytes, and room for the elements.
        unsafe { kernels::unpack_rows(variant, one, order, expected.as_ptr(), bits, to, &rows) };
        assert!(elements[1..] == model, "{} {one:x?} {order:?} {bits}: unpacking", set.name());
    });
}

/// A number below `bound`, of a generator that keeps its state in `state`.
fn below(state: &mut u64, bound: i64) -> i64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) as i64 % bound
}

/// The places of `counts` items in memory: dimensions in a random order, some with gaps, some backwards. The strides are
/// in items; the second result is where item 0 lies, the third how many places there are.
fn random_layout(state: &mut u64, counts: &[i64]) -> (Vec<i64>, i64, i64) {
    let (mut strides, mut start, mut room) = (vec![0; counts.len()], 0, 1);
    let mut left: Vec<usize> = (0..counts.len()).collect();
    while !left.is_empty() {
        let dim = left.remove(below(state, left.len() as i64) as usize);
        let step = room * [1, 1, 1, 2, 3][below(state, 5) as usize];
        strides[dim] = step;
        if below(state, 5) == 0 {
            strides[dim] = -step;
            start += (counts[dim] - 1) * step;
        }
        room = step * (counts[dim] - 1) + room + [0, 0, 5][below(state, 3) as usize];
    }
    (strides, start, room)
}

/// The place of every index, in C order.
fn places(counts: &[i64], strides: &[i64], start: i64) -> Vec<usize> {
    let dims = counts.iter().zip(strides);
    let places = dims.fold(vec![start], |places, (&count, &stride)| {
        places.iter().flat_map(|place| (0..count).map(move |index| place + index * stride)).collect()
    });
    places.into_iter().map(|place| place as usize).collect()
}

#[test]
fn every_layout_is_packed_and_unpacked_by_the_definition() {
    let mut state = 5;
    for (case, set) in (0..300).flat_map(|case| InstructionSet::available().map(move |set| (case, set))) {
        let mut random = |bound| below(&mut state, bound);
        let size = [1, 1, 2, 4, 8][random(5) as usize];
        let order = [BitOrder::Big, BitOrder::Little][random(2) as usize];
        let rule = rules_of(size)[random(rules_of(size).len() as i64) as usize];
        let counts: Vec<i64> =
            (0..1 + random(4)).map(|_| [1, 2, 3, 5, 8, 9, 33, 70, 130][random(9) as usize]).collect();
        let axis = Some(random(counts.len() as i64) as usize).filter(|_| random(3) > 0);
        if counts.iter().product::<i64>() > 40_000 {
            continue;
        }
        // Sometimes a byte more than the elements need.
        let more = random(2);
        let all = counts.iter().product::<i64>();
        let (along, byte_counts) = match axis {
            Some(axis) => {
                let mut bytes = counts.clone();
                bytes[axis] = (counts[axis] + 7) / 8 + more;
                (counts[axis], bytes)
            }
            None => (all, vec![(all + 7) / 8 + more]),
        };
        let (strides, start, room) = random_layout(&mut state, &counts);
        let (byte_strides, byte_start, byte_room) = random_layout(&mut state, &byte_counts);
        let mut plan = BitPlan::new(size, order);
        plan.start = start * size as i64;
        for dim in 0..counts.len() {
            let (count, stride) = (counts[dim], strides[dim] * size as i64);
            match axis {
                Some(axis) if axis != dim => plan.rows.push(count, [stride, byte_strides[dim]]),
                _ => plan.elements.push(count, [stride]),
            }
        }
        let axis_of_bytes = axis.unwrap_or(0);
        plan.bytes.push(byte_counts[axis_of_bytes], [byte_strides[axis_of_bytes]]);

        // The definition: element i of a row has bit i % 8 of byte i / 8 of that row.
        let elements: Vec<u8> =
            (0..room as usize).flat_map(|at| element(at, rule).to_le_bytes()[..size].to_vec()).collect();
        let element_places = places(&counts, &strides, start);
        let byte_places = places(&byte_counts, &byte_strides, byte_start);
        let inside: i64 = axis.map_or(1, |axis| counts[axis + 1..].iter().product());
        let byte_of = |index: i64| {
            let (row, at) = (index / (along * inside), index / inside % along);
            let byte = (row * byte_counts[axis_of_bytes] + at / 8) * inside + index % inside;
            (byte_places[byte as usize], mask(order, at as usize))
        };
        let mut expected = vec![0xee; byte_room as usize + 1];
        byte_places.iter().for_each(|&place| expected[place] = 0);
        for index in 0..all {
            let (byte, mask) = byte_of(index);
            expected[byte] |= if model(&elements, element_places[index as usize], rule) { mask } else { 0 };
        }
        let name = format!("case {case}, {}: {rule:x?} {order:?} {counts:?} {strides:?} {axis:?}", set.name());
        let mut dst = vec![0xee; expected.len()];
        let bytes = dst.as_mut_ptr().wrapping_add(byte_start as usize);
        Job::new(&plan, Variant::packing(set, rule), elements.as_ptr().cast_mut(), bytes).pack(rule);
        assert!(dst == expected, "{name}: packing");

        let patterns = Patterns { size, zero: 0, one: 0x3ff0_1234_3f80_3c01 & (u64::MAX >> (64 - 8 * size)) };
        let mut unpacked = vec![0xdd; elements.len() + 1];
        let mut twin = unpacked.clone();
        for index in 0..all {
            let (byte, mask) = byte_of(index);
            let word = if expected[byte] & mask != 0 { patterns.one } else { 0 };
            twin[element_places[index as usize] * size..][..size].copy_from_slice(&word.to_le_bytes()[..size]);
        }
        Job::new(&plan, Variant::unpacking(set, size), unpacked.as_mut_ptr(), bytes).unpack(|_| (patterns, i64::MAX));
        assert!(unpacked == twin, "{name}: unpacking");

        // Without the last byte of each row: zeros.
        plan.bytes.clear();
        plan.bytes.push(byte_counts[axis_of_bytes] - 1, [byte_strides[axis_of_bytes]]);
        for index in 0..all {
            if index / inside % along / 8 == byte_counts[axis_of_bytes] - 1 {
                twin[element_places[index as usize] * size..][..size].fill(0);
            }
        }
        Job::new(&plan, Variant::unpacking(set, size), unpacked.as_mut_ptr(), bytes).unpack(|_| (patterns, i64::MAX));
        assert!(unpacked == twin, "{name}: unpacking without the last byte");
    }
}

#[test]
fn long_rows_whose_neighbours_in_memory_lie_far_apart_are_packed_and_unpacked() {
    // Transposed matrices: of whole bytes a row, of a few bits more, and too long for a buffer of several rows.
    for (size, [lines, columns]) in [(1, [4096, 130]), (1, [1001, 333]), (4, [513, 201]), (1, [300_001, 3])] {
        let rule = rules_of(size)[0];
        let mut plan = BitPlan::new(size, BitOrder::Little);
        plan.elements.push(columns, [size as i64]);
        plan.elements.push(lines, [columns * size as i64]);
        plan.bytes.push((lines * columns + 7) / 8, [1]);
        let count = (lines * columns) as usize;
        let elements: Vec<u8> = (0..count).flat_map(|at| element(at, rule).to_le_bytes()[..size].to_vec()).collect();
        let places = places(&[columns, lines], &[1, columns], 0);
        let (mut expected, mut dst) = (vec![0; count.div_ceil(8)], vec![0xee; count.div_ceil(8)]);
        for (index, &place) in places.iter().enumerate() {
            expected[index / 8] |= u8::from(model(&elements, place, rule)) << (index % 8);
        }
        for set in InstructionSet::available() {
            let variant = Variant::packing(set, rule);
            Job::new(&plan, variant, elements.as_ptr().cast_mut(), dst.as_mut_ptr()).pack(rule);
            assert!(dst == expected, "{} {lines} x {columns} of {size}", set.name());
            let patterns = Patterns { size, zero: 0, one: 1 };
            let mut unpacked = vec![0xee; elements.len()];
            Job::new(&plan, Variant::unpacking(set, size), unpacked.as_mut_ptr(), dst.as_mut_ptr())
                .unpack(|_| (patterns, i64::MAX));
            for (index, &place) in places.iter().enumerate() {
                let word = u64::from(expected[index / 8] >> (index % 8) & 1);
                assert_eq!(unpacked[place * size..][..size], word.to_le_bytes()[..size], "{lines} x {columns} {index}");
            }
        }
    }
}
