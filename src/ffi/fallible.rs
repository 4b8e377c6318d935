//! Lists whose size depends on the caller. Without memory for them a call fails with OUT_OF_MEMORY, where those of std
//! would abort.

use std::fmt::Display;

use super::error::{Result, error};

/// Returns an empty list with room for `count` items. `what`: the name of the items, for the message.
pub fn list<T>(count: usize, what: impl Display) -> Result<Vec<T>> {
    let mut list = Vec::new();
    let room = list.try_reserve_exact(count);
    room.map_err(|_| error!(OutOfMemory, "cannot allocate a list of {count} {what}")).map(|()| list)
}

/// Makes room in a list for `more` items. `what`: the name of the items, for the message.
pub fn reserve<T>(list: &mut Vec<T>, more: usize, what: impl Display) -> Result<()> {
    let all = list.len().saturating_add(more);
    list.try_reserve(more).map_err(|_| error!(OutOfMemory, "cannot allocate a list of {all} {what}"))
}
