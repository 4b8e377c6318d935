//! The plain form against the model, and against the handle.

use super::{
    super::plain::{carry_with, compress_with},
    random::Random,
    *,
};
use crate::backend::call::Compression;

fn bytes_of(dtype: Dtype, bits: &[u32]) -> Vec<u8> {
    bits.iter().flat_map(|bits| bits.to_le_bytes()[..dtype.size].to_vec()).collect()
}

/// Compresses; the bytes and the scale.
fn compress(
    set: InstructionSet, rule: ScaleRule, grad: &mut Memory, error: Option<&mut Memory>, bytes: usize,
) -> (Vec<u8>, u32) {
    let mut dst = Memory::new(Dtype::U8, bytes, 1);
    let mut scale = Memory::new(Dtype::F32, 1, 1);
    let mut workspace = Memory::new(Dtype::U8, 8 * grad.shape[0] as usize / 8192 + 16, 0);
    let (error, views) = (error.map(Memory::view), [grad, &mut dst, &mut scale, &mut workspace].map(Memory::view));
    let [grad, dst_view, scale_view, workspace_view] = &views;
    let error = error.as_ref();
    let call = Compression { grad, error, rule, dst: dst_view, scale: scale_view, workspace: workspace_view };
    compress_with(set, &call);
    carry_with(set, &call);
    workspace.bytes();
    (dst.bytes().to_vec(), scale.bits()[0])
}

#[test]
fn the_plain_form_is_the_models() {
    let mut random = Random(6);
    for set in InstructionSet::available() {
        for size in [0, 1, 7, 8, 1023, 1024, 1025, 65535, 65537, 100_003] {
            for (values, error) in
                DTYPES.iter().flat_map(|&v| [None, Some(Dtype::F32), Some(Dtype::BF16)].map(|e| (v, e)))
            {
                let rule = random.of(&[ScaleRule::Rms, ScaleRule::Mean]);
                let mut errors = random.elements(error.unwrap_or(Dtype::F32), size, 0);
                for wild in [0, 0, 3000] {
                    let grad = random.elements(values, size, wild);
                    let widened: Vec<f32> = grad.iter().map(|&bits| numbers::widen(values, bits)).collect();
                    let mut error_memory = error.map(|dtype| Memory::of(dtype, &bytes_of(dtype, &errors), 3));
                    let mut grad = Memory::of(values, &bytes_of(values, &grad), 1);
                    let bytes = size.div_ceil(8) + random.below(3) as usize;
                    let (dst, scale) = compress(set, rule, &mut grad, error_memory.as_mut(), bytes);
                    let (mut expected, s) = model::compress(rule, &widened, error.map(|dtype| (dtype, &mut errors)));
                    expected.resize(bytes, 0);
                    assert_eq!(scale, s.to_bits());
                    assert_same("bits", &dst, &expected);
                    if let Some(memory) = error_memory {
                        assert_eq!(memory.bits(), errors, "{size} {values} {error:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_handle_with_float32_errors_is_the_plain_form() {
    let mut random = Random(7);
    for values in DTYPES {
        let size = 70_001;
        let mut pair = Pair::new(InstructionSet::chosen(), Rules { values, ..rules() }, &[size], 1, None);
        let mut error = Memory::of_floats(&vec![0.0; size]);
        for _ in 0..4 {
            let grad = random.elements(values, size, 0);
            let payload = pair.encode(std::slice::from_ref(&grad), [1.0; 2]);
            let mut grad = Memory::of(values, &bytes_of(values, &grad), 0);
            let bytes = size.div_ceil(8);
            let (bits, scale) = compress(InstructionSet::chosen(), ScaleRule::Rms, &mut grad, Some(&mut error), bytes);
            assert_eq!(payload[64..68], scale.to_le_bytes());
            assert_same("bits", &payload[80..80 + bytes], &bits);
            let mut out = Memory::new(Dtype::F32, size, 0);
            pair.codec.errors_out(&pair.plan, Some(&out.view()), None).unwrap();
            assert_eq!(out.bits(), error.bits());
        }
    }
}
