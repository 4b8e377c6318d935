//! Packing to bits and unpacking from them.
//!
//! Every function here comes down to the same [`BitPlan`]: rows, each with its bits on an *element* side (one element
//! a bit, any strides) and on a *byte* side (8 bits a byte). Packing reads the first and writes the second, unpacking
//! the other way round.

use std::fmt;

use crate::{
    backend::{self, Stream},
    error::{Error, Result, error},
    tensor::{Device, Dtype, Name, Outputs, Shape, View},
};

use super::loops::{Loop, Loops};

/// What refusals of a size call the result.
const OUT: Name = Name::new("out");

/// Which bit of a byte comes first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitOrder {
    /// The most significant: NumPy's default, CuPy, DeepSpeed.
    Big = 0,
    /// The least significant.
    Little = 1,
}

impl BitOrder {
    pub fn from_code(code: i32) -> Result<Self> {
        match code {
            0 => Ok(Self::Big),
            1 => Ok(Self::Little),
            _ => Err(error!(InvalidArgument, "order: {code} is neither GC_BIT_ORDER_BIG 0 nor GC_BIT_ORDER_LITTLE 1")),
        }
    }
}

/// How elements become bits. Each is looked at as an unsigned integer of its width: its bit is 0 when it lies in
/// `first_zero ..= first_zero + span`, and 1 otherwise. That covers truth (only 0 gives 0) and signs: as integers, the
/// floats below zero are one range, from the smallest negative denormal to -inf; -0 and the NaNs lie outside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Test {
    /// Bytes an element.
    pub size: usize,
    pub first_zero: u64,
    pub span: u64,
}

impl Test {
    /// Non-zero is 1.
    fn truth(src: &View<'_>) -> Result<Self> {
        let dtype = src.dtype();
        if dtype.is_float() {
            return Err(error!(
                UnsupportedDtype,
                "{}: {dtype} cannot be packed as truth; gc_pack_signs_into packs signs",
                src.name()
            ));
        }
        Ok(Self { size: dtype.size, first_zero: 0, span: 0 })
    }

    /// Not below zero is 1.
    fn sign(src: &View<'_>) -> Result<Self> {
        let dtype = src.dtype();
        if !dtype.is_float() {
            return Err(error!(
                UnsupportedDtype,
                "{}: {dtype} has no packed signs; float16, bfloat16, float32 and float64 have",
                src.name()
            ));
        }
        let (minus_zero, minus_infinity) = match dtype.size {
            2 if dtype == Dtype::BF16 => (0x8000, 0xff80),
            2 => (0x8000, 0xfc00),
            4 => (0x8000_0000, u64::from(f32::NEG_INFINITY.to_bits())),
            _ => (1 << 63, f64::NEG_INFINITY.to_bits()),
        };
        Ok(Self { size: dtype.size, first_zero: minus_zero + 1, span: minus_infinity - minus_zero - 1 })
    }
}

/// How bits become elements: 0 is all bits zero, 1 is this pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct One {
    /// Bytes an element.
    pub size: usize,
    pub pattern: u64,
}

impl One {
    fn of(dtype: Dtype) -> Self {
        let pattern = match (dtype.is_float(), dtype.size) {
            (false, _) => 1,
            (true, 2) if dtype == Dtype::BF16 => 0x3f80,
            (true, 2) => 0x3c00,
            (true, 4) => u64::from(1f32.to_bits()),
            (true, _) => 1f64.to_bits(),
        };
        Self { size: dtype.size, pattern }
    }
}

/// Where the bits lie on both sides. Offsets are in bytes, from the first element and the first byte.
#[derive(Debug)]
pub struct BitPlan {
    /// Where the first row's elements begin.
    pub start: i64,
    /// From row to row: strides of the element side and of the byte side.
    pub rows: Loops<2>,
    /// The elements of a row.
    pub elements: Loops<1>,
    /// The bytes of a row. Packing writes zeros past the last element; unpacking reads zeros past the last byte.
    pub bytes: Loops<1>,
    pub order: BitOrder,
}

