//! The daemon: from command line and configuration file to the lender of the library
//! (`farlane-vfio-remote`). All files are opened here.

use crate::config::{
    Backing, BlockBytes, BridgeConfig, CacheMode, Config, DeviceConfig, DoorbellMode, NvmeOptions,
    ShowsConfig, SourceConfig, TlsFiles, WindowConfig,
};
use crate::options::Options;
use crate::{CAPABILITIES, machine, metrics, policy};
use anyhow::{Context as _, bail};
use farlane_daemon::access::Access;
use farlane_daemon::control::Stopper;
use farlane_daemon::listener::{Kind, Listener};
use farlane_daemon::metrics::Collect;
use farlane_daemon::options::{Capabilities, DaemonOptions, host_name};
use farlane_daemon::run::{Daemon, Drain};
use farlane_daemon::seccomp::{ALL_SOCKETS, NONBLOCKING, SystemCalls, With};
use farlane_gpu::{DEFAULT_MEMORY_BYTES, GpuSource};
use farlane_ntb::{IvshmemNtb, Ntb, OutboundWindow, PciNtb};
use farlane_nvme::{BlockSize, Cache, Doorbells, Host, NamespaceConfig, NvmeConfig, NvmeSource};
use farlane_pci::{BAR_COUNT, Region, Source};
use farlane_vfio::VfioSource;
use farlane_vfio_remote::lender::{BridgeOffer, ForeignBar, Lender, LenderConfig, Offer};
use farlane_vfio_remote::protocol::{Acceptor, Address, Connector, TlsIdentity};
use ring::digest::{SHA256, digest};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long a lease lasts that is not renewed, where nobody says otherwise.
const TERM: Duration = Duration::from_secs(3);
/// How long a holder has to give a revoked device back, where nobody says otherwise.
pub const GRACE: Duration = Duration::from_secs(5);
/// Longest serial number of an NVMe controller (NVMe 1.4, figure 247).
const SERIAL_BYTES: usize = 20;

/// `farlane-lend`.
pub struct LendDaemon {
    lender: Arc<Lender>,
    /// What accepts borrowers, and where; until it is started.
    acceptors: Vec<(Address, Acceptor)>,
    /// UNIX sockets among them.
    sockets: Vec<Listener>,
    /// Whether it connects to other lenders.
    connects: bool,
}

impl Daemon for LendDaemon {
    type Options = Options;

    const CAPABILITIES: Capabilities = CAPABILITIES;

    fn daemon_options(options: &Options) -> &DaemonOptions {
        &options.daemon
    }

    fn check(options: &Options) -> anyhow::Result<()> {
        configured(options)?;
        Ok(())
    }

    fn open(options: &Options) -> anyhow::Result<Self> {
        let config = configured(options)?;
        let addresses = config.listen.iter().map(|address| &address.0);
        let addresses: Vec<&Address> = addresses.chain(&options.listen).collect();
        let identity = match &config.tls {
            Some(tls) => {
                let TlsFiles {
                    certificate,
                    key,
                    authorities,
                } = tls;
                Some(TlsIdentity::load(certificate, key, authorities)?)
            }
            None => None,
        };
        let lender = Lender::new(lender_config(&config, options, identity.as_ref())?)?;
        if options.daemon.config.is_some() {
            lender.accept_policies(policy::fixed(&config));
        }
        let (mut acceptors, mut sockets) = (Vec::new(), Vec::new());
        for address in addresses {
            let access = &options.daemon.access;
            let opened = listen(address, identity.as_ref(), access, &mut sockets);
            acceptors.push(opened.with_context(|| format!("Cannot listen at {address}"))?);
        }
        Ok(Self {
            lender,
            acceptors,
            sockets,
            connects: config.windows.iter().any(|window| window.shows.is_some()),
        })
    }

    fn start(&mut self, _options: &Options, _stop: &Stopper) -> anyhow::Result<Collect> {
        for (address, acceptor) in std::mem::take(&mut self.acceptors) {
            let lender = Arc::clone(&self.lender);
            log::info!("Waiting for borrowers at {address}");
            let thread = std::thread::Builder::new().name("listener".to_owned());
            thread.spawn(move || lender.serve(&acceptor))?;
        }
        let lender = Arc::clone(&self.lender);
        Ok(Arc::new(move || metrics(&lender)))
    }

