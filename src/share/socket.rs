//! Bytes and descriptors over a socket, with a deadline. A signal does not end a call.

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

/// Maximum number of descriptors of a message.
pub const MOST_DESCRIPTORS: usize = 4097;

/// Maximum number of descriptors that the system accepts in one call.
const DESCRIPTORS_AT_ONCE: usize = 253;

/// Open descriptor that nothing else owns.
pub struct Descriptor(RawFd);

impl Descriptor {
    /// # Safety
    /// `number` is open, and nothing else closes it.
    pub unsafe fn of(number: RawFd) -> Self {
        Self(number)
    }

    pub fn number(&self) -> RawFd {
        self.0
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor is open, and nothing uses it afterwards.
        unsafe { libc::close(self.0) };
    }
}

/// Time at which a call gives up; None: never.
#[derive(Clone, Copy)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// Returns the deadline after this time; a negative time means never.
    pub fn after(milliseconds: i32) -> Self {
        // A time that the clock cannot represent means never.
        let left = u64::try_from(milliseconds).ok().map(Duration::from_millis);
        Self(left.and_then(|left| Instant::now().checked_add(left)))
    }

    /// Returns the milliseconds that poll() may wait, rounded up so that it does not return too early again and again.
    fn left(self) -> c_int {
        let Some(end) = self.0 else { return -1 };
        let left = end.saturating_duration_since(Instant::now());
        c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX)
    }
}

/// Room for control messages, aligned as the kernel requires. A socket may also be set up to report the sender.
#[repr(C)]
union Control {
    header: libc::cmsghdr,
    room: [u8; CONTROL],
}

impl Control {
    const EMPTY: Self = Self { room: [0; CONTROL] };
}

/// Type of a control message with a descriptor of the sending process.
const SCM_PIDFD: c_int = 4;

/// Returns `CMSG_SPACE` for descriptors.
const fn control(descriptors: usize) -> usize {
    // SAFETY: CMSG_SPACE() computes a size and touches no memory.
    unsafe { libc::CMSG_SPACE((descriptors * size_of::<RawFd>()) as u32) as usize }
}

const CONTROL: usize = control(DESCRIPTORS_AT_ONCE) + 256;

/// Makes a message of one piece, with `room` bytes for control messages.
fn message(piece: &mut libc::iovec, control: &mut Control, room: usize) -> libc::msghdr {
    // SAFETY: zeros are a valid message without content.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = piece;
    message.msg_iovlen = 1;
    message.msg_control = ptr::from_mut(control).cast();
    message.msg_controllen = room as _;
    message
}

