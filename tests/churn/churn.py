"""Tests training whose ranks die, hang, leave and join: compares every step with a model bit for bit.

    python tests/churn/churn.py [--over TRANSPORT] [--minutes M | --steps N | --deaths N] [--seed S]
    python tests/churn/churn.py --over peers|nccl --processes --devices N    on GPUs, which processes over peers share

Each rank is a process, and its communicator's callbacks exchange over sockets between every two ranks. "nodes" makes
two levels of callbacks; whole nodes die, too. Over a group, two levels of groups ("hierarchical"), NCCL and peer memory
each rank is a thread, and a rank that dies aborts its communicators. NCCL and peer memory need a driver;
GRADCODEC_DRIVERS names the folder of the stand-in drivers (tests/fakes). With --processes these ranks are processes,
too. After a death the coordinator makes the other ranks abort, whose GPUs wait for the lost rank.

This process is the coordinator. It draws from the seed which rank fails at which byte of which exchange, requests
steps, and has the model (tests/python/nodes_model.py). A rank kills itself (SIGKILL), stops (SIGSTOP; the coordinator
kills or continues it), leaves, or is killed at any time. Then the other ranks' callbacks fail, because its sockets end.
The survivors roll back, hand out their errors, and continue with them in a new world, which new ranks join. A step that
did not end is repeated with the same gradients.
"""

import argparse
import ctypes
import os
import pathlib
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests/python")]

import gradcodec  # noqa: E402
from block_model import INT8, SUM  # noqa: E402
from codec_model import ONEBIT, TRANSACTIONAL, f32  # noqa: E402
from nodes_model import world_model  # noqa: E402

SEGMENTS = [100, 0, 1500, 70]
N = sum(SEGMENTS)
CODECS = {"onebit": dict(codec=ONEBIT), "int8": dict(codec=INT8), "int8 sum": dict(codec=INT8, reduction=SUM)}
LEAST, MOST = 2, 6  # ranks of a world
TRANSPORTS = "sockets", "nodes", "group", "hierarchical"
OVER_SOCKETS = "sockets", "nodes"
OVER_NODES = "nodes", "hierarchical"
ON_GPUS = "nccl", "peers"
PATIENCE = 60  # seconds without an answer after which a rank counts as hanging
COMM, INVALID_ARGUMENT = gradcodec.Status.COMM, gradcodec.Status.INVALID_ARGUMENT


def gradients(seed, rank_id, step):
    rng = np.random.default_rng([seed, rank_id, step])
    return [rng.standard_normal(n).astype(f32) for n in SEGMENTS]


@dataclass
class Struck:
    """Message of a rank whose fault strikes now."""

    when: float


class Link:
    """Connection between the coordinator and a rank, for objects and file descriptors."""

    def __init__(self, end):
        self.end = end

    def send(self, what, descriptors=()):
        text = pickle.dumps(what)
        socket.send_fds(self.end, [struct.pack("<Q", len(text))], descriptors)
        self.end.sendall(text)

    def receive(self):
        """Returns the object sent and its descriptors. Raises EOFError if the other end is closed."""
        head, descriptors, _, _ = socket.recv_fds(self.end, 8, MOST)  # the descriptors arrive with the first bytes
        if not head:
            raise EOFError
        (left,) = struct.unpack("<Q", head)
        parts = []
        while left:
            parts.append(self.end.recv(left))
            if not parts[-1]:
                raise EOFError
            left -= len(parts[-1])
        return pickle.loads(b"".join(parts)), descriptors


