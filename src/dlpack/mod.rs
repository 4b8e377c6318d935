//! DLPack input and output. An input is a [`View`], whose elements can be read, [`Elements`], which are copied whatever
//! their dtype, or a [`Described`] tensor, which is only passed on. [`Outputs`] are handed out. This module does not
//! depend on the source of memory: an [`Owner`] is a value.

pub mod address;
#[allow(non_camel_case_types, clippy::missing_safety_doc, reason = "C names; lib.rs says what all require")]
pub mod api;
mod capsule;
pub mod checks;
mod described;
mod dtype;
mod elements;
pub mod floats;
pub mod input;
pub mod loops;
mod output;
mod owner;
pub mod rules;
mod shape;
mod view;

pub use address::Address;
pub use capsule::release_capsule;
pub use described::{Described, reach};
pub use dtype::{Dtype, Kind, element_bits};
pub use elements::Elements;
pub use output::{
    NewTensor, NewTensors, Outputs, Release, from_pointer, from_versioned, over_described, release, to_versioned,
};
pub use owner::Owner;
pub use shape::Shape;
pub use view::{Device, View, check_apart};
