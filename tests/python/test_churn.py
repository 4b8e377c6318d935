"""A few steps of tests/churn/churn.py: ranks that are killed, stopped, leave and join; `make churn` takes more."""

import pathlib
import re
import subprocess
import sys

from tiers import both

PROGRAM = pathlib.Path(__file__).resolve().parents[1] / "churn/churn.py"


def test_survivors_of_ranks_that_die_go_on_as_the_model_says():
    steps = both(quick=150, all=1500)  # 50 of a codec, then of the next
    done = subprocess.run([sys.executable, PROGRAM, "--steps", str(steps)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.splitlines()[-1]
    leaks = "0 hangs, 0 wrong bits, 0 descriptors and 0 threads leaked"
    found = re.match(rf"sockets: (\d+) steps, (\d+) deaths, (\d+) joins, {leaks}", line)
    assert found, line
    taken, deaths, joins = map(int, found.groups())
    assert taken == steps and deaths > steps // 10 and joins > deaths, line
