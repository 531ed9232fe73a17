//! Cloud Hypervisor with a device of each backend: negotiated, in use, paused and resumed, booted
//! anew, and in use again after each vhost-user backend was killed and has come back.
//!
//! It is not this project's, and few machines have it: the scenario is run where it is at hand and
//! KVM runs the guest. That is a program of ours (`tests/xtask/guest/pvh`), which drives the
//! devices itself and does what it is asked for on its serial port: a stock kernel does not boot on
//! every kind of KVM.

mod at_hand;
mod console;
mod disk;
mod lent;
mod net;
mod pattern;
mod rdma;
mod vmm;

use std::ffi::OsString;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::network::Network;
use farlane_kit::progress;
use farlane_kit::report::Report;

use crate::net::TAP;
use crate::run::Run;
use at_hand::AtHand;
use console::Started;
use disk::Disk;
use lent::Lent;
use net::Net;
use rdma::Rdma;
use vmm::Vmm;

/// How often each backend is killed.
const KILLS: u32 = 3;

/// All feature bits that a device must have, as every device here has them.
const VERSION_1: u64 = 1 << 32;

/// A device of the VM, and who serves it.
trait Part {
    /// What its backend is called.
    fn name(&self) -> &'static str;

    /// Its words on the VMM's command line.
    fn words(&self) -> Vec<OsString>;

    /// Looks at what the VMM, the backend and the guest have agreed on.
    ///
    /// # Errors
    /// It is not what this device must have.
    fn agreed(&self, devices: &[Started]) -> Result<String>;

    /// The VM does not run.
    ///
    /// # Errors
    /// What is done to it meanwhile fails.
    fn paused(&mut self) -> Result<()> {
        Ok(())
    }

    /// The VM runs again, or was booted anew: what the device kept is there.
    ///
    /// # Errors
    /// It is not.
    fn kept(&mut self, vmm: &mut Vmm) -> Result<()>;

    /// Uses the device, and checks what comes of it on both sides.
    ///
    /// # Errors
    /// Something else comes of it.
    fn works(&mut self, vmm: &mut Vmm) -> Result<()>;

    /// Kills the backend with something under way, starts the next one where the VMM connects to
    /// it, and checks what becomes of that.
    ///
    /// # Errors
    /// Something else becomes of it.
    fn kill(&mut self, vmm: &mut Vmm) -> Result<String>;

    /// Ends its backends, which have nothing to complain of.
    ///
    /// # Errors
    /// They have.
    fn end(self: Box<Self>) -> Result<()>;
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let at_hand = AtHand::find(run)?;
    let network = Network::of_this_machine(run.logs())?;
    network.tap(TAP, true)?;
    let mut parts: Vec<Box<dyn Part + '_>> = vec![
        Box::new(Disk::new(run)?),
        Box::new(Rdma::new(run)?),
        Box::new(Net::new(run, &network)?),
        Box::new(Lent::new(run)?),
    ];
    let words: Vec<OsString> = parts.iter().flat_map(|part| part.words()).collect();
    let mut vmm = Vmm::boot(run, &at_hand, "vm", &words)?;
    let mut rounds = Rounds {
        version: at_hand.version,
        report,
    };
    rounds.round("started, in use", || {
        let mut agreed = Vec::new();
        for part in &mut parts {
            let name = part.name();
            agreed.push(part.agreed(vmm.devices()).context(name)?);
            part.works(&mut vmm).context(name)?;
        }
        Ok(agreed.join("; "))
    })?;
    rounds.round("paused and resumed, in use", || {
        vmm.pause()?;
        for part in &mut parts {
            part.paused()?;
        }
        vmm.resume()?;
        still_works(&mut parts, &mut vmm)
    })?;
    rounds.round("booted anew by its guest, in use", || {
        vmm.reboot()?;
        still_works(&mut parts, &mut vmm)
    })?;
    for part in &mut parts {
        let name = part.name();
        let mut became = String::new();
        for _ in 0..KILLS {
            became = part.kill(&mut vmm).context(name)?;
        }
        rounds.add(&format!("{name} killed"), &became);
    }
    rounds.round("in use after that", || still_works(&mut parts, &mut vmm))?;
    vmm.end()?;
    for part in parts {
        let name = part.name();
        part.end().context(name)?;
    }
    Ok(())
}

/// Each device has what it had, and works.
fn still_works(parts: &mut [Box<dyn Part + '_>], vmm: &mut Vmm) -> Result<String> {
    for part in &mut *parts {
        let name = part.name();
        part.agreed(vmm.devices()).context(name)?;
        part.kept(vmm).context(name)?;
    }
    for part in parts {
        let name = part.name();
        part.works(vmm).context(name)?;
    }
    Ok("what was there before is there, and is written anew".into())
}

/// What is told of the rounds.
struct Rounds<'r> {
    version: String,
    report: &'r mut Report,
}

impl Rounds<'_> {
    fn round(&mut self, what: &str, round: impl FnOnce() -> Result<String>) -> Result<()> {
        let begin = Instant::now();
        let figure = round().with_context(|| format!("The VM: {what}"))?;
        let took = begin.elapsed().as_secs_f32();
        progress::note(&format!("the VM: {what}: {took:.1} s"));
        self.add(what, &figure);
        Ok(())
    }

    fn add(&mut self, what: &str, figure: &str) {
        self.report.add(self.version.as_str(), what, figure);
    }
}

/// The device of a kind, which must have all these features. It is told as it is shown.
fn one_with(devices: &[Started], kind: &str, queues: u32, features: u64) -> Result<String> {
    let mut found = devices.iter().filter(|device| device.kind == kind);
    let device = found.next();
    let device = device.with_context(|| format!("The guest has no {kind} among {devices:?}"))?;
    ensure!(
        found.next().is_none() && device.queues == queues,
        "The guest has {devices:?}"
    );
    let missing = (VERSION_1 | features) & !device.features;
    ensure!(
        missing == 0,
        "{kind} has features {:#x}, and not {missing:#x}",
        device.features
    );
    Ok(format!("features {:#x}", device.features))
}
