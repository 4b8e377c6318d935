//! Arguments of the kernels, as kernels/ declares them, and the tables on the device that locate tiles.

use std::ops::Range;

use crate::{
    codec::{
        call::{Received, Rows},
        plan::{CodecPlan, HEADER, Kind, NonFinite, Reduction, Run as PlanRun, UNIT, layout::Layout, units},
    },
    cuda::{
        layout::{bytes_of, kernel_structs, offset_in},
        peers::PeerSlot,
    },
    dlpack::Dtype,
    ffi::{
        error::{Result, error},
        fallible,
    },
};

/// Number of elements in a tile, which one thread block processes: 8 units.
pub const TILE: i64 = 8 * UNIT;

/// Largest number of segments whose addresses are part of a launch's argument. More go through a table on the device.
pub const MOST_VALUES: usize = 16;
/// Largest number of addresses that one launch writes to the table.
pub const MOST_ADDRESSES: usize = 448;

/// Run index of an empty tile.
const NO_RUN: u32 = u32::MAX;
/// Unit index of a tile of a raw run, which has no errors.
const NO_UNIT: u64 = u64::MAX;

/// Numbers of the halves of a state.
pub const WORKER: u32 = 0;
pub const SERVER: u32 = 1;

/// Bytes of `gc_control`: flags, valid and pending states, and all else that the host does not track.
pub const CONTROL_BYTES: usize = bytes_of("gc_control");
/// Offset in `gc_control` of the flag that is set when a rank did not arrive at an exchange, in bytes.
pub const BROKEN: u64 = offset_in("gc_control", "broken") as u64;

