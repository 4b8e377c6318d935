//! Pinned memory that copies between the host and a GPU go through, kept from one copy to the next.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ffi::error::Result;

use super::{event::Event, own_stream::OwnStream, pinned::Pinned, queue::Queue, stream::Stream};

/// Pieces that exist at a time, and the bytes of one.
pub const PIECES: usize = 2;
pub const PIECE_BYTES: i64 = 4 << 20;

/// Pinned memory for pieces, and for each of them when the GPU is done with it.
pub struct Staging {
    pinned: Pinned,
    events: [Event; PIECES],
    /// Of the GPU that the last copy between GPUs came from: the legacy stream would wait for others there, and they
    /// for it.
    source: Option<OwnStream>,
}

/// The staging memory that the last copy on a device has left, by the device's number modulo their count. One is kept;
/// further ones, of calls at the same time, are freed.
static KEPT: [Mutex<Option<Staging>>; 64] = [const { Mutex::new(None) }; 64];

fn kept(queue: &Queue) -> MutexGuard<'static, Option<Staging>> {
    KEPT[queue.device.ordinal % KEPT.len()].lock().unwrap_or_else(PoisonError::into_inner)
}

/// Frees what is kept for the queue's device.
pub fn trim(queue: &Queue) {
    // Dropping calls the driver, so it happens after the lock is released.
    let before = kept(queue).take();
    drop(before);
}

impl Staging {
    /// What is kept of the queue's device, if it is of the queue's context, or a new one.
    pub fn of(queue: &mut Queue) -> Result<Self> {
        let before = kept(queue).take();
        if let Some(staging) = before
            && staging.events[0].is_of(queue)?
        {
            return Ok(staging);
        }
        let pinned = Pinned::new(queue, PIECES as i64 * PIECE_BYTES)?;
        Ok(Self { pinned, events: [Event::new(queue)?, Event::new(queue)?], source: None })
    }

    /// A stream of the source's GPU.
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

    /// What is enqueued so far is all that uses this piece.
    pub fn record(&self, queue: &mut Queue, number: usize) -> Result<()> {
        // SAFETY: an event of this, and of the queue's context.
        unsafe { self.events[number % PIECES].handle().record(queue) }
    }

    /// Waits for what was enqueued before record().
    pub fn wait(&self, queue: &mut Queue, number: usize) -> Result<()> {
        // SAFETY: an event of this.
        unsafe { self.events[number % PIECES].handle().wait(queue) }
    }

    /// Keeps it for the next copy.
    pub fn keep(self, queue: &Queue) {
        let before = kept(queue).replace(self);
        drop(before); // calls the driver, so not under the lock
    }
}
