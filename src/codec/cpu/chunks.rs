//! Chunks of payloads: location of their bits, and the writing and checking of headers and scales.

use std::{fmt, ops::Range};

use crate::{
    codec::plan::{CODEC_FIELD, CORRUPT, CodecPlan, FIELDS, FLAGS_FIELD, HEADER, Kind, NONFINITE, Run, layout::Layout},
    ffi::error::{Result, error},
};

use super::family::Family;

/// Location of bytes of bits that are cut into chunks.
#[derive(Clone, Copy)]
pub struct Chunks {
    /// Address of the first byte of bits.
    first: *mut u8,
    /// Number of bytes of bits in a chunk, and distance from chunk to chunk in bytes.
    bytes: i64,
    stride: i64,
}

// SAFETY: this is only an address; each caller that accesses memory through it promises that the access is allowed.
unsafe impl Sync for Chunks {}

impl Chunks {
    pub fn of_payload(plan: &CodecPlan, payload: *mut u8) -> Self {
        Self {
            first: payload.wrapping_add(plan.layout.scales_at as usize),
            bytes: plan.layout.chunk_places,
            stride: plan.stride(),
        }
    }

    /// Describes bytes of bits that are not cut.
    pub fn whole(first: *mut u8) -> Self {
        Self { first, bytes: i64::MAX, stride: 0 }
    }

    /// Returns the chunk that contains a byte, the byte's address, and the number of contiguous bytes from there on.
    #[inline(always)]
    pub fn at(&self, byte: i64) -> (i64, *mut u8, usize) {
        let (chunk, within) = (byte / self.bytes, byte % self.bytes);
        (chunk, self.first.wrapping_offset((chunk * self.stride + within) as isize), (self.bytes - within) as usize)
    }

    /// Writes bytes from index `byte` on.
    ///
    /// # Safety
    /// The chunks have room for the bytes.
    #[inline(always)]
    pub unsafe fn write(&self, mut byte: i64, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (_, address, side_by_side) = self.at(byte);
            let (some, rest) = bytes.split_at(bytes.len().min(side_by_side));
            // SAFETY: the chunks have room for bytes from index `byte` on; `some` is contiguous there.
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
    // SAFETY: the caller promises the chunk. The memory of its scales is the first gap, which is zero.
    unsafe { family.write_scales(plan, chunk, number, scale_of) };
}

/// Returns the byte ranges of a chunk that hold scales of segments or padding. Padding follows the scales of blocks,
/// the codes and the raw elements.
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

/// Returns the address of a segment's scale in a chunk.
pub fn scale_at(chunk: *mut u8, segment: usize) -> *mut u32 {
    chunk.wrapping_add(HEADER + 4 * segment).cast()
}

/// Returns the flags of a chunk.
///
/// # Safety
/// At `chunk` is a header, aligned to 4.
pub unsafe fn flags_of(chunk: *const u8) -> u32 {
    // SAFETY: the caller promises a header, aligned to 4, and the field's offset is a multiple of 4.
    u32::from_le(unsafe { chunk.add(FLAGS_FIELD.start).cast::<u32>().read() })
}

/// Refuses a header that differs from `expected` in a field other than `free`.
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
    // SAFETY: `chunk` begins with a header, and is aligned to 4.
    let flags = unsafe { flags_of(chunk) };
    if flags & !NONFINITE != 0 {
        return Err(error!(
            Corrupt,
            "{who}: flags 0 or NONFINITE {NONFINITE} expected, got {flags:#x}{}",
            if flags == CORRUPT || flags == CORRUPT | NONFINITE { ": it was made of corrupt ones" } else { "" }
        ));
    }
    // SAFETY: the caller promises `plan.stride()` bytes at `chunk`, aligned to 4.
    unsafe { family.check_scales(plan, who, chunk, number) }?;
    Ok(flags)
}
