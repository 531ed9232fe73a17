//! A volume that is moved while a program reads and writes a file on it: from one place to another,
//! which is encrypted, and back to a third.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Job;

use super::{FILE, FILE_BYTES, FROM_GPU, Machine, PLAIN};
use crate::conditions::{PATIENCE, wait_until};
use crate::gpu_machine::{PROGRAM_TIMEOUT, drop_caches};

/// What the volume is, in sectors, and how far from the begin of the disk it lies in the end.
const SECTORS: u32 = 16 << 11;
const THIRD_PLACE: u32 = 2 * SECTORS;

/// What tells the program that it is to end.
const END: &str = "/tmp/end";

/// A volume of LVM as it is told from others: by the UUID of its device.
const MAKE: &str = "modprobe dm_mod && rm -f /tmp/end && \
    dmsetup create top --uuid LVM-$(printf 'v%.0s' $(seq 64)) --table \"0 $sectors linear $large \
    0\" && \
    mkfs.ext4 -q -F -b 4096 /dev/mapper/top && mount -t ext4 /dev/mapper/top /mnt && mkdir /mnt/d";

/// Suspends the volume, copies what it is made of to an encrypted place, and goes on there.
const ENCRYPT: &str = "key=00112233445566778899aabbccddeeff0123456789abcdeffedcba9876543210 && \
    modprobe dm_crypt && modprobe xts && \
    dmsetup create below --table \"0 $sectors crypt aes-xts-plain64 $key 0 $small 0\" && dmsetup \
    suspend top && \
    dd if=$large of=/dev/mapper/below iflag=direct oflag=direct bs=1M count=$((sectors / 2048)) \
    status=none && \
    dmsetup load top --table \"0 $sectors linear /dev/mapper/below 0\" && dmsetup resume top";

/// The same to a place that is not encrypted.
const DECRYPT: &str = "dmsetup suspend top && \
    dd if=/dev/mapper/below of=$large iflag=direct oflag=direct bs=1M seek=$((place / 2048)) \
    status=none && \
    dmsetup load top --table \"0 $sectors linear $large $place\" && dmsetup resume top && dmsetup \
    remove below";

/// Has a program move a file to and fro while the volume beneath it changes.
pub fn run(machine: &Machine<'_>) -> Result<()> {
    let volume = |line: &str| {
        let numbers = format!("sectors={SECTORS}; place={THIRD_PLACE}");
        machine.shell(&format!("{numbers}; {line}"))
    };
    volume(MAKE)?;
    machine.shell(&format!(
        "gpu_io make {FILE} --seed {PLAIN} --bytes {FILE_BYTES}"
    ))?;
    drop_caches(machine.guest)?;
    let program = machine.guest.spawn(&format!(
        "FARLANE_IO=p2p FARLANE_IO_STATS=1 farlane-run --io gpu_io keep-on {FILE} --seed {PLAIN} \
         --to {FROM_GPU} --bytes {FILE_BYTES} --end {END}"
    ))?;
    wait_until("a program tunnels both ways", || {
        ensure!(!program.has_ended(), "It said:\n{}", program.so_far());
        Ok(machine.backends.tunnelled()?.iter().all(|bytes| *bytes > 0))
    })?;
    volume(ENCRYPT).context("To an encrypted place")?;
    // The first one may have been under way.
    goes_on(&program)?;
    let before = machine.backends.tunnelled()?;
    goes_on(&program)?;
    let after = machine.backends.tunnelled()?;
    ensure!(
        before == after,
        "Tunnels over dm-crypt: {before:?}, {after:?}"
    );
    volume(DECRYPT).context("Back from an encrypted place")?;
    goes_on(&program)?;
    machine.shell(&format!("touch {END}"))?;
    let output = program.wait(PROGRAM_TIMEOUT)?;
    output.check("The program")?;
    drop_caches(machine.guest)?;
    machine.shell(&format!("gpu_io check {FILE} --seed {PLAIN}"))?;
    drop_caches(machine.guest)?;
    machine
        .rewrite(PLAIN, FILE_BYTES)
        .context("After all of it")?;
    volume("off_top && dmsetup remove top")
}

/// The program has begun, and ended, a round or two since.
fn goes_on(program: &Job<'_>) -> Result<()> {
    let rounds = |said: &str| said.lines().count();
    let before = rounds(&program.so_far());
    program.wait_output(PATIENCE, |said| rounds(said) >= before + 2)
}
