//! Steps of codecs with all kinds of rules.

use super::{random::Random, *};

const SIZES: [usize; 10] = [0, 1, 7, 1023, 1024, 1025, 65535, 65536, 65537, 100_003];

fn gradient(random: &mut Random, pair: &Pair, wild: u64) -> Vec<Vec<u32>> {
    pair.model.segments.iter().map(|&count| random.elements(pair.plan.rules.values, count, wild)).collect()
}

/// `steps` steps of encoding, decoding and, with a server, reducing.
fn run(random: &mut Random, pair: &mut Pair, steps: usize, wild: u64) {
    for step in 0..steps {
        let gradient = gradient(random, pair, wild);
        let factors = if step % 2 == 0 { [1.0; 2] } else { [random.tame(), random.of(&[0.5, 1.7])] };
        let payload = pair.encode(&gradient, factors);
        if let Some(server) = pair.plan.server {
            let stride = pair.plan.stride as usize;
            let own = &payload[server * stride..][..stride];
            let mut others = Vec::new();
            for _ in 0..random.below(if pair.plan.elements > 20_000 { 2 } else { 5 }) {
                let segments = pair.model.segments.clone();
                let mut other =
                    Pair::new(pair.codec.set, pair.plan.rules, &segments, pair.plan.n_chunks, pair.plan.server);
                let gradient: Vec<Vec<u32>> =
                    segments.iter().map(|&count| random.elements(pair.plan.rules.values, count, wild)).collect();
                others.push(other.encode(&gradient, [1.0; 2])[server * stride..][..stride].to_vec());
            }
            let mut chunks = vec![own];
            chunks.extend(others.iter().map(Vec::as_slice));
            pair.reduce(&chunks);
        }
        match step % 3 {
            0 => pair.decode(&payload, 1, 1.0, random.of(&DTYPES), None),
            1 => pair.decode(&payload, random.of(&[3, 16_777_217, i32::MAX]), 1.3e5, random.of(&DTYPES), None),
            _ => {
                let old: Vec<Vec<f32>> =
                    pair.model.segments.iter().map(|&count| (0..count).map(|_| random.tame()).collect()).collect();
                pair.decode(&payload, 7, -0.3, Dtype::F32, Some(&old));
            }
        }
        if pair.codec.transactional {
            match random.below(4) {
                0 => pair.commit(true),
                1 => {} // the next encode commits
                _ => pair.commit(false),
            }
        }
        pair.check();
    }
}

fn some_rules(random: &mut Random) -> Rules {
    let kind = random.of(&[Kind::Onebit, Kind::Onebit, Kind::Onebit, Kind::Sign]);
    Rules {
        kind,
        values: random.of(&DTYPES),
        results: random.of(&DTYPES),
        error: if kind == Kind::Sign { None } else { random.of(&[Some(Dtype::F32), Some(Dtype::BF16), None]) },
        scale: random.of(&[ScaleRule::Rms, ScaleRule::Mean]),
        reduction: Reduction::Mean,
        beta: random.of(&[1.0, 0.9]),
        policy: random.of(&[NonFinite::Propagate, NonFinite::Zero, NonFinite::Transactional]),
    }
}

#[test]
fn every_size_and_dtype_is_the_models() {
    let mut random = Random(1);
    for set in InstructionSet::available() {
        for size in SIZES {
            for values in DTYPES {
                for error in [Some(Dtype::F32), Some(Dtype::BF16), None] {
                    let rules = Rules { values, error, ..rules() };
                    run(&mut random, &mut Pair::new(set, rules, &[size], 1, Some(0)), 2, 0);
                }
            }
        }
    }
}

#[test]
fn all_kinds_of_rules_segments_and_chunks_are_the_models() {
    for set in InstructionSet::available() {
        let mut random = Random(2);
        for case in 0..150 {
            let rules = some_rules(&mut random);
            let largest = if case % 40 == 0 { 100_003 } else { 3000 };
            let segments: Vec<usize> = (0..1 + random.below(9))
                .map(|_| if random.below(4) == 0 { 0 } else { random.below(largest) as usize })
                .collect();
            let bytes: usize = segments.iter().map(|count| count.div_ceil(8)).sum();
            let n_chunks = match random.below(4) {
                0 => 1,
                1 => bytes.min(300) + 3, // with small segments more than bytes
                _ => 1 + random.below(9) as usize,
            };
            let server = (random.below(3) > 0).then(|| random.below(n_chunks as u64) as usize);
            let wild = random.of(&[0, 0, 2000, 20]);
            let name = set.name();
            eprintln!("{name} case {case}: {rules:?} {segments:?} in {n_chunks}, server {server:?}, wild {wild}");
            run(&mut random, &mut Pair::new(set, rules, &segments, n_chunks, server), 4, wild);
        }
    }
}

#[test]
fn any_number_of_threads_computes_the_same() {
    for threads in 1..=4 {
        pool::set_threads(threads).unwrap();
        let mut random = Random(3);
        for rules in [rules(), Rules { values: Dtype::BF16, error: Some(Dtype::BF16), ..rules() }] {
            let segments = [300_001, 0, 5, 200_000, 70_001];
            run(&mut random, &mut Pair::new(InstructionSet::chosen(), rules, &segments, 3, Some(1)), 2, 0);
        }
        let sign = Rules { kind: Kind::Sign, error: None, ..rules() };
        run(&mut random, &mut Pair::new(InstructionSet::chosen(), sign, &[400_000, 300_000], 2, Some(0)), 2, 0);
    }
    pool::set_threads(0).unwrap();
}

