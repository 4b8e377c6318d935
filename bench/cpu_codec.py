"""How fast the CPU encodes and decodes: every size and instruction set, beside DeepSpeed's chain on as many threads.

All contenders take turns in one run, as in bench/cpu.py. Beside encoding stand what DeepSpeed's worker did, in torch
(bench/deepspeed_worker.py), where torch is there (`make peers`), and the addition of the gradient to the error in
NumPy, which moves as many bytes except the bits. bench/bits.c does the timing, `make bench-codec` builds and runs it.
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

import cpu
import deepspeed_worker
import report
from codec import COMPRESS, ENCODE, KINDS, STAGE_KINDS, Work
from cpu import Library

SIZES = [2**k for k in range(10, 27, 2)]
QUICK_SIZES = [2**10, 2**16, 2**20]
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
        if ours.kind.function in (ENCODE, COMPRESS) and ours.kind.dtype == "float32":
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
        for kind in (kind for kind in KINDS if kind not in STAGE_KINDS):
            for elements in (QUICK_SIZES if options.quick else SIZES) if kind.startswith(options.only) else []:
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
