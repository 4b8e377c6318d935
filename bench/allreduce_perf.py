"""All-reduces by codec over peer memory and NCCL, beside NCCL's own and PyTorch's symmetric memory, like nccl-tests.

    python3 bench/allreduce_perf.py --library target/release/libgradcodec.so.0
    python3 bench/allreduce_perf.py --library ... -b 64K -e 300M -f 4 --codecs int8 "int4 errors" --over peers
    python3 bench/allreduce_perf.py --library ... --device cpu            a rehearsal over gloo

Runs one process per GPU. Sizes are numbers of elements (1K is 2^10). `int8` is gradcodec.torch.all_reduce();
`int8 errors` is run() of an AllReduce that keeps errors in the dtype of the values. Every size is timed eagerly, one
call from Python after another, and in a CUDA graph; `host` is the time until an eager call returns. A call's time is
the slowest rank's. All contenders of a size take turns. Inputs are finite random numbers and the reduction is the mean,
so that repeated in-place calls stay finite. `times` is NCCL's time of the same dtype and mode over the contender's.
NCCL runs without NVLS. The first 16M elements of every result are checked against NCCL's mean, and must be the same on
all ranks. `make allreduce-perf` runs this and writes build/bench/allreduce_perf.json.
"""

import datetime
import functools
import gc
import math
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from common import Library, about, count, markdown, number, parser, save, significant, size  # sets the path
from gradcodec._torch_states import objects_of_all

CODECS = "bf16", "mxfp8", "int8", "int4", "mxfp4", "int8 errors", "int4 errors", "onebit errors"
# Largest error of the mean of normal numbers, in norm: about twice the error of two roundings by the codec.
MOST_LOST = {"bf16": 0.01, "mxfp8": 0.1, "int8": 0.03, "int4": 0.35, "mxfp4": 0.4, "onebit": 1.2, "nccl": 0.01,
             "symmetric": 0.01}  # fmt: skip
LARGE = 300 * 2**20


# --- one rank ---------------------------------------------------------------------------------------------------------


class Contender:
    """`run()` is one call. `result()` returns the mean that it has made of `values`."""

    def __init__(self, name, inputs):
        import gradcodec.torch

        what, *rest = name.split()
        self.values, world, self.all_reduce = inputs.clone(), dist.get_world_size(), None
        self.result = lambda: self.values
        if what == "nccl":
            self.run = functools.partial(dist.all_reduce, self.values, dist.ReduceOp.AVG)
            if not inputs.is_cuda:  # gloo has no mean
                self.run = lambda: (dist.all_reduce(self.values), self.values.div_(world))
        elif what == "symmetric":
            self.make_symmetric(inputs, int(rest[0]), world)
        elif "errors" in rest:
            error = str(inputs.dtype).removeprefix("torch.")
            self.all_reduce = gradcodec.torch.AllReduce(inputs, what, error=error, transport=rest[-1])
            self.run = functools.partial(self.all_reduce.run, self.values)
        else:
            self.run = functools.partial(gradcodec.torch.all_reduce, self.values, what, transport=rest[-1])

    def make_symmetric(self, inputs, shots, world):
        """Makes PyTorch's all-reduces over symmetric memory, of a sum; values stay finite by a scale of 1 / world."""
        import torch.distributed._symmetric_memory as symmetric

        group, operators = dist.group.WORLD.group_name, torch.ops.symm_mem
        self.values = symmetric.empty(inputs.numel(), dtype=inputs.dtype, device=inputs.device)
        symmetric.rendezvous(self.values, group)

        def one_shot():
            self.sum = operators.one_shot_all_reduce(self.values, "sum", group)

        def two_shot():
            operators.two_shot_all_reduce_(self.values, "sum", group).mul_(1 / world)

        self.run = one_shot if shots == 1 else two_shot
        if shots == 1:
            self.result = lambda: self.sum / world

    def close(self):
        if self.all_reduce:
            self.all_reduce.close()


def agreed(group, function):
    """Calls a function on all ranks, and returns why it failed on one of them, or None."""
    why = None
    try:
        function()
    except Exception as error:
        why = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"[:300]
    return next(filter(None, objects_of_all(group, why)), None)


def measure(inputs, names, rounds, group):
    """Returns {contender: {mode: seconds of each round, of the slowest rank}}, and why contenders are missing."""
    on_gpu, elements = inputs.is_cuda, inputs.numel()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    aligning = torch.zeros(1, device=inputs.device)
    mean, made, failures, found = None, {}, {}, {}

    def begin(name):
        made[name] = Contender(name, inputs)
        made[name].values.copy_(inputs)
        made[name].run()
        wait()

    def verify(name):
        result = made[name].result()[: 2**24]
        checks = objects_of_all(group, int(result.view(torch.int16).to(torch.int64).sum()))
        assert len(set(checks)) == 1, "ranks end with different bytes"
        lost = float((result.float() - mean).norm() / mean.norm())
        assert lost <= MOST_LOST[name.split()[0]], f"{lost:.3g} of the mean is lost"

    def seconds_of(run, calls, in_graph):
        """Returns a round's seconds, in all and on the host: ranks begin together; a graph is enqueued ahead."""
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if in_graph:
                torch.cuda._sleep(1_000_000)  # cycles: about 500 us
            dist.all_reduce(aligning)
            start.record()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        host = time.perf_counter() - began
        if not on_gpu:
            return host, host
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3, host

    for name in names:
        why = agreed(group, lambda: begin(name))
        if why is None and name == "nccl":
            mean = made[name].result()[: 2**24].float().clone()
        why = why or agreed(group, lambda: verify(name))
        if why:
            failures[name] = why
            made.pop(name, None)
    calls = 50 if elements <= 2**22 else 10 if elements <= 2**24 else 2  # the first of them takes the host longest
    ways = {(name, "eager"): (one.run, calls) for name, one in made.items()}
    for name, one in made.items() if on_gpu else ():
        graph = torch.cuda.CUDAGraph()

        def capture():
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(calls):
                    one.run()

        def replay():
            graph.replay()
            wait()

        why = agreed(group, capture) or agreed(group, replay)  # no rank replays alone
        if why:
            failures[f"{name}, graph"] = why
        else:
            ways[name, "graph"] = graph.replay, 1
    for turn in range(rounds + 1) if ways else ():
        order = list(ways)
        first = turn % len(order)
        for name, mode in order[first:] + order[:first]:
            run, times = ways[name, mode]
            made[name].values.copy_(inputs)
            wait()
            dist.barrier(group)
            took = [seconds / calls for seconds in seconds_of(run, times, mode == "graph")]
            if turn:  # the first is to warm up
                for each, seconds in zip((mode, "host") if mode == "eager" else (mode,), took):
                    found.setdefault(name, {}).setdefault(each, []).append(seconds)
    for one in made.values():
        one.close()
    everywhere = objects_of_all(group, found)
    slowest = {
        name: {mode: [significant(max(each)) for each in zip(*(of[name][mode] for of in everywhere))] for mode in modes}
        for name, modes in found.items()
    }
    return slowest, failures


