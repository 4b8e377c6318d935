//! Packing and unpacking of tensors that several threads share, and of some whose results go past the caches, against a
//! model. Few inputs a second: each is a choice among large cases, and most bytes of an input matter.
#![no_main]

use std::{ffi::CStr, ptr};

use arbitrary::Arbitrary;
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLTensor};
use gradcodec::capi::*;
use libfuzzer_sys::fuzz_target;

/// Bytes of elements that two threads share, and those from which unpacking goes past the caches; packing does so from
/// as many bytes of result.
const SHARED: usize = 8 << 20;
const STREAM_UNPACKED: usize = 64 << 20;
const STREAM_PACKED: usize = 2 << 20;
/// Bytes of elements, gaps left out.
const MOST_BYTES: usize = 130 << 20;

#[derive(Arbitrary, Debug)]
struct Input {
    packs: bool,
    /// Signs of floats rather than booleans.
    signs: bool,
    dtype: u8,
    /// Along a dimension of two, or all of them as one.
    axis: Option<bool>,
    little: bool,
    size: Size,
    more: u16,
    rows: u16,
    layout: Layout,
    gap: u8,
    /// Of the elements and of the bytes, from an allocation's start.
    pads: (u8, u8),
    threads: u8,
    seed: u32,
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum Size {
    Shared,
    StreamPacked,
    StreamUnpacked,
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum Layout {
    Compact,
    Rows,
    Transposed,
    EveryOther,
    Backward,
}

/// A tensor of two dimensions in memory of its own.
struct Tensor {
    memory: Vec<u8>,
    first: usize,
    size: usize,
    dtype: (u8, u8),
    shape: [i64; 2],
    strides: [i64; 2],
}

impl Tensor {
    fn new(dtype: (u8, u8), shape: [usize; 2], layout: Layout, gap: u8, pad: u8) -> Self {
        let ([rows, columns], gap) = (shape.map(|size| size as i64), i64::from(gap % 70));
        let strides = match layout {
            Layout::Compact => [columns, 1],
            Layout::Rows => [columns + gap, 1],
            Layout::Transposed => [1, rows + gap],
            Layout::EveryOther => [2 * columns + gap, 2],
            Layout::Backward => [-columns - gap, -1],
        };
        let (size, reach) = (usize::from(dtype.1 / 8), (rows - 1) * strides[0] + (columns - 1) * strides[1]);
        let pad = usize::from(pad % 72);
        let memory = vec![0xa5; pad + (reach.unsigned_abs() as usize + 1) * size];
        let first = pad + if reach < 0 { reach.unsigned_abs() as usize * size } else { 0 };
        Self { memory, first, size, dtype, shape: [rows, columns], strides }
    }

    fn place(&self, row: usize, column: usize) -> usize {
        let step = row as i64 * self.strides[0] + column as i64 * self.strides[1];
        (self.first as i64 + step * self.size as i64) as usize
    }

    fn each(&self) -> impl Iterator<Item = [usize; 2]> + use<> {
        let [rows, columns] = self.shape.map(|size| size as usize);
        (0..rows).flat_map(move |row| (0..columns).map(move |column| [row, column]))
    }

    fn dl(&mut self) -> DLTensor {
        DLTensor {
            data: self.memory[self.first..].as_mut_ptr().cast(),
            device: DLDevice { device_type: DLDeviceType::CPU, device_id: 0 },
            ndim: 2,
            dtype: DLDataType { code: DLDataTypeCode(self.dtype.0), bits: self.dtype.1, lanes: 1 },
            shape: self.shape.as_mut_ptr(),
            strides: self.strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }
}

fn run(input: &Input) {
    // Signs are packed along no axis.
    let (signs, threads) = (input.signs && input.packs && input.axis.is_none(), 1 + usize::from(input.threads % 4));
    let floats = [((2, 32), 1f32.to_le_bytes().to_vec()), ((2, 64), 1f64.to_le_bytes().to_vec())];
    let others = [((6, 8), vec![1]), ((1, 16), vec![1, 0]), ((0, 64), vec![1, 0, 0, 0, 0, 0, 0, 0])];
    let known = if signs { &floats[..] } else { &others };
    let (dtype, one) = match input.dtype {
        0xff if !input.packs => &floats[0],
        index => &known[usize::from(index) % known.len()],
    };
    // What gives a 0: signs see -1 there, which differs from 1 in the last byte.
    let mut zero = if signs { one.clone() } else { vec![0; one.len()] };
    if let (true, Some(last)) = (signs, zero.last_mut()) {
        *last |= 0x80;
    }

    let wanted = match input.size {
        Size::Shared => SHARED,
        Size::StreamPacked => STREAM_PACKED * 8 * one.len() * threads,
        Size::StreamUnpacked => STREAM_UNPACKED * threads,
    };
    let count = wanted.min(MOST_BYTES) / one.len() + usize::from(input.more % 4096);
    let rows = match input.layout {
        Layout::Compact if input.axis.is_none() => 1,
        _ => 1 + usize::from(input.rows) % 20000,
    };
    let columns = (count / rows).max(1);
    let mut elements = Tensor::new(*dtype, [rows, columns], input.layout, input.gap, input.pads.0);
    let packed = match input.axis {
        None => [1, (rows * columns).div_ceil(8)],
        Some(false) => [rows.div_ceil(8), columns],
        Some(true) => [rows, columns.div_ceil(8)],
    };
    let mut bytes = Tensor::new((1, 8), packed, Layout::Compact, 0, input.pads.1);

    // Which element is a 1, and where its bit is.
    let is_one = |[row, column]: [usize; 2]| (row * 31 + column).wrapping_mul(input.seed as usize | 1) >> 3 & 3 == 0;
    let bit = |[row, column]: [usize; 2]| match input.axis {
        None => (0, (row * columns + column) / 8, (row * columns + column) % 8),
        Some(false) => (row / 8, column, row % 8),
        Some(true) => (row, column / 8, column % 8),
    };
    let (mut expected_elements, mut expected_bytes) = (elements.memory.clone(), bytes.memory.clone());
    expected_bytes[bytes.first..].fill(0);
    for at in elements.each() {
        let place = elements.place(at[0], at[1]);
        expected_elements[place..place + one.len()].copy_from_slice(if is_one(at) { one } else { &zero });
        if is_one(at) {
            let (row, column, bit) = bit(at);
            expected_bytes[bytes.place(row, column)] |= if input.little { 1 << bit } else { 0x80 >> bit };
        }
    }
    if input.packs { &mut elements.memory } else { &mut bytes.memory }.copy_from_slice(if input.packs {
        &expected_elements
    } else {
        &expected_bytes
    });

    let (order, axis) = (i32::from(input.little), input.axis.map(i32::from));
    // SAFETY: tensors with their memory.
    unsafe {
        assert_eq!(gc_set_threads(threads as u32), 0);
        let (mut elements, mut bytes, no_stream) = (elements.dl(), bytes.dl(), ptr::null_mut());
        let status = match (input.packs, axis) {
            (true, None) if signs => gc_pack_signs_into(&elements, order, &mut bytes, no_stream),
            (true, None) => gc_pack_chunks_into(&elements, order, &mut bytes, no_stream),
            (false, None) => gc_unpack_chunks_into(&bytes, order, &mut elements, no_stream),
            (true, Some(axis)) => gc_pack_bits_into(&elements, axis, order, &mut bytes, no_stream),
            (false, Some(axis)) => gc_unpack_bits_into(&bytes, axis, order, &mut elements, no_stream),
        };
        assert_eq!(status, 0, "{:?}", CStr::from_ptr(gc_last_error()));
    }
    assert!(elements.memory == expected_elements, "elements");
    assert!(bytes.memory == expected_bytes, "bytes");
}

fuzz_target!(|input: Input| run(&input));
