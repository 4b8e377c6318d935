//! NCCL's functions, found at first use. Their results are taken as integers.
//!
//! cudarc declares the functions, and the compiler checks our declarations against its own. cudarc does not make the
//! calls: it panics where a library is missing, does not look for `libnccl.so.2`, and returns a Rust enum.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fmt, mem, ptr,
    sync::atomic::{AtomicBool, AtomicPtr, Ordering},
    thread,
    time::{Duration, Instant},
};

use cudarc::nccl::sys::{
    self, cudaStream_t, ncclComm, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclResult_t, ncclUniqueId,
};

use crate::ffi::{
    dynamic::{self, Loaded, table},
    error::{Error, Result, error},
    fallible,
};

use super::exchange::timeout;

/// Oldest version that can split communicators: the number that ncclGetVersion returns, and its text.
pub const OLDEST: (c_int, &str) = (21800, "2.18");

/// Oldest version in which a non-blocking communicator can be aborted at any time. Owned communicators need it.
pub const OLDEST_OF_OWN: (c_int, &str) = (21901, "2.19.1");

/// Result of a non-blocking communicator that is still at work.
pub const IN_PROGRESS: c_int = 7;

table! {
    /// The functions of NCCL.
    Functions, declared in sys to answer ncclResult_t,
    required {
        ncclGetUniqueId(*mut ncclUniqueId);
        ncclCommInitRankConfig(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t);
        ncclCommSplit(ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut ncclConfig_t);
        ncclCommDestroy(ncclComm_t);
        ncclCommAbort(ncclComm_t);
        ncclCommCount(ncclComm_t, *mut c_int);
        ncclCommCuDevice(ncclComm_t, *mut c_int);
        ncclCommUserRank(ncclComm_t, *mut c_int);
        ncclCommGetAsyncError(ncclComm_t, *mut ncclResult_t);
        ncclSend(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t);
        ncclRecv(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t);
        ncclAllGather(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t);
        ncclGroupStart();
        ncclGroupEnd();
    }
    optional {}
}

/// Types of functions outside the table: these do not return an int, or are called before there is a table.
type GetErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type GetLastError = unsafe extern "C" fn(ncclComm_t) -> *const c_char;
type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;

/// NCCL library that this process uses.
pub struct Library {
    pub functions: Functions,
    error_string: GetErrorString,
    last_error: GetLastError,
    /// Longest wait for NCCL, in milliseconds.
    timeout_ms: u32,
    /// True once the communicator is aborted, which ends all waits.
    pub aborted: AtomicBool,
}

impl Library {
    /// Returns the library with the caller's handle or, for NULL, the one that is loaded, if there is only one.
    ///
    /// # Safety
    /// `handle` is NULL or came from dlopen, and stays open as long as the result is used.
    pub unsafe fn of_borrowed(handle: *mut c_void, oldest: (c_int, &str), timeout_ms: u32) -> Result<Self> {
        if !handle.is_null() {
            // SAFETY: the caller promises that `handle` came from dlopen, and keeps it open.
            return unsafe { Self::of(handle, oldest, timeout_ms) };
        }
        // A communicator belongs to one of the libraries, and no function returns which one.
        let copies = copies()?;
        if let [one, other, ..] = copies[..] {
            let (one, other) = (file_of(one), file_of(other));
            return Err(error!(
                CommUnavailable,
                "ncclSend is in {one} and in {other}: dl_handle must say which of them made the communicator"
            ));
        }
        match (loaded(), copies.first()) {
            // SAFETY: a handle from `loaded` is never closed.
            (Some(library), _) => unsafe { Self::of(library, oldest, timeout_ms) },
            (None, Some(&only)) => Err(error!(
                CommUnavailable,
                "NCCL is not loaded as libnccl.so.2, but {} has ncclSend: pass that library's handle as dl_handle",
                file_of(only)
            )),
            (None, None) => Err(error!(
                CommUnavailable,
                "no library that is loaded shows ncclSend: dl_handle must say which made the communicator"
            )),
        }
    }

    /// Returns the library with the caller's handle or, for NULL, the one that is loaded, or else libnccl.so.2.
    ///
    /// # Safety
    /// See [`Library::of_borrowed`].
    pub unsafe fn of_new(handle: *mut c_void, timeout_ms: u32) -> Result<Self> {
        let library = if handle.is_null() { loaded().or_else(|| dynamic::load(NAME)) } else { Some(handle) };
        let library = library.ok_or_else(|| error!(CommUnavailable, "cannot load NCCL: {}", dynamic::failure()))?;
        // SAFETY: a handle from `loaded` or `load` is never closed; the caller keeps its own open.
        unsafe { Self::of(library, OLDEST_OF_OWN, timeout_ms) }
    }

