"""Measures what each codec costs in accuracy, by optimizer: build/bench/accuracy.json and a table.

    python3 bench/accuracy.py --library lib/libgradcodec.so.0                   on a GPU, if torch has one
    python3 bench/accuracy.py --library lib/libgradcodec.so.0 --size small      what a CPU does in minutes

A transformer of 10.9 million parameters is trained on the source text of Python's own library, byte for byte. Its loss
on files that it was not trained on is measured, in nats per byte.

All ranks share one process and one device. Each rank has its own part of every batch, its own gradient and its own
codec with its own errors; payloads are moved unchanged. So the bytes are those of gc_allreduce_run. The weights are the
same on all ranks, so one model computes the gradients, one rank after the other.

Each run is written to the JSON file when it ends; runs that the file has are not run again.
"""

import argparse
import contextlib
import json
import math
import pathlib
import statistics
import sys
import sysconfig
import time
from collections import namedtuple

from common import ROOT, markdown, save

# --- runs -------------------------------------------------------------------------------------------------------------

# `gather`: the codec that FSDP gathers parameters in.
Run = namedtuple("Run", "optimizer codec error world gather", defaults=["none"])

# Block codecs, each with the dtype of its errors.
BLOCKS = [("bf16", "none"), ("mxfp8", "none"), ("int8", "none"), ("int8", "float32"), ("int4", "none"),
          ("int4", "float32"), ("mxfp4", "none"), ("mxfp4", "float32")]  # fmt: skip
PLAIN = "float32", "none"
RUNS = [
    *(Run("adamw", *codec, 4) for codec in [PLAIN, *BLOCKS, ("onebit", "float32")]),
    *(Run("1-bit adam", *codec, 4) for codec in [PLAIN, ("onebit", "float32")]),
    *(Run("lion", *codec, 4) for codec in [PLAIN, ("sign", "none")]),
    *(Run("sgd", *codec, 4) for codec in [PLAIN, ("int8", "none"), ("int4", "none"), ("int4", "float32"),
                                          ("mxfp4", "float32"), ("onebit", "float32")]),
    Run("1-bit sgd", "onebit", "float32", 4),
    *(Run(optimizer, *codec, world) for world in (2, 8) for optimizer, *codec in [
        ("adamw", *PLAIN), ("adamw", "int8", "none"), ("adamw", "int4", "none"), ("adamw", "int4", "float32"),
        ("1-bit adam", "onebit", "float32"), ("lion", "sign", "none")]),
    *(Run("adamw", *PLAIN, 4, gather) for gather in ("int8", "mxfp8")),
]  # fmt: skip

# Steps, examples of a batch (all ranks together), and the learning rate of each optimizer.
Task = namedtuple("Task", "steps batch rates width layers context")
# AdamW and 1-bit Adam have the rates of the tables, untuned. The others have the best of 3 to 6 for one seed by `--size
# small --seeds 1 --rate ...`, and at full size by the same on a GPU.
RATES = {"adamw": 1e-3, "1-bit adam": 1e-3, "lion": 5e-4, "sgd": 0.01, "1-bit sgd": 0.1}
SIZES = {
    "full": Task(500, 32, {**RATES, "lion": 1e-4, "1-bit sgd": 0.01}, 384, 6, 256),
    "small": Task(200, 16, RATES, 96, 3, 64),
    "tiny": Task(20, 8, RATES, 32, 1, 32),
}
DECAY = 0.1  # AdamW's and Lion's weight decay
EPSILON = 1e-8  # Adam's
WARM = 0.15  # part of the steps that 1-bit Adam warms up in; the learning rate rises in a third of that


# --- the model --------------------------------------------------------------------------------------------------------


