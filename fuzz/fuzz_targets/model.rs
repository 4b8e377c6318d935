//! Packing and unpacking of any shapes, strides, dtypes, axes, orders, counts and numbers of chunks against a model.
//! Every input is valid, so every call must succeed, write the model's bytes, and change no other byte.
#![no_main]

use std::{ffi::CStr, ptr};

use arbitrary::Arbitrary;
use dlpark::ffi::DLManagedTensor;
use gradcodec::capi::*;
use gradcodec_fuzz::{DTYPES, Description, Device, Dtype, Flaw, INTEGERS, Number, Place, Tensor};
use libfuzzer_sys::fuzz_target;

/// Most elements of the larger side.
const MOST_ELEMENTS: usize = 6000;

#[derive(Arbitrary, Debug)]
struct Input {
    call: Call,
    dtype: u8,
    dims: Vec<Dim>,
    /// True if the strides are NULL, for C order.
    compact: bool,
    axis: Option<i8>,
    little: bool,
    n_chunks: u8,
    count: Option<i16>,
    pad: u8,
    byte_offset: u16,
    fill: u8,
    /// Layout of the other side.
    other: Vec<Dim>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Call {
    PackChunks,
    PackChunksInto,
    PackSignsInto,
    PackBits,
    PackBitsInto,
    UnpackChunks,
    UnpackChunksInto,
    UnpackBits,
    UnpackBitsInto,
}

#[derive(Arbitrary, Clone, Copy, Debug, Default)]
struct Dim {
    size: u16,
    /// Order of this dimension's stride: the lowest is the innermost.
    rank: u8,
    gap: u8,
    backward: bool,
    /// True if all elements of a source have one address.
    repeated: bool,
}

impl Input {
    fn order(&self) -> i32 {
        i32::from(self.little)
    }

    fn mask(&self, bit: usize) -> u8 {
        if self.little { 1 << (bit % 8) } else { 0x80 >> (bit % 8) }
    }

    /// Returns a tensor of this shape, with the layout `dims`.
    fn tensor(&self, dtype: (u8, u8), shape: &[usize], dims: &[Dim], source: bool) -> Tensor {
        let dim = |axis: usize| dims.get(axis).copied().unwrap_or_default();
        let mut axes: Vec<usize> = (0..shape.len()).collect();
        axes.sort_by_key(|&axis| (dim(axis).rank, usize::MAX - axis));
        let mut strides = vec![0; shape.len()];
        let mut stride = 1;
        for axis in axes {
            let Dim { gap, backward, repeated, .. } = dim(axis);
            stride += i64::from(gap % 4) * i64::from(gap > 128);
            strides[axis] = if repeated && source { 0 } else { stride * if backward { -1 } else { 1 } };
            stride *= shape[axis].max(1) as i64;
        }
        let index = DTYPES.iter().position(|&known| known == dtype).unwrap();
        let tensor = Tensor::new(&Description {
            dtype: Dtype::Known(index as u8),
            device: Device::Cpu,
            dims: shape.iter().zip(&strides).map(|(&size, &by)| (Number::Any(size as i64), Number::Any(by))).collect(),
            compact: self.compact,
            negative_ndim: None,
            byte_offset: Number::Any(i64::from(self.byte_offset)),
            flaw: Flaw::None,
            pad: self.pad,
            fill: self.fill,
        });
        assert_eq!(tensor.place, Place::Here);
        tensor
    }

    /// Returns sizes of at most `most` elements in all.
    fn shape(&self, most: usize) -> Vec<usize> {
        let mut left = most;
        let sizes = self.dims.iter().take(6).map(|dim| {
            let size = if dim.size % 64 == 63 { 0 } else { 1 + usize::from(dim.size) % left };
            left /= size.max(1);
            size
        });
        sizes.collect()
    }
}

/// Rows of `n` bits and `m` bytes, `inner` of them side by side, `outer` times.
struct Rows {
    outer: usize,
    inner: usize,
    n: usize,
    m: usize,
}

impl Rows {
    fn pack(&self, input: &Input, bits: &[bool]) -> Vec<u8> {
        let mut bytes = vec![0; self.outer * self.m * self.inner];
        for (index, _) in bits.iter().enumerate().filter(|(_, bit)| **bit) {
            let (o, n, i) = (index / self.inner / self.n, index / self.inner % self.n, index % self.inner);
            bytes[(o * self.m + n / 8) * self.inner + i] |= input.mask(n);
        }
        bytes
    }

