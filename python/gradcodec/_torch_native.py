"""The hook of DistributedDataParallel in C++, hook.cpp: compiled for this PyTorch and this Python, once, and kept in
GradCodec's cache folder.

A file there is used if its last 32 bytes are the SHA-256 of all others. It is written under another name and renamed,
so it is complete or absent. One of several processes compiles while the others wait.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.machinery import ExtensionFileLoader
from typing import Any, Iterator

import torch

from ._abi import NAME
from ._errors import _cut
from ._torch_groups import library

TESTED = "2.11", "2.15"  # releases of PyTorch
SOURCE = pathlib.Path(__file__).with_name("hook.cpp")
MODULE = "_gradcodec_hook"  # the name that hook.cpp gives itself
PATIENCE = 120.0  # seconds to wait for another process that compiles
LONGEST = 600.0  # seconds that a compiler may take
_DIGEST = 32

_found: list[Any] = []  # the module, or why there is none


class Unavailable(Exception):
    """The reason why the hook in C++ cannot be used here, a sentence without its full stop."""


def load() -> Any:
    """Returns the module, compiled first if necessary. A process keeps the result."""
    if not _found:
        try:
            _found.append(_imported(built()))
        except Unavailable as reason:
            _found.append(reason)
    if isinstance(_found[0], Unavailable):
        raise _found[0]
    return _found[0]


def built() -> pathlib.Path:
    """Returns the compiled file, compiled now if there is no complete one."""
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in TESTED:
        raise Unavailable(f"PyTorch {torch.__version__} is not one that it was tested with: {', '.join(TESTED)}")
    folder = _folder()
    path = folder / f"torch-{_key()}.so"
    if _is_whole(path):
        return path
    with _alone(path.with_suffix(".lock")):
        if not _is_whole(path):  # another process may have compiled it meanwhile
            _compile(path)
    return path


def _imported(path: pathlib.Path) -> Any:
    loader = ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as failure:
        raise Unavailable(f"{path} cannot be loaded: {_cut(str(failure), 250)}") from None
    return module


def _key() -> str:
    """Returns a digest of all that a compiled file depends on."""
    about = str(library().lib.gc_build_info(), "utf-8", "replace").splitlines()[:2]  # its version, commit and compiler
    parts = torch.__version__, sys.implementation.cache_tag, sys.abiflags, platform.machine(), NAME, *about
    return hashlib.sha256("\0".join(map(str, parts)).encode() + SOURCE.read_bytes()).hexdigest()


def _folder() -> pathlib.Path:
    """Returns the cache folder, as the library finds it (docs/ENVIRONMENT.md). Creates it if it is missing."""
    cache, own = os.environ.get("GRADCODEC_CACHE"), os.environ.get("GRADCODEC_CACHE_DIR")
    if cache == "0":
        raise Unavailable("GRADCODEC_CACHE=0 turns the cache off in which it is kept")
    if cache not in (None, "", "1"):
        raise Unavailable(f"GRADCODEC_CACHE is {cache}; 0 or 1 expected")
    if own and not own.startswith("/"):
        raise Unavailable(f"GRADCODEC_CACHE_DIR is {own}; an absolute path expected")
    for name, rest in ("GRADCODEC_CACHE_DIR", ""), ("XDG_CACHE_HOME", "gradcodec"), ("HOME", ".cache/gradcodec"):
        named = os.environ.get(name, "")
        if named.startswith("/"):
            folder = pathlib.Path(named, rest)
            break
    else:
        raise Unavailable("no cache folder: none of GRADCODEC_CACHE_DIR, XDG_CACHE_HOME and HOME is an absolute path")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
    except OSError as failure:
        raise Unavailable(f"the cache folder {folder} cannot be used: {failure.strerror}") from None
    return folder


def _check_owner(path: pathlib.Path) -> None:
    """Refuses a path that another user may have written: it would run with the rights of this one."""
    about = path.stat()
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & 0o022:
        raise Unavailable(f"{path} belongs to another user, or others may write to it")


def _is_whole(path: pathlib.Path) -> bool:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return False
    except OSError as failure:
        raise Unavailable(f"{path} cannot be read: {failure.strerror}") from None
    _check_owner(path)
    return hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
    """Excludes other processes, after a wait of at most PATIENCE. The lock ends with the process that has it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as failure:
        raise Unavailable(f"the cache folder {path.parent} cannot be written to: {failure.strerror}") from None
    try:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(file)


def compiler() -> list[str]:
    """Returns the command of a C++ compiler: CXX, or the first that exists."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise Unavailable(f"there is no C++ compiler: {named[0] if named else 'c++, g++ or clang++'} was not found")


def _compile(path: pathlib.Path) -> None:
    command, installed = compiler(), pathlib.Path(torch.__path__[0])
    headers, python = installed / "include", pathlib.Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").exists():
        raise Unavailable(f"Python's headers are not installed (python3-dev or python3-devel): no {python}/Python.h")
    if not (headers / "torch/csrc/distributed/c10d/reducer.hpp").exists():
        raise Unavailable(f"PyTorch's headers are not installed: no {headers}/torch/csrc/distributed/c10d/reducer.hpp")
    new_abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={new_abi}"]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # ABI tags, which must match in older PyTorch
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        if value:
            flags.append(f'-DPYBIND11_{name}="{value}"')
    includes = [f"-I{folder}" for folder in (headers, headers / "torch/csrc/api/include", python)]
    # The file keeps no path of libraries: their names resolve to those that the process has loaded.
    libraries = [f"-L{installed / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        _tidy(path.parent)
        _run([*command, *flags, *includes, str(SOURCE), "-o", str(part), *libraries])
        data = part.read_bytes()
        part.write_bytes(data + hashlib.sha256(data).digest())
        part.chmod(0o600)
        os.replace(part, path)
    except OSError as failure:
        raise Unavailable(f"the cache folder {path.parent} cannot be written to: {failure.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _tidy(folder: pathlib.Path) -> None:
    """Deletes files that killed compilers have left."""
    for part in folder.glob("torch-*.part"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > 2 * LONGEST:
                part.unlink()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} did not end within {LONGEST:.0f} s") from None
    except OSError as failure:
        raise Unavailable(f"{command[0]} cannot be run: {failure.strerror}") from None
    if done.returncode != 0:
        raise Unavailable(f"{command[0]} failed: {_first_error(done.stderr)}")


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _cut(next((line for line in lines if "error" in line), lines[0] if lines else "no message"), 250)


def main(arguments: list[str]) -> int:
    """python -m gradcodec.torch build"""
    if arguments != ["build"]:
        print("usage: python -m gradcodec.torch build\n\nCompiles the hook of compress() ahead of time.", file=sys.stderr)
        return 2
    began = time.monotonic()
    try:
        path = built()
        _imported(path)
    except Unavailable as reason:
        print(f"gradcodec: the hook in C++ is not available: {reason}", file=sys.stderr)
        return 1
    print(f"{path}: ready in {time.monotonic() - began:.0f} s")
    return 0
