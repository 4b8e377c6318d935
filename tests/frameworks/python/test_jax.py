"""Tests of gradcodec.jax in jit and shard_map, on the CPU as four devices, and on CUDA if JAX has it. Bytes, values and
errors must equal those of handles (which tests/python compares with docs/NUMERICS.md). Also tests what is refused."""

import ctypes
import json
import pathlib
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

import gradcodec  # noqa: E402
import gradcodec.jax as gj  # noqa: E402
from gradcodec import GradCodec, _jax_ffi  # noqa: E402

library = GradCodec()
KINDS = "int8", "mxfp8", "bf16", "int4", "mxfp4", "onebit", "sign"
SHAPES = {"bias": (7,), "norm": (130,), "weight": (33, 65), "z": (0, 3)}
COUNTS = [int(np.prod(shape)) for shape in SHAPES.values()]
RAW = [True, True, False, True]


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def on(request):
    try:
        return jax.devices(request.param)
    except RuntimeError:
        pytest.skip("no CUDA device for JAX")


def values(seed, dtype="float32", shapes=SHAPES):
    """Returns arrays of NumPy, which are on no device of JAX."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}


def on_cpu(array):
    return jax.device_put(array, jax.devices("cpu")[0])


def same(one, other):
    one, other = np.asarray(one), np.asarray(other)
    assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def options_of(codec, **more):
    of_block = {} if codec.codec in ("onebit", "sign") else {"raw": RAW}
    return {"error": codec.error, "nonfinite": codec.nonfinite, "reduction": codec.reduction, **of_block, **more}


def aligned(shape):
    size = int(np.prod(shape))
    room = np.zeros(size + 16, np.uint8)
    first = -room.ctypes.data % 16
    return room[first : first + size].reshape(shape)


CODECS = [gj.Codec(kind) for kind in KINDS] + [
    gj.Codec("int8", "float32", reduction="sum", beta=0.5), gj.Codec("onebit", reduction="sum"),
    gj.Codec("int4", "none", nonfinite="zero"), gj.Codec("onebit", "none", scale=1),
]  # fmt: skip


@pytest.mark.parametrize("codec, dtype", [
    *((codec, "float32") for codec in CODECS), (gj.Codec("int4"), "float16"), (gj.Codec("onebit"), "bfloat16"),
], ids=str)  # fmt: skip
def test_payloads_values_and_errors_match_a_handle(on, codec, dtype):
    more = {} if codec.beta == 1 else {"beta": codec.beta}
    if codec.scale:
        more["scale"] = codec.scale
    handle = library.codec(
        codec.codec, COUNTS, values=dtype, results=dtype, n_chunks=3, server=2, **options_of(codec, **more)
    )
    encode = jax.jit(lambda values, errors: codec.encode(values, errors and errors.worker, 3))
    reduce = jax.jit(lambda chunks, like, errors: codec.reduce(1, chunks, like, errors and errors.server, n_chunks=3))
    decode = jax.jit(codec.decode)
    errors = jax.device_put(codec.errors(values(0)), on[0])
    expected = aligned((3, handle.payload_bytes // 3))
    for step in range(3):
        given = values(step, dtype)
        payload, worker = encode(jax.device_put(given, on[0]), errors)
        handle.encode([on_cpu(each) for each in given.values()], expected.reshape(-1))
        same(payload, expected)
        there = [np.zeros(count, np.float32) for count in COUNTS] if dtype == "float32" else None
        back = decode(payload, given)
        assert jax.tree.map(lambda each: each.dtype, back) == jax.tree.map(lambda each: each.dtype, given)
        if there:
            handle.decode(expected.reshape(-1), there)
            for name, each in zip(given, there):
                same(back[name], each.reshape(SHAPES[name]))
        rows = aligned((3, expected.shape[1]))
        rows[:] = expected[1]
        chunk, server = reduce(jax.device_put(rows, on[0]), given, errors)
        wanted = aligned((expected.shape[1],))
        handle.reduce(1, rows, wanted)
        same(chunk, wanted if codec.codec != "sign" else chunk)  # SIGN is not compared: its turn is an argument here
        if codec.keeps_errors:
            carried = np.zeros(sum(COUNTS), np.float32)
            of_server = np.zeros(gj._part(codec.codec, codec._leaves(given), 1, 3), np.float32)
            handle.errors_out(carried, of_server)
            same(worker, carried)
            same(server[: len(of_server)], of_server)
            assert not np.asarray(server[len(of_server) :]).any()
            errors = gj.Errors(worker, server)
        else:
            assert (worker, server, errors) == (None, None, None)


def test_votes_with_a_traced_turn_match_earlier_calls(on):
    codec, like = gj.Codec("sign"), jnp.zeros(999)
    handle = library.codec("sign", [999], n_chunks=2, server=1)
    rows, payload = aligned((4, handle.payload_bytes // 2)), aligned((handle.payload_bytes,))
    for row in range(4):
        handle.encode([np.random.default_rng(row).standard_normal(999, np.float32)], payload)
        rows[row] = payload[: len(payload) // 2]
    reduce = jax.jit(lambda rows, turn: codec.reduce(0, rows, like, n_chunks=2, turn=turn)[0])
    seen = set()
    for turn in range(5):
        expected = aligned(rows.shape[1:])
        handle.reduce(0, rows, expected)
        same(reduce(jax.device_put(rows, on[0]), turn), expected)
        seen.add(expected.tobytes())
    assert len(seen) == 4


def test_a_turn_may_be_unsigned(on):
    ballots = jax.device_put(np.arange(40, dtype=np.uint8).reshape(4, 10) ** 3, on[0])
    ballots = jnp.concatenate([ballots, ~ballots[:2]])  # six, which do not divide 2^32
    expected = [gj.vote_signs(ballots, turn) for turn in range(7)]
    assert len({np.asarray(each).tobytes() for each in expected}) > 1
    for turn, each in enumerate(expected):
        for kind in np.uint8, np.uint32:
            same(gj.vote_signs(ballots, kind(turn)), each)
            same(jax.jit(gj.vote_signs)(ballots, kind(turn)), each)


def test_errors_are_float32_where_jax_has_float64():
    codec = gj.Codec("int4")
    with jax.enable_x64(True):
        errors = codec.errors(values(0))
        _, worker = codec.encode(values(0), errors.worker)
    assert {each.dtype for each in (*errors, worker)} == {jnp.dtype("float32")}


def of_handles(world, kind, steps, counts, **options):
    """Returns the results of all-reduces among threads, by step and rank."""
    results = [[None] * world for _ in steps]

    def rank(comm, number):
        handle = comm.allreduce(kind, counts, **options)
        for step, of_ranks in enumerate(steps):
            mine = [np.array(each) for each in of_ranks[number]]
            handle.run(mine)
            results[step][number] = mine
        handle.close()

    comms = library.group(world)
    with ThreadPoolExecutor(world) as threads:
        list(threads.map(rank, comms, range(world)))
    return results


@pytest.mark.parametrize("codec, size", [
    *((gj.Codec(kind), 1000) for kind in ("bf16", "int4", "onebit", "sign")), (CODECS[7], 1000), (CODECS[8], 300_000),
    (gj.Codec("int8"), 300_000), (gj.Codec("mxfp4"), 300_000),
], ids=str)  # fmt: skip
def test_all_reduces_match_handles(on, codec, size):
    world, shapes = len(on), {"bias": (7,), "weight": (size // 100, 100)}
    counts = [7, size]
    steps = [[values(10 * step + rank, shapes=shapes) for rank in range(world)] for step in range(3)]
    options = {"error": codec.error, "reduction": codec.reduction, **({} if codec.beta == 1 else {"beta": codec.beta})}
    if codec.codec not in ("onebit", "sign"):
        options["raw"] = [True, size < 1024]
    flat = [[[np.asarray(leaf).ravel() for leaf in of_rank.values()] for of_rank in step] for step in steps]
    expected = of_handles(world, codec.codec, flat, counts, **options)
    mesh, each = Mesh(np.array(on), ("data",)), PartitionSpec("data")

    def local(values, errors, turn):
        values = jax.tree.map(lambda leaf: leaf[0], values)
        reduced, errors = gj.all_reduce(values, "data", codec, errors, turn=turn)
        return jax.tree.map(lambda leaf: leaf[None], reduced), errors

    run = jax.jit(jax.shard_map(
        local, mesh=mesh, in_specs=(each, each, PartitionSpec()), out_specs=(each, each), check_vma=False
    ))  # fmt: skip
    errors = codec.errors(steps[0][0], world)
    for turn, (step, of_handle) in enumerate(zip(steps, expected)):
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *step)
        reduced, errors = run(stacked, errors, turn)
        reduced = jax.tree.map(np.asarray, reduced)  # XLA indexes an array spread over devices by arithmetic
        for rank in range(world):
            for name, wanted in zip(("bias", "weight"), of_handle[rank]):
                same(reduced[name][rank], wanted.reshape(shapes[name]))
    assert "all-gather" in run.lower(stacked, errors, turn).compile().as_text() or world == 1


def test_a_small_all_reduce_without_errors_is_one_shot_and_a_large_one_two_shot():
    on = jax.devices("cpu")
    mesh, each = Mesh(np.array(on), ("data",)), PartitionSpec("data")
    for kind, size, twice in ("int8", 1 << 12, False), ("int8", 1 << 21, True), ("sign", 64, True), ("int4", 64, True):
        codec = gj.Codec(kind)
        local = lambda x, errors: gj.all_reduce(x, "data", codec, errors)  # noqa: B023, E731
        run = jax.shard_map(local, mesh=mesh, in_specs=(each, each), out_specs=(each, each), check_vma=False)
        one = jnp.zeros((size // 64, 64))
        traced = str(jax.make_jaxpr(run)(jnp.concatenate([one] * len(on)), codec.errors(one, len(on))))
        assert ("all_to_all" in traced, "all_gather" in traced) == (twice, True), kind


def test_a_scan_carries_errors_and_does_not_change_its_input(on):
    codec, gradients = gj.Codec("int4", raw=(False,)), np.stack([values(0)["weight"]] * 60)
    first = codec.errors(gradients[0]).worker

    @jax.jit
    def received(gradients, worker):
        def step(worker, gradient):
            payload, worker = codec.encode(gradient, worker)
            return worker, codec.decode(payload, gradient)

        return jax.lax.scan(step, worker, gradients)

    given = jax.device_put((gradients, first), on[0])
    left, sent = received(*given)
    # A later step sends what one step loses; the comparison allows for float32's rounding.
    np.testing.assert_allclose(sent.sum(0).ravel() + left, gradients.sum(0).ravel(), rtol=1e-4, atol=1e-4)
    assert np.abs(sent[0] - gradients[0]).max() > 0.05 and not np.asarray(given[1]).any()
    again = received(*given)
    same(again[0], left)
    same(again[1], sent)


def test_concurrent_programs_do_not_exchange_with_each_other(on):
    codec, number = gj.Codec("mxfp4", raw=(False,)), 8
    run = jax.jit(lambda x, worker: codec.encode(x, worker))
    given = [jax.device_put((values(k)["weight"], values(k)["weight"].ravel()), on[k % len(on)]) for k in range(number)]
    alone = [jax.tree.map(np.asarray, run(*each)) for each in given]

    def many(k):
        return [jax.tree.map(np.asarray, run(*given[k])) for _ in range(20)]

    with ThreadPoolExecutor(number) as threads:
        for (of_payload, of_worker), found in zip(alone, threads.map(many, range(number))):
            for payload, worker in found:
                same(payload, of_payload)
                same(worker, of_worker)


def test_a_batch_runs_element_by_element(on):
    codec, batch = gj.Codec("int8", raw=(False,)), np.stack([values(k)["weight"] for k in range(3)])
    payloads, _ = jax.jit(jax.vmap(codec.encode))(jax.device_put(batch, on[0]))
    for row, each in zip(payloads, batch):
        same(row, codec.encode(each)[0])


def test_bits_and_signs_match_numpy(on):
    x = np.random.default_rng(3).standard_normal((27, 37), np.float32)
    there = jax.device_put(x, on[0])
    packed = np.packbits(~(x < 0).ravel())
    rows = np.pad(packed, (0, -len(packed) % 4)).reshape(4, -1)
    same(jax.jit(lambda x: gj.pack_signs(x, 4))(there), rows)
    same(jax.jit(gj.unpack_signs)(rows, there), np.where(x < 0, -1, 1).astype(np.float32))
    halves = jax.jit(gj.unpack_signs)(rows, jnp.zeros(rows.size * 8), jnp.full(4, 0.5))
    same(halves, np.where(np.unpackbits(rows), 0.5, -0.5).astype(np.float32))
    truth = there > 0
    same(jax.jit(gj.pack_chunks)(truth), np.packbits(x > 0)[None])
    same(jax.jit(gj.unpack_chunks)(gj.pack_chunks(truth), truth), x > 0)
    for axis in None, 0, 1, -1:
        for order, name in (0, "big"), (1, "little"):
            bits = jax.jit(lambda x: gj.pack_bits(x, axis, order))(truth)  # noqa: B023
            same(bits, np.packbits(x > 0, axis, name))
            if axis is not None:
                same(gj.unpack_bits(bits, jnp.zeros((27, 37), jnp.uint8), axis, order), (x > 0).astype(np.uint8))
    ballots = np.random.default_rng(4).integers(0, 256, (4, 50), np.uint8)
    bits = np.unpackbits(ballots, axis=1).reshape(4, 50, 8)
    for turn in 0, 1, 6:
        in_turn, ayes = bits[(np.arange(50) + turn) % 4, np.arange(50)], bits.sum(0, dtype=int)
        same(jax.jit(gj.vote_signs)(ballots, turn), np.packbits(np.where(ayes == 2, in_turn, ayes > 2), axis=1).ravel())


def test_non_finite_values_become_nan_and_never_a_kept_error(on):
    codec, x = gj.Codec("int8", "float32", raw=(False,)), jnp.asarray(values(0)["weight"]).at[0, 0].set(jnp.inf)
    payload, worker = jax.jit(codec.encode)(jax.device_put(x, on[0]), codec.errors(x).worker)
    back = np.asarray(codec.decode(payload, x)).ravel()
    assert np.isnan(back[:64]).all() and np.isfinite(back[64:]).all() and np.isfinite(worker).all()
    zero = gj.Codec("int8", raw=(False,), nonfinite="zero")
    assert np.isfinite(zero.decode(zero.encode(x)[0], x)).all()


X = jnp.zeros((40, 40))
E = jnp.zeros(1600)
PAYLOAD = jnp.zeros((1, 64), jnp.uint8)


@pytest.mark.parametrize("call, kind, words", [
    (lambda: gj.Codec("zip"), ValueError, "codec: one of 'onebit', .* got str 'zip'"),
    (lambda: gj.Codec(5), TypeError, "codec: one of 'onebit', .* got int 5"),
    (lambda: gj.Codec("int8", error="float64"), ValueError, "error: one of 'float32', .*'float64'"),
    (lambda: gj.Codec("sign", error="float32"), ValueError, "error: 'none' expected with sign"),
    (lambda: gj.Codec("sign", reduction="sum"), ValueError, "reduction: 'mean' expected with sign"),
    (lambda: gj.Codec("int8", nonfinite="transactional"), ValueError, "keep the errors that went in"),
    (lambda: gj.Codec("int8", raw=("0",)), TypeError, "raw.0.: a bool expected, got str '0'"),
    (lambda: gj.Codec("onebit", raw=(True,)).encode(X), ValueError, "raw: nothing travels as it is with onebit"),
    (lambda: gj.Codec("int8", raw=(True, True)).encode(X), ValueError, "raw: 1 bools expected, one for each leaf, got"),
    (lambda: gj.Codec().encode({"w": X.astype(int)}), TypeError, r"values\['w'\]: float32, .* expected, got int32"),
    (lambda: gj.Codec().encode([X, X.astype(jnp.bfloat16)]), TypeError, r"values\[1\]: float32 expected, as values"),
    (lambda: gj.Codec().encode([1.0]), TypeError, r"values\[0\]: an array expected, got float 1.0"),
    (lambda: gj.Codec().encode(X, E), ValueError, "worker: None expected, because int8 keeps no errors"),
    (lambda: gj.Codec().encode(X, n_chunks=0), ValueError, "n_chunks: at least 1 expected, got 0"),
    (lambda: gj.Codec("int4").encode(X), ValueError, r"worker: int4 keeps errors: .* at first Codec.errors\(\)"),
    (lambda: gj.Codec("int4").encode(X, E[1:]), ValueError, r"worker: float32 \[1600\] expected, got float32 \[1599\]"),
    (lambda: gj.Codec().decode(X, X), ValueError, r"payload: uint8 .* expected, got float32 \[40, 40\]"),
    (lambda: gj.Codec().reduce(1, PAYLOAD, X), ValueError, "chunk: at most 0 expected, got 1"),
    (lambda: gj.Codec().reduce(0, X, X), ValueError, "chunks: uint8 .payloads, bytes. expected, got float32"),
    (lambda: gj.Codec("int4").reduce(0, PAYLOAD, X, E[1:]), ValueError, r"server: float32 \[1600\], or more, expected"),
    (lambda: gj.all_reduce(X, "data", "int4"), ValueError, r"errors: int4 keeps errors: .*Codec.errors\(values, ranks"),
    (lambda: gj.all_reduce(X, "data", "int8", gj.Errors(E, E)), ValueError, "errors: None expected, because int8"),
    (lambda: gj.pack_bits(X > 0, 2), ValueError, "axis: at most 1 expected, got 2"),
    (lambda: gj.pack_signs(X, 0), ValueError, "n_chunks: at least 1 expected, got 0"),
])  # fmt: skip
def test_refusals_are_raised_before_anything_runs(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("call, words", [
    (lambda x: gj.pack_chunks(x), "gc_pack_signs_into packs signs"),
    (lambda x: gj.pack_signs(x, order=7), "order: "),
    (lambda x: gj.vote_signs(jnp.zeros((0, 2), jnp.uint8)), "voter"),
    (lambda x: gj.Codec().decode(PAYLOAD, x), "payload: "),
], ids=["pack_chunks", "order", "vote", "decode"])  # fmt: skip
def test_a_refusal_of_the_library_is_an_xla_error_with_its_message(on, call, words):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: ") as error:
        jax.block_until_ready(jax.jit(call)(jax.device_put(X, on[0])))
    assert words in str(error.value)
    same(jax.jit(gj.pack_signs)(jax.device_put(X, on[0])), np.full((1, 200), 255, np.uint8))  # later calls succeed


def test_a_damaged_payload_is_not_decoded():
    codec = gj.Codec("int8")
    payload, _ = codec.encode(on_cpu(X))
    with pytest.raises(jax.errors.JaxRuntimeError, match="CORRUPT"):
        jax.block_until_ready(codec.decode(payload.at[0, 8].add(1), X))


def test_structures_match_those_of_xla(tmp_path):
    fields = {
        "XLA_FFI_Api": (_jax_ffi._Api, {"XLA_FFI_Error_Create": "error_create", "XLA_FFI_Stream_Get": "stream_get",
            "XLA_FFI_DeviceOrdinal_Get": "device_ordinal_get", "api_version": "version"}),
        "XLA_FFI_Buffer": (_jax_ffi._Buffer, {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"}),
        "XLA_FFI_Args": (_jax_ffi._Values, {"size": "count", "args": "each"}),
        "XLA_FFI_Rets": (_jax_ffi._Values, {"size": "count", "rets": "each"}),
        "XLA_FFI_Attrs": (_jax_ffi._Attributes, {"size": "count", "attrs": "each"}),
        "XLA_FFI_ByteSpan": (_jax_ffi._Text, {"ptr": "at", "len": "bytes"}),
        "XLA_FFI_CallFrame": (_jax_ffi._CallFrame, {"extension_start": "extension", "api": "api", "ctx": "context",
            "stage": "stage", "args": "operands", "rets": "results", "attrs": "attributes"}),
        "XLA_FFI_Metadata": (_jax_ffi._Metadata, {"api_version": "version", "traits": "traits"}),
        "XLA_FFI_Metadata_Extension": (_jax_ffi._Extension, {"metadata": "metadata"}),
        "XLA_FFI_Error_Create_Args": (_jax_ffi._ErrorCreate, {"message": "message", "errc": "code"}),
        "XLA_FFI_Stream_Get_Args": (_jax_ffi._StreamGet, {"ctx": "context", "stream": "stream"}),
        "XLA_FFI_DeviceOrdinal_Get_Args": (_jax_ffi._OrdinalGet, {"ctx": "context", "device_ordinal": "ordinal"}),
    }  # fmt: skip
    lines = [
        f"static_assert(offsetof({name}, {theirs}) == {getattr(ours, own).offset});"
        for name, (ours, pairs) in fields.items() for theirs, own in pairs.items()
    ]  # fmt: skip
    numbers = [f"static_assert(XLA_FFI_DataType_{name} == {number});" for number, name in {
        1: "PRED", 2: "S8", 3: "S16", 4: "S32", 5: "S64", 6: "U8", 7: "U16", 8: "U32", 9: "U64", 10: "F16", 11: "F32",
        12: "F64", 16: "BF16",
    }.items()]  # fmt: skip
    assert len(numbers) == len(_jax_ffi._DTYPES)
    numbers += [
        f"static_assert(XLA_FFI_Extension_Metadata == {_jax_ffi._METADATA});",
        f"static_assert(XLA_FFI_ExecutionStage_EXECUTE == {_jax_ffi._EXECUTE});",
        "static_assert(XLA_FFI_API_MAJOR == 0);",
    ]
    program = tmp_path / "layout.cpp"
    includes = "#include <cstddef>\n#include <cstdint>\n#include <cstring>\n#include \"xla/ffi/api/c_api.h\"\n"
    program.write_text(includes + "\n".join(lines + numbers) + "\n")
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-isystem{jax.ffi.include_dir()}", str(program)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


class Xla:
    """Arguments that XLA gives a handler, made without XLA: an operand, a result, an attribute's text, a stream."""

    def __init__(self, text, ordinal, stream, dtypes=(11, 6)):
        self.messages, size = [], ctypes.sizeof
        functions = {"error_create": self.error, "stream_get": self.stream, "device_ordinal_get": self.ordinal}
        self.kept = {name: _jax_ffi._Function(function) for name, function in functions.items()}
        self.answers = ordinal, stream
        addresses = {name: ctypes.cast(function, ctypes.c_void_p) for name, function in self.kept.items()}
        self.api = _jax_ffi._Api(size(_jax_ffi._Api), **addresses)
        dims, self.text = (ctypes.c_int64 * 1)(8), ctypes.create_string_buffer(text)
        lists = []
        for at, dtype in zip((0x1000, 0x2000), dtypes):
            buffer = _jax_ffi._Buffer(size(_jax_ffi._Buffer), None, dtype, at, 1, ctypes.addressof(dims))
            lists.append((ctypes.c_void_p * 1)(ctypes.addressof(buffer)))
            self.kept[at] = buffer
        self.said = _jax_ffi._Text(ctypes.addressof(self.text), len(text))
        attributes = (ctypes.c_void_p * 1)(ctypes.addressof(self.said))
        self.kept.update(dims=dims, lists=lists, attributes=attributes)
        self.frame = _jax_ffi._CallFrame(size(_jax_ffi._CallFrame), None, ctypes.pointer(self.api), 77, 3,
            *(_jax_ffi._Values(0, None, 1, None, each) for each in lists),
            _jax_ffi._Attributes(0, None, 1, None, None, attributes))  # fmt: skip

    def error(self, address):
        about = _jax_ffi._ErrorCreate.from_address(address)
        self.messages.append((about.code, about.message.decode()))
        return 99

    def ordinal(self, address):
        asked = _jax_ffi._OrdinalGet.from_address(address)
        assert asked.context == 77
        asked.ordinal = self.answers[0]

    def stream(self, address):
        asked = _jax_ffi._StreamGet.from_address(address)
        assert asked.context == 77
        asked.stream = self.answers[1]

    def call(self, platform):
        return _jax_ffi._ON[platform](ctypes.addressof(self.frame))


