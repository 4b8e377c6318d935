//! Pointers from the caller, checked as far as possible: not NULL, aligned, of a size that fits.

use std::{
    ffi::{CStr, c_char},
    mem::MaybeUninit,
    ops::Range,
    slice,
};

use super::{
    error::{Error, Result, error},
    name::Name,
};

/// Number of items, and the name of its argument.
#[derive(Clone, Copy)]
pub struct Count {
    argument: &'static str,
    items: usize,
}

impl Count {
    pub const fn of(argument: &'static str, items: usize) -> Self {
        Self { argument, items }
    }

    /// Creates a count from an argument that C passes as a signed integer.
    pub fn of_signed(argument: &'static str, items: i32) -> Result<Self> {
        let items = usize::try_from(items).map_err(|_| error!(InvalidArgument, "{argument}: {items} is negative"))?;
        Ok(Self { argument, items })
    }

    /// Refuses more items at the argument `name` than the address space holds.
    fn check<T>(self, name: &'static str) -> Result<()> {
        let Self { argument, items } = self;
        if items > isize::MAX as usize / size_of::<T>().max(1) {
            return Err(error!(SizeOverflow, "{argument}: {items} items at {name} exceed the address space"));
        }
        Ok(())
    }
}

/// Borrows `count` items, to be read.
///
/// # Safety
/// Unless NULL or unaligned, `pointer` is the address of `count` items that stay readable and unchanged for `'a`.
pub unsafe fn items<'a, T>(name: &'static str, pointer: *const T, count: Count) -> Result<&'a [T]> {
    if count.items == 0 {
        return Ok(&[]);
    }
    count.check::<T>(name)?;
    check(&Name::new(name), pointer)?;
    // SAFETY: the pointer is non-NULL and aligned, the size fits, and the caller promises readable items.
    Ok(unsafe { slice::from_raw_parts(pointer, count.items) })
}

/// Borrows room for `count` items, to be written.
///
/// # Safety
/// Unless NULL or unaligned, `pointer` is the address of room for `count` items, which nothing else uses for `'a`.
pub unsafe fn room<'a, T>(name: &'static str, pointer: *mut T, count: Count) -> Result<&'a mut [MaybeUninit<T>]> {
    if count.items == 0 {
        return Ok(&mut []);
    }
    count.check::<T>(name)?;
    check(&Name::new(name), pointer)?;
    // SAFETY: the pointer is non-NULL and aligned, the size fits, and the caller promises room, which is not read.
    Ok(unsafe { slice::from_raw_parts_mut(pointer.cast(), count.items) })
}

/// Borrows a text.
///
/// # Safety
/// Unless NULL, `pointer` is the address of bytes up to a NUL that stay readable and unchanged for `'a`.
pub unsafe fn text<'a>(name: &'static str, pointer: *const c_char) -> Result<&'a CStr> {
    check(&Name::new(name), pointer)?;
    // SAFETY: the pointer is non-NULL, and the caller promises a text.
    Ok(unsafe { CStr::from_ptr(pointer) })
}

/// A struct of this interface that begins with its own size, `struct_size`, a uint32, and grows at its end in later
/// versions.
///
/// # Safety
/// Every bit pattern is a value of the type, and the type has no padding.
pub unsafe trait Extensible: Copy {
    /// Size in the first release, 0.1.0, in bytes.
    const FIRST_SIZE: usize;
    /// Offsets of the reserved bytes.
    const RESERVED: Range<usize> = 0..0;
}

/// Largest struct that is accepted, in bytes. A `struct_size` that was never set then reads at most a page.
const MOST: usize = 4096;

/// Returns the `struct_size` of a struct of any version.
///
/// # Safety
/// Unless NULL or unaligned, the first four bytes of `place` are readable.
unsafe fn struct_size<T: Extensible>(name: &'static str, place: *const T) -> Result<usize> {
    const { assert!(T::FIRST_SIZE <= size_of::<T>() && T::FIRST_SIZE % 8 == 0 && align_of::<T>() >= 4) };
    check(&Name::new(name), place)?;
    // SAFETY: the pointer is non-NULL and aligned to 4 bytes or more; the caller promises that it is readable.
    let size = unsafe { place.cast::<u32>().read() } as usize;
    if !(T::FIRST_SIZE..=MOST).contains(&size) || !size.is_multiple_of(8) {
        let first = T::FIRST_SIZE;
        return Err(error!(
            InvalidArgument,
            "{name}: struct_size {size}; a multiple of 8 from {first} to {MOST} expected, {} in this version",
            size_of::<T>()
        ));
    }
    Ok(size)
}

