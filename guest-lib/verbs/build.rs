//! Links the library as `libibverbs.so.1` with the symbol versions of `libibverbs.map`.
//!
//! rustc hands the linker an anonymous version script of its own for every `cdylib`, which bfd
//! refuses to mix with named versions. So the linker is found through a small script that drops
//! that argument and passes on all others.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::{env, error::Error, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let source = env::var("CARGO_MANIFEST_DIR")?;
    let out = env::var("OUT_DIR")?;
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=libibverbs.map");

    let found = Command::new("sh")
        .args(["-c", &format!("command -v {}", linker_name()?)])
        .output()?;
    let linker = String::from_utf8(found.stdout)?;
    if linker.trim().is_empty() {
        return Err(
            "ld.bfd is needed to link libibverbs.so.1: install the package binutils".into(),
        );
    }
    write_linker(&Path::new(&out).join("ld.bfd"), linker.trim())?;

    for argument in [
        format!("-B{out}"),
        "-fuse-ld=bfd".into(),
        "-Wl,-soname,libibverbs.so.1".into(),
        format!("-Wl,--version-script={source}/libibverbs.map"),
        "-Wl,-z,defs".into(),
    ] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
    name_library(Path::new(&out))
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

/// Makes `target/<profile>/verbs/libibverbs.so.1`, which is what a program's library path needs.
/// It dangles until the link has finished.
fn name_library(out: &Path) -> Result<(), Box<dyn Error>> {
    let profile = out
        .ancestors()
        .nth(3)
        .ok_or("OUT_DIR has no profile folder above it")?;
    let folder = profile.join("verbs");
    fs::create_dir_all(&folder)?;
    let link = folder.join("libibverbs.so.1");
    let target = Path::new("../libfarlane_verbs.so");
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
