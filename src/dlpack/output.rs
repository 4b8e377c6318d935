//! Output tensors: headers of this library over memory that they keep alive.
//!
//! A single allocation has the headers of all tensors that share memory, and the number of tensors not yet released.
//! The last release frees it. Everything that can fail happens in [`Headers::reserve`], before anything is taken over.

use std::{
    alloc::{self, Layout},
    ffi::c_void,
    mem::transmute,
    ptr::{self, NonNull},
    slice,
    sync::atomic::{AtomicUsize, Ordering, fence},
};

use dlpark::{
    ManagedTensorBase,
    ffi::{DLDataType, DLManagedTensor, DLManagedTensorVersioned, DLPACK_MAJOR_VERSION, DLPackVersion, DLTensor},
};

use crate::ffi::{
    environment,
    error::{Result, error},
    name::Name,
    panics::boundary,
};

use super::{
    described::Described,
    dtype::{Dtype, lowest_minor_version},
    elements::Elements,
    owner::Owner,
    shape::Shape,
    view::{Device, View},
};

/// Calls a deleter or a callback of another library, which must not throw. If it throws, the process ends, because the
/// call is one that may unwind. Otherwise an exception would be undefined behaviour.
///
/// # Safety
/// `function` may be called with `argument` now.
unsafe fn call<T>(function: unsafe extern "C" fn(*mut T), argument: *mut T) {
    type Unwinding<T> = unsafe extern "C-unwind" fn(*mut T);
    // SAFETY: the two types are called in the same way, and `function` may be called with `argument`.
    environment::callers(|| unsafe { transmute::<unsafe extern "C" fn(*mut T), Unwinding<T>>(function)(argument) });
}

/// Frees an owner's memory: [`call`]s the function in the first word with the second word.
///
/// # Safety
/// The first word is a `unsafe extern "C" fn(*mut T)`, which may be called with the second.
unsafe fn call_word<T>(_: *mut u8, [function, argument]: [*mut c_void; 2]) {
    // SAFETY: the caller promises that the first word is this function, which may be called with the second.
    unsafe { call(transmute::<*mut c_void, unsafe extern "C" fn(*mut T)>(function), argument.cast()) };
}

/// Callback of the caller, which runs once.
pub struct Release {
    pub function: Option<unsafe extern "C" fn(*mut c_void)>,
    pub context: *mut c_void,
}

impl From<Release> for Owner {
    fn from(Release { function, context }: Release) -> Self {
        let Some(function) = function else {
            return Self::of_nothing();
        };
        // SAFETY: the caller of gc_tensor_from_pointer passed this pair to be called once, when the last user of the
        // tensor is done, which is when its owner is dropped.
        unsafe { Self::new(ptr::null_mut(), [function as *mut c_void, context], call_word::<c_void>) }
    }
}

/// Takes a tensor over. Returns the owner that must live as long as the tensor's memory is used, if there is one.
///
/// The deleter is read here, because a tensor without one may be gone when the new tensor is released. A tensor of this
/// library that is the last one of its allocation gives up its owner, so repeated conversions do not nest releases.
///
/// # Safety
/// The caller owns `tensor`, and gives it away.
unsafe fn take<M: ManagedTensorBase>(tensor: *mut M) -> Option<Owner> {
    // SAFETY: the caller promises a tensor. If its deleter is ours, `finish` made it, and its allocation lives until it
    // is released. If it is the last one alive, nothing else reads or changes the allocation.
    unsafe {
        let its_deleter = (*tensor).deleter()?;
        if ptr::fn_addr_eq(its_deleter, deleter::<M> as unsafe extern "C" fn(*mut M)) {
            let shared = (*tensor).manager_ctx().cast::<Shared>();
            if (*shared).alive.load(Ordering::Acquire) == 1 {
                return Shared::free_headers(shared);
            }
        }
        Some(Owner::new(ptr::null_mut(), [its_deleter as *mut c_void, tensor.cast()], call_word::<M>))
    }
}

