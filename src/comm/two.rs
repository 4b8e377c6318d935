//! One communicator made of two: ranks of a machine, and machines.
//!
//! Ranks are numbered machine by machine. The first ranks of each machine, as many on every machine, carry what goes
//! between machines: carrier c exchanges with the carriers c of the others. Where all ranks are carriers, each
//! carries its own:
//!
//! ```text
//!     all to all    between: a block for each rank there    inside: each machine's block to whom it is for
//!     all gather    between: its own                        inside: what came of every machine
//! ```
//!
//! Otherwise each block is cut into a slice for each carrier, machines count as the largest of them, and an exchange
//! inside comes first, which brings the carriers their slices.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    ptr,
};

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLTensor};

use crate::{
    backend::{
        Block, Queue,
        cuda::{self, Pinned},
    },
    cancel,
    error::{Error, Result, error},
    ops::copy::copy_on,
    tensor::{Described, Device, Elements, Name},
};

use super::{
    Communicator, RECORD, Shared,
    shared::Room,
    transport::{Exchange, Pattern, Span, Transport},
};

/// What slices are whole numbers of.
const VECTOR: usize = 16;

/// A rank's part.
pub struct Two {
    inside: Shared<Communicator>,
    /// Of carriers.
    between: Option<Shared<Communicator>>,
    world: World,
}

/// Who is where.
struct World {
    /// Ranks of each machine, and the number of the first of them.
    machines: Vec<(usize, usize)>,
    /// The most that a machine has.
    most: usize,
    /// Of each machine.
    carriers: usize,
    /// Which machine this rank is on, and its number there.
    machine: usize,
    place: usize,
}

impl World {
    fn ranks(&self) -> usize {
        self.machines.last().map_or(0, |(ranks, first)| ranks + first)
    }

    /// Whether every rank of every machine carries its own.
    fn is_even(&self) -> bool {
        self.machines.iter().all(|&(ranks, _)| ranks == self.carriers)
    }

    /// Of a block of so many bytes.
    fn slice(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.carriers).next_multiple_of(VECTOR)
    }

    /// Bytes of the largest blocks that are exchanged inside and between, and of all that lies between two exchanges,
    /// where a block of the whole has so many.
    fn sizes(&self, bytes: u64) -> Option<[u64; 3]> {
        let (machines, most) = (self.machines.len() as u64, self.most as u64);
        if self.is_even() {
            let (inside, between) = (machines.checked_mul(bytes)?, most.checked_mul(bytes)?);
            return Some([inside, between, most.checked_mul(inside)?]);
        }
        let slice = bytes.div_ceil(self.carriers as u64).checked_next_multiple_of(VECTOR as u64)?;
        let inside = machines.checked_mul(most)?.checked_mul(slice)?;
        Some([inside, most.checked_mul(most)?.checked_mul(slice)?, most.checked_mul(inside)?])
    }
}

/// Where blocks lie from one exchange to the next.
pub struct Buffers {
    memory: Block,
    /// Of each of two.
    bytes: usize,
    /// Room for what is sent and what is received inside and between, where that has to be on the host and is not.
    pinned: [Option<(Pinned, usize)>; 2],
}

impl Buffers {
    fn two(&self) -> [*mut u8; 2] {
        [0, self.bytes].map(|offset| self.memory.data().wrapping_add(offset))
    }

    /// The one that does not begin there.
    fn other(&self, place: *const u8) -> *mut u8 {
        let [one, other] = self.two();
        if ptr::eq(one, place) { other } else { one }
    }
}

/// Runs of bytes that are brought into another order: how many there are along each axis, the first axis outermost,
/// and how far apart in bytes where they go and where they come from.
struct Order<const N: usize> {
    counts: [usize; N],
    to: [usize; N],
    from: [usize; N],
    run: usize,
}

impl Two {
    /// Refuses to become part of a graph where threads of the host wait for each other.
    pub fn waits_on_host(&self) -> bool {
        self.both().any(|one| one.transport.waits_on_host())
    }

    fn both(&self) -> impl Iterator<Item = &Communicator> {
        [Some(&self.inside), self.between.as_ref()].into_iter().flatten().map(|one| &**one)
    }

