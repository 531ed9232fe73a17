//! The command line.

use crate::config::{Backing, DeviceConfig, Function, GpuOptions, NvmeOptions, Size, SourceConfig};
use farlane_daemon::options::{DaemonOptions, TlsOptions};
use farlane_vfio_remote::link::Address;
use std::path::PathBuf;
use std::str::FromStr;
use thiserror::Error;

/// Where `list` and `revoke` look for a lender.
const DEFAULT_LENDER: &str = "unix:/run/farlane/lend.sock";

/// Lends PCIe devices of this host to virtual machines of others
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "farlane-lend", version, args_conflicts_with_subcommands = true)]
pub struct Options {
    /// Something else than lending
    #[command(subcommand)]
    pub command: Option<Command>,

    /// A file that says what is lent, and to whom
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Where borrowers connect: unix:PATH, tls:HOST:PORT, or tcp:127.0.0.1:PORT
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<Address>,

    /// A device for everybody who can connect: nvme,file=PATH or nvme,null=SIZE (a software NVMe
    /// controller; each file or null is a namespace; serial=S, doorbells=trapped|shared, readonly,
    /// cache=direct|buffered, block=512|4096, queues=N), gpu,memory=SIZE (a software GPU) or
    /// vfio,function=0000:01:00.0 (a function of this host)
    #[arg(long = "device", value_name = "NAME=SOURCE[,KEY=VALUE]...")]
    pub devices: Vec<DeviceConfig>,

    /// What this host calls itself
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub daemon: DaemonOptions,
}

/// What else can be done.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Command {
    /// Show what a lender offers, who holds it, and how the devices reach memory
    List {
        #[command(flatten)]
        #[allow(missing_docs)]
        lender: LenderOptions,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Take a device from its holder, who is asked first
    Revoke {
        /// Name of the device
        device: String,
        #[command(flatten)]
        #[allow(missing_docs)]
        lender: LenderOptions,
    },
}

/// How a lender is reached.
#[derive(Clone, Debug, clap::Args)]
pub struct LenderOptions {
    /// Where the lender listens
    #[arg(long, value_name = "ADDRESS", default_value = DEFAULT_LENDER)]
    pub lender: Address,

    /// What this host calls itself: with TLS, a name of its certificate
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub tls: TlsOptions,
}

/// Why the description of a device cannot be followed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DeviceError {
    /// There is no name, or no source.
    #[error("{0:?} is not NAME=SOURCE[,KEY=VALUE]...")]
    Form(String),
    /// No such source.
    #[error("{0:?} is not a source: nvme, gpu, vfio")]
    Source(String),
    /// No such key for the source, or given twice.
    #[error("{0:?} is not known for this source, or given twice")]
    Unknown(String),
    /// A key is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A value that is none.
    #[error("{value:?} is not {wanted}")]
    Value {
        /// What was given.
        value: String,
        /// What it should be.
        wanted: &'static str,
    },
}

impl FromStr for DeviceConfig {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || DeviceError::Form(text.to_owned());
        let (name, rest) = text.split_once('=').ok_or_else(form)?;
        let mut words = rest.split(',');
        let source = match words.next().ok_or_else(form)? {
            "nvme" => SourceConfig::Nvme(nvme(words)?),
            "gpu" => SourceConfig::Gpu(gpu(words)?),
            "vfio" => SourceConfig::Vfio(vfio(words)?),
            other => return Err(DeviceError::Source(other.to_owned())),
        };
        Ok(Self {
            name: name.to_owned(),
            borrowers: Vec::new(),
            source,
        })
    }
}

fn parse<T: FromStr>(value: &str, wanted: &'static str) -> Result<T, DeviceError> {
    value.parse().map_err(|_| DeviceError::Value {
        value: value.to_owned(),
        wanted,
    })
}

