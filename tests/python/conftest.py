import os
import pathlib
import sys

import pytest
from hypothesis import settings

from tiers import both

# Every run has the same examples, so a failure here repeats everywhere. Nothing is written beside the tests.
settings.register_profile("fixed", max_examples=both(quick=50, all=250), deadline=None, derandomize=True, database=None)
settings.load_profile("fixed")

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "fakes"), str(HERE.parent.parent / "python")]  # stand_in, gradcodec

# Without a C++ compiler make builds no driver: tests that need one are left out, and named at the end.
collect_ignore = []
if not os.environ.get("GRADCODEC_DRIVERS"):
    words = "stand_in", "from test_codec_driver"
    collect_ignore = [path.name for path in sorted(HERE.glob("test_*.py")) if any(w in path.read_text() for w in words)]

# The CUDA tensors of these tests are host memory, so no GPU may be visible.
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_configure(config):
    if not os.environ.get("GRADCODEC_LIBRARY"):
        raise pytest.UsageError("GRADCODEC_LIBRARY names the library under test: .../libgradcodec.so")


def pytest_terminal_summary(terminalreporter):
    if collect_ignore:
        names = ", ".join(collect_ignore)
        terminalreporter.write_line(f"NOT RUN, because GRADCODEC_DRIVERS names no folder of drivers without a device: {names}")