    /// The two that it is made of.
    pub fn parts(&self) -> [Option<&Communicator>; 2] {
        [Some(&*self.inside), self.between.as_deref()]
    }

    pub fn check(&self, device: Device, memory: &Block, bytes: i64) -> Result<()> {
        let [inside, between, _] = self.sizes(bytes)?;
        self.inside.transport.check(device, memory, inside)?;
        self.between.as_ref().map_or(Ok(()), |one| one.transport.check(device, memory, between))
    }

    fn sizes(&self, bytes: i64) -> Result<[i64; 3]> {
        let too_large = || error!(SizeOverflow, "{bytes} bytes a chunk, several times over, are more than 2^63 - 1");
        let [inside, between, all] = self.world.sizes(bytes as u64).ok_or_else(too_large)?;
        // Twice: what is sent, and what is received.
        i64::try_from(all).ok().and_then(|all| all.checked_mul(2)).ok_or_else(too_large)?;
        Ok([inside as i64, between as i64, all as i64])
    }

    /// What exchanges of blocks with up to so many bytes work in.
    pub fn buffers(&self, queue: &mut Queue, bytes: i64) -> Result<Buffers> {
        let [inside, between, all] = self.sizes(bytes)?;
        let mut pinned = [None, None];
        if let Queue::Cuda(queue) = &mut *queue {
            cuda::copy::prepare(queue)?;
            for ((pinned, one), block) in pinned.iter_mut().zip(self.parts()).zip([inside, between]) {
                if let Some(one) = one.filter(|one| one.transport.wants_host_memory() && one.world > 1) {
                    let half = one.world as i64 * block; // no more than `all`
                    *pinned = Some((Pinned::new(queue, 2 * half)?, half as usize));
                }
            }
        }
        Ok(Buffers { memory: Block::new(queue, 2 * all)?, bytes: all as usize, pinned })
    }

    pub fn begin(&self, queue: &mut Queue, span: Span) -> Result<()> {
        self.inside.transport.begin(queue, span)?;
        let begun = self.between.as_ref().map_or(Ok(()), |one| one.transport.begin(queue, span));
        if begun.is_err() {
            self.lose_count();
        }
        begun
    }

    pub fn end(&self, queue: &mut Queue, span: Span) -> Result<()> {
        self.both().try_for_each(|one| one.transport.end(queue, span))
    }

    pub fn lose_count(&self) {
        self.both().for_each(|one| one.transport.lose_count());
    }

    pub fn give_up(&self) {
        self.both().for_each(|one| one.transport.give_up());
    }

    pub fn late(&self) -> Result<()> {
        self.both().try_for_each(|one| one.transport.late())
    }

    pub fn async_error(&self) -> Result<()> {
        self.both().try_for_each(Communicator::async_error)
    }

    pub fn exchange(&self, exchange: &Exchange<'_>) -> Result<()> {
        let Some(buffers) = exchange.buffers else {
            return Err(error!(Comm, "communicator: an exchange without buffers")); // which `Wire` makes
        };
        let mut queue = exchange.queue()?;
        match (self.world.is_even(), exchange.pattern) {
            (true, Pattern::AllToAll) => self.even_all_to_all(exchange, buffers, &mut queue),
            (true, Pattern::AllGather) => self.even_all_gather(exchange, buffers, &mut queue),
            (false, Pattern::AllToAll) => self.carried_all_to_all(exchange, buffers, &mut queue),
            (false, Pattern::AllGather) => self.carried_all_gather(exchange, buffers, &mut queue),
        }
    }

    fn even_all_to_all(&self, exchange: &Exchange<'_>, buffers: &Buffers, queue: &mut Queue) -> Result<()> {
        let (bytes, [machines, ranks]) = (exchange.bytes, [self.world.machines.len(), self.world.most]);
        let [one, other] = buffers.two();
        let to_all = Exchange { recv: one, bytes: ranks * bytes, ..*exchange };
        let came = self.exchange_between(&to_all, buffers)?;
        // [machine][rank here it is for] to [rank][machine].
        let turned = Order {
            counts: [ranks, machines],
            to: [machines * bytes, bytes],
            from: [bytes, ranks * bytes],
            run: bytes,
        };
        // SAFETY: blocks of all ranks in each, of which the exchanges made one.
        unsafe { turned.copy(queue, exchange.device, other, came)? };
        let inside = Exchange { send: other, recv: one, bytes: machines * bytes, ..*exchange };
        let came = self.exchange_inside(&inside, buffers)?;
        self.even_order(exchange, queue, came)
    }

