//! CODECS
//!
//! A codec compresses a gradient. If it keeps errors, it adds the rounding error of a step to the next gradient (*error
//! feedback*). docs/NUMERICS.md specifies the results, to the last bit: the same on every processor and GPU.
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
//! The first five are *block codecs*. MXFP8, INT4 and MXFP4 have a scale for every 32 elements, INT8 for every 64, so
//! that small elements arrive although there are large ones elsewhere in the tensor, as Adam wants it. An element of
//! INT8 is off by at most 1/252 of the largest in its block, of INT4 by 1/13. One of MXFP8 is off by at most 1/16 of
//! itself or 1/229000 of the largest, of MXFP4 by 1/4 or 1/12; these two are the formats of tensor cores. (All of that
//! where the largest is 2^-100 or more.) ONEBIT sends signs and one float32 per tensor. SIGN sends signs, and several
//! payloads are reduced by majority.
//!
//! ```c
//! int64_t sizes[] = {1000000, 64, 500};   // three tensors, one launch: a matrix, a bias, the weight of a norm
//! uint8_t raw[] = {0, 1, 1};              // what is small and matters travels as float32
//! gc_codec_options_t options = {.struct_size = sizeof options, .codec = GC_CODEC_INT8, .error = GC_ERROR_NONE,
//!                               .segments = sizes, .n_segments = 3, .raw = raw, .n_chunks = 4};   // on the CPU
//! gc_codec_t *codec;
//! gc_codec_create(&options, &codec);
//! int64_t bytes = gc_codec_payload_bytes(codec);                    // chunk k is at k * bytes / 4
//! gc_codec_encode(codec, gradients, 3, NULL, NULL, payload, NULL);  // each step, then send the payload
//! gc_codec_decode(codec, payload, 1, NULL, GC_DECODE_SET, results, 3, NULL);   // where it was received
//! gc_codec_free(codec);
//! ```
//!
//! A *segment* is one tensor of a gradient, a *payload* what one process sends: n_chunks equal chunks, one for each
//! receiver, which carry a header, scales, and codes or bits. The *error* of an element is what was to be sent minus
//! what was sent; the codec keeps it, as its *state*.
//!
//! Errors take 4 bytes per element (in bfloat16: 2), and belong in checkpoints. Keep them with 4 bits and fewer; 8 and
//! 16 bits usually do without, by GC_ERROR_NONE. With errors in float32 a block codec loses nothing: what is sent and
//! what is kept are together exactly what was there.
//!
//! A block with a NaN, an Inf, or 2^127 or more decodes to NaN, all of it, and GC_FLAG_NONFINITE is set; its errors
//! stay as they were, so nothing that is not finite enters them. A raw segment sends such an element as it is. The
//! errors of ONEBIT keep it. gc_codec_options_t.nonfinite has other policies.
//!
//! A codec lives on one device. On CUDA it belongs to the context that was chosen at its creation, by the rule for NULL
//! streams: NULL, 1 and 2 mean the streams of that context, and those of another are INVALID_ARGUMENT. Its memory is
//! allocated with it: later calls, except gc_codec_free(), allocate nothing, load nothing, wait for nothing and can be
//! captured in a graph. All but gc_codec_payload_bytes(), gc_codec_exchanges() and gc_codec_state_bytes() use its
//! state, so use one stream, or order the streams yourself, and the launches of graphs too. A call gives BUSY while
//! another call on the same codec runs in another thread. If the driver fails in the middle of a call, the state is
//! inconsistent, and all later calls give CUDA until gc_codec_reset(). Free a codec when its work is done and its
//! graphs will not be launched again.
//!
//! Tensors of values are C-contiguous; payloads, chunks and states are uint8, C-contiguous and aligned to 16. A payload
//! need not be trusted: every field is compared with what this codec would have written. On the CPU a call that finds a
//! difference gives CORRUPT; on CUDA, where the check runs on the stream, it sets the flag GC_FLAG_CORRUPT and writes
//! zeros. Changes within the format, such as another sign, cannot be detected.

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

/// How values are decoded: one of GC_DECODE_*.
pub type gc_decode_t = i32;

