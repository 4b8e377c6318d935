"""Ranks of a group that share a device, in one process, over its memory: random cases give the bytes that ranks over
callbacks give on the CPU."""

import pytest

import driver
import gpu
import peer_cases

# Element counts of a case, together; cases by the size of the world.
MOST = gpu.sized(card=300_000, quick=6000, all=6000)
CASES = [
    (2, gpu.sized(card=80, quick=6, all=20)), (4, gpu.sized(card=70, quick=4, all=16)), (8, gpu.sized(card=50, quick=2, all=8)),
]  # fmt: skip


# A new communicator for every 10 cases, with handles of other sizes one after the other on it.
@pytest.mark.parametrize("size, seeds", [(size, range(first, min(count, first + 10))) for size, count in CASES
                                         for first in range(0, count, 10)], ids=str)  # fmt: skip
def test_the_bytes_are_those_over_callbacks(memory, size, seeds):
    memory.start_again()
    streams = [driver.Stream() for _ in range(size)]
    most = MOST if seeds[0] % 20 else 5_000
    peer_cases.cases(seeds, size, memory, most, streams=[stream.handle for stream in streams], clear=memory.start_again)
    for stream in streams:
        stream.destroy()
