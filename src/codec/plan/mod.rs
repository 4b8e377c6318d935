//! The plan of a codec: the layout of its payload and its state, byte for byte. docs/NUMERICS.md is the specification.
//!
//! ```text
//!     segments    |--- 0 ---|- 1 -|------- 2 -------|              elements; each padded to whole bytes of bits
//!     bits        |bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb|
//!     chunks      |---- 0 ----|---- 1 ----|---- 2 ----|            equal; zeros pad the last ones
//!     parts       |--- 0 ---|0|2|...                               the elements of a segment that lie in a chunk
//! ```
//!
//! A [`Run`] is the elements that share a scale: a segment when it is encoded, a part when it is reduced. In block
//! codecs, blocks take the place of bytes of bits: see [`layout`].
#![forbid(unsafe_code)]

pub mod layout;
pub mod nodes;
pub mod sizes;

use std::ops::Range;

use crate::{
    dlpack::{Device, Dtype},
    ffi::{
        error::{Result, Status, error},
        fallible,
    },
};

use layout::{Family, Format, Layout};
use sizes::{align, too_large};

pub use sizes::{ALIGNMENT, HEADER};

/// Number of elements in a unit. The sum of a unit is computed in float32.
pub const UNIT: i64 = 1024;

/// Limit of a one-shot all-reduce, in bytes of the payloads of all ranks together. The reducer must also keep no
/// errors. Each rank sends at creation whether it can run one-shot, since another version may have another limit. If
/// one rank cannot, all ranks run two-shot.
const ONE_SHOT_BYTES: i64 = 1 << 20;

/// Limit of two ranks on CUDA without peer memory. Two ranks send as many bytes one-shot as two-shot; more ranks send
/// more bytes one-shot. On the CPU, reducing the chunks of both ranks takes longer than a second exchange. The
/// difference is a fourth of the total time at 2^19 elements of INT8, over a group of two threads.
const ONE_SHOT_BYTES_OF_TWO: i64 = 1 << 22;

/// Limit of two to four ranks over peer memory: 8.5 MiB of payloads, 4.3 million elements of INT8 on two ranks and 2.2
/// million on four. Up to this size two-shot takes 20 to 28 us more of the host's time on H200, and is slower in a CUDA
/// graph.
pub const ONE_SHOT_BYTES_OF_PEERS: i64 = 17 << 19;

/// Device and transport over which an all-reduce exchanges payloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// Any transport, on the CPU.
    Cpu,
    /// Any transport but peer memory, on CUDA.
    Cuda,
    /// Peer memory, on CUDA.
    PeerMemory,
}

impl From<Device> for Over {
    /// Returns the value for a transport without peer memory.
    fn from(device: Device) -> Self {
        if device == Device::Cpu { Self::Cpu } else { Self::Cuda }
    }
}

/// Alignment of the errors of each run in the state, in bytes.
const STATE_ALIGNMENT: i64 = 256;

/// Fields of a header, with their names in error messages. kernels/codec.cuh has the fields that kernels write.
pub const FIELDS: [(&str, Range<usize>); 16] = [
    ("magic", MAGIC_FIELD),
    ("version", VERSION_FIELD),
    ("codec", CODEC_FIELD),
    ("dtype of values", VALUES_FIELD),
    ("dtype of results", RESULTS_FIELD),
    ("scale rule", SCALE_FIELD),
    ("reduction", REDUCTION_FIELD),
    ("block", BLOCK_FIELD),
    ("number of chunks", CHUNKS_FIELD),
    ("chunk number", CHUNK_FIELD),
    ("number of segments", SEGMENTS_FIELD),
    ("flags", FLAGS_FIELD),
    ("number of elements", ELEMENTS_FIELD),
    ("number of bytes", BYTES_FIELD),
    ("digest of the counts", DIGEST_FIELD),
    ("last field", TURN_FIELD),
];

const MAGIC: &[u8; 4] = b"GCPL";
const VERSION: u16 = 1;

const MAGIC_FIELD: Range<usize> = 0..4;
const VERSION_FIELD: Range<usize> = 4..6;
pub const CODEC_FIELD: Range<usize> = 6..8;
const VALUES_FIELD: Range<usize> = 8..9;
const RESULTS_FIELD: Range<usize> = 9..10;
const SCALE_FIELD: Range<usize> = 10..11;
const REDUCTION_FIELD: Range<usize> = 11..12;
const BLOCK_FIELD: Range<usize> = 12..16;
const CHUNKS_FIELD: Range<usize> = 16..20;
/// Number of the chunk. Only this field and the flags differ from chunk to chunk.
pub const CHUNK_FIELD: Range<usize> = 20..24;
const SEGMENTS_FIELD: Range<usize> = 24..28;
pub const FLAGS_FIELD: Range<usize> = 28..32;
const ELEMENTS_FIELD: Range<usize> = 32..40;
const BYTES_FIELD: Range<usize> = 40..48;
const DIGEST_FIELD: Range<usize> = 48..56;
/// Number of the next turn, in the header of a state.
pub const TURN_FIELD: Range<usize> = 56..64;

