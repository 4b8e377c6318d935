//! Source text of a kernel: the user's code inside loops over the elements of tensors.
//!
//! Each specialization has its own source, with the entries that its layouts need. Their argument is one struct of
//! 64-bit words, which [`super::loops`] fills in by [`Layout`].

use std::fmt::{self, Write};

use arrayvec::ArrayVec;

use crate::{
    dlpack::Dtype,
    ffi::error::{Error, Result, error},
};

use super::{
    definition::{Definition, Text},
    entries::{Entries, Entry},
    layout::{Binding, BindingKind, Layout, OWN_TYPE_BYTES, SHORT_BYTES, Specialization, THREADS},
    parameters::{self, ElementType, MOST},
    types,
};

/// Beginning of every source, and code for sources with 16-bit floats.
const BEGINNING: &str = include_str!("../../kernels/compiled.cuh");
const DEVICE: &str = include_str!("../../include/gradcodec/device.cuh");
const HALVES: &str = include_str!("../../kernels/compiled_halves.cuh");

/// Templates of elementwise kernels and of reductions: see [`Writer::template`].
const OPERATION: &str = include_str!("../../kernels/compiled_elementwise.cuh");
const REDUCE: &str = include_str!("../../kernels/compiled_reduction.cuh");

/// Code that few layouts need, added only for them to save compile time: tiles, and more entries for both templates.
const TILE: &str = include_str!("../../kernels/compiled_tile.cuh");
const OPERATION_IN_TILES: &str = include_str!("../../kernels/compiled_elementwise_tiles.cuh");
const REDUCE_SHORT: &str = include_str!("../../kernels/compiled_reduction_short.cuh");

/// Alignment in bytes of the workspace and of shared memory, for values of a `reduce_type` that the user defines.
const OWN_TYPE_ALIGNMENT: usize = 16;

/// Members of the argument before the addresses of tensors.
const ELEMENTWISE_HEAD: &str = "\
unsigned long long size, units;
unsigned n_loops, ones, blocks, log_width;
";
const REDUCTION_HEAD: &str = "\
unsigned long long kept, reduced, chunk, tiles;
unsigned splits, log_across, log_second, bytes, n_kept, n_reduced, ones, at_once;
void *partials;
";

/// Code around the statements for one element: `continue` and `break` end that element, not its vector.
const ELEMENT: [&str; 2] = ["do {", ";} while (false);"];

/// Code around statements that may contain `return`: a lambda, which hides structured bindings of loop_prep and labels.
const RETURNING_ELEMENT: [&str; 2] = ["[&] { do {", ";} while (false); }();"];

/// Sizes that the texts of a reduction may use.
const SIZES: &str = "\
const _gc::Indexer _in_ind = {static_cast<ptrdiff_t>(_gc_args.kept * _gc_args.reduced)};
const _gc::Indexer _out_ind = {static_cast<ptrdiff_t>(_gc_args.kept)};
(void)_in_ind, (void)_out_ind;
";

/// Type of int64_t if files are included, which may declare it, too: long in the host's headers, long long in NVIDIA's.
const BESIDE_FILES: &str = "\
#if __has_include(<stdint.h>) && !__has_include(<cuda/std/cstdint>)
#define _GC_INT64 long
#endif
";

/// Macros for the 16-bit floats that are CuPy's classes. Before CuPy 14, only float16 was one, in another header.
const BESIDE_CUPY: &str = "\
#if __has_include(<cupy/float16.cuh>)
#define _GC_FLOAT16_IS_CUPYS
#define _GC_BFLOAT16_IS_CUPYS
#elif __has_include(<cupy/carray.cuh>)
#define _GC_FLOAT16_IS_CUPYS
#endif
";

/// Includes of CuPy's classes, for sources that use 16-bit floats.
const HALVES_OF_CUPY: &str = "\
#ifdef _GC_BFLOAT16_IS_CUPYS
#include <cupy/float16.cuh>
#include <cupy/bfloat16.cuh>
#elif defined(_GC_FLOAT16_IS_CUPYS)
#include <cupy/carray.cuh>
#endif
";

/// Namespace around everything after the preamble. Code in it uses the integer types of an included header, or else
/// those of kernels/compiled.cuh.
const OPEN_NAMESPACE: &str = "\
namespace _gc_user {
typedef ::int8_t int8_t;
typedef ::int16_t int16_t;
typedef ::int32_t int32_t;
typedef ::int64_t int64_t;
typedef ::uint8_t uint8_t;
typedef ::uint16_t uint16_t;
typedef ::uint32_t uint32_t;
typedef ::uint64_t uint64_t;
typedef ::intptr_t intptr_t;
typedef ::uintptr_t uintptr_t;
";
const CLOSE_NAMESPACE: &str = "}";

