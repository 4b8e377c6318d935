//! Bytes and descriptors over a socket, within a time. A signal that comes meanwhile ends nothing.

use std::{
    ffi::{c_int, c_void},
    fmt::Write,
    fs::File,
    io::{self, Read},
    mem::{self, MaybeUninit},
    os::fd::RawFd,
    ptr,
    time::{Duration, Instant},
};

use crate::ffi::error::{Result, Status, error};

use super::cuda::Sender;

/// The most descriptors that come with a message.
pub const MOST_DESCRIPTORS: usize = 4097;

/// As many as the system takes at once.
const DESCRIPTORS_AT_ONCE: usize = 253;

/// An open descriptor that is nobody else's.
pub struct Descriptor(RawFd);

impl Descriptor {
    /// # Safety
    /// It is open, and nobody else closes it.
    pub unsafe fn of(number: RawFd) -> Self {
        Self(number)
    }

    pub fn number(&self) -> RawFd {
        self.0
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: open, and given up here.
        unsafe { libc::close(self.0) };
    }
}

/// When a call gives up. None: never.
#[derive(Clone, Copy)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// Negative: never.
    pub fn after(milliseconds: i32) -> Self {
        // What is too far away for a clock is never.
        let left = u64::try_from(milliseconds).ok().map(Duration::from_millis);
        Self(left.and_then(|left| Instant::now().checked_add(left)))
    }

    /// Milliseconds that poll() may wait: rounded up, so that it does not come back too early again and again.
    fn left(self) -> c_int {
        let Some(end) = self.0 else { return -1 };
        let left = end.saturating_duration_since(Instant::now());
        c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
    }
}

/// Room for what comes beside bytes, aligned as the kernel wants it. A socket may be set up to tell who sends, too.
#[repr(C)]
union Control {
    header: libc::cmsghdr,
    room: [u8; CONTROL],
}

impl Control {
    const EMPTY: Self = Self { room: [0; CONTROL] };
}

/// Beside bytes: a descriptor of the process that sends.
const SCM_PIDFD: c_int = 4;

/// What `CMSG_SPACE` says for descriptors.
const fn control(descriptors: usize) -> usize {
    // SAFETY: CMSG_SPACE() computes a size and touches no memory.
    unsafe { libc::CMSG_SPACE((descriptors * size_of::<RawFd>()) as u32) as usize }
}

const CONTROL: usize = control(DESCRIPTORS_AT_ONCE) + 256;

/// A message of one piece, with so much room for what travels along.
fn message(piece: &mut libc::iovec, control: &mut Control, room: usize) -> libc::msghdr {
    // SAFETY: zeros are a message of nothing.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = piece;
    message.msg_iovlen = 1;
    message.msg_control = ptr::from_mut(control).cast();
    message.msg_controllen = room as _;
    message
}

/// A stream socket of the caller's: it stays open during the call, and its flags are left alone.
#[derive(Clone, Copy)]
pub struct BorrowedSocket(RawFd);

impl BorrowedSocket {
    pub fn new(descriptor: c_int) -> Result<Self> {
        let socket = Self(descriptor);
        let (domain, kind) = (socket.option(libc::SO_DOMAIN)?, socket.option(libc::SO_TYPE)?);
        if (domain, kind) != (libc::AF_UNIX, libc::SOCK_STREAM) {
            return Err(error!(
                InvalidArgument,
                "socket: {descriptor} is of domain {domain} and type {kind}; AF_UNIX {} and SOCK_STREAM {} expected",
                libc::AF_UNIX,
                libc::SOCK_STREAM
            ));
        }
        Ok(socket)
    }

    fn option(self, name: c_int) -> Result<c_int> {
        let (mut value, mut size) = (0 as c_int, size_of::<c_int>() as libc::socklen_t);
        // SAFETY: room for an int, whose size is told; any number may be asked about.
        let code =
            unsafe { libc::getsockopt(self.0, libc::SOL_SOCKET, name, ptr::from_mut(&mut value).cast(), &mut size) };
        match code {
            0 => Ok(value),
            _ => Err(error!(InvalidArgument, "socket: {}: {}", self.0, io::Error::last_os_error())),
        }
    }