    fn system_calls(&self) -> SystemCalls {
        let calls = SystemCalls::any(&[
            farlane_block::SYSTEM_CALLS,
            farlane_ntb::SYSTEM_CALLS,
            farlane_vfio::SYSTEM_CALLS,
            if self.connects {
                &[libc::SYS_connect]
            } else {
                &[]
            },
        ])
        .with(&[
            NONBLOCKING,
            With::requests(farlane_vfio::IOCTLS),
            With::requests(farlane_nvme::IOCTLS),
        ]);
        match self.connects {
            true => calls.with(&[ALL_SOCKETS]),
            false => calls,
        }
    }

    /// Devices stop with the process.
    fn end(&mut self) -> Option<Drain> {
        self.sockets.clear();
        None
    }
}

/// The configuration file, which goes together with the options.
fn configured(options: &Options) -> anyhow::Result<Config> {
    let config = match &options.daemon.config {
        Some(path) => Config::load(path)?,
        None => Config::default(),
    };
    if config.listen.is_empty() && options.listen.is_empty() {
        bail!("Nobody can connect: give --listen, or listen in the configuration");
    }
    if config.devices.is_empty() && options.devices.is_empty() {
        bail!("Nothing to lend: give --device, or a device in the configuration");
    }
    Ok(config)
}

/// What is lent, and to whom.
fn lender_config(
    config: &Config,
    options: &Options,
    identity: Option<&TlsIdentity>,
) -> anyhow::Result<LenderConfig> {
    let name = options.name.clone().or_else(|| config.name.clone());
    let host = Host {
        machine: machine::id(Path::new("/")),
        lender: name.unwrap_or_else(host_name),
    };
    if host.machine.is_none() {
        log::info!("There is no machine ID: disks are told apart by names alone");
    }
    let mut offers = Vec::new();
    for device in config.devices.iter().chain(&options.devices) {
        offers.push(offer(device, &host).with_context(|| format!("Cannot lend {}", device.name))?);
    }
    let mut bridges = BTreeMap::new();
    for window in &config.windows {
        let bridge = bridge_offer(window, identity)
            .with_context(|| format!("Cannot use window {}", window.name))?;
        bridges.insert(window.name.clone(), bridge);
    }
    let users = config.users.iter();
    let users = users.map(|user| (user.uid, user.names.clone())).collect();
    let seconds = |seconds: u16| Duration::from_secs(seconds.into());
    Ok(LenderConfig {
        name: host.lender,
        offers,
        bridges,
        users,
        lenders: config.lenders.clone(),
        term: config.term_seconds.map_or(TERM, seconds),
        grace: config.grace_seconds.map_or(GRACE, seconds),
    })
}

fn offer(device: &DeviceConfig, host: &Host) -> anyhow::Result<Offer> {
    let source = source(device, host)?;
    log::info!("{}: {}", device.name, source.description().name);
    Ok(Offer {
        name: device.name.clone(),
        source,
        borrowers: device.borrowers.clone(),
    })
}

fn bridge_offer(
    window: &WindowConfig,
    identity: Option<&TlsIdentity>,
) -> anyhow::Result<BridgeOffer> {
    let shows = window.shows.as_ref();
    Ok(BridgeOffer {
        ntb: bridge(window)?,
        borrowers: window.borrowers.clone(),
        shows: shows
            .map(|shows| foreign_bar(shows, identity))
            .transpose()?,
    })
}

/// What accepts connections at an address, and the address as it is then: the system has chosen the
/// port where it was 0.
fn listen(
    address: &Address,
    identity: Option<&TlsIdentity>,
    access: &Access,
    sockets: &mut Vec<Listener>,
) -> anyhow::Result<(Address, Acceptor)> {
    Ok(match address {
        Address::Unix(path) => {
            let listener = Listener::bind(path, Kind::SeqPacket, access)?;
            let acceptor = Acceptor::Unix(listener.try_clone()?);
            sockets.push(listener);
            (address.clone(), acceptor)
        }
        Address::Loopback(place) => {
            let listener = TcpListener::bind(place)?;
            let place = listener.local_addr()?;
            (Address::Loopback(place), Acceptor::Tcp(listener, None))
        }
        Address::Tls { host, .. } => {
            let identity = identity.context("There is no [tls] in the configuration")?;
            let listener = TcpListener::bind(&address.resolve()?[..])?;
            let address = Address::Tls {
                host: host.clone(),
                port: listener.local_addr()?.port(),
            };
            (address, Acceptor::Tcp(listener, Some(identity.clone())))
        }
    })
}

