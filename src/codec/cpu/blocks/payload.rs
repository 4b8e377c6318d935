//! Where blocks and raw elements lie in the chunks of a payload.

use crate::{
    codec::{
        cpu::sum::Unit,
        plan::{CodecPlan, Run, layout::Layout},
    },
    dlpack::Address,
};

/// Elements that loops go over at once: the first of a [`Unit`]. Half of one, so that memory need not wait for long
/// loops: 2^26 float32 to INT8 took 16.5 ms on Zen 5, 19.5 by whole units, 20 by a quarter, and 27 with the next one
/// prefetched.
pub const STEP: usize = 512;

/// The least blocks have 32 elements.
pub const STEP_BLOCKS: usize = STEP / 32;

/// The blocks of a step as a payload has them.
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

    /// Makes codes 0 that are absent: of blocks of which `count` elements are there.
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

/// A payload, or a chunk of one.
#[derive(Clone, Copy)]
pub struct Payload<'a> {
    layout: &'a Layout,
    stride: i64,
    /// Where chunk 0 is, or would be.
    first: Address,
}

impl<'a> Payload<'a> {
    /// `chunk`: the number of the chunk that is at `at`.
    pub fn new(plan: &'a CodecPlan, at: *mut u8, chunk: usize) -> Self {
        Self {
            layout: &plan.layout,
            stride: plan.stride(),
            first: Address(at.wrapping_sub(chunk * plan.stride() as usize)),
        }
    }

    /// The blocks or raw elements of a run from element `first` on: where they begin, and how many there are.
    fn places(run: &Run, first: i64, count: usize) -> (i64, usize) {
        (run.place + first / run.place_elements, count.div_ceil(run.place_elements as usize))
    }

    /// Calls `copy` with what lies in each chunk: its address, the number of the first place there, the number of the
    /// first one of ours, and how many.
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

    /// Calls `copy` for scales and codes: with an address in the payload, the number of a byte of [`Coded`]'s, how many
    /// bytes, and whether they are codes.
    fn for_each_of_blocks(&self, places: (i64, usize), mut copy: impl FnMut(*mut u8, usize, usize, bool)) {
        let Layout { format, chunk_places, scales_at, codes_at, .. } = *self.layout;
        let (scale, codes) = (format.scale_bytes as usize, format.place_bytes() as usize);
        self.for_each_chunk(places, chunk_places, |chunk, within, ours, count| {
            copy(chunk.wrapping_add(scales_at as usize + within * scale), ours * scale, count * scale, false);
            copy(chunk.wrapping_add(codes_at as usize + within * codes), ours * codes, count * codes, true);
        });
    }

    /// Writes the blocks that hold `count` elements of a run from number `first` on.
    ///
    /// # Safety
    /// The chunks that hold them are there, and nothing else writes these blocks.
    pub unsafe fn write_blocks(&self, run: &Run, first: i64, count: usize, coded: &Coded) {
        self.for_each_of_blocks(Self::places(run, first, count), |at, ours, bytes, are_codes| {
            let from = if are_codes { &coded.codes[ours..][..bytes] } else { &coded.scales[ours..][..bytes] };
            // SAFETY: the chunk has room for its blocks.
            unsafe { at.copy_from_nonoverlapping(from.as_ptr(), bytes) };
        });
    }

    /// Reads the blocks that hold `count` elements of a run from number `first` on.
    ///
    /// # Safety
    /// The chunks that hold them are there.
    pub unsafe fn read_blocks(&self, run: &Run, first: i64, count: usize, coded: &mut Coded) {
        self.for_each_of_blocks(Self::places(run, first, count), |at, ours, bytes, are_codes| {
            let to = if are_codes { &mut coded.codes[ours..][..bytes] } else { &mut coded.scales[ours..][..bytes] };
            // SAFETY: the chunk has these blocks.
            unsafe { at.copy_to_nonoverlapping(to.as_mut_ptr(), bytes) };
        });
    }

    /// Calls `copy` with an address in the payload, the number of a raw element of ours, and how many.
    fn for_each_of_raws(&self, run: &Run, first: i64, count: usize, mut copy: impl FnMut(*mut f32, usize, usize)) {
        let Layout { chunk_raws, raws_at, .. } = *self.layout;
        self.for_each_chunk(Self::places(run, first, count), chunk_raws, |chunk, within, ours, count| {
            copy(chunk.wrapping_add(raws_at as usize + size_of::<f32>() * within).cast(), ours, count);
        });
    }

    /// Writes `count` raw elements of a run from number `first` on.
    ///
    /// # Safety
    /// As for `write_blocks`.
    pub unsafe fn write_raws(&self, run: &Run, first: i64, count: usize, unit: &Unit) {
        self.for_each_of_raws(run, first, count, |at, ours, count| {
            // SAFETY: the chunk has room for its raw elements, and begins at a multiple of 16.
            unsafe { at.copy_from_nonoverlapping(unit.0[ours..][..count].as_ptr(), count) };
        });
    }

    /// Reads `count` raw elements of a run from number `first` on.
    ///
    /// # Safety
    /// As for `read_blocks`.
    pub unsafe fn read_raws(&self, run: &Run, first: i64, count: usize, unit: &mut Unit) {
        self.for_each_of_raws(run, first, count, |at, ours, count| {
            // SAFETY: the chunk has these raw elements, and begins at a multiple of 16.
            unsafe { at.copy_to_nonoverlapping(unit.0[ours..][..count].as_mut_ptr(), count) };
        });
    }
}
