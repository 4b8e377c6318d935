"""All-reduces by codec over peer memory and NCCL, beside NCCL's own and PyTorch's symmetric memory, like nccl-tests.

    python3 bench/allreduce_perf.py --library target/release/libgradcodec.so.0 [--against OLD.so]
    python3 bench/allreduce_perf.py --library ... -b 64K -e 300M -f 4 --codecs int8 int4 --dtypes bfloat16 --over peers
    python3 bench/allreduce_perf.py --library ... --device cpu            a rehearsal without a GPU

One process per GPU, on all GPUs. Sizes are numbers of elements (1K is 2^10). Every size is timed eagerly (from C, one
call after another) and in a CUDA graph; a call's time is that of the slowest rank. All contenders of a size take
turns. Inputs are finite random numbers and the reduction is the mean, so that repeated in-place calls stay finite.
`times` is NCCL's time of the same dtype and mode over the contender's. NCCL goes without NVLS. Every contender's
result is checked against NCCL's mean, and all ranks must end with the same bytes. `make allreduce-perf` runs it and
writes build/bench/allreduce_perf.json.
"""

import ctypes
import os
import statistics
import sys
import time
from ctypes import POINTER, byref, pointer

from common import (
    CPU, CUDA, DTYPES, ROOT, Library, about, c, count, number, parser, print_ratios, save, significant, table, timer,
)  # fmt: skip

sys.path[:0] = [str(ROOT / "tests" / "multi_gpu")]

CODECS = {"onebit": 1, "bf16": 3, "mxfp8": 4, "int8": 5, "int4": 6, "mxfp4": 7}
# Of the mean of normal numbers, in the norm of the difference: some twice what two roundings by the codec lose.
MOST_LOST = {"bf16": 0.01, "mxfp8": 0.1, "int8": 0.03, "int4": 0.35, "mxfp4": 0.4, "onebit": 1.2, "nccl": 0.01,
             "symmetric": 0.01}  # fmt: skip
NO_ERRORS, TIMEOUT_MS, SECONDS = 2, 20_000, 100
LARGE = 300 * 2**20


def size(text):
    """64K, 300M or a plain number."""
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def cards():
    found = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(byref(found)) else found.value


# --- one rank ---------------------------------------------------------------------------------------------------------


