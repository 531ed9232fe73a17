//! A lent NVMe moves blocks to and from the video memory of lent GPUs: of the same lender, of one
//! on the VM's own host, and of one that is reached over the network; and a GPU is unplugged while
//! the NVMe writes into it.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use crate::conditions::{no_complaint, wait_until};
use crate::lending::{Blocks, Borrower, Device, Lender, Nvme};
use crate::run::Run;

const DISK: &str = "disk";
const DISK_MIB: u32 = 32;

/// How long the guest's program may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A GPU, and by which way the disk is to reach it.
struct Target {
    name: &'static str,
    lender: &'static str,
    /// Each has another size, by which the guest finds it.
    memory_mib: u32,
    way: &'static str,
    /// What is moved there and back.
    kib: u64,
    /// Whether the lender moves it without a copy.
    straight: bool,
}

const SAME: Target = Target {
    name: "gpu0",
    lender: "near",
    memory_mib: 64,
    way: "near/gpu0 64 MiB (same lender, 0 hops)",
    kib: 8 << 10,
    straight: true,
};
const OWN: Target = Target {
    name: "gpu1",
    lender: "own",
    memory_mib: 32,
    way: "own/gpu1 32 MiB (local, 0 hops)",
    kib: 8 << 10,
    straight: true,
};
/// Its memory is behind messages, for the guest's processor, too.
const FAR: Target = Target {
    name: "gpu2",
    lender: "far",
    memory_mib: 16,
    // By TCP without certificates, where nobody proves a name.
    way: "unproved:far/gpu2 16 MiB (messages)",
    kib: 16,
    straight: false,
};

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let lending = run.context.lending()?;
    let disk = Blocks::new(DISK_MIB)?;
    let gpu = |target: &Target| Device::gpu(target.name, target.memory_mib);
    let near = [Device::from(Nvme::new(DISK, &disk)), gpu(&SAME)];
    let near = lending.lender(run, SAME.lender, &near)?;
    let own = lending.lender(run, OWN.lender, &[gpu(&OWN)])?;
    // As another host: no memory and no descriptors are shared.
    let far = lending.lender_at(run, FAR.lender, &[gpu(&FAR)], &["tcp:127.0.0.1:0"])?;
    let network = far.network_address()?;

    let [near_memory, own_memory, far_memory] =
        ["near-memory", "own-memory", "far-memory"].map(|name| run.path(name));
    let same_socket = run.path("borrowed-gpu0");
    let word = |name: &str, path: &std::path::Path| format!("--{name}={}", path.display());
    let first = lending.borrower_at(
        run,
        "vm",
        &near.address(),
        DISK,
        &[
            word("socket-path", &same_socket),
            format!("--device={}", SAME.name),
            word("publish", &near_memory),
            word("device-memory", &own_memory),
            word("device-memory", &far_memory),
        ],
    )?;
    let publishing = |name, address: &str, target: &Target, memory| {
        lending.borrower_at(run, name, address, target.name, &[word("publish", memory)])
    };
    let second = publishing("vm-own", &own.address(), &OWN, &own_memory)?;
    let third = publishing("vm-far", &network, &FAR, &far_memory)?;
    let config = VmConfig::new("vm")
        .vfio_user(DISK, first.socket())
        .vfio_user(SAME.name, &same_socket)
        .vfio_user(OWN.name, second.socket())
        .vfio_user(FAR.name, third.socket())
        .files([GuestFile::new(
            run.guest_program("nvme_peer")?,
            "usr/bin/nvme_peer",
        )]);
    let [guest] = run.boot([config])?;

    let mut story = Story {
        guest: &guest,
        lender: &near,
        disk: &disk,
        function: guest.run(FIND_NVME)?.trim().to_owned(),
        report,
    };
    story.tell(&first)?;
    no_complaint(&guest)?;
    drop(guest);
    for borrower in [first, second, third] {
        borrower.stop()?;
    }
    for lender in [near, own, far] {
        ensure!(
            !lender.backend().log().contains("panicked"),
            "A lender panicked"
        );
        lender.stop()?;
    }
    Ok(())
}

const FIND_NVME: &str = "for d in /sys/bus/pci/devices/*; do \
     [ $(cat $d/class) = 0x010802 ] && echo ${d##*/}; done; true";

struct Story<'a> {
    guest: &'a Guest,
    lender: &'a Lender,
    disk: &'a Blocks,
    /// The disk, in the guest.
    function: String,
    report: &'a mut Report,
}

