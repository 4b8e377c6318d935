//! The all-reduce handle. Its codec keeps the errors.

use std::sync::Arc;

use crate::{
    codec::{
        call::{Destination, Rows},
        ops::{Codec, Descriptor, Reducers},
        plan::{Kind, Over, Reduction, Rules, nodes::NodePlan},
    },
    cuda::Stream,
    device::Queue,
    dlpack::{Dtype, View},
    ffi::{
        error::{Error, Result, Status, error},
        lock::{Entered, Lock},
    },
};

use super::{
    buffers::{Buffers, LeakIfHanging},
    communicator::Communicator,
    link::{Link, Report},
    node::{Node, is_in_step},
    record::{Record, Records, Subject},
    transport::{Fused, Pattern, Phases, buffer_bytes, least_buffer_bytes, ranks_of},
};

pub struct AllReduce {
    communicator: Arc<Communicator>,
    shard_elements: i64,
    traffic: Traffic,
    parts: LeakIfHanging<Lock<Parts>>,
}

pub struct Parts {
    /// Codec of all elements; over nodes, of the part that the ranks with this rank's number on their nodes exchange.
    pub codec: Codec,
    /// Work within the node before and after that exchange; None for a flat communicator.
    node: Option<Node>,
    buffers: Buffers,
    algorithm: Algorithm,
    /// True if two-shot is one launch. False for ranks that share a GPU, since their barriers take two launches.
    one_launch: bool,
    /// Word that launches of `codec` write to. Declared after `codec`, whose drop waits for these launches.
    _report: Option<Report>,
}

/// Numbers of bytes and exchanges of a run.
#[derive(Clone, Copy)]
pub struct Traffic {
    /// Bytes that this rank sends to other ranks.
    pub sent: i64,
    /// Bytes of `sent` that leave the node; None for a communicator without nodes.
    pub between_nodes: Option<i64>,
    /// Number of exchanges: 1 for one-shot, 2 for two-shot.
    pub exchanges: i32,
}

/// Elements whose error a rank keeps.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Elements that the rank encodes. It keeps their worker error.
    Worker = 0,
    /// Elements that the rank reduces. It keeps their server error.
    Shard = 1,
}

/// All-reduce algorithm of a run.
enum Algorithm {
    /// Two-shot: encode, all_to_all of chunks, reduce, all_gather of reduced chunks, decode.
    TwoShotSteps,
    /// Two-shot in one launch. It has the chunks and signals of `TwoShotSteps`, so other ranks may run either.
    TwoShotKernel,
    /// One-shot: encode, all_gather of whole payloads, reduce all chunks on every rank, decode.
    OneShotSteps(Reducers),
    /// One-shot in one launch, or in two launches where ranks share a GPU.
    OneShotKernel,
}

impl Algorithm {
    fn new(codec: &Codec, buffers: &Buffers, one_launch: bool) -> Result<Self> {
        match (buffers.supports_one_shot(), buffers.fused_launches()) {
            (true, Some(_)) => Ok(Self::OneShotKernel),
            (true, None) => Ok(Self::OneShotSteps(Reducers::of(codec)?)),
            (false, _) => Ok(Self::two_shot(one_launch)),
        }
    }

    fn two_shot(one_launch: bool) -> Self {
        if one_launch { Self::TwoShotKernel } else { Self::TwoShotSteps }
    }

    fn is_one_shot(&self) -> bool {
        matches!(self, Self::OneShotSteps(_) | Self::OneShotKernel)
    }
}

