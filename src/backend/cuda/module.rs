//! The kernels: machine code and PTX that travel in the library, a fatbin for each family of kernels.
//!
//! A new family is a struct of its kernels, a static of that, and a [`Family`] in [`FAMILIES`].

use std::{
    ffi::CStr,
    ptr,
    sync::{Mutex, OnceLock, PoisonError},
};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUkernel, CUlibrary};

use crate::error::{Result, error};

use super::{context::Remembered, queue::Queue};

/// The lowest compute capability that kernels are compiled for: 7.5.
const LOWEST: i32 = 75;

/// How a kernel is launched: on as many blocks of one dimension as its items need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    pub threads: u32,
    /// What a block does of what the kernel counts.
    pub items_per_block: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// A kernel of any context: the driver puts it into one when it is first launched there.
pub struct Kernel {
    pub name: &'static CStr,
    pub shape: LaunchShape,
    family: &'static Family,
    /// A CUkernel, from when its family is loaded.
    handle: OnceLock<usize>,
    /// The contexts in which it is, so that no launch there loads it.
    contexts: Remembered,
}

impl Kernel {
    /// A kernel whose blocks have 256 threads and no shared memory.
    const fn of(family: &'static Family, name: &'static CStr, items_per_block: u32) -> Self {
        Self::with_threads(family, name, items_per_block, 256)
    }

    const fn with_threads(family: &'static Family, name: &'static CStr, items_per_block: u32, threads: u32) -> Self {
        let shape = LaunchShape { threads, items_per_block, shared_bytes: 0 };
        Self { name, shape, family, handle: OnceLock::new(), contexts: Remembered::nothing() }
    }

    /// Remembers that it was launched in a context, and so is there.
    pub fn is_in(&self, context: u64) {
        if self.contexts.recall(context).is_none() {
            self.contexts.remember(context, 0);
        }
    }
}

/// Kernels of one source, loaded together when the first of them is needed.
pub struct Family {
    pub name: &'static CStr,
    pub fatbin: &'static [u8],
    /// Those that kernels/README.md lists: names, arguments and what they count never change.
    promised: &'static [&'static [Kernel]],
    internal: &'static [&'static [Kernel]],
}

impl Family {
    fn kernels(&self) -> impl Iterator<Item = &'static Kernel> {
        self.promised.iter().chain(self.internal).copied().flatten()
    }
}

/// Machine code lies at addresses that drivers expect of it.
#[repr(align(16))]
struct Aligned<T>(T);

/// All families.
pub static FAMILIES: [&Family; 7] =
    [&BITS_FAMILY, &STRIDED_FAMILY, &SIGNS_FAMILY, &ONEBIT_FAMILY, &COPY_FAMILY, &PEERS_FAMILY, &PROBE_FAMILY];

static BITS_FAMILY: Family = Family {
    name: c"bits",
    fatbin: &Aligned(*include_bytes!("../../../kernels/fatbin/bits.fatbin")).0,
    promised: &[&BITS.pack_truth, &BITS.pack_signs, &BITS.unpack],
    internal: &[&BITS.strided],
};

static SIGNS_FAMILY: Family = Family {
    name: c"signs",
    fatbin: &Aligned(*include_bytes!("../../../kernels/fatbin/signs.fatbin")).0,
    promised: &[],
    internal: &[&SIGNS.unpack, &SIGNS.unpack_strided, &SIGNS.vote],
};

static STRIDED_FAMILY: Family = Family {
    name: c"strided",
    fatbin: &Aligned(*include_bytes!("../../../kernels/fatbin/strided.fatbin")).0,
    promised: &[],
    internal: &[
        &STRIDED.pack_columns,
        &STRIDED.pack_transposed,
        &STRIDED.unpack_columns,
        &STRIDED.unpack_transposed,
        &STRIDED.pack_rows,
        &STRIDED.unpack_rows,
        &STRIDED.pack_steps,
        &STRIDED.unpack_steps,
    ],
};

pub static ONEBIT_FAMILY: Family = Family {
    name: c"onebit",
    fatbin: &Aligned(*include_bytes!("../../../kernels/fatbin/onebit.fatbin")).0,
    promised: &[],
    internal: &[
        &ONEBIT.encode,
        &ONEBIT.decode,
        &ONEBIT.reduce,
        &ONEBIT.compress,
        &ONEBIT.compress_errors,
        &ONEBIT.others,
    ],
};

