"""examples/python/torch_codec.py: operators that compute what docs/NUMERICS.md says (tests/python/codec_model.py)."""

import pathlib
import sys
import sysconfig

import numpy as np
import pytest
import torch

from peers import ROOT, chunk_rows, has_cuda

sys.path.append(str(ROOT / "tests" / "python"))
import codec_model  # noqa: E402 the path comes first
import torch_codec  # noqa: E402
from torch_codec import compress, decompress  # noqa: E402

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not has_cuda():
        pytest.skip("no CUDA device")
    return request.param


def memory(tensor):
    """As codec_model has it: bfloat16 is uint16."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def same(tensor, expected):
    return memory(tensor).tobytes() == np.ascontiguousarray(expected).tobytes()


def gradients(n, dtype, device):
    rng = np.random.default_rng(n)
    return [torch.from_numpy(rng.standard_normal(n, np.float32)).to(device, dtype) for _ in range(3)]


class Model:
    """Steps of the plain form."""

    def __init__(self, n, dtype):
        self.name, self.error = NAMES[dtype], np.zeros(n, np.float32)

    def step(self, gradient, n_chunks):
        widened = codec_model.widen(memory(gradient).reshape(-1).view(self.kind(gradient)), NAMES[gradient.dtype])
        bits, scale, self.error = codec_model.plain(widened, self.error, codec_model.RMS, self.name)
        return chunk_rows(bits, n_chunks), scale, codec_model.narrow(self.error, self.name)

    @staticmethod
    def kind(tensor):
        return np.uint16 if tensor.dtype is torch.bfloat16 else memory(tensor).dtype


@pytest.mark.parametrize("error_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_bits_scales_and_errors_are_those_of_the_specification(device, dtype, error_dtype):
    for n, n_chunks in (0, 1), (1, 1), (9, 3), (1000, 4), (70_001, 1):
        error, model = torch.zeros(n, dtype=error_dtype, device=device), Model(n, error_dtype)
        for gradient in gradients(n, dtype, device):
            bits, scale = compress(gradient, error, n_chunks)
            expected_bits, expected_scale, expected_error = model.step(gradient, n_chunks)
            assert same(bits, expected_bits) and bits.shape == expected_bits.shape
            assert same(scale, expected_scale) and same(error, expected_error)
            sent = expected_scale * np.where(np.unpackbits(expected_bits.reshape(-1))[:n], 1, -1).astype(np.float32)
            for out in NAMES:
                assert same(decompress(bits, scale, n, out), codec_model.narrow(sent, NAMES[out]))


def test_chunks_of_several_ranks_have_scales_of_their_own(device):
    bits = torch.tensor([[0xFF], [0x00]], dtype=torch.uint8, device=device)
    values = decompress(bits, torch.tensor([2.0, 3.0], device=device), 12, torch.float32)
    assert values.tolist() == [2.0] * 8 + [-3.0] * 4


def test_opcheck(device):
    for n, dtype, n_chunks in (1000, torch.float32, 1), (999, torch.bfloat16, 4), (0, torch.float32, 1):
        gradient, error = gradients(n, dtype, device)[0], torch.zeros(n, device=device)
        torch.library.opcheck(compress, (gradient, error, n_chunks))
        bits, scale = compress(gradient, error, n_chunks)
        torch.library.opcheck(decompress, (bits, scale, n, dtype))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_it_is_the_same(device, backend, dynamic):
    if backend == "inductor" and not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("inductor compiles against Python.h, which is not there")
    if backend == "inductor" and device == "cuda":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    # Something to fuse on either side, so that memory is planned around the operators.
    function = torch.compile(
        lambda gradient, error: [x * 1 for x in torch_codec.there_and_back(gradient * 1, error)],
        backend=backend, fullgraph=True, dynamic=dynamic,
    )  # fmt: skip
    for n in 1000, 17:  # another size: a shape that was burnt in would show
        error, model = torch.zeros(n, device=device), Model(n, torch.float32)
        for gradient in gradients(n, torch.float32, device):
            bits, scale, received = function(gradient, error)
            expected_bits, expected_scale, expected_error = model.step(gradient, 1)
            assert same(bits, expected_bits) and same(scale, expected_scale) and same(error, expected_error)
            assert same(received, np.where(np.unpackbits(expected_bits)[:n], expected_scale, -expected_scale))


def test_nothing_flows_back_in_silence(device):
    gradient = torch.ones(8, device=device, requires_grad=True)
    bits, scale = compress(gradient, torch.zeros(8, device=device))
    with pytest.raises(RuntimeError, match="no autograd formula"):
        scale.backward()
    assert decompress(bits, scale, 8, torch.float32).tolist() == [1.0] * 8


def test_what_is_refused_is_said_and_changes_nothing(device):
    x = torch.ones(8, device=device)
    for call, words in [
        (lambda: compress(x.int(), x), "grad: .*got int32"), (lambda: compress(x, x[:7]), "error: .*8.*7"),
        (lambda: compress(x.view(2, 4).t(), x), "grad: .*contiguous"), (lambda: compress(x, x), "intersect"),
        (lambda: decompress(x.byte().view(2, 4), x[:3], 64, torch.float32), "scales: "),
        (lambda: decompress(x.byte().view(1, 8), x[:1], 65, torch.float32), "src: 1 chunk"),
    ]:  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            call()
        assert x.eq(1).all()
    with pytest.raises(RuntimeError, match="n_chunks: at least 1"):
        compress(x.to("meta"), x.to("meta"), 0)


def test_work_is_enqueued_on_the_current_stream():
    if not has_cuda():
        pytest.skip("no CUDA device")
    gradient, error = torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decompress(*compress(gradient, error), gradient.numel(), torch.float32)  # loads kernels, which may wait
        error.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        gradient.fill_(-1)
        bits, scale = compress(gradient, error)
        received = decompress(bits, scale, gradient.numel(), torch.float32)
        assert not stream.query(), "a call has waited for the stream"
    stream.synchronize()
    assert received.eq(-1).all() and not error.any()


def test_a_tensor_of_another_device_than_the_current():
    if not has_cuda() or torch.cuda.device_count() < 2:
        pytest.skip("two CUDA devices needed")
    gradient, error = torch.ones(100, device="cuda:1"), torch.zeros(100, device="cuda:1")
    with torch.cuda.device(0):
        received = decompress(*compress(gradient, error), 100, torch.float32)
        assert received.device == gradient.device and torch.cuda.current_device() == 0
    assert received.eq(1).all()
