//! KERNELS
//!
//! CuPy's ElementwiseKernel and ReductionKernel, for CUDA tensors of any framework. You write C++ code for one element;
//! NVRTC, NVIDIA's compiler library, compiles it for each combination of types. NVRTC is loaded on first use, as the
//! driver is. No headers and no toolkit are needed. Your preamble may include NVIDIA's or CuPy's headers, from folders
//! that options such as "-I/usr/local/cuda/include" name. Compiled code is kept on disk for the next process.
//!
//! ```c
//! gc_elementwise_options_t options = {.struct_size = sizeof options, .name = "my_kernel",
//!     .inputs = "float32 x, float32 y", .outputs = "float32 z",
//!     .operation = "if (x - 2 > y) { z = x * y; } else { z = x + y; }"};
//! gc_kernel_t *kernel;
//! gc_elementwise_create(&options, &kernel);
//! const DLTensor *inputs[] = {x, y};                                      // of shapes (2, 3) and (3)
//! gc_kernel_run(kernel, inputs, 2, &z, 1, NULL, stream);                   // of shape (2, 3)
//!
//! gc_reduction_options_t sum = {.struct_size = sizeof sum, .name = "sum", .inputs = "T x", .outputs = "T y",
//!     .map = "x", .reduce = "a + b", .post_map = "y = a", .identity = "0"};
//! int32_t axis = 1;
//! gc_run_options_t along = {.struct_size = sizeof along, .axes = &axis, .n_axes = 1};     // x.sum(axis=1)
//! ```
//!
//! *Parameters*: a list of types and names, separated by commas, as in "float32 x, raw T y". A type is one of NumPy's
//! names (bool, int8 to int64, uint8 to uint64, float16, float32, float64), bfloat16, or a letter, which stands for the
//! dtype of the tensors. There may be up to 32. In the C++ code, each is a variable of that name: a const element of
//! the input, or the element of the output, which you set. An output that you do not set keeps its element, which can
//! be read, too. Arithmetic on float16 and bfloat16 is done in float; if CuPy's headers can be included, both are
//! CuPy's classes. int8_t to int64_t, uint8_t to uint64_t, intptr_t and uintptr_t need no header. Not supported:
//! complex numbers, textures, `no_return`. Names that begin with _, and the name i, are the kernel's own:
//!
//! - `i`: the element's number, in C order; `n`: the number of elements, also `_ind.size()`, unless a parameter has the
//!   name n;
//! - a *raw* parameter is the whole tensor: `x[k]` is its element number k in C order, `x[indices]` its element at an
//!   array of ptrdiff_t; `x.size()`, `x.shape()[axis]`, `x.strides()[axis]` (in bytes), `x.ndim`. It is not broadcast,
//!   and its address must be a multiple of its element's size;
//! - in a reduction: `a` and `b`, values to be reduced, and `a` in post_map; `n`: the number of elements of one output;
//!   `_in_ind.size()`, `_out_ind.size()`; `_J` in map: the element's number among those that are reduced to one output;
//!   `i` in post_map: the output's number; `_type_reduce`: the type in which values are reduced.
//!
//! Inputs are broadcast against each other by NumPy's rule. Outputs have the broadcast shape, in a reduction without
//! the reduced axes. An input on the CPU without dimensions is a *scalar*: its value is read during the call (a graph
//! keeps it) and cast to the parameter's type, as gc_copy_into() casts. A scalar decides a letter's dtype only if no
//! tensor has that letter.
//!
//! a * b + c is not contracted into an FMA without GC_KERNEL_FMAD, so + - * / sqrt and comparisons of float32 and
//! float64 give NumPy's results to the last bit. The order of additions in a reduction depends only on dtypes, shapes
//! and strides, so its result is the same on every run and GPU.
//!
//! *NVRTC* is the library that the options name; or else the file that GRADCODEC_NVRTC in the environment names; or
//! else what the process has loaded; or else libnvrtc.so.13, .12 or .11.2 where the system or pip has put it. Version
//! 11.2 or later is needed. Compiled code is *kept on disk*, in $GRADCODEC_CACHE_DIR, or else
//! $XDG_CACHE_HOME/gradcodec, or else $HOME/.cache/gradcodec. It takes up to 256 MiB; beyond that, the least recently
//! used files are deleted. GRADCODEC_CACHE=0 turns this off. Other values than 0 and 1, and a relative path in
//! GRADCODEC_CACHE_DIR, give GC_STATUS_INVALID_ARGUMENT. If the directory cannot be used, kernels are compiled. A
//! machine without NVRTC runs code from another machine: copy the directory (docs/KERNELS.md).
//!
//! Any thread may call any function on a kernel at any time. The first call with a new combination of types compiles
//! the kernel. That takes a fraction of a second, waits for the context, and is refused in a capture: call
//! gc_kernel_prepare() before. Running a prepared kernel can be captured; it never waits, and allocates nothing, not
//! even on the host. Your code runs like any kernel of yours: it can overwrite memory, and hang the device.

