//! The built-in kernels: machine code and PTX in the library, one fatbin per module.
//!
//! The list below defines the structs, the kernels' names and their launch shapes.

use std::{
    ffi::CStr,
    fmt::Display,
    ptr, slice,
    sync::{Mutex, OnceLock, PoisonError},
};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUkernel, CUlibrary};

use crate::ffi::{
    dynamic::with_nul,
    error::{Result, error},
    fallible,
};

use super::{context::LossyCache, driver::Driver, queue::Queue};

/// Lowest compute capability that kernels are compiled for: 7.5.
const LOWEST: i32 = 75;

/// Launch shape of a kernel: a grid of one dimension with enough thread blocks for its items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    pub threads: u32,
    /// Items that a thread block processes, in the unit that the kernel counts.
    pub items_per_block: u32,
    /// Dynamic shared memory of a thread block, in bytes.
    pub shared_bytes: u32,
}

/// Kernel for any context. The driver loads it into a context at its first launch there.
pub struct Kernel {
    pub name: &'static CStr,
    pub shape: LaunchShape,
    module: &'static Module,
    /// CUkernel; set when its module is loaded.
    handle: OnceLock<usize>,
    /// Contexts in which the kernel is loaded, so that a launch there does not load it.
    contexts: LossyCache,
}

impl Kernel {
    const fn new(module: &'static Module, name: &'static str, items_per_block: u32, threads: u32) -> Self {
        let shape = LaunchShape { threads, items_per_block, shared_bytes: 0 };
        Self { name: with_nul(name), shape, module, handle: OnceLock::new(), contexts: LossyCache::nothing() }
    }

    /// Returns the CUkernel. The module must be loaded.
    fn handle(&self) -> Result<usize> {
        let handle = self.handle.get().copied();
        handle.ok_or_else(|| error!(Cuda, "{} is launched before its module is loaded", self.name.to_string_lossy()))
    }

    /// Remembers that the kernel is loaded in a context.
    pub fn note_loaded_in(&self, context: u64) {
        if self.contexts.recall(context).is_none() {
            self.contexts.remember(context, 0);
        }
    }
}

/// Kernels of one source, loaded together when the first of them is needed.
pub struct Module {
    pub name: &'static CStr,
    pub fatbin: &'static [u8],
    /// Kernels that docs/ABI.md lists: their names, arguments and items never change.
    promised: &'static [&'static [Kernel]],
    internal: &'static [&'static [Kernel]],
}

impl Module {
    fn kernels(&self) -> impl Iterator<Item = &'static Kernel> {
        self.promised.iter().chain(self.internal).copied().flatten()
    }
}

/// Machine code at the alignment that drivers expect.
#[repr(align(16))]
struct Aligned<T>(T);

/// An entry is `gc_name`, then `: items` per thread block if not 1, then `x threads` if not 256. An entry in
/// parentheses is one field; entries in brackets are an array.
macro_rules! kernels {
    (@type ($($kernel:tt)*)) => { Kernel };
    (@type [$($name:ident $(: $items:literal)?),* $(,)?]) => { [Kernel; [$(stringify!($name)),*].len()] };
    (@value $module:ident ($name:ident $(: $items:literal $(x $threads:literal)?)?)) => {
        Kernel::new(
            &$module,
            concat!(stringify!($name), "\0"),
            kernels!(@or 1 $($items)?),
            kernels!(@or 256 $($($threads)?)?),
        )
    };
    (@value $module:ident [$($name:ident $(: $items:literal)?),* $(,)?]) => {
        [$(kernels!(@value $module ($name $(: $items)?))),*]
    };
    (@slice $field:expr, ($($kernel:tt)*)) => { slice::from_ref(&$field) };
    (@slice $field:expr, [$($kernel:tt)*]) => { &$field };
    (@or $default:literal) => { $default };
    (@or $default:literal $given:literal) => { $given };
}