class Rank:
    """A GPU with PyTorch's NCCL; or, as a rehearsal, the CPU with gloo and exchanges over pipes."""

    def __init__(self, here, on, paths):
        import torch
        import torch.distributed as dist

        self.here, self.on, self.torch, self.dist = here, on, torch, dist
        store = dist.FileStore(os.path.join(here.folder, "torch"), here.world)
        if on == "cuda":
            torch.cuda.set_device(here.rank)
            self.queue = torch.cuda.Stream()
            torch.cuda.set_stream(self.queue)
        else:
            torch.set_num_threads(1)
        self.device = torch.device(on, here.rank) if on == "cuda" else torch.device("cpu")
        dist.init_process_group("nccl" if on == "cuda" else "gloo", store=store, rank=here.rank, world_size=here.world)
        self.stream = self.queue.cuda_stream if on == "cuda" else None
        self.timer, self.libraries, self.comms, self.kept = timer(), [Library(path) for path in paths], {}, []
        self.dl_device = c.DLDevice(CUDA if on == "cuda" else CPU, here.rank if on == "cuda" else 0)
        self.aligning = torch.zeros(1, device=self.device)

    def wait(self):
        if self.on == "cuda":
            self.queue.synchronize()

    def comm(self, library, over, room):
        """A communicator, kept. `room`: bytes of peer memory for the largest handle."""
        if (library, over) in self.comms:
            return self.comms[library, over]
        comm, functions = POINTER(c.gc_comm_t)(), library.functions
        if self.on == "cpu":
            exchange = dict(c.gc_transport_t._fields_)["all_to_all"]
            pair = [exchange(self.exchange(True)), exchange(self.exchange(False))]
            self.kept += pair
            size = ctypes.sizeof(c.gc_transport_t)
            transport = c.gc_transport_t(size, self.here.rank, self.here.world, 0, None, *pair)
            library.check(functions.gc_comm_from_transport(byref(transport), byref(comm)))
        elif over == "nccl":
            options = c.gc_nccl_options_t(ctypes.sizeof(c.gc_nccl_options_t))
            id = (ctypes.c_uint8 * 128)()
            if self.here.rank == 0:
                library.check(functions.gc_comm_nccl_id(byref(options), id))
            id = (ctypes.c_uint8 * 128)(*self.here.gather(bytes(id))[0])
            place = id, self.here.rank, self.here.world, self.dl_device
            library.check(functions.gc_comm_from_nccl_id(byref(options), *place, byref(comm)))
        else:
            parent = self.comm(library, "nccl", 0)
            given = ctypes.c_int64(room), ctypes.c_uint32(TIMEOUT_MS)
            library.check(functions.gc_comm_open_peers(parent, self.dl_device, *given, byref(comm)))
        self.comms[library, over] = comm
        return comm

    def exchange(self, is_all_to_all):
        def run(_, send, recv, size, device, stream):
            try:
                blocks = self.here.gather(ctypes.string_at(send, size * (self.here.world if is_all_to_all else 1)))
            except Exception:  # ctypes would print it, and return 0
                return 1
            first = self.here.rank * size if is_all_to_all else 0
            ctypes.memmove(recv, b"".join(block[first : first + size] for block in blocks), self.here.world * size)
            return 0

        return run

    def options(self, codec, dtype, elements):
        code, bits, _ = DTYPES[dtype]
        options = c.gc_codec_options_t(ctypes.sizeof(c.gc_codec_options_t), CODECS[codec], self.dl_device)
        options.values = c.DLDataType(code, bits, 1)
        options.error = {"float32": 0, "bfloat16": 1}[dtype] if codec == "onebit" else NO_ERRORS
        options.n_elements = elements
        return options

    def room(self, library, codecs, dtypes, most):
        """Bytes of peer memory for any handle of up to `most` elements."""
        if self.on == "cpu":
            return 0
        needed = library.functions.gc_allreduce_peers_bytes
        needed.restype = ctypes.c_int64
        world = ctypes.c_int32(self.here.world)
        sizes = {most, *(2**k for k in range(10, 31) if 2**k < most)}  # one exchange may need more than two
        options = (self.options(codec, dtype, n) for codec in codecs for dtype in dtypes for n in sizes)
        return max(needed(byref(each), world, 1) for each in options)


class Ours:
    """gc_allreduce_run() of a handle, called from C."""

    def __init__(self, rank, library, codec, dtype, over, values, room):
        self.rank, self.library, self.values = rank, library, values
        self.handle = POINTER(c.gc_allreduce_t)()
        options = rank.options(codec, dtype, values.numel())
        comm = rank.comm(library, over, room)
        library.check(library.functions.gc_allreduce_create(comm, byref(options), byref(self.handle)))
        code, bits, _ = DTYPES[dtype]
        shape = (ctypes.c_int64 * 1)(values.numel())
        self.view = c.DLTensor(values.data_ptr(), rank.dl_device, 1, c.DLDataType(code, bits, 1), shape, None, 0)
        self.views = (POINTER(c.DLTensor) * 1)(pointer(self.view))
        self.call = library.call("gc_allreduce_run", self.handle, self.views, 1, None, None, rank.stream)

    def run(self):
        self.library.check(self.rank.timer.run_calls(1, byref(self.call)))

    def result(self):
        return self.values

    def close(self):
        self.library.functions.gc_allreduce_free(self.handle)


class Nccl:
    """torch.distributed.all_reduce() of the mean. gloo has no mean: it sums a copy, and divides."""

    def __init__(self, rank, values):
        self.rank, self.values = rank, values

    def run(self):
        dist = self.rank.dist
        dist.all_reduce(self.values, op=dist.ReduceOp.AVG if self.rank.on == "cuda" else dist.ReduceOp.SUM)
        if self.rank.on == "cpu":
            self.values /= self.rank.here.world

    def result(self):
        return self.values

    def close(self):
        pass


