//! Element types that this library reads and writes, and the sizes of types that it only passes on.

use std::fmt;

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLPACK_MINOR_VERSION};

use crate::ffi::{
    error::{Result, error},
    name::Name,
};

/// Kind of an element, without its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Bool,
    Int,
    Uint,
    Float,
    Bfloat,
}

/// An element type that this library reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dtype {
    pub kind: Kind,
    /// Bytes of an element.
    pub size: usize,
}

impl Dtype {
    pub const BOOL: Dtype = Dtype { kind: Kind::Bool, size: 1 };
    pub const U8: Dtype = Dtype { kind: Kind::Uint, size: 1 };
    pub const F16: Dtype = Dtype { kind: Kind::Float, size: 2 };
    pub const F32: Dtype = Dtype { kind: Kind::Float, size: 4 };
    pub const F64: Dtype = Dtype { kind: Kind::Float, size: 8 };
    pub const BF16: Dtype = Dtype { kind: Kind::Bfloat, size: 2 };

    /// Reads a descriptor's dtype: bool of 8 bits, int and uint of 8 to 64, float of 16 to 64, bfloat of 16; one lane.
    #[inline]
    pub fn from_dlpack(name: &Name, dtype: DLDataType) -> Result<Self> {
        let kind = match dtype.code {
            DLDataTypeCode::BOOL => Kind::Bool,
            DLDataTypeCode::INT => Kind::Int,
            DLDataTypeCode::UINT => Kind::Uint,
            DLDataTypeCode::FLOAT => Kind::Float,
            DLDataTypeCode::BFLOAT => Kind::Bfloat,
            other => {
                return Err(error!(
                    UnsupportedDtype,
                    "{name}: dtype code {} is not one of int 0, uint 1, float 2, bfloat 4, bool 6", other.0
                ));
            }
        };
        let widths: &[u8] = match kind {
            Kind::Bool => &[8],
            Kind::Int | Kind::Uint => &[8, 16, 32, 64],
            Kind::Float => &[16, 32, 64],
            Kind::Bfloat => &[16],
        };
        if !widths.contains(&dtype.bits) {
            return Err(error!(UnsupportedDtype, "{name}: {kind} of {} bits; {widths:?} are known", dtype.bits));
        }
        if dtype.lanes != 1 {
            return Err(error!(
                UnsupportedDtype,
                "{name}: {} lanes an element; a vector type is a last dimension here", dtype.lanes
            ));
        }
        Ok(Self { kind, size: usize::from(dtype.bits / 8) })
    }

    pub fn to_dlpack(self) -> DLDataType {
        let code = match self.kind {
            Kind::Bool => DLDataTypeCode::BOOL,
            Kind::Int => DLDataTypeCode::INT,
            Kind::Uint => DLDataTypeCode::UINT,
            Kind::Float => DLDataTypeCode::FLOAT,
            Kind::Bfloat => DLDataTypeCode::BFLOAT,
        };
        DLDataType { code, bits: self.size as u8 * 8, lanes: 1 }
    }

    pub fn is_float(self) -> bool {
        matches!(self.kind, Kind::Float | Kind::Bfloat)
    }

    /// Returns true if the dtype has the value -1.
    pub fn is_signed(self) -> bool {
        self.is_float() || self.kind == Kind::Int
    }
}

/// Returns the bits of an element of any dtype, lanes included. Elements smaller than a byte are packed.
pub fn element_bits(name: &Name, dtype: DLDataType) -> Result<u32> {
    let bits = u32::from(dtype.bits) * u32::from(dtype.lanes);
    if bits == 0 {
        return Err(error!(
            UnsupportedDtype,
            "{name}: {} lanes of {} bits; an element has at least one bit", dtype.lanes, dtype.bits
        ));
    }
    Ok(bits)
}

/// Returns the lowest minor version of DLPack 1 that has this dtype's code; for unknown codes, the newest known one.
pub fn lowest_minor_version(dtype: DLDataType) -> u32 {
    match dtype.code.0 {
        0..=6 => 0,
        7..=17 => 1, // floats of 8, 6 and 4 bits
        _ => DLPACK_MINOR_VERSION,
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Kind::Bool => "bool",
            Kind::Int => "int",
            Kind::Uint => "uint",
            Kind::Float => "float",
            Kind::Bfloat => "bfloat",
        })
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Bool => out.write_str("bool"),
            kind => write!(out, "{kind}{}", self.size * 8),
        }
    }
}
