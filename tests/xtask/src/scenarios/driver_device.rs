//! Device memory of a process at the guest driver: what is refused, and that the backend lets go of
//! it before it goes.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_abi::config::FEATURE_TUNNEL;
use farlane_kit::driver;
use farlane_kit::guest::{Guest, Job};
use farlane_kit::guest_root::GuestFile;
use farlane_kit::qemu::{FARLANE_DEVICE, VmConfig};
use farlane_kit::recorder::{self, Detaching, Event, Recorder};
use farlane_kit::report::Report;

use crate::conditions::no_complaint;
use crate::run::Run;

/// The devices whose BARs are mapped; the first one is unplugged in the end.
const BARS: [&str; 2] = ["bar", "other"];
const BAR_BYTES: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// A device that has no memory of anybody's.
const BYSTANDER: &str = "bystander";

/// The program in the guest.
const PROGRAM: &str = "/usr/bin/device_memory";

/// Regions of the program that has several, of as many pages.
const PARTS: u64 = 4;

/// The driver.
const DRIVER: &str = "/sys/bus/virtio/drivers/farlane";

/// The SIGKILL and SIGTERM of a job.
const KILL: u8 = 9;
const TERM: u8 = 15;

/// How long a step may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A guest with two Farlane devices and two devices with memory.
struct Machine<'a> {
    guest: &'a Guest,
    backend: &'a Recorder,
    /// The node of the device that tunnels, and of the other one.
    node: String,
    plain: String,
    /// The folder of the first device with memory, and of the second.
    bars: [String; 2],
    /// Where the first one's memory is.
    base: u64,
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let sockets = [run.path("tunnel"), run.path("plain")];
    let workspace = run.context.workspace();
    workspace.build(&["farlane-attacks"])?;
    let recorder = workspace.built(recorder::PROGRAM)?;
    let backend = Recorder::listen(&recorder, &sockets[0], FEATURE_TUNNEL)?;
    let plain = Recorder::listen(&recorder, &sockets[1], 0)?;
    let mut config = VmConfig::new("a").farlane(&sockets[0]).files(files(run)?);
    config.cpus = 2;
    let mut qemu = |device: &str, words: String| {
        let words = [device.to_owned(), words];
        config.qemu_arguments.extend(words);
    };
    for (number, bar) in BARS.iter().enumerate() {
        let slot = 100 + number;
        qemu(
            "-object",
            format!("memory-backend-memfd,id={bar}-memory,size={BAR_BYTES},share=on"),
        );
        qemu(
            "-device",
            format!("pcie-root-port,id={bar}-port,chassis={slot},slot={slot}"),
        );
        qemu(
            "-device",
            format!("ivshmem-plain,id={bar},memdev={bar}-memory,bus={bar}-port"),
        );
    }
    qemu(
        "-device",
        format!("pcie-root-port,id={BYSTANDER}-port,chassis=110,slot=110"),
    );
    qemu(
        "-device",
        format!("virtio-rng-pci,id={BYSTANDER},bus={BYSTANDER}-port"),
    );
    qemu(
        "-chardev",
        format!("socket,id=plain,path={}", sockets[1].display()),
    );
    qemu(
        "-device",
        "vhost-user-test-device-pci,chardev=plain,virtio-id=38,num_vqs=3,config_size=64".into(),
    );
    let [guest] = run.boot([config])?;
    let machine = Machine::new(&guest, &backend)?;

    machine.program("unsupported", &machine.plain, "")?;
    let said = plain.take_to_close()?;
    ensure!(
        said.contains(&Event::Pin { region: 0 }) && !said.iter().any(is_device),
        "A backend that does not tunnel was told {said:?}"
    );
    machine.refusals()?;
    machine.life()?;
    let rounds = machine.race()?;
    machine.waits()?;
    machine.asks_again()?;
    machine.killed()?;
    machine.unplugged()?;
    machine.unbound()?;
    no_complaint(&guest)?;
    machine.refused()?;
    no_complaint(&guest)?;
    report.add(
        "guest driver",
        "device memory registered while it is mapped and unmapped",
        rounds,
    );
    Ok(())
}

