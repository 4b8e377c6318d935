"""Runs every Python example as a program: it succeeds, prints the expected text only, and names a skipped CUDA part."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from peers import ROOT, has_cuda
from tiers import both

EXAMPLES = ROOT / "examples" / "python"


def has(module):
    return importlib.util.find_spec(module) is not None


def gpus_of_torch():
    import torch

    return torch.cuda.device_count()


# Texts that must be printed: always; and the framework of the CUDA part with the texts of that part.
SAYS = {
    "arrays.py": (["numpy: asarray of a transposed array: 16 MiB moved, ", "-inf, nan] are [1, -1, 2147483647, -2147483648, 0]"],
                  ("cupy", ["cupy: asarray: 8 MiB moved, ", "cupy: asnumpy: 8 MiB moved, "])),
    "block_codecs.py": (["w1: off by 0.003", "b1: off by 0.00000", "944 of payload", "int8 0.0"], None),
    "cffi_bits.py": (["1000 bytes of bool in 128", "as it was: True", "refused: dst: 4 chunks of 32 bytes"], None),
    "codec_numpy.py": (["NumPy and the library read the same", "refused: "], None),
    "ddp_hook.py": (["gloo: within 5 %: True", "gloo, int4: one Inf, one step left out, loss as before: True"],
                    ("torch", ["nccl: within 5 %: True"])),
    "deepspeed.py": (["all ranks have the same weights: True", "it ends with the same bytes: True",
                      "leaves the errors of all as they were: True"], None),
    "diloco.py": (["gradients of every step in float32: loss 0.1", "4 bits per weight every 20 steps: loss 0.1",
                   "1/138 of the bytes", "a loss of at most 1.1 times that: True"], None),
    "elastic.py": (["a process lost in step 26: 4 ranks, loss ", "gloo: the same losses as without: True",
                    "2 nodes of 2 ranks: sums within a node", "a node lost in step 26: 2 ranks, loss ",
                    "within 5 % of the loss without: True"],
                   ("torch", ["nccl: the same losses as without: True", "peers: the same losses as without: True"])),
    "fsdp_hook.py": (["gloo: within 5 %: True"], ("torch", ["nccl: within 5 %: True"])),
    "numpy_ctypes.py": (["4 chunks of 32 bytes", "as they were: True", "(40, 25) to (40, 4)", "unpacked: True",
                         "refused, status 1: axis: 2"], None),
    "numpy_ctypes_legacy.py": (["5 chunks of 25 bytes, writable: False", "from a read-only array: True",
                                "NumPy refused: ", "refused, status 5: dst: read-only"], None),
    "peers.py": ([], ("torch", ["of_the_library: ", "of_symmetric_memory: ", "of_shares: ", "as before: True"])),
    "share.py": (["numpy there: 1000000 elements, their sum 1000000", "numpy here: their sum is now 1000000"],
                 ("cupy", ["cupy there: 1000000 elements, their sum 1000000", "torch here: their sum is now 2000000"])),
    "torch_bits.py": (["cpu: chunks of torch.uint8, not copied: True", "cpu: refused: "],
                      ("torch", ["cuda:0: chunks of torch.uint8, not copied: True"])),
    "torch_feedback.py": (["cpu: one bit: loss ", "960 bytes of payload", "cpu: one bit trains as well: True"],
                          ("torch", ["cuda: one bit: loss ", "cuda: one bit trains as well: True"])),
    "torch_streams.py": (["cpu: no stream; 0 of 1000003 signs wrong"],
                         ("torch", ["inside_streams: 0 signs wrong", "beside_the_current_stream: 0 signs wrong",
                                    "in_a_graph: 0 signs wrong"])),
    "cuda_graph.py": ([], ("torch", ["ranks, int4: loss 0.", "in a graph: loss 0."])),
    "cupy_bits.py": (["numpy: int64 by its address, packed to 125 bytes"],
                     ("cupy", ["cupy: int64 by its address, packed to 125 bytes", "on a stream: True"])),
    "compiled_kernels.py": ([], ("cupy", ["three steps of Adam in place: True", "softmax over axis 1 of (17, 1000): True"])),
    "cupy_kernels.py": (["bytes of kernels for all GPUs", "gc_unpack_u8 on 9.0: blocks of "],
                        ("cupy", ["epilogue: True; applied in a prologue: True", "feedback is a codec's: True",
                                  "launched by name: True"])),
    "jax_codec.py": (["cpu, 4 ranks: float32: loss 0.0", "cpu, 4 ranks: int8: loss 0.0", "cpu, 4 ranks: int4: loss 0.0"],
                     ("jax", [": int4: loss 0.0", "within 5 %: True"])),
    "jax_bits.py": (["4 chunks of 256 bytes, not copied: True", "cpu: unpacked, as they were: True"],
                    ("jax", ["gpu: unpacked, as they were: True"])),
}  # fmt: skip

# Programs that compile a source of examples_cpp; tests/frameworks/native and tests/packaging/cmake.sh run them.
COMPILING = {"ddp.py", "relu_mask.py", "this_tree.py", "torch_ops.py", "tvm_ops.py"}
BY_MPI = {"mpi_allreduce.py"}  # tests/frameworks/native/mpi.sh runs it
SLOW = {"elastic.py"}  # starts 4 processes again and again, and takes a tenth of the time of all tests of this folder

GPUS = {"cuda_graph.py": 2, "ddp_hook.py": 2, "elastic.py": 2, "fsdp_hook.py": 2}  # GPUs, if several are needed


def test_every_example_is_tested():
    assert {*SAYS, *COMPILING, *BY_MPI} == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("name", both(quick=[name for name in SAYS if name not in SLOW], all=SAYS))
def test_an_example_prints_the_expected_lines(name):
    always, on_cuda = SAYS[name]
    is_torch = name.endswith("_hook.py") or name in ("cuda_graph.py", "diloco.py", "elastic.py")
    module = "torch" if is_torch else name.split("_")[0]
    if module in ("torch", "jax", "cffi") and not has(module):
        # A machine with a GPU may lack frameworks; any other must have all of requirements.txt.
        (pytest.skip if has_cuda() else pytest.fail)(f"no {module} here")
    # The timeout names an example that hangs: none takes a tenth of it, also on a busy machine.
    child = subprocess.run([sys.executable, "-B", str(EXAMPLES / name)], capture_output=True, text=True, timeout=1800)
    assert child.returncode == 0, child.stdout + child.stderr
    if module != "jax" and not has_cuda():  # JAX warns about devices on any machine, other frameworks only with a GPU
        assert child.stderr == ""
    expected = list(always)
    if on_cuda:
        framework, said = on_cuda
        shown = has_cuda() and has(framework) and (name not in GPUS or gpus_of_torch() >= GPUS[name])
        expected += said if shown else ["SKIPPED: no "]
        assert ("SKIPPED" in child.stdout) != shown
    missing = [text for text in expected if text not in child.stdout]
    assert not missing, child.stdout
    assert not re.search(r"\bFalse\b", child.stdout.replace("writable: False", ""))


@pytest.mark.parametrize("module", ["torch", "jax", "cupy"])
def test_an_example_without_its_framework_prints_why_it_ends(module, tmp_path):
    (tmp_path / f"{module}.py").write_text(f"raise ImportError('no {module}')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    of_torch = [*EXAMPLES.glob("*_hook.py"), EXAMPLES / "diloco.py", EXAMPLES / "elastic.py"] if module == "torch" else []
    for path in sorted([*EXAMPLES.glob(f"{module}_*.py"), *of_torch]):
        if path.name in COMPILING:
            continue
        child = subprocess.run([sys.executable, "-B", str(path)], capture_output=True, text=True, env=environment)
        assert (child.returncode, child.stderr) == (0, "") and "SKIPPED: no " in child.stdout
