"""Tensors for another process: what arrives, who is told, and what a stranger may send."""

import ctypes
import errno
import fcntl
import gc
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
from ctypes import byref
from pathlib import Path

import numpy as np
import pytest

import capi
from capi import CPU, DLDataType, DLDevice, Managed, Share, Status, check, last_error, lib

HOST = DLDevice(CPU, 0)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SOON = 50  # milliseconds that a call waits where nothing comes
LONG = 60_000  # what the tests do not wait for


def send(tensor, to, timeout=0, flags=0):
    lease = ctypes.POINTER(Share)()
    check(lib.gc_share_send(tensor.managed, to.fileno(), flags, timeout, byref(lease)))
    return lease


def receive(at, timeout=0):
    out = Managed()
    check(lib.gc_share_receive(at.fileno(), HOST, timeout, byref(out)))
    return out


def refused(at, timeout=0):
    out = Managed()
    status = lib.gc_share_receive(at.fileno(), HOST, timeout, byref(out))
    assert not out
    return status, last_error()


def array_of(out, dtype):
    view = out.contents.dl_tensor
    shape = view.shape[: view.ndim]
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_uint8 * count).from_address(view.data) if count else b""
    return np.frombuffer(memory, dtype).reshape(shape)


def in_use():
    """Descriptors and mappings of this process that are of sharing."""
    maps = Path("/proc/self/maps").read_text().count("memfd:gradcodec")
    return len(os.listdir("/proc/self/fd")), maps


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()  # what other tests have left
    before = in_use()
    yield
    assert in_use() == before


@pytest.fixture
def ends(nothing_is_left):
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


