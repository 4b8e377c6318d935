"""Reads arrays for a call: addresses, shapes and strides, without a capsule if their type allows it.

A `_Frame` has room for the DLTensors of one call. An array's type has a `_Kind`, which reads the array:

    PyTorch from 2.10, tvm-ffi    the type's table of C functions (DLPack 1.3)
    NumPy, CuPy                   attributes
    all others                    __dlpack__(), which needs the stream

The first two do not wait for a stream: they serve a call on the CPU, or on the framework's current stream.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import PYFUNCTYPE, addressof, c_char, c_int, c_int32, c_int64, c_void_p, py_object
from typing import Any, Callable, Iterable, NamedTuple, Sequence

from ._abi import CPU, CUDA, CUDA_MANAGED, DTYPES, DLTensor, _python
from ._arguments import _stream
from ._tensors import _Borrowed

# Numbers of 8-byte words: of a DLManagedTensor whose last two fields stay 0, then of the lengths and the strides of an
# array that does not store them.
_FIELDS, _MOST_DIMENSIONS = 8, 8
_WORDS = _FIELDS + 2 * _MOST_DIMENSIONS
_BYTES = 8 * _WORDS
_DEVICE, _DTYPE_CODE = 1, 20  # offsets of the fields, in words and in bytes
_COMPLEX = 5


class _Note(NamedTuple):
    """Name of a parameter, whether it is written to, and whether it may be None."""

    name: str
    written: bool = False
    optional: bool = False


class _Kind:
    """Reads arrays of one type. This one cannot: __dlpack__() does."""

    def read(self, source: Any, frame: _Frame, k: int, written: bool) -> bool:
        """Writes the DLTensor in place k. Returns False if only __dlpack__() can, or refuses it with a message."""
        return False

    def read_all(self, sources: Sequence[Any], frame: _Frame, written: bool) -> bool:
        """Reads several arrays of this kind, from the first place on. Returns False if any cannot be read."""
        return False

    def current(self, number: int) -> int | None:
        """Returns the current stream of this framework on a CUDA device; None if it gives none."""
        return None


class _Table(_Kind):
    """Reads by DLPackExchangeAPI, which a type has as __dlpack_c_exchange_api__."""

    def __init__(self, read: int, current: int) -> None:
        self._read: Callable[[Any, int], int] = PYFUNCTYPE(c_int, py_object, c_void_p)(read)
        self._current: Callable[[int, int, Any], int] = PYFUNCTYPE(c_int, c_int32, c_int32, c_void_p)(current)

    def read(self, source: Any, frame: _Frame, k: int, written: bool) -> bool:
        return not self._read(source, frame.places[k])

    def read_all(self, sources: Sequence[Any], frame: _Frame, written: bool) -> bool:
        return not any(map(self._read, sources, frame.places))

    def current(self, number: int) -> int | None:
        stream = c_void_p()
        return None if self._current(CUDA, number, ctypes.byref(stream)) else stream.value or 1


class _Torch(_Table):
    """PyTorch's table has no bits that mean "conjugated" and "negated", and ignores gradients. A tensor that is written
    to counts as changed, so that backward() refuses it if autograd has saved it."""

    def __init__(self, torch: Any, *functions: int) -> None:
        super().__init__(*functions)
        self._negated: Callable[[Any], bool] = torch.Tensor.is_neg
        self._recording: Callable[[], bool] = torch.is_grad_enabled
        self._changed: Callable[[Sequence[Any]], None] = torch._C._increment_version

    def read(self, source: Any, frame: _Frame, k: int, written: bool) -> bool:
        if (
            self._read(source, frame.places[k])
            or self._negated(source)
            or frame.bytes[k * _BYTES + _DTYPE_CODE] == _COMPLEX
            or (written and source.requires_grad and self._recording())
        ):
            return False
        if written:
            self._changed((source,))
        return True

    def read_all(self, sources: Sequence[Any], frame: _Frame, written: bool) -> bool:
        if (
            any(map(self._read, sources, frame.places))
            or any(map(self._negated, sources))
            or _COMPLEX in frame.bytes[_DTYPE_CODE : len(sources) * _BYTES : _BYTES].tobytes()
            or (written and self._recording() and any([source.requires_grad for source in sources]))
        ):
            return False
        if written:
            self._changed(sources)
        return True


class _OldTorch(_Kind):
    """PyTorch before 2.10, which gives its stream, and no more."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def current(self, number: int) -> int | None:
        return int(self._torch.cuda.current_stream(number).cuda_stream) or 1


