//! Kernels that are compiled at run time: what a call's tensors are to the parameters, and what becomes compiled when.

use std::{
    ffi::{CString, c_char},
    iter,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use arrayvec::ArrayVec;

use crate::{
    backend::{Queue, Stream, cpu, cuda},
    compile::{
        self,
        image::{self, Kind},
        loops::{self, Nest, Operand, Share, Whole, Work},
        parameters::{MOST, Of},
        source::{self, Combination, Definition, Layout, OWN_TYPE_BYTES, Place, Slot, Text},
        types,
    },
    error::{Error, Result, Status, error},
    tensor::{Device, Dtype, Outputs, Shape, View, check_apart},
};

use super::tensors;

/// Most dimensions of a tensor of a raw parameter.
const MOST_RAW_DIMENSIONS: usize = 32;

/// What is saved of a kernel: see [`Kernel::save`].
const SAVED: Kind = *b"kern";

/// The tensors of a call.
pub type Views<'a> = ArrayVec<View<'a>, MOST>;

/// What a call says beside its tensors.
#[derive(Default)]
pub struct Options<'a> {
    /// Elements that a kernel of raw parameters alone goes over; 0: not said.
    pub size: i64,
    /// Axes that are reduced; None: all.
    pub axes: Option<&'a [i32]>,
    pub keepdims: bool,
    pub workspace: Option<View<'a>>,
    /// Of a card that need not be here; 0: that of the tensors.
    pub capability: i32,
}

pub struct Call<'a> {
    /// Inputs first.
    pub views: Views<'a>,
    pub inputs: usize,
    pub options: Options<'a>,
    pub stream: Stream,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Run,
    /// Compiles and loads what a run would need.
    Prepare,
}

/// A parameter, without its name.
#[derive(Clone, Copy)]
struct Parameter {
    of: Of,
    raw: bool,
}

/// A kernel, and what it was compiled to so far.
pub struct Kernel {
    definition: Definition,
    parameters: ArrayVec<Parameter, MOST>,
    inputs: usize,
    /// Whether elements are to be gone through in the order of C, those of each output and those of all outputs.
    ordered: [bool; 2],
    nvrtc: compile::Handle,
    use_disk: bool,
    made: Chain,
    /// Held while something is compiled or loaded, so that it is so once.
    making: Mutex<()>,
    /// What NVRTC said, the latest last. Those that a caller was given stay as long as the kernel.
    logs: Mutex<Logs>,
}

/// What NVRTC said, each text once.
#[derive(Default)]
struct Logs {
    texts: Vec<CString>,
    /// Whether a caller was given the last one.
    is_given: bool,
}

/// A combination that was compiled.
struct Made {
    capability: i32,
    combination: Combination,
    /// Machine code, or why there is none.
    code: compile::Compiled,
    image: OnceLock<cuda::Image>,
    /// What was compiled after it.
    next: Chain,
}

impl Made {
    fn code(&self) -> Result<&[u8]> {
        self.code.as_deref().map_err(|why| error!(Compile, "{why}"))
    }
}

/// Combinations that were compiled, one after the other. None moves, and none goes before the kernel does: whoever found
/// one holds no lock while it is launched.
#[derive(Default)]
struct Chain(OnceLock<Vec<Made>>); // of one: unlike a Box, a Vec says when there is no memory for it

impl Chain {
    fn first(&self) -> Option<&Made> {
        self.0.get().and_then(|one| one.first())
    }

    fn iter(&self) -> impl Iterator<Item = &Made> {
        iter::successors(self.first(), |made| made.next.first())
    }

    /// All that have what a run with this combination needs.
    fn serving<'a>(&'a self, capability: i32, combination: &Combination) -> impl Iterator<Item = &'a Made> {
        self.iter().filter(move |made| made.capability == capability && made.combination.serves(combination))
    }

    /// One that has it; or else this very one, which failed: where all kernels together do not compile, some may.
    fn find<'a>(&'a self, capability: i32, combination: &Combination) -> Option<&'a Made> {
        let failed = |made: &&Made| made.combination == *combination;
        let mut good = self.serving(capability, combination).filter(|made| made.code.is_ok());
        good.next().or_else(|| self.serving(capability, combination).find(failed))
    }

    /// None where there is no memory.
    fn add(&self, made: Made) -> Option<&Made> {
        let mut one = Vec::new();
        one.try_reserve_exact(1).ok()?;
        one.push(made);
        let mut end = self;
        while let Err(back) = end.0.set(one) {
            one = back;
            end = &end.first()?.next;
        }
        end.first()
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        // One after the other, not one inside the other: calls have little stack.
        let mut next = self.0.take();
        while let Some(mut one) = next {
            next = one.first_mut().and_then(|made| made.next.0.take());
        }
    }
}

/// What a call is once its tensors fit the parameters.
struct Plan {
    combination: Combination,
    operands: ArrayVec<Operand, MOST>,
    whole: Whole,
    loops: Loops,
}

