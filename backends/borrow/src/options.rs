//! The command line of the borrower.

use farlane_daemon::keys::{KeysError, SocketOption, value};
use farlane_daemon::options::{DaemonOptions, TlsOptions};
use farlane_daemon::reload::ControlOptions;
use farlane_pci::Region;
use farlane_vfio_remote::borrower::{InterruptView, PeerWindow};
use farlane_vfio_remote::lender::is_name;
use farlane_vfio_remote::protocol::Address;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;
use thiserror::Error;

/// Where a lender of the same host listens.
const DEFAULT_LENDER: &str = "unix:/run/farlane/lend.sock";

/// Makes PCIe devices of other hosts devices of this host's virtual machines
#[derive(Clone, Debug, clap::Parser)]
#[command(
    name = "farlane-borrow",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct Options {
    /// vfio-user socket to create, at which one VMM connects to the device; for further devices,
    /// repeat it and --device
    #[arg(long, value_name = "PATH")]
    pub socket_path: Vec<PathBuf>,

    /// Inherited descriptor of a listening vfio-user socket, instead of --socket-path
    #[arg(long, value_name = "N", conflicts_with = "socket_path")]
    pub fd: Vec<RawFd>,

    /// The lender's name of the device that is served at the socket in the same position
    #[arg(long = "device", value_name = "NAME")]
    pub devices: Vec<String>,

    /// Address of the lender: unix:PATH, tls:HOST:PORT, or tcp:127.0.0.1:PORT
    #[arg(long, value_name = "ADDRESS", default_value = DEFAULT_LENDER)]
    pub lender: Address,

    /// Name of this host; with TLS, a name in its certificate [default: the host name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Memory window of the lender, and the file of this host that it maps: the memory of the VM
    #[arg(long = "window", value_name = "NAME=FILE")]
    pub windows: Vec<WindowOption>,

    /// UNIX socket to create, on which the devices' memory is published to other backends of the
    /// same VM; all devices of this daemon then belong to that VM
    #[arg(long, value_name = "PATH")]
    pub publish: Option<PathBuf>,

    /// Socket on which another backend of the same VM publishes memory of its devices, which the
    /// devices of this daemon then reach; can be repeated
    #[arg(long, value_name = "PATH")]
    pub device_memory: Vec<PathBuf>,

    /// Memory window of the lender that maps a BAR of a device of another lender; can be repeated
    #[arg(long = "peer-window", value_name = "NAME=LENDER/DEVICE/BAR")]
    pub peer_windows: Vec<PeerWindowOption>,

    /// How the VM sees the interrupts of a device with MSI-X
    #[arg(long, value_enum, value_name = "KIND", default_value_t = Interrupts::Msi)]
    pub interrupts: Interrupts,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub tls: TlsOptions,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub control: ControlOptions,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub daemon: DaemonOptions,
}

/// How a VM sees the interrupts of a device with MSI-X.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Interrupts {
    /// As MSI, 32 vectors at most: the device can be unplugged from QEMU 11.1
    #[default]
    Msi,
    /// As they are: QEMU 11.1 ends when the device is unplugged
    Msix,
}

impl From<Interrupts> for InterruptView {
    fn from(interrupts: Interrupts) -> Self {
        match interrupts {
            Interrupts::Msi => Self::Msi,
            Interrupts::Msix => Self::Msix,
        }
    }
}

/// Why the command line cannot be followed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum OptionsError {
    /// Neither a socket nor a device.
    #[error("Nothing to borrow: give --socket-path and --device")]
    Nothing,
    /// A socket without a device, or the reverse.
    #[error("{sockets} sockets and {devices} devices do not go together")]
    Pairs {
        /// Number of sockets.
        sockets: usize,
        /// Number of devices.
        devices: usize,
    },
    /// One socket for two devices.
    #[error(transparent)]
    Twice(#[from] KeysError),
    /// A name with other characters, or of another length.
    #[error("{0:?} is not a name: 1 to 64 letters, digits, '-', '_', '.' and ':'")]
    Name(String),
}

