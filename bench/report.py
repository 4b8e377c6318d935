"""Makes the parts of docs/PERFORMANCE.md of what bench/cpu.py measured, bench/gpu.py, the same of codecs, and
bench/multi_gpu.py. bench/figures.py draws the pictures.

Each part lies between two markers; what stands around them stays.
"""

import argparse
import json
import pathlib
import re
import statistics
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent

# To reach on one thread with AVX-512: of the plain loop over the same memory, and times NumPy.
TO_REACH = {
    ("pack bool", 2**16): (0.75, 4),
    ("pack bool", 2**20): (0.75, 2.2),
    ("pack bool", 2**28): (0.85, 1.25),
    ("unpack bool", 2**20): (None, 3),
}
# No layout should take longer than this many times the contiguous one.
MOST_TIMES = 4
# No narrow point should take longer than this many times NumPy.
MOST_TIMES_NUMPY = 1.05

def median(row, contender):
    """Seconds a call; None if it did not take part."""
    samples = row["seconds"].get(contender)
    return statistics.median(samples) if samples else None


def rate(row, contender):
    """GB/s of elements."""
    seconds = median(row, contender)
    return seconds and row["bytes"] / seconds / 1e9


def ratio(row, contender, other):
    """How many times as fast as the other."""
    seconds, others = median(row, contender), median(row, other)
    return seconds and others and others / seconds


def times_numpy(row):
    """The time as a multiple of NumPy's."""
    return ratio(row, "numpy", "ours")


def named(row):
    """What a row of a kind is of."""
    if "shape" in row:
        axis = f" along axis {row['axis']}" if "axis" in row else ""
        of = f" of {row['of']}" if "of" in row else ""
        return f"{' x '.join(map(str, row['shape']))}{axis}{of}"
    return row.get("side") or count(row["elements"])


def count(elements):
    """16M, 16M - 1, or the number: 1K is 2^10, 1M 2^20, 1G 2^30."""
    for less, suffix in (0, ""), (1, " - 1"):
        for unit, letter in (2**30, "G"), (2**20, "M"), (2**10, "K"):
            if elements + less >= unit and (elements + less) % unit == 0:
                return f"{(elements + less) // unit}{letter}{suffix}"
    return f"{elements:,}"


def shape_of(text):
    """A shape of one large dimension as a count: "256M, from [1:]"; others as they are."""
    return re.sub(r"^\d{5,}(?=,|$)", lambda match: count(int(match[0])), text)


def other(contender):
    """What a contender is called when the other library takes its place."""
    return "against" if contender == "ours" else f"{contender}, against"


def against(results):
    """How fast the library is compared with the other that took turns with it: by group, and the slowest rows."""
    lines, rows = [], []
    for group in "large", "segments", "sizes", "ragged", "small", "layouts", "narrow", "copies":
        found = [
            (ratio(row, name, other(name)), row, name)
            for row in measured(results.get(group, []))
            for name in row["seconds"]
            if row["seconds"].get(other(name))
        ]
        rows += found
        for name in dict.fromkeys(name for *_, name in found):
            times = [times for times, _, of in found if of == name]
            lines.append(f"{group}, {name}: median {statistics.median(times):.3f} of {len(times)} rows")
    for name, seconds in results.get("host", {}).items():
        if others := results["host"].get(f"{name}, against"):
            ours, theirs = statistics.median(seconds) * 1e6, statistics.median(others) * 1e6
            lines.append(f"{name}: {ours:.2f} us, {theirs:.2f} us against")
    lines.append("slowest:")
    for times, row, name in sorted(rows, key=lambda found: found[0])[:12]:
        lines.append(f"  {times:.3f}  {row['kind']}, {named(row)}{'' if name == 'ours' else f', {name}'}")
    return "Times as fast as the library it was timed against\n" + "\n".join(lines)


def measured(rows):
    """Those that did not fail."""
    return [row for row in rows if "seconds" in row]


def loop(row):
    return "read" if "read" in row["seconds"] else "write"


def number(value, digits=3):
    """Three digits, however large."""
    return "-" if value is None else f"{value:.{max(0, digits - len(str(int(value))))}f}"


def verdict(reached):
    return "reached" if reached else "missed"


# What tables aim at, as they were made: what, of which size, the aim, and the verdict. docs/TARGETS.md has them.
AIMS = []
# Columns that say of which size a row is.
SIZE_COLUMNS = ("elements", "whole", "shape", "tensors")


def without_aims(header, rows, unit):
    """A table without its last column, in which its rows say what they are to reach: that goes to AIMS."""
    place = next((column for column, name in enumerate(header) if name in SIZE_COLUMNS), None)
    for row in rows:
        size = "" if place is None else row[place]
        size += " tensors" if place is not None and header[place] == "tensors" else ""
        for aim in filter(None, row[-1].split("; ")):
            least, _, said = aim.rpartition(": ")
            if aim.startswith("missed: "):
                AIMS.extend((row[0], missed, header[-1], "missed") for missed in said.split(", "))
            elif least:
                AIMS.append((row[0], size, f"{least} {unit}".strip(), said))
            else:
                AIMS.append((row[0], size, header[-1], aim))
    return header[:-1], [row[:-1] for row in rows]


def targets():
    """What was aimed at in the tables since the last call of this: a row for what has one aim, with sizes. Where many
    have one and reach it, they have a row together."""
    found = {}
    for what, size, aim, verdict in AIMS:
        sizes = found.setdefault((what, aim), {"reached": [], "missed": []})[verdict]
        sizes += [size] if size not in sizes else []
    AIMS.clear()
    reaching = {}
    for (what, aim), by_verdict in found.items():
        if by_verdict == {"reached": [""], "missed": []}:
            reaching.setdefault(aim, []).append(what)
    lines = []
    for (what, aim), by_verdict in found.items():
        together = reaching.get(aim, [])
        if len(together) > 9 and what in together:
            if what == together[0]:
                lines.append([f"{len(together)} others", aim, "reached", "-"])
            continue
        missed = [size or "missed" for size in by_verdict["missed"]]
        reached = by_verdict["reached"]
        some = [size or "reached" for size in reached] if len(reached) <= 3 else [f"{len(reached)} sizes"]
        lines.append([what, aim, "; ".join(some) or "-", "; ".join(missed) or "-"])
    return table(["what", "to reach", "reached", "missed"], lines) if lines else None


