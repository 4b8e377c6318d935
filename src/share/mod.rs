//! Tensors that another process is to have, over a connected Unix socket of the caller's.
//!
//! - `socket`: bytes and descriptors, within a time;
//! - `message`: how a tensor is described to the other side, and what of such a description is believed;
//! - `sealed`: memory of the CPU that the other side can map and nobody can make smaller;
//! - `device`: memory of CUDA, which both sides have from then on.
//!
//! Descriptors travel with a message: the memory, if it is a file or several, and last a socket on which the receiver
//! answers, once, with a byte: 0 when it has released the tensor, or the status with which it refused it. That it is closed
//! without a byte says that the receiver has ended.

#[allow(non_camel_case_types, clippy::missing_safety_doc, reason = "C names; lib.rs says what all require")]
pub mod api;
pub mod cuda;
mod device;
mod message;
mod sealed;
mod socket;

use std::os::fd::RawFd;

use crate::{
    dlpack::{Described, Device, Outputs, Shape},
    ffi::{
        error::{Result, Status, error, status_name},
        fallible,
        name::Name,
    },
};

use device::{Import, Sent};
use message::Message;
use sealed::Sealed;
use socket::{Descriptor, Socket};

pub use socket::{BorrowedSocket, Deadline};

/// What the receiver answers when it has released a tensor.
const RELEASED: u8 = Status::Ok as u8;

/// The sender's side of a tensor that was sent.
pub struct Lease {
    /// None: left to those who remember what was sent.
    socket: Option<Socket>,
    sent: Option<Sent>,
}

/// A tensor that can be sent: everything that can fail but for the socket has been done.
pub struct Parcel {
    text: Vec<u8>,
    /// Of the memory, and last the socket for answers.
    files: Vec<Descriptor>,
    lease: Lease,
}

impl Parcel {
    /// On the CPU a copy of the tensor, in C order. On CUDA its memory, or a copy in memory that holds nothing else.
    pub fn new(tensor: &Described<'_>, as_copy: bool) -> Result<Self> {
        let (message, mut files, known) = match Device::from_dlpack(&Name::new("tensor"), tensor.tensor.device)? {
            Device::Cpu => {
                let message = Message::of(tensor)?;
                let file = Sealed::copy_of(tensor, message.bytes)?.into_descriptor();
                let mut files = fallible::list(2, "descriptors")?;
                files.push(file);
                (message, files, None)
            }
            Device::Cuda(ordinal) => device::export(tensor, ordinal, as_copy)?,
        };
        let text = message.encoded()?;
        fallible::reserve(&mut files, 1, "descriptors")?;
        let (socket, answers) = socket::pair()?;
        let sent = known.map(|known| known.remember(&socket, &answers)).transpose()?;
        files.push(answers);
        Ok(Self { text, files, lease: Lease { socket: Some(socket), sent } })
    }

    pub fn send(self, socket: BorrowedSocket, deadline: Deadline) -> Result<Lease> {
        let mut numbers: Vec<RawFd> = fallible::list(self.files.len(), "descriptors")?;
        numbers.extend(self.files.iter().map(Descriptor::number));
        socket.send(&self.text, &numbers, deadline)?;
        Ok(self.lease)
    }
}

impl Lease {
    /// Waits until the receiver has released the tensor.
    pub fn wait(&self, deadline: Deadline) -> Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) }; // only while it is dropped
        let answer = socket.peek(deadline)?;
        if let Some(sent) = &self.sent {
            sent.has_ended();
        }
        match answer {
            Some(RELEASED) => Ok(()),
            Some(code) => {
                let name = status_name(code.into()).to_string_lossy();
                Err(error!(Share, "lease: the receiver refused the tensor: {name} ({code})"))
            }
            None => Err(error!(Share, "lease: the receiver ended without releasing the tensor")),
        }
    }

    /// Nobody will wait: memory of this library stays for ever.
    pub fn give_up(mut self) {
        if let (Some(sent), Some(socket)) = (self.sent.take(), self.socket.take()) {
            sent.never_ends(socket);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let (Some(sent), Some(socket)) = (&self.sent, self.socket.take()) {
            sent.is_left(socket);
        }
    }
}

/// The tensor that comes next.
pub fn receive(socket: BorrowedSocket, device: Device, deadline: Deadline) -> Result<Outputs> {
    let mut incoming = socket.incoming(deadline);
    let message = Message::receive(&mut incoming, device != Device::Cpu)?;
    let mut files = incoming.descriptors(message.descriptors() + 1)?;
    let Some(answers) = files.pop() else { return Err(error!(Corrupt, "socket: no descriptor came")) };
    let answers = Socket::of(answers)?;
    let taken = take(&message, files, device, &answers);
    match &taken {
        Ok(_) => answers.forget(),
        Err(refusal) => answers.answer(refusal.status as u8),
    }
    taken
}

/// The tensor, if it is not refused: then it answers when it is released.
fn take(message: &Message, mut files: Vec<Descriptor>, device: Device, answers: &Socket) -> Result<Outputs> {
    match (device, &message.place) {
        (Device::Cpu, None) => {
            let Some(memory) = files.pop() else { return Err(error!(Corrupt, "socket: no memory came")) };
            let memory = Sealed::received(memory, message.bytes)?;
            // SAFETY: the answers are given up where this is called, when it succeeds.
            let owner = || unsafe { memory.into_owner(answers.number()) };
            Outputs::over_made(owner, Device::Cpu, message.dtype, Shape::of(&message.shape), 1, 0)
        }
        (Device::Cuda(ordinal), Some(place)) => {
            let import = Import::of(message, place, &files, ordinal, answers)?;
            // SAFETY: the answers are given up where this is called, when it succeeds.
            unsafe { import.into_tensor(message, place, ordinal, answers.number()) }
        }
        (Device::Cpu, Some(_)) => Err(error!(InvalidArgument, "device: {device}; the tensor that was sent is on CUDA")),
        (Device::Cuda(_), None) => {
            Err(error!(InvalidArgument, "device: {device}; the tensor that was sent is on {}", Device::Cpu))
        }
    }
}
