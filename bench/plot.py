"""Draws the pictures of docs/ from the tables in PERFORMANCE.md: `make plot`. Needs no package."""

import math
import re

import when
from when import DOCS, FULL, size, table_of

COLORS = ["#0b6e4f", "#c1440e", "#2d5da1", "#8a5a9e", "#777777", "#b08900", "#222222"]
DARK_COLORS = ["#4cc39b", "#ff8a5c", "#82b1f2", "#c99add", "#aaaaaa", "#e0bd4a", "#dddddd"]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 70, 150, 40, 50


def style():
    """Returns the colors, on a white page and on a dark one."""

    def rules(page, text, grid, level, colors):
        rules = [f"rect{{fill:{page}}}text{{fill:{text}}}.grid{{stroke:{grid}}}.level{{stroke:{level}}}"]
        rules += [f".line{k}{{stroke:{color}}}.mark{k}{{fill:{color}}}" for k, color in enumerate(colors)]
        return "".join(rules)

    light = rules("#fff", "#000", "#ddd", "#333", COLORS)
    dark = rules("#131416", "#ddd", "#3a3d42", "#bbb", DARK_COLORS)
    return f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"


def chart(title, x_label, y_label, lines, x_ticks, y_ticks, level=None):
    """Returns an SVG of lines {name: [(x, y)]} on logarithmic axes, named at their ends. `level`: a horizontal line."""
    (x0, x1), (y0, y1) = (x_ticks[0][0], x_ticks[-1][0]), (y_ticks[0][0], y_ticks[-1][0])
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x, y):
        return (
            round(LEFT + wide * math.log(x / x0) / math.log(x1 / x0), 1),
            round(HEIGHT - BOTTOM - high * math.log(min(max(y, y0), y1) / y0) / math.log(y1 / y0), 1),
        )

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f"<title>{title}</title>",
        style(),
        f'<rect width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{title}</text>',
    ]
    for x, name in x_ticks:
        place = at(x, y0)[0]
        out.append(f'<path d="M{place} {TOP}V{HEIGHT - BOTTOM}" class="grid"/>')
        out.append(f'<text x="{place}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{name}</text>')
    for y, name in y_ticks:
        place = at(x0, y)[1]
        out.append(f'<path d="M{LEFT} {place}H{WIDTH - RIGHT}" class="grid"/>')
        out.append(f'<text x="{LEFT - 8}" y="{place + 4}" text-anchor="end">{name}</text>')
    if level:
        out.append(f'<path d="M{LEFT} {at(x0, level)[1]}H{WIDTH - RIGHT}" class="level" stroke-dasharray="4 3"/>')
    out.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 10}" text-anchor="middle">{x_label}</text>')
    out.append(f'<text transform="translate(16 {TOP + high / 2}) rotate(-90)" text-anchor="middle">{y_label}</text>')
    ends, last = {}, -math.inf
    for name in sorted(lines, key=lambda name: at(*lines[name][-1])[1]):  # names at line ends must not overlap
        last = ends[name] = max(at(*lines[name][-1])[1], last + 15)
    for k, (name, points) in enumerate(lines.items()):
        places = [at(*point) for point in points]
        path = "L".join(f"{x} {y}" for x, y in places)
        out.append(f'<path d="M{path}" fill="none" class="line{k}" stroke-width="2"/>')
        out += [f'<circle cx="{x}" cy="{y}" r="3" class="mark{k}"/>' for x, y in places] if len(places) < 20 else []
        out.append(f'<text x="{places[-1][0] + 8}" y="{ends[name] + 4}" class="mark{k}">{name}</text>')
    return "\n".join([*out, "</svg>", ""])


def powers(first, last, step=10):
    found = []
    while first <= last * 1.001:
        found.append((first, f"{first:,.12g}"))
        first *= step
    return found


def link():
    header, rows = table_of("PERFORMANCE.md", "nodes and link", "MXFP8")
    measured = {float(gbit[1]): row for row in rows if (gbit := re.match(r"2 nodes x 2 GPUs, ([\d.]+) Gbit/s", row[0]))}
    lines = {
        name: [(gbit, float(row[header.index(name)])) for gbit, row in sorted(measured.items())]
        for name in ("NCCL", "PyTorch's bf16 hook", "INT8", "INT4", "no exchange")
    }
    title = "A training step of 315 million weights, two nodes of two GPUs"
    return chart(title, "Gbit/s between nodes", "ms a step", lines, powers(1, 100), powers(16, 16384, 4))


def allreduce():
    header, rows = table_of("PERFORMANCE.md", "float32 in a graph, us")
    lines = {
        name: [(size(row[0]), float(row[header.index(name)].split()[0])) for row in rows]
        for name in ("NCCL", "bf16", "int8", "int4", "onebit", "int8 over NCCL")
    }
    x = [(n, name) for n, name in ((2**12, "4K"), (2**16, "64K"), (2**20, "1M"), (2**24, "16M"), (2**30, "1G"))]
    title = "All-reduce of float32 between two H200 on NVLink"
    return chart(title, "elements", "us a call", lines, x, powers(5, 20480, 4))


def factors():
    model = when.Model()
    rates = [10 ** (8 + 3.64 * k / 24) for k in range(25)]
    lines = {
        f"{codec}, {name}": [(rate / 1e9, model.factor(codec, n, 4, rate, "float32")) for rate in rates]
        for n, name in ((FULL, "300M"), (2**20, "1M"))
        for codec in when.SHOWN
    }
    title = "Speed over NCCL's float32 sum, four ranks, by the model"
    x, y = powers(0.1, 1000), powers(0.5, 32, 2)
    return chart(title, "GB/s each way for a rank", "times as fast", lines, x, y, level=1)


def main():
    for name, draw in {"link": link, "allreduce": allreduce, "when": factors}.items():
        path = DOCS / f"{name}.svg"
        path.write_text(draw())
        print(path)


if __name__ == "__main__":
    main()