    fn even_all_gather(&self, exchange: &Exchange<'_>, buffers: &Buffers, queue: &mut Queue) -> Result<()> {
        let [one, other] = buffers.two();
        let came = self.exchange_between(&Exchange { recv: one, ..*exchange }, buffers)?;
        let bytes = self.world.machines.len() * exchange.bytes;
        let came = self.exchange_inside(&Exchange { send: came, recv: other, bytes, ..*exchange }, buffers)?;
        self.even_order(exchange, queue, came)
    }

    /// From `[rank][machine]` to `[machine][rank]`, which is the order of all ranks.
    fn even_order(&self, exchange: &Exchange<'_>, queue: &mut Queue, came: *const u8) -> Result<()> {
        let (bytes, [machines, ranks]) = (exchange.bytes, [self.world.machines.len(), self.world.most]);
        let turned = Order {
            counts: [machines, ranks],
            to: [ranks * bytes, bytes],
            from: [bytes, machines * bytes],
            run: bytes,
        };
        // SAFETY: room for a block of each rank, and what an exchange made: as many.
        unsafe { turned.copy(queue, exchange.device, exchange.recv, came) }
    }

    fn carried_all_to_all(&self, exchange: &Exchange<'_>, buffers: &Buffers, queue: &mut Queue) -> Result<()> {
        let World { most, carriers, .. } = self.world;
        let (bytes, machines, ranks) = (exchange.bytes, self.world.machines.len(), self.own_ranks());
        let (slice, device, [one, other]) = (self.world.slice(bytes), exchange.device, buffers.two());
        // As if every machine had as many ranks as the largest: [machine][rank there it is for][carrier here].
        for (machine, &(ranks, first)) in self.world.machines.iter().enumerate() {
            let apart = Order { counts: [ranks], to: [carriers * slice], from: [bytes], run: bytes };
            let to = one.wrapping_add(machine * most * carriers * slice);
            // SAFETY: blocks for all ranks, and room for slices of those of a machine as large as the largest.
            unsafe { apart.copy(queue, device, to, exchange.send.wrapping_add(first * bytes))? };
        }
        let cut = Order {
            counts: [carriers, machines * most],
            to: [machines * most * slice, slice],
            from: [slice, carriers * slice],
            run: slice,
        };
        // SAFETY: as many slices in each.
        unsafe { cut.copy(queue, device, other, one)? };
        let inside = Exchange { send: other, recv: one, bytes: machines * most * slice, ..*exchange };
        let came = self.exchange_inside(&inside, buffers)?;
        let mut carried = other;
        if self.between.is_some() {
            // [rank here that sends][machine][rank there] to [machine][rank here][rank there].
            let gathered = Order {
                counts: [machines, ranks],
                to: [most * most * slice, most * slice],
                from: [most * slice, machines * most * slice],
                run: most * slice,
            };
            let to = buffers.other(came);
            // SAFETY: the slices of as many ranks as this machine has, and room for those of as many as any has.
            unsafe { gathered.copy(queue, device, to, came)? };
            let sent = Exchange { send: to, recv: buffers.other(to), bytes: most * most * slice, ..*exchange };
            let came = self.exchange_between(&sent, buffers)?;
            carried = buffers.other(came);
            // [machine][rank there that sent][rank here] to [rank here][machine][rank there].
            let cast = Order {
                counts: [ranks, machines, most],
                to: [machines * most * slice, most * slice, slice],
                from: [slice, most * most * slice, most * slice],
                run: slice,
            };
            // SAFETY: as many slices in each, of the ranks of this machine.
            unsafe { cast.copy(queue, device, carried, came)? };
        }
        self.inside.transport.part(queue)?;
        let cast = Exchange { send: carried, recv: buffers.other(carried), ..inside };
        self.join(exchange, queue, buffers, &cast)
    }

