"""How fast the all-reduces are over NCCL on all GPUs there are, beside NCCL's own and DeepSpeed's chain.

A process a GPU; bench/multi_gpu_rank.py is what they measure, tests/multi_gpu/ranks.py tells them what to do. All
contenders of a size take turns, in an order that goes round; what a round took is what the slowest rank took, between
two events, the ranks beginning together. Memory is warm and inputs are random. Small calls are several between the
events. Without a graph a contender pays what Python and its host cost; graphs are enqueued ahead.

A contender that fails is recorded and left out from then on, and the others go on; the exit code then is 1. A size
that is not begun because the time is over is recorded and no failure. NCCL goes without NVLS, the sums within a switch.
`make multi-gpu` runs this. The samples go to a JSON file, of which bench/report.py makes tables and a plot. With one
GPU, or --device cpu, this is a rehearsal.
"""

import argparse
import ctypes
import datetime
import itertools
import json
import os
import pathlib
import sys
import time

import report
from cpu import ROOT, commit

sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("multi_gpu", "python")]
sys.path.append(str(ROOT / "python"))

LARGE = report.LARGE
# What matters most comes first, for a run that has to end early.
SIZES = [LARGE, *(2**k for k in (20, 22, 24, 26, 28, 10, 12, 14, 16, 18, 30))]
QUICK_SIZES = [LARGE, 2**20, 2**24, 2**12]
# Of the codecs, first those with a number to reach. There all have all ways; elsewhere few are called from Python.
AIMED = [LARGE, 2**24, 2**22, 2**20, 2**16]
CODEC_SIZES = [*AIMED, *(2**k for k in (10, 12, 14, 18, 26, 28, 30))]
# Payloads of two ranks together pass 2^22 bytes between these, in every codec.
EXCHANGE_SIZES = [2**k for k in (14, 16, 17, 18, 19, 20, 21, 22)]
PARTS = "codecs", "onebit"
STAGE_SIZES = [LARGE, 2**24, 2**20]
ROUNDS, QUICK_ROUNDS = 21, 7
REHEARSAL_SIZES, REHEARSAL_ROUNDS = [2**10, 2**12 + 8], 3
SECONDS = 100  # for a size: ranks that take longer wait for each other for ever
ATTEMPTS = 3  # each without what broke the one before


def cards():
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


class Bench:
    """Ranks that are made anew when they are broken, and what is left out because it broke them."""

    def __init__(self, world):
        self.world, self.ranks, self.left_out = world, None, []

    def call(self, failures, function, *arguments, attempts=1):
        """What function gives on every rank; None if it fails, and why is put into failures."""
        from ranks import RankError, Ranks

        for _ in range(attempts):
            if self.ranks is None:
                self.ranks = Ranks(self.world)
            try:
                return self.ranks.call(function, *arguments, seconds=SECONDS)
            except RankError as error:
                at = self.ranks.latest or "the beginning"
                print(f"{at}: {error}", file=sys.stderr)
                failures[at] = error.short[:400]
                self.close()
                if at in self.left_out:
                    return None  # to leave it out did not help
                self.left_out.append(at)
        return None

    def close(self):
        if self.ranks:
            self.ranks.close()
        self.ranks = None


def row(bench, rank, on, elements, rounds, with_stages):
    failures = {}
    row = {"kind": "all-reduce", "elements": elements, "failures": failures}
    of_ranks = bench.call(failures, rank.measure, on, elements, rounds, bench.left_out, attempts=ATTEMPTS)
    if of_ranks is None:
        return {**row, "failed": "see its failures"}
    first = of_ranks[0]
    if "left out" in first:
        return {**row, "left out": first["left out"]}
    failures |= first["failures"]
    row |= {"calls": first["calls"], "copy": {**first["copy"], "seconds": [r["copy"]["seconds"] for r in of_ranks]}}
    row["samples"] = {name: [of_rank["seconds"][name] for of_rank in of_ranks] for name in first["seconds"]}
    row["stages"] = {}
    for dtype in ("float32", "bfloat16") if with_stages else ():
        if f"stages {dtype}" in bench.left_out:
            failures.setdefault(f"stages {dtype}", "left out: they broke the ranks before")
            continue
        of_ranks = bench.call(failures, rank.stages, on, elements, rounds, dtype)
        if of_ranks is None or "failed" in of_ranks[0]:
            failures[f"stages {dtype}"] = of_ranks[0]["failed"] if of_ranks else "see above"
            continue
        seconds = {stage: [r["seconds"][stage] for r in of_ranks] for stage in of_ranks[0]["seconds"]}
        row["stages"][dtype] = {"samples": seconds, "bytes": of_ranks[0]["bytes"]}
    row["kernels"] = {}
    for dtype in ("float32", "bfloat16") if with_stages else ():
        name = f"kernels {dtype}"
        if f"peers {dtype}" not in row["samples"] or name in bench.left_out:
            continue  # why is among the failures
        of_ranks = bench.call(failures, rank.peer_kernels, on, elements, rounds, dtype)
        if of_ranks is None or "failed" in of_ranks[0]:
            failures[name] = of_ranks[0]["failed"] if of_ranks else "see above"
            continue
        seconds = {kernel: [r["seconds"].get(kernel, []) for r in of_ranks] for kernel in of_ranks[0]["seconds"]}
        row["kernels"][dtype] = {"samples": seconds, "bytes": of_ranks[0]["bytes"]}
    return row


