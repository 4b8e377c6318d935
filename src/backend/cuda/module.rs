//! The kernels: PTX that travels in the library, loaded once.

use std::{
    ffi::CStr,
    ptr,
    sync::{Mutex, OnceLock, PoisonError},
};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUkernel};

use crate::error::{Result, error};

use super::{context::Remembered, queue::Queue};

/// PTX for a compute capability and those above it, up to that of the next image.
struct Image {
    compute_capability: i32,
    ptx: &'static CStr,
    kernels: OnceLock<Kernels>,
}

/// The lowest first.
static IMAGES: [Image; 2] = [
    Image {
        compute_capability: 75,
        ptx: text(concat!(include_str!("../../../kernels/ptx/bits_sm75.ptx"), "\0")),
        kernels: OnceLock::new(),
    },
    Image {
        compute_capability: 90,
        ptx: text(concat!(include_str!("../../../kernels/ptx/bits_sm90.ptx"), "\0")),
        kernels: OnceLock::new(),
    },
];

const fn text(with_nul: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(with_nul.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("PTX has no NUL"),
    }
}

fn image(compute_capability: i32) -> Result<&'static Image> {
    IMAGES.iter().rfind(|image| image.compute_capability <= compute_capability).ok_or_else(|| {
        error!(
            UnsupportedDevice,
            "compute capability {}.{}: {}.{} and up are supported",
            compute_capability / 10,
            compute_capability % 10,
            IMAGES[0].compute_capability / 10,
            IMAGES[0].compute_capability % 10
        )
    })
}

/// The PTX that runs on devices of a compute capability (90: 9.0).
pub fn ptx(compute_capability: i32) -> Result<&'static CStr> {
    Ok(image(compute_capability)?.ptx)
}

/// A kernel of any context: the driver puts it into one when it is first launched there.
#[derive(Clone, Copy)]
pub struct Kernel {
    pub name: &'static CStr,
    /// What a block does of what the kernel counts: `kernels/README.md`.
    pub a_block: u64,
    handle: usize,
}

impl Kernel {
    /// For cuLaunchKernel, which takes kernels and functions alike.
    pub fn as_function(self) -> CUfunction {
        self.handle as CUfunction
    }
}

macro_rules! kernels {
    ($($(#[$about:meta])* $field:ident: [$($name:literal: $a_block:literal),* $(,)?],)*) => {
        /// All kernels of an image.
        pub struct Kernels {
            $($(#[$about])* pub $field: [Kernel; [$($name),*].len()],)*
        }

        impl Kernels {
            fn find(mut find: impl FnMut(&'static CStr, u64) -> Result<Kernel>) -> Result<Self> {
                Ok(Self { $($field: [$(find($name, $a_block)?),*],)* })
            }

            fn for_each(&self, mut work: impl FnMut(Kernel) -> Result<()>) -> Result<()> {
                $(self.$field.into_iter().try_for_each(&mut work)?;)*
                Ok(())
            }
        }
    };
}

kernels! {
    /// By the binary logarithm of the element's size. Counted in bytes of bits.
    pack_truth: [
        c"gc_pack_truth_u8": 2048, c"gc_pack_truth_u16": 1024, c"gc_pack_truth_u32": 1024, c"gc_pack_truth_u64": 1024,
    ],
    /// float16, bfloat16, float32, float64. Counted in bytes of bits.
    pack_signs: [
        c"gc_pack_signs_f16": 1024, c"gc_pack_signs_bf16": 1024, c"gc_pack_signs_f32": 1024, c"gc_pack_signs_f64": 1024,
    ],
    /// By the binary logarithm of the element's size. Counted in elements.
    unpack: [c"gc_unpack_u8": 8192, c"gc_unpack_u16": 4096, c"gc_unpack_u32": 2048, c"gc_unpack_u64": 1024],
    /// Any strides: packing, unpacking. Counted in groups of 8 elements, or their byte, of all rows.
    strided: [c"gc_pack_strided": 256, c"gc_unpack_strided": 256],
}

/// The contexts in which every kernel is.
static PREPARED: Remembered = Remembered::nothing();

impl Queue {
    /// The kernels for this device, loaded and put into this context by the first call there, so that no launch has to,
    /// which waits for all that runs there.
    pub(super) fn kernels(&mut self) -> Result<&'static Kernels> {
        let image = image(self.device.properties().compute_capability)?;
        let context = self.context()?.id;
        match image.kernels.get() {
            Some(kernels) if PREPARED.recall(context).is_some() => Ok(kernels),
            _ => self.prepare(),
        }
    }

    /// Loads what calls in this context need, down to every kernel.
    #[cold]
    pub fn prepare(&mut self) -> Result<&'static Kernels> {
        let image = image(self.device.properties().compute_capability)?;
        let context = self.current()?.id;
        let kernels = match image.kernels.get() {
            Some(kernels) => kernels,
            None => self.load(image)?,
        };
        kernels.for_each(|kernel| self.put_into_context(kernel))?;
        PREPARED.remember(context, 0);
        Ok(kernels)
    }

    fn load(&self, image: &'static Image) -> Result<&'static Kernels> {
        static LOADING: Mutex<()> = Mutex::new(());
        let _loading = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = image.kernels.get() {
            return Ok(kernels); // another thread was faster
        }
        let driver = self.device.driver;
        let mut library = ptr::null_mut();
        // SAFETY: text that ends with a NUL, and no options.
        let code = unsafe {
            (driver.functions.cuLibraryLoadData)(
                &mut library,
                image.ptx.as_ptr().cast(),
                ptr::null_mut(),
                ptr::null_mut(),
                0,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
            )
        };
        driver.check(code, format_args!("cuLibraryLoadData on {}", self.device))?;
        let kernels = Kernels::find(|name, a_block| {
            let mut kernel: CUkernel = ptr::null_mut();
            // SAFETY: a library that is loaded.
            let code = unsafe { (driver.functions.cuLibraryGetKernel)(&mut kernel, library, name.as_ptr()) };
            driver.check(code, format_args!("cuLibraryGetKernel of {}", name.to_string_lossy()))?;
            Ok(Kernel { name, a_block, handle: kernel as usize })
        })
        .inspect_err(|_| {
            // SAFETY: loaded above, and nobody has a kernel of it.
            unsafe { (driver.functions.cuLibraryUnload)(library) };
        })?;
        Ok(image.kernels.get_or_init(|| kernels))
    }

    /// Puts a kernel into the current context.
    fn put_into_context(&self, kernel: Kernel) -> Result<()> {
        let (driver, name) = (self.device.driver, kernel.name.to_string_lossy());
        let (mut function, mut registers) = (ptr::null_mut(), 0);
        // SAFETY: a kernel of a library that is never unloaded, and this context is current.
        unsafe {
            let code = (driver.functions.cuKernelGetFunction)(&mut function, kernel.handle as CUkernel);
            driver.check(code, format_args!("cuKernelGetFunction of {name}"))?;
            // Asking is what loads: drivers load lazily.
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
            let code = (driver.functions.cuFuncGetAttribute)(&mut registers, attribute, function);
            driver.check(code, format_args!("cuFuncGetAttribute of {name}"))
        }
    }
}
