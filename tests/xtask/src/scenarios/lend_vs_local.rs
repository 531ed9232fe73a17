//! fio in one guest, in turns, on QEMU's own NVMe, on a lent one over the same file, and on NVMe/TCP to another guest.

use anyhow::{Result, bail};
use farlane_vmkit::guest::Guest;
use farlane_vmkit::progress;
use farlane_vmkit::qemu::VmConfig;
use farlane_vmkit::report::Report;
use farlane_vmkit::wire::{End, Wire};

use super::Scenario;
use crate::fio::{Figures, Fio};
use crate::lending::{Blocks, Nvme, namespace};
use crate::run::Run;
use crate::tools::median;

pub const SCENARIO: Scenario = Scenario {
    name: "lend-vs-local",
    about: "fio on QEMU's own NVMe, on a lent one over the same file, and on NVMe/TCP to another VM, in turns",
    is_test: false,
    run,
};

/// How often fio runs on each; the median counts.
const ROUNDS: usize = 5;

/// What all of them read.
const SIZE_MIB: u32 = 256;

/// How long one run of fio reads.
const SECONDS: u32 = 2;

/// The serial numbers by which the guest tells its controllers from each other.
const LOCAL: &str = "local";
const LENT: &str = "lent";
const FAR: &str = "far";

/// What fio does, what of it counts, and how much more of it a lent device must give than the others.
struct Measure {
    name: &'static str,
    words: &'static str,
    unit: &'static str,
    figure: fn(&Figures) -> f64,
    over_local: f64,
    over_far: f64,
}

const MEASURES: &[Measure] = &[
    Measure {
        name: "4 KiB random reads, depth 1",
        words: "--rw=randread --norandommap --bs=4k --iodepth=1",
        unit: "IOPS",
        figure: |figures| figures.read.iops,
        over_local: 1.0,
        over_far: 5.0,
    },
    Measure {
        name: "4 KiB random reads, depth 32",
        words: "--rw=randread --norandommap --bs=4k --iodepth=32",
        unit: "IOPS",
        figure: |figures| figures.read.iops,
        over_local: 1.3,
        over_far: 5.0,
    },
    Measure {
        name: "128 KiB sequential reads, depth 8",
        words: "--rw=read --bs=128k --iodepth=8",
        unit: "MiB/s",
        figure: |figures| figures.read.bytes_per_second / 1_048_576.0,
        over_local: 1.0,
        over_far: 5.0,
    },
];

/// Offers a file in this guest's memory with random bytes as an NVMe over TCP.
const TARGET: &str = "modprobe -a nvmet nvmet-tcp && mount -t configfs none /sys/kernel/config && \
    dd if=/dev/urandom of=/tmp/part bs=1M count=1 && \
    for i in $(seq @SIZE@); do cat /tmp/part; done >/run/blocks && cd /sys/kernel/config/nvmet && \
    mkdir subsystems/@NAME@ && echo 1 >subsystems/@NAME@/attr_allow_any_host && \
    echo @NAME@ >subsystems/@NAME@/attr_serial && mkdir subsystems/@NAME@/namespaces/1 && \
    echo -n /run/blocks >subsystems/@NAME@/namespaces/1/device_path && \
    echo 1 >subsystems/@NAME@/namespaces/1/enable && mkdir ports/1 && echo ipv4 >ports/1/addr_adrfam && \
    echo tcp >ports/1/addr_trtype && echo @ADDRESS@ >ports/1/addr_traddr && echo 4420 >ports/1/addr_trsvcid && \
    ln -s /sys/kernel/config/nvmet/subsystems/@NAME@ ports/1/subsystems/@NAME@";

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = Blocks::random(SIZE_MIB)?;
    let lending = run.context.lending()?;
    let lender = lending.lender(run, "lender", &[Nvme::new(LENT, &blocks)])?;
    // As QEMU's own device and an NVMe of the host have it: an interrupt, and with it a queue, for each processor. It is
    // not the default because QEMU 11.1 cannot unplug such a device.
    let msix = ["--interrupts", "msix"].map(String::from);
    let borrower = lending.borrower_at(run, "borrower", &lender.address(), LENT, &msix)?;
    let wire = Wire::new()?;
    let mut config = VmConfig::new("a").storage().wire(&wire, End::A);
    // One to compute, one to be interrupted.
    config.cpus = 2;
    // Else the kernel would put a layer of its own before the one that may have several ways.
    let config = config.kernel_arguments(["nvme_core.multipath=N"]);
    let [a, b] = run.boot([
        config
            .nvme(LOCAL, blocks.path())
            .vfio_user(LENT, borrower.socket()),
        VmConfig::new("b").wire(&wire, End::B),
    ])?;
    serve_tcp(&b)?;
    a.run("modprobe -a nvme nvme-tcp")?;
    let connect = format!("nvme connect -t tcp -a {} -s 4420 -n {FAR}", b.address()?);
    a.run(&connect)?;
    let (local, lent, far) = (
        namespace(&a, LOCAL)?,
        namespace(&a, LENT)?,
        namespace(&a, FAR)?,
    );
    compare(&a, [local, lent, far], report)?;
    lender.stop()
}

/// Measures a lent device in turns with QEMU's own and with one behind TCP.
fn compare(guest: &Guest, [local, lent, far]: [String; 3], report: &mut Report) -> Result<()> {
    let mut missed = Vec::new();
    for measure in MEASURES {
        let mut figures = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (device, figures) in [&local, &lent, &far].into_iter().zip(&mut figures) {
                figures.push(measure.run(guest, device)?);
            }
        }
        let [local, lent, far] = figures;
        let (local, lent, far) = (median(local)?, median(lent)?, median(far)?);
        let Measure { name, unit, .. } = measure;
        for (what, other, bar) in [
            ("QEMU's NVMe", local, measure.over_local),
            ("NVMe/TCP", far, measure.over_far),
        ] {
            let ratio = lent / other;
            let figures = format!(
                "lent {lent:.0} {unit}, {what} {other:.0}: {ratio:.2}x (at least {bar:.1}x)"
            );
            progress::note(&format!("{name}: {figures}"));
            report.add("one VM", *name, &figures);
            if ratio < bar {
                missed.push(format!("{name}: {figures}"));
            }
        }
    }
    if !missed.is_empty() {
        bail!("A lent device is not fast enough:\n{}", missed.join("\n"));
    }
    Ok(())
}

impl Measure {
    fn run(&self, guest: &Guest, device: &str) -> Result<f64> {
        let words = format!("{} --time_based --runtime={SECONDS}", self.words);
        let figures = Fio::new(device, &words).run(guest)?;
        Ok((self.figure)(&figures))
    }
}

/// Has a guest offer a disk over TCP.
fn serve_tcp(guest: &Guest) -> Result<()> {
    let size = SIZE_MIB.to_string();
    let command = TARGET.replace("@SIZE@", &size).replace("@NAME@", FAR);
    guest.run(&command.replace("@ADDRESS@", guest.address()?))?;
    Ok(())
}
