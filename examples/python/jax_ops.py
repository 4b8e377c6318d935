"""GradCodec inside jax.jit and shard_map, on the CPU and on CUDA: signSGD with majority vote, and error feedback.

    python3 examples/python/jax_ops.py

Builds jax_ops.cpp, three lines around gradcodec/xla.hpp, with g++ and JAX's own headers (no CUDA toolkit). Needs JAX,
NumPy, and the library: built in this tree, or named by GRADCODEC_LIBRARY.
"""

import ctypes
import os
import subprocess

import numpy as np

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # the CPU as four devices
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
try:
    import jax
    import jax.numpy as jnp
except ImportError:
    print("SKIPPED: no JAX here")
    raise SystemExit
from jax.sharding import Mesh, PartitionSpec
from this_tree import ROOT, library

BIG, RMS = np.int32(0), np.int32(0)
OPERATIONS = (
    "pack_chunks", "pack_signs", "unpack_chunks", "unpack_signs", "pack_bits", "unpack_bits", "vote_signs",
    "onebit_compress",
)  # fmt: skip


def build(flags=()):
    """The handlers as a library. Not with -pedantic: gcc refuses XLA's headers then."""
    made = ROOT / "build" / f"gradcodec-jax-{jax.__version__}" / "libgradcodec_xla.so"
    made.parent.mkdir(parents=True, exist_ok=True)
    print(f"building {made.relative_to(ROOT)}", flush=True)
    subprocess.run(
        ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", *flags, f"-I{ROOT / 'include'}",
         f"-isystem{jax.ffi.include_dir()}", str(ROOT / "examples_cpp" / "jax_ops.cpp"), "-o", str(made),
         str(library()), f"-Wl,-rpath,{library().parent}"], check=True,
    )  # fmt: skip
    return made


def register():
    """Gives JAX the handlers, as "gradcodec_pack_signs" and so on."""
    handlers = ctypes.CDLL(str(build()))
    prepare = jax.ffi.pycapsule(handlers.gradcodec_prepare_cuda)
    for name in OPERATIONS:
        on_cpu, on_cuda = (jax.ffi.pycapsule(getattr(handlers, f"gradcodec_{name}_{on}")) for on in ("cpu", "cuda"))
        jax.ffi.register_ffi_target(f"gradcodec_{name}", on_cpu, platform="cpu")
        jax.ffi.register_ffi_target(f"gradcodec_{name}", {"initialize": prepare, "execute": on_cuda}, platform="CUDA")


def workspace_bytes(n):
    gradcodec = ctypes.CDLL(str(library()))
    gradcodec.gc_onebit_workspace_bytes.argtypes = [ctypes.c_int64]
    gradcodec.gc_onebit_workspace_bytes.restype = ctypes.c_int64
    return gradcodec.gc_onebit_workspace_bytes(n)


def call(name, results, *operands, aliases=None, **attributes):
    options = {"vmap_method": "sequential", "input_output_aliases": aliases}
    return jax.ffi.ffi_call(f"gradcodec_{name}", results, **options)(*operands, **attributes)


def chunks_of(n, n_chunks):
    bytes_of_all = -(-n // 8)
    return jax.ShapeDtypeStruct((n_chunks, -(-bytes_of_all // n_chunks)), jnp.uint8)  # as gc_chunk_bytes() says


def pack_signs(x, n_chunks=1):
    return call("pack_signs", chunks_of(x.size, n_chunks), x, order=BIG)


def unpack_signs(chunks, like, *scale):
    return call("unpack_signs", jax.ShapeDtypeStruct(like.shape, like.dtype), chunks, *scale, order=BIG)


def vote_signs(ballots, turn):
    """In a tie voter number `turn` has its way in byte 0, the next in byte 1: `turn` may be traced."""
    verdict = jax.ShapeDtypeStruct(ballots.shape[1:], jnp.uint8)
    return call("vote_signs", verdict, jnp.roll(ballots, -turn, axis=0), turn=np.uint64(0))


def onebit_compress(gradient, error, n_chunks=1):
    """Signs of gradient plus error, their scale, and the new error."""
    scale, kept = jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct(error.shape, error.dtype)
    workspace = jax.ShapeDtypeStruct((workspace_bytes(gradient.size),), jnp.uint8)
    results = [chunks_of(gradient.size, n_chunks), scale, kept, workspace]
    return call("onebit_compress", results, gradient, error, aliases={1: 2}, rule=RMS)[:3]


def vote(gradient, step):
    """The sign that most ranks have, +1 or -1: each rank counts its part, and one bit per element is on the way."""
    chunks = pack_signs(gradient, jax.lax.axis_size("rank"))
    ballots = jax.lax.all_to_all(chunks, "rank", 0, 0, tiled=True)
    verdicts = jax.lax.all_gather(vote_signs(ballots, step), "rank")
    return unpack_signs(verdicts, gradient)


@jax.jit
def steps_with_feedback(gradients):
    """What is received of each gradient: what one step loses, the next one makes up for."""

    def step(error, gradient):
        bits, scale, error = onebit_compress(gradient, error)
        return error, unpack_signs(bits, gradient, scale)

    return jax.lax.scan(step, jnp.zeros_like(gradients[0]), gradients)


def hold(what, holds):
    print(f"{'' if holds else 'WRONG: not true that '}{what}")
    if not holds:
        raise SystemExit(1)


def show(devices):
    platform, ranks = devices[0].platform, len(devices)
    gradients = np.random.default_rng(1).standard_normal((ranks, 999), np.float32)
    per_rank = PartitionSpec("rank")
    mesh = Mesh(np.array(devices), ("rank",))
    voted = jax.jit(jax.shard_map(
        vote, mesh=mesh, in_specs=(per_rank, PartitionSpec()), out_specs=per_rank, check_vma=False
    ))  # fmt: skip
    for step in range(2):
        received = np.asarray(voted(gradients, step))
        majority = np.sign(np.where(gradients >= 0, 1, -1).sum(0))  # 0 in a tie, which goes by turns
        same = (received == received[0]).all() and (received == majority)[:, majority != 0].all()
        hold(f"{platform}: {ranks} ranks vote inside of jit, step {step}: the majority's sign on all", same)

    gradients = jnp.array([[1, -7], [2, 4]], jnp.float32, device=devices[0])
    error, received = steps_with_feedback(gradients)
    fed_back = received.ravel().tolist() == [5, -5, -2, 2] and not error.any()
    hold(f"{platform}: with error feedback 1, -7, 2 and 4 are received as 5, -5, -2 and 2", fed_back)

    try:
        jax.block_until_ready(call("pack_chunks", chunks_of(2, 1), gradients[0], order=BIG))
        hold(f"{platform}: floats are refused as truth", False)
    except jax.errors.JaxRuntimeError as error:
        hold(f"{platform}: refused: {str(error).splitlines()[0]}", "gc_pack_signs" in str(error))


def main():
    register()
    show(jax.devices("cpu"))
    try:
        gpus = jax.devices("cuda")
    except RuntimeError:
        print("SKIPPED: no CUDA device that JAX could use, so CUDA was not shown")
    else:
        show(gpus)


if __name__ == "__main__":
    main()
