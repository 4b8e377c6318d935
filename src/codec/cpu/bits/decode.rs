//! Decoding of ONEBIT and SIGN: bits and scales to values.

use crate::{
    codec::{
        call::Decoding,
        cpu::{
            Codec,
            chunks::{Chunks, flags_of, scale_at},
            factor,
            tiles::AtomicFlag,
        },
        plan::CodecPlan,
    },
    cpu::numbers::{BF16, F16, F32, Number},
    dlpack::{Address, Dtype, View, floats::canonical},
};

use super::kernels;

/// Payload, and the parameters of its decoding.
struct Decoder<'a> {
    plan: &'a CodecPlan,
    payload: Address,
    divisor: i32,
    factor: f32,
    values: &'a [Address],
}

impl Codec {
    /// Decodes a payload. Returns true if a value that is not finite was written.
    pub fn decode_bits(&self, plan: &CodecPlan, payload: &View<'_>, by: &Decoding<'_>, values: &[Address]) -> bool {
        let decoder =
            Decoder { plan, payload: Address(payload.data()), divisor: by.divisor, factor: factor(by.factor), values };
        match by.dtype {
            _ if by.add => self.add(&decoder),
            Dtype::F16 => self.set::<F16>(&decoder),
            Dtype::BF16 => self.set::<BF16>(&decoder),
            _ => self.set::<F32>(&decoder),
        }
    }

    fn set<V: Number>(&self, decoder: &Decoder<'_>) -> bool {
        let set = self.set;
        self.for_each_piece(decoder, size_of::<V::Bits>(), |bits, value, dst, count| {
            let values = kernels::Values::<V> { plus: V::narrow(value), minus: V::narrow(-value) };
            // SAFETY: the piece lies within the payload and within its segment's values.
            unsafe { kernels::set_values(set, bits, &values, dst, count) };
            !V::widen(values.plus).is_finite()
        })
    }

    fn add(&self, decoder: &Decoder<'_>) -> bool {
        let set = self.set;
        self.for_each_piece(decoder, size_of::<f32>(), |bits, value, dst, count| {
            // SAFETY: the piece lies within the payload and within its segment's values.
            unsafe { kernels::add_values(set, bits, value, dst, count) }
        })
    }

    /// Calls `work` with each piece of a segment that lies in one chunk: its bits, the value of a 1, the address of its
    /// values, and their number. Returns true if `work` ever returned true.
    fn for_each_piece(
        &self, decoder: &Decoder<'_>, size: usize, work: impl Fn(*const u8, f32, *mut u8, usize) -> bool + Sync,
    ) -> bool {
        let plan = decoder.plan;
        let chunks = Chunks::of_payload(plan, decoder.payload.at(0));
        let met = AtomicFlag::default();
        self.worker_tiles.for_each(&plan.workers, size as i64, |tile| {
            let run = &plan.workers[tile.run];
            let mut dst = decoder.values[tile.run].at(tile.first as usize * size);
            let (mut byte, mut left) = (run.place + tile.first / 8, tile.elements);
            while left > 0 {
                let (chunk, bits, side_by_side) = chunks.at(byte);
                let count = left.min(side_by_side.saturating_mul(8));
                let frame = decoder.payload.at((chunk * plan.stride()) as usize);
                // SAFETY: the chunk begins with a header, followed by a scale for each segment; it is aligned to 16.
                let (scale, flags) = unsafe { (scale_at(frame, run.segment).read(), flags_of(frame)) };
                let scale = plan.value_of_vote(f32::from_bits(scale), flags);
                let value = canonical(scale / decoder.divisor as f32 * decoder.factor);
                met.note(work(bits, value, dst, count));
                dst = dst.wrapping_add(count * size);
                byte += count.div_ceil(8) as i64;
                left -= count;
            }
        });
        met.any()
    }
}
