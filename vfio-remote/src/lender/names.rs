//! Who may say that he is whom, and what that allows.

use super::is_name;
use crate::protocol::Peer;
use std::collections::BTreeMap;

/// What a borrower may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Everything: the lender's own user, or root, on the lender's host.
    Administrator,
    /// What is configured for its name, which it has proved.
    Named,
    /// What is for everybody who can connect.
    Anybody,
}

/// One who asks.
#[derive(Clone, Debug)]
pub(crate) struct Borrower {
    pub name: String,
    pub standing: Standing,
}

impl Borrower {
    /// Whether it is one of these names, and has proved that.
    pub fn is_among(&self, names: &[String]) -> bool {
        self.standing != Standing::Anybody && names.contains(&self.name)
    }

    /// The one that has proved `peer` and says that it is `name`, where users of this host, besides
    /// the lender's own and root, have the names that `users` says. None where it may not say so.
    pub fn new(peer: &Peer, name: &str, users: &BTreeMap<u32, Vec<String>>) -> Option<Self> {
        let is_given = |user: &u32| {
            let names = users.get(user);
            names.is_some_and(|names| names.iter().any(|given| given == name))
        };
        let standing = match peer {
            _ if !is_name(name) => return None,
            Peer::User(_) if peer.is_own() => Standing::Administrator,
            Peer::User(user) if is_given(user) => Standing::Named,
            Peer::Certificate(_) if peer.is_called(name) => Standing::Named,
            Peer::Unproved => Standing::Anybody,
            Peer::User(_) | Peer::Certificate(_) => return None,
        };
        Some(Self {
            name: name.to_owned(),
            standing,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_for_whom_it_is_configured_and_for_the_lenders_own_user() {
        let own = rustix::process::geteuid().as_raw();
        let users = BTreeMap::from([(4001, vec!["rack2".to_owned()]), (4002, Vec::new())]);
        let standing = |peer: Peer, name: &str| {
            Borrower::new(&peer, name, &users).map(|borrower| borrower.standing)
        };
        for user in [0, own] {
            assert_eq!(
                standing(Peer::User(user), "whoever"),
                Some(Standing::Administrator)
            );
        }
        assert_eq!(standing(Peer::User(4001), "rack2"), Some(Standing::Named));
        for (user, name) in [
            (4001, "rack3"),
            (4002, "rack2"),
            (4003, "rack2"),
            (own, "a b"),
        ] {
            assert_eq!(standing(Peer::User(user), name), None, "{user} {name}");
        }
        assert_eq!(standing(Peer::Unproved, "rack2"), Some(Standing::Anybody));
    }

    #[test]
    fn a_name_that_is_not_proved_is_in_no_list() {
        let borrower = |standing| Borrower {
            name: "rack2".to_owned(),
            standing,
        };
        let names = ["rack1".to_owned(), "rack2".to_owned()];
        assert!(borrower(Standing::Named).is_among(&names));
        assert!(!borrower(Standing::Anybody).is_among(&names));
    }
}
