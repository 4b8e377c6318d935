//! Gradients at one to sixteen bits per element, and tensors between frameworks: DLPack in and DLPack out.
//!
//! The product is `libgradcodec.so` with `include/gradcodec.h`; [`capi`] holds its functions under the same names.
//!
//! In layers, each of which uses only those before it:
//!
//! - `detached`: threads of the library's own.
//! - `error`, `environment`, `panics`: errors, the floating-point environment of calls, and the boundary at which panics
//!   and failures become a status.
//! - `fallible`: lists whose allocation can fail. `lock`: one call at a time on a handle.
//! - `dynamic`: libraries that are found at run time, and tables of their functions.
//! - `tensor`: DLPack: validated views of inputs, owners of outputs.
//! - `plan`: layouts of elements and bits, as values.
//! - `compile`: kernels compiled at run time: NVRTC, and the disk cache.
//! - `backend`: queues, memory, and the functions that execute a plan on a device.
//! - `ops`: operations: checks, plans, the choice of the backend's function.
//! - `comm`: communicators and all-reduces.
//! - `share`: tensors for other processes.
//! - `about`: the text for bug reports.
//! - [`capi`]: the only exported code: checks pointers, borrows, calls an operation, hands out.

#[cfg(not(panic = "unwind"))]
compile_error!("gradcodec turns panics into a status: build it with panic = \"unwind\"");
#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
compile_error!("gradcodec is written for 64-bit little-endian machines");

mod about;
mod backend;
/// The exported functions.
///
/// # Safety
/// Of each that is unsafe: its pointers are as its text describes them, `struct_size` bytes of options are readable, and
/// nothing else uses the memory that is written to until the work is done. What one wants besides stands there.
#[allow(non_camel_case_types, reason = "the names in the header")]
#[allow(clippy::missing_safety_doc, reason = "said above, once for all of them")]
pub mod capi;
mod comm;
mod compile;
mod detached;
mod dynamic;
mod environment;
mod error;
mod fallible;
mod lock;
mod ops;
mod panics;
mod plan;
mod share;
mod tensor;
