//! The interface: streams and pings go on.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::interfaces::Server;
use farlane_kit::network::Network;
use farlane_kit::numa::Numa;
use farlane_kit::progress;
use farlane_kit::report::Report;

use crate::capture::Captures;
use crate::conditions::{no_complaint, wait_until};
use crate::net::{At, GUEST, NetBackend, config, connect, network, socket};
use crate::numa::backend_words;
use crate::order::Order;
use crate::run::Run;
use crate::scenarios::octo_net::Flow;

/// How often the backend is killed.
const KILLS: u32 = 4;

/// So many bytes show that a stream flows.
const FLOWING: u64 = 4 << 20;

/// The streams: to the guest, and from it. Not one iperf3 with `--bidir`: its server tells its two
/// connections apart by the order in which it accepts them, and connections that come through
/// different queues have no order. Where it is mistaken, both its ends write into the one
/// connection that both do not read, until the windows are closed.
const STREAMS: [&str; 2] = ["-b 300M", "-b 300M -R"];

/// Entries of the guest's transmit queues, both together: so many frames at most were sent and not
/// yet shown to the guest as sent when the backend was killed, and are sent again by the next one.
const SENT_TWICE: u64 = 2 * 256;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let network = network(run)?;
    let numa = Numa::pair(512);
    let words = backend_words(run, &numa)?;
    let mut backend = run.context.nets()?.serve(run, &network, 2, &words)?;
    let [guest] = run.boot([config("net", Server::VhostUser(socket(run)), 2).numa(numa)])?;
    connect(&guest)?;
    let at = At::new(&guest);
    let captures = Captures::begin(run, &network, &guest, "tcp")?;
    let mut streams = Vec::new();
    for words in STREAMS {
        streams.push(Flow::begin(&network, &at, words)?);
    }
    let mut caught = [0; 2];
    for kill in 1..=KILLS {
        flow(&backend, &streams)?;
        // Whatever is under way now stays so: nobody moves it, and nobody acknowledges it.
        backend.freeze()?;
        let under_way = under_way(&network, &guest, &streams)?;
        backend.kill()?;
        backend.start_again()?;
        progress::note(&format!(
            "kill {kill}: {} bytes to the guest and {} from it were not acknowledged",
            under_way[0], under_way[1]
        ));
        for (caught, bytes) in caught.iter_mut().zip(under_way) {
            *caught += bytes;
        }
    }
    flow(&backend, &streams)?;
    network
        .run(&format!("ping -c 3 -W 10 {GUEST}"))
        .context("After the last restart")?;
    let ports: Vec<u16> = streams.iter().map(Flow::port).collect();
    for stream in streams {
        stream.end().context("A connection did not survive")?;
    }
    let captured = captures.end()?;
    let (mut there, mut back) = (Order::default(), Order::default());
    for port in ports {
        there += captured.received(port)?;
        back += captured.sent(port)?;
    }
    let figure = format!(
        "the same connections; not acknowledged at the kills: {} bytes to the guest, {} from it; \
         to the guest {there}; from it {back}",
        caught[0], caught[1]
    );
    report.tell(
        "farlane-net",
        format!(
            "killed {KILLS} times under TCP both ways, with bytes under way each way each time"
        ),
        figure,
    );
    ensure!(
        there.late == 0 && there.repeated == 0 && there.unknown == 0 && back.unknown == 0,
        "To the guest {there}; from it {back}"
    );
    ensure!(
        back.repeated <= u64::from(KILLS) * SENT_TWICE,
        "From the guest {back}"
    );
    no_complaint(&guest)?;
    drop(guest);
    backend.stop()
}

/// Waits until the backend that runs now has moved bytes of the streams, each way.
fn flow(backend: &NetBackend<'_>, streams: &[Flow<'_>]) -> Result<()> {
    let moved = || -> Result<[u64; 2]> {
        let metrics = backend.metrics()?;
        Ok([metrics.sum("rx_bytes")?, metrics.sum("tx_bytes")?])
    };
    let begin = moved()?;
    wait_until("the streams flow both ways", || {
        let mut ways = moved()?.into_iter().zip(begin);
        Ok(ways.all(|(now, begin)| now >= begin + FLOWING))
    })
    .with_context(|| {
        let said: Vec<String> = streams.iter().map(Flow::so_far).collect();
        format!("The streams said:\n{}", said.join("\n"))
    })
}

/// Bytes that were handed to TCP and not acknowledged, to the guest and from it, while the backend
/// is frozen: as soon as the programs have written, there are some, and there stay some.
fn under_way(network: &Network, guest: &Guest, streams: &[Flow<'_>]) -> Result<[u64; 2]> {
    // A server that takes both families has its connections of IPv4 in the second.
    const TABLES: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];
    let mut bytes = [0; 2];
    wait_until("bytes are under way both ways", || {
        bytes = [0; 2];
        for table in TABLES {
            let tables = [network.read_file(table)?, guest.read_file(table)?];
            for ((bytes, table), stream) in bytes.iter_mut().zip(tables).zip(streams) {
                *bytes += unacknowledged(&table, stream.port())?;
            }
        }
        Ok(bytes.iter().all(|bytes| *bytes > 0))
    })?;
    Ok(bytes)
}

/// The sum of the send queues of a port's established connections in `/proc/net/tcp`: what is not
/// acknowledged.
fn unacknowledged(table: &str, port: u16) -> Result<u64> {
    let end = format!(":{port:04X}");
    let mut sum = 0;
    for line in table.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, local, remote, state, queues, ..] = words[..] else {
            continue;
        };
        if state == "01" && (local.ends_with(&end) || remote.ends_with(&end)) {
            let sent = queues.split(':').next().unwrap_or_default();
            sum += u64::from_str_radix(sent, 16)?;
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_acknowledged_is_summed() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when \
                     retrnsmt   uid\n\
            0: 00000000:4855 00000000:0000 0A 00000001:00000000 00:00000000 00000000     0\n\
            1: 0100007F:4855 0100007F:4856 01 00000010:00000003 00:00000000 00000000     0\n\
            2: 0100007F:4857 0100007F:4855 01 00000002:00000000 00:00000000 00000000     0\n\
            3: 0100007F:4858 0100007F:4859 01 00000100:00000000 00:00000000 00000000     0\n";
        assert_eq!(unacknowledged(table, 0x4855).unwrap(), 0x12);
    }
}
