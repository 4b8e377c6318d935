//! Images of kernels that were compiled at run time, each the property of a handle.

use std::{
    ffi::{CStr, CString},
    ptr,
    sync::{PoisonError, RwLock},
};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUkernel, CUlibrary};

use crate::{
    compile::{
        loops::{Launch, Work},
        source::THREADS,
    },
    error::{Result, error},
};

use super::{device::Device, queue::Queue};

/// A kernel of an image.
pub struct CompiledKernel {
    name: CString,
    /// A CUkernel, as a number, to be shared.
    handle: usize,
}

impl CompiledKernel {
    pub(super) fn name(&self) -> &CStr {
        &self.name
    }

    /// Launches take kernels and functions alike.
    pub(super) fn function(&self) -> CUfunction {
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
    /// Loads a cubin, and finds those kernels of these names, each made of two parts, whose bits are set.
    pub fn load(queue: &mut Queue, cubin: &[u8], name: &str, behind: &[&str], which: u16) -> Result<Self> {
        queue.relax()?;
        let device = queue.device;
        let driver = device.driver;
        let mut kernels = Vec::new();
        kernels
            .try_reserve_exact(behind.len())
            .map_err(|_| error!(OutOfMemory, "{name}: a list of its kernels could not be had"))?;
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
        for (index, part) in behind.iter().enumerate() {
            let kernel = if which >> index & 1 != 0 { Some(image.find(name, part)?) } else { None };
            image.kernels.push(kernel);
        }
        Ok(image)
    }

    fn find(&self, name: &str, behind: &str) -> Result<CompiledKernel> {
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(name.len() + behind.len() + 1)
            .map_err(|_| error!(OutOfMemory, "{name}: its kernels' names could not be had"))?;
        bytes.extend(name.bytes().chain(behind.bytes()));
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
        // Nobody can be told of a failure; in a forked child, and while the process ends, the driver refuses.
        let _delay = crate::cancel::delay();
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
                .map_err(|_| error!(OutOfMemory, "a list of {} contexts could not be had", contexts.len() + 1))?;
            contexts.push(context);
        }
        Ok(())
    }

    /// Launches a kernel of an image, or two, one after the other.
    ///
    /// The work was made of views, whose makers vouched for their memory, for this image's source; what else that does
    /// with them is its author's to answer for.
    pub fn run_compiled(&mut self, image: &Image, work: &mut Work) -> Result<()> {
        let Work { words, first, second } = work;
        let mut arguments = [words.as_mut_ptr().cast()];
        for &Launch { kernel, blocks } in [*first].iter().chain(second.as_ref()) {
            let kernel =
                image.kernels.get(kernel).and_then(Option::as_ref).ok_or_else(|| {
                    error!(InvalidArgument, "kernel {kernel} of {} was asked for", image.kernels.len())
                })?;
            // SAFETY: the argument is as long as the source declares it, and describes memory as said above.
            unsafe { self.launch_compiled(kernel, blocks, THREADS, &mut arguments)? };
        }
        Ok(())
    }
}
