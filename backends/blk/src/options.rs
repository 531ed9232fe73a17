//! The command line.

use crate::bits::ID_BYTES;
use crate::disk::{Cache, DiskConfig};
use farlane_daemon::options::DaemonOptions;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;
use thiserror::Error;

/// Most queues of a disk where nothing else is said: VMMs take as many as the VM has processors, and
/// refuse a disk that has fewer.
const DEFAULT_QUEUES: u16 = 64;
const MAX_QUEUES: u16 = 256;

/// Disks for a virtual machine
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "farlane-blk", version)]
pub struct Options {
    /// A disk: where its VMM finds it (a vhost-user socket to make, or an inherited listening one),
    /// and what holds it, a file or block device. serial=S is what the guest sees (otherwise made of
    /// the path); cache=direct|buffered, block=512|4096, queues=N at most
    #[arg(
        long = "disk",
        value_name = "socket=PATH|fd=N,path=PATH[,KEY=VALUE]...",
        required_unless_present_any = ["blk_file", "print_capabilities"]
    )]
    pub disks: Vec<DiskOptions>,

    /// One disk by itself: what holds it
    #[arg(long, visible_alias = "path", value_name = "PATH")]
    pub blk_file: Option<PathBuf>,

    /// The vhost-user socket of that disk
    #[arg(long, value_name = "PATH", requires = "blk_file")]
    pub socket_path: Option<PathBuf>,

    /// A listening vhost-user socket of that disk, as an inherited descriptor
    #[arg(
        long,
        value_name = "N",
        requires = "blk_file",
        conflicts_with = "socket_path"
    )]
    pub fd: Option<RawFd>,

    /// That disk cannot be written
    #[arg(long, requires = "blk_file")]
    pub read_only: bool,

    /// A vhost-user socket to make for a farlane device: through it processes of the VM register
    /// device memory, which their direct I/O on these disks then reads and writes
    #[arg(long, value_name = "PATH")]
    pub tunnel: Option<PathBuf>,

    /// A socket at which another backend of the VM publishes memory of its device, such as that of
    /// `farlane-borrow --publish`; can be given several times
    #[arg(long, value_name = "PATH", requires = "tunnel")]
    pub device_memory: Vec<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub daemon: DaemonOptions,
}

impl Options {
    /// All disks, of which no two have anything that must be their own.
    ///
    /// # Errors
    /// See [`OptionsError`].
    pub fn all_disks(&self) -> Result<Vec<DiskOptions>, OptionsError> {
        let mut disks = self.disks.clone();
        if let Some(path) = &self.blk_file {
            let socket = match (&self.socket_path, self.fd) {
                (Some(path), _) => SocketOption::Path(path.clone()),
                (None, Some(fd)) => SocketOption::Descriptor(fd),
                (None, None) => return Err(OptionsError::Missing("--socket-path or --fd")),
            };
            let mut disk = DiskOptions::new(socket, path.clone());
            disk.disk.read_only = self.read_only;
            disks.push(disk);
        }
        let mut sockets: Vec<_> = disks.iter().map(|d| d.socket.to_string()).collect();
        let others = self.daemon.metrics.iter().chain(&self.tunnel);
        sockets.extend(others.map(|path| path.display().to_string()));
        let mut serials: Vec<_> = disks.iter().filter_map(|d| d.disk.serial.clone()).collect();
        for values in [&mut sockets, &mut serials] {
            values.sort();
            if let Some(pair) = values.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(OptionsError::Twice(pair[0].clone()));
            }
        }
        Ok(disks)
    }
}

/// Why the command line cannot be followed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum OptionsError {
    /// A socket or serial number for two disks.
    #[error("{0} is given twice")]
    Twice(String),
    /// A key is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A key that is not known, or comes twice.
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

/// Where a VMM connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketOption {
    /// A socket to make.
    Path(PathBuf),
    /// One that is inherited.
    Descriptor(RawFd),
}

impl std::fmt::Display for SocketOption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Descriptor(fd) => write!(f, "descriptor {fd}"),
        }
    }
}

/// A disk, and where it is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// Where.
    pub socket: SocketOption,
    /// The disk.
    pub disk: DiskConfig,
}

impl DiskOptions {
    /// A disk of which nothing else is said.
    #[must_use]
    pub fn new(socket: SocketOption, path: PathBuf) -> Self {
        Self {
            socket,
            disk: DiskConfig {
                path,
                serial: None,
                read_only: false,
                queues: DEFAULT_QUEUES,
                cache: Cache::default(),
                block: 512,
            },
        }
    }
}

fn value<T>(value: &str, wanted: &'static str, parsed: Option<T>) -> Result<T, OptionsError> {
    parsed.ok_or_else(|| OptionsError::Value {
        value: value.to_owned(),
        wanted,
    })
}