use std::{
    ffi::{CStr, c_char, c_void},
    mem::offset_of,
    ops::Range,
    ptr,
};

use arrayvec::ArrayVec;
use dlpark::ffi::DLTensor;

use crate::{
    cuda::Stream,
    dlpack::input,
    ffi::{
        api::gc_status_t,
        borrow::{self, Count, Out},
        error::{Result, error},
        fallible, handle,
        panics::boundary,
    },
    jit,
};

use super::{
    definition::{Definition, TEXTS, Text, Texts},
    ops::{self, Call, Kernel, Purpose, Views},
    search::Handle,
};

/// A kernel: gc_elementwise_create() or gc_reduction_create() makes one.
pub struct gc_kernel_t(Kernel);

/// Flags of gc_elementwise_options_t and gc_reduction_options_t.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelFlag {
    /// Contract a * b + c into an FMA, which rounds once.
    Fmad = 1,
    /// Neither read compiled code from disk nor keep it there.
    NoDisk = 2,
}

/// Flags of gc_run_options_t.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunFlag {
    /// Keep each reduced axis in the outputs, as a dimension of size 1.
    Keepdims = 1,
}

/// Options of gc_elementwise_create(). Set struct_size and the fields that you need; a field that is 0 has its default.
/// Texts are read during the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gc_elementwise_options_t {
    /// Set by you: sizeof(gc_elementwise_options_t).
    pub struct_size: u32,
    /// Any of GC_KERNEL_*, or'ed.
    pub flags: u32,
    /// The input parameters. NULL: none.
    pub inputs: *const c_char,
    /// The output parameters, at least one.
    pub outputs: *const c_char,
    /// Statements for one element, which `return`, `continue` and `break` end. May be empty, but not NULL.
    pub operation: *const c_char,
    /// Identifier of the kernel in profilers and errors. NULL: "kernel".
    pub name: *const c_char,
    /// Declarations before the kernel. NULL: none.
    pub preamble: *const c_char,
    /// Statements before a thread's loop over elements. NULL: none.
    pub loop_prep: *const c_char,
    /// Statements after that loop. NULL: none.
    pub after_loop: *const c_char,
    /// n_options options of NVRTC.
    pub options: *const *const c_char,
    /// The number of `options`.
    pub n_options: usize,
    /// NVRTC's handle from dlopen(), which must stay open as long as the kernel lives. NULL: NVRTC is searched for.
    pub nvrtc: *mut c_void,
    /// Must be 0.
    pub reserved: [u64; 4],
}

// SAFETY: the fields are numbers and pointers, without padding between them.
unsafe impl borrow::Extensible for gc_elementwise_options_t {
    const FIRST_SIZE: usize = 120;
    const RESERVED: Range<usize> = offset_of!(Self, reserved)..size_of::<Self>();
}

