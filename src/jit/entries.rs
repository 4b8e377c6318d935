//! Kernels that a source may contain. Each is a separate entry, so a source without the others compiles fast.

use std::fmt;

use super::layout::{ELEMENT_ROUNDS, Layout, TILE_ROUNDS};

/// Entry of a source, for one kind of access and one kind of loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    // Elementwise entries access contiguous vectors, elements, elements at any address, vectors in nested loops, or
    // elements in tiles of the two innermost loops.
    Vectors,
    Elements,
    Bytes,
    NestedVectors,
    Tiles,
    /// Tiles with transposed inputs.
    TransposedTiles,
    // Reductions: neighbouring threads have neighbouring elements of one output (rows) or one output each (columns).
    Rows,
    RowElements,
    Columns,
    ColumnElements,
    /// Second launch, which combines partial results.
    Second,
    /// Elements at any address.
    RowBytes,
    ColumnBytes,
    // In nested entries, an output's elements are in several loops, or in none.
    NestedRows,
    NestedColumns,
    NestedRowElements,
    NestedColumnElements,
    /// Elements of adjacent short rows, through shared memory.
    ShortRows,
}

use Entry::*;

const ELEMENTWISE: [Entry; 6] = [Vectors, Elements, Bytes, NestedVectors, Tiles, TransposedTiles];
const REDUCTION: [Entry; 12] = [
    Rows,
    RowElements,
    Columns,
    ColumnElements,
    Second,
    RowBytes,
    ColumnBytes,
    NestedRows,
    NestedColumns,
    NestedRowElements,
    NestedColumnElements,
    ShortRows,
];

/// Number of entries.
pub const ENTRIES: usize = ELEMENTWISE.len() + REDUCTION.len();

/// Access of a thread to its elements: in vectors, aligned to their size, or at any address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Vectors,
    Elements,
    Bytes,
}

impl Entry {
    /// Returns the entries of reductions or of elementwise kernels.
    pub fn all(is_reduction: bool) -> &'static [Self] {
        if is_reduction { &REDUCTION } else { &ELEMENTWISE }
    }

    pub fn elementwise(access: Access, is_nested: bool) -> Self {
        match access {
            Access::Vectors if is_nested => NestedVectors,
            Access::Vectors => Vectors,
            Access::Elements => Elements,
            Access::Bytes => Bytes,
        }
    }

    /// Returns the first entry of a reduction. `is_nested`: the elements of an output are in several loops, or in none.
    pub fn reduction(columns: bool, access: Access, is_nested: bool) -> Self {
        match (columns, access, is_nested) {
            (false, Access::Vectors, false) => Rows,
            (false, Access::Vectors, true) => NestedRows,
            (false, Access::Elements, false) => RowElements,
            (false, Access::Elements, true) => NestedRowElements,
            (false, Access::Bytes, _) => RowBytes,
            (true, Access::Vectors, false) => Columns,
            (true, Access::Vectors, true) => NestedColumns,
            (true, Access::Elements, false) => ColumnElements,
            (true, Access::Elements, true) => NestedColumnElements,
            (true, Access::Bytes, _) => ColumnBytes,
        }
    }

    /// Returns the suffix of the entry after the definition's name.
    pub fn suffix(self) -> &'static str {
        match self {
            Vectors | Rows => "",
            Elements => "_elements",
            Bytes => "_bytes",
            NestedVectors | NestedRows => "_nested",
            Tiles => "_tiles",
            TransposedTiles => "_turned_tiles",
            RowElements => "_row",
            Columns => "_columns",
            ColumnElements => "_column",
            Second => "_second",
            RowBytes => "_row_bytes",
            ColumnBytes => "_column_bytes",
            NestedColumns => "_nested_columns",
            NestedRowElements => "_nested_row",
            NestedColumnElements => "_nested_column",
            ShortRows => "_short_rows",
        }
    }

    /// Writes the name of the entry's function in kernels/compiled_*.cuh.
    pub fn write_function(self, layout: &Layout, out: &mut impl fmt::Write) -> fmt::Result {
        let Layout { vector, rounds, singles, .. } = *layout;
        let (columns, row) = (2 * rounds, (singles / vector).max(1));
        match self {
            Vectors => write!(out, "_gc_vectors<{vector}, {rounds}>"),
            Elements => write!(out, "_gc_block<1, {ELEMENT_ROUNDS}, true, false>"),
            Bytes => write!(out, "_gc_block<1, 1, true, true>"),
            NestedVectors => write!(out, "_gc_block<{vector}, {rounds}, true, false>"),
            Tiles => write!(out, "_gc_tile<{TILE_ROUNDS}, false>"),
            TransposedTiles => write!(out, "_gc_tile<{TILE_ROUNDS}, true>"),
            Rows => write!(out, "_gc_run<{vector}, {rounds}, false, false, false, false>"),
            RowElements => write!(out, "_gc_run<{vector}, {row}, false, true, false, false>"),
            Columns => write!(out, "_gc_run<{vector}, {columns}, true, false, false, false>"),
            ColumnElements => write!(out, "_gc_run<1, {singles}, true, false, false, false>"),
            Second => write!(out, "_gc_run_second"),
            RowBytes => write!(out, "_gc_run<{vector}, 1, false, true, true, true>"),
            ColumnBytes => write!(out, "_gc_run<1, 1, true, false, true, true>"),
            NestedRows => write!(out, "_gc_run<{vector}, {rounds}, false, false, true, false>"),
            NestedColumns => write!(out, "_gc_run<{vector}, {rounds}, true, false, true, false>"),
            NestedRowElements => write!(out, "_gc_run<{vector}, 1, false, true, true, false>"),
            NestedColumnElements => write!(out, "_gc_run<1, {ELEMENT_ROUNDS}, true, false, true, false>"),
            ShortRows => write!(out, "_gc_run_short<{vector}, {}>", (singles / 2).max(1)),
        }
    }
}

/// Set of entries, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entries(u32);

impl Entries {
    pub fn all(is_reduction: bool) -> Self {
        Entry::all(is_reduction).iter().fold(Self::default(), |some, &entry| some.with(entry))
    }

    pub fn with(self, entry: Entry) -> Self {
        Self(self.0 | 1 << entry as u32)
    }

    pub fn has(self, entry: Entry) -> bool {
        self.0 >> entry as u32 & 1 != 0
    }

    /// Returns true if the set contains all of `others`.
    pub fn include(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_entry_has_its_own_name_and_bit_and_is_requested() {
        let nested = [false, true];
        let accesses = [Access::Vectors, Access::Elements, Access::Bytes];
        let of_elements = accesses.map(|access| nested.map(|nested| Entry::elementwise(access, nested)));
        let columns = [false, true]
            .map(|columns| accesses.map(|access| nested.map(|nested| Entry::reduction(columns, access, nested))));
        let of_elements = of_elements.into_iter().flatten().chain([Tiles, TransposedTiles]);
        let reductions = columns.into_iter().flatten().flatten().chain([Second, ShortRows]);
        for (is_reduction, chosen) in [(false, of_elements.collect::<Vec<_>>()), (true, reductions.collect())] {
            let all = Entry::all(is_reduction);
            assert!(all.iter().all(|entry| chosen.contains(entry)) && chosen.iter().all(|entry| all.contains(entry)));
            assert_eq!(all.iter().map(|entry| entry.suffix()).collect::<HashSet<_>>().len(), all.len());
            let entries = Entries::all(is_reduction);
            assert_eq!(entries.0.count_ones() as usize, all.len());
        }
    }
}