    fn carried_all_gather(&self, exchange: &Exchange<'_>, buffers: &Buffers, queue: &mut Queue) -> Result<()> {
        let World { most, place, .. } = self.world;
        let (bytes, ranks) = (exchange.bytes, self.own_ranks());
        let (slice, [one, other]) = (self.world.slice(bytes), buffers.two());
        let came = self.exchange_inside(&Exchange { recv: one, ..*exchange }, buffers)?;
        let mut carried = other.cast_const();
        if self.between.is_some() {
            // The last carriers may have less, or nothing.
            let skipped = (place * slice).min(bytes);
            let run = slice.min(bytes - skipped);
            if run > 0 {
                let cut = Order { counts: [ranks], to: [slice], from: [bytes], run };
                // SAFETY: blocks of the ranks of this machine, and room for a slice of each.
                unsafe { cut.copy(queue, exchange.device, other, came.wrapping_add(skipped))? };
            }
            let sent = Exchange { send: other, recv: one, bytes: most * slice, ..*exchange };
            carried = self.exchange_between(&sent, buffers)?;
        }
        self.inside.transport.part(queue)?;
        let bytes = self.world.machines.len() * most * slice;
        let cast = Exchange { send: carried, recv: buffers.other(carried), bytes, ..*exchange };
        self.join(exchange, queue, buffers, &cast)
    }

    /// The last exchange inside, of which the carriers' blocks are [machine][rank there], and what it leaves put
    /// together: a block of each rank.
    fn join(&self, exchange: &Exchange<'_>, queue: &mut Queue, buffers: &Buffers, cast: &Exchange<'_>) -> Result<()> {
        let World { most, carriers, .. } = self.world;
        let (bytes, machines) = (exchange.bytes, self.world.machines.len());
        let (slice, device) = (self.world.slice(bytes), exchange.device);
        let came = self.exchange_inside(cast, buffers)?;
        // Where the exchange itself was not needed, what was sent came.
        let joined = buffers.other(came);
        let order = Order {
            counts: [machines * most, carriers],
            to: [carriers * slice, slice],
            from: [slice, machines * most * slice],
            run: slice,
        };
        // SAFETY: the slices of the carriers, which are the first ranks; as many in each.
        unsafe { order.copy(queue, device, joined, came)? };
        for (machine, &(ranks, first)) in self.world.machines.iter().enumerate() {
            let together = Order { counts: [ranks], to: [bytes], from: [carriers * slice], run: bytes };
            let from = joined.wrapping_add(machine * most * carriers * slice);
            // SAFETY: room for a block of each rank, and the slices of those of a machine.
            unsafe { together.copy(queue, device, exchange.recv.wrapping_add(first * bytes), from)? };
        }
        Ok(())
    }

    fn own_ranks(&self) -> usize {
        self.world.machines[self.world.machine].0
    }

    fn exchange_inside(&self, exchange: &Exchange<'_>, buffers: &Buffers) -> Result<*const u8> {
        over(&self.inside, exchange, buffers.pinned[0].as_ref())
    }

    fn exchange_between(&self, exchange: &Exchange<'_>, buffers: &Buffers) -> Result<*const u8> {
        match &self.between {
            Some(between) => over(between, exchange, buffers.pinned[1].as_ref()),
            None => Err(error!(Comm, "communicator: a rank that carries nothing was to exchange between machines")),
        }
    }

    /// Tells every rank 64 bytes of each, by the first rank of each machine.
    pub fn tell(&self, own: &[u8; RECORD], all: &mut [[u8; RECORD]]) -> Result<()> {
        let (mut here, mut there) = (records(self.own_ranks())?, records(self.world.machines.len())?);
        let mut cast = records(self.own_ranks())?;
        self.inside.tell(own, &mut here)?;
        for place in 0..self.world.most {
            if let Some(between) = self.between.as_ref().filter(|_| self.world.place == 0) {
                between.tell(here.get(place).unwrap_or(&[0; RECORD]), &mut there)?;
            }
            for (record, &(ranks, first)) in there.iter().zip(&self.world.machines) {
                self.inside.tell(record, &mut cast)?;
                if place < ranks {
                    all[first + place] = cast[0];
                }
            }
        }
        Ok(())
    }
}