def rank(here, world, options, sizes, names, folder):
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", here) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # can be captured
    torch.set_num_threads(1)
    gc.disable()  # but between sizes: the destructor of symmetric memory fails in a capture
    wait = datetime.timedelta(seconds=100)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=store, rank=here, world_size=world, timeout=wait)
    group = dist.new_group(backend="gloo", timeout=wait)
    card = torch.cuda.get_device_name() if on_gpu else "no GPU"
    of = {"of": "all-reduce", "world": world, "on": options.device, "card": card, "torch": torch.__version__}
    results = {"about": about([Library(options.library)], **of), "rows": []}
    for elements in sizes:
        for dtype in options.dtypes:
            torch.manual_seed(here)
            inputs = torch.randn(elements, device=device).to(getattr(torch, dtype))
            seconds, failures = measure(inputs, names, options.rounds, group)
            gc.collect()
            results["rows"].append({"elements": elements, "dtype": dtype, "seconds": seconds, "failures": failures})
            if here == 0:
                save(options.output, results)
                for name, why in failures.items():
                    print(f"FAILED: {count(elements)}, {dtype}, {name}: {why}", file=sys.stderr)
    if here == 0:
        print(results["about"])
        for mode in ("eager", "host", "graph") if on_gpu else ("eager",):
            print_table(results["rows"], names, mode)
    sys.stdout.flush()
    dist.barrier(group)
    os._exit(any(row["failures"] for row in results["rows"]))  # threads of PyTorch's may abort an interpreter that ends


# --- all ranks --------------------------------------------------------------------------------------------------------


def print_table(rows, names, mode):
    """Prints time and speedup over NCCL of each contender, like nccl-tests: a line for each size and dtype."""
    lines = []
    for row in rows:
        times = {name: statistics.median(of[mode]) for name, of in row["seconds"].items() if mode in of}
        nccl = times.get("nccl", math.nan)
        cells = [f"{number(times[n] * 1e6)} ({nccl / times[n]:.2f})" if n in times else "-" for n in names]
        mib = row["elements"] * (4 if row["dtype"] == "float32" else 2) / 2**20
        lines.append([count(row["elements"]), row["dtype"], number(mib), *cells])
    print(f"\n{mode}: us a call (times NCCL)")
    print(markdown(["elements", "dtype", "MiB", *names], lines))


def main():
    options = parser(__doc__, "allreduce_perf.json")
    options.add_argument("-b", "--begin", type=size, metavar="N", help="elements of the smallest size; 64K")
    options.add_argument("-e", "--end", type=size, metavar="N", help="of the largest size; 300M")
    options.add_argument("-f", "--factor", type=int, default=4, help="between sizes; 4")
    options.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    options.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    options.add_argument("--over", nargs="+", choices=("peers", "nccl"), default=["peers", "nccl"])
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU")
    options.add_argument("--ranks", type=int, default=2, help="with --device cpu")
    options = options.parse_args()
    on_gpu = options.device == "cuda"
    world = torch.cuda.device_count() if on_gpu else options.ranks
    if not world:
        raise SystemExit("no CUDA device; --device cpu rehearses this without one")
    begin, end, factor = options.begin or 2**16, options.end or LARGE, options.factor
    if options.quick:
        options.codecs, options.rounds = ["int8", "int4"], 7
        begin, end, factor = options.begin or 2**18, options.end or 2**26, 16
    if not on_gpu:
        options.over = ["gloo"]
        begin, end, options.rounds = options.begin or 2**10, options.end or 2**12, min(options.rounds, 3)
    sizes = [min(begin, end)]
    while sizes[-1] * factor < end:
        sizes.append(sizes[-1] * factor)
    sizes += [end] if sizes[-1] < end else []
    names = ["nccl", *(f"symmetric {shots}" for shots in (1, 2) if on_gpu)]
    names += [f"{codec} {over}" for over in options.over for codec in options.codecs]
    os.environ.update(NCCL_NVLS_ENABLE="0", GRADCODEC_LIBRARY=os.path.abspath(options.library))
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(rank, (world, options, sizes, names, folder), world)
        except torch.multiprocessing.ProcessExitedException as ended:  # the rank has printed why
            raise SystemExit(ended.exit_code or 1) from None
        finally:
            print(f"\n{options.output}")


if __name__ == "__main__":
    main()
