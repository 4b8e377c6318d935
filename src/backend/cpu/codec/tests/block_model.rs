//! docs/NUMERICS.md 11 as it stands there, one element after the other; what the page calls exact in float64, which holds
//! all of it.

use crate::{
    plan::codec::{CORRUPT, Kind, NONFINITE, NonFinite, Reduction, Rules, TAKEN_BACK},
    tensor::Dtype,
};

use super::numbers::{canonical, narrow, round, widen};

const LIMIT: f32 = f32::from_bits(0x7f00_0000); // 2^127

/// A row of the page's table: bits of a code, block, bytes of a scale, and M.
pub fn format(kind: Kind) -> (usize, usize, usize, f32) {
    match kind {
        Kind::Mxfp8 => (8, 32, 1, 448.0),
        Kind::Int8 => (8, 64, 2, 127.0),
        Kind::Int4 => (4, 32, 2, 7.0),
        Kind::Mxfp4 => (4, 32, 1, 6.0),
        _ => (16, 32, 0, 0.0),
    }
}

/// D(code).
pub fn value(kind: Kind, code: u16) -> f64 {
    let float = |mantissa_bits: u32, sign: bool, bias: i32| {
        let mantissa = f64::from(code & ((1 << mantissa_bits) - 1));
        let exponent = i32::from(code >> mantissa_bits & if mantissa_bits == 3 { 15 } else { 3 });
        let of_mantissa = mantissa / f64::from(1 << mantissa_bits);
        let size = match exponent {
            0 => of_mantissa * 2f64.powi(1 - bias),
            _ => (1.0 + of_mantissa) * 2f64.powi(exponent - bias),
        };
        if sign { -size } else { size }
    };
    match kind {
        Kind::Mxfp8 if code & 0x7f == 0x7f => f64::NAN,
        Kind::Mxfp8 => float(3, code & 0x80 != 0, 7),
        Kind::Mxfp4 => float(1, code & 8 != 0, 1),
        Kind::Int8 => f64::from(code as u8 as i8),
        Kind::Int4 => f64::from(if code < 8 { code as i8 } else { code as i8 - 16 }),
        _ => f64::from(widen(Dtype::BF16, code.into())),
    }
}

/// The scale, as a number, that memory has.
fn step(kind: Kind, scale: u16) -> f64 {
    match format(kind).2 {
        0 => 1.0,
        1 if scale == 255 => f64::NAN,
        1 => 2f64.powi(i32::from(scale) - 127),
        _ => f64::from(widen(Dtype::BF16, scale.into())),
    }
}

fn scale_for(kind: Kind, largest: f32) -> u16 {
    if format(kind).2 == 1 {
        let reciprocal = f32::from_bits(if kind == Kind::Mxfp8 { 0x3b12_4925 } else { 0x3e2a_aaab });
        let d = (largest * reciprocal).to_bits();
        let (exponent, mantissa) = (d >> 23, d & 0x7f_ffff);
        let up = exponent > 0 && mantissa != 0 || exponent == 0 && mantissa > 0x40_0000;
        return (exponent + u32::from(up)) as u16;
    }
    if largest < 2f32.powi(-100) {
        return 0;
    }
    let exact = largest / format(kind).3;
    let down = (exact.to_bits() >> 16) as u16;
    if widen(Dtype::BF16, down.into()) < exact { down + 1 } else { down }
}

fn nearest(kind: Kind, c: f32, scale: u16) -> u16 {
    let (bits, _, scale_bytes, most) = format(kind);
    match scale_bytes {
        0 => return narrow(Dtype::BF16, c) as u16,
        2 if scale == 0 => return 0,
        2 => {
            let inverse = 1.0 / step(kind, scale) as f32;
            let q = (c * inverse).round_ties_even().clamp(-most, most) as i32;
            return (q & ((1 << bits) - 1)) as u16;
        }
        _ => {}
    }
    let size = f64::from(c).abs() / step(kind, scale);
    let codes = 0..if kind == Kind::Mxfp8 { 0x7f } else { 8 };
    let far = |code: u16| (value(kind, code) - size).abs();
    let code = codes.min_by(|&a, &b| far(a).total_cmp(&far(b)).then((a % 2).cmp(&(b % 2)))).unwrap();
    code | u16::from(c.is_sign_negative()) << (bits - 1)
}

