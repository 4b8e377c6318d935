"""GradCodec with JAX, on the CPU and on CUDA: arrays in and out without a copy, in JAX's legacy capsules.

    PYTHONPATH=python python3 examples/python/jax_bits.py

JAX's arrays are immutable, and JAX chooses its streams, so this uses the functions that return new tensors. These are
complete on return, for any stream of JAX.
"""

import os

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise JAX takes most of the GPU memory
try:
    import jax
    import jax.numpy as jnp
except ImportError:
    print("SKIPPED: no JAX here")
    raise SystemExit
from gradcodec import GradCodec


def devices():
    yield jax.devices("cpu")[0]
    try:
        yield jax.devices("cuda")[0]
    except RuntimeError:
        print("SKIPPED: no CUDA device that JAX could use, so CUDA was not shown")


def show(gradcodec, device):
    # The chunks are multiples of 256 bytes: JAX copies arrays with a smaller alignment.
    gradient = jax.device_put(np.random.default_rng(1).standard_normal((128, 64), np.float32), device)
    positive = gradient >= 0
    expected = np.packbits(np.asarray(positive)).reshape(4, 256)

    chunks = gradcodec.pack_chunks(positive, 4)
    addresses = [chunk.address for chunk in chunks]
    rows = [jax.dlpack.from_dlpack(chunk) for chunk in chunks]
    same = [row.unsafe_buffer_pointer() for row in rows] == addresses
    print(f"{device.platform}: {gradient.nbytes} bytes of gradient, {len(rows)} chunks of {rows[0].nbytes} bytes, "
          f"not copied: {same}")  # fmt: skip
    assert same and np.array_equal(np.stack(rows), expected)

    truth = jax.dlpack.from_dlpack(gradcodec.unpack_chunks(rows, positive.size))
    signs = jnp.where(truth, 1.0, -1.0).reshape(gradient.shape)  # works in JAX, compiled or not
    print(f"{device.platform}: unpacked, as they were: {bool((signs == jnp.where(positive, 1.0, -1.0)).all())}")
    assert bool((signs == jnp.where(positive, 1.0, -1.0)).all()) and truth.devices() == {device}


def main():
    gradcodec = GradCodec()
    for device in devices():
        show(gradcodec, device)


if __name__ == "__main__":
    main()
