"""Tests how python/gradcodec reads arrays: by the type's table, by attributes, by __dlpack__; and the stream of its
calls. A library that computes nothing records the arguments (tests/fakes/recorder): `t7` is the tensor with the address
7. NumPy's arrays go to the library itself."""

import ctypes
import gc
import os
import re
import sys
import types
import weakref
from ctypes import PYFUNCTYPE, c_int, c_int32, c_int64, c_void_p, py_object

import numpy as np
import pytest

from capi import in_threads
from test_calls import Array, client, recorder, said  # noqa: F401 fixtures

from gradcodec import CPU, CUDA, GradCodec, GradCodecError, _reading

READ, CURRENT = PYFUNCTYPE(c_int, py_object, c_void_p), PYFUNCTYPE(c_int, c_int32, c_int32, c_void_p)
NAME = b"dlpack_exchange_api"


class Tables:
    """Types with a table. The types of a framework share one; `current` is its current stream on every device."""

    kept = []  # DLPack requires them until the process ends

    def __init__(self, current=99, version=1, previous=None, read=None):
        self.current, self.asked = current, []
        self.kept.append(self)
        self.functions = READ(self.read), CURRENT(self.tell)
        self_read, tell = (ctypes.cast(function, c_void_p).value for function in self.functions)
        old = ctypes.addressof(previous.api) if previous else None
        self.api = _reading._Api(version, 3, old, None, None, None, read or self_read, tell)
        self.capsule = client._python.PyCapsule_New(ctypes.addressof(self.api), NAME, None)

    def read(self, tensor, place):
        ctypes.memmove(place, ctypes.addressof(tensor.view), ctypes.sizeof(client.DLTensor))
        return 0

    def tell(self, kind, number, out):
        self.asked.append((kind, number))
        c_void_p.from_address(out).value = self.current
        return 0

    def type(self, *bases, **members):
        return type("Tensor", bases or (Bare,), {"__dlpack_c_exchange_api__": self.capsule, **members})


class Bare:
    """A tensor whose address is a number, without __dlpack__."""

    def __init__(self, number, device=(CUDA, 0)):
        self.shape = (c_int64 * 1)(4)
        self.view = client.DLTensor(number, client.Device(*device), 1, client.DType(2, 32, 1), self.shape, None, 0)


class Whole(Bare):
    """A tensor with __dlpack__, which records the stream that is requested."""

    def __init__(self, number, device=(CUDA, 0)):
        super().__init__(number, device)
        self.streams, self.managed = [], client.Managed(self.view, None, None)

    def __dlpack_device__(self):
        return self.view.device.device_type, self.view.device.device_id

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return client._python.PyCapsule_New(ctypes.addressof(self.managed), client.LEGACY, None)


def test_a_table_is_read_without_a_capsule_on_its_current_stream(said):
    of = Tables(current=99)
    kind = of.type()
    a, b = kind(1, (CUDA, 3)), kind(2, (CUDA, 3))
    _, lines = said(lambda g: g.pack_signs_into(a, b, 1))
    assert lines == ["gc_pack_signs_into(t1, 1, t2, 0x63)"] and set(of.asked) == {(CUDA, 3)}
    of.current = None
    _, lines = said(lambda g: g.pack_signs_into(a, b))
    assert lines == ["gc_pack_signs_into(t1, 0, t2, 0x1)"]


@pytest.mark.parametrize("named, asked", [(7, [7]), (99, []), (1, [1])])
def test_a_named_stream_waits_for_arrays_of_other_streams(said, named, asked):
    kind = Tables(current=99).type(Whole)
    a, b = kind(1), kind(2)
    said(lambda g: g.copy_into(a, b))  # the type is cached from now on
    _, lines = said(lambda g: g.copy_into(a, b, named))
    assert lines == [f"gc_copy_into(t1, t2, {named:#x})"] and (a.streams, b.streams) == (asked, asked)


def test_a_call_that_completes_before_it_returns_uses_the_legacy_stream(said):
    kind = Tables(current=99).type(Whole)
    a = kind(1)
    _, lines = said(lambda g: g.pack_bits(a))
    assert lines[0].startswith("gc_pack_bits(t1,") and a.streams == [1]