impl AllReduce {
    /// Creates an all-reduce. Every rank must call this, also with an error as `descriptor`, because the others wait.
    pub fn new(communicator: Arc<Communicator>, descriptor: Result<Descriptor<'_>>) -> Result<Self> {
        let call = communicator.enter()?;
        let parts = descriptor.and_then(|descriptor| Parts::new(&communicator, descriptor));
        let record = record_of(&parts);
        // If the exchange of records may hang, dropping `made` keeps its memory.
        let made = parts.map(|parts| Self {
            communicator: communicator.clone(),
            shard_elements: parts.codec.plan().server_elements(),
            traffic: parts.traffic(&communicator),
            parts: LeakIfHanging::new(Lock::new("handle", parts)),
        });
        let records = communicator.all_gather_records(Subject::AllReduce, record)?;
        let mut made = made?;
        compare(&records, communicator.rank())?;
        if !records.iter().all(|record| supports_one_shot(&record)) {
            let mut parts = made.enter()?;
            // For example, the peer memory of some nodes has no room for one-shot.
            parts.algorithm = Algorithm::two_shot(parts.one_launch);
            let traffic = parts.traffic(&communicator);
            drop(parts);
            made.traffic = traffic;
        }
        drop(call);
        Ok(made)
    }

    /// Returns the bytes of each rank's peer-memory buffer for an all-reduce with `descriptor`. `world`: the number of
    /// ranks; with several `nodes`, of each node.
    pub fn peers_bytes(descriptor: &Descriptor<'_>, world: i32, nodes: i32) -> Result<i64> {
        let ranks = ranks_of(world)?;
        let nodes = match usize::try_from(nodes) {
            Ok(nodes @ 1..) => nodes,
            _ => return Err(error!(InvalidArgument, "nodes: {nodes}; at least 1 expected")),
        };
        check_results(descriptor)?;
        let block = if nodes == 1 || ranks == 1 {
            let plan = Descriptor { n_chunks: ranks * nodes, server: 0, ..*descriptor }.plan()?;
            if plan.is_one_shot(Over::PeerMemory) { plan.payload_bytes() } else { plan.stride() }
        } else {
            let whole = descriptor.plan_of_node(ranks)?;
            NodePlan::new(&whole, nodes, 0)?.largest_block()
        };
        let bytes = buffer_bytes(ranks, block).ok_or_else(|| {
            error!(SizeOverflow, "options: blocks of {block} bytes want buffers of more than 2^63 - 1 bytes")
        })?;
        Ok(bytes.max(least_buffer_bytes(ranks)))
    }

    /// Returns the number of elements that this rank reduces.
    pub fn shard_elements(&self) -> i64 {
        self.shard_elements
    }

    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Calls `give` for each piece of a rank's `part`, in order: with segment, first element and count.
    pub fn for_each_piece(&self, rank: usize, part: Part, mut give: impl FnMut(usize, i64, i64)) -> Result<()> {
        let parts = self.enter()?;
        let (plan, chunk) = match &parts.node {
            None => (parts.codec.plan(), rank),
            Some(node) => (&node.parts()[rank % node.parts().len()], rank / node.parts().len()),
        };
        for run in &plan.workers {
            let piece = match part {
                Part::Worker => Some(*run).filter(|run| run.elements > 0),
                Part::Shard => plan.part(run.segment, chunk),
            };
            if let Some(piece) = piece {
                let of_segment = parts.node.as_ref().map_or(0, |node| run.row - node.row(run.segment));
                give(piece.segment, of_segment + piece.first, piece.elements);
            }
        }
        Ok(())
    }

    pub fn world(&self) -> usize {
        self.communicator.world()
    }

