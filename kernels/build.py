#!/usr/bin/env python3
"""Compiles kernels/*.cu to kernels/fatbin/*.fatbin: machine code and PTX in one file; no GPU, driver or toolkit needed.

    build.py            writes the fatbins
    build.py peers      writes the fatbins of these modules
    build.py --check    writes nothing; fails if a fatbin was not made from the instructions of its source

Needs the packages of requirements.txt. The same sources give the same instructions, but not always in the same order:
NVRTC 12.0 puts the load of a constant in blocks_peers.cu in one of two places, depending on addresses in the process.
So the check compares digests of the sorted lines of PTX, which kernels/fatbins.txt has beside the digests of the
fatbins.
"""

import argparse
import ctypes
import hashlib
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"

# Modules. Each has one source and one fatbin.
MODULES = ["bits", "signs", "onebit", "blocks", "blocks_peers", "copy", "peers"]

# Levels of the PTX, and the compute capabilities with machine code from it. Levels 8.0 to 8.9 give the PTX of 7.5,
# except in modules of OWN_LEVELS; 8.6 and 8.9 run the machine code of 8.0. All other GPUs compile the PTX of the lowest
# level, which is in the fatbin.
LEVELS = {75: [75, 80], 90: [90, 100, 120]}
# Codec kernels copy to shared memory with an instruction of 8.0. Kernels that write to other GPUs' memory have machine
# code only for GPUs with links between them.
FROM_8_0 = {75: [75], 80: [80], 90: [90, 100, 120]}
OWN_LEVELS = {"blocks": FROM_8_0, "onebit": FROM_8_0, "blocks_peers": {75: [], 80: [80], 90: [90, 100]}}

OPTIONS = [
    "--std=c++14",
    # Forbids contraction of a * b + c, so that the CPU and every GPU give the same bits.
    "--fmad=false",
    # Leaves out a built-in header that NVRTC includes by default; the header adds 38 variables to every program.
    "-D__NV_TARGET_H",
]

# Most bytes of shared memory of a thread block. A multiprocessor of 7.5 has 64 KiB, and two thread blocks hide latency.
SHARED = 32 << 10

# The list lacks "-compress-mode=size", whose output only drivers from 550 on read.
FATBIN_OPTIONS = ["-64", "-cuda", "-compress-all"]

NVRTC, PTXAS, NVFATBIN = "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvcc-cu12", "nvidia-nvfatbin-cu12"
NVDISASM = "nvidia-cuda-nvdisasm"


def package_file(package, pattern):
    """Returns the path of an installed package's file whose name matches the pattern."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [str(file.locate()) for file in files if re.fullmatch(pattern, file.name)]
    return found[0] if found else sys.exit(f"{package} is not installed here: pip install -r kernels/requirements.txt")


def texts(strings):
    return (ctypes.c_char_p * len(strings))(*(string.encode() for string in strings))


class Nvrtc:
    def __init__(self):
        # NVRTC looks for this library by name, and finds it if it is already loaded.
        ctypes.CDLL(package_file(NVRTC, r"libnvrtc-builtins\.so.*"), mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(package_file(NVRTC, r"libnvrtc\.so.*"))
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
        # Headers are passed as text, under bare names, so that no path of this machine gets into the PTX.
        headers = {f"gradcodec/{header.name}": header for header in sorted((ROOT / "include").glob("gradcodec/*.cuh"))}
        headers |= {header.name: header for header in sorted(KERNELS.glob("*.cuh"))}
        contents, names = texts([header.read_text() for header in headers.values()]), texts(headers)
        self.call("nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers),
                  contents, names)
        options = [*OPTIONS, f"--gpu-architecture=compute_{level}"]
        failure = self.call("nvrtcCompileProgram", program, len(options), texts(options))
        log = self.text(program, "ProgramLog").strip()
        if failure or log:
            sys.exit(f"{source.name} for compute_{level}: {failure or 'the compiler warns'}\n{log}")
        ptx = self.text(program, "PTX")
        # Such a variable was meant as a constant, and would take memory in every context.
        if variables := re.findall(r"^(?:\.\w+ )*\.(?:global|const)\b.*", ptx, re.M):
            sys.exit(f"{source.name} for compute_{level} has variables:\n  " + "\n  ".join(variables))
        return ptx


def check_instructions(cubin, capability):
    """Fails on a bug of ptxas 12.9: it gathers predicates in a byte of a register other than the lowest, which no code
    reads. On an H200 that lost two bits of eight 16-bit elements; the same PTX, compiled by the driver, was right. A
    value that passes through an empty asm() is not affected (in_register() in device.cuh)."""
    done = subprocess.run([package_file(NVDISASM, "nvdisasm"), "-c", str(cubin)], capture_output=True, text=True)
    if done.returncode != 0 or "EXIT" not in done.stdout:
        sys.exit(f"nvdisasm for sm_{capability}:\n{done.stdout}{done.stderr}")
    wrong = re.findall(r"P2R\.B[123]", done.stdout)
    if wrong:
        sys.exit(f"for sm_{capability} ptxas gathers predicates in a higher byte, {len(wrong)} times: see check_instructions()")


def assemble(ptx, capability):
    """Returns the machine code of ptxas for PTX. Prints each kernel's registers; spilled registers are an error."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = pathlib.Path(folder, "kernels.ptx"), pathlib.Path(folder, "kernels.cubin")
        source.write_text(ptx)
        command = [package_file(PTXAS, "ptxas"), "-v", f"-arch=sm_{capability}", "-o", cubin.name, source.name]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode != 0:
            sys.exit(f"ptxas for sm_{capability}:\n{done.stdout}{done.stderr}")
        code = cubin.read_bytes()
        check_instructions(cubin, capability)
    kernels = re.findall(r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill "
                         r"loads.*?Used (\d+) registers", done.stderr, re.DOTALL)
    if len(kernels) != ptx.count(".entry "):
        sys.exit(f"ptxas for sm_{capability} reports on {len(kernels)} of {ptx.count('.entry ')} kernels:\n{done.stderr}")
    print(f"  sm_{capability}: registers", ", ".join(f"{name.removeprefix('gc_')} {used}" for name, *_, used in kernels))
    spilled = [f"{name}: {frame} bytes of stack, {stores} + {loads} spilled" for name, frame, stores, loads, _ in kernels
               if (frame, stores, loads) != ("0", "0", "0")]
    if spilled:
        sys.exit(f"for sm_{capability} registers do not suffice:\n  " + "\n  ".join(spilled))
    shared = max(map(int, re.findall(r"(\d+) bytes smem", done.stderr)), default=0)
    if shared > SHARED:
        sys.exit(f"for sm_{capability} a thread block takes {shared} bytes of shared memory; at most {SHARED} expected")
    return code


