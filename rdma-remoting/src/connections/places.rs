//! Where ids are bound: at ports of IP protocols, and at other services.
//!
//! Programs that do not trust each other share the ports of which one is chosen for who asks for
//! none: a user, which is an account, has at most half of those of a protocol that others have
//! left. Otherwise one program could bind all of them, and nobody else could connect.

use super::ids::Binding;
use super::terms::{self, EPHEMERAL_PORTS};
use crate::draws::Draws;
use crate::engine::RawGid;
use crate::ledger::Account;
use farlane_abi::Errno;
use farlane_abi::width::to_usize;
use farlane_rdma_cm::{Gid, ServiceId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Ids that are bound at one place.
#[derive(Debug)]
struct Bound {
    count: usize,
    /// Others may be bound there that say so, too.
    is_shared: bool,
}

/// Places of a port, and how many ids are bound there.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// By service and GID; at all GIDs where there is none.
    bound: BTreeMap<(u64, Option<RawGid>), Bound>,
    /// How many of the ports that are drawn users have: by protocol, and by the addresses of their
    /// accounts.
    shares: BTreeMap<(u64, usize), usize>,
    draws: Draws,
}

/// The share that a place is of. Whoever is bound holds the account: no other one has its address.
fn share(service: u64, account: &Arc<Account>) -> Option<(u64, usize)> {
    let protocol = terms::with_port(service, 0);
    terms::is_ephemeral(service).then(|| (protocol, Arc::as_ptr(account).addr()))
}

impl Places {
    /// Binds an id where it asks for, or at a port that nobody has.
    ///
    /// # Errors
    /// `EADDRINUSE` where somebody else is bound, or the user has its share of ports.
    pub fn bind(
        &mut self,
        account: &Arc<Account>,
        service: u64,
        gid: Option<RawGid>,
        is_shared: bool,
    ) -> Result<Binding, Errno> {
        // Before all are looked at.
        let any = terms::wants_port(service).then(|| terms::with_port(service, 0));
        if let Some(protocol) = any
            && !self.has_one_for((protocol, Arc::as_ptr(account).addr()))
        {
            return Err(Errno::EADDRINUSE);
        }
        let place = self.free(service, gid, is_shared);
        let place = place.ok_or(Errno::EADDRINUSE)?;
        if let Some(share) = share(place, account) {
            self.take(share)?;
        }
        let none = Bound {
            count: 0,
            is_shared,
        };
        self.bound.entry((place, gid)).or_insert(none).count += 1;
        Ok(Binding {
            service: ServiceId(place),
            gid: gid.map(Gid),
        })
    }

    /// Whether a user of a protocol may have one more.
    fn has_one_for(&self, (protocol, user): (u64, usize)) -> bool {
        let of_all = self.shares.range((protocol, 0)..=(protocol, usize::MAX));
        let taken: usize = of_all.map(|(_, count)| count).sum();
        let its = self.shares.get(&(protocol, user)).copied();
        its.unwrap_or(0) < to_usize(EPHEMERAL_PORTS).saturating_sub(taken)
    }

    fn take(&mut self, (protocol, user): (u64, usize)) -> Result<(), Errno> {
        if !self.has_one_for((protocol, user)) {
            return Err(Errno::EADDRINUSE);
        }
        *self.shares.entry((protocol, user)).or_insert(0) += 1;
        Ok(())
    }

    /// An id of that user is bound there no more.
    pub fn unbind(&mut self, account: &Arc<Account>, binding: Binding) {
        let place = (binding.service.0, binding.gid.map(|gid| gid.0));
        if let Some(bound) = self.bound.get_mut(&place) {
            bound.count -= 1;
            if bound.count == 0 {
                self.bound.remove(&place);
            }
        }
        if let Some(share) = share(place.0, account)
            && let Some(count) = self.shares.get_mut(&share)
        {
            *count -= 1;
            if *count == 0 {
                self.shares.remove(&share);
            }
        }
    }

    /// Where an id may be bound that asks for this: a port that nobody has, where it asks for none.
    fn free(&mut self, service: u64, gid: Option<RawGid>, is_shared: bool) -> Option<u64> {
        if !terms::wants_port(service) {
            return self.is_free(service, gid, is_shared).then_some(service);
        }
        // The next one that is free from one that is drawn.
        let drawn = self.draws.next() % EPHEMERAL_PORTS;
        (0..EPHEMERAL_PORTS).find_map(|step| {
            let place = terms::with_port(service, terms::ephemeral(drawn + step));
            self.is_free(place, gid, false).then_some(place)
        })
    }

    /// Whether nobody is bound there, or all let others be.
    fn is_free(&self, service: u64, gid: Option<RawGid>, is_shared: bool) -> bool {
        let mut there = self
            .bound
            .range((service, None)..=(service, Some([0xff; 16])));
        there.all(|((_, other), bound)| {
            let is_beside = gid.is_some() && other.is_some() && gid != *other;
            is_beside || (is_shared && bound.is_shared)
        })
    }

    /// How many places are bound.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.bound.len()
    }
}