pub static COPY_FAMILY: Family = Family {
    name: c"copy",
    fatbin: &Aligned(*include_bytes!("../../../kernels/fatbin/copy.fatbin")).0,
    promised: &[],
    internal: &[
        &COPY.rows,
        &COPY.words,
        &COPY.cast_rows,
        &COPY.transposed,
        &COPY.cast_transposed,
        &COPY.gathered,
        &COPY.general,
    ],
};

pub static PEERS_FAMILY: Family = Family {
    name: c"peers",
    fatbin: &Aligned(*include_bytes!("../../../kernels/fatbin/peers.fatbin")).0,
    promised: &[],
    internal: &[&PEERS.push, &PEERS.meet],
};

static PROBE_FAMILY: Family = Family {
    name: c"probe",
    fatbin: &Aligned(*include_bytes!("../../../kernels/fatbin/probe.fatbin")).0,
    promised: &[],
    internal: &[&HOLD],
};

/// The kernel of kernels/probe.cu.
pub static HOLD: [Kernel; 1] = [Kernel::of(&PROBE_FAMILY, c"gc_hold", 1)];

/// The kernels of kernels/peers.cu. Counted in blocks.
pub static PEERS: Peers = Peers {
    push: [Kernel::of(&PEERS_FAMILY, c"gc_peers_push", 1)],
    meet: [Kernel::with_threads(&PEERS_FAMILY, c"gc_peers_meet", 1, 64)],
};

pub struct Peers {
    pub push: [Kernel; 1],
    pub meet: [Kernel; 1],
}

/// The kernels of kernels/bits.cu.
pub static BITS: Bits = Bits {
    pack_truth: [
        Kernel::of(&BITS_FAMILY, c"gc_pack_truth_u8", 2048),
        Kernel::of(&BITS_FAMILY, c"gc_pack_truth_u16", 1024),
        Kernel::of(&BITS_FAMILY, c"gc_pack_truth_u32", 1024),
        Kernel::of(&BITS_FAMILY, c"gc_pack_truth_u64", 1024),
    ],
    pack_signs: [
        Kernel::of(&BITS_FAMILY, c"gc_pack_signs_f16", 1024),
        Kernel::of(&BITS_FAMILY, c"gc_pack_signs_bf16", 1024),
        Kernel::of(&BITS_FAMILY, c"gc_pack_signs_f32", 1024),
        Kernel::of(&BITS_FAMILY, c"gc_pack_signs_f64", 1024),
    ],
    unpack: [
        Kernel::of(&BITS_FAMILY, c"gc_unpack_u8", 8192),
        Kernel::of(&BITS_FAMILY, c"gc_unpack_u16", 4096),
        Kernel::of(&BITS_FAMILY, c"gc_unpack_u32", 2048),
        Kernel::of(&BITS_FAMILY, c"gc_unpack_u64", 1024),
    ],
    strided: [Kernel::of(&BITS_FAMILY, c"gc_pack_strided", 256), Kernel::of(&BITS_FAMILY, c"gc_unpack_strided", 256)],
};

pub struct Bits {
    /// By the binary logarithm of the element's size. Counted in bytes of bits.
    pub pack_truth: [Kernel; 4],
    /// float16, bfloat16, float32, float64. Counted in bytes of bits.
    pub pack_signs: [Kernel; 4],
    /// By the binary logarithm of the element's size. Counted in elements.
    pub unpack: [Kernel; 4],
    /// Any strides: packing, unpacking. Counted in groups of 8 elements, or their byte, of all rows.
    pub strided: [Kernel; 2],
}

/// The kernels of kernels/signs.cu.
pub static SIGNS: Signs = Signs {
    unpack: [
        Kernel::of(&SIGNS_FAMILY, c"gc_unpack_signs_u8", 8192),
        Kernel::of(&SIGNS_FAMILY, c"gc_unpack_signs_u16", 4096),
        Kernel::of(&SIGNS_FAMILY, c"gc_unpack_signs_u32", 2048),
        Kernel::of(&SIGNS_FAMILY, c"gc_unpack_signs_u64", 1024),
    ],
    unpack_strided: [Kernel::of(&SIGNS_FAMILY, c"gc_unpack_signs_strided", 256)],
    vote: [Kernel::of(&SIGNS_FAMILY, c"gc_vote_few", 4096), Kernel::of(&SIGNS_FAMILY, c"gc_vote_many", 1024)],
};

