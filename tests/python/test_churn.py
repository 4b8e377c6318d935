"""A few steps of tests/churn/churn.py: ranks that are killed, stopped, leave and join; `make churn` takes more."""

import pathlib
import re
import subprocess
import sys

from tiers import both

PROGRAM = pathlib.Path(__file__).resolve().parents[1] / "churn/churn.py"


def test_survivors_of_ranks_that_die_go_on_as_the_model_says():
    steps = both(quick=270, all=2700)  # 30 with each codec over each transport, or several times as many
    done = subprocess.run([sys.executable, PROGRAM, "--steps", str(steps)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    leaks = "0 hangs, 0 wrong bits, 0 descriptors and 0 threads leaked"
    found = re.findall(rf"(?m)^(\w+): (\d+) steps, (\d+) deaths, (\d+) joins, {leaks}", done.stdout)
    assert [over for over, *_ in found] == ["sockets", "group", "hierarchical"], done.stdout
    for _, *numbers in found:
        taken, deaths, joins = map(int, numbers)
        assert taken == steps // 3 and deaths > taken // 10 and joins > deaths, done.stdout
