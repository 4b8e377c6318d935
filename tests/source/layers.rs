//! Checks that each module of src/ uses only the modules before it.

use crate::sources;

use std::{collections::HashMap, fs, path::Path};

/// Modules of the crate, the lowest first. CONTRIBUTING.md describes each.
const MODULES: [&str; 13] =
    ["ffi", "dlpack", "cpu", "cuda", "device", "bits", "copy", "share", "jit", "codec", "comm", "about", "capi"];

/// Returns true if a source for one kind of device uses the other kind.
fn is_across(module: &str, name: &str) -> bool {
    let is_of = |path: &str, device: &str| path.split("::").any(|part| part == device);
    [("cpu", "cuda"), ("cuda", "cpu")].iter().any(|(one, other)| is_of(module, one) && is_of(name, other))
}

/// Adds the names in a path after `crate::` to `found`: `{error::{a, b}, dlpack::View}` has error::a, error::b and
/// dlpack::View.
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

/// Returns the names that a source uses behind `marker`, `crate::` for names of the crate. Comments are left out.
fn used_after(marker: &str, text: &str) -> Vec<String> {
    let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join("\n");
    let mut found = Vec::new();
    for (start, marker) in code.match_indices(marker) {
        names(&code[start + marker.len()..], "", &mut found);
    }
    found
}

/// Returns the names of the crate that a source uses, from its root.
fn used(text: &str) -> Vec<String> {
    used_after("crate::", text)
}

/// Returns the module of a source, from the root of the crate: `bits::cpu::tiled`.
fn module(path: &Path) -> String {
    let path = path.with_extension("");
    let parts: Vec<_> = path.iter().map(|part| part.to_str().unwrap()).filter(|&part| part != "mod").collect();
    parts.join("::")
}

fn position(name: &str) -> usize {
    let first = name.split("::").next().unwrap_or_default();
    MODULES
        .iter()
        .position(|&module| module == first)
        .unwrap_or_else(|| panic!("{name} is in no module of tests/source/layers.rs"))
}

