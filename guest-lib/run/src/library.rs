//! Where Farlane's libraries are.

use anyhow::{Context as _, bail};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The variable that the dynamic linker reads.
pub const PATH_VARIABLE: &str = "LD_LIBRARY_PATH";
/// The variable that names the folder outright.
const FOLDER_VARIABLE: &str = "FARLANE_LIB_DIR";
/// What the folder must hold.
const LIBRARY: &str = "libibverbs.so.1";
/// Where packages install it: Debian's in the folder of the architecture, others without one.
fn installed() -> [PathBuf; 2] {
    let of_architecture = format!("/usr/lib/{}-linux-gnu/farlane", std::env::consts::ARCH);
    [of_architecture.into(), "/usr/lib/farlane".into()]
}

/// The variable that names libraries that are loaded before all others.
pub const PRELOAD_VARIABLE: &str = "LD_PRELOAD";
/// The library that serves file I/O with device memory.
const IO_LIBRARY: &str = "libfarlane_io.so";

/// The folder that holds our libibverbs: what `FARLANE_LIB_DIR` says, else `verbs/` beside this
/// program, else where packages install it.
pub fn folder() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("Cannot find this program's own folder")?;
    let named = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from);
    let beside = program.parent().map(|folder| folder.join("verbs"));
    choose(LIBRARY, named, beside.into_iter().chain(installed()))
}

/// The value for [`PRELOAD_VARIABLE`]: what is there already, then our library for file I/O: in the
/// folder that `FARLANE_LIB_DIR` says, else beside this program, else where packages install it.
pub fn preload() -> anyhow::Result<OsString> {
    let program = std::env::current_exe().context("Cannot find this program's own folder")?;
    let named = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from);
    let beside = program.parent().map(Path::to_owned);
    let places = beside.into_iter().chain(installed());
    let library = choose(IO_LIBRARY, named, places)?.join(IO_LIBRARY);
    let before = std::env::var_os(PRELOAD_VARIABLE);
    preload_after(before.as_deref(), &library)
}

fn preload_after(before: Option<&OsStr>, library: &Path) -> anyhow::Result<OsString> {
    // The loader splits at both, and knows no way to quote them.
    let text = library.to_string_lossy();
    if text.contains([' ', ':']) {
        bail!("{text} cannot be preloaded: there is a space or a colon in it");
    }
    let mut value = OsString::new();
    if let Some(before) = before.filter(|before| !before.is_empty()) {
        value.push(before);
        value.push(":");
    }
    value.push(library);
    Ok(value)
}

fn choose(
    library: &str,
    named: Option<PathBuf>,
    places: impl Iterator<Item = PathBuf>,
) -> anyhow::Result<PathBuf> {
    let holds = |folder: &Path| folder.join(library).exists();
    if let Some(folder) = named {
        // What a user names is not silently replaced by something else.
        if !holds(&folder) {
            bail!(
                "{FOLDER_VARIABLE} is {}, which holds no {library}",
                folder.display()
            );
        }
        return Ok(std::path::absolute(folder)?);
    }
    let mut tried = Vec::new();
    for folder in places {
        if holds(&folder) {
            return Ok(folder);
        }
        tried.push(folder.display().to_string());
    }
    bail!(
        "No {library} in {}: build it, or name its folder in {FOLDER_VARIABLE}",
        tried.join(" or ")
    )
}

/// The value for [`PATH_VARIABLE`]: `folder`, then what is there already.
pub fn search_path(folder: &Path) -> anyhow::Result<OsString> {
    let before = std::env::var_os(PATH_VARIABLE);
    let rest = before.iter().flat_map(std::env::split_paths);
    let folders =
        std::iter::once(folder.to_owned()).chain(rest.filter(|p| !p.as_os_str().is_empty()));
    std::env::join_paths(folders)
        .with_context(|| format!("{} cannot be part of {PATH_VARIABLE}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_folder_wins_and_must_hold_the_library() {
        let named = tempfile::tempdir().unwrap();
        let beside = tempfile::tempdir().unwrap();
        std::fs::write(beside.path().join(LIBRARY), "").unwrap();
        let places = || std::iter::once(beside.path().to_owned());
        let error = choose(LIBRARY, Some(named.path().into()), places()).unwrap_err();
        assert!(error.to_string().contains("holds no libibverbs.so.1"));
        std::fs::write(named.path().join(LIBRARY), "").unwrap();
        assert_eq!(
            choose(LIBRARY, Some(named.path().into()), places()).unwrap(),
            named.path()
        );
        assert_eq!(choose(LIBRARY, None, places()).unwrap(), beside.path());
    }

    #[test]
    fn an_error_names_every_place_that_was_tried() {
        let places = ["/nowhere/a", "/nowhere/b"].map(PathBuf::from);
        let error = choose(LIBRARY, None, places.into_iter())
            .unwrap_err()
            .to_string();
        assert!(error.contains("/nowhere/a or /nowhere/b"), "{error}");
    }

    #[test]
    fn what_is_preloaded_already_stays_in_front() {
        let ours = Path::new("/l/libfarlane_io.so");
        let value = |before: Option<&str>| preload_after(before.map(OsStr::new), ours).unwrap();
        assert_eq!(value(None), "/l/libfarlane_io.so");
        assert_eq!(value(Some("")), "/l/libfarlane_io.so");
        assert_eq!(value(Some("a.so b.so")), "a.so b.so:/l/libfarlane_io.so");
        assert!(preload_after(None, Path::new("/a b/libfarlane_io.so")).is_err());
    }
}
