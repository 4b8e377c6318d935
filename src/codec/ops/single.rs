//! Encoding and decoding of a tensor in one call, with a codec that lives as long as the call.

use std::iter;

use dlpark::ffi::DLDataType;

use crate::{
    bits::ops::complete,
    codec::{
        call::Destination,
        cpu,
        plan::{CORRUPT, CodecPlan, Decode, ErrorKind, FLAGS_FIELD, HEADER, Kind, NonFinite, Reduction, ScaleRule},
    },
    copy::ops::copy_on,
    cuda::Stream,
    device::{Queue, tensors::results},
    dlpack::{
        Dtype, Elements, Kind as DtypeKind, NewTensors, Outputs, Shape, View,
        checks::{check_contiguous, check_dtype, unexpected_dtype},
    },
    ffi::{
        error::{Result, error},
        name::Name,
    },
};

use super::{Codec, arguments::check_aligned, descriptor::Descriptor};

const VALUES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Encodes a tensor to a new payload of one chunk. `elements`: the same tensor, copied unless it is C-contiguous.
pub fn encode(values: &View<'_>, elements: &Elements<'_>, kind: i32) -> Result<Outputs> {
    let kind = Kind::ALL.into_iter().find(|&known| known as i32 == kind).ok_or_else(|| {
        error!(InvalidArgument, "codec: {kind} is not known to this version, whose codecs are 1 to {}", Kind::ALL.len())
    })?;
    check_dtype(values, &VALUES)?;
    let (device, dtype) = (values.device(), values.dtype());
    let codec = Codec::new(&Descriptor {
        kind,
        device,
        values: dtype,
        results: dtype,
        error: ErrorKind::None,
        scale: ScaleRule::Rms,
        nonfinite: NonFinite::Propagate,
        reduction: Reduction::Mean,
        beta: 1.0,
        segments: None,
        raw: None,
        elements: values.elements(),
        n_chunks: 1,
        server: 0,
    })?;
    let mut queue = Queue::of(device, Stream::LEGACY)?;
    let compact = if values.is_contiguous() { None } else { Some(copy_of(&mut queue, elements, dtype)?) };
    let values = compact.as_ref().map_or(*values, NewTensors::view);
    let payload = results(&mut queue, device, Dtype::U8, Shape::of(&[codec.plan().payload_bytes()]), 1)?;
    let to = Destination::Memory(payload.view());
    let encoded = codec.encode(iter::once(Ok(values)), &[None, None], to, Stream::LEGACY);
    complete(queue, encoded)?;
    Ok(payload.finished())
}

/// Decodes an untrusted payload to a new tensor. `elements`: the same payload, which is copied if it is not aligned.
pub fn decode(payload: &View<'_>, elements: &Elements<'_>, dtype: DLDataType) -> Result<Outputs> {
    let name = Name::new("dtype");
    let dtype = Dtype::from_dlpack(&name, dtype)?;
    if !VALUES.contains(&dtype) {
        return Err(unexpected_dtype(&name, dtype, &VALUES));
    }
    check_dtype(payload, &[Dtype::U8])?;
    let &[bytes] = payload.shape() else {
        let shape = Shape::of(payload.shape());
        return Err(error!(ShapeMismatch, "{}: one dimension expected, got shape {shape}", payload.name()));
    };
    check_contiguous(payload)?;
    let device = payload.device();
    let mut queue = Queue::of(device, Stream::LEGACY)?;
    let plan = plan_of(&mut queue, payload, bytes)?;
    let aligned = match check_aligned(payload) {
        Ok(()) => None,
        Err(_) => Some(copy_of(&mut queue, elements, Dtype::U8)?),
    };
    let payload = aligned.as_ref().map_or(*payload, |copy| copy.view().named(payload.name()));
    let values = results(&mut queue, device, dtype, Shape::of(&[plan.elements]), 1)?;
    let flags = results(&mut queue, device, Dtype { kind: DtypeKind::Uint, size: 4 }, Shape::of(&[1]), 1)?;
    let codec = Codec::of_plan(device, plan)?;
    let decoded = codec
        .decode(&payload, 1, None, Decode::Set, iter::once(Ok(values.view())), Stream::LEGACY)
        .and_then(|()| codec.flags(&flags.view(), Stream::LEGACY));
    complete(queue, decoded)?;
    let mut raised = [0; 4];
    Queue::of(device, Stream::LEGACY)?.read_bytes(&flags.view(), &mut raised)?;
    if u32::from_ne_bytes(raised) & CORRUPT != 0 {
        return Err(error!(Corrupt, "{}: its flags or its scale are not what a codec writes", payload.name()));
    }
    Ok(values.finished())
}

/// Checks the header and the length of a payload. Returns the plan of its encoder.
fn plan_of(queue: &mut Queue, payload: &View<'_>, bytes: i64) -> Result<CodecPlan> {
    let name = payload.name();
    if bytes < HEADER as i64 {
        return Err(error!(Corrupt, "{name}: {bytes} bytes; a header has {HEADER}"));
    }
    let mut header = [0; HEADER];
    queue.read_bytes(&payload.part(0, &[HEADER as i64]), &mut header)?;
    let plan = CodecPlan::of_header(&header)?;
    cpu::check_header(format_args!("{name}"), &header, &plan.header(0), FLAGS_FIELD)?;
    let (expected, elements) = (plan.payload_bytes(), plan.elements);
    if bytes != expected {
        let codec = plan.rules.kind.name();
        return Err(error!(
            Corrupt,
            "{name}: {expected} bytes expected for {elements} elements of {codec}, got {bytes}"
        ));
    }
    Ok(plan)
}

/// Returns a compact copy on the same device.
fn copy_of(queue: &mut Queue, elements: &Elements<'_>, dtype: Dtype) -> Result<NewTensors> {
    let device = elements.device();
    let copy = results(queue, device, dtype, elements.shape(), 1)?;
    copy_on(queue, elements, &copy.elements()?)?;
    Ok(copy)
}
