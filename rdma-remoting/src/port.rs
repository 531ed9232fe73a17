//! A port: what one VM, or the processes of this host, see as their device.

use crate::adapter::Adapter;
use crate::async_ring::EventSink;
use crate::connections::{PortConnections, PortSpec};
use crate::context::{Context, Owner};
use crate::engine::{PortAddress, RawGid};
use crate::gids::{GidPolicy, PortGids};
use crate::ledger::{Account, Limits, Resource, Share};
use crate::peers::{Peers, Reach};
use crate::request_times::RequestTimes;
use crate::shared_contexts::SharedContexts;
use crate::throughput::{Rates, Throughput};
use crate::traffic::Traffic;
use crate::xrc_domains::DomainsByFile;
use farlane_abi::Errno;
use farlane_abi::ids::ContextId;
use farlane_abi::width::to_u64;
use farlane_sys::log_limit::LogLimit;
use farlane_sys::log_limited;
use farlane_sys::sync::lock;
use farlane_worker::counters::Sample;
use farlane_worker::histogram::Histogram;
use farlane_zero_copy::Pool;
use log::Level;
use std::collections::HashMap;
use std::net::Ipv6Addr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// What an operator lets a port do; everything by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortConfig {
    /// How much its contexts may have together.
    pub limits: Limits,
    /// How much they may carry out together.
    pub rates: Rates,
    /// Whom they may connect to.
    pub peers: Peers,
    /// Which GIDs its guest may set.
    pub gids: GidPolicy,
    /// Whether registered memory need be there only when it is used (on-demand paging): the
    /// kernel's page faults bring it, as for processes of this host. A VM's is pinned.
    pub on_demand: bool,
}

/// What contexts have together whose processes trust each other: all of a port, unless there are
/// processes of several users.
#[derive(Clone)]
pub struct Party {
    account: Arc<Account>,
    domains: Arc<DomainsByFile>,
    shared: Arc<SharedContexts>,
    on_demand: bool,
}

impl std::fmt::Debug for Party {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Party").finish_non_exhaustive()
    }
}

impl Party {
    /// Takes so much of what the ports share for somebody of it, until the result is dropped;
    /// `None`: that is more than its limit or share.
    #[must_use]
    pub fn take(&self, of: Resource, amount: u64) -> Option<Share> {
        self.account.take(of, amount)
    }

    /// What somebody else has who finds nothing of its by a file, and has shares and turns with it.
    #[must_use]
    pub fn of_another(&self) -> Self {
        Self {
            account: Arc::clone(&self.account),
            domains: Arc::default(),
            shared: Arc::default(),
            on_demand: self.on_demand,
        }
    }

    /// Whether something is taken, or a context open.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.account) > 1
    }
}

/// The contexts of one VM, or of the processes of this host.
pub struct Port {
    address: PortAddress,
    label: String,
    reach: Arc<Reach>,
    gids: Arc<PortGids>,
    adapter: Arc<Adapter>,
    party: Party,
    throughput: Arc<Throughput>,
    traffic: Arc<Traffic>,
    limit: Arc<LogLimit>,
    contexts: Mutex<HashMap<ContextId, Arc<Context>>>,
    connections: Arc<PortConnections>,
}

impl std::fmt::Debug for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port")
            .field("label", &self.label)
            .finish_non_exhaustive()
    }
}

impl Port {
    pub(crate) fn new(
        address: PortAddress,
        label: String,
        config: PortConfig,
        adapter: Arc<Adapter>,
    ) -> Arc<Self> {
        let all = || Arc::clone(&adapter.gids);
        let reach = Reach::new(address.gid, config.peers, Arc::clone(&adapter.lids), all());
        let entries = adapter.engine.port().gid_tbl_len.get();
        let gids = PortGids::new(all(), address.gid, config.gids, entries);
        let (reach, gids) = (Arc::new(reach), Arc::new(gids));
        let its = PortSpec {
            address,
            reach: Arc::clone(&reach),
            gids: Arc::clone(&gids),
            limits: config.limits,
        };
        let traffic = Arc::new(Traffic::new(adapter.workers.len()));
        adapter.traffic.enlist(&traffic);
        Arc::new(Self {
            address,
            label,
            reach,
            gids,
            party: Party {
                account: Account::new(&adapter.ledger, config.limits),
                domains: Arc::default(),
                shared: Arc::default(),
                on_demand: config.on_demand,
            },
            connections: PortConnections::new(its, &adapter.connections),
            throughput: Arc::new(Throughput::new(config.rates, Instant::now())),
            traffic,
            limit: Arc::default(),
            adapter,
            contexts: Mutex::default(),
        })
    }

