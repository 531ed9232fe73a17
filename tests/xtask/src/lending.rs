//! Device Lending as scenarios use it: a lender with soft NVMe controllers over files in this
//! machine's memory, and soft GPUs; and borrowers, each of which gives one device to one VM.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::backend::Backend;
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::process::check_output;
use farlane_kit::progress;
use farlane_kit::scratch::Scratch;
use farlane_kit::workspace::Workspace;
use serde_json::Value;

use crate::conditions::{PATIENCE, wait_until};
use crate::metrics::Metrics;
use crate::run::Run;

/// The packages that make the daemons.
const PACKAGES: &[&str] = &["farlane-lend", "farlane-borrow"];

/// So many requests are more than a driver's own.
const BUSY_REQUESTS: u64 = 500;

/// The daemons, built from this checkout.
pub struct Lending {
    lend: PathBuf,
    borrow: PathBuf,
}

/// The blocks of a disk: a file in this machine's memory, gone with this value.
pub struct Blocks {
    _folder: Scratch,
    path: PathBuf,
}

/// A device to offer.
#[derive(Debug, Clone)]
pub struct Device {
    /// What `--device` says of it.
    option: String,
}

/// A soft NVMe controller to offer.
#[derive(Debug, Clone)]
pub struct Nvme {
    device: String,
}

/// A lender that runs.
pub struct Lender {
    program: PathBuf,
    backend: Backend,
    socket: PathBuf,
    metrics: PathBuf,
}

/// A borrower that runs, and gives one device to whatever VMM connects to its socket.
pub struct Borrower {
    backend: Backend,
    socket: PathBuf,
    metrics: PathBuf,
}

/// What a lender says of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Its name.
    pub device: String,
    /// Who has it.
    pub holder: Option<String>,
}

impl Lending {
    /// Builds everything.
    pub fn build(workspace: &Workspace) -> Result<Self> {
        progress::step("Building the lender and the borrower", || {
            workspace.build(PACKAGES)
        })?;
        Ok(Self {
            lend: workspace.built("farlane-lend")?,
            borrow: workspace.built("farlane-borrow")?,
        })
    }

    /// Starts a lender. Its name is that of its files.
    pub fn lender(
        &self,
        run: &Run<'_>,
        name: &str,
        devices: &[impl Clone + Into<Device>],
    ) -> Result<Lender> {
        self.lender_at(run, name, devices, &[])
    }

    /// Starts a lender that also listens at further addresses.
    pub fn lender_at(
        &self,
        run: &Run<'_>,
        name: &str,
        devices: &[impl Clone + Into<Device>],
        addresses: &[&str],
    ) -> Result<Lender> {
        let words = addresses.iter().map(|at| format!("--listen={at}"));
        self.lender_with(run, name, devices, &words.collect::<Vec<_>>())
    }

    /// Starts a lender of leases that last so long without a renewal. The default is 3 s.
    pub fn lender_of_term(
        &self,
        run: &Run<'_>,
        name: &str,
        devices: &[impl Clone + Into<Device>],
        term: Duration,
    ) -> Result<Lender> {
        let config = run.path(&format!("{name}.toml"));
        fs::write(&config, format!("term-seconds = {}\n", term.as_secs()))
            .with_context(|| format!("Cannot write {}", config.display()))?;
        let word = format!("--config={}", config.display());
        self.lender_with(run, name, devices, &[word])
    }

    fn lender_with(
        &self,
        run: &Run<'_>,
        name: &str,
        devices: &[impl Clone + Into<Device>],
        words: &[String],
    ) -> Result<Lender> {
        let (socket, metrics) = (run.path(name), run.path(&format!("{name}-metrics")));
        let mut command = Command::new(&self.lend);
        command
            .args(["--name", name])
            .arg("--metrics")
            .arg(&metrics);
        command.arg("--listen").arg(address(&socket));
        command.args(words);
        for device in devices {
            let Device { option } = device.clone().into();
            command.arg("--device").arg(option);
        }
        let log = run.logs().join(format!("{name}.log"));
        let backend = Backend::start("farlane-lend", command, &[&socket, &metrics], &log)?;
        Ok(Lender {
            program: self.lend.clone(),
            backend,
            socket,
            metrics,
        })
    }

    /// Starts a borrower of one device. Its name is that of its files, and what the lender calls
    /// it.
    pub fn borrower(
        &self,
        run: &Run<'_>,
        name: &str,
        lender: &Lender,
        device: &str,
    ) -> Result<Borrower> {
        self.borrower_at(run, name, &lender.address(), device, &[])
    }

    /// Starts a borrower of one device of the lender at `address`, with further words on its
    /// command line.
    pub fn borrower_at(
        &self,
        run: &Run<'_>,
        name: &str,
        address: &str,
        device: &str,
        words: &[String],
    ) -> Result<Borrower> {
        let (socket, metrics) = (run.path(name), run.path(&format!("{name}-metrics")));
        let mut command = Command::new(&self.borrow);
        command.arg("--socket-path").arg(&socket);
        command.args(["--lender", address, "--device", device, "--name", name]);
        command.arg("--metrics").arg(&metrics).args(words);
        let log = run.logs().join(format!("{name}.log"));
        let backend = Backend::start("farlane-borrow", command, &[&socket, &metrics], &log)?;
        Ok(Borrower {
            backend,
            socket,
            metrics,
        })
    }

