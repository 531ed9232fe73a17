//! Frames of any kind, from outside and from a guest: what the flow table makes of them, and
//! workers that take every step at any time; and what is cut and summed in place of a NIC.

use crate::{Input, format_all_logs};
use farlane_net::bits::{FrameHeader, HEADER_BYTES};
use farlane_net::flow::hash::KeyedHash;
use farlane_net::flow::{FlowTable, Parsed, Placement, Route, Settings, Span, Ticket, parse};
use farlane_net::pairs::{PairCount, PairId};
use farlane_net::offload::{Outgoing, prepare};
use zerocopy::FromBytes as _;

const WORKERS: PairCount = PairCount(4);
/// Flows that the table may know.
const CAPACITY: usize = 128;
/// Bytes of the longest frame of a port.
const LONGEST: usize = 1522;

/// Bytes of the frames before, which the next begin like: so that flows come again.
type Kept = Vec<Vec<u8>>;

fn frame(input: &mut Input<'_>, kept: &mut Kept) -> Vec<u8> {
    let choice = usize::from(input.u8());
    let length = usize::from(input.u8());
    let mut bytes = input.bytes(length).to_vec();
    if let Some(before) = kept.get(choice % 16) {
        let tail = before.get(bytes.len()..).unwrap_or_default().to_vec();
        bytes.extend(tail);
    }
    if kept.len() < 16 {
        kept.push(bytes.clone());
    }
    bytes
}

fn look(frame: &[u8]) -> Parsed {
    let parsed = parse(frame);
    if let Some(flow) = parsed.flow {
        assert_eq!(flow.reversed().reversed(), flow);
        assert_eq!(flow.source.is_ipv4(), flow.destination.is_ipv4());
        assert!(parsed.network + 20 <= frame.len());
        assert!(parsed.transport.is_none_or(|at| at >= parsed.network + 20));
    }
    parsed
}

/// What is under way between workers.
#[derive(Default)]
struct Hands {
    forwarded: Vec<Route>,
    held: Vec<(PairId, Ticket)>,
}

impl Hands {
    fn take(&mut self, worker: PairId, route: Route) {
        match route {
            Route::Deliver => assert!(WORKERS.contains(worker)),
            Route::Forward { to, .. } | Route::Sequence { to, .. } => {
                assert!(WORKERS.contains(to));
                self.forwarded.push(route);
            }
            Route::Hold { on, flow } => {
                assert!(WORKERS.contains(on));
                self.held.push((worker, flow));
            }
        }
    }
}

fn send(header: &[u8], mut frame: Vec<u8>) {
    let Ok((header, _)) = FrameHeader::read_from_prefix(header) else {
        return;
    };
    let length = frame.len();
    match prepare(&mut frame, &header, LONGEST) {
        Ok(Outgoing::Whole(whole)) => assert_eq!(whole.len(), length),
        Ok(Outgoing::Segments(mut segments)) => {
            let mut room = [0; LONGEST];
            for _ in 0..segments.len() {
                assert!(
                    segments
                        .next_into(&mut room)
                        .is_some_and(|bytes| bytes <= LONGEST)
                );
            }
            assert_eq!(segments.next_into(&mut room), None);
        }
        Err(error) => drop(error.to_string()),
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    format_all_logs();
    let mut input = Input::new(data);
    let placement = if input.u8().is_multiple_of(2) {
        Placement::Arrival
    } else {
        Placement::Hash
    };
    let settings = Settings {
        capacity: CAPACITY,
        ..Settings::usual(WORKERS, placement)
    };
    let table = FlowTable::with_hash(settings, KeyedHash::fixed());
    let (mut kept, mut hands, mut now) = (Kept::new(), Hands::default(), 1_u64);
    while !input.is_empty() {
        let step = input.u8();
        let number = u16::from(input.u8()) % WORKERS.0;
        let worker = PairId(number);
        let next = u64::from(input.u8());
        match step % 10 {
            0..=2 => {
                let frame = frame(&mut input, &mut kept);
                let span = Span {
                    begin: next.saturating_sub(u64::from(step)),
                    end: next,
                };
                hands.take(worker, table.received(worker, &look(&frame), span, now));
            }
            3 | 4 => {
                let frame = frame(&mut input, &mut kept);
                table.transmitted(worker, &look(&frame), now);
            }
            5 => {
                let mut header = input.bytes(HEADER_BYTES).to_vec();
                header.resize(HEADER_BYTES, 0);
                send(&header, frame(&mut input, &mut kept));
            }
            6 => match hands.forwarded.pop() {
                Some(Route::Sequence { to, flow }) => {
                    hands.take(to, table.sequenced(to, flow, now));
                }
                Some(Route::Forward {
                    flow: Some(flow), ..
                }) => table.delivered(flow, next),
                _ => {}
            },
            7 => match (hands.forwarded.pop(), hands.held.pop()) {
                (Some(route), None) => table.dropped(&route),
                (route, Some((worker, ticket))) => {
                    hands.forwarded.extend(route);
                    hands.take(worker, table.retry(worker, ticket, now));
                }
                (None, None) => {}
            },
            8 => {
                table.set_consumed(worker, next);
                now += next * 100;
                table.tick(now);
                let can = !next.is_multiple_of(5);
                let steered = table.steer(now, |_, _| {
                    can.then_some(true)
                        .ok_or_else(|| std::io::ErrorKind::OutOfMemory.into())
                });
                assert!(steered.is_ok() || !can);
            }
            _ if next == 0 => table.reset(),
            _ => table.set_queues(PairCount(number)),
        }
    }
    let counts = table.counts();
    assert!(counts.flows <= 128 && counts.established <= counts.flows);
}
