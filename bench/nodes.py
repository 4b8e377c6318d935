#!/usr/bin/env python3
"""Measures a training step between nodes over links of a known rate, without and with compression by each codec:
build/bench/nodes.json and a table.

    python3 bench/nodes.py [--quick] [--library PATH] [--nodes 2] [--ranks 1] [--gbit 10 25 100] [--device cuda] [--flat]
    python3 bench/nodes.py --nodes 1 --gbit 0 [--device cuda] [--hooks 25 100]

Every node is a network namespace, in which its ranks run. A veth and a bridge join the nodes, and tc's tbf limits both
ends of each veth. All namespaces are inside one of this process, and end with it. This needs root, or a kernel that
lets users make namespaces. DistributedDataParallel trains a transformer: on the CPU over gloo, or with `--device cuda`
on all GPUs, over NCCL's sockets between nodes. One node has no link, and needs no namespace.

`float32` is DistributedDataParallel's own all-reduce, `bf16 hook` PyTorch's hook. A codec sums within nodes first if a
node has several ranks; with `--flat` also with one level, and on GPUs of one node also over NCCL. With `--hooks` INT8
has its hook in Python and in C++, with each bucket alone (0 MiB) and with exchanges of the given MiB. Contenders take
turns; on GPUs of several nodes they run one after the other, each at all rates. A turn's time is the slowest rank's.
Bytes are counted at eth0 of node 0, with headers and acknowledgements. After the last turn replicas must have the same
weights. `floor`: the time to a step's first gradient, and the link's time for the bytes.

`--wrap fsdp2` shards the model over all ranks, `--wrap hsdp` within each node. Parameters are gathered in bfloat16 and
gradients reduced in float32, or both in bfloat16 (`bf16 reduced`); a codec compresses gradients, `gather int8` also the
parameters.
"""

import argparse
import contextlib
import datetime
import gc
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

from common import ROOT, about, markdown, save

CODECS = "bf16", "mxfp8", "int8", "int4", "mxfp4", "onebit"
PLAIN = {
    "ddp": ("no exchange", "float32", "bf16 hook"),
    "fsdp2": ("float32", "bf16 reduced"), "hsdp": ("float32", "bf16 reduced"),
}  # fmt: skip
SHARDED = "int8", "int8, gather int8", "int4, gather int8"  # codecs with --wrap fsdp2 or hsdp
FIRST = 4  # steps of each contender that are not counted: DDP rebuilds its buckets after the first
SLOW = 10  # Gbit/s below which GPUs take one step a turn, and two turns: a step of float32 takes 15 s at 1 Gbit/s
FRAME = "9000"  # bytes of an Ethernet frame at most: jumbo frames, of which headers take 1 % and not 5 %
STUCK = datetime.timedelta(seconds=180)  # the longest wait in a group of all ranks
INSIDE = "GRADCODEC_BENCH_INSIDE"
# Defaults by device. `turns`: in full, and with --quick. `places`: bytes of a sequence.
DEFAULTS = {
    "cpu": {"codecs": CODECS, "width": 256, "layers": 4, "batch": 4, "places": 64, "steps": 5, "turns": (20, 4)},
    "cuda": {"codecs": ("int8", "int4"), "width": 1280, "layers": 16, "batch": 64, "places": 128, "steps": 2,
             "turns": (8, 4)},
}  # fmt: skip

# --- the links --------------------------------------------------------------------------------------------------------


def enter():
    """Continues in namespaces of this process alone, which end with it."""
    for program in ("unshare", "mount", "ip", "tc", "nsenter"):
        if not shutil.which(program):
            sys.exit(f"nodes.py: there is no {program} here; ip and tc are in the package iproute2")
    apart = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:
        apart += ["--user", "--map-root-user"]
    tried = subprocess.run([*apart, "true"], capture_output=True, text=True)
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(f"nodes.py: network namespaces want root, or a kernel that lets users make them: {why}")
    os.environ[INSIDE] = "1"
    os.execvp("unshare", [*apart, sys.executable, *sys.argv])


def command(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"nodes.py: {' '.join(words)}: {' '.join(done.stderr.split())}")


