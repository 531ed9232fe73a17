//! The command line.

use crate::bits::ID_BYTES;
use crate::disk::{Cache, DiskConfig};
use crate::paths::PathConfig;
use crate::surroundings::{PATIENCE_SECONDS, SPLIT, Surroundings, Tuning};
use farlane_daemon::keys::{Keys, all_different, bytes, switch, value};
pub use farlane_daemon::keys::{KeysError as OptionsError, SocketOption};
use farlane_daemon::options::{DaemonOptions, LocalityOptions};
use farlane_daemon::per_node::WorkerNodes;
use farlane_daemon::reload::ControlOptions;
use farlane_zero_copy::topology::Node;
use std::ops::RangeInclusive;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;

/// Most queues of a disk where nothing else is said: VMMs take as many as the VM has processors,
/// and refuse a disk that has fewer.
const DEFAULT_QUEUES: u16 = 64;
const MAX_QUEUES: u16 = 256;
/// Bytes that a part of a request can have at least.
pub(crate) const SPLITS: RangeInclusive<u64> = 512..=1 << 30;

/// Disks for a virtual machine
#[derive(Clone, Debug, clap::Parser)]
#[command(
    name = "farlane-blk",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct Options {
    /// A disk: where its VMM finds it (a vhost-user socket to make, or an inherited listening one),
    /// and what holds it, a file or block device, unless --path says that. serial=S is what the
    /// guest sees (otherwise made of the path); cache=direct|buffered, block=512|4096, queues=N at
    /// most; paths=auto finds the other paths to a multi-ported NVMe namespace
    #[arg(
        long = "disk",
        value_name = "socket=PATH|fd=N,path=PATH[,KEY=VALUE]...",
        required_unless_present_any = ["blk_file", "paths", "print_capabilities"]
    )]
    pub disks: Vec<DiskOptions>,

    /// One disk by itself: what holds it
    #[arg(long, value_name = "PATH")]
    pub blk_file: Option<PathBuf>,

    /// The same; or, with dev=, one of several paths to a disk: the file or block device, the NUMA
    /// node that it is attached to (asked of the kernel where it is not given), and a name for the
    /// counters. disk=SERIAL says whose path it is where there are several disks
    #[arg(
        long = "path",
        value_name = "PATH|dev=PATH[,node=N][,disk=SERIAL][,name=NAME]"
    )]
    pub paths: Vec<PathOption>,

    /// The vhost-user socket of that disk
    #[arg(long, value_name = "PATH")]
    pub socket_path: Option<PathBuf>,

    /// A listening vhost-user socket of that disk, as an inherited descriptor
    #[arg(long, value_name = "N", conflicts_with = "socket_path")]
    pub fd: Option<RawFd>,

    /// That disk cannot be written
    #[arg(long)]
    pub read_only: bool,

    /// Whether requests of disks with several paths are done on the node where their data lies;
    /// otherwise on that of the queue
    #[arg(
        long,
        value_name = "on|off",
        value_parser = on_or_off,
        default_value = "on",
        action = clap::ArgAction::Set
    )]
    pub steer: bool,

    /// Split requests whose data lies on several nodes into parts of at least so many bytes; K, M,
    /// G or T may follow
    #[arg(long, value_name = "BYTES", value_parser = split, default_value_t = SPLIT)]
    pub split: u64,

    /// How long requests wait for a path to come back after all of a disk's have failed
    #[arg(long, value_name = "SECONDS", default_value_t = PATIENCE_SECONDS)]
    pub path_wait: u32,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub locality: LocalityOptions,

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
    pub control: ControlOptions,

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
        let mut single = Vec::new();
        single.extend(self.blk_file.clone().map(PathConfig::new));
        let mut others = Vec::new();
        let alone = self.socket_path.is_some() || self.fd.is_some();
        for given in &self.paths {
            match (given, alone) {
                (PathOption::File(file), _) => single.push(PathConfig::new(file.clone())),
                (PathOption::Path { disk: None, path }, true) => single.push(path.clone()),
                (PathOption::Path { disk, path }, _) => others.push((disk, path)),
            }
        }
        let files = self
            .paths
            .iter()
            .filter(|p| matches!(p, PathOption::File(_)));
        if files.count() + usize::from(self.blk_file.is_some()) > 1 {
            return Err(OptionsError::Twice("What holds the disk".to_owned()));
        }
        if single.is_empty() {
            if alone {
                return Err(OptionsError::Missing("--blk-file or --path"));
            }
            if self.read_only {
                return Err(OptionsError::Missing("--socket-path or --fd"));
            }
        } else {
            let socket = SocketOption::of(self.socket_path.as_ref(), self.fd)?;
            let mut disk = DiskOptions::new(socket, single);
            disk.disk.read_only = self.read_only;
            disks.push(disk);
        }
        for (serial, path) in others {
            let disk = match (serial, &mut disks[..]) {
                (None, [disk]) => disk,
                (None, _) => return Err(OptionsError::Missing("disk=SERIAL of a --path")),
                (Some(serial), disks) => disks
                    .iter_mut()
                    .find(|disk| disk.disk.serial.as_ref() == Some(serial))
                    .ok_or_else(|| OptionsError::Value {
                        value: serial.clone(),
                        wanted: "the serial number of a disk",
                    })?,
            };
            disk.disk.paths.push(path.clone());
        }
        if disks.iter().any(|disk| disk.disk.paths.is_empty()) {
            return Err(OptionsError::Missing("path"));
        }
        let mut sockets: Vec<_> = disks.iter().map(|d| d.socket.to_string()).collect();
        let metrics = self.daemon.metrics_paths().into_iter();
        sockets.extend(metrics.map(|path| path.display().to_string()));
        sockets.extend(self.tunnel.iter().map(|path| path.display().to_string()));
        let serials: Vec<_> = disks.iter().filter_map(|d| d.disk.serial.clone()).collect();
        self.control.check(sockets)?;
        all_different(serials)?;
        Ok(disks)
    }
}

