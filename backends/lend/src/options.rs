//! The command line of the lender.

use crate::config::{Backing, DeviceConfig, GpuOptions, NvmeOptions, SourceConfig};
use farlane_daemon::keys::{Keys, KeysError, switch, value};
use farlane_daemon::options::{DaemonOptions, TlsOptions};
use farlane_vfio_remote::protocol::Address;
use std::path::PathBuf;
use std::str::FromStr;

/// Where `list`, `revoke` and `reload` look for a lender.
const DEFAULT_LENDER: &str = "unix:/run/farlane/lend.sock";

/// Lends PCIe devices of this host to virtual machines of others
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "farlane-lend", version, args_conflicts_with_subcommands = true)]
pub struct Options {
    /// Ask a running lender instead of lending
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Address at which borrowers connect: unix:PATH, tls:HOST:PORT, or tcp:127.0.0.1:PORT
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<Address>,

    /// A device that any borrower may take: nvme,file=PATH or nvme,null=SIZE (a software NVMe
    /// controller; each file or null is a namespace; serial=S, doorbells=trapped|shared,
    /// read-only=on, cache=direct|buffered, block=512|4096, queues=N), gpu,memory=SIZE (a software
    /// GPU) or vfio,function=0000:01:00.0 (a function of this host)
    #[arg(long = "device", value_name = "NAME=SOURCE[,KEY=VALUE]...")]
    pub devices: Vec<DeviceConfig>,

    /// Name of this lender [default: the host name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub daemon: DaemonOptions,
}

/// Requests to a running lender.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Command {
    /// Show a lender's devices, their holders, and how they reach memory
    List {
        #[command(flatten)]
        #[allow(missing_docs)]
        lender: LenderOptions,
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Take a device from its holder, after a request to return it
    Revoke {
        /// Name of the device
        device: String,
        #[command(flatten)]
        #[allow(missing_docs)]
        lender: LenderOptions,
    },
    /// Have a lender go by its configuration file as it is now: who may borrow what
    Reload {
        /// The file
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        #[command(flatten)]
        #[allow(missing_docs)]
        lender: LenderOptions,
    },
}

/// How a lender is reached, and as whom.
#[derive(Clone, Debug, clap::Args)]
pub struct LenderOptions {
    /// Address of the lender
    #[arg(long, value_name = "ADDRESS", default_value = DEFAULT_LENDER)]
    pub lender: Address,

    /// Name of this host; with TLS, a name in its certificate [default: the host name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub tls: TlsOptions,
}

impl FromStr for DeviceConfig {
    type Err = KeysError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = text.split_once('=');
        let (name, source) = value(text, "NAME=SOURCE[,KEY=VALUE]...", form)?;
        let (source, mut keys) = Keys::split_first(source);
        let source = match source.as_str() {
            "nvme" => SourceConfig::Nvme(nvme(&mut keys)?),
            "gpu" => SourceConfig::Gpu(GpuOptions {
                memory: keys.parse("memory", "a size such as 256M", from_str)?,
            }),
            "vfio" => {
                let function =
                    keys.parse("function", "a function such as 0000:01:00.0", from_str)?;
                SourceConfig::Vfio(function.ok_or(KeysError::Missing("function"))?)
            }
            other => return value(other, "a source: nvme, gpu, vfio", None),
        };
        keys.finish()?;
        Ok(Self {
            name: name.to_owned(),
            borrowers: Vec::new(),
            source,
        })
    }
}

fn from_str<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

fn nvme(keys: &mut Keys) -> Result<NvmeOptions, KeysError> {
    let mut namespaces = Vec::new();
    for (kind, given) in keys.take_all(&["file", "null"]) {
        namespaces.push(match kind {
            "file" => Backing::File(given.into()),
            _ => Backing::Null(value(&given, "a size such as 16G", from_str(&given))?),
        });
    }
    if namespaces.is_empty() {
        return Err(KeysError::Missing("file or null"));
    }
    let doorbells = keys.parse("doorbells", "trapped or shared", from_str)?;
    let cache = keys.parse("cache", "direct or buffered", from_str)?;
    let block = keys.parse("block", "512 or 4096", from_str)?;
    Ok(NvmeOptions {
        namespaces,
        serial: keys.take("serial"),
        doorbells: doorbells.unwrap_or_default(),
        cache: cache.unwrap_or_default(),
        block: block.unwrap_or_default(),
        queues: keys.parse("queues", "a number", from_str)?,
        read_only: keys
            .parse("read-only", "on or off", switch)?
            .unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{BlockBytes, DoorbellMode, Size};
    use clap::{CommandFactory as _, Parser as _};

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
    }

    #[test]
    fn devices_are_read() {
        let device: DeviceConfig =
            "nvme0=nvme,file=/a,null=1G,doorbells=shared,block=4096,read-only=on"
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
