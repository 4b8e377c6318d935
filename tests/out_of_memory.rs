//! The failure of every single allocation: OUT_OF_MEMORY, nothing handed out, nothing lost, and nothing taken.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    env,
    ffi::{CStr, CString, OsStr, c_void},
    os::unix::ffi::OsStrExt,
    path::Path,
    process::Command,
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
fn packing_and_copying_survive_the_failure_of_every_allocation() {
    let (mut data, mut shape) = ([1u8; 100], [100]);
    let src = bools(&mut data, &mut shape);
    // SAFETY: a tensor over `data`, and room for as many results as are asked for.
    unsafe {
        // The memory, and the headers over it.
        assert_eq!(with_every_failure(1, |out| gc_tensor_to_device(&src, CPU, out)), 2);
        assert_eq!(with_every_failure(3, |out| gc_pack_chunks(&src, 3, out)), 2);
        assert_eq!(with_every_failure(1, |out| gc_pack_bits(&src, 0, 1, out)), 2);
        let (mut data, mut shape) = ([0u8; 100], [100 / 4]);
        let mut floats = bools(&mut data, &mut shape);
        (floats.dl_tensor.dtype.code, floats.dl_tensor.dtype.bits) = (dlpark::ffi::DLDataTypeCode::FLOAT, 32);
        assert_eq!(with_every_failure(3, |out| gc_pack_signs(&floats, 3, out)), 2);
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
        let float32 = DLDataType { code: dlpark::ffi::DLDataTypeCode::FLOAT, bits: 32, lanes: 1 };
        assert_eq!(with_every_failure(1, |out| gc_unpack_signs(chunks.as_ptr(), 2, 60, float32, out)), 3);
        let scales = [0.5, 2.0];
        let decompress = |out| gc_onebit_decompress(chunks.as_ptr(), 2, scales.as_ptr(), 60, float32, out);
        assert_eq!(with_every_failure(1, decompress), 3);
        assert_eq!(with_every_failure(1, |out| gc_unpack_bits(&chunk, 0, i64::MIN, 0, out)), 2);
    }
}

/// float32 in place of bools.
fn floats(data: &mut [f32], shape: &mut [i64; 1]) -> DLTensor {
    shape[0] = data.len() as i64;
    let mut tensor = described(&mut [], 2, shape);
    (tensor.data, tensor.dtype.bits) = (data.as_mut_ptr().cast(), 32);
    tensor
}

#[test]
fn compressing_survives_the_failure_of_every_allocation() {
    let (mut data, mut shape) = ([1f32, -2.0, 3.0, -4.0], [0]);
    let (mut carried, mut error_shape) = ([0.5f32; 4], [0]);
    let managed = |dl_tensor| DLManagedTensor { dl_tensor, manager_ctx: ptr::null_mut(), deleter: None };
    let grad = managed(floats(&mut data, &mut shape));
    let mut error = managed(floats(&mut carried, &mut error_shape));
    let mut scale = 7f32;
    // SAFETY: tensors over arrays, and room for as many results as are asked for.
    let allocations = unsafe {
        with_every_failure(3, |out| {
            let status = gc_onebit_compress(&grad, &mut error, 3, out, &mut scale);
            // Nothing is carried by a call that failed.
            let values = std::slice::from_raw_parts(error.dl_tensor.data.cast::<f32>(), 4);
            assert!(status == 0 || (scale == 7.0 && values == [0.5; 4]));
            status
        })
    };
    // Memory and headers of the chunks, of the scale and of the workspace.
    assert_eq!(allocations, 6);
}

#[test]
fn a_codec_that_cannot_be_made_leaves_nothing_behind() {
    let sizes = [1000i64, 0, 3];
    // SAFETY: zeros are a value of each field.
    let mut options: gc_codec_options_t = unsafe { std::mem::zeroed() };
    options.struct_size = size_of::<gc_codec_options_t>() as u32;
    options.nonfinite = 2;
    (options.segments, options.n_segments) = (sizes.as_ptr(), sizes.len());
    (options.n_chunks, options.server) = (2, 1);
    for codec in ALL_CODECS {
        options.codec = codec;
        // SAFETY: good options, and room for a pointer; what was made is released once.
        let allocations = with_every_failure_of(1, |out| unsafe { gc_codec_create(&options, out) }, gc_codec_free);
        // The plan's two lists, the states of those that keep errors, and what the work is shared out by.
        assert!(allocations >= 5, "codec {codec}: {allocations} allocations");
    }
}

