"""When a compressed all-reduce pays: docs/WHEN.md and its plot, from the stages that bench/gpu_codec.py has measured.

The model, for one all-reduce of n elements among W ranks, each with a link that moves B bytes a second each way:

    plain        2 (W - 1) / W * n * size / B  +  2 (W - 1) * L        a ring: reduce-scatter and all-gather
    compressed   encode(n) + reduce(n, W) + decode(n)  +  2 (W - 1) / W * n / 8 / B  +  2 * L

L is what an exchange takes however little it moves. Stages are linear in n: their time at 300M elements, and as much as
a call of 1024 elements takes in a graph. Nothing overlaps, unless a gradient is in P parts, each a handle's, on two streams:

    in parts     longer + shorter / P

with the longer and shorter of: P times the stages of n / P elements; P times their exchanges. A P-th of the shorter has
nothing beside it: the stages of the first part, or the exchange of the last. A plain all-reduce inside a switch (NVLS)
moves half as much.
"""

import argparse
import json
import pathlib
import statistics
import textwrap

import report

ROOT = pathlib.Path(__file__).resolve().parent.parent
LATENCY = 10e-6
WORLDS = 2, 4, 8
PARTS = 2, 4, 8
# Bytes a second each way for one rank.
LINKS = [
    ("NVLink of an H200, 18 links", 450e9),
    ("PCIe 5.0, 16 lanes", 55e9),
    ("InfiniBand NDR, 400 Gbit/s", 50e9),
    ("Ethernet, 100 Gbit/s", 12.5e9),
    ("Ethernet, 25 Gbit/s", 3.1e9),
    ("Ethernet, 10 Gbit/s", 1.25e9),
    ("a link of 1 Gbit/s", 0.125e9),
]
SIZES = [2**16, 2**20, 2**24, 300 * 2**20]
BYTES = {"float32": 4, "bfloat16": 2}


class Stages:
    """Seconds of what is measured."""

    def __init__(self, results):
        self.about = results["about"]
        self.large = {row["kind"]: row for row in results["large"] if "seconds" in row}
        small = [row for row in results["sizes"] if row["elements"] <= 4096 and "seconds" in row]
        times = [statistics.median(row["seconds"].get("graph") or row["seconds"]["ours"]) for row in small]
        self.least = statistics.median(times) if times else 0.0

    def of(self, kind, elements):
        row = self.large[kind]
        return self.least + statistics.median(row["seconds"]["ours"]) * elements / row["elements"]

    def all(self, dtype, elements, world):
        return [self.of(f"{stage} {dtype}", elements) for stage in ("encode", f"reduce {world}", "decode")]


def plain(elements, world, rate, dtype):
    return 2 * (world - 1) / world * elements * BYTES[dtype] / rate + 2 * (world - 1) * LATENCY


def exchange(elements, world, rate):
    return 2 * (world - 1) / world * elements / 8 / rate + 2 * LATENCY


def compressed(stages, elements, world, rate, dtype):
    return sum(stages.all(dtype, elements, world)) + exchange(elements, world, rate)


def in_parts(stages, elements, world, rate, dtype, parts):
    """As `compressed`, by several handles on two streams."""
    work = parts * sum(stages.all(dtype, elements / parts, world))
    wire = parts * exchange(elements / parts, world, rate)
    return max(work, wire) + min(work, wire) / parts


def break_even(stages, elements, world, dtype):
    """The rate of a link at which both take the same time; None if compressing is never slower."""
    saved = 2 * (world - 1) / world * elements * (BYTES[dtype] - 1 / 8)
    longer = sum(stages.all(dtype, elements, world)) + 2 * LATENCY - 2 * (world - 1) * LATENCY
    return None if longer <= 0 else saved / longer


def size_name(elements):
    return report.count(elements)


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def factor_rows(stages, dtype, elements):
    for name, rate in LINKS:
        factors = [plain(elements, w, rate, dtype) / compressed(stages, elements, w, rate, dtype) for w in WORLDS]
        yield [name, f"{rate / 1e9:g}", *(f"{factor:.2g}" for factor in factors)]


def stage_rows(stages):
    for dtype in BYTES:
        for world in WORLDS:
            times = stages.all(dtype, 300 * 2**20, world)
            yield [dtype, str(world), *(f"{1e3 * time:.2f}" for time in times), f"{1e3 * sum(times):.2f}"]


def part_rows(stages, elements):
    for name, rate in LINKS:
        gains = [
            compressed(stages, elements, 4, rate, dtype) / in_parts(stages, elements, 4, rate, dtype, parts)
            for dtype in BYTES
            for parts in PARTS
        ]
        yield [name, f"{rate / 1e9:g}", *(f"{gain:.2f}" for gain in gains)]


def break_even_rows(stages):
    for dtype in BYTES:
        for elements in SIZES:
            rates = [break_even(stages, elements, world, dtype) for world in WORLDS]
            yield [dtype, size_name(elements), *("always" if r is None else f"{r / 1e9:.3g}" for r in rates)]


