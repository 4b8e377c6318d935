//! Codecs on CUDA. docs/NUMERICS.md specifies the results; kernels/onebit.cu and kernels/blocks.cu compute them.
//!
//! Creating a codec allocates all memory and tables. After that a call is one launch, plus one that computes ONEBIT's
//! scales, plus launches that copy the addresses of more than 16 segments. The host does not track the state: the
//! device finds which of two states is valid, so that captured work can be launched again.

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
        peers::{self, PeerDestination, PeerSlot, Steps},
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
    Addresses, BROKEN, CONTROL_BYTES, Decode, Encode, Half, MOST_ADDRESSES, OneShot, Reduce, Run, SERVER, State,
    Tables, Tile, TwoShot, WORKER,
};

pub use layout::{MOST_VALUES, number_of};

/// Memory of a codec on a device, and the arguments of its launches.
pub struct Codec {
    family: &'static dyn Family,
    memory: Memory,
    /// Worker's half and server's half. The server's half has no segments if no chunk is reduced.
    halves: Vec<Half>,
    /// Number of tiles of each half.
    tiles: [u64; 2],
    /// Offsets in `memory` of the states, the flags, the table of addresses and the last scales, in bytes.
    states: [u64; 2],
    flags: u64,
    addresses: u64,
    scales: u64,
    transactional: bool,
    /// True if the last call from the host left a step pending. The effect of graphs since then is unknown.
    pending: bool,
    /// True if the driver has failed between the launches of a call: the state is poisoned, neither the old one nor the
    /// new one.
    poisoned: bool,
}

/// Destination of chunks: memory, or receive slots of other ranks with a barrier after the launch.
#[derive(Clone, Copy)]
pub struct ChunkDestination {
    dst: *mut u8,
    slot: PeerSlot,
    steps: Option<Steps>,
}

impl ChunkDestination {
    pub fn memory(view: &View<'_>) -> Self {
        Self { dst: view.data(), slot: PeerSlot::default(), steps: None }
    }

    /// Makes a destination of receive slots of other ranks, with a barrier after the launch.
    pub fn peers(sending: PeerDestination) -> Self {
        Self { dst: ptr::null_mut(), slot: sending.slot, steps: Some(sending.steps) }
    }
}

/// Offsets of the memory of a half, in bytes.
struct HalfOffsets {
    runs: u64,
    tiles: u64,
    partials: u64,
    counter: u64,
}

impl HalfOffsets {
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
    /// Allocates memory, loads the kernels and waits for both.
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
        let places = HalfOffsets::of(&mut parts, &tables)?;
        let reduced_places = reduced.as_ref().map(|tables| HalfOffsets::of(&mut parts, tables)).transpose()?;

