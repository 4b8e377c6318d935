//! Calls of NVRTC, whose results stay integers.
//!
//! cudarc declares the functions, and its declarations are checked against ours at compile time. It does not make the
//! calls: it panics if the library is missing, and returns a Rust enum.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fmt::Write as _,
    ptr,
};

use arrayvec::ArrayString;
use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};

use crate::ffi::{
    dynamic::{self, table},
    error::{Error, Result, Status, error},
    fallible,
};

use super::{Compiled, Request, room};

/// Oldest version that generates machine code and lists the GPUs that it supports.
const OLDEST: (c_int, c_int) = (11, 2);

const OUT_OF_MEMORY: c_int = 1;
const INVALID_OPTION: c_int = 5;
const COMPILATION: c_int = 6;
const BUILTIN_OPERATION_FAILURE: c_int = 7;

table! {
    /// Functions of NVRTC.
    #[derive(Clone, Copy)]
    Functions, declared in sys to answer nvrtcResult,
    required {
        nvrtcGetNumSupportedArchs(*mut c_int);
        nvrtcGetSupportedArchs(*mut c_int);
        nvrtcCreateProgram(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        );
        nvrtcDestroyProgram(*mut nvrtcProgram);
        nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
        nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
        nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
        nvrtcGetPTXSize(nvrtcProgram, *mut usize);
        nvrtcGetPTX(nvrtcProgram, *mut c_char);
        nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
        nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
    }
    optional {}
}

/// Types of functions outside the table: one does not return an int, the other is called before the table exists.
type GetErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type GetVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;

/// NVRTC library of this process.
#[derive(Clone, Copy)]
pub struct Library {
    functions: Functions,
    error_string: GetErrorString,
    version: (c_int, c_int),
    /// Path of the library as the dynamic loader reports it; "" if it reports none.
    file: &'static CStr,
}

impl Library {
    /// # Safety
    /// `library` is RTLD_DEFAULT or came from dlopen, and stays open as long as the result is used.
    pub unsafe fn of(library: *mut c_void) -> Result<Self> {
        let missing = |name: &CStr| -> Error {
            error!(NvrtcUnavailable, "NVRTC has no {}: 11.2 or later is needed", name.to_string_lossy())
        };
        // SAFETY: `library` is open, so dlsym returns its functions, which have these types by NVRTC's reference;
        // `version` outlives the call.
        unsafe {
            let address = |name| dynamic::address(library, name).ok_or_else(|| missing(name));
            let ask = std::mem::transmute::<*mut c_void, GetVersion>(address(c"nvrtcVersion")?);
            let error_string = std::mem::transmute::<*mut c_void, GetErrorString>(address(c"nvrtcGetErrorString")?);
            let mut version = (0, 0);
            // The version is checked before functions are looked up that older versions lack.
            let code = ask(&mut version.0, &mut version.1);
            if code != 0 {
                let why = text(error_string(code));
                return Err(error!(NvrtcUnavailable, "nvrtcVersion: {} ({code})", why.to_string_lossy()));
            }
            if version < OLDEST {
                let (major, minor) = version;
                return Err(error!(NvrtcUnavailable, "NVRTC is of {major}.{minor}; 11.2 or later is needed"));
            }
            let functions = Functions::of(library).map_err(missing)?;
            let file = dynamic::file_of(functions.nvrtcCompileProgram as *mut c_void).unwrap_or_default();
            Ok(Self { functions, error_string, version, file })
        }
    }

