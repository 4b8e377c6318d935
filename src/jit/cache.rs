//! Disk cache of compiled kernels in a directory of the user, with one file for each request and NVRTC.
//!
//! ```text
//! "gcdisk06" | key | bytes of the log | log | code | SHA-256 of all before
//!  8           40    8                              32
//! ```
//!
//! Numbers are little-endian. The digest detects damage, not malice: anyone who can write a file can compute it.
//!
//! If a directory or file cannot be used, the kernel is compiled. Failed allocations and wrong values of variables are
//! errors. A file is written under another name and then renamed, so concurrent processes find a whole file or none.

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
use sha2::{Digest, Sha256};

use crate::ffi::{
    error::{Result, error},
    fallible,
    variable::variable,
};

use super::{copied, room};

/// Number of bytes of a key that identify the request.
pub const REQUEST: usize = 32;

/// Key of a file: the request, then the NVRTC.
pub type Key = [u8; REQUEST + 8];

/// Magic number that ends with the format's version. The version changes with the file format, and with the meaning or
/// the argument of kernels, which the key does not cover.
const MAGIC: &[u8; 8] = b"gcdisk06";

/// Suffix of a file's name, after the 80 digits of its key.
const SUFFIX: &str = ".kernel";
/// Suffix of an unfinished file's name, after the digits of its key and its writer's id.
const UNFINISHED: &str = ".part";

/// Number of hexadecimal digits of a key.
const DIGITS: usize = 2 * size_of::<Key>();

/// Name of a finished or unfinished file, with its NUL.
type Name = ArrayString<128>;

const DIGEST: usize = 32;

/// Maximum size of a file in bytes; no kernel is as large.
const LARGEST: u64 = 64 << 20;

/// Maximum disk usage of all files in bytes; beyond it, the least recently used files are deleted.
const MOST: u64 = 256 << 20;

/// Age of a file's modification time beyond which a use renews it.
const FRESH: Duration = Duration::from_secs(24 * 60 * 60);

/// Age of an unfinished file beyond which its writer has given up.
const ABANDONED: Duration = Duration::from_secs(60 * 60);

/// Directory in which kernels are kept.
pub struct Cache {
    folder: File,
    most: u64,
}

impl Cache {
    /// Opens the directory that the environment names; creates it if needed. None: the cache is off or unusable.
    pub fn open() -> Result<Option<Self>> {
        match variable(c"GRADCODEC_CACHE").map_or(&b"1"[..], CStr::to_bytes) {
            b"1" => {}
            b"0" => return Ok(None),
            other => {
                return Err(error!(InvalidArgument, "GRADCODEC_CACHE is {}; 0 or 1 expected", other.escape_ascii()));
            }
        }
        const OWN: &CStr = c"GRADCODEC_CACHE_DIR";
        if let Some(relative) = variable(OWN).filter(|folder| !folder.to_bytes().starts_with(b"/")) {
            let relative = relative.to_bytes().escape_ascii();
            return Err(error!(InvalidArgument, "GRADCODEC_CACHE_DIR is {relative}; an absolute path expected"));
        }
        // The directory of this library's own variable is created anywhere.
        let named = [(OWN, "", true), (c"XDG_CACHE_HOME", "/gradcodec", false), (c"HOME", "/.cache/gradcodec", false)];
        let named = named.iter().find_map(|&(name, rest, anywhere)| {
            let folder = variable(name)?.to_bytes();
            folder.starts_with(b"/").then_some((folder, rest, anywhere))
        });
        let Some((folder, rest, anywhere)) = named else { return Ok(None) };
        let mut path = room(folder.len() + rest.len() + 1)?;
        path.extend_from_slice(folder);
        path.extend_from_slice(rest.as_bytes());
        path.push(0);
        match CString::from_vec_with_nul(path) {
            Ok(path) => Self::in_folder(path, anywhere, MOST),
            Err(_) => Ok(None),
        }
    }

    /// Opens a directory that belongs to this user and that only this user may write to. Creates a missing directory;
    /// with `anywhere`, also in another user's home.
    fn in_folder(path: CString, anywhere: bool, most: u64) -> Result<Option<Self>> {
        // SAFETY: `path` ends with a NUL.
        let open = |path: &CStr| unsafe { libc::open(path.as_ptr(), FOLDER) };
        let mut folder = owned(open(&path));
        if folder.is_none() {
            make(&path, anywhere)?;
            folder = owned(open(&path));
        }
        Ok(folder.filter(|folder| is_ours(folder, 0o022)).map(|folder| Self { folder, most }))
    }

