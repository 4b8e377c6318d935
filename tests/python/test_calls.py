"""Compares the arguments that the Python client and gradcodec.hpp give the C functions with the interface; each has
another value. The called library computes nothing and records its arguments (tests/fakes/recorder). The expected lines
were written from gradcodec.h, not from the wrappers. `t7`: the tensor with the address 7; `h1`: the first handle that
was made."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradcodec
from gradcodec import _abi as client

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-O0", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}"]


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    """Returns the recording library, under the name by which programs are linked with it."""
    folder = tmp_path_factory.mktemp("recorder")
    source = subprocess.run(
        [sys.executable, ROOT / "tests/fakes/recorder/generate.py", ROOT / "include/gradcodec.cdef.h"],
        check=True, capture_output=True,
    )  # fmt: skip
    (folder / "recorder.c").write_bytes(source.stdout)
    library = folder / "libgradcodec.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-std=c11", *FLAGS, "-shared", "-fPIC", folder / "recorder.c", "-o", library], check=True)
    return library


def test_gradcodec_hpp_passes_every_argument_in_its_place(recorder, tmp_path):
    program = tmp_path / "calls"
    link = [f"-L{recorder.parent}", "-lgradcodec", f"-Wl,-rpath,{recorder.parent}"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-std=c++20", *FLAGS, ROOT / "tests/cpp/calls.cpp", "-o", program, *link], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "calls: ok"


def test_every_function_of_gradcodec_hpp_is_tested():
    listed = set(re.findall(r"^FUNCTION\((\w+),", (ROOT / "tests/abi/functions.h").read_text(), re.M))
    # A capsule's destructor is an address; the versioned form is called in one direction only.
    left_out = {"gc_capsule_destructor", "gc_tensor_free_versioned", "gc_tensor_from_versioned"}
    told = set(re.findall(r"gc_\w+(?=\()", (ROOT / "tests/cpp/calls.cpp").read_text()))
    assert listed - told == left_out


# ---- The Python client


class Array:
    """A tensor of CUDA that a number, its address, identifies; and the stream with which it was requested."""

    def __init__(self, number):
        self.shape, self.streams = (ctypes.c_int64 * 1)(4), []
        view = client.DLTensor(number, client.Device(client.CUDA, 0), 1, client.DType(2, 32, 1), self.shape, None, 0)
        self.managed = client.Managed(view, None, None)

    def __dlpack_device__(self):
        return client.CUDA, 0

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return client._python.PyCapsule_New(ctypes.addressof(self.managed), client.LEGACY, None)


T = [Array(number) for number in range(20)]
MAX = 2**31 - 1


@pytest.fixture
def said(recorder):
    """Returns a function that makes a call, and returns a line for each C function called meanwhile."""
    library = gradcodec.GradCodec(recorder)
    library.lib.recorded.restype = ctypes.c_char_p

    def calls(call):
        library.lib.recorded()
        kept = call(library)  # released after the lines are read
        lines = library.lib.recorded().decode().splitlines()
        return kept, [line for line in lines if not line.startswith("gc_capsule_destructor")]

    return calls


def given(*arguments, **named):
    """Returns a function that calls a method of an owner with these arguments."""
    return lambda owner, method: getattr(owner, method)(*arguments, **named)


def shared(prefix):
    """Returns calls of the methods that codecs and all-reduces share."""
    calls = {
        "flags": (T[1], 7), "commit": (T[1], 7), "rollback": (7,), "reset": (7,), "errors_out": (T[1], T[2], 7),
        "errors_in": (T[1], T[2], 7),
    }  # fmt: skip
    said = {1: "", 2: "t1, ", 3: "t1, t2, "}
    return {name: (given(*its), f"{prefix}_{name}(h, {said[len(its)]}0x7)") for name, its in calls.items()}


# Each row has the call of a method, and the resulting call of the C function.
OPTIONS = dict(
    values="float16", results="float32", error=1, scale=1, nonfinite=2, beta=0.75, device=(2, 3), n_chunks=4, server=5
)
SAID_OF_OPTIONS = (
    "codec=2 device=2:3 values=2.16.1 results=2.32.1 error=1 scale=1 nonfinite=2 beta=0.75 segments=[8 9] n_segments=2 "
    "n_chunks=4 server=5"
)

CALLS = {
    "set_threads": (given(5), "gc_set_threads(5)"),
    "prepare": (given((2, 3)), "gc_prepare(2:3)"),
    "trim": (given((2, 4)), "gc_trim(2:4)"),
    "chunk_bytes": (given(11, 7), "gc_chunk_bytes(11, 7)"),
    "pack_chunks": (given(T[1], 3), "gc_pack_chunks(t1, 3, out)"),
    "unpack_chunks": (given([T[1], T[2]], 9), "gc_unpack_chunks([t1 t2], 2, 9, out)"),
    "pack_bits": (given(T[1], 5, 1), "gc_pack_bits(t1, 5, 1, out)"),
    "unpack_bits": (given(T[1], 5, 6, 1), "gc_unpack_bits(t1, 5, 6, 1, out)"),
    "pack_chunks_into": (given(T[1], T[2], 1, 7), "gc_pack_chunks_into(t1, 1, t2, 0x7)"),
    "unpack_chunks_into": (given(T[1], T[2], 1, 7), "gc_unpack_chunks_into(t1, 1, t2, 0x7)"),
    "pack_bits_into": (given(T[1], T[2], 5, 1, 7), "gc_pack_bits_into(t1, 5, 1, t2, 0x7)"),
    "unpack_bits_into": (given(T[1], T[2], 5, 1, 7), "gc_unpack_bits_into(t1, 5, 1, t2, 0x7)"),
    "pack_signs": (given(T[1], 3), "gc_pack_signs(t1, 3, out)"),
    "unpack_signs": (given([T[1], T[2]], 9, "float16"), "gc_unpack_signs([t1 t2], 2, 9, 2.16.1, out)"),
    "pack_signs_into": (given(T[1], T[2], 1, 7), "gc_pack_signs_into(t1, 1, t2, 0x7)"),
    "unpack_signs_into": (given(T[1], T[2], T[3], 1, 7), "gc_unpack_signs_into(t1, t3, 1, t2, 0x7)"),
    "vote_signs_into": (given(T[1], T[2], 6, 7), "gc_vote_signs_into(t1, 6, t2, 0x7)"),
    "tensor_empty": (given((4, 5), "int16", (2, 3)), "gc_tensor_empty(2:3, 0.16.1, 2, [4 5], out)"),
    "tensor_to_device": (given(T[1], (2, 3)), "gc_tensor_to_device(t1, 2:3, out)"),
    "copy_into": (given(T[1], T[2], 7), "gc_copy_into(t1, t2, 0x7)"),
    "builtin_kernels": (given("bits"), "gc_builtin_kernels('bits', out, out)"),
    "builtin_kernel_shape": (given("gc_x", 90), "gc_builtin_kernel_shape('gc_x', 90, out)"),
    "share_send": (given(T[1], 5, 6, 7), "gc_share_send(t1, 5, 6, 7, out)"),
    "share_receive": (given(5, (2, 3), 7), "gc_share_receive(5, 2:3, 7, out)"),
    "allreduce_peers_bytes": (given(2, [8, 9], 7, **OPTIONS), f"gc_allreduce_peers_bytes({{{SAID_OF_OPTIONS}}}, 7, 1)"),
    "group": (given(3), "gc_comm_group(3, out)"),
    "encode": (given(T[1], 5), "gc_encode(t1, 5, out)"),
    "decode": (given(T[1], "float16"), "gc_decode(t1, 2.16.1, out)"),
    "communicator": (
        given(2, 5, print, print),
        "gc_comm_from_transport({rank=2 world_size=5 flags=1 all_to_all=f all_gather=f}, out)",
    ),
    "nccl": (given(5, True, 6), "gc_comm_from_nccl({flags=1 comm=0x5 dl_handle=0x6}, out)"),
    "nccl_id": (given(6), "gc_comm_nccl_id({dl_handle=0x6}, out)"),
    "nccl_world": (given(bytes([3] * 127 + [4]), 5, 8, 6, 7), "gc_comm_from_nccl_id({dl_handle=0x7}, 3-4, 5, 8, 2:6, out)"),
    "peers": (
        given(1, [0x10, 0x20, 0x30], 500, 6, 70),
        "gc_comm_from_peers({rank=1 world_size=3 timeout_ms=70 device=2:6 bytes=500 buffers=[0x10 0x20 0x30]}, out)",
    ),
    "elementwise": (
        given("i", "o", "op", "n", preamble="p", loop_prep="l", after_loop="a", options=["x", "y"], flags=3, nvrtc=9),
        "gc_elementwise_create({flags=3 inputs='i' outputs='o' operation='op' name='n' preamble='p' loop_prep='l' "
        "after_loop='a' options=['x' 'y'] n_options=2 nvrtc=0x9}, out)",
    ),
    "reduction": (
        given("i", "o", "m", "r", "pm", "id", "n", reduce_type="rt", preamble="p", options=["x", "y"], flags=3, nvrtc=9),
        "gc_reduction_create({flags=3 inputs='i' outputs='o' map='m' reduce='r' post_map='pm' identity='id' name='n' "
        "reduce_type='rt' preamble='p' options=['x' 'y'] n_options=2 nvrtc=0x9}, out)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_function_of_the_client_passes_every_argument_in_its_place(said, name):
    call, expected = CALLS[name]
    _, lines = said(lambda library: call(library, name))
    assert lines == [expected]


METHODS = {
    "Codec": (
        lambda g: g.codec(2, [8, 9], **OPTIONS),
        {
            "": (None, f"gc_codec_create({{{SAID_OF_OPTIONS}}}, out)"),
            "encode": (given([T[1], T[2]], T[3], T[4], T[5], 7), "gc_codec_encode(h, [t1 t2], 2, t4, t5, t3, 0x7)"),
            "decode": (given(T[1], [T[2], T[3]], 6, T[4], 1, 7), "gc_codec_decode(h, t1, 6, t4, 1, [t2 t3], 2, 0x7)"),
            "reduce": (given(6, T[1], T[2], 7), "gc_codec_reduce(h, 6, t1, t2, 0x7)"),
            "scales": (given(T[1], 7), "gc_codec_scales(h, t1, 0x7)"),
            "state_out": (given(T[1], 7), "gc_codec_state_out(h, t1, 0x7)"),
            "state_in": (given(T[1], 7), "gc_codec_state_in(h, t1, 0x7)"),
            **shared("gc_codec"),
        },
    ),
    "Communicator": (
        lambda g: g.group(1)[0],
        {
            "rank": (lambda c, _: c.rank, "gc_comm_rank(h)"),
            "world_size": (lambda c, _: c.world_size, "gc_comm_world_size(h)"),
            "async_error": (given(), "gc_comm_async_error(h)"),
            "abort": (given(), "gc_comm_abort(h)"),
            "open_peers": (lambda c, _: c._library.open_peers(c, 3, 50, 60), "gc_comm_open_peers(h, 2:3, 50, 60, out)"),
            "hierarchical": (
                lambda c, _: (c, second := c._library.group(1)[0], c._library.hierarchical(c, second)),
                "gc_comm_group(1, out)", "gc_comm_hierarchical(h, second, out)",
            ),
            "allreduce": (given(2, [8, 9], **OPTIONS), f"gc_allreduce_create(h, {{{SAID_OF_OPTIONS}}}, out)"),
        },
    ),
    "AllReduce": (
        lambda g: g.group(1)[0].allreduce(1, [8]),
        {
            "run": (given([T[1], T[2]], T[3], T[4], 7), "gc_allreduce_run(h, [t1 t2], 2, t3, t4, 0x7)"),
            "reduce_scatter": (
                given([T[1], T[2]], T[3], T[4], T[5], 7),
                "gc_allreduce_reduce_scatter(h, [t1 t2], 2, t4, t5, t3, 0x7)",
            ),
            "all_gather": (given(T[1], [T[2], T[3]], 7), "gc_allreduce_all_gather(h, t1, [t2 t3], 2, 0x7)"),
            "parts": (given(6, "worker"), "gc_allreduce_parts(h, 6, 0, out, 0)", "gc_allreduce_parts(h, 6, 0, out, 77)"),
            **shared("gc_allreduce"),
        },
    ),
    "Share": (
        lambda g: g.share_send(T[1], 5),
        {"wait": (given(6), "gc_share_wait(h, 6)")},
    ),
    "Kernel": (
        lambda g: g.elementwise("i", "o", "op"),
        {
            "__call__": (
                given([T[1], T[2]], [T[3]], 7, workspace=T[4], axes=[5, 6], keepdims=True, size=8, capability=9),
                "gc_kernel_run(h, [t1 t2], 2, [t3], 1, {flags=1 size=8 axes=[5 6] n_axes=2 workspace=t4 capability=9}, 0x7)",
            ),
            "prepare": (
                given([T[1], T[2]], [T[3]], 7, axes=5, capability=9),
                "gc_kernel_prepare(h, [t1 t2], 2, [t3], 1, {axes=[5] n_axes=1 capability=9}, 0x7)",
            ),
            "workspace_bytes": (
                given([T[1], T[2]], [T[3]], axes=5, keepdims=True),
                "gc_kernel_workspace_bytes(h, [t1 t2], 2, [t3], 1, {flags=1 axes=[5] n_axes=1})",
            ),
            "log": (given(), "gc_kernel_log(h, out)"),
        },
    ),
}  # fmt: skip
CASES = [(kind, method) for kind, (_, methods) in METHODS.items() for method in methods]


@pytest.mark.parametrize("kind, method", CASES, ids=lambda name: name or "new")
def test_a_method_of_the_client_passes_every_argument_in_its_place(said, kind, method):
    make, methods = METHODS[kind]
    call, *expected = methods[method]
    made, lines = said(make)
    handle = getattr(made, "_handle", None) or made._comm
    number = ctypes.cast(handle, ctypes.c_void_p).value
    if call:
        kept, lines = said(lambda _: call(made, method))
    names = ("(h", f"(h{number}"), ("second", f"h{number + 1}")
    for name, value in names:
        expected = [line.replace(name, value) for line in expected]
    assert lines[: len(expected)] == expected


def test_every_function_of_the_client_is_tested():
    def public(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    known = set(CALLS) | {"version", "build_info", "make", "codec", "open_peers", "hierarchical"}
    assert public(gradcodec.GradCodec) == known
    for kind, (_, methods) in METHODS.items():
        own = getattr(gradcodec, kind)
        names = {name for each in own.__mro__[:-1] for name in public(each)}
        # test_client.py has close().
        assert names - {"close"} <= set(methods), kind
