//! The command line.

pub use farlane_daemon::keys::SocketOption;
use farlane_daemon::options::{DaemonOptions, LocalityOptions};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;
use thiserror::Error;

/// Length of a window where the command line does not say.
const DEFAULT_WINDOW: u64 = 256 << 20;
/// Longest window: QEMU has been seen to work with 8 GiB.
const MAX_WINDOW: u64 = 64 << 30;

/// RDMA devices for virtual machines and for processes of this host
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "farlane-rdma", version)]
pub struct Options {
    /// A VM: where its VMM finds the device (a vhost-user socket to make, or an inherited
    /// listening one), the device's address, and the length of its window for host-allocated
    /// buffers (a power of two, 0 for none)
    #[arg(long = "vm", value_name = "socket=PATH|fd=N,gid=ADDRESS[,window=256M]")]
    pub vms: Vec<VmOptions>,

    /// A socket to make for processes of this user on this host
    #[arg(long, value_name = "PATH")]
    pub host_socket: Option<PathBuf>,

    /// The address of those processes' device
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host_gid: Gid,

    /// Threads that carry out requests; on a machine with several NUMA nodes, on each of them
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub workers: usize,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub locality: LocalityOptions,

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
        let mut gids: Vec<Gid> = self.vms.iter().map(|vm| vm.gid).collect();
        let mut paths: Vec<&PathBuf> = Vec::new();
        let mut descriptors: Vec<RawFd> = Vec::new();
        for vm in &self.vms {
            match &vm.socket {
                SocketOption::Path(path) => paths.push(path),
                SocketOption::Descriptor(fd) => descriptors.push(*fd),
            }
        }
        if let Some(path) = &self.host_socket {
            gids.push(self.host_gid);
            paths.push(path);
        }
        paths.extend(&self.daemon.metrics);
        if let Some(gid) = duplicate(&mut gids) {
            return Err(OptionsError::DuplicateGid(gid));
        }
        if let Some(path) = duplicate(&mut paths) {
            return Err(OptionsError::DuplicateSocket(path.clone()));
        }
        if let Some(fd) = duplicate(&mut descriptors) {
            return Err(OptionsError::DuplicateDescriptor(fd));
        }
        Ok(())
    }
}

fn duplicate<T: Ord + Clone>(values: &mut [T]) -> Option<T> {
    values.sort();
    values
        .windows(2)
        .find_map(|pair| (pair[0] == pair[1]).then(|| pair[0].clone()))
}

/// Why the command line cannot be followed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum OptionsError {
    /// No VM and no host socket.
    #[error("Nobody to serve: give --vm or --host-socket")]
    Nothing,
    /// Two devices with one address.
    #[error("Address {0} is given twice")]
    DuplicateGid(Gid),
    /// Two uses of one path.
    #[error("Socket {} is given twice", .0.display())]
    DuplicateSocket(PathBuf),
    /// Two uses of one descriptor.
    #[error("Descriptor {0} is given twice")]
    DuplicateDescriptor(RawFd),
    /// A part of a VM's description is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A part of a VM's description is not known, or comes twice.
    #[error("{0:?} is not known here, or given twice")]
    Unknown(String),
    /// A value that is none.
    #[error("{value:?} is not {wanted}")]
    Value {
        /// What was given.
        value: String,
        /// What it should be.
        wanted: &'static str,
    },
}

/// Address of a port. IPv4 addresses appear as IPv6 ones (`::ffff:a.b.c.d`), as in RoCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gid(pub [u8; 16]);

impl FromStr for Gid {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, OptionsError> {
        let refuse = || OptionsError::Value {
            value: text.to_owned(),
            wanted: "the IPv4 or IPv6 address of one host",
        };
        let address: IpAddr = text.parse().map_err(|_| refuse())?;
        if address.is_unspecified() || address.is_multicast() {
            return Err(refuse());
        }
        Ok(Self(match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        }))
    }
}

impl std::fmt::Display for Gid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        IpAddr::from(self.0).to_canonical().fmt(f)
    }
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmOptions {
    /// Where its VMM finds the device.
    pub socket: SocketOption,
    /// Address of the device.
    pub gid: Gid,
    /// Length of the window in bytes; zero for none.
    pub window_bytes: u64,
}

impl FromStr for VmOptions {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, OptionsError> {
        let (mut socket, mut gid, mut window) = (None, None, None);
        for part in split(text) {
            let unknown = || OptionsError::Unknown(part.clone());
            let (name, value) = part.split_once('=').ok_or_else(unknown)?;
            match name {
                "socket" if socket.is_none() && !value.is_empty() => {
                    socket = Some(SocketOption::Path(value.into()));
                }
                "fd" if socket.is_none() => {
                    let fd = value.parse().map_err(|_| OptionsError::Value {
                        value: value.to_owned(),
                        wanted: "the number of a descriptor",
                    })?;
                    socket = Some(SocketOption::Descriptor(fd));
                }
                "gid" if gid.is_none() => gid = Some(value.parse()?),
                "window" if window.is_none() => window = Some(parse_window(value)?),
                _ => return Err(unknown()),
            }
        }
        Ok(Self {
            socket: socket.ok_or(OptionsError::Missing("socket=PATH or fd=N"))?,
            gid: gid.ok_or(OptionsError::Missing("gid=ADDRESS"))?,
            window_bytes: window.unwrap_or(DEFAULT_WINDOW),
        })
    }
}

/// Splits at commas; two commas are one in a value, as in QEMU's options.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        if character == ',' && characters.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(character);
        }
    }
    parts
}

fn parse_window(text: &str) -> Result<u64, OptionsError> {
    let refuse = || OptionsError::Value {
        value: text.to_owned(),
        wanted: "0 or a power of two between 4K and 64G",
    };
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G', 'k', 'm', 'g']) {
        Some(digits) => (
            digits,
            match text.chars().next_back() {
                Some('K' | 'k') => 10,
                Some('M' | 'm') => 20,
                _ => 30,
            },
        ),
        None => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| refuse())?;
    let bytes = number.checked_mul(1 << shift).ok_or_else(refuse)?;
    if bytes == 0 || (bytes.is_power_of_two() && (4096..=MAX_WINDOW).contains(&bytes)) {
        Ok(bytes)
    } else {
        Err(refuse())
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
            Err(OptionsError::DuplicateGid(_))
        ));
        assert!(matches!(
            check(&["--vm", "socket=/a,gid=10.0.0.1", "--host-socket", "/a"]),
            Err(OptionsError::DuplicateSocket(_))
        ));
        assert!(matches!(
            check(&["--vm", "fd=9,gid=10.0.0.1", "--vm", "fd=9,gid=10.0.0.2"]),
            Err(OptionsError::DuplicateDescriptor(9))
        ));
    }
}
