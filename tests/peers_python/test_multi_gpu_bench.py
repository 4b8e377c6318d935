"""bench/multi_gpu.py, rehearsed without a card; and the chain that it compares with, held to DeepSpeed's formula."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from peers import ROOT

torch = pytest.importorskip("torch")
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "python")]

import deepspeed_worker  # noqa: E402 the path comes first
from comms import reference  # noqa: E402

RANKS = 2


def test_a_rehearsal_measures_every_contender_on_every_rank(tmp_path):
    output = tmp_path / "multi_gpu.json"
    command = [sys.executable, str(ROOT / "bench/multi_gpu.py"), "--device", "cpu", "--ranks", str(RANKS)]
    command += ["--library", os.environ["GRADCODEC_LIBRARY"], "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A REHEARSAL" in done.stdout
    results = json.loads(output.read_text())
    assert results["about"]["rehearsal"] and len(results["sizes"]) == 2
    expected = {"handle float32", "handle bfloat16", "nccl float32", "nccl bfloat16", "plain float32", "deepspeed"}
    for row in results["sizes"]:
        assert set(row["samples"]) == expected and not row["failures"]
        assert {len(samples) for of_ranks in row["samples"].values() for samples in of_ranks} == {3}
        assert all(len(of_ranks) == RANKS for of_ranks in row["samples"].values())
        assert set(row["stages"]) == {"float32", "bfloat16"}

    page = tmp_path / "page.md"
    report = [sys.executable, str(ROOT / "bench/report.py"), str(output), "--page", str(page)]
    subprocess.run(report, check=True, capture_output=True)
    assert not page.exists()  # it is not for a rehearsal


class Exchange:
    """torch.distributed for threads."""

    def __init__(self, world):
        self.barrier, self.sent = threading.Barrier(world, timeout=60), [None] * world

    def all_gather(self, rank, rows, tensor):
        self.sent[rank] = tensor.clone()
        self.barrier.wait()
        for row, sent in zip(rows, self.sent):
            row.copy_(sent)
        self.barrier.wait()

    def all_to_all(self, rank, received, tensor):
        world = len(self.sent)
        rows = [torch.empty_like(tensor) for _ in range(world)]
        self.all_gather(rank, rows, tensor)
        received.copy_(torch.cat([row.view(world, -1)[rank] for row in rows]))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_chain_is_deepspeeds_formula(world):
    n, steps = 8 * 6 * 43, 5
    rng = np.random.default_rng(world)
    buffers = rng.standard_normal((steps, world, n)).astype(np.float32)
    exchange, found = Exchange(world), [None] * world

    def run(rank):
        class Ranks:
            all_gather = staticmethod(lambda rows, tensor: exchange.all_gather(rank, rows, tensor))
            all_to_all_single = staticmethod(lambda received, sent: exchange.all_to_all(rank, received, sent))

        chain = deepspeed_worker.AllReduce(
            torch, Ranks, world, n, "cpu", lambda bits: torch.from_numpy(deepspeed_worker.numpy_pack(bits)),
            lambda packed: torch.from_numpy(np.unpackbits(packed.numpy())), lambda: None,
        )  # fmt: skip
        found[rank] = []
        for step in range(steps):
            buffer = torch.from_numpy(buffers[step, rank].copy())
            chain.step(buffer)
            found[rank].append([x.numpy().copy() for x in (buffer, chain.worker_error, chain.server_error)])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    workers, servers = [np.zeros(n, np.float32)] * world, [np.zeros(n // world, np.float32)] * world
    for step in range(steps):
        out, workers, servers = reference(list(buffers[step]), workers, servers)
        for rank in range(world):
            # torch sums in another order: numbers are close, and so no sign may be close to changing.
            for got, expected in zip(found[rank][step], (out, workers[rank], servers[rank])):
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5, err_msg=f"step {step}, rank {rank}")
