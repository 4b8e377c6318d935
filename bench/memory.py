"""Memory of a training step by DistributedDataParallel, in bytes per weight: the most in steps 1 and 2, and what stays
after step 5.

    GRADCODEC_LIBRARY=... PYTHONPATH=python python3 bench/memory.py [--ranks 2] [--device cuda]

On the CPU it is host memory, over gloo; each block has its own mapping, so freed memory is not counted. With `--device
cuda` rank r trains on GPU r, over NCCL, and it is the memory in use on GPU 0 at the end of a step, by the driver: with
all that PyTorch keeps of the step, but without what this library has freed within it.
"""

import argparse
import os
import tempfile
import warnings

import torch
import torch.distributed as dist

CASES = ("plain", ""), ("int8", "none"), ("int4", "none"), ("int4", "bfloat16"), ("int4", "float32"), ("onebit", "float32")
WIDTH = {"cpu": 2048, "cuda": 8192}  # PyTorch's blocks of up to 20 MiB count little


def now(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def used():
    """Returns the most bytes in use since begin(), and the bytes in use now."""
    if not torch.cuda.is_initialized():
        return now("VmHWM"), now("VmRSS")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    return total - free, total - torch.cuda.mem_get_info()[0]


def begin():
    if not torch.cuda.is_initialized():
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets VmHWM


def train(rank, ranks, device, codec, error, folder):
    import gradcodec.torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
        torch.cuda.init()
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)

    def steps_of(model, inputs, steps):
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        compression = None if codec == "plain" else gradcodec.torch.compress(model, codec, error=error)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(steps):
            begin()
            model(torch.randn(2, inputs)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            yield used()
        if compression is not None:
            compression.close()

    list(steps_of(torch.nn.Linear(64, 64), 64, 3))  # what is loaded by then is not counted
    before = used()[1]
    width = WIDTH[device]
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(8)])
    weights = sum(one.numel() for one in model.parameters())
    found = [[(bytes - before) / weights for bytes in step] for step in steps_of(model, width, 5)]
    if rank == 0:
        print(f"{codec:8} {error:9}" + "".join(f"{one:8.1f}" for one in (found[0][0], found[1][0], found[4][1])), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    weights = 8 * WIDTH[options.device] ** 2 / 1e6
    print(f"{options.ranks} ranks, {options.device}, {weights:.1f} M weights in float32\ncodec    errors     step 1  step 2    stay")
    for codec, error in CASES:
        with tempfile.TemporaryDirectory() as folder:
            given = options.ranks, options.device, codec, error, folder
            torch.multiprocessing.spawn(train, given, options.ranks)


if __name__ == "__main__":
    main()
