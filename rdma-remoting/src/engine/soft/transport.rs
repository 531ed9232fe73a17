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
    /// Unreliable datagram (UD).
    Datagram,
    /// Initiator of an extended reliable connection (IBTA annex A14): it sends.
    XrcInitiator,
    /// Target of an extended reliable connection: it answers.
    XrcTarget,
}

impl Transport {
    /// That of a value of `enum ibv_qp_type`; `None` for one that is not named here.
    pub fn from_wire(value: u32) -> Option<Self> {
        match value {
            rdma::QPT_RC => Some(Self::Reliable),
            rdma::QPT_UC => Some(Self::Unreliable),
            rdma::QPT_UD | rdma::QPT_GSI => Some(Self::Datagram),
            rdma::QPT_XRC_SEND => Some(Self::XrcInitiator),
            rdma::QPT_XRC_RECV => Some(Self::XrcTarget),
            _ => None,
        }
    }

    /// Whether the engine makes queue pairs of it.
    pub fn is_carried(self) -> bool {
        match self {
            Self::Reliable
            | Self::Unreliable
            | Self::Datagram
            | Self::XrcInitiator
            | Self::XrcTarget => true,
        }
    }

    /// Whether each request says whom it is for.
    pub fn is_addressed(self) -> bool {
        self == Self::Datagram
    }

    /// That of the queue pair at the other end.
    pub fn peer(self) -> Self {
        match self {
            Self::XrcInitiator => Self::XrcTarget,
            Self::XrcTarget => Self::XrcInitiator,
            Self::Reliable | Self::Unreliable | Self::Datagram => self,
        }
    }

    /// Whether the responder answers each message. Where it does not, the requester learns of
    /// nothing that happens there: a request is complete when its message is sent.
    pub fn is_acknowledged(self) -> bool {
        match self {
            Self::Reliable | Self::XrcInitiator | Self::XrcTarget => true,
            Self::Unreliable | Self::Datagram => false,
        }
    }

    /// Whether its requesters know this operation.
    pub fn carries(self, opcode: Opcode) -> bool {
        match opcode {
            Opcode::Send | Opcode::SendImm => self != Self::XrcTarget,
            Opcode::Write | Opcode::WriteImm => !matches!(self, Self::Datagram | Self::XrcTarget),
            Opcode::Read
            | Opcode::CompareSwap { .. }
            | Opcode::FetchAdd { .. }
            | Opcode::AtomicWrite
            | Opcode::Flush(_) => matches!(self, Self::Reliable | Self::XrcInitiator),
            Opcode::LocalInvalidate(_)
            | Opcode::Bind(_)
            | Opcode::Register(_)
            | Opcode::SendInvalidate(_) => {
                matches!(self, Self::Reliable | Self::Unreliable | Self::XrcInitiator)
            }
        }
    }

    /// The state that a send request that completes in error moves the queue pair to.
    pub fn after_send_error(self) -> State {
        match self {
            Self::Reliable | Self::XrcInitiator | Self::XrcTarget => State::Error,
            Self::Unreliable | Self::Datagram => State::SendError,
        }
    }

    /// Which attributes a transition requires and which it allows besides (IBTA 11.2.5.2, table of
    /// QP state transitions); `None` where there is no such transition.
    pub fn transition(self, from: State, to: State) -> Option<(u32, u32)> {
        use State::{Draining, Error, Init, ReadyToReceive, ReadyToSend, Reset, SendError};
        let own = Attributes::of(self);
        let common =
            rdma::QP_CUR_STATE | rdma::QP_PATH_MIG_STATE | own.always | own.while_receiving;
        Some(match (from, to) {
            (_, Reset | Error) => (0, 0),
            (Reset, Init) => (own.to_init, 0),
            (Init, Init) => (0, own.to_init),
            (Init, ReadyToReceive) => (own.to_rtr, own.always | rdma::QP_PKEY_INDEX),
            (ReadyToReceive, ReadyToSend) => (own.to_rts, common),
            (ReadyToSend, ReadyToSend) | (Draining, ReadyToSend) => (0, common),
            (SendError, ReadyToSend) => (0, rdma::QP_CUR_STATE | own.always),
            (ReadyToSend, Draining) => (0, rdma::QP_EN_SQD_ASYNC_NOTIFY),
            (Draining, Draining) => (0, common | rdma::QP_PKEY_INDEX | own.while_drained),
            _ => return None,
        })
    }
}

/// Attributes by which the transitions of one service type differ from another's.
struct Attributes {
    to_init: u32,
    to_rtr: u32,
    to_rts: u32,
    /// May be changed from Init on.
    always: u32,
    /// May be changed from RTR on.
    while_receiving: u32,
    /// May be changed besides while the send queue is drained.
    while_drained: u32,
}

impl Attributes {
    fn of(transport: Transport) -> Self {
        let connection = Self {
            to_init: rdma::QP_TO_INIT,
            to_rtr: rdma::UC_TO_RTR,
            to_rts: rdma::UC_TO_RTS,
            always: rdma::QP_ACCESS_FLAGS,
            while_receiving: 0,
            while_drained: rdma::QP_AV,
        };
        let requester =
            rdma::QP_TIMEOUT | rdma::QP_RETRY_CNT | rdma::QP_RNR_RETRY | rdma::QP_MAX_QP_RD_ATOMIC;
        match transport {
            Transport::Reliable => Self {
                to_rtr: rdma::QP_TO_RTR,
                to_rts: rdma::QP_TO_RTS,
                while_receiving: rdma::QP_MIN_RNR_TIMER,
                while_drained: rdma::QP_AV
                    | rdma::QP_PORT
                    | requester
                    | rdma::QP_MAX_DEST_RD_ATOMIC,
                ..connection
            },
            Transport::Unreliable => connection,
            Transport::Datagram => Self {
                to_init: rdma::UD_TO_INIT,
                to_rtr: rdma::UD_TO_RTR,
                to_rts: rdma::UD_TO_RTS,
                always: rdma::QP_QKEY,
                while_drained: 0,
                ..connection
            },
            Transport::XrcInitiator => Self {
                to_rts: rdma::QP_TO_RTS,
                while_drained: rdma::QP_AV | rdma::QP_PORT | requester,
                ..connection
            },
            Transport::XrcTarget => Self {
                to_rtr: rdma::QP_TO_RTR,
                to_rts: rdma::XRC_TARGET_TO_RTS,
                while_receiving: rdma::QP_MIN_RNR_TIMER,
                while_drained: rdma::QP_AV
                    | rdma::QP_PORT
                    | rdma::QP_TIMEOUT
                    | rdma::QP_MAX_DEST_RD_ATOMIC,
                ..connection
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datagram_queue_pair_has_a_key_and_no_peer() {
        let transition = |from, to| Transport::Datagram.transition(from, to).unwrap();
        let (to_init, _) = transition(State::Reset, State::Init);
        assert_ne!(to_init & rdma::QP_QKEY, 0);
        assert_eq!(to_init & rdma::QP_ACCESS_FLAGS, 0);
        let (to_rtr, besides) = transition(State::Init, State::ReadyToReceive);
        assert_eq!((to_rtr | besides) & (rdma::QP_AV | rdma::QP_DEST_QPN), 0);
        assert_ne!(besides & rdma::QP_QKEY, 0);
    }

    #[test]
    fn the_halves_of_an_extended_connection_have_each_their_attributes() {
        let initiator = |from, to| Transport::XrcInitiator.transition(from, to).unwrap();
        let target = |from, to| Transport::XrcTarget.transition(from, to).unwrap();
        let (init, rtr, rts) = (State::Init, State::ReadyToReceive, State::ReadyToSend);
        assert_eq!(initiator(init, rtr).0, rdma::UC_TO_RTR);
        assert_eq!(initiator(rtr, rts).0, rdma::QP_TO_RTS);
        assert_eq!(target(init, rtr).0, rdma::QP_TO_RTR);
        assert_eq!(target(rtr, rts).0, rdma::XRC_TARGET_TO_RTS);
    }
}