def test_the_first_of_two_frameworks_determines_the_stream(said):
    first, second = Tables(current=99), Tables(current=5)
    a, b = first.type(Whole)(1), second.type(Whole)(2)
    _, lines = said(lambda g: g.copy_into(a, b))
    assert lines == ["gc_copy_into(t1, t2, 0x63)"] and (a.streams, b.streams) == ([], [99])
    silent = Array(3)  # has __dlpack__ alone
    _, lines = said(lambda g: g.copy_into(silent, b))
    assert lines == ["gc_copy_into(t3, t2, 0x5)"] and (silent.streams, b.streams) == ([5], [99])


def test_an_array_of_a_second_device_is_synchronized_too(said):
    kind = Tables(current=99).type(Whole)
    a, b, host = kind(1, (CUDA, 0)), kind(2, (CUDA, 1)), kind(3, (CPU, 0))
    _, lines = said(lambda g: g.copy_into(a, b))
    assert lines == ["gc_copy_into(t1, t2, 0x63)"] and (a.streams, b.streams) == ([], [99])
    _, lines = said(lambda g: g.copy_into(host, b))
    assert lines == ["gc_copy_into(t3, t2, 0x63)"] and (host.streams, b.streams) == ([], [99])


def test_subclasses_share_a_table_and_a_list_is_read_at_once(said):
    of = Tables(current=99)
    kinds = of.type(), of.type()
    values = [kinds[k % 2](k + 10) for k in range(70)]
    payload = kinds[0](5)
    said(lambda g: [g.copy_into(kind(1), kind(2)) for kind in kinds])  # the types are cached from now on
    of.asked.clear()
    _, lines = said(lambda g: g.codec(1, [4] * 70).encode(values, payload))
    names = " ".join(f"t{k + 10}" for k in range(70))
    assert lines[-2].endswith(f"[{names}], 70, NULL, NULL, t5, 0x63)") and of.asked == [(CUDA, 0)]


def test_a_kernel_that_runs_again_reads_new_arrays(said):
    of = Tables(current=99)
    kind, foreign = of.type(Whole), Tables(current=5).type(Whole)
    second, other = kind(6, (CUDA, 1)), foreign(2)

    def calls(g):
        kernel = g.elementwise("i", "o", "op")
        kernel([kind(1)], [other])  # the types are cached from now on
        for number in 3, 4, 4:
            kernel([kind(number)], (kind(7),), axes=number - 2, workspace=kind(number + 10))
        of.current = 77
        kernel([kind(3), kind(4)], [kind(7)], keepdims=True)
        for _ in range(2):  # unlike most calls
            kernel([kind(3)], [second])
            kernel([kind(3)], [other])
            kernel([kind(3)], [kind(7)], 6)
            kernel([kind(3)], [kind(7)], axes=[0, 1])
            with pytest.raises(TypeError, match="axes: a whole number expected, got bool True"):
                kernel([kind(4)], [kind(7)], axes=True)

    _, lines = said(calls)
    again = [
        "gc_kernel_run(h, [t3], 1, [t6], 1, {}, 0x4d)", "gc_kernel_run(h, [t3], 1, [t2], 1, {}, 0x4d)",
        "gc_kernel_run(h, [t3], 1, [t7], 1, {}, 0x6)",
        "gc_kernel_run(h, [t3], 1, [t7], 1, {axes=[0 1] n_axes=2}, 0x4d)",
    ]  # fmt: skip
    lines = [re.sub(r"\bh\d+", "h", line) for line in lines]  # numbers depend on earlier handles of this process
    assert [line for line in lines if "kernel_run" in line] == [
        "gc_kernel_run(h, [t1], 1, [t2], 1, {}, 0x63)",
        "gc_kernel_run(h, [t3], 1, [t7], 1, {axes=[1] n_axes=1 workspace=t13}, 0x63)",
        *["gc_kernel_run(h, [t4], 1, [t7], 1, {axes=[2] n_axes=1 workspace=t14}, 0x63)"] * 2,
        "gc_kernel_run(h, [t3 t4], 2, [t7], 1, {flags=1}, 0x4d)",
        *again, *again,
    ]  # fmt: skip
    assert second.streams == [77, 77] and other.streams == [99, 77, 77]


