"""Functions that ranks run in the tests, on a GPU or on the host, and the results that NumPy calculates for them.

Functions whose first argument is `here` are for Ranks.call(). They return everything that has changed, after each step.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import signal
import threading
import time
from ctypes import POINTER, byref, c_uint8, c_void_p
from dataclasses import dataclass, replace

import numpy as np

import capi
import driver
import gpu
from arena import Arena
from block_model import INT4, INT8
from capi import EXCHANGE, AllReduce, CodecOptions, Comm, NcclOptions, PeersOptions, Transport, lib
from codec_model import ONEBIT, PROPAGATE, TRANSACTIONAL
from codecs_c import Host, call, dtype_name, gradient, model_of, options_of, same, views
from comms import World
from nccl import Nccl
from nodes_model import world_model

SPLIT = 1  # GC_NCCL_SPLIT
UNTOUCHED = 7


# --- places -----------------------------------------------------------------------------------------------------------


class OnHost(Host):
    stream = None

    def wait(self):
        pass

    def clear(self):
        pass


class OnGpu(Arena):
    """Memory of a GPU, and a stream there. Makes the GPU current in this thread."""

    def __init__(self, index):
        assert index < driver.device_count()  # initializes the driver in a new process
        driver.use(driver.primary(index))
        super().__init__(exact=True, index=index)
        self.index, self.own = index, driver.Stream()
        self.stream = self.own.handle

    def put(self, array, dtype=None):
        tensor = super().put(array, dtype)
        tensor.what = array
        return tensor

    def set(self, tensor, array):
        driver.upload(tensor.struct.dl_tensor.data, array)

    def wait(self):
        self.own.synchronize()

    def clear(self):
        """Waits for the device, and releases everything that was put."""
        driver.synchronize()
        self.start_again()


def place_of(here, on):
    if "place" not in here.kept:
        here.kept["place"] = OnHost() if on == "cpu" else OnGpu(here.rank % driver.device_count())
    return here.kept["place"]


# --- communicators ----------------------------------------------------------------------------------------------------


def nccl_options(**fields):
    return NcclOptions(struct_size=ctypes.sizeof(NcclOptions), **fields)


HOST = 1  # GC_TRANSPORT_HOST


def over_pipes(here, flags=0):
    """Returns a communicator that exchanges through the process that controls the ranks."""

    def exchange(is_all_to_all):
        def run(_, send, recv, size, device, stream):
            try:
                blocks = here.gather(ctypes.string_at(send, (here.world if is_all_to_all else 1) * size))
            except Exception:  # a rank is gone; ctypes would print the exception, and return 0
                return 1
            first = here.rank * size if is_all_to_all else 0
            ctypes.memmove(recv, b"".join(block[first : first + size] for block in blocks), here.world * size)
            return 0

        return EXCHANGE(run)

    functions = here.kept.setdefault("exchanges", (exchange(True), exchange(False)))
    transport = Transport(ctypes.sizeof(Transport), here.rank, here.world, flags, None, *functions)
    comm = POINTER(Comm)()
    call("gc_comm_from_transport", byref(transport), byref(comm))
    return comm


def of_id(here):
    import torch  # noqa: F401 torch loads its NCCL

    id, comm = (c_uint8 * 128)(), POINTER(Comm)()
    if here.rank == 0:
        call("gc_comm_nccl_id", byref(nccl_options()), id)
    id = (c_uint8 * 128)(*here.gather(bytes(id))[0])
    device = place_of(here, "cuda").device
    call("gc_comm_from_nccl_id", byref(nccl_options()), id, here.rank, here.world, device, byref(comm))
    return comm


def borrow(mine, flags=0):
    comm = POINTER(Comm)()
    call("gc_comm_from_nccl", byref(nccl_options(comm=mine, flags=flags)), byref(comm))
    return comm


def own_nccl(here):
    """Returns a communicator that this program has made, without the library."""
    import torch  # noqa: F401 torch loads its NCCL

    if "nccl" not in here.kept:
        here.kept["nccl"] = Nccl().communicator(here)
    return here.kept["nccl"]


def torchs(here):
    """Returns the communicator of torch.distributed, or None if this torch does not expose it."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        torch.cuda.set_device(here.rank)
        store = dist.FileStore(os.path.join(here.folder, "torch"), here.world)
        dist.init_process_group("nccl", store=store, rank=here.rank, world_size=here.world)
        dist.all_reduce(torch.ones(8, device="cuda"))  # torch makes the communicator here
        torch.cuda.synchronize()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    return backend._comm_ptr() if hasattr(backend, "_comm_ptr") else None


