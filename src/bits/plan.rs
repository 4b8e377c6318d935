//! Plan of packing and unpacking. Each row has an *element* side (one element per bit, any strides) and a *byte* side
//! (8 bits per byte). Packing reads elements and writes bytes; unpacking does the reverse.
//!
//! ```text
//!               elements of a row                       bytes of a row
//!     row 0     e0 e1 e2 e3 e4 e5 e6 e7 | e8 e9 ..       b0 | b1
//!     row 1     e0 e1 e2 e3 e4 e5 e6 e7 | e8 e9 ..       b0 | b1
//!               `--- a group of 8 ----'                  its byte
//! ```
#![forbid(unsafe_code)]

use crate::dlpack::{View, loops::Loops};

/// Order of the bits in a byte.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitOrder {
    /// The most significant bit is first: NumPy's default, CuPy, DeepSpeed.
    Big = 0,
    /// The least significant bit is first.
    Little = 1,
}

/// Returns the number of bytes that hold `bits` bits.
pub fn bytes_for(bits: i64) -> i64 {
    bits / 8 + i64::from(bits % 8 != 0)
}

/// Loops over elements and bytes. Offsets and strides are in bytes.
#[derive(Debug)]
pub struct BitPlan {
    /// Size of an element in bytes.
    pub size: usize,
    pub order: BitOrder,
    /// Offset of the first row's elements.
    pub start: i64,
    /// Loops over rows, with the strides of the element side and of the byte side.
    pub rows: Loops<2>,
    /// Loops over the elements of a row.
    pub elements: Loops<1>,
    /// Loops over the bytes of a row. Packing pads them with zeros; unpacking reads zeros past the last byte.
    pub bytes: Loops<1>,
}

impl BitPlan {
    /// Makes an empty plan. Plans are large, so they are filled in place.
    #[inline]
    pub fn new(size: usize, order: BitOrder) -> Self {
        Self { size, order, start: 0, rows: Loops::new(), elements: Loops::new(), bytes: Loops::new() }
    }

    /// Adds one row: all elements and all bytes, both in C order.
    pub fn flat(&mut self, elements: &View<'_>, bytes: &View<'_>) {
        push_dims(&mut self.elements, elements);
        push_dims(&mut self.bytes, bytes);
    }

    /// Adds one row: `count` elements from number `first` of a contiguous tensor, in `bytes` bytes with a stride.
    pub fn slice(&mut self, first: i64, count: i64, bytes: i64, stride: i64) {
        let size = self.size as i64;
        self.start = first * size;
        self.elements.push(count, [size]);
        self.bytes.push(bytes, [stride]);
    }

    /// Adds a row per index of the dimensions other than `axis`, which agree on both sides; one row without an axis.
    pub fn along(&mut self, axis: Option<usize>, elements: &View<'_>, bytes: &View<'_>) {
        // If both sides are empty, the other sizes are not bounded, and their product may overflow.
        let Some(axis) = axis.filter(|_| elements.elements() > 0 || bytes.elements() > 0) else {
            return self.flat(elements, bytes);
        };
        let sides = elements.dims().zip(bytes.dims());
        for (index, ((count, element_stride), (byte_count, byte_stride))) in sides.enumerate() {
            // Unused strides may have any value: those of dimensions of size 1, and of an empty side.
            let element_stride = element_stride.wrapping_mul(self.size as i64);
            let byte_stride = if bytes.elements() == 0 { 0 } else { byte_stride };
            if index == axis {
                self.elements.push(count, [element_stride]);
                self.bytes.push(byte_count, [byte_stride]);
            } else {
                self.rows.push(count, [element_stride, byte_stride]);
            }
        }
        self.join_rows();
    }

    /// Joins rows of whole bytes to one row, if they are adjacent on both sides.
    fn join_rows(&mut self) {
        let (size, elements, bytes) = (self.size as i64, self.elements.count(), self.bytes.count());
        let &[rows] = self.rows.as_slice() else {
            return;
        };
        if self.has_contiguous_rows()
            && elements % 8 == 0
            && elements / 8 == bytes
            && rows.strides == [elements * size, bytes]
        {
            self.rows.clear();
            self.elements.clear();
            self.elements.push(rows.count * elements, [size]);
            self.bytes.clear();
            self.bytes.push(rows.count * bytes, [1]);
        }
    }

