//! A lent NVMe, whose lender or borrower is killed: the guest sees errors, and finds on the disk
//! that comes back what had been written and flushed.

use std::time::Duration;

use anyhow::{Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::qemu::VmConfig;
use fastrand::Rng;

use super::super::lend_crash::{IMPATIENT, ends_in_error};
use super::{Part, pass};
use crate::fio::Fio;
use crate::lending::{Blocks, Borrower, Lender, Nvme, namespace, wait_gone, wait_traffic};
use crate::run::Run;

const DISK: &str = "lent";

/// Writes what is found again after the kill, and flushes it.
const MARK: &str = "--rw=write --bs=64k --size=4m --verify=crc32c --do_verify=0 --end_fsync=1";
const FOUND: &str = "--rw=write --bs=64k --size=4m --verify=crc32c --verify_fatal=1 --verify_only";

/// Works behind that until the disk is gone.
const ENDLESS: &str =
    "--rw=randrw --bs=4k --iodepth=32 --offset=8m --size=16m --time_based --runtime=600";

/// How long a lease lasts that is not renewed: none ends because the machine does much else.
const TERM: Duration = Duration::from_secs(60);

/// Who lends it, and who borrows it.
pub struct Server {
    blocks: [Blocks; 1],
    lender: Lender,
    borrower: Borrower,
}

impl Server {
    pub fn new(run: &Run<'_>) -> Result<Self> {
        let blocks = [Blocks::new(32)?];
        let lending = run.context.lending()?;
        let lender = lending.lender_of_term(run, "lender", &offered(&blocks), TERM)?;
        Ok(Self {
            borrower: lending.borrower(run, "borrower", &lender, DISK)?,
            blocks,
            lender,
        })
    }

    #[expect(clippy::unused_self, reason = "as with the other parts")]
    pub fn attach<'a>(&self, config: VmConfig<'a>) -> VmConfig<'a> {
        config.vfio_user_port(DISK).kernel_arguments(IMPATIENT)
    }
}

fn offered(blocks: &[Blocks; 1]) -> [Nvme; 1] {
    [Nvme::new(DISK, &blocks[0])]
}

/// Its use.
pub struct Lent<'r> {
    run: &'r Run<'r>,
    guest: &'r Guest,
    server: Server,
    node: String,
    /// Kills of the lender, and of the borrower.
    kills: [u32; 2],
}

impl<'r> Lent<'r> {
    pub fn new(run: &'r Run<'r>, guest: &'r Guest, server: Server) -> Result<Self> {
        guest.run("modprobe nvme")?;
        guest.plug_vfio_user(DISK, server.borrower.socket())?;
        Ok(Self {
            node: namespace(guest, DISK)?,
            run,
            guest,
            server,
            kills: [0; 2],
        })
    }
}

impl Part for Lent<'_> {
    fn name(&self) -> &'static str {
        "farlane-lend, farlane-borrow"
    }

    fn weight(&self) -> u32 {
        1
    }

    fn strike(&mut self, rng: &mut Rng) -> Result<()> {
        let (guest, lending) = (self.guest, self.run.context.lending()?);
        let seed = format!(" --randseed={}", rng.u32(..));
        Fio::new(&self.node, &format!("{MARK}{seed}")).run(guest)?;
        let job = guest.spawn(Fio::new(&self.node, ENDLESS).line())?;
        wait_traffic(guest, &self.node)?;
        pass(rng);
        ensure!(!job.has_ended(), "fio ended early:\n{}", job.so_far());
        let is_lender = rng.bool();
        self.kills[usize::from(!is_lender)] += 1;
        if is_lender {
            self.server.lender.kill()?;
        } else {
            // QEMU (11.1, hw/vfio-user/proxy.c) reports the error of a read twice, and aborts, when
            // a server ends with a request that it has not read: whose processors stand still makes
            // none.
            guest.qmp().stop()?;
            self.server.borrower.kill()?;
            guest.qmp().cont()?;
        }
        ends_in_error(guest, job)?;
        guest.unplug(DISK)?;
        wait_gone(guest, DISK)?;
        if is_lender {
            let devices = offered(&self.server.blocks);
            self.server.lender = lending.lender_of_term(self.run, "lender", &devices, TERM)?;
        } else {
            self.server.borrower =
                lending.borrower(self.run, "borrower", &self.server.lender, DISK)?;
        }
        self.server.lender.wait_offered(DISK)?;
        guest.plug_vfio_user(DISK, self.server.borrower.socket())?;
        self.node = namespace(guest, DISK)?;
        Fio::new(&self.node, &format!("{FOUND}{seed}")).run(guest)?;
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<String> {
        self.guest.unplug(DISK)?;
        self.server.borrower.stop()?;
        self.server.lender.stop()?;
        let [lender, borrower] = self.kills;
        Ok(format!(
            "{lender} times the lender, {borrower} times the borrower; what had been flushed was \
             found each time"
        ))
    }
}
