//! Makes tests/signatures.rs: the text below, with the functions of tests/abi/functions.h, and the structs and constants
//! of this version's tests/abi/gradcodec-*.abi put in.

use crate::loader::filled;

const TEXT: &str = r#"
//! Every exported function has the type that tests/abi/functions.h promises, and every struct and constant the layout or
//! value that tests/abi/gradcodec-*.abi has for C. Generated from these files by `make header`.

use std::{
    ffi::{c_char, c_void},
    mem::offset_of,
};

use gradcodec::capi::*;

/// A pointer of exactly the promised type takes each function's address, or this file does not compile.
macro_rules! promised {
    ($($name:ident($($parameter:ty),*) $(-> $result:ty)?;)*) => {
        $(const _: unsafe extern "C" fn($($parameter),*) $(-> $result)? = $name;)*
    };
}

promised! {
@FUNCTIONS@}

/// A struct has these fields and no others, of these types and in these places, or this file does not compile.
macro_rules! laid_out {
    ($($name:ident, aligned to $align:literal { $($field:ident: $type:ty, $at:literal;)* })*) => {$(
        const _: fn($name) = |$name { $($field),* }| { $(let _: $type = $field;)* };
        const _: () = assert!(align_of::<$name>() == $align $(&& offset_of!($name, $field) == $at)*);
    )*};
}

laid_out! {
@STRUCTS@}

/// A constant has this value, or this file does not compile.
macro_rules! valued {
    ($($constant:path = $value:literal;)*) => { $(const _: () = assert!($constant as i64 == $value);)* };
}

valued! {
@CONSTANTS@}
"#;

/// Returns the Rust type of a C type. A typedef of a number becomes the number that C was promised.
fn rust_type(c: &str) -> String {
    let c = c.trim();
    if let Some((result, parameters)) = c.split_once("(*)") {
        return format!("Option<unsafe extern \"C\" fn{}{}>", rust_parameters(parameters), rust_result(result));
    }
    if let Some(pointee) = c.strip_suffix('*').map(str::trim) {
        // Find the const of the last pointee: before its name if it is no pointer itself, else behind its star.
        let shared =
            pointee.strip_suffix("const").or(pointee.strip_prefix("const ").filter(|rest| !rest.contains('*')));
        return match shared {
            Some(pointee) => format!("*const {}", rust_type(pointee)),
            None => format!("*mut {}", rust_type(pointee)),
        };
    }
    let rust = match c {
        "void" => "c_void",
        "char" => "c_char",
        "uint32_t" => "u32",
        "int" | "int32_t" | "gc_status_t" | "gc_bit_order_t" | "gc_decode_t" => "i32",
        "uint8_t" => "u8",
        "uint64_t" => "u64",
        "float" => "f32",
        "int64_t" => "i64",
        "size_t" => "usize",
        "struct DLManagedTensorVersioned" => "DLManagedTensorVersioned",
        _ => c, // a struct of the same name
    };
    rust.to_owned()
}

fn rust_result(c: &str) -> String {
    if c.trim() == "void" { String::new() } else { format!(" -> {}", rust_type(c)) }
}

/// Returns the parameters in Rust, from the opening parenthesis to the closing one.
fn rust_parameters(c: &str) -> String {
    let inside = c.trim().strip_prefix('(').and_then(|rest| rest.strip_suffix(')'));
    let inside = inside.unwrap_or_else(|| panic!("tests/abi/functions.h: no parameters: {c:?}"));
    let parameters: Vec<String> = split(inside).iter().filter(|c| **c != "void").map(|c| rust_type(c)).collect();
    format!("({})", parameters.join(", "))
}

/// Returns the parts of a list between the commas that are in no parentheses.
fn split(list: &str) -> Vec<&str> {
    let mut depth = 0;
    let parts = list.split(|letter| {
        depth += i32::from(letter == '(') - i32::from(letter == ')');
        letter == ',' && depth == 0
    });
    parts.map(str::trim).collect()
}

/// Returns the Rust type of a field, which may be an array.
fn rust_type_of_field(c: &str) -> String {
    match c.strip_suffix(']').and_then(|array| array.split_once(" [")) {
        Some((item, count)) => format!("[{}; {count}]", rust_type(item)),
        None => rust_type(c),
    }
}

