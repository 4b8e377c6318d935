"""include/gradcodec/c10d.hpp: a communicator over a process group of torch.distributed, between processes over gloo."""

import os
import pathlib
import traceback

import pytest
import torch
import torch.distributed as dist
import torch_ops

HERE = pathlib.Path(__file__).resolve().parent
WORLDS = 2, 4
# Shapes: one element, odd sizes, more dimensions, several blocks of a kernel. Values: float32 and 16 bits.
SHAPES = [(1,), (33, 5), (1, 1, 3), (20_003,)]
STEPS, TENSORS_OF_A_STEP = 3, len(SHAPES) + 2
COMM = 31


@pytest.fixture(scope="module")
def library():
    return torch_ops.build(HERE / "c10d.cpp", name="gradcodec_c10d")


def gradients(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def same_as_in_one_process(ops, rank, world, name):
    for dtype in torch.float32, torch.float16, torch.bfloat16:
        of_all = [tensor for k in range(world) for tensor in gradients(k, dtype)]
        expected = ops.in_one_process(world, of_all)
        mine = expected[rank * STEPS * TENSORS_OF_A_STEP :][: STEPS * TENSORS_OF_A_STEP]
        for over in ops.over_group, ops.over_backend:
            results = over(name, gradients(rank, dtype))
            assert len(results) == len(mine) and all(map(torch.equal, results, mine))
        assert all(tensor.isfinite().all() and tensor.any() for tensor in mine[:TENSORS_OF_A_STEP])
        first = ops.outlived(name, gradients(rank, dtype))
        assert all(map(torch.equal, first, mine)), "a handle without its communicator"


def a_rank_that_is_gone_is_an_error(ops, rank, world, name):
    """Checks at the end that the ranks that wait for a rank that ends get an error and continue."""
    if rank == world - 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"the transport's function returned 1: .*[a-z]{3}"):
        ops.over_group(name, gradients(rank, torch.float32))
    assert ops.failure("torch")[0] == COMM


def run(rank, world, library, folder):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.ops.load_library(library)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        name = dist.group.WORLD.group_name
        same_as_in_one_process(torch.ops.gradcodec_c10d, rank, world, name)
        a_rank_that_is_gone_is_an_error(torch.ops.gradcodec_c10d, rank, world, name)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others would wait for this rank
    os._exit(0)  # leaving the group waits for the rank that is gone


@pytest.mark.parametrize("world", WORLDS)
def test_processes_and_threads_compute_the_same_bytes(library, world, tmp_path):
    torch.multiprocessing.spawn(run, (world, library, str(tmp_path)), world)


def test_a_rank_that_fails_in_a_thread_fails_the_call(library):
    """Checks that no rank waits for a rank that fails before its first exchange."""
    of_each = [torch.ones(8), torch.ones(8, dtype=torch.complex64)]
    with pytest.raises(RuntimeError, match="^like: ComplexFloat is not supported"):
        torch.ops.gradcodec_c10d.in_one_process(2, of_each)


def test_an_inference_tensor_is_refused_by_the_name_of_its_argument(library):
    ops = torch.ops.gradcodec_c10d
    with torch.inference_mode():
        frozen = torch.zeros(8)
    with pytest.raises(RuntimeError, match="^shard: an inference tensor is written to in inference mode only"):
        ops.reduce_scatter([torch.zeros(8)], frozen)
    shard = torch.zeros(8)
    ops.reduce_scatter([torch.ones(8)], shard)
    assert torch.equal(shard, torch.ones(8)) and shard._version == 1


@pytest.mark.parametrize("how", ["torch", "standard", "other", "late", "aborted"])
def test_an_exception_of_a_group_becomes_a_status(library, how):
    status, sentence, later, thrown = torch.ops.gradcodec_c10d.failure(how)
    assert (status, later) == (COMM, COMM)
    assert sentence == "all_gather: the transport's function returned 1"
    words = {"other": "an exception that is no std::exception", "aborted": "the group's work was aborted"}
    assert thrown.startswith(f"{sentence}: {words.get(how, 'the cable is cut')}")


def on_stream(rank, library):
    """Uses streams of a GPU that does not exist. This process's torch takes them for the current ones."""
    torch.ops.load_library(library)
    for gather, sent in (False, 96), (True, 48):
        # The current stream has number 1 and handle 1001. Then follows a stream of another library, by its handle.
        for handle, number in (1001, 1), (64, 64), (0, 0):
            seen = torch.ops.gradcodec_c10d.on_stream(handle, gather)
            assert seen == [8192, 4096, 96, sent, True, False, number, 0, 0, 1], seen
        # Torch treats this handle as another stream, so the library must not call the group.
        assert torch.ops.gradcodec_c10d.on_stream(77, gather) == [1, 0, 1]


def test_an_exchange_on_a_gpu_runs_on_the_stream_of_the_call(library):
    torch.multiprocessing.spawn(on_stream, (library,), 1)
