#!/usr/bin/env python3
"""A training step over links of a known rate, with gradients as they are and with each codec:
build/bench/real_link.json and a table.

    python3 bench/real_link.py [--quick] [--library PATH] [--ranks 2] [--gbit 1 2.5 10] [--delay 0]

Every rank is a process in a network namespace of its own. Its only way out is a veth to a bridge, and both ends of that
let as much through as `--gbit` says (`tc`'s tbf). `--delay` adds so many milliseconds to each way, by netem, which not
every kernel has. DistributedDataParallel over gloo trains a transformer on the CPU; `no exchange` is the same step
without gradients being sent. All namespaces lie within one of this process, so that nothing is left of them however it
ends; this takes root, or a kernel that lets users make namespaces.

The contenders take turns, a few steps each, so that other work on the machine meets all of them. A step's time is that
of the slowest rank. Bytes are counted at the interface of rank 0: with headers and acknowledgements.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

CODECS = "bf16", "mxfp8", "int8", "int4", "mxfp4", "onebit"
PLAIN = "no exchange", "float32"
FIRST = 3  # steps of each contender that are not counted: DDP arranges its buckets after the first
BATCH, PLACES = 4, 64
SETTINGS = "burst", "256kb", "latency", "50ms"
INSIDE = "GRADCODEC_BENCH_INSIDE"

# --- the links --------------------------------------------------------------------------------------------------------


def enter():
    """Goes on in namespaces of this process alone: whatever is made there goes when it ends."""
    for program in ("unshare", "mount", "ip", "tc"):
        if not shutil.which(program):
            sys.exit(f"real_link.py: there is no {program} here; ip and tc are in the package iproute2")
    apart = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:
        apart += ["--user", "--map-root-user"]
    tried = subprocess.run([*apart, "true"], capture_output=True, text=True)
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(f"real_link.py: network namespaces want root, or a kernel that lets users make them: {why}")
    os.environ[INSIDE] = "1"
    os.execvp("unshare", [*apart, sys.executable, *sys.argv])


def command(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split())
        missing = "this kernel has no netem, so --delay cannot be given: " if "netem" in words else ""
        sys.exit(f"real_link.py: {missing}{' '.join(words)}: {said}")


def connect(ranks):
    """A namespace for each rank, whose eth0 leads to a bridge. The names live in a /run of this process's own."""
    command("mount", "-t", "tmpfs", "none", "/run")
    command("ip", "link", "add", "bridge", "type", "bridge")
    command("ip", "link", "set", "bridge", "up")
    for rank in range(ranks):
        name, port = f"rank{rank}", f"port{rank}"
        command("ip", "netns", "add", name)
        command("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        command("ip", "link", "set", port, "master", "bridge", "up")
        command("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            command("ip", "-n", name, "link", "set", interface, "up")


def address(rank):
    return f"10.0.0.{rank + 1}"


def limit(ranks, gbit, delay):
    """The rate of every link, both ways, and how long a packet takes from a rank to the bridge."""
    for rank in range(ranks):
        for tc, interface in ((("tc", "-n", f"rank{rank}"), "eth0"), (("tc",), f"port{rank}")):
            rate = "tbf", "rate", f"{gbit:g}gbit", *SETTINGS
            command(*tc, "qdisc", "replace", "dev", interface, "root", "handle", "1:", *rate)
            if delay and interface == "eth0":
                command(*tc, "qdisc", "add", "dev", interface, "parent", "1:1", "netem", "delay", f"{delay}ms")


# --- a rank -----------------------------------------------------------------------------------------------------------


def held(rank, gbit):
    """Gbit/s that one stream from rank 1 to rank 0 has for a quarter of a second at that rate; rank 0 knows."""
    size, block = int(gbit * 1e9 / 8 / 4), bytearray(2**20)
    if rank == 0:
        with socket.create_server((address(0), 4000)) as server, server.accept()[0] as stream:
            arrived, began = 0, None
            while got := stream.recv_into(block):
                began = began or time.perf_counter()
                arrived += got
            return arrived * 8 / (time.perf_counter() - began) / 1e9
    if rank == 1:
        for attempt in range(200):
            try:
                stream = socket.create_connection((address(0), 4000))
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        with stream:
            for _ in range(0, size, len(block)):
                stream.sendall(block)
    return None


def sent():
    """Bytes that have left this namespace's eth0."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "eth0:")


def model_of(torch, arguments):
    """A transformer over bytes, whose loss is that of predicting the next one."""
    nn, width = torch.nn, arguments.width

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            options = {"dim_feedforward": 4 * width, "dropout": 0, "batch_first": True, "norm_first": True}
            layer = nn.TransformerEncoderLayer(width, max(1, width // 64), **options)
            self.bytes, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
            self.layers = nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False)

        def forward(self, text):
            mask = nn.Transformer.generate_square_subsequent_mask(PLACES)
            said = self.head(self.layers(self.bytes(text[:, :-1]), mask=mask, is_causal=True))
            return nn.functional.cross_entropy(said.flatten(0, 1), text[:, 1:].flatten())

    torch.manual_seed(1)
    return Transformer()


def contender(torch, name, arguments):
    """A function that makes a step."""
    import gradcodec.torch

    model = torch.nn.parallel.DistributedDataParallel(model_of(torch, arguments))
    if name not in PLAIN:
        gradcodec.torch.compress(model, name, momentum=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(text):
        optimizer.zero_grad()
        if name == "no exchange":
            with model.no_sync():
                model(text).backward()
        else:
            model(text).backward()
        optimizer.step()

    step.parameters = sum(parameter.numel() for parameter in model.parameters())
    return step


def rank_main(arguments):
    import torch
    import torch.distributed as dist

    rank, world = arguments.rank, arguments.ranks
    cpus = sorted(os.sched_getaffinity(0))
    own = cpus[rank::world] or [cpus[rank % len(cpus)]]
    os.sched_setaffinity(0, own)  # also for the library's workers
    torch.set_num_threads(len(own))
    of_link = held(rank, arguments.gbit[0])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"file://{arguments.to}.store", rank=rank, world_size=world)
    steps = {name: contender(torch, name, arguments) for name in (*PLAIN, *arguments.codecs)}
    text = torch.randint(256, (BATCH, PLACES + 1), generator=torch.Generator().manual_seed(rank))
    found = {name: {"seconds": [], "bytes": []} for name in steps}
    for turn in range(-1, arguments.turns):
        for name, step in steps.items():
            count = FIRST if turn < 0 else arguments.steps
            seconds = torch.empty(count, dtype=torch.float64)
            dist.barrier()
            before = sent()
            for n in range(count):
                dist.barrier()
                began = time.perf_counter()
                step(text)
                seconds[n] = time.perf_counter() - began
            dist.barrier()
            left = sent() - before
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn >= 0:
                found[name]["seconds"] += seconds.tolist()
                found[name]["bytes"].append(left / count)
    if rank == 0:
        parameters = steps["float32"].parameters
        arguments.to.write_text(json.dumps({"held": of_link, "parameters": parameters, "found": found}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of PyTorch's may abort a process whose interpreter ends


# --- all of them ------------------------------------------------------------------------------------------------------


def measured(arguments, gbit):
    """What rank 0 found at this rate."""
    limit(arguments.ranks, gbit, arguments.delay)
    to = pathlib.Path(f"/run/{gbit:g}")
    own = ["--to", str(to), "--ranks", str(arguments.ranks), "--gbit", str(gbit), "--codecs", *arguments.codecs]
    for name in ("width", "layers", "steps", "turns"):
        own += [f"--{name}", str(getattr(arguments, name))]
    program = [sys.executable, str(pathlib.Path(__file__).resolve()), *own]
    ranks = [
        subprocess.Popen(["ip", "netns", "exec", f"rank{rank}", *program, "--rank", str(rank)])
        for rank in range(arguments.ranks)
    ]
    running = dict(enumerate(ranks))
    while running:
        for rank, process in list(running.items()):
            try:
                status = process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            del running[rank]
            if status:
                for other in running.values():
                    other.kill()
                sys.exit(f"real_link.py: rank {rank} ended with status {status} at {gbit:g} Gbit/s")
    return json.loads(to.read_text())


def quartiles(seconds):
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return [1e3 * each for each in (middle, low, high)]


def table(gbit, result):
    found = result["found"]
    lines = [
        f"\n{gbit:g} Gbit/s; one stream of TCP has {result['held']:.2f}",
        "| gradients | ms a step, median | quartiles | of float32's | MB sent a step | of float32's |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    base, whole = quartiles(found["float32"]["seconds"])[0], statistics.median(found["float32"]["bytes"])
    for name, one in found.items():
        (middle, low, high), left = quartiles(one["seconds"]), statistics.median(one["bytes"])
        cells = [f"{middle:.1f}", f"{low:.1f} to {high:.1f}", f"{middle / base:.2f}"]
        cells += [f"{left / 1e6:.2f}", f"{left / whole:.3f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read(words):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--library", type=pathlib.Path, help="of the library, if not the one that the package finds")
    parser.add_argument("--ranks", type=int, choices=(2, 3, 4), default=2)
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 2.5, 10], help="rates, one after the other")
    parser.add_argument("--delay", type=float, default=0, help="ms that each way takes longer, by netem")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS)
    parser.add_argument("--width", type=int, default=256, help="of the transformer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="of a contender in each of its turns")
    parser.add_argument("--turns", type=int, help="20, or 4 with --quick")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build/bench/real_link.json")
    for name, kind in (("--rank", int), ("--to", pathlib.Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    arguments.turns = arguments.turns or (4 if arguments.quick else 20)
    for name in ("width", "layers", "steps", "turns"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: 1 or more expected, got {getattr(arguments, name)}")
    if arguments.width > 64 and arguments.width % (arguments.width // 64):
        parser.error(f"--width: a multiple of 64, or a number that its heads divide, expected, got {arguments.width}")
    if min(arguments.gbit) < 0.001 or max(arguments.gbit) > 100:
        parser.error(f"--gbit: rates from 0.001 to 100 expected, got {' '.join(map(str, arguments.gbit))}")
    if arguments.delay < 0:
        parser.error(f"--delay: 0 or more expected, got {arguments.delay:g}")
    if arguments.library and not arguments.library.exists():
        parser.error(f"--library: there is no {arguments.library}")
    return arguments


def main():
    arguments = read(None)
    if arguments.rank is not None:
        return rank_main(arguments)
    if INSIDE not in os.environ:
        enter()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of a process 1 the kernel ignores it otherwise
    if arguments.library:
        os.environ["GRADCODEC_LIBRARY"] = str(arguments.library.resolve())
    from common import commit, processor

    connect(arguments.ranks)
    about = {
        "commit": commit(), "processor": processor()["model name"], "cpus": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0], "ranks": arguments.ranks, "delay_ms": arguments.delay,
        "width": arguments.width, "layers": arguments.layers,
    }  # fmt: skip
    cpus, load = about["cpus"], about["load_before"]
    print(f"{arguments.ranks} ranks on {cpus} CPUs of {about['processor']}, delay {arguments.delay:g} ms", flush=True)
    if load > 0.5 or cpus < 2 * arguments.ranks:
        why = f"a rank has fewer than two CPUs, or other programs run (the load is {load:.1f})"
        print(f"A TRIAL: {why}; the quartiles show how much that disturbs", flush=True)
    links = {}
    for gbit in arguments.gbit:
        links[f"{gbit:g}"] = result = measured(arguments, gbit)
        if len(links) == 1:
            print(f"a transformer of {result['parameters']:,} parameters, {BATCH} x {PLACES} bytes a step and rank")
        print(table(gbit, result), flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({**about, "links": links}, indent=1) + "\n")
    print(f"\n{arguments.output}")


if __name__ == "__main__":
    main()
