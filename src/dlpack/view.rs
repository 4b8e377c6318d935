//! Input tensors: borrowed, validated once, and read from then on without further checks.

use std::{fmt, ops::Range, slice};

use dlpark::ffi::{DLDevice, DLDeviceType, DLTensor};

use crate::ffi::{
    error::{Result, error},
    name::Name,
};

use super::{dtype::Dtype, shape::Shape};

/// Device that work runs on. Several device types of DLPack map to one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// CPU and CUDAHost memory.
    Cpu,
    /// CUDA and CUDAManaged memory of the device with this number.
    Cuda(i32),
}

impl Device {
    pub fn from_dlpack(name: &Name, device: DLDevice) -> Result<Self> {
        match device.device_type {
            DLDeviceType::CPU | DLDeviceType::CUDAHOST => Ok(Device::Cpu),
            DLDeviceType::CUDA | DLDeviceType::CUDAMANAGED => Ok(Device::Cuda(device.device_id)),
            other => Err(error!(
                UnsupportedDevice,
                "{name}: device type {} is not one of CPU 1, CUDA 2, CUDAHost 3, CUDAManaged 13", other.0
            )),
        }
    }

    pub fn to_dlpack(self) -> DLDevice {
        match self {
            Device::Cpu => DLDevice { device_type: DLDeviceType::CPU, device_id: 0 },
            Device::Cuda(device_id) => DLDevice { device_type: DLDeviceType::CUDA, device_id },
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => out.write_str("cpu"),
            Device::Cuda(id) => write!(out, "cuda:{id}"),
        }
    }
}

/// Borrowed tensor with a valid descriptor: no dimension is negative, the element count fits 63 bits, the dtype and the
/// device are supported, and every element lies within the address space.
///
/// The caller of the constructor promised that the memory exists and that nothing else writes it.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    name: Name,
    device: Device,
    pinned: bool,
    dtype: Dtype,
    shape: &'a [i64],
    /// Strides in elements. None: compact, in C order.
    strides: Option<&'a [i64]>,
    elements: i64,
    contiguous: bool,
    /// Address of element 0, `byte_offset` applied; NULL when empty.
    data: *mut u8,
    /// Addresses from the lowest to past the highest byte; empty when there is no element.
    extent: (usize, usize),
}