    /// Locks the handle for a call on its codec or for an exchange.
    pub fn enter(&self) -> Result<Entered<'_, Parts>> {
        self.parts.enter()
    }

    /// Replaces the values by their mean over the ranks, with error feedback.
    pub fn run<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone, factors: &[Option<View<'_>>; 2],
        stream: Stream,
    ) -> Result<()> {
        let parts = self.enter()?;
        let _call = self.communicator.enter()?;
        // Before anything is changed, check everything that decoding would refuse.
        parts.whole().check_outputs(values.clone(), factors)?;
        parts.codec.check_inputs(factors)?;
        let steps = Steps::begin(&self.communicator, &parts, Phases::Both, stream)?;
        let Some(node) = &parts.node else { return steps.run(&parts.algorithm, values, factors) };
        self.in_node(node, Phases::Both, stream, || {
            node.sum(values.clone(), factors[0].as_ref(), &parts.codec, stream)?;
            let reduced = steps.reduce_all(&parts.algorithm, node.summed(), &[None, factors[1]])?;
            steps.end(node.decode(&reduced, values.clone(), &parts.codec, stream))
        })
    }

    /// Runs the first half of `run`: writes the mean of the elements that this rank reduces, without the server error.
    pub fn reduce_scatter<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone, factors: &[Option<View<'_>>; 2],
        shard: &View<'_>, stream: Stream,
    ) -> Result<()> {
        let parts = self.enter()?;
        let _call = self.communicator.enter()?;
        // Before anything is changed, check everything that would be refused after encoding.
        parts.codec.check_shard(shard)?;
        parts.whole().check_shard_output(shard, values.clone(), factors)?;
        parts.codec.check_inputs(factors)?;
        let steps = Steps::begin(&self.communicator, &parts, Phases::AllToAll, stream)?;
        let Some(node) = &parts.node else { return steps.reduce_scatter(values, factors, shard) };
        self.in_node(node, Phases::AllToAll, stream, || {
            node.sum(values.clone(), factors[0].as_ref(), &parts.codec, stream)?;
            steps.reduce_scatter(node.summed(), &[None, factors[1]], shard)
        })
    }

    /// Runs the second half of `run`, with any values in `shard`.
    pub fn all_gather<'v>(
        &self, shard: &View<'_>, values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone, stream: Stream,
    ) -> Result<()> {
        let parts = self.enter()?;
        let _call = self.communicator.enter()?;
        parts.codec.check_shard(shard)?;
        parts.whole().check_outputs(values.clone(), &[Some(*shard)])?;
        let steps = Steps::begin(&self.communicator, &parts, Phases::AllGather, stream)?;
        let gather = || {
            steps.encode_shard(shard)?;
            steps.exchange(Pattern::AllGather).map(|()| steps.buffers.gathered())
        };
        let Some(node) = &parts.node else {
            let gathered = gather()?;
            return steps.end(steps.decode(&gathered, values));
        };
        self.in_node(node, Phases::AllGather, stream, || {
            let gathered = gather()?;
            steps.end(node.decode(&gathered, values.clone(), &parts.codec, stream))
        })
    }

    /// Runs `work` in a call within the node; the call between nodes has already begun. After a failure, aborts both
    /// links: ranks of the two levels may then wait in different exchanges.
    fn in_node(&self, node: &Node, phases: Phases, stream: Stream, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let outcome = node.begin(phases, stream).and_then(|()| work());
        let ended = match &outcome {
            Err(failure) if !is_in_step(failure) => Ok(()),
            _ => node.end(phases, stream),
        };
        let outcome = outcome.and(ended);
        if outcome.as_ref().is_err_and(|failure| !is_in_step(failure)) {
            // Ignore an error of abort(): the caller gets the first failure.
            let _ = self.communicator.abort();
        }
        outcome
    }

    /// Loads errors of another world. `workers`: a row of each of its ranks. `server`: the errors of all elements.
    pub fn errors_in(&self, workers: Option<&View<'_>>, server: Option<&View<'_>>, stream: Stream) -> Result<()> {
        let (rank, world) = (self.communicator.rank(), self.communicator.world());
        let parts = self.enter()?;
        let ranks = parts.node.as_ref().map(|node| node.parts().len());
        let rows = |rules: &Rules, count: usize| rows_of(rules, count, rank, world, ranks);
        parts.codec.errors_of_world_in(workers, server, rows, stream)
    }
}

/// Returns how `count` rows of saved errors become those of a rank. `ranks`: per node, if the world has nodes.
fn rows_of(rules: &Rules, count: usize, rank: usize, world: usize, ranks: Option<usize>) -> Rows {
    let sums = rules.reduction == Reduction::Sum;
    let divisor = if sums { 1.0 } else { count as f32 };
    let all = Rows { count, start: 0.0, divisor, ..Rows::ONE };
    match ranks {
        None if count == world => Rows { first: rank, ..Rows::ONE },
        None if sums => Rows { divisor_of_sum: world as f32, ..all },
        None => all,
        Some(_) if count == 1 => Rows::ONE,
        Some(ranks) if count == world => Rows { first: rank / ranks * ranks, count: ranks, ..Rows::ONE },
        Some(ranks) if sums => Rows { divisor_of_sum: (world / ranks) as f32, ..all },
        Some(ranks) => Rows { factor: ranks as f32, ..all },
    }
}

