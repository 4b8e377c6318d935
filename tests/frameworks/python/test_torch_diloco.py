"""gradcodec.torch.DiLoCo: a model of the algorithm in NumPy, errors that are carried on, rounds that fail, ranks that
are lost, states, and what is refused."""

import os
import pathlib
import signal
import warnings
from contextlib import closing

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from gradcodec import GradCodecError, _torch_groups
from gradcodec.torch import DiLoCo
from ranks import gathered, in_turn, kept_by_all, on_groups, on_ranks, same, same_on_all
from tiers import both

SHAPES = {"a": (6, 5), "b": (31,), "c": (3, 4), "d": (40,)}


class Model(torch.nn.Module):
    """A model of four parameters, which differ between ranks before DiLoCo has them."""

    def __init__(self, seed=7):
        super().__init__()
        generator = torch.Generator(torch.get_default_device()).manual_seed(seed + dist.get_rank())
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator)))


def moves(step, rank):
    """Returns a rank's change of the parameters in an inner step: few bits, so that BF16 is exact."""
    drawn = np.random.default_rng(100 * step + rank)
    return [drawn.integers(-8, 9, shape) / 8 for shape in SHAPES.values()]


def move(model, step, rank=None):
    with torch.no_grad():
        for one, its in zip(model.parameters(), moves(step, dist.get_rank() if rank is None else rank)):
            one -= torch.tensor(its, dtype=torch.float32)


def train(model, diloco, first, last):
    for step in range(first, last + 1):
        move(model, step)
        diloco.step()


def values(tensors):
    return [one.detach().cpu().double().numpy() for one in tensors]


def model_of(world, begin, steps, sync_every, parts, delay, alpha):
    """Returns all ranks' local copies and the global one, by an exact all-reduce. `parts`: numbers of parameters."""
    copies, momenta = [one.copy() for one in begin], [np.zeros_like(one) for one in begin]
    local, sent = [[one.copy() for one in begin] for _ in range(world)], {}
    for t in range(1, steps + 1):
        for rank in range(world):
            for one, its in zip(local[rank], moves(t, rank)):
                one -= its
        for p in range(len(parts)):
            if t % sync_every == p * sync_every // len(parts):
                sent[p] = t, [sum(copies[k] - local[rank][k] for rank in range(world)) / world for k in parts[p]]
            if p in sent and sent[p][0] + delay == t:
                for k, mean in zip(parts[p], sent[p][1]):
                    momenta[k] = 0.9 * momenta[k] + mean
                    copies[k] -= 0.7 * (mean + 0.9 * momenta[k])
                    for rank in range(world):
                        local[rank][k] = alpha * local[rank][k] + (1 - alpha) * copies[k]
    return local, copies


def it_is_the_algorithm_of_the_papers():
    rank, world = dist.get_rank(), dist.get_world_size()
    for sync_every, fragments, parts, delay, alpha in [
        (6, 2, [[0, 1], [2, 3]], 0, 0.0), (9, 4, [[0], [1], [2], [3]], 2, 0.25), (5, 1, [[0, 1, 2, 3]], 4, 1.0),
    ]:  # fmt: skip
        model = Model()
        options = {"sync_every": sync_every, "fragments": fragments, "delay": delay, "alpha": alpha}
        with closing(DiLoCo(model, codec="bf16", **options)) as diloco:
            begin = values(model.parameters())
            assert same_on_all(list(model.parameters()))
            train(model, diloco, 1, 4 * sync_every)
            if delay:  # applies the exchange that is under way
                train(model, diloco, 4 * sync_every + 1, 4 * sync_every + delay)
            local, copies = model_of(world, begin, 4 * sync_every + delay, sync_every, parts, delay, alpha)
            exact = {"rtol": 1e-5, "atol": 1e-5} if alpha == 0 else {"rtol": 0, "atol": 0.02}  # BF16 rounds
            for one, expected in zip(values(diloco._copies), copies):
                np.testing.assert_allclose(one, expected, **exact)
            for one, expected in zip(values(model.parameters()), local[rank]):
                np.testing.assert_allclose(one, expected, **exact)
            assert diloco.steps == 4 * sync_every + delay and diloco.taken_back == 0
            assert same_on_all(diloco._copies) and diloco.bytes_sent > 0


