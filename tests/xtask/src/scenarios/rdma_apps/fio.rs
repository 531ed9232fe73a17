//! fio's `rdma` engine: writes, reads, and messages, of which the receiver looks at each block.

use anyhow::Result;
use farlane_kit::report::Report;

use crate::conditions::wait_until;
use crate::tools::{Ends, Program};

/// Blocks of 64 KiB that each run moves.
const BLOCKS: u64 = 64;
const BYTES: u64 = BLOCKS * 65_536;

/// What the client has the device do, and what both ends are told besides.
const VERBS: [(&str, &str); 3] = [
    ("write", ""),
    ("read", ""),
    ("send", "--verify=crc32c --verify_fatal=1"),
];

/// Runs it: `fio` is what a shell is told to begin it, `listens` says whether a server listens by
/// the connection manager, and `moved` how many bytes the daemon has moved.
pub fn run(
    ends: Ends<'_>,
    fio: &str,
    listens: &dyn Fn() -> Result<bool>,
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
        wait_until("the server before is over", || Ok(!listens()?))?;
        super::over_device(moved, &line, BYTES, || {
            program.run_where(ends.server, ends.client, &|_| listens())
        })?;
        report.tell(ends.name, line, "done");
    }
    Ok(())
}