    /// Reads the code of a key, if there is a file, and appends the compiler's output to `log`.
    pub fn find(&self, key: &Key, log: &mut String) -> Result<Option<Vec<u8>>> {
        self.read(&name_of(key), key, log)
    }

    /// Reads the code of a request from its newest intact file, whichever NVRTC compiled it.
    pub fn find_any(&self, request: &[u8; REQUEST], log: &mut String) -> Result<Option<Vec<u8>>> {
        let mut files = Vec::new();
        let Some(listing) = Listing::of(&self.folder) else { return Ok(None) };
        for name in listing.filter(|name| name.starts_with(digits(request).as_str()) && !is_unfinished(name)) {
            let Some(found) = self.about(&name) else { continue };
            push(&mut files, (found, name))?;
        }
        files.sort_unstable_by_key(|(found, _)| found.used);
        for (_, name) in files.iter().rev() {
            if let Some(code) = self.read(name, request, log)? {
                return Ok(Some(code));
            }
        }
        Ok(None)
    }

    /// Reads the code and the log of a file, if it may be used, is intact, and its key begins with these bytes.
    fn read(&self, name: &Name, key: &[u8], log: &mut String) -> Result<Option<Vec<u8>>> {
        // The name may belong to a link or a FIFO: opening must neither follow nor wait.
        const FLAGS: c_int = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        let Some(mut file) = self.open_at(name, FLAGS) else { return Ok(None) };
        let Ok(about) = file.metadata() else { return Ok(None) };
        if !about.is_file() || !is_ours(&file, 0o077) || about.len() > LARGEST {
            return Ok(None);
        }
        let mut bytes = room(about.len() as usize)?;
        bytes.resize(about.len() as usize, 0);
        if file.read_exact(&mut bytes).is_err() {
            return Ok(None);
        }
        let Some((code, said)) = parts(&bytes, key) else { return Ok(None) };
        log.try_reserve(said.len())
            .map_err(|_| error!(OutOfMemory, "cannot allocate {} bytes for a log", said.len()))?;
        log.push_str(said);
        let code = copied(code)?;
        if about.modified().ok().and_then(|then| then.elapsed().ok()).is_some_and(|age| age > FRESH) {
            // SAFETY: the file is open; NULL means the current time. If the call fails, the file is deleted sooner.
            unsafe { libc::futimens(file.as_raw_fd(), std::ptr::null()) };
        }
        Ok(Some(code))
    }

    /// Writes a kernel to disk, if possible.
    pub fn keep(&self, key: &Key, code: &[u8], log: &str) -> Result<()> {
        let image = image_of(key, code, log.as_bytes())?;
        let name = name_of(key);
        let unfinished = unfinished_name(key);
        const FLAGS: c_int = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        if image.len() as u64 > LARGEST.min(largest_file()) {
            return Ok(());
        }
        let Some(mut file) = self.open_at(&unfinished, FLAGS) else { return Ok(()) };
        // The digest detects data that the system writes later and that then does not fit.
        let is_written = file.write_all(&image).is_ok();
        drop(file);
        let folder = self.folder.as_raw_fd();
        // SAFETY: the names end with a NUL, and the directory is open.
        unsafe {
            if !is_written || libc::renameat(folder, c(&unfinished), folder, c(&name)) != 0 {
                libc::unlinkat(folder, c(&unfinished), 0);
                return Ok(());
            }
        }
        self.tidy()
    }

    fn open_at(&self, name: &Name, flags: c_int) -> Option<File> {
        // SAFETY: the name ends with a NUL, and the directory is open.
        owned(unsafe { libc::openat(self.folder.as_raw_fd(), c(name), flags, 0o600 as libc::c_uint) })
    }