impl Story<'_> {
    fn say(&mut self, what: &str, figure: &str) {
        self.report.tell("lent NVMe and GPUs", what, figure);
    }

    fn tell(&mut self, borrower: &Borrower) -> Result<()> {
        for target in [&SAME, &OWN, &FAR] {
            let gpu = self.find(target)?;
            self.guest
                .run(&format!("nvme_peer {} {gpu} prepare", self.function))?;
            wait_until(&format!("the disk reaches {}", target.way), || {
                Ok(self.lender.table()?.contains(target.way))
            })?;
        }
        println!("{}", self.lender.table()?);
        let metrics = borrower.metrics()?;
        for way in ["peers_same_lender", "peers_local", "peers_messages"] {
            ensure!(metrics.sum(way)? > 0, "The borrower counts no {way}");
        }
        for target in [&SAME, &OWN, &FAR] {
            self.moves(target)?;
        }
        self.unplug()
    }

    /// The GPU's function: that with so large a BAR.
    fn find(&self, target: &Target) -> Result<String> {
        let bytes = u64::from(target.memory_mib) << 20;
        let line = format!(
            "for d in /sys/bus/pci/devices/*; do f=$d/resource2; \
             [ -e $f ] && [ $(stat -c %s $f) = {bytes} ] && echo ${{d##*/}}; done; true"
        );
        let found = self.guest.run(&line)?.trim().to_owned();
        ensure!(!found.is_empty(), "The guest has no {}", target.name);
        Ok(found)
    }

    fn straight(&self) -> Result<u64> {
        self.lender.metrics()?.sum("device_nvme_peer_bytes")
    }

    /// From video memory to the disk and back, compared on both sides.
    fn moves(&mut self, target: &Target) -> Result<()> {
        let (before, bytes) = (self.straight()?, target.kib << 10);
        let gpu = self.find(target)?;
        let line = format!("nvme_peer {} {gpu} move {bytes}", self.function);
        let output = self.guest.spawn(&line)?.wait(PATIENCE)?;
        output.check(format_args!("`{line}`"))?;
        ensure!(
            self.disk_has(bytes)?,
            "The disk has not what was in the GPU's memory"
        );
        let counted = self.straight()? - before;
        let expected = if target.straight { 2 * bytes } else { 0 };
        ensure!(
            counted == expected,
            "{counted} bytes were moved straight, not {expected}"
        );
        let figure = format!(
            "{} KiB there and back, {} KiB of them straight",
            target.kib,
            counted >> 10
        );
        self.say(target.way, &figure);
        Ok(())
    }

    /// Whether the first bytes of the disk are those that the program has put into the GPU's
    /// memory; they are not any more afterwards.
    fn disk_has(&self, bytes: u64) -> Result<bool> {
        let mut file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(self.disk.path())
            .context("Cannot open the disk's file")?;
        let mut words = vec![0; usize::try_from(bytes)?];
        file.read_exact(&mut words)?;
        file.seek(SeekFrom::Start(0))?;
        std::io::copy(&mut std::io::repeat(0).take(bytes), &mut file)?;
        let right = (0_u64..).step_by(8).zip(words.chunks_exact(8));
        Ok(right.fold(true, |right, (at, word)| {
            let expected = (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            right && word == expected.to_le_bytes()
        }))
    }

    /// The GPU goes while the disk writes into it.
    fn unplug(&mut self) -> Result<()> {
        let gpu = self.find(&SAME)?;
        let before = self.straight()?;
        let line = format!("nvme_peer {} {gpu} stream", self.function);
        let job = self.guest.spawn(&line)?;
        wait_until("the disk writes into the GPU", || {
            Ok(self.straight()? > before + (1 << 20))
        })?;
        self.guest.unplug(SAME.name)?;
        self.lender.wait_offered(SAME.name)?;
        let output = job.wait(PATIENCE)?;
        let text = output.all();
        output.check(format_args!("`{line}`"))?;
        let status = text.lines().find(|line| line.starts_with("status"));
        let status = status.with_context(|| format!("No status in:\n{text}"))?;
        ensure!(text.contains("alive"), "The disk does not go on:\n{text}");
        ensure!(
            !self.lender.table()?.contains(SAME.way),
            "The disk still reaches what was unplugged"
        );
        self.say("GPU unplugged while the disk wrote into it", status);
        self.moves(&OWN)
    }
}
