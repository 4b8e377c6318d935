//! The failure of every single allocation: OUT_OF_MEMORY, nothing handed out, nothing lost, and nothing taken.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

use gradcodec::capi::*;

const OUT_OF_MEMORY: gc_status_t = 10;

/// Counts what this thread has allocated, and fails the allocation whose turn it is. With [`ALL_FAIL`], also every one of
/// the library's threads.
struct Failing;

static ALL_FAIL: AtomicBool = AtomicBool::new(false);
static FAILURES_OF_ALL: AtomicU32 = AtomicU32::new(0);

/// Whether this is a thread of the library, by its name. Those of the other tests are not to fail with them.
fn is_of_the_library() -> bool {
    let mut name = [0u8; 16];
    // SAFETY: room for the name, which is no longer than that.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name.starts_with(b"gradcodec\0")
}

thread_local! {
    static UNTIL_FAILURE: Cell<Option<u32>> = const { Cell::new(None) };
    /// Whether memory stays gone after the failure, or comes back.
    static FAILURE_STAYS: Cell<bool> = const { Cell::new(false) };
    static FAILURES: Cell<u32> = const { Cell::new(0) };
    static LIVE: Cell<i64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator, which now and then is said to have no memory.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if ALL_FAIL.load(Ordering::Relaxed) && is_of_the_library() {
            FAILURES_OF_ALL.fetch_add(1, Ordering::Relaxed);
            return ptr::null_mut();
        }
        if let Some(left) = UNTIL_FAILURE.get() {
            if left > 0 {
                UNTIL_FAILURE.set(Some(left - 1));
            } else {
                UNTIL_FAILURE.set(Some(0).filter(|_| FAILURE_STAYS.get()));
                FAILURES.set(FAILURES.get() + 1);
                return ptr::null_mut();
            }
        }
        LIVE.set(LIVE.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get() - 1);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

fn bools(data: &mut [u8], shape: &mut [i64; 1]) -> DLManagedTensor {
    DLManagedTensor { dl_tensor: described(data, 6, shape), manager_ctx: ptr::null_mut(), deleter: None }
}

fn described(data: &mut [u8], code: u8, shape: &mut [i64; 1]) -> DLTensor {
    DLTensor {
        data: data.as_mut_ptr().cast(),
        device: CPU,
        ndim: 1,
        dtype: DLDataType { code: dlpark::ffi::DLDataTypeCode(code), bits: 8, lanes: 1 },
        shape: shape.as_mut_ptr(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    }
}

const CPU: DLDevice = DLDevice { device_type: dlpark::ffi::DLDeviceType::CPU, device_id: 0 };

/// Runs `call` with the allocation of this turn failing.
fn with_failure<T>(turn: u32, stays: bool, call: impl FnOnce() -> T) -> (T, bool) {
    FAILURES.set(0);
    FAILURE_STAYS.set(stays);
    UNTIL_FAILURE.set(Some(turn));
    let result = call();
    UNTIL_FAILURE.set(None);
    (result, FAILURES.get() > 0)
}

/// Runs `call`, which hands tensors out, with the first allocation failing, then the second, until none fails; tells how
/// many there were.
fn with_every_failure(outputs: usize, mut call: impl FnMut(*mut *mut DLManagedTensor) -> gc_status_t) -> u32 {
    let mut out = vec![ptr::dangling_mut::<DLManagedTensor>(); outputs];
    gc_chunk_bytes(-1, 1); // whatever a first call sets up
    for turn in 0.. {
        for stays in [true, false] {
            let live = LIVE.get();
            let (status, failed) = with_failure(turn, stays, || call(out.as_mut_ptr()));
            if !failed {
                assert_eq!(status, 0);
                for &tensor in &out {
                    // SAFETY: the call handed it out.
                    unsafe { gc_tensor_free(tensor) };
                }
                assert_eq!(LIVE.get(), live);
                return turn;
            }
            assert_eq!(status, OUT_OF_MEMORY, "allocation {turn}");
            // SAFETY: the text ends with a NUL.
            assert!(!unsafe { CStr::from_ptr(gc_last_error()) }.is_empty());
            assert!(out.iter().all(|&tensor| tensor == ptr::dangling_mut()), "allocation {turn}");
            assert_eq!(LIVE.get(), live, "allocation {turn} left something behind");
        }
    }
    unreachable!()
}

#[test]
fn packing_survives_the_failure_of_every_allocation() {
    let (mut data, mut shape) = ([1u8; 100], [100]);
    let src = bools(&mut data, &mut shape);
    // SAFETY: a tensor over `data`, and room for as many results as are asked for.
    unsafe {
        // The memory, and the headers over it.
        assert_eq!(with_every_failure(3, |out| gc_pack_chunks(&src, 3, out)), 2);
        assert_eq!(with_every_failure(1, |out| gc_pack_bits(&src, 0, 1, out)), 2);
    }
}

#[test]
fn unpacking_survives_the_failure_of_every_allocation() {
    let (mut data, mut shape) = ([0xa5u8; 4], [4]);
    let mut chunk = bools(&mut data, &mut shape);
    chunk.dl_tensor.dtype.code = dlpark::ffi::DLDataTypeCode::UINT;
    let chunks = [&raw mut chunk, &raw mut chunk];
    // SAFETY: tensors over `data`, and room for the result.
    unsafe {
        // The views of the chunks, the memory, the headers.
        assert_eq!(with_every_failure(1, |out| gc_unpack_chunks(chunks.as_ptr(), 2, 60, out)), 3);
        assert_eq!(with_every_failure(1, |out| gc_unpack_bits(&chunk, 0, i64::MIN, 0, out)), 2);
    }
}

#[test]
fn a_large_job_into_memory_of_the_caller_allocates_nothing_on_any_thread() {
    let (count, calls) = (16usize << 20, 40);
    let (mut data, mut shape) = (vec![1u8; count], [count as i64]);
    let (mut bytes, mut rows) = (vec![0u8; count / 8], [1, count as i64 / 8]);
    let src = described(&mut data, 6, &mut shape);
    let mut dst = described(&mut bytes, 1, &mut [0]);
    (dst.ndim, dst.shape) = (2, rows.as_mut_ptr());
    let threads = || {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter(|task| {
                let name = task.as_ref().unwrap().path().join("comm");
                std::fs::read_to_string(name).is_ok_and(|name| name == "gradcodec\n")
            })
            .count()
    };
    // SAFETY: tensors over `data` and `bytes`.
    let mut pack = || unsafe { gc_pack_chunks_into(&src, 0, &mut dst, ptr::null_mut()) };
    assert_eq!(gc_set_threads(4), 0);
    assert_eq!(pack(), 0); // starts the threads
    assert_eq!(threads(), 3);
    ALL_FAIL.store(true, Ordering::Relaxed);
    let (statuses, failed) = with_failure(0, true, || (0..calls).map(|_| pack()).max());
    ALL_FAIL.store(false, Ordering::Relaxed);
    assert_eq!((statuses, failed, FAILURES_OF_ALL.load(Ordering::Relaxed)), (Some(0), false, 0));
    assert!(bytes.iter().all(|&byte| byte == 0xff));
}

#[test]
fn a_tensor_that_cannot_be_made_takes_nothing() {
    unsafe extern "C" fn count(context: *mut c_void) {
        // SAFETY: the test passes a Cell that outlives the tensor.
        let releases = unsafe { &*context.cast::<Cell<u32>>() };
        releases.set(releases.get() + 1);
    }
    let releases = Cell::new(0u32);
    let context = (&raw const releases).cast_mut().cast();
    let (mut data, shape) = ([1u8; 8], [8]);
    let dtype = DLDataType { code: dlpark::ffi::DLDataTypeCode::BOOL, bits: 8, lanes: 1 };
    let memory = data.as_mut_ptr().cast();
    // SAFETY: `data` outlives the tensor.
    unsafe {
        let made = with_every_failure(1, |out| {
            gc_tensor_from_pointer(memory, CPU, dtype, 1, shape.as_ptr(), ptr::null(), Some(count), context, out)
        });
        assert_eq!((made, releases.take()), (1, 1), "one allocation; released by the one success alone");

        let mut tensor = ptr::null_mut();
        let mut versioned = ptr::null_mut();
        gc_tensor_from_pointer(memory, CPU, dtype, 1, shape.as_ptr(), ptr::null(), Some(count), context, &mut tensor);
        let refused = with_failure(0, true, || gc_tensor_to_versioned(tensor, &mut versioned));
        assert_eq!(refused, (OUT_OF_MEMORY, true));
        assert_eq!((releases.get(), versioned), (0, ptr::null_mut()));
        assert_eq!(gc_tensor_to_versioned(tensor, &mut versioned), 0);
        let refused = with_failure(0, true, || gc_tensor_from_versioned(versioned, &mut tensor));
        assert_eq!(refused, (OUT_OF_MEMORY, true));
        assert_eq!(releases.get(), 0);
        assert_eq!(gc_tensor_from_versioned(versioned, &mut tensor), 0);
        gc_tensor_free(tensor);
        assert_eq!(releases.get(), 1);
    }
}
