"""Ranks as processes, which call functions on request. Every call has a time limit."""

import multiprocessing
import os
import shutil
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection


class Alone(Exception):
    """Raised if another rank does not gather: it failed, is gone, is done, or gathers elsewhere."""


class Here:
    """A rank, for the functions that it calls. `folder` is shared by all ranks; `kept` lasts between calls."""

    def __init__(self, rank, world, folder, pipe):
        self.rank, self.world, self.folder, self.kept, self._pipe = rank, world, folder, {}, pipe

    def gather(self, value=None, at=None):
        """Returns the value of every rank, by rank. Waits for all ranks, which must pass the same `at`."""
        self._pipe.send(("gather", (at, value)))
        values = self._pipe.recv()
        if values is None:
            raise Alone("another rank will not come")
        return values


@dataclass
class Outcome:
    """`kind`: "done", with the function's result; "failed", with a traceback; "gone", with an exit code; "late"."""

    kind: str
    value: object = None


class RankError(Exception):
    """`short`: a line for each rank that failed by itself."""

    def __init__(self, outcomes, seconds):
        super().__init__(said(outcomes, seconds))
        failed = [(rank, o) for rank, o in enumerate(outcomes) if o.kind != "done"]
        own = [(rank, o) for rank, o in failed if Alone.__name__ not in str(o.value)]
        self.short = "; ".join(f"rank {rank} {words(o, seconds).splitlines()[-1]}" for rank, o in own or failed)


class Ranks:
    def __init__(self, world, environment=None):
        self.world, self.sound = world, True
        self.latest = None  # `at` of the last gather of all ranks
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        spawn = multiprocessing.get_context("spawn")
        before = dict(os.environ)
        os.environ.update(environment or {})
        self.pipes, self.processes = [], []
        try:
            for rank in range(world):
                pipe, end = spawn.Pipe()
                process = spawn.Process(target=serve, args=(rank, world, self.folder, end), daemon=True)
                process.start()
                end.close()
                self.pipes.append(pipe)
                self.processes.append(process)
        except BaseException:
            self.close()
            raise
        finally:
            os.environ.clear()
            os.environ.update(before)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10 if self.sound else 0)  # ranks end with their pipes, unless they wait for each other
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, function, *arguments, seconds=180):
        """Calls function(here, *arguments) on every rank; returns the results by rank."""
        outcomes = self.outcomes(function, *arguments, seconds=seconds)
        if any(outcome.kind != "done" for outcome in outcomes):
            raise RankError(outcomes, seconds)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function, *arguments, seconds=180):
        """Returns an Outcome for each rank's call. If one is not "done", the ranks cannot be used again."""
        outcomes, gathered, end = {}, {}, time.monotonic() + seconds
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send((function, arguments))
            except OSError:  # the rank is gone; its pipe reports that below
                pass
        while len(outcomes) < self.world:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in outcomes}
            ready = connection.wait(list(waiting), max(0, end - time.monotonic()))
            if not ready:
                outcomes.update((rank, Outcome("late")) for rank in waiting.values())
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    self.processes[rank].join(10)
                    kind, value = "gone", self.processes[rank].exitcode
                    gathered.pop(rank, None)
                if kind == "gather":
                    gathered[rank] = value
                else:
                    outcomes[rank] = Outcome(kind, value)
            if gathered and len(gathered) + len(outcomes) == self.world:
                ats = {at for at, _ in gathered.values()}
                are_together = not outcomes and len(ats) == 1
                answer = [gathered[rank][1] for rank in range(self.world)] if are_together else None
                self.latest = (ats.pop() if are_together else None) or self.latest
                for rank in gathered:
                    try:
                        self.pipes[rank].send(answer)
                    except OSError:  # the rank is gone
                        pass
                gathered.clear()
        self.sound = self.sound and all(outcome.kind == "done" for outcome in outcomes.values())
        return [outcomes[rank] for rank in range(self.world)]


def words(outcome, seconds):
    if outcome.kind == "failed":
        return outcome.value.strip()
    return {"done": "done", "gone": f"ended with {outcome.value}", "late": f"not done after {seconds} s"}[outcome.kind]


def said(outcomes, seconds):
    """Returns the outcomes as text, first the ranks that failed by themselves."""
    lines = [f"rank {rank}: {words(outcome, seconds)}" for rank, outcome in enumerate(outcomes)]
    return "\n".join(sorted(lines, key=lambda line: Alone.__name__ in line))


def end_with_the_parent(folder):
    """Ends this process and removes the folder when the parent is killed: a rank may wait in a library."""
    connection.wait([multiprocessing.parent_process().sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def serve(rank, world, folder, pipe):
    threading.Thread(target=end_with_the_parent, args=(folder,), daemon=True).start()
    here = Here(rank, world, folder, pipe)
    while True:
        try:
            function, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = "done", function(here, *arguments)
        except BaseException:
            answer = "failed", traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:  # the parent is gone
            break
    os._exit(0)  # libraries may wait for other ranks at the end of a process