kernel_structs! {
    #[derive(Clone, Copy, Default)]
    pub struct Run: gc_run {
        elements: u64,
        /// Index of the run's first place (byte of bits, block or raw element), before the payload is cut into chunks.
        byte: u64,
        /// Worker's run: index of its first element in a row of errors. Server's run: elements of the runs before it.
        base: u64,
        first_tile: u64,
        tiles: u32,
        raw: u32,
    }

    #[repr(align(16))]
    #[derive(Clone, Copy)]
    pub struct Tile: gc_tile {
        /// Index of the tile's first element in the run.
        first: u64,
        /// Index of the tile's first unit among the units of all runs, or [`NO_UNIT`].
        unit: u64,
        /// Offset of the tile's bits in bytes: in the payload, or in the chunk that is reduced. Block codecs: index of
        /// the tile's first place in its chunk.
        to: u64,
        /// Index of the tile's first place, before the payload is cut into chunks.
        byte: u64,
        run: u32,
        count: u32,
        /// Number of places from the tile's first place to the end of the chunk; u32::MAX if it does not fit 32 bits.
        left: u32,
        chunk: u32,
    }

    /// Half of a codec: the worker's encodes, the server's reduces.
    #[derive(Clone, Copy)]
    pub struct Half: gc_codec {
        pub state: [u64; 2],
        pub control: u64,
        pub partials: u64,
        pub counter: u64,
        pub tiles: u64,
        pub runs: u64,
        pub segments: u64,
        pub scales: u64,
        /// Address of a uint32 in host memory that becomes 1 when data is corrupt, or 0.
        pub report: u64,
        /// Address of the table of segment addresses. 0: these are part of the launch's argument.
        pub addresses: u64,
        /// Numbers of bytes of bits (block codecs: of blocks) in the payload and in a chunk.
        pub bytes: u64,
        pub chunk_bytes: u64,
        pub head: u64,
        pub stride: u64,
        pub scales_at: u64,
        pub units_at: u64,
        pub n_segments: u32,
        pub n_chunks: u32,
        pub chunk: u32,
        pub chunks: u32,
        pub kind: u32,
        pub rule: u32,
        pub policy: u32,
        pub results: u32,
        pub half: u32,
        pub reduction: u32,
        pub beta: f32,
        pub error: u32,
        /// Number of ranks whose values a payload sums.
        pub ranks: u32,
        pub reserved: u32,
        pub header: [u8; HEADER],
        /// Run of the segment if there is only one.
        pub only: Run,
        /// Reciprocal of `chunk_bytes`, by which the kernels multiply to divide. Their quotient is at most 1 too small.
        pub reciprocal: u64,
        /// Block codecs: numbers of raw elements in the payload and in a chunk, the reciprocal of the latter, and the
        /// offsets of codes and raw elements in a chunk.
        pub raws: u64,
        pub chunk_raws: u64,
        pub raw_reciprocal: u64,
        pub codes_at: u64,
        pub raws_at: u64,
    }

    pub struct Finish: gc_finish {
        pub codec: Half,
        pub dst: *mut u8,
        pub slot: PeerSlot,
        /// Steps of the barrier; 0: no barrier.
        pub steps: u32,
        pub reserved: u32,
    }

    pub struct Encode: gc_encode {
        pub codec: Half,
        pub factors: [*const u8; 2],
        pub dst: *mut u8,
        pub slot: PeerSlot,
        pub values: [*const u8; MOST_VALUES],
    }

    pub struct Reduce: gc_reduce {
        pub codec: Half,
        pub chunks: *const u8,
        pub dst: *mut u8,
        pub slot: PeerSlot,
        pub payloads: u64,
        /// Distance from payload to payload, in bytes.
        pub apart: u64,
        /// Block codecs: 1 if `dst` is the shard, otherwise 0.
        pub shard: u32,
        pub reserved: u32,
    }

    pub struct OneShot: gc_one_shot {
        pub codec: Half,
        pub factor: *const u8,
        pub slot: PeerSlot,
        pub apart: u64,
        pub turn: u64,
        pub tiles: u64,
        pub steps: u32,
        pub reserved: u32,
        pub values: [*const u8; MOST_VALUES],
    }

    pub struct Decode: gc_decode {
        pub codec: Half,
        pub payload: *const u8,
        pub factor: *const u8,
        pub divisor: f32,
        pub dtype: u32,
        pub tiles: u64,
        pub first_empty: u64,
        pub values: [*const u8; MOST_VALUES],
    }

    pub struct TwoShot: gc_two_shot {
        pub encode: Encode,
        pub reduce: Reduce,
        pub decode: Decode,
        /// Number of tiles that are reduced.
        pub tiles: u64,
    }

    pub struct State: gc_state {
        pub worker: Half,
        pub server: Half,
        pub bytes: *mut u8,
        pub skip: *const u8,
        pub size: u64,
        pub half: u32,
        pub skip_kind: u32,
        pub rows: u64,
        pub row: u64,
        pub start: f32,
        pub divisor: f32,
        pub divisor_of_sum: f32,
        pub factor: f32,
    }

    pub struct Addresses: gc_addresses {
        pub table: u64,
        pub count: u64,
        pub values: [*const u8; MOST_ADDRESSES],
    }
}

impl State {
    /// Selects the rows that become the errors of the half.
    pub fn take(&mut self, rows: &Rows) {
        self.rows = rows.count as u64;
        self.bytes = self.bytes.wrapping_add(rows.first * self.row as usize * size_of::<f32>());
        (self.start, self.divisor) = (rows.start, rows.divisor);
        (self.divisor_of_sum, self.factor) = (rows.divisor_of_sum, rows.factor);
    }
}

impl Reduce {
    /// Makes the argument of a reduce to memory.
    pub fn new(codec: Half, received: &Received, dst: *mut u8) -> Self {
        Self {
            codec,
            chunks: received.at(0),
            dst,
            slot: PeerSlot::default(),
            payloads: received.payloads as u64,
            apart: received.apart as u64,
            shard: 0,
            reserved: 0,
        }
    }