class Fatbin:
    """File from which a driver chooses: machine code for some GPUs, PTX for all others."""

    def __init__(self):
        self.lib = ctypes.CDLL(package_file(NVFATBIN, r"libnvfatbin\.so.*"))
        self.lib.nvFatbinGetErrorString.restype = ctypes.c_char_p
        self.handle = ctypes.c_void_p()
        self.call("Create", ctypes.byref(self.handle), texts(FATBIN_OPTIONS), ctypes.c_size_t(len(FATBIN_OPTIONS)))

    def call(self, name, *arguments):
        result = getattr(self.lib, f"nvFatbin{name}")(*arguments)
        if result != 0:
            sys.exit(f"nvFatbin{name}: {self.lib.nvFatbinGetErrorString(result).decode()}")

    def add_cubin(self, code, capability, name):
        self.call("AddCubin", self.handle, code, ctypes.c_size_t(len(code)), str(capability).encode(), name.encode())

    def add_ptx(self, ptx, level, name):
        code = ptx.encode() + b"\0"  # the size includes the NUL
        self.call("AddPTX", self.handle, code, ctypes.c_size_t(len(code)), str(level).encode(), name.encode(), b"")

    def take(self):
        size = ctypes.c_size_t()
        self.call("Size", self.handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call("Get", self.handle, buffer)
        self.call("Destroy", ctypes.byref(self.handle))
        return buffer.raw


def digests(path, ptx_of):
    """Returns the lines of kernels/fatbins.txt for a fatbin and its PTX. The line of a level lists the compute
    capabilities whose machine code was made from it."""
    made = {path.name: path.read_bytes()}
    for level, capabilities in OWN_LEVELS.get(path.stem, LEVELS).items():
        made[" ".join(map(str, [f"{path.stem}.{level}.ptx", *capabilities]))] = "\n".join(sorted(ptx_of[level].splitlines())).encode()
    return {f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in made.items()}


def sources(nvrtc, module):
    """Returns the PTX of a module by level."""
    found = {level: nvrtc.ptx(KERNELS / f"{module}.cu", level) for level in OWN_LEVELS.get(module, LEVELS)}
    for level, ptx in found.items():
        print(f"{module}.cu for compute_{level}: {ptx.count('.entry ')} kernels, {len(ptx)} bytes of PTX")
    return found


def fatbin(module, ptx_of):
    built = Fatbin()
    for level, ptx in ptx_of.items():
        for capability in OWN_LEVELS.get(module, LEVELS)[level]:
            built.add_cubin(assemble(ptx, capability), capability, module)
        if level == min(LEVELS):
            built.add_ptx(ptx, level, module)
    return built.take()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with what is checked in, write nothing")
    parser.add_argument("modules", nargs="*", metavar="module", help=f"of {', '.join(MODULES)}; all if none is given")
    given = parser.parse_args()
    nvrtc, folder, list_of_all = Nvrtc(), KERNELS / "fatbin", KERNELS / "fatbins.txt"
    listed = {*list_of_all.read_text().splitlines()}
    stale = [path.name for path in folder.glob("*") if path.stem not in MODULES]
    for module in given.modules or MODULES:
        path, ptx_of = folder / f"{module}.fatbin", sources(nvrtc, module)
        if not given.check:
            path.write_bytes(fatbin(module, ptx_of))
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
            listed -= {line for line in listed if line.split()[1].split(".")[0] == module}
            listed |= digests(path, ptx_of)
        elif not path.exists() or not digests(path, ptx_of) <= listed:
            stale.append(path.name)
    if not given.check:
        list_of_all.write_text("\n".join(sorted(listed, key=lambda line: line.split()[1])) + "\n")
    elif stale:
        sys.exit(f"not current in kernels/fatbin: {', '.join(stale)}; run `make kernels` and commit what it writes")


main()
