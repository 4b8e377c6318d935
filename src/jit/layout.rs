//! Layout of a kernel's argument, which is one struct of 64-bit words.

use arrayvec::ArrayVec;

use crate::{
    dlpack::Dtype,
    ffi::error::{Result, error},
};

use super::{
    definition::{Definition, Text},
    parameters::{ElementType, MOST},
    types,
};

/// Threads of a thread block, as in kernels/compiled.cuh.
pub const THREADS: u32 = 256;

/// Bytes of a vector, the widest access of a thread.
const VECTOR: usize = 16;

/// Number of vectors that a thread has in flight, for all inputs together; doubled in `Entry::Columns`.
const IN_FLIGHT: usize = 4;

/// Number of elements that a thread of a reduction has in flight, for all inputs together, if it cannot use vectors and
/// there is one loop.
const SINGLES_IN_FLIGHT: usize = 16;

/// Number of elements that a thread processes at once if it cannot use vectors.
pub const ELEMENT_ROUNDS: usize = 4;

/// Number of elements of a tile that a thread processes at once.
pub const TILE_ROUNDS: usize = 8;

/// Bytes of a thread block's shared memory for short rows.
pub const SHORT_BYTES: usize = 32 << 10;

/// Maximum size in bytes of a `reduce_type` that the user defines.
pub const OWN_TYPE_BYTES: usize = 32;

/// Maximum number of words in a kernel's argument: every driver accepts 4096 bytes.
pub const MOST_WORDS: usize = 4096 / 8;

/// Number of loops that suffices for most layouts.
const USUAL_LOOPS: usize = 8;

/// Maximum number of loops: see `dlpack::loops`.
const MOST_LOOPS: usize = 62;

/// Form in which the kernel receives a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindingKind {
    /// Tensor of which the kernel gets an element at a time.
    Tensor,
    Raw {
        ndim: u8,
        contiguous: bool,
    },
    /// Input whose value is part of the argument.
    Scalar,
}

/// Dtype and form of a parameter in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    pub dtype: Dtype,
    pub kind: BindingKind,
}

/// Properties of a call that determine its source, apart from the definition and the entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Specialization {
    /// Bindings in the order of the parameters.
    pub bindings: ArrayVec<Binding, MOST>,
    /// True if the layout has room for more than `USUAL_LOOPS` loops.
    pub many_loops: bool,
}

impl Specialization {
    /// Returns the dtype in which a reduction computes; None if the user defines the type.
    pub fn reduce_dtype(&self, definition: &Definition) -> Option<Dtype> {
        let text = definition.text(Text::ReduceType).trim();
        if text.is_empty() {
            return self.bindings.get(definition.inputs).map(|binding| binding.dtype);
        }
        let of_letter = match *text.as_bytes() {
            [letter] => definition.parameters.iter().position(|parameter| parameter.of == ElementType::Letter(letter)),
            _ => None,
        };
        of_letter.map(|index| self.bindings[index].dtype).or(types::of_name(text))
    }
}

/// Layout of the argument in 64-bit words, and the number of elements that a thread processes at once.
#[derive(Default)]
pub struct Layout {
    pub is_reduction: bool,
    /// Number of parameters that are tensors. Inputs precede outputs.
    pub tensors: usize,
    /// Number of elements in a vector.
    pub vector: usize,
    /// Number of vectors that a thread processes at once.
    pub rounds: usize,
    /// Number of elements of each input that a thread of a reduction processes at once if it cannot use vectors.
    pub singles: usize,
    /// Size of a reduced value in bytes; the maximum if the user defines the type.
    pub reduced_bytes: usize,
    /// Number of words before the first loop, including the head.
    pub before_loops: usize,
    pub loops: usize,
}

/// Number of words before the tensors' addresses, for an elementwise kernel and for a reduction: see [`super::source`].
pub const HEAD: [usize; 2] = [4, 9];

impl Layout {
    pub fn of(definition: &Definition, specialization: &Specialization) -> Result<Self> {
        let is_reduction = definition.is_reduction;
        let (inputs, bindings) = (definition.inputs, &specialization.bindings);
        let tensors = || bindings.iter().enumerate().filter(|(_, binding)| binding.kind == BindingKind::Tensor);
        let of_inputs = tensors().filter(|&(index, _)| index < inputs).count();
        // A reduction writes few elements, so only its inputs limit the vector length.
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
