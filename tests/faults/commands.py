"""Build and run commands of each test, and its results that count as a failure."""

from dataclasses import dataclass

LIBRARY = ("cargo", "build", "--quiet", "--locked", "--lib", "--profile", "fast")
# The library exists when make runs, so make must not build another one.
MAKE = ("make", "--silent", "CARGO=true", "LIB=target/fast", "TEST_LIB=target/fast")
FAKES = tuple(f"build/tests/{name}" for name in (
    "driver/libcuda.so.1", "old_driver/libcuda.so.1", "driver/libnccl.so.2", "old_nccl/libnccl.so.2",
    "fake_nvrtc/libnvrtc.so.12", "old_nvrtc/libnvrtc.so.12", "nvrtc_gcc/libnvrtc.so.12", "driver/functions.so",
))  # fmt: skip
PYTHON = "build/venv/bin/python"


@dataclass(frozen=True)
class Test:
    said: str
    builds: tuple
    runs: tuple
    # Exit statuses of a failed test.
    red: tuple
    # File of the test, and a word that this file must contain.
    file: str
    word: str = ""
    # Pattern of the output if no test was found.
    empty: str = ""
    limit: int = 300
    # True if the fault breaks the build, so that no other test can be built.
    stops_builds: bool = False

    def __str__(self):
        return self.said

    def missing(self, root):
        path = root / self.file
        if not path.exists():
            return [f"there is no {self.file}"]
        if self.word and self.word not in path.read_text():
            return [f"{self.file} has no {self.word}"]
        return []


def spec(name, word="", case="cuda"):
    """Returns tests of tests/spec on the CPU and on the stand-in driver."""
    return python(name, word, case, folder="tests/spec")


def python(name, word="", case="", library=True, fakes=True, limit=300, folder="tests/python"):
    """Returns the tests of a file whose names have this word, or one case of them."""
    path = f"{folder}/{name}.py"
    chosen = " and ".join(part for part in (word, case) if part)
    return Test(
        f"{path} -k '{chosen}'" if chosen else path,
        (*([LIBRARY] if library else []), *([MAKE + FAKES] if library and fakes else [])),
        (PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path, *(["-k", chosen] if chosen else [])),
        (1,), path, word, limit=limit,
    )  # fmt: skip


def does_not_build(goal, file, word):
    """Returns a test that fails if `goal` does not build: the compiler compares two declarations of a layout."""
    # If the list of fields itself is wrong, the library, with which the goal is linked, does not build either.
    return Test(f"make {goal} fails", (), ("sh", "-c", f"{' '.join(LIBRARY)} && {' '.join((*MAKE, goal))}"), (2, 101), file, word,
                stops_builds=True)  # fmt: skip


def script(path, *arguments):
    """Returns a test that is a Python program and needs no library."""
    return Test(" ".join((path, *arguments)), (), (PYTHON, path, *arguments), (1,), path)


def gpu(name):
    """Returns a test on a machine with a GPU, with newly built kernels. Its python3 has the packages of tests/spec."""
    path = f"tests/spec/{name}.py"
    run = ("python3", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path)
    if not name.startswith("test_"):  # sanitize.sh runs the file under compute-sanitizer
        run = ("bash", f"tests/spec/{name}.sh", "python3")
    return Test(path, (("build/kernel-venv/bin/python", "kernels/build.py"), LIBRARY), run, (1,), path, limit=900)
