//! CUDA memory that is shared with another process: exported by the sender, mapped by the receiver.

use std::{
    ffi::c_void,
    mem,
    ops::Range,
    os::fd::{BorrowedFd, IntoRawFd, RawFd},
    process, ptr,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use dlpark::ffi::DLTensor;

use crate::{
    cuda::{Queue, Stream, Uuid},
    dlpack::{Described, Device, Outputs, Owner, Shape, over_described},
    ffi::{
        error::{Result, Status, error},
        fallible,
        name::Name,
    },
};

use super::{
    RELEASED,
    cuda::{ExportMethod, Exported, Imported, Loan},
    message::{Lengths, Message, Place, bytes_of, copy, sizes_of},
    socket::{self, Deadline, Descriptor, Identity, Socket},
};

/// Memory that this process has sent by its handle; it is recorded because a process cannot open its own handle.
pub struct Known {
    ordinal: i32,
    uuid: Uuid,
    bytes: u64,
    lent: Loan,
}

/// Exports a tensor's memory, or a copy in separate memory, once the work on it is done. Returns the message, the files
/// of the memory, and memory that is sent by its handle.
pub fn export(
    tensor: &Described<'_>, ordinal: i32, as_copy: bool,
) -> Result<(Message, Vec<Descriptor>, Option<Known>)> {
    let sizes = sizes_of(tensor)?;
    let strides: Lengths = if as_copy {
        Shape::of(&sizes).compact().map(|(_, stride)| stride).collect()
    } else {
        tensor.dims().map(|(_, stride)| stride).collect()
    };
    let mut queue = Queue::of(ordinal, Stream::LEGACY)?;
    let (mut parts, mut files, mut known) = (Vec::new(), Vec::new(), None);
    if tensor.is_empty() {
        let place = Place { strides, offset: 0, uuid: queue.uuid()?, handle: [0; 64], parts, n_parts: 0 };
        return Ok((Message::of_place(tensor, 0, place)?, files, known));
    }
    let Range { start: begin, end } = tensor.extent();
    // The driver is called before `forget_ended` locks: in a forked child, the driver refuses first.
    let Exported { uuid, address, bytes, means } = if as_copy {
        let bytes = bytes_of(tensor.tensor.dtype, &sizes)?;
        queue.export_copy(bytes as u64, |data| {
            // SAFETY: `data` is new memory of this device with room for all elements.
            unsafe { copy(tensor, &sizes, Device::Cuda(ordinal), data) }
        })?
    } else {
        queue.export(begin as u64, end as u64)?
    };
    forget_ended();
    let offset = if as_copy { 0 } else { tensor.tensor.data.addr() as u64 - address };
    let handle = match means {
        ExportMethod::Handle(handle, lent) => {
            known = Some(Known { ordinal, uuid, bytes, lent });
            handle
        }
        ExportMethod::Parts(its) => {
            (parts, files) = (fallible::list(its.len(), "parts")?, fallible::list(its.len() + 1, "descriptors")?);
            for part in its {
                parts.push(part.bytes);
                // SAFETY: the descriptor is open, and into_raw_fd() has given up its ownership.
                files.push(unsafe { Descriptor::of(part.file.into_raw_fd()) });
            }
            [0; 64]
        }
    };
    queue.free_returned()?;
    let n_parts = parts.len();
    let place = Place { strides, offset, uuid, handle, parts, n_parts };
    Ok((Message::of_place(tensor, bytes, place)?, files, known))
}

impl Known {
    /// Records the memory until `kept` has an answer. `travels`: other end of `kept`.
    pub fn remember(self, kept: &Socket, travels: &Descriptor) -> Result<Sent> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (id, travels) = (NEXT.fetch_add(1, Ordering::Relaxed), Identity::of(travels.number())?);
        let mut table = table();
        fallible::reserve(&mut table, 1, "tensors that were sent")?;
        table.push(Entry { id, travels, kept: kept.number(), left: None, memory: self });
        Ok(Sent { id, process: process::id() })
    }
}

/// Memory that this process has sent and that was not released.
struct Entry {
    id: u64,
    /// Identity of the receiver's end of the socket for the answer.
    travels: Identity,
    /// This process's end of the socket, which belongs to a lease or to `left`.
    kept: RawFd,
    left: Option<Socket>,
    memory: Known,
}

/// Memory that was sent. The driver is not called while this is locked. In a forked child, the driver refuses before
/// this lock is taken, so the child does not wait for a lock that another thread held at the fork.
static SENT: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

fn table() -> MutexGuard<'static, Vec<Entry>> {
    SENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns true if a socket has no answer and its other end is open.
fn is_unanswered(kept: RawFd) -> bool {
    socket::peek(kept, Deadline::after(0)).is_err_and(|failure| failure.status == Status::Timeout)
}

/// Removes entries that have ended and whose lease is gone.
fn forget_ended() {
    let mut ended = Vec::new();
    let mut table = table();
    let mut at = 0;
    while at < table.len() {
        let is_ended = table[at].left.is_some() && !is_unanswered(table[at].kept);
        if is_ended && ended.try_reserve(1).is_ok() {
            ended.push(table.swap_remove(at));
        } else {
            at += 1;
        }
    }
}

/// Reference of a lease to its entry.
pub struct Sent {
    id: u64,
    process: u32,
}

impl Sent {
    fn take(&self) -> Option<Entry> {
        if self.process != process::id() {
            return None;
        }
        let mut table = table();
        let at = table.iter().position(|entry| entry.id == self.id)?;
        Some(table.swap_remove(at))
    }

