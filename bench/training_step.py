"""A training step of bench/accuracy.py's transformer on all GPUs, with DistributedDataParallel, over NCCL and by
gradcodec.torch.compress(): build/bench/training_step.json and a table.

    python3 bench/training_step.py --library lib/libgradcodec.so.0 [--quick]
    python3 bench/training_step.py --library lib/libgradcodec.so.0 --hooks [25 50 100 200]
    python3 bench/training_step.py --library lib/libgradcodec.so.0 --device cpu      a rehearsal over gloo

A process a GPU. The step is whole: forward, backward, during which DDP exchanges its buckets, and SGD. `no exchange`
is the same without gradients being sent. float32: weights and gradients in float32, products in bfloat16; bfloat16:
all of it. Besides the model of accuracy.py there is one of 30 times its size, with few sequences and with many.
Contenders take turns, several steps at a time, which are enqueued without waiting; a turn's time is that of the
slowest rank. NCCL goes without NVLS. In the end all ranks must have the same weights. With `--hooks` the contenders are
INT8 with the hook in Python and in C++, with each bucket alone (0 MiB) and with exchanges of so many MiB, and PyTorch's
bf16 hook.
"""

import contextlib
import copy
import datetime
import os
import statistics
import sys
import time

import accuracy
from common import ROOT, commit, parser, save, table

sys.path[:0] = [str(ROOT / "tests" / "multi_gpu")]

# The name: the codec, None for DDP's own exchange, and what compress() is given besides.
PLAIN = {"no exchange": (None, {}), "NCCL": (None, {})}
CODECS, OF_PYTORCH = ("int8", "int4"), "bf16 hook"
CONTENDERS = {
    **PLAIN, **{f"{codec}, {over}": (codec, {"transport": over}) for over in ("peers", "nccl") for codec in CODECS}
}  # fmt: skip
REHEARSED = {**PLAIN, **{f"{codec}, gloo": (codec, {"transport": "gloo"}) for codec in CODECS}}
FULL = accuracy.SIZES["full"]
LARGE = FULL._replace(width=1280, layers=16)
# A model and how many sequences each rank has: of 8, the host takes longer to enqueue the step than the GPU to do it.
CASES = {"full": (FULL, 8), "large": (LARGE, 8), "busy": (LARGE, 64)}
TURNS, QUICK_TURNS, STEPS, FIRST = 15, 7, 5, 5  # FIRST: steps that are not counted; DDP arranges its buckets after one
SECONDS = 300  # for a model: ranks that take longer wait for each other for ever


class Training:
    def __init__(self, torch, model, codec, named, is_sent):
        import gradcodec.torch

        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.model, self.is_sent = model, is_sent
        if codec == OF_PYTORCH:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            model.register_comm_hook(None, bf16_compress_hook)
        is_ours = codec not in (None, OF_PYTORCH)
        self.compression = gradcodec.torch.compress(model, codec, **named) if is_ours else None
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.count = sum(parameter.numel() for parameter in model.parameters())

    def step(self, examples):
        self.optimizer.zero_grad()
        with contextlib.nullcontext() if self.is_sent else self.model.no_sync():
            loss = self.model(examples)
            loss.backward()
        self.optimizer.step()
        return loss