@pytest.mark.parametrize("absent", [0, 1, 3])
def test_none_in_a_list_is_null_only_in_its_call(said, absent):
    kind = Tables().type()
    values = [None if k == absent else kind(k + 10) for k in range(4)]

    def calls(g):
        codec = g.codec(1, [4] * 4)
        codec.encode(values, kind(5))
        codec.encode([kind(k + 20) for k in range(4)], kind(5))

    _, lines = said(calls)
    names = ["NULL" if k == absent else f"t{k + 10}" for k in range(4)]
    encodes = [line for line in lines if line.startswith("gc_codec_encode")]
    assert f"[{' '.join(names)}]" in encodes[0] and "[t20 t21 t22 t23]" in encodes[1]


def test_a_table_of_another_version_is_skipped_for_an_older_one(said):
    strange = Tables(version=2).type(Whole)(1)
    _, lines = said(lambda g: g.copy_into(strange, strange))
    assert lines == ["gc_copy_into(t1, t1, 0x1)"] and strange.streams == [1, 1]
    old = Tables(current=88)
    newer = Tables(version=2, previous=old)
    both = newer.type()(1)
    _, lines = said(lambda g: g.copy_into(both, both))
    assert lines == ["gc_copy_into(t1, t1, 0x58)"]


@pytest.mark.parametrize("table", [None, 7, object(), "capsule"])
def test_an_invalid_table_is_ignored(said, table):
    if table == "capsule":
        table = client._python.PyCapsule_New(8, b"another", None)
    odd = type("Odd", (Whole,), {"__dlpack_c_exchange_api__": table})(1)
    _, lines = said(lambda g: g.copy_into(odd, odd, 7))
    assert lines == ["gc_copy_into(t1, t1, 0x7)"] and odd.streams == [7, 7]


def test_a_type_that_raises_is_read_by_dlpack_or_its_error_is_raised(said):
    class Refused(Exception):
        pass

    def refuse(self):
        raise Refused("not this one")

    # A C function that sets an exception; a callback cannot do this.
    of = Tables(read=ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, c_void_p).value)
    both, bare = of.type(Whole, __bool__=refuse)(1), of.type(__bool__=refuse)(2)
    _, lines = said(lambda g: g.copy_into(both, both))
    assert lines == ["gc_copy_into(t1, t1, 0x63)"] and both.streams == [99, 99]
    with pytest.raises(Refused, match="not this one"):
        said(lambda g: g.copy_into(bare, bare))
    with pytest.raises(Refused):
        said(lambda g: g.codec(1, [4] * 9).encode([bare] * 9, both))


def test_a_call_without_tensors_uses_the_stream_of_the_last_call(said):
    of = Tables(current=99)
    kind = of.type()

    def calls(g):
        codec = g.codec(1, [4])
        codec.rollback()
        codec.encode([kind(1)], kind(2))
        codec.rollback()
        of.current = 55
        codec.commit()
        codec.reset(7)
        codec.commit(kind(3))

    _, lines = said(calls)
    assert [line.split()[-1] for line in lines[4:10]] == ["0x1)", "0x63)", "0x63)", "0x37)", "0x7)", "0x37)"], lines


def test_a_nested_call_does_not_change_the_outer_call(said):
    class Calling(Whole):
        def __dlpack__(self, stream=None):
            self.library.copy_into(Array(8), Array(9), 3)
            return super().__dlpack__(stream)

    a = Calling(1)

    def calls(g):
        a.library = g
        g.copy_into(a, Array(2), 4)

    _, lines = said(calls)
    assert lines == ["gc_copy_into(t8, t9, 0x3)", "gc_copy_into(t1, t2, 0x4)"]


def test_a_call_keeps_no_reference(said):
    kind = Tables().type(Whole)
    arrays = [kind(1), kind(2), Array(3)]
    alive = [weakref.ref(array) for array in arrays]
    said(lambda g: g.copy_into(arrays[0], arrays[1]))
    said(lambda g: g.copy_into(arrays[0], arrays[2], 7))
    with pytest.raises(TypeError):
        said(lambda g: g.copy_into(arrays[0], [1]))
    said(lambda g: g.codec(1, [4] * 3).encode(arrays, arrays[1]))
    arrays.clear()
    gc.collect()
    assert [each() for each in alive] == [None] * 3


