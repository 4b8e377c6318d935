//! Block codecs of every instruction set against the model of docs/NUMERICS.md 11, byte for byte.

use super::{block_model, block_model::Model, random::Random, *};

const KINDS: [Kind; 5] = [Kind::Bf16, Kind::Mxfp8, Kind::Int8, Kind::Int4, Kind::Mxfp4];

/// A codec and its model.
struct Blocks {
    plan: CodecPlan,
    codec: Codec,
    model: Model,
}

/// Values as memory has them, one for each segment, and where they begin.
fn memory_of(dtype: Dtype, values: &[Vec<u32>]) -> (Vec<Memory>, Vec<Address>) {
    let mut memory: Vec<Memory> = (values.iter().enumerate())
        .map(|(segment, bits)| {
            let bytes: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()[..dtype.size].to_vec()).collect();
            Memory::of(dtype, &bytes, segment % 3)
        })
        .collect();
    let addresses = memory.iter_mut().map(Memory::address).collect();
    (memory, addresses)
}

fn bits_of(values: &[Vec<f32>]) -> Vec<Vec<u32>> {
    values.iter().map(|values| values.iter().map(|value| value.to_bits()).collect()).collect()
}

impl Blocks {
    fn new(
        set: InstructionSet, rules: Rules, segments: &[usize], raw: &[bool], n_chunks: usize, server: Option<usize>,
    ) -> Self {
        let counts: Vec<i64> = segments.iter().map(|&count| count as i64).collect();
        let raws: Vec<u8> = raw.iter().map(|&raw| u8::from(raw) * 3).collect();
        let plan = CodecPlan::new(rules, &counts, &raws, n_chunks, server).unwrap();
        let mut codec = Codec::new(&plan).unwrap();
        codec.set = set;
        Self { plan, codec, model: Model::new(rules, segments, raw, n_chunks, server) }
    }

    /// Of one segment, as f32 errors and values have it.
    fn plain(set: InstructionSet, kind: Kind, elements: usize, error: Option<Dtype>) -> Self {
        Self::new(set, Rules { kind, error, ..rules() }, &[elements], &[false], 1, None)
    }

    /// Encodes a gradient given as bits; the payload, which is the model's.
    fn encode(&mut self, gradient: &[Vec<u32>], factors: [f32; 2]) -> Vec<u8> {
        let dtype = self.plan.rules.values;
        let (_memory, values) = memory_of(dtype, gradient);
        let mut payload = Memory::new(Dtype::U8, self.plan.payload_bytes() as usize, 0);
        let mut factor_memory = factors.map(|factor| Memory::of_floats(&[factor]));
        let [first, second] = &mut factor_memory;
        let (first, second) = (first.view(), second.view());
        self.codec.encode(&self.plan, &values, [Some(&first), Some(&second)], &payload.view()).unwrap();
        let widened: Vec<Vec<f32>> =
            gradient.iter().map(|bits| bits.iter().map(|&bits| numbers::widen(dtype, bits)).collect()).collect();
        let expected = self.model.encode(&widened, factors);
        assert_same("payload", payload.bytes(), &expected);
        expected
    }

    fn decode(&mut self, payload: &[u8], divisor: i32, factor: f32, dtype: Dtype, old: Option<&[Vec<f32>]>) {
        let mut payload_memory = Memory::of(Dtype::U8, payload, 0);
        let none: Vec<Vec<u32>> = self.model.segments.iter().map(|&count| vec![0x5555; count]).collect();
        let (memory, values) = memory_of(dtype, &old.map_or(none, bits_of));
        let mut factor_memory = Memory::of_floats(&[factor]);
        let factor_view = factor_memory.view();
        let by = Decoding { dtype, divisor, factor: Some(&factor_view), add: old.is_some(), behind_ours: false };
        self.codec.decode(&self.plan, &payload_memory.view(), &by, &values).unwrap();
        let expected = self.model.decode(payload, divisor, factor, dtype, old);
        for (segment, (memory, expected)) in memory.iter().zip(&expected).enumerate() {
            assert_eq!(memory.bits(), *expected, "values of segment {segment}");
        }
    }

