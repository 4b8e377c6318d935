//! The source of a kernel: what the user wrote, inside loops over the elements of tensors.
//!
//! Each combination of types is a source of its own, with two kernels or more for layouts. Their argument is one struct
//! of 64-bit words, which [`super::loops`] fills in as [`Layout`] says.

use std::fmt::{self, Write};

use arrayvec::ArrayVec;

use crate::{
    error::{Error, Result, error},
    tensor::Dtype,
};

use super::{
    parameters::{self, MOST, Of, Parameters},
    types,
};

/// What every source begins with.
const DEVICE: &str = include_str!("../../include/gradcodec/device.cuh");
const BEGINNING: &str = include_str!("../../kernels/compiled.cuh");

/// Threads of a block, as kernels/compiled.cuh has it.
pub const THREADS: u32 = 256;

/// Bytes that one access moves at full speed.
const VECTOR: usize = 16;

/// Vectors that a thread has in flight, all inputs together.
const IN_FLIGHT: usize = 4;

/// Bytes of a kernel's argument that every driver takes.
const MOST_BYTES: usize = 4096;

/// Loops that most layouts do with.
const USUAL_LOOPS: usize = 8;

/// As many as there can be: see `plan::loops`.
const MOST_LOOPS: usize = 62;

/// Bytes of a value that is reduced in, where its type is one of the user's.
pub const OWN_TYPE_BYTES: usize = 32;

/// What the memory is aligned to that such values are in: the workspace, and that of a block.
const OWN_TYPE_ALIGNMENT: usize = 16;

/// The texts that a kernel is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Text {
    Name,
    Inputs,
    Outputs,
    Preamble,
    Operation,
    LoopPrep,
    AfterLoop,
    Map,
    Reduce,
    PostMap,
    Identity,
    ReduceType,
}

pub const TEXTS: usize = Text::ReduceType as usize + 1;

/// What the user wrote.
pub struct Definition {
    pub is_reduction: bool,
    /// By [`Text`]; those that were not given are None.
    pub texts: [Option<String>; TEXTS],
    /// Of NVRTC.
    pub options: Vec<String>,
    pub contracts: bool,
}

impl Definition {
    /// A text, or nothing.
    pub fn text(&self, which: Text) -> &str {
        self.texts[which as usize].as_deref().unwrap_or_default()
    }

    pub fn has(&self, which: Text) -> bool {
        !self.text(which).trim().is_empty()
    }

    /// Its name, as kernels have it.
    pub fn name(&self) -> &str {
        if self.has(Text::Name) { self.text(Text::Name) } else { "kernel" }
    }

    /// Its parameters, inputs first, and how many inputs there are.
    pub fn parameters(&self) -> Result<(Parameters<'_>, usize)> {
        let mut all = Parameters::new();
        parameters::parse("inputs", self.text(Text::Inputs), &mut all)?;
        let inputs = all.len();
        parameters::parse("outputs", self.text(Text::Outputs), &mut all)?;
        Ok((all, inputs))
    }

    /// Whether the user's texts have this word.
    pub fn mentions(&self, word: &str) -> bool {
        use Text::{AfterLoop, LoopPrep, Map, Operation, PostMap, Preamble};
        let texts = [Preamble, Operation, LoopPrep, AfterLoop, Map, PostMap];
        texts.iter().any(|&text| parameters::mentions(self.text(text), word))
    }

    /// Whether macros may stand for words that no text has: of its own, of the options, or of files.
    pub fn has_macros(&self) -> bool {
        let defines = |option: &String| {
            ["-D", "--define-macro", "-include", "--pre-include"].iter().any(|prefix| option.starts_with(prefix))
        };
        self.texts.iter().flatten().any(|text| text.contains('#')) || self.options.iter().any(defines)
    }

    /// Refuses what can be refused before there are tensors.
    pub fn check(&self) -> Result<()> {
        parameters::check_name("name", self.name())?;
        let (all, inputs) = self.parameters()?;
        if all.len() == inputs {
            return Err(error!(InvalidArgument, "outputs: one parameter at least expected, as in \"float32 y\""));
        }
        let needed = if self.is_reduction {
            &[(Text::Map, "map"), (Text::Reduce, "reduce"), (Text::PostMap, "post_map")][..]
        } else {
            &[(Text::Operation, "operation")]
        };
        for &(text, name) in needed {
            if !self.has(text) {
                return Err(error!(InvalidArgument, "{name}: a text expected, got none"));
            }
        }
        if self.is_reduction {
            if let Some(raw) = all[inputs..].iter().find(|parameter| parameter.raw) {
                return Err(error!(InvalidArgument, "outputs: {:?} is raw; a reduction's outputs cannot be", raw.name));
            }
            if all[..inputs].iter().all(|parameter| parameter.raw) {
                return Err(error!(InvalidArgument, "inputs: one parameter at least that is not raw expected"));
            }
            let letter = self.text(Text::ReduceType).trim();
            if let [letter] = *letter.as_bytes()
                && letter.is_ascii_alphabetic()
                && !all.iter().any(|parameter| parameter.of == Of::Letter(letter))
            {
                return Err(error!(
                    InvalidArgument,
                    "reduce_type: the letter {} is that of no parameter",
                    char::from(letter)
                ));
            }
        }
        Ok(())
    }
}