/// Events, as bits of a number: in the flags of a codec and in the flags of a chunk.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// A payload or a state that this codec would not have written.
    Corrupt = 1,
    /// A number that was not finite.
    Nonfinite = 2,
    /// A step was taken back.
    TakenBack = 4,
}

pub const CORRUPT: u32 = Flag::Corrupt as u32;
pub const NONFINITE: u32 = Flag::Nonfinite as u32;
pub const TAKEN_BACK: u32 = Flag::TakenBack as u32;

/// Codecs. The numbers 8 to 15 are reserved.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Signs and a scale per tensor, with error feedback: 1/8 of a byte per element.
    Onebit = 1,
    /// Signs alone, reduced by majority: 1/8 of a byte.
    Sign = 2,
    /// bfloat16: 2 bytes.
    Bf16 = 3,
    /// e4m3 (OCP) in blocks of 32, each with a scale that is a power of 2: 1.03125 bytes.
    Mxfp8 = 4,
    /// Integers from -127 to 127 in blocks of 64, each with a bfloat16 scale: 1.03125 bytes.
    Int8 = 5,
    /// Integers from -7 to 7 in blocks of 32, each with a bfloat16 scale: 0.5625 bytes.
    Int4 = 6,
    /// e2m1 (OCP) in blocks of 32, each with a scale that is a power of 2: 0.53125 bytes.
    Mxfp4 = 7,
}

impl Kind {
    /// All codecs, in the order of their numbers.
    pub const ALL: [Self; 7] = [Self::Onebit, Self::Sign, Self::Bf16, Self::Mxfp8, Self::Int8, Self::Int4, Self::Mxfp4];

    /// Returns the name of the codec in gradcodec.h.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Onebit => "GC_CODEC_ONEBIT",
            Self::Sign => "GC_CODEC_SIGN",
            Self::Bf16 => "GC_CODEC_BF16",
            Self::Mxfp8 => "GC_CODEC_MXFP8",
            Self::Int8 => "GC_CODEC_INT8",
            Self::Int4 => "GC_CODEC_INT4",
            Self::Mxfp4 => "GC_CODEC_MXFP4",
        }
    }

    /// Returns the codec that the header of a payload or a state names; None if this version does not have the codec.
    pub fn of_header(header: &[u8; HEADER]) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| header[CODEC_FIELD] == (kind as u16).to_le_bytes())
    }

    /// Returns the codec's row in the table of docs/NUMERICS.md 11.
    pub fn format(self) -> Format {
        let bits = |scale_rule| Format {
            family: Family::Bits,
            place: 8,
            bits: 1,
            scale_bytes: 0,
            segment_scale_bytes: 4,
            block_field: 0,
            scale_rule,
        };
        let blocks = |block: i64, bits, scale_bytes, scale_rule| Format {
            family: Family::Blocks,
            place: block,
            bits,
            scale_bytes,
            segment_scale_bytes: 0,
            block_field: block as u32,
            scale_rule: Some(scale_rule),
        };
        match self {
            Self::Onebit => bits(None),
            Self::Sign => bits(Some(0)),
            Self::Bf16 => blocks(32, 16, 0, 0),
            Self::Mxfp8 => blocks(32, 8, 1, 2),
            Self::Int8 => blocks(64, 8, 2, 3),
            Self::Int4 => blocks(32, 4, 2, 3),
            Self::Mxfp4 => blocks(32, 4, 1, 2),
        }
    }
}

/// Result of reducing several payloads. SIGN supports GC_REDUCTION_MEAN alone, which is its majority.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Mean of the payloads.
    Mean = 0,
    /// Sum of the payloads.
    Sum = 1,
}

/// Storage of errors. SIGN keeps none.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// float32: four bytes per element.
    Float32 = 0,
    /// bfloat16: two bytes per element. ONEBIT rounds gradient plus error, block codecs round the error.
    Bfloat16 = 1,
    /// No errors: the rounding error of a step is lost.
    None = 2,
}

/// Scale rule of ONEBIT. It must be 0 for block codecs, which have rules of their own.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleRule {
    /// Root of the mean square, as in DeepSpeed.
    Rms = 0,
    /// Mean of the absolute values, as in EF-signSGD.
    Mean = 1,
}

/// Treatment of numbers that are not finite. GC_FLAG_NONFINITE is set in any case.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NonFinite {
    /// ONEBIT: the numbers stay in the state until gc_codec_reset() or gc_codec_state_in(). SIGN: the payload decodes
    /// to NaN. Block codecs: the block decodes to NaN, and its errors stay as they were.
    Propagate = 0,
    /// The numbers count as 0. ONEBIT: a scale that is not finite is 0, so nothing is sent and all is carried.
    Zero = 1,
    /// A step is pending until gc_codec_commit(), which takes the step back if a number was not finite.
    Transactional = 2,
}

