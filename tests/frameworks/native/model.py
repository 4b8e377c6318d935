"""Tensors of every kind, and the result of packing them: NumPy's packbits."""

import numpy as np
import torch

UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
TRUTHS = (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Conversions of a contiguous tensor to other strides.
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "every other": lambda x: x[1::2, ::3],
    "a column": lambda x: x[:, 5],
    "repeated": lambda x: x[0].expand(3, -1),
    "one element": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
    "permuted": lambda x: x.view(1, 3, 9, 37).permute(0, 2, 3, 1),
}


def floats(dtype, device, layout="contiguous"):
    """Returns 27 x 37 values around zero, with every special one."""
    x = torch.randn(27, 37, generator=torch.Generator().manual_seed(7))
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, -1.0])
    x.view(-1)[: len(special)] = special
    return LAYOUTS[layout](x.to(device, dtype))


def integers(dtype, device, layout="contiguous"):
    """Returns 27 x 37 values: most are zero, the others have bits in one byte, not always the lowest."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(0, 3, (27, 37), generator=generator)
    shift = 8 * torch.randint(0, dtype.itemsize, (27, 37), generator=generator)
    x = (x > 1) if dtype is torch.bool else ((x // 2) << shift).to(dtype)
    return LAYOUTS[layout](x.to(device))


def array(x):
    """Returns the values as a NumPy array. NumPy has no bfloat16; float32 holds it exactly."""
    x = x.detach().cpu()
    return (x.float() if x.dtype is torch.bfloat16 else x).numpy()


def signs(x):
    return ~(array(x) < 0)


def truths(x):
    return array(x) != 0


def chunks(bits, n_chunks):
    packed = np.packbits(bits.reshape(-1))
    size = -(-len(packed) // n_chunks)
    return np.pad(packed, (0, n_chunks * size - len(packed))).reshape(n_chunks, size)


def same(tensor, expected):
    return array(tensor).shape == expected.shape and (array(tensor) == expected).all()