def test_the_cuda_handler_passes_the_device_and_the_stream(monkeypatch):
    seen = []

    def pack(src, order, dst, stream):
        views = [gradcodec._abi.DLTensor.from_address(place) for place in (src, dst)]
        seen.append([(v.data, v.device.device_type, v.device.device_id, v.dtype.bits, v.shape[0]) for v in views])
        seen.append((order, stream))
        return 0

    monkeypatch.setattr(_jax_ffi.library()._raw, "gc_pack_signs_into", pack)
    text = b'{"function": "gc_pack_signs_into", "arguments": ["i0", 1, "o0"]}'
    assert Xla(text, 3, 0x5EAD).call("CUDA") is None
    assert seen == [[(0x1000, 2, 3, 32, 8), (0x2000, 2, 3, 8, 8)], (1, 0x5EAD)]
    assert Xla(text, 3, 0x5EAD).call("cpu") is None
    assert seen[2:] == [[(0x1000, 1, 0, 32, 8), (0x2000, 1, 0, 8, 8)], (1, 0)]


def test_each_stream_has_its_own_handle(monkeypatch):
    made = []

    class Handle:
        def __init__(self, *_, device, **__):
            made.append(device)

        def _run(self, function, *arguments):
            pass

    monkeypatch.setattr(_jax_ffi.library(), "codec", Handle)
    options = {"error": "none"}
    about = {"do": "encode", "codec": "int8", "segments": [8], "options": options, "test": "streams"}
    text = json.dumps(about).encode()
    for number, stream in (0, 1), (0, 1), (0, 2), (1, 2), (0, 2), (0, 1):
        assert Xla(text, number, stream).call("CUDA") is None
    assert made == [(2, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize("status, code", [(1, 3), (10, 8), (20, 14), (21, 13), (99, 13)])
def test_errors_have_xlas_codes(monkeypatch, status, code):
    def fail(*_):
        raise gradcodec.GradCodecError("no luck", status)

    monkeypatch.setattr(_jax_ffi.library()._raw, "gc_pack_signs_into", fail)
    xla = Xla(b'{"function": "gc_pack_signs_into", "arguments": ["i0", 0, "o0"]}', 0, 1)
    assert xla.call("CUDA") == 99 and xla.messages == [(code, str(gradcodec.GradCodecError("no luck", status)))]


def test_an_xla_with_another_interface_is_refused_with_a_message():
    for change in {"major": 1}, {"size": 48}:
        xla = Xla(b"{}", 0, 1)
        xla.api.version.major, xla.api.size = change.get("major", 0), change.get("size", xla.api.size)
        assert xla.call("CUDA") == 99 and "is not known here" in xla.messages[0][1]


@pytest.mark.parametrize("mesh", ["as printed", "numpy.array(jax.devices())"])
def test_the_program_of_getting_started_runs_with_every_mesh_that_it_names(mesh):
    text = (pathlib.Path(__file__).resolve().parents[3] / "docs/START.md").read_text(encoding="utf-8")
    (program,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "gradcodec.jax" in block]
    if mesh != "as printed":
        (other,) = re.findall(r"`(jax\.sharding\.Mesh\(.*\))`", text)
        assert mesh in other
        program = re.sub("^mesh = .*$", f"import numpy\nmesh = {other}", program, flags=re.M)
        assert other in program
    gradients = {"w": values(0)["weight"]}
    names = {"gradients": gradients}
    exec(program, names)
    total = names["mean"]["w"]
    np.testing.assert_allclose(total, gradients["w"], atol=0.3)
    assert 0 < np.abs(total - gradients["w"]).max() and np.abs(names["errors"].worker).max() > 0
    exec(program.splitlines()[-1], names)  # the next step, with the errors of the first
    assert np.abs((total + names["mean"]["w"]) / 2 - gradients["w"]).max() < np.abs(total - gradients["w"]).max()
