//! CODECS
//!
//! A codec compresses a gradient. If it keeps errors, it adds the rounding error of a step to the next gradient (*error
//! feedback*). docs/NUMERICS.md specifies the results to the last bit. They are the same on every processor and GPU.
//!
//! ```text
//! codec             bytes per element   for
//! GC_CODEC_BF16     2                   every optimizer
//! GC_CODEC_MXFP8    1.03125             every optimizer
//! GC_CODEC_INT8     1.03125             every optimizer; start here
//! GC_CODEC_INT4     0.5625              every optimizer, with errors
//! GC_CODEC_MXFP4    0.53125             every optimizer, with errors
//! GC_CODEC_ONEBIT   0.125               SGD, or the momentum in place of the gradient
//! GC_CODEC_SIGN     0.125               optimizers made for signs
//! ```
//!
//! The first five are *block codecs*. MXFP8, INT4 and MXFP4 have a scale for every 32 elements, INT8 for every 64. So
//! small elements keep their precision although there are large ones elsewhere in the tensor, which Adam needs. An INT8
//! element is off by at most 1/252 of the largest element in its block, an INT4 element by 1/13. An MXFP8 element is
//! off by at most 1/16 of itself or 1/229000 of the largest element, an MXFP4 element by 1/4 or 1/12. These bounds hold
//! if the largest element is 2^-100 or more. MXFP8 and MXFP4 are the formats of tensor cores. ONEBIT sends signs and
//! one float32 per tensor. SIGN sends signs, and several payloads are reduced by majority.
//!
//! ```c
//! int64_t sizes[] = {1000000, 64, 500};   // three tensors, one launch: a matrix, a bias, the weight of a norm
//! uint8_t raw[] = {0, 1, 1};              // small tensors that matter travel as float32
//! gc_codec_options_t options = {.struct_size = sizeof options, .codec = GC_CODEC_INT8, .error = GC_ERROR_NONE,
//!                               .segments = sizes, .n_segments = 3, .raw = raw, .n_chunks = 4};   // on the CPU
//! gc_codec_t *codec;
//! gc_codec_create(&options, &codec);
//! int64_t bytes = gc_codec_payload_bytes(codec);                    // chunk k is at k * bytes / 4
//! gc_codec_encode(codec, gradients, 3, NULL, NULL, payload, NULL);  // each step, then send the payload
//! gc_codec_decode(codec, payload, 1, NULL, GC_DECODE_SET, results, 3, NULL);   // on the receiver
//! gc_codec_free(codec);
//! ```
//!
//! A *segment* is one tensor of a gradient. A *payload* is the bytes that one process sends: n_chunks equal chunks, one
//! for each receiver, each with a header, scales, and codes or bits. The *error* of an element is the value to be sent
//! minus the value that was sent. The codec keeps the errors as its *state*.
//!
//! Errors take 4 bytes per element (2 in bfloat16), and belong in checkpoints. Keep errors with codecs of 4 bits and
//! fewer; codecs of 8 and 16 bits usually work without them (GC_ERROR_NONE). With errors in float32 a block codec loses
//! nothing but the rounding of gradient plus error to float32.
//!
//! A block with a NaN, an Inf or a magnitude of 2^127 or more decodes to NaN as a whole, and GC_FLAG_NONFINITE is set.
//! The errors of the block stay as they were, so the errors of block codecs are always finite. A raw segment sends such
//! an element unchanged. The errors of ONEBIT keep such an element. gc_codec_options_t.nonfinite has other policies.
//!
//! A codec uses one device. On CUDA it belongs to the context that was chosen at its creation, by the rule for NULL
//! streams. The streams NULL, 1 and 2 are streams of that context; a stream of another context gives INVALID_ARGUMENT.
//! The creation allocates all memory. Later calls, except gc_codec_free(), allocate nothing, load nothing, wait for
//! nothing and can be captured in a graph. All calls but gc_codec_payload_bytes(), gc_codec_exchanges() and
//! gc_codec_state_bytes() use the state. So use one stream, or order the streams and the launches of graphs yourself. A
//! call gives BUSY while another thread's call on the same codec is running. If the driver fails in the middle of a
//! call, the state is inconsistent, and all later calls give CUDA until gc_codec_reset(). Free a codec when its work is
//! done and its graphs will not be launched again.
//!
//! Tensors of values are C-contiguous; payloads, chunks and states are uint8, C-contiguous and aligned to 16 bytes. A
//! payload may be untrusted input: every field is compared with the value that this codec would have written. On the
//! CPU a call that finds a difference gives CORRUPT. On CUDA the check runs on the stream: it sets the flag
//! GC_FLAG_CORRUPT, and zeros are written. Changes within the format, such as another sign, cannot be detected.

