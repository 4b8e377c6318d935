//! Search for NVRTC. The library is loaded when it is first needed; until then, only its file is identified. So a
//! process whose kernels are all on disk does not load NVRTC.

use std::{
    ffi::{CStr, CString, c_void},
    fs,
    mem::MaybeUninit,
    ptr,
    sync::OnceLock,
};

use crate::ffi::{
    dynamic::{self, Loaded},
    error::{Result, error},
    variable::variable,
};

use super::{nvrtc::Library, room};

/// File names of NVRTC in its packages, newest first; the last one is the toolkit's.
const FILES: [&CStr; 4] = [c"libnvrtc.so.13", c"libnvrtc.so.12", c"libnvrtc.so.11.2", c"libnvrtc.so"];

/// Paths at which pip installs NVRTC, relative to the folder of Python packages.
const IN_PACKAGES: [&str; 3] = [
    "/nvidia/cu13/lib/libnvrtc.so.13",
    "/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    "/nvidia/cuda_nvrtc/lib/libnvrtc.so.11.2",
];

/// Path at which CUDA's installer puts NVRTC, which the system may not search.
const IN_TOOLKIT: &CStr = c"/usr/local/cuda/lib64/libnvrtc.so";

/// Cache of ldconfig, which contains the path of each system library between NULs.
const SYSTEMS_LIST: &str = "/etc/ld.so.cache";

/// NVRTC handle from the caller, or none. It is a number, so that threads can share it.
#[derive(Clone, Copy)]
pub struct Handle(usize);

/// Result of the search.
static FOUND: OnceLock<Library> = OnceLock::new();

impl Handle {
    #[cfg(test)]
    pub const NONE: Self = Self(0);

    /// # Safety
    /// `handle` is NULL or came from dlopen, and stays open as long as the result is used.
    pub unsafe fn of(handle: *mut c_void) -> Self {
        Self(handle.expose_provenance())
    }

    /// Returns true if neither the caller nor the environment names an NVRTC.
    pub fn is_searched(self) -> bool {
        self.0 == 0 && variable(c"GRADCODEC_NVRTC").is_none()
    }

    /// Returns the caller's NVRTC; otherwise the one that GRADCODEC_NVRTC names, is loaded, or is found.
    pub fn library(self) -> Result<Library> {
        if self.0 != 0 {
            // SAFETY: the caller of `Handle::of` promised a handle that stays open.
            return unsafe { Library::of(ptr::with_exposed_provenance_mut(self.0)) };
        }
        match FOUND.get() {
            Some(library) => Ok(*library),
            // Two threads may search at the same time; one of the two equal tables is kept.
            None => find().map(|library| *FOUND.get_or_init(|| library)),
        }
    }

    /// Returns the file of the NVRTC that [`Self::library`] would return, without loading it. If the dynamic loader
    /// must choose, the result may be another file or None: a caller that loads NVRTC asks the library again.
    pub fn file(self) -> Result<Option<File>> {
        if self.0 != 0 || FOUND.get().is_some() {
            return File::of(self.library()?.file());
        }
        if let Some(named) = variable(c"GRADCODEC_NVRTC") {
            return File::of(named);
        }
        let loaded = Loaded::list()?;
        if loaded_ones(&loaded).next().is_some() || is_visible() {
            return File::of(self.library()?.file());
        }
        first_file(&loaded)
    }
}

/// Path of a file, and the state that distinguishes it from other files at this path before or later.
#[derive(Clone, PartialEq, Eq)]
pub struct File {
    pub path: CString,
    /// Size in bytes, then seconds and nanoseconds of the modification time.
    pub state: [u64; 3],
}

impl File {
    /// Returns None if there is no such file.
    pub fn of(path: &CStr) -> Result<Option<Self>> {
        let mut about = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: `path` ends with a NUL, and `about` outlives the call.
        if unsafe { libc::stat(path.as_ptr(), about.as_mut_ptr()) } != 0 {
            return Ok(None);
        }
        // SAFETY: stat() has succeeded and filled in `about`.
        let about = unsafe { about.assume_init() };
        let mut copy = room(path.count_bytes() + 1)?;
        copy.extend_from_slice(path.to_bytes_with_nul());
        let state = [about.st_size as u64, about.st_mtime as u64, about.st_mtime_nsec as u64];
        Ok(CString::from_vec_with_nul(copy).ok().map(|path| Self { path, state }))
    }
}

/// Finds NVRTC if no caller names it.
fn find() -> Result<Library> {
    if let Some(named) = variable(c"GRADCODEC_NVRTC") {
        if !named.to_bytes().starts_with(b"/") {
            return Err(error!(
                NvrtcUnavailable,
                "GRADCODEC_NVRTC is {}: the whole path of a file expected",
                named.to_string_lossy()
            ));
        }
        let library = dynamic::load(named)
            .ok_or_else(|| error!(NvrtcUnavailable, "cannot load GRADCODEC_NVRTC: {}", dynamic::failure()))?;
        // SAFETY: the library is open and never closed.
        return unsafe { Library::of(library) };
    }
    let loaded = Loaded::list()?;
    // A library that is too old does not end the search.
    let mut useless = None;
    let mut usable = |library: *mut c_void| {
        // SAFETY: `library` is RTLD_DEFAULT or a handle that is never closed.
        unsafe { Library::of(library) }.map_err(|why| useless = Some(why)).ok()
    };
    if let Some(found) = loaded_ones(&loaded).find_map(&mut usable) {
        return Ok(found);
    }
    if is_visible()
        && let Some(found) = usable(libc::RTLD_DEFAULT)
    {
        return Ok(found);
    }
    if let Some(found) = FILES.iter().filter_map(|name| dynamic::load(name)).find_map(&mut usable) {
        return Ok(found);
    }
    let found = first_of_pip(&loaded, |path| Ok(dynamic::load(path).and_then(&mut usable)))?;
    if let Some(found) = found.or_else(|| dynamic::load(IN_TOOLKIT).and_then(&mut usable)) {
        return Ok(found);
    }
    Err(useless.unwrap_or_else(|| {
        error!(
            NvrtcUnavailable,
            "NVRTC was not found: no loaded library is NVRTC, the system finds no libnvrtc.so.13, .so.12, .so.11.2 or .so, \
             pip has put none into the {} folders of Python packages that this process uses, and there is no {}; \
             GRADCODEC_NVRTC may say where it is, or `pip install nvidia-cuda-nvrtc` install it",
            packages(&loaded).count(),
            IN_TOOLKIT.to_string_lossy()
        )
    }))
}

