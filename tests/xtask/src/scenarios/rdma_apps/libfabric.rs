//! libfabric over its provider of verbs: `fi_pingpong`, which fails where it receives other bytes
//! (`-c`), over connections (msg) and over messages to anybody by way of them (rdm, `ofi_rxm`).

use anyhow::{Result, ensure};
use farlane_kit::report::Report;

use crate::tools::{Ends, Program};

/// Provider and kind of endpoint.
const ENDPOINTS: &[(&str, &str)] = &[("verbs", "msg"), ("verbs;ofi_rxm", "rdm")];

/// Round trips of each size, and all sizes that it goes through, together.
const ROUND_TRIPS: u64 = 5;
const SIZES: [&str; 6] = ["64", "256", "1k", "4k", "64k", "1m"];
const BYTES: u64 = 64 + 256 + 1024 + 4096 + 65_536 + 1_048_576;

/// Runs it: `fi_pingpong` is what a shell is told to begin it, and `moved` says how many bytes the
/// daemon has moved.
pub fn run(
    ends: Ends<'_>,
    fi_pingpong: &str,
    moved: &dyn Fn() -> Result<u64>,
    report: &mut Report,
) -> Result<()> {
    for (provider, endpoint) in ENDPOINTS {
        let options = format!("-p '{provider}' -e {endpoint} -c -I {ROUND_TRIPS}");
        let line = format!("fi_pingpong {options}");
        let program = Program {
            name: &line,
            serve: &|port| format!("{fi_pingpong} {options} -B {port}"),
            ask: &|address, port| format!("{fi_pingpong} {options} -P {port} {address}"),
        };
        let bytes = 2 * ROUND_TRIPS * BYTES;
        let talk = super::over_device(moved, &line, bytes, || {
            program.run(ends.server, ends.client)
        })?;
        for said in [&talk.served, &talk.asked] {
            ensure!(sizes(said) == SIZES, "`{line}` said:\n{said}");
        }
        report.tell(ends.name, line, "all sizes, every byte is right");
    }
    Ok(())
}

/// The sizes that it says it has gone through.
fn sizes(said: &str) -> Vec<&str> {
    let rows = said.lines().skip_while(|row| !row.starts_with("bytes "));
    rows.skip(1)
        .filter_map(|row| row.split_whitespace().next())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sizes_are_those_of_the_table() {
        let said = "warning\nbytes   #sent   #ack     total       time     MB/sec\n64      5    =5 \
                    1k  0.00s 0.83\n1k      5   =5    40k    0.00s    13.74\n";
        assert_eq!(sizes(said), ["64", "1k"]);
        assert!(sizes("no table").is_empty());
    }
}
