//! The memory that ranks exchange.

use std::{mem::ManuallyDrop, ops::Deref};

use crate::{
    codec::{ops::Codec, plan::Over},
    cuda::Stream,
    device::{Block, Queue},
    dlpack::{Device, Dtype, View},
    ffi::{
        error::{Result, error},
        name::Name,
    },
};

use super::{
    link::Link,
    transport::{Exchange, Pattern, Staging},
};

/// Has memory of a GPU that exchanges use. Freeing it waits for them, so what ends an exchange that hangs is an earlier
/// field of the same struct, and goes first; where nothing ends it the memory is kept until the process ends.
pub struct InExchanges<T> {
    value: ManuallyDrop<T>,
    /// The value is not dropped.
    is_kept: bool,
}

impl<T> InExchanges<T> {
    pub fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), is_kept: false }
    }

    pub fn keep_if(&mut self, may_hang: bool) {
        self.is_kept = may_hang;
    }

    /// Once the exchanges are done.
    pub fn into_inner(mut self) -> T {
        self.is_kept = true;
        // SAFETY: taken once, here: what is left is not dropped.
        unsafe { ManuallyDrop::take(&mut self.value) }
    }
}

impl<T> Deref for InExchanges<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for InExchanges<T> {
    fn drop(&mut self) {
        if !self.is_kept {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// The communication buffers of one codec, which has a chunk for each rank:
///
/// ```text
///     payload     | chunk 0 | chunk 1 | ...    of this rank; then the reduced chunks of all
///     payloads    | own     | own     | ...    this rank's chunk of every rank's payload
///     chunk       | own |                      reduced by this rank
/// ```
///
/// Where the transport has receive slots, chunks arrive there, and there is only room for one here. Where ranks
/// exchange once, whole payloads of all arrive behind the first one; over peer memory in areas of their own.
pub struct Buffers {
    device: Device,
    memory: Block,
    /// For chunks of all ranks' payloads, and for reduced ones, if the transport has them.
    receive_slots: Option<[usize; 2]>,
    /// How many launches an exchange takes that is part of a codec's launches, if the transport has such.
    fused_launches: Option<usize>,
    /// The shape of all ranks' payloads, where this one can exchange whole ones.
    whole: Option<[i64; 2]>,
    /// Of the codec: set when a rank is lost. An address as a number, to be shared.
    error_flag: usize,
    world: i64,
    /// Chunks in front of the one that this rank reduces.
    others: i64,
    staging: Option<Staging>,
    /// Shapes of the three.
    payload: [i64; 1],
    payloads: [i64; 2],
    chunk: [i64; 1],
}

impl Buffers {
    pub fn new(link: &Link, codec: &Codec) -> Result<Self> {
        let (world, device, fused) = (link.world as i64, codec.device(), link.fused());
        let stride = codec.plan().payload_bytes() / world;
        let receive_slots = fused.map(|fused| fused.receive_slots().map(<*mut u8>::expose_provenance));
        let once = codec.plan().exchanges_once(if fused.is_some() { Over::PeerMemory } else { device.into() });
        // Chunks in front of the one that this rank reduces, and all.
        let (others, chunks) = match (receive_slots.is_some(), once) {
            (true, _) => (0, 1),
            (false, false) => (2 * world, 2 * world + 1),
            (false, true) => (2 * world, world + world * world),
        };
        let bytes = chunks.checked_mul(stride);
        let bytes = bytes.ok_or_else(|| {
            error!(SizeOverflow, "{world} chunks of {stride} bytes, sent and received, are more than 2^63 - 1")
        })?;
        let mut queue = Queue::of(device, Stream::LEGACY)?;
        let memory = Block::new(&mut queue, bytes)?;
        link.transport.check(device, &memory, stride)?;
        if fused.is_some() {
            codec.load_for_peers(&mut queue)?;
        }
        let has_room = |bytes| match fused {
            Some(fused) => fused.once(bytes).is_some(),
            None => link.transport.check(device, &memory, bytes).is_ok(),
        };
        let whole = Some([world, world * stride]).filter(|&[_, bytes]| once && has_room(bytes));
        let block = whole.map_or(stride, |[_, bytes]| bytes);
        let error_flag = codec.mark()?.expose_provenance();
        let staging = link.staging(&mut queue, block)?;
        Ok(Self {
            device,
            memory,
            receive_slots,
            fused_launches: fused.map(|fused| fused.steps_once().len()),
            whole,
            error_flag,
            world,
            others,
            staging,
            payload: [world * stride],
            payloads: [world, stride],
            chunk: [stride],
        })
    }

    /// Bytes of a chunk.
    pub fn stride(&self) -> i64 {
        self.chunk[0]
    }

    pub fn memory(&self) -> &Block {
        &self.memory
    }

    /// How many launches an exchange takes that is part of a codec's launches; None: exchanges are no part of them.
    pub fn fused_launches(&self) -> Option<usize> {
        self.fused_launches
    }

    /// Memory that exchanges of these buffers need besides.
    pub fn staging(&self) -> Option<&Staging> {
        self.staging.as_ref()
    }

    /// The exchange of payloads for `payloads`, or of reduced chunks for `gathered`.
    pub fn of_chunks(&self, pattern: Pattern, stream: Stream) -> Exchange<'_> {
        let (send, recv) = match pattern {
            Pattern::AllToAll => (self.payload(), self.payloads()),
            Pattern::AllGather => (self.chunk(), self.gathered()),
        };
        self.between(pattern, (&send, &recv), self.stride(), stream)
    }

    /// The exchange of whole payloads, and where those of all ranks arrive.
    pub fn of_payloads(&self, stream: Stream) -> Result<(Exchange<'_>, View<'_>)> {
        let shape = self.whole.as_ref().filter(|_| self.receive_slots.is_none());
        let shape = shape.ok_or_else(|| error!(Panic, "buffers: no room for whole payloads"))?;
        let (whole, payload) = (self.view("payloads", self.world, shape), self.payload());
        Ok((self.between(Pattern::AllGather, (&payload, &whole), payload.elements(), stream), whole))
    }

    fn between(
        &self, pattern: Pattern, (send, recv): (&View<'_>, &View<'_>), bytes: i64, stream: Stream,
    ) -> Exchange<'_> {
        Exchange {
            pattern,
            send: send.data(),
            recv: recv.data(),
            bytes: bytes as usize,
            device: self.device,
            stream,
            memory: Some(&self.memory),
            error_flag: self.error_flag(),
        }
    }

    pub fn payload(&self) -> View<'_> {
        self.view("payload", 0, &self.payload)
    }

