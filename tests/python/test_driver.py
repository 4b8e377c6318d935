"""Tests with answers of a CUDA driver: no driver, an old one, every call failing, unknown codes.

Each test runs in a process of its own, with tests/fakes/cuda/libcuda.c as the driver: it has no hardware, counts, and
fails as the environment directs. tests/spec tests the results of kernels.
"""

import pytest

from stand_in import run


def test_without_a_driver_that_loads_cuda_is_unavailable_and_the_cpu_works(tmp_path):
    # The loader finds this file first, also on a machine that has a driver.
    (tmp_path / "libcuda.so.1").write_text("not a library")
    run("""
        expect(empty(100)[0], Status.DRIVER_UNAVAILABLE, "libcuda.so.1")
        expect(lib.gc_prepare(DLDevice(CUDA, 0)), Status.DRIVER_UNAVAILABLE, "libcuda.so.1")
        assert pack(capi.Tensor(np.ones(8, np.uint8)).managed)[0] == 0
    """, driver=tmp_path)


@pytest.mark.parametrize(
    "environment, status, words",
    [
        ({"FAKE_VERSION": 11080}, "DRIVER_UNAVAILABLE", ("11.8", "12.0", "525")),
        ({"FAKE_FAILURES": "cuDriverGetVersion=999999"}, "DRIVER_UNAVAILABLE", ("cuDriverGetVersion", 999999)),
        ({"FAKE_FAILURES": "cuInit=34"}, "DRIVER_UNAVAILABLE", ("cuInit", "CUDA_ERROR_STUB_LIBRARY", 34)),
        ({"FAKE_FAILURES": "cuInit=123456"}, "DRIVER_UNAVAILABLE", ("cuInit", 123456)),
        ({"FAKE_FAILURES": "cuInit=-1"}, "DRIVER_UNAVAILABLE", ("cuInit", -1)),
        ({"FAKE_FAILURES": "cuDeviceGetCount=400"}, "CUDA", ("cuDeviceGetCount", "CUDA_ERROR_INVALID_HANDLE")),
        ({"FAKE_DEVICES": 0}, "UNSUPPORTED_DEVICE", ("cuda:0", 0)),
        ({"FAKE_CAPABILITY": 70}, "UNSUPPORTED_DEVICE", ("7.0", "7.5")),
    ],
)
def test_an_unusable_driver(environment, status, words):
    run(f"""
        for _ in range(2):
            expect(lib.gc_prepare(DLDevice(CUDA, 0)), Status.{status}, *{words})
        out = Managed()
        assert lib.gc_pack_chunks(capi.Tensor(np.ones(8, np.uint8)).managed, 1, byref(out)) == 0
    """, **environment)


def test_a_driver_without_the_functions_of_12_0_is_too_old():
    run('expect(empty(100)[0], Status.DRIVER_UNAVAILABLE, "no cu", "12.0")', driver="old_driver")


def test_a_driver_that_recovers_is_used():
    run("""
        fail(cuInit=802)
        expect(empty(100)[0], Status.DRIVER_UNAVAILABLE, 802)
        fail()
        lib.gc_tensor_free(held(100))
    """)


def test_the_callers_context_is_used_if_it_is_on_the_device():
    run("""
        fake = driver()
        src = held(800, 1)
        assert (fake.fake_retained(0), fake.fake_retained(1), fake.fake_depth()) == (0, 1, 0)
        fake.fake_enter(0, 100)
        lib.gc_tensor_free(held(100, 0))
        assert fake.fake_retained(0) == 0, "the caller's context was not used"
        lib.gc_tensor_free(held(100, 1))
        assert fake.fake_depth() == 1, "the caller's context is not current"
        # Kept memory belongs to a context, and is freed with the context.
        before = fake.fake_allocations()
        fake.fake_leave()
        fake.fake_enter(0, 101)
        lib.gc_tensor_free(held(100, 0))
        assert fake.fake_allocations() == before + 1
    """)