    fn reduce(&mut self, chunks: &[&[u8]]) -> Vec<u8> {
        let mut src = Memory::of(Dtype::U8, &chunks.concat(), 0);
        let mut dst = Memory::new(Dtype::U8, self.plan.stride as usize, 0);
        self.codec.reduce(&self.plan, Received::of(&src.view(), self.plan.stride), &dst.view()).unwrap();
        let expected = self.model.reduce(chunks);
        assert_same("reduced chunk", dst.bytes(), &expected);
        expected
    }

    /// The same in two halves, with the shard as the first leaves it between them.
    fn reduce_in_halves(&mut self, chunks: &[&[u8]]) {
        let mut src = Memory::of(Dtype::U8, &chunks.concat(), 0);
        let [mut room, mut dst] = [0; 2].map(|_| Memory::new(Dtype::U8, self.plan.stride as usize, 0));
        let number = self.plan.server.unwrap();
        let none: Vec<Vec<u32>> =
            (0..self.model.segments.len()).map(|i| vec![7; self.model.part(i, number).len()]).collect();
        let (memory, shard) = memory_of(Dtype::F32, &none);
        self.codec.mean(&self.plan, &src.view(), &room.view(), &shard).unwrap();
        let expected: Vec<Vec<f32>> = self.model.mean(chunks);
        let canonical = |value: f32| numbers::canonical(value).to_bits();
        for (memory, expected) in memory.iter().zip(&expected) {
            assert_eq!(memory.bits(), expected.iter().map(|&value| canonical(value)).collect::<Vec<_>>(), "shard");
        }
        self.codec.encode_shard(&self.plan, &shard, &dst.view()).unwrap();
        assert_same("chunk of a shard", dst.bytes(), &self.model.encode_shard(&expected));
    }

    fn state(&mut self) -> Vec<u8> {
        let mut state = Memory::new(Dtype::U8, self.plan.state_bytes as usize, 0);
        self.codec.state_out(&self.plan, &state.view()).unwrap();
        state.bytes().to_vec()
    }

    fn take_flags(&mut self) -> u32 {
        let mut flags = Memory::new(Dtype { size: 4, ..Dtype::U8 }, 1, 1);
        self.codec.take_flags(&flags.view()).unwrap();
        flags.bits()[0]
    }

    /// That state, errors and flags are those of the model. Takes the flags.
    fn check(&mut self) {
        assert_same("state", &self.state(), &self.model.state());
        let counts = [self.plan.elements, self.plan.server_elements()].map(|count| count as usize);
        let mut memory = counts.map(|count| Memory::new(Dtype::F32, count, 1));
        let [worker, server] = &mut memory;
        let server = self.plan.server.map(|_| server.view());
        self.codec.errors_out(&self.plan, Some(&worker.view()), server.as_ref()).unwrap();
        let halves = self.plan.state_halves();
        for (memory, errors) in memory.iter().zip(&self.model.errors).take(halves) {
            assert_eq!(memory.bits(), bits_of(errors).concat(), "errors");
        }
        assert_eq!(self.take_flags(), std::mem::take(&mut self.model.flags), "flags");
    }
}