/// A block's scale, codes and what they stand for; None: it is not finite.
pub fn quantize(kind: Kind, c: &[f32]) -> Option<(u16, Vec<u16>, Vec<f32>)> {
    if c.iter().any(|c| c.is_nan() || c.abs() >= LIMIT) {
        return None;
    }
    let largest = c.iter().fold(0.0f32, |most, c| most.max(c.abs()));
    let scale = if format(kind).2 == 0 { 0 } else { scale_for(kind, largest) };
    let codes: Vec<u16> = c.iter().map(|&c| nearest(kind, c, scale)).collect();
    let values = codes.iter().map(|&code| (value(kind, code) * step(kind, scale)) as f32).collect();
    Some((scale, codes, values))
}

/// Blocks and raw elements, before they are cut into chunks.
#[derive(Default)]
struct Stream {
    scales: Vec<u16>,
    codes: Vec<u16>,
    raws: Vec<f32>,
    nonfinite: bool,
}

/// A handle. Segments and parts keep their errors by number.
pub struct Model {
    pub rules: Rules,
    pub segments: Vec<usize>,
    pub raw: Vec<bool>,
    pub n_chunks: usize,
    pub server: Option<usize>,
    pub flags: u32,
    since_commit: u32,
    pub errors: [Vec<Vec<f32>>; 2],
    pending: [Option<Vec<Vec<f32>>>; 2],
    /// Now, and after a commit.
    pub turn: u64,
    next_turn: u64,
}

impl Model {
    pub fn new(rules: Rules, segments: &[usize], raw: &[bool], n_chunks: usize, server: Option<usize>) -> Self {
        let mut model = Self {
            rules,
            segments: segments.to_vec(),
            raw: raw.to_vec(),
            n_chunks,
            server,
            flags: 0,
            since_commit: 0,
            errors: Default::default(),
            pending: [None, None],
            turn: 0,
            next_turn: 0,
        };
        let parts = server.map_or(vec![], |chunk| (0..segments.len()).map(|i| model.part(i, chunk).len()).collect());
        model.errors = [segments.to_vec(), parts].map(|counts| counts.iter().map(|&n| vec![0.0; n]).collect());
        model
    }

    fn block(&self) -> usize {
        format(self.rules.kind).1
    }

    /// The number of a segment's first block, or raw element.
    fn place(&self, segment: usize) -> usize {
        let places = |i: usize| if self.raw[i] { self.segments[i] } else { self.segments[i].div_ceil(self.block()) };
        (0..segment).filter(|&i| self.raw[i] == self.raw[segment]).map(places).sum()
    }

    /// U and V.
    fn each(&self) -> [usize; 2] {
        [false, true].map(|raw| {
            let all = (0..self.segments.len()).filter(|&i| self.raw[i] == raw);
            let places = all.map(|i| if raw { self.segments[i] } else { self.segments[i].div_ceil(self.block()) });
            places.sum::<usize>().div_ceil(self.n_chunks)
        })
    }

    /// Where scales end, where codes begin and end, where raw elements begin and end, and the stride.
    fn layout(&self) -> [usize; 6] {
        let ([blocks, raws], (bits, block, scale, _)) = (self.each(), format(self.rules.kind));
        let scales_end = 64 + blocks * scale;
        let codes = scales_end.next_multiple_of(16);
        let codes_end = codes + blocks * block * bits / 8;
        let raw = codes_end.next_multiple_of(16);
        [scales_end, codes, codes_end, raw, raw + 4 * raws, (raw + 4 * raws).next_multiple_of(16)]
    }

    pub fn stride(&self) -> usize {
        self.layout()[5]
    }

    /// The elements of a segment that a chunk holds.
    pub fn part(&self, segment: usize, chunk: usize) -> std::ops::Range<usize> {
        let unit = if self.raw[segment] { 1 } else { self.block() };
        let each = self.each()[usize::from(self.raw[segment])];
        let at = |k: usize| ((k * each).saturating_sub(self.place(segment)) * unit).min(self.segments[segment]);
        at(chunk)..at(chunk + 1)
    }

