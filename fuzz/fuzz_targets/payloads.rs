//! Payloads and states from untrusted sources. A payload of this codec is changed anywhere, mostly in its header; then
//! it is decoded and reduced, and a changed state is loaded. Bytes that the codec cannot have written must give CORRUPT
//! and change nothing. All others must give numbers with the payload's scales, and no write beyond the tensors.
//!
//! gc_decode gets the same bytes, from any address, and arbitrary ones: each must give a tensor or CORRUPT.
#![no_main]

use std::{mem, ptr};

use arbitrary::Arbitrary;
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLTensor};
use gradcodec::capi::*;
use libfuzzer_sys::fuzz_target;

const CORRUPT: gc_status_t = 9;
const HEADER: usize = 64;

#[derive(Arbitrary, Debug)]
struct Input {
    sign: bool,
    error: u8,
    nonfinite: u8,
    segments: Vec<u8>,
    n_chunks: u8,
    server: u8,
    gradient: u8,
    changes: Vec<Change>,
    add: bool,
    half: bool,
    voters: u8,
    /// Arbitrary bytes, in place of the payload.
    noise: Option<Vec<u8>>,
}

/// Change of a byte, mostly of a header or of the scales behind it.
#[derive(Arbitrary, Debug)]
struct Change {
    anywhere: Option<u16>,
    chunk: u8,
    place: u8,
    xor: u8,
}

/// Memory aligned to 16, of exactly the described bytes.
struct Bytes(Vec<u128>, usize);

impl Bytes {
    fn of(count: usize) -> Self {
        Self(vec![0x5a5a_5a5a_5a5a_5a5a_5a5a_5a5a_5a5a_5a5a; count.div_ceil(16)], count)
    }

    fn get(&mut self) -> &mut [u8] {
        // SAFETY: any pattern is a byte, and the memory has at least `self.1` bytes.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.1) }
    }
}

