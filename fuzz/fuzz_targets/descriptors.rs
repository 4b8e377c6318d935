//! Passes arbitrary descriptors, with correct memory, to every function. No call may panic, read or write beyond the
//! memory, succeed where it must fail, or change anything when it fails.
#![no_main]

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicI64, Ordering},
};

use arbitrary::Arbitrary;
use dlpark::{
    DlpackFlags,
    ffi::{DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor},
};
use gradcodec::capi::*;
use gradcodec_fuzz::{DTYPES, Description, Number, Place, Tensor, product};
use libfuzzer_sys::fuzz_target;

/// Most elements of an output that a call may request.
const MOST_ELEMENTS: i128 = 1 << 20;

#[derive(Arbitrary, Debug)]
enum Call {
    ChunkBytes { elements: Number, n_chunks: Number },
    StatusName(i32),
    SetThreads(u8),
    BuiltinKernels(Vec<u8>),
    BuiltinKernelShape { kernel: Vec<u8>, capability: i32, struct_size: u32 },
    Prepare(Description),
    Empty(Description),
    FromPointer { description: Description, release: bool },
    ToVersioned(Description),
    FromVersioned { description: Description, major: u8, minor: u32, flags: u64 },
    PackChunks { src: Description, n_chunks: Number },
    UnpackChunks { chunks: Vec<Description>, elements: Number },
    PackBits { src: Description, axis: Axis, order: Order },
    UnpackBits { src: Description, axis: Axis, count: Number, order: Order },
    PackChunksInto { src: Description, dst: Description, order: Order },
    UnpackChunksInto { src: Description, dst: Description, order: Order },
    PackSignsInto { src: Description, dst: Description, order: Order },
    PackSigns { src: Description, n_chunks: Number },
    UnpackSigns { chunks: Vec<Description>, elements: Number, of: Description },
    UnpackSignsInto { src: Description, scales: Option<Description>, dst: Description, order: Order },
    VoteSignsInto { src: Description, turn: u64, dst: Description },
    CopyInto { src: Description, dst: Description },
    ToDevice { src: Description, device: Description },
    PackBitsInto { src: Description, dst: Description, axis: Axis, order: Order },
    UnpackBitsInto { src: Description, dst: Description, axis: Axis, order: Order },
    Codec { options: Options, steps: Vec<Step> },
    CommFromTransport { size: Option<u8>, rank: i8, world_size: i8, flags: u8, missing: (bool, bool) },
    CommGroup(i8),
    AllReduce { options: Options, steps: Vec<Run> },
    Encode { values: Description, codec: i8 },
    Decode { payload: Description, of: Description },
}

/// Tensor that may be missing.
type Optional = Option<Description>;

/// Options of a codec.
#[derive(Arbitrary, Debug)]
struct Options {
    struct_size: Option<u8>,
    codec: u8,
    device: Option<Description>,
    dtypes: (Option<Description>, Option<Description>),
    error: u8,
    scale: u8,
    nonfinite: u8,
    beta: f32,
    segments: Option<Vec<Number>>,
    elements: Number,
    n_chunks: Number,
    server: Number,
    reserved: u8,
}

/// A call on a codec.
#[derive(Arbitrary, Debug)]
enum Step {
    Encode { values: Vec<Description>, factors: [Optional; 2], payload: Description },
    Decode { payload: Description, divisor: i32, factor: Optional, mode: i8, values: Vec<Description> },
    Reduce { chunk: Number, chunks: Description, dst: Description },
    Flags(Description),
    Scales(Description),
    Commit(Optional),
    Rollback,
    Reset,
    StateOut(Description),
    StateIn(Description),
    ErrorsOut(Optional, Optional),
    ErrorsIn(Optional, Optional),
}

