//! The command line of the RDMA backend.

use crate::host::Admission;
pub use farlane_daemon::keys::SocketOption;
use farlane_daemon::keys::{Keys, KeysError, all_different, bytes, value};
use farlane_daemon::names;
use farlane_daemon::options::{DaemonOptions, LocalityOptions};
use farlane_daemon::reload::ControlOptions;
use farlane_rdma_remoting::{GidPolicy, GidPrefix, Limits, Peers, PortConfig, Rates, Resource};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;
use thiserror::Error;

/// Length of a window where the command line does not say.
const DEFAULT_WINDOW: u64 = 256 << 20;
/// Longest window: QEMU has been seen to work with 8 GiB.
const MAX_WINDOW: u64 = 64 << 30;

/// RDMA devices for virtual machines and for processes of this host
#[derive(Clone, Debug, clap::Parser)]
#[command(
    name = "farlane-rdma",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct Options {
    /// A VM: the vhost-user socket at which its VMM connects (to create, or inherited and
    /// listening), the device's GID as an IP address, and the size of the window for
    /// host-allocated buffers (a power of two, 0 for none).
    ///
    /// Its limits: queue pairs (max_qp), completion queues (max_cq), shared receive queues
    /// (max_srq), memory regions (max_mr) and their bytes (mr_mem), ids of connection management
    /// (max_cm), what its requests move in a second (rate) and how many begin in one (ops), each
    /// "max" for none; and the GIDs besides its own that it may connect to (peers, for each of
    /// them), all by default.
    ///
    /// Of a VM whose kernel has the device as a RoCE one: the MAC address of the network interface
    /// that it belongs to (mac), and the GIDs besides that of gid that the guest may set (gids, an
    /// address or ADDRESS/BITS, for each of them), any that no other has by default
    #[arg(
        long = "vm",
        value_name = "socket=PATH|fd=N,gid=ADDRESS[,window=256M][,max_qp=N][,max_cq=N][,max_srq=N]\
                      [,max_mr=N][,mr_mem=SIZE][,max_cm=N][,rate=SIZE][,ops=N]\
                      [,peers=ADDRESS]...[,mac=MAC][,gids=ADDRESS[/BITS]]..."
    )]
    pub vms: Vec<VmOptions>,

    /// UNIX socket to create for processes of this user on this host, and for those of other users,
    /// or with one of other groups, by name or number (user, group, for each of them), whose memory
    /// is not reached but where they share it; their limits, of all of them together, as with --vm
    #[arg(
        long,
        value_name = "PATH[,user=USER]...[,group=GROUP]...[,max_qp=N][,max_cq=N][,max_srq=N]\
                      [,max_mr=N][,mr_mem=SIZE][,max_cm=N][,rate=SIZE][,ops=N]\
                      [,peers=ADDRESS]..."
    )]
    pub host_socket: Option<HostOptions>,

    /// GID of the device of those processes, as an IP address
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host_gid: Gid,

    /// Worker threads; on a machine with several NUMA nodes, on each of them
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub workers: usize,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub locality: LocalityOptions,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub control: ControlOptions,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub daemon: DaemonOptions,
}

impl Options {
    /// What a look at single arguments cannot tell.
    ///
    /// # Errors
    /// See [`OptionsError`].
    pub fn check(&self) -> Result<(), OptionsError> {
        if self.vms.is_empty() && self.host_socket.is_none() {
            return Err(OptionsError::Nothing);
        }
        let mut gids: Vec<_> = self.vms.iter().map(|vm| vm.gid.to_string()).collect();
        let mut sockets: Vec<_> = self.vms.iter().map(|vm| vm.socket.to_string()).collect();
        if self.host_socket.is_some() {
            gids.push(self.host_gid.to_string());
        }
        let host = self.host_socket.iter().map(|host| &host.path);
        let metrics = self.daemon.metrics_paths();
        let others = host.chain(metrics);
        sockets.extend(others.map(|path| path.display().to_string()));
        all_different(gids)?;
        Ok(self.control.check(sockets)?)
    }
}

/// Why the command line cannot be followed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum OptionsError {
    /// No VM and no host socket.
    #[error("Nobody to serve: give --vm or --host-socket")]
    Nothing,
    /// Two devices with one address, or two uses of a socket.
    #[error(transparent)]
    Twice(#[from] KeysError),
}

/// Address of a port. IPv4 addresses appear as IPv6 ones (`::ffff:a.b.c.d`), as in RoCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gid(pub [u8; 16]);

impl FromStr for Gid {
    type Err = KeysError;

