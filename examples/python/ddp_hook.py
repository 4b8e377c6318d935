"""DistributedDataParallel with compressed gradients, by gradcodec.torch.

    python3 examples/python/ddp_hook.py

    model = DistributedDataParallel(model)
    compression = gradcodec.torch.compress(model, "int8")  # everything else stays as it is

Four processes train on handwritten digits by SGD with momentum, over gloo, and over NCCL if there are two GPUs: with
gradients in float32, at 8 and at 4 bits. One bit compresses the momentum instead of the gradient (docs/CODECS.md). The
optimizer skips a step whose gradients are not finite, as torch.amp.GradScaler does.
"""

import contextlib
import os
import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("SKIPPED: no PyTorch here")
    raise SystemExit

from torch.nn.parallel import DistributedDataParallel

import gradcodec.torch

# BATCH is the size over all ranks. Training ends while the loss is still falling.
WORKERS, SEEDS, BATCH, STEPS, RATE, MOMENTUM = 4, 2, 256, 120, 0.1, 0.9


def digits():
    """Returns images of handwritten digits, and their labels."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples_c", "data", "digits.bin")
    with open(path, "rb") as file:
        records = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).view(-1, 65)
    return records[:, :64] / 16, records[:, 64].long()


def train(seed, codec, device, images, labels, overflow=None):
    """Returns the losses on all images after nine tenths of the steps and at the end, and the bytes sent by this rank.
    In step `overflow`, one rank's gradient is not finite."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(model)
    compression = None
    if codec == "onebit":  # the optimizer exchanges the momentum; gradients stay local
        optimizer = compression = gradcodec.torch.OneBitSGD(model.parameters(), RATE, MOMENTUM)
    else:
        optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
        if codec:
            compression = gradcodec.torch.compress(model, codec, raw=())
    losses = []
    for step in range(1, STEPS + 1):
        batch = torch.randint(len(images), (BATCH,))[dist.get_rank() :: dist.get_world_size()].to(device)
        optimizer.zero_grad()
        with model.no_sync() if codec == "onebit" else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            (loss * float("inf") if step == overflow and dist.get_rank() == 0 else loss).backward()
        if codec == "onebit" or all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            optimizer.step()
        if step in (STEPS * 9 // 10, STEPS):
            with torch.no_grad():
                losses.append(torch.nn.functional.cross_entropy(model.module(images), labels).item())
    if overflow and codec != "onebit":
        compression.commit()  # the last step is pending until the next one
    if overflow:
        assert compression.taken_back == 1
    return *losses, compression.bytes_sent if compression else 0


def worker(rank, world, backend, store):
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    images, labels = (tensor.to(device) for tensor in digits())
    ring, means = SEEDS * STEPS * 2 * (world - 1) / world * 4 * 4810, {}
    for name, codec in {"plain DDP": None, "int8": "int8", "int4": "int4", "momentum at one bit": "onebit"}.items():
        runs = [train(seed, codec, device, images, labels) for seed in range(SEEDS)]
        before, means[name] = (sum(run[k] for run in runs) / SEEDS for k in range(2))
        if rank == 0:
            sent = sum(run[2] for run in runs) / ring
            size = f"; {sent:.4f} of the bytes of float32 in a ring" if codec else ""
            print(f"{backend}, {world} ranks, {name}: loss {before:.4f}, then {means[name]:.4f}{size}", flush=True)
        assert before > 1.05 * means[name]
    of_plain = {name: mean / means["plain DDP"] - 1 for name, mean in means.items()}
    if rank == 0:
        print(f"{backend}: within 5 %: {all(abs(gap) < 0.05 for gap in of_plain.values())}")
    assert all(abs(gap) < 0.05 for gap in of_plain.values()), of_plain
    for codec in "int4", "onebit":
        _, loss, _ = train(0, codec, device, images, labels, overflow=50)
        _, whole, _ = train(0, codec, device, images, labels)
        if rank == 0:
            print(f"{backend}, {codec}: one Inf, one step left out, loss as before: {abs(loss / whole - 1) < 0.1}")
        assert abs(loss / whole - 1) < 0.1
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