/// An exchange over one of the two: where what it brought lies.
fn over(one: &Communicator, exchange: &Exchange<'_>, pinned: Option<&(Pinned, usize)>) -> Result<*const u8> {
    if one.world == 1 {
        return Ok(exchange.send);
    }
    let exchange = Exchange { buffers: None, ..*exchange };
    let on_host = pinned.map(|(pinned, half)| [pinned.data(), pinned.data().wrapping_add(*half)]);
    one.note(one.exchange_by(&exchange, on_host))?;
    let areas = one.transport.areas();
    Ok(areas.map_or(exchange.recv, |[of_all_to_all, of_all_gather]| match exchange.pattern {
        Pattern::AllToAll => of_all_to_all,
        Pattern::AllGather => of_all_gather,
    }))
}

impl<const N: usize> Order<N> {
    /// # Safety
    /// Both sides are memory of the device that has all these runs, apart from each other, and stay until the queue
    /// has done it.
    unsafe fn copy(&self, queue: &mut Queue, device: Device, to: *mut u8, from: *const u8) -> Result<()> {
        if let Queue::Cpu = queue {
            for number in 0..self.counts.iter().product() {
                let (mut rest, mut at) = (number, [0, 0]);
                for axis in (0..N).rev() {
                    let index = rest % self.counts[axis];
                    rest /= self.counts[axis];
                    at = [at[0] + index * self.to[axis], at[1] + index * self.from[axis]];
                }
                // SAFETY: the caller's promise.
                unsafe { to.add(at[0]).copy_from_nonoverlapping(from.add(at[1]), self.run) };
            }
            return Ok(());
        }
        /// Of an axis more: the bytes of a run.
        const AXES: usize = 4;
        let mut shape = [1; AXES];
        let mut strides = [[0; AXES]; 2];
        for axis in 0..N {
            shape[axis] = self.counts[axis] as i64;
            (strides[0][axis], strides[1][axis]) = (self.to[axis] as i64, self.from[axis] as i64);
        }
        (shape[N], strides[0][N], strides[1][N]) = (self.run as i64, 1, 1);
        let side = |name, data: *mut u8, strides: &[i64; AXES]| {
            let tensor = DLTensor {
                data: data.cast(),
                device: device.to_dlpack(),
                ndim: N as i32 + 1,
                dtype: DLDataType { code: DLDataTypeCode::UINT, bits: 8, lanes: 1 },
                shape: shape.as_ptr().cast_mut(),
                strides: strides.as_ptr().cast_mut(),
                byte_offset: 0,
            };
            let name = Name::new(name);
            // SAFETY: the shape and the strides outlive the copy; the rest is the caller's promise.
            unsafe { Elements::new(&name, Described::from_dlpack(&name, &tensor)?) }
        };
        let (source, target) = (side("blocks", from.cast_mut(), &strides[1])?, side("blocks", to, &strides[0])?);
        copy_on(queue, &source, &target)
    }
}

fn records(count: usize) -> Result<Vec<[u8; RECORD]>> {
    let mut records = Vec::new();
    records
        .try_reserve_exact(count)
        .map_err(|_| error!(OutOfMemory, "{count} records of {RECORD} bytes could not be had"))?;
    records.resize(count, [0; RECORD]);
    Ok(records)
}

/// A communicator of two. Every rank comes here, with what went wrong before, if that did.
pub fn two(
    inside: Shared<Communicator>,
    between: Option<Shared<Communicator>>,
    so_far: Result<()>,
) -> Result<Shared<Communicator>> {
    let _delay = cancel::delay();
    let so_far = so_far.and_then(|()| apart(&inside, between.as_deref()));
    let entered_inside = inside.enter()?;
    let (between, entered_between) = match &between {
        Some(one) => match one.enter() {
            Ok(entered) => (between.as_ref(), Some(entered)),
            // Itself, or a part of the other.
            Err(_) if so_far.is_err() => (None, None),
            Err(busy) => return Err(busy),
        },
        None => (None, None),
    };
    let made = make(&inside, between.map(|one| &**one), so_far);
    if made.is_err() {
        // The others may be waiting for this rank, on either way.
        inside.transport.give_up();
        if let Some(between) = between {
            between.transport.give_up();
        }
    }
    let (world, room) = made??;
    drop((entered_inside, entered_between));
    let between = between.cloned();
    let (rank, ranks) = (world.machines[world.machine].1 + world.place, world.ranks());
    Ok(room.fill(Communicator::new(rank, ranks, Transport::Two(Two { inside, between, world }))))
}

