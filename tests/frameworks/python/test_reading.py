"""Tests how python/gradcodec reads PyTorch's tensors: by their table if possible, else by __dlpack__ or not at all."""

import ctypes
import gc
import weakref

import numpy as np
import pytest
import torch
from peers import Torch, chunk_rows, frameworks, gradcodec

from gradcodec import CUDA, GradCodecError, _reading

VALUES = torch.from_numpy(np.random.default_rng(0).standard_normal((6, 10, 16)).astype("f4"))
needs_table = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="PyTorch has the table from 2.10 on"
)


@pytest.fixture
def no_capsules(monkeypatch):
    def refuse(*arguments):
        raise AssertionError(f"read by __dlpack__: {arguments}")

    monkeypatch.setattr(_reading, "_Borrowed", refuse)


@pytest.fixture(params=["table", "capsules"])
def ways(request, monkeypatch):
    """Runs a test with the table, and without it as in older PyTorch."""
    monkeypatch.setattr(_reading, "_KINDS", {})
    if request.param == "capsules":
        monkeypatch.setattr(_reading, "_functions", lambda of: None)
    return request.param


class Plain(torch.Tensor):
    pass


VIEWS = {
    "whole": VALUES, "offset": VALUES[2, 3:], "scalar": torch.tensor(-1.5), "one": VALUES[:1, :1, :1], "empty": VALUES[:0],
    "transposed": VALUES.permute(2, 0, 1), "every other": VALUES[:, ::2],
    "expanded": VALUES[0, 0].expand(5, 16), "size-1 strides": VALUES.as_strided((1, 10), (7, 3)),
    "parameter": torch.nn.Parameter(VALUES.clone()), "requires grad": VALUES.clone().requires_grad_(),
    "of a graph": VALUES.clone().requires_grad_() * 1, "subclass": VALUES.as_subclass(Plain),
    "bfloat16": VALUES.bfloat16(), "float16": VALUES.half(), "float64": VALUES.double(),
    "ten dimensions": VALUES.reshape((1,) * 7 + VALUES.shape), "made in inference mode": None,
}  # fmt: skip
with torch.inference_mode():
    VIEWS["made in inference mode"] = VALUES * 1