    /// Waits until it is ready for something, or closed, or broken.
    fn wait(self, events: i16, deadline: Deadline, what: &str) -> Result<()> {
        loop {
            let mut poll = libc::pollfd { fd: self.0, events, revents: 0 };
            // SAFETY: one that outlives the call.
            match unsafe { libc::poll(&mut poll, 1, deadline.left()) } {
                0 if deadline.left() == 0 => return Err(error!(Timeout, "socket: {what} in time")),
                0 => {}
                count if count > 0 => return Ok(()),
                _ => match io::Error::last_os_error() {
                    failure if failure.kind() == io::ErrorKind::Interrupted => {}
                    failure => return Err(error!(Share, "poll: {failure}")),
                },
            }
        }
    }

    /// Sends bytes, and descriptors beside the first of them: there are more bytes than it takes turns to send these.
    pub fn send(self, mut bytes: &[u8], mut descriptors: &[RawFd], deadline: Deadline) -> Result<()> {
        while !bytes.is_empty() {
            let numbers = &descriptors[..descriptors.len().min(DESCRIPTORS_AT_ONCE)];
            // With all but the last of them a byte.
            let length = if numbers.len() < descriptors.len() { 1 } else { bytes.len() };
            let sent = self.send_piece(&bytes[..length], numbers, deadline)?;
            (bytes, descriptors) = (&bytes[sent..], &descriptors[numbers.len()..]);
        }
        Ok(())
    }

