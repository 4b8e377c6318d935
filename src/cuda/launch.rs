//! Launches of kernels. All launches go through this file.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use cudarc::driver::sys::{CUfunction, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig};

use crate::ffi::error::{Result, error};

use super::{
    grid::MOST_BLOCKS,
    module::{Kernel, LaunchShape},
    queue::Queue,
};

/// Returns a kernel's only argument, for a launch.
pub fn argument<T>(call: &mut T) -> [*mut c_void; 1] {
    [ptr::from_mut(call).cast()]
}

/// Makes a kernel's arguments for a launch in the same statement, from copies of these values.
macro_rules! arguments {
    ($($value:expr),+ $(,)?) => {
        &mut [$(std::ptr::from_mut(&mut { $value }).cast()),+]
    };
}
pub(crate) use arguments;

impl Queue {
    /// Launches a kernel with enough thread blocks for `items` items.
    ///
    /// # Safety
    /// `arguments` are the kernel's, in order and of its types. It may use the memory they describe until it is done.
    pub unsafe fn launch(&mut self, kernel: &Kernel, items: u64, arguments: &mut [*mut c_void]) -> Result<()> {
        let (function, grid) = (self.ready(kernel)?, Grid::of(kernel, items)?);
        // SAFETY: `ready` put the kernel into this context, which is current or the stream's own. The caller promises
        // the arguments.
        unsafe { self.enqueue(function, kernel.name, grid, arguments)? };
        kernel.note_loaded_in(self.context()?.id);
        Ok(())
    }

    /// Launches a kernel with programmatic dependent launch (PDL), if device and driver support it. The kernel itself
    /// waits for the preceding launch on this call's stream, so it may begin while that one ends.
    ///
    /// # Safety
    /// See [`Queue::launch`]. Before its wait, the kernel reads nothing that a launch writes. The preceding launch is
    /// one of this library, because others need not have waited for the work before them.
    pub unsafe fn launch_pdl(&mut self, kernel: &Kernel, items: u64, arguments: &mut [*mut c_void]) -> Result<()> {
        let (driver, stream) = (self.device.driver, self.stream);
        if !driver.supports_early_launch || self.device.properties().compute_capability < 90 {
            // SAFETY: the caller promises the arguments.
            return unsafe { self.launch(kernel, items, arguments) };
        }
        let (function, grid) = (self.ready(kernel)?, Grid::of(kernel, items)?);
        let mut early = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: grid.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: stream.as_raw().cast(),
            attrs: &mut early,
            numAttrs: 1,
        };
        // SAFETY: as in `launch`; the configuration's pointers outlive the call.
        let code =
            unsafe { (driver.functions.cuLaunchKernelEx)(&config, function, arguments.as_mut_ptr(), ptr::null_mut()) };
        let name = kernel.name.to_string_lossy();
        driver.check(code, format_args!("cuLaunchKernelEx of {name} on {}", self.device))?;
        kernel.note_loaded_in(self.context()?.id);
        Ok(())
    }

    /// # Safety
    /// See [`Queue::launch`]; the function is in the context of the stream.
    pub unsafe fn enqueue(
        &self, function: CUfunction, name: &CStr, grid: Grid, arguments: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: the caller promises that the function is in the stream's context and that the arguments match it.
        let code = unsafe {
            (self.device.driver.functions.cuLaunchKernel)(
                function,
                grid.blocks,
                1,
                1,
                grid.threads,
                1,
                1,
                grid.shared_bytes,
                self.stream.as_raw().cast(),
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.device.driver.check(code, format_args!("cuLaunchKernel of {} on {}", name.to_string_lossy(), self.device))
    }
}

/// Grid of a launch, of one dimension.
pub struct Grid {
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
}

impl Grid {
    fn of(kernel: &Kernel, items: u64) -> Result<Self> {
        let LaunchShape { threads, items_per_block, shared_bytes } = kernel.shape;
        Self::new(items.div_ceil(items_per_block.into()), threads, shared_bytes)
    }

    pub fn new(blocks: u64, threads: u32, shared_bytes: u32) -> Result<Self> {
        if blocks > MOST_BLOCKS as u64 {
            return Err(error!(SizeOverflow, "{blocks} blocks are more than the {MOST_BLOCKS} of one launch"));
        }
        Ok(Self { blocks: blocks as u32, threads, shared_bytes })
    }
}
