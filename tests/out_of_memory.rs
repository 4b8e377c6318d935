//! Failing allocations whose size depends on the caller: the call returns OUT_OF_MEMORY, writes no output and leaks
//! nothing. Also tests calls that must not allocate.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    ffi::{CStr, CString},
    ptr,
};

use gradcodec::capi::*;

const OUT_OF_MEMORY: gc_status_t = 10;

/// Size in bytes that no allocation of a fixed size reaches.
const LARGE: usize = 16 << 10;

/// Counts the allocations of this thread, and fails the one selected by UNTIL_FAILURE.
struct Failing;

thread_local! {
    /// Minimum size in bytes of the allocations that UNTIL_FAILURE counts.
    static FROM: Cell<usize> = const { Cell::new(LARGE) };
    static UNTIL_FAILURE: Cell<Option<u32>> = const { Cell::new(None) };
    static FAILURES: Cell<u32> = const { Cell::new(0) };
    static LIVE: Cell<i64> = const { Cell::new(0) };
}

// SAFETY: forwards to the system's allocator, or returns null, which an allocator may do at any time.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if let Some(left) = UNTIL_FAILURE.get()
            && layout.size() >= FROM.get()
        {
            UNTIL_FAILURE.set(left.checked_sub(1));
            if left == 0 {
                FAILURES.set(FAILURES.get() + 1);
                return ptr::null_mut();
            }
        }
        LIVE.set(LIVE.get() + 1);
        // SAFETY: the caller passes a valid layout, as `alloc` requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get() - 1);
        // SAFETY: `memory` came from `System.alloc` with this layout, as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

const CPU: DLDevice = DLDevice { device_type: dlpark::ffi::DLDeviceType::CPU, device_id: 0 };

/// Runs `call` and fails allocation number `turn` among those of at least `from` bytes; the bool is true if one failed.
fn with_failure<T>(turn: u32, from: usize, call: impl FnOnce() -> T) -> (T, bool) {
    FROM.set(from);
    FAILURES.set(0);
    UNTIL_FAILURE.set(Some(turn));
    let result = call();
    UNTIL_FAILURE.set(None);
    (result, FAILURES.get() > 0)
}

/// Runs `call` and fails its first allocation, if it makes one.
fn without_memory<T>(call: impl FnOnce() -> T) -> (T, bool) {
    with_failure(0, 0, call)
}

/// Runs `make`, which creates objects, and fails the first large allocation, then the second, until none fails. Expects
/// at least `least` large allocations.
fn with_every_large_failure<T>(
    what: &str, least: u32, outputs: usize, mut make: impl FnMut(*mut *mut T) -> gc_status_t,
    free: unsafe extern "C" fn(*mut T),
) {
    let mut out = vec![ptr::dangling_mut::<T>(); outputs];
    for turn in 0.. {
        let live = LIVE.get();
        let (status, failed) = with_failure(turn, LARGE, || make(out.as_mut_ptr()));
        if failed {
            assert_eq!(status, OUT_OF_MEMORY, "{what}, allocation {turn}");
            assert!(out.iter().all(|&object| object == ptr::dangling_mut()), "{what}, allocation {turn}");
            // SAFETY: the message ends with a NUL.
            assert!(!unsafe { CStr::from_ptr(gc_last_error()) }.is_empty());
        } else {
            assert_eq!(status, 0, "{what}");
            // SAFETY: `make` has just created the object, and nothing else uses it.
            out.iter().for_each(|&object| unsafe { free(object) });
        }
        assert_eq!(LIVE.get(), live, "{what}, allocation {turn} left something behind");
        if !failed {
            assert!(turn >= least, "{what}: {turn} large allocations");
            return;
        }
    }
}

/// All values of GC_CODEC_*.
const ALL_CODECS: std::ops::RangeInclusive<i32> = 1..=7;

