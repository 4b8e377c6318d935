//! Every launch of a kernel.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use cudarc::driver::sys::CUfunction;

use crate::{
    backend::Stream,
    error::{Result, error},
};

use super::{
    compiled::CompiledKernel,
    module::{Kernel, LaunchShape},
    queue::Queue,
};

/// Most blocks of a launch.
const MOST_BLOCKS: u64 = i32::MAX as u64;

impl Queue {
    /// Launches a kernel on as many blocks as `items` of what it counts need.
    ///
    /// # Safety
    /// `arguments` are the kernel's, in order and of its types, and describe memory that it may use until it is done.
    pub(super) unsafe fn launch(&mut self, kernel: &Kernel, items: u64, arguments: &mut [*mut c_void]) -> Result<()> {
        self.keep_within_bound()?;
        // SAFETY: the caller's promise; the stream is this call's.
        unsafe { self.launch_on(self.stream, kernel, items, arguments) }
    }

    /// The same on another stream of this context.
    ///
    /// # Safety
    /// As for [`Queue::launch`], and the stream is alive.
    pub(super) unsafe fn launch_on(
        &mut self,
        stream: Stream,
        kernel: &Kernel,
        items: u64,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let LaunchShape { threads, items_per_block, shared_bytes } = kernel.shape;
        let blocks = items.div_ceil(items_per_block.into());
        if blocks > MOST_BLOCKS {
            return Err(error!(SizeOverflow, "{blocks} blocks are more than the {MOST_BLOCKS} of one launch"));
        }
        let function = self.ready(kernel)?;
        // SAFETY: the kernel is in this context, and the context is current or the stream's own; the rest is the
        // caller's promise.
        unsafe {
            self.enqueue(stream, function, kernel.name, [blocks as u32, threads, shared_bytes], arguments)?;
        }
        kernel.is_in(self.context()?.id);
        Ok(())
    }

    /// Launches a kernel of an image that was compiled at run time, on so many blocks. It is in this context.
    ///
    /// # Safety
    /// As for [`Queue::launch`].
    pub(super) unsafe fn launch_compiled(
        &mut self,
        kernel: &CompiledKernel,
        blocks: u64,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        if blocks > MOST_BLOCKS {
            return Err(error!(SizeOverflow, "{blocks} blocks are more than the {MOST_BLOCKS} of one launch"));
        }
        self.keep_within_bound()?;
        // SAFETY: as above.
        unsafe { self.enqueue(self.stream, kernel.function(), kernel.name(), [blocks as u32, threads, 0], arguments) }
    }

    /// # Safety
    /// As for [`Queue::launch`], and the function is in the context of the stream.
    unsafe fn enqueue(
        &self,
        stream: Stream,
        function: CUfunction,
        name: &CStr,
        [blocks, threads, shared_bytes]: [u32; 3],
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe {
            (self.device.driver.functions.cuLaunchKernel)(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared_bytes,
                stream.as_ptr().cast(),
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.device.driver.check(code, format_args!("cuLaunchKernel of {} on {}", name.to_string_lossy(), self.device))
    }
}
