"""examples/python/relu_mask.py against torch.relu: the same gradients, to the bit, from one bit per element."""

import pytest
import relu_mask
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 6e-8, -6e-8, 1e-45, -1e-45)


def bits(x):
    """Returns the values as integers: -0 is not 0, and NaN is equal to itself. All NaN of 16 bits become the same:
    torch's CPU loops go through float32 and write another NaN (0xffff in bfloat16) in some elements, not in others."""
    x = x.contiguous()
    if x.dtype.itemsize == 2:
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return x.view(INTEGER[x.dtype.itemsize])


def gradients(relu, x, upstream):
    x = x.detach().requires_grad_()
    y = relu(x)
    y.backward(upstream)
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_bit_identical_to_torch(ops, device, dtype):
    # Puts every special value before and after every other one, in the vector loops of the CPU and in their tails.
    special = torch.tensor(SPECIAL, device=device, dtype=dtype)
    x = special.repeat_interleave(len(special)).repeat(7)
    upstream = special.repeat(len(special)).repeat(7)
    for ours, theirs in zip(gradients(relu_mask.packed_relu, x, upstream), gradients(torch.relu, x, upstream)):
        assert torch.equal(bits(ours), bits(theirs))


def test_derivatives_match_finite_differences(ops):
    x = torch.randn(37, dtype=torch.float64)
    x += x.sign()  # away from the bend
    assert torch.autograd.gradcheck(relu_mask.packed_relu, x.requires_grad_())
    assert torch.autograd.gradgradcheck(relu_mask.packed_relu, x)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_block_keeps_a_bit_instead_of_an_activation(ops, device, dtype):
    kept = {}
    for relu in (torch.relu, relu_mask.packed_relu):
        torch.manual_seed(1)
        model = relu_mask.FeedForward(relu, width=64).to(device, dtype)
        x = torch.randn(128, 64, device=device, dtype=dtype)
        torch.manual_seed(2)
        kept[relu] = relu_mask.saved_bytes(model, x)
    elements = 128 * 4 * 64
    assert kept[torch.relu][0] - kept[relu_mask.packed_relu][0] == elements * dtype.itemsize - elements // 8
    assert torch.equal(bits(kept[torch.relu][1]), bits(kept[relu_mask.packed_relu][1]))


def test_the_peak_of_gpu_memory_is_lower(ops, cuda):
    peaks = {}
    for relu in (torch.relu, relu_mask.packed_relu):
        # Four blocks: the memory that a block keeps for its backward pass is allocated while the next ones run forward.
        model = torch.nn.Sequential(*(relu_mask.FeedForward(relu, width=512) for _ in range(4))).to(cuda)
        peaks[relu] = relu_mask.peak_bytes(model, torch.randn(4096, 512, device=cuda))
        del model
    activation = 4096 * 4 * 512 * 4
    # The saving is at least what three of the four no longer keep. The last one's temporaries share the peak.
    assert peaks[torch.relu] - peaks[relu_mask.packed_relu] >= 3 * activation * 31 // 32 - activation


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_compiled(ops, device, backend):
    torch._dynamo.reset()
    compiled = torch.compile(relu_mask.packed_relu, backend=backend, fullgraph=True)
    x = torch.tensor(SPECIAL, device=device).repeat(9)
    upstream = torch.randn(x.shape, device=device)
    for ours, theirs in zip(gradients(compiled, x, upstream), gradients(torch.relu, x, upstream)):
        assert torch.equal(bits(ours), bits(theirs))
