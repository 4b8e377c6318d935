"""Checks the files of `make install` and of the wheel: beside the source tree no other test notices a missing file."""

import os
import re
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
HEADERS = ["gradcodec.h", "gradcodec.cdef.h"] + [
    f"gradcodec/{name}" for name in (
        "c10d.hpp", "device.cuh", "dlpack.h", "gradcodec.hpp", "loader.h", "mpi.h", "torch.hpp",
    )
]  # fmt: skip
IN_LIB = ["cmake/gradcodec/gradcodec-config.cmake", "cmake/gradcodec/gradcodec-config-version.cmake", "pkgconfig/gradcodec.pc"]
NOTICES = ["LICENSE", "LICENSE-APACHE", "THIRD-PARTY-NOTICES"]
PACKAGE = sorted(path.name for path in (ROOT / "python/gradcodec").iterdir() if path.is_file())
DOCUMENTS = [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
IN_DOC = [*NOTICES, "CHANGELOG.md", "SECURITY.md", "kernels.md", *DOCUMENTS]
EXAMPLES = [
    str(path.relative_to(ROOT))
    for folder in ROOT.glob("examples*")
    for path in folder.rglob("*")
    if path.is_file() and not {"__pycache__", "target"} & set(path.relative_to(ROOT).parts)
]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed") / "prefix"
    library = os.path.relpath(Path(os.environ["GRADCODEC_LIBRARY"]).resolve().parent, ROOT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--silent", "-C", ROOT, "CARGO=true", f"LIB={library}", "install", f"PREFIX={folder}"]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return folder


def test_the_headers_match_the_list():
    found = sorted(str(path.relative_to(ROOT / "include")) for path in (ROOT / "include").rglob("*") if path.is_file())
    assert found == sorted(HEADERS)


def test_every_file_is_installed_and_no_other(prefix):
    found = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir()}
    expected = {
        *(f"include/{name}" for name in HEADERS),
        *(f"lib/{name}" for name in IN_LIB),
        *(f"lib/libgradcodec.so{end}" for end in ("", ".0", f".{VERSION}")),
        *(f"share/doc/gradcodec/{name}" for name in (*IN_DOC, *EXAMPLES)),
        *(f"share/gradcodec/python/gradcodec/{name}" for name in PACKAGE),
        "share/man/man7/gradcodec.7",
    }
    assert found == expected
    assert all((prefix / name).stat().st_size for name in found if not name.endswith(("__init__.py", "py.typed")))


def test_every_file_is_in_the_wheel_and_no_other(prefix, tmp_path, monkeypatch):
    spec = spec_from_file_location("wheel", ROOT / "packaging/wheel.py")
    wheel = module_from_spec(spec)
    spec.loader.exec_module(wheel)
    # The tree as it is, but for built files.
    for name in ("python", "packaging", "README.md", *NOTICES):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "build/package/x86_64").mkdir(parents=True)
    (tmp_path / "build/package/x86_64/prefix").symlink_to(prefix)
    monkeypatch.setattr(wheel, "ROOT", tmp_path)
    found = [name for name, _ in wheel.contents("x86_64", {"version": VERSION, "summary": ""})]
    info = f"gradcodec-{VERSION}"
    expected = {
        *(f"gradcodec/{name}" for name in (*PACKAGE, "_config.py")),
        *(f"gradcodec/include/{name}" for name in HEADERS),
        *(f"gradcodec/lib/{name}" for name in ("libgradcodec.so", "libgradcodec.so.0", *IN_LIB)),
        *(f"gradcodec/share/doc/gradcodec/{name}" for name in IN_DOC),
        f"{info}.data/data/share/man/man7/gradcodec.7",
        *(f"{info}.dist-info/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt")),
        *(f"{info}.dist-info/licenses/{name}" for name in NOTICES),
    }
    assert sorted(found) == sorted(expected)
    assert "py.typed" in PACKAGE
