//! Kernels that are compiled at run time, up to the compiler: any texts, options and tensors. No call may panic or read
//! beyond the described memory; a failed call returns no object.
#![no_main]

use std::{
    ffi::{CString, c_char},
    mem, ptr,
    sync::Once,
};

use arbitrary::Arbitrary;
use dlpark::ffi::DLTensor;
use gradcodec::capi::*;
use gradcodec_fuzz::{Description, Place, Tensor};
use libfuzzer_sys::fuzz_target;

const OK: gc_status_t = 0;

/// Words that texts are made of, so that some texts are valid.
const WORDS: [&str; 32] = [
    "T x",
    "float32 x",
    "raw T y",
    "T y",
    "U z",
    "bool w",
    "float16 v",
    "bfloat16 u",
    "int64 t",
    ", ",
    ",",
    " ",
    "\n",
    "raw ",
    "T",
    "x",
    "i",
    "n",
    "_ind",
    "y = x",
    "a + b",
    "y = a",
    "0",
    "1",
    "#",
    "include",
    "\\",
    "gradcodec",
    "_J",
    "double",
    "\u{e9}",
    "raw raw T y",
];

#[derive(Arbitrary, Debug)]
enum Piece {
    Word(u8),
    Any(Vec<u8>),
}

#[derive(Arbitrary, Debug)]
struct Text(Option<Vec<Piece>>);

impl Text {
    /// Returns the text without NULs inside; None if it is missing.
    fn get(&self) -> Option<CString> {
        let mut bytes = Vec::new();
        for piece in self.0.as_ref()? {
            match piece {
                Piece::Word(word) => bytes.extend_from_slice(WORDS[usize::from(*word) % WORDS.len()].as_bytes()),
                Piece::Any(any) => bytes.extend(any.iter().filter(|&&byte| byte != 0)),
            }
        }
        CString::new(bytes).ok()
    }
}

#[derive(Arbitrary, Debug)]
struct Input {
    is_reduction: bool,
    /// True if missing texts are replaced by those of a valid kernel.
    usual: bool,
    texts: [Text; 9],
    options: Vec<Text>,
    flags: u8,
    /// Change of a byte of the options.
    change: Option<(u8, u8)>,
    calls: Vec<Call>,
}

#[derive(Arbitrary, Debug)]
struct Call {
    inputs: Vec<Description>,
    outputs: Vec<Description>,
    /// True if the only output is like the first input.
    alike: bool,
    flags: u8,
    size: i64,
    axes: Option<Vec<i32>>,
    workspace: Option<Description>,
    capability: i32,
    here: bool,
}

fn pointer(text: &Option<CString>) -> *const c_char {
    text.as_ref().map_or(ptr::null(), |text| text.as_ptr())
}

fn create(input: &Input) -> *mut gc_kernel_t {
    let usual = if input.is_reduction {
        ["k", "T x", "T y", "x", "a + b", "y = a", "0", "", ""]
    } else {
        ["k", "T x, raw U u", "T y", "y = x", "", "", "", "", ""]
    };
    let mut texts: Vec<_> = input.texts.iter().map(Text::get).collect();
    for (text, usual) in texts.iter_mut().zip(usual) {
        if input.usual && text.is_none() && !usual.is_empty() {
            *text = CString::new(usual).ok();
        }
    }
    let options: Vec<_> = input.options.iter().take(70).map(Text::get).collect();
    let pointers: Vec<_> = options.iter().map(pointer).collect();
    let text = |index: usize| pointer(&texts[index]);
    let mut kernel = ptr::null_mut();
    // SAFETY: both structs have numbers and pointers, for which zeros are valid.
    let (mut one, mut other): (gc_elementwise_options_t, gc_reduction_options_t) =
        unsafe { (mem::zeroed(), mem::zeroed()) };
    let bytes: &mut [u8];
    if input.is_reduction {
        other.struct_size = size_of_val(&other) as u32;
        other.flags = u32::from(input.flags & 3);
        [other.name, other.inputs, other.outputs, other.map, other.reduce] = [0, 1, 2, 3, 4].map(text);
        [other.post_map, other.identity, other.reduce_type, other.preamble] = [5, 6, 7, 8].map(text);
        (other.options, other.n_options) = (pointers.as_ptr(), pointers.len());
        // SAFETY: these are the bytes of `other`, all of which are initialized.
        bytes = unsafe { std::slice::from_raw_parts_mut((&raw mut other).cast(), size_of_val(&other)) };
    } else {
        one.struct_size = size_of_val(&one) as u32;
        one.flags = u32::from(input.flags & 3);
        [one.name, one.inputs, one.outputs, one.operation, one.preamble, one.loop_prep, one.after_loop] =
            [0, 1, 2, 3, 4, 5, 6].map(text);
        (one.options, one.n_options) = (pointers.as_ptr(), pointers.len());
        // SAFETY: these are the bytes of `one`, all of which are initialized.
        bytes = unsafe { std::slice::from_raw_parts_mut((&raw mut one).cast(), size_of_val(&one)) };
    }
    if let Some((at, byte)) = input.change {
        // Only the size, the flags and the reserved fields change: pointers stay valid.
        let places: Vec<_> = (0..8).chain(bytes.len() - 32..bytes.len()).collect();
        let at = places[usize::from(at) % places.len()];
        // The size must not exceed the struct, because that many bytes are read.
        bytes[at] = if at < 4 { bytes[at].min(byte) } else { byte };
    }
    // SAFETY: the options have at least the bytes of their size field, and their texts end with a NUL.
    let status = unsafe {
        if input.is_reduction {
            gc_reduction_create(&other, &mut kernel)
        } else {
            gc_elementwise_create(&one, &mut kernel)
        }
    };
    assert_eq!(status == OK, !kernel.is_null());
    kernel
}

