//! Compilation of kernels when a call needs them, and their launches.
#![forbid(unsafe_code)]

mod plan;
mod variants;

use std::{
    ffi::{CString, c_char},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use arrayvec::ArrayVec;

use crate::{
    cuda::{self, Stream},
    dlpack::{Device, View},
    ffi::error::{Error, Result, Status, error},
    jit,
};

use super::{
    cuda::Image,
    definition::{Definition, MOST_OPTIONS},
    entries::{ENTRIES, Entries, Entry},
    layout::{Specialization, THREADS},
    loops::{Launch, Launches, Words},
    parameters::MOST,
    source,
};

use plan::Plan;
use variants::{Variant, Variants};

/// The tensors of a call.
pub type Views<'a> = ArrayVec<View<'a>, MOST>;

/// Options of a call.
#[derive(Default)]
pub struct Options<'a> {
    /// Number of elements, for a kernel without inputs that are tensors; 0: not given.
    pub size: i64,
    /// Axes that are reduced; None: all.
    pub axes: Option<&'a [i32]>,
    pub keepdims: bool,
    pub workspace: Option<View<'a>>,
    /// Compute capability of a GPU that need not be present; 0: that of the tensors' GPU.
    pub capability: i32,
}

pub struct Call<'a> {
    /// Tensors of the call, inputs first.
    pub views: &'a Views<'a>,
    pub inputs: usize,
    pub options: Options<'a>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Run,
    /// Compiles and loads what a run would need.
    Prepare,
}

/// Kernel, and the code compiled for it so far.
pub struct Kernel {
    definition: Definition,
    /// True if loops must keep C order: those over the elements of an output, and those over all outputs.
    ordered: [bool; 2],
    nvrtc: jit::Handle,
    use_disk: bool,
    variants: Variants,
    /// Lock held while code is compiled or loaded, so that this happens once.
    making: Mutex<()>,
    /// Logs of NVRTC, the newest last. A log that a caller has stays as long as the kernel.
    logs: Mutex<Logs>,
}

/// Logs of NVRTC, each text once.
#[derive(Default)]
struct Logs {
    texts: Vec<CString>,
    /// True if a caller has the last log.
    is_given: bool,
}

fn lock<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

fn out_of_memory(definition: &Definition) -> Error {
    error!(OutOfMemory, "{}: cannot allocate memory for a compiled kernel", definition.name())
}

impl Kernel {
    pub fn new(definition: Definition, nvrtc: jit::Handle, use_disk: bool) -> Self {
        let elements = if definition.is_reduction { "_J" } else { "i" };
        let ordered = [elements, "i"].map(|word| definition.has_macros() || definition.mentions(word));
        Self {
            ordered,
            definition,
            nvrtc,
            use_disk,
            variants: Variants::default(),
            making: Mutex::new(()),
            logs: Mutex::default(),
        }
    }

    /// Returns NVRTC's last log, which stays valid as long as the kernel.
    pub fn log(&self) -> *const c_char {
        let mut logs = lock(&self.logs);
        logs.is_given = true;
        logs.texts.last().map_or(c"".as_ptr(), |log| log.as_ptr())
    }

    /// Runs the kernel, or compiles and loads it for a run.
    pub fn call(&self, call: &Call<'_>, stream: Stream, purpose: Purpose) -> Result<()> {
        let (mut plan, mut words) = (Plan::new(), Words::new());
        self.plan(call, &mut plan)?;
        let all = Entries::all(self.definition.is_reduction);
        if call.options.capability != 0 {
            if purpose == Purpose::Run {
                return Err(error!(InvalidArgument, "options: capability is for gc_kernel_prepare(), and 0 here"));
            }
            let _making = lock(&self.making);
            return self.compiled(call.options.capability, &plan.specialization, all).map(drop);
        }
        let Device::Cuda(ordinal) = plan.device else {
            return Err(error!(
                UnsupportedDevice,
                "{}: no tensor of CUDA is among those given",
                self.definition.name()
            ));
        };
        let mut queue = cuda::Queue::of(ordinal, stream)?;
        let launches = match purpose {
            Purpose::Run => match self.launches(&plan, call, &mut words)? {
                Some(launches) => Some(launches),
                None => return Ok(()), // no element
            },
            Purpose::Prepare => None,
        };
        let entries = launches.as_ref().map_or(all, Launches::entries);
        let image = match self.ready(&mut queue, &plan.specialization, entries)? {
            Some(image) => image,
            None if queue.is_capturing()? => {
                return Err(error!(
                    InvalidArgument,
                    "stream: it captures, and {} is yet to be compiled or loaded for these tensors; gc_kernel_prepare() \
                     does that ahead",
                    self.definition.name()
                ));
            }
            None => self.make(&mut queue, &plan.specialization, entries)?,
        };
        let Some(launches) = launches else { return Ok(()) };
        let launches = launches.iter().map(|Launch { entry, blocks }| (entry as usize, blocks));
        queue.run_compiled(image, &mut words, launches, THREADS)
    }

