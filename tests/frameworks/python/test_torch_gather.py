"""Tests of gradcodec.torch.shard(gather=): the parameters with which modules of FSDP2 compute, and the bytes sent."""

import math
import os

import pytest

torch = pytest.importorskip("torch")

import test_torch_shard  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import in_turn, on_groups, on_ranks, same_on_all, sent_by_pairs  # noqa: E402
from test_torch_shard import NODES, SHAPES, as_torchtitan_does, backward, mine, whole  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

from gradcodec import GradCodec  # noqa: E402
from gradcodec.torch import shard  # noqa: E402


class Watched(torch.nn.Module):
    """Module that records its parameters in each forward and backward pass."""

    def __init__(self, shapes):
        super().__init__()
        self.weights, self.seen = torch.nn.ParameterList(torch.randn(shape) for shape in shapes), []

    def look(self, _=None):
        self.seen.append([weight.detach().clone() for weight in self.weights])

    def forward(self, gradients):
        self.look()
        total = sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients))
        total.register_hook(self.look)
        return 1 * total  # FSDP gathers when the gradient of this result exists


def watched(dtype=None, seed=0, shapes=SHAPES, **options):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(Watched(shapes[:2]), Watched(shapes[2:]))
    model.forward = lambda gradients: model[0](gradients[:2]) + model[1](gradients[2:])
    mesh = dist.init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    for module in model:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype), **options)
    return fully_shard(model, mesh=mesh)


