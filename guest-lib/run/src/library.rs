//! Where Farlane's libraries are.

use anyhow::{Context as _, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The variable that the dynamic linker reads.
pub const PATH_VARIABLE: &str = "LD_LIBRARY_PATH";
/// The variable that names the folder outright.
const FOLDER_VARIABLE: &str = "FARLANE_LIB_DIR";
/// What the folder must hold.
const LIBRARY: &str = "libibverbs.so.1";
/// Where a package installs it.
const INSTALLED: &str = "/usr/lib/farlane";

/// The folder that holds our libibverbs: what `FARLANE_LIB_DIR` says, else `verbs/` beside this
/// program, else `/usr/lib/farlane`.
pub fn folder() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("Cannot find this program's own folder")?;
    let named = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from);
    let beside = program.parent().map(|folder| folder.join("verbs"));
    choose(
        named,
        [beside, Some(INSTALLED.into())].into_iter().flatten(),
    )
}

fn choose(
    named: Option<PathBuf>,
    places: impl Iterator<Item = PathBuf>,
) -> anyhow::Result<PathBuf> {
    let holds = |folder: &Path| folder.join(LIBRARY).exists();
    if let Some(folder) = named {
        // What a user names is not silently replaced by something else.
        if !holds(&folder) {
            bail!(
                "{FOLDER_VARIABLE} is {}, which holds no {LIBRARY}",
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
        "No {LIBRARY} in {}: build it, or name its folder in {FOLDER_VARIABLE}",
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
        let error = choose(Some(named.path().into()), places()).unwrap_err();
        assert!(error.to_string().contains("holds no libibverbs.so.1"));
        std::fs::write(named.path().join(LIBRARY), "").unwrap();
        assert_eq!(
            choose(Some(named.path().into()), places()).unwrap(),
            named.path()
        );
        assert_eq!(choose(None, places()).unwrap(), beside.path());
    }

    #[test]
    fn an_error_names_every_place_that_was_tried() {
        let places = ["/nowhere/a", "/nowhere/b"].map(PathBuf::from);
        let error = choose(None, places.into_iter()).unwrap_err().to_string();
        assert!(error.contains("/nowhere/a or /nowhere/b"), "{error}");
    }
}