/// GC_CODEC_*.
const ALL_CODECS: std::ops::RangeInclusive<i32> = 1..=7;

/// Runs `make`, which hands handles out, with the first allocation failing, then the second, until none fails; tells how
/// many there were.
fn with_every_failure_of<T>(
    outputs: usize, mut make: impl FnMut(*mut *mut T) -> gc_status_t, free: unsafe extern "C" fn(*mut T),
) -> u32 {
    let mut out = vec![ptr::dangling_mut::<T>(); outputs];
    for turn in 0.. {
        for stays in [true, false] {
            let live = LIVE.get();
            let (status, failed) = with_failure(turn, stays, || make(out.as_mut_ptr()));
            if failed {
                assert_eq!(status, OUT_OF_MEMORY, "allocation {turn}");
                assert!(out.iter().all(|&handle| handle == ptr::dangling_mut()), "allocation {turn}");
                // SAFETY: the text ends with a NUL.
                assert!(!unsafe { CStr::from_ptr(gc_last_error()) }.is_empty());
            } else {
                assert_eq!(status, 0);
                // SAFETY: just made.
                out.iter().for_each(|&handle| unsafe { free(handle) });
            }
            assert_eq!(LIVE.get(), live, "allocation {turn} left something behind");
            if !failed {
                return turn;
            }
        }
    }
    unreachable!("{} turns", u32::MAX)
}

/// An engine that nothing is asked of.
unsafe extern "C" fn never(
    _: *mut c_void, _: *const c_void, _: *mut c_void, _: usize, _: DLDevice, _: *mut c_void,
) -> i32 {
    1
}

#[test]
fn a_communicator_that_cannot_be_made_leaves_nothing_behind() {
    let transport = gc_transport_t {
        struct_size: size_of::<gc_transport_t>() as u32,
        rank: 0,
        world_size: 1,
        flags: 0,
        ctx: ptr::null_mut(),
        all_to_all: Some(never),
        all_gather: Some(never),
    };
    // SAFETY: a good transport, and room for so many pointers; what was made is released once.
    unsafe {
        let allocations = with_every_failure_of(1, |out| gc_comm_from_transport(&transport, out), gc_comm_free);
        assert!(allocations >= 1, "{allocations} allocations");
        let allocations = with_every_failure_of(3, |out| gc_comm_group(3, out), gc_comm_free);
        // What the three share, and each of them.
        assert!(allocations >= 4, "{allocations} allocations");
        let (mut intra, mut inter) = (ptr::null_mut(), ptr::null_mut());
        assert_eq!((gc_comm_group(1, &mut intra), gc_comm_group(1, &mut inter)), (0, 0));
        let allocations = with_every_failure_of(1, |out| gc_comm_hierarchical(intra, inter, out), gc_comm_free);
        // What ranks tell each other, the list of machines, the communicator and where C holds it.
        assert!(allocations >= 6, "{allocations} allocations");
        gc_comm_free(intra);
        gc_comm_free(inter);
    }
}

/// Answers as if both of two ranks sent the same, but in what they tell each other. `ctx`: how far apart they are among all.
unsafe extern "C" fn echo(
    ctx: *mut c_void, send: *const c_void, recv: *mut c_void, bytes: usize, _: DLDevice, _: *mut c_void,
) -> i32 {
    for rank in 0..2 {
        // SAFETY: room for a block of each of two ranks.
        unsafe { recv.cast::<u8>().add(rank * bytes).copy_from_nonoverlapping(send.cast(), bytes) };
    }
    if bytes == 64 {
        // What ranks tell each other at creation has the rank at 4 and the size of its world at 8.
        // SAFETY: room for two records, which were written above.
        unsafe {
            let other = recv.cast::<u8>().add(bytes);
            *other.add(4) += if *other.add(8) == 2 { 1 } else { ctx.addr() as u8 };
        }
    }
    0
}

/// Of the first of two ranks.
fn echoing() -> gc_transport_t {
    gc_transport_t {
        struct_size: size_of::<gc_transport_t>() as u32,
        rank: 0,
        world_size: 2,
        flags: 0,
        ctx: ptr::without_provenance_mut(1),
        all_to_all: Some(echo),
        all_gather: Some(echo),
    }
}

