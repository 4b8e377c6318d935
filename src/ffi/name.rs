//! What tensors are called in refusals.

use std::fmt;

/// The name of an argument, as refusals say it: `src`, `chunks[3]`. Lent, not passed: a copy on the way of every call would
/// wait for what has just been written.
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
