"""Tests of python/gradcodec: owners of memory and their release, statuses by name, and messages of limited length."""

import copy
import gc
import inspect
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import gradcodec
from capi import in_threads
from gradcodec import GradCodec, GradCodecError, Status

ROOT = Path(__file__).resolve().parents[2]
library = GradCodec(os.environ["GRADCODEC_LIBRARY"])
VALUES = np.ones(8, "f4")


def aligned(count):
    memory = np.zeros(count + 16, "u1")
    return memory[-memory.ctypes.data % 16 :][:count]


def shared():
    near, far = socket.socketpair()
    with near, far:
        return library.share_send(VALUES, near, 0, 1000)  # a socket, or its number


MADE = {
    "Codec": (lambda: library.codec("onebit", [8]), lambda c: c.encode([VALUES], aligned(c.payload_bytes))),
    "Communicator": (lambda: library.group(1)[0], lambda c: c.async_error()),
    "AllReduce": (lambda: library.group(1)[0].allreduce("int8", [8]), lambda r: r.run([VALUES.copy()])),
    "Share": (shared, lambda s: s.wait(0)),
    "Kernel": (lambda: library.elementwise("T x", "T y", "y = x"), lambda k: k.log()),
    "Tensor": (lambda: library.tensor_empty((8,), "float32"), np.asarray),
}


@pytest.mark.parametrize("name", [name for name in MADE if name != "Tensor"])
def test_owners_cannot_be_copied(name):
    made = MADE[name][0]()
    for call in copy.copy, copy.deepcopy, pickle.dumps:
        with pytest.raises(TypeError, match=f"^{name} cannot be copied or pickled"):
            call(made)
    made.close()


@pytest.mark.parametrize("name", MADE)
def test_close_releases_once_and_later_calls_are_refused(name):
    make, use = MADE[name]
    made = make()
    made.close()
    made.close()
    for call in (lambda: use(made), made.__enter__):
        with pytest.raises(ValueError, match=f"^{name} is closed$"):
            call()
    with make() as within:
        assert type(within).__name__ == name
    with pytest.raises(ValueError, match="is closed"):
        use(within)
    with pytest.raises(ZeroDivisionError):
        with make() as failed:
            1 / 0
    with pytest.raises(ValueError, match="is closed"):
        use(failed)
    if name != "Tensor":
        made.__del__()  # aborts nothing, and neither does the second one


