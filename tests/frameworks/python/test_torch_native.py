"""Tests of gradcodec.torch's hook in C++: its compilation, its cache, and the messages if it cannot be used."""

import os
import pathlib
import signal
import stat
import subprocess
import sys
import sysconfig
import time

import pytest

torch = pytest.importorskip("torch")

from gradcodec import _torch_native as native  # noqa: E402
from peers import ROOT  # noqa: E402
from ranks import on_ranks  # noqa: E402

# Replaces a compiler: appends a line to a log, waits, and copies the hook that was compiled before.
COMPILER = """#!/bin/sh
echo "$$" >> {log}
sleep {seconds}
while [ "$1" != -o ]; do shift; done
cp {compiled} "$2"
"""


@pytest.fixture(scope="module")
def compiled():
    """Returns the hook, compiled in the user's own cache."""
    return native.built()


@pytest.fixture
def place(tmp_path, monkeypatch, compiled):
    """Returns a cache folder with a fast compiler: `compiler(seconds)` sets its time, `runs()` counts its runs."""

    class Place:
        folder, log = tmp_path / "cache", tmp_path / "log"

        def compiler(self, seconds=0.0, text=COMPILER):
            program = tmp_path / "compiler"
            program.write_text(text.format(log=self.log, seconds=seconds, compiled=compiled))
            program.chmod(0o755)
            monkeypatch.setenv("CXX", str(program))

        def runs(self):
            return len(self.log.read_text().splitlines()) if self.log.exists() else 0

        def program(self, *arguments):
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
            return subprocess.Popen(
                [sys.executable, "-m", "gradcodec.torch", *arguments], env=environment, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip

    monkeypatch.setenv("GRADCODEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GRADCODEC_CACHE", raising=False)
    made = Place()
    made.compiler()
    return made


def test_the_hook_is_compiled_once_and_cached(place):
    path = native.built()
    assert native.built() == path and path.parent == place.folder and place.runs() == 1
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(path.name for path in place.folder.iterdir()) == [path.with_suffix(".lock").name, path.name]
    path.with_suffix(".lock").unlink()
    assert native.built() == path and not path.with_suffix(".lock").exists()  # a reader writes nothing in the folder
    assert native._imported(path).Slot


def test_another_pytorch_python_library_or_source_compiles_the_hook_again(place, monkeypatch, tmp_path):
    paths = [native.built()]
    monkeypatch.setattr(torch, "__version__", torch.__version__ + ".other")
    paths.append(native.built())
    monkeypatch.setattr(sys.implementation, "cache_tag", "other")
    paths.append(native.built())
    monkeypatch.setattr(native, "NAME", "libgradcodec.so.9")
    paths.append(native.built())
    changed = tmp_path / "hook.cpp"
    changed.write_bytes(native.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(native, "SOURCE", changed)
    paths.append(native.built())
    assert len(set(paths)) == place.runs() == 5


def test_a_damaged_file_is_compiled_again(place, monkeypatch):
    path = native.built()
    whole = path.read_bytes()
    for damaged in whole[:-1], whole[:100], b"", whole[:5000] + b"\0\1" + whole[5002:]:
        path.write_bytes(damaged)
        native.built()
        assert path.read_bytes() == whole
    path.write_bytes(whole[:-1])
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(native.Unavailable, match="there is no C.. compiler: /nowhere/c.. was not found"):
        native.built()


def test_several_processes_compile_the_hook_once(place):
    place.compiler(seconds=1)
    processes = [place.program("build") for _ in range(4)]
    for process in processes:
        text, errors = process.communicate()
        assert process.returncode == 0 and not errors and str(place.folder) in text
    assert place.runs() == 1


def test_a_killed_build_blocks_no_other_build(place):
    place.compiler(seconds=60)
    process = place.program("build")
    while not place.runs():
        time.sleep(0.05)
        assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    left = place.folder / "torch-left.123.part"
    left.write_bytes(b"")
    os.utime(left, (1, 1))
    assert list(place.folder.glob("*.lock"))
    place.compiler()
    assert native._is_whole(native.built()) and place.runs() == 2 and not list(place.folder.glob("*.part"))


def test_a_process_that_does_not_end_is_not_waited_for(place, monkeypatch):
    place.compiler(seconds=60)
    process = place.program("build")
    while not place.runs():
        time.sleep(0.05)
        assert process.poll() is None, process.communicate()
    place.compiler()
    monkeypatch.setattr(native, "PATIENCE", 0.3)
    assert native._is_whole(native.built()) and place.runs() == 2
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_missing_tool_is_named(place, monkeypatch, tmp_path):
    def refused(words):
        with pytest.raises(native.Unavailable, match=words):
            native._imported(native.built())

    with monkeypatch.context() as patch:
        patch.delenv("CXX")
        patch.setenv("PATH", str(tmp_path / "empty"))
        refused(r"there is no C\+\+ compiler: c\+\+, g\+\+ or clang\+\+ was not found")
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path / "none")})
        refused(r"Python's headers are not installed \(python3-dev .*: no /.*/none/Python.h")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__path__", [str(tmp_path / "none")])
        refused("PyTorch's headers are not installed: no /.*/reducer.hpp")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.12.1+cu130")
        refused("PyTorch 2.12.1.cu130 is not one that it was tested with: 2.11, 2.15")
    with monkeypatch.context() as patch:
        patch.setenv("GRADCODEC_CACHE", "0")
        refused("GRADCODEC_CACHE=0 turns the cache off")
    with monkeypatch.context() as patch:
        for name, value in ("GRADCODEC_CACHE_DIR", ""), ("XDG_CACHE_HOME", "relative"), ("HOME", "relative"):
            patch.setenv(name, value)
        refused("no cache folder: none of")
        patch.setenv("GRADCODEC_CACHE_DIR", "relative")
        refused("GRADCODEC_CACHE_DIR is relative; an absolute path expected")
        patch.setenv("GRADCODEC_CACHE", "2")
        refused("GRADCODEC_CACHE is 2; 0 or 1 expected")
    with monkeypatch.context() as patch:
        patch.setenv("GRADCODEC_CACHE_DIR", "/proc/sys")  # not even root can write there
        refused("the cache folder /proc/sys cannot be written to: ")
        patch.setenv("GRADCODEC_CACHE_DIR", str(native.SOURCE))
        refused("the cache folder .*hook.cpp cannot be used: ")
    place.compiler(text="#!/bin/sh\necho 'warning: x' >&2; echo 'hook.cpp:1: error: no such type' >&2; exit 1\n")
    refused("compiler failed: hook.cpp:1: error: no such type")
    place.compiler(text="#!/nowhere/sh\n")
    refused("compiler cannot be run: ")
    place.compiler(text='#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo text > "$2"\n')
    refused("torch-.*so cannot be loaded: ")


