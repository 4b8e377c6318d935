"""Tests of the processes: a rank that fails, exits or is missing is named, and no rank waits for ever."""

import ctypes
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from ranks import Outcome, RankError, Ranks


def told(here, what):
    if here.rank == 1 and what == "exit":
        os._exit(9)
    if here.rank == 1 and what == "raise":
        raise ValueError("of rank 1")
    if here.rank == 1 and what == "stay away":
        threading.Event().wait()  # never returns, so a rank that waits for this one waits for ever
    if here.rank == 1 and what == "be elsewhere":
        return here.gather(10, at="elsewhere")
    return here.gather(10 * here.rank, at="home")


def test_all_ranks_gather_the_data_of_each():
    with Ranks(3) as ranks:
        assert ranks.call(told, "come") == [[0, 10, 20]] * 3
        assert ranks.sound and ranks.latest == "home"


@pytest.mark.parametrize("what, of_rank_1", [("exit", "ended with 9"), ("raise", "ValueError: of rank 1")])
def test_a_rank_that_fails_is_named_first_and_the_others_do_not_wait(what, of_rank_1):
    with Ranks(3) as ranks:
        with pytest.raises(RankError) as error:
            ranks.call(told, what)
        assert "rank 1" in str(error.value).splitlines()[0] and of_rank_1 in str(error.value)
        assert str(error.value).count("Alone: another rank will not come") == 2
        assert error.value.short.startswith("rank 1 ") and "rank 2" not in error.value.short
        assert not ranks.sound


def test_ranks_in_different_calls_get_an_error():
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(told, "be elsewhere")
        assert [outcome.kind for outcome in outcomes] == ["failed"] * 2


def test_a_missing_rank_makes_itself_and_its_waiters_late():
    with Ranks(2) as ranks:
        assert ranks.outcomes(told, "stay away", seconds=4) == [Outcome("late")] * 2
        assert not ranks.sound


def wait_in_a_library(here):
    os.write(1, f"{here.folder}\n".encode())
    ctypes.CDLL(None).sleep(600)  # longer than the test waits for its end


def be_a_parent():
    with Ranks(2) as ranks:
        ranks.call(wait_in_a_library)


def test_ranks_end_when_their_parent_is_killed():
    """Reads the ranks' standard output, which they hold open, to its end: then they are gone."""
    command = [sys.executable, "-c", "import test_ranks; test_ranks.be_a_parent()"]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent)}
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    folders = {parent.stdout.readline().strip() for _ in range(2)}
    parent.kill()
    assert parent.communicate(timeout=60)[0] == ""
    assert len(folders) == 1 and not os.path.exists(folders.pop())
