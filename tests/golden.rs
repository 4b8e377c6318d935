//! Replays tests/golden_codecs.txt, whose results are those of the model of docs/NUMERICS.md (tests/python/golden.py says what
//! its lines are), on every instruction set of this processor, by one thread and by three.

use std::{env, mem, process::Command, ptr, slice};

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLTensor};
use gradcodec::capi::*;

const GOLDEN: &str = include_str!("golden_codecs.txt");
const UINT8: DLDataType = DLDataType { code: DLDataTypeCode::UINT, bits: 8, lanes: 1 };
const UINT32: DLDataType = DLDataType { bits: 32, ..UINT8 };
const INT32: DLDataType = DLDataType { code: DLDataTypeCode::INT, ..UINT32 };
const FLOAT32: DLDataType = DLDataType { code: DLDataTypeCode::FLOAT, ..UINT32 };
/// By the numbers that the file has for them.
const DTYPES: [DLDataType; 3] =
    [FLOAT32, DLDataType { bits: 16, ..FLOAT32 }, DLDataType { code: DLDataTypeCode::BFLOAT, bits: 16, lanes: 1 }];

/// One splitmix64 number of a stream.
fn drawn(seed: u64, index: usize) -> u64 {
    let mut z = (seed << 32).wrapping_add(index as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Elements of a dtype between 2^-8 and 2^8; if wild, some of them are special.
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
    (0..count).flat_map(|index| bits(index).to_le_bytes().into_iter().take(width as usize / 8)).collect()
}

/// The sum of all bytes, each plus one and times an odd number of its own.
fn digest(parts: &[&[u8]]) -> u64 {
    let bytes = parts.iter().copied().flatten().enumerate();
    bytes.fold(0, |sum, (at, &byte)| sum.wrapping_add((u64::from(byte) + 1).wrapping_mul(drawn(0, at) | 1)))
}

/// A tensor with its memory, some bytes beyond an alignment of 16.
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
        // SAFETY: the words have `first` and `size` bytes.
        unsafe { slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast::<u8>().add(self.first), size) }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the words have `first` and `size` bytes.
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

/// A factor whose bits these are, or none.
fn factor(bits: u32) -> Option<Tensor> {
    (bits != 0).then(|| Tensor::of(FLOAT32, &[1], 0, &bits.to_le_bytes()))
}

/// Calls with the views of these tensors, NULL for those that are missing.
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
    /// The newest first.
    payloads: Vec<Vec<u8>>,
}

fn list<T: std::str::FromStr>(text: &str) -> Vec<T> {
    text.split(',').filter_map(|word| word.parse().ok()).collect()
}