def shows_its_communicator(here):
    place_of(here, "cuda")
    return torchs(here) is not None


ROOM = 2**26 + 3  # elements of ONEBIT that communicators over peer memory have room for
PATIENCE = 20_000  # timeout of these communicators, in milliseconds


def room_for(elements, world):
    """Returns the bytes of each rank's buffer for an all-reduce of `elements` elements by ONEBIT."""
    options = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=ONEBIT, n_elements=elements)
    return lib.gc_allreduce_peers_bytes(byref(options), world, 1)


def over_peers(here, patience=PATIENCE):
    """Returns a communicator whose ranks find each other's buffers over pipes."""
    place, bootstrap, comm = place_of(here, "cuda"), over_pipes(here), POINTER(Comm)()
    size = room_for(ROOM, here.world)
    call("gc_comm_open_peers", bootstrap, place.device, size, patience, byref(comm))
    lib.gc_comm_free(bootstrap)
    return comm


def mapped_buffers(here, size):
    """Returns every rank's buffer, by rank, as this program has mapped them here, and this rank's memory."""
    memory = driver.Memory(size)
    driver.fill(memory.address, 0, size)
    handles = here.gather(driver.ipc_handle(memory.address))
    return [memory.address if rank == here.rank else driver.ipc_open(handle) for rank, handle in enumerate(handles)], memory


def over_buffers(here, buffers, size, patience=PATIENCE):
    """Returns a communicator over all ranks' buffers, which are mapped here, by rank, and 0."""
    comm = POINTER(Comm)()
    options = PeersOptions(
        ctypes.sizeof(PeersOptions), here.rank, here.world, patience, place_of(here, "cuda").device, size,
        (c_void_p * here.world)(*buffers),
    )  # fmt: skip
    here.gather()  # until all ranks' buffers are ready
    call("gc_comm_from_peers", byref(options), byref(comm))
    here.gather()
    return comm


def over_mapped_peers(here, patience=PATIENCE, room=ROOM):
    place_of(here, "cuda")
    size = room_for(room, here.world)
    buffers, memory = mapped_buffers(here, size)
    here.kept.setdefault("memory", []).append(memory)  # kept to the end of the process
    here.kept["buffers"] = buffers
    return over_buffers(here, buffers, size, patience)


def over_windows(here):
    """Returns a communicator over windows of NCCL 2.29 or later: older host functions lack other ranks' addresses."""
    import torch  # noqa: F401 torch loads its NCCL

    place, nccl, size = place_of(here, "cuda"), Nccl(), room_for(ROOM, here.world)
    if not nccl.has("ncclGetPeerDevicePointer"):
        return None
    mine, address, window, symmetric = own_nccl(here), c_void_p(), c_void_p(), 1
    nccl.call("ncclMemAlloc", byref(address), ctypes.c_size_t(size))
    driver.fill(address.value, 0, size)
    nccl.call("ncclCommWindowRegister", mine, address, ctypes.c_size_t(size), byref(window), symmetric)
    buffers = []
    for rank in range(here.world):
        theirs = c_void_p()
        nccl.call("ncclGetPeerDevicePointer", window, ctypes.c_size_t(0), rank, byref(theirs))
        buffers.append(theirs.value)
    place.wait()
    return over_buffers(here, buffers, size)


OVER = {
    "peers": over_peers,
    "mapped peers": over_mapped_peers,
    "windows": over_windows,
    "pipes": over_pipes,
    "staged pipes": lambda here: over_pipes(here, HOST),
    "id": of_id,
    "borrowed": lambda here: borrow(own_nccl(here)),
    "split": lambda here: borrow(own_nccl(here), SPLIT),
    "torch": lambda here: borrow(torchs(here)),
    "torch, split": lambda here: borrow(torchs(here), SPLIT),
}