def table(header, rows, aims=None):
    """Markdown that also reads well as it is: the first column to the left, numbers to the right. With `aims` the last
    column is what its rows are to reach, in this unit where they say none."""
    if aims is not None:
        header, rows = without_aims(header, rows, aims)
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    first, *others = widths
    rule = [":" + "-" * (first - 1), *("-" * (width - 1) + ":" for width in others)]
    cells = [[line[0].ljust(first), *map(str.rjust, line[1:], others)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [cells[0], rule, *cells[1:]])


def of_sizes(rows):
    lines = []
    for row in rows:
        of_loop, of_numpy = ratio(row, "ours", loop(row)), ratio(row, "ours", "numpy")
        targets = [
            f"{to_reach} {unit}: {verdict(reached >= to_reach)}"
            for to_reach, reached, unit in zip(
                TO_REACH.get((row["kind"], row["elements"]), ()), (of_loop, of_numpy), ("of the loop", "times NumPy")
            )
            if to_reach is not None
        ]
        rates = [rate(row, contender) for contender in (loop(row), "ours", "ours x2", "numpy")]
        cells = [count(row["elements"]), *map(number, [*rates, of_loop, of_numpy]), "; ".join(targets)]
        lines.append([row["kind"], *cells])
    header = ["kind", "elements", "loop", "1 thread", "2 threads", "NumPy", "of the loop", "times NumPy", "to reach"]
    return table(header, lines, aims="")


def of_layouts(rows):
    sides = list(dict.fromkeys(row["side"] for row in rows))
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = {row["side"]: row for row in rows if row["kind"] == kind}
        times = [ratio(of_kind[side], "fast path", "ours") for side in sides]
        numpy = min(ratio(row, "ours", "numpy") for row in of_kind.values())
        touched = str(next(iter(of_kind.values()))["touched"])
        lines.append([kind, touched, *map(number, [*times, numpy]), verdict(max(times) <= MOST_TIMES)])
    header = ["kind", "bytes", *(f"{side} x {side}" for side in sides), "times NumPy", f"at most {MOST_TIMES} times contiguous"]
    return table(header, lines, aims="")


def of_narrow(rows):
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = sorted((row for row in rows if row["kind"] == kind), key=times_numpy, reverse=True)
        slower = sum(times_numpy(row) > MOST_TIMES_NUMPY for row in of_kind)
        middle = statistics.median(map(times_numpy, of_kind))
        for place, row in enumerate(of_kind[:3]):
            first = [kind, str(len(of_kind)), str(slower), number(middle)] if place == 0 else [""] * 4
            lines.append([*first, number(times_numpy(row)), named(row)])
    return table(["kind", "points", f"above {MOST_TIMES_NUMPY}", "median", "the worst", "of"], lines)


def of_processor(results):
    about = results["about"]
    caches = ", ".join(f"{name} {size}" for name, size in about["caches"].items())
    return (
        f"{about['processor']} (family {about['family']}, model {about['model']}; {caches}), {about['cpus']} CPUs, "
        f"kernel {about['kernel']}; GradCodec {about['library']}, commit {about['commit']}, path {about['path']}; "
        f"NumPy {about['numpy']}; {'torch ' + about['torch'] + '; ' if about.get('torch') else ''}"
        f"{about['date']}{'; a quick run' if about['quick'] else ''}."
    )


def tables(results):
    parts = [textwrap.fill(of_processor(results), 110, break_on_hyphens=False)]
    if results["sizes"]:
        parts.append(
            "GB/s of elements, medians, all contenders taking turns, memory warm. The loop reads (packing) or writes\n"
            "(unpacking) the elements and does nothing else. NumPy allocates its result in every call; float32 from\n"
            "NumPy takes two calls, and so do signs."
        )
        parts.append(of_sizes(results["sizes"]))
    if results["layouts"]:
        parts.append(
            "Squares of bools in other layouts, on one thread: time as a multiple of that for as many contiguous\n"
            "elements. Bytes: of memory that an element takes up, cache lines being touched whole. Times NumPy: the\n"
            "lowest of the sizes; NumPy unpacks to new memory and copies to the layout."
        )
        parts.append(of_layouts(results["layouts"]))
    if results.get("narrow"):
        parts.append(
            "Narrow dimensions: outer x middle x inner contiguous elements, inner 1 to 17 and middle 8 to 64, packed and\n"
            "unpacked along each axis on one thread; and rows of 2 to 17 elements, flattened, in several layouts. Time as a\n"
            "multiple of NumPy's, so below 1 is faster; the worst points."
        )
        parts.append(of_narrow(results["narrow"]))
    return "\n\n".join(parts)


# --- the GPU ----------------------------------------------------------------------------------------------------------

# Of the GPU's theoretical rate: below this the copy was not at its speed, and the run says nothing.
LEAST_YARDSTICK = 0.85
# The time of odd sizes and addresses, as a multiple of that of whole tiles.
MOST_TIMES_RAGGED = 1.25
# To reach at 2^30 elements, of the yardstick.
GPU_TO_REACH = {
    "pack bool": 0.98,
    "pack int32": 0.98,
    "signs float32": 0.98,
    "signs bfloat16": 0.98,
    "unpack uint8": 0.97,
    "unpack float32": 0.97,
}
# To reach by the host, seconds a call.
HOST_TO_REACH = {
    "gc_pack_chunks_into": 4e-6,
    "gc_unpack_chunks_into": 4e-6,
    "gc_pack_chunks and releases": 10e-6,
}


def yardstick(results, name="copy"):
    """Bytes a second."""
    measured = results["yardsticks"][name]
    return measured["bytes"] / statistics.median(measured["seconds"])


def void(results):
    """Why the run does not count, or nothing."""
    reached, theoretical = yardstick(results), results["about"]["theoretical"]
    if reached >= LEAST_YARDSTICK * theoretical:
        return None
    return f"VOID: the copy moves {reached / 1e12:.2f} TB/s, below {LEAST_YARDSTICK} of {theoretical / 1e12:.2f}."


def fraction(results, row, contender="ours"):
    """Bytes a second as a part of the yardstick's."""
    seconds = median(row, contender)
    return seconds and row["bytes"] / seconds / yardstick(results)


def of_gpu_sizes(results):
    lines = []
    for row in results["sizes"]:
        least = GPU_TO_REACH.get(row["kind"]) if row["elements"] == 2**30 else None
        ours = fraction(results, row)
        cells = [
            count(row["elements"]),
            number(median(row, "ours") * 1e6),
            number(ours, 4),
            number(fraction(results, row, "cupy"), 4),
            number(fraction(results, row, "compress_by_chunk"), 4),
            number(ratio(row, "ours", "cupy")),
            f"{least}: {verdict(ours >= least)}" if least else "",
        ]
        lines.append([row["kind"], *cells])
    header = ["kind", "elements", "us", "of the copy", "CuPy", "compress_by_chunk", "times CuPy", "to reach"]
    return table(header, lines, aims="of the copy")


def of_ragged(results):
    lines = []
    for row in results["ragged"]:
        whole = median(row, "ours")
        ragged = [median(row, name) for name in ("odd", "source off", "destination off")]
        times = max(ragged) / whole
        cells = [count(row["elements"]), count(row["odd"]), *(number(s * 1e6) for s in (whole, *ragged))]
        lines.append([row["kind"], *cells, number(times), verdict(times <= MOST_TIMES_RAGGED)])
    header = ["kind", "whole", "odd", "us whole", "odd", "source off", "destination off", "times", "to reach"]
    return table([*header[:-1], f"at most {MOST_TIMES_RAGGED} times whole"], lines, aims="")


def of_small(results):
    lines = [
        [row["kind"], count(row["elements"]), *(number(median(row, name) * 1e6) for name in ("ours", "graph", "alone"))]
        for row in results["small"]
    ]
    return table(["us", "elements", "back to back", "in a graph", "alone"], lines)


def of_gpu_layouts(results):
    rows = results["layouts"]
    shapes = list(dict.fromkeys(map(named, rows)))
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = {named(row): row for row in rows if row["kind"] == kind}
        fractions = [number(fraction(results, of_kind[shape]), 4) if shape in of_kind else "-" for shape in shapes]
        lines.append([kind, *fractions])
    return table(["kind", *shapes], lines)


def of_host(results, title="1M bools, us of the host", to_reach=HOST_TO_REACH):
    lines = []
    for name, samples in results["host"].items():
        if name.endswith(", against"):  # the library that took turns with it: against() compares the two
            continue
        ordered, least = sorted(samples), to_reach.get(name)
        middle, slow = statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
        target = f"{least * 1e6:.0f}: {verdict(middle <= least)}" if least else ""
        lines.append([name, number(middle * 1e6), number(slow * 1e6), target])
    return table([title, "median", "99 of 100", "to reach"], lines, aims="us of the host")


def of_first_calls(results):
    caches = results["first call"]
    steps = list(next(iter(caches.values()))[0])
    lines = [
        [step, *(number(statistics.median(run[step] for run in runs) * 1e3) for runs in caches.values())]
        for step in steps
    ]
    return table(["first call of a process, ms", *caches], lines)


def of_card(results):
    """The GPU, and what the copy makes of it."""
    about = results["about"]
    rates = [f"{yardstick(results, name) / 1e12:.2f}" for name in ("copy", "sum", "memset")]
    samples = results["yardsticks"]["copy"]["seconds"]
    clocks = " and ".join(", ".join(found.values()) for found in results["clocks"] if found)
    return (
        f"{about['card']} (compute capability {about['capability']}), driver {about['driver']}; GradCodec "
        f"{about['library']}, commit {about['commit']}; CuPy {about['cupy']}; "
        f"{'torch ' + about['torch'] + '; ' if about.get('torch') else ''}{about['date']}"
        f"{'; a quick run' if about['quick'] else ''}. The copy: {rates[0]} TB/s, the median of "
        f"{len(samples)} in the course of the run, of cuMemcpyDtoDAsync of 4 GiB, bytes read and written; a sum that "
        f"only reads: {rates[1]}; a memset: {rates[2]}; in theory {about['theoretical'] / 1e12:.2f}. Clocks of the "
        f"processors and of memory, power and degrees, before and after: {clocks or 'unknown'}."
    )


def gpu_tables(results):
    parts = [void(results), textwrap.fill(of_card(results), 110, break_on_hyphens=False)]
    if results["sizes"]:
        parts.append(
            "Time on the device, and bytes read and written as a fraction of what the copy moves in that time;\n"
            "medians, all contenders taking turns, the cache flushed before each sample and every call on memory of\n"
            "its own. CuPy: packbits and unpackbits, and for signs and float32 a second operation. compress_by_chunk\n"
            "waits for the device and is measured at the caller."
        )
        parts.append(of_gpu_sizes(results))
    if results["ragged"]:
        parts.append(
            "Sizes and addresses that do not fit whole tiles: an odd number of elements, or the source or the destination\n"
            "one element (one byte of bits) beyond a cache line. Times: the slowest of the three, as a multiple of whole\n"
            "tiles."
        )
        parts.append(of_ragged(results))
    if results["small"]:
        parts.append(
            "Small calls one after another, the same calls in a graph, and one call alone between two events, with\n"
            "what the events cost."
        )
        parts.append(of_small(results))
    if results["layouts"]:
        parts.append(
            "Matrices in other layouts, as a fraction of the copy. Bytes are those of the cache lines that are\n"
            "touched; what lies between elements that are written is read and written."
        )
        parts.append(of_gpu_layouts(results))
    if results["host"]:
        parts.append(
            "What a call costs the host, from C; CuPy from Python. The stream tier returns when the work is\n"
            "enqueued, the simple tier and compress_by_chunk when it is done."
        )
        parts.append(of_host(results))
    if kept := results.get("kept"):
        after = ", ".join(f"{size / 1024:.1f}" for size in kept[1:])
        parts.append(
            f"GiB of the GPU's memory that are kept for new tensors when 20 GiB have been released: {kept[0] / 1024:.1f};\n"
            f"after each of four calls that return a new tensor: {after}."
        )
    if results["first call"]:
        parts.append(
            "The driver compiles the kernels when they are first loaded, unless the library has machine code for the\n"
            "GPU or the driver's cache has it. cuInit and the context are the driver's own beginning."
        )
        parts.append(of_first_calls(results))
    return "\n\n".join(part for part in parts if part)


GPU_COPIES_TO_REACH = {"compact": 0.97, "float32 to bfloat16": 0.95, "transposed float32": 0.80, "every other float32": 0.55}


def of_gpu_copies(results):
    """The copies of a GPU, each shape a line."""
    lines = []
    for row in results["copies"]:
        least = GPU_COPIES_TO_REACH.get(row["kind"])
        ours = fraction(results, row)
        cells = [
            shape_of(row["shape"]),
            number(median(row, "ours") * 1e6),
            number(ours, 4),
            number(fraction(results, row, "driver"), 4),
            number(fraction(results, row, "torch"), 4),
            f"{least}: {verdict(ours >= least)}" if least else "",
        ]
        lines.append([row["kind"], *cells])
    return table(["copy", "shape", "us", "of the copy", "driver", "torch", "to reach"], lines, aims="of the copy")


def of_host_copies(results):
    """Those from and to the host, in GB/s of the bytes on the GPU's side."""
    rows = results["host copies"]
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    lines = []
    for row in rows:
        rates = [row["bytes"] / median(row, name) / 1e9 if name in row["seconds"] else None for name in names]
        lines.append([row["kind"].replace("card", "GPU"), shape_of(row["shape"]), *(number(rate) for rate in rates)])
    return table(["GB/s", "shape", *names], lines)


def gpu_copy_tables(results):
    parts = [void(results), textwrap.fill(of_card(results), 110, break_on_hyphens=False)]
    parts.append(
        "Copies on a GPU: the bytes of both sides as a fraction of what the copy moves in that time. A cache line that\n"
        "is touched only in part counts whole. Driver: cuMemcpyAsync, where it can do the same. Medians, all taking\n"
        "turns, the cache flushed before each sample."
    )
    parts.append(of_gpu_copies(results))
    parts.append(
        "From and to memory of the host. Pinned: cuMemcpyAsync is the driver's; pageable: until the call returns,\n"
        "beside cuMemcpy, torch and CuPy, all from Python."
    )
    parts.append(of_host_copies(results))
    return "\n\n".join(part for part in parts if part)


# To reach of the copy, and times CuPy's time.
KERNELS_TO_REACH = {
    ("two inputs", "268435456"): 0.97,
    ("a row to a matrix", "16384 x 16384"): 0.90,
    ("a column to a matrix", "16384 x 16384"): 0.90,
    ("sum over axis 0", "16384 x 16384"): 0.95,
    ("sum over axis 1", "16384 x 16384"): 0.95,
    ("sum over all", "16384 x 16384"): 0.95,
}
MOST_TIMES_CUPY = 1.03
KERNEL_HOST_TO_REACH = {"gc_kernel_run": 5e-6}


def of_kernels(results):
    lines = []
    for row in measured(results["works"]):
        ours, times = fraction(results, row), ratio(row, "ours", "cupy")
        least = KERNELS_TO_REACH.get((row["kind"], row["shape"]))
        aims = [f"{least} of the copy: {verdict(ours >= least)}"] if least else []
        if times:
            aims.append(f"at most {MOST_TIMES_CUPY} times CuPy's time: {verdict(1 / times <= MOST_TIMES_CUPY)}")
        rates = [number(value, 4) for value in (ours, fraction(results, row, "cupy"))]
        cells = [number(median(row, "ours") * 1e6), *rates, number(times)]
        lines.append([row["kind"], shape_of(row["shape"]), *cells, "; ".join(aims)])
    return table(["kernel", "shape", "us", "of the copy", "CuPy", "times CuPy", "to reach"], lines, aims="")


def of_first_uses(results):
    order = "nothing cached", "nothing cached, NVRTC in use", "from disk", "in memory"
    lines = [
        [words, *(number(statistics.median(results["first use"][words][whose]) * 1e3) for whose in ("ours", "cupy"))]
        for words in order
    ]
    return table(["ms", "ours", "CuPy"], lines)


def kernel_tables(results):
    parts = [void(results), textwrap.fill(of_card(results), 110, break_on_hyphens=False)]
    parts.append(
        paragraph(
            "Time on the device, and the bytes that a run must read and write (of a reduction: read) as a fraction of what",
            "the copy moves in that time; medians, all contenders taking turns, the cache flushed before each sample and",
            "every call on memory of its own. CuPy: ElementwiseKernel and ReductionKernel of the same text, without FMA as",
            "ours. What is rounded in another order differs in sums; all else is equal.",
        )
    )
    parts.append(of_kernels(results))
    if results["host"]:
        parts.append("What a run of a prepared kernel costs the host, from C; CuPy's from Python.")
        parts.append(of_host(results, "1K float32, us of the host", KERNEL_HOST_TO_REACH))
    if results["first use"]:
        parts.append(
            paragraph(
                "The first use of a kernel in a process that has a context, until its result is there: with nothing cached,",
                "where NVRTC is still to be loaded and where it has compiled something else; from disk; and of another kernel",
                "of the same text, in memory.",
            )
        )
        parts.append(of_first_uses(results))
    return "\n\n".join(part for part in parts if part)


# --- codecs -----------------------------------------------------------------------------------------------------------

# To reach with 300 * 2^20 elements, of the yardstick.
CODEC_TO_REACH = {
    "encode float32": 0.98,
    "encode bfloat16": 0.97,
    "decode float32": 1.00,
    "decode bfloat16": 0.97,
    "plain float32": 0.95,
}
BLOCKS_TO_REACH = {"encode": 0.95, "decode float32": 0.97, "decode bfloat16": 0.95, "decode and add": 0.95, "reduce": 0.90}
# With 200 tensors in one call.
SEGMENTS_TO_REACH = {"encode float32": 0.85}
CODEC_HOST_TO_REACH = {"gc_codec_encode": 6e-6}
# On the CPU with 2^26 elements, times DeepSpeed's chain on as many threads.
CHAIN_TO_REACH = {("encode float32", 2**26): 10}

BYTES_NOTE = (
    "Bytes: read and written for each element: encoding reads the gradient, reads and writes the error and writes a "
    "bit, decoding reads a bit and writes the value; the plain form reads gradient and error twice."
)


def paragraph(*sentences):
    return textwrap.fill(" ".join(sentences), 110, break_on_hyphens=False)


def best(row, contender):
    """Seconds of its fastest sample: so others are compared with what they can do at best."""
    samples = row["seconds"].get(contender)
    return min(samples) if samples else None


def times_best(row, ours, contender):
    """How many times as fast our median is as the other's best."""
    seconds, others = median(row, ours), best(row, contender)
    return seconds and others and others / seconds


def bytes_an_element(row):
    return f"{row['bytes'] / row['elements']:.3f}"


def target(reached, least):
    return f"{least}: {verdict(reached >= least)}" if least else ""


def milliseconds(seconds):
    return number(seconds and seconds * 1e3)


def microseconds(seconds):
    return number(seconds and seconds * 1e6)


def failures(results):
    """What is not in the tables, and why."""
    lines = [f"{name}: {why}" for name, why in results.get("failed", {}).items()]
    for group, rows in results.items():
        for row in rows if isinstance(rows, list) else []:
            if "failed" in row:
                lines.append(f"{group}, {row['kind']}, {count(row['elements'])}: {row['failed']}")
            for name, why in row.get("failures", {}).items():
                lines.append(f"{group}, {row['kind']}, {count(row['elements'])}, {name}: {why}")
    return "FAILED, and so not in the tables:\n\n" + "\n".join(f"- {line}" for line in lines) if lines else None


def to_reach_of(kind):
    """`kind`: of bench/codec.py; "blocks int8 decode float32", for example."""
    if not kind.startswith("blocks "):
        return CODEC_TO_REACH.get(kind)
    of = kind.split(" ", 2)[2]
    return next((least for call, least in BLOCKS_TO_REACH.items() if of.startswith(call)), None)


def of_large(results):
    lines = []
    for row in measured(results["large"]):
        ours = fraction(results, row)
        cells = [bytes_an_element(row), milliseconds(median(row, "ours")), number(ours, 4)]
        cells += [milliseconds(best(row, "deepspeed")), number(times_best(row, "ours", "deepspeed"))]
        cells += [number(times_best(row, "ours", "lean")), target(ours, to_reach_of(row["kind"]))]
        lines.append([row["kind"], *cells])
    header = ["300M elements", "bytes", "ms", "of the copy", "DeepSpeed, ms", "times DeepSpeed"]
    return table([*header, "times torch, lean", "to reach"], lines, aims="of the copy")


def of_segments(results):
    lines = []
    for row in measured(results["segments"]):
        ours = fraction(results, row)
        cells = [str(row["segments"]), count(row["elements"]), microseconds(median(row, "ours")), number(ours, 4)]
        cells += [microseconds(median(row, "separate")), number(ratio(row, "ours", "separate"))]
        lines.append([row["kind"], *cells, target(ours, SEGMENTS_TO_REACH.get(row["kind"]))])
    header = ["many tensors", "tensors", "elements", "us in one call", "of the copy", "us, a call each"]
    return table([*header, "times", "to reach"], lines, aims="of the copy")


def of_codec_sizes(results):
    lines = []
    for row in measured(results["sizes"]):
        seconds = [median(row, name) for name in ("ours", "graph", "alone")] + [best(row, "deepspeed")]
        cells = [count(row["elements"]), *map(microseconds, seconds), number(times_best(row, "alone", "deepspeed"))]
        lines.append([row["kind"], *cells])
    return table(["us", "elements", "back to back", "in a graph", "alone", "DeepSpeed alone", "times"], lines)


def of_codec_ragged(results):
    lines = []
    for row in measured(results["ragged"]):
        seconds = [median(row, name) for name in ("ours", "odd", "off")]
        times = None if None in seconds else max(seconds[1:]) / seconds[0]
        cells = [count(row["elements"]), count(row["odd"]), *map(microseconds, seconds), number(times)]
        lines.append([row["kind"], *cells, verdict(times <= MOST_TIMES_RAGGED) if times else ""])
    header = ["kind", "whole", "odd", "us whole", "odd", "one off", "times"]
    return table([*header, f"at most {MOST_TIMES_RAGGED} times whole"], lines, aims="")


def of_all_reduce_stages(results):
    """What a rank does in an all-reduce, for it encodes and decodes all and reduces its share."""
    rows = {row["kind"]: row for group in ("large", "stages") for row in measured(results.get(group, []))}
    lines = []
    for dtype in "float32", "bfloat16":
        for world in 2, 4, 8:
            of_rank = [rows.get(f"{stage} {world} {dtype}") for stage in ("encode", "reduce", "decode")]
            if None in of_rank:
                continue
            seconds = sum(median(row, "ours") for row in of_rank)
            floor = sum(row["bytes"] for row in of_rank) / yardstick(results)
            cells = [milliseconds(median(row, "ours")) for row in of_rank]
            cells += [number(fraction(results, row), 4) for row in of_rank]
            lines.append([dtype, str(world), *cells, *map(milliseconds, (seconds, floor)), number(floor / seconds, 4)])
    header = ["300M elements", "ranks", "encode, ms", "reduce", "decode", "of the copy", "", "", "all, ms", "floor"]
    return table([*header, "of the copy"], lines)


def gpu_codec_tables(results):
    parts = [void(results), paragraph(of_card(results)), failures(results)]
    if measured(results.get("large", [])):
        parts.append(
            paragraph(
                BYTES_NOTE,
                "DeepSpeed: what its worker did, in torch and CuPy, on float32 (bench/deepspeed_worker.py), its best",
                "sample; ours are medians. Lean: the same in as few operations as torch allows.",
            )
        )
        parts.append(of_large(results))
    if measured(results.get("stages", [])):
        parts.append(
            paragraph(
                "The stages of an all-reduce on one rank: it encodes the gradient to a chunk for each rank, reduces those",
                "that are its own, and decodes all. Of the copy: encode, reduce, decode. The floor: their bytes at the",
                "copy's speed. What is between the ranks comes on top.",
            )
        )
        parts.append(of_all_reduce_stages(results))
    if measured(results.get("segments", [])):
        parts.append(
            paragraph(
                "Many tensors of 16K to 1M elements, log-uniform: one codec and one call for all of them, and a",
                "codec and a call for each, enqueued ahead.",
            )
        )
        parts.append(of_segments(results))
    if measured(results.get("sizes", [])):
        parts.append(
            paragraph(
                "Calls one after another, each with a codec and memory of its own; the same calls in a graph; one call",
                "alone between two events, and DeepSpeed's operations alone, enqueued ahead: their best sample.",
            )
        )
        parts.append(of_codec_sizes(results))
    if measured(results.get("ragged", [])):
        parts.append(
            paragraph(
                "Sizes and addresses that do not fit whole tiles: an odd number of elements, or a tensor that begins one",
                "element beyond a cache line. Times: the slower of the two, as a multiple of whole tiles.",
            )
        )
        parts.append(of_codec_ragged(results))
    if results["host"]:
        parts.append("What a call costs the host, from C; it returns when the work is enqueued.")
        parts.append(of_host(results, "1M float32, us of the host", CODEC_HOST_TO_REACH))
    for name, nodes in results.get("launches", {}).items():
        counted = ", ".join(f"{count} {kind}" for kind, count in nodes.items()) or "nothing"
        parts.append(f"{name}, enqueues {counted}.")
    if results["first call"]:
        parts.append("The first codec of a process, with the driver's cache of compiled kernels off, empty, and full.")
        parts.append(of_first_calls(results))
    return "\n\n".join(part for part in parts if part)


# Contenders on the CPU that are the library with another instruction set.
PATHS = ["avx2", "portable"]


def of_codec_speed(rows):
    lines = []
    for row in rows:
        least = CHAIN_TO_REACH.get((row["kind"], row["elements"]))
        times = [times_best(row, "ours", "deepspeed"), times_best(row, "ours x2", "deepspeed x2")]
        lean = [times_best(row, "ours", "lean"), times_best(row, "ours x2", "lean x2")]
        rates = [rate(row, name) for name in ("ours", "ours x2", *PATHS, "add")]
        reached = target(min(times), least) if None not in times else ""
        lines.append([row["kind"], count(row["elements"]), *map(number, [*rates, *times, *lean]), reached])
    header = ["GB/s", "elements", "1 thread", "2 threads", *PATHS, "e += g"]
    return table([*header, "times DeepSpeed", "2 threads", "times lean", "2 threads", "to reach"], lines, aims="times DeepSpeed")


# INT8 and MXFP8 of 2^26 elements, of casts in torch and of pypiquant on as many threads.
BLOCK_CASTS_TO_REACH = 3


def of_block_speed(rows):
    lines = []
    for row in rows:
        names = [name for name in ("torch", "piquant") if name in row["seconds"]]
        times = {name: [times_best(row, f"ours{on}", f"{name}{on}") for on in ("", " x2")] for name in names}
        least = BLOCK_CASTS_TO_REACH if names and row["elements"] == 2**26 else None
        rates = [rate(row, name) for name in ("ours", "ours x2", *PATHS, "copy")]
        cells = [number(one) for name in ("torch", "piquant") for one in times.get(name, [None, None])]
        reached = target(min(pair[1] for pair in times.values()), least) if least else ""
        lines.append([row["kind"].removeprefix("blocks "), count(row["elements"]), *map(number, rates), *cells, reached])
    header = ["GB/s", "elements", "1 thread", "2 threads", *PATHS, "copy", "times torch", "2 threads"]
    return table([*header, "times pypiquant", "2 threads", "to reach"], lines, aims="times each, on 2 threads")


def cpu_codec_tables(results):
    parts = [paragraph(of_processor(results)), failures(results)]
    rows = measured(results["sizes"])
    blocks = [row for row in rows if row["kind"].startswith("blocks ")]
    if others := [row for row in rows if not row["kind"].startswith("blocks ")]:
        parts.append(
            paragraph(
                "GB/s of the bytes that count, medians, all contenders taking turns, memory warm.",
                BYTES_NOTE,
                "avx2, portable: the same on one thread with that instruction set. e += g: NumPy's, on one thread,",
                "counted as if it wrote the bits, too. DeepSpeed: what its worker did, in torch and NumPy",
                "(bench/deepspeed_worker.py), on as many threads, its best sample. Lean: the same in as few operations",
                "as torch allows.",
            )
        )
        parts.append(of_codec_speed(others))
    if blocks:
        parts.append(
            paragraph(
                "Block codecs, likewise. Copy: NumPy's of as many bytes, on one thread. Torch: the same codes and a scale",
                "for each block in eager operations. pypiquant 4.1: 8 bits by one scale for all, which it looks for first.",
                "Both on as many threads, their best samples.",
            )
        )
        parts.append(of_block_speed(blocks))
    return "\n\n".join(part for part in parts if part)


# Copies are to be as fast as memcpy where nothing else is to be done, and never slower than NumPy: medians of a machine
# that others use, too.
COPY_TO_REACH = 0.95


def beside(row):
    """What a copy is compared with."""
    return "memcpy" if row["kind"].startswith("contiguous") or "numpy" not in row["seconds"] else "numpy"


def of_copies(rows):
    counts = sorted({row["elements"] for row in measured(rows)})
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in measured(rows)):
        of_kind = {row["elements"]: row for row in measured(rows) if row["kind"] == kind}
        sizes = [of_kind.get(elements) for elements in counts]
        rates = [row and rate(row, "ours") for row in sizes]
        times = [row and ratio(row, "ours", beside(row)) for row in sizes]
        # Small copies have nothing to set a call against but itself.
        missed = [count(n) for n, reached in zip(counts, times) if reached and reached < COPY_TO_REACH and n >= 2**16]
        two = ratio(sizes[-1], "ours x2", "ours") if sizes[-1] else None
        aimed = f"missed: {', '.join(missed)}" if missed else "reached"
        name = beside(next(iter(of_kind.values())))
        lines.append([kind, *map(number, [*rates, two]), {"numpy": "NumPy"}.get(name, name), *map(number, times), aimed])
    of = [count(elements) for elements in counts]
    header = ["GB/s, 1 thread", *of, "2 threads", "times", *of, f"{COPY_TO_REACH} times from 64K on"]
    return table(header, lines, aims="")