def connect(nodes):
    """Creates a namespace for each node, whose eth0 leads to a bridge. The names are in this process's own /run.
    Returns the ends of the links, for limit()."""
    command("mount", "-t", "tmpfs", "none", "/run")
    for node in range(nodes):
        command("ip", "netns", "add", f"node{node}")
    ends = [(f"/run/netns/node{node}", "eth0") for node in range(nodes)]
    made = subprocess.run(["ip", "link", "add", "bridge", "type", "bridge"], capture_output=True, text=True)
    if made.returncode == 0:
        command("ip", "link", "set", "bridge", "up")
        for node in range(nodes):
            port = f"port{node}"
            command("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", f"node{node}")
            command("ip", "link", "set", port, "mtu", FRAME, "master", "bridge", "up")
            ends.append(("/proc/1/ns/net", port))  # the first process of this run
    elif nodes == 2:
        print(f"no bridge ({' '.join(made.stderr.split())}), so one veth joins both nodes", flush=True)
        command("ip", "-n", "node0", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", "node1")
    else:
        sys.exit(f"nodes.py: more than 2 nodes need a bridge, which fails here: {' '.join(made.stderr.split())}")
    for node in range(nodes):
        command("ip", "-n", f"node{node}", "addr", "add", f"{address(node)}/24", "dev", "eth0")
        command("ip", "-n", f"node{node}", "link", "set", "lo", "up")
        command("ip", "-n", f"node{node}", "link", "set", "eth0", "mtu", FRAME, "up")
    return ends


def address(node):
    return f"10.0.0.{node + 1}"


def limit(ends, gbit, burst=2048):
    """Sets the rate of every link, both ways. `burst`: least KiB that may pass at once. Any process of this run can
    call this."""
    for namespace, interface in ends:
        tc = ["nsenter", f"--net={namespace}", "tc", "qdisc"]
        subprocess.run([*tc, "del", "dev", interface, "root"], capture_output=True)  # fails where there is none yet
        if gbit:
            rate = "tbf", "rate", f"{gbit:g}gbit", "burst", f"{max(burst, int(25.6 * gbit))}kb", "latency", "50ms"
            command(*tc, "add", "dev", interface, "root", "handle", "1:", *rate)


# --- a rank -----------------------------------------------------------------------------------------------------------


def held(node, server, gbit):
    """Returns, at node 0, the Gbit/s that one stream from node 1 reaches in a quarter of a second. `server`: the socket
    of node 0, which listens."""
    size, block = int((gbit or 10) * 1e9 / 8 / 4), bytearray(2**20)
    if node == 0:
        with server, server.accept()[0] as stream:
            arrived, began = 0, None
            while got := stream.recv_into(block):
                began = began or time.perf_counter()
                arrived += got
            return arrived * 8 / (time.perf_counter() - began) / 1e9
    if node == 1:
        with socket.create_connection((address(0), 4000)) as stream:
            for _ in range(0, size, len(block)):
                stream.sendall(block)
    return None


def sent():
    """Returns the bytes that have left this namespace's eth0."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "eth0:")


def model_of(torch, width, layers, context=0):
    """Returns a transformer that gives the loss of predicting the next byte. `context`: number of embedded places."""
    nn, functional = torch.nn, torch.nn.functional
    heads = max(1, width // 64)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            query, key, value = self.attend(self.before(x)).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.join(seen.transpose(1, 2).flatten(2))
            return x + self.dense(self.between(x))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.bytes, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
            self.layers = nn.Sequential(*(Layer() for _ in range(layers)))
            self.places = nn.Parameter(torch.zeros(context, width)) if context else None

        def forward(self, text):
            x = self.bytes(text[:, :-1])
            said = self.head(self.layers(x if self.places is None else x + self.places))
            return functional.cross_entropy(said.flatten(0, 1), text[:, 1:].flatten())

    torch.manual_seed(1)
    return Transformer()


class Contender:
    def __init__(self, torch, name, arguments, device):
        import gradcodec

        self.torch, self.name, self.device, self.compression = torch, name, device, None
        self.autocasts = device.type == "cuda" and arguments.wrap == "ddp" and arguments.dtype == "float32"
        with device:
            model = model_of(torch, arguments.width, arguments.layers).to(getattr(torch, arguments.dtype))
        sizes = [parameter.numel() for parameter in model.parameters()]
        raw = [codec_of(name) != "onebit" and (one.dim() < 2 or one.numel() < 1024) for one in model.parameters()]
        item = next(model.parameters()).element_size()
        self.parameters, self.payload = sum(sizes), None
        if arguments.wrap == "ddp":
            self.payload = {"no exchange": 0, "bf16 hook": 2}.get(name, item) * self.parameters
            if name not in PLAIN["ddp"]:
                options = {"raw": raw} if any(raw) else {}
                self.payload = gradcodec.GradCodec().codec(codec_of(name), sizes, **options).payload_bytes
        self.model = (self.replicated if arguments.wrap == "ddp" else self.sharded)(model, arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def replicated(self, model, arguments):
        import gradcodec.torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model = self.torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.name == "bf16 hook":
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif self.name not in PLAIN["ddp"]:
            words, options = self.name.split(), {"momentum": True, "transport": transport_of(arguments)}
            if words[-1] in ("flat", "nccl"):
                options["transport"] = words[-1]
            elif words[-1] == "MiB":
                options |= {"native": words[1] == "C++", "exchange_mib": float(words[2])}
            self.compression = gradcodec.torch.compress(model, codec_of(self.name), **options)
        return model

    def sharded(self, model, arguments):
        import gradcodec.torch
        from torch.distributed import fsdp

        shape, names = (arguments.nodes, arguments.ranks), ("replicate", "shard")
        both = self.torch.distributed.init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        compresses, mesh, options = self.name not in PLAIN[arguments.wrap], None, {}
        if arguments.wrap == "hsdp":
            # Compressed, FSDP shards within the node, and shard() averages over the replicas.
            mesh = both["shard"] if compresses else both
            options = {"replicate_group": both.get_group("replicate")} if compresses else {}
        reduced = self.torch.bfloat16 if self.name == "bf16 reduced" else self.torch.float32
        policy = fsdp.MixedPrecisionPolicy(param_dtype=self.torch.bfloat16, reduce_dtype=reduced)
        for module in (*model.layers, model):
            fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
        if compresses:
            gather = "int8" if self.name.endswith("gather int8") else None
            options |= {"gather": gather, "momentum": True, "transport": transport_of(arguments)}
            self.compression = gradcodec.torch.shard(model, codec_of(self.name), **options)
        return model

    def step(self, text):
        self.optimizer.zero_grad()
        with self.model.no_sync() if self.name == "no exchange" else contextlib.nullcontext():
            with self.torch.autocast(self.device.type, self.torch.bfloat16, enabled=self.autocasts):
                loss = self.model(text)
            loss.backward()
        self.optimizer.step()

    def first_gradient(self, text):
        """Returns the seconds from the begin of a step to its first gradient, before which nothing can be exchanged."""
        torch, times = self.torch, []

        def mark(*_):
            event = torch.cuda.Event(enable_timing=True) if self.device.type == "cuda" else None
            if event is not None:
                event.record()
            times.append(event or time.perf_counter())

        first = self.model.module.head.bias.register_post_accumulate_grad_hook(mark)
        mark()
        self.step(text)
        first.remove()
        if self.device.type != "cuda":
            return times[1] - times[0]
        torch.cuda.synchronize()
        return times[0].elapsed_time(times[1]) / 1e3

    def digest(self):
        """Returns a sum over the bits of all weights of this rank."""
        weights = [getattr(one, "_local_tensor", one).detach().flatten() for one in self.model.parameters()]
        sums = [one.view(self.torch.int16).long().sum() for one in weights]
        return int(self.torch.stack([(number + 1) * one for number, one in enumerate(sums)]).sum())

    def close(self):
        if self.compression is not None:
            self.compression.close()


def codec_of(name):
    return name.replace(",", "").split()[0]


def transport_of(arguments):
    # With one rank per node "auto" has one level, too, but would find that all GPUs are of one machine.
    is_flat = arguments.nodes > 1 and arguments.ranks == 1
    return "nccl" if arguments.no_peers else "flat" if is_flat else "auto"


def measure(torch, dist, names, arguments, device):
    """Returns, by rate, what one stream of TCP reaches, and the results of contenders that take turns."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    left = sent if arguments.nodes > 1 else lambda: 0
    generator = torch.Generator().manual_seed(arguments.rank)
    text = torch.randint(256, (arguments.batch, arguments.places + 1), generator=generator).to(device)
    node, local = divmod(arguments.rank, arguments.ranks)
    made, links = {}, {}

    def barrier():
        dist.all_reduce(torch.zeros(1), group=arguments.on_cpu)

    for name in names:
        arguments.now = name
        made[name] = Contender(torch, name, arguments, device)
    for gbit in arguments.gbit:
        wait()
        barrier()
        if arguments.rank == 0:
            limit(arguments.ends, gbit)
        is_first = local == 0 and arguments.nodes > 1  # of its node
        server = socket.create_server((address(0), 4000)) if is_first and node == 0 else None
        barrier()
        link = links[f"{gbit:g}"] = {"held": held(node, server, gbit) if is_first else None}
        link["found"] = {name: {"seconds": [], "bytes": []} for name in names}
        is_slow = device.type == "cuda" and 0 < gbit < SLOW
        for turn in range(-1, 2 if is_slow else arguments.turns):
            for name, one in made.items():
                arguments.now = name
                count = 1 if is_slow else arguments.steps
                if turn < 0:
                    count = FIRST if len(links) == 1 else 1
                wait()
                barrier()
                before, began = left(), time.perf_counter()
                for _ in range(count):
                    one.step(text)
                wait()
                seconds = torch.tensor([(time.perf_counter() - began) / count], dtype=torch.float64)
                dist.all_reduce(seconds, dist.ReduceOp.MAX, group=arguments.on_cpu)
                if turn >= 0:
                    link["found"][name]["seconds"].append(seconds.item())
                    link["found"][name]["bytes"].append((left() - before) / count)
    apart = {"ddp": 1, "hsdp": arguments.ranks, "fsdp2": dist.get_world_size()}[arguments.wrap]  # between equal ranks
    for name, one in made.items():
        arguments.now = name
        digests = [None] * dist.get_world_size()
        dist.all_gather_object(digests, one.digest(), group=arguments.on_cpu)
        if name != "no exchange" and digests != digests[:apart] * (len(digests) // apart):
            raise AssertionError("the weights differ between ranks")
        topology = one.compression.topology if one.compression else None
        its = {"parameters": one.parameters, "payload": one.payload, "topology": topology}
        if name == "no exchange":
            its["first_gradient"] = statistics.median(one.first_gradient(text) for _ in range(5))
        for link in links.values():
            link["found"][name] |= its
        one.close()
    return links


def rank_main(arguments):
    node = arguments.rank // arguments.ranks
    interface = "eth0" if arguments.nodes > 1 else "lo"
    os.environ |= {
        "GRADCODEC_NODE": f"node{node}", "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface,
        "NCCL_HOSTID": f"node{node}", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_NVLS_ENABLE": "0",
    }  # fmt: skip
    if arguments.no_peers:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    import torch
    import torch.distributed as dist

    rank, world, on_gpu = arguments.rank, arguments.nodes * arguments.ranks, arguments.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        cpus = sorted(os.sched_getaffinity(0))
        own = cpus[rank::world] or [cpus[rank % len(cpus)]]
        os.sched_setaffinity(0, own)  # also for the library's workers
        torch.set_num_threads(len(own))
    versions = {"torch": torch.__version__}
    if on_gpu:
        versions |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    store = {"init_method": f"file://{arguments.to}.store", "rank": rank, "world_size": world}
    backend, more = ("cpu:gloo,cuda:nccl", {"device_id": device}) if on_gpu else ("gloo", {})
    dist.init_process_group(backend, timeout=STUCK, **store, **more)
    arguments.on_cpu = dist.new_group(backend="gloo", timeout=STUCK)
    arguments.ends = [end.split("=") for end in arguments.ends]
    names, links = contenders(arguments), {}
    for group in [[name] for name in names] if on_gpu and arguments.nodes > 1 else [names]:
        for gbit, link in measure(torch, dist, group, arguments, device).items():
            links.setdefault(gbit, link)["found"] |= link["found"]
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        if rank == 0:
            arguments.to.write_text(json.dumps({gbit: {**versions, **link} for gbit, link in links.items()}))
    dist.barrier(group=arguments.on_cpu)
    sys.stdout.flush()
    os._exit(0)  # threads of PyTorch's may abort a process whose interpreter ends


# --- all of them ------------------------------------------------------------------------------------------------------


def run_rank(rank_main, arguments):
    """Runs this rank. If it fails, it ends at once: an interpreter that ends may wait for other ranks."""
    try:
        rank_main(arguments)
    except BaseException:
        traceback.print_exc()
        now = vars(arguments).get("now", "the start")
        print(f"{sys.argv[0]}: rank {arguments.rank} failed in: {now}", file=sys.stderr, flush=True)
        os._exit(1)


def contenders(arguments):
    """Returns the names of all that are measured."""
    if arguments.hooks is not None:
        sizes = [(language, mib) for language in ("Python", "C++") for mib in (0, *arguments.hooks)]
        return [*PLAIN["ddp"], *(f"int8 {language} {mib:g} MiB" for language, mib in sizes)]
    has_peers = arguments.nodes == 1 and arguments.device == "cuda" and not arguments.no_peers
    again = "flat" if arguments.flat else "nccl" if has_peers and arguments.wrap == "ddp" else None
    codecs = [name for codec in arguments.codecs for name in (codec, f"{codec} {again}")] if again else arguments.codecs
    return [*PLAIN[arguments.wrap], *codecs]


def run_ranks(world, nodes, *words):
    """Runs this program for each rank, in its node's namespace if there are several nodes, to their end or until one
    fails. `words`: arguments beside those of this process. Returns which rank failed, or None."""
    ranks, statuses = [], [None]
    for rank in range(world):
        within = ["nsenter", f"--net=/run/netns/node{rank * nodes // world}"] if nodes > 1 else []
        ranks.append(subprocess.Popen([*within, sys.executable, *sys.argv, *words, "--rank", str(rank)]))
    while None in statuses and not any(statuses):
        time.sleep(0.05)
        statuses = [process.poll() for process in ranks]
    for process in ranks:
        process.kill()
        process.wait()
    return next((f"rank {rank} ended with status {status}" for rank, status in enumerate(statuses) if status), None)


def quartiles(seconds):
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else 3 * seconds
    return [1e3 * each for each in (middle, low, high)]


def table(gbit, nodes, result):
    found, held = result["found"], result["held"]
    stream = f"one stream of TCP reaches {held:.2f} Gbit/s" if held else "one node"
    heads = ["gradients", "ms a step, median", "quartiles", "of float32's", "MB out of a node", "2 P (N-1)/N", "floor, ms"]
    rows = []
    first = found.get("no exchange", {}).get("first_gradient", 0)
    base = quartiles(found["float32"]["seconds"])[0] if "float32" in found else None
    for name, one in found.items():
        (middle, low, high), left = quartiles(one["seconds"]), statistics.median(one["bytes"])
        cells = [f"{middle:.1f}", f"{low:.1f} to {high:.1f}", f"{middle / base:.2f}" if base else "-"]
        cells += [f"{left / 1e6:.2f}", f"{2 * one['payload'] * (nodes - 1) / nodes / 1e6:.2f}" if one["payload"] else "-"]
        floor = f"{left * 8 / gbit / 1e6 + 1e3 * first:.1f}" if gbit and one["payload"] else "-"
        rows.append([name, *cells, floor])
    return f"\n{f'{gbit:g} Gbit/s' if gbit else 'no limit'}; {stream}\n{markdown(heads, rows)}"


def read():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--library", type=pathlib.Path, help="of the library, if not the one that the package finds")
    parser.add_argument("--device", choices=DEFAULTS, default="cpu", help="cuda: rank r runs on GPU r")
    parser.add_argument("--wrap", choices=PLAIN, default="ddp", help="fsdp2: sharded over all ranks; hsdp: within nodes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of DDP's model")
    parser.add_argument("--flat", action="store_true", help="each codec also with one level")
    parser.add_argument("--hooks", type=float, nargs="*", metavar="MiB", help="INT8 by the hook's language and exchanges")
    parser.add_argument("--no-peers", action="store_true", help="no peer access between the GPUs of a node")
    parser.add_argument("--nodes", type=int, choices=range(1, 9), default=2)
    parser.add_argument("--ranks", type=int, help="of a node: 1 on the CPU; all GPUs, divided among the nodes")
    parser.add_argument("--gbit", type=float, nargs="+", default=[10, 25, 100], help="rates, in turn; 0: no limit")
    parser.add_argument("--codecs", nargs="+", choices=(*CODECS, *SHARDED[1:]), help="all on the CPU; int8 and int4 on GPUs")
    for name in ("width", "layers", "batch", "places", "steps", "turns"):
        parser.add_argument(f"--{name}", type=int, help=", ".join(f"{on}: {its[name]}" for on, its in DEFAULTS.items()))
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build/bench/nodes.json")
    own = {"rank": {"type": int}, "to": {"type": pathlib.Path}, "ends": {"nargs": "*"}}
    for name, options in own.items():
        parser.add_argument(f"--{name}", **options, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.codecs is None and arguments.wrap != "ddp":
        arguments.codecs = SHARDED
    for name, default in DEFAULTS[arguments.device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default[arguments.quick] if name == "turns" else default)
    gpus = 0
    if arguments.device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
    if arguments.ranks is None:
        arguments.ranks = max(1, gpus // arguments.nodes)
    for name in ("ranks", "width", "layers", "batch", "places", "steps", "turns"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: 1 or more expected, got {getattr(arguments, name)}")
    if any(gbit and not 0.001 <= gbit <= 400 for gbit in arguments.gbit):
        parser.error(f"--gbit: 0, or rates from 0.001 to 400, expected, got {' '.join(map(str, arguments.gbit))}")
    if arguments.nodes == 1 and arguments.gbit != [0]:
        parser.error(f"--nodes 1: --gbit 0 expected, got {' '.join(map(str, arguments.gbit))}")
    for codec in arguments.codecs:
        if codec not in (CODECS if arguments.wrap == "ddp" else SHARDED):
            parser.error(f"--wrap {arguments.wrap}: other --codecs expected, got '{codec}'")
    if arguments.flat and (arguments.wrap != "ddp" or arguments.ranks == 1):
        parser.error("--flat: --wrap ddp and more than one rank a node expected")
    if arguments.hooks is not None and arguments.wrap != "ddp":
        parser.error("--hooks: --wrap ddp expected")
    if arguments.library and not arguments.library.exists():
        parser.error(f"--library: there is no {arguments.library}")
    if arguments.device == "cuda" and gpus < arguments.nodes * arguments.ranks:
        parser.error(f"--device cuda: {arguments.nodes * arguments.ranks} GPUs expected, got {gpus}")
    return arguments


def main():
    arguments = read()
    if arguments.rank is not None:
        return run_rank(rank_main, arguments)
    if arguments.nodes > 1 and INSIDE not in os.environ:
        enter()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the kernel ignores it for process 1 otherwise
    if arguments.library:
        os.environ["GRADCODEC_LIBRARY"] = str(arguments.library.resolve())
    load, control = os.getloadavg()[0], pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    asked = ("device", "nodes", "ranks", "wrap", "dtype", "no_peers", "width", "layers", "batch", "places")
    here = about(load_before=load, congestion_control=control, **{name: getattr(arguments, name) for name in asked})
    cpus, world = here["cpus"], arguments.nodes * arguments.ranks
    print(f"{arguments.nodes} nodes x {arguments.ranks} ranks on {cpus} CPUs of {here['processor']}, frames of {FRAME} "
          f"bytes, {control}, commit {here['commit']}, {here['date']}", flush=True)  # fmt: skip
    ends = map("=".join, connect(arguments.nodes) if arguments.nodes > 1 else [])
    with tempfile.TemporaryDirectory() as folder:
        to = pathlib.Path(folder) / "found"
        why = run_ranks(world, arguments.nodes, "--to", str(to), "--ends", *ends)
        if not to.exists():
            sys.exit(f"nodes.py: {why}, and no contender ended")
        links = json.loads(to.read_text())
    save(arguments.output, {**here, "links": links})
    any_link = next(iter(links.values()))
    on = f"{world} x {any_link['gpu']}, NCCL {any_link['nccl']}, " if "gpu" in any_link else ""
    size = max((one["parameters"] for one in any_link["found"].values()), default=0)
    print(f"{on}torch {any_link['torch']}; a transformer of {size:,} weights in {arguments.dtype}, {arguments.wrap}, "
          f"{arguments.batch} x {arguments.places} bytes a step and rank")  # fmt: skip
    print(next((one["topology"] for one in any_link["found"].values() if one["topology"]), "no codec ran"))
    for gbit, link in links.items():
        print(table(float(gbit), arguments.nodes, link))
    print(f"\n{arguments.output}")
    if why:
        sys.exit(f"nodes.py: {why}; the tables have the contenders that ended before")


if __name__ == "__main__":
    main()
