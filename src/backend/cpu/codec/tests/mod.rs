//! The codec of every instruction set against the model, byte for byte.

mod block_model;
mod blocks;
mod hostile;
mod model;
mod numbers;
mod plain;
mod random;
mod steps;

use dlpark::ffi::DLTensor;

use super::*;
use crate::{
    backend::{
        call::{Address, Decoding, Received},
        cpu::pool,
    },
    plan::codec::{Kind, Reduction, Rules, ScaleRule},
    tensor::{Device, Dtype, Name},
};

use model::Model;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Memory of a tensor, aligned to 16, or an odd byte behind that.
struct Memory {
    words: Vec<u128>,
    skipped: usize,
    dtype: Dtype,
    shape: [i64; 1],
}

impl Memory {
    fn new(dtype: Dtype, elements: usize, skipped: usize) -> Self {
        let words = vec![0xeeee_eeee_eeee_eeee_eeee_eeee_eeee_eeee; (elements * dtype.size + skipped).div_ceil(16) + 1];
        Self { words, skipped, dtype, shape: [elements as i64] }
    }

    fn of(dtype: Dtype, bytes: &[u8], skipped: usize) -> Self {
        let mut memory = Self::new(dtype, bytes.len() / dtype.size, skipped);
        memory.bytes_mut().copy_from_slice(bytes);
        memory
    }

    fn of_floats(values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::of(Dtype::F32, &bytes, 1)
    }

    fn bytes(&self) -> &[u8] {
        let bytes = self.shape[0] as usize * self.dtype.size;
        // SAFETY: the words have so many bytes, and one behind them that is looked at as well.
        let all = unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast::<u8>(), 16 * self.words.len()) };
        assert_eq!(all[..self.skipped], vec![0xee; self.skipped], "written before the tensor");
        assert_eq!(all[self.skipped + bytes], 0xee, "written behind the tensor");
        &all[self.skipped..][..bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.shape[0] as usize * self.dtype.size;
        let first = self.words.as_mut_ptr().cast::<u8>().wrapping_add(self.skipped);
        // SAFETY: the words have so many bytes.
        unsafe { std::slice::from_raw_parts_mut(first, bytes) }
    }

    /// Elements as their bits.
    fn bits(&self) -> Vec<u32> {
        let bits = |element: &[u8]| element.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte));
        self.bytes().chunks(self.dtype.size).map(bits).collect()
    }

    fn view(&mut self) -> View<'_> {
        let tensor = DLTensor {
            data: self.words.as_mut_ptr().cast(),
            device: Device::Cpu.to_dlpack(),
            ndim: 1,
            dtype: self.dtype.to_dlpack(),
            shape: self.shape.as_mut_ptr(),
            strides: std::ptr::null_mut(),
            byte_offset: self.skipped as u64,
        };
        // SAFETY: the description is that of this memory, which is lent with its shape.
        unsafe { View::from_dlpack(&Name::new("test"), &tensor).unwrap() }
    }

    fn address(&mut self) -> Address {
        Address(self.view().data())
    }
}

/// A codec and its model.
struct Pair {
    plan: CodecPlan,
    codec: Codec,
    model: Model,
}

impl Pair {
    fn new(set: InstructionSet, rules: Rules, segments: &[usize], n_chunks: usize, server: Option<usize>) -> Self {
        let counts: Vec<i64> = segments.iter().map(|&count| count as i64).collect();
        let plan = CodecPlan::new(rules, &counts, &[], n_chunks, server).unwrap();
        let mut codec = Codec::new(&plan).unwrap();
        codec.set = set;
        Self { plan, codec, model: Model::new(rules, segments, n_chunks, server) }
    }