    /// Returns true if kernels/blocks_lanes.cuh can reduce: codes of 4 or 8 bits without errors, of one segment that is
    /// not raw and has elements. The kernel checks headers with the elements, reads two payloads of 4 bits at a time,
    /// and divides scales instead of sums. It does not check that sums are finite: summands are below 2^108, and
    /// numbers of a finite block below 2^127.
    pub fn can_reduce_by_lanes(&self) -> bool {
        const MOST_PAYLOADS: u64 = 1 << 16;
        /// Largest number of values in a mean that may divide scales: see `Share` in kernels/blocks_reduce.cuh.
        const MOST_OF_A_MEAN: u64 = 1 << 7;
        let Half { kind, error, n_segments, only, reduction, ranks, .. } = &self.codec;
        let is_one_of = |kinds: [Kind; 2]| kinds.map(|kind| kind as u32).contains(kind);
        let (of_8_bits, of_4_bits) = (is_one_of([Kind::Mxfp8, Kind::Int8]), is_one_of([Kind::Int4, Kind::Mxfp4]));
        let payloads = self.payloads;
        let serves = if *reduction == Reduction::Sum as u32 {
            payloads <= MOST_PAYLOADS
        } else {
            let values = payloads.saturating_mul(u64::from(*ranks));
            values.is_power_of_two() && values <= MOST_OF_A_MEAN
        };
        (of_8_bits || of_4_bits && payloads.is_multiple_of(2))
            && serves
            && *error == 0
            && self.shard == 0
            && *n_segments == 1
            && only.raw == 0
            && only.elements != 0
    }
}

/// Returns the kernels' number for a dtype of values, errors or results.
pub fn number_of(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F16 => 1,
        Dtype::BF16 => 2,
        _ => 0,
    }
}

/// Returns the index of a kernel in a table with a kernel for each dtype of values and of errors.
pub fn index_of(values: Dtype, error: Option<Dtype>) -> usize {
    let errors = match error {
        Some(Dtype::BF16) => 1,
        Some(_) => 0,
        None => 2,
    };
    3 * usize::from(values.size == 2) + errors
}

/// Numbering of a family's tiles.
pub struct Tiling {
    /// Start of a chunk, in the unit of `Tile::to`.
    pub chunk_at: fn(&CodecPlan, i64) -> i64,
    /// Number of tiles of a run without elements: 0 or 1.
    pub tiles_of_empty_run: i64,
}

/// Runs of a half, one for each segment, and their tiles.
pub struct Tables {
    pub runs: Vec<Run>,
    pub tiles: Vec<Tile>,
    /// Number of units of all runs.
    units: i64,
}

impl Tables {
    /// Makes the tables of the worker's half: whole segments.
    pub fn of_workers(plan: &CodecPlan, tiling: &Tiling) -> Result<Self> {
        Self::of(
            tiling,
            0..1,
            true,
            plan.workers.len(),
            |segment| plan.workers[segment],
            |run, place| {
                // An empty segment may begin after the last chunk.
                let per_chunk = plan.per_chunk(run);
                let chunk = (place / per_chunk.max(1)).min(plan.n_chunks as i64 - 1);
                let at = place - chunk * per_chunk;
                (chunk, (tiling.chunk_at)(plan, chunk) + at, per_chunk - at)
            },
        )
    }

    /// Makes the tables of the server's half: the parts in a chunk. A segment without elements there has an empty run.
    /// If several chunks are reduced, each part has a run.
    pub fn of_servers(plan: &CodecPlan, chunk: usize, tiling: &Tiling) -> Result<Self> {
        let chunks = chunk..chunk + plan.server_chunks;
        if plan.server_chunks > 1 {
            let lies = |run: &PlanRun, place: i64| {
                let (chunk, at) = (place / plan.per_chunk(run), place % plan.per_chunk(run));
                (chunk, at, i64::MAX)
            };
            return Self::of(tiling, chunks, false, plan.servers.len(), |part| plan.servers[part], lies);
        }
        let first = |run: &PlanRun| chunk as i64 * plan.per_chunk(run);
        let mut parts = plan.servers.iter().peekable();
        let run = |segment: usize| {
            let whole = plan.workers[segment];
            let none = PlanRun { elements: 0, place: first(&whole), ..whole };
            parts.next_if(|part| part.segment == segment).copied().unwrap_or(none)
        };
        let head = (tiling.chunk_at)(plan, 0);
        Self::of(tiling, chunks, false, plan.workers.len(), run, |run, place| {
            (chunk as i64, head + place - first(run), i64::MAX)
        })
    }

