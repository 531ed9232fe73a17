//! Sockets of backends: that somebody listens, and that libvirt's VMs may connect. None is
//! connected to.

use super::finding::{Finding, Name, shown, shown_path};
use super::users::{self, User};
use super::{Machine, Root};
use crate::find::{self, FindError};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Users as which libvirt runs VMs: Debian's and that of others.
const USERS: [&str; 2] = ["libvirt-qemu", "qemu"];
/// What the names of sockets for VMMs end in.
const ENDING: &str = "sock";
/// That of a lender, for borrowers: no VMM connects to it.
const LENDER: &str = "lend.sock";
/// Most bytes of the list of sockets.
const MOST_BYTES: u64 = 64 << 20;
/// `__SO_ACCEPTCON` of linux/net.h: somebody listens.
const LISTENS: u64 = 1 << 16;
/// `SS_CONNECTED`: one that was accepted is called as the one that listens.
const CONNECTED: u64 = 3;

/// What there is of them.
#[derive(Debug)]
pub struct Sockets {
    folder: PathBuf,
    /// All of them.
    found: Vec<Socket>,
    /// Folders that cannot be read, and why.
    unread: Vec<(PathBuf, String)>,
    /// libvirt's user, where there is one.
    user: Option<User>,
}

/// A socket.
#[derive(Debug)]
struct Socket {
    path: PathBuf,
    /// Whether somebody listens or is connected; none where that is not told.
    is_served: Option<bool>,
    /// Whether it is for VMMs.
    is_for_vmms: bool,
    mode: u32,
    owner: (u32, String),
    group: (u32, String),
}

impl Socket {
    /// Whether a user may write, as path_resolution(7) has it.
    fn lets(&self, user: &User) -> bool {
        let bit = match user {
            User { uid: 0, .. } => return true,
            User { uid, .. } if *uid == self.owner.0 => 0o200,
            User { groups, .. } if groups.contains(&self.group.0) => 0o020,
            _ => 0o002,
        };
        self.mode & bit != 0
    }
}

/// Looks for them.
#[must_use]
pub fn read(machine: &Machine) -> Sockets {
    let root = &machine.root;
    let folder = root.path(&machine.folder);
    let looked = match folder.exists() {
        true => find::sockets(&folder, |_| true),
        false => Ok(find::Sockets::default()),
    };
    let (paths, unread) = match looked {
        Ok(looked) => (looked.paths, looked.unread),
        Err(FindError::Read { path, source }) => (Vec::new(), vec![(path, source)]),
        Err(error) => (Vec::new(), vec![(folder.clone(), io::Error::other(error))]),
    };
    let unread = unread
        .into_iter()
        .map(|(path, error)| (root.inside(&path), error.to_string()));
    let list = root.bytes("/proc/net/unix", MOST_BYTES);
    let names: HashSet<_> = paths.iter().filter_map(|path| path.file_name()).collect();
    let served = list.ok().map(|list| served(root, &list, &names));
    let found = paths.into_iter().filter_map(|path| {
        // It may have gone.
        let about = fs::symlink_metadata(&path).ok()?;
        let is_lender = path == folder.join(LENDER);
        Some(Socket {
            is_served: served.as_ref().map(|served| served.contains(&real(&path))),
            is_for_vmms: !is_lender && path.extension().is_some_and(|end| end == ENDING),
            mode: about.mode() & 0o777,
            owner: (
                about.uid(),
                users::name_of(root, "/etc/passwd", about.uid()),
            ),
            group: (about.gid(), users::name_of(root, "/etc/group", about.gid())),
            path: root.inside(&path),
        })
    });
    Sockets {
        found: found.collect(),
        unread: unread.collect(),
        folder: machine.folder.clone(),
        user: users::find(root, &USERS),
    }
}

