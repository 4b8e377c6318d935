//! gradcodec: gradients at one bit per element, and tensors between frameworks. DLPack in, DLPack out.
//!
//! This library packs booleans (non-zero is 1) and signs to bits and unpacks them again, with error feedback if you
//! like, in memory that NumPy, PyTorch, CuPy, JAX or your own program has allocated. It links against neither a
//! framework nor a CUDA toolkit. Tensors cross this interface as DLPack structs, which describe memory and who owns it,
//! so nothing is copied on the way in or out.
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
//! Compile it with `cc program.c $(pkg-config --cflags --libs gradcodec)`; if the library is outside the system's
//! folders, add `-Wl,-rpath,$(pkg-config --variable=libdir gradcodec)`.
//!
//! What holds for all functions comes next, up to NAMES. Then, from CUDA to MEMORY OF CARDS, comes what only programs
//! with tensors on a card need. After that each function says what it does, what its parameters are, and what can go
//! wrong.
//!
//! FUNCTIONS
//!
//! TWO TIERS
//!
//! Simple functions take and return DLManagedTensor. They allocate their outputs, and are complete when they return.
//!
//! Stream functions are those whose names end in `_into`, those of codecs and of all-reduces, and gc_kernel_run(). They
//! take DLTensor views of your memory and a `void *stream`. For CPU and CUDAHost tensors the stream is ignored, so pass
//! NULL, and the work is complete when the function returns. What they do on CUDA is said under STREAMS.
//!
//! OWNERSHIP
//!
//! Inputs are borrowed for the call, never released. Of a borrowed DLManagedTensor only `dl_tensor` is read, so a view
//! `{ v->dl_tensor, NULL, NULL }` of a versioned tensor is a valid input. Outputs are yours. Release each once, by
//! gc_tensor_free() or its own deleter, on any thread, in any order, also after the inputs are gone. When a call fails,
//! `*out` is untouched and what you passed is still yours.
//!
//! TENSORS THAT ARE TAKEN
//!
//! Inputs may have any strides, counted in elements, also negative ones and zero; strides that are NULL mean compact,
//! in C order. They may have any byte_offset, data NULL when there is no element, any stride where the size is 1, a
//! NULL deleter, and ndim 0. Elements may lie at any address. Bytes between the elements of a strided input may be
//! read, but never change a result.
//!
//! Elements that are read or written are bool (code 6, 8 bits), int and uint of 8, 16, 32 and 64 bits, float16,
//! float32, float64 or bfloat16, of one lane. The devices are CPU (1) and CUDAHost (3), where the CPU works and outputs
//! are CPU tensors, and CUDA (2) and CUDAManaged (13), where the card works and outputs are CUDA tensors. Copies
//! without a cast take every dtype, lanes included; functions that only pass a tensor on take every dtype on every
//! device. They say so.
//!
//! Outputs have explicit strides, byte_offset 0, data NULL when empty, and always a deleter. Memory that this library
//! allocates is aligned to 256 bytes.
//!
//! WHEN A CALL FAILS
//!
//! Functions that can fail return a gc_status_t, 0 for success, with two exceptions: functions that return a number of
//! bytes or elements return -1, and functions without a result only set the last error. gc_last_error() has the failure
//! in words, with the number that was wrong. Arguments are checked before anything runs, so a status from that check
//! means that nothing has changed. If several things are wrong, any one of them may be reported. Where this file names
//! a status, it leaves out GC_STATUS_.
//!
//! A pointer that is NULL or not aligned gives INVALID_ARGUMENT. No other bad pointer can be detected. Any tensor may
//! give
//!
//! - INVALID_ARGUMENT: a negative size or ndim; shape NULL, or data NULL although there are elements; tensors on
//!   different devices, except in copies;
//! - UNSUPPORTED_DTYPE, UNSUPPORTED_DEVICE: not one of those above;
//! - DRIVER_UNAVAILABLE: a CUDA tensor, and no driver that could take it; UNSUPPORTED_DEVICE: a card that is not there;
//! - CUDA, CONTEXT_LOST: on CUDA, an error of the driver, which the message names with the driver's function;
//! - SIZE_OVERFLOW: more than 2^63 - 1 elements, or some of them beyond the address space.
//!
//! A tensor to be written to also gives INVALID_ARGUMENT if its bytes, from the lowest to the highest address,
//! intersect those of an input or of another output; if its own elements overlap; or if that cannot be decided within a
//! millisecond, which takes many dimensions with interleaved strides.
//!
//! Functions that return new tensors or handles, gc_comm_reserve(), gc_compressed_allreduce(), and all functions on
//! CUDA, may give OUT_OF_MEMORY. What a function lists comes in addition to all this.
//!
//! THREADS, FORKS AND STACKS
//!
//! Any thread may call any function at any time on different objects, and calls may share inputs. A thread that is
//! cancelled during a call ends after it, if its cancellation is deferred, as it is by default; one whose cancellation is
//! asynchronous must not call. A forked child may go on calling on CPU tensors; CUDA does not work there. A
//! call uses less than 32 KiB of stack, not counting your callbacks, the CUDA driver, and NVRTC, which takes about 128
//! KiB when a kernel is compiled.
//!
//! Your deleters and callbacks run on the thread that releases. They must return: no exception and no longjmp may leave
//! them.
//!
//! NAMES
//!
//! Functions and types begin with gc_, constants with GC_, version macros with GRADCODEC_. (`gc` alone belongs to the
//! Boehm collector: the two can be used together.)
//!
//! CUDA
//!
//! The driver is looked for when the first CUDA tensor comes: libcuda.so.1, of CUDA 12.0 (525) or newer, and devices of
//! compute capability 7.5 and up. Nothing else is needed, and without it everything else works.
//!
//! The device is that of the tensors; CPU and CUDAHost count as one, and so do CUDA and CUDAManaged with the same
//! number. The context is the stream's own (INVALID_ARGUMENT if that is on another device). For NULL, 1 and 2 it is
//! your current context if that is on the device, and the device's primary context otherwise. When a call returns, your
//! current context and device are as before.
//!
//! A fault of the device is reported by the call that caused it or by a later one: as CUDA or, when nothing in the
//! context will work any more, as CONTEXT_LOST. Outputs of work that was under way are undefined then.
//!
//! STREAMS
//!
//! Simple functions work on the legacy default stream, so inputs must be ready there: `__dlpack__(stream=1)` sees to
//! that. Non-blocking streams are not ordered with it. CUDA allows no work there while a stream of the same context
//! that was created without the non-blocking flag is being captured.
//!
//! Stream functions work on the stream that you pass: NULL or 1 is the legacy default stream (also in programs that are
//! compiled with per-thread default streams: pass 2 there), 2 the per-thread one, anything else a CUstream or
//! cudaStream_t. They enqueue the work and return. The memory of src and dst must stay, and src must not change, until
//! the stream has done the work; the structs, shapes and strides are read during the call. Wait for copies to or from
//! CPU and CUDAHost tensors yourself before the CPU works on them.
//!
//! Once gc_prepare() has run, stream functions allocate nothing and synchronize nothing, except all-reduces, whose
//! sections say what they allocate and wait for. Without gc_prepare(), a first call in a context loads the kernels,
//! which waits for all that runs there. For gc_kernel_run() it is gc_kernel_prepare() that does this: see KERNELS.
//! gc_copy_into() also takes tensors of two devices, and says what it enqueues, what it waits for and what it allocates
//! then.
//!
//! GRAPHS
//!
//! Functions whose names end in `_into` can be captured in a CUDA graph, after gc_prepare() in the context that
//! captures, on a stream of yours (CUDA captures neither NULL nor 1); gc_kernel_run() after gc_kernel_prepare() there;
//! codecs and all-reduces as their sections say. Memory that a captured call uses must stay until the graph's last
//! launch; that includes tensors that this library has made, so do not release them before. Meanwhile other threads may
//! call anything except simple functions in that context, if the stream was created without the non-blocking flag.
//!
//! MEMORY OF CARDS
//!
//! When a tensor that this library has made is released, its device memory is kept for new tensors: up to 1/32 of the
//! device's memory, at least 256 MiB. What exceeds that is freed by calls that return new tensors, a few blocks each,
//! and by gc_trim(). Memory is used again only after all work that was enqueued in its context before the release is
//! done, on any stream; work of other contexts is not waited for, such as a gc_copy_into() to another GPU. A release
//! calls no driver: it works with any context current or none, when the streams are gone, and while the process ends.
//!
//! Other libraries cannot use what is kept, so call gc_trim() before they need memory; a call of this library that
//! finds no memory gives it back first. cudaDeviceReset() destroys what is loaded and kept on the device, and nothing
//! works on it afterwards.
//!
//! These calls may wait for all work in the context: those that return new tensors, where much has been released;
//! gc_prepare(), gc_kernel_prepare() and first calls, to load kernels; and gc_trim(). Such a call must not stand between
//! the launches of a collective (NCCL's for several GPUs of one process, say): the launch that it holds up is the one
//! that it waits for.

mod allreduce;
mod bits;
mod borrow;
mod codec;
mod comm;
mod copy;
mod devices;
mod handle;
mod kernel;
mod nccl;
mod onebit;
mod peers;
mod share;
mod signs;
mod status;
mod tensors;
mod threads;
mod two;
mod version;

pub use allreduce::*;
pub use bits::*;
pub use codec::*;
pub use comm::*;
pub use copy::*;
pub use devices::*;
pub use kernel::*;
pub use nccl::*;
pub use onebit::*;
pub use peers::*;
pub use share::*;
pub use signs::*;
pub use status::*;
pub use tensors::*;
pub use threads::*;
pub use two::*;
pub use version::*;

// The constants of C's enums, for Rust programs: `BitOrder::Big as gc_bit_order_t`.
pub use crate::{
    error::Status,
    plan::{
        bits::BitOrder,
        codec::{Decode, ErrorKind, Flag, Kind, NonFinite, ScaleRule},
    },
};

// All that a Rust program has to name to fill in a tensor, so that it needs no DLPack crate of its own.
pub use dlpark::{
    DlpackFlags,
    ffi::{
        DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion,
        DLTensor,
    },
};
