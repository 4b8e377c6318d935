//! Bits: booleans, integers and signs of floats, 8 in a byte.

#[allow(non_camel_case_types, clippy::missing_safety_doc, reason = "C names; lib.rs says what all require")]
pub mod api;
pub mod cpu;
pub mod cuda;
pub mod ops;
pub mod plan;
pub mod signs;