@pytest.mark.parametrize(
    "place, simple, into",
    [
        ("fake.fake_enter(0, 100)", 7, 3),  # a current context, as every framework has
        ("fake.fake_enter(1, 100)", 9, 5),  # another device's: the primary context is entered and left
        ("None", 9, 5),  # no context
    ],
)
def test_a_call_makes_few_driver_calls(place, simple, into):
    run(f"""
        fake = driver()
        assert fake.fake_calls() == 0
        lib.gc_tensor_free(held(100))
        {place}
        src, dst = held(800), held(100)
        stream = fake.fake_stream_here() if {simple} == 7 else fake.fake_stream(0)
        packing = byref(view(src, (800,))), 0, byref(view(dst, (1, 100)))
        counts = {{}}
        for name, call in dict(
            simple=lambda: pack(src)[0],
            into=lambda: lib.gc_pack_chunks_into(*packing, None),
            stream=lambda: lib.gc_pack_chunks_into(*packing, stream),
            empty=lambda: empty(0)[0],
        ).items():
            assert call() == 0  # fills the caches of contexts and devices
            before = fake.fake_calls()
            assert call() == 0, last_error()
            counts[name] = fake.fake_calls() - before
            fake.fake_finish()
        assert counts["simple"] <= {simple} and counts["into"] <= {into}, counts
        assert counts["stream"] <= 3 and counts["empty"] == 0, counts
    """)


def test_an_empty_tensor_makes_no_context():
    run("""
        fake = driver()
        status, tensor = empty(0)
        assert status == 0 and pack(tensor)[0] == 0
        assert fake.fake_retained(0) == 0
        expect(empty(0, 2)[0], Status.UNSUPPORTED_DEVICE, "cuda:2")
    """)


def test_released_memory_is_reused_only_after_a_fence():
    run("""
        fake = driver()
        addresses = set()
        for _ in range(31):  # too few blocks for a fence
            tensor = held(1000)
            assert tensor.contents.dl_tensor.data not in addresses and fake.fake_frees() == 0
            addresses.add(tensor.contents.dl_tensor.data)
            lib.gc_tensor_free(tensor)
        for _ in range(1000):
            lib.gc_tensor_free(held(1000))
        assert fake.fake_allocations() < 100
        assert lib.gc_trim(DLDevice(CUDA, 0)) == 0
        assert fake.fake_allocations() == fake.fake_frees()
        # One block of 300 MiB causes a fence. This memory is never touched.
        lib.gc_tensor_free(held(300 << 20))
        allocations = fake.fake_allocations()
        lib.gc_tensor_free(held(300 << 20))
        assert fake.fake_allocations() == allocations + 1, "only the fence may allocate; the tensor reuses the block"
    """)


def test_a_fence_without_memory_frees_pending_blocks():
    run("""
        lib.gc_tensor_free(held(300 << 20))
        lib.gc_tensor_free(held(300 << 20))
    """, FAKE_MEMORY=300 << 20)


def test_kept_memory_has_a_bound_and_the_largest_blocks_are_freed_first():
    run("""
        fake = driver()
        in_use = lambda: fake.fake_in_use(0)
        sizes = [64 << 20, 700 << 20, 3 << 20, 600 << 20, 800 << 20, 500 << 20]
        tensors = [held(size) for size in sizes]
        free_all(tensors)
        assert in_use() == sum(sizes), "a release has called the driver"
        small = held(1000)
        # The bound for 64 GiB is 2 GiB. Freeing the largest block is enough.
        assert in_use() == sum(sizes) - (800 << 20) + 1024, in_use() >> 20
        lib.gc_tensor_free(small)
    """)


