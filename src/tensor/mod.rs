//! DLPack in and out: what comes in is a validated [`View`], what goes out are [`Outputs`].

mod capsule;
mod dtype;
mod output;
mod shape;
mod view;

pub use capsule::release_capsule;
pub use dtype::Dtype;
pub use output::{Outputs, Release, from_pointer, from_versioned, release, to_versioned};
pub use shape::Shape;
pub use view::{Device, Name, View};
