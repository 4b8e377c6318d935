//! The element types this library reads and writes.

use std::fmt;

use dlpark::ffi::{DLDataType, DLDataTypeCode};

use crate::error::{Result, error};

use super::Name;

/// What an element is, apart from its width.
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
    /// Bytes an element.
    pub size: usize,
}

impl Dtype {
    pub const BOOL: Dtype = Dtype { kind: Kind::Bool, size: 1 };
    pub const U8: Dtype = Dtype { kind: Kind::Uint, size: 1 };
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
