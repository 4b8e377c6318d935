//! Images of kernels that were compiled at run time; each belongs to one handle.

use std::{
    ffi::CString,
    sync::{PoisonError, RwLock},
};

use cudarc::driver::sys::{CUfunction, CUkernel, CUlibrary};

use crate::{
    cuda::{Queue, device::Device, launch::Grid},
    ffi::{
        error::{Result, error},
        fallible,
    },
};

/// Kernel of an image.
pub struct CompiledKernel {
    name: CString,
    /// CUkernel as a number, so that threads can share it.
    handle: usize,
}

/// Loaded machine code, for all contexts of all devices of its compute capability.
pub struct Image {
    device: Device,
    /// CUlibrary as a number, so that threads can share it.
    library: usize,
    /// Kernels by their number; None for a kernel that the image lacks.
    kernels: Vec<Option<CompiledKernel>>,
    /// Ids of all contexts in which all kernels are loaded. The driver never reuses an id. Ids of destroyed contexts
    /// stay: each takes 8 bytes, and its context took milliseconds to create.
    contexts: RwLock<Vec<u64>>,
}

impl Image {
    /// Loads a cubin and looks up its kernels, called `name` plus a suffix. A number without a suffix has no kernel.
    pub fn load(queue: &mut Queue, cubin: &[u8], name: &str, suffixes: &[Option<&str>]) -> Result<Self> {
        queue.relax()?;
        let device = queue.device;
        let kernels = fallible::list(suffixes.len(), "kernels")?;
        // SAFETY: NVRTC made the code: a cubin, or PTX with its NUL.
        let library = unsafe { device.driver.load_library(cubin, format_args!("{device}: {name}"))? };
        let mut image = Self { device, library: library as usize, kernels, contexts: RwLock::new(Vec::new()) };
        for suffix in suffixes {
            let kernel = suffix.map(|suffix| image.find(name, suffix)).transpose()?;
            image.kernels.push(kernel);
        }
        Ok(image)
    }

    fn find(&self, name: &str, suffix: &str) -> Result<CompiledKernel> {
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(name.len() + suffix.len() + 1)
            .map_err(|_| error!(OutOfMemory, "{name}: cannot allocate its kernels' names"))?;
        bytes.extend(name.bytes().chain(suffix.bytes()));
        // The reserved capacity includes the NUL, so CString::new() does not allocate.
        let name = CString::new(bytes).map_err(|_| error!(InvalidArgument, "name: {name:?} has a NUL in it"))?;
        // SAFETY: the library is loaded.
        let handle = unsafe { self.device.driver.find_kernel(self.library as CUlibrary, &name)? };
        Ok(CompiledKernel { name, handle: handle as usize })
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // Errors are ignored: there is no caller left to return them to. In a forked child, and while the process
        // exits, the driver refuses.
        // SAFETY: `load` loaded the library, and the caller that releases the handle promises that nothing uses it.
        unsafe { (self.device.driver.functions.cuLibraryUnload)(self.library as CUlibrary) };
    }
}

impl Queue {
    /// Returns the device's compute capability: 90 for 9.0.
    pub fn compute_capability(&self) -> i32 {
        self.device.properties().compute_capability
    }

    /// Returns true if all kernels of an image are loaded in this call's context.
    pub fn has_image(&mut self, image: &Image) -> Result<bool> {
        let context = self.context()?.id;
        let contexts = image.contexts.read().unwrap_or_else(PoisonError::into_inner);
        Ok(contexts.iter().rev().any(|&id| id == context)) // the newest contexts are the most likely
    }

    /// Loads an image's kernels in this call's context. Waits for all work in the context.
    pub fn put_image(&mut self, image: &Image) -> Result<()> {
        let context = self.current()?.id;
        for kernel in image.kernels.iter().flatten() {
            // SAFETY: the kernel's library is loaded, and this context is current.
            unsafe { self.device.driver.load_function(kernel.handle as CUkernel, &kernel.name)? };
        }
        let mut contexts = image.contexts.write().unwrap_or_else(PoisonError::into_inner);
        if !contexts.contains(&context) {
            fallible::reserve(&mut contexts, 1, "contexts")?;
            contexts.push(context);
        }
        Ok(())
    }

    /// Launches kernels of an image in sequence, with one argument. `launches`: each kernel's number and thread blocks.
    /// The image must be loaded in this context.
    ///
    /// The argument was made for this image's source from views, whose makers promised valid memory. The author of
    /// the source is responsible for all other accesses.
    pub fn run_compiled(
        &mut self, image: &Image, argument: &mut [u64], launches: impl Iterator<Item = (usize, u64)>, threads: u32,
    ) -> Result<()> {
        let mut arguments = [argument.as_mut_ptr().cast()];
        for (number, blocks) in launches {
            let kernel = image.kernels.get(number).and_then(Option::as_ref).ok_or_else(|| {
                error!(InvalidArgument, "kernel {number} of {} is not in the image", image.kernels.len())
            })?;
            let grid = Grid::new(blocks, threads, 0)?;
            // SAFETY: the argument has the length that the source declares, and describes memory as documented above. A
            // launch accepts a kernel as a function.
            unsafe { self.enqueue(kernel.handle as CUfunction, &kernel.name, grid, &mut arguments)? };
        }
        Ok(())
    }
}