/// Options of gc_reduction_create(): a reduction is post_map of (reduce of (map of every element)). Set struct_size and
/// the fields that you need; a field that is 0 has its default. Texts are read during the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gc_reduction_options_t {
    /// Set by you: sizeof(gc_reduction_options_t).
    pub struct_size: u32,
    /// Any of GC_KERNEL_*, or'ed.
    pub flags: u32,
    /// The input parameters, at least one of which is not raw.
    pub inputs: *const c_char,
    /// The output parameters, at least one, none of them raw.
    pub outputs: *const c_char,
    /// An expression of the inputs: "x * x".
    pub map: *const c_char,
    /// An expression of a and b, in which their order and grouping do not matter: "a + b".
    pub reduce: *const c_char,
    /// Statements that set the outputs from a: "y = sqrt(a)".
    pub post_map: *const c_char,
    /// The result for no elements: "0". NULL: there must be at least one element.
    pub identity: *const c_char,
    /// Identifier of the kernel in profilers and errors. NULL: "kernel".
    pub name: *const c_char,
    /// The type in which values are reduced: a type of parameters, or any C++ type of up to 32 bytes and an alignment
    /// of at most 16 bytes. NULL: the type of the first output.
    pub reduce_type: *const c_char,
    /// Declarations before the kernel. NULL: none.
    pub preamble: *const c_char,
    /// n_options options of NVRTC.
    pub options: *const *const c_char,
    /// The number of `options`.
    pub n_options: usize,
    /// NVRTC's handle from dlopen(), which must stay open as long as the kernel lives. NULL: NVRTC is searched for.
    pub nvrtc: *mut c_void,
    /// Must be 0.
    pub reserved: [u64; 4],
}

// SAFETY: the fields are numbers and pointers, without padding between them.
unsafe impl borrow::Extensible for gc_reduction_options_t {
    const FIRST_SIZE: usize = 136;
    const RESERVED: Range<usize> = offset_of!(Self, reserved)..size_of::<Self>();
}

/// Options of gc_kernel_run(). Set struct_size and the fields that you need; a field that is 0 has its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gc_run_options_t {
    /// Set by you: sizeof(gc_run_options_t).
    pub struct_size: u32,
    /// Any of GC_RUN_*, or'ed.
    pub flags: u32,
    /// The number of elements of an elementwise kernel whose inputs are all raw or scalars. If its outputs are raw,
    /// too, it is needed; otherwise it is 0 or the number of elements of each output.
    pub size: i64,
    /// The axes that a reduction reduces, of the inputs' broadcast shape; negative ones count from the last. NULL: all.
    pub axes: *const i32,
    /// The number of `axes`; 0 if `axes` is NULL.
    pub n_axes: usize,
    /// Workspace of a reduction: uint8, at least gc_kernel_workspace_bytes() bytes, on the device, C-contiguous,
    /// aligned to 16 bytes. NULL if 0 bytes are needed.
    pub workspace: *const DLTensor,
    /// For gc_kernel_prepare() only: the compute capability, 90 for 9.0, of a GPU that need not be present. The kernel
    /// is compiled for it, but not loaded. Tensors may be on any device. An input on the CPU without dimensions is a
    /// scalar, so give it the device CUDA if it will be a tensor.
    pub capability: i32,
    /// Must be 0.
    pub reserved0: u32,
    /// Must be 0.
    pub reserved: [u64; 3],
}

// SAFETY: the fields are numbers and pointers, without padding between them.
unsafe impl borrow::Extensible for gc_run_options_t {
    const FIRST_SIZE: usize = 72;
    const RESERVED: Range<usize> = offset_of!(Self, reserved0)..size_of::<Self>();
}

/// Copies an optional text.
///
/// # Safety
/// See [`borrow::text`].
unsafe fn text(name: &'static str, pointer: *const c_char) -> Result<Option<String>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the pointer is not NULL, so it is a text that ends with a NUL, as the caller promises.
    owned(name, unsafe { borrow::text(name, pointer)? }).map(Some)
}

fn owned(name: &'static str, text: &CStr) -> Result<String> {
    jit::owned(text.to_str().map_err(|_| error!(InvalidArgument, "options: {name} is not UTF-8"))?)
}

