//! Numbers that matter, the same in every run.

use crate::tensor::Dtype;

use super::numbers::narrow;

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// A number, one in 16 of them a zero or a denormal of a dtype.
    pub fn tame(&mut self) -> f32 {
        match self.below(64) {
            0 => 0.0,
            1 => -0.0,
            2 => f32::from_bits(self.next() as u32 & 0x807f_ffff), // denormal
            3 => self.uniform() * 2f32.powi(-16),                  // one of float16
            4..=20 => self.uniform() * 2f32.powi(self.below(20) as i32 - 10),
            _ => self.uniform(),
        }
    }

    /// A number that is not finite, one whose square is not, or one that rounds to Inf.
    pub fn wild(&mut self) -> f32 {
        let sign = self.of(&[1.0, -1.0]);
        sign * match self.below(7) {
            0 => 6e17,
            1 => 1.9e19,
            2 => f32::INFINITY,
            3 => f32::from_bits(0x7f80_0000 | self.next() as u32 & 0x7f_ffff | 1),
            4 => f32::MAX, // Inf in bfloat16
            5 => 65520.0,  // Inf in float16
            _ => f32::from_bits(self.next() as u32),
        }
    }

    /// Elements of a dtype, as bits. `wild`: one in how many is; 0: none.
    pub fn elements(&mut self, dtype: Dtype, count: usize, wild: u64) -> Vec<u32> {
        (0..count)
            .map(|_| {
                let value = if wild > 0 && self.below(wild) == 0 { self.wild() } else { self.tame() };
                // Any NaN may come in, also one with a sign.
                let bits = narrow(dtype, value);
                if value.is_nan() { bits | (self.next() as u32 & 0x8001) << (8 * dtype.size - 16) } else { bits }
            })
            .collect()
    }
}