/// Blocks of every magnitude: any bits; what lies around M * 2^k; ties between codes; zeros and denormals.
fn all_magnitudes(random: &mut Random, kind: Kind) -> Vec<u32> {
    let (_, block, _, most) = block_model::format(kind);
    let most = if most == 0.0 { 1.0f32 } else { most };
    let mut all = vec![];
    let put = |all: &mut Vec<u32>, value: f32| {
        all.push(if value.abs() < f32::from_bits(0x7f00_0000) { value.to_bits() } else { 1f32.to_bits() });
    };
    for exponent in -149..127 {
        let scale = 2f64.powi(exponent);
        // Random ones of about one size, with one that decides the scale.
        for index in 0..block {
            let size = if index == 3 { 1.0 } else { 2f64.powi(-(random.below(14) as i32)) };
            put(&mut all, (f64::from(random.tame()) * size * scale) as f32);
        }
        // Each a largest of its own block.
        for beside in -2i32..=2 {
            let largest = f32::from_bits(
                ((f64::from(most) * scale) as f32).to_bits().wrapping_add_signed(beside).min(0x7eff_ffff),
            );
            put(&mut all, largest);
            (1..block).for_each(|index| put(&mut all, largest * (index as f32 / block as f32)));
        }
        // Ties: halves of integers and of the steps of floats, below a largest that is M.
        put(&mut all, (f64::from(most) * scale) as f32);
        for index in 1..block {
            let tie = (index as f64 - block as f64 / 2.0) * [0.25, 0.5, 1.0, 4.0, 16.0][random.below(5) as usize] + 0.5;
            put(&mut all, (tie.clamp(-f64::from(most), f64::from(most)) * scale) as f32);
        }
    }
    for _ in 0..200 {
        // Any bits, below 2^127 in magnitude.
        let limit = random.of(&[0x7f00_0000u64, 0x0100_0000, 0x4000_0000]);
        (0..block).for_each(|_| all.push((random.next() % limit) as u32 | (random.next() as u32) << 31));
    }
    all.extend(vec![0; block]);
    all.extend(vec![0x8000_0000; block + 5]);
    all
}

#[test]
fn blocks_of_all_magnitudes_are_the_models_and_lose_nothing() {
    let mut random = Random(11);
    for kind in KINDS {
        let gradient = all_magnitudes(&mut random, kind);
        for set in InstructionSet::available() {
            for error in [Some(Dtype::F32), Some(Dtype::BF16), None] {
                let mut codec = Blocks::plain(set, kind, gradient.len(), error);
                let payload = codec.encode(std::slice::from_ref(&gradient), [1.0; 2]);
                codec.check();
                if error == Some(Dtype::F32) {
                    let values = codec.model.decode(&payload, 1, 1.0, Dtype::F32, None);
                    for ((&c, &v), &e) in gradient.iter().zip(&values[0]).zip(&codec.model.errors[0][0]) {
                        let [c, v] = [c, v].map(|bits| f64::from(f32::from_bits(bits)));
                        assert_eq!(v + f64::from(e), c, "{kind:?}");
                    }
                }
                codec.decode(&payload, 1, 1.0, Dtype::F32, None);
                codec.check();
            }
        }
    }
}

#[test]
fn every_scale_and_every_code_decodes_as_a_number() {
    for kind in KINDS {
        let (bits, block, scale_bytes, _) = block_model::format(kind);
        let codes = 1usize << bits;
        let scales: Vec<u16> = match scale_bytes {
            0 => vec![0],
            1 => (0..256).collect(),
            _ => (0..0x10000).step_by(97).map(|scale| scale as u16).chain([0x7f80, 0xff80, 0x7fc0, 0x8000]).collect(),
        };
        let some = if codes > 256 { codes } else { codes.max(block) };
        for set in InstructionSet::available() {
            for dtype in DTYPES {
                let elements = scales.len().min(300) * some;
                let mut codec = Blocks::plain(set, kind, elements, None);
                let mut payload = codec.model.header(b"GCPL", 0, 0, 0);
                let per_scale = some / block;
                for index in 0..elements / block {
                    let scale = scales[index / per_scale * scales.len().max(300) / 300 % scales.len()];
                    payload.extend(&scale.to_le_bytes()[..scale_bytes]);
                }
                payload.resize(payload.len().next_multiple_of(16), 0);
                for index in 0..elements * bits / 8 {
                    let code = |index: usize| index % codes;
                    match bits {
                        4 => payload.push((code(2 * index) | code(2 * index + 1) << 4) as u8),
                        8 => payload.push(code(index) as u8),
                        _ => payload.push((code(index / 2) >> (8 * (index % 2))) as u8),
                    }
                }
                payload.resize(codec.plan.payload_bytes() as usize, 0);
                codec.decode(&payload, 1, 1.0, dtype, None);
                codec.check();
                codec.decode(&payload, 3, 1e30, dtype, None);
                codec.check();
            }
        }
    }
}

