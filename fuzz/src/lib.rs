//! Tensors for the fuzz targets: descriptors of any kind, each with exactly the memory that it describes, in an
//! allocation of its own, so that the sanitizer detects an access beyond either end.

use std::ptr;

use arbitrary::Arbitrary;
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensor, DLTensor};

/// Most bytes of memory that a descriptor may have.
const MOST_BYTES: i128 = 1 << 20;

/// Known dtypes: code and bits. The first nine are no floats.
pub const DTYPES: [(u8, u8); 13] =
    [(6, 8), (1, 8), (0, 8), (0, 16), (0, 32), (0, 64), (1, 16), (1, 32), (1, 64), (2, 16), (2, 32), (2, 64), (4, 16)];
pub const INTEGERS: usize = 9;
pub const UINT8: (u8, u8) = (1, 8);

/// Number at which arithmetic may fail.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Number {
    Small(u8),
    Signed(i8),
    Power { bit: u8, add: i8, negative: bool },
    Any(i64),
}

impl Number {
    pub fn get(self) -> i64 {
        match self {
            Self::Small(number) => i64::from(number % 40),
            Self::Signed(number) => i64::from(number),
            Self::Power { bit, add, negative } => {
                let power = (1i64 << (bit % 64)).wrapping_add(i64::from(add % 8));
                if negative { power.wrapping_neg() } else { power }
            }
            Self::Any(number) => number,
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Dtype {
    Known(u8),
    Uint8,
    Any { code: u8, bits: u8, lanes: u16 },
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Device {
    Cpu,
    Host,
    Any { kind: u32, id: u8 },
}

/// Flaw of a descriptor's addresses.
#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    None,
    Right,
    Fine,
    NullTensor,
    OddTensor,
    NullShape,
    OddShape,
    OddStrides,
    NullData,
}

/// Contents of a descriptor, valid or not.
#[derive(Arbitrary, Clone, Debug)]
pub struct Description {
    pub dtype: Dtype,
    pub device: Device,
    pub dims: Vec<(Number, Number)>,
    pub compact: bool,
    pub negative_ndim: Option<u16>,
    pub byte_offset: Number,
    pub flaw: Flaw,
    /// Bytes before the first described byte: elements may lie at any address.
    pub pad: u8,
    pub fill: u8,
}

/// State of a descriptor's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// All of the memory exists.
    Here,
    /// The descriptor is inconsistent: it must be refused before any memory is read.
    Refused,
    /// The memory does not exist: only for functions that do not read it.
    Elsewhere,
}

/// A descriptor with its memory.
#[derive(Debug)]
pub struct Tensor {
    pub managed: Box<DLManagedTensor>,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
    pub place: Place,
    /// Number of elements; 0 unless the memory exists.
    pub elements: i64,
    pub size: usize,
    pub memory: Vec<u8>,
    /// Offset of element 0 in `memory`, in bytes.
    first: usize,
    flaw: Flaw,
}

impl Tensor {
    pub fn new(description: &Description) -> Self {
        let Description { dtype, device, dims, compact, negative_ndim, byte_offset, flaw, pad, fill } = description;
        let (code, bits, lanes) = match *dtype {
            Dtype::Known(index) => {
                let (code, bits) = DTYPES[usize::from(index) % DTYPES.len()];
                (code, bits, 1)
            }
            Dtype::Uint8 => (UINT8.0, UINT8.1, 1),
            Dtype::Any { code, bits, lanes } => (code, bits, lanes),
        };
        let (kind, device_id) = match *device {
            Device::Cpu => (DLDeviceType::CPU, 0),
            Device::Host => (DLDeviceType::CUDAHOST, 0),
            // No machine has a GPU with this number.
            Device::Any { kind, id } => (DLDeviceType(kind % 20), 1000 + i32::from(id)),
        };
        let shape: Vec<i64> = dims.iter().take(70).map(|(size, _)| size.get()).collect();
        let ndim = negative_ndim.map_or(shape.len() as i32, |ndim| -1 - i32::from(ndim));
        let mut strides: Vec<i64> = dims.iter().take(70).map(|(_, stride)| stride.get()).collect();
        if *compact {
            let mut stride = 1i64;
            for (slot, size) in strides.iter_mut().zip(&shape).rev() {
                *slot = stride;
                stride = stride.saturating_mul((*size).max(1));
            }
        }
        let size = usize::from(bits / 8);
        let known = DTYPES.contains(&(code, bits)) && lanes == 1;
        let on_host = matches!(kind, DLDeviceType::CPU | DLDeviceType::CUDAHOST);

        let mut tensor = Self {
            managed: Box::new(DLManagedTensor {
                dl_tensor: DLTensor {
                    data: ptr::null_mut(),
                    device: DLDevice { device_type: kind, device_id },
                    ndim,
                    dtype: DLDataType { code: DLDataTypeCode(code), bits, lanes },
                    shape: ptr::null_mut(),
                    strides: ptr::null_mut(),
                    byte_offset: byte_offset.get() as u64,
                },
                manager_ctx: ptr::dangling_mut(),
                deleter: None,
            }),
            shape,
            strides,
            place: Place::Refused,
            elements: 0,
            size,
            memory: Vec::new(),
            first: 0,
            flaw: *flaw,
        };
        let sensible = ndim >= 0 && known && on_host && tensor.shape.iter().all(|&size| size >= 0);
        let empty = tensor.shape.contains(&0);
        let elements = tensor.shape.iter().try_fold(1i64, |product, &size| product.checked_mul(size));
        let (mut low, mut high) = (0i128, size as i128);
        for (&count, &stride) in tensor.shape.iter().zip(&tensor.strides) {
            // At most 2^63 times 2^63 times 8, clamped so that the sums cannot overflow.
            let reach = ((i128::from(count) - 1) * i128::from(stride)).clamp(-(1 << 70), 1 << 70) * size as i128;
            if reach < 0 { low += reach } else { high += reach }
        }
        let dl = &mut tensor.managed.dl_tensor;
        dl.data = ptr::without_provenance_mut(1 << 40);
        tensor.place = if !sensible || (!empty && elements.is_none()) {
            Place::Refused
        } else if empty {
            Place::Here
        } else if high - low > i128::from(i64::MAX) || *flaw == Flaw::NullData {
            Place::Refused
        } else if high - low > MOST_BYTES {
            Place::Elsewhere
        } else {
            let pad = usize::from(pad % 8);
            let mut noise = u64::from(*fill);
            let block: [u8; 509] = std::array::from_fn(|_| {
                noise = noise.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                if noise >> 62 == 0 { 0 } else { (noise >> 40) as u8 }
            });
            // Exactly the bytes that the descriptor describes.
            tensor.memory = vec![0; pad + (high - low) as usize];
            tensor.memory.chunks_mut(block.len()).for_each(|part| part.copy_from_slice(&block[..part.len()]));
            tensor.first = pad + (-low) as usize;
            tensor.elements = elements.unwrap_or(0);
            let start = tensor.memory.as_mut_ptr().wrapping_add(tensor.first);
            // `data` is `byte_offset` bytes before the memory. An offset beyond all addresses must be refused.
            if u64::MAX - dl.byte_offset < start.addr() as u64 {
                dl.data = start.cast();
                Place::Refused
            } else {
                dl.byte_offset %= start.addr() as u64;
                dl.data = start.wrapping_sub(dl.byte_offset as usize).cast();
                Place::Here
            }
        };
        if *flaw == Flaw::NullData {
            dl.data = ptr::null_mut();
        }
        let odd = |pointer: *mut i64| pointer.cast::<u8>().wrapping_add(3).cast();
        let lengths = tensor.shape.len();
        dl.shape = match flaw {
            Flaw::NullShape => ptr::null_mut(),
            Flaw::OddShape => odd(tensor.shape.as_mut_ptr()),
            _ => tensor.shape.as_mut_ptr(),
        };
        dl.strides = match flaw {
            Flaw::OddStrides => odd(tensor.strides.as_mut_ptr()),
            _ if *compact => ptr::null_mut(),
            _ => tensor.strides.as_mut_ptr(),
        };
        if matches!(flaw, Flaw::NullTensor | Flaw::OddTensor)
            || (lengths > 0 && matches!(flaw, Flaw::NullShape | Flaw::OddShape | Flaw::OddStrides))
        {
            tensor.place = Place::Refused;
        }
        tensor
    }

    /// Returns the address to pass.
    pub fn pointer(&mut self) -> *mut DLManagedTensor {
        match self.flaw {
            Flaw::NullTensor => ptr::null_mut(),
            Flaw::OddTensor => (&raw mut *self.managed).cast::<u8>().wrapping_add(5).cast(),
            _ => &raw mut *self.managed,
        }
    }

    /// Returns the offset of each element in `memory`, in bytes, in C order.
    pub fn places(&self) -> Vec<usize> {
        let mut places = vec![self.first as i64];
        for (&count, &stride) in self.shape.iter().zip(&self.strides) {
            let step = stride.wrapping_mul(self.size as i64);
            places = places.iter().flat_map(|&at| (0..count).map(move |index| at + index * step)).collect();
        }
        places.into_iter().map(|at| at as usize).collect()
    }
}

/// Returns the product of sizes that are not negative, at most 2^63.
pub fn product(sizes: impl Iterator<Item = i64> + Clone) -> i128 {
    if sizes.clone().any(|size| size == 0) {
        return 0;
    }
    sizes.fold(1, |product, size| (product * i128::from(size)).min(1 << 63))
}
