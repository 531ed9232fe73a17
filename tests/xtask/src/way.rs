//! How a guest's programs of verbs reach the device: through our library, or through the kernel.

use std::path::{Path, PathBuf};

use anyhow::Result;
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::qemu::VmConfig;
use farlane_kit::wire::{End, Wire};

use crate::farlane::{Farlane, Pair, wait_device};
use crate::place::Over;
use crate::run::Run;
use crate::scenarios::rdma_stock;

/// One of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// `farlane-run`, and our `libibverbs.so.1`.
    Library,
    /// The RDMA device of the kernel, and the distribution's `libibverbs.so.1`.
    Kernel,
}

impl Way {
    /// What programs are started with.
    pub fn over(self) -> Over {
        match self {
            Way::Library => Over::Farlane,
            Way::Kernel => Over::Rxe,
        }
    }

    /// The line of a program of ibverbs-utils or perftest that is told which device, and which
    /// entry of its GID table.
    pub fn line(self, line: &str) -> String {
        let is_pingpong = line.starts_with("ibv_");
        let gid = if is_pingpong { "-g" } else { "-x" };
        match self {
            Way::Library if is_pingpong => format!("{line} -g 0"),
            Way::Library => line.to_owned(),
            Way::Kernel => format!("{line} -d {} {gid} {}", rdma_stock::DEVICE, rdma_stock::GID),
        }
    }

    /// All of its command line.
    pub fn command(self, line: &str) -> String {
        self.over().command(&self.line(line))
    }

    /// What a daemon is told of a guest.
    pub fn vm(self, end: End) -> String {
        match (self, end) {
            (Way::Library, End::A) => "10.0.0.1".to_owned(),
            (Way::Library, End::B) => "10.0.0.2".to_owned(),
            (Way::Kernel, end) => rdma_stock::vm(end),
        }
    }

    /// Gives a guest its device and what it needs to use it.
    pub fn attach<'w>(
        self,
        farlane: &Farlane,
        config: VmConfig<'w>,
        end: End,
        sockets: &[PathBuf; 2],
    ) -> VmConfig<'w> {
        match self {
            Way::Library => farlane.attach(config, end, sockets),
            Way::Kernel => farlane.attach_kernel(config, end, sockets),
        }
    }

    /// Boots two guests with further files, on one daemon that, where wanted, serves processes of
    /// this machine too.
    pub fn boot_pair(
        self,
        run: &Run<'_>,
        wire: &Wire,
        files: &[GuestFile],
        host: Option<&Path>,
    ) -> Result<Pair> {
        let farlane = run.context.farlane()?;
        let sockets = [run.path("a"), run.path("b")];
        let [a, b] = [End::A, End::B].map(|end| self.vm(end));
        let guests = [(&*sockets[0], &*a), (&*sockets[1], &*b)];
        let backend = farlane.daemon(run, &guests, host)?;
        let [a, b] = run.boot_pair(wire, |config, end| {
            let config = self.attach(farlane, config, end, &sockets);
            config.files(files.to_vec())
        })?;
        self.start(&a)?;
        self.start(&b)?;
        Ok(Pair { a, b, backend })
    }

    /// Has a guest that has just booted use its device.
    pub fn start(self, guest: &Guest) -> Result<()> {
        wait_device(guest)?;
        match self {
            Way::Library => Ok(()),
            Way::Kernel => rdma_stock::start(guest),
        }
    }

    /// Programs can use a device that was there before and has come back.
    pub fn wait_back(self, guest: &Guest) -> Result<()> {
        wait_device(guest)?;
        match self {
            Way::Library => Ok(()),
            Way::Kernel => rdma_stock::wait_device(guest),
        }
    }

    /// The driver's modules, in the order in which they may be unloaded.
    pub fn modules(self) -> &'static [&'static str] {
        match self {
            Way::Library => &["farlane"],
            Way::Kernel => &["farlane_ib", "farlane"],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_told_their_device_by_their_own_options() {
        let lines = ["ibv_rc_pingpong -c", "ib_write_bw -F"];
        let library = lines.map(|line| Way::Library.command(line));
        let kernel = lines.map(|line| Way::Kernel.command(line));
        assert_eq!(
            library,
            [
                "farlane-run ibv_rc_pingpong -c -g 0",
                "farlane-run ib_write_bw -F"
            ]
        );
        assert_eq!(
            kernel,
            [
                "ibv_rc_pingpong -c -d rxe_farlane0 -g 1",
                "ib_write_bw -F -d rxe_farlane0 -x 1"
            ]
        );
    }
}