#[test]
fn a_call_over_two_allocates_nothing_once_there_is_room() {
    let transport = echoing();
    let (mut data, mut shard, mut shapes) = (vec![1.5f32; 1000], vec![0.0f32; 256], [[0i64; 1]; 2]);
    let [first, second] = &mut shapes;
    let (values, mut to) = (floats(&mut data, first), floats(&mut shard, second));
    // SAFETY: zeros are a value of each field.
    let mut options: gc_codec_options_t = unsafe { std::mem::zeroed() };
    options.struct_size = size_of::<gc_codec_options_t>() as u32;
    (options.codec, options.n_elements) = (1, 1000);
    let live = LIVE.get();
    // SAFETY: communicators, and tensors over memory that is there; what was made is released once.
    unsafe {
        let [mut intra, mut inter, mut two] = [ptr::null_mut(); 3];
        assert_eq!(gc_comm_from_transport(&transport, &mut intra), 0);
        let across = gc_transport_t { ctx: ptr::without_provenance_mut(2), ..transport };
        assert_eq!(gc_comm_from_transport(&across, &mut inter), 0);
        let allocations = with_every_failure_of(1, |out| gc_comm_hierarchical(intra, inter, out), gc_comm_free);
        assert!(allocations >= 6, "{allocations} allocations");
        assert_eq!(gc_comm_hierarchical(intra, inter, &mut two), 0);
        gc_comm_free(intra);
        gc_comm_free(inter);
        let mut allreduce = ptr::null_mut();
        assert_eq!(gc_allreduce_create(two, &options, &mut allreduce), 0);
        let (list, none) = ([&raw const values], ptr::null());
        let scatter = || gc_allreduce_reduce_scatter(allreduce, list.as_ptr(), 1, none, none, &mut to, ptr::null_mut());
        assert_eq!(with_failure(0, true, scatter), (0, false));
        assert_eq!(shard[..2], [1.5, 1.5]);
        gc_allreduce_free(allreduce);
        gc_comm_free(two);
    }
    assert_eq!(LIVE.get(), live);
}

#[test]
fn a_share_that_cannot_be_made_sends_nothing_and_one_that_cannot_be_taken_is_refused() {
    let (mut data, shape, strides) = ([1u8; 100], [5, 10], [20, 2]);
    let dtype = DLDataType { code: dlpark::ffi::DLDataTypeCode::UINT, bits: 8, lanes: 1 };
    let (mut src, mut lease, mut ends) = (ptr::null_mut(), ptr::null_mut(), [0; 2]);
    // SAFETY: `data` outlives the tensor; a pair of sockets; what was made is released once.
    unsafe {
        let memory = data.as_mut_ptr().cast();
        let made = gc_tensor_from_pointer(
            memory,
            CPU,
            dtype,
            2,
            shape.as_ptr(),
            strides.as_ptr(),
            None,
            ptr::null_mut(),
            &mut src,
        );
        assert_eq!(made, 0);
        assert_eq!(libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, ends.as_mut_ptr()), 0);
        let allocations = with_every_failure_of(1, |out| gc_share_send(src, ends[0], 0, 0, out), gc_share_free);
        assert_eq!(allocations, 4, "the message, two lists of descriptors, the lease");
        let mut out = ptr::dangling_mut();
        assert_eq!(gc_share_receive(ends[1], CPU, 0, &mut out), 0); // the one that was sent
        gc_tensor_free(out);
        assert_eq!(gc_share_receive(ends[1], CPU, 0, &mut out), 41, "more were sent");
        for index in 0..2 {
            assert_eq!(gc_share_send(src, ends[0], 0, 0, &mut lease), 0);
            let refused = with_failure(index, true, || gc_share_receive(ends[1], CPU, 0, &mut out));
            assert_eq!(refused, (OUT_OF_MEMORY, true));
            assert_eq!(gc_share_receive(ends[1], CPU, 0, &mut out), 41, "the message has been taken");
            assert_eq!(gc_share_wait(lease, 0), 40, "the sender is told");
            let words = CStr::from_ptr(gc_last_error()).to_str().unwrap();
            assert!(words.contains("GC_STATUS_OUT_OF_MEMORY"), "{words}");
            gc_share_free(lease);
        }
        // Two failures of each allocation, once and from then on, and one call without any: each takes a message.
        for _ in 0..5 {
            assert_eq!(gc_share_send(src, ends[0], 0, 0, ptr::null_mut()), 0);
        }
        let allocations = with_every_failure(1, |out| gc_share_receive(ends[1], CPU, 0, out));
        assert_eq!(allocations, 2, "a list of descriptors, the headers");
        assert_eq!(gc_share_send(src, ends[0], 0, 0, &mut lease), 0);
        gc_share_free(lease);
        gc_tensor_free(src);
        ends.iter().for_each(|&end| assert_eq!(libc::close(end), 0));
    }
}