def plot(stages, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gradcodec", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    rates = [10 ** (8 + 4 * k / 200) for k in range(201)]
    for dtype, style in zip(BYTES, ("-", "--")):
        for elements in (2**20, 300 * 2**20):
            factors = [plain(elements, 4, r, dtype) / compressed(stages, elements, 4, r, dtype) for r in rates]
            axes.plot([r / 1e9 for r in rates], factors, style, label=f"{dtype}, {size_name(elements)} elements")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="GB/s each way for a rank", ylabel="times as fast, four ranks")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def page(stages, several, peers):
    """`several`: what there is to say of several GPUs; `peers`: of peer memory, if there is something."""
    about = stages.about
    fill = lambda *sentences: textwrap.fill(" ".join(sentences), 110, break_on_hyphens=False)  # noqa: E731
    return "\n\n".join([
        "# When a compressed all-reduce pays",
        fill(
            "A compressed all-reduce sends 16 to 32 times fewer bytes than a plain one, and takes some time on the GPU to",
            "do so. Whether that pays depends on the link between the ranks (the processes that train together, here each",
            "with a GPU and a link of its own). The tables say how many times as fast a compressed all-reduce is: above 1 it",
            "pays. 1K is 2^10 elements, 1M is 2^20.",
        ),
        fill(
            "`make bench-report` has made this page. The times on the GPU are measured, by `make gpu-bench-codec` on one",
            f"{about['card']} ({about['date']}, commit {about['commit']}): each stage is what 300M elements took, and the few",
            "microseconds of a small call besides. What is between the ranks is a model, unless it is said to be measured:",
            f"{several}.",
        ),
        fill(
            "The model, for W ranks: a plain all-reduce goes round in a ring and moves 2 (W - 1) / W of its bytes over each",
            "rank's link. A compressed one moves 1/32 of that in float32, 1/16 in bfloat16, and takes the time on the GPU in",
            f"addition. Each exchange takes at least {1e6 * LATENCY:.0f} us, a ring W - 1 times as long. Nothing overlaps. If",
            "the all-reduce is hidden behind the backward pass, there is nothing to gain, which the model leaves out.",
        ),
        "## Time on the GPU, in ms, for 300M elements",
        table(["gradient and error", "ranks", "encode", "reduce", "decode", "all"], stage_rows(stages)),
        "## How many times as fast, for 300M elements",
        *(
            part
            for dtype in BYTES
            for part in (
                f"Gradient and error {dtype}, against an all-reduce in {dtype}:",
                table(["link", "GB/s", *(f"{w} ranks" for w in WORLDS)], factor_rows(stages, dtype, 300 * 2**20)),
            )
        ),
        "## In several parts",
        fill(
            "One all-reduce handle cannot send before its scale is known, which is when all of its gradient is encoded, so",
            "nothing overlaps within it. Several handles can overlap: each has a part of the gradient, and they take turns on",
            "two streams, with a communicator for each stream (see [ALLREDUCE.md](ALLREDUCE.md)). How many times as fast as",
            "one handle that is, by the model, for 300M elements and 4 ranks:",
        ),
        table(
            ["link", "GB/s", *(f"{dtype}, {parts} parts" for dtype in BYTES for parts in PARTS)],
            part_rows(stages, 300 * 2**20),
        ),
        "## Up to which link",
        fill(
            "A link of more GB/s than this, each way, makes a plain all-reduce the faster one. *always*: compressing is always",
            "faster, because a ring takes more steps than two exchanges.",
        ),
        table(["gradient and error", "elements", *(f"{w} ranks" for w in WORLDS)], break_even_rows(stages)),
        "![Factor by link](when.svg)",
        *(["## Between GPUs of one node", fill(peers)] if peers else []),
        "## Where it does not pay",
        "\n".join([
            "- Where the all-reduce hides behind the backward pass already.",
            "- Between GPUs of one node, below some size: NCCL's own sum is faster there.",
            "- Where an optimizer needs more than a sign and a scale: see [CODECS.md](CODECS.md).",
            "- On the CPU, where the network sends a gradient faster than the CPU reads it from memory three times.",
        ]),
    ]) + "\n"  # fmt: skip


def of_several(path):
    """What there is to say of several GPUs, of what bench/multi_gpu.py has measured, if it has."""
    if path.exists() and not json.loads(path.read_text())["about"]["rehearsal"]:
        return "what several GPUs reached is in [PERFORMANCE.md](PERFORMANCE.md)"
    return "several GPUs have not been"


def of_peers(path):
    """From which size on the handle over peer memory is faster than NCCL's sum, and how much at the end; None if that has not
    been measured."""
    if not path.exists():
        return None
    results = json.loads(path.read_text())
    said = report.of_peers_and_nccl(results)
    if results["about"]["rehearsal"] or not said:
        return None
    largest = next((row for row in report.as_rows(results) if row["elements"] == report.LARGE), None)
    times = {dtype: largest and report.ratio(largest, f"peers {dtype}", f"nccl {dtype}") for dtype in BYTES}
    of_large = [f"{times[dtype]:.2f} times as fast as NCCL's sum in {dtype}" for dtype in BYTES if times[dtype]]
    world, gpu = results["about"]["world"], results["about"]["ranks"][0]["card"]
    return " ".join([
        f"Measured, unlike the rest: {world} GPUs, {gpu}, over peer memory (gc_comm_open_peers), which is the fastest way between",
        f"GPUs that reach each other. {said} With 300M elements it is {' and '.join(of_large) or 'not measured'}.",
        "Where peer memory cannot be had, as between nodes, the table above holds for the link between them; gc_comm_hierarchical",
        "makes one communicator of both.",
    ])  # fmt: skip


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--results", type=pathlib.Path, default=ROOT / "build/bench/gpu_codec.json")
    options.add_argument("--several", type=pathlib.Path, default=ROOT / "build/bench/multi_gpu.json")
    options = options.parse_args()
    stages = Stages(json.loads(options.results.read_text()))
    plot(stages, ROOT / "docs/when.svg")
    (ROOT / "docs/WHEN.md").write_text(page(stages, of_several(options.several), of_peers(options.several)))


if __name__ == "__main__":
    main()