/// A path without links in its folder: whoever listens may have named it by another one.
fn real(path: &Path) -> PathBuf {
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    match (folder, path.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}

/// The paths in the kernel's list of sockets at which somebody listens or is connected, of those of
/// these names: others may be anybody's, in folders that wait for whoever looks into them. Relative
/// ones are of a folder that is not told.
fn served(root: &Root, list: &[u8], names: &HashSet<&OsStr>) -> HashSet<PathBuf> {
    let mut found = HashSet::new();
    let mut add = |is_served: bool, path: &[u8]| {
        let path = Path::new(OsStr::from_bytes(path));
        let is_named = path.file_name().is_some_and(|name| names.contains(name));
        if is_served && is_named && path.is_absolute() {
            found.insert(real(&root.path(path)));
        }
    };
    let list = list.strip_suffix(b"\n").unwrap_or(list);
    // The entry at hand, and where in the list its path begins: that goes on to where the next
    // entry begins, as it may have ends of lines. Whoever binds a socket can so have a line that
    // looks like an entry: what is told of sockets that nobody serves is not proof against that.
    let mut open: Option<(bool, usize)> = None;
    let mut at = 0;
    for line in list.split(|byte| *byte == b'\n') {
        if let Some((is_served, path)) = entry(line) {
            let begin = at + line.len() - path.len();
            if let Some((was_served, begin)) = open.replace((is_served, begin)) {
                add(was_served, &list[begin..at - 1]);
            }
        }
        at += line.len() + 1;
    }
    if let Some((is_served, begin)) = open {
        add(is_served, &list[begin..]);
    }
    found
}

/// Whether somebody listens or is connected at a socket, and the beginning of its path, from the
/// beginning of its entry: `Num RefCount Protocol Flags Type St Inode Path`. Inodes are padded,
/// paths are as they are, with whatever bytes they have.
fn entry(line: &[u8]) -> Option<(bool, &[u8])> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let (number, mut rest) = line.split_at_checked(colon + 1)?;
    hexadecimal(number.strip_suffix(b":")?)?;
    let mut field = || {
        let text = rest.trim_ascii_start();
        let length = text.iter().position(|byte| *byte == b' ');
        let (field, after) = text.split_at(length.unwrap_or(text.len()));
        rest = after;
        hexadecimal(field)
    };
    let (_references, _protocol, flags) = (field()?, field()?, field()?);
    // The digits of an inode are decimal ones, and its value is of no use.
    let (_kind, state, _inode) = (field()?, field()?, field()?);
    let is_served = flags & LISTENS != 0 || state == CONNECTED;
    Some((is_served, rest.strip_prefix(b" ").unwrap_or_default()))
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// What is to be said of them.
#[must_use]
pub fn judge(sockets: &Sockets) -> Vec<Finding> {
    let folder = shown_path(&sockets.folder);
    let all_or = |found: Vec<Finding>, name, what: String| match found.is_empty() {
        true => vec![Finding::ok(name, what)],
        false => found,
    };
    let unread = sockets.unread.iter().map(|(path, error)| {
        Finding::note(
            Name::SocketStale,
            format!(
                "{} cannot be looked into: {}",
                shown_path(path),
                shown(error)
            ),
            "Look as root, or as the backends' user, and at a folder of sockets",
        )
    });
    let nobodys = sockets
        .found
        .iter()
        .filter(|socket| socket.is_served == Some(false));
    let stale = nobodys.map(|socket| {
        let path = shown_path(&socket.path);
        Finding::problem(
            Name::SocketStale,
            format!("Nobody listens at {path}: its backend has ended"),
            format!("Start the backend again, which replaces it, or rm {path}"),
        )
    });
    let mut found = all_or(
        unread.chain(stale).collect(),
        Name::SocketStale,
        format!(
            "Somebody listens at each of {} sockets in {folder}",
            sockets.found.len()
        ),
    );
    let Some(user) = &sockets.user else {
        return found;
    };
    let refusing = sockets
        .found
        .iter()
        .filter(|socket| socket.is_for_vmms && !socket.lets(user));
    let refused = refusing.map(|socket| {
        let (owner, group) = (shown(&socket.owner.1), shown(&socket.group.1));
        Finding::problem(
            Name::SocketRights,
            format!(
                "{} may not connect to {}: it is of {owner}:{group}, mode {:04o}",
                user.name,
                shown_path(&socket.path),
                socket.mode
            ),
            format!(
                "socket-group in the backend's file (SocketGroup= and SocketMode=0660 in its \
                 .socket unit), for a group that {} is in",
                user.name
            ),
        )
    });
    found.extend(all_or(
        refused.collect(),
        Name::SocketRights,
        format!("{} may connect to the sockets in {folder}", user.name),
    ));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level::{Note, Ok as Fine, Problem};
    use crate::doctor::finding::tests::levels;
    use proptest::collection;
    use proptest::prelude::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;

    proptest! {
        #[test]
        fn any_list_is_read(
            parts in collection::vec(
                prop_oneof![
                    "([0-9a-f:]{1,9} ){0,7}.{0,20}".prop_map(String::into_bytes),
                    Just(b"0000000000000000: 2 0 10000 1 1 5 /none/x".to_vec()),
                    Just(b"\n".to_vec()),
                    collection::vec(any::<u8>(), 0..20),
                ],
                0..12,
            ),
        ) {
            let name = OsStr::new("x");
            let of = |list: &[u8]| served(&Root::new("/"), list, &HashSet::from([name]));
            let mut list = parts.concat();
            of(&list);
            // Whatever stands before it, one at which somebody listens is found.
            list.extend(b"\n0000000000000000: 2 0 10000 1 1 5 /none/x\n");
            prop_assert!(of(&list).contains(Path::new("/none/x")));
        }
    }

    const TITLES: &str = "Num       RefCount Protocol Flags    Type St Inode Path\n";

    /// A machine with a socket at /run/farlane/blk/vm0.sock, for which the kernel has these lines.
    fn machine(made: &Path, lines: &str) -> Machine {
        let machine = Machine::below(made);
        let root = &machine.root;
        for folder in ["/run/farlane/blk", "/proc/net", "/etc"] {
            fs::create_dir_all(root.path(folder)).unwrap();
        }
        let path = root.path("/run/farlane/blk/vm0.sock");
        drop(UnixListener::bind(&path).unwrap());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(root.path("/proc/net/unix"), TITLES.to_owned() + lines).unwrap();
        machine
    }

    #[test]
    fn a_socket_at_which_nobody_listens_is_a_problem() {
        let line = |flags, state, path| {
            format!("0000000075eb7c1e: 00000002 00000000 {flags} 0001 {state}   123 {path}\n")
        };
        let path = "/run/farlane/blk/vm0.sock";
        for (lines, level) in [
            (line("00010000", "01", path), Fine),
            (
                line("00010000", "01", "/var/run/farlane/blk/vm0.sock"),
                Fine,
            ),
            (line("00000000", "03", path), Fine),
            (line("00000000", "01", path), Problem),
            (line("00010000", "01", "/run/farlane/blk/vm1.sock"), Problem),
            (
                line("00010000", "01", "@/run/farlane/blk/vm0.sock"),
                Problem,
            ),
            ("0: 1\n\u{1b} / / / / / / /\n".to_owned(), Problem),
            (String::new(), Problem),
        ] {
            let made = tempfile::tempdir().unwrap();
            let machine = machine(made.path(), &lines);
            fs::create_dir(made.path().join("var")).unwrap();
            symlink("../run", made.path().join("var/run")).unwrap();
            let found = judge(&read(&machine));
            assert_eq!(levels(&found), [(level, "socket-stale")], "{lines}");
            if level == Problem {
                assert!(found[0].what.contains(path), "{found:?}");
            }
            fs::remove_file(machine.root.path("/proc/net/unix")).unwrap();
            let found = judge(&read(&machine));
            assert_eq!(levels(&found), [(Fine, "socket-stale")]);
        }
    }

    #[test]
    fn a_socket_whose_name_has_any_bytes_is_known_for_one_at_which_somebody_listens() {
        const HEAD: &[u8] = b"0000000075eb7c1e: 00000002 00000000 00010000 0001 01   123 ";
        let names: [&[u8]; 5] = [b"a\nb", b"a\n\n b: c\n", b"\x1b\t", b"\xff\xfe", b" a "];
        for name in names {
            let made = tempfile::tempdir().unwrap();
            let machine = machine(made.path(), "");
            let folder = machine.root.path("/run/farlane/blk");
            fs::remove_file(folder.join("vm0.sock")).unwrap();
            drop(UnixListener::bind(folder.join(OsStr::from_bytes(name))).unwrap());
            let found = judge(&read(&machine));
            assert_eq!(levels(&found), [(Problem, "socket-stale")], "{name:?}");
            let line = [HEAD, b"/run/farlane/blk/", name, b"\n"].concat();
            let list = [TITLES.as_bytes(), &line, HEAD, b"/other\n"].concat();
            fs::write(machine.root.path("/proc/net/unix"), list).unwrap();
            let found = judge(&read(&machine));
            assert_eq!(levels(&found), [(Fine, "socket-stale")], "{name:?}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_read_is_a_note() {
        let made = tempfile::tempdir().unwrap();
        fs::create_dir(made.path().join("run")).unwrap();
        fs::write(made.path().join("run/farlane"), "").unwrap();
        let found = judge(&read(&Machine::below(made.path())));
        assert_eq!(levels(&found), [(Note, "socket-stale")]);
        assert!(
            found[0].what.starts_with("/run/farlane cannot"),
            "{found:?}"
        );
    }

    #[test]
    fn a_machine_without_sockets_is_well() {
        let made = tempfile::tempdir().unwrap();
        let found = judge(&read(&Machine::below(made.path())));
        assert_eq!(levels(&found), [(Fine, "socket-stale")]);
    }

    #[test]
    fn a_socket_that_libvirt_may_not_write_to_is_a_problem() {
        let user = User {
            name: "libvirt-qemu".into(),
            uid: 64055,
            groups: vec![106, 7],
        };
        for (mode, owner, group, is_for_vmms, level) in [
            (0o600, 64055, 0, true, Fine),
            (0o066, 64055, 106, true, Problem),
            (0o660, 0, 106, true, Fine),
            (0o660, 0, 7, true, Fine),
            (0o606, 0, 7, true, Problem),
            (0o660, 0, 8, true, Problem),
            (0o666, 0, 8, true, Fine),
            (0o600, 0, 0, true, Problem),
            (0o600, 0, 0, false, Fine),
        ] {
            let sockets = Sockets {
                folder: "/a".into(),
                found: vec![Socket {
                    path: "/a/b\u{1b}.sock".into(),
                    is_served: Some(true),
                    is_for_vmms,
                    mode,
                    owner: (owner, "o".into()),
                    group: (group, "g".into()),
                }],
                unread: Vec::new(),
                user: Some(user.clone()),
            };
            let found = judge(&sockets);
            let expected = [(Fine, "socket-stale"), (level, "socket-rights")];
            assert_eq!(levels(&found), expected, "{sockets:?}");
            if level == Problem {
                let what = format!("/a/b\\u{{1b}}.sock: it is of o:g, mode {mode:04o}");
                assert!(found[1].what.ends_with(&what), "{found:?}");
            }
        }
    }

    #[test]
    fn rights_are_looked_at_where_libvirt_has_a_user() {
        let made = tempfile::tempdir().unwrap();
        let machine = machine(made.path(), "");
        let path = machine.root.path("/etc/passwd");
        fs::write(&path, "qemu:x:4000000:4000000::/:/bin/false\n").unwrap();
        let found = levels(&judge(&read(&machine)));
        assert_eq!(
            found,
            [(Problem, "socket-stale"), (Problem, "socket-rights")]
        );
        let folder = machine.root.path("/run/farlane");
        fs::rename(folder.join("blk/vm0.sock"), folder.join("lend.sock")).unwrap();
        let found = levels(&judge(&read(&machine)));
        assert_eq!(found, [(Problem, "socket-stale"), (Fine, "socket-rights")]);
    }
}
