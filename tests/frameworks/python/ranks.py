"""Ranks of a group of torch.distributed, as processes, for tests that run a function on each rank."""

import contextlib
import os
import pathlib
import traceback

import pytest
import torch
import torch.distributed as dist

from gradcodec import _torch_nodes

DIGITS = pathlib.Path(__file__).resolve().parents[3] / "examples_c" / "data" / "digits.bin"


def digits():
    """Returns images of handwritten digits, and their labels."""
    records = torch.frombuffer(bytearray(DIGITS.read_bytes()), dtype=torch.uint8).view(-1, 65)
    images, labels = records[:, :64] / 16, records[:, 64].long()
    return images.to(torch.get_default_device()), labels.to(torch.get_default_device())


# Groups, and the device of all tensors that are made without one. NCCL needs a GPU for each rank.
GROUPS = [("gloo", "cpu"), ("gloo", "cuda"), ("nccl", "cuda")]


def on_groups(world):
    """Returns a parameter `group` for on_ranks()."""
    return pytest.mark.parametrize("group", [(*group, world) for group in GROUPS], ids=["gloo", "gloo-cuda", "nccl"])


def in_turn(*functions):
    """Calls each function, and prints its name before, which pytest shows if the function fails."""
    for function in functions:
        print(function.__name__, flush=True)
        function()


def gathered(thing):
    """Returns each rank's `thing`, by rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def same(one, other):
    """Returns True if tensors, or lists and dicts of tensors, have the same elements, on any devices."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def same_on_all(tensors):
    own, *others = gathered([one.detach().cpu() for one in tensors])
    return all(same(own, other) for other in others)


def states_of_all(state):
    """Returns the states of all ranks, in host memory."""
    own = {name: errors.cpu() for name, errors in state["worker"].items()}
    server = {name: [(first, part.cpu()) for first, part in parts] for name, parts in state["server"].items()}
    return gathered({**state, "worker": own, "server": server})


def kept_by_all(state, op="mean"):
    """Returns the sum of all ranks' errors by parameter, in units of the mean or the sum: values not sent yet."""
    world = dist.get_world_size() if op == "mean" else 1
    total = {name: errors / world for name, errors in state["worker"].items()}
    for name, parts in state["server"].items():
        for first, part in parts:
            total[name][first : first + part.numel()] += part
    for errors in total.values():
        dist.all_reduce(errors)
    return total


@contextlib.contextmanager
def sent_by_pairs():
    """Yields a list that gets the bytes of each exchange by pairs."""
    exchange, sent = _torch_nodes.Pairs._exchange, []

    def counted(self, given, call):
        sent.append(call.size * (len(self._ranks) - 1))
        return exchange(self, given, call)

    _torch_nodes.Pairs._exchange = counted
    try:
        yield sent
    finally:
        _torch_nodes.Pairs._exchange = exchange


def _rank(rank, function, world, backend, device, folder, arguments):
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device(f"cuda:{torch.cuda.current_device()}")
    own = {"device_id": torch.get_default_device()} if backend == "nccl" else {}  # or barrier() warns
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, **own)
    try:
        function(*arguments)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others would wait for this rank
    os._exit(0)  # threads of PyTorch's may abort a process whose interpreter ends


def on_ranks(group, function, folder, *arguments):
    """Runs function(*arguments) on each rank of a group, and fails if it fails on one."""
    backend, device, world = group
    if torch.cuda.device_count() < {"cpu": 0, "cuda": 1}[device] * (world if backend == "nccl" else 1):
        pytest.skip("no CUDA device" if backend == "gloo" else f"{world} CUDA devices needed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(_rank, (function, world, backend, device, str(folder), arguments), world)