macro_rules! modules {
    ($(
        $(#[$doc:meta])*
        $kernels:ident: $Kernels:ident, $module:ident in $file:literal {
            $(promised { $($(#[$promised_doc:meta])* $promised:ident: $promised_kernels:tt,)* })?
            internal { $($(#[$internal_doc:meta])* $internal:ident: $internal_kernels:tt,)* }
        }
    )*) => {
        $(
            $(#[$doc])*
            pub struct $Kernels {
                $($($(#[$promised_doc])* pub $promised: kernels!(@type $promised_kernels),)*)?
                $($(#[$internal_doc])* pub $internal: kernels!(@type $internal_kernels),)*
            }

            $(#[$doc])*
            pub static $kernels: $Kernels = $Kernels {
                $($($promised: kernels!(@value $module $promised_kernels),)*)?
                $($internal: kernels!(@value $module $internal_kernels),)*
            };

            pub static $module: Module = Module {
                name: with_nul(concat!($file, "\0")),
                fatbin: &Aligned(*include_bytes!(concat!("../../kernels/fatbin/", $file, ".fatbin"))).0,
                promised: &[$($(kernels!(@slice $kernels.$promised, $promised_kernels)),*)?],
                internal: &[$(kernels!(@slice $kernels.$internal, $internal_kernels)),*],
            };
        )*

        /// Every module.
        pub static MODULES: &[&Module] = &[$(&$module),*];
    };
}

modules! {
    /// The kernels of kernels/bits.cu.
    BITS: Bits, BITS_MODULE in "bits" {
        promised {
            /// Indexed by the binary logarithm of the element's size. Items are bytes of bits.
            pack_truth: [
                gc_pack_truth_u8: 2048, gc_pack_truth_u16: 1024, gc_pack_truth_u32: 1024, gc_pack_truth_u64: 1024,
            ],
            /// float16, bfloat16, float32, float64. Items are bytes of bits.
            pack_signs: [
                gc_pack_signs_f16: 1024, gc_pack_signs_bf16: 1024, gc_pack_signs_f32: 1024, gc_pack_signs_f64: 1024,
            ],
            /// Indexed by the binary logarithm of the element's size. Items are elements.
            unpack: [gc_unpack_u8: 8192, gc_unpack_u16: 4096, gc_unpack_u32: 2048, gc_unpack_u64: 1024],
        }
        internal {
            /// Any layout. Items are thread blocks.
            pack_strided: (gc_pack_strided),
            unpack_strided: (gc_unpack_strided),
        }
    }

    /// The kernels of kernels/signs.cu.
    SIGNS: Signs, SIGNS_MODULE in "signs" {
        internal {
            /// Indexed by the binary logarithm of the element's size. Items are elements.
            unpack: [
                gc_unpack_signs_u8: 8192, gc_unpack_signs_u16: 4096, gc_unpack_signs_u32: 2048,
                gc_unpack_signs_u64: 1024,
            ],
            /// Any strides. Items are bytes of bits.
            unpack_strided: (gc_unpack_signs_strided: 256),
            /// For up to 30 voters, and for any number. Items are bytes of the result, plus one thread block.
            vote_few: (gc_vote_few: 4096),
            vote_many: (gc_vote_many: 1024),
        }
    }

    /// The kernels of kernels/onebit.cu: for ONEBIT and SIGN, and for state, errors, addresses and sums within a node,
    /// which every codec uses. Items are thread blocks, except for `state_out`.
    ONEBIT: Onebit, ONEBIT_MODULE in "onebit" {
        internal {
            /// Values: float32, 16 bits of either dtype. For each, errors: float32, bfloat16, none.
            encode: [
                gc_onebit_encode_f32_f32, gc_onebit_encode_f32_bf16, gc_onebit_encode_f32,
                gc_onebit_encode_16_f32, gc_onebit_encode_16_bf16, gc_onebit_encode_16,
            ],
            /// Results: elements of 4 bytes, elements of 2 bytes, added to float32.
            decode: [gc_onebit_decode_u32, gc_onebit_decode_u16, gc_onebit_decode_add],
            /// Errors: float32, bfloat16, none.
            reduce: [gc_onebit_reduce_f32, gc_onebit_reduce_bf16, gc_onebit_reduce],
            finish: (gc_onebit_finish),
            commit: (gc_onebit_commit),
            reset: (gc_onebit_reset),
            /// Items are words of 4 bytes.
            state_out: (gc_onebit_state_out: 256),
            check_state: (gc_onebit_check_state),
            state_in: (gc_onebit_state_in),
            errors_in: (gc_onebit_errors_in),
            errors_out: (gc_onebit_errors_out),
            addresses: (gc_onebit_addresses),
            /// Computes the mean without the error that `reduce` adds to it.
            mean: (gc_onebit_mean),
            /// For sums within a node.
            pack_blocks: (gc_nodes_pack),
            sum_blocks: (gc_nodes_sum),
        }
    }

    /// The kernels of kernels/blocks.cu. Items are thread blocks.
    BLOCKS: Blocks, BLOCKS_MODULE in "blocks" {
        internal {
            /// Values: float32, 16 bits of either dtype. For each: without errors, then with errors.
            encode: [gc_blocks_encode_f32, gc_blocks_encode_f32_kept, gc_blocks_encode_16, gc_blocks_encode_16_kept],
            /// Results: elements of 4 bytes, elements of 2 bytes, added to float32.
            decode: [gc_blocks_decode_u32, gc_blocks_decode_u16, gc_blocks_decode_add],
            /// Errors: not kept (also to a shard, which is not encoded), kept.
            reduce: [gc_blocks_reduce, gc_blocks_reduce_kept],
            /// For calls with `Reduce::can_reduce_by_lanes`. The grid has at most as many thread blocks as run at once.
            reduce_by_lanes: (gc_blocks_reduce_by_lanes),
        }
    }

    /// The kernels of kernels/blocks_peers.cu, with `encode` and `reduce` in the same order. Items are thread blocks.
    BLOCKS_PEERS: BlocksPeers, BLOCKS_PEERS_MODULE in "blocks_peers" {
        internal {
            encode: [
                gc_blocks_encode_f32_peers, gc_blocks_encode_f32_kept_peers, gc_blocks_encode_16_peers,
                gc_blocks_encode_16_kept_peers,
            ],
            reduce: [gc_blocks_reduce_peers, gc_blocks_reduce_kept_peers],
            /// Kernels of the one-shot all-reduce: of float32, and of 16 bits of either dtype.
            one_shot: [gc_blocks_one_shot_f32, gc_blocks_one_shot_16],
            /// Two-shot all-reduce with errors.
            two_shot: (gc_blocks_two_shot),
        }
    }

    /// The kernels of kernels/copy.cu. Items are thread blocks; for transposed matrices, times the side of a tile.
    COPY: Copy, COPY_MODULE in "copy" {
        internal {
            /// Copies bytes unchanged.
            rows: (gc_copy_rows),
            /// Words of 4 and of 8 bytes that are not aligned alike on both sides within vectors.
            words: [gc_copy_rows_u32, gc_copy_rows_u64],
            /// Common casts, in the order of `usual_cast`.
            cast_rows: [
                gc_cast_rows_f32_bf16, gc_cast_rows_f32_f16, gc_cast_rows_bf16_f32, gc_cast_rows_f16_f32,
                gc_cast_rows_f64_f32, gc_cast_rows_f32_f64,
            ],
            /// Any cast between elements of up to 4 bytes.
            cast_rows_any: (gc_cast_rows),
            /// Indexed by the binary logarithm of the element's size.
            transposed: [
                gc_copy_transposed_u8: 128, gc_copy_transposed_u16: 64, gc_copy_transposed_u32: 64,
                gc_copy_transposed_u64: 32, gc_copy_transposed_u128: 32,
            ],
            /// The first of the common casts.
            cast_transposed: [
                gc_cast_transposed_f32_bf16: 64, gc_cast_transposed_f32_f16: 64, gc_cast_transposed_bf16_f32: 64,
                gc_cast_transposed_f16_f32: 64,
            ],
            cast_transposed_any: (gc_cast_transposed: 32),
            /// Indexed by the binary logarithm of the element's size.
            gathered: [gc_copy_gathered_u8, gc_copy_gathered_u16, gc_copy_gathered_u32, gc_copy_gathered_u64],
            general: (gc_copy_general),
            cast_general: (gc_cast_general),
        }
    }

    /// The kernels of kernels/peers.cu. Items are thread blocks.
    PEERS: Peers, PEERS_MODULE in "peers" {
        internal {
            push: (gc_peers_push),
            barrier: (gc_peers_barrier: 1 x 64),
        }
    }
}

/// Returns a kernel's launch shape on devices of a compute capability (90: 9.0). None: docs/ABI.md does not list the
/// kernel.
pub fn launch_shape(kernel: &CStr, compute_capability: i32) -> Result<Option<LaunchShape>> {
    supported(compute_capability)?;
    let mut promised = MODULES.iter().flat_map(|module| module.promised.iter().copied().flatten());
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
    /// Returns a kernel for launches on this device, and loads its module into the context on first use, which waits
    /// for all work of the context. A created stream's context need not be current and is not made current: the launch
    /// itself loads the kernel there, in a capture mode that disturbs no capture.
    pub fn ready(&mut self, kernel: &Kernel) -> Result<CUfunction> {
        let context = self.context()?.id;
        if kernel.contexts.recall(context).is_none() {
            if self.stream.created().is_some() {
                self.relax()?;
                self.load(kernel.module)?;
            } else {
                self.put_into_context(kernel.module)?;
            }
        }
        // cuLaunchKernel takes both CUkernel and CUfunction.
        Ok(kernel.handle()? as CUfunction)
    }

    /// Loads everything that calls in this context need, including every kernel.
    pub fn prepare(&mut self) -> Result<()> {
        MODULES.iter().try_for_each(|module| self.put_into_context(module))
    }

    /// Loads a module with all of its kernels.
    #[cold]
    pub fn put_into_context(&mut self, module: &'static Module) -> Result<()> {
        let context = self.current()?.id;
        self.load(module)?;
        for kernel in module.kernels() {
            // SAFETY: the kernel's library is never unloaded, and a context is current.
            unsafe { self.device.driver.load_function(kernel.handle()? as CUkernel, kernel.name)? };
            kernel.note_loaded_in(context);
        }
        Ok(())
    }

    /// Sets the handle of every kernel of a module, unless they are set.
    fn load(&self, module: &'static Module) -> Result<()> {
        supported(self.device.properties().compute_capability)?;
        static LOADING: Mutex<()> = Mutex::new(());
        let _loading = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
        if module.kernels().all(|kernel| kernel.handle.get().is_some()) {
            return Ok(());
        }
        let driver = self.device.driver;
        let mut handles = fallible::list(module.kernels().count(), format_args!("kernels of {:?}", module.name))?;
        // SAFETY: the bytes are a fatbin.
        let library = unsafe { driver.load_library(module.fatbin, self.device)? };
        for kernel in module.kernels() {
            // SAFETY: the library was loaded above. If the search fails, no kernel has a handle of it yet.
            let handle = unsafe {
                driver.find_kernel(library, kernel.name).inspect_err(|_| {
                    (driver.functions.cuLibraryUnload)(library);
                })?
            };
            handles.push(handle as usize);
        }
        for (kernel, handle) in module.kernels().zip(handles) {
            kernel.handle.get_or_init(|| handle);
        }
        Ok(())
    }
}

impl Driver {
    /// Loads a library of kernels. `on`: where, for the message.
    ///
    /// # Safety
    /// The bytes are a fatbin, a cubin, or PTX that ends with a NUL.
    pub unsafe fn load_library(&self, code: &[u8], on: impl Display) -> Result<CUlibrary> {
        let mut library = ptr::null_mut();
        // SAFETY: the driver reads to the end of the code, and copies it; there are no options.
        let status = unsafe {
            (self.functions.cuLibraryLoadData)(
                &mut library,
                code.as_ptr().cast(),
                ptr::null_mut(),
                ptr::null_mut(),
                0,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
            )
        };
        self.check(status, format_args!("cuLibraryLoadData on {on}"))?;
        Ok(library)
    }

    /// Returns a kernel of a library.
    ///
    /// # Safety
    /// The library is loaded.
    pub unsafe fn find_kernel(&self, library: CUlibrary, name: &CStr) -> Result<CUkernel> {
        let mut handle = ptr::null_mut();
        // SAFETY: the caller promises a library, and the name ends with a NUL.
        let status = unsafe { (self.functions.cuLibraryGetKernel)(&mut handle, library, name.as_ptr()) };
        self.check(status, format_args!("cuLibraryGetKernel of {}", name.to_string_lossy()))?;
        Ok(handle)
    }

    /// Loads a kernel into the current context.
    ///
    /// # Safety
    /// The kernel's library is loaded, and a context is current.
    pub unsafe fn load_function(&self, kernel: CUkernel, name: &CStr) -> Result<()> {
        let (mut function, mut registers) = (ptr::null_mut(), 0);
        let name = name.to_string_lossy();
        // SAFETY: the caller promises a kernel and a context. Drivers load lazily: the query of an attribute loads the
        // function.
        unsafe {
            let status = (self.functions.cuKernelGetFunction)(&mut function, kernel);
            self.check(status, format_args!("cuKernelGetFunction of {name}"))?;
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
            let status = (self.functions.cuFuncGetAttribute)(&mut registers, attribute, function);
            self.check(status, format_args!("cuFuncGetAttribute of {name}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::*;

    /// Returns a kernel source and all headers of this project that it includes, each once, without comments.
    fn source(file: &str, seen: &mut BTreeSet<String>) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels").join(file);
        if !seen.insert(file.to_owned()) || !path.exists() {
            return String::new();
        }
        let text = fs::read_to_string(path).unwrap();
        let mut all = String::new();
        for line in text.lines().map(|line| line.split("//").next().unwrap()) {
            match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
                Some(included) => all += &source(included, seen),
                None => all = all + line + "\n",
            }
        }
        all
    }

    /// Returns the kernels that a source defines: by name behind `__global__`, or as the first argument of a macro.
    fn defined(text: &str) -> BTreeSet<String> {
        let name = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
        let declared = text.split("__global__").skip(1).filter_map(|behind| {
            let head = behind.split('{').next()?;
            let mut named = head.match_indices("gc_").map(|(at, _)| (name(&head[at..]), &head[at..]));
            named.find(|(kernel, rest)| rest[kernel.len()..].starts_with('(')).map(|(kernel, _)| kernel)
        });
        let by_macro = text.lines().filter_map(|line| {
            let (head, arguments) = line.split_once('(')?;
            let is_macro = !head.is_empty() && head.chars().all(|c| c.is_ascii_uppercase() || c == '_');
            let kernel = name(arguments);
            // A macro whose only argument has the prefix declares a struct of layout.cuh.
            (is_macro && kernel.starts_with("gc_") && arguments[kernel.len()..].starts_with(',')).then_some(kernel)
        });
        declared.chain(by_macro).collect()
    }

    #[test]
    fn the_list_names_every_kernel_of_every_source_once() {
        for module in MODULES {
            let file = module.name.to_str().unwrap();
            let listed: Vec<_> = module.kernels().map(|kernel| kernel.name.to_str().unwrap().to_owned()).collect();
            let once: BTreeSet<_> = listed.iter().cloned().collect();
            assert_eq!(listed.len(), once.len(), "{file}: {listed:?}");
            assert_eq!(once, defined(&source(&format!("{file}.cu"), &mut BTreeSet::new())), "{file}.cu");
        }
        let sources = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")).unwrap();
        let sources = sources.filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|it| it == "cu"));
        assert_eq!(sources.count(), MODULES.len());
    }
}
