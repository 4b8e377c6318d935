"""Builds a tvm-ffi module for NumPy, PyTorch and JAX: each packs and unpacks signs, JAX inside jit.

    python3 examples/python/tvm_ops.py

Builds tvm_ops.cpp with g++ and the headers of apache-tvm-ffi. Needs that package, NumPy, and the library: built in this
tree, or named by GRADCODEC_LIBRARY. Shows PyTorch, JAX and jax-tvm-ffi if they are installed.
"""

import importlib.util
import subprocess

import numpy as np

try:
    import tvm_ffi
    from tvm_ffi import libinfo
except ImportError:
    print("SKIPPED: no tvm-ffi here")
    raise SystemExit
from this_tree import ROOT, library

N, CHUNKS = 1000, 4


def load():
    """Builds and loads the module."""
    made = ROOT / "build" / f"gradcodec-tvm-{tvm_ffi.__version__}" / "tvm_ops.so"
    made.parent.mkdir(parents=True, exist_ok=True)
    print(f"building {made.relative_to(ROOT)}", flush=True)
    includes = [f"-isystem{libinfo.find_include_path()}", f"-isystem{libinfo.find_dlpack_include_path()}"]
    subprocess.run(
        ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", f"-I{ROOT / 'include'}", *includes,
         str(ROOT / "examples_cpp" / "tvm_ops.cpp"), "-o", str(made), str(library()), libinfo.find_libtvm_ffi(),
         f"-Wl,-rpath,{library().parent}"], check=True,
    )  # fmt: skip
    return tvm_ffi.load_module(str(made))


def hold(what, holds):
    print(f"{'' if holds else 'WRONG: not true that '}{what}")
    if not holds:
        raise SystemExit(1)


def show_numpy(module, gradient, expected):
    chunks, back = np.empty_like(expected), np.empty_like(gradient)
    module.pack_signs(gradient, chunks)
    module.unpack_signs(chunks, back)
    hold("NumPy: signs there and back", (chunks == expected).all() and (back == np.sign(gradient)).all())
    try:
        module.pack_chunks(gradient, chunks)
        hold("NumPy: floats are refused as truth", False)
    except ValueError as error:
        hold(f"NumPy: refused: {error}", "gc_pack_signs" in str(error))


def show_torch(module, gradient, expected):
    import torch

    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        source = torch.from_numpy(gradient).to(device)
        chunks = torch.empty(expected.shape, dtype=torch.uint8, device=device)
        back = torch.empty_like(source)
        module.pack_signs(source, chunks)
        module.unpack_signs(chunks, back)
        same = (chunks.cpu().numpy() == expected).all() and torch.equal(back, source.sign())
        hold(f"PyTorch on {device}: signs there and back", bool(same))


def show_jax(module, gradient, expected):
    import jax
    import jax_tvm_ffi

    platforms = {"cpu": "cpu"} | ({"cuda": "gpu"} if jax.default_backend() == "gpu" else {})
    for device, platform in platforms.items():
        for name in "pack_signs", "unpack_signs":
            jax_tvm_ffi.register_ffi_target(f"tvm_{name}", module[name], ["args", "rets"], platform)

        @jax.jit
        def there_and_back(x):
            chunks = jax.ffi.ffi_call("tvm_pack_signs", jax.ShapeDtypeStruct(expected.shape, np.uint8))(x)
            return chunks, jax.ffi.ffi_call("tvm_unpack_signs", jax.ShapeDtypeStruct(x.shape, x.dtype))(chunks)

        chunks, back = map(np.asarray, there_and_back(jax.device_put(gradient, jax.devices(device)[0])))
        same = (chunks == expected).all() and (back == np.sign(gradient)).all()
        hold(f"JAX on {device}, inside of jit: signs there and back", same)


def main():
    module = load()
    gradient = np.random.default_rng(1).standard_normal(N, np.float32)
    expected = np.pad(np.packbits(gradient >= 0), (0, 3)).reshape(CHUNKS, 32)  # 125 bytes in 4 chunks of 32
    show_numpy(module, gradient, expected)
    for show, packages in ((show_torch, ["torch"]), (show_jax, ["jax", "jax_tvm_ffi"])):
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if missing:
            print(f"SKIPPED: no {' and no '.join(missing)} here")
        else:
            show(module, gradient, expected)


if __name__ == "__main__":
    main()
