"""A training step in a CUDA graph, compared with the same steps without one."""

import copy

import pytest
import torch
from gradcodec import torch as gc
from ranks import on_ranks, same
from torch.nn.parallel import DistributedDataParallel

WARM = 11  # steps before a capture, which DistributedDataParallel needs


class Training:
    """A model and a step that skips, on the device, gradients that are not finite."""

    def __init__(self, layers, codec, **options):
        self.model = DistributedDataParallel(copy.deepcopy(layers), bucket_cap_mb=0.25)
        self.compression = gc.compress(self.model, codec, **options)
        self.images = torch.zeros(32, 64)

    def step(self):
        self.model(self.images).square().mean().backward()
        with torch.no_grad():
            parameters = list(self.model.parameters())
            is_finite = torch.stack([one.grad.isfinite().all() for one in parameters]).all()
            for one in parameters:
                one -= 0.1 * torch.where(is_finite, one.grad, 0.0)

    def eager(self, images):
        self.images.copy_(images)
        self.model.zero_grad()
        self.step()


def replayed(codec, transport, native, steps):
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 256))
    generator = torch.Generator(torch.get_default_device()).manual_seed(torch.distributed.get_rank())
    batches = [torch.randn(32, 64, generator=generator) for _ in range(WARM + steps)]
    if torch.distributed.get_rank() == 0:
        batches[WARM + steps // 2][3, 5] = torch.inf
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager, captured = (Training(layers, codec, transport=transport, native=native) for _ in range(2))
        for batch in batches[:WARM]:
            eager.eager(batch)
            captured.eager(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    captured.model.zero_grad()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured.step()
    with torch.cuda.stream(stream):
        for batch in batches[WARM:]:
            eager.eager(batch)
            captured.images.copy_(batch)
            graph.replay()
        for each in (eager, captured):
            each.compression.commit()
            assert each.compression.taken_back == 1
        assert same([*eager.model.parameters()], [*captured.model.parameters()])
        assert same(eager.compression.state_dict(), captured.compression.state_dict())


@pytest.mark.parametrize("native", [False, True], ids=["python", "native"])
@pytest.mark.parametrize("transport", ["auto", "peers", "nccl"])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_captured_step_matches_an_uncaptured_one(codec, transport, native, tmp_path):
    on_ranks(("nccl", "cuda", 2), replayed, tmp_path, codec, transport, native, 1000)
