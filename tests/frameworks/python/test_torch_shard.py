"""Tests of gradcodec.torch.shard: the gradients of FSDP2, steps that are taken back, errors in checkpoints."""

import copy
import gc
import math
import os
import weakref

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import gathered, in_turn, on_groups, on_ranks, same, states_of_all  # noqa: E402
from torch.distributed._composable.replicate_with_fsdp import replicate  # noqa: E402
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult  # noqa: E402
except ImportError:  # this PyTorch has one mesh for each fully_shard()
    ShardPlacementResult = None

from gradcodec import GradCodecError, _torch_fsdp, _torch_groups  # noqa: E402
from gradcodec.torch import compress, shard  # noqa: E402

# Some shapes cannot be cut into equal parts, and one has fewer rows than there are ranks.
SHAPES = [(8,), (33, 5), (1, 1, 3), (1001,), (64, 64)]
EVEN = [(8,), (34, 5), (1, 1, 3), (1000,), (64, 64)]
EVEN_OF_FOUR = [(8,), (36, 5), (4, 1, 3), (1000,), (64, 64)]


class Linear(torch.nn.Module):
    """A model whose gradient is the argument of its forward pass."""

    def __init__(self, shapes):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, gradients):
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients))


def sharded(dtype=torch.float32, factor=None, shapes=SHAPES):
    model = torch.nn.Sequential(Linear(shapes[:2]), Linear(shapes[2:]))
    model.forward = lambda gradients: model[0](gradients[:2]) + model[1](gradients[2:])
    mesh = dist.init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if factor is not None:
        divide_by(model, factor)
    return model


def divide_by(model, factor):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)


def whole(tensor):
    """Returns the whole tensor, gathered as objects: full_tensor() of PyTorch 2.11 crashes over gloo for GPUs."""
    return torch.cat(gathered(tensor.to_local().cpu()), tensor.placements[0].dim).to(tensor.device)


def backward(model, gradients):
    model.zero_grad()
    model(gradients).backward()
    return [whole(weight.grad) for weight in model.parameters()]


def of_one_magnitude(step, shapes=EVEN):
    """Returns gradients with one magnitude per parameter, which ONEBIT sends without loss if no part is padded."""
    torch.manual_seed(step)
    return [(torch.randint(2, shape) * 2 - 1) * 2.0 ** (k - 2) for k, shape in enumerate(shapes)]


def mine(step, shapes=SHAPES):
    torch.manual_seed(100 * step + dist.get_rank())
    return [torch.randn(shape) for shape in shapes]


def what_is_of_one_magnitude_comes_back():
    for dtype in torch.float32, torch.float16, torch.bfloat16:  # float16: FSDP requests a sum
        model = sharded(dtype, shapes=EVEN)
        with shard(model, "onebit", momentum=True) as compression:
            for step in range(3):
                expected = of_one_magnitude(step)
                torch.testing.assert_close(backward(model, expected), expected, rtol=0, atol=0)
            assert compression.taken_back == 0 and compression.bytes_sent > 0
            assert compression.stats().keys() == dict(model.named_parameters()).keys()


def one_inf_takes_the_step_back_in_every_module_on_every_rank():
    model = sharded(shapes=EVEN)  # errors of padding are not saved
    compression = shard(model, "onebit", momentum=True)
    for step in range(2):
        backward(model, mine(step, EVEN))
    before = copy.deepcopy(compression.state_dict())
    gradients = mine(2, EVEN)
    if dist.get_rank() == 1:
        gradients[0][0] = torch.inf
    assert not all(gradient.isfinite().all() for gradient in backward(model, gradients))
    assert same(compression.state_dict()["worker"], before["worker"]) and compression.taken_back == 1
    expected = backward(model, mine(2, EVEN))
    compression.load_state_dict(before)
    assert same(expected, backward(model, mine(2, EVEN)))
    backward(model, mine(3, EVEN))
    compression.rollback()
    assert compression.taken_back == 2


