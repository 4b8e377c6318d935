//! CPU memory in a file without a name, which can be sent. The file then neither shrinks nor grows, so a process that
//! maps it finds all of its bytes. An untrusted sender may still write to it.

use std::{
    ffi::{c_int, c_void},
    io,
    mem::MaybeUninit,
    os::fd::RawFd,
    process, ptr,
};

use crate::{
    dlpack::{Described, Device, Owner},
    ffi::error::{Result, error},
};

use super::{
    RELEASED,
    message::{copy, sizes_of},
    socket::{self, Descriptor},
};

const SEALS: c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
/// MFD_NOEXEC_SEAL, which newer systems expect for files that are not programs: the file cannot be executed.
const NO_PROGRAM: u32 = 8;
const F_SEAL_EXEC: c_int = 0x20;
/// Error codes of a system that has no pages left, or none for this process.
const FULL: [c_int; 3] = [libc::ENOMEM, libc::ENOSPC, libc::EFBIG];
/// Bytes that one call allocates: on older systems, a signal undoes everything that a call has allocated.
const PIECE: i64 = 64 << 20;

/// File of a fixed size and its mapping, which is NULL if the file is not mapped or is empty.
pub struct Sealed {
    file: Descriptor,
    mapped: Mapped,
}

impl Sealed {
    /// Copies the elements of a CPU tensor to a new file, in C order. `bytes`: their size.
    pub fn copy_of(tensor: &Described<'_>, bytes: i64) -> Result<Self> {
        let create = |more: libc::c_uint| {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | more;
            // glibc has memfd_create() only since 2.27: with an older one, the library could not be loaded.
            // SAFETY: memfd_create takes a name that ends with a NUL, and flags. The descriptor it returns is an int.
            unsafe { libc::syscall(libc::SYS_memfd_create, c"gradcodec".as_ptr(), flags) as libc::c_int }
        };
        let mut file = create(NO_PROGRAM);
        if file < 0 {
            file = create(0); // the system does not support NO_PROGRAM
        }
        if file < 0 {
            return Err(error!(Share, "memfd_create: {}", io::Error::last_os_error()));
        }
        // SAFETY: the descriptor is new, and nothing else owns it.
        let file = unsafe { Descriptor::of(file) };
        if bytes > 0 {
            // The system gives files more pages than it has, and kills processes for it. It refuses private memory at
            // once if it can never have as many pages.
            drop(Mapped::anonymous(bytes)?);
            // The pages are allocated here, where a failure can be reported.
            let mut at = 0;
            while at < bytes {
                let piece = PIECE.min(bytes - at);
                // SAFETY: `file` is an open descriptor; the range is not negative.
                match unsafe { libc::fallocate(file.number(), 0, at, piece) } {
                    0 => at += piece,
                    _ => match io::Error::last_os_error() {
                        failure if failure.kind() == io::ErrorKind::Interrupted => {}
                        failure if failure.raw_os_error().is_some_and(|code| FULL.contains(&code)) => {
                            return Err(error!(OutOfMemory, "cannot allocate {bytes} bytes to share: {failure}"));
                        }
                        failure => return Err(error!(Share, "fallocate of {bytes} bytes to share: {failure}")),
                    },
                }
            }
        }
        let mapped = Mapped::new(&file, bytes)?;
        // SAFETY: the mapping has `bytes` bytes, the size of the elements in C order.
        unsafe { copy(tensor, &sizes_of(tensor)?, Device::Cpu, mapped.data)? };
        drop(mapped);
        // SAFETY: `file` is an open descriptor.
        if unsafe { libc::fcntl(file.number(), libc::F_ADD_SEALS, SEALS) } != 0 {
            return Err(error!(Share, "F_ADD_SEALS: {}", io::Error::last_os_error()));
        }
        Ok(Self { file, mapped: Mapped::NOTHING })
    }

