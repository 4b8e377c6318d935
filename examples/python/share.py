"""Shares a tensor between two processes. On the CPU, with NumPy, the other process gets a copy. On CUDA nothing is
copied: PyTorch in one process and CuPy in the other see each other's writes.

    PYTHONPATH=python python3 examples/python/share.py
"""

import socket
import subprocess
import sys

import numpy as np
from gradcodec import CPU, CUDA, GradCodec

COUNT, PATIENCE = 1_000_000, 60_000  # milliseconds, enough for a process that is still importing


def child(number, device_type):
    """Runs in the other process: doubles the received tensor."""
    with socket.socket(fileno=number) as end:
        received = GradCodec().share_receive(number, (device_type, 0), PATIENCE)
        if device_type == CUDA:
            import cupy as xp
        else:
            xp = np
        array = xp.from_dlpack(received)
        total = float(array.sum())
        array *= 2
        if device_type == CUDA:
            xp.cuda.runtime.deviceSynchronize()
        print(f"{xp.__name__} there: {array.size} elements, their sum {total:.0f}; doubled", flush=True)
        end.sendall(b"!")
        del array, received  # ends the sender's share.wait()


def frameworks():
    """Returns torch if both processes can work on a GPU, or None."""
    try:
        import cupy  # noqa: F401 the other process needs it
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def show(gradcodec, torch=None):
    array = torch.ones(COUNT, device="cuda") if torch else np.ones(COUNT, np.float32)
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno()), str(CUDA if torch else CPU)]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process, ours:
        theirs.close()
        share = gradcodec.share_send(array, ours.fileno(), 0, PATIENCE)
        assert ours.recv(1) == b"!", "the other process has failed"
        share.wait(PATIENCE)  # until the other process releases it; the array must stay alive until then
        now = float(array.sum())
    print(f"{'torch' if torch else 'numpy'} here: their sum is now {now:.0f}")
    assert now == (2 * COUNT if torch else COUNT) and process.returncode == 0


def main():
    gradcodec, torch = GradCodec(), frameworks()
    show(gradcodec)
    if torch:
        show(gradcodec, torch)
    else:
        print("SKIPPED: no GPU with PyTorch and CuPy here, so CUDA was not shown")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
