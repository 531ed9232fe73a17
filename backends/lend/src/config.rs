//! The configuration of a lender: which devices are lent, and to whom.

use farlane_sys::{PciAddress, PciAddressError};
use farlane_vfio_remote::protocol::Address;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;

/// Configuration of a lender; [`file`](crate::file) parses it.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Name of this lender.
    pub name: Option<String>,
    /// Addresses at which borrowers connect.
    pub listen: Vec<AddressText>,
    /// Term of a lease in seconds: it ends when it has not been renewed for so long (3).
    pub term_seconds: Option<u16>,
    /// Grace in seconds that a holder has to return a revoked device (5).
    pub grace_seconds: Option<u16>,
    /// Certificate, key and authorities of `tls:` addresses.
    pub tls: Option<TlsFiles>,
    /// Devices that are lent.
    pub devices: Vec<DeviceConfig>,
    /// Memory windows to other hosts.
    pub windows: Vec<WindowConfig>,
    /// Names of other lenders whose devices may reach those that are lent here.
    pub lenders: Vec<String>,
    /// Users of this host that may borrow, besides this one and root.
    pub users: Vec<UserConfig>,
    /// Options of every daemon that the file has, as it says them, by their keys.
    pub common: BTreeMap<&'static str, String>,
}

/// A user of this host.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserConfig {
    /// User ID.
    pub uid: u32,
    /// Names under which it may borrow.
    pub names: Vec<String>,
}

/// An address in a file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct AddressText(pub Address);

impl TryFrom<String> for AddressText {
    type Error = farlane_vfio_remote::protocol::AddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse().map(Self)
    }
}

/// Files of TLS, all PEM.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// Certificate chain of this host.
    pub certificate: PathBuf,
    /// Private key of the certificate.
    pub key: PathBuf,
    /// Certificate authorities that borrowers' certificates are verified against.
    pub authorities: PathBuf,
}

/// A device that is lent.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Name under which it is borrowed.
    pub name: String,
    /// Who may borrow it: names of hosts; everybody who can connect where it is empty.
    pub borrowers: Vec<String>,
    /// What implements it.
    pub source: SourceConfig,
}

/// What implements a device.
#[derive(Clone, Debug)]
pub enum SourceConfig {
    /// A software NVMe controller.
    Nvme(NvmeOptions),
    /// A software GPU.
    Gpu(GpuOptions),
    /// A function of this host.
    Vfio(Function),
}

/// Options of a software GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuOptions {
    /// Size of its video memory: a power of two.
    pub memory: Option<Size>,
}

/// Options of a software NVMe controller.
#[derive(Clone, Debug, Default)]
pub struct NvmeOptions {
    /// Its namespaces, at least one.
    pub namespaces: Vec<Backing>,
    /// Serial number; made of the device's name where it is not given.
    pub serial: Option<String>,
    /// How doorbells reach it.
    pub doorbells: DoorbellMode,
    /// Whether the host's page cache takes part.
    pub cache: CacheMode,
    /// Logical block size.
    pub block: BlockBytes,
    /// Number of I/O queue pairs.
    pub queues: Option<u16>,
    /// Whether nothing can be written.
    pub read_only: bool,
}

/// What holds the bytes of a namespace: `{ file = "PATH" }` or `{ null = "16G" }`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backing {
    /// A file or block device.
    File(PathBuf),
    /// Nothing is stored: a namespace for measurements.
    Null(Size),
}

/// A number of bytes that is not zero, as [`farlane_daemon::keys::bytes`] reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bytes = farlane_daemon::keys::bytes(text).filter(|&bytes| bytes > 0);
        let bytes = bytes.ok_or_else(|| format!("{text:?} is not a size such as 16G"));
        bytes.map(Self)
    }
}

impl TryFrom<String> for Size {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// See `farlane_nvme::Doorbells`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DoorbellMode {
    /// A message each, unless the driver uses shadow doorbells.
    #[default]
    Trapped,
    /// The borrower maps them.
    Shared,
}

impl FromStr for DoorbellMode {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "trapped" => Ok(Self::Trapped),
            "shared" => Ok(Self::Shared),
            _ => Err(()),
        }
    }
}

/// See `farlane_nvme::Cache`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Direct I/O, around the page cache.
    #[default]
    Direct,
    /// Buffered I/O, through the page cache.
    Buffered,
}

impl FromStr for CacheMode {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "direct" => Ok(Self::Direct),
            "buffered" => Ok(Self::Buffered),
            _ => Err(()),
        }
    }
}

/// Logical block size in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u16")]
pub enum BlockBytes {
    /// Blocks of 512 bytes.
    #[default]
    B512,
    /// Blocks of 4096 bytes.
    B4096,
}

impl TryFrom<u16> for BlockBytes {
    type Error = String;

    fn try_from(bytes: u16) -> Result<Self, Self::Error> {
        match bytes {
            512 => Ok(Self::B512),
            4096 => Ok(Self::B4096),
            _ => Err(format!("{bytes} is not 512 or 4096")),
        }
    }
}

impl FromStr for BlockBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bytes: u16 = text.parse().map_err(|_| text.to_owned())?;
        bytes.try_into()
    }
}

/// A function of this host, bound to vfio-pci.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// PCI address.
    pub function: FunctionAddress,
}

impl FromStr for Function {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let function = FunctionAddress(text.parse()?);
        Ok(Self { function })
    }
}

/// Address of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct FunctionAddress(pub PciAddress);

impl TryFrom<String> for FunctionAddress {
    type Error = PciAddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse().map(Self)
    }
}

/// A memory window to other hosts.
#[derive(Clone, Debug)]
pub struct WindowConfig {
    /// What both ends call it.
    pub name: String,
    /// Whose memory is seen through it: names of hosts. Nobody else's devices reach it.
    pub borrowers: Vec<String>,
    /// The bridge whose memory it is.
    pub bridge: BridgeConfig,
    /// The device of another lender that is seen through it, instead of a VM's memory.
    pub shows: Option<ShowsConfig>,
}

/// A BAR of a device of another lender.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShowsConfig {
    /// Name of the other lender.
    pub lender: String,
    /// Address at which it listens.
    pub address: AddressText,
    /// Its name of the device.
    pub device: String,
    /// Which BAR, from its beginning on.
    pub bar: u8,
}

/// The bridge behind a memory window.
#[derive(Clone, Debug)]
pub enum BridgeConfig {
    /// An ivshmem function of this (virtual) host.
    Ivshmem {
        /// PCI address of the ivshmem function.
        function: FunctionAddress,
    },
    /// A memory BAR of an NTB endpoint, whose translation has been set up.
    Pci {
        /// PCI address of the NTB endpoint.
        function: FunctionAddress,
        /// Index of the memory BAR.
        bar: u8,
        /// Where in the BAR the window begins, in bytes.
        offset: u64,
        /// Size of the window in bytes.
        size: Size,
    },
}
