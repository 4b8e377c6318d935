"""Checks that the planted faults of tests/faults still apply, and that the tests which must notice them exist."""

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).resolve().parents[1] / "faults/run.py"


@pytest.mark.skipif(not FAULTS.exists(), reason="the tree of `make dist` has not all of the tests")
def test_every_fault_applies_and_its_tests_exist():
    done = subprocess.run([sys.executable, FAULTS, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
