"""How fast the CPU encodes and decodes: every size and instruction set, beside DeepSpeed's chain on as many threads.

All contenders take turns in one run, as in bench/cpu.py. Beside encoding stand what DeepSpeed's worker did, in torch
(bench/deepspeed_worker.py), where torch is there (`make peers`), and the addition of the gradient to the error in
NumPy, which moves as many bytes except the bits. Beside block codecs stand a copy of as many bytes in NumPy, casts in
torch and pypiquant's quantization (`pip install pypiquant==4.1.0`, where torch is), each where it is there. bench/bits.c
does the timing, `make bench-codec` builds and runs it.
The samples go to a JSON file, of which bench/report.py makes tables.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile
from ctypes import byref, c_int64

import numpy as np

try:
    import piquant
except ImportError:
    piquant = None

import cpu
import deepspeed_worker
import report
from codec import BLOCK_KINDS, COMPRESS, ENCODE, KINDS, STAGE_KINDS, Work
from cpu import Library

SIZES = [2**k for k in range(10, 27, 2)]
QUICK_SIZES = [2**10, 2**16, 2**20]
# Of block codecs: in the first cache, in the last, in memory.
BLOCK_SIZES = [2**12, 2**20, 2**26]
CPU = 1


class Place(cpu.Bench):
    """What a Work asks of its place."""

    np, device_type = np, CPU
    describe = staticmethod(cpu.describe)

    def __init__(self, options, folder):
        super().__init__(options.bits, options.library, options.against)
        self.sets = {name: self.forced(options.library, folder, name) for name in self.others()}

    @staticmethod
    def others():
        """Instruction sets other than the one that the library chooses."""
        best, *others = cpu.paths_of(set(cpu.processor().get("flags", "").split()))
        return [] if os.environ.get("GRADCODEC_CPU") else others

    def forced(self, path, folder, name):
        """A copy of the library, so that it is another one in this process, which works with an instruction set."""
        copy = pathlib.Path(folder) / f"{name}.so"
        shutil.copy(path, copy)
        os.environ["GRADCODEC_CPU"] = name
        try:
            library = Library(self.timer, str(copy))
            work = Work(self, library, "encode float32", [[1024]])
            self.call(library, work.calls[0])  # the first call reads the environment
            work.free()
        finally:
            del os.environ["GRADCODEC_CPU"]
        return library

    @staticmethod
    def random(shape, dtype):
        (n,) = shape
        if dtype == "float32":
            return cpu.random_floats(n)
        array = cpu.empty(shape, np.uint16)
        array[:] = cpu.random_floats(n).view(np.uint16)[1::2]
        return array

    @staticmethod
    def empty(shape, dtype):
        return cpu.empty(shape, np.uint16 if dtype == "bfloat16" else dtype)

    def call(self, library, call):
        if self.timer.call_codecs(library.handle, c_int64(1), byref(call), None):
            raise RuntimeError(library.last_error())

    def wait(self):
        pass

    def timed(self, threads, work):
        """Seconds of so many calls, as a function of their number."""

        def sample(calls):
            self.timer.set_threads(work.library.handle, threads)
            try:
                return self.seconds("codec_call", calls, work.library.handle, byref(work.calls[0]))
            except RuntimeError as error:
                raise RuntimeError(f"{error}: {work.library.last_error()}") from None

        return sample


def chains(torch, gradient):
    """DeepSpeed's worker on one thread and on two, and the same in as few operations."""

    def of(name, threads):
        worker = deepspeed_worker.Worker(torch, gradient.size, "cpu", deepspeed_worker.numpy_pack)
        shared, step = torch.from_numpy(gradient), getattr(worker, name)
        bits, _ = step(shared)
        assert np.array_equal(bits, np.packbits(~(gradient < 0))), f"{name}: bits are not the signs"
        timed = cpu.numpy_calls(lambda: step(shared))

        def sample(calls):
            torch.set_num_threads(threads)
            return timed(calls)

        return sample

    return {
        "deepspeed": of("step", 1),
        "deepspeed x2": of("step", 2),
        "lean": of("lean", 1),
        "lean x2": of("lean", 2),
    }


def addition(gradient):
    """e += g: 12 bytes an element."""
    error = cpu.empty(gradient.shape, np.float32)
    return cpu.numpy_calls(lambda: np.add(error, gradient, out=error))


