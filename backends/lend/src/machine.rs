//! What tells this host from all others.

use std::path::Path;

/// Where the machine ID is (`machine-id(5)`), and where D-Bus has kept its own.
const FILES: [&str; 2] = ["etc/machine-id", "var/lib/dbus/machine-id"];
/// Hexadecimal digits of a machine ID.
const LENGTH: usize = 32;

/// The machine ID of the host whose root directory this is. There is none where nothing has made
/// one: in containers, in the first boot of an image, without systemd and D-Bus.
#[must_use]
pub fn id(root: &Path) -> Option<String> {
    FILES.iter().find_map(|file| {
        let text = std::fs::read_to_string(root.join(file)).ok()?;
        let id = text.trim();
        let is_id = id.len() == LENGTH && id.bytes().all(|b| b.is_ascii_hexdigit());
        // All zeroes is nobody's (sd_id128_get_machine(3)).
        (is_id && id.bytes().any(|b| b != b'0')).then(|| id.to_ascii_lowercase())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn a_machine_id_is_taken_from_where_there_is_one() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert_eq!(id(root.path()), None);
        for none in [
            "",
            "\n",
            "uninitialized\n",
            "0123",
            "00000000000000000000000000000000\n",
            "0123456789abcdef0123456789abcdeg\n",
        ] {
            write("etc/machine-id", none);
            assert_eq!(id(root.path()), None, "{none:?}");
        }
        write("var/lib/dbus/machine-id", &format!("{ID}\n"));
        assert_eq!(id(root.path()).as_deref(), Some(ID));
        let other = ID.replace('0', "F");
        write("etc/machine-id", &other);
        assert_eq!(id(root.path()), Some(other.to_lowercase()));
        std::fs::write(root.path().join("etc/machine-id"), [0xff; 32]).unwrap();
        assert_eq!(id(root.path()).as_deref(), Some(ID));
    }
}
