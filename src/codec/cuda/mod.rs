//! Codecs on CUDA: docs/NUMERICS.md is what they compute, kernels/onebit.cu and kernels/blocks.cu how.
//!
//! All memory and tables are made with the codec. After that a call is a launch, another one where ONEBIT's scales are
//! made (of many segments, one more that carries their addresses), and nothing of the state is known to the host: it is
//! the device that finds which of two states is valid, so that what was captured in a graph can be launched again.

mod bits;
mod blocks;
mod family;
mod layout;
pub mod nodes;

use std::ptr;

use crate::{
    cuda::{
        Memory, Queue, Stream,
        launch::argument,
        memory::Parts,
        module::{Kernel, ONEBIT, ONEBIT_MODULE},
        peers::{self, Sending, Steps, Way},
    },
    dlpack::{Address, Dtype, View},
    ffi::{
        error::{Result, error},
        fallible,
    },
};

use super::{
    call::{Decoding, Received, Rows, Skip},
    plan::{self, CodecPlan, NonFinite},
};

use family::{Family, FusedKernels};
use layout::{
    Addresses, BROKEN, CONTROL_BYTES, Decode, Encode, Half, MOST_ADDRESSES, Once, Reduce, Run, SERVER, State, Tables,
    Tile, Twice, WORKER,
};

pub use layout::{MOST_VALUES, number_of};

/// A codec's memory on a device, and what its launches are given.
pub struct Codec {
    family: &'static dyn Family,
    memory: Memory,
    /// What is encoded, and what is reduced: without segments if nothing is.
    halves: Vec<Half>,
    /// How many tiles each half has.
    tiles: [u64; 2],
    /// Where parts of the memory lie: the states, the flags, the table of addresses, the last scales.
    states: [u64; 2],
    flags: u64,
    addresses: u64,
    scales: u64,
    transactional: bool,
    /// Whether the last call that was made here left a step that is to be committed. What graphs do since is not known.
    pending: bool,
    /// Whether the driver has failed between the launches of a call: then the state is neither the old one nor the new
    /// one.
    torn: bool,
}

/// Where chunks go: to memory, or to receive slots of other ranks, with a barrier behind.
#[derive(Clone, Copy)]
pub struct To {
    dst: *mut u8,
    way: Way,
    steps: Option<Steps>,
}

impl To {
    pub fn memory(view: &View<'_>) -> Self {
        Self { dst: view.data(), way: Way::default(), steps: None }
    }

    /// Into receive slots of other ranks, with a barrier behind it.
    pub fn peers(sending: Sending) -> Self {
        Self { dst: ptr::null_mut(), way: sending.way, steps: Some(sending.steps) }
    }
}

/// What the memory of a half has.
struct Places {
    runs: u64,
    tiles: u64,
    partials: u64,
    counter: u64,
}

impl Places {
    fn of(parts: &mut Parts, tables: &Tables) -> Result<Self> {
        let (runs, tiles) = (tables.runs.len(), tables.tiles.len());
        Ok(Self {
            runs: parts.add(runs, size_of::<Run>())?,
            tiles: parts.add(tiles, size_of::<Tile>())?,
            partials: parts.add(tiles, size_of::<f64>())?,
            counter: parts.add(1, size_of::<u32>())?,
        })
    }
}