class Rank:
    """Process of a rank. It executes the coordinator's requests, and fails as they direct."""

    def __init__(self, link, seed, rank_id, codec):
        self.link, self.seed, self.id, self.codec = link, seed, rank_id, codec
        self.library = gradcodec.GradCodec()
        self.comm = self.allreduce = self.fault = None
        self.peers, self.levels = [], ()  # `levels`: communicators that `comm` consists of
        self.said = ""  # message of the library for the last failure
        self.ours = 0  # CPU seconds of this thread in calls that end and make worlds, without the callbacks
        self.server = np.zeros(N, f32)

    def serve(self):
        self.descriptors = count("fd")
        self.threads = None
        while True:
            (name, *arguments), descriptors = self.link.receive()
            if name == "end":
                return
            if name == "world":
                arguments.append(descriptors)
            self.link.send(getattr(self, name)(*arguments))

    # ---- The exchanges

    def level(self, members, has_codes=True):
        """Creates a communicator of `members`. `has_codes`: it sends payloads, not values."""
        own, count = members.index(self.rank), len(members)

        def all_to_all(send, recv):
            size = len(send) // count
            blocks = [send[r * size : (r + 1) * size] for r in range(count)]
            if has_codes:
                self.sent = zlib.crc32(b"".join(blocks[:own] + blocks[own + 1 :]))
            self.exchange(blocks, recv, members)

        def all_gather(send, recv):
            self.exchange([send] * count, recv, members)

        return self.library.communicator(own, count, all_to_all, all_gather)

    def exchange(self, blocks, recv, members=None):
        began, peers = time.thread_time(), [self.peers[r] for r in members or range(self.size)]
        size, own = len(recv) // len(peers), peers.index(None)
        recv[own * size : (own + 1) * size] = blocks[own]
        out = {peer: memoryview(blocks[r]) for r, peer in enumerate(peers) if peer}
        into = {peer: recv[r * size : (r + 1) * size] for r, peer in enumerate(peers) if peer}
        left = self.bytes_to_fault(sum(map(len, [*out.values(), *into.values()])))
        self.exchanges += 1
        try:
            poll, files = select.poll(), {peer.fileno(): peer for peer in out}
            for file in files:
                poll.register(file, select.POLLIN | select.POLLOUT)
            while out or into:
                for file, event in poll.poll():
                    peer = files[file]
                    # Send, then receive, at most the bytes that are left until this rank's fault.
                    for way, ready, move in (
                        (out, select.POLLOUT, peer.send),
                        (into, select.POLLIN | select.POLLHUP, peer.recv_into),
                    ):
                        if left == 0:
                            left = None
                            self.strike()
                        if peer in way and event & (ready | select.POLLERR):
                            moved = move(way[peer][:left])
                            if moved == 0:
                                raise ConnectionResetError("a rank is gone")
                            left = None if left is None else left - moved
                            way[peer] = way[peer][moved:]
                            if not way[peer]:
                                del way[peer]
                    # Poll only for the directions that are left: a rank that has sent everything may be gone.
                    wanted = (select.POLLOUT if peer in out else 0) | (select.POLLIN if peer in into else 0)
                    if wanted:
                        poll.modify(file, wanted)
                    else:
                        poll.unregister(file)
            if left == 0:
                self.strike()
        finally:
            self.outside += time.thread_time() - began

    def bytes_to_fault(self, total):
        """Returns how many bytes this exchange moves until this rank fails, or None if it does not fail."""
        if self.fault is None or self.fault[1] != self.exchanges:
            return None
        return round(self.fault[2] * total)

    def strike(self):
        kind, self.fault = self.fault[0], None
        self.link.send(Struck(time.monotonic()))
        if kind == "leave":
            raise ConnectionAbortedError("this rank leaves")
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    def attempt(self, work, fault):
        """Returns the status with which `work` fails, or None. A failing rank hangs up, so no rank waits for it."""
        self.fault, self.exchanges, self.outside, status, began = fault, 0, 0, None, time.thread_time()
        try:
            work()
            if self.fault:  # the exchange of the fault did not take place
                self.strike()
        except (gradcodec.GradCodecError, ConnectionAbortedError) as failure:
            status, self.said = getattr(failure, "status", COMM), str(failure)
            self.hang_up()
            if self.fault:
                try:
                    self.strike()
                except ConnectionAbortedError:
                    pass
        self.ours += time.thread_time() - began - self.outside
        return status

    def connect(self, descriptors):
        sockets = iter([socket.socket(fileno=descriptor) for descriptor in descriptors])
        self.peers = [None if r == self.rank else next(sockets) for r in range(self.size)]
        for peer in self.peers:
            if peer:
                peer.setblocking(False)

    def communicate(self):
        if self.nodes == 1:
            self.comm = self.level(range(self.size))
            return
        ranks = self.size // self.nodes
        node, place = divmod(self.rank, ranks)
        within, across = range(node * ranks, (node + 1) * ranks), range(place, self.size, ranks)
        self.levels = self.level(within, has_codes=False), self.level(across)
        self.comm = self.library.hierarchical(*self.levels)

    def hang_up(self):
        for peer in self.peers:
            if peer:
                peer.close()

    device = gradcodec.CPU, 0

    def put(self, array):
        """Returns the array on this rank's device."""
        return array

    def get(self, placed):
        return placed

    def run(self, placed):
        self.allreduce.run(placed)

    def release(self):
        """Closes the handle, the communicators and the sockets of a world."""
        if self.allreduce:
            self.allreduce.close()
        for comm in (self.comm, *self.levels):
            if comm:
                comm.close()
        self.comm, self.allreduce, self.levels = None, None, ()
        self.hang_up()
        self.peers = []

    # ---- Requests of the coordinator

    def world(self, rank, size, workers, server, stranger, fault, given, descriptors):
        """Creates a communicator and a handle, and loads its errors: `workers`, and `server` or this rank's own."""
        self.rank, self.size, self.given = rank, size, given
        self.nodes = given if isinstance(given, int) else 1
        self.connect(descriptors)
        self.server = self.server if server is None else server

        def make():
            kind, *reduction = self.codec.split()
            self.communicate()
            options = dict(zip(["reduction"], reduction), error="float32", nonfinite="transactional")
            self.allreduce = self.comm.allreduce("int4" if stranger else kind, SEGMENTS, device=self.device, **options)
            self.allreduce.errors_in(self.put(workers), self.put(self.server))

        return self.attempt(make, fault), self.ours, self.said

    def step(self, number, fault):
        self.sent = None
        values = [self.put(gradient) for gradient in gradients(self.seed, self.id, number)]
        status = self.attempt(lambda: self.run(values), fault)
        return status, self.sent, None if status else [self.get(value) for value in values]

    def commit(self):
        self.allreduce.commit()
        return self.errors()

    def errors(self):
        worker, server = self.put(np.zeros(N, f32)), self.put(np.zeros(self.allreduce.shard_elements, f32))
        self.allreduce.errors_out(worker, server)
        return self.get(worker)[None], self.get(server)

    def close(self, made, places):
        """Ends a world. If all ranks have made it, the handle's server errors become this rank's."""
        began, found = time.thread_time(), (None, None)
        if self.allreduce:
            self.allreduce.rollback()
            found = self.errors()
            if made:
                self.server = np.zeros(N, f32)
                self.server[places] = found[1]
        self.release()
        self.ours = time.thread_time() - began
        return *found, *self.leaked()

    def leaked(self):
        """Returns the descriptors opened since this process began, and the threads since its first world ended."""
        descriptors, threads = count("fd"), count("task")
        self.threads = self.threads or threads
        return descriptors - self.descriptors, threads - self.threads


