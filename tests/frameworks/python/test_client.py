"""Tests of python/gradcodec: its declarations, its arguments, its results, and the release of all memory."""

import ctypes
import gc
import os
import socket
import re
import subprocess
import sys

import numpy as np
import pytest

import gradcodec as client
from gradcodec import CPU, CUDA, Communicator, GradCodecError
from gradcodec._abi import LEGACY, VERSIONED
from peers import ROOT, Exporter, Jax, Lent, Made, OldExporter, Torch, chunk_rows, frameworks, gradcodec

CLIENT = ROOT / "python" / "gradcodec"
RNG = np.random.default_rng(0)
VALUES = RNG.standard_normal((96, 256)).astype(np.float32)
TRUTH = VALUES >= 0
BYTES = 3072  # packed size; its 3 or 4 chunks are aligned to 256 bytes, so JAX does not copy them


# --- the package ------------------------------------------------------------------------------------------------------


def test_the_package_is_typed():
    pytest.importorskip("mypy")
    folder = ROOT / "build" / "mypy"
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder), str(CLIENT)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_package_imports_only_the_standard_library():
    program = (
        f"import sys; sys.path.insert(0, {str(CLIENT.parent)!r}); import gradcodec as g; "
        "t = g.GradCodec().tensor_empty((3, 5), 'int16'); print(t.shape, t.device, g.GradCodec().chunk_bytes(1000, 4))"
    )
    alone = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", program], capture_output=True, text=True)
    assert (alone.stdout, alone.stderr) == ("(3, 5) (1, 0) 32\n", "")


def test_the_program_of_getting_started_prints_its_comments(capsys):
    text = (ROOT / "docs" / "START.md").read_text(encoding="utf-8")
    (program,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "import numpy" in block]
    exec(program, {})
    assert capsys.readouterr().out in re.findall(r"```text\n(.*?)```", text, re.S)


# --- arrays in and out ------------------------------------------------------------------------------------------------


@frameworks()
def test_chunks_of_a_framework_and_back(framework):
    for n_chunks in 1, 3, 4:
        rows = [framework.take(chunk) for chunk in gradcodec.pack_chunks(framework.array(TRUTH), n_chunks)]
        np.testing.assert_array_equal([framework.numpy(row) for row in rows], chunk_rows(TRUTH, n_chunks))
        back = framework.take(gradcodec.unpack_chunks(rows, TRUTH.size))
        np.testing.assert_array_equal(framework.numpy(back), TRUTH.ravel())
        assert str(back.dtype).endswith(("bool", "bool_"))


@frameworks()
def test_inputs_are_read_where_they_are(framework):
    array = framework.array(VALUES)
    for seen in (array, array.T, array[3:, ::2]) if framework.writes else (array,):
        borrowed = client._tensors._Borrowed(seen)
        view = borrowed._as_parameter_.contents.dl_tensor
        assert view.data + view.byte_offset == framework.address(seen)
        assert tuple(view.shape[:2]) == tuple(seen.shape)


@frameworks()
def test_outputs_stay_where_they_are(framework):
    device = framework.device
    made = [
        *gradcodec.pack_chunks(framework.array(TRUTH), 3), gradcodec.pack_bits(framework.array(TRUTH), 1),
        gradcodec.unpack_bits(framework.array(VALUES.view(np.uint8)), 0), gradcodec.tensor_empty((64, 32), "float32", device),
    ]  # fmt: skip
    for tensor in made:
        assert (tensor.device, tensor.__dlpack_device__()) == (device, device)
        array = framework.take(tensor)
        assert (framework.address(array), tuple(array.shape)) == (tensor.address, tensor.shape)


@frameworks()
def test_an_empty_tensor_of_every_dtype(framework):
    for dtype in "bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16", "float32":
        if dtype == "bfloat16" and not isinstance(framework, (Torch, Jax)):
            continue  # the other frameworks have no bfloat16
        array = framework.take(gradcodec.tensor_empty([64, 2, 3], dtype, framework.device))
        assert dtype in str(array.dtype) and tuple(array.shape) == (64, 2, 3)