/// The driver and the program.
fn files(run: &Run<'_>) -> Result<[GuestFile; 2]> {
    let (workspace, kit) = (run.context.workspace(), run.context.kit()?);
    let program = run.guest_program_with("device_memory", "guest-driver", &[])?;
    Ok([
        GuestFile::new(
            driver::build(workspace, kit.kernel_tree())?.path,
            "usr/lib/farlane/farlane.ko",
        ),
        GuestFile::new(program, PROGRAM.trim_start_matches('/')),
    ])
}

fn is_device(event: &Event) -> bool {
    matches!(event, Event::Device { .. })
}

impl<'a> Machine<'a> {
    fn new(guest: &'a Guest, backend: &'a Recorder) -> Result<Self> {
        let mut nodes = [String::new(), String::new()];
        for node in ["/dev/farlane0", "/dev/farlane1"] {
            let features = guest.run(&format!("{PROGRAM} features {node}"))?;
            let features: u32 = features.trim().parse().context("No features")?;
            node.clone_into(&mut nodes[usize::from(features & FEATURE_TUNNEL == 0)]);
        }
        let [node, plain] = nodes;
        ensure!(
            !node.is_empty() && !plain.is_empty(),
            "Both devices are of a kind"
        );
        backend.take_to_close()?;
        // In the order of their ports.
        let found = guest.run("lspci -D -n -d 1af4:1110 | cut -d ' ' -f 1")?;
        let mut folders = found
            .lines()
            .map(|function| format!("/sys/bus/pci/devices/{function}"));
        let (Some(first), Some(second)) = (folders.next(), folders.next()) else {
            anyhow::bail!("The guest has not found two devices with memory:\n{found}");
        };
        let bars = [first, second];
        for bar in &bars {
            guest.run(&format!("echo 1 >{bar}/enable"))?;
        }
        let resources = guest.run(&format!("cat {}/resource", bars[0]))?;
        let base = resources
            .lines()
            .nth(2)
            .and_then(|line| line.split_whitespace().next()?.strip_prefix("0x"))
            .context("The device has no BAR 2")?;
        Ok(Self {
            guest,
            backend,
            node,
            plain,
            base: u64::from_str_radix(base, 16).context("A BAR's address is no number")?,
            bars,
        })
    }

    fn line(&self, what: &str, node: &str, more: &str) -> String {
        format!("{PROGRAM} {what} {node} {}/resource2 {more}", self.bars[0])
    }

    /// Runs the program to its end.
    fn program(&self, what: &str, node: &str, more: &str) -> Result<String> {
        self.guest.run(&self.line(what, node, more))
    }

