"""When a compressed all-reduce pays: a model fitted to the all-reduce tables of docs/PERFORMANCE.md.

    python bench/when.py               prints the tables of docs/WHEN.md

The model, for n elements among W ranks, each with a link of B bytes a second each way (NVLink: B0):

    plain        a + 2 (W - 1) / W * n * size / (share * B)            size: 4 or 2 bytes; share: what NCCL gets of B0
    compressed   a + k * n + 2 (W - 1) / W * n * sent / (share * B)    sent: bytes per element of a payload

`a` is the fixed time, `k` the time of the kernels per element. Both are fitted to measurements in a graph between two
GPUs, so that the squares of the relative errors are least. NCCL has one pair for less than 2 MiB and one for more;
block codecs have an `a` of their own for the one-shot all-reduce. Nothing overlaps.

Between N nodes of R GPUs, W = N R, with a link of B bytes a second each way for each node, bytes leaving a node count:

    NCCL         a + n * size * leaving / (share * B)     leaving: 2 (W - 1) / W in a ring, 2 (N - 1) / N in a tree
    flat         a + k * n + n * sent * leaving / (share * B)                            R (N - 1) / N + (W - 1) / W
    compressed   a + k * n + n * sent * leaving / (share * B) + within                   2 (N - 1) / N

`within`: n * (size + sent) * (R - 1) / R over NVLink. A training step takes the longer of two times: that of its bytes
on the link, from the first gradient on, and that of the measured step over the fastest link.
"""

import itertools
import re
from collections import namedtuple

from common import ROOT, markdown, size

DOCS = ROOT / "docs"
FULL = 300 * 2**20
WORLDS = 2, 8
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
BYTES = {"float32": 4, "bfloat16": 2}
SENT = {"bf16": 2, "mxfp8": 1.03125, "int8": 1.03125, "int4": 0.5625, "mxfp4": 0.53125, "onebit": 0.125}
SHOWN = "int8", "int4", "onebit"
# Bytes of all payloads below which block codecs without errors used one-shot all-reduces in the measured commit.
# docs/NUMERICS.md, 9, has the limits now.
ONCE, ONCE_OF_TWO = 2**20, 2**22
FIRST = 14  # ms of the measured step between nodes until the first gradient is there, as bench/nodes.py measures it
LEAST = 2**12  # elements from which on the one-shot line is fitted: fewer take as long, or longer
SIMPLE = 2**21  # bytes from which on NCCL takes another protocol, by the measured times

OVER = " over NCCL"

NODES, GPUS = 2, (1, 4, 8)  # nodes of the tables, and GPUs of a node
NODE_LINKS = [("InfiniBand NDR, 400 Gbit/s", 50e9)]
NODE_LINKS += [(f"Ethernet, {gbit} Gbit/s", gbit / 8 * 1e9) for gbit in (100, 25, 10)]
# Algorithm of each column of the measured steps, as the bytes show: NCCL a ring, PyTorch's hook NCCL's tree. In
# bfloat16 both are NCCL's ring.
WAYS = {"NCCL": "ring", "PyTorch's bf16 hook": "tree", "INT8": "levels", "MXFP8": "levels", "INT4": "levels"}

Step = namedtuple("Step", "name dtype nodes ranks gbit ms")  # `ranks`: of each node; `ms`: of each contender
Line = namedtuple("Line", "least slope")  # fixed seconds, and seconds for each byte or element


def fitted(points):
    """Returns the line through {x: seconds}, by least squares of relative errors; a constant one for a single point."""
    if len(points) == 1:
        return Line(*points.values(), 0)
    ones = sum(1 / t**2 for t in points.values())
    xs = sum(x / t**2 for x, t in points.items())
    squares = sum(x**2 / t**2 for x, t in points.items())
    left, right = sum(1 / t for t in points.values()), sum(x / t for x, t in points.items())
    by = ones * squares - xs**2
    return Line((left * squares - right * xs) / by, (ones * right - xs * left) / by)


