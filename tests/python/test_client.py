"""Where examples_python/gradcodec_ctypes.py looks for the library when nobody names it."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

LIBRARY = os.environ["GRADCODEC_LIBRARY"]
CLIENT = Path(__file__).resolve().parent.parent.parent / "examples_python" / "gradcodec_ctypes.py"
NAME = "libgradcodec-of-a-test.so.0"  # one that no machine has installed


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A copy of the client in a prefix of its own, with a home and a Python that have no library."""
    monkeypatch.delenv("GRADCODEC_LIBRARY")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "python"))
    copy = tmp_path / "beside" / "bin" / CLIENT.name
    copy.parent.mkdir(parents=True)
    shutil.copy(CLIENT, copy)
    spec = importlib.util.spec_from_file_location("copied_client", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "NAME", NAME, raising=False)
    return module


@pytest.mark.parametrize("prefix", ["beside", "python", "home/.local"])
def test_it_is_found_in_the_prefixes_where_it_may_be(client, tmp_path, prefix):
    place = tmp_path / prefix / "lib" / NAME
    place.parent.mkdir(parents=True)
    shutil.copy(LIBRARY, place)
    gradcodec = client.GradCodec()
    assert gradcodec.lib._name == str(place) and gradcodec.chunk_bytes(1000, 4) == 32


def test_where_it_is_not_found_the_error_says_where_it_was_sought_and_what_to_do(client, tmp_path):
    with pytest.raises(OSError) as raised:
        client.GradCodec()
    sought = [str(tmp_path / prefix / "lib" / NAME) for prefix in ("beside", "python", "home/.local")]
    for words in (NAME, *sought, "make install PREFIX=$HOME/.local", "GRADCODEC_LIBRARY"):
        assert words in str(raised.value)


def test_a_file_that_is_found_but_no_library_is_not_passed_over(client, tmp_path):
    place = tmp_path / "beside" / "lib" / NAME
    place.parent.mkdir(parents=True)
    place.write_text("not a library")
    with pytest.raises(OSError, match=str(place)):
        client.GradCodec()
