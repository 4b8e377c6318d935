"""GradCodec with NumPy: arrays in and out without a copy, through python/gradcodec.

    PYTHONPATH=python python3 examples/python/numpy_ctypes.py

Needs NumPy 2.2.5 or newer, where imported arrays are writable.
"""

import numpy as np
from gradcodec import LITTLE, GradCodec, GradCodecError


def main():
    gradcodec = GradCodec()
    gradient = np.random.default_rng(1).standard_normal((25, 40), np.float32)
    positive = gradient >= 0

    # For 4 ranks; 1000 bits are 125 bytes, so the last chunk ends in 3 zeros.
    chunks = [np.from_dlpack(chunk) for chunk in gradcodec.pack_chunks(positive, 4)]
    print(f"{gradient.nbytes} bytes of gradient, {len(chunks)} chunks of {chunks[0].size} bytes of signs")
    assert np.concatenate(chunks).tobytes() == np.packbits(positive).tobytes() + bytes(3)

    back = np.from_dlpack(gradcodec.unpack_chunks(chunks, positive.size))
    print(f"unpacked: {back.size} of {back.dtype}, as they were: {np.array_equal(back, positive.ravel())}")
    assert np.array_equal(back, positive.ravel())

    # Any strides: the transpose is not copied.
    columns = np.from_dlpack(gradcodec.pack_bits(positive.T, axis=1, order=LITTLE))
    print(f"packed along an axis: {positive.T.shape} to {columns.shape}")
    assert np.array_equal(columns, np.packbits(positive.T, axis=1, bitorder="little"))
    bits = np.from_dlpack(gradcodec.unpack_bits(columns, axis=1, count=25, order=LITTLE))
    assert np.array_equal(bits, positive.T)

    columns[:] = 0  # NumPy owns the memory now: writable, and freed with the array

    # Packs floats into existing memory, and unpacks to floats.
    rows, signs = np.empty((4, gradcodec.chunk_bytes(gradient.size, 4)), np.uint8), np.empty_like(gradient)
    gradcodec.pack_signs_into(gradient, rows)
    gradcodec.unpack_chunks_into(rows, signs)
    print(f"signs of {gradient.dtype} packed and unpacked: {np.array_equal(signs, positive)}")
    assert np.array_equal(rows, chunks) and np.array_equal(signs, positive)

    try:
        gradcodec.pack_bits(positive, axis=2)
    except GradCodecError as error:
        print(f"refused, status {error.status}: {error}")
    else:
        raise AssertionError("an array of two dimensions has no axis 2")


if __name__ == "__main__":
    main()