def plain(copies):
    """Returns an outer optimizer that applies the mean as it has arrived."""
    return torch.optim.SGD(copies, lr=1.0)


def kept(diloco):
    """Returns the errors of all ranks by parameter: changes that the global copy does not have yet."""
    found = []
    for part, reducer in zip(diloco._parts, diloco._reducers):
        errors = kept_by_all(reducer.state_dict())
        for number, one in enumerate(diloco._copies[part]):
            found.append(errors.get(str(number), torch.zeros(one.numel())).view(one.shape))
    return values(found)


def check_nothing_is_lost(diloco, begin, steps):
    """Checks that all moves of these steps have arrived or are kept. `begin`: copies and errors before."""
    world = dist.get_world_size()
    moved = [sum(its) / world for its in zip(*(moves(step, rank) for step in steps for rank in range(world)))]
    for before, error, copied, now, total in zip(*begin, values(diloco._copies), kept(diloco), moved):
        np.testing.assert_allclose(before - copied + now, total + error, rtol=0, atol=2e-4)


def what_arrives_and_what_is_kept_is_what_was_moved():
    for codec, fragments in ("int4", 1), ("int4", 2), ("onebit", 1):
        model = Model()
        with closing(DiLoCo(model, outer=plain, sync_every=4, fragments=fragments, codec=codec)) as diloco:
            begin = values(diloco._copies), kept(diloco)
            train(model, diloco, 1, 12)
            parts = [diloco._copies[part] for part in diloco._parts]
            assert same_on_all(diloco._copies) and diloco.rounds == 3 * fragments
            if fragments == 2:  # the second fragment was exchanged at step 10, so steps 11 and 12 are in local copies
                train(model, diloco, 13, 14)
                diloco._begin(0), diloco._end()
                assert [len(part) for part in parts] == [2, 2]
            check_nothing_is_lost(diloco, begin, range(1, 13 if fragments == 1 else 15))
            assert max(abs(one).max() for one in kept(diloco)) > 0.01


def a_value_that_is_not_finite_takes_the_round_back_on_all_ranks():
    rank, model = dist.get_rank(), Model()
    with closing(DiLoCo(model, outer=plain, sync_every=2, fragments=2)) as diloco:
        train(model, diloco, 1, 2)
        before, local = values(diloco._copies), values(model.parameters())
        move(model, 3)
        if rank == 1:
            with torch.no_grad():
                model.d[7] = torch.nan  # in the fragment that is not due
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            diloco.step()
        assert [str(one.message) for one in said] == (
            ["after 3 inner steps d is not finite: this rank takes the global copy"] if rank == 1 else []
        )
        assert (diloco.steps, diloco.rounds, diloco.taken_back) == (3, 2, 1)
        for one, expected in zip(diloco._copies, before):
            np.testing.assert_array_equal(values([one])[0], expected)
        for one, its, expected, moved in zip(values(model.parameters()), before, local, moves(3, rank)):
            np.testing.assert_allclose(one, its if rank == 1 else expected - moved, rtol=0, atol=1e-6)
        train(model, diloco, 4, 5)
        assert diloco.rounds == 4 and all(one.isfinite().all() for one in diloco._copies)


def the_device_of_new_tensors_is_its_own():
    """Checks a step under another default device of the caller."""
    model = Model()
    with closing(DiLoCo(model, outer=plain, sync_every=1)) as diloco:
        move(model, 1)
        with torch.device("meta"):
            diloco.step()
        assert diloco.rounds == 1 and same_on_all(diloco._copies)


def a_mean_that_is_not_finite_takes_the_round_back_on_all_ranks():
    model = Model()
    with closing(DiLoCo(model, outer=plain, sync_every=1)) as diloco:
        train(model, diloco, 1, 1)
        before, errors = values(diloco._copies), kept(diloco)
        with torch.no_grad():
            model.b.fill_(-3e38)
            diloco._copies[1].fill_(3e38)
        diloco.step()
        assert (diloco.rounds, diloco.taken_back) == (1, 1)
        for one, other in zip(errors, kept(diloco)):
            np.testing.assert_array_equal(one, other)
        assert all((one == other).all() for k, (one, other) in enumerate(zip(before, values(diloco._copies))) if k != 1)


def fails_once(diloco, early):
    """Makes the next exchange raise on this rank, before it has begun or after it has ended well on all ranks."""
    reducer = diloco._reducers[0]
    run = reducer.run

    def fail(tensors):
        del reducer.run
        if not early:
            run(tensors)
        raise OSError("the network is down")

    reducer.run = fail


