"""Declarations of gradcodec.h, by shorter names, and Python's capsules."""

import ctypes
from ctypes import POINTER, c_char_p, c_void_p

from . import _declarations
from ._declarations import FUNCTIONS as FUNCTIONS
from ._declarations import DLTensor as DLTensor

DType = _declarations.DLDataType
Device = _declarations.DLDevice
Managed = _declarations.DLManagedTensor
Versioned = _declarations.DLManagedTensorVersioned
AllReduceHandle = _declarations.gc_allreduce_t
CodecOptions = _declarations.gc_codec_options_t
CodecHandle = _declarations.gc_codec_t
CommHandle = _declarations.gc_comm_t
ElementwiseOptions = _declarations.gc_elementwise_options_t
KernelShape = _declarations.gc_kernel_shape_t
KernelHandle = _declarations.gc_kernel_t
Part = _declarations.gc_part_t
NcclOptions = _declarations.gc_nccl_options_t
PeersOptions = _declarations.gc_peers_options_t
ReductionOptions = _declarations.gc_reduction_options_t
RunOptions = _declarations.gc_run_options_t
ShareHandle = _declarations.gc_share_t
Transport = _declarations.gc_transport_t

NAME = "libgradcodec.so.0"
BIG, LITTLE, AXIS_NONE, COUNT_ALL = 0, 1, -(2**31), -(2**63)  # bit orders, and constants of the header
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
ONEBIT, SIGN, BF16, MXFP8, INT8, INT4, MXFP4 = range(1, 8)  # codecs
RMS, MEAN, PROPAGATE, ZERO, TRANSACTIONAL, SET, ADD = 0, 1, 0, 1, 2, 0, 1  # of codecs
HOST_MEMORY = 1  # of Transport
SIGNS = "onebit", "sign"
CODECS = dict(onebit=ONEBIT, sign=SIGN, bf16=BF16, mxfp8=MXFP8, int8=INT8, int4=INT4, mxfp4=MXFP4)
PARTS = dict(worker=0, shard=1)
REDUCTIONS = dict(mean=0, sum=1)  # by name alone: MEAN is a scale
ERRORS = dict(float32=0, bfloat16=1, none=2)
POLICIES = dict(propagate=PROPAGATE, zero=ZERO, transactional=TRANSACTIONAL)
DTYPES = {f"{k}{bits}": (code, bits, 1) for code, k in enumerate(("int", "uint", "float")) for bits in (8, 16, 32, 64)}
DTYPES.update(bool=(6, 8, 1), bfloat16=(4, 16, 1))
Exchange = dict(Transport._fields_)["all_to_all"]
T, V, VIEW = POINTER(Managed), POINTER(Versioned), POINTER(DLTensor)
C, G, R, L, K = map(POINTER, (CodecHandle, CommHandle, AllReduceHandle, ShareHandle, KernelHandle))
_python = ctypes.PyDLL(None)  # like ctypes.pythonapi, whose declarations all modules share
_python.PyCapsule_New.restype, _python.PyCapsule_New.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]
_python.PyCapsule_GetPointer.restype, _python.PyCapsule_GetPointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_python.PyCapsule_GetName.restype, _python.PyCapsule_GetName.argtypes = c_char_p, [ctypes.py_object]
_python.PyCapsule_SetName.argtypes, _python.Py_IncRef.argtypes = [ctypes.py_object, c_char_p], [ctypes.py_object]
LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
USED = {LEGACY: b"used_dltensor", VERSIONED: b"used_dltensor_versioned"}  # names of capsules whose tensor was taken
FORMS = {LEGACY: (T, "gc_tensor_from_versioned"), VERSIONED: (V, "gc_tensor_to_versioned")}  # function per form
for _name in (*USED, *USED.values()):
    _python.Py_IncRef(_name)  # a capsule has the address of its name only, and may outlive this module