def a_pass_that_broke_off_is_taken_back():
    model = sharded(shapes=EVEN)
    if not hasattr(model, "reset_iter_state"):  # FSDP itself cannot continue, then
        return
    compression, calls = shard(model, "onebit", momentum=True, transport=dist.get_backend()), []
    for step in range(2):
        backward(model, mine(step, EVEN))
    before, to_all = copy.deepcopy(compression.state_dict()), compression._group._to_all

    def fail_in_the_second_module(*arguments):
        calls.append(None)
        if len(calls) == 2:
            raise OSError("the network is down")
        return to_all(*arguments)

    compression._group._to_all = fail_in_the_second_module
    with pytest.raises((GradCodecError, RuntimeError), match="the network is down"):
        backward(model, mine(2, EVEN))
    compression._group._to_all = to_all
    model.reset_iter_state()
    arrived = backward(model, mine(2, EVEN))
    assert compression.taken_back == 1
    compression.load_state_dict(before)
    assert same(arrived, backward(model, mine(2, EVEN)))


def a_pass_whose_first_handle_is_refused_leaves_nothing_behind():
    model = sharded(shapes=EVEN)
    if not hasattr(model, "reset_iter_state"):  # FSDP itself cannot continue, then
        return
    compression = shard(model, "onebit", momentum=True)
    made, handle = [], _torch_fsdp.Handle

    def refuse(*arguments, **options):
        made.append(None)
        raise MemoryError("no room for a handle")

    _torch_fsdp.Handle = refuse
    try:
        with pytest.raises(MemoryError, match="no room"):
            backward(model, mine(0, EVEN))
    finally:
        _torch_fsdp.Handle = handle
    model.reset_iter_state()
    arrived, other = backward(model, mine(0, EVEN)), sharded(shapes=EVEN)
    of_other = shard(other, "onebit", momentum=True)
    assert made and all(map(torch.equal, arrived, backward(other, mine(0, EVEN))))
    worker = compression.state_dict()["worker"]
    assert same(worker, of_other.state_dict()["worker"]) and any(errors.any() for errors in worker.values())


def of_three(**options):
    """Returns parameters of 64 by 64, sharded together; the arguments of the forward pass are their gradients."""
    module = torch.nn.Module()
    for name in "abc":
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(64, 64)))
    module.forward = lambda **given: sum((getattr(module, name) * one).sum() for name, one in given.items())
    ignored = {getattr(module, name) for name in options.pop("ignored", "")}
    mesh = dist.init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    return fully_shard(module, mesh=mesh, ignored_params=ignored, **options)


def loses_nothing(model, compression, given):
    """Checks that the state has, by names of parameters, the part of the gradients that has not arrived."""
    arrived = {name: torch.zeros(64, 64) for name in given}
    for _ in range(3):
        model.zero_grad()
        model(**given).backward()
        for name, total in arrived.items():
            total += whole(getattr(model, name).grad)
    carried = compression.state_dict()["worker"]
    assert carried.keys() == given.keys()
    for name, one in given.items():
        left = (3 * one - carried[name].view(64, 64)) / dist.get_world_size()
        dist.all_reduce(left)
        torch.testing.assert_close(arrived[name], left, rtol=0, atol=1e-4)
        assert carried[name].abs().max() > 0.01


def a_gradient_gets_no_errors_of_another():
    """Gives two of three parameters a gradient in each pass, so that the rows are alike."""
    torch.manual_seed(dist.get_rank())
    for codec in "int4", "onebit":
        model, random, ones = of_three(), torch.randn(64, 64), torch.ones(64, 64)
        compression = shard(model, codec, raw=None if codec == "onebit" else (), momentum=True)
        model(a=random, b=random).backward()
        model.zero_grad()
        model(b=ones, c=ones).backward()
        torch.testing.assert_close(whole(model.c.grad), ones, rtol=0.01, atol=0)
        assert not any(errors.any() for errors in compression.state_dict()["worker"].values())


