"""Runs a few steps of tests/churn/churn.py: ranks that are killed, stopped, leave and join; `make churn` runs more.
NCCL and peer memory are on the drivers of stand_in, without which this file is not run."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from capi import Status, Tensor, lib
from codec_model import ONEBIT, TRANSACTIONAL
from codecs_c import Host, views
from comms import CheckedRanks, World
from tiers import both

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/churn/churn.py"


def test_survivors_of_dead_ranks_follow_the_model():
    transports = ["sockets", "nodes", "group", "hierarchical", "nccl", "peers"]
    steps, session = both(quick=18, all=900) * len(transports), both(quick=6, all=30)  # every codec has its turn
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
def test_processes_with_shared_gpu_memory_survive_dead_ranks(devices):
    """Runs on the stand-in driver; tests/multi_gpu/test_deaths.py does the same on a GPU."""
    about = ["--over", "peers", "--processes", "--devices", str(devices), "--steps", str(both(quick=10, all=90))]
    done = subprocess.run([sys.executable, PROGRAM, *about], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    deaths, = map(int, re.findall(r"^peers: \d+ steps, (\d+) deaths, \d+ joins, 0 hangs, 0 wrong bits;", done.stdout))
    assert deaths > 2, done.stdout


def test_a_rank_that_dies_in_a_sum_over_nodes_leaves_no_rank_waiting():
    """Checks that all calls end and that errors after a rollback are the model's, or the program fails. A rank gets
    COMM unless it had all data that it needed: in step 4 the other node needs nothing of the dead rank."""
    done = subprocess.run([sys.executable, ROOT / "tests/churn/steps.py"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("15 deaths, 0 hangs, 0 wrong bits\n"), done.stdout + done.stderr
    found = re.findall(r"(?m)^step (.*): [\w ]+: 0 (\w+), 2 (\w+), 3 (\w+); [\d.]+ s after the death", done.stdout)
    told = {step: {of[1:] for of in found if of[0] == step} for step, *_ in found}
    all_told = {("COMM", "COMM", "COMM")}
    assert len(found) == 15 and [told[step] for step in ("1", "2", "3, first exchange")] == [all_told] * 3, done.stdout
    assert told["4"] == {("COMM", "OK", "OK")}, done.stdout
    # Rank 3 exchanges with the dead rank, and rank 2 may have had all of rank 3 by then.
    assert told["3, second exchange"] <= {("COMM", "COMM", "COMM"), ("COMM", "OK", "COMM")}, done.stdout


@pytest.mark.parametrize("counts", [True, False], ids=["commit", "rollback"])
def test_ranks_decide_whether_a_step_that_ended_on_one_rank_counts(counts):
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
