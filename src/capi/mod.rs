//! gradcodec: gradients at one to sixteen bits per element, and tensors between frameworks. DLPack in, DLPack out.
//!
//! This library compresses gradients to signs and one scale per tensor, with error feedback: the error of one step is
//! added to the next gradient. It averages compressed gradients over ranks, packs signs and booleans to bits, and
//! copies and shares tensors. It works in memory that NumPy, PyTorch, CuPy, JAX or your own program has allocated, and
//! links against neither a framework nor a CUDA toolkit. Tensors cross this interface as DLPack structs, which describe
//! memory and its owner, so they are not copied on the way in or out.
//!
//! Start here:
//!
//! ```c
//! #include <gradcodec.h>
//! #include <stdio.h>
//! #include <stdlib.h>
//!
//! int main(void) {
//!     float gradient[1000], received[1000];
//!     for (int i = 0; i < 1000; i++) gradient[i] = i % 2 == 0 ? 0.5f : -0.25f;
//!     gc_codec_options_t options = {.struct_size = sizeof options, .codec = GC_CODEC_ONEBIT, .n_elements = 1000};
//!     gc_codec_t *codec;
//!     if (gc_codec_create(&options, &codec) != GC_STATUS_OK) {
//!         fprintf(stderr, "%s\n", gc_last_error());
//!         return 1;
//!     }
//!     int64_t length[] = {1000}, bytes[] = {gc_codec_payload_bytes(codec)};
//!     DLTensor values = {gradient, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, length, NULL, 0};
//!     DLTensor payload = {malloc(bytes[0]), {kDLCPU, 0}, 1, {kDLUInt, 8, 1}, bytes, NULL, 0};
//!     DLTensor results = {received, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, length, NULL, 0};
//!     const DLTensor *inputs[] = {&values};
//!     DLTensor *outputs[] = {&results};
//!     for (int step = 0; step < 2; step++) {   // the same gradient twice; the error of the first is added
//!         if (gc_codec_encode(codec, inputs, 1, NULL, NULL, &payload, NULL) != GC_STATUS_OK ||
//!             gc_codec_decode(codec, &payload, 1, NULL, GC_DECODE_SET, outputs, 1, NULL) != GC_STATUS_OK) {
//!             fprintf(stderr, "%s\n", gc_last_error());
//!             return 1;
//!         }
//!         printf("4000 bytes in %d: %g, %g\n", (int)bytes[0], received[0], received[1]);
//!     }
//!     gc_codec_free(codec);
//!     free(payload.data);
//!     return 0;
//! }
//! ```
//!
//! It prints `4000 bytes in 208: 0.395285, -0.395285`. In the second line, with the error of the first step added, the
//! numbers are 0.433962 and -0.433962.
//!
//! Compile it with `cc program.c $(pkg-config --cflags --libs gradcodec)`; if the library is outside the system's
//! folders, add `-Wl,-rpath,$(pkg-config --variable=libdir gradcodec)`. For several ranks, gc_allreduce_run() does the
//! encoding, the exchanges and the decoding in one call.
//!
//! After the table of functions come the rules for all functions, up to NAMES, and those for tensors on CUDA, up to
//! DEVICE MEMORY. Then each section describes its functions: what they do, their parameters, and their errors.
//! docs/GLOSSARY.md explains the words.
//!
//! FUNCTIONS
//!
//! TWO TIERS
//!
//! Simple functions take and return DLManagedTensor. They allocate their outputs, and are complete when they return.
//!
//! Stream functions have a parameter `void *stream`: functions whose names end in `_into`, those of codecs and of
//! all-reduces, gc_compressed_allreduce(), gc_kernel_run() and gc_kernel_prepare(). They take DLTensor views of your
//! memory. For CPU and CUDAHost tensors the stream is ignored, so pass NULL, and the work is complete when the function
//! returns. STREAMS describes what they do on CUDA.
//!
//! OWNERSHIP
//!
//! Inputs are borrowed for the call and never released. Only `dl_tensor` of a borrowed DLManagedTensor is read, so
//! where `v` is a DLManagedTensorVersioned, `{ v->dl_tensor, NULL, NULL }` is a valid input. Outputs are yours. Release
//! each once, by gc_tensor_free() or its own deleter, on any thread, in any order, also after the inputs were released.
//! When a call fails, `*out` is unchanged and your arguments are still yours.
//!
//! ACCEPTED TENSORS
//!
//! Inputs may have any strides, counted in elements, negative ones and zero included; NULL strides mean compact, in C
//! order. They may have any byte_offset, data NULL if they have no elements, any stride where the size is 1, a NULL
//! deleter, and ndim 0. Elements may lie at any address. Bytes between the elements of a strided input may be read, but
//! never change a result.
//!
//! The dtypes are bool (code 6, 8 bits), int and uint of 8, 16, 32 and 64 bits, float16, float32, float64 and bfloat16,
//! of one lane. The devices, with their numbers in DLPack, are CPU (1), CUDAHost (3), CUDA (2) and CUDAManaged (13).
//! For tensors on CPU and CUDAHost the CPU does the work, and new tensors are on CPU; for those on CUDA and CUDAManaged
//! the GPU does it, and new tensors are on CUDA. Copies without a cast accept every dtype, lanes included, and
//! functions that only pass a tensor on accept every dtype on every device; their descriptions say so.
//!
//! New tensors have explicit strides, byte_offset 0, data NULL when empty, and always a deleter. Memory that this
//! library allocates is aligned to 256 bytes.
//!
//! WHEN A CALL FAILS
//!
//! Functions that can fail return a gc_status_t, 0 for success, with two exceptions: functions that return a number of
//! bytes or elements return -1, and functions without a result, which release objects, only set the last error.
//! gc_last_error() describes the failure, with the value that was wrong. This file names statuses without GC_STATUS_.
//!
//! Arguments are checked before anything is changed. If several are wrong, any one of them may be reported. A later
//! failure, such as one of the driver (CUDA, CONTEXT_LOST) or of an exchange (COMM), may leave tensors partly written,
//! unless the function says otherwise.
//!
//! After PANIC, a defect of this library, please report it with gc_last_error() and gc_build_info(). A codec,
//! communicator or all-reduce that was in use gives PANIC in every later call; release it and go on with a new one.
//!
//! A pointer to a struct, an array or a result that is NULL, where NULL is not offered, or not aligned gives
//! INVALID_ARGUMENT. No other bad pointer can be detected. Any tensor may give
//!
//! - INVALID_ARGUMENT: a negative size or ndim; shape NULL, or data NULL although there are elements; tensors on
//!   different devices, except in copies;
//! - UNSUPPORTED_DTYPE, UNSUPPORTED_DEVICE: not one of those above;
//! - DRIVER_UNAVAILABLE: a CUDA tensor, and no usable driver; UNSUPPORTED_DEVICE: a GPU that does not exist;
//! - CUDA, CONTEXT_LOST: on CUDA, an error of the driver, which the message names with the driver's function;
//! - SIZE_OVERFLOW: more than 2^63 - 1 elements, or some of them beyond the address space.
//!
//! An output tensor also gives INVALID_ARGUMENT if its bytes, from the lowest to the highest address, intersect those
//! of an input or of another output; if its own elements overlap; or if a fixed number of steps, less than a
//! millisecond, does not tell whether they do, which happens with many dimensions of interleaved strides.
//!
//! Functions that return new tensors or objects, gc_comm_reserve(), gc_compressed_allreduce(), and all functions on
//! CUDA, may give OUT_OF_MEMORY. The statuses that a function lists are in addition to these. "As gc_x()" before such a
//! list stands for all that gc_x() lists.
//!
//! THREADS, FORKS AND STACKS
//!
//! Any thread may call any function at any time on different objects, and calls may share inputs. On one codec,
//! communicator or all-reduce a second call gives BUSY while the first is under way; on one kernel any number of calls
//! may be. A thread that pthread_cancel() cancels during a call ends after it if its cancellation is deferred, as it is
//! by default. A thread whose cancellation is asynchronous must not call.
//!
//! A forked child may go on calling on CPU tensors; CUDA does not work there. A codec, communicator, all-reduce or
//! kernel that another thread was using when the process was forked gives INVALID_ARGUMENT in the child, and releasing
//! it there does nothing. A call uses less than 32 KiB of stack, not counting your callbacks, the CUDA driver, and
//! NVRTC, which takes about 128 KiB when a kernel is compiled.
//!
//! Your deleters and release callbacks run on the thread that releases the tensor, transport callbacks on the thread
//! that calls. They must return: no exception and no longjmp may leave them.
//!
//! NAMES
//!
//! Functions and types begin with gc_, constants with GC_, version macros with GRADCODEC_. (`gc` alone belongs to the
//! Boehm collector: the two can be used together.)
//!
//! CUDA
//!
//! The driver, libcuda.so.1, is loaded on first use of a CUDA tensor. It must be of CUDA 12.0 (525) or newer, the
//! devices of compute capability 7.5 or higher. Without a driver, functions on CPU tensors work.
//!
//! A call works on the device of its tensors; CPU and CUDAHost count as one device, and so do CUDA and CUDAManaged with
//! the same number. The context is the stream's own (INVALID_ARGUMENT if that is on another device). For the streams
//! NULL, 1 and 2 it is your current context if that is on the device, and the device's primary context otherwise. When
//! a call returns, your current context and device are as before.
//!
//! A device fault is reported by the call that caused it or by a later one: as CUDA or, if the context is unusable from
//! then on, as CONTEXT_LOST. Outputs of pending work are undefined then.
//!
//! STREAMS
//!
//! Simple functions work on the legacy default stream, so inputs must be ready there: `__dlpack__(stream=1)` ensures
//! it. Non-blocking streams are not ordered with it. While a stream that was created without the non-blocking flag is
//! being captured, CUDA allows no work on the legacy default stream of its context, so simple functions fail there.
//!
//! Stream functions work on the stream that you pass: NULL or 1 is the legacy default stream (also in programs that are
//! compiled with per-thread default streams: pass 2 there), 2 the per-thread one, anything else a CUstream or
//! cudaStream_t. They enqueue the work and return. The memory of src and dst must stay, and src must not change, until
//! the stream has done the work; the structs, shapes and strides are read during the call. Wait for copies to or from
//! CPU and CUDAHost tensors yourself before the CPU works on them.
//!
//! Once gc_prepare() has run, stream functions allocate nothing and synchronize nothing, except all-reduces and
//! gc_kernel_prepare(), whose sections say what they allocate and wait for. Without gc_prepare(), the first call in a
//! context loads the kernels, which waits for all work in the context. For gc_kernel_run(), gc_kernel_prepare() does
//! this: see KERNELS. gc_copy_into() also accepts tensors of two devices; its description says what it enqueues, waits
//! for and allocates then.
//!
//! GRAPHS
//!
//! Functions whose names end in `_into` can be captured in a CUDA graph, after gc_prepare() in the context that
//! captures, on a stream of yours (CUDA captures neither NULL nor 1); gc_kernel_run() after gc_kernel_prepare() there;
//! codecs and all-reduces as their sections say. Memory that a captured call uses must stay until the graph's last
//! launch; that includes tensors that this library has allocated, so do not release them before. While a stream is
//! being captured, other threads may call anything, with one exception: if the stream was created without the
//! non-blocking flag, no simple functions in its context.
//!
//! DEVICE MEMORY
//!
//! When a tensor that this library has allocated is released, its device memory is kept for new tensors: up to 1/32 of
//! the device's memory, at least 256 MiB. What exceeds that is freed by calls that return new tensors, a few blocks
//! each, and by gc_trim(). Memory is used again only after all work that was enqueued in its context before the release
//! is done, on any stream; work of other contexts is not waited for, such as a gc_copy_into() to another GPU. A release
//! calls no driver: it works with any context current or none, when the streams are gone, and while the process ends.
//!
//! The memory of a codec, communicator or all-reduce is freed with it if the context that it belongs to is the device's
//! primary one, or your current one. Any other context may be gone by then, so memory in it stays until that context is
//! destroyed.
//!
//! Other libraries cannot use what is kept, so call gc_trim() before they need memory; a call of this library that
//! cannot allocate frees it first. Do not call cudaDeviceReset(): it destroys what the library has loaded and kept on
//! the device, and no function works there afterwards.
//!
//! These calls may wait for all work in the context: those that return new tensors, where much has been released;
//! gc_prepare(), gc_kernel_prepare() and first calls, to load kernels; and gc_trim(). Such a call must not stand
//! between the launches of a collective on several GPUs by one thread, such as NCCL's: it waits for the first launch,
//! which waits for the second, which comes only after the call.

mod allreduce;
mod bits;
mod borrow;
mod codec;
mod comm;
mod copy;
mod devices;
mod handle;
mod hierarchical;
mod kernel;
mod nccl;
mod onebit;
mod peers;
mod share;
mod signs;
mod status;
mod tensors;
mod threads;
mod version;

pub use allreduce::*;
pub use bits::*;
pub use codec::*;
pub use comm::*;
pub use copy::*;
pub use devices::*;
pub use hierarchical::*;
pub use kernel::*;
pub use nccl::*;
pub use onebit::*;
pub use peers::*;
pub use share::*;
pub use signs::*;
pub use status::*;
pub use tensors::*;
pub use threads::*;
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