def test_tensors_of_the_library_are_accepted_as_inputs():
    chunks = gradcodec.pack_chunks(TRUTH, 4)
    np.testing.assert_array_equal(np.from_dlpack(gradcodec.unpack_chunks(chunks, TRUTH.size)), TRUTH.ravel())
    rows = gradcodec.tensor_empty((4, chunks[0].shape[0]), "uint8")
    gradcodec.pack_signs_into(VALUES, rows)
    np.testing.assert_array_equal(np.from_dlpack(rows), np.stack([np.from_dlpack(chunk) for chunk in chunks]))


# --- ownership --------------------------------------------------------------------------------------------------------


def aligned(size):
    """Returns host memory that JAX does not copy: it is aligned to a cache line."""
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


@frameworks(device=CPU)
def test_exported_memory_is_released_by_its_last_user(framework):
    memory = aligned(64 * 8)
    lent = Lent(memory)
    tensor = lent.tensor()
    array = framework.take(tensor)
    assert framework.address(array) == memory.ctypes.data
    del tensor
    gc.collect()
    assert lent.releases == []
    del array
    gc.collect()
    assert lent.releases == [42]


@pytest.mark.parametrize("asked", [None, {}, {"max_version": (1, 0)}])
def test_a_tensor_that_is_not_exported_is_released_once(asked):
    lent = Lent(np.zeros(4))
    tensor = lent.tensor()
    if asked is not None:
        tensor.__dlpack__(**asked)
    assert lent.releases == []
    del tensor
    assert lent.releases == [42]


def test_a_capsule_keeps_the_tensor_beyond_its_object():
    lent = Lent(np.zeros(4))
    capsule = lent.tensor().__dlpack__()
    assert lent.releases == []
    del capsule
    assert lent.releases == [42]


def test_the_dlpack_version_is_the_requested_one_and_may_change():
    name_of = client._abi._python.PyCapsule_GetName
    lent = Lent(np.arange(4.0))
    tensor = lent.tensor()
    for asked, name in (
        ({}, LEGACY),
        ({"max_version": (1, 0)}, VERSIONED),
        ({"max_version": (0, 8)}, LEGACY),
        ({"max_version": (1, 99), "stream": 5, "dl_device": (CPU, 0), "copy": False}, VERSIONED),
    ):
        assert name_of(tensor.__dlpack__(**asked)) == name
    array = np.from_dlpack(tensor)
    assert array.ctypes.data == lent.array.ctypes.data and lent.releases == []
    del array, tensor
    assert lent.releases == [42]


def test_a_tensor_is_exported_once():
    lent = Lent(np.zeros(4))
    tensor = lent.tensor()
    array = np.from_dlpack(tensor)
    for take in (np.from_dlpack, Torch().take, Jax().take, gradcodec.pack_bits):
        with pytest.raises(BufferError, match="used_dltensor_versioned"):
            take(tensor)
    assert lent.releases == []
    del tensor, array
    gc.collect()
    assert lent.releases == [42]


def test_after_a_refusal_another_framework_may_import_the_tensor():
    lent = Lent(aligned(128).view(np.uint16))
    tensor = lent.tensor("bfloat16")
    with pytest.raises((BufferError, RuntimeError)):  # not SystemError: the capsule's destructor is native
        np.from_dlpack(tensor)
    array = Jax().take(tensor)  # in the other form
    assert str(array.dtype) == "bfloat16" and lent.releases == []
    del tensor, array
    gc.collect()
    assert lent.releases == [42]


def test_copies_and_other_devices_are_refused():
    lent = Lent(np.zeros(4))
    tensor = lent.tensor()
    for asked in {"copy": True}, {"dl_device": (CUDA, 0)}, {"dl_device": (CPU, 1)}:
        with pytest.raises(BufferError):
            tensor.__dlpack__(**asked)
    with pytest.raises(BufferError):
        np.from_dlpack(tensor, copy=True)
    del tensor
    assert lent.releases == [42]


