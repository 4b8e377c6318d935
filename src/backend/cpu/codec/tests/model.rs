//! docs/NUMERICS.md once more: one element after the other, in vectors, with rounding by division. Nothing of it is the
//! library's, but the names of what a codec is made of.

use crate::{
    plan::codec::{Kind, NonFinite, Rules, ScaleRule},
    tensor::Dtype,
};

use super::numbers::{canonical, narrow, round, sigma, widen};

pub fn scale(rule: ScaleRule, elements: &[f32]) -> f32 {
    if elements.is_empty() {
        return 0.0;
    }
    let mut sums: Vec<f64> = Vec::new();
    for unit in elements.chunks(1024) {
        let x = |i: usize| match (unit.get(i), rule) {
            (None, _) => 0.0,
            (Some(&c), ScaleRule::Rms) => c * c,
            (Some(&c), ScaleRule::Mean) => c.abs(),
        };
        let mut a: Vec<f32> = (0..256).map(|j| ((x(j) + x(256 + j)) + x(512 + j)) + x(768 + j)).collect();
        for h in [128, 64, 32, 16, 8, 4, 2, 1] {
            a = (0..h).map(|j| a[j] + a[j + h]).collect();
        }
        sums.push(f64::from(a[0]));
    }
    while sums.len() > 1 {
        sums = sums.chunks(2).map(|pair| pair[0] + pair.get(1).unwrap_or(&0.0)).collect();
    }
    let mean = sums[0] / elements.len() as f64;
    canonical(if rule == ScaleRule::Rms { mean.sqrt() } else { mean } as f32)
}

pub fn pack(elements: &[f32]) -> Vec<u8> {
    let bit = |(j, &c): (usize, &f32)| if c < 0.0 { 0 } else { 0x80u8 >> j };
    elements.chunks(8).map(|eight| eight.iter().enumerate().map(bit).sum()).collect()
}

/// One step of the plain form: the bits, the scale; the error is updated.
pub fn compress(rule: ScaleRule, grad: &[f32], error: Option<(Dtype, &mut Vec<u32>)>) -> (Vec<u8>, f32) {
    let e = |i: usize| error.as_ref().map_or(0.0, |(dtype, bits)| widen(*dtype, bits[i]));
    let c: Vec<f32> = grad.iter().enumerate().map(|(i, g)| g + e(i)).collect();
    let s = scale(rule, &c);
    if let Some((dtype, bits)) = error
        && s.is_finite()
    {
        *bits = c.iter().map(|c| narrow(dtype, c - s * sigma(*c))).collect();
    }
    (pack(&c), s)
}

/// What is kept of workers, or of the server.
#[derive(Clone, Default)]
pub struct Half {
    pub kept: Vec<Vec<f32>>,
    pub scales: Vec<f32>,
    pub turn: u64,
}

pub struct Model {
    pub rules: Rules,
    pub segments: Vec<usize>,
    pub n_chunks: usize,
    pub server: Option<usize>,
    pub valid: [Half; 2],
    pub pending: [Option<Half>; 2],
    pub flags: u32,
    pub since_commit: u32,
}

impl Model {
    pub fn new(rules: Rules, segments: &[usize], n_chunks: usize, server: Option<usize>) -> Self {
        let mut model = Self {
            rules,
            segments: segments.to_vec(),
            n_chunks,
            server,
            valid: Default::default(),
            pending: [None, None],
            flags: 0,
            since_commit: 0,
        };
        let all = |lengths: Vec<usize>| Half {
            scales: vec![0.0; lengths.len()],
            kept: lengths.into_iter().map(|n| vec![0.0; n]).collect(),
            turn: 0,
        };
        let of_server = (0..segments.len()).map(|k| server.map_or(0, |chunk| model.part(k, chunk).1)).collect();
        model.valid = [all(segments.to_vec()), all(of_server)];
        model
    }

    fn first_byte(&self, segment: usize) -> usize {
        self.segments[..segment].iter().map(|n| n.div_ceil(8)).sum()
    }

