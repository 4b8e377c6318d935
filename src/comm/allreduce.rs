//! The handle: an all-reduce that keeps its errors, as its codec does.

use std::sync::Arc;

use crate::{
    backend::Stream,
    error::{Error, Result, error},
    lock::{Entered, Lock},
    ops::codec::{Codec, Descriptor, Reducers},
    plan::codec::Kind,
    tensor::{Dtype, View},
};

use super::{
    buffers::{Buffers, InExchanges},
    communicator::Communicator,
    exchange::{Pattern, Phases},
    peers::{buffer_bytes, least_buffer_bytes, ranks_of},
    record::{Record, Records, Subject},
};

pub struct AllReduce {
    communicator: Arc<Communicator>,
    shard_elements: i64,
    traffic: Traffic,
    parts: InExchanges<Lock<Parts>>,
}

pub struct Parts {
    pub codec: Codec,
    buffers: Buffers,
    /// Where ranks exchange once.
    once: Option<Once>,
    /// Whether two exchanges are one launch here. Other ranks do not see which it is.
    one_launch: bool,
}

/// What a run sends.
#[derive(Clone, Copy)]
pub struct Traffic {
    /// Bytes that this rank sends to other ranks.
    pub sent: i64,
    /// How many of them leave the node; None where ranks do not know their nodes.
    pub between_nodes: Option<i64>,
    /// 1 or 2.
    pub exchanges: i32,
}

/// What a rank keeps an error of.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The elements that the rank encodes, and of which it keeps the worker's error.
    Worker = 0,
    /// The elements that the rank reduces, and of which it keeps the server's error.
    Shard = 1,
}

/// How ranks do that.
enum Once {
    /// By exchanging payloads, of which each rank reduces all chunks.
    Whole(Reducers),
    /// By one launch.
    OverPeers,
}

impl AllReduce {
    /// Every rank comes here, with a descriptor or with what went wrong before it had one, for the others wait.
    pub fn new(communicator: Arc<Communicator>, descriptor: Result<Descriptor<'_>>) -> Result<Self> {
        let call = communicator.enter()?;
        let parts = descriptor.and_then(|descriptor| Parts::new(&communicator, descriptor));
        let record = record_of(&parts);
        // From now on memory that is kept if the exchange of records may hang.
        let made = parts.map(|parts| Self {
            communicator: communicator.clone(),
            shard_elements: parts.codec.plan().server_elements(),
            traffic: parts.traffic(&communicator),
            parts: InExchanges::new(Lock::new("handle", parts)),
        });
        let records = communicator.topology.all_gather_records(Subject::AllReduce, record)?;
        let mut made = made?;
        compare(&records, communicator.topology.rank())?;
        if !records.iter().all(|record| can_exchange_once(&record)) {
            let mut parts = made.enter()?;
            parts.once = None; // the peer memory of some nodes has no room, say
            let traffic = parts.traffic(&communicator);
            drop(parts);
            made.traffic = traffic;
        }
        drop(call);
        Ok(made)
    }

    /// Bytes of each rank's buffer of peer memory for such an all-reduce.
    pub fn peers_bytes(descriptor: &Descriptor<'_>, world: i32) -> Result<i64> {
        let ranks = ranks_of(world)?;
        check_results(descriptor)?;
        let plan = Descriptor { n_chunks: ranks, server: 0, ..*descriptor }.plan()?;
        let block = if plan.exchanges_once(true) { plan.payload_bytes() } else { plan.stride() };
        let bytes = buffer_bytes(ranks, block).ok_or_else(|| {
            error!(SizeOverflow, "options: blocks of {block} bytes want buffers of more than 2^63 - 1 bytes")
        })?;
        Ok(bytes.max(least_buffer_bytes(ranks)))
    }

    /// Of what this rank reduces.
    pub fn shard_elements(&self) -> i64 {
        self.shard_elements
    }

    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Gives each piece of a segment that a part of a rank has, in order: the segment, its first element, how many.
    pub fn for_each_piece(&self, rank: usize, part: Part, mut give: impl FnMut(usize, i64, i64)) -> Result<()> {
        let parts = self.enter()?;
        let plan = parts.codec.plan();
        for run in &plan.workers {
            let piece = match part {
                Part::Worker => Some(*run).filter(|run| run.elements > 0),
                Part::Shard => plan.part(run.segment, rank),
            };
            if let Some(piece) = piece {
                give(piece.segment, piece.first, piece.elements);
            }
        }
        Ok(())
    }