impl Codec {
    /// Allocates, loads the kernels and waits until all is there.
    pub fn new(queue: &mut Queue, plan: &CodecPlan) -> Result<Self> {
        let family: &dyn Family = match plan.layout.format.family {
            plan::layout::Family::Bits => &bits::Bits,
            plan::layout::Family::Blocks => &blocks::Blocks,
        };
        queue.put_into_context(&ONEBIT_MODULE)?;
        family.module().map_or(Ok(()), |module| queue.put_into_context(module))?;
        let transactional = plan.rules.policy == NonFinite::Transactional;
        let reduced = plan.server.map(|first| Tables::of_servers(plan, first, &family.tiling())).transpose()?;
        let tables = Tables::of_workers(plan, &family.tiling())?;
        let segments = plan.workers.len();

        let mut parts = Parts::default();
        let first = parts.add(1, plan.state_bytes as usize)?;
        let states = [first, if transactional { parts.add(1, plan.state_bytes as usize)? } else { first }];
        let flags = parts.add(1, CONTROL_BYTES)?;
        let scales = parts.add(segments, size_of::<f32>())?;
        let addresses = parts.add(segments, size_of::<*const u8>())?;
        let places = Places::of(&mut parts, &tables)?;
        let reduced_places = reduced.as_ref().map(|tables| Places::of(&mut parts, tables)).transpose()?;

        let memory = Memory::new(queue, parts.bytes)?;
        let half = |which, tables: &Tables, at: &Places, units_at| -> Result<Half> {
            memory.put(at.runs, &tables.runs)?;
            memory.put(at.tiles, &tables.tiles)?;
            Ok(Half {
                state: states.map(|at| memory.at(at)),
                control: memory.at(flags),
                partials: memory.at(at.partials),
                counter: memory.at(at.counter),
                tiles: memory.at(at.tiles),
                runs: memory.at(at.runs),
                segments: memory.at(places.runs),
                scales: if which == WORKER { memory.at(scales) } else { 0 },
                only: tables.only(),
                ..Half::of(plan, which, units_at)
            })
        };
        let of_server = reduced.as_ref().map_or(0, |tables| tables.state_bytes(plan));
        let server_at = plan.state_bytes - of_server;
        let worker = half(WORKER, &tables, &places, server_at - tables.state_bytes(plan))?;
        let server = match (&reduced, &reduced_places) {
            (Some(tables), Some(places)) => half(SERVER, tables, places, server_at)?,
            _ => Half { n_segments: 0, ..worker },
        };
        let tiles = [tables.tiles.len() as u64, reduced.as_ref().map_or(0, |tables| tables.tiles.len() as u64)];
        let mut halves = fallible::list(2, "halves of a codec")?;
        halves.extend([worker, server]);
        let codec = Self {
            family,
            memory,
            halves,
            tiles,
            states,
            flags,
            addresses,
            scales,
            transactional,
            pending: false,
            torn: false,
        };
        codec.launch_on_state(queue, &ONEBIT.reset, 1, |_| ())?;
        // Calls may be made on streams that are not ordered with this one.
        queue.wait()?;
        Ok(codec)
    }

    /// Loads the kernels that write to the memory of other ranks.
    pub fn load_for_peers(&self, queue: &mut Queue) -> Result<()> {
        self.family.fused().map_or(Ok(()), |fused| queue.put_into_context(fused.module()))
    }