enum Loops {
    Elementwise(Nest),
    Reduction { kept: Nest, reduced: Nest },
}

fn lock<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

fn out_of_memory(definition: &Definition) -> Error {
    error!(OutOfMemory, "{}: memory for a compiled kernel could not be had", definition.name())
}

impl Kernel {
    pub fn new(definition: Definition, nvrtc: compile::Handle, use_disk: bool) -> Result<Self> {
        definition.check()?;
        let (named, inputs) = definition.parameters()?;
        let parameters = named.iter().map(|parameter| Parameter { of: parameter.of, raw: parameter.raw }).collect();
        drop(named);
        let elements = if definition.is_reduction { "_J" } else { "i" };
        let ordered = [elements, "i"].map(|word| definition.has_macros() || definition.mentions(word));
        Ok(Self {
            parameters,
            inputs,
            ordered,
            definition,
            nvrtc,
            use_disk,
            made: Chain::default(),
            making: Mutex::new(()),
            logs: Mutex::default(),
        })
    }

    /// What NVRTC said last; it stays as long as the kernel.
    pub fn log(&self) -> *const c_char {
        let mut logs = lock(&self.logs);
        logs.is_given = true;
        logs.texts.last().map_or(c"".as_ptr(), |log| log.as_ptr())
    }

    /// Runs it, or makes ready to.
    pub fn call(&self, call: &Call<'_>, purpose: Purpose) -> Result<()> {
        let (mut plan, device) = self.plan(call)?;
        if call.options.capability != 0 {
            if purpose == Purpose::Run {
                return Err(error!(InvalidArgument, "options: capability is for gc_kernel_prepare(), and 0 here"));
            }
            let _making = lock(&self.making);
            return self.compiled(call.options.capability, &plan.combination).map(drop);
        }
        let Device::Cuda(ordinal) = device else {
            return Err(error!(
                UnsupportedDevice,
                "{}: no tensor of CUDA is among those given",
                self.definition.name()
            ));
        };
        let mut queue = cuda::Queue::of(ordinal, call.stream)?;
        let mut work = match purpose {
            Purpose::Run => match self.work(&plan, call)? {
                Some(work) => {
                    let second = work.second.as_ref().map_or(0, |second| 1 << second.kernel);
                    plan.combination.kernels = 1 << work.first.kernel | second;
                    Some(work)
                }
                None => return Ok(()), // no element
            },
            Purpose::Prepare => None,
        };
        let capability = queue.compute_capability();
        let image = match self.ready(&mut queue, capability, &plan.combination)? {
            Some(image) => image,
            None if queue.is_capturing()? => {
                return Err(error!(
                    InvalidArgument,
                    "stream: it captures, and {} is yet to be compiled or loaded for these tensors; gc_kernel_prepare() \
                     does that ahead",
                    self.definition.name()
                ));
            }
            None => self.make(&mut queue, capability, &plan.combination)?,
        };
        match &mut work {
            Some(work) => queue.run_compiled(image, work),
            None => Ok(()),
        }
    }

    /// Bytes of the workspace that a run wants.
    pub fn workspace_bytes(&self, call: &Call<'_>) -> Result<i64> {
        let (plan, _) = self.plan(call)?;
        match self.share(&plan)? {
            Some(share) => self.bytes_of_workspace(&plan, &share),
            None => Ok(0),
        }
    }

    /// An image that has the combination, where one is in the context.
    fn ready(
        &self,
        queue: &mut cuda::Queue,
        capability: i32,
        combination: &Combination,
    ) -> Result<Option<&cuda::Image>> {
        for image in self.made.serving(capability, combination).filter_map(|made| made.image.get()) {
            if queue.has_image(image)? {
                return Ok(Some(image));
            }
        }
        Ok(None)
    }

    /// Compiles a combination, unless that was done, and loads it into the context.
    fn make(&self, queue: &mut cuda::Queue, capability: i32, combination: &Combination) -> Result<&cuda::Image> {
        let _making = lock(&self.making);
        let made = self.compiled(capability, combination)?;
        let image = match made.image.get() {
            Some(image) => image,
            None => {
                let names = source::names(self.definition.is_reduction);
                let kernels = made.combination.kernels;
                let loaded = cuda::Image::load(queue, made.code()?, self.definition.name(), names, kernels)?;
                made.image.get_or_init(|| loaded)
            }
        };
        queue.put_image(image)?;
        Ok(image)
    }

