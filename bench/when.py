"""When a compressed all-reduce pays: docs/WHEN.md and its picture, by a model fitted to tables of docs/PERFORMANCE.md.

    python bench/when.py               writes both; make bench-report does so
    python bench/when.py --errors      prints the model's error at every time that was measured between two GPUs

The model, for n elements among W ranks, each with a link of B bytes a second each way (NVLink: B0):

    plain        a + 2 (W - 1) / W * n * size / (share * B)            size: 4 or 2 bytes; share: what NCCL gets of B0
    compressed   a + k * n + 2 (W - 1) / W * n * sent / (share * B)    sent: bytes per element of a payload

`a` is the time however little is sent, `k` the time of the kernels per element. Both are fitted to what was measured in
a graph between two GPUs, so that the squares of the relative errors are least; NCCL has a pair for less than 2 MiB and
one for more, block codecs an `a` of their own where ranks exchange once. Nothing overlaps, unless a gradient is in P
parts, each a handle's, on two streams:

    in parts     longer + shorter / P        of what the kernels and the links take, each with half of P times `a`
"""

import argparse
import re
import statistics
import textwrap
from collections import namedtuple

import figures
from figures import FULL, ordinal

WORLDS = 2, 8
PARTS = 2, 8
NVLINK = 450e9
# Bytes a second each way for one rank.
LINKS = [
    ("NVLink of an H200, 18 links", NVLINK),
    ("PCIe 5.0, 16 lanes", 55e9),
    ("InfiniBand NDR, 400 Gbit/s", 50e9),
    ("Ethernet, 100 Gbit/s", 12.5e9),
    ("Ethernet, 25 Gbit/s", 3.1e9),
    ("Ethernet, 10 Gbit/s", 1.25e9),
    ("a link of 1 Gbit/s", 0.125e9),
]
SIZES = [2**16, 2**20, 2**24, FULL]
BYTES = {"float32": 4, "bfloat16": 2}
SENT = {"bf16": 2, "mxfp8": 1.03125, "int8": 1.03125, "int4": 0.5625, "mxfp4": 0.53125, "onebit": 0.125}
SHOWN = "int8", "int4", "onebit"
# Bytes of all payloads up to which ranks of block codecs without errors exchange once: docs/NUMERICS.md, 9.
ONCE, ONCE_OF_TWO = 2**20, 2**22
LEAST = 2**12  # elements from which on the line of one exchange is fitted: fewer take as long, or longer
SIMPLE = 2**21  # bytes from which on NCCL takes another protocol, by the times that were measured
HOW = "in a graph", "from C", "from Python"
OVER = " over NCCL"

Line = namedtuple("Line", "least slope")  # seconds however little, and seconds for each byte or element


def fitted(points):
    """The line through {x: seconds} of the least squares of relative errors; a level one through a single point."""
    if len(points) == 1:
        return Line(*points.values(), 0)
    ones = sum(1 / t**2 for t in points.values())
    xs = sum(x / t**2 for x, t in points.items())
    squares = sum(x**2 / t**2 for x, t in points.items())
    left, right = sum(1 / t for t in points.values()), sum(x / t for x, t in points.items())
    by = ones * squares - xs**2
    return Line((left * squares - right * xs) / by, (ones * right - xs * left) / by)


def once(codec, elements, world=2):
    """Whether ranks exchange once; a payload has a header, so exactly so many bytes are too many."""
    codec, most = codec.removesuffix(OVER), ONCE_OF_TWO if world == 2 else ONCE
    return codec in SENT and codec != "onebit" and world * elements * SENT[codec] < most


def measured(part, how):
    """{(who, dtype): {elements: seconds}} of two GPUs, of the tables in that part of docs/PERFORMANCE.md."""
    found = {}
    for dtype in BYTES:
        header, rows = figures.the_table(figures.part(part), f"{dtype} {how}, us")
        for place, who in enumerate(header[1:], 1):
            cells = {figures.size(row[0]): row[place].split(" (")[0] for row in rows}
            found[who, dtype] = {n: float(cell) * 1e-6 for n, cell in cells.items() if n and cell != "-"}
    return found


