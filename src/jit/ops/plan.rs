//! Plan of a call: bindings of its tensors to the parameters, checks, and launches.

use arrayvec::ArrayVec;

use crate::{
    copy::cpu,
    cpu::InstructionSet,
    dlpack::{Device, Dtype, Shape, View, check_apart, checks},
    ffi::error::{Result, error},
    jit::{
        definition::Text,
        layout::{Binding, BindingKind, Layout, Specialization},
        loops::{self, Launches, Nest, Operand, Split, Words},
        parameters::{ElementType, MOST},
    },
};

use super::{Call, Kernel, Options, Views};

/// Maximum number of dimensions of a raw parameter's tensor.
const MOST_RAW_DIMENSIONS: usize = 32;

/// Plan of a call whose tensors fit the parameters. It is large, so it is constructed in place.
pub struct Plan {
    pub specialization: Specialization,
    /// Device of the tensors.
    pub device: Device,
    operands: ArrayVec<Operand, MOST>,
    /// Loops over elements; in a reduction, loops over outputs.
    kept: Nest,
    /// Loops over the elements of one output of a reduction.
    reduced: Nest,
    layout: Layout,
}

impl Plan {
    /// Makes an empty plan.
    #[inline(always)] // constructed in place, without a copy
    pub fn new() -> Self {
        Self {
            specialization: Specialization { bindings: ArrayVec::new(), many_loops: false },
            device: Device::Cpu,
            operands: ArrayVec::new(),
            kept: Nest::new(),
            reduced: Nest::new(),
            layout: Layout::default(),
        }
    }
}

impl Kernel {
    /// Returns the parameter's name for messages: `inputs[0] (x)`.
    fn named(&self, index: usize) -> String {
        let name = &self.definition.parameters[index].name;
        let (list, at) = if index < self.definition.inputs {
            ("inputs", index)
        } else {
            ("outputs", index - self.definition.inputs)
        };
        crate::ffi::error::sentence(format_args!("{list}[{at}] ({name})"))
    }

    /// Makes the plan of a call and checks its tensors. Touches no memory of tensors.
    pub fn plan(&self, call: &Call<'_>, plan: &mut Plan) -> Result<()> {
        for (list, given, expected) in [
            ("inputs", call.inputs, self.definition.inputs),
            ("outputs", call.views.len() - call.inputs, self.definition.parameters.len() - self.definition.inputs),
        ] {
            if given != expected {
                return Err(error!(InvalidArgument, "n_{list}: {expected} expected, got {given}"));
            }
        }
        let views = call.views;
        let Plan { specialization, device, operands, kept, reduced, layout } = plan;
        let bindings = &mut specialization.bindings;
        *device = self.bindings(views, call.options.capability != 0, bindings)?;
        self.check_outputs(views, bindings)?;
        operands.extend(Self::tensors(bindings).map(|index| Operand {
            address: views[index].data().addr() as u64,
            size: bindings[index].dtype.size as i64,
            is_input: index < self.definition.inputs,
        }));
        if self.definition.is_reduction {
            self.reduction(views, bindings, &call.options, [kept, reduced])?;
        } else {
            self.elementwise(views, bindings, &call.options, kept)?;
        }
        let count = kept.wanted() + reduced.wanted();
        *layout = Layout::of(&self.definition, specialization)?;
        if count > layout.loops {
            specialization.many_loops = true;
            *layout = Layout::of(&self.definition, specialization)?;
            if count > layout.loops {
                return Err(error!(
                    InvalidArgument,
                    "the tensors' strides take {count} loops; {} are the most for so many parameters", layout.loops
                ));
            }
        }
        Ok(())
    }

