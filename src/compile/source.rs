//! The source of a kernel: what the user wrote, inside loops over the elements of tensors.
//!
//! Each combination of types is a source of its own, with the kernels that its layouts need. Their argument is one struct
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

/// What every source begins with, and those where there are floats of 16 bits.
const BEGINNING: &str = include_str!("../../kernels/compiled.cuh");
const DEVICE: &str = include_str!("../../include/gradcodec/device.cuh");
const HALVES: &str = include_str!("../../kernels/compiled_halves.cuh");

/// What is the same in every kernel of a kind: see [`Writer::template`].
const OPERATION: &str = include_str!("../../kernels/compiled_elementwise.cuh");
const REDUCE: &str = include_str!("../../kernels/compiled_reduction.cuh");

/// Threads of a block, as kernels/compiled.cuh has it.
pub const THREADS: u32 = 256;

/// Bytes that one access moves at full speed.
const VECTOR: usize = 16;

/// Vectors that a thread has in flight, all inputs together; twice as many where it has neighbouring outputs.
const IN_FLIGHT: usize = 4;

/// Elements that a thread of a reduction has in flight, all inputs together, where it cannot have vectors and there is one
/// loop.
const SINGLES_IN_FLIGHT: usize = 16;

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

/// NVRTC's options that a definition has.
pub const MOST_OPTIONS: usize = 63;

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
        if self.options.len() > MOST_OPTIONS {
            let count = self.options.len();
            return Err(error!(InvalidArgument, "options: {count} options of NVRTC; at most {MOST_OPTIONS} expected"));
        }
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
    /// Which of the kernels of its kind there are, a bit each.
    pub kernels: u16,
}

impl Combination {
    /// Whether what this was compiled to does for another one.
    pub fn serves(&self, other: &Self) -> bool {
        self.slots == other.slots
            && self.many_loops == other.many_loops
            && self.kernels & other.kernels == other.kernels
    }
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
    /// Elements of each input that a thread of a reduction does at once, one by one.
    pub singles: usize,
    /// Words before the first loop, the head's included.
    pub before_loops: usize,
    pub loops: usize,
}

/// Words before the addresses of tensors.
pub const HEAD: [usize; 2] = [4, 9];

/// What they are.
const ELEMENTWISE_HEAD: &str = "\
unsigned long long size, units;
unsigned n_loops, ones, blocks;
";
const REDUCTION_HEAD: &str = "\
unsigned long long kept, reduced, chunk, tiles;
unsigned splits, log_across, log_second, bytes, n_kept, n_reduced, ones, at_once;
void *partials;
";

/// Around statements for one element: `continue` and `break` end that one, not those beside it in a vector.
const ELEMENT: [&str; 2] = ["do {", ";} while (false);"];

/// Likewise where `return` may be among them. A structured binding of loop_prep, or a label, is not seen from inside.
const RETURNING_ELEMENT: [&str; 2] = ["[&] { do {", ";} while (false); }();"];

/// What a reduction's texts may ask for.
const SIZES: &str = "\
const ptrdiff_t n = static_cast<ptrdiff_t>(_gc_args.reduced);
const _gc::Indexer _in_ind = {static_cast<ptrdiff_t>(_gc_args.kept * _gc_args.reduced)};
const _gc::Indexer _out_ind = {static_cast<ptrdiff_t>(_gc_args.kept)};
(void)n, (void)_in_ind, (void)_out_ind;
";

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
        let singles = (SINGLES_IN_FLIGHT / of_inputs.max(1)).max(1);
        Ok(Self { is_reduction, tensors, vector: VECTOR / largest, rounds, singles, before_loops, loops })
    }

    pub fn words(&self) -> usize {
        self.before_loops + self.loops * (2 + self.tensors.max(1))
    }
}

/// The names of a source's kernels behind the definition's name. Elements lie in vectors one after the other, anywhere, at
/// any address, or in vectors in nested loops: each of them without the others' code is what compiles fast.
pub const ELEMENTWISE: [&str; 4] = ["", "_elements", "_bytes", "_nested"];
/// Threads side by side have neighbouring elements of one output, in vectors and one by one; or of neighbouring
/// outputs, likewise; the second launch; those one by one at any address; and, where the elements of an output lie in
/// nested loops or in none, those in vectors once more, and then those one by one.
pub const REDUCTION: [&str; 11] = [
    "",
    "_row",
    "_columns",
    "_column",
    "_second",
    "_row_bytes",
    "_column_bytes",
    "_nested",
    "_nested_columns",
    "_nested_row",
    "_nested_column",
];