def transformer(torch, task, generator, device):
    """Returns a transformer, whose call returns the mean loss of [batch, context + 1] bytes; on a GPU in bfloat16."""
    functional, width, heads = torch.nn.functional, task.width, max(1, task.width // 64)
    shapes = {"bytes": (256, width), "places": (task.context, width)}
    for n in range(task.layers):
        shapes |= {
            f"{n}.norm1": (width,), f"{n}.attention": (width, 3 * width), f"{n}.out": (width, width),
            f"{n}.norm2": (width,), f"{n}.up": (width, 4 * width), f"{n}.down": (4 * width, width),
        }  # fmt: skip
    shapes |= {"norm": (width,), "head": (width, 256)}

    def begin(name):
        if "norm" in name:
            return torch.ones(shapes[name])
        narrow = 1 / math.sqrt(2 * task.layers) if name.endswith(("out", "down")) else 1
        return torch.randn(shapes[name], generator=generator) * 0.02 * narrow

    class Transformer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.nn.Parameter(begin(name).to(device)) for name in shapes)

        @torch.autocast("cuda", torch.bfloat16, enabled=torch.device(device).type == "cuda")
        def forward(self, examples):
            weights = dict(zip(shapes, self.weights))

            def norm(x, name):
                return functional.layer_norm(x, (width,)) * weights[name]

            x = functional.embedding(examples[:, :-1], weights["bytes"]) + weights["places"]
            for n in range(task.layers):
                three = norm(x, f"{n}.norm1") @ weights[f"{n}.attention"]
                seen = functional.scaled_dot_product_attention(
                    *three.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4), is_causal=True
                )
                x = x + seen.transpose(1, 2).flatten(2) @ weights[f"{n}.out"]
                x = x + functional.gelu(norm(x, f"{n}.norm2") @ weights[f"{n}.up"]) @ weights[f"{n}.down"]
            said = (norm(x, "norm") @ weights["head"]).float()
            return functional.cross_entropy(said.flatten(0, 1), examples[:, 1:].flatten())

    return Transformer()


# --- text -------------------------------------------------------------------------------------------------------------


class Text:
    """The .py files of Python's own library, without its tests; each tenth file is held out."""

    def __init__(self, torch, task):
        folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
        left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
        files = sorted(file for file in folder.rglob("*.py") if not left_out & set(file.relative_to(folder).parts))
        of = [b"".join(f.read_bytes() for n, f in enumerate(files) if (n % 10 == 9) == unseen) for unseen in (False, True)]
        self.seen, self.unseen = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in of)
        self.torch, self.context = torch, task.context
        self.described = f"{len(of[0]) / 1e6:.1f} MB of {len(files)} files of Python {sys.version.split()[0]}"

    def of(self, text, count, generator):
        torch = self.torch
        begins = torch.randint(len(text) - self.context - 1, (count,), generator=generator)
        return text[begins[:, None] + torch.arange(self.context + 1)].long()

    def batch(self, count, generator):
        return self.of(self.seen, count, generator)

    def judged(self, count, n):
        return self.of(self.unseen, count, self.torch.Generator().manual_seed(1000 + n))


# --- ranks ----------------------------------------------------------------------------------------------------------


class Exchange:
    """The mean over the ranks, as an all-reduce by this codec gives it; `codec` None: in float32."""

    def __init__(self, library, torch, run, shapes, device, codec=None):
        self.torch, self.world, self.bytes = torch, run.world, 0
        self.sizes = [math.prod(shape) for shape in shapes]
        self.codecs, n = None, sum(self.sizes)
        self.each = 2 * (self.world - 1) * 4 * n / self.world  # bytes of a ring all-reduce
        if codec is None:
            return
        raw = None if codec in ("onebit", "sign") else [len(shape) < 2 for shape in shapes]
        own = {"error": run.error, "n_chunks": self.world, "device": device, "raw": raw}
        self.codecs = [library.codec(codec, self.sizes, server=rank + 1, **own) for rank in range(self.world)]
        size = self.codecs[0].payload_bytes
        chunk = size // self.world
        self.payloads = torch.empty((self.world, self.world, chunk), dtype=torch.uint8, device=device)
        self.means = torch.empty((self.world, chunk), dtype=torch.uint8, device=device)
        self.each = (self.world - 1) * (size if self.codecs[0].exchanges == 1 else 2 * chunk)

    def parts(self, flat):
        return list(self.torch.split(flat, self.sizes))

    def __call__(self, vectors):
        """Returns the mean of [W, n], a row for each rank; for SIGN the sign of the vote."""
        self.bytes += self.each
        if self.codecs is None:
            return vectors.mean(0)
        for codec, vector, payload in zip(self.codecs, vectors, self.payloads):
            codec.encode(self.parts(vector), payload.view(-1))
        arrived = self.payloads.transpose(0, 1).contiguous()  # the all_to_all
        for rank, codec in enumerate(self.codecs):
            codec.reduce(rank, arrived[rank], self.means[rank])
        mean = self.torch.empty_like(vectors[0])
        self.codecs[0].decode(self.means.view(-1), self.parts(mean))  # the all_gather: every rank decodes the same
        return mean

    def close(self):
        for codec in self.codecs or ():
            codec.close()