    /// Of a codec whose plan has one-shot kernels.
    fn fused(&self) -> Result<&'static dyn FusedKernels> {
        self.family.fused().ok_or_else(|| error!(Panic, "codec: no all-reduce in one launch"))
    }

    /// A queue for a call on this stream, which must be of the codec's context.
    pub fn queue(&self, stream: Stream) -> Result<Queue> {
        self.memory.queue(stream)
    }

    /// That the state is whole. If it is not, only `reset` is of use.
    pub fn check_whole(&self) -> Result<()> {
        if self.torn {
            return Err(error!(
                Cuda,
                "codec: the driver failed in the middle of an earlier call; gc_codec_reset makes its state anew"
            ));
        }
        Ok(())
    }

    /// Where flags are on the device.
    pub fn control(&self) -> u64 {
        self.halves[0].control
    }

    /// A uint32 of the host that becomes 1 when something is corrupt; or 0.
    pub fn report(&self) -> u64 {
        self.halves[0].report
    }

    /// From now on this codec, which only decodes, sets the flags of another one.
    pub fn set_flags_of(&mut self, other: &Self) {
        for half in &mut self.halves {
            (half.control, half.report) = (other.control(), other.report());
        }
    }

    /// A uint32 on the device: 1 once a rank did not arrive at an exchange.
    pub fn mark(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.memory.at(self.flags + BROKEN) as usize)
    }

    /// Whether a step waits for its commit, as far as it was not a graph that made it.
    pub fn is_pending(&self) -> bool {
        self.pending
    }

    pub fn encode(
        &mut self, queue: &mut Queue, plan: &CodecPlan, values: &[Address], factors: [Option<&View<'_>>; 2], to: To,
    ) -> Result<()> {
        self.encode_half(queue, plan, WORKER, values, factors, to)
    }

    /// Makes the chunk of this rank of its shard, where its parts begin by segment.
    pub fn encode_shard(&mut self, queue: &mut Queue, plan: &CodecPlan, shard: &[Address], to: To) -> Result<()> {
        self.encode_half(queue, plan, SERVER, shard, [None; 2], to)
    }

    fn encode_half(
        &mut self, queue: &mut Queue, plan: &CodecPlan, half: u32, values: &[Address], factors: [Option<&View<'_>>; 2],
        to: To,
    ) -> Result<()> {
        let dtype = if half == WORKER { plan.rules.values } else { Dtype::F32 };
        let half = half as usize;
        let mut call = self.call_of_encode(half, factors, to);
        call.codec.addresses = self.pass_addresses(queue, values, &mut call.values)?;
        self.family.encode(self, queue, plan, dtype, call, to)
    }

    /// Without values.
    fn call_of_encode(&self, half: usize, factors: [Option<&View<'_>>; 2], to: To) -> Encode {
        Encode {
            codec: self.halves[half],
            factors: factors.map(|factor| factor.map_or(ptr::null(), |factor| factor.data().cast_const())),
            dst: to.dst,
            way: to.way,
            values: [ptr::null(); MOST_VALUES],
        }
    }

    /// The barrier behind a launch that has written chunks to other ranks. A call that breaks off before it leaves this
    /// rank one barrier behind.
    fn barrier(&mut self, queue: &mut Queue, to: To) -> Result<()> {
        if let Some(steps) = to.steps {
            self.torn = true;
            // SAFETY: the communicator, which the way is of, waits for its calls; the mark is this codec's.
            unsafe { to.way.barrier(queue, steps, self.mark()) }?;
            self.torn = false;
        }
        self.pending = self.transactional;
        Ok(())
    }

    /// A whole all-reduce of a block codec that keeps nothing, whose ranks exchange once; or a step of one.
    pub fn exchange_once(
        &mut self, queue: &mut Queue, plan: &CodecPlan, values: &[Address], factor: Option<&View<'_>>,
        once: peers::Once, steps: Steps,
    ) -> Result<()> {
        let mut call = Once {
            codec: self.halves[0],
            factor: factor.map_or(ptr::null(), |factor| factor.data().cast_const()),
            way: once.way,
            apart: once.apart,
            turn: once.turn,
            tiles: self.tiles[0],
            steps: steps as u32,
            reserved: 0,
            values: [ptr::null(); MOST_VALUES],
        };
        call.codec.addresses = self.pass_addresses(queue, values, &mut call.values)?;
        self.fused()?.one_shot(queue, plan, call)?;
        self.pending = self.transactional;
        Ok(())
    }

    /// Whether `exchange_twice` does what encode, reduce and decode do, and no later.
    pub fn fits_one_launch(&self, queue: &Queue, plan: &CodecPlan) -> bool {
        self.family.fused().is_some_and(|fused| fused.fits_one_launch(self, queue, plan))
    }

    /// A whole all-reduce of a block codec with errors whose ranks exchange twice. `received`: this rank's chunk of
    /// every payload; `gathered`: the reduced chunks of all.
    pub fn exchange_twice(
        &mut self, queue: &mut Queue, plan: &CodecPlan, values: &[Address], factors: [Option<&View<'_>>; 2],
        (to_each, received): (Way, Received), (to_all, gathered): (Way, &View<'_>),
    ) -> Result<()> {
        let to = |way| To { dst: ptr::null_mut(), way, steps: None };
        let by = Decoding { dtype: plan.rules.values, divisor: 1, factor: None, add: false, behind_ours: true };
        let mut call = Twice {
            encode: self.call_of_encode(WORKER as usize, factors, to(to_each)),
            reduce: Reduce::new(self.halves[1], &received, ptr::null_mut()),
            decode: self.call_of_decode(gathered, &by),
            tiles: self.tiles[1],
        };
        call.reduce.way = to_all;
        call.encode.codec.addresses = self.pass_addresses(queue, values, &mut call.encode.values)?;
        (call.decode.codec.addresses, call.decode.values) = (call.encode.codec.addresses, call.encode.values);
        self.fused()?.two_shot(queue, call)?;
        self.pending = self.transactional;
        Ok(())
    }

    pub fn decode(
        &mut self, queue: &mut Queue, plan: &CodecPlan, payload: &View<'_>, by: &Decoding<'_>, values: &[Address],
    ) -> Result<()> {
        let mut call = self.call_of_decode(payload, by);
        call.codec.addresses = self.pass_addresses(queue, values, &mut call.values)?;
        self.family.decode(self, queue, plan, by, call)
    }

    /// Without values.
    fn call_of_decode(&self, payload: &View<'_>, by: &Decoding<'_>) -> Decode {
        Decode {
            codec: self.halves[0],
            payload: payload.data(),
            factor: by.factor.map_or(ptr::null(), |factor| factor.data().cast_const()),
            divisor: by.divisor as f32,
            dtype: number_of(by.dtype) as u32,
            tiles: self.tiles[0],
            first_empty: self.halves[0].bytes.div_ceil(self.halves[0].chunk_bytes.max(1)),
            values: [ptr::null(); MOST_VALUES],
        }
    }

    pub fn reduce(&mut self, queue: &mut Queue, plan: &CodecPlan, received: Received, to: To) -> Result<()> {
        let mut call = Reduce::new(self.halves[1], &received, to.dst);
        call.way = to.way;
        self.family.reduce(self, queue, plan, call, to)
    }

    /// Writes the mean of `chunks`, one a payload, to a shard, without the error; or their sum. The state is only read.
    pub fn mean(
        &mut self, queue: &mut Queue, plan: &CodecPlan, chunks: &View<'_>, _: &View<'_>, shard: &[Address],
    ) -> Result<()> {
        // The parts lie one behind the other.
        let dst = shard.first().map_or(ptr::null_mut(), |first| first.0);
        let mut call = Reduce::new(self.halves[1], &Received::of(chunks, plan.stride()), dst);
        call.shard = 1;
        self.family.mean(self, queue, call)
    }

    /// Writes the flags of all calls since the last, to a uint32.
    pub fn take_flags(&mut self, queue: &mut Queue, dst: &View<'_>) -> Result<()> {
        // SAFETY: a view of one uint32, on the device or in pinned memory.
        unsafe { self.memory.copy_to(queue, self.flags, dst.data(), 4) }?;
        // They are the first of what is known there.
        self.memory.clear(queue, self.flags, 4)
    }

    /// Writes the scales of the last encode, a float32 a segment.
    pub fn scales(&mut self, queue: &mut Queue, plan: &CodecPlan, dst: &View<'_>) -> Result<()> {
        let bytes = 4 * plan.workers.len() as u64;
        // SAFETY: a view of as many float32, on the device or in pinned memory.
        unsafe { self.memory.copy_to(queue, self.scales, dst.data(), bytes) }
    }

    /// From now on a 1 is written to `word`, a uint32 of pinned memory that stays, when something is corrupt.
    pub fn report_to(&mut self, word: *mut u8) {
        for half in &mut self.halves {
            half.report = word as u64;
        }
    }

    /// Makes a pending step valid, or takes it back.
    pub fn commit(&mut self, queue: &mut Queue, skip: Skip<'_>) -> Result<()> {
        self.launch_on_state(queue, &ONEBIT.commit, 1, |call| match skip {
            Skip::Never => (),
            Skip::Always => call.skip_kind = 1,
            Skip::If(scalar) => {
                call.skip = scalar.data();
                call.skip_kind = match scalar.dtype() {
                    Dtype::F32 => 4,
                    Dtype { size: 4, .. } => 3,
                    _ => 2,
                };
            }
        })?;
        self.pending = false;
        Ok(())
    }

    /// The state as it was made; the flags are 0.
    pub fn reset(&mut self, queue: &mut Queue, plan: &CodecPlan) -> Result<()> {
        self.torn = true;
        for (index, &state) in self.states.iter().enumerate() {
            if index == 0 || self.transactional {
                self.memory.clear(queue, state, plan.state_bytes as u64)?;
            }
        }
        self.launch_on_state(queue, &ONEBIT.reset, 1, |_| ())?;
        (self.torn, self.pending) = (false, false);
        Ok(())
    }

    /// Writes the valid state.
    pub fn state_out(&mut self, queue: &mut Queue, plan: &CodecPlan, dst: &View<'_>) -> Result<()> {
        let words = plan.state_bytes as u64 / 4;
        self.launch_on_state(queue, &ONEBIT.state_out, words, |call| call.bytes = dst.data())
    }

    /// Takes over a state that `state_out` wrote. Another one is flagged, and changes nothing.
    pub fn state_in(&mut self, queue: &mut Queue, _: &CodecPlan, src: &View<'_>) -> Result<()> {
        self.launch_on_state(queue, &ONEBIT.check_state, 1, |call| call.bytes = src.data())?;
        self.take_in(queue, &ONEBIT.state_in, [Some(src); 2], |_| ())
    }

    /// Writes the errors that the next step will read, in float32: the workers', the server's.
    pub fn errors_out(
        &mut self, queue: &mut Queue, plan: &CodecPlan, worker: Option<&View<'_>>, server: Option<&View<'_>>,
    ) -> Result<()> {
        if let Some(row) = worker.filter(|_| plan.row_elements != plan.elements) {
            // SAFETY: a view of so many float32 on the device.
            unsafe { queue.clear(row.data(), row.elements() as usize * size_of::<f32>()) }?;
        }
        for (half, errors) in [(WORKER, worker), (SERVER, server)] {
            self.launch_on_half(queue, &ONEBIT.errors_out, half, errors, |_| ())?;
        }
        Ok(())
    }

    /// Takes over errors, rounded to the dtype of errors.
    pub fn errors_in(
        &mut self, queue: &mut Queue, _: &CodecPlan, worker: Option<&View<'_>>, server: Option<&View<'_>>,
    ) -> Result<()> {
        self.take_in(queue, &ONEBIT.errors_in, [worker, server], |_| ())
    }

    /// The same of another world: of the workers' rows, which have all elements each, what `rows` says; and of the
    /// reducers' errors of all elements the parts of this one.
    pub fn errors_of_world_in(
        &mut self, queue: &mut Queue, plan: &CodecPlan, workers: Option<&View<'_>>, rows: &Rows,
        server: Option<&View<'_>>,
    ) -> Result<()> {
        self.take_in(queue, &ONEBIT.errors_in, [workers, server], |call| {
            call.row = plan.row_elements as u64;
            if call.half == WORKER {
                call.take(rows);
            }
        })
    }

    /// Takes over what there is for each half. Between the two launches the state is part new, part old.
    fn take_in(
        &mut self, queue: &mut Queue, kernel: &Kernel, halves: [Option<&View<'_>>; 2], complete: impl Fn(&mut State),
    ) -> Result<()> {
        let [worker, server] = halves;
        self.launch_on_half(queue, kernel, WORKER, worker, &complete)?;
        self.torn = worker.is_some();
        self.launch_on_half(queue, kernel, SERVER, server, &complete)?;
        self.torn = false;
        Ok(())
    }

    /// Launches a kernel that has a block for each tile of a half, if there are any, and bytes for them. `complete`
    /// sets what differs between kernels.
    fn launch_on_half(
        &self, queue: &mut Queue, kernel: &Kernel, half: u32, bytes: Option<&View<'_>>,
        complete: impl FnOnce(&mut State),
    ) -> Result<()> {
        match (bytes, self.tiles[half as usize]) {
            (None, _) | (_, 0) => Ok(()), // or nothing is reduced
            (Some(bytes), tiles) => self.launch_on_state(queue, kernel, tiles, |call| {
                call.bytes = bytes.data();
                call.half = half;
                complete(call);
            }),
        }
    }

    /// Launches one of the kernels that take a whole state. `complete` sets what differs between them.
    fn launch_on_state(
        &self, queue: &mut Queue, kernel: &Kernel, items: u64, complete: impl FnOnce(&mut State),
    ) -> Result<()> {
        let mut call = State {
            worker: self.halves[0],
            server: self.halves[1],
            bytes: ptr::null_mut(),
            skip: ptr::null(),
            // Counted in words where it is asked for.
            size: items * 4,
            half: WORKER,
            skip_kind: 0,
            rows: 0,
            row: 0,
            start: 0.0,
            divisor: 1.0,
            divisor_of_sum: 1.0,
            factor: 1.0,
        };
        call.take(&Rows::ONE);
        complete(&mut call);
        // SAFETY: the kernel's argument: memory of the codec, and of a view whose size was checked against its plan.
        unsafe { queue.launch(kernel, items, &mut argument(&mut call)) }
    }

    /// Where the kernels find the addresses of the segments' values: few are in `places`, for which this gives 0, more
    /// in a table on the device, which is written for this call.
    pub fn pass_addresses(
        &self, queue: &mut Queue, values: &[Address], places: &mut [*const u8; MOST_VALUES],
    ) -> Result<u64> {
        if values.len() <= MOST_VALUES {
            for (place, value) in places.iter_mut().zip(values) {
                *place = value.0;
            }
            return Ok(0);
        }
        let table = self.memory.at(self.addresses);
        for (group, values) in values.chunks(MOST_ADDRESSES).enumerate() {
            let mut call = Addresses {
                table: table + (group * MOST_ADDRESSES * size_of::<*const u8>()) as u64,
                count: values.len() as u64,
                values: [ptr::null(); MOST_ADDRESSES],
            };
            for (place, value) in call.values.iter_mut().zip(values) {
                *place = value.0;
            }
            // SAFETY: the kernel's argument: the table has an entry for each segment.
            unsafe { queue.launch(&ONEBIT.addresses, 1, &mut argument(&mut call)) }?;
        }
        Ok(table)
    }
}
