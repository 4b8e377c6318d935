"""A training whose ranks die, hang, leave and join, held to a model bit for bit after every step.

    python tests/churn/churn.py [--over TRANSPORT] [--minutes M | --steps N | --deaths N] [--seed S]
    python tests/churn/churn.py --over peers|nccl --processes --devices N    on GPUs, which processes over peers share

Ranks are processes; a communicator's callbacks exchange over sockets between every two of them. "nodes" makes two levels
of such callbacks, in which whole nodes die, too. Over a group, two levels of groups ("hierarchical"), NCCL and peer
memory ranks are threads, and one that dies aborts its communicators. The last two need a
driver; GRADCODEC_DRIVERS names the folder of those without hardware (tests/fakes). With --processes these ranks are
processes, too: when one is gone the coordinator tells the others, whose GPUs wait for it, and they abort.

This process is their coordinator. It draws from the seed who is to fail at which byte of which exchange, asks for
steps, and has the model (tests/python/nodes_model.py). A rank kills itself (SIGKILL), stops (SIGSTOP, and is killed or continued by
the coordinator), leaves, or is killed at any time. When one is gone the others' callbacks fail, because its sockets
end. The survivors roll back, hand out their errors, and go on with them in a new world, into which new ranks come. A
step that did not end is taken again with the same gradients.
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
PATIENCE = 60  # seconds until a rank that says nothing counts as one that hangs
COMM, INVALID_ARGUMENT = gradcodec.Status.COMM, gradcodec.Status.INVALID_ARGUMENT


def gradients(seed, rank_id, step):
    rng = np.random.default_rng([seed, rank_id, step])
    return [rng.standard_normal(n).astype(f32) for n in SEGMENTS]


@dataclass
class Struck:
    """A rank says that it fails now."""

    when: float


class Link:
    """Objects, and descriptors, between the coordinator and a rank."""

    def __init__(self, end):
        self.end = end

    def send(self, what, descriptors=()):
        text = pickle.dumps(what)
        socket.send_fds(self.end, [struct.pack("<Q", len(text))], descriptors)
        self.end.sendall(text)

    def receive(self):
        """What was sent, and descriptors; EOFError when the other end is closed."""
        head, descriptors, _, _ = socket.recv_fds(self.end, 8, MOST)  # they come with the first bytes
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
    """A rank's process: does what the coordinator asks for, and fails as it is told to."""

    def __init__(self, link, seed, rank_id, codec):
        self.link, self.seed, self.id, self.codec = link, seed, rank_id, codec
        self.library = gradcodec.GradCodec()
        self.comm = self.allreduce = self.fault = None
        self.peers, self.levels = [], ()  # `levels`: what the communicator is made of
        self.said = ""  # by the library, of what has failed last
        self.ours = 0  # seconds of this thread in calls that end a world and make one, without the callbacks
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
        """A communicator of some ranks. `has_codes`: it sends payloads, not values."""
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
                    # Not more than the bytes after which this rank is to fail; one way after the other.
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
                    # No more events of what is not waited for: a rank may be gone that has sent all.
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
        """How many bytes this exchange moves until this rank fails; None: it does not fail here."""
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
        """The status with which work fails, or None. Whoever fails hangs up, so that nobody waits for it."""
        self.fault, self.exchanges, self.outside, status, began = fault, 0, 0, None, time.thread_time()
        try:
            work()
            if self.fault:  # it had to fail in an exchange that did not come
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
        """The same on this rank's device."""
        return array

    def get(self, placed):
        return placed

    def run(self, placed):
        self.allreduce.run(placed)

    def release(self):
        """Closes what a world has."""
        if self.allreduce:
            self.allreduce.close()
        for comm in (self.comm, *self.levels):
            if comm:
                comm.close()
        self.comm, self.allreduce, self.levels = None, None, ()
        self.hang_up()
        self.peers = []

    # ---- What the coordinator asks for

    def world(self, rank, size, workers, server, stranger, fault, given, descriptors):
        """A communicator, a handle, and its errors: `workers`, and `server` or those of this rank."""
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
        """Ends a world. If it was made by all, its server errors are those of this rank from now on."""
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
        """Descriptors since this process began, threads since its first world ended."""
        descriptors, threads = count("fd"), count("task")
        self.threads = self.threads or threads
        return descriptors - self.descriptors, threads - self.threads


class Dead(Exception):
    """A thread is a rank that has died."""


