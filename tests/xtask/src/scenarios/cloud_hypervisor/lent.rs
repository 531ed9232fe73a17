//! A lent NVMe, as farlane-borrow shows it over vfio-user: what it says of itself, blocks and
//! flushes, by DMA.

use std::ffi::OsString;

use anyhow::{Result, ensure};

use super::console::Started;
use super::vmm::Vmm;
use super::{Part, pattern};
use crate::lending::{Blocks, Borrower, Lender, Nvme};
use crate::run::Run;

const NAME: &str = "nvme0";

/// Bytes that the guest writes (`tests/xtask/guest/pvh/nvme.c`).
const WRITTEN: u64 = 16 * 4096;

pub struct Lent {
    blocks: [Blocks; 1],
    lender: Lender,
    borrower: Borrower,
    /// What the disk was last written with.
    seed: u64,
    /// Its borrower was killed: the VMM does not connect to another one.
    is_gone: bool,
}

impl Lent {
    pub fn new(run: &Run<'_>) -> Result<Self> {
        let blocks = [Blocks::new(32)?];
        let lending = run.context.lending()?;
        let lender = lending.lender(run, "lender", &[Nvme::new(NAME, &blocks[0])])?;
        let words = ["--interrupts", "msix"].map(str::to_owned);
        let address = lender.address();
        Ok(Self {
            borrower: lending.borrower_at(run, "borrower", &address, NAME, &words)?,
            blocks,
            lender,
            seed: 0,
            is_gone: false,
        })
    }
}

impl Part for Lent {
    fn name(&self) -> &'static str {
        "farlane-borrow"
    }

    fn words(&self) -> Vec<OsString> {
        let socket = self.borrower.socket().display();
        vec![
            "--user-device".into(),
            format!("socket={socket},id={NAME}").into(),
        ]
    }

    fn agreed(&self, devices: &[Started]) -> Result<String> {
        if self.is_gone {
            return Ok(String::new());
        }
        ensure!(
            devices.iter().any(|device| device.kind == "nvme"),
            "The guest has no NVMe among {devices:?}"
        );
        self.lender.wait_held(NAME, "borrower")?;
        Ok("lent NVMe: ready, with I/O queues".into())
    }

    fn kept(&mut self, vmm: &mut Vmm) -> Result<()> {
        if self.is_gone {
            return Ok(());
        }
        vmm.ask(&format!("nvme-read {}", self.seed))?;
        Ok(())
    }

    fn works(&mut self, vmm: &mut Vmm) -> Result<()> {
        if self.is_gone {
            return Ok(());
        }
        let said = vmm.ask("nvme-identify")?;
        ensure!(
            said.starts_with(&format!("serial {NAME},")),
            "The controller says: {said}"
        );
        self.seed += 1;
        vmm.ask(&format!("nvme-write {}", self.seed))?;
        vmm.ask(&format!("nvme-read {}", self.seed))?;
        pattern::check(self.blocks[0].path(), 0, WRITTEN, self.seed)
    }

    fn kill(&mut self, vmm: &mut Vmm) -> Result<String> {
        if !self.is_gone {
            self.works(vmm)?;
            self.borrower.kill()?;
            self.lender.wait_offered(NAME)?;
            self.is_gone = true;
        }
        Ok("the device is gone, and on offer again".into())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.lender.stop()
    }
}