    /// Sees to it that a combination is compiled; `making` is held. A source that does not compile is not compiled again,
    /// unless it reads files, which may be mended.
    fn compiled(&self, capability: i32, combination: &Combination) -> Result<&Made> {
        if let Some(made) = self.made.find(capability, combination) {
            return made.code().map(|_| made);
        }
        let (major, minor) = match (u32::try_from(capability / 10), u32::try_from(capability % 10)) {
            (Ok(major), Ok(minor)) if major > 0 => (major, minor),
            _ => {
                return Err(error!(
                    InvalidArgument,
                    "options: capability {capability}; that of a card expected, 90 for 9.0"
                ));
            }
        };
        let source = source::generate(&self.definition, combination)?;
        let mut options: ArrayVec<&str, { source::MOST_OPTIONS + 1 }> = ArrayVec::new();
        if !self.definition.contracts {
            options.push("--fmad=false");
        }
        options.extend(self.definition.options.iter().map(String::as_str));
        let request = compile::Request {
            name: self.definition.name(),
            source: &source,
            options: &options,
            entry: self.definition.name(),
            capability: (major, minor),
            nvrtc: self.nvrtc,
            use_disk: self.use_disk,
        };
        let mut log = String::new();
        let compiled = compile::compile(&request, &mut log);
        self.keep_log(log)?;
        let code = match compiled? {
            Err(why) if request.reads_files() => return Err(error!(Compile, "{why}")),
            code => code,
        };
        let made = self.keep(&self.made, capability, combination.clone(), code)?;
        made.code().map(|_| made)
    }

