//! Decoding: a payload to values.

use crate::{
    backend::call::{Address, Decoding},
    error::Result,
    plan::{
        codec::{CORRUPT, CodecPlan, NONFINITE},
        floats::canonical,
    },
    tensor::{Dtype, View},
};

use super::{
    Codec,
    chunks::{self, Chunks, scale_at},
    factor, kernels,
    numbers::{BF16, F16, F32, Number},
    tiles::Met,
};

/// What a payload is decoded with.
struct Decoder<'a> {
    plan: &'a CodecPlan,
    payload: Address,
    divisor: i32,
    factor: f32,
    values: &'a [Address],
}

impl Codec {
    /// Decodes a payload to an address a segment. If a chunk is corrupt, nothing is written.
    pub fn decode(
        &mut self, plan: &CodecPlan, payload: &View<'_>, by: &Decoding<'_>, values: &[Address],
    ) -> Result<()> {
        let mut flags = 0;
        for chunk in 0..plan.n_chunks {
            let at = payload.data().wrapping_add(chunk * plan.stride as usize);
            // SAFETY: the payload has so many chunks.
            match unsafe { chunks::check(plan, format_args!("{}: chunk {chunk}", payload.name()), at, chunk) } {
                Ok(carried) => flags |= carried,
                Err(failure) => {
                    self.raise(CORRUPT);
                    return Err(failure);
                }
            }
        }
        if let Some(blocks) = &plan.blocks {
            let nonfinite = self.decode_blocks(plan, blocks, payload.data(), by, values);
            self.raise(flags | if nonfinite { NONFINITE } else { 0 });
            return Ok(());
        }
        let decoder =
            Decoder { plan, payload: Address(payload.data()), divisor: by.divisor, factor: factor(by.factor), values };
        let nonfinite = match by.dtype {
            _ if by.add => self.add(&decoder),
            Dtype::F16 => self.set::<F16>(&decoder),
            Dtype::BF16 => self.set::<BF16>(&decoder),
            _ => self.set::<F32>(&decoder),
        };
        self.raise(flags | if nonfinite { NONFINITE } else { 0 });
        Ok(())
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

    /// Calls `work` with what lies side by side in a chunk: bits, the value of a 1, where the values belong, and how
    /// many. Tells whether it ever returned true.
    fn for_each_piece(
        &self, decoder: &Decoder<'_>, size: usize, work: impl Fn(*const u8, f32, *mut u8, usize) -> bool + Sync,
    ) -> bool {
        let plan = decoder.plan;
        let chunks = Chunks::of_payload(plan, decoder.payload.at(0));
        let met = Met::default();
        self.worker_tiles.for_each(&plan.workers, size as i64, |tile| {
            let run = &plan.workers[tile.run];
            let mut dst = decoder.values[tile.run].at(tile.first as usize * size);
            let (mut byte, mut left) = (run.place + tile.first / 8, tile.elements);
            while left > 0 {
                let (chunk, bits, side_by_side) = chunks.at(byte);
                let count = left.min(side_by_side.saturating_mul(8));
                let scale = scale_at(decoder.payload.at((chunk * plan.stride) as usize), run.segment);
                // SAFETY: the chunk holds some of the segment, and has a scale of it.
                let scale = f32::from_bits(unsafe { scale.read() });
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
