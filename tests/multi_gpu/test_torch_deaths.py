"""Tests gradcodec.torch.compress() over two nodes of two GPUs, of which one rank ends or stops: the others raise within
the timeout. This file is also the program of a rank."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

TIMEOUT = 10  # seconds for an exchange
LOST, AT_STEP, STEPS = 3, 4, 8
RAISED = 7  # exit status of a rank whose step raised GradCodecError


@pytest.mark.parametrize("how", ["ends", "stops"])
def test_a_lost_rank_is_reported_to_the_others(pytestconfig, tmp_path, how):
    if pytestconfig.gpus < 4:
        pytest.skip(f"four GPUs needed, {pytestconfig.gpus} found")
    ranks = [
        subprocess.Popen([sys.executable, __file__, how, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(4)
    ]
    try:
        others = [process.communicate(timeout=120)[1].decode() for process in ranks[:LOST]]
        assert [process.returncode for process in ranks[:LOST]] == [RAISED] * 3, "\n".join(others)
    finally:
        for process in ranks:
            process.kill()


def rank_main(how, rank, store):
    node = f"node{rank // 2}"
    os.environ |= {"GRADCODEC_NODE": node, "NCCL_HOSTID": node, "NCCL_NET": "Socket", "NCCL_NVLS_ENABLE": "0"}
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
    import torch
    import torch.distributed as dist
    from gradcodec import GradCodecError
    from gradcodec.torch import compress

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": 4, "device_id": device}
    dist.init_process_group("cpu:gloo,cuda:nccl", **where)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    compression = compress(ddp, "int8", timeout=TIMEOUT)
    assert len(compression.topology_ranks) == 2, compression.topology
    given = torch.randn(64, 1024, device=device)
    for step in range(STEPS):
        if (rank, step) == (LOST, AT_STEP):
            os._exit(1) if how == "ends" else os.kill(os.getpid(), signal.SIGSTOP)
        began = time.monotonic()
        try:
            ddp(given).square().mean().backward()
        except GradCodecError as failure:
            print(f"rank {rank}, step {step}: {failure}", file=sys.stderr, flush=True)
            os._exit(RAISED)
        torch.cuda.synchronize()
        print(f"rank {rank}, step {step}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    os._exit(0)


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