impl Drop for AllReduce {
    fn drop(&mut self) {
        self.parts.leak_if(self.communicator.may_hang());
    }
}

impl Parts {
    fn new(communicator: &Communicator, descriptor: Descriptor<'_>) -> Result<Self> {
        let world = communicator.world();
        if descriptor.n_chunks != 0 && descriptor.n_chunks != world {
            return Err(error!(
                InvalidArgument,
                "options: n_chunks {}; 0 or the world size, {world}, expected", descriptor.n_chunks
            ));
        }
        if descriptor.server != 0 {
            return Err(error!(
                InvalidArgument,
                "options: server {}; 0 expected, for each rank reduces its own chunk", descriptor.server
            ));
        }
        check_results(&descriptor)?;
        let link = communicator.of_chunks();
        let (codec, within) = match communicator.within_node() {
            None => (Codec::new(&Descriptor { n_chunks: world, server: link.rank as u64 + 1, ..descriptor })?, None),
            Some(intra) => {
                let (device, error) = (descriptor.device, descriptor.plan()?.rules.error);
                let whole = descriptor.plan_of_node(intra.world)?;
                let part = whole.part_between_nodes(intra.rank, link.world, Some(link.rank), error)?;
                (Codec::of_plan(device, part)?, Some((intra, whole)))
            }
        };
        let buffers = Buffers::new(link, &codec)?;
        let report = link.report_corrupt(&codec, buffers.memory())?;
        // The decoders of the node also write to the codec's report.
        let node = within.map(|(intra, whole)| Node::new(intra.clone(), whole, link.world, &codec)).transpose()?;
        let one_launch = node.is_none() && buffers.fused_launches() == Some(1) && codec.fits_one_launch()?;
        let algorithm = Algorithm::new(&codec, &buffers, one_launch)?;
        Ok(Self { codec, node, buffers, algorithm, one_launch, _report: report })
    }

    /// Returns the codec of all elements.
    fn whole(&self) -> &Codec {
        self.node.as_ref().map_or(&self.codec, Node::whole)
    }

    fn traffic(&self, communicator: &Communicator) -> Traffic {
        let plan = self.codec.plan();
        let (payload, chunk) = (plan.payload_bytes(), plan.stride());
        let exchanges: &[_] = if self.algorithm.is_one_shot() { &[payload] } else { &[chunk; 2] };
        let of_chunks = (communicator.of_chunks().world as i64 - 1) * exchanges.iter().sum::<i64>();
        let (within, between_nodes) = match &self.node {
            None => (0, None),
            Some(node) => ((node.parts().len() as i64 - 1) * node.sent().iter().sum::<i64>(), Some(of_chunks)),
        };
        Traffic { sent: within + of_chunks, between_nodes, exchanges: exchanges.len() as i32 }
    }
}

/// State of one call, from its first launch to its last.
struct Steps<'a> {
    link: &'a Link,
    fused: Option<&'a dyn Fused>,
    codec: &'a Codec,
    buffers: &'a Buffers,
    phases: Phases,
    stream: Stream,
}

impl<'a> Steps<'a> {
    fn begin(communicator: &'a Communicator, parts: &'a Parts, phases: Phases, stream: Stream) -> Result<Self> {
        let (link, Parts { codec, buffers, .. }) = (communicator.of_chunks(), parts);
        if let Some(node) = communicator.within_node() {
            node.check_capture(&mut buffers.memory().queue(stream)?)?; // must precede `link.begin`
        }
        link.begin(&mut buffers.memory().queue(stream)?, phases)?;
        Ok(Self { link, fused: link.fused(), codec, buffers, phases, stream })
    }

    /// Ends a call. `outcome`: the result of the work after its exchanges.
    fn end(&self, outcome: Result<()>) -> Result<()> {
        self.link.end(outcome, self.buffers.memory().queue(self.stream), self.phases)
    }

