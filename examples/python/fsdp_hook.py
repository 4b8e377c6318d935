"""A reduce-scatter for FSDP2 (torch.distributed.fsdp.fully_shard): gradients go at one bit per element.

    python3 examples/python/fsdp_hook.py

    from fsdp_hook import one_bit  # this file and ddp_hook.py are to be copied
    fully_shard(model)
    one_bit(model)  # after the last fully_shard()

It needs PyTorch 2.9, the first with FSDPModule.set_custom_reduce_scatter(), and the library.

With error feedback, for SGD without momentum, at float32's step size; docs/CODECS.md says what to compress with
momentum and with Adam. Only gradients are compressed, in float32, float16 or bfloat16: FSDP gathers the parameters as
before.

Each rank keeps the errors of its gradients: four bytes for every element of the model, not of its shard alone.

FSDP cuts each parameter into a part for each rank, and passes the parts by rank. Each part has a scale of its own.
Checkpoints do not contain the errors here; gc_allreduce_errors_out and gc_allreduce_errors_in are for that.
"""

import ctypes
import os
import sys
from ctypes import POINTER, byref, c_int32, c_int64, c_size_t, c_void_p

import ddp_hook
from ddp_hook import ERROR_FLOAT32, ERROR_NONE, DLTensor, DType, OneBit, Options, device_of, digits

import torch
import torch.distributed as dist

try:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    FSDPModule.set_custom_reduce_scatter  # it came later than the rest
except (ImportError, AttributeError):
    print("SKIPPED: no PyTorch 2.9 here, or later")
    raise SystemExit


def view(tensor, first, size):
    """Some elements of a tensor, for the library."""
    shape, start = (c_int64 * 1)(size), tensor.data_ptr() + first * tensor.element_size()
    return DLTensor(start, device_of(tensor), 1, DType(*ddp_hook.DTYPES[tensor.dtype]), shape)


