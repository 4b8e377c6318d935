//! Exchanges over NCCL.

use std::{
    ffi::{c_char, c_int, c_void},
    fmt, mem, ptr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclUniqueId};

use crate::{
    comm::record::{self, Bytes},
    cuda::{self, InPrimary, Stream},
    device::Block,
    dlpack::Device,
    ffi::{
        detached,
        error::{Result, Status, error},
        panics::boundary,
    },
};

use super::{
    exchange::{Exchange, Pattern, Transport},
    nccl_library::{Functions, IN_PROGRESS, Library, OLDEST, OLDEST_OF_OWN},
};

/// Size of the id by which ranks find each other, in bytes.
pub const ID_BYTES: usize = 128;

/// Stack of a thread that aborts or releases a communicator, in bytes. It is enough for NCCL's calls.
const STACK_BYTES: usize = 1 << 20;

/// Longest wait of a release for NCCL, which waits for the other ranks of the node. They may release theirs much later,
/// or after a call that waits for this rank: Python's garbage collection chooses the time.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

/// Beginning of ncclConfig_t, unchanged since NCCL 2.14. NCCL uses defaults for all fields beyond `size`.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Config {
    /// Configuration of an owned communicator, which does not block.
    const OWN: Self =
        Self { size: mem::offset_of!(Self, blocking) + 4, magic: 0xcafe_beef, version: 21400, blocking: 0 };
}

/// Transport over a communicator of NCCL.
pub struct Nccl {
    shared: Arc<Shared>,
    rank: usize,
    world: usize,
    /// True if a call on the communicator has failed.
    broken: AtomicBool,
    /// Memory for the record of this rank, followed by the records of all ranks.
    records: Option<cuda::Memory>,
    /// True once a wait for NCCL has timed out: its work may never end.
    hangs: AtomicBool,
}

/// State shared with the threads that abort and release the communicator.
struct Shared {
    library: Library,
    comm: ncclComm_t,
    /// True if the library created the communicator, and must destroy it.
    owned: bool,
    device: i32,
    /// Lock for calls to NCCL on an owned communicator. These calls do not block.
    calls: Mutex<()>,
    /// True once a thread is aborting the communicator, or has aborted it.
    aborting: AtomicBool,
}

// SAFETY: an NCCL communicator is not bound to a thread.
unsafe impl Send for Shared {}
// SAFETY: `Communicator` admits one call at a time. The state of a borrowed communicator may be queried at any time,
// and an owned one is used only under the lock `calls`.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(library: Library, comm: ncclComm_t, owned: bool, device: i32) -> Self {
        Self { library, comm, owned, device, calls: Mutex::new(()), aborting: AtomicBool::new(false) }
    }

    /// Returns the communicator for a call to NCCL and, if it is owned, a guard that keeps it from being aborted.
    fn enter(&self) -> Result<(ncclComm_t, Option<MutexGuard<'_, ()>>)> {
        let entered = self.owned.then(|| self.calls.lock().unwrap_or_else(PoisonError::into_inner));
        self.library.check_aborted()?; // a thread that aborts it later waits for the guard
        Ok((self.comm, entered))
    }

    fn state(&self) -> Result<c_int> {
        let (comm, _entered) = self.enter()?;
        // SAFETY: `_entered` keeps an owned communicator alive, and the program a borrowed one.
        unsafe { self.library.state(comm) }
    }

    fn settle(&self, code: c_int, call: fmt::Arguments<'_>) -> Result<()> {
        self.library.settle(|| self.state(), code, call)
    }

    /// Returns the error that NCCL reports for the communicator. Never waits.
    fn async_error(&self, rank: usize) -> Result<()> {
        let _entered = match self.calls.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(()), // the running call reports the error
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Ok(entered) => entered,
        };
        self.library.check_aborted()?;
        // SAFETY: `_entered` keeps an owned communicator alive, and the program a borrowed one.
        match unsafe { self.library.state(self.comm)? } {
            0 | IN_PROGRESS => Ok(()),
            code => Err(self.library.failure(code, format_args!("communicator: rank {rank}"))),
        }
    }

    /// Aborts an owned communicator, which ends NCCL's work on it. Waits for NCCL.
    fn abort(&self) -> Result<()> {
        // If this fails, a later call or the release tries again.
        let _entered =
            InPrimary::enter_relaxed(self.device).inspect_err(|_| self.aborting.store(false, Ordering::Release))?;
        let _alone = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the communicator is owned, and nothing uses it any more: `enter` fails once it is aborted. Errors are
        // ignored: there is no caller left to return them to.
        unsafe { (self.library.functions.ncclCommAbort)(self.comm) };
        Ok(())
    }

    /// Destroys an owned communicator, or aborts it if it is broken.
    fn release(&self, is_broken: bool) {
        let Ok(_entered) = InPrimary::enter_relaxed(self.device) else { return };
        let Functions { ncclCommDestroy, ncclCommAbort, .. } = self.library.functions;
        // SAFETY: the communicator is owned, and nothing uses it any more. Errors are ignored: no caller is left.
        unsafe { if is_broken { ncclCommAbort(self.comm) } else { ncclCommDestroy(self.comm) } };
    }
}

