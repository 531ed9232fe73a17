//! What of its options a running daemon is told anew: limits, rates and peers of its ports, and who
//! may use the host socket. It counts for what is asked for from then on; nobody loses anything.

use crate::daemon::RdmaDaemon;
use crate::host::{Admission, SharedAdmission};
use crate::options::Options;
use farlane_daemon::listener::let_in;
use farlane_daemon::reload::{Changeable, ControlOptions, Follow, Reloadable};
use farlane_rdma_remoting::{Limits, Peers, Port, PortConfig, Rates, Resource};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::sync::{PoisonError, Weak};

/// What is told anew: the ports, and who may connect.
#[derive(Clone, Debug, Default)]
pub(crate) struct Terms {
    /// In the order of the command line.
    pub vms: Vec<Weak<Port>>,
    pub host: Option<(Weak<Port>, SharedAdmission)>,
}

/// What a port may do, as it is told.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortTerms {
    /// Of each [`Resource`], in their order.
    limits: Vec<Option<u64>>,
    bytes: Option<NonZeroU64>,
    operations: Option<NonZeroU64>,
    /// None for all.
    peers: Option<BTreeSet<[u8; 16]>>,
}

/// What may change of this daemon's options.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Changes {
    vms: Vec<PortTerms>,
    host: Option<(PortTerms, Admission)>,
}

impl PortTerms {
    fn of(config: &PortConfig) -> Self {
        let most = |of| config.limits.most(of);
        Self {
            limits: Resource::ALL.into_iter().map(most).collect(),
            bytes: config.rates.bytes,
            operations: config.rates.operations,
            peers: match &config.peers {
                Peers::All => None,
                Peers::Only(gids) => Some(gids.clone()),
            },
        }
    }

    fn count(&self) -> bool {
        self.limits.len() == Resource::ALL.len()
    }

    fn set(self, port: &Weak<Port>) {
        let limits = Resource::ALL.into_iter().zip(self.limits);
        let limits = limits.fold(Limits::default(), |all, (of, most)| all.with(of, most));
        let rates = Rates {
            bytes: self.bytes,
            operations: self.operations,
        };
        // One that has gone needs none.
        if let Some(port) = port.upgrade() {
            port.set_terms(limits, rates, self.peers.map_or(Peers::All, Peers::Only));
        }
    }
}

impl Terms {
    fn follow(&self, changes: Changes) -> Result<(), String> {
        let Changes { vms, host } = changes;
        let mut all = vms.iter().chain(host.iter().map(|(terms, _)| terms));
        if vms.len() != self.vms.len()
            || host.is_some() != self.host.is_some()
            || !all.all(PortTerms::count)
        {
            return Err("These are not the ports of this daemon".to_owned());
        }
        for (port, terms) in self.vms.iter().zip(vms) {
            terms.set(port);
        }
        if let (Some((port, admission)), Some((terms, other))) = (&self.host, host) {
            terms.set(port);
            *admission.write().unwrap_or_else(PoisonError::into_inner) = other;
        }
        Ok(())
    }
}

impl Reloadable for RdmaDaemon {
    type Changes = Changes;

    const CHANGEABLE: &'static [Changeable] = &[
        (
            "vm",
            &[
                "max_qp", "max_cq", "max_srq", "max_mr", "mr_mem", "rate", "ops", "peers",
            ],
        ),
        (
            "host-socket",
            &[
                "max_qp", "max_cq", "max_srq", "max_mr", "mr_mem", "rate", "ops", "peers", "user",
                "group",
            ],
        ),
    ];

    fn control_options(options: &Options) -> &ControlOptions {
        &options.control
    }

    fn changes(options: &Options) -> anyhow::Result<Changes> {
        let host = options.host_socket.as_ref();
        let vms = options.vms.iter().map(|vm| PortTerms::of(&vm.port));
        Ok(Changes {
            vms: vms.collect(),
            host: host.map(|host| (PortTerms::of(&host.port), host.admission.clone())),
        })
    }

    fn follow(&self) -> Follow<Changes> {
        let terms = self.terms.clone();
        Box::new(move |changes| terms.follow(changes))
    }

    /// The daemon changes no file any more: whom it lets in can connect by this.
    fn followed(options: &Options, user: u32) -> anyhow::Result<()> {
        match &options.host_socket {
            Some(host) => {
                let Admission { users, groups } = &host.admission;
                Ok(let_in(&host.path, user, users, groups)?)
            }
            None => Ok(()),
        }
    }
}
