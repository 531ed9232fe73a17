//! Users and groups of the machine's own files: passwd(5), group(5).

use super::Root;

/// Most bytes of either file.
const MOST_BYTES: u64 = 4 << 20;

/// A user, and all groups that it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// What it is called.
    pub name: String,
    /// Its number.
    pub uid: u32,
    /// Numbers of its groups.
    pub groups: Vec<u32>,
}

/// The first of these users that there is.
#[must_use]
pub fn find(root: &Root, names: &[&str]) -> Option<User> {
    let text = |path| root.long_text(path, MOST_BYTES).unwrap_or_default();
    let users = text("/etc/passwd");
    let (name, uid, gid) = names.iter().find_map(|name| {
        users.lines().find_map(|line| {
            let mut fields = line.split(':');
            let is_named = fields.next() == Some(name);
            let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
            is_named.then_some((name, uid, gid))
        })
    })?;
    let mut groups = vec![gid];
    for line in text("/etc/group").lines() {
        let mut fields = line.split(':').skip(2);
        let group = fields.next().and_then(|group| group.parse::<u32>().ok());
        let mut members = fields.next().unwrap_or_default().split(',');
        groups.extend(group.filter(|_| members.any(|member| member == *name)));
    }
    Some(User {
        name: (*name).to_owned(),
        uid,
        groups,
    })
}

/// What a user or group of this number is called, or the number. `file` is either file.
#[must_use]
pub fn name_of(root: &Root, file: &str, number: u32) -> String {
    let text = root.long_text(file, MOST_BYTES).unwrap_or_default();
    let number = number.to_string();
    let mut lines = text.lines().map(|line| line.split(':'));
    let named = lines.find_map(|mut fields| {
        let name = fields.next()?;
        (fields.nth(1)? == number).then(|| name.to_owned())
    });
    named.unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    proptest! {
        #[test]
        fn any_file_is_read(text in "(a?:?){0,3}[0-9]{0,12}:.*") {
            let made = tempfile::tempdir().unwrap();
            let root = Root::new(made.path());
            fs::create_dir(root.path("/etc")).unwrap();
            fs::write(root.path("/etc/passwd"), &text).unwrap();
            fs::write(root.path("/etc/group"), &text).unwrap();
            let found = find(&root, &["a", ""]);
            prop_assert!(found.is_none_or(|user| ["a", ""].contains(&&*user.name)));
            let name = name_of(&root, "/etc/group", 1);
            prop_assert!(name == "1" || text.starts_with(&name));
        }
    }

    #[test]
    fn a_user_has_its_own_group_and_those_that_name_it() {
        let made = tempfile::tempdir().unwrap();
        let root = Root::new(made.path());
        assert_eq!(find(&root, &["a"]), None);
        fs::create_dir(root.path("/etc")).unwrap();
        let users = "root:x:0:0::/:/bin/sh\n\nb:x\nb:x:one:1::\nab:x:6:6::\nb:x:64055:106::\n";
        fs::write(root.path("/etc/passwd"), users).unwrap();
        let groups = "root:x:0:\nkvm:x:106:\nmany:x:7:ab,b\nbad:x:n:b\nnone:x:8:bb\nb\n";
        fs::write(root.path("/etc/group"), groups).unwrap();
        let user = User {
            name: "b".into(),
            uid: 64055,
            groups: vec![106, 7],
        };
        assert_eq!(find(&root, &["c", "b"]), Some(user));
        assert_eq!(name_of(&root, "/etc/group", 106), "kvm");
        assert_eq!(name_of(&root, "/etc/passwd", 5), "5");
    }
}