def codecs_row(bench, on, elements, rounds, paths, most, has_all):
    import multi_gpu_codecs as codecs

    failures = {}
    row = {"kind": "all codecs", "elements": elements, "failures": failures, "samples": {}, "host": {}}
    for dtype in "float32", "bfloat16":
        given = on, elements, rounds, dtype, paths, most, has_all, bench.left_out
        of_ranks = bench.call(failures, codecs.measure, *given, attempts=ATTEMPTS)
        if of_ranks is None:
            row["failed"] = "see its failures"
            continue
        first = of_ranks[0]
        if "left out" in first:
            return {**row, "left out": first["left out"]}
        failures |= first["failures"]
        row["calls"] = first["calls"]
        row["samples"] |= {name: [of_rank["seconds"][name] for of_rank in of_ranks] for name in first["seconds"]}
        row["host"] |= {name: max(of_rank["host"][name] for of_rank in of_ranks) for name in first["host"]}
    return row


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--library", metavar="FILE", required=True, help="libgradcodec.so, to be timed")
    options.add_argument("--against", metavar="FILE", help="another libgradcodec.so: one exchange beside two, alone")
    options.add_argument("--only", choices=PARTS, help="of all codecs, or of one bit beside DeepSpeed's chain")
    options.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal without a card")
    options.add_argument("--ranks", type=int, default=2, help="with --device cpu")
    options.add_argument("--seconds", type=float, help="no size is begun after so many: 330, or 100 with --quick")
    default = pathlib.Path(os.environ.get("BENCH_OUT") or ROOT / "build/bench/multi_gpu.json")
    options.add_argument("--output", metavar="FILE", type=pathlib.Path, default=default)
    options = options.parse_args()
    options.seconds = (100 if options.quick else 330) if options.seconds is None else options.seconds
    begin, on = time.monotonic(), options.device
    world = cards() if on == "cuda" else options.ranks
    if not world:
        raise SystemExit("no CUDA device; --device cpu rehearses this without one")

    os.environ["GRADCODEC_LIBRARY"] = os.path.abspath(options.library)
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # this program looks after ranks that are stuck
    import multi_gpu_rank as rank  # which loads the library

    if on == "cpu":
        sizes, stage_sizes, rounds = REHEARSAL_SIZES, REHEARSAL_SIZES, REHEARSAL_ROUNDS
        codec_sizes = REHEARSAL_SIZES
        print(f"no card: a rehearsal with {world} ranks, which exchange through pipes")
    else:
        sizes, stage_sizes = QUICK_SIZES if options.quick else SIZES, STAGE_SIZES
        rounds = QUICK_ROUNDS if options.quick else ROUNDS
        codec_sizes = EXCHANGE_SIZES if options.against else AIMED if options.quick else CODEC_SIZES
        print(f"{world} card(s), a rank each{': a rehearsal, for nothing is exchanged' if world == 1 else ''}")

    bench, results = Bench(world), {"failed": {}}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.unlink(missing_ok=True)  # an earlier run's samples are not to be taken for this one's

    def save():
        """After every size, and whole: what was measured stays when the run is cut short."""
        written = options.output.with_name(options.output.name + ".tmp")
        written.write_text(json.dumps(results) + "\n")
        os.replace(written, options.output)

    found = bench.call(results["failed"], rank.about, on)
    if found is None:
        why = "; ".join(f"{at}: {words}" for at, words in results["failed"].items())
        raise SystemExit(f"the ranks did not start: {why}")
    results["about"] = {
        "of": "several cards",
        "world": world,
        "on": on,
        "rehearsal": world == 1 or on == "cpu",
        "ranks": found,
        "driver": rank.gpu.of_card("driver_version").get("driver_version"),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "quick": options.quick,
        "against": bool(options.against),
    }
    results["sizes"], results["codecs"] = [], []
    results["not begun"] = {"seconds": options.seconds, "elements": []}
    paths, most = [os.path.abspath(path) for path in (options.library, options.against) if path], max(codec_sizes)
    parts = ["codecs"] if options.against else [options.only] if options.only else PARTS
    # Turn about, as a run that ends early is to have something of both.
    steps = [step for pair in itertools.zip_longest(
        [("codecs", n) for n in codec_sizes], [("onebit", n) for n in sizes]
    ) for step in pair if step and step[0] in parts]  # fmt: skip
    for part, elements in steps:
        if time.monotonic() - begin > options.seconds:
            late = results["not begun"]["elements"]
            late += [elements] if elements not in late else []
            continue
        if part == "onebit":
            results["sizes"].append(row(bench, rank, on, elements, rounds, elements in stage_sizes))
        else:
            has_all = elements in AIMED or on == "cpu"
            results["codecs"].append(codecs_row(bench, on, elements, rounds, paths, most, has_all))
        print(f"{part}, {report.count(elements)}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
        save()
    results["codecs"].sort(key=lambda row: row["elements"])
    results["sizes"].sort(key=lambda row: row["elements"])
    after = bench.call(results["failed"], rank.about, on)
    results["clocks"] = {"after": [of_rank["clocks"] for of_rank in after or []]}
    save()
    bench.close()
    print(report.multi_gpu_tables(results))
    print(report.targets() or "")
    print(report.peer_tables(results) or "")
    print(report.codecs_tables(results) or "")
    print(report.targets() or "")
    if report.failures(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
