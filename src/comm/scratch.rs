//! What gc_compressed_allreduce() works in.

use crate::{
    error::Result,
    ops::codec::{Codec, Descriptor},
    plan::codec::{ErrorKind, Kind, NonFinite, Reduction, ScaleRule},
    tensor::{Device, Dtype},
};

use super::buffers::Buffers;

/// For calls with up to `most` elements on a device.
pub struct Scratch {
    pub device: Device,
    pub most: i64,
    /// Carries the caller's errors during a call.
    pub codec: Codec,
    pub buffers: Buffers,
}

impl Scratch {
    /// The last one on this device that has room for so many elements.
    pub fn find(all: &mut [Self], device: Device, elements: i64) -> Option<&mut Self> {
        all.iter_mut().rfind(|one| one.device == device && one.most >= elements)
    }

    /// The codec of a rank, for so many elements, at least 1.
    pub fn codec(device: Device, elements: i64, rank: usize, world: usize) -> Result<Codec> {
        Codec::new(&Descriptor {
            kind: Kind::Onebit,
            device,
            values: Dtype::F32,
            results: Dtype::F32,
            error: ErrorKind::Float32,
            scale: ScaleRule::Rms,
            nonfinite: NonFinite::Propagate,
            reduction: Reduction::Mean,
            beta: 1.0,
            segments: None,
            raw: None,
            elements,
            n_chunks: world,
            server: rank as u64 + 1,
        })
    }
}
