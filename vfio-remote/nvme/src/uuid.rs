//! Identifiers that are the same each time a controller is offered, and nobody else's (NVMe 1.4,
//! 7.9 and 7.10).

use crate::config::Host;
use crate::ids::NamespaceId;
use farlane_abi::width::to_u64;
use ring::digest::{Context, SHA256};
use std::fmt;

/// What the digest of an identifier begins with: the same names mean another identifier elsewhere.
const DOMAIN: &str = "io.farlane.nvme";

/// A UUID (RFC 9562), in the byte order of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// The names that the identifiers of a controller are made of.
#[derive(Clone, Debug)]
pub struct Names {
    /// The host that offers it.
    pub host: Host,
    /// What it is called there.
    pub device: String,
    /// Its serial number.
    pub serial: String,
}

impl Names {
    /// That of a namespace, or else of the NVM subsystem: version 8 over SHA-256 (RFC 9562, 5.8).
    pub fn uuid(&self, namespace: Option<NamespaceId>) -> Uuid {
        let mut context = Context::new(&SHA256);
        // Each with its length: no two lists of names are the same bytes.
        let mut add = |part: &[u8]| {
            context.update(&to_u64(part.len()).to_le_bytes());
            context.update(part);
        };
        add(DOMAIN.as_bytes());
        match &self.host.machine {
            Some(machine) => {
                add(b"machine");
                add(machine.as_bytes());
            }
            None => add(b"names"),
        }
        for name in [&self.host.lender, &self.device, &self.serial] {
            add(name.as_bytes());
        }
        let nsid = namespace.unwrap_or(NamespaceId::UNUSED);
        add(&nsid.get().to_le_bytes());
        let digest = context.finish();
        let mut id = [0; 16];
        for (to, from) in id.iter_mut().zip(digest.as_ref()) {
            *to = *from;
        }
        // Version and variant (RFC 9562, 4).
        id[6] = id[6] & 0x0f | 0x80;
        id[8] = id[8] & 0x3f | 0x80;
        Uuid(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn names(machine: Option<&str>, lender: &str, device: &str, serial: &str) -> Names {
        Names {
            host: Host {
                machine: machine.map(str::to_owned),
                lender: lender.to_owned(),
            },
            device: device.to_owned(),
            serial: serial.to_owned(),
        }
    }

    #[test]
    fn no_two_namespaces_of_any_controllers_have_the_same_identifier() {
        // Names whose bytes differ by as little as namespace identifiers do, and that are each
        // other's parts.
        let machine = ["", "names", "0123456789abcdef0123456789abcdef"].map(Some);
        let machines = [None].into_iter().chain(machine);
        let few = ["", "a", "b", "c", "ab", "farlane-nvme0", "farlane-nvme1"];
        let mut known = HashSet::new();
        let mut count = 0;
        for machine in machines {
            for lender in few {
                for device in few {
                    for serial in few {
                        let names = names(machine, lender, device, serial);
                        let namespaces = (1..=64).map(|nsid| Some(NamespaceId::new(nsid)));
                        for namespace in namespaces.chain([None]) {
                            count += 1;
                            assert!(
                                known.insert(names.uuid(namespace)),
                                "{names:?} {namespace:?} is another's, too"
                            );
                        }
                    }
                }
            }
        }
        assert_eq!(known.len(), count);
    }

    #[test]
    fn an_identifier_stays_what_it_has_been() {
        let names = names(
            Some("0123456789abcdef0123456789abcdef"),
            "rack1",
            "nvme0",
            "S1",
        );
        assert_eq!(
            names.uuid(Some(NamespaceId::new(1))).to_string(),
            "bea256d9-ed0f-87d5-9b29-fbfbd726bba1"
        );
    }
}