fn source(device: &DeviceConfig, host: &Host) -> anyhow::Result<Box<dyn Source>> {
    Ok(match &device.source {
        SourceConfig::Nvme(options) => {
            Box::new(NvmeSource::open(nvme(&device.name, options, host))?)
        }
        SourceConfig::Gpu(options) => {
            let bytes = options.memory.map_or(DEFAULT_MEMORY_BYTES, |size| size.0);
            Box::new(GpuSource::new(bytes)?)
        }
        SourceConfig::Vfio(function) => {
            Box::new(VfioSource::open(function.function.0, Path::new("/sys"))?)
        }
    })
}

/// The serial number of a device that has been given none. Names too long for it have a digest of
/// the whole name at its end.
fn serial_of(name: &str) -> String {
    let serial = format!("farlane-{name}");
    if serial.len() <= SERIAL_BYTES {
        return serial;
    }
    let digest = digest(&SHA256, name.as_bytes());
    let digits = digest.as_ref().iter().take(4);
    let digits: String = digits.map(|byte| format!("{byte:02x}")).collect();
    let rest = SERIAL_BYTES - digits.len() - 1;
    let begin: String = serial.chars().take(rest).collect();
    format!("{begin}-{digits}")
}

fn nvme(name: &str, options: &NvmeOptions, host: &Host) -> NvmeConfig {
    let serial = options.serial.clone();
    let serial = serial.unwrap_or_else(|| serial_of(name));
    let block_size = match options.block {
        BlockBytes::B512 => BlockSize::B512,
        BlockBytes::B4096 => BlockSize::B4096,
    };
    let mut config = NvmeConfig::new(name, serial);
    config.host = host.clone();
    config.namespaces = options
        .namespaces
        .iter()
        .map(|backing| NamespaceConfig {
            backing: match backing {
                Backing::File(path) => farlane_nvme::Backing::File {
                    path: path.clone(),
                    read_only: options.read_only,
                },
                Backing::Null(size) => farlane_nvme::Backing::Null { bytes: size.0 },
            },
            block_size,
        })
        .collect();
    config.doorbells = match options.doorbells {
        DoorbellMode::Trapped => Doorbells::Trapped,
        DoorbellMode::Shared => Doorbells::Shared,
    };
    config.cache = match options.cache {
        CacheMode::Direct => Cache::Direct,
        CacheMode::Buffered => Cache::Buffered,
    };
    if let Some(queues) = options.queues {
        config.io_queues = queues;
    }
    config
}

fn bridge(window: &WindowConfig) -> anyhow::Result<Arc<dyn Ntb>> {
    Ok(match &window.bridge {
        BridgeConfig::Ivshmem { function } => IvshmemNtb::open_pci(function.0)?,
        BridgeConfig::Pci {
            function,
            bar,
            offset,
            size,
        } => {
            let outbound = OutboundWindow {
                function: function.0,
                bar: *bar,
                offset: *offset,
                size: size.0,
                write_combining: false,
            };
            PciNtb::open(Path::new("/sys"), &[], &[outbound])?
        }
    })
}

/// A device of another lender, which a window shows.
fn foreign_bar(shows: &ShowsConfig, identity: Option<&TlsIdentity>) -> anyhow::Result<ForeignBar> {
    let region = Region::from_index(shows.bar.into()).filter(|region| region.bar().is_some());
    Ok(ForeignBar {
        lender: shows.lender.clone(),
        connector: Connector::new(shows.address.0.clone(), identity.cloned())?,
        device: shows.device.clone(),
        region: region.with_context(|| format!("There are BARs 0 to {}", BAR_COUNT - 1))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_too_long_for_a_serial_number_have_different_ones() {
        assert_eq!(serial_of("nvme0"), "farlane-nvme0");
        assert_eq!(serial_of("twelve-chars"), "farlane-twelve-chars");
        let long = ["thirteen-char", "thirteen-chaR", "thirteen-chars"].map(serial_of);
        assert_eq!(long[0], "farlane-thi-3adc6cba");
        assert!(long[0] != long[1] && long[0] != long[2] && long[1] != long[2]);
        assert!(long.iter().all(|serial| serial.len() == SERIAL_BYTES));
    }
}
