//! Names of arguments in error messages.

use std::fmt;

/// Name of an argument in messages: `src`, `chunks[3]`. It is passed by reference: a copy in every call would wait for
/// bytes that have just been written.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    argument: &'static str,
    index: Option<usize>,
}

impl Name {
    pub const fn new(argument: &'static str) -> Self {
        Self { argument, index: None }
    }

    pub const fn of_item(argument: &'static str, index: usize) -> Self {
        Self { argument, index: Some(index) }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index {
            None => out.write_str(self.argument),
            Some(index) => write!(out, "{}[{index}]", self.argument),
        }
    }
}
