//! Message that describes a tensor to the other side.
//!
//! ```text
//!      0  "GCSH"           8  bytes of the message     16  device type           24  bytes of the memory, 8
//!      4  version 1       12  dimensions               20  dtype: code, bits,    32  sizes, 8 each
//!                                                          lanes (2)
//!
//! after that, on CUDA:     strides, 8 each             offset of element 0, 8    handle of the memory, 64
//!                          identity of the device, 16  bytes of each part, 8; the handle counts only without parts
//! ```
//!
//! Numbers are in native byte order, since both processes run on one machine. Received messages are not trusted.

use arrayvec::ArrayVec;
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDeviceType};

use crate::{
    copy::ops::copy_now,
    cuda::{Uuid, ipc::IpcHandle},
    device::tensors,
    dlpack::{Described, Device, Elements, Shape, element_bits, reach},
    ffi::{
        error::{Result, error},
        name::Name,
    },
};

use super::{
    cuda::MOST_PARTS,
    socket::{Incoming, MOST_DESCRIPTORS},
};

const HEADER: usize = 32;
/// Bytes of a CUDA message in addition to header, sizes, strides and parts.
const ON_CUDA: usize = 8 + size_of::<Uuid>() + size_of::<IpcHandle>();
const MAGIC: [u8; 4] = *b"GCSH";
const VERSION: u32 = 1;
const CPU: u32 = DLDeviceType::CPU.0;
const CUDA: u32 = DLDeviceType::CUDA.0;

/// Maximum number of dimensions, as in NumPy and torch. They are read to the stack, so that no allocation can fail.
pub const MOST_DIMENSIONS: usize = 64;
pub type Lengths = ArrayVec<i64, MOST_DIMENSIONS>;

// A message has a descriptor for each part, and one for the socket for the answer.
const _: () = assert!(MOST_DESCRIPTORS == MOST_PARTS + 1);

pub struct Message {
    pub dtype: DLDataType,
    pub shape: Lengths,
    /// Bytes of all elements in C order; on CUDA, bytes of the memory that contains them.
    pub bytes: i64,
    /// Place of the elements in CUDA memory; None on the CPU.
    pub place: Option<Place>,
}

/// Place of elements in CUDA memory.
pub struct Place {
    pub strides: Lengths,
    /// Offset of element 0 in the memory, in bytes.
    pub offset: u64,
    pub uuid: Uuid,
    pub handle: IpcHandle,
    /// Bytes of each part; empty if the memory has a handle.
    pub parts: Vec<u64>,
    /// Number of parts of the message. A receiver that does not need their sizes does not keep them.
    pub n_parts: usize,
}

impl Message {
    /// Makes the message of a tensor that is copied to memory in C order.
    pub fn of(tensor: &Described<'_>) -> Result<Self> {
        let (dtype, shape) = (tensor.tensor.dtype, sizes_of(tensor)?);
        let bytes = bytes_of(dtype, &shape)?;
        Ok(Self { dtype, shape, bytes, place: None })
    }

    /// Makes the message of a tensor in CUDA memory.
    pub fn of_place(tensor: &Described<'_>, bytes: u64, place: Place) -> Result<Self> {
        let bytes = i64::try_from(bytes).map_err(|_| error!(SizeOverflow, "tensor: {bytes} bytes of memory"))?;
        Ok(Self { dtype: tensor.tensor.dtype, shape: sizes_of(tensor)?, bytes, place: Some(place) })
    }

    /// Returns the number of descriptors of memory that the message carries.
    pub fn descriptors(&self) -> usize {
        self.place.as_ref().map_or(1, |place| place.n_parts)
    }

    fn length(dimensions: usize, parts: Option<usize>) -> usize {
        HEADER + 8 * dimensions + parts.map_or(0, |parts| 8 * dimensions + ON_CUDA + 8 * parts)
    }

