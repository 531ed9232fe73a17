//! Attributes and states of a queue pair (IBTA 11.2.5.2).

use super::fabric::QpName;
use super::transport::Transport;
use crate::engine::{Destination, QpNumber};
use crate::memory::Access;
use farlane_abi::Errno;
use farlane_abi::rdma::{self, QpAttr};
use std::time::Duration;

/// Largest number of outstanding reads that a queue pair may be given.
pub const MAX_READS: u8 = 128;

/// State of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    Reset = rdma::QPS_RESET,
    Init = rdma::QPS_INIT,
    ReadyToReceive = rdma::QPS_RTR,
    ReadyToSend = rdma::QPS_RTS,
    Draining = rdma::QPS_SQD,
    /// A send request has completed in error, and those behind it are flushed; receiving goes on.
    SendError = rdma::QPS_SQE,
    Error = rdma::QPS_ERR,
}

impl State {
    pub fn from_wire(value: u8) -> Option<Self> {
        Some(match value {
            rdma::QPS_RESET => Self::Reset,
            rdma::QPS_INIT => Self::Init,
            rdma::QPS_RTR => Self::ReadyToReceive,
            rdma::QPS_RTS => Self::ReadyToSend,
            rdma::QPS_SQD => Self::Draining,
            rdma::QPS_SQE => Self::SendError,
            rdma::QPS_ERR => Self::Error,
            _ => return None,
        })
    }

    /// Whether it answers its peer.
    pub fn responds(self) -> bool {
        matches!(
            self,
            Self::ReadyToReceive | Self::ReadyToSend | Self::Draining | Self::SendError
        )
    }
}

/// Checks a change of `present`, whose state is `state`, and returns it changed, with the state
/// that it goes to.
pub fn modify(
    transport: Transport,
    state: State,
    present: &QpAttr,
    mask: u32,
    attr: &QpAttr,
) -> Result<(State, QpAttr), Errno> {
    let has = |bit| mask & bit != 0;
    let has_all = |bits| mask & bits == bits;
    if has(rdma::QP_ALT_PATH | rdma::QP_RATE_LIMIT | rdma::QP_CAP) {
        return Err(Errno::EOPNOTSUPP);
    }
    if has(rdma::QP_CUR_STATE) && State::from_wire(attr.cur_qp_state) != Some(state) {
        return Err(Errno::EINVAL);
    }
    let to = if has(rdma::QP_STATE) {
        State::from_wire(attr.qp_state).ok_or(Errno::EINVAL)?
    } else {
        state
    };
    let (required, optional) = transport.transition(state, to).ok_or(Errno::EINVAL)?;
    if !has_all(required) || mask & !(required | optional | rdma::QP_STATE) != 0 {
        return Err(Errno::EINVAL);
    }
    if to == State::Reset {
        return Ok((to, QpAttr::default()));
    }
    let mut new = *present;
    apply(&mut new, mask, attr)?;
    Ok((to, new))
}

/// The peer that [valid](modify) attributes connect a queue pair to that goes to state `to`: one
/// that is connected has one in the states in which it answers.
pub fn peer(transport: Transport, to: State, attr: &QpAttr) -> Option<QpName> {
    (to.responds() && !transport.is_addressed()).then(|| QpName {
        destination: Destination::of(attr),
        number: QpNumber::of(attr.dest_qp_num.get()),
    })
}

/// Sets those of the attributes that `mask` names.
fn apply(new: &mut QpAttr, mask: u32, attr: &QpAttr) -> Result<(), Errno> {
    let has = |bit| mask & bit != 0;
    let check = |ok: bool| if ok { Ok(()) } else { Err(Errno::EINVAL) };
    if has(rdma::QP_PKEY_INDEX) {
        check(attr.pkey_index.get() == 0)?;
        new.pkey_index = attr.pkey_index;
    }
    if has(rdma::QP_PORT) {
        check(attr.port_num == 1)?;
        new.port_num = attr.port_num;
    }
    if has(rdma::QP_QKEY) {
        new.qkey = attr.qkey;
    }
    if has(rdma::QP_ACCESS_FLAGS) {
        let access = Access::from_wire(attr.qp_access_flags.get()).ok_or(Errno::EOPNOTSUPP)?;
        new.qp_access_flags = access.to_wire().into();
    }
    if has(rdma::QP_AV) {
        check(attr.ah_port <= 1)?;
        (new.is_global, new.sgid_index, new.hop_limit) =
            (attr.is_global, attr.sgid_index, attr.hop_limit);
        (new.traffic_class, new.sl, new.src_path_bits) =
            (attr.traffic_class, attr.sl, attr.src_path_bits);
        (new.static_rate, new.ah_port) = (attr.static_rate, attr.ah_port);
        (new.dlid, new.flow_label, new.dgid) = (attr.dlid, attr.flow_label, attr.dgid);
    }
    if has(rdma::QP_PATH_MTU) {
        check((1..=5).contains(&attr.path_mtu))?;
        new.path_mtu = attr.path_mtu;
    }
    if has(rdma::QP_DEST_QPN) {
        check(attr.dest_qp_num.get() <= 0x00ff_ffff)?;
        new.dest_qp_num = attr.dest_qp_num;
    }
    if has(rdma::QP_RQ_PSN) {
        new.rq_psn = (attr.rq_psn.get() & 0x00ff_ffff).into();
    }
    if has(rdma::QP_SQ_PSN) {
        new.sq_psn = (attr.sq_psn.get() & 0x00ff_ffff).into();
    }
    apply_timers(new, mask, attr)
}

