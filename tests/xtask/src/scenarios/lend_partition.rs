//! A lender and a borrower that do not hear each other any more, while the physical NVMe that is
//! lent is about to write into the memory of the borrower's VM: packets are dropped, the lender's
//! process is stopped, or killed. When the lender says that the lease has ended, nothing lands in
//! that memory any more, whose next user may be another VM.
//!
//! The device's reads are throttled before, so that they are under way for longer than the lease,
//! and let go after it.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::report::Report;
use serde_json::json;

use super::lend_crash::first_difference;
use super::lend_vfio::machine::{BORROWER, DISK, Lender, Setting};
use crate::conditions::{no_complaint, wait_until};
use crate::fio::Fio;
use crate::lending::{Blocks, Borrower, namespace, wait_traffic};
use crate::run::Run;

const DISK_MIB: u32 = 96;

/// Reads of the VM, and so many at least at a time: the block layer makes one of those that follow
/// each other.
const READS: &str = "--rw=randread --bs=256k --iodepth=8 --time_based --runtime=600";
const UNDER_WAY: u64 = 4;

/// Bytes a second that the device reads when its reads are held: what is under way takes minutes.
const CRAWL: u64 = 8 << 10;

/// How they part.
#[derive(Clone, Copy, Debug)]
enum Parting {
    /// Nothing arrives, in either direction.
    Dropped,
    /// The same, and the VM is killed.
    DroppedAndKilled,
    /// The lender's process is stopped for longer than the term (SIGSTOP).
    Stopped,
    /// The lender's process is killed.
    Killed,
}

const PARTINGS: [Parting; 4] = [
    Parting::Dropped,
    Parting::DroppedAndKilled,
    Parting::Stopped,
    Parting::Killed,
];

pub fn partition(run: &Run<'_>, terms: &[u16], report: &mut Report) -> Result<()> {
    let setting = Setting::new(run, Blocks::random(DISK_MIB)?)?;
    let [machine] = run.boot([setting.lender(run)?])?;
    let stage = Stage {
        run,
        machine: &machine,
        setting: &setting,
        words: setting.borrower_words()?,
    };
    stage.device_writes(report)?;
    for &term in terms {
        for parting in PARTINGS {
            stage.part(term, parting, report)?;
        }
    }
    no_complaint(&machine)
}

struct Stage<'r> {
    run: &'r Run<'r>,
    /// The lender's.
    machine: &'r Guest,
    setting: &'r Setting,
    /// The borrower's.
    words: Vec<String>,
}

/// A VM whose processors stand still, and for whom the device has reads under way.
struct Reading<'r> {
    vm: Guest,
    borrower: Borrower,
    lender: Lender<'r>,
}

impl<'r> Stage<'r> {
    /// What the others show is shown to be there: as long as the lease lasts the device does write.
    fn device_writes(&self, report: &mut Report) -> Result<()> {
        let reading = self.reading(60)?;
        let before = self.memory()?;
        self.throttle(0)?;
        wait_until("the device writes into the VM's memory", || {
            Ok(first_difference(&self.setting.ram, &before)?.is_some())
        })?;
        let what = "a lease that lasts, reads that are let go";
        say(report, what, "change the memory of a VM that does not run");
        reading.vm.kill()?;
        reading.lender.wait_offered(DISK)?;
        reading.borrower.stop()?;
        reading.lender.stop().map(drop)
    }

    fn part(&self, term: u16, parting: Parting, report: &mut Report) -> Result<()> {
        let what = format!("{parting:?}, term of {term} s");
        let Reading {
            vm,
            borrower,
            lender,
        } = self.reading(term)?;
        let lender = match parting {
            Parting::Dropped => {
                self.machine.set_cable(false)?;
                lender
            }
            Parting::DroppedAndKilled => {
                self.machine.set_cable(false)?;
                vm.kill()?;
                lender
            }
            Parting::Stopped => {
                self.machine.run("kill -STOP $(pidof farlane-lend)")?;
                // The stimulus: longer than the term.
                std::thread::sleep(Duration::from_secs(u64::from(term) + 1));
                self.machine.run("kill -CONT $(pidof farlane-lend)")?;
                lender
            }
            Parting::Killed => {
                lender.kill()?;
                Lender::start(self.machine, Some(term))?
            }
        };
        lender
            .wait_offered_within(DISK, Duration::from_secs(u64::from(term)))
            .with_context(|| what.clone())?;
        let before = self.memory()?;
        // All that was under way, and still is, ends now.
        self.throttle(0)?;
        self.disk_is_idle()?;
        let changed = first_difference(&self.setting.ram, &before)?;
        ensure!(
            changed.is_none(),
            "{what}: the memory of the VM changed at {changed:#x?} after the end of the lease"
        );
        say(report, &what, "memory unchanged after the lease's end");
        self.machine.set_cable(true)?;
        vm.kill()?;
        borrower.stop()?;
        lender.stop().map(drop)
    }

    fn reading(&self, term: u16) -> Result<Reading<'r>> {
        let lender = Lender::start(self.machine, Some(term))?;
        let lending = self.run.context.lending()?;
        let address = lender.address()?;
        let borrower = lending.borrower_at(self.run, BORROWER, &address, DISK, &self.words)?;
        let [vm] = self.run.boot([self.setting.vm()])?;
        vm.run("modprobe nvme")?;
        vm.plug_vfio_user(DISK, borrower.socket())?;
        let node = namespace(&vm, DISK)?;
        let job = vm.spawn(Fio::new(&node, READS).line())?;
        wait_traffic(&vm, &node)?;
        self.throttle(CRAWL)?;
        wait_until("reads are under way", || Ok(under_way(&vm)? >= UNDER_WAY))?;
        ensure!(!job.has_ended(), "fio ended early:\n{}", job.so_far());
        drop(job);
        vm.qmp().stop()?;
        Ok(Reading {
            vm,
            borrower,
            lender,
        })
    }

    fn memory(&self) -> Result<Vec<u8>> {
        let ram = &self.setting.ram;
        fs::read(ram).with_context(|| format!("Cannot read {}", ram.display()))
    }

    /// How many bytes a second the device may read, 0 for as many as it can.
    fn throttle(&self, bytes: u64) -> Result<()> {
        let limits = json!({
            "id": DISK, "bps": 0, "bps_rd": bytes, "bps_wr": 0,
            "iops": 0, "iops_rd": 0, "iops_wr": 0,
        });
        let qmp = self.machine.qmp();
        qmp.execute("block_set_io_throttle", limits).map(drop)
    }

    /// Waits until the disk of the lender's machine has nothing under way: a command that is to
    /// wait for all of it has ended.
    fn disk_is_idle(&self) -> Result<()> {
        self.machine.qmp().stop()?;
        self.machine.qmp().cont()
    }
}

fn say(report: &mut Report, what: &str, figure: &str) {
    report.tell("NVMe lent by another kernel", what, figure);
}

/// How many reads the controllers of a VM have not completed. A disk that may have several paths
/// counts them there.
fn under_way(vm: &Guest) -> Result<u64> {
    let text = vm.run("cat /sys/block/nvme*/inflight")?;
    let reads = text
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    let reads = reads.map(str::parse::<u64>);
    reads
        .sum::<Result<u64, _>>()
        .context("A count is no number")
}
