"""Tests of signals whose handlers raise, at random moments of exchanges: each exchange still takes place, and the call
raises the handler's exception."""

import random
import signal

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from ranks import on_ranks  # noqa: E402

from gradcodec import _torch_groups  # noqa: E402
from gradcodec.torch import AllReduce, OneBitSGD, all_reduce, compress, shard  # noqa: E402


# Functions in which a handler does not raise: its own, those whose exceptions Python ignores (`remove` is weakref's),
# and a communicator's functions and their callers, which the library does not call a second time.
SPARED = {"handle", "arm", "__del__", "remove", "perform", "all_to_all", "all_gather"}


class Interrupt(BaseException):
    pass


class Signals:
    """Repeated SIGALRM. Its handler raises within exchanges alone: elsewhere a rank would skip its call."""

    def __init__(self, longest):
        self.longest, self.raised, self.on = longest, [], True
        signal.signal(signal.SIGALRM, self.handle)
        self.arm()

    def arm(self):
        signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-5, self.longest))

    def handle(self, _, frame):
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        self.arm()
        if self.on and "_call_with" in names[1:] and not SPARED & {*names}:
            kind = (KeyboardInterrupt, SystemExit, Interrupt, ValueError)[len(self.raised) % 4]
            self.raised.append(kind(len(self.raised)))
            raise self.raised[-1]

    def stop(self):
        self.on = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def called(signals, call):
    """Returns 1 if the call raised, which must be with the handler's first exception, else 0."""
    before = len(signals.raised)
    try:
        call()
    except BaseException as failure:
        if len(signals.raised) == before or failure is not signals.raised[before]:
            raise
        return 1
    assert len(signals.raised) == before, "lost"
    return 0


def interrupted(codec, elements, calls, longest):
    rank, values = dist.get_rank(), torch.empty(elements)
    handle = AllReduce(values, codec)
    given = [torch.full_like(values, 2.0**step * (1 + 2 * rank)) for step in range(11)]
    expected = [values.copy_(one).clone() for one in given]
    for one in expected:
        all_reduce(one, codec)
    random.seed(rank)
    signals, raised = Signals(longest), 0
    for step in range(calls):
        for run in (lambda: all_reduce(values, codec)), (lambda: handle.run(values)):
            values.copy_(given[step % 11])
            raised += called(signals, run)
            assert torch.equal(values, expected[step % 11]), (step, values[:1], expected[step % 11][:1])
    signals.stop()
    assert raised > calls // 100, raised
    print(f"rank {rank}: {2 * calls} calls, {len(signals.raised)} signals, {raised} calls raised", flush=True)


def steps():
    """Yields the name of each entry point, and a step of it that exchanges."""
    values = torch.ones(500)
    yield "all_reduce", lambda: all_reduce(values, "int8")
    yield "AllReduce", lambda handle=AllReduce(values, "int4"): handle.run(values)
    for optimizer in [OneBitSGD([torch.nn.Parameter(torch.ones(500))])]:
        yield "OneBitSGD", optimizer.step
    for native in True, False:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 30))
        compress(model, "int4", native=native)
        yield f"compress, native={native}", lambda model=model: model(torch.ones(2, 40)).sum().backward()
    sharded = torch.nn.Linear(40, 30)
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False)
    shard(sharded, "int4")
    yield "shard", lambda: sharded(torch.ones(2, 40)).sum().backward()


def each_entry_point_raises_what_a_handler_raised():
    """Raises as soon as the exchange has ended, where only the next instruction of Python notices the exception."""
    exchange, raises = _torch_groups.Group._exchange, []

    def exchanged(*given):
        exchange(*given)
        if raises:
            raise raises.pop()

    _torch_groups.Group._exchange = exchanged
    for name, step in steps():
        for _ in range(3):
            step()
        raises.append(Interrupt)
        with pytest.raises(Interrupt):
            step()
        assert not raises, name


def everything():
    interrupted("int8", 1000, 300, 1e-3)
    interrupted("bf16", 200_000, 100, 2e-3)
    by_pairs, _torch_groups.BY_PAIRS = _torch_groups.BY_PAIRS, 1
    interrupted("int8", 3000, 200, 2e-3)
    _torch_groups.BY_PAIRS = by_pairs
    each_entry_point_raises_what_a_handler_raised()


def test_calls_are_right_or_raise_whenever_a_signal_arrives(tmp_path):
    on_ranks(("gloo", "cpu", 2), everything, tmp_path)
