//! Network interfaces of a guest, besides the [`crate::wire`]: served over vhost-user by another
//! process, or by QEMU over a tap of a [`crate::network::Network`].

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::attachments::{option_value, port};

/// How often QEMU tries to connect to a backend of an interface that has gone.
const RECONNECT_MS: u32 = 100;

/// Bytes of an interface's configuration space (virtio 1.2, 5.1.4, up to `supported_hash_types`).
const CONFIG_BYTES: u32 = 24;

/// Descriptors of a queue.
const QUEUE_SIZE: u32 = 256;

/// The virtio id of a network interface (virtio 1.2, 5).
const VIRTIO_ID: u32 = 1;

/// A network interface of a guest, in a PCIe port of its own. The guest has to load `virtio_net`;
/// interfaces are called `eth0`, `eth1` ... in the order of their ports.
#[derive(Debug, Clone)]
pub struct Interface {
    /// Its id in QEMU. Its port is called `<id>-port`.
    pub id: String,
    /// Who serves it.
    pub server: Server,
    /// How many pairs of receive and transmit queues it has; the server has at least as many.
    pub queue_pairs: u32,
    /// Its address, where QEMU tells it to the guest; elsewhere the backend does.
    pub mac: Option<String>,
    /// The largest frame's payload that QEMU tells the guest of, where it does.
    pub mtu: Option<u16>,
}

/// Who serves an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Server {
    /// A backend that listens on this socket, behind QEMU's `-netdev vhost-user`: QEMU answers the
    /// control queue, tells the address, and connects again when the backend goes and comes back.
    VhostUser(PathBuf),
    /// A backend that listens on this socket, behind QEMU's generic vhost-user device: it has the
    /// control queue and the configuration space to itself. QEMU does not connect again.
    Generic(PathBuf),
    /// QEMU itself, over this tap; QEMU has to run [`crate::qemu::VmConfig::inside`] its network.
    Tap(String),
}

impl Interface {
    /// An interface with one pair of queues.
    #[must_use]
    pub fn new(id: impl Into<String>, server: Server) -> Self {
        Self {
            id: id.into(),
            server,
            queue_pairs: 1,
            mac: None,
            mtu: None,
        }
    }

    /// With so many pairs of queues.
    #[must_use]
    pub fn queue_pairs(mut self, queue_pairs: u32) -> Self {
        self.queue_pairs = queue_pairs;
        self
    }

    /// With this address.
    #[must_use]
    pub fn mac(mut self, mac: impl Into<String>) -> Self {
        self.mac = Some(mac.into());
        self
    }

    /// With this MTU.
    #[must_use]
    pub fn mtu(mut self, mtu: u16) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// The words for QEMU's command line; `number` tells its slot from those of other ports.
    pub(crate) fn words(&self, number: u32) -> Result<Vec<String>> {
        let mut words = port(&self.id, number);
        match &self.server {
            Server::VhostUser(socket) => {
                words.extend(self.socket(socket, &format!(",reconnect-ms={RECONNECT_MS}"))?);
                let (id, pairs) = (&self.id, self.queue_pairs);
                words.extend([
                    "-netdev".into(),
                    format!("vhost-user,id={id}-net,chardev={id}-socket,queues={pairs}"),
                ]);
                words.extend(self.device(",rx_queue_size=1024,tx_queue_size=1024"));
            }
            Server::Tap(tap) => {
                let (id, pairs) = (&self.id, self.queue_pairs);
                words.extend([
                    "-netdev".into(),
                    format!(
                        "tap,id={id}-net,ifname={tap},script=no,downscript=no,vhost=off,\
                         queues={pairs}"
                    ),
                ]);
                words.extend(self.device(",rx_queue_size=1024"));
            }
            Server::Generic(socket) => {
                words.extend(self.socket(socket, "")?);
                let (id, queues) = (&self.id, 2 * self.queue_pairs + 1);
                words.extend([
                    "-device".into(),
                    format!(
                        "vhost-user-test-device-pci,id={id},bus={id}-port,chardev={id}-socket,\
                         virtio-id={VIRTIO_ID},\
                         num_vqs={queues},vq_size={QUEUE_SIZE},config_size={CONFIG_BYTES}"
                    ),
                ]);
            }
        }
        Ok(words)
    }

    fn socket(&self, path: &Path, words: &str) -> Result<[String; 2]> {
        let (id, path) = (&self.id, option_value(path)?);
        Ok([
            "-chardev".into(),
            format!("socket,id={id}-socket,path={path}{words}"),
        ])
    }

    fn device(&self, words: &str) -> [String; 2] {
        let (id, pairs) = (&self.id, self.queue_pairs);
        let mut device =
            format!("virtio-net-pci,id={id},netdev={id}-net,bus={id}-port,romfile={words}");
        if pairs > 1 {
            // A vector for each queue, one for the control queue, one for the configuration.
            device += &format!(",mq=on,vectors={}", 2 * pairs + 2);
        }
        if let Some(mac) = &self.mac {
            device += &format!(",mac={mac}");
        }
        if let Some(mtu) = self.mtu {
            device += &format!(",host_mtu={mtu}");
        }
        ["-device".into(), device]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_queue_pairs_have_vectors_of_their_own() {
        let interface = Interface::new("lan", Server::VhostUser("/s".into()))
            .queue_pairs(2)
            .mac("52:54:00:78:00:02");
        let words = interface.words(3).unwrap().join(" ");
        assert!(words.contains("queues=2") && words.contains("mq=on,vectors=6"));
        assert!(words.contains("mac=52:54:00:78:00:02") && words.contains("bus=lan-port"));
    }

    #[test]
    fn the_generic_device_has_a_control_queue() {
        let words = Interface::new("lan", Server::Generic("/s".into()))
            .queue_pairs(2)
            .words(3)
            .unwrap();
        assert!(words.join(" ").contains("num_vqs=5"));
    }
}