    /// Encodes a gradient given as bits; the payload, which is the model's.
    fn encode(&mut self, gradient: &[Vec<u32>], factors: [f32; 2]) -> Vec<u8> {
        let dtype = self.plan.rules.values;
        let mut memory: Vec<Memory> = gradient
            .iter()
            .enumerate()
            .map(|(segment, bits)| {
                let bytes: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()[..dtype.size].to_vec()).collect();
                Memory::of(dtype, &bytes, segment % 3)
            })
            .collect();
        let values: Vec<Address> = memory.iter_mut().map(Memory::address).collect();
        let mut payload = Memory::new(Dtype::U8, self.plan.payload_bytes() as usize, 0);
        let mut factor_memory = factors.map(|factor| Memory::of_floats(&[factor]));
        let [first, second] = &mut factor_memory;
        // A factor of 1 is not given.
        let views_of = [(factors[0] != 1.0, first.view()), (factors[1] != 1.0, second.view())];
        let [first, second] = &views_of;
        let given = [first, second].map(|(given, view)| given.then_some(view));
        self.codec.encode(&self.plan, &values, given, &payload.view()).unwrap();
        let widened: Vec<Vec<f32>> =
            gradient.iter().map(|bits| bits.iter().map(|&bits| numbers::widen(dtype, bits)).collect()).collect();
        let expected = self.model.encode(&widened, factors);
        assert_same("payload", payload.bytes(), &expected);
        expected
    }

    /// Reduces chunks; the result is the model's.
    fn reduce(&mut self, chunks: &[&[u8]]) -> Vec<u8> {
        let mut src = Memory::of(Dtype::U8, &chunks.concat(), 0);
        let mut dst = Memory::new(Dtype::U8, self.plan.stride as usize, 0);
        self.codec.reduce(&self.plan, Received::of(&src.view(), self.plan.stride), &dst.view()).unwrap();
        let expected = self.model.reduce(chunks);
        assert_same("reduced chunk", dst.bytes(), &expected);
        expected
    }

    /// Decodes a payload to a dtype, or adds it to `old`.
    fn decode(&mut self, payload: &[u8], divisor: i32, factor: f32, dtype: Dtype, old: Option<&[Vec<f32>]>) {
        let mut payload_memory = Memory::of(Dtype::U8, payload, 0);
        let mut memory: Vec<Memory> = match old {
            Some(old) => old.iter().map(|old| Memory::of_floats(old)).collect(),
            None => self.model.segments.iter().map(|&count| Memory::new(dtype, count, count % 3)).collect(),
        };
        let values: Vec<Address> = memory.iter_mut().map(Memory::address).collect();
        let mut factor_memory = Memory::of_floats(&[factor]);
        let factor_view = factor_memory.view();
        let by = Decoding {
            dtype,
            divisor,
            factor: (factor != 1.0).then_some(&factor_view),
            add: old.is_some(),
            behind_ours: false,
        };
        self.codec.decode(&self.plan, &payload_memory.view(), &by, &values).unwrap();
        let expected = self.model.decode(payload, divisor, factor, dtype, old);
        for (segment, (memory, expected)) in memory.iter().zip(&expected).enumerate() {
            assert_eq!(memory.bits(), *expected, "values of segment {segment}");
        }
    }

    fn commit(&mut self, skip: bool) {
        self.codec.commit(if skip { Skip::Always } else { Skip::Never }).unwrap();
        self.model.commit(skip);
    }

    fn state(&mut self) -> Vec<u8> {
        let mut state = Memory::new(Dtype::U8, self.plan.state_bytes as usize, 0);
        self.codec.state_out(&self.plan, &state.view()).unwrap();
        state.bytes().to_vec()
    }

    /// That state, scales and flags are those of the model. Takes the flags.
    fn check(&mut self) {
        assert_same("state", &self.state(), &self.model.state());
        let mut scales = Memory::new(Dtype::F32, self.model.segments.len(), 1);
        self.codec.scales(&self.plan, &scales.view()).unwrap();
        let of_model = self.model.pending[0].as_ref().unwrap_or(&self.model.valid[0]);
        assert!(
            self.codec.worker.pending
                || !self.codec.transactional
                || of_model.scales.len() == self.model.segments.len()
        );
        if !self.codec.transactional {
            assert_eq!(scales.bits(), of_model.scales.iter().map(|scale| scale.to_bits()).collect::<Vec<_>>());
        }
        let mut flags = Memory::new(Dtype { size: 4, ..Dtype::U8 }, 1, 1);
        self.codec.take_flags(&flags.view()).unwrap();
        assert_eq!(flags.bits(), [std::mem::take(&mut self.model.flags)], "flags");
    }
}

#[track_caller]
fn assert_same(what: &str, got: &[u8], expected: &[u8]) {
    assert_eq!(got.len(), expected.len(), "length of {what}");
    if let Some(at) = (0..got.len()).find(|&at| got[at] != expected[at]) {
        let end = (at + 8).min(got.len());
        panic!("{what}: byte {at} of {}: {:x?}, {:x?} expected", got.len(), &got[at..end], &expected[at..end]);
    }
}

fn rules() -> Rules {
    Rules {
        kind: Kind::Onebit,
        values: Dtype::F32,
        results: Dtype::F32,
        error: Some(Dtype::F32),
        scale: ScaleRule::Rms,
        reduction: Reduction::Mean,
        beta: 1.0,
        policy: NonFinite::Propagate,
    }
}
