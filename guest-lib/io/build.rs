//! Gives `libfarlane_io.so` its name, and tells its tests where it is.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libfarlane_io.so");
}
