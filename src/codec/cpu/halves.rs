//! The tiles of a half of a codec: the worker's encodes, the server's reduces.

use crate::{
    codec::plan::{CodecPlan, Run},
    cpu::numbers::{Number, is_kept},
    dlpack::Address,
};

use super::{
    Codec, Half, WORKER,
    tiles::{AtomicFlag, Tile, Tiles},
};

impl Codec {
    /// Returns a half of the state with its tiles and runs.
    pub(super) fn of_half<'a>(&'a self, plan: &'a CodecPlan, half: usize) -> (Half, &'a Tiles, &'a [Run]) {
        match half {
            WORKER => (self.worker, &self.worker_tiles, &plan.workers),
            _ => (self.server, &self.server_tiles, &plan.servers),
        }
    }

    /// Calls `work` with each tile of each run of a half, and the addresses of its errors in the valid and the next
    /// state. `bytes`: bytes per element that `work` accesses beside the errors. Returns true if `work` ever did.
    pub fn for_each_tile<E: Number>(
        &self, plan: &CodecPlan, half: usize, bytes: usize, work: impl Fn(&Run, &Tile, [*mut u8; 2]) -> bool + Sync,
    ) -> bool {
        let (valid, tiles, runs) = self.of_half(plan, half);
        let (valid, next) = self.buffers_of(valid);
        let (valid, next) = (Address(valid), Address(next));
        let met = AtomicFlag::default();
        tiles.for_each(runs, (2 * size_of::<E::Bits>() + bytes) as i64, |tile| {
            let run = &runs[tile.run];
            let kept = run.state as usize + tile.first as usize * size_of::<E::Bits>();
            met.note(work(run, &tile, [valid.at(if is_kept::<E>() { kept } else { 0 }), next.at(kept)]));
        });
        met.any()
    }
}
