//! Host memory.

use std::{
    alloc::{self, Layout},
    ffi::c_void,
    ptr::{self, NonNull},
};

use crate::{
    dlpack::{Owner, View},
    ffi::error::{Result, error},
};

/// Alignment of every allocation handed out, in bytes: DLPack's, and CUDA's.
const ALIGNMENT: usize = 256;

/// Size in bytes from which allocations ask for large pages, as NumPy's do. Otherwise the first writes take longer for
/// page faults, of 4 KiB each, than for the writing.
const LARGE: usize = 4 << 20;

/// Allocates `bytes` bytes, at least one, aligned to [`ALIGNMENT`], not initialized.
pub fn allocate(bytes: i64) -> Result<Owner> {
    let refusal = || error!(OutOfMemory, "cannot allocate {bytes} bytes of host memory");
    let size = usize::try_from(bytes).ok().filter(|&size| size > 0).ok_or_else(refusal)?;
    // Aligned here, because not every malloc that replaces the system's has a posix_memalign that aligns: mimalloc
    // 2.0.9's does not.
    let room = size.checked_add(ALIGNMENT - 1).ok_or_else(refusal)?;
    let layout = Layout::from_size_align(room, 1).map_err(|_| refusal())?;
    // SAFETY: the size is not zero.
    let allocated = NonNull::new(unsafe { alloc::alloc(layout) }).ok_or_else(refusal)?;
    // SAFETY: the offset is less than ALIGNMENT, so `size` bytes remain after it.
    let data = unsafe { allocated.add(allocated.align_offset(ALIGNMENT)) };
    if size >= LARGE {
        ask_for_large_pages(data, size);
    }
    let words = [allocated.as_ptr().cast(), ptr::without_provenance_mut(room)];
    // SAFETY: `free` gets the allocation and its size, and is called once.
    Ok(unsafe { Owner::new(data.as_ptr(), words, free) })
}

/// Reads a view of one float32.
pub fn read(src: &View<'_>) -> f32 {
    // SAFETY: a view of a float32, at any address.
    unsafe { src.data().cast::<f32>().read_unaligned() }
}

/// Copies the bytes of a contiguous view, which has `to.len()` bytes.
pub fn read_bytes(src: &View<'_>, to: &mut [u8]) {
    // SAFETY: the view is contiguous and has `to.len()` bytes, at any address; `to` has room for them.
    unsafe { ptr::copy_nonoverlapping(src.data(), to.as_mut_ptr(), to.len()) };
}

/// # Safety
/// `room` bytes were `allocated` here, and are not used any more.
unsafe fn free(_: *mut u8, [allocated, room]: [*mut c_void; 2]) {
    // SAFETY: `allocated` came from `allocate`, which made this layout.
    unsafe { alloc::dealloc(allocated.cast(), Layout::from_size_align_unchecked(room.addr(), 1)) };
}

/// Asks the system to back memory with large pages, which it may give on request.
fn ask_for_large_pages(data: NonNull<u8>, size: usize) {
    const PAGE: usize = 4096;
    let skipped = data.as_ptr().align_offset(PAGE);
    // SAFETY: the range has full pages of this allocation only. Advice changes no contents; a refusal changes nothing.
    unsafe { libc::madvise(data.add(skipped).as_ptr().cast(), (size - skipped) & !(PAGE - 1), libc::MADV_HUGEPAGE) };
}