    /// Removes the entry, since the receiver is done. Frees memory of this library whose tensor is released.
    pub fn finish(&self) {
        if let Some(entry) = self.take() {
            let ordinal = entry.memory.ordinal;
            drop(entry);
            // A later call frees memory that could not be freed here.
            if let Ok(mut queue) = Queue::of(ordinal, Stream::LEGACY) {
                let _ = queue.free_returned();
            }
        }
    }

    /// Keeps the memory for ever, since no lease will wait; keeps the socket, so that the tensor can be recognized.
    pub fn keep_for_ever(&self, kept: Socket) {
        if self.process == process::id() {
            let mut table = table();
            if let Some(entry) = table.iter_mut().find(|entry| entry.id == self.id) {
                entry.memory.lent.keep_for_ever();
                entry.left = Some(kept);
            }
        }
    }

    /// Takes the socket of a lease that is gone; later calls find its answer.
    pub fn release_lease(&self, kept: Socket) {
        if self.process == process::id() {
            let mut table = table();
            if let Some(entry) = table.iter_mut().find(|entry| entry.id == self.id) {
                entry.left = Some(kept);
            }
            drop(table);
            forget_ended();
        }
    }
}

/// Device memory that was received for a tensor, from another process or from this one.
pub struct Import {
    memory: Option<Imported>,
}

struct Held {
    memory: Option<Imported>,
    answers: RawFd,
    process: u32,
}

impl Import {
    /// Imports the memory that a message describes, on this device.
    pub fn of(message: &Message, place: &Place, files: &[Descriptor], ordinal: i32, answers: &Socket) -> Result<Self> {
        let mut queue = Queue::of(ordinal, Stream::LEGACY)?;
        let bytes = message.bytes as u64;
        queue.uuid()?; // in a forked child, the driver refuses before a lock is taken
        let memory = if message.shape.contains(&0) {
            None
        } else if let Some((uuid, lent, there)) = sent_by_this_process(answers)? {
            if bytes != there || !place.parts.is_empty() {
                return Err(error!(Corrupt, "socket: the message says {bytes} bytes of memory that has {there}"));
            }
            Some(queue.own(uuid, lent)?)
        } else if place.parts.is_empty() {
            Some(queue.open(place.uuid, place.handle, socket::sender(answers.number()), bytes)?)
        } else {
            // SAFETY: the files are open until this function returns.
            let file = |file: &Descriptor| unsafe { BorrowedFd::borrow_raw(file.number()) };
            let parts = place.parts.iter().zip(files).map(|(&bytes, its)| (bytes, file(its)));
            Some(queue.map(place.uuid, parts, bytes)?)
        };
        Ok(Self { memory })
    }

    /// Makes the tensor. Its release sends the answer.
    ///
    /// # Safety
    /// `answers` is an open socket, whose ownership the caller gives up if this succeeds.
    pub unsafe fn into_tensor(self, message: &Message, place: &Place, ordinal: i32, answers: RawFd) -> Result<Outputs> {
        let address = self.memory.as_ref().map_or(0, |memory| memory.address() + place.offset);
        let tensor = DLTensor {
            data: ptr::with_exposed_provenance_mut(address as usize),
            device: Device::Cuda(ordinal).to_dlpack(),
            ndim: message.shape.len() as i32,
            dtype: message.dtype,
            shape: message.shape.as_ptr().cast_mut(),
            strides: place.strides.as_ptr().cast_mut(),
            byte_offset: 0,
        };
        // SAFETY: there are `ndim` sizes and strides, which outlive the call.
        let described = unsafe { Described::from_dlpack(&Name::new("tensor"), &tensor)? };
        over_described(&described, || {
            let held = Held { memory: self.memory, answers, process: process::id() };
            let held = Box::into_raw(Box::new(held));
            // SAFETY: `release` is called once, on any thread, with a pointer from Box::into_raw().
            unsafe { Owner::new(ptr::null_mut(), [held.cast(), ptr::null_mut()], release) }
        })
    }
}

/// # Safety
/// Called once, with the words of the owner that `into_tensor` made.
unsafe fn release(_: *mut u8, [held, _]: [*mut c_void; 2]) {
    // SAFETY: `held` is from Box::into_raw() in `into_tensor`, and an owner is released once.
    let Held { memory, answers, process } = *unsafe { Box::from_raw(held.cast::<Held>()) };
    // SAFETY: the descriptor is open, and `into_tensor` took its ownership only for this.
    let answers = unsafe { Descriptor::of(answers) };
    // In a forked child, the driver does not work, and the parent may use the memory: only the child's copy of the
    // socket is closed.
    if process != process::id() {
        mem::forget(memory);
    } else if memory.is_none_or(Imported::release) {
        socket::answer(answers.number(), RELEASED);
    } else {
        mem::forget(answers); // left open: the sender's wait ends when this process ends
    }
}

/// Returns the entry of memory that this process has sent, if a tensor over it was sent back. The socket for the answer
/// identifies the memory, because a message's own claims are not trusted. The peer may answer while the tensor is in
/// use here, so this takes a loan of its own before the entry can be removed.
fn sent_by_this_process(answers: &Socket) -> Result<Option<(Uuid, Loan, u64)>> {
    let travels = Identity::of(answers.number())?;
    let table = table();
    // Once the other end of an entry is closed, a new socket may have its identity.
    let found = table.iter().find(|entry| entry.travels == travels && is_unanswered(entry.kept));
    Ok(found.map(|Entry { memory, .. }| (memory.uuid, memory.lent.again(), memory.bytes)))
}