/// The names of all kernels of a kind.
pub fn names(is_reduction: bool) -> &'static [&'static str] {
    if is_reduction { &REDUCTION } else { &ELEMENTWISE }
}

/// All kernels of a kind, a bit each.
pub fn all_kernels(is_reduction: bool) -> u16 {
    (1 << names(is_reduction).len()) - 1
}

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
        self.lines(BEGINNING)?;
        if self.has_halves() {
            self.lines(DEVICE)?;
            self.lines(HALVES)?;
        }
        self.letters()?;
        self.users(Text::Preamble, "preamble", "", "")?;
        self.arguments()?;
        if self.definition.is_reduction {
            self.reduce_type()?;
            self.template(REDUCE)?;
        } else {
            self.template(OPERATION)?;
        }
        self.kernels()?;
        Ok(self.out.0)
    }

    /// Text of a file, without what is for readers: it is compiled each time, and part of the cache's key.
    fn lines(&mut self, file: &str) -> fmt::Result {
        code(file).try_for_each(|line| writeln!(self.out, "{line}"))
    }

    /// Whether something may name the floats of 16 bits, or what is device.cuh's.
    fn has_halves(&self) -> bool {
        let words = ["float16", "bfloat16", "gradcodec"];
        let is_named = |text: &String| words.iter().any(|word| parameters::mentions(text, word));
        self.combination.slots.iter().any(|slot| matches!(slot.dtype, Dtype::F16 | Dtype::BF16))
            || self.definition.texts.iter().flatten().any(is_named)
            || self.definition.has_macros()
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

    /// Statements for one element.
    fn element(&mut self, text: Text, name: &str) -> fmt::Result {
        let may_return = parameters::mentions(self.definition.text(text), "return") || self.definition.has_macros();
        let [before, after] = if may_return { RETURNING_ELEMENT } else { ELEMENT };
        self.users(text, name, before, after)
    }

    fn arguments(&mut self) -> fmt::Result {
        let (tensors, loops) = (self.layout.tensors.max(1), self.layout.loops);
        self.out.write_str("struct _gc_Args {\n")?;
        self.lines(if self.definition.is_reduction { REDUCTION_HEAD } else { ELEMENTWISE_HEAD })?;
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
            "    _gc::Loop<{tensors}> loops[{loops}];\n}};\nstatic_assert(sizeof(_gc_Args) == {bytes}, \"a layout of the \
             host's\");\nenum : unsigned {{ _GC_TENSORS = {tensors} }};"
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

    /// What is the same in every kernel of a kind, with a combination's own where a line is a name in capitals alone.
    fn template(&mut self, file: &'static str) -> fmt::Result {
        for line in code(file) {
            match line.trim_start() {
                "_GC_WHOLE_PARAMETERS" => self.whole_parameters(),
                "_GC_SIZES" => self.lines(SIZES),
                "_GC_LOOP_PREP" => self.users(Text::LoopPrep, "loop_prep", "", ";"),
                "_GC_OPERATION" => self.element(Text::Operation, "operation"),
                "_GC_AFTER_LOOP" => self.users(Text::AfterLoop, "after_loop", "", ";"),
                "_GC_MAP" => self.users(Text::Map, "map", "return (_type_reduce)(", ");"),
                "_GC_REDUCE" => self.users(Text::Reduce, "reduce", "return (_type_reduce)(", ");"),
                "_GC_POST_MAP" => self.element(Text::PostMap, "post_map"),
                "_GC_IDENTITY" => {
                    let before = "if (_gc_active == 0) _gc_one = (_type_reduce)(";
                    self.users(Text::Identity, "identity", before, ");")
                }
                "_GC_ROUNDS_OF_TENSORS" => {
                    self.declare_inputs("_gc_V == 1")?;
                    self.each(Which::Outputs, |out, cpp, index, _| {
                        writeln!(out, "{cpp} _gc_{index}[_gc_ROUNDS][_gc_V];")
                    })
                }
                "_GC_ROUNDS_OF_INPUTS" => self.declare_inputs("_gc_V == 1 || _gc_ONES"),
                "_GC_LOAD_ROUND" => self.load_round(Which::All),
                "_GC_SPREAD_ROUND" => self.spread_round(),
                "_GC_LOAD_ROUND_OF_INPUTS" => self.load_round(Which::Inputs),
                "_GC_LOAD_ONE_OF_INPUTS" => self.each(Which::Inputs, |out, cpp, index, k| {
                    let address = Address(k);
                    writeln!(out, "_gc_{index}[_gc_r].set(_gc_m, _gc::load_one<{cpp}>({address}, _gc_BYTES));")
                }),
                "_GC_LOAD_LAST_OF_INPUTS" => self.each(Which::Inputs, |out, cpp, index, k| {
                    let address = Address(k);
                    writeln!(out, "const {cpp} _gc_{index} = _gc::load_one<{cpp}>({address}, _gc_args.bytes);")
                }),
                "_GC_STORE_ROUND" => self.store_round(),
                "_GC_ELEMENTS" => self.name(Which::All, "[_gc_r][_gc_m]"),
                "_GC_INPUTS" => self.name(Which::Inputs, ""),
                "_GC_OUTPUTS" => self.name(Which::Outputs, ""),
                "_GC_INPUTS_AS_PARAMETERS" => {
                    self.each(Which::Inputs, |out, cpp, index, _| writeln!(out, "    , const {cpp} _gc_{index}"))
                }
                "_GC_OUTPUTS_AS_PARAMETERS" => {
                    self.each(Which::Outputs, |out, _, index, _| writeln!(out, "    , char *_gc_to{index}"))
                }
                "_GC_LOAD_OUTPUTS" => self.each(Which::Outputs, |out, cpp, index, _| {
                    writeln!(out, "{cpp} _gc_{index} = _gc::load_one<{cpp}>(_gc_to{index}, _gc_args.bytes);")
                }),
                "_GC_STORE_OUTPUTS" => self.each(Which::Outputs, |out, _, index, _| {
                    writeln!(out, "_gc::store_one(_gc_{index}, _gc_to{index}, _gc_args.bytes);")
                }),
                "_GC_MAP_ROUND" => self.mapped("[_gc_r][_gc_m]"),
                "_GC_MAP_LAST" => self.mapped(""),
                "_GC_FINISH" => self.finish(),
                _ => writeln!(self.out, "{line}"),
            }?;
        }
        Ok(())
    }

    /// Writes something for each tensor that is not raw: its type, its index among the parameters and among such tensors.
    fn each(
        &mut self,
        which: Which,
        mut write: impl FnMut(&mut Output, &str, usize, usize) -> fmt::Result,
    ) -> fmt::Result {
        let inputs = self.inputs;
        let is_meant = |index: usize| match which {
            Which::All => true,
            Which::Inputs => index < inputs,
            Which::Outputs => index >= inputs,
        };
        self.tensors().into_iter().filter(|&(index, _)| is_meant(index)).try_for_each(|(index, k)| {
            let cpp = self.cpp(index);
            write(&mut self.out, cpp, index, k)
        })
    }

    fn declare_inputs(&mut self, separate: &str) -> fmt::Result {
        self.each(Which::Inputs, |out, cpp, index, _| {
            writeln!(out, "_gc::Neighbours<{cpp}, _gc_V, {separate}> _gc_{index}[_gc_ROUNDS];")
        })
    }

    /// Elements under the user's names.
    fn name(&mut self, which: Which, at: &str) -> fmt::Result {
        let (parameters, inputs) = (self.parameters.clone(), self.inputs);
        self.each(which, |out, cpp, index, _| {
            let name = parameters[index].name;
            if index < inputs {
                writeln!(out, "const {cpp} {name} = _gc_{index}{at};")
            } else {
                writeln!(out, "{cpp} &{name} = _gc_{index}{at};")
            }
        })
    }

    /// Outputs, too: what the operation does not set stays as it is. Where it sets all, compilers leave the loads out.
    fn load_round(&mut self, which: Which) -> fmt::Result {
        let inputs = self.inputs;
        self.each(which, |out, cpp, index, k| {
            if index < inputs {
                writeln!(out, "_gc_{index}[_gc_r].load({}, _gc_args.ones >> {k} & 1, _gc_BYTES);", Address(k))
            } else {
                writeln!(out, "if (_gc_V > 1) _gc::load(_gc_{index}[_gc_r], {});", Address(k))?;
                writeln!(out, "else _gc_{index}[_gc_r][0] = _gc::load_one<{cpp}>({}, _gc_BYTES);", Address(k))
            }
        })
    }

    /// Neighbours that are one element.
    fn spread_round(&mut self) -> fmt::Result {
        self.each(Which::Inputs, |out, _, index, k| {
            writeln!(out, "_gc_{index}[_gc_r].spread(_gc_args.ones >> {k} & 1);")
        })
    }

    fn store_round(&mut self) -> fmt::Result {
        self.each(Which::Outputs, |out, _, index, k| {
            writeln!(out, "if (_gc_V > 1) _gc::store(_gc_{index}[_gc_r], {});", Address(k))?;
            writeln!(out, "else _gc::store_one(_gc_{index}[_gc_r][0], {}, _gc_BYTES);", Address(k))
        })
    }

    /// What the user makes of an element to be reduced.
    fn mapped(&mut self, at: &str) -> fmt::Result {
        write!(self.out, "const _type_reduce _gc_x = _gc_map(_gc_args, static_cast<ptrdiff_t>(_gc_number)")?;
        self.each(Which::Inputs, |out, _, index, _| write!(out, ", _gc_{index}{at}"))?;
        writeln!(self.out, ");")
    }

    fn finish(&mut self) -> fmt::Result {
        write!(self.out, "_gc_finish(_gc_args, _gc_one, static_cast<ptrdiff_t>(_gc_number)")?;
        self.each(Which::Outputs, |out, _, _, k| write!(out, ", {}", Address(k)))?;
        writeln!(self.out, ");")
    }

    /// Those that there are to be: most of the time it takes to compile goes into them.
    fn kernels(&mut self) -> fmt::Result {
        let (vector, rounds, is_reduction) = (self.layout.vector, self.layout.rounds, self.definition.is_reduction);
        let (columns, singles) = (2 * rounds, self.layout.singles);
        for (index, name) in names(is_reduction).iter().enumerate() {
            if self.combination.kernels >> index & 1 == 0 {
                continue;
            }
            match (is_reduction, index) {
                (false, 0) => self.kernel(name, format_args!("_gc_vectors<{vector}, {rounds}>")),
                (false, 1) => self.kernel(name, format_args!("_gc_block<1, {ELEMENT_ROUNDS}, true, false>")),
                (false, 2) => self.kernel(name, format_args!("_gc_block<1, 1, true, true>")),
                (false, _) => self.kernel(name, format_args!("_gc_block<{vector}, {rounds}, true, false>")),
                (true, 0) => self.kernel(name, format_args!("_gc_run<{vector}, {rounds}, false, false, false, false>")),
                (true, 1) => {
                    let vectors = (singles / vector).max(1);
                    self.kernel(name, format_args!("_gc_run<{vector}, {vectors}, false, true, false, false>"))
                }
                (true, 2) => self.kernel(name, format_args!("_gc_run<{vector}, {columns}, true, false, false, false>")),
                (true, 3) => self.kernel(name, format_args!("_gc_run<1, {singles}, true, false, false, false>")),
                (true, 4) => self.kernel(name, format_args!("_gc_run_second")),
                (true, 5) => self.kernel(name, format_args!("_gc_run<{vector}, 1, false, true, true, true>")),
                (true, 6) => self.kernel(name, format_args!("_gc_run<1, 1, true, false, true, true>")),
                (true, 7) => self.kernel(name, format_args!("_gc_run<{vector}, {rounds}, false, false, true, false>")),
                (true, 8) => self.kernel(name, format_args!("_gc_run<{vector}, {rounds}, true, false, true, false>")),
                (true, 9) => self.kernel(name, format_args!("_gc_run<{vector}, 1, false, true, true, false>")),
                (true, _) => self.kernel(name, format_args!("_gc_run<1, {ELEMENT_ROUNDS}, true, false, true, false>")),
            }?;
        }
        Ok(())
    }

    fn kernel(&mut self, behind: &str, calls: fmt::Arguments<'_>) -> fmt::Result {
        let name = self.definition.name();
        writeln!(
            self.out,
            "extern \"C\" __global__ void __launch_bounds__({THREADS}) {name}{behind}(_GC_ARGUMENT _gc_Args _gc_args) \
             {{\n    {calls}(_gc_args);\n}}"
        )
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
}

/// Which of the tensors that are not raw.
#[derive(Clone, Copy)]
enum Which {
    All,
    Inputs,
    Outputs,
}

/// Where an element of such a tensor is loaded from or stored to.
struct Address(usize);

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "static_cast<char *>(_gc_args.data[{0}]) + _gc_offsets[{0}]", self.0)
    }
}

/// The lines of a file that are not for readers.
fn code(file: &str) -> impl Iterator<Item = &str> {
    file.lines().filter(|line| !line.trim_start().starts_with("//") && !line.trim().is_empty())
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
