"""A suite for the CPU and for a CUDA device, against models in Python.

If GRADCODEC_DRIVERS names the folder of the stand-in drivers (tests/fakes/cuda), the device is a stand-in: it runs the
kernels on the host, so a machine without a GPU runs these tests too. Otherwise the device is a GPU. Without a GPU, tests
on the device are skipped. Tests with the mark `gpu`, and those that hold a stream back by `gate`, run on a GPU alone.
"""

import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]
if not os.environ.get("GRADCODEC_LIBRARY"):
    in_tree = [ROOT / folder / "libgradcodec.so.0" for folder in ("lib", "target/release")]
    os.environ["GRADCODEC_LIBRARY"] = str(next((path for path in in_tree if path.exists()), in_tree[0]))

import driver  # noqa: E402 the path comes first, and the stand-in before the library

# Mark of files in which everything needs a GPU; some of them import PyTorch or CuPy.
NEEDS_GPU = "\npytestmark = pytest.mark.gpu\n"
collect_ignore = [path.name for path in HERE.glob("test_*.py") if driver.IS_STAND_IN and NEEDS_GPU in path.read_text()]


def pytest_configure(config):
    if not os.path.exists(os.environ["GRADCODEC_LIBRARY"]):
        raise pytest.UsageError(f"no library at {os.environ['GRADCODEC_LIBRARY']}; GRADCODEC_LIBRARY names it")
    config.addinivalue_line("markers", "gpu: needs a GPU; not run on the stand-in driver")
    config.addinivalue_line("markers", "two_devices: needs two CUDA devices")


def needs_gpu(item):
    return item.get_closest_marker("gpu") is not None or "gate" in item.fixturenames


def on_cpu(item):
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return any(str(params.get(name, "")).startswith("cpu") for name in ("place", "over", "bench"))


def pytest_collection_modifyitems(config, items):
    if driver.IS_STAND_IN:
        config.hook.pytest_deselected(items=[item for item in items if needs_gpu(item)])
        items[:] = [item for item in items if not needs_gpu(item)]
    count = driver.device_count()
    for item in items:
        if count == 0 and not on_cpu(item):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif count < 2 and item.get_closest_marker("two_devices"):
            item.add_marker(pytest.mark.skip(reason="two CUDA devices needed, one found"))


@pytest.fixture(autouse=True)
def primary_context():
    """Makes device 0's primary context current in every test; afterwards it must still be current, and sound."""
    if not driver.device_count():
        yield
        return
    driver.use(driver.primary())
    yield
    assert driver.current() == driver.primary(), "the current context is another one after the test"
    driver.synchronize()


@pytest.fixture(scope="session")
def gate():
    driver.use(driver.primary())
    return driver.Gate()


@pytest.fixture
def stream():
    with driver.Stream() as stream:
        yield stream.handle


@pytest.fixture(scope="module")
def memory():
    """Yields memory of the device, from which `place` cuts operands."""
    import gpu
    import layouts
    from arena import Arena

    driver.use(driver.primary())
    arena = Arena(512 << 20, layouts.EXACT)
    yield arena
    arena.free()


@pytest.fixture(params=["cpu", "cuda"])
def place(request):
    """Returns the place of a codec and its operands: the CPU, or the device."""
    if request.param == "cpu":
        from codecs_c import Host

        return Host()
    arena = request.getfixturevalue("memory")
    arena.start_again()
    return arena
