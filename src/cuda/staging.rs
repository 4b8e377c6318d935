//! Pinned staging buffers for copies between the host and a GPU, kept from one copy to the next.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ffi::error::Result;

use super::{event::Event, own_stream::OwnStream, pinned::Pinned, queue::Queue, stream::Stream};

/// Number of pieces of a staging buffer, and bytes of a piece.
pub const PIECES: usize = 2;
pub const PIECE_BYTES: i64 = 4 << 20;

/// Pinned memory for the pieces, and an event per piece that is recorded after the GPU's last use of it.
pub struct Staging {
    pinned: Pinned,
    events: [Event; PIECES],
    /// Stream on the GPU that was the source of the last copy between GPUs. On the legacy stream, the copy would wait
    /// for other work there, and other work for it.
    source: Option<OwnStream>,
}

/// One staging buffer of each context in which there were copies. Further buffers, of concurrent calls, are freed. The
/// buffer of a destroyed context stays in the list, and the driver has freed its memory.
static KEPT: Mutex<Vec<Staging>> = Mutex::new(Vec::new());

fn kept() -> MutexGuard<'static, Vec<Staging>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn take(context: u64) -> Option<Staging> {
    let mut kept = kept();
    let found = kept.iter().position(|staging| staging.context() == context)?;
    Some(kept.swap_remove(found))
}

/// Frees the buffer that is kept for the queue's context.
pub fn trim(queue: &mut Queue) -> Result<()> {
    if queue.has_context()? {
        let before = take(queue.current()?.id);
        drop(before); // dropped here, without the lock, because dropping calls the driver
    }
    Ok(())
}

impl Staging {
    /// Takes the buffer kept for the queue's context, else makes a new one.
    pub fn of(queue: &mut Queue) -> Result<Self> {
        if let Some(staging) = take(queue.context()?.id) {
            return Ok(staging);
        }
        let pinned = Pinned::new(queue, PIECES as i64 * PIECE_BYTES)?;
        Ok(Self { pinned, events: [Event::new(queue)?, Event::new(queue)?], source: None })
    }

    /// Returns a stream on the source's GPU.
    pub fn source(&mut self, from: i32) -> Result<Stream> {
        let mut there = Queue::of(from, Stream::LEGACY)?;
        let source = match self.source.take() {
            Some(source) if source.is_of(&mut there)? => source,
            _ => OwnStream::new(&mut there)?,
        };
        Ok(self.source.insert(source).stream())
    }

    pub fn piece(&self, number: usize) -> *mut u8 {
        self.pinned.data().wrapping_add(number % PIECES * PIECE_BYTES as usize)
    }

    /// Records that the work enqueued so far is all that uses this piece.
    pub fn record(&self, queue: &mut Queue, number: usize) -> Result<()> {
        // SAFETY: the event is alive, and `of` made or took it for the queue's context.
        unsafe { self.events[number % PIECES].handle().record(queue) }
    }

    /// Waits for the work that was enqueued before record().
    pub fn wait(&self, queue: &mut Queue, number: usize) -> Result<()> {
        // SAFETY: the event is alive.
        unsafe { self.events[number % PIECES].handle().wait(queue) }
    }

    fn context(&self) -> u64 {
        self.events[0].context()
    }

    /// Keeps the buffer for the next copy in its context, which is current, unless there is one.
    pub fn keep(self) {
        let mut kept = kept();
        if kept.iter().all(|other| other.context() != self.context()) && kept.try_reserve(1).is_ok() {
            kept.push(self);
        } else {
            drop(kept); // before the buffer, because dropping that calls the driver
        }
    }
}