def whatever_the_cut_and_whoever_is_not_sharded_errors_are_those_of_parameters():
    torch.manual_seed(dist.get_rank())
    given = {name: torch.randn(64, 64) for name in "abc"}
    model = of_three(shard_placement_fn=lambda _: Shard(1))
    compression = shard(model, "int4")
    loses_nothing(model, compression, given)
    state = compression.state_dict()
    compression.load_state_dict(copy.deepcopy(state))
    model(**{name: torch.zeros(64, 64) for name in "abc"}).backward()
    now = compression.state_dict()
    compression.load_state_dict([{**state, "rank": 0, "world_size": 1}])
    model(**{name: torch.zeros(64, 64) for name in "abc"}).backward()
    assert same(now["worker"], compression.state_dict()["worker"])
    given.pop("c")
    for options in {"ignored": "c"}, {}:
        model = of_three(**options)
        compression = shard(model, "int4")
        if not options:
            model(**given, c=given["a"]).backward()
            compression.load_state_dict({**compression.state_dict(), "worker": {}})
            model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)
            model.c.requires_grad_(False)
        loses_nothing(model, compression, given)
    alive = weakref.ref(model)
    del model, compression
    gc.collect()
    assert alive() is None


def modules_that_are_sharded_together_are_one():
    mesh = dist.init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    for order in (1, 2), (2, 1):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 32))
        fully_shard([model[k] for k in order], mesh=mesh)
        fully_shard(model, mesh=mesh)
        compression = shard(model, "int4")
        model(torch.randn(4, 64)).square().sum().backward()
        lost = {name for name, one in compression.stats().items() if one}
        assert lost == compression.state_dict()["worker"].keys() == {"0.weight", "2.weight"}
        with pytest.raises(RuntimeError, match="compressed already"):
            shard(model[2], "int4")


def with_tensor_parallelism_gradients_are_those_of_the_data_ranks():
    """Uses four ranks, two of each kind. Some parameters are cut twice in one dimension."""
    if torch.get_default_device().type != "cpu":
        return  # gloo does not have all of its collectives on a GPU
    os.environ["GRADCODEC_NODE"] = "one"
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    gradients = []
    for codec in None, "int8":
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        if codec:
            compression = shard(model, codec, raw=["0.bias"], error="float32")
        torch.manual_seed(mesh["data"].get_local_rank())
        model(torch.randn(4, 64)).square().sum().backward()
        gradients.append([weight.grad.to_local() for weight in model.parameters()])
    for number, (plain, one) in enumerate(zip(*gradients)):
        lost = (one - plain).norm() / plain.norm()
        assert lost < 1e-6 if number == 1 else 0 < lost < 0.02, (number, lost)
    state = compression.state_dict()
    assert {name: errors.numel() for name, errors in state["worker"].items()} == {
        "0.weight": 2048, "1.weight": 2048, "1.bias": 64,
    }  # fmt: skip
    compression.load_state_dict(state)
    compression.close()
    with pytest.raises(ValueError, match=r"group: the ranks of FSDPSequential, list \[\d, \d\], expected, got list"):
        shard(model, group=mesh["tensor"].get_group())


def parameters_on_several_meshes_are_refused():
    if torch.get_default_device().type != "cpu":
        return  # the comparison does not depend on the device
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("some", "others"))
    whole = FSDPMeshInfo(dist.init_device_mesh("cpu", (4,)), shard_mesh_dim=0)
    if ShardPlacementResult is not None:
        some = FSDPMeshInfo(mesh["some"], shard_mesh_dim=0)
        model = torch.nn.Sequential(Linear(EVEN_OF_FOUR[:2]), Linear(EVEN_OF_FOUR[2:]))
        first, place = model[0].weights[0], ShardPlacementResult
        on_either = dict(shard_placement_fn=lambda one: place(Shard(0), some if one is first else whole))
        fully_shard(model[0], mesh=whole.mesh, **on_either)
        fully_shard(model, mesh=whole.mesh)
        with pytest.raises(ValueError, match="model: 0: parameters on one mesh expected, got 2 meshes in one fully_sh"):
            shard(model)
    model = torch.nn.Sequential(Linear(EVEN_OF_FOUR[:2]), Linear(EVEN_OF_FOUR[2:]))
    fully_shard(model[0], mesh=mesh["some"])
    fully_shard(model, mesh=whole.mesh)
    with pytest.raises(ValueError, match=r"group: the ranks of 0, list \[\d, \d\], expected, got list \[0, 1, 2, 3\]"):
        shard(model)


