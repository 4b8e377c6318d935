"""How fast the GPU copies: layouts and casts as a fraction of a device-to-device copy, and memory of the host in GB/s.

Measured as in bench/gpu.py, beside torch and, where it can do the same, the driver.
"""

import ctypes
import json
import pathlib
import statistics
import sys
import time
from ctypes import c_size_t, c_uint64, c_void_p

import gpu
import report
from cpu import BFLOAT16, ROOT
from gpu import COPY, SAMPLES, Bench, calls_for, significant

SIDES = [(16384, 16384), (16383, 16381)]
QUICK_SIDES = [(16384, 16384)]
HOST_BYTES = [1 << 20, 16 << 20, 1 << 30]
QUICK_HOST_BYTES = [1 << 30]
BF16 = "bfloat16"


def of_cupy(dtype):
    return "uint16" if dtype == BF16 else dtype


def code_of(dtype):
    """Of what CuPy or bench/cpu.py lacks."""
    return {BF16: BFLOAT16, "complex128": 5}.get(dtype)


class Torch:
    """CuPy's arrays as torch's tensors."""

    def __init__(self, bench):
        import torch

        self.torch = torch
        self.stream = torch.cuda.ExternalStream(bench.stream.ptr)
        torch.cuda.set_stream(self.stream)

    def tensor(self, array, dtype):
        tensor = self.torch.from_dlpack(array.view("int16") if dtype in (BF16, "uint16") else array)
        return tensor.view(self.torch.bfloat16) if dtype == BF16 else tensor

    def copies(self, pairs, dtypes):
        tensors = [[self.tensor(array, dtype) for array, dtype in zip(pair, dtypes)] for pair in pairs]

        def enqueue():
            for src, dst in tensors:
                dst.copy_(src)

        return enqueue


def driver_copies(bench, pairs):
    def enqueue():
        for src, dst in pairs:
            arguments = c_uint64(dst.data.ptr), c_uint64(src.data.ptr), c_size_t(dst.nbytes), c_void_p(bench.stream.ptr)
            assert bench.driver.cuMemcpyAsync(*arguments) == 0

    return enqueue


# --- on the card ------------------------------------------------------------------------------------------------------