def test_only_calls_that_make_tensors_free_blocks_beyond_the_bound():
    run("""
        fake = driver()
        src, dst = held(800), held(100)
        packing = byref(view(src, (800,))), 0, byref(view(dst, (1, 100))), None
        assert lib.gc_pack_chunks_into(*packing) == 0
        tensors = [held(1 << 30) for _ in range(20)]
        free_all(tensors)
        before = fake.fake_frees(), fake.fake_waits(), fake.fake_in_use(0)
        for _ in range(5):
            calls = fake.fake_calls()
            assert lib.gc_pack_chunks_into(*packing) == 0 and fake.fake_calls() - calls <= 5
        assert (fake.fake_frees(), fake.fake_waits(), fake.fake_in_use(0)) == before
        left = []
        for _ in range(5):
            frees = fake.fake_frees()
            lib.gc_tensor_free(held(1000))
            assert fake.fake_frees() - frees <= 9, "a call frees at most 8 blocks, and one for a fence"
            left.append(fake.fake_in_use(0) >> 30)
        assert left == [12, 4, 1, 1, 1], left  # 2 GiB and the small blocks would be beyond the bound
    """)


def test_an_out_of_memory_error_waits_for_blocks_of_another_thread():
    run("""
        import threading
        fake = driver()
        filler = held(15 << 30)
        free_all([held(240 << 20), held(240 << 20)])  # these pending blocks cause a fence, and are within the bound
        fake.fake_hold_frees(1)
        made = []
        threads = [threading.Thread(target=lambda size=size: made.append(held(size))) for size in (10 << 20, 700 << 20)]
        threads[0].start()
        while not fake.fake_held():
            pass
        threads[1].start()  # finds no free memory and no kept block until the other thread has finished
        while fake.fake_refused() == 0:
            pass
        fake.fake_hold_frees(0)
        for thread in threads:
            thread.join()
        assert len(made) == 2
        free_all([filler, *made])
    """, FAKE_MEMORY=16 << 30)


def test_memory_kept_in_one_context_is_not_used_in_another_and_does_not_end_reuse_there():
    run("""
        fake = driver()
        fake.fake_enter(0, 100)
        free_all([held(300 << 20) for _ in range(3)])
        tensors = [held(300 << 20)]  # after a fence one of the three blocks is reused
        allocations = fake.fake_allocations()
        fake.fake_enter(0, 101)
        tensors.append(held(300 << 20))
        assert fake.fake_allocations() == allocations + 1
        fake.fake_leave()
        tensors += [held(300 << 20), held(300 << 20)]
        assert fake.fake_allocations() == allocations + 1, "the kept blocks of the first context were not reused"
        assert len({tensor.contents.dl_tensor.data for tensor in tensors}) == 4
        free_all(tensors)
        fake.fake_enter(0, 102)
        free_all([held(300 << 20) for _ in range(8)])  # more than the bound
        fake.fake_leave()
        allocations = fake.fake_allocations()
        for _ in range(500):
            free_all([held(64 << 10) for _ in range(4)])
        assert fake.fake_allocations() - allocations < 200
    """)


def test_memory_of_a_destroyed_context_is_dropped_when_its_address_is_reused():
    run("""
        fake = driver()
        fake.fake_enter(0, 100)
        free_all([held(100 << 20) for _ in range(10)])
        fake.fake_destroy()  # frees the memory of the context
        fake.fake_enter(0, 101)
        tensors = [held(100 << 20) for _ in range(30)]  # some have addresses of the destroyed context
        free_all(tensors)
        assert lib.gc_trim(DLDevice(CUDA, 0)) == 0
        assert fake.fake_in_use(0) == 0
    """)


def test_a_thread_that_waits_for_a_device_blocks_no_other_thread():
    run("""
        import threading
        fake = driver()
        lib.gc_tensor_free(held(300 << 20))
        fake.fake_hold_frees(1)  # a fence on device 0 ends only when this is over
        done = []
        def fences():
            done.append(held(300 << 20))
        thread = threading.Thread(target=fences)
        thread.start()
        while not fake.fake_held():
            pass
        other = held(300 << 20, 1)
        same = held(1000, 0)
        assert not done
        fake.fake_hold_frees(0)
        thread.join()
        free_all([other, same, *done])
    """)


def test_trimming_an_unused_device_allocates_nothing():
    run("""
        fake = driver()
        lib.gc_tensor_free(held(1000, 0))
        assert lib.gc_trim(DLDevice(CUDA, 1)) == 0 and fake.fake_retained(1) == 0
        assert lib.gc_trim(DLDevice(CUDA, 0)) == 0 and fake.fake_in_use(0) == 0
    """)