/// Effect of decoding on its output.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decode {
    /// Writes the values.
    Set = 0,
    /// Adds the values to the output.
    Add = 1,
}

/// Parameters of a codec's computation.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub kind: Kind,
    /// Dtype of the values to encode: float32, float16 or bfloat16.
    pub values: Dtype,
    /// Dtype to which a reduced scale is rounded: float32, float16 or bfloat16.
    pub results: Dtype,
    /// Dtype of errors: float32 or bfloat16. None: no errors are kept.
    pub error: Option<Dtype>,
    pub scale: ScaleRule,
    pub reduction: Reduction,
    /// Factor by which a carried error is multiplied in each step.
    pub beta: f32,
    pub policy: NonFinite,
    /// Number of ranks whose values a payload sums. A mean is divided by the number of payloads times this number.
    pub ranks: usize,
}

impl Rules {
    /// Returns the divisor of a sum of `payloads` payloads.
    pub fn divisor(&self, payloads: usize) -> f32 {
        match self.reduction {
            Reduction::Mean => (payloads * self.ranks) as f32,
            Reduction::Sum => 1.0,
        }
    }
}

/// Elements that share a scale: a segment, or its part in a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Number of the segment.
    pub segment: usize,
    /// Index of the run's first element in the segment: a multiple of `place_elements`.
    pub first: i64,
    pub elements: i64,
    /// Index of the run's first place among the places of its kind in all segments, before the payload is cut. A place
    /// is a byte of bits, a block or a raw element.
    pub place: i64,
    /// Number of elements in a place: 8 for bits, the block size for blocks, 1 for raw elements.
    pub place_elements: i64,
    /// True if the elements travel as float32; only in block codecs.
    pub raw: bool,
    /// Offset in bytes of the run's c^ (block codecs: errors) in the state, padded to whole units. 0 without errors.
    pub state: i64,
    /// Index of the run's first element in a row of errors, which has all elements of the handle.
    pub row: i64,
}

impl Run {
    pub fn units(&self) -> i64 {
        units(self.elements)
    }

    pub fn places(&self) -> i64 {
        self.elements / self.place_elements + i64::from(self.elements % self.place_elements != 0)
    }
}

/// Returns the number of units that hold `elements` elements.
pub fn units(elements: i64) -> i64 {
    elements / UNIT + i64::from(elements % UNIT != 0)
}

/// Properties of a codec that do not depend on the values.
#[derive(Debug)]
pub struct CodecPlan {
    pub rules: Rules,
    /// Runs that are encoded: the segments.
    pub workers: Vec<Run>,
    /// Number of the first chunk that is reduced, if any is.
    pub server: Option<usize>,
    /// Number of chunks that are reduced: 1, or all chunks of a block codec, whose blocks do not depend on chunks.
    pub server_chunks: usize,
    /// Runs that are reduced: the parts in these chunks, chunk by chunk, without empty parts.
    pub servers: Vec<Run>,
    pub n_chunks: usize,
    /// Number of elements in all segments.
    pub elements: i64,
    /// Number of elements in a row of errors: more than `elements` if the segments are pieces of a part.
    pub row_elements: i64,
    /// Layout of a chunk.
    pub layout: Layout,
    pub state_bytes: i64,
    /// Header of a chunk, with chunk number 0 and no flags.
    header: [u8; HEADER],
}

impl CodecPlan {
    /// Makes a plan. `segments`: number of elements of each, at least 0. `raw`: a byte for each segment, not 0 if it is
    /// raw; empty if none is. `n_chunks`: at least 1. `server`: below n_chunks.
    pub fn new(rules: Rules, segments: &[i64], raw: &[u8], n_chunks: usize, server: Option<usize>) -> Result<Self> {
        if u32::try_from(n_chunks).is_err() || u32::try_from(segments.len()).is_err() {
            return Err(error!(
                SizeOverflow,
                "{n_chunks} chunks of {} segments: a header counts up to 2^32 - 1 of each",
                segments.len()
            ));
        }
        let mut workers = fallible::list(segments.len(), "segments")?;
        let mut row = 0i64;
        for (segment, &elements) in segments.iter().enumerate() {
            let raw = raw.get(segment).is_some_and(|&raw| raw != 0);
            workers.push(Run { segment, first: 0, elements, place: 0, place_elements: 0, raw, state: 0, row });
            row = row.checked_add(elements).ok_or_else(too_large)?;
        }
        Self::of_workers(rules, workers, row, n_chunks, server)
    }

