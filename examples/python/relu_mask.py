"""ReLU that keeps one bit per element for its backward pass; torch.relu keeps the activation.

    python3 examples/python/relu_mask.py

The gradient is bit-identical to torch.relu's, including infinities, zeros of either sign and NaN; only the payload of a
16-bit NaN may differ, because torch's CPU loops change it. It saves memory where no other layer keeps the activation:
before dropout, an addition, or an average pooling. A linear layer or a convolution directly after it keeps its input,
the same tensor: nothing is saved there. Needs what torch_ops.py needs.
"""

import sys

import torch
from torch import nn

import torch_ops


class PackedRelu(torch.autograd.Function):
    """torch.relu passes a gradient where not (y <= 0), also where y is NaN; y > 0 would be different there."""

    @staticmethod
    def forward(ctx, x):
        y = torch.relu(x)
        ctx.save_for_backward(torch.ops.gradcodec.pack_truth(y <= 0))
        ctx.shape = y.shape
        return y

    @staticmethod
    def backward(ctx, gradient):
        (blocked,) = ctx.saved_tensors
        return gradient.masked_fill(torch.ops.gradcodec.unpack(blocked, ctx.shape, torch.bool), 0)


def packed_relu(x):
    return PackedRelu.apply(x)


class FeedForward(nn.Module):
    """The block of a transformer with ReLU and dropout, as in T5."""

    def __init__(self, relu, width=256, p=0.1):
        super().__init__()
        self.widen, self.narrow, self.relu, self.p = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), relu, p

    def forward(self, x):
        return self.narrow(nn.functional.dropout(self.relu(self.widen(x)), self.p))


def saved_bytes(model, x):
    """Returns the bytes that a step keeps for backward, each storage once, no parameters; and the gradient of x."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    kept = sum(storages.values())
    y.square().sum().backward()
    return kept, x.grad


def peak_bytes(model, x):
    """Returns the peak of torch's GPU memory in a step, in bytes, minus the memory allocated before."""
    saved_bytes(model, x)  # the first step allocates permanent memory: workspaces, gradients
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    saved_bytes(model, x)
    return torch.cuda.max_memory_allocated() - before


def main():
    torch_ops.load()
    tokens, width = 2048, 256
    ok = True
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        for dtype in (torch.float32, torch.bfloat16):
            results = {}
            for name, relu in (("torch.relu", torch.relu), ("packed", packed_relu)):
                torch.manual_seed(1)
                model = FeedForward(relu, width).to(device, dtype)
                x = torch.randn(tokens, width, device=device, dtype=dtype)
                torch.manual_seed(2)  # the same dropout for both
                kept, gradient = saved_bytes(model, x)
                results[name] = kept, gradient, peak_bytes(model, x) if device == "cuda" else None
            (plain, gradient, peak), (packed, same, packed_peak) = results["torch.relu"], results["packed"]
            elements = tokens * 4 * width
            expected = elements * dtype.itemsize - elements // 8
            equal = torch.equal(gradient, same)
            peaks = "" if peak is None else f"; peak {peak}, packed {packed_peak}"
            print(f"{device} {dtype}: kept {plain} bytes, packed {packed}{peaks}; gradients equal: {equal}")
            ok &= equal and plain - packed == expected
    if not ok:
        print("WRONG: other gradients, or not the activation less a bit per element")
        sys.exit(1)


if __name__ == "__main__":
    main()
