"""Objects that own something of the library, and their release."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from typing import Any, Callable, Sequence, TypeVar

from ._errors import GradCodecError, Status
from ._lib import Library
from ._reading import _Ready

Self = TypeVar("Self", bound="_Owned")  # typing has one from Python 3.11 on
_MOST_READY = 64  # kept calls, which differ in more than their arrays


class _Owned:
    """An object that is released once: by close(), at the end of a `with`, or with the last reference to it."""

    _library: Library
    _free: str  # the function that releases it
    _handle: int | None = None
    _calls: list[None]  # one for each call under way
    _raised: Sequence[list[BaseException]] = ()  # exceptions of Python functions that C has called

    def _own(self, library: Library, handle: Any) -> None:
        self._library, self._calls = library, []
        self._handle = ctypes.cast(handle, c_void_p).value
        self._ready: dict[Any, list[_Ready]] = {}

    def _open(self) -> int:
        handle = self._handle
        if handle is None:
            raise ValueError(f"{type(self).__name__} is closed")
        return handle

    def _call_with(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of a C function for the handle and arguments; keeps the handle meanwhile."""
        calls = self._calls
        calls.append(None)
        try:
            return function(self._handle or self._open(), *arguments)
        finally:
            calls.pop()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function that returns a status."""
        self._run_ended(self._call_with(function, *arguments))

    def _run_ended(self, status: int) -> None:
        """Raises the error of a status, or what Python functions that C has called have raised."""
        if status or any(self._raised):
            self._failed(status)

    def _run_ready(self, key: Any, make: Callable[[c_void_p], _Ready], sources: Sequence[Any]) -> _Ready | None:
        """Calls a function by a kept call with the same `key`, or by a new one of the handle. Returns None without
        calling if these arrays have to be read otherwise, or refused."""
        try:
            ready = self._ready[key].pop()  # no other thread gets the same
        except (KeyError, IndexError):
            if len(self._ready) >= _MOST_READY:
                self._ready.clear()
            ready = make(c_void_p(self._open()))
        calls = self._calls
        calls.append(None)
        try:
            try:
                if not ready.read(sources):
                    return None
            except Exception:  # a type's first use, or a refusal
                return None
            self._open()
            status = ready.call()
        finally:
            calls.pop()
            self._ready.setdefault(key, []).append(ready)
        self._run_ended(status)
        return ready

    def _failed(self, status: int) -> None:
        """Raises the error of a status."""
        self._library._check(status)

    def close(self) -> None:
        """Releases it now, unless it has been. Raises BUSY while another thread is in a call on it."""
        handle = vars(self).pop("_handle", None)  # only one of two threads gets it
        if handle is None:
            return
        if self._calls:
            self._handle = handle
            raise GradCodecError(f"{type(self).__name__} is in use by a call: close it afterwards", Status.BUSY)
        getattr(self._library._raw, self._free)(handle)

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled: what it owns is released once")

    def __enter__(self: Self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