impl Case {
    fn new(words: &[&str]) -> Self {
        let number = |at: usize| words[at].parse::<u32>().unwrap();
        let (sizes, raw): (Vec<i64>, Vec<u8>) = (list(words[10]), list(words[11]));
        // SAFETY: zeros are a value of each field.
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
        // SAFETY: options with their segments, and room for a pointer.
        assert_eq!(unsafe { gc_codec_create(&options, &mut codec) }, 0);
        // SAFETY: a codec.
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

    fn encode(&mut self, seed: u64, wild: bool, factors: [u32; 2]) -> (gc_status_t, u64) {
        let mut tensors = self.tensors(self.values, seed, wild);
        tensors.extend(factors.map(factor));
        tensors.push(Some(Tensor::new(UINT8, &[self.n_chunks, self.stride], 0)));
        let n = self.segments.len();
        let status = with_views(&mut tensors, |views| {
            let values = views.as_ptr().cast();
            // SAFETY: a codec, and tensors with their memory.
            unsafe { gc_codec_encode(self.codec, values, n, views[n], views[n + 1], views[n + 2], ptr::null_mut()) }
        });
        self.payloads.insert(0, tensors[n + 2].as_ref().unwrap().bytes().to_vec());
        (status, digest(&[&self.payloads[0]]))
    }

    fn decode(&mut self, words: &[&str], seed: u64) -> (gc_status_t, u64) {
        let number = |at: usize| words[at].parse::<u32>().unwrap();
        let mut sent = self.payloads[0].clone();
        flip(&mut sent[(self.n_chunks - 1) * self.stride..], words[4], words[5]);
        let mut tensors = self.tensors(DTYPES[number(0) as usize], seed + 1000, false);
        tensors.push(Some(Tensor::of(UINT8, &[self.n_chunks, self.stride], 0, &sent)));
        tensors.push(factor(number(2)));
        let n = self.segments.len();
        let status = with_views(&mut tensors, |views| {
            let (divisor, mode) = (number(1) as i32, number(3) as i32);
            let values = views.as_ptr();
            // SAFETY: a codec, and tensors with their memory.
            unsafe { gc_codec_decode(self.codec, views[n], divisor, views[n + 1], mode, values, n, ptr::null_mut()) }
        });
        let values: Vec<&[u8]> = tensors[..n].iter().flatten().map(Tensor::bytes).collect();
        (status, digest(&values))
    }

    fn reduce(&mut self, words: &[&str]) -> (gc_status_t, u64) {
        let (count, server) = (words[0].parse::<usize>().unwrap(), self.server.unwrap());
        let chunk = |k: usize| &self.payloads[k % self.payloads.len()][server * self.stride..][..self.stride];
        let mut chunks: Vec<u8> = (0..count).flat_map(chunk).copied().collect();
        flip(&mut chunks[(count - 1) * self.stride..], words[1], words[2]);
        let chunks = Tensor::of(UINT8, &[count, self.stride], 0, &chunks);
        let mut tensors = [Some(chunks), Some(Tensor::new(UINT8, &[self.stride], 0))];
        let status = with_views(&mut tensors, |views| {
            // SAFETY: a codec, and tensors with their memory.
            unsafe { gc_codec_reduce(self.codec, server, views[0], views[1], ptr::null_mut()) }
        });
        (status, digest(&[tensors[1].as_ref().unwrap().bytes()]))
    }

    /// The errors of the worker and, if there is a server, of its shard.
    fn errors(&self, seed: Option<u64>) -> [Option<Tensor>; 2] {
        let counts = [Some(self.segments.iter().sum()), self.server.map(|_| self.shard)];
        [0, 1].map(|k| {
            counts[k].map(|count: usize| match seed {
                Some(seed) => Tensor::of(FLOAT32, &[count], 0, &elements(seed + k as u64, count, FLOAT32, true)),
                None => Tensor::new(FLOAT32, &[count], 0),
            })
        })
    }

    /// Runs a line; what came out of it.
    fn step(&mut self, words: &[&str], seed: &mut u64) -> (gc_status_t, u64) {
        let number = |at: usize| words[at].parse::<u32>().unwrap();
        let (codec, stream) = (self.codec, ptr::null_mut());
        let one = |dtype, count, call: &dyn Fn(*mut DLTensor) -> gc_status_t| {
            let mut tensors = [Some(Tensor::new(dtype, &[count], 0))];
            let status = with_views(&mut tensors, |views| call(views[0]));
            (status, digest(&[tensors[0].as_ref().unwrap().bytes()]))
        };
        match words[0] {
            "encode" => {
                *seed = words[1].parse().unwrap();
                self.encode(*seed, number(2) == 1, [number(3), number(4)])
            }
            "decode" => self.decode(&words[1..], *seed),
            "reduce" => self.reduce(&words[1..]),
            // SAFETY: as above.
            "flags" => one(UINT32, 1, &|dst| unsafe { gc_codec_flags(codec, dst, stream) }),
            // SAFETY: as above.
            "state" => one(UINT8, self.state_bytes, &|dst| unsafe { gc_codec_state_out(codec, dst, stream) }),
            "kept" => {
                let mut both = self.errors(None);
                let status = with_views(&mut both, |views| {
                    // SAFETY: as above.
                    unsafe { gc_codec_errors_out(codec, views[0], views[1], stream) }
                });
                (status, digest(&both.iter().flatten().map(Tensor::bytes).collect::<Vec<_>>()))
            }
            "errors" => {
                let status = with_views(&mut self.errors(Some(words[1].parse().unwrap())), |views| {
                    // SAFETY: as above.
                    unsafe { gc_codec_errors_in(codec, views[0], views[1], stream) }
                });
                (status, 0)
            }
            "commit" => {
                let mut skip = [Some(Tensor::of(INT32, &[1], 0, &number(1).to_le_bytes()))];
                // SAFETY: as above.
                (with_views(&mut skip, |views| unsafe { gc_codec_commit(codec, views[0], stream) }), 0)
            }
            // SAFETY: as above.
            "rollback" => (unsafe { gc_codec_rollback(codec, stream) }, 0),
            // SAFETY: as above.
            "reset" => (unsafe { gc_codec_reset(codec, stream) }, 0),
            other => panic!("{other}: no step"),
        }
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        // SAFETY: a codec, which nothing uses any more.
        unsafe { gc_codec_free(self.codec) };
    }
}

fn flip(bytes: &mut [u8], at: &str, bit: &str) {
    if let (Ok(at), Ok(bit)) = (at.parse::<usize>(), bit.parse::<u32>()) {
        bytes[at] ^= 1 << bit;
    }
}

fn replay() {
    let (mut case, mut seed, mut cases) = (None, 0, 0);
    for (number, line) in GOLDEN.lines().enumerate() {
        let (step, expected) = line.split_once(" = ").unwrap_or((line, "0 0"));
        let words: Vec<&str> = step.split(' ').collect();
        if words[0] == "case" {
            case = Some(Case::new(&words[1..]));
            cases += 1;
            continue;
        }
        let (status, sum) = case.as_mut().unwrap().step(&words, &mut seed);
        let (status_expected, sum_expected) = expected.split_once(' ').unwrap();
        assert_eq!(status.to_string(), status_expected, "line {}: {line}", number + 1);
        assert_eq!(sum, u64::from_str_radix(sum_expected, 16).unwrap(), "line {}: {line}", number + 1);
    }
    assert!(cases >= 100, "{cases} cases");
}

#[test]
fn every_instruction_set_and_any_number_of_threads_gives_the_golden_results() {
    if env::var_os("GRADCODEC_TEST_REPLAYS").is_some() {
        for threads in [1, 3] {
            assert_eq!(gc_set_threads(threads), 0);
            replay();
        }
        return;
    }
    // The set is chosen once in a process. A set that the processor lacks stands for the best one.
    for set in ["portable", "avx2", "avx512"] {
        let run = Command::new(env::current_exe().unwrap())
            .env("GRADCODEC_TEST_REPLAYS", "1")
            .env("GRADCODEC_CPU", set)
            .output()
            .unwrap();
        assert!(run.status.success(), "{set}: {}", String::from_utf8_lossy(&run.stdout));
    }
}
