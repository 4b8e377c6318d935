//! Kernels compiled before, in a directory of the user's: a file for each key.
//!
//! What is wrong with the directory or a file is no failure: then the kernel is compiled. Only memory that cannot be had is.
//! A file is written under another name and renamed, so that it is there as a whole or not at all, whichever process reads
//! or writes it at the same time.

use std::{
    ffi::{CStr, CString, c_int},
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::MetadataExt,
    },
    process,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, SystemTime},
};

use arrayvec::ArrayString;

use crate::error::{Result, error};

use super::{
    copied, environment,
    image::{Kind, Reader, Writer},
    room,
};

const KIND: Kind = *b"DISK";

/// The name of a kernel's file: 64 digits of its key, and this.
const SUFFIX: &str = ".kernel";
/// That of a file that is being written: what it will be called, who writes it, and this.
const UNFINISHED: &str = ".part";

/// Room for either name, with its NUL.
type Name = ArrayString<128>;

/// No kernel is as large.
const LARGEST: u64 = 64 << 20;

/// When the files take more on disk, those that were not used for the longest time go.
const MOST: u64 = 256 << 20;

/// The file system's time of a file is renewed when it is used and older than this.
const FRESH: Duration = Duration::from_secs(24 * 60 * 60);

/// Whoever began to write a file this long ago does not finish it.
const ABANDONED: Duration = Duration::from_secs(60 * 60);

/// A directory in which kernels are kept.
pub struct Cache {
    folder: File,
    most: u64,
}

impl Cache {
    /// The directory that the environment names, made if it is not there; None where there shall be or can be none.
    pub fn open() -> Result<Option<Self>> {
        if environment(c"GRADCODEC_CACHE").is_some_and(|said| said == c"0") {
            return Ok(None);
        }
        let named = [(c"GRADCODEC_CACHE_DIR", ""), (c"XDG_CACHE_HOME", "/gradcodec"), (c"HOME", "/.cache/gradcodec")];
        let named = named.iter().find_map(|&(variable, rest)| {
            let folder = environment(variable)?.to_bytes();
            folder.starts_with(b"/").then_some((folder, rest))
        });
        let Some((folder, rest)) = named else { return Ok(None) };
        let mut path = room(folder.len() + rest.len() + 1)?;
        path.extend_from_slice(folder);
        path.extend_from_slice(rest.as_bytes());
        path.push(0);
        match CString::from_vec_with_nul(path) {
            Ok(path) => Self::in_folder(path, MOST),
            Err(_) => Ok(None),
        }
    }

    /// In a directory that is of this user, and that nobody else may write to.
    fn in_folder(path: CString, most: u64) -> Result<Option<Self>> {
        // SAFETY: a path that ends with a NUL.
        let open = |path: &CStr| unsafe { libc::open(path.as_ptr(), FOLDER) };
        let mut folder = owned(open(&path));
        if folder.is_none() {
            make(&path)?;
            folder = owned(open(&path));
        }
        Ok(folder.filter(|folder| is_ours(folder, 0o022)).map(|folder| Self { folder, most }))
    }

    /// The kernel of a key, if it is there, with what the compiler said of it.
    pub fn find(&self, key: &[u8; 32], log: &mut String) -> Result<Option<Vec<u8>>> {
        // A file's name may be that of something else, which opening must neither follow nor wait for.
        const FLAGS: c_int = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        let Some(mut file) = self.open_at(&name_of(key), FLAGS) else { return Ok(None) };
        let Ok(about) = file.metadata() else { return Ok(None) };
        if !about.is_file() || !is_ours(&file, 0o077) || about.len() > LARGEST {
            return Ok(None);
        }
        let mut bytes = room(about.len() as usize)?;
        bytes.resize(about.len() as usize, 0);
        if file.read_exact(&mut bytes).is_err() {
            return Ok(None);
        }
        let found = match parts(&bytes) {
            Ok((its_key, code, said)) if its_key == key => {
                log.try_reserve(said.len())
                    .map_err(|_| error!(OutOfMemory, "{} bytes for a log could not be had", said.len()))?;
                log.push_str(said);
                copied(code)?
            }
            _ => return Ok(None),
        };
        if about.modified().ok().and_then(|then| then.elapsed().ok()).is_some_and(|age| age > FRESH) {
            // SAFETY: a file that is open; NULL is now. Where it fails, the file goes sooner.
            unsafe { libc::futimens(file.as_raw_fd(), std::ptr::null()) };
        }
        Ok(Some(found))
    }