    pub fn header(&self, magic: &[u8], chunk: usize, flags: u32, last: u64) -> Vec<u8> {
        let dtype = |dtype| [Dtype::F32, Dtype::F16, Dtype::BF16].iter().position(|&one| one == dtype).unwrap() as u8;
        let (_, block, scale, _) = format(self.rules.kind);
        let digest =
            self.segments.iter().zip(&self.raw).flat_map(|(&n, &raw)| (n as u64 | u64::from(raw) << 63).to_le_bytes());
        let digest = digest.fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let mut bytes = magic.to_vec();
        bytes.extend([1, 0, self.rules.kind as u8, 0, dtype(self.rules.values), dtype(self.rules.results)]);
        bytes.extend([[0, 2, 3][scale], 0]);
        for number in [block, self.n_chunks, chunk, self.segments.len(), flags as usize] {
            bytes.extend((number as u32).to_le_bytes());
        }
        let elements: usize = self.segments.iter().sum();
        for number in [elements as u64, self.stride() as u64 - 64, digest, last] {
            bytes.extend(number.to_le_bytes());
        }
        bytes
    }

    fn note(&mut self, flags: u32) {
        self.flags |= flags;
        self.since_commit |= flags;
    }

    pub fn commit(&mut self, skip: bool) {
        if self.pending.iter().any(Option::is_some) {
            if skip || self.since_commit & NONFINITE != 0 {
                self.flags |= TAKEN_BACK;
            } else {
                for (errors, pending) in self.errors.iter_mut().zip(&mut self.pending) {
                    if let Some(pending) = pending.take() {
                        *errors = pending;
                    }
                }
                self.turn = self.next_turn;
            }
        }
        self.pending = [None, None];
        self.next_turn = self.turn;
        self.since_commit = 0;
    }

    fn keep(&mut self, half: usize, errors: Vec<Vec<f32>>, turn: u64) {
        self.next_turn = turn;
        if self.rules.policy == NonFinite::Transactional {
            self.pending[half] = Some(errors);
        } else {
            self.errors[half] = errors;
            self.turn = turn;
        }
    }

    /// A run's c, or raw elements: to the stream. The errors that are kept.
    fn put(&self, stream: &mut Stream, c: &[f32], kept: &[f32], raw: bool) -> Vec<f32> {
        let zero = self.rules.policy == NonFinite::Zero;
        let limit = if raw { f32::INFINITY } else { LIMIT };
        let is_wrong = |c: f32| c.is_nan() || c.abs() >= limit;
        stream.nonfinite |= c.iter().any(|&c| is_wrong(c));
        let c: Vec<f32> = c.iter().map(|&c| if zero && is_wrong(c) { 0.0 } else { canonical(c) }).collect();
        if raw {
            stream.raws.extend(&c);
            return kept.to_vec();
        }
        let (_, block, scale_bytes, _) = format(self.rules.kind);
        let mut errors = kept.to_vec();
        for (number, c) in c.chunks(block).enumerate() {
            match quantize(self.rules.kind, c) {
                Some((scale, mut codes, values)) => {
                    codes.resize(block, 0);
                    stream.codes.extend(codes);
                    stream.scales.push(scale);
                    for (index, (c, v)) in c.iter().zip(values).enumerate() {
                        if let Some(dtype) = self.rules.error {
                            errors[number * block + index] = round(dtype, c - v);
                        }
                    }
                }
                None => {
                    let mut codes = vec![if scale_bytes == 0 { 0x7fc0 } else { 0 }; c.len()];
                    codes.resize(block, 0);
                    stream.codes.extend(codes);
                    stream.scales.push([0, 0xff, 0x7fc0][scale_bytes]);
                }
            }
        }
        errors
    }

