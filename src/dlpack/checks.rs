//! Checks of tensors that several operations share.
#![forbid(unsafe_code)]

use crate::ffi::{
    error::{Error, Result, error},
    name::Name,
};

use super::{dtype::Dtype, shape::Shape, view::View};

pub fn check_contiguous(tensor: &View<'_>) -> Result<()> {
    if tensor.is_contiguous() {
        return Ok(());
    }
    Err(error!(
        NotContiguous,
        "{}: C-contiguous expected, got strides {} for shape {}",
        tensor.name(),
        tensor.strides(),
        Shape::of(tensor.shape())
    ))
}

pub fn check_same_device(one: &View<'_>, other: &View<'_>) -> Result<()> {
    if one.device() == other.device() {
        return Ok(());
    }
    Err(error!(InvalidArgument, "{} is on {}, {} on {}", one.name(), one.device(), other.name(), other.device()))
}

pub fn check_dtype(tensor: &View<'_>, known: &[Dtype]) -> Result<()> {
    if known.contains(&tensor.dtype()) {
        return Ok(());
    }
    Err(unexpected_dtype(&tensor.name(), tensor.dtype(), known))
}

#[cold]
pub fn unexpected_dtype(name: &Name, got: Dtype, known: &[Dtype]) -> Error {
    match *known {
        [one] => error!(UnsupportedDtype, "{name}: {one} expected, got {got}"),
        [one, other, third] => error!(UnsupportedDtype, "{name}: {one}, {other} or {third} expected, got {got}"),
        _ => error!(UnsupportedDtype, "{name}: {got} is not taken here"),
    }
}

pub fn check_elements(tensor: &View<'_>, expected: i64) -> Result<()> {
    if tensor.elements() == expected {
        return Ok(());
    }
    Err(error!(
        ShapeMismatch,
        "{}: {expected} elements expected, got {}, of shape {}",
        tensor.name(),
        tensor.elements(),
        Shape::of(tensor.shape())
    ))
}