/// Runs on the thread that aborts a communicator.
extern "C" fn abort_shared(shared: *mut c_void) -> *mut c_void {
    boundary(|| {
        // SAFETY: `Nccl::abort` boxed the pointer for this thread.
        let shared = unsafe { Box::from_raw(shared.cast::<Arc<Shared>>()) };
        shared.abort()?;
        Ok(ptr::null_mut::<c_void>())
    })
}

/// Argument of `release_shared`: the communicator, true if it is broken, and a channel for the end of the release.
type Release = (Arc<Shared>, bool, mpsc::Sender<()>);

/// Runs on the thread that releases a communicator.
extern "C" fn release_shared(given: *mut c_void) -> *mut c_void {
    boundary(|| {
        // SAFETY: `Nccl::drop` boxed the pointer for this thread.
        let (shared, is_broken, released) = *unsafe { Box::from_raw(given.cast::<Release>()) };
        shared.release(is_broken);
        let _ = released.send(()); // fails if the release is no longer waited for
        Ok(ptr::null_mut::<c_void>())
    })
}

impl Nccl {
    /// Returns an id, which the caller passes to all ranks of a new world.
    ///
    /// # Safety
    /// `handle` is NULL or came from dlopen, and is open.
    pub unsafe fn new_id(handle: *mut c_void) -> Result<[u8; ID_BYTES]> {
        // SAFETY: the caller promises that `handle` is NULL or came from dlopen, and stays open.
        let library = unsafe { Library::of_new(handle, 0)? };
        let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
        // SAFETY: `id` outlives the call.
        let code = unsafe { (library.functions.ncclGetUniqueId)(&mut id) };
        library.check(code, format_args!("ncclGetUniqueId"))?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// Creates an owned communicator. Blocks until all ranks of the world call this.
    ///
    /// # Safety
    /// `handle` is NULL or came from dlopen, and stays open until all ranks of the node have released the communicator.
    pub unsafe fn of_id(
        handle: *mut c_void, id: &[u8; ID_BYTES], rank: i32, world: i32, device: Device, timeout_ms: u32,
    ) -> Result<Self> {
        let Device::Cuda(device) = device else {
            return Err(error!(UnsupportedDevice, "device: {device}; NCCL exchanges memory of CUDA devices"));
        };
        if rank < 0 || rank >= world {
            return Err(error!(InvalidArgument, "rank {rank} of {world}: 0 <= rank < world_size expected"));
        }
        // SAFETY: the caller promises that `handle` is NULL or came from dlopen, and stays open.
        let library = unsafe { Library::of_new(handle, timeout_ms)? };
        let _entered = InPrimary::enter(device)?;
        let records = Some(room_for_records(device, world)?);
        let id = ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        // SAFETY: the closure calls a function of `library` with the place that it gets; there is no parent.
        let comm = unsafe {
            library.make(ptr::null_mut(), "ncclCommInitRankConfig", |place| {
                let mut config = Config::OWN;
                (library.functions.ncclCommInitRankConfig)(place, world, id, rank, ptr::from_mut(&mut config).cast())
            })?
        };
        Ok(Self::over(Arc::new(Shared::new(library, comm, true, device)), rank, world, records))
    }

    fn over(shared: Arc<Shared>, rank: c_int, world: c_int, records: Option<cuda::Memory>) -> Self {
        let (broken, hangs) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { shared, rank: rank as usize, world: world as usize, broken, records, hangs }
    }

    /// Borrows the caller's communicator. With `split`, creates an owned one; all its ranks must then call this.
    ///
    /// # Safety
    /// `comm` is a communicator of the library with this handle, or of the only NCCL if that is NULL. The library stays
    /// as long as the result lives; so does `comm`, unless it is split.
    pub unsafe fn of_comm(handle: *mut c_void, comm: *mut c_void, split: bool, timeout_ms: u32) -> Result<Self> {
        let comm: ncclComm_t = comm.cast();
        // SAFETY: the caller promises that `handle` is NULL or came from dlopen, and stays open.
        let library = unsafe { Library::of_borrowed(handle, if split { OLDEST_OF_OWN } else { OLDEST }, timeout_ms)? };
        let (mut rank, mut world, mut device) = (0, 0, 0);
        // SAFETY: the caller promises a communicator of this library; the variables outlive the calls.
        unsafe {
            // A non-blocking communicator may not be ready yet.
            library.settle(|| library.state(comm), library.state(comm)?, format_args!("options: the communicator"))?;
            let functions = &library.functions;
            library.check((functions.ncclCommUserRank)(comm, &mut rank), format_args!("ncclCommUserRank"))?;
            library.check((functions.ncclCommCount)(comm, &mut world), format_args!("ncclCommCount"))?;
            library.check((functions.ncclCommCuDevice)(comm, &mut device), format_args!("ncclCommCuDevice"))?;
        }
        if rank < 0 || rank >= world {
            return Err(error!(Comm, "ncclCommUserRank and ncclCommCount say rank {rank} of {world}"));
        }
        let _entered = InPrimary::enter(device)?;
        let records = Some(room_for_records(device, world)?);
        let comm = match split {
            // SAFETY: `comm` is of `library`; ranks have one color and keep their numbers; the new one does not block.
            true => unsafe {
                library.make(comm, "ncclCommSplit", |place| {
                    let mut config = Config::OWN;
                    (library.functions.ncclCommSplit)(comm, 0, rank, place, ptr::from_mut(&mut config).cast())
                })?
            },
            false => comm,
        };
        Ok(Self::over(Arc::new(Shared::new(library, comm, split, device)), rank, world, records))
    }

    /// Waits until the communicator is ready. A non-blocking one may still work on an earlier request of its owner, and
    /// then refuses all others.
    fn ready(&self) -> Result<()> {
        self.shared.settle(self.shared.state()?, format_args!("the communicator"))
    }

    fn all_to_all(&self, exchange: &Exchange<'_>) -> Result<()> {
        let library = &self.shared.library;
        let Functions { ncclGroupStart, ncclGroupEnd, ncclSend, ncclRecv, .. } = library.functions;
        let Exchange { send, recv, bytes, .. } = *exchange;
        let (uint8, stream) = (ncclDataType_t::ncclUint8, exchange.stream.as_raw().cast());
        let (comm, entered) = self.shared.enter()?;
        // SAFETY: this function may be called at any time.
        library.check(unsafe { ncclGroupStart() }, format_args!("ncclGroupStart"))?;
        let asked = (0..self.world).try_for_each(|peer| {
            let (to, from) = (send.wrapping_add(peer * bytes).cast(), recv.wrapping_add(peer * bytes).cast());
            // SAFETY: both sides have a block for each rank, in memory of the communicator's device that nothing else
            // uses until the stream has passed this; the stream is alive.
            let sent = unsafe { ncclSend(to, bytes, uint8, peer as c_int, comm, stream) };
            library.check(enqueued(sent), format_args!("ncclSend of {bytes} bytes to rank {peer}"))?;
            // SAFETY: the reasons for ncclSend hold here, too.
            let received = unsafe { ncclRecv(from, bytes, uint8, peer as c_int, comm, stream) };
            library.check(enqueued(received), format_args!("ncclRecv of {bytes} bytes from rank {peer}"))
        });
        // The group must end in any case: otherwise all later calls of this thread to NCCL would belong to it.
        // SAFETY: a group was begun; `entered` keeps an owned communicator alive, and the program a borrowed one.
        let code = unsafe { ncclGroupEnd() };
        drop(entered);
        asked.and(self.shared.settle(code, format_args!("ncclGroupEnd")))
    }

    fn all_gather(&self, exchange: &Exchange<'_>) -> Result<()> {
        let Exchange { send, recv, bytes, .. } = *exchange;
        let (uint8, stream) = (ncclDataType_t::ncclUint8, exchange.stream.as_raw().cast());
        let (gather, (comm, entered)) = (self.shared.library.functions.ncclAllGather, self.shared.enter()?);
        // SAFETY: `send` has one block and `recv` room for one of each rank; the rest is as in `all_to_all`.
        let code = unsafe { gather(send.cast(), recv.cast(), bytes, uint8, comm, stream) };
        drop(entered);
        self.shared.settle(code, format_args!("ncclAllGather of {bytes} bytes"))
    }
}

impl Transport for Nccl {
    fn place(&self) -> (usize, usize) {
        (self.rank, self.world)
    }