    /// The lender's program, also its administrator's.
    pub fn lend(&self) -> &Path {
        &self.lend
    }

    /// The borrower's program.
    pub fn borrow(&self) -> &Path {
        &self.borrow
    }
}

impl Blocks {
    /// A disk of zeros.
    pub fn new(size_mib: u32) -> Result<Self> {
        let folder = Scratch::in_memory()?;
        let path = folder.sparse("blocks", u64::from(size_mib) << 20)?;
        Ok(Self {
            _folder: folder,
            path,
        })
    }

    /// A disk of random bytes: no block of it is a hole of the file.
    pub fn random(size_mib: u32) -> Result<Self> {
        let blocks = Self::new(size_mib)?;
        let mut part = vec![0; 1 << 20];
        File::open("/dev/urandom")?.read_exact(&mut part)?;
        let mut file = File::options().write(true).open(&blocks.path)?;
        for _ in 0..size_mib {
            file.write_all(&part)?;
        }
        Ok(blocks)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Nvme {
    /// A controller with one namespace. Its name is also its serial number.
    pub fn new(name: &str, blocks: &Blocks) -> Self {
        let file = blocks.path.display();
        Self {
            device: format!("{name}=nvme,file={file},serial={name}"),
        }
    }

    /// Offers its doorbells as memory that the guest writes, instead of trapping each access.
    pub fn shared_doorbells(mut self) -> Self {
        self.device += ",doorbells=shared";
        self
    }
}

impl From<Nvme> for Device {
    fn from(nvme: Nvme) -> Self {
        Self {
            option: nvme.device,
        }
    }
}

impl Device {
    /// A soft GPU with so much video memory, a power of two.
    pub fn gpu(name: &str, memory_mib: u32) -> Self {
        Self {
            option: format!("{name}=gpu,memory={memory_mib}M"),
        }
    }
}

/// The programs that use a soft GPU, `gpu_io`, `gpu_coherence` and `log_scan`, for a guest: they
/// are found by their names there.
pub fn gpu_programs(workspace: &Workspace) -> Result<Vec<GuestFile>> {
    let build = |name: &str| {
        let path = workspace.build_example("farlane-gpu-driver", name)?;
        anyhow::Ok(GuestFile::new(path, format!("usr/bin/{name}")))
    };
    progress::step("Building what uses a GPU", || {
        Ok(vec![
            build("gpu_io")?,
            build("gpu_coherence")?,
            build("log_scan")?,
        ])
    })
}

impl Lender {
    /// How borrowers and administrators name it.
    pub fn address(&self) -> String {
        address(&self.socket)
    }

    /// How borrowers name it that reach it by TCP, as it says itself: the system has chosen the
    /// port.
    pub fn network_address(&self) -> Result<String> {
        let mut found = None;
        wait_until("the lender tells its TCP address", || {
            found = tcp_address(&self.backend.log());
            Ok(found.is_some())
        })?;
        found.context("An address was found and is not there")
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// What `farlane-lend list` says.
    pub fn list(&self) -> Result<Vec<Offer>> {
        let text = self.ask(&["list", "--lender", &self.address(), "--json"])?;
        parse_list(&text).with_context(|| format!("`farlane-lend list --json` said:\n{text}"))
    }

    /// Who has a device, as `farlane-lend list` says.
    pub fn holder(&self, device: &str) -> Result<Option<String>> {
        let offers = self.list()?;
        let offer = offers.into_iter().find(|offer| offer.device == device);
        Ok(offer
            .with_context(|| format!("There is no device {device}"))?
            .holder)
    }

    /// Waits until a device is held by this borrower.
    pub fn wait_held(&self, device: &str, by: &str) -> Result<()> {
        let held = || Ok(self.holder(device)?.as_deref() == Some(by));
        wait_until(&format!("{by} holds {device}"), held)
    }

    /// Waits until a device is on offer again.
    pub fn wait_offered(&self, device: &str) -> Result<()> {
        wait_until(&format!("{device} is on offer"), || {
            Ok(self.holder(device)?.is_none())
        })
    }

    /// Its counters.
    pub fn metrics(&self) -> Result<Metrics> {
        Metrics::read(&self.metrics, "farlane_lend_")
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.backend.pid()
    }

    /// What `farlane-lend list` prints for people.
    pub fn table(&self) -> Result<String> {
        self.ask(&["list", "--lender", &self.address()])
    }

    /// `farlane-lend revoke`.
    pub fn revoke(&self, device: &str) -> Result<()> {
        self.ask(&["revoke", device, "--lender", &self.address()])?;
        Ok(())
    }

    /// Ends it with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.backend.kill()
    }

    /// Ends it as its administrator does.
    pub fn stop(self) -> Result<()> {
        self.backend.stop()
    }

    fn ask(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.program);
        command.args(words);
        check_output(&format!("farlane-lend {}", words[0]), command, PATIENCE)
    }
}

impl Borrower {
    /// Where a VMM connects.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its counters.
    pub fn metrics(&self) -> Result<Metrics> {
        Metrics::read(&self.metrics, "farlane_borrow_")
    }