@pytest.fixture
def cupy(monkeypatch):
    """Returns the part of CuPy that is used: its arrays' attributes, and its current stream."""

    class ndarray(np.ndarray):
        device_id, asked = 0, ()

        @property
        def data(self):
            return types.SimpleNamespace(ptr=self.number, device_id=self.device_id)

        def __dlpack_device__(self):
            return CUDA, self.device_id

        def __dlpack__(self, stream=None):
            self.asked += (stream,)
            view = Whole(self.number, (CUDA, self.device_id))
            self.view_of = view
            return view.__dlpack__(stream)

    def make(number, shape=(4,), dtype="f4", device=0):
        array = np.zeros(shape, dtype).view(ndarray)
        array.number, array.device_id = number, device
        return array

    streams = {0: types.SimpleNamespace(ptr=33), 1: types.SimpleNamespace(ptr=44)}
    module = types.ModuleType("cupy")
    module.ndarray, module.make = ndarray, make
    module.cuda = types.SimpleNamespace(get_current_stream=lambda device=0: streams[device])
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_arrays_of_cupy_are_read_by_attributes_on_its_current_stream(said, cupy):
    for device, stream in (0, "0x21"), (1, "0x2c"):
        a, b = cupy.make(1, device=device), cupy.make(2, (2, 3), "u1", device)
        _, lines = said(lambda g: g.pack_signs_into(a, b))
        _, lines = said(lambda g: g.pack_signs_into(a, b))
        assert lines == [f"gc_pack_signs_into(t1, 0, t2, {stream})"] and a.asked == b.asked == ()
        _, lines = said(lambda g: g.pack_signs_into(a, b, stream=7))
        assert lines == ["gc_pack_signs_into(t1, 0, t2, 0x7)"] and a.asked == b.asked == (7,)
    table = Tables(current=99).type(Whole)(3)
    a = cupy.make(1)
    _, lines = said(lambda g: g.copy_into(table, a))
    assert lines == ["gc_copy_into(t3, t1, 0x63)"] and a.asked == (99,)


def test_the_shape_and_strides_of_cupy_s_arrays_are_in_elements(cupy):
    frame, note = _reading._frame(), [_reading._Note("src")]
    for array, strides in (
        (cupy.make(5, (2, 3)), None), (cupy.make(5, (2, 3)).T, [1, 3]), (cupy.make(5, (6, 4), "f8")[::2, 1::3], [8, 3]),
    ):  # fmt: skip
        array.number, array.device_id = 5, 1
        assert frame.read(None, (array,), note) == 44
        view = client.DLTensor.from_address(frame.places[0])
        assert (view.data, view.device.device_type, view.device.device_id, view.ndim) == (5, CUDA, 1, 2)
        assert (view.dtype.code, view.dtype.bits, view.dtype.lanes) == (2, 8 * array.itemsize, 1)
        assert view.shape[:2] == list(array.shape) and (view.strides[:2] if view.strides else None) == strides
    frame.release()


# --- NumPy ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library():
    return GradCodec(os.environ["GRADCODEC_LIBRARY"])


@pytest.fixture
def no_capsules(monkeypatch):
    def refuse(*arguments):
        raise AssertionError(f"read by __dlpack__: {arguments}")

    monkeypatch.setattr(_reading, "_Borrowed", refuse)