    /// Runs a whole all-reduce.
    fn run<'v>(
        &self, algorithm: &Algorithm, values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone,
        factors: &[Option<View<'_>>; 2],
    ) -> Result<()> {
        match algorithm {
            Algorithm::OneShotKernel => {
                self.fused_one_shot(values, factors[0].as_ref())?;
                self.end(Ok(()))
            }
            Algorithm::TwoShotKernel => {
                self.fused_two_shot(values, factors)?;
                self.end(Ok(()))
            }
            Algorithm::OneShotSteps(_) | Algorithm::TwoShotSteps => {
                let reduced = self.reduce_all(algorithm, values.clone(), factors)?;
                self.end(self.decode(&reduced, values))
            }
        }
    }

    /// Runs an all-reduce up to decoding. Returns the reduced chunks of all ranks.
    fn reduce_all<'v>(
        &self, algorithm: &Algorithm, values: impl ExactSizeIterator<Item = Result<View<'v>>>,
        factors: &[Option<View<'_>>; 2],
    ) -> Result<View<'a>> {
        if let Algorithm::OneShotSteps(reducers) = algorithm {
            let payloads = self.encode_for_all(values, factors)?;
            let reduced = self.buffers.payload(); // overwrites this rank's payload
            if let Err(failure) = reducers.reduce(&payloads, &reduced, self.stream) {
                self.end(Err(failure))?;
            }
            return Ok(reduced);
        }
        self.encode(values, factors)?;
        self.exchange(Pattern::AllToAll)?;
        self.reduce()?;
        self.exchange(Pattern::AllGather)?;
        Ok(self.buffers.gathered())
    }

    fn reduce_scatter<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, factors: &[Option<View<'_>>; 2],
        shard: &View<'_>,
    ) -> Result<()> {
        self.encode(values, factors)?;
        self.exchange(Pattern::AllToAll)?;
        self.mean(shard)?;
        self.end(Ok(()))
    }

    /// Returns where the codec writes the chunks to send: this rank's buffers, or the receive slots of the other ranks.
    fn destination(&self, pattern: Pattern) -> Destination<'a> {
        match (self.fused, pattern) {
            (Some(fused), _) => Destination::Peers(fused.sending(pattern, self.buffers.stride())),
            (None, Pattern::AllToAll) => Destination::Memory(self.buffers.payload()),
            (None, Pattern::AllGather) => Destination::Memory(self.buffers.chunk()),
        }
    }

    /// Encodes this rank's values.
    fn encode<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, factors: &[Option<View<'_>>; 2],
    ) -> Result<()> {
        let was_poisoned = self.codec.is_poisoned(); // if an earlier call poisoned the codec, this one sends nothing
        let encoded = self.codec.encode(values, factors, self.destination(Pattern::AllToAll), self.stream);
        if encoded.is_err() && self.fused.is_some() && !was_poisoned && self.codec.is_poisoned() {
            // The other ranks have received only some of the payload.
            self.link.transport.give_up();
        }
        encoded
    }

    /// Encodes this rank's values and sends the whole payload to every rank. Returns the payloads of all ranks.
    fn encode_for_all<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, factors: &[Option<View<'_>>; 2],
    ) -> Result<View<'a>> {
        self.codec.encode(values, factors, Destination::Memory(self.buffers.payload()), self.stream)?;
        let exchanged = self
            .buffers
            .of_payloads(self.stream)
            .and_then(|(exchange, payloads)| self.link.exchange(&exchange, self.buffers.staging()).map(|_| payloads));
        self.link.or_unblock_peers(exchanged)
    }

    /// Sends the encoded chunks, or the reduced chunk, to the other ranks.
    fn exchange(&self, pattern: Pattern) -> Result<()> {
        let Self { link, buffers, stream, .. } = *self;
        let exchanged = buffers.memory().queue(stream).and_then(|mut queue| match (self.fused, &mut queue) {
            (Some(fused), Queue::Cuda(queue)) => fused.complete_barrier(queue, buffers.error_flag()),
            _ if link.world == 1 => Ok(()),
            _ => link.exchange(&buffers.of_chunks(pattern, stream), buffers.staging()).map(|_| ()),
        });
        link.or_unblock_peers(exchanged)
    }

    /// Reduces this rank's chunk. A corrupt one is sent with a flag: the other ranks reject it without blocking.
    fn reduce(&self) -> Result<()> {
        let to = self.destination(Pattern::AllGather);
        let reduced = match self.codec.reduce(self.link.rank, &self.buffers.payloads(), to, self.stream) {
            Err(Error { status: Status::Corrupt, .. }) => Ok(()), // decoding reports it
            outcome => outcome,
        };
        self.link.or_unblock_peers(reduced)
    }

    /// Writes the mean of this rank's chunk, without the server error. A reduce-scatter runs this in place of `reduce`.
    fn mean(&self, shard: &View<'_>) -> Result<()> {
        let Self { codec, buffers, link, .. } = *self;
        match codec.mean(link.rank, &buffers.payloads(), &buffers.chunk(), shard, self.stream) {
            // The other ranks have received what they wait for, and this rank can continue, too.
            outcome @ (Ok(()) | Err(Error { status: Status::Corrupt, .. })) => link.note(outcome),
            outcome => link.or_unblock_peers(outcome),
        }
    }

    /// Encodes this rank's shard.
    fn encode_shard(&self, shard: &View<'_>) -> Result<()> {
        let encoded = self.codec.encode_shard(shard, self.destination(Pattern::AllGather), self.stream);
        self.link.or_unblock_peers(encoded)
    }

    /// Decodes the reduced chunks into the values.
    fn decode<'v>(&self, reduced: &View<'_>, values: impl ExactSizeIterator<Item = Result<View<'v>>>) -> Result<()> {
        self.codec.decode_reduced(reduced, self.fused.is_some(), values, self.stream)
    }

    /// Runs one-shot in fused launches.
    fn fused_one_shot<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone, factor: Option<&View<'_>>,
    ) -> Result<()> {
        let Self { codec, link, stream, .. } = *self;
        let kernel = self.fused.and_then(|fused| Some((fused, fused.one_shot(codec.plan().payload_bytes())?)));
        let (fused, one_shot) = kernel.ok_or_else(|| error!(Panic, "handle: no room for whole payloads"))?;
        let mut steps = fused.one_shot_launches().iter();
        if let Some(&first) = steps.next() {
            codec.one_shot(values.clone(), factor, one_shot, first, stream)?;
        }
        for &step in steps {
            // The other ranks have this rank's payload and signal. If this step fails, this rank is one barrier behind.
            let launched =
                fused.wait_for_launches().and_then(|()| codec.one_shot(values.clone(), factor, one_shot, step, stream));
            link.or_unblock_peers(launched)?;
        }
        Ok(())
    }

    /// Runs two-shot in one launch.
    fn fused_two_shot<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, factors: &[Option<View<'_>>; 2],
    ) -> Result<()> {
        let fused = self.fused.ok_or_else(|| error!(Panic, "handle: no exchanges within launches"))?;
        let [to_each, to_all] =
            [Pattern::AllToAll, Pattern::AllGather].map(|pattern| fused.sending(pattern, self.buffers.stride()).slot);
        let (received, gathered) = (self.buffers.payloads(), self.buffers.gathered());
        self.codec.two_shot(values, factors, (to_each, &received), (to_all, &gathered), self.stream)
    }
}

