//! Transport service types: what a queue pair of each does (IBTA 9.2).

use super::attributes::State;
use crate::request::Opcode;
use farlane_abi::rdma;

/// Transport service type of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Reliable connection (RC).
    Reliable,
    /// Unreliable connection (UC).
    Unreliable,
}

impl Transport {
    /// That of a value of `enum ibv_qp_type`; `None` for one that the engine does not have.
    pub fn from_wire(value: u32) -> Option<Self> {
        match value {
            rdma::QPT_RC => Some(Self::Reliable),
            rdma::QPT_UC => Some(Self::Unreliable),
            _ => None,
        }
    }

    /// Whether the responder answers each message. Where it does not, the requester learns of
    /// nothing that happens there: a request is complete when its message is sent.
    pub fn is_acknowledged(self) -> bool {
        match self {
            Self::Reliable => true,
            Self::Unreliable => false,
        }
    }

    /// Whether its requesters know this operation.
    pub fn carries(self, opcode: Opcode) -> bool {
        match self {
            Self::Reliable => true,
            Self::Unreliable => opcode != Opcode::Read,
        }
    }

    /// The state that a send request that completes in error moves the queue pair to.
    pub fn after_send_error(self) -> State {
        match self {
            Self::Reliable => State::Error,
            Self::Unreliable => State::SendError,
        }
    }

    /// Which attributes a transition requires and which it allows besides (IBTA 11.2.5.2, table of
    /// QP state transitions); `None` where there is no such transition.
    pub fn transition(self, from: State, to: State) -> Option<(u32, u32)> {
        use State::{Draining, Error, Init, ReadyToReceive, ReadyToSend, Reset, SendError};
        let own = Attributes::of(self);
        let common = rdma::QP_CUR_STATE
            | rdma::QP_ACCESS_FLAGS
            | rdma::QP_PATH_MIG_STATE
            | own.while_receiving;
        Some(match (from, to) {
            (_, Reset | Error) => (0, 0),
            (Reset, Init) => (rdma::QP_TO_INIT, 0),
            (Init, Init) => (0, rdma::QP_TO_INIT),
            (Init, ReadyToReceive) => (own.to_rtr, rdma::QP_ACCESS_FLAGS | rdma::QP_PKEY_INDEX),
            (ReadyToReceive, ReadyToSend) => (own.to_rts, common),
            (ReadyToSend, ReadyToSend) | (Draining, ReadyToSend) => (0, common),
            (SendError, ReadyToSend) => (0, rdma::QP_CUR_STATE | rdma::QP_ACCESS_FLAGS),
            (ReadyToSend, Draining) => (0, rdma::QP_EN_SQD_ASYNC_NOTIFY),
            (Draining, Draining) => (
                0,
                common | rdma::QP_AV | rdma::QP_PKEY_INDEX | own.while_drained,
            ),
            _ => return None,
        })
    }
}

/// Attributes by which the transitions of one service type differ from another's.
struct Attributes {
    to_rtr: u32,
    to_rts: u32,
    /// May be changed from RTR on.
    while_receiving: u32,
    /// May be changed besides while the send queue is drained.
    while_drained: u32,
}

impl Attributes {
    fn of(transport: Transport) -> Self {
        match transport {
            Transport::Reliable => Self {
                to_rtr: rdma::QP_TO_RTR,
                to_rts: rdma::QP_TO_RTS,
                while_receiving: rdma::QP_MIN_RNR_TIMER,
                while_drained: rdma::QP_PORT
                    | rdma::QP_TIMEOUT
                    | rdma::QP_RETRY_CNT
                    | rdma::QP_RNR_RETRY
                    | rdma::QP_MAX_QP_RD_ATOMIC
                    | rdma::QP_MAX_DEST_RD_ATOMIC,
            },
            Transport::Unreliable => Self {
                to_rtr: rdma::UC_TO_RTR,
                to_rts: rdma::UC_TO_RTS,
                while_receiving: 0,
                while_drained: 0,
            },
        }
    }
}
