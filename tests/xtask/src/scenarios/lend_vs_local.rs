//! fio in one guest, in turns, on QEMU's own NVMe, on a lent one over the same file, and on
//! NVMe/TCP to another guest.

use anyhow::Result;
use farlane_kit::guest::Guest;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::wire::{End, Wire};

use crate::lending::{Blocks, Borrower, Lender, Nvme, namespace};
use crate::run::Run;
use crate::versus::{Contest, Form, Workload};

/// The serial numbers by which the guest tells its controllers from each other.
const LOCAL: &str = "local";
const LENT: &str = "lent";
const FAR: &str = "far";

/// How much more of a workload's figure a lent device must give than the others. The small form's
/// bars are half of what a lent device usually gives: they are missed where the time of a request
/// doubles, as it does when it takes a message or a wake-up more.
struct Measure {
    workload: Workload,
    over_local: f64,
    over_far: f64,
    small: Option<f64>,
}

const MEASURES: &[Measure] = &[
    Measure {
        workload: Workload::RANDOM_READS_1,
        over_local: 1.0,
        over_far: 5.0,
        // One at a time is a question of wake-ups, of which a lent device takes one more: too much
        // of the machine's.
        small: None,
    },
    Measure {
        workload: Workload::RANDOM_READS_32,
        over_local: 1.3,
        over_far: 5.0,
        small: Some(0.7),
    },
    Measure {
        workload: Workload {
            name: "128 KiB sequential reads, depth 8",
            words: "--rw=read --bs=128k --iodepth=8",
            unit: "MiB/s",
            figure: |figures| figures.read.bytes_per_second / 1_048_576.0,
        },
        over_local: 1.0,
        over_far: 5.0,
        small: Some(0.7),
    },
];

/// Offers a file in this guest's memory with random bytes as an NVMe over TCP.
const TARGET: &str = "modprobe -a nvmet nvmet-tcp && mount -t configfs none /sys/kernel/config && \
    dd if=/dev/urandom of=/tmp/part bs=1M count=1 && \
    for i in $(seq @SIZE@); do cat /tmp/part; done >/run/blocks && cd /sys/kernel/config/nvmet && \
    mkdir subsystems/@NAME@ && echo 1 >subsystems/@NAME@/attr_allow_any_host && \
    echo @NAME@ >subsystems/@NAME@/attr_serial && mkdir subsystems/@NAME@/namespaces/1 && \
    echo -n /run/blocks >subsystems/@NAME@/namespaces/1/device_path && \
    echo 1 >subsystems/@NAME@/namespaces/1/enable && mkdir ports/1 && echo ipv4 \
    >ports/1/addr_adrfam && \
    echo tcp >ports/1/addr_trtype && echo @ADDRESS@ >ports/1/addr_traddr && echo 4420 \
    >ports/1/addr_trsvcid && \
    ln -s /sys/kernel/config/nvmet/subsystems/@NAME@ ports/1/subsystems/@NAME@";

/// In one VM, beside QEMU's own device.
pub fn small(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let rig = Rig::new(run, Form::Small)?;
    let [guest] = run.boot([rig.add_devices(VmConfig::new("a"))])?;
    guest.run("modprobe nvme")?;
    let nodes = [LENT, LOCAL].map(|serial| namespace(&guest, serial));
    let [lent, local] = nodes;
    compare(Form::Small, &guest, &[lent?, local?], report)?;
    drop(guest);
    rig.lender.stop()
}

/// Beside NVMe/TCP to another VM, too.
pub fn long(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let rig = Rig::new(run, Form::Long)?;
    let wire = Wire::new()?;
    let [a, b] = run.boot([
        rig.add_devices(VmConfig::new("a").wire(&wire, End::A)),
        VmConfig::new("b").wire(&wire, End::B),
    ])?;
    serve_tcp(&b)?;
    a.run("modprobe -a nvme nvme-tcp")?;
    let connect = format!("nvme connect -t tcp -a {} -s 4420 -n {FAR}", b.address()?);
    a.run(&connect)?;
    let [lent, local, far] = [LENT, LOCAL, FAR].map(|serial| namespace(&a, serial));
    compare(Form::Long, &a, &[lent?, local?, far?], report)?;
    drop((a, b));
    rig.lender.stop()
}

/// A file, a lender of it, and a borrower; and a file for QEMU's own device: one is for one of them
/// only.
struct Rig {
    _lent: Blocks,
    local: Blocks,
    lender: Lender,
    borrower: Borrower,
}

impl Rig {
    fn new(run: &Run<'_>, form: Form) -> Result<Self> {
        let lent = Blocks::random(form.disk_mib())?;
        let local = Blocks::random(form.disk_mib())?;
        let lending = run.context.lending()?;
        let lender = lending.lender(run, "lender", &[Nvme::new(LENT, &lent)])?;
        // As QEMU's own device and an NVMe of the host have it: an interrupt, and with it a queue,
        // for each processor. It is not the default because QEMU 11.1 cannot unplug such a device.
        let msix = ["--interrupts", "msix"].map(String::from);
        let borrower = lending.borrower_at(run, "borrower", &lender.address(), LENT, &msix)?;
        Ok(Self {
            _lent: lent,
            local,
            lender,
            borrower,
        })
    }

    fn add_devices<'w>(&self, config: VmConfig<'w>) -> VmConfig<'w> {
        let mut config = config.storage();
        // One to compute, one to be interrupted.
        config.cpus = 2;
        // Else the kernel would put a layer of its own before the one that may have several ways.
        let config = config.kernel_arguments(["nvme_core.multipath=N"]);
        config
            .nvme(LOCAL, self.local.path())
            .vfio_user(LENT, self.borrower.socket())
    }
}

/// Measures a lent device, the first of the nodes, in turns with QEMU's own and, in the long form,
/// with one behind TCP.
fn compare(form: Form, guest: &Guest, nodes: &[String], report: &mut Report) -> Result<()> {
    let mut contest = Contest::new(form, guest, nodes, &["QEMU's NVMe", "NVMe/TCP"], report);
    for measure in MEASURES {
        if let Some(over_local) = form.choose(measure.small, measure.over_local) {
            let multiples = [over_local, measure.over_far];
            contest.compare(&measure.workload, &multiples[..nodes.len() - 1])?;
        }
    }
    contest.end()
}

/// Has a guest offer a disk over TCP.
fn serve_tcp(guest: &Guest) -> Result<()> {
    let size = Form::Long.disk_mib().to_string();
    let command = TARGET.replace("@SIZE@", &size).replace("@NAME@", FAR);
    guest.run(&command.replace("@ADDRESS@", guest.address()?))?;
    Ok(())
}
