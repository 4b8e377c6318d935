"""include/gradcodec/torch.hpp: views without copies, the current stream, and tensors through DLPack."""

import os
import socket
import subprocess
import sys

import model
import numpy as np
import pytest
import torch

ORDERS = {"big": 0, "little": 1}
CODES = {torch.bool: 6, torch.bfloat16: 4, **{dtype: 1 for dtype in model.UNSIGNED}}


@pytest.mark.parametrize("dtype", (*model.TRUTHS, *model.FLOATS), ids=str)
def test_a_view_describes_the_tensor(adaptor, device, dtype):
    for layout in model.LAYOUTS.values():
        x = layout(torch.zeros(27, 37, dtype=dtype, device=device))
        code = CODES.get(dtype, 2 if dtype.is_floating_point else 0)
        where = [2, x.get_device()] if device == "cuda" else [1, 0]
        assert adaptor.described(x) == [x.data_ptr(), *where, x.dim(), code, 8 * dtype.itemsize, 1]
        assert adaptor.written_at(x) == x.data_ptr()


@pytest.mark.parametrize("dtype", (*model.TRUTHS, *model.FLOATS), ids=str)
def test_dlpack_shares_the_memory(adaptor, device, dtype):
    for layout in model.LAYOUTS.values():
        x = layout(torch.zeros(27, 37, dtype=dtype, device=device))
        y = adaptor.through_dlpack(x)
        assert (y.data_ptr(), y.shape, y.dtype, y.device) == (x.data_ptr(), x.shape, x.dtype, x.device)
        assert all(n == 1 or x.numel() == 0 or s == t for n, s, t in zip(x.shape, x.stride(), y.stride()))
    x = torch.zeros(8, dtype=dtype, device=device)
    y = adaptor.through_dlpack(x)
    y.fill_(1)
    assert x.eq(1).all()


def test_memory_of_the_library_is_not_copied(adaptor, device):
    x = torch.arange(999, device=device) % 3 == 0
    packed, address = adaptor.packed_by_the_library(x)
    assert packed.data_ptr() == address and packed.device == x.device
    assert model.same(packed, np.packbits(model.array(x)))
    del x
    assert packed.sum().item() > 0


@pytest.mark.parametrize("order", ORDERS)
def test_results_are_written_to_torch_tensors(adaptor, device, order):
    x = model.floats(torch.float32, device, "transposed")
    bits = model.signs(x).reshape(-1)
    packed = torch.full((1, 125), 0xA5, dtype=torch.uint8, device=device)
    address = packed.data_ptr()
    adaptor.pack_signs_into(x, ORDERS[order], packed)
    assert packed.data_ptr() == address and model.same(packed[0], np.packbits(bits, bitorder=order))
    adaptor.pack_chunks_into(x < 0, ORDERS[order], packed)
    assert model.same(packed[0], np.packbits(model.array(x).reshape(-1) < 0, bitorder=order))
    out = torch.full((37, 54), 7.0, device=device)
    adaptor.unpack_chunks_into(packed, ORDERS[order], out[:, ::2])  # every other column, the others left alone
    assert model.same(out[:, ::2], (model.array(x) < 0).astype(np.float32)) and out[:, 1::2].eq(7).all()


def test_new_copies_are_compact_tensors_of_torch(adaptor, device):
    x = torch.arange(999.0, device=device).view(27, 37).t()
    for there in {"cpu", device}:
        copy = adaptor.tensor_to_device(x, torch.device(there))
        assert copy.device.type == there and copy.is_contiguous() and copy.data_ptr() != x.data_ptr()
        assert model.same(copy, model.array(x))
        out = torch.zeros(*x.shape, 2, dtype=torch.float64, device=there)
        version = out._version
        adaptor.copy_into(x, out[..., 1])
        assert out._version == version + 1
        assert model.same(out[..., 1], model.array(x).astype("f8")) and out[..., 0].eq(0).all()
    with pytest.raises(RuntimeError):
        adaptor.tensor_to_device(x, torch.device("meta"))


@pytest.fixture
def sockets():
    ends = socket.socketpair()
    yield [end.fileno() for end in ends]
    for end in ends:
        end.close()


