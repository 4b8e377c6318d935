//! Every launch of a kernel.

use std::{ffi::c_void, ptr};

use crate::error::{Result, error};

use super::{module::Kernel, queue::Queue};

/// Threads a block, of every kernel.
const THREADS: u32 = 256;

/// Most blocks of a launch.
const MOST_BLOCKS: u64 = i32::MAX as u64;

impl Queue {
    /// Launches a kernel on as many blocks as `items` of what it counts need.
    ///
    /// # Safety
    /// `arguments` are the kernel's, in order and of its types, and describe memory that it may use until it is done.
    pub(super) unsafe fn launch(&mut self, kernel: Kernel, items: u64, arguments: &mut [*mut c_void]) -> Result<()> {
        let blocks = items.div_ceil(kernel.a_block);
        if blocks > MOST_BLOCKS {
            return Err(error!(SizeOverflow, "{blocks} blocks are more than the {MOST_BLOCKS} of one launch"));
        }
        self.context()?;
        self.keep_within_bound()?;
        // SAFETY: the kernel is of this device's image, and the context is current or the stream's own; the rest is the
        // caller's promise.
        let code = unsafe {
            (self.device.driver.functions.cuLaunchKernel)(
                kernel.as_function(),
                blocks as u32,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                self.stream.as_ptr().cast(),
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.device
            .driver
            .check(code, format_args!("cuLaunchKernel of {} on {}", kernel.name.to_string_lossy(), self.device))
    }
}