/// Stream socket of the caller. It stays open during the call, and its flags are not changed.
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
        // SAFETY: `value` has room for an int, whose size is passed; any descriptor number is allowed.
        let code =
            unsafe { libc::getsockopt(self.0, libc::SOL_SOCKET, name, ptr::from_mut(&mut value).cast(), &mut size) };
        match code {
            0 => Ok(value),
            _ => Err(error!(InvalidArgument, "socket: {}: {}", self.0, io::Error::last_os_error())),
        }
    }

    /// Waits until the socket is ready for `events`, closed or broken.
    fn wait(self, events: i16, deadline: Deadline, what: &str) -> Result<()> {
        loop {
            let mut poll = libc::pollfd { fd: self.0, events, revents: 0 };
            // SAFETY: `poll` is one pollfd and outlives the call.
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

    /// Sends bytes, and descriptors with the first bytes. There must be more bytes than calls for the descriptors.
    pub fn send(self, mut bytes: &[u8], mut descriptors: &[RawFd], deadline: Deadline) -> Result<()> {
        while !bytes.is_empty() {
            let numbers = &descriptors[..descriptors.len().min(DESCRIPTORS_AT_ONCE)];
            // All calls for descriptors but the last send one byte.
            let length = if numbers.len() < descriptors.len() { 1 } else { bytes.len() };
            let sent = self.send_piece(&bytes[..length], numbers, deadline)?;
            (bytes, descriptors) = (&bytes[sent..], &descriptors[numbers.len()..]);
        }
        Ok(())
    }

    /// Sends at least one of the bytes, with all of the descriptors. Returns the number of bytes sent.
    fn send_piece(self, bytes: &[u8], numbers: &[RawFd], deadline: Deadline) -> Result<usize> {
        let mut control = Control::EMPTY;
        loop {
            let mut piece = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
            let mut message = message(&mut piece, &mut control, self::control(numbers.len()));
            if numbers.is_empty() {
                (message.msg_control, message.msg_controllen) = (ptr::null_mut(), 0);
            } else {
                // SAFETY: the message has room for one header with all of `numbers`.
                unsafe {
                    let header = libc::CMSG_FIRSTHDR(&message);
                    (*header).cmsg_level = libc::SOL_SOCKET;
                    (*header).cmsg_type = libc::SCM_RIGHTS;
                    (*header).cmsg_len = libc::CMSG_LEN(size_of_val(numbers) as u32) as _;
                    let to = libc::CMSG_DATA(header);
                    ptr::copy_nonoverlapping(numbers.as_ptr().cast::<u8>(), to, size_of_val(numbers));
                }
            }
            // SAFETY: the parts of the message outlive the call and are only read.
            let sent = unsafe { libc::sendmsg(self.0, &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
            match usize::try_from(sent) {
                Ok(sent) => return Ok(sent.min(bytes.len())),
                Err(_) => {
                    self.wait_after(libc::POLLOUT, deadline, "sendmsg", "the other side did not take the message")?
                }
            }
        }
    }

    /// Waits after a call that failed for lack of room or of bytes.
    fn wait_after(self, events: i16, deadline: Deadline, call: &str, what: &str) -> Result<()> {
        match io::Error::last_os_error() {
            failure if failure.kind() == io::ErrorKind::Interrupted => Ok(()),
            // The deadline counts even if the socket was just ready, so that a peer cannot prolong the wait.
            failure if failure.kind() == io::ErrorKind::WouldBlock => match deadline.left() {
                0 => Err(error!(Timeout, "socket: {what} in time")),
                _ => self.wait(events, deadline, what),
            },
            failure => Err(error!(Share, "socket: {call}: {failure}")),
        }
    }

    /// Begins to receive a message. No allocation can fail within a message: there is room for all descriptors, or none
    /// is kept and the message is refused after all of it has arrived.
    pub fn incoming(self, deadline: Deadline) -> Incoming {
        let mut found = Vec::new();
        let has_room = found.try_reserve_exact(MOST_DESCRIPTORS).is_ok();
        Incoming { socket: self, deadline, has_begun: false, has_room, found, last: None, cut: false }
    }
}

/// Message that is being received: its bytes are read on request, and the descriptors that arrive with them are kept.
pub struct Incoming {
    socket: BorrowedSocket,
    deadline: Deadline,
    /// True if some bytes have arrived.
    has_begun: bool,
    /// True if there is memory for the lists of a message.
    has_room: bool,
    found: Vec<Descriptor>,
    /// Last one of the descriptors that are too many, or for which there is no memory.
    last: Option<Descriptor>,
    /// True if descriptors were lost, for lack of room here or of free descriptor numbers in this process.
    cut: bool,
}

impl Incoming {
    /// Fills all of `bytes`.
    pub fn read(&mut self, mut bytes: &mut [u8]) -> Result<()> {
        while !bytes.is_empty() {
            let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            let mut control = Control::EMPTY;
            let mut message = message(&mut piece, &mut control, size_of::<Control>());
            let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
            // SAFETY: the parts of the message outlive the call and are writable.
            let received = unsafe { libc::recvmsg(self.socket.0, &mut message, flags) };
            let Ok(received) = usize::try_from(received) else {
                self.socket.wait_after(libc::POLLIN, self.deadline, "recvmsg", "no whole message came")?;
                continue;
            };
            // SAFETY: recvmsg() has filled in the message, and nothing owns its descriptors yet.
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
    /// recvmsg() has filled in the message, and nothing owns its descriptors yet.
    unsafe fn keep_descriptors(&mut self, message: &libc::msghdr) {
        self.cut |= message.msg_flags & libc::MSG_CTRUNC != 0;
        // SAFETY: recvmsg() wrote headers within the room, and after one of rights new descriptors of this process.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(message);
            while !header.is_null() {
                let (level, kind) = ((*header).cmsg_level, (*header).cmsg_type);
                if level == libc::SOL_SOCKET && (kind == libc::SCM_RIGHTS || kind == SCM_PIDFD) {
                    let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                    let numbers = libc::CMSG_DATA(header).cast::<RawFd>();
                    for index in 0..bytes / size_of::<RawFd>() {
                        let descriptor = Descriptor::of(numbers.add(index).read_unaligned());
                        // Descriptors that are not kept are closed here.
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

    /// Returns the descriptors of a message, after all of it has arrived.
    pub fn descriptors(self, expected: usize) -> Result<Vec<Descriptor>> {
        if !self.has_room {
            // The sender is notified, as of other refusals.
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

/// Socket of this library: one end of a pair, made here or by the other side.
pub struct Socket(Descriptor);

/// Makes a pair of sockets: one end to keep, and one to send.
pub fn pair() -> Result<(Socket, Descriptor)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0, ends.as_mut_ptr()) } != 0 {
        return Err(error!(Share, "socketpair: {}", io::Error::last_os_error()));
    }
    // SAFETY: both descriptors are new, and nothing else owns them.
    let [kept, travels] = ends.map(|end| unsafe { Descriptor::of(end) });
    // An urgent byte of an untrusted peer is an answer, too: otherwise poll() would report it, but not recv().
    let one: c_int = 1;
    let size = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: `one` is an int, whose size is passed.
    unsafe {
        libc::setsockopt(kept.number(), libc::SOL_SOCKET, libc::SO_OOBINLINE, ptr::from_ref(&one).cast(), size);
        // An untrusted receiver must not put descriptors here, whose close() may wait. Since Linux 6.16.
        const SO_PASSRIGHTS: c_int = 83;
        let zero: c_int = 0;
        libc::setsockopt(kept.number(), libc::SOL_SOCKET, SO_PASSRIGHTS, ptr::from_ref(&zero).cast(), size);
    }
    Ok((Socket(kept), travels))
}

/// Device and inode of a socket, which identify it as long as it is open.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Identity(libc::dev_t, libc::ino_t);

impl Identity {
    pub fn of(descriptor: RawFd) -> Result<Self> {
        let mut about = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: `about` has room for the result; any descriptor number is allowed.
        if unsafe { libc::fstat(descriptor, about.as_mut_ptr()) } != 0 {
            return Err(error!(Share, "fstat: {}", io::Error::last_os_error()));
        }
        // SAFETY: fstat() has succeeded and filled in `about`.
        let about = unsafe { about.assume_init() };
        Ok(Self(about.st_dev, about.st_ino))
    }
}

/// Returns the process that made a socket's other end; zeros if the kernel does not report it here.
pub fn sender(answers: RawFd) -> Sender {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` and `size` outlive the call, and `size` is the size of `peer`.
    unsafe {
        libc::getsockopt(answers, libc::SOL_SOCKET, libc::SO_PEERCRED, ptr::from_mut(&mut peer).cast(), &mut size);
    }
    let process = peer.pid.max(0) as u32;
    Sender { process, started: started(process).unwrap_or(0) }
}

/// Returns the start of a process, in clock ticks since the machine's start.
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
    // After the name in parentheses, which may contain anything, the state is field 3 and the start is field 22.
    let behind = text[..length].rsplit(|&byte| byte == b')').next()?;
    std::str::from_utf8(behind).ok()?.split_ascii_whitespace().nth(19)?.parse().ok()
}

impl Socket {
    /// Makes a socket of a descriptor that a message carried.
    pub fn of(descriptor: Descriptor) -> Result<Self> {
        match BorrowedSocket::new(descriptor.number()) {
            Ok(_) => {
                // The other side has nothing to send here. Descriptors that it has sent would be closed with the
                // socket, and their close() may wait. After the shutdown the kernel rejects new ones.
                let (number, mut queued) = (descriptor.number(), 0);
                // SAFETY: `queued` outlives the call.
                unsafe {
                    libc::shutdown(number, libc::SHUT_RD);
                    libc::ioctl(number, libc::FIONREAD, &mut queued);
                }
                match peek(number, Deadline::after(0)) {
                    Ok(None) if queued == 0 => Ok(Self(descriptor)),
                    _ => Err(error!(
                        Corrupt,
                        "socket: the last descriptor of the message: a connected socket without bytes to read expected"
                    )),
                }
            }
            Err(refusal) => Err(error!(Corrupt, "socket: the last descriptor of the message: {}", refusal.message)),
        }
    }

    pub fn number(&self) -> RawFd {
        self.0.number()
    }

    /// Gives up the descriptor to the owner of its number.
    pub fn forget(self) {
        mem::forget(self.0);
    }

    /// Sends an answer. The sender may have ended, or ignore it.
    pub fn answer(&self, byte: u8) {
        answer(self.0.number(), byte);
    }

    /// Returns the answer, which stays in the socket; None if the other side ended without one.
    pub fn peek(&self, deadline: Deadline) -> Result<Option<u8>> {
        peek(self.0.number(), deadline)
    }
}

/// Returns the answer on the socket with this number, like [`Socket::peek`].
pub fn peek(number: RawFd, deadline: Deadline) -> Result<Option<u8>> {
    let socket = BorrowedSocket(number);
    let mut byte = MaybeUninit::<u8>::uninit();
    loop {
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: `byte` has room for a byte.
        match unsafe { libc::recv(socket.0, byte.as_mut_ptr().cast::<c_void>(), 1, flags) } {
            0 => return Ok(None),
            // SAFETY: recv() has written the byte.
            1 => return Ok(Some(unsafe { byte.assume_init() })),
            _ => match io::Error::last_os_error() {
                failure if failure.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                _ => socket.wait_after(libc::POLLIN, deadline, "recv", "the tensor was not released")?,
            },
        }
    }
}

/// Sends an answer, without waiting and without a signal.
pub fn answer(descriptor: RawFd, byte: u8) {
    // SAFETY: `byte` outlives the call and is 1 byte long.
    unsafe { libc::send(descriptor, ptr::from_ref(&byte).cast(), 1, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_identified_by_its_number_and_start_time() {
        let (kept, travels) = pair().unwrap();
        let by = sender(travels.number());
        assert_eq!(by.process, std::process::id());
        assert!(by.started > 0 && sender(kept.number()) == by);
        assert_ne!(started(1), Some(by.started));
        assert_eq!(started(u32::MAX), None);
    }
}
