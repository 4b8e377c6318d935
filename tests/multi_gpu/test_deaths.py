"""Kills ranks on GPUs, over NCCL and over peer memory, with tests/churn/churn.py. The others' handles still return
their errors from before, to the bit, and are released. Training continues with these errors in a new communicator."""

import pathlib
import re
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).resolve().parents[1] / "churn/churn.py"
DEATHS = 20


@pytest.mark.parametrize("transport", ["peers", "nccl"])
def test_survivors_continue_after_ranks_die(pytestconfig, transport):
    if not pytestconfig.gpus:
        pytest.skip("no GPU: tests/python/test_churn.py shows it on a driver without hardware")
    if transport == "nccl" and pytestconfig.gpus < 2:
        pytest.skip("two GPUs needed for NCCL, one found")
    about = ["--over", transport, "--processes", "--devices", str(pytestconfig.gpus), "--deaths", str(DEATHS)]
    done = subprocess.run([sys.executable, PROGRAM, *about], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    good = "0 hangs, 0 wrong bits;"
    (deaths,) = map(int, re.findall(rf"^{transport}: \d+ steps, (\d+) deaths, \d+ joins, {good}", done.stdout))
    assert deaths >= DEATHS, done.stdout
