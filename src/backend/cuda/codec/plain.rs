//! The plain form: the error is the caller's tensor, and is read twice.

use std::ptr;

use crate::{
    backend::{
        call::Compression,
        cuda::{launch::argument, module::ONEBIT, queue::Queue},
    },
    error::Result,
    tensor::{Dtype, View},
};

use super::layout::{Compress, TILE, index_of, number_of};

/// Writes bits and the scale. The workspace has room for a float64 for each tile.
pub fn compress(queue: &mut Queue, call: &Compression<'_>) -> Result<()> {
    let (tiles, mut given) = (tiles_of(call), of(call));
    let index = index_of(call.grad.dtype(), call.error.map(View::dtype));
    // SAFETY: the kernels' argument, over memory that the makers of the views vouched for, of sizes that were checked.
    unsafe {
        if tiles > 0 {
            queue.launch(&ONEBIT.compress[index], tiles, &mut argument(&mut given))?;
        }
        queue.launch(&ONEBIT.compress_scale, 1, &mut argument(&mut given))
    }
}

/// Writes what the signs and their scale, which `compress` has written, have lost to the error, unless the scale is not
/// finite.
pub fn carry(queue: &mut Queue, call: &Compression<'_>) -> Result<()> {
    let (Some(error), tiles @ 1..) = (call.error, tiles_of(call)) else { return Ok(()) };
    let (narrow, errors) = (call.grad.dtype().size == 2, error.dtype() == Dtype::BF16);
    let kernel = &ONEBIT.compress_errors[2 * usize::from(narrow) + usize::from(errors)];
    // SAFETY: the argument is the kernel's struct, over memory that the makers of the views vouched for, of sizes that
    // were checked.
    unsafe { queue.launch(kernel, tiles, &mut argument(&mut of(call))) }
}

fn tiles_of(call: &Compression<'_>) -> u64 {
    (call.grad.elements() as u64).div_ceil(TILE as u64)
}

fn of(call: &Compression<'_>) -> Compress {
    Compress {
        grad: call.grad.data(),
        error: call.error.map_or(ptr::null_mut(), View::data),
        dst: call.dst.data(),
        scale: call.scale.data(),
        partials: call.workspace.data(),
        elements: call.grad.elements() as u64,
        bytes: call.dst.elements() as u64,
        rule: call.rule as u32,
        values: number_of(call.grad.dtype()) as u32,
    }
}
