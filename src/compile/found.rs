//! Which NVRTC was found, kept on disk: where nothing has changed since, what it is and what it knows is known without
//! loading it, and a kernel that lies on disk is there at once.
//!
//! The key of such a file is a digest of all places that the search looks at, with what the file system says of the file
//! there; so it is another one when an NVRTC comes, goes, or is replaced there. What was found may also lie where only the
//! system's loader looks, so the same is said of it in the file.

use std::{
    ffi::{CStr, CString, c_int},
    mem::MaybeUninit,
};

use sha2::{Digest, Sha256};

use crate::{
    dynamic::Loaded,
    error::{Result, error},
};

use super::{
    Target, add_part,
    cache::{Cache, Of},
    nvrtc::{self, FILES, IN_PACKAGES, IN_TOOLKIT},
    room, variable,
};

/// An NVRTC, and where it lies.
#[derive(PartialEq, Eq)]
pub struct Found {
    pub version: (c_int, c_int),
    /// The compute capabilities that it makes machine code for: 90 for 9.0.
    pub levels: Vec<c_int>,
    pub file: CString,
}

/// What the loader of programs has read of the folders where the system's libraries are.
const LOADERS_LIST: &CStr = c"/etc/ld.so.cache";

/// What a file system says of a file that changes when it is replaced: its number, size, and time. Not the device's number,
/// which containers make anew. Zeros: it is not there.
type State = [u64; 4];

const STATE: usize = size_of::<State>();

impl Found {
    /// What to compile to for a card: machine code where NVRTC knows it, else the newest PTX that it can read.
    pub fn target(&self, (major, minor): (u32, u32)) -> Result<Target> {
        let card = major.saturating_mul(10).saturating_add(minor);
        let card = c_int::try_from(card).unwrap_or(c_int::MAX);
        nvrtc::choose(card, &self.levels).ok_or_else(|| {
            let ((newest, _), lowest) = (self.version, self.levels.iter().min().copied().unwrap_or(0));
            error!(
                UnsupportedDevice,
                "NVRTC {newest} does not compile for compute capability {major}.{minor}; {}.{} is the lowest that it \
                 knows",
                lowest / 10,
                lowest % 10
            )
        })
    }

    /// Bytes of its file, by which builds of one version are told apart. Not the file's number and time: the same NVRTC
    /// has others in each container.
    pub fn file_bytes(&self) -> u64 {
        let [_, bytes, ..] = state_of(&self.file);
        bytes
    }

    /// The one that a search has found, if it is still there as it was.
    pub fn recall(cache: &Cache, search: &[u8; 32]) -> Result<Option<Self>> {
        let Some(said) = cache.find(Of::Compiler, search, &mut String::new())? else { return Ok(None) };
        let Some((found, state)) = Self::read(&said)? else { return Ok(None) };
        Ok((state != State::default() && state_of(&found.file) == state).then_some(found))
    }

    /// Keeps what a search has found.
    pub fn keep(&self, cache: &Cache, search: &[u8; 32]) -> Result<()> {
        let (state, file) = (state_of(&self.file), self.file.to_bytes_with_nul());
        let mut said = room(STATE + 4 * (3 + self.levels.len()) + file.len())?;
        said.extend(state.iter().flat_map(|number| number.to_le_bytes()));
        let numbers = [self.version.0, self.version.1, self.levels.len() as c_int];
        said.extend(numbers.iter().chain(&self.levels).flat_map(|number| number.to_le_bytes()));
        said.extend_from_slice(file);
        cache.keep(Of::Compiler, search, &said, "")
    }

    /// What [`Self::keep`] wrote; None where it is something else.
    fn read(said: &[u8]) -> Result<Option<(Self, State)>> {
        let mut left = said;
        let mut state = State::default();
        for number in &mut state {
            let Some((bytes, rest)) = left.split_first_chunk() else { return Ok(None) };
            (*number, left) = (u64::from_le_bytes(*bytes), rest);
        }
        let mut number = || {
            let (bytes, rest) = left.split_first_chunk()?;
            left = rest;
            Some(c_int::from_le_bytes(*bytes))
        };
        let (Some(major), Some(minor), Some(count)) = (number(), number(), number()) else { return Ok(None) };
        let mut levels = Vec::new();
        for _ in 0..count {
            let Some(level) = number() else { return Ok(None) };
            levels
                .try_reserve(1)
                .map_err(|_| error!(OutOfMemory, "a list of compute capabilities could not be had"))?;
            levels.push(level);
        }
        let mut file = room(left.len())?;
        file.extend_from_slice(left);
        let file = CString::from_vec_with_nul(file).ok();
        Ok(file.map(|file| (Self { version: (major, minor), levels, file }, state)))
    }
}

