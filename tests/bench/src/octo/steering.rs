//! What steering costs, without the I/O that is steered: where the bytes of a request lie, and
//! where a flow goes.

use crate::machine::NODES;
use crate::report::Report;
use crate::scale;
use anyhow::{Context as _, Result};
use farlane_blk::per_node::steering::{cut, single_node};
use farlane_kit::compare::{Bar, Comparison, observe};
use farlane_net::flow::table::{FlowTable, Placement as Unknown, Settings};
use farlane_net::flow::{Parsed, Route, Span, parse};
use farlane_net::pairs::{PairCount, PairId};
use farlane_vhost_user::segment::Segment;
use farlane_vm_front_end::net::frame::{End, Tcp, tcp, udp};
use farlane_zero_copy::AddressSpace;
use farlane_zero_copy::placement::{Given, NodeMap, Placement};
use farlane_zero_copy::topology::{Node, Topology};
use std::hint::black_box;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Instant;

/// What a decision may cost, in nanoseconds.
const BAR: f64 = 100.0;
/// How often each is done in a round.
const TIMES: usize = 200_000;
/// Bytes of the memory that is steered by.
const MEMORY: u64 = 1 << 30;
/// Flows that come in turns.
const FLOWS: u16 = 1024;

/// Nanoseconds of one `what`, in rounds until the bar is judged. It is told how often it was done.
fn nanoseconds(mut what: impl FnMut(u32)) -> Result<Comparison> {
    let times = u32::try_from(scale::count(TIMES))?;
    observe(&scale::plan(), Bar::AtMost(BAR), |_| {
        let begin = Instant::now();
        for at in 0..times {
            what(at);
        }
        Ok(begin.elapsed().as_secs_f64() * 1e9 / f64::from(times))
    })
}

/// A number that is far from that of the step before.
fn scattered(at: u32) -> u64 {
    u64::from(at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
}

/// Measures all.
pub fn run(report: &mut Report) -> Result<()> {
    let mut keep = |name: &str, found: Result<Comparison>| -> Result<()> {
        let found = found?;
        report.compared(name, "ns", "a request, or a frame", &found);
        report.keep(name, found.figure)
    };
    for runs in [2, 64] {
        let map = map(runs)?;
        let ns = nanoseconds(|at| {
            black_box(map.node_of(black_box(scattered(at) % MEMORY)));
        });
        keep(&format!("node of an address, {runs} runs of memory"), ns)?;
        let ns = nanoseconds(|at| {
            let address = scattered(at) % (MEMORY - 65_536);
            map.cut(black_box(address), 65_536, |node, _, bytes| {
                black_box((node, bytes));
            });
        });
        keep(
            &format!("cutting 64 KiB by nodes, {runs} runs of memory"),
            ns,
        )?;
    }
    requests(&mut keep)?;
    flows(&mut keep)
}

/// A disk's request: whether all of it is on one node, and otherwise its parts.
fn requests(keep: &mut impl FnMut(&str, Result<Comparison>) -> Result<()>) -> Result<()> {
    let map = map(2)?;
    for count in [1, 16] {
        let segments = |at: u32, base: u64| -> Vec<Segment> {
            let segment = |n: u64| Segment {
                address: base + scattered(at) % (MEMORY / 4) + n * 8192,
                bytes: 4096,
            };
            (0..count).map(segment).collect()
        };
        let all: Vec<_> = (0..1024).map(|at| segments(at, 0)).collect();
        let ns = nanoseconds(|at| {
            let index = usize::try_from(at % 1024).unwrap_or(0);
            black_box(single_node(&map, black_box(&all[index])));
        });
        keep(&format!("node of a disk's request, {count} pages"), ns)?;
    }
    let border = [Segment {
        address: MEMORY / 2 - 65_536,
        bytes: 131_072,
    }];
    let ns = nanoseconds(|_| {
        black_box(cut(&map, black_box(&border), 512, 4096));
    });
    keep("cutting a disk's request into two", ns)
}

/// A map of memory that lies on the nodes in turns, in so many runs.
fn map(runs: u64) -> Result<Arc<NodeMap>> {
    let file = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, MEMORY)?;
    let space = AddressSpace::new();
    space.map(0, MEMORY, file.as_fd(), 0, true)?;
    let length = MEMORY / runs;
    let given = (0..runs).map(|run| Given {
        start: run * length,
        length,
        node: Node(u32::try_from(run % u64::from(NODES)).unwrap_or(0)),
    });
    let map = Placement::new(space, Topology::default(), given.collect()).map();
    let last = map.node_of(MEMORY - 1);
    anyhow::ensure!(
        last == Node(NODES - 1),
        "The memory lies on node {last} at its end"
    );
    Ok(map)
}

/// Frames of flows as they are received, or sent.
fn frames(received: bool) -> Vec<Vec<u8>> {
    let guest = End {
        mac: [2, 0, 0, 0, 0, 1],
        ip: Ipv4Addr::new(10, 0, 0, 1),
        port: 5201,
    };
    (0..FLOWS)
        .map(|flow| {
            let peer = End {
                mac: [2, 0, 0, 0, 0, 2],
                ip: Ipv4Addr::new(10, 0, 0, 2),
                port: 10_000 + flow,
            };
            let (from, to) = if received {
                (&peer, &guest)
            } else {
                (&guest, &peer)
            };
            if flow % 2 == 0 {
                udp(from, to, &[0; 22])
            } else {
                tcp(from, to, Tcp::default(), &[0; 10])
            }
        })
        .collect()
}

/// The flow table as a worker uses it: the way of a frame that is received, and learning from one
/// that is sent.
fn flows(keep: &mut impl FnMut(&str, Result<Comparison>) -> Result<()>) -> Result<()> {
    let frames = [frames(true), frames(false)];
    let first = frames[0].first().context("No frame")?;
    let ns = nanoseconds(|_| {
        black_box(parse(black_box(first)));
    });
    keep("parsing a frame's headers", ns)?;
    let [received, sent] = frames.map(|all| {
        let parsed = all.iter().map(|frame| parse(frame));
        parsed.collect::<Vec<Parsed>>()
    });
    let table = FlowTable::new(Settings::usual(PairCount(2), Unknown::Arrival));
    // Flows belong to the queue of their number.
    let pick = |all: &[Parsed], at: u32| {
        let index = at % u32::from(FLOWS);
        let parsed = all.get(usize::try_from(index).unwrap_or(0)).copied();
        (
            parsed.unwrap_or(all[0]),
            PairId(u16::from(!index.is_multiple_of(2))),
        )
    };
    let mut now = 0;
    let mut position = [0_u64; 2];
    let mut step = |at: u32, position: &mut [u64; 2]| {
        let (parsed, queue) = pick(&received, at);
        let next = &mut position[queue.index()];
        let begin = *next;
        *next += 1;
        now += 1;
        let end = *next;
        match table.received(queue, &parsed, Span { begin, end }, now) {
            Route::Forward {
                flow: Some(ticket), ..
            } => table.delivered(ticket, *next),
            other => table.dropped(&other),
        }
        table.set_consumed(queue, *next);
    };
    let ns = nanoseconds(|at| step(at, &mut position));
    keep("the way of a received frame, 1024 flows", ns)?;
    let ns = nanoseconds(|at| {
        let (parsed, queue) = pick(&sent, at);
        table.transmitted(queue, &parsed, u64::from(at));
    });
    keep("learning from a sent frame, 1024 flows", ns)
}
