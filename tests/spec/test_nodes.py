"""Tests of the hierarchical all-reduce against docs/NUMERICS.md 12 in NumPy (nodes_model): values, flags and errors, on
the CPU and the device, over each transport. tests/python/test_hierarchical.py has each step's bytes, and refusals."""

import os

import numpy as np
import pytest

import gpu

import layouts
from block_model import FORMATS, INT4, INT8
from capi import Status, lib
from codec_model import NONFINITE, ONEBIT, SIGN, TAKEN_BACK, TRANSACTIONAL, ZERO, f32
from codecs_c import Host, gradient, same, views
from comms import KEEP_NOTHING, OF_FAMILIES, CheckedRanks, Nodes, World, of_family, parts_of, steps
from nodes_model import FlatModel
from tiers import both

SEED = int(os.environ.get("NODES_SEED", "0"))
CPU_CASES = int(os.environ.get("NODES_CASES", both(quick=16, all=500)))
CASES = int(os.environ.get("NODES_CASES", gpu.sized(gpu=100, quick=16, all=200)))
BOARD_CASES = gpu.sized(gpu=100, quick=6, all=200)  # over callbacks, which are slow
ROOM = gpu.sized(gpu=64 << 20, quick=1 << 20, all=1 << 20)  # bytes of a rank's buffer, over peer memory
HOST_FLAGS = (1, 1)  # callbacks take host memory
# Transports within a node and between nodes.
WAYS = {
    "cpu-group": ("group", "group"), "cpu-board": ("board", "board"),
    "cuda-group": ("group", "group"), "cuda-host transport": ("board", "board", HOST_FLAGS),
    "cuda-peers within": ("peers", "board", HOST_FLAGS, ROOM), "cuda-peers": ("peers", "peers", (0, 0), ROOM),
}  # fmt: skip
# The random cases have all of them.
FEW_WAYS = gpu.sized(gpu=list(WAYS), quick=["cpu-group", "cuda-peers within"], all=list(WAYS))
SEGMENTS = (
    [0], [5], [1025], [0, 7, 0, 3000, 1], [8, 8, 8, 8], [0, 0], [2048, 1023, 65], [4003], [1] * 20, [], [1, 1, 1, 64, 64],
    [33, 0, 130, 2], [640],
)  # fmt: skip
SHAPES = [(nodes, ranks) for nodes in range(1, 5) for ranks in range(1, 5)]


class Way:
    """Place of operands, and worlds over one of WAYS."""

    def __init__(self, place, over):
        self.place, self.over = place, over

    def world(self, nodes, ranks):
        return Nodes([ranks] * nodes, *self.over)

    def flat(self, size):
        """Returns a flat world over the transport within a node."""
        within, _, *more = self.over
        return World(size, within, more[0][0] if more else 0, ROOM)

    def start_again(self):
        if not isinstance(self.place, Host):
            self.place.start_again()


@pytest.fixture(params=FEW_WAYS)
def over(request):
    if request.param.startswith("cpu"):
        return Way(Host(), WAYS[request.param])
    place = request.getfixturevalue("memory")
    place.start_again()
    return Way(place, WAYS[request.param])


def random_options(rng):
    codec, segments = int(rng.choice(KEEP_NOTHING)), list(SEGMENTS[rng.integers(0, len(SEGMENTS))])
    dtype = str(rng.choice(["float32", "float16", "bfloat16"]))
    return dict(
        codec=codec, segments=segments, values=dtype, results=dtype, nonfinite=int(rng.integers(0, 3)),
        error=[None, "float32", "float32", "bfloat16"][rng.integers(0, 4)], beta=float(f32(rng.choice([1.0, 0.95]))),
        **of_family(rng, codec, segments),
    )  # fmt: skip


def random_gradients(rng, size, options, special=False):
    return [[gradient(rng, n, options["values"], special) for n in options["segments"]] for _ in range(size)]