    /// Its operator lets it have, carry out and connect to other things from now on. Nothing is
    /// taken away: of what it has more than it may it gets nothing, and connected queue pairs stay
    /// so.
    pub fn set_terms(&self, limits: Limits, rates: Rates, peers: Peers) {
        self.party.account.set_limits(limits);
        self.throughput.set_rates(rates, Instant::now());
        self.reach.set(peers);
        // Who waits for the time of another rate.
        for worker in &self.adapter.workers {
            worker.wake();
        }
    }

    /// The GID that its operator has given it.
    #[must_use]
    pub fn gid(&self) -> RawGid {
        self.address.gid
    }

    /// Its guest sets entry `index` of its GID table.
    ///
    /// # Errors
    /// `EINVAL` for an entry that there is not and for no GID of a port, `EACCES` for one that the
    /// operator does not let it have, `EEXIST` where the entry has one, `EADDRINUSE` where another
    /// port has it.
    pub fn add_gid(&self, index: u32, gid: RawGid) -> Result<(), Errno> {
        self.gids.set(index, gid)?;
        let address = Ipv6Addr::from(gid).to_canonical();
        let limit = &self.limit;
        log_limited!(
            Level::Info,
            limit,
            "{}: GID {index} is {address}",
            self.label
        );
        Ok(())
    }

    /// Its guest clears it.
    ///
    /// # Errors
    /// `ENOENT` where it has no GID.
    pub fn remove_gid(&self, index: u32) -> Result<(), Errno> {
        let address = Ipv6Addr::from(self.gids.clear(index)?).to_canonical();
        let limit = &self.limit;
        log_limited!(
            Level::Info,
            limit,
            "{}: GID {index} was {address}",
            self.label
        );
        Ok(())
    }

    /// The entries of its GID table that its guest has set.
    #[must_use]
    pub fn gids(&self) -> Vec<(usize, RawGid)> {
        self.gids.list()
    }

    /// Takes so much of what the ports share for somebody whom it serves, until the result is
    /// dropped; `None`: that is more than its limit or share.
    #[must_use]
    pub fn take(&self, of: Resource, amount: u64) -> Option<Share> {
        self.party.take(of, amount)
    }

    /// What its own processes have together.
    #[must_use]
    pub fn party(&self) -> &Party {
        &self.party
    }

    /// What the processes of another user have together, whom those of the port do not trust, nor
    /// further ones: contexts and domains that they find by files, a share of what the port may
    /// have, and a worker's time as if they were a port. Their memory is there while it is
    /// registered.
    #[must_use]
    pub fn another_party(&self) -> Party {
        Party {
            account: Account::of_user(&self.party.account),
            domains: Arc::default(),
            shared: Arc::default(),
            on_demand: false,
        }
    }