class Gather:
    """Decodes the weights that all ranks compute with, from the exact ones."""

    def __init__(self, library, torch, run, shapes, device):
        self.torch, self.codec = torch, None
        if run.gather == "none":
            return
        raw, self.sizes = [len(shape) < 2 for shape in shapes], [math.prod(shape) for shape in shapes]
        self.codec = library.codec(run.gather, self.sizes, error="none", device=device, raw=raw)
        self.payload = torch.empty(self.codec.payload_bytes, dtype=torch.uint8, device=device)

    def __call__(self, x):
        if self.codec is None:
            return x
        self.codec.encode(list(self.torch.split(x, self.sizes)), self.payload)
        decoded = self.torch.empty_like(x)
        self.codec.decode(self.payload, list(self.torch.split(decoded, self.sizes)))
        return decoded


class Optimizer:
    """An optimizer of `x`, all weights as one vector, given the ranks' gradients, [W, n]."""

    def __init__(self, torch, run, x, task, plain, exchange):
        self.torch, self.kind, self.plain, self.exchange = torch, run.optimizer, plain, exchange
        self.m, self.v, self.x, self.votes = torch.zeros_like(x), torch.zeros_like(x), x, run.codec == "sign"
        self.frozen = max(1, int(WARM * task.steps))
        if self.votes:
            self.own = torch.zeros((run.world, x.numel()), device=x.device)

    def step(self, step, rate, gradients):
        """`step` counts from 1."""
        getattr(self, self.kind.replace("-", "_").replace(" ", "_").replace("1", "one"))(step, rate, gradients)

    def adam(self, step, rate, g):
        self.m.mul_(0.9).add_(g, alpha=0.1)
        self.v.mul_(0.99).addcmul_(g, g, value=0.01)
        root = (self.v / (1 - 0.99**step)).sqrt_().add_(EPSILON)
        self.x.mul_(1 - rate * DECAY).addcdiv_(self.m / (1 - 0.9**step), root, value=-rate)

    def adamw(self, step, rate, gradients):
        self.adam(step, rate, self.exchange(gradients))

    def one_bit_adam(self, step, rate, gradients):
        """Steps like gradcodec.torch.OneBitAdam. The control exchanges in float32."""
        if step <= self.frozen:
            self.adam(step, rate, self.plain(gradients))
            if step == self.frozen:
                self.v /= 1 - 0.99**step
            return
        self.m = self.exchange(self.m * 0.9 + gradients * 0.1)
        change = (self.m / (self.v.sqrt() + EPSILON)).clamp_(-1, 1) + DECAY * self.x
        self.x.add_(self.torch.where(self.v > 0, change, 0), alpha=-rate)

    def lion(self, step, rate, gradients):
        """Steps by Lion. With votes each rank has its own momentum, and sends its update's sign (Distributed Lion)."""
        if self.votes:
            vote = self.exchange(self.own * 0.9 + gradients * 0.1)
            self.own.mul_(0.99).add_(gradients, alpha=0.01)
        else:
            g = self.exchange(gradients)
            vote = (self.m * 0.9 + g * 0.1).sign_()
            self.m.mul_(0.99).add_(g, alpha=0.01)
        self.x.mul_(1 - rate * DECAY).add_(vote, alpha=-rate)

    def sgd(self, step, rate, gradients):
        self.m.mul_(0.9).add_(self.exchange(gradients))
        self.x.add_(self.m, alpha=-rate)

    def one_bit_sgd(self, step, rate, gradients):
        """Steps like gradcodec.torch.OneBitSGD."""
        self.m = self.exchange(self.m * 0.9 + gradients)
        self.x.add_(self.m, alpha=-rate)


def rate_of(step, steps):
    """Returns the part of the highest rate: a rise in the first twentieth, then half a cosine down to a tenth."""
    rise = max(1, int(WARM / 3 * steps))
    if step <= rise:
        return step / rise
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))


