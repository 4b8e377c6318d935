//! DLPack in and out. What comes in is a [`View`], whose elements can be read, [`Elements`], which are copied whatever they
//! are, or a [`Described`] tensor that is only passed on; what goes out are [`Outputs`]. Nothing here knows where memory
//! comes from: an [`Owner`] is a value.

mod capsule;
mod described;
mod dtype;
mod elements;
mod name;
mod output;
mod owner;
mod shape;
mod view;

pub use capsule::release_capsule;
pub use described::{Described, reach};
pub use dtype::{Dtype, Kind, element_bits};
pub use elements::Elements;
pub use name::Name;
pub use output::{
    NewTensor, NewTensors, Outputs, Release, from_pointer, from_versioned, over_described, release, to_versioned,
};
pub use owner::Owner;
pub use shape::Shape;
pub use view::{Device, View, check_apart};
