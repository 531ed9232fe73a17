//! What of its options a running daemon is told anew: limits, rates and peers of its ports. It
//! counts for what is asked for from then on; nobody loses anything. Who may use the host socket
//! stays: its file has permissions, which the daemon changes no more, and which no program is to
//! change for it, by words that it has from a daemon.

use crate::daemon::RdmaDaemon;
use crate::options::Options;
use farlane_daemon::reload::{Changeable, ControlOptions, Follow, Reloadable};
use farlane_rdma_remoting::{Limits, Peers, Port, PortConfig, Rates, Resource};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::sync::Weak;

/// Who is told anew: the ports.
#[derive(Clone, Debug, Default)]
pub(crate) struct Terms {
    /// In the order of the command line.
    pub vms: Vec<Weak<Port>>,
    pub host: Option<Weak<Port>>,
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
    host: Option<PortTerms>,
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
        let mut all = vms.iter().chain(&host);
        if vms.len() != self.vms.len()
            || host.is_some() != self.host.is_some()
            || !all.all(PortTerms::count)
        {
            return Err("These are not the ports of this daemon".to_owned());
        }
        for (port, terms) in self.vms.iter().zip(vms) {
            terms.set(port);
        }
        if let (Some(port), Some(terms)) = (&self.host, host) {
            terms.set(port);
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
                "max_qp", "max_cq", "max_srq", "max_mr", "mr_mem", "rate", "ops", "peers",
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
            host: host.map(|host| PortTerms::of(&host.port)),
        })
    }

    fn follow(&self) -> Follow<Changes> {
        let terms = self.terms.clone();
        Box::new(move |changes| terms.follow(changes))
    }
}