/// The start of an allocation of headers: `Shared`, then the headers, then one shape and strides for all of them.
struct Shared {
    /// Number of tensors that were handed out and not released.
    alive: AtomicUsize,
    layout: Layout,
    /// Owner of the memory. None: the tensor that was taken over had no deleter.
    owner: Option<Owner>,
}

impl Shared {
    /// Frees the headers and returns the owner that they kept alive.
    ///
    /// # Safety
    /// `shared` was written by [`Headers::finish`], and none of its tensors is in use any more.
    unsafe fn free_headers(shared: *mut Self) -> Option<Owner> {
        // SAFETY: `finish` wrote `shared`, no tensor of it is in use, and the allocation was made with this layout.
        unsafe {
            let Self { layout, owner, .. } = ptr::read(shared);
            alloc::dealloc(shared.cast(), layout);
            owner
        }
    }
}

/// The headers of `count` tensors of one shape, without memory yet. `M` is DLPack's legacy or versioned form.
struct Headers<M> {
    shared: NonNull<Shared>,
    first: NonNull<M>,
    lengths: NonNull<i64>,
    count: usize,
    ndim: usize,
    layout: Layout,
}

impl<M: ManagedTensorBase> Headers<M> {
    /// Allocates the headers: the last step of making a tensor that can fail.
    fn reserve(count: usize, ndim: usize, dims: impl Iterator<Item = (i64, i64)>) -> Result<Self> {
        let refusal = || error!(OutOfMemory, "cannot allocate headers of {count} tensors of {ndim} dimensions");
        let (layout, first, lengths) = layout_of::<M>(count, ndim).ok_or_else(refusal)?;
        // SAFETY: the layout begins with a Shared, so its size is not zero.
        let start = NonNull::new(unsafe { alloc::alloc(layout) }).ok_or_else(refusal)?;
        // SAFETY: `layout_of` put the parts at these offsets, aligned, within the allocation.
        let headers = unsafe {
            Self {
                shared: start.cast(),
                first: start.add(first).cast(),
                lengths: start.add(lengths).cast(),
                count,
                ndim,
                layout,
            }
        };
        for (axis, (size, stride)) in dims.take(ndim).enumerate() {
            // SAFETY: there is room for `ndim` sizes and as many strides behind them.
            unsafe {
                headers.lengths.add(axis).write(size);
                headers.lengths.add(ndim + axis).write(stride);
            }
        }
        Ok(headers)
    }

    /// Makes the tensors. Tensor k is `tensor` with these headers' shape and strides, and its data `step * k` bytes
    /// further on. All of them keep `owner` alive.
    fn finish(self, owner: Option<Owner>, tensor: DLTensor, step: usize) -> Outputs<M> {
        let shared = self.shared.as_ptr();
        // Without dimensions, shape and strides may be NULL, and JAX and others write NULL.
        let lengths = if self.ndim == 0 { ptr::null_mut() } else { self.lengths.as_ptr() };
        // SAFETY: `reserve` made room for a Shared, `count` headers and the lengths; nothing else refers to them yet.
        unsafe {
            shared.write(Shared { alive: AtomicUsize::new(self.count), layout: self.layout, owner });
            for index in 0..self.count {
                let tensor = DLTensor {
                    data: tensor.data.wrapping_byte_add(step * index),
                    ndim: self.ndim as i32,
                    shape: lengths,
                    strides: lengths.wrapping_add(self.ndim),
                    ..tensor
                };
                self.first.add(index).write(M::from_parts(tensor, shared.cast(), Some(deleter::<M>)));
            }
        }
        let outputs = Outputs { first: self.first, count: self.count };
        std::mem::forget(self);
        outputs
    }
}

impl<M> Drop for Headers<M> {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `reserve`; `finish` forgets the value, so no tensor refers to it, and
        // no owner was moved in.
        unsafe { alloc::dealloc(self.shared.as_ptr().cast(), self.layout) };
    }
}