def cpu_copy_tables(results):
    parts = [
        paragraph(of_processor(results)),
        paragraph(
            "GB/s of the bytes that are read and written, medians, all contenders taking turns, memory warm; by the",
            "number of elements. Two threads: times as fast as one with the most elements. Times: compared with memcpy over",
            "as many bytes, or with np.copyto(dst, src, casting='unsafe'), on one thread. With few elements a call itself",
            "takes most of the time.",
        ),
        of_copies(results["sizes"]),
    ]
    return "\n\n".join(parts)


# --- several GPUs ----------------------------------------------------------------------------------------------------

LARGE = 300 * 2**20
# To reach by the handle with 300 * 2^20 elements, times NCCL's sum in the same dtype, by the number of GPUs.
NCCL_TO_REACH = {
    (2, "float32"): 2.2,
    (2, "bfloat16"): 1.8,
    (4, "float32"): 3.2,
    (4, "bfloat16"): 2.7,
}
# Times DeepSpeed's chain, likewise.
DEEPSPEED_TO_REACH = {(4, "float32"): 15}
# No slower than NCCL: in a graph with so many elements, and otherwise from so many on.
GRAPH_SIZE, EAGER_SIZE = 2**20, 2**22


def slowest(of_ranks):
    """Seconds of the slowest rank in each round."""
    return [max(samples) for samples in zip(*of_ranks)]


