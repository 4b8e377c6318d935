"""The pictures of README.md and docs/, of the tables in PERFORMANCE.md and CODECS.md and of what `make demo` prints.

    python bench/figures.py                     all of them; make bench-report does so
    python bench/figures.py --demo LOG          and docs/accuracy.svg, of the demo's output
    python bench/figures.py --check             only says whether README.md's numbers are those of the tables

The tables are what is committed of a run, so whoever changes them draws the same pictures without the machine.
"""

import argparse
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

OURS, SECOND, OTHER, THIRD, LIMIT = "#0b5fbd", "#5aa0e6", "#d9822b", "#8a8f98", "#e8ebef"
COPY = 4.28e12  # bytes a second, where the tables have fractions of the copy


# --- the tables -------------------------------------------------------------------------------------------------------


def part(name, page="PERFORMANCE.md"):
    """What stands between the markers of that name."""
    page = (DOCS / page).read_text()
    return page.split(f"<!-- {name} -->", 1)[1].split(f"<!-- /{name} -->", 1)[0]


def tables(text):
    """Every table of a text: its header and its rows, as lists of cells."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.strip("| \n").split(" | ")] for line in block.splitlines())
        found.append((header, [[cell.strip() for cell in row] for row in rows]))
    return found


def the_table(text, *wanted):
    """The first table that has these columns."""
    for header, rows in tables(text):
        if all(name in header for name in wanted):
            return header, rows
    raise SystemExit(f"docs/PERFORMANCE.md: no table has the columns {', '.join(wanted)}")


def size(cell):
    """2^24, 300 * 2^20, 16M or 16,777,216 as a number; None for anything else, as 2^24 - 1."""
    if match := re.fullmatch(r"(?:(\d+) \* )?2\^(\d+)", cell):
        return int(match[1] or 1) * 2 ** int(match[2])
    if match := re.fullmatch(r"(\d+)([KMG])i?", cell):
        return int(match[1]) * 1024 ** (" KMG".index(match[2]))
    return int(cell.replace(",", "")) if re.fullmatch(r"[\d,]+", cell) else None


def value(cell):
    return None if cell in ("", "-") else float(cell)


def column(table, name, of=None, nth=0):
    """{size: number} of a column, of the rows whose first cell is `of`; the nth of that name."""
    header, rows = table
    places = [place for place, cell in enumerate(header) if cell == name]
    where = header.index("elements") if "elements" in header else 0
    rows = [row for row in rows if of is None or row[0] == of]
    found = {size(row[where]): value(row[places[nth]]) for row in rows}
    return {elements: number for elements, number in found.items() if elements and number is not None}


def of_dtype(text, dtype):
    """The first table of all-reduces of that dtype, which stands in its corner or in its first column."""
    return next(found for found in tables(text) if dtype in found[0][0] or dtype in found[1][0][0])


def ordinal(elements):
    """1K, 16M, 300M, 1G: of 1,024."""
    for unit, letter in (2**30, "G"), (2**20, "M"), (2**10, "K"):
        if elements >= unit:
            return f"{elements / unit:g}{letter}"
    return str(elements)


def card(name):
    """The GPU that the tables between these markers are of."""
    return re.search(r"NVIDIA (\w+)", part(name))[1]


# --- what the README says ---------------------------------------------------------------------------------------------

LARGE, FULL = 2**28, 300 * 2**20


def comparisons():
    """What is compared on the first screen: (what, on what, [(who, milliseconds)]), ours last."""
    cpu = the_table(part("cpu"), "kind", "1 thread", "NumPy")
    seconds = {name: LARGE * 4 / (column(cpu, name, "signs float32")[LARGE] * 1e9) for name in ("NumPy", "1 thread", "2 threads")}
    gpu = the_table(part("gpu"), "kind", "us", "times CuPy")
    ours = column(gpu, "us", "signs float32")[LARGE] / 1e3
    cupy = ours * column(gpu, "times CuPy", "signs float32")[LARGE]
    header, rows = the_table(part("gpu codecs"), "bytes", "DeepSpeed, ms")
    encode = dict(zip(header, next(row for row in rows if row[0] == "encode float32")))
    cards, peers = of_dtype(part("several cards"), "float32"), of_dtype(part("peer memory"), "float32")
    return [
        (
            "Signs of 268 million float32 to bits", "CPU (Xeon)",
            [("NumPy", seconds["NumPy"] * 1e3), ("GradCodec, 1 thread", seconds["1 thread"] * 1e3),
             ("GradCodec, 2 threads", seconds["2 threads"] * 1e3)],
        ),
        ("Signs of 268 million float32 to bits", f"one {card('gpu')}", [("CuPy", cupy), ("GradCodec", ours)]),
        (
            "Error feedback, signs and scale of 315 million float32", f"one {card('gpu codecs')}",
            [("DeepSpeed's formula", float(encode["DeepSpeed, ms"])), ("GradCodec", float(encode["ms"]))],
        ),
        (
            "All-reduce of 315 million float32", "two H200, NVLink",
            [("DeepSpeed, compressed", column(cards, "DeepSpeed")[FULL] / 1e3), ("NCCL, float32, without NVLS", column(cards, "NCCL")[FULL] / 1e3),
             ("GradCodec over NCCL", column(cards, "handle")[FULL] / 1e3),
             ("GradCodec over peer memory", column(peers, "peers")[FULL] / 1e3)],
        ),
    ]  # fmt: skip


def factor(number):
    return f"{number:.0f}" if number >= 9.95 else f"{number:.1f}"


def milliseconds(number):
    return f"{number:.0f} ms" if number >= 9.95 else f"{number:.2g} ms" if number < 0.995 else f"{number:.1f} ms"


def the_numbers():
    """The table on the first screen."""
    lines = ["| what | where | instead of | takes | GradCodec | times as fast |", "|---|---|---|--:|--:|--:|"]
    for what, where, contenders in comparisons():
        *others, (_, ours) = [c for c in contenders if "2 threads" not in c[0]]
        for who, took in (other for other in others if not other[0].startswith("GradCodec")):
            lines.append(f"| {what} | {where} | {who} | {milliseconds(took)} | {milliseconds(ours)} | {factor(took / ours)} |")
    return "\n".join(lines)


def with_numbers(page):
    begin, end = "<!-- numbers -->", "<!-- /numbers -->"
    before, rest = page.split(begin, 1)
    return f"{before}{begin}\n{the_numbers()}\n{end}{rest.split(end, 1)[1]}"


# --- the pictures -----------------------------------------------------------------------------------------------------


def pyplot():
    import matplotlib

    matplotlib.use("svg")
    # Letters as paths: the same picture wherever it is looked at.
    matplotlib.rcParams.update(
        {"svg.fonttype": "path", "svg.hashsalt": "gradcodec", "font.size": 10, "axes.spines.top": False,
         "axes.spines.right": False, "axes.titlesize": 10.5, "figure.facecolor": "white"}
    )  # fmt: skip
    from matplotlib import pyplot

    return pyplot


def save(figure, name):
    figure.savefig(DOCS / name, metadata={"Date": None}, bbox_inches="tight", pad_inches=0.12)


def bars():
    """One bar for everyone; on each the time, on ours how many times as fast."""
    plt = pyplot()
    found = [comparisons()[place] for place in (3, 0, 1, 2)]
    figure, panels = plt.subplots(2, 2, figsize=(10, 4.4), layout="constrained", height_ratios=(4, 2))
    for panel, (what, where, contenders), room in zip(panels.flat, found, (4, 4, 2, 2)):
        names, times = zip(*contenders)
        ours = [name.startswith("GradCodec") for name in names]
        names = [name.replace(", without", ",\nwithout") for name in names]
        panel.barh(names, times, color=[OURS if our else OTHER for our in ours], height=0.62)
        rivals = [time for time, our in zip(times, ours) if not our]
        for place, (time, our) in enumerate(zip(times, ours)):
            text = milliseconds(time)
            if our:
                text += f"   {factor(min(rivals) / time)}x" + (f" and {factor(max(rivals) / time)}x" if len(rivals) > 1 else "")
            panel.text(time + max(times) * 0.015, place, text, va="center", weight="bold" if our else "normal")
        panel.set_ylim(room - 0.5, -0.5)
        panel.set_xlim(0, max(times) * 1.3)
        panel.set_title(f"{what}\n{where}", loc="left")
        panel.xaxis.set_visible(False)
        panel.spines["bottom"].set_visible(False)
        panel.spines["left"].set_bounds(-0.4, len(names) - 0.6)
        panel.tick_params(left=False)
    figure.suptitle("Time: shorter is better. Bold: how many times as fast", x=0.01, ha="left", fontsize=10, color="0.35")
    save(figure, "speed.svg")


def logarithmic(panel):
    """Numbers as people write them, also where less than a decade is drawn."""
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    low *= 0.8
    steps = (1, 2, 5) if high < 60 * low else (1,)
    ticks = [step * 10**power for power in range(-2, 7) for step in steps]
    panel.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_ylim(low, high)


def sizes_axis(panel, sizes):
    sizes = sorted(sizes)
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [ordinal(each) for each in sizes])
    panel.minorticks_off()
    panel.set_xlabel("elements")
    panel.grid(alpha=0.25)


def times_and_rates(name, rows, limit_name, suptitle):
    """For each (title, bytes an element, {who: {elements: seconds}}, {elements: the limit's bytes a second}) a row: times
    of small sizes to the left, rates of large ones to the right, with the limit shaded."""
    plt = pyplot()
    figure, panels = plt.subplots(len(rows), 2, figsize=(10, 3.1 * len(rows)), layout="constrained", squeeze=False)
    for (small, large), (title, element, contenders, limit) in zip(panels, rows):
        for who, seconds in contenders.items():
            color, marker = (OURS, "o") if who.startswith("GradCodec") else (OTHER, "s")
            few = {n: s * 1e6 for n, s in seconds.items() if n <= 2**20}
            many = {n: n * element / s / 1e9 for n, s in seconds.items() if n >= 2**20}
            small.plot(few.keys(), few.values(), color=color, marker=marker, markersize=4, label=who)
            large.plot(many.keys(), many.values(), color=color, marker=marker, markersize=4)
        few = [n for n in next(iter(contenders.values())) if n <= 2**20]
        many = [n for n in next(iter(contenders.values())) if n >= 2**20]
        logarithmic(small)
        small.set_title(f"{title}: time of small sizes", loc="left")
        small.set_ylabel("microseconds\n(lower is better)")
        bound = {n: rate / 1e9 for n, rate in limit.items() if n >= 2**20}
        top = max(bound.values()) * 1.15
        large.fill_between(list(bound), list(bound.values()), top, color=LIMIT, linewidth=0)
        flat = min(bound.values()) == max(bound.values())
        where = {"x": min(bound), "ha": "left"} if flat else {"x": max(bound), "ha": "right"}  # away from the lines
        large.text(y=top * 0.985, s=limit_name, va="top", fontsize=8.5, color="0.3", **where)
        large.set_ylim(0, top)
        large.set_title(f"{title}: rate of large ones", loc="left")
        large.set_ylabel("GB/s\n(higher is better)")
        sizes_axis(small, few)
        sizes_axis(large, many)
        small.legend(frameon=False)
    figure.suptitle(suptitle, x=0.01, ha="left", fontsize=10, color="0.35")
    save(figure, name)


def cpu():
    text = part("cpu")
    table = the_table(text, "kind", "1 thread", "NumPy")
    machine = re.sub(r"\(R\)", "", re.search(r"^\S.*(?= \(family)", text, re.MULTILINE)[0])
    rows = []
    for kind, title, element in (
        ("signs float32", "Signs of float32", 4),
        ("pack bool", "Packing booleans", 1),
        ("unpack bool", "Unpacking to booleans", 1),
    ):
        rates = {"GradCodec": column(table, "1 thread", kind), "NumPy": column(table, "NumPy", kind)}
        seconds = {who: {n: n * element / (rate * 1e9) for n, rate in of.items()} for who, of in rates.items()}
        loop = column(table, "loop", kind)
        rows.append((title, element, seconds, {n: 1e9 * max(loop[n], rates["GradCodec"][n]) for n in loop}))
    times_and_rates("performance-cpu.svg", rows, "beyond a plain loop over the same memory", f"{machine}, one thread; bytes of elements")


def gpu():
    table = the_table(part("gpu"), "kind", "us", "times CuPy")
    rows = []
    for kind, title, element in (
        ("signs float32", "Signs of float32", 4.125),
        ("pack bool", "Packing booleans", 1.125),
        ("unpack float32", "Unpacking to float32", 4.125),
    ):
        ours = {n: us / 1e6 for n, us in column(table, "us", kind).items()}
        cupy = {n: ours[n] * times for n, times in column(table, "times CuPy", kind).items()}
        rows.append((title, element, {"GradCodec": ours, "CuPy": cupy}, dict.fromkeys(ours, COPY)))
    times_and_rates("performance-gpu.svg", rows, "beyond a device-to-device copy", "One NVIDIA H200; bytes read and written")


def all_reduces(name, marker, contenders, suptitle):
    """Times against sizes, both axes logarithmic; what is left of a factor is read off the second row."""
    plt = pyplot()
    figure, panels = plt.subplots(2, 2, figsize=(10, 5.6), layout="constrained", sharex="col", height_ratios=(3, 2), sharey="row")
    for place, dtype in enumerate(("float32", "bfloat16")):
        table = of_dtype(part(marker), dtype)
        drawn = {}
        for who, (heading, nth, color, line) in contenders.items():
            if heading in table[0]:
                drawn[who] = column(table, heading, nth=nth)
                panels[0][place].plot(drawn[who].keys(), drawn[who].values(), line, color=color, marker="o", markersize=3, label=who)
        for who, (_, _, color, line) in contenders.items():
            if who.startswith("GradCodec"):
                nccl = drawn["NCCL, in a graph" if "graph" in who else "NCCL"]
                times = [nccl[n] / drawn[who][n] for n in nccl]
                panels[1][place].plot(list(nccl), times, line, color=color, marker="o", markersize=3)
        logarithmic(panels[0][place])
        panels[0][place].set_title(f"All-reduce of {dtype}", loc="left")
        panels[0][place].legend(frameon=False)
        panels[0][place].grid(alpha=0.25)
        panels[1][place].axhline(1, color="0.3", linewidth=1)
        panels[1][place].text(2**10, 1.06, "as fast as NCCL", fontsize=8.5, color="0.3")
        panels[1][place].set_ylim(0, 2.8)
        sizes_axis(panels[1][place], [n for n in nccl if n != FULL])
    panels[0][0].set_ylabel("microseconds\n(lower is better)")
    panels[1][0].set_ylabel("times as fast as NCCL\n(higher is better)")
    figure.suptitle(suptitle, x=0.01, ha="left", fontsize=10, color="0.35")
    save(figure, name)


def codecs(name):
    """Times NCCL in a graph against sizes; the numbers stand in brackets behind the microseconds."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    colors = {"int4": OURS, "int8": SECOND, "mxfp8": "#17804e", "bf16": THIRD, "onebit": OTHER}
    for panel, dtype in zip(panels, ("float32", "bfloat16")):
        header, rows = the_table(part("all codecs"), f"{dtype} in a graph, us")
        sizes = {size(row[0]): row for row in rows if size(row[0])}
        for who, color in colors.items():
            place = header.index(who)
            times = {n: float(row[place].split("(")[1].strip(")")) for n, row in sizes.items() if "(" in row[place]}
            panel.plot(times.keys(), times.values(), color=color, marker="o", markersize=3, label=who)
        panel.set_xscale("log", base=2)
        panel.axhline(1, color="0.3", linewidth=1)
        panel.set_title(f"All-reduce of {dtype}, in a graph", loc="left")
        panel.grid(alpha=0.25)
        sizes_axis(panel, [n for n in sizes if n != FULL])
    panels[0].legend(frameon=False)
    panels[0].set_ylabel("times as fast as NCCL\n(higher is better)")
    save(figure, name)


def training_step(name):
    """A bar for each exchange: the step without one, and what the exchange adds; a line from the fastest turn to the
    slowest."""
    plt = pyplot()
    header, rows = the_table(part("training step"), "model, gradients", "exchange", "from, to")
    groups = {}
    for of, exchange, took, ends, *_ in rows:
        groups.setdefault(of, {})[exchange] = float(took), [float(end) for end in ends.split(" to ")]
    figure, panels = plt.subplots(len(groups) // 2, 2, figsize=(10, 7.5), layout="constrained", sharex="row")
    for panel, (of, group) in zip(panels.flat, groups.items()):
        alone, _ = group.pop("no exchange")
        for place, (exchange, (took, ends)) in enumerate(group.items()):
            panel.barh(place, alone, color=LIMIT, height=0.62)
            panel.barh(place, took - alone, left=alone, color=OTHER if exchange == "NCCL" else OURS, height=0.62)
            panel.plot(ends, (place, place), color="0.3", linewidth=1)
            panel.text(max(ends), place, f"  {took:.1f}", va="center", weight="normal" if exchange == "NCCL" else "bold")
        panel.set_yticks(range(len(group)), [who if who == "NCCL" else f"GradCodec {who}" for who in group])
        panel.invert_yaxis()
        panel.tick_params(left=False)
        panel.set_title(of, loc="left")
        panel.margins(x=0.16)
    for panel in panels[-1]:
        panel.set_xlabel("ms a step (lower is better)")
    note = "Grey: the same step without an exchange. Colour: what the exchange adds. Line: the fastest turn to the slowest"
    figure.suptitle(note, x=0.01, ha="left", fontsize=10, color="0.35")
    save(figure, name)


def demo_curves(log):
    """{mode: ([million bytes], [per cent])} of what the demo printed."""
    curves, steps = {}, {}
    for mode, step, accuracy in re.findall(r"^(\w+) +step +(\d+) .*held out ([\d.]+)$", log, re.MULTILINE):
        curves.setdefault(mode, []).append((int(step), 100 * float(accuracy)))
        steps[mode] = int(step)
    last = dict(word.split("=") for word in log.splitlines()[-1].split()[1:])
    each = {mode: int(last[f"bytes_{mode}"]) / steps[mode] / 1e6 for mode in curves}
    return {mode: ([step * each[mode] for step, _ in points], [of for _, of in points]) for mode, points in curves.items()}


def accuracy(log):
    plt = pyplot()
    names = {
        "fp32": ("float32", OTHER, (12, 92)),
        "signs": ("signs, with a vote", OURS, (0.085, 97.3)),
        "onebit": ("one bit with\nerror feedback", SECOND, (0.082, 84.4)),
        "int4": ("four bits, scales for 32", "#17804e", (1.5, 98)),
    }
    figure, panel = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for mode, (sent, held_out) in demo_curves(log).items():
        name, color, place = names[mode]
        panel.plot(sent[1:], held_out[1:], "-o", color=color, markersize=4)  # nothing is sent before the first step
        panel.text(*place, f"{name}:\n{held_out[-1]:.1f} % after {sent[-1]:.1f} MB", color=color, weight="bold")
    panel.set_xscale("log")
    ticks = (0.1, 0.3, 1, 3, 10, 30, 100)
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_ylim(84, 100)
    panel.set_xlabel("megabytes that the four processes have sent (logarithmic)")
    panel.set_ylabel("held-out digits read right, %")
    panel.set_title("Four processes learn to read digits: within half a point for a sixth to a 32nd of the bytes", loc="left")
    panel.grid(alpha=0.25)
    save(figure, "accuracy.svg")


def beside(sent):
    """Bytes moved apart by a few per cent where they are nearly the same, so that every point is seen."""
    groups = []
    for place in sorted(range(len(sent)), key=sent.__getitem__):
        if not groups or sent[place] > 1.1 * sent[groups[-1][-1]]:
            groups.append([])
        groups[-1].append(place)
    return {place: sent[place] * 1.12 ** (n - (len(group) - 1) / 2) for group in groups for n, place in enumerate(group)}


SENT = {"float32": "0.15", "BF16": THIRD, "MXFP8": "#17804e", "INT8": SECOND, "INT4": OURS, "MXFP4": "#8a4fbf",
        "ONEBIT": OTHER, "SIGN": "#c0392b"}  # fmt: skip


def losses(name, marker, title, top):
    """Where training ended against the bytes sent, of a table in docs/CODECS.md; of a loss above `top` only the number."""
    plt = pyplot()
    header, rows = tables(part(marker, "CODECS.md"))[0]
    mean, ends = (next(n for n, head in enumerate(header) if head.startswith(word)) for word in ("loss", "lowest"))
    rows = [row for row in rows if row[mean] != "diverged"]
    shapes = dict(zip(dict.fromkeys(row[0] for row in rows), "osD^v"))
    figure, panel = plt.subplots(figsize=(8, 4), layout="constrained")
    entry = functools.partial(plt.Line2D, [], [], linestyle="", markersize=7)
    codecs = {}
    for place, sent in beside([float(row[-1].replace(",", "")) for row in rows]).items():
        row, loss = rows[place], float(rows[place][mean])
        codec = next(word for word in re.findall(r"\w+", row[1]) if word in SENT)
        look = {"color": SENT[codec], "markerfacecolor": SENT[codec] if row[2] == "kept" else "white"}
        codecs[codec] = entry(color=SENT[codec], marker="o", label=codec)
        if loss > top:
            panel.plot(sent, top, shapes[row[0]], markersize=7, clip_on=False, **look)
            panel.text(sent * 1.07, top, f"{loss:.2f}, beyond the picture", va="center", color=SENT[codec])
            continue
        panel.plot((sent, sent), [float(end) for end in row[ends].split(" to ")], color=SENT[codec], linewidth=1)
        panel.plot(sent, loss, shapes[row[0]], markersize=7, **look)
    panel.set_xscale("log")
    ticks = [step * 10**power for power in range(-1, 4) for step in (1, 2, 5)]
    low, high = panel.get_xlim()
    panel.set_xticks([tick for tick in ticks if low < tick < high], [f"{tick:g}" for tick in ticks if low < tick < high])
    panel.minorticks_off()
    panel.set_ylim(top=top)
    panel.set_xlabel(f"{header[-1]} (points of the same bytes stand side by side)")
    panel.set_ylabel("loss on what was not learnt from\n(lower is better)")
    panel.set_title(title, loc="left", pad=14)
    panel.grid(alpha=0.25)
    blocks = [entry(color="0.4", marker=shape, markerfacecolor="white", label=who) for who, shape in shapes.items()]
    blocks += [entry(color="0.4", marker="s", label="filled: errors kept")]
    order = [codecs[codec] for codec in SENT if codec in codecs]
    figure.legend(handles=[*order, *blocks], loc="outside right center", frameon=False)
    save(figure, name)


NCCL = {"NCCL": ("NCCL", 0, OTHER, "-"), "NCCL, in a graph": ("in a graph", 1, OTHER, "--")}


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--check", action="store_true", help="draw nothing; fail where README.md has other numbers")
    options.add_argument("--demo", type=pathlib.Path, metavar="LOG", help="what `make demo` has printed")
    options = options.parse_args()
    readme = ROOT / "README.md"
    page = readme.read_text()
    if options.check:
        if page != with_numbers(page):
            raise SystemExit("README.md has other numbers than docs/PERFORMANCE.md: python bench/figures.py writes them")
        return
    readme.write_text(with_numbers(page))
    if options.demo:
        accuracy(options.demo.read_text().strip())
    bars()
    cpu()
    gpu()
    handle = {"GradCodec over NCCL": ("handle", 0, SECOND, "-"), "GradCodec, in a graph": ("in a graph", 0, SECOND, "--")}
    deepspeed = {"DeepSpeed, compressed": ("DeepSpeed", 0, THIRD, ":")}
    all_reduces("performance-multi-gpu.svg", "several cards", {**handle, **NCCL, **deepspeed}, "Two NVIDIA H200 on NVLink, over NCCL 2.28 without NVLS")
    peers = {"GradCodec over peer memory": ("peers", 0, OURS, "-"), "GradCodec, in a graph": ("in a graph", 0, OURS, "--")}
    nccl = {"NCCL": ("NCCL", 0, OTHER, "-"), "NCCL, in a graph": ("in a graph", 2, OTHER, "--")}
    all_reduces("performance-peers.svg", "peer memory", {**peers, **nccl}, "Two NVIDIA H200 on NVLink, over memory that both GPUs reach; NCCL 2.28 without NVLS")
    if "<!-- all codecs -->" in (DOCS / "PERFORMANCE.md").read_text():
        codecs("performance-codecs.svg")
    training_step("performance-training.svg")
    seeds = "mean of three seeds, and lowest to highest"
    losses("losses-transformer.svg", "losses of the transformer", f"A transformer reads Python: {seeds}", 3.5)
    losses("losses-digits.svg", "losses of the digits", f"A convolutional network reads digits: {seeds}", 0.27)


if __name__ == "__main__":
    main()
