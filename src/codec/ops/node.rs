//! Computations within a node: blocks of values, their sums, and the values of reduced chunks.

use crate::{
    codec::{
        call::Decoding,
        cpu, cuda,
        plan::{CodecPlan, nodes::NodePlan},
    },
    cuda::Stream,
    device::Queue,
    dlpack::{Dtype, View, checks::check_elements},
    ffi::{
        error::{Result, error},
        fallible,
    },
};

use super::{Backend, Codec};

/// Computations of a rank for its node.
pub struct NodeSums {
    plan: NodePlan,
    /// Codec of all elements, for its checks and its table of addresses.
    whole: Codec,
    /// Decoder of each part.
    decoders: Vec<Codec>,
    /// Tables of the plan on a GPU; None on the CPU.
    tables: Option<cuda::nodes::Tables>,
}

impl NodeSums {
    /// Makes the plans, decoders and tables. `whole`: plan of all elements, with a chunk for each rank of the node.
    /// `codec`: codec of this rank's part.
    pub fn new(whole: CodecPlan, nodes: usize, own: usize, codec: &Codec) -> Result<Self> {
        let device = codec.device();
        let plan = NodePlan::new(&whole, nodes, own)?;
        let mut decoders = fallible::list(whole.n_chunks, "parts")?;
        for part in 0..whole.n_chunks {
            let decoder = Codec::of_plan(device, whole.part_between_nodes(part, nodes, None, None)?)?;
            if let (Backend::Cuda(decoder), Backend::Cuda(codec)) =
                (&mut decoder.enter()?.backend, &codec.enter()?.backend)
            {
                decoder.set_flags_of(codec);
            }
            decoders.push(decoder);
        }
        let tables = match Queue::of(device, Stream::LEGACY)? {
            Queue::Cpu => None,
            Queue::Cuda(mut queue) => Some(cuda::nodes::Tables::new(&mut queue, &plan)?),
        };
        Ok(Self { plan, whole: Codec::of_plan(device, whole)?, decoders, tables })
    }

    pub fn plan(&self) -> &NodePlan {
        &self.plan
    }

    pub fn whole(&self) -> &Codec {
        &self.whole
    }

    /// Writes a block for each rank of the node to `send`.
    pub fn pack<'v>(
        &self, values: impl ExactSizeIterator<Item = Result<View<'v>>>, factor: Option<&View<'_>>, send: &View<'_>,
        stream: Stream,
    ) -> Result<()> {
        self.check_blocks(send)?;
        let state = &mut *self.whole.enter()?;
        self.whole.take_values(values, &[self.plan.values], &mut state.values, |_| Ok(()))?;
        match (&mut state.backend, &self.tables) {
            (Backend::Cuda(whole), Some(tables)) => {
                tables.pack(&mut whole.queue(stream)?, &self.plan, whole, &state.values, factor, send)
            }
            _ => {
                cpu::nodes::pack(&self.plan, &state.values, factor, send);
                Ok(())
            }
        }
    }

    /// Sums the blocks of the node's ranks in float32. The next encode of `codec` adds the flags found here.
    pub fn sum(&self, received: &View<'_>, sums: &View<'_>, codec: &Codec, stream: Stream) -> Result<()> {
        self.check_blocks(received)?;
        check_elements(sums, self.plan.own_part().elements)?;
        match &mut codec.enter()?.backend {
            Backend::Cpu(codec) => {
                codec.add_to_next_encode(cpu::nodes::sum(&self.plan, received, sums));
                Ok(())
            }
            Backend::Cuda(codec) => cuda::nodes::sum(&mut codec.queue(stream)?, &self.plan, codec, received, sums),
        }
    }

    /// Checks that there is a block for each rank.
    fn check_blocks(&self, blocks: &View<'_>) -> Result<()> {
        self.whole.check_bytes(blocks, self.plan.parts.len() as i64 * self.plan.block_bytes)
    }

    /// Refuses a corrupt payload of a part on the CPU, before anything is decoded. `codec`: receives the flags.
    pub fn check(&self, part: usize, payload: &View<'_>, codec: &Codec) -> Result<()> {
        let decoder = &self.decoders[part];
        if let (Backend::Cpu(backend), Backend::Cpu(codec)) =
            (&mut decoder.enter()?.backend, &mut codec.enter()?.backend)
        {
            let checked = backend.check(decoder.plan(), payload);
            codec.take_flags_of(backend);
            checked?;
        }
        Ok(())
    }

    /// Decodes a part to its pieces, one of each segment. `codec`: receives the flags.
    pub fn decode<'v>(
        &self, part: usize, payload: &View<'_>, pieces: impl ExactSizeIterator<Item = Result<View<'v>>>, codec: &Codec,
        stream: Stream,
    ) -> Result<()> {
        let decoder = &self.decoders[part];
        let by = Decoding { dtype: Dtype::F32, divisor: 1, factor: None, add: false, behind_ours: false };
        decoder.decode_by(payload, by, pieces, stream)?;
        match (&mut decoder.enter()?.backend, &mut codec.enter()?.backend) {
            (Backend::Cpu(decoder), Backend::Cpu(codec)) => codec.take_flags_of(decoder),
            (Backend::Cuda(_), Backend::Cuda(_)) => {} // both codecs share the flags
            _ => return Err(error!(Panic, "codec: a part on another device")),
        }
        Ok(())
    }
}