/// Reads options. Fields that an older program lacks are 0. Fields that only a later version has must be 0.
///
/// # Safety
/// Unless NULL or unaligned, `options` points at `struct_size` readable bytes.
pub unsafe fn options<T: Extensible>(name: &'static str, options: *const T) -> Result<T> {
    // SAFETY: the caller promises at least the bytes of `struct_size`.
    let size = unsafe { struct_size(name, options)? };
    // SAFETY: the pointer is non-NULL, as `struct_size` has checked, and the caller promises `size` readable bytes.
    let bytes = unsafe { slice::from_raw_parts(options.cast::<u8>(), size) };
    let known = size.min(size_of::<T>());
    let unknown = T::RESERVED.chain(size_of::<T>()..size).take_while(|&at| at < size).find(|&at| bytes[at] != 0);
    if let Some(offset) = unknown {
        return Err(error!(
            InvalidArgument,
            "{name}: the byte at offset {offset} is {}; 0 expected, for this version knows no field there",
            bytes[offset]
        ));
    }
    let mut copy = MaybeUninit::<T>::zeroed();
    // SAFETY: `known` bytes are readable at `bytes` and writable at `copy`, without overlap; any bit pattern is a `T`.
    Ok(unsafe {
        copy.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), known);
        copy.assume_init()
    })
}

/// Address of a struct that this library fills in up to the size that the program passed.
pub struct OutStruct<T> {
    place: *mut T,
    size: usize,
}

impl<T: Extensible> OutStruct<T> {
    /// # Safety
    /// Unless NULL or unaligned, `place` has room for `struct_size` bytes, and `struct_size` is readable.
    pub unsafe fn new(name: &'static str, place: *mut T) -> Result<Self> {
        // SAFETY: the caller promises a readable `struct_size`.
        let size = unsafe { struct_size(name, place)? };
        Ok(Self { place, size: size.min(size_of::<T>()) })
    }

    /// Writes the fields that both versions have, except `struct_size`, which keeps the program's value.
    pub fn fill(self, value: T) {
        let (bytes, head) = ((&raw const value).cast::<u8>(), size_of::<u32>());
        // SAFETY: the caller of `new` promised room for `size` bytes; a `T` has at least as many, all initialized.
        unsafe { self.place.cast::<u8>().add(head).copy_from_nonoverlapping(bytes.add(head), self.size - head) };
    }
}

