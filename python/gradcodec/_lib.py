"""The shared library: where it is found, its functions, and the exception for a call that fails.

The objects of this package hold a Library. What makes these objects is a method of GradCodec, in _library.py.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from ctypes import c_int32, c_void_p
from typing import TYPE_CHECKING, Any

from ._abi import FUNCTIONS, NAME
from ._errors import GradCodecError, _cut


def _installed() -> ctypes.CDLL:
    """Loads the library of this package: in the wheel, in the sources, or in the prefix to which `make install` has put
    both. Otherwise loads the one that the system finds, or else one in the usual prefixes."""
    here = pathlib.Path(__file__).resolve().parent
    tree, prefix = here.parents[1], here.parents[3] if len(here.parents) > 3 else here
    built = tree / "target"  # the profile `fast` is that of `make demo` and of the tests
    folders = here, here / "lib", built / "release", built / "fast", tree / "lib", prefix / "lib"
    beside = [str(folder / NAME) for folder in folders]
    prefixes = sys.prefix, os.path.expanduser("~/.local"), "/usr/local"
    places = [os.path.join(prefix, "lib", NAME) for prefix in prefixes]
    for place in filter(os.path.exists, beside):
        return ctypes.CDLL(place)
    try:
        return ctypes.CDLL(NAME)
    except OSError as error:
        for place in filter(os.path.exists, places):
            return ctypes.CDLL(place)
        raise OSError(
            f"{error}; nor is it one of {', '.join(beside + places)}. Install GradCodec with `make install "
            "PREFIX=$HOME/.local`, or name the file: GradCodec(path), or GRADCODEC_LIBRARY in the environment"
        ) from None


def _tail(path: str) -> str:
    return path if len(path) <= 150 else f"...{path[-147:]}"


def _loaded(path: str | os.PathLike[str] | None) -> ctypes.CDLL:
    named = path or os.environ.get("GRADCODEC_LIBRARY")
    if not named:
        return _installed()
    try:
        return ctypes.CDLL(os.fspath(named))
    except OSError as error:
        raise OSError(
            f"{'path' if path else 'GRADCODEC_LIBRARY'} names {_tail(os.fspath(named))!r}: {_cut(str(error), 250)}"
        ) from None


class _Raw:
    """The functions of the library."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Library:
    """A loaded library: the functions of `lib` raise the error of a status; those of `_raw` return the status."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.lib, self._raw = _loaded(path), _Raw()
        for name, (result, arguments) in FUNCTIONS.items():
            if not hasattr(self.lib, name):
                raise OSError(f"{_tail(self.lib._name)}: no function {name}: older than this client, or not GradCodec")
            function = getattr(self.lib, name)
            function.argtypes, function.restype = arguments, self._check if name in _STATUSES else result
            # The raw functions take addresses, and their callers check the status.
            raw = self.lib[name]
            raw.argtypes = [c_void_p if hasattr(of, "contents") else of for of in arguments]
            raw.restype = result
            setattr(self._raw, name, raw)

    def _check(self, status: int) -> None:
        if status != 0:
            raise GradCodecError(self._last_error(), status)

    def _last_error(self) -> str:
        return bytes(self.lib.gc_last_error()).decode(errors="replace")

    def _number(self, function: Any, *arguments: Any) -> int:
        """Returns the result of a function that returns -1 if it fails."""
        number = int(function(*arguments))
        self._check(int(number < 0))
        return number


_NUMBERS = "gc_comm_rank", "gc_comm_world_size", "gc_allreduce_exchanges", "gc_codec_exchanges"  # an int32 that is no status
_STATUSES = {name for name, (result, _) in FUNCTIONS.items() if result is c_int32} - set(_NUMBERS)
