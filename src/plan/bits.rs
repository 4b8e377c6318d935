//! The plan of packing and unpacking: rows, each with its bits on an *element* side (one element a bit, any strides) and
//! on a *byte* side (8 bits a byte). Packing reads the first and writes the second, unpacking the other way round.
//!
//! ```text
//!               elements of a row                       bytes of a row
//!     row 0     e0 e1 e2 e3 e4 e5 e6 e7 | e8 e9 ..       b0 | b1
//!     row 1     e0 e1 e2 e3 e4 e5 e6 e7 | e8 e9 ..       b0 | b1
//!               `--- a group of 8 ----'                  its byte
//! ```

use std::fmt;

use crate::tensor::{Dtype, View};

use super::loops::{Loop, Loops};

/// Which bit of a byte comes first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitOrder {
    /// The most significant: NumPy's default, CuPy, DeepSpeed.
    Big = 0,
    /// The least significant.
    Little = 1,
}

/// How elements become bits. Each is looked at as an unsigned integer of its width: its bit is 0 when it lies in
/// `first_zero ..= first_zero + span`, and 1 otherwise. That covers non-zero (only 0 gives 0) and signs: as integers, the
/// floats below zero are one range, from the smallest negative denormal to -inf; -0 and the NaNs lie outside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitRule {
    /// Bytes an element.
    pub size: usize,
    pub first_zero: u64,
    pub span: u64,
}

impl BitRule {
    /// Non-zero is 1: for bool and integers.
    pub fn nonzero(dtype: Dtype) -> Self {
        Self { size: dtype.size, first_zero: 0, span: 0 }
    }

    /// Not below zero is 1: for floats.
    pub fn not_below_zero(dtype: Dtype) -> Self {
        let (minus_zero, minus_infinity) = match dtype {
            Dtype::BF16 => (0x8000, 0xff80),
            Dtype::F16 => (0x8000, 0xfc00),
            Dtype::F32 => (0x8000_0000, u64::from(f32::NEG_INFINITY.to_bits())),
            _ => (1 << 63, f64::NEG_INFINITY.to_bits()),
        };
        Self { size: dtype.size, first_zero: minus_zero + 1, span: minus_infinity - minus_zero - 1 }
    }
}

/// How bits become elements: what is written for a 0 and for a 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patterns {
    /// Bytes an element.
    pub size: usize,
    pub zero: u64,
    pub one: u64,
}

impl Patterns {
    /// The numbers 0 and 1.
    pub fn of(dtype: Dtype) -> Self {
        let one = match dtype {
            Dtype::BF16 => 0x3f80,
            Dtype::F16 => 0x3c00,
            Dtype::F32 => u64::from(1f32.to_bits()),
            Dtype::F64 => 1f64.to_bits(),
            _ => 1,
        };
        Self { size: dtype.size, zero: 0, one }
    }
}

/// Bytes that hold so many bits.
pub fn bytes_for(bits: i64) -> i64 {
    bits / 8 + i64::from(bits % 8 != 0)
}

/// Where the bits lie on both sides. Offsets and strides are in bytes.
#[derive(Debug)]
pub struct BitPlan {
    /// Bytes an element.
    pub size: usize,
    pub order: BitOrder,
    /// Where the first row's elements begin.
    pub start: i64,
    /// From row to row: strides of the element side and of the byte side.
    pub rows: Loops<2>,
    /// The elements of a row.
    pub elements: Loops<1>,
    /// The bytes of a row. Packing writes zeros past the last element; unpacking reads zeros past the last byte.
    pub bytes: Loops<1>,
}

/// What is special about a plan, for a device to choose its way of working by. The first that holds is the plan's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One row, contiguous on both sides.
    Flat,
    /// Several rows, each contiguous on both sides.
    Rows,
    /// Rows whose elements lie side by side, while those of one row lie apart: packing a matrix along its first axis.
    /// `across` is the loop over rows that goes from an element to its neighbour.
    Columns { across: usize },
    /// One row of contiguous bytes, whose elements lie side by side in a loop that is not the innermost: flattening a
    /// transposed matrix. `across` is that loop.
    Transposed { across: usize },
    /// Rows whose elements, and whose bytes, lie at one stride each: every other element, or all of them backwards.
    OneStride,
    /// Anything else.
    General,
}

impl fmt::Display for Layout {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flat => out.write_str("flat"),
            Self::Rows => out.write_str("rows"),
            Self::Columns { across } => write!(out, "columns across row loop {across}"),
            Self::Transposed { across } => write!(out, "transposed across element loop {across}"),
            Self::OneStride => out.write_str("one stride"),
            Self::General => out.write_str("general"),
        }
    }
}

