//! The codecs on the CPU: the reference for docs/NUMERICS.md, bit for bit.
//!
//! - `operations`: encode, reduce and decode; `family`: their parts that differ between the two families of codecs;
//! - `bits`: ONEBIT and SIGN; `blocks`: all other codecs;
//! - `sum`: sums and the scale; `sources`: the sources of a tile's elements; `nodes`: sums within a node;
//! - `tiles`, `halves`: distribution of elements to threads;
//! - `chunks`: the frames of chunks; `inputs`: chunks that are reduced; `state`: saving and loading of the state.

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

/// Numbers of the halves of a state.
const WORKER: usize = 0;
const SERVER: usize = 1;

/// Half of a state: the worker's or the server's. Each half is valid in one of the two buffers.
#[derive(Clone, Copy, Default)]
struct Half {
    /// Index of the valid buffer.
    valid: usize,
    /// True if the other buffer holds a pending step.
    pending: bool,
}

/// A codec's state, and the memory that it works in.
pub struct Codec {
    family: &'static dyn Family,
    set: InstructionSet,
    transactional: bool,
    /// States in the layout of docs/NUMERICS.md, aligned to 256. The second is empty unless the codec is transactional.
    buffers: [Owner; 2],
    worker: Half,
    server: Half,
    /// True if a step has begun that is neither committed nor taken back, even one that wrote nothing.
    begun: bool,
    /// Flags set since they were last taken, and since the last commit.
    flags: u32,
    since_commit: u32,
    /// Flags that the next encode adds to its own: of its values, before they were summed within the node.
    before_encode: u32,
    /// Scales of the last encode.
    scales: Vec<f32>,
    worker_tiles: Tiles,
    server_tiles: Tiles,
    /// Sums of the tiles of one call.
    partials: Vec<AtomicU64>,
}

impl Codec {
    pub fn new(plan: &CodecPlan) -> Result<Self> {
        let transactional = plan.rules.policy == NonFinite::Transactional;
        let second = if transactional { memory::allocate(plan.state_bytes)? } else { Owner::of_nothing() };
        let buffers = [memory::allocate(plan.state_bytes)?, second];
        for buffer in buffers.iter().filter(|buffer| !buffer.data().is_null()) {
            // SAFETY: the buffer has `state_bytes` bytes, and nothing else uses it yet.
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

    /// Returns the buffer from which a half is read, and the buffer to which its next step is written.
    fn buffers_of(&self, half: Half) -> (*mut u8, *mut u8) {
        let next = if self.transactional { 1 - half.valid } else { half.valid };
        (self.buffers[half.valid].data(), self.buffers[next].data())
    }

    fn raise(&mut self, flags: u32) {
        self.flags |= flags;
        self.since_commit |= flags;
    }

    /// Adds flags to the flags of the next encode.
    pub fn add_to_next_encode(&mut self, flags: u32) {
        self.before_encode |= flags;
    }

    /// Moves the flags of a codec that decodes for this one to this codec.
    pub fn take_flags_of(&mut self, other: &mut Self) {
        self.raise(mem::take(&mut other.flags));
    }

    /// Returns true if a step is pending.
    pub fn is_pending(&self) -> bool {
        self.begun
    }

    /// Writes the flags of all calls since the last `take_flags` to a uint32, and clears them.
    pub fn take_flags(&mut self, dst: &View<'_>) -> Result<()> {
        // SAFETY: `dst` is a view of one uint32, at any address.
        unsafe { dst.data().cast::<u32>().write_unaligned(self.flags) };
        self.flags = 0;
        Ok(())
    }

    /// Writes the scales of the last encode, one float32 per segment.
    pub fn scales(&mut self, _: &CodecPlan, dst: &View<'_>) -> Result<()> {
        for (segment, scale) in self.scales.iter().enumerate() {
            // SAFETY: `dst` is a view of one float32 per segment, at any address.
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

/// Returns true if a bool, an int32 or a float32 is not 0. Tests its bits, for any floating-point environment.
fn is_not_zero(scalar: &View<'_>) -> bool {
    if scalar.dtype().size == 1 {
        // SAFETY: `scalar` is a view of one element of one byte.
        return unsafe { scalar.data().read() } != 0;
    }
    // SAFETY: `scalar` is a view of one element of four bytes, at any address.
    let bits = unsafe { scalar.data().cast::<u32>().read_unaligned() };
    if scalar.dtype().is_float() { bits & 0x7fff_ffff != 0 } else { bits != 0 }
}

/// Returns the float32 of a view, or 1 without a view.
fn factor(scalar: Option<&View<'_>>) -> f32 {
    scalar.map_or(1.0, memory::read)
}
