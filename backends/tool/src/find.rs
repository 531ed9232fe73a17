//! Where backends of this host tell their metrics.
//!
//! A folder of sockets has those that VMMs connect to, too, and whoever connects to one of these is
//! taken for a VMM: only sockets whose names end in `.metrics` are looked at.

use crate::options::Backends;
use farlane_daemon::metrics::MetricsAddress;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// What the names of these sockets end in.
const ENDING: &str = "metrics";
/// How many folders deep they may be, and how many entries of folders are looked at: the folder may
/// be any.
const MOST_DEEP: usize = 4;
const MOST_ENTRIES: usize = 20_000;

/// Why backends cannot be found.
#[derive(Debug, Error)]
pub enum FindError {
    /// A folder cannot be read.
    #[error("Cannot read {}", path.display())]
    Read {
        /// The folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is no folder of sockets.
    #[error("{} has more than {MOST_ENTRIES} entries", path.display())]
    Many {
        /// The folder.
        path: PathBuf,
    },
}

/// The addresses that were named, or else those in the folder.
///
/// # Errors
/// See [`FindError`].
pub fn addresses(of: &Backends) -> Result<Vec<MetricsAddress>, FindError> {
    if !of.sockets.is_empty() {
        return Ok(of.sockets.clone());
    }
    let mut paths = in_folder(&of.folder)?;
    paths.sort();
    Ok(paths.into_iter().map(MetricsAddress::Path).collect())
}

/// The sockets in a folder and those below it. Links are not followed.
fn in_folder(folder: &Path) -> Result<Vec<PathBuf>, FindError> {
    let mut found = Vec::new();
    let mut entries = 0;
    let mut folders = vec![(folder.to_owned(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        let refuse = |source| FindError::Read {
            path: folder.clone(),
            source,
        };
        for entry in std::fs::read_dir(&folder).map_err(refuse)? {
            entries += 1;
            if entries > MOST_ENTRIES {
                return Err(FindError::Many { path: folder });
            }
            let entry = entry.map_err(refuse)?;
            let (path, kind) = (entry.path(), entry.file_type().map_err(refuse)?);
            if kind.is_dir() && depth < MOST_DEEP {
                folders.push((path, depth + 1));
            } else if kind.is_socket() && path.extension().is_some_and(|end| end == ENDING) {
                found.push(path);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    #[test]
    fn sockets_for_metrics_are_found_and_those_of_vms_left_alone() {
        let made = tempfile::tempdir().unwrap();
        let folder = made.path();
        fs::create_dir_all(folder.join("blk/a/b/c/d")).unwrap();
        let names = [
            "lend.metrics",
            "blk/vm0.metrics",
            "blk/vm0.sock",
            "blk/a/b/c/d/e.metrics",
        ];
        for name in names {
            drop(UnixListener::bind(folder.join(name)).unwrap());
        }
        fs::write(folder.join("blk/file.metrics"), "").unwrap();
        symlink(folder.join("lend.metrics"), folder.join("link.metrics")).unwrap();
        symlink(folder, folder.join("blk/up")).unwrap();
        let of = |sockets| Backends {
            sockets,
            folder: folder.to_owned(),
        };
        let found: Vec<_> = addresses(&of(Vec::new())).unwrap();
        let path = |name: &str| MetricsAddress::Path(folder.join(name));
        assert_eq!(found, [path("blk/vm0.metrics"), path("lend.metrics")]);
        let named = vec![path("any")];
        assert_eq!(addresses(&of(named.clone())).unwrap(), named);
        let error = in_folder(&folder.join("none")).unwrap_err();
        assert!(error.to_string().starts_with("Cannot read"), "{error}");
    }
}