/// Text that returns an error if memory cannot be allocated.
struct Output(String);

impl Write for Output {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.try_reserve(text.len()).map_err(|_| fmt::Error)?;
        self.0.push_str(text);
        Ok(())
    }
}

/// Generates the source of a specialization with these entries.
pub fn generate(definition: &Definition, specialization: &Specialization, entries: Entries) -> Result<String> {
    let layout = Layout::of(definition, specialization)?;
    let (bindings, out) = (&specialization.bindings, Output(String::new()));
    Writer { definition, bindings, layout, entries, out }.write().map_err(|_| out_of_memory(definition))
}

fn out_of_memory(definition: &Definition) -> Error {
    error!(OutOfMemory, "{}: cannot allocate its source", definition.name())
}

struct Writer<'a> {
    definition: &'a Definition,
    bindings: &'a [Binding],
    layout: Layout,
    entries: Entries,
    out: Output,
}

impl<'a> Writer<'a> {
    fn write(mut self) -> std::result::Result<String, fmt::Error> {
        let reads_files = self.definition.reads_files();
        if reads_files {
            self.lines(BESIDE_FILES)?;
        }
        self.lines(BEGINNING)?;
        let entries = self.entries;
        let has_tiles = self.turns() || entries.has(Entry::Tiles);
        if has_tiles {
            self.lines(TILE)?;
        }
        let names_halves = self.names_halves();
        if names_halves || self.definition.has_macros() {
            if reads_files {
                self.lines(BESIDE_CUPY)?;
            }
            if reads_files && names_halves {
                self.lines(HALVES_OF_CUPY)?;
            }
            self.lines(DEVICE)?;
            self.lines(HALVES)?;
        }
        self.letters()?;
        self.users(Text::Preamble, "preamble", "", "")?;
        self.lines(OPEN_NAMESPACE)?;
        self.arguments()?;
        if self.definition.is_reduction {
            self.reduce_type()?;
            self.template(REDUCE)?;
            if entries.has(Entry::ShortRows) {
                self.template(REDUCE_SHORT)?;
            }
        } else {
            self.template(OPERATION)?;
            if has_tiles {
                self.template(OPERATION_IN_TILES)?;
            }
        }
        self.entries()?;
        self.lines(CLOSE_NAMESPACE)?;
        Ok(self.out.0)
    }

    /// Returns true if an input may be transposed.
    fn turns(&self) -> bool {
        self.entries.has(Entry::TransposedTiles)
    }

    /// Writes a file without comments and blank lines, since it is compiled each time and is part of the cache's key.
    fn lines(&mut self, file: &str) -> fmt::Result {
        code(file).try_for_each(|line| writeln!(self.out, "{line}"))
    }

    /// Returns true if a parameter or a text uses 16-bit floats or device.cuh.
    fn names_halves(&self) -> bool {
        let words = ["float16", "bfloat16", "gradcodec"];
        let is_named = |text: &String| words.iter().any(|word| parameters::mentions(text, word));
        self.bindings.iter().any(|binding| matches!(binding.dtype, Dtype::F16 | Dtype::BF16))
            || self.definition.texts.iter().flatten().any(is_named)
    }

