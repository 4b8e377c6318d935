"""How a test is built and run, and what says that it has failed."""

from dataclasses import dataclass

LIBRARY = ("cargo", "build", "--quiet", "--locked", "--lib", "--profile", "fast")
# The library is there by then: nothing else is to build it.
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
    # The exit statuses that say that a test has failed.
    red: tuple
    # The file that it is in, and a word that is to stand there.
    file: str
    word: str = ""
    # What it prints when it found nothing to run.
    empty: str = ""
    limit: int = 300
    # With the fault nothing can be built, so that no other test can be either.
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
    """Tests of tests/spec on the CPU and on the stand-in driver."""
    return python(name, word, case, folder="tests/spec")


def python(name, word="", case="", library=True, fakes=True, limit=300, folder="tests/python"):
    """The tests of a file whose names have this word, or one case of them."""
    path = f"{folder}/{name}.py"
    chosen = " and ".join(part for part in (word, case) if part)
    return Test(
        f"{path} -k '{chosen}'" if chosen else path,
        (*([LIBRARY] if library else []), *([MAKE + FAKES] if library and fakes else [])),
        (PYTHON, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path, *(["-k", chosen] if chosen else [])),
        (1,), path, word, limit=limit,
    )  # fmt: skip


def does_not_build(goal, file, word):
    """Where two sides of a layout are held to each other when they are compiled."""
    # The library, which it is linked with, does not build either where the list of fields itself is wrong.
    return Test(f"make {goal} fails", (), ("sh", "-c", f"{' '.join(LIBRARY)} && {' '.join((*MAKE, goal))}"), (2, 101), file, word,
                stops_builds=True)  # fmt: skip


def script(path, *arguments):
    """A program in Python that needs no library."""
    return Test(" ".join((path, *arguments)), (), (PYTHON, path, *arguments), (1,), path)


def gpu(name):
    """On a machine with a GPU, whose python3 has what tests/spec wants: with kernels that are built anew."""
    path = f"tests/spec/{name}.py"
    run = ("python3", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path)
    if not name.startswith("test_"):  # compute-sanitizer, which runs that file
        run = ("bash", f"tests/spec/{name}.sh", "python3")
    return Test(path, (("build/kernel-venv/bin/python", "kernels/build.py"), LIBRARY), run, (1,), path, limit=900)