def copies(sides):
    """What is copied: a name, its shape in words, the dtypes, the shape of the source's memory and the view of it, the same
    of the target, and how much of either side's memory a call touches for each element."""
    whole, plain = (lambda memory: memory), []
    for name, source, target in (
        ("compact", "float32", "float32"),
        ("float32 to bfloat16", "float32", BF16),
        ("bfloat16 to float32", BF16, "float32"),
        ("float32 to float16", "float32", "float16"),
        ("float16 to float32", "float16", "float32"),
        ("float64 to float32", "float64", "float32"),
        ("float32 to float64", "float32", "float64"),
        ("int32 to float32", "int32", "float32"),
        ("int64 to float32", "int64", "float32"),
        ("uint8 to float32", "uint8", "float32"),
        ("float32 to uint8", "float32", "uint8"),
        ("int64 to int32", "int64", "int32"),
        ("uint8 to int16", "uint8", "int16"),
        ("float64 to bfloat16", "float64", BF16),
        ("float16 to bfloat16", "float16", BF16),
    ):
        for n in (2**28, 2**28 - 1, 2**20):
            plain.append((name, f"{n}", source, target, (n,), whole, (n,), whole, 1, 1))
        n = 2**28
        plain.append((name, f"{n}, from [1:]", source, target, (n + 1,), lambda m: m[1:], (n,), whole, 1, 1))
        plain.append((name, f"{n}, into [1:]", source, target, (n,), whole, (n + 1,), lambda m: m[1:], 1, 1))
    for dtype in ("uint8", "uint16"):
        n = 2**30 // (1 if dtype == "uint8" else 2)
        for off in 1, 3:
            view = (lambda k: lambda m: m[k:])(off)
            plain.append((f"compact {dtype}", f"{n}, from [{off}:]", dtype, dtype, (n + off,), view, (n,), whole, 1, 1))

    def transposed(memory):
        return memory.T

    matrices = []
    for rows, columns in sides:
        shape, words, turned = (rows, columns), f"{rows} x {columns}", (columns, rows)
        for dtype in ("uint8", "uint16", "float32", "float64", "complex128"):
            if dtype == "complex128":
                shape, words, turned = (rows // 2, columns), f"{rows // 2} x {columns}", (columns, rows // 2)
            matrices.append((f"transposed {dtype}", words, dtype, dtype, shape, transposed, turned, whole, 1, 1))
        shape, words, turned = (rows, columns), f"{rows} x {columns}", (columns, rows)
        for source, target in ("float32", BF16), (BF16, "float32"), ("float32", "float16"), ("int32", "float32"):
            name = f"transposed {source} to {target}"
            matrices.append((name, words, source, target, shape, transposed, turned, whole, 1, 1))
        for dtype in ("uint8", "float32", "float64"):
            every = (rows, columns // 2 * 2)
            half = (rows, columns // 2)
            matrices.append((f"every other {dtype}", words, dtype, dtype, every, lambda m: m[:, ::2], half, whole, 2, 1))
            matrices.append((f"to every other {dtype}", words, dtype, dtype, half, whole, every, lambda m: m[:, ::2], 1, 4))
            matrices.append((f"reversed {dtype}", words, dtype, dtype, shape, lambda m: m[:, ::-1], shape, whole, 1, 1))
            inner = (rows - 1, columns - 1)
            matrices.append((f"rows {dtype}", words, dtype, dtype, shape, lambda m: m[1:, 1:], inner, whole, 1, 1))
        rows_cast = (rows - 1, columns - 1)
        matrices.append(("rows float32 to bfloat16", words, "float32", BF16, shape, lambda m: m[1:, 1:], rows_cast, whole, 1, 1))
    # Images: channels last and first, and patches of them.
    images = (64, 512, 512, 3)
    moved = (64, 3, 512, 512)
    for dtype in ("uint8", "float32"):
        words = "64 x 512 x 512 x 3"
        matrices.append((f"to channels first {dtype}", words, dtype, dtype, images, lambda m: m.transpose(0, 3, 1, 2), moved, whole, 1, 1))
        matrices.append((f"to channels last {dtype}", words, dtype, dtype, moved, lambda m: m.transpose(0, 2, 3, 1), images, whole, 1, 1))
    patches = (64, 3, 32, 16, 32, 16)
    matrices.append((
        "patches float32", "64 x 3 x 32 x 16 x 32 x 16", "float32", "float32", patches,
        lambda m: m.transpose(0, 2, 4, 1, 3, 5), (64, 32, 32, 3, 16, 16), whole, 1, 1,
    ))  # fmt: skip
    return plain + matrices


def copy_row(bench, torch, case):
    kind, words, source, target, source_shape, source_view, target_shape, target_view, touched, written = case
    cp = bench.cp

    def pair():
        return source_view(bench.random(source_shape, source)), target_view(cp.empty(target_shape, of_cupy(target)))

    first = pair()
    moved = first[0].nbytes * touched + first[1].nbytes * written
    calls = calls_for(moved)
    pairs = [first, *(pair() for _ in range(calls - 1))]
    contenders = {"ours": bench.ours(COPY, pairs, codes=(code_of(source), code_of(target)))}
    if source == target and all(array.flags.c_contiguous for array in first):
        contenders["driver"] = driver_copies(bench, pairs)
    if all(stride >= 0 for array in first for stride in array.strides):  # torch has no others
        contenders["torch"] = torch.copies(pairs, (source, target))
    bench.measure_yardsticks(1)
    samples, failures = bench.measure(contenders, calls)
    return {"kind": kind, "shape": words, "bytes": moved, "calls": calls, "seconds": samples, "failures": failures}


# --- the host ---------------------------------------------------------------------------------------------------------


def until_done(bench, contenders, calls):
    """Seconds of the caller, all taking turns."""
    samples = {name: [] for name in contenders}
    for call in contenders.values():
        call()
        bench.stream.synchronize()
    for _ in range(SAMPLES):
        for name, call in contenders.items():
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            bench.stream.synchronize()
            samples[name].append(significant((time.perf_counter() - begin) / calls))
    return samples


def host_rows(bench, torch, sizes):
    import numpy as np

    t = torch.torch
    for n_bytes in sizes:
        n = n_bytes // 4
        card = bench.random((n,), "float32")
        half = bench.cp.empty(n, "uint16")
        turned = bench.cp.empty((n // 1024, 1024), "float32")
        pinned_tensor = t.empty(n, dtype=t.float32, pin_memory=True)
        pinned, pageable = pinned_tensor.numpy(), np.ones(n, "f4")
        pageable_half = np.ones(n, "u2")
        on_card = torch.tensor(card, "float32")
        calls = max(1, (64 << 20) // n_bytes)

        def ours(src, dst):
            arguments = c_void_p(ctypes.addressof(src)), c_void_p(ctypes.addressof(dst)), c_void_p(bench.stream.ptr)
            function = bench.library.functions.gc_copy_into
            return lambda keep=(src, dst): bench.check(function(*arguments), bench.library)

        def driver(to, source, size):
            arguments = c_uint64(to), c_uint64(source), c_size_t(size)
            return lambda: bench.driver.cuMemcpy(*arguments)

        def driver_async(to, source, size):
            arguments = c_uint64(to), c_uint64(source), c_size_t(size), c_void_p(bench.stream.ptr)
            return lambda: bench.driver.cuMemcpyAsync(*arguments)

        described = gpu.describe(card)
        words = f"{n} float32"
        of = gpu.describe_host
        pageable_tensor = t.from_numpy(pageable)
        kinds = {
            "pinned to the card": {
                "ours": ours(of(pinned, gpu.CUDA_HOST), described),
                "driver": driver_async(card.data.ptr, pinned.ctypes.data, n_bytes),
                "torch": lambda: on_card.copy_(pinned_tensor, non_blocking=True),
            },
            "the card to pinned": {
                "ours": ours(described, of(pinned, gpu.CUDA_HOST)),
                "driver": driver_async(pinned.ctypes.data, card.data.ptr, n_bytes),
                "torch": lambda: pinned_tensor.copy_(on_card, non_blocking=True),
            },
            "pinned to the card, as bfloat16": {
                "ours": ours(of(pinned, gpu.CUDA_HOST), gpu.describe(half, BFLOAT16)),
                "torch": lambda: torch.tensor(half, BF16).copy_(pinned_tensor, non_blocking=True),
            },
            "transposed on the card to pinned": {
                "ours": ours(gpu.describe(turned.T), of(pinned.reshape(1024, n // 1024), gpu.CUDA_HOST)),
                "torch": lambda: pinned_tensor.view(1024, n // 1024).copy_(torch.tensor(turned, "float32").T, non_blocking=True),
            },
            "pageable to the card": {
                "ours": ours(of(pageable, gpu.CPU), described),
                "driver": driver(card.data.ptr, pageable.ctypes.data, n_bytes),
                "torch": lambda: on_card.copy_(pageable_tensor),
                "CuPy": lambda: card.set(pageable, stream=bench.stream),
            },
            "the card to pageable": {
                "ours": ours(described, of(pageable, gpu.CPU)),
                "driver": driver(pageable.ctypes.data, card.data.ptr, n_bytes),
                "torch": lambda: pageable_tensor.copy_(on_card),
                "CuPy": lambda: card.get(stream=bench.stream, out=pageable),
            },
            "pageable to the card, as bfloat16": {
                "ours": ours(of(pageable, gpu.CPU), gpu.describe(half, BFLOAT16)),
                "torch": lambda: torch.tensor(half, BF16).copy_(pageable_tensor),
            },
            "the card to pageable, as bfloat16": {
                "ours": ours(described, of(pageable_half, gpu.CPU, BFLOAT16)),
                "torch": lambda: t.from_numpy(pageable_half.view("i2")).view(t.bfloat16).copy_(on_card),
            },
            "transposed pageable to the card": {
                "ours": ours(of(pageable.reshape(n // 1024, 1024).T, gpu.CPU), gpu.describe(card.reshape(1024, n // 1024))),
                "torch": lambda: on_card.view(1024, n // 1024).copy_(pageable_tensor.view(n // 1024, 1024).T),
            },
        }
        for kind, contenders in kinds.items():
            print(kind, words, file=sys.stderr)
            samples = until_done(bench, contenders, calls)
            yield {"kind": kind, "shape": words, "bytes": n_bytes, "calls": calls, "seconds": samples}


def main():
    options = gpu.arguments(__doc__, pathlib.Path(ROOT / "build/bench/gpu_copy.json"))
    bench = Bench(options.host, options.library, options.against)
    torch, pool, only = Torch(bench), bench.cp.get_default_memory_pool(), options.only or ""
    results = {"about": {**gpu.about(bench), "of": "copies", "quick": options.quick, "torch": torch.torch.__version__}}
    results["clocks"] = [gpu.clocks()]
    bench.measure_yardsticks(SAMPLES)
    results["copies"], results["host copies"], results["yardsticks"] = [], [], bench.yardsticks
    options.output.parent.mkdir(parents=True, exist_ok=True)

    def write():
        # After every row: what a peer does to the process costs what follows, and nothing else.
        options.output.write_text(json.dumps(results) + "\n")

    for case in copies(QUICK_SIDES if options.quick else SIDES):
        if case[0].startswith(only) and not (options.quick and case[1].startswith(("1048576", "268435455"))):
            print(*case[:2], file=sys.stderr)
            results["copies"].append(copy_row(bench, torch, case))
            pool.free_all_blocks()
            write()
    if not options.only:
        for row in host_rows(bench, torch, QUICK_HOST_BYTES if options.quick else HOST_BYTES):
            results["host copies"].append(row)
            write()
    bench.measure_yardsticks(5)
    results["clocks"].append(gpu.clocks())
    write()
    print(report.gpu_copy_tables(results))
    print(report.targets() or "")
    if options.against:
        print(report.against(results))
    copy = sorted(bench.yardsticks["copy"]["seconds"])
    print(f"\nthe copy: {statistics.median(copy) * 1e3:.3f} ms, {copy[0] * 1e3:.3f} to {copy[-1] * 1e3:.3f}")


if __name__ == "__main__":
    main()
