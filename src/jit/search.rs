//! Where NVRTC is: found when it is first needed, and known by its file before that, so that a process whose kernels all
//! lie on disk need not load it.

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
};

use super::{nvrtc::Library, room, variable};

/// The names of the files that NVRTC's packages install, the newest first; the last one is a toolkit's.
const FILES: [&CStr; 4] = [c"libnvrtc.so.13", c"libnvrtc.so.12", c"libnvrtc.so.11.2", c"libnvrtc.so"];

/// Where pip puts it, from the folder of Python packages.
const IN_PACKAGES: [&str; 3] = [
    "/nvidia/cu13/lib/libnvrtc.so.13",
    "/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    "/nvidia/cuda_nvrtc/lib/libnvrtc.so.11.2",
];

/// Where CUDA's installer puts it, whether or not the system looks there.
const IN_TOOLKIT: &CStr = c"/usr/local/cuda/lib64/libnvrtc.so";

/// The list of the system's libraries that ldconfig makes: among other things the path of each, between NULs.
const SYSTEMS_LIST: &str = "/etc/ld.so.cache";

/// A library that the caller names, or none. As a number, to be shared between threads.
#[derive(Clone, Copy)]
pub struct Handle(usize);

/// What the search has found.
static FOUND: OnceLock<Library> = OnceLock::new();

impl Handle {
    #[cfg(test)]
    pub const NONE: Self = Self(0);

    /// # Safety
    /// `handle` is NULL or came from dlopen, and stays open as long as this is used.
    pub unsafe fn of(handle: *mut c_void) -> Self {
        Self(handle.expose_provenance())
    }

    /// Whether neither the caller nor the environment names one.
    pub fn is_searched(self) -> bool {
        self.0 == 0 && variable(c"GRADCODEC_NVRTC").is_none()
    }

    /// The one that is named; else the one that GRADCODEC_NVRTC names, that is loaded, or that is found.
    pub fn library(self) -> Result<Library> {
        if self.0 != 0 {
            // SAFETY: `Handle::of` was promised a handle that stays open.
            return unsafe { Library::of(ptr::with_exposed_provenance_mut(self.0)) };
        }
        match FOUND.get() {
            Some(library) => Ok(*library),
            // Two threads may find it side by side; one of the two equal tables stays.
            None => find().map(|library| *FOUND.get_or_init(|| library)),
        }
    }

    /// The file of the NVRTC that [`Self::library`] would give, without loading one. Where only the loader of programs can
    /// tell, it may be another, or None: whoever then loads it asks it for its file.
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

/// A file, and what tells it from others that were or will be in its place.
#[derive(Clone, PartialEq, Eq)]
pub struct File {
    pub path: CString,
    /// Its size, and the seconds and nanoseconds of its time.
    pub state: [u64; 3],
}

impl File {
    /// None if there is no such file.
    pub fn of(path: &CStr) -> Result<Option<Self>> {
        let mut about = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: `path` ends with a NUL, and `about` outlives the call.
        if unsafe { libc::stat(path.as_ptr(), about.as_mut_ptr()) } != 0 {
            return Ok(None);
        }
        // SAFETY: stat() has succeeded, and so filled it in.
        let about = unsafe { about.assume_init() };
        let mut copy = room(path.count_bytes() + 1)?;
        copy.extend_from_slice(path.to_bytes_with_nul());
        let state = [about.st_size as u64, about.st_mtime as u64, about.st_mtime_nsec as u64];
        Ok(CString::from_vec_with_nul(copy).ok().map(|path| Self { path, state }))
    }
}

/// NVRTC where no caller names it.
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
        // SAFETY: it is open, and never closed.
        return unsafe { Library::of(library) };
    }
    let loaded = Loaded::list()?;
    // One that is too old does not end the search.
    let mut useless = None;
    let mut usable = |library: *mut c_void| {
        // SAFETY: RTLD_DEFAULT, or a handle that is never closed.
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

/// The first file that [`find`] would load where none is loaded: the loader of programs looks in the folders of
/// LD_LIBRARY_PATH, and then in the system's list.
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

/// What is first made of a path at which pip would have put NVRTC, in a folder of Python packages that this process uses.
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

/// A path of several parts; "" if there is a NUL in it.
fn join<'a>(path: &'a mut Vec<u8>, parts: &[&[u8]]) -> Result<&'a CStr> {
    path.clear();
    let bytes = parts.iter().map(|part| part.len()).sum::<usize>() + 1;
    path.try_reserve(bytes).map_err(|_| error!(OutOfMemory, "cannot allocate {bytes} bytes for a path"))?;
    parts.iter().for_each(|part| path.extend_from_slice(part));
    path.push(0);
    Ok(CStr::from_bytes_with_nul(path).unwrap_or_default())
}

/// Whether it is within a library or program of another name.
fn is_visible() -> bool {
    // SAFETY: RTLD_DEFAULT needs no library.
    unsafe { dynamic::address(libc::RTLD_DEFAULT, c"nvrtcVersion") }.is_some()
}

/// Each NVRTC that is loaded, also where others do not see its functions. None is closed, whoever else closes it.
fn loaded_ones(loaded: &Loaded) -> impl Iterator<Item = *mut c_void> {
    loaded.names().filter_map(|file| {
        let (_, name) = file.to_str().ok()?.rsplit_once('/')?;
        let is_nvrtc = name.starts_with("libnvrtc") && !name.starts_with("libnvrtc-builtins");
        is_nvrtc.then(|| dynamic::loaded(file)).flatten()
    })
}

/// The folders of Python packages that libraries of this process come from, each once.
fn packages(loaded: &Loaded) -> impl Iterator<Item = &[u8]> {
    let folders = || loaded.names().filter_map(|file| packages_of(file.to_bytes()));
    let is_first = move |&(at, folder): &(usize, &[u8])| !folders().take(at).any(|before| before == folder);
    folders().enumerate().filter(is_first).map(|(_, folder)| folder)
}

/// The folder of Python packages that a file is in.
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