BASE = np.random.default_rng(0).standard_normal((6, 10, 16)).astype("f4")
VIEWS = {
    "whole": BASE, "offset": BASE[2, 3:], "scalar": np.array(-1.5, "f4"), "one": BASE[:1, :1, :1], "empty": BASE[:0],
    "empty in the middle": BASE[:, :0], "transposed": BASE.T, "every other": BASE[:, ::2], "backwards": BASE[::-1, :, ::-3],
    "broadcast": np.broadcast_to(BASE[0, 0], (5, 16)), "size-1 strides": np.lib.stride_tricks.as_strided(BASE, (1, 10), (12, 64)),
    "eight dimensions": BASE[:4, :8].reshape(2, 2, 2, 2, 2, 2, 2, 4), "float64": BASE.astype("f8"), "float16": BASE.astype("f2"),
    "Fortran": np.asfortranarray(BASE),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("read_only", [False, True])
def test_arrays_of_numpy_are_read_without_a_capsule(library, no_capsules, name, read_only):
    view = VIEWS[name][...] if VIEWS[name].ndim else VIEWS[name].copy()
    view.flags.writeable = not read_only and VIEWS[name].flags.writeable
    bits = np.full((1, -(-view.size // 8)), 7, "u1")
    library.pack_signs_into(view, bits)
    assert np.array_equal(bits.ravel(), np.packbits(view >= 0))
    copy = np.zeros(view.shape, view.dtype)
    library.copy_into(view, copy)
    assert np.array_equal(copy, view)


DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_correctly(library, no_capsules, dtype):
    source, target = np.array([0, 1, 3, 100], dtype), np.zeros((4, 3), dtype)
    library.copy_into(source, target[:, 1])
    assert target[:, 1].tolist() == source.tolist() and not target[:, ::2].any()
    assert np.from_dlpack(library.tensor_to_device(source, (CPU, 0))).dtype == source.dtype


def test_arrays_that_only_dlpack_describes_are_read_by_dlpack(library):
    deep = BASE.reshape((1,) * 6 + BASE.shape)  # nine dimensions
    assert np.array_equal(np.from_dlpack(library.pack_signs(deep, 1)[0]), np.packbits(BASE >= 0))

    class Own(np.ndarray):
        def __dlpack__(self, **requests):
            return super().__dlpack__(**requests)

    assert np.array_equal(np.from_dlpack(library.pack_signs(BASE.view(Own), 1)[0]), np.packbits(BASE >= 0))
    swapped, odd = BASE.astype(">f4"), np.zeros(8, [("a", "f4"), ("b", "u1")])["a"]
    for refused in swapped, odd, np.zeros(3, "M8[s]"), np.array(["a"]), np.zeros(3, "V4"):
        with pytest.raises((BufferError, GradCodecError)):
            library.pack_signs_into(refused, np.zeros((1, 1), "u1"))


def test_read_only_outputs_are_refused_however_they_are_read(library):
    for rows in np.full((1, 120), 7, "u1"), np.full((2, 240), 7, "u1")[::2, ::2]:
        rows.flags.writeable = False
        with pytest.raises(GradCodecError, match="dst: read-only") as error:
            library.pack_signs_into(BASE, rows)
        assert error.value.status == 5 and (rows == 7).all()


def test_threads_read_at_the_same_time(library):
    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(200):
            values = rng.standard_normal(int(rng.integers(1, 500))).astype("f4")
            bits = np.zeros((1, -(-values.size // 8)), "u1")
            library.pack_signs_into(values, bits)
            assert np.array_equal(bits.ravel(), np.packbits(values >= 0))

    in_threads(6, work)


def test_arrays_removed_during_a_call_stay_until_its_end(library):
    """Removes an argument in a function of the transport, which runs during the call."""
    gone = []

    def exchange(send, receive):
        values.clear()
        gc.collect()
        gone.append(alive() is None)
        receive[:] = send

    comm = library.communicator(0, 1, exchange, exchange)
    values, array = [], np.full(1000, 2, "f4")
    values.append(array)
    alive, reduce = weakref.ref(array), comm.allreduce(1, [1000])
    gone.clear()
    before = sys.getrefcount(array)
    reduce.run(values)
    assert sys.getrefcount(array) == before - bool(gone) and True not in gone and (array == 2).all()


def test_the_cache_of_types_has_a_bound(said):
    of = Tables()
    for k in range(600):
        kind = of.type()
        said(lambda g: g.copy_into(kind(1), kind(2))) if k % 100 == 0 else _reading._kind(kind)
    assert len(_reading._KINDS) <= _reading._MOST_KINDS


def test_parts_of_a_tensor_follow_its_address():
    parts = _reading._Parts([3, 0, 5], "float16", (CUDA, 2))
    for address in 4096, 512, 0:
        found = [client.DLTensor.from_address(place) for place in parts.at(address).places]
        listed = (c_void_p * parts.count).from_address(parts.list)
        assert [*listed] == [*parts.places] and [one.data or 0 for one in found] == [address, address + 6, address + 6]
        for one, count in zip(found, (3, 0, 5)):
            assert (one.ndim, one.shape[0], bool(one.strides), one.byte_offset) == (1, count, False, 0)
            assert (one.device.device_type, one.device.device_id) == (CUDA, 2)
            assert (one.dtype.code, one.dtype.bits, one.dtype.lanes) == (2, 16, 1)
    parts = _reading._Parts([3, 1, 5], "float16", (CUDA, 2), in_memory=[2, 0, 1])
    found = [client.DLTensor.from_address(place) for place in parts.at(4096).places]
    assert [(one.data, one.shape[0]) for one in found] == [(4106, 3), (4112, 1), (4096, 5)]
