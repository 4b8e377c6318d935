//! Pointers from outside, checked as far as they can be: not NULL, aligned, of a size that fits.

use std::{
    ffi::{CStr, c_char},
    ops::Range,
    slice,
};

use dlpark::{
    DlpackFlags,
    ffi::{
        DLManagedTensor, DLManagedTensorVersioned, DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED, DLPACK_MAJOR_VERSION,
        DLTensor,
    },
};

use crate::{
    error::{Error, Result, error},
    tensor::{Described, Elements, Name, View},
};

/// A number of items, and the argument that says it.
#[derive(Clone, Copy)]
pub struct Count {
    argument: &'static str,
    items: usize,
}

impl Count {
    pub const fn of(argument: &'static str, items: usize) -> Self {
        Self { argument, items }
    }

    /// From an argument that C passes as a signed integer.
    pub fn of_signed(argument: &'static str, items: i32) -> Result<Self> {
        let items = usize::try_from(items).map_err(|_| error!(InvalidArgument, "{argument}: {items} is negative"))?;
        Ok(Self { argument, items })
    }

    /// Refuses more items than any memory holds at the argument `name`.
    fn check<T>(self, name: &'static str) -> Result<()> {
        let Self { argument, items } = self;
        if items > isize::MAX as usize / size_of::<T>().max(1) {
            return Err(error!(SizeOverflow, "{argument}: {items} items at {name} exceed the address space"));
        }
        Ok(())
    }
}

/// Reads `count` items.
///
/// # Safety
/// Unless NULL or unaligned, `pointer` is the address of `count` items that stay readable and unchanged for `'a`.
pub unsafe fn items<'a, T>(name: &'static str, pointer: *const T, count: Count) -> Result<&'a [T]> {
    if count.items == 0 {
        return Ok(&[]);
    }
    count.check::<T>(name)?;
    check(&Name::new(name), pointer)?;
    // SAFETY: not NULL, aligned, of a size that fits, and readable by the caller's promise.
    Ok(unsafe { slice::from_raw_parts(pointer, count.items) })
}

/// Reads a text.
///
/// # Safety
/// Unless NULL, `pointer` is the address of bytes up to a NUL that stay readable and unchanged for `'a`.
pub unsafe fn text<'a>(name: &'static str, pointer: *const c_char) -> Result<&'a CStr> {
    check(&Name::new(name), pointer)?;
    // SAFETY: not NULL, and a text by the caller's promise.
    Ok(unsafe { CStr::from_ptr(pointer) })
}

/// Borrows a tensor.
///
/// # Safety
/// Unless NULL or unaligned, `tensor` points at a DLTensor that keeps the promise of [`View::from_dlpack`].
#[inline(always)]
pub unsafe fn tensor<'a>(name: &'static str, tensor: *const DLTensor) -> Result<View<'a>> {
    let name = Name::new(name);
    check(&name, tensor)?;
    // SAFETY: not NULL, aligned, and a tensor by the caller's promise.
    unsafe { View::from_dlpack(&name, &*tensor) }
}

/// Borrows a tensor that need not be there: NULL is None.
///
/// # Safety
/// As for [`tensor`].
pub unsafe fn optional<'a>(name: &'static str, tensor: *const DLTensor) -> Result<Option<View<'a>>> {
    if tensor.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { self::tensor(name, tensor).map(Some) }
}

/// Borrows `count` tensors, each when it is its turn: no list of them is made, which would have to be allocated.
///
/// # Safety
/// Unless NULL or unaligned, `tensors` points at `count` pointers, each as for [`tensor`]; all of that for `'a`.
pub unsafe fn tensors<'a>(
    name: &'static str,
    tensors: *const *const DLTensor,
    count: Count,
) -> Result<impl ExactSizeIterator<Item = Result<View<'a>>> + Clone> {
    // SAFETY: the caller's promise.
    let tensors: &'a [_] = unsafe { items(name, tensors, count)? };
    Ok(tensors.iter().enumerate().map(move |(index, &tensor)| {
        let name = Name::of_item(name, index);
        check(&name, tensor)?;
        // SAFETY: not NULL, aligned, and for `'a` a tensor by the caller's promise.
        unsafe { View::from_dlpack(&name, &*tensor) }
    }))
}

/// A struct of options of ours, which begins with its own size, as `struct_size`.
///
/// # Safety
/// Every pattern of bits is a value of the type.
pub unsafe trait Options: Copy {
    /// Where the reserved bytes are.
    const RESERVED: Range<usize>;
}