    /// Returns the path of the library.
    pub fn file(&self) -> &'static CStr {
        self.file
    }

    /// Returns the target for a device: machine code if NVRTC supports the device, else the newest PTX that it can run.
    fn target(&self, (major, minor): (u32, u32)) -> Result<Target> {
        let levels = self.levels()?;
        let device = major.saturating_mul(10).saturating_add(minor);
        choose(c_int::try_from(device).unwrap_or(c_int::MAX), &levels).ok_or_else(|| {
            let ((newest, _), lowest) = (self.version, levels.iter().min().copied().unwrap_or(0));
            error!(
                UnsupportedDevice,
                "NVRTC {newest} does not compile for compute capability {major}.{minor}; {}.{} is the lowest that it \
                 knows",
                lowest / 10,
                lowest % 10
            )
        })
    }

    /// Returns the compute capabilities for which NVRTC generates machine code: 90 for 9.0.
    fn levels(&self) -> Result<Vec<c_int>> {
        let mut count: c_int = 0;
        // SAFETY: `count` outlives the call.
        let code = unsafe { (self.functions.nvrtcGetNumSupportedArchs)(&mut count) };
        self.check(code, "nvrtcGetNumSupportedArchs")?;
        let count = usize::try_from(count).unwrap_or(0);
        let mut levels: Vec<c_int> = fallible::list(count, "compute capabilities")?;
        levels.resize(count, 0);
        // SAFETY: `levels` has room for `count` numbers, as many as NVRTC has announced.
        let code = unsafe { (self.functions.nvrtcGetSupportedArchs)(levels.as_mut_ptr()) };
        self.check(code, "nvrtcGetSupportedArchs")?;
        Ok(levels)
    }

    /// Compiles a request to code that the driver loads. `log` receives NVRTC's output, also if the compilation fails.
    pub fn compile(&self, request: &Request<'_>, log: &mut String) -> Result<Compiled> {
        let target = self.target(request.capability)?;
        let (source, name) = (with_nul("source", request.source)?, with_nul("name", request.name)?);
        let options = Options::new(request.options, &target)?;
        // Code from disk does not need the builtins, so they are loaded only here.
        self.load_builtins()?;
        // SAFETY: `with_nul` ends both texts with a NUL.
        let program = unsafe { Program::new(self, &source, &name)? };
        // SAFETY: the program is of this library; the options are as many as `starts` has, and outlive the call.
        let code = unsafe {
            let starts = &options.starts;
            (self.functions.nvrtcCompileProgram)(program.program, starts.len() as c_int, starts.as_ptr())
        };
        let logged = program.log(log);
        if code != 0 {
            let failure = self.failure(code, "nvrtcCompileProgram");
            // The log has all errors of the program, but not always those of NVRTC.
            let failure = match first_error(log) {
                Some(line) if failure.status == Status::Compile => {
                    let name = request.name;
                    // Some versions print the name, and so do errors outside of the user's texts.
                    if line.starts_with(name) { error!(Compile, "{line}") } else { error!(Compile, "{name}: {line}") }
                }
                _ => failure,
            };
            return if [INVALID_OPTION, COMPILATION].contains(&code) { Ok(Err(failure.message)) } else { Err(failure) };
        }
        logged?;
        let Functions { nvrtcGetCUBINSize, nvrtcGetCUBIN, nvrtcGetPTXSize, nvrtcGetPTX, .. } = self.functions;
        let code = match target {
            Target::Machine(_) => program.bytes(nvrtcGetCUBINSize, "nvrtcGetCUBINSize", nvrtcGetCUBIN, "nvrtcGetCUBIN"),
            Target::Virtual(_) => program.bytes(nvrtcGetPTXSize, "nvrtcGetPTXSize", nvrtcGetPTX, "nvrtcGetPTX"),
        };
        code.map(Ok)
    }

    /// Loads the builtins library from NVRTC's folder. NVRTC opens this library by name when it first compiles, and
    /// finds it if it is loaded; the system's search path often lacks the folder. NVRTC reports a failure.
    fn load_builtins(&self) -> Result<()> {
        let (file, (major, minor)) = (self.file.to_bytes(), self.version);
        let folder = &file[..file.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1)];
        let mut name = ArrayString::<60>::new();
        let _ = write!(name, "libnvrtc-builtins.so.{major}.{minor}\0"); // it fits
        let mut path = room(folder.len() + name.len())?;
        path.extend_from_slice(folder);
        path.extend_from_slice(name.as_bytes());
        if let (false, Ok(path)) = (file.is_empty(), CStr::from_bytes_with_nul(&path)) {
            dynamic::load(path);
        }
        Ok(())
    }

    /// Converts a call's code to a result.
    fn check(&self, code: c_int, call: &str) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.failure(code, call)) }
    }

    #[cold]
    fn failure(&self, code: c_int, call: &str) -> Error {
        // SAFETY: NVRTC has a text for every code, which stays valid as long as NVRTC is loaded.
        let name = unsafe { text((self.error_string)(code)) };
        let (status, consequence) = match code {
            OUT_OF_MEMORY => (Status::OutOfMemory, ""),
            BUILTIN_OPERATION_FAILURE => {
                (Status::NvrtcUnavailable, "; libnvrtc-builtins of the same version must lie beside NVRTC")
            }
            _ => (Status::Compile, ""),
        };
        Error::new(status, format_args!("{call}: {} ({code}){consequence}", name.to_string_lossy()))
    }
}

/// Target of a compilation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// Machine code of a compute capability: 90 for 9.0.
    Machine(i32),
    /// PTX of a compute capability.
    Virtual(i32),
}

/// Chooses the target for a device among the compute capabilities that NVRTC supports.
fn choose(device: c_int, levels: &[c_int]) -> Option<Target> {
    let best = levels.iter().copied().filter(|&level| level <= device).max()?;
    // Machine code of a lower minor version also runs, with exceptions; the driver can compile PTX for all devices.
    Some(if best == device { Target::Machine(device) } else { Target::Virtual(best) })
}