    fn chunk_bytes(&self) -> usize {
        self.first_byte(self.segments.len()).div_ceil(self.n_chunks)
    }

    /// The number of the first element of a segment that a chunk holds, and how many it holds.
    fn part(&self, segment: usize, chunk: usize) -> (usize, usize) {
        let c = self.chunk_bytes();
        let held: Vec<usize> = (0..self.segments[segment])
            .step_by(8)
            .filter(|i| (self.first_byte(segment) + i / 8) / c == chunk)
            .collect();
        match (held.first(), held.last()) {
            (Some(&first), Some(&last)) => (first, (last + 8).min(self.segments[segment]) - first),
            _ => (0, 0),
        }
    }

    pub fn head(&self) -> usize {
        (64 + 4 * self.segments.len()).next_multiple_of(16)
    }

    pub fn stride(&self) -> usize {
        self.head() + self.chunk_bytes().next_multiple_of(16)
    }

    fn header(&self, magic: &[u8], chunk: usize, flags: u32, last: u64) -> Vec<u8> {
        let number = |dtype| match dtype {
            Dtype::F16 => 1,
            Dtype::BF16 => 2,
            _ => 0,
        };
        let sign = self.rules.kind == Kind::Sign;
        let mean = self.rules.scale == ScaleRule::Mean && !sign;
        let mut header = magic.to_vec();
        header.extend([1, 0, if sign { 2 } else { 1 }, 0]);
        header.extend([number(self.rules.values), number(self.rules.results), u8::from(mean), 0]);
        for field in [0, self.n_chunks as u32, chunk as u32, self.segments.len() as u32, flags] {
            header.extend(field.to_le_bytes());
        }
        let mut digest = 0xcbf2_9ce4_8422_2325u64;
        for byte in self.segments.iter().flat_map(|&n| (n as u64).to_le_bytes()) {
            digest = (digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
        for field in [self.segments.iter().sum::<usize>() as u64, self.chunk_bytes() as u64, digest, last] {
            header.extend(field.to_le_bytes());
        }
        header
    }

    fn chunk(&self, number: usize, flags: u32, scales: &[f32], bits: &[u8]) -> Vec<u8> {
        let mut chunk = self.header(b"GCPL", number, flags, 0);
        for (segment, scale) in scales.iter().enumerate() {
            let holds = self.part(segment, number).1 > 0;
            chunk.extend(if holds { *scale } else { 0.0 }.to_le_bytes());
        }
        chunk.resize(self.head(), 0);
        chunk.extend(bits);
        chunk.resize(self.stride(), 0);
        chunk
    }

    fn transactional(&self) -> bool {
        self.rules.policy == NonFinite::Transactional
    }

    fn raise(&mut self, flags: u32) {
        self.flags |= flags;
        self.since_commit |= flags;
    }

    pub fn commit(&mut self, skip: bool) {
        if self.pending.iter().all(Option::is_none) {
            return;
        }
        let taken_back = skip || self.since_commit & 2 != 0;
        for (valid, pending) in self.valid.iter_mut().zip(&mut self.pending) {
            match pending.take() {
                Some(next) if !taken_back => *valid = next,
                _ => {}
            }
        }
        self.since_commit = 0;
        self.flags |= if taken_back { 4 } else { 0 };
    }

    fn keep(&mut self, half: usize, next: Half) {
        if self.transactional() {
            self.pending[half] = Some(next);
        } else {
            self.valid[half] = next;
        }
    }

    /// R, where something is kept, and what the policy makes of it.
    fn settle(&self, c: f32, nonfinite: &mut bool) -> f32 {
        let kept = self.rules.error.map_or(canonical(c), |dtype| round(dtype, c));
        if !kept.is_finite() {
            *nonfinite = true;
            if self.rules.policy == NonFinite::Zero {
                return 0.0;
            }
        }
        kept
    }

    fn settled_scale(&self, s: f32, nonfinite: &mut bool) -> f32 {
        if !s.is_finite() {
            *nonfinite = true;
            if self.rules.policy == NonFinite::Zero {
                return 0.0;
            }
        }
        s
    }

    fn error(&self, half: usize, segment: usize, i: usize) -> f32 {
        let Half { kept, scales, .. } = &self.valid[half];
        kept[segment][i] - scales[segment] * sigma(kept[segment][i])
    }

    pub fn encode(&mut self, gradient: &[Vec<f32>], [m_g, m_e]: [f32; 2]) -> Vec<u8> {
        if self.pending[0].is_some() {
            self.commit(false);
        }
        let (mut nonfinite, mut next, mut bits) = (false, Half::default(), Vec::new());
        for (segment, values) in gradient.iter().enumerate() {
            let mut c = Vec::new();
            for (i, &g) in values.iter().enumerate() {
                nonfinite |= !g.is_finite();
                let g = if self.rules.policy == NonFinite::Zero && !g.is_finite() { 0.0 } else { g };
                let of_error = match self.rules.error {
                    Some(_) => self.rules.beta * (m_e * self.error(0, segment, i)),
                    None => 0.0,
                };
                let sum = if self.rules.error.is_some() { m_g * g + of_error } else { m_g * g };
                c.push(self.settle(sum, &mut nonfinite));
            }
            let s = match self.rules.kind {
                Kind::Sign if c.is_empty() => 0.0,
                Kind::Sign => 1.0,
                _ => scale(self.rules.scale, &c),
            };
            next.scales.push(self.settled_scale(s, &mut nonfinite));
            bits.extend(pack(&c));
            next.kept.push(c);
        }
        let flags = if nonfinite { 2 } else { 0 };
        let size = self.chunk_bytes();
        bits.resize(size * self.n_chunks, 0);
        let payload = (0..self.n_chunks)
            .flat_map(|k| self.chunk(k, flags, &next.scales, &bits[k * size..(k + 1) * size]))
            .collect();
        self.keep(0, next);
        self.raise(flags);
        payload
    }

    /// What a payload's bit of an element is.
    fn bit(&self, chunk: &[u8], segment: usize, i: usize) -> bool {
        let byte = (self.first_byte(segment) + i / 8) % self.chunk_bytes();
        chunk[self.head() + byte] >> (7 - i % 8) & 1 == 1
    }

    fn scale_of(&self, chunk: &[u8], segment: usize) -> f32 {
        f32::from_le_bytes(chunk[64 + 4 * segment..][..4].try_into().unwrap())
    }

    fn flags_of(&self, chunk: &[u8]) -> u32 {
        u32::from_le_bytes(chunk[28..32].try_into().unwrap())
    }

    /// `chunks`: good ones.
    pub fn reduce(&mut self, chunks: &[&[u8]]) -> Vec<u8> {
        if self.pending[1].is_some() {
            self.commit(false);
        }
        let (number, w) = (self.server.unwrap(), chunks.len());
        let mut nonfinite = chunks.iter().any(|chunk| self.flags_of(chunk) & 2 != 0);
        let mut next = Half { turn: self.valid[1].turn + 1, ..Half::default() };
        let mut bits = Vec::new();
        for segment in 0..self.segments.len() {
            let (first, count) = self.part(segment, number);
            let mut d = Vec::new();
            for i in 0..count {
                if self.rules.kind == Kind::Sign {
                    let ones = chunks.iter().filter(|chunk| self.bit(chunk, segment, first + i)).count();
                    let byte = (self.first_byte(segment) + (first + i) / 8) as u128;
                    let decides = (byte + u128::from(self.valid[1].turn)) % w as u128;
                    let one = if 2 * ones == w {
                        self.bit(chunks[decides as usize], segment, first + i)
                    } else {
                        2 * ones > w
                    };
                    d.push(if one { 1.0 } else { -1.0 });
                    continue;
                }
                let mut sum = 0.0f32;
                for chunk in chunks {
                    let mut q = self.scale_of(chunk, segment) / w as f32;
                    if !q.is_finite() {
                        nonfinite = true;
                        q = if self.rules.policy == NonFinite::Zero { 0.0 } else { q };
                    }
                    sum += if self.bit(chunk, segment, first + i) { q } else { -q };
                }
                if self.rules.error.is_some() {
                    sum += self.rules.beta * self.error(1, segment, i);
                }
                d.push(self.settle(sum, &mut nonfinite));
            }
            let t = match self.rules.kind {
                _ if count == 0 => 0.0,
                Kind::Sign => 1.0,
                _ => {
                    let t = scale(self.rules.scale, &d);
                    let rounded = round(self.rules.results, t);
                    if self.rules.results == Dtype::F16 && t.is_finite() { rounded.min(65504.0) } else { rounded }
                }
            };
            next.scales.push(self.settled_scale(t, &mut nonfinite));
            bits.extend(pack(&d));
            next.kept.push(d);
        }
        let flags = if nonfinite { 2 } else { 0 };
        bits.resize(self.chunk_bytes(), 0);
        let chunk = self.chunk(number, flags, &next.scales, &bits);
        self.keep(1, next);
        self.raise(flags);
        chunk
    }

    /// What each segment is set to, or becomes of `old` float32, as bits. `payload`: a good one.
    pub fn decode(
        &mut self, payload: &[u8], divisor: i32, m: f32, dtype: Dtype, old: Option<&[Vec<f32>]>,
    ) -> Vec<Vec<u32>> {
        let chunks: Vec<&[u8]> = payload.chunks(self.stride()).collect();
        let mut nonfinite = chunks.iter().any(|chunk| self.flags_of(chunk) & 2 != 0);
        let mut values = Vec::new();
        for segment in 0..self.segments.len() {
            let mut of_segment = Vec::new();
            for i in 0..self.segments[segment] {
                let chunk = chunks[(self.first_byte(segment) + i / 8) / self.chunk_bytes()];
                let size = self.scale_of(chunk, segment) / divisor as f32 * m;
                let v = if self.bit(chunk, segment, i) { size } else { -size };
                let written = narrow(dtype, old.map_or(v, |old| old[segment][i] + v));
                nonfinite |= !widen(dtype, written).is_finite();
                of_segment.push(written);
            }
            values.push(of_segment);
        }
        self.raise(if nonfinite { 2 } else { 0 });
        values
    }

    pub fn state(&self) -> Vec<u8> {
        let mut state = self.header(b"GCST", 0, 0, self.valid[1].turn);
        let halves = if self.server.is_some() { 2 } else { 1 };
        for half in &self.valid[..halves] {
            state.extend(half.scales.iter().flat_map(|scale| scale.to_le_bytes()));
        }
        state.resize(state.len().next_multiple_of(256), 0);
        for kept in self.valid[..halves].iter().flat_map(|half| &half.kept) {
            let Some(dtype) = self.rules.error else { continue };
            for i in 0..kept.len().next_multiple_of(1024) {
                let bits = kept.get(i).map_or(0, |&c| narrow(dtype, c));
                state.extend(&bits.to_le_bytes()[..dtype.size]);
            }
        }
        state
    }

    pub fn errors(&self, half: usize) -> Vec<f32> {
        let kept = &self.valid[half].kept;
        let error = |segment, i| if self.rules.error.is_some() { self.error(half, segment, i) } else { 0.0 };
        (0..kept.len())
            .flat_map(|k| (0..kept[k].len()).map(move |i| (k, i)))
            .map(|(k, i)| canonical(error(k, i)))
            .collect()
    }

    pub fn set_errors(&mut self, half: usize, errors: &[f32]) {
        let Some(dtype) = self.rules.error else { return };
        let mut errors = errors.iter();
        for (kept, scale) in self.valid[half].kept.iter_mut().zip(&mut self.valid[half].scales) {
            if !kept.is_empty() {
                *scale = 0.0;
            }
            kept.iter_mut().for_each(|c| *c = round(dtype, *errors.next().unwrap()));
        }
    }
}