/// A codec: gc_codec_create() makes one.
pub struct gc_codec_t(Codec);

/// Options for gc_codec_create(). Set struct_size and what you need; 0 selects the default of a field.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gc_codec_options_t {
    /// Set by you: sizeof(gc_codec_options_t).
    pub struct_size: u32,
    /// One of GC_CODEC_*; there is no default.
    pub codec: i32,
    /// All 0: the CPU.
    pub device: DLDevice,
    /// The dtype of the values to encode: float32, float16 or bfloat16. All 0: float32.
    pub values: DLDataType,
    /// The dtype of the final decoded values, likewise. A reduced scale of ONEBIT is rounded to it.
    pub results: DLDataType,
    /// One of GC_ERROR_*: 0 keeps errors in float32. SIGN keeps none.
    pub error: i32,
    /// One of GC_SCALE_*, for ONEBIT; otherwise 0.
    pub scale: i32,
    /// One of GC_NONFINITE_*.
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
    /// NULL, or a byte for each segment: where it is not 0, the segment travels as float32. Block codecs alone.
    pub raw: *const u8,
    /// One of GC_REDUCTION_*; 0 for SIGN.
    pub reduction: i32,
    /// Must be 0.
    pub reserved: [u32; 5],
}

// SAFETY: numbers and pointers, without gaps between them.
unsafe impl borrow::Extensible for gc_codec_options_t {
    const FIRST_SIZE: usize = 112;
    const RESERVED: Range<usize> = offset_of!(Self, reserved)..size_of::<Self>();
}

/// A number that is one of an enum's.
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
    /// With results that are, unless said, as the values, which they replace.
    ///
    /// # Safety
    /// As for `descriptor`.
    pub unsafe fn descriptor_for_values<'a>(self) -> Result<Descriptor<'a>> {
        let results = self.results;
        let unsaid = (results.code.0, results.bits, results.lanes) == (0, 0, 0);
        // SAFETY: `segments` and `raw` are as `descriptor` wants them.
        unsafe { Self { results: if unsaid { self.values } else { results }, ..self }.descriptor() }
    }

    /// With the default device, whichever it names: of what does not depend on it.
    ///
    /// # Safety
    /// As for `descriptor`.
    pub unsafe fn descriptor_of_layout<'a>(self) -> Result<Descriptor<'a>> {
        let device = Device::Cpu.to_dlpack();
        // SAFETY: `segments` and `raw` are as `descriptor` wants them.
        unsafe { Self { device, ..self }.descriptor_for_values() }
    }

    /// # Safety
    /// `segments` points at `n_segments` integers, unless NULL or unaligned; `raw`, unless NULL, at as many bytes, at
    /// one if `segments` is NULL; all of that for `'a`.
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

