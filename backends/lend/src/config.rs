//! What is lent, and to whom: the configuration file, and the same from the command line.

use farlane_vfio_remote::link::Address;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use thiserror::Error;

/// Why there is no configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("Cannot read {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// It says something that is not understood.
    #[error("{} is not a configuration of a lender", path.display())]
    Parse {
        /// Which.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: Box<toml::de::Error>,
    },
}

/// A configuration file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// What this host calls itself.
    pub name: Option<String>,
    /// Where borrowers connect.
    #[serde(default)]
    pub listen: Vec<AddressText>,
    /// A lease ends when it has not been renewed for so many seconds (3).
    pub term_seconds: Option<u16>,
    /// How many seconds a holder has to give a device back that is revoked (5).
    pub grace_seconds: Option<u16>,
    /// Certificates, for `tls:` addresses.
    pub tls: Option<TlsFiles>,
    /// What is lent.
    #[serde(default, rename = "device")]
    pub devices: Vec<DeviceConfig>,
    /// Bridges to other hosts.
    #[serde(default, rename = "window")]
    pub windows: Vec<WindowConfig>,
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        toml::from_str(&text).map_err(|e| ConfigError::Parse {
            path: path.to_owned(),
            source: Box::new(e),
        })
    }
}

/// An address in a file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct AddressText(pub Address);

impl TryFrom<String> for AddressText {
    type Error = farlane_vfio_remote::link::AddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse().map(Self)
    }
}

/// Files of TLS, all PEM.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// This host's certificate, and those between it and an authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities that borrowers' certificates must be signed by.
    pub authorities: PathBuf,
}

/// A device.
#[derive(Clone, Debug, Deserialize)]
pub struct DeviceConfig {
    /// Its name.
    pub name: String,
    /// Who may borrow it: names of hosts; everybody who can connect where it is empty.
    #[serde(default)]
    pub borrowers: Vec<String>,
    /// Where it comes from.
    #[serde(flatten)]
    pub source: SourceConfig,
}

/// Where a device comes from.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "source", rename_all = "lowercase")]
pub enum SourceConfig {
    /// A software NVMe controller.
    Nvme(NvmeOptions),
    /// A software GPU.
    Gpu(GpuOptions),
    /// A function of this host.
    Vfio(Function),
}

/// A software GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GpuOptions {
    /// Its video memory: a power of two.
    pub memory: Option<Size>,
}

/// A software NVMe controller.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct NvmeOptions {
    /// Its namespaces, at least one.
    #[serde(rename = "namespace")]
    pub namespaces: Vec<Backing>,
    /// Serial number; made of the device's name where it is not given.
    pub serial: Option<String>,
    /// How doorbells reach it.
    pub doorbells: DoorbellMode,
    /// Whether the host's page cache takes part.
    pub cache: CacheMode,
    /// Bytes of a logical block.
    pub block: BlockBytes,
    /// I/O queue pairs.
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
    /// Nothing: for measurements.
    Null(Size),
}

/// A number of bytes: digits and perhaps K, M, G or T (powers of 1024).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || format!("{text:?} is not a size such as 16G");
        let (digits, shift) = match text.char_indices().last() {
            Some((at, 'K')) => (&text[..at], 10),
            Some((at, 'M')) => (&text[..at], 20),
            Some((at, 'G')) => (&text[..at], 30),
            Some((at, 'T')) => (&text[..at], 40),
            _ => (text, 0),
        };
        let number: u64 = digits.parse().map_err(|_| refuse())?;
        number
            .checked_mul(1 << shift)
            .filter(|&bytes| bytes > 0)
            .map(Self)
            .ok_or_else(refuse)
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
    /// Around it.
    #[default]
    Direct,
    /// Through it.
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

/// Bytes of a logical block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u16")]
pub enum BlockBytes {
    /// 512.
    #[default]
    B512,
    /// 4096.
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
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Function {
    /// Its address.
    pub function: FunctionAddress,
}

impl FromStr for Function {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self {
            function: FunctionAddress::try_from(text.to_owned())?,
        })
    }
}