def random_factors(rng, size):
    """Returns None, or a factor for some of the ranks."""
    kind = rng.random()
    if kind < 0.5:
        return None
    some = [0.5, 2.0**-8, 3.0, -1.0, *([np.inf, np.nan, 0.0] if kind > 0.95 else [])]
    return [float(f32(rng.choice(some))) if rng.random() < 0.5 else None for _ in range(size)]


def random_rows(rng, nodes, ranks, n):
    """Returns worker errors of a world of some size, and server errors or None."""
    rows = int(rng.choice([1, nodes * ranks, nodes * ranks, 2, 3, 7]))
    workers, server = rng.standard_normal((rows, n)).astype(f32), rng.standard_normal(n).astype(f32)
    if n and rng.random() < 0.2:
        workers[rng.integers(0, rows), rng.integers(0, n)] = server[rng.integers(0, n)] = rng.choice(f32([np.nan, -np.inf, 3e38]))
    return workers, [None, server][rng.integers(0, 2)]


def one_case(way, seed):
    """Runs a few steps of a random handle on a random grid; compares every resulting byte."""
    nodes, ranks = SHAPES[seed % len(SHAPES)]
    rng, size = np.random.default_rng(seed), nodes * ranks
    options = random_options(rng)
    transactional = options["nonfinite"] == TRANSACTIONAL
    with way.world(nodes, ranks) as world, CheckedRanks(world, way.place, **options) as checked:
        for _ in range(3):
            way.start_again()
            gradients = random_gradients(rng, size, options, rng.random() < 0.3)
            factors, aligned = [random_factors(rng, size) for _ in "ge"], rng.random() < 0.7
            if rng.random() < 0.3:
                checked.all_gather(checked.reduce_scatter(gradients, *factors, aligned=aligned), aligned=aligned)
            else:
                checked.run(gradients, *factors, aligned=aligned)
            if transactional and rng.random() < 0.7:  # otherwise the next step commits
                checked.rollback() if rng.random() < 0.2 else checked.commit([None, np.array([1], np.int32)][rng.integers(0, 2)])
            checked.flags()
            if all(model.pending == [None, None] for model in checked.models):
                checked.errors()
                if options["error"] and rng.random() < 0.3:
                    checked.errors_in(*random_rows(rng, nodes, ranks, sum(options["segments"])))
                    checked.errors()
        if transactional:
            checked.commit()
        checked.flags()
        checked.errors()


@pytest.mark.parametrize("over", WAYS, indirect=True)
def test_random_worlds_match_the_specification(over):
    cases = CPU_CASES if isinstance(over.place, Host) else CASES
    cases = min(cases, BOARD_CASES) if "board" in over.over else cases
    print(f"NODES_SEED={SEED}, {cases} cases")
    for case in range(cases):
        seed = SEED + (case * 7 if "board" in over.over else case)  # different shapes, of 16
        with layouts.case(seed=seed, shape=SHAPES[seed % len(SHAPES)]):
            over.start_again()
            one_case(over, seed)


@pytest.mark.parametrize("nodes, ranks", both(quick=[(3, 2)], all=[(2, 2), (3, 2), (2, 4), (4, 3)]))
@pytest.mark.parametrize("codec, error", both(
    quick=[(ONEBIT, "bfloat16"), (INT4, "float32")],
    all=[(codec, error) for codec in KEEP_NOTHING for error in ("float32", "bfloat16")],
))  # fmt: skip
def test_errors_of_all_ranks_match_the_model_over_many_steps(over, codec, error, nodes, ranks):
    rng, segments = np.random.default_rng([codec, nodes, ranks]), [700, 0, 33, 2050]
    raw = dict(raw=[0, 0, 1, 0]) if codec in FORMATS else {}
    options = dict(codec=codec, segments=segments, values="float32", error=error, nonfinite=TRANSACTIONAL, **raw)
    with over.world(nodes, ranks) as world, CheckedRanks(world, over.place, **options) as checked:
        for step in range(gpu.sized(gpu=10, quick=5, all=10)):
            over.start_again()
            checked.run(random_gradients(rng, nodes * ranks, options))
            checked.commit(None if step % 4 else np.array([step == 4]))
            checked.errors()
        assert set(checked.flags()) == {TAKEN_BACK}