pub struct Signs {
    /// By the binary logarithm of the element's size. Counted in elements.
    pub unpack: [Kernel; 4],
    /// Any strides. Counted in bytes of bits.
    pub unpack_strided: [Kernel; 1],
    /// For up to 30 voters, and for any number. Counted in bytes of the result, and one block more.
    pub vote: [Kernel; 2],
}

/// The kernels of kernels/strided.cu.
pub static STRIDED: Strided = Strided {
    pack_columns: [
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_columns_u8", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_columns_u16", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_columns_u32", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_columns_u64", 1),
    ],
    pack_transposed: [
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_transposed_u8", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_transposed_u16", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_transposed_u32", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_transposed_u64", 1),
    ],
    unpack_columns: [
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_columns_u8", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_columns_u16", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_columns_u32", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_columns_u64", 1),
    ],
    unpack_transposed: [
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_transposed_u8", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_transposed_u16", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_transposed_u32", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_transposed_u64", 1),
    ],
    pack_rows: [
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_rows_u8", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_rows_u16", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_rows_u32", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_rows_u64", 1),
    ],
    unpack_rows: [
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_rows_u8", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_rows_u16", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_rows_u32", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_rows_u64", 1),
    ],
    pack_steps: [
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_steps_u8", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_steps_u16", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_steps_u32", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_pack_steps_u64", 1),
    ],
    unpack_steps: [
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_steps_u8", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_steps_u16", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_steps_u32", 1),
        Kernel::of(&STRIDED_FAMILY, c"gc_unpack_steps_u64", 1),
    ],
};

/// By the binary logarithm of the element's size. Counted in blocks.
pub struct Strided {
    pub pack_columns: [Kernel; 4],
    pub pack_transposed: [Kernel; 4],
    pub unpack_columns: [Kernel; 4],
    pub unpack_transposed: [Kernel; 4],
    pub pack_rows: [Kernel; 4],
    pub unpack_rows: [Kernel; 4],
    pub pack_steps: [Kernel; 4],
    pub unpack_steps: [Kernel; 4],
}

/// The kernels of kernels/onebit.cu. Counted in blocks, but for one.
pub static ONEBIT: Onebit = Onebit {
    encode: [
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_encode_f32_f32", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_encode_f32_bf16", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_encode_f32", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_encode_16_f32", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_encode_16_bf16", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_encode_16", 1),
    ],
    decode: [
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_decode_u32", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_decode_u16", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_decode_add", 1),
    ],
    reduce: [
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_reduce_f32", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_reduce_bf16", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_reduce", 1),
    ],
    compress: [
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_compress_f32_f32", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_compress_f32_bf16", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_compress_f32", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_compress_16_f32", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_compress_16_bf16", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_compress_16", 1),
    ],
    compress_errors: [
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_compress_errors_f32_f32", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_compress_errors_f32_bf16", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_compress_errors_16_f32", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_compress_errors_16_bf16", 1),
    ],
    others: [
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_compress_scale", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_commit", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_reset", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_state_out", 256),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_check_state", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_state_in", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_errors_in", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_errors_out", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_addresses", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_finish", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_refuse", 1),
        Kernel::of(&ONEBIT_FAMILY, c"gc_onebit_mean", 1),
    ],
};

pub struct Onebit {
    /// By values (float32, 16 bits of either dtype), and in each by errors (float32, bfloat16, none).
    pub encode: [Kernel; 6],
    /// To elements of 4 bytes, of 2 bytes; added to float32.
    pub decode: [Kernel; 3],
    /// By errors: float32, bfloat16, none.
    pub reduce: [Kernel; 3],
    /// As `encode`.
    pub compress: [Kernel; 6],
    /// By values, and in each by errors (float32, bfloat16).
    pub compress_errors: [Kernel; 4],
    others: [Kernel; 12],
}

impl Onebit {
    pub fn compress_scale(&self) -> &Kernel {
        &self.others[0]
    }
    pub fn finish(&self) -> &Kernel {
        &self.others[9]
    }
    pub fn commit(&self) -> &Kernel {
        &self.others[1]
    }
    pub fn reset(&self) -> &Kernel {
        &self.others[2]
    }
    /// Counted in words of 4 bytes.
    pub fn state_out(&self) -> &Kernel {
        &self.others[3]
    }
    pub fn check_state(&self) -> &Kernel {
        &self.others[4]
    }
    pub fn state_in(&self) -> &Kernel {
        &self.others[5]
    }
    pub fn errors_in(&self) -> &Kernel {
        &self.others[6]
    }
    pub fn errors_out(&self) -> &Kernel {
        &self.others[7]
    }
    pub fn addresses(&self) -> &Kernel {
        &self.others[8]
    }
    pub fn refuse(&self) -> &Kernel {
        &self.others[10]
    }
    /// What `reduce` adds the error to.
    pub fn mean(&self) -> &Kernel {
        &self.others[11]
    }
}