use std::{ffi::c_void, mem::offset_of, ops::Range};

use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensor, DLTensor};

use crate::{
    cuda::Stream,
    dlpack::{Device, Dtype, View, input},
    ffi::{
        api::gc_status_t,
        borrow::{self, Count, Out},
        error::{Result, error},
        handle,
        name::Name,
        panics::boundary,
    },
};

use super::{
    call::Destination,
    ops::{self, Codec, Descriptor},
    plan::{Decode, ErrorKind, Kind, NonFinite, Reduction, ScaleRule},
};

/// Mode of decoding: one of GC_DECODE_*.
pub type gc_decode_t = i32;

/// A codec, made by gc_codec_create().
pub struct gc_codec_t(Codec);

/// Options for gc_codec_create(). Set struct_size and the fields you need; 0 selects the default of a field.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gc_codec_options_t {
    /// Set by you: sizeof(gc_codec_options_t).
    pub struct_size: u32,
    /// The codec: one of GC_CODEC_*; there is no default.
    pub codec: i32,
    /// The device of the codec. All 0: the CPU.
    pub device: DLDevice,
    /// The dtype of the values to encode: float32, float16 or bfloat16. All 0: float32.
    pub values: DLDataType,
    /// The dtype of the final decoded values, with the same choices. A reduced scale of ONEBIT is rounded to it.
    pub results: DLDataType,
    /// The storage of errors: one of GC_ERROR_*. 0 keeps errors in float32. SIGN keeps none.
    pub error: i32,
    /// The scale rule of ONEBIT: one of GC_SCALE_*. SIGN ignores it; block codecs take 0 alone.
    pub scale: i32,
    /// The policy for numbers that are not finite: one of GC_NONFINITE_*.
    pub nonfinite: i32,
    /// The factor by which a carried error is multiplied in each step. 0 means 1.
    pub beta: f32,
    /// The element counts of n_segments tensors, 0 or more each. NULL: one segment, of n_elements.
    pub segments: *const i64,
    /// The number of `segments`; 0 if `segments` is NULL.
    pub n_segments: usize,
    /// The number of elements if `segments` is NULL; otherwise 0.
    pub n_elements: i64,
    /// The number of chunks. 0 means 1.
    pub n_chunks: usize,
    /// k + 1: this codec reduces chunk k and keeps its error. 0: it reduces no chunk.
    pub server: u64,
    /// NULL, or a byte for each segment: if it is not 0, the segment travels as float32. Only for block codecs.
    pub raw: *const u8,
    /// The reduction: one of GC_REDUCTION_*; 0 for SIGN.
    pub reduction: i32,
    /// Must be 0.
    pub reserved: [u32; 5],
}

// SAFETY: all fields are integers, a float, pointers or structs of integers, valid for any bits; there is no padding.
unsafe impl borrow::Extensible for gc_codec_options_t {
    const FIRST_SIZE: usize = 112;
    const RESERVED: Range<usize> = offset_of!(Self, reserved)..size_of::<Self>();
}

/// Returns the value of `all` whose number is `code`. Refuses an unknown number.
fn one_of<T: Copy>(name: &str, code: i32, all: &[(i32, T)]) -> Result<T> {
    all.iter()
        .find(|(known, _)| *known == code)
        .map(|&(_, value)| value)
        .ok_or_else(|| error!(InvalidArgument, "options: {name} {code} is not known to this version"))
}

fn value_dtype(name: &'static str, dtype: DLDataType) -> Result<Dtype> {
    if (dtype.code.0, dtype.bits, dtype.lanes) == (0, 0, 0) {
        return Ok(Dtype::F32);
    }
    let dtype = Dtype::from_dlpack(&Name::new(name), dtype)?;
    if ![Dtype::F32, Dtype::F16, Dtype::BF16].contains(&dtype) {
        return Err(error!(UnsupportedDtype, "options: {name} are float32, float16 or bfloat16, got {dtype}"));
    }
    Ok(dtype)
}