/// How a parameter comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// An element at a time.
    Tensor,
    Raw {
        ndim: u8,
        contiguous: bool,
    },
    /// An input whose value travels in the argument.
    Scalar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    pub dtype: Dtype,
    pub place: Place,
}

/// A combination: what a source is made of, apart from the definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Combination {
    /// By parameters.
    pub slots: ArrayVec<Slot, MOST>,
    /// Whether the layout takes more loops than usual.
    pub many_loops: bool,
}

/// Where everything is in the argument, in words of 64 bits, and what a thread does at once.
pub struct Layout {
    pub is_reduction: bool,
    /// Parameters that are tensors, inputs first.
    pub tensors: usize,
    /// Elements of a vector.
    pub vector: usize,
    /// Vectors that a thread does at once.
    pub rounds: usize,
    /// Words before the first loop, the head's included.
    pub before_loops: usize,
    pub loops: usize,
}

/// Words before the addresses of tensors.
pub const HEAD: [usize; 2] = [4, 10];

/// Elements that a thread does at once where they lie anywhere.
pub const ELEMENT_ROUNDS: usize = 4;

impl Layout {
    pub fn of(definition: &Definition, combination: &Combination) -> Result<Self> {
        let is_reduction = definition.is_reduction;
        let (_, inputs) = definition.parameters()?;
        let tensors = || combination.slots.iter().enumerate().filter(|(_, slot)| slot.place == Place::Tensor);
        let of_inputs = tensors().filter(|&(index, _)| index < inputs).count();
        // Where elements become fewer, only those that are read count.
        let counted = tensors().filter(|&(index, _)| index < inputs || !is_reduction);
        let largest = counted.map(|(_, slot)| slot.dtype.size).max().unwrap_or(VECTOR);
        let tensors = tensors().count();
        let mut before_loops = HEAD[usize::from(is_reduction)] + tensors.max(1);
        for slot in &combination.slots {
            before_loops += match slot.place {
                Place::Tensor => 0,
                Place::Raw { ndim, .. } => 2 + 2 * usize::from(ndim.max(1)),
                Place::Scalar => 1,
            };
        }
        let room = (MOST_BYTES / 8).saturating_sub(before_loops) / (2 + tensors.max(1));
        let loops = if combination.many_loops { room.min(MOST_LOOPS) } else { room.min(USUAL_LOOPS) };
        if loops == 0 {
            return Err(error!(
                InvalidArgument,
                "the parameters are too many for one launch: {before_loops} words of at most {} without their layout",
                MOST_BYTES / 8
            ));
        }
        let rounds = (IN_FLIGHT / of_inputs.max(1)).max(1);
        Ok(Self { is_reduction, tensors, vector: VECTOR / largest, rounds, before_loops, loops })
    }

    pub fn words(&self) -> usize {
        self.before_loops + self.loops * (2 + self.tensors.max(1))
    }
}

/// The names of a source's kernels behind the definition's name. The first has vectors.
pub const ELEMENTWISE: [&str; 2] = ["", "_elements"];
/// Threads side by side have neighbouring elements of one output, in vectors and one by one; or of neighbouring
/// outputs, likewise; and the second launch.
pub const REDUCTION: [&str; 5] = ["", "_row", "_columns", "_column", "_second"];

/// Text that says when there is no memory for it.
struct Output(String);

impl Write for Output {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.try_reserve(text.len()).map_err(|_| fmt::Error)?;
        self.0.push_str(text);
        Ok(())
    }
}

/// The dtype that a reduction is calculated in; None where it is a type of the user's.
pub fn reduce_dtype(definition: &Definition, combination: &Combination) -> Result<Option<Dtype>> {
    let (parameters, inputs) = definition.parameters()?;
    let text = definition.text(Text::ReduceType).trim();
    if text.is_empty() {
        return Ok(combination.slots.get(inputs).map(|slot| slot.dtype));
    }
    let of_letter = match *text.as_bytes() {
        [letter] => parameters.iter().position(|parameter| parameter.of == Of::Letter(letter)),
        _ => None,
    };
    Ok(of_letter.map(|index| combination.slots[index].dtype).or(types::of_name(text)))
}

/// The source of a combination.
pub fn generate(definition: &Definition, combination: &Combination) -> Result<String> {
    let layout = Layout::of(definition, combination)?;
    let (parameters, inputs) = definition.parameters()?;
    let writer = Writer { definition, combination, layout, parameters, inputs, out: Output(String::new()) };
    writer.write().map_err(|_| out_of_memory(definition))
}

fn out_of_memory(definition: &Definition) -> Error {
    error!(OutOfMemory, "{}: its source could not be had", definition.name())
}

struct Writer<'a> {
    definition: &'a Definition,
    combination: &'a Combination,
    layout: Layout,
    parameters: Parameters<'a>,
    inputs: usize,
    out: Output,
}