LAYOUTS = {
    "compact": lambda a: a,
    "transposed": lambda a: a.transpose(2, 0, 1),
    "every other": lambda a: a[::2, :, 1::3],
    "reversed": lambda a: a[::-1, ::-2],
    "broadcast": lambda a: np.broadcast_to(a[:, :1, :1], a.shape),
    "an axis more": lambda a: a[:, None, 2:3],
    "empty": lambda a: a[:, 3:3],
    "one element": lambda a: a[1, 2, 3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["uint8", "bool", "int16", "float32", "float64"])
def test_what_arrives_is_what_was_sent(ends, dtype, layout):
    whole = np.random.default_rng(3).integers(0, 255, (6, 7, 10)).astype(dtype)
    sent = LAYOUTS[layout](whole)
    lease = send(capi.Tensor(sent), ends[0])
    got = receive(ends[1])
    view = got.contents.dl_tensor
    assert (view.device.device_type, view.device.device_id, view.byte_offset) == (CPU, 0, 0)
    assert (view.dtype.code, view.dtype.bits, view.dtype.lanes) == tuple(
        getattr(capi.Tensor(sent).struct.dl_tensor.dtype, field) for field in ("code", "bits", "lanes")
    )
    assert view.data is None if sent.size == 0 else view.data % 256 == 0
    np.testing.assert_array_equal(array_of(got, dtype), sent)
    lib.gc_tensor_free(got)
    check(lib.gc_share_wait(lease, 0))
    lib.gc_share_free(lease)


def test_elements_of_less_than_a_byte_and_of_several_lanes(ends):
    memory = np.random.default_rng(4).integers(0, 255, 24).astype(np.uint8)
    for dtype, shape, n_bytes in [
        (DLDataType(1, 4, 1), (3, 5), 8),
        (DLDataType(2, 16, 3), (4,), 24),
        (DLDataType(17, 4, 2), (9,), 9),
    ]:
        tensor = capi.Tensor(memory)
        view = tensor.struct.dl_tensor
        view.dtype, view.ndim, view.shape, view.strides = dtype, len(shape), capi.int64s(shape), None
        lease = send(tensor, ends[0])
        got = receive(ends[1])
        assert ctypes.string_at(got.contents.dl_tensor.data, n_bytes) == memory[:n_bytes].tobytes()
        lib.gc_tensor_free(got)
        lib.gc_share_free(lease)
    view.dtype, view.ndim, view.shape, view.strides = DLDataType(1, 4, 1), 2, capi.int64s((2, 2)), capi.int64s((4, 1))
    assert lib.gc_share_send(tensor.managed, ends[0].fileno(), 0, 0, None) == Status.NOT_CONTIGUOUS
    assert "4 bits" in last_error()


CHILD = """
import ctypes, os, socket, sys
import numpy as np
import capi
from capi import CPU, DLDevice, Managed, check, lib
ours = socket.socket(fileno=int(sys.argv[1]))
out = Managed()
check(lib.gc_share_receive(ours.fileno(), DLDevice(CPU, 0), 60_000, ctypes.byref(out)))
view = out.contents.dl_tensor
values = np.frombuffer((ctypes.c_float * 1000).from_address(view.data), "f4")
total = float(values.sum())
values[:] = -1  # nobody else sees it
ours.sendall(np.float64(total).tobytes())
ours.recv(1)
if sys.argv[2] == "releases":
    lib.gc_tensor_free(out)
    ours.recv(1)  # and lives on
os._exit(0)
"""


@pytest.mark.parametrize("how", ["releases", "dies"])
def test_another_process(how):
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
            command = [sys.executable, "-c", CHILD, str(theirs.fileno()), how]
            child = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        values = np.arange(1000, dtype="f4")
        lease = send(capi.Tensor(values), ours, LONG)
        values[:] = 0  # nor does the child see this
        assert struct.unpack("d", ours.recv(8))[0] == 499500
        assert (values == 0).all()
        assert lib.gc_share_wait(lease, SOON) == Status.TIMEOUT and "not released" in last_error()
        ours.sendall(b"x")
        status = lib.gc_share_wait(lease, LONG)
        if how == "releases":
            assert status == 0 and child.poll() is None
        else:
            assert status == Status.SHARE and "ended without" in last_error()
        assert lib.gc_share_wait(lease, 0) == status  # as often as one likes
        ours.shutdown(socket.SHUT_RDWR)
        assert child.wait() == 0
        lib.gc_share_free(lease)


def test_a_child_that_has_inherited_a_tensor_does_not_release_it(ends):
    lease = send(capi.Tensor(np.ones(10, "f4")), ends[0])
    got = receive(ends[1])
    pid = os.fork()
    if not pid:
        lib.gc_tensor_free(got)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert lib.gc_share_wait(lease, 0) == Status.TIMEOUT
    assert (array_of(got, "f4") == 1).all()
    lib.gc_tensor_free(got)
    check(lib.gc_share_wait(lease, 0))
    lib.gc_share_free(lease)


def test_a_lease_may_be_refused_and_a_tensor_outlive_it(ends):
    tensor = capi.Tensor(np.arange(5, dtype="i4"))
    check(lib.gc_share_send(tensor.managed, ends[0].fileno(), 0, 0, None))
    lib.gc_share_free(send(tensor, ends[0]))
    for _ in range(2):
        got = receive(ends[1])
        np.testing.assert_array_equal(array_of(got, "i4"), np.arange(5))
        lib.gc_tensor_free(got)


def test_the_receivers_refusal_is_told(ends):
    lease = send(capi.Tensor(np.ones(3)), ends[0])
    out = Managed()
    status = lib.gc_share_receive(ends[1].fileno(), DLDevice(capi.CUDA, 0), 0, byref(out))
    assert status == Status.INVALID_ARGUMENT and not out and "cuda:0" in last_error()
    assert lib.gc_share_wait(lease, 0) == Status.SHARE and "GC_STATUS_INVALID_ARGUMENT" in last_error()
    lib.gc_share_free(lease)
    lib.gc_share_free(send(capi.Tensor(np.ones(3)), ends[0]))  # the socket is as good as before
    lib.gc_tensor_free(receive(ends[1]))


def test_no_descriptor_goes_to_a_program_that_is_started(ends):
    def is_open(number):
        try:
            return fcntl.fcntl(number, fcntl.F_GETFD) is not None
        except OSError:  # that of the list itself
            return False

    def numbers():
        return {int(number) for number in os.listdir("/proc/self/fd") if is_open(int(number))}

    before = numbers()
    lease = send(capi.Tensor(np.ones(3)), ends[0])
    sent = numbers() - before
    got = receive(ends[1])
    received = numbers() - before - sent
    assert sent and received
    assert [number for number in sent | received if not fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC] == []
    lib.gc_tensor_free(got)
    lib.gc_share_free(lease)


def test_a_receiver_that_closes_its_socket_is_noticed(ends):
    lease = send(capi.Tensor(np.ones(3)), ends[0])
    ends[1].close()
    assert lib.gc_share_wait(lease, LONG) == Status.SHARE
    lib.gc_share_free(lease)
    status = lib.gc_share_send(capi.Tensor(np.ones(3)).managed, ends[0].fileno(), 0, LONG, None)
    assert status == Status.SHARE and os.strerror(errno.EPIPE) in last_error()


def test_bytes_of_the_program_lie_between_messages(ends):
    for at in range(3):
        ends[0].sendall(b"before %d" % at)
        lib.gc_share_free(send(capi.Tensor(np.full(at, at)), ends[0]))
        ends[0].sendall(b"after")
    for at in range(3):
        assert ends[1].recv(8) == b"before %d" % at
        got = receive(ends[1])
        np.testing.assert_array_equal(array_of(got, "i8"), np.full(at, at))
        lib.gc_tensor_free(got)
        assert ends[1].recv(5) == b"after"


@pytest.mark.parametrize("blocking", [True, False])
def test_nothing_comes_in_time(ends, blocking):
    for end in ends:
        end.setblocking(blocking)
    assert refused(ends[1], 0)[0] == refused(ends[1], SOON)[0] == Status.TIMEOUT
    assert ends[1].getblocking() == blocking


def test_a_message_that_is_not_taken(ends):
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    tensor = capi.Tensor(np.ones((1,) * 60))
    for _ in range(1000):
        status = lib.gc_share_send(tensor.managed, ends[0].fileno(), 0, 0, None)
        if status:
            break
    assert status == Status.TIMEOUT, last_error()


def test_a_thousand_tensors_leave_nothing_behind(ends):
    tensor, seen = capi.Tensor(np.ones(5000, "f4")), []
    for _ in range(1000):
        lease = send(tensor, ends[0])
        got = receive(ends[1])
        lib.gc_tensor_free(got)
        check(lib.gc_share_wait(lease, 0))
        lib.gc_share_free(lease)
        seen.append(in_use())
    assert len(set(seen)) == 1


@pytest.mark.parametrize("what", ["a file", "a pipe", "datagrams", "TCP", "closed"])
def test_a_socket_that_is_none_of_these(what, tmp_path):
    def closed():
        number = os.dup(0)
        os.close(number)
        return number

    at, *others = {
        "a file": lambda: [os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)],
        "a pipe": os.pipe,
        "datagrams": lambda: [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach()],
        "TCP": lambda: [socket.socket(socket.AF_INET, socket.SOCK_STREAM).detach()],
        "closed": lambda: [closed()],
    }[what]()
    out = Managed()
    for status in (
        lib.gc_share_send(capi.Tensor(np.ones(3)).managed, at, 0, LONG, None),
        lib.gc_share_receive(at, HOST, LONG, byref(out)),
    ):
        assert status == Status.INVALID_ARGUMENT and str(at) in last_error(), last_error()
    for number in [at, *others][what == "closed" :]:
        os.close(number)


