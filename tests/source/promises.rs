//! Makes tests/source/signatures.rs: the text below, with the functions of tests/abi/functions.h put in.

use crate::loader::filled;

const TEXT: &str = r#"
//! Every exported function has the type that tests/abi/functions.h promises. Generated from it by `make header`.

use std::ffi::{c_char, c_void};

use gradcodec::capi::*;

/// A pointer of exactly the promised type takes each function's address, or this file does not compile.
macro_rules! promised {
    ($($name:ident($($parameter:ty),*) $(-> $result:ty)?;)*) => {
        $(const _: unsafe extern "C" fn($($parameter),*) $(-> $result)? = $name;)*
    };
}

promised! {
@FUNCTIONS@}
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
        "DLDevice"
        | "DLDataType"
        | "DLTensor"
        | "DLManagedTensor"
        | "gc_kernel_shape_t"
        | "gc_codec_options_t"
        | "gc_codec_t"
        | "gc_transport_t"
        | "gc_nccl_options_t"
        | "gc_peers_options_t"
        | "gc_comm_t"
        | "gc_allreduce_t"
        | "gc_part_t"
        | "gc_share_t"
        | "gc_elementwise_options_t"
        | "gc_reduction_options_t"
        | "gc_run_options_t"
        | "gc_kernel_t" => c,
        "struct DLManagedTensorVersioned" => "DLManagedTensorVersioned",
        _ => panic!("tests/abi/functions.h: what {c:?} is in Rust is not in tests/source/promises.rs"),
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

/// Returns the text of tests/source/signatures.rs for the text of tests/abi/functions.h.
pub fn promises(list: &str) -> String {
    let mut functions = String::new();
    for part in list.split("))\n") {
        let Some((_, promise)) = part.rsplit_once("FUNCTION(") else { continue };
        let promise = format!("{promise})");
        let [name, result, parameters] = split(&promise)[..] else {
            panic!("not a name, a result and (...): {promise}")
        };
        functions +=
            &filled(&format!("    {name}"), &rust_parameters(parameters), &format!("{};", rust_result(result)));
    }
    TEXT.trim_start().replace("@FUNCTIONS@", &functions)
}

#[test]
fn a_promise_in_rust_is_the_one_in_c() {
    let list = "FUNCTION(gc_name, const char *, (gc_status_t))\n\
                FUNCTION(gc_hook, void, (void (*)(void *, char),\n    int64_t *const *, const char **))\n";
    for line in [
        "    gc_name(i32) -> *const c_char;\n",
        "    gc_hook(Option<unsafe extern \"C\" fn(*mut c_void, c_char)>, *const *mut i64, *mut *const c_char);\n",
    ] {
        assert!(promises(list).contains(line), "{}", promises(list));
    }
}

#[test]
#[should_panic = "what \"gc_new_t\" is in Rust is not in tests/source/promises.rs"]
fn an_unknown_type_is_named() {
    promises("FUNCTION(gc_new, void, (gc_new_t *))\n");
}
