"""Training steps on GPUs, by link or by model: runs of bench/nodes.py, build/bench/links.json and a table.

    python3 bench/links.py --library lib/libgradcodec.so.0 [--only "2 x 2" "4 x 1"]
    python3 bench/links.py --library lib/libgradcodec.so.0 --only models [--hooks 25 100]

A model of 315 million weights is trained on four GPUs, which stand for one, two or four nodes. `1 x 4` is one node of
four GPUs: over NVLink, and without peer access between GPUs. DistributedDataParallel is the default; FSDP2 shards over
all GPUs and HSDP within each node. `models` are three models within one node, in float32 and in bfloat16: with few
sequences (`large`) the host takes longer to enqueue a step than the GPUs to compute it, with many (`busy`) the GPUs
take longer. A part that the JSON file has is not run again.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from common import ROOT, markdown, save

RATES = "10", "25", "50", "100"
# Arguments of nodes.py. The first rate of each is not a slow one, because more uncounted steps run there.
PARTS = {
    "1 x 4, NVLink": ["--nodes", "1", "--gbit", "0"],
    "1 x 4, no peer access": ["--nodes", "1", "--gbit", "0", "--no-peers"],
    "2 x 2": ["--gbit", *RATES, "5", "2.5", "1"],
    "4 x 1": ["--nodes", "4", "--gbit", *RATES],
    "2 x 2, bfloat16": ["--gbit", "10", "100", "--dtype", "bfloat16"],
    "2 x 2, FSDP2": ["--gbit", "10", "25", "--wrap", "fsdp2"],
    "2 x 2, HSDP": ["--gbit", "10", "25", "--wrap", "hsdp"],
}
CODECS = ["--codecs", "int8", "mxfp8", "int4"]  # of DistributedDataParallel
NODE = ["--nodes", "1", "--gbit", "0", "--steps", "5", "--turns", "7", "--codecs", "int8", "int4", "--dtype"]
SHAPES = {"small": ["--width", "384", "--layers", "6", "--batch", "8", "--places", "256"],
          "large": ["--batch", "8", "--places", "256"], "busy": ["--places", "256"]}  # fmt: skip
MODELS = {f"{name}, {dtype}": [*NODE, dtype, *shape] for name, shape in SHAPES.items() for dtype in ("float32", "bfloat16")}


def ms(link, name):
    one = link["found"].get(name)
    return f"{1e3 * statistics.median(one['seconds']):.1f}" if one else "-"


def tables(parts):
    """Returns tables of ms a step, with MB that left node 0: DistributedDataParallel by link, sharded models, and the
    models of a node."""
    kinds = {}
    for part, about in parts.items():
        kinds.setdefault(about["table"], {})[part] = about
    found = []
    for of_kind in kinds.values():
        names = dict.fromkeys(name for one in of_kind.values() for link in one["links"].values() for name in link["found"])
        rows = []
        for part, about in of_kind.items():
            links = sorted(about["links"].items(), key=lambda link: -float(link[0]))
            for gbit, link in links:
                at = f", {gbit} Gbit/s" + (f" (TCP: {link['held']:.1f})" if link["held"] else "") if float(gbit) else ""
                rows.append([part + at, *(ms(link, name) for name in names)])
            last = links[-1][1]["found"]
            if about["nodes"] > 1:
                left = (f"{statistics.median(last[name]['bytes']) / 1e6:.0f}" if name in last else "-" for name in names)
                rows.append([f"{part}, MB out of a node", *left])
        found.append(markdown(["ms a step", *names], rows))
    return "\n\n".join(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, help="of the library, if not the one that the package finds")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "models"], default=list(PARTS), metavar="PART")
    parser.add_argument("--hooks", nargs="*", metavar="MiB", help="as nodes.py takes it, of the models")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build/bench/links.json")
    options = parser.parse_args()
    parts = json.loads(options.output.read_text()) if options.output.exists() else {}
    program = [sys.executable, str(ROOT / "bench/nodes.py"), "--device", "cuda", "--quick"]
    program += ["--library", str(options.library)] if options.library else []
    # For each part the arguments of nodes.py, and the table that it is in.
    asked = {}
    for part, words in PARTS.items():
        if part in options.only:
            is_sharded = "--wrap" in words
            asked[part] = [*words, *([] if is_sharded else CODECS)], "sharded" if is_sharded else "links"
    if "models" in options.only:
        hooks = [] if options.hooks is None else ["--hooks", *options.hooks]
        table = " ".join(["models", *hooks])
        asked |= {" ".join([part, *hooks]): ([*words, *hooks], table) for part, words in MODELS.items()}
    failed = False
    for part, (words, table) in asked.items():
        if part in parts:
            continue
        with tempfile.TemporaryDirectory() as folder:
            to = pathlib.Path(folder) / "nodes.json"
            done = subprocess.run([*program, *words, "--output", str(to)])
            failed |= done.returncode != 0
            if done.returncode == 0:
                parts[part] = {**json.loads(to.read_text()), "table": table}
                save(options.output, parts)
    print(f"\n{tables(parts)}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