    /// A chunk of a stream that begins with it.
    fn chunk(&self, number: usize, flags: u32, stream: &Stream, at: usize) -> Vec<u8> {
        let ([blocks, raws], (bits, block, scale, _)) = (self.each(), format(self.rules.kind));
        let [_, codes_at, _, raw_at, _, stride] = self.layout();
        let some = |len: usize, each: usize| (at * each).min(len)..((at + 1) * each).min(len);
        let mut bytes = self.header(b"GCPL", number, flags, 0);
        for of in &stream.scales[some(stream.scales.len(), blocks)] {
            bytes.extend(&of.to_le_bytes()[..scale]);
        }
        bytes.resize(codes_at, 0);
        let codes = &stream.codes[some(stream.codes.len(), blocks * block)];
        match bits {
            4 => bytes.extend(codes.chunks(2).map(|pair| (pair[0] | pair[1] << 4) as u8)),
            _ => bytes.extend(codes.iter().flat_map(|code| code.to_le_bytes()[..bits / 8].to_vec())),
        }
        bytes.resize(raw_at, 0);
        bytes.extend(stream.raws[some(stream.raws.len(), raws)].iter().flat_map(|raw| raw.to_le_bytes()));
        bytes.resize(stride, 0);
        bytes
    }

    pub fn encode(&mut self, gradients: &[Vec<f32>], factors: [f32; 2]) -> Vec<u8> {
        if self.pending[0].is_some() {
            self.commit(false);
        }
        let (mut stream, mut errors) = (Stream::default(), vec![]);
        for ((g, e), &raw) in gradients.iter().zip(&self.errors[0]).zip(&self.raw) {
            stream.nonfinite |= !raw && g.iter().any(|g| !g.is_finite());
            let zero = self.rules.policy == NonFinite::Zero && !raw;
            let c: Vec<f32> = (g.iter().zip(e))
                .map(|(&g, &e)| {
                    let of_gradient = factors[0] * if zero && !g.is_finite() { 0.0 } else { g };
                    let keeps = self.rules.error.is_some() && !raw;
                    if keeps { of_gradient + self.rules.beta * (factors[1] * e) } else { of_gradient }
                })
                .collect();
            errors.push(self.put(&mut stream, &c, e, raw));
        }
        let flags = if stream.nonfinite { NONFINITE } else { 0 };
        self.note(flags);
        self.keep(0, errors, self.next_turn);
        (0..self.n_chunks).flat_map(|chunk| self.chunk(chunk, flags, &stream, chunk)).collect()
    }

    /// What a chunk says of its parts: of all segments in order.
    fn read(&self, chunk: &[u8], number: usize) -> Vec<Vec<f32>> {
        let ([blocks, raws], (bits, block, scale_bytes, _)) = (self.each(), format(self.rules.kind));
        let [_, codes_at, _, raw_at, ..] = self.layout();
        let number_at = |at: usize, bytes: usize| (0..bytes).map(|i| u16::from(chunk[at + i]) << (8 * i)).sum::<u16>();
        let code = |index: usize| match bits {
            4 => number_at(codes_at + index / 2, 1) >> (index % 2 * 4) & 15,
            _ => number_at(codes_at + index * bits / 8, bits / 8),
        };
        let of_part = |segment: usize| {
            let part = self.part(segment, number);
            let first = if part.is_empty() {
                0
            } else if self.raw[segment] {
                self.place(segment) + part.start - number * raws
            } else {
                (self.place(segment) - (number * blocks).min(self.place(segment))) * block
                    + part.start.saturating_sub((number * blocks).saturating_sub(self.place(segment)) * block)
            };
            (0..part.len())
                .map(|index| {
                    let index = first + index;
                    if self.raw[segment] {
                        return f32::from_le_bytes(chunk[raw_at + 4 * index..][..4].try_into().unwrap());
                    }
                    let scale =
                        if scale_bytes == 0 { 0 } else { number_at(64 + index / block * scale_bytes, scale_bytes) };
                    let d = value(self.rules.kind, code(index)) as f32;
                    d * step(self.rules.kind, scale) as f32
                })
                .collect()
        };
        (0..self.segments.len()).map(of_part).collect()
    }

    fn flags_of(chunk: &[u8]) -> u32 {
        u32::from_le_bytes(chunk[28..32].try_into().unwrap())
    }