    /// Keeps a kernel, if it can be kept.
    pub fn keep(&self, key: &[u8; 32], code: &[u8], log: &str) -> Result<()> {
        let mut image = Writer::new(KIND)?;
        image.add(key)?;
        image.add(code)?;
        image.add(log.as_bytes())?;
        let image = image.finish()?;
        let name = name_of(key);
        let unfinished = unfinished_name(key);
        const FLAGS: c_int = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        if image.len() as u64 > LARGEST {
            return Ok(());
        }
        let Some(mut file) = self.open_at(&unfinished, FLAGS) else { return Ok(()) };
        // What is written late, and then does not fit, is found by the digest.
        let is_written = file.write_all(&image).is_ok();
        drop(file);
        let folder = self.folder.as_raw_fd();
        // SAFETY: names that end with a NUL, in a directory that is open.
        unsafe {
            if !is_written || libc::renameat(folder, c(&unfinished), folder, c(&name)) != 0 {
                libc::unlinkat(folder, c(&unfinished), 0);
                return Ok(());
            }
        }
        self.tidy()
    }

    fn open_at(&self, name: &Name, flags: c_int) -> Option<File> {
        // SAFETY: a name that ends with a NUL, in a directory that is open.
        owned(unsafe { libc::openat(self.folder.as_raw_fd(), c(name), flags, 0o600 as libc::c_uint) })
    }

    /// Takes away what nobody finishes, and what was not used for the longest time, if all takes too much.
    fn tidy(&self) -> Result<()> {
        let mut files = Vec::new();
        let mut bytes = 0;
        let now = SystemTime::now();
        let Some(listing) = Listing::of(&self.folder) else { return Ok(()) };
        for name in listing {
            let Some(found) = self.about(&name) else { continue };
            if name[..name.len() - 1].ends_with(UNFINISHED) {
                if now.duration_since(found.used).is_ok_and(|age| age > ABANDONED) {
                    self.remove(&name);
                }
                continue;
            }
            bytes += found.bytes;
            files
                .try_reserve(1)
                .map_err(|_| error!(OutOfMemory, "a list of {} kernels could not be had", files.len()))?;
            files.push((found, name));
        }
        if bytes > self.most {
            files.sort_unstable_by_key(|(found, _)| found.used);
        }
        for (found, name) in &files {
            if bytes <= self.most {
                break;
            }
            self.remove(name);
            bytes -= found.bytes;
        }
        Ok(())
    }

    fn about(&self, name: &Name) -> Option<Found> {
        let mut about = std::mem::MaybeUninit::<libc::stat>::uninit();
        let folder = self.folder.as_raw_fd();
        // SAFETY: a name that ends with a NUL, in a directory that is open, and room for what is said of it, which is there
        // when the call has succeeded.
        let about = unsafe {
            match libc::fstatat(folder, c(name), about.as_mut_ptr(), libc::AT_SYMLINK_NOFOLLOW) {
                0 => about.assume_init(),
                _ => return None,
            }
        };
        let used = Duration::new(u64::try_from(about.st_mtime).ok()?, u32::try_from(about.st_mtime_nsec).ok()?);
        Some(Found { used: SystemTime::UNIX_EPOCH.checked_add(used)?, bytes: about.st_blocks as u64 * 512 })
    }

    fn remove(&self, name: &Name) {
        // SAFETY: a name that ends with a NUL, in a directory that is open. Another process may have done it.
        unsafe { libc::unlinkat(self.folder.as_raw_fd(), c(name), 0) };
    }
}

/// What a file system says of a file.
struct Found {
    used: SystemTime,
    /// That it takes on disk.
    bytes: u64,
}

const FOLDER: c_int = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;

/// The names in a directory that are files of the cache.
struct Listing(*mut libc::DIR);