fn some_rules(random: &mut Random) -> Rules {
    Rules {
        kind: random.of(&KINDS),
        values: random.of(&DTYPES),
        results: random.of(&DTYPES),
        error: random.of(&[Some(Dtype::F32), Some(Dtype::BF16), None]),
        scale: ScaleRule::Rms,
        reduction: random.of(&[Reduction::Mean, Reduction::Sum]),
        beta: random.of(&[1.0, 0.9]),
        policy: random.of(&[NonFinite::Propagate, NonFinite::Zero, NonFinite::Transactional]),
    }
}

#[test]
fn steps_of_all_rules_segments_and_chunks_are_the_models() {
    let mut random = Random(12);
    for round in 0..160 {
        let set = random.of(&InstructionSet::available().collect::<Vec<_>>());
        let rules = some_rules(&mut random);
        let sizes = [0, 1, 31, 32, 33, 64, 65, 1000, 1024, 1025, if round % 16 == 0 { 70_001 } else { 3000 }];
        let segments: Vec<usize> = (0..random.below(6)).map(|_| random.of(&sizes)).collect();
        let raw: Vec<bool> = segments.iter().map(|_| random.below(3) == 0).collect();
        let n_chunks = 1 + random.below(5) as usize;
        let server = (random.below(4) > 0).then(|| random.below(n_chunks as u64) as usize);
        let wild = random.of(&[0, 0, 50, 2000]);
        let gradient = |random: &mut Random| -> Vec<Vec<u32>> {
            segments.iter().map(|&count| random.elements(rules.values, count, wild)).collect()
        };
        let mut codec = Blocks::new(set, rules, &segments, &raw, n_chunks, server);
        for step in 0..3 {
            let factors = if step == 0 { [1.0; 2] } else { [random.tame(), random.of(&[0.5, 1.7, 1.0])] };
            let payload = codec.encode(&gradient(&mut random), factors);
            if let Some(server) = server {
                let stride = codec.model.stride();
                let mut others: Vec<Vec<u8>> = vec![payload[server * stride..][..stride].to_vec()];
                for _ in 0..random.below(4) {
                    let mut other = Blocks::new(set, rules, &segments, &raw, n_chunks, None);
                    let payload = other.encode(&gradient(&mut random), [1.0; 2]);
                    others.push(payload[server * stride..][..stride].to_vec());
                }
                let chunks: Vec<&[u8]> = others.iter().map(Vec::as_slice).collect();
                if step == 1 {
                    codec.reduce_in_halves(&chunks);
                } else {
                    codec.reduce(&chunks);
                }
            }
            match step {
                0 => codec.decode(&payload, 1, 1.0, random.of(&DTYPES), None),
                1 => codec.decode(&payload, random.of(&[3, i32::MAX]), 1.3e5, random.of(&DTYPES), None),
                _ => {
                    let old: Vec<Vec<f32>> =
                        segments.iter().map(|&count| (0..count).map(|_| random.tame()).collect()).collect();
                    codec.decode(&payload, 7, -0.3, Dtype::F32, Some(&old));
                }
            }
            if codec.codec.transactional && random.below(2) == 0 {
                let skip = random.below(3) == 0;
                codec.codec.commit(if skip { Skip::Always } else { Skip::Never }).unwrap();
                codec.model.commit(skip);
            }
            codec.check();
        }
    }
}