    /// Adds to what was compiled. `after`: where the search for its end begins.
    fn keep<'a>(
        &self,
        after: &'a Chain,
        capability: i32,
        combination: Combination,
        code: compile::Compiled,
    ) -> Result<&'a Made> {
        let made = Made { capability, combination, code, image: OnceLock::new(), next: Chain::default() };
        after.add(made).ok_or_else(|| out_of_memory(&self.definition))
    }

    fn keep_log(&self, log: String) -> Result<()> {
        let mut bytes = log.into_bytes();
        bytes.retain(|&byte| byte != 0);
        bytes.try_reserve_exact(1).map_err(|_| out_of_memory(&self.definition))?;
        let Ok(log) = CString::new(bytes) else { return Ok(()) }; // there is no NUL left
        let mut logs = lock(&self.logs);
        if !logs.is_given {
            logs.texts.pop(); // nobody has it
        }
        // As where NVRTC fails again and again. What moves is the pointer, not the text.
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

    // ---- What a call's tensors are to the parameters

    /// The parameter's name, in words for refusals: `inputs[0] (x)`.
    fn named(&self, index: usize) -> String {
        let name =
            self.definition.parameters().ok().and_then(|(all, _)| all.get(index).map(|parameter| parameter.name));
        let (list, at) = if index < self.inputs { ("inputs", index) } else { ("outputs", index - self.inputs) };
        crate::error::sentence(format_args!("{list}[{at}] ({})", name.unwrap_or_default()))
    }

    /// Refuses what does not fit; touches no memory but that of scalars.
    fn plan(&self, call: &Call<'_>) -> Result<(Plan, Device)> {
        for (list, given, expected) in [
            ("inputs", call.inputs, self.inputs),
            ("outputs", call.views.len() - call.inputs, self.parameters.len() - self.inputs),
        ] {
            if given != expected {
                return Err(error!(InvalidArgument, "n_{list}: {expected} expected, got {given}"));
            }
        }
        let views = &call.views;
        let (slots, device) = self.slots(views, call.options.capability != 0)?;
        self.check_outputs(views, &slots)?;
        let (operands, whole) = self.addresses(views, &slots)?;
        let loops = if self.definition.is_reduction {
            self.reduction(views, &slots, &call.options)?
        } else {
            self.elementwise(views, &slots, &call.options)?
        };
        let count = match &loops {
            Loops::Elementwise(nest) => nest.len(),
            Loops::Reduction { kept, reduced } => kept.len() + reduced.len(),
        };
        let kernels = source::all_kernels(self.definition.is_reduction);
        let mut combination = Combination { slots, many_loops: false, kernels };
        let usual = Layout::of(&self.definition, &combination)?.loops;
        if count > usual {
            combination.many_loops = true;
            let most = Layout::of(&self.definition, &combination)?.loops;
            if count > most {
                return Err(error!(
                    InvalidArgument,
                    "the tensors' strides take {count} loops; {most} are the most for so many parameters"
                ));
            }
        }
        Ok((Plan { combination, operands, whole, loops }, device))
    }

    /// How each parameter comes, and on which device.
    fn slots(&self, views: &Views<'_>, anywhere: bool) -> Result<(ArrayVec<Slot, MOST>, Device)> {
        let (mut slots, mut device) = (ArrayVec::new(), Device::Cpu);
        let mut first = None;
        for (index, (view, parameter)) in views.iter().zip(&self.parameters).enumerate() {
            let is_scalar =
                index < self.inputs && !parameter.raw && view.device() == Device::Cpu && view.shape().is_empty();
            if !is_scalar && !anywhere {
                if view.device() == Device::Cpu {
                    return Err(error!(
                        UnsupportedDevice,
                        "{}: on the CPU; kernels take tensors of CUDA, and scalars: inputs of the CPU with no dimension",
                        self.named(index)
                    ));
                }
                if first.is_some() && view.device() != device {
                    return Err(error!(
                        InvalidArgument,
                        "{}: on {}, {} on {device}",
                        self.named(index),
                        view.device(),
                        self.named(first.unwrap_or(0))
                    ));
                }
                (first, device) = (first.or(Some(index)), view.device());
            }
            let place = match () {
                () if is_scalar => Place::Scalar,
                () if parameter.raw => self.raw(index, view)?,
                () => Place::Tensor,
            };
            slots.push(Slot { dtype: view.dtype(), place });
        }
        self.check_types(&mut slots)?;
        Ok((slots, device))
    }

    fn raw(&self, index: usize, view: &View<'_>) -> Result<Place> {
        let ndim = view.shape().len();
        if ndim > MOST_RAW_DIMENSIONS {
            return Err(error!(
                InvalidArgument,
                "{}: raw, of {ndim} dimensions; {MOST_RAW_DIMENSIONS} are the most",
                self.named(index)
            ));
        }
        if !view.data().addr().is_multiple_of(view.dtype().size) {
            return Err(error!(
                InvalidArgument,
                "{}: raw, at address {:#x}, which is no multiple of the {} bytes of an element",
                self.named(index),
                view.data().addr(),
                view.dtype().size
            ));
        }
        Ok(Place::Raw { ndim: ndim as u8, contiguous: view.is_contiguous() })
    }

    /// That tensors are of their parameters' types. Scalars become so, and say what a letter is only where no tensor
    /// does.
    fn check_types(&self, slots: &mut ArrayVec<Slot, MOST>) -> Result<()> {
        let resolved: ArrayVec<(Dtype, usize), MOST> = (0..slots.len())
            .map(|index| match self.parameters[index].of {
                Of::Type(dtype) => (dtype, index),
                letter => {
                    let same = || (0..slots.len()).filter(|&other| self.parameters[other].of == letter);
                    let by = same().find(|&other| slots[other].place != Place::Scalar).or(same().next());
                    let by = by.unwrap_or(index);
                    (slots[by].dtype, by)
                }
            })
            .collect();
        for (index, (slot, &(expected, by))) in slots.iter_mut().zip(&resolved).enumerate() {
            let got = std::mem::replace(&mut slot.dtype, expected);
            if slot.place != Place::Scalar && got != expected {
                return Err(if by == index {
                    error!(UnsupportedDtype, "{}: {expected} expected, got {got}", self.named(index))
                } else {
                    error!(
                        UnsupportedDtype,
                        "{}: {} is {expected} by {}, got {got}",
                        self.named(index),
                        self.parameters[index].of,
                        self.named(by)
                    )
                });
            }
        }
        Ok(())
    }

    /// That no output shares a byte with another tensor, unless it is an input, element for element.
    fn check_outputs(&self, views: &Views<'_>, slots: &[Slot]) -> Result<()> {
        for output in self.inputs..views.len() {
            let view = &views[output];
            view.check_output(&[])?;
            for other in (0..output).filter(|&other| slots[other].place != Place::Scalar) {
                let whole = [output, other].iter().any(|&index| slots[index].place != Place::Tensor);
                let in_place = other < self.inputs && !self.definition.is_reduction && !whole;
                if !(in_place && is_same(view, &views[other])) {
                    check_apart(&view.name(), &view.extent(), &views[other].name(), &views[other].extent())?;
                }
            }
        }
        Ok(())
    }

    /// Where tensors are, and the words of raw and scalar parameters.
    fn addresses(&self, views: &Views<'_>, slots: &[Slot]) -> Result<(ArrayVec<Operand, MOST>, Whole)> {
        let (mut operands, mut whole) = (ArrayVec::new(), Whole::new());
        for (index, (view, slot)) in views.iter().zip(slots).enumerate() {
            match slot.place {
                Place::Tensor => operands.push(Operand {
                    address: view.data().addr() as u64,
                    size: slot.dtype.size as i64,
                    is_input: index < self.inputs,
                }),
                Place::Scalar => {
                    whole.try_reserve(1).map_err(|_| out_of_memory(&self.definition))?;
                    whole.push(cpu::memory::cast(view, slot.dtype));
                }
                Place::Raw { ndim, .. } => {
                    let room = usize::from(ndim.max(1));
                    let padded = || std::iter::repeat_n(0, room - usize::from(ndim));
                    let (sizes, steps) = (view.dims().map(|dim| dim.0), view.dims().map(|dim| dim.1));
                    let size = view.dtype().size as i64;
                    let words = [view.data().addr() as i64, view.elements()].into_iter();
                    let words = words.chain(sizes.chain(padded()));
                    let words = words.chain(steps.map(|step| step.wrapping_mul(size)).chain(padded()));
                    whole.try_reserve(2 + 2 * room).map_err(|_| out_of_memory(&self.definition))?;
                    whole.extend(words.map(|word| word as u64));
                }
            }
        }
        Ok((operands, whole))
    }

    /// Parameters that are tensors, by their indices.
    fn tensors<'b>(slots: &'b [Slot]) -> impl Iterator<Item = usize> + Clone + 'b {
        (0..slots.len()).filter(|&index| slots[index].place == Place::Tensor)
    }

    /// The size at an axis, counted from the last, of the shape that some tensors are broadcast to.
    fn broadcast(
        &self,
        views: &Views<'_>,
        tensors: impl Iterator<Item = usize> + Clone,
        from_last: usize,
    ) -> Result<i64> {
        let mut found: Option<(i64, usize)> = None;
        for index in tensors {
            let shape = views[index].shape();
            let Some(&size) = shape.len().checked_sub(from_last + 1).map(|axis| &shape[axis]) else { continue };
            match found {
                Some((other, _)) if other == size || size == 1 => {}
                Some((other, by)) if other != 1 => {
                    return Err(error!(
                        ShapeMismatch,
                        "{}: shape {} cannot be broadcast with that of {}, {}",
                        self.named(index),
                        Shape::of(shape),
                        self.named(by),
                        Shape::of(views[by].shape())
                    ));
                }
                _ => found = Some((size, index)),
            }
        }
        Ok(found.map_or(1, |(size, _)| size))
    }

    /// Pushes a loop over an axis of the broadcast shape, counted from its last, or of the outputs.
    fn push(
        &self,
        nest: &mut Nest,
        views: &Views<'_>,
        slots: &[Slot],
        count: i64,
        [of_inputs, of_outputs]: [Option<usize>; 2],
    ) -> Result<()> {
        let strides = Self::tensors(slots).map(|index| {
            let from_last = if index < self.inputs { of_inputs } else { of_outputs };
            let (view, size) = (&views[index], slots[index].dtype.size as i64);
            let axis = from_last.and_then(|from_last| view.shape().len().checked_sub(from_last + 1));
            let dim = axis.and_then(|axis| view.dims().nth(axis));
            dim.filter(|&(count, _)| count > 1).map_or(0, |(_, stride)| stride.wrapping_mul(size))
        });
        nest.push(count, strides)
    }

    fn elementwise(&self, views: &Views<'_>, slots: &[Slot], options: &Options<'_>) -> Result<Loops> {
        if options.axes.is_some() || options.keepdims || options.workspace.is_some() {
            return Err(error!(InvalidArgument, "options: axes, keepdims and workspace are for reductions"));
        }
        let all = Self::tensors(slots);
        let mut nest = Nest::new(all.clone().count());
        if all.clone().next().is_none() {
            if options.size <= 0 {
                return Err(error!(
                    InvalidArgument,
                    "options: size {}; all parameters are raw or scalars, so the number of elements expected",
                    options.size
                ));
            }
            nest.push(options.size, std::iter::empty())?;
            return Ok(Loops::Elementwise(nest));
        }
        if options.size != 0 {
            return Err(error!(
                InvalidArgument,
                "options: size {}; it is for kernels all of whose parameters are raw or scalars", options.size
            ));
        }
        let inputs = all.clone().filter(|&index| index < self.inputs);
        let of = if inputs.clone().next().is_some() { 0..self.inputs } else { self.inputs..slots.len() };
        let shaping = all.clone().filter(|index| of.contains(index));
        let ndim = shaping.clone().map(|index| views[index].shape().len()).max().unwrap_or(0);
        for index in all.filter(|&index| index >= self.inputs) {
            let shape = views[index].shape();
            let mut fits = shape.len() == ndim;
            for from_last in 0..ndim {
                let size = self.broadcast(views, shaping.clone(), from_last)?;
                fits &= shape.len() > from_last && shape[shape.len() - 1 - from_last] == size;
            }
            if !fits {
                return Err(error!(
                    ShapeMismatch,
                    "{}: shape {} is not the one that the inputs are broadcast to",
                    self.named(index),
                    Shape::of(shape)
                ));
            }
        }
        let mut elements = Some(1i64);
        for from_last in (0..ndim).rev() {
            let size = self.broadcast(views, shaping.clone(), from_last)?;
            elements = if size == 0 { Some(0) } else { elements.and_then(|elements| elements.checked_mul(size)) };
            self.push(&mut nest, views, slots, size, [Some(from_last); 2])?;
        }
        self.check_elements(elements)?;
        if !self.ordered[0] {
            // By the first output, which is written, or by what there is.
            let first = Self::tensors(slots).position(|index| index >= self.inputs);
            nest.sort_by_step_of(first.unwrap_or(0));
        }
        nest.merge();
        Ok(Loops::Elementwise(nest))
    }

    fn check_elements(&self, elements: Option<i64>) -> Result<()> {
        elements
            .map(drop)
            .ok_or_else(|| error!(SizeOverflow, "inputs: more than 2^63 - 1 elements, once they are broadcast"))
    }

    fn reduction(&self, views: &Views<'_>, slots: &[Slot], options: &Options<'_>) -> Result<Loops> {
        if options.size != 0 {
            return Err(error!(InvalidArgument, "options: size {}; it is not for reductions", options.size));
        }
        let all = Self::tensors(slots);
        let inputs = all.clone().filter(|&index| index < self.inputs);
        let ndim = inputs.clone().map(|index| views[index].shape().len()).max().unwrap_or(0);
        let is_reduced = |axis: usize| match options.axes {
            None => true,
            Some(axes) => axes.iter().any(|&given| normalized(given, ndim) == Some(axis)),
        };
        for (index, &axis) in options.axes.unwrap_or_default().iter().enumerate() {
            let Some(known) = normalized(axis, ndim) else {
                return Err(error!(
                    InvalidArgument,
                    "options: axes[{index}] is {axis}, of {ndim} dimensions of the inputs"
                ));
            };
            let earlier = options.axes.unwrap_or_default()[..index].iter();
            if let Some(other) = earlier.map(|&other| normalized(other, ndim)).position(|other| other == Some(known)) {
                return Err(error!(
                    InvalidArgument,
                    "options: axes[{index}] is {axis}, the same axis as axes[{other}]"
                ));
            }
        }
        let n_reduced = (0..ndim).filter(|&axis| is_reduced(axis)).count();
        let out_ndim = if options.keepdims { ndim } else { ndim - n_reduced };
        let mut kept = Nest::new(all.clone().count());
        let mut reduced = Nest::new(all.clone().count());
        let (mut elements, mut at) = (Some(1i64), 0);
        for axis in 0..ndim {
            let size = self.broadcast(views, inputs.clone(), ndim - 1 - axis)?;
            elements = if size == 0 { Some(0) } else { elements.and_then(|elements| elements.checked_mul(size)) };
            let (goes, place) = (is_reduced(axis), at);
            at += usize::from(!goes || options.keepdims);
            for index in all.clone().filter(|&index| index >= self.inputs) {
                let expected = if goes { 1 } else { size };
                let shape = views[index].shape();
                let fits =
                    shape.len() == out_ndim && (goes && !options.keepdims || shape.get(place) == Some(&expected));
                if !fits {
                    return Err(error!(
                        ShapeMismatch,
                        "{}: shape {}; {out_ndim} dimensions expected, those of the inputs that are not reduced{}",
                        self.named(index),
                        Shape::of(shape),
                        if options.keepdims { ", and 1 for each that is" } else { "" }
                    ));
                }
            }
            let in_outputs = (!goes).then(|| out_ndim - 1 - place);
            let nest = if goes { &mut reduced } else { &mut kept };
            self.push(nest, views, slots, size, [Some(ndim - 1 - axis), in_outputs])?;
        }
        if ndim == 0
            && let Some(index) = all.clone().find(|&index| index >= self.inputs && !views[index].shape().is_empty())
        {
            return Err(error!(
                ShapeMismatch,
                "{}: shape {}; no dimension expected",
                self.named(index),
                Shape::of(views[index].shape())
            ));
        }
        self.check_elements(elements)?;
        if reduced.count() == 0 && kept.count() > 0 && !self.definition.has(Text::Identity) {
            return Err(error!(
                InvalidArgument,
                "inputs: no element is there to reduce, and {} has no identity",
                self.definition.name()
            ));
        }
        for (nest, ordered) in [(&mut reduced, self.ordered[0]), (&mut kept, self.ordered[1])] {
            if !ordered {
                nest.sort_by_step_of(0);
            }
            nest.merge();
        }
        Ok(Loops::Reduction { kept, reduced })
    }

    // ---- What a run does

    /// The work of a run; None where there is no element.
    fn work(&self, plan: &Plan, call: &Call<'_>) -> Result<Option<Work>> {
        let layout = Layout::of(&self.definition, &plan.combination)?;
        let (kept, reduced) = match &plan.loops {
            Loops::Elementwise(nest) if nest.count() == 0 => return Ok(None),
            Loops::Elementwise(nest) => {
                return loops::elementwise(&layout, nest, &plan.operands, &plan.whole).map(Some);
            }
            Loops::Reduction { kept, .. } if kept.count() == 0 => return Ok(None),
            Loops::Reduction { kept, reduced } => (kept, reduced),
        };
        let share = Share::of(kept, reduced, &plan.operands, layout.vector);
        let bytes = self.bytes_of_workspace(plan, &share)?;
        let partials = self.check_workspace(call, bytes)?;
        loops::reduction(&layout, &share, [kept, reduced], &plan.operands, &plan.whole, partials).map(Some)
    }

    fn share(&self, plan: &Plan) -> Result<Option<Share>> {
        let layout = Layout::of(&self.definition, &plan.combination)?;
        Ok(match &plan.loops {
            Loops::Elementwise(_) => None,
            Loops::Reduction { kept, .. } if kept.count() == 0 => None, // and the others may be too many to count
            Loops::Reduction { kept, reduced } => Some(Share::of(kept, reduced, &plan.operands, layout.vector)),
        })
    }

    fn bytes_of_workspace(&self, plan: &Plan, share: &Share) -> Result<i64> {
        let Loops::Reduction { kept, .. } = &plan.loops else { return Ok(0) };
        let dtype = source::reduce_dtype(&self.definition, &plan.combination)?;
        let size = dtype.map_or(OWN_TYPE_BYTES, |dtype| dtype.size) as u64;
        let bytes = share.partials(kept.count()).checked_mul(size).and_then(|bytes| i64::try_from(bytes).ok());
        bytes.ok_or_else(|| error!(SizeOverflow, "workspace: more than 2^63 - 1 bytes"))
    }

    /// The address of the workspace, if one is needed.
    fn check_workspace(&self, call: &Call<'_>, bytes: i64) -> Result<u64> {
        let Some(workspace) = &call.options.workspace else {
            if bytes == 0 {
                return Ok(0);
            }
            return Err(error!(
                InvalidArgument,
                "options: workspace is NULL; {bytes} bytes expected, as gc_kernel_workspace_bytes() says"
            ));
        };
        super::codec::check_dtype(workspace, &[Dtype::U8])?;
        super::codec::check_contiguous(workspace)?;
        if workspace.elements() < bytes {
            return Err(error!(
                ShapeMismatch,
                "{}: {bytes} bytes at least expected, got {}",
                workspace.name(),
                workspace.elements()
            ));
        }
        let others = || call.views.iter().filter(|view| view.device() != Device::Cpu);
        if let Some(other) = others().find(|other| other.device() != workspace.device()) {
            return Err(error!(
                InvalidArgument,
                "{}: on {}, {} on {}",
                workspace.name(),
                workspace.device(),
                other.name(),
                other.device()
            ));
        }
        if bytes > 0 && workspace.data().addr() % 16 != 0 {
            return Err(error!(
                InvalidArgument,
                "{}: address {:#x} is not aligned to 16",
                workspace.name(),
                workspace.data().addr()
            ));
        }
        for other in others() {
            check_apart(&workspace.name(), &workspace.extent(), &other.name(), &other.extent())?;
        }
        Ok(workspace.data().addr() as u64)
    }

    // ---- Outside of the process

    /// The definition, and all that was compiled, as bytes.
    pub fn save(&self) -> Result<Outputs> {
        let mut saved = image::Writer::new(SAVED)?;
        let definition = &self.definition;
        saved.add(&[u8::from(definition.is_reduction), u8::from(definition.contracts), u8::from(self.use_disk)])?;
        for text in &definition.texts {
            saved.add(text.as_deref().unwrap_or_default().as_bytes())?;
        }
        saved.add(&(definition.options.len() as u64).to_le_bytes())?;
        for option in &definition.options {
            saved.add(option.as_bytes())?;
        }
        let compiled = || self.made.iter().filter_map(|made| made.code.as_ref().ok().map(|code| (made, code)));
        // Others may compile more meanwhile.
        let count = compiled().count();
        saved.add(&(count as u64).to_le_bytes())?;
        for (made, code) in compiled().take(count) {
            let mut key: ArrayVec<u8, { 6 + 3 * MOST }> = ArrayVec::new();
            key.extend(made.capability.to_le_bytes());
            key.extend((u16::from(made.combination.many_loops) | made.combination.kernels << 1).to_le_bytes());
            for slot in &made.combination.slots {
                let (place, ndim) = match slot.place {
                    Place::Tensor => (0, 0),
                    Place::Scalar => (1, 0),
                    Place::Raw { ndim, contiguous } => (2 + u8::from(contiguous), ndim),
                };
                key.extend([types::number(slot.dtype), place, ndim]);
            }
            saved.add(&key)?;
            saved.add(code)?;
        }
        let bytes = saved.finish()?;
        let size = bytes.len() as i64;
        let tensor = tensors::results(&mut Queue::Cpu, Device::Cpu, Dtype::U8, Shape::of(&[size]), 1)?;
        cpu::memory::write(&tensor.view(), &bytes);
        Ok(tensor.finished())
    }

    /// The kernel that was saved.
    pub fn load(bytes: &[u8]) -> Result<Self> {
        let mut saved = image::Reader::new("data", bytes, SAVED)?;
        let &[is_reduction, contracts, use_disk] = saved.take()? else { return Err(not_a_kernel()) };
        let mut definition = Definition {
            is_reduction: is_reduction != 0,
            texts: Default::default(),
            options: Vec::new(),
            contracts: contracts != 0,
        };
        for place in &mut definition.texts {
            *place = Some(text(saved.take()?)?);
        }
        for _ in 0..number(saved.take()?)? {
            definition.options.try_reserve(1).map_err(|_| out_of_memory(&definition))?;
            let option = text(saved.take()?)?;
            definition.options.push(option);
        }
        let kernel =
            Self::new(definition, compile::Handle::NONE, use_disk != 0).map_err(|refusal| match refusal.status {
                Status::OutOfMemory => refusal,
                _ => error!(Corrupt, "data: {}", refusal.message),
            })?;
        let mut end = &kernel.made;
        for _ in 0..number(saved.take()?)? {
            let (key, code) = (saved.take()?, saved.take()?);
            let (capability, combination) = kernel.combination_of(key)?;
            let mut copy = Vec::new();
            copy.try_reserve_exact(code.len()).map_err(|_| out_of_memory(&kernel.definition))?;
            copy.extend_from_slice(code);
            end = &kernel.keep(end, capability, combination, Ok(copy))?.next;
        }
        saved.done()?;
        Ok(kernel)
    }

    fn combination_of(&self, key: &[u8]) -> Result<(i32, Combination)> {
        let (capability, rest) = key.split_first_chunk().ok_or_else(not_a_kernel)?;
        let (what, slots) = rest.split_first_chunk().ok_or_else(not_a_kernel)?;
        let what = u16::from_le_bytes(*what);
        let (many_loops, kernels) = (what & 1 != 0, what >> 1);
        let mut combination = Combination { slots: ArrayVec::new(), many_loops, kernels };
        let known = source::all_kernels(self.definition.is_reduction);
        if slots.len() != 3 * self.parameters.len() || kernels == 0 || kernels & !known != 0 {
            return Err(not_a_kernel());
        }
        for slot in slots.chunks_exact(3) {
            let place = match (slot[1], slot[2]) {
                (0, _) => Place::Tensor,
                (1, _) => Place::Scalar,
                (contiguous, ndim) => Place::Raw { ndim, contiguous: contiguous == 3 },
            };
            let dtype = types::of_number(slot[0]).ok_or_else(not_a_kernel)?;
            combination.slots.push(Slot { dtype, place });
        }
        Ok((i32::from_le_bytes(*capability), combination))
    }
}