    /// Refuses memory of another device, and memory outside the context in which CUDA's runtime works: another context
    /// has another legacy stream.
    fn check(&self, device: Device, memory: &Block, _bytes: i64) -> Result<()> {
        let own = Device::Cuda(self.shared.device);
        match memory {
            Block::Cpu(_) => Err(error!(
                UnsupportedDevice,
                "device: {device}; the communicator, over NCCL, exchanges memory of {own}"
            )),
            Block::Cuda(_) if device != own => {
                Err(error!(InvalidArgument, "device: {device}; the communicator, over NCCL, is on {own}"))
            }
            Block::Cuda(memory) if !memory.is_in_primary() => Err(error!(
                InvalidArgument,
                "the current context is not the primary one of {own}, the only one that NCCL works in"
            )),
            Block::Cuda(_) => Ok(()),
        }
    }

    fn exchange(&self, exchange: &Exchange<'_>) -> Result<*const u8> {
        let _entered = InPrimary::enter(self.shared.device)?;
        let outcome = self.ready().and_then(|()| match exchange.pattern {
            Pattern::AllToAll => self.all_to_all(exchange),
            Pattern::AllGather => self.all_gather(exchange),
        });
        if let Err(failure) = &outcome {
            self.broken.store(true, Ordering::Relaxed);
            self.hangs.fetch_or(failure.status == Status::Timeout, Ordering::Relaxed);
        }
        outcome.map(|()| exchange.recv.cast_const())
    }

