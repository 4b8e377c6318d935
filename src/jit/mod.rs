//! Kernels that NVRTC compiles at run time. Code that was compiled before from the same source is read from disk.
//!
//! - `nvrtc`: the compiler; `search`: finds its library;
//! - `cache`: a directory of the user with code compiled before, on this machine or on another one;
//! - `brackets`: finds unbalanced brackets in a text that does not compile;
//! - `definition`, `parameters`, `types`: the user's definition of a kernel;
//! - `entries`, `layout`, `source`: the kernels of a source, the layout of their argument, and the source text;
//! - `loops`: the addresses of the elements of a launch.

#[allow(non_camel_case_types, clippy::missing_safety_doc, reason = "C names; lib.rs says what all require")]
pub mod api;
mod brackets;
mod cache;
pub mod cuda;
pub mod definition;
pub mod entries;
pub mod layout;
pub mod loops;
mod nvrtc;
pub mod ops;
pub mod parameters;
mod search;
pub mod source;
pub mod types;

use sha2::{Digest, Sha256};

use crate::ffi::error::{Result, Status, error};

use cache::{Cache, Key, REQUEST};
use search::File;

pub use search::Handle;

/// A kernel to compile.
pub struct Request<'a> {
    /// Name of the source in messages: "scale" in "scale(3): error: ...", unless a #line directive changes it.
    pub name: &'a str,
    pub source: &'a str,
    /// Options of NVRTC except the architecture.
    pub options: &'a [&'a str],
    /// Name of the kernel, which is part of the key.
    pub entry: &'a str,
    /// Compute capability of the GPU: (9, 0) for 9.0.
    pub capability: (u32, u32),
    pub nvrtc: Handle,
    /// True if the result depends on files, whose contents are not in the key.
    pub reads_files: bool,
    /// True if the code may be read from disk and kept there.
    pub use_disk: bool,
}

/// Code that the driver loads: machine code of the GPU, or PTX with its NUL if NVRTC does not support the GPU. The
/// error is the message of a source or options that do not compile: compiling again would fail again, unless files are
/// read.
pub type Compiled = std::result::Result<Vec<u8>, String>;

/// Compiles a kernel. `log` receives NVRTC's output, warnings included, also if this fails. For code from disk, it
/// receives the output of that compilation.
pub fn compile(request: &Request<'_>, log: &mut String) -> Result<Compiled> {
    log.clear();
    let cache = if request.use_disk && !request.reads_files { Cache::open()? } else { None };
    match (compile_with(&cache, request, log), &cache) {
        // No NVRTC is named, and none works. The code may have been compiled on another machine.
        (Err(why), Some(cache)) if why.status == Status::NvrtcUnavailable && request.nvrtc.is_searched() => {
            let mut log_of_code = String::new();
            let kept = cache.find_any(&request_key(request), &mut log_of_code)?.ok_or(why)?;
            *log = log_of_code;
            Ok(Ok(kept))
        }
        (compiled, _) => compiled,
    }
}

/// Reads from disk the code that this machine's NVRTC compiled before, or compiles the kernel and stores its code.
fn compile_with(cache: &Option<Cache>, request: &Request<'_>, log: &mut String) -> Result<Compiled> {
    let file = match cache {
        Some(_) => request.nvrtc.file()?,
        None => None,
    };
    if let Some(code) = kept(cache, request, &file, log)? {
        return Ok(Ok(code));
    }
    let nvrtc = request.nvrtc.library()?;
    // The dynamic loader may have found another library.
    let before = file;
    let file = match cache {
        Some(_) => File::of(nvrtc.file())?,
        None => None,
    };
    if file != before
        && let Some(code) = kept(cache, request, &file, log)?
    {
        return Ok(Ok(code));
    }
    let compiled = nvrtc.compile(request, log)?;
    if let (Some(cache), Some(file), Ok(code)) = (cache, &file, &compiled) {
        cache.keep(&key(request, file), code, log)?;
    }
    Ok(compiled)
}

/// Returns the stored code of a request, if the NVRTC in `file` compiled it.
fn kept(
    cache: &Option<Cache>, request: &Request<'_>, file: &Option<File>, log: &mut String,
) -> Result<Option<Vec<u8>>> {
    match (cache, file) {
        (Some(cache), Some(file)) => cache.find(&key(request, file), log),
        _ => Ok(None),
    }
}