    pub fn world(&self) -> usize {
        self.communicator.world()
    }

    /// For a call on its codec, or one that exchanges.
    pub fn enter(&self) -> Result<Entered<'_, Parts>> {
        self.parts.enter()
    }

    /// Replaces values by the mean over the ranks of what they were, with the errors carried.
    pub fn run<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone, factors: &[Option<View<'_>>; 2],
        stream: Stream,
    ) -> Result<()> {
        let parts = self.enter()?;
        let _call = self.communicator.enter()?;
        let Parts { codec, buffers, once, one_launch } = &*parts;
        // What decoding would refuse, before anything is changed.
        codec.check_outputs(values.clone(), factors)?;
        codec.check_inputs(factors)?;
        match once {
            None => {}
            Some(Once::Whole(reducers)) => return self.run_once(codec, buffers, reducers, values, factors, stream),
            Some(Once::OverPeers) => {
                self.communicator.topology.begin(&mut buffers.memory().queue(stream)?, Phases::Once)?;
                self.communicator.exchange_once(codec, values, factors[0].as_ref(), stream)?;
                return self.communicator.end(Ok(()), buffers, Phases::Once, stream);
            }
        }
        self.communicator.topology.begin(&mut buffers.memory().queue(stream)?, Phases::Both)?;
        if *one_launch {
            self.communicator.exchange_twice(codec, buffers, values, factors, stream)?;
            return self.communicator.end(Ok(()), buffers, Phases::Both, stream);
        }
        self.communicator.encode(codec, buffers, values.clone(), factors, stream)?;
        let reduced = self.communicator.reduce(codec, buffers, stream)?;
        let decoded = self.communicator.decode(codec, &reduced, values, stream);
        self.communicator.end(decoded, buffers, Phases::Both, stream)
    }

    /// The same to the byte by one exchange.
    fn run_once<'v>(
        &self, codec: &Codec, buffers: &Buffers, reducers: &Reducers,
        values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone, factors: &[Option<View<'_>>; 2],
        stream: Stream,
    ) -> Result<()> {
        let phases = Phases::AllGather;
        self.communicator.topology.begin(&mut buffers.memory().queue(stream)?, phases)?;
        let payloads = self.communicator.encode_for_all(codec, buffers, values.clone(), factors, stream)?;
        // In place of this rank's own payload.
        let reduced = buffers.payload();
        let decoded = reducers
            .reduce(&payloads, &reduced, stream)
            .and_then(|()| self.communicator.decode(codec, &reduced, values, stream));
        self.communicator.end(decoded, buffers, phases, stream)
    }

    /// The first half of `run`: the mean of the elements that this rank reduces, before the server's error is added.
    pub fn reduce_scatter<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone, factors: &[Option<View<'_>>; 2],
        shard: &View<'_>, stream: Stream,
    ) -> Result<()> {
        let parts = self.enter()?;
        let _call = self.communicator.enter()?;
        let Parts { codec, buffers, .. } = &*parts;
        // What would be refused after the encoding, before anything is changed.
        codec.check_shard_output(shard, values.clone(), factors)?;
        self.communicator.topology.begin(&mut buffers.memory().queue(stream)?, Phases::AllToAll)?;
        self.communicator.encode(codec, buffers, values, factors, stream)?;
        self.communicator.mean(codec, buffers, shard, stream)?;
        self.communicator.end(Ok(()), buffers, Phases::AllToAll, stream)
    }

    /// The second half, of any shard.
    pub fn all_gather<'v>(
        &self, shard: &View<'_>, values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone, stream: Stream,
    ) -> Result<()> {
        let parts = self.enter()?;
        let _call = self.communicator.enter()?;
        let Parts { codec, buffers, .. } = &*parts;
        codec.check_shard(shard)?;
        codec.check_outputs(values.clone(), &[Some(*shard)])?;
        self.communicator.topology.begin(&mut buffers.memory().queue(stream)?, Phases::AllGather)?;
        let reduced = self.communicator.gather(codec, buffers, shard, stream)?;
        let decoded = self.communicator.decode(codec, &reduced, values, stream);
        self.communicator.end(decoded, buffers, Phases::AllGather, stream)
    }

    /// `workers`: a row of each rank of a world. `server`: of all elements.
    pub fn errors_in(&self, workers: Option<&View<'_>>, server: Option<&View<'_>>, stream: Stream) -> Result<()> {
        let place = (self.communicator.topology.rank(), self.communicator.topology.world());
        self.enter()?.codec.errors_of_world_in(workers, server, place, stream)
    }
}

