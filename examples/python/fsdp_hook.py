"""FSDP2 (torch.distributed.fsdp.fully_shard) with compressed gradients, by gradcodec.torch.

    python3 examples/python/fsdp_hook.py

    fully_shard(model)
    compression = gradcodec.torch.shard(model, "int8")  # after the last fully_shard()

Needs PyTorch 2.9, the first version with FSDPModule.set_custom_reduce_scatter(). This program compresses gradients
only; shard(model, "int8", gather="int8") also compresses the parameters that FSDP gathers.

With error feedback each rank keeps the errors of its gradients: four bytes per element of the whole model, not only of
its shard. int8 uses no error feedback, int4 does.
"""

import os
import sys
import tempfile

from ddp_hook import digits  # exits with a message if there is no PyTorch

import torch
import torch.distributed as dist

import gradcodec.torch

try:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    FSDPModule.set_custom_reduce_scatter  # added later than fully_shard
except (ImportError, AttributeError):
    print("SKIPPED: no PyTorch 2.9 here, or later")
    raise SystemExit

# BATCH is the size over all ranks. Training ends while the loss is still falling.
WORKERS, SEEDS, BATCH, STEPS, RATE = 4, 2, 256, 100, 3e-3


def train(seed, codec, device, images, labels):
    """Returns the losses on all images after nine tenths of the steps and at the end, and the bytes sent by this
    rank."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
    fully_shard(model, mesh=dist.init_device_mesh(device.type, (dist.get_world_size(),)))
    compression = gradcodec.torch.shard(model, codec, raw=()) if codec else None
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    losses = []
    for step in range(1, STEPS + 1):
        batch = torch.randint(len(images), (BATCH,))[dist.get_rank() :: dist.get_world_size()].to(device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        if step in (STEPS * 9 // 10, STEPS):
            with torch.no_grad():
                losses.append(torch.nn.functional.cross_entropy(model(images), labels).item())
    return *losses, compression.bytes_sent if compression else 0


def worker(rank, world, backend, store):
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    images, labels = (tensor.to(device) for tensor in digits())
    ring, means = SEEDS * STEPS * (world - 1) / world * 4 * 4810, {}
    for name, codec in {"plain FSDP": None, "int8": "int8", "int4": "int4"}.items():
        runs = [train(seed, codec, device, images, labels) for seed in range(SEEDS)]
        before, means[name] = (sum(run[k] for run in runs) / SEEDS for k in range(2))
        if rank == 0:
            sent = sum(run[2] for run in runs) / ring
            size = f"; {sent:.4f} of the bytes of float32 in a ring" if codec else ""
            print(f"{backend}, {world} ranks, {name}: loss {before:.4f}, then {means[name]:.4f}{size}", flush=True)
        assert before > 1.05 * means[name]
    of_plain = {name: mean / means["plain FSDP"] - 1 for name, mean in means.items()}
    if rank == 0:
        print(f"{backend}: within 5 %: {all(abs(gap) < 0.05 for gap in of_plain.values())}")
    assert all(abs(gap) < 0.05 for gap in of_plain.values()), of_plain
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of PyTorch may abort a process whose interpreter ends


def show(world, backend):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (world, backend, os.path.join(folder, "store")), world)


def main():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    show(WORKERS, "gloo")
    if torch.cuda.device_count() < 2:
        print("SKIPPED: no two CUDA devices, so NCCL was not shown")
        raise SystemExit
    show(min(torch.cuda.device_count(), WORKERS), "nccl")


if __name__ == "__main__":
    main()