    /// This rank's chunk of every rank's payload.
    pub fn payloads(&self) -> View<'_> {
        if let Some([slots, _]) = self.receive_slots {
            return self.view_at("payloads", slots, &self.payloads);
        }
        // A rank that is alone has its own payload only.
        let behind = if self.world == 1 { 0 } else { self.world };
        self.view("payloads", behind, &self.payloads)
    }

    /// Whether there is room for all of every rank's payload.
    pub fn can_exchange_once(&self) -> bool {
        self.whole.is_some()
    }

    pub fn chunk(&self) -> View<'_> {
        self.view("chunk", self.others, &self.chunk)
    }

    /// The reduced chunks of all ranks.
    pub fn gathered(&self) -> View<'_> {
        match self.receive_slots {
            Some([_, slots]) => self.view_at("payload", slots, &self.payload),
            None if self.world == 1 => self.chunk(),
            None => self.payload(),
        }
    }

    /// Set by an exchange when a rank is lost.
    pub fn error_flag(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.error_flag)
    }

    /// Behind so many chunks.
    fn view<'a>(&'a self, name: &'static str, chunks: i64, shape: &'a [i64]) -> View<'a> {
        let data = self.memory.data().wrapping_add((chunks * self.stride()) as usize);
        self.view_at(name, data.expose_provenance(), shape)
    }

    fn view_at<'a>(&'a self, name: &'static str, address: usize, shape: &'a [i64]) -> View<'a> {
        let data = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: within this memory, or in receive slots, for which `Transport::check` compared the size of a chunk;
        // the call that has entered the communicator is the only one to use the views.
        unsafe { View::of_memory(&Name::new(name), self.device, Dtype::U8, shape, data) }
    }
}