impl gc_codec_options_t {
    /// Returns the descriptor of a codec whose results replace the values: `results` defaults to the values' dtype.
    ///
    /// # Safety
    /// See `descriptor`.
    pub unsafe fn descriptor_for_values<'a>(self) -> Result<Descriptor<'a>> {
        let results = self.results;
        let unsaid = (results.code.0, results.bits, results.lanes) == (0, 0, 0);
        // SAFETY: the caller promises `segments` and `raw` as `descriptor` requires.
        unsafe { Self { results: if unsaid { self.values } else { results }, ..self }.descriptor() }
    }

    /// Returns `descriptor_for_values` with the CPU as the device, for results that do not depend on the device.
    ///
    /// # Safety
    /// See `descriptor`.
    pub unsafe fn descriptor_of_layout<'a>(self) -> Result<Descriptor<'a>> {
        let device = Device::Cpu.to_dlpack();
        // SAFETY: the caller promises `segments` and `raw` as `descriptor` requires.
        unsafe { Self { device, ..self }.descriptor_for_values() }
    }

    /// # Safety
    /// Unless NULL or unaligned, `segments` points at `n_segments` integers for `'a`. Unless NULL, `raw` points for
    /// `'a` at as many bytes, or at one byte if `segments` is NULL.
    unsafe fn descriptor<'a>(&self) -> Result<Descriptor<'a>> {
        let kind = one_of("codec", self.codec, &Kind::ALL.map(|kind| (kind as i32, kind)))?;
        let device = if (self.device.device_type.0, self.device.device_id) == (0, 0) {
            Device::Cpu
        } else {
            Device::from_dlpack(&Name::new("options: device"), self.device)?
        };
        let errors = [(0, ErrorKind::Float32), (1, ErrorKind::Bfloat16), (2, ErrorKind::None)];
        let policies = [(0, NonFinite::Propagate), (1, NonFinite::Zero), (2, NonFinite::Transactional)];
        let segments = if self.segments.is_null() {
            if self.n_segments != 0 {
                return Err(error!(InvalidArgument, "options: n_segments {}, and segments is NULL", self.n_segments));
            }
            None
        } else {
            // SAFETY: `segments` is not NULL, and points at `n_segments` integers for `'a`, unless unaligned.
            Some(unsafe {
                borrow::items("options: segments", self.segments, Count::of("options: n_segments", self.n_segments))?
            })
        };
        let raw = if self.raw.is_null() {
            None
        } else {
            let count = Count::of("options: n_segments", segments.map_or(1, <[_]>::len));
            // SAFETY: `raw` is not NULL, and points at a byte for each segment for `'a`.
            Some(unsafe { borrow::items("options: raw", self.raw, count)? })
        };
        Ok(Descriptor {
            kind,
            device,
            values: value_dtype("values", self.values)?,
            results: value_dtype("results", self.results)?,
            error: one_of("error", self.error, &errors)?,
            scale: one_of("scale", self.scale, &[(0, ScaleRule::Rms), (1, ScaleRule::Mean)])?,
            nonfinite: one_of("nonfinite", self.nonfinite, &policies)?,
            reduction: one_of("reduction", self.reduction, &[(0, Reduction::Mean), (1, Reduction::Sum)])?,
            beta: self.beta,
            segments,
            raw,
            elements: self.n_elements,
            n_chunks: self.n_chunks,
            server: self.server,
        })
    }
}

