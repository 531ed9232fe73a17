//! Links the library as `librdmacm.so.1` with the symbol versions of `librdmacm.map`, and with
//! `libibverbs.so.1` beside it.
//!
//! What it links with is a library of the names and versions of `../verbs/libibverbs.map` that has
//! nothing else: the one that is there when a program runs may be another one.

#[path = "../version_script.rs"]
mod version_script;

use std::path::Path;
use std::process::Command;
use std::{env, error::Error, fs};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../version_script.rs");
    let source = env::var("CARGO_MANIFEST_DIR")?;
    let source = Path::new(&source);
    let verbs = source.join("../verbs/libibverbs.map");
    println!("cargo::rerun-if-changed={}", verbs.display());
    let out = env::var("OUT_DIR")?;
    let out = Path::new(&out);
    let map = source.join("librdmacm.map");
    let linker = version_script::link(out, "librdmacm.so.1", &map)?;
    name_verbs(&linker, out, &verbs)?;
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=dylib=ibverbs");
    version_script::name_library(out, "librdmacm.so.1", "libfarlane_rdmacm.so")
}

/// Makes `libibverbs.so` of the names in a map, and `libibverbs.so.1`, as tests load it.
fn name_verbs(linker: &str, out: &Path, map: &Path) -> Result<(), Box<dyn Error>> {
    let text = fs::read_to_string(map)?;
    let names = text.split_whitespace().filter_map(|word| {
        let name = word.strip_suffix(';')?;
        name.starts_with(|c: char| c.is_alphabetic() || c == '_')
            .then_some(name)
            .filter(|name| !name.contains('*'))
    });
    // An object of nothing, of this machine's kind.
    fs::write(out.join("nothing"), [0])?;
    let library = out.join("libibverbs.so");
    let link = |command: &mut Command| match command.current_dir(out).status()?.success() {
        true => Ok(()),
        false => Err(Box::<dyn Error>::from(
            "libibverbs.so cannot be made of its names",
        )),
    };
    link(Command::new(linker).args(["-r", "-b", "binary", "nothing", "-o", "nothing.o"]))?;
    link(
        Command::new(linker)
            .args(["-shared", "-soname", "libibverbs.so.1", "--version-script"])
            .arg(map)
            .args(names.map(|name| format!("--defsym={name}=_binary_nothing_start")))
            .arg("-o")
            .arg(&library)
            .arg("nothing.o"),
    )?;
    fs::copy(&library, out.join("libibverbs.so.1"))?;
    Ok(())
}
