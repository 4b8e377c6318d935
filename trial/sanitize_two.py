"""Throw-away: all-reduces with errors in one launch on two GPUs of one process, for compute-sanitizer: held to a group on the CPU."""
import pathlib, sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]
import numpy as np
from ctypes import POINTER
import capi, driver, gpu
from capi import AllReduce, byref, lib
from block_model import INT4, INT8, MXFP4, BF16
from card import Card
from codec_model import NONFINITE, ONEBIT, TRANSACTIONAL, ZERO
from codecs_c import Host, call, gradient, model_of, options_of, same, views
from comms import World


class OnCards(World):
    def each(self, function):
        def on_card(rank):
            driver.use(driver.primary(rank))
            return function(rank)
        return World.each(self, on_card)


def made_over(comms, options, devices, each):
    made = [POINTER(AllReduce)() for _ in comms]
    given = [options_of(model_of(**options, n_chunks=2, server=rank), device) for rank, device in enumerate(devices)]
    for one in given:
        one.server = 0
    each(lambda rank: call("gc_allreduce_create", comms[rank], byref(given[rank]), byref(made[rank])))
    return made


def on(rank):
    driver.use(driver.primary(rank))


assert driver.device_count() >= 2, driver.device_count()
cards = []
for rank in range(2):
    on(rank)
    cards.append(Card(1 << 20, exact=True))
    cards[-1].device = gpu.device(rank)
host, rng = Host(), np.random.default_rng(3)
more = sys.argv[1:] == ["more"]
with OnCards(2, "peers", devices=(0, 1), timeout=60_000, room=4 << 20) as world, World(2) as group:
    for codec, error, values, segments, policy in (
        (INT8, "float32", "float32", [20_003, 70, 4000], TRANSACTIONAL), (INT4, "bfloat16", "bfloat16", [65_536], None),
        (MXFP4, "float32", "bfloat16", [9000, 1], ZERO), (BF16, "float32", "float32", [8192, 3], None),
        (ONEBIT, "float32", "float32", [20_003, 70, 4000], TRANSACTIONAL), (ONEBIT, "bfloat16", "bfloat16", [65_536], None),
        (ONEBIT, "float32", "bfloat16", [9000, 1], ZERO), (ONEBIT, "bfloat16", "float32", [8192, 3], None),
        *(((INT8, "float32", "float32", [1 << 20], None), (ONEBIT, "float32", "float32", [1 << 20], None)) if more else ()),
    ):  # fmt: skip
        case = dict(codec=codec, segments=segments, error=error, values=values, results=values)
        if policy is not None:
            case |= dict(nonfinite=policy)
        ours = made_over(world.comms, case, [card.device for card in cards], world.each)
        theirs = made_over(group.comms, case, [host.device] * 2, group.each)
        for number in range(4):
            given = [[gradient(rng, n, values, False) for n in segments] for _ in range(2)]
            if number == 2:
                given[1][0][7] = dict(float32=np.inf, bfloat16=0x7F80)[values]
            put = []
            for rank in range(2):
                on(rank)
                put.append([cards[rank].put(array, values) for array in given[rank]])
                for tensor in put[-1]:
                    tensor.struct.dl_tensor.device = cards[rank].device
            expected = [[host.put(array, values) for array in of_rank] for of_rank in given]
            count = len(segments)
            world.each(lambda rank: call("gc_allreduce_run", ours[rank], views(put[rank]), count, None, None, None))
            group.each(lambda rank: call("gc_allreduce_run", theirs[rank], views(expected[rank]), count, None, None, None))
            for rank, card in enumerate(cards):
                on(rank)
                driver.synchronize()
                for got, right in zip(put[rank], expected[rank]):
                    same(card.get(got), host.get(right), f"{case} call {number}, rank {rank}")
        for one in *ours, *theirs:
            lib.gc_allreduce_free(one)
        for rank, card in enumerate(cards):
            on(rank)
            card.start_again()
        print("ok", case, flush=True)
print("done")