/// Options of either kind of kernel.
struct KernelOptions {
    is_reduction: bool,
    flags: u32,
    /// Kind, name and address of each text.
    texts: ArrayVec<(Text, &'static str, *const c_char), TEXTS>,
    options: *const *const c_char,
    n_options: usize,
    nvrtc: *mut c_void,
}

impl From<gc_elementwise_options_t> for KernelOptions {
    fn from(given: gc_elementwise_options_t) -> Self {
        let gc_elementwise_options_t { flags, options, n_options, nvrtc, .. } = given;
        let texts = ArrayVec::from_iter([
            (Text::Name, "name", given.name),
            (Text::Inputs, "inputs", given.inputs),
            (Text::Outputs, "outputs", given.outputs),
            (Text::Operation, "operation", given.operation),
            (Text::Preamble, "preamble", given.preamble),
            (Text::LoopPrep, "loop_prep", given.loop_prep),
            (Text::AfterLoop, "after_loop", given.after_loop),
        ]);
        Self { is_reduction: false, flags, texts, options, n_options, nvrtc }
    }
}

impl From<gc_reduction_options_t> for KernelOptions {
    fn from(given: gc_reduction_options_t) -> Self {
        let gc_reduction_options_t { flags, options, n_options, nvrtc, .. } = given;
        let texts = ArrayVec::from_iter([
            (Text::Name, "name", given.name),
            (Text::Inputs, "inputs", given.inputs),
            (Text::Outputs, "outputs", given.outputs),
            (Text::Map, "map", given.map),
            (Text::Reduce, "reduce", given.reduce),
            (Text::PostMap, "post_map", given.post_map),
            (Text::Identity, "identity", given.identity),
            (Text::ReduceType, "reduce_type", given.reduce_type),
            (Text::Preamble, "preamble", given.preamble),
        ]);
        Self { is_reduction: true, flags, texts, options, n_options, nvrtc }
    }
}

/// Creates a kernel from options.
///
/// # Safety
/// `options` is as [`borrow::options`] requires. Every text ends with a NUL, NVRTC's options are `n_options` texts,
/// NVRTC's handle is NULL or came from dlopen and stays open, and `out` has room for a pointer.
unsafe fn create<T: borrow::Extensible + Into<KernelOptions>>(
    options: *const T, out: *mut *mut gc_kernel_t,
) -> Result<()> {
    const FMAD: u32 = KernelFlag::Fmad as u32;
    const NO_DISK: u32 = KernelFlag::NoDisk as u32;
    // SAFETY: the caller promises options, texts with a NUL, `n_options` of NVRTC's options, and room for a pointer.
    unsafe {
        let (given, out) = (borrow::options("options", options)?, Out::one("out", out)?);
        let KernelOptions { is_reduction, flags, texts: given, options, n_options, nvrtc } = given.into();
        if flags & !(FMAD | NO_DISK) != 0 {
            return Err(error!(
                InvalidArgument,
                "options: flags {flags:#x}; any of GC_KERNEL_FMAD {FMAD:#x} and GC_KERNEL_NO_DISK {NO_DISK:#x} expected"
            ));
        }
        let mut texts = Texts::default();
        for (which, name, pointer) in given {
            texts[which as usize] = text(name, pointer)?;
        }
        let options = borrow::items("options: options", options, Count::of("options: n_options", n_options))?;
        let mut copies = fallible::list(options.len(), "options")?;
        for &option in options {
            copies.push(owned("options", borrow::text("options: options", option)?)?);
        }
        let definition = Definition::new(is_reduction, texts, copies, flags & FMAD != 0)?;
        let kernel = Kernel::new(definition, Handle::of(nvrtc), flags & NO_DISK == 0);
        out.fill([handle::hand_out(gc_kernel_t(kernel))]);
        Ok(())
    }
}

/// Adds a call's tensors to `views`.
///
/// # Safety
/// See [`input::tensors`].
unsafe fn add<'a>(
    views: &mut Views<'a>, name: &'static str, tensors: *const *const DLTensor, count: Count,
) -> Result<()> {
    // SAFETY: `tensors` has `count` tensors, which outlive the views.
    for view in unsafe { input::tensors(name, tensors, count)? } {
        if views.try_push(view?).is_err() {
            return Err(error!(InvalidArgument, "{name}: more tensors than any kernel has parameters"));
        }
    }
    Ok(())
}

