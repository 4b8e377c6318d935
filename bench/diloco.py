#!/usr/bin/env python3
"""Training over slow links: DistributedDataParallel and gradcodec.torch.DiLoCo: build/bench/diloco.json and two tables.

    python3 bench/diloco.py [--library PATH] [--part links loss] [--nodes 2] [--gbit 0.1 1]

`links`: every node is a network namespace with one rank, as in bench/nodes.py, which this needs. A transformer of
`--width` and `--layers` is trained on the CPU over gloo. For DistributedDataParallel `--steps` steps are measured; for
DiLoCo as many inner steps and `--exchanges` exchanges, each by itself. Times are the slowest rank's, the median. The
time of 1,000 inner steps follows: 1000 steps; or 1000 inner steps and 1000 / `--sync-every` exchanges. `MB`: of a step
or an exchange, counted at eth0 of node 0, with headers. `hidden`: the part of an exchange that is saved if inner steps
of about the same time run beside it.

`loss`: the small transformer of bench/accuracy.py is trained on the source text of Python's own library, without a
limit of the rate: the loss does not depend on the link. All contenders have the same batches, divided among the ranks,
and AdamW. With `--device cuda` rank r trains on GPU r, over NCCL.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import signal
import statistics
import sys
import time

import accuracy
import nodes
from common import about, markdown, save

CONTENDERS = {
    "DDP float32": None, "DDP INT8": ("int8", "none"), "DiLoCo float32": None, "DiLoCo INT8": ("int8", "none"),
    "DiLoCo INT4, errors kept": ("int4", "float32"), "DiLoCo INT4, no errors": ("int4", "none"),
}  # fmt: skip


class Plain:
    """A float32 all-reduce in place of a DiLoCo's."""

    taken_back = 0

    def __init__(self, dist, torch):
        self.dist, self.torch, self.group = dist, torch, dist.new_group()  # for another thread

    def run(self, tensors):
        flat = self.torch.cat([one.flatten() for one in tensors])
        self.dist.all_reduce(flat, group=self.group)
        flat /= self.dist.get_world_size()
        for one, its in zip(tensors, flat.split([one.numel() for one in tensors])):
            one.copy_(its.view_as(one))

    def state_dict(self):
        return {}

    def commit(self):
        pass

    rollback = close = commit


class Contender:
    """A model, its optimizer, and step() on a batch."""

    def __init__(self, name, model, optimizer, sync_every, delay=0):
        import gradcodec.torch
        import torch
        import torch.distributed as dist

        codec, self.diloco = CONTENDERS[name], None
        self.model, self.optimizer = model, optimizer(model.parameters())
        if name.startswith("DDP"):
            self.model = torch.nn.parallel.DistributedDataParallel(model)
            if codec is not None:
                gradcodec.torch.compress(self.model, codec[0], error=codec[1])
            return
        of, error = codec or ("bf16", "none")
        self.diloco = gradcodec.torch.DiLoCo(model, sync_every=sync_every, delay=delay, codec=of, error=error)
        if codec is None:
            plain = Plain(dist, torch)
            plain._group = self.diloco._group
            self.diloco._reducers = [plain]

    def step(self, batch):
        self.optimizer.zero_grad()
        self.model(batch).backward()  # the model returns the loss
        self.optimizer.step()


# --- ranks ------------------------------------------------------------------------------------------------------------


def links(a, torch, dist):
    """Returns, by contender, seconds of a step and, for DiLoCo, of an exchange and of one beside inner steps."""
    generator, found = torch.Generator().manual_seed(a.rank), {}
    text = torch.randint(256, (4, 65), generator=generator)

    def timed(function):
        dist.barrier()
        began = time.perf_counter()
        function()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    for name in CONTENDERS:
        a.now, model = name, nodes.model_of(torch, a.width, a.layers)
        one = Contender(name, model, torch.optim.AdamW, 100, delay=99)
        for _ in range(3):
            one.step(text)
        found[name] = its = {"parameters": sum(each.numel() for each in model.parameters())}
        before = nodes.sent()
        its["steps"] = [timed(lambda: one.step(text)) for _ in range(a.steps)]
        its["bytes"] = (nodes.sent() - before) / a.steps
        if one.diloco is None:
            continue

        def exchange(inner):
            one.diloco._begin(0)
            for _ in range(inner):
                one.step(text)
            one.diloco._end()

        exchange(0)
        before = nodes.sent()
        its["exchanges"] = [timed(lambda: exchange(0)) for _ in range(a.exchanges)]
        its["bytes"] = (nodes.sent() - before) / a.exchanges
        inner = min(50, math.ceil(statistics.median(its["exchanges"]) / statistics.median(its["steps"])))
        its["inner"], its["beside"] = inner, [timed(lambda: exchange(inner)) for _ in range(a.exchanges)]
        its["alone"] = [timed(lambda: [one.step(text) for _ in range(inner)]) for _ in range(a.exchanges)]
    return found