impl Options {
    /// The machine, and what is wanted on it.
    #[must_use]
    pub fn surroundings(&self) -> Surroundings {
        Surroundings {
            nodes: WorkerNodes::new(self.locality.topology()),
            sysfs: self.locality.sysfs.clone(),
            given: self.locality.given(),
            steers: self.steer,
            tuning: Tuning::new(self.split, self.path_wait).into(),
        }
    }
}

fn on_or_off(text: &str) -> Result<bool, OptionsError> {
    value(text, "on or off", switch(text))
}

fn split(text: &str) -> Result<u64, OptionsError> {
    let fits = bytes(text).filter(|bytes| SPLITS.contains(bytes));
    value(text, "a number of bytes from 512 to 1G", fits)
}

/// What holds a disk: all of it, or one of several ways to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathOption {
    /// A file or block device.
    File(PathBuf),
    /// One way of several.
    Path {
        /// The serial number of the disk.
        disk: Option<String>,
        /// The way.
        path: PathConfig,
    },
}

impl FromStr for PathOption {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if !text.split(',').any(|word| word.starts_with("dev=")) {
            return Ok(Self::File(text.into()));
        }
        let mut keys = Keys::split(text);
        let mut path = PathConfig::new(keys.take("dev").unwrap_or_default().into());
        path.node = keys.parse("node", "the number of a NUMA node", |node| {
            node.parse().ok().map(Node)
        })?;
        path.name = keys.take("name");
        let disk = keys.take("disk");
        keys.finish()?;
        Ok(Self::Path { disk, path })
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
    pub fn new(socket: SocketOption, paths: Vec<PathConfig>) -> Self {
        Self {
            socket,
            disk: DiskConfig {
                paths,
                discovers: false,
                serial: None,
                read_only: false,
                queues: DEFAULT_QUEUES,
                cache: Cache::default(),
                block: 512,
            },
        }
    }
}