/// Returns the layout of the allocation of headers, with the offsets of the first header and of the shape.
fn layout_of<M>(count: usize, ndim: usize) -> Option<(Layout, usize, usize)> {
    let (layout, first) = Layout::new::<Shared>().extend(Layout::array::<M>(count).ok()?).ok()?;
    let (layout, lengths) = layout.extend(Layout::array::<i64>(ndim.checked_mul(2)?).ok()?).ok()?;
    Some((layout.pad_to_align(), first, lengths))
}

/// Finished tensors that were not handed out yet. Dropping them releases them.
pub struct Outputs<M: ManagedTensorBase = DLManagedTensor> {
    first: NonNull<M>,
    count: usize,
}

impl Outputs {
    /// Makes `count` compact tensors over new memory, each `step` bytes after the one before.
    pub fn over(
        memory: Owner, device: Device, dtype: DLDataType, shape: Shape<'_>, count: usize, step: usize,
    ) -> Result<Self> {
        Self::over_lazy(|| memory, device, dtype, shape, count, step)
    }

    /// Like `over`, but calls `memory` only when nothing can fail any more.
    pub fn over_lazy(
        memory: impl FnOnce() -> Owner, device: Device, dtype: DLDataType, shape: Shape<'_>, count: usize, step: usize,
    ) -> Result<Self> {
        let headers = Headers::reserve(count, shape.ndim(), shape.compact())?;
        let memory = memory();
        let data: *mut c_void = memory.data().cast();
        let step = if data.is_null() { 0 } else { step };
        let tensor = DLTensor {
            data,
            device: device.to_dlpack(),
            ndim: 0,
            dtype,
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        Ok(headers.finish(Some(memory), tensor, step))
    }
}

/// Tensors in new memory, to be written before they are handed out.
pub struct NewTensors {
    outputs: Outputs,
    device: Device,
    dtype: Dtype,
    /// Bytes of all tensors together.
    bytes: i64,
}

impl NewTensors {
    /// Makes `count` tensors of this shape side by side in `memory`. `bytes`: bytes of all of them, which it holds.
    pub fn over(
        memory: Owner, device: Device, dtype: Dtype, shape: Shape<'_>, count: usize, bytes: i64,
    ) -> Result<Self> {
        let step = bytes as usize / count.max(1);
        Ok(Self {
            outputs: Outputs::over(memory, device, dtype.to_dlpack(), shape, count, step)?,
            device,
            dtype,
            bytes,
        })
    }

    /// Returns the first tensor, to be written.
    pub fn view(&self) -> View<'_> {
        let (shape, data) = self.outputs.first();
        View::compact(self.device, self.dtype, shape, data)
    }

    /// Returns the first tensor, as the target of a copy.
    pub fn elements(&self) -> Result<Elements<'_>> {
        let (shape, data) = self.outputs.first();
        // SAFETY: the memory is new, has these elements, and nothing else refers to it.
        unsafe { Elements::of_memory(&Name::new("out"), self.device, self.dtype.to_dlpack(), shape, data) }
    }

    /// Returns the bytes of all tensors as one tensor.
    pub fn joined(&self) -> View<'_> {
        View::compact(self.device, Dtype::U8, slice::from_ref(&self.bytes), self.view().data())
    }

    /// Returns the tensors, to be handed out.
    pub fn finished(self) -> Outputs {
        self.outputs
    }
}

/// Tensor of any dtype in new memory, to be written before it is handed out.
pub struct NewTensor {
    outputs: Outputs,
    device: Device,
}

impl NewTensor {
    /// Makes a tensor of this shape in `memory`, which holds its elements.
    pub fn over(memory: Owner, device: Device, dtype: DLDataType, shape: Shape<'_>) -> Result<Self> {
        Ok(Self { outputs: Outputs::over(memory, device, dtype, shape, 1, 0)?, device })
    }

