"""Converts arrays between NumPy, CuPy and PyTorch: CuPy's asarray() and asnumpy(), and astype(), with their cost.

    PYTHONPATH=python python3 examples/python/arrays.py

Between frameworks on one device nothing is copied; between devices, layouts and dtypes one pass copies the data.
Without a GPU, only the CPU part runs.
"""

import time

import numpy as np
from gradcodec import CPU, CUDA, GradCodec


def asarray(gradcodec, array, xp, device):
    """Returns a compact copy on a device, complete on return. The library's memory is freed with the array."""
    return xp.from_dlpack(gradcodec.tensor_to_device(array, device))


def asnumpy(gradcodec, array):
    return asarray(gradcodec, array, np, (CPU, 0))


def astype(gradcodec, array, like, stream=1):
    """Casts into memory of a framework, with the dtype, layout and device of `like`."""
    gradcodec.copy_into(array, like, stream)
    return like


def cost(what, n_bytes, work, wait=lambda: None):
    """Runs `work` five times and prints the shortest time; `n_bytes`: bytes read and written."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        result = work()
        wait()
        seconds.append(time.perf_counter() - start)
    print(f"{what}: {n_bytes >> 20} MiB moved, {min(seconds) * 1e3:.3f} ms, {n_bytes / min(seconds) / 1e9:.1f} GB/s")
    return result


def on_the_cpu(gradcodec, array):
    turned = cost("numpy: asarray of a transposed array", 2 * array.nbytes, lambda: asnumpy(gradcodec, array.T))
    assert turned.flags.c_contiguous and np.array_equal(turned, array.T)

    half = np.empty(array.shape, np.float16)
    cost("numpy: astype float32 to float16", array.nbytes + half.nbytes, lambda: astype(gradcodec, array, half))
    assert np.array_equal(half, array.astype(np.float16))

    # NumPy leaves casts to integers undefined for values out of range; here they saturate, and NaN becomes 0.
    numbers = np.array([1.9, -1.9, 1e10, -np.inf, np.nan], np.float32)
    whole = astype(gradcodec, numbers, np.empty(5, np.int32))
    print(f"numpy: astype float32 to int32: {numbers.tolist()} are {whole.tolist()}")
    assert whole.tolist() == [1, -1, 2**31 - 1, -(2**31), 0]

    image = astype(gradcodec, np.arange(3, dtype=np.uint8), np.empty((2, 4, 3), np.float32))  # broadcast
    assert np.array_equal(image, np.broadcast_to([0, 1, 2], (2, 4, 3)))


def with_torch_on_the_cpu(gradcodec, array, torch):
    shared = torch.from_dlpack(array)
    print(f"torch: from numpy, not copied: {shared.data_ptr() == array.ctypes.data}")
    narrow = torch.empty(array.T.shape, dtype=torch.bfloat16)
    work = lambda: astype(gradcodec, array.T, narrow)  # noqa: E731
    cost("torch: astype float32 to bfloat16 of a transposed array", array.nbytes * 3 // 2, work)
    assert torch.equal(narrow, shared.T.to(torch.bfloat16))


def on_cuda(gradcodec, array, cupy):
    device, stream = (CUDA, cupy.cuda.Device().id), cupy.cuda.get_current_stream()
    there = cost("cupy: asarray", array.nbytes, lambda: asarray(gradcodec, array, cupy, device))
    assert bool((there == cupy.asarray(array)).all())
    half = cupy.empty(array.T.shape, cupy.float16)
    work = lambda: astype(gradcodec, there.T, half, stream)  # noqa: E731
    cost("cupy: astype float32 to float16, transposed", array.nbytes * 3 // 2, work, stream.synchronize)
    assert bool((half == there.T.astype(cupy.float16)).all())

    cost("cupy: copy_into from numpy", array.nbytes, lambda: astype(gradcodec, array, there, stream))
    back = cost("cupy: asnumpy", array.nbytes, lambda: asnumpy(gradcodec, there))
    assert np.array_equal(back, array)
    return there


def with_torch_on_cuda(gradcodec, there, torch):
    shared = torch.from_dlpack(there)
    print(f"torch: from cupy, not copied: {shared.data_ptr() == there.data.ptr}")
    stream = torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.default_stream())
    narrow = torch.empty(shared.shape, dtype=torch.bfloat16, device=shared.device)
    work = lambda: astype(gradcodec, shared, narrow, stream)  # noqa: E731
    cost("torch: astype float32 to bfloat16", there.nbytes * 3 // 2, work, stream.synchronize)
    assert torch.equal(narrow, shared.to(torch.bfloat16))
    assert np.array_equal(asnumpy(gradcodec, narrow.float()), narrow.float().cpu().numpy())


def main():
    gradcodec = GradCodec()
    array = np.random.default_rng(1).standard_normal((1024, 2048), np.float32)
    on_the_cpu(gradcodec, array)
    try:
        import torch
    except ImportError:
        print("no PyTorch here: its part was left out")
        torch = None
    else:
        with_torch_on_the_cpu(gradcodec, array, torch)
    try:
        import cupy
    except ImportError:
        print("SKIPPED: no CuPy here, so CUDA was not shown")
        return
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        print("SKIPPED: no CUDA device, so CUDA was not shown")
        return
    there = on_cuda(gradcodec, array, cupy)
    if torch:
        with_torch_on_cuda(gradcodec, there, torch)


if __name__ == "__main__":
    main()
