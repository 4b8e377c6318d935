#!/usr/bin/env python3
"""Compiles kernels/*.cu to kernels/ptx/*.ptx with NVRTC; no GPU, driver or toolkit needed.

    build.py            writes the images, and assembles each for the cards it is meant for
    build.py --check    writes nothing: fails when an image is not what its source gives

Needs the packages of requirements.txt. The same sources give the same bytes on every machine.
"""

import argparse
import ctypes
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"

# The images: source, level of the PTX, and the cards that it must assemble for.
IMAGES = [
    ("bits", 75, [75, 80, 86, 89]),
    ("bits", 90, [90]),
]

# No contraction of a * b + c: the CPU and every card give the same bits.
OPTIONS = ["--std=c++14", "--fmad=false", "-default-device"]


NVRTC, PTXAS = "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvcc-cu12"


def package_files(package, pattern):
    """The files of an installed package with such a name."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [str(file.locate()) for file in files if re.fullmatch(pattern, file.name)]
    return found or sys.exit(f"{package} is not installed here: pip install -r kernels/requirements.txt")


class Nvrtc:
    def __init__(self):
        # NVRTC looks for its companion by name, and finds it when it is loaded already.
        ctypes.CDLL(package_files(NVRTC, r"libnvrtc-builtins\.so.*")[0], mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(package_files(NVRTC, r"libnvrtc\.so.*")[0])
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        result = getattr(self.lib, name)(*arguments)
        return None if result == 0 else self.lib.nvrtcGetErrorString(result).decode()

    def text(self, program, what):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.value.decode()

    def ptx(self, source, level):
        program = ctypes.c_void_p()
        # The headers go in as text and under bare names, so that no path of this machine gets into the PTX.
        headers = sorted((ROOT / "include").glob("gradcodec/*.cuh"))
        names = (ctypes.c_char_p * len(headers))(*(f"gradcodec/{header.name}".encode() for header in headers))
        texts = (ctypes.c_char_p * len(headers))(*(header.read_bytes() for header in headers))
        self.call("nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts,
                  names)
        options = [option.encode() for option in [*OPTIONS, f"--gpu-architecture=compute_{level}"]]
        failure = self.call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = self.text(program, "ProgramLog").strip()
        if failure or log:
            sys.exit(f"{source.name} for compute_{level}: {failure or 'the compiler warns'}\n{log}")
        return self.text(program, "PTX")


def assemble(ptx, card):
    """Has ptxas make machine code of it; prints each kernel's registers. Spilled registers are an error."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [package_files(PTXAS, "ptxas")[0], "-v", f"-arch=sm_{card}", "-o", "/dev/null", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"ptxas for sm_{card}:\n{done.stdout}{done.stderr}")
    kernels = re.findall(r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill "
                         r"loads.*?Used (\d+) registers", done.stderr, re.DOTALL)
    if len(kernels) != ptx.count(".entry "):
        sys.exit(f"ptxas for sm_{card} reports on {len(kernels)} of {ptx.count('.entry ')} kernels:\n{done.stderr}")
    print(f"  sm_{card}: registers", ", ".join(f"{name.removeprefix('gc_')} {used}" for name, *_, used in kernels))
    spilled = [f"{name}: {frame} bytes of stack, {stores} + {loads} spilled" for name, frame, stores, loads, _ in kernels
               if (frame, stores, loads) != ("0", "0", "0")]
    if spilled:
        sys.exit(f"for sm_{card} registers do not suffice:\n  " + "\n  ".join(spilled))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with what is checked in, write nothing")
    check = parser.parse_args().check
    nvrtc = Nvrtc()
    stale = []
    for name, level, cards in IMAGES:
        ptx = nvrtc.ptx(KERNELS / f"{name}.cu", level)
        path = KERNELS / "ptx" / f"{name}_sm{level}.ptx"
        print(f"{path.relative_to(ROOT)}: {len(ptx)} bytes, {ptx.count('.entry ')} kernels")
        for card in cards:
            assemble(ptx, card)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(ptx)
        elif not path.exists() or path.read_text() != ptx:
            stale.append(str(path.relative_to(ROOT)))
    known = {f"{name}_sm{level}.ptx" for name, level, _ in IMAGES}
    stale += [f"kernels/ptx/{path.name} (of no source)" for path in (KERNELS / "ptx").iterdir() if path.name not in known]
    if stale:
        sys.exit(f"not current: {', '.join(stale)}; run `make kernels` and commit what it writes")


main()
