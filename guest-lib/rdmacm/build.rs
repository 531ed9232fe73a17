//! Links the library as `librdmacm.so.1` with the symbol versions of `librdmacm.map`, and with
//! `libibverbs.so.1` beside it.
//!
//! rustc hands the linker an anonymous version script of its own for every `cdylib`, which bfd
//! refuses to mix with named versions. So the linker is found through a small script that drops
//! that argument and passes on all others. What it links with is a library of the names and
//! versions of `../verbs/libibverbs.map` that has nothing else: the one that is there when a
//! program runs may be another one.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::{env, error::Error, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let source = env::var("CARGO_MANIFEST_DIR")?;
    let out = env::var("OUT_DIR")?;
    let verbs = format!("{source}/../verbs/libibverbs.map");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=librdmacm.map");
    println!("cargo::rerun-if-changed={verbs}");

    let found = Command::new("sh")
        .args(["-c", &format!("command -v {}", linker_name()?)])
        .output()?;
    let linker = String::from_utf8(found.stdout)?;
    let linker = linker.trim();
    if linker.is_empty() {
        return Err("ld.bfd is needed to link librdmacm.so.1: install the package binutils".into());
    }
    write_linker(&Path::new(&out).join("ld.bfd"), linker)?;
    name_verbs(linker, Path::new(&out), Path::new(&verbs))?;

    println!("cargo::rustc-link-search=native={out}");
    println!("cargo::rustc-link-lib=dylib=ibverbs");
    for argument in [
        format!("-B{out}"),
        "-fuse-ld=bfd".into(),
        "-Wl,-soname,librdmacm.so.1".into(),
        format!("-Wl,--version-script={source}/librdmacm.map"),
        "-Wl,-z,defs".into(),
    ] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
    name_library(Path::new(&out))
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

/// The name of the linker; of another architecture it is as GNU's cross tools have it.
fn linker_name() -> Result<String, env::VarError> {
    if env::var("HOST")? == env::var("TARGET")? {
        return Ok("ld.bfd".into());
    }
    Ok(format!(
        "{}-linux-gnu-ld.bfd",
        env::var("CARGO_CFG_TARGET_ARCH")?
    ))
}

/// Writes a linker that drops rustc's version script, a file `list` in a folder `rustc*`.
fn write_linker(path: &Path, linker: &str) -> Result<(), Box<dyn Error>> {
    let script = format!(
        r#"#!/bin/sh
left=$#
while [ "$left" -gt 0 ]; do
    argument=$1
    shift
    left=$((left - 1))
    case $argument in
    --version-script=*/rustc*/list) ;;
    *) set -- "$@" "$argument" ;;
    esac
done
exec {linker} "$@"
"#
    );
    fs::write(path, script)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Makes `target/<profile>/verbs/librdmacm.so.1`, beside `libibverbs.so.1`. It dangles until the
/// link has finished.
fn name_library(out: &Path) -> Result<(), Box<dyn Error>> {
    let profile = out
        .ancestors()
        .nth(3)
        .ok_or("OUT_DIR has no profile folder above it")?;
    let folder = profile.join("verbs");
    fs::create_dir_all(&folder)?;
    let link = folder.join("librdmacm.so.1");
    let target = Path::new("../libfarlane_rdmacm.so");
    if fs::read_link(&link).is_ok_and(|to| to == target) {
        return Ok(());
    }
    match fs::remove_file(&link) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    match symlink(target, &link) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error.into()),
        _ => Ok(()),
    }
}
