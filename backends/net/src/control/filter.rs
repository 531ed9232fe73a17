//! Which frames a guest wants: by address and by VLAN (virtio 1.2, 5.1.6.5.1 to 5.1.6.5.3).

use super::request::{Mac, Mode};

/// Addresses of a table that are kept. A driver that gives more gets all frames of that kind; that
/// is what `Best effort` means (5.1.6.5.2), and what other devices do.
pub const MAX_ADDRESSES: usize = 64;

const VLANS: usize = 4096;

/// What a guest wants to receive. Cloned when it changes, and read by every worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    mac: Mac,
    promiscuous: bool,
    all_multicast: bool,
    all_unicast: bool,
    no_multicast: bool,
    no_unicast: bool,
    no_broadcast: bool,
    /// Further ones of its own; `None`: more than are kept.
    unicast: Option<Vec<Mac>>,
    multicast: Option<Vec<Mac>>,
    /// A bit a VLAN of IEEE 802.1Q; `None`: all.
    vlans: Option<Box<[u64; VLANS / 64]>>,
}

impl Filter {
    /// A guest that has said nothing: it gets everything.
    pub fn new(mac: Mac) -> Self {
        Self {
            mac,
            promiscuous: true,
            all_multicast: false,
            all_unicast: false,
            no_multicast: false,
            no_unicast: false,
            no_broadcast: false,
            unicast: Some(Vec::new()),
            multicast: Some(Vec::new()),
            vlans: None,
        }
    }

    /// Whether the guest wants all frames.
    pub fn admits_all(&self) -> bool {
        self.promiscuous
    }

    /// Whether the guest wants a frame. What is too short for an Ethernet header it does not.
    pub fn admits(&self, frame: &[u8]) -> bool {
        let Some(header) = frame.first_chunk::<14>() else {
            return false;
        };
        if self.promiscuous {
            return true;
        }
        // Tags of IEEE 802.1Q. A driver says nothing of those of 802.1ad (Linux:
        // `NETIF_F_HW_VLAN_CTAG_FILTER`).
        if let Some(vlans) = &self.vlans
            && [header[12], header[13]] == [0x81, 0x00]
        {
            let Some(tag) = frame.get(14..16) else {
                return false;
            };
            let vlan = usize::from(u16::from_be_bytes([tag[0], tag[1]]) & 0xfff);
            // VLAN 0 is none: the tag is there for its priority.
            if vlan != 0
                && vlans
                    .get(vlan / 64)
                    .is_none_or(|bits| bits >> (vlan % 64) & 1 == 0)
            {
                return false;
            }
        }
        let [a, b, c, d, e, f, ..] = *header;
        self.admits_address([a, b, c, d, e, f])
    }

    fn admits_address(&self, to: Mac) -> bool {
        let listed = |list: &Option<Vec<Mac>>| list.as_ref().is_none_or(|list| list.contains(&to));
        if to == [0xff; 6] {
            !self.no_broadcast
        } else if to[0] & 1 != 0 {
            !self.no_multicast && (self.all_multicast || listed(&self.multicast))
        } else {
            !self.no_unicast && (self.all_unicast || to == self.mac || listed(&self.unicast))
        }
    }

    pub fn mac(&self) -> Mac {
        self.mac
    }

    pub fn set_mac(&mut self, mac: Mac) {
        self.mac = mac;
    }

    pub fn set_mode(&mut self, mode: Mode, on: bool) {
        *match mode {
            Mode::Promiscuous => &mut self.promiscuous,
            Mode::AllMulticast => &mut self.all_multicast,
            Mode::AllUnicast => &mut self.all_unicast,
            Mode::NoMulticast => &mut self.no_multicast,
            Mode::NoUnicast => &mut self.no_unicast,
            Mode::NoBroadcast => &mut self.no_broadcast,
        } = on;
    }

    pub fn set_tables(&mut self, unicast: &[Mac], multicast: &[Mac]) {
        let keep = |list: &[Mac]| (list.len() <= MAX_ADDRESSES).then(|| list.to_vec());
        self.unicast = keep(unicast);
        self.multicast = keep(multicast);
    }

    /// Only frames of VLANs that are added from now on, besides those of none.
    pub fn no_vlans(&mut self) {
        self.vlans = Some(Box::new([0; VLANS / 64]));
    }

    /// Adds a VLAN, or takes it away.
    pub fn set_vlan(&mut self, vlan: u16, on: bool) {
        let vlan = usize::from(vlan);
        let Some(bits) = self
            .vlans
            .as_mut()
            .and_then(|vlans| vlans.get_mut(vlan / 64))
        else {
            return;
        };
        let bit = 1 << (vlan % 64);
        if on {
            *bits |= bit;
        } else {
            *bits &= !bit;
        }
    }
}