fn view(data: *mut u8, code: u8, bits: u8, shape: &mut [i64]) -> DLTensor {
    DLTensor {
        data: data.cast(),
        device: DLDevice { device_type: DLDeviceType::CPU, device_id: 0 },
        ndim: shape.len() as i32,
        dtype: DLDataType { code: DLDataTypeCode(code), bits, lanes: 1 },
        shape: shape.as_mut_ptr(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    }
}

/// Returns false if the codec must refuse a chunk, by docs/NUMERICS.md: a field besides the flags has changed, a flag
/// besides NONFINITE is set, or it would not have written the scale of a segment. A block codec takes any scale.
fn is_right(good: &[u8], got: &[u8], segments: usize) -> bool {
    let field = |range: std::ops::Range<usize>| good[range.clone()] == got[range];
    let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    field(0..28) && field(32..HEADER) && word(got, 28) & !2 == 0 && {
        (0..segments).map(|segment| HEADER + 4 * segment).all(|at| {
            let (before, scale) = (f32::from_bits(word(good, at)), f32::from_bits(word(got, at)));
            // A NaN may have any sign. Segments that the chunk does not hold, and SIGN, have one scale: unchecked here.
            before.to_bits() == scale.to_bits() || !(scale.is_sign_negative() && !scale.is_nan())
        })
    }
}

/// Decodes any bytes, which begin `shift` bytes behind an aligned address. Returns the values, or None for CORRUPT.
fn decoded(bytes: &[u8], shift: usize, half: bool) -> Option<Vec<u8>> {
    let mut memory = Bytes::of(bytes.len() + shift);
    memory.get()[shift..].copy_from_slice(bytes);
    let mut shape = [bytes.len() as i64];
    let tensor = view(memory.get()[shift..].as_mut_ptr(), 1, 8, &mut shape);
    let payload = DLManagedTensor { dl_tensor: tensor, manager_ctx: ptr::null_mut(), deleter: None };
    let bits = if half { 16 } else { 32 };
    let dtype = DLDataType { code: DLDataTypeCode(2), bits, lanes: 1 };
    let mut out = ptr::null_mut();
    // SAFETY: `payload` describes `memory`, `out` is a place for a pointer, and the result is released once.
    unsafe {
        let status = gc_decode(&payload, dtype, &mut out);
        assert!(memory.get()[shift..] == *bytes, "the payload was written to");
        if status != 0 {
            assert!(status == CORRUPT && out.is_null(), "status {status}");
            return None;
        }
        let tensor = &(*out).dl_tensor;
        let count = *tensor.shape as usize;
        assert!(tensor.ndim == 1 && count as u64 == u64::from_le_bytes(bytes[32..40].try_into().unwrap()));
        let values = match count * usize::from(bits / 8) {
            0 => Vec::new(),
            size => std::slice::from_raw_parts(tensor.data.cast::<u8>(), size).to_vec(),
        };
        gc_tensor_free(out);
        Some(values)
    }
}

fuzz_target!(|input: Input| {
    let sizes: Vec<i64> = input.segments.iter().take(6).map(|&size| i64::from(size)).collect();
    // SAFETY: zeros are valid for each field.
    let mut options: gc_codec_options_t = unsafe { mem::zeroed() };
    options.struct_size = size_of::<gc_codec_options_t>() as u32;
    options.codec = match input.error / 3 % 8 {
        0..=2 => 1 + i32::from(input.sign),
        block_codec => i32::from(block_codec),
    };
    let has_blocks = options.codec > 2;
    options.error = if options.codec == 2 { 2 } else { i32::from(input.error % 3) };
    let raw: Vec<u8> = sizes.iter().map(|&size| size as u8 & 1).collect();
    if has_blocks && input.sign {
        options.raw = raw.as_ptr();
    }
    options.reduction = i32::from(options.codec != 2 && input.voters & 4 != 0);
    let scales = if has_blocks { 0 } else { sizes.len() };
    options.nonfinite = i32::from(input.nonfinite % 2);
    (options.segments, options.n_segments) = (sizes.as_ptr(), sizes.len());
    options.n_chunks = 1 + usize::from(input.n_chunks % 4);
    let number = usize::from(input.server) % options.n_chunks;
    options.server = 1 + number as u64;
    let mut codec = ptr::null_mut();
    // SAFETY: the options are valid, all tensors describe memory that is alive, and the codec is released once.
    unsafe {
        assert_eq!(gc_codec_create(&options, &mut codec), 0);
        let bytes = gc_codec_payload_bytes(codec) as usize;
        let stride = bytes / options.n_chunks;
        let mut payload = Bytes::of(bytes);
        let mut shape = [bytes as i64];
        let mut of_payload = view(payload.get().as_mut_ptr(), 1, 8, &mut shape);

        // Encodes one step.
        let mut noise = u64::from(input.gradient);
        let mut gradients: Vec<Vec<f32>> = sizes
            .iter()
            .map(|&size| {
                (0..size)
                    .map(|_| {
                        noise = noise.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        (noise >> 40) as f32 - 8e6
                    })
                    .collect()
            })
            .collect();
        let mut lengths: Vec<[i64; 1]> = sizes.iter().map(|&size| [size]).collect();
        let mut values: Vec<DLTensor> = gradients
            .iter_mut()
            .zip(&mut lengths)
            .map(|(gradient, length)| view(gradient.as_mut_ptr().cast(), 2, 32, length))
            .collect();
        let list: Vec<*const DLTensor> = values.iter().map(ptr::from_ref).collect();
        let status = gc_codec_encode(
            codec,
            list.as_ptr(),
            list.len(),
            ptr::null(),
            ptr::null(),
            &mut of_payload,
            ptr::null_mut(),
        );
        assert_eq!(status, 0);
        let good = payload.get().to_vec();

        // Changes the payload.
        match &input.noise {
            Some(noise) if !noise.is_empty() => {
                payload.get().iter_mut().zip(noise.iter().cycle()).for_each(|(byte, &other)| *byte = other);
            }
            _ => {
                for change in input.changes.iter().take(20) {
                    let near =
                        usize::from(change.chunk) % options.n_chunks * stride + usize::from(change.place) % stride;
                    payload.get()[change.anywhere.map_or(near, |at| usize::from(at) % bytes)] ^= change.xor;
                }
            }
        }
        let got = payload.get().to_vec();
        let shift = usize::from(input.gradient % 17);
        let alone = options.n_chunks == 1 && sizes.len() == 1 && !(has_blocks && input.sign && raw[0] != 0);
        let single = decoded(&got, shift, input.half);
        assert!(
            good != got || single.is_some() == alone,
            "a payload of one segment and one chunk is refused, or another taken"
        );
        if let Some(noise) = &input.noise {
            decoded(noise, shift, input.half);
        }
        let rows = || good.chunks(stride).zip(got.chunks(stride));
        let all_right = rows().all(|(good, got)| is_right(good, got, scales));

        // Decodes all of the payload or nothing, with the payload's scales.
        let (code, bits) = if input.half && !input.add { (4, 16) } else { (2, 32) };
        let mut room: Vec<Vec<u8>> = sizes.iter().map(|&size| vec![0; size as usize * bits as usize / 8]).collect();
        for ((value, room), length) in values.iter_mut().zip(&mut room).zip(&mut lengths) {
            *value = view(room.as_mut_ptr(), code, bits, length);
        }
        let outputs: Vec<*mut DLTensor> = values.iter_mut().map(ptr::from_mut).collect();
        let mode = i32::from(input.add);
        let count = outputs.len();
        let list = outputs.as_ptr();
        let status = gc_codec_decode(codec, &of_payload, 1, ptr::null(), mode, list, count, ptr::null_mut());
        assert!(status == 0 || status == CORRUPT);
        // is_right() does not check the scale of a segment that a chunk does not hold, nor those of SIGN.
        assert!(all_right || status == CORRUPT, "taken, and should not have been");
        assert!(status == 0 || room.iter().flatten().all(|&byte| byte == 0), "changed by a call that was refused");
        assert!(good != got || status == 0, "its own payload is refused");
        if status == 0 && (code, bits) == (2, 32) && !has_blocks {
            for (segment, room) in room.iter().enumerate() {
                for (element, value) in room.chunks_exact(4).enumerate() {
                    let value = f32::from_le_bytes(value.try_into().unwrap());
                    let found = got.chunks(stride).any(|chunk| {
                        let at = HEADER + 4 * segment;
                        let scale = f32::from_le_bytes(chunk[at..at + 4].try_into().unwrap());
                        value.abs() == scale || (value.is_nan() && scale.is_nan())
                    });
                    assert!(found, "{value} for element {element} of segment {segment}: no chunk has that scale");
                }
            }
        }

        // Reduces: an output is written in any case, with a flag if it is corrupt.
        let voters = 1 + usize::from(input.voters % 4);
        let mut chunks = Bytes::of(voters * stride);
        for voter in 0..voters {
            // The last chunk is the changed one.
            let source = if voter + 1 == voters { &got } else { &good };
            chunks.get()[voter * stride..][..stride].copy_from_slice(&source[number * stride..][..stride]);
        }
        let (mut reduced, mut chunk_shape, mut row) =
            (Bytes::of(stride), [voters as i64, stride as i64], [stride as i64]);
        let of_chunks = view(chunks.get().as_mut_ptr(), 1, 8, &mut chunk_shape);
        let mut of_reduced = view(reduced.get().as_mut_ptr(), 1, 8, &mut row);
        let right = is_right(&good[number * stride..][..stride], &got[number * stride..][..stride], scales);
        let status = gc_codec_reduce(codec, number, &of_chunks, &mut of_reduced, ptr::null_mut());
        assert!((status == 0 && right) || status == CORRUPT);
        assert_eq!(reduced.get()[28] & 1 != 0, status == CORRUPT);
        assert_eq!(reduced.get()[..4], *b"GCPL");

        // Loads a state that is changed in the same way: all of it or nothing.
        let count = gc_codec_state_bytes(codec) as usize;
        let (mut state, mut after, mut shape) = (Bytes::of(count), Bytes::of(count), [count as i64]);
        let mut of_state = view(state.get().as_mut_ptr(), 1, 8, &mut shape);
        assert_eq!(gc_codec_state_out(codec, &mut of_state, ptr::null_mut()), 0);
        let before = state.get().to_vec();
        for change in input.changes.iter().take(20) {
            state.get()[change.anywhere.map_or(usize::from(change.place), usize::from) % count] ^= change.xor;
        }
        let status = gc_codec_state_in(codec, &of_state, ptr::null_mut());
        assert!(status == 0 || status == CORRUPT);
        let header_changed = before[..56] != state.get()[..56];
        assert!(!header_changed || status == CORRUPT);
        let mut of_after = of_state;
        of_after.data = after.get().as_mut_ptr().cast();
        assert_eq!(gc_codec_state_out(codec, &mut of_after, ptr::null_mut()), 0);
        if status == CORRUPT {
            assert!(after.get() == before, "a refused state was taken");
        } else {
            assert_eq!(after.get()[..HEADER], state.get()[..HEADER]);
        }
        gc_codec_free(codec);
    }
});
