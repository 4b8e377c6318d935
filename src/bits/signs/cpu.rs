//! Signs on the CPU: unpacking them with scales, and votes.

use std::{ops::Range, ptr};

use crate::{
    bits::{
        cpu::{self, BYTES_A_PART, BYTES_A_THREAD},
        plan::BitPlan,
    },
    cpu::{
        InstructionSet,
        dispatch::multiversion,
        pool::{self, cut},
    },
    dlpack::{Address, Dtype, View, rules::Patterns},
};

use super::plan::Poll;

/// Writes +scale or -scale to the elements of `dst` for each bit in the bytes of `src`. `plan` was made from these two
/// views; there is one scale, or one for each row of `src`.
pub fn unpack(plan: &BitPlan, dtype: Dtype, scales: &View<'_>, src: &View<'_>, dst: &View<'_>) {
    let first = Address(scales.data());
    let patterns = |chunk: i64| {
        // SAFETY: `scales` has an element with this number; the read needs no alignment.
        Patterns::scaled(dtype, unsafe { first.at(4 * chunk as usize).cast::<f32>().read_unaligned() })
    };
    if scales.elements() == 1 {
        return cpu::unpack(plan, patterns(0), src, dst);
    }
    cpu::unpack_chunks(plan, src.shape()[1], patterns, src, dst);
}

/// Writes the majority of the voters, the rows of `src`, in each bit. `poll` was made from `src`; `dst` is as long.
pub fn vote(poll: &Poll, src: &View<'_>, dst: &View<'_>) {
    vote_with(InstructionSet::chosen(), poll, src.data(), dst.data());
}

/// Votes in memory that nothing else writes, on a processor with the instructions of `set`.
pub fn vote_with(set: InstructionSet, poll: &Poll, src: *mut u8, dst: *mut u8) {
    let (src, dst) = (Address(src), Address(dst));
    let read = poll.bytes.saturating_mul(poll.voters as i64);
    let parts_for = |threads: usize| {
        (read / BYTES_A_PART).min(poll.bytes / BLOCK as i64).clamp(threads as i64, i64::from(u32::MAX)) as u32
    };
    pool::run((read / BYTES_A_THREAD) as usize, parts_for, |index, parts| {
        let part = cut(poll.bytes, index, parts);
        // SAFETY: the processor has the instructions of `set`, which was chosen for it. The makers of the views
        // promised valid memory, and every part writes bytes of its own.
        unsafe { vote_part(set, poll, src.at(0), dst.at(0), &part) };
    });
}

multiversion! {
    /// Writes a part of the bytes of a poll.
    fn vote_part(poll: &Poll, src: *const u8, dst: *mut u8, part: &Range<i64>) = vote_part_on;
}

// Votes are counted on all bits of a block at once: plane p has bit p of each bit's count.
//
//     votes on bit   0 1 2 3 ...      with an even number of voters, the voter in turn votes twice (see Poll)
//     plane 0        1 0 1 1
//     plane 1        0 1 1 0
//                    1 2 3 1 votes
//
// All loops over the words of a block have a constant length, so the compiler vectorizes them.

/// Bytes of a block. Its planes take at most 8 KiB and fit in the L1 cache.
const BLOCK: usize = 128;

type Block = [u64; BLOCK / 8];

const NOTHING: Block = [0; BLOCK / 8];

/// Number of voters that are added together: seven full adders make one carry of eight votes.
const TOGETHER: usize = 8;

/// Maximum number of voters for which second votes are selected from the rows as they are read. With more voters,
/// second votes are gathered byte by byte, which are few compared with all reads.
const MAX_MASKED_VOTERS: usize = 64;

/// Mask of the bytes at which a voter is in turn, beginning with such a byte.
type Turns = [u8; MAX_MASKED_VOTERS + BLOCK];

/// # Safety
/// `src` and `dst` are the addresses of the poll's voters and of their result, at any alignment; the processor has the
/// instructions that the caller was compiled for.
#[allow(clippy::extra_unused_type_parameters, reason = "multiversion! names the set of every loop")]
#[inline(always)]
unsafe fn vote_part_on<S>(poll: &Poll, src: *const u8, dst: *mut u8, part: &Range<i64>) {
    let mut planes = [NOTHING; 64];
    let mut turns: Turns = [0; MAX_MASKED_VOTERS + BLOCK];
    if poll.voters <= MAX_MASKED_VOTERS as u64 {
        turns.iter_mut().step_by(poll.voters as usize).for_each(|byte| *byte = 0xff);
    }
    let mut at = part.start;
    while at < part.end {
        let left = (part.end - at) as usize;
        // SAFETY: each row has `left` bytes from byte `at` on, and `dst` has room for as many.
        unsafe {
            if left >= BLOCK {
                let elected = elect::<true>(poll, &turns, src, at, BLOCK, &mut planes);
                dst.add(at as usize).cast::<Block>().write_unaligned(elected);
            } else {
                let elected = elect::<false>(poll, &turns, src, at, left, &mut planes);
                ptr::copy_nonoverlapping(elected.as_ptr().cast(), dst.add(at as usize), left);
            }
        }
        at += BLOCK as i64;
    }
}