/// Reads options. A later version may have given them more fields: those must be 0, for they are not known here.
///
/// # Safety
/// Unless NULL or unaligned, `options` points at as many readable bytes as their `struct_size` says.
pub unsafe fn options<T: Options>(name: &'static str, options: *const T) -> Result<T> {
    check(&Name::new(name), options)?;
    // SAFETY: not NULL, aligned, and readable by the caller's promise.
    let size = unsafe { options.cast::<u32>().read() } as usize;
    if size < size_of::<T>() {
        return Err(error!(InvalidArgument, "{name}: struct_size {} expected, got {size}", size_of::<T>()));
    }
    // SAFETY: the caller promises so many bytes.
    let bytes = unsafe { slice::from_raw_parts(options.cast::<u8>(), size) };
    let unknown = T::RESERVED.chain(size_of::<T>()..size).find(|&offset| bytes[offset] != 0);
    if let Some(offset) = unknown {
        return Err(error!(
            InvalidArgument,
            "{name}: the byte at offset {offset} is {}; 0 expected, for this version knows no field there",
            bytes[offset]
        ));
    }
    // SAFETY: so many bytes are there, aligned, and any pattern is a value.
    Ok(unsafe { options.read() })
}

/// Borrows a managed tensor: only its `dl_tensor` is read.
///
/// # Safety
/// Unless NULL or unaligned, `tensor` points at a `dl_tensor` that keeps the promise of [`View::from_dlpack`].
pub unsafe fn managed<'a>(name: &'static str, tensor: *const DLManagedTensor) -> Result<View<'a>> {
    // SAFETY: the caller's promise.
    unsafe { managed_named(Name::new(name), tensor) }
}

/// Borrows a managed tensor that need not be there: NULL is None.
///
/// # Safety
/// As for [`managed`].
pub unsafe fn optional_managed<'a>(name: &'static str, tensor: *const DLManagedTensor) -> Result<Option<View<'a>>> {
    if tensor.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { managed(name, tensor).map(Some) }
}

/// Borrows `count` managed tensors.
///
/// # Safety
/// Unless NULL or unaligned, `tensors` points at `count` pointers, each as for [`managed`].
pub unsafe fn managed_items<'a>(
    name: &'static str,
    tensors: *const *mut DLManagedTensor,
    count: Count,
) -> Result<Vec<View<'a>>> {
    // SAFETY: the caller's promise.
    let tensors = unsafe { items(name, tensors, count)? };
    let mut views = Vec::new();
    views
        .try_reserve_exact(tensors.len())
        .map_err(|_| error!(OutOfMemory, "{name}: {} views could not be had", tensors.len()))?;
    for (index, &tensor) in tensors.iter().enumerate() {
        // SAFETY: the caller's promise.
        views.push(unsafe { managed_named(Name::of_item(name, index), tensor)? });
    }
    Ok(views)
}

/// # Safety
/// As for [`managed`].
unsafe fn managed_named<'a>(name: Name, tensor: *const DLManagedTensor) -> Result<View<'a>> {
    check(&name, tensor)?;
    // SAFETY: not NULL, aligned, and a tensor by the caller's promise; no reference to its other fields is made.
    unsafe { View::from_dlpack(&name, &(*tensor).dl_tensor) }
}

/// Borrows a managed tensor that is only to be passed on.
///
/// # Safety
/// Unless NULL or unaligned, `tensor` points at a `dl_tensor` that keeps the promise of [`Described::from_dlpack`].
pub unsafe fn described<'a>(name: &'static str, tensor: *const DLManagedTensor) -> Result<Described<'a>> {
    let name = Name::new(name);
    check(&name, tensor)?;
    // SAFETY: not NULL, aligned, and a tensor by the caller's promise; no reference to its other fields is made.
    unsafe { Described::from_dlpack(&name, &(*tensor).dl_tensor) }
}

/// Borrows a managed tensor whose elements are copied.
///
/// # Safety
/// Unless NULL or unaligned, `tensor` points at a `dl_tensor` that keeps the promises of [`Described::from_dlpack`] and
/// [`Elements::new`].
pub unsafe fn managed_elements<'a>(name: &'static str, tensor: *const DLManagedTensor) -> Result<Elements<'a>> {
    // SAFETY: the caller's promise.
    unsafe { Elements::new(&Name::new(name), described(name, tensor)?) }
}

