//! The lender: a machine with a kernel of its own, an IOMMU, an NVMe, and a window onto the memory
//! of another machine.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::attachments::Ram;
use farlane_kit::guest::{Guest, Job};
use farlane_kit::guest_root::GuestFile;
use farlane_kit::qemu::VmConfig;
use farlane_kit::scratch::Scratch;
use serde_json::Value;

use super::certificates::Authority;
use crate::conditions::{PATIENCE, wait_until, wait_within};
use crate::lending::Blocks;
use crate::metrics::Metrics;
use crate::run::Run;

/// The device: its name at the lender, and its serial number.
pub const DISK: &str = "disk";

/// The borrower: its name, its VM's memory.
pub const BORROWER: &str = "b";
pub const MEMORY_MIB: u32 = 512;

/// The lender's port.
pub const PORT: u16 = 7411;

/// Vendor and device of QEMU's NVMe, and of `ivshmem-plain`.
const NVME: &str = "1b36:0010";
const IVSHMEM: &str = "1af4:1110";

// Where things are in the lender's file system.
const PROGRAM: &str = "/usr/bin/farlane-lend";
const SCRAPE: &str = "/usr/bin/scrape";
const CONFIG: &str = "/etc/lend.toml";
const SOCKET: &str = "/run/lend";
const METRICS: &str = "/run/lend-metrics";

/// How long the lender may take to serve.
const START: Duration = Duration::from_secs(60);

/// What both machines are made of: the lender's with its NVMe and a window onto the memory of the
/// borrower's VM, and an authority that both trust.
pub struct Setting {
    blocks: Blocks,
    _memory: Scratch,
    /// The memory of the borrower's VM. The VM, the lender's machine and the borrower map it,
    /// whoever is first.
    pub ram: PathBuf,
    /// Who says who is who.
    pub authority: Authority,
}

/// A range of guest-physical addresses: first, and the one behind the last.
pub type Range = (u64, u64);

/// What the lender says of who has its device.
pub struct Holding {
    /// Who.
    pub holder: String,
    /// Bridges between the device and its holder's memory.
    pub hops: Option<u64>,
    /// What the device reaches, in order, and by which way.
    pub mappings: Vec<(Range, String)>,
}

/// A lender that runs.
pub struct Lender<'a> {
    guest: &'a Guest,
    job: Job<'a>,
}

impl Setting {
    /// Of an NVMe with these blocks.
    pub fn new(run: &Run<'_>, blocks: Blocks) -> Result<Self> {
        let memory = Scratch::in_memory()?;
        let ram = memory.sparse("ram", u64::from(MEMORY_MIB) << 20)?;
        Ok(Self {
            blocks,
            _memory: memory,
            ram,
            authority: Authority::new(&run.path("authority"))?,
        })
    }

    /// The lender's machine, which has its program but does not run it yet.
    pub fn lender(&self, run: &Run<'_>) -> Result<VmConfig<'static>> {
        let identity = self.authority.identity("127.0.0.1")?;
        let files = [
            GuestFile::new(run.context.lending()?.lend(), PROGRAM),
            GuestFile::new(run.guest_program("scrape")?, SCRAPE),
            GuestFile::new(&identity.certificate, "/etc/tls/host.pem"),
            GuestFile::new(&identity.key, "/etc/tls/host.key"),
            GuestFile::new(&identity.authorities, "/etc/tls/ca.pem"),
        ];
        Ok(VmConfig::new("lender")
            .nvme(DISK, self.blocks.path())
            .window("ram", &self.ram, MEMORY_MIB)
            .iommu()
            .forward(PORT)
            .files(files))
    }

    /// The borrower's VM, into which the disk can be plugged.
    pub fn vm(&self) -> VmConfig<'static> {
        let mut config = VmConfig::new(BORROWER)
            .storage()
            .ram(Ram::File(self.ram.clone()))
            .vfio_user_port(DISK);
        config.memory_mib = MEMORY_MIB;
        config
    }

