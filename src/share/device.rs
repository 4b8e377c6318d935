//! Memory of CUDA that another process is to have: exported here, mapped there.

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
    cuda::{Exported, Imported, Lent, Means},
    message::{Lengths, Message, Place, bytes_of, copy, sizes_of},
    socket::{self, Deadline, Descriptor, Identity, Socket},
};

/// What a process remembers of memory that it has sent by its handle, for it cannot open that itself.
pub struct Known {
    ordinal: i32,
    uuid: Uuid,
    bytes: u64,
    lent: Lent,
}

/// The memory that a tensor is in, or a copy in memory that holds nothing else: what is told of it, and its files. The
/// work on it is done.
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
    // In this order: in a forked child the driver refuses before a lock is waited for.
    let Exported { uuid, address, bytes, means } = if as_copy {
        let bytes = bytes_of(tensor.tensor.dtype, &sizes)?;
        queue.export_copy(bytes as u64, |data| {
            // SAFETY: new memory of this device, as many bytes as the elements take.
            unsafe { copy(tensor, &sizes, Device::Cuda(ordinal), data) }
        })?
    } else {
        queue.export(begin as u64, end as u64)?
    };
    forget_ended();
    let offset = if as_copy { 0 } else { tensor.tensor.data.addr() as u64 - address };
    let handle = match means {
        Means::Handle(handle, lent) => {
            known = Some(Known { ordinal, uuid, bytes, lent });
            handle
        }
        Means::Parts(its) => {
            (parts, files) = (fallible::list(its.len(), "parts")?, fallible::list(its.len() + 1, "descriptors")?);
            for part in its {
                parts.push(part.bytes);
                // SAFETY: it is open, and given up here.
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
    /// Remembers it until `kept` is answered: `travels` is its other end.
    pub fn remember(self, kept: &Socket, travels: &Descriptor) -> Result<Sent> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (id, travels) = (NEXT.fetch_add(1, Ordering::Relaxed), Identity::of(travels.number())?);
        let mut table = table();
        fallible::reserve(&mut table, 1, "tensors that were sent")?;
        table.push(Entry { id, travels, kept: kept.number(), left: None, memory: self });
        Ok(Sent { id, process: process::id() })
    }
}

/// Memory of this process that was sent, and not released.
struct Entry {
    id: u64,
    /// The socket on which is answered, where it is at the other end.
    travels: Identity,
    /// And this end of it: somebody's lease, or left here by one.
    kept: RawFd,
    left: Option<Socket>,
    memory: Known,
}

/// What was sent. The driver is not called while it is locked; and the driver, which a forked child does not have, was
/// called before: so that no lock is waited for there which another thread had when it was forked.
static SENT: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

fn table() -> MutexGuard<'static, Vec<Entry>> {
    SENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether nobody has answered on a socket, nor closed the other end.
fn is_unanswered(kept: RawFd) -> bool {
    socket::peek(kept, Deadline::after(0)).is_err_and(|failure| failure.status == Status::Timeout)
}

/// Forgets what has ended and whose lease is gone.
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

/// A lease's part of what was sent.
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

    /// The receiver is done with it: memory of this library whose tensor is released is freed.
    pub fn has_ended(&self) {
        if let Some(entry) = self.take() {
            let ordinal = entry.memory.ordinal;
            drop(entry);
            // What could not be freed is so by a later call.
            if let Ok(mut queue) = Queue::of(ordinal, Stream::LEGACY) {
                let _ = queue.free_returned();
            }
        }
    }

    /// Nobody will ask for it: its memory is never freed. The socket is left here, so that its tensor is recognized.
    pub fn never_ends(&self, kept: Socket) {
        if self.process == process::id() {
            let mut table = table();
            if let Some(entry) = table.iter_mut().find(|entry| entry.id == self.id) {
                entry.memory.lent.never_ends();
                entry.left = Some(kept);
            }
        }
    }

    /// The lease is gone, and the socket left here: when it is answered, later calls will find that.
    pub fn is_left(&self, kept: Socket) {
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

/// Memory of a device that has come for a tensor, from another process or from this one.
pub struct Import {
    memory: Option<Imported>,
}

struct Held {
    memory: Option<Imported>,
    answers: RawFd,
    process: u32,
}

impl Import {
    /// Memory that a message describes, on this device.
    pub fn of(message: &Message, place: &Place, files: &[Descriptor], ordinal: i32, answers: &Socket) -> Result<Self> {
        let mut queue = Queue::of(ordinal, Stream::LEGACY)?;
        let bytes = message.bytes as u64;
        queue.uuid()?; // in a forked child the driver refuses, before a lock is waited for
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
            // SAFETY: they are open until this returns.
            let file = |file: &Descriptor| unsafe { BorrowedFd::borrow_raw(file.number()) };
            let parts = place.parts.iter().zip(files).map(|(&bytes, its)| (bytes, file(its)));
            Some(queue.map(place.uuid, parts, bytes)?)
        };
        Ok(Self { memory })
    }

    /// The tensor, whose release is answered.
    ///
    /// # Safety
    /// `answers` is a socket that is given up when this succeeds.
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
        // SAFETY: as many sizes and strides as dimensions, which outlive the call.
        let described = unsafe { Described::from_dlpack(&Name::new("tensor"), &tensor)? };
        over_described(&described, || {
            let held = Held { memory: self.memory, answers, process: process::id() };
            let held = Box::into_raw(Box::new(held));
            // SAFETY: `release` is called once, on any thread, with what came out of a box just now.
            unsafe { Owner::new(ptr::null_mut(), [held.cast(), ptr::null_mut()], release) }
        })
    }
}

/// # Safety
/// As `into_tensor` put it together.
unsafe fn release(_: *mut u8, [held, _]: [*mut c_void; 2]) {
    // SAFETY: `held` came out of a box in `into_tensor`, and an owner is released once.
    let Held { memory, answers, process } = *unsafe { Box::from_raw(held.cast::<Held>()) };
    // SAFETY: `into_tensor` was given the descriptor for this alone, and it is open.
    let answers = unsafe { Descriptor::of(answers) };
    // In a forked child the driver does not work, and the parent may use the memory: only the child's copy of the socket
    // is closed.
    if process != process::id() {
        mem::forget(memory);
    } else if memory.is_none_or(Imported::release) {
        socket::answer(answers.number(), RELEASED);
    } else {
        mem::forget(answers); // left open: the sender's wait ends when this process ends
    }
}

/// The entry of memory that this process has sent, if a tensor over it was sent back. The socket for the answer identifies
/// the memory, because a message's own claims are not trusted. The peer may answer while the tensor is in use here, so this
/// takes a loan of its own before the entry can be removed.
fn sent_by_this_process(answers: &Socket) -> Result<Option<(Uuid, Lent, u64)>> {
    let travels = Identity::of(answers.number())?;
    let table = table();
    // Once the other end of one is closed, its number may be another's.
    let found = table.iter().find(|entry| entry.travels == travels && is_unanswered(entry.kept));
    Ok(found.map(|Entry { memory, .. }| (memory.uuid, memory.lent.again(), memory.bytes)))
}