#[test]
fn an_allreduce_that_cannot_be_made_or_run_changes_nothing() {
    // ONEBIT and BF16: what is sent of 1.5 arrives as it was.
    for codec in [1, 3] {
        an_allreduce_survives(codec);
    }
}

#[test]
fn an_allreduce_that_exchanges_once_cannot_be_made_or_allocates_nothing() {
    // A reducer for each chunk, and one for all; what is sent of 1.5 arrives as it was.
    for (codec, reducers) in [(1, 2), (3, 1)] {
        let (mut data, mut shape) = (vec![1.5f32; 1000], [0i64; 1]);
        let mut values = floats(&mut data, &mut shape);
        // SAFETY: zeros are a value of each field.
        let mut options: gc_codec_options_t = unsafe { std::mem::zeroed() };
        options.struct_size = size_of::<gc_codec_options_t>() as u32;
        options.codec = codec;
        options.n_elements = 1000;
        let (mut comm, mut allreduce) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a communicator, good options and tensors; what was made is released once.
        unsafe {
            assert_eq!(gc_comm_from_transport(&echoing(), &mut comm), 0);
            let twice = with_every_failure_of(1, |out| gc_allreduce_create(comm, &options, out), gc_allreduce_free);
            options.error = 2; // GC_ERROR_NONE
            let once = with_every_failure_of(1, |out| gc_allreduce_create(comm, &options, out), gc_allreduce_free);
            assert!(once >= twice + 4 * reducers, "{once} allocations, and {twice} of one that keeps errors");
            assert_eq!(gc_allreduce_create(comm, &options, &mut allreduce), 0);
            let list = [&raw mut values];
            let run = || gc_allreduce_run(allreduce, list.as_ptr(), 1, ptr::null(), ptr::null(), ptr::null_mut());
            data[0] = -1.5;
            assert_eq!(with_failure(0, true, run), (0, false));
            assert_eq!(data[..2], [-1.5, 1.5]);
            gc_allreduce_free(allreduce);
            gc_comm_free(comm);
        }
    }
}

fn an_allreduce_survives(codec: i32) {
    let (mut data, mut shape) = (vec![1.5f32; 1000], [0i64; 1]);
    let mut values = floats(&mut data, &mut shape);
    // SAFETY: zeros are a value of each field.
    let mut options: gc_codec_options_t = unsafe { std::mem::zeroed() };
    options.struct_size = size_of::<gc_codec_options_t>() as u32;
    (options.codec, options.n_elements) = (codec, 1000);
    let (mut comm, mut allreduce) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: a communicator, good options and tensors; what was made is released once.
    unsafe {
        assert_eq!(gc_comm_group(1, &mut comm), 0);
        let make = |out| gc_allreduce_create(comm, &options, out);
        let allocations = with_every_failure_of(1, make, gc_allreduce_free);
        // A codec, what is exchanged, what ranks tell each other, and the handle.
        assert!(allocations >= 8, "{allocations} allocations");
        assert_eq!(make(&mut allreduce), 0);
        let list = [&raw mut values];
        let run = || gc_allreduce_run(allreduce, list.as_ptr(), 1, ptr::null(), ptr::null(), ptr::null_mut());
        // A run allocates nothing.
        data[0] = -1.5;
        assert_eq!(with_failure(0, true, run), (0, false));
        assert_eq!(data[..2], [-1.5, 1.5]);
        // Nor do its halves.
        let (mut room, mut shape) = (vec![0.0f32; 1000], [0i64; 1]);
        let mut shard = floats(&mut room, &mut shape);
        let (from, none) = ([&raw const values], ptr::null());
        let scatter =
            || gc_allreduce_reduce_scatter(allreduce, from.as_ptr(), 1, none, none, &mut shard, ptr::null_mut());
        assert_eq!(with_failure(0, true, scatter), (0, false));
        assert_eq!(room[..2], [-1.5, 1.5]);
        let gather = || gc_allreduce_all_gather(allreduce, &shard, list.as_ptr(), 1, ptr::null_mut());
        assert_eq!(with_failure(0, true, gather), (0, false));
        assert_eq!(data[..2], [-1.5, 1.5]);
        gc_allreduce_free(allreduce);
        gc_comm_free(comm);
    }
}