class _NumPy(_Kind):
    def __init__(self, numpy: Any) -> None:
        names = DTYPES.keys() - {"float8", "bfloat16"}
        # The word of a DLTensor after `device`, less ndim. Another byte order is another dtype.
        self._about = {numpy.dtype(name): _about(*DTYPES[name]) for name in names}

    def read(self, source: Any, frame: _Frame, k: int, written: bool) -> bool:
        about, shape, flags = self._about.get(source.dtype), source.shape, source.flags
        if about is None:
            return False
        if flags.carray:  # contiguous, aligned, writable
            address = 0 if 0 in shape else addressof(c_char.from_buffer(source))
            return frame.describe(k, address, CPU, about, shape)
        if written and not flags.writeable:
            return False
        address, _ = source.__array_interface__["data"]
        return frame.describe(k, address, CPU, about, shape, source.strides, source.itemsize)


class _CuPy(_NumPy):
    def __init__(self, cupy: Any, numpy: Any) -> None:
        super().__init__(numpy)
        self._current_stream = cupy.cuda.get_current_stream

    def read(self, source: Any, frame: _Frame, k: int, written: bool) -> bool:
        about, shape, memory = self._about.get(source.dtype), source.shape, source.data
        if about is None:
            return False
        device, address = CUDA | memory.device_id << 32, 0 if 0 in shape else memory.ptr
        if source.flags.c_contiguous:
            return frame.describe(k, address, device, about, shape)
        return frame.describe(k, address, device, about, shape, source.strides, source.itemsize)

    def current(self, number: int) -> int | None:
        return int(self._current_stream(number).ptr) or 1


class _Number(NamedTuple):
    """A number that is read as an array on the CPU without dimensions; `bits`: its 8 bytes, as an int64."""

    bits: int
    about: int


class _Numbers(_Kind):
    def read(self, source: Any, frame: _Frame, k: int, written: bool) -> bool:
        frame.describe(k, frame.places[k] + 8 * _FIELDS, CPU, source.about, ())
        frame.words[k * _WORDS + _FIELDS] = source.bits
        return True


def _about(code: int, bits: int, lanes: int) -> int:
    return code << 32 | bits << 40 | lanes << 48


_BY_DLPACK = _Kind()
_KINDS: dict[type, _Kind] = {}  # by type: usually a few, but programs may create types without end
_MOST_KINDS = 256
_TABLES: dict[tuple[int, int], _Kind] = {}  # by their functions: the types of a framework share one


class _Api(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", c_void_p),
        ("allocate", c_void_p), ("to_managed", c_void_p), ("from_managed", c_void_p),
        ("read", c_void_p), ("current", c_void_p)]  # fmt: skip


def _functions(of: type) -> tuple[int, int] | None:
    """Returns two functions of a type's table of DLPack 1: one reads a tensor, one gives the current stream."""
    try:
        address = _python.PyCapsule_GetPointer(getattr(of, "__dlpack_c_exchange_api__"), b"dlpack_exchange_api")
    except Exception:  # none, or something else by this name
        return None
    while address:
        table = _Api.from_address(address)
        if table.major == 1:
            return (table.read, table.current) if table.read and table.current else None
        address = table.previous
    return None


def _plain(of: Any, tensor: Any) -> bool:
    """Returns whether a class of PyTorch's tensors has ordinary memory, and overrides nothing that must run first."""
    function = getattr(of.__torch_function__, "__func__", of.__torch_function__)
    none = sys.modules["torch"]._C._disabled_torch_function_impl
    return (
        of.__torch_dispatch__ is tensor.__torch_dispatch__
        and of.__dlpack__ is tensor.__dlpack__
        and (function is tensor.__torch_function__.__func__ or function is none)
    )


