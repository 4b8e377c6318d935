"""Runs tests of bits, signs and copies on the CPU with each narrower instruction set of this processor: a process chooses
one once, and all other tests take the widest. tests/golden.rs has the codecs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import gradcodec
from tiers import both

TESTS = pathlib.Path(__file__).resolve().parent.parent
QUICK = [("python/test_copy.py", "nowhere_else or casts_match"), ("spec/test_parity.py", "cpu and not length")]
MORE = [("spec/test_parity.py", "cpu and length"), ("python/test_bits.py", ""), ("python/test_copy.py", "large")]
USED, ALL = re.search(r"instruction set: (\w+), of (.+)", gradcodec.GradCodec().build_info()).groups()


@pytest.mark.parametrize("tests, chosen", both(quick=QUICK, all=QUICK + MORE))
@pytest.mark.parametrize("name", [name for name in ALL.split() if name != USED])
def test_each_instruction_set_matches_the_models(name, tests, chosen):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS / tests, "-k", chosen]
    done = subprocess.run(command, env={**os.environ, "GRADCODEC_CPU": name}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def test_a_wrong_name_is_refused():
    program = "import gradcodec; gradcodec.encode(__import__('numpy').zeros(8, 'f4'), 'int8')"
    environment = {**os.environ, "GRADCODEC_CPU": "bogus", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "GRADCODEC_CPU is bogus; " in done.stderr
