"""The memory of an all-reduce over nodes, measured as address space, against the table in docs/CHOOSING.md."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

import gradcodec  # noqa: E402
from capi import in_threads  # noqa: E402
from tiers import TIER  # noqa: E402

SHAPES = [(2, 2), (4, 2), (2, 8)]  # nodes, ranks of each
PAYLOADS = {"int8": 1.03125, "int4": 0.5625, "onebit": 0.125}  # bytes per element, as the page has them
VALUES = {"float32": 4, "float16": 2}
ERRORS = {"none": 0, "float32": 1, "transactional": 2}  # copies of errors
CASES = [*itertools.product(SHAPES, PAYLOADS, VALUES, ERRORS)][:: 5 if TIER == "quick" else 1]
PEERS = "peer memory within the node, of the largest handle"


def table():
    """Returns the head of the page's table, and its rows by their first cell."""
    lines = (ROOT / "docs/CHOOSING.md").read_text(encoding="utf-8").splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("| memory of a handle |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:][: lines[first:].index("")]]
    return rows[0], {row[0]: row[1:] for row in rows[2:]}


def of_formula(formula, nodes, ranks, value, payload):
    """Returns the value of a formula of the page: numbers and letters beside each other are multiplied."""
    text = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    return eval(text, {"N": nodes, "R": ranks, "v": value, "p": payload})  # noqa: S307 the page is ours


def said(shape, codec, values, errors):
    """Returns the bytes per element of a handle, by the page."""
    _, rows = table()
    of_errors, *others = [formula for name, (formula, *_) in rows.items() if name != PEERS]
    numbers = *shape, VALUES[values], PAYLOADS[codec]
    return ERRORS[errors] * of_formula(of_errors, *numbers) + sum(of_formula(each, *numbers) for each in others)


def address_space():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def measure(shape, codec, values, errors):
    """Returns the bytes per element of a handle, measured."""
    (nodes, ranks), library, size = shape, gradcodec.GradCodec(), shape[0] * shape[1]
    intra, inter = [library.group(ranks) for _ in range(nodes)], [library.group(nodes) for _ in range(ranks)]
    parts = [(intra[rank // ranks][rank % ranks], inter[rank % ranks][rank // ranks]) for rank in range(size)]
    comms = in_threads(size, lambda rank: library.hierarchical(*parts[rank]))
    options = {"error": "none"} if errors == "none" else {"error": "float32"}
    options |= {"nonfinite": "transactional"} if errors == "transactional" else {}
    for one in in_threads(size, lambda rank: comms[rank].allreduce(codec, [1000], values=values, **options)):
        one.close()  # the memory of threads is allocated from now on
    n = 2**26 // size
    before = address_space()
    handles = in_threads(size, lambda rank: comms[rank].allreduce(codec, [n], values=values, **options))
    taken = address_space() - before
    for one in (*handles, *comms, *itertools.chain(*intra, *inter)):
        one.close()
    return taken / n / size


def test_a_handle_uses_the_memory_of_the_page():
    # Large blocks get mappings of their own, so that none reuses freed memory.
    about = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run([sys.executable, __file__], env=about, capture_output=True, text=True, check=True)
    for case, found in zip(CASES, json.loads(done.stdout), strict=True):
        assert found == pytest.approx(said(*case), abs=0.05), case


def test_the_examples_of_the_page_match_its_formulas():
    header, rows = table()
    assert header[2:] == ["2 nodes of 2, float32, INT8", "2 nodes of 8, float32, INT8"]
    for name, (formula, *examples) in rows.items():
        for ranks, example in zip((2, 8), examples):
            expected = of_formula(formula.partition(",")[0], 2, ranks, 4, PAYLOADS["int8"])
            assert float(example) == pytest.approx(expected, abs=0.005), name


def test_peer_memory_is_the_size_of_values_and_at_most_17_mib():
    library, n = gradcodec.GradCodec(), 2**24
    for (nodes, ranks), codec, values, errors in CASES:
        error = "none" if errors == "none" else "float32"
        options = {"values": values, "error": error, "device": (gradcodec.CUDA, 0)}
        taken = library.allreduce_peers_bytes(codec, [n], ranks, nodes, **options) - 2 * VALUES[values] * n
        assert 0 <= taken <= 17 * 2**20 + 2**16, (nodes, ranks, codec, values)  # and headers


if __name__ == "__main__":
    threading.stack_size(1 << 18)
    print(json.dumps([measure(*case) for case in CASES]))
