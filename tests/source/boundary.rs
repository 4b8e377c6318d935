//! Checks that every function that C can call runs through `boundary`, and that the exported functions are those of
//! tests/abi/functions.h. No file that should name each of them misses one.

use crate::sources;

use std::{collections::BTreeSet, fs, path::Path};

struct Function {
    name: String,
    place: String,
    /// Text between the braces, trimmed.
    body: String,
    exported: bool,
}

/// Returns the text between the first `open` and the `close` that matches it, and the index behind this `close`.
fn between(text: &str, open: char, close: char) -> (&str, usize) {
    let start = text.find(open).unwrap();
    let mut depth = 0;
    for (index, letter) in text[start..].char_indices() {
        depth += i32::from(letter == open) - i32::from(letter == close);
        if depth == 0 {
            return (&text[start + 1..start + index], start + index + 1);
        }
    }
    panic!("no {close} closes {open}");
}

/// Returns all definitions (not types) of functions with C's calling convention.
fn functions() -> Vec<Function> {
    let mut found = Vec::new();
    for path in sources::paths() {
        let text = fs::read_to_string(&path).unwrap();
        for (start, marker) in text.match_indices("extern \"C\" fn ") {
            let rest = &text[start + marker.len()..];
            let name: String = rest.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
            let attributes: Vec<&str> =
                text[..start].lines().rev().take_while(|line| !line.starts_with("///")).take(3).collect();
            let (_, after_arguments) = between(rest, '(', ')');
            let (body, _) = between(&rest[after_arguments..], '{', '}');
            found.push(Function {
                place: format!("{}:{}", path.display(), text[..start].lines().count() + 1),
                exported: attributes.iter().any(|line| line.contains("no_mangle")),
                body: body.trim().to_owned(),
                name,
            });
        }
    }
    found
}

#[test]
fn every_function_that_c_can_call_runs_through_the_boundary() {
    for Function { name, place, body, .. } in functions() {
        let whole = body.strip_prefix("boundary(||").map(|_| between(&body, '(', ')').1);
        let rest = whole.map(|end| body[end..].trim_matches([';', ' ', '\n']));
        assert_eq!(rest, Some(""), "{name} at {place} must be boundary(|| ...) and nothing else");
    }
}

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
}

/// Returns the names in tests/abi/functions.h.
fn listed() -> BTreeSet<String> {
    let list = read("tests/abi/functions.h");
    list.lines().filter_map(|line| line.strip_prefix("FUNCTION(")?.split(',').next()).map(str::to_owned).collect()
}

#[test]
fn the_exported_functions_match_the_list() {
    let exported: BTreeSet<String> =
        functions().into_iter().filter(|function| function.exported).map(|function| function.name).collect();
    let different: Vec<_> = exported.symmetric_difference(&listed()).cloned().collect();
    assert!(different.is_empty(), "exported or in the list, not both: {different:?}");
    assert!(exported.iter().all(|name| name.starts_with("gc_")));
}

/// Files that name every function, and the functions that each file leaves out, with the reason. tests/python checks its
/// own list of functions, and tests/abi/abi.py checks the file of each version.
const PLACES: [(&str, &[(&str, &str)]); 6] = [
    ("tests/signatures.rs", &[]),
    ("include/gradcodec/loader.h", &[]),
    ("include/gradcodec/gradcodec.hpp", &[]),
    (
        "tests/c/null.c",
        &[
            ("gc_version", "takes nothing"),
            ("gc_version_string", "takes nothing"),
            ("gc_build_info", "takes nothing"),
            ("gc_set_threads", "takes no pointer"),
            ("gc_prepare", "takes no pointer"),
            ("gc_trim", "takes no pointer"),
        ],
    ),
    (
        "tests/python/test_refusals.py",
        &[
            ("gc_last_error", "refuses nothing"),
            ("gc_capsule_destructor", "returns nothing: tests/python/test_capsules.py looks at what it does"),
            ("gc_comm_from_nccl", "wants NCCL: tests/python/test_nccl.py"),
            ("gc_comm_nccl_id", "wants NCCL"),
            ("gc_comm_from_nccl_id", "wants NCCL"),
            ("gc_comm_from_peers", "wants memory of GPUs: tests/multi_gpu/test_peers.py"),
            ("gc_comm_open_peers", "wants GPUs"),
        ],
    ),
    (
        "fuzz/fuzz_targets/descriptors.rs",
        &[
            ("gc_version", "takes nothing"),
            ("gc_version_string", "takes nothing"),
            ("gc_build_info", "takes nothing"),
            ("gc_capsule_destructor", "takes an object of Python"),
            ("gc_comm_from_nccl", "wants NCCL: tests/python/test_nccl.py"),
            ("gc_comm_nccl_id", "wants NCCL"),
            ("gc_comm_from_nccl_id", "wants NCCL"),
            ("gc_comm_from_peers", "wants memory of GPUs: tests/multi_gpu/test_peers.py"),
            ("gc_comm_open_peers", "wants GPUs"),
            ("gc_share_send", "wants a socket: fuzz_targets/shares.rs"),
            ("gc_share_wait", "wants a socket"),
            ("gc_share_free", "wants a socket"),
            ("gc_share_receive", "wants a socket"),
            ("gc_elementwise_create", "fuzz_targets/kernels.rs"),
            ("gc_reduction_create", "likewise"),
            ("gc_kernel_run", "likewise"),
            ("gc_kernel_prepare", "likewise"),
            ("gc_kernel_workspace_bytes", "likewise"),
            ("gc_kernel_log", "likewise"),
            ("gc_kernel_free", "likewise"),
        ],
    ),
];

fn words(text: &str) -> BTreeSet<&str> {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').collect()
}

#[test]
fn files_that_name_every_function_are_complete() {
    for (path, excepted) in PLACES {
        let text = read(path);
        let excepted = excepted.iter().map(|(name, _)| name.to_string()).collect();
        let missing: BTreeSet<String> = listed().into_iter().filter(|name| !words(&text).contains(&name[..])).collect();
        let different: Vec<_> = missing.symmetric_difference(&excepted).collect();
        assert!(different.is_empty(), "{path} lacks these, or has them and a reason to lack them: {different:?}");
    }
}

#[test]
fn the_cpp_header_has_every_function_without_its_prefix() {
    let text = read("include/gradcodec/gradcodec.hpp");
    let missing: Vec<String> = listed().into_iter().filter(|name| !words(&text).contains(&name[3..])).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
