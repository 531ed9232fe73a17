#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

fn named(flow: u16, source: u8) -> NewFlow {
    NewFlow {
        key: FlowKey {
            source: std::net::Ipv4Addr::LOCALHOST.into(),
            destination: std::net::Ipv4Addr::LOCALHOST.into(),
            source_port: flow,
            destination_port: 0,
            protocol: 6,
            vlans: [0; 2],
        },
        // Many to a chain.
        hash: u32::from(flow % 8),
        source,
    }
}

fn insert(shard: &mut Shard<u16>, flow: u16, source: u8) -> Option<Slot> {
    shard.insert(named(flow, source), flow, 0, |_, _| true, |_, _| {})
}

#[test]
fn the_oldest_stranger_makes_room_and_one_seen_since_gets_a_second_chance() {
    let mut shard = Shard::new(4);
    let slots: Vec<Slot> = (0..4)
        .map(|flow| insert(&mut shard, flow, 0).unwrap())
        .collect();
    shard.get(slots[0], 1).unwrap();
    let mut gone = Vec::new();
    shard.insert(named(9, 0), 9, 0, |_, _| true, |_, value| gone.push(*value));
    assert_eq!(gone, [1]);
    assert!(
        shard.peek(slots[1]).is_none(),
        "the number has another generation"
    );
    assert!(shard.peek(slots[0]).is_some());
}

#[test]
fn what_cannot_be_spared_stays() {
    let mut shard = Shard::new(2);
    for flow in 0..2 {
        insert(&mut shard, flow, 0).unwrap();
    }
    assert_eq!(
        shard.insert(named(5, 0), 5, 0, |_, _| false, |_, _| {}),
        None
    );
    let inserted = shard.insert(named(5, 0), 5, 0, |value, _| *value == 1, |_, _| {});
    assert!(inserted.is_some());
    assert!(shard.find(&named(0, 0).key, 0).is_some());
}

#[test]
fn a_source_with_the_most_gives_way_to_others_and_gets_no_more() {
    let mut shard = Shard::new(8);
    let greedy: Vec<Slot> = (0..6)
        .map(|flow| insert(&mut shard, flow, 1).unwrap())
        .collect();
    for slot in &greedy {
        assert_eq!(shard.promote(*slot), Promotion::Done);
    }
    let modest = insert(&mut shard, 6, 2).unwrap();
    assert!(matches!(shard.promote(modest), Promotion::Instead(slot) if greedy.contains(&slot)));
    let modest = insert(&mut shard, 7, 2).unwrap();
    assert!(matches!(shard.promote(modest), Promotion::Instead(slot) if greedy.contains(&slot)));
    let more = insert(&mut shard, 8, 1).unwrap();
    assert!(matches!(shard.promote(more), Promotion::Instead(slot) if greedy.contains(&slot)));
    assert_eq!(shard.protected(), 6);
}

#[test]
fn what_is_idle_expires_and_what_is_seen_does_not() {
    let mut shard = Shard::new(100);
    let slots: Vec<Slot> = (0..50)
        .map(|flow| insert(&mut shard, flow, 0).unwrap())
        .collect();
    shard.get(slots[7], 90).unwrap();
    let mut gone = 0;
    shard.expire(50, 100, 50, |_, _| true, |_, _| gone += 1);
    assert_eq!((gone, shard.len()), (49, 1));
}

#[derive(Clone, Debug)]
enum Event {
    Insert(u16, u8),
    See(u16),
    Promote(u16),
    Expire(u8),
    Clear,
}

proptest! {
    #[test]
    fn whatever_happens_it_finds_what_it_holds_and_holds_no_more_than_it_may(
        events in proptest::collection::vec(
            prop_oneof![
                10 => (0..60_u16, 0..4_u8).prop_map(|(flow, source)| Event::Insert(flow, source)),
                5 => (0..60_u16).prop_map(Event::See),
                8 => (0..60_u16).prop_map(Event::Promote),
                2 => (0..20_u8).prop_map(Event::Expire),
                1 => Just(Event::Clear),
            ],
            0..400,
        )
    ) {
        let mut shard: Shard<u16> = Shard::new(16);
        let mut known: HashMap<u16, Slot> = HashMap::new();
        for (now, event) in (0_u64..).zip(events) {
            let mut gone = HashSet::new();
            match event {
                Event::Insert(flow, source) => {
                    if !known.contains_key(&flow)
                        && let Some(slot) = shard.insert(
                            named(flow, source), flow, now, |_, _| true,
                            |_, value| { gone.insert(*value); },
                        )
                    {
                        known.insert(flow, slot);
                    }
                }
                Event::See(flow) => if let Some(slot) = known.get(&flow) {
                    prop_assert_eq!(*shard.get(*slot, now).unwrap().1, flow);
                },
                Event::Promote(flow) => if let Some(slot) = known.get(&flow) {
                    shard.promote(*slot);
                },
                Event::Expire(steps) => shard.expire(
                    steps.into(), now, 30, |_, _| true, |_, value| { gone.insert(*value); }),
                Event::Clear => shard.clear(|_, value| { gone.insert(*value); }),
            }
            known.retain(|flow, _| !gone.contains(flow));
            prop_assert!(shard.len() <= 16 && shard.protected() <= 12);
            prop_assert_eq!(shard.len(), known.len());
            for flow in 0..60 {
                let found = shard.find(&named(flow, 0).key, u32::from(flow % 8));
                prop_assert_eq!(found, known.get(&flow).copied());
            }
        }
    }
}
