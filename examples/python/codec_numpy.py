"""Reads payloads with NumPy alone, by the format in docs/NUMERICS.md, and compares with the library.

    PYTHONPATH=python python3 examples/python/codec_numpy.py
"""

import struct

import numpy as np
from gradcodec import ONEBIT, GradCodec


def read(payload, sizes):
    """Returns the tensors that a payload of ONEBIT or SIGN encodes, as float32."""
    names = "magic version codec values results rule reduction block n_chunks chunk segments flags elements bytes digest"
    digest = 0xCBF29CE484222325
    for byte in np.asarray(sizes, "<i8").tobytes():
        digest = (digest ^ byte) * 0x100000001B3 % 2**64

    bits, scales = [], []  # over all chunks
    n_chunks = struct.unpack_from("<I", payload, 16)[0]
    for number, chunk in enumerate(np.split(payload, n_chunks)):
        field = dict(zip(names.split(), struct.unpack_from("<4sHHBBBBIIIIIQQQ", chunk)))
        if field["magic"] != b"GCPL" or field["version"] != 1 or field["codec"] not in (1, 2):
            raise ValueError(f"chunk {number} is not of a payload that this reads: {field}")
        if (field["chunk"], field["segments"], field["digest"]) != (number, len(sizes), digest) or field["flags"] & 1:
            raise ValueError(f"chunk {number} is of other tensors, or corrupt: {field}")
        first = (64 + 4 * len(sizes) + 15) // 16 * 16
        bits.append(chunk[first : first + field["bytes"]])
        scales.append(chunk[64 : 64 + 4 * len(sizes)].view("<f4"))

    tensors, begin = [], 0
    bits, chunk_of = np.concatenate(bits), np.repeat(np.arange(n_chunks), [part.size for part in bits])
    for segment, size in enumerate(sizes):
        end = begin + (size + 7) // 8  # each tensor begins at a new byte
        sign = np.unpackbits(bits[begin:end])[:size] * np.float32(2) - np.float32(1)
        scale = np.array([of_chunk[segment] for of_chunk in scales])[chunk_of[begin:end]]
        tensors.append(np.repeat(scale, 8)[:size] * sign)
        begin = end
    return tensors


def main():
    gradcodec, rng, sizes = GradCodec(), np.random.default_rng(1), [1000, 0, 77, 12345]
    codec = gradcodec.codec(ONEBIT, sizes, n_chunks=4)
    gradient = [rng.standard_normal(size, np.float32) * 10.0**-k for k, size in enumerate(sizes)]
    memory = np.zeros(codec.payload_bytes + 16, np.uint8)
    payload = memory[-memory.ctypes.data % 16 :][: codec.payload_bytes]  # aligned to 16 bytes, as payloads must be

    codec.encode([g.astype("f4") for g in gradient], payload)
    ours, theirs = read(payload, sizes), [np.zeros(size, np.float32) for size in sizes]
    codec.decode(payload, theirs)
    for size, one, other in zip(sizes, ours, theirs):
        assert one.tobytes() == other.tobytes(), f"the tensor of {size} elements differs"
    print(f"{4 * sum(sizes)} bytes of gradient, {payload.size} of payload: NumPy and the library read the same")

    payload[48] ^= 1  # the digest of another set of tensors
    try:
        read(payload, sizes)
    except ValueError as error:
        print(f"refused: {str(error)[:40]}...")
    else:
        raise AssertionError("a payload of other tensors was read")


if __name__ == "__main__":
    main()