/// An axis from the first, of one that may be counted from the last.
fn normalized(axis: i32, ndim: usize) -> Option<usize> {
    let axis = i64::from(axis) + if axis < 0 { ndim as i64 } else { 0 };
    usize::try_from(axis).ok().filter(|&axis| axis < ndim)
}

/// Whether two tensors are one, element for element.
fn is_same(one: &View<'_>, other: &View<'_>) -> bool {
    let steps = |view: &View<'_>| view.dims().filter(|&(size, _)| size != 1).collect::<ArrayVec<_, 64>>();
    one.data() == other.data()
        && one.dtype() == other.dtype()
        && one.shape() == other.shape()
        && one.dims().filter(|dim| dim.0 != 1).count() <= 64
        && steps(one) == steps(other)
}

fn not_a_kernel() -> Error {
    error!(Corrupt, "data: its parts are not those of a kernel")
}

fn number(part: &[u8]) -> Result<u64> {
    part.first_chunk()
        .filter(|bytes| bytes.len() == part.len())
        .map(|bytes| u64::from_le_bytes(*bytes))
        .ok_or_else(not_a_kernel)
}

fn text(part: &[u8]) -> Result<String> {
    owned(std::str::from_utf8(part).map_err(|_| not_a_kernel())?)
}

/// A copy of a text.
pub fn owned(text: &str) -> Result<String> {
    let mut copy = String::new();
    copy.try_reserve_exact(text.len())
        .map_err(|_| error!(OutOfMemory, "{} bytes of text could not be had", text.len()))?;
    copy.push_str(text);
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_fail_together_are_compiled_by_themselves() {
        let combination = |kernels| Combination { slots: ArrayVec::new(), many_loops: false, kernels };
        let made = |kernels, code| Made {
            capability: 90,
            combination: combination(kernels),
            code,
            image: OnceLock::new(),
            next: Chain::default(),
        };
        let chain = Chain::default();
        chain.add(made(0b111, Err(String::from("too much")))).unwrap();
        assert!(chain.find(90, &combination(0b001)).is_none());
        assert!(chain.find(90, &combination(0b111)).unwrap().code().is_err());
        chain.add(made(0b001, Ok(vec![1]))).unwrap();
        assert_eq!(chain.find(90, &combination(0b001)).unwrap().code().unwrap(), [1]);
        assert!(chain.find(90, &combination(0b010)).is_none() && chain.find(80, &combination(0b001)).is_none());
    }
}