fn nvme<'a>(words: impl Iterator<Item = &'a str>) -> Result<NvmeOptions, DeviceError> {
    let mut options = NvmeOptions::default();
    let mut seen = Vec::new();
    for word in words {
        let unknown = || DeviceError::Unknown(word.to_owned());
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        match key {
            "file" => options.namespaces.push(Backing::File(value.into())),
            "null" => {
                let size: Size = parse(value, "a size such as 16G")?;
                options.namespaces.push(Backing::Null(size));
            }
            _ if seen.contains(&key) => return Err(unknown()),
            "serial" => options.serial = Some(value.to_owned()),
            "doorbells" => options.doorbells = parse(value, "trapped or shared")?,
            "cache" => options.cache = parse(value, "direct or buffered")?,
            "block" => options.block = parse(value, "512 or 4096")?,
            "queues" => options.queues = Some(parse(value, "a number")?),
            "readonly" if value.is_empty() => options.read_only = true,
            _ => return Err(unknown()),
        }
        seen.push(key);
    }
    if options.namespaces.is_empty() {
        return Err(DeviceError::Missing("file or null"));
    }
    Ok(options)
}

fn gpu<'a>(words: impl Iterator<Item = &'a str>) -> Result<GpuOptions, DeviceError> {
    let mut options = GpuOptions::default();
    for word in words {
        match word.split_once('=') {
            Some(("memory", value)) if options.memory.is_none() => {
                options.memory = Some(parse(value, "a size such as 256M")?);
            }
            _ => return Err(DeviceError::Unknown(word.to_owned())),
        }
    }
    Ok(options)
}

fn vfio<'a>(words: impl Iterator<Item = &'a str>) -> Result<Function, DeviceError> {
    let mut function = None;
    for word in words {
        match word.split_once('=') {
            Some(("function", value)) if function.is_none() => {
                function = Some(parse(value, "a function such as 0000:01:00.0")?);
            }
            _ => return Err(DeviceError::Unknown(word.to_owned())),
        }
    }
    function.ok_or(DeviceError::Missing("function"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{BlockBytes, DoorbellMode};
    use clap::{CommandFactory as _, Parser as _};

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
    }

    #[test]
    fn devices_are_read() {
        let device: DeviceConfig =
            "nvme0=nvme,file=/a,null=1G,doorbells=shared,block=4096,readonly"
                .parse()
                .unwrap();
        assert_eq!(device.name, "nvme0");
        let SourceConfig::Nvme(nvme) = device.source else {
            panic!("not an NVMe controller");
        };
        assert_eq!(
            nvme.namespaces,
            [Backing::File("/a".into()), Backing::Null(Size(1 << 30))]
        );
        assert!(nvme.read_only);
        assert_eq!(nvme.doorbells, DoorbellMode::Shared);
        assert_eq!(nvme.block, BlockBytes::B4096);
        let device: DeviceConfig = "gpu0=gpu,memory=64M".parse().unwrap();
        let SourceConfig::Gpu(gpu) = device.source else {
            panic!("not a GPU");
        };
        assert_eq!(gpu.memory, Some(Size(64 << 20)));
        let device: DeviceConfig = "gpu=vfio,function=0000:01:00.0".parse().unwrap();
        assert!(matches!(device.source, SourceConfig::Vfio(_)));
    }

    #[test]
    fn absurd_devices_are_refused() {
        for text in [
            "",
            "nvme0",
            "nvme0=floppy",
            "nvme0=nvme",
            "nvme0=nvme,file=/a,serial=1,serial=2",
            "nvme0=nvme,null=many",
            "nvme0=nvme,file=/a,function=1",
            "gpu0=gpu,memory=1G,memory=1G",
            "gpu0=gpu,memory",
            "d=vfio",
            "d=vfio,function=../../etc",
        ] {
            assert!(text.parse::<DeviceConfig>().is_err(), "{text}");
        }
    }

    #[test]
    fn lending_and_asking_do_not_mix() {
        assert!(Options::try_parse_from(["farlane-lend", "--listen", "unix:/a", "list"]).is_err());
        let options =
            Options::try_parse_from(["farlane-lend", "revoke", "nvme0", "--lender", "unix:/a"])
                .unwrap();
        assert!(matches!(options.command, Some(Command::Revoke { .. })));
        assert!(
            Options::try_parse_from(["farlane-lend", "list", "--tls-cert", "/a"]).is_err(),
            "a certificate without its key"
        );
    }
}
