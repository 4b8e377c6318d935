//! Block codecs on the CPU: docs/NUMERICS.md 11, bit for bit.
//!
//! Tiles of a run go to threads, as for ONEBIT, and a thread goes over a tile in steps: c, in float32 on the stack,
//! then scales, codes and errors, which are copied to where they belong. Blocks are read the other way round. So loops
//! touch no payload, which may be another process's memory: it is only copied, each byte once.
//!
//! - `coding`: what a code and a scale stand for; `kernels`: the loops, for each instruction set;
//! - `payload`: where blocks and raw elements lie in chunks;
//! - `encode`, `decode`, `reduce` and its halves, `errors`: the operations.

mod coding;
mod decode;
mod encode;
mod errors;
mod kernels;
mod payload;
mod reduce;

pub use errors::{errors_of, keep};