def once(codec, elements, world=2):
    """Returns whether the all-reduce is one-shot; a payload has a header, so exactly `most` bytes are too many."""
    codec, most = codec.removesuffix(OVER), ONCE_OF_TWO if world == 2 else ONCE
    return codec in SENT and codec != "onebit" and world * elements * SENT[codec] < most


def table_of(page, *heads):
    """Returns the header and the rows of the first table of a page whose header has all of these words."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    for at in (n for n, line in enumerate(lines) if line.startswith(("|--", "| --"))):
        table = itertools.takewhile(lambda line: line.startswith("|"), lines[at + 1 :])
        header, *rows = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in (lines[at - 1], *table))
        if all(any(head in cell for cell in header) for head in heads):
            return header, rows
    raise LookupError(f"docs/{page} has no table with {heads}")


def measured():
    """Returns {(who, dtype): {elements: seconds}} of two GPUs, in a graph."""
    found = {}
    for dtype in BYTES:
        header, rows = table_of("PERFORMANCE.md", f"{dtype} in a graph, us")
        for place, who in enumerate(header[1:], 1):
            found[who, dtype] = {size(row[0]): float(row[place].split(" (")[0]) * 1e-6 for row in rows}
    return found


def leaving(way, nodes, ranks):
    """Returns how often the bytes of all elements, or of a payload, leave each of `nodes` nodes with `ranks` ranks."""
    across, ring = (nodes - 1) / nodes, (nodes * ranks - 1) / (nodes * ranks)
    # A flat codec's all_to_all is between pairs; its all_gather is NCCL's, which is a ring.
    return {"ring": 2 * ring, "tree": 2 * across, "flat": ranks * across + ring, "levels": 2 * across}[way]


def measured_steps():
    """Returns the measured steps between nodes, the bytes that left a node, and those of payloads, in MB."""
    header, rows = table_of("PERFORMANCE.md", "nodes and link", "MXFP8")
    steps, others = [], {}
    for name, *cells in rows:
        numbers = {who: float(cell) for who, cell in zip(header[1:], cells) if who in WAYS}
        if shape := re.search(r"(\d+) nodes x (\d+) GPUs, ([\d.]+) Gbit/s", name):
            nodes, ranks, gbit = shape.groups()
            dtype = "bfloat16" if name.startswith("bfloat16") else "float32"
            steps.append(Step(name.partition(", TCP")[0], dtype, int(nodes), int(ranks), float(gbit), numbers))
        else:
            others[name.split(",")[0]] = numbers
    payloads = {who: total * NODES / (2 * (NODES - 1)) for who, total in others["2 P (N - 1) / N"].items()}
    header, rows = table_of("PERFORMANCE.md", "shape", "INT4")
    name, *cells = next(row for row in rows if row[0].endswith("10 Gbit/s"))
    steps.append(Step(name, "float32", 2, 1, 10.0, {who: float(cell) for who, cell in zip(header[1:], cells)}))
    return steps, others["MB that left a node"], payloads


def step_ms(step, who, steps, payloads):
    """Returns the model's time of a step."""
    way, payload = WAYS[who], payloads[who]
    if step.dtype == "bfloat16" and way != "levels":
        way, payload = "ring", payloads["NCCL"] / 2
    alike = [one for one in steps if (one.dtype, one.nodes, one.ranks) == (step.dtype, step.nodes, step.ranks)]
    fastest = max(alike, key=lambda one: one.gbit).ms[who] if len(alike) > 1 else 0
    return max(FIRST + payload * leaving(way, step.nodes, step.ranks) * 8 / step.gbit, fastest)