    /// Returns the plan by which the ranks of part `part` exchange its pieces between `nodes` nodes. This plan has as
    /// many chunks as a node has ranks. `error`: dtype of the errors, if errors are kept.
    pub fn part_between_nodes(
        &self, part: usize, nodes: usize, server: Option<usize>, error: Option<Dtype>,
    ) -> Result<Self> {
        let mut workers = fallible::list(self.workers.len(), "segments")?;
        for (segment, whole) in self.workers.iter().enumerate() {
            workers.push(self.part(segment, part).unwrap_or(Run { elements: 0, ..*whole }));
        }
        let rules = Rules { values: Dtype::F32, error, ranks: self.n_chunks, ..self.rules };
        Self::of_workers(rules, workers, self.row_elements, nodes, server)
    }

    /// Makes a plan of runs whose segment, elements, row and `raw` are set.
    fn of_workers(
        rules: Rules, mut workers: Vec<Run>, row_elements: i64, n_chunks: usize, server: Option<usize>,
    ) -> Result<Self> {
        let format = rules.kind.format();
        let segments = workers.len();
        // The first place count is of segments that are not raw, the second one of raw segments.
        let (mut elements, mut places) = (0i64, [0i64; 2]);
        for run in &mut workers {
            (run.first, run.state) = (0, 0);
            (run.place, run.place_elements) = (places[usize::from(run.raw)], if run.raw { 1 } else { format.place });
            elements = elements.checked_add(run.elements).ok_or_else(too_large)?;
            places[usize::from(run.raw)] += run.places(); // no overflow: at most one place per element
        }
        let layout = Layout::new(format, places, segments, n_chunks)?;
        layout.stride.checked_mul(n_chunks as i64).ok_or_else(too_large)?;
        let mut plan = Self {
            rules,
            workers,
            server,
            server_chunks: 1,
            servers: Vec::new(),
            n_chunks,
            elements,
            row_elements,
            layout,
            state_bytes: 0,
            header: [0; HEADER],
        };
        if let Some(chunk) = server {
            let mut servers = fallible::list(segments, "parts of segments")?;
            servers.extend((0..segments).filter_map(|segment| plan.part(segment, chunk)));
            plan.servers = servers;
        }
        plan.lay_out_state().ok_or_else(too_large)?;
        plan.header = plan.fields();
        Ok(plan)
    }

    /// Returns the plan of the encoder that wrote `header`, if that encoder had one segment, not raw, and one chunk.
    ///
    /// This checks only the fields on which the plan depends. The caller compares the whole header with the plan's.
    pub fn of_header(header: &[u8; HEADER]) -> Result<Self> {
        let number = |field: Range<usize>| {
            let mut bytes = [0; 8];
            bytes[..field.len()].copy_from_slice(&header[field]);
            u64::from_le_bytes(bytes)
        };
        if header[MAGIC_FIELD] != *MAGIC {
            return Err(error!(Corrupt, "payload: magic {:#x} is not \"GCPL\"", number(MAGIC_FIELD)));
        }
        if number(VERSION_FIELD) != u64::from(VERSION) {
            return Err(error!(Corrupt, "payload: version {VERSION} expected, got {}", number(VERSION_FIELD)));
        }
        let kind = Kind::of_header(header)
            .ok_or_else(|| error!(Corrupt, "payload: codec {} is not known to this version", number(CODEC_FIELD)))?;
        let dtype = |what, field| match number(field) {
            0 => Ok(Dtype::F32),
            1 => Ok(Dtype::F16),
            2 => Ok(Dtype::BF16),
            other => Err(error!(Corrupt, "payload: {what} 0, 1 or 2 expected, got {other}")),
        };
        let scale = match (kind, number(SCALE_FIELD)) {
            (Kind::Onebit, 1) => ScaleRule::Mean,
            (Kind::Onebit, other @ 2..) => {
                return Err(error!(Corrupt, "payload: scale rule 0 or 1 expected, got {other}"));
            }
            _ => ScaleRule::Rms,
        };
        let reduction = match (kind, number(REDUCTION_FIELD)) {
            (Kind::Sign, _) | (_, 0) => Reduction::Mean,
            (_, 1) => Reduction::Sum,
            (_, other) => return Err(error!(Corrupt, "payload: reduction 0 or 1 expected, got {other}")),
        };
        let elements = number(ELEMENTS_FIELD);
        let count = i64::try_from(elements)
            .map_err(|_| error!(Corrupt, "payload: {elements} elements are more than 2^63 - 1"))?;
        let rules = Rules {
            kind,
            values: dtype("dtype of values", VALUES_FIELD)?,
            results: dtype("dtype of results", RESULTS_FIELD)?,
            error: None,
            scale,
            reduction,
            beta: 1.0,
            policy: NonFinite::Propagate,
            ranks: 1,
        };
        Self::new(rules, &[count], &[], 1, None).map_err(|refusal| match refusal.status {
            Status::SizeOverflow => {
                error!(Corrupt, "payload: {count} elements of {} are more than 2^63 - 1 bytes", kind.name())
            }
            _ => refusal,
        })
    }

