//! Tags of VLANs in received frames: a driver may take the outermost one out and hand it to the
//! network stack aside, where an AF_XDP socket is not told of it. So it is told to leave them in,
//! those of IEEE 802.1Q and of 802.1ad alike.

use super::XdpError;
use crate::bits::index;
use crate::port::host_interface::HostInterface;
use std::io;

/// What the kernel calls the features of drivers that take tags out (`netdev_features_strings`):
/// for 802.1Q and 802.1ad.
pub(super) const STRIPPING: [&str; 2] = ["rx-vlan-hw-parse", "rx-vlan-stag-hw-parse"];

/// Commands of `SIOCETHTOOL` (`linux/ethtool.h`).
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_SFEATURES: u32 = 0x3b;

/// The set of the features' names (`ETH_SS_FEATURES`), and the bytes of a name (`ETH_GSTRING_LEN`).
const NAMES: u32 = 4;
const NAME_BYTES: usize = 32;

/// More features than any kernel has.
const MOST_FEATURES: u32 = 1024;

/// Features of an interface's driver.
pub(super) trait Driver {
    /// Whether these are on. A kernel that knows none of a name has it not on.
    fn are_on(&self, features: [&str; 2]) -> io::Result<[bool; 2]>;

    /// Switches some off. Those that cannot be stay on.
    fn switch_off(&self, features: &[&str]) -> io::Result<()>;
}

/// Has a driver leave tags in received frames. That stays so.
///
/// # Errors
/// [`XdpError::Tags`]: it does not.
pub(super) fn leave(driver: &impl Driver, name: &str) -> Result<(), XdpError> {
    let on = || -> Result<Vec<&str>, XdpError> {
        let on = driver.are_on(STRIPPING);
        let on = on.map_err(|source| XdpError::System {
            name: name.to_owned(),
            what: "ask whether its driver leaves VLAN tags in frames".to_owned(),
            source,
        })?;
        let features = STRIPPING.into_iter().zip(on);
        Ok(features
            .filter_map(|(name, on)| on.then_some(name))
            .collect())
    };
    let before = on()?;
    if before.is_empty() {
        return Ok(());
    }
    let result = driver.switch_off(&before);
    let left = on()?;
    if !left.is_empty() {
        return Err(XdpError::Tags {
            name: name.to_owned(),
            features: left.join(", "),
            source: result.err(),
        });
    }
    let before = before.join(", ");
    log::info!(
        "Interface {name}: its driver leaves VLAN tags in frames from now on ({before} off)"
    );
    Ok(())
}

/// The driver of an interface, by a socket.
pub(super) struct Ethtool<'a>(pub &'a HostInterface);

impl Ethtool<'_> {
    /// `SIOCETHTOOL` with a command and its words, which the answer replaces. No command here
    /// writes more than there are.
    fn ask(&self, words: &mut [u32]) -> io::Result<()> {
        // SAFETY: the words are a command's structure, with as much room as they say there is or as
        // the kernel has said it needs.
        unsafe { self.0.ethtool(words) }
    }

    /// The numbers of features, of those that the kernel has, and how many it has.
    fn numbers(&self, features: &[&str]) -> io::Result<(Vec<Option<u32>>, u32)> {
        // struct ethtool_sset_info: command, padding, a mask of sets in 64 bits, and a number for
        // each of them.
        let mut words = [ETHTOOL_GSSET_INFO, 0, 0, 0, 0];
        let mask = (1_u64 << NAMES).to_ne_bytes();
        for (word, bytes) in words[2..4].iter_mut().zip(mask.as_chunks::<4>().0) {
            *word = u32::from_ne_bytes(*bytes);
        }
        self.ask(&mut words)?;
        // A set that the kernel has not it takes out of the mask.
        if words[2..4] == [0; 2] || words[4] > MOST_FEATURES {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let count = words[4];
        // struct ethtool_gstrings: command, set, how many, and the names.
        let mut words = vec![0; 3 + index(count) * NAME_BYTES / 4];
        words[0] = ETHTOOL_GSTRINGS;
        words[1] = NAMES;
        words[2] = count;
        self.ask(&mut words)?;
        let bytes: Vec<u8> = words[3..]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        let names: Vec<&[u8]> = bytes
            .chunks(NAME_BYTES)
            .map(|name| name.split(|byte| *byte == 0).next().unwrap_or_default())
            .collect();
        let number = |feature: &&str| {
            let mut numbered = (0_u32..).zip(&names);
            let found = numbered.find(|(_, name)| **name == feature.as_bytes());
            found.map(|(number, _)| number)
        };
        Ok((features.iter().map(number).collect(), count))
    }
}

