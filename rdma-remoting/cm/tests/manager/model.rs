//! Programs of two users over a wire that loses, doubles, delays and so reorders, against what they
//! may see of each other.
//!
//! Each connection has a number, which is in its private data. What a user sees must be what the
//! other one did, once and in order; and as soon as the wire loses nothing any more, both come to
//! see the same.

use crate::wire::{Faults, LONGEST_WAY, Wire, accept, answer, connect, number, resolve};
use farlane_rdma_cm::{CallError, CommId, Counts, Event, PrivateData, Qpn, RejectReason};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

/// What a user does.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A request for a connection.
    Connect(usize),
    /// One for a queue pair of datagrams.
    Resolve(usize),
    /// Looks at the next event, and does so.
    Serve(usize, Choice),
    /// Disconnects one of its connections.
    Disconnect(usize, usize),
    /// Destroys one of them.
    Destroy(usize, usize),
    /// Rejects what it has accepted.
    TakeBack(usize, usize),
    /// Lets time pass, in milliseconds.
    Wait(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Accept,
    Reject,
    Destroy,
    /// Does nothing: until the end.
    Leave,
}

/// What is true of one end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Of the client: it has asked. Of the server: it was asked.
    Asked,
    /// Of the client: it has a reply. Of the server: it has accepted.
    Replied,
    Established,
    /// Its user has disconnected.
    Disconnecting,
    /// Its user has been told that it is over.
    Over,
}

#[derive(Clone, Copy, Debug)]
struct End {
    id: CommId,
    phase: Phase,
    /// Whether the user has given it up, in any way.
    gave_up: bool,
    has_exited: bool,
    /// Its user is to be told nothing any more.
    is_destroyed: bool,
}

impl End {
    fn new(id: CommId) -> Self {
        Self {
            id,
            phase: Phase::Asked,
            gave_up: false,
            has_exited: false,
            is_destroyed: false,
        }
    }

    fn is_live(&self) -> bool {
        !self.is_destroyed && self.phase == Phase::Established
    }

    /// Whether it may be the cause of the other end's.
    fn has_ended(&self) -> bool {
        self.gave_up || self.is_destroyed || self.phase == Phase::Over
    }
}

#[derive(Clone, Copy, Debug)]
struct Pair {
    client_node: usize,
    is_datagrams: bool,
    /// The client's, and the server's.
    ends: [Option<End>; 2],
}

struct Model {
    wire: Wire,
    pairs: Vec<Pair>,
    /// Which end of which pair.
    names: BTreeMap<(usize, CommId), (usize, usize)>,
    left: Vec<(usize, Event)>,
}