    /// How many accesses of its VM to the device's registers it was asked to perform: each of them
    /// stopped the VM.
    pub fn trapped(&self) -> Result<u64> {
        let metrics = self.metrics()?;
        Ok(metrics.sum("reads")? + metrics.sum("writes")?)
    }

    /// Ends it with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.backend.kill()
    }

    /// Ends it as its administrator does.
    pub fn stop(self) -> Result<()> {
        self.backend.stop()
    }
}

/// Waits until a guest has the namespace of the controller with this serial number; returns its
/// device node.
pub fn namespace(guest: &Guest, serial: &str) -> Result<String> {
    let mut found = None;
    wait_until(&format!("the disk {serial} is there"), || {
        found = find_namespace(guest, serial)?;
        Ok(found.is_some())
    })
    .map_err(|error| error.context(format!("In guest {}", guest.name())))?;
    found.context("A disk was found and is not there")
}

/// Waits until a guest has no controller with this serial number.
pub fn wait_gone(guest: &Guest, serial: &str) -> Result<()> {
    wait_until(&format!("the disk {serial} is gone"), || {
        Ok(find_namespace(guest, serial)?.is_none())
    })
}

/// Waits until a disk of a guest is in use: many requests have been completed since this was
/// called.
pub fn wait_traffic(guest: &Guest, node: &str) -> Result<()> {
    let name = node.trim_start_matches("/dev/");
    let completed = || completed(&guest.read_file(&format!("/sys/class/block/{name}/stat"))?);
    let begin = completed()?;
    wait_until(&format!("{node} is in use"), || {
        Ok(completed()? >= begin + BUSY_REQUESTS)
    })
}

/// The completed requests in a disk's `stat`: reads come first, writes fifth.
fn completed(stat: &str) -> Result<u64> {
    let fields: Vec<&str> = stat.split_whitespace().collect();
    let [reads, _, _, _, writes, ..] = fields[..] else {
        bail!("A disk's statistics are {stat:?}");
    };
    Ok(reads.parse::<u64>()? + writes.parse::<u64>()?)
}

/// The device node of the first namespace of the controller with this serial number.
pub fn find_namespace(guest: &Guest, serial: &str) -> Result<Option<String>> {
    let line = format!(
        "for c in /sys/class/nvme/nvme*; do [ \"$(echo $(cat $c/serial))\" = {serial} ] || \
         continue; \
         for d in /dev/${{c##*/}}n1; do [ -b $d ] && echo $d; done; done 2>/dev/null; true"
    );
    let nodes = guest.run(&line)?;
    let mut nodes = nodes.lines();
    let node = nodes.next().map(str::to_owned);
    ensure!(nodes.next().is_none(), "There are two disks {serial}");
    Ok(node)
}

fn address(socket: &Path) -> String {
    format!("unix:{}", socket.display())
}

/// The TCP address at which a lender says that it waits.
fn tcp_address(log: &str) -> Option<String> {
    // The rest of a line may not be written yet.
    let whole = &log[..=log.rfind('\n')?];
    let mut said = whole.lines().filter_map(|line| line.split_once(" at tcp:"));
    said.next().map(|(_, place)| format!("tcp:{place}"))
}

fn parse_list(text: &str) -> Result<Vec<Offer>> {
    let list: Value = serde_json::from_str(text).context("That is no JSON")?;
    let Some(devices) = list.as_array() else {
        bail!("That is no list");
    };
    let offer = |device: &Value| {
        let name = device["name"].as_str().context("A device has no name")?;
        let holder = match &device["holder"] {
            Value::Null => None,
            holder => Some(
                holder["name"]
                    .as_str()
                    .context("A holder has no name")?
                    .to_owned(),
            ),
        };
        anyhow::Ok(Offer {
            device: name.to_owned(),
            holder,
        })
    };
    devices.iter().map(offer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_taken_from_a_whole_line() {
        let log = "[INFO] Waiting for borrowers at unix:/x\n[INFO] Waiting for borrowers at \
                   tcp:127.0.0.1:40";
        assert_eq!(tcp_address(log), None);
        let address = tcp_address(&format!("{log}123\n")).unwrap();
        assert_eq!(address, "tcp:127.0.0.1:40123");
    }

    #[test]
    fn a_list_tells_devices_and_holders() {
        let text = r#"[{"name": "a", "about": "NVMe", "holder": null},
            {"name": "b", "holder": {"name": "host", "fence": 7}}]"#;
        let offers = parse_list(text).unwrap();
        assert_eq!(offers[0].holder, None);
        assert_eq!(offers[1].device, "b");
        assert_eq!(offers[1].holder.as_deref(), Some("host"));
        assert!(parse_list(r#"[{"holder": null}]"#).is_err());
    }
}