impl BitPlan {
    /// A plan of nothing yet. Plans are large: they are filled in where they stand.
    #[inline]
    pub fn new(size: usize, order: BitOrder) -> Self {
        Self { size, order, start: 0, rows: Loops::new(), elements: Loops::new(), bytes: Loops::new() }
    }

    /// One row: all elements in C order, all bytes in C order.
    pub fn flat(&mut self, elements: &View<'_>, bytes: &View<'_>) {
        push_dims(&mut self.elements, elements);
        push_dims(&mut self.bytes, bytes);
    }

    /// One row: `count` elements from number `first` of a contiguous tensor, in `bytes` bytes at a stride.
    pub fn slice(&mut self, first: i64, count: i64, bytes: i64, stride: i64) {
        let size = self.size as i64;
        self.start = first * size;
        self.elements.push(count, [size]);
        self.bytes.push(bytes, [stride]);
    }

    /// A row for every index of the dimensions other than `axis`, in which both sides agree; without an axis, one row.
    pub fn along(&mut self, axis: Option<usize>, elements: &View<'_>, bytes: &View<'_>) {
        // Where neither side has anything, the other sizes are bounded by nothing, and their product may be too large.
        let Some(axis) = axis.filter(|_| elements.elements() > 0 || bytes.elements() > 0) else {
            return self.flat(elements, bytes);
        };
        let sides = elements.dims().zip(bytes.dims());
        for (index, ((count, element_stride), (byte_count, byte_stride))) in sides.enumerate() {
            // Strides that nothing uses may be anything: those of sizes of 1, and of a side without elements.
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

    /// Makes one row of rows of whole bytes that follow each other on both sides.
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

    /// Whether each row is contiguous on both sides.
    #[inline]
    fn has_contiguous_rows(&self) -> bool {
        let stride = [self.size as i64];
        self.elements.single_stride(stride) == Some(stride) && self.bytes.single_stride([1]) == Some([1])
    }

    /// The class of this plan.
    #[inline]
    pub fn layout(&self) -> Layout {
        if self.has_contiguous_rows() {
            return if self.rows.count() == 1 { Layout::Flat } else { Layout::Rows };
        }
        self.scattered_layout()
    }

    /// Whether both sides are one run of memory, and elements that begin at this address lie at multiples of their size.
    pub fn is_contiguous_at(&self, elements: usize) -> bool {
        self.layout() == Layout::Flat && elements.is_multiple_of(self.size)
    }

    /// The class, where rows are not contiguous.
    fn scattered_layout(&self) -> Layout {
        let size = self.size as i64;
        if let (Some([stride]), Some(_)) = (self.elements.single_stride([0]), self.bytes.single_stride([0])) {
            let across = self.rows.as_slice().iter().rposition(|rows| rows.strides[0] == size);
            return match across {
                Some(across) if stride != size => Layout::Columns { across },
                _ => Layout::OneStride,
            };
        }
        if let Some((_, outer)) = self.elements.as_slice().split_last()
            && self.rows.count() == 1
            && self.bytes.single_stride([1]) == Some([1])
            && let Some(across) = outer.iter().rposition(|item| item.strides == [size])
        {
            return Layout::Transposed { across };
        }
        Layout::General
    }

    /// The same work in rows, if all is one row in which the innermost loop covers whole bytes: a transposed matrix, say.
    /// Rows whose elements lie close together come next to each other, in whatever order the loops were.
    pub fn in_rows(&self) -> Option<Self> {
        let (inner, outer) = self.elements.as_slice().split_last()?;
        let (bits, mut step) = (self.elements.count(), self.bytes.count());
        if self.rows.count() != 1 || outer.is_empty() || inner.count % 8 != 0 || bits / 8 != step {
            return None;
        }
        let [stride] = self.bytes.single_stride([1])?;
        let mut plan = Self { start: self.start, ..Self::new(self.size, self.order) };
        plan.elements.push(inner.count, inner.strides);
        plan.bytes.push(inner.count / 8, [stride]);
        let mut rows = Loops::new();
        for &Loop { count, strides: [element_stride] } in outer {
            step /= count;
            rows.push(count, [element_stride, step * stride]);
        }
        rows.sort_by_step();
        plan.rows = rows;
        Some(plan)
    }
}

#[inline]
fn push_dims(loops: &mut Loops<1>, view: &View<'_>) {
    let size = view.dtype().size as i64;
    if view.elements() == 0 {
        // The other dimensions may be as many and as large as they like.
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

    /// A plan of these loops, for elements of 4 bytes: of the rows, the elements and the bytes.
    fn plan(rows: &[(i64, [i64; 2])], elements: &[(i64, i64)], bytes: &[(i64, i64)]) -> BitPlan {
        let mut plan = BitPlan::new(4, BitOrder::Big);
        rows.iter().for_each(|&(count, strides)| plan.rows.push(count, strides));
        elements.iter().for_each(|&(count, stride)| plan.elements.push(count, [stride]));
        bytes.iter().for_each(|&(count, stride)| plan.bytes.push(count, [stride]));
        plan
    }

    #[test]
    fn the_layout_says_what_is_special() {
        let matrix = [(128, 4), (16, 512)]; // 16 rows of 128 elements, the other way round
        for (rows, elements, bytes, expected) in [
            (vec![], vec![(1000, 4)], vec![(125, 1)], "flat"),
            (vec![], vec![(1001, 4)], vec![(140, 1)], "flat"), // padding behind
            (vec![], vec![(1, 4)], vec![(1, 1)], "flat"),
            (vec![(7, [60, 2])], vec![(15, 4)], vec![(2, 1)], "rows"),
            (vec![(7, [999, -2]), (3, [-4, 0])], vec![(15, 4)], vec![(2, 1)], "rows"),
            (vec![(100, [4, 1])], vec![(80, 400)], vec![(10, 100)], "columns across row loop 0"),
            (vec![(9, [4, 1]), (5, [64, 9])], vec![(80, 400)], vec![(10, 100)], "columns across row loop 0"),
            (vec![(5, [64, 100]), (9, [4, 7])], vec![(80, -400)], vec![(10, 1)], "columns across row loop 1"),
            (vec![(100, [4, 10])], vec![(80, 8)], vec![(10, 1)], "columns across row loop 0"),
            (vec![], vec![(1000, 8)], vec![(125, 1)], "one stride"),
            (vec![], vec![(1000, -4)], vec![(125, 1)], "one stride"),
            (vec![], vec![(1000, 4)], vec![(125, 2)], "one stride"),
            (vec![(100, [4, 10])], vec![(80, 4)], vec![(10, 3)], "one stride"), // rows that overlap, side by side in each
            (vec![], matrix.to_vec(), vec![(256, 1)], "transposed across element loop 0"),
            (vec![], vec![(3, 9999), (128, 4), (16, 512)], vec![(768, 1)], "transposed across element loop 1"),
            (vec![], vec![(128, 4), (3, 9999), (16, 512)], vec![(768, 1)], "transposed across element loop 0"),
            (vec![], matrix.to_vec(), vec![(256, 2)], "general"),
            (vec![(2, [8192, 256])], matrix.to_vec(), vec![(256, 1)], "general"),
            (vec![], vec![(3, 100), (16, 4)], vec![(6, 1)], "general"), // side by side in the innermost alone
        ] {
            let plan = plan(&rows, &elements, &bytes);
            assert_eq!(plan.layout().to_string(), expected, "{plan:?}");
        }
    }

    #[test]
    fn rows_of_whole_bytes_that_follow_each_other_are_one() {
        for (rows, elements, bytes, expected) in [
            (vec![(7, [64, 2])], (16, 4), (2, 1), Some((112, 14))),
            (vec![(7, [60, 2])], (15, 4), (2, 1), None), // bytes with bits of one row only
            (vec![(7, [64, 3])], (16, 4), (2, 1), None),
            (vec![(7, [128, 2])], (16, 4), (2, 1), None),
            (vec![(7, [64, 2])], (16, 8), (2, 1), None),
            (vec![(7, [64, 2]), (3, [8, 8])], (16, 4), (2, 1), None),
        ] {
            let mut plan = plan(&rows, &[elements], &[bytes]);
            plan.join_rows();
            let joined = (plan.layout() == Layout::Flat).then(|| (plan.elements.count(), plan.bytes.count()));
            assert_eq!(joined, expected, "{plan:?}");
        }
    }

    #[test]
    fn a_row_of_several_loops_is_rows_of_the_innermost_if_that_covers_bytes() {
        // The address of every element and of its byte, in order.
        let places = |plan: &BitPlan| -> Vec<(i64, i64)> {
            let walk = |loops: &[(i64, i64)]| -> Vec<i64> {
                loops.iter().fold(vec![0], |at, &(count, stride)| {
                    at.iter().flat_map(|&at| (0..count).map(move |i| at + i * stride)).collect()
                })
            };
            let side = |loops: &Loops<1>| -> Vec<(i64, i64)> {
                loops.as_slice().iter().map(|item| (item.count, item.strides[0])).collect()
            };
            let rows = |side: usize| -> Vec<(i64, i64)> {
                plan.rows.as_slice().iter().map(|item| (item.count, item.strides[side])).collect()
            };
            let (elements, bytes) = (walk(&side(&plan.elements)), walk(&side(&plan.bytes)));
            let rows = walk(&rows(0)).into_iter().zip(walk(&rows(1)));
            rows.flat_map(|(element, byte)| {
                let bytes = &bytes;
                elements.iter().enumerate().map(move |(i, at)| (element + at, byte + bytes[i / 8])).collect::<Vec<_>>()
            })
            .collect()
        };
        for loops in [vec![(5, 1), (16, 100)], vec![(3, 7), (5, 1), (8, -20)], vec![(4, -9), (3, 0), (24, 50)]] {
            for stride in [1, 3, -2] {
                let bits: i64 = loops.iter().map(|&(count, _)| count).product();
                let flat = plan(&[], &loops, &[(bits / 8, stride)]);
                let rows = flat.in_rows().unwrap();
                assert_eq!(places(&rows), places(&flat));
                assert_eq!(rows.elements.as_slice().len(), 1);
            }
        }
        // Rows that lie side by side become neighbours, and keep their bytes.
        let flat = plan(&[], &[(5, 4), (3, 20), (16, 100)], &[(30, 1)]);
        let rows = flat.in_rows().unwrap();
        let (mut found, mut expected) = (places(&rows), places(&flat));
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected);
        assert_eq!(rows.rows.as_slice().last(), Some(&Loop { count: 5, strides: [4, 6] }));
        assert_eq!(rows.layout(), Layout::Columns { across: 1 });
        assert!(plan(&[], &[(5, 1), (12, 100)], &[(8, 1)]).in_rows().is_none(), "a byte has bits of two rows");
        assert!(plan(&[], &[(5, 1), (16, 100)], &[(12, 1)]).in_rows().is_none(), "padding");
        assert!(plan(&[], &[(16, 2)], &[(2, 1)]).in_rows().is_none(), "nothing to gain");
        assert!(plan(&[(2, [999, 2])], &[(5, 1), (16, 100)], &[(10, 1)]).in_rows().is_none());
    }

    /// Whether a float of this dtype, given by its bits, is below zero; in the arithmetic of f64, which holds all of them.
    fn below_zero(dtype: Dtype, bits: u64) -> bool {
        let value = match dtype.size {
            2 if dtype == Dtype::BF16 => f64::from(f32::from_bits((bits as u32) << 16)),
            2 => {
                // IEEE 754 binary16: a sign, 5 bits of exponent, 10 of fraction.
                let (sign, exponent, fraction) = (bits >> 15, bits >> 10 & 31, (bits & 1023) as f64);
                let magnitude = match exponent {
                    0 => fraction / 1024.0 * 2f64.powi(-14),
                    31 if fraction == 0.0 => f64::INFINITY,
                    31 => f64::NAN,
                    _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent as i32 - 15),
                };
                if sign == 1 { -magnitude } else { magnitude }
            }
            4 => f64::from(f32::from_bits(bits as u32)),
            _ => f64::from_bits(bits),
        };
        value < 0.0
    }

    #[test]
    fn the_floats_below_zero_are_one_range_of_integers() {
        for (dtype, infinity) in [
            (Dtype::F16, 0x7c00),
            (Dtype::BF16, 0x7f80),
            (Dtype::F32, u64::from(f32::INFINITY.to_bits())),
            (Dtype::F64, f64::INFINITY.to_bits()),
        ] {
            let rule = BitRule::not_below_zero(dtype);
            let mask = u64::MAX >> (64 - 8 * dtype.size);
            let sign = 1 << (8 * dtype.size - 1);
            // At and around every border: zeros, the first denormals, the infinities, the NaNs next to them, the last.
            let near =
                |at: u64| (0..=2).flat_map(move |by: u64| [at.wrapping_sub(by) & mask, at.wrapping_add(by) & mask]);
            for bits in [0, sign, infinity, infinity | sign, mask].into_iter().flat_map(near) {
                let is_zero = bits.wrapping_sub(rule.first_zero) & mask <= rule.span;
                assert_eq!(is_zero, below_zero(dtype, bits), "{dtype} {bits:#x}");
            }
            if dtype.size == 2 {
                for bits in 0..=mask {
                    let is_zero = bits.wrapping_sub(rule.first_zero) & mask <= rule.span;
                    assert_eq!(is_zero, below_zero(dtype, bits), "{dtype} {bits:#x}");
                }
            }
        }
    }
}
