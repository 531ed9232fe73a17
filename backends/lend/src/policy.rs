//! What of a configuration a running lender may be told anew, and what not.

use crate::config::Config;
use crate::setup::GRACE;
use farlane_vfio_remote::protocol::message::Policy;
use std::collections::BTreeMap;
use std::fmt::Debug;

/// What it may: who may borrow what.
#[must_use]
pub fn policy(config: &Config) -> Policy {
    let devices = config.devices.iter();
    let devices = devices.map(|device| (device.name.clone(), device.borrowers.clone()));
    let windows = config.windows.iter();
    let windows = windows.map(|window| (window.name.clone(), window.borrowers.clone()));
    let users = config.users.iter();
    let users = users.map(|user| (user.uid, user.names.clone()));
    let default = u32::try_from(GRACE.as_millis()).unwrap_or(u32::MAX);
    let grace = config.grace_seconds;
    Policy {
        devices: devices.collect(),
        windows: windows.collect(),
        users: users.collect(),
        lenders: config.lenders.clone(),
        grace_ms: grace.map_or(default, |seconds| u32::from(seconds) * 1000),
    }
}

/// What it may not, as texts, by what each is called: what has been opened, and terms that leases
/// have.
#[must_use]
pub fn fixed(config: &Config) -> BTreeMap<String, String> {
    let text = |value: &dyn Debug| format!("{value:?}");
    let mut fixed = BTreeMap::from([
        ("`name`".to_owned(), text(&config.name)),
        ("`listen`".to_owned(), text(&config.listen)),
        ("`term-seconds`".to_owned(), text(&config.term_seconds)),
        ("`tls`".to_owned(), text(&config.tls)),
    ]);
    for (key, value) in &config.common {
        fixed.insert(format!("`{key}`"), value.clone());
    }
    for device in &config.devices {
        fixed.insert(format!("Device {}", device.name), text(&device.source));
    }
    for window in &config.windows {
        let what = text(&(&window.bridge, &window.shows));
        fixed.insert(format!("Window {}", window.name), what);
    }
    fixed
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        listen = ["unix:/s"]
        lenders = ["other"]

        [[device]]
        name = "nvme0"
        source = "nvme"
        borrowers = ["rack1"]
        namespace = [{ null = "1G" }]

        [[user]]
        uid = 4001
        names = ["rack1"]
    "#;

    fn parsed(text: &str) -> Config {
        Config::parse(text).unwrap()
    }

    #[test]
    fn who_may_borrow_is_told_anew_and_what_is_lent_is_not() {
        let before = parsed(TEXT);
        let after = TEXT.replace("rack1", "rack2").replace("other", "another");
        let after = parsed(&(String::from("grace-seconds = 1\n") + &after));
        assert_eq!(fixed(&before), fixed(&after));
        let policy = policy(&after);
        assert_eq!(policy.devices["nvme0"], ["rack2"]);
        assert_eq!(policy.users[&4001], ["rack2"]);
        assert_eq!(
            (&*policy.lenders, policy.grace_ms),
            (&["another".to_owned()][..], 1000)
        );
        for (from, to, what) in [
            ("1G", "2G", "Device nvme0"),
            ("nvme0", "nvme1", "Device nvme0"),
            ("unix:/s", "unix:/t", "`listen`"),
            ("lenders", "term-seconds = 9\nlenders", "`term-seconds`"),
            (
                "lenders",
                "socket-mode = \"0600\"\nlenders",
                "`socket-mode`",
            ),
        ] {
            let other = fixed(&parsed(&TEXT.replace(from, to)));
            assert_ne!(fixed(&before).get(what), other.get(what), "{what}");
        }
    }
}
