//! Cuts work into thread blocks.

/// Threads of a thread block, as a power of 2.
pub const LOG_BLOCK: u32 = 8;

/// Largest number of thread blocks of a launch.
pub const MOST_BLOCKS: i64 = i32::MAX as i64;

/// Bytes of a vector: the most that a thread reads or writes at once.
pub const VECTOR: i64 = 16;

/// Returns the threads along x, as a power of 2, for `pieces` pieces, `rounds` per thread: the largest width with at
/// most 1/32 more room than the tightest one. From 32 pieces on, the width is at least a warp.
pub fn width(pieces: i64, rounds: i64) -> u32 {
    if pieces < 32 {
        return (pieces as u64).next_power_of_two().ilog2();
    }
    let room = |log_width: u32| divide_up(pieces, rounds << log_width) * (rounds << log_width);
    let least = (5..=LOG_BLOCK).map(room).min().unwrap_or(pieces);
    (5..=LOG_BLOCK).rev().find(|&log_width| room(log_width) <= least + least / 32).unwrap_or(5)
}

pub fn divide_up(number: i64, by: i64) -> i64 {
    number / by + i64::from(number % by != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_along_x_leave_few_threads_idle() {
        for (pieces, rounds, expected) in [
            (1, 1, 0),
            (3, 4, 2),
            (20, 1, 5),
            (32, 1, 5),
            (33, 1, 6),
            (250, 1, 8),
            (256 * 1000 + 1, 1, 8),
            (96, 1, 5),
            (96, 4, 5),
            (1 << 20, 4, 8),
        ] {
            assert_eq!(width(pieces, rounds), expected, "{pieces} {rounds}");
        }
        assert_eq!((divide_up(0, 256), divide_up(257, 256), divide_up(i64::MAX, 2)), (0, 2, 1 << 62));
    }
}