def _made(of: type) -> _Kind:
    if of is _Number:
        return _Numbers()
    numpy, torch, cupy = (sys.modules.get(name) for name in ("numpy", "torch", "cupy"))
    if of is getattr(numpy, "ndarray", None):
        return _NumPy(numpy)
    if numpy is not None and cupy is not None and of is getattr(cupy, "ndarray", None):
        return _CuPy(cupy, numpy)
    functions, tensor = _functions(of), getattr(torch, "Tensor", None)
    of_torch = tensor is not None and issubclass(of, tensor)
    if functions is None or of_torch and not _plain(of, tensor):
        return _OldTorch(torch) if of_torch else _BY_DLPACK
    return _TABLES.get(functions) or _TABLES.setdefault(
        functions, _Torch(torch, *functions) if of_torch else _Table(*functions)
    )


def _kind(of: type) -> _Kind:
    if len(_KINDS) >= _MOST_KINDS:
        _KINDS.clear()
    try:
        kind = _made(of)
    except Exception:  # a framework that is being imported, or is not what its name suggests
        return _BY_DLPACK
    return _KINDS.setdefault(of, kind)


class _Frame:
    """The DLTensors of one call, at `places`; `list` is the address of a list of their addresses. `home`: the framework
    and the device whose current stream the call used."""

    def __init__(self, room: int) -> None:
        self._memory = (c_int64 * (room * _WORDS))()
        start = addressof(self._memory)
        self.bytes = memoryview(self._memory).cast("B")
        self.words = self.bytes.cast("q")
        self.places = [start + _BYTES * k for k in range(room)]
        self._addresses = (c_void_p * room)(*self.places)
        self.list = addressof(self._addresses)
        self.home: tuple[_Kind, int] | None = None
        self._kept: list[Any] = []  # capsules, and numbers of addresses that are NULL

    def describe(
        self, k: int, address: int, device: int, about: int, shape: tuple[int, ...],
        strides: tuple[int, ...] = (), item: int = 1,
    ) -> bool:  # fmt: skip
        """Writes a tensor from its attributes. `strides`: in bytes; none for C order."""
        words, at, own = self.words, k * _WORDS, self.places[k] + 8 * _FIELDS
        dimensions = len(shape)
        if dimensions > _MOST_DIMENSIONS:
            return False
        words[at], words[at + 1], words[at + 2], words[at + 3] = address, device, about | dimensions, own
        words[at + 4], words[at + 5] = own + 8 * _MOST_DIMENSIONS if strides else 0, 0
        at += _FIELDS
        for length in shape:
            words[at] = length
            at += 1
        at += _MOST_DIMENSIONS - dimensions
        for stride in strides:
            words[at], rest = divmod(stride, item)
            if rest:
                return False
            at += 1
        return True

    def read(
        self, stream: Any, sources: Sequence[Any], notes: Sequence[_Note], listed: int = 0,
        home: tuple[_Kind, int] | None = None,
    ) -> int:  # fmt: skip
        """Reads the arrays of a call, of which the first `listed` are a list.

        Returns the stream of the call: `stream`, or, for None, the current stream of the first array that has one, or
        else that of `home`. All arrays are ready on it.
        """
        words, k = self.words, 0
        try:
            if listed > 2 and self._read_list(sources[:listed], notes[0].written):
                k = listed
                elsewhere = words[_DEVICE : k * _WORDS : _WORDS].tolist().count(CPU) != k
            else:
                elsewhere = False
            for source in sources[k:] if k else sources:
                if source is None and notes[k].optional:
                    words[k * _WORDS + _DEVICE] = CPU
                elif not _KINDS[type(source)].read(source, self, k, notes[k].written):
                    break
                elif words[k * _WORDS + _DEVICE] != CPU:
                    elsewhere = True
                k += 1
            else:
                if not elsewhere:
                    return 1 if stream is None and home is None else self._named(stream, home)
                ready = self._together(stream, sources)
                if ready is not None:
                    return ready
        except Exception:  # a type's first use, or a refusal: read slowly
            pass
        return self._read_slowly(stream, sources, notes, listed, home)

    def addresses(self, sources: Sequence[Any], first: int = 0) -> list[int | None]:
        """Returns the addresses of the arrays that were read, from `first` on: NULL for None."""
        places = self.places[first : len(sources)]
        return [None if source is None else place for source, place in zip(sources[first:], places)]

    def _read_list(self, sources: Sequence[Any], written: bool) -> bool:
        kinds = {_KINDS[of] for of in set(map(type, sources))}
        return len(kinds) == 1 and kinds.pop().read_all(sources, self, written)

    @staticmethod
    def _named(stream: Any, home: tuple[_Kind, int] | None) -> int:
        """Returns the stream of a call whose arrays give none."""
        if stream is not None or home is None:
            return _stream(stream)
        return home[0].current(home[1]) or 1

    def _together(self, stream: Any, sources: Sequence[Any]) -> int | None:
        """Returns the current stream, if all arrays are of one framework and one device and use it; otherwise None."""
        devices = self.words[_DEVICE : len(sources) * _WORDS : _WORDS].tolist()
        if CPU in devices:
            sources = [source for source, device in zip(sources, devices) if device != CPU]
            devices = [device for device in devices if device != CPU]
        if devices[0] & _LOW != CUDA or devices.count(devices[0]) != len(devices):
            return None
        kinds = {_KINDS[of] for of in set(map(type, sources))}
        kind, number = kinds.pop(), devices[0] >> 32
        current = None if kinds else kind.current(number)
        if current is not None and stream is not None and _stream(stream) != current:
            return None
        self.home = kind, number
        return current

    def _read_slowly(
        self, named: Any, sources: Sequence[Any], notes: Sequence[_Note], listed: int, home: tuple[_Kind, int] | None
    ) -> int:
        """Reads arrays one by one; by __dlpack__() if there is no other way, or if the first one has another stream."""
        stream, first = None if named is None else _stream(named), None
        slow: dict[int, Exception | None] = {}
        for k, source in enumerate(sources):
            if source is None and (k < listed or notes[k].optional):
                if k < listed:
                    self._addresses[k] = None
                    self._kept.append(k)
                continue
            kind = _KINDS.get(type(source)) or _kind(type(source))
            try:
                if not kind.read(source, self, k, notes[k].written):
                    slow[k] = None
            except Exception as failure:
                slow[k] = failure
            if k not in slow:
                device = self.words[k * _WORDS + _DEVICE]
                device, number = device & _LOW, device >> 32
            elif hasattr(source, "__dlpack_device__"):
                device, number = source.__dlpack_device__()
            else:
                continue
            if device in (CUDA, CUDA_MANAGED):
                current = kind.current(number)
                stream = stream or current
                first = first or (current and (kind, number))
                if (kind, number) != first or current != stream:
                    slow.setdefault(k)
        self.home = first or None
        if stream is None:
            stream = self._named(None, home)
        for k, refused in slow.items():
            self._borrow(k, sources[k], stream, notes[k], refused)
        return stream

    def _borrow(self, k: int, source: Any, stream: int, note: _Note, failure: Exception | None) -> None:
        if failure is not None and not hasattr(source, "__dlpack__"):
            raise failure
        borrowed = _Borrowed(source, stream, note.written, note.name)
        self._kept.append(borrowed)
        ctypes.memmove(self.places[k], borrowed._as_parameter_, ctypes.sizeof(DLTensor))

    def release(self) -> None:
        """Ends a call, so that the frame may serve another one."""
        self.home = None
        if self._kept:
            for k in self._kept:
                if isinstance(k, int):
                    self._addresses[k] = self.places[k]
            self._kept.clear()
        room = len(self.places)
        if room <= _MOST_KEPT:
            _FREE[room.bit_length()].append(self)


