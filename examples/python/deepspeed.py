"""Implements DeepSpeed's compressed_allreduce, with its two error tensors, at each step and in checkpoints.

    PYTHONPATH=python python3 examples/python/deepspeed.py

Four ranks, here threads, fit a linear model. Between steps each rank has its errors in two arrays of its own, as in
DeepSpeed's OnebitAdam. The library keeps the errors itself, too: without such arrays a program only calls `run`, and
`errors_out` for a checkpoint. See docs/ALLREDUCE.md, "Coming from DeepSpeed's compressed_allreduce".
"""

import threading

import numpy as np
from gradcodec import TRANSACTIONAL, GradCodec

gradcodec = GradCodec()
WORLD, ELEMENTS, STEPS = 4, 1000, 40


class CompressedAllReduce:
    """compressed_allreduce for buffers of n elements. Every rank creates one."""

    def __init__(self, comm, rank, world_size, n):
        self.allreduce = comm.allreduce("onebit", [n], nonfinite=TRANSACTIONAL)
        chunk = 8 * -(-(-(-n // 8)) // world_size)  # DeepSpeed fills n up until this is n / world_size
        self.first = min(n, rank * chunk)
        self.all_servers = np.zeros(n, np.float32)

    def __call__(self, buffer, worker_error, server_error):
        """Replaces the buffer by the mean over the ranks, and both errors by the new ones; server_error has
        `allreduce.shard_elements` elements. Returns False, with unchanged errors, if a rank's value was not finite."""
        self.all_servers[self.first : self.first + server_error.size] = server_error
        self.allreduce.errors_in(worker_error.reshape(1, -1), self.all_servers)
        self.allreduce.run([buffer])
        self.allreduce.commit()  # or rolls the step back, on all ranks
        self.allreduce.errors_out(worker_error, server_error)
        flags = np.zeros(1, np.uint32)
        self.allreduce.flags(flags)
        return not flags[0]


def train(comm, rank, checkpoint=None, stop=STEPS, bad_step=None):
    """Trains up to step `stop`; returns the rank's checkpoint, everything that the next step needs."""
    step = CompressedAllReduce(comm, rank, WORLD, ELEMENTS)
    if checkpoint is None:
        shard = step.allreduce.shard_elements
        checkpoint = {"step": 0, "weights": np.zeros(ELEMENTS, np.float32), "momentum": np.zeros(ELEMENTS, np.float32),
                      "worker_error": np.zeros(ELEMENTS, np.float32), "server_error": np.zeros(shard, np.float32)}  # fmt: skip
    state = {name: np.copy(value) for name, value in checkpoint.items()}
    target = np.random.default_rng(0).standard_normal(ELEMENTS).astype(np.float32)
    for number in range(int(state["step"]), stop):
        noise = np.random.default_rng([number, rank]).standard_normal(ELEMENTS).astype(np.float32)
        gradient = state["weights"] - target + np.float32(0.1) * noise
        if number == bad_step and rank == 1:
            gradient[7] = np.inf
        momentum = np.float32(0.9) * state["momentum"] + np.float32(0.1) * gradient
        if step(momentum, state["worker_error"], state["server_error"]):
            state["momentum"] = momentum
            state["weights"] -= np.float32(0.5) * momentum
        state["step"] = number + 1
    state["distance"] = np.linalg.norm(state["weights"] - target) / np.linalg.norm(target)
    step.allreduce.close()
    return state


def on_all_ranks(**options):
    """Runs `train` on all ranks and returns the results; `checkpoints`: initial checkpoint of each rank."""
    checkpoints, results = options.pop("checkpoints", [None] * WORLD), [None] * WORLD

    def work(rank, comm):
        results[rank] = train(comm, rank, checkpoints[rank], **options)

    threads = [threading.Thread(target=work, args=each) for each in enumerate(gradcodec.group(WORLD))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def same(one, other):
    return all(np.array_equal(a[name], b[name]) for a, b in zip(one, other) for name in a)


def main():
    whole = on_all_ranks()
    alike = all(np.array_equal(state["weights"], whole[0]["weights"]) for state in whole)
    print(f"after {STEPS} steps at one bit per element: {whole[0]['distance']:.2f} of the way are left")
    print(f"all ranks have the same weights: {alike}")
    saved = on_all_ranks(stop=STEPS // 2)
    resumed = on_all_ranks(checkpoints=saved)
    print(f"resumed from the checkpoints of step {STEPS // 2}, it ends with the same bytes: {same(resumed, whole)}")
    before, after = on_all_ranks(stop=20), on_all_ranks(stop=21, bad_step=20)
    kept = all(np.array_equal(a[name], b[name]) for a, b in zip(before, after) for name in ("worker_error", "server_error"))
    print(f"a step with an infinity on one rank leaves the errors of all as they were: {kept}")
    assert alike and same(resumed, whole) and kept and whole[0]["distance"] < 0.5


if __name__ == "__main__":
    main()