# --- one level --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes, ranks", both(quick=[(1, 2), (2, 1)], all=[(1, 1), (1, 2), (2, 1), (1, 4), (4, 1)]))
def test_one_node_or_one_rank_per_node_is_a_flat_world(over, nodes, ranks):
    """Compares with a flat world: the model, exchanges, bytes, parts."""
    rng, size = np.random.default_rng([nodes, ranks]), nodes * ranks
    for codec, error in ((ONEBIT, "float32"), (SIGN, None), (INT8, "float32"), (INT4, None)):
        over.start_again()
        options = dict(codec=codec, segments=[300, 0, 65], values="float32", error=error, nonfinite=TRANSACTIONAL)
        with (
            over.world(nodes, ranks) as world,
            over.flat(size) as flat,
            CheckedRanks(world, over.place, **options) as checked,
            CheckedRanks(flat, over.place, **options) as expected,
        ):
            assert isinstance(checked.model, FlatModel) and type(checked.model) is type(expected.model)
            for rank, (one, other) in enumerate(zip(checked.handles, expected.handles)):
                assert lib.gc_comm_rank(world.comms[rank]) == rank and lib.gc_comm_world_size(world.comms[rank]) == size
                assert lib.gc_allreduce_exchanges(one) == lib.gc_allreduce_exchanges(other)
                assert lib.gc_allreduce_sent_bytes(one, None) == lib.gc_allreduce_sent_bytes(other, None)
                for of in range(size):
                    assert [parts_of(one, of, which) for which in (0, 1)] == [parts_of(other, of, which) for which in (0, 1)]
            steps(rng, checked, options)


# --- errors from world to world ---------------------------------------------------------------------------------------

# Nodes, ranks per node; None: flat.
WORLDS = [(None, 4), (2, 2), (4, 1), (1, 4), (2, 3), (None, 6), (3, 2), (2, 2), (None, 2)]
WORLDS = gpu.sized(gpu=WORLDS, quick=[(None, 4), (2, 2), (3, 2), (None, 2)], all=WORLDS)
# Largest rounding relative to the numbers that are added: errors are rounded to their dtype, sums are float32.
ROUNDING = {"float32": 2.0**-20, "bfloat16": 2.0**-8}


def kept(workers, server, size, is_sum):
    """Returns the errors that a world keeps in total."""
    return workers.astype(np.float64).sum(axis=0) / (1 if is_sum else size) + server


@pytest.mark.parametrize("family, error", both(
    quick=[("onebit", "bfloat16"), ("int8", "float32"), ("mean", "float32"), ("sum", "bfloat16")],
    all=[(family, error) for family in OF_FAMILIES for error in ROUNDING],
))  # fmt: skip
def test_kept_errors_stay_constant_from_world_to_world(over, family, error):
    rng, segments, before = np.random.default_rng(6), [100, 0, 1500, 70], None
    options = dict(segments=segments, values="float32", error=error, **OF_FAMILIES[family])
    is_sum = family == "sum"
    for nodes, ranks in WORLDS:
        over.start_again()
        size = ranks * (nodes or 1)
        world_of = over.flat(ranks) if nodes is None else over.world(nodes, ranks)
        with world_of as world, CheckedRanks(world, over.place, **options) as checked:
            if before is not None:
                checked.run(random_gradients(rng, size, options))  # errors_in() replaces these errors
                checked.errors_in(*before[:2])
                after = *checked.errors(), size
                apart = np.abs(kept(*after, is_sum) - kept(*before, is_sum))
                largest = sum(kept(np.abs(workers), np.abs(server), of, is_sum) for workers, server, of in (before, after))
                assert (apart <= largest * ROUNDING[error]).all(), (nodes, ranks)
            for _ in range(3):
                checked.run(random_gradients(rng, size, options))
            before = *checked.errors(), size
            assert np.abs(before[0]).max() > 1e-4


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 7])
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_any_number_of_error_rows_is_imported_as_specified(over, family, rows):
    rng, segments = np.random.default_rng(rows), [100, 0, 1500, 70]
    for error in ("float32", "bfloat16"):
        with over.world(2, 2) as world, CheckedRanks(
            world, over.place, segments=segments, error=error, **OF_FAMILIES[family]
        ) as checked:
            workers, server = rng.standard_normal((rows, 1670)).astype(f32), rng.standard_normal(1670).astype(f32)
            checked.errors_in(workers, server)
            found, _ = checked.errors()
            if rows == 4:  # rows of a world of this size: a rank takes its node's rows; its own errors stay as they are
                checked.errors_in(found, None)
                same(checked.errors()[0], found, "errors of the same world")
            if rows == 1 and error == "float32":
                for rank, model in enumerate(checked.models):
                    own = model.worker_places()
                    raw = np.repeat(OF_FAMILIES[family].get("raw", [0] * 4), segments)[own].astype(bool)
                    same(found[rank][own], np.where(raw, f32(0), workers[0][own]), "the row as it is")
            checked.errors_in(None, server)
            checked.errors()
            checked.run(random_gradients(rng, 4, dict(values="float32", segments=segments)))
            checked.errors()