    /// The borrower's options: its window and who it is.
    pub fn borrower_words(&self) -> Result<Vec<String>> {
        let window = ["--window".to_owned(), format!("ram={}", self.ram.display())];
        let identity = self.authority.identity(BORROWER)?;
        Ok(window.into_iter().chain(identity.words()).collect())
    }
}

/// The only function of a kind.
fn function(guest: &Guest, kind: &str) -> Result<String> {
    let text = guest.run(&format!("lspci -D -n -d {kind}"))?;
    let mut functions = text.lines().filter_map(|line| line.split(' ').next());
    match (functions.next(), functions.next()) {
        (Some(function), None) => Ok(function.to_owned()),
        _ => bail!("Not one function {kind} but:\n{text}"),
    }
}

impl<'a> Lender<'a> {
    /// Gives the NVMe to vfio-pci, and lends it to the borrower alone, for so many seconds without
    /// a renewal.
    pub fn start(guest: &'a Guest, term: Option<u16>) -> Result<Self> {
        let (nvme, window) = (function(guest, NVME)?, function(guest, IVSHMEM)?);
        let folder = format!("/sys/bus/pci/devices/{nvme}");
        guest.run(&format!(
            "modprobe vfio-pci && modprobe vfio_iommu_type1 && echo vfio-pci \
             >{folder}/driver_override && \
             echo {nvme} >/sys/bus/pci/drivers_probe && test -e \
             /sys/bus/pci/drivers/vfio-pci/{nvme}"
        ))?;
        let term = term.map(|term| format!("term-seconds = {term}"));
        let term = term.unwrap_or_default();
        let config = format!(
            r#"
            name = "lender"
            {term}
            listen = ["unix:{SOCKET}", "tls:0.0.0.0:{PORT}"]

            [tls]
            certificate = "/etc/tls/host.pem"
            key = "/etc/tls/host.key"
            authorities = "/etc/tls/ca.pem"

            [[device]]
            name = "{DISK}"
            source = "vfio"
            function = "{nvme}"
            borrowers = ["{BORROWER}"]

            [[window]]
            name = "ram"
            borrowers = ["{BORROWER}"]
            ntb = "ivshmem"
            function = "{window}"
            "#
        );
        guest.write_file(CONFIG, 0o600, config.as_bytes())?;
        let job = guest.spawn(&format!(
            "RUST_LOG=info {PROGRAM} --config {CONFIG} --metrics {METRICS} 2>&1"
        ))?;
        job.wait_output(START, |said| said.contains("Ready"))?;
        guest.wait_listening(PORT, START)?;
        Ok(Self { guest, job })
    }

    /// How borrowers on this machine name it.
    pub fn address(&self) -> Result<String> {
        Ok(format!("tls:{}", self.guest.forwarded(PORT)?))
    }

    /// Who has the device now.
    pub fn holding(&self, device: &str) -> Result<Option<Holding>> {
        let text = self.guest.run(&format!(
            "{PROGRAM} list --json --name lender --lender unix:{SOCKET}"
        ))?;
        parse(&text, device).with_context(|| format!("`farlane-lend list --json` said:\n{text}"))
    }

    /// Waits until nobody has the device.
    pub fn wait_offered(&self, device: &str) -> Result<()> {
        wait_until(&format!("{device} is on offer"), || {
            Ok(self.holding(device)?.is_none())
        })
    }

    /// The same, of a device whose lease has so long to last.
    pub fn wait_offered_within(&self, device: &str, term: Duration) -> Result<()> {
        wait_within(&format!("{device} is on offer"), term + PATIENCE, || {
            Ok(self.holding(device)?.is_none())
        })
    }

    /// What the device counts.
    pub fn metrics(&self) -> Result<Metrics> {
        let text = self.guest.run(&format!("{SCRAPE} {METRICS}"))?;
        Ok(Metrics::parse(&text, "farlane_lend_device_"))
    }