    /// Returns true if a world of `n_chunks` ranks runs one-shot: each rank receives and reduces all whole payloads.
    pub fn is_one_shot(&self, over: Over) -> bool {
        let keeps_nothing = self.rules.error.is_none() && self.rules.kind != Kind::Sign;
        let bytes = self.payload_bytes().checked_mul(self.n_chunks as i64);
        // There is no one-shot kernel between nodes. Scales of segments are computed last, so a kernel that computes
        // them would gain nothing by writing to other ranks.
        let has_kernel = self.rules.ranks == 1 && self.layout.format.segment_scale_bytes == 0;
        let most = match (over, self.n_chunks) {
            (Over::PeerMemory, _) if !has_kernel => 0,
            (Over::PeerMemory, ..=4) => ONE_SHOT_BYTES_OF_PEERS,
            (_, 3..) if self.rules.ranks > 1 => 0, // one-shot sends more bytes between nodes
            (Over::Cuda, 2) if self.rules.ranks == 1 => ONE_SHOT_BYTES_OF_TWO,
            _ => ONE_SHOT_BYTES,
        };
        keeps_nothing && self.n_chunks > 1 && bytes.is_some_and(|bytes| bytes <= most)
    }

    /// Returns the number of chunks that one codec reduces at once, if it reduces whole payloads. This is 1 if a chunk
    /// has scales of segments, because they depend on all elements of the chunk.
    pub fn chunks_at_once(&self) -> usize {
        if self.layout.format.segment_scale_bytes == 0 { self.n_chunks } else { 1 }
    }

    /// Returns the plan of a codec without errors that reduces `chunks_at_once` chunks from `first` on to the same
    /// bytes.
    pub fn reducer(&self, first: usize) -> Result<Self> {
        let segments = self.workers.len();
        let (mut counts, mut raw) = (fallible::list(segments, "segments")?, fallible::list(segments, "segments")?);
        for run in &self.workers {
            counts.push(run.elements);
            raw.push(u8::from(run.raw));
        }
        // A reducer never has a pending step. `Transactional` computes the same numbers as `Propagate`.
        let policy = match self.rules.policy {
            NonFinite::Transactional => NonFinite::Propagate,
            policy => policy,
        };
        let rules = Rules { policy, error: None, ..self.rules };
        let (chunks, mut servers) = (self.chunks_at_once(), Vec::new());
        for part in (first..first + chunks)
            .flat_map(|chunk| (0..segments).map(move |segment| (segment, chunk)))
            .filter_map(|(segment, chunk)| self.part(segment, chunk))
        {
            fallible::reserve(&mut servers, 1, "parts of segments")?;
            servers.push(Run { state: 0, ..part });
        }
        let plan = Self::new(rules, &counts, &raw, self.n_chunks, Some(first))?;
        Ok(Self { server_chunks: chunks, servers, ..plan })
    }

    fn lay_out_state(&mut self) -> Option<()> {
        let [first, second] = self.state_scales();
        let mut bytes = align(first + self.state_halves() as i64 * (second - first), STATE_ALIGNMENT)?;
        if let Some(error) = self.rules.error {
            for run in self.workers.iter_mut().chain(&mut self.servers).filter(|run| !run.raw) {
                run.state = bytes;
                bytes = bytes.checked_add(run.units().checked_mul(UNIT * error.size as i64)?)?;
            }
        }
        self.state_bytes = bytes;
        Some(())
    }

    fn fields(&self) -> [u8; HEADER] {
        let rules = &self.rules;
        let dtype = |dtype| match dtype {
            Dtype::F16 => 1u8,
            Dtype::BF16 => 2,
            _ => 0,
        };
        let Format { scale_rule, block_field, .. } = self.layout.format;
        let scale = scale_rule.unwrap_or(rules.scale as u8);
        let mut header = [0; HEADER];
        header[MAGIC_FIELD].copy_from_slice(MAGIC);
        header[VERSION_FIELD].copy_from_slice(&VERSION.to_le_bytes());
        header[CODEC_FIELD].copy_from_slice(&(rules.kind as u16).to_le_bytes());
        header[VALUES_FIELD].copy_from_slice(&[dtype(rules.values)]);
        header[RESULTS_FIELD].copy_from_slice(&[dtype(rules.results)]);
        header[SCALE_FIELD].copy_from_slice(&[scale]);
        header[REDUCTION_FIELD].copy_from_slice(&[rules.reduction as u8]);
        header[BLOCK_FIELD].copy_from_slice(&block_field.to_le_bytes());
        header[CHUNKS_FIELD].copy_from_slice(&(self.n_chunks as u32).to_le_bytes());
        header[SEGMENTS_FIELD].copy_from_slice(&(self.workers.len() as u32).to_le_bytes());
        header[ELEMENTS_FIELD].copy_from_slice(&self.elements.to_le_bytes());
        header[BYTES_FIELD].copy_from_slice(&self.layout.bytes_field().to_le_bytes());
        header[DIGEST_FIELD].copy_from_slice(&self.digest().to_le_bytes());
        header
    }

