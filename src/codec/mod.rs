//! Codecs, which compress gradients to payloads.

#[allow(non_camel_case_types, clippy::missing_safety_doc, reason = "C names; lib.rs says what all require")]
pub mod api;
pub mod call;
pub mod cpu;
pub mod cuda;
pub mod ops;
pub mod plan;