    /// Sends some of the bytes, at least one, with all of the descriptors; tells how many.
    fn send_piece(self, bytes: &[u8], numbers: &[RawFd], deadline: Deadline) -> Result<usize> {
        let mut control = Control::EMPTY;
        loop {
            let mut piece = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
            let mut message = message(&mut piece, &mut control, self::control(numbers.len()));
            if numbers.is_empty() {
                (message.msg_control, message.msg_controllen) = (ptr::null_mut(), 0);
            } else {
                // SAFETY: the message has room for one such header with so many descriptors.
                unsafe {
                    let header = libc::CMSG_FIRSTHDR(&message);
                    (*header).cmsg_level = libc::SOL_SOCKET;
                    (*header).cmsg_type = libc::SCM_RIGHTS;
                    (*header).cmsg_len = libc::CMSG_LEN(size_of_val(numbers) as u32) as _;
                    let to = libc::CMSG_DATA(header);
                    ptr::copy_nonoverlapping(numbers.as_ptr().cast::<u8>(), to, size_of_val(numbers));
                }
            }
            // SAFETY: a message whose parts outlive the call, and which is only read.
            let sent = unsafe { libc::sendmsg(self.0, &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
            match usize::try_from(sent) {
                Ok(sent) => return Ok(sent.min(bytes.len())),
                Err(_) => {
                    self.wait_after(libc::POLLOUT, deadline, "sendmsg", "the other side did not take the message")?
                }
            }
        }
    }

    /// After a call that failed: waits if that was for want of room or of bytes.
    fn wait_after(self, events: i16, deadline: Deadline, call: &str, what: &str) -> Result<()> {
        match io::Error::last_os_error() {
            failure if failure.kind() == io::ErrorKind::Interrupted => Ok(()),
            // Also where it was ready a moment ago, so that nobody is kept waiting by what never comes.
            failure if failure.kind() == io::ErrorKind::WouldBlock => match deadline.left() {
                0 => Err(error!(Timeout, "socket: {what} in time")),
                _ => self.wait(events, deadline, what),
            },
            failure => Err(error!(Share, "socket: {call}: {failure}")),
        }
    }

    /// What is to come. Nothing fails between the parts of a message: there is room for all descriptors, or none of them is
    /// kept, and the message is refused when all of it has come.
    pub fn incoming(self, deadline: Deadline) -> Incoming {
        let mut found = Vec::new();
        let has_room = found.try_reserve_exact(MOST_DESCRIPTORS).is_ok();
        Incoming { socket: self, deadline, has_begun: false, has_room, found, last: None, cut: false }
    }
}

/// What comes by a socket: bytes as they are asked for, and the descriptors that have come with them.
pub struct Incoming {
    socket: BorrowedSocket,
    deadline: Deadline,
    /// Whether some bytes have come.
    has_begun: bool,
    /// Whether there is memory for what is kept of a message.
    has_room: bool,
    found: Vec<Descriptor>,
    /// The last of those that are too many, or for which there is no memory.
    last: Option<Descriptor>,
    /// Some did not come, for want of room here or of numbers in this process.
    cut: bool,
}

impl Incoming {
    /// Fills all of it.
    pub fn read(&mut self, mut bytes: &mut [u8]) -> Result<()> {
        while !bytes.is_empty() {
            let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            let mut control = Control::EMPTY;
            let mut message = message(&mut piece, &mut control, size_of::<Control>());
            let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
            // SAFETY: a message whose parts are written to, and outlive the call.
            let received = unsafe { libc::recvmsg(self.socket.0, &mut message, flags) };
            let Ok(received) = usize::try_from(received) else {
                self.socket.wait_after(libc::POLLIN, self.deadline, "recvmsg", "no whole message came")?;
                continue;
            };
            // SAFETY: the kernel has filled it in.
            unsafe { self.keep_descriptors(&message) };
            if received == 0 {
                return Err(match self.has_begun {
                    false => error!(Share, "socket: the other side has closed it, and no message came"),
                    true => error!(Share, "socket: the other side has closed it within a message"),
                });
            }
            self.has_begun = true;
            bytes = &mut bytes[received..];
        }
        Ok(())
    }

    /// # Safety
    /// recvmsg() has filled the message in, and nobody has taken its descriptors.
    unsafe fn keep_descriptors(&mut self, message: &libc::msghdr) {
        self.cut |= message.msg_flags & libc::MSG_CTRUNC != 0;
        // SAFETY: recvmsg() wrote headers, each within the room, and behind one of rights new descriptors of this process.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(message);
            while !header.is_null() {
                let (level, kind) = ((*header).cmsg_level, (*header).cmsg_type);
                if level == libc::SOL_SOCKET && (kind == libc::SCM_RIGHTS || kind == SCM_PIDFD) {
                    let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                    let numbers = libc::CMSG_DATA(header).cast::<RawFd>();
                    for index in 0..bytes / size_of::<RawFd>() {
                        let descriptor = Descriptor::of(numbers.add(index).read_unaligned());
                        // What is not wanted is closed here.
                        match kind {
                            libc::SCM_RIGHTS if self.has_room && self.found.len() < MOST_DESCRIPTORS => {
                                self.found.push(descriptor);
                            }
                            libc::SCM_RIGHTS => self.last = Some(descriptor),
                            _ => {}
                        }
                    }
                }
                header = libc::CMSG_NXTHDR(message, header);
            }
        }
    }

    /// Refuses the message, once all of it has arrived, because a list for it could not be allocated.
    pub fn refuse_for_memory(&mut self) {
        self.has_room = false;
    }

    /// Those of a message, when all of it has come.
    pub fn descriptors(self, expected: usize) -> Result<Vec<Descriptor>> {
        if !self.has_room {
            // The sender is told, as it is of other refusals.
            if let Some(answers) = self.last.and_then(|last| Socket::of(last).ok()) {
                answers.answer(Status::OutOfMemory as u8);
            }
            return Err(error!(OutOfMemory, "cannot allocate lists of what comes with a message"));
        }
        let found = self.found.len();
        if self.cut && found < expected {
            return Err(error!(Share, "socket: {found} of {expected} descriptors came (RLIMIT_NOFILE)"));
        }
        if found != expected || self.last.is_some() || self.cut {
            let more = if self.last.is_some() || self.cut { " and more" } else { "" };
            return Err(error!(
                Corrupt,
                "socket: {found}{more} descriptors came with the message; {expected} expected"
            ));
        }
        Ok(self.found)
    }
}

/// A socket of this library's: one end of a pair, made here or by the other side.
pub struct Socket(Descriptor);

/// Two ends: one that is kept and one that travels.
pub fn pair() -> Result<(Socket, Descriptor)> {
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0, ends.as_mut_ptr()) } != 0 {
        return Err(error!(Share, "socketpair: {}", io::Error::last_os_error()));
    }
    // SAFETY: both are new and nobody else's.
    let [kept, travels] = ends.map(|end| unsafe { Descriptor::of(end) });
    // A stranger's urgent byte is an answer like others: poll() would speak of it, and recv() not.
    let one: c_int = 1;
    let size = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: an int, whose size is told.
    unsafe {
        libc::setsockopt(kept.number(), libc::SOL_SOCKET, libc::SO_OOBINLINE, ptr::from_ref(&one).cast(), size);
    }
    Ok((Socket(kept), travels))
}

