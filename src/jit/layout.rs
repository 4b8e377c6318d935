//! Where everything is in the argument of a kernel, which is one struct of 64-bit words.

use arrayvec::ArrayVec;

use crate::{
    dlpack::Dtype,
    ffi::error::{Result, error},
};

use super::{
    definition::{Definition, Text},
    parameters::{MOST, Of},
    types,
};

/// Threads of a block, as kernels/compiled.cuh has it.
pub const THREADS: u32 = 256;

/// Bytes that one access moves at full speed.
const VECTOR: usize = 16;

/// Vectors that a thread has in flight, all inputs together; twice as many where it has neighbouring outputs.
const IN_FLIGHT: usize = 4;

/// Elements that a thread of a reduction has in flight, all inputs together, where it cannot have vectors and there is one
/// loop.
const SINGLES_IN_FLIGHT: usize = 16;

/// Elements that a thread does at once where they lie anywhere.
pub const ELEMENT_ROUNDS: usize = 4;

/// Elements of a tile that a thread does at once.
pub const TILE_ROUNDS: usize = 8;

/// Bytes of a block's shared memory for rows that are short.
pub const SHORT_BYTES: usize = 32 << 10;

/// Bytes of a value that is reduced in, where its type is one of the user's.
pub const OWN_TYPE_BYTES: usize = 32;

/// Words of a kernel's argument: the 4096 bytes that every driver takes.
pub const MOST_WORDS: usize = 4096 / 8;

/// Loops that most layouts do with.
const USUAL_LOOPS: usize = 8;

/// As many as there can be: see `dlpack::loops`.
const MOST_LOOPS: usize = 62;

/// How a parameter is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindingKind {
    /// An element at a time.
    Tensor,
    Raw {
        ndim: u8,
        contiguous: bool,
    },
    /// An input whose value travels in the argument.
    Scalar,
}

/// What a parameter is in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    pub dtype: Dtype,
    pub kind: BindingKind,
}

/// What a source is made for, apart from the definition and its entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Specialization {
    /// By parameters.
    pub bindings: ArrayVec<Binding, MOST>,
    /// Whether the layout takes more loops than usual.
    pub many_loops: bool,
}

impl Specialization {
    /// The dtype that a reduction is calculated in; None where it is a type of the user's.
    pub fn reduce_dtype(&self, definition: &Definition) -> Option<Dtype> {
        let text = definition.text(Text::ReduceType).trim();
        if text.is_empty() {
            return self.bindings.get(definition.inputs).map(|binding| binding.dtype);
        }
        let of_letter = match *text.as_bytes() {
            [letter] => definition.parameters.iter().position(|parameter| parameter.of == Of::Letter(letter)),
            _ => None,
        };
        of_letter.map(|index| self.bindings[index].dtype).or(types::of_name(text))
    }
}

/// Where everything is in the argument, in words of 64 bits, and what a thread does at once.
#[derive(Default)]
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
    /// Bytes of a value that is reduced in, or as many as there may be.
    pub reduced_bytes: usize,
    /// Words before the first loop, the head's included.
    pub before_loops: usize,
    pub loops: usize,
}

/// Words before the addresses of tensors: see [`super::source`].
pub const HEAD: [usize; 2] = [4, 9];

impl Layout {
    pub fn of(definition: &Definition, specialization: &Specialization) -> Result<Self> {
        let is_reduction = definition.is_reduction;
        let (inputs, bindings) = (definition.inputs, &specialization.bindings);
        let tensors = || bindings.iter().enumerate().filter(|(_, binding)| binding.kind == BindingKind::Tensor);
        let of_inputs = tensors().filter(|&(index, _)| index < inputs).count();
        // Where elements become fewer, only those that are read count.
        let counted = tensors().filter(|&(index, _)| index < inputs || !is_reduction);
        let largest = counted.map(|(_, binding)| binding.dtype.size).max().unwrap_or(VECTOR);
        let tensors = tensors().count();
        let mut before_loops = HEAD[usize::from(is_reduction)] + tensors.max(1);
        for binding in bindings {
            before_loops += match binding.kind {
                BindingKind::Tensor => 0,
                BindingKind::Raw { ndim, .. } => 2 + 2 * usize::from(ndim.max(1)),
                BindingKind::Scalar => 1,
            };
        }
        let room = MOST_WORDS.saturating_sub(before_loops) / (2 + tensors.max(1));
        let loops = if specialization.many_loops { room.min(MOST_LOOPS) } else { room.min(USUAL_LOOPS) };
        if loops == 0 {
            return Err(error!(
                InvalidArgument,
                "the parameters are too many for one launch: {before_loops} words of at most {MOST_WORDS} without their \
                 layout"
            ));
        }
        let rounds = (IN_FLIGHT / of_inputs.max(1)).max(1);
        let singles = (SINGLES_IN_FLIGHT / of_inputs.max(1)).max(1);
        let reduce_dtype = if is_reduction { specialization.reduce_dtype(definition) } else { None };
        let reduced_bytes = reduce_dtype.map_or(OWN_TYPE_BYTES, |dtype| dtype.size);
        Ok(Self {
            is_reduction,
            tensors,
            vector: VECTOR / largest,
            rounds,
            singles,
            reduced_bytes,
            before_loops,
            loops,
        })
    }

    pub fn words(&self) -> usize {
        self.before_loops + self.loops * (2 + self.tensors.max(1))
    }
}
