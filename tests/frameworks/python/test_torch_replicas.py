"""Tests of gradcodec.torch.shard(replicate_group=): replicas of a sharded model (HSDP), on two times two ranks."""

import copy
import math
import os

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import gathered, in_turn, on_groups, on_ranks, same  # noqa: E402
from test_torch_shard import Linear, divide_by  # noqa: E402
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # noqa: E402

from gradcodec.torch import shard  # noqa: E402

SHAPES = [(8,), (36, 5), (4, 1, 3), (1000,), (64, 64)]


def meshes():
    return dist.init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("replica", "part"))


def replicated(mesh, dtype=torch.float32, factor=None, shapes=SHAPES):
    """Returns a model of two modules that are sharded over a mesh of one dimension, or of FSDP's own two."""
    model = torch.nn.Sequential(Linear(shapes[:2]), Linear(shapes[2:]))
    model.forward = lambda gradients: model[0](gradients[:2]) + model[1](gradients[2:])
    for module in model[0], model:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    if factor is not None:
        divide_by(model, factor)
    return model


def compressed(codec, factor=None, dtype=torch.float32, shapes=SHAPES, **options):
    mesh = meshes()
    model = replicated(mesh["part"], dtype, factor, shapes)
    return model, shard(model, codec, replicate_group=mesh["replica"].get_group(), **options)


def backward(model, gradients):
    """Returns the gradients of this rank's parts."""
    model.zero_grad()
    model(gradients).backward()
    return [weight.grad.to_local() for weight in model.parameters()]


def reduced_plainly(given, factor=None, dtype=torch.float32):
    """Returns gradients as FSDP alone reduces them over a mesh of two dimensions. Gloo has no AVG and no PREMUL_SUM."""
    model = replicated(meshes(), dtype, factor)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return backward(model, given)


def mine(step, shapes=SHAPES):
    torch.manual_seed(100 * step + dist.get_rank())
    return [torch.randn(shape) for shape in shapes]


def whole_numbers(step):
    """Returns numbers whose means and sums over four ranks BF16 represents without loss."""
    torch.manual_seed(100 * step + dist.get_rank())
    return [torch.randint(-16, 17, shape) * 2.0 ** (k - step) for k, shape in enumerate(SHAPES)]


def the_mean_is_that_of_fsdp_with_two_dimensions():
    for factor in None, 2.0, 8.0:  # 2: FSDP takes this factor for the mean of a replica
        model, compression = compressed("bf16", factor=factor, raw=())
        for step in range(2):
            expected = reduced_plainly(whole_numbers(step), factor)
            torch.testing.assert_close(backward(model, whole_numbers(step)), expected, rtol=0, atol=0)
        assert compression.taken_back == 0
        assert compression.topology.split("; replicas: ")[1].startswith("1 node of 2 ranks, over ")
    model, compression = compressed("int8", dtype=torch.float16, raw=(), gather="int8")
    for gradient, one in zip(backward(model, mine(0)), reduced_plainly(mine(0))):
        assert (gradient - one).norm() < 0.02 * one.norm()
    everywhere = gathered([weight.grad.to_local().cpu() for weight in model.parameters()])
    assert same(everywhere[:2], everywhere[2:])


def after_close_replicas_are_averaged_plainly():
    for factor in None, 1.0:
        model, compression = compressed("int4", factor=factor)
        backward(model, mine(0))
        compression.close()
        if factor:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        torch.testing.assert_close(backward(model, mine(1)), reduced_plainly(mine(1), factor), rtol=1e-5, atol=1e-5)
        shard(model, "int8", replicate_group=meshes()["replica"].get_group())


def arrived_and_carried(model, compression, given, received):
    """Checks that all gradients have arrived, or are kept by the ranks, on both levels. Returns the state."""
    mesh, world = meshes(), dist.get_world_size()
    state, part = compression.state_dict(), mesh["part"].get_local_rank()
    lost = 0.0
    for (name, _), total, arrived in zip(model.named_parameters(), given, received):
        left = (total.view(-1) - state["worker"][name]) / world
        dist.all_reduce(left)
        left = left.view(total.shape).chunk(2)[part].reshape(-1)
        of_replicas = state["worker"][f"{name}@replicas"] / 2
        for first, server in state["server"].get(f"{name}@replicas", []):  # the other replica may have all elements
            of_replicas[first : first + server.numel()] += server
            lost = max(lost, server.abs().max().item())
        dist.all_reduce(of_replicas, group=mesh["replica"].get_group())
        torch.testing.assert_close(arrived.reshape(-1), left - of_replicas, rtol=0, atol=1e-4)
        assert state["worker"][f"{name}@replicas"].abs().max() > 1e-3
    assert lost > 1e-3
    return state


def nothing_is_lost_but_what_is_carried():
    for codec in "int4", "onebit":
        model, compression = compressed(codec, raw=() if codec == "int4" else None, momentum=True)
        given, received = [torch.zeros(shape) for shape in SHAPES], None
        for step in range(6):
            gradients = backward(model, mine(step))
            received = [one + (other if step else 0) for one, other in zip(gradients, received or gradients)]
            for total, gradient in zip(given, mine(step)):
                total += gradient
            if step == 2:  # continues from the saved state
                state = copy.deepcopy(arrived_and_carried(model, compression, given, received))
                compression.close()
                model, compression = compressed(codec, raw=() if codec == "int4" else None, momentum=True)
                compression.load_state_dict(state)
        arrived_and_carried(model, compression, given, received)
        whole_world = [{**state, "rank": rank, "world_size": 4} for rank in range(4)]
        compression.load_state_dict(whole_world)  # parts of another size
        backward(model, mine(0))