/// The key of a search's result: a digest of the places that it looks at. None where one is loaded that would be found:
/// then that can be asked.
pub fn search() -> Result<Option<[u8; 32]>> {
    let mut key = Sha256::new();
    let mut path = Vec::new();
    add_part(&mut key, env!("CARGO_PKG_VERSION").as_bytes());
    let mut add = |parts: &[&[u8]]| -> Result<()> {
        path.clear();
        let bytes = parts.iter().map(|part| part.len()).sum();
        path.try_reserve(bytes).map_err(|_| error!(OutOfMemory, "{bytes} bytes for a path could not be had"))?;
        parts.iter().for_each(|part| path.extend_from_slice(part));
        add_part(&mut key, &path);
        let state = CStr::from_bytes_with_nul(&path).map(state_of).unwrap_or_default();
        state.iter().for_each(|number| add_part(&mut key, &number.to_le_bytes()));
        Ok(())
    };
    if let Some(named) = variable(c"GRADCODEC_NVRTC") {
        add(&[named.to_bytes_with_nul()])?;
        return Ok(Some(key.finalize().into()));
    }
    let loaded = Loaded::list()?;
    if nvrtc::is_loaded(&loaded) {
        return Ok(None);
    }
    let folders = variable(c"LD_LIBRARY_PATH").unwrap_or_default().to_bytes();
    for folder in folders.split(|&byte| matches!(byte, b':' | b';')) {
        FILES.iter().try_for_each(|file| add(&[folder, b"/", file.to_bytes_with_nul()]))?;
    }
    for folder in nvrtc::packages(&loaded) {
        IN_PACKAGES.iter().try_for_each(|file| add(&[folder, file.as_bytes()]))?;
    }
    add(&[IN_TOOLKIT.to_bytes_with_nul()])?;
    add(&[LOADERS_LIST.to_bytes_with_nul()])?;
    Ok(Some(key.finalize().into()))
}

fn state_of(file: &CStr) -> State {
    let mut about = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a path that ends with a NUL, and room for what is said of it, which is there when the call has succeeded.
    let about = unsafe {
        if libc::stat(file.as_ptr(), about.as_mut_ptr()) != 0 {
            return State::default();
        }
        about.assume_init()
    };
    [about.st_ino as u64, about.st_size as u64, about.st_mtime as u64, about.st_mtime_nsec as u64]
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn what_is_written_is_read_and_nothing_else() {
        let found = Found { version: (12, 9), levels: vec![75, 90], file: c"/a/libnvrtc.so.12".into() };
        let folder = std::env::temp_dir().join(format!("gradcodec-found-{}", std::process::id()));
        let path = CString::new(folder.as_os_str().as_bytes()).unwrap();
        let cache = Cache::in_folder(path, 1 << 20).unwrap().unwrap();
        let kept = |found: &Found| {
            found.keep(&cache, &[7; 32]).unwrap();
            cache.find(Of::Compiler, &[7; 32], &mut String::new()).unwrap().unwrap()
        };
        let said = kept(&found);
        let (read, state) = Found::read(&said).unwrap().unwrap();
        assert_eq!(
            (read.version, &read.levels[..], &*read.file, state),
            ((12, 9), &[75, 90][..], c"/a/libnvrtc.so.12", State::default())
        );
        // It is not there.
        assert!(Found::recall(&cache, &[7; 32]).unwrap().is_none());
        for length in 0..said.len() {
            assert!(Found::read(&said[..length]).unwrap().is_none(), "{length}");
        }
        let there =
            Found { file: CString::new(std::env::current_exe().unwrap().as_os_str().as_bytes()).unwrap(), ..found };
        kept(&there);
        assert_eq!(Found::recall(&cache, &[7; 32]).unwrap().unwrap().file, there.file);
        assert!(Found::recall(&cache, &[8; 32]).unwrap().is_none());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