/// A call on a codec and one tensor.
///
/// # Safety
/// As for [`handle::borrow`] and [`input::tensor`].
unsafe fn with_tensor(
    codec: *const gc_codec_t, name: &'static str, tensor: *const DLTensor, stream: *mut c_void,
    operation: impl FnOnce(&Codec, &View<'_>, Stream) -> Result<()>,
) -> Result<()> {
    // SAFETY: `codec` is as [`handle::borrow`] wants it, `tensor` as [`input::tensor`] does.
    let (codec, tensor) = unsafe { (handle::borrow("codec", codec)?, input::tensor(name, tensor)?) };
    operation(&codec.0, &tensor, Stream::from_raw(stream))
}

/// A call on a codec and its errors, the workers' and the server's.
///
/// # Safety
/// As for [`handle::borrow`] and [`input::optional`].
unsafe fn with_errors(
    codec: *const gc_codec_t, worker: *const DLTensor, server: *const DLTensor, stream: *mut c_void,
    operation: impl FnOnce(&Codec, Option<&View<'_>>, Option<&View<'_>>, Stream) -> Result<()>,
) -> Result<()> {
    // SAFETY: `codec` is as [`handle::borrow`] wants it, the tensors as [`input::optional`] does.
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
/// The payload is that of a gc_codec_t with GC_ERROR_NONE, GC_SCALE_RMS, GC_NONFINITE_PROPAGATE, one segment, one chunk,
/// and results of the same dtype as `values`. NaN and Inf are no failure: the header of the payload has the flag
/// GC_FLAG_NONFINITE then.
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

/// Decodes a payload of gc_encode() in one call, without a codec. Any bytes may be given: they are a payload, or
/// GC_STATUS_CORRUPT is returned.
///
/// `payload`: uint8, one-dimensional, C-contiguous, at any address. It may also be from a gc_codec_t with one segment
/// that is not raw and one chunk, whatever its other options are. `dtype`: float32, float16 or bfloat16. `*values`:
/// one-dimensional, of that dtype, with as many elements as the payload's header says, on the device of `payload`,
/// yours to release. The values are rounded as by gc_codec_decode().
///
/// The size of the payload is computed from its header, and compared, before anything is allocated.
///
/// - GC_STATUS_UNSUPPORTED_DTYPE: `payload` is not uint8, or `dtype` is none of the three.
/// - GC_STATUS_SHAPE_MISMATCH: `payload` does not have one dimension.
/// - GC_STATUS_NOT_CONTIGUOUS: there are gaps between the bytes of `payload`.
/// - GC_STATUS_CORRUPT: a field of the header or the number of bytes is not that of a payload, on CUDA, too.
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
/// `options`: read during the call. On CUDA this allocates the state (the bytes of an error for each element; twice
/// with GC_NONFINITE_TRANSACTIONAL), loads the kernels and waits for the device. `*out`: yours to release, by
/// gc_codec_free().
///
/// - GC_STATUS_INVALID_ARGUMENT: a codec or other enum value is unknown; an unknown or reserved field is not 0 (the
///   message has its offset); a count is negative; beta is not finite; `server` is beyond the chunks; GC_ERROR_BFLOAT16
///   or GC_REDUCTION_SUM with GC_CODEC_SIGN; raw with GC_CODEC_ONEBIT or GC_CODEC_SIGN; GC_SCALE_MEAN with a block
///   codec; or n_elements is not 0 although there are segments.
/// - GC_STATUS_UNSUPPORTED_DTYPE: a dtype is not float32, float16 or bfloat16.
/// - GC_STATUS_SIZE_OVERFLOW: a payload or a state has more than 2^63 - 1 bytes.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_create(options: *const gc_codec_options_t, out: *mut *mut gc_codec_t) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises options of their own size with what they point at, and room for a pointer.
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

/// Bytes of a payload: n_chunks times those of a chunk. -1, and the last error, if `codec` is NULL.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_payload_bytes(codec: *const gc_codec_t) -> i64 {
    boundary(|| {
        // SAFETY: the caller promises a codec.
        Ok(unsafe { handle::borrow("codec", codec)? }.0.plan().payload_bytes())
    })
}

/// How often an all-reduce with the codec's options exchanges among n_chunks ranks: 1 or 2. It is for programs with
/// collectives of their own. Over a flat communicator gc_allreduce_exchanges() gives the same, except over peer memory.
///
/// -1, and the last error: `codec` is NULL.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_exchanges(codec: *const gc_codec_t) -> i32 {
    boundary(|| {
        // SAFETY: the caller promises a codec.
        let codec = &unsafe { handle::borrow("codec", codec)? }.0;
        Ok(if codec.plan().exchanges_once(codec.device().into()) { 1 } else { 2 })
    })
}

/// Encodes a gradient plus the carried error as a payload, and keeps the new error.
///
/// `values`: n_values tensors, one for each segment, of its element count and of the codec's dtype. `value_factor`,
/// `error_factor`: NULL for 1, or one float32 on the codec's device, by which the gradient and the carried error are
/// multiplied first: the first removes a loss scale; the second is the new loss scale over the old if it stays in.
/// `payload`: gc_codec_payload_bytes() bytes, all of them written.
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

