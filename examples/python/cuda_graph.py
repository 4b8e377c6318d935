"""A training step in a CUDA graph, with DistributedDataParallel and compressed gradients.

    python3 examples/python/cuda_graph.py

Runs one process per GPU, over NCCL. As PyTorch requires, the model is wrapped on a side stream, and eleven steps
precede the capture; `compress()` is called once before them. The device decides what a step does: a step with
non-finite gradients changes neither the weights nor the errors that compress() keeps. Prints the loss and the time of a
step, with gradients in float32 and at 4 bits, eager and in a graph.
"""

import os
import sys
import tempfile
import time

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("SKIPPED: no PyTorch here")
    raise SystemExit

from torch.nn.parallel import DistributedDataParallel

import gradcodec.torch

WARM, STEPS, BATCH, WIDTH = 11, 200, 64, 2048


def train(codec, in_graph):
    """Trains; returns the final loss, and seconds per step."""
    torch.manual_seed(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layers = [torch.nn.Linear(64, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
        model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 64)).cuda())
        compression = gradcodec.torch.compress(model, codec) if codec else None
    given = torch.randn(BATCH, 64, device="cuda")
    wanted = given.roll(1, 1)

    def step():
        torch.nn.functional.mse_loss(model(given), wanted).backward()
        with torch.no_grad():  # SGD, which skips gradients that are not finite
            is_finite = torch.stack([one.grad.isfinite().all() for one in model.parameters()]).all()
            for one in model.parameters():
                one -= 0.1 * torch.where(is_finite, one.grad, 0.0)

    def eager():
        model.zero_grad()
        step()

    with torch.cuda.stream(side):
        for _ in range(WARM):
            eager()
        again = eager
        if in_graph:
            torch.cuda.synchronize()
            model.zero_grad()
            graph = torch.cuda.CUDAGraph()
            # "thread_local": calls of other threads, such as NCCL's watchdog, do not end the capture.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                step()
            again = graph.replay
        for count in 50, STEPS:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                again()
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / count
    if compression is not None:
        compression.commit()  # the last step is pending until the next one
        assert compression.taken_back == 0
    torch.cuda.current_stream().wait_stream(side)
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(given), wanted)
    return loss.item(), seconds


def worker(rank, world, store):
    torch.cuda.set_device(rank)
    own = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=own)
    for name, codec in ("plain", None), ("int4", "int4"):
        (loss, eager), (again, replayed) = (train(codec, in_graph) for in_graph in (False, True))
        if rank == 0:
            print(f"nccl, {world} ranks, {name}: loss {loss:.6f}; {eager * 1e3:.2f} ms a step", flush=True)
            print(f"in a graph: loss {again:.6f}; {replayed * 1e3:.2f} ms a step", flush=True)
        assert abs(again / loss - 1) < 1e-3, (loss, again)
    sys.stdout.flush()
    os._exit(0)  # a thread of PyTorch may abort a process whose interpreter ends


def main():
    world = min(torch.cuda.device_count(), 4)
    if world < 2:
        print("SKIPPED: no two CUDA devices, so no step was captured")
        raise SystemExit
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (world, os.path.join(folder, "store")), world)


if __name__ == "__main__":
    main()
