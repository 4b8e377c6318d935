//! Exchanges by NCCL.

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

/// Bytes of what ranks find each other by.
pub const ID_BYTES: usize = 128;

/// The stack of a thread that aborts or releases: enough for what NCCL calls.
const STACK_BYTES: usize = 1 << 20;

/// How long a release waits for NCCL, which waits for the other ranks of the node. They may release theirs much later,
/// or after a call in which they wait for this rank: Python's garbage collection chooses the time.
const PATIENCE: Duration = Duration::from_secs(1);

/// The beginning of ncclConfig_t, as it is since 2.14: with its size NCCL takes the rest as if nothing were said.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Config {
    /// Of a communicator of our own, which does not block.
    const OWN: Self =
        Self { size: mem::offset_of!(Self, blocking) + 4, magic: 0xcafe_beef, version: 21400, blocking: 0 };
}

/// A communicator of NCCL's.
pub struct Nccl {
    shared: Arc<Shared>,
    rank: usize,
    world: usize,
    /// Whether a call on it has failed.
    broken: AtomicBool,
    /// For a record of this rank, and behind it those of all.
    records: Option<cuda::Memory>,
    /// NCCL may be at work for ever: it was waited for too long.
    hangs: AtomicBool,
}

/// What the threads that abort and release it need, too.
struct Shared {
    library: Library,
    comm: ncclComm_t,
    /// Whether it is ours to destroy.
    owned: bool,
    device: i32,
    /// A call of NCCL is under way, on a communicator of our own: these return at once.
    calls: Mutex<()>,
    /// A thread aborts it, or has.
    aborting: AtomicBool,
}

// SAFETY: a communicator of NCCL's belongs to no thread.
unsafe impl Send for Shared {}
// SAFETY: `Communicator` lets one call in at a time; what is asked of the state of a borrowed one may be asked at any
// time, and one of our own is used by whoever has `calls`.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(library: Library, comm: ncclComm_t, owned: bool, device: i32) -> Self {
        Self { library, comm, owned, device, calls: Mutex::new(()), aborting: AtomicBool::new(false) }
    }

    /// The communicator, for a call of NCCL, and what keeps it from being aborted meanwhile, if it is our own.
    fn enter(&self) -> Result<(ncclComm_t, Option<MutexGuard<'_, ()>>)> {
        let entered = self.owned.then(|| self.calls.lock().unwrap_or_else(PoisonError::into_inner));
        self.library.check_aborted()?; // and so the thread that aborts it has to wait
        Ok((self.comm, entered))
    }

    fn state(&self) -> Result<c_int> {
        let (comm, _entered) = self.enter()?;
        // SAFETY: the communicator is there as long as this is entered.
        unsafe { self.library.state(comm) }
    }

    fn settle(&self, code: c_int, call: fmt::Arguments<'_>) -> Result<()> {
        self.library.settle(|| self.state(), code, call)
    }

    /// What has gone wrong since, without waiting.
    fn async_error(&self, rank: usize) -> Result<()> {
        let _entered = match self.calls.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(()), // the call that is under way will say so
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Ok(entered) => entered,
        };
        self.library.check_aborted()?;
        // SAFETY: the communicator is there as long as this is entered.
        match unsafe { self.library.state(self.comm)? } {
            0 | IN_PROGRESS => Ok(()),
            code => Err(self.library.failure(code, format_args!("communicator: rank {rank}"))),
        }
    }

    /// Ends what NCCL is at on a communicator of our own, and that with it. Waits for NCCL.
    fn abort(&self) -> Result<()> {
        // A later call, or the release, tries again.
        let _entered =
            InPrimary::enter_relaxed(self.device).inspect_err(|_| self.aborting.store(false, Ordering::Release))?;
        let _alone = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: ours, and nothing uses it any more: all who enter see that it is aborted. Errors are ignored: there
        // is no caller left to return them to.
        unsafe { (self.library.functions.ncclCommAbort)(self.comm) };
        Ok(())
    }

    /// Destroys a communicator of our own, or aborts one that is broken.
    fn release(&self, is_broken: bool) {
        let Ok(_entered) = InPrimary::enter_relaxed(self.device) else { return };
        let Functions { ncclCommDestroy, ncclCommAbort, .. } = self.library.functions;
        // SAFETY: ours, and nothing uses it any more. Errors are ignored: there is no caller left to return them to.
        unsafe { if is_broken { ncclCommAbort(self.comm) } else { ncclCommDestroy(self.comm) } };
    }
}

