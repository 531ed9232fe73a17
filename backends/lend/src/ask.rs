//! The commands `list`, `revoke` and `reload`, which ask a running lender.

use crate::config::Config;
use crate::options::{Command, LenderOptions};
use crate::policy::{fixed, policy};
use anyhow::Context as _;
use farlane_daemon::options::host_name;
use farlane_daemon::terminal;
use farlane_vfio_remote::borrower;
use farlane_vfio_remote::protocol::message::{DeviceStatus, PeerName, PeerStatus};
use farlane_vfio_remote::protocol::{Connector, TlsIdentity};
use std::path::Path;

fn connector(options: &LenderOptions) -> anyhow::Result<(Connector, String)> {
    let identity = match options.tls.files() {
        Some((certificate, key, authorities)) => {
            Some(TlsIdentity::load(certificate, key, authorities)?)
        }
        None => None,
    };
    let connector = Connector::new(options.lender.clone(), identity)?;
    let name = options.name.clone().unwrap_or_else(host_name);
    Ok((connector, name))
}

/// Has a lender do it: for `farlane-lend` and `farlane lend`.
///
/// # Errors
/// The lender cannot be asked, or refuses, or nothing can be printed.
pub fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::List { lender, json } => list(lender, *json),
        Command::Revoke { device, lender } => revoke(lender, device),
        Command::Reload { config, lender } => reload(lender, config),
    }
}

/// Prints what a lender offers.
fn list(options: &LenderOptions, json: bool) -> anyhow::Result<()> {
    let (connector, name) = connector(options)?;
    let devices = borrower::list(&connector, &name)?;
    let text = if json {
        serde_json::to_string_pretty(&devices)? + "\n"
    } else {
        table(&devices)
    };
    terminal::print(&text).context("Cannot print")
}

/// Takes a device from its holder.
fn revoke(options: &LenderOptions, device: &str) -> anyhow::Result<()> {
    let (connector, name) = connector(options)?;
    borrower::revoke(&connector, &name, device)?;
    Ok(())
}

/// Has a lender go by its configuration file as it is now.
fn reload(options: &LenderOptions, file: &Path) -> anyhow::Result<()> {
    let config = Config::load(file)?;
    let (connector, name) = connector(options)?;
    borrower::reload(&connector, &name, policy(&config), fixed(&config))?;
    Ok(())
}

/// Another device that a device reaches, by which way, and over how many bridges.
fn peer(status: &PeerStatus) -> String {
    let PeerName { lender, device } = &status.peer;
    let size = match status.bytes >> 20 {
        0 => format!("{} KiB", status.bytes >> 10),
        mib => format!("{mib} MiB"),
    };
    let hops = match status.hops {
        Some(1) => ", 1 hop".to_owned(),
        Some(hops) => format!(", {hops} hops"),
        None => String::new(),
    };
    format!("{lender}/{device} {size} ({}{hops})", status.way)
}

/// One line a device.
fn table(devices: &[DeviceStatus]) -> String {
    let mut rows = vec![[
        "DEVICE".to_owned(),
        "HOLDER".to_owned(),
        "LEASE".to_owned(),
        "HELD".to_owned(),
        "MEMORY".to_owned(),
        "HOPS".to_owned(),
        "PEERS".to_owned(),
        "WHAT IT IS".to_owned(),
    ]];
    for device in devices {
        let none = || "-".to_owned();
        let holder = device.holder.as_ref();
        rows.push([
            device.name.clone(),
            match (&device.quarantine, holder) {
                (Some(_), _) => "(quarantined)".to_owned(),
                (None, holder) => holder.map_or_else(none, |h| h.name.clone()),
            },
            holder.map_or_else(none, |h| format!("{:x}", h.fence)),
            holder.map_or_else(none, |h| format!("{} s", h.held_seconds)),
            holder.map_or_else(none, |h| {
                let mut ways: Vec<&str> = h.mappings.iter().map(|m| m.way.as_str()).collect();
                ways.sort_unstable();
                ways.dedup();
                format!("{} MiB ({})", h.mapped_bytes >> 20, ways.join(", "))
            }),
            holder
                .and_then(|h| h.hops)
                .map_or_else(none, |hops| hops.to_string()),
            holder
                .map(|h| h.peers.iter().map(peer).collect::<Vec<_>>().join(", "))
                .filter(|peers| !peers.is_empty())
                .unwrap_or_else(none),
            device.about.clone(),
        ]);
    }
    terminal::table(&rows, &[])
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_vfio_remote::protocol::message::{Holder, MappingStatus};

    #[test]
    fn a_table_has_a_line_for_each_device() {
        let device = |name: &str, holder| DeviceStatus {
            name: name.to_owned(),
            about: "NVMe controller".to_owned(),
            holder,
            attached: 1,
            borrowers: Vec::new(),
            quarantine: None,
        };
        let holder = Holder {
            name: "rack2".to_owned(),
            fence: 0x1f,
            held_seconds: 12,
            mappings: vec![MappingStatus {
                address: 0,
                length: 1 << 30,
                writable: true,
                way: "shm 0".to_owned(),
            }],
            mapping_count: 1,
            mapped_bytes: 1 << 30,
            hops: Some(0),
            peers: vec![PeerStatus {
                peer: PeerName {
                    lender: "rack1".to_owned(),
                    device: "gpu0".to_owned(),
                },
                bytes: 1 << 26,
                way: "same lender".to_owned(),
                hops: Some(0),
            }],
        };
        let broken = DeviceStatus {
            quarantine: Some("0x1000 bytes at 0x0 cannot be unmapped".to_owned()),
            ..device("b", None)
        };
        let text = table(&[device("a", Some(holder)), broken, device("nvme0", None)]);
        assert_eq!(
            text,
            concat!(
                "DEVICE  HOLDER         LEASE  HELD  MEMORY            HOPS  ",
                "PEERS                                    WHAT IT IS\n",
                "a       rack2          1f     12 s  1024 MiB (shm 0)  0     ",
                "rack1/gpu0 64 MiB (same lender, 0 hops)  NVMe controller\n",
                "b       (quarantined)  -      -     -                 -     ",
                "-                                        NVMe controller\n",
                "nvme0   -              -      -     -                 -     ",
                "-                                        NVMe controller\n",
            )
        );
    }
}