/// Refuses what cannot be two levels.
fn apart(inside: &Communicator, between: Option<&Communicator>) -> Result<()> {
    let nested = |one: &Communicator| matches!(one.transport, Transport::Two(_));
    if between.is_some_and(|between| ptr::eq(inside, between)) {
        return Err(error!(InvalidArgument, "inside and between are one communicator"));
    }
    if nested(inside) || between.is_some_and(nested) {
        return Err(error!(InvalidArgument, "inside and between: one of them is itself made of two"));
    }
    Ok(())
}

/// Finds out who is where. An exchange that fails is an error; what all ranks refuse alike is one within.
fn make(
    inside: &Communicator,
    between: Option<&Communicator>,
    so_far: Result<()>,
) -> Result<Result<(World, Room<Communicator>)>> {
    let mut outcome = so_far.and_then(|()| Room::new());
    // Whatever goes wrong here, the others wait.
    let mut hello = Record::new(outcome.is_err());
    hello.set(1, between.is_some().into());
    hello.set(2, between.map_or(0, |one| one.rank as u64));
    hello.set(3, between.map_or(0, |one| one.world as u64));
    hello.set(4, RandomState::new().build_hasher().finish());
    let here = inside.tell_all(&hello.0)?;
    let (carriers, machine, machines) = match found_here(&here) {
        Ok(found) => found,
        Err(refusal) => {
            outcome = outcome.and(Err(refusal));
            (0, 0, 0)
        }
    };
    let mut list = Vec::new();
    if list.try_reserve_exact(machines).is_err() {
        outcome = outcome.and(Err(error!(OutOfMemory, "a list of {machines} machines could not be had")));
    }

    // Carriers ask the others of their number.
    let mut greeting = Record::new(outcome.is_err());
    greeting.set(1, carriers as u64);
    greeting.set(2, inside.rank as u64);
    greeting.set(3, inside.world as u64);
    greeting.set(4, Record(here[0]).get(4));
    let there = between.map(|one| one.tell_all(&greeting.0)).transpose()?;
    let (there, between_rank) = (there.unwrap_or_default(), between.map_or(0, |one| one.rank));
    if !there.is_empty() && outcome.is_ok() {
        outcome = outcome.and_then(|room| found_there(&there, between_rank).map(|()| room));
    }

    // All carriers of this machine are to have found the same machines.
    let mut told = Record::new(outcome.is_err());
    told.set(
        1,
        there.iter().fold(0xcbf2_9ce4_8422_2325, |hash, record| {
            (hash ^ Record(*record).get(4)).wrapping_mul(0x0000_0100_0000_01b3)
        }),
    );
    let found = inside.tell_all(&told.0)?;
    if let Some(rank) = found.iter().position(|record| Record(*record).failed()) {
        outcome = outcome.and(Err(error!(InvalidArgument, "inside: rank {rank} found that two cannot be made one")));
    } else if let Some(rank) = (1..carriers).find(|&rank| found[rank] != found[0]) {
        let why = "reaches other machines by its between than rank 0";
        outcome = outcome.and(Err(error!(InvalidArgument, "inside: rank {rank} {why}")));
    }

    // How many ranks each machine has, of which the first rank here has heard. Where one failed, nobody of this
    // machine asks.
    let agreed = found.iter().all(|record| !Record(*record).failed());
    let mut first = 0usize;
    for part in 0..if agreed { machines.div_ceil(Record::WORDS) } else { 0 } {
        let mut sizes = Record([0; RECORD]);
        for (word, record) in there.iter().skip(part * Record::WORDS).take(Record::WORDS).enumerate() {
            sizes.set(word, Record(*record).get(3));
        }
        let sizes = Record(inside.tell_all(&sizes.0)?[0]);
        for word in 0..Record::WORDS.min(machines - part * Record::WORDS) {
            let ranks = sizes.get(word) as usize;
            list.push((ranks, first)); // which has room
            first = first.saturating_add(ranks);
        }
    }
    if agreed && (list.get(machine).map(|own| own.0) != Some(inside.world) || list.iter().any(|one| one.0 < carriers)) {
        outcome = outcome.and(Err(error!(InvalidArgument, "inside: rank 0 told of machines that cannot be")));
    }
    if i32::try_from(first).is_err() {
        outcome = outcome.and(Err(error!(InvalidArgument, "inside and between: {first} ranks, more than 2^31 - 1")));
    }

    // Only together.
    let mut done = Record::new(outcome.is_err());
    if let Some(between) = between {
        let column = between.tell_all(&done.0)?;
        done = Record::new(column.iter().any(|record| Record(*record).failed()));
    }
    let failed = inside.tell_all(&done.0)?.iter().any(|record| Record(*record).failed());
    if failed {
        outcome =
            outcome.and(Err(error!(InvalidArgument, "between: a rank of another machine could not make it of two")));
    }
    let most = list.iter().map(|&(ranks, _)| ranks).max().unwrap_or(0);
    Ok(outcome.map(|room| (World { machines: list, most, carriers, machine, place: inside.rank }, room)))
}

