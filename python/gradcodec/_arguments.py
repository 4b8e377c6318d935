"""Checks of arguments that C would take for another number."""

import difflib
import math
import operator
import reprlib
from ctypes import c_char, c_float
from typing import Any, Iterable

from ._abi import CPU, CUDA, DTYPES, Device, DType


_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = _SHORT.maxlong = 1000
_TEXTS = (str, bytes, bytearray)


def _said(thing: Any, most: int = 60) -> str:
    """Returns a description for a message: an object's type, and as much of its value as there is room for."""
    if thing is None:
        return "None"
    kind = type(thing).__name__[:60]
    if isinstance(thing, _TEXTS) and len(thing) > most:
        return f"{repr(thing[: most - 10])}..., {kind} of {len(thing)}"
    sized = isinstance(thing, (list, tuple, dict, set, frozenset))
    if sized and len(thing) > 20:
        return f"{kind} of {len(thing)}"
    text = _digits(thing) if isinstance(thing, int) else _SHORT.repr(thing)
    return f"{kind} {text}" if len(text) <= most else f"{kind} of {len(thing)}" if sized else kind


def _digits(number: int) -> str:
    return str(number) if number.bit_length() <= 128 else f"a number of {number.bit_length()} bits"


def _whole(name: str, number: Any, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    try:
        if isinstance(number, bool):
            raise TypeError
        value = operator.index(number)
    except TypeError:
        raise TypeError(f"{name}: a whole number expected, got {_said(number)}") from None
    if not least <= value <= most:
        bound = f"least {least}" if value < least else f"most {most}"
        raise ValueError(f"{name}: at {bound} expected, got {_digits(value)}")
    return value


def _count(name: str, number: Any) -> int:
    return _whole(name, number, 0)


INT32 = -(2**31), 2**31 - 1


def _int32(name: str, number: Any) -> int:
    return _whole(name, number, *INT32)


def _named(name: str, choice: Any, known: dict[str, int]) -> int:
    """Returns the number of one of a few names."""
    if not isinstance(choice, str):
        raise TypeError(f"{name}: one of {', '.join(map(repr, known))} expected, got {_said(choice)}")
    if choice not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"{name}: one of {names} expected, got {_said(choice)}{_near(choice, known)}")
    return known[choice]


def _near(choice: str, known: Iterable[str]) -> str:
    """Returns a hint at the nearest name, if one is near."""
    near = difflib.get_close_matches(choice.lower()[:100], known, 1, 0.75)
    return f"; did you mean {near[0]!r}?" if near else ""


def _choice(name: str, choice: Any, known: dict[str, int]) -> int:
    """Returns a choice by name or by number; the library checks the number."""
    return _named(name, choice, known) if isinstance(choice, str) else _int32(name, choice)


def _bools(name: str, flags: Any) -> list[bool]:
    each = _arrays(name, flags, "bools")
    for index, flag in enumerate(each):
        # NumPy's bools are no Python bools.
        if not isinstance(flag, bool) and type(flag).__name__ not in ("bool", "bool_"):
            raise TypeError(f"{name}[{index}]: a bool expected, got {_said(flag)}")
    return [bool(flag) for flag in each]


def _wholes(name: str, numbers: Any, least: int = -(2**63), most: int = 2**63 - 1) -> list[int]:
    try:
        each = list(numbers)
    except TypeError:
        raise TypeError(f"{name}: a sequence of whole numbers expected, got {_said(numbers)}") from None
    return [_whole(f"{name}[{index}]", number, least, most) for index, number in enumerate(each)]


def _address(name: str, address: Any) -> int | None:
    return None if address is None else _whole(name, address, 0, 2**64 - 1)


def _float32(name: str, number: Any) -> float:
    try:
        if isinstance(number, (bool, str, bytes)):
            raise TypeError
        value = float(number)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: a number expected, got {_said(number)}") from None
    if math.isinf(c_float(value).value) and not math.isinf(value):
        raise OverflowError(f"{name}: at most 3.4e38, the largest float32, expected, got {value}")
    return value


def _socket(socket: Any) -> int:
    return _int32("socket", socket.fileno() if hasattr(socket, "fileno") else socket)


def _text(name: str, text: Any) -> bytes:
    if not isinstance(text, (str, bytes)):
        raise TypeError(f"{name}: a str expected, got {_said(text)}")
    encoded = text.encode() if isinstance(text, str) else text
    if b"\0" in encoded:
        raise ValueError(f"{name}: a str without NUL expected, got one at {encoded.index(0)} of {len(encoded)} bytes")
    return encoded


def _bytes(name: str, given: Any) -> bytes:
    try:
        return bytes(memoryview(given))
    except TypeError:
        raise TypeError(f"{name}: bytes expected, got {_said(given)}") from None


def _memory(name: str, given: bytes | bytearray | memoryview) -> Any:
    """Returns the bytes of an object that has them in one piece, without a copy if they are writable."""
    view = memoryview(given)
    if not view.c_contiguous:
        raise ValueError(f"{name}: bytes in one piece expected, got a memoryview with strides {view.strides}")
    kind = c_char * view.nbytes
    return kind.from_buffer_copy(view) if view.readonly else kind.from_buffer(view)


def _arrays(name: str, arrays: Any, what: str = "arrays") -> list[Any]:
    if getattr(arrays, "ndim", 0) == 1 and hasattr(arrays, "__dlpack__"):
        raise TypeError(f"{name}: a sequence of {what} expected, got a single one; put it in a list")
    try:
        return list(arrays)
    except TypeError:
        raise TypeError(f"{name}: a sequence of {what} expected, got {_said(arrays)}") from None


def _device(device: Any) -> Any:
    if isinstance(device, str):
        kind_name, _, index = device.partition(":")
        if device != "cpu" and not (kind_name == "cuda" and index.isascii() and index.isdigit()):
            raise ValueError(f"device: 'cpu' or one as 'cuda:0' expected, got {_said(device)}")
        device = (CPU, 0) if device == "cpu" else (CUDA, int(index))
    try:
        kind, number = device
    except (TypeError, ValueError):
        raise TypeError(f"device: 'cpu', 'cuda:1' or a pair as (CUDA, 1) expected, got {_said(device)}") from None
    return Device(_int32("device[0]", kind), _int32("device[1]", number))


def _dtype(dtype: Any) -> Any:
    """Returns a dtype by name; the dtypes of NumPy, torch and jax.numpy have names, too."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype: one of {', '.join(DTYPES)} expected, got {_said(dtype)}")
    return DType(*DTYPES[name])


def _stream(stream: Any) -> int:
    handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    try:
        return 1 if handle is None else _whole("stream", handle, 0, 2**64 - 1) or 1
    except TypeError:
        raise TypeError(
            f"stream: None, a number, or an object with cuda_stream or ptr expected, got {_said(stream)}"
        ) from None
