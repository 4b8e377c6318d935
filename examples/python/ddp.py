"""Data-parallel training in C++: starts the processes and their group, compares gradients of 1 and 32 bits.

    python3 examples/python/ddp.py

Builds ddp.cpp as torch_ops.py does its own source, unless GRADCODEC_DDP names the library that CMakeLists.txt built.
Uses four processes over gloo, on the CPU; then over NCCL one process per GPU, if there are GPUs.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch_ops

DIGITS = torch_ops.ROOT / "examples_c" / "data" / "digits.bin"
WORKERS, SEEDS = 4, 3


def worker(rank, world, backend, library, store):
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    torch.ops.load_library(library)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    group, losses, bytes_sent = dist.group.WORLD.group_name, {}, {}
    for name, one_bit in ("float32", False), ("one bit", True):
        runs = [torch.ops.gradcodec_ddp.train(group, str(DIGITS), seed, one_bit, device) for seed in range(SEEDS)]
        before, losses[name], bytes_sent[name] = (sum(values) / SEEDS for values in zip(*runs))
        if rank == 0:
            steps = f"loss {before:.4f}, then {losses[name]:.4f}"
            print(f"{backend}, {world} ranks, {name}: {steps}; {bytes_sent[name]:.0f} bytes sent by each", flush=True)
        assert before > 1.05 * losses[name]  # training ends while the loss is still falling
    gap = losses["one bit"] / losses["float32"] - 1
    if rank == 0:
        print(f"{backend}: one bit within 2 %: {abs(gap) < 0.02} ({gap:+.2%})")
        if world > 1:  # the bits are a 32nd; for a network as small as this, headers are more than a third
            print(f"{backend}: {bytes_sent['one bit'] / bytes_sent['float32']:.4f} of the bytes of float32 in a ring")
    assert abs(gap) < 0.02 and bytes_sent["one bit"] * 16 <= bytes_sent["float32"]
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of PyTorch may abort a process whose interpreter ends


def show(world, backend, library):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (world, backend, library, os.path.join(folder, "store")), world)


def main():
    library = os.environ.get("GRADCODEC_DDP")
    library = library or torch_ops.build(torch_ops.ROOT / "examples_cpp" / "ddp.cpp", name="gradcodec_ddp")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    show(WORKERS, "gloo", library)
    if not torch.cuda.is_available():
        print("SKIPPED: NCCL, for want of a CUDA device")
        return
    show(min(torch.cuda.device_count(), WORKERS), "nccl", library)


if __name__ == "__main__":
    main()
