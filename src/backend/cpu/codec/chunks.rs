//! Payloads: where their bytes of bits lie, what stands before them, and whether that is what it should be.

use std::{fmt, ops::Range};

use crate::{
    error::{Result, error},
    plan::{
        bits::bytes_for,
        blocks::Blocks,
        codec::{CORRUPT, CodecPlan, FIELDS, FLAGS_FIELD, HEADER, Kind, NONFINITE, Run},
    },
};

/// Where the bytes of bits lie that were cut into chunks.
#[derive(Clone, Copy)]
pub struct Chunks {
    /// Of byte 0.
    first: *mut u8,
    /// Bytes of bits in a chunk, and from chunk to chunk.
    bytes: i64,
    stride: i64,
}

// SAFETY: an address; who reads and writes there promises that it may be done.
unsafe impl Sync for Chunks {}

impl Chunks {
    pub fn of_payload(plan: &CodecPlan, payload: *mut u8) -> Self {
        Self { first: payload.wrapping_add(plan.head as usize), bytes: plan.chunk_bytes, stride: plan.stride }
    }

    /// Bytes that were not cut.
    pub fn whole(first: *mut u8) -> Self {
        Self { first, bytes: i64::MAX, stride: 0 }
    }

    /// The chunk that a byte lies in, its address, and how many lie side by side from there.
    #[inline(always)]
    pub fn at(&self, byte: i64) -> (i64, *mut u8, usize) {
        let (chunk, within) = (byte / self.bytes, byte % self.bytes);
        (chunk, self.first.wrapping_offset((chunk * self.stride + within) as isize), (self.bytes - within) as usize)
    }

    /// Writes bytes from number `byte` on.
    ///
    /// # Safety
    /// There is room for them in the chunks.
    #[inline(always)]
    pub unsafe fn write(&self, mut byte: i64, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (_, address, side_by_side) = self.at(byte);
            let (some, rest) = bytes.split_at(bytes.len().min(side_by_side));
            // SAFETY: the chunks have room for bytes from number `byte` on, of which these lie side by side.
            unsafe { address.copy_from_nonoverlapping(some.as_ptr(), some.len()) };
            byte += some.len() as i64;
            bytes = rest;
        }
    }
}

/// The number of the first byte behind a segment's or a part's.
fn end(run: &Run) -> i64 {
    run.place + bytes_for(run.elements)
}

/// What a chunk holds of segments, in order.
fn parts(plan: &CodecPlan, chunk: usize) -> impl Iterator<Item = Run> {
    let held = plan.held_by(chunk);
    let first = plan.workers.partition_point(|run| end(run) <= held.start);
    let runs = plan.workers[first..].iter().take_while(move |run| run.place < held.end);
    runs.filter_map(move |run| plan.part(run.segment, chunk))
}

/// Writes all of a chunk but its bits; of a block codec, but its scales, codes and raw elements.
///
/// # Safety
/// At `chunk` are `plan.stride` bytes, aligned to 4.
pub unsafe fn write_frame(plan: &CodecPlan, chunk: *mut u8, number: usize, flags: u32, scale_of: impl Fn(&Run) -> f32) {
    let mut header = plan.header(number);
    header[FLAGS_FIELD].copy_from_slice(&flags.to_le_bytes());
    // SAFETY: `chunk` has `plan.stride` bytes, which begin with a header.
    unsafe { chunk.copy_from_nonoverlapping(header.as_ptr(), HEADER) };
    if let Some(blocks) = &plan.blocks {
        for gap in gaps(plan, blocks, number) {
            // SAFETY: the gaps lie in the chunk.
            unsafe { chunk.add(gap.start as usize).write_bytes(0, (gap.end - gap.start) as usize) };
        }
        return;
    }
    let all = plan.workers.last().map_or(0, end);
    let held = plan.held_by(number);
    let used = plan.head + (all.min(held.end) - held.start).max(0);
    // SAFETY: `chunk` has `plan.stride` bytes, aligned to 4: header, a scale a segment, and bits.
    unsafe {
        chunk.add(HEADER).write_bytes(0, plan.head as usize - HEADER);
        for part in parts(plan, number) {
            scale_at(chunk, part.segment).write(scale_of(&part).to_bits());
        }
        chunk.add(used as usize).write_bytes(0, (plan.stride - used) as usize);
    }
}