class _Ready:
    """A call that is made once and used again: its arguments are objects of ctypes, of which only the DLTensors'
    contents and the stream change. It is for arrays of one framework on one device; the first `listed` are a list.

    `written`: whether each array is written to. `call` returns the status. `home`: see _Frame.
    """

    call: Callable[[], int]
    home: tuple[_Kind, int] | None = None

    def __init__(self, written: Sequence[bool], listed: int) -> None:
        self.frame, self.stream, self._written, self._listed = _Frame(len(written)), c_void_p(), written, listed

    def read(self, sources: Sequence[Any]) -> bool:
        """Reads numbers, and arrays for their current stream. Returns False, or raises, if a frame has to read or to
        refuse them."""
        frame, words, written, k = self.frame, self.frame.words, self._written, 0
        kind: _Kind | None = None
        device: int | None = None
        if self._listed > 2:
            k = self._listed
            [of] = set(map(type, sources[:k]))
            kind = _KINDS[of]
            if not kind.read_all(sources[:k], frame, written[0]):
                return False
            device = words[_DEVICE]
            if words[_DEVICE : k * _WORDS : _WORDS].tolist().count(device) != k:
                return False
        for source in sources[k:] if k else sources:
            its = _KINDS[type(source)]
            if not its.read(source, frame, k, written[k]):
                return False
            if type(source) is not _Number:
                here = words[k * _WORDS + _DEVICE]
                if (its, here) != (kind, device):
                    if kind is not None:
                        return False
                    kind, device = its, here
            k += 1
        if kind is None or device is None:
            return False
        if device == CPU:
            self.stream.value = 1
            return True
        self.home = kind, device >> 32
        stream = kind.current(device >> 32) if device & _LOW == CUDA else None
        self.stream.value = stream
        return stream is not None


