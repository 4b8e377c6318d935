//! The headers are generated from src/capi.rs and the sources named `api`, and tests/signatures.rs from
//! tests/abi/functions.h and this version's tests/abi/gradcodec-*.abi. All are checked in, and these tests compare them.
//! `make header` runs the tests with GRADCODEC_WRITE set: then they write the files instead.

use std::{ffi::CStr, fs, path::Path, process::Command, sync::OnceLock};

use crate::{declarations, loader, promises};

/// Sections in the order of the header, each with the sources of its declarations; the `//!` text of the last source
/// begins the section.
const SECTIONS: [&[&str]; 16] = [
    &["src/ffi/error.rs", "src/ffi/api.rs"],
    &["src/codec/plan/mod.rs", "src/codec/api.rs"],
    &["src/comm/api/comm.rs"],
    &["src/comm/allreduce.rs", "src/comm/api/allreduce.rs"],
    &["src/comm/api/nccl.rs"],
    &["src/comm/api/peers.rs"],
    &["src/comm/api/hierarchical.rs"],
    &["src/bits/plan.rs", "src/bits/api.rs"],
    &["src/bits/signs/api.rs"],
    &["src/device/api/tensors.rs", "src/dlpack/api.rs"],
    &["src/copy/api.rs"],
    &["src/share/api.rs"],
    &["src/jit/api.rs"],
    &["src/cpu/api.rs"],
    &["src/device/api/devices.rs"],
    &["src/about/api.rs"],
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|why| panic!("{path}: {why}"))
}

/// Returns the `//!` text of a source as a comment of the header, in which code is indented instead of fenced.
fn section_text(path: &str) -> String {
    let mut comment = String::from("/*\n");
    let mut indent = "";
    for line in read(path).lines().map_while(|line| line.strip_prefix("//!")) {
        if line.trim_start().starts_with("```") {
            indent = if indent.is_empty() { "    " } else { "" };
        } else {
            comment += format!(" *{indent}{line}").trim_end();
            comment += "\n";
        }
    }
    comment + " */\n"
}

/// Returns a source for cbindgen: names are exported without condition, and "# Safety", the last part of the
/// documentation, is left out. That part is for Rust; the rules at the top of the header are for C.
fn for_cbindgen(path: &str) -> String {
    let mut text = String::new();
    let mut in_safety = false;
    for line in read(path).lines() {
        let documentation = line.trim_start().starts_with("///");
        in_safety = documentation && (in_safety || line.trim_start() == "/// # Safety");
        if !in_safety {
            text += &line.replace("#[cfg_attr(feature = \"capi\", unsafe(no_mangle))]", "#[unsafe(no_mangle)]");
            text += "\n";
        }
    }
    text.replace("///\n#[", "#[")
}

fn declarations(sources: &[&str]) -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut builder =
        cbindgen::Builder::new().with_config(cbindgen::Config::from_file(root().join("cbindgen.toml")).unwrap());
    for path in sources {
        let copy = folder.join(path.replace('/', "_"));
        fs::write(&copy, for_cbindgen(path)).unwrap();
        builder = builder.with_src(copy);
    }
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    // cbindgen names the constants GC_DECODE_* after their enum. The enum must not share the name of the function
    // gc_decode: Sphinx, like languages that keep enums and functions in one namespace, refuses a second declaration.
    let text = String::from_utf8(text).unwrap().replace("enum gc_decode {", "enum gc_decode_mode {");
    // bindgen evaluates numbers and their sums, but not the definition of INT64_MIN in <stdint.h>.
    let text = text.replace("INT64_MIN", "(-9223372036854775807LL - 1)").replace("INT32_MIN", "(-2147483647 - 1)");
    let mut text = with_typedefs(&tidy(text.trim_matches('\n')));
    let end = "} gc_codec_options_t;";
    text = text.replace(end, &format!("{end}\n\n{INITIALIZER}"));
    text + "\n"
}

/// The macro has all fields, since -Wextra warns of fields that are missing.
const INITIALIZER: &str = "/** Initializes gc_codec_options_t: set `codec` and what else you need afterwards. */
#define GC_CODEC_OPTIONS_INIT                                                                                        \\
    {sizeof(gc_codec_options_t), 0, {(DLDeviceType)0, 0}, {0, 0, 0}, {0, 0, 0}, 0, 0, 0, 0, NULL, 0, 0, 0, 0, NULL, \\
     0, {0}}";

/// Adds a typedef of the same name to our structs, which all other declarations use. No style of cbindgen's does that
/// and leaves the enums without one.
fn with_typedefs(text: &str) -> String {
    let (mut lines, mut open) = (Vec::new(), None);
    for line in text.lines() {
        lines.push(match (line.strip_prefix("struct gc_"), open) {
            (Some(rest), _) => match rest.split_once(" {") {
                Some((name, _)) => {
                    open = Some(name);
                    format!("typedef {line}")
                }
                None => format!("typedef {} gc_{rest}", line.trim_end_matches(';')),
            },
            (None, Some(name)) if line == "};" => {
                open = None;
                format!("}} gc_{name};")
            }
            _ => line.replace("struct gc_", "gc_"),
        });
    }
    lines.join("\n")
}