/// Padding bytes of a chunk of a block codec: after the scales, the codes and the raw elements.
fn gaps(plan: &CodecPlan, blocks: &Blocks, number: usize) -> [Range<i64>; 3] {
    // Of all of them, of which each chunk holds so many.
    let held = |all: i64, each: i64| (all - number as i64 * each).clamp(0, each);
    let own = held(blocks.blocks, blocks.chunk_blocks);
    [
        HEADER as i64 + own * blocks.format.scale_bytes..blocks.codes_at,
        blocks.codes_at + own * blocks.format.block_bytes()..blocks.raws_at,
        blocks.raws_at + held(blocks.raws, blocks.chunk_raws) * size_of::<f32>() as i64..plan.stride,
    ]
}

/// Where a chunk has the scale of a segment.
pub fn scale_at(chunk: *mut u8, segment: usize) -> *mut u32 {
    chunk.wrapping_add(HEADER + 4 * segment).cast()
}

/// Refuses a header that is not the one that is expected, in a field that is not `free`.
pub fn check_header(
    who: fmt::Arguments<'_>, header: &[u8; HEADER], expected: &[u8; HEADER], free: Range<usize>,
) -> Result<()> {
    if header == expected {
        return Ok(());
    }
    let value = |header: &[u8; HEADER], field: &Range<usize>| {
        let mut bytes = [0; 8];
        bytes[..field.len()].copy_from_slice(&header[field.clone()]);
        u64::from_le_bytes(bytes)
    };
    for (what, field) in &FIELDS {
        let (got, expected) = (value(header, field), value(expected, field));
        if got != expected && *field != free {
            return Err(error!(Corrupt, "{who}: {what} {expected:#x} expected, got {got:#x}"));
        }
    }
    Ok(())
}

/// Whether a scale is below zero, or -0.
pub fn is_negative(scale: f32) -> bool {
    scale.is_sign_negative() && !scale.is_nan()
}

/// Refuses a chunk that is corrupt; returns its flags.
///
/// # Safety
/// At `chunk` are `plan.stride` bytes, aligned to 4.
pub unsafe fn check(plan: &CodecPlan, who: fmt::Arguments<'_>, chunk: *mut u8, number: usize) -> Result<u32> {
    // SAFETY: `chunk` has `plan.stride` bytes, which begin with a header.
    let header = unsafe { chunk.cast::<[u8; HEADER]>().read() };
    check_header(who, &header, &plan.header(number), FLAGS_FIELD)?;
    let mut flags = [0; 4];
    flags.copy_from_slice(&header[FLAGS_FIELD]);
    let flags = u32::from_le_bytes(flags);
    if flags & !NONFINITE != 0 {
        return Err(error!(
            Corrupt,
            "{who}: flags 0 or NONFINITE {NONFINITE} expected, got {flags:#x}{}",
            if flags == CORRUPT || flags == CORRUPT | NONFINITE { ": it was made of corrupt ones" } else { "" }
        ));
    }
    if plan.blocks.is_some() {
        return Ok(flags); // no scale of a block makes it corrupt
    }
    let mut parts = parts(plan, number).peekable();
    for segment in 0..plan.workers.len() {
        let holds = parts.next_if(|part| part.segment == segment).is_some();
        // SAFETY: `chunk` has a scale for each segment.
        let scale = f32::from_bits(unsafe { scale_at(chunk, segment).read() });
        let expected = match plan.rules.kind {
            _ if !holds => Some(0.0f32),
            Kind::Sign => Some(1.0),
            _ => None,
        };
        match expected {
            Some(expected) if scale.to_bits() != expected.to_bits() => {
                return Err(error!(Corrupt, "{who}: scale {expected} of segment {segment} expected, got {scale:?}"));
            }
            None if is_negative(scale) => {
                return Err(error!(Corrupt, "{who}: scale {scale:?} of segment {segment} is negative"));
            }
            _ => {}
        }
    }
    Ok(flags)
}