impl Driver for Ethtool<'_> {
    fn are_on(&self, features: [&str; 2]) -> io::Result<[bool; 2]> {
        let (numbers, count) = self.numbers(&features)?;
        // struct ethtool_gfeatures: command, how many blocks, and of each: available, requested,
        // active, never changed.
        let blocks = count.div_ceil(32);
        let mut words = vec![0; 2 + 4 * index(blocks)];
        words[0] = ETHTOOL_GFEATURES;
        words[1] = blocks;
        self.ask(&mut words)?;
        let is_on = |number: u32| {
            let active = words.get(index(2 + number / 32 * 4 + 2));
            active.is_some_and(|bits| bits >> (number % 32) & 1 != 0)
        };
        let mut on = [false; 2];
        for (on, number) in on.iter_mut().zip(numbers) {
            *on = number.is_some_and(is_on);
        }
        Ok(on)
    }

    fn switch_off(&self, features: &[&str]) -> io::Result<()> {
        let (numbers, count) = self.numbers(features)?;
        // struct ethtool_sfeatures: command, how many blocks, and of each: which to change, and to
        // what.
        let blocks = count.div_ceil(32);
        let mut words = vec![0; 2 + 2 * index(blocks)];
        words[0] = ETHTOOL_SFEATURES;
        words[1] = blocks;
        for number in numbers.into_iter().flatten() {
            if let Some(valid) = words.get_mut(index(2 + number / 32 * 2)) {
                *valid |= 1 << (number % 32);
            }
        }
        self.ask(&mut words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::HashSet;
    use std::error::Error as _;

    /// A driver with features that are on, of which some stay so.
    struct Fake {
        on: RefCell<HashSet<&'static str>>,
        fixed: HashSet<&'static str>,
        refuses: bool,
    }

    impl Fake {
        fn new(on: &[&'static str], fixed: &[&'static str]) -> Self {
            Self {
                on: RefCell::new(on.iter().copied().collect()),
                fixed: fixed.iter().copied().collect(),
                refuses: false,
            }
        }
    }

    impl Driver for Fake {
        fn are_on(&self, features: [&str; 2]) -> io::Result<[bool; 2]> {
            Ok(features.map(|feature| self.on.borrow().contains(feature)))
        }

        fn switch_off(&self, features: &[&str]) -> io::Result<()> {
            if self.refuses {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            self.on
                .borrow_mut()
                .retain(|on| self.fixed.contains(on) || !features.contains(on));
            Ok(())
        }
    }

    #[test]
    fn tags_of_both_kinds_are_left_in_frames() {
        for on in [&STRIPPING[..], &STRIPPING[..1], &STRIPPING[1..], &[]] {
            let driver = Fake::new(on, &[]);
            leave(&driver, "eth0").unwrap();
            assert!(driver.on.borrow().is_empty());
        }
    }

    #[test]
    fn a_driver_that_goes_on_to_take_tags_out_is_refused_by_name() {
        for (number, feature) in STRIPPING.iter().enumerate() {
            let driver = Fake::new(&STRIPPING, &STRIPPING[number..=number]);
            let said = leave(&driver, "eth0").unwrap_err().to_string();
            assert!(
                said.contains("eth0") && said.contains(&format!("({feature})")),
                "{said}"
            );
        }
        let mut driver = Fake::new(&STRIPPING, &[]);
        driver.refuses = true;
        let error = leave(&driver, "eth0").unwrap_err();
        assert!(error.to_string().contains(&STRIPPING.join(", ")), "{error}");
        assert!(error.source().is_some(), "why is said");
    }
}