impl Drop for AllReduce {
    fn drop(&mut self) {
        self.parts.keep_if(self.communicator.topology.may_hang());
    }
}

impl Parts {
    fn new(communicator: &Communicator, descriptor: Descriptor<'_>) -> Result<Self> {
        let world = communicator.topology.world();
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
        let codec =
            Codec::new(&Descriptor { n_chunks: world, server: communicator.topology.rank() as u64 + 1, ..descriptor })?;
        let buffers = communicator.buffers(codec.device(), &codec)?;
        let once = match buffers.can_exchange_once() {
            false => None,
            true if communicator.topology.direct().is_some() => Some(Once::OverPeers),
            true => Some(Once::Whole(Reducers::of(&codec)?)),
        };
        let one_launch = communicator.takes_one_launch(&codec)?;
        Ok(Self { codec, buffers, once, one_launch })
    }
}

impl Parts {
    fn traffic(&self, communicator: &Communicator) -> Traffic {
        let plan = self.codec.plan();
        let (payload, chunk) = (plan.payload_bytes(), plan.stride());
        let exchanges: &[_] = match self.once {
            Some(_) => &[(Pattern::AllGather, payload)],
            None => &[(Pattern::AllToAll, chunk), (Pattern::AllGather, chunk)],
        };
        let (sent, between_nodes) = communicator.topology.sent(exchanges);
        Traffic { sent, between_nodes, exchanges: exchanges.len() as i32 }
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

/// What a rank tells the others of its handle: a field for all that must be alike.
fn record_of(parts: &Result<Parts>) -> Record {
    let mut record = Record::new(Subject::AllReduce, parts.is_err());
    let Ok(Parts { codec, once, .. }) = parts else { return record };
    let plan = codec.plan();
    let rules = &plan.rules;
    let error = rules.error.map_or(0, number_of);
    let (scale, policy, reduction) = (rules.scale as u8, rules.policy as u8, rules.reduction as u8);
    let numbers = [rules.kind as u8, number_of(rules.values), error, scale, policy, reduction, once.is_some().into()];
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

/// By the byte behind those that are compared.
fn can_exchange_once(record: &Record) -> bool {
    record.word(2) >> (8 * OPTIONS.len()) & 0xff == 1
}

fn number_of(dtype: Dtype) -> u8 {
    match dtype {
        Dtype::F32 => 1,
        Dtype::F16 => 2,
        _ => 3,
    }
}

/// By their numbers, of which 0 is none's.
const CODECS: [&str; 1 + Kind::ALL.len()] = {
    let (mut names, mut index) = ([""; 1 + Kind::ALL.len()], 0);
    while index < Kind::ALL.len() {
        names[Kind::ALL[index] as usize] = Kind::ALL[index].name();
        index += 1;
    }
    names
};

/// Names of the first numbers in the third word, each of a byte. What stands here has no other: versions are compared
/// before.
const OPTIONS: [(&str, &[&str]); 6] = [
    ("codec", &CODECS),
    ("values", &["", "float32", "float16", "bfloat16"]),
    ("error", &["GC_ERROR_NONE", "GC_ERROR_FLOAT32", "", "GC_ERROR_BFLOAT16"]),
    ("scale", &["GC_SCALE_RMS", "GC_SCALE_MEAN"]),
    ("nonfinite", &["GC_NONFINITE_PROPAGATE", "GC_NONFINITE_ZERO", "GC_NONFINITE_TRANSACTIONAL"]),
    ("reduction", &["GC_REDUCTION_MEAN", "GC_REDUCTION_SUM"]),
];

/// Checks that all ranks told the same, and says in what one did not.
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
            return Err(refusal(format_args!("it computes otherwise")));
        }
    }
    Ok(())
}
