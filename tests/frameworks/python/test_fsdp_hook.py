"""examples/python/fsdp_hook.py: what FSDP2's reduce-scatter becomes, over gloo between two processes.

A part of a gradient whose elements have one magnitude loses nothing: it must come back, to the bit.
"""

import os
import traceback

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

from ddp_hook import DTYPES, ERROR_FLOAT32, ERROR_NONE  # noqa: E402
from fsdp_hook import OneBitReduceScatter, one_bit  # noqa: E402

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


class Linear(torch.nn.Module):
    """Its gradient is whatever it is given."""

    def __init__(self, shapes):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, gradients):
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients))


def signs(shape, seed):
    return torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1


def a_row_comes_back(dtype):
    """Of parts with a scale each, and of one that is not known; of whole bytes of bits, and not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for shapes, row in ([(8,), (5, 33)], 4 + 99), ([(16, 3), (2, 1, 8)], 32), ([(4,)], 21):
        comm = OneBitReduceScatter(Linear(shapes))
        for step in range(2):
            values = signs((world, row), step)
            if row != 21:  # parts of the parameters: magnitudes of their own, also by rank
                first = -(-shapes[0][0] // world) * torch.Size(shapes[0][1:]).numel()
                values[:, :first] *= 4
                values[1, first:] *= 2
            given = values.to(dtype).flatten()
            before = given.clone()
            for op, factor in (AVG, 1), (SUM, world):
                output = comm.allocate((row,), dtype=dtype, device=given.device)
                comm(output_tensor=output, input_tensor=given, group=dist.group.WORLD, op=op)
                assert torch.equal(output, (values[rank] * factor).to(dtype)) and torch.equal(given, before)
        ((sizes, _),) = comm.handles.values()
        assert len(sizes) == world * (1 if row == 21 else 2) and sum(sizes) == world * row
        assert comm.elements == 4 * world * row
        with pytest.raises(RuntimeError, match="a mean or a sum expected, got"):
            comm(output, given, dist.group.WORLD, dist.ReduceOp.MAX)


def gradients_are_sharded(dtype):
    shapes = [(8,), (34, 5), (2, 1, 3), (1000,), (64, 64)]
    model = torch.nn.Sequential(Linear(shapes[:2]), Linear(shapes[2:]))
    model.forward = lambda gradients: model[0](gradients[:2]) + model[1](gradients[2:])
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    comms = one_bit(model)
    assert [len(comm.shapes) for comm in comms] == [3, 2]
    for step in range(3):
        expected = [signs(shape, step) * 2.0**k for k, shape in enumerate(shapes)]
        model.zero_grad()
        model(expected).backward()
        for weight, gradient in zip(model.parameters(), expected):
            torch.testing.assert_close(weight.grad.full_tensor(), gradient, rtol=0, atol=0)
    assert [len(sizes) for comm in comms for sizes, _ in comm.handles.values()] == [3 * mesh.size(), 2 * mesh.size()]


def errors_arrive():
    """What a rank is given follows the mean of all, summed over the steps; without errors it would not."""
    world, rank, steps = dist.get_world_size(), dist.get_rank(), 200
    fixed = torch.rand(world, 3001, generator=torch.Generator().manual_seed(1)) * 2 - 1  # parts of which one is shorter
    largest = {}
    for error in ERROR_FLOAT32, ERROR_NONE:
        model = Linear([(3001,)])
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
        one_bit(model, error)
        for _ in range(steps):  # FSDP adds the gradients up
            model([fixed[rank]]).backward()
        total = model.weights[0].grad.full_tensor()
        largest[error] = (total / steps - fixed.mean(0)).abs().max().item()
    assert largest[ERROR_FLOAT32] < 0.1 and largest[ERROR_NONE] > 0.5, largest


def a_failed_exchange_is_raised():
    comm, collective = OneBitReduceScatter(Linear([(8,)])), dist.all_to_all_single
    arguments = torch.ones(4), torch.ones(8), dist.group.WORLD, AVG
    comm(*arguments)

    def fail(*_, **__):
        raise OSError("the network is down")

    dist.all_to_all_single = fail
    with pytest.raises(RuntimeError, match="returned 1") as raised:
        comm(*arguments)
    dist.all_to_all_single = collective
    assert "the network is down" in str(raised.value.__cause__)


def run(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        for dtype in DTYPES:
            a_row_comes_back(dtype)
            gradients_are_sharded(dtype)
        torch.set_default_dtype(torch.bfloat16)  # which the shard that the library writes to is not
        a_row_comes_back(torch.bfloat16)
        torch.set_default_dtype(torch.float32)
        errors_arrive()
        a_failed_exchange_is_raised()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others would wait for this rank
    dist.destroy_process_group()
    os._exit(0)  # threads of PyTorch's may abort a process whose interpreter ends


def test_a_gradient_becomes_the_shards_of_its_mean(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(run, (2, str(tmp_path)), 2)
