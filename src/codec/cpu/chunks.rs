//! Payloads: where their bytes of bits lie, what stands before them, and whether that is what it should be.

use std::{fmt, ops::Range};

use crate::{
    codec::plan::{CODEC_FIELD, CORRUPT, CodecPlan, FIELDS, FLAGS_FIELD, HEADER, Kind, NONFINITE, Run, layout::Layout},
    ffi::error::{Result, error},
};

use super::family::Family;

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
        Self {
            first: payload.wrapping_add(plan.layout.scales_at as usize),
            bytes: plan.layout.chunk_places,
            stride: plan.stride(),
        }
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

/// Writes all of a chunk but its codes, raw elements and scales of blocks.
///
/// # Safety
/// At `chunk` are `plan.stride()` bytes, aligned to 4.
pub unsafe fn write_frame(
    family: &dyn Family, plan: &CodecPlan, chunk: *mut u8, number: usize, flags: u32, scale_of: &dyn Fn(&Run) -> f32,
) {
    let mut header = plan.header(number);
    header[FLAGS_FIELD].copy_from_slice(&flags.to_le_bytes());
    // SAFETY: `chunk` has `plan.stride()` bytes, which begin with a header.
    unsafe { chunk.copy_from_nonoverlapping(header.as_ptr(), HEADER) };
    for gap in gaps(plan, number) {
        // SAFETY: the gaps lie in the chunk.
        unsafe { chunk.add(gap.start as usize).write_bytes(0, (gap.end - gap.start) as usize) };
    }
    // SAFETY: the caller's promise; the memory of scales is the first gap.
    unsafe { family.write_scales(plan, chunk, number, scale_of) };
}

/// The bytes of a chunk that hold scales of segments or padding: the padding follows the scales of blocks, the codes and
/// the raw elements that are there.
fn gaps(plan: &CodecPlan, number: usize) -> [Range<i64>; 4] {
    let Layout { format, places, raws, chunk_places, chunk_raws, scales_at, codes_at, raws_at, stride } = plan.layout;
    let held = |all: i64, each: i64| (all - number as i64 * each).clamp(0, each);
    let own = held(places, chunk_places);
    [
        HEADER as i64..scales_at,
        scales_at + own * format.scale_bytes..codes_at,
        codes_at + own * format.place_bytes()..raws_at,
        raws_at + held(raws, chunk_raws) * size_of::<f32>() as i64..stride,
    ]
}

/// Where a chunk has the scale of a segment.
pub fn scale_at(chunk: *mut u8, segment: usize) -> *mut u32 {
    chunk.wrapping_add(HEADER + 4 * segment).cast()
}

/// The flags of a chunk.
///
/// # Safety
/// At `chunk` is a header, aligned to 4.
pub unsafe fn flags_of(chunk: *const u8) -> u32 {
    // SAFETY: the caller's promise; the field is aligned to 4, too.
    u32::from_le(unsafe { chunk.add(FLAGS_FIELD.start).cast::<u32>().read() })
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
    if header[..CODEC_FIELD.start] == expected[..CODEC_FIELD.start]
        && let (Some(got), Some(expected)) = (Kind::of_header(header), Kind::of_header(expected))
        && got != expected
    {
        return Err(error!(Corrupt, "{who}: codec {} expected, got {}", expected.name(), got.name()));
    }
    for (what, field) in &FIELDS {
        let (got, expected) = (value(header, field), value(expected, field));
        if got != expected && *field != free {
            return Err(error!(Corrupt, "{who}: {what} {expected:#x} expected, got {got:#x}"));
        }
    }
    Ok(())
}

/// Refuses a chunk that is corrupt; returns its flags.
///
/// # Safety
/// At `chunk` are `plan.stride()` bytes, aligned to 4.
pub unsafe fn check(
    family: &dyn Family, plan: &CodecPlan, who: fmt::Arguments<'_>, chunk: *mut u8, number: usize,
) -> Result<u32> {
    // SAFETY: `chunk` has `plan.stride()` bytes, which begin with a header.
    let header = unsafe { chunk.cast::<[u8; HEADER]>().read() };
    check_header(who, &header, &plan.header(number), FLAGS_FIELD)?;
    // SAFETY: as above.
    let flags = unsafe { flags_of(chunk) };
    if flags & !NONFINITE != 0 {
        return Err(error!(
            Corrupt,
            "{who}: flags 0 or NONFINITE {NONFINITE} expected, got {flags:#x}{}",
            if flags == CORRUPT || flags == CORRUPT | NONFINITE { ": it was made of corrupt ones" } else { "" }
        ));
    }
    // SAFETY: the caller's promise.
    unsafe { family.check_scales(plan, who, chunk, number) }?;
    Ok(flags)
}
