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
};

use crate::{
    backend,
    capi::boundary,
    error::{Result, error},
};

use super::{Device, Dtype, Name, Shape, View};

/// What a tensor keeps alive, given back when its last user has released it.
enum Storage {
    /// Memory of ours.
    Ours { _memory: backend::Memory },
    /// The caller's memory, with what to call when it is no longer needed.
    Borrowed { _release: Release },
    /// A tensor that was taken over whole.
    Legacy { _tensor: Taken<DLManagedTensor> },
    /// The same, in DLPack's versioned form.
    Versioned { _tensor: Taken<DLManagedTensorVersioned> },
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

/// Somebody's tensor, released through the deleter that it came with.
struct Taken<M: ManagedTensorBase> {
    tensor: *mut M,
    deleter: Deleter<M>,
}

type Deleter<M> = unsafe extern "C" fn(*mut M);

impl<M: ManagedTensorBase> Drop for Taken<M> {
    fn drop(&mut self) {
        // SAFETY: the tensor was given away with this deleter, to be called once.
        unsafe { (self.deleter)(self.tensor) };
    }
}

/// Takes a tensor over: what of it must stay alive as long as its memory is used, wrapped by `keep`.
///
/// The deleter is read here: a tensor without one may be a struct that is gone when the new tensor is released, so
/// nothing of it is kept. And one of our own gives its storage up, so that a tensor that changes its form again and
/// again neither grows nor nests its releases.
///
/// # Safety
/// `tensor` is the caller's to give away.
unsafe fn take<M: ManagedTensorBase>(tensor: *mut M, keep: fn(Taken<M>) -> Storage) -> Option<Storage> {
    // SAFETY: a tensor by the caller's promise. If it is ours, `finish` made it, and as long as it is not released its
    // allocation lives; when it is the last one, nobody else can come to look at that.
    unsafe {
        let its_deleter = (*tensor).deleter()?;
        if ptr::fn_addr_eq(its_deleter, deleter::<M> as Deleter<M>) {
            let shared = (*tensor).manager_ctx().cast::<Shared>();
            if (*shared).alive.load(Ordering::Acquire) == 1 {
                return Shared::take_apart(shared);
            }
        }
        Some(keep(Taken { tensor, deleter: its_deleter }))
    }
}

/// The start of an allocation of headers: `Shared`, then the headers, then one shape and strides for all of them.
struct Shared {
    /// Tensors that were handed out and not released.
    alive: AtomicUsize,
    layout: Layout,
    /// None: memory that needs nobody, of a tensor that came without a deleter.
    storage: Option<Storage>,
}

impl Shared {
    /// Frees the headers and hands out what they kept alive.
    ///
    /// # Safety
    /// `shared` was written by [`Headers::finish`], and nobody uses any of its tensors any more.
    unsafe fn take_apart(shared: *mut Self) -> Option<Storage> {
        // SAFETY: the caller's promise; the allocation was made with this layout.
        unsafe {
            let Self { layout, storage, .. } = ptr::read(shared);
            alloc::dealloc(shared.cast(), layout);
            storage
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
    fn finish(
        self,
        storage: Option<Storage>,
        data: *mut u8,
        step: usize,
        device: DLDevice,
        dtype: DLDataType,
    ) -> Outputs<M> {
        let shared = self.shared.as_ptr();
        // SAFETY: `reserve` made room for a Shared, `count` headers and the lengths; nobody else knows of them yet.
        unsafe {
            shared.write(Shared { alive: AtomicUsize::new(self.count), layout: self.layout, storage });
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
        let elements = shape.elements(&name)?;
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
        let storage = Some(Storage::Ours { _memory: memory });
        Ok(headers.finish(storage, data, step, device.to_dlpack(), dtype.to_dlpack()))
    }

    /// The first tensor, to be written.
    pub fn view(&self) -> Result<View<'_>> {
        // SAFETY: `finish` made the header and its lengths, over memory that lives as long as `self`, which nobody else
        // has seen yet.
        unsafe { View::from_dlpack(&Name::new("out"), self.first.as_ref().tensor()) }
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
            View::from_dlpack(&Name::new("out"), &joined)
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
    let storage = Some(Storage::Borrowed { _release: ManuallyDrop::into_inner(release) });
    Ok(headers.finish(storage, view.data(), 0, view.dl_device(), view.dtype().to_dlpack()))
}

/// The same tensor in DLPack's versioned form, 1.0 and without flags: every importer of versioned tensors takes that.
///
/// # Safety
/// `tensor` is what `view` was made of, and the caller's to give away. It is taken on success only.
pub unsafe fn to_versioned(view: &View<'_>, tensor: *mut DLManagedTensor) -> Result<Outputs<DLManagedTensorVersioned>> {
    // SAFETY: the caller's promise.
    let outputs: Outputs<DLManagedTensorVersioned> =
        unsafe { convert(view, tensor, |_tensor| Storage::Legacy { _tensor })? };
    // SAFETY: the header was just made and nobody else knows of it.
    unsafe { (*outputs.first.as_ptr()).version = DLPackVersion { major: 1, minor: 0 } };
    Ok(outputs)
}

/// The same tensor in DLPack's legacy form.
///
/// # Safety
/// `tensor`, of major version 1, is what `view` was made of, and the caller's to give away. It is taken on success only.
pub unsafe fn from_versioned(view: &View<'_>, tensor: *mut DLManagedTensorVersioned) -> Result<Outputs> {
    // SAFETY: the caller's promise.
    unsafe { convert(view, tensor, |_tensor| Storage::Versioned { _tensor }) }
}

/// # Safety
/// `tensor` is what `view` was made of, and the caller's to give away. It is taken on success only.
unsafe fn convert<From: ManagedTensorBase, To: ManagedTensorBase>(
    view: &View<'_>,
    tensor: *mut From,
    keep: fn(Taken<From>) -> Storage,
) -> Result<Outputs<To>> {
    let headers = Headers::like(view)?;
    // Once the tensor is taken, the lengths that the view shows may be gone.
    let (data, device, dtype) = (view.data(), view.dl_device(), view.dtype().to_dlpack());
    // SAFETY: the caller's promise.
    let storage = unsafe { take(tensor, keep) };
    Ok(headers.finish(storage, data, 0, device, dtype))
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
                drop(Shared::take_apart(shared));
            }
        }
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn count(context: *mut c_void) {
        boundary(|| {
            // SAFETY: the test below passes the address of a counter.
            unsafe { (*context.cast::<AtomicUsize>()).fetch_add(1, Ordering::Relaxed) };
            Ok(())
        });
    }

    fn view<M: ManagedTensorBase>(tensor: *mut M) -> View<'static> {
        // SAFETY: a tensor of ours, whose lengths live until it is released or taken.
        unsafe { View::from_dlpack(&Name::new("test"), (*tensor).tensor()).unwrap() }
    }