/// A call on an all-reduce.
#[derive(Arbitrary, Debug)]
enum Run {
    Values { values: Vec<Description>, factors: [Optional; 2] },
    ToShard { values: Vec<Description>, factors: [Optional; 2], shard: Description },
    FromShard { shard: Description, values: Vec<Description> },
    Flags(Description),
    Commit(Optional),
    Rollback,
    Reset,
    ErrorsOut(Optional, Optional),
    ErrorsIn(Optional, Optional),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Axis {
    None,
    Small(i8),
    Any(i32),
}

impl Axis {
    fn get(self) -> i32 {
        match self {
            Self::None => GC_AXIS_NONE,
            Self::Small(axis) => i32::from(axis % 6),
            Self::Any(axis) => axis,
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Order {
    Big,
    Little,
    Any(i32),
}

impl Order {
    fn get(self) -> i32 {
        match self {
            Self::Big => 0,
            Self::Little => 1,
            Self::Any(order) => order,
        }
    }
}

/// Number of tensors that are given away and not yet released.
static GIVEN: AtomicI64 = AtomicI64::new(0);

unsafe extern "C" fn count_release(context: *mut c_void) {
    assert_eq!(context.addr(), 0x77);
    GIVEN.fetch_sub(1, Ordering::Relaxed);
}

/// Tensor that owns its memory, as other libraries make them.
struct Foreign {
    managed: DLManagedTensor,
    versioned: DLManagedTensorVersioned,
    _tensor: Tensor,
}

unsafe extern "C" fn delete(tensor: *mut DLManagedTensor) {
    GIVEN.fetch_sub(1, Ordering::Relaxed);
    // SAFETY: `foreign` has set the context to its box, and the tensor is released once.
    drop(unsafe { Box::from_raw((*tensor).manager_ctx.cast::<Foreign>()) });
}

unsafe extern "C" fn delete_versioned(tensor: *mut DLManagedTensorVersioned) {
    GIVEN.fetch_sub(1, Ordering::Relaxed);
    // SAFETY: `foreign` has set the context to its box, and the tensor is released once.
    drop(unsafe { Box::from_raw((*tensor).manager_ctx.cast::<Foreign>()) });
}

fn foreign(tensor: Tensor, major: u32, minor: u32, flags: u64) -> *mut Foreign {
    GIVEN.fetch_add(1, Ordering::Relaxed);
    let dl_tensor = tensor.managed.dl_tensor;
    let made = Box::into_raw(Box::new(Foreign {
        managed: DLManagedTensor { dl_tensor, manager_ctx: ptr::null_mut(), deleter: Some(delete) },
        versioned: DLManagedTensorVersioned {
            version: DLPackVersion { major, minor },
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete_versioned),
            flags: DlpackFlags::from_bits_retain(flags),
            dl_tensor,
        },
        _tensor: tensor,
    }));
    // SAFETY: `made` is the box made above.
    unsafe {
        (*made).managed.manager_ctx = made.cast();
        (*made).versioned.manager_ctx = made.cast();
    }
    made
}

/// Checks that a status is in the header, has a message if it is an error, and is no defect of the library.
fn check(status: gc_status_t, may_succeed: bool) -> bool {
    // SAFETY: both functions return text that ends with a NUL.
    let (name, words) = unsafe { (CStr::from_ptr(gc_status_name(status)), CStr::from_ptr(gc_last_error())) };
    let name = name.to_str().unwrap();
    assert!(name != "GC_STATUS_UNKNOWN" && name != "GC_STATUS_PANIC", "{name}: {words:?}");
    assert!(status == 0 || !words.is_empty(), "{name} without a word");
    assert!(status != 0 || may_succeed, "taken, although it does not hold together");
    status == 0
}

/// Calls a function with one result, and releases the result.
fn with_out(may_succeed: bool, call: impl FnOnce(*mut *mut DLManagedTensor) -> gc_status_t) {
    let mut out = ptr::dangling_mut();
    if check(call(&mut out), may_succeed) {
        // SAFETY: the call has succeeded, and so has set `out` to a tensor.
        unsafe { gc_tensor_free(out) };
    } else {
        assert_eq!(out, ptr::dangling_mut());
    }
}

fn is_known(dtype: DLDataType) -> bool {
    DTYPES.contains(&(dtype.code.0, dtype.bits)) && dtype.lanes == 1
}

/// Calls a function that writes to memory of ours, and checks that it does so only if it succeeds.
fn into(src: &Description, dst: &Description, call: impl FnOnce(*const DLTensor, *mut DLTensor) -> gc_status_t) {
    let (mut src, mut dst) = (Tensor::new(src), Tensor::new(dst));
    if src.place == Place::Elsewhere || dst.place == Place::Elsewhere {
        return;
    }
    let (from, before) = (src.memory.clone(), dst.memory.clone());
    let status = call(src.pointer().cast(), dst.pointer().cast());
    let succeeded = check(status, src.place == Place::Here && dst.place == Place::Here);
    assert!(succeeded || dst.memory == before, "changed by a call that was refused");
    assert!(src.memory == from, "a source was written to");
}

/// Tensors of a call, some of which may be missing.
struct Tensors(Vec<Option<Tensor>>);

impl Tensors {
    fn new<'a>(descriptions: impl IntoIterator<Item = Option<&'a Description>>) -> Self {
        Self(descriptions.into_iter().map(|description| description.map(Tensor::new)).collect())
    }

    /// Returns true if all tensors have memory, or need none.
    fn can_be_passed(&self) -> bool {
        self.0.iter().flatten().all(|tensor| tensor.place != Place::Elsewhere)
    }

    fn pointers(&mut self) -> Vec<*mut DLTensor> {
        self.0.iter_mut().map(|one| one.as_mut().map_or(ptr::null_mut(), |one| one.pointer().cast())).collect()
    }

    fn memory(&self) -> Vec<Vec<u8>> {
        self.0.iter().flatten().map(|tensor| tensor.memory.clone()).collect()
    }
}

/// Calls a function that reads some tensors and writes to others, and checks that it writes only if it succeeds.
fn with_tensors(
    mut inputs: Tensors,
    mut outputs: Tensors,
    call: impl FnOnce(&[*mut DLTensor], &[*mut DLTensor]) -> gc_status_t,
) {
    if !inputs.can_be_passed() || !outputs.can_be_passed() {
        return;
    }
    let (from, before) = (inputs.memory(), outputs.memory());
    let (given, to) = (inputs.pointers(), outputs.pointers());
    let succeeded = check(call(&given, &to), true);
    assert!(succeeded || outputs.memory() == before, "changed by a call that was refused");
    assert!(inputs.memory() == from, "a source was written to");
}

/// Calls a function with options for a codec, unless they need too much memory.
fn with_options(options: &Options, call: impl FnOnce(&gc_codec_options_t)) {
    let about = |description: &Option<Description>| {
        // SAFETY: a DLTensor of zeros is valid.
        description.as_ref().map_or(unsafe { std::mem::zeroed::<DLTensor>() }, |one| Tensor::new(one).managed.dl_tensor)
    };
    let segments: Option<Vec<i64>> =
        options.segments.as_ref().map(|sizes| sizes.iter().take(20).map(|size| size.get()).collect());
    let elements = options.elements.get();
    let sizes = segments.as_deref().unwrap_or(std::slice::from_ref(&elements));
    let all: i128 = sizes.iter().map(|&size| i128::from(size.max(0))).sum();
    if too_much(all) {
        return;
    }
    // SAFETY: zeros are valid for each field.
    let mut given: gc_codec_options_t = unsafe { std::mem::zeroed() };
    given.struct_size =
        options.struct_size.map_or(size_of::<gc_codec_options_t>() as u32, |size| u32::from(size % 113));
    given.codec = i32::from(options.codec % 9);
    given.device = about(&options.device).device;
    (given.values, given.results) = (about(&options.dtypes.0).dtype, about(&options.dtypes.1).dtype);
    (given.error, given.scale) = (i32::from(options.error % 4), i32::from(options.scale % 3));
    (given.nonfinite, given.beta) = (i32::from(options.nonfinite % 4), options.beta);
    if let Some(segments) = &segments {
        (given.segments, given.n_segments) = (segments.as_ptr(), segments.len());
    }
    given.n_elements = elements;
    (given.n_chunks, given.server) = (options.n_chunks.get() as usize, options.server.get() as u64);
    // Only block codecs take `raw`. SIGN has no sum.
    given.reduction = i32::from(options.reserved % 4);
    let raw: Vec<u8> = (0..sizes.len()).map(|index| options.reserved >> (index % 8) & 2).collect();
    if options.reserved & 4 != 0 {
        given.raw = raw.as_ptr();
    }
    given.reserved[1] = u32::from(options.reserved / 128);
    call(&given);
}

/// Creates a codec with these options, and calls its functions.
fn codec(options: &Options, given: &gc_codec_options_t, steps: &[Step]) {
    let mut codec = ptr::dangling_mut();
    let ranks = i32::from(options.codec) - 1;
    // SAFETY: `given` and its segments are valid.
    let buffer = unsafe { gc_allreduce_peers_bytes(given, ranks, 1) };
    assert!(buffer == -1 || (1..=64).contains(&ranks) && buffer > 0);
    // SAFETY: `given` and its segments are valid, and `codec` is a place for a pointer.
    if !check(unsafe { gc_codec_create(given, &mut codec) }, true) {
        assert_eq!(codec, ptr::dangling_mut());
        return;
    }
    let stream = ptr::null_mut();
    for step in steps.iter().take(8) {
        // SAFETY: `codec` is valid, and tensors are either valid, or refused by arithmetic alone.
        unsafe {
            match step {
                Step::Encode { values, factors, payload } => {
                    let inputs = factors.iter().map(Option::as_ref).chain(values.iter().take(20).map(Some));
                    with_tensors(Tensors::new(inputs), Tensors::new([Some(payload)]), |from, to| {
                        let (factors, values) = from.split_at(2);
                        let list = values.as_ptr().cast();
                        gc_codec_encode(codec, list, values.len(), factors[0], factors[1], to[0], stream)
                    });
                }
                Step::Decode { payload, divisor, factor, mode, values } => {
                    let inputs = Tensors::new([Some(payload), factor.as_ref()]);
                    with_tensors(inputs, Tensors::new(values.iter().take(20).map(Some)), |from, to| {
                        let mode = i32::from(*mode);
                        gc_codec_decode(codec, from[0], *divisor, from[1], mode, to.as_ptr(), to.len(), stream)
                    });
                }
                Step::Reduce { chunk, chunks, dst } => {
                    // Bytes that no encoder wrote give an error, but the output is written.
                    let (mut chunks, mut dst) = (Tensors::new([Some(chunks)]), Tensors::new([Some(dst)]));
                    if chunks.can_be_passed() && dst.can_be_passed() {
                        let chunk = chunk.get() as usize;
                        check(gc_codec_reduce(codec, chunk, chunks.pointers()[0], dst.pointers()[0], stream), true);
                    }
                }
                Step::Flags(dst) => with_tensors(Tensors::new([]), Tensors::new([Some(dst)]), |_, to| {
                    gc_codec_flags(codec, to[0], stream)
                }),
                Step::Scales(dst) => with_tensors(Tensors::new([]), Tensors::new([Some(dst)]), |_, to| {
                    gc_codec_scales(codec, to[0], stream)
                }),
                Step::Commit(skip) => with_tensors(Tensors::new([skip.as_ref()]), Tensors::new([]), |from, _| {
                    gc_codec_commit(codec, from[0], stream)
                }),
                Step::Rollback => drop(check(gc_codec_rollback(codec, stream), options.nonfinite % 4 == 2)),
                Step::Reset => assert!(check(gc_codec_reset(codec, stream), true)),
                Step::StateOut(dst) => with_tensors(Tensors::new([]), Tensors::new([Some(dst)]), |_, to| {
                    gc_codec_state_out(codec, to[0], stream)
                }),
                Step::StateIn(src) => with_tensors(Tensors::new([Some(src)]), Tensors::new([]), |from, _| {
                    gc_codec_state_in(codec, from[0], stream)
                }),
                Step::ErrorsOut(worker, server) => {
                    let outputs = Tensors::new([worker.as_ref(), server.as_ref()]);
                    with_tensors(Tensors::new([]), outputs, |_, to| gc_codec_errors_out(codec, to[0], to[1], stream));
                }
                Step::ErrorsIn(worker, server) => {
                    let inputs = Tensors::new([worker.as_ref(), server.as_ref()]);
                    with_tensors(inputs, Tensors::new([]), |from, _| {
                        gc_codec_errors_in(codec, from[0], from[1], stream)
                    });
                }
            }
        }
    }
    // SAFETY: `codec` was created above, and is released once.
    unsafe {
        assert!(gc_codec_payload_bytes(codec) >= 0 && gc_codec_state_bytes(codec) >= 256);
        assert!(matches!(gc_codec_exchanges(codec), 1 | 2));
        gc_codec_free(codec);
    }
}

/// Panics: a single rank must not exchange anything.
unsafe extern "C" fn never(
    _: *mut c_void,
    _: *const c_void,
    _: *mut c_void,
    _: usize,
    _: DLDevice,
    _: *mut c_void,
) -> i32 {
    panic!("a world of one rank exchanges something")
}

/// Calls a function with a communicator of a world of one rank.
fn alone(call: impl FnOnce(*mut gc_comm_t)) {
    let mut comm = ptr::dangling_mut();
    // SAFETY: `comm` is a place for a pointer, and the communicator is released once.
    unsafe {
        assert_eq!(gc_comm_group(1, &mut comm), 0);
        call(comm);
        gc_comm_free(comm);
    }
}

/// Creates an all-reduce with these options, and calls its functions.
fn allreduce(comm: *mut gc_comm_t, options: &Options, given: &gc_codec_options_t, steps: &[Run]) {
    let mut allreduce = ptr::dangling_mut();
    // Sometimes sets the options that all-reduces, unlike codecs, require.
    let mut given = *given;
    if !options.reserved.is_multiple_of(4) {
        (given.n_chunks, given.server, given.results) = (given.n_chunks % 2, 0, given.values);
    }
    // SAFETY: `comm`, `given` and its segments are valid, and `allreduce` is a place for a pointer.
    if !check(unsafe { gc_allreduce_create(comm, &given, &mut allreduce) }, true) {
        assert_eq!(allreduce, ptr::dangling_mut());
        return;
    }
    let stream = ptr::null_mut();
    for step in steps.iter().take(8) {
        // SAFETY: `allreduce` is valid, and tensors are either valid, or refused by arithmetic alone.
        unsafe {
            match step {
                Run::Values { values, factors } => {
                    let inputs = Tensors::new(factors.iter().map(Option::as_ref));
                    with_tensors(inputs, Tensors::new(values.iter().take(20).map(Some)), |from, to| {
                        gc_allreduce_run(allreduce, to.as_ptr(), to.len(), from[0], from[1], stream)
                    });
                }
                Run::ToShard { values, factors, shard } => {
                    let inputs = factors.iter().map(Option::as_ref).chain(values.iter().take(20).map(Some));
                    with_tensors(Tensors::new(inputs), Tensors::new([Some(shard)]), |from, to| {
                        let (factors, values) = from.split_at(2);
                        let first = values.as_ptr().cast::<*const DLTensor>();
                        gc_allreduce_reduce_scatter(
                            allreduce,
                            first,
                            values.len(),
                            factors[0],
                            factors[1],
                            to[0],
                            stream,
                        )
                    });
                }
                Run::FromShard { shard, values } => {
                    let outputs = Tensors::new(values.iter().take(20).map(Some));
                    with_tensors(Tensors::new([Some(shard)]), outputs, |from, to| {
                        gc_allreduce_all_gather(allreduce, from[0], to.as_ptr(), to.len(), stream)
                    });
                }
                Run::Flags(dst) => with_tensors(Tensors::new([]), Tensors::new([Some(dst)]), |_, to| {
                    gc_allreduce_flags(allreduce, to[0], stream)
                }),
                Run::Commit(skip) => with_tensors(Tensors::new([skip.as_ref()]), Tensors::new([]), |from, _| {
                    gc_allreduce_commit(allreduce, from[0], stream)
                }),
                Run::Rollback => drop(check(gc_allreduce_rollback(allreduce, stream), options.nonfinite % 4 == 2)),
                Run::Reset => assert!(check(gc_allreduce_reset(allreduce, stream), true)),
                Run::ErrorsOut(worker, server) => {
                    let outputs = Tensors::new([worker.as_ref(), server.as_ref()]);
                    with_tensors(Tensors::new([]), outputs, |_, to| {
                        gc_allreduce_errors_out(allreduce, to[0], to[1], stream)
                    });
                }
                Run::ErrorsIn(workers, server) => {
                    let inputs = Tensors::new([workers.as_ref(), server.as_ref()]);
                    with_tensors(inputs, Tensors::new([]), |from, _| {
                        gc_allreduce_errors_in(allreduce, from[0], from[1], stream)
                    });
                }
            }
        }
    }
    // SAFETY: `allreduce` was created above, and `parts` has room for `pieces` parts.
    unsafe {
        assert!(gc_allreduce_shard_elements(allreduce) >= 0);
        assert!(gc_allreduce_sent_bytes(allreduce, ptr::null_mut()) == 0); // a world of one
        assert!(gc_allreduce_exchanges(allreduce) == 2);
        let pieces = gc_allreduce_parts(allreduce, 0, 1, ptr::null_mut(), 0);
        assert!(pieces >= 0 && gc_allreduce_parts(allreduce, 0, 0, ptr::null_mut(), 0) == pieces);
        let mut parts = vec![gc_part_t { segment: -1, first: -1, count: -1 }; pieces as usize];
        assert!(gc_allreduce_parts(allreduce, 0, 1, parts.as_mut_ptr(), pieces) == pieces);
        assert!(parts.iter().all(|part| part.first == 0 && part.count > 0));
        assert!(gc_allreduce_parts(allreduce, 1, 0, ptr::null_mut(), 0) == -1);
    }
    // SAFETY: `allreduce` was created above, and is not used any more.
    unsafe { gc_allreduce_free(allreduce) };
}

/// Returns true if an output of `elements` elements is too large to request, but not so large that it must be refused.
fn too_much(elements: i128) -> bool {
    elements > MOST_ELEMENTS && elements <= i128::from(i64::MAX)
}

fn run(call: Call) {
    // SAFETY: each argument is either valid, or NULL, unaligned or refused by arithmetic alone.
    unsafe {
        match call {
            Call::ChunkBytes { elements, n_chunks } => {
                let (elements, n_chunks) = (elements.get(), n_chunks.get() as usize);
                let expected = match (u64::try_from(elements), n_chunks) {
                    (Err(_), _) | (_, 0) => -1,
                    (Ok(elements), n_chunks) => elements.div_ceil(8).div_ceil(n_chunks as u64) as i64,
                };
                assert_eq!(gc_chunk_bytes(elements, n_chunks), expected);
            }
            Call::StatusName(code) => assert!(!gc_status_name(code).is_null()),
            Call::SetThreads(n) => assert_eq!(gc_set_threads(u32::from(n % 4)), 0),
            Call::BuiltinKernels(mut family) => {
                family.push(0);
                let (mut fatbin, mut size) = (ptr::null(), 0);
                let status = gc_builtin_kernels(family.as_ptr().cast(), &mut fatbin, &mut size);
                assert_eq!(
                    status,
                    if [&b"bits\0"[..], b"signs\0", b"peers\0"].iter().any(|name| family.starts_with(name)) {
                        0
                    } else {
                        1
                    }
                );
            }
            Call::BuiltinKernelShape { mut kernel, capability, struct_size } => {
                kernel.push(0);
                let mut shape = gc_kernel_shape_t {
                    struct_size,
                    threads: 0,
                    items_per_block: 0,
                    shared_bytes: 0,
                    cluster: 0,
                    reserved: [7; 3],
                };
                let status = gc_builtin_kernel_shape(kernel.as_ptr().cast(), capability, &mut shape);
                assert_eq!((shape.threads > 0, shape.reserved[0]), if status == 0 { (true, 0) } else { (false, 7) });
                assert!(
                    status != 0 || (capability >= 75 && (32..=4096).contains(&struct_size) && struct_size % 8 == 0)
                );
            }
            Call::Prepare(description) => {
                let device = Tensor::new(&description).managed.dl_tensor.device;
                assert_eq!(gc_prepare(device), gc_trim(device));
            }
            Call::Empty(description) => {
                let tensor = Tensor::new(&description);
                let dl = tensor.managed.dl_tensor;
                let sensible = dl.ndim >= 0 && tensor.shape.iter().all(|&size| size >= 0);
                let bits = i128::from(dl.dtype.bits) * i128::from(dl.dtype.lanes);
                if sensible && too_much(product(tensor.shape.iter().copied()).saturating_mul(bits) / 8) {
                    return;
                }
                // The bytes of so many elements may exceed the address space, so the call may fail, too.
                with_out(true, |out| gc_tensor_empty(dl.device, dl.dtype, dl.ndim, dl.shape, out));
            }
            Call::FromPointer { description, release } => {
                let tensor = Tensor::new(&description);
                let dl = tensor.managed.dl_tensor;
                let context = ptr::without_provenance_mut(0x77);
                let function = release.then_some(count_release as unsafe extern "C" fn(*mut c_void));
                GIVEN.fetch_add(i64::from(release), Ordering::Relaxed);
                let mut out = ptr::dangling_mut();
                // byte_offset and the address of the descriptor are not among its arguments, so all may succeed.
                let status = gc_tensor_from_pointer(
                    dl.data, dl.device, dl.dtype, dl.ndim, dl.shape, dl.strides, function, context, &mut out,
                );
                if check(status, true) {
                    gc_tensor_free(out);
                } else {
                    assert_eq!(out, ptr::dangling_mut());
                    GIVEN.fetch_sub(i64::from(release), Ordering::Relaxed);
                }
            }
            Call::ToVersioned(description) => {
                let foreign = foreign(Tensor::new(&description), 1, 0, 0);
                let mut out = ptr::dangling_mut();
                // The tensor's own address is valid here, whatever the description has, so all calls may succeed.
                if check(gc_tensor_to_versioned(&raw mut (*foreign).managed, &mut out), true) {
                    let minor = match (*out).dl_tensor.dtype.code.0 {
                        0..=6 => 0,
                        7..=17 => 1,
                        _ => 3,
                    };
                    assert_eq!(((*out).version.major, (*out).version.minor, (*out).flags.bits()), (1, minor, 0));
                    gc_tensor_free_versioned(out);
                } else {
                    assert_eq!(out, ptr::dangling_mut());
                    delete(&raw mut (*foreign).managed);
                }
            }
            Call::FromVersioned { description, major, minor, flags } => {
                let foreign = foreign(Tensor::new(&description), u32::from(major % 3), minor, flags);
                let may_succeed = major % 3 == 1 && flags & (1 | 4) == 0;
                let mut out = ptr::dangling_mut();
                if check(gc_tensor_from_versioned(&raw mut (*foreign).versioned, &mut out), may_succeed) {
                    gc_tensor_free(out);
                } else {
                    assert_eq!(out, ptr::dangling_mut());
                    delete_versioned(&raw mut (*foreign).versioned);
                }
            }
            Call::PackChunks { src, n_chunks } => pack(gc_pack_chunks, &src, n_chunks),
            Call::PackSigns { src, n_chunks } => pack(gc_pack_signs, &src, n_chunks),
            Call::UnpackChunks { chunks, elements } => {
                let mut chunks: Vec<Tensor> = chunks.iter().take(12).map(Tensor::new).collect();
                if chunks.iter().any(|chunk| chunk.place == Place::Elsewhere) || too_much(i128::from(elements.get())) {
                    return;
                }
                let may_succeed = !chunks.is_empty() && chunks.iter().all(|chunk| chunk.place == Place::Here);
                let pointers: Vec<_> = chunks.iter_mut().map(Tensor::pointer).collect();
                with_out(may_succeed, |out| gc_unpack_chunks(pointers.as_ptr(), pointers.len(), elements.get(), out));
            }
            Call::UnpackSigns { chunks, elements, of } => {
                let mut chunks: Vec<Tensor> = chunks.iter().take(12).map(Tensor::new).collect();
                if chunks.iter().any(|chunk| chunk.place == Place::Elsewhere)
                    || too_much(i128::from(elements.get()) * 8)
                {
                    return;
                }
                let dtype = Tensor::new(&of).managed.dl_tensor.dtype;
                let may_succeed = !chunks.is_empty() && chunks.iter().all(|chunk| chunk.place == Place::Here);
                let pointers: Vec<_> = chunks.iter_mut().map(Tensor::pointer).collect();
                with_out(may_succeed, |out| {
                    gc_unpack_signs(pointers.as_ptr(), pointers.len(), elements.get(), dtype, out)
                });
            }
            Call::PackBits { src, axis, order } => {
                let mut src = Tensor::new(&src);
                if src.place == Place::Elsewhere || i128::from(src.elements) > MOST_ELEMENTS {
                    return;
                }
                let may_succeed = src.place == Place::Here;
                let src = src.pointer();
                with_out(may_succeed, |out| gc_pack_bits(src, axis.get(), order.get(), out));
            }
            Call::UnpackBits { src, axis, count, order } => {
                let mut src = Tensor::new(&src);
                if src.place == Place::Elsewhere || unpacked(&src, axis.get(), count.get()).is_some_and(too_much) {
                    return;
                }
                let may_succeed = src.place == Place::Here;
                let src = src.pointer();
                with_out(may_succeed, |out| gc_unpack_bits(src, axis.get(), count.get(), order.get(), out));
            }
            Call::PackChunksInto { src, dst, order } => {
                into(&src, &dst, |src, dst| gc_pack_chunks_into(src, order.get(), dst, ptr::null_mut()));
            }
            Call::UnpackChunksInto { src, dst, order } => {
                into(&src, &dst, |src, dst| gc_unpack_chunks_into(src, order.get(), dst, ptr::null_mut()));
            }
            Call::PackSignsInto { src, dst, order } => {
                into(&src, &dst, |src, dst| gc_pack_signs_into(src, order.get(), dst, ptr::null_mut()));
            }
            Call::UnpackSignsInto { src, scales, dst, order } => {
                let mut scales = scales.as_ref().map(Tensor::new);
                if scales.as_ref().is_some_and(|scales| scales.place == Place::Elsewhere) {
                    return;
                }
                let factors = scales.as_mut().map_or(ptr::null_mut(), Tensor::pointer);
                into(&src, &dst, |src, dst| {
                    gc_unpack_signs_into(src, factors.cast(), order.get(), dst, ptr::null_mut())
                });
            }
            Call::VoteSignsInto { src, turn, dst } => {
                into(&src, &dst, |src, dst| gc_vote_signs_into(src, turn, dst, ptr::null_mut()));
            }
            Call::CopyInto { src, dst } => {
                let [from, to] = [&src, &dst].map(|one| Tensor::new(one).managed.dl_tensor.dtype);
                // A description with an unknown dtype has no memory here.
                if from == to && !is_known(from) {
                    return;
                }
                into(&src, &dst, |src, dst| gc_copy_into(src, dst, ptr::null_mut()));
            }
            Call::ToDevice { src, device } => {
                let (mut src, device) = (Tensor::new(&src), Tensor::new(&device).managed.dl_tensor.device);
                let known = is_known(src.managed.dl_tensor.dtype);
                if !known || src.place == Place::Elsewhere || i128::from(src.elements) > MOST_ELEMENTS {
                    return;
                }
                let may_succeed = src.place == Place::Here;
                with_out(may_succeed, |out| gc_tensor_to_device(src.pointer(), device, out));
            }
            Call::Encode { values, codec } => {
                let mut values = Tensor::new(&values);
                if values.place == Place::Elsewhere || i128::from(values.elements) > MOST_ELEMENTS {
                    return;
                }
                let may_succeed = values.place == Place::Here;
                with_out(may_succeed, |out| gc_encode(values.pointer(), codec.into(), out));
            }
            Call::Decode { payload, of } => {
                let (mut payload, dtype) = (Tensor::new(&payload), Tensor::new(&of).managed.dl_tensor.dtype);
                if payload.place == Place::Elsewhere {
                    return;
                }
                let may_succeed = payload.place == Place::Here;
                with_out(may_succeed, |out| gc_decode(payload.pointer(), dtype, out));
            }
            Call::PackBitsInto { src, dst, axis, order } => {
                into(&src, &dst, |src, dst| gc_pack_bits_into(src, axis.get(), order.get(), dst, ptr::null_mut()));
            }
            Call::UnpackBitsInto { src, dst, axis, order } => {
                into(&src, &dst, |src, dst| gc_unpack_bits_into(src, axis.get(), order.get(), dst, ptr::null_mut()));
            }
            Call::Codec { options, steps } => with_options(&options, |given| codec(&options, given, &steps)),
            Call::CommFromTransport { size, rank, world_size, flags, missing } => {
                let (rank, world_size) = (rank.into(), world_size.into());
                let given = gc_transport_t {
                    struct_size: size.map_or(size_of::<gc_transport_t>() as u32, |size| u32::from(size % 41)),
                    rank,
                    world_size,
                    flags: flags.into(),
                    ctx: ptr::null_mut(),
                    all_to_all: (!missing.0).then_some(never),
                    all_gather: (!missing.1).then_some(never),
                };
                let good = given.struct_size == size_of::<gc_transport_t>() as u32
                    && (0..world_size).contains(&rank)
                    && flags <= 1
                    && missing == (false, false);
                let mut comm = ptr::dangling_mut();
                if check(gc_comm_from_transport(&given, &mut comm), good) {
                    assert!(gc_comm_rank(comm) == rank && gc_comm_world_size(comm) == world_size);
                    assert!(check(gc_comm_async_error(comm), true));
                    assert!(check(gc_comm_abort(comm), true) && check(gc_comm_abort(comm), true));
                    assert!(!check(gc_comm_async_error(comm), false));
                    gc_comm_free(comm);
                } else {
                    assert!(!good && comm == ptr::dangling_mut());
                }
            }
            Call::CommGroup(world_size) => {
                let mut comms = [ptr::dangling_mut::<gc_comm_t>(); 127];
                let made = check(gc_comm_group(world_size.into(), comms.as_mut_ptr()), world_size > 0);
                assert_eq!(made, world_size > 0);
                let taken = if made { world_size as usize } else { 0 };
                if taken == 1 {
                    // A node of one rank: without an inter_node, with one communicator twice, and with two.
                    let (mut other, mut two) = (ptr::null_mut(), ptr::null_mut());
                    assert!(check(gc_comm_group(1, &mut other), true));
                    assert!(!check(gc_comm_hierarchical(comms[0], ptr::null_mut(), &mut two), false));
                    assert!(!check(gc_comm_hierarchical(comms[0], comms[0], &mut two), false) && two.is_null());
                    assert!(check(gc_comm_hierarchical(comms[0], other, &mut two), true));
                    [other, two].into_iter().for_each(|comm| gc_comm_free(comm));
                }
                comms[..taken].iter().for_each(|&comm| gc_comm_free(comm));
                assert!(comms[taken..].iter().all(|&comm| comm == ptr::dangling_mut()));
            }
            Call::AllReduce { options, steps } => {
                with_options(&options, |given| alone(|comm| allreduce(comm, &options, given, &steps)));
            }
        }
    }
}

type Pack = unsafe extern "C" fn(*const DLManagedTensor, usize, *mut *mut DLManagedTensor) -> gc_status_t;

/// Calls a function that packs to chunks, and releases the chunks.
fn pack(function: Pack, src: &Description, n_chunks: Number) {
    let mut src = Tensor::new(src);
    let n_chunks = n_chunks.get() as usize;
    // `out` has room for 300 chunks. From 2^60 chunks on the address space is too small, so the call fails.
    if src.place == Place::Elsewhere || i128::from(src.elements) > MOST_ELEMENTS || (300..1 << 60).contains(&n_chunks) {
        return;
    }
    let mut out = [ptr::dangling_mut::<DLManagedTensor>(); 300];
    // SAFETY: `src` is as in `run`; `out` has room for the chunks, unless the call fails.
    let status = unsafe { function(src.pointer(), n_chunks, out.as_mut_ptr()) };
    let taken = if check(status, src.place == Place::Here && n_chunks != 0) { n_chunks } else { 0 };
    // SAFETY: the call has succeeded, and so has set `n_chunks` tensors.
    out[..taken].iter().for_each(|&chunk| unsafe { gc_tensor_free(chunk) });
    assert!(out[taken..].iter().all(|&chunk| chunk == ptr::dangling_mut()));
}

/// Returns the number of elements that unpacking would give; None if it would be refused.
fn unpacked(src: &Tensor, axis: i32, count: i64) -> Option<i128> {
    if src.place != Place::Here {
        return None;
    }
    let ndim = src.shape.len() as i64;
    let from_start = i64::from(axis) + if axis < 0 { ndim } else { 0 };
    let flat = axis == GC_AXIS_NONE || ndim == 0;
    let length = if flat { src.elements } else { *src.shape.get(usize::try_from(from_start).ok()?)? };
    let bits = i128::from(length) * 8;
    let count = match count {
        GC_COUNT_ALL => bits,
        0.. => i128::from(count),
        _ => bits + i128::from(count),
    };
    let count = i64::try_from(count).ok()?;
    if flat {
        return Some(i128::from(count));
    }
    let sizes = src.shape.iter().enumerate();
    Some(product(sizes.map(|(index, &size)| if index as i64 == from_start { count } else { size })))
}

fuzz_target!(|calls: Vec<Call>| {
    for call in calls.into_iter().take(8) {
        run(call);
        assert_eq!(GIVEN.load(Ordering::Relaxed), 0, "released twice, or never");
    }
});