    /// Returns true if each row is contiguous on both sides.
    #[inline]
    pub fn has_contiguous_rows(&self) -> bool {
        let stride = [self.size as i64];
        self.elements.single_stride(stride) == Some(stride) && self.bytes.single_stride([1]) == Some([1])
    }

    /// Returns true if the plan is one row that is contiguous on both sides.
    #[inline]
    pub fn is_flat(&self) -> bool {
        self.rows.count() == 1 && self.has_contiguous_rows()
    }

    /// Returns true if the plan is flat and elements at this address are aligned to their size.
    pub fn is_contiguous_at(&self, elements: usize) -> bool {
        self.is_flat() && elements.is_multiple_of(self.size)
    }
}

#[inline]
fn push_dims(loops: &mut Loops<1>, view: &View<'_>) {
    let size = view.dtype().size as i64;
    if view.elements() == 0 {
        // The number and the sizes of the other dimensions are not bounded.
        loops.push(0, [0]);
    } else if view.is_contiguous() {
        return loops.push(view.elements(), [size]);
    }
    for (count, stride) in view.dims().filter(|&(count, _)| view.elements() > 0 && count > 1) {
        loops.push(count, [stride * size]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a plan for elements of 4 bytes from the loops over rows, elements and bytes.
    fn plan(rows: &[(i64, [i64; 2])], elements: &[(i64, i64)], bytes: &[(i64, i64)]) -> BitPlan {
        let mut plan = BitPlan::new(4, BitOrder::Big);
        rows.iter().for_each(|&(count, strides)| plan.rows.push(count, strides));
        elements.iter().for_each(|&(count, stride)| plan.elements.push(count, [stride]));
        bytes.iter().for_each(|&(count, stride)| plan.bytes.push(count, [stride]));
        plan
    }

    #[test]
    fn a_plan_is_flat_if_it_is_one_row_that_is_contiguous_on_both_sides() {
        for (rows, elements, bytes, expected) in [
            (vec![], vec![(1000, 4)], vec![(125, 1)], true),
            (vec![], vec![(1001, 4)], vec![(140, 1)], true), // padding at the end
            (vec![], vec![(1, 4)], vec![(1, 1)], true),
            (vec![(7, [60, 2])], vec![(15, 4)], vec![(2, 1)], false),
            (vec![], vec![(1000, 8)], vec![(125, 1)], false),
            (vec![], vec![(1000, -4)], vec![(125, 1)], false),
            (vec![], vec![(1000, 4)], vec![(125, 2)], false),
            (vec![], vec![(128, 4), (16, 512)], vec![(256, 1)], false),
        ] {
            let plan = plan(&rows, &elements, &bytes);
            assert_eq!(plan.is_flat(), expected, "{plan:?}");
        }
    }

    #[test]
    fn rows_of_whole_bytes_that_follow_each_other_are_one() {
        for (rows, elements, bytes, expected) in [
            (vec![(7, [64, 2])], (16, 4), (2, 1), Some((112, 14))),
            (vec![(7, [60, 2])], (15, 4), (2, 1), None), // the last byte of a row has only bits of that row
            (vec![(7, [64, 3])], (16, 4), (2, 1), None),
            (vec![(7, [128, 2])], (16, 4), (2, 1), None),
            (vec![(7, [64, 2])], (16, 8), (2, 1), None),
            (vec![(7, [64, 2]), (3, [8, 8])], (16, 4), (2, 1), None),
        ] {
            let mut plan = plan(&rows, &[elements], &[bytes]);
            plan.join_rows();
            let joined = plan.is_flat().then(|| (plan.elements.count(), plan.bytes.count()));
            assert_eq!(joined, expected, "{plan:?}");
        }
    }
}