fn check_results(descriptor: &Descriptor<'_>) -> Result<()> {
    if descriptor.results == descriptor.values {
        return Ok(());
    }
    Err(error!(
        InvalidArgument,
        "options: results {}; {} expected, for the values are replaced", descriptor.results, descriptor.values
    ))
}

/// Returns the record of a rank's handle: a field for each option that must be the same on all ranks.
fn record_of(parts: &Result<Parts>) -> Record {
    let mut record = Record::new(Subject::AllReduce, parts.is_err());
    let Ok(parts @ Parts { codec, algorithm, .. }) = parts else { return record };
    let (plan, rules) = (parts.whole().plan(), &codec.plan().rules);
    let error = rules.error.map_or(0, number_of);
    let (scale, policy, reduction) = (rules.scale as u8, rules.policy as u8, rules.reduction as u8);
    let numbers = [
        rules.kind as u8,
        number_of(plan.rules.values),
        error,
        scale,
        policy,
        reduction,
        algorithm.is_one_shot().into(),
    ];
    let words = [
        plan.elements as u64,
        plan.workers.len() as u64,
        numbers.iter().rev().fold(0, |word, &number| word << 8 | u64::from(number)),
        rules.beta.to_bits().into(),
        plan.digest(),
        plan.digest_of_all(),
    ];
    (0..).zip(words).for_each(|(index, word)| record.set_word(index, word));
    record
}

