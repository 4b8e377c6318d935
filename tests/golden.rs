//! Replays tests/golden_codecs.txt, whose results come from the model of docs/NUMERICS.md, on every instruction set of
//! this processor, with one thread and with three. tests/python/golden.py describes the file format.

use std::{env, ffi::CStr, mem, process::Command, ptr, slice};

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLTensor};
use gradcodec::capi::*;

const GOLDEN: &str = include_str!("golden_codecs.txt");
const UINT8: DLDataType = DLDataType { code: DLDataTypeCode::UINT, bits: 8, lanes: 1 };
const UINT32: DLDataType = DLDataType { bits: 32, ..UINT8 };
const INT32: DLDataType = DLDataType { code: DLDataTypeCode::INT, ..UINT32 };
const FLOAT32: DLDataType = DLDataType { code: DLDataTypeCode::FLOAT, ..UINT32 };
/// Dtypes, indexed by their numbers in the file.
const DTYPES: [DLDataType; 3] =
    [FLOAT32, DLDataType { bits: 16, ..FLOAT32 }, DLDataType { code: DLDataTypeCode::BFLOAT, bits: 16, lanes: 1 }];

/// Returns number `index` of the splitmix64 stream `seed`.
fn drawn(seed: u64, index: usize) -> u64 {
    let mut z = (seed << 32).wrapping_add(index as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Returns elements between 2^-8 and 2^8 in magnitude; if `wild`, some of them are special values.
fn elements(seed: u64, count: usize, dtype: DLDataType, wild: bool) -> Vec<u8> {
    let (width, mantissa) = (u32::from(dtype.bits), [23, 10, 7][DTYPES.iter().position(|&one| one == dtype).unwrap()]);
    let (sign, first) = (1u64 << (width - 1), (1u64 << (width - 2 - mantissa)) - 9);
    let infinity = sign - (1 << mantissa);
    let special = [
        0,
        sign,
        1,
        infinity,
        sign | infinity,
        infinity | 1 << (mantissa - 1),
        infinity - 1,
        infinity - (1 << mantissa),
    ];
    let bits = |index| {
        let z = drawn(seed, index);
        match wild && (z >> 40).is_multiple_of(97) {
            true => special[(z >> 50 & 7) as usize],
            false => (z & 1) << (width - 1) | ((z >> 1 & 15) + first) << mantissa | z >> 8 & ((1 << mantissa) - 1),
        }
    };
    let mut elements = Vec::new();
    for index in 0..count {
        elements.extend_from_slice(&bits(index).to_le_bytes()[..width as usize / 8]);
    }
    elements
}

/// Returns the sum over all bytes of the byte plus one, times an odd number that depends on the index.
fn digest(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .enumerate()
        .fold(0, |sum, (at, &byte)| sum.wrapping_add((u64::from(byte) + 1).wrapping_mul(drawn(0, at) | 1)))
}

/// Tensor with its memory, which starts `first` bytes after an address aligned to 16.
struct Tensor {
    memory: Vec<u128>,
    first: usize,
    dtype: DLDataType,
    shape: Vec<i64>,
}

impl Tensor {
    fn new(dtype: DLDataType, shape: &[usize], first: usize) -> Self {
        let bytes = shape.iter().product::<usize>() * usize::from(dtype.bits / 8);
        let shape = shape.iter().map(|&size| size as i64).collect();
        Self { memory: vec![0xa5a5 << 96 | 0x5a; (first + bytes).div_ceil(16) + 1], first, dtype, shape }
    }

    fn of(dtype: DLDataType, shape: &[usize], first: usize, bytes: &[u8]) -> Self {
        let mut tensor = Self::new(dtype, shape, first);
        tensor.bytes_mut().copy_from_slice(bytes);
        tensor
    }

    fn size(&self) -> usize {
        self.shape.iter().product::<i64>() as usize * usize::from(self.dtype.bits / 8)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let size = self.size();
        // SAFETY: `memory` has at least `first + size` bytes, and `self` is borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast::<u8>().add(self.first), size) }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: `memory` has at least `first + size` bytes, and `self` is borrowed.
        unsafe { slice::from_raw_parts(self.memory.as_ptr().cast::<u8>().add(self.first), self.size()) }
    }

    fn view(&mut self) -> DLTensor {
        DLTensor {
            data: self.bytes_mut().as_mut_ptr().cast(),
            device: DLDevice { device_type: DLDeviceType::CPU, device_id: 0 },
            ndim: self.shape.len() as i32,
            dtype: self.dtype,
            shape: self.shape.as_mut_ptr(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        }
    }
}

/// Returns a tensor with the factor, or None if `word` is not a number.
fn factor(word: &str) -> Option<Tensor> {
    word.parse::<f32>().ok().map(|value| Tensor::of(FLOAT32, &[1], 0, &value.to_le_bytes()))
}

/// Returns the bytes of all tensors.
fn joined(tensors: &[Option<Tensor>]) -> Vec<u8> {
    tensors.iter().flatten().map(Tensor::bytes).collect::<Vec<_>>().concat()
}

/// Calls `call` with pointers to views of the tensors, NULL for missing ones.
fn with_views<R>(tensors: &mut [Option<Tensor>], call: impl FnOnce(&[*mut DLTensor]) -> R) -> R {
    let mut views: Vec<Option<DLTensor>> = tensors.iter_mut().map(|one| one.as_mut().map(Tensor::view)).collect();
    let pointers: Vec<*mut DLTensor> =
        views.iter_mut().map(|view| view.as_mut().map_or(ptr::null_mut(), ptr::from_mut)).collect();
    call(&pointers)
}

struct Case {
    codec: *mut gc_codec_t,
    values: DLDataType,
    segments: Vec<usize>,
    n_chunks: usize,
    stride: usize,
    server: Option<usize>,
    shard: usize,
    state_bytes: usize,
    /// Payloads of all steps, the newest first.
    payloads: Vec<Vec<u8>>,
}

fn list<T: std::str::FromStr>(text: &str) -> Vec<T> {
    text.split(',').filter_map(|word| word.parse().ok()).collect()
}

impl Case {
    fn new(words: &[&str]) -> Self {
        let number = |at: usize| words[at].parse::<u32>().unwrap();
        let (sizes, raw): (Vec<i64>, Vec<u8>) = (list(words[10]), list(words[11]));
        // SAFETY: zero is a valid value of each field.
        let mut options: gc_codec_options_t = unsafe { mem::zeroed() };
        options.struct_size = size_of::<gc_codec_options_t>() as u32;
        options.codec = number(0) as i32;
        options.device = DLDevice { device_type: DLDeviceType::CPU, device_id: 0 };
        (options.values, options.results) = (DTYPES[number(1) as usize], DTYPES[number(2) as usize]);
        (options.error, options.scale) = (number(3) as i32, number(4) as i32);
        (options.reduction, options.nonfinite) = (number(5) as i32, number(6) as i32);
        options.beta = f32::from_bits(number(7));
        (options.segments, options.n_segments) = (sizes.as_ptr(), sizes.len());
        (options.n_chunks, options.server) = (number(8) as usize, u64::from(number(9)));
        options.raw = if raw.is_empty() { ptr::null() } else { raw.as_ptr() };
        let mut codec = ptr::null_mut();
        // SAFETY: `options` and its segments are valid, and `codec` has room for a pointer.
        assert_eq!(unsafe { gc_codec_create(&options, &mut codec) }, 0);
        // SAFETY: `codec` was just created.
        let (payload, state) = unsafe { (gc_codec_payload_bytes(codec), gc_codec_state_bytes(codec)) };
        Self {
            codec,
            values: options.values,
            segments: list(words[10]),
            n_chunks: options.n_chunks,
            stride: payload as usize / options.n_chunks,
            server: (options.server > 0).then(|| options.server as usize - 1),
            shard: words[12].parse().unwrap_or(0),
            state_bytes: state as usize,
            payloads: Vec::new(),
        }
    }

    fn tensors(&self, dtype: DLDataType, seed: u64, wild: bool) -> Vec<Option<Tensor>> {
        let bytes = usize::from(dtype.bits / 8);
        let one = |(k, &count): (usize, &usize)| {
            let numbers = elements(seed + k as u64, count, dtype, wild);
            Some(Tensor::of(dtype, &[count], (seed as usize + k) % 8 * bytes, &numbers))
        };
        self.segments.iter().enumerate().map(one).collect()
    }

    fn encode(&mut self, seed: u64, wild: bool, factors: [&str; 2]) {
        let mut tensors = self.tensors(self.values, seed, wild);
        tensors.extend(factors.map(factor));
        tensors.push(Some(Tensor::new(UINT8, &[self.n_chunks, self.stride], 0)));
        let n = self.segments.len();
        let status = with_views(&mut tensors, |views| {
            let values = views.as_ptr().cast();
            // SAFETY: the codec is live, and the views describe memory of `tensors`.
            unsafe { gc_codec_encode(self.codec, values, n, views[n], views[n + 1], views[n + 2], ptr::null_mut()) }
        });
        assert_eq!(status, 0);
        self.payloads.insert(0, tensors[n + 2].as_ref().unwrap().bytes().to_vec());
    }

    /// Decodes the newest payload into tensors; returns the status and the values.
    fn decode(&mut self, words: &[&str], seed: u64) -> (gc_status_t, Vec<u8>) {
        let mut sent = self.payloads[0].clone();
        flip(&mut sent[(self.n_chunks - 1) * self.stride..], words[4]);
        let mut tensors = self.tensors(DTYPES[words[0].parse::<usize>().unwrap()], seed + 1000, false);
        tensors.push(Some(Tensor::of(UINT8, &[self.n_chunks, self.stride], 0, &sent)));
        tensors.push(factor(words[2]));
        let n = self.segments.len();
        let status = with_views(&mut tensors, |views| {
            let (divisor, mode) = (words[1].parse().unwrap(), words[3].parse().unwrap());
            let values = views.as_ptr();
            // SAFETY: the codec is live, and the views describe memory of `tensors`.
            unsafe { gc_codec_decode(self.codec, views[n], divisor, views[n + 1], mode, values, n, ptr::null_mut()) }
        });
        (status, joined(&tensors[..n]))
    }

    /// Reduces the server's chunk of recent payloads; returns the status and the resulting chunk.
    fn reduce(&mut self, words: &[&str]) -> (gc_status_t, Vec<u8>) {
        let (count, server) = (words[0].parse::<usize>().unwrap(), self.server.unwrap());
        let chunk = |k: usize| &self.payloads[k % self.payloads.len()][server * self.stride..][..self.stride];
        let mut chunks = (0..count).map(chunk).collect::<Vec<_>>().concat();
        flip(&mut chunks[(count - 1) * self.stride..], words[1]);
        let chunks = Tensor::of(UINT8, &[count, self.stride], 0, &chunks);
        let mut tensors = [Some(chunks), Some(Tensor::new(UINT8, &[self.stride], 0))];
        let status = with_views(&mut tensors, |views| {
            // SAFETY: the codec is live, and the views describe memory of `tensors`.
            unsafe { gc_codec_reduce(self.codec, server, views[0], views[1], ptr::null_mut()) }
        });
        (status, tensors[1].as_ref().unwrap().bytes().to_vec())
    }

    /// Returns tensors for the errors of the worker and, if there is a server, of its shard.
    fn errors(&self, seed: Option<u64>) -> [Option<Tensor>; 2] {
        let counts = [Some(self.segments.iter().sum()), self.server.map(|_| self.shard)];
        [0, 1].map(|k| {
            counts[k].map(|count: usize| match seed {
                Some(seed) => Tensor::of(FLOAT32, &[count], 0, &elements(seed + k as u64, count, FLOAT32, true)),
                None => Tensor::new(FLOAT32, &[count], 0),
            })
        })
    }

    /// Ends a step: END, RESET, ERRORS.
    fn end(&mut self, words: &[&str]) {
        let (codec, stream) = (self.codec, ptr::null_mut());
        if words[0] == "rollback" {
            // SAFETY: the codec is live.
            assert_eq!(unsafe { gc_codec_rollback(codec, stream) }, 0);
        } else if let Some(skip) = words[0].strip_prefix("commit") {
            let mut skip = [Some(Tensor::of(INT32, &[1], 0, &skip.parse::<i32>().unwrap().to_le_bytes()))];
            // SAFETY: the codec is live, and the views describe live tensors.
            assert_eq!(with_views(&mut skip, |views| unsafe { gc_codec_commit(codec, views[0], stream) }), 0);
        }
        if words[1] == "reset" {
            // SAFETY: the codec is live.
            assert_eq!(unsafe { gc_codec_reset(codec, stream) }, 0);
        }
        if let Ok(seed) = words[2].parse() {
            let status = with_views(&mut self.errors(Some(seed)), |views| {
                // SAFETY: the codec is live, and the views describe live tensors.
                unsafe { gc_codec_errors_in(codec, views[0], views[1], stream) }
            });
            assert_eq!(status, 0);
        }
    }

    /// Returns the bytes of flags, state and errors.
    fn kept(&self) -> Vec<u8> {
        let (codec, stream) = (self.codec, ptr::null_mut());
        let flags = Some(Tensor::new(UINT32, &[1], 0));
        let mut tensors = vec![flags, Some(Tensor::new(UINT8, &[self.state_bytes], 0))];
        tensors.extend(self.errors(None));
        with_views(&mut tensors, |views| {
            // SAFETY: the codec is live, and the views describe live tensors.
            assert_eq!(unsafe { gc_codec_flags(codec, views[0], stream) }, 0);
            // SAFETY: the codec is live, and the views describe live tensors.
            assert_eq!(unsafe { gc_codec_state_out(codec, views[1], stream) }, 0);
            // SAFETY: the codec is live, and the views describe live tensors.
            assert_eq!(unsafe { gc_codec_errors_out(codec, views[2], views[3], stream) }, 0);
        });
        joined(&tensors)
    }

    /// Runs a step and returns its results in the format of the file.
    fn step(&mut self, words: &[&str]) -> String {
        let seed = words[0].parse().unwrap();
        self.encode(seed, words[1] == "1", [words[2], words[3]]);
        let (decoded, mut results) = self.decode(&words[4..9], seed);
        let mut reduced = 0;
        if words[9] != "-" {
            let (status, chunk) = self.reduce(&words[9..11]);
            reduced = status;
            results.extend(chunk);
        }
        self.end(&words[11..]);
        let [payload, results, kept] = [&self.payloads[0], &results, &self.kept()].map(|bytes| digest(bytes));
        format!("{decoded} {reduced} {payload:016x} {results:016x} {kept:016x}")
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        // SAFETY: the codec is live, and nothing uses it afterwards.
        unsafe { gc_codec_free(self.codec) };
    }
}

fn flip(bytes: &mut [u8], word: &str) {
    if let Some((at, bit)) = word.split_once(':') {
        bytes[at.parse::<usize>().unwrap()] ^= 1 << bit.parse::<u32>().unwrap();
    }
}

fn replay() {
    let (mut case, mut cases) = (None, 0);
    for (number, line) in GOLDEN.lines().enumerate() {
        let (step, expected) = line.split_once(" = ").unwrap_or((line, ""));
        let words: Vec<&str> = step.split(' ').collect();
        if words[0] == "case" {
            case = Some(Case::new(&words[1..]));
            cases += 1;
            continue;
        }
        assert_eq!(case.as_mut().unwrap().step(&words[1..]), expected, "line {}: {line}", number + 1);
    }
    assert!(cases >= 100, "{cases} cases");
}

#[test]
fn every_instruction_set_and_any_number_of_threads_gives_the_golden_results() {
    if env::var_os("GRADCODEC_TEST_REPLAYS").is_some() {
        for threads in env::var("GRADCODEC_TEST_REPLAYS").unwrap().split(' ') {
            assert_eq!(gc_set_threads(threads.parse().unwrap()), 0);
            replay();
        }
        return;
    }
    // A process selects its instruction set once. The text lists those of this processor.
    // SAFETY: the text ends with a NUL and stays until the next call.
    let about = unsafe { CStr::from_ptr(gc_build_info()) }.to_str().unwrap();
    let sets = about.lines().find_map(|line| line.strip_prefix("instruction set: ")).unwrap();
    for set in sets.split_once(", of ").unwrap().1.split(' ') {
        let threads = if set == "avx512" { "1 3" } else { "3" };
        let run = Command::new(env::current_exe().unwrap())
            .env("GRADCODEC_TEST_REPLAYS", threads)
            .env("GRADCODEC_CPU", set)
            .output()
            .unwrap();
        assert!(run.status.success(), "{set}: {}", String::from_utf8_lossy(&run.stdout));
    }
}
