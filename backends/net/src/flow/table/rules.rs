//! The port's rules for flows: their frames are to come from the queue of their pair.

use super::known::Flow;
use super::{FlowTable, split};
use crate::flow::hints::RuleChange;
use crate::flow::key::FlowKey;
use crate::pairs::{PairCount, PairId};
use std::io;
use std::sync::atomic::Ordering;

/// Hints that the port is asked for in one turn of a worker, whose frames wait meanwhile.
const HINTS_AT_ONCE: usize = 64;

impl FlowTable {
    /// The port has no way to steer flows: no hints from now on.
    pub fn port_cannot_steer(&self) {
        self.port_queues.store(0, Ordering::Release);
    }

    /// The port can steer flows to its first so many queues.
    pub fn port_steers(&self, queues: PairCount) {
        self.port_queues.store(queues.0, Ordering::Release);
    }

    /// Asks the port, `steer(flow, queue)`, for what would spare handing over: frames of a flow
    /// from a queue, or from any (`None`). `false`: it cannot at all, and is not asked any more.
    /// What it refuses is asked for again later. Returns whether there is more to be asked for now.
    ///
    /// # Errors
    /// The first that the port has had.
    pub fn steer(
        &self,
        now_us: u64,
        mut steer: impl FnMut(&FlowKey, Option<PairId>) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let Some(_turn) = self.hints.turn(now_us) else {
            return Ok(false);
        };
        let mut result = Ok(());
        for _ in 0..HINTS_AT_ONCE {
            let Some(hint) = self.hints.first() else {
                break;
            };
            let queue = match hint.rule {
                RuleChange::Set { to, .. } => Some(to),
                RuleChange::Remove { .. } => None,
            };
            match (steer(&hint.flow, queue), hint.rule) {
                (Ok(true), RuleChange::Set { .. }) => {}
                (Ok(true), RuleChange::Remove { from }) => {
                    self.taken_back(&hint.flow, from, now_us)
                }
                (Ok(false), _) => self.port_cannot_steer(),
                (Err(error), RuleChange::Set { to, from }) => {
                    self.hints.pause(now_us);
                    self.refused(&hint.flow, to, from);
                    result = result.and(Err(error));
                }
                (Err(error), RuleChange::Remove { .. }) => {
                    self.hints.pause(now_us);
                    // It waits on: the flow may be forgotten, and nobody else will say so again.
                    return Err(error);
                }
            }
            self.hints.answered();
        }
        result.map(|()| self.hints.are_due(now_us))
    }

    /// The port has not taken the rule of a flow, and keeps the one before.
    fn refused(&self, key: &FlowKey, to: PairId, from: Option<PairId>) {
        self.change(key, |flow| {
            if flow.rule == Some(to) {
                flow.rule = from;
            }
        });
    }

    /// The port follows the rule of a flow no longer. The flow may have been forgotten, and be
    /// known again.
    fn taken_back(&self, key: &FlowKey, from: PairId, now_us: u64) {
        self.change(key, |flow| flow.leaves(from, now_us));
    }

    /// Changes what is kept of a flow, if it is known.
    fn change(&self, key: &FlowKey, change: impl FnOnce(&mut Flow)) {
        let (number, within) = split(self.hash.flow(key));
        let mut part = self.shard(number);
        if let Some(slot) = part.flows.find(key, within)
            && let Some((_, flow)) = part.flows.peek(slot)
        {
            change(flow);
        }
    }

    /// Asks the port for what would spare handing over frames of an established flow.
    pub(super) fn hint(&self, key: &FlowKey, flow: &mut Flow, active: PairCount, now_us: u64) {
        if !flow.order.is_moving()
            && let (Some(home), Some(sequencer)) = (flow.order.home(), flow.order.sequencer())
            && home != sequencer
            && Some(home) != flow.rule
            && PairCount(self.port_queues.load(Ordering::Acquire)).contains(home)
            // What was asked for before has been seen: a flow changes its queue once at a time.
            && match flow.rule {
                None => flow.has_left(sequencer, now_us),
                // The port cannot follow a rule for a queue that is not in use any more.
                Some(rule) => rule == sequencer || !active.contains(rule),
            }
            && self
                .hints
                .set(*key, home, flow.rule, now_us)
        {
            flow.rule = Some(home);
        }
    }

    /// Takes back the rule of a flow that is established no more: long before it can be forgotten
    /// its frames come as those of unestablished flows do. Not before the rule has been seen to be
    /// followed, either.
    pub(super) fn take_back(&self, key: &FlowKey, flow: &mut Flow) {
        if let Some(rule) = flow.rule
            && flow.order.sequencer() == Some(rule)
            && self.hints.has_room()
        {
            self.hints.take_back(*key, rule);
            flow.rule = None;
        }
    }
}
