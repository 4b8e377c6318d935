"""Handles that use one-shot on CUDA, on a driver that runs the kernels on the host: the bytes of two-shot."""

import pytest

from test_comm_driver import HALVES, run_comm
from test_nccl import run_ranks

ONCE = f"""
exec({HALVES!r})
from codec_model import CORRUPT, PROPAGATE, ZERO
from comms import changed
"""


def test_without_peer_memory_the_one_shot_limit_of_two_ranks_is_4_times_larger():
    run_comm("""
place = Place()
for ranks, most in (2, 1 << 22), (3, 1 << 20):
    for n, exchanges in (most // ranks // 2, 1), (most // ranks, 2):  # of INT8: 65 bytes or so for 64 elements
        with codecs_c.Checked(place, codec=5, segments=[n], error=None, n_chunks=ranks) as codec:
            assert lib.gc_codec_exchanges(codec.handle) == exchanges, (ranks, n)
place.release()
""")


@pytest.mark.parametrize("ranks, most", [(2, 17 << 19), (3, 17 << 19), (4, 17 << 19), (5, 1 << 20)])
def test_over_peer_memory_up_to_four_ranks_send_8_912_896_bytes_by_one_shot(ranks, most):
    """Uses the memory of gc_allreduce_peers_bytes(). With one-shot the all-reduce sends the whole payload."""
    run_comm(f"""
exec({ONCE!r})
from capi import CodecOptions
place, made = Place(), [None] * {ranks}
# BF16: a chunk has a header of 64 bytes, and 64 bytes for each block of 32 elements.
blocks = {most} // {ranks} // {ranks} // 64 - 1
for n, exchanges in (32 * {ranks} * blocks, 1), (32 * {ranks} * blocks + 1, 2):
    given = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=3, n_elements=n, error=2, device=place.device)
    room = lib.gc_allreduce_peers_bytes(byref(given), {ranks}, 1)
    with Entered({ranks}, "peers", 0, room) as world:

        def create(rank):
            made[rank] = POINTER(AllReduce)()
            call("gc_allreduce_create", world.comms[rank], byref(given), byref(made[rank]))

        world.each(create)
        stride = 64 * (blocks + exchanges)
        for handle in made:
            assert lib.gc_allreduce_exchanges(handle) == exchanges, n
            assert lib.gc_allreduce_sent_bytes(handle, None) == ({ranks} - 1) * stride * ({ranks} if exchanges == 1 else 2)
            lib.gc_allreduce_free(handle)
""")


@pytest.mark.parametrize("inter, exchanges", [("group", 1), ("peers", 2)])
def test_two_nodes_use_one_shot_for_a_small_part_but_not_over_peer_memory(inter, exchanges):
    run_comm(f"""
exec({HALVES!r})
place = Place()
for codec in 1, 5:
    options = dict(codec=codec, segments=[300], error=None)
    with EnteredNodes([2, 2], "peers", {inter!r}) as world, CheckedRanks(world, place, **options) as ranks:
        assert [lib.gc_allreduce_exchanges(handle) for handle in ranks.handles] == [{exchanges}] * 4
""")


def test_peer_buffers_below_the_payload_size_use_two_shot():
    run_comm(f"""
exec({ONCE!r})
from capi import CodecOptions
place, sizes, launches = Place(), [3000, 7], {{}}
needed = {{}}
for n in 600_000, 3007:  # only two ranks exchange this many by one-shot
    for error in 0, 2:
        given = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=5, n_elements=n, error=error)
        needed[error] = lib.gc_allreduce_peers_bytes(byref(given), 2, 1)
    # Whole payloads have twice the bytes of chunks. The extra 4 KiB are for another segment.
    assert needed[2] > needed[0] + 4096, needed
for room in needed[0] + 4096, needed[2] + 4096:
    options = dict(codec=5, segments=sizes, error=None)
    with Entered(2, "peers", 0, room) as world, CheckedRanks(world, place, **options) as ranks:
        gradients = [[np.ones(n, "f4") for n in sizes] for _ in range(2)]
        ranks.run(gradients)
        put = [[place.put(g) for g in each] for each in gradients]
        before = fake.fake_launches()
        world.each(lambda rank: call("gc_allreduce_run", ranks.handles[rank], views(put[rank]), 2, None, None, None))
        launches[room] = fake.fake_launches() - before
# Two-shot is encode, reduce, decode and two launches for each of its two barriers; one-shot is two launches.
assert list(launches.values()) == [2 * (3 + 4), 2 * 2], launches
place.release()
""")


