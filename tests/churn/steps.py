"""Kills a rank of two nodes of two ranks in each step of an all-reduce over nodes (docs/NUMERICS.md, section 12).

    python tests/churn/steps.py

Ranks are the processes of churn.py, over sockets. Rank 1 kills itself in step 1 (while values travel within its node)
and step 2 (before it sends the first code). It also kills itself in step 3 (in the first and in the second exchange
between nodes) and step 4 (while reduced chunks travel within its node). Each call of the other ranks has to return a
status. After the rollback their errors must be the model's from before the step. Prints the statuses.
"""

import argparse
import itertools
import signal
import time

import churn
import numpy as np

VICTIM = 1
# For each step: exchange of a run in which the rank dies, and after which share of its bytes, sent ones first.
DEATHS = {
    "1": (0, 0.25), "2": (1, 0.0), "3, first exchange": (1, 0.25), "3, second exchange": (2, 0.25), "4": (3, 0.25),
}  # fmt: skip


class Session(churn.Session):
    """Session in which only the rank VICTIM fails, in the exchange that `planted` names."""

    planted = ()

    def draw_faults(self, rng, ids, share, kinds):
        self.faults = {ids[VICTIM]: ("kill", *self.planted, 0.0)} if self.planted else {}

    def collect(self, ids, doomed=()):
        answers = super().collect(ids, doomed)
        if doomed:
            self.statuses, self.took = {i: status for i, (status, *_) in answers.items()}, time.monotonic() - self.died
        return answers


def of_four():
    """Returns a generator whose first draw is a world of four ranks."""
    for seed in itertools.count():
        if np.random.default_rng(seed).integers(churn.LEAST, churn.MOST + 1) <= 4:
            return np.random.default_rng(seed)


def run(codec, where, totals):
    """Returns the status of each remaining rank, None for success, and the seconds from the death to the last one."""
    session, rng = Session(7, codec, "nodes", totals, 0, False), of_four()
    try:
        while session.number < 2 or session.model is None:  # two steps leave errors; a world may end between steps
            session.make_world(of_four()) if session.model is None else session.take_step(rng)
        assert session.nodes == 2 and len(session.order) == 4
        order, session.planted = list(session.order), where
        session.take_step(rng)  # ends the world, and compares all errors with the model's
        assert session.model is None and len(session.members) == 3
        return {order.index(i): status for i, status in session.statuses.items()}, session.took
    finally:
        for member in session.members.values():
            member.signal(signal.SIGKILL)
            member.gone()


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    totals = dict.fromkeys(["steps", "deaths", "joins", "hangs", "wrong", "descriptors", "threads", "longest", "ours"], 0)
    for step, where in DEATHS.items():
        for codec in churn.CODECS:
            statuses, took = run(codec, where, totals)
            said = ", ".join(f"{rank} {status.name if status else 'OK'}" for rank, status in sorted(statuses.items()))
            print(f"step {step}: {codec}: {said}; {took:.3f} s after the death")
    print("{deaths} deaths, {hangs} hangs, {wrong} wrong bits".format(**totals))
    if totals["hangs"] or totals["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
