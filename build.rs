//! Link arguments of the shared library: nothing else is decided at build time.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // SONAME: the major version is the ABI's (docs/ABI.md).
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgradcodec.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    // Deleters and thread-locals of ours outlive a dlclose: tensors that a framework still holds call back into this code.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
