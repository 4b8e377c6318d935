"""Tests of python/gradcodec: its search for a library that is not named, names of options, exceptions, signals."""

import ctypes
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import gradcodec as gradcodec_of_module
from gradcodec import ONEBIT, SIGN, GradCodec, _comms
from gradcodec._abi import Device

LIBRARY = os.environ["GRADCODEC_LIBRARY"]
CLIENT = Path(__file__).resolve().parents[2] / "python" / "gradcodec"

NAME = "libgradcodec-of-a-test.so.0"  # no machine has this library installed


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Returns a copy of the client in a prefix of its own, with a home and a Python that have no library."""
    monkeypatch.delenv("GRADCODEC_LIBRARY")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "python"))
    copy = tmp_path / "installed" / "share" / "gradcodec" / "python" / "gradcodec"
    shutil.copytree(CLIENT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    spec = importlib.util.spec_from_file_location(tmp_path.name, copy / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module._lib, "NAME", NAME)
    return module


@pytest.mark.parametrize("prefix", ["installed", "installed/share/gradcodec", "python", "home/.local"])
def test_the_library_is_found_in_its_prefixes(client, tmp_path, prefix):
    place = tmp_path / prefix / "lib" / NAME
    place.parent.mkdir(parents=True)
    shutil.copy(LIBRARY, place)
    gradcodec = client.GradCodec()
    assert gradcodec.lib._name == str(place) and gradcodec.chunk_bytes(1000, 4) == 32


@pytest.mark.parametrize("folder", ["gradcodec", "gradcodec/lib", "../target/release", "../target/fast", "../lib", "../../../lib"])
def test_the_library_beside_the_package_is_found_first(client, tmp_path, folder):
    """Tests the wheel, the sources, the tree of `make dist` and a prefix, with another library installed."""
    python = tmp_path / "installed" / "share" / "gradcodec" / "python"
    place, other = (python / folder).resolve() / NAME, tmp_path / "python" / "lib" / NAME
    for path in place, other:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(LIBRARY, path)
    assert client.GradCodec().lib._name == str(place)


def test_a_missing_library_error_names_the_variable(client, tmp_path, monkeypatch):
    missing = str(tmp_path / "missing.so")
    with pytest.raises(OSError, match="path names .*missing.so.*cannot open"):
        client.GradCodec(missing)
    monkeypatch.setenv("GRADCODEC_LIBRARY", missing)
    with pytest.raises(OSError, match="GRADCODEC_LIBRARY names .*missing.so.*cannot open"):
        client.GradCodec()


def test_another_library_is_refused(client):
    with pytest.raises(OSError, match="no function gc_"):
        client.GradCodec("libc.so.6")


def test_the_error_lists_the_searched_folders_and_a_remedy(client, tmp_path):
    with pytest.raises(OSError) as raised:
        client.GradCodec()
    sought = [str(tmp_path / prefix / "lib" / NAME) for prefix in ("installed", "python", "home/.local")]
    for words in (NAME, *sought, str(tmp_path / "installed" / "share/gradcodec/python/gradcodec" / NAME), f"/usr/local/lib/{NAME}", "make install PREFIX=$HOME/.local", "GRADCODEC_LIBRARY"):
        assert words in str(raised.value)


def test_a_file_that_is_no_library_is_an_error(client, tmp_path):
    place = tmp_path / "installed" / "lib" / NAME
    place.parent.mkdir(parents=True)
    place.write_text("not a library")
    with pytest.raises(OSError, match=str(place)):
        client.GradCodec()


@pytest.fixture
def gradcodec():
    return GradCodec(LIBRARY)


def aligned(count, dtype=np.uint8):
    """Returns an array aligned to 16 bytes, as payloads, states and workspaces are."""
    memory = np.zeros(count * np.dtype(dtype).itemsize + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + count * np.dtype(dtype).itemsize].view(dtype)


@pytest.mark.parametrize("kind", ("bf16", "mxfp8", "int8", "int4", "mxfp4"))
def test_a_block_codec_is_made_by_names(gradcodec, kind):
    options = dict(error="none", nonfinite="zero", reduction="sum", raw=[False, np.True_], device="cpu", server=1)
    codec = gradcodec.codec(kind, [5, 2], **options)
    payload, values = aligned(codec.payload_bytes), [np.zeros(5, "f4"), np.zeros(2, "f4")]
    given = [np.array([1, -1, 0.5, 0, np.nan], "f4"), np.array([np.pi, 1e-45], "f4")]
    codec.encode(given, payload)
    both, reduced = np.stack([payload, payload]), aligned(payload.size)
    codec.reduce(0, both, reduced)
    codec.decode(reduced, values)
    assert np.abs(values[0] - [2, -2, 1, 0, 0]).max() <= 2 / 13 and (values[1] == 2 * given[1]).all()
    assert codec.state_bytes == 256
    with pytest.raises(RuntimeError, match=f"GC_CODEC_{kind.upper()}"):
        codec.scales(np.zeros(2, "f4"))


@pytest.mark.parametrize(
    "options, kind, words",
    [
        (dict(codec="int2"), ValueError, "codec: one of 'onebit', .* expected, got str 'int2'"),
        (dict(reduction=1), TypeError, "reduction: one of 'mean', 'sum' expected, got int 1"),
        (dict(reduction="max"), ValueError, "reduction: "),
        (dict(error="float16"), ValueError, "error: one of 'float32', 'bfloat16', 'none'"),
        (dict(nonfinite="nan"), ValueError, "nonfinite: one of 'propagate'"),
        (dict(raw=[0]), TypeError, r"raw\[0\]: a bool expected, got int 0"),
        (dict(raw=True), TypeError, "raw: a sequence of bools expected"),
        (dict(raw=[True, False]), ValueError, "raw: 1 bools expected, one for each segment, got 2"),
        (dict(device="gpu"), ValueError, "device: 'cpu' or one as 'cuda:0' expected"),
        (dict(device="cuda:-1"), ValueError, "device: "),
        (dict(codec="onebit", raw=[False]), RuntimeError, "options: raw, and GC_CODEC_ONEBIT"),
        (dict(codec=SIGN, reduction="sum"), RuntimeError, "options: reduction 1, and GC_CODEC_SIGN"),
        (dict(kind="int8"), TypeError, "kind"),
        (dict(codec=5, scale=1), RuntimeError, "options: scale 1, and GC_CODEC_INT8"),
    ],
)
def test_unknown_names_are_refused(gradcodec, options, kind, words):
    with pytest.raises(kind, match=words):
        gradcodec.codec(options.pop("codec", "int8"), [3], **options)


def in_threads(functions):
    """Returns the results of functions, each called in a thread of its own; an exception is a result, too."""
    with ThreadPoolExecutor(len(functions)) as threads:
        calls = [threads.submit(function) for function in functions]
    return [call.exception() or call.result() for call in calls]


class Engine:
    """Two ranks that exchange through lists."""

    def __init__(self):
        self.barrier, self.sent = threading.Barrier(2), [None, None]

    def functions(self, rank):
        def exchange(send, receive, first):
            self.sent[rank] = bytes(send)
            self.barrier.wait()
            half = len(receive) // 2
            for other in (0, 1):
                receive[other * half : (other + 1) * half] = self.sent[other][first * half : first * half + half]
            self.barrier.wait()

        return lambda s, r: exchange(s, r, rank), lambda s, r: exchange(s, r, 0)


def test_an_exception_of_an_engine_is_the_cause(gradcodec):
    def broken(send, receive):
        raise ConnectionError("the network is gone")

    comm = gradcodec.communicator(0, 2, broken, broken)
    for call in (
        lambda: comm.allreduce(ONEBIT, [8]),
        lambda: gradcodec.hierarchical(gradcodec.group(1)[0], comm), lambda: gradcodec.open_peers(comm, 0, 8),
    ):
        with pytest.raises(RuntimeError, match="returned 1") as raised:
            call()
        assert isinstance(raised.value.__cause__, ConnectionError) and raised.value.status == 31
    with pytest.raises(RuntimeError, match="world_size: 0"):
        gradcodec.group(0)


def test_a_later_exception_of_an_engine_is_the_cause_on_two_levels(gradcodec):
    """Uses two nodes of one rank, in threads. The transport between them breaks when the handles are made."""
    engine, broken = Engine(), []

    def breakable(exchange):
        def function(send, receive):
            if broken:
                raise ConnectionError("the network is gone")
            exchange(send, receive)

        return function

    between = [gradcodec.communicator(rank, 2, *map(breakable, engine.functions(rank))) for rank in (0, 1)]
    two = in_threads([lambda r=r: gradcodec.hierarchical(gradcodec.group(1)[0], between[r]) for r in (0, 1)])
    del between
    handles = in_threads([lambda r=r: two[r].allreduce(ONEBIT, [16]) for r in (0, 1)])
    reduce = [lambda r=r: handles[r].run([np.zeros(16, "f4")]) for r in (0, 1)]
    assert in_threads(reduce) == [None, None]
    broken.append(True)
    failures = in_threads(reduce)
    assert [type(failure.__cause__) for failure in failures] == [ConnectionError] * 2, failures


def test_refusals_of_the_client_say_what_to_do(gradcodec):
    codec, payload = gradcodec.codec("int8", [48], error="none"), np.zeros(128, "u1")
    for call, kind, words in [
        (lambda: gradcodec.codec("int-8", [3]), ValueError, "got str 'int-8'; did you mean 'int8'"),
        (lambda: gradcodec.codec("Onebit", [3]), ValueError, "did you mean 'onebit'"),
        (lambda: gradcodec.codec("zip", [3]), ValueError, "got str 'zip'$"),
        (lambda: codec.encode(np.zeros(48, "f4"), payload), TypeError, "a sequence of arrays .* put it in a list"),
        (lambda: codec.decode(bytes(64), [np.zeros(48, "f4")]), TypeError, "numpy.frombuffer.* makes one"),
        (lambda: gradcodec.hierarchical(5, None), TypeError, "intra_node: a Communicator expected, got int 5"),
        (lambda: gradcodec.hierarchical(gradcodec.group(1)[0], [1]), TypeError, "inter_node: a Communicator expected"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=words):
            call()


def test_the_package_run_as_a_program_prints_data_for_a_bug_report():
    environment = {**os.environ, "GRADCODEC_LIBRARY": LIBRARY, "PYTHONPATH": str(CLIENT.parent)}
    run = subprocess.run([sys.executable, "-m", "gradcodec"], env=environment, capture_output=True, text=True, check=True)
    assert LIBRARY in run.stdout and GradCodec(LIBRARY).version in run.stdout and "commit" in run.stdout


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_base_exception_is_raised_unchanged_and_ends_the_communicator(gradcodec, kind):
    def interrupted(send, receive):
        raise kind("from a handler")

    comm = gradcodec.communicator(0, 2, interrupted, interrupted)
    with pytest.raises(kind, match="from a handler"):
        comm.allreduce(ONEBIT, [8])
    with pytest.raises(RuntimeError, match="interrupted before|returned 1"):
        comm.allreduce(ONEBIT, [8])


def test_a_signal_during_a_call_is_raised_and_corrupts_no_result(gradcodec):
    class Interrupt(BaseException):
        pass

    armed, sent, raised, values = [], 0, 0, np.zeros(100_000, "f4")

    def handle(*_):
        nonlocal sent
        if armed:
            armed.clear()
            sent += 1
            raise Interrupt

    def made():
        """Returns the handle of rank 0 of 2. Once both ranks have handles, it gathers its own values twice."""
        engine, are_made = Engine(), []

        def gather(send, receive):
            if not are_made:
                return engine.functions(0)[1](send, receive)
            receive[: len(send)], receive[len(send) :] = send, send

        functions = (print, gather), engine.functions(1)
        comms = [gradcodec.communicator(rank, 2, *functions[rank]) for rank in (0, 1)]
        handles = in_threads([lambda comm=comm: comm.allreduce("int8", [len(values)], error="none") for comm in comms])
        are_made.append(True)
        return handles[0]

    outer, reduce = signal.signal(signal.SIGALRM, handle), made()
    try:
        for step in range(1, 401):
            values[:] = step
            try:
                armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4))
                reduce.run([values])
                armed.clear()
            except Interrupt:
                raised, reduce = raised + 1, made()
            else:
                assert (values == step).all(), (step, values)
            assert raised == sent, step
    finally:
        armed.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer)
    assert raised > 40, raised


@pytest.mark.skipif("GRADCODEC_DRIVERS" not in os.environ, reason="wants an NVRTC without a compiler")
def test_a_kernel_is_prepared(gradcodec, monkeypatch):
    """Prepares for a GPU that is not here, by an NVRTC that compiles nothing, which GRADCODEC_NVRTC names."""
    nvrtc = Path(os.environ["GRADCODEC_DRIVERS"]) / "fake_nvrtc" / "libnvrtc.so.12"
    monkeypatch.setenv("GRADCODEC_NVRTC", str(nvrtc))
    monkeypatch.setenv("GRADCODEC_CACHE", "0")
    monkeypatch.setenv("FAKE_NVRTC_SAYS", "step(1): warning: odd")
    x, y = np.zeros((2, 3), "f4"), np.zeros((2, 3), "f4")
    step = gradcodec.elementwise("T g, T lr", "T w", "w -= lr * g", "step", options=["-DX"])
    assert step.log() == ""
    step.prepare([x, 0.5], [y], capability=90)
    step.prepare([x, np.int64(2)], [y], capability=90)
    assert step.log() == "step(1): warning: odd"
    monkeypatch.setenv("FAKE_NVRTC_FAILURES", "nvrtcCompileProgram=6")
    step.prepare([x, 0.5], [y], capability=90)  # was compiled before
    with pytest.raises(RuntimeError) as raised:
        step.prepare([x, 0.5], [y], capability=80)  # yet to be compiled
    assert raised.value.status == 26, raised.value

    sums = gradcodec.reduction("T x", "T y", "x", "a + b", "y = a", "0", preamble="int q;")
    many, y = np.zeros((2, 1 << 20), "f4"), np.zeros((2, 1), "f4")
    assert sums.workspace_bytes([many], [y], axes=-1, keepdims=True, capability=90) > 0
    of_numpy = {"axes": np.int8(-1), "keepdims": np.True_, "capability": np.uint8(90)}
    assert sums.workspace_bytes([many], [y], **of_numpy) > 0
    assert sums.workspace_bytes([many[:, :9]], [y], axes=(1,), keepdims=True, capability=90) == 0
    with pytest.raises(RuntimeError, match="axes"):
        sums.workspace_bytes([many], [y], axes=2, capability=90)


# --- one tensor in one call

CODECS = "onebit", "sign", "bf16", "mxfp8", "int8", "int4", "mxfp4"


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_is_an_array_of_numpy_and_any_bytes_are_decoded(codec):
    values = np.array([[1, -1, 0.5], [0.25, -0.5, 1]], "f4")
    payload = gradcodec_of_module.encode(values.T, codec)
    assert type(payload) is np.ndarray and payload.dtype == np.uint8 and payload[:4].tobytes() == b"GCPL"
    shifted = np.concatenate([np.zeros(3, np.uint8), payload])[3:]
    room = bytearray(payload.tobytes())
    read_only = np.frombuffer(payload.tobytes(), np.uint8)
    expected = gradcodec_of_module.decode(payload)
    assert type(expected) is np.ndarray and expected.dtype == np.float32 and expected.shape == (6,)
    if codec not in ("onebit", "sign"):
        assert np.abs(expected - values.T.reshape(-1)).max() <= 1 / 12
    for same in (shifted, payload.tobytes(), room, memoryview(room), memoryview(payload.tobytes()), memoryview(payload),
                 memoryview(room).cast("B", [2, len(room) // 2]), read_only):  # fmt: skip
        assert np.array_equal(gradcodec_of_module.decode(same), expected), type(same)
    room.append(0)  # fails if something still holds the buffer
    assert gradcodec_of_module.decode(payload, "float16").dtype == np.float16
    tensor = gradcodec_of_module.decode(payload, "bfloat16")  # NumPy has no bfloat16
    assert (tensor.dtype, tensor.shape) == ("bfloat16", (6,))


def test_invalid_payloads_raise_their_status():
    payload = gradcodec_of_module.encode(np.ones(40, "f4"))
    for damaged in (b"", b"GCPL", payload.tobytes()[:-1], payload.tobytes() + b"0", bytes(200), payload[::-1].copy()):
        with pytest.raises(gradcodec_of_module.GradCodecError, match="^payload: ") as refused:
            gradcodec_of_module.decode(damaged)
        assert refused.value.status == gradcodec_of_module.Status.CORRUPT
    with pytest.raises(ValueError, match="payload: bytes in one piece expected"):
        gradcodec_of_module.decode(memoryview(payload)[::2])
    with pytest.raises(gradcodec_of_module.GradCodecError, match="payload: C-contiguous"):
        gradcodec_of_module.decode(payload[::2])
    with pytest.raises(TypeError, match="payload: an array"):
        gradcodec_of_module.decode("GCPL")
    with pytest.raises(ValueError, match="codec: one of 'onebit'"):
        gradcodec_of_module.encode(np.ones(4, "f4"), "int2")
    with pytest.raises(TypeError, match="values: an array"):
        gradcodec_of_module.encode([1.0, 2.0])
    with pytest.raises(ValueError, match="dtype: one of"):
        gradcodec_of_module.decode(payload, "float7")
    with pytest.raises(gradcodec_of_module.GradCodecError, match="dtype: "):
        gradcodec_of_module.decode(payload, "float64")


def test_communicators_and_all_reduces_describe_themselves(gradcodec):
    comms = gradcodec.group(2)
    assert [(comm.rank, comm.world_size) for comm in comms] == [(0, 2), (1, 2)]
    one, other = in_threads([lambda comm=comm: comm.allreduce("int8", [100, 0, 7], raw=[False] * 2 + [True]) for comm in comms])
    payload = gradcodec.codec("int8", [100, 0, 7], raw=[False] * 2 + [True], n_chunks=2).payload_bytes
    assert (one.sent_bytes, one.sent_between_nodes, one.exchanges) == (payload, None, 2)
    assert one.parts(0) == other.parts(0) == [(0, 0, 64), (2, 0, 4)]
    assert one.parts(1, "shard") == [(0, 64, 36), (2, 4, 3)] and one.parts(1, "worker") == [(0, 0, 100), (2, 0, 7)]
    for rank, which, kind, words in [(2, "shard", RuntimeError, "rank: 2"), (0, "server", ValueError, "which: one of")]:
        with pytest.raises(kind, match=words):
            one.parts(rank, which)


def test_the_parts_of_an_exchange_are_valid_until_the_next():
    """A thread of gloo that released the last reference to a part would abort a program that ends meanwhile."""
    parts = []

    def perform(call):
        part = type("Part", (), {})()
        parts.append(weakref.ref(part))
        call.started.append(part)
        call.ended.append(None)

    function, room = _comms.server(perform, _comms.Raised(), resumes=True), ctypes.create_string_buffer(8)
    for alive in [True], [False, True]:
        assert function(None, ctypes.addressof(room), ctypes.addressof(room), 1, Device(1, 0), None) == 0
        assert [part() is not None for part in parts] == alive
