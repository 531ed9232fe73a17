//! What a port is asked to steer, and told when flows go.

use super::*;

/// A flow that the guest sends on queue 1, of which frames come to worker 0, and are handed over.
fn hand_over(table: &FlowTable, flow: u32, now: u64) {
    table.transmitted(PairId(1), &sent(flow), now);
    table.transmitted(PairId(1), &sent(flow), now);
    for next in 1..4 {
        let Route::Forward {
            flow: Some(ticket), ..
        } = table.received(PairId(0), &data(flow), one(next), now)
        else {
            panic!("not forwarded");
        };
        table.delivered(ticket, next);
    }
    table.set_consumed(PairId(1), 3);
}

/// What a port is asked for that can do everything.
fn asked(table: &FlowTable, now: u64) -> Vec<(FlowKey, Option<PairId>)> {
    let mut asked = Vec::new();
    let mut steer = |flow: &FlowKey, queue| {
        asked.push((*flow, queue));
        Ok(true)
    };
    while table.steer(now, &mut steer).unwrap() {}
    asked
}

/// Asks a port that can do nothing now; returns how often.
fn refused(table: &FlowTable, now: u64) -> usize {
    let mut count = 0;
    let result = table.steer(now, |_, _| {
        count += 1;
        Err(io::ErrorKind::OutOfMemory.into())
    });
    assert_eq!(result.is_err(), count > 0);
    count
}

/// So late that all flows are forgotten.
const LATE: u64 = 60_000_000;

fn forget_all(table: &FlowTable) {
    for _ in 0..10_000 {
        table.tick(LATE);
    }
}

#[test]
fn a_port_is_asked_for_established_flows_and_told_when_they_go() {
    let table = table(1024, Placement::Arrival);
    hand_over(&table, 1, 0);
    assert_eq!(asked(&table, 0), [(key(1), Some(PairId(1)))]);
    assert_eq!(asked(&table, 0), []);
    forget_all(&table);
    assert_eq!(table.counts().flows, 0);
    assert_eq!(asked(&table, LATE), [(key(1), None)]);
}

#[test]
fn what_a_port_refuses_is_asked_for_again_and_not_at_once() {
    let table = table(1024, Placement::Arrival);
    hand_over(&table, 1, 0);
    assert_eq!(refused(&table, 0), 1);
    // Every frame would be another try.
    hand_over(&table, 1, 50_000);
    assert_eq!(asked(&table, 50_000), []);
    hand_over(&table, 1, 200_000);
    assert_eq!(asked(&table, 200_000), [(key(1), Some(PairId(1)))]);
    hand_over(&table, 1, 300_000);
    assert_eq!(asked(&table, 300_000), [], "it has the rule");
    // A rule of a flow that is forgotten must go, however often it takes.
    forget_all(&table);
    assert_eq!((refused(&table, LATE), refused(&table, LATE)), (1, 0));
    assert_eq!(refused(&table, LATE + 200_000), 1);
    assert_eq!(asked(&table, LATE + 400_000), [(key(1), None)]);
    assert_eq!(asked(&table, LATE + 600_000), []);
}

/// Flows of different sources that share a part of the table, in which there is room for four, and
/// for three that are established.
pub(super) fn neighbours(table: &FlowTable) -> [u32; 4] {
    let place = |flow: &u32| split(table.hash.flow(&key(*flow))).0;
    let source = |flow: &u32| table.hash.source(&key(*flow)).to_le_bytes()[0];
    let mut found: Vec<u32> = Vec::new();
    for flow in 0.. {
        let is_near = found
            .first()
            .is_none_or(|first| place(first) == place(&flow));
        if is_near && found.iter().all(|other| source(other) != source(&flow)) {
            found.push(flow);
        }
        if let Ok(found) = found.as_slice().try_into() {
            return found;
        }
    }
    unreachable!()
}

/// A frame of a flow is read by a worker, and put wherever it belongs; nothing has to drain.
fn comes(table: &FlowTable, worker: u16, flow: u32, now: u64) {
    let worker = PairId(worker);
    let mut route = table.received(worker, &data(flow), one(1), now);
    loop {
        route = match route {
            Route::Deliver => return,
            Route::Forward {
                flow: Some(ticket), ..
            } => return table.delivered(ticket, 1),
            Route::Sequence { to, flow: ticket } => table.sequenced(to, ticket, now),
            other => panic!("{other:?}"),
        };
    }
}

#[test]
fn a_flow_that_had_to_make_room_is_steered_again_when_it_is_established_again() {
    let settings = Settings {
        capacity: 4 * SHARDS,
        ..Settings::usual(PairCount(4), Placement::Arrival)
    };
    let table = FlowTable::with_hash(settings, KeyedHash::fixed());
    let [first, others @ ..] = neighbours(&table);
    hand_over(&table, first, 0);
    assert_eq!(asked(&table, 0), [(key(first), Some(PairId(1)))]);
    for flow in others {
        hand_over(&table, flow, 0);
    }
    assert_eq!(table.counts().established, 3);
    assert_eq!(asked(&table, 0).len(), 3);
    // Nothing is taken back before the port has followed.
    comes(&table, 0, first, 0);
    assert_eq!(asked(&table, 0), []);
    comes(&table, 1, first, 0);
    comes(&table, 1, first, 0);
    assert_eq!(asked(&table, 0), [(key(first), None)]);
    // And nothing is asked for before it has followed again.
    for _ in 0..10 {
        comes(&table, 1, first, 1);
        table.transmitted(PairId(1), &sent(first), 1);
    }
    assert_eq!(table.counts().established, 3);
    assert_eq!(asked(&table, 1), []);
    for _ in 0..3 {
        comes(&table, 0, first, 2);
    }
    assert_eq!(asked(&table, 2), [(key(first), Some(PairId(1)))]);
}

