//! NVRTC: found when it is first asked for, its answers taken as the integers they are.
//!
//! cudarc declares the functions, and its declarations are held against ours at compile time. It does not make the
//! calls: it panics where the library is missing, and returns a Rust enum.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    fmt::Write as _,
    mem::MaybeUninit,
    ptr,
    sync::OnceLock,
};

use arrayvec::ArrayString;
use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};

use crate::{
    dynamic::{self, Loaded, table},
    error::{Error, Result, Status, error},
};

use super::{Compiled, Request, Target, found::Found, room};

/// The first that makes machine code and says for which cards.
const OLDEST: (c_int, c_int) = (11, 2);

const OUT_OF_MEMORY: c_int = 1;
const INVALID_OPTION: c_int = 5;
const COMPILATION: c_int = 6;
const BUILTIN_OPERATION_FAILURE: c_int = 7;

table! {
    /// The functions of NVRTC.
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

/// Apart from the table, for they do not answer an int, or are asked before there is one.
type GetErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type GetVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;

/// The names of the files that NVRTC's packages install, the newest first; the last one is a toolkit's.
pub(super) const FILES: [&CStr; 4] = [c"libnvrtc.so.13", c"libnvrtc.so.12", c"libnvrtc.so.11.2", c"libnvrtc.so"];

/// Where pip puts it, from the folder of Python packages.
pub(super) const IN_PACKAGES: [&str; 3] = [
    "/nvidia/cu13/lib/libnvrtc.so.13\0",
    "/nvidia/cuda_nvrtc/lib/libnvrtc.so.12\0",
    "/nvidia/cuda_nvrtc/lib/libnvrtc.so.11.2\0",
];

/// Where CUDA's installer puts it, whether or not the system looks there.
pub(super) const IN_TOOLKIT: &CStr = c"/usr/local/cuda/lib64/libnvrtc.so";

/// A library that the caller names, or none. As a number, to be shared between threads.
#[derive(Clone, Copy)]
pub struct Handle(usize);

/// What the search has found.
static FOUND: OnceLock<Library> = OnceLock::new();

impl Handle {
    pub const NONE: Self = Self(0);

    /// # Safety
    /// `handle` is NULL or came from dlopen, and stays open as long as this is used.
    pub unsafe fn of(handle: *mut c_void) -> Self {
        Self(handle.expose_provenance())
    }

    /// The one that is named; else the one that GRADCODEC_NVRTC names, that is loaded, or that is found.
    pub(super) fn library(self) -> Result<Library> {
        if self.0 != 0 {
            // SAFETY: it is open, as its maker promised.
            return unsafe { Library::of(ptr::with_exposed_provenance_mut(self.0)) };
        }
        match FOUND.get() {
            Some(library) => Ok(*library),
            // Two threads may find it side by side; one of the two equal tables stays.
            None => find().map(|library| *FOUND.get_or_init(|| library)),
        }
    }

    /// Whether NVRTC is there without a search.
    pub(super) fn is_at_hand(self) -> bool {
        self.0 != 0 || FOUND.get().is_some()
    }
}

/// NVRTC, as this process has it.
#[derive(Clone, Copy)]
pub(super) struct Library {
    functions: Functions,
    error_string: GetErrorString,
    version: (c_int, c_int),
}

impl Library {
    /// # Safety
    /// `library` is RTLD_DEFAULT or came from dlopen, and stays open as long as this is used.
    unsafe fn of(library: *mut c_void) -> Result<Self> {
        let missing = |name: &CStr| -> Error {
            error!(NvrtcUnavailable, "NVRTC has no {}: 11.2 or later is needed", name.to_string_lossy())
        };
        // SAFETY: the caller's promise; these are the functions' types by NVRTC's reference, and the places outlive the
        // call.
        unsafe {
            let address = |name| dynamic::address(library, name).ok_or_else(|| missing(name));
            let ask = std::mem::transmute::<*mut c_void, GetVersion>(address(c"nvrtcVersion")?);
            let error_string = std::mem::transmute::<*mut c_void, GetErrorString>(address(c"nvrtcGetErrorString")?);
            let mut version = (0, 0);
            // Before anything that an older one may lack.
            let code = ask(&mut version.0, &mut version.1);
            if code != 0 {
                let why = text(error_string(code));
                return Err(error!(NvrtcUnavailable, "nvrtcVersion: {} ({code})", why.to_string_lossy()));
            }
            if version < OLDEST {
                let (major, minor) = version;
                return Err(error!(NvrtcUnavailable, "NVRTC is of {major}.{minor}; 11.2 or later is needed"));
            }
            Ok(Self { functions: Functions::of(library).map_err(missing)?, error_string, version })
        }
    }

    /// What it is and what it knows.
    pub fn found(&self) -> Result<Found> {
        let mut count: c_int = 0;
        // SAFETY: the place outlives the call.
        let code = unsafe { (self.functions.nvrtcGetNumSupportedArchs)(&mut count) };
        self.check(code, "nvrtcGetNumSupportedArchs")?;
        let count = usize::try_from(count).unwrap_or(0);
        let mut levels: Vec<c_int> = Vec::new();
        levels
            .try_reserve_exact(count)
            .map_err(|_| error!(OutOfMemory, "a list of {count} compute capabilities could not be had"))?;
        levels.resize(count, 0);
        // SAFETY: room for as many as there are.
        let code = unsafe { (self.functions.nvrtcGetSupportedArchs)(levels.as_mut_ptr()) };
        self.check(code, "nvrtcGetSupportedArchs")?;
        // SAFETY: one of NVRTC's functions.
        let file = unsafe { file_of(self.functions.nvrtcCompileProgram as *mut c_void) }.unwrap_or_default().to_bytes();
        let mut copy = room(file.len() + 1)?;
        copy.extend_from_slice(file);
        // Just as much was reserved as the NUL at the end takes, too.
        Ok(Found { version: self.version, levels, file: CString::new(copy).unwrap_or_default() })
    }

    /// What the driver loads. The log is there in any case.
    pub fn compile(&self, request: &Request<'_>, target: &Target, log: &mut String) -> Result<Compiled> {
        let (source, name) = (with_nul("source", request.source)?, with_nul("name", request.name)?);
        let options = Options::new(request.options, target)?;
        // Only now: what lies on disk needs no companion.
        // SAFETY: one of NVRTC's functions.
        unsafe { load_builtins(self.functions.nvrtcCompileProgram as *mut c_void, self.version)? };
        let program = Program::new(self, &source, &name)?;
        // SAFETY: a program of this library, and as many options as are counted, all of which outlive the call.
        let code = unsafe {
            let starts = &options.starts;
            (self.functions.nvrtcCompileProgram)(program.program, starts.len() as c_int, starts.as_ptr())
        };
        let logged = program.log(log);
        if code != 0 {
            let failure = self.failure(code, "nvrtcCompileProgram");
            // What is wrong with the program is in the log; what is wrong with NVRTC may not be.
            let failure = match first_error(log) {
                Some(line) if failure.status == Status::Compile => error!(Compile, "{line}"),
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

    /// Turns what a call answered into a result.
    fn check(&self, code: c_int, call: &str) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.failure(code, call)) }
    }

    #[cold]
    fn failure(&self, code: c_int, call: &str) -> Error {
        // SAFETY: any code may be asked for; the text is NVRTC's, and stays.
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

/// What to compile to for a card, of the levels that are known.
pub(super) fn choose(card: c_int, levels: &[c_int]) -> Option<Target> {
    let best = levels.iter().copied().filter(|&level| level <= card).max()?;
    // A card runs machine code of a lower minor number, too, but not each: the driver can compile for all of them.
    Some(if best == card { Target::Machine(card) } else { Target::Virtual(best) })
}

/// The first line that says what is wrong.
fn first_error(log: &str) -> Option<&str> {
    log.lines().find(|line| is_error(line))
}

/// Whether a line is an error message. Its kind stands before the first colon or number that follows one:
/// `operation(2): error: ...`, `operation(1): warning #177-D: ...`, `ptxas fatal   : ...`. Lines of the program, which
/// newer versions put below a message, are indented.
fn is_error(line: &str) -> bool {
    let head = line.split('"').next().unwrap_or_default(); // before what it quotes of the program
    let kind = |(at, _)| match head[..at].trim_end().rsplit(' ').next() {
        Some("error" | "fatal") => Some(true),
        Some("warning" | "remark" | "note" | "info") => Some(false),
        _ => None,
    };
    !line.starts_with([' ', '\t']) && head.match_indices([':', '#']).find_map(kind) == Some(true)
}

/// A program of NVRTC's.
struct Program<'a> {
    library: &'a Library,
    program: nvrtcProgram,
}

/// A function that writes the size of something, and one that writes it.
type Size = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> c_int;

impl<'a> Program<'a> {
    /// Both texts end with a NUL.
    fn new(library: &'a Library, source: &[u8], name: &[u8]) -> Result<Self> {
        let mut program = ptr::null_mut();
        // SAFETY: texts that end with a NUL, no headers, and a place that outlives the call.
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

    /// Something that the program has.
    fn bytes(&self, size: Size, size_name: &str, get: Get, get_name: &str) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: a program of this library, and a place that outlives the call.
        self.library.check(unsafe { size(self.program, &mut bytes) }, size_name)?;
        let mut found = room(bytes)?;
        found.resize(bytes, 0);
        // SAFETY: as above, and room for as many bytes as it has.
        self.library.check(unsafe { get(self.program, found.as_mut_ptr().cast()) }, get_name)?;
        Ok(found)
    }

    /// What NVRTC says of the program.
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
        // SAFETY: a program of this library that nobody else has. Nobody can be told of a failure.
        unsafe { (self.library.functions.nvrtcDestroyProgram)(&mut self.program) };
    }
}

/// Text of any bytes: where they are not UTF-8, those beyond ASCII are replaced. In place, for there may be no memory.
fn readable(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|failure| {
        let mut bytes = failure.into_bytes();
        bytes.iter_mut().filter(|byte| !byte.is_ascii()).for_each(|byte| *byte = b'?');
        String::from_utf8(bytes).unwrap_or_default() // ASCII is UTF-8
    })
}

/// Options, one after the other, each with its NUL, and where each starts.
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
        let mut starts = Vec::new();
        starts
            .try_reserve_exact(options.len() + 1)
            .map_err(|_| error!(OutOfMemory, "a list of {} options could not be had", options.len() + 1))?;
        for option in all() {
            refuse_nul("options", option)?;
            starts.push(texts.as_ptr().wrapping_add(texts.len()).cast()); // all of them fit, so nothing moves
            texts.extend_from_slice(option.as_bytes());
            texts.push(0);
        }
        Ok(Self { _texts: texts, starts })
    }
}

/// A copy with the NUL that C wants.
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

/// NVRTC's text, which may be missing.
///
/// # Safety
/// `text` is NULL or a text that stays.
unsafe fn text(text: *const c_char) -> &'static CStr {
    // SAFETY: the caller's promise.
    if text.is_null() { c"an unknown error" } else { unsafe { CStr::from_ptr(text) } }
}

/// NVRTC where no caller names it.
fn find() -> Result<Library> {
    if let Some(named) = super::variable(c"GRADCODEC_NVRTC") {
        if !named.to_bytes().starts_with(b"/") {
            return Err(error!(
                NvrtcUnavailable,
                "GRADCODEC_NVRTC is {}: the whole path of a file expected",
                named.to_string_lossy()
            ));
        }
        let library = open(named).ok_or_else(|| {
            // SAFETY: a dlopen of this thread failed just now, so dlerror has its reason: text until the next dl call.
            let reason = unsafe { CStr::from_ptr(libc::dlerror()) };
            error!(NvrtcUnavailable, "GRADCODEC_NVRTC could not be loaded: {}", reason.to_string_lossy())
        })?;
        // SAFETY: it is never closed.
        return unsafe { Library::of(library) };
    }
    let loaded = Loaded::list()?;
    // One that is too old does not end the search.
    let mut useless = None;
    let mut usable = |library: *mut c_void| {
        // SAFETY: RTLD_DEFAULT, or a handle that is never closed.
        unsafe { Library::of(library) }.map_err(|why| useless = Some(why)).ok()
    };
    if let Some(found) = loaded_ones(&loaded).find_map(&mut usable) {
        return Ok(found);
    }
    if is_visible()
        && let Some(found) = usable(libc::RTLD_DEFAULT)
    {
        return Ok(found);
    }
    if let Some(found) = FILES.iter().filter_map(|name| open(name)).find_map(&mut usable) {
        return Ok(found);
    }
    if let Some(found) = of_pip(&loaded, &mut usable)?.or_else(|| open(IN_TOOLKIT).and_then(&mut usable)) {
        return Ok(found);
    }
    Err(useless.unwrap_or_else(|| {
        error!(
            NvrtcUnavailable,
            "NVRTC was not found: no library that is loaded is NVRTC, the system finds no libnvrtc.so.13, .so.12, \
             .so.11.2 or .so, pip has put none into the {} folders of Python packages that this process uses, and there \
             is no {}; GRADCODEC_NVRTC may say where it is",
            packages(&loaded).count(),
            IN_TOOLKIT.to_string_lossy()
        )
    }))
}

fn open(file: &CStr) -> Option<*mut c_void> {
    // SAFETY: loading NVRTC runs its initializers, as in every program that uses it.
    let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) };
    (!library.is_null()).then_some(library)
}

/// The file that a function is in.
///
/// # Safety
/// `function` is one of a library that is loaded, and stays so.
unsafe fn file_of(function: *mut c_void) -> Option<&'static CStr> {
    let mut about = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the place outlives the call, and zeros are a value of it.
    let (found, about) = unsafe { (libc::dladdr(function, about.as_mut_ptr()), about.assume_init()) };
    // SAFETY: the name of a library that stays loaded.
    (found != 0 && !about.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(about.dli_fname) })
}

/// NVRTC opens this companion by name when it first compiles, and finds it where it is loaded already; or where the system
/// looks, which is often not where NVRTC is. A failure is NVRTC's to tell.
///
/// # Safety
/// `function` is one of NVRTC's.
unsafe fn load_builtins(function: *mut c_void, (major, minor): (c_int, c_int)) -> Result<()> {
    // SAFETY: the caller's promise.
    let Some(file) = (unsafe { file_of(function) }) else { return Ok(()) };
    let file = file.to_bytes();
    let folder = &file[..file.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1)];
    let mut name = ArrayString::<60>::new();
    let _ = write!(name, "libnvrtc-builtins.so.{major}.{minor}\0"); // it fits
    let mut path = room(folder.len() + name.len())?;
    path.extend_from_slice(folder);
    path.extend_from_slice(name.as_bytes());
    // SAFETY: a path that ends with a NUL; loading it runs its initializers, as NVRTC does.
    unsafe { libc::dlopen(path.as_ptr().cast(), libc::RTLD_NOW) };
    Ok(())
}

/// Whether a search would first find one that is loaded.
pub(super) fn is_loaded(loaded: &Loaded) -> bool {
    loaded_ones(loaded).next().is_some() || is_visible()
}

/// Whether it is within a library or program of another name.
fn is_visible() -> bool {
    // SAFETY: RTLD_DEFAULT needs no library.
    unsafe { dynamic::address(libc::RTLD_DEFAULT, c"nvrtcVersion") }.is_some()
}

/// Each NVRTC that is loaded, also where others do not see its functions. None is closed, whoever else closes it.
fn loaded_ones(loaded: &Loaded) -> impl Iterator<Item = *mut c_void> {
    loaded.names().filter_map(|file| {
        let (_, name) = file.to_str().ok()?.rsplit_once('/')?;
        if !name.starts_with("libnvrtc") || name.starts_with("libnvrtc-builtins") {
            return None;
        }
        // SAFETY: nothing is loaded that is not.
        let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        (!library.is_null()).then_some(library)
    })
}

/// NVRTC as pip installs it, in a folder of Python packages that this process uses.
fn of_pip(loaded: &Loaded, mut usable: impl FnMut(*mut c_void) -> Option<Library>) -> Result<Option<Library>> {
    let mut path = Vec::new();
    for file in IN_PACKAGES {
        for folder in packages(loaded) {
            path.clear();
            let bytes = folder.len() + file.len();
            path.try_reserve(bytes).map_err(|_| error!(OutOfMemory, "{bytes} bytes for a path could not be had"))?;
            path.extend_from_slice(folder);
            path.extend_from_slice(file.as_bytes());
            if let Some(found) = CStr::from_bytes_with_nul(&path).ok().and_then(open).and_then(&mut usable) {
                return Ok(Some(found));
            }
        }
    }
    Ok(None)
}

