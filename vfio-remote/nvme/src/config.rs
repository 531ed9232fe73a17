//! What a controller is made of.

use std::path::PathBuf;
use thiserror::Error;

/// Most namespaces of a controller.
pub const MAX_NAMESPACES: usize = 64;
/// Most I/O queue pairs of a controller.
pub const MAX_IO_QUEUES: u16 = 64;

/// How doorbells reach the controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Doorbells {
    /// A message each, unless the driver uses shadow doorbells (NVMe 1.4, 7.13), as Linux does.
    /// The controller sleeps while there is nothing to do.
    #[default]
    Trapped,
    /// The borrower maps the doorbell page: no message ever. Nothing tells the controller of a
    /// doorbell then, so that it has to look: at once while there is work, every millisecond when
    /// there has been none for a while, and every 10 ms after seconds without.
    Shared,
}

/// Whether the host's page cache takes part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Direct I/O, where the file's file system supports it.
    #[default]
    Direct,
    /// Buffered I/O.
    Buffered,
}

/// Bytes of a logical block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockSize {
    /// 512 bytes.
    #[default]
    B512,
    /// 4096 bytes.
    B4096,
}

impl BlockSize {
    /// Two to the power of this are its bytes.
    #[must_use]
    pub fn shift(self) -> u32 {
        match self {
            Self::B512 => 9,
            Self::B4096 => 12,
        }
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        1 << self.shift()
    }
}

/// The storage of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backing {
    /// A file or block device.
    File {
        /// Its path.
        path: PathBuf,
        /// Whether it is write-protected.
        read_only: bool,
    },
    /// Nothing: writes are forgotten, reads find zeroes. For measurements.
    Null {
        /// Size.
        bytes: u64,
    },
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceConfig {
    /// Its storage.
    pub backing: Backing,
    /// Size of its logical blocks.
    pub block_size: BlockSize,
}

impl From<Backing> for NamespaceConfig {
    fn from(backing: Backing) -> Self {
        Self {
            backing,
            block_size: BlockSize::default(),
        }
    }
}

/// The host that offers a controller: with the controller's name and serial number what its
/// identifiers are made of, which are to be no other controller's, wherever that is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// What tells it from all other hosts (`machine-id(5)`), if anything does. It is not shown:
    /// identifiers hold a digest of it.
    pub machine: Option<String>,
    /// Name of the lender.
    pub lender: String,
}

/// A controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeConfig {
    /// Name at its lender.
    pub name: String,
    /// Serial number: 1 to 20 printable ASCII characters.
    pub serial: String,
    /// The host that lends it.
    pub host: Host,
    /// Namespaces 1, 2, ...
    pub namespaces: Vec<NamespaceConfig>,
    /// How doorbells reach it.
    pub doorbells: Doorbells,
    /// Whether the host's page cache takes part.
    pub cache: Cache,
    /// I/O queue pairs, each with an interrupt vector of its own, 1 to [`MAX_IO_QUEUES`].
    pub io_queues: u16,
}

impl NvmeConfig {
    /// A controller without namespaces, of a host without a name, with trapped doorbells and 16 I/O
    /// queues.
    #[must_use]
    pub fn new(name: impl Into<String>, serial: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            serial: serial.into(),
            host: Host::default(),
            namespaces: Vec::new(),
            doorbells: Doorbells::default(),
            cache: Cache::default(),
            io_queues: 16,
        }
    }

    pub(crate) fn check(&self) -> Result<(), NvmeError> {
        let printable = |c: char| c.is_ascii_graphic() || c == ' ';
        if self.serial.is_empty() || self.serial.len() > 20 || !self.serial.chars().all(printable) {
            return Err(NvmeError::Serial(self.serial.clone()));
        }
        if self.namespaces.is_empty() || self.namespaces.len() > MAX_NAMESPACES {
            return Err(NvmeError::Namespaces(self.namespaces.len()));
        }
        if self.io_queues == 0 || self.io_queues > MAX_IO_QUEUES {
            return Err(NvmeError::Queues(self.io_queues));
        }
        Ok(())
    }
}

/// Why a controller cannot be made.
#[derive(Debug, Error)]
pub enum NvmeError {
    /// The serial number is not one.
    #[error("Serial number {0:?} is not 1 to 20 printable ASCII characters")]
    Serial(String),
    /// Too many namespaces, or none.
    #[error("{0} namespaces are not between 1 and {MAX_NAMESPACES}")]
    Namespaces(usize),
    /// Too many queues, or none.
    #[error("{0} I/O queues are not between 1 and {MAX_IO_QUEUES}")]
    Queues(u16),
    /// What is to hold a namespace cannot.
    #[error(transparent)]
    Storage(#[from] farlane_block::storage::StorageError),
    /// Less than a block.
    #[error("{bytes} bytes of {what} are less than a block")]
    TooSmall {
        /// Its path.
        what: String,
        /// Its size.
        bytes: u64,
    },
}