impl<'a> Writer<'a> {
    fn write(mut self) -> std::result::Result<String, fmt::Error> {
        // Without what is for readers: it is compiled each time, and part of the cache's key.
        for line in DEVICE.lines().chain(BEGINNING.lines()).filter(|line| !line.trim_start().starts_with("//")) {
            writeln!(self.out, "{line}")?;
        }
        self.letters()?;
        self.users(Text::Preamble, "preamble", "", "")?;
        self.arguments()?;
        if self.definition.is_reduction {
            self.reduction()?;
        } else {
            self.elementwise()?;
        }
        Ok(self.out.0)
    }

    fn cpp(&self, index: usize) -> &'static str {
        types::in_cpp(self.combination.slots[index].dtype)
    }

    /// The parameters of a kind, by their index, with their index among them.
    fn of_place(&self, is: fn(Place) -> bool) -> ArrayVec<(usize, usize), MOST> {
        let slots = self.combination.slots.iter().enumerate();
        slots
            .filter(|(_, slot)| is(slot.place))
            .map(|(index, _)| index)
            .enumerate()
            .map(|(k, index)| (index, k))
            .collect()
    }

    fn tensors(&self) -> ArrayVec<(usize, usize), MOST> {
        self.of_place(|place| place == Place::Tensor)
    }

    fn letters(&mut self) -> fmt::Result {
        for (index, parameter) in self.parameters.clone().iter().enumerate() {
            if let Of::Letter(letter) = parameter.of
                && self.parameters[..index].iter().all(|other| other.of != parameter.of)
            {
                writeln!(self.out, "typedef {} {};", self.cpp(index), char::from(letter))?;
            }
        }
        Ok(())
    }

    /// A text of the user's, whose lines errors number from 1, between two of ours.
    fn users(&mut self, text: Text, name: &str, before: &str, after: &str) -> fmt::Result {
        if self.definition.has(text) {
            let (definition, file) = (self.definition, self.definition.name());
            write!(
                self.out,
                "{before}\n#line 1 \"{name}\"\n{}\n#line 1 \"{file}.cu\"\n{after}\n",
                definition.text(text)
            )?;
        }
        Ok(())
    }

    fn arguments(&mut self) -> fmt::Result {
        let (tensors, loops) = (self.layout.tensors.max(1), self.layout.loops);
        self.out.write_str("struct _gc_Args {\n")?;
        self.out.write_str(if self.definition.is_reduction {
            "    unsigned long long kept, reduced, chunk, tiles;\n    unsigned splits, log_across, log_second, vectors, \
             n_kept, n_reduced, ones, at_once, bytes, unused;\n    void *partials;\n"
        } else {
            "    unsigned long long size, units;\n    unsigned n_loops, ones, bytes, blocks;\n"
        })?;
        let raws = self.of_place(|place| matches!(place, Place::Raw { .. }));
        let scalars = self.of_place(|place| place == Place::Scalar);
        writeln!(self.out, "    void *data[{tensors}];")?;
        for index in 0..self.combination.slots.len() {
            if raws.iter().any(|raw| raw.0 == index) {
                let kind = self.raw(index);
                self.out.write_str("    ")?;
                kind.write_to(&mut self.out)?;
                writeln!(self.out, " raw{index};")?;
            } else if scalars.iter().any(|scalar| scalar.0 == index) {
                writeln!(self.out, "    unsigned long long scalar{index};")?;
            }
        }
        let bytes = self.layout.words() * 8;
        writeln!(
            self.out,
            "    _gc::Loop<{tensors}> loops[{loops}];\n}};\nstatic_assert(sizeof(_gc_Args) == {bytes}, \"a layout of the host's\");"
        )
    }

    fn raw(&self, index: usize) -> RawType {
        let (ndim, contiguous) = match self.combination.slots[index].place {
            Place::Raw { ndim, contiguous } => (ndim, contiguous),
            _ => (0, true),
        };
        RawType { cpp: self.cpp(index), is_input: index < self.inputs, ndim, contiguous }
    }

    /// Raw and scalar parameters under the user's names.
    fn whole_parameters(&mut self) -> fmt::Result {
        for index in 0..self.combination.slots.len() {
            let (name, cpp) = (self.parameters[index].name, self.cpp(index));
            match self.combination.slots[index].place {
                Place::Tensor => {}
                Place::Raw { .. } => {
                    let kind = self.raw(index);
                    self.out.write_str("    const ")?;
                    kind.write_to(&mut self.out)?;
                    writeln!(self.out, " &{name} = _gc_args.raw{index};")?;
                }
                Place::Scalar => {
                    writeln!(self.out, "    const {cpp} {name} = _gc::scalar<{cpp}>(_gc_args.scalar{index});")?;
                }
            }
        }
        Ok(())
    }

    fn elementwise(&mut self) -> fmt::Result {
        let (tensors, count) = (self.tensors(), self.layout.tensors.max(1));
        // Units are vectors; or elements, where they lie anywhere, and at the end where they do not fill a vector.
        self.out.write_str(
            "template <unsigned _gc_V, unsigned _gc_ROUNDS, unsigned _gc_OF>\n\
             __device__ __forceinline__ void _gc_run(const _gc_Args &_gc_args, const unsigned long long _gc_first, \
             const unsigned long long _gc_end) {\n    \
             const ptrdiff_t n = static_cast<ptrdiff_t>(_gc_args.size);\n    const _gc::Indexer _ind = {n};\n    \
             (void)_ind;\n",
        )?;
        self.whole_parameters()?;
        self.users(Text::LoopPrep, "loop_prep", "", ";")?;
        for &(index, _) in &tensors {
            writeln!(self.out, "    {} _gc_{index}[_gc_ROUNDS][_gc_V];", self.cpp(index))?;
        }
        write!(
            self.out,
            "    _gc::Offsets<{count}> _gc_at[_gc_ROUNDS];\n\
             #pragma unroll\n    for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {{\n        \
             const unsigned long long _gc_unit = _gc_first + _gc_r * _gc::THREADS;\n        \
             if (_gc_unit >= _gc_end) continue;\n        \
             _gc_at[_gc_r] = _gc::Offsets<{count}>();\n        \
             if (_gc_OF > 1) _gc::go_to_one<_gc_OF>(_gc_at[_gc_r], _gc_args.loops[0], _gc_unit);\n        \
             else _gc::add_offsets(_gc_at[_gc_r], _gc_args.loops, _gc_args.n_loops, _gc_unit);\n"
        )?;
        // Outputs, too: what the operation does not set stays as it is. Where it sets all, compilers leave the loads
        // out.
        for &(index, k) in &tensors {
            let one =
                if index < self.inputs { format_args!("_gc_args.ones >> {k} & 1") } else { format_args!("false") };
            let (cpp, from) = (
                self.cpp(index),
                format_args!("static_cast<const char *>(_gc_args.data[{k}]) + _gc_at[_gc_r].of[{k}]"),
            );
            writeln!(
                self.out,
                "        if (_gc_V > 1) _gc::load(_gc_{index}[_gc_r], {from}, {one});\n        \
                 else _gc_{index}[_gc_r][0] = _gc::load_one<{cpp}>({from}, _gc_args.bytes);"
            )?;
        }
        self.out.write_str(
            "    }\n#pragma unroll\n    for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {\n        \
             const unsigned long long _gc_unit = _gc_first + _gc_r * _gc::THREADS;\n        \
             if (_gc_unit >= _gc_end) continue;\n#pragma unroll\n        \
             for (unsigned _gc_m = 0; _gc_m < _gc_V; _gc_m++) {\n            \
             const ptrdiff_t i = static_cast<ptrdiff_t>(_gc_unit * _gc_V + _gc_m);\n            (void)i;\n",
        )?;
        for &(index, _) in &tensors {
            let (name, cpp) = (self.parameters[index].name, self.cpp(index));
            if index < self.inputs {
                writeln!(self.out, "            const {cpp} {name} = _gc_{index}[_gc_r][_gc_m];")?;
            } else {
                writeln!(self.out, "            {cpp} &{name} = _gc_{index}[_gc_r][_gc_m];")?;
            }
        }
        self.users(Text::Operation, "operation", "            {", "            ;}\n        }")?;
        for &(index, k) in tensors.iter().filter(|&&(index, _)| index >= self.inputs) {
            let to = format_args!("static_cast<char *>(_gc_args.data[{k}]) + _gc_at[_gc_r].of[{k}]");
            writeln!(
                self.out,
                "        if (_gc_V > 1) _gc::store(_gc_{index}[_gc_r], {to});\n        \
                 else _gc::store_one(_gc_{index}[_gc_r][0], {to}, _gc_args.bytes);"
            )?;
        }
        self.out.write_str("    }\n")?;
        self.users(Text::AfterLoop, "after_loop", "", ";")?;
        self.out.write_str("}\n")?;
        let (vector, rounds) = (self.layout.vector, self.layout.rounds);
        self.kernel_of(
            ELEMENTWISE[0],
            format_args!(
                "    if (blockIdx.x < _gc_args.blocks) _gc_run<{vector}, {rounds}, 1>(_gc_args, \
                 static_cast<unsigned long long>(blockIdx.x) * (_gc::THREADS * {rounds}) + threadIdx.x, \
                 _gc_args.units);\n    \
                 else _gc_run<1, 1, {vector}>(_gc_args, _gc_args.units * {vector} + threadIdx.x, _gc_args.size);\n"
            ),
        )?;
        self.kernel_of(
            ELEMENTWISE[1],
            format_args!(
                "    _gc_run<1, {ELEMENT_ROUNDS}, 1>(_gc_args, static_cast<unsigned long long>(blockIdx.x) * \
                 (_gc::THREADS * {ELEMENT_ROUNDS}) + threadIdx.x, _gc_args.units);\n"
            ),
        )
    }

    fn kernel_of(&mut self, behind: &str, body: fmt::Arguments<'_>) -> fmt::Result {
        let name = self.definition.name();
        writeln!(
            self.out,
            "extern \"C\" __global__ void __launch_bounds__({THREADS}) {name}{behind}(_GC_ARGUMENT _gc_Args _gc_args) \
             {{\n{body}}}"
        )
    }

    fn kernel(&mut self, behind: &str, calls: fmt::Arguments<'_>) -> fmt::Result {
        self.kernel_of(behind, format_args!("    {calls}(_gc_args);\n"))
    }

    fn reduction(&mut self) -> fmt::Result {
        let (tensors, count) = (self.tensors(), self.layout.tensors.max(1));
        self.reduce_type()?;
        writeln!(self.out, "enum : unsigned {{ _GC_TENSORS = {count} }};")?;
        let of_inputs: ArrayVec<_, MOST> = tensors.iter().copied().filter(|&(index, _)| index < self.inputs).collect();
        let of_outputs: ArrayVec<_, MOST> =
            tensors.iter().copied().filter(|&(index, _)| index >= self.inputs).collect();
        let sizes = "    const ptrdiff_t n = static_cast<ptrdiff_t>(_gc_args.reduced);\n    \
                     const _gc::Indexer _in_ind = {static_cast<ptrdiff_t>(_gc_args.kept * _gc_args.reduced)};\n    \
                     const _gc::Indexer _out_ind = {static_cast<ptrdiff_t>(_gc_args.kept)};\n    \
                     (void)n, (void)_in_ind, (void)_out_ind;\n";

        self.out.write_str(
            "__device__ __forceinline__ _type_reduce _gc_map(const _gc_Args &_gc_args, const ptrdiff_t _J",
        )?;
        for &(index, _) in &of_inputs {
            write!(self.out, ", const {} _gc_{index}", self.cpp(index))?;
        }
        self.out.write_str(") {\n    (void)_J;\n")?;
        self.out.write_str(sizes)?;
        self.whole_parameters()?;
        for &(index, _) in &of_inputs {
            let (name, cpp) = (self.parameters[index].name, self.cpp(index));
            writeln!(self.out, "    const {cpp} {name} = _gc_{index};")?;
        }
        self.users(Text::Map, "map", "    return (_type_reduce)(", "    );\n}")?;
        self.users(
            Text::Reduce,
            "reduce",
            "__device__ __forceinline__ _type_reduce _gc_reduce(const _type_reduce a, const _type_reduce b) {\n    \
             return (_type_reduce)(",
            "    );\n}",
        )?;

        self.out.write_str(
            "__device__ __forceinline__ void _gc_finish(const _gc_Args &_gc_args, const _type_reduce _gc_a, const ptrdiff_t i",
        )?;
        for &(index, _) in &of_outputs {
            write!(self.out, ", char *_gc_to{index}")?;
        }
        self.out.write_str(") {\n    (void)i;\n")?;
        self.out.write_str(sizes)?;
        self.whole_parameters()?;
        for &(index, _) in &of_outputs {
            let cpp = self.cpp(index);
            writeln!(self.out, "    {cpp} _gc_{index} = _gc::load_one<{cpp}>(_gc_to{index}, _gc_args.bytes);")?;
        }
        self.out.write_str("    {\n        const _type_reduce a = _gc_a;\n")?;
        for &(index, _) in &of_outputs {
            let (name, cpp) = (self.parameters[index].name, self.cpp(index));
            writeln!(self.out, "        {cpp} &{name} = _gc_{index};")?;
        }
        self.users(Text::PostMap, "post_map", "        {", "        ;}\n    }")?;
        for &(index, _) in &of_outputs {
            writeln!(self.out, "    _gc::store_one(_gc_{index}, _gc_to{index}, _gc_args.bytes);")?;
        }
        self.out.write_str("}\n")?;

        self.tree()?;

        let arguments = |out: &mut Output, one: &str, of: fmt::Arguments<'_>| -> fmt::Result {
            write!(out, "_gc_map(_gc_args, static_cast<ptrdiff_t>({one})")?;
            of_inputs.iter().try_for_each(|&(index, _)| write!(out, ", _gc_{index}{of}"))?;
            out.write_str(")")
        };
        // A thread's elements: rounds of whole vectors, the last of which one thread has in part. Where elements lie
        // anywhere, they are the same ones in the same order, one by one.
        self.out.write_str(
            "template <unsigned _gc_V, unsigned _gc_ROUNDS, bool _gc_COLUMNS, bool _gc_ONES>\n\
             __device__ __forceinline__ void _gc_run(const _gc_Args &_gc_args) {\n    \
             typedef unsigned long long _gc_u64;\n    \
             __shared__ __align__(16) unsigned char _gc_memory[_gc::THREADS * sizeof(_type_reduce)];\n    \
             const unsigned _gc_t = threadIdx.x, _gc_log = _gc_args.log_across;\n    \
             const unsigned _gc_width = 1u << _gc_log, _gc_height = _gc::THREADS >> _gc_log;\n    \
             const unsigned _gc_across = _gc_COLUMNS ? _gc_t % _gc_width : _gc_t / _gc_height;\n    \
             const unsigned _gc_along = _gc_COLUMNS ? _gc_t / _gc_width : _gc_t % _gc_height;\n    \
             const unsigned _gc_tile = blockIdx.x % static_cast<unsigned>(_gc_args.tiles);\n    \
             const unsigned _gc_split = blockIdx.x / static_cast<unsigned>(_gc_args.tiles);\n    \
             const unsigned _gc_OUTPUTS = _gc_COLUMNS ? _gc_V : 1, _gc_AT_ONCE = _gc_COLUMNS ? 1 : _gc_V;\n    \
             const unsigned _gc_OF = _gc_ONES ? 1 : _gc_AT_ONCE;\n    \
             const _gc_u64 _gc_o = (static_cast<_gc_u64>(_gc_tile) * _gc_width + _gc_across) * _gc_OUTPUTS;\n    \
             const _gc_u64 _gc_begin = _gc_split * _gc_args.chunk, _gc_rest = _gc_args.reduced - _gc_begin;\n    \
             const _gc_u64 _gc_length = _gc_rest < _gc_args.chunk ? _gc_rest : _gc_args.chunk;\n    \
             const _gc_u64 _gc_units = _gc_length / _gc_AT_ONCE;\n    \
             const bool _gc_valid = _gc_o < _gc_args.kept;\n    \
             const _gc::Loop<_GC_TENSORS> *const _gc_inner = _gc_args.loops + _gc_args.n_kept;\n    \
             _type_reduce _gc_sum[_gc_OUTPUTS];\n    bool _gc_has = false;\n    \
             _gc::Offsets<_GC_TENSORS> _gc_base = _gc::Offsets<_GC_TENSORS>();\n    \
             if (_gc_valid) {\n        \
             _gc::go(_gc_base, _gc_args.loops, _gc_args.n_kept, _gc_o / _gc_OUTPUTS);\n        \
             for (_gc_u64 _gc_j = _gc_along; _gc_j < _gc_units; _gc_j += _gc_ROUNDS * _gc_height) {\n",
        )?;
        // Elements of which each has a place of its own, four at a time.
        self.out.write_str(
            "            if (_gc_ONES) {\n                \
             const unsigned _gc_N = _gc_V < 4 ? _gc_V : 4;\n#pragma unroll 1\n                \
             for (unsigned _gc_m = 0; _gc_m < _gc_V; _gc_m += _gc_N) {\n                    \
             const _gc_u64 _gc_at = _gc_begin + _gc_j * _gc_V + _gc_m;\n",
        )?;
        for &(index, _) in &of_inputs {
            writeln!(self.out, "                    {} _gc_{index}[_gc_N];", self.cpp(index))?;
        }
        self.out.write_str(
            "#pragma unroll\n                    for (unsigned _gc_k = 0; _gc_k < _gc_N; _gc_k++) {\n                        \
             _gc::Offsets<_GC_TENSORS> _gc_offsets = _gc_base;\n                        \
             _gc::go(_gc_offsets, _gc_inner, _gc_args.n_reduced, _gc_at + _gc_k);\n",
        )?;
        for &(index, k) in &of_inputs {
            let cpp = self.cpp(index);
            writeln!(
                self.out,
                "                        _gc_{index}[_gc_k] = _gc::load_one<{cpp}>(static_cast<const char \
                 *>(_gc_args.data[{k}]) + _gc_offsets.of[{k}], _gc_args.bytes);"
            )?;
        }
        self.out.write_str(
            "                    }\n#pragma unroll\n                    \
             for (unsigned _gc_k = 0; _gc_k < _gc_N; _gc_k++) {\n                        const _type_reduce _gc_x = ",
        )?;
        arguments(&mut self.out, "_gc_at + _gc_k", format_args!("[_gc_k]"))?;
        self.out.write_str(
            ";\n                        _gc_sum[0] = _gc_has ? _gc_reduce(_gc_sum[0], _gc_x) : _gc_x;\n                        \
             _gc_has = true;\n                    }\n                }\n            } else {\n",
        )?;
        for &(index, _) in &of_inputs {
            writeln!(self.out, "            {} _gc_{index}[_gc_ROUNDS][_gc_V];", self.cpp(index))?;
        }
        self.out.write_str(
            "#pragma unroll\n            for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {\n                \
             const _gc_u64 _gc_unit = _gc_j + _gc_r * _gc_height;\n                \
             if (_gc_unit >= _gc_units) continue;\n                \
             _gc::Offsets<_GC_TENSORS> _gc_offsets = _gc_base;\n                \
             _gc::go(_gc_offsets, _gc_inner, _gc_args.n_reduced, _gc_begin / _gc_AT_ONCE + _gc_unit);\n",
        )?;
        for &(index, k) in &of_inputs {
            let (cpp, from) =
                (self.cpp(index), format_args!("static_cast<const char *>(_gc_args.data[{k}]) + _gc_offsets.of[{k}]"));
            writeln!(
                self.out,
                "                if (_gc_V > 1) _gc::load(_gc_{index}[_gc_r], {from}, _gc_args.ones >> {k} & 1);\n                \
                 else _gc_{index}[_gc_r][0] = _gc::load_one<{cpp}>({from}, _gc_args.bytes);"
            )?;
        }
        self.out.write_str(
            "            }\n#pragma unroll\n            \
             for (unsigned _gc_r = 0; _gc_r < _gc_ROUNDS; _gc_r++) {\n                \
             const _gc_u64 _gc_unit = _gc_j + _gc_r * _gc_height;\n                \
             if (_gc_unit >= _gc_units) continue;\n                \
             const bool _gc_had = _gc_has;\n                _gc_has = true;\n#pragma unroll\n                \
             for (unsigned _gc_m = 0; _gc_m < _gc_V; _gc_m++) {\n                    const _type_reduce _gc_x = ",
        )?;
        arguments(
            &mut self.out,
            "_gc_begin + _gc_unit * _gc_AT_ONCE + (_gc_COLUMNS ? 0 : _gc_m)",
            format_args!("[_gc_r][_gc_m]"),
        )?;
        self.out.write_str(
            ";\n                    _type_reduce &_gc_to = _gc_sum[_gc_COLUMNS ? _gc_m : 0];\n                    \
             _gc_to = _gc_had || (!_gc_COLUMNS && _gc_m > 0) ? _gc_reduce(_gc_to, _gc_x) : _gc_x;\n                \
             }\n            }\n            }\n        }\n        \
             if (_gc_AT_ONCE > 1 && _gc_along == _gc_units % _gc_height) {\n#pragma unroll 1\n            \
             for (_gc_u64 _gc_j = _gc_begin + _gc_units * _gc_AT_ONCE; _gc_j < _gc_begin + _gc_length; _gc_j++) {\n                \
             _gc::Offsets<_GC_TENSORS> _gc_offsets = _gc_base;\n                \
             if (_gc_OF > 1) _gc::go_to_one<_gc_OF>(_gc_offsets, *_gc_inner, _gc_j);\n                \
             else _gc::go(_gc_offsets, _gc_inner, _gc_args.n_reduced, _gc_j);\n",
        )?;
        for &(index, k) in &of_inputs {
            let cpp = self.cpp(index);
            writeln!(
                self.out,
                "                const {cpp} _gc_{index} = _gc::load_one<{cpp}>(static_cast<const char *>(_gc_args.data[{k}]) + \
                 _gc_offsets.of[{k}], _gc_args.bytes);"
            )?;
        }
        self.out.write_str("                const _type_reduce _gc_x = ")?;
        arguments(&mut self.out, "_gc_j", format_args!(""))?;
        self.out.write_str(
            ";\n                _gc_sum[0] = _gc_has ? _gc_reduce(_gc_sum[0], _gc_x) : _gc_x;\n                \
             _gc_has = true;\n            }\n        }\n    }\n    \
             const _gc_u64 _gc_pieces = _gc_units + (_gc_length % _gc_AT_ONCE ? 1 : 0);\n    \
             const unsigned _gc_active = static_cast<unsigned>(_gc_pieces < _gc_height ? _gc_pieces : _gc_height);\n\
             #pragma unroll\n    for (unsigned _gc_m = 0; _gc_m < _gc_OUTPUTS; _gc_m++) {\n        \
             _gc_gather(reinterpret_cast<_type_reduce *>(_gc_memory), _gc_sum[_gc_m], _gc_has, _gc_along, _gc_height, \
             _gc_COLUMNS ? _gc_width : 1, _gc_active);\n    }\n    \
             if (_gc_along > 0 || !_gc_valid) return;\n#pragma unroll\n    \
             for (unsigned _gc_m = 0; _gc_m < _gc_OUTPUTS; _gc_m++) {\n        \
             const _gc_u64 _gc_number = _gc_o + _gc_m;\n        \
             if (_gc_args.splits > 1) {\n            \
             static_cast<_type_reduce *>(_gc_args.partials)[_gc_split * _gc_args.kept + _gc_number] = _gc_sum[_gc_m];\n            \
             continue;\n        }\n        \
             _gc_finish(_gc_args, _gc_sum[_gc_m], static_cast<ptrdiff_t>(_gc_number)",
        )?;
        for &(_, k) in &of_outputs {
            // The innermost loop is one of vectors.
            write!(
                self.out,
                ",\n                   static_cast<char *>(_gc_args.data[{k}]) + _gc_base.of[{k}] + (_gc_m == 0 ? 0 : _gc_m * \
                 (_gc_args.loops[_gc_args.n_kept - 1].strides[{k}] / static_cast<int>(_gc_V)))"
            )?;
        }
        self.out.write_str(");\n    }\n}\n")?;

        self.out.write_str(
            "__device__ __forceinline__ void _gc_run_second(const _gc_Args &_gc_args) {\n    \
             __shared__ __align__(16) unsigned char _gc_memory[_gc::THREADS * sizeof(_type_reduce)];\n    \
             const unsigned _gc_width = 1u << _gc_args.log_second, _gc_height = _gc::THREADS >> _gc_args.log_second;\n    \
             const unsigned _gc_across = threadIdx.x % _gc_width, _gc_along = threadIdx.x / _gc_width;\n    \
             const unsigned long long _gc_o = static_cast<unsigned long long>(blockIdx.x) * _gc_width + _gc_across;\n    \
             const bool _gc_valid = _gc_o < _gc_args.kept;\n    \
             const _type_reduce *_gc_from = static_cast<const _type_reduce *>(_gc_args.partials) + _gc_o;\n    \
             _type_reduce _gc_sum[1];\n    bool _gc_has = false;\n    \
             if (_gc_valid) {\n        \
             for (unsigned _gc_j = _gc_along; _gc_j < _gc_args.splits; _gc_j += 8 * _gc_height) {\n            \
             _type_reduce _gc_x[8];\n#pragma unroll\n            \
             for (unsigned _gc_r = 0; _gc_r < 8; _gc_r++) {\n                \
             const unsigned _gc_at = _gc_j + _gc_r * _gc_height;\n                \
             if (_gc_at < _gc_args.splits) _gc_x[_gc_r] = _gc_from[_gc_at * _gc_args.kept];\n            }\n\
             #pragma unroll\n            \
             for (unsigned _gc_r = 0; _gc_r < 8; _gc_r++) {\n                \
             if (_gc_j + _gc_r * _gc_height >= _gc_args.splits) continue;\n                \
             _gc_sum[0] = _gc_has ? _gc_reduce(_gc_sum[0], _gc_x[_gc_r]) : _gc_x[_gc_r];\n                \
             _gc_has = true;\n            }\n        }\n    }\n    \
             const unsigned _gc_active = _gc_args.splits < _gc_height ? _gc_args.splits : _gc_height;\n    \
             _gc_gather(reinterpret_cast<_type_reduce *>(_gc_memory), _gc_sum[0], _gc_has, _gc_along, _gc_height, _gc_width, \
             _gc_active);\n    \
             if (_gc_along > 0 || !_gc_valid) return;\n",
        )?;
        write!(
            self.out,
            "    _gc::Offsets<{count}> _gc_base = _gc::Offsets<{count}>();\n    \
             const unsigned _gc_step = _gc_args.at_once;\n    \
             _gc::go(_gc_base, _gc_args.loops, _gc_args.n_kept, _gc_o / _gc_step);\n    \
             const unsigned _gc_m = static_cast<unsigned>(_gc_o % _gc_step);\n    \
             _gc_finish(_gc_args, _gc_sum[0], static_cast<ptrdiff_t>(_gc_o)"
        )?;
        for &(_, k) in &of_outputs {
            write!(
                self.out,
                ",\n               static_cast<char *>(_gc_args.data[{k}]) + _gc_base.of[{k}] + (_gc_m == 0 ? 0 : _gc_m * \
                 (_gc_args.loops[_gc_args.n_kept - 1].strides[{k}] / static_cast<int>(_gc_step)))"
            )?;
        }
        self.out.write_str(");\n}\n")?;
        let (vector, rounds) = (self.layout.vector, self.layout.rounds);
        self.kernel(REDUCTION[0], format_args!("_gc_run<{vector}, {rounds}, false, false>"))?;
        self.kernel(REDUCTION[1], format_args!("_gc_run<{vector}, 1, false, true>"))?;
        self.kernel(REDUCTION[2], format_args!("_gc_run<{vector}, {}, true, false>", 2 * rounds))?;
        self.kernel(REDUCTION[3], format_args!("_gc_run<1, {ELEMENT_ROUNDS}, true, false>"))?;
        self.kernel(REDUCTION[4], format_args!("_gc_run_second"))
    }

    fn reduce_type(&mut self) -> fmt::Result {
        let definition: &'a Definition = self.definition;
        let text = definition.text(Text::ReduceType).trim();
        // A letter is a typedef already.
        let cpp = if text.is_empty() {
            self.cpp(self.inputs)
        } else {
            types::of_name(text).map_or(text, |dtype| types::in_cpp(dtype))
        };
        writeln!(
            self.out,
            "typedef {cpp} _type_reduce;\nstatic_assert(sizeof(_type_reduce) <= {OWN_TYPE_BYTES}, \"reduce_type: at most \
             {OWN_TYPE_BYTES} bytes\");\nstatic_assert(alignof(_type_reduce) <= {OWN_TYPE_ALIGNMENT}, \"reduce_type: aligned to \
             at most {OWN_TYPE_ALIGNMENT} bytes\");"
        )
    }

    /// What the threads along an output have becomes one.
    fn tree(&mut self) -> fmt::Result {
        self.out.write_str(
            "__device__ __forceinline__ void _gc_gather(_type_reduce *_gc_shared, _type_reduce &_gc_sum, const bool _gc_has, \
             const unsigned _gc_along, const unsigned _gc_height, const unsigned _gc_pitch, const unsigned _gc_active) {\n    \
             _type_reduce *_gc_own = _gc_shared + threadIdx.x;\n    \
             if (_gc_height > 1) {\n        \
             __syncthreads();\n        \
             if (_gc_has) *_gc_own = _gc_sum;\n        \
             for (unsigned _gc_half = _gc_height / 2; _gc_half > 0; _gc_half /= 2) {\n            \
             __syncthreads();\n            \
             if (_gc_has && _gc_along < _gc_half && _gc_along + _gc_half < _gc_active)\n                \
             *_gc_own = _gc_reduce(*_gc_own, _gc_own[_gc_half * _gc_pitch]);\n        }\n        \
             if (_gc_has && _gc_along == 0) _gc_sum = *_gc_own;\n    }\n",
        )?;
        self.users(
            Text::Identity,
            "identity",
            "    if (!_gc_has && _gc_along == 0) _gc_sum = (_type_reduce)(",
            "    );",
        )?;
        self.out.write_str("}\n")
    }
}

/// The type of a raw parameter.
struct RawType {
    cpp: &'static str,
    is_input: bool,
    ndim: u8,
    contiguous: bool,
}

impl RawType {
    fn write_to(&self, out: &mut Output) -> fmt::Result {
        let Self { cpp, is_input, ndim, contiguous } = self;
        write!(out, "_gc::Raw<{}{cpp}, {ndim}, {contiguous}>", if *is_input { "const " } else { "" })
    }
}
