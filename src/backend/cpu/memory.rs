//! Host memory.

use std::{
    alloc::{self, Layout},
    ptr::{self, NonNull},
};

use crate::error::{Result, error};

/// Alignment of every allocation handed out: DLPack's, and CUDA's.
pub const ALIGNMENT: usize = 256;

/// Bytes from which large pages are asked for, as NumPy does: writing new memory otherwise takes longer for its page
/// faults, 4 KiB a time, than for the writing.
const LARGE: usize = 4 << 20;

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
        if size >= LARGE {
            ask_for_large_pages(data, size);
        }
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

/// Asks the system to back memory with large pages, where it gives them to those who ask.
fn ask_for_large_pages(data: NonNull<u8>, size: usize) {
    const PAGE: usize = 4096;
    let skipped = data.as_ptr().align_offset(PAGE);
    // SAFETY: whole pages within an allocation of ours. Advice changes no contents, and a refusal nothing at all.
    unsafe { libc::madvise(data.add(skipped).as_ptr().cast(), (size - skipped) & !(PAGE - 1), libc::MADV_HUGEPAGE) };
}