class Dead(Exception):
    """Raised in the thread of a rank that dies."""


class ThreadRank(Rank):
    """A rank that is a thread. It dies by gc_comm_abort: before its call, during it, or from another thread at any
    time."""

    parts, killed, is_aborted = (), False, False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.closing = threading.Lock()

    def show(self, *parts):
        """Sets the communicators of the next world. The coordinator calls it before it requests the world. From then on
        an abort ends these communicators, even if the rank has not begun."""
        self.parts, self.is_aborted = parts, False

    def connect(self, _):
        pass

    def communicate(self):
        self.comm = self.parts[0] if len(self.parts) == 1 else self.library.hierarchical(*self.parts)

    def hang_up(self):
        with self.closing:
            self.is_aborted = True
            for part in self.parts:
                part.abort()

    def release(self):
        with self.closing:
            for owner in (self.allreduce, self.comm, *self.parts):
                if owner:
                    owner.close()
            self.comm, self.allreduce, self.parts = None, None, ()

    def leaked(self):
        return 0, 0  # the threads of the whole process are counted at the end

    def attempt(self, work, fault):
        """Strikes a fault of the first exchange before the call, and a fault of the second exchange during the call."""
        if fault and fault[1] == 0:
            self.fault, work = fault, self.strike
        aborts = threading.Thread(target=self.hang_up) if fault and fault[1] else None
        if aborts:
            aborts.start()
        status = super().attempt(work, fault)
        if aborts:
            aborts.join()
        if self.killed:
            raise Dead
        return status

    def strike(self):
        kind, self.fault = self.fault[0], None
        self.link.send(Struck(time.monotonic()))
        self.hang_up()
        if kind == "kill":
            raise Dead
        raise ConnectionAbortedError("this rank leaves")


def load_nccl():
    """Loads NCCL from its wheel, which is not on the loader's path."""
    if not os.environ.get("GRADCODEC_DRIVERS"):
        for folder in sys.path:
            for path in pathlib.Path(folder).glob("nvidia/nccl/lib/libnccl.so.2"):
                ctypes.CDLL(str(path))


class OnGpu:
    """Methods of a rank with a GPU, which ranks may share."""

    bootstrap = None

    def open(self, device, over, by):
        """Returns the communicator. `by`: over peers, one to find the others; over NCCL, an id or the result."""
        self.device = gradcodec.CUDA, device
        if over == "peers":
            size = max(self.library.allreduce_peers_bytes(kind, SEGMENTS, self.size, error="float32",
                       nonfinite="transactional") for kind in ("onebit", "int8", "int4"))  # fmt: skip
            return self.library.open_peers(by, device, size)
        return self.library.nccl_world(by, self.rank, self.size, device) if isinstance(by, bytes) else by

    def put(self, array):
        return self.library.tensor_to_device(np.ascontiguousarray(array), self.device)

    def get(self, placed):
        return np.array(self.library.tensor_to_device(placed, (gradcodec.CPU, 0)))

    def run(self, placed):
        """Waits for the GPU, which waits for the other ranks, and raises the communicator's asynchronous error."""
        super().run(placed)
        self.get(placed[0])
        self.comm.async_error()


class GpuThread(OnGpu, ThreadRank):
    def show(self, *given):
        super().show(given[2])
        self.shown = given

    def communicate(self):
        self.comm = self.open(*self.shown)
        with self.closing:
            self.parts = tuple({*self.parts, self.comm})
            if self.is_aborted:
                self.comm.abort()


class GpuProcess(OnGpu, Rank):
    """Process with a GPU, which may wait for a lost rank. A thread aborts worlds on the coordinator's request."""

    def __init__(self, *arguments, control=None):
        super().__init__(*arguments)
        self.number, self.aborted, self.opened, self.closing = -1, -1, None, threading.Lock()
        load_nccl()
        threading.Thread(target=self.listen, args=(control,), daemon=True).start()

    def listen(self, control):
        while text := control.recv(8):
            (number,) = struct.unpack("<q", text)
            self.abort(number)

    def abort(self, number):
        with self.closing:
            self.aborted = max(self.aborted, number)
            if self.opened and self.aborted >= self.number:
                self.opened.abort()

    def connect(self, descriptors):
        *self.given, number = self.given
        with self.closing:
            self.number = number
        super().connect(descriptors)

    def communicate(self):
        super().communicate()
        self.bootstrap, (device, over, by) = self.comm, self.given
        self.comm = self.open(device, over, by or self.bootstrap)
        with self.closing:
            self.opened = self.comm
        self.abort(-1)  # an abort may have been requested meanwhile
        if over == "nccl":
            # Wait until all ranks have the communicator: no rank can abort one that is still being made.
            try:
                self.exchange([b"?"] * self.size, memoryview(bytearray(self.size)))
            except OSError as gone:
                raise ConnectionAbortedError(str(gone)) from gone

    def hang_up(self):
        super().hang_up()
        self.abort(self.number)

    def attempt(self, work, fault):
        """Strikes a step's fault before (first exchange), during or after the call: it has no exchanges of ours."""

        def step():
            if fault and fault[1] == 0:
                self.strike()
            elif fault and fault[0] == "kill":
                self.fault = None  # sends no message: only one thread may use the link
                threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGKILL)).start()
            work()

        return super().attempt(work if work.__name__ == "make" else step, fault)

    def release(self):
        with self.closing:
            self.opened = None
        super().release()
        if self.bootstrap:
            self.bootstrap.close()
        self.bootstrap = None

    def new_id(self):
        return self.library.nccl_id()

    def leaked(self):
        return 0, 0  # not counted: memory that a GPU or another rank may still use is kept


class Member:
    """Coordinator's side of a rank's process."""

    controlled = None

    def rank_of(self, *arguments):
        return Rank(*arguments)

    def __init__(self, rank_id, seed, codec):
        here, there = socket.socketpair()
        self.id, self.link = rank_id, Link(here)
        # `server` has the reducers' errors of this rank, which are those of the elements `places`.
        self.worker, self.server, self.places = np.zeros(N, f32), np.zeros(N, f32), np.zeros(0, int)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                # Close the other ranks' sockets: a copy here would keep them open after the end of their process.
                kept = sorted(end.fileno() for end in (there, self.controlled) if end)
                for first, last in zip([2, *kept], [*kept, 1024]):
                    os.closerange(first + 1, last)
                self.rank_of(Link(there), seed, rank_id, codec).serve()
                status = 0
            except (EOFError, ConnectionResetError, BrokenPipeError):
                pass  # the coordinator is gone
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        there.close()

    def gone(self):
        """Waits for the end of the process and returns its status."""
        self.link.end.close()
        return os.waitpid(self.pid, 0)[1]

    def signal(self, number):
        os.kill(self.pid, number)


class GpuMember(Member):
    def __init__(self, *arguments):
        self.control, self.controlled = socket.socketpair()
        super().__init__(*arguments)
        self.controlled.close()

    def rank_of(self, *arguments):
        return GpuProcess(*arguments, control=self.controlled)

    def give_up(self, number):
        try:
            self.control.send(struct.pack("<q", number))
        except OSError:
            pass  # the process is dead

    def gone(self):
        self.control.close()
        return super().gone()


class ThreadMember:
    """Coordinator's side of a rank's thread."""

    kind = ThreadRank

    def __init__(self, rank_id, seed, codec):
        here, self.there = socket.socketpair()
        self.id, self.link, self.status = rank_id, Link(here), None
        self.worker, self.server, self.places = np.zeros(N, f32), np.zeros(N, f32), np.zeros(0, int)
        self.rank = self.kind(Link(self.there), seed, rank_id, codec)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        try:
            self.rank.serve()
            self.status = 0
        except (Dead, EOFError, BrokenPipeError, ConnectionResetError):  # a killed rank's link is shut down
            self.status = int(signal.SIGKILL)
        except BaseException:
            traceback.print_exc()
            self.status = 1
        finally:
            self.rank.hang_up()
            self.rank.release()
            self.there.close()

    def give_up(self, _):
        self.rank.hang_up()

    def gone(self):
        self.thread.join(PATIENCE)
        self.link.end.close()
        return self.status

    def signal(self, _):
        self.rank.killed = True
        self.rank.hang_up()
        try:
            self.there.shutdown(socket.SHUT_RDWR)  # the rank may be waiting for a request
        except OSError:
            pass  # the rank has ended


class GpuThreadMember(ThreadMember):
    kind = GpuThread


class Session:
    """Ranks that train with one codec for a number of steps."""

    def __init__(self, seed, codec, over, totals, devices, processes):
        self.seed, self.codec, self.over, self.totals, self.devices = seed, codec, over, totals, devices
        self.processes = processes or over in OVER_SOCKETS
        on_gpus = GpuMember if processes else GpuThreadMember
        self.member = on_gpus if over in ON_GPUS else Member if over in OVER_SOCKETS else ThreadMember
        self.stops = ["stop", "pause"] if self.processes else []  # threads cannot be stopped
        self.members, self.order, self.model = {}, [], None
        self.next_id = self.attempts = self.number = 0
        self.died, self.timers, self.worlds, self.given_up = None, [], 0, 0

    # ---- Requests to ranks

    def ask(self, message, ids, doomed=()):
        """Returns the ranks' answers to a message, by id. Waits for `doomed` ranks until they are dead."""
        for i in ids:
            self.members[i].link.send(message(i) if callable(message) else message)
        return self.collect(ids, doomed)

    def collect(self, ids, doomed=()):
        answers, waiting, end = {}, set(ids), time.monotonic() + PATIENCE
        while waiting:
            now = time.monotonic()
            for timer in [t for t in self.timers if t[0] <= now]:
                self.timers.remove(timer)
                _, victim, number = timer
                if number == signal.SIGKILL:
                    self.note_death(now)
                self.members[victim].signal(number)
            if now >= end:
                self.totals["hangs"] += len(waiting)
                raise SystemExit(f"ranks {sorted(waiting)} hang, of {sorted(ids)}, {self.where()}")
            ends = {self.members[i].link.end: i for i in waiting}
            left = min([end, *(t[0] for t in self.timers)]) - now
            for file in select.select(list(ends), [], [], max(0, left))[0]:
                i = ends[file]
                try:
                    answer, _ = self.members[i].link.receive()
                except (EOFError, ConnectionResetError):
                    status = self.members.pop(i).gone()
                    if i not in doomed or status != signal.SIGKILL:
                        raise SystemExit(f"rank {i} ended with status {status:#x}, {self.where()}")
                    self.note_death(time.monotonic())
                    self.timers = [t for t in self.timers if t[1] != i]
                    self.totals["deaths"] += 1
                    waiting.discard(i)
                    self.give_up()
                    continue
                if isinstance(answer, Struck):
                    self.struck(i, answer.when)
                elif i not in doomed:
                    answers[i] = answer
                    waiting.discard(i)
        return answers

    def struck(self, i, when):
        kind = self.faults[i][0]
        if kind == "kill":
            self.note_death(when)
        if kind != "pause":
            self.give_up()
        if kind in ("stop", "pause"):
            pid, status = os.waitpid(self.members[i].pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), hex(status)
            then = signal.SIGKILL if kind == "stop" else signal.SIGCONT
            self.timers.append((time.monotonic() + self.faults[i][3], i, then))

    def give_up(self):
        """Marks the world as lost. On GPUs all ranks abort: nothing else ends the wait of a GPU."""
        self.given_up = self.worlds
        if self.over in ON_GPUS:
            for member in self.members.values():
                member.give_up(self.worlds)

    def note_death(self, when):
        self.died = when if self.died is None else self.died

    # ---- Faults

    def draw_faults(self, rng, ids, share, kinds):
        """Draws each victim's fault: kind, exchange, share of the exchange's bytes, seconds before a signal."""
        self.faults = {}
        if rng.random() < share:
            victims = rng.permutation(ids)[: 1 + (len(ids) > 3 and rng.random() < 0.3)]
            if self.over in OVER_NODES and self.model and rng.random() < 0.25:  # all ranks of a node
                victims = np.split(np.array(ids), self.nodes)[rng.integers(0, self.nodes)]
            exchanges = 4 if self.over == "nodes" else 2
            for i in victims:
                where, at = rng.choice([0.0, 1.0, rng.random(), rng.random(), rng.random()]), rng.integers(0, exchanges)
                self.faults[int(i)] = str(rng.choice(kinds)), int(at), float(where), 0.02 * rng.random()

    def of_kind(self, *kinds):
        return {i for i, fault in self.faults.items() if fault[0] in kinds}

    def for_rank(self, i):
        fault = self.faults.get(i)
        return None if fault is None or fault[0] in ("blind", "stranger") else fault

    def where(self):
        return f"{self.codec}, step {self.number}, attempt {self.attempts} of the session with seed {self.seed}"

    # ---- Worlds and steps

    def expect_same(self, got, expected, what):
        got, expected = (np.ascontiguousarray(x).reshape(-1).view(np.uint32) for x in (got, expected))
        assert got.shape == expected.shape, (what, got.shape, expected.shape)
        if wrong := int(np.unpackbits((got ^ expected).view(np.uint8)).sum()):
            self.totals["wrong"] += wrong
            print(f"WRONG: {wrong} bits: {what}, {self.where()}", file=sys.stderr)

    def make_world(self, rng):
        """Makes a world of the survivors and a random number of new ranks."""
        size = int(rng.integers(LEAST, MOST + 1))
        if self.over in OVER_NODES:
            size = 4 if size <= 4 and len(self.members) <= 4 else 6
        if self.over == "nccl":  # NCCL needs a GPU for each rank
            size = min(size, self.devices)
        while len(self.members) < size:
            self.members[self.next_id] = self.member(self.next_id, self.seed, self.codec)
            self.next_id += 1
            self.totals["joins"] += 1
        self.order = order = [int(i) for i in rng.permutation(list(self.members))]
        handed_on = rng.random() < 0.7  # all ranks get the server errors of all survivors, or each its own
        if handed_on:
            union = np.zeros(N, f32)
            for member in self.members.values():
                union[member.places] = member.server[member.places]
            for member in self.members.values():
                member.server, member.places = union, np.arange(N)
        self.draw_faults(rng, order, 0.2, ["kill", "kill", *self.stops, "leave", "stranger"])
        doomed, strangers = self.of_kind("kill", "stop"), self.of_kind("stranger")
        self.worlds += 1
        ends, parts = self.connections(rng)
        for rank, i in enumerate(order):
            given = [end for end in ends[rank] if end]
            member = self.members[i]
            server = member.server if handed_on else None
            workers = self.workers_for(rank, handed_on)
            message = "world", rank, len(order), workers, server, i in strangers, self.for_rank(i), parts[rank]
            member.link.send(message, [end.fileno() for end in given])
            for end in given:
                end.close()
        answers = self.collect(order, doomed)
        statuses = {status for status, *_ in answers.values()}
        self.ours = max([0, *(ours for _, ours, _ in answers.values())])
        lost = doomed | self.of_kind("leave") | strangers
        expected = {None} if not lost else {INVALID_ARGUMENT} if lost == strangers else {None, COMM, INVALID_ARGUMENT}
        if lost == strangers and len(strangers) == len(order):
            expected = {None}  # all ranks have the same codec
        if self.over == "peers" and INVALID_ARGUMENT in statuses:
            expected = expected | {COMM}  # the first rank with this status aborts, which ends the others' wait
        assert statuses <= expected, (answers, self.faults, self.where())
        if lost:
            self.close(made=False)
            return
        options = dict(segments=SEGMENTS, error="float32", nonfinite=TRANSACTIONAL)
        self.model = world_model(self.nodes, len(order) // self.nodes, **CODECS[self.codec], **options)
        for rank, i in enumerate(order):
            self.model.errors_of_rank_in(rank, self.workers_for(rank, handed_on), self.members[i].server)

    def workers_for(self, rank, handed_on):
        """Returns the rows of worker errors for a rank. Over nodes a row has a part of the elements, so errors that are
        handed on are the rows of all survivors. Otherwise it is the rank's own row, as in a world of one. A flat SUM
        would divide this row by the number of ranks, so it gets a row for each rank."""
        rows = np.stack([self.members[i].worker for i in self.order])
        if self.nodes > 1 and handed_on:
            return rows
        if self.nodes == 1 and "sum" in self.codec:
            return np.where(np.arange(len(rows))[:, None] == rank, rows, f32(np.nan))
        return rows[[rank]]

    def connections(self, rng):
        """Returns, by rank, the sockets between every two ranks, and the other arguments of each communicator."""
        size, self.nodes = len(self.order), 1
        ends, parts = [[None] * size for _ in self.order], [None] * size
        if self.processes:
            for one in range(size):
                for other in range(one):
                    ends[one][other], ends[other][one] = socket.socketpair()
        shown = self.devices if self.over == "nccl" or rng.random() < 0.5 else 1
        first = self.members[self.order[0]]
        if self.over in ON_GPUS:
            if not self.processes:
                by = self.nccl_world(size) if self.over == "nccl" else first.rank.library.group(size)
            else:
                asked = self.ask(("new_id",), self.order[:1]) if self.over == "nccl" else {0: None}
                by = list(asked.values()) * size
            parts = [(rank % shown, self.over, by[rank]) for rank in range(size)]
            parts = [(*part, self.worlds) for part in parts] if self.processes else parts
        elif self.over == "group":
            parts = [(comm,) for comm in first.rank.library.group(size)]
        elif self.over in OVER_NODES:
            self.nodes = 2 if size == 4 else int(rng.choice([2, 3]))
            parts = [self.nodes] * size
        if self.over == "hierarchical":
            group, nodes, places = first.rank.library.group, self.nodes, size // self.nodes
            intra, inter = [group(places) for _ in range(nodes)], [group(nodes) for _ in range(places)]
            parts = [(intra[node][place], inter[place][node]) for node in range(nodes) for place in range(places)]
        if not self.processes:
            for i, given in zip(self.order, parts):
                self.members[i].rank.show(*given)
            parts = [None] * size  # communicators cannot be sent
        return ends, parts

    def nccl_world(self, size):
        library = self.members[self.order[0]].rank.library
        id = library.nccl_id()
        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(lambda rank: library.nccl_world(id, rank, size, rank), range(size)))

    def take_step(self, rng):
        self.draw_faults(rng, self.order, 0.35, ["kill", "kill", *self.stops, "leave", "blind", "blind"])
        doomed = self.of_kind("kill", "stop", "blind")
        # The seed, not a race, decides if a step counts that has ended on all survivors after a rank's death.
        keep = rng.random() < 0.5 and self.over in OVER_SOCKETS and not self.of_kind("blind")
        for i in self.order:
            self.members[i].link.send(("step", self.number, self.for_rank(i)))
        for i in self.of_kind("blind"):
            self.timers.append((time.monotonic() + self.faults[i][3] / 4, i, signal.SIGKILL))
        answers = self.collect(self.order, doomed)
        lost = doomed | self.of_kind("leave")
        good = all(status is None for status, _, _ in answers.values())
        assert good or lost, (answers, self.faults)

        given = [gradients(self.seed, i, self.number) for i in self.order]
        chunks = self.model.encoded(given, None, None)
        payloads, models = self.model.sent["encoded"], self.model.models
        for i, (status, sent, _) in answers.items():
            assert status in (None, COMM), status
            # A repeated step sends the same bytes as before: the model's.
            if sent is not None and sent != self.sent_by(self.order.index(i), payloads):
                self.totals["wrong"] += 1
                print(f"WRONG: the payload of {i}, {self.where()}", file=sys.stderr)
        if good and answers and (keep or not lost):
            expected = self.model.finished([model.reduce(mine) for model, mine in zip(models, chunks)])
            for i, (_, _, values) in answers.items():
                of_rank = expected[self.order.index(i)]
                self.expect_same(np.concatenate(values), np.concatenate(of_rank), f"the result of {i}")
            for model in models:
                model.commit()
            for i, (worker, server) in self.ask(("commit",), list(answers)).items():
                self.expect_errors(i, worker, server)
            self.number += 1
            self.totals["steps"] += 1
            if not lost and self.died is not None:
                self.totals["longest"] = max(self.totals["longest"], time.monotonic() - self.died)
                self.totals["ours"] = max(self.totals["ours"], self.ours)
                self.died = None
        else:
            for model in models:
                model.commit(True)
        if lost or rng.random() < 0.05:  # or new ranks are to join
            self.close(made=True)

    def sent_by(self, rank, payloads):
        """Returns a checksum of the chunks that a rank sends to others."""
        chunks = self.nodes if self.nodes > 1 else len(self.order)
        own = rank // (len(self.order) // self.nodes) if self.nodes > 1 else rank
        return zlib.crc32(np.delete(np.asarray(payloads[rank]).reshape(chunks, -1), own, axis=0).tobytes())

    def expect_errors(self, i, worker, server):
        model = self.model.models[self.order.index(i)]
        self.expect_same(worker, model.errors(0), f"the worker's errors of {i}")
        self.expect_same(server, model.errors(1), f"the reducer's errors of {i}")

    def close(self, made):
        """Ends the world on all remaining ranks. Ranks that leave or have other options end, too."""
        if self.member is GpuMember:
            # The threads that receive abort requests may be late, so request the abort again. A rank that aborted a
            # world keeps its buffer, since other ranks' aborts may still write to it.
            self.ask(("abort", self.given_up), list(self.members))
        places = {i: self.model.models[rank].shard_places() if made else None for rank, i in enumerate(self.order)}
        answers = self.ask(lambda i: ("close", made, places[i]), list(self.members))
        for i, (worker, server, descriptors, threads) in answers.items():
            member = self.members[i]
            if made:
                self.expect_errors(i, worker, server)
                model = self.model.models[self.order.index(i)]
                member.worker, member.server, member.places = model.errors(0), np.zeros(N, f32), places[i]
                member.server[places[i]] = model.errors(1)
            self.totals["descriptors"] += max(0, descriptors)
            self.totals["threads"] += max(0, threads)
        self.model = None
        for i in self.of_kind("leave", "stranger") & self.members.keys():
            self.end(i)

    def end(self, i):
        member = self.members.pop(i)
        member.link.send(("end",))
        assert member.gone() == 0

    def run(self, steps, until):
        while self.number < steps and time.monotonic() < until:
            rng = np.random.default_rng([self.seed, self.attempts])
            self.attempts += 1
            if self.model is None:
                self.make_world(rng)
            else:
                self.take_step(rng)
        self.faults = {}
        if self.model:
            self.close(made=True)
        for i in list(self.members):
            self.end(i)