/// Runs `operation` on a codec and one tensor.
///
/// # Safety
/// See [`handle::borrow`] and [`input::tensor`].
unsafe fn with_tensor(
    codec: *const gc_codec_t, name: &'static str, tensor: *const DLTensor, stream: *mut c_void,
    operation: impl FnOnce(&Codec, &View<'_>, Stream) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller promises `codec` as [`handle::borrow`] and `tensor` as [`input::tensor`] require.
    let (codec, tensor) = unsafe { (handle::borrow("codec", codec)?, input::tensor(name, tensor)?) };
    operation(&codec.0, &tensor, Stream::from_raw(stream))
}

/// Runs `operation` on a codec and its errors: the worker's and the server's.
///
/// # Safety
/// See [`handle::borrow`] and [`input::optional`].
unsafe fn with_errors(
    codec: *const gc_codec_t, worker: *const DLTensor, server: *const DLTensor, stream: *mut c_void,
    operation: impl FnOnce(&Codec, Option<&View<'_>>, Option<&View<'_>>, Stream) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller promises `codec` as [`handle::borrow`] and the tensors as [`input::optional`] require.
    let (codec, worker, server) = unsafe {
        (handle::borrow("codec", codec)?, input::optional("worker", worker)?, input::optional("server", server)?)
    };
    operation(&codec.0, worker.as_ref(), server.as_ref(), Stream::from_raw(stream))
}

/// Encodes a tensor in one call, without a codec: no error is carried, and nothing is kept.
///
/// `values`: float32, float16 or bfloat16, of any shape and strides, read in C order. `codec`: one of GC_CODEC_*.
/// `*payload`: uint8, one-dimensional, on the device of `values`, yours to release. gc_decode() needs nothing else.
///
/// The payload equals that of a gc_codec_t with GC_ERROR_NONE, GC_SCALE_RMS, GC_NONFINITE_PROPAGATE, one segment, one
/// chunk, and results of the same dtype as `values`. A NaN or Inf does not fail the call: the header of the payload
/// then has the flag GC_FLAG_NONFINITE.
///
/// - GC_STATUS_INVALID_ARGUMENT: `codec` is none of GC_CODEC_*.
/// - GC_STATUS_UNSUPPORTED_DTYPE: `values` is not float32, float16 or bfloat16.
/// - GC_STATUS_SIZE_OVERFLOW: the payload would have more than 2^63 - 1 bytes.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_encode(
    values: *const DLManagedTensor, codec: i32, payload: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor that stays as it is during the call, and room for a pointer.
        let (view, elements, payload) = unsafe {
            (
                input::managed("values", values)?,
                input::managed_elements("values", values)?,
                Out::one("payload", payload)?,
            )
        };
        payload.fill(ops::encode(&view, &elements, codec)?.into_raw());
        Ok(())
    })
}

/// Decodes a payload of gc_encode() in one call, without a codec. Any bytes may be given: if they are not a payload,
/// GC_STATUS_CORRUPT is returned.
///
/// `payload`: uint8, one-dimensional, C-contiguous, at any address. It may also be from a gc_codec_t with one segment
/// that is not raw and one chunk, whatever its other options are. `dtype`: float32, float16 or bfloat16. `*values`:
/// one-dimensional, of that dtype, with the number of elements in the payload's header, on the device of `payload`,
/// yours to release. The values are rounded as by gc_codec_decode().
///
/// The expected size of the payload is computed from its header, and compared, before anything is allocated.
///
/// - GC_STATUS_UNSUPPORTED_DTYPE: `payload` is not uint8, or `dtype` is none of the three.
/// - GC_STATUS_SHAPE_MISMATCH: `payload` does not have one dimension.
/// - GC_STATUS_NOT_CONTIGUOUS: there are gaps between the bytes of `payload`.
/// - GC_STATUS_CORRUPT: a field of the header or the number of bytes is wrong for a payload, also on CUDA.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_decode(
    payload: *const DLManagedTensor, dtype: DLDataType, values: *mut *mut DLManagedTensor,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a tensor that stays as it is during the call, and room for a pointer.
        let (view, elements, values) = unsafe {
            (
                input::managed("payload", payload)?,
                input::managed_elements("payload", payload)?,
                Out::one("values", values)?,
            )
        };
        values.fill(ops::decode(&view, &elements, dtype)?.into_raw());
        Ok(())
    })
}

/// Creates a codec. Its state is +0: it carries no error yet.
///
/// `options`: read only during the call. `*out`: yours to release, by gc_codec_free(). On CUDA the call allocates the
/// state (the bytes of an error for each element; twice as many with GC_NONFINITE_TRANSACTIONAL), loads the kernels and
/// waits for the device.
///
/// - GC_STATUS_INVALID_ARGUMENT: a codec or other enum value is unknown; an unknown or reserved field is not 0 (the
///   message has its offset); a count is negative; beta is not finite; `server` is more than the number of chunks;
///   GC_ERROR_BFLOAT16 or GC_REDUCTION_SUM with GC_CODEC_SIGN; raw with GC_CODEC_ONEBIT or GC_CODEC_SIGN; GC_SCALE_MEAN
///   with a block codec; or n_elements is not 0 although there are segments.
/// - GC_STATUS_UNSUPPORTED_DTYPE: a dtype is not float32, float16 or bfloat16.
/// - GC_STATUS_SIZE_OVERFLOW: a payload or a state has more than 2^63 - 1 bytes.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_create(options: *const gc_codec_options_t, out: *mut *mut gc_codec_t) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises options of their own size, valid pointers in them, and room for a pointer.
        let (descriptor, out) = unsafe { (borrow::options("options", options)?.descriptor()?, Out::one("out", out)?) };
        out.fill([handle::hand_out(gc_codec_t(Codec::new(&descriptor)?))]);
        Ok(())
    })
}

