//! Images of kernels that were compiled at run time, each the property of a handle.

use std::{
    ffi::{CStr, CString, c_void},
    ptr,
    sync::{PoisonError, RwLock},
};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUkernel, CUlibrary};

use crate::{
    cuda::{Queue, device::Device, launch::Grid},
    ffi::error::{Result, error},
};

/// A kernel of an image.
pub struct CompiledKernel {
    name: CString,
    /// A CUkernel, as a number, to be shared.
    handle: usize,
}

impl CompiledKernel {
    fn name(&self) -> &CStr {
        &self.name
    }

    /// Launches take kernels and functions alike.
    fn function(&self) -> CUfunction {
        self.handle as CUfunction
    }
}

/// Machine code that is loaded, for all contexts of all devices of its compute capability.
pub struct Image {
    device: Device,
    /// A CUlibrary, as a number, to be shared.
    library: usize,
    /// By their number; those that it does not have are None.
    kernels: Vec<Option<CompiledKernel>>,
    /// The ids of all contexts in which all its kernels are. The driver gives none twice. Those that are gone stay in the
    /// list: 8 bytes each, for a context that took milliseconds to make.
    contexts: RwLock<Vec<u64>>,
}

impl Image {
    /// Loads a cubin, and finds its kernels, called `name` and a suffix; a number without a suffix has none.
    pub fn load(queue: &mut Queue, cubin: &[u8], name: &str, suffixes: &[Option<&str>]) -> Result<Self> {
        queue.relax()?;
        let device = queue.device;
        let driver = device.driver;
        let mut kernels = Vec::new();
        kernels
            .try_reserve_exact(suffixes.len())
            .map_err(|_| error!(OutOfMemory, "{name}: cannot allocate a list of its kernels"))?;
        let mut library = ptr::null_mut();
        // SAFETY: machine code of the size that it says itself, which the driver copies, and no options.
        let code = unsafe {
            (driver.functions.cuLibraryLoadData)(
                &mut library,
                cubin.as_ptr().cast(),
                ptr::null_mut(),
                ptr::null_mut(),
                0,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
            )
        };
        driver.check(code, format_args!("cuLibraryLoadData of {name} on {device}"))?;
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
        // Exactly as much was reserved as the NUL at the end takes, too.
        let name = CString::new(bytes).map_err(|_| error!(InvalidArgument, "name: {name:?} has a NUL in it"))?;
        let (driver, mut handle): (_, CUkernel) = (self.device.driver, ptr::null_mut());
        // SAFETY: a library that is loaded, and a name that ends with a NUL.
        let code =
            unsafe { (driver.functions.cuLibraryGetKernel)(&mut handle, self.library as CUlibrary, name.as_ptr()) };
        driver.check(code, format_args!("cuLibraryGetKernel of {}", name.to_string_lossy()))?;
        Ok(CompiledKernel { name, handle: handle as usize })
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // Errors are ignored: there is no caller left to return them to. In a forked child, and while the process ends, the
        // driver refuses.
        // SAFETY: loaded by `load`, and by the promise of whoever releases the handle nothing uses it any more.
        unsafe { (self.device.driver.functions.cuLibraryUnload)(self.library as CUlibrary) };
    }
}

impl Queue {
    /// The device's compute capability: 90 for 9.0.
    pub fn compute_capability(&self) -> i32 {
        self.device.properties().compute_capability
    }

    /// Whether an image is in this call's context, down to every kernel.
    pub fn has_image(&mut self, image: &Image) -> Result<bool> {
        let context = self.context()?.id;
        let contexts = image.contexts.read().unwrap_or_else(PoisonError::into_inner);
        Ok(contexts.iter().rev().any(|&id| id == context)) // the newest are asked for most
    }

    /// Puts an image there. That waits for all that runs in the context.
    pub fn put_image(&mut self, image: &Image) -> Result<()> {
        let context = self.current()?.id;
        let driver = self.device.driver;
        for kernel in image.kernels.iter().flatten() {
            let (mut function, mut registers) = (ptr::null_mut(), 0);
            // SAFETY: a kernel of a library that is loaded, and this context is current.
            unsafe {
                let code = (driver.functions.cuKernelGetFunction)(&mut function, kernel.handle as CUkernel);
                driver.check(code, format_args!("cuKernelGetFunction of {}", kernel.name.to_string_lossy()))?;
                // Asking is what loads: drivers load lazily.
                let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
                let code = (driver.functions.cuFuncGetAttribute)(&mut registers, attribute, function);
                driver.check(code, format_args!("cuFuncGetAttribute of {}", kernel.name.to_string_lossy()))?;
            }
        }
        let mut contexts = image.contexts.write().unwrap_or_else(PoisonError::into_inner);
        if !contexts.contains(&context) {
            contexts
                .try_reserve(1)
                .map_err(|_| error!(OutOfMemory, "cannot allocate a list of {} contexts", contexts.len() + 1))?;
            contexts.push(context);
        }
        Ok(())
    }

    /// Launches a kernel of an image that was compiled at run time, on so many blocks. It is in this context.
    ///
    /// # Safety
    /// As for [`Queue::launch`].
    unsafe fn launch_compiled(
        &mut self, kernel: &CompiledKernel, blocks: u64, threads: u32, arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let grid = Grid::new(blocks, threads, 0)?;
        // SAFETY: the caller promises that the image is in this context, and the arguments.
        unsafe { self.enqueue(kernel.function(), kernel.name(), grid, arguments) }
    }

    /// Launches kernels of an image one after the other, each by its number on so many blocks, with one argument.
    ///
    /// The argument was made of views, whose makers vouched for their memory, for this image's source; what else that does
    /// with them is its author's to answer for.
    pub fn run_compiled(
        &mut self, image: &Image, argument: &mut [u64], launches: impl Iterator<Item = (usize, u64)>, threads: u32,
    ) -> Result<()> {
        let mut arguments = [argument.as_mut_ptr().cast()];
        for (number, blocks) in launches {
            let kernel = image.kernels.get(number).and_then(Option::as_ref).ok_or_else(|| {
                error!(InvalidArgument, "kernel {number} of {} is not in the image", image.kernels.len())
            })?;
            // SAFETY: the argument is as long as the source declares it, and describes memory as said above.
            unsafe { self.launch_compiled(kernel, blocks, threads, &mut arguments)? };
        }
        Ok(())
    }
}