#[test]
fn a_compressed_allreduce_allocates_what_was_not_reserved_and_changes_nothing_without_it() {
    let mut shapes = [[0i64; 1]; 3];
    let [mut buffer, mut worker, mut server] = [vec![1.5f32; 1000], vec![0.25f32; 1000], vec![0.5f32; 1000]];
    let live = LIVE.get();
    // SAFETY: a communicator, and tensors over memory that is there; what was made is released once.
    unsafe {
        let (mut comm, [first, second, third]) = (ptr::null_mut(), &mut shapes);
        let [mut of_buffer, mut of_worker, mut of_server] =
            [floats(&mut buffer, first), floats(&mut worker, second), floats(&mut server, third)];
        let mut run =
            |comm| gc_compressed_allreduce(comm, &mut of_buffer, &mut of_worker, &mut of_server, ptr::null_mut());
        for reserved in [false, true] {
            assert_eq!(gc_comm_group(1, &mut comm), 0);
            let mut allocations = 0;
            loop {
                let (status, failed) = match reserved {
                    false => with_failure(allocations, true, || run(comm)),
                    true => with_failure(allocations, true, || gc_comm_reserve(comm, CPU, 1000)),
                };
                if !failed {
                    assert_eq!(status, 0);
                    break;
                }
                assert_eq!(status, OUT_OF_MEMORY, "allocation {allocations}");
                assert_eq!((buffer[7], worker[7], server[7]), (1.5, 0.25, 0.5));
                allocations += 1;
            }
            // A codec, what is exchanged, and the list of such stages, of which the room may be there by then.
            assert!(allocations >= 6, "{allocations} allocations");
            assert_eq!(with_failure(0, true, || run(comm)), (0, false));
            gc_comm_free(comm);
            [buffer[7], worker[7], server[7]] = [1.5, 0.25, 0.5];
        }
    }
    assert_eq!(LIVE.get(), live);
}

/// Memory of a tensor, aligned to 16.
struct Room {
    words: Vec<u128>,
    shape: Vec<i64>,
    dtype: DLDataType,
}

impl Room {
    fn new(code: u8, bits: u8, shape: &[i64]) -> Self {
        let bytes = shape.iter().product::<i64>() as usize * usize::from(bits / 8);
        let dtype = DLDataType { code: dlpark::ffi::DLDataTypeCode(code), bits, lanes: 1 };
        Self { words: vec![0; bytes / 16 + 1], shape: shape.to_vec(), dtype }
    }

