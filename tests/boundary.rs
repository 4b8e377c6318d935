//! Every function that C can call runs through `boundary`, and the exported ones are those of the list.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

struct Function {
    name: String,
    place: String,
    /// What lies between the braces, trimmed.
    body: String,
    exported: bool,
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The text from the first `open` to the `close` that matches it, both left out.
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

/// All definitions (not types) of functions with C's calling convention.
fn functions() -> Vec<Function> {
    let mut paths = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut paths);
    let mut found = Vec::new();
    for path in paths {
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

#[test]
fn the_exported_functions_are_those_of_the_list() {
    let list = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/abi/symbols.txt")).unwrap();
    let listed: BTreeSet<String> = list.lines().map(str::to_owned).collect();
    let exported: BTreeSet<String> =
        functions().into_iter().filter(|function| function.exported).map(|function| function.name).collect();
    assert_eq!(exported, listed);
    assert!(exported.iter().all(|name| name.starts_with("gc_")));
}
