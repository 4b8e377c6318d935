"""Tensors that are sent to another process."""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING

from ._abi import L
from ._arguments import _int32, _whole
from ._tensors import Array, _Borrowed

if TYPE_CHECKING:
    from ._library import GradCodec


class Share:
    """The sender's side of a tensor that was sent to another process (gc_share_t), released with this object. On CUDA
    the other process has the tensor's own memory: keep this until `wait` has returned, and it keeps the tensor."""

    def __init__(self, library: GradCodec, tensor: Array, socket: int, flags: int, timeout_ms: int) -> None:
        self._lib, self._handle, self._tensor = library.lib, L(), tensor
        numbers = _int32("socket", socket), _whole("flags", flags, 0, 2**32 - 1), _int32("timeout_ms", timeout_ms)
        self._lib.gc_share_send(_Borrowed(tensor, name="tensor"), *numbers, byref(self._handle))

    def wait(self, timeout_ms: int = -1) -> None:
        """Until the other process has released the tensor; -1: however long that takes."""
        self._lib.gc_share_wait(self._handle, _int32("timeout_ms", timeout_ms))

    def __del__(self) -> None:
        self._lib.gc_share_free(self._handle)