    fn tensor(&mut self) -> DLTensor {
        DLTensor {
            data: self.words.as_mut_ptr().cast(),
            device: CPU,
            ndim: self.shape.len() as i32,
            dtype: self.dtype,
            shape: self.shape.as_mut_ptr(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        }
    }
}

#[test]
fn no_call_on_a_codec_allocates() {
    ALL_CODECS.for_each(no_call_allocates_on);
}

fn no_call_allocates_on(kind: i32) {
    let (uint, float) = (1, 2);
    // Enough for several threads. Outputs are compared two by two where they do not lie one behind the other.
    let (sizes, raw) = ([2 << 20, 0, 3, 1 << 20], [0, 0, 1, 0]);
    // SAFETY: zeros are a value of each field.
    let mut options: gc_codec_options_t = unsafe { std::mem::zeroed() };
    options.struct_size = size_of::<gc_codec_options_t>() as u32;
    (options.codec, options.nonfinite, options.server) = (kind, 2, 1);
    (options.segments, options.n_segments) = (sizes.as_ptr(), sizes.len());
    let has_blocks = kind > 2;
    if has_blocks {
        options.raw = raw.as_ptr();
    }
    let mut codec = ptr::null_mut();
    assert_eq!(gc_set_threads(4), 0);
    // SAFETY: good options, and the codec that they make.
    let (payload_bytes, state_bytes) = unsafe {
        assert_eq!(gc_codec_create(&options, &mut codec), 0);
        (gc_codec_payload_bytes(codec), gc_codec_state_bytes(codec))
    };
    let elements = sizes.iter().sum();
    let mut rooms = [
        Room::new(uint, 8, &[payload_bytes]),
        Room::new(uint, 8, &[1, payload_bytes]),
        Room::new(uint, 8, &[state_bytes]),
        Room::new(float, 32, &[elements]),
        Room::new(float, 32, &[elements]),
        Room::new(float, 32, &[sizes.len() as i64]),
        Room::new(uint, 32, &[1]),
    ];
    let mut tensors = rooms.each_mut().map(Room::tensor);
    let [payload, chunks, state, worker, server, scales, flags] = tensors.each_mut().map(ptr::from_mut);
    let mut values = sizes.map(|size| Room::new(float, 32, &[size]));
    let mut of_values = values.each_mut().map(Room::tensor);
    let results = of_values.each_mut().map(ptr::from_mut);
    let gradient = results.map(<*mut DLTensor>::cast_const);
    let (count, none, stream) = (sizes.len(), ptr::null(), ptr::null_mut());
    // SAFETY: a codec, and tensors over memory that is there.
    let calls: [(&str, &dyn Fn() -> gc_status_t); 12] = unsafe {
        [
            ("encode", &|| gc_codec_encode(codec, gradient.as_ptr(), count, none, none, payload, stream)),
            ("decode", &|| gc_codec_decode(codec, payload, 1, none, 0, results.as_ptr(), count, stream)),
            ("reduce", &|| gc_codec_reduce(codec, 0, chunks, payload, stream)),
            ("commit", &|| gc_codec_commit(codec, none, stream)),
            ("rollback", &|| gc_codec_rollback(codec, stream)),
            ("flags", &|| gc_codec_flags(codec, flags, stream)),
            ("scales", &|| gc_codec_scales(codec, scales, stream)),
            ("state_out", &|| gc_codec_state_out(codec, state, stream)),
            ("state_in", &|| gc_codec_state_in(codec, state, stream)),
            ("errors_out", &|| gc_codec_errors_out(codec, worker, server, stream)),
            ("errors_in", &|| gc_codec_errors_in(codec, worker, server, stream)),
            ("reset", &|| gc_codec_reset(codec, stream)),
        ]
    };
    for (name, call) in calls {
        // Scales of segments, and errors, are not every codec's. What a refusal says takes memory.
        let refused = (name == "scales" && has_blocks) || (name == "errors_in" && kind == 2);
        let (status, asked) = without_memory(call);
        assert_eq!((status, asked && !refused), (i32::from(refused), false), "codec {kind}: gc_codec_{name}");
        if name == "encode" {
            // SAFETY: as many bytes at either address.
            unsafe { ptr::copy_nonoverlapping((*payload).data, (*chunks).data, payload_bytes as usize) };
        }
    }
    // SAFETY: nothing uses it any more.
    unsafe { gc_codec_free(codec) };
}

/// Elements of one large job, and the memory that they are packed to.
struct Large {
    elements: Vec<u8>,
    bytes: Vec<u8>,
}

impl Large {
    fn new() -> Self {
        let count = 16 << 20;
        Self { elements: vec![1; count], bytes: vec![0; count / 8] }
    }

    /// Packs the first `count` elements.
    fn pack(&mut self, count: usize) -> gc_status_t {
        let (mut shape, mut rows) = ([count as i64], [1, count as i64 / 8]);
        let src = described(&mut self.elements, 6, &mut shape);
        let mut dst = described(&mut self.bytes, 1, &mut [0]);
        (dst.ndim, dst.shape) = (2, rows.as_mut_ptr());
        // SAFETY: tensors over memory of that size.
        unsafe { gc_pack_chunks_into(&src, 0, &mut dst, ptr::null_mut()) }
    }

