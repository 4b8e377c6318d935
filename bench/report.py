"""Makes the CPU part of docs/PERFORMANCE.md and its plot of what bench/cpu.py measured.

The part lies between two markers; what stands around them stays.
"""

import argparse
import json
import pathlib
import statistics
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- cpu -->", "<!-- /cpu -->"

# To reach on one thread with AVX-512: of the plain loop over the same memory, and times NumPy.
TO_REACH = {
    ("pack bool", 2**16): (0.75, 4),
    ("pack bool", 2**20): (0.75, 2.2),
    ("pack bool", 2**28): (0.85, 1.25),
    ("unpack bool", 2**20): (None, 3),
}
# No layout should take longer than this many times the contiguous one.
MOST_TIMES = 4

# How contenders are drawn.
LINES = {
    "read": ("read loop", ":", "0.4"),
    "write": ("write loop", ":", "0.4"),
    "ours": ("one thread", "-", "C0"),
    "ours x2": ("two threads", "--", "C0"),
    "numpy": ("NumPy", "-", "C1"),
}


def median(row, contender):
    """Seconds a call; None if it did not take part."""
    samples = row["seconds"].get(contender)
    return samples and statistics.median(samples)


def rate(row, contender):
    """GB/s of elements."""
    seconds = median(row, contender)
    return seconds and row["bytes"] / seconds / 1e9


def ratio(row, contender, other):
    """How many times as fast as the other."""
    seconds, others = median(row, contender), median(row, other)
    return others and others / seconds


def loop(row):
    return "read" if "read" in row["seconds"] else "write"


def number(value, digits=3):
    """Three digits, however large."""
    return "-" if value is None else f"{value:.{max(0, digits - len(str(int(value))))}f}"


def verdict(reached):
    return "reached" if reached else "missed"


def table(header, rows):
    """Markdown that also reads well as it is: the first column to the left, numbers to the right."""
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
        power = f"2^{row['elements'].bit_length() - 1}"
        cells = [power, *map(number, [*rates, of_loop, of_numpy]), "; ".join(targets)]
        lines.append([row["kind"], *cells])
    header = ["kind", "elements", "loop", "1 thread", "2 threads", "NumPy", "of the loop", "times NumPy", "to reach"]
    return table(header, lines)


def of_layouts(rows):
    sides = list(dict.fromkeys(row["side"] for row in rows))
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = {row["side"]: row for row in rows if row["kind"] == kind}
        times = [ratio(of_kind[side], "fast path", "ours") for side in sides]
        numpy = min(ratio(row, "ours", "numpy") for row in of_kind.values())
        touched = str(next(iter(of_kind.values()))["touched"])
        lines.append([kind, touched, *map(number, [*times, numpy]), verdict(max(times) <= MOST_TIMES)])
    header = ["kind", "bytes", *(f"{side} x {side}" for side in sides), "times NumPy", f"at most {MOST_TIMES}"]
    return table(header, lines)


def tables(results):
    about = results["about"]
    caches = ", ".join(f"{name} {size}" for name, size in about["caches"].items())
    machine = (
        f"{about['processor']} (family {about['family']}, model {about['model']}; {caches}), {about['cpus']} CPUs, "
        f"kernel {about['kernel']}; GradCodec {about['library']}, commit {about['commit']}, path {about['path']}; "
        f"NumPy {about['numpy']}; {about['date']}{'; a quick run' if about['quick'] else ''}."
    )
    parts = [textwrap.fill(machine, 110, break_on_hyphens=False)]
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
    return "\n\n".join(parts)


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gradcodec", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for panel, kind in zip(panels, ("pack bool", "unpack bool")):
        rows = [row for row in results["sizes"] if row["kind"] == kind]
        sizes = [row["elements"] for row in rows]
        for contender in rows[0]["seconds"]:
            label, style, color = LINES[contender]
            rates = [rate(row, contender) for row in rows]
            panel.plot(sizes, rates, style, color=color, marker=".", label=label)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes)
        panel.set_ylim(bottom=0)
        panel.set(title=kind, xlabel="elements", ylabel="GB/s of elements")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def insert(page, part):
    """Replaces what stands between the markers; a page without them gets them at its end."""
    if BEGIN not in page:
        page += f"\n{BEGIN}\n{END}\n"
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{part}\n{END}{rest.split(END, 1)[1]}"


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("results", nargs="?", type=pathlib.Path, default=ROOT / "build/bench/cpu.json")
    options.add_argument("--page", metavar="FILE", type=pathlib.Path, default=ROOT / "docs/PERFORMANCE.md")
    options.add_argument("--plot", metavar="FILE", type=pathlib.Path, help="SVG or PNG; beside the page if left out")
    options = options.parse_args()

    results = json.loads(options.results.read_text())
    image = options.plot or options.page.parent / "performance-cpu.svg"
    plot(results, image)
    page = options.page.read_text() if options.page.exists() else "# Performance\n"
    part = f"## CPU\n\n{tables(results)}\n\n![GB/s against size]({image.name})"
    options.page.write_text(insert(page, part))


if __name__ == "__main__":
    main()
