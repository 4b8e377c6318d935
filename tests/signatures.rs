//! Every exported function has the type that tests/abi/functions.h promises, and every struct and constant the layout or
//! value that tests/abi/gradcodec-*.abi has for C. Generated from these files by `make header`.

use std::{
    ffi::{c_char, c_void},
    mem::offset_of,
};

use gradcodec::capi::*;

/// A pointer of exactly the promised type takes each function's address, or this file does not compile.
macro_rules! promised {
    ($($name:ident($($parameter:ty),*) $(-> $result:ty)?;)*) => {
        $(const _: unsafe extern "C" fn($($parameter),*) $(-> $result)? = $name;)*
    };
}

promised! {
    gc_version() -> u32;
    gc_version_string() -> *const c_char;
    gc_build_info() -> *const c_char;
    gc_status_name(i32) -> *const c_char;
    gc_last_error() -> *const c_char;
    gc_set_threads(u32) -> i32;
    gc_prepare(DLDevice) -> i32;
    gc_trim(DLDevice) -> i32;
    gc_builtin_kernels(*const c_char, *mut *const c_void, *mut usize) -> i32;
    gc_builtin_kernel_shape(*const c_char, i32, *mut gc_kernel_shape_t) -> i32;
    gc_chunk_bytes(i64, usize) -> i64;
    gc_pack_chunks(*const DLManagedTensor, usize, *mut *mut DLManagedTensor) -> i32;
    gc_unpack_chunks(*const *mut DLManagedTensor, usize, i64, *mut *mut DLManagedTensor) -> i32;
    gc_pack_bits(*const DLManagedTensor, i32, i32, *mut *mut DLManagedTensor) -> i32;
    gc_unpack_bits(*const DLManagedTensor, i32, i64, i32, *mut *mut DLManagedTensor) -> i32;
    gc_pack_chunks_into(*const DLTensor, i32, *mut DLTensor, *mut c_void) -> i32;
    gc_unpack_chunks_into(*const DLTensor, i32, *mut DLTensor, *mut c_void) -> i32;
    gc_pack_bits_into(*const DLTensor, i32, i32, *mut DLTensor, *mut c_void) -> i32;
    gc_unpack_bits_into(*const DLTensor, i32, i32, *mut DLTensor, *mut c_void) -> i32;
    gc_pack_signs(*const DLManagedTensor, usize, *mut *mut DLManagedTensor) -> i32;
    gc_unpack_signs(*const *mut DLManagedTensor, usize, i64, DLDataType, *mut *mut DLManagedTensor) -> i32;
    gc_pack_signs_into(*const DLTensor, i32, *mut DLTensor, *mut c_void) -> i32;
    gc_unpack_signs_into(*const DLTensor, *const DLTensor, i32, *mut DLTensor, *mut c_void) -> i32;
    gc_vote_signs_into(*const DLTensor, u64, *mut DLTensor, *mut c_void) -> i32;
    gc_encode(*const DLManagedTensor, i32, *mut *mut DLManagedTensor) -> i32;
    gc_decode(*const DLManagedTensor, DLDataType, *mut *mut DLManagedTensor) -> i32;
    gc_codec_create(*const gc_codec_options_t, *mut *mut gc_codec_t) -> i32;
    gc_codec_free(*mut gc_codec_t);
    gc_codec_payload_bytes(*const gc_codec_t) -> i64;
    gc_codec_exchanges(*const gc_codec_t) -> i32;
    gc_codec_encode(*mut gc_codec_t, *const *const DLTensor, usize, *const DLTensor, *const DLTensor,
        *mut DLTensor, *mut c_void) -> i32;
    gc_codec_decode(*mut gc_codec_t, *const DLTensor, i32, *const DLTensor, i32, *const *mut DLTensor, usize,
        *mut c_void) -> i32;
    gc_codec_reduce(*mut gc_codec_t, usize, *const DLTensor, *mut DLTensor, *mut c_void) -> i32;
    gc_codec_flags(*mut gc_codec_t, *mut DLTensor, *mut c_void) -> i32;
    gc_codec_scales(*mut gc_codec_t, *mut DLTensor, *mut c_void) -> i32;
    gc_codec_commit(*mut gc_codec_t, *const DLTensor, *mut c_void) -> i32;
    gc_codec_rollback(*mut gc_codec_t, *mut c_void) -> i32;
    gc_codec_reset(*mut gc_codec_t, *mut c_void) -> i32;
    gc_codec_state_bytes(*const gc_codec_t) -> i64;
    gc_codec_state_out(*mut gc_codec_t, *mut DLTensor, *mut c_void) -> i32;
    gc_codec_state_in(*mut gc_codec_t, *const DLTensor, *mut c_void) -> i32;
    gc_codec_errors_out(*mut gc_codec_t, *mut DLTensor, *mut DLTensor, *mut c_void) -> i32;
    gc_codec_errors_in(*mut gc_codec_t, *const DLTensor, *const DLTensor, *mut c_void) -> i32;
    gc_comm_from_transport(*const gc_transport_t, *mut *mut gc_comm_t) -> i32;
    gc_allreduce_peers_bytes(*const gc_codec_options_t, i32, i32) -> i64;
    gc_comm_from_peers(*const gc_peers_options_t, *mut *mut gc_comm_t) -> i32;
    gc_comm_open_peers(*mut gc_comm_t, DLDevice, i64, u32, *mut *mut gc_comm_t) -> i32;
    gc_comm_hierarchical(*mut gc_comm_t, *mut gc_comm_t, *mut *mut gc_comm_t) -> i32;
    gc_comm_from_nccl(*const gc_nccl_options_t, *mut *mut gc_comm_t) -> i32;
    gc_comm_nccl_id(*const gc_nccl_options_t, *mut u8) -> i32;
    gc_comm_from_nccl_id(*const gc_nccl_options_t, *const u8, i32, i32, DLDevice, *mut *mut gc_comm_t) -> i32;
    gc_comm_group(i32, *mut *mut gc_comm_t) -> i32;
    gc_comm_rank(*const gc_comm_t) -> i32;
    gc_comm_world_size(*const gc_comm_t) -> i32;
    gc_comm_async_error(*const gc_comm_t) -> i32;
    gc_comm_abort(*mut gc_comm_t) -> i32;
    gc_comm_free(*mut gc_comm_t);
    gc_allreduce_create(*mut gc_comm_t, *const gc_codec_options_t, *mut *mut gc_allreduce_t) -> i32;
    gc_allreduce_free(*mut gc_allreduce_t);
    gc_allreduce_shard_elements(*const gc_allreduce_t) -> i64;
    gc_allreduce_sent_bytes(*const gc_allreduce_t, *mut i64) -> i64;
    gc_allreduce_exchanges(*const gc_allreduce_t) -> i32;
    gc_allreduce_parts(*const gc_allreduce_t, i32, i32, *mut gc_part_t, i64) -> i64;
    gc_allreduce_run(*mut gc_allreduce_t, *const *mut DLTensor, usize, *const DLTensor, *const DLTensor,
        *mut c_void) -> i32;
    gc_allreduce_reduce_scatter(*mut gc_allreduce_t, *const *const DLTensor, usize, *const DLTensor,
        *const DLTensor, *mut DLTensor, *mut c_void) -> i32;
    gc_allreduce_all_gather(*mut gc_allreduce_t, *const DLTensor, *const *mut DLTensor, usize, *mut c_void) -> i32;
    gc_allreduce_flags(*mut gc_allreduce_t, *mut DLTensor, *mut c_void) -> i32;
    gc_allreduce_commit(*mut gc_allreduce_t, *const DLTensor, *mut c_void) -> i32;
    gc_allreduce_rollback(*mut gc_allreduce_t, *mut c_void) -> i32;
    gc_allreduce_reset(*mut gc_allreduce_t, *mut c_void) -> i32;
    gc_allreduce_errors_out(*mut gc_allreduce_t, *mut DLTensor, *mut DLTensor, *mut c_void) -> i32;
    gc_allreduce_errors_in(*mut gc_allreduce_t, *const DLTensor, *const DLTensor, *mut c_void) -> i32;
    gc_tensor_empty(DLDevice, DLDataType, i32, *const i64, *mut *mut DLManagedTensor) -> i32;
    gc_tensor_from_pointer(*mut c_void, DLDevice, DLDataType, i32, *const i64, *const i64,
        Option<unsafe extern "C" fn(*mut c_void)>, *mut c_void, *mut *mut DLManagedTensor) -> i32;
    gc_tensor_to_versioned(*mut DLManagedTensor, *mut *mut DLManagedTensorVersioned) -> i32;
    gc_tensor_from_versioned(*mut DLManagedTensorVersioned, *mut *mut DLManagedTensor) -> i32;
    gc_tensor_free(*mut DLManagedTensor);
    gc_tensor_free_versioned(*mut DLManagedTensorVersioned);
    gc_capsule_destructor(*mut c_void);
    gc_tensor_to_device(*const DLManagedTensor, DLDevice, *mut *mut DLManagedTensor) -> i32;
    gc_copy_into(*const DLTensor, *mut DLTensor, *mut c_void) -> i32;
    gc_share_send(*const DLManagedTensor, i32, u32, i32, *mut *mut gc_share_t) -> i32;
    gc_share_wait(*mut gc_share_t, i32) -> i32;
    gc_share_free(*mut gc_share_t);
    gc_share_receive(i32, DLDevice, i32, *mut *mut DLManagedTensor) -> i32;
    gc_elementwise_create(*const gc_elementwise_options_t, *mut *mut gc_kernel_t) -> i32;
    gc_reduction_create(*const gc_reduction_options_t, *mut *mut gc_kernel_t) -> i32;
    gc_kernel_run(*mut gc_kernel_t, *const *const DLTensor, usize, *const *mut DLTensor, usize,
        *const gc_run_options_t, *mut c_void) -> i32;
    gc_kernel_prepare(*mut gc_kernel_t, *const *const DLTensor, usize, *const *mut DLTensor, usize,
        *const gc_run_options_t, *mut c_void) -> i32;
    gc_kernel_workspace_bytes(*const gc_kernel_t, *const *const DLTensor, usize, *const *mut DLTensor, usize,
        *const gc_run_options_t) -> i64;
    gc_kernel_log(*const gc_kernel_t, *mut *const c_char) -> i32;
    gc_kernel_free(*mut gc_kernel_t);
}