/// As [`apply`]: outstanding reads, timers and retries.
fn apply_timers(new: &mut QpAttr, mask: u32, attr: &QpAttr) -> Result<(), Errno> {
    macro_rules! apply {
        ($bit:ident, $number:ident, at most $most:expr) => {
            if mask & rdma::$bit != 0 {
                if attr.$number > $most {
                    return Err(Errno::EINVAL);
                }
                new.$number = attr.$number;
            }
        };
    }
    apply!(QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic, at most MAX_READS);
    apply!(QP_MAX_QP_RD_ATOMIC, max_rd_atomic, at most MAX_READS);
    apply!(QP_MIN_RNR_TIMER, min_rnr_timer, at most 31);
    apply!(QP_TIMEOUT, timeout, at most 31);
    apply!(QP_RETRY_CNT, retry_cnt, at most 7);
    apply!(QP_RNR_RETRY, rnr_retry, at most 7);
    if mask & rdma::QP_EN_SQD_ASYNC_NOTIFY != 0 {
        new.en_sqd_async_notify = attr.en_sqd_async_notify;
    }
    if mask & rdma::QP_PATH_MIG_STATE != 0 {
        new.path_mig_state = attr.path_mig_state;
    }
    Ok(())
}

/// Local ack timeout (IBTA 9.9.2.1.1): 4.096 us * 2^timeout; `None` is infinite.
pub fn ack_timeout(timeout: u8) -> Option<Duration> {
    (timeout != 0).then(|| Duration::from_nanos(4096 << u64::from(timeout & 31)))
}

/// RNR timer (IBTA 9.7.5.2.8, table 45).
pub fn rnr_delay(timer: u8) -> Duration {
    const HUNDREDTHS_OF_MS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(HUNDREDTHS_OF_MS[usize::from(timer & 31)] * 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TO_INIT: u32 =
        rdma::QP_STATE | rdma::QP_PKEY_INDEX | rdma::QP_PORT | rdma::QP_ACCESS_FLAGS;

    #[test]
    fn a_required_attribute_must_be_there_and_a_strange_one_not() {
        let attr = QpAttr {
            qp_state: rdma::QPS_INIT,
            port_num: 1,
            ..Default::default()
        };
        let go = |mask| {
            modify(
                Transport::Reliable,
                State::Reset,
                &QpAttr::default(),
                mask,
                &attr,
            )
        };
        assert_eq!(go(TO_INIT).unwrap().0, State::Init);
        assert_eq!(go(TO_INIT & !rdma::QP_PORT), Err(Errno::EINVAL));
        assert_eq!(go(TO_INIT | rdma::QP_TIMEOUT), Err(Errno::EINVAL));
        assert_eq!(go(TO_INIT | rdma::QP_ALT_PATH), Err(Errno::EOPNOTSUPP));
    }

    #[test]
    fn states_are_not_skipped() {
        let attr = QpAttr {
            qp_state: rdma::QPS_RTS,
            ..Default::default()
        };
        for from in [State::Reset, State::Init, State::Error] {
            let outcome = modify(
                Transport::Reliable,
                from,
                &QpAttr::default(),
                rdma::QP_STATE,
                &attr,
            );
            assert_eq!(outcome, Err(Errno::EINVAL));
        }
    }

    #[test]
    fn timers_are_the_specified_ones() {
        assert_eq!(ack_timeout(14), Some(Duration::from_nanos(67_108_864)));
        assert_eq!(ack_timeout(0), None);
        assert_eq!(rnr_delay(0), Duration::from_micros(655_360));
        assert_eq!(rnr_delay(1), Duration::from_micros(10));
        assert_eq!(rnr_delay(12), Duration::from_micros(640));
        assert_eq!(rnr_delay(31), Duration::from_micros(491_520));
    }

    proptest! {
        #[test]
        fn any_change_is_valid_or_an_error(
            state in 0u8..8, mask: u32, bytes in prop::array::uniform32(any::<u8>()), to in 0u8..9,
            peer: u32, kind in 0usize..5,
        ) {
            let Some(state) = State::from_wire(state) else { return Ok(()); };
            let attr = QpAttr {
                qp_state: to, cur_qp_state: bytes[0], path_mtu: bytes[1], port_num: bytes[2],
                max_rd_atomic: bytes[3], max_dest_rd_atomic: bytes[4], min_rnr_timer: bytes[5],
                timeout: bytes[6], retry_cnt: bytes[7], rnr_retry: bytes[8], is_global: bytes[9],
                dest_qp_num: peer.into(),
                ..Default::default()
            };
            let mask = mask & 0x001f_ffff;
            let transport = [
                Transport::Reliable, Transport::Unreliable, Transport::Datagram,
                Transport::XrcInitiator, Transport::XrcTarget,
            ][kind];
            if let Ok((_, new)) = modify(transport, state, &QpAttr::default(), mask, &attr) {
                prop_assert!(new.timeout < 32 && new.retry_cnt < 8 && new.rnr_retry < 8);
                prop_assert!(new.min_rnr_timer < 32 && new.dest_qp_num.get() <= 0x00ff_ffff);
            }
        }
    }
}
