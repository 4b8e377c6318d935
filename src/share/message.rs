//! How a tensor is described to the other side.
//!
//! ```text
//!      0  "GCSH"           8  bytes of the message     16  device type           24  bytes of the memory, 8
//!      4  version 1       12  dimensions               20  dtype: code, bits,    32  sizes, 8 each
//!                                                          lanes (2)
//! ```
//!
//! In the byte order of these machines, as two processes of one machine share it. What comes is a stranger's.

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDeviceType};

use crate::{
    error::{Result, error},
    tensor::{Described, Name, Shape, element_bits},
};

use super::socket::Incoming;

const HEADER: usize = 32;
const MAGIC: [u8; 4] = *b"GCSH";
const VERSION: u32 = 1;

/// More than any library makes, and little enough to be had.
const MOST_DIMENSIONS: usize = 1024;

pub struct Message {
    pub dtype: DLDataType,
    pub shape: Vec<i64>,
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
        let mut shape = sizes(dimensions)?;
        shape.extend(tensor.dims().map(|(size, _)| size));
        let dtype = tensor.tensor.dtype;
        let bytes = bytes_of(dtype, &shape)?;
        Ok(Self { dtype, shape, bytes })
    }

    pub fn encoded(&self) -> Result<Vec<u8>> {
        let length = HEADER + 8 * self.shape.len();
        let mut text = Vec::new();
        text.try_reserve_exact(length)
            .map_err(|_| error!(OutOfMemory, "a message of {length} bytes could not be had"))?;
        let DLDataType { code, bits, lanes } = self.dtype;
        text.extend(MAGIC);
        text.extend(VERSION.to_ne_bytes());
        text.extend((length as u32).to_ne_bytes());
        text.extend((self.shape.len() as u32).to_ne_bytes());
        text.extend(DLDeviceType::CPU.0.to_ne_bytes());
        text.extend([code.0, bits]);
        text.extend(lanes.to_ne_bytes());
        text.extend(self.bytes.to_ne_bytes());
        self.shape.iter().for_each(|size| text.extend(size.to_ne_bytes()));
        Ok(text)
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
        let mut shape = sizes(dimensions)?;
        for _ in 0..dimensions {
            let mut size = [0; 8];
            incoming.read(&mut size)?;
            shape.push(i64::from_ne_bytes(size));
        }
        if device != DLDeviceType::CPU.0 as u32 {
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

/// Room for the sizes of a shape.
fn sizes(dimensions: usize) -> Result<Vec<i64>> {
    let mut shape = Vec::new();
    shape
        .try_reserve_exact(dimensions)
        .map_err(|_| error!(OutOfMemory, "a shape of {dimensions} dimensions could not be had"))?;
    Ok(shape)
}

/// What a tensor takes in C order; elements of less than a byte are packed.
fn bytes_of(dtype: DLDataType, shape: &[i64]) -> Result<i64> {
    let bits = i128::from(element_bits(&Name::new("dtype"), dtype)?);
    let elements = i128::from(Shape::of(shape).elements(&Name::new("shape"))?);
    // At most 2^87, so it fits.
    i64::try_from((elements * bits + 7) / 8)
        .map_err(|_| error!(SizeOverflow, "shape: {} of {bits}-bit elements exceeds 2^63 - 1 bytes", Shape::of(shape)))
}