/// Calls `run` with a kernel and the arguments of its run, which are large and therefore not moved.
///
/// # Safety
/// The pointers are as gc_kernel_run() describes them.
unsafe fn with_call<T>(
    kernel: *const gc_kernel_t, inputs: *const *const DLTensor, n_inputs: usize, outputs: *const *mut DLTensor,
    n_outputs: usize, options: *const gc_run_options_t, run: impl FnOnce(&Kernel, &Call<'_>) -> Result<T>,
) -> Result<T> {
    const KEEPDIMS: u32 = RunFlag::Keepdims as u32;
    // SAFETY: the caller promises, as gc_kernel_run() requires, a kernel, arrays of `n_inputs` and `n_outputs` tensors,
    // and options with `n_axes` axes, all of which do not change during the call.
    unsafe {
        let kernel = &handle::borrow("kernel", kernel)?.0;
        let (mut views, mut given) = (Views::new(), ops::Options::default());
        add(&mut views, "inputs", inputs, Count::of("n_inputs", n_inputs))?;
        add(&mut views, "outputs", outputs.cast(), Count::of("n_outputs", n_outputs))?;
        if !options.is_null() {
            let options = borrow::options("options", options)?;
            if options.flags & !KEEPDIMS != 0 {
                return Err(error!(
                    InvalidArgument,
                    "options: flags {:#x}; 0 or GC_RUN_KEEPDIMS {KEEPDIMS} expected", options.flags
                ));
            }
            if options.axes.is_null() && options.n_axes != 0 {
                return Err(error!(InvalidArgument, "options: n_axes {} with axes NULL", options.n_axes));
            }
            let axes = borrow::items("options: axes", options.axes, Count::of("options: n_axes", options.n_axes))?;
            given = ops::Options {
                size: options.size,
                axes: (!options.axes.is_null()).then_some(axes),
                keepdims: options.flags & KEEPDIMS != 0,
                workspace: input::optional("options: workspace", options.workspace)?,
                capability: options.capability,
            };
        }
        run(kernel, &Call { views: &views, inputs: n_inputs, options: given })
    }
}

/// Creates an elementwise kernel from C++ code. Nothing is compiled yet.
///
/// `*out`: yours to release, by gc_kernel_free().
///
/// - GC_STATUS_INVALID_ARGUMENT: there are no outputs; `operation` is NULL; a type, name or flag is invalid; a name
///   occurs twice; a text is not UTF-8; there are more than 63 options of NVRTC; or an unknown or reserved field is not
///   0 (the message has its offset).
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_elementwise_create(
    options: *const gc_elementwise_options_t, out: *mut *mut gc_kernel_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises options of their own size, texts, and room for a pointer.
        unsafe { create(options, out) }
    })
}

/// Creates a reduction kernel from C++ code. Nothing is compiled yet.
///
/// `*out`: yours to release, by gc_kernel_free().
///
/// - All errors of gc_elementwise_create().
/// - GC_STATUS_INVALID_ARGUMENT: map, reduce or post_map is NULL; an output is raw; or all inputs are raw.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_reduction_create(
    options: *const gc_reduction_options_t, out: *mut *mut gc_kernel_t,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises options of their own size, texts, and room for a pointer.
        unsafe { create(options, out) }
    })
}

/// Runs a kernel with one tensor for each parameter, in their order. For a new combination of types, it compiles only
/// the code for these shapes and strides. Other shapes and strides may need more code later; gc_kernel_prepare()
/// compiles all of it.
///
/// `inputs`, `outputs`: any strides, any address. An elementwise output may be an input of the same dtype, address,
/// shape and strides that is not raw. Any other overlap is INVALID_ARGUMENT, and so is any overlap in a reduction.
/// `options`: NULL for none.
///
/// - GC_STATUS_INVALID_ARGUMENT: n_inputs or n_outputs is not the number of parameters; an axis does not exist, or
///   occurs twice; axes, GC_RUN_KEEPDIMS or a workspace for an elementwise kernel; a capability, which is for
///   gc_kernel_prepare(); a reduction of no element without an identity; a workspace that is needed and NULL or not
///   aligned to 16 bytes; `size` other than 0, unless all inputs are raw or scalars, or not above 0 if the outputs are
///   raw, too; in a capture, a combination yet to be compiled or loaded; strides that take more loops than a launch has
///   room for, after neighbouring dimensions were merged where that is possible (up to 8 parameters, none of them raw,
///   leave room for 40 loops).
/// - GC_STATUS_SHAPE_MISMATCH: shapes that cannot be broadcast, an output of another shape or `size`, a workspace that
///   is too small.
/// - GC_STATUS_UNSUPPORTED_DTYPE: a tensor has another dtype than its parameter, or than one of the same letter.
/// - GC_STATUS_UNSUPPORTED_DEVICE: a CPU tensor is no scalar, or NVRTC does not support the GPU.
/// - GC_STATUS_SIZE_OVERFLOW: more than 2^63 - 1 elements or bytes of workspace, or more than 2^31 - 1 thread blocks.
/// - GC_STATUS_NOT_CONTIGUOUS: the workspace is not C-contiguous.
/// - GC_STATUS_NVRTC_UNAVAILABLE: NVRTC was not found; the message lists where it was searched.
/// - GC_STATUS_COMPILE: the code does not compile. The message has the kernel's name and NVRTC's first error, with the
///   line in your text; gc_kernel_log() returns all errors.
///
/// # Safety
/// The pointers are as described, nothing else uses the memory of outputs and workspace meanwhile, and the kernel
/// accesses only memory of its tensors.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_kernel_run(
    kernel: *mut gc_kernel_t, inputs: *const *const DLTensor, n_inputs: usize, outputs: *const *mut DLTensor,
    n_outputs: usize, options: *const gc_run_options_t, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        let run = |kernel: &Kernel, call: &Call<'_>| kernel.call(call, Stream::from_raw(stream), Purpose::Run);
        // SAFETY: the caller promises pointers as described.
        unsafe { with_call(kernel, inputs, n_inputs, outputs, n_outputs, options, run) }
    })
}

