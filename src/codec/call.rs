//! Arguments that a call of a codec passes to its device.

use crate::{
    cuda::peers,
    dlpack::{Address, Dtype, View},
    ffi::name::Name,
};

/// Chunks to reduce: some chunks of each of several payloads.
#[derive(Clone, Copy)]
pub struct Received {
    pub name: Name,
    /// Address of the first payload's first chunk.
    pub first: Address,
    pub payloads: usize,
    /// Distance from payload to payload, in bytes.
    pub apart: i64,
}

impl Received {
    /// Describes one chunk of each of several payloads. The chunks follow one another.
    pub fn of(chunks: &View<'_>, stride: i64) -> Self {
        let payloads = (chunks.elements() / stride) as usize;
        Self { name: chunks.name(), first: Address(chunks.data()), payloads, apart: stride }
    }

    /// Returns the address of a payload's first chunk.
    pub fn at(&self, payload: usize) -> *mut u8 {
        self.first.at(payload * self.apart as usize)
    }
}

/// Parameters of decoding a payload.
pub struct Decoding<'a> {
    /// Dtype of the decoded values: float32, float16 or bfloat16.
    pub dtype: Dtype,
    /// Divisor of the values: at least 1.
    pub divisor: i32,
    /// Factor by which the quotients are multiplied: a float32. None: 1.
    pub factor: Option<&'a View<'a>>,
    /// True if values are added to the output, false if they replace it.
    pub add: bool,
    /// True if the previous launch on the stream is one of ours, so that this launch may begin before that one ends.
    pub behind_ours: bool,
}

/// Condition for taking a step back although every number was finite.
pub enum Skip<'a> {
    Never,
    Always,
    /// Takes the step back if this scalar, a bool, an int32 or a float32, is not 0. NaN is not 0.
    If(&'a View<'a>),
}

/// Rows of errors that become the errors of a rank: fl(fl(sum / divisor_of_sum) * factor). The sum begins with `start`,
/// to which fl(row / divisor) is added for each row in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rows {
    /// Number of the first row.
    pub first: usize,
    /// Number of rows: at least 1.
    pub count: usize,
    /// First summand: +0, or -0, which changes no number that is added to it.
    pub start: f32,
    pub divisor: f32,
    pub divisor_of_sum: f32,
    pub factor: f32,
}

impl Rows {
    /// Single row, unchanged.
    pub const ONE: Self = Self { first: 0, count: 1, start: -0.0, divisor: 1.0, divisor_of_sum: 1.0, factor: 1.0 };
}

/// Destination of the chunks that a codec makes.
pub enum Destination<'a> {
    Memory(View<'a>),
    /// Receive slots of other ranks, on a GPU.
    Peers(peers::PeerDestination),
}