    /// Checks and maps a file that another process has sent as sealed memory.
    pub fn received(file: Descriptor, bytes: i64) -> Result<Self> {
        // SAFETY: `file` is an open descriptor.
        let seals = unsafe { libc::fcntl(file.number(), libc::F_GET_SEALS) };
        // Without seals, no other call is made on the file: its file system may be the sender's and never answer.
        if seals & !F_SEAL_EXEC != SEALS {
            return Err(error!(
                Corrupt,
                "socket: memory with seals {seals:#x} came for {bytes} bytes; {SEALS:#x} expected"
            ));
        }
        let mut about = MaybeUninit::<libc::stat>::uninit();
        let mut system = MaybeUninit::<libc::statfs>::uninit();
        // SAFETY: `file` is an open descriptor, `about` and `system` outlive the calls, and are read after both have
        // succeeded.
        let (access, about, system) = unsafe {
            if libc::fstat(file.number(), about.as_mut_ptr()) != 0
                || libc::fstatfs(file.number(), system.as_mut_ptr()) != 0
            {
                return Err(error!(Share, "fstat, fstatfs: {}", io::Error::last_os_error()));
            }
            let access = libc::fcntl(file.number(), libc::F_GETFL) & libc::O_ACCMODE;
            (access, about.assume_init(), system.assume_init())
        };
        let size = about.st_size;
        // A huge page may be missing when it is accessed.
        let of_large_pages = system.f_type == libc::HUGETLBFS_MAGIC;
        if access != libc::O_RDWR || size != bytes || of_large_pages {
            return Err(error!(
                Corrupt,
                "socket: memory of {size} bytes with access {access} came; {bytes} bytes and access {} expected, of pages \
                 of the usual size",
                libc::O_RDWR
            ));
        }
        // A read of a missing page allocates it for the reader. A sender may still remove pages.
        let allocated = about.st_blocks.saturating_mul(512);
        if allocated < bytes {
            return Err(error!(Corrupt, "socket: memory of {bytes} bytes came, of which {allocated} are allocated"));
        }
        let mapped = Mapped::new(&file, bytes)?;
        Ok(Self { file, mapped })
    }

    pub fn into_descriptor(self) -> Descriptor {
        self.file
    }

    /// Makes the owner of a tensor's memory. The tensor's release sends the answer.
    ///
    /// # Safety
    /// `answers` is an open socket, whose ownership the caller gives up.
    pub unsafe fn into_owner(self, answers: RawFd) -> Owner {
        let Mapped { data, bytes } = self.mapped;
        std::mem::forget(self.mapped);
        // A forked child that releases its tensor sends no answer, since this process may still use the tensor.
        let process_and_socket = (process::id() as usize) << 32 | answers as usize;
        let words = [ptr::without_provenance_mut(bytes as usize), ptr::without_provenance_mut(process_and_socket)];
        // SAFETY: nothing else releases the mapping and the socket; `release` may be called on any thread.
        unsafe { Owner::new(data, words, release) }
    }
}

/// # Safety
/// Called once, with the data and the words of the owner that `into_owner` made.
unsafe fn release(data: *mut u8, [bytes, process_and_socket]: [*mut c_void; 2]) {
    drop(Mapped { data, bytes: bytes.addr() as i64 });
    let (process, descriptor) = ((process_and_socket.addr() >> 32) as u32, process_and_socket.addr() as u32 as RawFd);
    if process == process::id() {
        socket::answer(descriptor, RELEASED);
    }
    // SAFETY: the descriptor is open, and `into_owner` took its ownership only for this.
    drop(unsafe { Descriptor::of(descriptor) });
}

/// Mapping of a file, or of anonymous memory.
struct Mapped {
    data: *mut u8,
    bytes: i64,
}

impl Mapped {
    const NOTHING: Self = Self { data: ptr::null_mut(), bytes: 0 };

    fn new(file: &Descriptor, bytes: i64) -> Result<Self> {
        if bytes == 0 { Ok(Self::NOTHING) } else { Self::map(libc::MAP_SHARED, file.number(), bytes) }
    }

    fn anonymous(bytes: i64) -> Result<Self> {
        Self::map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, bytes)
    }

    fn map(flags: c_int, file: RawFd, bytes: i64) -> Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the system's choice replaces nothing; a file has `bytes` bytes.
        let data = unsafe { libc::mmap(ptr::null_mut(), bytes as usize, protection, flags, file, 0) };
        match data == libc::MAP_FAILED {
            false => Ok(Self { data: data.cast(), bytes }),
            true => Err(error!(OutOfMemory, "cannot map {bytes} bytes: {}", io::Error::last_os_error())),
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: the mapping has this size, and nothing uses it any more.
            unsafe { libc::munmap(self.data.cast(), self.bytes as usize) };
        }
    }
}
