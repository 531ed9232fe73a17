//! A software GPU that another process lends: a guest uses all of it from user space, it is taken
//! away while it works, and the next guest finds nothing in its memory.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use serde_json::Value;

use crate::conditions::{no_complaint, wait_until};
use crate::lending::{Device, Lender, gpu_programs};
use crate::run::Run;

const GPU: &str = "gpu0";
const MEMORY_MIB: u32 = 64;

/// A file whose contents go to video memory and back, and the largest piece of it at a time.
const FILE_BYTES: u32 = 16 << 20;
const LARGEST: u32 = (1 << 20) + 513;

/// How long a program may take to begin, or to notice that its GPU is gone.
const PATIENCE: Duration = Duration::from_secs(60);

/// For large memory to be plugged in: QEMU reserves the last addresses of its emulated processor,
/// as an AMD processor's, and its firmware places them there.
const PLUG_MEMORY: [&str; 1] = ["pci=no_e820"];

/// Patterns that lie in the log at known places: at chunks' and pages' borders among others.
const LOG_BYTES: usize = (3 << 20) + 77;
const CHUNK_BYTES: usize = 1 << 20;
const PLANTED: &[(usize, &str)] = &[
    (0, "10.0.0.7"),
    (4093, "10.0.0.70"),
    (CHUNK_BYTES - 3, "fe80::7"),
    (2 * CHUNK_BYTES, "10.0.0.7"),
    (LOG_BYTES - 7, "fe80::7"),
];

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let files = gpu_programs(run.context.workspace())?;
    let lending = run.context.lending()?;
    let lender = lending.lender(run, "lender", &[Device::gpu(GPU, MEMORY_MIB)])?;
    let borrower = |name| lending.borrower(run, name, &lender, GPU);
    let borrowers = [borrower("a")?, borrower("b")?];
    let [a, b] = run.boot([
        VmConfig::new("a")
            .vfio_user(GPU, borrowers[0].socket())
            .files(files.clone()),
        VmConfig::new("b")
            .vfio_user_port(GPU)
            .kernel_arguments(PLUG_MEMORY)
            .files(files),
    ])?;
    let mut say = |what: &str, figure: &str| {
        report.tell("lent GPU", what, figure);
    };

    find(&a)?;
    lender.wait_held(GPU, a.name())?;
    let table = lender.table()?;
    println!("{table}");
    ensure!(
        table.contains("Software GPU with 64 MiB"),
        "`farlane-lend list` does not say what it is"
    );
    let tested = gpu_io(&a, "self-test --dma")?;
    say("all operations against the processor", &tested);
    say("log_scan of a planted file", &log_scan(&a)?);
    say(
        "all of video memory filled and checked",
        &gpu_io(&a, "fill")?,
    );

    let made = format!("make /tmp/file --seed 9 --bytes {FILE_BYTES}");
    a.run(&format!("gpu_io {made}"))?;
    for matrix in ["read-matrix", "write-matrix"] {
        let words = format!("{matrix} /tmp/file --seed 9 --max {LARGEST}");
        say(
            &format!("{matrix} without the library"),
            &gpu_io(&a, &words)?,
        );
    }
    gpu_io(&a, "check /tmp/file --seed 9")?;

    taken_away(&a, &lender)?;
    say(
        "unplugged while it searched",
        "the program ends, the GPU is on offer",
    );

    b.plug_vfio_user(GPU, borrowers[1].socket())?;
    find(&b)?;
    lender.wait_held(GPU, b.name())?;
    say("video memory in the next VM", &gpu_io(&b, "is-zero")?);
    gpu_io(&b, "fill")?;
    // The same VM, after a reset of the function.
    b.run(&format!("echo 1 >/sys/bus/pci/devices/{}/reset", find(&b)?))?;
    say("video memory after a reset", &gpu_io(&b, "is-zero")?);
    gpu_io(&b, "self-test")?;
    for guest in [&a, &b] {
        no_complaint(guest)?;
    }
    drop((a, b));
    for borrower in borrowers {
        borrower.stop()?;
    }
    lender.stop()
}

/// The device's address in a guest.
fn find(guest: &Guest) -> Result<String> {
    let line = "for d in /sys/bus/pci/devices/*; do \
         [ $(cat $d/vendor):$(cat $d/device) = 0x1234:0xfa9b ] && echo ${d##*/}; done; true";
    let mut found = String::new();
    wait_until("the GPU is there", || {
        found = guest.run(line)?.trim().to_owned();
        Ok(!found.is_empty())
    })
    .map_err(|error| error.context(format!("In guest {}", guest.name())))?;
    Ok(found)
}

/// Runs `gpu_io`; says what it tried.
fn gpu_io(guest: &Guest, words: &str) -> Result<String> {
    let text = guest.run(&format!("gpu_io {words}"))?;
    let line = text.lines().last().unwrap_or_default();
    let report: Value =
        serde_json::from_str(line).with_context(|| format!("`gpu_io {words}` said:\n{text}"))?;
    let number = |name: &str| {
        let value = report[name].as_u64();
        value.with_context(|| format!("No {name} in {line}"))
    };
    ensure!(number("checks")? > 0, "`gpu_io {words}` has tried nothing");
    Ok(format!(
        "{} checks, {} KiB",
        number("checks")?,
        number("bytes")? >> 10
    ))
}

/// Finds what was planted in a file, and nothing else.
fn log_scan(guest: &Guest) -> Result<String> {
    let mut log: Vec<u8> = b"an ordinary line of a log\n"
        .iter()
        .copied()
        .cycle()
        .take(LOG_BYTES)
        .collect();
    let mut should = Vec::new();
    for &(at, text) in PLANTED {
        log[at..at + text.len()].copy_from_slice(text.as_bytes());
        // The longer pattern contains the shorter one.
        if text == "10.0.0.70" {
            should.push(format!("{at}\t10.0.0.7"));
        }
        should.push(format!("{at}\t{text}"));
    }
    guest.write_file("/tmp/log", 0o644, &log)?;
    guest.write_file(
        "/tmp/patterns",
        0o644,
        b"10.0.0.7\n10.0.0.70\nfe80::7\nabsent\n",
    )?;
    let found = guest.run(&format!(
        "log_scan /tmp/log /tmp/patterns --chunk {CHUNK_BYTES}"
    ))?;
    let found: Vec<&str> = found.lines().collect();
    ensure!(found == should, "log_scan has found:\n{found:#?}");
    Ok(format!("{} occurrences, all of them", found.len()))
}

/// Unplugs the device while a program has it search. The program ends with an error, and the device
/// is on offer.
fn taken_away(guest: &Guest, lender: &Lender) -> Result<()> {
    let searching = guest.spawn("gpu_io search 2>&1; echo ended: $?")?;
    searching.wait_output(PATIENCE, |text| text.contains("searching"))?;
    guest.unplug(GPU)?;
    lender.wait_offered(GPU)?;
    let output = searching.wait(PATIENCE)?;
    let said = output.stdout;
    ensure!(
        said.contains("ended: ") && !said.contains("ended: 0"),
        "The search that had lost its GPU said {said:?}"
    );
    Ok(())
}
