//! fio's `rdma` engine: writes, reads, and messages, of which the receiver looks at each block.

use anyhow::Result;
use farlane_kit::report::Report;

use super::Connecting;
use crate::tools::Program;

/// Blocks of 64 KiB that each run moves.
const BLOCKS: u64 = 64;
const BYTES: u64 = BLOCKS * 65_536;

/// What the client has the device do, and what both ends are told besides.
const VERBS: [(&str, &str); 3] = [
    ("write", ""),
    ("read", ""),
    ("send", "--verify=crc32c --verify_fatal=1"),
];

/// Runs it: `fio` is what a shell is told to begin it, and `moved` says how many bytes the daemon
/// has moved.
pub fn run(
    with: &Connecting<'_>,
    fio: &str,
    moved: &dyn Fn() -> Result<u64>,
    report: &mut Report,
) -> Result<()> {
    for (verb, check) in VERBS {
        let line = format!("fio --ioengine=rdma --verb={verb} {check}");
        let both = |port: u16| {
            format!("{fio} --ioengine=rdma --port={port} --bs=64k --size={BYTES} {check}")
        };
        // A receive request for each message: fio has none tried again where there is none.
        let program = Program {
            name: &line,
            serve: &|port| format!("{} --name=server --rw=read --iodepth={BLOCKS}", both(port)),
            ask: &|address, port| {
                format!(
                    "{} --name=client --rw=write --iodepth=16 --verb={verb} --hostname={address}",
                    both(port)
                )
            },
        };
        super::over_device(moved, &line, BYTES, || with.run(&program))?;
        report.tell(with.ends.name, line, "done");
    }
    Ok(())
}
