"""Ranks as processes, which call functions when they are told to. They are waited for so long, and no longer."""

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
    """Another rank will not come: it failed, is gone, is done, or is at something else."""


class Here:
    """A rank, to what it calls. `folder` is one for all ranks; `kept` stays between calls."""

    def __init__(self, rank, world, folder, pipe):
        self.rank, self.world, self.folder, self.kept, self._pipe = rank, world, folder, {}, pipe

    def gather(self, value=None, at=None):
        """The value of every rank, by rank. Waits for all of them, which must be at the same."""
        self._pipe.send(("gather", (at, value)))
        values = self._pipe.recv()
        if values is None:
            raise Alone("another rank will not come")
        return values


@dataclass
class Outcome:
    """`kind`: "done", with what the function gave; "failed", with a traceback; "gone", with an exit code; "late"."""

    kind: str
    value: object = None


class RankError(Exception):
    """`short`: a line on each rank that failed of itself."""

    def __init__(self, outcomes, seconds):
        super().__init__(said(outcomes, seconds))
        failed = [(rank, o) for rank, o in enumerate(outcomes) if o.kind != "done"]
        own = [(rank, o) for rank, o in failed if Alone.__name__ not in str(o.value)]
        self.short = "; ".join(f"rank {rank} {words(o, seconds).splitlines()[-1]}" for rank, o in own or failed)


class Ranks:
    def __init__(self, world, environment=None):
        self.world, self.sound = world, True
        self.latest = None  # what the ranks were at when they last gathered
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
            process.join(10 if self.sound else 0)  # they end with their pipes, unless they wait for each other
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, function, *arguments, seconds=180):
        """function(here, *arguments) on every rank; the results by rank."""
        outcomes = self.outcomes(function, *arguments, seconds=seconds)
        if any(outcome.kind != "done" for outcome in outcomes):
            raise RankError(outcomes, seconds)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function, *arguments, seconds=180):
        """The same, whatever becomes of the ranks: an Outcome of each. Once one is not done they are of no use."""
        outcomes, gathered, end = {}, {}, time.monotonic() + seconds
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send((function, arguments))
            except OSError:  # it is gone, as its pipe will say
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
                    except OSError:  # likewise
                        pass
                gathered.clear()
        self.sound = self.sound and all(outcome.kind == "done" for outcome in outcomes.values())
        return [outcomes[rank] for rank in range(self.world)]


def words(outcome, seconds):
    if outcome.kind == "failed":
        return outcome.value.strip()
    return {"done": "done", "gone": f"ended with {outcome.value}", "late": f"not done after {seconds} s"}[outcome.kind]


def said(outcomes, seconds):
    """What became of the ranks, those first that failed of themselves."""
    lines = [f"rank {rank}: {words(outcome, seconds)}" for rank, outcome in enumerate(outcomes)]
    return "\n".join(sorted(lines, key=lambda line: Alone.__name__ in line))


def end_with_the_parent(folder):
    """A rank that waits in a library would outlive a parent that is killed, which then removes no folder either."""
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
    os._exit(0)  # what libraries do at the end of a process may wait for other ranks
