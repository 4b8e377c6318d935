"""Tests of tensors for another process: elements that arrive, ends of leases, and messages of a sender."""

import ctypes
import errno
import fcntl
import gc
import itertools
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
from capi import CPU, Managed, Status, check, expect, last_error, lib
from sharing import HOST, LAYOUTS, LONG, SEALS, UntrustedSender, ended, host_message, sealed
import sharing

SOON = 50  # milliseconds that a call waits if nothing arrives


def send(tensor, to):
    return sharing.send(tensor, to, timeout=0)


def receive(at, timeout=0):
    return sharing.receive(at, HOST, timeout)


def refused(at, timeout=0):
    return sharing.refused(at, HOST, timeout)


def array_of(out, dtype):
    view = out.contents.dl_tensor
    shape = view.shape[: view.ndim]
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_uint8 * count).from_address(view.data) if count else b""
    return np.frombuffer(memory, dtype).reshape(shape)


def in_use():
    """Returns the numbers of this process's descriptors, and of its mappings for sharing."""
    maps = Path("/proc/self/maps").read_text().count("memfd:gradcodec")
    return len(os.listdir("/proc/self/fd")), maps


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()  # garbage of other tests
    before = in_use()
    yield
    assert in_use() == before


@pytest.fixture
def ends(nothing_is_left):
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


@pytest.mark.parametrize("layout, dtype", [*zip(LAYOUTS, itertools.cycle(["uint8", "bool", "int16", "float32", "float64"]))])
def test_the_received_tensor_is_the_sent_one(ends, dtype, layout):
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
    ended(lease, 0)


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
values[:] = -1  # in this process alone
ours.sendall(np.float64(total).tobytes())
ours.recv(1)
if sys.argv[2] == "releases":
    lib.gc_tensor_free(out)
    ours.recv(1)  # and lives on