#[test]
fn a_struct_has_a_typedef_and_is_named_by_it() {
    let text = "struct gc_a_t;\n\nstruct gc_x_t {\n    struct gc_a_t *of;\n};\n\nenum gc_e {\n    GC_E,\n};\n\
                void gc_f(const struct gc_x_t *x,\n          struct DLManagedTensorVersioned *y);";
    let expected = "typedef struct gc_a_t gc_a_t;\n\ntypedef struct gc_x_t {\n    gc_a_t *of;\n} gc_x_t;\n\n\
                    enum gc_e {\n    GC_E,\n};\n\
         void gc_f(const gc_x_t *x,\n          struct DLManagedTensorVersioned *y);";
    assert_eq!(with_typedefs(text), expected);
}

/// Puts cbindgen's comments in the header's style: a comment of one line is on one line. They begin with two stars:
/// bindgen, clangd, Doxygen and others read no others.
fn tidy(text: &str) -> String {
    let (mut tidied, mut comment) = (Vec::new(), None::<Vec<&str>>);
    for line in text.lines() {
        let indent = &line[..line.len() - line.trim_start().len()];
        match (line.trim(), &mut comment) {
            ("/**", None) => comment = Some(Vec::new()),
            ("*/", Some(lines)) => {
                if let [only] = lines[..] {
                    tidied.push(format!("{}/** {only} */", indent.strip_suffix(' ').unwrap_or(indent)));
                } else {
                    let indent = indent.strip_suffix(' ').unwrap_or(indent);
                    tidied.push(format!("{indent}/**"));
                    tidied.extend(lines.iter().map(|line| format!("{indent} * {line}").trim_end().to_owned()));
                    tidied.push(format!("{indent} */"));
                }
                comment = None;
            }
            (words, Some(lines)) => {
                let words = words.strip_prefix('*').unwrap_or(words);
                lines.push(words.strip_prefix(' ').unwrap_or(words)); // the rest is a list's indentation
            }
            (_, None) => tidied.push(line.to_owned()),
        }
    }
    tidied.join("\n")
}

/// Returns the sections of the header: the text of each, and its declarations.
fn sections() -> &'static [(String, String)] {
    // Made once, since cbindgen reads files that all tests of this process share.
    static MADE: OnceLock<Vec<(String, String)>> = OnceLock::new();
    MADE.get_or_init(|| {
        SECTIONS.iter().map(|sources| (section_text(sources.last().unwrap()), declarations(sources))).collect()
    })
}

fn header(sections: &[(String, String)]) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let numbers: Vec<&str> = version.split('.').collect();
    let mut text = format!(
        "/* gradcodec.h, version {version}. Generated by `make header`: edit the sources called api in src instead. */\n\n\
         {}\n\
         #ifndef GRADCODEC_H\n\
         #define GRADCODEC_H\n\n\
         #include <stddef.h>\n\
         #include <stdint.h>\n\n\
         /* DLPack's types; gives way to a dlpack.h that was included before. */\n\
         #include \"gradcodec/dlpack.h\"\n\n\
         #define GRADCODEC_VERSION_MAJOR {}\n\
         #define GRADCODEC_VERSION_MINOR {}\n\
         #define GRADCODEC_VERSION_PATCH {}\n\
         /** As gc_version() gives it: major << 16 | minor << 8 | patch. */\n\
         #define GRADCODEC_VERSION \\\n    \
         (GRADCODEC_VERSION_MAJOR * 65536 + GRADCODEC_VERSION_MINOR * 256 + GRADCODEC_VERSION_PATCH)\n\n\
         #ifdef __cplusplus\n\
         extern \"C\" {{\n\
         #endif\n",
        section_text("src/capi.rs"),
        numbers[0],
        numbers[1],
        numbers[2],
    );
    for (about, declared) in sections {
        text += &format!("\n{about}\n{declared}");
    }
    text + "\n#ifdef __cplusplus\n}\n#endif\n\n#endif /* GRADCODEC_H */\n"
}