    /// Returns an image with these entries that is loaded in the context, if there is one.
    fn ready(
        &self, queue: &mut cuda::Queue, specialization: &Specialization, entries: Entries,
    ) -> Result<Option<&Image>> {
        let serving = self.variants.serving(queue.compute_capability(), specialization, entries);
        for image in serving.filter_map(|variant| variant.image.get()) {
            if queue.has_image(image)? {
                return Ok(Some(image));
            }
        }
        Ok(None)
    }

    /// Compiles entries, unless that was done, and loads them into the context.
    fn make(&self, queue: &mut cuda::Queue, specialization: &Specialization, entries: Entries) -> Result<&Image> {
        let _making = lock(&self.making);
        let variant = self.compiled(queue.compute_capability(), specialization, entries)?;
        let image = match variant.image.get() {
            Some(image) => image,
            None => {
                let mut names = [None; ENTRIES];
                for &entry in Entry::all(self.definition.is_reduction) {
                    names[entry as usize] = variant.entries.has(entry).then(|| entry.suffix());
                }
                let loaded = Image::load(queue, variant.code()?, self.definition.name(), &names)?;
                variant.image.get_or_init(|| loaded)
            }
        };
        queue.put_image(image)?;
        Ok(image)
    }

    /// Returns a variant with these entries, compiled now if there is none. `making` must be held. A source that does
    /// not compile is not compiled again, unless it reads files, which may have changed.
    fn compiled(&self, capability: i32, specialization: &Specialization, entries: Entries) -> Result<&Variant> {
        if let Some(variant) = self.variants.find(capability, specialization, entries) {
            return variant.code().map(|_| variant);
        }
        let all = Entries::all(self.definition.is_reduction);
        let (code, entries) = match self.code(capability, specialization, entries) {
            // gc_kernel_prepare() compiles all entries, perhaps on another machine whose files were copied to this one.
            Err(why) if why.status == Status::NvrtcUnavailable && entries != all => {
                (self.code(capability, specialization, all).map_err(|_| why)?, all)
            }
            code => (code?, entries),
        };
        let variant = self.keep(capability, specialization.clone(), entries, code)?;
        variant.code().map(|_| variant)
    }

    /// Compiles entries, or finds their code on disk. `capability`: 90 for 9.0.
    fn code(&self, capability: i32, specialization: &Specialization, entries: Entries) -> Result<jit::Compiled> {
        let (major, minor) = match (u32::try_from(capability / 10), u32::try_from(capability % 10)) {
            (Ok(major), Ok(minor)) if major > 0 => (major, minor),
            _ => {
                return Err(error!(
                    InvalidArgument,
                    "options: capability {capability}; that of a device expected, 90 for 9.0"
                ));
            }
        };
        let source = source::generate(&self.definition, specialization, entries)?;
        let mut options: ArrayVec<&str, { MOST_OPTIONS + 1 }> = ArrayVec::new();
        if !self.definition.contracts {
            options.push("--fmad=false");
        }
        options.extend(self.definition.options.iter().map(String::as_str));
        let request = jit::Request {
            name: self.definition.name(),
            source: &source,
            options: &options,
            entry: self.definition.name(),
            capability: (major, minor),
            nvrtc: self.nvrtc,
            reads_files: self.definition.reads_files(),
            use_disk: self.use_disk,
        };
        let mut log = String::new();
        let compiled = jit::compile(&request, &mut log);
        self.keep_log(log)?;
        match compiled?.map_err(|why| self.definition.explain(why)) {
            Err(why) if request.reads_files => Err(error!(Compile, "{why}")),
            code => Ok(code),
        }
    }

    /// Adds a variant.
    fn keep(
        &self, capability: i32, specialization: Specialization, entries: Entries, code: jit::Compiled,
    ) -> Result<&Variant> {
        let (image, next) = (OnceLock::new(), Variants::default());
        let variant = Variant { capability, specialization, entries, code, image, next };
        self.variants.add(variant).ok_or_else(|| out_of_memory(&self.definition))
    }

    fn keep_log(&self, log: String) -> Result<()> {
        let mut bytes = log.into_bytes();
        bytes.retain(|&byte| byte != 0);
        bytes.try_reserve_exact(1).map_err(|_| out_of_memory(&self.definition))?;
        let Ok(log) = CString::new(bytes) else { return Ok(()) }; // there is no NUL left
        let mut logs = lock(&self.logs);
        if !logs.is_given {
            logs.texts.pop(); // no caller has it
        }
        // NVRTC may fail repeatedly with the same log. The rotation moves pointers, not texts.
        if let Some(at) = logs.texts.iter().position(|before| *before == log) {
            logs.texts[at..].rotate_left(1);
            logs.is_given = true;
            return Ok(());
        }
        logs.texts.try_reserve(1).map_err(|_| out_of_memory(&self.definition))?;
        logs.texts.push(log);
        logs.is_given = false;
        Ok(())
    }
}
