"""Host memory of a training step by DistributedDataParallel over gloo, in bytes per weight: the most in steps 1 and 2, and
what stays after step 5. What freed blocks keep of the heap is left out: each has a mapping of its own.

    GRADCODEC_LIBRARY=... PYTHONPATH=python python3 bench/memory.py [RANKS]
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist

CASES = ("plain", ""), ("int8", "none"), ("int4", "none"), ("int4", "bfloat16"), ("int4", "float32"), ("onebit", "float32")


def now(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def train(rank, ranks, codec, error, folder):
    import gradcodec.torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)

    def steps_of(model, inputs, steps):
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        compression = None if codec == "plain" else gradcodec.torch.compress(model, codec, error=error)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(steps):
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # VmHWM begins anew
            model(torch.randn(2, inputs)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            yield now("VmHWM"), now("VmRSS")
        if compression is not None:
            compression.close()

    list(steps_of(torch.nn.Linear(64, 64), 64, 3))  # what is loaded by then is not counted
    before = now("VmRSS")
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(8)])
    weights = sum(one.numel() for one in model.parameters())
    found = [[(bytes - before) / weights for bytes in step] for step in steps_of(model, 2048, 5)]
    if rank == 0:
        print(f"{codec:8} {error:9}" + "".join(f"{one:8.1f}" for one in (found[0][0], found[1][0], found[4][1])), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print(f"{ranks} ranks, 33.6 M weights in float32\ncodec    errors     step 1  step 2    stay")
    for codec, error in CASES:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(train, (ranks, codec, error, folder), ranks)