impl<'a> View<'a> {
    /// Validates a descriptor.
    ///
    /// # Safety
    /// For `'a`: `shape`, and `strides` unless NULL, point at `ndim` integers that do not change. The elements are
    /// memory of that device, which nothing else writes (nor reads, if the tensor is an output).
    #[inline(always)]
    pub unsafe fn from_dlpack(name: &Name, tensor: &DLTensor) -> Result<Self> {
        let device = Device::from_dlpack(name, tensor.device)?;
        let dtype = Dtype::from_dlpack(name, tensor.dtype)?;
        // SAFETY: `shape`, and `strides` unless NULL, have `ndim` integers for `'a`.
        let (shape, strides) = unsafe { integers(name, tensor)? };
        let elements = Shape::of(shape).elements(name)?;

        let contiguous = elements == 0 || is_compact(shape, strides);
        let (data, extent) = match elements {
            0 => (std::ptr::null_mut(), (0, 0)),
            _ if tensor.data.is_null() => {
                return Err(error!(InvalidArgument, "{name}: data is NULL, with {elements} elements"));
            }
            _ => {
                let reach =
                    if contiguous { reach_of(dtype, [(elements, 1)]) } else { reach_of(dtype, dims(shape, strides)) };
                let extent = reach.and_then(|reach| addresses(tensor, reach)).ok_or_else(|| {
                    error!(
                        SizeOverflow,
                        "{name}: shape {} of {dtype} with strides {} and byte_offset {} reaches past the address space",
                        Shape::of(shape),
                        Strides(strides),
                        tensor.byte_offset
                    )
                })?;
                (tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize), extent)
            }
        };
        let pinned = tensor.device.device_type == DLDeviceType::CUDAHOST;
        Ok(Self { name: *name, device, pinned, dtype, shape, strides, elements, contiguous, data, extent })
    }

    /// Makes a view of a compact tensor in new memory. The caller has checked that its size in bytes fits.
    pub(super) fn compact(device: Device, dtype: Dtype, shape: &'a [i64], data: *mut u8) -> Self {
        // If one size is 0, the product of the others may overflow.
        let elements = if shape.contains(&0) { 0 } else { shape.iter().product() };
        let start = data.addr();
        let extent = (start, start + elements as usize * dtype.size);
        Self {
            name: Name::new("out"),
            device,
            pinned: false,
            dtype,
            shape,
            strides: None,
            elements,
            contiguous: true,
            data,
            extent,
        }
    }

    /// Makes a view of a compact tensor in memory that is not a caller's tensor. Its size in bytes fits.
    ///
    /// # Safety
    /// For `'a`: the elements are memory of that device, which nothing else writes (nor reads, if it is an output).
    pub unsafe fn of_memory(name: &Name, device: Device, dtype: Dtype, shape: &'a [i64], data: *mut u8) -> Self {
        Self { name: *name, ..Self::compact(device, dtype, shape, data) }
    }

    /// Returns a compact tensor of this shape: the elements from number `first` on. `self` is C-contiguous.
    pub fn part<'b>(&self, first: i64, shape: &'b [i64]) -> View<'b>
    where
        'a: 'b,
    {
        let count: i64 = shape.iter().product();
        assert!(self.contiguous && first >= 0 && first + count <= self.elements);
        let data = self.data.wrapping_add(first as usize * self.dtype.size);
        View { name: self.name, ..View::compact(self.device, self.dtype, shape, data) }
    }

    pub fn name(&self) -> Name {
        self.name
    }

    /// Returns the same tensor with another name for error messages.
    pub fn named(self, name: Name) -> Self {
        Self { name, ..self }
    }

    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns true for CUDAHost memory, which the CPU works on and CUDA can write too.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn shape(&self) -> &'a [i64] {
        self.shape
    }

    pub fn elements(&self) -> i64 {
        self.elements
    }

    pub fn data(&self) -> *mut u8 {
        self.data
    }

    /// Returns size and stride (in elements) of each dimension, outermost first.
    pub fn dims(&self) -> impl Iterator<Item = (i64, i64)> + 'a {
        dims(self.shape, self.strides)
    }

    /// Returns true if C-contiguous: sizes of 1 may have any stride, and a tensor without elements always is.
    pub fn is_contiguous(&self) -> bool {
        self.contiguous
    }

    /// Returns the strides as text: as given, or "NULL".
    pub fn strides(&self) -> impl fmt::Display + 'a {
        Strides(self.strides)
    }

    /// Returns the addresses from the lowest to past the highest byte of any element.
    pub fn extent(&self) -> Range<usize> {
        self.extent.0..self.extent.1
    }

    /// Refuses an output if its bytes intersect the bytes of `inputs`, or if two of its elements share a byte.
    pub fn check_output(&self, inputs: &[&View<'_>]) -> Result<()> {
        for input in inputs {
            check_apart(&self.name, &self.extent(), &input.name, &input.extent())?;
        }
        check_no_self_overlap(&self.name, self.shape, self.strides, self.elements, self.contiguous)
    }
}

/// Refuses an output in which two elements share an address.
pub(super) fn check_no_self_overlap(
    name: &Name, shape: &[i64], strides: Option<&[i64]>, elements: i64, contiguous: bool,
) -> Result<()> {
    let overlaps = if contiguous { Some(false) } else { some_share_a_place(dims(shape, strides), elements) };
    let (strides, shape) = (Strides(strides), Shape::of(shape));
    match overlaps {
        Some(false) => Ok(()),
        Some(true) => {
            Err(error!(InvalidArgument, "{name}: strides {strides} put several elements of shape {shape} in one place"))
        }
        None => Err(error!(
            InvalidArgument,
            "{name}: strides {strides} with shape {shape} are too interleaved to tell whether elements overlap"
        )),
    }
}

