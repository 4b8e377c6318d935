"""The compressed all-reduces on all GPUs: a process per GPU over NCCL, and a thread per GPU in one process.

`make multi-gpu` runs this. `--device cpu` rehearses it without a GPU, with the number of ranks in `--ranks`.
"""

import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent / "spec"), str(HERE.parent / "python")]
if not os.environ.get("GRADCODEC_LIBRARY"):
    in_tree = [ROOT / folder / "libgradcodec.so.0" for folder in ("lib", "target/release")]
    os.environ["GRADCODEC_LIBRARY"] = str(next((path for path in in_tree if path.exists()), in_tree[0]))

import driver  # noqa: E402 the path comes first
from ranks import Ranks  # noqa: E402

# Groups of these sizes are always tried: several ranks of one process may share a GPU.
SMALL_GROUPS = [2, 3]


def pytest_addoption(parser):
    parser.addoption("--device", choices=["cuda", "cpu"], default="cuda")
    parser.addoption("--ranks", type=int, default=3, help="at most, with --device cpu")


def pytest_configure(config):
    if not os.path.exists(os.environ["GRADCODEC_LIBRARY"]):
        raise pytest.UsageError(f"no library at {os.environ['GRADCODEC_LIBRARY']}; GRADCODEC_LIBRARY names it")
    on_cpu = config.getoption("device") == "cpu"
    config.gpus = 0 if on_cpu else driver.device_count()
    most = config.getoption("ranks") if on_cpu else config.gpus
    config.worlds = list(range(2, most + 1)) or [1]
    config.groups = sorted({*SMALL_GROUPS, *config.worlds} - {1})
    if not on_cpu and not config.gpus:
        raise pytest.UsageError("no CUDA device; --device cpu rehearses these tests without one")


def pytest_report_header(config):
    worlds, groups = (", ".join(map(str, sizes)) for sizes in (config.worlds, config.groups))
    if not config.gpus:
        return [f"no GPU: processes exchange through pipes, in worlds of {worlds} ranks; groups of {groups}"]
    names = ", ".join(f"{k}: {driver.name(k)}" for k in range(config.gpus))
    lines = [f"GPUs: {config.gpus} ({names})"]
    if config.gpus == 1:
        lines.append("over NCCL: a world of 1 only, for its ranks cannot share a GPU; NOT RUN: any exchange over NCCL")
    else:
        lines.append(f"over NCCL, a process a GPU: worlds of {worlds}")
    shared = [str(size) for size in config.groups if size > config.gpus]
    lines.append(f"in one process, a thread a rank: groups of {groups}")
    if shared:
        lines.append(f"  of which ranks share GPUs in those of {', '.join(shared)}")
    return lines


def pytest_generate_tests(metafunc):
    config = metafunc.config
    if "pool" in metafunc.fixturenames:
        metafunc.parametrize("pool", config.worlds, indirect=True, scope="session", ids=lambda n: f"{n} ranks")
    if "over" in metafunc.fixturenames:
        peers = ["peers", "mapped peers"] if config.gpus > 1 else []
        ways = ["id", "borrowed", "split", "torch", "torch, split", *peers] if config.gpus else ["pipes"]
        metafunc.parametrize("over", ways)
    if "group_size" in metafunc.fixturenames:
        metafunc.parametrize("group_size", config.groups)


@pytest.fixture(scope="session")
def peers(pytestconfig):
    """Yields ranks that reach each other's memory: a GPU each, or, if there is one GPU, two that share it."""
    if not pytestconfig.gpus:
        pytest.skip("no GPU: no peer memory")
    pool = Pool(max(2, pytestconfig.gpus))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def on(pytestconfig):
    return "cuda" if pytestconfig.gpus else "cpu"


@pytest.fixture(scope="session")
def usual(on):
    """Returns the communicator for tests that are not about communicators."""
    return "id" if on == "cuda" else "pipes"


class Pool:
    """Ranks that are replaced after a test has broken them."""

    def __init__(self, world):
        self.world, self.ranks = world, None

    def get(self):
        if self.ranks is None or not self.ranks.sound:
            self.close()
            self.ranks = Ranks(self.world)
        return self.ranks

    def close(self):
        if self.ranks:
            self.ranks.close()


@pytest.fixture(scope="session")
def pool(request):
    pool = Pool(request.param)
    yield pool
    pool.close()


@pytest.fixture
def ranks(pool):
    return pool.get()
