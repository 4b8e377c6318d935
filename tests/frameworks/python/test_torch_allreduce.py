"""Tests of gradcodec.torch.all_reduce: means and sums of tensors of all dtypes and layouts, handles that are kept, and
what is refused."""

import contextlib
import datetime
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import in_turn, kept_by_all, on_groups, on_ranks, same, states_of_all  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate  # noqa: E402

import gradcodec.torch  # noqa: E402
from gradcodec import GradCodecError, _torch_groups  # noqa: E402
from gradcodec.torch import AllReduce, all_reduce  # noqa: E402


def signs(seed, *shape):
    """Returns values of one magnitude, which ONEBIT sends without loss."""
    torch.manual_seed(seed)
    return (torch.randint(2, shape) * 2 - 1).float()


def means_and_sums():
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in torch.float32, torch.float16, torch.bfloat16:
        for op, factor in ("mean", 1), ("sum", world):
            tensors = [signs(1, 7), 2 * signs(2, 33, 5), signs(3, 0), signs(4, 6, 4).T]
            tensors = [tensor.to(dtype) for tensor in tensors]
            expected = [factor * tensor for tensor in tensors]
            all_reduce(tensors, "onebit", op=op)
            torch.testing.assert_close(tensors, expected, rtol=0, atol=0)
    of_two_dtypes = [signs(1, 9), signs(2, 9).half()]
    all_reduce(of_two_dtypes, "onebit")
    assert torch.equal(of_two_dtypes[0], signs(1, 9)) and torch.equal(of_two_dtypes[1], signs(2, 9).half())
    votes = torch.tensor([1.0, -2.0, 3.0 if rank else -3.0])
    all_reduce(votes, "sign")
    assert votes[:2].tolist() == [1, -1]
    parameter = torch.nn.Parameter(signs(1, 64))
    with torch.no_grad():
        all_reduce(parameter, "onebit")
    assert torch.equal(parameter.detach(), signs(1, 64))


def blocks_lose_little():
    rank, world = dist.get_rank(), dist.get_world_size()
    every = []
    for each in range(world):
        torch.manual_seed(each)
        every.append([torch.randn(300, 7), torch.randn(1000)])
    for codec, most in ("bf16", 0.005), ("int4", 0.2):
        for op, divisor in ("mean", world), ("sum", 1):
            tensors = [tensor.clone() for tensor in every[rank]]
            all_reduce(tensors, codec, op=op)
            for tensor, ones in zip(tensors, zip(*every)):
                exact = sum(ones) / divisor
                assert 0 < (tensor - exact).norm() / exact.norm() < most, (codec, op)
                largest = tensor.clone()
                dist.all_reduce(largest, dist.ReduceOp.MAX)
                assert torch.equal(largest, tensor)  # on every rank, so all ranks have the same values
    first, second = torch.full((64,), 3.0), torch.full((64,), 0.7)
    all_reduce(first)
    all_reduce(second)  # uses the same handle, which has kept no errors
    again = torch.full((64,), 0.7)
    all_reduce(again)
    assert torch.equal(again, second)


def what_began_in_inference_mode_goes_on():
    for size in 123, _torch_groups.BY_PAIRS * dist.get_world_size() + 1:
        for mode in True, False, True:
            with torch.inference_mode(mode):
                tensor = torch.full((size,), 1.0 + dist.get_rank())
                all_reduce(tensor, "bf16")
                assert (tensor == (1 + dist.get_world_size()) / 2).all()


def it_may_be_called_in_what_is_compiled():
    @torch.compile(backend="eager")
    def doubled(tensor):
        tensor = tensor * 2
        all_reduce(tensor, "bf16")
        return tensor + 1

    for _ in range(2):
        assert (doubled(torch.full((9,), float(dist.get_rank()))) == dist.get_world_size()).all()