    fn unpack(&self, input: &Input, bytes: &[u8]) -> Vec<bool> {
        let bit = |index: usize| {
            let (o, n, i) = (index / self.inner / self.n, index / self.inner % self.n, index % self.inner);
            n / 8 < self.m && bytes[(o * self.m + n / 8) * self.inner + i] & input.mask(n) != 0
        };
        (0..self.outer * self.n * self.inner).map(bit).collect()
    }
}

fn read_bytes(tensor: &Tensor) -> Vec<u8> {
    tensor.places().into_iter().map(|at| tensor.memory[at]).collect()
}

fn read_bits(tensor: &Tensor, signs: bool) -> Vec<bool> {
    let dtype = tensor.managed.dl_tensor.dtype;
    let bit = |at: usize| {
        let element = &tensor.memory[at..at + tensor.size];
        if !signs {
            return element.iter().any(|&byte| byte != 0);
        }
        let below_zero = match (dtype.code.0, element) {
            (4, &[a, b]) => f32::from_le_bytes([0, 0, a, b]) < 0.0,
            (_, &[a, b]) => (0x8001..=0xfc00).contains(&u16::from_le_bytes([a, b])),
            (_, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]) < 0.0,
            _ => f64::from_le_bytes(element.try_into().unwrap()) < 0.0,
        };
        !below_zero
    };
    tensor.places().into_iter().map(bit).collect()
}

/// Returns the memory of `tensor` after a write of these elements: each the bytes of `one`, or zeros.
fn with_bits(tensor: &Tensor, bits: &[bool]) -> Vec<u8> {
    let dtype = tensor.managed.dl_tensor.dtype;
    let one: Vec<u8> = match (dtype.code.0, dtype.bits) {
        (4, _) => vec![0x80, 0x3f],
        (2, 16) => vec![0x00, 0x3c],
        (2, 32) => 1f32.to_le_bytes().to_vec(),
        (2, 64) => 1f64.to_le_bytes().to_vec(),
        _ => 1u64.to_le_bytes()[..tensor.size].to_vec(),
    };
    let mut memory = tensor.memory.clone();
    for (at, &bit) in tensor.places().into_iter().zip(bits) {
        memory[at..at + tensor.size].iter_mut().zip(&one).for_each(|(byte, &one)| *byte = if bit { one } else { 0 });
    }
    memory
}

fn with_bytes(tensor: &Tensor, bytes: &[u8]) -> Vec<u8> {
    let mut memory = tensor.memory.clone();
    tensor.places().into_iter().zip(bytes).for_each(|(at, &byte)| memory[at] = byte);
    memory
}

fn succeeds(status: gc_status_t) {
    // SAFETY: gc_last_error() returns text that ends with a NUL.
    assert_eq!(status, 0, "{:?}", unsafe { CStr::from_ptr(gc_last_error()) });
}

/// Checks a tensor that the library has made, and releases it.
fn take(out: *mut DLManagedTensor, dtype: (u8, u8), shape: &[usize], expected: &[u8]) {
    // SAFETY: `out` is a tensor that the library has made, and is released once.
    unsafe {
        let dl = &(*out).dl_tensor;
        assert_eq!((dl.dtype.code.0, dl.dtype.bits, dl.dtype.lanes, dl.byte_offset), (dtype.0, dtype.1, 1, 0));
        assert_eq!(dl.ndim as usize, shape.len());
        for (axis, &size) in shape.iter().enumerate() {
            assert_eq!(*dl.shape.add(axis), size as i64);
        }
        assert_eq!(dl.data.is_null(), expected.is_empty());
        if !expected.is_empty() {
            assert_eq!(std::slice::from_raw_parts(dl.data.cast::<u8>(), expected.len()), expected);
        }
        gc_tensor_free(out);
    }
}