    pub fn encoded(&self) -> Result<Vec<u8>> {
        let (dimensions, parts) = (self.shape.len(), self.place.as_ref().map(|place| place.parts.len()));
        let length = Self::length(dimensions, parts);
        let mut text = Vec::new();
        text.try_reserve_exact(length)
            .map_err(|_| error!(OutOfMemory, "cannot allocate {length} bytes for a message"))?;
        let DLDataType { code, bits, lanes } = self.dtype;
        text.extend(MAGIC);
        for word in [VERSION, length as u32, dimensions as u32, if parts.is_some() { CUDA } else { CPU }] {
            text.extend(word.to_ne_bytes());
        }
        text.extend([code.0, bits]);
        text.extend(lanes.to_ne_bytes());
        text.extend(self.bytes.to_ne_bytes());
        self.shape.iter().for_each(|size| text.extend(size.to_ne_bytes()));
        if let Some(place) = &self.place {
            place.strides.iter().for_each(|stride| text.extend(stride.to_ne_bytes()));
            text.extend(place.offset.to_ne_bytes());
            text.extend(place.handle);
            text.extend(place.uuid);
            place.parts.iter().for_each(|bytes| text.extend(bytes.to_ne_bytes()));
        }
        Ok(text)
    }

    /// Receives the bytes of a message, and no more. `wants_parts`: the sizes of parts are kept.
    pub fn receive(incoming: &mut Incoming, mut wants_parts: bool) -> Result<Self> {
        let mut parts: Vec<u64> = Vec::new();
        if wants_parts && parts.try_reserve_exact(MOST_PARTS).is_err() {
            incoming.refuse_for_memory();
            wants_parts = false;
        }
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
        let (length, dimensions, device) = (word(8) as usize, word(12) as usize, word(16));
        // Bytes beyond a message without parts are parts.
        let n_parts = match device {
            _ if dimensions > MOST_DIMENSIONS => None,
            CUDA => length
                .checked_sub(Self::length(dimensions, Some(0)))
                .filter(|bytes| bytes % 8 == 0 && bytes / 8 <= MOST_PARTS)
                .map(|bytes| bytes / 8),
            _ => (length == Self::length(dimensions, None)).then_some(0),
        };
        let Some(n_parts) = n_parts else {
            return Err(error!(
                Corrupt,
                "socket: a message of {length} bytes says that it has {dimensions} dimensions on a device of type {device}"
            ));
        };
        let shape = lengths(incoming, dimensions)?;
        if device != CPU && device != CUDA {
            return Err(error!(Corrupt, "socket: the message is of a tensor on a device of type {device}"));
        }
        let dtype = DLDataType {
            code: DLDataTypeCode(header[20]),
            bits: header[21],
            lanes: u16::from_ne_bytes([header[22], header[23]]),
        };
        let bytes = i64::from(word(24)) | i64::from(word(28)) << 32;
        let place = match device {
            CPU => None,
            _ => {
                let strides = lengths(incoming, dimensions)?;
                let (mut offset, mut handle, mut uuid) = ([0; 8], [0; 64], [0; 16]);
                for field in [offset.as_mut_slice(), &mut handle, &mut uuid] {
                    incoming.read(field)?;
                }
                let sum = read_parts(incoming, n_parts, wants_parts.then_some(&mut parts))?;
                if n_parts > 0 && sum != u64::try_from(bytes).ok() {
                    return Err(error!(
                        Corrupt,
                        "socket: the message says {bytes} bytes of memory, in {n_parts} parts of other sizes"
                    ));
                }
                Some(Place { strides, offset: u64::from_ne_bytes(offset), uuid, handle, parts, n_parts })
            }
        };
        let message = Self { dtype, shape, bytes, place };
        match message.check() {
            Ok(()) => Ok(message),
            Err(refusal) => Err(error!(Corrupt, "socket: the message: {}", refusal.message)),
        }
    }

