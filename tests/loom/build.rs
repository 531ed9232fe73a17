//! Has the sources of this package alone compiled with loom's types in place of the standard
//! library's.

fn main() {
    println!("cargo::rustc-cfg=loom");
    println!("cargo::rerun-if-changed=build.rs");
}
