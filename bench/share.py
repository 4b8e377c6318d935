"""How long it takes to share 1 GiB of a GPU's memory: to send, to receive (map) and to release it. Nothing is copied.

    python3 bench/share.py --library lib/libgradcodec.so.0

Each kind of memory 20 times, between two processes (tests/spec/shares.py). Beside it stands how much less memory the GPU
has free while it is mapped, and what a copy of 1 GiB within the GPU would take at 4 TB/s. The samples go to a JSON file.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ["cuMemAlloc", "gc_tensor_empty", "torch", "torch, expandable"]


def two(source, library):
    """What both sides measured."""
    sockets, children = [socket.socketpair() for _ in range(2)], []
    for k, side in enumerate(("timed_sender", "timed_receiver")):
        numbers = [pair[k].fileno() for pair in sockets]
        command = [sys.executable, str(ROOT / "tests/spec/shares.py"), side, source, *map(str, numbers), "0"]
        environment = {**os.environ, "GRADCODEC_LIBRARY": str(library)}
        children.append(subprocess.Popen(command, pass_fds=numbers, stdout=subprocess.PIPE, env=environment))
    for pair in sockets:
        for end in pair:
            end.close()
    texts = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"{source}: a side has failed")
    return {name: value for text in texts for name, value in json.loads(text).items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/bench/share.json")
    arguments = parser.parse_args()
    results = [two(source, arguments.library.resolve()) for source in SOURCES]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"bytes": 1 << 30, "results": results}))
    print(f"{'1 GiB from':<20} {'parts':>5} {'send':>9} {'receive':>9} {'release':>9} {'taken':>9}")
    for result in results:
        times = [statistics.median(result[name][1:]) for name in ("send_s", "receive_s", "release_s")]
        print(
            f"{result['memory']:<20} {result['parts']:>5} "
            + " ".join(f"{1e3 * seconds:>6.2f} ms" for seconds in times)
            + f" {max(result['taken_bytes'][1:]) / 2**20:>5.0f} MiB"
        )
    print(f"a copy of it within the card, at 4 TB/s: {2e3 * 2**30 / 4e12:.2f} ms, and 1024 MiB")


if __name__ == "__main__":
    main()
