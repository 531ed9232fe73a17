//! Random requests, whatever becomes of what is on its way.

use super::*;
use proptest::prelude::*;

/// An operation of a script.
#[derive(Clone, Debug)]
enum Step {
    Write { remote: u16, length: u16 },
    Read { remote: u16, length: u16 },
    Send { length: u16 },
    Add { word: u8, add: u8 },
    Swap { word: u8, compare: u8, swap: u8 },
    Store { word: u8 },
}

fn step() -> impl Strategy<Value = Step> {
    let words = 0..4_u8;
    prop_oneof![
        (0..2000_u16, 0..1000_u16).prop_map(|(remote, length)| Step::Write { remote, length }),
        (0..2000_u16, 0..1000_u16).prop_map(|(remote, length)| Step::Read { remote, length }),
        (0..1000_u16).prop_map(|length| Step::Send { length }),
        (words.clone(), 1..9_u8).prop_map(|(word, add)| Step::Add { word, add }),
        (words.clone(), 0..9_u8, 0..9_u8).prop_map(|(word, compare, swap)| Step::Swap {
            word,
            compare,
            swap
        }),
        words.prop_map(|word| Step::Store { word }),
    ]
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        6 => Just(Fate::Arrives),
        1 => Just(Fate::Lost),
        1 => Just(Fate::Doubled),
        1 => (1..8_u8).prop_map(Fate::Late),
    ]
}

fn budget() -> impl Strategy<Value = Budget> {
    (1..4 * OPERATION_COST, 1..2000_u64, 1..8_u64)
        .prop_map(|(cost, bytes, operations)| Budget::new(cost).within(bytes, operations))
}

/// Local memory of each step, so that none depends on when another has ended; what is received goes
/// into a part of its own, too.
const SLOT: u64 = 1024;
/// Where the words of atomic operations lie at the peer.
const WORDS: u64 = 8192;
const RECEIVED: u64 = 16384;

