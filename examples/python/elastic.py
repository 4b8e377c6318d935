"""Training under torchrun that survives lost ranks: it resumes from the last checkpoint, with the saved errors.

    python3 examples/python/elastic.py

Four processes train on digits over gloo, on the CPU, with gradients at 4 bits. The first run is undisturbed. In the
second, a process is killed, and torchrun restarts all four. Then two nodes of two processes, here both on this machine,
sum gradients within each node first: one node is lost, and the other continues with two processes. With two GPUs, two
processes lose one over NCCL, and over peer memory. In your own worker, do what work(), save() and load() do.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("SKIPPED: no PyTorch here")
    raise SystemExit

from torch.nn.parallel import DistributedDataParallel

import gradcodec.torch

# BATCH is the size over all ranks, for any number of ranks. Training ends while the loss is still falling.
BATCH, STEPS, SAVED_EVERY, LOST_AT, RATE, MOMENTUM = 256, 60, 10, 25, 0.1, 0.9
DIGITS = pathlib.Path(__file__).resolve().parents[2] / "examples_c" / "data" / "digits.bin"


def digits():
    records = torch.frombuffer(bytearray(DIGITS.read_bytes()), dtype=torch.uint8).view(-1, 65)
    return records[:, :64] / 16, records[:, 64].long()


def save(folder, step, model, optimizer, compression):
    """Saves the errors of every rank. The checkpoint counts once `latest` names it, after all ranks have saved."""
    rank, of_step = dist.get_rank(), folder / f"{step}-{dist.get_world_size()}"
    of_step.mkdir(exist_ok=True)
    torch.save(compression.state_dict(), of_step / f"errors-{rank}.pt")
    if rank == 0:
        torch.save([model.module.state_dict(), optimizer.state_dict()], of_step / "model.pt")
    dist.barrier()
    if rank == 0:
        (folder / "new").write_text(of_step.name)
        (folder / "new").replace(folder / "latest")


def load(folder, model, optimizer, compression):
    """Loads the last checkpoint and returns its number of steps. If the number of ranks is the same, each loads its own
    errors. Otherwise each loads the errors of all, so that none are lost for any grouping into nodes."""
    if not (folder / "latest").exists():
        return 0
    of_step = folder / (folder / "latest").read_text()
    step, world = map(int, of_step.name.split("-"))
    of_model, of_optimizer = torch.load(of_step / "model.pt", map_location="cpu")
    model.module.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    mine = [dist.get_rank()] if world == dist.get_world_size() else range(world)
    errors = [torch.load(of_step / f"errors-{rank}.pt", map_location="cpu") for rank in mine]
    compression.load_state_dict(errors[0] if world == dist.get_world_size() else errors)
    return step


def work(folder, transport):
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if transport != "gloo":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if transport == "gloo" else "nccl")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    compression = gradcodec.torch.compress(model, "int4", raw=(), transport=transport)
    images, labels = (tensor.to(device) for tensor in digits())

    if dist.get_rank() == 0:
        print(f"topology {compression.topology}", flush=True)
    first = load(folder, model, optimizer, compression)
    for step in range(first, STEPS):
        of_step = torch.Generator().manual_seed(step)  # the same batches for any first step
        batch = torch.randint(len(images), (BATCH,), generator=of_step)[dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        if step == LOST_AT:
            fail()
        optimizer.step()
        if (step + 1) % SAVED_EVERY == 0:
            save(folder, step + 1, model, optimizer, compression)
            if dist.get_rank() == 0:
                with torch.no_grad():
                    loss = torch.nn.functional.cross_entropy(model.module(images), labels).item()
                print(f"ranks {dist.get_world_size()} step {step + 1} loss {loss:.9f}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of PyTorch may abort a process whose interpreter ends


# --- failures, and the processes that run work() ----------------------------------------------------------------------


def fail():
    """Kills one process, or all of a node and its torchrun, in the first run only."""
    lost, node, rank = os.environ["ELASTIC_LOST"], os.environ["ELASTIC_NODE"], dist.get_rank()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" or dist.get_world_size() != int(os.environ["ELASTIC_RANKS"]):
        return
    if lost == "a node" and node == "1":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if lost == "a process" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def trained(lost, nodes=1, ranks=4, transport="gloo"):
    """Trains with `ranks` ranks and kills `lost`. Returns for each step the number of ranks and the loss, and the
    topologies."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("localhost", 0)) as free:
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free.getsockname()[1]}"]
        started = []
        for node in range(nodes):
            # Accepts 1 to `nodes` nodes; with more than one, torchrun waits 10 s for the others.
            much = ["--nnodes", f"1:{nodes}", "--nproc-per-node", str(ranks // nodes), "--max-restarts", "3"]
            meet_at = ["--local-addr", "localhost", "--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=10"]
            command = [sys.executable, "-m", "torch.distributed.run", *much, *meet, *meet_at, __file__, folder, transport]
            about = {"ELASTIC_LOST": lost, "ELASTIC_NODE": str(node), "ELASTIC_RANKS": str(ranks)}
            about["GLOO_SOCKET_IFNAME"] = "lo"
            about["GRADCODEC_NODE"] = str(node)  # separate machines are recognized without it
            # Each node counts its own restarts, and ranks with different counts never find each other in torchrun's
            # shared store. A separate store of the workers does not use that count.
            about["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            with open(os.path.join(folder, f"node-{node}"), "w") as output:
                started.append(subprocess.Popen(command, env={**os.environ, **about}, stdout=output, stderr=output))
        statuses = [each.wait() for each in started]
        said = [pathlib.Path(folder, f"node-{node}").read_text() for node in range(nodes)]
        assert statuses == [0, -signal.SIGKILL][:nodes], (statuses, *said)
        lines = [line for text in said for line in text.splitlines()]
    topologies = [line.removeprefix("topology ") for line in lines if line.startswith("topology ")]
    losses = [line.split() for line in lines if line.startswith("ranks ")]
    return {int(step): (int(world), float(loss)) for _, world, _, step, _, loss in losses}, topologies


def without_a_process(ranks, transport):
    """Checks that losing a process does not change the losses; returns the loss of an undisturbed training."""
    undisturbed, _ = trained("nothing", ranks=ranks, transport=transport)
    last = undisturbed[STEPS][1]
    print(f"{transport}, {ranks} ranks: loss {last:.4f} after {STEPS} steps")
    again, _ = trained("a process", ranks=ranks, transport=transport)
    print(f"a process lost in step {LOST_AT + 1}: {again[STEPS][0]} ranks, loss {again[STEPS][1]:.4f}")
    print(f"{transport}: the same losses as without: {again == undisturbed}", flush=True)
    assert again == undisturbed
    return last


def main():
    last = without_a_process(4, "gloo")
    smaller, topologies = trained("a node", nodes=2)
    gap = smaller[STEPS][1] / last - 1
    print(*topologies, sep="\n")
    print(f"a node lost in step {LOST_AT + 1}: {smaller[STEPS][0]} ranks, loss {smaller[STEPS][1]:.4f}")
    print(f"within 5 % of the loss without: {abs(gap) < 0.05} ({gap:+.2%})")
    assert smaller[STEPS][0] == 2 and abs(gap) < 0.05
    assert sorted(text[:18] for text in topologies) == ["1 node of 2 ranks,", "2 nodes of 2 ranks"]
    if torch.cuda.device_count() < 2:
        print("SKIPPED: no two CUDA devices, so NCCL and peer memory were not shown")
        return
    for transport in "nccl", "peers":
        without_a_process(2, transport)


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        work(pathlib.Path(sys.argv[1]), sys.argv[2])
    else:
        main()
