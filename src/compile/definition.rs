//! What the user wrote: the texts of a kernel, and what its parameters are.

use crate::error::{Result, error};

use super::parameters::{self, Of, Parameter};

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

/// By [`Text`]; those that were not given are None.
pub type Texts = [Option<String>; TEXTS];

/// What the user wrote, as far as it can be checked before there are tensors.
pub struct Definition {
    pub is_reduction: bool,
    pub texts: Texts,
    /// Of NVRTC.
    pub options: Vec<String>,
    /// Whether a * b + c becomes an FMA.
    pub contracts: bool,
    /// Inputs first.
    pub parameters: Vec<Parameter>,
    /// How many of them are inputs.
    pub inputs: usize,
}

impl Definition {
    pub fn new(is_reduction: bool, texts: Texts, options: Vec<String>, contracts: bool) -> Result<Self> {
        let mut new = Self { is_reduction, texts, options, contracts, parameters: Vec::new(), inputs: 0 };
        let mut parameters = Vec::new();
        parameters::parse("inputs", new.text(Text::Inputs), &mut parameters)?;
        new.inputs = parameters.len();
        parameters::parse("outputs", new.text(Text::Outputs), &mut parameters)?;
        new.parameters = parameters;
        new.check().map(|()| new)
    }

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

    fn check(&self) -> Result<()> {
        parameters::check_name("name", self.name())?;
        if self.options.len() > MOST_OPTIONS {
            let count = self.options.len();
            return Err(error!(InvalidArgument, "options: {count} options of NVRTC; at most {MOST_OPTIONS} expected"));
        }
        let (all, inputs) = (&self.parameters[..], self.inputs);
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
