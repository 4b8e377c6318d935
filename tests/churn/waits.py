"""How long a rank still waits once another thread has aborted its communicator, by transport: the wait of another rank.

    python tests/churn/waits.py [--rounds N] [--over TRANSPORT] [--devices N]

Over a group, two nodes of two ranks each, and peer memory a rank is in a call that no other rank makes; over NCCL it
waits for what it has enqueued, too. GRADCODEC_DRIVERS is as for churn.py. Transport callbacks are their owner's to end.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import churn
import gradcodec
import numpy as np

N = 10_000


def communicators(library, over, devices):
    """Of the rank that waits, and of those that do not come; then what they are made of."""
    if over == "nccl":
        id = library.nccl_id()
        return together(2, lambda rank: library.nccl_world(id, rank, 2, rank)), []
    if over == "hierarchical":
        intra, inter = ([library.group(2) for _ in range(2)] for _ in range(2))
        parts = [(intra[node][rank], inter[rank][node]) for node in range(2) for rank in range(2)]
        return together(4, lambda rank: library.hierarchical(*parts[rank])), [comm for each in parts for comm in each]
    comms = library.group(2)
    if over == "peers":
        size = library.allreduce_peers_bytes("int8", [N], 2, error="float32")
        return together(2, lambda rank: library.open_peers(comms[rank], rank % devices, size)), comms
    return comms, []


def together(size, function):
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(function, range(size)))


def waited(library, over, devices):
    """Seconds from the beginning of the abort to the end of the wait."""
    comms, kept = communicators(library, over, devices)
    on_gpu = over in churn.ON_GPUS
    places = [(gradcodec.CUDA, rank % devices) if on_gpu else (gradcodec.CPU, 0) for rank in range(len(comms))]
    handles = together(len(comms), lambda rank: comms[rank].allreduce("int8", [N], error="float32", device=places[rank]))
    values, found = np.ones(N, np.float32), []
    values = library.tensor_to_device(values, places[0]) if on_gpu else values
    enqueued = threading.Event()

    def wait():
        status = gradcodec.Status.BUSY
        while status == gradcodec.Status.BUSY:  # it met the question below
            try:
                handles[0].run([values])
                enqueued.set()
                library.tensor_to_device(values, (gradcodec.CPU, 0))  # waits for the GPU
                status = gradcodec.Status.OK
            except gradcodec.GradCodecError as failure:
                status = failure.status
        found.append(time.perf_counter())
        assert status in (gradcodec.Status.OK, gradcodec.Status.COMM), status

    def is_within():
        try:
            handles[0].commit()  # without a step it does nothing
        except gradcodec.GradCodecError as failure:
            return failure.status == gradcodec.Status.BUSY
        return False

    thread = threading.Thread(target=wait)
    thread.start()
    while not (enqueued.is_set() or is_within()):
        pass
    began = time.perf_counter()
    comms[0].abort()
    thread.join()
    for comm in comms[1:]:
        comm.abort()
    for owner in (*handles, *comms, *kept):
        owner.close()
    return found[0] - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--over", choices=("group", "hierarchical", *churn.ON_GPUS))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--devices", type=int, default=2, help="GPUs")
    given = parser.parse_args()
    churn.use_drivers(given.devices)
    churn.load_nccl()
    library = gradcodec.GradCodec()
    with_gpus = churn.ON_GPUS if os.environ.get("GRADCODEC_DRIVERS") else ()
    for over in [given.over] if given.over else ["group", "hierarchical", *with_gpus]:
        times = [1000 * waited(library, over, given.devices) for _ in range(given.rounds)]
        print(f"{over}: a wait ends {statistics.median(times):.2f} ms after an abort, {max(times):.2f} ms at most, "
              f"of {given.rounds}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