def test_every_method_of_a_closed_object_is_refused():
    codec, reduce = library.codec(1, [8]), library.group(1)[0].allreduce(1, [8])
    comm, kernel = library.group(1)[0], library.elementwise("T x", "T y", "y = x")
    closed = [codec, reduce, comm, kernel]
    for each in closed:
        each.close()
    flags = np.zeros(1, "u4")
    for call in (
        lambda: codec.decode(VALUES, [VALUES]), lambda: codec.reduce(0, VALUES, VALUES), codec.commit, codec.rollback,
        codec.reset, lambda: codec.flags(flags), codec.errors_out, codec.errors_in, lambda: codec.scales(VALUES),
        lambda: codec.state_out(VALUES), lambda: codec.state_in(VALUES), reduce.commit, reduce.rollback,
        lambda: reduce.reduce_scatter([VALUES], VALUES), lambda: reduce.all_gather(VALUES, [VALUES]),
        comm.async_error, lambda: comm.allreduce(1, [8]), lambda: library.open_peers(comm, 0, 8),
        lambda: library.hierarchical(comm, None), lambda: library.hierarchical(library.group(1)[0], comm),
        lambda: kernel([VALUES], [VALUES]), lambda: kernel.prepare([VALUES], [VALUES]),
        lambda: kernel.workspace_bytes([VALUES], [VALUES]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="is closed"):
            call()


def test_an_all_reduce_works_after_its_communicator_is_closed():
    comm = library.communicator(0, 1, lambda s, r: r.__setitem__(slice(None), s), lambda s, r: r.__setitem__(slice(None), s))
    reduce = comm.allreduce("onebit", [8])
    comm.close()
    gc.collect()
    values = np.full(8, -3, "f4")
    reduce.run([values])
    assert values.tolist() == [-3] * 8


def test_an_exported_tensor_outlives_its_close():
    tensor = library.pack_bits(np.ones(64, bool))
    array = np.from_dlpack(tensor)
    with pytest.raises(BufferError, match="was taken before"):
        np.from_dlpack(tensor)
    tensor.close()
    gc.collect()
    assert array.tolist() == [255] * 8
    with pytest.raises(ValueError, match="Tensor is closed"):
        np.from_dlpack(tensor)
    with pytest.raises(ValueError, match="Tensor is closed"):
        library.unpack_bits(tensor)
    assert tensor.shape == (8,)


def test_an_object_in_use_is_not_closed():
    """Closes within a function of the transport, which runs in a call on the communicator and an all-reduce."""
    found, made = [], []

    def exchange(send, receive):
        for each in made:
            with pytest.raises(GradCodecError, match="is in use by a call") as error:
                each.close()
            found.append(error.value.status)
        receive[:] = send

    comm = library.communicator(0, 1, exchange, exchange)
    made.append(comm)
    comm.allreduce("onebit", [8]).run([VALUES.copy()])
    made.clear()
    assert set(found) <= {Status.BUSY}
    comm.close()


def test_threads_that_close_at_the_same_time_release_once():
    for _ in range(200):
        codec, barrier = library.codec(1, [8]), threading.Barrier(4)
        in_threads(4, lambda _: (barrier.wait(), codec.close()))


def test_the_interpreter_may_end_with_open_objects():
    program = f"""
import sys
sys.path[:0] = [{str(ROOT / "python")!r}, {str(ROOT / "tests" / "python")!r}]
import test_owned
kept = [make() for make, _ in test_owned.MADE.values()]
class Cycle: pass
cycle = Cycle(); cycle.itself, cycle.kept = cycle, [make() for make, _ in test_owned.MADE.values()]
print("done")
"""
    child = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True)
    assert (child.returncode, child.stdout, child.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("function", [gradcodec.GradCodec.codec, gradcodec.Communicator.allreduce])
def test_a_codecs_docstring_lists_every_keyword(function):
    keywords = {name for name, one in inspect.signature(function).parameters.items() if one.kind == one.KEYWORD_ONLY}
    table = re.findall(r"^        (\w+(?:, \w+)*)  ", gradcodec.Codec.__doc__, re.M)
    assert {name for names in table for name in names.split(", ")} == keywords


# --- statuses ---------------------------------------------------------------------------------------------------------


def test_statuses_match_the_header():
    header = (ROOT / "include" / "gradcodec.h").read_text()
    found = {name: int(value) for name, value in re.findall(r"\bGC_STATUS_(\w+) = (\d+)", header)}
    assert {status.name: status.value for status in Status} == found
    assert gradcodec.__version__ == library.version and "__version__" in gradcodec.__all__
    assert [name for name in gradcodec.__all__ if not hasattr(gradcodec, name)] == []


def test_an_error_names_its_status():
    with pytest.raises(GradCodecError, match=r"^n_elements: .*-1.* \(INVALID_ARGUMENT\)$") as error:
        library.chunk_bytes(-1, 1)
    assert error.value.status is Status.INVALID_ARGUMENT == 1
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.status, str(again)) == (error.value.status, str(error.value))
    assert again.status is Status.INVALID_ARGUMENT
    unknown = GradCodecError("of a later version", 77)
    assert unknown.status == 77 and not isinstance(unknown.status, Status) and str(unknown) == "of a later version"


# --- messages ---------------------------------------------------------------------------------------------------------


class Wordy:
    def __repr__(self):
        return "word " * 10**6


MANY, LONG = [1.0] * 10**6, "x" * 10**6


@pytest.mark.parametrize("call, words", [
    (lambda: library.pack_signs(MANY, 2), "src: an array .* got list of 1000000"),
    (lambda: library.pack_signs([MANY], 2), "got list "),
    (lambda: library.pack_signs(dict.fromkeys(MANY), 2), "got dict "),
    (lambda: library.codec(1, [8]).encode([VALUES], LONG.encode()), "payload: .* got b'xxx.*bytes of 1000000"),
    (lambda: library.codec(1, [8]).encode([VALUES], Wordy()), "payload: .* got Wordy"),
    (lambda: library.codec(LONG, [8]), "codec: .* got 'xxx.*str of 1000000"),
    (lambda: library.codec(1, [8], error=MANY), "error: .* got list of 1000000"),
    (lambda: library.codec(1, [8], values=LONG), "dtype: .* got 'xxx"),
    (lambda: library.codec(1, [8], device=LONG), "device: .* got 'xxx"),
    (lambda: library.codec(1, [10**10000]), "most 9223372036854775807 expected, got a number of 33220 bits"),
    (lambda: library.codec(1, [8], beta=LONG), "beta: .* got 'xxx"),
    (lambda: library.pack_signs_into(VALUES, np.zeros((1, 1), "u1"), stream=MANY), "stream: .* got list of 1000000"),
    (lambda: library.elementwise(LONG, LONG, LONG), "inputs"),
    (lambda: library.elementwise("T x", "T y", "y = x")([10**10000], [VALUES]), "a number of 33220 bits"),
    (lambda: library.builtin_kernels(LONG), "family"),
    (lambda: library.tensor_empty(LONG, "int8"), "got str 'x'"),
    (lambda: library.share_send(VALUES, LONG), "socket: .* got 'xxx"),
    (lambda: GradCodec("/" + LONG), "path names"),
])  # fmt: skip
def test_no_message_is_longer_than_500_characters(call, words):
    with pytest.raises((TypeError, ValueError, OverflowError, GradCodecError, OSError), match=words) as error:
        call()
    assert len(str(error.value)) <= 500
