//! Host memory.

use std::{
    alloc::{self, Layout},
    ffi::c_void,
    ptr::{self, NonNull},
};

use crate::{
    error::{Result, error},
    tensor::Owner,
};

/// Alignment of every allocation handed out: DLPack's, and CUDA's.
const ALIGNMENT: usize = 256;

/// Bytes from which large pages are asked for, as NumPy does: writing new memory otherwise takes longer for its page
/// faults, 4 KiB a time, than for the writing.
const LARGE: usize = 4 << 20;

/// `bytes` bytes, at least one, aligned to [`ALIGNMENT`], not initialized.
pub fn allocate(bytes: i64) -> Result<Owner> {
    let refusal = || error!(OutOfMemory, "{bytes} bytes of host memory could not be had");
    let size = usize::try_from(bytes).ok().filter(|&size| size > 0).ok_or_else(refusal)?;
    let layout = Layout::from_size_align(size, ALIGNMENT).map_err(|_| refusal())?;
    // SAFETY: the size is not zero.
    let data = NonNull::new(unsafe { alloc::alloc(layout) }).ok_or_else(refusal)?;
    if size >= LARGE {
        ask_for_large_pages(data, size);
    }
    // SAFETY: `free` wants the size, and is called once.
    Ok(unsafe { Owner::new(data.as_ptr(), [ptr::without_provenance_mut(size), ptr::null_mut()], free) })
}

/// # Safety
/// `data` came from [`allocate`], with this size, and is not used any more.
unsafe fn free(data: *mut u8, [size, _]: [*mut c_void; 2]) {
    // SAFETY: the caller's promise: `allocate` made this layout.
    unsafe { alloc::dealloc(data, Layout::from_size_align_unchecked(size.addr(), ALIGNMENT)) };
}

/// Asks the system to back memory with large pages, where it gives them to those who ask.
fn ask_for_large_pages(data: NonNull<u8>, size: usize) {
    const PAGE: usize = 4096;
    let skipped = data.as_ptr().align_offset(PAGE);
    // SAFETY: whole pages within an allocation of ours. Advice changes no contents, and a refusal nothing at all.
    unsafe { libc::madvise(data.add(skipped).as_ptr().cast(), (size - skipped) & !(PAGE - 1), libc::MADV_HUGEPAGE) };
}
