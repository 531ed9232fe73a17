//! Part of the build scripts of libraries whose symbols have versions.
//!
//! rustc hands the linker an anonymous version script of its own for every `cdylib`, which bfd
//! refuses to mix with named versions. So the linker is found through a small script that drops
//! that argument and passes on all others.

use std::error::Error;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// Has the library linked by such a script, under a name, with the versions of a map. Returns the
/// linker.
///
/// # Errors
/// There is no `ld.bfd` for the target, or files cannot be written.
pub fn link(out: &Path, name: &str, map: &Path) -> Result<String, Box<dyn Error>> {
    println!("cargo::rerun-if-changed={}", map.display());
    let wanted = linker_name()?;
    let found = Command::new("sh")
        .args(["-c", &format!("command -v {wanted}")])
        .output()?;
    let linker = String::from_utf8(found.stdout)?.trim().to_owned();
    if linker.is_empty() {
        return Err(
            format!("{wanted} is needed to link {name}: install binutils for the target").into(),
        );
    }
    write_linker(&out.join("ld.bfd"), &linker)?;
    for argument in [
        format!("-B{}", out.display()),
        "-fuse-ld=bfd".into(),
        format!("-Wl,-soname,{name}"),
        format!("-Wl,--version-script={}", map.display()),
        "-Wl,-z,defs".into(),
    ] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
    Ok(linker)
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

/// Makes `target/<profile>/verbs/NAME`, which is what a program's library path needs, a link to the
/// library that cargo makes. It dangles until the link has finished.
///
/// # Errors
/// It cannot be made.
pub fn name_library(out: &Path, name: &str, made: &str) -> Result<(), Box<dyn Error>> {
    let profile = out
        .ancestors()
        .nth(3)
        .ok_or("OUT_DIR has no profile folder above it")?;
    let folder = profile.join("verbs");
    fs::create_dir_all(&folder)?;
    let link = folder.join(name);
    let target = Path::new("..").join(made);
    if fs::read_link(&link).is_ok_and(|to| to == target) {
        return Ok(());
    }
    match fs::remove_file(&link) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    match symlink(&target, &link) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error.into()),
        _ => Ok(()),
    }
}
