//! Runs bindgen as in docs/LANGUAGES.md, and lists the constants of the header and the functions of functions.h.

use std::{env, fmt::Write, fs, path::Path};

fn main() {
    println!("cargo:rerun-if-changed=../../include");
    println!("cargo:rerun-if-changed=../abi/functions.h");
    println!("cargo:rustc-link-lib=gradcodec");
    let out = env::var("OUT_DIR").unwrap();
    let bindings = bindgen::Builder::default()
        .header("../../include/gradcodec.h")
        .prepend_enum_name(false)
        .allowlist_function("gc_.*")
        .allowlist_type("gc_.*|DL.*")
        .allowlist_var("GC_.*|GRADCODEC_.*")
        .formatter(bindgen::Formatter::None)
        .generate()
        .unwrap();
    bindings.write_to_file(Path::new(&out).join("gradcodec.rs")).unwrap();

    let header = fs::read_to_string("../../include/gradcodec.h").unwrap();
    let mut lists = String::from("const CONSTANTS: &[(&str, i64, i64)] = &[\n");
    for line in header.lines() {
        // Lines have the form `    GC_NAME = 1,`, perhaps with a comment behind.
        let Some((name, value)) = line.trim().split_once(" = ").filter(|(name, _)| name.starts_with("GC_")) else {
            continue;
        };
        let value: i64 = value.split(',').next().unwrap().parse().unwrap_or_else(|_| panic!("{line}"));
        writeln!(lists, "    (\"{name}\", {name} as i64, {value}),").unwrap();
    }
    lists += "];\nconst FUNCTIONS: &[(&str, *const ())] = &[\n";
    for line in fs::read_to_string("../abi/functions.h").unwrap().lines() {
        if let Some(name) = line.strip_prefix("FUNCTION(").and_then(|rest| rest.split(',').next()) {
            writeln!(lists, "    (\"{name}\", {name} as *const ()),").unwrap();
        }
    }
    fs::write(Path::new(&out).join("lists.rs"), lists + "];\n").unwrap();
}
