//! Plan of a copy: the place of each element on both sides, and its conversion.
//!
//! Elements may be copied in any order. Loops are sorted by their steps in the target, the largest step outside, and
//! never step backwards there.
//!
//! ```text
//! target [1024, 512] compact, source its transpose, float32:  1024 at [2048, 4], 512 at [4, 4096]
//! target [4, 512] compact, source [512] broadcast:            4 at [2048, 0], 512 at [4, 4]
//! ```
#![forbid(unsafe_code)]

use crate::dlpack::{Dtype, loops::Loops};

/// Conversion of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conversion {
    /// Copy of an element's bytes, of which there are this many.
    Bytes(i64),
    Cast {
        from: Dtype,
        to: Dtype,
    },
}

impl Conversion {
    /// Returns the bytes of an element, of the target and of the source.
    pub fn sizes(self) -> [i64; 2] {
        match self {
            Self::Bytes(size) => [size; 2],
            Self::Cast { from, to } => [to.size as i64, from.size as i64],
        }
    }
}

/// Plan of a copy. Offsets and strides are in bytes, of the target first, then of the source.
#[derive(Clone, Debug)]
pub struct CopyPlan {
    pub conversion: Conversion,
    /// Offset of the first round from element 0 of each side.
    pub starts: [i64; 2],
    /// Loops: a round per element. The target's strides are not negative; a broadcast source has strides of 0.
    pub loops: Loops<2>,
}

/// Class of a plan, by which a device chooses its method. A plan has the first class that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Contiguous on both sides.
    Flat,
    /// The innermost loop is contiguous on both sides.
    Rows,
    /// The innermost loop is contiguous on the target's side, and `across`, another, on the source's: a transposed matrix.
    Transposed { across: usize },
    /// Anything else: every other element, a broadcast along the last dimension, all of it backwards.
    General,
}

impl CopyPlan {
    /// Makes a plan. `dims`: size and strides in bytes of each dimension of the shape, which is the same on both sides
    /// after broadcasting. The product of the sizes must stay below 2^63.
    #[inline(never)] // otherwise the caller's stack has the plan twice
    pub fn new(conversion: Conversion, dims: impl Iterator<Item = (i64, [i64; 2])> + Clone) -> Self {
        // The plan is built in place, because moving its loops takes as long as a small copy.
        let mut plan = Self { conversion, starts: [0; 2], loops: Loops::new() };
        if dims.clone().any(|(count, _)| count == 0) {
            plan.loops.push(0, [0; 2]); // the other sizes may have any value
            return plan;
        }
        for (count, strides) in dims.filter(|&(count, _)| count > 1) {
            let backwards = strides[0] < 0;
            for (start, stride) in plan.starts.iter_mut().zip(strides) {
                *start += if backwards { (count - 1) * stride } else { 0 };
            }
            plan.loops.push(count, strides.map(|stride| if backwards { -stride } else { stride }));
        }
        plan.loops.sort_by_step();
        plan
    }

    /// Returns the class of this plan.
    pub fn layout(&self) -> Layout {
        let sizes = self.conversion.sizes();
        let Some((inner, outer)) = self.loops.as_slice().split_last() else {
            return Layout::Flat;
        };
        if inner.strides == sizes {
            return if outer.is_empty() { Layout::Flat } else { Layout::Rows };
        }
        let across = outer.iter().rposition(|item| item.strides[1] == sizes[1]);
        match across {
            Some(across) if inner.strides[0] == sizes[0] => Layout::Transposed { across },
            _ => Layout::General,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: Conversion = Conversion::Bytes(4);

    fn plan<const N: usize>(conversion: Conversion, dims: [(i64, [i64; 2]); N]) -> CopyPlan {
        CopyPlan::new(conversion, dims.into_iter())
    }

    fn loops(plan: &CopyPlan) -> Vec<(i64, [i64; 2])> {
        plan.loops.as_slice().iter().map(|item| (item.count, item.strides)).collect()
    }

    #[test]
    fn compact_memory_of_any_shape_is_one_loop() {
        let plan = plan(F32, [(2, [48, 48]), (3, [16, 16]), (1, [7, 9]), (4, [4, 4])]);
        assert_eq!((loops(&plan), plan.layout(), plan.starts), (vec![(24, [4, 4])], Layout::Flat, [0, 0]));
    }

    #[test]
    fn outer_loops_have_the_larger_target_strides_and_none_is_negative() {
        let plan = plan(F32, [(8, [4, -4]), (6, [-64, 32])]);
        assert_eq!((loops(&plan), plan.starts), (vec![(6, [64, -32]), (8, [4, -4])], [-320, 160]));
    }

    #[test]
    fn both_sides_in_the_same_other_order_are_one_loop() {
        let plan = plan(F32, [(6, [4, 4]), (8, [24, 24])]);
        assert_eq!((loops(&plan), plan.layout()), (vec![(48, [4, 4])], Layout::Flat));
    }

    #[test]
    fn classes_of_layouts() {
        assert_eq!(plan(F32, [(8, [64, 128]), (16, [4, 4])]).layout(), Layout::Rows);
        assert_eq!(plan(F32, [(8, [64, 4]), (16, [4, 32])]).layout(), Layout::Transposed { across: 0 });
        assert_eq!(plan(F32, [(8, [64, 0]), (16, [4, 4])]).layout(), Layout::Rows);
        assert_eq!(plan(F32, [(8, [64, 4]), (16, [4, 0])]).layout(), Layout::Transposed { across: 0 });
        assert_eq!(plan(F32, [(16, [4, 8])]).layout(), Layout::General);
        let cast = Conversion::Cast { from: Dtype::F32, to: Dtype::BF16 };
        assert_eq!(plan(cast, [(16, [2, 4])]).layout(), Layout::Flat);
    }

    #[test]
    fn an_empty_copy_has_no_loops() {
        assert_eq!(plan(F32, [(i64::MAX, [4, 4]), (0, [4, 4]), (9, [4, 4])]).loops.count(), 0);
    }
}
