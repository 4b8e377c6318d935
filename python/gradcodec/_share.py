"""Tensors that are sent to another process."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING

from ._abi import L
from ._arguments import _int32, _whole
from ._reading import _frame, _Note
from ._tensors import Array

if TYPE_CHECKING:
    from ._library import GradCodec

_TENSOR = (_Note("tensor"),)


class Share:
    """The sender's side of a tensor that was sent to another process (gc_share_t), released with this object. On CUDA
    the other process has the tensor's own memory: keep this until `wait` has returned, and it keeps the tensor."""

    def __init__(self, library: GradCodec, tensor: Array, socket: int, flags: int, timeout_ms: int) -> None:
        self._library, self._raw, self._tensor = library, library._raw, tensor
        numbers = _int32("socket", socket), _whole("flags", flags, 0, 2**32 - 1), _int32("timeout_ms", timeout_ms)
        made, frame = L(), _frame()
        try:
            frame.read(1, (tensor,), _TENSOR)
            library._check(self._raw.gc_share_send(frame.places[0], *numbers, byref(made)))
        finally:
            frame.release()
        self._handle = ctypes.cast(made, c_void_p).value

    _handle: int | None = None

    def wait(self, timeout_ms: int = -1) -> None:
        """Until the other process has released the tensor; -1: however long that takes."""
        self._library._check(self._raw.gc_share_wait(self._handle, _int32("timeout_ms", timeout_ms)))

    def __del__(self) -> None:
        if self._handle:
            self._raw.gc_share_free(self._handle)