    /// Performs the bootstrap all-gather on the legacy stream, and waits for it.
    fn all_gather_records(&self, own: &Bytes, all: &mut [Bytes]) -> Result<()> {
        /// Offset of the received records, in bytes: after the record that is sent.
        const RECEIVED: u64 = record::BYTES as u64;
        let _entered = InPrimary::enter(self.shared.device)?;
        let Some(records) = &self.records else { return Err(error!(Comm, "communicator: no room for records")) };
        let at = |offset| ptr::with_exposed_provenance_mut::<u8>(records.at(offset) as usize);
        records.write(0, own)?;
        self.exchange(&Exchange {
            pattern: Pattern::AllGather,
            send: at(0),
            recv: at(RECEIVED),
            bytes: record::BYTES,
            device: Device::Cuda(self.shared.device),
            stream: Stream::LEGACY,
            memory: None,
            error_flag: ptr::null_mut(),
        })?;
        let mut queue = records.queue(Stream::LEGACY)?;
        let what = format_args!("ncclAllGather of {} bytes", record::BYTES);
        let waited = self.shared.library.poll(what, || queue.is_done());
        if waited.is_err() {
            self.broken.store(true, Ordering::Relaxed);
            self.hangs.store(true, Ordering::Relaxed);
        }
        waited.and_then(|()| records.read(RECEIVED, all.as_flattened_mut()))
    }

