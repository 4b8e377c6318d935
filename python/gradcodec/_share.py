"""Tensors that are sent to another process."""

from __future__ import annotations

from ctypes import byref
from typing import Any

from ._abi import L
from ._arguments import _int32, _socket, _whole
from ._lib import Library
from ._owned import _Owned
from ._reading import _frame, _Note
from ._tensors import Array

_TENSOR = (_Note("tensor"),)


class Share(_Owned):
    """The sender's side of a tensor that was sent to another process (gc_share_t), released by close(), at the end of a
    `with`, or with this object.

    On CUDA the other process uses the tensor's own memory: keep this, which keeps the tensor, until wait() returns.
    """

    def __init__(self, library: Library, tensor: Array, socket: Any, flags: int, timeout_ms: int) -> None:
        self._raw = library._raw
        self._tensor: Array | None = tensor
        numbers = _socket(socket), _whole("flags", flags, 0, 2**32 - 1), _int32("timeout_ms", timeout_ms)
        made, frame = L(), _frame()
        try:
            frame.read(1, (tensor,), _TENSOR)
            library._check(self._raw.gc_share_send(frame.places[0], *numbers, byref(made)))
        finally:
            frame.release()
        self._own(library, made)

    _free = "gc_share_free"

    def wait(self, timeout_ms: int = -1) -> None:
        """Waits until the other process has released the tensor; -1: without a limit."""
        self._run(self._raw.gc_share_wait, _int32("timeout_ms", timeout_ms))

    def close(self) -> None:
        """Releases it now, unless it has been. The receiver keeps its tensor, on CUDA until this memory is freed."""
        super().close()
        self._tensor = None