/// Address of a function as sysfs writes it: `0000:01:00.0`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct FunctionAddress(pub String);

impl TryFrom<String> for FunctionAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let parts: Vec<&str> = text.split([':', '.']).collect();
        let widths = [4, 2, 2, 1];
        let fits = parts.len() == widths.len()
            && text.matches(':').count() == 2
            && parts.iter().zip(widths).all(|(part, width)| {
                part.len() == width && part.bytes().all(|b| b.is_ascii_hexdigit())
            });
        if fits {
            Ok(Self(text))
        } else {
            Err(format!("{text:?} is not a function such as 0000:01:00.0"))
        }
    }
}

/// A bridge to other hosts.
#[derive(Clone, Debug, Deserialize)]
pub struct WindowConfig {
    /// What both ends call it.
    pub name: String,
    /// Whose memory is seen through it: names of hosts. Nobody else's devices reach it.
    pub borrowers: Vec<String>,
    /// What it is.
    #[serde(flatten)]
    pub bridge: BridgeConfig,
}

/// Kinds of bridges.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "ntb", rename_all = "lowercase")]
pub enum BridgeConfig {
    /// An ivshmem function of this (virtual) host.
    Ivshmem {
        /// Its address.
        function: FunctionAddress,
    },
    /// A memory BAR of an NTB endpoint, whose translation has been set up.
    Pci {
        /// Its address.
        function: FunctionAddress,
        /// Which BAR.
        bar: u8,
        /// Where in the BAR the window begins, in bytes.
        #[serde(default)]
        offset: u64,
        /// Its size.
        size: Size,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_is_lent_and_to_whom() {
        let config: Config = toml::from_str(
            r#"
            name = "rack1"
            listen = ["unix:/run/farlane/lend.sock", "tls:0.0.0.0:7411"]
            term_seconds = 2

            [tls]
            certificate = "rack1.pem"
            key = "rack1.key"
            authorities = "ca.pem"

            [[device]]
            name = "scratch"
            source = "nvme"
            namespace = [{ file = "/srv/scratch.img" }, { null = "1T" }]
            doorbells = "shared"
            block = 4096

            [[device]]
            name = "gpu0"
            source = "gpu"
            memory = "64M"

            [[device]]
            name = "nvme0"
            source = "vfio"
            function = "0000:01:00.0"
            borrowers = ["rack2", "rack3"]

            [[window]]
            name = "ram"
            borrowers = ["rack2"]
            ntb = "ivshmem"
            function = "0000:00:05.0"
            "#,
        )
        .unwrap();
        assert_eq!(config.listen.len(), 2);
        assert_eq!(config.devices[2].borrowers, ["rack2", "rack3"]);
        let SourceConfig::Gpu(gpu) = &config.devices[1].source else {
            panic!("not a GPU");
        };
        assert_eq!(gpu.memory, Some(Size(64 << 20)));
        let SourceConfig::Nvme(nvme) = &config.devices[0].source else {
            panic!("not an NVMe controller");
        };
        assert_eq!(nvme.namespaces[1], Backing::Null(Size(1 << 40)));
        assert_eq!(nvme.block, BlockBytes::B4096);
    }

    #[test]
    fn mistakes_in_a_file_are_told() {
        for text in [
            "listen = [\"tcp:0.0.0.0:1\"]",
            "lisden = []",
            "[[device]]\nname = \"a\"\nsource = \"floppy\"",
            "[[device]]\nname = \"a\"\nsource = \"vfio\"\nfunction = \"01:00.0\"",
            "[[device]]\nname = \"a\"\nsource = \"nvme\"\nblock = 513",
            "[[device]]\nname = \"a\"\nsource = \"gpu\"\nmemory = \"much\"",
            "[[window]]\nname = \"a\"\nntb = \"ivshmem\"\nfunction = \"0000:01:00.0\"",
        ] {
            assert!(toml::from_str::<Config>(text).is_err(), "{text}");
        }
    }
}