/// Returns our structs by the facts of a file that tests/abi/abi.py checks. A struct's size is left out: nothing can
/// follow the last field, and C and Rust round up its end in the same way.
fn structs(facts: &str) -> String {
    let mut structs = String::new();
    for fact in facts.lines().filter_map(|fact| fact.strip_prefix("struct gc_")) {
        let (name, alignment) = fact.split_once(": ").unwrap();
        let alignment = alignment.rsplit(' ').next().unwrap();
        structs += &format!("    gc_{name}, aligned to {alignment} {{\n");
        let mut fields = Vec::new();
        for field in facts.lines().filter_map(|fact| fact.strip_prefix(&format!("field gc_{name}."))) {
            let (field, place) = field.rsplit_once(" at ").unwrap();
            let (field, c) = field.split_once(' ').unwrap();
            let place: usize = place.split(',').next().unwrap().parse().unwrap();
            fields.push((place, format!("{field}: {}, {place};", rust_type_of_field(c))));
        }
        fields.sort();
        structs += &filled("        ", fields.into_iter().map(|(_, field)| field), "", 8, "");
        structs += "    }\n";
    }
    structs
}

/// Returns our constants by the same facts. Those that are no macros in the header are variants in Rust, of the enums
/// that cbindgen.toml names.
fn constants(facts: &str, header: &str, cbindgen: &str) -> String {
    let enums: Vec<(&str, String)> = cbindgen
        .lines()
        .filter_map(|line| line.split_once(" = \"gc_"))
        .map(|(name, c_name)| (name, format!("GC_{}_", c_name.trim_end_matches('"').to_uppercase())))
        .collect();
    let mut constants = Vec::new();
    for fact in facts.lines().filter_map(|fact| fact.strip_prefix("constant ")) {
        let (constant, value) = fact.split_once(' ').unwrap();
        if !constant.starts_with("GC_") {
            continue; // DLPack's
        }
        if header.contains(&format!("#define {constant} ")) {
            constants.push(format!("{constant} = {value};"));
        } else {
            let variant = |(name, prefix): &(_, String)| Some((*name, constant.strip_prefix(prefix.as_str())?));
            let (name, words): (&str, _) =
                enums.iter().find_map(variant).unwrap_or_else(|| panic!("no enum has {constant}"));
            // INVALID_ARGUMENT becomes InvalidArgument.
            let words = words.split('_').map(|word| word[..1].to_owned() + &word[1..].to_lowercase());
            constants.push(format!("{name}::{} = {value};", words.collect::<String>()));
        }
    }
    filled("    ", constants, "", 4, "")
}

/// Returns the text of tests/signatures.rs for the texts of tests/abi/functions.h, of a file of facts, of the header and
/// of cbindgen.toml.
pub fn promises(list: &str, facts: &str, header: &str, cbindgen: &str) -> String {
    let mut functions = String::new();
    for part in list.split("))\n") {
        let Some((_, promise)) = part.rsplit_once("FUNCTION(") else { continue };
        let promise = format!("{promise})");
        let [name, result, parameters] = split(&promise)[..] else {
            panic!("not a name, a result and (...): {promise}")
        };
        let (parameters, tail) = (rust_parameters(parameters), format!("{};", rust_result(result)));
        functions += &filled(&format!("    {name}"), parameters.split(", "), ",", 8, &tail);
    }
    TEXT.trim_start()
        .replace("@FUNCTIONS@", &functions)
        .replace("@STRUCTS@", &structs(facts))
        .replace("@CONSTANTS@", &constants(facts, header, cbindgen))
}

#[test]
fn a_signature_in_rust_matches_the_one_in_c() {
    let list = "FUNCTION(gc_name, const char *, (gc_status_t))\n\
                FUNCTION(gc_hook, void, (void (*)(void *, char),\n    int64_t *const *, const char **))\n";
    for line in [
        "    gc_name(i32) -> *const c_char;\n",
        "    gc_hook(Option<unsafe extern \"C\" fn(*mut c_void, c_char)>, *const *mut i64, *mut *const c_char);\n",
    ] {
        assert!(promises(list, "", "", "").contains(line), "{}", promises(list, "", "", ""));
    }
}

#[test]
fn a_struct_has_its_fields_in_their_order() {
    let facts = "field gc_s_t.b const char *const * at 8, 8 bytes\nfield gc_s_t.a uint32_t [2] at 0, 8 bytes\n\
                 struct gc_s_t: begins with its size, aligned to 8\n";
    let expected = "    gc_s_t, aligned to 8 {\n        a: [u32; 2], 0; b: *const *const c_char, 8;\n    }\n";
    assert_eq!(structs(facts), expected);
}

#[test]
fn a_constant_of_an_enum_is_a_variant() {
    let facts = "constant GC_STATUS_READ_ONLY 5\nconstant GC_STATUS_ALL -1\nconstant kDLCPU 1\n";
    let made = constants(facts, "#define GC_STATUS_ALL -1\n", "Status = \"gc_status\"\n");
    assert_eq!(made, "    Status::ReadOnly = 5; GC_STATUS_ALL = -1;\n");
}