/// A struct has these fields and no others, of these types and in these places, or this file does not compile.
macro_rules! laid_out {
    ($($name:ident, aligned to $align:literal { $($field:ident: $type:ty, $at:literal;)* })*) => {$(
        const _: fn($name) = |$name { $($field),* }| { $(let _: $type = $field;)* };
        const _: () = assert!(align_of::<$name>() == $align $(&& offset_of!($name, $field) == $at)*);
    )*};
}

laid_out! {
    gc_codec_options_t, aligned to 8 {
        struct_size: u32, 0; codec: i32, 4; device: DLDevice, 8; values: DLDataType, 16; results: DLDataType, 20;
        error: i32, 24; scale: i32, 28; nonfinite: i32, 32; beta: f32, 36; segments: *const i64, 40;
        n_segments: usize, 48; n_elements: i64, 56; n_chunks: usize, 64; server: u64, 72; raw: *const u8, 80;
        reduction: i32, 88; reserved: [u32; 5], 92;
    }
    gc_elementwise_options_t, aligned to 8 {
        struct_size: u32, 0; flags: u32, 4; inputs: *const c_char, 8; outputs: *const c_char, 16;
        operation: *const c_char, 24; name: *const c_char, 32; preamble: *const c_char, 40;
        loop_prep: *const c_char, 48; after_loop: *const c_char, 56; options: *const *const c_char, 64;
        n_options: usize, 72; nvrtc: *mut c_void, 80; reserved: [u64; 4], 88;
    }
    gc_kernel_shape_t, aligned to 4 {
        struct_size: u32, 0; threads: u32, 4; items_per_block: u32, 8; shared_bytes: u32, 12; cluster: u32, 16;
        reserved: [u32; 3], 20;
    }
    gc_nccl_options_t, aligned to 8 {
        struct_size: u32, 0; flags: u32, 4; comm: *mut c_void, 8; dl_handle: *mut c_void, 16; timeout_ms: u32, 24;
        reserved: u32, 28;
    }
    gc_part_t, aligned to 8 {
        segment: i64, 0; first: i64, 8; count: i64, 16;
    }
    gc_peers_options_t, aligned to 8 {
        struct_size: u32, 0; rank: i32, 4; world_size: i32, 8; timeout_ms: u32, 12; device: DLDevice, 16;
        bytes: usize, 24; buffers: *const *mut c_void, 32;
    }
    gc_reduction_options_t, aligned to 8 {
        struct_size: u32, 0; flags: u32, 4; inputs: *const c_char, 8; outputs: *const c_char, 16;
        map: *const c_char, 24; reduce: *const c_char, 32; post_map: *const c_char, 40; identity: *const c_char, 48;
        name: *const c_char, 56; reduce_type: *const c_char, 64; preamble: *const c_char, 72;
        options: *const *const c_char, 80; n_options: usize, 88; nvrtc: *mut c_void, 96; reserved: [u64; 4], 104;
    }
    gc_run_options_t, aligned to 8 {
        struct_size: u32, 0; flags: u32, 4; size: i64, 8; axes: *const i32, 16; n_axes: usize, 24;
        workspace: *const DLTensor, 32; capability: i32, 40; reserved0: u32, 44; reserved: [u64; 3], 48;
    }
    gc_transport_t, aligned to 8 {
        struct_size: u32, 0; rank: i32, 4; world_size: i32, 8; flags: u32, 12; ctx: *mut c_void, 16;
        all_to_all: Option<unsafe extern "C" fn(*mut c_void, *const c_void, *mut c_void, usize, DLDevice, *mut c_void) -> i32>, 24;
        all_gather: Option<unsafe extern "C" fn(*mut c_void, *const c_void, *mut c_void, usize, DLDevice, *mut c_void) -> i32>, 32;
    }
}

