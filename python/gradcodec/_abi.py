"""What is declared of gradcodec.h: its structures, its functions, DLPack's structures, and Python's capsules."""

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32
from ctypes import c_uint64, c_void_p
from typing import Any

NAME = "libgradcodec.so.0"
BIG, LITTLE, AXIS_NONE, COUNT_ALL = 0, 1, -(2**31), -(2**63)  # which bit of a byte comes first, and as in the header
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
ONEBIT, SIGN, RMS, MEAN, PROPAGATE, ZERO, TRANSACTIONAL, SET, ADD = 1, 2, 0, 1, 0, 1, 2, 0, 1  # of codecs
DTYPES = {f"{k}{bits}": (code, bits, 1) for code, k in enumerate(("int", "uint", "float")) for bits in (8, 16, 32, 64)}
DTYPES.update(bool=(6, 8, 1), bfloat16=(4, 16, 1))


def _struct(name: str, /, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# DLPack's structures, and the functions of gradcodec.h with their arguments.
Device = _struct("DLDevice", device_type=c_int32, device_id=c_int32)
DType = _struct("DLDataType", code=c_uint8, bits=c_uint8, lanes=c_uint16)
_LAYOUT = {"shape": POINTER(c_int64), "strides": POINTER(c_int64), "byte_offset": c_uint64}
DLTensor = _struct("DLTensor", data=c_void_p, device=Device, ndim=c_int32, dtype=DType, **_LAYOUT)
Managed = _struct("DLManagedTensor", dl_tensor=DLTensor, manager_ctx=c_void_p, deleter=c_void_p)
_HEAD = {"major": c_uint32, "minor": c_uint32, "manager_ctx": c_void_p, "deleter": c_void_p, "flags": c_uint64}
Versioned = _struct("DLManagedTensorVersioned", **_HEAD, dl_tensor=DLTensor)
_SHAPE = {"struct_size": c_uint32, "threads": c_uint32, "items_per_block": c_uint32, "shared_bytes": c_uint32}
KernelShape = _struct("gc_kernel_shape_t", **_SHAPE, cluster=c_uint32, reserved=c_uint32 * 3)
_DTYPES = {"values": DType, "results": DType, "error": c_int32, "scale": c_int32, "nonfinite": c_int32}
_SIZES = {"beta": c_float, "segments": POINTER(c_int64), "n_segments": c_size_t, "n_elements": c_int64}
_OPTIONS = {"struct_size": c_uint32, "codec": c_int32, "device": Device, **_DTYPES, **_SIZES, "n_chunks": c_size_t}
CodecOptions = _struct("gc_codec_options_t", **_OPTIONS, server=c_uint64, reserved=c_uint64 * 4)
CodecHandle, CommHandle, AllReduceHandle = _struct("gc_codec_t"), _struct("gc_comm_t"), _struct("gc_allreduce_t")
ShareHandle, KernelHandle = _struct("gc_share_t"), _struct("gc_kernel_t")
_LAST = {"options": POINTER(c_char_p), "n_options": c_size_t, "nvrtc": c_void_p, "reserved": c_uint64 * 4}
_TEXTS = {"struct_size": c_uint32, "flags": c_uint32, "inputs": c_char_p, "outputs": c_char_p}
_ELEMENT = dict.fromkeys(("operation", "name", "preamble", "loop_prep", "after_loop"), c_char_p)
_REDUCE = dict.fromkeys(("map", "reduce", "post_map", "identity", "name", "reduce_type", "preamble"), c_char_p)
ElementwiseOptions = _struct("gc_elementwise_options_t", **_TEXTS, **_ELEMENT, **_LAST)
ReductionOptions = _struct("gc_reduction_options_t", **_TEXTS, **_REDUCE, **_LAST)
_AXES = {"size": c_int64, "axes": POINTER(c_int32), "n_axes": c_size_t, "workspace": POINTER(DLTensor)}
_RUN = {"struct_size": c_uint32, "flags": c_uint32, **_AXES, "capability": c_int32, "reserved0": c_uint32}
RunOptions = _struct("gc_run_options_t", **_RUN, reserved=c_uint64 * 3)
Exchange = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_size_t, Device, c_void_p)
_RANK = {"struct_size": c_uint32, "rank": c_int32, "world_size": c_int32, "flags": c_uint32, "ctx": c_void_p}
Transport = _struct("gc_transport_t", **_RANK, all_to_all=Exchange, all_gather=Exchange)
NcclOptions = _struct("gc_nccl_options_t", struct_size=c_uint32, flags=c_uint32, comm=c_void_p, dl_handle=c_void_p,
                      timeout_ms=c_uint32, reserved=c_uint32)  # fmt: skip