def an_exchange_that_fails_on_one_rank_is_taken_back_on_all():
    rank = dist.get_rank()
    for delay, early in (0, False), (1, False), (0, True):
        if early and dist.get_backend() != "gloo":
            return  # over NCCL the others wait for this rank until the timeout
        model = Model()
        with closing(DiLoCo(model, outer=plain, sync_every=2, delay=delay)) as diloco:
            begin = values(diloco._copies), kept(diloco)
            train(model, diloco, 1, 2 + delay)
            before = values(diloco._copies)
            if rank == 1:
                fails_once(diloco, early)
            train(model, diloco, 3 + delay, 3)
            move(model, 4)
            said = "fragment 0 after 4 inner steps: taken back on all ranks: .*rank 1: OSError: the net"
            with pytest.raises(GradCodecError, match=said):
                for _ in range(1 + delay):
                    diloco.step()
            assert (diloco.rounds, diloco.taken_back) == (1, 1)
            assert all((one == other).all() for one, other in zip(before, values(diloco._copies)))
            if not delay:
                train(model, diloco, 5, 8)
                check_nothing_is_lost(diloco, begin, range(1, 9))
            assert same_on_all(diloco._copies)


def cannot_agree(diloco):
    """Hides the end of the next round from this rank, although all other ranks get it."""
    tell = diloco._tell

    def fail(own):
        found = tell(own)
        if diloco._unsettled is None:
            return found
        diloco._tell = tell
        raise RuntimeError("Connection closed by peer")

    diloco._tell = fail


def a_round_that_some_ranks_have_applied_is_applied_on_all():
    rank = dist.get_rank()
    for fragments, in_a_new_world in (1, False), (2, True):
        model = Model()
        diloco = DiLoCo(model, sync_every=4, fragments=fragments, alpha=0.0)
        twin_model = Model()
        twin = DiLoCo(twin_model, sync_every=4, fragments=fragments)
        for step in range(1, 8):
            train(model, diloco, step, step)
            train(twin_model, twin, step, step)
        move(model, 8)
        if rank == 1:
            cannot_agree(diloco)
            with pytest.raises(RuntimeError, match="Connection closed"):
                diloco.step()
        else:
            diloco.step()
        train(twin_model, twin, 8, 8)
        if in_a_new_world:
            state = diloco.state_dict()
            assert (state["unsettled"] is not None) == (rank == 1)
            if rank == 1:
                with pytest.raises(ValueError, match="the DiLoCo is closed"):
                    diloco.step()
            diloco = DiLoCo(model, sync_every=4, fragments=fragments)
            diloco.load_state_dict(state)
            assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin_model.parameters()))
        for step in range(9, 17):
            for its, which in (model, diloco), (twin_model, twin):
                # Rank 1 lags until the next round, and its updates are lost as with a delay.
                if in_a_new_world or rank != 1 or step > 8 + 4 // fragments:
                    move(its, step)
                which.step()
        assert same([*diloco._copies, *model.parameters()], [*twin._copies, *twin_model.parameters()])
        assert diloco.rounds == twin.rounds == 4 * fragments and diloco.taken_back == 0
        assert all((one == other).all() for one, other in zip(kept(diloco), kept(twin)))
        momenta = [one.state_dict()["state"][0]["momentum_buffer"] for one in diloco.outer]
        assert same_on_all(momenta)


def a_round_that_no_rank_has_applied_is_taken_back():
    for in_a_new_world in False, True:
        model = Model()
        diloco = DiLoCo(model, outer=plain, sync_every=2)
        begin = values(diloco._copies), kept(diloco)
        train(model, diloco, 1, 3)
        move(model, 4)
        cannot_agree(diloco)
        with pytest.raises(RuntimeError, match="Connection closed"):
            diloco.step()
        if in_a_new_world:
            state = diloco.state_dict()
            diloco = DiLoCo(model, outer=plain, sync_every=2)
            diloco.load_state_dict(state)
        train(model, diloco, 5, 6)
        assert (diloco.rounds, diloco.taken_back) == (2, 1)
        check_nothing_is_lost(diloco, begin, range(1, 7))