def losses(a, torch, dist):
    """Returns, by contender, the validation loss at the end, of each seed."""
    task = accuracy.SIZES[a.size]._replace(steps=a.train)
    text, found = accuracy.Text(torch, task), {name: [] for name in CONTENDERS}

    for seed in range(a.seeds):
        for name in CONTENDERS:
            a.now, generator = name, torch.Generator().manual_seed(seed)
            model = accuracy.transformer(torch, task, generator, a.device)
            adam = functools.partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=accuracy.DECAY)
            one = Contender(name, model, adam, a.sync_every)
            for step in range(1, task.steps + 1):
                for each in one.optimizer.param_groups:
                    each["lr"] = task.rates["adamw"] * accuracy.rate_of(step, task.steps)
                one.step(text.batch(task.batch, generator).chunk(dist.get_world_size())[a.rank].to(a.device))
                if one.diloco is not None:
                    one.diloco.step()
            found[name].append(accuracy.judge(torch, model, text, task, a.device))
            if a.rank == 0:
                print(f"seed {seed}, {name}: {found[name][-1]:.4f}", flush=True)
                a.to.write_text(json.dumps(found))
    return found


def rank_main(a):
    links_only = a.part == ["links"]
    os.environ |= {"GRADCODEC_NODE": f"node{a.rank}", "GLOO_SOCKET_IFNAME": "eth0" if links_only else "lo"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = "gloo"
    if a.device == "cuda" and not links_only:
        torch.cuda.set_device(a.rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{a.to}.store", rank=a.rank, world_size=a.nodes)
    found = (links if links_only else losses)(a, torch, dist)
    dist.barrier()
    if a.rank == 0:
        a.to.write_text(json.dumps(found))
    os._exit(0)  # threads of PyTorch's may abort a process whose interpreter ends


# --- all of them ------------------------------------------------------------------------------------------------------


def table_of_links(a, gbit, found):
    heads = ["", "MB", "ms a step", "ms an exchange", "s per 1,000 inner steps", "of DDP float32's", "hidden"]
    rows, base = [], None
    for name, its in found.items():
        step, cells = statistics.median(its["steps"]), ["", ""]
        whole = 1000 * step
        if "exchanges" in its:
            exchange = statistics.median(its["exchanges"])
            whole += 1000 / a.sync_every * exchange
            saved = exchange - (statistics.median(its["beside"]) - statistics.median(its["alone"]))
            cells = [f"{1e3 * exchange:.0f}", f"{100 * saved / exchange:.0f} %"]
        base = base or whole
        row = [name, f"{its['bytes'] / 1e6:.2f}", f"{1e3 * step:.0f}", cells[0], f"{whole:.0f}"]
        rows.append([*row, f"{whole / base:.3f}", cells[1]])
    return f"\n{gbit:g} Gbit/s\n{markdown(heads, rows)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, help="of the library, if not the one that the package finds")
    parser.add_argument("--part", nargs="+", choices=("links", "loss"), default=["loss", "links"])
    parser.add_argument("--nodes", type=int, choices=range(2, 9), default=2)
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 1])
    numbers = {"steps": 20, "exchanges": 5, "width": 256, "layers": 4, "seeds": 3, "train": 1000, "sync-every": 100}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--size", choices=accuracy.SIZES, default="small", help="of the transformer that is judged")
    parser.add_argument("--output", type=pathlib.Path, default=nodes.ROOT / "build/bench/diloco.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the loss")
    for name, kind in ("rank", int), ("to", pathlib.Path):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.rank is not None:
        return nodes.run_rank(rank_main, a)
    if nodes.INSIDE not in os.environ:
        nodes.enter()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the kernel ignores it for process 1 otherwise
    if a.library:
        os.environ["GRADCODEC_LIBRARY"] = str(a.library.resolve())
    asked = {name: getattr(a, name) for name in ("nodes", *(each.replace("-", "_") for each in numbers), "size")}
    found = about(load_before=os.getloadavg()[0], **asked, links={})
    print(found, flush=True)
    nodes.command("ip", "link", "set", "lo", "up")
    ends = nodes.connect(a.nodes)
    for part in a.part:
        for gbit in a.gbit if part == "links" else [None]:
            if gbit is not None:
                nodes.limit(ends, gbit, burst=256)  # less than 4 bits per weight
            to = pathlib.Path(f"/run/{part}-{gbit}")
            why = nodes.run_ranks(a.nodes, a.nodes if part == "links" else 1, "--to", str(to), "--part", part)
            if why:
                sys.exit(f"diloco.py: {why}")
            its = json.loads(to.read_text())
            found.update({"losses": its} if gbit is None else {"links": {**found["links"], f"{gbit:g}": its}})
            if gbit is not None:
                print(table_of_links(a, gbit, its), flush=True)
            else:
                rows = [[name, f"{statistics.fmean(of):.4f}", f"{min(of):.4f} to {max(of):.4f}"] for name, of in its.items()]
                print(markdown(["", "validation loss", "seeds"], rows), flush=True)
            save(a.output, found)


if __name__ == "__main__":
    main()
