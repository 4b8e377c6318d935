#!/usr/bin/env python3
"""CPU time of DistributedDataParallel's hooks in C++ and Python, ours and PyTorch's: build/bench/ddp_hook.json.

    python3 bench/ddp_hook.py --library PATH [--quick] [--device cuda] [--tensors 100] [--elements 64]

Two ranks, over gloo on the CPU and over NCCL or peer memory on two GPUs, train a model whose gradients fit in one
bucket. After some steps each hook is called repeatedly for that bucket: a call is a whole step of the hook. On GPUs a
call's time is that from its call to its return, with an idle GPU. On the CPU it is the CPU time of the thread, which
excludes waits for the other rank, but includes the work. The table has the median of the calls, and the least, which
other processes on the machine disturb less.
"""

import functools
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from common import commit, markdown, parser, save

WORLD, FIRST = 2, 20  # calls that are not counted
CODECS = "bf16", "int8", "int4", "onebit"


class Model(torch.nn.Module):
    def __init__(self, tensors, elements):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(elements)) for _ in range(tensors))

    def forward(self, gradient):
        return sum((weight * gradient).sum() for weight in self.weights)


def calls(arguments, register):
    """Returns the seconds of each call of the hook."""
    model = DistributedDataParallel(Model(arguments.tensors, arguments.elements).to(arguments.device), bucket_cap_mb=1000)
    compression, gradient = register(model), torch.ones(arguments.elements, device=arguments.device)
    for _ in range(4):  # DDP rebuilds its buckets after the first
        model(gradient).backward()
    reducer, on_gpu = model.reducer, arguments.device == "cuda"
    (bucket,) = reducer._get_zeros_like_grad_buckets()
    clock, seconds = time.perf_counter if on_gpu else time.thread_time, []
    for _ in range(FIRST + (200 if arguments.quick else 1000)):
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        start = clock()
        future = reducer._run_comm_hook(bucket)
        seconds.append(clock() - start)
        future.wait()
    if compression is not None:
        compression.close()
    return seconds[FIRST:]


def compressed(codec, native, model):
    import gradcodec.torch

    more = {} if codec == "onebit" else {"raw": ()}
    return gradcodec.torch.compress(model, codec, momentum=True, native=native, **more)


def rank(number, arguments, folder):
    torch.set_num_threads(1)
    if arguments.device == "cuda":
        torch.cuda.set_device(number)
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=number, world_size=WORLD)
    found, kinds = {}, dist.BuiltinCommHookType
    hooks = {
        "PyTorch's all-reduce, C++": lambda model: model._register_builtin_comm_hook(kinds.ALLREDUCE),
        "PyTorch's fp16, C++": lambda model: model._register_builtin_comm_hook(kinds.FP16_COMPRESS),
        "PyTorch's all-reduce, Python": lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
        "PyTorch's bf16, Python": lambda model: model.register_comm_hook(None, default_hooks.bf16_compress_hook),
    }
    for native, language in (True, "C++"), (False, "Python"):
        hooks.update((f"compress, {codec}, {language}", functools.partial(compressed, codec, native)) for codec in CODECS)
    for name, register in hooks.items():
        found[name] = calls(arguments, register)
    if number == 0:
        about = f"{arguments.tensors} tensors of {arguments.elements}, {WORLD} ranks, {arguments.device}"
        print(f"{about}, us a call:")
        rows = [[name, *(f"{of(its) * 1e6:.1f}" for of in (statistics.median, min))] for name, its in found.items()]
        print(markdown(["", "median", "least"], rows))
        save(arguments.output, {"commit": commit(), "torch": torch.__version__, "about": about, "seconds": found})
        print(arguments.output, flush=True)
    dist.barrier()
    os._exit(0)  # threads of PyTorch's may abort a process whose interpreter ends


def main():
    options = parser(__doc__, "ddp_hook.json")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--tensors", type=int, default=100)
    options.add_argument("--elements", type=int, default=64, help="of each")
    arguments = options.parse_args()
    os.environ["GRADCODEC_LIBRARY"] = arguments.library
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (arguments, folder), WORLD)


if __name__ == "__main__":
    main()
