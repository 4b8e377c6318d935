"""Plants each fault of faults.py in a copy of the tree, and requires that the tests which it names fail.

    run.py                    all faults of the tiers quick and all, those of quick first
    run.py --tier quick       one tier; --only NAME..., --kind KIND: some of them
    run.py --together 5       5 faults in one build, which is faster; one may then fail another's test
    run.py --check            plants no fault: checks that each fault applies and that its tests exist. Takes a second.
    run.py --list             prints the table and runs nothing

Works in build/faults: the copy, its build and a log for each fault stay there, so that a second run builds little.
A test has noticed a fault if it fails, crashes or hangs. A test that cannot be built or finds nothing to run has not.
"""

import argparse
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build/faults"
TREE = WORK / "tree"
TIERS = "quick", "all", "gpu"


class Wrong(Exception):
    """Raised for a fault that does not apply, a build that fails, or a test that fails before a fault is planted."""


def planted(fault, text):
    count = text.count(fault.old)
    if count != 1:
        raise Wrong(f"{fault.name}: {fault.path} has {fault.old!r} {count} times; once expected")
    if fault.old == fault.new:
        raise Wrong(f"{fault.name}: changes nothing")
    return text.replace(fault.old, fault.new)


def check():
    """Returns the errors of the list, as sentences."""
    found = []
    for fault in FAULTS:
        path = ROOT / fault.path
        if not path.is_file():
            found.append(f"{fault.name}: there is no {fault.path}")
            continue
        try:
            planted(fault, path.read_text())
        except Wrong as wrong:
            found.append(str(wrong))
        if fault.tier not in TIERS:
            found.append(f"{fault.name}: tier {fault.tier}; one of {', '.join(TIERS)} expected")
        for test in fault.tests:
            found += [f"{fault.name}: {why}" for why in test.missing(ROOT)]
    names = [fault.name for fault in FAULTS]
    found += [f"{name}: a name of several faults" for name in sorted({name for name in names if names.count(name) > 1})]
    return found


