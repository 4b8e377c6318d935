"""Legacy capsules: the limits of DLPack before 1.0.

    PYTHONPATH=python python3 examples/python/numpy_ctypes_legacy.py

The capsule "dltensor" has no read-only flag. So NumPy exports no read-only array in one, and imports every one as
read-only. The package gradcodec requests the newer form, accepts either, and returns the form that the caller requests.
"""

import numpy as np
from gradcodec import GradCodec, GradCodecError


class Legacy:
    """Wraps an array or tensor like one from before DLPack 1.0: `__dlpack__` takes no arguments."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def main():
    gradcodec = GradCodec()
    positive = np.random.default_rng(1).standard_normal(1000, np.float32) >= 0
    chunks = [np.from_dlpack(Legacy(chunk)) for chunk in gradcodec.pack_chunks(Legacy(positive), 5)]
    print(f"{len(chunks)} chunks of {chunks[0].size} bytes, writable: {chunks[0].flags.writeable}")
    assert np.array_equal(np.concatenate(chunks), np.packbits(positive)) and not chunks[0].flags.writeable

    positive.flags.writeable = False
    packed = np.from_dlpack(gradcodec.pack_bits(positive))
    print(f"packed from a read-only array: {np.array_equal(packed, np.packbits(positive))}")
    assert np.array_equal(packed, np.packbits(positive)) and packed.flags.writeable
    try:
        gradcodec.pack_bits(Legacy(positive))
    except BufferError as error:
        print(f"NumPy refused: {error}")
    else:
        raise AssertionError("a legacy tensor cannot say that it is read-only")
    try:
        gradcodec.unpack_bits_into(packed, positive)
    except GradCodecError as error:
        print(f"refused, status {error.status}: {error}")
    else:
        raise AssertionError("a read-only array was written to")


if __name__ == "__main__":
    main()
