"""A process that is forked while another thread is in a call: the child is told of handles that were in use, may free
them, and goes on with all others."""

import ctypes
import os
import signal
import threading
from ctypes import POINTER, byref

import numpy as np

from capi import AllReduce, Codec, CodecOptions, Comm, DLDevice, Status, Tensor, last_error, lib
from codec_model import ONEBIT, f32
from codecs_c import call, views
from comms import World

CPU = DLDevice(1, 0)
SENTENCE = "was in use when the process was forked"


def in_child(function):
    """What function gives in a forked child, as text; a child that hangs is killed by its alarm."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            text = str(function())
        except BaseException as failure:
            text = repr(failure)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    text = b"".join(iter(lambda: os.read(read, 1 << 16), b"")).decode()
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0, f"the child ended by a signal, after {text!r}"
    return text


def handle_on(comm, n=64):
    options = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=ONEBIT, n_elements=n)
    handle = POINTER(AllReduce)()
    call("gc_allreduce_create", comm, byref(options), byref(handle))
    return handle


def run(handle, n=64):
    tensor = Tensor(np.ones(n, f32))
    return lib.gc_allreduce_run(handle, views([tensor]), 1, None, None, None)


def is_asleep(thread):
    with open(f"/proc/self/task/{thread.native_id}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"


def test_a_group_in_the_middle_of_a_call():
    with World(2) as world, World(1) as other:
        handles = [None, None]

        def create(rank):
            handles[rank] = handle_on(world.comms[rank])

        world.each(create)
        alone = handle_on(other.comms[0])
        first = threading.Thread(target=run, args=(handles[0],))
        first.start()
        # Until rank 0 waits for rank 1: of so few elements there is nothing else in the call to wait for. Before that the
        # child's rank 1 would wait for it.
        while lib.gc_comm_reserve(world.comms[0], CPU, 0) != Status.BUSY or not is_asleep(first):
            os.sched_yield()

        def child():
            found = []
            for call_of_it in (
                lambda: lib.gc_comm_reserve(world.comms[0], CPU, 0),
                lambda: lib.gc_allreduce_reset(handles[0], None),
                lambda: run(handles[0]),
                lambda: run(handles[1]),  # which was not in use, but its group was
            ):
                status = call_of_it()
                found.append((status, SENTENCE in last_error()))
            # Not in use: a handle's errors, and another world.
            found.append([lib.gc_allreduce_reset(handles[1], None), run(alone)])
            for handle in handles:
                lib.gc_allreduce_free(handle)
            for comm in world.comms:
                lib.gc_comm_free(comm)
            return found

        assert in_child(child) == str([(int(Status.INVALID_ARGUMENT), True)] * 4 + [[0, 0]])
        assert run(handles[1]) == Status.OK  # and the parent goes on
        first.join()
        for handle in (*handles, alone):
            lib.gc_allreduce_free(handle)


def test_a_group_that_was_not_in_use_goes_on_in_the_child():
    with World(3) as world:
        handles = [None] * 3

        def create(rank):
            handles[rank] = handle_on(world.comms[rank])

        world.each(create)
        assert in_child(lambda: world.each(lambda rank: run(handles[rank]))) == "[0, 0, 0]"
        assert world.each(lambda rank: run(handles[rank])) == [0, 0, 0]
        for handle in handles:
            lib.gc_allreduce_free(handle)


def test_a_callback_that_forks():
    """In the child the thread that called goes on, in a call that the parent's thread began."""
    found = []
    with World(1) as other, World(2, "board") as world:
        comm = other.comms[0]

        def before(name, rank, sent):
            if rank == 0 and not found:
                found.append(in_child(lambda: (lib.gc_comm_reserve(world.comms[0], CPU, 0), SENTENCE in last_error(),
                                               lib.gc_comm_reserve(comm, CPU, 0))))  # fmt: skip
            return sent

        world.board.before = before
        handles = world.each(lambda rank: handle_on(world.comms[rank]))
        assert found == [str((int(Status.INVALID_ARGUMENT), True, 0))]
        for handle in handles:
            lib.gc_allreduce_free(handle)


def test_a_codec_in_the_middle_of_a_call():
    n = 1 << 24
    options = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=ONEBIT, n_elements=n)
    codec = POINTER(Codec)()
    call("gc_codec_create", byref(options), byref(codec))
    end = threading.Event()

    def reset():
        while not end.is_set():
            assert lib.gc_codec_reset(codec, None) in (Status.OK, Status.BUSY)

    thread = threading.Thread(target=reset)
    thread.start()

    def child():
        status = lib.gc_codec_reset(codec, None)
        found = status, status == Status.OK or SENTENCE in last_error()
        lib.gc_codec_free(codec)
        return found

    try:
        found = {in_child(child) for _ in range(30)}
    finally:
        end.set()
        thread.join()
    lib.gc_codec_free(codec)
    refused, free = str((int(Status.INVALID_ARGUMENT), True)), str((0, True))
    assert refused in found and found <= {refused, free}, found
