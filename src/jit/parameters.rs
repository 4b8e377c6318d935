//! The parameters of a kernel, as CuPy writes them: `"float32 x, raw T y"`.

use std::fmt;

use crate::{
    dlpack::Dtype,
    ffi::error::{Result, error},
};

use super::{owned, types};

/// Maximum number of parameters of a kernel, inputs and outputs together.
pub const MOST: usize = 32;

/// Type of a parameter's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    Type(Dtype),
    /// Dtype of the tensors; all parameters of this letter have the same one.
    Letter(u8),
}

impl fmt::Display for ElementType {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Type(dtype) => dtype.fmt(out),
            Self::Letter(letter) => write!(out, "{}", char::from(letter)),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    pub of: ElementType,
    /// True if the user's code indexes the tensor, instead of getting an element at a time.
    pub raw: bool,
}

/// Parses a list of parameters and adds them to `parameters`. `list`: its name in messages.
pub fn parse(list: &str, text: &str, parameters: &mut Vec<Parameter>) -> Result<()> {
    if text.trim().is_empty() {
        return Ok(());
    }
    for (index, part) in text.split(',').enumerate() {
        let parameter = one(list, index, part)?;
        if parameters.iter().any(|other| other.name == parameter.name) {
            return Err(error!(InvalidArgument, "{list}: {:?} is the name of two parameters", parameter.name));
        }
        if parameters.len() == MOST {
            return Err(error!(InvalidArgument, "{list}: at most {MOST} parameters, with those of the other list"));
        }
        parameters
            .try_reserve(1)
            .map_err(|_| error!(OutOfMemory, "{list}: cannot allocate a list of {} parameters", index + 1))?;
        parameters.push(parameter);
    }
    Ok(())
}

fn one(list: &str, index: usize, text: &str) -> Result<Parameter> {
    let mut words = text.split_whitespace();
    let mut kind = words.next();
    let raw = kind == Some("raw");
    if raw {
        kind = words.next();
    }
    let (Some(kind), Some(name), None) = (kind, words.next(), words.next()) else {
        return Err(error!(
            InvalidArgument,
            "{list}: parameter {index} is {:?}; a type and a name expected, as in \"float32 x\" or \"raw T y\"",
            text.trim()
        ));
    };
    let of = match *kind.as_bytes() {
        [letter] if letter.is_ascii_alphabetic() => ElementType::Letter(letter),
        _ => ElementType::Type(types::of_name(kind).ok_or_else(|| {
            error!(
                InvalidArgument,
                "{list}: {name:?} is of the unknown type {kind:?}; bool, int8 to int64, uint8 to uint64, float16, \
                 bfloat16, float32, float64 or one letter expected"
            )
        })?),
    };
    check_name(list, name)?;
    if name == "i" || name.starts_with('_') {
        return Err(error!(
            InvalidArgument,
            "{list}: {name:?} cannot name a parameter; i and what begins with _ are the kernel's own"
        ));
    }
    Ok(Parameter { name: owned(name)?, of, raw })
}

/// Refuses a name that is not a C identifier.
pub fn check_name(of: &str, name: &str) -> Result<()> {
    let is_word = |letter: u8| letter.is_ascii_alphanumeric() || letter == b'_';
    if name.bytes().all(is_word) && name.bytes().next().is_some_and(|first| !first.is_ascii_digit()) {
        return Ok(());
    }
    Err(error!(InvalidArgument, "{of}: {name:?} is not a name; letters, digits and _ expected, no digit first"))
}

/// Returns true if a C++ text contains this word.
pub fn mentions(text: &str, word: &str) -> bool {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<Parameter>> {
        let mut parameters = Vec::new();
        parse("inputs", text, &mut parameters).map(|()| parameters)
    }

    #[test]
    fn parameters_are_read_as_cupy_writes_them() {
        let float = |name: &str| Parameter { name: name.into(), of: ElementType::Type(Dtype::F32), raw: false };
        assert_eq!(parsed("float32 x,float32  y").unwrap().as_slice(), [float("x"), float("y")]);
        assert_eq!(parsed(" \n").unwrap().as_slice(), []);
        let y = Parameter { name: "y2".into(), of: ElementType::Letter(b'T'), raw: true };
        assert_eq!(parsed("\traw T y2 ").unwrap().as_slice(), [y]);
    }

    #[test]
    fn an_invalid_list_is_refused_with_a_message() {
        for (text, words) in [
            ("x", "\"x\"; a type and a name expected"),
            ("float32 x,", "parameter 1 is \"\""),
            ("raw x", "\"raw x\"; a type and a name"),
            ("raw raw T x", "a type and a name"),
            ("float x", "\"x\" is of the unknown type \"float\""),
            ("complex64 x", "complex64"),
            ("T x, T x", "\"x\" is the name of two parameters"),
            ("T i", "cannot name a parameter"),
            ("T _x", "cannot name a parameter"),
            ("T 1x", "is not a name"),
            ("T x*", "is not a name"),
            ("5 x", "unknown type \"5\""),
        ] {
            let message = parsed(text).unwrap_err().message;
            assert!(message.starts_with("inputs: ") && message.contains(words), "{text}: {message}");
        }
        let many: Vec<String> = (0..=MOST).map(|k| format!("T x{k}")).collect();
        assert!(parsed(&many.join(",")).unwrap_err().message.contains("at most 32"));
    }

    #[test]
    fn identifiers_match_as_whole_words() {
        assert!(mentions("z=x[i]+1", "i") && mentions("_ind.size()", "_ind") && !mentions("if (xi) i2++", "i"));
    }
}
