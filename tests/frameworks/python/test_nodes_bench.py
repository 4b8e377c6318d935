"""Tests of bench/nodes.py: its measurements, its refusals, and that it leaves no networks behind."""

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
from gradcodec import _torch_native  # noqa: E402 after the check

PROGRAM = [sys.executable, str(ROOT / "bench/nodes.py"), "--width", "64", "--layers", "1", "--steps", "2"]
PATIENCE = 1200  # seconds after which a program counts as hanging; a busy machine takes minutes
# Most bytes of a codec, as a share of float32's, for two-shot and a small model whose vectors travel raw.
MOST = {"bf16 hook": 0.55, "bf16": 0.55, "mxfp8": 0.32, "int8": 0.32, "int4": 0.2, "mxfp4": 0.2, "onebit": 0.06}


def networks():
    """Returns the network namespaces and the interfaces, which a run could leave behind."""
    names = pathlib.Path("/run/netns")
    return sorted(os.listdir(names)) if names.exists() else [], sorted(os.listdir("/sys/class/net"))


@pytest.fixture(scope="module")
def allowed():
    """Skips if the machine has no means to make a network, or does not let this user make one."""
    done = subprocess.run([*PROGRAM, "--turns", "1", "--codecs", "bf16", "--gbit", "1", "--output", "/dev/null"],
                          capture_output=True, text=True, timeout=PATIENCE)  # fmt: skip
    if "want root" in done.stderr or "iproute2" in done.stderr:
        pytest.skip(done.stderr.strip())


def run(output, *options, **more):
    """Returns the results at 0.2 Gbit/s, and the process with the printed text."""
    before = networks()
    words = [*PROGRAM, "--turns", "2", "--gbit", "0.2", "--width", "256", "--output", str(output), *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, **more)
    assert networks() == before
    assert output.exists(), done.stdout + done.stderr
    return json.loads(output.read_text())["links"]["0.2"], done


def test_links_have_their_rate_and_codecs_send_their_bytes(allowed, tmp_path):
    link, done = run(tmp_path / "nodes.json", "--nodes", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert 0 < link["held"] < 1, "a veth without a rate has several times as much"
    sent = {name: statistics.median(one["bytes"]) for name, one in link["found"].items()}
    assert {name for name, each in sent.items() if each > MOST.get(name, 1) * sent["float32"]} == set()
    parameters = link["found"]["float32"]["parameters"]
    assert sent["float32"] > 2 * 2 / 3 * 4 * parameters  # a ring, and headers
    assert sent["no exchange"] < sent["onebit"]
    assert {len(one["seconds"]) for one in link["found"].values()} == {2}
    assert all(f"| {name} | " in done.stdout for name in sent)


def test_one_node_needs_no_network_and_runs_both_hooks(tmp_path):
    output = tmp_path / "nodes.json"
    words = ["--nodes", "1", "--ranks", "2", "--gbit", "0", "--turns", "2", "--hooks", "1", "--output", str(output)]
    _torch_native.built()  # the compiler's time, of minutes on a busy machine, is not the program's
    done = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, env={**os.environ, "PATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())["links"]["0"]["found"]
    hooks = [f"int8 {language} {mib} MiB" for language in ("Python", "C++") for mib in (0, 1)]
    assert list(found) == ["no exchange", "float32", "bf16 hook", *hooks]
    assert {(len(one["seconds"]), *one["bytes"]) for one in found.values()} == {(2, 0, 0)}


def test_a_killed_run_leaves_nothing(allowed):
    before = networks()
    endless = [*PROGRAM, "--turns", "100000", "--gbit", "1"]
    run = subprocess.Popen(endless, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert run.stdout.readline().startswith(b"2 nodes x 1 ranks")
        run.kill()
        run.communicate(timeout=PATIENCE)  # returns when the last process of the run has ended
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert networks() == before


def test_a_machine_without_the_tools_gets_an_error_message(tmp_path):
    for name in "unshare", "mount", "ip", "tc", "nsenter":
        (tmp_path / name).write_text("#!/bin/sh\necho not allowed >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    alone = {**os.environ, "PATH": str(tmp_path)}
    for words in "want root, or a kernel that lets users make them: not allowed", "there is no tc here; ip and tc are in":
        done = subprocess.run(PROGRAM, env=alone, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr
        (tmp_path / "tc").unlink(missing_ok=True)


def test_training_over_slow_links_is_measured(allowed, tmp_path):
    """Runs bench/diloco.py: the links must have their rate, and every contender its times and its losses."""
    before = networks()
    sizes = ["--width", "128", "--layers", "2", "--steps", "2", "--exchanges", "2", "--gbit", "0.1", "--size", "tiny"]
    sizes += ["--train", "4", "--sync-every", "2", "--seeds", "1", "--output", str(tmp_path / "diloco.json")]
    words = [sys.executable, str(ROOT / "bench/diloco.py"), *sizes]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert networks() == before
    found = json.loads((tmp_path / "diloco.json").read_text())
    names = {"DDP float32", "DDP INT8", *(f"DiLoCo {each}" for each in ("float32", "INT8"))}
    names |= {"DiLoCo INT4, errors kept", "DiLoCo INT4, no errors"}
    assert set(found["losses"]) == set(found["links"]["0.1"]) == names
    assert all(len(of) == 1 and 4 < of[0] < 6 for of in found["losses"].values())
    for name, its in found["links"]["0.1"].items():
        assert len(its["steps"]) == 2 and len(its.get("exchanges", [0, 0])) == 2
        assert its["bytes"] > (0.5 if "INT4" in name else 1 if "INT8" in name else 4) * its["parameters"]
        least = 4 * its["parameters"] * 8 / 0.1e9  # seconds for a rank's float32 in one direction; part passes at once
        assert name not in ("DDP float32", "DiLoCo float32") or min(its.get("exchanges", its["steps"])) > least / 2
