//! CUDA: the driver API, without the toolkit.

mod allocator;
pub mod context;
pub mod device;
pub mod divisor;
pub mod driver;
pub mod event;
pub mod grid;
pub mod ipc;
pub mod launch;
pub mod layout;
pub mod memory;
pub mod module;
pub mod own_stream;
pub mod peers;
pub mod pinned;
pub mod queue;
pub mod staging;
pub mod stream;

pub use context::InPrimary;
pub use device::Uuid;
pub use event::{Event, EventHandle};
pub use memory::Memory;
pub use module::{LaunchShape, MODULES, launch_shape};
pub use pinned::Pinned;
pub use queue::Queue;
pub use stream::Stream;
