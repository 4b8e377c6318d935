#!/usr/bin/env python3
"""What compression costs SGD with momentum, by what is compressed: build/bench/momentum.json, and the table of
docs/CODECS.md, "What to compress".

    python3 bench/momentum.py [--seeds 3] [--steps 300] [--library PATH]

Two processes over gloo learn to read handwritten digits (examples_c/data), at two learning rates: with gradients of
float32, INT8 and INT4; with ONEBIT on the gradient, for which one bit is not meant; and on the momentum, by OneBitSGD.
Then without momentum, with a loss of Inf on one rank in step 50, whose step is left out. Each line: the loss on all
images in the end, mean and seeds; and the steps that were left out.
"""

import argparse
import contextlib
import json
import os
import pathlib
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from cpu import commit  # noqa: E402 the path comes first

WORLD, BATCH = 2, 64
WAYS = {
    "float32": None, "INT8": "int8", "INT4": "int4", "ONEBIT, the gradient": "onebit", "ONEBIT, the momentum": "sgd",
}  # fmt: skip
RUNS = [(rate, 0.9, None) for rate in (0.05, 0.1)] + [(0.3, 0.0, 50)]  # rate, momentum, the step with an Inf


def digits():
    records = torch.frombuffer(bytearray((ROOT / "examples_c/data/digits.bin").read_bytes()), dtype=torch.uint8)
    records = records.view(-1, 65)
    return records[:, :64] / 16, records[:, 64].long()


def train(seed, way, rate, momentum, overflow, steps):
    """The loss in the end, and how many steps were left out."""
    import gradcodec.torch

    torch.manual_seed(seed)
    images, labels = digits()
    layer, relu = torch.nn.Linear, torch.nn.ReLU
    model = torch.nn.Sequential(layer(64, 256), relu(), layer(256, 128), relu(), layer(128, 10))
    model, compression = DistributedDataParallel(model), None
    if way == "sgd":
        optimizer = compression = gradcodec.torch.OneBitSGD(model.parameters(), rate, momentum)
    else:
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum)
        if way:
            compression = gradcodec.torch.compress(model, way)
    generator, left_out = torch.Generator().manual_seed(100 * seed + dist.get_rank()), 0
    for step in range(steps):
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        optimizer.zero_grad()
        with model.no_sync() if way == "sgd" else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            (loss * float("inf") if step == overflow and dist.get_rank() == 0 else loss).backward()
        if way == "sgd" or all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            optimizer.step()
        else:
            left_out += 1
    if way == "sgd":
        left_out = compression.taken_back
    elif compression:
        compression.commit()
        assert compression.taken_back == left_out
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model.module(images), labels).item(), left_out


def rank(number, arguments, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # that ONEBIT is not for momentum is what this shows
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=WORLD)
    rows = []
    for rate, momentum, overflow in RUNS:
        for name, way in WAYS.items():
            runs = [train(seed, way, rate, momentum, overflow, arguments.steps) for seed in range(arguments.seeds)]
            losses, left_out = [loss for loss, _ in runs], [skipped for _, skipped in runs]
            rows.append({"rate": rate, "momentum": momentum, "overflow": overflow, "compressed": name,
                         "losses": losses, "left_out": left_out})  # fmt: skip
            if number == 0:
                print(f"rate {rate}, momentum {momentum}{', an Inf' if overflow else ''}: {name}: loss "
                      f"{sum(losses) / len(losses):.4f} ({' '.join(f'{loss:.4f}' for loss in losses)}), "
                      f"left out {left_out}", flush=True)  # fmt: skip
    if number == 0:
        out = ROOT / "build/bench/momentum.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        about = {"commit": commit(), "torch": torch.__version__, "steps": arguments.steps, "ranks": WORLD}
        out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        heads = ["rate 0.05", "rate 0.1", "rate 0.3, no momentum, one Inf"]
        print(f"\n| what is compressed | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
        for name in WAYS:
            means = [sum(row["losses"]) / len(row["losses"]) for row in rows if row["compressed"] == name]
            print(f"| {name} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of PyTorch's may abort a process whose interpreter ends


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--library")
    arguments = parser.parse_args()
    if arguments.library:
        os.environ["GRADCODEC_LIBRARY"] = str(pathlib.Path(arguments.library).resolve())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (arguments, folder), WORLD)


if __name__ == "__main__":
    main()