    fn from_str(text: &str) -> Result<Self, KeysError> {
        let address = text.parse().ok();
        let address = address.filter(|a: &IpAddr| !a.is_unspecified() && !a.is_multicast());
        let octets = address.map(|address| match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        });
        value(
            text,
            "the IPv4 or IPv6 address of one host",
            octets.map(Self),
        )
    }
}

impl std::fmt::Display for Gid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        IpAddr::from(self.0).to_canonical().fmt(f)
    }
}

/// First bytes of IPv4 addresses among IPv6 ones (RFC 4291, 2.5.5.2), in bits.
const MAPPED_BITS: u8 = 96;

/// GIDs that a guest may set: an address, or the first bits of some.
fn gid_prefix(text: &str) -> Result<GidPrefix, KeysError> {
    let (address, bits) = match text.split_once('/') {
        Some((address, bits)) => (address, Some(bits)),
        None => (text, None),
    };
    let address: Option<IpAddr> = address.parse().ok();
    let prefix = address.and_then(|address| {
        let (octets, before) = match address {
            IpAddr::V4(v4) => (v4.to_ipv6_mapped().octets(), MAPPED_BITS),
            IpAddr::V6(v6) => (v6.octets(), 0),
        };
        let bits = match bits {
            Some(bits) => bits.parse::<u8>().ok()?.checked_add(before)?,
            None => 128,
        };
        GidPrefix::new(octets, bits)
    });
    value(text, "an IPv4 or IPv6 address, or ADDRESS/BITS", prefix)
}

/// MAC address of a network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The link-local address that a kernel makes of it (RFC 4291, appendix A): a RoCE device's
    /// first GID.
    fn link_local(self) -> GidPrefix {
        let Self([a, b, c, d, e, f]) = self;
        let gid = [
            0xfe,
            0x80,
            0,
            0,
            0,
            0,
            0,
            0,
            a ^ 2,
            b,
            c,
            0xff,
            0xfe,
            d,
            e,
            f,
        ];
        GidPrefix::whole(gid)
    }
}

impl FromStr for Mac {
    type Err = KeysError;

    fn from_str(text: &str) -> Result<Self, KeysError> {
        let parts: Option<Vec<_>> = text
            .split(':')
            .map(|part| {
                let is_byte = part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
                u8::from_str_radix(part, 16).ok().filter(|_| is_byte)
            })
            .collect();
        let bytes = parts.and_then(|parts| <[u8; 6]>::try_from(parts).ok());
        // A group's address, and none, are no interface's.
        let bytes = bytes.filter(|bytes| bytes[0] & 1 == 0 && *bytes != [0; 6]);
        value(text, "the MAC address of an interface", bytes.map(Self))
    }
}

/// A VM: where its VMM connects, and its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmOptions {
    /// Where its VMM finds the device.
    pub socket: SocketOption,
    /// Address of the device.
    pub gid: Gid,
    /// Length of the window in bytes; zero for none.
    pub window_bytes: u64,
    /// That of the network interface that the device belongs to.
    pub mac: Option<Mac>,
    /// What it may do.
    pub port: PortConfig,
}

/// The socket of the processes of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// The socket to make.
    pub path: PathBuf,
    /// Whose processes besides those of the daemon's user may use it.
    pub admission: Admission,
    /// What the processes may do together.
    pub port: PortConfig,
}

/// The word that stands for no limit, as in the kernel's RDMA cgroup.
const NO_LIMIT: &str = "max";

/// A limit of something counted.
fn number(text: &str) -> Option<u64> {
    text.parse().ok()
}

/// What a port may do, in the words of the kernel's RDMA cgroup where it has them.
fn port_config(keys: &mut Keys) -> Result<PortConfig, KeysError> {
    let count = "a number, or max";
    let size = "a number of bytes, with K, M, G or T after it, or max";
    let mut limits = Limits::default();
    for (key, of, wanted, parse) in [
        (
            "max_qp",
            Resource::QueuePairs,
            count,
            number as fn(&str) -> _,
        ),
        ("max_cq", Resource::CompletionQueues, count, number),
        ("max_srq", Resource::SharedReceiveQueues, count, number),
        ("max_mr", Resource::MemoryRegions, count, number),
        ("max_cm", Resource::ConnectionIds, count, number),
        ("mr_mem", Resource::MemoryRegionBytes, size, bytes),
    ] {
        let parse = |text: &str| match text {
            NO_LIMIT => Some(None),
            text => parse(text).map(Some),
        };
        limits = limits.with(of, keys.parse(key, wanted, parse)?.flatten());
    }
    let rate = |keys: &mut Keys, key, wanted, parse: fn(&str) -> Option<u64>| {
        let parse = |text: &str| match text {
            NO_LIMIT => Some(None),
            text => parse(text).and_then(NonZeroU64::new).map(Some),
        };
        keys.parse(key, wanted, parse).map(Option::flatten)
    };
    let size = "a number of bytes above 0, with K, M, G or T after it, or max";
    let rates = Rates {
        bytes: rate(keys, "rate", size, bytes)?,
        operations: rate(keys, "ops", "a number above 0, or max", number)?,
    };
    let peers = keys.take_all(&["peers"]).into_iter();
    let peers = peers.map(|(_, peer)| peer.parse().map(|Gid(raw)| raw));
    let peers = peers.collect::<Result<BTreeSet<_>, _>>()?;
    Ok(PortConfig {
        limits,
        rates,
        peers: match peers.is_empty() {
            true => Peers::All,
            false => Peers::Only(peers),
        },
        ..PortConfig::default()
    })
}

