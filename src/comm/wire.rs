//! The memory that ranks exchange.

use crate::{
    backend::{
        Block, Queue, Stream,
        cuda::{self, Pinned},
    },
    error::{Result, error},
    ops::codec::Codec,
    tensor::{Device, Dtype, Name, View},
};

use super::{
    Communicator, RECORD,
    transport::{Exchange, Pattern},
    two::Buffers,
};

/// What a rank sends and receives for one codec, which has a chunk for each rank:
///
/// ```text
///     payload     | chunk 0 | chunk 1 | ...    of this rank; then the reduced chunks of all
///     payloads    | own     | own     | ...    this rank's chunk of every rank's payload
///     chunk       | own |                      reduced by this rank
/// ```
///
/// Where the transport has places in which chunks arrive, they go there from the beginning, and there is only room for one.
pub struct Wire {
    device: Device,
    memory: Block,
    /// Where chunks arrive, of all ranks' payloads and reduced ones, if the transport has places for them.
    areas: Option<[usize; 2]>,
    /// Where the codec finds that a rank did not come, as a number, to be shared.
    mark: usize,
    /// Bytes of a chunk, at most.
    most: i64,
    world: i64,
    /// Room for what is sent and what is received, where that has to be on the host and is not.
    pinned: Option<Pinned>,
    /// What the transport works in, if it needs that.
    buffers: Option<Buffers>,
    /// Shapes of the three.
    payload: [i64; 1],
    payloads: [i64; 2],
    chunk: [i64; 1],
}

impl Wire {
    pub fn new(communicator: &Communicator, device: Device, codec: &Codec) -> Result<Self> {
        let (world, stride) = (communicator.world as i64, codec.payload_bytes() / communicator.world as i64);
        let areas = communicator.transport.areas().filter(|_| world > 1);
        let others = if areas.is_some() { 0 } else { 2 * world };
        let bytes = (others + 1).checked_mul(stride);
        let bytes = bytes.ok_or_else(|| {
            error!(SizeOverflow, "{world} chunks of {stride} bytes, sent and received, are more than 2^63 - 1")
        })?;
        let mut queue = Queue::of(device, Stream::LEGACY)?;
        let memory = Block::new(&mut queue, bytes)?;
        communicator.transport.check(device, &memory, stride)?;
        let areas = areas.map(|areas| areas.map(<*mut u8>::expose_provenance));
        let mark = codec.mark()?.expose_provenance();
        let pinned = match &mut queue {
            Queue::Cuda(queue) => {
                communicator.listen_to(codec, queue)?;
                let wanted = communicator.transport.wants_host_memory();
                wanted.then(|| Pinned::new(queue, 2 * world * stride)).transpose()?
            }
            Queue::Cpu => None,
        };
        let buffers = if world > 1 { communicator.transport.buffers(&mut queue, stride)? } else { None };
        let mut wire = Self {
            device,
            memory,
            areas,
            mark,
            most: stride,
            world,
            pinned,
            buffers,
            payload: [0],
            payloads: [world, 0],
            chunk: [0],
        };
        wire.fit(codec);
        Ok(wire)
    }

    /// For a codec whose chunks are no larger than those of the one that this was made for.
    pub fn fit(&mut self, codec: &Codec) {
        let stride = codec.payload_bytes() / self.world;
        assert!(stride <= self.most);
        (self.payload, self.payloads, self.chunk) = ([self.world * stride], [self.world, stride], [stride]);
    }

    /// Bytes of a chunk.
    pub fn stride(&self) -> i64 {
        self.chunk[0]
    }

    pub fn memory(&self) -> &Block {
        &self.memory
    }

    /// Where on the host to bring what is sent, and where to receive, if that is needed.
    pub fn on_host(&self) -> Option<[*mut u8; 2]> {
        let pinned = self.pinned.as_ref()?;
        Some([pinned.data(), pinned.data().wrapping_add((self.world * self.most) as usize)])
    }

    /// What the transport works in.
    pub fn buffers(&self) -> Option<&Buffers> {
        self.buffers.as_ref()
    }

    pub fn payload(&self) -> View<'_> {
        self.view("payload", 0, &self.payload)
    }

    /// This rank's chunk of every rank's payload.
    pub fn payloads(&self) -> View<'_> {
        if let Some([area, _]) = self.areas {
            return self.view_at("payloads", area, &self.payloads);
        }
        // A rank that is alone has its own payload only.
        let behind = if self.world == 1 { 0 } else { self.world };
        self.view("payloads", behind, &self.payloads)
    }

    pub fn chunk(&self) -> View<'_> {
        let behind = if self.areas.is_some() { 0 } else { 2 * self.world };
        self.view("chunk", behind, &self.chunk)
    }

    /// The reduced chunks of all ranks.
    pub fn gathered(&self) -> View<'_> {
        match self.areas {
            Some([_, area]) => self.view_at("payload", area, &self.payload),
            None => self.payload(),
        }
    }

    /// Where an exchange says that a rank did not come.
    pub fn mark(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.mark)
    }

    /// Behind so many chunks.
    fn view<'a>(&'a self, name: &'static str, chunks: i64, shape: &'a [i64]) -> View<'a> {
        let data = self.memory.data().wrapping_add((chunks * self.most) as usize);
        self.view_at(name, data.expose_provenance(), shape)
    }

    fn view_at<'a>(&'a self, name: &'static str, address: usize, shape: &'a [i64]) -> View<'a> {
        let data = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: memory of this device, of at least so many bytes, or the transport's, which has checked that; whoever has
        // the communicator uses the views.
        unsafe { View::of_memory(&Name::new(name), self.device, Dtype::U8, shape, data) }
    }
}

/// What ranks tell each other when a handle is made, on its way through memory of a card, for transports that take no
/// other.
pub struct Stage {
    device: i32,
    /// A record of this rank, then those of all.
    memory: cuda::Memory,
}

impl Stage {
    pub fn new(device: i32, world: usize) -> Result<Self> {
        let mut queue = cuda::Queue::of(device, Stream::LEGACY)?;
        // So many ranks are numbered by an i32.
        let memory = cuda::Memory::new(&mut queue, (world as u64 + 1) * RECORD as u64)?;
        Ok(Self { device, memory })
    }

    /// Tells by an exchange that is enqueued on the legacy stream. Waits for it.
    pub fn tell(
        &self,
        own: &[u8; RECORD],
        all: &mut [[u8; RECORD]],
        exchange: impl FnOnce(&Exchange<'_>) -> Result<()>,
    ) -> Result<()> {
        const ALL: u64 = RECORD as u64;
        let at = |offset| std::ptr::with_exposed_provenance_mut::<u8>(self.memory.at(offset) as usize);
        self.memory.write(0, own)?;
        exchange(&Exchange {
            pattern: Pattern::AllGather,
            send: at(0),
            recv: at(ALL),
            bytes: RECORD,
            device: Device::Cuda(self.device),
            stream: Stream::LEGACY,
            memory: None,
            mark: std::ptr::null_mut(),
            buffers: None,
        })?;
        self.memory.read(ALL, all.as_flattened_mut())
    }
}