class _Parts:
    """Tensors that lie one after the other in memory. Their DLTensors are written once, at `places`; `list` is the
    address of a list of them. `counts`: their element counts; `device`: kind and number in DLPack. `in_memory`: the
    numbers of the tensors in the order in which they lie in memory; None: their own order."""

    def __init__(
        self, counts: Sequence[int], dtype: str, device: tuple[int, int], in_memory: Sequence[int] | None = None
    ) -> None:  # fmt: skip
        (code, bits, lanes), (kind, number) = DTYPES[dtype], device
        self._frame, self.count, self._address = _Frame(len(counts)), len(counts), 0
        self.places, self.list, self._offsets, offset = self._frame.places, self._frame.list, [0] * len(counts), 0
        for k in range(len(counts)) if in_memory is None else in_memory:
            self._frame.describe(k, 0, kind | number << 32, _about(code, bits, lanes), (counts[k],))
            self._offsets[k] = offset
            offset += counts[k] * bits // 8

    def at(self, address: int) -> _Parts:
        """Sets the address at which the memory begins, and returns these parts."""
        if address != self._address:
            words = self._frame.words
            for k, offset in enumerate(self._offsets):
                words[k * _WORDS] = address + offset
            self._address = address
        return self

    def at_each(self, addresses: Sequence[int], numbers: Sequence[int]) -> _Parts:
        """Sets addresses: at each begin as many parts as `numbers` has for it. Returns these parts."""
        words, k, self._address = self._frame.words, 0, 0
        for address, number in zip(addresses, numbers):
            for each in range(k, k + number):
                words[each * _WORDS] = address + self._offsets[each] - self._offsets[k]
            k += number
        return self


_LOW = 2**32 - 1  # the bits of a device that hold its kind
_LEAST, _MOST_KEPT = 8, 1024
_FREE: list[list[_Frame]] = [[] for _ in range(64)]  # by the bit_length() of their room


def _frame(arrays: int = 0) -> _Frame:
    """Returns a frame for a list of `arrays` arrays and a few single ones. The caller must release it."""
    room = _LEAST if arrays == 0 else 1 << (arrays + _LEAST).bit_length()
    try:
        return _FREE[room.bit_length()].pop()  # no other thread gets the same
    except IndexError:
        return _Frame(room)