impl BitPlan {
    /// A plan of nothing yet. Plans are large: they are filled in where they stand.
    #[inline]
    fn new(order: BitOrder) -> Self {
        Self { start: 0, rows: Loops::new(), elements: Loops::new(), bytes: Loops::new(), order }
    }

    /// One row: all elements in C order, all bytes in C order.
    fn flat(&mut self, elements: &View<'_>, bytes: &View<'_>) {
        push_dims(&mut self.elements, elements);
        push_dims(&mut self.bytes, bytes);
    }

    /// The `count` elements from number `first` of a contiguous tensor of bool, in `bytes` bytes at a stride.
    fn part(&mut self, first: i64, count: i64, bytes: i64, stride: i64) {
        self.start = first;
        self.elements.push(count, [1]);
        self.bytes.push(bytes, [stride]);
    }

    /// Whether each row, of elements of `size` bytes, is contiguous on both sides.
    #[inline]
    pub fn has_contiguous_rows(&self, size: usize) -> bool {
        let stride = [size as i64];
        self.elements.single_stride(stride) == Some(stride) && self.bytes.single_stride([1]) == Some([1])
    }

    /// The elements and the bytes of all rows together, if they are one run of memory on either side.
    pub fn as_one_run(&self, size: usize) -> Option<(i64, i64)> {
        if !self.has_contiguous_rows(size) {
            return None;
        }
        let (size, elements, bytes) = (size as i64, self.elements.rounds(), self.bytes.rounds());
        match self.rows.as_slice() {
            [] => Some((elements, bytes)),
            // Rows of whole bytes that follow each other. (A row's own stride, where it has one element, is any.)
            [rows] if elements % 8 == 0 && elements / 8 == bytes && rows.strides == [elements * size, bytes] => {
                Some((rows.count * elements, rows.count * bytes))
            }
            _ => None,
        }
    }

    /// The same work in rows, if all is one row in which the innermost loop covers whole bytes: a transposed matrix, say.
    pub fn in_rows(&self) -> Option<Self> {
        let (inner, outer) = self.elements.as_slice().split_last()?;
        let (bits, mut step) = (self.elements.rounds(), self.bytes.rounds());
        if self.rows.rounds() != 1 || outer.is_empty() || inner.count % 8 != 0 || bits / 8 != step {
            return None;
        }
        let [stride] = self.bytes.single_stride([1])?;
        let mut plan = Self { start: self.start, ..Self::new(self.order) };
        plan.elements.push(inner.count, inner.strides);
        plan.bytes.push(inner.count / 8, [stride]);
        for &Loop { count, strides: [element_stride] } in outer {
            step /= count;
            plan.rows.push(count, [element_stride, step * stride]);
        }
        Some(plan)
    }

    /// A row for every index of the dimensions other than `axis`, in which both sides agree.
    fn along(&mut self, axis: Option<usize>, elements: &View<'_>, bytes: &View<'_>) {
        let Some(axis) = axis else {
            return self.flat(elements, bytes);
        };
        let size = elements.dtype().size as i64;
        let sides = elements.dims().zip(bytes.dims());
        for (index, ((count, element_stride), (byte_count, byte_stride))) in sides.enumerate() {
            // Strides that nothing uses may be anything: those of sizes of 1, and of a side without elements.
            let element_stride = element_stride.wrapping_mul(size);
            let byte_stride = if bytes.elements() == 0 { 0 } else { byte_stride };
            if index == axis {
                self.elements.push(count, [element_stride]);
                self.bytes.push(byte_count, [byte_stride]);
            } else {
                self.rows.push(count, [element_stride, byte_stride]);
            }
        }
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

/// What rows run along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Everything, flattened in C order.
    All,
    /// This dimension; negative ones count from the end.
    One(i32),
}

impl Axis {
    /// The dimension meant; None for all as one. As in NumPy, a tensor of no dimensions counts as one of one element.
    fn dimension(self, src: &View<'_>) -> Result<Option<usize>> {
        let Self::One(axis) = self else {
            return Ok(None);
        };
        let ndim = src.shape().len().max(1);
        let from_start = i64::from(axis) + if axis < 0 { ndim as i64 } else { 0 };
        match usize::try_from(from_start) {
            Ok(index) if index < ndim => Ok(Some(index).filter(|_| !src.shape().is_empty())),
            _ => Err(error!(InvalidArgument, "axis: {axis} is out of range for {}, of ndim {ndim}", src.name())),
        }
    }
}

/// How many bits to unpack along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Those there are.
    All,
    /// So many; zeros beyond the last. Negative: so many fewer than there are.
    Of(i64),
}