/// What ranks tell each other: whether one has failed, and a few numbers.
#[derive(Clone, Copy)]
struct Record([u8; RECORD]);

impl Record {
    /// Numbers of 64 bits.
    const WORDS: usize = RECORD / 8;

    /// The word 0: what this is, its version, and whether the rank has failed.
    fn new(failed: bool) -> Self {
        let mut record = Self([0; RECORD]);
        record.set(0, u64::from_le_bytes(*b"GCTW\x01\0\0\0") | u64::from(failed) << 40);
        record
    }

    fn set(&mut self, word: usize, number: u64) {
        self.0[8 * word..][..8].copy_from_slice(&number.to_le_bytes());
    }

    fn get(&self, word: usize) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|byte| self.0[8 * word + byte]))
    }

    /// Also one of another version.
    fn failed(&self) -> bool {
        self.get(0) != Self::new(false).get(0)
    }
}

/// How many ranks of this machine carry, and which machine it is of how many.
fn found_here(here: &[[u8; RECORD]]) -> Result<(usize, usize, usize)> {
    let of = |rank: usize| Record(here[rank]);
    let carries = |rank: usize| of(rank).get(1) != 0;
    let refusal = |rank: usize, why: &str| -> Error { error!(InvalidArgument, "inside: rank {rank} {why}") };
    if let Some(rank) = (0..here.len()).find(|&rank| of(rank).failed()) {
        return Err(refusal(rank, "could not make it of two, or runs another version"));
    }
    let carriers = (0..here.len()).take_while(|&rank| carries(rank)).count();
    if let Some(rank) = (carriers..here.len()).find(|&rank| carries(rank) || carriers == 0) {
        let why = if carries(rank) { "has a between, and one before it has none" } else { "has no between" };
        return Err(refusal(rank, why));
    }
    let place = |rank: usize| (of(rank).get(2), of(rank).get(3));
    if let Some(rank) = (1..carriers).find(|&rank| place(rank) != place(0)) {
        let ((other, all), (first, all_first)) = (place(rank), place(0));
        return Err(error!(
            InvalidArgument,
            "between: rank {rank} of inside is rank {other} of {all} there, and rank 0 is rank {first} of {all_first}"
        ));
    }
    Ok((carriers, place(0).0 as usize, place(0).1 as usize))
}

/// That those of a column are alike.
fn found_there(there: &[[u8; RECORD]], own: usize) -> Result<()> {
    let own_record = Record(there[own]);
    for (machine, record) in there.iter().enumerate() {
        let record = Record(*record);
        let (carriers, place) = (record.get(1), record.get(2));
        let (expected, own_place) = (own_record.get(1), own_record.get(2));
        if record.failed() {
            return Err(error!(InvalidArgument, "between: rank {machine} could not make it of two"));
        }
        if carriers != expected {
            return Err(error!(
                InvalidArgument,
                "between: of the machine of rank {machine} {carriers} ranks have one, and here {expected}"
            ));
        }
        if place != own_place {
            return Err(error!(
                InvalidArgument,
                "between: rank {machine} is rank {place} of its machine; {own_place}, as here, expected"
            ));
        }
    }
    Ok(())
}
