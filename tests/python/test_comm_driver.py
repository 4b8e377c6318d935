"""The compressed all-reduces on CUDA, on a driver that runs the kernels themselves on the host, lane by lane: ranks that
share a card, held to DeepSpeed's formula in NumPy."""

import pytest

from test_codec_driver import run_codec

WORLD = """
from comms import World, reference, shards

def errors_of(world, n):
    return [np.zeros(n, "f4") for _ in range(world)], [np.zeros(s.stop - s.start, "f4") for s in shards(n, world)]

def filled(server, n, world):
    whole = lib.gc_shard_elements(n, world)
    return np.concatenate([server, np.full(whole - server.size, 7, "f4")])
"""


def run_comm(script):
    run_codec(f"exec({WORLD!r})\n" + script)


@pytest.mark.parametrize("over", ["'group'", "'board'", "'board', 1"])
def test_ranks_on_one_card_compute_deepspeeds_formula(over):
    run_comm(f"""
place, rng = Place(), np.random.default_rng(3)
for size in 1, 2, 3:
    with World(size, {over}) as world:
        for n in 9000, 7, 1025, 20_003:
            workers, servers = errors_of(size, n)
            put_workers = [place.put(w) for w in workers]
            put_servers = [place.put(filled(s, n, size)) for s in servers]
            for step in range(3):
                buffers = [rng.standard_normal(n).astype("f4") for _ in range(size)]
                if step == 1:
                    buffers[-1][n // 2] = [np.inf, np.nan][size % 2]
                put = [place.put(b) for b in buffers]
                out, workers, servers = reference(buffers, workers, servers)

                def run(rank):
                    call("gc_compressed_allreduce", world.comms[rank], put[rank].view, put_workers[rank].view,
                         put_servers[rank].view, None)

                world.each(run)
                for rank in range(size):
                    same(place.get(put[rank]), out, f"{{n}}, {{step}}: buffer of {{rank}}")
                    same(place.get(put_workers[rank]), workers[rank], f"{{n}}, {{step}}: worker error of {{rank}}")
                    same(place.get(put_servers[rank]), filled(servers[rank], n, size), f"{{n}}, {{step}}: server error")
    assert not fake.fake_events() and not fake.fake_pinned(), (fake.fake_events(), fake.fake_pinned())
""")
