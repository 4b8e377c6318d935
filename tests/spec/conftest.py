"""The tests that need a CUDA device. Without one, each says so and is counted as skipped."""

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

import driver  # noqa: E402 the path comes first


def pytest_configure(config):
    if not os.path.exists(os.environ["GRADCODEC_LIBRARY"]):
        raise pytest.UsageError(f"no library at {os.environ['GRADCODEC_LIBRARY']}; GRADCODEC_LIBRARY names it")
    config.addinivalue_line("markers", "two_devices: needs two CUDA devices")


def pytest_collection_modifyitems(items):
    count = driver.device_count()
    for item in items:
        if count == 0:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif count < 2 and item.get_closest_marker("two_devices"):
            item.add_marker(pytest.mark.skip(reason="two CUDA devices needed, one found"))


@pytest.fixture(autouse=True)
def primary_context():
    """The primary context of device 0 is current in every test, and still there and sound after it."""
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