    /// How much its contexts have together of what the ports share, how much they have carried out
    /// and received, and their limits.
    #[must_use]
    pub fn samples(&self) -> Vec<Sample<'static>> {
        let mut samples = self.party.account.samples();
        samples.extend(self.throughput.samples());
        samples.extend(self.traffic.samples());
        samples.push(Sample::gauge(
            "gids",
            "Entries of the GID table that the guest has set.",
            to_u64(self.gids.list().len()),
        ));
        samples.extend(self.connections.samples());
        samples
    }

    /// How long calls of its processes take, from when a worker begins with one until it is
    /// answered.
    #[must_use]
    pub fn call_times(&self) -> &Histogram {
        &self.traffic.calls
    }

    /// How long its send requests take, of one in 61.
    #[must_use]
    pub fn request_times(&self) -> &RequestTimes {
        &self.traffic.requests
    }

    fn contexts(&self) -> MutexGuard<'_, HashMap<ContextId, Arc<Context>>> {
        lock(&self.contexts)
    }

    /// Opens context `id`, whose events go to `events` and whose host-allocated buffers come from
    /// `pool`.
    ///
    /// # Errors
    /// `EEXIST` for an id in use; those of the engine, which opens a context, too.
    pub fn open(
        self: &Arc<Self>,
        id: ContextId,
        events: Arc<dyn EventSink>,
        pool: Option<Arc<Pool>>,
    ) -> Result<Arc<Context>, Errno> {
        self.open_as(id, false, &self.party, events, pool)
    }

    /// The same for somebody of [another party](Self::another_party).
    ///
    /// # Errors
    /// As of [`open`](Self::open).
    pub fn open_for(
        self: &Arc<Self>,
        party: &Party,
        id: ContextId,
        events: Arc<dyn EventSink>,
        pool: Option<Arc<Pool>>,
    ) -> Result<Arc<Context>, Errno> {
        self.open_as(id, false, party, events, pool)
    }

    /// The same of the guest's kernel, which may do what the kernel alone vouches for.
    ///
    /// # Errors
    /// As of [`open`](Self::open).
    pub fn open_of_kernel(
        self: &Arc<Self>,
        id: ContextId,
        events: Arc<dyn EventSink>,
        pool: Option<Arc<Pool>>,
    ) -> Result<Arc<Context>, Errno> {
        self.open_as(id, true, &self.party, events, pool)
    }

    fn open_as(
        self: &Arc<Self>,
        id: ContextId,
        is_kernel: bool,
        party: &Party,
        events: Arc<dyn EventSink>,
        pool: Option<Arc<Pool>>,
    ) -> Result<Arc<Context>, Errno> {
        let mut contexts = self.contexts();
        if contexts.contains_key(&id) {
            return Err(Errno::EEXIST);
        }
        let owner = Owner {
            is_kernel,
            label: self.label.clone(),
            address: self.address,
            reach: Arc::clone(&self.reach),
            gids: Arc::clone(&self.gids),
            on_demand: party.on_demand,
            engine: Arc::clone(&self.adapter.engine),
            counters: Arc::clone(&self.adapter.counters),
            traffic: Arc::clone(&self.traffic),
            account: Arc::clone(&party.account),
            throughput: Arc::clone(&self.throughput),
            limit: Arc::clone(&self.limit),
            domains: Arc::clone(&party.domains),
            shared: Arc::clone(&party.shared),
            connections: Arc::clone(&self.connections),
            clock: self.adapter.clock,
            comp_vectors: self.adapter.comp_vectors(),
        };
        let context = Context::new(id, owner, events, pool)?;
        self.adapter.enlist(&context);
        contexts.insert(id, Arc::clone(&context));
        Ok(context)
    }

    /// The context `id`.
    ///
    /// # Errors
    /// `ENOENT` where none is open.
    pub fn context(&self, id: ContextId) -> Result<Arc<Context>, Errno> {
        self.contexts().get(&id).cloned().ok_or(Errno::ENOENT)
    }

    /// The contexts that are open.
    #[must_use]
    pub fn ids(&self) -> Vec<ContextId> {
        self.contexts().keys().copied().collect()
    }

    /// Has context `id` be served where most of its queues lie, after they were attached or have
    /// moved.
    ///
    /// # Errors
    /// `ENOENT` where none is open.
    pub fn settle(&self, id: ContextId) -> Result<(), Errno> {
        if !self.adapter.has_nodes() {
            return Ok(());
        }
        // Held, so that the context neither ends nor is paused meanwhile.
        let contexts = self.contexts();
        self.adapter.settle(contexts.get(&id).ok_or(Errno::ENOENT)?);
        Ok(())
    }

    /// Closes context `id` and releases everything it owns. When it returns nothing touches its
    /// memory any more.
    ///
    /// # Errors
    /// `ENOENT` where none is open.
    pub fn close(&self, id: ContextId) -> Result<(), Errno> {
        let context = self.contexts().remove(&id).ok_or(Errno::ENOENT)?;
        self.end(&[context]);
        Ok(())
    }

    /// Closes all contexts: the VM is gone, or has reset the device. The GIDs that its guest has
    /// set are nobody's.
    pub fn close_all(&self) {
        let contexts = std::mem::take(&mut *self.contexts());
        self.end(&contexts.into_values().collect::<Vec<_>>());
        // Peers hear of it from who they have known.
        self.connections.bring_all();
        self.gids.clear_all();
    }

    /// The VM is stopped: its contexts get no turns, and nothing touches their memory when this
    /// returns. To peers it is a port that does not answer.
    pub fn pause(&self) {
        // Held, so that none of them is settled elsewhere meanwhile.
        let contexts = self.contexts();
        let all: Vec<_> = contexts.values().cloned().collect();
        self.adapter.discharge_all(&all);
        for context in &all {
            context.pause(true);
        }
        self.connections.pause(true);
    }

    /// The VM goes on after [`pause`](Self::pause).
    pub fn resume(&self) {
        self.connections.pause(false);
        for context in self.contexts().values() {
            context.pause(false);
            self.adapter.enlist(context);
        }
    }

    fn end(&self, contexts: &[Arc<Context>]) {
        self.adapter.discharge_all(contexts);
        for context in contexts {
            context.teardown();
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.close_all();
        self.adapter.traffic.dismiss(&self.traffic);
        self.adapter.forget_port(&self.address.gid);
    }
}

#[cfg(test)]
mod tests;