    fn async_error(&self, rank: usize) -> Result<()> {
        self.shared.async_error(rank)
    }

    /// Returns true if the communicator is aborted, or its owner must abort it, or a wait for NCCL has timed out:
    /// NCCL's kernels may then never end.
    fn may_hang(&self) -> bool {
        self.hangs.load(Ordering::Relaxed) || self.shared.library.aborted.load(Ordering::Acquire)
    }

    /// Ends waits of the host and, if the communicator is owned, NCCL's work. A separate thread does the latter,
    /// because NCCL waits until the GPU has stopped.
    fn abort(&self) -> Result<()> {
        self.broken.store(true, Ordering::Relaxed);
        self.shared.library.aborted.store(true, Ordering::Release);
        if !self.shared.owned {
            return Ok(());
        }
        if self.shared.aborting.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let shared: *mut Arc<Shared> = Box::into_raw(Box::new(self.shared.clone()));
        // SAFETY: `abort_shared` may run on any thread, and unboxes the type that was boxed here.
        if unsafe { detached::start(STACK_BYTES, abort_shared, shared.cast()) }.is_none() {
            // SAFETY: `shared` was boxed above, and no thread has it.
            drop(unsafe { Box::from_raw(shared) });
            self.shared.aborting.store(false, Ordering::Release);
            return Err(error!(OutOfMemory, "cannot start the thread that aborts NCCL's communicator"));
        }
        Ok(())
    }

    /// Does nothing: NCCL has no function that ends the wait of the other ranks.
    fn give_up(&self) {}
}

fn room_for_records(device: i32, world: c_int) -> Result<cuda::Memory> {
    cuda::Memory::new(&mut cuda::Queue::of(device, Stream::LEGACY)?, (world as u64 + 1) * record::BYTES as u64)
}

/// Maps IN_PROGRESS to success within a group: nothing has begun yet, and the wait is at the end of the group.
fn enqueued(code: c_int) -> c_int {
    if code == IN_PROGRESS { 0 } else { code }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let aborted = self.shared.library.aborted.load(Ordering::Acquire);
        if *self.hangs.get_mut() || aborted {
            mem::forget(self.records.take()); // kept until the process ends: freeing it would wait for the lost rank
        }
        if !self.shared.owned || self.shared.aborting.load(Ordering::Acquire) {
            return;
        }
        // In a forked child, and while the process ends, the driver refuses this. Then NCCL is not called.
        if InPrimary::enter(self.shared.device).is_err() {
            return;
        }
        // Work that failed may never end, and destroying the communicator would wait for it.
        let is_broken = self.broken.load(Ordering::Relaxed) || self.async_error(self.rank).is_err();
        let (released, end) = mpsc::channel();
        let given: *mut Release = Box::into_raw(Box::new((self.shared.clone(), is_broken, released)));
        // SAFETY: `release_shared` may run on any thread, and unboxes the type that was boxed here.
        if unsafe { detached::start(STACK_BYTES, release_shared, given.cast()) }.is_none() {
            release_shared(given.cast()); // without another thread, this one waits without a limit
        }
        if end.recv_timeout(RELEASE_TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout) && is_broken {
            mem::forget(self.records.take()); // as above
        }
    }
}