def measure(here, on, task, sequences, dtype_name, contenders, turns, steps):
    """Seconds a step of each turn, bytes that this rank sends in a step, and how many weights there are."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", here.rank) if on == "cuda" else torch.device("cpu")
    if on == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if not dist.is_initialized():
        store = {"init_method": f"file://{here.folder}/store", "rank": here.rank, "world_size": here.world}
        dist.init_process_group("nccl" if on == "cuda" else "gloo", **store)
    dtype, wait = getattr(torch, dtype_name), torch.cuda.synchronize if on == "cuda" else lambda: None
    made, sent, seconds = {}, {}, {}
    begin = accuracy.Transformer(task).module(torch, torch.Generator().manual_seed(1), device, dtype)
    for name, (codec, named) in contenders.items():
        made[name] = Training(torch, copy.deepcopy(begin), codec, named, name != "no exchange")
        seconds[name] = []
    generator = torch.Generator().manual_seed(here.rank)
    examples = torch.randint(256, (sequences, task.context + 1), generator=generator).to(device)
    for turn in range(-1, turns):
        names = list(made)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            training, count = made[name], FIRST if turn < 0 else steps
            before = training.compression.bytes_sent if training.compression else 0
            wait()
            here.gather(at=f"{name}, {dtype_name}")
            began = time.perf_counter()
            for _ in range(count):
                loss = training.step(examples)
            wait()
            took = (time.perf_counter() - began) / count
            if turn < 0:
                continue
            seconds[name].append(took)
            item = 2 if dtype_name == "bfloat16" or contenders[name][0] == OF_PYTORCH else 4
            of_ring = 2 * (here.world - 1) * item * training.count / here.world if training.is_sent else 0
            own = training.compression and (training.compression.bytes_sent - before) / count
            sent[name] = of_ring if own is None else own
            assert torch.isfinite(loss), f"{name}: the loss is {loss.item()}"
    for name, training in made.items():
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in training.model.parameters()])
        sums = here.gather(int(weights.view(torch.int16).to(torch.int64).sum()))
        assert len(set(sums)) == (here.world if name == "no exchange" else 1), f"{name}: weights differ between ranks"
    result = {"seconds": seconds, "bytes": sent, "weights": training.count}
    for training in made.values():
        if training.compression:
            training.compression.close()
    return {**result, "card": torch.cuda.get_device_name() if on == "cuda" else "no card", "torch": torch.__version__}


def print_table(results):
    """ms a step of the slowest rank, and what an exchange adds to the step without one; MB that a rank sends."""
    rows = [row for row in results["rows"] if "samples" in row]
    about, card = results["about"], rows[0]["card"] if rows else "-"
    print(f"{about['world']} x {card}{', A REHEARSAL' if about['rehearsal'] else ''}")
    lines = []
    for row in rows:
        took = {who: statistics.median(map(max, zip(*of_ranks))) * 1e3 for who, of_ranks in row["samples"].items()}
        for who, ms in took.items():
            sent = row["bytes"][who] / 1e6
            cells = f"{ms:.1f}", f"{ms - took['no exchange']:.2f}", f"{sent:.1f}", f"{took['NCCL'] / ms:.2f}"
            lines.append([f"{row['model']}, {row['dtype']}, {who}", *cells])
    table(["model, gradients, exchange", "ms", "added", "MB sent", "times NCCL"], lines)


def main():
    options = parser(__doc__, "training_step.json")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal without a card")
    options.add_argument("--hooks", metavar="MiB", type=float, nargs="*", help="the hook in Python and C++; sizes")
    options.add_argument("--ranks", type=int, default=2, help="with --device cpu")
    options = options.parse_args()
    os.environ["GRADCODEC_LIBRARY"] = os.path.abspath(options.library)
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    from allreduce_perf import cards
    from ranks import RankError, Ranks

    on = options.device
    world = cards() if on == "cuda" else options.ranks
    if world < 2:
        raise SystemExit("no two CUDA devices; --device cpu rehearses this without")
    contenders, cases, turns = CONTENDERS, CASES, QUICK_TURNS if options.quick else TURNS
    if on == "cpu":
        contenders, cases, turns = REHEARSED, {"tiny": (accuracy.SIZES["tiny"], 1)}, 2
    if options.hooks is not None:
        over = {"transport": "gloo" if on == "cpu" else "peers"}
        contenders = {**PLAIN, OF_PYTORCH: (OF_PYTORCH, {})}
        for language, native in ("Python", False), ("C++", True):
            for size in (0.0, *options.hooks):
                named = {**over, "native": native, "exchange_mib": size}
                contenders[f"int8, {over['transport']}, {language}, {size:g} MiB"] = "int8", named
    about = {"of": "training step", "world": world, "on": on, "rehearsal": on == "cpu", "quick": options.quick}
    about |= {"commit": commit(), "date": datetime.date.today().isoformat()}
    results, failed = {"about": about, "rows": []}, False
    for name, (task, sequences) in cases.items():
        for dtype in "float32", "bfloat16":
            row = {"model": name, "dtype": dtype, "task": task._asdict(), "sequences": sequences}
            try:  # in processes of their own: one that is broken breaks no other
                with Ranks(world) as ranks:
                    found = ranks.call(measure, on, task, sequences, dtype, contenders, turns, STEPS, seconds=SECONDS)
                row |= {"samples": {who: [of["seconds"][who] for of in found] for who in found[0]["seconds"]}}
                row |= {key: found[0][key] for key in ("bytes", "weights", "card", "torch")}
            except RankError as error:
                row["failed"], failed = error.short[:400], True
                print(error, file=sys.stderr)
            results["rows"].append(row)
            save(options.output, results)
    print_table(results)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
