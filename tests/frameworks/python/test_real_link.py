"""bench/real_link.py: what it measures, what it refuses, and that nothing is left of its networks."""

import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys

import pytest
from peers import ROOT

pytest.importorskip("torch")
PROGRAM = [sys.executable, str(ROOT / "bench/real_link.py"), "--width", "64", "--layers", "1", "--steps", "2"]
# Of float32's bytes in a small model, whose vectors travel as they are: at most, where there are two exchanges.
MOST = {"bf16": 0.55, "mxfp8": 0.32, "int8": 0.32, "int4": 0.2, "mxfp4": 0.2, "onebit": 0.06}


def networks():
    """What a run could leave behind: names of network namespaces, and interfaces."""
    names = pathlib.Path("/run/netns")
    return sorted(os.listdir(names)) if names.exists() else [], sorted(os.listdir("/sys/class/net"))


@pytest.fixture(scope="module")
def allowed():
    """Skips where the machine has no means, or does not let this user make a network."""
    done = subprocess.run([*PROGRAM, "--turns", "1", "--codecs", "bf16", "--gbit", "1", "--output", "/dev/null"],
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    if "want root" in done.stderr or "iproute2" in done.stderr:
        pytest.skip(done.stderr.strip())


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_links_have_their_rate_and_every_codec_sends_its_bytes(allowed, ranks, tmp_path):
    before, output = networks(), tmp_path / "real_link.json"
    options = ["--turns", "2", "--ranks", str(ranks), "--gbit", "0.2", "--width", "256", "--output", str(output)]
    done = subprocess.run([*PROGRAM, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert networks() == before
    link = json.loads(output.read_text())["links"]["0.2"]
    assert 0 < link["held"] < 1, "a veth without a rate has several times as much"
    sent = {name: statistics.median(one["bytes"]) for name, one in link["found"].items()}
    assert {name for name, each in sent.items() if each > MOST.get(name, 1) * sent["float32"]} == set()
    assert sent["float32"] > 2 * (ranks - 1) / ranks * 4 * link["parameters"]  # a ring, and headers
    assert sent["no exchange"] < sent["onebit"]
    assert {len(one["seconds"]) for one in link["found"].values()} == {4}
    assert all(f"| {name} | " in done.stdout for name in sent)


def test_nothing_is_left_of_a_run_that_is_killed(allowed):
    before = networks()
    endless = [*PROGRAM, "--turns", "100000", "--gbit", "1"]
    run = subprocess.Popen(endless, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert run.stdout.readline().startswith(b"2 ranks")
        run.kill()
        run.communicate(timeout=60)  # which the last process of the run ends
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert networks() == before


@pytest.mark.parametrize(
    "options, words",
    [
        (["--ranks", "5"], "argument --ranks: invalid choice: 5"),
        (["--gbit", "0"], "--gbit: rates from 0.001 to 100 expected, got 0.0"),
        (["--delay", "-1"], "--delay: 0 or more expected, got -1"),
        (["--width", "200"], "--width: a multiple of 64, or a number that its heads divide, expected, got 200"),
        (["--turns", "-1"], "--turns: 1 or more expected, got -1"),
        (["--codecs", "int5"], "argument --codecs: invalid choice: 'int5'"),
        (["--library", "/none"], "--library: there is no /none"),
    ],
)
def test_what_is_refused_is_said(options, words):
    done = subprocess.run([*PROGRAM, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize(
    "programs, words",
    [
        ({"unshare": 0, "mount": 0, "ip": 0}, "there is no tc here; ip and tc are in the package iproute2"),
        ({"unshare": 1, "mount": 0, "ip": 0, "tc": 0}, "want root, or a kernel that lets users make them: not allowed"),
    ],
)
def test_a_machine_without_the_means_is_told_in_a_sentence(programs, words, tmp_path):
    for name, status in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho not allowed >&2\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    alone = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(PROGRAM, env=alone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr
