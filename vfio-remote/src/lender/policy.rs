//! Who may borrow what: what a lender may be told anew while it runs.

use super::{BridgeOffer, Device, Lender, LenderConfig, LenderError, Offer, is_name};
use super::{LONGEST_GRACE, names::Borrower};
use crate::protocol::Peer;
use crate::protocol::message::{Policy, Refusal};
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// The policy in force, and what cannot be told anew.
#[derive(Debug)]
pub(super) struct Rules {
    policy: RwLock<Arc<Policy>>,
    /// What else was configured, by what it is called; none where nothing may be told anew.
    fixed: RwLock<Option<BTreeMap<String, String>>>,
}

impl Rules {
    /// Those that a lender begins with.
    pub fn new(config: &LenderConfig) -> Self {
        let devices = config.offers.iter();
        let devices = devices.map(
            |Offer {
                 name, borrowers, ..
             }| (name.clone(), borrowers.clone()),
        );
        let windows = config.bridges.iter();
        let windows =
            windows.map(|(name, BridgeOffer { borrowers, .. })| (name.clone(), borrowers.clone()));
        let policy = Policy {
            devices: devices.collect(),
            windows: windows.collect(),
            users: config.users.clone(),
            lenders: config.lenders.clone(),
            grace_ms: u32::try_from(config.grace.as_millis()).unwrap_or(u32::MAX),
        };
        Self {
            policy: RwLock::new(Arc::new(policy)),
            fixed: RwLock::new(None),
        }
    }

    /// The policy in force.
    pub fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.policy.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Whether a lender can go by it.
pub(super) fn check(policy: &Policy) -> Result<(), LenderError> {
    let lists = policy.devices.values().chain(policy.windows.values());
    let names = lists.chain(policy.users.values()).flatten();
    // A name that nobody can have would be in a list by mistake.
    let mut names = names.chain(&policy.lenders);
    if let Some(name) = names.find(|name| !is_name(name)) {
        return Err(LenderError::Name(name.clone()));
    }
    let grace = policy.grace();
    match grace > LONGEST_GRACE {
        true => Err(LenderError::Grace(grace)),
        false => Ok(()),
    }
}

impl Policy {
    /// How long a holder has to give a device back that is revoked.
    pub(super) fn grace(&self) -> Duration {
        Duration::from_millis(self.grace_ms.into())
    }
}

impl Lender {
    /// From now on an administrator may tell it a policy anew whose `fixed` is the same: what else
    /// is configured, as any texts, by what each is called.
    pub fn accept_policies(&self, fixed: BTreeMap<String, String>) {
        let mut held = self
            .rules
            .fixed
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *held = Some(fixed);
    }

    pub(super) fn policy(&self) -> Arc<Policy> {
        self.rules.policy()
    }

    /// Goes by another policy, for all of it, or for nothing. What a session was given before
    /// stays its own; a device that it has attached and not taken does not.
    pub(super) fn reload(
        &self,
        mut policy: Policy,
        fixed: &BTreeMap<String, String>,
    ) -> Result<(), Refusal> {
        let held = self
            .rules
            .fixed
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(ours) = &*held else {
            let what = "This lender has no configuration file".to_owned();
            return Err(Refusal::Order(what));
        };
        let mut names = ours.keys().chain(fixed.keys());
        if let Some(name) = names.find(|&name| ours.get(name) != fixed.get(name)) {
            return Err(Refusal::Fixed(name.clone()));
        }
        check(&policy).map_err(|e| Refusal::Invalid(e.to_string()))?;
        // Devices of the command line are in no file.
        let before = self.policy();
        for (name, borrowers) in &before.devices {
            let entry = policy.devices.entry(name.clone());
            entry.or_insert_with(|| borrowers.clone());
        }
        let unknown = policy
            .devices
            .keys()
            .find(|name| !before.devices.contains_key(*name));
        let window = policy
            .windows
            .keys()
            .find(|name| !before.windows.contains_key(*name));
        if let Some(name) = unknown.or(window) {
            return Err(Refusal::Fixed(name.clone()));
        }
        let mut current = self
            .rules
            .policy
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(policy);
        drop(current);
        self.tell_of_others();
        Ok(())
    }

    /// Devices that somebody holds who may not borrow them any more.
    fn tell_of_others(&self) {
        for (name, device) in &self.devices {
            if let Some((session, holder)) = device.held_by()
                && !self.lends(device, &session.sender.peer(), &holder)
            {
                log::warn!("{name}: {holder} holds it and may not take it again: revoke it");
            }
        }
    }

    /// Whether somebody may borrow a device now who has proved `peer` and says that it is `name`.
    /// When its session began the policy may have been another one.
    pub(super) fn lends(&self, device: &Device, peer: &Peer, name: &str) -> bool {
        let who = self.borrower(peer, name);
        who.is_some_and(|who| self.is_for(device, &who))
    }

    /// The same for a window: whether devices of that borrower may reach memory through it.
    pub(super) fn shows(&self, window: &str, peer: &Peer, name: &str) -> bool {
        let who = self.borrower(peer, name);
        let policy = self.policy();
        let names = policy.windows.get(window).zip(who);
        names.is_some_and(|(names, who)| who.is_among(names))
    }

    /// Whether somebody may borrow a device.
    pub(super) fn is_for(&self, device: &Device, borrower: &Borrower) -> bool {
        let policy = self.policy();
        let names = policy.devices.get(&device.offer.name);
        names.is_some_and(|names| names.is_empty() || borrower.is_among(names))
    }
}