def count(what, most=None):
    """Counts descriptors or threads of this process. With `most`, waits up to 10 seconds until there are not more: a
    thread that has been joined may still be ending."""
    end = time.monotonic() + 10
    while True:
        found = len(os.listdir(f"/proc/self/{what}"))
        if most is None or found <= most or time.monotonic() > end:
            return found
        os.sched_yield()


def use_drivers(devices):
    """Returns the folder of the stand-in drivers, if any. Restarts the program if the loader does not find them yet."""
    drivers = os.environ.get("GRADCODEC_DRIVERS")
    if drivers and "FAKE_DEVICES" not in os.environ:  # the loader reads its path at program start
        fakes = {"LD_LIBRARY_PATH": f"{drivers}/driver", "FAKE_DEVICES": str(devices)}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **fakes})
    return drivers


def on_threads(session, steps, until):
    """Runs a session of threads with GPUs; returns its totals. Allocates first what a process keeps per GPU."""
    library = gradcodec.GradCodec()
    for device in range(session.devices):
        library.tensor_to_device(np.zeros(1, f32), (gradcodec.CUDA, device)).close()
    session.run(1, until)
    descriptors, threads = count("fd"), count("task")
    session.run(steps, until)
    session.totals["descriptors"] += max(0, count("fd", descriptors) - descriptors)
    session.totals["threads"] += max(0, count("task", threads) - threads)
    return session.totals


