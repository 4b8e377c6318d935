//! Signs with error feedback where the error is the caller's tensor.

use dlpark::ffi::DLDataType;

use crate::{
    backend::{Compression, Queue, Stream, cpu, cuda},
    error::{Result, error},
    plan::codec::{ScaleRule, workspace_bytes as bytes_of_workspace},
    tensor::{Dtype, Name, Outputs, Shape, View},
};

use super::{
    bits::{check_chunk_rows, chunk_bytes, complete},
    checks::{check_aligned, check_contiguous, check_dtype, check_elements, check_same_device, unexpected_dtype},
    signs,
    tensors::results,
};

/// Bytes of the workspace for so many elements.
pub fn workspace_bytes(elements: i64) -> Result<i64> {
    if elements < 0 {
        return Err(error!(InvalidArgument, "n_elements: {elements} is negative"));
    }
    Ok(bytes_of_workspace(elements))
}

/// To new chunks, and the scale.
pub fn compress(grad: &View<'_>, error: Option<&View<'_>>, n_chunks: usize) -> Result<(Outputs, f32)> {
    let bytes = chunk_bytes(grad.elements(), n_chunks)?;
    check_gradient(grad, error)?;
    let device = grad.device();
    let mut queue = Queue::of(device, Stream::LEGACY)?;
    let chunks = results(&mut queue, device, Dtype::U8, Shape::of(&[bytes]), n_chunks)?;
    let scale = results(&mut queue, device, Dtype::F32, Shape::of(&[1]), 1)?;
    let workspace = results(&mut queue, device, Dtype::U8, Shape::of(&[bytes_of_workspace(grad.elements())]), 1)?;
    let (dst, s, workspace) = (chunks.joined(), scale.view(), workspace.view());
    let call = Compression { grad, error, rule: ScaleRule::Rms, dst: &dst, scale: &s, workspace: &workspace };
    // The error at last, when nothing else can fail: a call that gives nothing must not carry anything.
    let sent = send(&mut queue, &call).and_then(|()| queue.read(&s));
    let carried = sent.and_then(|s| carry(&mut queue, &call).map(|()| s));
    let s = complete(queue, carried)?;
    Ok((chunks.finished(), s))
}

/// Chunks, with a scale for each, to values in a new tensor.
pub fn decompress(chunks: &[View<'_>], scales: &[f32], elements: i64, dtype: DLDataType) -> Result<Outputs> {
    const KNOWN: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];
    let name = Name::new("dtype");
    let dtype = Dtype::from_dlpack(&name, dtype)?;
    if !KNOWN.contains(&dtype) {
        return Err(unexpected_dtype(&name, dtype, &KNOWN));
    }
    signs::unpack_scaled(chunks, scales, elements, dtype)
}

/// To the rows of `dst`.
pub fn compress_into(call: &Compression<'_>, stream: Stream) -> Result<()> {
    let &Compression { grad, error, dst, scale, workspace, .. } = call;
    check_gradient(grad, error)?;
    check_chunk_rows(dst, grad)?;
    check_dtype(scale, &[Dtype::F32])?;
    check_elements(scale, 1)?;
    check_workspace(workspace, grad.elements())?;
    let outputs = [error.unwrap_or(scale), dst, scale, workspace];
    for (index, output) in outputs.iter().enumerate().skip(usize::from(error.is_none())) {
        check_same_device(output, grad)?;
        output.check_output(&[grad])?;
        outputs[usize::from(error.is_none())..index].iter().try_for_each(|before| output.check_output(&[before]))?;
    }
    let mut queue = Queue::of(grad.device(), stream)?;
    send(&mut queue, call)?;
    carry(&mut queue, call)
}

/// Writes bits and scale.
fn send(queue: &mut Queue, call: &Compression<'_>) -> Result<()> {
    match queue {
        Queue::Cpu => {
            cpu::codec::compress(call);
            Ok(())
        }
        Queue::Cuda(queue) => cuda::codec::compress(queue, call),
    }
}

/// Writes the error of what was sent.
fn carry(queue: &mut Queue, call: &Compression<'_>) -> Result<()> {
    match queue {
        Queue::Cpu => {
            cpu::codec::carry(call);
            Ok(())
        }
        Queue::Cuda(queue) => cuda::codec::carry(queue, call),
    }
}

fn check_gradient(grad: &View<'_>, error: Option<&View<'_>>) -> Result<()> {
    check_dtype(grad, &[Dtype::F32, Dtype::F16, Dtype::BF16])?;
    check_contiguous(grad)?;
    if let Some(error) = error {
        check_dtype(error, &[Dtype::F32, Dtype::BF16])?;
        check_elements(error, grad.elements())?;
        check_contiguous(error)?;
        check_same_device(error, grad)?;
        error.check_output(&[grad])?;
    }
    Ok(())
}

fn check_workspace(workspace: &View<'_>, elements: i64) -> Result<()> {
    check_dtype(workspace, &[Dtype::U8])?;
    check_contiguous(workspace)?;
    let (expected, got) = (bytes_of_workspace(elements), workspace.elements());
    if got < expected {
        return Err(error!(
            ShapeMismatch,
            "{}: at least {expected} bytes expected for {elements} elements, got {got}",
            workspace.name()
        ));
    }
    check_aligned(workspace)
}