/// Users and groups that are let in.
fn admission(keys: &mut Keys) -> Result<Admission, KeysError> {
    let mut admission = Admission::default();
    for (key, text) in keys.take_all(&["user", "group"]) {
        match key {
            "user" => {
                let user = value(&text, "a user of this system", names::user(&text))?;
                admission.users.insert(user);
            }
            _ => {
                let group = value(&text, "a group of this system", names::group(&text))?;
                admission.groups.insert(group);
            }
        }
    }
    Ok(admission)
}

impl FromStr for HostOptions {
    type Err = KeysError;

    fn from_str(text: &str) -> Result<Self, KeysError> {
        let (path, mut keys) = Keys::split_first(text);
        let path = (!path.is_empty()).then(|| path.into());
        let path = path.ok_or(KeysError::Missing("The path of the socket"))?;
        let admission = admission(&mut keys)?;
        let port = port_config(&mut keys)?;
        keys.finish()?;
        Ok(Self {
            path,
            admission,
            port,
        })
    }
}

impl FromStr for VmOptions {
    type Err = KeysError;

    fn from_str(text: &str) -> Result<Self, KeysError> {
        let mut keys = Keys::split(text);
        let socket = keys.socket()?;
        let gid = keys.take("gid").map(|gid| gid.parse()).transpose()?;
        let fits = |bytes: &u64| {
            *bytes == 0 || (bytes.is_power_of_two() && (4096..=MAX_WINDOW).contains(bytes))
        };
        let wanted = "0 or a power of two between 4K and 64G";
        let window = keys.parse("window", wanted, |text| bytes(text).filter(fits))?;
        let mac: Option<Mac> = keys.take("mac").map(|mac| mac.parse()).transpose()?;
        let prefixes = keys.take_all(&["gids"]).into_iter();
        let prefixes = prefixes.map(|(_, text)| gid_prefix(&text));
        let mut prefixes = prefixes.collect::<Result<Vec<_>, _>>()?;
        let gids = match prefixes.is_empty() {
            true => GidPolicy::All,
            false => {
                prefixes.extend(mac.map(Mac::link_local));
                GidPolicy::Only(prefixes)
            }
        };
        let port = PortConfig {
            gids,
            ..port_config(&mut keys)?
        };
        keys.finish()?;
        Ok(Self {
            mac,
            socket: socket.ok_or(KeysError::Missing("socket=PATH or fd=N"))?,
            gid: gid.ok_or(KeysError::Missing("gid=ADDRESS"))?,
            window_bytes: window.unwrap_or(DEFAULT_WINDOW),
            port,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[test]
    fn a_vm_is_understood() {
        let vm: VmOptions = "socket=/run/a,,b,gid=10.0.0.1,window=1G".parse().unwrap();
        assert_eq!(vm.socket, SocketOption::Path("/run/a,b".into()));
        assert_eq!(vm.gid.0[10..], [0xff, 0xff, 10, 0, 0, 1]);
        assert_eq!(vm.gid.to_string(), "10.0.0.1");
        assert_eq!(vm.window_bytes, 1 << 30);
        let vm: VmOptions = "fd=5,gid=fd00::7".parse().unwrap();
        assert_eq!(vm.socket, SocketOption::Descriptor(5));
        assert_eq!(vm.gid.to_string(), "fd00::7");
        assert_eq!(vm.window_bytes, 256 << 20);
    }

    #[test]
    fn limits_are_understood() {
        let vm: VmOptions = "fd=5,gid=10.0.0.1,max_qp=0,max_cq=4096,max_srq=5,max_mr=7,\
                             mr_mem=2G,max_cm=9,\
                             peers=10.0.0.2,peers=fd00::7"
            .parse()
            .unwrap();
        let most = |of| vm.port.limits.most(of);
        assert_eq!(most(Resource::QueuePairs), Some(0));
        assert_eq!(most(Resource::CompletionQueues), Some(4096));
        assert_eq!(most(Resource::SharedReceiveQueues), Some(5));
        assert_eq!(most(Resource::MemoryRegions), Some(7));
        assert_eq!(most(Resource::MemoryRegionBytes), Some(2 << 30));
        assert_eq!(most(Resource::ConnectionIds), Some(9));
        assert_eq!(most(Resource::Mappings), None);
        let gid = |text: &str| text.parse::<Gid>().unwrap().0;
        let peers = BTreeSet::from([gid("fd00::7"), gid("10.0.0.2")]);
        assert_eq!(vm.port.peers, Peers::Only(peers));
        let free: VmOptions = "fd=5,gid=10.0.0.1,max_qp=max,mr_mem=max".parse().unwrap();
        assert_eq!(free.port, PortConfig::default());
    }

    #[test]
    fn rates_are_understood() {
        let vm: VmOptions = "fd=5,gid=10.0.0.1,rate=2G,ops=5000".parse().unwrap();
        let rates = Rates {
            bytes: NonZeroU64::new(2 << 30),
            operations: NonZeroU64::new(5000),
        };
        assert_eq!(vm.port.rates, rates);
        let host: HostOptions = "/run/a,ops=1".parse().unwrap();
        let rates = Rates {
            operations: NonZeroU64::new(1),
            ..Rates::default()
        };
        assert_eq!(host.port.rates, rates);
        let free: VmOptions = "fd=5,gid=10.0.0.1,rate=max,ops=max".parse().unwrap();
        assert_eq!(free.port, PortConfig::default());
    }

    #[test]
    fn a_network_interface_and_its_gids_are_understood() {
        let vm: VmOptions = "fd=5,gid=10.0.0.1,mac=52:54:00:Ab:cd:01".parse().unwrap();
        assert_eq!(vm.mac, Some(Mac([0x52, 0x54, 0, 0xab, 0xcd, 1])));
        assert_eq!(vm.port.gids, GidPolicy::All);
        let text = "fd=5,gid=10.0.0.1,mac=52:54:00:ab:cd:01,gids=10.0.0.0/24,gids=fd00::7";
        let vm: VmOptions = text.parse().unwrap();
        let GidPolicy::Only(prefixes) = vm.port.gids else {
            panic!("some are listed");
        };
        let may = |text: &str| {
            let Gid(gid) = text.parse().unwrap();
            prefixes.iter().any(|prefix| prefix.includes(&gid))
        };
        // And the one that the kernel makes of the MAC address.
        for gid in ["10.0.0.255", "fd00::7", "fe80::5054:ff:feab:cd01"] {
            assert!(may(gid), "{gid}");
        }
        for gid in ["10.0.1.0", "fd00::8", "fe80::5054:ff:feab:cd02", "fe80::1"] {
            assert!(!may(gid), "{gid}");
        }
        let vm: VmOptions = "fd=5,gid=10.0.0.1,gids=::/0".parse().unwrap();
        let any = GidPrefix::new([0; 16], 0).unwrap();
        assert_eq!(vm.port.gids, GidPolicy::Only(vec![any]));
    }

    #[test]
    fn a_host_socket_is_a_path_with_limits() {
        let host: HostOptions = "/run/a,,b=c,max_qp=9,peers=10.0.0.2".parse().unwrap();
        assert_eq!(host.path, PathBuf::from("/run/a,b=c"));
        assert_eq!(host.port.limits.most(Resource::QueuePairs), Some(9));
        assert_ne!(host.port.peers, Peers::All);
        assert!(host.admission.is_empty());
        let shared: HostOptions = "/a,user=root,user=1000,group=root,max_qp=1,group=77"
            .parse()
            .unwrap();
        let admission = Admission {
            users: BTreeSet::from([0, 1000]),
            groups: BTreeSet::from([0, 77]),
        };
        assert_eq!(shared.admission, admission);
        assert_eq!(shared.port.limits.most(Resource::QueuePairs), Some(1));
        let plain: HostOptions = "/run/host.sock".parse().unwrap();
        assert_eq!(plain.port, PortConfig::default());
        for (text, reason) in [
            ("", "The path of the socket is missing"),
            (",max_qp=9", "The path of the socket is missing"),
            ("/a,max_qp=-1", "\"-1\" is not a number"),
            ("/a,user=no one", "\"no one\" is not a user"),
            ("/a,group=4294967295", "is not a group"),
            ("/a,user=", "not known here"),
            ("/a,gid=10.0.0.1", "not known here"),
            ("/a,window=1M", "not known here"),
        ] {
            let error = text.parse::<HostOptions>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_its_reason() {
        for (text, reason) in [
            ("", "\"\" is not known here"),
            ("socket=/a", "gid=ADDRESS is missing"),
            ("gid=10.0.0.1", "socket=PATH or fd=N is missing"),
            ("socket=/a,gid=10.0.0.256", "address of one host"),
            ("socket=/a,gid=0.0.0.0", "address of one host"),
            ("socket=/a,gid=ff02::1", "address of one host"),
            ("socket=/a,fd=3,gid=10.0.0.1", "given twice"),
            ("socket=/a,gid=10.0.0.1,window=3M", "power of two"),
            ("socket=/a,gid=10.0.0.1,window=1K", "power of two"),
            (
                "socket=/a,gid=10.0.0.1,window=99999999999999G",
                "power of two",
            ),
            ("socket=/a,gid=10.0.0.1,speed=9", "not known here"),
            ("fd=3,gid=10.0.0.1,max_qp=", "not known here"),
            ("fd=3,gid=10.0.0.1,max_qp", "not known here"),
            (
                "fd=3,gid=10.0.0.1,max_qp=4K",
                "\"4K\" is not a number, or max",
            ),
            ("fd=3,gid=10.0.0.1,max_cq=many", "not a number, or max"),
            (
                "fd=3,gid=10.0.0.1,max_mr=18446744073709551616",
                "not a number",
            ),
            ("fd=3,gid=10.0.0.1,mr_mem=1P", "not a number of bytes"),
            ("fd=3,gid=10.0.0.1,rate=0", "a number of bytes above 0"),
            ("fd=3,gid=10.0.0.1,rate=fast", "a number of bytes above 0"),
            ("fd=3,gid=10.0.0.1,ops=0", "a number above 0, or max"),
            ("fd=3,gid=10.0.0.1,ops=1K", "a number above 0, or max"),
            ("fd=3,gid=10.0.0.1,max_qp=1,max_qp=2", "given twice"),
            ("fd=3,gid=10.0.0.1,peers=10.0.0.0/8", "address of one host"),
            ("fd=3,gid=10.0.0.1,peers=all", "address of one host"),
            ("fd=3,gid=10.0.0.1,gids=all", "or ADDRESS/BITS"),
            ("fd=3,gid=10.0.0.1,gids=10.0.0.0/33", "or ADDRESS/BITS"),
            ("fd=3,gid=10.0.0.1,gids=10.0.0.0/200", "or ADDRESS/BITS"),
            ("fd=3,gid=10.0.0.1,gids=fd00::/129", "or ADDRESS/BITS"),
            ("fd=3,gid=10.0.0.1,gids=fd00::/", "or ADDRESS/BITS"),
            ("fd=3,gid=10.0.0.1,mac=52:54:00:00:00", "MAC address"),
            ("fd=3,gid=10.0.0.1,mac=52:54:00:00:00:1", "MAC address"),
            ("fd=3,gid=10.0.0.1,mac=52:54:00:00:00:+1", "MAC address"),
            ("fd=3,gid=10.0.0.1,mac=53:54:00:00:00:01", "MAC address"),
            ("fd=3,gid=10.0.0.1,mac=00:00:00:00:00:00", "MAC address"),
            ("fd=3,gid=10.0.0.1,peers=", "not known here"),
        ] {
            let error = text.parse::<VmOptions>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn two_of_a_kind_are_refused() {
        let check = |arguments: &[&str]| {
            let program = ["farlane-rdma"];
            Options::parse_from(program.iter().chain(arguments)).check()
        };
        assert_eq!(check(&[]), Err(OptionsError::Nothing));
        assert_eq!(check(&["--host-socket", "/a"]), Ok(()));
        assert!(matches!(
            check(&[
                "--vm",
                "socket=/a,gid=10.0.0.1",
                "--vm",
                "socket=/b,gid=::ffff:10.0.0.1"
            ]),
            Err(OptionsError::Twice(_))
        ));
        assert!(matches!(
            check(&["--vm", "socket=/a,gid=10.0.0.1", "--host-socket", "/a"]),
            Err(OptionsError::Twice(_))
        ));
        assert!(matches!(
            check(&["--vm", "fd=9,gid=10.0.0.1", "--vm", "fd=9,gid=10.0.0.2"]),
            Err(OptionsError::Twice(_))
        ));
    }
}
