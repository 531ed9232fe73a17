//! The models of this machine's devices, in a TOML file.
//!
//! Read from `$FARLANE_IO_CONFIG` if set; otherwise from `$XDG_CONFIG_HOME/farlane/io.toml` (or
//! `~/.config/farlane/io.toml`) and then `/var/lib/farlane/io.toml`. Written to
//! `$FARLANE_IO_CONFIG`, by root to `/var/lib/farlane/io.toml`, by others to the file of the user.

use super::model::CostModel;
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read as _, Write as _};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Environment variable that names the file.
pub const VARIABLE: &str = "FARLANE_IO_CONFIG";
/// The file of the machine.
pub const SYSTEM: &str = "/var/lib/farlane/io.toml";
/// Largest file that is read.
const LARGEST: u64 = 1 << 20;

/// A device with its model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// As [`super::device::name`] says.
    pub device: String,
    /// Whose memory the bytes went to: `soft`, `p2pmem`, `cuda`.
    pub provider: String,
    /// Seconds since 1970 when it was measured.
    pub measured: u64,
    /// Coefficient of determination of the direct transfers.
    pub r2_p2p: f64,
    /// The same of the copies from the page cache.
    pub r2_cache: f64,
    /// Fitted cost model.
    pub model: CostModel,
}

/// What a file keeps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Store {
    /// One for each device and provider.
    #[serde(default, rename = "calibration")]
    calibrations: Vec<Calibration>,
}

/// A file that cannot be used.
#[derive(Debug, Error)]
pub enum StoreError {
    /// It cannot be read.
    #[error("Cannot read {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// I/O error of the read.
        source: std::io::Error,
    },
    /// It is not a store.
    #[error("{path} is not a list of calibrations")]
    Parse {
        /// Path of the file.
        path: PathBuf,
        /// Error of the TOML parser.
        source: Box<toml::de::Error>,
    },
    /// It cannot be written.
    #[error("Cannot write {path}")]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// I/O error of the write.
        source: std::io::Error,
    },
    /// It has no TOML form.
    #[error("Cannot encode the calibrations")]
    Encode(#[from] toml::ser::Error),
}

impl Store {
    /// What this user's programs use: the first entry for a device wins. A file that is missing is
    /// empty.
    pub fn load() -> Result<Self, StoreError> {
        let mut all = Self::default();
        for path in paths() {
            all.calibrations.extend(Self::read(&path)?.calibrations);
        }
        Ok(all)
    }

    /// What one file keeps; nothing if there is no file.
    pub fn read(path: &Path) -> Result<Self, StoreError> {
        let failed = |source| StoreError::Read {
            path: path.into(),
            source,
        };
        let file = match std::fs::File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(failed(error)),
        };
        let mut text = String::new();
        file.take(LARGEST)
            .read_to_string(&mut text)
            .map_err(failed)?;
        toml::from_str(&text).map_err(|source| StoreError::Parse {
            path: path.into(),
            source: Box::new(source),
        })
    }

    /// The calibration of a device for a provider's memory.
    pub fn find(&self, device: &str, provider: &str) -> Option<&Calibration> {
        self.calibrations
            .iter()
            .find(|c| c.device == device && c.provider == provider)
    }

    /// Keeps a calibration instead of an earlier one.
    pub fn put(&mut self, calibration: Calibration) {
        let other =
            |c: &Calibration| c.device != calibration.device || c.provider != calibration.provider;
        self.calibrations.retain(other);
        self.calibrations.push(calibration);
    }

    /// Writes the file as a whole: a reader sees the old one or the new one.
    pub fn write(&self, path: &Path) -> Result<(), StoreError> {
        let text = toml::to_string(self)?;
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let write = || {
            std::fs::create_dir_all(folder)?;
            let mut file = tempfile::Builder::new()
                .prefix(".io.toml")
                .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
                .tempfile_in(folder)?;
            file.write_all(text.as_bytes())?;
            file.as_file().sync_all()?;
            file.persist(path)?;
            Ok(())
        };
        write().map_err(|source| StoreError::Write {
            path: path.into(),
            source,
        })
    }
}

/// The model of device `major`:`minor` (a file's `st_dev`) for a provider's memory, as the shim
/// asks for it once a device. `None` if the device has not been calibrated.
pub fn find(major: u32, minor: u32, provider: &str) -> Result<Option<CostModel>, StoreError> {
    let device = super::device::name_in(Path::new("/sys"), major, minor);
    let store = Store::load()?;
    Ok(store.find(&device, provider).map(|found| found.model))
}

/// The files that are read, the first one first.
pub fn paths() -> Vec<PathBuf> {
    match std::env::var_os(VARIABLE) {
        Some(path) => vec![path.into()],
        None => user().into_iter().chain([SYSTEM.into()]).collect(),
    }
}

/// The file that is written.
pub fn path() -> PathBuf {
    let system = || PathBuf::from(SYSTEM);
    match std::env::var_os(VARIABLE) {
        Some(path) => path.into(),
        None if rustix::process::geteuid().is_root() => system(),
        None => user().unwrap_or_else(system),
    }
}

fn user() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let folder = variable("XDG_CONFIG_HOME").map(PathBuf::from);
    let folder = folder.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".config")));
    Some(folder?.join("farlane/io.toml"))
}