    pub fn decode(
        &mut self, payload: &[u8], divisor: i32, factor: f32, dtype: Dtype, old: Option<&[Vec<f32>]>,
    ) -> Vec<Vec<u32>> {
        let mut out: Vec<Vec<u32>> = vec![vec![]; self.segments.len()];
        let mut flags = 0;
        for (number, chunk) in payload.chunks(self.stride()).enumerate() {
            flags |= Self::flags_of(chunk);
            for (segment, values) in self.read(chunk, number).iter().enumerate() {
                for &v in values {
                    let mut x = v / divisor as f32 * factor;
                    if let Some(old) = old {
                        x += old[segment][out[segment].len()];
                    }
                    if dtype == Dtype::F16 && x.is_finite() {
                        x = x.clamp(-65504.0, 65504.0);
                    }
                    out[segment].push(narrow(dtype, x));
                    if !round(dtype, x).is_finite() {
                        flags |= NONFINITE;
                    }
                }
            }
        }
        self.note(flags);
        out
    }

    fn sums(&self, chunks: &[&[u8]], flags: &mut u32) -> Vec<Vec<f32>> {
        let number = self.server.unwrap();
        let mut sums: Vec<Vec<f32>> = (0..self.segments.len()).map(|i| vec![0.0; self.part(i, number).len()]).collect();
        for chunk in chunks {
            *flags |= Self::flags_of(chunk);
            for (sums, values) in sums.iter_mut().zip(self.read(chunk, number)) {
                for (sum, v) in sums.iter_mut().zip(values) {
                    if !v.is_finite() {
                        *flags |= NONFINITE;
                    }
                    *sum += if self.rules.policy == NonFinite::Zero && !v.is_finite() { 0.0 } else { v };
                }
            }
        }
        if self.rules.reduction == Reduction::Mean {
            sums.iter_mut().flatten().for_each(|sum| *sum /= chunks.len() as f32);
        }
        sums
    }

    fn chunk_of(&mut self, sums: &[Vec<f32>], mut flags: u32) -> Vec<u8> {
        let (mut stream, mut errors) = (Stream::default(), vec![]);
        for ((d, e), &raw) in sums.iter().zip(&self.errors[1]).zip(&self.raw) {
            let keeps = self.rules.error.is_some() && !raw;
            let d: Vec<f32> = d.iter().zip(e).map(|(&d, &e)| if keeps { d + self.rules.beta * e } else { d }).collect();
            errors.push(self.put(&mut stream, &d, e, raw));
        }
        flags |= if stream.nonfinite { NONFINITE } else { 0 };
        self.note(flags);
        self.keep(1, errors, self.turn + 1);
        self.chunk(self.server.unwrap(), flags, &stream, 0)
    }

    fn commit_reduced(&mut self) {
        if self.pending[1].is_some() {
            self.commit(false);
        }
    }

    pub fn reduce(&mut self, chunks: &[&[u8]]) -> Vec<u8> {
        self.commit_reduced();
        let mut flags = 0;
        let sums = self.sums(chunks, &mut flags);
        self.chunk_of(&sums, flags)
    }

    pub fn mean(&mut self, chunks: &[&[u8]]) -> Vec<Vec<f32>> {
        let mut flags = 0;
        let sums = self.sums(chunks, &mut flags);
        self.note(flags);
        sums
    }

    pub fn encode_shard(&mut self, shard: &[Vec<f32>]) -> Vec<u8> {
        self.commit_reduced();
        self.chunk_of(shard, 0)
    }

    /// The chunk that says that one it was made of was corrupt.
    pub fn refused(&mut self) -> Vec<u8> {
        self.commit_reduced();
        self.note(CORRUPT);
        let mut chunk = self.header(b"GCPL", self.server.unwrap(), CORRUPT, 0);
        chunk.resize(self.stride(), 0);
        chunk
    }

    pub fn state(&self) -> Vec<u8> {
        let mut state = self.header(b"GCST", 0, 0, self.turn);
        state.resize(256, 0);
        if let Some(dtype) = self.rules.error {
            let runs = self.errors.iter().flat_map(|half| half.iter().zip(&self.raw)).filter(|(_, raw)| !**raw);
            for (errors, _) in runs {
                let start = state.len();
                state.extend(errors.iter().flat_map(|&e| narrow(dtype, e).to_le_bytes()[..dtype.size].to_vec()));
                state.resize(start + errors.len().next_multiple_of(1024) * dtype.size, 0);
            }
        }
        state
    }
}