/// Returns the key of a file on disk: the request's key, then 8 bytes of a digest of NVRTC's path and state.
fn key(request: &Request<'_>, nvrtc: &File) -> Key {
    let mut digest = Sha256::new();
    add_part(&mut digest, nvrtc.path.to_bytes());
    nvrtc.state.iter().for_each(|number| add_part(&mut digest, &number.to_le_bytes()));
    let mut key = [0; _];
    key[..REQUEST].copy_from_slice(&request_key(request));
    key[REQUEST..].copy_from_slice(&digest.finalize()[..size_of::<Key>() - REQUEST]);
    key
}

/// Returns a digest of everything that decides the result, except NVRTC. Each part is hashed after its length, so no
/// two requests have the same input.
fn request_key(request: &Request<'_>) -> [u8; REQUEST] {
    let mut key = Sha256::new();
    let mut add = |part: &[u8]| add_part(&mut key, part);
    add(env!("CARGO_PKG_VERSION").as_bytes());
    let (major, minor) = request.capability;
    [major, minor].iter().for_each(|number| add(&number.to_le_bytes()));
    add(request.name.as_bytes());
    add(request.entry.as_bytes());
    add(&(request.options.len() as u64).to_le_bytes());
    for option in request.options {
        add(option.as_bytes());
    }
    add(request.source.as_bytes());
    key.finalize().into()
}

fn add_part(key: &mut Sha256, part: &[u8]) {
    key.update((part.len() as u64).to_le_bytes());
    key.update(part);
}

/// Returns a copy of a text; OutOfMemory if it cannot be allocated.
pub fn owned(text: &str) -> Result<String> {
    let mut copy = String::new();
    let bytes = text.len();
    copy.try_reserve_exact(bytes).map_err(|_| error!(OutOfMemory, "cannot allocate {bytes} bytes of text"))?;
    copy.push_str(text);
    Ok(copy)
}

/// Returns a copy of `bytes`; OutOfMemory if it cannot be allocated.
fn copied(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut copy = room(bytes.len())?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}

/// Returns an empty vector with room for `bytes` bytes.
fn room(bytes: usize) -> Result<Vec<u8>> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(bytes).map_err(|_| error!(OutOfMemory, "cannot allocate {bytes} bytes for a kernel"))?;
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::HashSet, ffi::CStr};

    fn request<'a>(name: &'a str, source: &'a str, options: &'a [&'a str]) -> Request<'a> {
        Request {
            name,
            source,
            options,
            entry: "k",
            capability: (9, 0),
            nvrtc: Handle::NONE,
            reads_files: false,
            use_disk: true,
        }
    }

    #[test]
    fn every_input_of_the_output_is_in_the_key() {
        let file = |path: &CStr, state| File { path: path.into(), state };
        let usual = file(c"/a/libnvrtc.so.12", [1, 2, 3]);
        let requests = [
            request("a", "bc", &["d", "e"]),
            request("ab", "c", &["d", "e"]),
            request("a", "bcd", &["e"]),
            request("a", "bc", &["de"]),
            request("a", "bc", &["e", "d"]),
            request("a", "bc", &["d", "e", ""]),
            request("a", "b\nc", &["d", "e"]),
            request("a", "bc", &["de", ""]),
            Request { entry: "l", ..request("a", "bc", &["d", "e"]) },
            Request { entry: "", ..request("ak", "bc", &["d", "e"]) },
        ];
        let mut keys: Vec<_> = requests.iter().map(|request| key(request, &usual)).collect();
        let first = request("a", "bc", &["d", "e"]);
        for capability in [(9, 1), (1, 9), (8, 0), (90, 0)] {
            keys.push(key(&Request { capability, ..request("a", "bc", &["d", "e"]) }, &usual));
        }
        // The path differs, or the file at the same path.
        for (path, state) in [
            (c"/b/libnvrtc.so.12", [1, 2, 3]),
            (c"/a/libnvrtc.so.12", [9, 2, 3]),
            (c"/a/libnvrtc.so.12", [1, 9, 3]),
            (c"/a/libnvrtc.so.12", [1, 2, 9]),
        ] {
            keys.push(key(&first, &file(path, state)));
        }
        assert_eq!(keys[0], key(&first, &usual));
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len());
        let of_request = |key: &Key| key[..REQUEST].to_vec();
        assert!(keys[keys.len() - 4..].iter().all(|key| of_request(key) == of_request(&keys[0])));
    }
}