    /// # Safety
    /// `library` is RTLD_DEFAULT or came from dlopen, and stays open as long as the result is used.
    unsafe fn of(library: *mut c_void, (oldest, in_words): (c_int, &str), timeout_ms: u32) -> Result<Self> {
        let missing = |name: &CStr| -> Error {
            error!(CommUnavailable, "NCCL has no {}: {in_words} or later is needed", name.to_string_lossy())
        };
        // SAFETY: the caller promises an open library; the functions have these types in NCCL's reference.
        unsafe {
            let address = |name| dynamic::address(library, name).ok_or_else(|| missing(name));
            let version = mem::transmute::<*mut c_void, GetVersion>(address(c"ncclGetVersion")?);
            let error_string = mem::transmute::<*mut c_void, GetErrorString>(address(c"ncclGetErrorString")?);
            // Check the version before looking up functions that an older NCCL may lack.
            let mut found = 0;
            match version(&mut found) {
                0 => {}
                code => {
                    let why = CStr::from_ptr(error_string(code)).to_string_lossy();
                    return Err(error!(CommUnavailable, "ncclGetVersion: {why} ({code})"));
                }
            }
            if found < oldest {
                // Up to NCCL 2.8 the number has one digit less.
                let major = if found < 10000 { 1000 } else { 10000 };
                return Err(error!(
                    CommUnavailable,
                    "NCCL is of version {}.{}.{} ({found}); {in_words} or later is needed",
                    found / major,
                    found % major / 100,
                    found % 100
                ));
            }
            let last_error = mem::transmute::<*mut c_void, GetLastError>(address(c"ncclGetLastError")?);
            let functions = Functions::of(library).map_err(missing)?;
            let (timeout_ms, aborted) = (timeout(timeout_ms), AtomicBool::new(false));
            Ok(Self { functions, error_string, last_error, timeout_ms, aborted })
        }
    }

    /// Turns the code of a call into a result. `call`: the call and its argument, for the message.
    pub fn check(&self, code: c_int, call: fmt::Arguments<'_>) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.failure(code, call)) }
    }

    #[cold]
    pub fn failure(&self, code: c_int, call: fmt::Arguments<'_>) -> Error {
        // SAFETY: both functions accept these arguments: any code, and NULL as the communicator.
        let (name, last) = unsafe { ((self.error_string)(code), (self.last_error)(ptr::null_mut())) };
        let mut text = [0u8; 200];
        let mut length = 0;
        while length < text.len() && !last.is_null() {
            // Read each byte once: a failure of another thread may overwrite the text meanwhile.
            // SAFETY: NCCL's text ends with a NUL that stays, and no byte read so far was a NUL.
            match unsafe { last.add(length).cast::<u8>().read_volatile() } {
                0 | b'\n' => break,
                byte => text[length] = byte,
            }
            length += 1;
        }
        let details = String::from_utf8_lossy(&text[..length]);
        let separator = if length > 0 { "; " } else { "" };
        // SAFETY: NCCL's text ends with a NUL, and stays.
        let name = if name.is_null() { c"an unknown error" } else { unsafe { CStr::from_ptr(name) } };
        error!(Comm, "{call}: {} ({code}){separator}{details}", name.to_string_lossy())
    }

    /// Waits while a non-blocking communicator is at work on a call. `state`: returns its current state.
    pub fn settle(&self, state: impl Fn() -> Result<c_int>, mut code: c_int, call: fmt::Arguments<'_>) -> Result<()> {
        self.poll(call, || {
            if code == IN_PROGRESS {
                code = state()?;
            }
            Ok(code != IN_PROGRESS)
        })?;
        self.check(code, call)
    }