/// A codec of two segments, one of them raw, after a step of its own, and what it encoded last.
fn after_a_step(kind: Kind, error: Option<Dtype>, policy: NonFinite) -> (Blocks, Vec<u8>) {
    let mut random = Random(13);
    let rules = Rules { kind, error, policy, ..rules() };
    let set = InstructionSet::available().next().unwrap();
    let mut codec = Blocks::new(set, rules, &[100, 7], &[false, true], 2, Some(1));
    let gradient = [100, 7].map(|count| random.elements(Dtype::F32, count, 0));
    let payload = codec.encode(&gradient, [1.0; 2]);
    let chunk = payload[codec.plan.stride as usize..].to_vec();
    codec.reduce(&[&chunk, &chunk]);
    if policy == NonFinite::Transactional {
        codec.codec.commit(Skip::Never).unwrap();
        codec.model.commit(false);
    }
    codec.check();
    (codec, payload)
}

#[test]
fn a_chunk_of_corrupt_ones_says_so_and_the_errors_stay() {
    for kind in KINDS {
        let (mut codec, payload) = after_a_step(kind, Some(Dtype::F32), NonFinite::Propagate);
        let stride = codec.plan.stride as usize;
        for (byte, value) in [(0, b'g'), (6, 1), (10, 1), (12, 16), (20, 7), (28, 4), (40, 1), (48, 1), (56, 1)] {
            let mut chunks = payload[stride..].repeat(2);
            chunks[stride + byte] = value;
            let mut dst = Memory::new(Dtype::U8, stride, 0);
            let refused = codec.codec.reduce(
                &codec.plan,
                Received::of(&Memory::of(Dtype::U8, &chunks, 0).view(), codec.plan.stride),
                &dst.view(),
            );
            assert!(refused.is_err_and(|failure| failure.status == crate::error::Status::Corrupt), "byte {byte}");
            assert_same("chunk of corrupt ones", dst.bytes(), &codec.model.refused());
            let (memory, values) = memory_of(Dtype::F32, &[vec![5; 100], vec![5; 7]]);
            let by = Decoding { dtype: Dtype::F32, divisor: 1, factor: None, add: false, behind_ours: false };
            let mut bad = payload.clone();
            bad[stride + byte] = value;
            assert!(codec.codec.decode(&codec.plan, &Memory::of(Dtype::U8, &bad, 0).view(), &by, &values).is_err());
            assert!(memory.iter().all(|memory| memory.bits().iter().all(|&bits| bits == 5)), "written");
            codec.check();
        }
    }
}

#[test]
fn absent_codes_and_scales_and_padding_are_not_looked_at() {
    for kind in KINDS {
        // 3 elements of a block, and 2 blocks of which the second chunk has none.
        let set = InstructionSet::available().next().unwrap();
        let mut codec = Blocks::new(set, Rules { kind, error: None, ..rules() }, &[3, 1], &[false, true], 2, Some(0));
        let payload = codec.encode(&[vec![0x3f80_0000; 3], vec![0x4000_0000]], [1.0; 2]);
        let (bits, block, scale, _) = block_model::format(kind);
        let stride = codec.plan.stride as usize;
        let codes = 64 + scale.next_multiple_of(16);
        let own_codes = (3 * bits).div_ceil(8);
        let raws = codes + block * bits / 8;
        let mut noisy = payload.clone();
        for chunk in 0..2 {
            let base = chunk * stride;
            let gaps = match chunk {
                0 => [64 + scale..codes, codes + own_codes..raws, raws + 4..stride],
                _ => [64..codes, codes..raws, raws..stride],
            };
            gaps.into_iter().flatten().for_each(|at| noisy[base + at] = 0xff);
        }
        if bits == 4 {
            noisy[codes + own_codes - 1] |= 0xf0;
        }
        codec.decode(&noisy, 1, 1.0, Dtype::F32, None);
        codec.check();
        assert_eq!(codec.model.flags, 0);
        let reduced = codec.reduce(&[&noisy[..stride], &payload[..stride]]);
        assert_same("zeros of what is reduced", &reduced[raws + 4..], &payload[raws + 4..stride]);
        codec.check();
    }
}

