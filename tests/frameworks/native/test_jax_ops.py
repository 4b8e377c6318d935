"""The handlers of gradcodec/xla.hpp inside jax.jit, as examples/python/jax_ops.py registers them; on the CPU, and on CUDA
where JAX has it. What is expected is NumPy's."""

import pathlib
import subprocess

import numpy as np
import pytest

pytest.importorskip("jax")
import jax_ops  # noqa: E402 before JAX looks for devices: it says how many the CPU is
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
RNG = np.random.default_rng(3)
ORDERS = {"big": np.int32(0), "little": np.int32(1)}
BIG = {"order": ORDERS["big"]}
NONE = np.int32(-(2**31))  # GC_AXIS_NONE
VALUES = RNG.standard_normal((27, 37)).astype(np.float32)
VALUES.ravel()[:6] = [0.0, -0.0, np.nan, np.inf, -np.inf, -1e-45]


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def on(request):
    try:
        return jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip("no CUDA device for JAX")


@pytest.fixture(scope="module", autouse=True)
def registered():
    jax_ops.register()


def shaped(shape, dtype=jnp.uint8):
    return jax.ShapeDtypeStruct(shape, dtype)


def run(on, name, results, *operands, aliases=None, **attributes):
    """Inside of jit, on that device; NumPy arrays, or one."""
    function = jax.jit(lambda *given: jax_ops.call(name, results, *given, aliases=aliases, **attributes))
    return jax.tree.map(np.asarray, function(*(jax.device_put(operand, on) for operand in operands)))