    /// Returns FNV-1a of the segments' element counts, with bit 63 of a count set if the segment is raw.
    pub fn digest(&self) -> u64 {
        let counted = |run: &Run| run.elements as u64 | u64::from(run.raw) << 63;
        fnv1a(self.workers.iter().flat_map(|run| counted(run).to_le_bytes()))
    }

    /// Returns FNV-1a of all that results depend on, for ranks to compare: of a header and of the options not in it.
    pub fn digest_of_all(&self) -> u64 {
        let Rules { error, beta, policy, .. } = &self.rules;
        let error = error.map_or(0, |error| if error == Dtype::F32 { 1u8 } else { 2 });
        let rest = [error, *policy as u8].into_iter().chain(beta.to_bits().to_le_bytes());
        fnv1a(self.header.into_iter().chain(rest))
    }

    /// Returns the header of a chunk, without flags.
    pub fn header(&self, chunk: usize) -> [u8; HEADER] {
        let mut header = self.header;
        header[CHUNK_FIELD].copy_from_slice(&(chunk as u32).to_le_bytes());
        header
    }

    /// Returns the header of a state, at turn 0.
    pub fn state_header(&self) -> [u8; HEADER] {
        let mut header = self.header;
        header[MAGIC_FIELD].copy_from_slice(b"GCST");
        header
    }

    /// Returns the offsets of the scales of segments and of the scales of parts in the state, in bytes.
    pub fn state_scales(&self) -> [i64; 2] {
        let scales = self.layout.format.segment_scale_bytes * self.workers.len() as i64;
        [HEADER as i64, HEADER as i64 + scales]
    }

    /// Returns the number of halves of a state: the worker's, and the server's if a chunk is reduced.
    pub fn state_halves(&self) -> usize {
        1 + usize::from(self.server.is_some())
    }

    /// Returns the distance from chunk to chunk, in bytes.
    pub fn stride(&self) -> i64 {
        self.layout.stride
    }

    pub fn payload_bytes(&self) -> i64 {
        self.stride() * self.n_chunks as i64
    }

    /// Returns the number of elements that are reduced.
    pub fn server_elements(&self) -> i64 {
        self.servers.iter().map(|run| run.elements).sum()
    }

    /// Returns `value`, or NaN for a SIGN chunk with the flag NONFINITE, unless the policy is ZERO. Votes alone do not
    /// show that a value was not finite.
    pub fn value_of_vote(&self, value: f32, flags: u32) -> f32 {
        let hides = self.rules.kind == Kind::Sign && self.rules.policy != NonFinite::Zero;
        if hides && flags & NONFINITE != 0 { f32::NAN } else { value }
    }

    /// Returns the range of bytes of bits that a chunk holds, counted before the bits are cut into chunks.
    pub fn held_by(&self, chunk: usize) -> Range<i64> {
        held(chunk, self.layout.chunk_places)
    }

    /// Returns the number of raw elements in a chunk if the run is raw, otherwise of blocks or bytes of bits.
    pub fn per_chunk(&self, run: &Run) -> i64 {
        if run.raw { self.layout.chunk_raws } else { self.layout.chunk_places }
    }

    /// Returns the part of a segment in a chunk; None if it has no elements. The `state` of the part is not set.
    pub fn part(&self, segment: usize, chunk: usize) -> Option<Run> {
        let run = &self.workers[segment];
        let held = held(chunk, self.per_chunk(run));
        let (begin, end) = (held.start.max(run.place), held.end.min(run.place + run.places()));
        (begin < end).then(|| {
            let first = (begin - run.place) * run.place_elements;
            let elements = ((end - run.place).saturating_mul(run.place_elements)).min(run.elements) - first;
            Run { first, elements, place: begin, row: run.row + first, ..*run }
        })
    }
}

/// Returns the range of places that a chunk holds.
fn held(chunk: usize, per_chunk: i64) -> Range<i64> {
    // The products do not overflow: they are at most n_chunks * per_chunk, which is at most the payload's bytes.
    chunk as i64 * per_chunk..(chunk as i64 + 1) * per_chunk
}

