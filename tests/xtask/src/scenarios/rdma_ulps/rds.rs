//! Reliable datagram sockets: `tests/xtask/guest/rds_talk.c`, as Debian has no rds-tools.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::report::Report;

use crate::conditions::PATIENCE;
use crate::stock::Stock;
use crate::tools::TOOL_TIMEOUT;

/// Where the program is in guests.
pub const PROGRAM: &str = "usr/bin/rds_talk";

const PORT: u16 = 4000;
/// How many messages of each size.
const MESSAGES: u32 = 20;

pub fn run(stock: &Stock<'_>, report: &mut Report) -> Result<()> {
    let (server, client) = (&stock.a, &stock.b);
    let (from, to) = (server.address()?, client.address()?);
    for guest in [server, client] {
        guest.run("modprobe rds_rdma && ! grep -q ^rds_tcp /proc/modules")?;
    }
    let before = stock.moved()?;
    let serving = server.spawn(&format!("rds_talk serve {from} {PORT}"))?;
    serving.wait_output(PATIENCE, |text| text.contains("ready"))?;
    let line = format!("rds_talk ask {to} {from} {PORT} {MESSAGES}");
    let asked = client.spawn(&line)?.wait(TOOL_TIMEOUT)?;
    let said = asked.all();
    ensure!(
        asked.success() && !serving.has_ended(),
        "`{line}`: {} {said}\nThe server said:\n{}",
        asked.how(),
        serving.so_far()
    );
    serving.signal(9)?;
    serving.wait(TOOL_TIMEOUT)?;
    let moved = stock.moved()? - before;
    let number = |what: &str| -> Result<u64> {
        let (_, rest) = said.split_once(what).with_context(|| said.clone())?;
        let digits = rest
            .trim_start()
            .split(|c: char| !c.is_ascii_digit())
            .next();
        Ok(digits.unwrap_or_default().parse()?)
    };
    let (messages, bytes, by_rdma) = (number("messages")?, number("bytes")?, number("by RDMA")?);
    ensure!(
        by_rdma > 0 && moved >= bytes + by_rdma,
        "{said}, and the daemon has moved {moved} bytes"
    );
    report.tell(
        "RDS",
        format!("{messages} messages and their answers"),
        format!("{bytes} bytes in them, {by_rdma} by RDMA"),
    );
    Ok(())
}