def as_rows(results):
    """The sizes that were measured, as others' rows are."""
    rows = [row for row in results["sizes"] if row.get("samples")]
    return [{**row, "seconds": {name: slowest(found) for name, found in row["samples"].items()}} for row in rows]


def of_cards(results):
    about, copies = results["about"], [row["copy"] for row in as_rows(results)]
    first = about["ranks"][0]
    copied = [copy["bytes"] / statistics.median(slowest(copy["seconds"])) for copy in copies]
    names = dict.fromkeys(of_rank["card"] for of_rank in about["ranks"])
    clocks = [
        "; ".join(", ".join(card.values()) for card in cards if card)
        for cards in ([of_rank["clocks"] for of_rank in about["ranks"]], results.get("clocks", {}).get("after", []))
    ]
    nvls = f"NCCL_NVLS_ENABLE={first['nvls']}" if first["nvls"] is not None else "no NVLS"
    copy = ""  # which is not timed where codecs are all that is
    if copied:
        speed = number(statistics.median(copied) / 1e12)
        copy = f"The copy on the slowest GPU: {speed} TB/s, bytes read and written. "
    return (
        f"{about['world']} GPUs, {', '.join(names)} (compute capability {first['capability']}), driver "
        f"{about['driver'] or 'unknown'}; NCCL {first['nccl']}, without sums in the switch ({nvls}); GradCodec "
        f"{first['library']}, commit {about['commit']}; torch {first['torch']}; {about['date']}"
        f"{'; a quick run' if about['quick'] else ''}. {copy}Clocks of the "
        f"processors and of memory, power and degrees of each GPU, before: {clocks[0] or 'unknown'}; after: "
        f"{clocks[1] or 'unknown'}."
    )