def copy(n_bytes):
    """Half of the bytes are read, half written."""
    src, dst = cpu.empty((n_bytes // 2,), np.uint8), cpu.empty((n_bytes // 2,), np.uint8)
    return cpu.numpy_calls(lambda: np.copyto(dst, src))


def casts(torch, gradient, codec):
    """The same codes in torch, by a scale for each block; the cast alone; and pypiquant's, by one scale for all elements,
    which it looks for first. Each on one thread and on two."""
    x = torch.from_numpy(gradient)
    of_codec = {
        "mxfp8": (32, 448, lambda y: y.to(torch.float8_e4m3fn), lambda s: torch.exp2(torch.ceil(torch.log2(s)))),
        "int8": (64, 127, lambda y: y.round_().to(torch.int8), lambda s: s),
    }
    if codec not in of_codec:
        return {}
    block, most, cast, of_scale = of_codec[codec]

    def by_block():
        blocks = x.view(-1, block)
        scale = of_scale(blocks.abs().amax(1, keepdim=True) / most)
        return cast(blocks / scale), scale

    alone = (lambda: x.to(torch.float8_e4m3fn)) if codec == "mxfp8" else (lambda: x.to(torch.int8))

    def on(threads, function):
        timed = cpu.numpy_calls(function)

        def sample(calls):
            torch.set_num_threads(threads)
            return timed(calls)

        return sample

    found = {}
    for threads, suffix in ((1, ""), (2, " x2")):
        found |= {f"torch{suffix}": on(threads, by_block), f"cast{suffix}": on(threads, alone)}
        if codec == "int8" and piquant:
            found[f"piquant{suffix}"] = cpu.numpy_calls(quantization(threads, gradient))
    return found


def quantization(threads, gradient):
    context, kind = piquant.Context(threads), piquant.DataType
    codes = cpu.empty(gradient.shape, np.uint8)

    def call():
        address, n = gradient.ctypes.data, gradient.size
        scale, zero_point = context.compute_quant_params_ptr_float32(address, kind.UINT8, n)
        nearest = piquant.RoundMode.NEAREST
        context.quantize_ptr(address, kind.F32, codes.ctypes.data, kind.UINT8, n, scale, zero_point, nearest)

    return call


def row(place, torch, kind, elements, budget):
    works = []

    def work(library):
        works.append(Work(place, library, kind, [[elements]], like=works[0] if works else None))
        return works[-1]

    try:
        ours = work(place.library)
        ours.check()
        contenders = {"ours": place.timed(1, ours), "ours x2": place.timed(2, ours)}
        for name, library in place.sets.items():
            other = work(library)
            other.check()
            contenders[name] = place.timed(1, other)
        if place.against:
            contenders["against"] = place.timed(1, work(place.against))
        if kind in BLOCK_KINDS:
            contenders["copy"] = copy(ours.bytes)
            if torch and ours.kind.function == ENCODE and kind.endswith("float32, no errors"):
                contenders |= casts(torch, ours.values[0][0], ours.kind.codec)
        elif ours.kind.function in (ENCODE, COMPRESS) and ours.kind.dtype == "float32":
            gradient = ours.values[0][0]
            contenders["add"] = addition(gradient)
            if torch:
                contenders |= chains(torch, gradient)
        return {
            "kind": kind,
            "elements": elements,
            "bytes": ours.bytes,
            "seconds": cpu.measure(contenders, budget),
        }
    finally:
        for made in works:
            made.free()


def sizes_of(kind, quick):
    if kind in BLOCK_KINDS:
        return [size for size in BLOCK_SIZES if size < 2**26 or not quick]
    return QUICK_SIZES if quick else SIZES


def main():
    options = cpu.arguments(__doc__, "cpu_codec.json")
    # Torch's threads must not spin: where something else has a CPU for a while, they wait for each other all that time,
    # and 2^16 elements take two threads 400 ms instead of 0.3.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import torch
    except ImportError as error:
        print(f"no torch, so nothing of DeepSpeed's (`make peers` installs it): {error}", file=sys.stderr)
        torch = None
    with tempfile.TemporaryDirectory() as folder:
        place = Place(options, folder)
        results = {"about": {**cpu.about(place), "of": "codec", "quick": options.quick}, "sizes": []}
        results["about"]["torch"] = torch and torch.__version__
        options.output.parent.mkdir(parents=True, exist_ok=True)
        kinds = [kind for kind in KINDS if kind not in STAGE_KINDS]
        # Errors of bfloat16 and bfloat16 results take what lies between.
        kinds += [kind for kind in BLOCK_KINDS if not kind.endswith(("bfloat16 errors", "bfloat16, float32 errors"))]
        for kind in (kind for kind in kinds if kind.startswith(options.only)):
            for elements in sizes_of(kind, options.quick):
                try:
                    found = row(place, torch, kind, elements, 0.1 if options.quick else 2)
                except Exception as error:
                    found = {"kind": kind, "elements": elements, "failed": f"{type(error).__name__}: {error}"[:400]}
                    print(f"{kind}, {elements}: {found['failed']}", file=sys.stderr)
                results["sizes"].append(found)
                options.output.write_text(json.dumps(results) + "\n")

    print(report.cpu_codec_tables(results))
    print(report.targets() or "")
    if options.against:
        print(report.against(results))


if __name__ == "__main__":
    main()
