//! Programs that know nothing of the I/O library behave with it as they do without, byte for byte;
//! and one of them, told only that its buffers are a mapped file, which is the GPU's memory, has
//! its bytes moved past the page cache.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::{Guest, Output};
use farlane_kit::report::Report;

use crate::conditions::no_complaint;
use crate::gpu_machine::{PROGRAM_TIMEOUT, boot_mounted, drop_caches, run_with_library};
use crate::lending::Blocks;
use crate::run::Run;

const DISK_MIB: u32 = 192;

/// Has a log of 6 MiB and a data base with two indices made, without the library.
const MAKE: &str = "cd /mnt && sqlite3 :memory: \"with recursive n(i) as (select 1 union all \
                    select i + 1 from n where i < 150000) \
     select printf('entry %d from 10.0.%d.7: nothing to see', i, i % 256) from n\" >log && \
     sqlite3 db \"create table t(id integer primary key, name text, value real); \
     with recursive n(i) as (select 1 union all select i + 1 from n where i < 20000) \
     insert into t select i, printf('name %d', i * 7919 % 20000), i * 0.5 from n; \
     create index a on t(name); create index b on t(value);\" && cp /usr/lib/farlane/farlane.ko \
     module";

/// Programs that read. What they print, and how they end, must not depend on the library.
const READERS: &[&str] = &[
    "grep -n '12345 from' /mnt/log",
    "grep -c nothing /mnt/log /mnt/module /mnt/absent",
    "grep -r -l farlane /mnt",
    "sha256sum /mnt/log /mnt/db /mnt/module",
    "sh -c 'sha256sum </mnt/log; cat /mnt/module | sha256sum; head -c 100001 /mnt/log | tail -c \
     77'",
    "sqlite3 -readonly /mnt/db 'pragma integrity_check; select count(*), sum(value), max(name) \
     from t; select id from t where name = \"name 7\"'",
    "dd if=/mnt/log bs=4097 skip=3 count=50 status=none",
    "cmp /mnt/log /mnt/db",
    "dd if=/mnt/module iflag=direct bs=4096 count=2 status=none",
];

/// A program that changes a data base, which is then what it is to be.
const CHANGE: &str = "sqlite3 /mnt/COPY 'pragma journal_mode=JMODE; begin; update t set value = \
                      value + 1 where id % 3 = 0; commit; \
     begin; delete from t; rollback; insert into t values (999999, \"new\", 1.5); pragma \
     integrity_check; vacuum'";

/// Has fio write at random, read everything back, and check it.
const VERIFY: &str = "fio --name=job --rw=randwrite --bsrange=512-64k --size=8m --verify=crc32c \
                      --verify_fatal=1 \
     --randseed=7 --output-format=json";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = Blocks::new(DISK_MIB)?;
    let (backends, guest) = boot_mounted(run, &blocks)?;
    guest.run(MAKE)?;
    for line in READERS {
        drop_caches(&guest)?;
        same(&guest, line)?;
    }
    say(
        report,
        "grep, sha256sum, cmp, dd, sqlite3",
        "as without the library",
    );
    for mode in ["delete", "wal"] {
        changed_alike(&guest, mode)?;
    }
    say(
        report,
        "sqlite3, writing",
        "the data base is whole, and the same",
    );
    verified_alike(&guest)?;
    say(
        report,
        "fio --verify",
        "finds with what was written without, and the reverse",
    );

    let [before, _] = backends.tunnelled()?;
    let moved = in_gpu_memory(&guest)?;
    let [after, _] = backends.tunnelled()?;
    ensure!(
        moved > 0 && after - before >= moved,
        "{moved} bytes by P2P, as fio's library says, and {} tunnelled",
        after - before
    );
    let figure = format!("verified; {} KiB past the page cache", moved >> 10);
    say(report, "fio --iomem=mmapshared:.../resource2", &figure);
    guest.run("umount /mnt && fsck.ext4 -f -n /dev/vda")?;
    no_complaint(&guest)?;
    drop(guest);
    backends.stop()
}

fn say(report: &mut Report, what: &str, figure: &str) {
    report.tell("unmodified programs", what, figure);
}