@pytest.mark.parametrize("copies", [False, True], ids=["lent", "copied"])
@pytest.mark.parametrize("dtype", (torch.bool, *model.FLOATS), ids=str)
def test_a_tensor_that_is_shared_is_released_by_torch(adaptor, device, sockets, dtype, copies):
    x = torch.arange(30, device=device).remainder(3).to(dtype).reshape(5, 6).t()
    expected, lent = model.array(x), device == "cuda" and not copies
    number = adaptor.share_send(x, sockets[0], int(copies))
    assert adaptor.share_keeps(number) == lent
    with pytest.raises(RuntimeError, match="not released"):
        adaptor.share_wait(number)
    assert adaptor.share_keeps(number) == lent
    y = adaptor.share_receive(sockets[1], torch.device(device))
    assert (y.dtype, y.device, y.shape) == (x.dtype, x.device, x.shape) and model.same(y, expected)
    assert (y.data_ptr() == x.data_ptr()) == lent  # the sending process gets its own memory back
    z = y[1:]
    del y
    with pytest.raises(RuntimeError, match="not released"):
        adaptor.share_wait(number)
    del z
    adaptor.share_wait(number)
    assert not adaptor.share_keeps(number)
    adaptor.share_free(number)


def test_a_received_tensor_that_torch_cannot_hold_is_released(adaptor, sockets):
    number = adaptor.share_send(torch.zeros(3), sockets[0], 0)
    with pytest.raises(RuntimeError, match="device: "):
        adaptor.share_receive(sockets[1], torch.device("meta"))
    with pytest.raises(RuntimeError, match="socket: "):
        adaptor.share_receive(-1, torch.device("cpu"))
    assert adaptor.share_receive(sockets[1], torch.device("cpu")).eq(0).all()
    adaptor.share_wait(number)
    adaptor.share_free(number)
    with pytest.raises(RuntimeError, match="src: a dense tensor expected"):
        adaptor.share_send(torch.eye(3).to_sparse(), sockets[0], 0)
    number = adaptor.share_send_any(torch.zeros(3, dtype=torch.complex64), sockets[0])
    with pytest.raises(RuntimeError, match="the tensor that came: .* is not supported"):
        adaptor.share_receive(sockets[1], torch.device("cpu"))
    adaptor.share_wait(number)
    adaptor.share_free(number)


def test_a_refused_call_changes_neither_version_nor_elements(adaptor, device):
    factor, x = torch.ones(9, device=device), torch.ones(9, device=device, requires_grad=True)
    y = (x * factor).sum()
    before = factor._version
    with pytest.raises(RuntimeError, match="src: "):  # 9 elements are two bytes
        adaptor.unpack_chunks_into(torch.zeros(1, 1, dtype=torch.uint8, device=device), 0, factor)
    assert factor._version == before and factor.eq(1).all()
    y.backward()
    adaptor.unpack_chunks_into(torch.zeros(1, 2, dtype=torch.uint8, device=device), 0, factor)
    assert factor._version == before + 1 and factor.eq(0).all()


def test_an_inference_tensor_is_written_to_in_inference_mode_only(adaptor, device):
    bits = torch.zeros(1, 1, dtype=torch.uint8, device=device)
    with torch.inference_mode():
        out = torch.ones(8, device=device)
    with pytest.raises(RuntimeError, match="dst: an inference tensor is written to in inference mode only"):
        adaptor.unpack_chunks_into(bits, 0, out)
    assert out.eq(1).all()
    with torch.inference_mode():
        adaptor.unpack_chunks_into(bits, 0, out)
    assert out.eq(0).all()


@pytest.mark.parametrize("order", ORDERS)
def test_bits_along_an_axis_match_numpy(adaptor, device, order):
    x = model.integers(torch.int16, device)
    packed_all = adaptor.pack_bits(x, None, ORDERS[order])
    for axis in (None, 0, 1, -1, -2):
        packed = adaptor.pack_bits(x, axis, ORDERS[order])
        expected = np.packbits(model.truths(x), axis, order)
        assert model.same(packed, expected)
        for count in (None, 0, 3, 11, 50, -2):
            unpacked = adaptor.unpack_bits(packed, axis, count, ORDERS[order])
            assert model.same(unpacked, np.unpackbits(expected, axis, count, order))
    for bad in (2, -3):
        with pytest.raises(IndexError):
            adaptor.pack_bits(x, bad, 0)
    with pytest.raises(RuntimeError, match="leaves off more"):
        adaptor.unpack_bits(packed_all, None, -8 * 125 - 1, 0)


def test_memory_that_is_shared_until_written_to_stays_shared(adaptor):
    x = torch.zeros(8)
    y = torch._lazy_clone(x)
    address = adaptor.described(x)[0]
    assert adaptor.described(y)[0] == address and torch._C._is_cow_tensor(y)
    assert adaptor.written_at(y) != address and not torch._C._is_cow_tensor(y)


