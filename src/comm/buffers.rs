//! The buffers that ranks exchange.

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

/// GPU memory that exchanges use. Freeing it waits for them, so a struct declares the field that ends a hanging
/// exchange before this one. If nothing ends the exchange, the memory is kept until the process ends.
pub struct LeakIfHanging<T> {
    value: ManuallyDrop<T>,
    /// True if the value is not dropped.
    is_kept: bool,
}

impl<T> LeakIfHanging<T> {
    pub fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), is_kept: false }
    }

    pub fn leak_if(&mut self, may_hang: bool) {
        self.is_kept = may_hang;
    }

    /// Returns the value. Must be called once the exchanges are done.
    pub fn into_inner(mut self) -> T {
        self.is_kept = true;
        // SAFETY: the value is taken once: `self` is consumed, and its drop skips the value, since `is_kept` is true.
        unsafe { ManuallyDrop::take(&mut self.value) }
    }
}

impl<T> Deref for LeakIfHanging<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for LeakIfHanging<T> {
    fn drop(&mut self) {
        if !self.is_kept {
            // SAFETY: the value was not taken, since `is_kept` is false, and is not used after this.
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
/// If the transport has receive slots, chunks arrive there, and this memory has room for one chunk only. For one-shot
/// the payloads of all ranks arrive after the first payload; over peer memory they have separate areas.
pub struct Buffers {
    device: Device,
    memory: Block,
    /// Addresses of the receive slots for chunks and for reduced chunks, if the transport has them.
    receive_slots: Option<[usize; 2]>,
    /// Number of launches of a fused one-shot, if the transport has fused exchanges.
    fused_launches: Option<usize>,
    /// Shape of the payloads of all ranks; None if this rank cannot use one-shot.
    whole: Option<[i64; 2]>,
    /// Address of the codec's flag for a lost rank, as an integer, so that threads can share it.
    error_flag: usize,
    world: i64,
    /// Number of chunks before the one that this rank reduces.
    others: i64,
    staging: Option<Staging>,
    /// Shapes of the three kinds of buffers.
    payload: [i64; 1],
    payloads: [i64; 2],
    chunk: [i64; 1],
}

impl Buffers {
    pub fn new(link: &Link, codec: &Codec) -> Result<Self> {
        let (world, device, fused) = (link.world as i64, codec.device(), link.fused());
        let stride = codec.plan().payload_bytes() / world;
        let receive_slots = fused.map(|fused| fused.receive_slots().map(<*mut u8>::expose_provenance));
        let one_shot = codec.plan().is_one_shot(if fused.is_some() { Over::PeerMemory } else { device.into() });
        // Count the chunks before the one that this rank reduces, and all chunks.
        let (others, chunks) = match (receive_slots.is_some(), one_shot) {
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
            Some(fused) => fused.one_shot(bytes).is_some(),
            None => link.transport.check(device, &memory, bytes).is_ok(),
        };
        let whole = Some([world, world * stride]).filter(|&[_, bytes]| one_shot && has_room(bytes));
        let block = whole.map_or(stride, |[_, bytes]| bytes);
        let error_flag = codec.mark()?.expose_provenance();
        let staging = link.staging(&mut queue, block)?;
        Ok(Self {
            device,
            memory,
            receive_slots,
            fused_launches: fused.map(|fused| fused.one_shot_launches().len()),
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

    /// Returns the bytes of a chunk.
    pub fn stride(&self) -> i64 {
        self.chunk[0]
    }

    pub fn memory(&self) -> &Block {
        &self.memory
    }

    /// Returns the number of launches of a fused one-shot; None if the transport has no fused exchanges.
    pub fn fused_launches(&self) -> Option<usize> {
        self.fused_launches
    }

    /// Returns the staging buffer for exchanges of these buffers, if the transport needs one.
    pub fn staging(&self) -> Option<&Staging> {
        self.staging.as_ref()
    }

    /// Returns the exchange of chunks that fills `payloads`, or the one of reduced chunks that fills `gathered`.
    pub fn of_chunks(&self, pattern: Pattern, stream: Stream) -> Exchange<'_> {
        let (send, recv) = match pattern {
            Pattern::AllToAll => (self.payload(), self.payloads()),
            Pattern::AllGather => (self.chunk(), self.gathered()),
        };
        self.between(pattern, (&send, &recv), self.stride(), stream)
    }

    /// Returns the exchange of whole payloads, and a view of the payloads that arrive from all ranks.
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

    /// Returns this rank's chunk of every rank's payload.
    pub fn payloads(&self) -> View<'_> {
        if let Some([slots, _]) = self.receive_slots {
            return self.view_at("payloads", slots, &self.payloads);
        }
        // In a world of one rank there is only its own payload.
        let behind = if self.world == 1 { 0 } else { self.world };
        self.view("payloads", behind, &self.payloads)
    }

    /// Returns true if there is room for the whole payloads of all ranks.
    pub fn supports_one_shot(&self) -> bool {
        self.whole.is_some()
    }

    pub fn chunk(&self) -> View<'_> {
        self.view("chunk", self.others, &self.chunk)
    }

    /// Returns the reduced chunks of all ranks.
    pub fn gathered(&self) -> View<'_> {
        match self.receive_slots {
            Some([_, slots]) => self.view_at("payload", slots, &self.payload),
            None if self.world == 1 => self.chunk(),
            None => self.payload(),
        }
    }

    /// Returns the address of the flag that an exchange sets when a rank is lost.
    pub fn error_flag(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.error_flag)
    }

    /// Returns a view that begins after `chunks` chunks.
    fn view<'a>(&'a self, name: &'static str, chunks: i64, shape: &'a [i64]) -> View<'a> {
        let data = self.memory.data().wrapping_add((chunks * self.stride()) as usize);
        self.view_at(name, data.expose_provenance(), shape)
    }

    fn view_at<'a>(&'a self, name: &'static str, address: usize, shape: &'a [i64]) -> View<'a> {
        let data = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the view lies within this memory, or in receive slots, whose size `Transport::check` compared with a
        // chunk. Only the call that has entered the communicator uses the views.
        unsafe { View::of_memory(&Name::new(name), self.device, Dtype::U8, shape, data) }
    }
}