def all_reduce_to_reach(about, dtype, row, eager, graph, deepspeed):
    world, targets = about["world"], []
    if about["rehearsal"]:
        return ""
    if row["elements"] == LARGE:
        targets.append(("times NCCL", eager, NCCL_TO_REACH.get((world, dtype))))
        targets.append(("times DeepSpeed", deepspeed, DEEPSPEED_TO_REACH.get((world, dtype))))
    if row["elements"] >= EAGER_SIZE:
        targets.append(("times NCCL", eager, 1))
    if row["elements"] == GRAPH_SIZE:
        targets.append(("times NCCL in a graph", graph, 1))
    # One of a kind is enough: the first.
    named = {name: (reached, least) for name, reached, least in reversed(targets) if reached and least}
    return "; ".join(f"{least} {name}: {verdict(reached >= least)}" for name, (reached, least) in named.items())


def of_all_reduces(results, dtype):
    lines = []
    names = [f"handle {dtype}", f"handle {dtype}, graph", f"nccl {dtype}", f"nccl {dtype}, graph"]
    others = ["plain float32", "deepspeed"] if dtype == "float32" else []
    for row in as_rows(results):
        eager, graph = ratio(row, names[0], names[2]), ratio(row, names[1], names[3])
        deepspeed = ratio(row, names[0], "deepspeed") if others else None
        cells = [microseconds(median(row, name)) for name in names + others] + [number(eager), number(graph)]
        cells += [number(deepspeed)] if others else []
        reached = all_reduce_to_reach(results["about"], dtype, row, eager, graph, deepspeed)
        lines.append([f"all-reduce {dtype}", count(row["elements"]), *cells, reached])
    header = ["us", "elements", "handle", "in a graph", "NCCL", "in a graph"]
    header += ["plain form", "DeepSpeed"] if others else []
    header += ["times NCCL", "in graphs"] + (["times DeepSpeed"] if others else [])
    return table([*header, "to reach"], lines, aims="")


