"""Loss of a transformer of 126 million weights by codec, on four GPUs: build/bench/convergence.json and a table.

    python3 bench/convergence.py --text FILE --of FOLDER          writes the C sources below FOLDER, up to 305 MB, to FILE
    python3 bench/convergence.py --text FILE --library lib/libgradcodec.so.0 [--only int8 float32]
    python3 bench/convergence.py --text FILE --library lib/libgradcodec.so.0 --size tiny --device cpu         a rehearsal

The model is trained on FILE byte for byte; the last twentieth is held out. docs/CODECS.md names the text. Each GPU has
one process. AdamW trains under DistributedDataParallel or FSDP2; OneBitAdam trains without either. All runs have one
learning rate and bfloat16 autocast; runs of a seed have the same first weights and the same batches. The transport does
not change the bytes, so peer memory stands for all with one level; `2 x 2` stands for two nodes of two GPUs, without
limited links. With fewer GPUs than ranks, ranks share a GPU and gloo takes the place of NCCL. A run that the JSON file
has is not run again.
"""

import argparse
import datetime
import hashlib
import math
import os
import pathlib
import statistics
import sys
import time
from collections import namedtuple

import accuracy
import nodes
from common import ROOT, commit, markdown, save

sys.path[:0] = [str(ROOT / "tests" / "multi_gpu")]

# `batch`: sequences of a step, of all ranks. `judged`: batches of unseen text, at each hundredth step and at the end.
Task = namedtuple("Task", "steps batch context width layers judged")
SIZES = {"full": Task(1500, 256, 1024, 896, 13, (2, 32)), "tiny": Task(20, 8, 32, 32, 1, (1, 2))}
RATE, DECAY, BETAS, WARM = 6e-4, 0.1, (0.9, 0.95), 0.15  # WARM: the part of the steps that 1-bit Adam warms up in

Run = namedtuple("Run", "codec ranks wrap", defaults=[0, "ddp"])  # `ranks`: of a node; 0: all are of one
RUNS = {
    "float32": Run(None), "int8": Run("int8"), "int4": Run("int4"), "mxfp8": Run("mxfp8"), "1-bit Adam": Run("onebit"),
    "mxfp4": Run("mxfp4"), "bf16": Run("bf16"), "int8, 2 x 2": Run("int8", 2), "int4, 2 x 2": Run("int4", 2),
    "FSDP2 int8, gather int8": Run("int8", 0, "fsdp2"),
}  # fmt: skip
SECONDS = 2000  # of a run on one GPU, at most


def collect(folder, most=305_000_000, largest=400_000):
    """Returns the C sources below a folder, ordered by the SHA-256 of their paths, without generated registers."""
    generated = "drivers/gpu/drm/amd/include", "drivers/gpu/drm/amd/display/dc/dml"
    names = sorted(
        (str(file.relative_to(folder)) for file in folder.rglob("*.[ch]") if file.is_file() and not file.is_symlink()),
        key=lambda name: hashlib.sha256(name.encode()).digest(),
    )
    text = bytearray()
    for name in names:
        content = (folder / name).read_bytes()
        if not name.startswith(generated) and len(content) <= largest:
            if len(text) + len(content) > most:
                break
            text += content
    return text