impl FromStr for DiskOptions {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut socket = None;
        let mut path = None;
        let mut options = Self::new(SocketOption::Descriptor(-1), PathBuf::new());
        let disk = &mut options.disk;
        let mut seen = Vec::new();
        for word in text.split(',') {
            let unknown = || OptionsError::Unknown(word.to_owned());
            let (key, given) = word.split_once('=').ok_or_else(unknown)?;
            // Two names of one thing.
            let name = if key == "fd" { "socket" } else { key };
            if given.is_empty() || seen.contains(&name) {
                return Err(unknown());
            }
            seen.push(name);
            match key {
                "socket" => socket = Some(SocketOption::Path(given.into())),
                "fd" => {
                    let fd = value(given, "a descriptor", given.parse().ok())?;
                    socket = Some(SocketOption::Descriptor(fd));
                }
                "path" => path = Some(given.into()),
                "serial" => {
                    let fits = given.len() <= ID_BYTES;
                    let serial = fits.then(|| given.to_owned());
                    disk.serial = Some(value(given, "a serial number of 20 characters", serial)?);
                }
                "read-only" => {
                    let switch = match given {
                        "on" => Some(true),
                        "off" => Some(false),
                        _ => None,
                    };
                    disk.read_only = value(given, "on or off", switch)?;
                }
                "cache" => {
                    let cache = match given {
                        "direct" => Some(Cache::Direct),
                        "buffered" => Some(Cache::Buffered),
                        _ => None,
                    };
                    disk.cache = value(given, "direct or buffered", cache)?;
                }
                "block" => {
                    let block = given.parse().ok().filter(|b| [512, 4096].contains(b));
                    disk.block = value(given, "512 or 4096", block)?;
                }
                "queues" => {
                    let queues = given.parse().ok();
                    let queues = queues.filter(|n| (1..=MAX_QUEUES).contains(n));
                    disk.queues = value(given, "a number from 1 to 256", queues)?;
                }
                _ => return Err(unknown()),
            }
        }
        options.socket = socket.ok_or(OptionsError::Missing("socket or fd"))?;
        options.disk.path = path.ok_or(OptionsError::Missing("path"))?;
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, Parser as _};

    fn parse(words: &[&str]) -> Options {
        Options::try_parse_from([&["farlane-blk"], words].concat()).unwrap()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
    }

    #[test]
    fn disks_are_read() {
        let disk: DiskOptions =
            "socket=/s,path=/f,serial=a b,read-only=on,cache=buffered,block=4096,queues=2"
                .parse()
                .unwrap();
        assert_eq!(disk.socket, SocketOption::Path("/s".into()));
        assert_eq!(
            disk.disk,
            DiskConfig {
                path: "/f".into(),
                serial: Some("a b".to_owned()),
                read_only: true,
                queues: 2,
                cache: Cache::Buffered,
                block: 4096,
            }
        );
        for text in [
            "",
            "socket=/s",
            "path=/f",
            "socket=/s,path=/f,path=/g",
            "socket=/s,fd=3,path=/f",
            "socket=/s,path=/f,queues=0",
            "socket=/s,path=/f,block=1024",
            "socket=/s,path=/f,cache=",
            "socket=/s,path=/f,read-only=perhaps",
            "socket=/s,path=/f,serial=123456789012345678901",
            "socket=/s,path=/f,colour=blue",
        ] {
            assert!(text.parse::<DiskOptions>().is_err(), "{text}");
        }
    }

    #[test]
    fn one_disk_needs_no_list() {
        let disks = parse(&["--socket-path", "/s", "--path", "/f", "--read-only"])
            .all_disks()
            .unwrap();
        assert!(disks[0].disk.read_only);
        assert_eq!(disks[0].socket, SocketOption::Path("/s".into()));
        assert!(parse(&["--blk-file", "/f"]).all_disks().is_err());
        assert!(Options::try_parse_from(["farlane-blk"]).is_err());
        assert!(Options::try_parse_from(["farlane-blk", "--fd", "3"]).is_err());
    }

    #[test]
    fn what_must_be_a_disks_own_is_given_once() {
        let twice = |one: &str, two: &str| parse(&["--disk", one, "--disk", two]).all_disks();
        assert!(twice("socket=/s,path=/f", "socket=/t,path=/g").is_ok());
        assert!(twice("socket=/s,path=/f", "socket=/s,path=/g").is_err());
        assert!(twice("fd=3,path=/f", "fd=3,path=/g").is_err());
        assert!(twice("socket=/s,path=/f,serial=a", "socket=/t,path=/g,serial=a").is_err());
    }
}