    /// Makes the tables. `chunks`: each has a tile, which checks its header. `in_rows`: true if the errors of runs lie
    /// at their index in a row, false if they follow one another. `run`: returns each of `n_runs` runs in order.
    /// `lies`: maps a place of a run to its chunk, its `to` and the number of places left in the chunk.
    fn of(
        tiling: &Tiling, chunks: Range<usize>, in_rows: bool, n_runs: usize, mut run: impl FnMut(usize) -> PlanRun,
        lies: impl Fn(&PlanRun, i64) -> (i64, i64, i64),
    ) -> Result<Self> {
        let (mut runs, mut tiles) = (fallible::list(n_runs, "runs")?, Vec::new());
        let (mut base, mut unit) = (0, 0);
        for index in 0..n_runs {
            let part = run(index);
            let PlanRun { segment, elements, place, raw, place_elements, .. } = part;
            let count = if elements == 0 { tiling.tiles_of_empty_run } else { tiles_of(elements) };
            let number = u32::try_from(count).map_err(|_| {
                error!(SizeOverflow, "segment {segment}: {elements} elements are more than {TILE} times 2^32")
            })?;
            fallible::reserve(&mut tiles, count as usize, "tiles")?;
            runs.push(Run {
                elements: elements as u64,
                byte: place as u64,
                base: if in_rows { part.row } else { base } as u64,
                first_tile: tiles.len() as u64,
                tiles: number,
                raw: raw.into(),
            });
            for tile in 0..count {
                let first = tile * TILE;
                let place = place + first / place_elements;
                let (chunk, to, left) = lies(&part, place);
                tiles.push(Tile {
                    first: first as u64,
                    unit: if raw { NO_UNIT } else { (unit + first / UNIT) as u64 },
                    to: to as u64,
                    byte: place as u64,
                    run: index as u32,
                    count: (elements - first).min(TILE) as u32,
                    left: u32::try_from(left).unwrap_or(u32::MAX),
                    chunk: chunk as u32,
                });
            }
            base += elements;
            unit += if raw { 0 } else { units(elements) };
        }
        // The last chunks may have nothing but a header.
        for chunk in tiles.last().map_or(chunks.start, |tile: &Tile| tile.chunk as usize + 1)..chunks.end {
            fallible::reserve(&mut tiles, 1, "tiles")?;
            let chunk = chunk as u32;
            tiles.push(Tile { first: 0, unit: 0, to: 0, byte: 0, run: NO_RUN, count: 0, left: u32::MAX, chunk });
        }
        Ok(Self { runs, tiles, units: unit })
    }

    /// Returns the first run: the only one if there is one segment.
    pub fn only(&self) -> Run {
        self.runs.first().copied().unwrap_or_default()
    }

    /// Returns the size of the runs' kept elements in the state, in bytes.
    pub fn state_bytes(&self, plan: &CodecPlan) -> i64 {
        self.units * UNIT * plan.rules.error.map_or(0, |error| error.size as i64)
    }
}

/// Returns the number by which kernels multiply to divide by `by`: the quotient is at most 1 too small. 0 for 0.
fn reciprocal(by: u64) -> u64 {
    u64::MAX.checked_div(by).unwrap_or(0)
}

/// Returns the number of tiles of a run that has elements.
fn tiles_of(elements: i64) -> i64 {
    elements / TILE + i64::from(elements % TILE != 0)
}

