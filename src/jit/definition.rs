//! Definition of a kernel by the user: its texts, options and parameters.

use crate::ffi::error::{Result, error, sentence};

use super::{
    brackets,
    parameters::{self, ElementType, Parameter},
};

/// Maximum number of NVRTC options in a definition.
pub const MOST_OPTIONS: usize = 63;

/// Returns true if a text contains "include", as in #include_next or __has_include, also broken by line continuations.
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

/// Texts of a kernel's definition.
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

/// Texts that are code, with their names in messages.
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

/// Texts by [`Text`]; None for a text that was not given.
pub type Texts = [Option<String>; TEXTS];

/// Definition of a kernel, checked as far as possible without tensors.
pub struct Definition {
    pub is_reduction: bool,
    pub texts: Texts,
    /// Options of NVRTC.
    pub options: Vec<String>,
    /// True if a * b + c becomes an FMA.
    pub contracts: bool,
    /// Parameters, inputs first.
    pub parameters: Vec<Parameter>,
    /// Number of inputs among the parameters.
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

    /// Returns a text; "" if it was not given.
    pub fn text(&self, which: Text) -> &str {
        self.texts[which as usize].as_deref().unwrap_or_default()
    }

    pub fn has(&self, which: Text) -> bool {
        !self.text(which).trim().is_empty()
    }

    /// Returns the kernel's name; "kernel" if none was given.
    pub fn name(&self) -> &str {
        if self.has(Text::Name) { self.text(Text::Name) } else { "kernel" }
    }

    /// Returns true if the user's code, apart from `reduce` and `identity`, contains this word.
    pub fn mentions(&self, word: &str) -> bool {
        use Text::{AfterLoop, LoopPrep, Map, Operation, PostMap, Preamble};
        let texts = [Preamble, Operation, LoopPrep, AfterLoop, Map, PostMap];
        texts.iter().any(|&text| parameters::mentions(self.text(text), word))
    }

    /// Returns true if macros of the texts, the options or included files may expand to words that no text contains.
    pub fn has_macros(&self) -> bool {
        let defines = |option: &String| {
            ["-D", "--define-macro", "-include", "--pre-include"].iter().any(|prefix| option.starts_with(prefix))
        };
        let has_directives = |text: &String| text.contains('#') || text.contains("%:"); // which also stands for #
        self.texts.iter().flatten().any(has_directives) || self.options.iter().any(defines)
    }

    /// Returns true if the compiled code depends on files, whose contents may change.
    pub fn reads_files(&self) -> bool {
        let includes = |option: &String| {
            ["-I", "--include-path", "-include", "--pre-include", "-include-pch", "--use-pch"]
                .iter()
                .any(|prefix| option.starts_with(prefix))
        };
        self.texts.iter().flatten().any(|text| includes_files(text.as_bytes())) || self.options.iter().any(includes)
    }

    /// Returns the message for code that does not compile: `why`, or the first unbalanced bracket if `why` names no
    /// line of the user's. Brackets are counted only in that case, since #if may choose one of two.
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
            // `operation` may be empty, but not missing.
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
                && !all.iter().any(|parameter| parameter.of == ElementType::Letter(letter))
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

    fn with_preamble(text: &str, options: &[&str]) -> Definition {
        let mut texts = Texts::default();
        for (which, text) in [(Text::Outputs, "T y"), (Text::Operation, ""), (Text::Preamble, text)] {
            texts[which as usize] = Some(text.into());
        }
        Definition::new(false, texts, options.iter().map(|&option| option.into()).collect(), false).unwrap()
    }

    #[test]
    fn sources_that_read_files_are_not_cached() {
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
            assert_eq!(with_preamble(text, options).reads_files(), expected, "{text} {options:?}");
        }
    }

    #[test]
    fn macros_are_found_in_either_spelling() {
        for (text, expected) in [("int x;", false), ("#define Y x", true), ("%:define Y x", true)] {
            assert_eq!(with_preamble(text, &[]).has_macros(), expected, "{text}");
        }
    }
}
