"""What a worker did in DeepSpeed's compressed all-reduce (1-bit Adam and its kin), as operations of PyTorch.

Written from the formula, for comparison; none of DeepSpeed's code is here. With c = gradient + error, of N elements,

    s = ||c|| / sqrt(N),   error = c - s * sigma(c),   sigma(c): -1 where c < 0, otherwise +1

and the bits of c, most significant first, 0 where c < 0. It is what `compressed_allreduce` of DeepSpeed's 1-bit
optimizers did before it sent anything; torch computed, and CuPy packed. Commit edaa7221 (September 2026) is the last
that has it. `step` gets to sigma as it did, by many operations, each a kernel and a pass over memory; the bytes that
they read and write stand beside them, 100 an element in all. `lean` takes as few operations as PyTorch allows: 41.

The bits were then cut into chunks, which are views and cost nothing, and the stream was synchronized: a Worker does
neither. `AllReduce` is all of it, with the exchanges, and waits where they did.
"""

import math


class Worker:
    def __init__(self, torch, elements, device, pack):
        """`pack`: from a tensor of bools to bits, most significant first."""
        self.torch, self.pack, self.elements = torch, pack, elements
        self.c = torch.empty(elements, device=device)
        self.error = torch.zeros(elements, device=device)

    def compensate(self, gradient):
        """c, and its scale. DeepSpeed added to the gradient, which this leaves as it was for the next step."""
        self.torch.add(gradient, self.error, out=self.c)  # 12 bytes an element
        return self.torch.linalg.vector_norm(self.c) / math.sqrt(self.elements)  # 4

    def step(self, gradient):
        """The bits and the scale, which are what is sent."""
        scale = self.compensate(gradient)
        sigma = self.c.sign().add_(1).bool().float().sub_(0.5).mul_(2)  # 8 + 8 + 5 + 5 + 8 + 8
        self.error = self.c - scale * sigma  # 8 + 12
        return self.pack(self.c.sign_().add_(1).bool()), scale  # 8 + 8 + 5, and 1.125 for packing

    def lean(self, gradient):
        """The same, as few operations as there can be."""
        scale = self.compensate(gradient)
        negative = self.c < 0  # 5
        self.torch.sub(self.c, self.torch.where(negative, -scale, scale), out=self.error)  # 5 + 12
        return self.pack(negative.logical_not_()), scale  # 2, and 1.125 for packing


class AllReduce:
    """The mean over ranks, at one bit per element. With c = buffer + error as above, of every rank r, and W ranks:

        own shard of all ranks' bits:  d = sum of s_r / W * sigma(c_r), + server error;   t = ||d|| / sqrt(N / W)
        server error = d - t * sigma(d);   buffer = t_k * sigma(d_k) of each shard k

    `ranks` has all_to_all_single and all_gather as torch.distributed has them. `pack` and `unpack` are from tensors of
    bools to tensors of bytes and back to bytes that are 0 or 1; `wait` waits for the stream. The elements are a
    multiple of 8 * W.
    """

    def __init__(self, torch, ranks, world, elements, device, pack, unpack, wait):
        self.torch, self.ranks, self.world, self.pack, self.unpack, self.wait = torch, ranks, world, pack, unpack, wait
        self.worker_error = torch.zeros(elements, device=device)
        self.server_error = torch.zeros(elements // world, device=device)

    def make_small(self, c):
        """The bits of c, its scale, and what it loses. c is overwritten."""
        scale = self.torch.linalg.vector_norm(c) / math.sqrt(c.numel())
        error = c - scale * c.sign().add_(1).bool().float().sub_(0.5).mul_(2)
        bits = self.pack(c.sign_().add_(1).bool())
        self.wait()
        return bits, scale.view(1), error

    def make_large(self, bits, scales):
        """A row of values for each scale."""
        scales = self.torch.stack(scales).view(self.world, 1)
        return self.unpack(bits).view(self.world, -1).float().sub_(0.5).mul_(2).mul_(scales)

    def gather(self, tensor):
        rows = [self.torch.empty_like(tensor) for _ in range(self.world)]
        self.ranks.all_gather(rows, tensor)
        return rows

    def step(self, buffer):
        bits, scale, self.worker_error = self.make_small(buffer.add_(self.worker_error))
        received = self.torch.empty_like(bits)
        self.ranks.all_to_all_single(received, bits)
        mean = self.make_large(received, [s / self.world for s in self.gather(scale)]).sum(0)
        bits, scale, self.server_error = self.make_small(mean.add_(self.server_error))
        buffer.copy_(self.make_large(self.torch.cat(self.gather(bits)), self.gather(scale)).view(-1))


def numpy_pack(bits):
    """On the CPU."""
    import numpy as np

    return np.packbits(bits.numpy())


def cupy_pack(bits):
    """On CUDA, on CuPy's current stream, which is to be torch's too."""
    import cupy as cp
    import torch

    # As bytes, which every version of both exchanges.
    return cp.packbits(cp.from_dlpack(bits.view(torch.uint8)))