def comm_of(here, over):
    if over not in here.kept:
        here.kept[over] = OVER[over](here)
    return here.kept[over]


# --- the handle -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Options of a handle, and its steps."""

    values: str = "float32"
    error: str | None = "float32"
    codec: int = ONEBIT
    segments: tuple = (100_003, 0, 7, 20_000)
    nonfinite: int = PROPAGATE
    steps: int = 5
    infinite: int | None = None  # step in which one element of the last rank is infinite
    raw: tuple | None = None  # for a block codec: True for each raw segment

    def options(self):
        options = {"codec": self.codec, "segments": list(self.segments), "values": self.values, "results": self.values}
        options |= {"error": self.error, "nonfinite": self.nonfinite}
        return options | ({} if self.raw is None else {"raw": list(self.raw)})

    def models(self, world):
        return [model_of(**self.options(), n_chunks=world, server=rank) for rank in range(world)]

    def gradients(self, step, rank, world):
        """Returns the gradient of a rank in a step, one array a segment: some magnitudes, and special numbers in the
        last step."""
        rng = np.random.default_rng([step, rank])
        special = self.nonfinite == PROPAGATE and step == self.steps - 1
        arrays = [gradient(rng, n, self.values, special) for n in self.segments]
        if step == self.infinite and rank == world - 1:
            arrays[0][-1] = np.inf
        return arrays