    /// Deletes abandoned unfinished files, and the least recently used files if all take too much.
    fn tidy(&self) -> Result<()> {
        let mut files = Vec::new();
        let mut bytes = 0;
        let now = SystemTime::now();
        let Some(listing) = Listing::of(&self.folder) else { return Ok(()) };
        for name in listing {
            let Some(found) = self.about(&name) else { continue };
            if is_unfinished(&name) {
                if now.duration_since(found.used).is_ok_and(|age| age > ABANDONED) {
                    self.remove(&name);
                }
                continue;
            }
            bytes += found.bytes;
            push(&mut files, (found, name))?;
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
        // SAFETY: the name ends with a NUL, the directory is open, and `about` has room for the result, which fstatat()
        // has written if it succeeds.
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
        // SAFETY: the name ends with a NUL, and the directory is open. Another process may have deleted the file.
        unsafe { libc::unlinkat(self.folder.as_raw_fd(), c(name), 0) };
    }
}

/// Time of last use and size of a file.
struct Found {
    used: SystemTime,
    /// Bytes that the file takes on disk.
    bytes: u64,
}

const FOLDER: c_int = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;

/// Iterator over the names of the cache's files in a directory.
struct Listing(*mut libc::DIR);

impl Listing {
    fn of(folder: &File) -> Option<Self> {
        // The directory is opened again because duplicated descriptors share a position.
        // SAFETY: the name ends with a NUL, and `folder` is open; the listing owns the new descriptor, or it is closed.
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
            // SAFETY: the listing is open and used by one thread; the entry is valid until the next readdir().
            let name = unsafe {
                let entry = libc::readdir(self.0);
                if entry.is_null() {
                    return None;
                }
                CStr::from_ptr((*entry).d_name.as_ptr())
            };
            let name = name.to_str().unwrap_or_default();
            let is_ours = name.len() > DIGITS
                && name.bytes().take(DIGITS).all(|byte| byte.is_ascii_hexdigit())
                && (&name[DIGITS..] == SUFFIX || name.ends_with(UNFINISHED));
            let mut found = Name::new();
            if is_ours && found.try_push_str(name).is_ok() && found.try_push('\0').is_ok() {
                return Some(found);
            }
        }
    }
}

impl Drop for Listing {
    fn drop(&mut self) {
        // SAFETY: the listing is open, and nothing uses it afterwards.
        unsafe { libc::closedir(self.0) };
    }
}

/// Appends to a list of files.
fn push(files: &mut Vec<(Found, Name)>, file: (Found, Name)) -> Result<()> {
    fallible::reserve(files, 1, "kernels")?;
    files.push(file);
    Ok(())
}

/// Returns the bytes of a file.
fn image_of(key: &Key, code: &[u8], log: &[u8]) -> Result<Vec<u8>> {
    let head = [&MAGIC[..], key, &(log.len() as u64).to_le_bytes()];
    let parts = || head.iter().copied().chain([log, code]);
    let mut image = room(parts().map(<[u8]>::len).sum::<usize>() + DIGEST)?;
    parts().for_each(|part| image.extend_from_slice(part));
    let digest = Sha256::digest(&image);
    image.extend_from_slice(&digest);
    Ok(image)
}

/// Returns the code and the log in a file, if it is intact and its key begins with these bytes.
fn parts<'a>(bytes: &'a [u8], key: &[u8]) -> Option<(&'a [u8], &'a str)> {
    let (body, digest) = bytes.split_last_chunk::<DIGEST>()?;
    if Sha256::digest(body)[..] != digest[..] {
        return None;
    }
    let (its_key, rest) = body.strip_prefix(MAGIC)?.split_first_chunk::<{ size_of::<Key>() }>()?;
    let (size, rest) = rest.split_first_chunk::<8>()?;
    let (log, code) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*size)).ok()?)?;
    its_key.starts_with(key).then_some((code, std::str::from_utf8(log).ok()?))
}

/// Creates a directory and its parent. Errors are ignored: the caller then cannot open the directory.
///
/// In a user's home, a program that runs as root would leave directories that the user's other programs cannot write
/// to. So nothing is created in a directory that belongs to neither this user nor root, unless `anywhere` is true.
fn make(path: &CStr, anywhere: bool) -> Result<()> {
    let parent = parent_of(path)?;
    let around = match owner(&parent) {
        None => owner(&parent_of(&parent)?),
        found => found,
    };
    // SAFETY: geteuid() always succeeds.
    let user = unsafe { libc::geteuid() };
    if anywhere || around.is_some_and(|owner| owner == user || owner == 0) {
        // SAFETY: both paths end with a NUL.
        unsafe {
            libc::mkdir(parent.as_ptr(), 0o700);
            libc::mkdir(path.as_ptr(), 0o700);
        }
    }
    Ok(())
}

