"""bench/cpu.py, allreduce_perf.py, accuracy.py, convergence.py and ddp_hook.py on the CPU, to their end, with all rows."""

import json
import os
import subprocess
import sys

import pytest
from peers import ROOT

pytest.importorskip("torch")
from gradcodec import _torch_native  # noqa: E402 after the check

LIBRARY = os.environ["GRADCODEC_LIBRARY"]


def run(program, output, *more):
    """Returns the JSON and the printed text of a program, which must leave no temporary files."""
    temporary = output.parent / "temporary"
    temporary.mkdir()
    # DistributedDataParallel makes an empty folder for a compiler, and leaves it.
    environment = {**os.environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(output.parent / "compiled")}
    command = [sys.executable, str(ROOT / "bench" / program), "--library", LIBRARY, "--output", str(output), *more]
    # The timeout ends a program that hangs, and no other: a busy machine takes minutes.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(temporary.iterdir()), "the program left files"
    return json.loads(output.read_text()), done.stdout


def test_two_builds_alternate_on_the_cpu_and_their_ratios_are_printed(tmp_path):
    another = tmp_path / "libgradcodec.so.0"
    another.symlink_to(LIBRARY)
    results, text = run("cpu.py", tmp_path / "cpu.json", "--quick", "--only", "bits pack bool", "--against", str(another))
    assert len(results["rows"]) == 5
    names = {"new", "new x2", "new, old", "new x2, old"}
    assert all(set(row["seconds"]) == names for row in results["rows"])
    assert "rows below 0.90" in text and "bits: pack bool, 1M less 1 x2" in text


def test_all_reduces_are_measured_by_codec_and_dtype_on_every_rank(tmp_path):
    results, text = run("allreduce_perf.py", tmp_path / "all.json", "--device", "cpu", "-e", "1K", "--codecs", "int8", "onebit errors")
    assert [(row["elements"], row["dtype"]) for row in results["rows"]] == [(1024, "float32"), (1024, "bfloat16")]
    names = {"nccl", "int8 gloo", "onebit errors gloo"}
    for row in results["rows"]:
        assert set(row["seconds"]) == names and not row["failures"]
        assert {len(of["eager"]) for of in row["seconds"].values()} == {3}
    assert "eager: us a call (times NCCL)" in text


def test_every_kind_of_codec_learns(tmp_path):
    results, text = run("accuracy.py", tmp_path / "of.json", "--size", "tiny", "--device", "cpu", "--seeds", "1", "--only", "ranks=2")
    runs = results["results"]
    assert [one["codec"] for one in runs] == ["float32", "int8", "int4", "int4", "onebit", "sign"]
    assert all(4.5 < one["loss"] < 5.3 for one in runs), "an untrained model has a loss of ln(256), 5.5"
    assert all(one["bytes"] < 0.31 * runs[0]["bytes"] for one in runs if one["codec"] in ("int8", "int4", "sign"))
    assert "| lion | sign | none | 2 |" in text


def test_convergence_is_rehearsed_over_gloo_and_finished_runs_are_skipped(tmp_path):
    (tmp_path / "a.c").write_bytes(bytes(range(256)) * 1000)
    of = ["--of", str(tmp_path), "--text", str(tmp_path / "text")]
    subprocess.run([sys.executable, str(ROOT / "bench/convergence.py"), *of], check=True)
    options = ["--text", str(tmp_path / "text"), "--size", "tiny", "--device", "cpu", "--ranks", "2", "--only"]
    results, _ = run("convergence.py", tmp_path / "of.json", *options, "int8")
    (tmp_path / "temporary").rmdir()
    results, text = run("convergence.py", tmp_path / "of.json", *options, "int8", "FSDP2 int8, gather int8")
    assert [one["run"] for one in results["results"]] == ["int8", "FSDP2 int8, gather int8"]
    for one in results["results"]:
        assert one["curve"][0][2] > one["curve"][-1][2] > one["loss"] - 0.01 and one["taken_back"] == 0
    assert "int8, seed 0: loss" not in text.split("FSDP2")[0] and text.count("| int8 |") == 1


def test_hooks_in_both_languages_are_timed(tmp_path):
    _torch_native.built()  # the compiler's time, of minutes on a busy machine, is not the program's
    results, text = run("ddp_hook.py", tmp_path / "ddp_hook.json", "--quick", "--tensors", "10")
    assert len([name for name in results["seconds"] if name.endswith(", C++")]) == 6
    for name, seconds in results["seconds"].items():
        assert len(seconds) == 200 and name in text
