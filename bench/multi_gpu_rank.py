"""What one rank of bench/multi_gpu.py measures, in a process of its own.

A *machine* is where a rank works: a GPU with NCCL, or, to rehearse it, the host with exchanges through pipes.
"""

import ctypes
import math
import os
import sys
import time
from ctypes import POINTER, byref, c_uint8, c_void_p

import numpy as np
import torch

import capi
import deepspeed_worker
import gpu
from capi import AllReduce, Codec, CodecOptions, Comm, DLDevice, NcclOptions, Transport, lib
from nccl import BFLOAT16, FLOAT32, Nccl

CPU, CUDA = 1, 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUMBERS = {"float32": FLOAT32, "bfloat16": BFLOAT16}
ERRORS = {"float32": 0, "bfloat16": 1}  # gc_error: as the gradient
ONEBIT = 1
MOST_ELEMENTS = 2**30
COPY_BYTES = 4 << 30
# All that is measured of one size is in memory at once.
BYTES_AN_ELEMENT = 100
STAGES = ["encode", "all_to_all", "reduce", "all_gather", "decode"]


def check(status):
    if status:
        raise RuntimeError(f"{lib.gc_status_name(status).decode()}: {capi.last_error()}")


def options_of(device, dtype, elements, **fields):
    return CodecOptions(
        struct_size=ctypes.sizeof(CodecOptions), codec=ONEBIT, device=device, values=capi.dldtype(dtype),
        results=capi.dldtype(dtype), error=ERRORS[dtype], n_elements=elements, **fields,
    )  # fmt: skip


def view(tensor, device):
    """A DLTensor of a contiguous tensor of torch, with what it points to."""
    name = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.uint8: "uint8"}[tensor.dtype]
    shape = capi.int64s(tensor.shape)
    view = capi.DLTensor(tensor.data_ptr(), device, tensor.dim(), capi.dldtype(name), shape, None, 0)
    view.memory = tensor
    return view


# --- machines ---------------------------------------------------------------------------------------------------------