/// Returns the parent directory of a path.
fn parent_of(path: &CStr) -> Result<CString> {
    let path = path.to_bytes();
    let end = path.iter().rposition(|&byte| byte == b'/').unwrap_or(0).max(1).min(path.len());
    let mut parent = room(end + 1)?;
    parent.extend_from_slice(&path[..end]);
    parent.push(0);
    Ok(CString::from_vec_with_nul(parent).unwrap_or_default()) // the path contains no NUL
}

/// Returns the owner of a file; None if it does not exist.
fn owner(path: &CStr) -> Option<libc::uid_t> {
    let mut about = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `path` ends with a NUL, and `about` outlives the call, which has filled it in if it succeeds.
    unsafe { (libc::stat(path.as_ptr(), about.as_mut_ptr()) == 0).then(|| about.assume_init().st_uid) }
}

/// Returns the maximum file size of this process (RLIMIT_FSIZE), in bytes. Writing more raises SIGXFSZ, which is fatal.
fn largest_file() -> u64 {
    let mut limit = std::mem::MaybeUninit::<libc::rlimit>::uninit();
    // SAFETY: `limit` outlives the call, which has filled it in if it succeeds.
    unsafe {
        match libc::getrlimit(libc::RLIMIT_FSIZE, limit.as_mut_ptr()) {
            0 => limit.assume_init().rlim_cur,
            _ => u64::MAX,
        }
    }
}

/// Returns true if this user owns the file and others have none of these permission bits.
fn is_ours(file: &File, bits: u32) -> bool {
    // SAFETY: geteuid() always succeeds.
    let user = unsafe { libc::geteuid() };
    file.metadata().is_ok_and(|about| about.uid() == user && about.mode() & bits == 0)
}

fn owned(descriptor: c_int) -> Option<File> {
    // SAFETY: the descriptor is new, and nothing else owns it.
    (descriptor >= 0).then(|| unsafe { File::from_raw_fd(descriptor) })
}

fn name_of(key: &Key) -> Name {
    let mut name = digits(key);
    name.push_str(SUFFIX);
    name.push('\0');
    name
}

/// Returns a name that no other process writes to, on this machine or on another one with the same file system.
fn unfinished_name(key: &Key) -> Name {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut name = digits(key);
    let (count, process, now) = (COUNT.fetch_add(1, Ordering::Relaxed), process::id(), now.as_nanos() as u64);
    let _ = std::fmt::Write::write_fmt(&mut name, format_args!(".{process:x}.{count:x}.{now:x}"));
    name.push_str(UNFINISHED);
    name.push('\0');
    name
}

/// Returns true if this is the name of an unfinished file.
fn is_unfinished(name: &Name) -> bool {
    name.trim_end_matches('\0').ends_with(UNFINISHED)
}

