//! Compressed all-reduce of gradients: 1 to 16 bits per element, on CPU and CUDA.
//!
//! The library also passes tensors between frameworks, devices and processes: DLPack in, DLPack out.
//! The product is `libgradcodec.so` with `include/gradcodec.h`; [`capi`] holds its functions under the same names.
//!
//! Each folder is one feature, and uses only folders that are listed before it:
//!
//! - `ffi`: errors, panics, handles, borrowed arguments, environment variables, libraries found at run time.
//! - `dlpack`: tensors in and out.
//! - `cpu`: threads, instruction sets, host memory. `cuda`: the driver, contexts, launches, device memory.
//! - `device`: the queue of a call on either of them; new tensors.
//! - `bits`, `copy`, `share`, `jit`, `codec`, `comm`: the features.
//! - `about`: the version, and the text for bug reports.
//! - [`capi`]: all exported functions.
//!
//! Inside a folder `api` has its exported functions, and `ops` checks arguments and chooses the device. `plan` has the
//! layout of elements and their bits, and `cpu` and `cuda` do the work.

#[cfg(not(panic = "unwind"))]
compile_error!("gradcodec turns panics into a status: build it with panic = \"unwind\"");
#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
compile_error!("gradcodec is written for 64-bit little-endian machines");

mod about;
mod bits;
/// The exported functions.
///
/// # Safety
/// The pointers of an unsafe function are as its text describes them, and `struct_size` bytes of options are readable.
/// Nothing else uses the memory that is written to until the work is done. The text of a function has its further
/// requirements.
pub mod capi;
mod codec;
mod comm;
mod copy;
mod cpu;
mod cuda;
mod device;
mod dlpack;
mod ffi;
mod jit;
mod share;