    /// Returns the tensor, to be written.
    pub fn elements(&self) -> Result<Elements<'_>> {
        let (shape, data) = self.outputs.first();
        // SAFETY: `finish` made the header, whose dtype has not changed; nothing else refers to the new memory.
        unsafe {
            let dtype = self.outputs.first.as_ref().tensor().dtype;
            Elements::of_memory(&Name::new("out"), self.device, dtype, shape, data)
        }
    }

    /// Returns the tensor, to be handed out.
    pub fn finished(self) -> Outputs {
        self.outputs
    }
}

impl<M: ManagedTensorBase> Outputs<M> {
    /// Returns shape and data of the first tensor, which must exist.
    fn first(&self) -> (&[i64], *mut u8) {
        // SAFETY: `finish` made the header, with `ndim` sizes behind it, and it was not handed out yet.
        unsafe {
            let tensor = self.first.as_ref().tensor();
            let ndim = tensor.ndim as usize;
            (if ndim == 0 { &[] } else { slice::from_raw_parts(tensor.shape, ndim) }, tensor.data.cast())
        }
    }

    /// Gives the tensors away, in order.
    pub fn into_raw(self) -> impl ExactSizeIterator<Item = *mut M> {
        let (first, count) = (self.first, self.count);
        std::mem::forget(self);
        // SAFETY: `finish` made `count` headers behind `first`.
        (0..count).map(move |index| unsafe { first.add(index) }.as_ptr())
    }
}

impl<M: ManagedTensorBase> Drop for Outputs<M> {
    fn drop(&mut self) {
        for index in 0..self.count {
            // SAFETY: `finish` made `count` headers behind `first`, none of which was given away.
            unsafe { deleter(self.first.add(index).as_ptr()) };
        }
    }
}

/// Makes a tensor over the caller's memory, as described. `release` runs when its last user has released it.
pub fn from_pointer(described: &Described<'_>, release: Release) -> Result<Outputs> {
    over_described(described, || release.into())
}

/// Makes a tensor as described, over memory that is taken only when nothing can fail any more.
pub fn over_described(described: &Described<'_>, memory: impl FnOnce() -> Owner) -> Result<Outputs> {
    let headers = Headers::reserve(1, described.ndim(), described.dims())?;
    Ok(headers.finish(Some(memory()), described.tensor, 0))
}

/// Converts a tensor to DLPack's versioned form, with the lowest version that has its dtype and without flags. Every
/// importer that can use the tensor accepts this.
///
/// # Safety
/// `described` describes `tensor`, which the caller owns. It is taken on success only.
pub unsafe fn to_versioned(
    described: &Described<'_>, tensor: *mut DLManagedTensor,
) -> Result<Outputs<DLManagedTensorVersioned>> {
    let version = DLPackVersion { major: DLPACK_MAJOR_VERSION, minor: lowest_minor_version(described.tensor.dtype) };
    // SAFETY: `described` describes `tensor`, and the caller gives it away.
    let outputs: Outputs<DLManagedTensorVersioned> = unsafe { convert(described, tensor)? };
    // SAFETY: the header was just made, and nothing else refers to it.
    unsafe { (*outputs.first.as_ptr()).version = version };
    Ok(outputs)
}

/// Converts a tensor to DLPack's legacy form.
///
/// # Safety
/// `described` describes `tensor`, of major version 1, which the caller owns. It is taken on success only.
pub unsafe fn from_versioned(described: &Described<'_>, tensor: *mut DLManagedTensorVersioned) -> Result<Outputs> {
    // SAFETY: `described` describes `tensor`, and the caller gives it away.
    unsafe { convert(described, tensor) }
}

