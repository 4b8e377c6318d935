"""Averages gradients over memory that all GPUs of one machine can access, without NCCL: three sources of that memory.

    PYTHONPATH=python torchrun --nproc-per-node 2 examples/python/peers.py     # one process per GPU
    PYTHONPATH=python python3 examples/python/peers.py                         # starts one process per GPU, at least 2

1. The library allocates it: gc_comm_open_peers, over any communicator, here torch.distributed's.
2. PyTorch's symmetric memory, which PyTorch maps for all ranks of a group.
3. Tensors that processes share: gc_share_send and gc_share_receive.

Each rank writes to the buffers of the others; gradients stay in place. All three end with the same bytes. (NCCL
windows, from 2.29, are a fourth source: ncclGetPeerDevicePointer returns their addresses.)
"""

import os
import socket
import tempfile

from gradcodec import CUDA, ONEBIT, GradCodec

try:
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric_memory
except ImportError:
    print("SKIPPED: no PyTorch with symmetric memory here")
    raise SystemExit

ELEMENTS, STEPS, PATIENCE = 1_000_003, 3, 60_000


def over_gloo(gradcodec, rank, world):
    """Returns a communicator over gloo, by which the ranks exchange setup data."""

    def tensors(send, recv):
        return torch.frombuffer(send, dtype=torch.uint8), torch.frombuffer(recv, dtype=torch.uint8)

    def gather(send, recv):
        one, all_of_them = tensors(send, recv)
        dist.all_gather(list(all_of_them.chunk(world)), one)

    def to_all(send, recv):
        raise NotImplementedError("to find each other they only gather")

    return gradcodec.communicator(rank, world, to_all, gather)


def buffer_bytes(gradcodec, world):
    """Returns the size of each rank's buffer for the all-reduce of steps()."""
    return gradcodec.allreduce_peers_bytes(ONEBIT, [ELEMENTS], world)


def of_the_library(gradcodec, rank, world, gpu):
    return gradcodec.open_peers(over_gloo(gradcodec, rank, world), gpu, buffer_bytes(gradcodec, world)), None


def of_symmetric_memory(gradcodec, rank, world, gpu):
    size = buffer_bytes(gradcodec, world)
    own = symmetric_memory.empty(size, dtype=torch.uint8, device=torch.device("cuda", gpu)).zero_()
    mapped = symmetric_memory.rendezvous(own, dist.group.WORLD)
    offset = own.data_ptr() - mapped.buffer_ptrs[rank]  # the same on all ranks
    torch.cuda.synchronize()
    dist.barrier()  # all buffers are 0
    comm = gradcodec.peers(rank, [address + offset for address in mapped.buffer_ptrs], size, gpu)
    return comm, (own, mapped)  # which must stay alive


def of_shares(gradcodec, rank, world, gpu):
    size = buffer_bytes(gradcodec, world)
    own = torch.from_dlpack(gradcodec.tensor_empty([size], "uint8", (CUDA, gpu))).zero_()
    torch.cuda.synchronize()
    buffers, shares, ends = [], [], sockets(rank, world)
    for end in ends:
        if end is not None:
            shares.append(gradcodec.share_send(own, end.fileno(), 0, PATIENCE))
    for end in ends:
        if end is None:
            buffers.append(own)
        else:
            buffers.append(torch.from_dlpack(gradcodec.share_receive(end.fileno(), (CUDA, gpu), PATIENCE)))
    dist.barrier()  # all buffers are 0
    comm = gradcodec.peers(rank, [buffer.data_ptr() for buffer in buffers], size, gpu)
    return comm, (buffers, shares, ends)


def sockets(rank, world):
    """Returns a connected Unix socket to every other rank, indexed by rank."""
    folder, ends = [tempfile.mkdtemp() if rank == 0 else None], [None] * world
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "rank-{}").format
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path(rank))
        listening.listen(world)
        dist.barrier()
        for other in range(rank + 1, world):
            ends[other] = socket.socket(socket.AF_UNIX)
            ends[other].connect(path(other))
            ends[other].sendall(bytes([rank]))
        for _ in range(rank):
            end, _ = listening.accept()
            ends[end.recv(1)[0]] = end
    os.unlink(path(rank))
    dist.barrier()
    if rank == 0:
        os.rmdir(folder[0])
    return ends


def steps(comm, rank, gpu):
    """Runs some steps of an all-reduce with error feedback; returns the last result."""
    handle = comm.allreduce(ONEBIT, [ELEMENTS], device=(CUDA, gpu))
    for step in range(STEPS):
        generator = torch.Generator("cuda").manual_seed(1000 * step + rank)
        gradient = torch.randn(ELEMENTS, device="cuda", generator=generator)
        handle.run([gradient], stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    comm.async_error()
    return gradient


def run(rank, world):
    gpu = rank % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    gradcodec, results, kept = GradCodec(), [], []
    for way in of_the_library, of_symmetric_memory, of_shares:
        comm, memory = way(gradcodec, rank, world, gpu)
        kept.append((comm, memory))
        results.append(steps(comm, rank, gpu))
        everywhere = [torch.empty(ELEMENTS) for _ in range(world)]
        dist.all_gather(everywhere, results[-1].cpu())
        same = all(torch.equal(one, everywhere[0]) for one in everywhere) and torch.equal(results[-1], results[0])
        if rank == 0:
            print(f"{way.__name__}: {world} ranks, the same bytes on all and as before: {same}", flush=True)
        assert same
    dist.barrier()  # no rank writes to another rank's memory any more
    dist.destroy_process_group()


def start(rank, world, folder):
    # PyTorch rejects ranks that share a GPU, unless this is set.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    run(rank, world)


def main():
    if not torch.cuda.is_available():
        print("SKIPPED: no CUDA device, and this is about memory of GPUs")
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
        run(dist.get_rank(), dist.get_world_size())
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        world = max(2, torch.cuda.device_count())
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(start, (world, folder), world)


if __name__ == "__main__":
    main()
