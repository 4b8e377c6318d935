//! What a call of a codec hands to the device that it works on.

use crate::{
    cuda::peers,
    dlpack::{Address, Dtype, View},
    ffi::name::Name,
};

/// What is reduced: some chunks of each of several payloads.
#[derive(Clone, Copy)]
pub struct Received {
    pub name: Name,
    /// The first of the first payload's.
    pub first: Address,
    pub payloads: usize,
    /// Bytes from payload to payload.
    pub apart: i64,
}

impl Received {
    /// A chunk of each, one behind the other.
    pub fn of(chunks: &View<'_>, stride: i64) -> Self {
        let payloads = (chunks.elements() / stride) as usize;
        Self { name: chunks.name(), first: Address(chunks.data()), payloads, apart: stride }
    }

    /// What is of one of the payloads.
    pub fn at(&self, payload: usize) -> *mut u8 {
        self.first.at(payload * self.apart as usize)
    }
}

/// How a payload is decoded.
pub struct Decoding<'a> {
    /// float32, float16 or bfloat16.
    pub dtype: Dtype,
    /// What scales are divided by: at least 1.
    pub divisor: i32,
    /// What they are then multiplied by: one float32, or 1.
    pub factor: Option<&'a View<'a>>,
    /// Whether values are added to what is there, or set.
    pub add: bool,
    /// On a GPU: the launch before is one of ours, so that this one may begin while that one ends.
    pub behind_ours: bool,
}

/// Whether a commit takes a step back although every number was finite.
pub enum Skip<'a> {
    Never,
    Always,
    /// If this scalar, a bool, an int32 or a float32, is not 0. NaN is not 0.
    If(&'a View<'a>),
}

/// Which rows of errors become those of a rank: fl(fl(sum / divisor_of_sum) * factor), where the sum begins with
/// `start`, to which fl(row / divisor) is added for each row in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rows {
    /// The number of the first one.
    pub first: usize,
    /// At least 1.
    pub count: usize,
    /// +0, or -0, which changes no number that is added to it.
    pub start: f32,
    pub divisor: f32,
    pub divisor_of_sum: f32,
    pub factor: f32,
}

impl Rows {
    /// A row as it is.
    pub const ONE: Self = Self { first: 0, count: 1, start: -0.0, divisor: 1.0, divisor_of_sum: 1.0, factor: 1.0 };
}

/// Where the chunks go that a codec makes.
pub enum Destination<'a> {
    Memory(View<'a>),
    /// Into receive slots of other ranks, on a GPU.
    Peers(peers::Sending),
}