/// What the thread does that aborts a communicator.
extern "C" fn abort_shared(shared: *mut c_void) -> *mut c_void {
    boundary(|| {
        // SAFETY: `Nccl::abort` has boxed it for this thread.
        let shared = unsafe { Box::from_raw(shared.cast::<Arc<Shared>>()) };
        shared.abort()?;
        Ok(ptr::null_mut::<c_void>())
    })
}

/// What the thread that releases a communicator gets: the communicator, whether it is broken, and a channel for the end.
type Release = (Arc<Shared>, bool, mpsc::Sender<()>);

/// The thread that releases a communicator.
extern "C" fn release_shared(given: *mut c_void) -> *mut c_void {
    boundary(|| {
        // SAFETY: `Nccl::drop` has boxed it for this thread.
        let (shared, is_broken, released) = *unsafe { Box::from_raw(given.cast::<Release>()) };
        shared.release(is_broken);
        let _ = released.send(()); // nobody may wait any more
        Ok(ptr::null_mut::<c_void>())
    })
}

impl Nccl {
    /// What the caller passes to all ranks of a new world.
    ///
    /// # Safety
    /// `handle` is NULL or came from dlopen, and is open.
    pub unsafe fn new_id(handle: *mut c_void) -> Result<[u8; ID_BYTES]> {
        // SAFETY: the caller's promise.
        let library = unsafe { Library::of_new(handle, 0)? };
        let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
        // SAFETY: the place outlives the call.
        let code = unsafe { (library.functions.ncclGetUniqueId)(&mut id) };
        library.check(code, format_args!("ncclGetUniqueId"))?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// A communicator of its own. Blocks until all ranks of the world do this.
    ///
    /// # Safety
    /// `handle` is NULL or came from dlopen, and stays open until all ranks of the node have released theirs.
    pub unsafe fn of_id(
        handle: *mut c_void, id: &[u8; ID_BYTES], rank: i32, world: i32, device: Device, timeout_ms: u32,
    ) -> Result<Self> {
        let Device::Cuda(device) = device else {
            return Err(error!(UnsupportedDevice, "device: {device}; NCCL exchanges memory of CUDA devices"));
        };
        if rank < 0 || rank >= world {
            return Err(error!(InvalidArgument, "rank {rank} of {world}: 0 <= rank < world_size expected"));
        }
        // SAFETY: the caller's promise.
        let library = unsafe { Library::of_new(handle, timeout_ms)? };
        let _entered = InPrimary::enter(device)?;
        let records = Some(room_for_records(device, world)?);
        let id = ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        // SAFETY: the place is the call's.
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

    /// A caller's communicator; with `split` one of our own, made of all its ranks, which all do this.
    ///
    /// # Safety
    /// `comm` is a communicator of the library with this handle, or of the only one if that is NULL. Both stay
    /// as long as this lives, unless it is split, and then the library does.
    pub unsafe fn of_comm(handle: *mut c_void, comm: *mut c_void, split: bool, timeout_ms: u32) -> Result<Self> {
        let comm: ncclComm_t = comm.cast();
        // SAFETY: the caller's promise.
        let library = unsafe { Library::of_borrowed(handle, if split { OLDEST_OF_OWN } else { OLDEST }, timeout_ms)? };
        let (mut rank, mut world, mut device) = (0, 0, 0);
        // SAFETY: a communicator of this library, by the caller's promise; the places outlive the calls.
        unsafe {
            // It may be one that does not block and is not ready.
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
            // SAFETY: as above; all ranks are of one color and keep their numbers; the new one does not block.
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

    /// A communicator that does not block may be at work on what its owner asked of it before, and refuses all else
    /// then.
    fn ready(&self) -> Result<()> {
        self.shared.settle(self.shared.state()?, format_args!("the communicator"))
    }

    fn all_to_all(&self, exchange: &Exchange<'_>) -> Result<()> {
        let library = &self.shared.library;
        let Functions { ncclGroupStart, ncclGroupEnd, ncclSend, ncclRecv, .. } = library.functions;
        let Exchange { send, recv, bytes, .. } = *exchange;
        let (uint8, stream) = (ncclDataType_t::ncclUint8, exchange.stream.as_raw().cast());
        let (comm, entered) = self.shared.enter()?;
        // SAFETY: it may be called at any time.
        library.check(unsafe { ncclGroupStart() }, format_args!("ncclGroupStart"))?;
        let asked = (0..self.world).try_for_each(|peer| {
            let (to, from) = (send.wrapping_add(peer * bytes).cast(), recv.wrapping_add(peer * bytes).cast());
            // SAFETY: a block for each rank, and room for one of each, in memory of the communicator's device that is
            // left alone until the stream has passed this; the stream is alive.
            let sent = unsafe { ncclSend(to, bytes, uint8, peer as c_int, comm, stream) };
            library.check(enqueued(sent), format_args!("ncclSend of {bytes} bytes to rank {peer}"))?;
            // SAFETY: as above.
            let received = unsafe { ncclRecv(from, bytes, uint8, peer as c_int, comm, stream) };
            library.check(enqueued(received), format_args!("ncclRecv of {bytes} bytes from rank {peer}"))
        });
        // In any case, or all that this thread asks of NCCL from now on would belong to the group.
        // SAFETY: a group was begun; the communicator is there as long as it is entered.
        let code = unsafe { ncclGroupEnd() };
        drop(entered);
        asked.and(self.shared.settle(code, format_args!("ncclGroupEnd")))
    }

    fn all_gather(&self, exchange: &Exchange<'_>) -> Result<()> {
        let Exchange { send, recv, bytes, .. } = *exchange;
        let (uint8, stream) = (ncclDataType_t::ncclUint8, exchange.stream.as_raw().cast());
        let (gather, (comm, entered)) = (self.shared.library.functions.ncclAllGather, self.shared.enter()?);
        // SAFETY: as in `all_to_all`: a block that is sent, and room for one of each rank.
        let code = unsafe { gather(send.cast(), recv.cast(), bytes, uint8, comm, stream) };
        drop(entered);
        self.shared.settle(code, format_args!("ncclAllGather of {bytes} bytes"))
    }
}

impl Transport for Nccl {
    /// The rank, and how many there are.
    fn place(&self) -> (usize, usize) {
        (self.rank, self.world)
    }

    /// Refuses memory that is not of its device, or in another context than the one that CUDA's runtime works in: there
    /// the legacy stream is another.
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

    /// The bootstrap all-gather, on the legacy stream. Waits for it.
    fn all_gather_records(&self, own: &Bytes, all: &mut [Bytes]) -> Result<()> {
        /// Behind the record that is sent.
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

    /// What has gone wrong since, without waiting.
    fn async_error(&self, rank: usize) -> Result<()> {
        self.shared.async_error(rank)
    }

    /// Whether NCCL was aborted, or its owner is to do so, or was waited for too long: when its kernels end is not
    /// known.
    fn may_hang(&self) -> bool {
        self.hangs.load(Ordering::Relaxed) || self.shared.library.aborted.load(Ordering::Acquire)
    }

    /// Ends the waiting of the host, and, on a communicator of our own, what NCCL is at. That has a thread of its own,
    /// for NCCL waits until the GPU has stopped.
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
        // SAFETY: the thread gets what it takes back as it was boxed.
        if unsafe { detached::start(STACK_BYTES, abort_shared, shared.cast()) }.is_none() {
            // SAFETY: from above, and no thread has it.
            drop(unsafe { Box::from_raw(shared) });
            self.shared.aborting.store(false, Ordering::Release);
            return Err(error!(OutOfMemory, "cannot start the thread that aborts NCCL's communicator"));
        }
        Ok(())
    }

    /// NCCL has no function that ends the wait of the others.
    fn give_up(&self) {}
}

fn room_for_records(device: i32, world: c_int) -> Result<cuda::Memory> {
    cuda::Memory::new(&mut cuda::Queue::of(device, Stream::LEGACY)?, (world as u64 + 1) * record::BYTES as u64)
}

/// In a group nothing has begun: what a communicator that does not block is at work on is waited for at its end.
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
        // In a forked child, and while the process ends, the driver refuses, and NCCL is left alone.
        if InPrimary::enter(self.shared.device).is_err() {
            return;
        }
        // What failed may never end, and destroying it would wait for that.
        let is_broken = self.broken.load(Ordering::Relaxed) || self.async_error(self.rank).is_err();
        let (released, end) = mpsc::channel();
        let given: *mut Release = Box::into_raw(Box::new((self.shared.clone(), is_broken, released)));
        // SAFETY: the thread gets what it takes back as it was boxed.
        if unsafe { detached::start(STACK_BYTES, release_shared, given.cast()) }.is_none() {
            release_shared(given.cast()); // without a thread this one waits, however long it takes
        }
        if end.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) && is_broken {
            mem::forget(self.records.take()); // as above
        }
    }
}
