//! Codecs: the checks before a device encodes, decodes and reduces.
#![forbid(unsafe_code)]

mod arguments;
mod descriptor;
mod node;
mod single;

use crate::{
    cuda::{Stream, peers},
    device::Queue,
    dlpack::{
        Address, Device, Dtype, Kind as DtypeKind, Shape, View,
        checks::{check_contiguous, check_dtype, check_elements},
    },
    ffi::{
        error::{Result, error},
        fallible,
        lock::{Entered, Lock},
        name::Name,
    },
};

use super::{
    call::{Decoding, Destination, Received, Rows, Skip},
    cpu,
    cuda::{self, ChunkDestination},
    plan::{CodecPlan, Decode, NonFinite, Rules},
};

pub use descriptor::Descriptor;
pub use single::{decode, encode};

/// A codec with its state.
pub struct Codec {
    device: Device,
    plan: CodecPlan,
    state: Lock<State>,
}

struct State {
    backend: Backend,
    /// Addresses of the values of the current call. Calls allocate nothing: room for all segments is reserved at
    /// creation.
    values: Vec<Address>,
    /// Start addresses of the values, each with its segment, for sorting. Room is reserved likewise.
    extents: Vec<(usize, usize)>,
}

enum Backend {
    Cpu(cpu::Codec),
    Cuda(cuda::Codec),
}

/// Calls a method of the device's codec: on CUDA with a queue on the stream as the first argument.
macro_rules! on_backend {
    ($backend:expr, $stream:expr, $method:ident($($argument:expr),*)) => {
        match $backend {
            Backend::Cpu(codec) => codec.$method($($argument),*),
            Backend::Cuda(codec) => {
                codec.check_not_poisoned()?;
                let mut queue = codec.queue($stream)?;
                codec.$method(&mut queue, $($argument),*)
            }
        }
    };
}

/// Calls a method of the device's codec whose last argument is the destination of chunks.
macro_rules! to_destination {
    ($backend:expr, $stream:expr, $to:expr, $method:ident($($argument:expr),*)) => {
        match ($backend, $to) {
            (Backend::Cpu(codec), Destination::Memory(dst)) => codec.$method($($argument,)* &dst),
            (Backend::Cpu(_), Destination::Peers(_)) => {
                Err(error!(UnsupportedDevice, "codec: only GPUs have memory that other ranks reach"))
            }
            (Backend::Cuda(codec), to) => {
                codec.check_not_poisoned()?;
                let to = match to {
                    Destination::Memory(dst) => ChunkDestination::memory(&dst),
                    Destination::Peers(sending) => ChunkDestination::peers(sending),
                };
                codec.$method(&mut codec.queue($stream)?, $($argument,)* to)
            }
        }
    };
}

// This module follows the macros because it uses one of them.
mod reducers;

pub use node::NodeSums;
pub use reducers::Reducers;

impl Codec {
    pub fn new(descriptor: &Descriptor<'_>) -> Result<Self> {
        Self::of_plan(descriptor.device, descriptor.plan()?)
    }

    pub fn of_plan(device: Device, plan: CodecPlan) -> Result<Self> {
        let segments = plan.workers.len();
        let (values, extents) = (fallible::list(segments, "addresses")?, fallible::list(segments, "addresses")?);
        let backend = match Queue::of(device, Stream::LEGACY)? {
            Queue::Cpu => Backend::Cpu(cpu::Codec::new(&plan)?),
            Queue::Cuda(mut queue) => Backend::Cuda(cuda::Codec::new(&mut queue, &plan)?),
        };
        let state = Lock::new("codec", State { backend, values, extents });
        Ok(Self { device, plan, state })
    }

