//! Where backends of this host tell their metrics.
//!
//! A folder of sockets has those that VMMs connect to, too, and whoever connects to one of these is
//! taken for a VMM: only sockets whose names end in `.metrics` are looked at.

use crate::options::Backends;
use farlane_daemon::metrics::MetricsAddress;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// What the names of these sockets end in.
const ENDING: &str = "metrics";
/// How many folders deep they may be, how many entries of folders are looked at, and how many
/// sockets are asked: the folder may be any.
const MOST_DEEP: usize = 4;
const MOST_ENTRIES: usize = 20_000;
const MOST_SOCKETS: usize = 1024;

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
    #[error("{} has more than {MOST_ENTRIES} entries, or {MOST_SOCKETS} sockets", path.display())]
    Many {
        /// The folder.
        path: PathBuf,
    },
}

/// What there is.
#[derive(Debug, Default)]
pub struct Found {
    /// Where backends can be asked.
    pub addresses: Vec<MetricsAddress>,
    /// Folders that cannot be read.
    pub unread: Vec<(PathBuf, io::Error)>,
}

/// The addresses that were named, or else those in the folder.
///
/// # Errors
/// See [`FindError`]. A folder below it that cannot be read is none.
pub fn find(of: &Backends) -> Result<Found, FindError> {
    if of.sockets.is_empty() {
        return in_folder(&of.folder);
    }
    Ok(Found {
        addresses: of.sockets.clone(),
        unread: Vec::new(),
    })
}

/// Those in a folder and below it, in their order.
fn in_folder(top: &Path) -> Result<Found, FindError> {
    let is_wanted = |path: &Path| path.extension().is_some_and(|end| end == ENDING);
    let Sockets { paths, unread } = sockets(top, is_wanted)?;
    Ok(Found {
        addresses: paths.into_iter().map(MetricsAddress::Path).collect(),
        unread,
    })
}

/// Sockets of a folder.
#[derive(Debug, Default)]
pub struct Sockets {
    /// Where they are.
    pub paths: Vec<PathBuf>,
    /// Folders that cannot be read.
    pub unread: Vec<(PathBuf, io::Error)>,
}

/// The sockets in a folder and those below it that are wanted, in their order. Links are not
/// followed.
///
/// # Errors
/// See [`FindError`]. A folder below it that cannot be read is none.
pub fn sockets(top: &Path, is_wanted: impl Fn(&Path) -> bool) -> Result<Sockets, FindError> {
    let (mut paths, mut unread) = (Vec::new(), Vec::new());
    let mut entries = 0;
    let mut folders = vec![(top.to_owned(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        let read = match std::fs::read_dir(&folder) {
            Ok(read) => read,
            Err(source) if depth == 0 => {
                let path = folder;
                return Err(FindError::Read { path, source });
            }
            // It has just gone.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => {
                unread.push((folder, error));
                continue;
            }
        };
        // An entry that cannot be read has gone, too.
        for entry in read.flatten() {
            entries += 1;
            let Ok(kind) = entry.file_type() else {
                continue;
            };
            let path = entry.path();
            if kind.is_dir() && depth < MOST_DEEP {
                folders.push((path, depth + 1));
            } else if kind.is_socket() && is_wanted(&path) {
                paths.push(path);
            }
            if entries > MOST_ENTRIES || paths.len() > MOST_SOCKETS {
                let path = top.to_owned();
                return Err(FindError::Many { path });
            }
        }
    }
    paths.sort();
    Ok(Sockets { paths, unread })
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
        let found = find(&of(Vec::new())).unwrap();
        assert!(found.unread.is_empty(), "{found:?}");
        let path = |name: &str| MetricsAddress::Path(folder.join(name));
        let known = [path("blk/vm0.metrics"), path("lend.metrics")];
        assert_eq!(found.addresses, known);
        let named = vec![path("any")];
        assert_eq!(find(&of(named.clone())).unwrap().addresses, named);
        let error = in_folder(&folder.join("none")).unwrap_err();
        assert!(error.to_string().starts_with("Cannot read"), "{error}");
    }

    #[test]
    fn a_folder_of_endlessly_many_entries_is_refused() {
        let made = tempfile::tempdir().unwrap();
        let folder = made.path();
        for n in 0..=MOST_ENTRIES {
            fs::write(folder.join(n.to_string()), "").unwrap();
        }
        let error = in_folder(folder).unwrap_err();
        assert!(error.to_string().contains("more than 20000"), "{error}");
    }
}