#[test]
fn a_state_goes_out_in_and_on() {
    let mut random = Random(4);
    for rules in [
        rules(),
        Rules { error: Some(Dtype::BF16), policy: NonFinite::Transactional, ..rules() },
        Rules { kind: Kind::Sign, error: None, ..rules() },
        Rules { error: None, ..rules() },
    ] {
        let set = InstructionSet::chosen();
        let mut first = Pair::new(set, rules, &[1500, 0, 9], 2, Some(1));
        run(&mut random, &mut first, 3, 0);
        first.commit(false);
        let state = first.state();
        assert_same("state", &state, &first.model.state());
        let mut second = Pair::new(set, rules, &[1500, 0, 9], 2, Some(1));
        // What fills up is not taken over.
        let mut odd = state.clone();
        if rules.error.is_some() {
            let last = odd.len() - 1;
            odd[last] = 0x7f;
        }
        second.codec.state_in(&second.plan, &Memory::of(Dtype::U8, &odd, 0).view()).unwrap();
        assert_same("state", &second.state(), &state);
        second.model = first.model;
        second.model.flags = 0;
        second.model.since_commit = 0;
        run(&mut random, &mut second, 3, 0);
        second.codec.reset(&second.plan).unwrap();
        second.model = Model::new(rules, &[1500, 0, 9], 2, Some(1));
        assert!(!second.codec.is_pending());
        run(&mut random, &mut second, 1, 0);
    }
}

#[test]
fn errors_go_out_and_in() {
    let mut random = Random(5);
    for error in [Some(Dtype::F32), Some(Dtype::BF16), None] {
        let rules = Rules { error, ..rules() };
        let mut pair = Pair::new(InstructionSet::chosen(), rules, &[1500, 0, 9], 2, Some(1));
        run(&mut random, &mut pair, 3, 2000);
        for half in 0..2 {
            let count = pair.model.errors(half).len();
            let mut out = Memory::new(Dtype::F32, count, 1);
            let view = out.view();
            let views = if half == 0 { (Some(&view), None) } else { (None, Some(&view)) };
            pair.codec.errors_out(&pair.plan, views.0, views.1).unwrap();
            let expected: Vec<u32> = pair.model.errors(half).iter().map(|error| error.to_bits()).collect();
            assert_eq!(out.bits(), expected, "errors of half {half}");
        }
        let errors: [Vec<f32>; 2] = [0, 1].map(|half| pair.model.errors(half).iter().map(|_| random.tame()).collect());
        let mut memory = errors.each_ref().map(|errors| Memory::of_floats(errors));
        let [worker, server] = &mut memory;
        pair.codec.errors_in(&pair.plan, Some(&worker.view()), Some(&server.view())).unwrap();
        for (half, errors) in errors.iter().enumerate() {
            pair.model.set_errors(half, errors);
        }
        pair.codec.scales.fill(0.0);
        assert_same("state", &pair.state(), &pair.model.state());
        run(&mut random, &mut pair, 2, 0);
    }
}

#[test]
fn a_scalar_takes_a_step_back_unless_it_is_0() {
    let transactional = Rules { policy: NonFinite::Transactional, ..rules() };
    let int = Dtype { size: 4, ..Dtype::U8 };
    for (dtype, bytes, taken_back) in [
        (Dtype::BOOL, &[0u8][..], false),
        (Dtype::BOOL, &[1], true),
        (int, &[0, 0, 0, 0], false),
        (int, &[0, 0, 0, 0x80], true),
        (Dtype::F32, &[0, 0, 0, 0], false),
        (Dtype::F32, &[0, 0, 0, 0x80], false),   // -0
        (Dtype::F32, &[1, 0, 0, 0], true),       // the smallest denormal
        (Dtype::F32, &[0, 0, 0xc0, 0x7f], true), // NaN
    ] {
        let mut pair = Pair::new(InstructionSet::chosen(), transactional, &[1], 1, None);
        pair.encode(&[vec![0x3f80_0000]], [1.0; 2]);
        let before = pair.state();
        pair.codec.commit(Skip::If(&Memory::of(dtype, bytes, 1).view())).unwrap();
        assert_eq!(pair.state() == before, taken_back, "{dtype} {bytes:x?}");
        pair.model.commit(taken_back);
        pair.check();
    }
}

/// docs/NUMERICS.md, the example by hand.
#[test]
fn the_example_by_hand_comes_out() {
    let mut pair = Pair::new(InstructionSet::chosen(), rules(), &[2], 1, None);
    let first = pair.encode(&[vec![0x3f80_0000, 0xc0e0_0000]], [1.0; 2]);
    let mut expected = b"GCPL\x01\0\x01\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0".to_vec();
    expected.extend(b"\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x07\xce\xf8\x3d\x44\x86\xbd\xe6\0\0\0\0\0\0\0\0");
    expected.extend(b"\0\0\xa0\x40\0\0\0\0\0\0\0\0\0\0\0\0\x80\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_same("payload", &first, &expected);
    assert_eq!(pair.model.errors(0), [-4.0, -2.0]);
    let second = pair.encode(&[vec![0x4000_0000, 0x4080_0000]], [1.0; 2]);
    expected[64..68].copy_from_slice(&2f32.to_le_bytes());
    expected[80] = 0x40;
    assert_same("payload", &second, &expected);
    assert_eq!(pair.model.errors(0), [0.0, 0.0]);
}