def begin(torch, model, task, seed):
    """Sets GPT-2's first weights, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for name, one in model.named_parameters():
        if one.dim() > 1 and name != "places":
            last = name.endswith(("join.weight", "dense.2.weight"))
            with torch.no_grad():
                one.copy_(torch.randn(one.shape, generator=generator) * 0.02 / (math.sqrt(2 * task.layers) if last else 1))
        elif name.endswith("bias"):
            torch.nn.init.zeros_(one)


def train(here, on, task, run, seed, text):
    """Trains, and returns the losses of a run: [step, of the training text, of unseen text], and the last one."""
    if run.ranks:
        os.environ["GRADCODEC_NODE"] = f"node{here.rank // run.ranks}"
    import gradcodec.torch
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    gpus = torch.cuda.device_count() if on == "cuda" else 0
    shared = 0 < gpus < here.world
    device = torch.device("cuda", here.rank % gpus) if gpus else torch.device("cpu")
    if on == "cuda":
        torch.cuda.set_device(device)
    store = {"init_method": f"file://{here.folder}/store", "rank": here.rank, "world_size": here.world}
    dist.init_process_group("nccl" if gpus and not shared else "gloo", **store)
    every = torch.from_file(str(text), size=text.stat().st_size, dtype=torch.uint8).to(device)
    seen, unseen = every.split([len(every) * 19 // 20, len(every) - len(every) * 19 // 20])
    share, places = task.batch // here.world, torch.arange(task.context + 1, device=device)

    def batch(of, number):
        generator = torch.Generator().manual_seed(number)
        begins = torch.randint(len(of) - task.context, (task.batch,), generator=generator)
        return of[begins[here.rank * share :][:share].to(device)[:, None] + places].long()

    def autocast():
        return torch.autocast(on, torch.bfloat16, enabled=on == "cuda")

    def judge(count):
        with torch.no_grad(), autocast():
            found = torch.stack([model(batch(unseen, 10**6 + n)) for n in range(count)]).mean()
        dist.all_reduce(found)
        return found.item() / here.world

    model = nodes.model_of(torch, task.width, task.layers, task.context)
    begin(torch, model, task, seed)
    model.to(device)
    parameters, compression, trained = sum(one.numel() for one in model.parameters()), None, model
    if on == "cuda":
        for layer in model.layers:
            layer.compile()
    if run.wrap == "fsdp2":
        for module in (*model.layers, model):
            fully_shard(module)
        compression = gradcodec.torch.shard(model, run.codec, gather="int8")
    elif run.codec != "onebit":
        # Ranks that share a GPU wait for a slice of its time at each barrier: one bucket has the fewest.
        buckets = {"bucket_cap_mb": 1024} if shared else {}
        trained = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **buckets)
        compression = run.codec and gradcodec.torch.compress(trained, run.codec)
    adam = {"lr": RATE, "betas": BETAS, "weight_decay": DECAY}
    if run.codec == "onebit":
        optimizer = gradcodec.torch.OneBitAdam(model.parameters(), warmup_steps=int(WARM * task.steps), **adam)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adam)
    curve, learnt, times = [], [], []
    for step in range(1, task.steps + 1):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = RATE * accuracy.rate_of(step, task.steps)
        optimizer.zero_grad()
        with autocast():
            loss = trained(batch(seen, seed * 10**5 + step))
        loss.backward()
        optimizer.step()
        learnt.append(loss.detach())
        if step % max(1, task.steps // 15) == 0:
            mean = torch.stack(learnt).mean()
            dist.all_reduce(mean)
            curve.append([step, mean.item() / here.world, judge(task.judged[0])])
            learnt.clear()
        times.append(time.perf_counter() - began)
    taken_back = optimizer.taken_back if run.codec == "onebit" else compression and compression.taken_back
    found = {"curve": curve, "loss": judge(task.judged[1]), "parameters": parameters, "taken_back": taken_back or 0}
    found |= {"ms": 1e3 * statistics.median(times), "topology": compression.topology if compression else None}
    if compression:
        compression.close()
    return {**found, "gpu": f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "CPU", "torch": torch.__version__}


def table(results):
    """Returns a table of the last loss of each run, by seed, and its curve on unseen text."""
    steps = [step for step, *_ in results[0]["curve"]]
    rows = []
    for name in RUNS:
        for one in (one for one in results if one["run"] == name):
            losses = [f"{loss:.4f}" for *_, loss in one["curve"]]
            rows.append([name, one["seed"], f"{one['loss']:.4f}", f"{one['ms']:.0f}", one["taken_back"], *losses[2::3]])
    return markdown(["run", "seed", "loss", "ms a step", "taken back", *(f"step {step}" for step in steps[2::3])], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", help="the library's file")
    parser.add_argument("--of", type=pathlib.Path, metavar="FOLDER", help="only writes the text")
    parser.add_argument("--text", type=pathlib.Path, required=True, help="what is learnt")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal over gloo")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build/bench/convergence.json")
    options = parser.parse_args()
    if options.of:
        return options.text.write_bytes(collect(options.of))
    if not options.library:
        parser.error("--library expected")
    os.environ |= {"GRADCODEC_LIBRARY": os.path.abspath(options.library), "NCCL_NVLS_ENABLE": "0"}
    import torch
    from ranks import RankError, Ranks

    gpus = min(options.ranks, torch.cuda.device_count() or options.ranks)
    task = SIZES[options.size]
    key = {"size": options.size, "ranks": options.ranks, "bytes": options.text.stat().st_size}
    document, failed = accuracy.kept_or_new(options.output, key), False
    document |= {"commit": commit(), "date": datetime.date.today().isoformat(), "task": task._asdict()}
    done = {(one["run"], one["seed"]) for one in document["results"]}
    for name in options.only:
        if (name, options.seed) in done:
            continue
        try:
            with Ranks(options.ranks) as ranks:
                about = options.device, task, RUNS[name], options.seed, options.text
                found = ranks.call(train, *about, seconds=SECONDS / gpus)[0]
        except RankError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        document["results"].append({"run": name, "seed": options.seed, **found})
        save(options.output, document)
        print(f"{name}, seed {options.seed}: loss {found['loss']:.4f}, {found['ms']:.0f} ms a step", flush=True)
    if document["results"]:
        print(f"\n{table(document['results'])}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
