"""The extension of docs/FRAMEWORKS.md, built as printed, with a package that is laid out as in the wheel."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

from torch_ops import ROOT, library


def wheel_at(folder):
    """Installs the package and its command as the wheel does; returns the command's folder."""
    package, commands = folder / "gradcodec", folder / "bin"
    for path in package / "lib", commands:
        path.mkdir(parents=True)
    shutil.copy(ROOT / "packaging" / "config.py", package / "_config.py")
    (package / "include").symlink_to(ROOT / "include")
    for name in "libgradcodec.so", "libgradcodec.so.0":
        (package / "lib" / name).symlink_to(library())
    command = commands / "gradcodec-config"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{package}/_config.py" "$@"\n')
    command.chmod(0o755)
    return commands


def test_the_extension_of_the_page_prints_the_lines_of_the_page(tmp_path):
    page = (ROOT / "docs" / "FRAMEWORKS.md").read_text()
    (section,) = re.findall(r"(?ms)^## A C\+\+ extension of PyTorch\n(.*?)(?=^## |\Z)", page)
    blocks = dict(re.findall(r"(?ms)^```(\w+)\n(.*?)^```", section))
    (tmp_path / "signs.cpp").write_text(blocks["cpp"])
    (tmp_path / "program.py").write_text(blocks["python"])
    folders = [wheel_at(tmp_path / "wheel"), pathlib.Path(sys.executable).parent, os.environ["PATH"]]
    own = {"PATH": os.pathsep.join(map(str, folders)), "TORCH_EXTENSIONS_DIR": str(tmp_path / "built")}
    environment = {**os.environ, **own}
    for name in "PYTHONPATH", "LD_LIBRARY_PATH", "GRADCODEC_LIBRARY":
        environment.pop(name, None)
    run = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, blocks["text"]), run.stdout + run.stderr
