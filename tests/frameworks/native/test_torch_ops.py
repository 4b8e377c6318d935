"""examples_cpp/torch_ops.cpp: operators that torch treats as its own."""

import pathlib
import sysconfig

import model
import numpy as np
import pytest
import torch

N_CHUNKS = (1, 3, 8)


@pytest.mark.parametrize("layout", model.LAYOUTS)
def test_signs_and_booleans_match_numpy(ops, device, layout):
    x, y = model.floats(torch.bfloat16, device, layout), model.integers(torch.int16, device, layout)
    for n_chunks in N_CHUNKS:
        packed = ops.pack_signs(x, n_chunks)
        assert packed.device == x.device and packed.dtype == torch.uint8 and packed.is_contiguous()
        assert model.same(packed, model.chunks(model.signs(x), n_chunks))
        assert model.same(ops.pack_truth(y, n_chunks), model.chunks(model.truths(y), n_chunks))


@pytest.mark.parametrize("dtype", (*model.TRUTHS, *model.FLOATS), ids=str)
def test_unpacked_bits_match_numpy(ops, device, dtype):
    for shape in ((), (0,), (1,), (8,), (999,), (3, 5, 7)):
        for n_chunks in N_CHUNKS:
            n = int(np.prod(shape))
            size = model.chunks(np.zeros(n, bool), n_chunks).shape[1]
            random = np.random.default_rng(n).integers(0, 256, (n_chunks, size), np.uint8)
            out = ops.unpack(torch.from_numpy(random).to(device), shape, dtype)
            assert out.device.type == device and out.dtype == dtype and out.is_contiguous()
            assert model.same(out, np.unpackbits(random.reshape(-1))[:n].reshape(shape).astype(model.array(out).dtype))


@pytest.mark.parametrize("requires_grad", (False, True))
def test_opcheck(ops, device, requires_grad):
    x = torch.randn(37, 27, device=device).requires_grad_(requires_grad)
    for op, arguments in (
        (ops.pack_signs, (x, 4)),
        (ops.pack_signs, (x.t(),)),
        (ops.pack_truth, (x > 0, 4)),
        (ops.pack_truth, (x[:0] > 0,)),
        (ops.unpack, (ops.pack_signs(x, 4), [37, 27], torch.bfloat16)),
        (ops.unpack, (ops.pack_signs(x[:0], 4), [0], torch.bool)),
    ):
        torch.library.opcheck(op.default, arguments)


def chain(x):
    chunks = torch.ops.gradcodec.pack_signs(x * 2 - 1, 3)
    truth = torch.ops.gradcodec.pack_truth(x > 0.5)
    return chunks, truth, torch.ops.gradcodec.unpack(chunks, x.shape, x.dtype) * 2 - 1


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("backend", ("eager", "aot_eager", "inductor"))
def test_compiled_results_match_eager_results(ops, device, backend, dynamic):
    if backend == "inductor" and not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("inductor compiles against Python.h, which is not there")
    if backend == "inductor" and device == "cuda":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    compiled = torch.compile(chain, backend=backend, fullgraph=True, dynamic=dynamic)
    for n in (1000, 17, 999):  # other sizes would fail with a shape that was compiled in
        x = torch.randn(n, 3, device=device)
        values = model.array(x)
        chunks, truth, back = compiled(x)
        assert model.same(chunks, model.chunks(~(values * 2 - 1 < 0), 3))
        assert model.same(truth, model.chunks(values > 0.5, 1))
        assert model.same(back, np.where(values * 2 - 1 < 0, -1, 1).astype(np.float32))


def test_a_lazily_negated_tensor_is_negated_first(ops, device):
    x = torch.complex(torch.zeros(99), torch.randn(99)).to(device).conj().imag
    assert x.is_neg()
    assert model.same(ops.pack_signs(x), model.chunks(model.signs(x.resolve_neg()), 1))


def test_packed_tensors_have_no_gradient(ops, device):
    x = torch.randn(8, device=device, requires_grad=True)
    assert not ops.pack_signs(x).requires_grad
    assert not ops.unpack(ops.pack_signs(x), [8], torch.float32).requires_grad


REFUSED = {
    "truth of floats": (lambda o, d: o.pack_truth(torch.ones(3, device=d)), "gc_pack_signs_into packs signs"),
    "signs of integers": (lambda o, d: o.pack_signs(torch.ones(3, dtype=torch.int32, device=d)), "src: int32"),
    "complex": (lambda o, d: o.pack_signs(torch.ones(3, dtype=torch.complex64, device=d)), "src: ComplexFloat"),
    "no chunks": (lambda o, d: o.pack_signs(torch.ones(3, device=d), 0), "n_chunks: at least 1"),
    "chunks too short": (
        lambda o, d: o.unpack(torch.zeros(2, 3, dtype=torch.uint8, device=d), [49], torch.bool), "src: 2 chunks of 4"),
    "chunks of floats": (lambda o, d: o.unpack(torch.zeros(1, 1, device=d), [8], torch.bool), "src: "),
    "chunks with gaps": (
        lambda o, d: o.unpack(torch.zeros(4, 2, dtype=torch.uint8, device=d).t(), [64], torch.bool), "src: "),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_has_the_message_of_the_library(ops, device, what):
    call, sentence = REFUSED[what]
    with pytest.raises(RuntimeError) as caught:
        call(ops, device)
    assert str(caught.value).startswith(sentence) or sentence in str(caught.value)


def test_work_is_enqueued_on_the_current_stream(ops, cuda):
    x = torch.ones(1 << 20, device=cuda)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ops.pack_signs(x.fill_(1))  # loads the kernels, which may wait for work in progress
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        x.fill_(-1)
        packed = ops.pack_signs(x)
        assert not stream.query(), "the call has waited for the stream"
    stream.synchronize()
    assert not packed.any()


def test_memory_freed_on_the_stream_is_not_read_too_late(ops, cuda):
    """Frees an input and reuses its memory before the kernel has run, which record_stream() would prevent."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        x = torch.full((1 << 20,), -1.0, device=cuda)
        packed = ops.pack_signs(x)
        address = x.data_ptr()
        del x
        y = torch.ones(1 << 20, device=cuda)
        assert y.data_ptr() == address, "the allocator has not reused the block, which this is about"
    torch.cuda.synchronize()
    assert not packed.any()


def test_one_allocation_a_call(ops, cuda):
    x = torch.randn(1 << 20, device=cuda)
    ops.pack_signs(x)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    packed = ops.pack_signs(x, 4)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    ops.unpack(packed, x.shape, x.dtype)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 2


def test_a_graph_packs_the_values_of_each_replay(ops, adaptor, cuda):
    adaptor.prepare(torch.device(cuda, 0))
    x = torch.zeros(1 << 16, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = ops.pack_signs(x, 3)
        back = ops.unpack(packed, x.shape, x.dtype)
    for seed in range(3):
        x.copy_(torch.randn(1 << 16, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert model.same(packed, model.chunks(model.signs(x), 3))
        assert model.same(back, model.signs(x).astype(np.float32))


def test_another_device_than_the_current(ops, cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("two CUDA devices needed, one found")
    x = torch.randn(1 << 16, device="cuda:1")
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")), torch.cuda.device("cuda:0"):
        packed = ops.pack_signs(x)
        assert packed.device == x.device and torch.cuda.current_device() == 0
    torch.cuda.synchronize("cuda:1")
    assert model.same(packed, model.chunks(model.signs(x), 1))
