"""Tests of the cache of kernels: other processes find what was compiled, and no fault of the directory keeps a kernel
from being compiled. The NVRTC compiles nothing (tests/fakes/nvrtc/libnvrtc.c) and records its calls."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from ctypes.util import find_library

import pytest

from stand_in import DRIVERS, HERE
from tiers import both

SCRIPT = """
import sys
import numpy as np
from kernels import NO_DISK, codes, elementwise

def prepare(operation="y = x", capability=90, dtype="f4", **more):
    kernel = elementwise("T x", "T y", operation, **more)
    x = np.zeros(4, dtype)
    kernel.prepare([x], [x.copy()], capability=capability)
    log = kernel.log()
    kernel.free()
    return log
"""


class Place:
    """A cache, and the record of compilations."""

    def __init__(self, folder):
        self.root, self.folder, self.record = folder, folder / "cache", folder / "record"

    def start(self, script, limit=None, **environment):
        """Starts a process. A variable that is None is not set."""
        removed = {"GRADCODEC_CACHE", "XDG_CACHE_HOME", "GRADCODEC_NVRTC", *environment}
        environment = {
            **{name: value for name, value in os.environ.items() if name not in removed},
            "LD_LIBRARY_PATH": str(pathlib.Path(DRIVERS) / "fake_nvrtc"),
            "PYTHONPATH": str(HERE),
            "FAKE_NVRTC_LOG": str(self.record),
            "HOME": str(self.root),
            **{name: str(value) for name, value in environment.items() if value is not None},
        }
        if "GRADCODEC_CACHE_DIR" not in environment:
            environment["GRADCODEC_CACHE_DIR"] = str(self.folder)
        environment = {name: value for name, value in environment.items() if value != "not set"}
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT + script],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )

    def run(self, script="prepare()", **how):
        process = self.start(script, **how)
        out, error = process.communicate()
        assert (process.returncode, error) == (0, ""), error
        return out

    def compiled(self):
        """Returns the number of compilations since the last call."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return len(lines)

    def entries(self, folder=None):
        return sorted(path.name for path in (folder or self.folder).iterdir())


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_another_process_finds_a_compiled_kernel(place):
    show = "log = prepare(); (code,) = codes(); print(code, log)"
    first = place.run(show, FAKE_NVRTC_SAYS="kernel(1): warning: odd")
    assert place.compiled() == 1
    assert "machine code: " in first and "warning: odd" in first
    # The log has the warnings of the compilation.
    assert place.run(show) == first
    assert place.compiled() == 0
    (entry,) = place.entries()
    assert len(entry) == 80 + len(".kernel")
    assert (place.folder / entry).stat().st_mode & 0o777 == 0o600
    assert place.folder.stat().st_mode & 0o777 == 0o700


def test_every_input_of_a_compilation_is_in_the_key(place):
    others = [
        "", '"y = x + 1"', "capability=75", 'name="other"', 'preamble="int q;"', 'options=["-DX"]', "flags=1", 'dtype="f8"',
    ]  # fmt: skip
    script = "\n".join(f"prepare({other})" for other in others)
    for compiled in len(others), 0:
        place.run(script)
        assert place.compiled() == compiled


IS_LOADED = "print('libnvrtc' in open('/proc/self/maps').read())"


def nvrtc_in(folder, name="libnvrtc.so.12"):
    """Returns the path of a copy of the stand-in, which differs from others by its time at least."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "new"
    shutil.copyfile(pathlib.Path(DRIVERS) / "fake_nvrtc" / "libnvrtc.so.12", new)
    os.rename(new, folder / name)
    return folder / name


@pytest.mark.parametrize("how", ["named", "in a folder", "of pip"])
def test_another_nvrtc_compiles_again_and_a_cached_kernel_loads_none(place, how):
    packages, loads = place.root / "site-packages", ""
    if how == "of pip":
        if find_library("nvrtc"):
            pytest.skip("this machine has an NVRTC, which is found first")
        # Any library in a folder of packages will do.
        packages.mkdir()
        shutil.copyfile(DRIVERS + "/driver/libcuda.so.1", packages / "other.so")
        loads = f"import ctypes; ctypes.CDLL({str(packages / 'other.so')!r})\n"
        file, more = packages / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12", {"LD_LIBRARY_PATH": ""}
    else:
        file = packages / "libnvrtc.so.12"
        more = {"GRADCODEC_NVRTC": file} if how == "named" else {"LD_LIBRARY_PATH": packages}
    script = loads + "prepare()\n" + IS_LOADED
    for build in range(2):
        nvrtc_in(file.parent, file.name)
        assert place.run(script, **more) == "True\n"
        assert place.compiled() == 1, build
        # NVRTC would be refused if it were loaded.
        assert place.run(script, FAKE_NVRTC_VERSION="1.0", **more) == "False\n"
        assert place.compiled() == 0, build
    # Another combination needs NVRTC; earlier results are found as before.
    assert place.run(loads + "prepare('y = x + 1')\n" + IS_LOADED, **more) == "True\n"
    assert place.compiled() == 1
    assert place.run(script, **more) == "False\n"
    assert len(place.entries()) == 3


def test_an_overwritten_nvrtc_counts_as_another(place):
    """Changes only the file's time: its number and its size stay the same."""
    file = nvrtc_in(place.root / "nvrtc")
    for time in 10**18, 10**18 + 1, 10**18 + 10**9:
        os.utime(file, ns=(time, time))
        for compiled in 1, 0:
            place.run(GRADCODEC_NVRTC=file)
            assert place.compiled() == compiled, time