impl Listing {
    fn of(folder: &File) -> Option<Self> {
        // Opened anew, for duplicates share a position.
        // SAFETY: a name in a directory that is open; the descriptor is the listing's from then on.
        unsafe {
            let again = libc::openat(folder.as_raw_fd(), c".".as_ptr(), FOLDER);
            if again < 0 {
                return None;
            }
            let listing = libc::fdopendir(again);
            if listing.is_null() {
                libc::close(again);
                return None;
            }
            Some(Self(listing))
        }
    }
}

impl Iterator for Listing {
    type Item = Name;

    fn next(&mut self) -> Option<Name> {
        loop {
            // SAFETY: a listing that is open, used by one thread; the entry is there until the next one is asked for.
            let name = unsafe {
                let entry = libc::readdir(self.0);
                if entry.is_null() {
                    return None;
                }
                CStr::from_ptr((*entry).d_name.as_ptr())
            };
            let name = name.to_str().unwrap_or_default();
            let is_ours = name.len() > 64
                && name.bytes().take(64).all(|byte| byte.is_ascii_hexdigit())
                && (name[64..] == *SUFFIX || name.ends_with(UNFINISHED));
            let mut found = Name::new();
            if is_ours && found.try_push_str(name).is_ok() && found.try_push('\0').is_ok() {
                return Some(found);
            }
        }
    }
}

impl Drop for Listing {
    fn drop(&mut self) {
        // SAFETY: open, and given up here.
        unsafe { libc::closedir(self.0) };
    }
}

/// The key, the code and the log in a file.
fn parts(bytes: &[u8]) -> Result<(&[u8], &[u8], &str)> {
    let mut parts = Reader::new("cache", bytes, KIND)?;
    let (key, code, log) = (parts.take()?, parts.take()?, parts.take()?);
    parts.done()?;
    let log = std::str::from_utf8(log).map_err(|_| error!(Corrupt, "cache: a log that is not text"))?;
    Ok((key, code, log))
}

/// Makes a directory that is not there, and the one that it is in.
fn make(path: &CStr) -> Result<()> {
    // SAFETY: a path that ends with a NUL.
    if unsafe { libc::mkdir(path.as_ptr(), 0o700) } == 0 {
        return Ok(());
    }
    let path = path.to_bytes();
    let end = path.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
    let mut parent = room(end + 1)?;
    parent.extend_from_slice(&path[..end]);
    parent.push(0);
    // SAFETY: paths that end with a NUL. Where it fails, there is no directory to open.
    unsafe {
        libc::mkdir(parent.as_ptr().cast(), 0o700);
        libc::mkdir(path.as_ptr().cast(), 0o700);
    }
    Ok(())
}

/// Whether it is of this user, and others may not do with it what these bits say.
fn is_ours(file: &File, bits: u32) -> bool {
    // SAFETY: it only answers.
    let user = unsafe { libc::geteuid() };
    file.metadata().is_ok_and(|about| about.uid() == user && about.mode() & bits == 0)
}

fn owned(descriptor: c_int) -> Option<File> {
    // SAFETY: new, and nobody else's.
    (descriptor >= 0).then(|| unsafe { File::from_raw_fd(descriptor) })
}

fn name_of(key: &[u8; 32]) -> Name {
    let mut name = digits(key);
    name.push_str(SUFFIX);
    name.push('\0');
    name
}

/// One that no other process writes to, on this machine or on another one with the same file system.
fn unfinished_name(key: &[u8; 32]) -> Name {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut name = digits(key);
    let (count, process, now) = (COUNT.fetch_add(1, Ordering::Relaxed), process::id(), now.as_nanos() as u64);
    let _ = std::fmt::Write::write_fmt(&mut name, format_args!(".{process:x}.{count:x}.{now:x}"));
    name.push_str(UNFINISHED);
    name.push('\0');
    name
}

/// 64 hexadecimal digits.
fn digits(key: &[u8; 32]) -> Name {
    let mut name = Name::new();
    for byte in key {
        for digit in [byte >> 4, byte & 15] {
            name.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
        }
    }
    name
}

fn c(name: &Name) -> *const libc::c_char {
    name.as_ptr().cast()
}