/// Compiles and loads the code that gc_kernel_run() needs with the same arguments, and launches nothing. No workspace
/// is needed, and no element is read or written. A combination consists of the dtypes, the choice of inputs that are
/// scalars, the dimensions and contiguity of raw tensors, and the GPU. Shapes and strides otherwise do not matter,
/// unless they take more than 8 loops.
///
/// - All errors of gc_kernel_run().
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_kernel_prepare(
    kernel: *mut gc_kernel_t, inputs: *const *const DLTensor, n_inputs: usize, outputs: *const *mut DLTensor,
    n_outputs: usize, options: *const gc_run_options_t, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        let run = |kernel: &Kernel, call: &Call<'_>| kernel.call(call, Stream::from_raw(stream), Purpose::Prepare);
        // SAFETY: the caller promises pointers as described.
        unsafe { with_call(kernel, inputs, n_inputs, outputs, n_outputs, options, run) }
    })
}

/// Returns the size in bytes of the workspace that gc_kernel_run() needs with these arguments; ignores `workspace` of
/// `options`. 0 for elementwise kernels, and if few elements are reduced. -1, and the last error: as gc_kernel_run().
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_kernel_workspace_bytes(
    kernel: *const gc_kernel_t, inputs: *const *const DLTensor, n_inputs: usize, outputs: *const *mut DLTensor,
    n_outputs: usize, options: *const gc_run_options_t,
) -> i64 {
    boundary(|| {
        let run = |kernel: &Kernel, call: &Call<'_>| kernel.workspace_bytes(call);
        // SAFETY: the caller promises pointers as described.
        unsafe {
            let given = if options.is_null() { None } else { Some(borrow::options("options", options)?) };
            let struct_size = size_of::<gc_run_options_t>() as u32;
            let given = given.map(|given| gc_run_options_t { struct_size, workspace: ptr::null(), ..given });
            let options = given.as_ref().map_or(ptr::null(), ptr::from_ref);
            with_call(kernel, inputs, n_inputs, outputs, n_outputs, options, run)
        }
    })
}

/// Returns NVRTC's output of the last compilation for this kernel: errors and warnings. "" if there is none.
///
/// `*log`: text that stays valid until gc_kernel_free().
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_kernel_log(kernel: *const gc_kernel_t, log: *mut *const c_char) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a kernel, and room for a pointer.
        let (kernel, log) = unsafe { (handle::borrow("kernel", kernel)?, Out::one("log", log)?) };
        log.fill([kernel.0.log()]);
        Ok(())
    })
}

/// Releases a kernel. Nothing may use it any more: no thread, no pending work, no graph. NULL is ignored. The call may
/// wait for all work of the context: do not make it in a capture, or between the launches of a collective.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_kernel_free(kernel: *mut gc_kernel_t) {
    boundary(|| {
        // SAFETY: the caller promises NULL, or a kernel that nothing uses any more.
        unsafe { handle::release(kernel) };
        Ok(())
    });
}
