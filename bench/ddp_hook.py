#!/usr/bin/env python3
"""Host time of DistributedDataParallel's hook, with gradcodec.torch.compress and with PyTorch's own hooks:
build/bench/ddp_hook.json and a table.

    python3 bench/ddp_hook.py [--quick] [--library PATH] [--device cuda] [--tensors 100] [--elements 64]

Two ranks, over gloo on the CPU and over NCCL on two GPUs, train a model whose gradients fit in one bucket. A hook's time
is the CPU time of the thread that calls it, from its call to its return: it has no part in which the thread waits for
the other rank. On a CPU the work is in it. `C`: the part within the library's functions, and the exchanges that they
call back for. Of each the median of the steps, and the least, which other processes on the machine disturb less.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from common import commit  # noqa: E402 the path comes first

WORLD, FIRST = 2, 20  # steps that are not counted
CODECS = "bf16", "int8", "int4", "onebit"


class Model(torch.nn.Module):
    def __init__(self, tensors, elements):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(elements)) for _ in range(tensors))

    def forward(self, gradient):
        return sum((weight * gradient).sum() for weight in self.weights)


class Timed(DistributedDataParallel):
    """Whose hooks are timed, in seconds a step."""

    def register_comm_hook(self, state, hook):
        self.seconds = []

        @functools.wraps(hook)
        def timed(state, bucket):
            start = time.thread_time()
            future = hook(state, bucket)
            self.seconds.append(time.thread_time() - start)
            return future

        super().register_comm_hook(state, timed)


class InC:
    """Seconds within the library's functions since it was asked."""

    def __init__(self):
        from gradcodec._owned import _Owned

        self.seconds, inner = 0.0, _Owned._call_with

        @functools.wraps(inner)
        def timed(owned, function, *arguments):
            start = time.thread_time()
            try:
                return inner(owned, function, *arguments)
            finally:
                self.seconds += time.thread_time() - start

        _Owned._call_with = timed

    def take(self):
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def steps(arguments, register):
    """Seconds a step of the hook, and of that in C."""
    model = Timed(Model(arguments.tensors, arguments.elements).to(arguments.device), bucket_cap_mb=1000)
    end, gradient, in_c = register(model), torch.ones(arguments.elements, device=arguments.device), []
    for _ in range(FIRST + (200 if arguments.quick else 1000)):
        dist.barrier()
        arguments.in_c.take()
        model(gradient).backward()
        in_c.append(arguments.in_c.take())
    hook = model.seconds[-len(in_c) :]
    assert len(hook) == len(in_c), "one bucket a step"
    end()
    return hook[FIRST:], in_c[FIRST:]


def plain(hook, model):
    model.register_comm_hook(None, hook)
    return lambda: None


def compressed(codec, model):
    import gradcodec.torch

    return gradcodec.torch.compress(model, codec, momentum=True, **({} if codec == "onebit" else {"raw": ()})).close


def rank(number, arguments, folder):
    torch.set_num_threads(1)
    if arguments.device == "cuda":
        torch.cuda.set_device(number)
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=number, world_size=WORLD)
    arguments.in_c, found = InC(), {}
    hooks = {name: functools.partial(plain, getattr(default_hooks, name)) for name in ("allreduce_hook", "bf16_compress_hook")}
    hooks.update((f"compress, {codec}", functools.partial(compressed, codec)) for codec in CODECS)
    for name, register in hooks.items():
        found[name] = steps(arguments, register)
    if number == 0:
        (pathlib.Path(folder) / "found").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # threads of PyTorch's may abort a process whose interpreter ends


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--library", help="of the library, if not the one that the package finds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--elements", type=int, default=64, help="of each")
    arguments = parser.parse_args()
    if arguments.library:
        os.environ["GRADCODEC_LIBRARY"] = arguments.library
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (arguments, folder), WORLD)
        found = json.loads((pathlib.Path(folder) / "found").read_text())
    about = f"{arguments.tensors} tensors of {arguments.elements}, {WORLD} ranks, {arguments.device}"
    print(f"{about}, us a step:\n{'':22}  median   least     C: median   least  without: median   least")
    for name, (hook, in_c) in found.items():
        columns = [hook] if not max(in_c) else [hook, in_c, [one - other for one, other in zip(hook, in_c)]]
        numbers = [of(each) * 1e6 for each in columns for of in (statistics.median, min)]
        print(f"  {name:20}" + "".join(f"{number:{width}.1f}" for number, width in zip(numbers, (8, 8, 15, 8, 17, 8))))
    result = {"commit": commit(), "torch": torch.__version__, "about": about, "seconds": found}
    path = ROOT / "build" / "bench" / "ddp_hook.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