class ThreadRank(Rank):
    """A rank that is a thread. It dies by gc_comm_abort: before its call, during it, or from another thread at any
    time."""

    parts, killed, is_aborted = (), False, False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.closing = threading.Lock()

    def show(self, *parts):
        """What the next communicator is made of. By the coordinator, before it asks for one: its aborts are of this from
        then on, whether the rank has begun or not."""
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
        return 0, 0  # of threads the whole process is asked, in the end

    def attempt(self, work, fault):
        """A fault of the first exchange strikes before the call, one of the second during it."""
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
    """That of the wheel, which is not where the loader looks."""
    if not os.environ.get("GRADCODEC_DRIVERS"):
        for folder in sys.path:
            for path in pathlib.Path(folder).glob("nvidia/nccl/lib/libnccl.so.2"):
                ctypes.CDLL(str(path))


class OnGpu:
    """What a rank does that has a GPU, which it may share."""

    bootstrap = None

    def open(self, device, over, by):
        """`by`: the communicator; or, over peer memory, one to find the others; or, over NCCL, the bytes of an id."""
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
        """The GPU waits for the other ranks, and then says whether they came."""
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
    """Another thread aborts when the coordinator says of which world, for the GPU may wait for a rank that is lost."""

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
        self.abort(-1)  # if it has been told meanwhile
        if over == "nccl":
            # All have it before one may fail: nobody can abort what is still being made.
            try:
                self.exchange([b"?"] * self.size, memoryview(bytearray(self.size)))
            except OSError as gone:
                raise ConnectionAbortedError(str(gone)) from gone

    def hang_up(self):
        super().hang_up()
        self.abort(self.number)

    def attempt(self, work, fault):
        """In a step there are no exchanges of ours: the first fault strikes before the call, the second in it or after."""

        def step():
            if fault and fault[1] == 0:
                self.strike()
            elif fault and fault[0] == "kill":
                self.fault = None  # it tells nobody: its link is for one thread
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
        return 0, 0  # what a GPU or another rank may still use is kept


class Member:
    """What the coordinator knows of a rank's process."""

    controlled = None

    def rank_of(self, *arguments):
        return Rank(*arguments)

    def __init__(self, rank_id, seed, codec):
        here, there = socket.socketpair()
        self.id, self.link = rank_id, Link(here)
        # Those of the reducers' errors that it has: of these elements.
        self.worker, self.server, self.places = np.zeros(N, f32), np.zeros(N, f32), np.zeros(0, int)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                # Of the others' ends none may stay here: they would not end with their process.
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
        """The status with which it has ended."""
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
            pass  # it is dead

    def gone(self):
        self.control.close()
        return super().gone()


class ThreadMember:
    """The same of a thread."""

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
        except (Dead, EOFError, BrokenPipeError, ConnectionResetError):  # its link ends when it is killed
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
            self.there.shutdown(socket.SHUT_RDWR)  # it may be waiting to be asked
        except OSError:
            pass  # it has ended


class GpuThreadMember(ThreadMember):
    kind = GpuThread


