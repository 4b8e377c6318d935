//! Places of blocks and raw elements in the chunks of a payload.

use crate::{
    codec::{
        cpu::sum::Unit,
        plan::{CodecPlan, Run, layout::Layout},
    },
    dlpack::Address,
};

/// Number of elements in a step of the loops, which use the first half of a [`Unit`]. With shorter loops memory is idle
/// for less time. 2^26 float32 to INT8 took 16.5 ms on Zen 5. In whole units it took 19.5 ms, in quarters 20 ms, with
/// the next step prefetched 27 ms.
pub const STEP: usize = 512;

/// Largest number of blocks in a step: the smallest blocks have 32 elements.
pub const STEP_BLOCKS: usize = STEP / 32;

/// Blocks of a step, as a payload has them.
#[repr(align(64))]
pub struct Coded {
    pub scales: [u8; 2 * STEP_BLOCKS],
    pub codes: [u8; 2 * STEP],
    /// Codes of 4 bits, a byte each.
    pub wide: [u8; STEP],
}

impl Coded {
    pub fn new() -> Self {
        Self { scales: [0; _], codes: [0; _], wide: [0; _] }
    }

    /// Sets the codes of absent elements to 0, in blocks that have `count` elements.
    pub fn clear_behind(&mut self, count: usize, layout: &Layout) {
        let (bits, block) = (layout.format.bits as usize, layout.format.place as usize);
        let mut first = count * bits / 8;
        if !(count * bits).is_multiple_of(8) {
            self.codes[first] &= 0x0f;
            first += 1;
        }
        self.codes[first..count.next_multiple_of(block) * bits / 8].fill(0);
    }
}

/// Payload, or a chunk of one.
#[derive(Clone, Copy)]
pub struct Payload<'a> {
    layout: &'a Layout,
    stride: i64,
    /// Address of chunk 0, which need not exist.
    first: Address,
}

impl<'a> Payload<'a> {
    /// Describes a payload. `chunk`: number of the chunk that is at `at`.
    pub fn new(plan: &'a CodecPlan, at: *mut u8, chunk: usize) -> Self {
        Self {
            layout: &plan.layout,
            stride: plan.stride(),
            first: Address(at.wrapping_sub(chunk * plan.stride() as usize)),
        }
    }

    /// Returns the index of the first place and the number of places that hold `count` elements of a run from `first`.
    fn places(run: &Run, first: i64, count: usize) -> (i64, usize) {
        (run.place + first / run.place_elements, count.div_ceil(run.place_elements as usize))
    }

    /// Calls `copy` for each chunk that has some of the places. Its arguments are the chunk's address, the index of the
    /// first place in the chunk and among ours, and the number of places.
    fn for_each_chunk(
        &self, (first, count): (i64, usize), each: i64, mut copy: impl FnMut(*mut u8, usize, usize, usize),
    ) {
        let mut done = 0;
        while done < count {
            let (chunk, within) = ((first + done as i64) / each, (first + done as i64) % each);
            let some = (count - done).min((each - within) as usize);
            copy(self.first.at((chunk * self.stride) as usize), within as usize, done, some);
            done += some;
        }
    }

    /// Calls `copy` for scales and for codes: with an address in the payload, an offset in [`Coded`]'s scales or codes,
    /// the number of bytes, and true for codes.
    fn for_each_of_blocks(&self, places: (i64, usize), mut copy: impl FnMut(*mut u8, usize, usize, bool)) {
        let Layout { format, chunk_places, scales_at, codes_at, .. } = *self.layout;
        let (scale, codes) = (format.scale_bytes as usize, format.place_bytes() as usize);
        self.for_each_chunk(places, chunk_places, |chunk, within, ours, count| {
            copy(chunk.wrapping_add(scales_at as usize + within * scale), ours * scale, count * scale, false);
            copy(chunk.wrapping_add(codes_at as usize + within * codes), ours * codes, count * codes, true);
        });
    }

    /// Writes the blocks that hold `count` elements of a run from index `first` on.
    ///
    /// # Safety
    /// The chunks that hold the elements exist, and nothing else writes these blocks.
    pub unsafe fn write_blocks(&self, run: &Run, first: i64, count: usize, coded: &Coded) {
        self.for_each_of_blocks(Self::places(run, first, count), |at, ours, bytes, are_codes| {
            let from = if are_codes { &coded.codes[ours..][..bytes] } else { &coded.scales[ours..][..bytes] };
            // SAFETY: the chunk has room for its blocks.
            unsafe { at.copy_from_nonoverlapping(from.as_ptr(), bytes) };
        });
    }

    /// Reads the blocks that hold `count` elements of a run from index `first` on.
    ///
    /// # Safety
    /// The chunks that hold the elements exist.
    pub unsafe fn read_blocks(&self, run: &Run, first: i64, count: usize, coded: &mut Coded) {
        self.for_each_of_blocks(Self::places(run, first, count), |at, ours, bytes, are_codes| {
            let to = if are_codes { &mut coded.codes[ours..][..bytes] } else { &mut coded.scales[ours..][..bytes] };
            // SAFETY: the chunk has these blocks.
            unsafe { at.copy_to_nonoverlapping(to.as_mut_ptr(), bytes) };
        });
    }

    /// Calls `copy` with an address in the payload, the index of the first raw element among ours, and their number.
    fn for_each_of_raws(&self, run: &Run, first: i64, count: usize, mut copy: impl FnMut(*mut f32, usize, usize)) {
        let Layout { chunk_raws, raws_at, .. } = *self.layout;
        self.for_each_chunk(Self::places(run, first, count), chunk_raws, |chunk, within, ours, count| {
            copy(chunk.wrapping_add(raws_at as usize + size_of::<f32>() * within).cast(), ours, count);
        });
    }

    /// Writes `count` raw elements of a run from index `first` on.
    ///
    /// # Safety
    /// See `write_blocks`.
    pub unsafe fn write_raws(&self, run: &Run, first: i64, count: usize, unit: &Unit) {
        self.for_each_of_raws(run, first, count, |at, ours, count| {
            // SAFETY: the chunk has room for its raw elements, and begins at a multiple of 16.
            unsafe { at.copy_from_nonoverlapping(unit.0[ours..][..count].as_ptr(), count) };
        });
    }

    /// Reads `count` raw elements of a run from index `first` on.
    ///
    /// # Safety
    /// See `read_blocks`.
    pub unsafe fn read_raws(&self, run: &Run, first: i64, count: usize, unit: &mut Unit) {
        self.for_each_of_raws(run, first, count, |at, ours, count| {
            // SAFETY: the chunk has these raw elements, and begins at a multiple of 16.
            unsafe { at.copy_to_nonoverlapping(unit.0[ours..][..count].as_mut_ptr(), count) };
        });
    }
}
