//! CUDA: the driver API, without the toolkit.

mod allocator;
pub mod bits;
pub mod codec;
pub mod compiled;
mod context;
pub mod copy;
mod device;
mod divisor;
mod driver;
mod event;
mod grid;
pub mod ipc;
mod launch;
mod layout;
mod memory;
mod module;
pub mod nodes;
mod own_stream;
pub mod peers;
mod pinned;
mod queue;
pub mod signs;
mod tiled;

pub use compiled::Image;
pub use context::InPrimary;
pub use device::Uuid;
pub use event::{Event, EventHandle};
pub use memory::Memory;
pub use module::{LaunchShape, MODULES, launch_shape};
pub use pinned::Pinned;
pub use queue::Queue;
