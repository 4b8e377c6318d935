//! Payloads and states that no codec has written.

use super::{random::Random, *};
use crate::error::Status;

/// Good payloads with a byte changed: which, to what, and what the refusal has to say.
const CHANGES: [(usize, u8, &str); 23] = [
    (0, b'X', "magic"),
    (3, 0, "magic"),
    (4, 2, "version 0x1"),
    (5, 1, "version"),
    (6, 2, "codec 0x1"),
    (8, 1, "dtype of values 0"),
    (9, 1, "dtype of results"),
    (10, 1, "scale rule"),
    (11, 1, "rounding"),
    (12, 1, "block"),
    (16, 3, "number of chunks 0x2"),
    (20, 7, "chunk number"),
    (24, 9, "number of segments 0x3"),
    (28, 1, "flags"),
    (28, 4, "flags"),
    (31, 0x80, "flags"),
    (32, 9, "number of elements"),
    (47, 0xff, "number of bytes"),
    (48, 0, "digest"),
    (56, 1, "last field"),
    (67, 0xbf, "scale -"), // of the first segment, below 0
    (68, 1, "scale 0"),    // of the second one, which has no elements
    (71, 0x80, "scale 0"), // -0
];

fn pair() -> Pair {
    Pair::new(InstructionSet::chosen(), rules(), &[100, 0, 100], 2, Some(0))
}

fn some_gradient(random: &mut Random, pair: &Pair) -> Vec<Vec<u32>> {
    pair.model.segments.iter().map(|&count| random.elements(Dtype::F32, count, 0)).collect()
}

#[test]
fn a_corrupt_chunk_is_refused_and_nothing_is_decoded() {
    let mut random = Random(9);
    let mut pair = pair();
    let gradient = some_gradient(&mut random, &pair);
    let payload = pair.encode(&gradient, [1.0; 2]);
    let stride = pair.plan.stride as usize;
    for (at, byte, words) in CHANGES {
        for chunk in 0..2 {
            let mut bad = payload.clone();
            bad[chunk * stride + at] = byte;
            // The second chunk holds none of the first segment: another sentence.
            if chunk == 1 && at == 67 {
                continue;
            }
            let mut values = [100, 0, 100].map(|count| Memory::new(Dtype::F32, count, 0));
            let untouched = values.each_ref().map(Memory::bits);
            let places = values.each_mut().map(Memory::address);
            let by = Decoding { dtype: Dtype::F32, divisor: 1, factor: None, add: false, behind_ours: false };
            let refusal =
                pair.codec.decode(&pair.plan, &Memory::of(Dtype::U8, &bad, 0).view(), &by, &places).unwrap_err();
            assert_eq!(refusal.status, Status::Corrupt);
            let expected = format!("test: chunk {chunk}: {words}");
            assert!(refusal.message.starts_with(&expected), "{}: {expected} expected", refusal.message);
            assert_eq!(values.each_ref().map(Memory::bits), untouched);
        }
    }
    pair.model.flags |= 1;
    pair.check();
}

#[test]
fn reducing_a_corrupt_chunk_says_so_and_keeps_the_state() {
    let mut random = Random(10);
    let mut pair = pair();
    let gradient = some_gradient(&mut random, &pair);
    let payload = pair.encode(&gradient, [1.0; 2]);
    let stride = pair.plan.stride as usize;
    let good = &payload[..stride];
    pair.reduce(&[good]);
    let state = pair.state();
    for (at, byte, words) in CHANGES {
        let mut chunks = [good, good, good].concat();
        chunks[stride + at] = byte;
        let mut dst = Memory::new(Dtype::U8, stride, 0);
        let refusal = pair
            .codec
            .reduce(&pair.plan, Received::of(&Memory::of(Dtype::U8, &chunks, 0).view(), pair.plan.stride), &dst.view())
            .unwrap_err();
        assert_eq!(refusal.status, Status::Corrupt);
        let expected = format!("test[1]: {words}");
        assert!(refusal.message.starts_with(&expected), "{}: {expected} expected", refusal.message);
        let mut flagged = good.to_vec();
        flagged[28] = 1;
        flagged[64..].fill(0);
        assert_same("flagged chunk", dst.bytes(), &flagged);
        assert_same("state", &pair.state(), &state);
    }
    pair.model.flags |= 1;
    pair.check();
}

#[test]
fn zeros_and_bits_that_fill_up_are_not_looked_at() {
    for rules in [rules(), Rules { kind: Kind::Sign, error: None, ..rules() }] {
        bits_that_fill_up_are_not_looked_at(rules);
    }
}

fn bits_that_fill_up_are_not_looked_at(rules: Rules) {
    let mut random = Random(11);
    let mut pair = Pair::new(InstructionSet::chosen(), rules, &[100, 0, 100], 2, Some(0));
    let gradient = some_gradient(&mut random, &pair);
    let payload = pair.encode(&gradient, [1.0; 2]);
    let (head, stride) = (pair.plan.head as usize, pair.plan.stride as usize);
    let mut odd = payload.clone();
    odd[76..head].fill(0xff);
    odd[stride - 1] = 0xff;
    odd[head + 12] |= 0x0f; // of the first segment's last byte
    let by = Decoding { dtype: Dtype::F32, divisor: 1, factor: None, add: false, behind_ours: false };
    let [expected, got] = [&payload, &odd].map(|payload| {
        let mut values = [100, 0, 100].map(|count| Memory::new(Dtype::F32, count, 0));
        let places = values.each_mut().map(Memory::address);
        pair.codec.decode(&pair.plan, &Memory::of(Dtype::U8, payload, 0).view(), &by, &places).unwrap();
        values.each_ref().map(Memory::bits)
    });
    assert_eq!(got, expected);
    let expected = pair.reduce(&[&payload[..stride]]);
    pair.codec.reset(&pair.plan).unwrap();
    let mut dst = Memory::new(Dtype::U8, stride, 0);
    pair.codec
        .reduce(
            &pair.plan,
            Received::of(&Memory::of(Dtype::U8, &odd[..stride], 0).view(), pair.plan.stride),
            &dst.view(),
        )
        .unwrap();
    assert_same("reduced chunk", dst.bytes(), &expected);
}

#[test]
fn a_state_of_something_else_is_refused() {
    let mut random = Random(12);
    let mut pair = pair();
    let gradient = some_gradient(&mut random, &pair);
    pair.encode(&gradient, [1.0; 2]);
    let state = pair.state();
    for at in (0..56).chain([67, 79]) {
        let mut bad = state.clone();
        bad[at] ^= 0x80;
        let refusal = pair.codec.state_in(&pair.plan, &Memory::of(Dtype::U8, &bad, 0).view()).unwrap_err();
        assert_eq!(refusal.status, Status::Corrupt, "byte {at}");
        assert_same("state", &pair.state(), &state);
    }
    let mut later = state.clone();
    later[56..64].fill(0xff);
    pair.codec.state_in(&pair.plan, &Memory::of(Dtype::U8, &later, 0).view()).unwrap();
    assert_same("state", &pair.state(), &later);
}
