"""Encodes or decodes one tensor in one call, with the library that is found."""

from __future__ import annotations

import functools
from typing import Any

from ._abi import CPU
from ._library import GradCodec
from ._tensors import Array, Tensor

_library = functools.cache(GradCodec)


def encode(array: Array, codec: int | str = "int8") -> Any:
    """Returns the payload of an array, for decode(): "int8", "mxfp8", "bf16", "int4", "mxfp4", "onebit" or "sign".

    `array`: float32, float16 or bfloat16, of any shape and strides. No error is carried from one call to the next;
    GradCodec.codec() does that. The payload is an array of NumPy, uint8; on a GPU it is a Tensor there, for the
    from_dlpack() of a framework.
    """
    return _of_numpy(_library().encode(array, codec))


def decode(payload: Array | bytes | bytearray | memoryview, dtype: Any = "float32") -> Any:
    """Returns the values of a payload of encode(), one-dimensional, as an array of NumPy.

    `payload`: an array of bytes, or bytes, bytearray or memoryview. Bytes that encode() cannot have made are a
    GradCodecError whose status is CORRUPT. `dtype`: "float32", "float16" or "bfloat16". Values that NumPy has no arrays
    of, on a GPU or in bfloat16, are a Tensor for the from_dlpack() of a framework.
    """
    values = _library().decode(payload, dtype)
    return values if values.dtype == "bfloat16" else _of_numpy(values)


def _of_numpy(tensor: Tensor) -> Any:
    return tensor.__array__() if tensor.device[0] == CPU else tensor
