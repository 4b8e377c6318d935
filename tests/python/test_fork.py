"""A process that is forked while another thread is in a call: in the child every call on an inherited handle is refused,
releasing one does nothing, and calls on new handles work."""

import ctypes
import os
import signal
import threading
from ctypes import POINTER, byref

import numpy as np

from capi import Codec, CodecOptions, Status, Tensor, free_all, last_error, lib
from codec_model import ONEBIT, f32
from codecs_c import call
from comms import World, handle_on, run_on

SENTENCE = "was made before the process was forked"


def in_child(function):
    """Returns the function's result in a forked child, as text. An alarm kills a child that hangs."""
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
    with os.fdopen(read) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, f"the child ended by a signal, after {text!r}"
    return text


def run(handle):
    return run_on(handle, Tensor(np.ones(64, f32)))[0]


def refused(*calls):
    return [(call_of_it() == Status.INVALID_ARGUMENT, SENTENCE in last_error()) for call_of_it in calls]


def test_a_fork_during_a_call_of_a_group():
    with World(2) as world:
        handles = world.each(lambda rank: handle_on(world.comms[rank], 64))
        def run_first():
            while run(handles[0]) == Status.BUSY:  # busy with the reset below
                pass

        first = threading.Thread(target=run_first)
        first.start()
        # Wait until rank 0 is in the call, where it waits for rank 1.
        while lib.gc_allreduce_reset(handles[0], None) != Status.BUSY:
            os.sched_yield()

        def child():
            found = refused(*(lambda handle=handle: run(handle) for handle in handles),
                            lambda: lib.gc_comm_abort(world.comms[0]), lambda: lib.gc_allreduce_reset(handles[0], None))  # fmt: skip
            for handle, comm in zip(handles, world.comms):
                lib.gc_allreduce_free(handle)
                lib.gc_comm_free(comm)
            with World(2) as new:
                made = new.each(lambda rank: handle_on(new.comms[rank], 64))
                return found, new.each(lambda rank: run(made[rank]))

        assert in_child(child) == str(([(True, True)] * 4, [0, 0]))
        assert run(handles[1]) == Status.OK  # the parent's call ends
        first.join()
        free_all(handles)


def test_a_fork_during_a_call_of_a_codec():
    options, codec = CodecOptions(struct_size=ctypes.sizeof(CodecOptions), codec=ONEBIT, n_elements=1 << 22), POINTER(Codec)()
    call("gc_codec_create", byref(options), byref(codec))
    end = threading.Event()

    def reset():
        while not end.is_set():
            lib.gc_codec_reset(codec, None)

    thread = threading.Thread(target=reset)
    thread.start()
    try:
        for _ in range(10):
            found = in_child(lambda: (refused(lambda: lib.gc_codec_reset(codec, None)), lib.gc_codec_free(codec)))
            assert found == str(([(True, True)], None))
    finally:
        end.set()
        thread.join()
    lib.gc_codec_free(codec)