class Handle:
    def __init__(self, comm, place, rank, world, case, nodes=1):
        self.place, self.case = place, case
        self.model = world_model(nodes, world // nodes, **case.options()).models[rank]
        options = options_of(case.models(world)[rank], place.device)
        options.server, options.n_chunks = 0, 0
        self.handle = POINTER(AllReduce)()
        call("gc_allreduce_create", comm, byref(options), byref(self.handle))

    def put(self, arrays):
        return [self.place.put(array, dtype_name(array, self.case.values)) for array in arrays]

    def run(self, tensors):
        call("gc_allreduce_run", self.handle, views(tensors), len(tensors), None, None, self.place.stream)

    def commit(self):
        if self.case.nonfinite == TRANSACTIONAL:
            call("gc_allreduce_commit", self.handle, None, self.place.stream)

    def rest(self):
        """Returns errors and flags."""
        place, stream = self.place, self.place.stream
        sizes = [self.model.errors(which).size for which in (0, 1)]
        errors = [place.put(np.full(size, UNTOUCHED, np.float32)) for size in sizes]
        flags = place.put(np.zeros(1, np.uint32))
        call("gc_allreduce_errors_out", self.handle, *(e.view for e in errors), stream)
        call("gc_allreduce_flags", self.handle, flags.view, stream)
        place.wait()
        return [place.get(x).copy() for x in (*errors, flags)]

    def free(self):
        lib.gc_allreduce_free(self.handle)
        self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()


def steps_of_handle(comm, place, rank, world, case, nodes=1):
    """Returns the values after each step, and at the end errors and flags."""
    found = []
    with Handle(comm, place, rank, world, case, nodes) as handle:
        for step in range(case.steps):
            tensors = handle.put(case.gradients(step, rank, world))
            handle.run(tensors)
            handle.commit()
            place.wait()
            found.append([place.get(tensor).copy() for tensor in tensors])
            place.clear()
        found.append(handle.rest())
        place.clear()
    capi.check(lib.gc_comm_async_error(comm))
    return found


@functools.cache
def expected_of_handle(world, case, nodes=1):
    """Returns the results of steps_of_handle() on every rank, calculated by NumPy."""
    whole, found = world_model(nodes, world // nodes, **case.options()), []
    models = whole.models
    for step in range(case.steps):
        found.append(whole.run([case.gradients(step, rank, world) for rank in range(world)]))
        if case.nonfinite == TRANSACTIONAL:
            for model in models:
                model.commit()
    found.append([[m.errors(0), m.errors(1), np.array([m.flags], np.uint32)] for m in models])
    return [[step[rank] for step in found] for rank in range(world)]


def graph_of_handle(comm, place, rank, world, case):
    """Runs steps_of_handle() by one graph that is launched for each step."""
    stream, first, found = place.stream, case.gradients(0, rank, world), []
    with Handle(comm, place, rank, world, case) as handle:
        sources, tensors = handle.put(first), handle.put(first)
        with driver.Graph(stream) as graph:
            for source, tensor in zip(sources, tensors):
                to, of = tensor.struct.dl_tensor.data, source.struct.dl_tensor.data
                driver.copy(to, of, source.what.nbytes, stream)
            handle.run(tensors)
            handle.commit()
        for step in range(case.steps):
            for source, array in zip(sources, case.gradients(step, rank, world)):
                place.set(source, array)
            graph.replay(stream)
            place.wait()
            found.append([place.get(tensor).copy() for tensor in tensors])
        found.append(handle.rest())
        graph.destroy()
        place.clear()
    capi.check(lib.gc_comm_async_error(comm))
    return found


def steps_over_source(here, over, case):
    """Runs steps_of_handle() and graph_of_handle() over memory that NCCL has mapped; returns None without that."""
    place, comm = place_of(here, "cuda"), comm_of(here, over)
    if comm is None:
        return None
    found = [function(comm, place, here.rank, here.world, case) for function in (steps_of_handle, graph_of_handle)]
    return found


def is_held_back(comm, place, rank, world):
    """Returns True if a call returns although its stream waits for the host."""
    gate = driver.Gate()
    with Handle(comm, place, rank, world, ONE) as handle:
        tensors = handle.put(ONE.gradients(0, rank, world))
        handle.run(tensors)  # NCCL connects
        place.wait()
        gate.close(place.stream)
        handle.run(tensors)
        held = not driver.Event(place.stream).done()
        gate.open()
        place.wait()
        place.clear()
    return held


def digest_of_handle(comm, place, rank, world, n, steps):
    """Returns a digest of the values after some steps on one large tensor."""
    case = Case(segments=(n,), steps=steps)
    with Handle(comm, place, rank, world, case) as handle:
        tensor = place.put(np.random.default_rng(rank).standard_normal(n, np.float32))
        for _ in range(steps):
            handle.run([tensor])
        place.wait()
        digest = hashlib.sha256(place.get(tensor)).hexdigest()
        place.clear()
    return digest


# --- a process for each rank ------------------------------------------------------------------------------------------


def on_rank(here, on, over, function, *arguments):
    """Runs one of the functions above."""
    place = place_of(here, on)
    return function(comm_of(here, over), place, here.rank, here.world, *arguments)


def compare(found, expected):
    for rank, (of_rank, wanted) in enumerate(zip(found, expected, strict=True)):
        for step, (got, want) in enumerate(zip(of_rank, wanted, strict=True)):
            for k, (a, b) in enumerate(zip(got, want, strict=True)):
                same(a, b, f"rank {rank}, step {step}, array {k}")


# --- failures ---------------------------------------------------------------------------------------------------------

ONE = Case(segments=(10_001,), steps=2)
ONE_OF = {"onebit": ONE, "int8": replace(ONE, codec=INT8), "int4, one exchange": replace(ONE, codec=INT4, error=None)}


def until(seconds, is_so):
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return is_so()


def last_rank_exits(here, on, over, seconds):
    """Ends the last rank after an exchange of all. The others return the status of the next call, or of
    gc_comm_async_error() after it; its message; the status of one more call; and whether their device still works."""
    place = place_of(here, on)
    comm = comm_of(here, over)
    handle = Handle(comm, place, here.rank, here.world, ONE)
    tensors = handle.put(ONE.gradients(0, here.rank, here.world))
    handle.run(tensors)
    place.wait()
    here.gather()
    if here.rank == here.world - 1:
        os._exit(7)
    told = [0, ""]

    def failed():
        told[0] = told[0] or lib.gc_comm_async_error(comm)
        told[1] = told[1] or (capi.last_error() if told[0] else "")
        return told[0] != 0

    def run():
        return lib.gc_allreduce_run(handle.handle, views(tensors), len(tensors), None, None, place.stream)

    told[0] = run()
    told[1] = capi.last_error() if told[0] else ""
    until(seconds, failed)
    later = run() if told[0] else None
    lib.gc_comm_free(comm)
    handle.free()  # releases the communicator: only then the device is free of the exchange
    place.wait()
    return told[0], told[1], later, still_works(place)


def still_works(place):
    truth = np.random.default_rng(0).random(10_003) < 0.5
    source, bits = place.put(truth), place.put(np.zeros((1, capi.chunk_bytes(truth.size, 1)), np.uint8))
    call("gc_pack_chunks_into", source.view, capi.BIG, bits.view, place.stream)
    place.wait()
    works = place.get(bits).tobytes() == np.packbits(truth).tobytes()
    place.clear()
    return works


def a_rank_does_not_come(here):
    """Lets the first rank miss a call. All abort the communicator that they have lent, as a watchdog does, and make a
    new one. Returns whether the stream waited before, and the steps of a handle after."""
    import torch  # noqa: F401 torch loads its NCCL

    place, nccl = place_of(here, "cuda"), Nccl()
    mine = nccl.communicator(here)
    comm = borrow(mine)
    handle = Handle(comm, place, here.rank, here.world, ONE)
    tensors = handle.put(ONE.gradients(0, here.rank, here.world))
    handle.run(tensors)
    place.wait()
    here.gather()
    waits = False
    if here.rank > 0:
        handle.run(tensors)
        waits = not until(0.5, lambda: driver.raw("cuStreamQuery", c_void_p(place.stream)) != driver.NOT_READY)
    nccl.call("ncclCommAbort", mine)
    place.wait()
    lib.gc_comm_free(comm)
    handle.free()
    place.clear()
    here.gather()
    after = of_id(here)
    steps = steps_of_handle(after, place, here.rank, here.world, ONE)
    lib.gc_comm_free(after)
    return waits, steps


# --- peer memory ------------------------------------------------------------------------------------------------------


def halves_of_handle(comm, place, rank, world, case):
    """Runs steps_of_handle() in halves, and makes another handle between any two calls: its ranks write flags where
    other ranks may still read."""
    found, other = [], Case(segments=(40_001,))
    with Handle(comm, place, rank, world, case) as handle:
        for step in range(case.steps):
            tensors = handle.put(case.gradients(step, rank, world))
            shard = place.put(np.zeros(handle.model.errors(1).size, np.float32))
            call("gc_allreduce_reduce_scatter", handle.handle, views(tensors), len(tensors), None, None, shard.view,
                 place.stream)  # fmt: skip
            Handle(comm, place, rank, world, other).free()
            call("gc_allreduce_all_gather", handle.handle, shard.view, views(tensors), len(tensors), place.stream)
            Handle(comm, place, rank, world, other).free()
            handle.commit()
            place.wait()
            found.append([place.get(tensor).copy() for tensor in tensors])
            place.clear()
        found.append(handle.rest())
        place.clear()
    capi.check(lib.gc_comm_async_error(comm))
    return found


ALTERNATING = {"onebit": {}, "int8": dict(codec=INT8), "int4, without errors": dict(codec=INT4, error=None)}


def alternating(here, over, sizes, times, in_graphs, kind="onebit"):
    """Runs handles of several sizes in turn, each on a stream of its own unless they are in graphs. Returns a digest of
    each handle's values at the end."""
    place, comm = place_of(here, "cuda"), comm_of(here, over)
    cases = [Case(segments=(n,), **ALTERNATING[kind]) for n in sizes]
    handles = [Handle(comm, place, here.rank, here.world, case) for case in cases]
    sources = [handle.put(case.gradients(0, here.rank, here.world)) for handle, case in zip(handles, cases)]
    values = [handle.put(case.gradients(0, here.rank, here.world)) for handle, case in zip(handles, cases)]
    streams = [driver.Stream() for _ in sizes]

    def step(k, stream):
        (source,), (tensor,) = sources[k], values[k]
        to, of = tensor.struct.dl_tensor.data, source.struct.dl_tensor.data
        driver.copy(to, of, source.what.nbytes, stream)
        call("gc_allreduce_run", handles[k].handle, views([tensor]), 1, None, None, stream)

    graphs = []
    for k in range(len(sizes) if in_graphs else 0):
        with driver.Graph(place.stream) as graph:
            step(k, place.stream)
        graphs.append(graph)
    for number in range(times):
        k = number % len(sizes)
        if in_graphs:
            graphs[k].replay(place.stream)
        else:
            step(k, streams[k].handle)
    driver.synchronize()
    found = [hashlib.sha256(place.get(tensor)).hexdigest() for (tensor,) in values]
    capi.check(lib.gc_comm_async_error(comm))
    for graph in graphs:
        graph.destroy()
    for handle in handles:
        handle.free()
    place.clear()
    return found


def alternating_on_the_host(world, sizes, times, kind="onebit"):
    """Returns the digests of alternating() for a group on the CPU, of one rank, since all ranks end alike."""
    host, found = OnHost(), []
    for index, n in enumerate(sizes):
        case = Case(segments=(n,), **ALTERNATING[kind])
        with World(world) as group:

            def run(rank, comm=group.comms, case=case, index=index):
                with Handle(comm[rank], host, rank, world, case) as handle:
                    for _ in range(len(range(index, times, len(sizes)))):
                        tensors = handle.put(case.gradients(0, rank, world))
                        handle.run(tensors)
                    return hashlib.sha256(host.get(tensors[0])).hexdigest()

            found.append(group.each(run)[0])
    return found


def waits_in_vain(here, milliseconds, dies, kind="onebit"):
    """Lets the last rank miss a call after an exchange, or die. The others return: True if values became NaN, the
    flags, the status and its message, the status of one more call, and whether the device still works."""
    place = place_of(here, "cuda")
    comm = over_peers(here, milliseconds)
    handle = Handle(comm, place, here.rank, here.world, ONE_OF[kind])
    tensors = handle.put(ONE_OF[kind].gradients(0, here.rank, here.world))
    handle.run(tensors)
    place.wait()
    here.gather()
    if here.rank == here.world - 1:
        if dies:
            os._exit(7)
        return None
    handle.run(tensors)
    place.wait()
    values, flags = place.get(tensors[0]), place.put(np.zeros(1, np.uint32))
    call("gc_allreduce_flags", handle.handle, flags.view, place.stream)
    place.wait()
    status, sentence = lib.gc_comm_async_error(comm), capi.last_error()
    later = lib.gc_allreduce_run(handle.handle, views(tensors), len(tensors), None, None, place.stream)
    handle.free()
    lib.gc_comm_free(comm)
    return bool(np.isnan(values).all()), int(place.get(flags)[0]), status, sentence, later, still_works(place)


def aborts_while_others_wait(here):
    """Creates an all-reduce on all but the last rank, with a timeout of 10 minutes. The first rank aborts while it
    waits. Returns the status of the creation and of the communicator, and whether the device still works."""
    place = place_of(here, "cuda")
    comm = over_peers(here, 0)
    here.gather()
    statuses = []
    if here.rank < here.world - 1:
        options = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=ONEBIT, device=place.device, n_elements=1000)
        create = functools.partial(lib.gc_allreduce_create, comm, byref(options), byref(POINTER(AllReduce)()))

        main = threading.get_native_id()

        def seen():
            """Returns True if the main thread sleeps, and its CPU time in seconds."""
            state, *fields = pathlib.Path(f"/proc/self/task/{main}/stat").read_text().rpartition(")")[2].split()
            return state == "S", (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")

        def abort():
            asleep, (_, began), now = 0, seen(), 0.0
            # A thread that waits for a GPU sleeps, or runs all the time. It may also sleep until it gets Python's lock.
            while asleep < 100 and now < began + 1:
                sleeps, now = seen()
                asleep = asleep + 1 if sleeps else 0
                os.sched_yield()
            call("gc_comm_abort", comm)

        thread = threading.Thread(target=abort)
        if here.rank == 0:
            thread.start()
        status = create()
        if here.rank == 0:
            thread.join()
        statuses = [status, lib.gc_comm_async_error(comm)]
    here.gather()
    lib.gc_comm_free(comm)
    return *statuses, still_works(place)


def is_gone(process):
    """Returns True if a process has ended, even as a zombie: its files are closed with its last thread."""
    try:
        threads = [one.read_text() for one in pathlib.Path(f"/proc/{process}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has ended meanwhile: look again
    return all(one.rpartition(")")[2].split()[0] in "ZX" for one in threads)


def dies_in_the_middle(here, milliseconds, kind="onebit"):
    """Kills the last rank after its call has signalled the other ranks, which make theirs afterwards: before, its GPU
    would continue the call. The others return the same as in waits_in_vain(), without flags."""
    place = place_of(here, "cuda")
    size = room_for(100_000, here.world)
    comm = over_mapped_peers(here, milliseconds, 100_000)
    handle = Handle(comm, place, here.rank, here.world, ONE_OF[kind])
    tensors = handle.put(ONE_OF[kind].gradients(0, here.rank, here.world))
    handle.run(tensors)
    place.wait()

    def flags():
        return driver.download(here.kept["buffers"][0], 1024).tobytes()

    before = flags()
    *_, last = here.gather(os.getpid())
    if here.rank == here.world - 1:
        handle.run(tensors)
        assert until(20, lambda: flags() != before), f"the buffer of rank 0, of {size} bytes, did not change"
        os._exit(7)
    assert until(20, lambda: flags() != before), "the last rank has sent nothing"
    assert until(20, lambda: is_gone(last)), "the last rank has not ended"
    handle.run(tensors)
    place.wait()
    values = place.get(tensors[0])
    status, sentence = lib.gc_comm_async_error(comm), capi.last_error()
    later = lib.gc_allreduce_run(handle.handle, views(tensors), len(tensors), None, None, place.stream)
    handle.free()
    lib.gc_comm_free(comm)
    return bool(np.isnan(values).all()), status, sentence, later, still_works(place)


def freed_at_once(here, over, case):
    """Runs steps_of_handle() on memory that is freed in the stream's order right after each call. Its next owner
    overwrites it while the other ranks may still be at work."""
    place, comm = place_of(here, "cuda"), comm_of(here, over)
    stream, found = place.stream, []
    with Handle(comm, place, here.rank, here.world, case) as handle:
        steps = [case.gradients(step, here.rank, here.world) for step in range(case.steps)]
        sources = [handle.put(arrays) for arrays in steps]
        results = [handle.put([np.zeros_like(array) for array in arrays]) for arrays in steps]
        driver.synchronize()
        for source, result, arrays in zip(sources, results, steps):
            taken = [driver.Ordered(max(1, array.nbytes), stream) for array in arrays]
            tensors = [
                gpu.at(memory.address, array.shape, dtype_name(array, case.values) or array.dtype.name, index=place.index)
                for memory, array in zip(taken, arrays)
            ]
            for memory, one, array in zip(taken, source, arrays):
                driver.copy(memory.address, one.struct.dl_tensor.data, array.nbytes, stream)
            handle.run(tensors)
            for memory, one, array in zip(taken, result, arrays):
                driver.copy(one.struct.dl_tensor.data, memory.address, array.nbytes, stream)
            for memory in taken:
                memory.free()
            for memory in [driver.Ordered(memory.size, stream) for memory in taken]:
                memory.fill(0xFF)
                memory.free()
        place.wait()
        found = [[place.get(tensor).copy() for tensor in result] for result in results]
        found.append(handle.rest())
        place.clear()
    capi.check(lib.gc_comm_async_error(comm))
    return found


# --- two levels -------------------------------------------------------------------------------------------------------


def over_two(here, on, ways, nodes):
    """Returns a communicator of `nodes` nodes of equal size, which this host's GPUs imitate. `ways`: intra-node and
    inter-node keys of OVER. Over pipes all ranks gather together, so there is one node, or each rank is one."""
    each = here.world // nodes
    first = here.rank // each * each
    of_node = Part(here, on, list(range(first, first + each)))
    alike = Part(here, on, list(range(here.rank % each, here.world, each)))
    intra, inter = OVER[ways[0]](of_node), OVER[ways[1]](alike)
    comm = POINTER(Comm)()
    call("gc_comm_hierarchical", intra, inter, byref(comm))
    lib.gc_comm_free(intra)
    lib.gc_comm_free(inter)
    return comm


class Part:
    """Some of the ranks, as a world of their own; OVER's functions take it as a Here. All worlds gather together."""

    def __init__(self, here, on, ranks):
        self.here, self.ranks, self.kept = here, ranks, {"place": place_of(here, on)}
        self.rank, self.world, self.folder = ranks.index(here.rank), len(ranks), here.folder
        here.kept.setdefault("parts", []).append(self)  # keeps the callbacks

    def gather(self, value=None):
        everything = self.here.gather(value)
        return [everything[rank] for rank in self.ranks]


def steps_over_two(here, on, ways, nodes, case):
    place = place_of(here, on)
    comm = over_two(here, on, ways, nodes)
    found = steps_of_handle(comm, place, here.rank, here.world, case, nodes)
    lib.gc_comm_free(comm)
    return found


def ends_by_a_signal(here):
    """Sends SIGTERM to the first rank while it waits for a rank that does not make the call."""
    place, comm = place_of(here, "cuda"), over_peers(here, 60_000)
    handle = Handle(comm, place, here.rank, here.world, ONE)
    here.gather()
    if here.rank == 0:
        handle.run(handle.put(ONE.gradients(0, here.rank, here.world)))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        place.wait()
    return "there"


def garbage(here, where, milliseconds, kind="onebit"):
    """Overwrites the first rank's buffer after the other ranks' call and before its own: the flags in the first 1,024
    bytes (`where` is "flags"), or the payloads after them."""
    place = place_of(here, "cuda")
    size = room_for(100_000, here.world)
    comm = over_mapped_peers(here, milliseconds, 100_000)
    buffer = here.kept["memory"][-1].address
    with Handle(comm, place, here.rank, here.world, ONE_OF[kind]) as handle:
        tensors = handle.put(ONE_OF[kind].gradients(0, here.rank, here.world))
        handle.run(tensors)
        place.wait()
        if here.rank > 0:
            flags = lambda: driver.download(here.kept["buffers"][0], 1024).tobytes()  # noqa: E731
            before = flags()
            handle.run(tensors)
            assert until(20, lambda: flags() != before)
        here.gather()
        if here.rank == 0:
            noise = np.random.default_rng(0).integers(1, 256, size, np.uint8)
            flag_bytes = 1024
            at, part = (0, noise[:flag_bytes]) if where == "flags" else (flag_bytes, noise[flag_bytes:])
            driver.upload(buffer + at, part)
            handle.run(tensors)
        place.wait()
        values = place.get(tensors[0])
        status = lib.gc_comm_async_error(comm)
    lib.gc_comm_free(comm)
    return bool(np.isnan(values).all()), status, still_works(place)


def refusals_of_buffers(here):
    """Returns statuses and messages of gc_comm_from_peers() for invalid buffers, and for valid ones."""
    place, size = place_of(here, "cuda"), room_for(1000, 2)
    good, dirty = driver.Memory(size), driver.Memory(size)
    for memory in good, dirty:
        driver.fill(memory.address, 0, size)
    driver.fill(dirty.address + 8, 1, 8)
    host = np.zeros(size + 256, np.uint8)
    aligned = -(-host.ctypes.data // 256) * 256
    found = {}
    for name, rank, buffers, how_many in [
        ("too small", 0, (good.address, dirty.address), 1535),
        ("not all 0", 1, (good.address, dirty.address), size),
        ("of the host", 0, (good.address, aligned), size),
        ("not there", 0, (good.address, 1 << 44), size),
        ("NULL", 0, (good.address, None), size),
        ("not aligned", 0, (good.address + 8, good.address), size),
        ("rank", 2, (good.address, dirty.address), size),
        ("the same twice", 0, (good.address, good.address), size),
        ("short", 0, (good.address, dirty.address), size + (64 << 20)),
        ("good", 0, (good.address, dirty.address), size),
    ]:
        options = PeersOptions(
            ctypes.sizeof(PeersOptions), rank, 2, 1, place.device, how_many, (c_void_p * 2)(*buffers)
        )
        comm = POINTER(Comm)()
        found[name] = lib.gc_comm_from_peers(byref(options), byref(comm)), capi.last_error(), bool(comm)
        lib.gc_comm_free(comm)
    return found