/// Borrows a tensor whose elements are copied.
///
/// # Safety
/// Unless NULL or unaligned, `tensor` points at a DLTensor that keeps the promises of [`Described::from_dlpack`] and
/// [`Elements::new`].
pub unsafe fn elements<'a>(name: &'static str, tensor: *const DLTensor) -> Result<Elements<'a>> {
    let name = Name::new(name);
    check(&name, tensor)?;
    // SAFETY: not NULL, aligned, and a tensor by the caller's promise.
    unsafe { Elements::new(&name, Described::from_dlpack(&name, &*tensor)?) }
}

/// Borrows a versioned tensor that is to be passed on in the legacy form, which cannot say all that flags can.
///
/// # Safety
/// Unless NULL or unaligned, `tensor` points at a versioned tensor, and if that is of version 1 its `dl_tensor` keeps
/// the promise of [`Described::from_dlpack`].
pub unsafe fn versioned<'a>(name: &'static str, tensor: *const DLManagedTensorVersioned) -> Result<Described<'a>> {
    let name = Name::new(name);
    check(&name, tensor)?;
    // SAFETY: not NULL, aligned, and by the caller's promise a tensor; what follows the version is read only in 1.x.
    unsafe {
        let version = (*tensor).version;
        if version.major != DLPACK_MAJOR_VERSION {
            return Err(error!(
                InvalidArgument,
                "{name}: DLPack version {}.{}; {DLPACK_MAJOR_VERSION}.x is understood", version.major, version.minor
            ));
        }
        let flags = (*tensor).flags;
        if flags.contains(DlpackFlags::READ_ONLY) {
            return Err(error!(ReadOnly, "{name}: read-only by its flags, {:#x}", flags.bits()));
        }
        if flags.bits() & u64::from(DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) != 0 {
            return Err(error!(
                UnsupportedDtype,
                "{name}: elements of {} bits padded to bytes by its flags, {:#x}, which the legacy form cannot say",
                (*tensor).dl_tensor.dtype.bits,
                flags.bits()
            ));
        }
        Described::from_dlpack(&name, &(*tensor).dl_tensor)
    }
}

/// The place of one result or of several, to be written once nothing can fail any more.
pub struct Out<T> {
    first: *mut T,
    count: usize,
}

impl<T> Out<T> {
    /// # Safety
    /// Unless NULL or unaligned, `place` has room for a result.
    pub unsafe fn one(name: &'static str, place: *mut T) -> Result<Self> {
        check(&Name::new(name), place)?;
        Ok(Self { first: place, count: 1 })
    }

    /// For a struct of ours that begins with its own size, as `struct_size`.
    ///
    /// # Safety
    /// Unless NULL or unaligned, `place` has room for a result, and its first four bytes are readable.
    pub unsafe fn sized(name: &'static str, place: *mut T) -> Result<Self> {
        check(&Name::new(name), place.cast::<u32>())?;
        // SAFETY: not NULL, aligned, and readable by the caller's promise.
        let size = unsafe { place.cast::<u32>().read() };
        if size as usize != size_of::<T>() {
            return Err(error!(InvalidArgument, "{name}: struct_size {} expected, got {size}", size_of::<T>()));
        }
        // SAFETY: the caller's promise.
        unsafe { Self::one(name, place) }
    }

    /// # Safety
    /// Unless NULL or unaligned, `first` has room for `count` results.
    pub unsafe fn several(name: &'static str, first: *mut T, count: Count) -> Result<Self> {
        count.check::<T>(name)?;
        check(&Name::new(name), first)?;
        Ok(Self { first, count: count.items })
    }

    pub fn fill(self, results: impl IntoIterator<Item = T>) {
        for (index, result) in results.into_iter().take(self.count).enumerate() {
            // SAFETY: `one` or `several` was promised room for `count` results.
            unsafe { self.first.add(index).write(result) };
        }
    }
}

#[inline(always)]
pub fn check<T>(name: &Name, pointer: *const T) -> Result<()> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(bad_pointer(name, pointer.addr(), align_of::<T>()));
    }
    Ok(())
}

/// Apart from the check, which is on the way of every call.
#[cold]
fn bad_pointer(name: &Name, address: usize, alignment: usize) -> Error {
    match address {
        0 => error!(InvalidArgument, "{name}: NULL"),
        _ => error!(InvalidArgument, "{name}: address {address:#x} is not aligned to {alignment}"),
    }
}
