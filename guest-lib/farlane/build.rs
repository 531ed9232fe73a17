//! Gives `libfarlane.so` its name, which programs that are linked with it ask the loader for:
//! `libfarlane.so.0`, whose number changes when programs that were linked with it cannot use it any
//! more. Without a name they would ask for the path that they were linked with.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libfarlane.so.0");
}
