//! Exchanges within a node: of values, of which each rank sums up one part, and of reduced chunks.
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

/// Work of an all-reduce over nodes that happens within this node.
pub struct Node {
    link: Arc<Link>,
    sums: NodeSums,
    /// Four ranges: the blocks that are sent, later the gathered chunks; the received blocks; the sums; this rank's
    /// chunks.
    memory: Block,
    /// Offsets of the last three ranges, in bytes.
    received: usize,
    summed: usize,
    own: usize,
    staging: Option<Staging>,
    device: Device,
    /// Shapes of the pieces of each part.
    shapes: Vec<Vec<[i64; 1]>>,
    /// Number of each segment's first element in a row of all elements.
    rows: Vec<i64>,
}

impl Node {
    /// Allocates the memory. `whole`: the plan of all elements, with a chunk for each rank of the node. `codec`: that
    /// of this rank's part, which the rank exchanges between `nodes` nodes.
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
            // Padding after the chunks of a smaller part is sent, too. GPU memory is zeroed when it is allocated.
            // SAFETY: the range is the last `gathered` bytes of the memory, which is new.
            unsafe { node.at(own).write_bytes(0, gathered as usize) };
        }
        Ok(node)
    }

    /// Returns the codec of all elements, which checks the caller's arguments.
    pub fn whole(&self) -> &Codec {
        self.sums.whole()
    }

    /// Returns the plans of all parts.
    pub fn parts(&self) -> &[CodecPlan] {
        &self.sums.plan().parts
    }

    /// Returns the number of a segment's first element in a row of all elements.
    pub fn row(&self, segment: usize) -> i64 {
        self.rows[segment]
    }

    /// Returns the bytes that a rank sends to each other rank of the node: of values, and of chunks.
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

    /// Sums up this rank's part of the values of all ranks of the node. `codec`: that of the part; its next encode adds
    /// the flags found here to its own.
    pub fn sum<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, factor: Option<&View<'_>>, codec: &Codec,
        stream: Stream,
    ) -> Result<()> {
        let bytes = self.sums.plan().block_bytes;
        let blocks = [self.link.world as i64 * bytes];
        let (send, received) = (self.at(0), self.at(self.received));
        // SAFETY: the memory has a block for each part; only the call that has entered the communicator uses it.
        let packed = unsafe { View::of_memory(&Name::new("blocks"), self.device, Dtype::U8, &blocks, send) };
        self.sums.pack(values, factor, &packed, stream)?;
        let received = self.exchange(Pattern::AllToAll, (send, received), bytes, codec, stream)?.cast_mut();
        // SAFETY: the exchange returned memory with a block of each rank, which only this call uses.
        let received = unsafe { View::of_memory(&Name::new("blocks"), self.device, Dtype::U8, &blocks, received) };
        let elements = [self.sums.plan().own_part().elements];
        // SAFETY: the memory has room for the sums at `summed`, which only this call uses.
        let sums =
            unsafe { View::of_memory(&Name::new("sums"), self.device, Dtype::F32, &elements, self.at(self.summed)) };
        self.sums.sum(&received, &sums, codec, stream)
    }

    /// Returns the sums, a tensor for each segment.
    pub fn summed(&self) -> impl ExactSizeIterator<Item = Result<View<'_>>> + Clone {
        let (part, shapes) = (self.sums.plan().own_part(), &self.shapes[self.link.rank]);
        let mut at = self.at(self.summed);
        part.workers.iter().zip(shapes).map(move |(run, shape)| {
            let here = at;
            at = here.wrapping_add(run.elements as usize * size_of::<f32>());
            // SAFETY: the view lies within the memory; only the call that has entered the communicator uses the views.
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
            // SAFETY: this part's payload is at most as large as the first part's, for which there is room.
            Queue::Cpu => unsafe { own.copy_from_nonoverlapping(reduced.data(), bytes) },
            // SAFETY: the sizes are as on the CPU; both sides stay until the stream has done the copy.
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
            // SAFETY: the gathered memory has the payload of each part; nothing writes to it until the next call.
            let payload = unsafe { View::of_memory(&Name::of_item("part", part), self.device, Dtype::U8, &shape, at) };
            outcome = outcome.and(self.sums.check(part, &payload, codec));
        }
        outcome?;
        for (part, shapes) in self.shapes.iter().enumerate() {
            let at = payload_of(part, &mut shape);
            // SAFETY: the gathered memory has the payload of each part, as above.
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

/// Returns true if a failure leaves the ranks in step: a corrupt payload was exchanged like any other.
pub fn is_in_step(failure: &Error) -> bool {
    failure.status == Status::Corrupt
}
