//! What ranks of a node exchange: their values, each rank's part of which is summed up by that rank, and reduced
//! chunks.
//!
//! ```text
//!     values      pack: a block for each rank     all_to_all     sum: this rank's part, float32
//!     the parts are exchanged between nodes, by the codec: N reduced chunks of each
//!     chunks      all_gather                      decode: R parts to the values
//! ```

use std::sync::Arc;

use crate::{
    codec::{
        ops::{Codec, NodeSums},
        plan::CodecPlan,
    },
    cuda::Stream,
    device::{Block, Queue},
    dlpack::{Device, Dtype, View},
    ffi::{
        error::{Error, Result, Status, error},
        fallible,
        name::Name,
    },
};

use super::{
    link::Link,
    transport::{Exchange, Pattern, Phases, Staging},
};

/// The part of an all-reduce over nodes that happens within this node.
pub struct Node {
    link: Arc<Link>,
    sums: NodeSums,
    /// The blocks that are sent, and later what is gathered; the blocks that are received; the sums; this rank's
    /// chunks.
    memory: Block,
    /// Where the last three begin.
    received: usize,
    summed: usize,
    own: usize,
    staging: Option<Staging>,
    device: Device,
    /// Of the pieces of each part.
    shapes: Vec<Vec<[i64; 1]>>,
    /// Where each segment begins in a row of all elements.
    rows: Vec<i64>,
}

impl Node {
    /// `whole`: all elements, a chunk for each rank of the node. `codec`: of this rank's part, which it exchanges
    /// between
    /// `nodes` nodes.
    pub fn new(link: Arc<Link>, whole: CodecPlan, nodes: usize, codec: &Codec) -> Result<Self> {
        let (device, ranks) = (codec.device(), link.world as i64);
        let sums = NodeSums::new(whole, nodes, link.rank, codec)?;
        let plan = sums.plan();
        let (block, gathered) = (plan.block_bytes, plan.gathered_bytes);
        let largest = plan.largest_block();
        let places = [
            ranks.checked_mul(largest),
            ranks.checked_mul(block),
            plan.own_part()
                .elements
                .checked_mul(4)
                .and_then(|bytes| bytes.checked_add(15))
                .map(|bytes| bytes / 16 * 16),
            Some(gathered),
        ];
        let mut ends = [0; 4];
        let mut end = 0i64;
        for (place, bytes) in ends.iter_mut().zip(places) {
            end = bytes.and_then(|bytes| end.checked_add(bytes)).ok_or_else(|| {
                error!(SizeOverflow, "blocks of {largest} bytes for each of {ranks} ranks are more than 2^63 - 1 bytes")
            })?;
            *place = end as usize;
        }
        let mut queue = Queue::of(device, Stream::LEGACY)?;
        let memory = Block::new(&mut queue, end)?;
        link.transport.check(device, &memory, largest)?;
        let staging = link.staging(&mut queue, largest)?;
        let (mut shapes, mut rows) = (fallible::list(plan.parts.len(), "parts")?, Vec::new());
        for part in &plan.parts {
            let mut of_part = fallible::list(part.workers.len(), "pieces")?;
            of_part.extend(part.workers.iter().map(|run| [run.elements]));
            shapes.push(of_part);
        }
        fallible::reserve(&mut rows, sums.whole().plan().workers.len(), "segments")?;
        rows.extend(sums.whole().plan().workers.iter().map(|run| run.row));
        let [received, summed, own, _] = ends;
        let node = Self { link, sums, memory, received, summed, own, staging, device, shapes, rows };
        if device == Device::Cpu {
            // The padding of a smaller part's chunks is sent as it is. Memory of a GPU begins as zeros.
            // SAFETY: the last `gathered` bytes of the memory, which is new.
            unsafe { node.at(own).write_bytes(0, gathered as usize) };
        }
        Ok(node)
    }

    /// The codec of all elements, which checks what a caller passes.
    pub fn whole(&self) -> &Codec {
        self.sums.whole()
    }

    /// The plans of all parts.
    pub fn parts(&self) -> &[CodecPlan] {
        &self.sums.plan().parts
    }

    /// Where a segment begins in a row of all elements.
    pub fn row(&self, segment: usize) -> i64 {
        self.rows[segment]
    }

    /// Bytes that a rank sends to each other rank of the node: of values, and of chunks.
    pub fn sent(&self) -> [i64; 2] {
        let plan = self.sums.plan();
        [plan.block_bytes, plan.gathered_bytes]
    }

    pub fn begin(&self, phases: Phases, stream: Stream) -> Result<()> {
        self.link.begin(&mut self.memory.queue(stream)?, phases)
    }

    pub fn end(&self, phases: Phases, stream: Stream) -> Result<()> {
        self.link.end(Ok(()), self.memory.queue(stream), phases)
    }