proptest! {
    #[test]
    fn every_request_is_carried_out_once_and_in_order_whatever_is_lost(
        steps in prop::collection::vec(step(), 1..40),
        fates in prop::collection::vec(fate(), 0..400),
        budgets in prop::collection::vec(budget(), 0..200),
        late_receives: bool,
        most_bytes in prop::option::of(1..3000_u64),
    ) {
        let mut pair = Pair::new();
        lock(&pair.net).most_bytes = most_bytes;
        (pair.fates, pair.budgets) = (fates.into(), budgets.into());
        let first: Vec<u8> = (0..BYTES).map(|i| (i % 253) as u8).collect();
        for side in [&pair.a, &pair.b] {
            copy_from_slice(&side.region, 0, &first).unwrap();
        }
        // What each side has afterwards.
        let (mut ours, mut theirs) = (first.clone(), first);
        let mut sends = Vec::new();
        // What is read may be read again later: who changes it waits for that, by a fence (IBTA
        // 10.8.3.3, table of ordering rules).
        let mut is_read = false;
        for (at, step) in (0_u64..).zip(&steps) {
            let reads = matches!(step, Step::Read { .. });
            let fence = !reads && is_read;
            is_read = reads || (is_read && !fence);
            let local = at * SLOT;
            let (here, u) = (usize::try_from(local).unwrap(), usize::from);
            let place = |word: u8| WORDS + 8 * u64::from(word);
            let word = |memory: &[u8], word: u8| {
                let at = usize::try_from(place(word)).unwrap();
                u64::from_ne_bytes(memory[at..at + 8].try_into().unwrap())
            };
            let set = |memory: &mut [u8], word: u8, value: u64| {
                let at = usize::try_from(place(word)).unwrap();
                memory[at..at + 8].copy_from_slice(&value.to_ne_bytes());
            };
            match *step {
                Step::Write { remote, length } => {
                    pair.post_as(Opcode::Write, local, length.into(), remote.into(), fence);
                    theirs[u(remote)..][..u(length)].copy_from_slice(&ours[here..][..u(length)]);
                }
                Step::Read { remote, length } => {
                    pair.post(Opcode::Read, local, length.into(), remote.into());
                    ours[here..][..u(length)].copy_from_slice(&theirs[u(remote)..][..u(length)]);
                }
                Step::Send { length } => {
                    pair.post_as(Opcode::Send, local, length.into(), 0, fence);
                    let to = RECEIVED + SLOT * sends.len() as u64;
                    let to_here = usize::try_from(to).unwrap();
                    theirs[to_here..][..u(length)].copy_from_slice(&ours[here..][..u(length)]);
                    sends.push((at, to, u32::from(length)));
                }
                Step::Add { word: at, add } => {
                    pair.post_as(Opcode::FetchAdd { add: add.into() }, local, 8, place(at), fence);
                    let old = word(&theirs, at);
                    ours[here..][..8].copy_from_slice(&old.to_ne_bytes());
                    set(&mut theirs, at, old.wrapping_add(add.into()));
                }
                Step::Swap { word: at, compare, swap } => {
                    let (compare, swap) = (compare.into(), swap.into());
                    pair.post_as(Opcode::CompareSwap { compare, swap }, local, 8, place(at), fence);
                    let old = word(&theirs, at);
                    ours[here..][..8].copy_from_slice(&old.to_ne_bytes());
                    if old == compare {
                        set(&mut theirs, at, swap);
                    }
                }
                Step::Store { word: at } => {
                    pair.post_as(Opcode::AtomicWrite, local, 8, place(at), fence);
                    let new = u64::from_ne_bytes(ours[here..][..8].try_into().unwrap());
                    set(&mut theirs, at, new);
                }
            }
        }
        let receive = |pair: &Pair| for &(number, to, length) in &sends {
            pair.b.receive(number, to, length);
        };
        if late_receives {
            // A first turn may meet no receive request; there are retries enough for one.
            pair.turn();
            pair.carry_all();
        }
        receive(&pair);
        prop_assert_eq!(pair.settle(), succeed(0..steps.len() as u64));
        let arrived = std::iter::from_fn(|| pair.b.cq.poll());
        let arrived: Vec<_> = arrived
            .map(|done| (done.wr_id.get(), done.status, done.byte_len.get()))
            .collect();
        let expected = sends.iter().map(|&(number, _, length)| (number, 0, length));
        prop_assert_eq!(arrived, expected.collect::<Vec<_>>());
        let length = usize::try_from(BYTES).unwrap();
        prop_assert!(pair.a.bytes(0, length) == ours, "the sender's memory");
        prop_assert!(pair.b.bytes(0, length) == theirs, "the receiver's memory");
    }

    #[test]
    fn messages_without_answers_arrive_whole_in_order_and_once_or_not_at_all(
        lengths in prop::collection::vec(0..1000_u32, 1..30),
        fates in prop::collection::vec(fate(), 0..120),
    ) {
        let mut pair = Pair::of(QPT_UC);
        let is_lossless = fates.iter().all(|fate| *fate == Fate::Arrives);
        pair.fates = fates.into();
        let count = lengths.len() as u64;
        for (at, &length) in (0_u64..).zip(&lengths) {
            let bytes = vec![u8::try_from(at + 1).unwrap(); usize::try_from(SLOT).unwrap()];
            copy_from_slice(&pair.a.region, SLOT * at, &bytes).unwrap();
            pair.post(Opcode::Send, SLOT * at, length, 0);
            pair.b.receive(at, SLOT * at, 1000);
        }
        prop_assert_eq!(pair.settle(), succeed(0..count));
        let arrived: Vec<_> = std::iter::from_fn(|| pair.b.cq.poll()).collect();
        prop_assert!(!is_lossless || arrived.len() as u64 == count);
        // Each takes the oldest receive request, and is one of those behind the last.
        let mut rest = lengths.iter().zip(1..);
        for (at, done) in (0_u64..).zip(&arrived) {
            prop_assert_eq!((done.wr_id.get(), done.status), (at, WC_STATUS_SUCCESS));
            let length = done.byte_len.get();
            let bytes = pair.b.bytes(SLOT * at, usize::try_from(length).unwrap());
            let is_it = |&(other, filled): &(&u32, u8)| {
                *other == length && bytes.iter().all(|byte| *byte == filled)
            };
            prop_assert!(rest.any(|message| is_it(&message)));
        }
    }

    #[test]
    fn every_request_completes_once_whatever_becomes_of_its_queue_pair(
        steps in prop::collection::vec((0..12_u8, any::<bool>(), any::<bool>()), 1..60),
        fates in prop::collection::vec(fate(), 0..100),
        is_short: bool,
    ) {
        let mut pair = Pair::new();
        pair.fates = fates.into();
        let mut completed = Vec::new();
        for (step, turns, carries) in steps {
            let change = |state| _ = pair.a.qp.modify(QP_STATE, &attributes(&pair.b, state));
            match step {
                0 => pair.a.qp.pause(true),
                1 => pair.a.qp.pause(false),
                2 => pair.b.qp.pause(true),
                3 => pair.b.qp.pause(false),
                4 => change(QPS_SQD),
                5 | 6 => change(QPS_RTS),
                7 if is_short => change(QPS_ERR),
                _ => {
                    let local = 8 * pair.posted;
                    pair.post(Opcode::FetchAdd { add: 1 }, local, 8, WORDS);
                }
            }
            if turns {
                pair.turn();
            }
            if carries {
                pair.carry_all();
            }
            completed.extend(pair.completed());
            pair.now += Duration::from_millis(20);
        }
        for side in [&pair.a, &pair.b] {
            side.qp.pause(false);
        }
        // Not from an error.
        let _ = pair.a.qp.modify(QP_STATE, &attributes(&pair.b, QPS_RTS));
        completed.extend(pair.settle());
        let numbers: Vec<_> = completed.iter().map(|(number, _)| *number).collect();
        prop_assert_eq!(numbers, (0..pair.posted).collect::<Vec<_>>());
        let done = completed.iter().take_while(|(_, status)| *status == 0).count() as u64;
        prop_assert!(completed.iter().skip(usize::try_from(done).unwrap()).all(|one| one.1 != 0));
        // Each has met what those before it have left, and none was carried out twice.
        let word = pair.b.word(WORDS);
        prop_assert!((done..=pair.posted).contains(&word), "{done} of {}: {word}", pair.posted);
        for number in 0..done {
            prop_assert_eq!(pair.a.word(8 * number), number);
        }
    }

    #[test]
    fn answers_that_make_no_sense_harm_nothing_but_the_connection(
        steps in prop::collection::vec((0..3_u8, 0..6_u64, 0..700_u64, 0..40_usize), 1..60),
        turns in prop::collection::vec(any::<bool>(), 60),
        reads: bool,
    ) {
        let mut pair = Pair::new();
        let number = pair.a.qp.number();
        for at in 0..8 {
            let opcode = if reads && at % 3 == 0 { Opcode::Read } else { Opcode::Write };
            pair.post(opcode, SLOT * at, 600, 0);
        }
        pair.turn();
        let (to, from) = {
            let net = lock(&pair.net);
            (net.requests[0].from.life, Life::begin())
        };
        for (&(kind, message, offset, count), turn) in steps.iter().zip(turns) {
            let at = Position { message: Sequence(message), offset };
            let answer = match kind {
                0 => Answer::Acknowledgement(Acknowledgement::Arrived(at)),
                1 => Answer::Acknowledgement(Acknowledgement::Missing(at)),
                2 if offset % 2 == 0 => Answer::Acknowledgement(Acknowledgement::Refused(
                    at.message,
                    Nak::NotReady(NotReady {
                        timer: 1,
                        rings: true,
                    }),
                )),
                _ => Answer::Data(at, vec![0; count]),
            };
            let mut net = lock(&pair.net);
            net.come.entry(number).or_default().push_back(Reply { to, from, answer });
            drop(net);
            if turn {
                pair.turn();
            }
        }
        pair.now += Duration::from_secs(1);
        let mut done = pair.completed();
        done.extend(pair.settle());
        // In order, and nothing succeeds behind what has failed.
        let numbers: Vec<_> = done.iter().map(|(number, _)| *number).collect();
        prop_assert_eq!(numbers, (0..8).collect::<Vec<_>>());
        let failed = done.iter().position(|(_, status)| *status != 0);
        if let Some(failed) = failed {
            prop_assert!(done[failed..].iter().all(|(_, status)| *status != 0));
        }
    }

    #[test]
    fn fragments_of_any_content_end_a_connection_at_most(
        fragments in prop::collection::vec(
            (0..4_u64, 0..600_u64, 0..600_u32, 0..600_u64, 0..5_u8, any::<u16>()),
            1..50,
        ),
    ) {
        let mut pair = Pair::new();
        pair.post(Opcode::Write, 0, 0, 0);
        pair.turn();
        let from = lock(&pair.net).requests.pop_front().unwrap().from;
        (0..4).for_each(|number| pair.b.receive(number, 4096, 300));
        let name = QpName {
            destination: Destination::Gid(RawGid::default()),
            number: pair.b.qp.number(),
        };
        let target = pair.fabric.find(name).unwrap();
        for (message, offset, length, count, kind, remote) in fragments {
            let mut request = SendWqe::default();
            request.opcode = match kind {
                0 => Opcode::Send,
                1 => Opcode::Write,
                2 => Opcode::Read,
                3 => Opcode::FetchAdd { add: 1 },
                _ => Opcode::AtomicWrite,
            };
            (request.rkey, request.remote_address) = (pair.b.key, remote.into());
            let at = Position { message: Sequence(message), offset };
            let Some(fragment) = Fragment::new(&request, length, at, count) else {
                continue;
            };
            let bytes = vec![1; usize::try_from(count).unwrap()];
            let mut payload = Bytes { at, bytes: &bytes, fetched: Vec::new() };
            target.responder().receive(&target.common, &from, &fragment, &mut payload);
        }
        let done: Vec<_> = std::iter::from_fn(|| pair.b.cq.poll()).collect();
        prop_assert!(done.len() <= 4);
        prop_assert!(done.iter().all(|done| done.byte_len.get() <= 300));
    }
}