# --- what is not finite -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", KEEP_NOTHING)
def test_an_infinity_on_one_rank_takes_the_step_back_on_all_nodes(over, codec):
    rng, options = np.random.default_rng(5), dict(segments=[300, 2000], values="float32")
    handle = dict(codec=codec, nonfinite=TRANSACTIONAL, error="float32", **options)
    with over.world(2, 2) as world, CheckedRanks(world, over.place, **handle) as ranks:
        ranks.run(random_gradients(rng, 4, options))
        ranks.commit()
        before = ranks.errors()
        for wrong in ("gradient", "factor", "sum of a node"):
            over.start_again()
            gradients = random_gradients(rng, 4, options)
            if wrong == "gradient":
                gradients[1][0][17] = np.inf
            if wrong == "sum of a node":
                gradients[2][1][1999] = gradients[3][1][1999] = 3e38
            ranks.run(gradients, [None, None, np.nan, None] if wrong == "factor" else None)
            ranks.commit()
            assert ranks.flags() == [NONFINITE | TAKEN_BACK] * 4
            for one, other in zip(ranks.errors(), before):
                same(one, other, "errors of the step before")
        ranks.run(random_gradients(rng, 4, options))
        ranks.commit()
        assert ranks.flags() == [0] * 4


@pytest.mark.parametrize("codec", KEEP_NOTHING)
def test_the_policy_zero_replaces_non_finite_values_and_flags_them_everywhere(over, codec):
    rng, options = np.random.default_rng(8), dict(segments=[300, 2000], values="float32")
    with over.world(2, 2) as world, CheckedRanks(world, over.place, codec=codec, nonfinite=ZERO, **options) as ranks:
        for wrong in (np.nan, np.inf, -np.inf):
            gradients = random_gradients(rng, 4, options)
            gradients[3][0][299] = wrong
            found = ranks.run(gradients, [None, -1.0, None, np.inf] if wrong < 0 else None)
            assert all(np.isfinite(one).all() for one in found)
            assert ranks.flags() == [NONFINITE] * 4
        ranks.errors()


@pytest.mark.parametrize("over", ["cuda-host transport"], indirect=True)
def test_a_damaged_block_is_reported_on_all_ranks(over):
    """Damages the first byte that rank 1 sends to rank 0 of its node."""
    with over.world(2, 2) as world, CheckedRanks(world, over.place, codec=INT8, segments=[3000], values="float32") as ranks:
        damaged = lambda name, rank, sent: bytes([sent[0] ^ ((name, rank) == ("all_to_all", 1))]) + sent[1:]  # noqa: E731
        world.intra[0].board.before = damaged
        put = ranks.put([[np.ones(3000, f32)]] * 4)
        ranks.each("gc_allreduce_run", lambda rank: (views(put[rank]), 1, None, None))
        assert [over.place.get(of_rank[0]).size for of_rank in put] == [3000] * 4  # waits
        assert [lib.gc_comm_async_error(comm) for comm in world.comms] == [Status.CORRUPT] * 4
