//! A tensor that goes out: headers of ours over memory that they keep alive.
//!
//! One allocation holds the headers of all tensors that share a memory, with a count of those not yet released; the
//! last release frees it. Everything that can fail happens in [`Headers::reserve`], before anything is taken over.

use std::{
    alloc::{self, Layout},
    ffi::c_void,
    mem::ManuallyDrop,
    ptr::{self, NonNull},
    sync::atomic::{AtomicUsize, Ordering, fence},
};

use dlpark::{
    ManagedTensorBase,
    ffi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor},
    legacy, versioned,
};

use crate::{
    backend,
    capi::boundary,
    error::{Result, error},
};

use super::{Device, Dtype, Name, Shape, View};

/// Alignment of every allocation handed out: DLPack's, and CUDA's.
pub const ALIGNMENT: usize = 256;

/// Host memory of ours.
pub struct Memory {
    data: NonNull<u8>,
    layout: Layout,
}

impl Memory {
    /// `bytes` bytes aligned to [`ALIGNMENT`], not initialized. None of them: no allocation, `data` is NULL.
    pub fn allocate(bytes: i64) -> Result<Self> {
        let refusal = || error!(OutOfMemory, "{bytes} bytes of host memory could not be had");
        let size = usize::try_from(bytes).map_err(|_| refusal())?;
        let layout = Layout::from_size_align(size, ALIGNMENT).map_err(|_| refusal())?;
        let data = if size == 0 {
            NonNull::dangling()
        } else {
            // SAFETY: the size is not zero.
            NonNull::new(unsafe { alloc::alloc(layout) }).ok_or_else(refusal)?
        };
        Ok(Self { data, layout })
    }

    pub fn data(&self) -> *mut u8 {
        if self.layout.size() == 0 { ptr::null_mut() } else { self.data.as_ptr() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: allocated with this layout in `allocate`, freed only here.
            unsafe { alloc::dealloc(self.data.as_ptr(), self.layout) };
        }
    }
}

/// What a tensor keeps alive, given back when its last user has released it.
enum Storage {
    /// Memory of ours.
    Ours { _memory: Memory },
    /// The caller's memory, with what to call when it is no longer needed.
    Borrowed { _release: Release },
    /// A tensor that was taken over whole.
    Legacy { _tensor: legacy::Dlpack },
    /// The same, in DLPack's versioned form.
    Versioned { _tensor: versioned::Dlpack },
}

/// A callback of the caller, to run once.
pub struct Release {
    pub function: Option<unsafe extern "C" fn(*mut c_void)>,
    pub context: *mut c_void,
}

impl Drop for Release {
    fn drop(&mut self) {
        if let Some(function) = self.function {
            // SAFETY: the caller of gc_tensor_from_pointer passed this pair to be called once, when the last user of
            // the tensor is done, which is when its storage is dropped.
            unsafe { function(self.context) };
        }
    }
}

/// The start of an allocation of headers: `Shared`, then the headers, then one shape and strides for all of them.
struct Shared {
    /// Tensors that were handed out and not released.
    alive: AtomicUsize,
    layout: Layout,
    storage: Option<Storage>,
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
        let refusal = || error!(OutOfMemory, "headers of {count} tensors of {ndim} dimensions could not be had");
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

    /// Headers for one more tensor of what `view` shows.
    fn like(view: &View<'_>) -> Result<Self> {
        backend::of(view.device())?;
        Self::reserve(1, view.shape().len(), view.dims())
    }

    /// Makes the tensors: number k begins `step * k` bytes after `data`, and all keep `storage` alive.
    fn finish(self, storage: Storage, data: *mut u8, step: usize, device: DLDevice, dtype: DLDataType) -> Outputs<M> {
        let shared = self.shared.as_ptr();
        // SAFETY: `reserve` made room for a Shared, `count` headers and the lengths; nobody else knows of them yet.
        unsafe {
            shared.write(Shared { alive: AtomicUsize::new(self.count), layout: self.layout, storage: Some(storage) });
            for index in 0..self.count {
                // Without dimensions both may be NULL, and JAX and others write it so.
                let lengths = if self.ndim == 0 { ptr::null_mut() } else { self.lengths.as_ptr() };
                let tensor = DLTensor {
                    data: data.wrapping_add(step * index).cast(),
                    device,
                    ndim: self.ndim as i32,
                    dtype,
                    shape: lengths,
                    strides: lengths.wrapping_add(self.ndim),
                    byte_offset: 0,
                };
                self.first.add(index).write(M::from_parts(tensor, shared.cast(), Some(deleter::<M>)));
            }
        }
        let outputs = Outputs { first: self.first, count: self.count, bytes: (step * self.count) as i64 };
        std::mem::forget(self);
        outputs
    }
}

impl<M> Drop for Headers<M> {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `reserve`; `finish` forgets the value, so no tensor refers to it, and
        // no storage was moved in.
        unsafe { alloc::dealloc(self.shared.as_ptr().cast(), self.layout) };
    }
}

/// Layout of the allocation of headers, with the offsets of the first header and of the shape.
fn layout_of<M>(count: usize, ndim: usize) -> Option<(Layout, usize, usize)> {
    let (layout, first) = Layout::new::<Shared>().extend(Layout::array::<M>(count).ok()?).ok()?;
    let (layout, lengths) = layout.extend(Layout::array::<i64>(ndim.checked_mul(2)?).ok()?).ok()?;
    Some((layout.pad_to_align(), first, lengths))
}

/// Finished tensors that nobody has taken yet; dropping them releases them.
pub struct Outputs<M: ManagedTensorBase = DLManagedTensor> {
    first: NonNull<M>,
    count: usize,
    /// Bytes of all of them together.
    bytes: i64,
}