    fn enter(&self) -> Result<Entered<'_, State>> {
        self.state.enter()
    }

    pub fn device(&self) -> Device {
        self.device
    }

    pub fn plan(&self) -> &CodecPlan {
        &self.plan
    }

    /// Makes kernels write 1 to `word`, a uint32 of pinned memory that stays allocated, when data is corrupt. Does
    /// nothing on the CPU, whose calls return an error.
    pub fn report_to(&self, word: *mut u8) -> Result<()> {
        if let Backend::Cuda(codec) = &mut self.enter()?.backend {
            codec.report_to(word);
        }
        Ok(())
    }

    /// Checks that results can replace values while `inputs` are read.
    pub fn check_outputs<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, inputs: &[Option<View<'_>>],
    ) -> Result<()> {
        let (dtype, State { values: places, extents, .. }) = (self.plan.rules.values, &mut *self.enter()?);
        self.take_values(values, &[dtype], places, |one| {
            inputs.iter().flatten().try_for_each(|input| one.check_output(&[input]))
        })?;
        self.check_apart(places, extents, dtype)
    }

    /// Checks that the state is not poisoned and that the factors are valid.
    pub fn check_inputs(&self, factors: &[Option<View<'_>>; 2]) -> Result<()> {
        if let Backend::Cuda(codec) = &self.enter()?.backend {
            codec.check_not_poisoned()?;
        }
        self.check_factors(factors)
    }

    fn check_factors(&self, factors: &[Option<View<'_>>; 2]) -> Result<()> {
        factors.iter().flatten().try_for_each(|factor| self.check_scalar(factor, &[Dtype::F32]))
    }

    /// Checks that a tensor is a shard: float32, with the elements of the chunk that is reduced.
    pub fn check_shard(&self, shard: &View<'_>) -> Result<()> {
        self.check_floats(shard, self.plan.server_elements())
    }

    /// Checks that a shard can be written while values and factors are read.
    pub fn check_shard_output<'v>(
        &self, shard: &View<'_>, values: impl ExactSizeIterator<Item = Result<View<'v>>>,
        factors: &[Option<View<'_>>; 2],
    ) -> Result<()> {
        factors.iter().flatten().try_for_each(|factor| shard.check_output(&[factor]))?;
        let (dtype, State { values: places, .. }) = (self.plan.rules.values, &mut *self.enter()?);
        self.take_values(values, &[dtype], places, |one| shard.check_output(&[one]))
    }

    /// Returns true if the driver has failed in the middle of a call on a GPU.
    pub fn is_poisoned(&self) -> bool {
        match self.enter().as_deref() {
            Ok(State { backend: Backend::Cuda(codec), .. }) => codec.check_not_poisoned().is_err(),
            _ => false,
        }
    }

    /// Returns the address of the flag that an exchange on a GPU sets when a rank does not arrive. Received data then
    /// counts as NaN. NULL on the CPU.
    pub fn mark(&self) -> Result<*mut u8> {
        Ok(match &self.enter()?.backend {
            Backend::Cpu(_) => std::ptr::null_mut(),
            Backend::Cuda(codec) => codec.mark(),
        })
    }

    /// Loads the kernels that write chunks to other ranks' memory. Must be called before the first such call.
    pub fn load_for_peers(&self, queue: &mut Queue) -> Result<()> {
        match (&self.enter()?.backend, queue) {
            (Backend::Cuda(codec), Queue::Cuda(queue)) => codec.load_for_peers(queue),
            _ => Ok(()),
        }
    }

    /// Encodes values to a payload. `values`: one tensor for each segment, in order.
    pub fn encode<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, factors: &[Option<View<'_>>; 2],
        to: Destination<'_>, stream: Stream,
    ) -> Result<()> {
        let payload = self.check_destination(&to, self.plan.payload_bytes())?;
        let check_output = |input: &View<'_>| payload.map_or(Ok(()), |payload| payload.check_output(&[input]));
        self.check_factors(factors)?;
        factors.iter().flatten().try_for_each(check_output)?;
        let State { backend, values: places, .. } = &mut *self.enter()?;
        self.take_values(values, &[self.plan.rules.values], places, |one| check_output(one))?;
        let factors = [factors[0].as_ref(), factors[1].as_ref()];
        to_destination!(backend, stream, to, encode(&self.plan, places, factors))
    }

    /// Runs a one-shot all-reduce over peer memory, or one step of it. The caller has checked `values` with
    /// `check_outputs` and the factor with `check_inputs`.
    pub fn one_shot<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, factor: Option<&View<'_>>,
        one_shot: peers::OneShot, steps: peers::Steps, stream: Stream,
    ) -> Result<()> {
        let State { backend, values: places, .. } = &mut *self.enter()?;
        self.take_values(values, &[self.plan.rules.values], places, |_| Ok(()))?;
        match backend {
            Backend::Cpu(_) => Err(error!(UnsupportedDevice, "codec: only GPUs have memory that other ranks reach")),
            Backend::Cuda(codec) => {
                codec.one_shot(&mut codec.queue(stream)?, &self.plan, places, factor, one_shot, steps)
            }
        }
    }

    /// Returns true if `two_shot` can replace `encode`, `reduce` and `decode_reduced`, and is not slower.
    pub fn fits_one_launch(&self) -> Result<bool> {
        match &self.enter()?.backend {
            Backend::Cpu(_) => Ok(false),
            Backend::Cuda(codec) => Ok(codec.fits_one_launch(&codec.queue(Stream::LEGACY)?, &self.plan)),
        }
    }

    /// Runs a two-shot all-reduce over peer memory. `chunks`: memory of the chunks of payloads that this rank receives.
    /// `reduced`: memory of the reduced chunks. The caller has checked `values` with `check_outputs` and the factors
    /// with `check_inputs`.
    pub fn two_shot<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, factors: &[Option<View<'_>>; 2],
        (to_each, chunks): (peers::PeerSlot, &View<'_>), (to_all, reduced): (peers::PeerSlot, &View<'_>),
        stream: Stream,
    ) -> Result<()> {
        let State { backend, values: places, .. } = &mut *self.enter()?;
        self.take_values(values, &[self.plan.rules.values], places, |_| Ok(()))?;
        let factors = [factors[0].as_ref(), factors[1].as_ref()];
        let received = Received::of(chunks, self.plan.stride());
        match backend {
            Backend::Cpu(_) => Err(error!(UnsupportedDevice, "codec: only GPUs have memory that other ranks reach")),
            Backend::Cuda(codec) => {
                let (queue, received) = (&mut codec.queue(stream)?, (to_each, received));
                codec.two_shot(queue, &self.plan, places, factors, received, (to_all, reduced))
            }
        }
    }

    /// Decodes a payload. `values`: one tensor for each segment, in order.
    pub fn decode<'v>(
        &self, payload: &View<'_>, divisor: i32, factor: Option<&View<'_>>, mode: Decode,
        values: impl ExactSizeIterator<Item = Result<View<'v>>>, stream: Stream,
    ) -> Result<()> {
        let by = Decoding { dtype: Dtype::F32, divisor, factor, add: mode == Decode::Add, behind_ours: false };
        self.decode_by(payload, by, values, stream)
    }

    /// Decodes reduced chunks to values. `behind_ours`: true if the previous launch on the stream is one of ours.
    pub fn decode_reduced<'v>(
        &self, payload: &View<'_>, behind_ours: bool, values: impl ExactSizeIterator<Item = Result<View<'v>>>,
        stream: Stream,
    ) -> Result<()> {
        let by = Decoding { dtype: Dtype::F32, divisor: 1, factor: None, add: false, behind_ours };
        self.decode_by(payload, by, values, stream)
    }

    /// Decodes a payload. `by`: parameters, except the dtype, which is that of the values.
    fn decode_by<'v>(
        &self, payload: &View<'_>, by: Decoding<'_>, values: impl ExactSizeIterator<Item = Result<View<'v>>>,
        stream: Stream,
    ) -> Result<()> {
        let Decoding { divisor, factor, add, .. } = by;
        self.check_payload(payload)?;
        if divisor < 0 {
            return Err(error!(InvalidArgument, "divisor: {divisor} is negative"));
        }
        if let Some(factor) = factor {
            self.check_scalar(factor, &[Dtype::F32])?;
        }
        let known: &[Dtype] = if add { &[Dtype::F32] } else { &[Dtype::F32, Dtype::F16, Dtype::BF16] };
        let State { backend, values: places, extents } = &mut *self.enter()?;
        let mut dtype = None;
        self.take_values(values, known, places, |one| {
            let of_first = *dtype.get_or_insert(one.dtype());
            if one.dtype() != of_first {
                return Err(error!(
                    UnsupportedDtype,
                    "{} is {}, {} is {of_first}: one dtype for all expected",
                    one.name(),
                    one.dtype(),
                    Name::of_item("values", 0)
                ));
            }
            one.check_output(&[payload])?;
            factor.map_or(Ok(()), |factor| one.check_output(&[factor]))
        })?;
        let dtype = dtype.unwrap_or(Dtype::F32); // without segments the dtype does not matter
        self.check_apart(places, extents, dtype)?;
        let by = Decoding { dtype, divisor: divisor.max(1), ..by };
        on_backend!(backend, stream, decode(&self.plan, payload, &by, places))
    }

    pub fn reduce(&self, chunk: usize, chunks: &View<'_>, to: Destination<'_>, stream: Stream) -> Result<()> {
        self.check_chunks(chunk, chunks)?;
        self.check_destination(&to, self.plan.stride())?.map_or(Ok(()), |dst| dst.check_output(&[chunks]))?;
        let received = Received::of(chunks, self.plan.stride());
        to_destination!(&mut self.enter()?.backend, stream, to, reduce(&self.plan, received))
    }

    /// Writes the mean or sum to a shard: the first half of `reduce`, without the error. `room`: memory for a chunk.
    pub fn mean(
        &self, chunk: usize, chunks: &View<'_>, room: &View<'_>, shard: &View<'_>, stream: Stream,
    ) -> Result<()> {
        self.check_chunks(chunk, chunks)?;
        self.check_bytes(room, self.plan.stride())?;
        self.check_shard(shard)?;
        let State { backend, values: places, .. } = &mut *self.enter()?;
        self.take_shard(shard, places);
        on_backend!(backend, stream, mean(&self.plan, chunks, room, places))
    }

    /// Encodes any shard plus the error: the second half of `reduce`.
    pub fn encode_shard(&self, shard: &View<'_>, to: Destination<'_>, stream: Stream) -> Result<()> {
        self.check_shard(shard)?;
        self.check_destination(&to, self.plan.stride())?;
        let State { backend, values: places, .. } = &mut *self.enter()?;
        self.take_shard(shard, places);
        to_destination!(backend, stream, to, encode_shard(&self.plan, places))
    }

    /// Checks a destination. Returns its view if it is memory of this rank.
    fn check_destination<'a, 'b>(&self, to: &'a Destination<'b>, bytes: i64) -> Result<Option<&'a View<'b>>> {
        match to {
            Destination::Memory(dst) => self.check_bytes(dst, bytes).map(|()| Some(dst)),
            Destination::Peers(_) => Ok(None),
        }
    }

    /// Checks that `chunks` is one chunk of each of several payloads, and that this codec reduces chunk `chunk`.
    fn check_chunks(&self, chunk: usize, chunks: &View<'_>) -> Result<()> {
        match self.plan.server {
            Some(own) if own == chunk => {}
            Some(own) => return Err(error!(InvalidArgument, "chunk: {chunk}; this codec reduces chunk {own}")),
            None => return Err(error!(InvalidArgument, "chunk: {chunk}; this codec was made to reduce none")),
        }
        let stride = self.plan.stride();
        match *chunks.shape() {
            [0, _] => return Err(error!(InvalidArgument, "{}: at least 1 payload expected, got 0", chunks.name())),
            [_, bytes] if bytes == stride => {}
            _ => {
                return Err(error!(
                    ShapeMismatch,
                    "{}: shape [W, {stride}] expected, a chunk of each of W payloads, got {}",
                    chunks.name(),
                    Shape::of(chunks.shape())
                ));
            }
        }
        self.check_memory(chunks)
    }

    pub fn flags(&self, dst: &View<'_>, stream: Stream) -> Result<()> {
        self.check_result(dst, Dtype { kind: DtypeKind::Uint, size: 4 }, 1)?;
        on_backend!(&mut self.enter()?.backend, stream, take_flags(dst))
    }

    pub fn scales(&self, dst: &View<'_>, stream: Stream) -> Result<()> {
        if self.plan.layout.format.segment_scale_bytes == 0 {
            let kind = self.plan.rules.kind.name();
            return Err(error!(InvalidArgument, "codec: {kind} has scales of blocks, and none of segments"));
        }
        self.check_result(dst, Dtype::F32, self.plan.workers.len() as i64)?;
        on_backend!(&mut self.enter()?.backend, stream, scales(&self.plan, dst))
    }

    pub fn commit(&self, skip: Option<&View<'_>>, stream: Stream) -> Result<()> {
        if let Some(skip) = skip {
            self.check_scalar(skip, &[Dtype::BOOL, Dtype { kind: DtypeKind::Int, size: 4 }, Dtype::F32])?;
        }
        self.end_step(skip.map_or(Skip::Never, Skip::If), stream)
    }

    pub fn rollback(&self, stream: Stream) -> Result<()> {
        self.end_step(Skip::Always, stream)
    }

    fn end_step(&self, skip: Skip<'_>, stream: Stream) -> Result<()> {
        if self.plan.rules.policy != NonFinite::Transactional {
            return Err(error!(InvalidArgument, "codec: not made with GC_NONFINITE_TRANSACTIONAL: no step is pending"));
        }
        on_backend!(&mut self.enter()?.backend, stream, commit(skip))
    }

    pub fn reset(&self, stream: Stream) -> Result<()> {
        match &mut self.enter()?.backend {
            Backend::Cpu(codec) => codec.reset(&self.plan),
            Backend::Cuda(codec) => codec.reset(&mut codec.queue(stream)?, &self.plan), // also on a poisoned state
        }
    }

    pub fn state_out(&self, dst: &View<'_>, stream: Stream) -> Result<()> {
        self.check_bytes(dst, self.plan.state_bytes)?;
        self.check_not_pending()?;
        on_backend!(&mut self.enter()?.backend, stream, state_out(&self.plan, dst))
    }

    pub fn state_in(&self, src: &View<'_>, stream: Stream) -> Result<()> {
        self.check_bytes(src, self.plan.state_bytes)?;
        self.check_not_pending()?;
        on_backend!(&mut self.enter()?.backend, stream, state_in(&self.plan, src))
    }

    pub fn errors_out(&self, worker: Option<&View<'_>>, server: Option<&View<'_>>, stream: Stream) -> Result<()> {
        self.check_errors(worker, server)?;
        if let (Some(worker), Some(server)) = (worker, server) {
            server.check_output(&[worker])?;
        }
        self.check_not_pending()?;
        on_backend!(&mut self.enter()?.backend, stream, errors_out(&self.plan, worker, server))
    }

    pub fn errors_in(&self, worker: Option<&View<'_>>, server: Option<&View<'_>>, stream: Stream) -> Result<()> {
        self.check_errors(worker, server)?;
        if self.plan.rules.error.is_none() {
            return Err(error!(InvalidArgument, "codec: it keeps no errors"));
        }
        self.check_not_pending()?;
        on_backend!(&mut self.enter()?.backend, stream, errors_in(&self.plan, worker, server))
    }

    /// Loads the errors of an earlier world. `workers`: a row of each of its ranks. `rows`: maps the number of rows to
    /// the rows that this rank loads. `server`: all elements, of which this codec loads its chunk's parts.
    pub fn errors_of_world_in(
        &self, workers: Option<&View<'_>>, server: Option<&View<'_>>, rows: impl FnOnce(&Rules, usize) -> Rows,
        stream: Stream,
    ) -> Result<()> {
        let plan = &self.plan;
        if plan.rules.error.is_none() {
            return Err(error!(InvalidArgument, "handle: it keeps no errors"));
        }
        for errors in [workers, server].into_iter().flatten() {
            check_dtype(errors, &[Dtype::F32])?;
            check_contiguous(errors)?;
            self.check_device(errors)?;
        }
        if let Some(server) = server {
            check_elements(server, plan.row_elements)?;
        }
        let rows = match workers.map(View::shape) {
            None => Rows::ONE,
            Some(&[count, elements]) if count > 0 && elements == plan.row_elements => rows(&plan.rules, count as usize),
            Some(shape) => {
                return Err(error!(
                    ShapeMismatch,
                    "workers: shape [W, {}] expected, a row of each rank, got {}",
                    plan.row_elements,
                    Shape::of(shape)
                ));
            }
        };
        self.check_not_pending()?;
        on_backend!(&mut self.enter()?.backend, stream, errors_of_world_in(plan, workers, &rows, server))
    }

    /// Checks that no step is pending.
    fn check_not_pending(&self) -> Result<()> {
        let pending = match &self.enter()?.backend {
            Backend::Cpu(codec) => codec.is_pending(),
            Backend::Cuda(codec) => codec.is_pending(),
        };
        if pending {
            return Err(error!(
                InvalidArgument,
                "codec: a step is pending: gc_codec_commit or gc_codec_rollback first"
            ));
        }
        Ok(())
    }
}
