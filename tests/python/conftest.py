import os
import pathlib
import sys

import pytest
from hypothesis import settings

# The same examples in every run: what fails here fails everywhere, and nothing is written beside the tests.
settings.register_profile("fixed", max_examples=250, deadline=None, derandomize=True, database=None)
settings.load_profile("fixed")

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "fakes"))  # stand_in

# The CUDA tensors of these tests are host memory: a card must not see them.
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_configure(config):
    if not os.environ.get("GRADCODEC_LIBRARY"):
        raise pytest.UsageError("GRADCODEC_LIBRARY names the library under test: .../libgradcodec.so")