def decoded(weight, codec, dtype):
    """Returns a parameter of which each rank's part was encoded and decoded."""
    world = dist.get_world_size()
    rows = -(-weight.shape[0] // world)
    filled = torch.zeros(world * rows, *weight.shape[1:])
    filled[: weight.shape[0]] = weight
    parts = [part.to(dtype).contiguous() for part in filled.chunk(world)]
    if codec:
        client, name = GradCodec(), str(dtype).removeprefix("torch.")
        made = [client.decode(client.encode(part, codec), name) for part in parts]
        parts = [torch.from_dlpack(one).view(part.shape) for one, part in zip(made, parts)]
    return torch.cat(parts)[: weight.shape[0]]


def are_gathered(codec, dtype, **options):
    """Checks that every rank has the same bytes: each shard encoded and decoded, or raw if small or a vector."""
    model = watched(dtype, **options)
    compression = shard(model, "int8", gather=codec)
    masters = [whole(weight) for weight in model.parameters()]
    backward(model, mine(0))
    dtype = dtype or torch.float32
    expected = [decoded(one, codec if one.dim() > 1 and one.numel() >= 1024 else None, dtype) for one in masters]
    for number in range(2):  # forward and backward
        seen = [one for module in model for one in module.seen[number]]
        assert all(len(module.seen) == 2 for module in model) and len(seen) == len(SHAPES)
        for one, other in zip(seen, expected):
            assert one.dtype is dtype and torch.equal(one, other), (codec, dtype, number)
        assert same_on_all(seen)
    assert not all(torch.equal(one, other.to(dtype)) for one, other in zip(expected, masters)) or codec == "bf16"
    for one, other in zip(masters, model.parameters()):
        assert torch.equal(one, whole(other))  # the optimizer's parameters are exact
    return model, compression


def parameters_are_gathered_by_a_codec():
    for codec, dtype in ("bf16", None), ("int8", torch.bfloat16), ("mxfp4", torch.float16):
        model, compression = are_gathered(codec, dtype)
    compression.close()
    model(mine(0))
    for module in model:
        for weight, seen in zip(module.weights, module.seen[-1]):
            assert torch.equal(seen, whole(weight).half())


def modules_that_are_alike_share_what_has_no_errors():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    mesh = dist.init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    for module in model:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for codec, gather, of_gradients in ("int8", "int8", 1), ("int4", "int8", 4), ("int4", "int4", 4):
        with shard(model, codec, gather=gather) as compression:
            for _ in range(2):
                model(torch.randn(4, 64)).square().sum().backward()
            handles = [unit.handle for unit in compression._units()]
            assert (len(handles), len(set(handles)), len(compression._alike)) == (4, of_gradients, 1)


def a_step_sends_these_bytes_per_parameter():
    """Counts bytes as if a rank sent to itself, too; without compression 8 (float32 reduction, bfloat16 gather)."""
    world, shapes = dist.get_world_size(), [(64, 512)] * 2 + [(256, 256)] * 3
    elements = sum(math.prod(shape) for shape in shapes)
    for codec, gather, most in ("int8", None, 1.04), ("int4", "int8", 2.63):
        model = watched(torch.bfloat16, shapes=shapes)
        compression = shard(model, codec, gather=gather)
        backward(model, mine(0, shapes))
        before = compression.bytes_sent
        backward(model, mine(1, shapes))
        sent = (compression.bytes_sent - before) * world / (world - 1) / elements
        assert most - 0.1 < sent < most, (codec, gather, sent)


def losses_are_near_where_parameters_are_gathered_by_int8():
    _, plain, _ = as_torchtitan_does(None)  # prefetches parameters
    _, losses, compression = as_torchtitan_does(lambda model: shard(model, "int8", gather="int8"))
    assert all(0 < abs(one - other) < 0.01 * other for one, other in zip(losses, plain))
    assert compression.taken_back == 0


def what_cannot_be_gathered_is_refused():
    for gather in "onebit", "sign", "zip", 8:
        with pytest.raises(ValueError, match="gather: one of bf16, mxfp8, int8, int4, mxfp4, or None, expected, got"):
            shard(watched(), gather=gather)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model[1].weight = torch.nn.Parameter(model[1].weight.detach().half(), requires_grad=False)
    mesh = dist.init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    for module in model:
        fully_shard(module, mesh=mesh)
    shard(fully_shard(model, mesh=mesh), gather="int8")
    with pytest.raises(TypeError, match="gather: the parameters of 1: one dtype in a module expected, got several"):
        model(torch.randn(4, 64))


def over_nodes_parameters_are_gathered_by_a_codec():
    with sent_by_pairs() as sent:
        for node in NODES:
            os.environ["GRADCODEC_NODE"] = str(node(dist.get_rank()))
            model, compression = are_gathered("int8", torch.bfloat16)
            assert compression.topology.startswith("2 nodes of 2 ranks: sums within")
            before, begun = len(sent), compression.bytes_sent
            backward(model, mine(1))
            if torch.get_default_device().type == "cpu":
                assert compression.bytes_sent - begun == sum(sent[before:]) > 0


def what_fsdp_cuts_within_a_node_is_gathered_there_as_it_is():
    are_gathered("int8", torch.bfloat16, reshard_after_forward=2)


@on_groups(2)
def test_gather(group, tmp_path):
    on_ranks(
        group, in_turn, tmp_path, parameters_are_gathered_by_a_codec, modules_that_are_alike_share_what_has_no_errors,
        a_step_sends_these_bytes_per_parameter, losses_are_near_where_parameters_are_gathered_by_int8,
        what_cannot_be_gathered_is_refused,
    )  # fmt: skip


@on_groups(4)
def test_shard_and_gather_of_four(group, tmp_path):
    on_ranks(
        group, in_turn, tmp_path, test_torch_shard.over_nodes_what_is_of_one_magnitude_comes_back,
        test_torch_shard.over_nodes_nothing_is_lost_whatever_the_nodes_become,
        test_torch_shard.over_nodes_one_nan_takes_the_step_back_on_every_rank,
        over_nodes_parameters_are_gathered_by_a_codec, what_fsdp_cuts_within_a_node_is_gathered_there_as_it_is,
        test_torch_shard.parameters_on_several_meshes_are_refused,
        test_torch_shard.with_tensor_parallelism_gradients_are_those_of_the_data_ranks,
    )  # fmt: skip
