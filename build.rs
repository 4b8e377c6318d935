//! What is decided at build time: link arguments of the shared library, and what it says of its build for bug reports.

use std::{env, path::Path, process::Command};

/// What the library is made of.
const SOURCES: [&str; 6] = ["src", "include", "kernels", "build.rs", "Cargo.toml", "Cargo.lock"];

fn main() {
    // Not what else changes the commit: the name is that of the commit at which these were last built.
    SOURCES.iter().for_each(|path| println!("cargo:rerun-if-changed={path}"));
    println!("cargo:rerun-if-env-changed=GRADCODEC_COMMIT");
    println!("cargo:rustc-env=GRADCODEC_COMMIT={}", commit());
    println!("cargo:rustc-env=GRADCODEC_TARGET={}", env::var("TARGET").unwrap_or_default());
    let rustc = env::var("RUSTC").ok().and_then(|rustc| said(Command::new(rustc).arg("--version")));
    println!("cargo:rustc-env=GRADCODEC_COMPILER={}", rustc.as_deref().unwrap_or("an unknown compiler"));
    // SONAME: the major version is the ABI's (docs/ABI.md).
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgradcodec.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    // Deleters and thread-locals of ours outlive a dlclose: tensors that a framework still holds call back into this code.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}

/// The commit: GRADCODEC_COMMIT, by which a build without git may say it; else the one that is checked out, with "-dirty"
/// where these sources are not as they are in it; else "unknown".
fn commit() -> String {
    let named = env::var("GRADCODEC_COMMIT").ok();
    let word = |text: &String| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    named.filter(word).or_else(of_git).unwrap_or_else(|| "unknown".to_owned())
}

fn of_git() -> Option<String> {
    let folder = env::var("CARGO_MANIFEST_DIR").ok()?;
    let git = |arguments: &[&str]| said(Command::new("git").arg("-C").arg(&folder).args(arguments));
    // A copy of the sources within somebody else's repository is not at a commit of theirs.
    let top = git(&["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != Path::new(&folder).canonicalize().ok()? {
        return None;
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changes = git(&[&["status", "--porcelain", "--"], &SOURCES[..]].concat())?;
    Some(if changes.is_empty() { commit } else { format!("{commit}-dirty") })
}

/// What a program prints, if it succeeds.
fn said(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
