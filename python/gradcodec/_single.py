"""One tensor in one call, of the library that is found."""

from __future__ import annotations

import functools
from typing import Any

from ._abi import CPU
from ._library import GradCodec
from ._tensors import Array, Tensor

_library = functools.cache(GradCodec)


def encode(array: Array, codec: int | str = "int8") -> Any:
    """The payload of an array, as bytes that decode() takes: "int8", "mxfp8", "bf16", "int4", "mxfp4", "onebit", "sign".

    `array`: float32, float16 or bfloat16, of any shape and strides. No error is carried from one call to the next; what
    keeps errors is GradCodec.codec(). The payload is an array of NumPy, uint8; on a GPU it is a Tensor there, for the
    from_dlpack() of a framework.
    """
    return _of_numpy(_library().encode(array, codec))


def decode(payload: Array | bytes | bytearray | memoryview, dtype: Any = "float32") -> Any:
    """The values of a payload of encode(), one-dimensional, as an array of NumPy.

    `payload`: an array of bytes, or bytes, bytearray or memoryview. What encode() cannot have given is a GradCodecError
    whose status is CORRUPT. `dtype`: "float32", "float16" or "bfloat16". What NumPy has no arrays of, on a GPU or in
    bfloat16, is a Tensor for the from_dlpack() of a framework.
    """
    values = _library().decode(payload, dtype)
    return values if values.dtype == "bfloat16" else _of_numpy(values)


def _of_numpy(tensor: Tensor) -> Any:
    return tensor.__array__() if tensor.device[0] == CPU else tensor