def of_peers(results, dtype):
    lines, names = [], [f"{who} {dtype}{how}" for who in ("peers", "handle", "nccl") for how in ("", ", graph")]
    for row in as_rows(results):
        if median(row, names[0]):
            cells = [microseconds(median(row, name)) for name in names]
            ratios = [number(ratio(row, *pair)) for pair in ((names[0], names[4]), (names[1], names[5]))]
            lines.append([count(row["elements"]), *cells, *ratios])
    header = [f"{dtype}, us", "peers", "in a graph", "over NCCL", "in a graph", "NCCL", "in a graph", "times NCCL", "in graphs"]
    return table(header, lines) if lines else None


def from_size(results, ours, theirs):
    """The least number of elements that was measured from which on ours is never slower; None if it is at the end."""
    least = None
    for row in as_rows(results):
        times = ratio(row, ours, theirs)
        if times is not None:
            least = (least or row["elements"]) if times >= 1 else None
    return least


def of_peers_and_nccl(results):
    """From which size on peers are no slower than NCCL's sum, in words."""
    said = {}
    for dtype in "float32", "bfloat16":
        for how, name in (("", "from Python"), (", graph", "in a graph")):
            pair = f"peers {dtype}{how}", f"nccl {dtype}{how}"
            if any(ratio(row, *pair) for row in as_rows(results)):
                said.setdefault(from_size(results, *pair), []).append(f"{dtype} {name}")
    sizes = [
        f"{f'from {count(least)} elements on' if least else 'at no size to the end'}: {', '.join(calls)}"
        for least, calls in said.items()
    ]
    return f"Never slower than NCCL {'; '.join(sizes)}." if said else None


def of_peer_kernels(results):
    """Each kernel of a run over peer memory beside what its stage must move in memory, at the copy's speed."""
    lines = []
    for row in as_rows(results):
        copied = row["copy"]["bytes"] / statistics.median(slowest(row["copy"]["seconds"]))
        for dtype, found in row.get("kernels", {}).items():
            total = 0
            for kernel, samples in found["samples"].items():
                seconds = statistics.median(slowest(samples))
                moved = next((moved for stage, moved in found["bytes"].items() if stage in kernel), None)
                floor = [microseconds(moved / copied), number(moved / copied / seconds, 4)] if moved else ["", ""]
                total += seconds
                lines.append([kernel, dtype, count(row["elements"]), microseconds(seconds), *floor])
            least = sum(found["bytes"].values()) / copied
            run = median(row, f"peers {dtype}")
            cells = [microseconds(total), microseconds(least), number(least / total, 4) if total else ""]
            lines.append([f"all; a run: {microseconds(run)}", dtype, count(row["elements"]), *cells])
    return table(["kernel, us", "dtype", "elements", "us", "floor", "of the copy"], lines) if lines else None


def peer_tables(results):
    """The section on peer memory; None if nothing of it was measured."""
    tables = [of_peers(results, dtype) for dtype in ("float32", "bfloat16")]
    if not any(tables):
        return None
    parts = [
        paragraph(of_cards(results)),
        paragraph(
            "The handle over memory that the GPUs reach, by kernels of the library's own, beside the same handle over NCCL,",
            "and beside ncclAllReduce, which sums: us a call as above. NCCL goes without sums in the switch.",
        ),
        *tables,
        of_peers_and_nccl(results),
    ]
    kernels = of_peer_kernels(results)
    if kernels:
        parts.append(
            paragraph(
                "The kernels of a run as the profiler (CUPTI) sees them: the slowest rank of each round, medians. The time of",
                "one that waits for other ranks (gc_onebit_finish) has that wait in it, and under a profiler ranks start further",
                "apart, so that the kernels of a small run take longer than such a run without one, whose time stands beside their",
                "sum. The floor: the bytes that the stage must read and write in this GPU's memory, at the copy's speed.",
            )
        )
        parts.append(kernels)
    return "\n\n".join(part for part in parts if part)


# To reach on two GPUs: times NCCL, called in the same way.
CODECS_TO_REACH = {
    ("int4 float32 C", LARGE): 3.6, ("int8 float32 C", LARGE): 2.8, ("mxfp8 float32 C", LARGE): 2.8,
    ("int4 bfloat16 C", LARGE): 2.8, ("int8 bfloat16 C", LARGE): 1.8, ("mxfp8 bfloat16 C", LARGE): 1.8,
    ("int4 float32 C", 2**24): 3, ("int4 bfloat16 C", 2**24): 2.2,
    ("int8 bfloat16 graph", 2**22): 1.8, ("int4 bfloat16 graph", 2**22): 2.3, ("int8 bfloat16 graph", 2**20): 2.2,
}  # fmt: skip
# At most so many us in a graph; and at most so many of the host, from C.
US_TO_REACH = {
    **{(codec, 2**16): 10 for codec in ("bf16", "mxfp8", "int8", "int4", "mxfp4")},
    **{(codec, elements): us for codec in ("onebit", "int8 errors") for elements, us in ((2**16, 18), (2**20, 21))},
}
HOST_US_TO_REACH = 8
CODECS_IMAGE = "![How many times as fast as NCCL, by codec and size](performance-codecs.svg)"
TRAINING_IMAGE = "![What each exchange adds to a step](performance-training.svg)"
CODEC_WAYS = {"graph": "in a graph", "C": "from C", "Python": "from Python"}


def of_codec_ways(results, dtype, way):
    """Codec by size: us, and times NCCL, called in the same way; from Python beside a call of NCCL's from C."""
    rows = [{**row, "seconds": {name: slowest(of) for name, of in row["samples"].items()}} for row in results["codecs"]]
    rows = [row for row in rows if row["seconds"]]
    ending = f" {dtype} {way}"
    nccl = f"nccl {dtype} {'C' if way == 'Python' else way}"
    names = dict.fromkeys(n[: -len(ending)] for row in rows for n in row["seconds"] if n.endswith(ending) and n != nccl)
    if not names:
        return None
    lines, least = [], dict.fromkeys(names)
    for row in rows:
        cells = []
        for name in names:
            seconds, times = median(row, name + ending), ratio(row, name + ending, nccl)
            cells.append(f"{microseconds(seconds)}{f' ({number(times)})' if times else ''}" if seconds else "-")
            if times is not None:
                least[name] = (least[name] or row["elements"]) if times >= 1 else None
        lines.append([count(row["elements"]), microseconds(median(row, nccl)), *cells])
    won = [count(of) if of else "-" for of in least.values()]
    lines.append(["no slower from", "", *won])
    return table([f"{dtype} {CODEC_WAYS[way]}, us", "NCCL", *names], lines)