/// Returns true if two elements share an address. None: the answer would take over [`OVERLAP_BUDGET`] steps.
fn some_share_a_place(dims: impl Iterator<Item = (i64, i64)>, elements: i64) -> Option<bool> {
    // Dimensions of more than one element, narrowest stride first: at most 62, as there are fewer than 2^63 elements.
    let mut steps = [Step::default(); 62];
    let mut used = 0;
    for (size, stride) in dims.filter(|&(size, _)| size > 1) {
        steps[used] = Step { stride: i128::from(stride.unsigned_abs()), most: i128::from(size - 1), narrower: 0 };
        used += 1;
    }
    let steps = &mut steps[..used];
    steps.sort_unstable_by_key(|step| (step.stride, step.most));
    let (mut reach, mut nested) = (0, true);
    for step in &mut *steps {
        step.narrower = reach;
        nested &= step.stride > reach;
        reach += step.stride * step.most;
    }
    if nested {
        return Some(false); // the usual case: each stride is wider than all that the narrower ones reach together
    }
    if i128::from(elements) > reach + 1 {
        return Some(true); // more elements than places
    }
    has_other_zero(steps, 0, false, &mut OVERLAP_BUDGET.clone())
}

/// Refuses an output if its bytes, from the lowest address to past the highest, intersect another tensor's bytes.
pub fn check_apart(name: &Name, own: &Range<usize>, other_name: &Name, other: &Range<usize>) -> Result<()> {
    if own.start < other.end && other.start < own.end {
        return Err(error!(
            InvalidArgument,
            "{name}: its bytes {:#x} to {:#x} intersect those of {other_name}, {:#x} to {:#x}",
            own.start,
            own.end,
            other.start,
            other.end
        ));
    }
    Ok(())
}

/// Steps after which [`some_share_a_place`] gives up: less than a millisecond, at 13 ns each on a current processor.
const OVERLAP_BUDGET: u32 = 50_000;

/// Dimension of the overlap search.
#[derive(Clone, Copy, Default)]
struct Step {
    stride: i128,
    /// Largest number of times that the stride can be taken: the size minus 1.
    most: i128,
    /// Reach of all dimensions with narrower strides together.
    narrower: i128,
}

/// Returns true if `sum` plus a combination of strides is 0: each taken -most to most times, and not all 0 times. It is
/// then the difference of two indices that share an address. The widest stride is last in `steps`. None: the budget is
/// spent.
fn has_other_zero(steps: &[Step], sum: i128, moved: bool, budget: &mut u32) -> Option<bool> {
    let Some((&Step { stride, most, narrower }, rest)) = steps.split_last() else {
        return Some(moved && sum == 0);
    };
    if stride == 0 {
        return Some(true); // taking it once changes nothing, and `most` is at least 1
    }
    // The reach of the narrower strides bounds how often this one can be taken. Until a stride is taken, positive
    // counts are enough: negative ones exchange the two indices.
    let first = if moved { -(narrower + sum).div_euclid(stride) } else { 0 };
    let last = (narrower - sum).div_euclid(stride);
    for times in first.max(-most)..=last.min(most) {
        *budget = budget.checked_sub(1)?;
        if has_other_zero(rest, sum + times * stride, moved || times != 0, budget)? {
            return Some(true);
        }
    }
    Some(false)
}

/// Strides as error messages show them.
pub struct Strides<'a>(pub Option<&'a [i64]>);

impl fmt::Display for Strides<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(strides) => Shape::of(strides).fmt(out),
            None => out.write_str("NULL"),
        }
    }
}