fn exec(guest: &Guest, line: &str) -> Result<Output> {
    guest.spawn(line)?.wait(PROGRAM_TIMEOUT)
}

/// With the library a program says what it says without, and ends as it does.
fn same(guest: &Guest, line: &str) -> Result<()> {
    let plain = exec(guest, line)?;
    ensure!(!plain.all().is_empty(), "`{line}` says nothing");
    let ours = exec(guest, &format!("farlane-run --io {line}"))?;
    ensure!(
        (plain.how(), &plain.stdout, &plain.stderr) == (ours.how(), &ours.stdout, &ours.stderr),
        "`{line}` with the library: {}\n{}\nWithout: {}\n{}",
        ours.how(),
        ours.all(),
        plain.how(),
        plain.all()
    );
    Ok(())
}

/// Two copies of the data base, one changed with the library and one without, hold the same.
fn changed_alike(guest: &Guest, mode: &str) -> Result<()> {
    guest.run("cp /mnt/db /mnt/one && cp /mnt/db /mnt/two")?;
    let change = |copy: &str| CHANGE.replace("COPY", copy).replace("JMODE", mode);
    let plain = guest.run(&change("one"))?;
    let ours = guest.run(&format!("farlane-run --io {}", change("two")))?;
    ensure!(
        plain == ours && ours.contains("ok"),
        "Without: {plain}\nWith: {ours}"
    );
    let dump = |copy: &str| {
        guest.run(&format!(
            "sqlite3 /mnt/{copy} 'pragma integrity_check; select * from t' | sha256sum"
        ))
    };
    let (plain, ours) = (dump("one")?, dump("two")?);
    ensure!(plain == ours, "The data bases differ: journal mode {mode}");
    guest.run("rm /mnt/one* /mnt/two*")?;
    Ok(())
}

/// What fio writes with the library it finds again without, and the reverse. (The files themselves
/// differ: fio puts the time in.)
fn verified_alike(guest: &Guest) -> Result<()> {
    for engine in ["psync", "pvsync2", "sync"] {
        for (write, check) in [("farlane-run --io ", ""), ("", "farlane-run --io ")] {
            let line = format!("{VERIFY} --ioengine={engine} --filename=/mnt/verified");
            guest.run(&format!("{write}{line}"))?;
            drop_caches(guest)?;
            guest
                .run(&format!(
                    "{check}{line} --verify_only=1 && rm /mnt/verified"
                ))
                .with_context(|| format!("fio --ioengine={engine}, written by `{write}fio`"))?;
        }
    }
    Ok(())
}

/// fio with its buffers in the GPU's memory; returns the bytes that were read by P2P.
fn in_gpu_memory(guest: &Guest) -> Result<u64> {
    let find = "for d in /sys/bus/pci/devices/*; do \
                [ \"$(cat $d/vendor $d/device | tr -d '\\n')\" = 0x12340xfa9b ] && echo $d; done; \
                true";
    let device = guest.run(find)?;
    let device = device.trim();
    ensure!(!device.is_empty(), "The guest has no GPU");
    guest.run(&format!("echo 1 >{device}/enable"))?;
    let fio = |words: &str| {
        format!(
            "fio --name=job --thread --filename=/mnt/gpu --size=8m --ioengine=psync \
             --verify=crc32c --verify_fatal=1 \
             --randseed=7 --iomem=mmapshared:{device}/resource2 {words}"
        )
    };
    // The CPU writes through the page cache, fio checks what comes back by P2P.
    run_with_library(guest, "cache", &fio("--rw=write --bs=64k --do_verify=0"))?;
    drop_caches(guest)?;
    let (_, ways) = run_with_library(guest, "p2p", &fio("--rw=read --bs=64k"))?;
    ensure!(ways.p2p >= 8 << 20, "Read into GPU memory: {ways:?}");
    let (_, free) = run_with_library(guest, "auto", &fio("--rw=randwrite --bs=16k"))?;
    ensure!(
        free.p2p + free.cache + free.read_ahead >= 16 << 20,
        "{free:?}"
    );
    Ok(ways.p2p)
}