/// Returns the first line that is an error message.
fn first_error(log: &str) -> Option<&str> {
    log.lines().find(|line| is_error(line))
}

/// Returns true if a line is an error message. The first kind, such as error, that precedes a colon or number sign
/// counts: `operation(2): error: ...`, `operation(1): warning #177-D: ...`, `ptxas fatal   : ...`. Below a message,
/// newer versions print lines of the program, which are indented.
fn is_error(line: &str) -> bool {
    let head = line.split('"').next().unwrap_or_default(); // the part before a quotation of the program
    let kind = |(at, _)| match head[..at].trim_end().rsplit(' ').next() {
        Some("error" | "fatal") => Some(true),
        Some("warning" | "remark" | "note" | "info") => Some(false),
        _ => None,
    };
    !line.starts_with([' ', '\t']) && head.match_indices([':', '#']).find_map(kind) == Some(true)
}

/// Program of NVRTC.
struct Program<'a> {
    library: &'a Library,
    program: nvrtcProgram,
}

/// Types of a function that writes the size of a result, and of one that writes the result.
type Size = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> c_int;

impl<'a> Program<'a> {
    /// Creates a program.
    ///
    /// # Safety
    /// Both texts end with a NUL.
    unsafe fn new(library: &'a Library, source: &[u8], name: &[u8]) -> Result<Self> {
        let mut program = ptr::null_mut();
        // SAFETY: the texts end with a NUL, as the caller promises, there are no headers, and `program` outlives the call.
        let code = unsafe {
            (library.functions.nvrtcCreateProgram)(
                &mut program,
                source.as_ptr().cast(),
                name.as_ptr().cast(),
                0,
                ptr::null(),
                ptr::null(),
            )
        };
        library.check(code, "nvrtcCreateProgram")?;
        Ok(Self { library, program })
    }

    /// Returns a result of the program, through the functions that write its size and its bytes.
    fn bytes(&self, size: Size, size_name: &str, get: Get, get_name: &str) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is of this library, and `bytes` outlives the call.
        self.library.check(unsafe { size(self.program, &mut bytes) }, size_name)?;
        let mut found = room(bytes)?;
        found.resize(bytes, 0);
        // SAFETY: `found` has room for as many bytes as the library has announced.
        self.library.check(unsafe { get(self.program, found.as_mut_ptr().cast()) }, get_name)?;
        Ok(found)
    }

    /// Writes NVRTC's output for the program to `log`.
    fn log(&self, log: &mut String) -> Result<()> {
        let Functions { nvrtcGetProgramLogSize, nvrtcGetProgramLog, .. } = self.library.functions;
        let mut bytes =
            self.bytes(nvrtcGetProgramLogSize, "nvrtcGetProgramLogSize", nvrtcGetProgramLog, "nvrtcGetProgramLog")?;
        bytes.truncate(bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len()));
        *log = readable(bytes);
        Ok(())
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is of this library, and nothing else uses it. A failure cannot be returned.
        unsafe { (self.library.functions.nvrtcDestroyProgram)(&mut self.program) };
    }
}

/// Converts any bytes to text without allocating: if they are not UTF-8, every byte beyond ASCII becomes '?'.
fn readable(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|failure| {
        let mut bytes = failure.into_bytes();
        bytes.iter_mut().filter(|byte| !byte.is_ascii()).for_each(|byte| *byte = b'?');
        String::from_utf8(bytes).unwrap_or_default() // ASCII is UTF-8
    })
}

/// Options in one buffer, each with its NUL, and the address of each.
struct Options {
    _texts: Vec<u8>,
    starts: Vec<*const c_char>,
}

impl Options {
    fn new(options: &[&str], target: &Target) -> Result<Self> {
        let (prefix, level) = match target {
            Target::Machine(level) => ("sm_", level),
            Target::Virtual(level) => ("compute_", level),
        };
        let mut architecture = ArrayString::<40>::new();
        let _ = write!(architecture, "--gpu-architecture={prefix}{level}"); // it fits
        let all = || options.iter().copied().chain([&architecture[..]]);
        let mut texts = room(all().map(|option| option.len() + 1).sum())?;
        let mut starts = fallible::list(options.len() + 1, "options")?;
        for option in all() {
            refuse_nul("options", option)?;
            starts.push(texts.as_ptr().wrapping_add(texts.len()).cast()); // all of them fit, so nothing moves
            texts.extend_from_slice(option.as_bytes());
            texts.push(0);
        }
        Ok(Self { _texts: texts, starts })
    }
}

/// Returns a copy of a text with the NUL that C needs.
fn with_nul(name: &str, text: &str) -> Result<Vec<u8>> {
    refuse_nul(name, text)?;
    let mut copy = room(text.len() + 1)?;
    copy.extend_from_slice(text.as_bytes());
    copy.push(0);
    Ok(copy)
}