class Symmetric(Nccl):
    """PyTorch's all-reduces over symmetric memory, of a sum; the values stay finite by a scale of 1 / world."""

    def __init__(self, rank, values, shots):
        import torch.distributed._symmetric_memory as symmetric

        self.rank, torch = rank, rank.torch
        self.group = rank.dist.group.WORLD.group_name
        self.values = symmetric.empty(values.numel(), dtype=values.dtype, device=rank.device)
        symmetric.rendezvous(self.values, self.group)
        operators = torch.ops.symm_mem
        self.operator = operators.one_shot_all_reduce if shots == 1 else operators.two_shot_all_reduce_
        self.shots, self.sum = shots, None

    def run(self):
        self.sum = self.operator(self.values, "sum", self.group)
        if self.shots == 2:
            self.values.mul_(1 / self.rank.here.world)

    def result(self):
        return self.sum / self.rank.here.world if self.shots == 1 else self.values


def agreed(here, what, function):
    """Why some rank could not do it, or None."""
    why = None
    try:
        function()
    except Exception as error:
        why = f"rank {here.rank}: {type(error).__name__}: {error}"[:300]
    return next(filter(None, here.gather(why, at=what)), None)


def measure(here, on, paths, elements, dtype, names, most, rounds):
    """{contender: {mode: seconds of each round}} of this rank, and why contenders are missing."""
    if "rank" not in here.kept:
        here.kept["rank"] = Rank(here, on, paths)
    rank = here.kept["rank"]
    torch = rank.torch
    torch.manual_seed(here.rank)
    inputs = torch.randn(elements, device=rank.device).to(getattr(torch, dtype))
    codecs = sorted({name.split()[0] for name in names if name.split()[0] in CODECS})
    mean, made, failures, found = None, {}, {}, {}

    def make(name):
        codec, *rest = name.split()
        values = inputs.clone()
        if name == "nccl":
            return Nccl(rank, values)
        if codec == "symmetric":
            return Symmetric(rank, values, int(rest[0]))
        library = rank.libraries["old" in rest]
        room = rank.room(library, codecs, ["float32", "bfloat16"], most)
        return Ours(rank, library, codec, dtype, rest[0], values, room)

    def begin(name):
        made[name] = make(name)
        made[name].values.copy_(inputs)
        made[name].run()
        rank.wait()

    def verify(name):
        result = made[name].result()[: 2**24]
        checks = here.gather(int(result.view(torch.int16).to(torch.int64).sum()), at=f"{name}, bytes")
        assert len(set(checks)) == 1, "ranks end with different bytes"
        lost = float((result.float() - mean).norm() / mean.norm())
        assert lost <= MOST_LOST[name.split()[0]], f"{lost:.3g} of the mean is lost"

    def seconds_of(run, calls, ahead):
        """One round: the ranks begin together; a graph is enqueued ahead of the device."""
        if on == "cpu":
            start = time.perf_counter()
            for _ in range(calls):
                run()
            return (time.perf_counter() - start) / calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if ahead:
            torch.cuda._sleep(1_000_000)  # cycles: some 500 us
        rank.dist.all_reduce(rank.aligning)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls

    try:
        for name in names:
            why = agreed(here, name, lambda: begin(name))
            if why is None and name == "nccl":
                mean = made[name].result()[: 2**24].float().clone()
            why = why or agreed(here, f"{name}, result", lambda: verify(name))
            if why:
                failures[name] = why
                made.pop(name, None)
        calls = 10 if elements <= 2**20 else 4 if elements <= 2**24 else 1
        ways = {(name, "eager"): (made[name].run, calls) for name in made}
        for name in made if on == "cuda" else ():
            graph = torch.cuda.CUDAGraph()

            def capture():
                with torch.cuda.graph(graph, stream=rank.queue, capture_error_mode="thread_local"):
                    for _ in range(calls):
                        made[name].run()
                graph.replay()
                rank.wait()

            why = agreed(here, f"{name}, graph", capture)
            if why:
                failures[f"{name}, graph"] = why
            else:
                ways[name, "graph"] = graph.replay, 1
        for number_of in range(rounds + 1):
            order = list(ways)
            first = number_of % len(order)
            for name, mode in order[first:] + order[:first]:
                run, times = ways[name, mode]
                made[name].values.copy_(inputs)
                rank.wait()
                here.gather(at=f"{name}, {mode}")
                took = seconds_of(run, times, mode == "graph") / (calls if mode == "graph" else 1)
                if number_of:  # the first is to warm up
                    found.setdefault(name, {}).setdefault(mode, []).append(significant(took))
        card = torch.cuda.get_device_name() if on == "cuda" else "no GPU"
        return {"seconds": found, "failures": failures, "card": card, "torch": torch.__version__}
    finally:
        rank.wait()
        for one in made.values():
            one.close()
        made.clear()
        if on == "cuda":
            torch.cuda.empty_cache()


