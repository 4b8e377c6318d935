//! The text for bug reports about this library and the libraries that it works with.

#[allow(non_camel_case_types, clippy::missing_safety_doc, reason = "C names; lib.rs says what all require")]
pub mod api;

use std::{
    cell::RefCell,
    ffi::{CStr, OsStr, c_char, c_int, c_void},
    fmt::{self, Write},
    mem,
    os::unix::ffi::OsStrExt,
};

use crate::{
    cpu::InstructionSet,
    ffi::{
        dynamic::{self, Loaded},
        error::Result,
    },
};

/// Longest text, in bytes.
const LIMIT: usize = 1000;

thread_local! {
    /// Text of the last call, with a NUL. It has no destructor, so it stays as long as the thread.
    static TEXT: RefCell<[u8; LIMIT + 1]> = const { RefCell::new([0; LIMIT + 1]) };
}

/// Text of a fixed size, and the number of bytes that are written.
struct Limited<'a>(&'a mut [u8; LIMIT + 1], usize);

impl Write for Limited<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let Self(place, length) = self;
        let cut = &text[..text.floor_char_boundary(LIMIT - *length)];
        place[*length..*length + cut.len()].copy_from_slice(cut.as_bytes());
        *length += cut.len();
        place[*length] = 0;
        if cut.len() == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

/// Library found at run time: name, beginning of the file's name, name of the version function, and how to call it.
type RuntimeLibrary =
    (&'static str, &'static str, &'static CStr, unsafe fn(*mut c_void) -> Option<(c_int, c_int, c_int)>);

const RUNTIME_LIBRARIES: [RuntimeLibrary; 3] = [
    ("CUDA driver", "libcuda.so", c"cuDriverGetVersion", |function| {
        // SAFETY: `report` passes the driver's function of this name, which has this type. Any call of it is allowed.
        let number = unsafe { one_number(function) }?;
        Some((number / 1000, number % 1000 / 10, 0))
    }),
    ("NCCL", "libnccl.so", c"ncclGetVersion", |function| {
        // SAFETY: `report` passes NCCL's function of this name, which has this type. Any call of it is allowed.
        let number = unsafe { one_number(function) }?;
        // Up to NCCL 2.8 the number has one digit less.
        let major = if number < 10000 { 1000 } else { 10000 };
        Some((number / major, number % major / 100, number % 100))
    }),
    ("NVRTC", "libnvrtc.so", c"nvrtcVersion", |function| {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: `report` passes NVRTC's function of this name, which has this type; the integers outlive the call.
        let code = unsafe {
            mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(function)(
                &mut major, &mut minor,
            )
        };
        (code == 0).then_some((major, minor, 0))
    }),
];

/// Returns the number that a function writes, if the function succeeds.
///
/// # Safety
/// `function` takes a pointer to an int and returns an int.
unsafe fn one_number(function: *mut c_void) -> Option<c_int> {
    let mut number = 0;
    // SAFETY: the caller promises this type; `number` outlives the call.
    let code =
        unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(function)(&mut number) };
    (code == 0).then_some(number)
}

/// Returns the text for a library of this version. It stays until this thread calls this again.
pub fn text(version: &CStr) -> Result<*const c_char> {
    let loaded = Loaded::list()?;
    Ok(TEXT.with_borrow_mut(|place| {
        place[0] = 0;
        // An error here means that the limit is reached. The text is what was written so far.
        let _ = report(&mut Limited(place, 0), version, &loaded);
        place.as_ptr().cast::<c_char>()
    }))
}

fn report(text: &mut impl Write, version: &CStr, loaded: &Loaded) -> fmt::Result {
    writeln!(text, "gradcodec {}, commit {}", shown(version), env!("GRADCODEC_COMMIT"))?;
    writeln!(text, "built by {} for {}", env!("GRADCODEC_COMPILER"), env!("GRADCODEC_TARGET"))?;
    let chosen = InstructionSet::check().map_or("none", |()| InstructionSet::chosen().name());
    write!(text, "instruction set: {chosen}, of")?;
    for set in InstructionSet::available() {
        write!(text, " {}", set.name())?;
    }
    for (name, file, function, version) in RUNTIME_LIBRARIES {
        write!(text, "\n{name}:")?;
        let mut found = false;
        for path in loaded.names().filter(|path| is_of(path, file)) {
            let Some(library) = dynamic::loaded(path) else { continue }; // closed meanwhile
            // SAFETY: `library` is open; `version` gets the function of the name that it was written for.
            let known = unsafe { dynamic::address(library, function).and_then(|function| version(function)) };
            // SAFETY: `library` was opened above. Others who have it open keep it.
            unsafe { libc::dlclose(library) };
            let separator = if found { "," } else { "" };
            match known {
                Some((major, minor, 0)) => write!(text, "{separator} {major}.{minor}")?,
                Some((major, minor, patch)) => write!(text, "{separator} {major}.{minor}.{patch}")?,
                None => write!(text, "{separator} of unknown version")?,
            }
            write!(text, " ({})", shown(path))?;
            found = true;
        }
        if !found {
            write!(text, " not loaded")?;
        }
    }
    writeln!(text)
}

/// Returns a text with U+FFFD for bytes that are not UTF-8. It allocates nothing, unlike to_string_lossy.
fn shown(text: &CStr) -> impl fmt::Display + '_ {
    OsStr::from_bytes(text.to_bytes()).display()
}

/// Returns true if the last component of a path begins with `file`.
fn is_of(path: &CStr, file: &str) -> bool {
    let path = path.to_bytes();
    let name = &path[path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1)..];
    name.starts_with(file.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_at_the_limit_and_at_a_character() {
        let mut place = [1; LIMIT + 1];
        assert!(Limited(&mut place, 0).write_str(&format!("x{}", "é".repeat(LIMIT))).is_err());
        let text = CStr::from_bytes_until_nul(&place).unwrap().to_str().unwrap();
        assert_eq!(text, format!("x{}", "é".repeat((LIMIT - 1) / 2)));
    }

    #[test]
    fn a_library_is_named_by_the_last_part_of_its_path() {
        let yes = [c"/usr/lib/libcuda.so.1", c"libcuda.so", c"/a/libcuda.so/libcuda.so.580.65"];
        let no = [c"/usr/lib/libcudart.so.13", c"", c"/opt/libcuda.so.1/x.so", c"/lib/xlibcuda.so.1"];
        assert!(yes.iter().all(|path| is_of(path, "libcuda.so")));
        assert!(!no.iter().any(|path| is_of(path, "libcuda.so")));
    }
}
