//! What the user wrote: the texts of a kernel, and what its parameters are.

use crate::ffi::error::{Result, error, sentence};

use super::{
    brackets,
    parameters::{self, Of, Parameter},
};

/// NVRTC's options that a definition has.
pub const MOST_OPTIONS: usize = 63;

/// Whether a text has the word "include", as #include, #include_next and __has_include have it; also broken over lines.
fn includes_files(text: &[u8]) -> bool {
    let begins = |mut text: &[u8]| {
        b"include".iter().all(|letter| {
            while let Some(rest) = text.strip_prefix(b"\\\n") {
                text = rest;
            }
            text.split_off_first() == Some(letter)
        })
    };
    (0..text.len()).any(|at| begins(&text[at..]))
}

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

/// The texts that are code, with what messages call them.
pub const CODE: [(Text, &str); 8] = [
    (Text::Preamble, "preamble"),
    (Text::LoopPrep, "loop_prep"),
    (Text::Operation, "operation"),
    (Text::AfterLoop, "after_loop"),
    (Text::Map, "map"),
    (Text::Reduce, "reduce"),
    (Text::PostMap, "post_map"),
    (Text::Identity, "identity"),
];

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

    /// Whether what is compiled depends on files: what they say may be another the next time.
    pub fn reads_files(&self) -> bool {
        let includes = |option: &String| {
            ["-I", "--include-path", "-include", "--pre-include", "-include-pch", "--use-pch"]
                .iter()
                .any(|prefix| option.starts_with(prefix))
        };
        self.texts.iter().flatten().any(|text| includes_files(text.as_bytes())) || self.options.iter().any(includes)
    }

    /// Why it does not compile: in the compiler's words, unless they are about a line that is not the user's and a text
    /// has a bracket too many or too few. Counted only then, for #if may choose one of two.
    pub fn explain(&self, why: String) -> String {
        let name = self.name();
        let place = why.strip_prefix(name).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(&why);
        let is_in = |file: &str| place.strip_prefix(file).is_some_and(|rest| rest.starts_with('('));
        if CODE.iter().any(|&(_, file)| is_in(file)) {
            return why;
        }
        let found = CODE.iter().find_map(|&(text, file)| Some((file, brackets::unbalanced(self.text(text))?)));
        match found {
            Some((file, (line, what))) => sentence(format_args!("{name}: {file}({line}): error: {what}")),
            None => why,
        }
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
            // An operation may do nothing.
            if !self.has(text) && (self.is_reduction || self.texts[text as usize].is_none()) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_files_say_is_never_kept() {
        for (text, options, expected) in [
            ("int x;", &["--fmad=false", "-DINCLUDE"][..], false),
            ("#include <x>", &[], true),
            ("#if __has_include(<x>)", &[], true),
            ("#inc\\\n\\\nlude <x>", &[], true),
            ("#define X inc \\\n    lude", &[], false),
            ("an inc", &[], false),
            ("int x;", &["-I/x"], true),
            ("int x;", &["-I", "/x"], true),
            ("int x;", &["--include-path=/x"], true),
            ("int x;", &["--pre-include=x"], true),
        ] {
            let mut texts = Texts::default();
            for (which, text) in [(Text::Outputs, "T y"), (Text::Operation, ""), (Text::Preamble, text)] {
                texts[which as usize] = Some(text.into());
            }
            let options: Vec<String> = options.iter().map(|&option| option.into()).collect();
            let definition = Definition::new(false, texts, options.clone(), false).unwrap();
            assert_eq!(definition.reads_files(), expected, "{text} {options:?}");
        }
    }
}