/// # Safety
/// `described` describes `tensor`, which the caller owns. It is taken on success only.
unsafe fn convert<From: ManagedTensorBase, To: ManagedTensorBase>(
    described: &Described<'_>, tensor: *mut From,
) -> Result<Outputs<To>> {
    let headers = Headers::reserve(1, described.ndim(), described.dims())?;
    // Once the tensor is taken, the described shape and strides may be gone, so they are not read from here on.
    let description = described.tensor;
    // SAFETY: `described` describes `tensor`, and the caller gives it away.
    let owner = unsafe { take(tensor) };
    Ok(headers.finish(owner, description, 0))
}

/// Releases a tensor of either form through its deleter. A NULL tensor or a NULL deleter is ignored.
///
/// # Safety
/// `tensor` is NULL, or the caller owns it and gives it away.
pub unsafe fn release<M: ManagedTensorBase>(tensor: *mut M) {
    // SAFETY: not NULL where it is read, and the caller gives it away.
    unsafe {
        if !tensor.is_null()
            && let Some(deleter) = (*tensor).deleter()
        {
            call(deleter, tensor);
        }
    }
}

/// Releases a tensor that was handed out. It is the deleter of all of them.
///
/// # Safety
/// `tensor` is NULL, or a tensor of this library that was not released before.
unsafe extern "C" fn deleter<M: ManagedTensorBase>(tensor: *mut M) {
    boundary(|| {
        if tensor.is_null() {
            return Ok(());
        }
        // SAFETY: `finish` put the allocation's start into manager_ctx. The allocation lives as long as one of its
        // tensors. The count changes atomically, so exactly one release, the last, frees the allocation.
        unsafe {
            let shared = (*tensor).manager_ctx().cast::<Shared>();
            if (*shared).alive.fetch_sub(1, Ordering::Release) == 1 {
                fence(Ordering::Acquire);
                drop(Shared::free_headers(shared));
            }
        }
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::name::Name;

    fn described<M: ManagedTensorBase>(tensor: *mut M) -> Described<'static> {
        // SAFETY: a tensor of ours, whose lengths live until it is released or taken.
        unsafe { Described::from_dlpack(&Name::new("test"), (*tensor).tensor()).unwrap() }
    }

    fn data<M: ManagedTensorBase>(tensor: *mut M) -> *mut u8 {
        described(tensor).tensor.data.cast()
    }

    fn there_and_back(tensor: *mut DLManagedTensor) -> *mut DLManagedTensor {
        // SAFETY: each tensor is owned here and given away once.
        unsafe {
            let versioned = to_versioned(&described(tensor), tensor).unwrap().into_raw().next().unwrap();
            from_versioned(&described(versioned), versioned).unwrap().into_raw().next().unwrap()
        }
    }

    #[test]
    fn chunks_that_change_their_form_keep_the_memory_of_the_others() {
        unsafe fn free(_: *mut u8, [memory, _]: [*mut c_void; 2]) {
            // SAFETY: the box that was leaked below.
            drop(unsafe { Box::from_raw(memory.cast::<[u8; 3 * 64]>()) });
        }
        let memory = Box::into_raw(Box::new([0u8; 3 * 64]));
        // SAFETY: a leaked box, and the function that frees it.
        let owner = unsafe { Owner::new(memory.cast(), [memory.cast(), ptr::null_mut()], free) };
        let outputs = NewTensors::over(owner, Device::Cpu, Dtype::U8, Shape::of(&[64]), 3, 3 * 64).unwrap();
        let mut chunks: Vec<_> = outputs.finished().into_raw().collect();
        for (index, chunk) in chunks.iter_mut().enumerate() {
            // SAFETY: 64 bytes of ours.
            unsafe { data(*chunk).write_bytes(index as u8, 64) };
            for _ in 0..3 {
                *chunk = there_and_back(*chunk);
            }
        }
        for (index, chunk) in chunks.into_iter().enumerate() {
            // SAFETY: 64 bytes of a tensor of ours, which is released once.
            unsafe {
                assert_eq!(slice::from_raw_parts(data(chunk), 64), [index as u8; 64]);
                release(chunk);
            }
        }
    }
}