class Session:
    """Ranks with one codec, until so many steps are done."""

    def __init__(self, seed, codec, over, totals, devices, processes):
        self.seed, self.codec, self.over, self.totals, self.devices = seed, codec, over, totals, devices
        self.processes = processes or over in OVER_SOCKETS
        on_gpus = GpuMember if processes else GpuThreadMember
        self.member = on_gpus if over in ON_GPUS else Member if over in OVER_SOCKETS else ThreadMember
        self.stops = ["stop", "pause"] if self.processes else []  # threads cannot be stopped
        self.members, self.order, self.model = {}, [], None
        self.next_id = self.attempts = self.number = 0
        self.died, self.timers, self.worlds, self.given_up = None, [], 0, 0

    # ---- Asking ranks

    def ask(self, message, ids, doomed=()):
        """What these ranks answer, by id. Those that are doomed are waited for until they are dead."""
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
        """A rank is lost. What GPUs wait for nobody else ends, so all of them abort."""
        self.given_up = self.worlds
        if self.over in ON_GPUS:
            for member in self.members.values():
                member.give_up(self.worlds)

    def note_death(self, when):
        self.died = when if self.died is None else self.died

    # ---- What goes wrong

    def draw_faults(self, rng, ids, share, kinds):
        """Who is to fail: how, in which exchange, at which part of its bytes; how long one is stopped."""
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
        """One of the survivors and as many new processes as are drawn."""
        size = int(rng.integers(LEAST, MOST + 1))
        if self.over in OVER_NODES:
            size = 4 if size <= 4 and len(self.members) <= 4 else 6
        if self.over == "nccl":  # which wants a GPU for each
            size = min(size, self.devices)
        while len(self.members) < size:
            self.members[self.next_id] = self.member(self.next_id, self.seed, self.codec)
            self.next_id += 1
            self.totals["joins"] += 1
        self.order = order = [int(i) for i in rng.permutation(list(self.members))]
        handed_on = rng.random() < 0.7  # the reducers' errors of all survivors, to all; otherwise each has its own
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
            expected = {None}  # all of them agree
        if self.over == "peers" and INVALID_ARGUMENT in statuses:
            expected = expected | {COMM}  # who is told so first aborts, which ends the others' meeting
        assert statuses <= expected, (answers, self.faults, self.where())
        if lost:
            self.close(made=False)
            return
        options = dict(segments=SEGMENTS, error="float32", nonfinite=TRANSACTIONAL)
        self.model = world_model(self.nodes, len(order) // self.nodes, **CODECS[self.codec], **options)
        for rank, i in enumerate(order):
            self.model.errors_of_rank_in(rank, self.workers_for(rank, handed_on), self.members[i].server)

    def workers_for(self, rank, handed_on):
        """Rows of worker errors. Over nodes a row has a part of the elements: all ranks have the rows of all survivors, if
        errors are handed on. Otherwise it is the rank's own row alone, as of a world of one. A flat SUM would divide that
        by the ranks: there it is a row of as many."""
        rows = np.stack([self.members[i].worker for i in self.order])
        if self.nodes > 1 and handed_on:
            return rows
        if self.nodes == 1 and "sum" in self.codec:
            return np.where(np.arange(len(rows))[:, None] == rank, rows, f32(np.nan))
        return rows[[rank]]

    def connections(self, rng):
        """The ends of sockets between every two, by rank; and what else each makes its communicator of."""
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
            parts = [None] * size  # which cannot be sent
        return ends, parts

    def nccl_world(self, size):
        library = self.members[self.order[0]].rank.library
        id = library.nccl_id()
        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(lambda rank: library.nccl_world(id, rank, size, rank), range(size)))

    def take_step(self, rng):
        self.draw_faults(rng, self.order, 0.35, ["kill", "kill", *self.stops, "leave", "blind", "blind"])
        doomed = self.of_kind("kill", "stop", "blind")
        # Whether a step counts that has ended on all survivors although one is gone: by the seed, not by who is faster.
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
            # A step that is taken again sends the same bytes: the model's.
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
        if lost or rng.random() < 0.05:  # or some are to join
            self.close(made=True)

    def sent_by(self, rank, payloads):
        """A checksum of the chunks that a rank sends to others."""
        chunks = self.nodes if self.nodes > 1 else len(self.order)
        own = rank // (len(self.order) // self.nodes) if self.nodes > 1 else rank
        return zlib.crc32(np.delete(np.asarray(payloads[rank]).reshape(chunks, -1), own, axis=0).tobytes())

    def expect_errors(self, i, worker, server):
        model = self.model.models[self.order.index(i)]
        self.expect_same(worker, model.errors(0), f"the worker's errors of {i}")
        self.expect_same(server, model.errors(1), f"the reducer's errors of {i}")

    def close(self, made):
        """Ends the world on all that are left; who wanted to leave does."""
        if self.member is GpuMember:
            # Threads that listen may be late. A rank that has aborted a world keeps its buffer, to which the aborts of
            # others may still write.
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
    """Descriptors or threads of this process; with `most`, once there are not more, or after 10 seconds: a thread that
    has been joined is still on its way out."""
    end = time.monotonic() + 10
    while True:
        found = len(os.listdir(f"/proc/self/{what}"))
        if most is None or found <= most or time.monotonic() > end:
            return found
        os.sched_yield()


def use_drivers(devices):
    """Begins anew where the loader finds the driver without hardware, if there is one. The folder of these."""
    drivers = os.environ.get("GRADCODEC_DRIVERS")
    if drivers and "FAKE_DEVICES" not in os.environ:  # the loader reads its path at the beginning
        fakes = {"LD_LIBRARY_PATH": f"{drivers}/driver", "FAKE_DEVICES": str(devices)}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **fakes})
    return drivers


def on_threads(session, steps, until):
    """A session whose ranks are threads with GPUs. Its totals; what a process gets once, for each GPU, it has before."""
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
    """What it gives in a process of its own, with which the memory goes that an abort keeps until then."""
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
        if over not in ON_GPUS or not given.processes:  # where what GPUs may still use is kept
            line += ", {descriptors} descriptors and {threads} threads leaked"
        line += "; from a death to the next good step at most {longest:.3f} s"
        if over not in ON_GPUS:  # where the thread waits for GPUs, or is one
            line += ", of which the library computes {ours:.4f} s"
        print(f"{line}; seed {{seed}}".format(over=over, seed=given.seed, **totals))
    if failure or any(t[name] for t in all_totals.values() for name in ("hangs", "wrong", "descriptors", "threads")):
        for member in of_session.members.values():
            member.signal(signal.SIGKILL)
        raise SystemExit(failure or 1)


if __name__ == "__main__":
    main()