def check_packed(view):
    bits = torch.full((1, -(-view.numel() // 8)), 7, dtype=torch.uint8)
    gradcodec.pack_signs_into(view, bits)
    expected = np.packbits(view.detach().double().numpy() >= 0)
    np.testing.assert_array_equal(bits.numpy().ravel(), expected)
    (chunk,) = gradcodec.pack_signs(view, 1)
    np.testing.assert_array_equal(np.from_dlpack(chunk), expected)


@needs_table
@pytest.mark.parametrize("name", VIEWS)
def test_tensors_are_read_without_a_capsule(no_capsules, name):
    check_packed(VIEWS[name])


def test_tensors_are_read_by_capsules(monkeypatch):
    monkeypatch.setattr(_reading, "_KINDS", {})
    monkeypatch.setattr(_reading, "_functions", lambda of: None)
    for view in VIEWS.values():
        check_packed(view)


@needs_table
def test_every_dtype_is_read_correctly(no_capsules):
    for name in "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split():
        dtype = getattr(torch, name)
        source, target = torch.tensor([0, 1, 3, 100]).to(dtype), torch.zeros(4, 3, dtype=dtype)
        gradcodec.copy_into(source, target[:, 1])
        assert torch.equal(target[:, 1], source) and not target[:, ::2].any(), name


def test_complex_numbers_are_copied_and_conjugated_ones_refused(ways):
    numbers, target = torch.randn(4, dtype=torch.complex64), torch.zeros(4, dtype=torch.complex64)
    gradcodec.copy_into(numbers, target)
    assert torch.equal(numbers, target)
    with pytest.raises(BufferError, match="conjugate"):
        gradcodec.copy_into(numbers.conj(), target)
    with pytest.raises(BufferError, match="conjugate"):
        gradcodec.copy_into(target, numbers.conj())


def test_a_view_that_is_negated_when_it_is_read_is_refused(ways):
    negated, bits = torch.randn(8, dtype=torch.complex64).conj().imag, torch.full((1, 1), 7, dtype=torch.uint8)
    assert negated.is_neg()
    for call in (
        lambda: gradcodec.pack_signs_into(negated, bits),
        lambda: gradcodec.copy_into(torch.ones(8), negated),
        lambda: gradcodec.codec(1, [8] * 4).encode([torch.ones(8)] * 3 + [negated], bits),
    ):
        with pytest.raises(BufferError, match="resolve_neg"):
            call()
    assert bits.item() == 7
    check_packed(negated.resolve_neg())


def test_outputs_that_require_grad_are_refused_where_gradients_are_recorded(ways):
    parameter = torch.nn.Parameter(torch.ones(16))
    rows, values = torch.tensor([[0xF0, 0x0F]], dtype=torch.uint8), [torch.ones(16) for _ in range(3)]
    codec = gradcodec.codec(1, [16] * 4)
    memory = torch.zeros(codec.payload_bytes + 16, dtype=torch.uint8)
    payload = memory[-memory.data_ptr() % 16 :][: codec.payload_bytes]
    codec.encode([*values, parameter], payload)  # an input may require grad
    parameter.data.zero_()
    for call in (
        lambda: gradcodec.unpack_signs_into(rows, parameter),
        lambda: codec.decode(payload, [*values, parameter]),
        lambda: codec.decode(payload, [parameter, *values]),
    ):
        with pytest.raises(BufferError, match="(dst|values): requires grad, .* torch.no_grad"):
            call()
        assert not parameter.any()
        with torch.no_grad():
            call()
        assert parameter.all() and parameter.requires_grad
        with torch.no_grad():
            parameter.zero_()
    gradcodec.unpack_signs_into(rows, parameter.detach())
    assert parameter.tolist() == [1] * 4 + [-1] * 8 + [1] * 4


class Function(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function is torch.Tensor.__dlpack__:
            raise KeyError("not for you")
        return super().__torch_function__(function, types, arguments, keywords or {})


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        raise NotImplementedError(function)


def fake():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(8)


WITHOUT_MEMORY = {
    "fake": fake, "wrapper": lambda: Wrapper(torch.zeros(8)), "sparse": lambda: torch.eye(8).to_sparse(),
    "meta": lambda: torch.zeros(8, device="meta"), "zeros that are not there": lambda: torch._efficientzerotensor(8),
    "functional": lambda: torch._to_functional_tensor(torch.zeros(8)), "nested": lambda: torch.nested.nested_tensor([torch.zeros(8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_tensors_without_memory_are_refused(ways, name):
    tensor, bits = WITHOUT_MEMORY[name](), torch.full((1, 1), 7, dtype=torch.uint8)
    for call in (
        lambda: gradcodec.pack_signs_into(tensor, bits),
        lambda: gradcodec.pack_signs(tensor, 1),
        lambda: gradcodec.codec(1, [8] * 5).encode([torch.zeros(8)] * 4 + [tensor], bits),
    ):
        with pytest.raises((GradCodecError, BufferError, RuntimeError, ValueError)):
            call()
    assert bits.item() == 7


def test_a_freed_storage_is_refused(ways):
    tensor = torch.randn(8)
    tensor.untyped_storage().resize_(0)
    with pytest.raises((GradCodecError, BufferError, RuntimeError)):
        gradcodec.pack_signs_into(tensor, torch.zeros(1, 1, dtype=torch.uint8))


def test_within_vmap_a_tensor_is_refused():
    def pack(row):
        gradcodec.pack_signs_into(row, torch.zeros(1, 1, dtype=torch.uint8))
        return row

    with pytest.raises((GradCodecError, BufferError, RuntimeError)):
        torch.func.vmap(pack)(torch.randn(2, 8))


def test_a_subclass_with_its_own_dlpack_method_is_asked(ways):
    with pytest.raises(KeyError, match="not for you"):
        gradcodec.pack_signs_into(torch.randn(8).as_subclass(Function), torch.zeros(1, 1, dtype=torch.uint8))


def test_a_call_keeps_no_reference(ways):
    tensors = [torch.zeros(16), torch.zeros(1, 2, dtype=torch.uint8)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    gradcodec.pack_signs_into(*tensors)
    gradcodec.pack_signs_into(np.zeros(16, "f4"), tensors[1])
    with pytest.raises(GradCodecError):
        gradcodec.pack_signs_into(tensors[0], tensors[0])
    tensors.clear()
    gc.collect()
    assert [each() for each in alive] == [None, None]


@needs_table
def test_the_layout_of_the_table_matches_dlpack():
    assert ctypes.sizeof(_reading._Api) == 56
    read, current = _reading._functions(torch.Tensor)
    assert read and current and _reading._functions(torch.nn.Parameter) == (read, current)


@frameworks(Torch, device=CUDA)
def test_a_call_without_a_stream_runs_on_the_current_stream(framework):
    values = np.random.default_rng(1).standard_normal((64, 64)).astype("f4")
    fresh, rows = framework.array(values), framework.array(np.zeros((1, 512), np.uint8))
    source, side = framework.array(np.zeros_like(values)), torch.cuda.Stream()
    matrix = torch.randn(4096, 4096, device="cuda") / 64
    codec = gradcodec.codec(1, [4096], device=(CUDA, 0), nonfinite=2)
    payload = torch.zeros(codec.payload_bytes, dtype=torch.uint8, device="cuda")
    result = torch.zeros(4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            matrix = torch.tanh(matrix @ matrix)  # milliseconds, so that a call that does not wait reads too early
        source.copy_(fresh)
        gradcodec.pack_signs_into(source, rows)
        codec.encode([source], payload)
        codec.commit()
        codec.decode(payload, [result])
    side.synchronize()
    np.testing.assert_array_equal(framework.numpy(rows), chunk_rows(values >= 0, 1))
    assert torch.equal(result.cpu() >= 0, torch.from_numpy(values.ravel() >= 0))
    graph = torch.cuda.CUDAGraph()
    rows.zero_()
    with torch.cuda.graph(graph):
        gradcodec.pack_signs_into(source, rows)
    assert not rows.any()
    graph.replay()
    np.testing.assert_array_equal(framework.numpy(rows), chunk_rows(values >= 0, 1))
