//! Lists whose size comes from the caller: without memory for them a call fails with OUT_OF_MEMORY, where std's would
//! abort.

use std::fmt::Display;

use super::error::{Result, error};

/// An empty list with room for `count` items. `what`: what these are, for the message.
pub fn list<T>(count: usize, what: impl Display) -> Result<Vec<T>> {
    let mut list = Vec::new();
    let room = list.try_reserve_exact(count);
    room.map_err(|_| error!(OutOfMemory, "cannot allocate a list of {count} {what}")).map(|()| list)
}

/// Makes room in a list for so many items more.
pub fn reserve<T>(list: &mut Vec<T>, more: usize, what: impl Display) -> Result<()> {
    let all = list.len().saturating_add(more);
    list.try_reserve(more).map_err(|_| error!(OutOfMemory, "cannot allocate a list of {all} {what}"))
}