_PLACE = {"struct_size": c_uint32, "rank": c_int32, "world_size": c_int32, "timeout_ms": c_uint32, "device": Device}
PeersOptions = _struct("gc_peers_options_t", **_PLACE, bytes=c_size_t, buffers=POINTER(c_void_p))
T, V, VIEW, SIZES = map(POINTER, (Managed, Versioned, DLTensor, c_int64))
C, G, R, VIEWS = *map(POINTER, (CodecHandle, CommHandle, AllReduceHandle)), POINTER(POINTER(DLTensor))
L, K = POINTER(ShareHandle), POINTER(KernelHandle)
OUT, INTO, ALONG = POINTER(T), [VIEW, c_int32, VIEW, c_void_p], [VIEW, c_int32, c_int32, VIEW, c_void_p]
SIGNATURES: dict[str, list[Any]] = {
    "gc_last_error": [], "gc_version_string": [], "gc_build_info": [], "gc_chunk_bytes": [c_int64, c_size_t],
    "gc_pack_chunks": [T, c_size_t, OUT], "gc_unpack_chunks": [OUT, c_size_t, c_int64, OUT],
    "gc_pack_bits": [T, c_int32, c_int32, OUT], "gc_unpack_bits": [T, c_int32, c_int64, c_int32, OUT],
    "gc_pack_chunks_into": INTO, "gc_unpack_chunks_into": INTO, "gc_pack_signs_into": INTO,
    "gc_pack_signs": [T, c_size_t, OUT], "gc_unpack_signs": [OUT, c_size_t, c_int64, DType, OUT],
    "gc_unpack_signs_into": [VIEW, *INTO], "gc_vote_signs_into": [VIEW, c_uint64, VIEW, c_void_p],
    "gc_pack_bits_into": ALONG, "gc_unpack_bits_into": ALONG,
    "gc_onebit_compress": [T, T, c_size_t, OUT, POINTER(c_float)], "gc_onebit_workspace_bytes": [c_int64],
    "gc_onebit_decompress": [OUT, c_size_t, POINTER(c_float), c_int64, DType, OUT],
    "gc_onebit_compress_into": [VIEW, VIEW, c_int32, VIEW, VIEW, VIEW, c_void_p],
    "gc_codec_create": [POINTER(CodecOptions), POINTER(C)], "gc_codec_free": [C],
    "gc_codec_payload_bytes": [C], "gc_codec_state_bytes": [C],
    "gc_codec_encode": [C, VIEWS, c_size_t, VIEW, VIEW, VIEW, c_void_p],
    "gc_codec_decode": [C, VIEW, c_int32, VIEW, c_int32, VIEWS, c_size_t, c_void_p],
    "gc_codec_reduce": [C, c_size_t, VIEW, VIEW, c_void_p], "gc_codec_commit": [C, VIEW, c_void_p],
    "gc_codec_flags": [C, VIEW, c_void_p], "gc_codec_scales": [C, VIEW, c_void_p],
    "gc_codec_rollback": [C, c_void_p], "gc_codec_reset": [C, c_void_p],
    "gc_codec_state_out": [C, VIEW, c_void_p], "gc_codec_state_in": [C, VIEW, c_void_p],
    "gc_codec_errors_out": [C, VIEW, VIEW, c_void_p], "gc_codec_errors_in": [C, VIEW, VIEW, c_void_p],
    "gc_comm_from_transport": [POINTER(Transport), POINTER(G)], "gc_comm_group": [c_int32, POINTER(G)],
    "gc_comm_from_nccl": [POINTER(NcclOptions), POINTER(G)],
    "gc_comm_nccl_id": [POINTER(NcclOptions), POINTER(c_uint8)],
    "gc_comm_from_nccl_id": [POINTER(NcclOptions), POINTER(c_uint8), c_int32, c_int32, Device, POINTER(G)],
    "gc_peers_bytes": [c_int64, c_int32], "gc_comm_from_peers": [POINTER(PeersOptions), POINTER(G)],
    "gc_comm_open_peers": [G, Device, c_int64, c_uint32, POINTER(G)], "gc_comm_hierarchical": [G, G, POINTER(G)],
    "gc_comm_reserve": [G, Device, c_int64], "gc_comm_async_error": [G], "gc_comm_free": [G],
    "gc_compressed_allreduce": [G, VIEW, VIEW, VIEW, c_void_p], "gc_shard_elements": [c_int64, c_int32],
    "gc_allreduce_create": [G, POINTER(CodecOptions), POINTER(R)], "gc_allreduce_free": [R],
    "gc_allreduce_run": [R, VIEWS, c_size_t, VIEW, VIEW, c_void_p], "gc_allreduce_flags": [R, VIEW, c_void_p],
    "gc_allreduce_reduce_scatter": [R, VIEWS, c_size_t, VIEW, VIEW, VIEW, c_void_p],
    "gc_allreduce_all_gather": [R, VIEW, VIEWS, c_size_t, c_void_p],
    "gc_allreduce_commit": [R, VIEW, c_void_p], "gc_allreduce_rollback": [R, c_void_p],
    "gc_allreduce_reset": [R, c_void_p], "gc_allreduce_errors_out": [R, VIEW, VIEW, c_void_p],
    "gc_allreduce_errors_in": [R, VIEW, VIEW, c_void_p],
    "gc_tensor_empty": [Device, DType, c_int32, SIZES, OUT],
    "gc_tensor_from_pointer": [c_void_p, Device, DType, c_int32, SIZES, SIZES, c_void_p, c_void_p, OUT],
    "gc_tensor_to_versioned": [T, POINTER(V)], "gc_tensor_from_versioned": [V, OUT],
    "gc_tensor_to_device": [T, Device, OUT], "gc_copy_into": [VIEW, VIEW, c_void_p],
    "gc_share_send": [T, c_int, c_uint32, c_int32, POINTER(L)], "gc_share_wait": [L, c_int32], "gc_share_free": [L],
    "gc_share_receive": [c_int, Device, c_int32, OUT],
    "gc_elementwise_create": [POINTER(ElementwiseOptions), POINTER(K)],
    "gc_reduction_create": [POINTER(ReductionOptions), POINTER(K)],
    "gc_kernel_run": [K, VIEWS, c_size_t, VIEWS, c_size_t, POINTER(RunOptions), c_void_p],
    "gc_kernel_prepare": [K, VIEWS, c_size_t, VIEWS, c_size_t, POINTER(RunOptions), c_void_p],
    "gc_kernel_workspace_bytes": [K, VIEWS, c_size_t, VIEWS, c_size_t, POINTER(RunOptions)],
    "gc_kernel_log": [K, POINTER(c_char_p)], "gc_kernel_save": [K, OUT], "gc_kernel_free": [K],
    "gc_kernel_load": [c_void_p, c_size_t, POINTER(K)],
    "gc_set_threads": [c_uint32], "gc_prepare": [Device], "gc_trim": [Device],
    "gc_builtin_kernels": [c_char_p, POINTER(c_void_p), POINTER(c_size_t)],
    "gc_builtin_kernel_shape": [c_char_p, c_int32, POINTER(KernelShape)],
}  # fmt: skip
_python = ctypes.PyDLL(None)  # as ctypes.pythonapi, whose declarations belong to everybody
_python.PyCapsule_New.restype, _python.PyCapsule_New.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]
_python.PyCapsule_GetPointer.restype, _python.PyCapsule_GetPointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_python.PyCapsule_GetName.restype, _python.PyCapsule_GetName.argtypes = c_char_p, [ctypes.py_object]
_python.PyCapsule_SetName.argtypes, _python.Py_IncRef.argtypes = [ctypes.py_object, c_char_p], [ctypes.py_object]
LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
USED = {LEGACY: b"used_dltensor", VERSIONED: b"used_dltensor_versioned"}  # the names once the tensor was taken
FORMS = {LEGACY: (T, "gc_tensor_from_versioned"), VERSIONED: (V, "gc_tensor_to_versioned")}  # what makes that form
for _name in (*USED, *USED.values()):
    _python.Py_IncRef(_name)  # a capsule has the address of its name only, and may outlive this module
