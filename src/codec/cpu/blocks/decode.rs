//! Decoding: blocks and raw elements to values.

use crate::{
    codec::{
        call::Decoding,
        cpu::{Codec, factor, sum::Unit, tiles::AtomicFlag},
        plan::{CodecPlan, Run},
    },
    cpu::{
        InstructionSet,
        numbers::{BF16, F16, F32},
    },
    dlpack::{Address, Dtype},
};

use super::{
    kernels::{self, Functions, Scaling},
    payload::{Coded, Payload, STEP},
};

/// Reads blocks and raw elements of a payload.
pub struct Reader {
    set: InstructionSet,
    functions: Functions,
    block: usize,
}

impl Reader {
    pub fn new(set: InstructionSet, plan: &CodecPlan) -> Self {
        Self { set, functions: Functions::of(plan.rules.kind), block: plan.layout.format.place as usize }
    }

    /// Writes v of `count` elements of a run, at most a step, from index `first` on.
    ///
    /// # Safety
    /// The payload has these elements.
    pub unsafe fn read(
        &self, payload: &Payload<'_>, run: &Run, first: i64, count: usize, coded: &mut Coded, unit: &mut Unit,
    ) {
        // SAFETY: the payload has these elements, and the set is one that this processor has.
        unsafe {
            if run.raw {
                return payload.read_raws(run, first, count, unit);
            }
            payload.read_blocks(run, first, count, coded);
            (self.functions.values)(self.set, coded, count.div_ceil(self.block), unit);
        }
    }
}

impl Codec {
    /// Decodes a payload to an address per segment. Returns true if a written value is not finite.
    pub fn decode_blocks(&self, plan: &CodecPlan, payload: *mut u8, by: &Decoding<'_>, values: &[Address]) -> bool {
        let (set, size) = (self.set, by.dtype.size);
        let payload = Payload::new(plan, payload, 0);
        let scaling = Scaling { divisor: by.divisor as f32, factor: factor(by.factor) };
        let write = match by.dtype {
            _ if by.add => kernels::increase,
            Dtype::F16 => kernels::set::<F16>,
            Dtype::BF16 => kernels::set::<BF16>,
            _ => kernels::set::<F32>,
        };
        let reader = Reader::new(self.set, plan);
        let met = AtomicFlag::default();
        self.worker_tiles.for_each(&plan.workers, size as i64 + plan.layout.format.bits / 8, |tile| {
            let (mut unit, mut coded) = (Unit([0.0; _]), Coded::new());
            for first in (0..tile.elements).step_by(STEP) {
                let count = (tile.elements - first).min(STEP);
                let at = tile.first + first as i64;
                // SAFETY: the tile lies within a segment, which the payload has, and within that segment's values; this
                // processor has the set.
                met.note(unsafe {
                    reader.read(&payload, &plan.workers[tile.run], at, count, &mut coded, &mut unit);
                    write(set, &unit, scaling, values[tile.run].at(at as usize * size), count)
                });
            }
        });
        met.any()
    }
}
