//! NCCL itself: found when it is first asked for, its answers taken as the integers they are.
//!
//! cudarc declares the functions, and its declarations are held against ours at compile time. It does not make the
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

/// The first that can split communicators, as ncclGetVersion says it, and in words.
pub const OLDEST: (c_int, &str) = (21800, "2.18");

/// The first in which a communicator that does not block can be aborted at any time, as those of our own are.
pub const OLDEST_OF_OWN: (c_int, &str) = (21901, "2.19.1");

/// What a communicator that does not block answers while it is at work.
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

/// Apart from the table, for they do not answer an int, or are asked before there is one.
type GetErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type GetLastError = unsafe extern "C" fn(ncclComm_t) -> *const c_char;
type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;

/// NCCL, as this process has it.
pub struct Library {
    pub functions: Functions,
    error_string: GetErrorString,
    last_error: GetLastError,
    /// How long it is waited for.
    timeout_ms: u32,
    /// What is waited for is of no use any more.
    pub aborted: AtomicBool,
}

impl Library {
    /// The one that a caller names by its handle; else the one that is loaded, if it is clear which.
    ///
    /// # Safety
    /// `handle` is NULL or came from dlopen, and stays open as long as this is used.
    pub unsafe fn of_borrowed(handle: *mut c_void, oldest: (c_int, &str), timeout_ms: u32) -> Result<Self> {
        if !handle.is_null() {
            // SAFETY: the caller's promise.
            return unsafe { Self::of(handle, oldest, timeout_ms) };
        }
        // A communicator belongs to one of them, and no function says to which.
        let copies = copies()?;
        if let [one, other, ..] = copies[..] {
            let (one, other) = (file_of(one), file_of(other));
            return Err(error!(
                CommUnavailable,
                "ncclSend is in {one} and in {other}: dl_handle must say which of them made the communicator"
            ));
        }
        match (loaded(), copies.first()) {
            // SAFETY: it is never closed.
            (Some(library), _) => unsafe { Self::of(library, oldest, timeout_ms) },
            (None, Some(&only)) => Err(error!(
                CommUnavailable,
                "NCCL is not loaded as libnccl.so.2, but {} has ncclSend: its handle as dl_handle says so",
                file_of(only)
            )),
            (None, None) => Err(error!(
                CommUnavailable,
                "no library that is loaded shows ncclSend: dl_handle must say which made the communicator"
            )),
        }
    }

    /// The one that a caller names by its handle; else the one that is loaded; else libnccl.so.2.
    ///
    /// # Safety
    /// As for [`Library::of_borrowed`].
    pub unsafe fn of_new(handle: *mut c_void, timeout_ms: u32) -> Result<Self> {
        let library = if handle.is_null() { loaded().or_else(|| dynamic::load(NAME)) } else { Some(handle) };
        let library = library.ok_or_else(|| error!(CommUnavailable, "cannot load NCCL: {}", dynamic::failure()))?;
        // SAFETY: it is never closed, or the caller's promise.
        unsafe { Self::of(library, OLDEST_OF_OWN, timeout_ms) }
    }