fn refuse_nul(name: &str, text: &str) -> Result<()> {
    match text.bytes().position(|byte| byte == 0) {
        Some(at) => Err(error!(InvalidArgument, "{name}: a NUL at byte {at} of {}", text.len())),
        None => Ok(()),
    }
}

/// Returns a text of NVRTC, or a substitute for NULL.
///
/// # Safety
/// `text` is NULL, or ends with a NUL and stays valid.
unsafe fn text(text: *const c_char) -> &'static CStr {
    // SAFETY: a text that is not NULL ends with a NUL and stays valid, as the caller promises.
    if text.is_null() { c"an unknown error" } else { unsafe { CStr::from_ptr(text) } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_gets_its_machine_code_or_the_newest_supported_ptx() {
        let levels = [90, 50, 75, 86];
        for (gpu, expected) in [
            (90, Some(Target::Machine(90))),
            (75, Some(Target::Machine(75))),
            (121, Some(Target::Virtual(90))),
            (89, Some(Target::Virtual(86))),
            (52, Some(Target::Virtual(50))),
            (49, None),
        ] {
            assert_eq!(choose(gpu, &levels), expected, "{gpu}");
        }
        assert_eq!(choose(90, &[]), None);
    }

    #[test]
    fn the_first_error_is_found() {
        // Messages of NVRTC 12.0 and 12.8 and their ptxas; two messages are not in the order of the program's lines.
        let warning = "operation(3): warning #177-D: variable \"error\" was declared but never referenced\n  \
            int error = 3;  // ): error: not this\n      ^\n\n\
            Remark: The warnings can be suppressed with \"-diag-suppress <warning-number>\"\n\n";
        let directive = "k(1): warning #1105-D: #warning directive: error: x\n  #warning error: x\n   ^\n\n";
        let deprecated = "operation(3): warning #1444-D: variable \"w\" was declared deprecated (\"an error: a\")\n  \
            x[0] = w;\n         ^\noperation(3): note #3287-D: because of a \"deprecated\" attribute\n\n";
        let macro_of_12_0 = "operation(1): warning: variable \"error\" was declared but never referenced\n\n";
        let info = "ptxas info    : 0 bytes gmem\nptxas info    : (C7510) Potential error: wgmma\n";
        let end = "1 error detected in the compilation of \"error: kernel\".\n";
        for expected in [
            "operation(2): error: identifier \"q\" is undefined",
            "error_feedback: operation(2): error: identifier \"q\" is undefined",
            "operation(1): error #20: identifier \"q\" is undefined",
            "operation(1): error: static assertion failed with \"a warning: b\"",
            "k(1): catastrophic error: cannot open source file \"nothing.h\"",
            "k(1): catastrophic error: #error directive: hello",
            "nvrtc: error: unrecognized option -q found",
            "nvrtc: error: invalid value for --gpu-architecture (-arch)",
            "ptxas application ptx input, line 23; error   : Not a name of any known instruction: 'nonsense'",
            "ptxas error   : Entry function 'k' uses too much shared data (0x61a80 bytes, 0xc000 max)",
            "ptxas fatal   : Unresolved extern function '_Z1fv'",
            "error: what",
        ] {
            for before in ["", warning, directive, deprecated, macro_of_12_0, info, end] {
                let log = format!("{before}{expected}\n  x[0] = q;\n         ^\n\n{warning}{end}");
                assert_eq!(first_error(&log), Some(expected), "{log}");
            }
        }
        for log in [String::new(), format!("{warning}{directive}{deprecated}{macro_of_12_0}{info}{end}")] {
            assert_eq!(first_error(&log), None, "{log}");
        }
    }

    #[test]
    fn a_log_of_any_bytes_is_text() {
        assert_eq!(readable("d\u{e9}j\u{e0}".into()), "d\u{e9}j\u{e0}");
        assert_eq!(readable(b"d\xe9j\xc3\xa0".to_vec()), "d?j??");
    }

    #[test]
    fn options_are_adjacent() {
        let options = Options::new(&["-a", "", "-b=c"], &Target::Virtual(90)).unwrap();
        // SAFETY: the texts end with a NUL, and `options` outlives them.
        let texts = options.starts.iter().map(|&start| unsafe { CStr::from_ptr(start) });
        assert!(texts.eq([c"-a", c"", c"-b=c", c"--gpu-architecture=compute_90"]));
        let refused = Options::new(&["-a", "b\0"], &Target::Machine(90)).err().unwrap();
        assert_eq!((refused.status, &refused.message[..]), (Status::InvalidArgument, "options: a NUL at byte 1 of 2"));
    }
}
