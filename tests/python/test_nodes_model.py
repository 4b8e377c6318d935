"""Compares the model of the hierarchical all-reduce (docs/NUMERICS.md 12) with the example by hand, with sums in
float64, and with the flat model where the two compute the same."""

import pathlib
import re

import numpy as np
import pytest

from block_model import FORMATS, INT4, MEAN, SUM
from codec_model import ONEBIT, f32
from codecs_c import same
from nodes_model import NodesModel, world_model
from tiers import both

CODECS = ONEBIT, *FORMATS


def example():
    """Returns the page's example: the bytes of the block and of the reduced chunk, gradients, and values."""
    page = pathlib.Path(__file__).parents[2].joinpath("docs", "NUMERICS.md").read_text().split("\n## 12. ")[1]
    lines = re.findall(r"^    ((?:[0-9a-f]{2} +){15}[0-9a-f]{2})(?: |$)", page, re.M)
    rows = re.findall(r"^\| [0-3] \| \((.*?)\), \((.*?)\) \| \(", page, re.M)
    gradients = [[f32([float(x) for x in one.split(",")]) for one in row] for row in rows]
    values = re.findall(r"^\((.*?)\), \((.*?)\)\.$", page, re.M)[0]
    block, chunk = (bytes.fromhex("".join(some)) for some in (lines[:6], lines[6:]))
    return block, chunk, gradients, [f32([float(x) for x in one.split(",")]) for one in values]


OF_EXAMPLE = dict(codec=INT4, segments=[3, 4], raw=[0, 1], error=None)


def test_the_example_by_hand():
    block, chunk, gradients, values = example()
    model = NodesModel(2, 2, **OF_EXAMPLE)
    found = model.run(gradients, [None, 0.5, None, None])
    assert model.sent["values"][1][0] == block and model.sent["reduced"][0].tobytes() == chunk
    assert [one.step_3.stride for one in model.models] == [112, 80, 112, 80]
    assert [one.gathered_bytes for one in model.models] == [224] * 4
    for of_rank in found:
        for one, expected in zip(of_rank, values):
            same(one, expected, "values")


def kept(world):
    """Returns the sum of all worker errors as it counts in the result and the server errors, in float64."""
    model = world.models[0]
    layout = getattr(model, "step_3", model)
    divisor = 1 if layout.reduction == SUM else world.size
    total = sum(model.errors(0).astype(np.float64) for model in world.models) / divisor
    for model in world.models:
        total[model.shard_places()] += model.errors(1)
    return total, divisor


@pytest.mark.parametrize("nodes, ranks", both(quick=[(3, 2), (1, 4)], all=[(2, 2), (3, 2), (2, 4), (4, 3), (1, 4), (4, 1)]))
@pytest.mark.parametrize("codec", CODECS)
def test_results_and_errors_add_up_to_the_sum_of_the_gradients(codec, nodes, ranks):
    rng, segments = np.random.default_rng([codec, nodes, ranks]), [300, 0, 7, 1000]
    for reduction in (MEAN, SUM):
        options = dict(reduction=reduction, **({"raw": [0, 0, 0, 1]} if codec in FORMATS else {}))
        world = world_model(nodes, ranks, codec=codec, segments=segments, **options)
        given, arrived, factors = np.zeros(sum(segments)), np.zeros(sum(segments)), [0.5, *[None] * (nodes * ranks - 1)]
        for _ in range(4):
            gradients = [[rng.standard_normal(n).astype(f32) for n in segments] for _ in range(nodes * ranks)]
            found = world.run(gradients, factors)
            weights = [1.0 if factor is None else factor for factor in factors]
            given += sum(m * np.concatenate(g).astype(np.float64) for m, g in zip(weights, gradients)) / kept(world)[1]
            arrived += np.concatenate(found[0])
            for of_rank in found:
                for one, other in zip(of_rank, found[0]):
                    same(one, other, "ranks")
        assert np.abs(given - arrived).max() > 1e-4
        assert np.abs(given - arrived - kept(world)[0]).max() < 4e-6