/// The kernels of kernels/copy.cu. Counted in blocks, but transposed matrices in so many times the side of a tile.
pub static COPY: Copy = Copy {
    rows: [
        Kernel::of(&COPY_FAMILY, c"gc_copy_rows", 1),
        Kernel::of(&COPY_FAMILY, c"gc_cast_rows_f32_bf16", 1),
        Kernel::of(&COPY_FAMILY, c"gc_cast_rows_f32_f16", 1),
        Kernel::of(&COPY_FAMILY, c"gc_cast_rows_bf16_f32", 1),
        Kernel::of(&COPY_FAMILY, c"gc_cast_rows_f16_f32", 1),
        Kernel::of(&COPY_FAMILY, c"gc_cast_rows_f64_f32", 1),
        Kernel::of(&COPY_FAMILY, c"gc_cast_rows_f32_f64", 1),
    ],
    words: [Kernel::of(&COPY_FAMILY, c"gc_copy_rows_u32", 1), Kernel::of(&COPY_FAMILY, c"gc_copy_rows_u64", 1)],
    cast_rows: [Kernel::of(&COPY_FAMILY, c"gc_cast_rows", 1)],
    transposed: [
        Kernel::of(&COPY_FAMILY, c"gc_copy_transposed_u8", 128),
        Kernel::of(&COPY_FAMILY, c"gc_copy_transposed_u16", 64),
        Kernel::of(&COPY_FAMILY, c"gc_copy_transposed_u32", 64),
        Kernel::of(&COPY_FAMILY, c"gc_copy_transposed_u64", 32),
        Kernel::of(&COPY_FAMILY, c"gc_copy_transposed_u128", 32),
    ],
    cast_transposed: [
        Kernel::of(&COPY_FAMILY, c"gc_cast_transposed", 32),
        Kernel::of(&COPY_FAMILY, c"gc_cast_transposed_f32_bf16", 64),
        Kernel::of(&COPY_FAMILY, c"gc_cast_transposed_f32_f16", 64),
        Kernel::of(&COPY_FAMILY, c"gc_cast_transposed_bf16_f32", 64),
        Kernel::of(&COPY_FAMILY, c"gc_cast_transposed_f16_f32", 64),
    ],
    gathered: [
        Kernel::of(&COPY_FAMILY, c"gc_copy_gathered_u8", 1),
        Kernel::of(&COPY_FAMILY, c"gc_copy_gathered_u16", 1),
        Kernel::of(&COPY_FAMILY, c"gc_copy_gathered_u32", 1),
        Kernel::of(&COPY_FAMILY, c"gc_copy_gathered_u64", 1),
    ],
    general: [Kernel::of(&COPY_FAMILY, c"gc_copy_general", 1), Kernel::of(&COPY_FAMILY, c"gc_cast_general", 1)],
};

pub struct Copy {
    /// Bytes as they are, then the usual casts.
    pub rows: [Kernel; 7],
    /// Words of 4 and of 8 bytes that do not lie alike within vectors.
    pub words: [Kernel; 2],
    /// Any cast between elements of up to 4 bytes.
    pub cast_rows: [Kernel; 1],
    /// By the binary logarithm of the element's size.
    pub transposed: [Kernel; 5],
    /// Any cast, then the first of the usual ones.
    pub cast_transposed: [Kernel; 5],
    /// Bytes as they are, any cast.
    pub general: [Kernel; 2],
    /// By the size of an element, as a power of 2.
    pub gathered: [Kernel; 4],
}

/// The launch shape of a kernel on cards of a compute capability (90: 9.0); None for those that kernels/README.md
/// does not list.
pub fn launch_shape(kernel: &CStr, compute_capability: i32) -> Result<Option<LaunchShape>> {
    supported(compute_capability)?;
    let mut promised = FAMILIES.iter().flat_map(|family| family.promised.iter().copied().flatten());
    Ok(promised.find(|known| known.name == kernel).map(|known| known.shape))
}