    /// Sums up this rank's part of the values of all ranks of the node. `codec`: of the part, whose next encode adds
    /// the flags found here to its own.
    pub fn sum<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, factor: Option<&View<'_>>, codec: &Codec,
        stream: Stream,
    ) -> Result<()> {
        let bytes = self.sums.plan().block_bytes;
        let blocks = [self.link.world as i64 * bytes];
        let (send, received) = (self.at(0), self.at(self.received));
        // SAFETY: the memory has a block for each part; the call that has entered the communicator alone uses it.
        let packed = unsafe { View::of_memory(&Name::new("blocks"), self.device, Dtype::U8, &blocks, send) };
        self.sums.pack(values, factor, &packed, stream)?;
        let received = self.exchange(Pattern::AllToAll, (send, received), bytes, codec, stream)?.cast_mut();
        // SAFETY: a block of each rank.
        let received = unsafe { View::of_memory(&Name::new("blocks"), self.device, Dtype::U8, &blocks, received) };
        let elements = [self.sums.plan().own_part().elements];
        // SAFETY: the memory has room for the sums.
        let sums =
            unsafe { View::of_memory(&Name::new("sums"), self.device, Dtype::F32, &elements, self.at(self.summed)) };
        self.sums.sum(&received, &sums, codec, stream)
    }

    /// The sums, a tensor for each segment.
    pub fn summed(&self) -> impl ExactSizeIterator<Item = Result<View<'_>>> + Clone {
        let (part, shapes) = (self.sums.plan().own_part(), &self.shapes[self.link.rank]);
        let mut at = self.at(self.summed);
        part.workers.iter().zip(shapes).map(move |(run, shape)| {
            let here = at;
            at = here.wrapping_add(run.elements as usize * size_of::<f32>());
            // SAFETY: within the memory; the call that has entered the communicator is the only one to use the views.
            Ok(unsafe { View::of_memory(&Name::new("sums"), self.device, Dtype::F32, shape, here) })
        })
    }

    /// Gathers the reduced chunks of all parts, and decodes them into the values.
    pub fn decode<'v>(
        &self, reduced: &View<'_>, values: impl ExactSizeIterator<Item = Result<View<'v>>> + Clone, codec: &Codec,
        stream: Stream,
    ) -> Result<()> {
        let own = self.at(self.own);
        let bytes = reduced.elements() as usize;
        match &mut self.memory.queue(stream)? {
            // SAFETY: the payload of this part is not larger than that of the first one, for which there is room.
            Queue::Cpu => unsafe { own.copy_from_nonoverlapping(reduced.data(), bytes) },
            // SAFETY: likewise.
            Queue::Cuda(queue) => unsafe { queue.copy(own, reduced.data(), bytes) }?,
        }
        let gathered = self.sums.plan().gathered_bytes;
        let received = self.exchange(Pattern::AllGather, (own, self.at(0)), gathered, codec, stream)?;
        let mut shape = [0];
        let payload_of = |part: usize, shape: &mut [i64; 1]| {
            shape[0] = self.parts()[part].payload_bytes();
            received.wrapping_add(part * gathered as usize).cast_mut()
        };
        let mut outcome = Ok(());
        for part in 0..self.parts().len() {
            let at = payload_of(part, &mut shape);
            // SAFETY: what was gathered has the payload of each part; nothing writes to it until the next call.
            let payload = unsafe { View::of_memory(&Name::of_item("part", part), self.device, Dtype::U8, &shape, at) };
            outcome = outcome.and(self.sums.check(part, &payload, codec));
        }
        outcome?;
        for (part, shapes) in self.shapes.iter().enumerate() {
            let at = payload_of(part, &mut shape);
            // SAFETY: likewise.
            let payload = unsafe { View::of_memory(&Name::of_item("part", part), self.device, Dtype::U8, &shape, at) };
            let runs = &self.parts()[part].workers;
            let pieces = values.clone().zip(runs.iter().zip(shapes)).map(|(values, (run, shape))| {
                let first = run.row - self.rows[run.segment];
                values.map(|values| values.part(if run.elements == 0 { 0 } else { first }, shape))
            });
            self.sums.decode(part, &payload, pieces, codec, stream)?;
        }
        Ok(())
    }

    fn exchange(
        &self, pattern: Pattern, (send, recv): (*mut u8, *mut u8), bytes: i64, codec: &Codec, stream: Stream,
    ) -> Result<*const u8> {
        let exchange = Exchange {
            pattern,
            send,
            recv,
            bytes: bytes as usize,
            device: self.device,
            stream,
            memory: Some(&self.memory),
            error_flag: codec.mark()?,
        };
        self.link.exchange(&exchange, self.staging.as_ref())
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.memory.data().wrapping_add(offset)
    }
}

/// Whether a failure leaves the ranks in step: a corrupt payload was exchanged like any other.
pub fn is_in_step(failure: &Error) -> bool {
    failure.status == Status::Corrupt
}