/// Returns the majority in the bits of `count` bytes from byte `at` on: a WHOLE block, or fewer bytes.
///
/// # Safety
/// See [`vote_part`]; each row has `count` bytes from byte `at` on.
#[inline(always)]
unsafe fn elect<const WHOLE: bool>(
    poll: &Poll, turns: &Turns, src: *const u8, at: i64, count: usize, planes: &mut [Block; 64],
) -> Block {
    let voters = poll.voters;
    let (even, few) = (voters.is_multiple_of(2), voters <= MAX_MASKED_VOTERS as u64);
    // The count of all voters and a second vote has this number of bits.
    let used = (u64::BITS - (voters + 1).leading_zeros()) as usize;
    planes[..used].fill(NOTHING);
    let mut second = NOTHING;
    // The next voter to be read was in turn this number of bytes before the block (at most MAX_MASKED_VOTERS voters).
    let mut behind = poll.in_turn(at as u64) as usize;
    let mut voter = 0;
    while voter < voters {
        // The last voters are added singly: adding fewer than eight together takes as long as adding eight.
        let some = if voters - voter < TOGETHER as u64 { 1 } else { TOGETHER };
        let mut rows = [NOTHING; TOGETHER];
        for row in &mut rows[..some] {
            // SAFETY: this voter has `count` bytes from byte `at` on.
            *row = unsafe { read::<WHOLE>(src.offset(voter as isize * poll.stride as isize).add(at as usize), count) };
            voter += 1;
            if even && few {
                // SAFETY: `behind` is less than MAX_MASKED_VOTERS, so a block from there on is within `turns`.
                let mask = unsafe { turns.as_ptr().add(behind).cast::<Block>().read_unaligned() };
                keep(&mut second, row, &mask);
                behind = if behind == 0 { voters as usize - 1 } else { behind - 1 };
            }
        }
        if some == TOGETHER {
            add_together(planes, &rows, used);
        } else {
            add(planes, &mut rows[0], 0, used);
        }
    }
    if even {
        if !few {
            // SAFETY: every voter has `count` bytes from byte `at` on.
            unsafe { gather(poll, src, at, count, &mut second) };
        }
        add(planes, &mut second, 0, used);
    }
    reached(planes, voters / 2 + 1, used)
}

/// Reads a WHOLE block of bytes, or `count` bytes, followed by zeros.
///
/// # Safety
/// `from` has these bytes.
#[inline(always)]
unsafe fn read<const WHOLE: bool>(from: *const u8, count: usize) -> Block {
    // SAFETY: `count` bytes can be read, a block of them if WHOLE; a block has room for more than `count`.
    unsafe {
        if WHOLE {
            return from.cast::<Block>().read_unaligned();
        }
        let mut block = NOTHING;
        ptr::copy_nonoverlapping(from, block.as_mut_ptr().cast(), count);
        block
    }
}

#[inline(always)]
fn keep(kept: &mut Block, row: &Block, mask: &Block) {
    for ((kept, row), mask) in kept.iter_mut().zip(row).zip(mask) {
        *kept |= row & mask;
    }
}

/// Writes the bytes of the voters in turn to `second`.
///
/// # Safety
/// See [`elect`].
#[inline(always)]
unsafe fn gather(poll: &Poll, src: *const u8, at: i64, count: usize, second: &mut Block) {
    let mut voter = poll.in_turn(at as u64);
    for index in 0..count {
        // SAFETY: the voter has this byte, and the block has room for `count` bytes.
        unsafe {
            let from = src.offset(voter as isize * poll.stride as isize).add(at as usize + index);
            second.as_mut_ptr().cast::<u8>().add(index).write(from.read());
        }
        voter += 1;
        if voter == poll.voters {
            voter = 0;
        }
    }
}

/// Adds `a` and `b` to `sum`, bit by bit, and returns the carries.
#[inline(always)]
fn add_two(sum: &mut u64, a: u64, b: u64) -> u64 {
    let either = a ^ b;
    let carry = *sum & either | a & b;
    *sum ^= either;
    carry
}

/// Adds the votes of eight voters to the counts.
#[inline(always)]
fn add_together(planes: &mut [Block; 64], rows: &[Block; TOGETHER], used: usize) {
    let mut carries = NOTHING;
    let [ones, twos, fours, ..] = planes;
    for word in 0..BLOCK / 8 {
        let row = |index: usize| rows[index][word];
        let two = [
            add_two(&mut ones[word], row(0), row(1)),
            add_two(&mut ones[word], row(2), row(3)),
            add_two(&mut ones[word], row(4), row(5)),
            add_two(&mut ones[word], row(6), row(7)),
        ];
        let four = [add_two(&mut twos[word], two[0], two[1]), add_two(&mut twos[word], two[2], two[3])];
        carries[word] = add_two(&mut fours[word], four[0], four[1]);
    }
    add(planes, &mut carries, 3, used);
}

/// Adds votes to the counts, from plane `from` on.
#[inline(always)]
fn add(planes: &mut [Block; 64], votes: &mut Block, from: usize, used: usize) {
    for plane in &mut planes[from..used] {
        let mut any = 0;
        for (plane, votes) in plane.iter_mut().zip(&mut *votes) {
            let carry = *plane & *votes;
            *plane ^= *votes;
            *votes = carry;
            any |= carry;
        }
        if any == 0 {
            return;
        }
    }
}

/// Returns the bits whose count is at least `least`.
#[inline(always)]
fn reached(planes: &[Block; 64], least: u64, used: usize) -> Block {
    let mut reached = [u64::MAX; BLOCK / 8];
    for (bit, plane) in planes[..used].iter().enumerate() {
        let all = if least >> bit & 1 == 1 { u64::MAX } else { 0 };
        for (reached, plane) in reached.iter_mut().zip(plane) {
            // The count reaches `least` with both bits where the bit of `least` is 1, with either where it is 0.
            *reached = (*reached & plane) | ((*reached | plane) & !all);
        }
    }
    reached
}