NODES = [lambda rank: rank // 2, lambda rank: rank % 2, lambda rank: rank in (0, 3)]  # node of each rank


def over_nodes_what_is_of_one_magnitude_comes_back():
    """Checks that every row of FSDP's buffer goes to its own rank, whichever ranks share a node."""
    for node in NODES:
        os.environ["GRADCODEC_NODE"] = str(node(dist.get_rank()))
        for dtype in torch.float32, torch.float16:
            model = sharded(dtype, shapes=EVEN_OF_FOUR)
            with shard(model, "onebit", momentum=True) as compression:
                assert compression.topology.startswith("2 nodes of 2 ranks: sums within"), compression.topology
                for step in range(2):
                    expected = of_one_magnitude(step, EVEN_OF_FOUR)
                    torch.testing.assert_close(backward(model, expected), expected, rtol=0, atol=0)
                assert compression.taken_back == 0


def over_nodes_nothing_is_lost_whatever_the_nodes_become():
    """Checks that the mean of all gradients has arrived, or is kept by the ranks, while worlds change."""
    for codec, dtype in ("int4", torch.float16), ("onebit", torch.float32):
        scale = 2 if dtype is torch.float16 else 1  # FSDP divides float16 before it adds, so errors are divided, too
        given, received = ([torch.zeros(shape) for shape in EVEN_OF_FOUR] for _ in range(2))
        states = None
        worlds = [(NODES[0], "auto"), (NODES[1], "auto"), (NODES[1], "flat"), (NODES[0], "auto")]
        for step, (node, transport) in enumerate(worlds):
            os.environ["GRADCODEC_NODE"] = str(node(dist.get_rank()))
            model = sharded(dtype, shapes=EVEN_OF_FOUR)
            options = {"momentum": True} if codec == "onebit" else {"raw": ()}
            compression = shard(model, codec, transport=transport, **options)
            if states is not None:
                compression.load_state_dict(states)
            for number in range(2):
                for total, gradient in zip(received, backward(model, mine(10 * step + number, EVEN_OF_FOUR))):
                    total += gradient
                for total, gradient in zip(given, mine(10 * step + number, EVEN_OF_FOUR)):
                    total += gradient
            states = states_of_all(compression.state_dict())
            own = states[dist.get_rank()]
            assert (own["nodes"], own["ranks_per_node"]) == ((2, 2) if transport == "auto" else (1, 4))
            for (name, _), total, arrived in zip(model.named_parameters(), given, received):
                exact, its = total.clone(), sum(state["worker"][name] for state in states)
                dist.all_reduce(exact)
                left = (exact.view(-1) - its.to(exact.device) * scale) / 4
                most = 2e-3 if dtype is torch.float16 else 1e-4
                torch.testing.assert_close(arrived.view(-1), left, rtol=1e-3, atol=most)
                assert its.abs().max() > 0.01
            compression.close()


def over_nodes_one_nan_takes_the_step_back_on_every_rank():
    """Checks that all ranks agree, although the first half flags the NaN on the ranks of its part alone."""
    os.environ["GRADCODEC_NODE"] = str(NODES[0](dist.get_rank()))
    model = sharded(shapes=EVEN_OF_FOUR)
    compression = shard(model, "onebit", momentum=True)
    for step in range(2):
        backward(model, mine(step, EVEN_OF_FOUR))
    before = copy.deepcopy(compression.state_dict())
    for rank, at in (1, 0), (2, -1), (3, 40):  # elements in parts of different ranks
        gradients = mine(2, EVEN_OF_FOUR)
        if dist.get_rank() == rank:
            gradients[4].view(-1)[at] = torch.nan
        backward(model, gradients)
        assert same(compression.state_dict()["worker"], before["worker"])
    assert compression.taken_back == 3


def refusals():
    model = sharded()
    compression = shard(model, "onebit", momentum=True)
    for call, kind, words in [
        (lambda: shard(model), RuntimeError, "compressed already"),
        (lambda: shard(Linear(SHAPES)), TypeError, "one that fully_shard.. was called for expected, got Linear"),
        (lambda: compress(model), TypeError, "a DistributedDataParallel expected, got FSDPSequential"),
        (lambda: shard(sharded(), "zip"), ValueError, "codec: one of"),
        (lambda: shard(sharded(), transport="carrier"), ValueError, "transport: one of auto"),
        (lambda: shard(sharded().requires_grad_(False)), ValueError, "one parameter that is sharded"),
    ]:
        with pytest.raises(kind, match=words):
            call()
    compression.close()
    expected = mine(0)
    for total in expected:
        dist.all_reduce(total)
    for gradient, total in zip(backward(model, mine(0)), expected):
        torch.testing.assert_close(gradient, total / dist.get_world_size())
    shard(model, "onebit", momentum=True)
    for factor in 0.0, math.nan, math.inf:
        with pytest.raises(ValueError, match="model: .*: a finite gradient divide factor other than 0"):
            shard(sharded(factor=factor))
    for factor in math.inf, math.nan:
        model = sharded()
        shard(model)
        divide_by(model, factor)
        with pytest.raises((ValueError, RuntimeError), match="op: a finite factor of PREMUL_SUM other than 0 expected"):
            backward(model, mine(0))
    replicated = replicate(Linear(SHAPES), mesh=dist.init_device_mesh(torch.get_default_device().type, (2,)))
    with pytest.raises(TypeError, match=r"model: ReplicateLinear: parameters that fully_shard\(\) cuts expected"):
        shard(replicated)


def reduced_plainly(shapes, factor, given):
    """Returns the gradients that FSDP alone makes. Gloo has no PREMUL_SUM, so FSDP adds up and divides."""
    model = sharded(factor=factor, shapes=shapes)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return backward(model, given)


def whole_numbers(step):
    """Returns -127, 0 and 127, in any blocks, times a power of 2, which INT8 represents without loss."""
    torch.manual_seed(100 * step + dist.get_rank())
    return [127.0 * 2 ** (step - k) * torch.randint(-1, 2, shape) for k, shape in enumerate(SHAPES)]


def the_sum_is_divided_by_any_factor():
    for factor in 1.0, -0.25, float(dist.get_world_size()):
        model = sharded(factor=factor)
        compression = shard(model, "int8", raw=())
        for step in range(2):
            expected = reduced_plainly(SHAPES, factor, whole_numbers(step))
            torch.testing.assert_close(backward(model, whole_numbers(step)), expected, rtol=0, atol=0)
        assert compression.taken_back == 0
    model = sharded(factor=3.0)
    compression = shard(model, "int8", raw=(), error="none")
    for gradient, one in zip(backward(model, mine(0)), reduced_plainly(SHAPES, 3.0, mine(0))):
        assert (gradient - one).norm() < 0.02 * one.norm()
    assert all(0 <= lost < 0.04 for lost in compression.stats().values())
    model.set_gradient_divide_factor(1.0)  # for the last module; every pass uses its current factor
    expected = [*reduced_plainly(SHAPES, 3.0, mine(1))[:2], *reduced_plainly(SHAPES, 1.0, mine(1))[2:]]
    for gradient, one in zip(backward(model, mine(1)), expected):
        assert (gradient - one).norm() < 0.02 * one.norm()


def what_a_factor_multiplies_is_carried():
    """Checks that the divided sum has arrived, or is kept by the ranks, for factors that change with the step."""
    for codec in "int4", "onebit":
        model, given, received = sharded(factor=1.0), *([torch.zeros(shape) for shape in SHAPES] for _ in range(2))
        compression = shard(model, codec, raw=() if codec == "int4" else None, momentum=True)
        for step, factor in enumerate((1.0, 0.5, 3.0)):
            divide_by(model, factor)
            for total, gradient in zip(received, backward(model, mine(step))):
                total += gradient
            for total, gradient in zip(given, mine(step)):
                total += gradient / factor
        carried = compression.state_dict()["worker"]
        for (name, _), total, arrived in zip(model.named_parameters(), given, received):
            left = total.view(-1) - carried[name].view(-1)
            dist.all_reduce(left)
            torch.testing.assert_close(arrived.view(-1), left, rtol=0, atol=1e-4)
            assert carried[name].abs().max() > 0.01


def of_signs_the_sum_is_divided():
    model, world = sharded(factor=4.0, shapes=EVEN), dist.get_world_size()
    shard(model, "sign")
    for gradient, one in zip(backward(model, of_one_magnitude(0)), of_one_magnitude(0)):
        torch.testing.assert_close(gradient, one.sign() * world / 4, rtol=0, atol=0)


def a_pytorch_that_tells_no_factor_adds_up():
    telling, _torch_fsdp._factor_of = _torch_fsdp._factor_of, lambda op: telling(None)
    try:
        model = sharded(factor=4.0)
        with pytest.warns(UserWarning, match="FSDP divides the sum, because this PyTorch does not return the factor"):
            shard(model, "int8", raw=())
        expected = reduced_plainly(SHAPES, 4.0, whole_numbers(0))
        torch.testing.assert_close(backward(model, whole_numbers(0)), expected, rtol=0, atol=0)
        later = sharded()
        shard(later)
        divide_by(later, 4.0)
        with pytest.raises((ValueError, RuntimeError), match="op: the factor of PREMUL_SUM expected, which this PyTorch"):
            backward(later, mine(0))
    finally:
        _torch_fsdp._factor_of = telling


def a_group_of_its_own_for_the_reduce_scatter_is_used():
    model = sharded()
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(2)
    compression = shard(model, "int8", raw=())
    assert compression._group.group is not dist.group.WORLD
    assert compression._group.group is model._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_process_group
    expected = reduced_plainly(SHAPES, None, whole_numbers(0))
    torch.testing.assert_close(backward(model, whole_numbers(0)), expected, rtol=0, atol=0)


def gradients_that_are_reduced_after_the_backward_pass_are_refused():
    model = sharded()
    shard(model, "int8")
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(mine(0)).backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match=r"finalize_backward\(\) is not supported"):
        model.finalize_backward()