class Card:
    has_graphs = has_peers = True

    def __init__(self, here):
        self.here, self.rank, self.world = here, here.rank, here.world
        torch.cuda.set_device(here.rank)
        self.device, self.torch_device = DLDevice(CUDA, here.rank), torch.device("cuda", here.rank)
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.handle = self.stream.cuda_stream
        self.nccl = Nccl()
        self.own = self.nccl.communicator(here)
        self.comm = POINTER(Comm)()
        none, id = NcclOptions(struct_size=ctypes.sizeof(NcclOptions)), (c_uint8 * 128)()
        if here.rank == 0:
            check(lib.gc_comm_nccl_id(byref(none), id))
        id = (c_uint8 * 128)(*here.gather(bytes(id))[0])
        check(lib.gc_comm_from_nccl_id(byref(none), id, here.rank, here.world, self.device, byref(self.comm)))
        self.aligning = torch.zeros(1, device=self.torch_device)
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(len(STAGES) + 1)]
        self.copied = self.over_peers = None

    def peers(self):
        """A communicator over peer memory, for all sizes."""
        if self.over_peers is None:
            comm = POINTER(Comm)()
            most = options_of(self.device, "float32", MOST_ELEMENTS)
            size = lib.gc_allreduce_peers_bytes(byref(most), self.world)
            check(lib.gc_comm_open_peers(self.comm, self.device, size, 20_000, byref(comm)))
            self.over_peers = comm
        return self.over_peers

    def about(self):
        properties = torch.cuda.get_device_properties(self.rank)
        # nvidia-smi numbers all GPUs, whatever CUDA_VISIBLE_DEVICES says. Older torch has no uuid.
        uuid = getattr(properties, "uuid", None)
        return {
            "card": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "nccl": self.nccl.version(),
            "nvls": os.environ.get("NCCL_NVLS_ENABLE"),
            "clocks": gpu.clocks(f"GPU-{uuid}" if uuid else self.rank),
        }

    def free_bytes(self):
        return torch.cuda.mem_get_info()[0]

    def release(self):
        self.wait()
        torch.cuda.empty_cache()
        try:
            import cupy

            cupy.get_default_memory_pool().free_all_blocks()
        except ImportError:
            pass

    def wait(self):
        self.stream.synchronize()

    def together(self, is_ahead=False):
        """All ranks' streams come here at about the same time; with `is_ahead` so late that the host has enqueued what
        follows."""
        if is_ahead:
            torch.cuda._sleep(1_000_000)  # cycles: some 500 us
        self.nccl.all_reduce(self.own, self.aligning.data_ptr(), self.aligning.data_ptr(), 1, FLOAT32, self.handle)

    def seconds(self, run, is_ahead):
        start, end = self.events[:2]
        self.together(is_ahead)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def seconds_of_each(self, runs):
        """Of several, one after the other, enqueued ahead."""
        self.together(is_ahead=True)
        self.events[0].record()
        for run, event in zip(runs, self.events[1:]):
            run()
            event.record()
        self.events[len(runs)].synchronize()
        return [one.elapsed_time(next) * 1e-3 for one, next in zip(self.events, self.events[1 : len(runs) + 1])]

    def captured(self, run):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def all_reduce(self, send, recv, dtype):
        to, of, count = recv.data_ptr(), send.data_ptr(), send.numel()
        return lambda: self.nccl.all_reduce(self.own, of, to, count, NUMBERS[dtype], self.handle)

    def all_to_all(self, send, recv, size):
        to, of = recv.data_ptr(), send.data_ptr()
        return lambda: self.nccl.all_to_all(self.own, of, to, size, self.world, self.handle)

    def all_gather(self, send, recv, size):
        to, of = recv.data_ptr(), send.data_ptr()
        return lambda: self.nccl.all_gather(self.own, of, to, size, self.handle)

    def copy_seconds(self, samples):
        """Of the yardstick, and its bytes: read and written."""
        if self.copied is None:
            size = min(COPY_BYTES, self.free_bytes() // 8)
            self.copied = [torch.ones(size, dtype=torch.uint8, device=self.torch_device) for _ in range(2)]
        to, of = self.copied
        to.copy_(of)
        return 2 * of.numel(), [self.seconds(lambda: to.copy_(of), is_ahead=True) for _ in range(samples)]

    def deepspeed(self, elements):
        """DeepSpeed's chain; torch.distributed has a communicator of its own."""
        import cupy
        import torch.distributed as dist

        if not dist.is_initialized():
            store = dist.FileStore(os.path.join(self.here.folder, "torch"), self.world)
            dist.init_process_group("nccl", store=store, rank=self.rank, world_size=self.world)
        cupy.cuda.Device(self.rank).use()
        cupy.cuda.ExternalStream(self.handle).use()

        def pack(bits):
            return torch.from_dlpack(deepspeed_worker.cupy_pack(bits))

        def unpack(packed):
            return torch.from_dlpack(cupy.unpackbits(cupy.from_dlpack(packed)))

        what = torch, dist, self.world, elements, self.torch_device
        return deepspeed_worker.AllReduce(*what, pack, unpack, self.wait)


class Host:
    """The same without a GPU, to see that it runs."""

    has_graphs = has_peers = False

    def __init__(self, here):
        self.here, self.rank, self.world = here, here.rank, here.world
        self.device, self.torch_device, self.handle = DLDevice(CPU, 0), torch.device("cpu"), None
        torch.set_num_threads(1)
        self.exchanges = capi.EXCHANGE(self.exchange(True)), capi.EXCHANGE(self.exchange(False))
        transport = Transport(ctypes.sizeof(Transport), here.rank, here.world, 0, None, *self.exchanges)
        self.comm = POINTER(Comm)()
        check(lib.gc_comm_from_transport(byref(transport), byref(self.comm)))

    def exchange(self, is_all_to_all):
        def run(_, send, recv, size, device, stream):
            try:
                blocks = self.here.gather(ctypes.string_at(send, size * (self.world if is_all_to_all else 1)))
            except Exception:  # ctypes would print it, and return 0
                return 1
            first = self.rank * size if is_all_to_all else 0
            ctypes.memmove(recv, b"".join(block[first : first + size] for block in blocks), self.world * size)
            return 0

        return run

    def about(self):
        return {"card": "no card", "capability": "-", "nccl": "none: pipes", "nvls": None, "clocks": {}}

    def free_bytes(self):
        return 1 << 30

    def release(self):
        pass

    def wait(self):
        pass

    def seconds(self, run, is_ahead):
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def seconds_of_each(self, runs):
        return [self.seconds(run, False) for run in runs]

    def gather(self, tensor):
        """The tensor of every rank. As bytes: torch would share a tensor's memory, and leave a socket in /tmp."""
        blocks = self.here.gather(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return [torch.frombuffer(bytearray(block), dtype=tensor.dtype).view(tensor.shape) for block in blocks]

    def all_reduce(self, send, recv, dtype):
        return lambda: recv.copy_(torch.stack(self.gather(send)).sum(0))

    def all_to_all(self, send, recv, size):
        run = self.exchange(True)
        return lambda: run(None, send.data_ptr(), recv.data_ptr(), size, None, None)

    def all_gather(self, send, recv, size):
        run = self.exchange(False)
        return lambda: run(None, send.data_ptr(), recv.data_ptr(), size, None, None)

    def copy_seconds(self, samples):
        to, of = torch.empty(1 << 20, dtype=torch.uint8), torch.ones(1 << 20, dtype=torch.uint8)
        return 2 * of.numel(), [self.seconds(lambda: to.copy_(of), False) for _ in range(samples)]

    def deepspeed(self, elements):
        def pack(bits):
            return torch.from_numpy(deepspeed_worker.numpy_pack(bits))

        def unpack(packed):
            return torch.from_numpy(np.unpackbits(packed.numpy()))

        class Ranks:
            """As torch.distributed."""

            @staticmethod
            def all_to_all_single(recv, send):
                self.all_to_all(send, recv, send.numel() * send.element_size() // self.world)()

            @staticmethod
            def all_gather(rows, tensor):
                for row, value in zip(rows, self.gather(tensor)):
                    row.copy_(value)

        what = torch, Ranks, self.world, elements, self.torch_device
        return deepspeed_worker.AllReduce(*what, pack, unpack, self.wait)


def machine_of(here, on):
    if "machine" not in here.kept:
        here.kept["machine"] = Card(here) if on == "cuda" else Host(here)
    return here.kept["machine"]


def about(here, on):
    machine = machine_of(here, on)
    return {**machine.about(), "library": lib.gc_version_string().decode(), "torch": torch.__version__}


# --- contenders -------------------------------------------------------------------------------------------------------


class Contender:
    """`allocate` may fail for want of memory, on some rank. After it all ranks `connect`, or none does. `run` is timed;
    before it `again`, which is not, makes the inputs those of the beginning."""

    def __init__(self, machine, inputs):
        self.machine, self.inputs, self.n = machine, inputs, inputs["float32"].numel()

    def allocate(self):
        pass

    def connect(self):
        pass

    def again(self):
        pass

    def free(self):
        pass


class Handle(Contender):
    def __init__(self, machine, inputs, dtype):
        super().__init__(machine, inputs)
        self.dtype, self.handle = dtype, POINTER(AllReduce)()

    def allocate(self):
        self.values = self.inputs[self.dtype].clone()

    def connect(self):
        options = options_of(self.machine.device, self.dtype, self.n)
        check(lib.gc_allreduce_create(self.machine.comm, byref(options), byref(self.handle)))
        self.view = view(self.values, self.machine.device)
        views = (POINTER(capi.DLTensor) * 1)(ctypes.pointer(self.view))
        self.arguments = self.handle, views, 1, None, None, c_void_p(self.machine.handle)

    def again(self):
        self.values.copy_(self.inputs[self.dtype])

    def run(self):
        check(lib.gc_allreduce_run(*self.arguments))

    def result(self):
        return self.values

    def free(self):
        lib.gc_allreduce_free(self.handle)
        self.handle = POINTER(AllReduce)()


class OverPeers(Handle):
    """The same over peer memory."""

    def connect(self):
        nccl, self.machine.comm = self.machine.comm, self.machine.peers()
        try:
            super().connect()
        finally:
            self.machine.comm = nccl


class Plain(Contender):
    """gc_compressed_allreduce()."""

    def allocate(self):
        self.buffer = self.inputs["float32"].clone()
        self.worker = torch.zeros_like(self.buffer)
        shard = lib.gc_shard_elements(self.n, self.machine.world)
        self.server = torch.zeros(shard, device=self.buffer.device)
        check(lib.gc_comm_reserve(self.machine.comm, self.machine.device, self.n))

    def connect(self):
        views = [view(tensor, self.machine.device) for tensor in (self.buffer, self.worker, self.server)]
        self.arguments = self.machine.comm, *map(byref, views), c_void_p(self.machine.handle)

    def again(self):
        self.buffer.copy_(self.inputs["float32"])

    def run(self):
        check(lib.gc_compressed_allreduce(*self.arguments))

    def result(self):
        return self.buffer


class NcclSum(Contender):
    """ncclAllReduce(), from one tensor to another, whose inputs so stay what they are."""

    def __init__(self, machine, inputs, dtype):
        super().__init__(machine, inputs)
        self.dtype = dtype

    def allocate(self):
        self.sum = torch.empty_like(self.inputs[self.dtype])

    def connect(self):
        self.run = self.machine.all_reduce(self.inputs[self.dtype], self.sum, self.dtype)

    def result(self):
        return self.sum


class DeepSpeed(Contender):
    def allocate(self):
        multiple = 8 * self.machine.world
        self.buffer = torch.zeros(-(-self.n // multiple) * multiple, device=self.inputs["float32"].device)
        self.chain = None

    def connect(self):
        self.chain = self.machine.deepspeed(self.buffer.numel())
        self.again()

    def again(self):
        self.buffer[: self.n].copy_(self.inputs["float32"])

    def run(self):
        self.chain.step(self.buffer)

    def result(self):
        return self.buffer[: self.n]


CONTENDERS = {
    "handle float32": lambda *place: Handle(*place, "float32"),
    "handle bfloat16": lambda *place: Handle(*place, "bfloat16"),
    "peers float32": lambda *place: OverPeers(*place, "float32"),
    "peers bfloat16": lambda *place: OverPeers(*place, "bfloat16"),
    "nccl float32": lambda *place: NcclSum(*place, "float32"),
    "nccl bfloat16": lambda *place: NcclSum(*place, "bfloat16"),
    "plain float32": Plain,
    "deepspeed": DeepSpeed,
}
IN_A_GRAPH = ["handle float32", "handle bfloat16", "peers float32", "peers bfloat16", "nccl float32", "nccl bfloat16"]


def agreed(here, what, function):
    """Why a rank could not do it, or nothing. `what` is what the ranks are at, for whom they do not answer any more."""
    why = None
    try:
        function()
    except Exception as error:
        why = f"rank {here.rank}: {type(error).__name__}: {error}"[:300]
        print(f"{what}: {why}", file=sys.stderr)  # the others may never come to hear of it
    return next(filter(None, here.gather(why, at=what)), None)


def calls_for(elements):
    """In a sample: several of what takes as long as an event or a launch."""
    return 10 if elements <= 2**20 else 4 if elements <= 2**24 else 1


def measure(here, on, elements, rounds, left_out):
    """Seconds a call of every sample of every contender but those of `left_out`; and why some did not take part."""
    machine = machine_of(here, on)
    needed, free = elements * BYTES_AN_ELEMENT, min(here.gather(machine.free_bytes()))
    if needed > free:
        return {"seconds": {}, "left out": f"{needed / 2**30:.0f} GiB needed, {free / 2**30:.0f} free"}
    failures, ready, ways = {}, {}, {}
    calls, made = calls_for(elements), []
    torch.manual_seed(here.rank)
    inputs = {"float32": torch.randn(elements, device=machine.torch_device)}
    inputs["bfloat16"] = inputs["float32"].to(torch.bfloat16)
    try:
        for name, make in CONTENDERS.items():
            if name in left_out or (name.startswith("peers") and not machine.has_peers):
                continue
            contender = make(machine, inputs)
            made.append(contender)

            def warm():
                contender.connect()
                contender.run()
                machine.wait()

            if why := agreed(here, name, contender.allocate) or agreed(here, name, warm):
                failures[name] = why
                continue
            ready[name] = contender
            ways[name] = contender, many(contender.run, calls)
        if why := agreed(here, "results", lambda: compare(machine, ready)):
            failures["results"] = why
        for name in IN_A_GRAPH:
            in_graph = f"{name}, graph"
            if not machine.has_graphs or name not in ready or in_graph in left_out:
                continue
            captured = []
            here.gather(at=in_graph)

            def capture():
                captured.append(machine.captured(many(ready[name].run, calls)))
                captured[0]()
                machine.wait()

            if why := agreed(here, in_graph, capture):
                failures[in_graph] = why
            else:
                ways[in_graph] = ready[name], captured[0]
        copies = []
        seconds = in_turn(machine, ways, rounds, calls, lambda: copies.append(machine.copy_seconds(1)))
        (copied, _), *copies = copies  # the first is to warm up
        return {
            "seconds": seconds,
            "calls": calls,
            "failures": failures,
            "copy": {"bytes": copied, "seconds": [gpu.significant(s) for _, took in copies for s in took]},
        }
    finally:
        machine.wait()
        for contender in made:
            contender.free()
        ways.clear(), ready.clear(), made.clear(), inputs.clear()
        contender = capture = warm = None  # noqa: F841 they hold memory
        machine.release()


def peer_kernels(here, on, elements, rounds, dtype):
    """Seconds of each kernel of a handle's runs over peer memory, as CUPTI has them, in every round: a kernel that a run
    launches several times counts as the sum. And the bytes that the work of a run reads and writes, and sends."""
    from torch.profiler import ProfilerActivity, profile

    machine = machine_of(here, on)
    torch.manual_seed(here.rank)
    inputs = {dtype: torch.randn(elements, device=machine.torch_device).to(DTYPES[dtype])}
    inputs.setdefault("float32", inputs[dtype])
    contender, what = OverPeers(machine, inputs, dtype), f"kernels {dtype}"
    try:

        def warm():
            contender.connect()
            contender.run()
            machine.wait()

        if why := agreed(here, what, contender.allocate) or agreed(here, what, warm):
            return {"failed": why}
        found = {}
        for _ in range(rounds):
            here.gather(at=what)
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                contender.run()
                machine.wait()
            took = {}
            for event in profiled.events():
                if event.device_type == torch.autograd.DeviceType.CUDA and event.name.startswith("gc_"):
                    took[event.name] = took.get(event.name, 0) + event.time_range.elapsed_us() * 1e-6
            for name, seconds in took.items():
                found.setdefault(name, []).append(gpu.significant(seconds))

        def see():
            assert found, "CUPTI has seen no kernel of ours"

        if why := agreed(here, what, see):
            return {"failed": why}
        return {"seconds": found, "bytes": bytes_of_stages(inputs[dtype], elements, machine.world)}
    finally:
        machine.wait()
        contender.free()
        inputs.clear()
        contender = warm = see = None  # noqa: F841 they hold memory
        machine.release()


def bytes_of_stages(values, elements, world):
    """What each stage must read and write."""
    size = values.element_size()
    return {
        "encode": math.ceil(elements * (3 * size + 1 / 8)),
        "reduce": math.ceil(elements / world * (world / 8 + 2 * size + 1 / 8)),
        "decode": math.ceil(elements * (size + 1 / 8)),
    }


def in_turn(machine, ways, rounds, calls, after=lambda: None):
    """Seconds a call of each contender, by name, in rounds whose order goes round; the first is to warm up. `ways`: by
    name a contender, and what is timed of it. `after`: what else is done in every round."""
    seconds = {name: [] for name in ways}
    for number in range(rounds + 1):
        order = list(ways)
        first = number % len(order) if order else 0
        for name in order[first:] + order[:first]:
            contender, run = ways[name]
            contender.again()
            machine.here.gather(at=name)
            took = machine.seconds(run, is_ahead=name.endswith("graph")) / calls
            if number:
                seconds[name].append(gpu.significant(took))
        after()
    return seconds


def many(run, calls):
    def runs():
        for _ in range(calls):
            run()

    return run if calls == 1 else runs


def compare(machine, contenders):
    """That ours end with the same bytes on all ranks, and DeepSpeed's chain with the same signs but for few. Of their
    first run."""
    n = next(iter(contenders.values())).n if contenders else 0
    for name in "handle float32", "handle bfloat16", "peers float32", "peers bfloat16", "plain float32":
        if name in contenders:
            # A sum that does not depend on the order; all bytes would take long.
            result = contenders[name].result().view(torch.int16)
            sums = machine.here.gather(int(result[: 2**24].to(torch.int64).sum()))
            assert len(set(sums)) == 1, f"{name}: ranks end with different bytes"
    if {"plain float32", "deepspeed"} <= set(contenders) and n % (8 * machine.world) == 0:
        ours, theirs = (contenders[name].result()[: 2**24] for name in ("plain float32", "deepspeed"))
        alike = float(((ours > 0) == (theirs > 0)).float().mean())
        ratio = float(ours.abs().mean() / theirs.abs().mean())
        assert alike > 0.999 and math.isclose(ratio, 1, rel_tol=1e-3), f"deepspeed: {alike} of the signs, {ratio} times"


# --- stages -----------------------------------------------------------------------------------------------------------


def stages(here, on, elements, rounds, dtype):
    """Seconds of every stage of an all-reduce in every round, made of a codec and NCCL's exchanges; and their bytes:
    read and written in memory, or sent to others."""
    machine = machine_of(here, on)
    world, codec = machine.world, POINTER(Codec)()
    try:
        options = options_of(machine.device, dtype, elements, n_chunks=world, server=here.rank + 1)
        memory = {}

        def make():
            check(lib.gc_codec_create(byref(options), byref(codec)))
            stride = lib.gc_codec_payload_bytes(codec) // world
            memory["values"] = torch.randn(elements, device=machine.torch_device).to(DTYPES[dtype])
            for name, shape in ("payload", (world * stride,)), ("chunks", (world, stride)), ("chunk", (stride,)):
                memory[name] = torch.zeros(shape, dtype=torch.uint8, device=machine.torch_device)

        if why := agreed(here, f"stages {dtype}", make):
            return {"failed": why}
        values, payload, chunks, chunk = (view(tensor, machine.device) for tensor in memory.values())
        each, stride, stream = (POINTER(capi.DLTensor) * 1)(ctypes.pointer(values)), chunk.shape[0], machine.handle
        runs = {
            "encode": lambda: check(lib.gc_codec_encode(codec, each, 1, None, None, byref(payload), stream)),
            "all_to_all": machine.all_to_all(memory["payload"], memory["chunks"], stride),
            "reduce": lambda: check(lib.gc_codec_reduce(codec, here.rank, byref(chunks), byref(chunk), stream)),
            "all_gather": machine.all_gather(memory["chunk"], memory["payload"], stride),
            "decode": lambda: check(lib.gc_codec_decode(codec, byref(payload), 1, None, 0, each, 1, stream)),
        }
        sent = dict.fromkeys(("all_to_all", "all_gather"), (world - 1) * stride)
        moved = {**bytes_of_stages(memory["values"], elements, world), **sent}
        found = {stage: [] for stage in STAGES}
        for number in range(rounds + 1):
            here.gather(at=f"stages {dtype}")
            took = machine.seconds_of_each([runs[stage] for stage in STAGES])
            for stage, seconds in zip(STAGES, took):
                found[stage] += [gpu.significant(seconds)] if number else []
        assert torch.isfinite(memory["values"]).all(), "the mean is not finite"
        return {"seconds": found, "bytes": moved}
    finally:
        machine.wait()
        lib.gc_codec_free(codec)
        memory = runs = values = payload = chunks = chunk = None  # noqa: F841 they hold memory
        machine.release()
