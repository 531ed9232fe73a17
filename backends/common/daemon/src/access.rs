//! Who may connect to a daemon's sockets.

use crate::names;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, XattrFlags};
use rustix::io::Errno;
use rustix::process::Gid;
use std::collections::BTreeSet;
use std::os::fd::AsRawFd as _;
use std::path::Path;

/// Group and permissions of all sockets that a daemon makes; flattened into its arguments. By
/// default only its own user connects.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Access {
    /// Group that owns the created sockets, by name or number: its members can connect
    #[arg(long, value_name = "GROUP", value_parser = group)]
    pub socket_group: Option<u32>,

    /// Permissions of the created sockets, in octal [default: 0600; 0660 with --socket-group]
    #[arg(long, value_name = "MODE", value_parser = mode)]
    pub socket_mode: Option<u32>,
}

impl Access {
    /// Gives a socket's file to the group, and then opens it as far as it is to be. Whoever may
    /// write its folder can put another file in its place, or a link to one: nothing else than a
    /// socket of this user is changed.
    ///
    /// # Errors
    /// What was tried, and why it failed.
    pub(crate) fn apply(&self, path: &Path) -> Result<(), (&'static str, Errno)> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| ("examine", e))?;
        let stat = rustix::fs::fstat(&file).map_err(|e| ("examine", e))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Socket
            || stat.st_uid != rustix::process::geteuid().as_raw()
        {
            return Err(("protect", Errno::NOTSOCK));
        }
        if let Some(group) = self.socket_group.map(Gid::from_raw) {
            rustix::fs::chownat(&file, "", None, Some(group), AtFlags::EMPTY_PATH)
                .map_err(|e| ("give to its group", e))?;
        }
        let usual = match self.socket_group {
            Some(_) => 0o660,
            None => 0o600,
        };
        let mode = Mode::from_bits_truncate(self.socket_mode.unwrap_or(usual));
        let held = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::chmod(held, mode).map_err(|e| ("protect", e))
    }
}

/// Lets these users and groups connect to a socket's file besides its own user, and nobody else:
/// by an access control list (acl(5)), or everybody where its file system has none. Such a socket
/// is [this user's alone](Access::apply) before.
///
/// # Errors
/// What was tried, and why it failed.
pub(crate) fn let_in(
    path: &Path,
    users: &BTreeSet<u32>,
    groups: &BTreeSet<u32>,
) -> Result<(), (&'static str, Errno)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| ("examine", e))?;
    let held = format!("/proc/self/fd/{}", file.as_raw_fd());
    let list = access_list(users, groups);
    let name = "system.posix_acl_access";
    match rustix::fs::setxattr(&held, name, &list, XattrFlags::empty()) {
        Ok(()) => Ok(()),
        Err(_) => {
            let everybody = Mode::from_bits_truncate(0o666);
            rustix::fs::chmod(held, everybody).map_err(|e| ("protect", e))
        }
    }
}

/// The list as the kernel reads it (`linux/posix_acl_xattr.h`), its entries in the order of their
/// tags and numbers.
fn access_list(users: &BTreeSet<u32>, groups: &BTreeSet<u32>) -> Vec<u8> {
    const VERSION: u32 = 2;
    const USER_OBJ: u16 = 0x01;
    const USER: u16 = 0x02;
    const GROUP_OBJ: u16 = 0x04;
    const GROUP: u16 = 0x08;
    const MASK: u16 = 0x10;
    const OTHER: u16 = 0x20;
    const READ_WRITE: u16 = 6;
    const NOBODY: u32 = u32::MAX;
    let mut list = VERSION.to_le_bytes().to_vec();
    let mut add = |tag: u16, rights: u16, id: u32| {
        list.extend(tag.to_le_bytes());
        list.extend(rights.to_le_bytes());
        list.extend(id.to_le_bytes());
    };
    add(USER_OBJ, READ_WRITE, NOBODY);
    users.iter().for_each(|user| add(USER, READ_WRITE, *user));
    add(GROUP_OBJ, 0, NOBODY);
    groups
        .iter()
        .for_each(|group| add(GROUP, READ_WRITE, *group));
    add(MASK, READ_WRITE, NOBODY);
    add(OTHER, 0, NOBODY);
    list
}

/// The number of a group.
fn group(text: &str) -> Result<u32, String> {
    names::group(text).ok_or_else(|| format!("there is no group {text:?}"))
}

/// Permissions as `chmod` has them.
fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    let mode = mode.filter(|mode| *mode <= 0o777 && !text.starts_with('+'));
    mode.ok_or_else(|| format!("{text:?} is not permissions in octal, such as 0660"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Options {
        #[command(flatten)]
        access: Access,
    }

    fn parse(words: &[&str]) -> Result<Access, clap::Error> {
        let words = [&["daemon"], words].concat();
        <Options as clap::Parser>::try_parse_from(words).map(|options| options.access)
    }

    #[test]
    fn what_somebody_has_put_in_a_sockets_place_is_left_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let [precious, link] = ["precious", "link"].map(|name| folder.path().join(name));
        std::fs::write(&precious, "").unwrap();
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        let mode = || std::fs::metadata(&precious).unwrap().permissions().mode() & 0o7777;
        let before = mode();
        let access = parse(&["--socket-mode", "0602"]).unwrap();
        for path in [&link, &precious] {
            assert!(access.apply(path).is_err(), "{}", path.display());
            assert_eq!(mode(), before);
        }
    }

    #[test]
    fn groups_have_names_and_numbers_and_modes_are_octal() {
        let said = |words: &[&str]| {
            let access = parse(words).unwrap();
            (access.socket_group, access.socket_mode)
        };
        assert_eq!(said(&[]), (None, None));
        assert_eq!(said(&["--socket-group", "root"]), (Some(0), None));
        assert_eq!(said(&["--socket-group", "107"]), (Some(107), None));
        assert_eq!(said(&["--socket-mode", "0666"]), (None, Some(0o666)));
        for words in [
            ["--socket-group", "no such group"],
            ["--socket-group", ""],
            ["--socket-group", "4294967295"],
            ["--socket-mode", "0888"],
            ["--socket-mode", "1777"],
            ["--socket-mode", "+7"],
            ["--socket-mode", "rw-rw----"],
        ] {
            assert!(parse(&words).is_err(), "{words:?}");
        }
    }
}