    fn cpp(&self, index: usize) -> &'static str {
        types::in_cpp(self.bindings[index].dtype)
    }

    /// Returns the parameters of one kind: the index of each among all parameters, and among the ones of its kind.
    fn of_kind(&self, is: fn(BindingKind) -> bool) -> ArrayVec<(usize, usize), MOST> {
        let bindings = self.bindings.iter().enumerate();
        bindings
            .filter(|(_, binding)| is(binding.kind))
            .map(|(index, _)| index)
            .enumerate()
            .map(|(k, index)| (index, k))
            .collect()
    }

    fn tensors(&self) -> ArrayVec<(usize, usize), MOST> {
        self.of_kind(|kind| kind == BindingKind::Tensor)
    }

    fn letters(&mut self) -> fmt::Result {
        let parameters = &self.definition.parameters;
        for (index, parameter) in parameters.iter().enumerate() {
            if let ElementType::Letter(letter) = parameter.of
                && parameters[..index].iter().all(|other| other.of != parameter.of)
            {
                writeln!(self.out, "typedef {} {};", self.cpp(index), char::from(letter))?;
            }
        }
        Ok(())
    }

    /// Writes a text of the user's between `before` and `after`. Its lines are numbered from 1 in errors.
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

    /// Writes the statements for one element.
    fn element(&mut self, text: Text, name: &str) -> fmt::Result {
        let may_return = parameters::mentions(self.definition.text(text), "return") || self.definition.has_macros();
        let [before, after] = if may_return { RETURNING_ELEMENT } else { ELEMENT };
        self.users(text, name, before, after)
    }

    fn arguments(&mut self) -> fmt::Result {
        let (tensors, loops) = (self.layout.tensors.max(1), self.layout.loops);
        self.out.write_str("struct _gc_Args {\n")?;
        self.lines(if self.definition.is_reduction { REDUCTION_HEAD } else { ELEMENTWISE_HEAD })?;
        let raws = self.of_kind(|kind| matches!(kind, BindingKind::Raw { .. }));
        let scalars = self.of_kind(|kind| kind == BindingKind::Scalar);
        writeln!(self.out, "    void *data[{tensors}];")?;
        for index in 0..self.bindings.len() {
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
        let (ndim, contiguous) = match self.bindings[index].kind {
            BindingKind::Raw { ndim, contiguous } => (ndim, contiguous),
            _ => (0, true),
        };
        RawType { cpp: self.cpp(index), is_input: index < self.definition.inputs, ndim, contiguous }
    }

    /// Declares raw and scalar parameters under the user's names.
    fn whole_parameters(&mut self) -> fmt::Result {
        for index in 0..self.bindings.len() {
            let (name, cpp) = (&self.definition.parameters[index].name, self.cpp(index));
            match self.bindings[index].kind {
                BindingKind::Tensor => {}
                BindingKind::Raw { .. } => {
                    let kind = self.raw(index);
                    self.out.write_str("    const ")?;
                    kind.write_to(&mut self.out)?;
                    writeln!(self.out, " &{name} = _gc_args.raw{index};")?;
                }
                BindingKind::Scalar => {
                    writeln!(self.out, "    const {cpp} {name} = _gc::scalar<{cpp}>(_gc_args.scalar{index});")?;
                }
            }
        }
        Ok(())
    }

    /// Declares the number of elements as `n`, unless a parameter has that name.
    fn size_as_n(&mut self, size: &str) -> fmt::Result {
        if self.definition.parameters.iter().any(|parameter| parameter.name == "n") {
            return Ok(());
        }
        writeln!(self.out, "const ptrdiff_t n = static_cast<ptrdiff_t>(_gc_args.{size});\n(void)n;")
    }

    /// Writes a template. Code of this specialization replaces each line that is only a name in capitals.
    fn template(&mut self, file: &'static str) -> fmt::Result {
        for line in code(file) {
            match line.trim_start() {
                "_GC_WHOLE_PARAMETERS" => self.whole_parameters(),
                "_GC_SIZES" => self.lines(SIZES).and_then(|()| self.size_as_n("reduced")),
                "_GC_N" => self.size_as_n("size"),
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
                "_GC_TURN_INPUTS" if !self.turns() => Ok(()),
                "_GC_TURN_INPUTS" => self.each(Which::Inputs, |out, _, index, k| {
                    writeln!(out, "if (_gc_share.is_turned({k})) _gc_share.turn(_gc_{index}, _gc_args.data[{k}], {k});")
                }),
                "_GC_SPREAD_ROUND" => self.spread_round(),
                "_GC_LOAD_ROUND_OF_INPUTS" => self.load_round(Which::Inputs),
                "_GC_LOAD_ONE_OF_INPUTS" => self.each(Which::Inputs, |out, cpp, index, k| {
                    let address = Address::Inline(k);
                    writeln!(out, "_gc_{index}[_gc_r].set(_gc_m, _gc::load_one<{cpp}>({address}, _gc_BYTES));")
                }),
                "_GC_LOAD_LAST_OF_INPUTS" => self.each(Which::Inputs, |out, cpp, index, k| {
                    let address = Address::Inline(k);
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

    /// Calls `write` for each tensor that is not raw, with its C++ type, its index among the parameters, and its index
    /// among these tensors.
    fn each(
        &mut self, which: Which, mut write: impl FnMut(&mut Output, &str, usize, usize) -> fmt::Result,
    ) -> fmt::Result {
        let inputs = self.definition.inputs;
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

    /// Declares elements of tensors under the user's names.
    fn name(&mut self, which: Which, at: &str) -> fmt::Result {
        let (parameters, inputs) = (&self.definition.parameters, self.definition.inputs);
        self.each(which, |out, cpp, index, _| {
            let name = &parameters[index].name;
            if index < inputs {
                writeln!(out, "const {cpp} {name} = _gc_{index}{at};")
            } else {
                writeln!(out, "{cpp} &{name} = _gc_{index}{at};")
            }
        })
    }

    /// Writes the loads of a round, of outputs, too, which the operation need not set. Compilers drop unused loads.
    fn load_round(&mut self, which: Which) -> fmt::Result {
        let (inputs, may_turn) = (self.definition.inputs, self.turns());
        self.each(which, |out, cpp, index, k| {
            let address = match which {
                Which::All => Address::Ready(k),
                _ => Address::Inline(k),
            };
            if index < inputs {
                if may_turn {
                    writeln!(out, "if (!_gc_share.is_turned({k}))")?;
                }
                writeln!(out, "_gc_{index}[_gc_r].load({address}, _gc_args.ones >> {k} & 1, _gc_BYTES);")
            } else {
                writeln!(out, "if (_gc_V > 1) _gc::load(_gc_{index}[_gc_r], {address});")?;
                writeln!(out, "else _gc_{index}[_gc_r][0] = _gc::load_one<{cpp}>({address}, _gc_BYTES);")
            }
        })
    }

    /// Writes code that copies a broadcast element to the whole vector.
    fn spread_round(&mut self) -> fmt::Result {
        self.each(Which::Inputs, |out, _, index, k| {
            writeln!(out, "_gc_{index}[_gc_r].spread(_gc_args.ones >> {k} & 1);")
        })
    }

    fn store_round(&mut self) -> fmt::Result {
        self.each(Which::Outputs, |out, _, index, k| {
            let address = Address::Ready(k);
            writeln!(out, "if (_gc_V > 1) _gc::store(_gc_{index}[_gc_r], {address});")?;
            writeln!(out, "else _gc::store_one(_gc_{index}[_gc_r][0], {address}, _gc_BYTES);")
        })
    }

    /// Writes the call of the user's `map` for one element.
    fn mapped(&mut self, at: &str) -> fmt::Result {
        write!(self.out, "const _type_reduce _gc_x = _gc_map(_gc_args, static_cast<ptrdiff_t>(_gc_number)")?;
        self.each(Which::Inputs, |out, _, index, _| write!(out, ", _gc_{index}{at}"))?;
        writeln!(self.out, ");")
    }

    fn finish(&mut self) -> fmt::Result {
        write!(self.out, "_gc_finish(_gc_args, _gc_one, static_cast<ptrdiff_t>(_gc_number)")?;
        self.each(Which::Outputs, |out, _, _, k| write!(out, ", {}", Address::Inline(k)))?;
        writeln!(self.out, ");")
    }

    /// Writes the requested entries. They take most of the compile time.
    fn entries(&mut self) -> fmt::Result {
        let definition: &'a Definition = self.definition;
        for &entry in Entry::all(definition.is_reduction).iter().filter(|&&entry| self.entries.has(entry)) {
            let (name, suffix) = (definition.name(), entry.suffix());
            write!(
                self.out,
                "extern \"C\" __global__ void __launch_bounds__({THREADS}) {name}{suffix}(_GC_ARGUMENT _gc_Args _gc_args) \
                 {{\n    "
            )?;
            entry.write_function(&self.layout, &mut self.out)?;
            writeln!(self.out, "(_gc_args);\n}}")?;
        }
        Ok(())
    }

    fn reduce_type(&mut self) -> fmt::Result {
        let definition: &'a Definition = self.definition;
        let text = definition.text(Text::ReduceType).trim();
        // A letter is a typedef already.
        let cpp = if text.is_empty() {
            self.cpp(self.definition.inputs)
        } else {
            types::of_name(text).map_or(text, |dtype| types::in_cpp(dtype))
        };
        writeln!(
            self.out,
            "typedef {cpp} _type_reduce;\nstatic_assert(sizeof(_type_reduce) <= {OWN_TYPE_BYTES}, \"reduce_type: at most \
             {OWN_TYPE_BYTES} bytes\");\nstatic_assert(alignof(_type_reduce) <= {OWN_TYPE_ALIGNMENT}, \"reduce_type: aligned to \
             at most {OWN_TYPE_ALIGNMENT} bytes\");\nenum : unsigned {{ _gc_SHORT_BYTES = {SHORT_BYTES} }};"
        )
    }
}

/// Selection among the tensors that are not raw.
#[derive(Clone, Copy)]
enum Which {
    All,
    Inputs,
    Outputs,
}

/// Expression for the address of an element: `Inline` computes it in place, `Ready` was computed for the round.
enum Address {
    Inline(usize),
    Ready(usize),
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline(k) => write!(out, "static_cast<char *>(_gc_args.data[{k}]) + _gc_offsets[{k}]"),
            Self::Ready(k) => write!(out, "_gc_at[_gc_r].at(_gc_args.data, {k})"),
        }
    }
}

/// Returns the lines of a file without comments and blank lines.
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