/// Returns true if the rank can use one-shot. The byte after the compared bytes of the third word is then 1.
fn supports_one_shot(record: &Record) -> bool {
    record.word(2) >> (8 * OPTIONS.len()) & 0xff == 1
}

fn number_of(dtype: Dtype) -> u8 {
    match dtype {
        Dtype::F32 => 1,
        Dtype::F16 => 2,
        _ => 3,
    }
}

/// Names of the codecs, by number. Number 0 is unused.
const CODECS: [&str; 1 + Kind::ALL.len()] = {
    let (mut names, mut index) = ([""; 1 + Kind::ALL.len()], 0);
    while index < Kind::ALL.len() {
        names[Kind::ALL[index] as usize] = Kind::ALL[index].name();
        index += 1;
    }
    names
};

/// Names of the options in the third word, one byte each, and of their values. All values are listed, because versions
/// are compared first.
const OPTIONS: [(&str, &[&str]); 6] = [
    ("codec", &CODECS),
    ("values", &["", "float32", "float16", "bfloat16"]),
    ("error", &["GC_ERROR_NONE", "GC_ERROR_FLOAT32", "", "GC_ERROR_BFLOAT16"]),
    ("scale", &["GC_SCALE_RMS", "GC_SCALE_MEAN"]),
    ("nonfinite", &["GC_NONFINITE_PROPAGATE", "GC_NONFINITE_ZERO", "GC_NONFINITE_TRANSACTIONAL"]),
    ("reduction", &["GC_REDUCTION_MEAN", "GC_REDUCTION_SUM"]),
];

/// Checks that the records of all ranks are the same. The error names the first field that differs.
fn compare(records: &Records, own: usize) -> Result<()> {
    let own = records.of(own);
    for (rank, other) in records.iter().enumerate() {
        let refusal = |difference: std::fmt::Arguments<'_>| -> Error {
            error!(InvalidArgument, "handle: rank {rank}: {difference}")
        };
        if other.failed() {
            return Err(refusal(format_args!("could not create its handle")));
        }
        for (index, what) in [(0, "elements"), (1, "segments")] {
            let (expected, got) = (own.word(index), other.word(index));
            if expected != got {
                return Err(refusal(format_args!("{expected} {what} expected, got {got}")));
            }
        }
        for (byte, (option, names)) in OPTIONS.iter().enumerate() {
            let [expected, got] = [own, other].map(|record| (record.word(2) >> (8 * byte)) as u8);
            if expected != got {
                let name = |number: u8| names.get(usize::from(number)).copied().unwrap_or("an unknown one");
                return Err(refusal(format_args!("{option} {} expected, got {}", name(expected), name(got))));
            }
        }
        let [expected, got] = [own, other].map(|record| f32::from_bits(record.word(3) as u32));
        if expected.to_bits() != got.to_bits() {
            return Err(refusal(format_args!("beta {expected} expected, got {got}")));
        }
        if own.word(4) != other.word(4) {
            return Err(refusal(format_args!("its segments have other counts of elements, or others are raw")));
        }
        if own.word(5) != other.word(5) {
            return Err(refusal(format_args!(
                "it has another version's payloads; the same version of the library expected on every rank"
            )));
        }
    }
    Ok(())
}