    /// Returns COMM once the communicator is aborted.
    pub fn check_aborted(&self) -> Result<()> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(error!(Comm, "communicator: was aborted"));
        }
        Ok(())
    }

    /// Polls until `is_done` returns true, the timeout has passed or the communicator is aborted. `call`: for messages.
    pub fn poll(&self, call: fmt::Arguments<'_>, mut is_done: impl FnMut() -> Result<bool>) -> Result<()> {
        let (begin, timeout) = (Instant::now(), Duration::from_millis(self.timeout_ms.into()));
        let mut polls = 0u32;
        while !is_done()? {
            self.check_aborted()?;
            if begin.elapsed() >= timeout {
                return Err(error!(Timeout, "{call}: still in progress after {} ms", self.timeout_ms));
            }
            polls = polls.saturating_add(1);
            match polls {
                0..1000 => thread::yield_now(),
                _ => thread::sleep(Duration::from_micros(100)),
            }
        }
        Ok(())
    }

    /// Returns the error of a communicator, or IN_PROGRESS.
    ///
    /// # Safety
    /// `comm` is a communicator of this library.
    pub unsafe fn state(&self, comm: ncclComm_t) -> Result<c_int> {
        let mut state: c_int = 0;
        // SAFETY: the caller promises a communicator of this library; NCCL's enum is an int; `state` outlives the call.
        let code = unsafe { (self.functions.ncclCommGetAsyncError)(comm, ptr::from_mut(&mut state).cast()) };
        self.check(code, format_args!("ncclCommGetAsyncError"))?;
        Ok(state)
    }

    /// Creates a communicator. `call` gets a place, and has NCCL write the communicator there.
    ///
    /// # Safety
    /// `call` calls a function of this library with its argument; `parent` is a communicator of this library that the
    /// new one is split from, or NULL.
    pub unsafe fn make(
        &self, parent: ncclComm_t, name: &str, call: impl FnOnce(*mut ncclComm_t) -> c_int,
    ) -> Result<ncclComm_t> {
        let place = Box::new(AtomicPtr::<ncclComm>::new(ptr::null_mut()));
        let code = call(place.as_ptr());
        // If the communicator is split from a non-blocking one, a thread of NCCL fills the place while the parent is at
        // work.
        let at_work = if parent.is_null() { place.load(Ordering::Acquire) } else { parent };
        // SAFETY: `comm` is a communicator of this library: `parent` or the new one.
        let state = |comm| unsafe { self.state(comm) };
        let outcome = self.settle(|| state(at_work), code, format_args!("{name}"));
        let made = place.load(Ordering::Acquire);
        let outcome = outcome.and_then(|()| match made.is_null() {
            false => self.settle(|| state(made), state(made)?, format_args!("{name}")),
            true => Err(error!(Comm, "{name}: it made no communicator")),
        });
        if outcome.is_err() {
            if !made.is_null() {
                // SAFETY: this library made the communicator, and nothing else has it. An error is ignored: the first
                // one is returned.
                unsafe { (self.functions.ncclCommAbort)(made) };
            }
            if code == IN_PROGRESS {
                mem::forget(place); // NCCL may still write to it
            }
        }
        outcome.map(|()| made)
    }
}

/// Returns the NCCL that this process has loaded, if any: RTLD_DEFAULT, or a handle that is never closed.
fn loaded() -> Option<*mut c_void> {
    // SAFETY: RTLD_DEFAULT is valid without an open library.
    if unsafe { dynamic::address(libc::RTLD_DEFAULT, c"ncclSend") }.is_some() {
        return Some(libc::RTLD_DEFAULT);
    }
    dynamic::loaded(NAME)
}

/// Only file name in NCCL's packages that programs can rely on.
const NAME: &CStr = c"libnccl.so.2";

/// Returns the address of each ncclSend in this process, also in libraries that were loaded with RTLD_LOCAL.
fn copies() -> Result<Vec<*mut c_void>> {
    let loaded = Loaded::list()?;
    let mut found = Vec::new();
    for name in loaded.names() {
        let Some(library) = dynamic::loaded(name) else { continue }; // the vDSO, or closed meanwhile
        // SAFETY: `library` is open until it is closed here. Others who have it open keep it.
        let address = unsafe {
            let address = dynamic::address(library, c"ncclSend");
            libc::dlclose(library);
            address
        };
        // dlsym also finds the function through libraries that depend on NCCL, so an address may repeat.
        if let Some(address) = address.filter(|address| !found.contains(address)) {
            fallible::reserve(&mut found, 1, "libraries")?;
            found.push(address);
        }
    }
    Ok(found)
}

/// Returns the file of the library that contains an address, for a message.
fn file_of(address: *mut c_void) -> String {
    // SAFETY: the name is copied at once; its library was loaded a moment ago.
    let name = unsafe { dynamic::file_of(address) }.unwrap_or(c"a library that was closed meanwhile");
    crate::ffi::error::sentence(format_args!("{}", name.to_string_lossy()))
}
