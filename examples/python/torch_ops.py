"""torch.ops.gradcodec: packing as torch operators, on the CPU and on CUDA, eager and compiled.

    python3 examples/python/torch_ops.py

Builds torch_ops.cpp with torch's builder (gcc and ninja; no CUDA toolkit), unless GRADCODEC_TORCH_OPS names the library
that CMakeLists.txt built. Needs torch 2.11, NumPy, and the library: built in this tree, or named by GRADCODEC_LIBRARY.
"""

import os
import pathlib
import sys

import numpy as np
import torch
from this_tree import ROOT, library


def build(*sources, name, flags=()):
    """Builds and loads an extension that uses gradcodec/torch.hpp, with operators only; returns its path."""
    from torch.utils import cpp_extension

    # torch searches ninja on the PATH, which lacks the folder of a virtual environment that is not activated.
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    folder = ROOT / "build" / f"{name}-torch-{torch.__version__}"  # an extension fits one version of torch only
    folder.mkdir(parents=True, exist_ok=True)
    return cpp_extension.load(
        name=name, sources=[str(source) for source in sources], build_directory=str(folder), is_python_module=False,
        extra_include_paths=[str(ROOT / "include")], extra_cflags=["-O2", "-Wall", "-Wextra", *flags],
        extra_ldflags=[f"-L{library().parent}", "-lgradcodec", f"-Wl,-rpath,{library().parent}"],
    )  # fmt: skip


def load():
    """Returns torch.ops.gradcodec, with pack_truth, pack_signs and unpack."""
    if not hasattr(torch.ops.gradcodec, "unpack"):
        if os.environ.get("GRADCODEC_TORCH_OPS"):
            torch.ops.load_library(os.environ["GRADCODEC_TORCH_OPS"])
        else:
            build(ROOT / "examples_cpp" / "torch_ops.cpp", name="gradcodec_torch_ops")
    return torch.ops.gradcodec


def expected_chunks(bits, n_chunks):
    """Packs a NumPy array of bool to [n_chunks, bytes of a chunk]: numpy.packbits, padded with zeros."""
    packed = np.packbits(bits.reshape(-1))
    size = -(-len(packed) // n_chunks)
    return np.pad(packed, (0, n_chunks * size - len(packed))).reshape(n_chunks, size)


def hold(what, holds):
    print(f"{'' if holds else 'WRONG: not true that '}{what}")
    if not holds:
        sys.exit(1)


def signs_there_and_back(x):
    chunks = torch.ops.gradcodec.pack_signs(x * 2 - 1, 3)
    return chunks, torch.ops.gradcodec.unpack(chunks, x.shape, torch.float32) * 2 - 1


def main():
    ops = load()
    generator = torch.Generator().manual_seed(1)
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    for device in devices:
        x = torch.randn(37, 27, generator=generator).to(device)
        values = x.cpu().numpy()

        chunks = ops.pack_signs(x, 4)  # 999 bits are 125 bytes: 32 in each of four chunks
        hold(f"{device}: signs are packed as by NumPy", (chunks.cpu().numpy() == expected_chunks(values >= 0, 4)).all())
        chunks = ops.pack_truth(x.t() > 1)  # any strides
        hold(f"{device}: truth is, too", (chunks.cpu().numpy() == expected_chunks(values.T > 1, 1)).all())
        back = ops.unpack(chunks, [27, 37], torch.bool)
        hold(f"{device}: unpacked it is what it was", back.device.type == device and torch.equal(back, x.t() > 1))

        signs, doubled = signs_there_and_back(x)
        hold(f"{device}: -1 and +1 come back", (doubled.cpu().numpy() == np.where(values * 2 - 1 < 0, -1, 1)).all())
        for backend in ("eager", "aot_eager"):
            compiled = torch.compile(signs_there_and_back, backend=backend, fullgraph=True, dynamic=True)
            same = all(map(torch.equal, compiled(x), (signs, doubled)))
            hold(f"{device}: compiled by {backend} the same", same)
        try:
            ops.pack_truth(x)
            hold(f"{device}: floats are refused as booleans", False)
        except RuntimeError as error:
            hold(f"{device}: floats are refused as booleans: {error}", "pack_signs" in str(error))

    if "cuda" not in devices:
        print("SKIPPED: streams and graphs, for want of a CUDA device")
        return

    # On a side stream, the operator waits for work enqueued there, as torch's operators do.
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        x.fill_(-1)
        chunks = ops.pack_signs(x)
    torch.cuda.synchronize()
    hold("on a side stream it packs what that stream has written", not chunks.any().item())

    # In a graph. Earlier calls have prepared everything.
    x = torch.zeros(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunks = ops.pack_signs(x)
    x.copy_(torch.randn(1 << 20, generator=generator))
    graph.replay()
    torch.cuda.synchronize()
    expected = expected_chunks(x.cpu().numpy() >= 0, 1)
    hold("a graph packs what is there when it runs", (chunks.cpu().numpy() == expected).all())


if __name__ == "__main__":
    main()