pub fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn rules(error: Option<Dtype>) -> Rules {
        Rules {
            kind: Kind::Onebit,
            values: Dtype::F32,
            results: Dtype::F32,
            error,
            scale: ScaleRule::Rms,
            reduction: Reduction::Mean,
            beta: 1.0,
            policy: NonFinite::Propagate,
            ranks: 1,
        }
    }

    #[test]
    fn the_payload_is_that_of_the_specification() {
        // The expected bytes are the example by hand of docs/NUMERICS.md.
        let plan = CodecPlan::new(rules(Some(Dtype::F32)), &[2], &[], 1, None).unwrap();
        assert_eq!((plan.layout.scales_at, plan.stride(), plan.payload_bytes()), (80, 96, 96));
        let expected: [u8; HEADER] = [
            0x47, 0x43, 0x50, 0x4c, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, // 0
            1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, // 16
            2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, // 32
            0x07, 0xce, 0xf8, 0x3d, 0x44, 0x86, 0xbd, 0xe6, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(plan.header(0), expected);
        assert_eq!(plan.state_bytes, 256 + 4096);
    }

    #[test]
    fn a_header_restores_its_plan_and_a_damaged_header_does_not() {
        for kind in Kind::ALL {
            for (values, results) in [(Dtype::F32, Dtype::BF16), (Dtype::F16, Dtype::F32), (Dtype::BF16, Dtype::F16)] {
                for elements in [0, 1, 1023, 1 << 40] {
                    let scale = if kind == Kind::Onebit { ScaleRule::Mean } else { ScaleRule::Rms };
                    let rules = Rules { kind, values, results, scale, ..rules(None) };
                    let plan = CodecPlan::new(rules, &[elements], &[], 1, None).unwrap();
                    let header = plan.header(0);
                    let read = CodecPlan::of_header(&header).unwrap();
                    assert_eq!((read.header(0), read.payload_bytes()), (header, plan.payload_bytes()), "{kind:?}");
                    for (at, bit) in (0..HEADER).flat_map(|at| (0..8).map(move |bit| (at, 1 << bit))) {
                        let mut damaged = header;
                        damaged[at] ^= bit;
                        match CodecPlan::of_header(&damaged) {
                            Err(refusal) => assert_eq!(refusal.status, Status::Corrupt, "byte {at}: {refusal:?}"),
                            // Some fields may have another value on their own: the header stays valid.
                            Ok(other) if other.header(0) == damaged => {
                                assert!((VALUES_FIELD.start..REDUCTION_FIELD.end).contains(&at), "{kind:?}: byte {at}");
                            }
                            Ok(_) => {}
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn more_elements_than_a_payload_can_have_are_refused_as_corrupt() {
        for kind in Kind::ALL {
            let mut header = CodecPlan::new(Rules { kind, ..rules(None) }, &[1], &[], 1, None).unwrap().header(0);
            for elements in [u64::MAX, i64::MAX as u64 + 1] {
                header[ELEMENTS_FIELD].copy_from_slice(&elements.to_le_bytes());
                assert_eq!(CodecPlan::of_header(&header).err().map(|refusal| refusal.status), Some(Status::Corrupt));
            }
        }
        let mut header =
            CodecPlan::new(Rules { kind: Kind::Bf16, ..rules(None) }, &[1], &[], 1, None).unwrap().header(0);
        header[ELEMENTS_FIELD].copy_from_slice(&i64::MAX.to_le_bytes());
        assert_eq!(CodecPlan::of_header(&header).err().map(|refusal| refusal.status), Some(Status::Corrupt));
    }

    #[test]
    fn fields_are_adjacent_and_where_kernels_write_them() {
        let mut end = 0;
        for (name, field) in FIELDS {
            assert_eq!(field.start, end, "{name}");
            end = field.end;
        }
        assert_eq!(end, HEADER);
        let [flags, chunk, turn] = [FLAGS_FIELD, CHUNK_FIELD, TURN_FIELD].map(|field| field.start / 4);
        let words = format!("{{ FLAGS_WORD = {flags}, CHUNK_WORD = {chunk}, TURN_WORD = {turn} }}");
        assert!(include_str!("../../../kernels/codec.cuh").contains(&words), "{words}");
    }

    #[test]
    fn parts_are_the_pieces_of_segments_in_a_chunk() {
        // The bytes of bits are 0..2, 2..2, 2..5 and 5..6. Chunks of 2 bytes are 0..2, 2..4 and 4..6.
        let segments = [13, 0, 17, 8];
        let part = |segment, first, elements, place| Run {
            segment,
            first,
            elements,
            place,
            place_elements: 8,
            raw: false,
            state: 0,
            row: [0, 13, 13, 30][segment] + first,
        };
        for (chunk, expected) in
            [(0, vec![part(0, 0, 13, 0)]), (1, vec![part(2, 0, 16, 2)]), (2, vec![part(2, 16, 1, 4), part(3, 0, 8, 5)])]
        {
            let plan = CodecPlan::new(rules(None), &segments, &[], 3, Some(chunk)).unwrap();
            assert_eq!(plan.layout.chunk_places, 2);
            assert_eq!(plan.servers, expected, "chunk {chunk}");
        }
        let plan = CodecPlan::new(rules(None), &segments, &[], 7, Some(6)).unwrap();
        assert_eq!((plan.layout.chunk_places, plan.servers.len(), plan.server_elements()), (1, 0, 0));
    }

    #[test]
    fn ranks_run_one_shot_without_errors_if_all_payloads_are_small() {
        let once = |over, rules, blocks: i64, world| {
            CodecPlan::new(rules, &[32 * blocks], &[], world, None).unwrap().is_one_shot(over)
        };
        // These are the limits of docs/NUMERICS.md, section 9: ranks of a node, world sizes, and bytes of all payloads.
        for (over, ranks, worlds, most) in [
            (Over::Cpu, 1, 2..=9, 1 << 20),
            (Over::PeerMemory, 1, 2..=4, 17 << 19),
            (Over::PeerMemory, 1, 5..=9, 1 << 20),
            (Over::Cuda, 1, 2..=2, 1 << 22),
            (Over::Cuda, 1, 3..=9, 1 << 20),
            (Over::Cpu, 2, 2..=2, 1 << 20),
            (Over::Cuda, 2, 2..=2, 1 << 20),
        ] {
            for world in worlds {
                let bf16 = Rules { kind: Kind::Bf16, ranks, ..rules(None) };
                // A chunk has a header of 64 bytes, and 64 bytes for each block.
                let blocks = most / 64 / (world * world) as i64 - 1;
                let fits = |blocks| once(over, bf16, blocks, world);
                assert!(fits(world as i64 * blocks) && !fits(world as i64 * blocks + 1), "{over:?} {ranks} {world}");
            }
        }
        for (over, worlds) in [(Over::PeerMemory, 2..=9), (Over::Cpu, 3..=9), (Over::Cuda, 3..=9)] {
            for world in worlds {
                assert!(!once(over, Rules { kind: Kind::Bf16, ranks: 2, ..rules(None) }, 0, world), "{over:?} {world}");
            }
        }
        for (over, kind, error, world, expected) in [
            (Over::Cuda, Kind::Onebit, None, 2, true),
            (Over::PeerMemory, Kind::Onebit, None, 2, false),
            (Over::Cuda, Kind::Onebit, Some(Dtype::F32), 2, false),
            (Over::Cuda, Kind::Int8, Some(Dtype::BF16), 9, false),
            (Over::PeerMemory, Kind::Int8, Some(Dtype::F32), 2, false),
            (Over::Cuda, Kind::Sign, None, 2, false),
            (Over::Cuda, Kind::Int8, None, 1, false),
            (Over::PeerMemory, Kind::Int8, None, 1, false),
            (Over::Cuda, Kind::Int8, None, 1 << 31, false),
        ] {
            let rules = Rules { kind, ..rules(error) };
            assert_eq!(once(over, rules, 1, world), expected, "{over:?} {} {error:?} {world}", kind.name());
        }
    }

    #[test]
    fn a_reducer_has_the_parts_of_its_chunks_and_keeps_nothing() {
        let segments = [33, 5, 7, 96];
        for kind in [Kind::Onebit, Kind::Int4] {
            let rules = Rules { kind, policy: NonFinite::Transactional, ..rules(None) };
            let raw = if kind == Kind::Int4 { vec![0, 1, 0, 0] } else { vec![] };
            let plan = |server| CodecPlan::new(rules, &segments, &raw, 3, server).unwrap();
            let all: Vec<Run> = (0..3).flat_map(|chunk| plan(Some(chunk)).servers).collect();
            let mut found = vec![];
            for first in (0..3).step_by(plan(None).chunks_at_once()) {
                let reducer = plan(Some(1)).reducer(first).unwrap();
                assert_eq!((reducer.server, reducer.rules.policy), (Some(first), NonFinite::Propagate));
                assert_eq!((reducer.header(2), reducer.stride()), (plan(None).header(2), plan(None).stride()));
                found.extend(reducer.servers);
            }
            assert_eq!(found, all, "{kind:?}");
        }
    }

    #[test]
    fn states_follow_the_scales_in_whole_units() {
        let plan = CodecPlan::new(rules(Some(Dtype::BF16)), &[1025, 0, 7], &[], 2, Some(1)).unwrap();
        let states: Vec<i64> = plan.workers.iter().chain(&plan.servers).map(|run| run.state).collect();
        // Header and scales have 64 + 2 * 12 bytes, padded to 256. A unit has 2048 bytes.
        assert_eq!(states, [256, 256 + 2 * 2048, 256 + 2 * 2048, 256 + 3 * 2048, 256 + 4 * 2048]);
        assert_eq!(plan.state_bytes, 256 + 5 * 2048);
        assert_eq!(plan.state_scales(), [64, 76]);
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        for segments in [vec![i64::MAX, 1], vec![i64::MAX - 7]] {
            assert!(CodecPlan::new(rules(Some(Dtype::F32)), &segments, &[], 1, None).is_err(), "{segments:?}");
        }
        assert!(CodecPlan::new(rules(None), &[100], &[], usize::MAX, None).is_err());
    }
}