def of_codec_hosts(results, dtype):
    rows = [row for row in results["codecs"] if row["host"]]
    names = dict.fromkeys(name for row in rows for name in row["host"] if f" {dtype} " in name)
    lines = []
    for name in names:
        who, way = name.split(f" {dtype} ")
        lines.append([who, CODEC_WAYS[way], *(microseconds(row["host"].get(name)) for row in rows)])
    sizes = [count(row["elements"]) for row in rows]
    return table([f"{dtype}, us of the host", "called", *sizes], lines) if lines else None


def aim_of_codecs(results):
    """Puts what is to be reached among the aims."""
    if results["about"]["rehearsal"] or results["about"]["world"] != 2:
        return
    for row in ({**row, "seconds": {n: slowest(of) for n, of in row["samples"].items()}} for row in results["codecs"]):
        elements, size = row["elements"], count(row["elements"])
        for name in row["seconds"]:
            who, dtype, way = name.rsplit(" ", 2)
            what, least = f"{who} {dtype} {CODEC_WAYS[way]}", CODECS_TO_REACH.get((name, elements))
            times = least and ratio(row, name, f"nccl {dtype} {way}")
            if times:
                AIMS.append((what, size, f"{least} times NCCL", verdict(times >= least)))
            most = US_TO_REACH.get((who, elements)) if way == "graph" else None
            if most:
                AIMS.append((what, size, f"at most {most} us", verdict(median(row, name) * 1e6 <= most)))
        for name, seconds in row["host"].items():
            who, dtype, way = name.rsplit(" ", 2)
            if way == "C" and who != "nccl":
                aim = f"at most {HOST_US_TO_REACH} us of the host"
                AIMS.append((f"{who} {dtype} from C", size, aim, verdict(seconds * 1e6 <= HOST_US_TO_REACH)))


def of_exchanges(results):
    """From which size on the second library is never slower than the first, in words."""
    rows, said = results["codecs"], []
    for name in dict.fromkeys(name for row in rows for name in row["samples"] if ", against" in name):
        least = from_size({"sizes": rows}, name, name.replace(", against", ""))
        who, way = name.replace(", against", "").rsplit(" ", 1)
        where = f"from {count(least)} elements on" if least else "at no size to the end"
        said.append(f"{who} {CODEC_WAYS[way]} {where}")
    return paragraph(f"The second is never slower than the first: {'; '.join(said)}.") if said else None


def codecs_tables(results):
    """The section on all codecs; None if nothing of it was measured."""
    if not any(row["samples"] for row in results.get("codecs", [])):
        return None
    tables = [of_codec_ways(results, dtype, way) for dtype in ("float32", "bfloat16") for way in CODEC_WAYS]
    against = "Two libraries, the second named `against`: they differ in up to how many bytes ranks exchange once."
    if not results["about"].get("against"):
        aim_of_codecs(results)
    parts = [
        paragraph(against) if results["about"].get("against") else None,
        of_exchanges(results),
        paragraph(of_cards(results)),
        None if results["sizes"] else failures(results),  # which the section before has
        paragraph(
            "Every codec over peer memory beside ncclAllReduce, which sums: us a call, in brackets times as fast as NCCL.",
            "NCCL goes without sums in the switch. The slowest rank of each round, medians. A prepared list of arguments,",
            "which ctypes hands over, stands for C. From Python: the package's AllReduce.run() on tensors of torch, beside",
            "NCCL from C; where no time stands, it was not called so. \"errors\": kept, in the gradient's dtype,",
            "as onebit does. The last line: the least size from which on no size is slower than NCCL.",
        ),
        *tables,
        paragraph("What a call takes of the host that only enqueues it: the least of three loops, the slowest rank."),
        *(of_codec_hosts(results, dtype) for dtype in ("float32", "bfloat16")),
    ]
    return "\n\n".join(part for part in parts if part)


def training_tables(results):
    """Step times, what of them the exchange adds, and bytes, of bench/training_step.py."""
    about, lines = results["about"], []
    for row in results["rows"]:
        of = f"{row['model']}, {row['dtype']}"
        if "failed" in row:
            lines.append([of, "FAILED: " + row["failed"], *[""] * 5])
            continue
        row = {**row, "seconds": {name: slowest(found) for name, found in row["samples"].items()}}
        alone = median(row, "no exchange")
        for name in row["seconds"]:
            took, times = median(row, name), ratio(row, name, "NCCL")
            spread = f"{milliseconds(min(row['seconds'][name]))} to {milliseconds(max(row['seconds'][name]))}"
            cells = [milliseconds(took), spread, milliseconds(max(0, took - alone)), number(row["bytes"][name] / 1e6)]
            lines.append([of, name, *cells, number(times)])
    found = next((row for row in results["rows"] if "weights" in row), {"card": "unknown", "torch": "unknown"})
    weights = "; ".join(
        f"{row['model']}: {row['weights'] / 1e6:.1f} million weights, {row['task']['layers']} layers of {row['task']['width']}, "
        f"{row['sequences']} sequences"
        for row in results["rows"] if row["dtype"] == "float32" and "weights" in row
    )  # fmt: skip
    parts = [
        "A REHEARSAL, over gloo on the CPU: no figure here says anything of GPUs." if about["rehearsal"] else None,
        paragraph(
            f"A training step of the transformer of bench/accuracy.py ({weights}) on {about['world']} GPUs, {found['card']},",
            f"with DistributedDataParallel of torch {found['torch']}, whose exchange runs beside the backward pass:",
            "its own over NCCL without NVLS, and gradcodec.torch.compress() by codec and transport; int4",
            "keeps errors in float32. ms a step: the median of turns, each that of the slowest rank; from the fastest to the",
            "slowest turn; what the exchange adds to the same step without one; MB that a rank sends in a step, NCCL's as a",
            f"ring has it; times as fast as NCCL. Commit {about['commit']}, {about['date']}.",
        ),
        table(["model, gradients", "exchange", "ms", "from, to", "added", "MB sent", "times NCCL"], lines),
    ]
    return "\n\n".join(part for part in parts if part)


def link_tables(results):
    """Steps over links of a known rate, of bench/real_link.py."""
    lines, (one, *_) = [], results["links"].values()
    for gbit, result in results["links"].items():
        steps = {name: statistics.quantiles(of["seconds"], n=4, method="inclusive") for name, of in result["found"].items()}
        for name, (low, middle, high) in steps.items():
            added = "" if name == "no exchange" else f"{1e3 * (middle - steps['no exchange'][1]):.0f}"
            sent = statistics.median(result["found"][name]["bytes"]) / 1e6
            spread = f"{1e3 * low:.0f} to {1e3 * high:.0f}"
            lines.append([f"{gbit} Gbit/s", name, f"{1e3 * middle:.0f}", spread, added, f"{sent:.2f}"])
    parts = [
        paragraph(
            f"A training step of a transformer of {one['parameters']:,} weights on {results['ranks']} ranks, each a process in",
            "a network namespace of its own, whose only link lets as much through as the first column says, with",
            "DistributedDataParallel over gloo on the CPU; all codecs are of the momentum. ms a step: the median, and the",
            "quartiles; what the exchange adds to the same step without one; MB that a rank sends in a step, with TCP's headers.",
            f"{results['cpus']} CPUs, {results['processor']}, load {results['load_before']:.0f} before it began: other",
            f"programs ran, and the quartiles say how much that disturbs. Commit {results['commit']}.",
        ),
        table(["link", "gradients", "ms", "quartiles", "added", "MB sent"], lines),
    ]
    return "\n\n".join(parts)


