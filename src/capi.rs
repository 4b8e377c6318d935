//! Compressed all-reduce of gradients: 1 to 16 bits per element, on CPU and CUDA.
//!
//! A codec compresses a gradient to a payload, and decompresses it. A communicator connects a rank to the other ranks:
//! over NCCL, MPI, peer memory of GPUs, two callbacks of yours, or among threads. An all-reduce combines the two: each
//! gradient becomes the mean, or the sum, over all ranks. The library also packs bits and signs, copies tensors, passes
//! them to other processes and compiles kernels at run time. Tensors are DLPack structs, which describe memory of
//! NumPy, PyTorch, CuPy, JAX or your own program: the library copies nothing on the way in or out.
//!
//! Start here:
//!
//! ```c
//! #include <gradcodec.h>
//! #include <pthread.h>
//! #include <stdio.h>
//!
//! #define N 1000
//! static gc_comm_t *comms[2];       // two ranks, here threads of one process
//! static float gradients[2][N];
//!
//! static void *train(void *argument) {
//!     int rank = argument == &comms[1];
//!     for (int i = 0; i < N; i++) gradients[rank][i] = rank == 0 ? 1 : 3;
//!
//!     int64_t length = N;
//!     DLTensor tensor = {gradients[rank], {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, &length, NULL, 0};
//!     DLTensor *values[] = {&tensor};
//!     gc_codec_options_t options = {
//!         .struct_size = sizeof options, .codec = GC_CODEC_INT8, .error = GC_ERROR_NONE, .n_elements = N};
//!     gc_allreduce_t *allreduce = NULL;
//!     if (gc_allreduce_create(comms[rank], &options, &allreduce) != GC_STATUS_OK ||           // once
//!         gc_allreduce_run(allreduce, values, 1, NULL, NULL, NULL) != GC_STATUS_OK)           // in each step
//!         fprintf(stderr, "%s\n", gc_last_error());
//!     gc_allreduce_free(allreduce);
//!     return NULL;
//! }
//!
//! int main(void) {
//!     pthread_t thread;
//!     if (gc_comm_group(2, comms) != GC_STATUS_OK || pthread_create(&thread, NULL, train, &comms[1]) != 0)
//!         return 1;
//!     train(&comms[0]);
//!     pthread_join(thread, NULL);
//!     printf("the mean of 1 and 3: %.2f on rank 0, %.2f on rank 1\n", gradients[0][0], gradients[1][0]);
//!     gc_comm_free(comms[0]);
//!     gc_comm_free(comms[1]);
//!     return 0;
//! }
//! ```
//!
//! It prints `the mean of 1 and 3: 2.00 on rank 0, 2.00 on rank 1`.
//!
//! Compile it with `cc program.c -pthread $(pkg-config --cflags --libs gradcodec)`; if the library is outside the
//! system's folders, add `-Wl,-rpath,$(pkg-config --variable=libdir gradcodec)`.
//!
//! *Errors.* A function that can fail returns a gc_status_t, 0 for success. A function that returns a number returns -1
//! instead. gc_last_error() describes this thread's last failure, with the value that was wrong. Arguments are checked
//! before anything is changed. Each description lists the statuses of its function, in addition to those that any
//! tensor may give. Descriptions may leave out GC_STATUS_.
//!
//! *Ownership.* Inputs are borrowed for the call and never released. Outputs are yours: release each once, on any
//! thread, by the function that its description names. If a call fails, `*out` is unchanged.
//!
//! *Streams.* Functions with a parameter `void *stream` work in memory that you pass. On CUDA they enqueue their work
//! on that stream and return. All other functions allocate their results, and are complete when they return. On the CPU
//! every function is complete when it returns, and the stream is ignored: pass NULL.
//!
//! *Threads.* Any thread may call any function at any time on different objects. A second call on a codec, communicator
//! or all-reduce that another thread is using gives BUSY.
//!
//! docs/API.md has the rules that hold for all functions: which tensors are accepted, errors, threads and forks, CUDA
//! contexts, streams, graphs and device memory. docs/GLOSSARY.md explains the words. docs/NUMERICS.md says what is
//! computed, to the last bit.

pub use crate::{
    about::api::*,
    bits::{api::*, signs::api::*},
    codec::api::*,
    comm::api::{allreduce::*, comm::*, hierarchical::*, nccl::*, peers::*},
    copy::api::*,
    cpu::api::*,
    device::api::{devices::*, tensors::*},
    dlpack::api::*,
    ffi::api::*,
    jit::api::*,
    share::api::*,
};

// Rust programs use the constants of C's enums in this way: `BitOrder::Big as gc_bit_order_t`.
pub use crate::{
    bits::plan::BitOrder,
    codec::plan::{Decode, ErrorKind, Flag, Kind, NonFinite, Reduction, ScaleRule},
    ffi::error::Status,
};

// A Rust program fills in tensors with these types, so it needs no DLPack crate of its own.
pub use dlpark::{
    DlpackFlags,
    ffi::{
        DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion,
        DLTensor,
    },
};
