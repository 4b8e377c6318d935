"""A communication hook for DistributedDataParallel: gradients go at one bit per element, with error feedback.

    python3 examples/python/ddp_hook.py

    from ddp_hook import OneBit, one_bit_hook  # this file is to be copied; it needs PyTorch and the library
    model = DistributedDataParallel(model)
    model.register_comm_hook(OneBit(), one_bit_hook)  # or OneBit(process_group)

For SGD without momentum, at float32's step size. With momentum in the optimizer, training is slower or diverges:
compress the momentum instead (docs/CODECS.md, also for Adam). Parameters in float32, float16 or bfloat16. Exchanges go
through torch.distributed: through host memory on gloo, and on NCCL from GPU to GPU, on the current stream, without
waiting. A hook on gloo blocks the backward pass during the exchange.

PyTorch arranges the buckets anew after the first step. A bucket with other parameters than before gets a new handle,
whose errors are 0: the errors of the first step are lost. Checkpoints do not contain the errors here;
gc_allreduce_errors_out and gc_allreduce_errors_in are for that.
"""

import ctypes
import os
import sys
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("SKIPPED: no PyTorch here")
    raise SystemExit

# --- what is used of gradcodec.h --------------------------------------------------------------------------------------

ONEBIT, ERROR_FLOAT32, ERROR_NONE, TRANSPORT_HOST, CPU, CUDA, CUDA_HOST = 1, 0, 2, 1, 1, 2, 3
DTYPES = {torch.float32: (2, 32, 1), torch.float16: (2, 16, 1), torch.bfloat16: (4, 16, 1)}


def struct(name, **fields):
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Device = struct("DLDevice", device_type=c_int32, device_id=c_int32)
DType = struct("DLDataType", code=c_uint8, bits=c_uint8, lanes=c_uint16)
_LAYOUT = {"shape": POINTER(c_int64), "strides": POINTER(c_int64), "byte_offset": c_uint64}
DLTensor = struct("DLTensor", data=c_void_p, device=Device, ndim=c_int32, dtype=DType, **_LAYOUT)
_NUMBERS = {"error": c_int32, "scale": c_int32, "nonfinite": c_int32, "beta": c_float}
_SIZES = {"segments": POINTER(c_int64), "n_segments": c_size_t, "n_elements": c_int64, "n_chunks": c_size_t}
Options = struct(
    "gc_codec_options_t", struct_size=c_uint32, codec=c_int32, device=Device, values=DType, results=DType, **_NUMBERS,
    **_SIZES, server=c_uint64, raw=c_void_p, reduction=c_int32, reserved_i=c_int32, reserved=c_uint64 * 2,
)  # fmt: skip
EXCHANGE = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_size_t, Device, c_void_p)
_RANKS = {"struct_size": c_uint32, "rank": c_int32, "world_size": c_int32, "flags": c_uint32, "ctx": c_void_p}
Transport = struct("gc_transport_t", **_RANKS, all_to_all=EXCHANGE, all_gather=EXCHANGE)
SIGNATURES = {
    "gc_comm_from_transport": [POINTER(Transport), POINTER(c_void_p)],
    "gc_comm_free": [c_void_p],
    "gc_allreduce_create": [c_void_p, POINTER(Options), POINTER(c_void_p)],
    "gc_allreduce_run": [c_void_p, POINTER(POINTER(DLTensor)), c_size_t, c_void_p, c_void_p, c_void_p],
    "gc_allreduce_free": [c_void_p],
}


def load():
    lib = ctypes.CDLL(os.environ.get("GRADCODEC_LIBRARY", "libgradcodec.so.0"))
    for name, arguments in SIGNATURES.items():
        getattr(lib, name).argtypes = arguments
        getattr(lib, name).restype = None if name.endswith("_free") else c_int32
    lib.gc_last_error.restype = ctypes.c_char_p
    return lib


# --- the hook ---------------------------------------------------------------------------------------------------------


class Memory:
    """Memory of a GPU that is not PyTorch's, for torch.as_tensor(), which does not copy it."""

    def __init__(self, pointer, size):
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": (size,), "typestr": "|u1", "version": 2}


def at(pointer, size, device):
    """The bytes at a pointer, as a tensor."""
    if device.device_type in (CPU, CUDA_HOST):
        return torch.frombuffer((c_uint8 * size).from_address(pointer), dtype=torch.uint8)
    return torch.as_tensor(Memory(pointer, size), device=torch.device("cuda", device.device_id))