def test_files_that_another_user_can_write_are_not_loaded(place):
    path = native.built()
    for mode in 0o602, 0o620:
        path.chmod(mode)
        with pytest.raises(native.Unavailable, match="others may write to it"):
            native.built()
    path.chmod(0o600)
    place.folder.chmod(0o777)
    with pytest.raises(native.Unavailable, match="others may write to it"):
        native.built()


def test_the_command_prints_its_actions(place, monkeypatch):
    for arguments, status, words in [
        ("build", 0, f"{place.folder}/torch-"), ("", 2, "usage: "), ("bake", 2, "usage: "),
    ]:  # fmt: skip
        process = place.program(*arguments.split())
        text, errors = process.communicate()
        assert process.returncode == status and words in text + errors, (text, errors)
    monkeypatch.setenv("GRADCODEC_CACHE", "0")
    process = place.program("build")
    text, errors = process.communicate()
    assert process.returncode == 1 and "is not available: GRADCODEC_CACHE=0 turns" in errors


def test_the_source_agrees_with_the_header_and_has_no_warnings():
    torch_headers, python = pathlib.Path(torch.__path__[0], "include"), sysconfig.get_paths()["include"]
    command = [
        *native.compiler(), "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-include",
        str(ROOT / "include/gradcodec.h"), "-isystem", str(torch_headers), "-isystem",
        str(torch_headers / "torch/csrc/api/include"), "-isystem", python, str(native.SOURCE),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# A rank that ends as any program does, with the hook still registered.
PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import gradcodec.torch

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
gradcodec.torch.compress(model, "int4", native=True)
for _ in range(3):
    model(torch.ones(2, 64)).sum().backward()
if sys.argv[3] == "destroyed":
    dist.destroy_process_group()
kept = model.reducer if sys.argv[3] == "kept" else None
"""


@pytest.mark.parametrize("end", ["plain", "destroyed", "kept"])
def test_a_program_ends_with_the_hook_registered(tmp_path, end, compiled):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(program), str(tmp_path / "store"), str(rank), end], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) for rank in (0, 1)
    ]  # fmt: skip
    for process in processes:
        text, errors = process.communicate(timeout=1200)
        assert (process.returncode, text) == (0, "") and "terminate" not in errors, errors


def _lacking():
    from gradcodec.torch import compress
    from torch.nn.parallel import DistributedDataParallel

    if torch.distributed.get_rank() == 1:
        native._found[:] = [native.Unavailable("there is no C++ compiler")]
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    with pytest.raises(RuntimeError, match=r"native: there is no hook in C\+\+ on rank 1: there is no C\+\+ compiler"):
        compress(model, native=True)
    compress(model, native=None)
    model(torch.ones(2, 64)).sum().backward()


def test_a_rank_without_the_hook_is_named_on_every_rank(tmp_path, compiled):
    on_ranks(("gloo", "cpu", 2), _lacking, tmp_path)
