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

/// Alignment of every allocation handed out: DLPack's, and CUDA's.
const ALIGNMENT: usize = 256;

/// Bytes from which large pages are asked for, as NumPy does: writing new memory otherwise takes longer for its page
/// faults, 4 KiB a time, than for the writing.
const LARGE: usize = 4 << 20;

/// `bytes` bytes, at least one, aligned to [`ALIGNMENT`], not initialized.
pub fn allocate(bytes: i64) -> Result<Owner> {
    let refusal = || error!(OutOfMemory, "cannot allocate {bytes} bytes of host memory");
    let size = usize::try_from(bytes).ok().filter(|&size| size > 0).ok_or_else(refusal)?;
    // Aligned here, for not every malloc that is put in place of the system's has a posix_memalign that aligns: mimalloc
    // 2.0.9's does not.
    let room = size.checked_add(ALIGNMENT - 1).ok_or_else(refusal)?;
    let layout = Layout::from_size_align(room, 1).map_err(|_| refusal())?;
    // SAFETY: the size is not zero.
    let allocated = NonNull::new(unsafe { alloc::alloc(layout) }).ok_or_else(refusal)?;
    // SAFETY: less than ALIGNMENT further, so `size` bytes are left from there.
    let data = unsafe { allocated.add(allocated.align_offset(ALIGNMENT)) };
    if size >= LARGE {
        ask_for_large_pages(data, size);
    }
    let words = [allocated.as_ptr().cast(), ptr::without_provenance_mut(room)];
    // SAFETY: `free` wants what was allocated and its size, and is called once.
    Ok(unsafe { Owner::new(data.as_ptr(), words, free) })
}

/// The float32 of a view of one.
pub fn read(src: &View<'_>) -> f32 {
    // SAFETY: a view of a float32, at any address.
    unsafe { src.data().cast::<f32>().read_unaligned() }
}

/// The bytes of a contiguous view, which are as many as `to` has.
pub fn read_bytes(src: &View<'_>, to: &mut [u8]) {
    // SAFETY: a contiguous view of so many bytes, at any address, and room for them.
    unsafe { ptr::copy_nonoverlapping(src.data(), to.as_mut_ptr(), to.len()) };
}

/// # Safety
/// `room` bytes were `allocated` here, and are not used any more.
unsafe fn free(_: *mut u8, [allocated, room]: [*mut c_void; 2]) {
    // SAFETY: `data` came from `allocate`, which made this layout.
    unsafe { alloc::dealloc(allocated.cast(), Layout::from_size_align_unchecked(room.addr(), 1)) };
}

/// Asks the system to back memory with large pages, where it gives them to those who ask.
fn ask_for_large_pages(data: NonNull<u8>, size: usize) {
    const PAGE: usize = 4096;
    let skipped = data.as_ptr().align_offset(PAGE);
    // SAFETY: whole pages within an allocation of ours. Advice changes no contents, and a refusal nothing at all.
    unsafe { libc::madvise(data.add(skipped).as_ptr().cast(), (size - skipped) & !(PAGE - 1), libc::MADV_HUGEPAGE) };
}
