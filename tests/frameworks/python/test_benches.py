"""bench/momentum.py with few steps: every way of compressing runs to its end, and the table has it."""

import json
import os
import subprocess
import sys

from peers import ROOT


def test_momentum_shows_each_way_and_leaves_out_the_step_with_an_inf():
    steps = ["--seeds", "1", "--steps", "52", "--library", os.environ["GRADCODEC_LIBRARY"]]
    command = [sys.executable, "-B", str(ROOT / "bench/momentum.py"), *steps]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((ROOT / "build/bench/momentum.json").read_text())["rows"]
    assert len(rows) == 15 and all(row["left_out"] == [int(row["overflow"] is not None)] for row in rows)
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    named = {line.split(" | ")[0].strip("| ") for line in table[1:]}
    assert len(table) == 6 and named == {row["compressed"] for row in rows}
    first = {row["compressed"]: row["losses"][0] for row in rows if row["rate"] == 0.05}
    assert all(abs(loss / first["float32"] - 1) < 0.1 for name, loss in first.items() if "INT" in name), first