/// Returns the first file that [`find`] would load if none is loaded. The dynamic loader searches the folders of
/// LD_LIBRARY_PATH, then the system's list.
fn first_file(loaded: &Loaded) -> Result<Option<File>> {
    let folders = variable(c"LD_LIBRARY_PATH").unwrap_or_default().to_bytes();
    let list = fs::read(SYSTEMS_LIST).unwrap_or_default();
    let mut path = Vec::new();
    for name in FILES.map(CStr::to_bytes) {
        let is_in_folder = |path: &&[u8]| path.strip_suffix(name).is_some_and(|folder| folder.ends_with(b"/"));
        let listed = list.split(|&byte| byte == 0).find(is_in_folder).map(|path| &path[..path.len() - name.len() - 1]);
        let folders = folders.split(|&byte| matches!(byte, b':' | b';')).filter(|folder| !folder.is_empty());
        for folder in folders.chain(listed) {
            if let Some(file) = File::of(join(&mut path, &[folder, b"/", name])?)? {
                return Ok(Some(file));
            }
        }
    }
    match first_of_pip(loaded, File::of)? {
        None => File::of(IN_TOOLKIT),
        found => Ok(found),
    }
}

/// Returns the first result of `make`, which is called for each path where pip may have put NVRTC for this process.
fn first_of_pip<T>(loaded: &Loaded, mut make: impl FnMut(&CStr) -> Result<Option<T>>) -> Result<Option<T>> {
    let mut path = Vec::new();
    for file in IN_PACKAGES {
        for folder in packages(loaded) {
            if let Some(made) = make(join(&mut path, &[folder, file.as_bytes()])?)? {
                return Ok(Some(made));
            }
        }
    }
    Ok(None)
}

/// Joins the parts of a path; returns "" if it contains a NUL.
fn join<'a>(path: &'a mut Vec<u8>, parts: &[&[u8]]) -> Result<&'a CStr> {
    path.clear();
    let bytes = parts.iter().map(|part| part.len()).sum::<usize>() + 1;
    path.try_reserve(bytes).map_err(|_| error!(OutOfMemory, "cannot allocate {bytes} bytes for a path"))?;
    parts.iter().for_each(|part| path.extend_from_slice(part));
    path.push(0);
    Ok(CStr::from_bytes_with_nul(path).unwrap_or_default())
}

/// Returns true if NVRTC's functions are visible, such as in a library or program of another name.
fn is_visible() -> bool {
    // SAFETY: RTLD_DEFAULT needs no library.
    unsafe { dynamic::address(libc::RTLD_DEFAULT, c"nvrtcVersion") }.is_some()
}

/// Returns each loaded NVRTC, also if its functions are not visible. The handles keep all of them loaded.
fn loaded_ones(loaded: &Loaded) -> impl Iterator<Item = *mut c_void> {
    loaded.names().filter_map(|file| {
        let (_, name) = file.to_str().ok()?.rsplit_once('/')?;
        let is_nvrtc = name.starts_with("libnvrtc") && !name.starts_with("libnvrtc-builtins");
        is_nvrtc.then(|| dynamic::loaded(file)).flatten()
    })
}

/// Returns the folders of Python packages from which this process has loaded libraries, each once.
fn packages(loaded: &Loaded) -> impl Iterator<Item = &[u8]> {
    let folders = || loaded.names().filter_map(|file| packages_of(file.to_bytes()));
    let is_first = move |&(at, folder): &(usize, &[u8])| !folders().take(at).any(|before| before == folder);
    folders().enumerate().filter(is_first).map(|(_, folder)| folder)
}

/// Returns the folder of Python packages that contains a file.
fn packages_of(file: &[u8]) -> Option<&[u8]> {
    ["/site-packages/", "/dist-packages/"].iter().find_map(|name| {
        let at = file.windows(name.len()).rposition(|window| window == name.as_bytes())?;
        Some(&file[..at + name.len() - 1])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_packages_are_found_once_each() {
        let names = b"\0/usr/lib/libc.so.6\0/a/site-packages/torch/lib/libtorch.so\0/a/site-packages/numpy/x.so\0\
            /b/dist-packages/y.so\0/c/site-packages/d/site-packages/z.so\0/site-packages\0";
        let loaded = Loaded::of_names(names);
        let found: Vec<_> = packages(&loaded).map(|folder| std::str::from_utf8(folder).unwrap()).collect();
        assert_eq!(found, ["/a/site-packages", "/b/dist-packages", "/c/site-packages/d/site-packages"]);
    }
}