def what_is_saved_goes_on():
    for options in {"sync_every": 4, "fragments": 2}, {"sync_every": 4, "fragments": 2, "delay": 1, "alpha": 0.25}:
        model, other = Model(), Model(seed=50)
        diloco = DiLoCo(model, **options)
        train(model, diloco, 1, 9)
        path = pathlib.Path(os.environ["DILOCO_FOLDER"], f"{dist.get_rank()}.pt")
        torch.save(diloco.state_dict(), path)
        again = DiLoCo(other, **options)
        again.load_state_dict(torch.load(path))
        assert (again.steps, again.rounds) == (diloco.steps, diloco.rounds) == (9, 4)
        for which, its in (diloco, model), (again, other):
            train(its, which, 10, 17)
        assert same([*diloco._copies, *model.parameters()], [*again._copies, *other.parameters()])


def ranks_join_and_leave():
    """Trains with two ranks, then in a world of another size with the states of both, or with own ones."""
    rank, world, pair = dist.get_rank(), dist.get_world_size(), dist.new_group([0, 1])
    state, model = None, Model()
    if rank < 2:
        diloco = DiLoCo(model, outer=plain, sync_every=2, group=pair)
        train(model, diloco, 1, 4)
        move(model, 5)
        state = diloco.state_dict()
    states = gathered(state)
    for given in states[:2], state:
        other = Model(seed=30)
        whole = DiLoCo(other, outer=plain, sync_every=2)
        whole.load_state_dict(given)
        assert same_on_all(whole._copies) and (whole.steps, whole.rounds) == (4, 2)
        for one, its in zip(other.parameters(), states[rank]["local"] if rank < 2 else states[0]["global"]):
            assert torch.equal(one, its.to(one.device))
        total = [torch.zeros(one.numel()) for one in whole._copies]
        share = 2 if isinstance(given, list) else world  # a list keeps the mean, own states their own rows
        for its in states[:2]:
            for number, one in enumerate(total):
                one += its["errors"][0]["worker"][str(number)].to(one.device) / share
                for first, part in its["errors"][0]["server"].get(str(number), []):
                    one[first : first + part.numel()] += part.to(one.device)
        for one, expected in zip(kept(whole), total):
            np.testing.assert_allclose(one.ravel(), values([expected])[0], rtol=0, atol=1e-6)
        train(other, whole, 5, 6)
        assert whole.rounds == 3 and same_on_all(whole._copies)


def ranks_out_of_step_and_other_shapes_are_said_on_all_ranks():
    rank, model = dist.get_rank(), Model()
    with closing(DiLoCo(model, sync_every=2)) as diloco:
        train(model, diloco, 1, 2)
        if rank == 1:
            diloco.steps += 2
        move(model, 3)
        diloco.step()
        with pytest.raises(ValueError, match="inner steps: 4 on rank 0 and 6 on rank 1, not the same"):
            diloco.step()
        assert diloco.rounds == 1
    with closing(DiLoCo(model, sync_every=2)) as diloco:
        whole = model.b.data
        diloco.step()
        if rank == 0:
            model.b.data = model.b.data[:20].clone()
        with pytest.raises(ValueError, match=r"b: shape \[31\] in torch.float32 on .* expected, got \[20\]"):
            diloco.step()
        model.b.data = whole
        diloco.step()
        diloco.step()
        assert diloco.rounds == 1


