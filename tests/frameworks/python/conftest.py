"""Fixtures for the Python client and its examples with their frameworks. The CUDA part is skipped without a device."""

import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "examples" / "python"), str(ROOT / "python")]
sys.path.append(str(ROOT / "tests" / "python"))  # for tiers.py
# The examples are programs of their own, and import the client from this path.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
if not os.environ.get("GRADCODEC_LIBRARY"):
    in_tree = [ROOT / folder / "libgradcodec.so.0" for folder in ("lib", "target/release")]
    os.environ["GRADCODEC_LIBRARY"] = str(next((path for path in in_tree if path.exists()), in_tree[0]))
# OpenMP's threads spin at barriers: on a busy machine two of them took ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take the GPU for itself
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # the CPU as four devices
if not os.path.exists(os.environ["GRADCODEC_LIBRARY"]):
    raise pytest.UsageError(f"no library at {os.environ['GRADCODEC_LIBRARY']}; GRADCODEC_LIBRARY names it")

import peers  # noqa: E402 the path and the library come first
import tiers  # noqa: E402

# Programs that measure take minutes, and nothing else depends on them.
collect_ignore = ["test_nodes_bench.py", "test_benches.py"] if tiers.TIER == "quick" else []


@pytest.fixture
def framework(request):
    kind, *where = request.param
    if where and not peers.has_cuda():
        pytest.skip("no CUDA device")
    return kind(*where)


@pytest.fixture(autouse=True)
def first_gpu():
    """Makes GPU 0 current: JAX leaves the GPU that it has used last as the current one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(0)