made_forms = pytest.mark.parametrize("name", [LEGACY, VERSIONED], ids=["legacy", "versioned"])
exporters = pytest.mark.parametrize("exporter", [Exporter, OldExporter])


@made_forms
@exporters
def test_inputs_are_borrowed_and_released(name, exporter):
    made = Made(TRUTH, name=name)
    (chunk,) = gradcodec.pack_chunks(exporter(made), 1)
    assert made.releases == [1]
    np.testing.assert_array_equal(np.from_dlpack(chunk), np.packbits(TRUTH))
    chunks = [Made(row, name=name) for row in chunk_rows(TRUTH, 3)]
    back = gradcodec.unpack_chunks([exporter(chunk) for chunk in chunks], TRUTH.size)
    assert [chunk.releases for chunk in chunks] == [[1]] * 3
    np.testing.assert_array_equal(np.from_dlpack(back), TRUTH.ravel())
    source, target = Made(VALUES, name=name), Made(np.zeros((3, BYTES // 3), np.uint8), name=name)
    gradcodec.pack_signs_into(exporter(source), exporter(target))
    assert (source.releases, target.releases) == ([1], [1])
    np.testing.assert_array_equal(target.array, chunk_rows(TRUTH, 3))


@made_forms
@exporters
def test_inputs_are_released_when_the_call_fails(name, exporter):
    floats, other = Made(VALUES, name=name), Made(np.zeros(3), name=name)
    for call in (
        lambda: gradcodec.pack_chunks(exporter(floats), 4),
        lambda: gradcodec.pack_bits(exporter(floats)),
        lambda: gradcodec.unpack_chunks([exporter(floats)], 8),
        lambda: gradcodec.pack_signs_into(exporter(floats), exporter(other)),
    ):
        with pytest.raises(GradCodecError):
            call()
    assert len(floats.releases) == 4 and len(other.releases) == 1


def test_many_calls_leak_nothing():
    wide = np.ones(2**20, bool)

    def work(rounds):
        for _ in range(rounds):
            chunks = gradcodec.pack_chunks(wide, 4)
            arrays = [np.from_dlpack(chunk) for chunk in chunks[:2]]
            gradcodec.unpack_chunks([*arrays, *chunks[2:]], wide.size).__dlpack__(max_version=(1, 0))
            for wrong in (lambda: gradcodec.pack_bits(wide, 3), lambda: gradcodec.pack_chunks(VALUES, 3)):
                with pytest.raises(GradCodecError):
                    wrong()
        gc.collect()
        return sys.getallocatedblocks(), resident_bytes()

    work(20)
    (blocks, resident), (blocks_after, resident_after) = work(20), work(200)
    assert blocks_after - blocks < 200, "one object a call would be 1000 and more"
    assert resident_after - resident < 32 * 2**20, "a leak of the tensors would be 200 MiB"


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_capsule_outlives_the_module():
    program = f"""
import ctypes, gc, sys
sys.path.insert(0, {str(CLIENT.parent)!r})
import gradcodec as client
codec, released, memory, shape = client.GradCodec(), [], (ctypes.c_int64 * 4)(), (ctypes.c_int64 * 1)(4)
callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(released.append)
where = ctypes.addressof(memory), client.Device(1, 0), client.DType(0, 64, 1), 1, shape, None
release = ctypes.cast(callback, ctypes.c_void_p)
capsule = codec.make(codec.lib.gc_tensor_from_pointer, *where, release, 42).__dlpack__()
del codec, where
for each in client, client._abi, client._tensors: vars(each).clear()  # as the interpreter does when it ends
gc.collect()
noise = [b"%08d" % n for n in range(100_000)]  # where the capsule's name was, if it is gone
del capsule
print(released)
"""
    child = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True)
    assert (child.returncode, child.stdout, child.stderr) == (0, "[42]\n", "")


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_the_newer_dlpack_version_is_requested_without_a_stream_on_the_cpu():
    exporter = Exporter(Made(TRUTH))
    gradcodec.pack_bits(exporter)
    assert exporter.requests == [{"max_version": (1, 0)}]


class Asked(Exception):
    pass


class OnCuda:
    """An array that claims to be on CUDA and has no memory. It raises the stream that the library requests."""

    def __init__(self, device=(CUDA, 0)):
        self.device = device

    def __dlpack__(self, **requests):
        raise Asked(requests.get("stream"))

    def __dlpack_device__(self):
        return self.device


class Stream:
    def __init__(self, **handle):
        vars(self).update(handle)


@pytest.mark.parametrize("stream, handle", [
    (None, 1), (0, 1), (1, 1), (2, 2), (140_000_000_000_000, 140_000_000_000_000), (np.int64(77), 77),
    (Stream(cuda_stream=99), 99), (Stream(cuda_stream=0), 1), (Stream(ptr=99), 99), (Stream(ptr=0), 1),
])  # fmt: skip
def test_the_producer_is_asked_to_be_ready_on_the_stream(stream, handle):
    with pytest.raises(Asked) as asked:
        gradcodec.pack_signs_into(OnCuda(), OnCuda(), stream=stream)
    assert asked.value.args == (handle,) and type(asked.value.args[0]) is int  # PyTorch accepts nothing else
    with pytest.raises(Asked) as asked:
        gradcodec.pack_chunks(OnCuda(), 1)
    assert asked.value.args == (1,)


def test_pinned_memory_has_no_stream():
    with pytest.raises(Asked) as asked:
        gradcodec.pack_bits(OnCuda((client.CUDA_HOST, 0)))
    assert asked.value.args == (None,)


def test_capsules_that_hold_nothing_are_refused():
    array = np.zeros(16, np.uint8)
    capsule = array.__dlpack__()
    client._abi._python.PyCapsule_SetName(capsule, b"used_dltensor")
    exporter = Exporter(Made(array))
    exporter.made.capsule = lambda: capsule
    with pytest.raises(BufferError, match="used_dltensor"):
        gradcodec.pack_bits(exporter)
    client._abi._python.PyCapsule_SetName(capsule, b"dltensor")  # NumPy's, to be released
    exporter.made.capsule = lambda: object()
    with pytest.raises(ValueError):
        gradcodec.pack_bits(exporter)


def test_another_major_version_is_refused():
    made = Made(TRUTH, name=VERSIONED, version=(2, 0))
    with pytest.raises(BufferError, match="2.0"):
        gradcodec.pack_bits(Exporter(made))
    assert made.releases == [1]
    assert gradcodec.pack_bits(Exporter(Made(TRUTH, name=VERSIONED, version=(1, 99)))).shape == (BYTES,)


@pytest.mark.parametrize("flags, refused", [(0, False), (1, True), (2, True), (3, True), (4, False)])
def test_read_only_arrays_are_refused_as_outputs(flags, refused):
    made = Made(np.full((1, BYTES), 7, np.uint8), name=VERSIONED, flags=flags)
    if refused:
        with pytest.raises(GradCodecError) as error:
            gradcodec.pack_chunks_into(TRUTH, Exporter(made))
        assert error.value.status == 5 and (made.array == 7).all()
        del error  # its traceback has all the frames of the call
    else:
        gradcodec.pack_chunks_into(TRUTH, Exporter(made))
        np.testing.assert_array_equal(made.array, chunk_rows(TRUTH, 1))
    assert made.releases == [1]
    source = Made(TRUTH, name=VERSIONED, flags=flags)
    assert gradcodec.pack_bits(Exporter(source)).shape == (BYTES,)


def test_an_array_of_jax_is_no_destination():
    jax = pytest.importorskip("jax")
    values, codec = np.arange(48, dtype="f4"), gradcodec.codec("int8", [48], error="none")
    payload, cpu = np.empty(codec.payload_bytes, "u1"), jax.devices("cpu")[0]
    codec.encode([jax.device_put(values, cpu)], payload)
    for made, write in [
        (np.zeros(48, "f4"), lambda array: codec.decode(payload, [array])),
        (np.zeros(6, "u1"), lambda array: gradcodec.pack_bits_into(values > 3, array)),
        (np.zeros(48, "f4"), lambda array: gradcodec.copy_into(values, array)),
        (np.zeros(codec.payload_bytes, "u1"), lambda array: codec.encode([values], array)),
    ]:
        array = jax.device_put(made, cpu)
        with pytest.raises(GradCodecError, match="an array of JAX, which must not change") as error:
            write(array)
        assert error.value.status == 5 and not np.asarray(array).any()


@pytest.mark.parametrize("several", [1, 4])
def test_a_tensor_that_autograd_has_saved_counts_as_changed_once_it_is_written_to(several):
    torch = pytest.importorskip("torch")
    codec = gradcodec.codec("int8", [48] * several, error="none")
    payload = torch.empty(codec.payload_bytes, dtype=torch.uint8)
    tensors = [torch.ones(48) for _ in range(several)]
    weight = torch.ones(48, requires_grad=True)

    def loss():
        return sum((weight * tensor).sum() for tensor in tensors)

    with_old = loss()
    codec.encode(tensors, payload)
    with_old.backward()  # encode() only reads the tensors
    for write in (
        lambda: codec.decode(payload, tensors),
        lambda: gradcodec.copy_into(np.zeros(48, "f4"), tensors[0]),
        lambda: gradcodec.group(1)[0].allreduce("int8", [48] * several).run(tensors),
    ):
        with_old = loss()
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            with_old.backward()
        loss().backward()
    with torch.inference_mode():  # its tensors have no version
        codec.decode(payload, [torch.empty(48) for _ in range(several)])


# --- errors -----------------------------------------------------------------------------------------------------------


ROWS = np.zeros((1, BYTES), np.uint8)


def sums(g):
    """Returns a kernel that is never compiled here: its calls are refused before."""
    return g.reduction("T x", "T y", "x", "a + b", "y = a", "0")


def shared(g):
    near, far = socket.socketpair()
    with near, far:
        return g.share_send(TRUTH, near.fileno(), 0, 1000)


@pytest.mark.parametrize("call, kind, words", [
    (lambda g: g.pack_signs(np.float32(3), 1), TypeError, "src: an array .* expected, got float32 .*; numpy.asarray"),
    (lambda g: g.unpack_signs_into(ROWS, VALUES.copy(), 0.5), TypeError, "scales: an array .* got float 0.5"),
    (lambda g: g.unpack_chunks(None, 8), TypeError, "chunks: a sequence of arrays expected, got None"),
    (lambda g: g.unpack_chunks([ROWS[0], 7], 8), TypeError, r"chunks\[1\]: an array .* got int 7"),
    (lambda g: g.unpack_chunks(g.pack_bits(TRUTH), 8), TypeError, "chunks: a sequence of arrays expected, got Tensor"),
    (lambda g: g.pack_chunks(TRUTH, -1), ValueError, "n_chunks: at least 0 expected, got -1"),
    (lambda g: g.pack_signs(VALUES, 4.0), TypeError, "n_chunks: a whole number expected, got float 4.0"),
    (lambda g: g.chunk_bytes(2**63, 1), ValueError, "n_elements: at most 9223372036854775807 expected"),
    (lambda g: g.pack_bits(TRUTH, 2**31), ValueError, "axis: at most 2147483647"),
    (lambda g: g.pack_bits(TRUTH, order="little"), TypeError, "order: BIG or LITTLE expected, got str 'little'"),
    (lambda g: g.unpack_signs([ROWS[0]], 8, "float"), ValueError, "dtype: one of int8, .* expected, got str 'float'"),
    (lambda g: g.tensor_empty(7, "int8"), TypeError, "shape: a sequence of whole numbers expected, got int 7"),
    (lambda g: g.tensor_empty([7, 0.5], "int8"), TypeError, r"shape\[1\]: a whole number expected, got float 0.5"),
    (lambda g: g.pack_signs_into(VALUES, ROWS, stream="main"), TypeError, "stream: None, a number, .* got str 'main'"),
    (lambda g: g.vote_signs_into(ROWS, ROWS[0], -1), ValueError, "turn: at least 0 expected, got -1"),
    (lambda g: g.codec(1, 1000), TypeError, "segments: a sequence of whole numbers expected, got int 1000"),
    (lambda g: g.codec(1, [1000], nonfinit=1), TypeError, "unexpected keyword argument 'nonfinit'"),
    (lambda g: g.codec(1, [8]).encode([None, 3], ROWS), TypeError, "values: an array .* got int 3"),
    (lambda g: g.codec(1, [8], server=2**64), ValueError, f"server: at most {2**64 - 1} expected, got {2**64}"),
    (lambda g: g.codec(1, [8], beta="0.9"), TypeError, "beta: a number expected, got str '0.9'"),
    (lambda g: g.codec(1, [8], beta=-1e39), OverflowError, r"beta: at most 3.4e38, .* got -1e\+39"),
    (lambda g: g.pack_signs_into(VALUES, ROWS, stream=2**64), ValueError, "stream: at most 18446744073709551615"),
    (lambda g: g.pack_signs_into(VALUES, ROWS, stream=True), TypeError, "stream: None, a number, .* got bool True"),
    (lambda g: g.nccl_world("x" * 128, 0, 1, 0), TypeError, "of_all: bytes expected, got .xxx"),
    (lambda g: g.nccl_world(bytes(127), 0, 1, 0), ValueError, "of_all: the 128 bytes of nccl_id.. expected, got 127"),
    (lambda g: g.peers(0, [-8], 8, 0), ValueError, r"buffers\[0\]: at least 0 expected, got -8"),
    (lambda g: Communicator(g, 2**32, 1, None, None), ValueError, "rank: at most 2147483647 expected, got 4294967296"),
    (lambda g: g.builtin_kernels(7), TypeError, "family: a str expected, got int 7"),
    (lambda g: g.elementwise("T x", "T y", "y = x;\0 + 1"), ValueError, "operation: a str without NUL expected, .* at 6"),
    (lambda g: g.elementwise("T x", "T y", "y = x", options="-DX"), TypeError, "options: a sequence of str expected"),
    (lambda g: g.elementwise("T x", "T y", "y = x", options=[7]), TypeError, r"options\[0\]: a str expected, got int"),
    (lambda g: g.elementwise("T x", "T y", "y = x", flags=2**32), ValueError, "flags: at most 4294967295 expected"),
    (lambda g: sums(g)([2**64], [ROWS]), OverflowError, "18446744073709551616 is neither an int64 nor a uint64"),
    (lambda g: sums(g)([VALUES], [ROWS], axes=2**32), ValueError, "axes: at most 2147483647 expected, got 4294967296"),
    (lambda g: sums(g)([VALUES], [ROWS], axes=[0, 2**32]), ValueError, r"axes\[1\]: at most 2147483647 expected"),
    (lambda g: sums(g).prepare([VALUES], [ROWS], size=2**63), ValueError, "size: at most 9223372036854775807"),
    (lambda g: sums(g).prepare([VALUES], [ROWS], capability=2**32 + 90), ValueError, "capability: at most 2147483647"),
    (lambda g: shared(g).wait(2**32), ValueError, "timeout_ms: at most 2147483647 expected, got 4294967296"),
    (lambda g: shared(g).wait(-(2**32)), ValueError, "timeout_ms: at least -2147483648 expected, got -4294967296"),
])  # fmt: skip
def test_a_wrong_argument_is_named(call, kind, words):
    with pytest.raises(kind, match=words):
        call(gradcodec)


def test_integers_and_dtypes_of_numpy_are_accepted():
    assert gradcodec.chunk_bytes(np.int64(1000), np.uint8(4)) == 32
    assert len(gradcodec.pack_chunks(TRUTH, np.int32(3))) == 3
    for dtype in np.float32, np.dtype("float32"), "float32":
        assert gradcodec.tensor_empty(np.array([2, 3]), dtype).dtype == "float32"
    codec = gradcodec.codec(np.int32(1), np.array([8]), n_chunks=np.uint8(2), server=np.int64(1), beta=np.float32(0.5))
    assert codec.n_chunks == 2 and len(gradcodec.group(np.int64(2))) == 2
    with pytest.raises(GradCodecError, match="lease: the receiver ended"):  # the library's error: it got the number
        shared(gradcodec).wait(np.int16(0))
    packed = gradcodec.pack_bits(TRUTH, None)  # None, as in numpy.packbits
    assert np.array_equal(np.asarray(gradcodec.unpack_bits(packed, None, None)), TRUTH.ravel())


def test_a_tensor_describes_itself():
    tensor = gradcodec.tensor_empty((3, 5), "bfloat16")
    assert repr(tensor) == "Tensor(shape=(3, 5), dtype='bfloat16', device=(1, 0))" and len(tensor) == 3
    with pytest.raises(TypeError, match="no len"):
        len(gradcodec.tensor_empty((), "int8"))
    assert repr(gradcodec).endswith(f"version {gradcodec.version}")


def test_a_tensor_converts_to_a_numpy_array():
    rows = gradcodec.pack_chunks(TRUTH, 3)
    np.testing.assert_array_equal(np.stack(rows), chunk_rows(TRUTH, 3))
    lent = Lent(np.arange(4.0))
    tensor = lent.tensor()
    array = np.asarray(tensor)
    assert array.dtype == float and array.ctypes.data == lent.array.ctypes.data
    assert np.asarray(tensor).ctypes.data == array.ctypes.data  # again
    assert np.asarray(tensor, np.float32).tolist() == [0, 1, 2, 3]
    assert np.array(tensor).ctypes.data != array.ctypes.data
    with pytest.raises(BufferError):
        np.from_dlpack(tensor)  # it has been taken
    del tensor
    gc.collect()
    assert lent.releases == [] and array.tolist() == [0, 1, 2, 3]
    del array
    gc.collect()
    assert lent.releases == [42]
    with pytest.raises((BufferError, RuntimeError)):
        np.asarray(gradcodec.tensor_empty((3,), "bfloat16"))  # no array of objects


def test_a_tensor_of_a_gpu_names_frameworks_that_can_import_it():
    tensor = gradcodec.tensor_empty((3,), "int8")
    tensor.device = CUDA, 0
    with pytest.raises(TypeError, match="cupy.from_dlpack"):
        np.asarray(tensor)


def test_every_public_method_has_a_docstring():
    types = [thing for thing in vars(client).values() if isinstance(thing, type)]
    ours = [one for one in types if one.__module__ == "gradcodec" and not one.__name__.startswith("_")]
    classes = [thing for thing in ours if not issubclass(thing, ctypes.Structure)]
    methods = [(owner, name, member) for owner in classes for name, member in vars(owner).items()
               if not name.startswith("_") and (callable(member) or isinstance(member, property))]  # fmt: skip
    assert len(methods) > 50
    # The methods of a Kernel take the arguments that its call documents.
    silent = [f"{owner.__name__}.{name}" for owner, name, member in methods if not member.__doc__]
    assert {name for name in silent if not name.startswith("Kernel.")} == set()