/// Returns size and stride (in elements) of each dimension, outermost first.
pub fn dims<'a>(
    shape: &'a [i64], strides: Option<&'a [i64]>,
) -> impl ExactSizeIterator<Item = (i64, i64)> + Clone + 'a {
    // Like Shape::compact, but without its divisions if strides are given, because every call runs this.
    let mut compact = if strides.is_some() { 0 } else { Shape::of(shape).span() };
    shape.iter().enumerate().map(move |(axis, &size)| match strides {
        Some(strides) => (size, strides[axis]),
        None => {
            compact /= size.max(1);
            (size, compact)
        }
    })
}

/// Returns true if the elements, at least one, lie in C order without gaps. It starts at the innermost dimension, which
/// needs no division.
pub(super) fn is_compact(shape: &[i64], strides: Option<&[i64]>) -> bool {
    let Some(strides) = strides else {
        return true;
    };
    let mut compact = 1;
    for (&size, &stride) in shape.iter().zip(strides).rev() {
        if size != 1 && stride != compact {
            return false;
        }
        compact *= size;
    }
    true
}

/// Returns the range of bytes that elements, at least one, cover: from the lowest, relative to element 0, to past the
/// highest. None: the range has more than 2^63 - 1 bytes.
fn reach_of(dtype: Dtype, dims: impl IntoIterator<Item = (i64, i64)>) -> Option<(i64, i64)> {
    let size = dtype.size as i64;
    let (mut low, mut high) = (0i64, size);
    for (count, stride) in dims {
        let reach = (count - 1).checked_mul(stride)?.checked_mul(size)?;
        let end = if reach < 0 { &mut low } else { &mut high };
        *end = end.checked_add(reach)?;
    }
    // No allocator returns an object of more than isize::MAX bytes.
    high.checked_sub(low)?;
    Some((low, high))
}

/// Returns the addresses that the elements of `tensor` cover, from their range; None if they do not fit in memory.
fn addresses(tensor: &DLTensor, (low, high): (i64, i64)) -> Option<(usize, usize)> {
    let start = tensor.data.addr().checked_add(usize::try_from(tensor.byte_offset).ok()?)?;
    Some((start.checked_add_signed(low as isize)?, start.checked_add_signed(high as isize)?))
}

/// Returns the shape of a tensor, and its strides unless they are NULL.
///
/// # Safety
/// For `'a`: `shape`, and `strides` unless NULL, point at `ndim` integers that do not change.
#[inline(always)]
pub unsafe fn integers<'a>(name: &Name, tensor: &DLTensor) -> Result<(&'a [i64], Option<&'a [i64]>)> {
    let ndim = usize::try_from(tensor.ndim)
        .map_err(|_| error!(InvalidArgument, "{name}: ndim {} is negative", tensor.ndim))?;
    // SAFETY: the caller promises `ndim` readable integers behind both.
    let (shape, strides) = unsafe { (some_integers(tensor.shape, ndim), some_integers(tensor.strides, ndim)) };
    let shape = shape.ok_or_else(|| error!(InvalidArgument, "{name}: shape is NULL or unaligned, with ndim {ndim}"))?;
    if strides.is_none() && !tensor.strides.is_null() {
        return Err(error!(InvalidArgument, "{name}: strides at {:p} are not aligned to 8", tensor.strides));
    }
    Ok((shape, strides))
}

