"""examples/python/ddp_hook.py: what a bucket becomes, over gloo between two processes, and over NCCL on a card.

A gradient whose elements have one magnitude loses nothing: the hook must give it back, to the bit, whatever the bucket.
"""

import ctypes
import os
import traceback

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from peers import has_cuda  # noqa: E402

import ddp_hook  # noqa: E402
from ddp_hook import CPU, CUDA, Device, OneBit, one_bit_hook  # noqa: E402

# Parameters of odd sizes, each with a magnitude of its own; a bucket holds some of them.
SHAPES = [(7,), (33, 5), (1, 1, 3), (1000,), (64, 64)]
STEPS = 4


class Linear(torch.nn.Module):
    """Its gradient is whatever it is given."""

    def __init__(self, dtype, device):
        super().__init__()
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape in SHAPES)
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(zero) for zero in zeros)

    def forward(self, gradients):
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients))


def gradients(step, dtype, device):
    torch.manual_seed(step)
    signs = [torch.randint(2, shape) * 2 - 1 for shape in SHAPES]
    return [(sign * 2.0 ** (k - 2)).to(dtype).to(device) for k, sign in enumerate(signs)]


def what_is_of_one_magnitude_comes_back(device, dtype):
    model = torch.nn.parallel.DistributedDataParallel(Linear(dtype, device), bucket_cap_mb=0.002)
    state = OneBit()
    model.register_comm_hook(state, one_bit_hook)
    for step in range(STEPS):
        expected = gradients(step, dtype, device)
        model.zero_grad()
        model(expected).backward()
        for weight, gradient in zip(model.module.weights, expected):
            torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=0)
    # Several buckets, of which each has the parameters of the last arrangement.
    assert len(state.handles) > 1
    assert sum(sum(sizes) for _, sizes, _ in state.handles.values()) == sum(p.numel() for p in model.parameters())
    elements = STEPS * sum(p.numel() for p in model.parameters())
    assert state.elements == elements
    return state


def ranks_that_differ_end_alike_and_errors_arrive(device):
    """What a rank is given follows the mean of all, summed over the steps; without errors it would not."""
    world, rank, steps = dist.get_world_size(), dist.get_rank(), 200
    torch.manual_seed(1)
    fixed = torch.rand(world, 3000) * 2 - 1
    received = {}
    for error in ddp_hook.ERROR_FLOAT32, ddp_hook.ERROR_NONE:
        weight = torch.nn.Parameter(torch.zeros(3000, device=device))
        model = torch.nn.Module()
        model.weight, model.forward = weight, lambda gradient, weight=weight: (weight * gradient).sum()
        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(OneBit(error=error), one_bit_hook)
        total = torch.zeros(3000, device=device)
        for _ in range(steps):
            weight.grad = None
            model(fixed[rank].to(device)).backward()
            total += weight.grad
        largest = total.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert torch.equal(largest, total)  # on every rank, so they are the same
        received[error] = total.cpu() / steps
    kept, lost = ((mean - fixed.mean(0)).abs().max().item() for mean in received.values())
    assert kept < 0.1 and lost > 0.5, (kept, lost)


def a_failed_exchange_is_raised(state):
    class Bucket:
        def __init__(self):
            self.parameter = torch.zeros(100)

        def index(self):
            return 99

        def parameters(self):
            return [self.parameter]

        def buffer(self):
            return self.parameter

    bucket, collective = Bucket(), dist.all_to_all_single
    state.run(bucket)

    def fail(*_, **__):
        raise OSError("the network is down")

    dist.all_to_all_single = fail
    try:
        state.run(bucket)
    except RuntimeError as error:
        assert "returned 1" in str(error) and "the network is down" in str(error.__cause__)
    else:
        raise AssertionError("no error")
    finally:
        dist.all_to_all_single = collective


def what_is_at_a_pointer_is_exchanged(state, device):
    """The two functions of a transport, on memory of a device."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sent = torch.arange(world * 48, dtype=torch.uint8, device=device) + rank
    received = [torch.zeros_like(sent) for _ in range(2)]
    where = Device(CUDA, device.index) if device.type == "cuda" else Device(CPU, 0)
    before = state.sent
    assert state.functions[0](None, sent.data_ptr(), received[0].data_ptr(), 48, where, None) == 0
    assert state.functions[1](None, sent.data_ptr(), received[1].data_ptr(), 48, where, None) == 0
    assert state.sent - before == 2 * (world - 1) * 48
    whole = torch.arange(world * 48, dtype=torch.uint8)
    for k in range(world):
        mine = slice(rank * 48, rank * 48 + 48)
        assert torch.equal(received[0][48 * k : 48 * k + 48].cpu(), whole[mine] + k)
        assert torch.equal(received[1][48 * k : 48 * k + 48].cpu(), whole[:48] + k)


def run(rank, world, backend, on, folder):
    torch.set_num_threads(1)
    device = torch.device(on, rank if backend == "nccl" else 0) if on == "cuda" else torch.device("cpu")
    if on == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        for dtype in ddp_hook.DTYPES:
            state = what_is_of_one_magnitude_comes_back(device, dtype)
        ranks_that_differ_end_alike_and_errors_arrive(device)
        if backend == "nccl" or on == "cpu":
            what_is_at_a_pointer_is_exchanged(state, device)
        if backend == "nccl":  # which knows no host memory; a handle is made of some
            what_is_at_a_pointer_is_exchanged(state, torch.device("cpu"))
        if backend == "gloo" and on == "cpu":
            a_failed_exchange_is_raised(state)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others would wait for this rank
    dist.destroy_process_group()
    os._exit(0)  # threads of PyTorch's may abort a process whose interpreter ends


@pytest.mark.parametrize("world, backend, on", [(2, "gloo", "cpu"), (2, "gloo", "cuda"), (1, "nccl", "cuda")])
def test_a_bucket_becomes_its_mean_over_the_ranks(world, backend, on, tmp_path, monkeypatch):
    if on == "cuda" and not (has_cuda() and torch.cuda.is_available()):
        pytest.skip("no CUDA device")
    if backend == "nccl":
        world = max(world, min(torch.cuda.device_count(), 4))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(run, (world, backend, on, str(tmp_path)), world)


def test_what_it_declares_is_what_the_client_and_the_header_say():
    from gradcodec import _abi

    def layout(struct):
        fields = [(name, getattr(struct, name)) for name, *_ in struct._fields_]
        return [(name, field.offset, field.size) for name, field in fields]

    for name in "DLTensor", "Device", "DType":
        assert layout(getattr(ddp_hook, name)) == layout(getattr(_abi, name))
    assert layout(ddp_hook.Options) == layout(_abi.CodecOptions)
    assert ctypes.sizeof(ddp_hook.Transport) == 40