/// Releases a codec. No thread, no pending work and no graph may use it any more. NULL is ignored. On CUDA this may
/// wait for all work in the context: do not call it in a capture or between the launches of a collective.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_free(codec: *mut gc_codec_t) {
    boundary(|| {
        // SAFETY: `codec` is NULL or a codec that nothing uses any more.
        unsafe { handle::release(codec) };
        Ok(())
    });
}

/// Returns the size of a payload in bytes: n_chunks times the size of a chunk. If `codec` is NULL, the result is -1,
/// and the last error is set.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_payload_bytes(codec: *const gc_codec_t) -> i64 {
    boundary(|| {
        // SAFETY: the caller promises a codec.
        Ok(unsafe { handle::borrow("codec", codec)? }.0.plan().payload_bytes())
    })
}

/// Returns the number of exchanges in an all-reduce among n_chunks ranks with the codec's options: 1 (one-shot) or 2
/// (two-shot). It is for programs with collectives of their own. Over a flat communicator gc_allreduce_exchanges()
/// gives the same number, except over peer memory. If `codec` is NULL, the result is -1, and the last error is set.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_exchanges(codec: *const gc_codec_t) -> i32 {
    boundary(|| {
        // SAFETY: the caller promises a codec.
        let codec = &unsafe { handle::borrow("codec", codec)? }.0;
        Ok(if codec.plan().is_one_shot(codec.device().into()) { 1 } else { 2 })
    })
}

/// Encodes a gradient plus the carried error as a payload, and keeps the new error.
///
/// `values`: n_values tensors, one for each segment, with its element count and the codec's dtype. `value_factor`,
/// `error_factor`: NULL for 1, or one float32 on the codec's device. They multiply the gradient and the carried error
/// first. `value_factor` removes a loss scale; if the loss scale stays in, `error_factor` is the new loss scale divided
/// by the old one. `payload`: gc_codec_payload_bytes() bytes, all of them written.
///
/// - GC_STATUS_INVALID_ARGUMENT: n_values is not the number of segments, or `payload` is not aligned to 16.
/// - GC_STATUS_UNSUPPORTED_DTYPE, GC_STATUS_SHAPE_MISMATCH, GC_STATUS_NOT_CONTIGUOUS: a tensor is not as described.
/// - GC_STATUS_BUSY: another call is running on this codec.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_encode(
    codec: *mut gc_codec_t, values: *const *const DLTensor, n_values: usize, value_factor: *const DLTensor,
    error_factor: *const DLTensor, payload: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec, and tensors that stay as they are during the call.
        let (codec, values, factors, payload) = unsafe {
            (
                handle::borrow("codec", codec)?,
                input::tensors("values", values, Count::of("n_values", n_values))?,
                [input::optional("value_factor", value_factor)?, input::optional("error_factor", error_factor)?],
                input::tensor("payload", payload)?,
            )
        };
        codec.0.encode(values, &factors, Destination::Memory(payload), Stream::from_raw(stream))
    })
}

