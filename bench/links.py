"""A training step of 315 million weights on four GPUs, by link: build/bench/links.json and a table.

    python3 bench/links.py --library lib/libgradcodec.so.0 [--only "2 x 2" "4 x 1"]

Each part is a run of bench/nodes.py, in which the four GPUs stand for one, two or four nodes. `1 x 4` is one node of
four GPUs: over NVLink, and without peer access between GPUs. DistributedDataParallel is the default; FSDP2 shards over
all GPUs and HSDP within each node. A part that the JSON file has is not run again.
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
# What nodes.py is given. The first rate of each is not a slow one: more steps are taken there before those that count.
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


def ms(link, name):
    one = link["found"].get(name)
    return f"{1e3 * statistics.median(one['seconds']):.0f}" if one else "-"


def tables(parts):
    """One of DistributedDataParallel and one of the sharded models, with ms a step and MB that left node 0 in it."""
    heads = {
        "ddp": ["no exchange", "float32", "bf16 hook", "int8", "mxfp8", "int4"],
        "sharded": ["float32", "bf16 reduced", "int8", "int8, gather int8", "int4, gather int8"],
    }
    rows = {"ddp": [], "sharded": []}
    for part, about in parts.items():
        kind = "ddp" if about["wrap"] == "ddp" else "sharded"
        links = sorted(about["links"].items(), key=lambda link: -float(link[0]))
        for gbit, link in links:
            at = f", {gbit} Gbit/s" + (f" (TCP: {link['held']:.1f})" if link["held"] else "") if float(gbit) else ""
            rows[kind].append([part + at, *(ms(link, name) for name in heads[kind])])
        last = links[-1][1]["found"]
        if about["nodes"] > 1:
            left = (f"{statistics.median(last[name]['bytes']) / 1e6:.0f}" for name in heads[kind])
            rows[kind].append([f"{part}, MB out of a node", *left])
    return "\n\n".join(markdown(["nodes x GPUs, link; ms a step", *heads[kind]], rows[kind]) for kind in rows if rows[kind])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, help="of the library, if not the one that the package finds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build/bench/links.json")
    options = parser.parse_args()
    parts = json.loads(options.output.read_text()) if options.output.exists() else {}
    program = [sys.executable, str(ROOT / "bench/nodes.py"), "--device", "cuda", "--quick"]
    program += ["--library", str(options.library)] if options.library else []
    failed = False
    for part in options.only:
        if part in parts:
            continue
        words = PARTS[part] if "--wrap" in PARTS[part] else [*PARTS[part], *CODECS]
        with tempfile.TemporaryDirectory() as folder:
            to = pathlib.Path(folder) / "nodes.json"
            done = subprocess.run([*program, *words, "--output", str(to)])
            failed |= done.returncode != 0
            if to.exists():
                parts[part] = json.loads(to.read_text())
                save(options.output, parts)
    print(f"\n{tables(parts)}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
