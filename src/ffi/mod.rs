//! Common code of the functions of the C interface: errors, the boundary at which panics and failures become a status,
//! borrowed arguments, handles, environment variables, and libraries found at run time.

#[allow(non_camel_case_types, clippy::missing_safety_doc, reason = "C names; lib.rs says what all require")]
pub mod api;
pub mod borrow;
pub mod detached;
pub mod dynamic;
pub mod environment;
pub mod error;
pub mod fallible;
pub mod handle;
pub mod lock;
pub mod name;
pub mod panics;
pub mod variable;