fn supported(compute_capability: i32) -> Result<()> {
    if compute_capability >= LOWEST {
        return Ok(());
    }
    let [given, lowest] = [compute_capability, LOWEST].map(|number| f64::from(number) / 10.0);
    Err(error!(UnsupportedDevice, "compute capability {given:.1}: {lowest:.1} and up are supported"))
}

impl Queue {
    /// A kernel for launches on this device. Where it is not in the context yet, its family is put there, which waits for
    /// all that runs in it. But a context that a stream brings along need not be current, and so is not made so: there the
    /// launch itself loads the kernel, in a capture mode in which that disturbs nobody.
    pub(super) fn ready(&mut self, kernel: &Kernel) -> Result<CUfunction> {
        let context = self.context()?.id;
        if kernel.contexts.recall(context).is_none() {
            if self.stream.created().is_some() {
                self.relax()?;
                self.load(kernel.family)?;
            } else {
                self.put_into_context(kernel.family)?;
            }
        }
        // cuLaunchKernel takes kernels and functions alike. In a context there are only kernels with a handle.
        Ok(kernel.handle.get().map_or(ptr::null_mut(), |&handle| handle as CUfunction))
    }

    /// Loads what calls in this context need, down to every kernel.
    pub fn prepare(&mut self) -> Result<()> {
        FAMILIES.iter().try_for_each(|family| self.put_into_context(family))
    }

    /// Loads a family, down to every kernel.
    #[cold]
    pub(super) fn put_into_context(&mut self, family: &'static Family) -> Result<()> {
        let context = self.current()?.id;
        self.load(family)?;
        for kernel in family.kernels() {
            self.load_function(kernel)?;
            kernel.is_in(context);
        }
        Ok(())
    }

    /// Gives every kernel of a family its handle, unless they have them.
    fn load(&self, family: &'static Family) -> Result<()> {
        supported(self.device.properties().compute_capability)?;
        static LOADING: Mutex<()> = Mutex::new(());
        let _loading = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
        if family.kernels().all(|kernel| kernel.handle.get().is_some()) {
            return Ok(());
        }
        let driver = self.device.driver;
        let mut handles = Vec::new();
        handles
            .try_reserve_exact(family.kernels().count())
            .map_err(|_| error!(OutOfMemory, "a list of the kernels of {:?} could not be had", family.name))?;
        let mut library = ptr::null_mut();
        // SAFETY: a fatbin that stays, which says its own size, and no options.
        let code = unsafe {
            (driver.functions.cuLibraryLoadData)(
                &mut library,
                family.fatbin.as_ptr().cast(),
                ptr::null_mut(),
                ptr::null_mut(),
                0,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
            )
        };
        driver.check(code, format_args!("cuLibraryLoadData on {}", self.device))?;
        for kernel in family.kernels() {
            handles.push(self.find(library, kernel).inspect_err(|_| {
                // SAFETY: loaded above, and no kernel of it has a handle.
                unsafe { (driver.functions.cuLibraryUnload)(library) };
            })?);
        }
        for (kernel, handle) in family.kernels().zip(handles) {
            kernel.handle.get_or_init(|| handle);
        }
        Ok(())
    }

    fn find(&self, library: CUlibrary, kernel: &Kernel) -> Result<usize> {
        let (driver, mut handle): (_, CUkernel) = (self.device.driver, ptr::null_mut());
        // SAFETY: a library that is loaded, and a name that ends with a NUL.
        let code = unsafe { (driver.functions.cuLibraryGetKernel)(&mut handle, library, kernel.name.as_ptr()) };
        driver.check(code, format_args!("cuLibraryGetKernel of {}", kernel.name.to_string_lossy()))?;
        Ok(handle as usize)
    }

    /// Puts a kernel that has its handle into the current context.
    fn load_function(&self, kernel: &Kernel) -> Result<()> {
        let (driver, name) = (self.device.driver, kernel.name.to_string_lossy());
        let handle = kernel.handle.get().map_or(ptr::null_mut(), |&handle| handle as CUkernel);
        let (mut function, mut registers) = (ptr::null_mut(), 0);
        // SAFETY: a kernel of a library that is never unloaded, and this context is current.
        unsafe {
            let code = (driver.functions.cuKernelGetFunction)(&mut function, handle);
            driver.check(code, format_args!("cuKernelGetFunction of {name}"))?;
            // Asking is what loads: drivers load lazily.
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
            let code = (driver.functions.cuFuncGetAttribute)(&mut registers, attribute, function);
            driver.check(code, format_args!("cuFuncGetAttribute of {name}"))
        }
    }
}