    fn there_and_back(tensor: *mut DLManagedTensor) -> *mut DLManagedTensor {
        // SAFETY: the tensor is given away; so is what becomes of it.
        unsafe {
            let versioned = to_versioned(&view(tensor), tensor).unwrap().into_raw().next().unwrap();
            from_versioned(&view(versioned), versioned).unwrap().into_raw().next().unwrap()
        }
    }

    #[test]
    fn a_million_changes_of_form_are_one_release_on_a_small_stack() {
        let released = AtomicUsize::new(0);
        let work = || {
            let context = ptr::from_ref(&released).cast_mut().cast();
            let mut byte = 1u8;
            let mut length = 1;
            let described = DLTensor {
                data: ptr::from_mut(&mut byte).cast(),
                device: Device::Cpu.to_dlpack(),
                ndim: 1,
                dtype: Dtype::U8.to_dlpack(),
                shape: &mut length,
                strides: ptr::null_mut(),
                byte_offset: 0,
            };
            // SAFETY: the description is that of `byte`.
            let lent = unsafe { View::from_dlpack(&Name::new("test"), &described).unwrap() };
            let outputs = from_pointer(&lent, Release { function: Some(count), context }).unwrap();
            let mut tensor = outputs.into_raw().next().unwrap();
            for _ in 0..1_000_000 {
                tensor = there_and_back(tensor);
            }
            assert_eq!(view(tensor).data(), described.data.cast());
            assert_eq!(released.load(Ordering::Relaxed), 0);
            // SAFETY: ours, and not used afterwards.
            unsafe { release(tensor) };
        };
        std::thread::scope(|scope| {
            std::thread::Builder::new().stack_size(128 << 10).spawn_scoped(scope, work).unwrap().join().unwrap();
        });
        assert_eq!(released.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn chunks_that_change_their_form_keep_the_memory_of_the_others() {
        let outputs = Outputs::allocate(Name::new("test"), Device::Cpu, Dtype::U8, Shape::of(&[64]), 3).unwrap();
        let mut chunks: Vec<_> = outputs.into_raw().collect();
        for (index, chunk) in chunks.iter_mut().enumerate() {
            // SAFETY: 64 bytes of ours.
            unsafe { view(*chunk).data().write_bytes(index as u8, 64) };
            for _ in 0..3 {
                *chunk = there_and_back(*chunk);
            }
        }
        for (index, chunk) in chunks.into_iter().enumerate() {
            // SAFETY: as above; each is released once.
            unsafe {
                assert_eq!(std::slice::from_raw_parts(view(chunk).data(), 64), [index as u8; 64]);
                release(chunk);
            }
        }
    }
}