def in_child(function):
    """Returns the result of `function` from a child process, whose end frees the memory that an abort keeps."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with open(write, "wb") as to:
                pickle.dump(function(), to)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit("a process of threads has failed")
    return pickle.loads(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--over", choices=TRANSPORTS + ON_GPUS, help="one of the transports; otherwise all in turn")
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument("--steps", type=int, help="how many steps")
    parser.add_argument("--session", type=int, default=30, help="steps with one codec, transport and ranks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deaths", type=int, help="how many deaths")
    parser.add_argument("--processes", action="store_true", help="also over nccl or peers")
    parser.add_argument("--devices", type=int, default=6, help="GPUs, which a rank over NCCL has for itself")
    given = parser.parse_args()
    drivers = use_drivers(given.devices)
    transports = [given.over] if given.over else [*TRANSPORTS, *(ON_GPUS if drivers else ())]
    steps = given.steps or (1 << 62 if given.minutes or given.deaths else 100)
    until = time.monotonic() + 60 * given.minutes if given.minutes else float("inf")
    numbers = dict.fromkeys(["steps", "deaths", "joins", "hangs", "wrong", "descriptors", "threads"], 0)
    all_totals = {over: numbers | dict(longest=0.0, ours=0.0) for over in transports}
    failure, session, names = None, 0, list(CODECS)
    try:
        while (left := steps - sum(totals["steps"] for totals in all_totals.values())) > 0 and time.monotonic() < until:
            if given.deaths and sum(totals["deaths"] for totals in all_totals.values()) >= given.deaths:
                break
            over = list(all_totals)[session // len(names) % len(all_totals)]
            totals, descriptors, threads = all_totals[over], count("fd"), count("task")
            codec, on = names[session % len(names)], (given.devices, given.processes)
            of_session = Session(1000 * given.seed + session, codec, over, totals, *on)
            if over in ON_GPUS and not given.processes:
                totals.update(in_child(lambda: on_threads(of_session, min(given.session, left), until)))
            else:
                of_session.run(min(given.session, left), until)
            totals["descriptors"] += max(0, count("fd", descriptors) - descriptors)
            totals["threads"] += max(0, count("task", threads) - threads)
            session += 1
    except SystemExit as ended:
        failure = str(ended)
    for over, totals in all_totals.items():
        line = "{over}: {steps} steps, {deaths} deaths, {joins} joins, {hangs} hangs, {wrong} wrong bits"
        if over not in ON_GPUS or not given.processes:  # processes on GPUs keep memory that a GPU may still use
            line += ", {descriptors} descriptors and {threads} threads leaked"
        line += "; from a death to the next good step at most {longest:.3f} s"
        if over not in ON_GPUS:  # a thread waits for its GPU, or executes the stand-in's work
            line += ", of which the library computes {ours:.4f} s"
        print(f"{line}; seed {{seed}}".format(over=over, seed=given.seed, **totals))
    if failure or any(t[name] for t in all_totals.values() for name in ("hangs", "wrong", "descriptors", "threads")):
        for member in of_session.members.values():
            member.signal(signal.SIGKILL)
        raise SystemExit(failure or 1)


if __name__ == "__main__":
    main()