impl Count {
    /// The number, where there are `bytes` bytes.
    fn of(self, bytes: i64) -> Result<i64> {
        let left_off = match self {
            Self::Of(count @ 0..) => return Ok(count),
            Self::Of(count) => count,
            Self::All => 0,
        };
        let total = bytes
            .checked_mul(8)
            .ok_or_else(|| error!(SizeOverflow, "src: {bytes} bytes along the axis have more than 2^63 - 1 bits"))?;
        if left_off < -total {
            return Err(error!(InvalidArgument, "count: {left_off} leaves off more than the {total} bits there are"));
        }
        Ok(total + left_off)
    }
}

/// The length of `src` along a dimension, or of all as one.
fn length(src: &View<'_>, axis: Option<usize>) -> i64 {
    axis.map_or(src.elements(), |axis| src.shape()[axis])
}

/// The shape of `src` made `length` long along a dimension; that length alone for all as one.
fn shape_with<'a>(src: &View<'a>, axis: Option<usize>, length: i64) -> Shape<'a> {
    match axis {
        None => Shape { sizes: &[0], changed: Some((0, length)) },
        Some(axis) => Shape { sizes: src.shape(), changed: Some((axis, length)) },
    }
}

/// Packs, if there is anything to write, by the plan that `fill` makes.
fn pack(
    order: BitOrder,
    fill: impl FnOnce(&mut BitPlan),
    test: Test,
    src: &View<'_>,
    dst: &View<'_>,
    stream: Stream,
) -> Result<()> {
    let backend = backend::of(src.device())?;
    if dst.elements() == 0 {
        return Ok(());
    }
    let mut plan = BitPlan::new(order);
    fill(&mut plan);
    backend.pack(&plan, test, src, dst, stream)
}

/// Unpacks, if there is anything to write, by the plan that `fill` makes.
fn unpack(
    order: BitOrder,
    fill: impl FnOnce(&mut BitPlan),
    one: One,
    src: &View<'_>,
    dst: &View<'_>,
    stream: Stream,
) -> Result<()> {
    let backend = backend::of(src.device())?;
    if dst.elements() == 0 {
        return Ok(());
    }
    let mut plan = BitPlan::new(order);
    fill(&mut plan);
    backend.unpack(&plan, one, src, dst, stream)
}

/// The outputs of a simple-tier call, once what was enqueued is done: whether or not all of it was, for the caller has the
/// inputs back then.
fn complete(device: Device, enqueued: Result<()>, outputs: Outputs) -> Result<Outputs> {
    let waited = backend::of(device)?.wait();
    enqueued.and(waited)?;
    Ok(outputs)
}

/// Bytes of one chunk when `elements` bits are split into `n_chunks` equal chunks of whole bytes.
pub fn chunk_bytes(elements: i64, n_chunks: usize) -> Result<i64> {
    if elements < 0 {
        return Err(error!(InvalidArgument, "n_elements: {elements} is negative"));
    }
    if n_chunks == 0 {
        return Err(error!(InvalidArgument, "n_chunks: at least 1 expected, got 0"));
    }
    // At most 2^60, so it fits.
    let bytes = bytes_for(elements) as u64;
    // A division takes longer than all the rest of these checks.
    Ok(if n_chunks == 1 { bytes } else { bytes.div_ceil(n_chunks as u64) } as i64)
}