class Model:
    """Fitted to what was measured in one way of calling."""

    def __init__(self, how):
        times = measured("all codecs", how)
        nccl = {n * BYTES[dtype]: t for dtype in BYTES for n, t in times["NCCL", dtype].items()}
        self.nccl = [fitted({b: t for b, t in nccl.items() if (b >= SIMPLE) == large}) for large in (False, True)]
        self.share = 1 / self.nccl[True].slope / NVLINK
        self.lines, self.once = {}, {}
        for (who, dtype), of in times.items():
            if who == "NCCL":
                continue
            self.lines[who, dtype] = fitted({n: t for n, t in of.items() if not once(who, n)})
            alone = {n: t for n, t in of.items() if once(who, n) and n >= LEAST}
            if alone:
                self.once[who, dtype] = fitted(alone)

    def between_two(self, who, dtype, elements):
        """Seconds between the two GPUs that it is fitted to."""
        if who == "NCCL":
            line = self.nccl[elements * BYTES[dtype] >= SIMPLE]
            return line.least + line.slope * elements * BYTES[dtype]
        line = (self.once if once(who, elements) else self.lines)[who, dtype]
        return line.least + line.slope * elements

    def kernels(self, codec, dtype, rate):
        """Seconds of kernels for each element. The link had at least as much of the measured time as it takes at its
        full rate. Over other links NCCL moves payloads, and takes as much longer for each byte as was measured of INT8.
        """
        own = self.lines[codec, dtype].slope - SENT[codec] / NVLINK
        if rate == NVLINK:
            return own
        over = self.lines["int8" + OVER, dtype].slope - SENT["int8"] * self.nccl[True].slope
        peers = self.lines["int8", dtype].slope - SENT["int8"] / NVLINK
        return own + max(0, over - peers) / SENT["int8"] * SENT[codec]

    def wire(self, codec, elements, world, rate):
        at = NVLINK if rate == NVLINK else self.share * rate
        return 2 * (world - 1) / world * elements * SENT[codec] / at

    def plain(self, elements, world, rate, dtype):
        moved = 2 * (world - 1) / world * elements * BYTES[dtype]
        line = self.nccl[moved >= SIMPLE]
        return line.least + line.slope * moved * NVLINK / rate

    def least(self, codec, dtype, elements, world, rate):
        """Over other links than NVLink that of INT8 over NCCL, the only one that was measured there."""
        who = codec if rate == NVLINK else "int8" + OVER
        return (self.once if once(codec, elements, world) else self.lines)[who, dtype].least

    def compressed(self, codec, elements, world, rate, dtype):
        work = self.kernels(codec, dtype, rate) * elements
        return self.least(codec, dtype, elements, world, rate) + work + self.wire(codec, elements, world, rate)

    def in_parts(self, codec, elements, world, rate, dtype, parts):
        """As `compressed`, by several handles on two streams."""
        least = self.least(codec, dtype, elements // parts, world, rate)
        work = self.kernels(codec, dtype, rate) * elements + parts * least / 2
        wire = self.wire(codec, elements, world, rate) + parts * least / 2
        return max(work, wire) + min(work, wire) / parts

    def factor(self, codec, elements, world, rate, dtype):
        return self.plain(elements, world, rate, dtype) / self.compressed(codec, elements, world, rate, dtype)

    def break_even(self, codec, elements, world, dtype):
        """The rate of a link from which on compressing is the slower one; None if that is beyond NVLink's."""
        low, high = 1e6, 0.999 * NVLINK
        if self.factor(codec, elements, world, high, dtype) >= 1:
            return None
        for _ in range(60):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.factor(codec, elements, world, middle, dtype) >= 1 else (low, middle)
        return low


# --- what the page says -----------------------------------------------------------------------------------------------


def table(header, rows):
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def calibration(model):
    for dtype in BYTES:
        for codec, sent in SENT.items():
            lines = [of.get((codec, dtype)) for of in (model.once, model.lines)]
            kernels = [f"{1e12 * model.kernels(codec, dtype, rate):.2f}" for rate in (NVLINK, 0)]
            fixed = [f"{1e6 * line.least:.1f}" if line else "" for line in lines]
            yield [f"{codec}, {dtype}", f"{sent:g}", *fixed, *kernels]


def factors(model, dtype):
    for name, rate in LINKS:
        cells = [f"{model.factor(codec, FULL, world, rate, dtype):.2g}" for codec in SHOWN for world in WORLDS]
        yield [name, f"{rate / 1e9:g}", *cells]


def in_parts(model):
    for name, rate in LINKS:
        whole = {codec: model.compressed(codec, FULL, 4, rate, "float32") for codec in SHOWN}
        parted = [(codec, model.in_parts(codec, FULL, 4, rate, "float32", parts)) for codec in SHOWN for parts in PARTS]
        yield [name, f"{rate / 1e9:g}", *(f"{whole[codec] / time:.2f}" for codec, time in parted)]


def break_even(model):
    for dtype in BYTES:
        for elements in SIZES:
            rates = [model.break_even(codec, elements, world, dtype) for codec in SHOWN for world in WORLDS]
            yield [f"{dtype}, {ordinal(elements)}", *("NVLink" if r is None else f"{r / 1e9:.3g}" for r in rates)]


def errors(model, part, how):
    """(who, dtype, {elements: relative error}) of each row that was measured."""
    for (who, dtype), times in measured(part, how).items():
        said = who.removesuffix(", against")
        if part == "exchanges" and who != "NCCL":
            # The first library exchanges once at any size, the other one never.
            times = {n: t for n, t in times.items() if once(said, n) == (said == who)}
        yield who, dtype, {n: model.between_two(said, dtype, n) / t - 1 for n, t in times.items()}


def error_rows(model, part, how):
    found = list(errors(model, part, how))
    sizes = sorted({n for _, _, of in found for n in of})
    rows = [[f"{who}, {dtype}", *(f"{round(100 * of[n]):+d}" if n in of else "" for n in sizes)] for who, dtype, of in found]
    return [f"{how}, %", *map(ordinal, sizes)], rows


def all_errors(how):
    model = Model(how)
    found = [("over" in who, abs(error)) for who, _, of in errors(model, "all codecs", how) for error in of.values()]
    peers, nccl = ([error for over, error in found if over == wanted] for wanted in (False, True))
    return [how, str(len(peers)), *(f"{100 * each:.0f}" for each in (statistics.median(peers), max(peers), max(nccl)))]


def onebit_over_nccl(model):
    """ONEBIT over NCCL, of another run, to which nothing is fitted."""
    for dtype in BYTES:
        times = figures.column(figures.of_dtype(figures.part("several cards"), dtype), "in a graph")
        slower = model.kernels("onebit", dtype, 0) + SENT["onebit"] * model.nccl[True].slope
        least = model.lines["int8" + OVER, dtype].least
        yield dtype, {n: (least + slower * n) / (us * 1e-6) - 1 for n, us in times.items()}


def training_rows(model):
    """What exchanges add to a step beside what the model says of them alone."""
    text = figures.part("training step")
    weights = {name: float(of) * 1e6 for name, of in re.findall(r"(\w+):\s+([\d.]+)\s+million\s+weights", text)}
    header, rows = figures.the_table(text, "model, gradients", "exchange", "added")
    for row in rows:
        (size, dtype), exchange = row[0].split(", "), row[1]
        codec = exchange.split(", ")[0]
        if exchange == "NCCL":
            alone = model.plain(weights[size], 2, NVLINK, dtype)
        elif exchange.endswith(", peers"):
            alone = model.between_two("int4 errors" if codec == "int4" else codec, dtype, weights[size])
        else:
            continue
        yield [row[0], exchange, f"{1e3 * alone:.2f}", row[header.index("added")]]


def link_rows():
    """Steps over links of a known rate: no exchange, and then the bytes at that rate, with nothing beside them."""
    text = figures.part("real link")
    weights = int(re.search(r"transformer\s+of\s+([\d,]+)\s+weights", text)[1].replace(",", ""))
    header, rows = figures.the_table(text, "link", "gradients", "ms")
    alone = {row[0]: float(row[2]) for row in rows if row[1] == "no exchange"}
    for link, gradients, took, *_ in rows:
        if gradients != "no exchange":
            said = alone[link] + 1e3 * weights * {**BYTES, **SENT}[gradients] * 8 / (float(link.split()[0]) * 1e9)
            yield [link, gradients, took, f"{said:.0f}", f"{round(100 * (said / float(took) - 1)):+d}"]


def plot(model):
    pyplot = figures.pyplot()
    figure, panel = pyplot.subplots(figsize=(8, 4), layout="constrained")
    rates = [10 ** (8 + 3.64 * k / 200) for k in range(201)]
    for codec, color in zip(SHOWN, (figures.SECOND, figures.OURS, figures.OTHER)):
        for elements, style in ((FULL, "-"), (2**20, "--")):
            times = [model.factor(codec, elements, 4, rate, "float32") for rate in rates]
            panel.plot([rate / 1e9 for rate in rates], times, style, color=color, label=f"{codec}, {ordinal(elements)}")
    panel.axhline(1, color="0.3", linewidth=1)
    panel.text(0.1, 0.95, "as fast as NCCL", fontsize=8.5, color="0.3", va="top")
    panel.set_xscale("log")
    figures.logarithmic(panel)
    panel.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    panel.minorticks_off()
    panel.set_xlabel("GB/s each way for a rank")
    panel.set_ylabel("times as fast as NCCL, by the model\n(higher is better)")
    panel.set_title("All-reduce of float32 among four ranks over NCCL, by link, codec and elements", loc="left")
    panel.grid(alpha=0.25)
    figure.legend(loc="outside right center", frameon=False)
    figures.save(figure, "when.svg")


def page(model):
    fill = lambda *sentences: textwrap.fill(" ".join(sentences), 110, break_on_hyphens=False)  # noqa: E731
    small, large = model.nccl
    over = [f"{codec}, {several} ranks" for codec in SHOWN for several in WORLDS]
    onebit = {dtype: of for dtype, of in onebit_over_nccl(model)}
    far = [100 * onebit[dtype][FULL] for dtype in BYTES]
    worst = max((abs(error), n) for of in onebit.values() for n, error in of.items())
    return "\n\n".join([
        "# When a compressed all-reduce pays",
        fill(
            "A compressed all-reduce sends 2 to 32 times fewer bytes than a plain one, and takes some time on the GPU",
            "to do so. Whether that pays depends on the link between the ranks (the processes that train together,",
            "here each with a GPU and a link of its own). The tables say how many times as fast a compressed",
            "all-reduce is as NCCL's sum: above 1 it pays. 1K is 2^10 elements, 1M is 2^20. Codecs are those of",
            "[CODECS.md](CODECS.md), without errors except onebit, which keeps them.",
        ),
        fill(
            "`python bench/when.py` has made this page, of times that [PERFORMANCE.md](PERFORMANCE.md) has of two",
            "H200. **Only those two GPUs are measured, on NVLink.** More ranks and other links are the model's.",
        ),
        "## The model",
        fill(
            "For W ranks, a plain all-reduce moves 2 (W-1)/W of its bytes over each rank's link, a compressed one 2",
            "(W-1)/W of its payload, and it takes the time of its kernels besides. Nothing overlaps. If the all-reduce",
            "is hidden behind the backward pass, there is nothing to gain, which the model leaves out.",
        ),
        fill(
            f"NCCL, fitted to its times in a graph: {1e6 * small.least:.1f} us and {1e-9 / small.slope:.0f} GB/s below",
            f"2 MiB, {1e6 * large.least:.1f} us and {1e-9 / large.slope:.0f} GB/s from there on,",
            f"{100 * model.share:.0f} per cent of the link's 450. The codecs, per gradient, fitted likewise: what the",
            "least run takes where ranks exchange once and twice, and the kernels, in picoseconds per element, over",
            "peer memory and over NCCL:",
        ),
        table(
            ["codec, gradient", "bytes per element", "one exchange, us", "two, us", "kernels, ps", "over NCCL, ps"],
            calibration(model),
        ),
        fill(
            "Ranks exchange once where all payloads have less than 2^20 bytes, two GPUs where they have less than 2^22",
            "(NUMERICS.md, 9). There INT4 and MXFP4 of more than 1M elements take up to a third longer than the model says.",
        ),
        "## How many times as fast, for 300M elements",
        fill(
            "NVLink's line is over peer memory, the others are over NCCL, which is taken to reach as much of any link",
            "as of NVLink.",
        ),
        *(
            part
            for dtype in BYTES
            for part in (
                f"Gradient {dtype}, against an all-reduce in {dtype}:",
                table(["link", "GB/s", *over], factors(model, dtype)),
            )
        ),
        "![Factor by link](when.svg)",
        "## In several parts",
        fill(
            "One all-reduce handle sends when all of its gradient is encoded, so nothing overlaps within it. Several",
            "handles can overlap: each has a part of the gradient, and they take turns on two streams, with a",
            "communicator for each stream (see [ALLREDUCE.md](ALLREDUCE.md)). How many times as fast as one handle",
            "that is, by the model, which was not held against any measurement here, for 300M elements of float32 and",
            "4 ranks:",
        ),
        table(["link", "GB/s", *(f"{codec}, {parts} parts" for codec in SHOWN for parts in PARTS)], in_parts(model)),
        "## Up to which link",
        fill(
            "A link of more GB/s than this, each way, makes a plain all-reduce the faster one, where ours goes over",
            "NCCL. *NVLink*: compressing is faster even at its 450 GB/s.",
        ),
        table(["gradient, elements", *over], break_even(model)),
        "## How far off the model is",
        fill(
            "Per cent by which it says more (+) or less (-) than was measured between two H200 in a graph, at every",
            "size; it is fitted to these times:",
        ),
        table(*error_rows(model, "all codecs", "in a graph")),
        fill(
            "Of another run, to which nothing is fitted, with sizes between those; `against` exchanges twice, where",
            "the other exchanges once:",
        ),
        table(*error_rows(model, "exchanges", "in a graph")),
        fill(
            "Called from C or Python the host takes part, so each has a fit of its own; `python bench/when.py",
            "--errors` prints every point. Errors without their sign, in per cent:",
        ),
        table(["called", "points", "median", "largest", "largest over NCCL"], map(all_errors, HOW)),
        fill(
            "For ONEBIT over NCCL no line is fitted: the model takes its kernels over peer memory, and what INT8 takes",
            f"longer over NCCL. It is {far[0]:+.0f} per cent off in float32 and {far[1]:+.0f} per cent in bfloat16 for",
            f"300M elements, and {100 * worst[0]:.0f} per cent where it is worst, at {ordinal(worst[1])}.",
        ),
        fill(
            "Over a slow link, between two ranks on a CPU with gloo. The model is the step without an exchange, and",
            "then the bytes at the link's rate; nothing is fitted, DDP overlaps, and the codec takes time, so it may",
            "err either way:",
        ),
        table(["link", "gradients", "ms a step, measured", "by the model", "off, %"], link_rows()),
        "## Where it is not calibrated",
        "\n".join([
            "- More than two ranks: the time however little is sent is taken as that of two ranks. It grows with them,",
            "  NCCL's and ours, and which grows more is not measured.",
            "- Links other than NVLink: the share of the rate that NCCL reaches, and how long a message is under way.",
            "- A whole training step. Below, in ms, what exchanges add to a step of two H200 with DistributedDataParallel,",
            "  and what one exchange of all weights takes by the model. DDP exchanges bucket by bucket, beside the backward",
            "  pass. Of few sequences (full, large) the host limits the step, and compressed exchanges add more than",
            "  NCCL's, because each costs the host more; of many (busy) the GPUs do, and those over peer memory add less.",
        ]),
        table(["model, gradients", "exchange", "alone, by the model", "added, measured"], training_rows(model)),
        "## Where it does not pay",
        "\n".join([
            "- Where the all-reduce hides behind the backward pass already.",
            "- Between GPUs of one node, below some size: NCCL's own sum is faster there.",
            "- Where an optimizer needs more than a sign and a scale, onebit: see [CODECS.md](CODECS.md).",
            "- On the CPU, where the network sends a gradient faster than the CPU reads it from memory three times.",
        ]),
    ]) + "\n"  # fmt: skip


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--errors", action="store_true", help="only print its error at every time that was measured")
    if options.parse_args().errors:
        for how in HOW:
            print(table(*error_rows(Model(how), "all codecs", how)), end="\n\n")
        return
    model = Model("in a graph")
    plot(model)
    (figures.DOCS / "WHEN.md").write_text(page(model))


if __name__ == "__main__":
    main()