class OneBitReduceScatter:
    """For FSDPModule.set_custom_reduce_scatter(): one for each module, as the errors belong to its parameters.

    `state`: a communicator over the process group, and `state.sent`, the bytes that this rank has sent. `elements`: how
    many elements of gradient they were for. `error`: with ERROR_NONE what a step loses is lost.
    """

    def __init__(self, module, error=ERROR_FLOAT32):
        self.shapes, self.error = [parameter.shape for parameter in parameters_of(module)], error
        self.state, self.handles, self.elements = None, {}, 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        """Writes this rank's row of the mean, or of the sum, of [ranks, row] to `output_tensor`."""
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(f"GradCodec: a mean or a sum expected, got {op}")
        if self.state is None:
            self.state = OneBit(group, self.error)
            self.lib = self.state.lib
            self.lib.gc_allreduce_reduce_scatter.argtypes = REDUCE_SCATTER
        row, stream = output_tensor.numel(), None
        sizes, handle = self.handle(row, input_tensor)
        views, first = [], 0
        for size in sizes:
            views.append(view(input_tensor, first, size))
            first += size
        values = (POINTER(DLTensor) * len(views))(*map(ctypes.pointer, views))
        shard = output_tensor
        if shard.dtype != torch.float32:
            shard = torch.empty(row, dtype=torch.float32, device=output_tensor.device)
        mean = view(shard, 0, row)
        if input_tensor.is_cuda:
            stream = torch.cuda.current_stream(input_tensor.device).cuda_stream
        status = self.lib.gc_allreduce_reduce_scatter(handle, values, len(views), None, None, byref(mean), stream)
        self.state.check(status)
        if shard is not output_tensor:
            output_tensor.copy_(shard)
        if op == dist.ReduceOp.SUM:
            output_tensor *= self.state.world
        self.elements += input_tensor.numel()

    def handle(self, row, tensor):
        """The sizes of the parts of all rows, and the handle of these.

        Each part begins with a byte of its own, so that a row's bits are whole bytes, as many as another's: the handle
        cuts them where FSDP does, and its shards are the rows.
        """
        if (row, tensor.dtype) not in self.handles:
            world = self.state.world
            # Parts are as long on every rank: FSDP fills the last ones up. Parameters without a gradient have none;
            # then, or where they are cut in another dimension, a row has one scale.
            parts = [-(-shape[0] // world) * shape[1:].numel() for shape in self.shapes]
            sizes = (parts if sum(parts) == row else [row]) * world
            options = Options(ctypes.sizeof(Options), ddp_hook.ONEBIT, device_of(tensor))
            options.values, options.error = DType(*ddp_hook.DTYPES[tensor.dtype]), self.error
            options.segments, options.n_segments = (c_int64 * len(sizes))(*sizes), len(sizes)
            handle = c_void_p()
            self.state.check(self.lib.gc_allreduce_create(self.state.comm, byref(options), byref(handle)))
            self.handles[row, tensor.dtype] = sizes, handle
        return self.handles[row, tensor.dtype]

    def __del__(self):
        for _, handle in getattr(self, "handles", {}).values():
            self.lib.gc_allreduce_free(handle)


# handle, values, n_values, value_factor, error_factor, shard, stream
REDUCE_SCATTER = [c_void_p, POINTER(POINTER(DLTensor)), c_size_t, c_void_p, c_void_p, POINTER(DLTensor), c_void_p]


def parameters_of(module):
    """Those that are sharded with this module: not those of modules within that are sharded by themselves."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from parameters_of(child)


def one_bit(model, error=ERROR_FLOAT32):
    """Lets all modules of a model that fully_shard() was called for reduce their gradients so. Gives what they use."""
    comms = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            comms.append(OneBitReduceScatter(module, error))
            module.set_custom_reduce_scatter(comms[-1])
    return comms


# --- what it does -----------------------------------------------------------------------------------------------------


# It ends while the loss is still falling. The batch is that of all ranks together.
WORKERS, SEEDS, BATCH, STEPS, RATE = 4, 2, 256, 100, 0.3
MODES = {"plain FSDP": None, "one bit": ERROR_FLOAT32, "one bit, errors lost": ERROR_NONE}


def train(seed, error, device, images, labels):
    """The losses on all images when nine tenths of the steps are done, and in the end; and the reduce-scatters that
    `error` asks for."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
    fully_shard(model, mesh=dist.init_device_mesh(device.type, (dist.get_world_size(),)))
    comms = [] if error is None else one_bit(model, error)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for step in range(1, STEPS + 1):
        batch = torch.randint(len(images), (BATCH,))[dist.get_rank() :: dist.get_world_size()].to(device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        if step in (STEPS * 9 // 10, STEPS):
            with torch.no_grad():
                losses.append(torch.nn.functional.cross_entropy(model(images), labels).item())
    return *losses, comms


def worker(rank, world, backend, store):
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    images, labels = (tensor.to(device) for tensor in digits())
    means = {}
    for name, error in MODES.items():
        before, losses, comms = zip(*(train(seed, error, device, images, labels) for seed in range(SEEDS)))
        before, means[name] = sum(before) / SEEDS, sum(losses) / SEEDS
        if rank == 0:
            print(f"{backend}, {world} ranks, {name}: loss {before:.4f}, then {means[name]:.4f}", flush=True)
        assert before > 1.05 * means[name]
        if rank == 0 and error == ERROR_FLOAT32 and world > 1:
            used = [comm for of_a_run in comms for comm in of_a_run]
            ring = (world - 1) / world * 4 * sum(comm.elements for comm in used)
            sent = sum(comm.state.sent for comm in used) / ring
            # A 32nd is the bits; of a module as small as this headers are as much.
            print(f"{backend}, one bit: {sent:.4f} of the bytes of float32 in a ring", flush=True)
    plain, kept, lost = means.values()
    if rank == 0:
        print(f"{backend}: one bit within 2 %: {abs(kept / plain - 1) < 0.02}; without errors {lost / plain - 1:+.1%}")
    assert abs(kept / plain - 1) < 0.02 and lost > kept
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of PyTorch's may abort a process whose interpreter ends


def show(world, backend):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (world, backend, os.path.join(folder, "store")), world)


def main():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    show(WORKERS, "gloo")
    if torch.cuda.device_count() < 2:
        print("SKIPPED: no two CUDA devices, so NCCL was not shown")
        raise SystemExit
    show(min(torch.cuda.device_count(), WORKERS), "nccl")


if __name__ == "__main__":
    main()
