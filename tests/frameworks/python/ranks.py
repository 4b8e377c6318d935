"""Ranks of a group of torch.distributed over gloo, as processes: for tests that run a function on each."""

import os
import pathlib
import traceback

import torch
import torch.distributed as dist


DIGITS = pathlib.Path(__file__).resolve().parents[3] / "examples_c" / "data" / "digits.bin"


def digits():
    """Handwritten digits: images and what they show."""
    records = torch.frombuffer(bytearray(DIGITS.read_bytes()), dtype=torch.uint8).view(-1, 65)
    return records[:, :64] / 16, records[:, 64].long()


def _rank(rank, function, world, folder, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        function(*arguments)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others would wait for this rank
    os._exit(0)  # threads of PyTorch's may abort a process whose interpreter ends


def on_ranks(world, function, folder, *arguments):
    """Runs function(*arguments) on each of `world` ranks, and fails if it fails on one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(_rank, (function, world, str(folder), arguments), world)