#[test]
fn a_state_goes_in_unless_it_has_what_no_codec_keeps() {
    for kind in KINDS {
        for error in [Some(Dtype::F32), Some(Dtype::BF16), None] {
            let (mut one, _) = after_a_step(kind, error, NonFinite::Transactional);
            let state = one.state();
            let mut other = Blocks::new(one.codec.set, one.plan.rules, &[100, 7], &[false, true], 2, Some(1));
            other.codec.state_in(&other.plan, &Memory::of(Dtype::U8, &state, 1).view()).unwrap();
            assert_same("state", &other.state(), &state);
            let (mut careless, _) = after_a_step(kind, error, NonFinite::Propagate);
            let mut wrong: Vec<(usize, u8)> = vec![(0, 0), (12, 16), (28, 1)];
            if let Some(dtype) = error {
                // Inf, of the last byte of the first element and of the reducer's.
                let server = 256 + 1024 * dtype.size;
                wrong.extend([256, server].map(|at| (at + dtype.size - 1, 0x7f)));
            }
            for (byte, value) in wrong {
                let mut bad = careless.state();
                let before = bad.clone();
                bad[byte] = value;
                if byte > 256 {
                    bad[byte - 1] = 0x80;
                }
                let refused = careless.codec.state_in(&careless.plan, &Memory::of(Dtype::U8, &bad, 0).view());
                assert!(refused.is_err(), "{kind:?} {error:?}: byte {byte}");
                assert_same("state after a refusal", &careless.state(), &before);
            }
            // What fills up, and where scales would be, is not looked at.
            let mut filled = careless.state();
            let before = filled.clone();
            filled[64..256].fill(0xff);
            if let Some(dtype) = error {
                filled[256 + 100 * dtype.size..256 + 1024 * dtype.size].fill(0xff);
            }
            careless.codec.state_in(&careless.plan, &Memory::of(Dtype::U8, &filled, 0).view()).unwrap();
            assert_same("state of what was filled up", &careless.state(), &before);
        }
    }
}

#[test]
fn errors_go_in_but_for_raw_ones_and_those_that_are_not_finite() {
    for (error, reduction) in [(Dtype::F32, Reduction::Mean), (Dtype::BF16, Reduction::Sum)] {
        let (mut codec, _) = after_a_step(Kind::Int8, Some(error), NonFinite::Propagate);
        codec.plan.rules.reduction = reduction;
        let mut worker: Vec<f32> = (0..107).map(|index| index as f32 * 1.001).collect();
        worker[50] = f32::NAN;
        worker[103] = f32::INFINITY; // raw
        let rounded = |index: usize, value: f32| {
            let value = numbers::round(error, value);
            if index == 50 { 0.0 } else { value }
        };
        codec.codec.errors_in(&codec.plan, Some(&Memory::of_floats(&worker).view()), None).unwrap();
        codec.model.errors[0][0] = (0..100).map(|index| rounded(index, worker[index])).collect();
        codec.model.flags = NONFINITE;
        codec.check();
        // Another world: of three rows, for this codec of two chunks; and the errors of all reducers, of which it has a part.
        let rows: Vec<f32> = [1.0, 0.3, -7.7].iter().flat_map(|by| worker.iter().map(move |e| e * by)).collect();
        let [mut all, mut servers] = [&rows, &worker].map(|errors| Memory::of_floats(errors));
        codec.codec.errors_of_world_in(&codec.plan, Some(&all.view()), 3, Some(&servers.view())).unwrap();
        let mean = |index: usize| {
            let of = |row: usize| rows[107 * row + index];
            match reduction {
                Reduction::Mean => (0.0 + of(0) / 3.0) + of(1) / 3.0 + of(2) / 3.0,
                Reduction::Sum => (of(0) + of(1) + of(2)) / 2.0,
            }
        };
        codec.model.errors[0][0] = (0..100).map(|index| rounded(index, mean(index))).collect();
        codec.model.errors[1][0] = codec.model.part(0, 1).map(|index| rounded(index, worker[index])).collect();
        codec.model.flags = NONFINITE;
        codec.check();
    }
}