def test_only_plain_tensors_are_accepted(adaptor, device):
    negated = torch.complex(torch.zeros(9), torch.ones(9)).to(device).conj().imag
    with pytest.raises(RuntimeError, match="src: a lazily negated view"):
        adaptor.described(negated)
    with pytest.raises(RuntimeError, match="src: a dense tensor expected"):
        adaptor.described(torch.eye(3, device=device).to_sparse())
    with pytest.raises(RuntimeError, match="src: a tensor on the CPU or on CUDA expected, got meta"):
        adaptor.described(torch.zeros(3, device="meta"))
    with pytest.raises(RuntimeError, match="src: .* is not supported"):
        adaptor.described(torch.zeros(3, dtype=torch.float8_e5m2, device=device))


def test_prepare(adaptor, device):
    adaptor.prepare(torch.device(device, 0))
    adaptor.prepare(torch.device(device))
    with pytest.raises(RuntimeError, match="device: a tensor on the CPU or on CUDA expected"):
        adaptor.prepare(torch.device("meta"))


# Runs in a process of its own, with tests/fakes/cuda/libcuda.c: a driver of two devices without any hardware.
PREPARE_WITHOUT_AN_INDEX = """
import ctypes, sys, torch
torch.ops.load_library(sys.argv[1])
adaptor, driver = torch.ops.gradcodec_adaptor, ctypes.CDLL("libcuda.so.1")
for current in 1, 0:
    adaptor.pretend_current(torch.device("cuda", current))
    before = [driver.fake_retained(k) for k in range(2)]
    adaptor.prepare(torch.device("cuda"))
    print([driver.fake_retained(k) - before[k] for k in range(2)])
"""


def test_prepare_without_an_index_prepares_the_current_device(adaptor):
    built = next(path for path in torch.ops.loaded_libraries if "gradcodec_adaptor" in path)
    folders = os.path.join(os.environ["GRADCODEC_DRIVERS"], "driver"), os.environ.get("LD_LIBRARY_PATH", "")
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}
    done = subprocess.run(
        [sys.executable, "-c", PREPARE_WITHOUT_AN_INDEX, built], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n[1, 0]\n"), done.stderr


def test_the_stream_of_the_cpu_is_none(adaptor):
    assert adaptor.current_stream(torch.zeros(1)) == 0


def test_the_stream_is_the_current_stream_of_torch(adaptor, cuda):
    x = torch.zeros(1, device=cuda)
    assert adaptor.current_stream(x) == torch.cuda.current_stream().cuda_stream == 0
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(priority=-1), torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            assert adaptor.current_stream(x) == stream.cuda_stream
    with torch.cuda.stream(torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)):
        assert adaptor.current_stream(x) == torch.cuda.current_stream().cuda_stream


def test_a_codec_reads_and_returns_tensors(adaptor, device):
    """Uses two constant gradients, whose scales, and that of the mean, can be calculated."""
    ours, theirs = [torch.full((3, 5), 2.0), torch.full((7,), -4.0)], [torch.full((3, 5), 6.0), torch.full((7,), 4.0)]
    ours, theirs = ([x.to(device) for x in xs] for xs in (ours, theirs))
    out = [torch.zeros_like(x) for x in ours]
    versions = [x._version for x in out]
    payloads = adaptor.codec_step(ours, theirs, out, None)
    assert out[0].eq(4).all() and out[1].eq(0).all()  # (2 + 6) / 2, (-4 + 4) / 2
    assert [x._version for x in out] == [version + 1 for version in versions]
    assert all(bytes(x[:4].tolist()) == b"GCPL" for x in payloads)
    assert all((x.dtype, x.device) == (torch.uint8, out[0].device) for x in payloads)
    adaptor.codec_step(ours, theirs, out, torch.tensor([3.0], device=device))
    assert out[0].eq(6).all() and out[1].eq(-4).all()  # (3 * 2 + 6) / 2, (3 * -4 + 4) / 2


def test_a_refusal_of_a_codec_raises_a_torch_error(adaptor):
    x = [torch.zeros(4)]
    for ours, out, words in [
        ([torch.zeros(4, dtype=torch.int32)], x, "int32"), (x, [torch.zeros(5)], "4 elements expected, got 5"),
        ([], x, "at least one tensor"), (x, [], "n_values: 1 expected"),
    ]:  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            adaptor.codec_step(ours, x if ours else [], out, None)