fn qpn(pair: usize, side: usize) -> u32 {
    u32::try_from(pair * 2 + side).unwrap() + 2
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut wire = Wire::new(2, seed);
        wire.faults = Faults {
            lost_in_100: 25,
            doubled_in_100: 20,
            delayed: true,
        };
        Self {
            wire,
            pairs: Vec::new(),
            names: BTreeMap::new(),
            left: Vec::new(),
        }
    }

    fn end(&mut self, pair: usize, side: usize) -> &mut End {
        self.pairs[pair].ends[side].as_mut().unwrap()
    }

    fn other(&self, pair: usize, side: usize) -> Option<End> {
        self.pairs[pair].ends[1 - side]
    }

    fn ask(&mut self, node: usize, is_datagrams: bool) {
        let pair = self.pairs.len();
        let tag = u64::try_from(pair).unwrap();
        let (now, to) = (self.wire.now, 1 - node);
        let manager = &mut self.wire.managers[node];
        let id = if is_datagrams {
            manager.resolve(now, &resolve(node, to, tag)).unwrap()
        } else {
            let request = connect(node, to, qpn(pair, 0), tag);
            manager.connect(now, request).unwrap()
        };
        self.pairs.push(Pair {
            client_node: node,
            is_datagrams,
            ends: [Some(End::new(id)), None],
        });
        self.names.insert((node, id), (pair, 0));
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Connect(node) => self.ask(node, false),
            Step::Resolve(node) => self.ask(node, true),
            Step::Serve(node, choice) => {
                self.wire.collect();
                if !self.wire.events[node].is_empty() {
                    let event = self.wire.events[node].remove(0);
                    self.see(node, event, choice);
                }
            }
            Step::Disconnect(node, which) => self.with(node, which, Self::disconnect),
            Step::Destroy(node, which) => self.with(node, which, Self::destroy),
            Step::TakeBack(node, which) => self.with(node, which, Self::take_back),
            Step::Wait(milliseconds) => self.wire.run(Duration::from_millis(milliseconds)),
        }
    }

    /// One of a node's ends that its user still has.
    fn with(&mut self, node: usize, which: usize, act: fn(&mut Self, usize, usize, usize)) {
        let names = self
            .names
            .range((node, CommId(0))..=(node, CommId(u32::MAX)));
        let mut has: Vec<(usize, usize)> = names.map(|(_, end)| *end).collect();
        has.retain(|&(pair, side)| !self.pairs[pair].ends[side].unwrap().is_destroyed);
        if let Some(&(pair, side)) = has.get(which % has.len().max(1)) {
            act(self, node, pair, side);
        }
    }

    fn disconnect(&mut self, node: usize, pair: usize, side: usize) {
        if self.pairs[pair].is_datagrams {
            return;
        }
        let now = self.wire.now;
        let id = self.end(pair, side).id;
        let result = self.wire.managers[node].disconnect(now, id);
        let end = self.end(pair, side);
        match result {
            Ok(()) => {
                end.gave_up = true;
                if end.phase == Phase::Established {
                    end.phase = Phase::Disconnecting;
                }
            }
            Err(error) => {
                assert_eq!(error, CallError::WrongState);
                assert!(
                    end.phase != Phase::Established
                        || self.wire.events[node].iter().any(|e| e.id() == id)
                );
            }
        }
    }

    fn destroy(&mut self, node: usize, pair: usize, side: usize) {
        let now = self.wire.now;
        let end = self.end(pair, side);
        end.is_destroyed = true;
        let id = end.id;
        self.wire.managers[node].destroy(now, id).unwrap();
        // What was said of it before is not looked at.
        self.wire.events[node].retain(|event| event.id() != id);
        self.left.retain(|(_, event)| event.id() != id);
    }

    fn take_back(&mut self, node: usize, pair: usize, side: usize) {
        let now = self.wire.now;
        let end = *self.end(pair, side);
        if side == 0 || end.phase != Phase::Replied || self.pairs[pair].is_datagrams {
            return;
        }
        let reason = RejectReason::CONSUMER_DEFINED;
        let result = self.wire.managers[node].reject(now, end.id, reason, private(pair));
        if result.is_ok() {
            let end = self.end(pair, side);
            end.gave_up = true;
            end.phase = Phase::Over;
        }
    }

    /// A user is told of something.
    fn see(&mut self, node: usize, event: Event, choice: Choice) {
        let id = event.id();
        let asked = match &event {
            Event::ConnectRequest { request, .. } => Some(number(request.program_data())),
            Event::ServiceRequest { request, .. } => Some(number(request.program_data())),
            _ => None,
        };
        if let Some(tag) = asked {
            let pair = usize::try_from(tag).unwrap();
            let asked = &mut self.pairs[pair];
            assert_eq!(asked.client_node, 1 - node);
            assert!(asked.ends[1].is_none(), "{pair} is asked for twice");
            asked.ends[1] = Some(End::new(id));
            self.names.insert((node, id), (pair, 1));
        }
        let (pair, side) = self.names[&(node, id)];
        assert!(!self.end(pair, side).is_destroyed);
        assert!(
            !self.end(pair, side).has_exited,
            "{event:?} after the last one"
        );
        let is_datagrams = self.pairs[pair].is_datagrams;
        match &event {
            Event::ConnectRequest { request, .. } => {
                assert!(!is_datagrams);
                assert_eq!(request.remote_qpn, Qpn::of(qpn(pair, 0)));
                self.wire.managers[node].claim(id).unwrap();
                self.decide(node, event, choice);
            }
            Event::ServiceRequest { .. } => {
                assert!(is_datagrams);
                self.wire.managers[node].claim(id).unwrap();
                self.decide(node, event, choice);
            }
            Event::Reply { reply, .. } => {
                assert_eq!((side, is_datagrams), (0, false));
                assert_eq!(reply.remote_qpn, Qpn::of(qpn(pair, 1)));
                assert_eq!(number(&reply.private_data.0), u64::try_from(pair).unwrap());
                assert_ne!(self.other(pair, side).unwrap().phase, Phase::Asked);
                let end = self.end(pair, side);
                assert_eq!(end.phase, Phase::Asked);
                end.phase = Phase::Replied;
                self.decide(node, event, choice);
            }
            Event::ServiceReply { reply, .. } => {
                assert_eq!((side, is_datagrams), (0, true));
                let server = self.other(pair, side).unwrap();
                let is_answer = reply.qpn == Qpn::of(qpn(pair, 1));
                assert!(if is_answer {
                    server.phase == Phase::Established
                } else {
                    server.has_ended()
                });
                let end = self.end(pair, side);
                assert_eq!(end.phase, Phase::Asked);
                end.phase = Phase::Over;
            }
            Event::Established { .. } => {
                assert_eq!((side, is_datagrams), (1, false));
                let client = self.other(pair, side).unwrap().phase;
                assert!(![Phase::Asked, Phase::Replied].contains(&client));
                let end = self.end(pair, side);
                assert_eq!(end.phase, Phase::Replied);
                // Its user may have disconnected before it looked.
                end.phase = match end.gave_up {
                    true => Phase::Disconnecting,
                    false => Phase::Established,
                };
            }
            Event::Rejected {
                reason,
                private_data,
                ..
            } => {
                let by_program = *reason == RejectReason::CONSUMER_DEFINED;
                if by_program && private_data.0 != [0; 148] {
                    assert_eq!(**private_data, private(pair));
                }
                self.is_over(pair, side, &event);
            }
            Event::Disconnected { .. } => self.is_over(pair, side, &event),
            Event::TimewaitExit { .. } => {
                let end = self.end(pair, side);
                assert!(end.phase == Phase::Over || end.gave_up, "{end:?}");
                end.has_exited = true;
            }
            // Each message is sent again more often than it can be lost.
            Event::Unreachable { .. } => panic!("{pair} is unreachable"),
        }
    }

    /// One end is over, of which this end or the other is the cause.
    fn is_over(&mut self, pair: usize, side: usize, event: &Event) {
        let other_has_ended = self.other(pair, side).is_none_or(|other| other.has_ended());
        let end = self.end(pair, side);
        assert!(end.phase != Phase::Over, "{event:?} after the end");
        assert!(end.gave_up || other_has_ended, "{event:?} without a cause");
        end.phase = Phase::Over;
    }

    /// A user decides of what it was told.
    fn decide(&mut self, node: usize, event: Event, choice: Choice) {
        let now = self.wire.now;
        let id = event.id();
        let (pair, side) = self.names[&(node, id)];
        let tag = u64::try_from(pair).unwrap();
        let manager = &mut self.wire.managers[node];
        let reason = RejectReason::CONSUMER_DEFINED;
        let (result, phase) = match (choice, &event) {
            (Choice::Leave, _) => return self.left.push((node, event)),
            (Choice::Destroy, _) => return self.destroy(node, pair, side),
            (Choice::Accept, Event::ServiceRequest { .. }) => {
                let answer = answer(qpn(pair, 1), tag);
                (manager.answer(now, id, &answer), Phase::Established)
            }
            (Choice::Reject, Event::ServiceRequest { .. }) => {
                return self.destroy(node, pair, side);
            }
            (Choice::Accept, Event::Reply { .. }) => (
                manager.establish(id, PrivateData::default()),
                Phase::Established,
            ),
            (Choice::Accept, _) => {
                let accept = accept(qpn(pair, 1), tag);
                (manager.accept(now, id, &accept), Phase::Replied)
            }
            (Choice::Reject, _) => (manager.reject(now, id, reason, private(pair)), Phase::Over),
        };
        match result {
            Ok(()) => {
                let end = self.end(pair, side);
                end.phase = phase;
                end.gave_up |= phase == Phase::Over;
            }
            // It is over, and its user has not looked.
            Err(error) => {
                assert_eq!(error, CallError::WrongState);
                let is_to_see = self.wire.events[node].iter().any(|event| event.id() == id);
                assert!(is_to_see || self.end(pair, side).phase == Phase::Over);
            }
        }
    }

    /// Both users do what they have left, and look at everything, over a wire that loses nothing.
    fn settle(&mut self) {
        self.wire.faults = Faults::NONE;
        let mut quiet = 0;
        while quiet < 60 {
            self.wire.run(Duration::from_secs(2));
            self.wire.collect();
            let left = std::mem::take(&mut self.left);
            let mut is_done = left.is_empty();
            for (node, event) in left {
                self.decide(node, event, Choice::Accept);
            }
            for node in [0, 1] {
                while !self.wire.events[node].is_empty() {
                    is_done = false;
                    let event = self.wire.events[node].remove(0);
                    self.see(node, event, Choice::Accept);
                }
            }
            quiet = if is_done { quiet + 1 } else { 0 };
        }
    }

    /// Both ends see the same.
    fn agree(&self) {
        for (number, pair) in self.pairs.iter().enumerate() {
            let [Some(client), server] = pair.ends else {
                panic!("{number} has no client");
            };
            if pair.is_datagrams {
                assert!(
                    client.is_destroyed || client.phase == Phase::Over,
                    "{number}: {pair:?}"
                );
                continue;
            }
            let is_live = server.is_some_and(|server| server.is_live());
            assert_eq!(client.is_live(), is_live, "{number}: {pair:?}");
            let Some(server) = server.filter(|_| is_live) else {
                continue;
            };
            let managers = &self.wire.managers;
            let [one, other] = [
                (&managers[pair.client_node], client.id),
                (&managers[1 - pair.client_node], server.id),
            ];
            for ((one, id), (other, other_id), qpn) in
                [(one, other, qpn(number, 1)), (other, one, qpn(number, 0))]
            {
                let receive = one.qp_ready_to_receive(id).unwrap();
                let send = other.qp_ready_to_send(other_id).unwrap();
                assert_eq!(receive.dest_qpn, Qpn::of(qpn));
                assert_eq!(receive.rq_psn, send.sq_psn);
                let takes = receive.max_dest_rd_atomic.unwrap();
                assert!(send.reliable.unwrap().max_rd_atomic <= takes);
            }
        }
    }

    fn end_all(&mut self) {
        let ends: Vec<_> = self
            .names
            .iter()
            .map(|((node, _), end)| (*node, *end))
            .collect();
        for (node, (pair, side)) in ends {
            if !self.end(pair, side).is_destroyed {
                self.destroy(node, pair, side);
            }
        }
        self.wire.rest();
        let nothing = Counts {
            listeners: 2,
            ..Counts::default()
        };
        for node in [0, 1] {
            assert_eq!(self.wire.managers[node].counts(), nothing);
            assert_eq!(self.wire.take(node), []);
        }
    }
}