    /// Ends it with SIGKILL.
    pub fn kill(self) -> Result<()> {
        self.guest.run("kill -KILL $(pidof farlane-lend)")?;
        let output = self.job.wait(START)?;
        ensure!(!output.success(), "A lender that was killed ended well");
        Ok(())
    }

    /// Ends it as its administrator does. Returns what it has said.
    pub fn stop(self) -> Result<String> {
        self.guest.run("kill $(pidof farlane-lend)")?;
        let output = self.job.wait(START)?;
        output.check("The lender")?;
        Ok(output.all())
    }
}

fn parse(text: &str, device: &str) -> Result<Option<Holding>> {
    let list: Value = serde_json::from_str(text).context("That is no JSON")?;
    let devices = list.as_array().context("That is no list")?;
    let device = devices
        .iter()
        .find(|d| d["name"] == device)
        .with_context(|| format!("There is no device {device}"))?;
    let holder = &device["holder"];
    if holder.is_null() {
        return Ok(None);
    }
    let mapping = |mapping: &Value| {
        let number = |name: &str| mapping[name].as_u64().context("A mapping is no range");
        let start = number("address")?;
        let way = mapping["way"].as_str().context("A mapping has no way")?;
        anyhow::Ok(((start, start + number("length")?), way.to_owned()))
    };
    let mappings = holder["mappings"].as_array().context("No mappings")?;
    let mut mappings: Vec<_> = mappings.iter().map(mapping).collect::<Result<_>>()?;
    mappings.sort();
    Ok(Some(Holding {
        holder: holder["name"].as_str().context("No name")?.to_owned(),
        hops: holder["hops"].as_u64(),
        mappings,
    }))
}

/// What a guest's kernel calls its memory.
pub fn system_ram(guest: &Guest) -> Result<Vec<Range>> {
    let text = guest.read_file("/proc/iomem")?;
    let ranges = text.lines().filter_map(|line| {
        let (range, what) = line.split_once(" : ")?;
        let (start, last) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        (what == "System RAM").then_some((number(start)?, number(last)? + 1))
    });
    let ranges: Vec<_> = ranges.collect();
    ensure!(!ranges.is_empty(), "There is no memory in:\n{text}");
    Ok(ranges)
}

/// Whether all of `range` lies in `parts`, which are in order.
pub fn is_covered(range: Range, parts: &[(Range, String)]) -> bool {
    let (mut at, end) = range;
    for ((start, stop), _) in parts {
        if *start <= at && at < *stop {
            at = *stop;
        }
    }
    at >= end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_may_be_covered_by_several() {
        let parts = [(0, 0x1000), (0x1000, 0x3000), (0x4000, 0x5000)];
        let parts = parts.map(|range| (range, String::new()));
        assert!(is_covered((0x800, 0x3000), &parts));
        assert!(!is_covered((0x800, 0x3001), &parts));
        assert!(!is_covered((0x3000, 0x4800), &parts));
        assert!(is_covered((0x4000, 0x4001), &parts));
    }

    #[test]
    fn a_list_tells_what_the_device_reaches() {
        let text = r#"[{"name": "disk", "holder": {"name": "b", "fence": 1, "hops": 1, "mappings": [
            {"address": 8192, "length": 4096, "writable": true, "way": "ram 0"},
            {"address": 0, "length": 8192, "writable": true, "way": "ram 0"}]}},
            {"name": "other", "holder": null}]"#;
        let holding = parse(text, "disk").unwrap().unwrap();
        assert_eq!(holding.hops, Some(1));
        assert_eq!(holding.mappings[0].0, (0, 8192));
        assert_eq!(holding.mappings[1].0, (8192, 12288));
        assert!(parse(text, "other").unwrap().is_none());
        assert!(parse(text, "third").is_err());
    }
}
