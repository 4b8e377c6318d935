//! Memory of the CPU in a file without a name, which can be sent, and then neither shrinks nor grows: whoever maps it finds
//! all of it there. A stranger may go on writing to it.

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
/// As newer systems want it of a file that is no program: it cannot become one.
const NO_PROGRAM: u32 = 8;
const F_SEAL_EXEC: c_int = 0x20;
/// What the system says when it has no pages left, or none for this process.
const FULL: [c_int; 3] = [libc::ENOMEM, libc::ENOSPC, libc::EFBIG];
/// What is allocated at once: on older systems a signal undoes all that a call has allocated.
const PIECE: i64 = 64 << 20;

/// A file of so many bytes, and where it is mapped: NULL if it is not, or has no byte.
pub struct Sealed {
    file: Descriptor,
    mapped: Mapped,
}

impl Sealed {
    /// The elements of a tensor of the CPU in C order, which are so many bytes.
    pub fn copy_of(tensor: &Described<'_>, bytes: i64) -> Result<Self> {
        let create = |more: libc::c_uint| {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | more;
            // Not the function of glibc, which came in 2.27: in an older one the library could not be loaded.
            // SAFETY: the call of this number takes a name that ends with a NUL, and flags. A descriptor is an int.
            unsafe { libc::syscall(libc::SYS_memfd_create, c"gradcodec".as_ptr(), flags) as libc::c_int }
        };
        let mut file = create(NO_PROGRAM);
        if file < 0 {
            file = create(0); // a system that does not know it
        }
        if file < 0 {
            return Err(error!(Share, "memfd_create: {}", io::Error::last_os_error()));
        }
        // SAFETY: it is new and nobody else's.
        let file = unsafe { Descriptor::of(file) };
        if bytes > 0 {
            // The system gives files more pages than it has, and ends processes for it; of memory that is nobody else's it
            // refuses at once what it can never have.
            drop(Mapped::anonymous(bytes)?);
            // Its pages are had here, where that may fail.
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
        // SAFETY: the mapping has `bytes` bytes, which is what the elements take in C order.
        unsafe { copy(tensor, &sizes_of(tensor)?, Device::Cpu, mapped.data)? };
        drop(mapped);
        // SAFETY: `file` is an open descriptor.
        if unsafe { libc::fcntl(file.number(), libc::F_ADD_SEALS, SEALS) } != 0 {
            return Err(error!(Share, "F_ADD_SEALS: {}", io::Error::last_os_error()));
        }
        Ok(Self { file, mapped: Mapped::NOTHING })
    }

    /// What another process says to be such a file.
    pub fn received(file: Descriptor, bytes: i64) -> Result<Self> {
        // SAFETY: `file` is an open descriptor.
        let seals = unsafe { libc::fcntl(file.number(), libc::F_GET_SEALS) };
        // Nothing else is asked of a file without them: that may be of a stranger's file system, which need not answer.
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
        // There may be none of them when they are touched.
        let of_large_pages = system.f_type == libc::HUGETLBFS_MAGIC;
        if access != libc::O_RDWR || size != bytes || of_large_pages {
            return Err(error!(
                Corrupt,
                "socket: memory of {size} bytes with access {access} came; {bytes} bytes and access {} expected, of pages \
                 of the usual size",
                libc::O_RDWR
            ));
        }
        // Whoever reads what has no page pays for one. A sender may still take pages away.
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

    /// The memory of a tensor, whose release is answered.
    ///
    /// # Safety
    /// `answers` is a socket that is given up here.
    pub unsafe fn into_owner(self, answers: RawFd) -> Owner {
        let Mapped { data, bytes } = self.mapped;
        std::mem::forget(self.mapped);
        // A forked child that releases its tensor says nothing, for this process may still use it.
        let said_by = (process::id() as usize) << 32 | answers as usize;
        let words = [ptr::without_provenance_mut(bytes as usize), ptr::without_provenance_mut(said_by)];
        // SAFETY: the mapping and the socket are given up here; `release` may be called on any thread.
        unsafe { Owner::new(data, words, release) }
    }
}

/// # Safety
/// As `into_owner` put it together.
unsafe fn release(data: *mut u8, [bytes, said_by]: [*mut c_void; 2]) {
    drop(Mapped { data, bytes: bytes.addr() as i64 });
    let (process, descriptor) = ((said_by.addr() >> 32) as u32, said_by.addr() as u32 as RawFd);
    if process == process::id() {
        socket::answer(descriptor, RELEASED);
    }
    // SAFETY: `into_owner` was given the descriptor for this alone, and it is open.
    drop(unsafe { Descriptor::of(descriptor) });
}

/// Memory that a file has.
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
        // SAFETY: a new mapping, where nothing is; a file has so many bytes.
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
            // SAFETY: a mapping of this size, which nobody uses any more.
            unsafe { libc::munmap(self.data.cast(), self.bytes as usize) };
        }
    }
}