impl Options {
    /// What a look at single arguments cannot tell.
    ///
    /// # Errors
    /// See [`OptionsError`].
    pub fn check(&self) -> Result<(), OptionsError> {
        let sockets = self.socket_path.len() + self.fd.len();
        let devices = self.devices.len();
        if sockets == 0 && devices == 0 {
            return Err(OptionsError::Nothing);
        }
        if sockets != devices {
            return Err(OptionsError::Pairs { sockets, devices });
        }
        let paths = self.socket_path.iter();
        let paths = paths
            .chain(self.daemon.metrics_paths())
            .chain(&self.publish);
        let paths = paths.cloned().map(SocketOption::Path);
        let fds = self.fd.iter().map(|&fd| SocketOption::Descriptor(fd));
        let sockets = paths.chain(fds).map(|socket| socket.to_string());
        self.control.check(sockets.collect())?;
        match self.devices.iter().chain(&self.name).find(|n| !is_name(n)) {
            Some(name) => Err(OptionsError::Name(name.clone())),
            None => Ok(()),
        }
    }
}

/// A window and what is seen through it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowOption {
    /// The lender's name of it.
    pub name: String,
    /// The file that it maps.
    pub file: PathBuf,
}

impl FromStr for WindowOption {
    type Err = KeysError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let window = text.split_once('=');
        let window = window.filter(|(name, file)| is_name(name) && !file.is_empty());
        let (name, file) = value(text, "NAME=FILE", window)?;
        Ok(Self {
            name: name.to_owned(),
            file: file.into(),
        })
    }
}

/// A window of the lender, and the device of another lender that it shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerWindowOption(pub PeerWindow);

impl FromStr for PeerWindowOption {
    type Err = KeysError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (window, device) = text.split_once('=')?;
            let mut parts = device.split('/');
            let (lender, device) = (parts.next()?, parts.next()?);
            let bar: u32 = parts.next()?.parse().ok()?;
            let region = Region::from_index(bar).filter(|region| region.bar().is_some())?;
            let are_names = [window, lender, device].into_iter().all(is_name);
            (are_names && parts.next().is_none()).then(|| PeerWindow {
                window: window.to_owned(),
                lender: lender.to_owned(),
                device: device.to_owned(),
                region,
            })
        };
        let wanted = "NAME=LENDER/DEVICE/BAR with a BAR of 0 to 5";
        value(text, wanted, parse().map(Self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, Parser as _};

    fn check(arguments: &[&str]) -> Result<(), OptionsError> {
        let all = ["farlane-borrow"].iter().chain(arguments);
        Options::try_parse_from(all).unwrap().check()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
    }

    #[test]
    fn sockets_and_devices_go_together() {
        assert_eq!(check(&[]), Err(OptionsError::Nothing));
        assert_eq!(check(&["--socket-path=/a", "--device=nvme0"]), Ok(()));
        let two = [
            "--socket-path=/a",
            "--device=a",
            "--socket-path=/a",
            "--device=b",
        ];
        let twice = |what: &str| Err(KeysError::Twice(what.to_owned()).into());
        assert_eq!(check(&two), twice("/a"));
        assert_eq!(
            check(&["--fd=5", "--device=a", "--fd=5", "--device=b"]),
            twice("descriptor 5")
        );
        assert_eq!(
            check(&["--device=nvme0"]),
            Err(OptionsError::Pairs {
                sockets: 0,
                devices: 1
            })
        );
        assert!(matches!(
            check(&["--socket-path=/a", "--device=a b"]),
            Err(OptionsError::Name(_))
        ));
    }

    #[test]
    fn a_window_has_a_name_and_a_file() {
        assert!("ram=/dev/shm/vm".parse::<WindowOption>().is_ok());
        for text in ["ram", "=/dev/shm/vm", "ram=", "r m=/a"] {
            assert!(text.parse::<WindowOption>().is_err(), "{text}");
        }
    }
    #[test]
    fn a_window_of_a_device_names_it_and_its_bar() {
        let window: PeerWindowOption = "w=rack1/gpu0/2".parse().unwrap();
        assert_eq!(window.0.region, Region::Bar2);
        assert_eq!((&*window.0.lender, &*window.0.device), ("rack1", "gpu0"));
        for text in [
            "w",
            "w=a/b",
            "w=a/b/6",
            "w=a/b/x",
            "=a/b/0",
            "w=a/b/0/0",
            "w=a b/c/0",
        ] {
            assert!(text.parse::<PeerWindowOption>().is_err(), "{text}");
        }
    }
}