/// What tells sockets apart, as long as they are open.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Identity(libc::dev_t, libc::ino_t);

impl Identity {
    pub fn of(descriptor: RawFd) -> Result<Self> {
        let mut about = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: room for what is said of it; any number may be asked about.
        if unsafe { libc::fstat(descriptor, about.as_mut_ptr()) } != 0 {
            return Err(error!(Share, "fstat: {}", io::Error::last_os_error()));
        }
        // SAFETY: it was written.
        let about = unsafe { about.assume_init() };
        Ok(Self(about.st_dev, about.st_ino))
    }
}

/// The process that made a socket's other end: zeros where the kernel does not show it here.
pub fn sender(answers: RawFd) -> Sender {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` and `size` outlive the call, and `size` is that of `peer`.
    unsafe {
        libc::getsockopt(answers, libc::SOL_SOCKET, libc::SO_PEERCRED, ptr::from_mut(&mut peer).cast(), &mut size);
    }
    let process = peer.pid.max(0) as u32;
    Sender { process, started: started(process).unwrap_or(0) }
}

/// When a process began, in ticks since the machine did.
fn started(process: u32) -> Option<u64> {
    let mut path = arrayvec::ArrayString::<32>::new();
    write!(path, "/proc/{process}/stat").ok()?;
    let (mut text, mut length) = ([0; 1024], 0);
    let mut file = File::open(path.as_str()).ok()?;
    while let Some(room) = text.get_mut(length..).filter(|room| !room.is_empty()) {
        match file.read(room).ok()? {
            0 => break,
            more => length += more,
        }
    }
    // Behind the name in parentheses, which may have anything in it, the state is field 3 and the start field 22.
    let behind = text[..length].rsplit(|&byte| byte == b')').next()?;
    std::str::from_utf8(behind).ok()?.split_ascii_whitespace().nth(19)?.parse().ok()
}

impl Socket {
    /// One that came with a message.
    pub fn of(descriptor: Descriptor) -> Result<Self> {
        match BorrowedSocket::new(descriptor.number()) {
            Ok(_) => Ok(Self(descriptor)),
            Err(refusal) => Err(error!(Corrupt, "socket: the last descriptor of the message: {}", refusal.message)),
        }
    }

    pub fn number(&self) -> RawFd {
        self.0.number()
    }

    /// Gives it up to whoever has its number.
    pub fn forget(self) {
        mem::forget(self.0);
    }

    /// Tells the sender. It may be gone, or not listen.
    pub fn answer(&self, byte: u8) {
        answer(self.0.number(), byte);
    }

    /// The byte that was answered; None if the other side ended without one. It stays there.
    pub fn peek(&self, deadline: Deadline) -> Result<Option<u8>> {
        peek(self.0.number(), deadline)
    }
}

/// The same, of a socket by its number.
pub fn peek(number: RawFd, deadline: Deadline) -> Result<Option<u8>> {
    let socket = BorrowedSocket(number);
    let mut byte = MaybeUninit::<u8>::uninit();
    loop {
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: room for a byte.
        match unsafe { libc::recv(socket.0, byte.as_mut_ptr().cast::<c_void>(), 1, flags) } {
            0 => return Ok(None),
            // SAFETY: it was written.
            1 => return Ok(Some(unsafe { byte.assume_init() })),
            _ => match io::Error::last_os_error() {
                failure if failure.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                _ => socket.wait_after(libc::POLLIN, deadline, "recv", "the tensor was not released")?,
            },
        }
    }
}

/// Sends a byte to whoever listens, without waiting and without a signal.
pub fn answer(descriptor: RawFd, byte: u8) {
    // SAFETY: `byte` outlives the call, and is as long as is said.
    unsafe { libc::send(descriptor, ptr::from_ref(&byte).cast(), 1, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_number_and_by_when_it_began() {
        let (kept, travels) = pair().unwrap();
        let by = sender(travels.number());
        assert_eq!(by.process, std::process::id());
        assert!(by.started > 0 && sender(kept.number()) == by);
        assert_ne!(started(1), Some(by.started));
        assert_eq!(started(u32::MAX), None);
    }
}
