//! Dtypes with their NumPy names and C++ types.

use crate::dlpack::{Dtype, Kind};

/// Every dtype with its NumPy names and its C++ type in a kernel.
const TYPES: [(Dtype, &[&str], &str); 13] = [
    (Dtype::BOOL, &["bool", "bool_"], "bool"),
    (integer(Kind::Int, 1), &["int8"], "signed char"),
    (integer(Kind::Int, 2), &["int16"], "short"),
    (integer(Kind::Int, 4), &["int32"], "int"),
    (integer(Kind::Int, 8), &["int64"], "long long"),
    (Dtype::U8, &["uint8"], "unsigned char"),
    (integer(Kind::Uint, 2), &["uint16"], "unsigned short"),
    (integer(Kind::Uint, 4), &["uint32"], "unsigned"),
    (integer(Kind::Uint, 8), &["uint64"], "unsigned long long"),
    (Dtype::F16, &["float16", "half"], "::float16"),
    (Dtype::BF16, &["bfloat16"], "::bfloat16"),
    (Dtype::F32, &["float32", "single"], "float"),
    (Dtype::F64, &["float64", "double"], "double"),
];

const fn integer(kind: Kind, size: usize) -> Dtype {
    Dtype { kind, size }
}

/// Returns the dtype with a NumPy name.
pub fn of_name(name: &str) -> Option<Dtype> {
    TYPES.iter().find(|(_, names, _)| names.contains(&name)).map(|&(dtype, ..)| dtype)
}

/// Returns the C++ type of a dtype in a kernel; "" for a dtype that kernels do not support.
pub fn in_cpp(dtype: Dtype) -> &'static str {
    TYPES.iter().find(|(known, ..)| *known == dtype).map_or("", |&(.., cpp)| cpp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_has_a_name_and_a_type() {
        for (dtype, names, cpp) in TYPES {
            assert!(names.iter().all(|name| of_name(name) == Some(dtype)));
            assert_eq!(in_cpp(dtype), cpp);
            assert_eq!(dtype.to_string(), names[0]);
        }
        for unknown in ["float", "int", "f4", "complex64", "Float32", ""] {
            assert_eq!(of_name(unknown), None);
        }
    }
}