def chunks(bits, n_chunks, order="big"):
    packed = np.packbits(bits.ravel(), bitorder=order)
    size = -(-len(packed) // n_chunks)
    return np.pad(packed, (0, n_chunks * size - len(packed))).reshape(n_chunks, size)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_signs_are_numpy_s_there_and_back(on, dtype, order):
    x = jnp.asarray(VALUES).astype(dtype)
    signs = ~(np.asarray(x, np.float32) < 0)
    packed = run(on, "pack_signs", jax_ops.chunks_of(x.size, 4), x, order=ORDERS[order])
    assert np.array_equal(packed, chunks(signs, 4, order))
    back = run(on, "unpack_signs", shaped(x.shape, dtype), packed, order=ORDERS[order])
    assert back.dtype == x.dtype and np.array_equal(back, np.where(signs, 1, -1))
    scales = np.array([0.5, 1, 2, 4], np.float32)
    scaled = run(on, "unpack_signs", shaped((4 * packed.shape[1] * 8,), dtype), packed, scales, order=ORDERS[order])
    bits = np.unpackbits(packed, axis=1, bitorder=order)
    assert np.array_equal(scaled, np.where(bits, scales[:, None], -scales[:, None]).ravel())


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32"])
def test_truth_is_numpy_s_there_and_back(on, dtype):
    x = (RNG.random((27, 37)) < 0.5).astype(dtype)
    packed = run(on, "pack_chunks", jax_ops.chunks_of(x.size, 3), x, order=ORDERS["big"])
    assert np.array_equal(packed, chunks(x != 0, 3))
    back = run(on, "unpack_chunks", shaped(x.shape, dtype), packed, order=ORDERS["big"])
    assert back.dtype == x.dtype and np.array_equal(back, x)


@pytest.mark.parametrize("order", ORDERS)
def test_bits_along_an_axis_are_numpy_s(on, order):
    x = RNG.integers(0, 2, (9, 21), np.int32)
    for axis in (0, 1):
        expected = np.packbits(x != 0, axis, order)
        packed = run(on, "pack_bits", shaped(expected.shape), x, axis=np.int32(axis), order=ORDERS[order])
        assert np.array_equal(packed, expected)
        back = run(on, "unpack_bits", shaped(x.shape), packed, axis=np.int32(axis), order=ORDERS[order])
        assert np.array_equal(back, x)
    assert np.array_equal(run(on, "pack_bits", shaped((24,)), x, axis=NONE, order=ORDERS[order]),
                          np.packbits(x.ravel(), bitorder=order))  # fmt: skip


@pytest.mark.parametrize("voters", [1, 3, 4])
def test_votes_go_to_the_majority_and_ties_by_turns(on, voters):
    ballots = RNG.integers(0, 256, (voters, 50), np.uint8)
    bits = np.unpackbits(ballots, axis=1).reshape(voters, 50, 8)
    for turn in (0, 1, 6):
        in_turn = bits[(np.arange(50) + turn) % voters, np.arange(50)]
        ayes = bits.sum(0, dtype=int)
        expected = np.packbits(np.where(2 * ayes == voters, in_turn, 2 * ayes > voters), axis=1).ravel()
        assert np.array_equal(run(on, "vote_signs", shaped((50,)), ballots, turn=np.uint64(turn)), expected)
        rolled = jax.jit(jax_ops.vote_signs)(jax.device_put(ballots, on), turn)  # a turn that is traced
        assert np.array_equal(np.asarray(rolled), expected)


@pytest.mark.parametrize("aliases", [None, {1: 2}], ids=["copied", "in place"])
def test_error_feedback_is_its_formula_and_leaves_the_old_error(on, aliases):
    gradient, error = RNG.standard_normal((2, 1000), np.float32)
    kept = error.copy()
    total = gradient + error
    results = [jax_ops.chunks_of(1000, 2), shaped((1,), jnp.float32), shaped((1000,), jnp.float32),
               shaped((jax_ops.workspace_bytes(1000),))]  # fmt: skip
    old = jax.device_put(error, on)
    packed, scale, new, _ = run(on, "onebit_compress", results, gradient, old, aliases=aliases, rule=np.int32(0))
    assert np.array_equal(packed, chunks(total >= 0, 2))
    assert scale[0] == pytest.approx(np.sqrt(np.mean(total.astype(np.float64) ** 2)), rel=1e-6)
    np.testing.assert_allclose(new, total - np.where(total >= 0, scale, -scale), rtol=1e-6, atol=1e-6)
    assert np.array_equal(np.asarray(old), kept)


def test_a_batch_goes_one_by_one(on):
    x = jax.device_put(VALUES, on)
    packed = jax.jit(jax.vmap(lambda row: jax_ops.pack_signs(row, 2)))(x)
    assert np.array_equal(np.asarray(packed), [chunks(~(row < 0), 2) for row in VALUES])


def test_nothing_at_all_is_packed(on):
    packed = run(on, "pack_signs", shaped((2, 0)), np.zeros((0, 3), np.float32), order=ORDERS["big"])
    assert packed.shape == (2, 0)
    assert run(on, "unpack_signs", shaped((0,), jnp.float32), packed, order=ORDERS["big"]).shape == (0,)


@pytest.mark.parametrize("name, results, operands, attributes, words", [
    ("pack_chunks", shaped((1, 125)), [np.zeros(999, np.float32)], BIG, "gc_pack_signs_into packs"),
    ("pack_signs", shaped((1, 125)), [np.zeros(999, np.int32)], BIG, "int32"),
    ("pack_signs", shaped((2, 5)), [np.zeros(999, np.float32)], BIG, "2 chunks of 63 bytes expected"),
    ("pack_signs", shaped((1, 125)), [np.zeros(999, np.float32)], {"order": np.int32(7)}, "order: "),
    ("pack_bits", shaped((125,)), [np.zeros(999, bool)], {"axis": np.int32(1), **BIG}, "axis: 1"),
    ("pack_chunks", shaped((1, 1)), [np.zeros(8, np.complex64)], BIG, "dtype code 5 is not one of"),
    ("unpack_signs", shaped((8,), jnp.float32), [np.zeros((1, 1), np.uint8), *[np.ones(1, np.float32)] * 2],
     BIG, "chunks and scales expected"),
    ("vote_signs", shaped((2,)), [np.zeros((0, 2), np.uint8)], {"turn": np.uint64(0)}, "voter"),
])  # fmt: skip
def test_what_is_refused_is_said_in_the_librarys_words(on, name, results, operands, attributes, words):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: ") as error:
        run(on, name, results, *operands, **attributes)
    assert words in str(error.value)


def test_the_handlers_for_cuda_hand_on_the_card_and_the_stream(tmp_path):
    program = tmp_path / "xla"
    include = [f"-I{jax_ops.ROOT / 'include'}", f"-isystem{jax.ffi.include_dir()}"]
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", *include, str(HERE / "xla.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_example_holds(capsys):
    jax_ops.main()
    said = capsys.readouterr().out
    assert "4 ranks vote inside of jit, step 1: the majority's sign on all" in said and "WRONG" not in said