    fn is_packed(&self, count: usize) -> bool {
        let (packed, rest) = self.bytes.split_at(count / 8);
        packed.iter().all(|&byte| byte == 0xff) && rest.iter().all(|&byte| byte == 0)
    }
}

/// Runs `call` with every allocation failing, on every thread of the library; tells whether there was one.
fn without_memory<T>(call: impl FnOnce() -> T) -> (T, bool) {
    ALL_FAIL.store(true, Ordering::Relaxed);
    let (result, failed) = with_failure(0, true, call);
    ALL_FAIL.store(false, Ordering::Relaxed);
    (result, failed || FAILURES_OF_ALL.load(Ordering::Relaxed) > 0)
}

#[test]
fn a_large_job_into_memory_of_the_caller_allocates_nothing_on_any_thread() {
    let (count, calls) = (16 << 20, 40);
    let mut large = Large::new();
    let threads = || {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter(|task| {
                let name = task.as_ref().unwrap().path().join("comm");
                std::fs::read_to_string(name).is_ok_and(|name| name == "gradcodec\n")
            })
            .count()
    };
    assert_eq!(gc_set_threads(4), 0);
    let outcome = without_memory(|| (0..calls).map(|_| large.pack(count)).max());
    assert_eq!(outcome, (Some(0), false));
    assert_eq!(threads(), 3);
    assert!(large.is_packed(count));
    // Copied as they are, and cast where they lie apart.
    let (mut floats, mut ones) = (vec![0u8; count], vec![0u8; count]);
    let (mut shape, mut quarter) = ([count as i64], [count as i64 / 4]);
    let (src, mut dst) = (described(&mut large.elements, 1, &mut shape), described(&mut ones, 1, &mut [0]));
    dst.shape = shape.as_mut_ptr();
    let mut apart = described(&mut large.elements, 1, &mut quarter);
    let (mut step, mut cast) = ([4], described(&mut floats, 2, &mut [0]));
    (apart.strides, cast.dtype.bits, cast.shape) = (step.as_mut_ptr(), 32, apart.shape);
    // SAFETY: tensors over memory of that size.
    let outcome = without_memory(|| unsafe {
        let copied = gc_copy_into(&src, &mut dst, ptr::null_mut());
        copied.max(gc_copy_into(&apart, &mut cast, ptr::null_mut()))
    });
    assert_eq!(outcome, (0, false));
    assert!(ones.iter().all(|&one| one == 1));
    assert!(floats.chunks_exact(4).all(|one| one == 1f32.to_ne_bytes()));
}

const FIRST_CALL: &str = "GRADCODEC_TEST_FIRST_CALL";

/// The first call of a process, which has no memory for it.
fn first_call(call: &str) {
    let mut large = Large::new();
    match call {
        "gc_prepare" => assert_eq!(without_memory(|| gc_prepare(CPU)), (0, false)),
        "gc_set_threads" => assert_eq!(without_memory(|| gc_set_threads(2)), (0, false)),
        "gc_pack_chunks" => {
            let (mut shape, mut out) = ([100], ptr::dangling_mut());
            let src = bools(&mut large.elements, &mut shape);
            // SAFETY: a tensor over more memory than that, and room for the result.
            let outcome = without_memory(|| unsafe { gc_pack_chunks(&src, 1, &mut out) });
            assert_eq!((outcome, out), ((OUT_OF_MEMORY, true), ptr::dangling_mut()));
        }
        elements => {
            let count = elements.parse().unwrap();
            assert_eq!(without_memory(|| large.pack(count)), (0, false));
            assert!(large.is_packed(count));
        }
    }
    println!("{call} returned");
}

#[test]
fn a_first_call_survives_without_any_memory() {
    if let Ok(call) = env::var(FIRST_CALL) {
        return first_call(&call);
    }
    // Numbers: elements to be packed into memory of the caller; more than 8 MiB are worth several threads.
    for call in ["800", "16777216", "gc_prepare", "gc_set_threads", "gc_pack_chunks"] {
        for instruction_set in [None, Some("portable"), Some("none of that name")] {
            let mut child = Command::new(env::current_exe().unwrap());
            child.args(["--exact", "--nocapture", "a_first_call_survives_without_any_memory"]).env(FIRST_CALL, call);
            match instruction_set {
                Some(name) => child.env("GRADCODEC_CPU", name),
                None => child.env_remove("GRADCODEC_CPU"),
            };
            let child = child.output().unwrap();
            let (stdout, stderr) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
            assert!(child.status.success(), "{call}, {instruction_set:?}: {}\n{stderr}", child.status);
            assert!(stdout.contains(&format!("{call} returned\n")), "{stdout}");
        }
    }
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

#[test]
fn a_build_info_without_memory_is_empty_whatever_is_loaded() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(OsStr::from_bytes(b"libnccl.so.\xFF"));
    let made = Command::new("cc").args(["-shared", "-xc", "/dev/null", "-o"]).arg(&path).status();
    assert!(made.unwrap().success());
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: a path that ends with a NUL, of a library that has nothing; the text is read before another is made.
    let (library, text) = unsafe { (libc::dlopen(name.as_ptr(), libc::RTLD_NOW), CStr::from_ptr(gc_build_info())) };
    assert!(!library.is_null());
    let expected = format!("\nNCCL: of unknown version ({})\n", path.to_string_lossy());
    assert!(text.to_str().unwrap().contains(&expected) && expected.contains('\u{FFFD}'), "{text:?}");
    let (mut turn, whole) = (0, text.to_owned());
    loop {
        let (text, failed) = with_failure(turn, true, || gc_build_info());
        // SAFETY: a text of this thread.
        let text = unsafe { CStr::from_ptr(text) };
        assert_eq!(text, if failed { c"" } else { &whole }, "turn {turn}");
        turn += 1;
        if !failed {
            break;
        }
    }
    assert!(turn > 1, "it has allocated");
    // SAFETY: it was opened above.
    unsafe { libc::dlclose(library) };
}

/// Names the folder of the test in a process of its own, in which kernels are kept.
const KERNELS: &str = "GRADCODEC_TEST_KERNELS";

/// An NVRTC that compiles nothing, made of tests/fakes/nvrtc/libnvrtc.c.
fn nvrtc(folder: &Path) -> *mut c_void {
    let library = folder.join("libnvrtc.so.12");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fakes/nvrtc/libnvrtc.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-pthread", "-o"]).arg(&library).arg(source);
    assert!(compiler.status().unwrap().success());
    let path = CString::new(library.to_str().unwrap()).unwrap();
    // SAFETY: a path that ends with a NUL, of a library whose loading does nothing.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!library.is_null());
    library
}

#[test]
fn a_kernel_that_cannot_be_compiled_or_kept_leaves_nothing() {
    let Some(folder) = env::var_os(KERNELS) else {
        let folder = env::temp_dir().join(format!("gradcodec-kernels-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let mut child = Command::new(env::current_exe().unwrap());
        child.args(["--exact", "--nocapture", "a_kernel_that_cannot_be_compiled_or_kept_leaves_nothing"]);
        child.env(KERNELS, &folder).env("GRADCODEC_CACHE_DIR", folder.join("cache")).env_remove("GRADCODEC_CACHE");
        let child = child.output().unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
        return;
    };
    let folder = Path::new(&folder);
    // SAFETY: zeros are a value of each field.
    let (mut options, mut how): (gc_elementwise_options_t, gc_run_options_t) = unsafe { std::mem::zeroed() };
    options.struct_size = size_of_val(&options) as u32;
    (options.inputs, options.outputs) = (c"T x".as_ptr(), c"T y".as_ptr());
    (options.operation, options.nvrtc) = (c"y = x".as_ptr(), nvrtc(folder));
    (how.struct_size, how.capability) = (size_of_val(&how) as u32, 90);
    let (mut data, mut shapes) = ([vec![0.0f32; 8], vec![0.0f32; 8]], [[0i64; 1]; 2]);
    let ([x, y], [first, second]) = (&mut data, &mut shapes);
    let (x, mut y) = (floats(x, first), floats(y, second));
    let (inputs, outputs) = ([&raw const x], [&raw mut y]);
    // SAFETY: options of their own size with texts that end with a NUL, and room for a handle.
    let make = |out| unsafe { gc_elementwise_create(&options, out) };
    // SAFETY: good options and tensors; what was made is released once.
    unsafe {
        let allocations = with_every_failure_of(1, make, gc_kernel_free);
        assert!(allocations >= 4, "{allocations} allocations: its texts and the handle");
        // Compiled and kept; then found on disk.
        for least in [12, 8] {
            let (mut turn, mut finished) = (0, 0);
            while finished < 2 {
                let stays = turn % 2 == 0;
                let (live, mut kernel) = (LIVE.get(), ptr::null_mut());
                assert_eq!(make(&mut kernel), 0);
                let prepare =
                    || gc_kernel_prepare(kernel, inputs.as_ptr(), 1, outputs.as_ptr(), 1, &how, ptr::null_mut());
                let (status, failed) = with_failure(turn / 2, stays, prepare);
                assert_eq!(status, if failed { OUT_OF_MEMORY } else { 0 }, "allocation {}", turn / 2);
                finished = if failed { 0 } else { finished + 1 };
                if failed {
                    // It can be had once there is memory.
                    assert_eq!(prepare(), 0);
                }
                gc_kernel_free(kernel);
                assert_eq!(LIVE.get(), live, "allocation {} left something behind", turn / 2);
                if least == 12 {
                    std::fs::remove_dir_all(folder.join("cache")).unwrap();
                }
                turn += 1;
            }
            assert!(turn / 2 >= least, "{} allocations", turn / 2);
        }
    }
}