def what_is_wrong_on_one_rank_is_refused_on_all():
    rank, model = dist.get_rank(), Model()
    frozen = Model()
    frozen.requires_grad_(False)
    for options, kind, words in [
        ({"sync_every": 2.5}, TypeError, "sync_every: a whole number expected, got float 2.5"),
        ({"fragments": 5}, ValueError, "fragments: at most 4, the number of parameters, expected, got 5"),
        ({"fragments": 3, "sync_every": 2}, ValueError, "most 2, the number of inner steps of a round, .* got 3"),
        ({"delay": 5, "sync_every": 10, "fragments": 2}, ValueError, "delay: below 10 / 2 inner steps expected, got 5"),
        ({"delay": -1}, ValueError, "delay: at least 0 expected, got -1"),
        ({"alpha": 1.5}, ValueError, "alpha: 0 to 1 expected, got 1.5"),
        ({"alpha": float("nan")}, ValueError, "alpha: at least 0 .* got nan"),
        ({"error": "half"}, ValueError, "error: one of float32"),
        ({"outer": 0.7}, TypeError, "outer: a function of a list of tensors expected, got float 0.7"),
    ]:
        if rank == 0:
            with pytest.raises(kind, match=words):
                DiLoCo(model, **options)
        else:
            with pytest.raises(ValueError, match=f"rank 0: {kind.__name__}: .*{words}"):
                DiLoCo(model)
    with pytest.raises(ValueError, match="sync_every: 10 on rank 0 and 11 on rank 1, not the same"):
        DiLoCo(model, sync_every=10 + rank)
    wider = torch.nn.Linear(3, 2 + rank)
    with pytest.raises(ValueError, match=r"parameters: \('weight', \(2, 3\), .* on rank 0 and .*\(3, 3\).* on rank 1"):
        DiLoCo(wider)
    for its, words in [
        (frozen, "model: one parameter that requires grad expected at least, got none"),
        (torch.nn.Linear(2, 2).double(), "weight: float32, float16 or bfloat16 expected, got float64"),
        (torch.nn.Linear(2, 2, device="meta"), "weight: a tensor on the CPU or on a CUDA GPU .* on meta"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            DiLoCo(its)
    diloco, other = DiLoCo(model), DiLoCo(torch.nn.Linear(3, 3))
    state = diloco.state_dict()
    for given, kind, words in [
        ({"format": 1}, TypeError, "state: what state_dict"),
        (5, TypeError, "state: what state_dict\\(\\) gives, a list of it for all ranks, or None expected"),
        (other.state_dict(), ValueError, "state: of other parameters: 4 parameters in 1 fragments, .*, got 2 in 1"),
        ({**state, "errors": [{**state["errors"][0], "scale": 0.0}]}, ValueError, "state: scale: a finite float32 above 0"),
    ]:
        with pytest.raises(ValueError if rank else kind, match=words):
            diloco.load_state_dict(state if rank else given)
    with pytest.raises(ValueError, match="state: one of one rank at least expected, got None on all ranks"):
        diloco.load_state_dict(None)
    with pytest.raises(TypeError, match="DiLoCo belongs to its process"):
        torch.save(diloco, os.devnull)
    assert repr(diloco) == "DiLoCo(sync_every=100, fragments=1, codec='int4')"


def shards_are_exchanged_by_the_ranks_that_have_the_same():
    """Uses two replicas of two shards."""
    kind = torch.get_default_device().type
    mesh = dist.init_device_mesh(kind, (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 5))
    fully_shard(model, mesh=mesh["shards"])
    with pytest.raises(ValueError, match="group: the ranks that have the same shard of 0.weight, a DTensor, expected"):
        DiLoCo(model)
    begin = [one.to_local().detach().clone() for one in model.parameters()]
    diloco = DiLoCo(model, outer=plain, sync_every=1, codec="bf16", group=mesh.get_group("replicas"))
    with torch.no_grad():
        for one in model.parameters():
            one -= 0.5 + mesh.get_local_rank("replicas")
    diloco.step()
    for one, its in zip(model.parameters(), begin):
        # PyTorch 2.11 crashes in full_tensor() over gloo on a GPU.
        torch.testing.assert_close(one.to_local().detach(), its - 1.0)


def over_nodes_of_two_ranks():
    os.environ["GRADCODEC_NODE"] = f"node {dist.get_rank() // 2}"
    model = Model()
    with closing(DiLoCo(model, outer=plain, sync_every=3, delay=2)) as diloco:
        assert diloco.topology.startswith("2 nodes of 2 ranks: sums within a node")
        train(model, diloco, 1, 12)
        assert same_on_all(diloco._copies) and diloco.rounds == 3
    what_arrives_and_what_is_kept_is_what_was_moved()
    del os.environ["GRADCODEC_NODE"]


def everything(folder):
    os.environ["DILOCO_FOLDER"] = folder
    in_turn(
        it_is_the_algorithm_of_the_papers, what_arrives_and_what_is_kept_is_what_was_moved,
        a_value_that_is_not_finite_takes_the_round_back_on_all_ranks,
        the_device_of_new_tensors_is_its_own, a_mean_that_is_not_finite_takes_the_round_back_on_all_ranks,
        an_exchange_that_fails_on_one_rank_is_taken_back_on_all, a_round_that_some_ranks_have_applied_is_applied_on_all,
        a_round_that_no_rank_has_applied_is_taken_back, what_is_saved_goes_on, ranks_join_and_leave,
        ranks_out_of_step_and_other_shapes_are_said_on_all_ranks, what_is_wrong_on_one_rank_is_refused_on_all,
    )  # fmt: skip


@on_groups(2)
def test_two_ranks(group, tmp_path):
    on_ranks(group, everything, tmp_path, str(tmp_path))


@on_groups(4)
def test_four_ranks(group, tmp_path):
    on_ranks(
        group, in_turn, tmp_path, over_nodes_of_two_ranks, a_round_that_some_ranks_have_applied_is_applied_on_all,
        ranks_join_and_leave, shards_are_exchanged_by_the_ranks_that_have_the_same,
    )  # fmt: skip


# --- ranks that are killed --------------------------------------------------------------------------------------------


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Fatal:
    """A process group that kills this process after `messages` messages, once this number is set."""

    messages = None

    def __init__(self, group):
        self._group = group

    def __getattr__(self, name):
        return getattr(self._group, name)

    def send(self, *arguments):
        if self.messages is not None:
            if self.messages == 0:
                die()
            self.messages -= 1
        return self._group.send(*arguments)


def survives(rank, world, deaths, folder):
    """Runs a rank of a world whose last rank dies in an exchange, after `deaths[0]` messages. Then the remaining ranks
    form a world, whose last rank dies after `deaths[1]` messages, and so on."""
    torch.set_num_threads(1)
    groups, pairs, state, folder = [], _torch_groups.Pairs, None, pathlib.Path(folder)
    _torch_groups.Pairs = lambda library, group, *more: pairs(library, groups.append(Fatal(group)) or groups[-1], *more)
    for generation, messages in enumerate([*deaths, None]):
        dist.init_process_group("gloo", init_method=f"file://{folder}/{generation}", rank=rank, world_size=world)
        model = model if generation else Model()
        diloco = DiLoCo(model, outer=plain, sync_every=2)
        if generation:
            diloco.load_state_dict(state)
            check_what_survives(diloco, [torch.load(folder / f"{generation - 1}-{k}.pt") for k in range(world)])
        begin, first = (values(diloco._copies), kept(diloco)), diloco.steps - 1 if generation else 1
        train(model, diloco, diloco.steps + 1, diloco.steps + 4)
        check_nothing_is_lost(diloco, begin, range(first, diloco.steps + 1))  # also of the exchange that failed
        torch.save(diloco.state_dict(), folder / f"{generation}-{rank}.pt")
        dist.barrier()
        if messages is None:
            os._exit(0)
        train(model, diloco, diloco.steps + 1, diloco.steps + 1)
        move(model, diloco.steps + 1)
        if rank == world - 1:
            groups[-1].messages, tell = messages, diloco._tell
            diloco._tell = lambda own: tell(own) if diloco._unsettled is None else die()
        with pytest.raises(RuntimeError):  # GradCodecError is one
            diloco.step()
        state = diloco.state_dict()
        dist.destroy_process_group()
        world -= 1


def check_what_survives(diloco, before):
    """Checks that no copy and no error is lost, but the lost rank's own errors. `before`: states of the survivors."""
    for number, (copied, now) in enumerate(zip(diloco._copies, kept(diloco))):
        total = sum(its["errors"][0]["worker"][str(number)] for its in before) / len(before)
        for its in before:
            for first, part in its["errors"][0]["server"].get(str(number), []):
                total[first : first + part.numel()] += part
            assert torch.equal(copied, its["global"][number])
        np.testing.assert_allclose(now.ravel(), values([total])[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("deaths", both(quick=[[6, 2, 4]], all=[[6, 2, 4], *([n % 9, n % 7, n % 5] for n in range(16))]))
def test_survivors_of_ranks_that_die_in_exchanges_lose_no_gradient(deaths, tmp_path):
    """Each of w ranks sends w - 1 messages of chunks and as many of means, and then its result. If one of four ranks
    dies after two messages, two of the others have all chunks, and the third has not."""
    spawn = torch.multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=survives, args=(rank, 2 + len(deaths), deaths, str(tmp_path)))
             for rank in range(2 + len(deaths))]  # fmt: skip
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert [one.exitcode for one in ranks] == [0, 0] + len(deaths) * [-signal.SIGKILL]