#[test]
fn failed_allocations_of_the_callers_sizes_are_errors() {
    const CHUNKS: usize = 5000;
    let (mut bools, mut bytes) = (Room::new(6, 8, &[64 * CHUNKS as i64]), Room::new(1, 8, &[8]));
    let managed = |dl_tensor| DLManagedTensor { dl_tensor, manager_ctx: ptr::null_mut(), deleter: None };
    let (src, mut chunk) = (managed(bools.tensor()), managed(bytes.tensor()));
    let chunks = vec![&raw mut chunk; CHUNKS];
    // SAFETY: the tensors describe live memory, and the outputs have room for all results.
    unsafe {
        with_every_large_failure(
            "gc_tensor_to_device",
            1,
            1,
            |out| gc_tensor_to_device(&src, CPU, out),
            gc_tensor_free,
        );
        with_every_large_failure("gc_pack_chunks", 2, CHUNKS, |out| gc_pack_chunks(&src, CHUNKS, out), gc_tensor_free);
        with_every_large_failure("gc_pack_bits", 1, 1, |out| gc_pack_bits(&src, 0, 1, out), gc_tensor_free);
        with_every_large_failure(
            "gc_unpack_chunks",
            2,
            1,
            |out| gc_unpack_chunks(chunks.as_ptr(), CHUNKS, 60 * CHUNKS as i64, out),
            gc_tensor_free,
        );
    }
    let segments = vec![65i64; 20_000];
    // SAFETY: zero is a valid value of each field.
    let mut options: gc_codec_options_t = unsafe { std::mem::zeroed() };
    options.struct_size = size_of::<gc_codec_options_t>() as u32;
    options.nonfinite = 2;
    (options.segments, options.n_segments) = (segments.as_ptr(), segments.len());
    let mut comm = ptr::null_mut();
    // SAFETY: the options are valid, the outputs have room for a pointer, and each object is released once.
    unsafe {
        with_every_large_failure("gc_comm_group", 1, 5000, |out| gc_comm_group(5000, out), gc_comm_free);
        assert_eq!(gc_comm_group(1, &mut comm), 0);
        for codec in ALL_CODECS {
            options.codec = codec;
            (options.n_chunks, options.server) = (2, 1);
            with_every_large_failure("gc_codec_create", 3, 1, |out| gc_codec_create(&options, out), gc_codec_free);
            (options.n_chunks, options.server) = (0, 0);
            let make = |out| gc_allreduce_create(comm, &options, out);
            with_every_large_failure("gc_allreduce_create", 3, 1, make, gc_allreduce_free);
        }
        gc_comm_free(comm);
        let text = CString::new("y = x;".repeat(LARGE)).unwrap();
        let mut texts: gc_elementwise_options_t = std::mem::zeroed();
        texts.struct_size = size_of_val(&texts) as u32;
        (texts.inputs, texts.outputs, texts.operation) = (c"T x".as_ptr(), c"T y".as_ptr(), text.as_ptr());
        with_every_large_failure(
            "gc_elementwise_create",
            1,
            1,
            |out| gc_elementwise_create(&texts, out),
            gc_kernel_free,
        );
    }
}

/// Memory of a tensor, aligned to 16 bytes.
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
fn a_run_of_an_allreduce_allocates_nothing() {
    let mut room = Room::new(2, 32, &[1000]);
    let mut values = room.tensor();
    // SAFETY: zero is a valid value of each field.
    let mut options: gc_codec_options_t = unsafe { std::mem::zeroed() };
    options.struct_size = size_of::<gc_codec_options_t>() as u32;
    options.n_elements = 1000;
    let (mut comm, mut allreduce) = (ptr::null_mut(), ptr::null_mut());
    for codec in ALL_CODECS {
        options.codec = codec;
        // SAFETY: communicator, options and tensors are valid, and each object is released once.
        unsafe {
            assert_eq!(gc_comm_group(1, &mut comm), 0);
            assert_eq!(gc_allreduce_create(comm, &options, &mut allreduce), 0);
            let list = [&raw mut values];
            let run = || gc_allreduce_run(allreduce, list.as_ptr(), 1, ptr::null(), ptr::null(), ptr::null_mut());
            assert_eq!(without_memory(run), (0, false));
            gc_allreduce_free(allreduce);
            gc_comm_free(comm);
        }
    }
}

#[test]
fn no_call_on_a_codec_allocates() {
    ALL_CODECS.for_each(no_call_allocates_on);
}

fn no_call_allocates_on(kind: i32) {
    let (uint, float) = (1, 2);
    // Large enough for several threads. Several outputs also exercise the check that outputs do not overlap.
    let (sizes, raw) = ([2 << 20, 0, 3, 1 << 20], [0, 0, 1, 0]);
    // SAFETY: zero is a valid value of each field.
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
    // Counts the CPUs first, because the standard library allocates for this.
    assert_eq!(gc_prepare(CPU), 0);
    // SAFETY: the options are valid, and the codec was just created from them.
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
    // SAFETY: the codec is live, and the tensors describe live memory.
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
        // Not every codec has scales of segments, or errors. A failing call allocates its message.
        let refused = (name == "scales" && has_blocks) || (name == "errors_in" && kind == 2);
        let (status, asked) = without_memory(call);
        assert_eq!((status, asked && !refused), (i32::from(refused), false), "codec {kind}: gc_codec_{name}");
        if name == "encode" {
            // SAFETY: both addresses have `payload_bytes` bytes, in separate allocations.
            unsafe { ptr::copy_nonoverlapping((*payload).data, (*chunks).data, payload_bytes as usize) };
        }
    }
    // SAFETY: the codec is live, and nothing uses it afterwards.
    unsafe { gc_codec_free(codec) };
}