/// Decodes a payload. ONEBIT and SIGN give +s or -s for every element; s is the segment's scale in the chunk. Block
/// codecs give the number that the code represents, times the scale of its block.
///
/// `payload`: gc_codec_payload_bytes() bytes: all chunks of one encoder, or one of each of n_chunks reducers.
/// `divisor`: divides the values; 0 means 1. `factor`: NULL for 1, or one float32 on the codec's device, which
/// multiplies the quotients. `mode`: GC_DECODE_SET writes the values; GC_DECODE_ADD adds them to the numbers in
/// `values`, for ring and tree algorithms of your own. `values`: n_values tensors, one for each segment: all float32,
/// all float16 or all bfloat16; with GC_DECODE_ADD float32. Beyond float16's range a value of ONEBIT becomes Inf, and
/// GC_FLAG_NONFINITE is set; a value of a block codec becomes the largest float16.
///
/// - All errors of gc_codec_encode().
/// - GC_STATUS_INVALID_ARGUMENT: `divisor` is negative, or `mode` is unknown.
/// - GC_STATUS_CORRUPT: on the CPU, this codec would not have written one of the chunks. Values are unchanged.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_decode(
    codec: *mut gc_codec_t, payload: *const DLTensor, divisor: i32, factor: *const DLTensor, mode: gc_decode_t,
    values: *const *mut DLTensor, n_values: usize, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec, and tensors that stay as they are during the call.
        let (codec, payload, factor, values) = unsafe {
            (
                handle::borrow("codec", codec)?,
                input::tensor("payload", payload)?,
                input::optional("factor", factor)?,
                input::tensors("values", values.cast(), Count::of("n_values", n_values))?,
            )
        };
        let mode = match mode {
            0 => Decode::Set,
            1 => Decode::Add,
            _ => return Err(error!(InvalidArgument, "mode: {mode} is neither GC_DECODE_SET 0 nor GC_DECODE_ADD 1")),
        };
        codec.0.decode(&payload, divisor, factor.as_ref(), mode, values, Stream::from_raw(stream))
    })
}

/// Reduces the same chunk of several payloads to one chunk. The payloads are added in the order given. ONEBIT and block
/// codecs encode the mean (with GC_REDUCTION_SUM the sum) plus the carried error; SIGN sends the majority. The codec
/// keeps the error of this chunk.
///
/// `chunk`: the number of the chunk that the codec was made to reduce. `chunks`: [W, gc_codec_payload_bytes() /
/// n_chunks], chunk `chunk` of W payloads. `dst`: as many bytes as a row of `chunks`, all of them written.
///
/// If a chunk is corrupt, the output is flagged as corrupt for every decoder, its numbers are +0, and the carried error
/// is unchanged. GC_FLAG_CORRUPT is set; on the CPU the call also gives CORRUPT.
///
/// - GC_STATUS_INVALID_ARGUMENT: the codec reduces another chunk, or none; there are no payloads; or memory is not
///   aligned to 16.
/// - GC_STATUS_SHAPE_MISMATCH: a tensor has another shape than described.
/// - GC_STATUS_BUSY: another call is running on this codec.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_reduce(
    codec: *mut gc_codec_t, chunk: usize, chunks: *const DLTensor, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec, and tensors that stay as they are during the call.
        let (codec, chunks, dst) =
            unsafe { (handle::borrow("codec", codec)?, input::tensor("chunks", chunks)?, input::tensor("dst", dst)?) };
        codec.0.reduce(chunk, &chunks, Destination::Memory(dst), Stream::from_raw(stream))
    })
}

/// Writes the flags of all calls since the last gc_codec_flags(): GC_FLAG_*, or'ed, in stream order.
///
/// `dst`: uint32, one element, on the codec's device or CUDAHost.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_flags(
    codec: *mut gc_codec_t, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec, and a tensor that stays as it is during the call.
        unsafe { with_tensor(codec, "dst", dst, stream, Codec::flags) }
    })
}

/// Writes the scales of the last gc_codec_encode(), of ONEBIT or SIGN.
///
/// `dst`: float32, one element for each segment, on the codec's device or CUDAHost.
///
/// - GC_STATUS_INVALID_ARGUMENT: the codec is a block codec, which has a scale per block.
/// - GC_STATUS_UNSUPPORTED_DTYPE, GC_STATUS_SHAPE_MISMATCH, GC_STATUS_NOT_CONTIGUOUS: a tensor is not as described.
/// - GC_STATUS_BUSY: another call is running on this codec.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_scales(
    codec: *mut gc_codec_t, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec, and a tensor that stays as it is during the call.
        unsafe { with_tensor(codec, "dst", dst, stream, Codec::scales) }
    })
}

/// Ends a step of a codec with GC_NONFINITE_TRANSACTIONAL. The new state becomes the valid one. If `skip` is not 0, or
/// a value was not finite since the last commit, the step is taken back instead. Then the state is as it was before,
/// and GC_FLAG_TAKEN_BACK is set. Decoded values stay. The call is a no-op if no step is pending.
///
/// `skip`: NULL, or one bool, int32 or float32 on the codec's device.
///
/// - GC_STATUS_INVALID_ARGUMENT: the codec has another policy.
/// - GC_STATUS_BUSY: another call is running on this codec.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_commit(
    codec: *mut gc_codec_t, skip: *const DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec, and a tensor that stays as it is during the call.
        let (codec, skip) = unsafe { (handle::borrow("codec", codec)?, input::optional("skip", skip)?) };
        codec.0.commit(skip.as_ref(), Stream::from_raw(stream))
    })
}