def test_a_unit_in_two_chunks_over_peer_memory_matches_the_model():
    """Tests also a block in one chunk that is not finite, and sums whose third, the mean, is denormal."""
    run_comm(f"""
exec({ONCE!r})
place, rng, n = Place(), np.random.default_rng(1), 5000  # chunks of 1696 or 1728 elements, units of 1024
for codec in 3, 4, 5, 6, 7:
    for policy in PROPAGATE, ZERO:
        options = dict(codec=codec, segments=[n], error=None, nonfinite=policy)
        with Entered(3, "peers") as world, CheckedRanks(world, place, **options) as ranks:
            for scale, at in (1, None), (2**-126, None), (1, 1100), (1, 2000):
                gradients = [[(rng.standard_normal(n) * scale).astype("f4")] for _ in range(3)]
                if at is not None:
                    gradients[1][0][at] = np.nan
                ranks.run(gradients)
                assert all(ranks.flags()) == (at is not None)
place.release()
""")


@pytest.mark.parametrize("of_chunk", [None, 0, 2])
def test_a_gpu_replaces_an_invalid_payload_by_zeros_on_every_rank(of_chunk):
    """Checks that a chunk of one corrupt payload is corrupt on all ranks; other chunks are unchanged, or zeros."""
    run_comm(f"""
exec({ONCE!r})
place, sizes = Place(), [1000, 50]
for codec in 1, 5, 7:
    options = dict(codec=codec, segments=sizes, error=None, nonfinite=TRANSACTIONAL)
    with Entered(3, "board") as world, CheckedRanks(world, place, **options) as ranks:
        gradients = [[np.ones(n, "f4") for n in sizes] for _ in range(3)]
        sound, world.board.before = world.board.before, changed(1, 4, {of_chunk})
        put = [[place.put(g) for g in each] for each in gradients]
        world.each(lambda rank: call("gc_allreduce_run", ranks.handles[rank], views(put[rank]), 2, None, None, None))
        got = [[place.get(tensor).copy() for tensor in each] for each in put]
        for each in got:
            for x, of_first in zip(each, got[0]):
                same(x, of_first, "values by rank")
        assert not got[0][0][:40].any() or {of_chunk} == 2, got[0][0]
        assert {of_chunk} != None or not any(x.any() for x in got[0])
        assert [lib.gc_comm_async_error(comm) for comm in world.comms] == [Status.CORRUPT] * 3
        for model in ranks.models:
            model.flags |= CORRUPT
            model.pending[0] = model.worker
        ranks.rollback()
        ranks.flags()
        world.board.before = sound
        ranks.run(gradients)
        ranks.commit()
    place.release()
""")


def test_the_bytes_over_nccl_match_the_model():
    run_ranks("""
for size in 2, 3:
    with Own(size) as world:
        for codec in 1, 3, 5, 7:
            same_as_the_model(world, codec=codec, error=None)
""")


def test_a_captured_run_neither_frees_nor_waits_between_launches():
    run_comm(f"""
exec({ONCE!r})
place, sizes = Place(), [3000, 7]
for codec in 1, 5:
    with Entered(3, "board") as world, CheckedRanks(world, place, codec=codec, segments=sizes, error=None) as ranks:
        gradients = [[np.full(n, rank + 1, "f4") for n in sizes] for rank in range(3)]
        out = ranks.run(gradients)
        put = [[place.put(g) for g in each] for each in gradients]
        free_all([held(1 << 30) for _ in range(4)])
        counts = lambda: (fake.fake_frees(), fake.fake_waits(), fake.fake_in_use(0))
        before = counts()
        fake.fake_capture(1)
        world.each(lambda rank: call("gc_allreduce_run", ranks.handles[rank], views(put[rank]), 2, None, None, None))
        fake.fake_capture(0)
        assert counts() == before, (before, counts())
        for rank, each in enumerate(put):
            for tensor, expected in zip(each, out):
                same(place.get(tensor), expected, f"rank {{rank}}")
    place.release()
""")


def test_a_refused_call_over_two_levels_exchanges_nothing():
    """Checks that a refused call makes no barrier over peer memory: others would take its next call for this one."""
    run_comm(f"""
exec({ONCE!r})
from comms import Nodes
place, sizes = Place(), [400]
assert lib.gc_prepare(place.device) == 0
with Nodes([2], "peers", "group") as world, CheckedRanks(world, place, codec=5, segments=sizes, error=None) as ranks:
    handle, double = ranks.handles[0], place.put(np.ones(1))
    for step in range(6):
        values = [views([place.put(np.full(400, 10 * step + 100 * rank, "f4"))]) for rank in range(2)]
        if step == 2:
            expect(lib.gc_allreduce_run(handle, values[0], 1, double.view, None, None), Status.UNSUPPORTED_DTYPE)
        if step == 4:
            for calls in range(10):
                status, name = failing(fake, calls, 999, lambda: lib.gc_allreduce_reset(handle, None))
                if "Memset" in name or "Launch" in name:
                    break
            assert status == Status.CUDA, name
            expect(lib.gc_allreduce_run(handle, values[0], 1, None, None, None), Status.CUDA, "gc_codec_reset")
            call("gc_allreduce_reset", handle, None)
        ranks.run([[np.full(400, 10 * step + 100 * rank, "f4")] for rank in range(2)])
    assert [lib.gc_comm_async_error(comm) for comm in world.comms] == [0, 0]
place.release()
""")
