//! The layers of src/ go one way: each uses only those before it.

use crate::sources;

use std::{fs, path::Path};

/// The modules of the crate, the lowest first. CONTRIBUTING.md says what each is for.
const LAYERS: [&str; 14] = [
    "cancel",
    "error",
    "environment",
    "panics",
    "dynamic",
    "tensor",
    "plan",
    "compile",
    "backend",
    "ops",
    "comm",
    "share",
    "about",
    "capi",
];

/// Parts of a layer that stand side by side, and use nothing of each other.
const APART: [[&str; 2]; 2] = [["backend::cpu", "backend::cuda"], ["backend::cuda", "backend::cpu"]];

/// What a path that begins with `crate::`, cut off, names: `{error::{a, b}, tensor::View}` is error::a, error::b and
/// tensor::View.
fn names(path: &str, prefix: &str, found: &mut Vec<String>) {
    if let Some(group) = path.strip_prefix('{') {
        let (mut depth, mut start) = (0, 0);
        for (index, letter) in group.char_indices() {
            match letter {
                '{' => depth += 1,
                ',' | '}' if depth == 0 => {
                    names(group[start..index].trim(), prefix, found);
                    start = index + 1;
                    if letter == '}' {
                        return;
                    }
                }
                '}' => depth -= 1,
                _ => {}
            }
        }
        panic!("no brace closes {{{group}");
    }
    let length = path.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(path.len());
    let name = format!("{prefix}{}", &path[..length]);
    match path[length..].strip_prefix("::") {
        Some(rest) => names(rest, &format!("{name}::"), found),
        None if length > 0 => found.push(name),
        None => {} // a comma before the brace
    }
}

/// The names that a source uses of the crate, from its root. Comments are left out.
fn used(text: &str) -> Vec<String> {
    let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join("\n");
    let mut found = Vec::new();
    for (start, marker) in code.match_indices("crate::") {
        names(&code[start + marker.len()..], "", &mut found);
    }
    found
}

/// The module of a source, from the root of the crate: `backend::cpu::bits`.
fn module(path: &Path) -> String {
    let path = path.with_extension("");
    let parts: Vec<_> = path.iter().map(|part| part.to_str().unwrap()).filter(|&part| part != "mod").collect();
    parts.join("::")
}

fn layer(name: &str) -> usize {
    let first = name.split("::").next().unwrap_or_default();
    LAYERS
        .iter()
        .position(|&layer| layer == first)
        .unwrap_or_else(|| panic!("{name} is in no layer of tests/source/layers.rs"))
}

#[test]
fn every_layer_uses_only_those_before_it() {
    let (mut wrong, mut looked_at) = (Vec::new(), 0);
    for path in sources::paths().iter().filter(|path| !path.ends_with("lib.rs")) {
        let module = module(path.strip_prefix(sources::root()).unwrap());
        let text = fs::read_to_string(path).unwrap();
        assert!(!text.contains("super::super"), "{module}: a path from crate:: says which layer is used");
        for name in used(&text) {
            looked_at += 1;
            let apart = APART.iter().any(|[one, other]| module.starts_with(one) && name.starts_with(other));
            if apart || layer(&name) > layer(&module) {
                wrong.push(format!("{module} uses {name}"));
            }
        }
    }
    assert!(looked_at > 50, "only {looked_at} uses found");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_names_of_a_use_are_found() {
    let text = "use crate::{\n    backend::{self, cpu::pool},\n    error::{Error as E, Result},\n};\n// crate::capi\nlet x = crate::tensor::View::new($crate::error::error!(a));";
    let expected =
        ["backend::self", "backend::cpu::pool", "error::Error", "error::Result", "tensor::View::new", "error::error"];
    assert_eq!(used(text), expected);
}

/// tests/gpu/proxy.c stands between the library and the driver: the library asks for all functions of its table.
#[test]
fn the_driver_in_between_passes_every_required_function_on() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
    let (driver, proxy) = (read("src/backend/cuda/driver.rs"), read("tests/gpu/proxy.c"));
    let table = driver.split_once("required {").unwrap().1.split_once("optional {").unwrap().0;
    let names = table.lines().filter_map(|line| line.trim().split_once('(')).map(|(name, _)| name);
    let missing: Vec<_> = names
        .filter(|name| name.starts_with("cu") && !proxy.contains(&format!("X({name})")) && *name != "cuStreamQuery")
        .collect();
    assert!(missing.is_empty(), "tests/gpu/proxy.c lacks {missing:?}");
}