fn run(input: &Input) {
    let packs =
        !matches!(input.call, Call::UnpackChunks | Call::UnpackChunksInto | Call::UnpackBits | Call::UnpackBitsInto);
    let along_axis =
        matches!(input.call, Call::PackBits | Call::PackBitsInto | Call::UnpackBits | Call::UnpackBitsInto);
    let signs = matches!(input.call, Call::PackSignsInto);
    let any = usize::from(input.dtype);
    let elements_dtype = match input.call {
        Call::PackSignsInto => DTYPES[INTEGERS + any % (DTYPES.len() - INTEGERS)],
        Call::UnpackChunksInto | Call::UnpackBitsInto => DTYPES[any % DTYPES.len()],
        _ => DTYPES[any % INTEGERS],
    };
    let n_chunks = usize::from(input.n_chunks % 40).max(1);
    let shape = input.shape(if packs || !along_axis { MOST_ELEMENTS } else { MOST_ELEMENTS / 16 });
    let total: usize = shape.iter().product();

    // `shape` is the elements' shape, or that of the bytes to be unpacked along an axis.
    let (axis, along) = match input.axis {
        Some(axis) if along_axis && !shape.is_empty() => {
            let (axis, ndim) = (i32::from(axis), shape.len() as i32);
            (axis.rem_euclid(2 * ndim) - ndim, Some(axis.rem_euclid(2 * ndim) as usize % shape.len()))
        }
        _ => (GC_AXIS_NONE, None),
    };
    let length = along.map_or(total, |along| shape[along]);
    let (outer, inner) =
        along.map_or((1, 1), |along| (shape[..along].iter().product(), shape[along + 1..].iter().product()));
    let shape_with = |length: usize| match along {
        None => vec![length],
        Some(along) => {
            let mut shape = shape.clone();
            shape[along] = length;
            shape
        }
    };

    // SAFETY: all tensors have their memory, and there is room for the results.
    unsafe {
        match input.call {
            Call::PackChunks | Call::PackChunksInto | Call::PackSignsInto => {
                let mut src = input.tensor(elements_dtype, &shape, &input.dims, true);
                let chunk = total.div_ceil(8).div_ceil(n_chunks);
                let rows = Rows { outer, inner, n: total.max(1), m: n_chunks * chunk };
                if matches!(input.call, Call::PackChunks) {
                    let big = Input { little: false, dims: vec![], other: vec![], ..*input };
                    let expected = rows.pack(&big, &read_bits(&src, false));
                    let mut out = [ptr::null_mut(); 40];
                    succeeds(gc_pack_chunks(src.pointer(), n_chunks, out.as_mut_ptr()));
                    for (k, &out) in out[..n_chunks].iter().enumerate() {
                        take(out, (1, 8), &[chunk], &expected[k * chunk..][..chunk]);
                    }
                    return;
                }
                let expected = rows.pack(input, &read_bits(&src, signs));
                let mut dst = input.tensor((1, 8), &[n_chunks, chunk], &[], false);
                let expected = with_bytes(&dst, &expected);
                let call = if signs { gc_pack_signs_into } else { gc_pack_chunks_into };
                succeeds(call(src.pointer().cast(), input.order(), dst.pointer().cast(), ptr::null_mut()));
                assert_eq!(dst.memory, expected);
            }
            Call::PackBits | Call::PackBitsInto => {
                let mut src = input.tensor(elements_dtype, &shape, &input.dims, true);
                let rows = Rows { outer, inner, n: length.max(1), m: length.div_ceil(8) };
                let expected = rows.pack(input, &read_bits(&src, false));
                let packed = shape_with(length.div_ceil(8));
                if matches!(input.call, Call::PackBits) {
                    let mut out = ptr::null_mut();
                    succeeds(gc_pack_bits(src.pointer(), axis, input.order(), &mut out));
                    take(out, (1, 8), &packed, &expected);
                    return;
                }
                let mut dst = input.tensor((1, 8), &packed, &input.other, false);
                let expected = with_bytes(&dst, &expected);
                let (from, to) = (src.pointer().cast(), dst.pointer().cast());
                succeeds(gc_pack_bits_into(from, axis, input.order(), to, ptr::null_mut()));
                assert_eq!(dst.memory, expected);
            }
            Call::UnpackBits | Call::UnpackBitsInto => {
                let mut src = input.tensor((1, 8), &shape, &input.dims, true);
                let count = match input.count {
                    None => length * 8,
                    Some(count @ 0..) => count as usize % (length * 8 + 20),
                    Some(count) => length * 8 - count.unsigned_abs() as usize % (length * 8 + 1),
                };
                if outer * inner * count > 2 * MOST_ELEMENTS {
                    return;
                }
                let rows = Rows { outer, inner, n: count.max(1), m: length };
                let bits = if count == 0 { vec![] } else { rows.unpack(input, &read_bytes(&src)) };
                let unpacked = shape_with(count);
                if matches!(input.call, Call::UnpackBits) {
                    let argument = match input.count {
                        None => GC_COUNT_ALL,
                        Some(0..) => count as i64,
                        // -0 would be 0, a count of no elements.
                        Some(_) if count == length * 8 => GC_COUNT_ALL,
                        Some(_) => count as i64 - length as i64 * 8,
                    };
                    let mut out = ptr::null_mut();
                    succeeds(gc_unpack_bits(src.pointer(), axis, argument, input.order(), &mut out));
                    let expected: Vec<u8> = bits.into_iter().map(u8::from).collect();
                    take(out, (1, 8), &unpacked, &expected);
                    return;
                }
                let mut dst = input.tensor(elements_dtype, &unpacked, &input.other, false);
                let expected = with_bits(&dst, &bits);
                let (from, to) = (src.pointer().cast(), dst.pointer().cast());
                succeeds(gc_unpack_bits_into(from, axis, input.order(), to, ptr::null_mut()));
                assert_eq!(dst.memory, expected);
            }
            Call::UnpackChunks => {
                let chunk = total.div_ceil(8).div_ceil(n_chunks);
                let mut chunks: Vec<Tensor> = (0..n_chunks)
                    .map(|k| {
                        let dim = input.other.get(k).copied();
                        input.tensor((1, 8), &[chunk], dim.as_slice(), true)
                    })
                    .collect();
                let bytes: Vec<u8> = chunks.iter().flat_map(read_bytes).collect();
                let rows = Rows { outer: 1, inner: 1, n: total.max(1), m: bytes.len() };
                let big = Input { little: false, dims: vec![], other: vec![], ..*input };
                let bits = if total == 0 { vec![] } else { rows.unpack(&big, &bytes) };
                let pointers: Vec<_> = chunks.iter_mut().map(Tensor::pointer).collect();
                let mut out = ptr::null_mut();
                succeeds(gc_unpack_chunks(pointers.as_ptr(), n_chunks, total as i64, &mut out));
                let expected: Vec<u8> = bits.into_iter().map(u8::from).collect();
                take(out, (6, 8), &[total], &expected);
            }
            Call::UnpackChunksInto => {
                let chunk = total.div_ceil(8).div_ceil(n_chunks);
                let mut src = input.tensor((1, 8), &[n_chunks, chunk], &[], false);
                let mut dst = input.tensor(elements_dtype, &shape, &input.dims, false);
                let rows = Rows { outer: 1, inner: 1, n: total.max(1), m: n_chunks * chunk };
                let bits = if total == 0 { vec![] } else { rows.unpack(input, &read_bytes(&src)) };
                let expected = with_bits(&dst, &bits);
                let (from, to) = (src.pointer().cast(), dst.pointer().cast());
                succeeds(gc_unpack_chunks_into(from, input.order(), to, ptr::null_mut()));
                assert_eq!(dst.memory, expected);
            }
        }
    }
}

fuzz_target!(|input: Input| run(&input));