os._exit(0)
"""


@pytest.mark.parametrize("how", ["releases", "dies"])
def test_another_process_receives_a_tensor(how):
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
            command = [sys.executable, "-c", CHILD, str(theirs.fileno()), how]
            child = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        values = np.arange(1000, dtype="f4")
        lease = sharing.send(capi.Tensor(values), ours)
        values[:] = 0  # the child must not get this write
        assert struct.unpack("d", ours.recv(8))[0] == 499500
        assert (values == 0).all()
        expect(lib.gc_share_wait(lease, SOON), Status.TIMEOUT, "not released")
        ours.sendall(b"x")
        status = lib.gc_share_wait(lease, LONG)
        if how == "releases":
            assert status == 0 and child.poll() is None
        else:
            assert status == Status.SHARE and "ended without" in last_error()
        assert lib.gc_share_wait(lease, 0) == status  # in any later call, too
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
    ended(lease, 0)


def test_a_tensor_may_outlive_a_refused_lease(ends):
    tensor = capi.Tensor(np.arange(5, dtype="i4"))
    check(lib.gc_share_send(tensor.managed, ends[0].fileno(), 0, 0, None))
    lib.gc_share_free(send(tensor, ends[0]))
    for _ in range(2):
        got = receive(ends[1])
        np.testing.assert_array_equal(array_of(got, "i4"), np.arange(5))
        lib.gc_tensor_free(got)


def test_a_started_program_inherits_no_descriptor(ends):
    def is_open(number):
        try:
            return fcntl.fcntl(number, fcntl.F_GETFD) is not None
        except OSError:  # the descriptor of the list itself
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
    ended(lease, LONG, Status.SHARE)
    status = lib.gc_share_send(capi.Tensor(np.ones(3)).managed, ends[0].fileno(), 0, LONG, None)
    assert status == Status.SHARE and os.strerror(errno.EPIPE) in last_error()


def test_other_bytes_may_lie_between_messages(ends):
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


def test_a_message_after_the_timeout(ends):
    for blocking in True, False:
        for end in ends:
            end.setblocking(blocking)
        assert refused(ends[1], 0) == refused(ends[1], SOON) == Status.TIMEOUT
        assert ends[1].getblocking() == blocking


def test_a_message_that_nobody_receives(ends):
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    tensor = capi.Tensor(np.ones((1,) * 60))
    for _ in range(1000):
        status = lib.gc_share_send(tensor.managed, ends[0].fileno(), 0, 0, None)
        if status:
            break
    assert status == Status.TIMEOUT, last_error()


@pytest.mark.parametrize("what", ["a file", "a pipe", "datagrams", "TCP", "closed"])
def test_a_socket_of_another_type(what, tmp_path):
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
        expect(status, Status.INVALID_ARGUMENT, at)
    for number in [at, *others][what == "closed" :]:
        os.close(number)


def test_a_socket_that_is_not_connected():
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as alone:
        assert lib.gc_share_send(capi.Tensor(np.ones(3)).managed, alone.fileno(), 0, LONG, None) == Status.SHARE
        assert refused(alone, LONG) in (Status.SHARE, Status.INVALID_ARGUMENT)


# --- messages of an untrusted sender ----------------------------------------------------------------------------------


def test_the_message_of_the_test_is_valid():
    with UntrustedSender() as sender:
        sender.send(host_message(), [sealed(40)])
        got = receive(sender.end)
        assert array_of(got, "f4").tolist() == [0] * 10
        with pytest.raises(BrokenPipeError):
            sender.mine.send(b".")
        lib.gc_tensor_free(got)
        assert sender.answer() == b"\0"


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
def test_an_inconsistent_message(fields, words):
    with UntrustedSender() as sender:
        sender.send(host_message(**fields), [sealed(40)])
        expect(refused(sender.end), Status.CORRUPT, *words)
        assert sender.answer() == b""


def test_a_sender_that_writes_to_the_socket_for_the_answer():
    with UntrustedSender() as sender:
        sender.mine.send(b".")
        sender.send(host_message(), [sealed(40)])
        expect(refused(sender.end), Status.CORRUPT, "last descriptor", "without bytes to read")


def read_only(n_bytes):
    file = sealed(n_bytes)
    other = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    os.close(file)
    return other


@pytest.mark.parametrize("what, n_bytes, files, words", [
    ("one", 40, lambda _: [], ["1 descriptors"]),
    ("three", 40, lambda _: [sealed(40), os.dup(0)], ["3 descriptors"]),
    ("fifty", 40, lambda _: [os.dup(0)] * 49, ["50 descriptors"]),
    ("memory without seals", 40, lambda _: [sealed(40, 0)], [40, "0x0"]),
    ("memory that may shrink", 40, lambda _: [sealed(40, SEALS & ~fcntl.F_SEAL_SHRINK)], [40]),
    ("memory that may grow", 40, lambda _: [sealed(40, SEALS & ~fcntl.F_SEAL_GROW)], [40]),
    ("memory whose seals may change", 40, lambda _: [sealed(40, SEALS & ~fcntl.F_SEAL_SEAL)], [40]),
    ("memory that is sealed for good", 40, lambda _: [sealed(40, SEALS | fcntl.F_SEAL_WRITE)], [40]),
    ("memory to be read only", 40, lambda _: [read_only(40)], [40, "access 0"]),
    ("too little memory", 40, lambda _: [sealed(39)], [39, 40]),
    ("too much memory", 40, lambda _: [sealed(41)], [41, 40]),
    ("a file", 40, lambda folder: [os.open(folder / "file", os.O_RDWR)], [40]),
    ("a socket", 40, lambda _: [socket.socket(socket.AF_UNIX).detach()], [40]),
    # Huge pages may be missing when they are touched. A reader of memory without pages would have to pay for the pages.
    ("memory of huge pages", 2 << 20, lambda _: [sealed(2 << 20, flags=os.MFD_HUGETLB)], ["pages"]),
    ("memory without pages", 4 << 20, lambda _: [sealed(4 << 20, pages=False)], ["0 are allocated"]),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_descriptors_of_other_files(what, n_bytes, files, words, tmp_path):
    (tmp_path / "file").write_bytes(bytes(40))
    with UntrustedSender() as sender:
        sender.send(host_message((n_bytes // 4,), n_bytes), files(tmp_path))
        expect(refused(sender.end), Status.CORRUPT, *words)
        # The message is answered if it has the right number of descriptors.
        assert sender.answer() == (b"" if words[0] in ("1 descriptors", "3 descriptors", "50 descriptors") else bytes([9]))


def test_descriptors_reordered_or_split_or_without_a_socket(ends, tmp_path):
    (tmp_path / "file").write_bytes(bytes(40))
    text, memory = host_message(), sealed(40)
    file, (mine, theirs) = os.open(tmp_path / "file", os.O_RDWR), socket.socketpair()
    with mine, theirs:
        for sent, words in (
            ([(text, [theirs.fileno(), memory])], []),
            ([(text, [memory, file])], ["last descriptor"]),
            ([(text[:32], [memory, theirs.fileno()]), (text[32:], [memory, theirs.fileno()])], ["4 descriptors"]),
        ):
            for part, numbers in sent:
                socket.send_fds(ends[0], [part], numbers)
            expect(refused(ends[1]), Status.CORRUPT, *words)
        ends[0].sendall(text)
        expect(refused(ends[1]), Status.CORRUPT, "0 descriptors")
        theirs.close()
        assert mine.recv(10) == b""
    os.close(memory), os.close(file)


def run_alone(code):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
def test_a_system_call_that_is_forbidden_is_not_an_error_of_the_peer(call):
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
    run_alone(code)


@pytest.mark.parametrize("known", [0, 1, 31, 32, 39])
@pytest.mark.parametrize("then", ["nothing", "closes"])
def test_part_of_a_message(known, then):
    with UntrustedSender() as sender:
        if known:
            sender.send(host_message()[:known], [sealed(40)])
        if then == "closes":
            sender.at.close()
            expect(refused(sender.end, LONG), Status.SHARE, "within a message" if known else "and no message came")
        else:
            expect(refused(sender.end), Status.TIMEOUT)


SO_PASSPIDFD = 76


@pytest.mark.parametrize("option", [socket.SO_PASSCRED, SO_PASSPIDFD])
def test_a_socket_that_passes_credentials(ends, option):
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


def test_an_urgent_byte_and_descriptors_instead_of_an_answer(ends):
    lease = send(capi.Tensor(np.ones(3)), ends[0])
    _, numbers, *_ = socket.recv_fds(ends[1], 1000, 10)
    with socket.socket(fileno=numbers[1]) as answers:
        if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 16):  # has SO_PASSRIGHTS
            with pytest.raises(PermissionError):  # close() of descriptors may wait as long as their sender likes
                socket.send_fds(answers, [b"."], [answers.fileno()])
        answers.send(bytes([Status.CORRUPT]), socket.MSG_OOB)
        expect(lib.gc_share_wait(lease, SOON), Status.SHARE, "GC_STATUS_CORRUPT")
    os.close(numbers[0])
    lib.gc_share_free(lease)


def test_a_message_that_arrives_byte_by_byte():
    with UntrustedSender() as sender:
        text, out = host_message(), []
        thread = threading.Thread(target=lambda: out.append(receive(sender.end, LONG)))
        thread.start()
        sender.send(text[:1], [sealed(40)])
        for at in range(1, len(text)):
            sender.at.sendall(text[at : at + 1])
        thread.join()
        assert out[0].contents.dl_tensor.shape[0] == 10
        lib.gc_tensor_free(out[0])


def test_no_free_descriptor_for_a_message():
    with UntrustedSender() as sender:
        sender.send(host_message(), [sealed(40)])
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), limits[1]))
        filled = []
        try:
            while True:
                filled.append(os.dup(0))
        except OSError:
            status, sentence = refused(sender.end), last_error()
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
    run_alone(code)