def errors_stay_when_a_parameter_is_frozen_in_between():
    model, compression = compressed("int4", raw=())
    frozen = list(model.parameters())[-1]
    given, received = ([torch.zeros(shape) for shape in SHAPES] for _ in range(2))
    received = [total.chunk(2)[meshes()["part"].get_local_rank()].clone() for total in received]
    for step in range(8):
        frozen.requires_grad_(step not in (2, 3, 5))
        model.zero_grad()
        model(mine(step)).backward()
        for one, total, gradient, arrived in zip(model.parameters(), given, mine(step), received):
            if one.requires_grad:
                total += gradient
                arrived += one.grad.to_local()
        if step in (3, 6):
            compression.load_state_dict(copy.deepcopy(compression.state_dict()))
    arrived_and_carried(model, compression, given, received)


def one_nan_takes_the_step_back_on_all_replicas():
    model, compression = compressed("int4", raw=())
    for step in range(2):
        backward(model, mine(step))
    before = copy.deepcopy(compression.state_dict())
    for rank, at in (3, 0), (0, -1):
        given = mine(2)
        if dist.get_rank() == rank:
            given[4].view(-1)[at] = math.nan
        backward(model, given)
        state = compression.state_dict()
        assert same(state["worker"], before["worker"]) and state["server"].keys() == before["server"].keys()
    assert compression.taken_back == 2
    expected = [one.clone() for one in backward(model, mine(2))]
    compression.rollback()
    assert same(backward(model, mine(2)), expected)
    assert compression.taken_back == 3


def bytes_between_replicas_are_counted():
    shapes = [(64, 512)] * 2 + [(256, 256)] * 3
    model, compression = compressed("int8", shapes=shapes, gather="int8")
    backward(model, mine(0, shapes))
    group = compression._replicas
    before, of_all = group.bytes_sent, compression.bytes_sent
    backward(model, mine(1, shapes))
    elements = sum(math.prod(shape) for shape in shapes) / 2  # a part's; each of two ranks sends half of it, twice
    between = group.bytes_sent - before
    assert 1.03 < between / elements < 1.04
    within = (compression.bytes_sent - of_all - between) / elements
    assert 2.25 * 1.03 < within < 2.25 * 1.04  # a gradient, and parameters twice, but the last module's, 3 of 4, once


def refusals():
    mesh, rank = meshes(), dist.get_rank()
    one_replica, replicas = mesh["part"].get_group(), mesh["replica"].get_group()
    plain = replicated(mesh["part"])
    hooked = replicated(mesh["part"])
    hooked.set_all_reduce_hook(print)
    other_shapes = replicated(mesh["part"], shapes=[(8,), (36, 5 + rank // 2), *SHAPES[2:]])
    of_one = r"replicate_group: ranks of other replicas, .* list \[\d, \d\] are one replica"
    for call, kind, words in [
        (lambda: shard(plain, replicate_group=one_replica), ValueError, of_one),
        (lambda: shard(plain, replicate_group=dist.group.WORLD), ValueError, "replicate_group: ranks of other replicas"),
        (lambda: shard(plain, replicate_group="all"), TypeError, "group: a process group that this rank belongs to"),
        (lambda: shard(hooked, replicate_group=replicas), RuntimeError, "it has an all-reduce hook already"),
        (lambda: shard(other_shapes, replicate_group=replicas), ValueError, r"1: \(18, 5\) on rank 0 and \(18, 6\) on rank 1"),
        (
            lambda: shard(replicated(mesh), replicate_group=replicas), ValueError,
            r"model: .*: fully_shard\(\) on a mesh of one dimension expected with replicate_group",
        ),
        (
            lambda: shard(plain, "int8" if rank < 2 else "int4", replicate_group=replicas), ValueError,
            "codec: 'int8' on rank 0 and 'int4' on rank 1, not the same",
        ),
        (
            lambda: shard(plain, gather="int8" if rank % 2 else None, replicate_group=replicas), ValueError,
            "gather: None on rank 0 and 'int8' on rank 1, not the same",
        ),
        (
            lambda: shard(plain, replicate_group=replicas if rank % 2 else None), ValueError,
            "replicas: None on rank 0 and 2 on rank 1, not the same",
        ),
    ]:  # fmt: skip
        with pytest.raises(kind, match=words):
            call()
        dist.barrier()
    shard(plain, replicate_group=replicas)  # nothing was changed


@on_groups(4)
def test_replicas(group, tmp_path):
    os.environ.pop("GRADCODEC_NODE", None)
    on_ranks(
        group, in_turn, tmp_path, the_mean_is_that_of_fsdp_with_two_dimensions, after_close_replicas_are_averaged_plainly,
        nothing_is_lost_but_what_is_carried, errors_stay_when_a_parameter_is_frozen_in_between,
        one_nan_takes_the_step_back_on_all_replicas,
        bytes_between_replicas_are_counted, refusals,
    )  # fmt: skip