    /// Determines the binding of each parameter. Returns the tensors' device.
    fn bindings(&self, views: &Views<'_>, anywhere: bool, bindings: &mut ArrayVec<Binding, MOST>) -> Result<Device> {
        let (mut device, mut first) = (Device::Cpu, None);
        for (index, (view, parameter)) in views.iter().zip(&self.definition.parameters).enumerate() {
            let is_scalar = index < self.definition.inputs
                && !parameter.raw
                && view.device() == Device::Cpu
                && view.shape().is_empty();
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
            let kind = match () {
                () if is_scalar => InstructionSet::check().map(|()| BindingKind::Scalar)?,
                () if parameter.raw => self.raw(index, view)?,
                () => BindingKind::Tensor,
            };
            bindings.push(Binding { dtype: view.dtype(), kind });
        }
        self.check_types(bindings)?;
        Ok(device)
    }

    fn raw(&self, index: usize, view: &View<'_>) -> Result<BindingKind> {
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
        Ok(BindingKind::Raw { ndim: ndim as u8, contiguous: view.is_contiguous() })
    }

    /// Checks that tensors have their parameters' types. Scalars are cast to them. A scalar determines the dtype of a
    /// letter only if no tensor has that letter.
    fn check_types(&self, bindings: &mut ArrayVec<Binding, MOST>) -> Result<()> {
        let resolved: ArrayVec<(Dtype, usize), MOST> = (0..bindings.len())
            .map(|index| match self.definition.parameters[index].of {
                ElementType::Type(dtype) => (dtype, index),
                letter => {
                    let same = || (0..bindings.len()).filter(|&other| self.definition.parameters[other].of == letter);
                    let by = same().find(|&other| bindings[other].kind != BindingKind::Scalar).or(same().next());
                    let by = by.unwrap_or(index);
                    (bindings[by].dtype, by)
                }
            })
            .collect();
        for (index, (binding, &(expected, by))) in bindings.iter_mut().zip(&resolved).enumerate() {
            let got = std::mem::replace(&mut binding.dtype, expected);
            if binding.kind != BindingKind::Scalar && got != expected {
                return Err(if by == index {
                    error!(UnsupportedDtype, "{}: {expected} expected, got {got}", self.named(index))
                } else {
                    error!(
                        UnsupportedDtype,
                        "{}: {} is {expected} by {}, got {got}",
                        self.named(index),
                        self.definition.parameters[index].of,
                        self.named(by)
                    )
                });
            }
        }
        Ok(())
    }

    /// Checks that no output overlaps another tensor, except an elementwise input with exactly the same elements.
    fn check_outputs(&self, views: &Views<'_>, bindings: &[Binding]) -> Result<()> {
        for output in self.definition.inputs..views.len() {
            let view = &views[output];
            view.check_output(&[])?;
            for other in (0..output).filter(|&other| bindings[other].kind != BindingKind::Scalar) {
                let whole = [output, other].iter().any(|&index| bindings[index].kind != BindingKind::Tensor);
                let in_place = other < self.definition.inputs && !self.definition.is_reduction && !whole;
                if !(in_place && is_same(view, &views[other])) {
                    check_apart(&view.name(), &view.extent(), &views[other].name(), &views[other].extent())?;
                }
            }
        }
        Ok(())
    }

    /// Writes the words of raw and scalar parameters.
    fn put_values(views: &Views<'_>, bindings: &[Binding], to: &mut Words) {
        for (view, binding) in views.iter().zip(bindings) {
            match binding.kind {
                BindingKind::Tensor => {}
                BindingKind::Scalar => to.push(cpu::cast(view, binding.dtype)),
                BindingKind::Raw { ndim, .. } => {
                    let room = usize::from(ndim.max(1));
                    let padded = || std::iter::repeat_n(0, room - usize::from(ndim));
                    let (sizes, steps) = (view.dims().map(|dim| dim.0), view.dims().map(|dim| dim.1));
                    let size = view.dtype().size as i64;
                    let words = [view.data().addr() as i64, view.elements()].into_iter();
                    let words = words.chain(sizes.chain(padded()));
                    let words = words.chain(steps.map(|step| step.wrapping_mul(size)).chain(padded()));
                    to.extend(words.map(|word| word as u64));
                }
            }
        }
    }

