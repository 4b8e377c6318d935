#!/usr/bin/env python3
"""Host time of the operators of examples_cpp/torch_ops.cpp, beside torch's own: build/bench/torch_ops.json and a table.

    python3 bench/torch_ops.py [--quick]

What a call costs before the device has done anything: batches of calls on a small tensor, the device idle before each
and waited for after it, outside of the time. On the CPU the work, of 4096 elements, is in it. `alias` does nothing but
go through the dispatcher, `empty_like` allocates, `neg` allocates and launches. Per call the median of the batches, and
the least. Needs what examples/python/torch_ops.py needs.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "python"))

import torch_ops  # noqa: E402 the path comes first
from cpu import commit  # noqa: E402

ELEMENTS = 4096
CALLS = 200  # below the launches that a stream takes before it makes the host wait (1024)


def samples(call, wait, batches):
    """Microseconds a call, one value a batch."""
    times = []
    for _ in range(batches + 5):
        wait()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter_ns() - start) / CALLS / 1000)
    wait()
    return times[5:]


def cases(ops, device):
    x = torch.randn(ELEMENTS, device=device)
    mask, chunks = x > 0, ops.pack_signs(x)
    aten = torch.ops.aten
    return {
        "aten::alias": lambda: aten.alias.default(x),
        "aten::empty_like": lambda: aten.empty_like.default(x),
        "aten::neg": lambda: aten.neg.default(x),
        "gradcodec::pack_signs": lambda: ops.pack_signs.default(x),
        "gradcodec::pack_truth": lambda: ops.pack_truth.default(mask),
        "gradcodec::unpack": lambda: ops.unpack.default(chunks, (ELEMENTS,), torch.float32),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    batches = 10 if parser.parse_args().quick else 100
    ops = torch_ops.load()
    result = {"commit": commit(), "torch": torch.__version__, "elements": ELEMENTS, "calls_a_batch": CALLS}
    result["microseconds"] = {}
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        print(f"{name}, us a call:\n{'':27}median   least")
        measured = {case: samples(call, wait, batches) for case, call in cases(ops, device).items()}
        for case, times in measured.items():
            print(f"  {case:24} {statistics.median(times):8.2f}{min(times):8.2f}")
        result["microseconds"][name] = measured
    if not torch.cuda.is_available():
        print("no CUDA device: the CPU only")
    path = ROOT / "build" / "bench" / "torch_ops.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
