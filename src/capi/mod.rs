//! gradcodec: gradients at one bit an element, and tensors between frameworks. DLPack in, DLPack out.
//!
//! This library packs truth and signs to bits and unpacks them again, on memory that NumPy, PyTorch, CuPy, JAX or a
//! program of your own has allocated. It links against neither a framework nor a CUDA toolkit. Tensors cross this
//! interface as DLPack structs, so nothing is copied on the way in or out.
//!
//! Start here:
//!
//! ```c
//! #include <gradcodec.h>
//! #include <stdio.h>
//!
//! int main(void) {
//!     unsigned char mask[1000] = {1, 0, 1};
//!     int64_t length = 1000;
//!     DLDevice cpu = {kDLCPU, 0};
//!     DLDataType boolean = {kDLBool, 8, 1};
//!     DLManagedTensor *src, *chunks[4];
//!     if (gc_tensor_from_pointer(mask, cpu, boolean, 1, &length, NULL, NULL, NULL, &src) != GC_STATUS_OK ||
//!         gc_pack_chunks(src, 4, chunks) != GC_STATUS_OK) {
//!         fprintf(stderr, "%s\n", gc_last_error());
//!         return 1;
//!     }
//!     for (int k = 0; k < 4; k++) {
//!         const unsigned char *bytes = chunks[k]->dl_tensor.data; // gc_chunk_bytes(1000, 4) of them, to send
//!         printf("chunk %d: %d bytes, the first is 0x%02x\n", k, (int)chunks[k]->dl_tensor.shape[0], bytes[0]);
//!         gc_tensor_free(chunks[k]);
//!     }
//!     gc_tensor_free(src);
//!     return 0;
//! }
//! ```
//!
//! Compile it with `cc program.c $(pkg-config --cflags --libs gradcodec)`, and where the library lies outside the
//! system's folders with `-Wl,-rpath,$(pkg-config --variable=libdir gradcodec)` too. Functions are grouped as VERSION,
//! ERRORS, TENSORS, BITS, WORKERS and DEVICES; what holds for all of them comes first.
//!
//! TWO TIERS
//!
//! Simple: functions that take and return DLManagedTensor. They allocate their outputs and are complete when they
//! return. On CUDA they work on the legacy default stream: inputs must be ready there (`__dlpack__(stream=1)` sees to
//! it; non-blocking streams are not ordered with it). CUDA allows no work there while a stream of the same context that
//! was created without the non-blocking flag is being captured.
//!
//! Stream: functions whose names end in `_into`. They take DLTensor views of your memory and a `void *stream`: NULL or
//! 1 is the legacy stream (also in programs compiled with per-thread default streams: say 2 there), 2 the per-thread
//! one, anything else a CUstream or cudaStream_t. On CUDA they enqueue the work there and return: the memory of src
//! and dst must stay, and src unchanged, until the stream has done it; the structs, shapes and strides are read during
//! the call. Once gc_prepare() has run they allocate nothing and synchronize nothing. (Without it a first call in a
//! context loads the kernels, which waits for all that runs there.) For CPU and CUDAHost tensors the stream is ignored
//! and the work is complete when they return: wait for copies to or from them yourself.
//!
//! Graphs: `_into` can be captured in a CUDA graph, after gc_prepare() in the context that captures, on a stream of
//! yours (CUDA captures neither NULL nor 1). Memory that a captured call uses must stay until the graph's last launch,
//! a tensor of ours too: do not release it before. Other threads may call anything meanwhile, but for what is said of
//! the simple tier.
//!
//! CUDA
//!
//! The driver is looked for when a first CUDA tensor comes: libcuda.so.1, of CUDA 12.0 (525) or newer, and devices of
//! compute capability 7.5 and up. Nothing else is needed, and without it everything else works.
//!
//! The device comes from the tensors; CPU and CUDAHost count as one, and so do CUDA and CUDAManaged of one number. The
//! context is the stream's own (one of another device is an INVALID_ARGUMENT); for NULL, 1 and 2 your current one if
//! it is on that device, else the device's primary one. Your current context and device are as before when a call
//! returns.
//!
//! Device memory of ours is kept, when its tensor is released, for tensors to come, and used again only after all work
//! that was enqueued in its context before the release, on any stream: to be sure of that, a call that returns new
//! tensors may wait for all work there, where much has been released. A call of ours that finds no memory gives what
//! is kept back first; other libraries cannot use it: call gc_trim() before they need memory. Releasing calls no
//! driver: it works with any context current or none, when the streams are gone, and while the process ends. Resetting
//! a device takes what is loaded and kept there away: nothing works on it afterwards.
//!
//! A fault of the device surfaces in the call that caused it or in a later one, as CUDA or, when nothing on the context
//! will work any more, CONTEXT_LOST; outputs of work that was under way are undefined then.
//!
//! OWNERSHIP
//!
//! Inputs are borrowed for the call, never released. Of a borrowed DLManagedTensor only `dl_tensor` is read, so a view
//! `{ v->dl_tensor, NULL, NULL }` of a versioned tensor is a valid input. Outputs are yours, to release by
//! gc_tensor_free() or their own deleter, once, on any thread, in any order, also after the inputs are gone. When a
//! call fails, `*out` is untouched and what you passed is still yours.
//!
//! WHAT TENSORS MAY BE
//!
//! Taken: any strides, in elements, NULL for compact, negative and zero ones too; any byte_offset; data NULL when there
//! is no element; sizes of 1 with whatever stride; a NULL deleter; ndim 0. Elements may lie at any address. Bytes between
//! the elements of a strided input may be read, but never change a result. Dtypes: bool (code 6, 8 bits), int and uint of
//! 8, 16, 32 and 64 bits, float16, float32, float64, bfloat16, of one lane. Devices: CPU 1 and CUDAHost 3, which are the
//! CPU's work and give CPU outputs; CUDA 2 and CUDAManaged 13, which are CUDA's and give CUDA outputs.
//! Given: explicit strides, byte_offset 0, data NULL when empty, a deleter always; memory of ours is aligned to 256.
//!
//! WHEN A CALL FAILS
//!
//! Functions that can fail return a gc_status_t, 0 for success; but gc_chunk_bytes() returns -1 for failure, and
//! functions without a result only set the last error. gc_last_error() has the failure in words, with the number that
//! was wrong. Arguments are checked before anything runs: a status from that check means that nothing changed. Of
//! several faults any one may be reported.
//!
//! Any pointer may cause INVALID_ARGUMENT, if it is NULL or not aligned; beyond that it must be good, for a wild one
//! cannot be told from it. Any tensor may cause
//!
//! - INVALID_ARGUMENT: a negative size or ndim; shape NULL, or data with elements; tensors on different devices;
//! - UNSUPPORTED_DTYPE, UNSUPPORTED_DEVICE: not one of those above;
//! - DRIVER_UNAVAILABLE: on CUDA, without a driver that could take it; UNSUPPORTED_DEVICE: one that is not there;
//! - CUDA, CONTEXT_LOST: on CUDA, an error of the driver, which the sentence names with the driver's function;
//! - SIZE_OVERFLOW: more than 2^63 - 1 elements, or some beyond the address space.
//!
//! Any tensor to be written to may cause INVALID_ARGUMENT also by overlap: if its bytes, from the lowest to the highest
//! address, intersect those of an input or of another output; if its own elements overlap; or if its strides are so
//! tangled that this cannot be decided in a millisecond, which takes many dimensions, each reaching into the next.
//!
//! Functions that return new tensors, and any on CUDA, may cause OUT_OF_MEMORY. What a function lists is its own,
//! beyond all this.
//!
//! THREADS, FORKS AND STACKS
//!
//! Any thread may call any function at any time on different objects, and inputs may be shared between calls. A forked
//! child may go on calling on CPU tensors; CUDA does not work there. A call uses less than 32 KiB of stack, your
//! callbacks and the CUDA driver not counted.
//!
//! Deleters and callbacks of yours run on the thread that releases. They must return: no exception and no longjmp may
//! leave them.
//!
//! NAMES
//!
//! Functions and types of ours begin with gc_, constants with GC_, version macros with GRADCODEC_. (`gc` alone belongs
//! to the Boehm collector: the two can be used together.)

mod bits;
mod borrow;
mod devices;
mod status;
mod tensors;
mod threads;
mod version;

pub use bits::*;
pub use devices::*;
pub use status::*;
pub use tensors::*;
pub use threads::*;
pub use version::*;

// All that a Rust program has to name to fill in a tensor, so that it needs no DLPack crate of its own.
pub use dlpark::{
    DlpackFlags,
    ffi::{
        DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion,
        DLTensor,
    },
};