        let memory = Memory::new(queue, parts.bytes)?;
        let half = |which, tables: &Tables, at: &HalfOffsets, units_at| -> Result<Half> {
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
            poisoned: false,
        };
        codec.launch_on_state(queue, &ONEBIT.reset, 1, |_| ())?;
        // Later calls may use streams that are not ordered with this one.
        queue.wait()?;
        Ok(codec)
    }

    /// Loads the kernels that write to the memory of other ranks.
    pub fn load_for_peers(&self, queue: &mut Queue) -> Result<()> {
        self.family.fused().map_or(Ok(()), |fused| queue.put_into_context(fused.module()))
    }

    /// Returns the family's all-reduce kernels, or an error if it has none.
    fn fused(&self) -> Result<&'static dyn FusedKernels> {
        self.family.fused().ok_or_else(|| error!(Panic, "codec: no all-reduce in one launch"))
    }

    /// Returns a queue for a call on this stream, which must be of the codec's context.
    pub fn queue(&self, stream: Stream) -> Result<Queue> {
        self.memory.queue(stream)
    }

    /// Checks that the state is not poisoned. On a poisoned state only `reset` works.
    pub fn check_not_poisoned(&self) -> Result<()> {
        if self.poisoned {
            return Err(error!(
                Cuda,
                "codec: the driver failed in the middle of an earlier call; gc_codec_reset makes its state anew"
            ));
        }
        Ok(())
    }

    /// Returns the device address of `gc_control`, which begins with the flags.
    pub fn control(&self) -> u64 {
        self.halves[0].control
    }

    /// Returns the address of a uint32 in host memory that becomes 1 when data is corrupt, or 0.
    pub fn report(&self) -> u64 {
        self.halves[0].report
    }

    /// Makes this codec, which only decodes, set the flags of another one.
    pub fn set_flags_of(&mut self, other: &Self) {
        for half in &mut self.halves {
            (half.control, half.report) = (other.control(), other.report());
        }
    }

    /// Returns the address of a uint32 on the device that becomes 1 when a rank does not arrive at an exchange.
    pub fn mark(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.memory.at(self.flags + BROKEN) as usize)
    }

    /// Returns true if a step is pending. Steps of graphs are not counted.
    pub fn is_pending(&self) -> bool {
        self.pending
    }

    pub fn encode(
        &mut self, queue: &mut Queue, plan: &CodecPlan, values: &[Address], factors: [Option<&View<'_>>; 2],
        to: ChunkDestination,
    ) -> Result<()> {
        self.encode_half(queue, plan, WORKER, values, factors, to)
    }

    /// Encodes this rank's shard to its chunk. `shard`: address of the part of each segment.
    pub fn encode_shard(
        &mut self, queue: &mut Queue, plan: &CodecPlan, shard: &[Address], to: ChunkDestination,
    ) -> Result<()> {
        self.encode_half(queue, plan, SERVER, shard, [None; 2], to)
    }

    fn encode_half(
        &mut self, queue: &mut Queue, plan: &CodecPlan, half: u32, values: &[Address], factors: [Option<&View<'_>>; 2],
        to: ChunkDestination,
    ) -> Result<()> {
        let dtype = if half == WORKER { plan.rules.values } else { Dtype::F32 };
        let half = half as usize;
        let mut call = self.call_of_encode(half, factors, to);
        call.codec.addresses = self.pass_addresses(queue, values, &mut call.values)?;
        self.family.encode(self, queue, plan, dtype, call, to)
    }

    /// Makes the argument of an encode, without the addresses of values.
    fn call_of_encode(&self, half: usize, factors: [Option<&View<'_>>; 2], to: ChunkDestination) -> Encode {
        Encode {
            codec: self.halves[half],
            factors: factors.map(|factor| factor.map_or(ptr::null(), |factor| factor.data().cast_const())),
            dst: to.dst,
            slot: to.slot,
            values: [ptr::null(); MOST_VALUES],
        }
    }

    /// Launches the barrier after a launch that has written chunks to other ranks. A call that fails before its barrier
    /// leaves this rank one barrier behind.
    fn barrier(&mut self, queue: &mut Queue, to: ChunkDestination) -> Result<()> {
        if let Some(steps) = to.steps {
            self.poisoned = true;
            // SAFETY: the communicator that owns the slot's buffers waits for its calls; the codec owns the mark.
            unsafe { to.slot.barrier(queue, steps, self.mark()) }?;
            self.poisoned = false;
        }
        self.pending = self.transactional;
        Ok(())
    }

    /// Launches a one-shot all-reduce of a block codec without errors, or one step of it.
    pub fn one_shot(
        &mut self, queue: &mut Queue, plan: &CodecPlan, values: &[Address], factor: Option<&View<'_>>,
        one_shot: peers::OneShot, steps: Steps,
    ) -> Result<()> {
        let mut call = OneShot {
            codec: self.halves[0],
            factor: factor.map_or(ptr::null(), |factor| factor.data().cast_const()),
            slot: one_shot.slot,
            apart: one_shot.apart,
            turn: one_shot.turn,
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

    /// Returns true if `two_shot` can replace encode, reduce and decode, and is not slower.
    pub fn fits_one_launch(&self, queue: &Queue, plan: &CodecPlan) -> bool {
        self.family.fused().is_some_and(|fused| fused.fits_one_launch(self, queue, plan))
    }

    /// Launches a two-shot all-reduce of a block codec with errors. `received`: this rank's chunk of every payload.
    /// `gathered`: the reduced chunks of all ranks.
    pub fn two_shot(
        &mut self, queue: &mut Queue, plan: &CodecPlan, values: &[Address], factors: [Option<&View<'_>>; 2],
        (to_each, received): (PeerSlot, Received), (to_all, gathered): (PeerSlot, &View<'_>),
    ) -> Result<()> {
        let to = |slot| ChunkDestination { dst: ptr::null_mut(), slot, steps: None };
        let by = Decoding { dtype: plan.rules.values, divisor: 1, factor: None, add: false, behind_ours: true };
        let mut call = TwoShot {
            encode: self.call_of_encode(WORKER as usize, factors, to(to_each)),
            reduce: Reduce::new(self.halves[1], &received, ptr::null_mut()),
            decode: self.call_of_decode(gathered, &by),
            tiles: self.tiles[1],
        };
        call.reduce.slot = to_all;
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

    /// Makes the argument of a decode, without the addresses of values.
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

    pub fn reduce(
        &mut self, queue: &mut Queue, plan: &CodecPlan, received: Received, to: ChunkDestination,
    ) -> Result<()> {
        let mut call = Reduce::new(self.halves[1], &received, to.dst);
        call.slot = to.slot;
        self.family.reduce(self, queue, plan, call, to)
    }

    /// Writes the mean or the sum of `chunks`, one per payload, to a shard, without the error. The state is only read.
    pub fn mean(
        &mut self, queue: &mut Queue, plan: &CodecPlan, chunks: &View<'_>, _: &View<'_>, shard: &[Address],
    ) -> Result<()> {
        // The parts follow one another, so the first address is that of the shard.
        let dst = shard.first().map_or(ptr::null_mut(), |first| first.0);
        let mut call = Reduce::new(self.halves[1], &Received::of(chunks, plan.stride()), dst);
        call.shard = 1;
        self.family.mean(self, queue, call)
    }

    /// Writes the flags of all calls since the last `take_flags` to a uint32, and clears them.
    pub fn take_flags(&mut self, queue: &mut Queue, dst: &View<'_>) -> Result<()> {
        // SAFETY: `dst` is a view of one uint32, on the device or in pinned memory.
        unsafe { self.memory.copy_to(queue, self.flags, dst.data(), 4) }?;
        // The flags are the first field of `gc_control`.
        self.memory.clear(queue, self.flags, 4)
    }

    /// Writes the scales of the last encode, one float32 per segment.
    pub fn scales(&mut self, queue: &mut Queue, plan: &CodecPlan, dst: &View<'_>) -> Result<()> {
        let bytes = 4 * plan.workers.len() as u64;
        // SAFETY: `dst` is a view of one float32 per segment, on the device or in pinned memory.
        unsafe { self.memory.copy_to(queue, self.scales, dst.data(), bytes) }
    }

    /// Makes kernels write 1 to `word` when data is corrupt. `word`: a uint32 of pinned memory that stays allocated.
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

    /// Resets the state to its initial value and the flags to 0.
    pub fn reset(&mut self, queue: &mut Queue, plan: &CodecPlan) -> Result<()> {
        self.poisoned = true;
        for (index, &state) in self.states.iter().enumerate() {
            if index == 0 || self.transactional {
                self.memory.clear(queue, state, plan.state_bytes as u64)?;
            }
        }
        self.launch_on_state(queue, &ONEBIT.reset, 1, |_| ())?;
        (self.poisoned, self.pending) = (false, false);
        Ok(())
    }

    /// Writes the valid state.
    pub fn state_out(&mut self, queue: &mut Queue, plan: &CodecPlan, dst: &View<'_>) -> Result<()> {
        let words = plan.state_bytes as u64 / 4;
        self.launch_on_state(queue, &ONEBIT.state_out, words, |call| call.bytes = dst.data())
    }

    /// Loads a state that `state_out` wrote. An invalid state is flagged, and changes nothing.
    pub fn state_in(&mut self, queue: &mut Queue, _: &CodecPlan, src: &View<'_>) -> Result<()> {
        self.launch_on_state(queue, &ONEBIT.check_state, 1, |call| call.bytes = src.data())?;
        self.load_halves(queue, &ONEBIT.state_in, [Some(src); 2], |_| ())
    }

    /// Writes the errors that the next step will read, in float32: the worker's and the server's.
    pub fn errors_out(
        &mut self, queue: &mut Queue, plan: &CodecPlan, worker: Option<&View<'_>>, server: Option<&View<'_>>,
    ) -> Result<()> {
        if let Some(row) = worker.filter(|_| plan.row_elements != plan.elements) {
            // SAFETY: `row` is a view of `row.elements()` float32 on the device.
            unsafe { queue.clear(row.data(), row.elements() as usize * size_of::<f32>()) }?;
        }
        for (half, errors) in [(WORKER, worker), (SERVER, server)] {
            self.launch_on_half(queue, &ONEBIT.errors_out, half, errors, |_| ())?;
        }
        Ok(())
    }

    /// Loads errors, rounded to the dtype of errors.
    pub fn errors_in(
        &mut self, queue: &mut Queue, _: &CodecPlan, worker: Option<&View<'_>>, server: Option<&View<'_>>,
    ) -> Result<()> {
        self.load_halves(queue, &ONEBIT.errors_in, [worker, server], |_| ())
    }

    /// Loads the errors of another world. `workers`: rows of all elements, which `rows` combines to this rank's errors.
    /// `server`: the reducers' errors of all elements, of which this codec loads its parts.
    pub fn errors_of_world_in(
        &mut self, queue: &mut Queue, plan: &CodecPlan, workers: Option<&View<'_>>, rows: &Rows,
        server: Option<&View<'_>>,
    ) -> Result<()> {
        self.load_halves(queue, &ONEBIT.errors_in, [workers, server], |call| {
            call.row = plan.row_elements as u64;
            if call.half == WORKER {
                call.take(rows);
            }
        })
    }

    /// Loads each half that is given. Between the two launches the state is part new, part old.
    fn load_halves(
        &mut self, queue: &mut Queue, kernel: &Kernel, halves: [Option<&View<'_>>; 2], complete: impl Fn(&mut State),
    ) -> Result<()> {
        let [worker, server] = halves;
        self.launch_on_half(queue, kernel, WORKER, worker, &complete)?;
        self.poisoned = worker.is_some();
        self.launch_on_half(queue, kernel, SERVER, server, &complete)?;
        self.poisoned = false;
        Ok(())
    }

    /// Launches a kernel with a thread block for each tile of a half. Does nothing without tiles or without `bytes`.
    /// `complete` sets the fields that differ between kernels.
    fn launch_on_half(
        &self, queue: &mut Queue, kernel: &Kernel, half: u32, bytes: Option<&View<'_>>,
        complete: impl FnOnce(&mut State),
    ) -> Result<()> {
        match (bytes, self.tiles[half as usize]) {
            (None, _) | (_, 0) => Ok(()), // no errors are given, or nothing is reduced
            (Some(bytes), tiles) => self.launch_on_state(queue, kernel, tiles, |call| {
                call.bytes = bytes.data();
                call.half = half;
                complete(call);
            }),
        }
    }

    /// Launches a kernel that takes a whole state. `complete` sets the fields that differ between kernels.
    fn launch_on_state(
        &self, queue: &mut Queue, kernel: &Kernel, items: u64, complete: impl FnOnce(&mut State),
    ) -> Result<()> {
        let mut call = State {
            worker: self.halves[0],
            server: self.halves[1],
            bytes: ptr::null_mut(),
            skip: ptr::null(),
            // Only `state_out` reads the size; its items are words of 4 bytes.
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
        // SAFETY: `call` is the kernel's struct: memory of the codec, and of a view whose size was checked.
        unsafe { queue.launch(kernel, items, &mut argument(&mut call)) }
    }

    /// Passes the addresses of the segments' values to kernels. Up to `MOST_VALUES` go into `places`; the result is
    /// then 0. More go into a table on the device, which is written for this call; the result is its address.
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
            // SAFETY: `call` is the kernel's struct; the table has an entry for each segment.
            unsafe { queue.launch(&ONEBIT.addresses, 1, &mut argument(&mut call)) }?;
        }
        Ok(table)
    }
}