#[test]
fn every_module_uses_only_modules_before_it() {
    let (mut wrong, mut looked_at) = (Vec::new(), 0);
    for path in sources::paths().iter().filter(|path| !path.ends_with("lib.rs")) {
        let module = module(path.strip_prefix(sources::root()).unwrap());
        let text = fs::read_to_string(path).unwrap();
        assert!(!text.contains("super::super"), "{module}: a path from crate:: shows which module is used");
        // Files beside this one in its module count, too: `super::cuda` in `bits::cpu`.
        let parent = module.rsplit_once("::").map_or("", |(parent, _)| parent);
        let beside = used_after("super::", &text).into_iter().map(|name| format!("{parent}::{name}"));
        for name in used(&text).into_iter().chain(beside.filter(|_| !parent.is_empty())) {
            looked_at += 1;
            if is_across(&module, &name) || position(&name) > position(&module) {
                wrong.push(format!("{module} uses {name}"));
            }
        }
    }
    assert!(looked_at > 1000, "only {looked_at} uses found");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Checks that the sources of operations and plans, which read and write no memory, forbid unsafe code.
#[test]
fn operations_and_plans_forbid_unsafe_code() {
    let forbids = |path: &Path| fs::read_to_string(path).is_ok_and(|text| text.contains("\n#![forbid(unsafe_code)]\n"));
    let (mut lacking, mut looked_at) = (Vec::new(), 0);
    for path in sources::paths() {
        let relative = path.strip_prefix(sources::root()).unwrap().to_owned();
        let Some(at) =
            relative.iter().position(|part| ["ops", "ops.rs", "plan", "plan.rs"].iter().any(|&name| part == name))
        else {
            continue;
        };
        looked_at += 1;
        // A folder's mod.rs forbids it for all of the folder.
        let outermost = relative.iter().take(at + 1).fold(sources::root(), |path, part| path.join(part));
        let outermost = if outermost.is_dir() { outermost.join("mod.rs") } else { outermost };
        if !forbids(&outermost) {
            lacking.push(relative);
        }
    }
    for name in [
        "device/devices.rs",
        "device/tensors.rs",
        "dlpack/checks.rs",
        "dlpack/floats.rs",
        "dlpack/loops.rs",
        "dlpack/rules.rs",
    ] {
        looked_at += 1;
        if !forbids(&sources::root().join(name)) {
            lacking.push(name.into());
        }
    }
    assert!(looked_at > 20, "only {looked_at} sources found");
    assert!(lacking.is_empty(), "no #![forbid(unsafe_code)]: {lacking:?}");
}

/// Imports among files: the names of other files that each module's file uses. A `mod.rs` may name the files below it,
/// so that these uses do not count. A name that it re-exports counts as a use of the file that has the name.
struct Imports {
    modules: Vec<String>,
    texts: Vec<String>,
    /// Names that a file re-exports from a file below it, each with its original name.
    re_exports: HashMap<String, String>,
}

impl Imports {
    fn of(sources: Vec<(String, String)>) -> Self {
        let shipped = sources.into_iter().filter(|(module, _)| !module.split("::").any(|part| part == "tests"));
        // Imports of tests make no circle in the library.
        let cut = |text: String| text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_owned();
        let (modules, texts): (Vec<String>, Vec<String>) = shipped.map(|(module, text)| (module, cut(text))).unzip();
        let mut re_exports = HashMap::new();
        for (module, text) in modules.iter().zip(&texts) {
            for name in
                ["pub use ", "pub(super) use ", "pub(crate) use "].iter().flat_map(|start| used_after(start, text))
            {
                let below = format!("{module}::{}", name.split("::").next().unwrap_or_default());
                if modules.contains(&below) && name.contains("::") {
                    let item = name.rsplit("::").next().unwrap_or_default();
                    re_exports.insert(format!("{module}::{item}"), format!("{module}::{name}"));
                }
            }
        }
        Self { modules, texts, re_exports }
    }

    /// Returns the file that has a name, given from the crate's root, if there is one.
    fn file_of(&self, name: &str) -> Option<usize> {
        let mut name = name.to_owned();
        loop {
            // Find the longest part of the name that is a file, and the end of the segment behind this part.
            let is_of =
                |module: &str| name.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"));
            let file = (0..self.modules.len())
                .filter(|&file| is_of(&self.modules[file]))
                .max_by_key(|&file| self.modules[file].len())?;
            let own = self.modules[file].len();
            let item = name.get(own + 2..).map_or(own, |rest| own + 2 + rest.find("::").unwrap_or(rest.len()));
            match self.re_exports.get(&name[..item]) {
                Some(further) => name = further.clone(),
                None => return Some(file),
            }
        }
    }

    /// Returns the files that a file uses.
    fn of_file(&self, file: usize) -> Vec<usize> {
        let (own, text) = (&self.modules[file], &self.texts[file]);
        let parent = own.rsplit_once("::").map_or("", |(parent, _)| parent);
        let of_parent = used_after("super::", text).into_iter().map(|name| format!("{parent}::{name}"));
        let mut files: Vec<usize> =
            used(text).into_iter().chain(of_parent).filter_map(|name| self.file_of(&name)).collect();
        files.retain(|&other| other != file && !self.modules[other].starts_with(&format!("{own}::")));
        files.sort_unstable();
        files.dedup();
        files
    }

    /// Returns lists of the names of files that reach each other.
    fn circles(&self) -> Vec<Vec<&str>> {
        let count = self.modules.len();
        let uses: Vec<Vec<usize>> = (0..count).map(|file| self.of_file(file)).collect();
        let reached_from = |file: usize| {
            let (mut reached, mut left) = (vec![false; count], vec![file]);
            while let Some(at) = left.pop() {
                left.extend(uses[at].iter().copied().filter(|&next| !reached[next]));
                uses[at].iter().for_each(|&next| reached[next] = true);
            }
            reached
        };
        let reached: Vec<Vec<bool>> = (0..count).map(reached_from).collect();
        let mut circles: Vec<Vec<&str>> = Vec::new();
        for file in (0..count).filter(|&file| reached[file][file]) {
            let circle = (0..count).filter(|&other| reached[file][other] && reached[other][file]);
            let mut circle: Vec<&str> = circle.map(|other| self.modules[other].as_str()).collect();
            circle.sort_unstable();
            circles.push(circle);
        }
        circles.sort();
        circles.dedup();
        circles
    }
}

/// Checks that no two files use each other: code that both need belongs to a third file below both.
#[test]
fn no_two_files_use_each_other() {
    let sources = sources::paths().into_iter().filter(|path| !path.ends_with("lib.rs"));
    let sources =
        sources.map(|path| (module(path.strip_prefix(sources::root()).unwrap()), fs::read_to_string(&path).unwrap()));
    let imports = Imports::of(sources.collect());
    let uses: usize = (0..imports.modules.len()).map(|file| imports.of_file(file).len()).sum();
    assert!(uses > 300, "only {uses} uses found");
    let circles = imports.circles();
    assert!(circles.is_empty(), "files that use each other, directly or by way of others: {circles:#?}");
}

#[test]
fn circles_through_re_exports_are_found() {
    let sources = |texts: &[(&str, &str)]| {
        Imports::of(texts.iter().map(|&(module, text)| (module.to_owned(), text.to_owned())).collect())
    };
    let found = |texts: &[(&str, &str)]| sources(texts).circles().concat().join(" ");
    assert_eq!(found(&[("a", "use crate::b::X;"), ("b", "use crate::c;"), ("c", "")]), "");
    assert_eq!(found(&[("a", "use crate::b::X;"), ("b", "use crate::c::f;"), ("c", "crate::a::g();")]), "a b c");
    // A parent may use its children, and they may use items that it defines itself.
    assert_eq!(found(&[("p", "mod a;\nuse a::X;"), ("p::a", "use super::Y;"), ("p::b", "use super::a::X;")]), "");
    assert_eq!(
        found(&[("p", "pub use a::X;\npub use b::Y;"), ("p::a", "use super::Y;"), ("p::b", "use super::{X};")]),
        "p::a p::b"
    );
    assert_eq!(found(&[("a", "#[cfg(test)]\nmod tests {\nuse crate::b::X;\n}"), ("b", "use crate::a::Y;")]), "");
}

#[test]
fn the_names_of_a_use_are_found() {
    let text = "use crate::{\n    bits::{self, cpu::tiled},\n    error::{Error as E, Result},\n};\n// crate::capi\nlet x = crate::dlpack::View::new($crate::error::error!(a));";
    let expected =
        ["bits::self", "bits::cpu::tiled", "error::Error", "error::Result", "dlpack::View::new", "error::error"];
    assert_eq!(used(text), expected);
}