# --- all ranks --------------------------------------------------------------------------------------------------------


def print_table(rows, names, mode):
    """Time and times NCCL of each contender, as nccl-tests prints them: a line a size and dtype."""
    lines = []
    for row in rows:
        times = {name: statistics.median(of[mode]) for name, of in row["seconds"].items() if mode in of}
        if not times:
            continue
        nccl = times.get("nccl")
        cells = [f"{number(times[n] * 1e6)} ({nccl / times[n]:.2f})" if n in times and nccl else "-" for n in names]
        size = row["elements"] * (4 if row["dtype"] == "float32" else 2) / 2**20
        lines.append([count(row["elements"]), row["dtype"], number(size), *cells])
    if lines:
        print(f"\n{mode}: us a call (times NCCL)")
        table(["elements", "dtype", "MiB", *names], lines)


def main():
    options = parser(__doc__, "allreduce_perf.json", "against")
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
    on = options.device
    world = cards() if on == "cuda" else options.ranks
    if not world:
        raise SystemExit("no CUDA device; --device cpu rehearses this without one")
    begin, end, factor = options.begin or 2**16, options.end or LARGE, options.factor
    if options.quick:
        options.codecs, options.rounds = ["int8", "int4"], 7
        begin, end, factor = options.begin or 2**18, options.end or 2**26, 16
    if on == "cpu":
        begin, end, options.rounds = options.begin or 2**10, options.end or 2**12, min(options.rounds, 3)
    sizes = [min(begin, end)]
    while sizes[-1] * factor < end:
        sizes.append(sizes[-1] * factor)
    sizes += [end] if sizes[-1] < end else []
    names = ["nccl", *(f"symmetric {shots}" for shots in (1, 2) if on == "cuda" and not options.against)]
    names += [f"{codec} {over}" for over in options.over for codec in options.codecs]
    if options.against:
        names += [f"{name} old" for name in names if name != "nccl"]
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    from ranks import RankError, Ranks

    paths = [os.path.abspath(path) for path in (options.library, options.against) if path]
    results = {"about": about(map(Library, paths), of="all-reduce", world=world, on=on), "rows": [], "failed": {}}
    ranks = None
    for elements in sizes:
        for dtype in options.dtypes:
            row = {"elements": elements, "dtype": dtype}
            try:
                ranks = ranks or Ranks(world)
                of_ranks = ranks.call(measure, on, paths, elements, dtype, names, end, options.rounds, seconds=SECONDS)
            except RankError as error:  # the next size begins with new ranks
                results["failed"][f"{count(elements)}, {dtype}"] = error.short[:400]
                print(f"FAILED: {count(elements)}, {dtype}: {error.short}", file=sys.stderr)
                ranks.close()
                ranks = None
                continue
            first = of_ranks[0]
            row["seconds"] = {
                name: {mode: [max(each) for each in zip(*(of["seconds"][name][mode] for of in of_ranks))] for mode in modes}
                for name, modes in first["seconds"].items()
            }  # of each round that of the slowest rank
            results["about"] |= {"card": first["card"], "torch": first["torch"]}
            row["failures"] = first["failures"]
            results["rows"].append(row)
            save(options.output, results)
            for name, why in first["failures"].items():
                print(f"FAILED: {count(elements)}, {dtype}, {name}: {why}", file=sys.stderr)
    if ranks:
        ranks.close()
    print(results["about"])
    for mode in "eager", "graph":
        print_table(results["rows"], names, mode)
    if options.against:
        print_ratios([
            {"group": mode, "kind": f"{name}, {row['dtype']}", "case": count(row["elements"]),
             "seconds": {"new": row["seconds"][name][mode], "new, old": row["seconds"][f"{name} old"][mode]}}
            for row in results["rows"] for name in row["seconds"] for mode in row["seconds"][name]
            if mode in row["seconds"].get(f"{name} old", {})
        ])  # fmt: skip
    print(f"\n{options.output}")
    raise SystemExit(bool(results["failed"] or any(row["failures"] for row in results["rows"])))


if __name__ == "__main__":
    main()