def large_ones_arrive_where_they_belong():
    """Uses chunks of BY_PAIRS bytes, from which on each two ranks exchange directly over gloo."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place = torch.arange(_torch_groups.BY_PAIRS // 2 * world) % 61  # chunks of BF16 begin with different values
    tensor = (place + 3 * rank).float()
    all_reduce(tensor, "bf16")
    torch.testing.assert_close(tensor, (place + 3 * (world - 1) / 2).float(), rtol=0, atol=0)


def the_oldest_goes_on_all_ranks():
    pair = dist.new_group([0, 1])  # rank 2 is in no other group than the world
    handles = _torch_groups._kept[dist.group.WORLD].handles
    handles.clear()
    for size in range(1, _torch_groups.KEPT + 1):
        all_reduce(torch.ones(size), "onebit")
        if dist.get_rank() < 2:
            all_reduce(torch.ones(size), "onebit", group=pair)
    first, second = list(handles.values())[:2]
    all_reduce(torch.ones(1), "onebit", timeout=None)  # this handle is then the newest
    all_reduce(torch.ones(1000), "onebit")
    assert len(handles) == _torch_groups.KEPT and first in handles.values() and second not in handles.values()
    for size in 1, 2, 3:
        all_reduce(torch.ones(size), "onebit")
    assert len(handles) == _torch_groups.KEPT


def two_threads_may_begin_at_once():
    """Calls all_reduce() in two threads, each with its own group, while the other checks which groups still exist."""
    if torch.get_default_device().type != "cpu":
        return  # on one GPU each rank could have another order of the two groups
    groups = [dist.new_group(range(dist.get_world_size())) for _ in range(2)]
    is_there, both, is_added = _torch_groups._is_there, threading.Barrier(2), threading.Event()
    failures = []

    def look(group):
        if threading.current_thread().name in "01" and group is dist.group.WORLD:
            both.wait(10)
            if threading.current_thread().name == "1":
                assert is_added.wait(10)  # the other thread's group, which does not wait for this thread
        return is_there(group)

    def reduce(group):
        try:
            all_reduce(torch.ones(8), "bf16", group=group)
            is_added.set()
        except Exception as failure:
            failures.append(failure)

    all_reduce(torch.ones(8), "bf16")
    _torch_groups._is_there = look
    try:
        threads = [threading.Thread(target=reduce, args=[group], name=str(k)) for k, group in enumerate(groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        _torch_groups._is_there = is_there
    assert not failures


LIKE = [(40, 30), (7,), (0,), (33, 5)]


def numbers(step, rank=None):
    """Returns a rank's tensors of a step: the last one has another dtype, the first one another layout."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 * step + rank)
    tensors = [torch.randn(shape, generator=generator) for shape in LIKE]
    return [torch.randn(30, 40, generator=generator).T, *tensors[1:-1], tensors[-1].bfloat16()]


def exact(step, op):
    world = dist.get_world_size()
    total = [sum(one.float() for one in ones) for ones in zip(*(numbers(step, rank) for rank in range(world)))]
    return [one / world for one in total] if op == "mean" else total


def kept(reducer, op):
    """Returns all errors that an AllReduce keeps, in units of the mean or the sum."""
    found = kept_by_all(reducer.state_dict(), op)
    return [found[str(number)].view(shape) for number, shape in enumerate(LIKE)]


def what_arrived_and_what_is_kept_is_what_was_given():
    for codec, op in ("int4", "mean"), ("onebit", "sum"):
        reducer = AllReduce(numbers(0), codec, op=op)
        given, arrived = ([torch.zeros(shape) for shape in LIKE] for _ in range(2))
        for step in range(3):
            tensors = numbers(step)
            reducer.run(tensors)
            for total, one, others, its in zip(arrived, tensors, given, exact(step, op)):
                total += one.float()
                others += its
        assert reducer.bytes_sent > 0 and reducer.stats().keys() == {"0", "1", "2", "3"}
        for total, error, others in zip(arrived, kept(reducer, op), given):
            torch.testing.assert_close(total + error, others, rtol=0.01, atol=0.06)  # the last is rounded to bfloat16
            assert error.numel() == 0 or error.abs().max() > 0.01
        reducer.close()


def a_step_can_be_taken_back_and_one_inf_takes_it_back():
    with AllReduce(numbers(0), "int4") as reducer:
        reducer.run(numbers(0))
        reducer.commit()
        before = reducer.state_dict()
        reducer.run(numbers(1))
        reducer.commit(skip=torch.ones(1))
        assert same(reducer.state_dict(), before)
        tensors = numbers(1)
        if dist.get_rank() == 1:
            tensors[0][3, 4] = torch.inf
        reducer.run(tensors)
        assert not tensors[0].isfinite().all()  # on every rank
        assert same(reducer.state_dict(), before) and reducer.taken_back == 2
        reducer.run([torch.full_like(one, torch.nan) for one in tensors])
        reducer.rollback()
        reducer.run(numbers(2))
        assert not same(reducer.state_dict(), before) and reducer.taken_back == 3
    with pytest.raises(ValueError, match="the AllReduce is closed"):
        reducer.run(numbers(0))


