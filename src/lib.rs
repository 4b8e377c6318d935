//! Gradients at one bit an element, and tensors between frameworks: DLPack in and DLPack out.
//!
//! The product is `libgradcodec.so` with `include/gradcodec.h`; [`capi`] holds its functions under the same names.
//!
//! - [`capi`]: the only exported code: checks, borrows, calls an operation, hands out.
//! - `tensor`: DLPack in and out: validated views, owned outputs.
//! - `ops`: what an operation means: shapes, layouts, sizes, plans. No device code, no FFI.
//! - `backend`: where it runs.

#[cfg(not(panic = "unwind"))]
compile_error!("gradcodec turns panics into a status: build it with panic = \"unwind\"");
#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
compile_error!("gradcodec is written for 64-bit little-endian machines");

mod backend;
pub mod capi;
mod error;
mod ops;
mod tensor;
