//! What the attributes of a connection's queue pair are (`rdma_init_qp_attr`).

use crate::connection::{Connection, State, Terms};
use crate::event::{CallError, Ports, Route};
use crate::fields::{CommId, Psn, Qpn, RetryCount, TimeExponent, Transport};
use crate::manager::Manager;

/// For INIT: the peer may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInit {
    /// Partition.
    pub partition_key: u16,
    /// Whether the peer may read and do atomic operations, too.
    pub remote_read_and_atomic: bool,
}

/// For RTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpReadyToReceive {
    /// Between which ports.
    pub ports: Ports,
    /// How packets go.
    pub route: Route,
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// Sequence number of the first packet that comes.
    pub rq_psn: Psn,
    /// Reads and atomic operations that the peer begins at once; none of an unreliable connection.
    pub max_dest_rd_atomic: Option<u8>,
}

/// For RTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpReadyToSend {
    /// Sequence number of the first packet that goes.
    pub sq_psn: Psn,
    /// None of an unreliable connection.
    pub reliable: Option<Reliable>,
}

/// What a reliable requester needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reliable {
    /// Local ACK timeout.
    pub timeout: TimeExponent,
    /// Retries.
    pub retry_count: RetryCount,
    /// Retries where the receiver is not ready.
    pub rnr_retry_count: RetryCount,
    /// Reads and atomic operations that it begins at once.
    pub max_rd_atomic: u8,
}

impl Manager {
    /// Attributes for INIT, from the request on.
    ///
    /// # Errors
    /// [`CallError::NoSuchId`]; [`CallError::WrongState`] of a connection that has ended.
    pub fn qp_init(&self, id: CommId) -> Result<QpInit, CallError> {
        let (connection, terms) = self.agreed(id)?;
        if connection.state == (State::Timewait) {
            return Err(CallError::WrongState);
        }
        Ok(QpInit {
            partition_key: terms.route.partition_key,
            remote_read_and_atomic: terms.responder_resources != 0,
        })
    }

    /// Attributes for RTR, of a requester from the reply on.
    ///
    /// # Errors
    /// [`CallError::NoSuchId`]; [`CallError::WrongState`] before that, and of a connection that
    /// has ended.
    pub fn qp_ready_to_receive(&self, id: CommId) -> Result<QpReadyToReceive, CallError> {
        let (connection, terms) = self.connected(id)?;
        let takes_reads = terms.transport != Transport::Unreliable;
        Ok(QpReadyToReceive {
            ports: connection.ports,
            route: terms.route,
            dest_qpn: terms.remote_qpn,
            rq_psn: terms.local_psn,
            max_dest_rd_atomic: takes_reads.then_some(terms.responder_resources),
        })
    }

    /// Attributes for RTS, of a requester from the reply on.
    ///
    /// # Errors
    /// As [`qp_ready_to_receive`](Self::qp_ready_to_receive).
    pub fn qp_ready_to_send(&self, id: CommId) -> Result<QpReadyToSend, CallError> {
        let (_, terms) = self.connected(id)?;
        let reliable = Reliable {
            timeout: terms.route.ack_timeout,
            retry_count: terms.retry_count,
            rnr_retry_count: terms.rnr_retry_count,
            max_rd_atomic: terms.initiator_depth,
        };
        Ok(QpReadyToSend {
            sq_psn: terms.remote_psn,
            reliable: (terms.transport != Transport::Unreliable).then_some(reliable),
        })
    }

    fn agreed(&self, id: CommId) -> Result<(&Connection, &Terms), CallError> {
        let connection = self.of_user(id)?;
        match (&connection.terms, connection.state) {
            (Some(_), State::Ended | State::DreqSent | State::DreqReceived) | (None, _) => {
                Err(CallError::WrongState)
            }
            (Some(terms), _) => Ok((connection, terms)),
        }
    }

    fn connected(&self, id: CommId) -> Result<(&Connection, &Terms), CallError> {
        let (connection, terms) = self.agreed(id)?;
        match connection.state {
            State::ReqSent { .. } | State::Timewait => Err(CallError::WrongState),
            _ => Ok((connection, terms)),
        }
    }
}
