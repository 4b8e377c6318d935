//! Sets the link arguments of the shared library, and the description of the build for bug reports.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// Sources of the library.
const SOURCES: [&str; 6] = ["src", "include", "kernels", "build.rs", "Cargo.toml", "Cargo.lock"];
/// Variables that name a repository. Git sets them in hooks, and the repository may be another one.
const GIT_VARIABLES: [&str; 5] =
    ["GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"];

fn main() {
    SOURCES.iter().for_each(|path| println!("cargo:rerun-if-changed={path}"));
    println!("cargo:rerun-if-env-changed=GRADCODEC_COMMIT");
    println!("cargo:rustc-env=GRADCODEC_COMMIT={}", commit());
    println!("cargo:rustc-env=GRADCODEC_TARGET={}", env::var("TARGET").unwrap_or_default());
    let rustc = env::var("RUSTC").ok().and_then(|rustc| output_of(Command::new(rustc).arg("--version")));
    println!("cargo:rustc-env=GRADCODEC_COMPILER={}", rustc.as_deref().unwrap_or("an unknown compiler"));
    // The SONAME has the major version, which is that of the ABI (docs/ABI.md).
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgradcodec.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    // Our deleters and thread-locals outlive a dlclose: tensors that a framework still holds call this code.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}

/// Returns the commit: GRADCODEC_COMMIT, which a build without git may set; else the commit that is checked out, with
/// "-dirty" if these sources differ from it; else "unknown".
fn commit() -> String {
    let named = env::var("GRADCODEC_COMMIT").ok();
    let word = |text: &String| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    named.filter(word).or_else(git_commit).unwrap_or_else(|| "unknown".to_owned())
}

fn git_commit() -> Option<String> {
    let folder = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR")?);
    let git = |arguments: &[&str]| {
        // Without this option git status would write to the index.
        let mut command = Command::new("git");
        command.arg("--no-optional-locks").arg("-C").arg(&folder).args(arguments);
        GIT_VARIABLES.iter().for_each(|name| {
            command.env_remove(name);
        });
        output_of(&mut command)
    };
    // A copy of the sources within another repository is not at a commit of that repository.
    let top = git(&["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != folder.canonicalize().ok()? {
        return None;
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changes = git(&[&["status", "--porcelain", "--"], &SOURCES[..]].concat())?;
    if changes.is_empty() {
        // Sources that are not touched stay those of this commit, also when other files are committed. Later commits
        // need no new build.
        return Some(commit);
    }
    // A commit makes these sources clean. It writes to the log of HEAD, if one is kept, and to the branch or, without a
    // branch, to HEAD.
    let branch = git(&["symbolic-ref", "--quiet", "HEAD"]);
    for name in ["HEAD", "logs/HEAD", "packed-refs", "reftable"].into_iter().chain(branch.as_deref()) {
        let path = folder.join(git(&["rev-parse", "--git-path", name])?);
        // Cargo would build every time for a path that does not exist. A packed branch gets a file at the next commit;
        // until then cargo watches its folder.
        let is_branch = Some(name) == branch.as_deref();
        if let Some(path) = path.ancestors().take(if is_branch { usize::MAX } else { 1 }).find(|path| path.exists()) {
            println!("cargo:rerun-if-changed={}", path.display());
        }
    }
    Some(format!("{commit}-dirty"))
}

/// Returns the output of a program, if the program succeeds.
fn output_of(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