/// A constant has this value, or this file does not compile.
macro_rules! valued {
    ($($constant:path = $value:literal;)*) => { $(const _: () = assert!($constant as i64 == $value);)* };
}

valued! {
    GC_AXIS_NONE = -2147483648; BitOrder::Big = 0; BitOrder::Little = 1; Kind::Bf16 = 3; Kind::Int4 = 6; Kind::Int8 = 5;
    Kind::Mxfp4 = 7; Kind::Mxfp8 = 4; Kind::Onebit = 1; Kind::Sign = 2; GC_COUNT_ALL = -9223372036854775808;
    Decode::Add = 1; Decode::Set = 0; ErrorKind::Bfloat16 = 1; ErrorKind::Float32 = 0; ErrorKind::None = 2;
    Flag::Corrupt = 1; Flag::Nonfinite = 2; Flag::TakenBack = 4; KernelFlag::Fmad = 1; KernelFlag::NoDisk = 2;
    GC_NCCL_ID_BYTES = 128; NcclFlag::Split = 1; NonFinite::Propagate = 0; NonFinite::Transactional = 2;
    NonFinite::Zero = 1; Part::Shard = 1; Part::Worker = 0; Reduction::Mean = 0; Reduction::Sum = 1;
    RunFlag::Keepdims = 1; ScaleRule::Mean = 1; ScaleRule::Rms = 0; ShareFlag::Copy = 1; Status::Busy = 8;
    Status::Comm = 31; Status::CommUnavailable = 30; Status::Compile = 26; Status::ContextLost = 22;
    Status::Corrupt = 9; Status::Cuda = 21; Status::DriverUnavailable = 20; Status::InvalidArgument = 1;
    Status::NotContiguous = 6; Status::NvrtcUnavailable = 25; Status::Ok = 0; Status::OutOfMemory = 10;
    Status::Panic = 99; Status::ReadOnly = 5; Status::ShapeMismatch = 4; Status::Share = 40; Status::SizeOverflow = 7;
    Status::Timeout = 41; Status::UnsupportedDevice = 3; Status::UnsupportedDtype = 2; TransportFlag::Host = 1;
}
