"""Tests of the thread that aborts communicators over NCCL, with communicators and an event that a test controls."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from gradcodec import GradCodecError
from gradcodec._torch_nodes import Watch

LIMIT = 30  # seconds until a test fails


class Comm:
    """A communicator that reports `failure` and signals its abort."""

    def __init__(self, failure=None):
        self.failure, self.checked, self.aborted = failure, threading.Semaphore(0), threading.Event()

    def async_error(self):
        self.checked.release()
        if self.failure:
            raise self.failure

    def abort(self):
        self.aborted.set()


class Event:
    done = False

    def record(self):
        pass

    def query(self):
        return self.done


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Watch, "INTERVAL", 0.001)
    made = []

    def make(*comms, timeout=LIMIT):
        made.append(Watch(comms, timeout))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_an_error_of_one_aborts_all(watch):
    sound, failed = Comm(), Comm(GradCodecError("socket closed", 9))
    made = watch(sound)
    made.add(failed)
    assert sound.aborted.wait(LIMIT) and failed.aborted.wait(LIMIT)
    with pytest.raises(GradCodecError, match="socket closed"):
        made.check()


def test_an_exchange_that_does_not_end_is_aborted(watch):
    comm = Comm()
    made = watch(comm, timeout=0)
    for _ in range(3):
        assert comm.checked.acquire(timeout=LIMIT)
    assert not comm.aborted.is_set()  # nothing was enqueued
    made.expect()
    assert comm.aborted.wait(LIMIT)


def test_an_exchange_that_has_ended_is_not_aborted(watch, monkeypatch):
    monkeypatch.setattr(Event, "done", True)
    comm = Comm()
    made = watch(comm, timeout=0)
    made.expect()
    for _ in range(3):
        assert comm.checked.acquire(timeout=LIMIT)
    made.stop()
    assert not comm.aborted.is_set()


def test_the_time_of_an_old_exchange_does_not_abort_a_new_one(watch, monkeypatch):
    comm, asked = Comm(), []
    made = watch(comm, timeout=0)

    def query(_):
        made.expect()  # another exchange is enqueued before the event is asked
        asked.append(1)
        return False

    monkeypatch.setattr(Event, "query", query)
    made.expect()
    while len(asked) < 3 and not comm.aborted.is_set():
        assert comm.checked.acquire(timeout=LIMIT)
    made.stop()
    assert not comm.aborted.is_set()


def test_a_process_ends_while_a_thread_watches():
    program = """
import torch
from gradcodec._torch_groups import Levels
from gradcodec._torch_nodes import Watch

torch.cuda.Event = object
Watch.INTERVAL = 1000
levels = Levels.__new__(Levels)
levels.watch = Watch([], 1)
"""
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT, env=where)