def without_errors_the_runs_up_to_a_commit_count_as_one_step():
    with AllReduce(numbers(0), "int8") as reducer:
        for fills, end, count in [
            ((torch.nan, 1, torch.nan), reducer.commit, 1), ((1,), reducer.commit, 1),
            ((torch.nan, 1), reducer.state_dict, 2), ((1,), reducer.rollback, 3),
        ]:  # fmt: skip
            for fill in fills:
                reducer.run([torch.full_like(one, fill) for one in numbers(0)])
            end()
            assert reducer.taken_back == count, fills


def calls_on_several_streams_come_one_after_the_other():
    on_gpu = torch.zeros(0).is_cuda
    streams = [torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext() for _ in range(2)]
    found = []
    for used in streams[:1], streams:
        with AllReduce(numbers(0), "int4") as reducer:
            steps = [numbers(step) for step in range(8)]
            if on_gpu:
                torch.cuda.synchronize()
            for step, tensors in enumerate(steps):
                with used[step % len(used)]:
                    reducer.run(tensors)
                    all_reduce(tensors)
            if on_gpu:
                torch.cuda.synchronize()
            found.append([one for tensors in steps for one in tensors])
    assert all(torch.equal(one, other) for one, other in zip(*found))


def the_errors_of_a_state_go_on_in_a_world_of_any_size():
    reducer = AllReduce(numbers(0), "int4")
    reducer.run(numbers(0))
    state, first = reducer.state_dict(), numbers(1)
    reducer.run(first)
    again, second = AllReduce(numbers(0), "int4"), numbers(1)
    again.load_state_dict(state)
    again.run(second)
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    for codec, op in ("int4", "mean"), ("onebit", "sum"):
        pair = dist.new_group([0, 1])
        of_pair = whole = AllReduce(numbers(0), codec, op=op)
        if dist.get_rank() < 2:
            of_pair = AllReduce(numbers(0), codec, op=op, group=pair)
            of_pair.run(numbers(0))
        states = states_of_all(of_pair.state_dict())
        whole.load_state_dict(states[:2])
        zeros = [torch.zeros_like(one) for one in numbers(0)]
        whole.run(zeros)
        factor = 1 if op == "sum" else 0.5
        for number, (one, error) in enumerate(zip(zeros, kept(whole, op))):
            expected = torch.zeros(one.numel())
            for its in states[:2]:
                expected += factor * its["worker"][str(number)].to(expected.device)
                for at, part in its["server"].get(str(number), []):
                    expected[at : at + part.numel()] += part.to(expected.device)
            torch.testing.assert_close(one.float() + error, expected.view(one.shape), rtol=0.02, atol=0.02)


