"""Training over a slow link: ranks train independently and exchange 4 bits per weight every 20 steps.

    python3 examples/python/diloco.py

Two processes on the CPU train on digits, each on its own half of the images, and exchange over gloo. In the first run,
DistributedDataParallel averages the gradients of every step in float32. In the second, each rank runs AdamW alone, and
DiLoCo averages the weight changes while training continues. In your own worker, do what train() does.
"""

import os
import pathlib
import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("SKIPPED: no PyTorch here")
    raise SystemExit

import gradcodec.torch

WORLD, STEPS, SYNC_EVERY, BATCH = 2, 200, 20, 64
DIGITS = pathlib.Path(__file__).resolve().parents[2] / "examples_c" / "data" / "digits.bin"


def digits():
    records = torch.frombuffer(bytearray(DIGITS.read_bytes()), dtype=torch.uint8).view(-1, 65)
    return records[:, :64] / 16, records[:, 64].long()


def train(rank, seldom):
    """Trains; returns the final loss on all digits, and the bytes sent by a rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    trained = model if seldom else torch.nn.parallel.DistributedDataParallel(model)
    inner = torch.optim.AdamW(model.parameters(), 1e-3)
    if seldom:  # one of two fragments every 10 steps, applied 2 steps after its exchange has begun
        diloco = gradcodec.torch.DiLoCo(model, sync_every=SYNC_EVERY, fragments=2, delay=2, codec="int4")
    images, labels = digits()
    own = torch.arange(rank, len(images), WORLD)
    for step in range(STEPS):
        batch = own[torch.randint(len(own), (BATCH,))]
        inner.zero_grad()
        torch.nn.functional.cross_entropy(trained(images[batch]), labels[batch]).backward()
        inner.step()
        if seldom:
            diloco.step()
    if seldom:
        diloco.state_dict()  # part of every rank's checkpoint; applies pending exchanges
    parameters = sum(one.numel() for one in model.parameters())
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(images), labels).item()
    return loss, diloco.bytes_sent if seldom else 4 * parameters * STEPS


def worker(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    plain, everything = train(rank, seldom=False)
    loss, sent = train(rank, seldom=True)
    if rank == 0:
        print(f"gradients of every step in float32: loss {plain:.4f}, {everything / 1e6:.1f} MB sent")
        print(f"4 bits per weight every {SYNC_EVERY} steps: loss {loss:.4f}, 1/{everything / sent:.0f} of the bytes")
        print(f"a loss of at most 1.1 times that: {loss < 1.1 * plain}")
    assert loss < 1.1 * plain
    sys.stdout.flush()
    os._exit(0)  # a thread of PyTorch may abort a process whose interpreter ends


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (os.path.join(folder, "store"),), WORLD)