class OneBit:
    """What the hook of one model keeps: a communicator over a process group, and for each bucket an all-reduce handle.

    `sent`: the bytes that this rank has sent; `elements`: how many elements of gradient they were for. `error`: with
    ERROR_NONE what a step loses is lost.
    """

    def __init__(self, group=None, error=ERROR_FLOAT32):
        self.lib, self.group, self.error = load(), group, error
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.comm, self.handles = c_void_p(), {}
        self.sent = self.elements = 0
        self.failure = None
        # NCCL takes memory of GPUs, all others that of the host.
        flags = 0 if "nccl" in dist.get_backend(group) else TRANSPORT_HOST
        self.takes_host = "cpu" in dist.get_backend_config(group)
        self.functions = EXCHANGE(self.all_to_all), EXCHANGE(self.all_gather)
        size = ctypes.sizeof(Transport)
        transport = Transport(size, self.rank, self.world, flags, None, *self.functions)
        self.check(self.lib.gc_comm_from_transport(byref(transport), byref(self.comm)))

    def all_to_all(self, _, send, recv, size, device, stream):
        return self.exchange(dist.all_to_all_single, self.world * size, send, recv, size, device)

    def all_gather(self, _, send, recv, size, device, stream):
        return self.exchange(dist.all_gather_into_tensor, size, send, recv, size, device)

    def exchange(self, collective, n_sent, send, recv, size, device):
        """Called by the library within gc_allreduce_*, on the stream that it was given: the current one."""
        try:
            received, sent = at(recv, self.world * size, device), at(send, n_sent, device)
            if received.is_cuda or self.takes_host:
                collective(received, sent, group=self.group)
            else:  # the few bytes that make a handle, by NCCL alone
                on_card = torch.empty_like(received, device="cuda")
                collective(on_card, sent.cuda(), group=self.group)
                received.copy_(on_card)
        except Exception as failure:  # ctypes would print it, and return 0
            self.failure = failure
            return 1
        self.sent += (self.world - 1) * size
        return 0

    def check(self, status):
        if status != 0:
            failure, self.failure = self.failure, None
            raise RuntimeError(f"GradCodec: {self.lib.gc_last_error().decode()}") from failure

    def handle(self, bucket):
        """The all-reduce of these parameters, made when they first come together. Buckets are alike on all ranks."""
        parameters, tensor = bucket.parameters(), bucket.buffer()
        made_for = tuple(map(id, parameters))
        if bucket.index() in self.handles:
            before, sizes, handle = self.handles[bucket.index()]
            if before == made_for:
                return sizes, handle
            del self.handles[bucket.index()]
            self.lib.gc_allreduce_free(handle)
        sizes, handle = [parameter.numel() for parameter in parameters], c_void_p()
        options = Options(ctypes.sizeof(Options), ONEBIT, device_of(tensor), DType(*DTYPES[tensor.dtype]))
        options.error, options.n_segments = self.error, len(sizes)
        options.segments = (c_int64 * len(sizes))(*sizes)
        self.check(self.lib.gc_allreduce_create(self.comm, byref(options), byref(handle)))
        self.handles[bucket.index()] = made_for, sizes, handle
        return sizes, handle

    def run(self, bucket):
        """Replaces the gradients of a bucket by their mean over the ranks. Each parameter's has a scale of its own."""
        buffer = bucket.buffer()
        sizes, handle = self.handle(bucket)
        views, first = [], buffer.data_ptr()
        for size in sizes:
            view = DLTensor(first, device_of(buffer), 1, DType(*DTYPES[buffer.dtype]), (c_int64 * 1)(size))
            views.append(ctypes.pointer(view))
            first += size * buffer.element_size()
        stream = torch.cuda.current_stream(buffer.device).cuda_stream if buffer.is_cuda else None
        values = (POINTER(DLTensor) * len(views))(*views)
        self.check(self.lib.gc_allreduce_run(handle, values, len(views), None, None, stream))
        self.elements += buffer.numel()

    def __del__(self):
        for *_, handle in getattr(self, "handles", {}).values():
            self.lib.gc_allreduce_free(handle)
        if getattr(self, "comm", None):
            self.lib.gc_comm_free(self.comm)


def device_of(tensor):
    return Device(CUDA, tensor.device.index) if tensor.is_cuda else Device(CPU, 0)


def one_bit_hook(state: OneBit, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For DistributedDataParallel.register_comm_hook(OneBit(), one_bit_hook)."""
    buffer = bucket.buffer()
    state.run(bucket)
    # On a GPU the future stands for what is on the current stream by now.
    done = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done


# --- what it does -----------------------------------------------------------------------------------------------------


# It ends while the loss is still falling. The batch is that of all ranks together.
WORKERS, SEEDS, BATCH, STEPS, RATE = 4, 5, 256, 200, 0.3
MODES = {"plain DDP": None, "one bit": ERROR_FLOAT32, "one bit, errors lost": ERROR_NONE}


def digits():
    """Handwritten digits to train on: images and what they show."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples_c", "data", "digits.bin")
    with open(path, "rb") as file:
        records = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).view(-1, 65)
    return records[:, :64] / 16, records[:, 64].long()


def train(seed, error, device, images, labels):
    """The losses on all images when nine tenths of the steps are done, and in the end; and the hook's state, if `error`
    asks for a hook."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model)
    state = None
    if error is not None:
        state = OneBit(error=error)
        model.register_comm_hook(state, one_bit_hook)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for step in range(1, STEPS + 1):
        batch = torch.randint(len(images), (BATCH,))[dist.get_rank() :: dist.get_world_size()].to(device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        if step in (STEPS * 9 // 10, STEPS):
            with torch.no_grad():
                losses.append(torch.nn.functional.cross_entropy(model.module(images), labels).item())
    return *losses, state


def worker(rank, world, backend, store):
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    images, labels = (tensor.to(device) for tensor in digits())
    means = {}
    for name, error in MODES.items():
        before, losses, states = zip(*(train(seed, error, device, images, labels) for seed in range(SEEDS)))
        before, means[name] = sum(before) / SEEDS, sum(losses) / SEEDS
        if rank == 0:
            print(f"{backend}, {world} ranks, {name}: loss {before:.4f}, then {means[name]:.4f}", flush=True)
        assert before > 1.05 * means[name]
        if rank == 0 and error == ERROR_FLOAT32 and world > 1:
            sent, elements = sum(state.sent for state in states), sum(state.elements for state in states)
            ring = 2 * (world - 1) / world * 4 * elements
            # A 32nd is the bits; of a bucket as small as this headers are more than a third.
            print(f"{backend}, one bit: {sent / ring:.4f} of the bytes of float32 in a ring", flush=True)
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
    if not torch.cuda.is_available():
        print("SKIPPED: no CUDA device, so NCCL was not shown")
        raise SystemExit
    show(min(torch.cuda.device_count(), WORKERS), "nccl")


if __name__ == "__main__":
    main()