class Model:
    """A model fitted to measurements in a graph."""

    def __init__(self):
        times = measured()
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
        """Returns the seconds between the two GPUs that the model is fitted to."""
        if who == "NCCL":
            return self.plain(elements, 2, NVLINK, dtype)
        line = (self.once if once(who, elements) else self.lines)[who, dtype]
        return line.least + line.slope * elements

    def kernels(self, codec, dtype, rate):
        """Returns the seconds of kernels for each element. The link took at least the time that it takes at its full
        rate. Over other links NCCL moves payloads, and takes longer for each byte, by what was measured of INT8.
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
        """Returns the fixed time; over other links than NVLink INT8's over NCCL, the only one measured there."""
        who = codec if rate == NVLINK else "int8" + OVER
        return (self.once if once(codec, elements, world) else self.lines)[who, dtype].least

    def compressed(self, codec, elements, world, rate, dtype):
        work = self.kernels(codec, dtype, rate) * elements
        return self.least(codec, dtype, elements, world, rate) + work + self.wire(codec, elements, world, rate)

    def between_nodes(self, codec, way, elements, nodes, ranks, rate, dtype):
        """Returns the seconds of an all-reduce between nodes with links of this rate. `codec`: None: NCCL."""
        size, line = BYTES[dtype], self.nccl[True]
        crossing = elements * (SENT[codec] if codec else size) * leaving(way, nodes, ranks) / (self.share * rate)
        if codec is None:
            return line.least + crossing
        within = 0 if way == "flat" else elements * (size + SENT[codec]) * (ranks - 1) / ranks / (self.share * NVLINK)
        return self.lines["int8" + OVER, dtype].least + self.kernels(codec, dtype, rate) * elements + crossing + within

    def factor(self, codec, elements, world, rate, dtype):
        return self.plain(elements, world, rate, dtype) / self.compressed(codec, elements, world, rate, dtype)


# --- tables -----------------------------------------------------------------------------------------------------------


def factors(model, dtype):
    """Returns the speedup over NCCL for FULL elements, by link."""
    header = [dtype, "GB/s", *(f"{codec}, {world} ranks" for codec in SHOWN for world in WORLDS)]
    rows = [
        [name, f"{rate / 1e9:g}", *(f"{model.factor(c, FULL, w, rate, dtype):.2g}" for c in SHOWN for w in WORLDS)]
        for name, rate in LINKS
    ]
    return header, rows


def factors_of_nodes(model, dtype):
    """Returns the speedup over NCCL between two nodes, for FULL elements, by link: in a ring / in a tree."""
    kinds = [(codec, ranks) for codec in SHOWN[:2] for ranks in GPUS]
    rows = []
    for name, rate in NODE_LINKS:
        cells = []
        for codec, ranks in kinds:
            own = model.between_nodes(codec, "levels", FULL, NODES, ranks, rate, dtype)
            plain = [model.between_nodes(None, way, FULL, NODES, ranks, rate, dtype) for way in ("ring", "tree")]
            cells.append(" / ".join(f"{one / own:.2g}" for one in plain[: 1 + (ranks > 1)]))
        rows.append([name, *cells])
    return [f"{dtype}, ring / tree", *(f"{codec}, {ranks} a node" for codec, ranks in kinds)], rows


def steps_beside():
    """Returns the model beside the measured steps between nodes and the bytes that left a node: the model's number, and
    by how many per cent it is off."""
    steps, left, payloads = measured_steps()
    header = ["model, and per cent off", *WAYS]
    rows = []
    for step in steps:
        said = {who: step_ms(step, who, steps, payloads) for who in WAYS if who in step.ms}
        cells = (f"{said[who]:.0f} ({100 * (said[who] / step.ms[who] - 1):+.0f})" if who in said else "-" for who in WAYS)
        rows.append([step.name, *cells])
    said = {who: payloads[who] * leaving(WAYS[who], NODES, 2) for who in WAYS}
    cells = [f"{said[who]:.0f} ({100 * (said[who] / left[who] - 1):+.1f})" for who in WAYS]
    return header, [*rows, ["MB that left a node, 2 x 2", *cells]]


def main():
    model = Model()
    tables = factors(model, "float32"), factors_of_nodes(model, "float32"), steps_beside()
    print("\n\n".join(markdown(*each) for each in tables))


if __name__ == "__main__":
    main()