/// Returns the `count` integers at `pointer`. None: `pointer` is NULL (and `count` not 0) or not aligned.
///
/// # Safety
/// Unless NULL, `pointer` is the address of `count` integers that stay readable and unchanged for `'a`.
unsafe fn some_integers<'a>(pointer: *const i64, count: usize) -> Option<&'a [i64]> {
    if count == 0 {
        return Some(&[]);
    }
    if pointer.is_null() || !pointer.is_aligned() {
        return None;
    }
    // SAFETY: not NULL, aligned, and readable by the caller's promise; an ndim of 31 bits cannot overflow the size.
    Some(unsafe { slice::from_raw_parts(pointer, count) })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn overlaps(view: &View<'_>) -> Option<bool> {
        some_share_a_place(view.dims(), view.elements())
    }

    /// Makes a view over `memory`, with element 0 in its middle.
    fn view<'a>(memory: &[u8], shape: &'a mut [i64], strides: &'a mut [i64]) -> View<'a> {
        let tensor = DLTensor {
            data: memory[memory.len() / 2..].as_ptr().cast_mut().cast(),
            device: Device::Cpu.to_dlpack(),
            ndim: shape.len() as i32,
            dtype: Dtype::U8.to_dlpack(),
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        // SAFETY: shape and strides live for `'a`; the elements are never touched.
        unsafe { View::from_dlpack(&Name::new("test"), &tensor).unwrap() }
    }

    #[test]
    fn overlap_within_is_found_exactly() {
        let memory = [0; 64];
        let mut overlapping = 0;
        for sizes in [[2, 2, 2], [2, 3, 1], [3, 2, 2], [4, 1, 3]] {
            for code in 0..(13i64).pow(3) {
                let (mut shape, mut strides) = (sizes, [code % 13 - 6, code / 13 % 13 - 6, code / 169 - 6]);
                // The model compares the places of all elements.
                let mut places = HashSet::new();
                let mut model = false;
                for index in 0..sizes.iter().product::<i64>() {
                    let at = [index / (sizes[1] * sizes[2]), index / sizes[2] % sizes[1], index % sizes[2]];
                    model |= !places.insert((0..3).map(|axis| at[axis] * strides[axis]).sum::<i64>());
                }
                overlapping += i32::from(model);
                let found = overlaps(&view(&memory, &mut shape, &mut strides));
                assert_eq!(found, Some(model), "shape {sizes:?}, strides {strides:?}");
            }
        }
        assert!(overlapping > 1000);
    }

    /// Returns Conway and Guy's 17 strides: their 2^17 sums differ, though none exceeds all narrower ones together.
    fn conway_guy() -> [i64; 17] {
        let mut bounds = vec![0, 1];
        for n in 1..17 {
            let back = (0.5 + (2.0 * n as f64).sqrt()).floor() as usize;
            bounds.push(2 * bounds[n] - bounds[n - back]);
        }
        std::array::from_fn(|k| bounds[17] - bounds[16 - k])
    }

    #[test]
    fn overlap_in_complex_layouts_is_undecided_unless_elements_outnumber_places() {
        let strides = conway_guy();
        let sums: HashSet<i64> =
            (0..1 << 17).map(|taken| (0..17).filter(|k| taken >> k & 1 == 1).map(|k| strides[k]).sum()).collect();
        assert_eq!(sums.len(), 1 << 17, "no two elements in one place");
        let memory = [0; 64];
        assert_eq!(overlaps(&view(&memory, &mut [2; 17], &mut strides.clone())), None);
        // There are fewer places than elements, so no search is needed.
        let mut narrow = strides.map(|stride| stride / 5 + 1);
        assert!(narrow.iter().sum::<i64>() < 1 << 17);
        assert_eq!(overlaps(&view(&memory, &mut [2; 17], &mut narrow)), Some(true));
    }

    #[test]
    fn an_extent_goes_from_the_lowest_to_past_the_highest_byte() {
        let memory = [0; 64];
        let middle = memory[32..].as_ptr().addr();
        let (mut shape, mut strides) = ([3, 4], [-5, 2]);
        assert_eq!(view(&memory, &mut shape, &mut strides).extent(), middle - 10..middle + 7);
    }

    #[test]
    fn contiguity_ignores_unused_strides() {
        let memory = [0; 64];
        for (mut shape, mut strides, expected) in [
            ([2, 3, 4], [12, 4, 1], true),
            ([2, 1, 4], [4, -77, 1], true),
            ([1, 1, 1], [9, 9, 9], true),
            ([2, 0, 4], [5, 5, 5], true),
            ([2, 3, 4], [12, 4, 2], false),
            ([2, 3, 4], [1, 2, 6], false),
        ] {
            assert_eq!(view(&memory, &mut shape, &mut strides).is_contiguous(), expected, "{shape:?} {strides:?}");
        }
    }
}