/// Decodes a payload. ONEBIT and SIGN: to +s or -s for every element; s is the segment's scale in the chunk. Block
/// codecs: to the number that the code stands for, times the scale of its block.
///
/// `payload`: gc_codec_payload_bytes() bytes: all chunks of one encoder, or one of each of n_chunks reducers.
/// `divisor`: divides the values; 0 means 1. `factor`: NULL for 1, or one float32 on the codec's device, which
/// multiplies them then. `mode`: GC_DECODE_SET writes the values; GC_DECODE_ADD adds them to those in `values`, for
/// rings and trees of your own. `values`: n_values tensors, one for each segment: all float32, all float16 or all
/// bfloat16; with GC_DECODE_ADD float32. Beyond float16's range a value of ONEBIT is Inf, and GC_FLAG_NONFINITE is set;
/// one of a block codec is the largest float16 then.
///
/// - All errors of gc_codec_encode().
/// - GC_STATUS_INVALID_ARGUMENT: `divisor` is negative, or `mode` is unknown.
/// - GC_STATUS_CORRUPT: on the CPU, this codec would not have written a chunk. Nothing is written then.
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

/// Reduces the same chunk of several payloads to one chunk. They are added in the order given. ONEBIT and block codecs
/// encode their mean plus the carried error (with GC_REDUCTION_SUM their sum plus that), SIGN sends the majority. The
/// error of this chunk is kept.
///
/// `chunk`: its number; the one that the codec was made to reduce. `chunks`: [W, gc_codec_payload_bytes() / n_chunks],
/// chunk `chunk` of W payloads. `dst`: as many bytes as a row, all of them written.
///
/// If a chunk is corrupt, the output is flagged as corrupt for every decoder, its numbers are +0, and the carried error
/// is unchanged. On the CPU the call also gives CORRUPT; on CUDA it sets GC_FLAG_CORRUPT.
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

/// Ends a step of a codec with GC_NONFINITE_TRANSACTIONAL. Its new state becomes the valid one. If `skip` is not 0, or
/// a value was not finite since the last commit, the step is taken back instead: the state is as it was before, and
/// GC_FLAG_TAKEN_BACK is set. Decoded values stay. A no-op if no step is pending.
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

/// Takes the pending step back: gc_codec_commit() with a `skip` that is not 0.
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

/// Bytes of the state. -1, and the last error, if `codec` is NULL. Of a block codec: 256, then the error of each
/// segment that is not raw, then that of each part that it reduces, in whole units of 1024 elements; 256 alone without
/// errors.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_state_bytes(codec: *const gc_codec_t) -> i64 {
    boundary(|| {
        // SAFETY: the caller promises a codec.
        Ok(unsafe { handle::borrow("codec", codec)? }.0.plan().state_bytes)
    })
}

/// Writes the exact state as bytes, for gc_codec_state_in(). A codec with the same options that takes it continues with
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

/// Takes a state that gc_codec_state_out() wrote. The state is checked: one of another codec, or an invalid one, gives
/// CORRUPT on the CPU and sets GC_FLAG_CORRUPT on CUDA, and the codec is unchanged.
///
/// `src`: as for gc_codec_state_out(), and so are the errors.
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
/// `worker`: NULL, or float32, as many elements as all segments have, one segment after the other; +0 for raw ones.
/// `server`: NULL, or float32, likewise what the chunk that this codec reduces has of each segment.
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

/// Carries the given errors from now on, rounded to the codec's dtype of errors. NULL keeps the old ones. ONEBIT does
/// not check them: with GC_NONFINITE_TRANSACTIONAL, one that is not finite after rounding takes every later step back,
/// until gc_codec_reset() or other errors. With block codecs such a one becomes +0, and GC_FLAG_NONFINITE is set. What
/// is given for raw segments is not used.
///
/// `worker`, `server`: as for gc_codec_errors_out(), and so are the errors; and INVALID_ARGUMENT: a codec that keeps
/// none.
#[cfg_attr(feature = "capi", unsafe(no_mangle))]
pub unsafe extern "C" fn gc_codec_errors_in(
    codec: *mut gc_codec_t, worker: *const DLTensor, server: *const DLTensor, stream: *mut c_void,
) -> gc_status_t {
    boundary(|| {
        // SAFETY: the caller promises a codec, and tensors that stay as they are during the call.
        unsafe { with_errors(codec, worker, server, stream, Codec::errors_in) }
    })
}