/// Takes the pending step back, as gc_codec_commit() does with a `skip` that is not 0.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_rollback(codec: *mut gc_codec_t, stream: *mut c_void) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec.
        let codec = unsafe { handle::borrow("codec", codec)? };
        codec.0.rollback(Stream::from_raw(stream))
    })
}

/// Resets the state to +0, as after gc_codec_create(). Flags and a pending step are dropped.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_reset(codec: *mut gc_codec_t, stream: *mut c_void) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec.
        let codec = unsafe { handle::borrow("codec", codec)? };
        codec.0.reset(Stream::from_raw(stream))
    })
}

/// Returns the size of the state in bytes. If `codec` is NULL, the result is -1, and the last error is set. The state
/// of a block codec has 256 bytes, then the errors of each segment that is not raw, then those of each reduced part of
/// such segments. Errors take whole units of 1024 elements. Without errors the state has 256 bytes.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_state_bytes(codec: *const gc_codec_t) -> i64 {
    boundary(|| {
        // SAFETY: the caller promises a codec.
        Ok(unsafe { handle::borrow("codec", codec)? }.0.plan().state_bytes)
    })
}

/// Writes the exact state as bytes, for gc_codec_state_in(). A codec with the same options that loads it continues with
/// the same payloads, on any device.
///
/// `dst`: gc_codec_state_bytes() bytes on the codec's device.
///
/// - GC_STATUS_INVALID_ARGUMENT: a step is pending, or `dst` is not aligned to 16.
/// - GC_STATUS_SHAPE_MISMATCH: a tensor has another shape than described.
/// - GC_STATUS_BUSY: another call is running on this codec.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_state_out(
    codec: *mut gc_codec_t, dst: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec, and a tensor that stays as it is during the call.
        unsafe { with_tensor(codec, "dst", dst, stream, Codec::state_out) }
    })
}

/// Loads a state that gc_codec_state_out() wrote. An invalid state, or a state of another codec, gives CORRUPT on the
/// CPU. CUDA checks only the header and the signs of scales: if one is wrong, it sets GC_FLAG_CORRUPT. In both cases
/// the codec is unchanged. On CUDA an error of a block codec that is not finite becomes 0, and sets GC_FLAG_NONFINITE.
///
/// `src`: as `dst` of gc_codec_state_out(), whose statuses apply here, too.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_state_in(
    codec: *mut gc_codec_t, src: *const DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec, and a tensor that stays as it is during the call.
        unsafe { with_tensor(codec, "src", src, stream, Codec::state_in) }
    })
}

/// Writes the carried errors as numbers, to inspect them or to continue with other options.
///
/// `worker`: NULL, or float32, the elements of all segments, one segment after the other; +0 for raw segments.
/// `server`: NULL, or float32, likewise the parts of all segments in the chunk that this codec reduces.
///
/// - GC_STATUS_INVALID_ARGUMENT: a step is pending, or there is a `server` although the codec reduces no chunk.
/// - GC_STATUS_UNSUPPORTED_DTYPE, GC_STATUS_SHAPE_MISMATCH, GC_STATUS_NOT_CONTIGUOUS: a tensor is not as described.
/// - GC_STATUS_BUSY: another call is running on this codec.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_errors_out(
    codec: *mut gc_codec_t, worker: *mut DLTensor, server: *mut DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec, and tensors that stay as they are during the call.
        unsafe { with_errors(codec, worker, server, stream, Codec::errors_out) }
    })
}

/// Carries the given errors from now on, rounded to the codec's dtype of errors. NULL keeps the old ones. An error that
/// is not finite after rounding becomes +0, and GC_FLAG_NONFINITE is set, but no commit takes a step back for it.
/// Errors that are given for raw segments are ignored.
///
/// `worker`, `server`: as for gc_codec_errors_out(), whose statuses apply here, too. INVALID_ARGUMENT is also given if
/// the codec keeps no errors.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_errors_in(
    codec: *mut gc_codec_t, worker: *const DLTensor, server: *const DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec, and tensors that stay as they are during the call.
        unsafe { with_errors(codec, worker, server, stream, Codec::errors_in) }
    })
}