/// Returns two hexadecimal digits for each byte.
fn digits(key: &[u8]) -> Name {
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

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::{PermissionsExt, symlink},
        path::{Path, PathBuf},
    };

    use super::*;

    const KEY: Key = [0xa5; 40];

    /// Directory of a test, deleted when the test ends.
    struct Place(PathBuf);

    impl Place {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("gradcodec-{test}-{}", process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn folder(&self) -> PathBuf {
            self.0.join("parent/cache")
        }

        fn cache(&self) -> Cache {
            open(&self.folder()).unwrap()
        }

        /// Returns the path of the file of [`KEY`].
        fn file(&self) -> PathBuf {
            self.folder().join(format!("{}.kernel", "a5".repeat(40)))
        }

        fn files(&self) -> Vec<String> {
            let entries = fs::read_dir(self.folder()).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn open(path: &Path) -> Option<Cache> {
        Cache::in_folder(CString::new(path.to_str().unwrap()).unwrap(), false, MOST).unwrap()
    }

    fn find(cache: &Cache, key: &Key) -> Option<(Vec<u8>, String)> {
        let mut log = String::new();
        cache.find(key, &mut log).unwrap().map(|code| (code, log))
    }

    #[test]
    fn damaged_files_and_files_of_another_key_are_replaced() {
        let place = Place::new("damaged");
        let cache = place.cache();
        cache.keep(&KEY, b"code", "log").unwrap();
        let whole = fs::read(place.file()).unwrap();
        cache.keep(&[1; 40], b"code", "log").unwrap();
        let of_another = fs::read(place.folder().join(format!("{}.kernel", "01".repeat(40)))).unwrap();
        let not_text = image_of(&KEY, b"code", b"\xff").unwrap();
        let sealed = |body: &[u8]| [body, &Sha256::digest(body)[..]].concat();
        let with_size = |size: u64| sealed(&[&MAGIC[..], &KEY, &size.to_le_bytes(), b"log"].concat());
        let long_logs = [4, u64::MAX, u64::MAX - 7, 1 << 63].map(with_size);
        let short = [&b""[..], MAGIC, &whole[..47], &whole[..55], b"another form"].map(sealed);
        let mut damaged: Vec<Vec<u8>> = (0..whole.len()).map(|size| whole[..size].to_vec()).collect();
        damaged.extend((0..whole.len()).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            bytes
        }));
        damaged.extend([of_another, not_text, [&whole[..], b"x"].concat()]);
        damaged.extend(long_logs);
        damaged.extend(short);
        for bytes in damaged {
            fs::write(place.file(), &bytes).unwrap();
            assert_eq!(find(&cache, &KEY), None, "{bytes:?}");
        }
        cache.keep(&KEY, b"code", "log").unwrap();
        assert_eq!(fs::read(place.file()).unwrap(), whole);
    }

    #[test]
    fn without_an_nvrtc_the_newest_whole_file_of_the_request_is_found() {
        let place = Place::new("any");
        let cache = place.cache();
        let request = [7; REQUEST];
        let any = || {
            let mut log = String::new();
            cache.find_any(&request, &mut log).unwrap().map(|code| (code, log))
        };
        let key = |nvrtc: u8| {
            let mut key = [7; _];
            key[REQUEST..].fill(nvrtc);
            key
        };
        let file =
            |nvrtc: u8| place.folder().join(format!("{}{}.kernel", "07".repeat(32), format!("{nvrtc:02x}").repeat(8)));
        assert_eq!(any(), None);
        for (nvrtc, hours) in [(1, 3), (2, 1), (3, 2)] {
            cache.keep(&key(nvrtc), &[nvrtc], "log").unwrap();
            let then = SystemTime::now() - Duration::from_secs(hours * 3600);
            File::options().write(true).open(file(nvrtc)).unwrap().set_modified(then).unwrap();
        }
        cache.keep(&KEY, b"of another request", "").unwrap();
        assert_eq!(any(), Some((vec![2], "log".into())));
        // File 2 gets another request's content, others may write to file 3, and file 1 becomes unfinished.
        fs::copy(place.file(), file(2)).unwrap();
        assert_eq!(any(), Some((vec![3], "log".into())));
        fs::set_permissions(file(3), Permissions::from_mode(0o622)).unwrap();
        assert_eq!(any(), Some((vec![1], "log".into())));
        fs::rename(file(1), file(1).with_extension("1.2.3.part")).unwrap();
        assert_eq!(any(), None);
    }

    #[test]
    fn files_that_others_may_have_written_are_not_used() {
        let place = Place::new("others");
        let cache = place.cache();
        cache.keep(&KEY, b"code", "log").unwrap();
        for bits in [0o622, 0o602, 0o644, 0o660] {
            fs::set_permissions(place.file(), Permissions::from_mode(bits)).unwrap();
            assert_eq!(find(&cache, &KEY), None, "{bits:o}");
        }
        fs::set_permissions(place.file(), Permissions::from_mode(0o600)).unwrap();
        assert!(find(&cache, &KEY).is_some());
        // The file becomes a link to a valid file.
        let elsewhere = place.0.join("elsewhere");
        fs::rename(place.file(), &elsewhere).unwrap();
        symlink(&elsewhere, place.file()).unwrap();
        assert_eq!(find(&cache, &KEY), None);
        // keep() replaces the link, not its target.
        cache.keep(&KEY, b"new", "").unwrap();
        assert!(place.file().symlink_metadata().unwrap().is_file());
        assert!(find(&cache, &KEY).is_some_and(|(code, _)| code == b"new"));
        assert_ne!(fs::read(elsewhere).unwrap(), fs::read(place.file()).unwrap());
        // Opening a FIFO without a writer blocks, unless O_NONBLOCK is set.
        fs::remove_file(place.file()).unwrap();
        let path = CString::new(place.file().to_str().unwrap()).unwrap();
        // SAFETY: the path ends with a NUL.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        assert_eq!(find(&cache, &KEY), None);
        // A rename cannot replace a directory.
        fs::remove_file(place.file()).unwrap();
        fs::create_dir(place.file()).unwrap();
        assert_eq!(find(&cache, &KEY), None);
        cache.keep(&KEY, b"code", "log").unwrap();
        assert_eq!(find(&cache, &KEY), None);
        assert_eq!(place.files().len(), 1, "{:?}", place.files());
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_not_used() {
        let place = Place::new("directory");
        drop(place.cache());
        for bits in [0o777, 0o1777, 0o720, 0o702] {
            fs::set_permissions(place.folder(), Permissions::from_mode(bits)).unwrap();
            assert!(open(&place.folder()).is_none(), "{bits:o}");
        }
        fs::set_permissions(place.folder(), Permissions::from_mode(0o755)).unwrap();
        assert!(open(&place.folder()).is_some());
        let link = place.0.join("link");
        symlink(place.folder(), &link).unwrap();
        assert!(open(&link).is_some(), "a link to one that will do");
        assert!(open(&place.0.join("one/two/three")).is_none(), "only the last two are made");
        fs::write(place.0.join("file"), b"").unwrap();
        assert!(open(&place.0.join("file")).is_none());
        assert!(open(&place.0.join("file/cache")).is_none());
        // SAFETY: geteuid() always succeeds.
        if unsafe { libc::geteuid() } == 0 {
            std::os::unix::fs::chown(place.folder(), Some(65534), None).unwrap();
            assert!(open(&place.folder()).is_none(), "another user's");
            std::os::unix::fs::chown(place.folder(), Some(0), None).unwrap();
            let cache = place.cache();
            cache.keep(&KEY, b"code", "log").unwrap();
            std::os::unix::fs::chown(place.file(), Some(65534), None).unwrap();
            assert_eq!(find(&cache, &KEY), None, "another user's");
        }
    }

    #[test]
    fn the_least_used_and_unfinished_files_are_removed_beyond_the_limit() {
        let place = Place::new("tidy");
        drop(place.cache());
        let path = || CString::new(place.folder().to_str().unwrap()).unwrap();
        let code = vec![7; 10_000];
        let size = |most| Cache::in_folder(path(), false, most).unwrap().unwrap();
        let hours_ago = |file: PathBuf, hours: u64| {
            let then = SystemTime::now() - Duration::from_secs(hours * 3600);
            File::options().write(true).open(file).unwrap().set_modified(then).unwrap();
        };
        let file = |key: u8| place.folder().join(format!("{}.kernel", format!("{key:02x}").repeat(40)));
        let large = size(MOST);
        for key in 1..=5 {
            large.keep(&[key; 40], &code, "").unwrap();
            hours_ago(file(key), 100 - u64::from(key));
        }
        // Reading a file that was not used for a day makes it the newest.
        assert!(find(&large, &[1; 40]).is_some());
        let each = fs::metadata(file(1)).unwrap().blocks() * 512;
        let part = |age: &str| place.folder().join(format!("{}.1.2.{age}.part", "00".repeat(40)));
        for (age, hours) in [("3", 0), ("4", 2)] {
            fs::write(part(age), b"x").unwrap();
            hours_ago(part(age), hours);
        }
        fs::write(place.folder().join("of the user's"), vec![0; 1 << 20]).unwrap();
        size(3 * each).keep(&[6; 40], &code, "").unwrap();
        let left: Vec<u8> = (1..=6).filter(|&key| file(key).exists()).collect();
        assert_eq!(left, [1, 5, 6]);
        assert!(part("3").exists() && !part("4").exists());
        assert!(place.folder().join("of the user's").exists());
    }
}