    /// Starts the program, to the point where it has told the backend of the device memory.
    fn start(&self, what: &str) -> Result<Job<'_>> {
        let job = self.guest.spawn(&self.line(what, &self.node, ""))?;
        self.backend
            .wait("device memory is registered", is_device)?;
        Ok(job)
    }

    /// A region of pages of the BAR.
    fn device(&self, region: u32, writable: bool, runs: &[(u64, u64)]) -> Event {
        let runs = runs.iter();
        let runs = runs.map(|(page, pages)| (self.base + page * PAGE, pages * PAGE));
        Event::Device {
            region,
            writable,
            runs: runs.collect(),
        }
    }

    /// What is not one BAR the backend never hears of.
    fn refusals(&self) -> Result<()> {
        let more = format!("{0}/resource2 {0}/resource0", self.bars[1]);
        self.program("refusals", &self.node, &more)?;
        let said = self.backend.take_to_close()?;
        let phony = |event: &&Event| matches!(event, Event::Phony { bytes: PAGE, .. });
        ensure!(
            said.iter().filter(|event| is_device(event)).count() == 3
                && said.iter().filter(phony).count() == 1,
            "Three pieces of device memory and a phony page were registered, but the backend was \
             told {said:?}"
        );
        Ok(())
    }

    /// Each step of the program's story, as the backend sees it.
    fn life(&self) -> Result<()> {
        self.program("life", &self.node, "")?;
        let mut said = self.backend.take_to_close()?;
        let detach = |region| Event::Detach { region };
        let mark = |region| [Event::Pin { region }, detach(region)];
        let first = [
            Event::Open,
            Event::Segment {
                region: 0,
                bytes: 0x18000,
            },
            self.device(1, true, &[(1, 2)]),
            self.device(2, false, &[(1, 2)]),
            // A page is unmapped that both have.
            detach(1),
            detach(2),
        ];
        // In which order they go is not said.
        if let Some(gone) = said.get_mut(4..6) {
            gone.sort();
        }
        let mut wanted = first.to_vec();
        wanted.extend(mark(3));
        wanted.extend([
            self.device(1, true, &[(3, 1), (5, 1)]),
            self.device(2, true, &[(6, 3)]),
        ]);
        // The child, and clear_refs.
        wanted.extend(mark(3));
        // Protected.
        wanted.push(detach(2));
        wanted.extend(mark(3));
        // Moved.
        wanted.push(detach(1));
        wanted.extend(mark(3));
        wanted.extend([
            self.device(1, true, &[(10, 1)]),
            detach(1),
            self.device(1, false, &[(0, 16)]),
            // The process ends.
            detach(1),
            Event::Close,
        ]);
        ensure!(
            said == wanted,
            "The backend was told\n{said:#x?}\nnot\n{wanted:#x?}"
        );
        Ok(())
    }

    /// Whatever the backend is told of has been taken back.
    fn race(&self) -> Result<String> {
        let rounds = self.program("race", &self.node, "")?;
        let said = self.backend.take_to_close()?;
        let mut known = None;
        for event in &said {
            known = match (event, known) {
                (Event::Device { region, runs, .. }, None) => {
                    let right = [0, 4].map(|page| (self.base + page * PAGE, 4 * PAGE));
                    ensure!(
                        runs.len() == 1 && right.contains(&runs[0]),
                        "No mapping was {runs:#x?}"
                    );
                    Some(*region)
                }
                (Event::Detach { region }, Some(known)) if *region == known => None,
                (Event::Open | Event::Close, None) => None,
                _ => anyhow::bail!("The backend was told {event:?} in:\n{said:?}"),
            };
        }
        Ok(format!("{} times", rounds.trim()))
    }

    /// Memory is not unmapped before the backend has let go.
    fn waits(&self) -> Result<()> {
        self.backend.set_detaching(Detaching::Held)?;
        let job = self.start("unmap")?;
        self.backend.wait("the region is to go", |event| {
            matches!(event, Event::Detach { .. })
        })?;
        let said = job.so_far();
        self.backend.set_detaching(Detaching::Done)?;
        ensure!(said.is_empty(), "Memory was unmapped that is in use");
        let output = job.wait(PATIENCE)?;
        output.check("unmap")?;
        self.backend.take_to_close()?;
        Ok(())
    }

    /// A backend that cannot let go yet is asked until it does.
    fn asks_again(&self) -> Result<()> {
        self.backend.set_detaching(Detaching::Later)?;
        let job = self.start("unmap")?;
        let is_detach = |event: &Event| matches!(event, Event::Detach { .. });
        self.backend
            .wait_times(3, "the region is to go", is_detach)?;
        let said = job.so_far();
        ensure!(said.is_empty(), "Memory was unmapped that is in use");
        // Another device goes meanwhile.
        self.guest.unplug(BYSTANDER)?;
        self.backend.set_detaching(Detaching::Done)?;
        let output = job.wait(PATIENCE)?;
        output.check("unmap")?;
        self.backend.take_to_close()?;
        // The end of a process.
        self.backend.set_detaching(Detaching::Later)?;
        let job = self
            .guest
            .spawn(&format!("{PROGRAM} features {}", self.node))?;
        let is_close = |event: &Event| *event == Event::Close;
        self.backend
            .wait_times(3, "the context is to go", is_close)?;
        ensure!(!job.has_ended(), "A context has gone that is in use");
        self.backend.set_detaching(Detaching::Done)?;
        let output = job.wait(PATIENCE)?;
        output.check("features")?;
        let said = self.backend.take()?;
        ensure!(
            said.last() == Some(&Event::Close),
            "The backend was told {said:?}"
        );
        Ok(())
    }

    /// A process that is killed.
    fn killed(&self) -> Result<()> {
        let job = self.start("wait")?;
        job.signal(KILL)?;
        let said = self.backend.take_to_close()?;
        let wanted = [
            Event::Open,
            self.device(0, true, &[(0, 16)]),
            Event::Detach { region: 0 },
            Event::Close,
        ];
        ensure!(said == wanted, "The backend was told {said:?}");
        Ok(())
    }

    /// A device that goes.
    fn unplugged(&self) -> Result<()> {
        let job = self.start("parts")?;
        job.wait_output(PATIENCE, |text| text.contains("pinned"))?;
        self.backend.take()?;
        self.backend.set_detaching(Detaching::Later)?;
        std::thread::scope(|scope| {
            let unplug = scope.spawn(|| self.guest.unplug(BARS[0]));
            let asked = self.each_is_asked();
            let waits = !unplug.is_finished();
            self.backend.set_detaching(Detaching::Done)?;
            let unplugged = unplug
                .join()
                .map_err(|_| anyhow::anyhow!("A thread has panicked"))?;
            asked?;
            ensure!(waits, "A device has gone whose memory is in use");
            unplugged
        })?;
        self.backend.take()?;
        job.signal(TERM)?;
        let output = job.wait(PATIENCE)?;
        output.check("parts")?;
        let said = self.backend.take_to_close()?;
        ensure!(said == [Event::Close], "The backend was told {said:?}");
        Ok(())
    }

    /// A backend that is asked to let go of several regions, and cannot yet, is asked for each of
    /// them before it is asked again: nothing more begins in any.
    fn each_is_asked(&self) -> Result<()> {
        for part in 0..PARTS {
            let region = u32::try_from(part)?;
            self.backend.wait("each region is to go", |event| {
                *event == Event::Detach { region }
            })?;
        }
        let mut said = self.backend.take()?;
        said.truncate(usize::try_from(PARTS)?);
        said.sort();
        said.dedup();
        let detach = |event: &Event| matches!(event, Event::Detach { .. });
        ensure!(
            said.len() as u64 == PARTS && said.iter().all(detach),
            "The backend was told {said:?} at first"
        );
        Ok(())
    }

    /// The driver is unbound: device memory goes before the device is reset. The contexts stay,
    /// their processes live.
    fn unbound(&self) -> Result<()> {
        let line = |what| format!("{PROGRAM} {what} {} {}/resource2", self.node, self.bars[1]);
        let device = format!("basename $(readlink -f /sys/class/farlane/{}/device)", {
            self.node.trim_start_matches("/dev/")
        });
        let device = self.guest.run(&device)?;
        let device = device.trim();
        let job = self.guest.spawn(&line("parts"))?;
        job.wait_output(PATIENCE, |text| text.contains("pinned"))?;
        self.backend.take()?;
        self.backend.set_detaching(Detaching::Later)?;
        let unbind = self
            .guest
            .spawn(&format!("echo {device} >{DRIVER}/unbind && echo Unbound"))?;
        self.each_is_asked()?;
        // Who comes now has a context, too, and no device memory.
        let late = self.guest.spawn(&line("late"))?;
        late.wait_output(PATIENCE, |text| text.contains("refused"))?;
        ensure!(
            !unbind.has_ended(),
            "A device was reset whose memory is in use"
        );
        self.backend.set_detaching(Detaching::Done)?;
        let output = unbind.wait(PATIENCE)?;
        ensure!(
            output.stdout.contains("Unbound"),
            "Unbinding: {}",
            output.all()
        );
        let output = late.wait(PATIENCE)?;
        output.check("late")?;
        let said = self.backend.take()?;
        let opened = said.iter().position(|event| *event == Event::Open);
        let (before, after) = said.split_at(opened.unwrap_or(0));
        ensure!(
            opened.is_some() && !before.contains(&Event::Close) && !after.iter().any(is_device),
            "The backend was told {said:?}"
        );
        job.signal(KILL)?;
        job.wait(PATIENCE)?;
        self.guest.run(&format!("echo {device} >{DRIVER}/bind"))?;
        self.guest
            .run(&format!("{PROGRAM} features {}", self.node))?;
        self.backend.take_to_close()?;
        Ok(())
    }

    /// A backend that will not let go is not asked a second time.
    fn refused(&self) -> Result<()> {
        self.backend.set_detaching(Detaching::Refused)?;
        let line = format!(
            "{PROGRAM} unmap {} {}/resource2 dead",
            self.node, self.bars[1]
        );
        let said = self.guest.run(&line)?;
        ensure!(said.trim() == "unmapped", "unmap: {said}");
        let log = self.guest.run("dmesg")?;
        ensure!(
            log.contains("refused to let go of device memory"),
            "The kernel's log says: {log}"
        );
        self.guest.unplug(FARLANE_DEVICE)?;
        Ok(())
    }
}