def an_all_reduce_refuses_other_tensors_and_states():
    like = [torch.ones(8), torch.ones(3, 2)]
    reducer, other = AllReduce(like, "int4"), AllReduce([torch.ones(8), torch.ones(2, 3)], "int4")
    summed, state = AllReduce(like, "int4", op="sum"), reducer.state_dict()
    for call, kind, words in [
        (lambda: reducer.run(like[:1]), ValueError, "tensors: 2 expected, got 1"),
        (lambda: reducer.run([like[0], like[1].T]), ValueError, r"tensors\[1\]: shape \[3, 2\] .*, got \[2, 3\]"),
        (lambda: reducer.run([like[0], like[1].half()]), ValueError, r"\[1\]: .*float32 on .* got .* torch.float16"),
        (lambda: other.load_state_dict(state), ValueError, r"state: shapes \[.8,., .2, 3.\] expected, got"),
        (lambda: summed.load_state_dict(state), ValueError, "state: op sum expected, got mean"),
        (lambda: AllReduce([], "int4"), ValueError, "like: one tensor expected at least"),
        (lambda: AllReduce(like, "int4", error="half"), ValueError, "error: one of float32"),
        (lambda: AllReduce(like, transport="carrier"), ValueError, "transport: one of auto"),
        (lambda: all_reduce(like, transport=["gloo"]), ValueError, "transport: one of auto"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=words):
            call()
    assert repr(reducer) == "AllReduce(codec='int4', error='float32')"


def refusals():
    tensor = torch.ones(8)
    mesh = dist.init_device_mesh(tensor.device.type, (dist.get_world_size(),))
    of_a_mesh = DTensor.from_local(tensor, mesh, [Replicate()])
    for call, kind, words in [
        (lambda: all_reduce(tensor, "int5"), ValueError, "codec: one of onebit, .* got str 'int5'"),
        (lambda: all_reduce(tensor, "onebit", op="max"), ValueError, "op: mean or sum expected, got str 'max'"),
        (lambda: all_reduce(tensor, "sign", op="sum"), ValueError, "op: mean expected"),
        (lambda: all_reduce(tensor.double(), "onebit"), TypeError, "or bfloat16 expected, got float64"),
        (lambda: all_reduce([tensor, of_a_mesh], "onebit"), TypeError, r"tensors\[1\]: .* got a DTensor; to_local"),
        (lambda: all_reduce(of_a_mesh, "onebit"), TypeError, r"tensors\[0\]: .* got a DTensor; to_local"),
        (lambda: all_reduce(tensor.to_sparse(), "onebit"), TypeError, "a dense tensor expected, got one in sparse_coo"),
        (lambda: all_reduce([tensor, torch.nested.nested_tensor([tensor])]), TypeError, r"\[1\]: .* a nested one"),
        (lambda: all_reduce([tensor, [1.0]], "onebit"), TypeError, r"tensors\[1\]: a tensor of PyTorch expected"),
        (lambda: all_reduce([tensor, None], "onebit"), TypeError, "got None; leave out what has no gradient"),
        (lambda: all_reduce(1.0, "onebit"), TypeError, "tensors: a sequence of tensors expected, got float 1.0"),
        (lambda: all_reduce([tensor, tensor.to("meta")], "onebit"), TypeError, "on meta"),
        (lambda: all_reduce(torch.nn.Parameter(tensor), "onebit"), ValueError, r"torch\.no_grad\(\)"),
        (lambda: all_reduce(tensor.to("meta"), "onebit"), TypeError, "on meta"),
        (lambda: all_reduce(tensor, "onebit", group=5), TypeError, "group: a process group .* got int 5"),
        (lambda: all_reduce(tensor, "onebit", timeout=-1), TypeError, "timeout: seconds or a timedelta above 0"),
        (lambda: all_reduce(tensor, timeout=datetime.timedelta(0)), TypeError, "timeout: .* above 0 expected, got timed"),
        (lambda: all_reduce([tensor, torch.ones(1).expand(8)]), ValueError, r"tensors\[1\]: several elements are one"),
        (lambda: all_reduce(tensor, "INT-8"), ValueError, "codec: .* got str 'INT-8'; did you mean 'int8'"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=words):
            call()
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with pytest.raises(ValueError, match="at least 2 ranks expected, got 1"):
        all_reduce(tensor, "onebit", group=alone)
    assert tensor.tolist() == [1] * 8


def a_timeout_of_centuries_is_no_shorter_than_others():
    for timeout in datetime.timedelta.max, 1e300, 10**30:
        tensor = torch.ones(8)
        all_reduce(tensor, "onebit", timeout=timeout)
        assert tensor.tolist() == [1] * 8


def ranks_with_another_op_are_refused():
    odd, tensor = dist.get_rank() % 2, torch.ones(83, 7)
    refusals = [rf"reduction GC_REDUCTION_{['MEAN', 'SUM'][odd]} expected, got"]
    if tensor.device.type == "cpu":  # on CUDA a kept handle finds this on the stream
        refusals.append(r"\(CORRUPT\)")
    for codec in "int8", "onebit":
        for words in refusals:
            with pytest.raises(GradCodecError, match=words):
                all_reduce(tensor, codec, op=["mean", "sum"][odd])
            assert tensor.eq(1).all()
            for op, value in ("mean", 1), ("sum", dist.get_world_size()):  # all ranks have both handles now
                arrived = tensor.clone()
                all_reduce(arrived, codec, op=op)
                assert arrived.sub(value).abs().max() < 0.02 * value, (codec, op)


def a_rank_that_does_not_come_is_not_waited_for():
    for knows_the_nodes in True, False:
        group = dist.new_group(range(dist.get_world_size()))  # the group cannot be used afterwards
        if knows_the_nodes:
            all_reduce(torch.ones(8), "onebit", group=group)
        if dist.get_rank() == 0:
            # With a new timeout the ranks first exchange which of their GPUs NVLink links.
            at_once = knows_the_nodes and torch.get_default_device().type == "cpu"
            with pytest.raises(gradcodec.GradCodecError if at_once else RuntimeError) as error:
                all_reduce(torch.ones(8), "onebit", group=group, timeout=0.2)
            assert ("returned 1" if at_once else "imed out") in str(error.value)
            assert error.value.__cause__ or not at_once


def peer_memory_has_room_for_the_largest_handle():
    """Runs on any device, over the process group in place of peer memory."""
    library, device, opened = _torch_groups.library(), torch.zeros(0).device, []

    def open_peers(bootstrap, number, size, timeout_ms):
        opened.append((size, timeout_ms))
        return _torch_groups.Group(dist.group.WORLD, device).comm

    plain = _torch_groups.Group(dist.group.WORLD, device)
    library.open_peers, first = open_peers, _torch_groups.FIRST_ROOM
    _torch_groups.FIRST_ROOM = 1 << 16
    try:
        group, again = (_torch_groups.Group(dist.group.WORLD, device, timeout=30) for _ in range(2))
        for transport in "gloo", "nccl":
            group.take_peers(transport)
            assert group.peers is None and not opened
        group.take_peers("peers")
        again.take_peers("peers")
        assert opened == [(1 << 16, 30_000)] and again.peers is group.peers
        for codec, sizes, error, times in [
            ("int4", [100, 3000], "float32", 1), ("int4", [50_000], "float32", 2), ("int8", [1_000_000, 7], "none", 3),
            ("int8", [100], "none", 3), ("onebit", [100], "float32", 3),
        ]:  # fmt: skip
            results = []
            for over in plain, group:
                handle = _torch_groups.Handle(over, codec, sizes, torch.float32, error=error)
                torch.manual_seed(dist.get_rank())
                buffer, sent = torch.randn(sum(sizes)), over.bytes_sent
                handle.run_within(buffer, _torch_groups.number_of(handle.stream()))
                shard = torch.zeros(handle.steps.shard_elements)
                handle.reduce_scatter_within(buffer, shard, _torch_groups.number_of(handle.stream()))
                results.append([buffer, shard, over.bytes_sent - sent])
            (one, part, sent), (other, other_part, over_peers) = results
            assert torch.equal(one, other) and torch.equal(part, other_part) and sent == over_peers
            assert len(opened) == times
        assert opened[1][0] == 1 << 17 and opened[2][0] > 1 << 18  # twice as much, or the bytes needed
        group.peers.check()

        def refuse(*_):
            raise GradCodecError("rank 1: no way to its memory", 3)

        # Imitates GPUs that do not reach each other's memory.
        library.open_peers, again.device, again._milliseconds = refuse, torch.device("cuda", 7), lambda: 0
        again.linked = lambda nodes: True
        for _ in range(2):
            again.take_peers("auto")
            assert again.peers is None
        with pytest.raises(GradCodecError, match="no way to its memory"):
            again.take_peers("peers")
    finally:
        del library.open_peers
        _torch_groups.FIRST_ROOM = first


@on_groups(3)
def test_all_reduce(group, tmp_path):
    on_ranks(
        group, in_turn, tmp_path, means_and_sums, blocks_lose_little, large_ones_arrive_where_they_belong,
        what_began_in_inference_mode_goes_on, it_may_be_called_in_what_is_compiled, two_threads_may_begin_at_once,
        what_arrived_and_what_is_kept_is_what_was_given, a_step_can_be_taken_back_and_one_inf_takes_it_back,
        without_errors_the_runs_up_to_a_commit_count_as_one_step, calls_on_several_streams_come_one_after_the_other,
        the_errors_of_a_state_go_on_in_a_world_of_any_size, an_all_reduce_refuses_other_tensors_and_states, refusals,
        ranks_with_another_op_are_refused, a_timeout_of_centuries_is_no_shorter_than_others,
        the_oldest_goes_on_all_ranks, peer_memory_has_room_for_the_largest_handle,
        a_rank_that_does_not_come_is_not_waited_for,
    )  # fmt: skip


def test_the_package_does_not_import_torch():
    program = "import sys, gradcodec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