def of_stages(results):
    lines = []
    for row in as_rows(results):
        copied = row["copy"]["bytes"] / statistics.median(slowest(row["copy"]["seconds"]))
        for dtype, found in row["stages"].items():
            total = least = 0
            for stage, samples in found["samples"].items():
                seconds, moved = statistics.median(slowest(samples)), found["bytes"][stage]
                is_sent = stage.startswith("all_")
                total += seconds
                least += 0 if is_sent else moved / copied
                floor = "" if is_sent else microseconds(moved / copied)
                fraction = "" if is_sent else number(moved / copied / seconds, 4)
                sent = number(moved / seconds / 1e9) if is_sent else ""
                lines.append([stage, dtype, count(row["elements"]), microseconds(seconds), floor, fraction, sent])
            handle = median(row, f"handle {dtype}")
            cells = [microseconds(total), microseconds(least), "", f"the handle: {microseconds(handle)}"]
            lines.append(["all", dtype, count(row["elements"]), *cells])
    return table(["stage, us", "dtype", "elements", "us", "floor", "of the copy", "GB/s sent by a rank"], lines)


def multi_gpu_tables(results):
    rehearsal = None
    if results["about"]["rehearsal"]:
        where = "one GPU" if results["about"]["on"] == "cuda" else "no GPU"
        rehearsal = f"A REHEARSAL, on {where}: no figure here says anything of several GPUs."
    left_out = [f"{count(row['elements'])}: {row['left out']}" for row in results["sizes"] if "left out" in row]
    parts = [rehearsal, paragraph(of_cards(results)), failures(results)]
    if left_out:
        parts.append("Left out for want of memory: " + "; ".join(left_out) + ".")
    late = results.get("not begun", {})
    if late.get("elements"):
        names = ", ".join(map(count, late["elements"]))
        parts.append(f"Not begun, for {late['seconds']:g} s were over: {names}.")
    if as_rows(results):
        parts.append(
            paragraph(
                "An all-reduce, us a call: the slowest rank of each round between two events, medians, all contenders",
                "taking turns, memory warm. NCCL: ncclAllReduce, which sums. In bfloat16 the handle's errors are",
                "bfloat16, too. DeepSpeed: its compressed all-reduce in torch, CuPy and torch.distributed",
                "(bench/deepspeed_worker.py). Up to 16M elements several calls between the events; without a graph",
                "they are made from Python.",
            )
        )
        parts += [of_all_reduces(results, dtype) for dtype in ("float32", "bfloat16")]
    if any(row["stages"] for row in as_rows(results)):
        parts.append(
            paragraph(
                "The stages of such an all-reduce one by one, of a codec and NCCL's sends. The floor: the bytes that a",
                "stage must read and write, at the copy's speed. Sent: what a rank sends to the others.",
            )
        )
        parts.append(of_stages(results))
    return "\n\n".join(part for part in parts if part)


# --- the page ---------------------------------------------------------------------------------------------------------


def insert(page, name, part):
    """Replaces what stands between the markers; a page without them gets them at its end."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in page:
        page += f"\n{begin}\n{end}\n"
    before, rest = page.split(begin, 1)
    return f"{before}{begin}\n{part}\n{end}{rest.split(end, 1)[1]}"


def image(name):
    """The picture of a part, which bench/figures.py draws of its tables."""
    return f"![Times of small sizes, rates of large ones](performance-{name}.svg)"


PAGE = """# Performance

Made by `make bench-report` from what `make bench`, `make gpu-bench` and others have measured; each part begins with the
machine. What we aim at, and where it was missed, is in [TARGETS.md](TARGETS.md).

- Sizes are numbers of elements: 1K is 2^10, 1M is 2^20, 1G is 2^30.
- *Times NumPy* (or CuPy, NCCL, DeepSpeed): how many times as fast this library is. Above 1 it is the faster one.
- *Of the loop*, *of the copy*: the speed as a fraction of the fastest that the memory allows, which is measured in the
  same run: a loop that only reads or writes, or a copy within the GPU. 1 is as fast as the memory.
- Small calls take the time of a launch, about 2 us on a GPU, whatever they do: look at the time there, not at
  fractions.
"""
TARGETS = """# Targets

What this library is meant to reach, for those who work on it: ratios within one run on one machine. Made by `make
bench-report` with [PERFORMANCE.md](PERFORMANCE.md), which has the figures, the machines and what the words mean. A row
has the sizes at which its aim was reached and missed.
"""


def write_targets(page, name, title):
    """What the tables that were just made aim at, in a part of its own."""
    path = page.parent / "TARGETS.md"
    if made := targets():
        text = path.read_text() if path.exists() else TARGETS
        path.write_text(insert(text, name, f"## {title}\n\n{made}"))


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = (
        "cpu.json", "cpu_codec.json", "cpu_copy.json", "gpu.json", "gpu_copy.json", "gpu_codec.json", "gpu_kernels.json",
        "multi_gpu.json", "training_step.json", "real_link.json",
    )  # fmt: skip
    there = [path for path in (ROOT / "build/bench" / name for name in names) if path.exists()]
    options.add_argument("results", nargs="*", type=pathlib.Path, default=there)
    options.add_argument("--page", metavar="FILE", type=pathlib.Path, default=ROOT / "docs/PERFORMANCE.md")
    options = options.parse_args()
    if not options.results:
        raise SystemExit("no results: `make bench` and `make gpu-bench` make them")

    for path in options.results:
        results = json.loads(path.read_text())
        page = options.page.read_text() if options.page.exists() else PAGE
        if "links" in results:
            options.page.write_text(insert(page, "real link", f"## A training step over a slow link\n\n{link_tables(results)}"))
        elif results["about"].get("of") == "several cards":
            if results["about"]["rehearsal"]:
                print(f"{path}: a rehearsal, of which the page has nothing")
                continue
            if results["sizes"]:
                part = f"## Several GPUs\n\n{image('multi-gpu')}\n\n{multi_gpu_tables(results)}"
                page = insert(page, "several cards", part)
                write_targets(options.page, "several cards", "Several GPUs")
            if peers := peer_tables(results):
                part = f"## Several GPUs, over peer memory\n\n{image('peers')}\n\n{peers}"
                page = insert(page, "peer memory", part)
            codecs = codecs_tables(results)
            if codecs and results["about"].get("against"):
                page = insert(page, "exchanges", f"## Several GPUs, one exchange or two\n\n{codecs}")
            elif codecs:
                page = insert(page, "all codecs", f"## Several GPUs, every codec\n\n{CODECS_IMAGE}\n\n{codecs}")
                write_targets(options.page, "all codecs", "Several GPUs, every codec")
            options.page.write_text(page)
        elif results["about"].get("of") == "training step":
            if results["about"]["rehearsal"]:
                print(f"{path}: a rehearsal, of which the page has nothing")
                continue
            part = f"## A training step\n\n{TRAINING_IMAGE}\n\n{training_tables(results)}"
            options.page.write_text(insert(page, "training step", part))
        elif results["about"].get("of") == "codec":
            where, made = ("GPU", gpu_codec_tables) if "yardsticks" in results else ("CPU", cpu_codec_tables)
            part = f"## Codecs on the {where}\n\n{made(results)}"
            options.page.write_text(insert(page, f"{where.lower()} codecs", part))
            write_targets(options.page, f"{where.lower()} codecs", f"Codecs on the {where}")
        elif results["about"].get("of") == "copies":
            where, made = ("GPU", gpu_copy_tables) if "yardsticks" in results else ("CPU", cpu_copy_tables)
            part = f"## Copies on the {where}\n\n{made(results)}"
            options.page.write_text(insert(page, f"{where.lower()} copies", part))
            write_targets(options.page, f"{where.lower()} copies", f"Copies on the {where}")
        elif results["about"].get("of") == "kernels":
            part = f"## Kernels compiled at run time\n\n{kernel_tables(results)}"
            options.page.write_text(insert(page, "kernels", part))
            write_targets(options.page, "kernels", "Kernels compiled at run time")
        elif "yardsticks" in results:
            part = f"## GPU\n\n{image('gpu')}\n\n{gpu_tables(results)}"
            options.page.write_text(insert(page, "gpu", part))
            write_targets(options.page, "gpu", "GPU")
        else:
            part = f"## CPU\n\n{image('cpu')}\n\n{tables(results)}"
            options.page.write_text(insert(page, "cpu", part))
            write_targets(options.page, "cpu", "CPU")


if __name__ == "__main__":
    main()