impl Outputs {
    /// `count` tensors of this shape, side by side in one new allocation, not initialized. Refusals are about `name`.
    pub fn allocate(name: Name, device: Device, dtype: Dtype, shape: Shape<'_>, count: usize) -> Result<Self> {
        let elements = shape.elements(name)?;
        let bytes = i64::try_from(dtype.size).ok().and_then(|size| size.checked_mul(elements));
        let total = bytes.zip(i64::try_from(count).ok()).and_then(|(bytes, count)| bytes.checked_mul(count));
        let (Some(bytes), Some(total)) = (bytes, total) else {
            return Err(error!(
                SizeOverflow,
                "{name}: {count} tensors of shape {shape} of {dtype} exceed 2^63 - 1 bytes"
            ));
        };
        let memory = backend::of(device)?.allocate(total)?;
        let headers = Headers::reserve(count, shape.ndim(), shape.compact())?;
        let data = memory.data();
        let step = if data.is_null() { 0 } else { bytes as usize };
        Ok(headers.finish(Storage::Ours { _memory: memory }, data, step, device.to_dlpack(), dtype.to_dlpack()))
    }

    /// The first tensor, to be written.
    pub fn view(&self) -> Result<View<'_>> {
        // SAFETY: `finish` made the header and its lengths, over memory that lives as long as `self`, which nobody else
        // has seen yet.
        unsafe { View::from_dlpack(Name::new("out"), self.first.as_ref().tensor()) }
    }

    /// All tensors as one, one-dimensional and of uint8.
    pub fn joined(&self) -> Result<View<'_>> {
        // SAFETY: as in `view`; `allocate` put the tensors side by side, `bytes` in all.
        unsafe {
            let joined = DLTensor {
                ndim: 1,
                dtype: Dtype::U8.to_dlpack(),
                shape: ptr::from_ref(&self.bytes).cast_mut(),
                strides: ptr::null_mut(),
                ..*self.first.as_ref().tensor()
            };
            View::from_dlpack(Name::new("out"), &joined)
        }
    }
}

impl<M: ManagedTensorBase> Outputs<M> {
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

/// A tensor over the caller's memory, as `view` describes it; `release` runs when its last user has released it.
pub fn from_pointer(view: &View<'_>, release: Release) -> Result<Outputs> {
    // A failure must not run it: the caller keeps what it has not given.
    let release = ManuallyDrop::new(release);
    let headers = Headers::like(view)?;
    let storage = Storage::Borrowed { _release: ManuallyDrop::into_inner(release) };
    Ok(headers.finish(storage, view.data(), 0, view.dl_device(), view.dtype().to_dlpack()))
}

/// The same tensor in DLPack's versioned form, 1.0 and without flags: every importer of versioned tensors takes that.
///
/// # Safety
/// `tensor` is what `view` was made of, and the caller's to give away. It is taken on success only.
pub unsafe fn to_versioned(view: &View<'_>, tensor: *mut DLManagedTensor) -> Result<Outputs<DLManagedTensorVersioned>> {
    let headers = Headers::<DLManagedTensorVersioned>::like(view)?;
    // SAFETY: the caller's promise.
    let taken = unsafe { legacy::Dlpack::from_raw(tensor) };
    let storage = Storage::Legacy { _tensor: taken.map_err(|why| error!(InvalidArgument, "{}: {why}", view.name()))? };
    let outputs = headers.finish(storage, view.data(), 0, view.dl_device(), view.dtype().to_dlpack());
    // SAFETY: the header was just made and nobody else knows of it.
    unsafe { (*outputs.first.as_ptr()).version = DLPackVersion { major: 1, minor: 0 } };
    Ok(outputs)
}

/// The same tensor in DLPack's legacy form.
///
/// # Safety
/// `tensor`, of major version 1, is what `view` was made of, and the caller's to give away. It is taken on success only.
pub unsafe fn from_versioned(view: &View<'_>, tensor: *mut DLManagedTensorVersioned) -> Result<Outputs> {
    let headers = Headers::like(view)?;
    // SAFETY: the caller's promise.
    let taken = unsafe { versioned::Dlpack::from_raw(tensor) };
    let storage =
        Storage::Versioned { _tensor: taken.map_err(|why| error!(InvalidArgument, "{}: {why}", view.name()))? };
    Ok(headers.finish(storage, view.data(), 0, view.dl_device(), view.dtype().to_dlpack()))
}

/// Releases a tensor of either form through its deleter; NULL, or a NULL deleter: nothing.
///
/// # Safety
/// `tensor` is NULL or the caller's to give away.
pub unsafe fn release<M: ManagedTensorBase>(tensor: *mut M) {
    if !tensor.is_null() {
        // SAFETY: not NULL, and the caller gives it away.
        unsafe { M::drop_raw(tensor) };
    }
}

/// The deleter of every tensor handed out.
///
/// # Safety
/// `tensor` is one of ours, not released before. NULL is nothing.
unsafe extern "C" fn deleter<M: ManagedTensorBase>(tensor: *mut M) {
    boundary(|| {
        if tensor.is_null() {
            return Ok(());
        }
        // SAFETY: `finish` put the allocation's start into manager_ctx. It lives as long as a tensor of it does, and
        // the count, changed atomically, tells which release was the last: only that one takes it apart.
        unsafe {
            let shared = (*tensor).manager_ctx().cast::<Shared>();
            if (*shared).alive.fetch_sub(1, Ordering::Release) == 1 {
                fence(Ordering::Acquire);
                let Shared { layout, storage, .. } = ptr::read(shared);
                alloc::dealloc(shared.cast(), layout);
                drop(storage);
            }
        }
        Ok(())
    });
}