fn call(kernel: *mut gc_kernel_t, call: &Call) {
    let mut inputs: Vec<_> = call.inputs.iter().take(40).map(Tensor::new).collect();
    let mut outputs: Vec<_> = call.outputs.iter().take(40).map(Tensor::new).collect();
    if call.alike
        && let Some(first) = call.inputs.first()
    {
        outputs = vec![Tensor::new(first)];
    }
    let mut workspace = call.workspace.as_ref().map(Tensor::new);
    // A scalar on the CPU is read, so a tensor without memory must not be one.
    if inputs.iter().any(|tensor| tensor.shape.is_empty() && tensor.place == Place::Elsewhere) {
        return;
    }
    let view = |tensor: &mut Tensor| tensor.pointer().cast::<DLTensor>();
    let in_views: Vec<*const DLTensor> = inputs.iter_mut().map(|tensor| view(tensor).cast_const()).collect();
    let out_views: Vec<*mut DLTensor> = outputs.iter_mut().map(view).collect();
    // SAFETY: the struct has numbers and pointers, for which zeros are valid.
    let mut options: gc_run_options_t = unsafe { mem::zeroed() };
    options.struct_size = size_of_val(&options) as u32;
    options.flags = u32::from(call.flags & 3);
    options.size = call.size;
    if let Some(axes) = &call.axes {
        (options.axes, options.n_axes) = (axes.as_ptr(), axes.len());
    }
    options.workspace = workspace.as_mut().map_or(ptr::null(), |tensor| view(tensor).cast_const());
    options.capability = if call.here { 0 } else { call.capability };
    let (n_in, n_out) = (in_views.len(), out_views.len());
    // SAFETY: `kernel` is valid; tensors describe their memory, or are to be refused; the options have their size.
    unsafe {
        gc_kernel_workspace_bytes(kernel, in_views.as_ptr(), n_in, out_views.as_ptr(), n_out, &options);
        // There is no compiler and no GPU, so a run must fail.
        let stream = ptr::null_mut();
        gc_kernel_prepare(kernel, in_views.as_ptr(), n_in, out_views.as_ptr(), n_out, &options, stream);
        assert_ne!(gc_kernel_run(kernel, in_views.as_ptr(), n_in, out_views.as_ptr(), n_out, &options, stream), OK);
    }
}

fuzz_target!(|input: Input| {
    static ALONE: Once = Once::new();
    // SAFETY: this runs before any other thread could read the environment.
    ALONE.call_once(|| unsafe {
        libc::setenv(c"GRADCODEC_NVRTC".as_ptr(), c"/nowhere".as_ptr(), 1);
        libc::setenv(c"GRADCODEC_CACHE".as_ptr(), c"0".as_ptr(), 1);
    });
    let kernel = create(&input);
    if kernel.is_null() {
        return;
    }
    input.calls.iter().take(3).for_each(|given| call(kernel, given));
    let mut log = ptr::null();
    // SAFETY: `kernel` is valid and not used afterwards, and `log` is a place for a pointer.
    unsafe {
        assert_eq!(gc_kernel_log(kernel, &mut log), OK);
        gc_kernel_free(kernel);
    }
});
