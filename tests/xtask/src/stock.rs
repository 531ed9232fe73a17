//! Two guests with nothing of ours but kernel modules: an RDMA device of their kernel, for the
//! distribution's own programs and for what the kernel itself does over RDMA.

use std::path::PathBuf;

use anyhow::Result;
use farlane_kit::backend::Backend;
use farlane_kit::guest::Guest;
use farlane_kit::qemu::VmConfig;
use farlane_kit::wire::{End, Wire};

use crate::conditions::no_complaint;
use crate::metrics::Metrics;
use crate::run::Run;
use crate::scenarios::rdma_stock::{start, vm, wait_device};
use crate::tools::Ends;
use crate::vitals::Vitals;

/// Two guests on one daemon, which knows the interface of each.
pub struct Stock<'a> {
    pub a: Guest,
    pub b: Guest,
    sockets: [PathBuf; 2],
    backend: Backend,
    run: &'a Run<'a>,
}

impl<'a> Stock<'a> {
    /// Boots them, with what else they are to have.
    pub fn boot<'w>(
        run: &'a Run<'a>,
        wire: &'w Wire,
        configure: impl Fn(VmConfig<'w>, End) -> VmConfig<'w>,
    ) -> Result<Self> {
        let farlane = run.context.farlane()?;
        let sockets = [run.path("a"), run.path("b")];
        let [vm_a, vm_b] = [End::A, End::B].map(vm);
        let guests = [(&*sockets[0], &*vm_a), (&*sockets[1], &*vm_b)];
        let backend = farlane.daemon(run, &guests, None)?;
        let [a, b] = run.boot_pair(wire, |config, end| {
            configure(farlane.attach_kernel(config, end, &sockets), end)
        })?;
        start(&a)?;
        start(&b)?;
        Ok(Self {
            a,
            b,
            sockets,
            backend,
            run,
        })
    }

    /// Boots the first one again, after it was killed, with what else it is to have.
    pub fn boot_a_again<'w>(
        &self,
        wire: &'w Wire,
        configure: impl Fn(VmConfig<'w>) -> VmConfig<'w>,
    ) -> Result<Guest> {
        let farlane = self.run.context.farlane()?;
        let config = VmConfig::new("a-again").wire(wire, End::A);
        let config = farlane.attach_kernel(config, End::A, &self.sockets);
        let [again] = self.run.boot([configure(config)])?;
        start(&again)?;
        Ok(again)
    }

    /// Puts the Farlane device into one of them again, and waits for it.
    pub fn plug(&self, end: End) -> Result<()> {
        let (guest, socket) = match end {
            End::A => (&self.a, &self.sockets[0]),
            End::B => (&self.b, &self.sockets[1]),
        };
        guest.plug_farlane(socket)?;
        wait_device(guest)
    }

    /// From the second guest to the first one, where servers run.
    pub fn ends(&self) -> Ends<'_> {
        Ends {
            name: "two VMs",
            server: &self.a,
            client: &self.b,
        }
    }

    /// How many bytes the daemon has moved.
    pub fn moved(&self) -> Result<u64> {
        Metrics::read(&self.run.metrics(), "farlane_rdma_")?.moved()
    }

    /// Memory of the daemon's own, in KiB.
    pub fn daemon_kib(&self) -> Result<u64> {
        Ok(Vitals::of(&self.backend)?.own_kib())
    }

    /// Ends all, if no kernel has found anything wrong with itself.
    pub fn stop(self) -> Result<()> {
        no_complaint(&self.a)?;
        no_complaint(&self.b)?;
        drop((self.a, self.b));
        self.backend.stop()
    }
}
