//! Tensors that another process is to have, over a connected Unix socket of the caller's.
//!
//! - `socket`: bytes and descriptors, within a time;
//! - `message`: how a tensor is described to the other side, and what of such a description is believed;
//! - `sealed`: memory that the other side can map and nobody can make smaller.
//!
//! Two descriptors travel with a message: the memory, and a socket on which the receiver answers, once, with a byte: 0 when
//! it has released the tensor, or the status with which it refused it. That it is closed without a byte says that the
//! receiver has ended.

mod message;
mod sealed;
mod socket;

use std::time::Duration;

use crate::{
    cancel,
    error::{Result, Status, error, status_name},
    tensor::{Described, Device, Name, Outputs, Shape},
};

use message::Message;
use sealed::Sealed;
use socket::{Deadline, Descriptor, Socket};

pub use socket::BorrowedSocket;

/// What the receiver answers when it has released a tensor.
const RELEASED: u8 = Status::Ok as u8;

/// How long a call may wait.
pub struct Patience(Option<Duration>);

impl Patience {
    /// Negative: without end.
    pub fn of_milliseconds(milliseconds: i32) -> Self {
        Self(u64::try_from(milliseconds).ok().map(Duration::from_millis))
    }
}

/// The sender's side of a tensor that was sent.
pub struct Lease(Socket);

/// A tensor that can be sent: everything that can fail but for the socket has been done.
pub struct Parcel {
    message: Message,
    memory: Sealed,
    answers: Descriptor,
    lease: Lease,
}

impl Parcel {
    /// A copy of a tensor of the CPU, in C order.
    pub fn new(tensor: &Described<'_>) -> Result<Self> {
        let _delay = cancel::delay();
        let device = Device::from_dlpack(&Name::new("tensor"), tensor.tensor.device)?;
        if device != Device::Cpu {
            return Err(error!(UnsupportedDevice, "tensor: {device}; memory of the CPU is shared"));
        }
        let message = Message::of(tensor)?;
        let memory = Sealed::copy_of(tensor, message.bytes)?;
        let (lease, answers) = socket::pair()?;
        Ok(Self { message, memory, answers, lease: Lease(lease) })
    }

    pub fn send(self, socket: BorrowedSocket, patience: Patience) -> Result<Lease> {
        let _delay = cancel::delay();
        let descriptors = [self.memory.descriptor(), &self.answers];
        socket.send(&self.message.encoded(), descriptors, Deadline::after(patience.0))?;
        Ok(self.lease)
    }
}

impl Lease {
    /// Waits until the receiver has released the tensor.
    pub fn wait(&self, patience: Patience) -> Result<()> {
        let _delay = cancel::delay();
        match self.0.peek(Deadline::after(patience.0))? {
            Some(RELEASED) => Ok(()),
            Some(code) => {
                let name = status_name(code.into()).to_string_lossy();
                Err(error!(Share, "lease: the receiver refused the tensor: {name} ({code})"))
            }
            None => Err(error!(Share, "lease: the receiver ended without releasing the tensor")),
        }
    }
}

/// The tensor that comes next.
pub fn receive(socket: BorrowedSocket, device: Device, patience: Patience) -> Result<Outputs> {
    let _delay = cancel::delay();
    let mut incoming = socket.incoming(Deadline::after(patience.0));
    let message = Message::receive(&mut incoming)?;
    let [memory, answers] = incoming.descriptors()?;
    let answers = Socket::of(answers)?;
    let shape = Shape::of(&message.shape);
    let taken = take(&message, memory, device).and_then(|memory| {
        // SAFETY: the answers are given up where this is called, below.
        let owner = || unsafe { memory.into_owner(answers.number()) };
        Outputs::over_made(owner, Device::Cpu, message.dtype, shape, 1, 0)
    });
    match &taken {
        Ok(_) => answers.forget(),
        Err(refusal) => answers.answer(refusal.status as u8),
    }
    taken
}

/// The memory of a tensor that is not refused.
fn take(message: &Message, memory: Descriptor, device: Device) -> Result<Sealed> {
    if device != Device::Cpu {
        return Err(error!(InvalidArgument, "device: {device}; the tensor that was sent is on {}", Device::Cpu));
    }
    Sealed::received(memory, message.bytes)
}