def test_missing_kernels_leave_nothing_loaded():
    run("""
        fake = driver()
        for _ in range(3):
            fail(cuLibraryGetKernel=500)
            expect(lib.gc_prepare(DLDevice(CUDA, 0)), Status.CUDA, "cuLibraryGetKernel", 500)
            assert fake.fake_libraries() == 0
        fail()
        assert lib.gc_prepare(DLDevice(CUDA, 0)) == 0 and fake.fake_libraries() == 7, "all modules"
    """)


@pytest.mark.parametrize(
    "code, words",
    [
        (221, ("CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "machine code", "PTX compiler is not installed")),
        (223, ("CUDA_ERROR_JIT_COMPILATION_DISABLED", "machine code", "CUDA_DISABLE_PTX_JIT")),
    ],
)
def test_a_gpu_without_machine_code_or_compiler_gets_an_error(code, words):
    # Some drivers compile when a library is loaded, others when a kernel is loaded into a context.
    run(f"""
        for call in "cuLibraryLoadData", "cuKernelGetFunction", "cuFuncGetAttribute":
            fail(**{{call: {code}}})
            expect(lib.gc_prepare(DLDevice(CUDA, 0)), Status.CUDA, call, {code}, *{words})
        fail()
        assert lib.gc_prepare(DLDevice(CUDA, 0)) == 0
    """)


def test_a_module_is_loaded_once_and_into_a_context_at_first_use():
    run("""
        fake = driver()
        counts = []
        for id in 100, 101:
            fake.fake_enter(0, id)
            src, dst = held(800), held(100)
            arguments = byref(view(src, (800,))), 0, byref(view(dst, (1, 100))), None
            for _ in range(2):
                before = fake.fake_calls()
                assert lib.gc_pack_chunks_into(*arguments) == 0, last_error()
                counts.append(fake.fake_calls() - before)
            assert fake.fake_libraries() == 1
            fake.fake_leave()
        assert fake.fake_last_launch() == b"gc_pack_truth_u8"
        assert counts[0] > counts[2] > 14 and counts[1] == counts[3] <= 3, counts
    """)


def test_kept_memory_is_freed_when_the_device_has_none_left():
    run("""
        fake = driver()
        lib.gc_tensor_free(held(900_000))
        tensor = held(600_000)
        expect(empty(2 << 20)[0], Status.OUT_OF_MEMORY, "cuMemAlloc", 2 << 20, "cuda:0", "CUDA_ERROR_OUT_OF_MEMORY")
        lib.gc_tensor_free(tensor)
        lib.gc_tensor_free(held(1000_000))
    """, FAKE_MEMORY=1 << 20)


def test_memory_that_cannot_be_freed_is_one_error_and_stays_tracked():
    run("""
        fake = driver()
        lib.gc_tensor_free(held(1000))
        fail(cuMemFree_v2=999)
        expect(lib.gc_trim(DLDevice(CUDA, 0)), Status.CUDA, "cuMemFree", 999)
        fail()
        assert lib.gc_trim(DLDevice(CUDA, 0)) == 0
        assert fake.fake_in_use(0) == 0
    """)


def test_the_process_may_end_with_live_tensors():
    run("""
        import atexit
        late = held(1000)
        fail(cuMemFree_v2=4, cuCtxGetId=4)  # the driver is shutting down
        atexit.register(lib.gc_tensor_free, late)
    """)


def test_a_forked_child_gets_a_status():
    run("""
        tensor = held(1000)
        child = os.fork()
        if child == 0:
            cuda = DLDevice(CUDA, 0)
            for status in (empty(100)[0], pack(tensor)[0], lib.gc_prepare(cuda), lib.gc_trim(cuda)):
                expect(status, Status.CUDA, "CUDA_ERROR_NOT_INITIALIZED", "forked")
            lib.gc_tensor_free(tensor)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        lib.gc_tensor_free(tensor)
    """)