/// Address of one or several results, which are written once nothing can fail any more.
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

    /// # Safety
    /// Unless NULL or unaligned, `first` has room for `count` results.
    pub unsafe fn several(name: &'static str, first: *mut T, count: Count) -> Result<Self> {
        count.check::<T>(name)?;
        check(&Name::new(name), first)?;
        Ok(Self { first, count: count.items })
    }

    pub fn fill(self, results: impl IntoIterator<Item = T>) {
        for (index, result) in results.into_iter().take(self.count).enumerate() {
            // SAFETY: the caller of `one` or `several` promised room for `count` results.
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

/// Creates the error of `check`. It is a separate function, because every call runs the check.
#[cold]
fn bad_pointer(name: &Name, address: usize, alignment: usize) -> Error {
    match address {
        0 => error!(InvalidArgument, "{name}: NULL"),
        _ => error!(InvalidArgument, "{name}: address {address:#x} is not aligned to {alignment}"),
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    /// Struct as this version has it: `later` was appended after the first release.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Grown {
        struct_size: u32,
        first: u32,
        reserved: u64,
        later: u64,
    }

    // SAFETY: the fields are numbers, without padding.
    unsafe impl Extensible for Grown {
        const FIRST_SIZE: usize = 16;
        const RESERVED: Range<usize> = 8..16;
    }

    /// Last bytes of a page, followed by a page that can be neither read nor written.
    struct BeforeAGuard {
        page: *mut u8,
        bytes: usize,
    }

    const PAGE: usize = 4096;

    impl BeforeAGuard {
        fn new(words: &[u64]) -> Self {
            let (both, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: new memory of two pages, the second of which becomes inaccessible; `words` fit into the first.
            unsafe {
                let page = libc::mmap(ptr::null_mut(), 2 * PAGE, both, flags, -1, 0).cast::<u8>();
                assert_eq!(libc::mprotect(page.add(PAGE).cast(), PAGE, libc::PROT_NONE), 0);
                let bytes = size_of_val(words);
                page.add(PAGE - bytes).copy_from_nonoverlapping(words.as_ptr().cast(), bytes);
                Self { page, bytes }
            }
        }

        fn place(&self) -> *mut Grown {
            self.page.wrapping_add(PAGE - self.bytes).cast()
        }

        fn words(&self) -> &[u64] {
            // SAFETY: `new` has written the words, and they are aligned to 8 bytes.
            unsafe { slice::from_raw_parts(self.place().cast(), self.bytes / 8) }
        }
    }

    impl Drop for BeforeAGuard {
        fn drop(&mut self) {
            // SAFETY: `new` has mapped these two pages, and nothing uses them any more.
            assert_eq!(unsafe { libc::munmap(self.page.cast(), 2 * PAGE) }, 0);
        }
    }

    /// Reads options from `words`. The first word has `struct_size` and `first`.
    fn read(words: &[u64]) -> Result<Grown> {
        let memory = BeforeAGuard::new(words);
        // SAFETY: the memory reaches to the end of a page; all sizes that are accepted are those of `words`.
        unsafe { options("options", memory.place()) }
    }

    const SEVEN: u64 = 7 << 32;

    #[test]
    fn a_struct_of_the_first_release_is_read_up_to_its_size() {
        let expected = Grown { struct_size: 16, first: 7, reserved: 0, later: 0 };
        assert_eq!(read(&[16 | SEVEN, 0]).unwrap(), expected);
    }

    #[test]
    fn a_struct_of_a_later_release_is_read_if_unknown_fields_are_0() {
        let expected = Grown { struct_size: 40, first: 7, reserved: 0, later: 9 };
        assert_eq!(read(&[40 | SEVEN, 0, 9, 0, 0]).unwrap(), expected);
        assert_eq!(read(&[24 | SEVEN, 0, 9]).unwrap(), Grown { struct_size: 24, ..expected });
        let failure = read(&[40 | SEVEN, 0, 9, 0, 1 << 56]).unwrap_err();
        assert!(failure.message.contains("offset 39 is 1;"), "{failure:?}");
        assert!(read(&[16 | SEVEN, 1]).is_err(), "a reserved byte");
    }

    #[test]
    fn sizes_of_no_version_are_refused_before_further_reads() {
        for size in [0, 3, 8, 15, 17, 20, 4097, 4104, 1 << 31, u32::MAX.into()] {
            let failure = read(&[size]).unwrap_err();
            assert!(failure.message.contains(&format!("struct_size {size};")), "{failure:?}");
        }
    }

    #[test]
    fn a_result_is_written_up_to_the_smaller_size() {
        let value = Grown { struct_size: 24, first: 1, reserved: 2, later: 3 };
        for (before, after) in [
            (&[16, 5][..], &[16 | 1 << 32, 2][..]),
            (&[24, 5, 5], &[24 | 1 << 32, 2, 3]),
            (&[40, 5, 5, 5, 5], &[40 | 1 << 32, 2, 3, 5, 5]),
        ] {
            let memory = BeforeAGuard::new(before);
            // SAFETY: the memory has `struct_size` bytes, to the end of a page.
            unsafe { OutStruct::new("out", memory.place()) }.unwrap().fill(value);
            assert_eq!(memory.words(), after);
        }
        let memory = BeforeAGuard::new(&[0]);
        // SAFETY: `struct_size` is readable.
        assert!(unsafe { OutStruct::new("out", memory.place()) }.is_err());
    }
}
