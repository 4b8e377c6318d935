//! The caller's floating-point environment changes nothing, and is his again afterwards.

#![cfg(target_arch = "x86_64")]

use std::arch::asm;

use super::{random::Random, *};

/// Flush to zero, denormals are zero, rounding up; everything masked.
const ODD: u32 = 0x8000 | 0x0040 | 0x4000 | 0x1f80;

fn set_mxcsr(control: u32) {
    // SAFETY: a valid control word.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const control) };
}

fn mxcsr() -> u32 {
    let mut control = 0u32;
    // SAFETY: writes 4 bytes.
    unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut control) };
    control
}

/// Numbers that an odd environment would change: denormals, and sums that are not exact.
fn denormals(random: &mut Random, count: usize) -> Vec<u32> {
    (0..count).map(|index| random.next() as u32 & if index % 2 == 0 { 0x807f_ffff } else { 0xbfff_ffff }).collect()
}

#[test]
fn the_callers_environment_changes_nothing() {
    let segments = [70_000, 5];
    let rules = Rules { beta: 0.9, ..rules() };
    let work = |odd: bool| {
        let mut random = Random(8);
        let mut codec = Pair::new(InstructionSet::chosen(), rules, &segments, 1, Some(0));
        let mut results = Vec::new();
        for _ in 0..3 {
            let mut memory = segments.map(|count| {
                let bytes: Vec<u8> = denormals(&mut random, count).iter().flat_map(|bits| bits.to_le_bytes()).collect();
                Memory::of(Dtype::F32, &bytes, 0)
            });
            let gradient = memory.each_mut().map(Memory::address);
            let bytes = codec.plan.payload_bytes() as usize;
            let (mut payload, mut reduced) = (Memory::new(Dtype::U8, bytes, 0), Memory::new(Dtype::U8, bytes, 0));
            let mut values = segments.map(|count| Memory::new(Dtype::F16, count, 0));
            let mut factors = [1.1, f32::from_bits(0x3f7f_ffff)].map(|factor| Memory::of_floats(&[factor]));
            let factor_views: Vec<View<'_>> = factors.iter_mut().map(Memory::view).collect();
            let (payload_view, reduced_view) = (payload.view(), reduced.view());
            let places = values.each_mut().map(Memory::address);
            let by = Decoding {
                dtype: Dtype::F16,
                divisor: 16_777_217,
                factor: Some(&factor_views[0]),
                add: false,
                behind_ours: false,
            };
            if odd {
                set_mxcsr(ODD);
            }
            let given = [Some(&factor_views[0]), Some(&factor_views[1])];
            let outcome = codec
                .codec
                .encode(&codec.plan, &gradient, given, &payload_view)
                .and_then(|()| codec.codec.reduce(&codec.plan, &payload_view, &reduced_view))
                .and_then(|()| codec.codec.decode(&codec.plan, &reduced_view, &by, &places));
            let after = mxcsr();
            set_mxcsr(0x1f80);
            outcome.unwrap();
            if odd {
                assert_eq!(after & !0x3f, ODD, "the caller's environment is not back");
            }
            results.push((payload.bytes().to_vec(), reduced.bytes().to_vec(), values.each_ref().map(Memory::bits)));
        }
        (results, codec.state())
    };
    assert!(work(true) == work(false), "another environment gave other bytes");
}