impl Half {
    /// Fills in the fields that the plan determines; addresses are 0.
    pub fn of(plan: &CodecPlan, half: u32, units_at: i64) -> Self {
        let rules = &plan.rules;
        let (chunk, chunks) =
            if half == SERVER { (plan.server.unwrap_or(0), plan.server_chunks) } else { (0, plan.n_chunks) };
        // The casts are exact: the plan has at most 2^32 - 1 segments and chunks.
        let Layout { places, raws, chunk_places, chunk_raws, scales_at, codes_at, raws_at, stride, .. } = plan.layout;
        Self {
            state: [0; 2],
            control: 0,
            partials: 0,
            counter: 0,
            tiles: 0,
            runs: 0,
            segments: 0,
            scales: 0,
            report: 0,
            addresses: 0,
            bytes: places as u64,
            chunk_bytes: chunk_places as u64,
            head: scales_at as u64,
            stride: stride as u64,
            scales_at: plan.state_scales()[half as usize] as u64,
            units_at: units_at as u64,
            // With 0 segments the kernels look up tiles in the table, as several chunks require.
            n_segments: if chunks > 1 && half == SERVER { 0 } else { plan.workers.len() as u32 },
            n_chunks: plan.n_chunks as u32,
            chunk: chunk as u32,
            chunks: chunks as u32,
            kind: rules.kind as u32,
            rule: rules.scale as u32,
            policy: match rules.policy {
                NonFinite::Propagate => 0,
                NonFinite::Zero => 1,
                NonFinite::Transactional => 2,
            },
            results: number_of(rules.results) as u32,
            half,
            reduction: rules.reduction as u32,
            beta: rules.beta,
            error: rules.error.map_or(0, |error| error.size as u32),
            ranks: rules.ranks as u32,
            reserved: 0,
            header: plan.header(0),
            only: Run::default(),
            reciprocal: reciprocal(chunk_places as u64),
            raws: raws as u64,
            chunk_raws: chunk_raws as u64,
            raw_reciprocal: reciprocal(chunk_raws as u64),
            codes_at: codes_at as u64,
            raws_at: raws_at as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::plan::{Rules, ScaleRule};

    /// Tilings of the two families.
    const TILING: Tiling =
        Tiling { chunk_at: |plan, chunk| chunk * plan.stride() + plan.layout.scales_at, tiles_of_empty_run: 1 };
    const BLOCKS: Tiling = Tiling { chunk_at: |_, _| 0, tiles_of_empty_run: 0 };

    fn plan(segments: &[i64], n_chunks: usize, server: Option<usize>) -> CodecPlan {
        let rules = Rules {
            kind: Kind::Onebit,
            values: Dtype::F32,
            results: Dtype::F32,
            error: Some(Dtype::BF16),
            scale: ScaleRule::Rms,
            reduction: Reduction::Mean,
            beta: 1.0,
            policy: NonFinite::Propagate,
            ranks: 1,
        };
        CodecPlan::new(rules, segments, &[], n_chunks, server).unwrap()
    }

    /// Checks the limits of kernels/blocks_lanes.cuh: with an odd number of payloads of 4 bits its loop would not end.
    #[test]
    fn lanes_reduce_only_supported_calls() {
        let serve = |kind, reduction: Reduction, payloads, change: fn(&mut Half)| {
            // SAFETY: the struct has only numbers and pointers, for which 0 is a valid value.
            let mut call: Reduce = unsafe { std::mem::zeroed() };
            (call.codec.kind, call.codec.reduction, call.payloads) = (kind as u32, reduction as u32, payloads);
            (call.codec.n_segments, call.codec.only.elements, call.codec.ranks) = (1, 5, 1);
            change(&mut call.codec);
            call.can_reduce_by_lanes()
        };
        let (mean, sum, as_it_is) = (Reduction::Mean, Reduction::Sum, |_: &mut Half| ());
        for (kind, reduction, payloads, expected) in [
            (Kind::Int8, mean, 1, true),
            (Kind::Int8, mean, 3, false),
            (Kind::Mxfp8, mean, 128, true),
            (Kind::Mxfp8, mean, 256, false),
            (Kind::Int8, sum, 3, true),
            (Kind::Int8, sum, 1 << 16, true),
            (Kind::Int8, sum, (1 << 16) + 1, false),
            (Kind::Int4, mean, 1, false),
            (Kind::Int4, mean, 2, true),
            (Kind::Int4, sum, 3, false),
            (Kind::Mxfp4, sum, 6, true),
            (Kind::Bf16, mean, 2, false),
            (Kind::Onebit, mean, 2, false),
        ] {
            assert_eq!(serve(kind, reduction, payloads, as_it_is), expected, "{kind:?}, {reduction:?}, {payloads}");
        }
        let changes: [fn(&mut Half); 5] = [
            |codec| codec.ranks = 3,
            |codec| codec.error = 4,
            |codec| codec.n_segments = 2,
            |codec| codec.only.raw = 1,
            |codec| codec.only.elements = 0,
        ];
        for change in changes {
            assert!(!serve(Kind::Int8, mean, 2, change));
        }
    }

    #[test]
    fn every_byte_of_bits_is_in_one_tile_at_its_place() {
        let plan = plan(&[20_000, 0, 8192, 13], 3, None);
        let tables = Tables::of_workers(&plan, &TILING).unwrap();
        let runs: Vec<_> = tables.runs.iter().map(|run| (run.elements, run.first_tile, run.tiles)).collect();
        assert_eq!(runs, [(20_000, 0, 3), (0, 3, 1), (8192, 4, 1), (13, 5, 1)]);
        // The bits are 2500 + 1024 + 2 bytes, in chunks of 1176. A chunk has a head of 80 bytes and 1184 for bits.
        assert_eq!((plan.layout.chunk_places, plan.layout.scales_at, plan.stride()), (1176, 80, 1264));
        let tiles: Vec<_> = tables.tiles.iter().map(|tile| (tile.chunk, tile.to, tile.left, tile.count)).collect();
        let at = |byte: u64| (byte / 1176 * 1264 + 80 + byte % 1176, (1176 - byte % 1176) as u32);
        let expected = [(0, 0, 8192), (0, 1024, 8192), (1, 2048, 3616), (2, 2500, 0), (2, 2500, 8192), (2, 3524, 13)];
        assert_eq!(tiles, expected.map(|(chunk, byte, count)| (chunk, at(byte).0, at(byte).1, count)));
        let units: Vec<_> = tables.tiles.iter().map(|tile| tile.unit).collect();
        assert_eq!(units, [0, 8, 16, 20, 20, 28]);
    }

    #[test]
    fn parts_lie_in_their_chunk_and_each_chunk_has_a_tile() {
        // The segments are blocks 0 and 1, raw elements 0 to 9, and blocks 2 to 257. Each of 6 chunks has 43 blocks and
        // 2 raw elements.
        let of = |segments: &[i64]| {
            let rules = Rules { kind: Kind::Int4, error: None, ..plan(segments, 1, None).rules };
            let plan = CodecPlan::new(rules, segments, &[0, 1, 0], 6, None).unwrap().reducer(0).unwrap();
            let tables = Tables::of_servers(&plan, 0, &BLOCKS).unwrap();
            let half = Half::of(&plan, SERVER, 0);
            assert_eq!((half.chunk, half.chunks, half.n_segments), (0, 6, 0));
            let tiles = tables.tiles.iter().map(|tile| (tile.chunk, tile.to, tile.count, tile.run));
            (tiles.collect::<Vec<_>>(), tables.runs.len())
        };
        let (tiles, runs) = of(&[33, 10, 8192]);
        assert_eq!(runs, 1 + 5 + 6);
        let first = [(0, 0, 33, 0), (0, 0, 2, 1), (0, 2, 41 * 32, 2), (1, 0, 2, 3), (1, 0, 43 * 32, 4), (2, 0, 2, 5)];
        assert_eq!(tiles[..6], first);
        // The last chunks may be empty.
        let none = |chunk| (chunk, 0, 0, NO_RUN);
        assert_eq!(of(&[33, 0, 8]).0, [(0, 0, 32, 0), (1, 0, 1, 1), (2, 0, 8, 2), none(3), none(4), none(5)]);
        assert_eq!(of(&[0, 0, 0]).0, [0, 1, 2, 3, 4, 5].map(none));
    }

    #[test]
    fn a_part_has_the_offset_of_its_chunk() {
        let plan = plan(&[20_000, 0, 8192, 13], 3, Some(2));
        let tables = Tables::of_servers(&plan, 2, &TILING).unwrap();
        let runs: Vec<_> = tables.runs.iter().map(|run| (run.elements, run.byte, run.base)).collect();
        assert_eq!(runs, [(1184, 2352, 0), (0, 2352, 1184), (8192, 2500, 1184), (13, 3524, 9376)]);
        let tiles: Vec<_> = tables.tiles.iter().map(|tile| (tile.chunk, tile.to, tile.unit, tile.count)).collect();
        assert_eq!(tiles, [(2, 80, 0, 1184), (2, 80, 2, 0), (2, 228, 2, 8192), (2, 1252, 10, 13)]);
        assert_eq!(tables.state_bytes(&plan), 11 * 2048);
    }
}
