"""fuzz/corpus: an archive of inputs for each fuzz target, which fuzz/run.sh unpacks before all else."""

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parents[2] / "fuzz"
pytestmark = pytest.mark.skipif(not FUZZ.exists(), reason="the tree of `make dist` has no fuzz targets")
# Fewest inputs of an archive: an archive with fewer is not the one that was minimized.
LEAST = {"descriptors": 1000, "kernels": 200, "model": 1000, "payloads": 20, "shares": 20}


def test_every_target_has_an_archive_and_run_sh_fuzzes_it():
    targets = re.findall(r'(?m)^path = "fuzz_targets/(\w+)\.rs"', (FUZZ / "Cargo.toml").read_text())
    assert sorted(targets) == sorted(LEAST) == sorted(path.name.split(".")[0] for path in (FUZZ / "corpus").iterdir())
    assert sorted(re.search(r'^targets="(.*)"', (FUZZ / "run.sh").read_text(), re.M)[1].split()) == sorted(targets)
    assert sum(path.stat().st_size for path in (FUZZ / "corpus").iterdir()) < 3_000_000


@pytest.mark.parametrize("target", LEAST)
def test_an_archive_has_inputs(target):
    with tarfile.open(FUZZ / f"corpus/{target}.tar.xz") as archive:
        files = [member for member in archive if member.isfile()]
    assert len(files) >= LEAST[target] and all(member.size <= 1024 for member in files)


def test_a_damaged_archive_is_named_before_anything_is_fuzzed(tmp_path):
    tree = tmp_path / "fuzz"
    shutil.copytree(FUZZ / "corpus", tree / "corpus")
    shutil.copy(FUZZ / "run.sh", tree)
    archive = tree / "corpus" / "model.tar.xz"
    data = archive.read_bytes()
    archive.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    done = subprocess.run(["bash", tree / "run.sh"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (1, "FAILED model: fuzz/corpus/model.tar.xz is damaged\n")
    assert len(list((tmp_path / "build/fuzz/descriptors/corpus").iterdir())) >= LEAST["descriptors"]