def test_the_key_has_the_nvrtc_that_compiled_the_kernel(place):
    old, good = place.root / "old", place.root / "good"
    nvrtc_in(good, "libnvrtc.so.11.2")
    old.mkdir()
    shutil.copyfile(pathlib.Path(DRIVERS) / "old_nvrtc" / "libnvrtc.so.12", old / "libnvrtc.so.12")
    for compiled in 1, 0:
        assert place.run("prepare()\n" + IS_LOADED, LD_LIBRARY_PATH=f"{old}:{good}") == "True\n"
        assert place.compiled() == compiled
    assert place.run("prepare()\n" + IS_LOADED, LD_LIBRARY_PATH=good) == "False\n"
    assert place.compiled() == 0


def test_a_loaded_or_given_nvrtc_determines_the_key(place):
    place.run()
    place.compiled()
    other = nvrtc_in(place.root / "other")
    handle = f"import ctypes; fake = ctypes.CDLL({str(other)!r})\n"
    for script in handle + "prepare()", handle + "prepare(nvrtc=fake._handle)":
        place.run(script)
    assert place.compiled() == 1
    place.run()
    assert place.compiled() == 0


def test_a_variable_and_a_flag_disable_the_cache(place):
    for how in dict(GRADCODEC_CACHE=0), dict(script="prepare(flags=NO_DISK)"):
        place.run(**how)
        assert place.compiled() == 1
        assert not place.folder.exists()


def test_a_kernel_that_includes_files_is_compiled_each_time(place):
    for more in 'preamble="#include <x>"', 'options=["-I/x"]', 'options=["--include-path=/x"]':
        for _ in range(2):
            place.run(f"prepare({more})")
            assert place.compiled() == 1
    assert not place.folder.exists() or not list(place.folder.iterdir())


@pytest.mark.parametrize("name, value", [("GRADCODEC_CACHE", "2"), ("GRADCODEC_CACHE_DIR", "here")])
def test_wrong_values_are_refused_by_name(place, name, value):
    process = place.start("prepare()", **{name: value})
    assert f"Refused: 1: {name} is {value}; " in process.communicate()[1]
    assert place.compiled() == 0


def test_the_directory_follows_the_environment(place):
    def found_in(folder, **environment):
        place.run(**environment)
        assert place.compiled() == 1
        assert len(place.entries(folder)) == 1, folder
        place.run(**environment)
        assert place.compiled() == 0

    own, xdg, home = place.root / "own", place.root / "xdg", place.root / "home"
    home.mkdir()
    base = dict(XDG_CACHE_HOME=xdg, HOME=home)
    found_in(own, GRADCODEC_CACHE_DIR=own, **base)
    found_in(xdg / "gradcodec", GRADCODEC_CACHE_DIR="", **base)
    found_in(home / ".cache" / "gradcodec", GRADCODEC_CACHE_DIR="", XDG_CACHE_HOME="relative", HOME=home)
    for _ in range(2):
        place.run(GRADCODEC_CACHE_DIR="", HOME="")
        assert place.compiled() == 1


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "link", "mode", "folder"])
def test_a_damaged_entry_is_compiled_again(place, damage):
    place.run()
    (name,) = place.entries()
    entry = place.folder / name
    whole = entry.read_bytes()
    if damage == "cut":
        entry.write_bytes(whole[:-1])
    elif damage == "changed":
        entry.write_bytes(whole.replace(b"machine code", b"malware code"))
    elif damage == "empty":
        entry.write_bytes(b"")
    elif damage == "link":
        entry.rename(place.root / "elsewhere")
        entry.symlink_to(place.root / "elsewhere")
    elif damage == "mode":
        entry.chmod(0o622)
    elif damage == "folder":
        entry.unlink()
        entry.mkdir()
    place.compiled()
    place.run()
    assert place.compiled() == 1
    place.run()
    assert place.compiled() == (1 if damage == "folder" else 0)
    if damage != "folder":
        assert entry.read_bytes() == whole and not entry.is_symlink()
        assert entry.stat().st_mode & 0o777 == 0o600
    assert place.entries() == [name]