def test_a_socket_that_is_not_connected():
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as alone:
        assert lib.gc_share_send(capi.Tensor(np.ones(3)).managed, alone.fileno(), 0, LONG, None) == Status.SHARE
        assert refused(alone, LONG)[0] in (Status.SHARE, Status.INVALID_ARGUMENT)


# --- what a stranger sends --------------------------------------------------------------------------------------------


def memory(n_bytes, seals=SEALS):
    file = os.memfd_create("gradcodec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(file, 0, n_bytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def message(shape=(10,), n_bytes=40, dtype=(2, 32, 1), magic=b"GCSH", version=1, device=1, ndim=None, length=None):
    ndim, length = len(shape) if ndim is None else ndim, 32 + 8 * len(shape) if length is None else length
    return struct.pack("=4sIIIiBBHq", magic, version, length, ndim, device, *dtype, n_bytes) + struct.pack(
        f"={len(shape)}q", *shape
    )


class Stranger:
    """Sends bytes and descriptors, and keeps the end on which it is answered."""

    def __init__(self, at):
        self.at, (self.mine, self.theirs) = at, socket.socketpair()

    def send(self, text, descriptors=None):
        made = [memory(40)] if descriptors is None else []
        numbers = [*made, self.theirs.fileno()] if descriptors is None else descriptors
        socket.send_fds(self.at, [text], numbers) if numbers else self.at.sendall(text)
        for number in made:
            os.close(number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.mine.close()
        self.theirs.close()

    def answer(self):
        self.theirs.close()
        return self.mine.recv(10)


def test_a_message_of_the_test_is_a_good_one(ends):
    with Stranger(ends[0]) as stranger:
        stranger.send(message())
        got = receive(ends[1])
        assert array_of(got, "f4").tolist() == [0] * 10
        lib.gc_tensor_free(got)
        assert stranger.answer() == b"\0"


@pytest.mark.parametrize("fields, words", [
    (dict(magic=b"GCSI"), ["GCSH"]),
    (dict(version=0), ["version 1"]),
    (dict(version=2), ["version 1"]),
    (dict(length=39), [39]),
    (dict(length=41), [41]),
    (dict(length=2**32 - 1), [2**32 - 1]),
    (dict(ndim=2), [40, 2]),
    (dict(ndim=65, length=32 + 8 * 65), [65]),
    (dict(ndim=2**29 + 1, length=40), [2**29 + 1]),
    (dict(ndim=2**32 - 1), [2**32 - 1]),
    (dict(device=2), [2]),
    (dict(device=-1), []),
    (dict(dtype=(2, 0, 1)), ["0 bits"]),
    (dict(dtype=(2, 32, 0)), ["0 lanes"]),
    (dict(dtype=(2, 255, 65535)), [40]),
    (dict(n_bytes=41), [41, 40]),
    (dict(n_bytes=-40), [-40]),
    (dict(n_bytes=2**63 - 1), [2**63 - 1]),
    (dict(shape=(-10,)), [-10]),
    (dict(shape=(11,)), [44, 40]),
    (dict(shape=(2**62, 2**62)), ["2^63"]),
    (dict(shape=(2**61,)), ["2^63"]),
    (dict(shape=(2**63 - 1, 0, 2**63 - 1)), [0]),
])  # fmt: skip
def test_a_message_that_does_not_hold_together(ends, fields, words):
    with Stranger(ends[0]) as stranger:
        stranger.send(message(**fields))
        status, sentence = refused(ends[1])
        assert status == Status.CORRUPT, sentence
        assert all(str(word) in sentence for word in words), sentence
        assert stranger.answer() == b""


@pytest.mark.parametrize("what, words", [
    ("none", ["0 descriptors"]),
    ("one", ["1 descriptors"]),
    ("three", ["3 descriptors"]),
    ("fifty", ["50 descriptors"]),
    ("two and two later", ["4 descriptors"]),
    ("memory without seals", [40, "0x0"]),
    ("memory that may shrink", [40]),
    ("memory that may grow", [40]),
    ("memory whose seals may change", [40]),
    ("memory that is sealed for good", [40]),
    ("memory to be read only", [40, "access 0"]),
    ("too little memory", [39, 40]),
    ("too much memory", [41, 40]),
    ("a file", [40]),
    ("a socket", [40]),
    ("answers to a file", ["last descriptor"]),
    ("the wrong order", []),
])  # fmt: skip
def test_descriptors_that_are_not_what_they_should_be(ends, what, words, tmp_path):
    (tmp_path / "file").write_bytes(bytes(40))
    made = []

    def own(number):
        made.append(number)
        return number

    with Stranger(ends[0]) as stranger:
        answers = stranger.theirs.fileno()
        descriptors = {
            "none": lambda: [],
            "one": lambda: [own(memory(40))],
            "three": lambda: [own(memory(40)), answers, answers],
            "fifty": lambda: [own(memory(40))] + [answers] * 49,
            "two and two later": lambda: [own(memory(40)), answers],
            "memory without seals": lambda: [own(memory(40, 0)), answers],
            "memory that may shrink": lambda: [own(memory(40, SEALS & ~fcntl.F_SEAL_SHRINK)), answers],
            "memory that may grow": lambda: [own(memory(40, SEALS & ~fcntl.F_SEAL_GROW)), answers],
            "memory whose seals may change": lambda: [own(memory(40, SEALS & ~fcntl.F_SEAL_SEAL)), answers],
            "memory that is sealed for good": lambda: [own(memory(40, SEALS | fcntl.F_SEAL_WRITE)), answers],
            "memory to be read only": lambda: [own(os.open(f"/proc/self/fd/{own(memory(40))}", os.O_RDONLY)), answers],
            "too little memory": lambda: [own(memory(39)), answers],
            "too much memory": lambda: [own(memory(41)), answers],
            "a file": lambda: [own(os.open(tmp_path / "file", os.O_RDWR)), answers],
            "a socket": lambda: [answers, answers],
            "answers to a file": lambda: [own(memory(40)), own(os.open(tmp_path / "file", os.O_RDWR))],
            "the wrong order": lambda: [answers, own(memory(40))],
        }[what]()
        text = message()
        stranger.send(text[: 32 if what == "two and two later" else None], descriptors)
        if what == "two and two later":
            stranger.send(text[32:], descriptors)
        status, sentence = refused(ends[1])
        for number in made:
            os.close(number)
        assert status == Status.CORRUPT and all(str(word) in sentence for word in words), sentence
        mapped = what.startswith(("memory", "too")) or what in ("a file", "a socket")
        assert stranger.answer() == (bytes([Status.CORRUPT]) if mapped else b"")


def test_memory_of_huge_pages_is_refused(ends):
    # There may be none of them when they are touched.
    huge = 2 << 20
    file = os.memfd_create("gradcodec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.truncate(file, huge)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    with Stranger(ends[0]) as stranger:
        stranger.send(message(shape=(huge // 4,), n_bytes=huge), [file, stranger.theirs.fileno()])
        os.close(file)
        status, sentence = refused(ends[1])
        assert status == Status.CORRUPT and "pages" in sentence, sentence
        assert stranger.answer() == bytes([Status.CORRUPT])


def test_memory_without_pages_is_refused(ends):
    # Whoever reads it would pay for them.
    file = os.memfd_create("gradcodec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(file, 4 << 20)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    with Stranger(ends[0]) as stranger:
        stranger.send(message((1 << 20,), 4 << 20), [file, stranger.theirs.fileno()])
        os.close(file)
        status, sentence = refused(ends[1])
        assert status == Status.CORRUPT and "0 are allocated" in sentence, sentence
        assert stranger.answer() == bytes([Status.CORRUPT])


FORBID = """
import ctypes, platform, struct
def forbid(call):
    number = {"fallocate": (285, 47), "fstatfs": (138, 44)}[call][platform.machine() == "aarch64"]
    steps = (0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)  # EPERM
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
"""


@pytest.mark.parametrize("call", ["fallocate", "fstatfs"])
def test_a_system_call_that_is_forbidden_is_nobody_elses_fault(call):
    code = FORBID + f"""
import socket
import numpy as np
import capi
from capi import CPU, DLDevice, Managed, Status, last_error, lib
one, other = socket.socketpair()
tensor, out = capi.Tensor(np.ones(3)), Managed()
forbid({call!r})
status = lib.gc_share_send(tensor.managed, one.fileno(), 0, 0, None)
if {call!r} == "fstatfs":
    assert status == 0
    status = lib.gc_share_receive(other.fileno(), DLDevice(CPU, 0), 0, ctypes.byref(out))
assert status == Status.SHARE and {call!r} in last_error(), (status, last_error())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("known", range(0, 40))
@pytest.mark.parametrize("then", ["nothing", "closes"])
def test_part_of_a_message(ends, known, then):
    with Stranger(ends[0]) as stranger:
        if known:
            stranger.send(message()[:known])
        if then == "closes":
            ends[0].close()
        status, sentence = refused(ends[1], 0 if then == "nothing" else LONG)
        assert status == (Status.TIMEOUT if then == "nothing" else Status.SHARE), sentence
        assert then == "nothing" or sentence.endswith("within a message" if known else "and no message came")


SO_PASSPIDFD = 76


@pytest.mark.parametrize("option", [socket.SO_PASSCRED, SO_PASSPIDFD])
def test_a_socket_that_tells_who_sends(ends, option):
    try:
        ends[1].setsockopt(socket.SOL_SOCKET, option, 1)
    except OSError as refusal:
        assert option == SO_PASSPIDFD and refusal.errno == errno.ENOPROTOOPT  # before Linux 6.5
        return
    sent = np.arange(24.0).reshape(2, 3, 4)
    lib.gc_share_free(send(capi.Tensor(sent), ends[0]))
    got = receive(ends[1])
    np.testing.assert_array_equal(array_of(got, "f8"), sent)
    lib.gc_tensor_free(got)


def test_an_urgent_byte_in_place_of_an_answer(ends):
    lease = send(capi.Tensor(np.ones(3)), ends[0])
    _, numbers, *_ = socket.recv_fds(ends[1], 1000, 10)
    with socket.socket(fileno=numbers[1]) as answers:
        answers.send(bytes([Status.CORRUPT]), socket.MSG_OOB)
        assert lib.gc_share_wait(lease, SOON) == Status.SHARE and "GC_STATUS_CORRUPT" in last_error()
    os.close(numbers[0])
    lib.gc_share_free(lease)


def test_a_message_that_comes_byte_by_byte(ends):
    with Stranger(ends[0]) as stranger:
        text, out = message(), []
        thread = threading.Thread(target=lambda: out.append(receive(ends[1], LONG)))
        thread.start()
        stranger.send(text[:1])
        for at in range(1, len(text)):
            stranger.send(text[at : at + 1], [])
        thread.join()
        assert out[0].contents.dl_tensor.shape[0] == 10
        lib.gc_tensor_free(out[0])


def test_no_descriptor_left_for_what_comes(ends):
    with Stranger(ends[0]) as stranger:
        stranger.send(message())
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), limits[1]))
        filled = []
        try:
            while True:
                filled.append(os.dup(0))
        except OSError:
            status, sentence = refused(ends[1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for number in filled:
                os.close(number)
        assert status == Status.SHARE and "RLIMIT_NOFILE" in sentence, sentence


def test_no_memory_to_share():
    code = f"""
import ctypes, resource, socket
import numpy as np
import capi
from capi import Status, last_error, lib
one, other = socket.socketpair()
tensor = capi.Tensor(np.broadcast_to(np.uint8(1), (2**62,)))
status = lib.gc_share_send(tensor.managed, one.fileno(), 0, 0, None)
assert status == Status.OUT_OF_MEMORY and str(2**62) in last_error(), (status, last_error())
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tensor = capi.Tensor(np.zeros(2 << 20, np.uint8))
status = lib.gc_share_send(tensor.managed, one.fileno(), 0, 0, None)
assert status == Status.OUT_OF_MEMORY and str(2 << 20) in last_error(), (status, last_error())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