fn private(pair: usize) -> PrivateData<148> {
    PrivateData::new(&u64::try_from(pair + 1).unwrap().to_le_bytes()).unwrap()
}

fn step() -> impl Strategy<Value = Step> {
    let node = || 0..2usize;
    let choice = prop_oneof![
        6 => Just(Choice::Accept),
        1 => Just(Choice::Reject),
        1 => Just(Choice::Destroy),
        2 => Just(Choice::Leave),
    ];
    prop_oneof![
        3 => node().prop_map(Step::Connect),
        1 => node().prop_map(Step::Resolve),
        8 => (node(), choice).prop_map(|(node, choice)| Step::Serve(node, choice)),
        2 => (node(), any::<usize>()).prop_map(|(node, which)| Step::Disconnect(node, which)),
        1 => (node(), any::<usize>()).prop_map(|(node, which)| Step::Destroy(node, which)),
        1 => (node(), any::<usize>()).prop_map(|(node, which)| Step::TakeBack(node, which)),
        8 => (0..600u64).prop_map(Step::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn users_see_what_the_other_did_whatever_the_wire_does(
        seed: u64,
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let mut model = Model::new(seed);
        for step in steps {
            model.step(step);
        }
        // What is under way by now may still be lost; what is sent from now on is not.
        model.wire.run(LONGEST_WAY);
        model.settle();
        model.agree();
        model.end_all();
    }
}
