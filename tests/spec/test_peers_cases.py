"""Ranks of a group that share a GPU, in one process, over its memory: 200 random cases, held to the bytes over callbacks on
the CPU."""

import pytest

import driver
import peer_cases
from card import Card

# Element counts of a case, together.
MOST = 300_000


@pytest.fixture(scope="module")
def card():
    driver.use(driver.primary())
    return Card(256 << 20)


# A new communicator for every 10 cases, with handles of other sizes one after the other on it.
@pytest.mark.parametrize("size, seeds", [(size, range(first, first + 10)) for size, count in ((2, 80), (4, 70), (8, 50))
                                         for first in range(0, count, 10)], ids=str)  # fmt: skip
def test_the_bytes_are_those_over_callbacks(card, size, seeds):
    card.start_again()
    streams = [driver.Stream() for _ in range(size)]
    most = MOST if seeds[0] % 20 else 5_000
    peer_cases.cases(seeds, size, card, most, streams=[stream.handle for stream in streams], clear=card.start_again)
    for stream in streams:
        stream.destroy()