def train(torch, library, data, task, run, seed, device):
    """Trains once, and returns the results that the file keeps."""
    began, generator = time.monotonic(), torch.Generator().manual_seed(seed)
    model = transformer(torch, task, generator, device)
    weights = list(model.parameters())
    x, shapes = torch.nn.utils.parameters_to_vector(weights).detach(), [one.shape for one in weights]
    gradients = torch.empty((run.world, x.numel()), device=device)
    plain = Exchange(library, torch, run, shapes, device)
    sent = plain if run.codec == "float32" else Exchange(library, torch, run, shapes, device, run.codec)
    optimizer, gathered = Optimizer(torch, run, x, task, plain, sent), Gather(library, torch, run, shapes, device)
    for step in range(1, task.steps + 1):
        torch.nn.utils.vector_to_parameters(gathered(x), weights)
        for own, examples in zip(gradients, data.batch(task.batch, generator).to(device).chunk(run.world)):
            found = torch.autograd.grad(model(examples), weights)
            torch.cat([one.flatten() for one in found], out=own)
        optimizer.step(step, task.rates[run.optimizer] * rate_of(step, task.steps), gradients)
    torch.nn.utils.vector_to_parameters(x, weights)
    loss = judge(torch, model, data, task, device)
    sent.close()
    found = {"loss": loss if math.isfinite(loss) else None, "bytes": sum(each.bytes for each in {plain, sent})}
    return {**found, "parameters": x.numel(), "seconds": time.monotonic() - began}


def judge(torch, model, data, task, device):
    """Returns the loss on held-out files."""
    with torch.no_grad():
        return statistics.fmean(model(data.judged(task.batch, n).to(device)).item() for n in range(16))


# --- the table --------------------------------------------------------------------------------------------------------


def show(document):
    """Prints what ran, the mean of the seeds, the lowest and the highest, and MB that a rank has sent."""
    cells = {}
    for result in document["results"]:
        cells.setdefault(Run(*(result[name] for name in Run._fields)), []).append(result)
    rows = []
    for run in sorted(cells, key=lambda run: (run.world != 4, run.world, RUNS.index(run))):
        of = cells[run]
        losses = [one["loss"] for one in of if one["loss"] is not None]
        diverged = len(losses) < len(of) or max(losses) > 100
        numbers = ["diverged", ""] if diverged else [f"{statistics.mean(losses):.4f}", f"{min(losses):.4f} to {max(losses):.4f}"]
        rows.append([*run, *numbers, len(of), f"{of[0]['bytes'] / 1e6:,.1f}"])
    if rows:
        print(f"\n{document['results'][0]['parameters']:,} parameters, {document['task']}\n")
        heads = ["optimizer", "codec", "errors", "ranks", "gathered", "loss", "lowest to highest", "seeds", "MB sent by a rank"]
        print(markdown(heads, rows, left=3))


# --- all of it --------------------------------------------------------------------------------------------------------


def kept_or_new(path, key):
    """Returns the file's document if it is of the same measurement, or else a new one."""
    with contextlib.suppress(FileNotFoundError):
        document = json.loads(path.read_text())
        if document["key"] == key:
            return document
    return {"key": key, "results": []}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, help="the library's file")
    parser.add_argument("--size", choices=SIZES, help="full where torch has a GPU, otherwise small")
    parser.add_argument("--device", help="cpu or cuda:0; the GPU where there is one")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a run, if not those of the size")
    parser.add_argument("--only", default="", help="runs whose name has these words: 'adamw int4'")
    parser.add_argument("--rate", type=float, help="another learning rate, to find one")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build/bench/accuracy.json")
    options = parser.parse_args()

    import torch
    from gradcodec import GradCodec

    library = GradCodec(options.library and str(options.library.resolve()))
    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    size = options.size or ("small" if device == "cpu" else "full")
    where = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    key = {"size": size, "device": where, "torch": torch.__version__, "rate": options.rate, "steps": options.steps}
    document = kept_or_new(options.output, key)
    done = {(one["seed"], *(one[name] for name in Run._fields)) for one in document["results"]}
    task = SIZES[size]
    if options.steps:
        task = task._replace(steps=options.steps)
    if options.rate:
        task = task._replace(rates=dict.fromkeys(task.rates, options.rate))
    data = Text(torch, task)
    document["task"] = f"{data.described}, {task.steps} steps of {task.batch} examples, {where}"
    # Runs are made seed by seed, so that an interruption loses the last seed, not the last codecs.
    for seed in range(options.seeds):
        for run in RUNS:
            title = f"{run.optimizer} {run.codec} errors={run.error} ranks={run.world} gathered={run.gather}"
            if (seed, *run) in done or not all(word in title for word in options.only.split()):
                continue
            result = train(torch, library, data, task, run, seed, device)
            document["results"].append({"seed": seed, **run._asdict(), **result})
            save(options.output, document)
            print(f"seed {seed} {title}: loss {result['loss']}, {result['seconds']:.1f} s", flush=True)
    show(document)


if __name__ == "__main__":
    main()
