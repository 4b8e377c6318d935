//! The codecs on the CPU: the reference for docs/NUMERICS.md, bit for bit.
//!
//! - `operations`: encode, reduce and decode; `family`: the part of them that differs between the two families of codecs;
//! - `bits`: ONEBIT and SIGN; `blocks`: all other codecs;
//! - `numbers`: element types; `sum`: sums and the scale; `sources`: the sources of a tile's elements;
//! - `tiles`, `halves`: how elements are shared out to threads;
//! - `chunks`: the frames of chunks; `inputs`: chunks that are reduced; `state`: the state, out and in.

mod bits;
mod blocks;
mod chunks;
mod family;
mod halves;
mod inputs;
pub mod nodes;
mod operations;
mod sources;
mod state;
mod sum;
mod tiles;

use std::{mem, sync::atomic::AtomicU64};

use crate::{
    cpu::{InstructionSet, memory},
    dlpack::{Owner, View},
    ffi::{error::Result, fallible},
};

use super::{
    call::Skip,
    plan::{CodecPlan, NONFINITE, NonFinite, TAKEN_BACK, layout},
};

use family::Family;
use tiles::Tiles;

pub use chunks::check_header;

/// Which half of a state is meant.
const WORKER: usize = 0;
const SERVER: usize = 1;

/// Half of a state: the workers' or the server's. Each half is valid in one of the two buffers.
#[derive(Clone, Copy, Default)]
struct Half {
    /// Which buffer is valid.
    valid: usize,
    /// Whether the other one holds a step.
    pending: bool,
}

/// A codec's state, and the memory that it works in.
pub struct Codec {
    family: &'static dyn Family,
    set: InstructionSet,
    transactional: bool,
    /// As docs/NUMERICS.md has them, each aligned to 256. The second one is empty unless the codec is transactional.
    buffers: [Owner; 2],
    worker: Half,
    server: Half,
    /// Whether a step has begun that is neither committed nor taken back, even one that wrote nothing.
    begun: bool,
    /// The flags set since they were last taken, and since the last commit.
    flags: u32,
    since_commit: u32,
    /// The flags of the values of the next encode before they were summed up.
    before_encode: u32,
    /// Of the last encode.
    scales: Vec<f32>,
    worker_tiles: Tiles,
    server_tiles: Tiles,
    /// The sums of the tiles of one call.
    partials: Vec<AtomicU64>,
}

impl Codec {
    pub fn new(plan: &CodecPlan) -> Result<Self> {
        let transactional = plan.rules.policy == NonFinite::Transactional;
        let second = if transactional { memory::allocate(plan.state_bytes)? } else { Owner::of_nothing() };
        let buffers = [memory::allocate(plan.state_bytes)?, second];
        for buffer in buffers.iter().filter(|buffer| !buffer.data().is_null()) {
            // SAFETY: memory of so many bytes, which is ours alone.
            unsafe { buffer.data().write_bytes(0, plan.state_bytes as usize) };
        }
        let segments = plan.workers.len();
        let mut scales = fallible::list(segments, "scales")?;
        scales.resize(segments, 0.0);
        let (worker_tiles, server_tiles) = (Tiles::new(&plan.workers)?, Tiles::new(&plan.servers)?);
        let partials = tiles::partials(worker_tiles.count().max(server_tiles.count()))?;
        Ok(Self {
            family: match plan.layout.format.family {
                layout::Family::Bits => &bits::Bits,
                layout::Family::Blocks => &blocks::Blocks,
            },
            set: InstructionSet::chosen(),
            transactional,
            buffers,
            worker: Half::default(),
            server: Half::default(),
            begun: false,
            flags: 0,
            since_commit: 0,
            before_encode: 0,
            scales,
            worker_tiles,
            server_tiles,
            partials,
        })
    }

    /// Where a half is read, and where the next step of it is written.
    fn buffers_of(&self, half: Half) -> (*mut u8, *mut u8) {
        let next = if self.transactional { 1 - half.valid } else { half.valid };
        (self.buffers[half.valid].data(), self.buffers[next].data())
    }

    fn raise(&mut self, flags: u32) {
        self.flags |= flags;
        self.since_commit |= flags;
    }

    /// Adds flags to those of the next encode.
    pub fn add_to_next_encode(&mut self, flags: u32) {
        self.before_encode |= flags;
    }

    /// Takes over the flags of a codec that decodes for this one.
    pub fn take_flags_of(&mut self, other: &mut Self) {
        self.raise(mem::take(&mut other.flags));
    }

    /// Whether a step waits for its commit.
    pub fn is_pending(&self) -> bool {
        self.begun
    }

    /// Writes the flags of all calls since the last, to a uint32.
    pub fn take_flags(&mut self, dst: &View<'_>) -> Result<()> {
        // SAFETY: a view of one uint32, at any address.
        unsafe { dst.data().cast::<u32>().write_unaligned(self.flags) };
        self.flags = 0;
        Ok(())
    }

    /// Writes the scales of the last encode, a float32 a segment.
    pub fn scales(&mut self, _: &CodecPlan, dst: &View<'_>) -> Result<()> {
        for (segment, scale) in self.scales.iter().enumerate() {
            // SAFETY: a view of as many float32 as there are segments, at any address.
            unsafe { dst.data().cast::<f32>().add(segment).write_unaligned(*scale) };
        }
        Ok(())
    }

    /// Makes a pending step valid, or takes it back.
    pub fn commit(&mut self, skip: Skip<'_>) -> Result<()> {
        self.begun = false;
        if !self.worker.pending && !self.server.pending {
            self.since_commit = 0;
            return Ok(());
        }
        let skip = match skip {
            Skip::Never => false,
            Skip::Always => true,
            Skip::If(scalar) => is_not_zero(scalar),
        };
        let taken_back = skip || self.since_commit & NONFINITE != 0;
        for half in [&mut self.worker, &mut self.server] {
            if half.pending && !taken_back {
                half.valid = 1 - half.valid;
            }
            half.pending = false;
        }
        self.since_commit = 0;
        if taken_back {
            self.flags |= TAKEN_BACK;
        }
        Ok(())
    }
}

/// Whether a bool, an int32 or a float32 is not 0. By its bits, for they say it in any floating-point environment.
fn is_not_zero(scalar: &View<'_>) -> bool {
    if scalar.dtype().size == 1 {
        // SAFETY: a view of one element of a byte.
        return unsafe { scalar.data().read() } != 0;
    }
    // SAFETY: a view of one element of four bytes, at any address.
    let bits = unsafe { scalar.data().cast::<u32>().read_unaligned() };
    if scalar.dtype().is_float() { bits & 0x7fff_ffff != 0 } else { bits != 0 }
}

/// A scalar on the device: a float32, or 1.
fn factor(scalar: Option<&View<'_>>) -> f32 {
    scalar.map_or(1.0, memory::read)
}