impl FromStr for DiskOptions {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut keys = Keys::split(text);
        let socket = keys.socket()?;
        let paths = keys.take("path").map(|path| PathConfig::new(path.into()));
        let discovers = keys.parse("paths", "auto", |text| (text == "auto").then_some(true))?;
        let serial = keys.parse("serial", "a serial number of 20 characters", |serial| {
            (serial.len() <= ID_BYTES).then(|| serial.to_owned())
        })?;
        let read_only = keys.parse("read-only", "on or off", switch)?;
        let cache = keys.parse("cache", "direct or buffered", |text| match text {
            "direct" => Some(Cache::Direct),
            "buffered" => Some(Cache::Buffered),
            _ => None,
        })?;
        let block = keys.parse("block", "512 or 4096", |text| {
            text.parse()
                .ok()
                .filter(|block| [512, 4096].contains(block))
        })?;
        let queues = keys.parse("queues", "a number from 1 to 256", |text| {
            text.parse().ok().filter(|n| (1..=MAX_QUEUES).contains(n))
        })?;
        keys.finish()?;
        let socket = socket.ok_or(OptionsError::Missing("socket or fd"))?;
        let mut options = Self::new(socket, paths.into_iter().collect());
        let disk = &mut options.disk;
        disk.discovers = discovers.unwrap_or(disk.discovers);
        disk.serial = serial;
        disk.read_only = read_only.unwrap_or(disk.read_only);
        disk.cache = cache.unwrap_or(disk.cache);
        disk.block = block.unwrap_or(disk.block);
        disk.queues = queues.unwrap_or(disk.queues);
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
                paths: vec![PathConfig::new("/f".into())],
                discovers: false,
                serial: Some("a b".to_owned()),
                read_only: true,
                queues: 2,
                cache: Cache::Buffered,
                block: 4096,
            }
        );
        for text in [
            "",
            "path=/f",
            "socket=/s,path=/f,paths=all",
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
        let disk = ["--disk", "socket=/s,path=/f"];
        assert!(
            parse(&[&disk[..], &["--fd", "3"]].concat())
                .all_disks()
                .is_err()
        );
        assert!(
            parse(&[&disk[..], &["--read-only"]].concat())
                .all_disks()
                .is_err()
        );
    }

    #[test]
    fn paths_are_given_to_their_disks() {
        let paths = |words: &[&str]| -> Vec<Vec<(u32, String)>> {
            let disks = parse(words).all_disks().unwrap();
            let told = |p: &PathConfig| (p.node.map_or(9, |n| n.0), p.device.display().to_string());
            let of = |disk: &DiskOptions| disk.disk.paths.iter().map(told).collect();
            disks.iter().map(of).collect()
        };
        let pair = ["--path", "node=0,dev=/a", "--path", "dev=/b,node=1"];
        let both = vec![(0, "/a".to_owned()), (1, "/b".to_owned())];
        assert_eq!(
            paths(&[&["--socket-path", "/s"][..], &pair].concat()),
            std::slice::from_ref(&both)
        );
        assert_eq!(
            paths(&[&["--disk", "socket=/s,serial=x"][..], &pair].concat()),
            [both]
        );
        let two = [
            "--disk",
            "socket=/s,serial=x",
            "--disk",
            "socket=/t,serial=y,path=/c",
        ];
        let of = |x: &str, y: &str| {
            let (x, y) = (
                format!("dev=/a,disk={x}"),
                format!("dev=/b,disk={y},name=n"),
            );
            let words = [&two[..], &["--path", &x, "--path", &y]].concat();
            parse(&words).all_disks()
        };
        let disks = of("x", "y").unwrap();
        assert_eq!(disks[1].disk.paths[1].name.as_deref(), Some("n"));
        assert!(of("y", "y").is_err() && of("x", "z").is_err());
        for words in [
            &["--path", "node=0,dev=/a"][..],
            &["--path", "/a", "--blk-file", "/b", "--socket-path", "/s"],
            &["--disk", "socket=/s,serial=x"],
        ] {
            assert!(parse(words).all_disks().is_err(), "{words:?}");
        }
        for path in [
            "dev=",
            "dev=/a,node=x",
            "dev=/a,dev=/b",
            "dev=/a,colour=blue",
        ] {
            assert!(path.parse::<PathOption>().is_err(), "{path}");
        }
    }

    #[test]
    fn how_requests_are_steered_is_said_once_for_all_disks() {
        let around =
            |words: &[&str]| parse(&[&["--print-capabilities"], words].concat()).surroundings();
        let usual = around(&[]);
        assert!(
            usual.steers
                && usual.tuning.split() == SPLIT
                && usual.tuning.patience().as_secs() == 30
        );
        let other = around(&["--steer", "off", "--split", "1M", "--path-wait", "2"]);
        assert!(
            !other.steers
                && other.tuning.split() == 1 << 20
                && other.tuning.patience().as_secs() == 2
        );
    }

    #[test]
    fn what_must_be_a_disks_own_is_given_once() {
        let twice = |one: &str, two: &str| parse(&["--disk", one, "--disk", two]).all_disks();
        assert!(twice("socket=/s,path=/f", "socket=/t,path=/g").is_ok());
        assert!(twice("socket=/s,path=/f", "socket=/s,path=/g").is_err());
        assert!(twice("fd=3,path=/f", "fd=3,path=/g").is_err());
        assert!(twice("socket=/s,path=/f,serial=a", "socket=/t,path=/g,serial=a").is_err());
    }

    #[test]
    fn the_file_of_the_documentation_says_what_it_is_said_to() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let page = std::fs::read_to_string(page.join("../../docs/configuration.md")).unwrap();
        let text = page.split("```").nth(1).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let words = ["farlane-blk".into(), "--config".into(), file.path().into()];
        let options: Options = farlane_daemon::config::parse_from(words.into()).unwrap();
        let disks = options.all_disks().unwrap();
        let [root, data] = &disks[..] else {
            panic!("{disks:?}");
        };
        assert_eq!(
            root.socket,
            SocketOption::Path("/run/farlane/vm0-root.sock".into())
        );
        assert!(!root.disk.read_only && data.disk.read_only);
        assert_eq!(data.disk.paths[0].device.to_str(), Some("/dev/nvme1n1"));
        let metrics: Vec<_> = options.daemon.metrics_paths().into_iter().collect();
        assert_eq!(metrics, [&PathBuf::from("/run/farlane/vm0.metrics")]);
    }
}