def parameters_without_a_gradient_keep_their_errors_where_fsdp_sends_zeros():
    model = of_three()
    model.set_reduce_scatter_unused_params(True)
    compression = shard(model, "int4", raw=())
    torch.manual_seed(dist.get_rank())
    given, arrived = torch.randn(64, 64), torch.zeros(64, 64)
    for names in "ab", "bc", "ca":
        model.zero_grad()
        model(**{name: given for name in names}).backward()
        arrived += whole(model.a.grad)
    worker = compression.state_dict()["worker"]
    left = (2 * given - worker["a"].view(64, 64)) / dist.get_world_size()
    dist.all_reduce(left)
    torch.testing.assert_close(arrived, left, rtol=0, atol=1e-4)
    assert worker.keys() == set("abc")


class Experts(torch.nn.Module):
    """A module with fewer experts than there are ranks."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.up = torch.nn.Parameter(torch.randn(1, 32, 64) / 8)
        self.down = torch.nn.Parameter(torch.randn(1, 64, 32) / 8)

    def forward(self, x):
        x = self.norm(x)
        return sum(torch.nn.functional.silu(x @ up) @ down for up, down in zip(self.up, self.down))


class Transformer(torch.nn.Module):
    """The parts of a transformer that matter to FSDP: layers, one of them with experts, between embeddings."""

    def __init__(self, tied):
        super().__init__()
        self.tokens = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(32, 32), Experts()])
        self.norm, self.output = torch.nn.LayerNorm(32), torch.nn.Linear(32, 64, bias=False)
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.output(self.norm(x))


def prefetched(modules, prefetch):
    """Sets each module to prefetch the next one; modules that are sharded together are a list."""
    for one, following in zip(modules, modules[1:]):
        for module in one if isinstance(one, list) else [one]:
            prefetch(module, following if isinstance(following, list) else [following])


def as_torchtitan_does(shard_it, tied=False):
    """Trains with the calls of torchtitan's apply_fsdp_to_decoder(): a sum over all tokens, so FSDP does not divide.
    Tied parameters are sharded together. Experts, fewer than ranks, are cut in their second dimension."""
    torch.manual_seed(0)
    model = Transformer(tied)
    mesh = dist.init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    of_all = dict(mesh=mesh, mp_policy=policy)
    if tied:
        fully_shard([model.tokens, model.norm, model.output], reshard_after_forward=False, **of_all)
    else:
        fully_shard(model.tokens, reshard_after_forward=True, **of_all)
        fully_shard([model.norm, model.output], reshard_after_forward=False, **of_all)
    for layer in model.layers:
        second = dict(shard_placement_fn=lambda one: Shard(1) if one.dim() == 3 else None)
        fully_shard(layer, reshard_after_forward=True, **second, **of_all)
    fully_shard(model, **of_all)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if not shard_it:
                module.set_force_sum_reduction_for_comms(True)
    if not tied:
        in_order = [model.tokens, *model.layers, [model.norm, model.output]]
        prefetched(in_order, lambda module, following: module.set_modules_to_forward_prefetch(following))
        in_order[-1] = model.output
        prefetched(in_order[::-1], lambda module, following: module.set_modules_to_backward_prefetch(following))
    compression = shard_it(model) if shard_it else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    gradients, losses = [], []
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        for accumulated in range(2):
            model.set_requires_gradient_sync(accumulated == 1)
            tokens, labels = torch.randint(64, (2, 4, 16)).unbind()
            said = model(tokens).flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(said, labels.flatten(), reduction="sum")
            (loss / (2 * 4 * 16 * dist.get_world_size())).backward()
            losses.append(loss.item())
        gradients.append([whole(one.grad) for one in model.parameters()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return gradients, losses, compression


def the_calls_of_torchtitan_give_the_sum():
    for tied in False, True:
        plain, losses, _ = as_torchtitan_does(None, tied)
        gradients, own, compression = as_torchtitan_does(lambda model: shard(model, "int8"), tied)
        for one, expected in zip(gradients[0], plain[0], strict=True):
            assert 0 < expected.norm() and (one - expected).norm() <= 0.03 * expected.norm(), tied
        assert all(abs(one - other) < 0.01 * other for one, other in zip(own, losses))
        assert compression.taken_back == 0 and compression.bytes_sent > 0


def a_rank_alone_says_for_which_others_it_waits():
    device, own = torch.get_default_device(), [torch.get_default_device()] if torch.get_default_device().index else None
    hint, _torch_groups.HINT_AFTER = _torch_groups.HINT_AFTER, 0.2
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, device=device), device_ids=own)
    model = sharded()
    try:
        for hook, of in (compress, ddp), (shard, model):
            if dist.get_rank() == 0:
                said = rf"{hook.__name__}\(\) waits for ranks 1 of the group, and every rank has to call it"
                alone = rf"{hook.__name__}\(\): every rank .*, and within 2 s it was not called on ranks 1 of the group"
                with pytest.warns(UserWarning, match=said), pytest.raises(RuntimeError, match=alone):
                    hook(of, timeout=2)
            dist.barrier()
            hook(of).close()  # both ranks wait for each other without a limit
        with pytest.raises(ValueError, match=r"call: '(shard|compress)\(\)' on rank 0 and '(shard|compress)\(\)' on rank 1"):
            compress(ddp) if dist.get_rank() else shard(model, group=dist.group.WORLD)
    finally:
        _torch_groups.HINT_AFTER = hint


@on_groups(2)
def test_shard(group, tmp_path):
    on_ranks(
        group, in_turn, tmp_path, what_is_of_one_magnitude_comes_back,
        one_inf_takes_the_step_back_in_every_module_on_every_rank, a_pass_that_broke_off_is_taken_back,
        a_gradient_gets_no_errors_of_another,
        whatever_the_cut_and_whoever_is_not_sharded_errors_are_those_of_parameters,
        modules_that_are_sharded_together_are_one, the_sum_is_divided_by_any_factor,
        what_a_factor_multiplies_is_carried, of_signs_the_sum_is_divided, a_pytorch_that_tells_no_factor_adds_up,
        a_pass_whose_first_handle_is_refused_leaves_nothing_behind, the_calls_of_torchtitan_give_the_sum,
        *((a_group_of_its_own_for_the_reduce_scatter_is_used, gradients_that_are_reduced_after_the_backward_pass_are_refused,
           parameters_without_a_gradient_keep_their_errors_where_fsdp_sends_zeros)
          if hasattr(FSDPModule, "finalize_backward") else ()), a_rank_alone_says_for_which_others_it_waits, refusals,
    )  # fmt: skip
