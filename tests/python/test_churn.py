"""A few steps of tests/churn/churn.py: ranks that are killed, stopped, leave and join; `make churn` takes more. Over
NCCL and peer memory on the drivers of stand_in, without which this file is not run."""

import pathlib
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from capi import Status, Tensor, lib
from codec_model import ONEBIT, TRANSACTIONAL
from codecs_c import Host, views
from comms import CheckedRanks, World
from tiers import both

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

import gradcodec  # noqa: E402

PROGRAM = ROOT / "tests/churn/churn.py"


def test_survivors_of_ranks_that_die_go_on_as_the_model_says():
    transports = ["sockets", "nodes", "group", "hierarchical", "nccl", "peers"]
    steps, session = both(quick=18, all=900) * len(transports), both(quick=6, all=30)  # each codec is in turn
    about = ["--steps", str(steps), "--session", str(session)]
    done = subprocess.run([sys.executable, PROGRAM, *about], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    good = "0 hangs, 0 wrong bits, 0 descriptors and 0 threads leaked"
    found = re.findall(rf"(?m)^(\w+): (\d+) steps, (\d+) deaths, (\d+) joins, {good};", done.stdout)
    assert [over for over, *_ in found] == transports, done.stdout
    for _, *numbers in found:
        taken, deaths, joins = map(int, numbers)
        assert taken == steps // len(transports) and deaths > taken // 10 and joins > deaths, done.stdout


@pytest.mark.parametrize("devices", both(quick=[6], all=[1, 6]))
def test_processes_that_reach_each_others_gpu_memory_die_and_the_others_go_on(devices):
    """tests/multi_gpu/test_deaths.py on a GPU."""
    about = ["--over", "peers", "--processes", "--devices", str(devices), "--steps", str(both(quick=10, all=90))]
    done = subprocess.run([sys.executable, PROGRAM, *about], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    deaths, = map(int, re.findall(r"^peers: \d+ steps, (\d+) deaths, \d+ joins, 0 hangs, 0 wrong bits;", done.stdout))
    assert deaths > 2, done.stdout


def test_a_rank_that_dies_within_a_step_of_a_sum_over_nodes_leaves_nobody_waiting():
    """All calls end, and errors that were rolled back are the model's, or the program fails. A rank is told unless it had
    all that it needed: in step 4 the other node needs nothing of the one that died."""
    done = subprocess.run([sys.executable, ROOT / "tests/churn/steps.py"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("15 deaths, 0 hangs, 0 wrong bits\n"), done.stdout + done.stderr
    found = re.findall(r"(?m)^step (.*): [\w ]+: 0 (\w+), 2 (\w+), 3 (\w+); [\d.]+ s after the death", done.stdout)
    told = {step: {of[1:] for of in found if of[0] == step} for step, *_ in found}
    all_told = {("COMM", "COMM", "COMM")}
    assert len(found) == 15 and [told[step] for step in ("1", "2", "3, first exchange")] == [all_told] * 3, done.stdout
    assert told["4"] == {("COMM", "OK", "OK")}, done.stdout
    # Rank 3 exchanges with the one that died, and rank 2 may have had all of rank 3 by then.
    assert told["3, second exchange"] <= {("COMM", "COMM", "COMM"), ("COMM", "OK", "COMM")}, done.stdout


class Three:
    """Three ranks, threads over callbacks of Python. Rank 2 may die in the second exchange of a step."""

    def __init__(self, dies=False):
        self.barrier, self.dies = threading.Barrier(3, timeout=60), dies
        self.posted, self.sent = [b""] * 3, [b""] * 3

    def communicator(self, rank):
        def exchange(send, recv, first):
            self.posted[rank], size = bytes(send), len(recv) // 3
            self.barrier.wait()
            for other, block in enumerate(self.posted):
                recv[other * size : (other + 1) * size] = block[first : first + size]
            self.barrier.wait()

        def all_to_all(send, recv):
            self.sent[rank] = bytes(send)
            exchange(send, recv, rank * len(recv) // 3)

        def all_gather(send, recv):
            if self.dies and rank == 2 and self.sent[rank]:
                self.barrier.abort()
            exchange(send, recv, 0)

        return gradcodec.GradCodec().communicator(rank, 3, all_to_all, all_gather)

    def step(self, codec, gradients, errors):
        """By rank: what it sent first, and its errors before and after a step, which is rolled back if it fails."""

        def run(rank):
            with self.communicator(rank) as comm, comm.allreduce(codec, [100, 70], nonfinite="transactional") as handle:
                handle.errors_in(*errors[rank])
                before, values = errors_of(handle), [g.copy() for g in gradients[rank]]
                if self.dies:
                    with pytest.raises(gradcodec.GradCodecError) as failure:
                        handle.run(values)
                    assert failure.value.status == gradcodec.Status.COMM
                    handle.rollback()
                else:
                    handle.run(values)
                    handle.commit()
                return self.sent[rank], before, errors_of(handle)

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(run, range(3)))


def errors_of(handle):
    worker, server = np.zeros((1, 170), np.float32), np.zeros(handle.shard_elements, np.float32)
    handle.errors_out(worker[0], server)
    return worker, server


@pytest.mark.parametrize("codec", ["onebit", "int8"])
def test_a_step_that_failed_is_taken_again_with_the_same_bytes_and_only_errors_of_the_dead_are_lost(codec):
    rng = np.random.default_rng(5)
    gradients = [[rng.standard_normal(n).astype(np.float32) for n in (100, 70)] for _ in range(3)]
    good = Three().step(codec, gradients, [(None, None)] * 3)
    workers, servers = zip(*(after for _, _, after in good))
    assert all(worker.any() for worker in workers) and any(server.any() for server in servers[:2])

    failed = Three(dies=True).step(codec, gradients, [(worker, np.concatenate(servers)) for worker in workers])
    for rank, (_, before, after) in enumerate(failed):
        assert np.array_equal(after[0], workers[rank]) and np.array_equal(after[1], servers[rank])
        assert np.array_equal(before[0], after[0]) and np.array_equal(before[1], after[1])

    # The survivors, each with its own errors as those of a world of one, and a rank that joins, with none.
    of_survivors = np.concatenate([*servers[:2], np.zeros_like(servers[2])])
    given = [(workers[0], of_survivors), (workers[1], of_survivors), (None, of_survivors)]
    again = Three().step(codec, gradients, given)
    for rank in range(2):
        assert again[rank][0] == failed[rank][0], "the bytes that are sent again"
        assert np.array_equal(again[rank][1][0], workers[rank]) and np.array_equal(again[rank][1][1], servers[rank])
    assert not again[2][1][0].any() and not again[2][1][1].any()


@pytest.mark.parametrize("counts", [True, False], ids=["commit", "rollback"])
def test_a_step_that_ended_on_one_rank_alone_counts_or_not_as_the_ranks_decide(counts):
    options = dict(codec=ONEBIT, segments=[100], nonfinite=TRANSACTIONAL)
    with World(2, "board") as world, CheckedRanks(world, Host(), **options) as ranks:
        rng = np.random.default_rng(3)
        first, second = ([[rng.standard_normal(100).astype(np.float32)] for _ in range(2)] for _ in "12")
        ranks.run(first)
        ranks.commit()
        world.board.answer = lambda name, rank: 99 if (name, rank) == ("all_gather", 1) else 0
        values = [[Tensor(one.copy()) for one in each] for each in second]

        def run(rank):
            return lib.gc_allreduce_run(ranks.handles[rank], views(values[rank]), 1, None, None, None)

        assert world.each(run) == [Status.OK, Status.COMM]
        for model, of_rank in zip(ranks.models, ranks.exchanged(second)):
            model.reduce(of_rank)
        ranks.commit() if counts else ranks.rollback()
        ranks.errors()
