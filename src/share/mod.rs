//! Sharing of tensors with another process, over a connected Unix socket of the caller.
//!
//! - `socket`: sends and receives bytes and descriptors, with a deadline;
//! - `message`: describes a tensor to the other side, and checks a description from there;
//! - `sealed`: CPU memory that the other side can map and that cannot shrink;
//! - `device`: CUDA memory that both sides share.
//!
//! A message carries descriptors: the memory's, if it is one file or several, and last a socket for the receiver's
//! answer. The answer is one byte: 0 after the tensor's release, or the status with which the receiver refused the
//! tensor. If the socket is closed without an answer, the receiver has ended.

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

/// Answer of a receiver that has released a tensor.
const RELEASED: u8 = Status::Ok as u8;

/// Sender's side of a tensor that was sent.
pub struct Lease {
    /// Socket for the answer; None: moved to the list of sent memory.
    socket: Option<Socket>,
    sent: Option<Sent>,
}

/// Tensor that is ready to be sent, with its message.
pub struct Parcel {
    text: Vec<u8>,
    /// Descriptors of the memory, and last of the socket for the answer.
    files: Vec<Descriptor>,
    lease: Lease,
}

impl Parcel {
    /// Makes a parcel: on the CPU of a copy in C order; on CUDA of the tensor's memory, or of a copy in new memory.
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
            sent.finish();
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

    /// Gives up the lease without a wait: memory of this library is then never freed.
    pub fn give_up(mut self) {
        if let (Some(sent), Some(socket)) = (self.sent.take(), self.socket.take()) {
            sent.keep_for_ever(socket);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let (Some(sent), Some(socket)) = (&self.sent, self.socket.take()) {
            sent.release_lease(socket);
        }
    }
}

/// Receives the next tensor.
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

/// Makes the tensor of a message, or refuses it. The tensor's release sends the answer.
fn take(message: &Message, mut files: Vec<Descriptor>, device: Device, answers: &Socket) -> Result<Outputs> {
    match (device, &message.place) {
        (Device::Cpu, None) => {
            let Some(memory) = files.pop() else { return Err(error!(Corrupt, "socket: no memory came")) };
            let memory = Sealed::received(memory, message.bytes)?;
            // SAFETY: if this succeeds, `receive` gives up its ownership of `answers`.
            let owner = || unsafe { memory.into_owner(answers.number()) };
            Outputs::over_lazy(owner, Device::Cpu, message.dtype, Shape::of(&message.shape), 1, 0)
        }
        (Device::Cuda(ordinal), Some(place)) => {
            let import = Import::of(message, place, &files, ordinal, answers)?;
            // SAFETY: if this succeeds, `receive` gives up its ownership of `answers`.
            unsafe { import.into_tensor(message, place, ordinal, answers.number()) }
        }
        (Device::Cpu, Some(_)) => Err(error!(InvalidArgument, "device: {device}; the tensor that was sent is on CUDA")),
        (Device::Cuda(_), None) => {
            Err(error!(InvalidArgument, "device: {device}; the tensor that was sent is on {}", Device::Cpu))
        }
    }
}
