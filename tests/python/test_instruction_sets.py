"""Runs tests of bits, signs and copies on the CPU with each narrower instruction set of this processor: a process chooses
one once, and all other tests take the widest. tests/golden.rs has the codecs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import gradcodec
from stand_in import run
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
    run("""
        assert b"instruction set: none, of " in ctypes.string_at(lib.gc_build_info())
        array, tensor = np.zeros(32, np.uint8), held(32)
        cpu, gpu = capi.Tensor(array).view, byref(view(tensor, (32,)))
        for source, target in (cpu, cpu), (cpu, gpu), (gpu, cpu):
            expect(lib.gc_copy_into(source, target, None), Status.INVALID_ARGUMENT, "GRADCODEC_CPU is bogus; ")
        assert lib.gc_copy_into(gpu, byref(view(held(32), (32,))), None) == 0, "a copy that needs no CPU was refused"
    """, GRADCODEC_CPU="bogus")


def test_an_empty_name_counts_as_not_set():
    run(f"""assert b"instruction set: {USED}, of " in ctypes.string_at(lib.gc_build_info())""", GRADCODEC_CPU="")