    /// Returns the indices of the parameters that are tensors.
    fn tensors<'b>(bindings: &'b [Binding]) -> impl Iterator<Item = usize> + Clone + 'b {
        (0..bindings.len()).filter(|&index| bindings[index].kind == BindingKind::Tensor)
    }

    /// Returns the size of an axis, counted from the last, of the shape to which some tensors are broadcast.
    fn broadcast(
        &self, views: &Views<'_>, tensors: impl Iterator<Item = usize> + Clone, from_last: usize,
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

    /// Pushes a loop over one axis of the inputs and one of the outputs, each counted from the last; None: no axis.
    fn push(
        &self, nest: &mut Nest, views: &Views<'_>, bindings: &[Binding], count: i64,
        [of_inputs, of_outputs]: [Option<usize>; 2],
    ) {
        let strides = Self::tensors(bindings).map(|index| {
            let from_last = if index < self.definition.inputs { of_inputs } else { of_outputs };
            let (view, size) = (&views[index], bindings[index].dtype.size as i64);
            let axis = from_last.and_then(|from_last| view.shape().len().checked_sub(from_last + 1));
            let dim = axis.and_then(|axis| view.dims().nth(axis));
            dim.filter(|&(count, _)| count > 1).map_or(0, |(_, stride)| stride.wrapping_mul(size))
        });
        nest.push(count, strides);
    }

    fn elementwise(
        &self, views: &Views<'_>, bindings: &[Binding], options: &Options<'_>, nest: &mut Nest,
    ) -> Result<()> {
        if options.axes.is_some() || options.keepdims || options.workspace.is_some() {
            return Err(error!(InvalidArgument, "options: axes, keepdims and workspace are for reductions"));
        }
        let all = Self::tensors(bindings);
        // Loops are sorted by the first output, which is written; if no output is a tensor, by the first tensor.
        let first = all.clone().position(|index| index >= self.definition.inputs).unwrap_or(0);
        nest.begin(all.clone().count(), (!self.ordered[0]).then_some(first));
        if all.clone().next().is_none() {
            if options.size <= 0 {
                return Err(error!(
                    InvalidArgument,
                    "options: size {}; all parameters are raw or scalars, so the number of elements expected",
                    options.size
                ));
            }
            nest.push(options.size, std::iter::empty());
            return Ok(());
        }
        let inputs = all.clone().filter(|&index| index < self.definition.inputs);
        if options.size != 0 && inputs.clone().next().is_some() {
            return Err(error!(
                InvalidArgument,
                "options: size {}; it is for kernels all of whose inputs are raw or scalars", options.size
            ));
        }
        let of = if inputs.clone().next().is_some() {
            0..self.definition.inputs
        } else {
            self.definition.inputs..bindings.len()
        };
        let shaping = all.clone().filter(|index| of.contains(index));
        let ndim = shaping.clone().map(|index| views[index].shape().len()).max().unwrap_or(0);
        for index in all.filter(|&index| index >= self.definition.inputs) {
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
            self.push(nest, views, bindings, size, [Some(from_last); 2]);
        }
        self.check_elements(elements)?;
        if let Some(elements) = elements.filter(|&elements| options.size != 0 && elements != options.size) {
            return Err(error!(
                ShapeMismatch,
                "options: size {}; the outputs have {elements} elements each", options.size
            ));
        }
        nest.finish();
        Ok(())
    }

    fn check_elements(&self, elements: Option<i64>) -> Result<()> {
        elements
            .map(drop)
            .ok_or_else(|| error!(SizeOverflow, "inputs: more than 2^63 - 1 elements, once they are broadcast"))
    }

    fn reduction(
        &self, views: &Views<'_>, bindings: &[Binding], options: &Options<'_>, [kept, reduced]: [&mut Nest; 2],
    ) -> Result<()> {
        if options.size != 0 {
            return Err(error!(InvalidArgument, "options: size {}; it is not for reductions", options.size));
        }
        let all = Self::tensors(bindings);
        let inputs = all.clone().filter(|&index| index < self.definition.inputs);
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
        for (nest, ordered) in [(&mut *reduced, self.ordered[0]), (&mut *kept, self.ordered[1])] {
            nest.begin(all.clone().count(), (!ordered).then_some(0));
        }
        let (mut elements, mut at) = (Some(1i64), 0);
        for axis in 0..ndim {
            let size = self.broadcast(views, inputs.clone(), ndim - 1 - axis)?;
            elements = if size == 0 { Some(0) } else { elements.and_then(|elements| elements.checked_mul(size)) };
            let (goes, place) = (is_reduced(axis), at);
            at += usize::from(!goes || options.keepdims);
            for index in all.clone().filter(|&index| index >= self.definition.inputs) {
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
            let nest = if goes { &mut *reduced } else { &mut *kept };
            self.push(nest, views, bindings, size, [Some(ndim - 1 - axis), in_outputs]);
        }
        if ndim == 0
            && let Some(index) =
                all.clone().find(|&index| index >= self.definition.inputs && !views[index].shape().is_empty())
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
                "inputs: no element to reduce, and {} has no identity",
                self.definition.name()
            ));
        }
        kept.finish();
        reduced.finish();
        Ok(())
    }

    /// Returns the launches of a run and writes their argument; None if there is no element. Reads scalars.
    pub fn launches(&self, plan: &Plan, call: &Call<'_>, words: &mut Words) -> Result<Option<Launches>> {
        let Plan { specialization, operands, kept, reduced, layout, .. } = plan;
        if kept.count() == 0 {
            return Ok(None);
        }
        let values = |words: &mut Words| Self::put_values(call.views, &specialization.bindings, words);
        if !self.definition.is_reduction {
            return Ok(Some(loops::elementwise(layout, kept, operands, values, words)));
        }
        let split = Split::of(kept, reduced, operands, layout.vector);
        let partials = self.check_workspace(call, self.bytes_of_partials(plan, &split)?)?;
        loops::reduction(layout, &split, [kept, reduced], operands, values, partials, words).map(Some)
    }

    /// Returns the bytes of the workspace that a run needs.
    pub fn workspace_bytes(&self, call: &Call<'_>) -> Result<i64> {
        let mut plan = Plan::new();
        self.plan(call, &mut plan)?;
        // Without an output, the number of elements may have overflowed.
        if !self.definition.is_reduction || plan.kept.count() == 0 {
            return Ok(0);
        }
        let split = Split::of(&plan.kept, &plan.reduced, &plan.operands, plan.layout.vector);
        self.bytes_of_partials(&plan, &split)
    }

    fn bytes_of_partials(&self, plan: &Plan, split: &Split) -> Result<i64> {
        let size = plan.layout.reduced_bytes as u64;
        let bytes = split.partials(plan.kept.count()).checked_mul(size).and_then(|bytes| i64::try_from(bytes).ok());
        bytes.ok_or_else(|| error!(SizeOverflow, "workspace: more than 2^63 - 1 bytes"))
    }

    /// Checks the workspace and returns its address; 0 if the caller gave none and none is needed.
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
        checks::check_dtype(workspace, &[Dtype::U8])?;
        checks::check_contiguous(workspace)?;
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
}

/// Returns the index of an axis, which may be negative to count from the end; None if it is out of range.
fn normalized(axis: i32, ndim: usize) -> Option<usize> {
    let axis = i64::from(axis) + if axis < 0 { ndim as i64 } else { 0 };
    usize::try_from(axis).ok().filter(|&axis| axis < ndim)
}

/// Returns true if two tensors have the same elements in the same places.
fn is_same(one: &View<'_>, other: &View<'_>) -> bool {
    one.data() == other.data()
        && one.dtype() == other.dtype()
        && one.shape() == other.shape()
        && one.dims().zip(other.dims()).all(|(one, other)| one.0 == 1 || one.1 == other.1)
}
