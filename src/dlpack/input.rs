//! Borrows callers' tensors for a call.

use dlpark::{
    DlpackFlags,
    ffi::{
        DLManagedTensor, DLManagedTensorVersioned, DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED, DLPACK_MAJOR_VERSION,
        DLTensor,
    },
};

use crate::ffi::{
    borrow::{Count, check, items},
    error::{Result, error},
    fallible,
    name::Name,
};

use super::{described::Described, elements::Elements, view::View};

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

/// Borrows an optional tensor: NULL gives None.
///
/// # Safety
/// See [`tensor`].
pub unsafe fn optional<'a>(name: &'static str, tensor: *const DLTensor) -> Result<Option<View<'a>>> {
    if tensor.is_null() {
        return Ok(None);
    }
    // SAFETY: `tensor` is not NULL, and the caller makes the promises of [`tensor`].
    unsafe { self::tensor(name, tensor).map(Some) }
}

/// Borrows `count` tensors, each when the iterator reaches it, so that no list of them must be allocated.
///
/// # Safety
/// Unless NULL or unaligned, `tensors` points at `count` pointers, each as for [`tensor`]; all of that for `'a`.
pub unsafe fn tensors<'a>(
    name: &'static str, tensors: *const *const DLTensor, count: Count,
) -> Result<impl ExactSizeIterator<Item = Result<View<'a>>> + Clone> {
    // SAFETY: unless NULL or unaligned, `tensors` points at `count` pointers for `'a`.
    let tensors: &'a [_] = unsafe { items(name, tensors, count)? };
    Ok(tensors.iter().enumerate().map(move |(index, &tensor)| {
        let name = Name::of_item(name, index);
        check(&name, tensor)?;
        // SAFETY: not NULL, aligned, and for `'a` a tensor by the caller's promise.
        unsafe { View::from_dlpack(&name, &*tensor) }
    }))
}

/// Borrows a managed tensor: only its `dl_tensor` is read.
///
/// # Safety
/// Unless NULL or unaligned, `tensor` points at a `dl_tensor` that keeps the promise of [`View::from_dlpack`].
pub unsafe fn managed<'a>(name: &'static str, tensor: *const DLManagedTensor) -> Result<View<'a>> {
    // SAFETY: the caller makes the promises of [`managed_named`].
    unsafe { managed_named(Name::new(name), tensor) }
}

/// Borrows `count` managed tensors.
///
/// # Safety
/// Unless NULL or unaligned, `tensors` points at `count` pointers, each as for [`managed`].
pub unsafe fn managed_items<'a>(
    name: &'static str, tensors: *const *mut DLManagedTensor, count: Count,
) -> Result<Vec<View<'a>>> {
    // SAFETY: unless NULL or unaligned, `tensors` points at `count` pointers.
    let tensors = unsafe { items(name, tensors, count)? };
    let mut views = fallible::list(tensors.len(), format_args!("views of {name}"))?;
    for (index, &tensor) in tensors.iter().enumerate() {
        // SAFETY: the caller makes the promises of [`managed_named`] for each of the `count` pointers.
        views.push(unsafe { managed_named(Name::of_item(name, index), tensor)? });
    }
    Ok(views)
}

/// # Safety
/// See [`managed`].
unsafe fn managed_named<'a>(name: Name, tensor: *const DLManagedTensor) -> Result<View<'a>> {
    check(&name, tensor)?;
    // SAFETY: not NULL, aligned, and a tensor by the caller's promise; no reference to its other fields is made.
    unsafe { View::from_dlpack(&name, &(*tensor).dl_tensor) }
}

/// Borrows a managed tensor that is only passed on.
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
    // SAFETY: the caller makes the promises of [`described`] and [`Elements::new`].
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

/// Borrows a versioned tensor that is converted to the legacy form, which cannot express all flags.
///
/// # Safety
/// Unless NULL or unaligned, `tensor` points at a versioned tensor, and if that is of version 1 its `dl_tensor` keeps
/// the promise of [`Described::from_dlpack`].
pub unsafe fn versioned<'a>(name: &'static str, tensor: *const DLManagedTensorVersioned) -> Result<Described<'a>> {
    let name = Name::new(name);
    check(&name, tensor)?;
    // SAFETY: not NULL, aligned, and a tensor by the caller's promise; fields after the version are read only in 1.x.
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