def test_a_directory_that_others_may_write_to_is_not_used(place):
    place.folder.mkdir()
    place.folder.chmod(0o777)
    place.run()
    assert (place.compiled(), place.entries()) == (1, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_not_used(place):
    place.folder.mkdir(mode=0o700)
    os.chown(place.folder, 65534, 65534)
    place.run()
    assert (place.compiled(), place.entries()) == (1, [])


@pytest.mark.parametrize("folder", ["/proc/gradcodec", "/dev/null/cache"])
def test_a_directory_that_cannot_be_written_to(place, folder):
    for _ in range(2):
        place.run(GRADCODEC_CACHE_DIR=folder)
        assert place.compiled() == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a program that runs as root")
def test_a_set_user_id_program_has_no_cache(place, request):
    """Runs Python as a set-user-ID program of root's, started by another user."""
    public = pathlib.Path(tempfile.mkdtemp())  # pytest's own folder is for root alone
    request.addfinalizer(lambda: shutil.rmtree(public))
    public.chmod(0o755)
    program = public / "python"
    shutil.copy(os.path.realpath(sys.executable), program)
    program.chmod(0o4755)
    nvrtc = pathlib.Path(DRIVERS) / "fake_nvrtc" / "libnvrtc.so.12"
    show = "import ctypes; print(ctypes.CDLL(None).getauxval(23), prepare(nvrtc=ctypes.CDLL(%r)._handle))" % str(nvrtc)
    paths = os.pathsep.join([str(HERE), *sys.path[1:]])
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix, "PYTHONPATH": paths}
    environment |= {"GRADCODEC_CACHE_DIR": str(place.folder), "FAKE_NVRTC_LOG": str(place.record)}
    # Started by root itself, the same program keeps what it compiles.
    for user, secure, entries in (65534, 1, 0), (0, 0, 1):
        done = subprocess.run([program, "-c", SCRIPT + show], env=environment, user=user, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (f"{secure} \n", "")
        assert place.compiled() == 1
        assert len(place.entries() if place.folder.exists() else []) == entries


def test_a_file_size_limit_ends_no_process(place):
    """Exceeds the limit: the system sends SIGXFSZ, which Python ignores and other programs do not."""
    script = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
"""
    place.run(script + "prepare()", FAKE_NVRTC_LOG=None, PYTHONDONTWRITEBYTECODE=1)
    assert place.entries() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write to another user's home")
def test_no_file_is_created_in_another_users_home(place):
    home = place.root / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    for variables in dict(HOME=home), dict(XDG_CACHE_HOME=home), dict(XDG_CACHE_HOME=home / ".cache"):
        place.run(GRADCODEC_CACHE_DIR="", **variables)
        assert place.compiled() == 1
        assert list(home.iterdir()) == []
    # GRADCODEC_CACHE_DIR, which is for this library, is used even there.
    place.run(GRADCODEC_CACHE_DIR=home / "kernels")
    assert len(place.entries(home / "kernels")) == 1


def test_racing_processes_all_succeed_and_leave_one_entry(place):
    racing = [place.start("prepare(); print(codes())", FAKE_NVRTC_SLEEP=200) for _ in range(4)]
    results = [process.communicate() for process in racing]
    assert [error for _, error in results] == [""] * 4
    assert len({out for out, _ in results}) == 1
    assert 1 <= place.compiled() <= 4
    assert len(place.entries()) == 1
    place.run()
    assert place.compiled() == 0


def test_a_process_killed_at_any_moment_leaves_no_damaged_entry(place):
    """Kills a process again and again while it compiles and writes; then the entry is right, or there is none."""
    expected = place.run("prepare(); print(set(codes()))", GRADCODEC_CACHE_DIR=place.root / "whole")
    script = """
import glob, os
while True:
    for k in range(50):
        prepare(f"y = x + {k}")
    prepare()
    print("again", flush=True)
    for file in glob.glob(os.environ["GRADCODEC_CACHE_DIR"] + "/*"):
        os.unlink(file)
"""
    for _ in range(both(quick=3, all=8)):
        process = place.start(script)
        # The process is in its endless loop, and dies somewhere in it.
        assert process.stdout.readline() == "again\n", process.stderr.read()
        time.sleep(random.uniform(0, 0.1))
        process.kill()
        assert process.communicate()[1] == "" and process.returncode == -signal.SIGKILL
        assert place.run("prepare(); print(set(codes()))") == expected
