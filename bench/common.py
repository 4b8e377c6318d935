"""Shared by the benchmarks: libraries loaded by path, calls, machine descriptions, tables, ratios of two builds."""

import argparse
import ctypes
import datetime
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
from ctypes import c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from gradcodec import _declarations as c  # noqa: E402 the path comes first

CPU, CUDA = 1, 2
SLOW = 0.90  # rows below this ratio of new to old speed are listed

# DLPack's code and bits of each dtype, and its name in NumPy and CuPy, where bfloat16 is uint16.
DTYPES = {
    "bool": (6, 8, "bool"), "uint8": (1, 8, "uint8"), "int16": (0, 16, "int16"), "uint16": (1, 16, "uint16"),
    "int32": (0, 32, "int32"), "int64": (0, 64, "int64"), "float16": (2, 16, "float16"),
    "bfloat16": (4, 16, "uint16"), "float32": (2, 32, "float32"), "float64": (2, 64, "float64"),
    "complex128": (5, 128, "complex128"),
}  # fmt: skip


def described(array, dtype, device_type=CPU):
    """Returns a DLTensor over an array of NumPy or CuPy, which must outlive it."""
    data = array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr
    code, bits, _ = DTYPES[dtype]
    dims = c_int64 * max(1, array.ndim)
    shape, strides = dims(*array.shape), dims(*(stride // array.itemsize for stride in array.strides))
    tensor = c.DLTensor(data, c.DLDevice(device_type, 0), array.ndim, c.DLDataType(code, bits, 1), shape, strides, 0)
    tensor.array = array
    return tensor


class Call(ctypes.Structure):
    """The struct of the same name in bench/calls.c."""

    _fields_ = [("function", c_void_p), ("arguments", c_uint64 * 10)]


def address(value):
    """Returns an argument as 64 bits: an integer, a handle, or the address of a ctypes object."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value % 2**64
    if isinstance(value, ctypes._Pointer):
        return ctypes.cast(value, c_void_p).value or 0
    return ctypes.addressof(value)


class Library:
    """A build of the library. Two builds loaded by different paths can take turns in one process."""

    def __init__(self, path):
        self.path = os.path.abspath(path)
        self.functions = ctypes.CDLL(self.path)
        self.functions.gc_last_error.restype = self.functions.gc_version_string.restype = c_char_p

    def call(self, name, *arguments):
        """Returns a Call, which keeps the objects that its arguments point to."""
        call = Call(ctypes.cast(self.functions[name], c_void_p), (c_uint64 * 10)(*map(address, arguments)))
        call.kept = arguments
        return call

    def check(self, status):
        if status:
            raise RuntimeError(f"{self.path}: status {status}: {self.last_error()}")

    def last_error(self):
        return self.functions.gc_last_error().decode()

    def set_threads(self, threads):
        self.check(self.functions.gc_set_threads(ctypes.c_uint32(threads)))


def timer(folder=ROOT / "build/bench"):
    """Returns bench/calls.c as a library, compiled if it has changed."""
    path, source = folder / "calls.so", ROOT / "bench/calls.c"
    if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([os.environ.get("CC", "cc"), *flags, str(source), "-o", str(path)], check=True)
    functions = ctypes.CDLL(str(path))
    functions.run_calls.argtypes = functions.call_seconds.argtypes = [c_int64, c_void_p]
    functions.loop_seconds.argtypes = [c_int64, c_int32, c_void_p, c_void_p, c_int64]
    functions.call_seconds.restype = functions.loop_seconds.restype = c_double
    return functions


# --- the command line and the machine ---------------------------------------------------------------------------------


def parser(text, name, *flags):
    """Returns the options that programs share. `flags`: "against" and "only", if the program has them."""
    options = argparse.ArgumentParser(description=text.splitlines()[0])
    options.add_argument("--library", metavar="FILE", required=True, help="libgradcodec.so, to be timed")
    if "against" in flags:
        options.add_argument("--against", metavar="FILE", help="an older build: prints new/old speed of every row")
    if "only" in flags:
        options.add_argument("--only", metavar="PREFIX", default="", help="rows whose names begin so, such as `bits pack`")
    options.add_argument("--quick", action="store_true", help="less of it, in a fraction of the time")
    options.add_argument("--output", metavar="FILE", type=pathlib.Path, default=ROOT / "build/bench" / name)
    return options


def commit():
    """Returns the commit that is checked out, or that a tree of `make dist` was made of."""
    written = ROOT / "COMMIT"
    if written.exists():
        return written.read_text().strip() or None
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:
        return None


def processor():
    """Returns the fields of the first CPU in /proc/cpuinfo."""
    info = pathlib.Path("/proc/cpuinfo").read_text()
    return dict(re.findall(r"^(\S[^\t]*)\t*: (.*)$", info.split("\n\n")[0], re.MULTILINE))


def about(libraries=(), **more):
    return {
        "processor": processor().get("model name", platform.machine()),
        "cpus": len(os.sched_getaffinity(0)),
        "libraries": [library.functions.gc_version_string().decode() for library in libraries],
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        **more,
    }


def save(path, results):
    """Replaces the file as a whole, so that an interrupted run leaves the rows that were complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_device = path.exists() and not path.is_file()  # /dev/null must not be replaced
    written = path if is_device else path.with_name(path.name + ".tmp")
    written.write_text(json.dumps(results) + "\n")
    if not is_device:
        os.replace(written, path)


# --- tables -----------------------------------------------------------------------------------------------------------


def significant(seconds):
    return float(f"{seconds:.5g}")


def count(elements):
    """Returns a number of elements as text: 1K is 2^10, 1M is 2^20."""
    for unit, size in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if elements % size == 0:
            return f"{elements // size}{unit}"
    return f"{elements:,}"


def size(text):
    """Returns the number of elements of 64K, 300M or a plain number."""
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def number(value):
    return "-" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def markdown(header, rows, left=1):
    """Returns a table for a document, with `left` columns aligned to the left."""
    lines = [header, ["---" if i < left else "--:" for i in range(len(header))], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def medians(row):
    return {name: statistics.median(samples) for name, samples in row["seconds"].items() if samples}


def print_rows(rows):
    """Prints one table per group: GB/s and microseconds of each contender."""
    for group in dict.fromkeys(row["group"] for row in rows):
        of_group = [row for row in rows if row["group"] == group]
        names = list(dict.fromkeys(name for row in of_group for name in row["seconds"]))
        print(f"\n{group}: GB/s read and written, medians; us a call in brackets")
        lines = [
            [f"{row['kind']}, {row['case']}", *(f"{number(row['bytes'] / its[n] / 1e9)} ({number(its[n] * 1e6)})"
                                                if n in its else "-" for n in names)]
            for row, its in zip(of_group, map(medians, of_group))
        ]  # fmt: skip
        print(markdown(["", *names], lines))
        for row in of_group:
            for name, why in row.get("failures", {}).items():
                print(f"FAILED: {row['kind']}, {row['case']}, {name}: {why}")


def print_ratios(rows):
    """New/old speed of every row, the median of each group, and the rows below SLOW. Returns the number of these."""
    found = []
    for row in rows:
        times = medians(row)
        for name in [name for name in times if name.endswith(", old") and name[:-5] in times]:
            threads = name[3:-5]  # of "new x2, old"
            found.append((row["group"], f"{row['kind']}, {row['case']}{threads}", times[name] / times[name[:-5]]))
    print("\nnew/old speed, medians (above 1: the new build is faster)")
    print(markdown(["row", "new/old"], [[f"{group}: {name}", f"{ratio:.2f}"] for group, name, ratio in found]))
    print()
    groups = dict.fromkeys(group for group, *_ in found)
    of_groups = {group: [ratio for other, _, ratio in found if other == group] for group in groups}
    lines = [[group, len(of), f"{math.exp(statistics.fmean(map(math.log, of))):.3f}", f"{statistics.median(of):.3f}",
              f"{min(of):.2f}"] for group, of in of_groups.items()]  # fmt: skip
    print(markdown(["group", "rows", "geometric mean", "median", "least"], lines))
    slow = sorted((ratio, f"{group}: {name}") for group, name, ratio in found if ratio < SLOW)
    print(f"\n{len(slow)} of {len(found)} rows below {SLOW:.2f}")
    for ratio, name in slow:
        print(f"  {ratio:.2f}  {name}")
    return len(slow)
