"""Data-parallel training in JAX with compressed gradients: gradcodec.jax inside jit and shard_map, on the CPU as four
devices and, if JAX has CUDA, on its GPUs.

    python3 examples/python/jax_codec.py

Needs JAX, NumPy and the wheel, and no compiler. Trains one network with float32 gradients, with INT8, and with INT4,
which passes its errors from step to step as an array.
"""

import os

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

import gradcodec.jax

STEPS, BATCH, RATE = 200, 64, 0.5


def loss(weights, images, answers):
    hidden = jnp.tanh(images @ weights["in"] + weights["bias"])
    return jnp.mean((hidden @ weights["out"] - answers) ** 2)


def train(devices, codec):
    """Returns the final loss, with gradients of `codec`, or of float32 if it is None."""
    ranks, rng = len(devices), np.random.default_rng(0)
    teacher = rng.standard_normal((32, 8)).astype(np.float32) / 6
    weights = {
        "in": jnp.asarray(rng.standard_normal((32, 64), np.float32) / 6), "bias": jnp.zeros(64),
        "out": jnp.asarray(rng.standard_normal((64, 8), np.float32) / 8),
    }  # fmt: skip
    errors = codec.errors(weights, ranks) if codec else None
    of_all, per_rank = PartitionSpec(), PartitionSpec("data")

    def step(weights, errors, images, answers):
        found, gradients = jax.value_and_grad(loss)(weights, images, answers)
        if codec:
            gradients, errors = gradcodec.jax.all_reduce(gradients, "data", codec, errors)
        else:
            gradients = jax.lax.pmean(gradients, "data")
        weights = jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients)
        return weights, errors, jax.lax.pmean(found, "data")

    run = jax.jit(jax.shard_map(
        step, mesh=Mesh(np.array(devices), ("data",)), in_specs=(of_all, per_rank, per_rank, per_rank),
        out_specs=(of_all, per_rank, of_all), check_vma=False,
    ), donate_argnums=(0, 1))  # fmt: skip
    for _ in range(STEPS):
        images = rng.standard_normal((BATCH * ranks, 32), np.float32)
        weights, errors, found = run(weights, errors, images, np.sin(images @ teacher))
        jax.block_until_ready(found)  # XLA's CPU devices deadlock if 32 steps are under way
    return float(found)


def show(devices):
    where = f"{devices[0].platform}, {len(devices)} ranks"
    plain = train(devices, None)
    print(f"{where}: float32: loss {plain:.4f}")
    for kind in "int8", "int4":
        compressed = train(devices, gradcodec.jax.Codec(kind))
        alike = abs(compressed / plain - 1) < 0.05
        print(f"{where}: {kind}: loss {compressed:.4f}, within 5 %: {alike}")
        if not alike:
            raise SystemExit(1)


def main():
    show(jax.devices("cpu"))
    try:
        gpus = jax.devices("cuda")
    except RuntimeError:
        print("SKIPPED: no CUDA device that JAX could use, so CUDA was not shown")
    else:
        show(gpus)


if __name__ == "__main__":
    main()