/// The port fails for longer than frames are under way; the flow's come from queue 1 all the time,
/// and go to queue 2.
fn fails_and_recovers(table: &FlowTable, flow: u32, since: u64) {
    let mut now = since;
    while now < since + 2_000_000 {
        assert_eq!(refused(table, now), 1);
        now += 200_000;
        table.transmitted(PairId(2), &sent(flow), now);
        table.transmitted(PairId(2), &sent(flow), now);
        comes(table, 1, flow, now);
    }
    for _ in 0..10 {
        table.transmitted(PairId(2), &sent(flow), now);
        comes(table, 1, flow, now);
    }
    assert_eq!(asked(table, now), [(key(flow), None)]);
    comes(table, 1, flow, now);
    assert_eq!(asked(table, now), [], "it has not followed");
    for _ in 0..3 {
        comes(table, 0, flow, now);
    }
    assert_eq!(asked(table, now), [(key(flow), Some(PairId(2)))]);
}

#[test]
fn a_flow_is_not_steered_again_before_its_rule_is_taken_back_however_late() {
    let settings = Settings {
        capacity: 4 * SHARDS,
        ..Settings::usual(PairCount(4), Placement::Arrival)
    };
    let table = FlowTable::with_hash(settings, KeyedHash::fixed());
    let [first, others @ ..] = neighbours(&table);
    for flow in [first].into_iter().chain(others) {
        hand_over(&table, flow, 0);
    }
    assert_eq!(asked(&table, 0).len(), 4);
    // It is the one that has made room.
    comes(&table, 1, first, 0);
    comes(&table, 1, first, 0);
    fails_and_recovers(&table, first, 0);
}

#[test]
fn a_flow_that_was_forgotten_is_not_steered_before_its_rule_is_taken_back() {
    let table = table(1024, Placement::Arrival);
    hand_over(&table, 1, 0);
    assert_eq!(asked(&table, 0), [(key(1), Some(PairId(1)))]);
    forget_all(&table);
    fails_and_recovers(&table, 1, LATE);
}

#[test]
fn a_flow_is_steered_again_that_was_steered_to_a_queue_that_is_not_used_any_more() {
    let table = table(1024, Placement::Arrival);
    let send = |count| (0..count).for_each(|_| table.transmitted(PairId(3), &sent(1), 0));
    send(2);
    for _ in 0..3 {
        comes(&table, 0, 1, 0);
    }
    assert_eq!(asked(&table, 0), [(key(1), Some(PairId(3)))]);
    table.set_consumed(PairId(3), 1);
    comes(&table, 3, 1, 0);
    comes(&table, 3, 1, 0);
    send(1);
    // Then the port spreads its flows over two queues; this one is for the other of them.
    table.set_queues(PairCount(2));
    comes(&table, 0, 1, 0);
    comes(&table, 0, 1, 0);
    assert_eq!(asked(&table, 0), [(key(1), Some(PairId(1)))]);
    comes(&table, 1, 1, 0);
    comes(&table, 1, 1, 0);
    assert_eq!(asked(&table, 0), []);
}

#[test]
fn whoever_asks_the_port_is_not_kept_by_those_who_hint_at_more() {
    let table = table(1 << 14, Placement::Arrival);
    hand_over(&table, 0, 0);
    let mut flows = 1;
    let steer = |_: &FlowKey, _| {
        // Another worker's flows meanwhile.
        for _ in 0..2 {
            if flows < 4000 {
                hand_over(&table, flows, 0);
                flows += 1;
            }
        }
        Ok(true)
    };
    let more = table.steer(0, steer).unwrap();
    assert!(more && flows < 4000, "{flows} flows");
}

#[test]
fn no_rule_outlives_its_flow_however_many_go_at_once() {
    let table = table(1 << 14, Placement::Arrival);
    let mut rules = std::collections::HashSet::new();
    let steer = |rules: &mut std::collections::HashSet<FlowKey>, now| {
        for (flow, queue) in asked(&table, now) {
            match queue {
                Some(_) => assert!(rules.insert(flow)),
                None => assert!(rules.remove(&flow)),
            }
        }
    };
    for flow in 0..4000 {
        hand_over(&table, flow, 0);
        if flow % 100 == 0 {
            steer(&mut rules, 0);
        }
    }
    steer(&mut rules, 0);
    assert_eq!(rules.len(), 4000);
    // Nobody asks the port for a while.
    forget_all(&table);
    for _ in 0..10 {
        steer(&mut rules, LATE);
        forget_all(&table);
    }
    assert_eq!((table.counts().flows, rules.len()), (0, 0));
}

#[test]
fn a_reset_leaves_no_hints_to_a_port_that_has_forgotten_everything() {
    let table = table(1024, Placement::Arrival);
    hand_over(&table, 1, 0);
    assert_eq!(asked(&table, 0).len(), 1);
    hand_over(&table, 2, 0);
    table.reset();
    assert_eq!(table.counts().flows, 0);
    assert_eq!(asked(&table, 0), []);
    hand_over(&table, 1, 0);
    assert_eq!(asked(&table, 0), [(key(1), Some(PairId(1)))]);
}