    /// Checks that all elements are in the memory.
    fn check(&self) -> Result<()> {
        let (bits, elements) = (
            i128::from(element_bits(&Name::new("dtype"), self.dtype)?),
            Shape::of(&self.shape).elements(&Name::new("shape"))?,
        );
        let Some(place) = &self.place else {
            let bytes = bytes_of(self.dtype, &self.shape)?;
            if bytes != self.bytes {
                return Err(error!(Corrupt, "{} bytes of a tensor of {bytes}", self.bytes));
            }
            return Ok(());
        };
        if elements == 0 {
            return match self.bytes {
                0 => Ok(()),
                bytes => Err(error!(Corrupt, "{bytes} bytes of memory for no element")),
            };
        }
        let (low, high) = reach(self.shape.iter().copied().zip(place.strides.iter().copied()), bits);
        let (first, all) = (8 * i128::from(place.offset), 8 * i128::from(self.bytes));
        if first + low < 0 || first.saturating_add(high) > all {
            return Err(error!(
                Corrupt,
                "shape {} of {bits}-bit elements with strides {:?} from byte {} on is not within {} bytes of memory",
                Shape::of(&self.shape),
                place.strides,
                place.offset,
                self.bytes
            ));
        }
        Ok(())
    }
}

/// Reads `count` sizes or strides.
fn lengths(incoming: &mut Incoming, count: usize) -> Result<Lengths> {
    let mut lengths = Lengths::new();
    for _ in 0..count {
        let mut length = [0; 8];
        incoming.read(&mut length)?;
        lengths.push(i64::from_ne_bytes(length));
    }
    Ok(lengths)
}

/// Reads the sizes of parts and appends them to `kept`, which has room for them. Returns their sum; None if a size is 0
/// or the sum has more than 64 bits.
fn read_parts(incoming: &mut Incoming, mut count: usize, mut kept: Option<&mut Vec<u64>>) -> Result<Option<u64>> {
    let (mut sum, mut some) = (Some(0u64), [0; 64 * 8]);
    while count > 0 {
        let some = &mut some[..8 * count.min(64)];
        incoming.read(some)?;
        count -= some.len() / 8;
        for bytes in some.chunks_exact(8) {
            let bytes = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
            sum = sum.filter(|_| bytes > 0).and_then(|sum| sum.checked_add(bytes));
            if let Some(kept) = &mut kept {
                kept.push(bytes);
            }
        }
    }
    Ok(sum)
}

/// Returns the sizes of a tensor; refuses too many dimensions.
pub fn sizes_of(tensor: &Described<'_>) -> Result<Lengths> {
    let dimensions = tensor.ndim();
    if dimensions > MOST_DIMENSIONS {
        return Err(error!(InvalidArgument, "tensor: {dimensions} dimensions; at most {MOST_DIMENSIONS} can be sent"));
    }
    Ok(tensor.dims().map(|(size, _)| size).collect())
}

/// Returns the bytes of a tensor in C order; elements of less than a byte are packed.
pub fn bytes_of(dtype: DLDataType, shape: &[i64]) -> Result<i64> {
    tensors::bytes_of(&Name::new("shape"), Shape::of(shape), element_bits(&Name::new("dtype"), dtype)?)
}

/// Copies a tensor's elements to other memory, in C order. The copy is complete when this returns.
///
/// # Safety
/// The tensor's memory can be read, and `to` is memory of `device` with room for all elements.
pub unsafe fn copy(tensor: &Described<'_>, sizes: &[i64], device: Device, to: *mut u8) -> Result<()> {
    // SAFETY: the caller promises a readable tensor, and memory of `device` with room for all elements.
    let (source, target) = unsafe {
        (
            Elements::new(&Name::new("tensor"), *tensor)?,
            Elements::of_memory(&Name::new("copy"), device, tensor.tensor.dtype, sizes, to)?,
        )
    };
    copy_now(&source, &target)
}