/// Returns the text for cffi, LuaJIT and PHP: the preprocessed header, without comments, directives and the standard's
/// types; then the constants that are macros, in a form for LuaJIT, too. LuaJIT stops at `#define`, makes an enum of
/// GC_AXIS_NONE positive, and has no declaration for GC_COUNT_ALL.
fn cdef(header: &str) -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cdef");
    fs::create_dir_all(folder.join("gradcodec")).unwrap();
    for (name, text) in [
        ("stddef.h", ""),
        ("stdint.h", ""),
        ("gradcodec.h", header),
        ("gradcodec/dlpack.h", &read("include/gradcodec/dlpack.h")),
    ] {
        fs::write(folder.join(name), text).unwrap();
    }
    let output = Command::new("cc")
        .args(["-E", "-P", "-nostdinc", "-xc", "-I."])
        .arg("gradcodec.h")
        .current_dir(&folder)
        .output()
        .expect("a C compiler, cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut text =
        String::from("/* gradcodec.h for the cdef() of cffi and of LuaJIT. Generated by `make header`. */\n");
    // Preprocessors differ in the lines that they join or leave blank, but not in the words.
    for line in split_declarations(&String::from_utf8(output.stdout).unwrap()) {
        text += &line;
        text += "\n";
    }
    for name in ["GRADCODEC_VERSION_MAJOR", "GRADCODEC_VERSION_MINOR", "GRADCODEC_VERSION_PATCH"] {
        let value = header.split(&format!("#define {name} ")).nth(1).unwrap().lines().next().unwrap();
        text += &format!("static const int {name} = {value};\n");
    }
    text += &format!("static const int GC_NCCL_ID_BYTES = {};\n", gradcodec::capi::GC_NCCL_ID_BYTES);
    text + &format!("static const int GC_AXIS_NONE = {};\n", i32::MIN)
        + &format!("/* GC_COUNT_ALL is {}, the smallest int64_t: LuaJIT takes no constant of that size. */\n", i64::MIN)
}

/// Returns a declaration a line, with words separated by single blanks.
fn split_declarations(text: &str) -> Vec<String> {
    let (mut lines, mut line, mut depth) = (Vec::new(), String::new(), 0);
    for letter in text.chars() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        line.push(letter);
        if letter == ';' && depth == 0 {
            lines.push(line.split_whitespace().collect::<Vec<_>>().join(" "));
            line.clear();
        }
    }
    assert_eq!(line.trim(), "", "a declaration without an end");
    lines
}

#[test]
fn the_text_before_the_first_declaration_is_short() {
    let header = header(sections());
    let first = header.lines().position(|line| line.starts_with("#define GRADCODEC_VERSION_MAJOR")).unwrap();
    assert!(first <= 120, "{first} lines before the first declaration");
}

fn compare_or_write(path: &str, expected: &str) {
    if std::env::var_os("GRADCODEC_WRITE").is_some() {
        fs::write(root().join(path), expected).unwrap();
        return;
    }
    let current = fs::read_to_string(root().join(path)).unwrap_or_default();
    let different = current.lines().zip(expected.lines()).position(|(one, other)| one != other);
    assert!(current == expected, "{path} is not current (line {different:?}): run `make header`");
}

#[test]
fn the_headers_are_current() {
    let sections = sections();
    let header = header(sections);
    compare_or_write("include/gradcodec.h", &header);
    let cdef = cdef(&header);
    compare_or_write("include/gradcodec.cdef.h", &cdef);
    compare_or_write("include/gradcodec/loader.h", &loader::loader(&cdef));
    compare_or_write("python/gradcodec/_declarations.py", &declarations::declarations(&cdef));
}

/// Checks the names of constants, and that bindgen can evaluate each: it leaves out a name, or another header's macro.
#[test]
fn constants_are_numbers() {
    let header = read("include/gradcodec.h");
    let defined = header.lines().filter_map(|line| line.strip_prefix("#define ")?.split_once(' '));
    let constants: Vec<_> =
        defined.filter(|(name, _)| !name.starts_with("GRADCODEC_") && !name.ends_with("_INIT")).collect();
    assert!(constants.iter().any(|(name, _)| *name == "GC_COUNT_ALL"), "{constants:?}");
    for (name, value) in constants {
        let plain = value.replace("LL", "").chars().all(|letter| "0123456789()- ".contains(letter));
        assert!(plain && name.starts_with("GC_"), "{name} is {value}");
    }
}

#[test]
fn the_signatures_in_rust_are_current() {
    let version: Vec<&str> = env!("CARGO_PKG_VERSION").split('.').collect();
    let facts = read(&format!("tests/abi/gradcodec-{}.{}.abi", version[0], version[1]));
    let (list, header) = (read("tests/abi/functions.h"), read("include/gradcodec.h"));
    compare_or_write("tests/signatures.rs", &promises::promises(&list, &facts, &header, &read("cbindgen.toml")));
}

#[test]
fn every_status_has_the_name_of_its_constant() {
    let cdef = read("include/gradcodec.cdef.h");
    let (_, body) = cdef.split_once("enum gc_status {").unwrap();
    let mut found = 0;
    for constant in body.split('}').next().unwrap().split(',').filter(|text| !text.trim().is_empty()) {
        let (name, value) = constant.trim().split_once(" = ").unwrap();
        // SAFETY: the function returns static text.
        let given = unsafe { CStr::from_ptr(gradcodec::capi::gc_status_name(value.parse().unwrap())) };
        assert_eq!(given.to_str().unwrap(), name);
        found += 1;
    }
    assert!(found > 0);
}
