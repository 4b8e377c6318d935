//! The header and the Rust side agree on every struct, constant and alias: sizes, alignments and offsets, the types of
//! fields, signs and values, and the bytes of a struct that is passed by value.
//!
//! ctest compares a Rust file that stands alone with a header. The test makes this file out of the sources that the
//! library is compiled from: dlpark's structs, and the items that cbindgen takes from src/. So no copy can be out of
//! date. tests/source/signatures.rs has the functions, which ctest does not compare.

use crate::sources;

use std::{
    collections::BTreeSet,
    ffi::CStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|why| panic!("{command:?}: {why}"));
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns dlpark's declarations of DLPack. Its flags are a type with methods around a number; here, the number.
fn dlpark() -> String {
    let version = run(Command::new("rustc").arg("-vV"));
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    // Packages for this platform are there, since they were compiled; packages for other platforms may not be.
    let metadata = run(Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--offline", "--filter-platform", host])
        .current_dir(root()));
    let (_, place) = metadata.split_once(r#""name":"dlpark","src_path":""#).expect("the place of dlpark's sources");
    let library = Path::new(place.split('"').next().unwrap());
    read(library.with_file_name("ffi.rs")).replace("crate::DlpackFlags", "u64")
}

/// Returns the constants of C's enums, which dlpark has inside of types, and in capitals.
fn dlpack_constants(dlpark: &str, names: &BTreeSet<&str>) -> String {
    let mut text = String::new();
    for line in dlpark.lines().filter_map(|line| line.strip_prefix("    pub const ")) {
        let (constant, rest) = line.split_once(": ").unwrap();
        let class = rest.split(' ').next().unwrap();
        let name = names.iter().find(|name| name.eq_ignore_ascii_case(&format!("kDL{constant}")));
        let name = name.unwrap_or_else(|| panic!("the header has no {class}::{constant}"));
        let number = if class == "DLDataTypeCode" { "u8" } else { "u32" };
        text += &format!("pub const {name}: {number} = {class}::{constant}.0;\n");
    }
    text
}

/// Returns our enums, which cbindgen.toml names, and a constant for each of their variants.
fn enums(sources: &str) -> String {
    let mut text = String::new();
    for line in read("cbindgen.toml").lines() {
        let Some((name, c_name)) = line.split_once(" = \"gc_") else { continue };
        let prefix = format!("GC_{}", c_name.trim_end_matches('"').to_uppercase());
        // Another enum may have the same name, without C's layout.
        let beginning = format!("\npub enum {name} {{\n");
        let of_c = |&(start, _): &(usize, &str)| {
            sources[..start].lines().rev().take_while(|line| line.starts_with("#[")).any(|line| line == "#[repr(C)]")
        };
        let (start, _) = sources.match_indices(&beginning).find(of_c).unwrap();
        let (body, _) = sources[start + beginning.len()..].split_once("\n}").unwrap();
        text += &format!("#[repr(C)]\npub enum {name} {{\n{body}\n}}\n");
        for line in body.lines().filter(|line| !line.trim_start().starts_with("//")) {
            let variant = line.trim().split([' ', ',']).next().unwrap();
            // InvalidArgument becomes _INVALID_ARGUMENT.
            let capitals = variant.chars().flat_map(|letter| {
                letter.is_uppercase().then_some('_').into_iter().chain([letter.to_ascii_uppercase()])
            });
            let words: String = capitals.collect();
            text += &format!("pub const {prefix}{words}: i32 = {name}::{variant} as i32;\n");
        }
    }
    text
}

/// Returns our constants, aliases and structs, as in the sources. A struct without C's layout is a handle.
fn items(sources: &str) -> String {
    let mut text = String::from("use std::ffi::{c_char, c_void};\n");
    for (begin, end) in [("\npub const GC_", ";\n"), ("\npub type gc_", ";\n"), ("\npub struct gc_", "\n}\n")] {
        for (start, _) in sources.match_indices(begin) {
            let length = sources[start..].find(end).unwrap() + end.len();
            let item = &sources[start..start + length];
            let mut attributes = sources[..start].lines().rev().take_while(|line| line.starts_with("#["));
            match (item.starts_with("\npub struct"), attributes.any(|line| line == "#[repr(C)]")) {
                (true, true) => text += &format!("#[repr(C)]{item}"),
                (true, false) => {}
                (false, _) => text += item,
            }
        }
    }
    text
}

/// Returns every name and number in a text.
fn words(text: &str) -> BTreeSet<&str> {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').collect()
}

fn mirror(cdef: &str) -> String {
    let (dlpark, sources) = (dlpark(), sources::paths().into_iter().map(read).collect::<String>());
    format!("{dlpark}\n{}{}{}", dlpack_constants(&dlpark, &words(cdef)), enums(&sources), items(&sources))
}

/// Returns the names that the header declares and the mirror does not. Handles are left out: C has only their names.
fn missing<'a>(cdef: &'a str, mirror: &'a str) -> Vec<&'a str> {
    let name = |line: &'a str| line.strip_prefix("pub ")?.split([' ', ':', '(']).nth(1);
    let mirrored: BTreeSet<&str> = mirror.lines().filter_map(name).collect();
    words(cdef)
        .into_iter()
        .filter(|name| {
            let constant = name.starts_with("GC_") || name.starts_with("kDL");
            let named_type = name.starts_with("DL") || name.starts_with("gc_") && name.ends_with("_t");
            let handle = cdef.contains(&format!("struct {name};")) || cdef.contains(&format!("struct {name} {name};"));
            (constant || named_type && !handle) && !mirrored.contains(name)
        })
        .collect()
}

#[test]
fn structs_constants_and_aliases_are_the_same_in_c_and_rust() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("layout");
    fs::create_dir_all(&folder).unwrap();
    let cdef = read("include/gradcodec.cdef.h");
    let mirror_text = mirror(&cdef);
    assert_eq!(missing(&cdef, &mirror_text), [""; 0], "in the header, and not compared");
    let mirror = folder.join("mirror.rs");
    fs::write(&mirror, mirror_text).unwrap();

    ctest::TestGenerator::new()
        .target("") // the host
        .header("gradcodec.h")
        .skip_const(|constant| constant.ident() == "_") // assertions of dlpark's own
        .rename_struct_ty(|name| match name {
            // C has the enum for its constants, and a byte in the struct.
            "DLDataTypeCode" => Some("uint8_t".to_owned()),
            _ => name.starts_with("DL").then(|| name.to_owned()),
        })
        .out_dir(&folder)
        .generate_files(&mirror, "compare")
        .unwrap();

    // Warnings are errors: C only warns of a field of another type. The two warnings left out are about ctest's lines.
    run(Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-Wno-type-limits", "-c", "-o"])
        .args([folder.join("compare.o"), folder.join("compare.c")])
        .arg("-I")
        .arg(root().join("include")));
    let main = folder.join("main.rs");
    fs::write(&main, "include!(\"mirror.rs\");\ninclude!(\"compare.rs\");\n").unwrap();
    run(Command::new("rustc")
        .args(["--edition=2021", "--cap-lints=allow", "-o"])
        .args([folder.join("compare"), main])
        .arg(format!("-Clink-arg={}", folder.join("compare.o").display())));
    println!("{}", run(&mut Command::new(folder.join("compare"))));
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
