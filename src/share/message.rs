//! How a tensor is described to the other side.
//!
//! ```text
//!      0  "GCSH"           8  bytes of the message     16  device type           24  bytes of the memory, 8
//!      4  version 1       12  dimensions               20  dtype: code, bits,    32  sizes, 8 each
//!                                                          lanes (2)
//! ```
//!
//! In the byte order of these machines, as two processes of one machine share it. What comes is a stranger's.

use arrayvec::ArrayVec;
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDeviceType};

use crate::{
    error::{Result, error},
    tensor::{Described, Name, Shape, element_bits},
};

use super::socket::Incoming;

const HEADER: usize = 32;
const MAGIC: [u8; 4] = *b"GCSH";
const VERSION: u32 = 1;
const CPU: u32 = DLDeviceType::CPU.0;

/// As many as NumPy and torch know. What is read is on the stack, so that nothing fails between the parts of a message.
pub const MOST_DIMENSIONS: usize = 64;
const MOST_BYTES: usize = HEADER + 8 * MOST_DIMENSIONS;

pub struct Message {
    pub dtype: DLDataType,
    pub shape: ArrayVec<i64, MOST_DIMENSIONS>,
    /// Of all elements, in C order.
    pub bytes: i64,
}

impl Message {
    pub fn of(tensor: &Described<'_>) -> Result<Self> {
        let dimensions = tensor.ndim();
        if dimensions > MOST_DIMENSIONS {
            return Err(error!(
                InvalidArgument,
                "tensor: {dimensions} dimensions; at most {MOST_DIMENSIONS} can be sent"
            ));
        }
        let shape: ArrayVec<_, _> = tensor.dims().map(|(size, _)| size).collect();
        let dtype = tensor.tensor.dtype;
        let bytes = bytes_of(dtype, &shape)?;
        Ok(Self { dtype, shape, bytes })
    }

    pub fn encoded(&self) -> ArrayVec<u8, MOST_BYTES> {
        let mut text = ArrayVec::new();
        let DLDataType { code, bits, lanes } = self.dtype;
        text.extend(MAGIC);
        for word in [VERSION, (HEADER + 8 * self.shape.len()) as u32, self.shape.len() as u32, CPU] {
            text.extend(word.to_ne_bytes());
        }
        text.extend([code.0, bits]);
        text.extend(lanes.to_ne_bytes());
        text.extend(self.bytes.to_ne_bytes());
        self.shape.iter().for_each(|size| text.extend(size.to_ne_bytes()));
        text
    }

    /// Takes the bytes of a message, and no more.
    pub fn receive(incoming: &mut Incoming) -> Result<Self> {
        let mut header = [0; HEADER];
        incoming.read(&mut header)?;
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if header[..4] != MAGIC || word(4) != VERSION {
            return Err(error!(
                Corrupt,
                "socket: the message begins with {:02x?}; \"GCSH\" and version {VERSION} expected",
                &header[..8]
            ));
        }
        let (length, dimensions, device) = (word(8), word(12) as usize, word(16));
        if dimensions > MOST_DIMENSIONS || length as usize != HEADER + 8 * dimensions {
            return Err(error!(
                Corrupt,
                "socket: a message of {length} bytes says that it has {dimensions} dimensions"
            ));
        }
        let mut shape = ArrayVec::new();
        for _ in 0..dimensions {
            let mut size = [0; 8];
            incoming.read(&mut size)?;
            shape.push(i64::from_ne_bytes(size));
        }
        if device != CPU {
            return Err(error!(Corrupt, "socket: the message is of a tensor on a device of type {device}"));
        }
        let dtype = DLDataType {
            code: DLDataTypeCode(header[20]),
            bits: header[21],
            lanes: u16::from_ne_bytes([header[22], header[23]]),
        };
        let said = i64::from(word(24)) | i64::from(word(28)) << 32;
        match bytes_of(dtype, &shape) {
            Ok(bytes) if bytes == said => Ok(Self { dtype, shape, bytes }),
            Ok(bytes) => Err(error!(Corrupt, "socket: the message says {said} bytes of a tensor of {bytes}")),
            Err(refusal) => Err(error!(Corrupt, "socket: the message: {}", refusal.message)),
        }
    }
}

/// What a tensor takes in C order; elements of less than a byte are packed.
fn bytes_of(dtype: DLDataType, shape: &[i64]) -> Result<i64> {
    let bits = i128::from(element_bits(&Name::new("dtype"), dtype)?);
    let elements = i128::from(Shape::of(shape).elements(&Name::new("shape"))?);
    // At most 2^87, so it fits.
    i64::try_from((elements * bits + 7) / 8)
        .map_err(|_| error!(SizeOverflow, "shape: {} of {bits}-bit elements exceeds 2^63 - 1 bytes", Shape::of(shape)))
}