/// Truth of every element to `n_chunks` new tensors.
pub fn pack_chunks(src: &View<'_>, n_chunks: usize) -> Result<Outputs> {
    let bytes = chunk_bytes(src.elements(), n_chunks)?;
    let test = Test::truth(src)?;
    let outputs = Outputs::allocate(OUT, src.device(), Dtype::U8, Shape::of(&[bytes]), n_chunks)?;
    let packed = outputs.joined()?;
    let enqueued = pack(BitOrder::Big, |plan| plan.flat(src, &packed), test, src, &packed, Stream::LEGACY);
    complete(src.device(), enqueued, outputs)
}

/// The chunks of `elements` bits to a new bool tensor.
pub fn unpack_chunks(chunks: &[View<'_>], elements: i64) -> Result<Outputs> {
    let bytes = chunk_bytes(elements, chunks.len())?;
    for chunk in chunks {
        check_uint8(chunk)?;
        if chunk.shape() != [bytes] {
            return Err(error!(
                ShapeMismatch,
                "{}: shape [{bytes}] expected for {elements} elements in {} chunks, got {}",
                chunk.name(),
                chunks.len(),
                Shape::of(chunk.shape())
            ));
        }
        check_same_device(chunk, &chunks[0])?;
    }
    let device = chunks[0].device();
    let outputs = Outputs::allocate(OUT, device, Dtype::BOOL, Shape::of(&[elements]), 1)?;
    let unpacked = outputs.view()?;
    let enqueued = unpack_each(chunks, bytes, &unpacked);
    complete(device, enqueued, outputs)
}

/// The bits of chunks of `bytes` bytes, one after the other, to all of `unpacked`.
fn unpack_each(chunks: &[View<'_>], bytes: i64, unpacked: &View<'_>) -> Result<()> {
    let (mut first, mut left) = (0, chunks);
    while let Some(chunk) = left.first().filter(|_| first < unpacked.elements()) {
        // Chunks that lie as gc_pack_chunks made them, each behind the one before, are one.
        let stride = chunk.dims().next().filter(|&(size, _)| size > 1).map_or(1, |(_, stride)| stride);
        let together = if stride == 1 { adjacent(left) } else { 1 };
        let bytes = bytes * together as i64;
        let count = (unpacked.elements() - first).min(bytes.saturating_mul(8));
        let fill = |plan: &mut BitPlan| plan.part(first, count, bytes, stride);
        unpack(BitOrder::Big, fill, One::of(Dtype::BOOL), chunk, unpacked, Stream::LEGACY)?;
        first += count;
        left = &left[together..];
    }
    Ok(())
}

/// How many of the first chunks, of contiguous bytes, lie one behind the other.
fn adjacent(chunks: &[View<'_>]) -> usize {
    let follow = |pair: &[View<'_>]| {
        pair[1].is_contiguous() && pair[1].data() == pair[0].data().wrapping_add(pair[0].elements() as usize)
    };
    1 + chunks.windows(2).take_while(|pair| follow(pair)).count()
}

/// `numpy.packbits` to a new tensor.
pub fn pack_bits(src: &View<'_>, axis: Axis, order: BitOrder) -> Result<Outputs> {
    let axis = axis.dimension(src)?;
    let test = Test::truth(src)?;
    let shape = shape_with(src, axis, bytes_for(length(src, axis)));
    let outputs = Outputs::allocate(OUT, src.device(), Dtype::U8, shape, 1)?;
    let packed = outputs.view()?;
    let enqueued = pack(order, |plan| plan.along(axis, src, &packed), test, src, &packed, Stream::LEGACY);
    complete(src.device(), enqueued, outputs)
}

/// `numpy.unpackbits` to a new uint8 tensor.
pub fn unpack_bits(src: &View<'_>, axis: Axis, count: Count, order: BitOrder) -> Result<Outputs> {
    check_uint8(src)?;
    let axis = axis.dimension(src)?;
    let shape = shape_with(src, axis, count.of(length(src, axis))?);
    let outputs = Outputs::allocate(OUT, src.device(), Dtype::U8, shape, 1)?;
    let unpacked = outputs.view()?;
    let fill = |plan: &mut BitPlan| plan.along(axis, &unpacked, src);
    let enqueued = unpack(order, fill, One::of(Dtype::U8), src, &unpacked, Stream::LEGACY);
    complete(src.device(), enqueued, outputs)
}

/// Truth of every element to the chunks that are the rows of `dst`.
pub fn pack_chunks_into(src: &View<'_>, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    pack_rows_into(src, Test::truth(src)?, order, dst, stream)
}

/// Signs of every element to the chunks that are the rows of `dst`.
pub fn pack_signs_into(src: &View<'_>, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    pack_rows_into(src, Test::sign(src)?, order, dst, stream)
}

fn pack_rows_into(src: &View<'_>, test: Test, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    check_chunk_rows(dst, src)?;
    check_same_device(dst, src)?;
    dst.check_output(&[src])?;
    pack(order, |plan| plan.flat(src, dst), test, src, dst, stream)
}

/// The chunks that are the rows of `src` to 0 and 1 in `dst`.
pub fn unpack_chunks_into(src: &View<'_>, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    check_chunk_rows(src, dst)?;
    check_same_device(dst, src)?;
    dst.check_output(&[src])?;
    unpack(order, |plan| plan.flat(dst, src), One::of(dst.dtype()), src, dst, stream)
}

/// `numpy.packbits` to `dst`.
pub fn pack_bits_into(src: &View<'_>, axis: Axis, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    let axis = axis.dimension(src)?;
    let test = Test::truth(src)?;
    check_uint8(dst)?;
    check_shape(dst, shape_with(src, axis, bytes_for(length(src, axis))), src)?;
    check_same_device(dst, src)?;
    dst.check_output(&[src])?;
    pack(order, |plan| plan.along(axis, src, dst), test, src, dst, stream)
}

/// `numpy.unpackbits` to 0 and 1 in `dst`, whose length along the axis is the count.
pub fn unpack_bits_into(src: &View<'_>, axis: Axis, order: BitOrder, dst: &View<'_>, stream: Stream) -> Result<()> {
    check_uint8(src)?;
    let axis = axis.dimension(src)?;
    let count = dst.shape().get(axis.unwrap_or(0)).copied().unwrap_or(0);
    check_shape(dst, shape_with(src, axis, count), src)?;
    check_same_device(dst, src)?;
    dst.check_output(&[src])?;
    unpack(order, |plan| plan.along(axis, dst, src), One::of(dst.dtype()), src, dst, stream)
}

/// Bytes that hold so many bits.
pub fn bytes_for(bits: i64) -> i64 {
    bits / 8 + i64::from(bits % 8 != 0)
}

fn check_uint8(bytes: &View<'_>) -> Result<()> {
    if bytes.dtype() == Dtype::U8 {
        return Ok(());
    }
    Err(error!(UnsupportedDtype, "{}: packed bits are uint8, got {}", bytes.name(), bytes.dtype()))
}

fn check_same_device(one: &View<'_>, other: &View<'_>) -> Result<()> {
    if one.device() == other.device() {
        return Ok(());
    }
    Err(error!(InvalidArgument, "{} is on {}, {} on {}", one.name(), one.device(), other.name(), other.device()))
}

fn check_shape(dst: &View<'_>, expected: Shape<'_>, src: &View<'_>) -> Result<()> {
    if expected.iter().eq(dst.shape().iter().copied()) {
        return Ok(());
    }
    Err(error!(
        ShapeMismatch,
        "{}: shape {expected} expected for {} of shape {}, got {}",
        dst.name(),
        src.name(),
        Shape::of(src.shape()),
        Shape::of(dst.shape())
    ))
}

/// Checks that `bytes` is uint8, C-contiguous, [n_chunks, chunk_bytes] for the elements of `elements`.
fn check_chunk_rows(bytes: &View<'_>, elements: &View<'_>) -> Result<()> {
    check_uint8(bytes)?;
    let refusal = |expected: fmt::Arguments<'_>| -> Error {
        error!(
            ShapeMismatch,
            "{}: {expected} expected for {} elements, got shape {}",
            bytes.name(),
            elements.elements(),
            Shape::of(bytes.shape())
        )
    };
    let &[n_chunks, got] = bytes.shape() else {
        return Err(refusal(format_args!("two dimensions, n_chunks and gc_chunk_bytes,")));
    };
    let expected = chunk_bytes(elements.elements(), n_chunks as usize)?;
    if got != expected {
        return Err(refusal(format_args!("{n_chunks} chunks of {expected} bytes")));
    }
    if !bytes.is_contiguous() {
        return Err(error!(
            NotContiguous,
            "{}: strides [{expected}, 1] expected for shape {}, got {}",
            bytes.name(),
            Shape::of(bytes.shape()),
            bytes.strides()
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan of these loops: of the rows, the elements and the bytes.
    fn plan(rows: &[(i64, [i64; 2])], elements: &[(i64, i64)], bytes: &[(i64, i64)]) -> BitPlan {
        let mut plan = BitPlan::new(BitOrder::Big);
        rows.iter().for_each(|&(count, strides)| plan.rows.push(count, strides));
        elements.iter().for_each(|&(count, stride)| plan.elements.push(count, [stride]));
        bytes.iter().for_each(|&(count, stride)| plan.bytes.push(count, [stride]));
        plan
    }

    #[test]
    fn one_run_is_what_lies_together_on_both_sides() {
        for (rows, elements, bytes, expected) in [
            (vec![], (1000, 4), (125, 1), Some((1000, 125))),
            (vec![], (1001, 4), (140, 1), Some((1001, 140))), // padding behind
            (vec![], (1000, 8), (125, 1), None),
            (vec![], (1000, 4), (125, 2), None),
            (vec![], (1, 4), (1, 1), Some((1, 1))),
            (vec![(7, [64, 2])], (16, 4), (2, 1), Some((112, 14))),
            (vec![(7, [60, 2])], (15, 4), (2, 1), None), // bytes with bits of one row only
            (vec![(7, [64, 3])], (16, 4), (2, 1), None),
            (vec![(7, [128, 2])], (16, 4), (2, 1), None),
            (vec![(7, [64, 2]), (3, [8, 8])], (16, 4), (2, 1), None),
        ] {
            let plan = plan(&rows, &[elements], &[bytes]);
            assert_eq!(plan.as_one_run(4), expected, "{plan:?}");
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
        assert!(plan(&[], &[(5, 1), (12, 100)], &[(8, 1)]).in_rows().is_none(), "a byte has bits of two rows");
        assert!(plan(&[], &[(5, 1), (16, 100)], &[(12, 1)]).in_rows().is_none(), "padding");
        assert!(plan(&[], &[(16, 2)], &[(2, 1)]).in_rows().is_none(), "nothing to gain");
        assert!(plan(&[(2, [999, 2])], &[(5, 1), (16, 100)], &[(10, 1)]).in_rows().is_none());
    }

    #[test]
    fn chunk_bytes_is_two_roundings_up() {
        for (elements, n_chunks, expected) in [
            (0, 1, 0),
            (0, 7, 0),
            (1, 1, 1),
            (8, 1, 1),
            (9, 1, 2),
            (400, 3, 17),
            (2410, 4, 76),
            (1, 5, 1),
            (i64::MAX, 1, 1 << 60),
            (i64::MAX, usize::MAX, 1),
        ] {
            assert_eq!(chunk_bytes(elements, n_chunks).unwrap(), expected, "{elements} in {n_chunks}");
        }
    }

    #[test]
    fn the_floats_below_zero_are_one_range_of_integers() {
        // The formula, in the floats' own arithmetic, at and around every border.
        for (bits, below) in [
            (0x8000_0000u32, false), // -0
            (0x8000_0001, true),     // the smallest negative denormal
            (0xff80_0000, true),     // -inf
            (0xff80_0001, false),    // a NaN
            (0xffff_ffff, false),
            (0x7f80_0000, false), // +inf
            (0, false),
        ] {
            assert_eq!(f32::from_bits(bits) < 0.0, below);
            assert_eq!(bits.wrapping_sub(0x8000_0001) <= 0x7f7f_ffff, below, "{bits:#x}");
        }
    }
}