def copy_tree():
    """Updates the copy. Unchanged files keep their time, so that little is built again."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    names = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        source, target = ROOT / name, TREE / name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        target.chmod(source.stat().st_mode)
    for folder, folders, files in os.walk(TREE):
        here = Path(folder)
        if here == TREE:
            folders[:] = [name for name in folders if name not in ("build", "target")]
        for name in files:
            if str((here / name).relative_to(TREE)) not in names:
                (here / name).unlink()
    (TREE / "build").mkdir(exist_ok=True)
    for name in "venv", "kernel-venv":
        link = TREE / "build" / name
        if not link.exists():
            link.symlink_to(ROOT / "build" / name)


def environment(tier):
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("GRADCODEC_", "MAKE"))},
        "GRADCODEC_LIBRARY": str(TREE / "target/fast/libgradcodec.so"),
        "GRADCODEC_DRIVERS": str(TREE / "build/tests"),
        "GRADCODEC_TESTS": "quick" if tier == "quick" else "all",
        "GRADCODEC_CACHE": "0",
        "CARGO_TERM_COLOR": "never",
        "RUST_BACKTRACE": "0",
    }


def command(arguments, tier, log, limit):
    """Runs the command in the copy. Returns its exit status, or None if it took too long."""
    with open(log, "ab") as out:
        out.write(f"$ {' '.join(map(str, arguments))}\n".encode())
        out.flush()
        process = subprocess.Popen(
            list(map(str, arguments)), cwd=TREE, env=environment(tier), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            try:  # ends the command's children, too
                os.killpg(process.pid, 9)
            except ProcessLookupError:
                pass
            process.wait()


def build(test, tier, log):
    for arguments in test.builds:
        if command(arguments, tier, log, 1800) != 0:
            raise Wrong(f"cannot be built: {' '.join(map(str, arguments))}: see {log}")


def is_red(test, tier, log):
    """Returns how the test notices a fault: "hangs", "crashes", "fails", or "" if it does not."""
    status = command(test.runs, tier, log, test.limit)
    text = log.read_text(errors="replace")
    text = text[text.rindex("\n$ " if "\n$ " in text else "$ ") :]
    if status is None:
        return "hangs"
    if status == 0:
        if test.empty and re.search(test.empty, text) and not re.search(r"[1-9]\d* passed", text):
            raise Wrong(f"no test ran: {test}")
        return ""
    if status < 0 or status > 128:
        return "crashes"
    if status in test.red:
        return "fails"
    raise Wrong(f"exit status {status} is no failure of a test: {test}: see {log}")


def run(faults, together):
    (WORK / "logs").mkdir(parents=True, exist_ok=True)
    lock = os.open(WORK / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another run is at work in {WORK}")
        return False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the command, and removes the faults
    copy_tree()
    logs = {fault: WORK / "logs" / f"{fault.name.replace(' ', '_').replace('/', '_')}.log" for fault in faults}
    lost, seen, begun = [], 0, time.monotonic()
    green = all_green(faults, logs, lost)
    for group in groups([fault for fault in faults if green.issuperset(fault.tests)], together):
        texts = {}
        try:
            for fault in group:
                texts.setdefault(TREE / fault.path, (TREE / fault.path).read_text())
                (TREE / fault.path).write_text(planted(fault, texts[TREE / fault.path]))
            for fault in group:
                for test in fault.tests:
                    built = time.monotonic()
                    build(test, fault.tier, logs[fault])
                    ran = time.monotonic()
                    how, seconds = is_red(test, fault.tier, logs[fault]), time.monotonic() - ran
                    print(f"{fault.name:<56} {fault.kind:<26} {fault.tier:<5} {how or 'NOT SEEN':<8} "
                          f"{ran - built:4.0f} + {seconds:3.0f} s  {test}", flush=True)  # fmt: skip
                    seen += bool(how)
                    lost += [] if how else [f"{fault.name}: not seen by {test}"]
        except Wrong as wrong:
            print(f"FAILED: {wrong}", flush=True)
            lost.append(f"{', '.join(fault.name for fault in group)}: {wrong}")
        finally:
            for path, text in texts.items():
                path.write_text(text)
    print(f"{len(faults)} faults, {seen} times seen, {time.monotonic() - begun:.0f} s")
    for one in lost:
        print(f"FAILED: {one}")
    return not lost


def all_green(faults, logs, lost):
    """Returns the tests that pass before a fault is planted."""
    green, red = set(), set()
    for fault in faults:
        logs[fault].unlink(missing_ok=True)
        for test in fault.tests:
            if test in green or test in red:
                continue
            try:
                build(test, fault.tier, logs[fault])
                if is_red(test, fault.tier, logs[fault]):
                    raise Wrong(f"red without a fault: {test}: see {logs[fault]}")
                green.add(test)
            except Wrong as wrong:
                print(f"FAILED: {wrong}", flush=True)
                lost.append(f"{fault.name}: {wrong}")
                red.add(test)
    return green


def groups(faults, together):
    """Yields groups of at most `together` faults for one build. Their files differ, and so do the files of their tests.
    A fault that breaks the build is alone."""
    left = list(faults)
    while left:
        group = [left.pop(0)]
        for fault in list(left):
            if any(test.stops_builds for one in (group[0], fault) for test in one.tests):
                continue
            paths, tests = {one.path for one in group}, {test.file for one in group for test in one.tests}
            if len(group) < together and fault.path not in paths and not tests & {test.file for test in fault.tests}:
                group.append(fault)
                left.remove(fault)
        yield group


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=TIERS, action="append")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--kind")
    parser.add_argument("--together", type=int, default=1, metavar="N")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    wrong = check()
    if wrong or arguments.check:
        print("\n".join(wrong) or f"{len(FAULTS)} faults apply")
        return not wrong
    tiers = arguments.tier or ([] if arguments.only else ["quick", "all"])
    chosen = [
        fault for fault in FAULTS
        if (not tiers or fault.tier in tiers)
        and (not arguments.only or any(name in fault.name for name in arguments.only))
        and arguments.kind in (None, fault.kind)
    ]  # fmt: skip
    chosen.sort(key=lambda fault: TIERS.index(fault.tier))
    if not chosen:
        print("no such fault")
        return False
    if arguments.list:
        for fault in chosen:
            print(f"{fault.name:<56} {fault.kind:<26} {fault.tier:<5} {fault.path:<40} {'; '.join(map(str, fault.tests))}")
        return True
    return run(chosen, arguments.together)


if __name__ == "__main__":
    sys.exit(not main())