/// The folders of Python packages that libraries of this process come from, each once.
pub(super) fn packages(loaded: &Loaded) -> impl Iterator<Item = &[u8]> {
    let folders = || loaded.names().filter_map(|file| packages_of(file.to_bytes()));
    let is_first = move |&(at, folder): &(usize, &[u8])| !folders().take(at).any(|before| before == folder);
    folders().enumerate().filter(is_first).map(|(_, folder)| folder)
}

/// The folder of Python packages that a file is in.
fn packages_of(file: &[u8]) -> Option<&[u8]> {
    ["/site-packages/", "/dist-packages/"].iter().find_map(|name| {
        let at = file.windows(name.len()).rposition(|window| window == name.as_bytes())?;
        Some(&file[..at + name.len() - 1])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_gets_its_machine_code_or_the_newest_ptx_that_it_can_read() {
        let levels = [90, 50, 75, 86];
        for (card, expected) in [
            (90, Some(Target::Machine(90))),
            (75, Some(Target::Machine(75))),
            (121, Some(Target::Virtual(90))),
            (89, Some(Target::Virtual(86))),
            (52, Some(Target::Virtual(50))),
            (49, None),
        ] {
            assert_eq!(choose(card, &levels), expected, "{card}");
        }
        assert_eq!(choose(90, &[]), None);
    }

    #[test]
    fn the_first_error_is_found() {
        // As NVRTC 12.0 and 12.8 and their ptxas write them; the order of two messages is not that of the lines.
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
    fn folders_of_packages_are_found_once_each() {
        let names = b"\0/usr/lib/libc.so.6\0/a/site-packages/torch/lib/libtorch.so\0/a/site-packages/numpy/x.so\0\
            /b/dist-packages/y.so\0/c/site-packages/d/site-packages/z.so\0/site-packages\0";
        let loaded = Loaded::of_names(names);
        let found: Vec<_> = packages(&loaded).map(|folder| std::str::from_utf8(folder).unwrap()).collect();
        assert_eq!(found, ["/a/site-packages", "/b/dist-packages", "/c/site-packages/d/site-packages"]);
    }

    #[test]
    fn a_log_of_any_bytes_is_text() {
        assert_eq!(readable("d\u{e9}j\u{e0}".into()), "d\u{e9}j\u{e0}");
        assert_eq!(readable(b"d\xe9j\xc3\xa0".to_vec()), "d?j??");
    }

    #[test]
    fn options_lie_one_after_the_other() {
        let options = Options::new(&["-a", "", "-b=c"], &Target::Virtual(90)).unwrap();
        // SAFETY: texts that end with a NUL, as long as the options are there.
        let texts = options.starts.iter().map(|&start| unsafe { CStr::from_ptr(start) });
        assert!(texts.eq([c"-a", c"", c"-b=c", c"--gpu-architecture=compute_90"]));
        let refused = Options::new(&["-a", "b\0"], &Target::Machine(90)).err().unwrap();
        assert_eq!((refused.status, &refused.message[..]), (Status::InvalidArgument, "options: a NUL at byte 1 of 2"));
    }
}