    /// # Safety
    /// `library` is RTLD_DEFAULT or came from dlopen, and stays open as long as this is used.
    unsafe fn of(library: *mut c_void, (oldest, in_words): (c_int, &str), timeout_ms: u32) -> Result<Self> {
        let missing = |name: &CStr| -> Error {
            error!(CommUnavailable, "NCCL has no {}: {in_words} or later is needed", name.to_string_lossy())
        };
        // SAFETY: the caller's promise; these are the functions' types by NCCL's reference.
        unsafe {
            let address = |name| dynamic::address(library, name).ok_or_else(|| missing(name));
            let version = mem::transmute::<*mut c_void, GetVersion>(address(c"ncclGetVersion")?);
            let error_string = mem::transmute::<*mut c_void, GetErrorString>(address(c"ncclGetErrorString")?);
            // Before anything that an older one may lack.
            let mut found = 0;
            match version(&mut found) {
                0 => {}
                code => {
                    let why = CStr::from_ptr(error_string(code)).to_string_lossy();
                    return Err(error!(CommUnavailable, "ncclGetVersion: {why} ({code})"));
                }
            }
            if found < oldest {
                // Up to 2.8 the number had a digit less.
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

    /// Turns what a call answered into a result; `call` says which it was, and on what.
    pub fn check(&self, code: c_int, call: fmt::Arguments<'_>) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.failure(code, call)) }
    }

    #[cold]
    pub fn failure(&self, code: c_int, call: fmt::Arguments<'_>) -> Error {
        // SAFETY: any code may be asked for, and NULL for the communicator.
        let (name, last) = unsafe { ((self.error_string)(code), (self.last_error)(ptr::null_mut())) };
        let mut text = [0u8; 200];
        let mut length = 0;
        while length < text.len() && !last.is_null() {
            // Read once and by bytes, for another thread's failure may be written there meanwhile.
            // SAFETY: NCCL's text ends with a NUL that stays, and no byte before it was one.
            match unsafe { last.add(length).cast::<u8>().read_volatile() } {
                0 | b'\n' => break,
                byte => text[length] = byte,
            }
            length += 1;
        }
        let details = String::from_utf8_lossy(&text[..length]);
        let separator = if length > 0 { "; " } else { "" };
        // SAFETY: a text of NCCL's that stays.
        let name = if name.is_null() { c"an unknown error" } else { unsafe { CStr::from_ptr(name) } };
        error!(Comm, "{call}: {} ({code}){separator}{details}", name.to_string_lossy())
    }

    /// Waits while a communicator that does not block is at work on what a call asked of it, as its `state` says.
    pub fn settle(&self, state: impl Fn() -> Result<c_int>, mut code: c_int, call: fmt::Arguments<'_>) -> Result<()> {
        self.poll(call, || {
            if code == IN_PROGRESS {
                code = state()?;
            }
            Ok(code != IN_PROGRESS)
        })?;
        self.check(code, call)
    }

    /// COMM once it was aborted.
    pub fn check_aborted(&self) -> Result<()> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(error!(Comm, "communicator: was aborted"));
        }
        Ok(())
    }

    /// Asks until something is done, which `call` names, the timeout has passed, or it was aborted.
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

    /// The error of a communicator, or that it is at work.
    ///
    /// # Safety
    /// `comm` is a communicator of this library.
    pub unsafe fn state(&self, comm: ncclComm_t) -> Result<c_int> {
        let mut state: c_int = 0;
        // SAFETY: the caller's promise; the enum is an int to NCCL, and the place outlives the call.
        let code = unsafe { (self.functions.ncclCommGetAsyncError)(comm, ptr::from_mut(&mut state).cast()) };
        self.check(code, format_args!("ncclCommGetAsyncError"))?;
        Ok(state)
    }

    /// A new communicator, by a call that puts it into a place.
    ///
    /// # Safety
    /// `call` calls a function of this library with its argument; `parent` is a communicator of this library that the
    /// new one is split from, or NULL.
    pub unsafe fn make(
        &self, parent: ncclComm_t, name: &str, call: impl FnOnce(*mut ncclComm_t) -> c_int,
    ) -> Result<ncclComm_t> {
        let place = Box::new(AtomicPtr::<ncclComm>::new(ptr::null_mut()));
        let code = call(place.as_ptr());
        // Where it is split from another one, and that does not block, a thread of NCCL's fills the place while the
        // other one is at work.
        let at_work = if parent.is_null() { place.load(Ordering::Acquire) } else { parent };
        // SAFETY: a communicator of this library.
        let state = |comm| unsafe { self.state(comm) };
        let outcome = self.settle(|| state(at_work), code, format_args!("{name}"));
        let made = place.load(Ordering::Acquire);
        let outcome = outcome.and_then(|()| match made.is_null() {
            false => self.settle(|| state(made), state(made)?, format_args!("{name}")),
            true => Err(error!(Comm, "{name}: it made no communicator")),
        });
        if outcome.is_err() {
            if !made.is_null() {
                // SAFETY: a communicator of this library that nothing else has. Errors are
                // ignored: the one that led here is returned.
                unsafe { (self.functions.ncclCommAbort)(made) };
            }
            if code == IN_PROGRESS {
                mem::forget(place); // whether NCCL is done with it is not known
            }
        }
        outcome.map(|()| made)
    }
}

/// NCCL as this process has loaded it, if it has: RTLD_DEFAULT, or a handle that is never closed.
fn loaded() -> Option<*mut c_void> {
    // SAFETY: RTLD_DEFAULT needs no library.
    if unsafe { dynamic::address(libc::RTLD_DEFAULT, c"ncclSend") }.is_some() {
        return Some(libc::RTLD_DEFAULT);
    }
    dynamic::loaded(NAME)
}

/// The only name in NCCL's packages that programs can rely on.
const NAME: &CStr = c"libnccl.so.2";

/// Where each ncclSend of this process is, also of libraries whose names others do not see.
fn copies() -> Result<Vec<*mut c_void>> {
    let loaded = Loaded::list()?;
    let mut found = Vec::new();
    for name in loaded.names() {
        let Some(library) = dynamic::loaded(name) else { continue }; // the kernel's own, or closed meanwhile
        // SAFETY: it is open, until it is closed here, which leaves it to those who have it open, too.
        let address = unsafe {
            let address = dynamic::address(library, c"ncclSend");
            libc::dlclose(library);
            address
        };
        // Those that depend on it show it, too.
        if let Some(address) = address.filter(|address| !found.contains(address)) {
            fallible::reserve(&mut found, 1, "libraries")?;
            found.push(address);
        }
    }
    Ok(found)
}

/// The file of the library that has an address, for a sentence.
fn file_of(address: *mut c_void) -> String {
    // SAFETY: the name is copied at once; its library was loaded a moment ago.
    let name = unsafe { dynamic::file_of(address) }.unwrap_or(c"a library that was closed meanwhile");
    crate::ffi::error::sentence(format_args!("{}", name.to_string_lossy()))
}
