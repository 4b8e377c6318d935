//! The plain form: the error is the caller's tensor, and is read twice.

use std::ptr;

use crate::{
    backend::cuda::{module::ONEBIT, queue::Queue},
    error::Result,
    plan::codec::ScaleRule,
    tensor::{Dtype, View},
};

use super::{
    index_of,
    layout::{Compress, TILE, argument, number_of},
};

/// Writes bits to `dst` and the scale, and the error anew if the scale is finite. `workspace` has room for a float64 for
/// each tile.
pub fn compress(
    queue: &mut Queue,
    grad: &View<'_>,
    error: Option<&View<'_>>,
    rule: ScaleRule,
    dst: &View<'_>,
    scale: &View<'_>,
    workspace: &View<'_>,
) -> Result<()> {
    let elements = grad.elements() as u64;
    let mut call = Compress {
        grad: grad.data(),
        error: error.map_or(ptr::null_mut(), View::data),
        dst: dst.data(),
        scale: scale.data(),
        partials: workspace.data(),
        elements,
        bytes: dst.elements() as u64,
        rule: rule as u32,
        reserved: 0,
    };
    let tiles = elements.div_ceil(TILE as u64);
    let index = index_of(grad.dtype(), error.map(View::dtype));
    // SAFETY: the kernels' argument, over memory that the makers of the views vouched for, of sizes that were checked.
    unsafe {
        if tiles > 0 {
            queue.launch(&ONEBIT.compress[index], tiles, &mut argument(&mut call))?;
        }
        queue.launch(ONEBIT.compress_scale(), 1, &mut argument(&mut call))?;
        if let (Some(error), 1..) = (error, tiles) {
            let errors = usize::from(error.dtype() == Dtype::BF16);
            let kernel = &ONEBIT.compress_errors[2 * number_of(grad.dtype()) + errors];
            queue.launch(kernel, tiles, &mut argument(&mut call))?;
        }
    }
    Ok(())
}
