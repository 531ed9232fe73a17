//! `struct ibv_qp_attr` and back.
//!
//! A program fills in only the fields that its mask names; the others may be garbage, so nothing
//! outside the mask is read.

use crate::*;
use farlane_abi::Errno;
use farlane_abi::rdma::{self, QpAttr, VerbsVersion};

/// Attributes that this library knows how to carry.
const CARRIED: u32 = rdma::QP_STATE
    | rdma::QP_CUR_STATE
    | rdma::QP_EN_SQD_ASYNC_NOTIFY
    | rdma::QP_ACCESS_FLAGS
    | rdma::QP_PKEY_INDEX
    | rdma::QP_PORT
    | rdma::QP_QKEY
    | rdma::QP_AV
    | rdma::QP_PATH_MTU
    | rdma::QP_TIMEOUT
    | rdma::QP_RETRY_CNT
    | rdma::QP_RNR_RETRY
    | rdma::QP_RQ_PSN
    | rdma::QP_MAX_QP_RD_ATOMIC
    | rdma::QP_MIN_RNR_TIMER
    | rdma::QP_SQ_PSN
    | rdma::QP_MAX_DEST_RD_ATOMIC
    | rdma::QP_PATH_MIG_STATE
    | rdma::QP_DEST_QPN;

/// Access flags that allow a queue pair's peer nothing: those that say something of a registration
/// alone, as programs give those of the one to the other, and those of operations that no backend
/// has.
const IDLE_ACCESS: u32 = IBV_ACCESS_MW_BIND
    | IBV_ACCESS_ZERO_BASED
    | IBV_ACCESS_ON_DEMAND
    | IBV_ACCESS_HUGETLB
    | IBV_ACCESS_FLUSH_PERSISTENT;

/// A C enumeration's value as the byte that it is on the wire.
fn byte(value: u32) -> Result<u8, Errno> {
    u8::try_from(value).map_err(|_| Errno::EINVAL)
}

/// The attributes that `mask` names, as they go to a backend of that version. `EOPNOTSUPP` for one
/// that cannot be carried (alternate path, resizing, rate limit), `EINVAL` for one that no number
/// fits.
///
/// # Errors
/// These.
pub fn to_wire(version: VerbsVersion, attr: &ibv_qp_attr, mask: u32) -> Result<QpAttr, Errno> {
    if mask & !CARRIED != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let mut wire = QpAttr::default();
    macro_rules! carry {
        ($($bit:ident => $set:stmt;)*) => {
            $(if mask & rdma::$bit != 0 { $set })*
        };
    }
    carry! {
        QP_STATE => wire.qp_state = byte(attr.qp_state)?;
        QP_CUR_STATE => wire.cur_qp_state = byte(attr.cur_qp_state)?;
        QP_EN_SQD_ASYNC_NOTIFY => wire.en_sqd_async_notify = attr.en_sqd_async_notify;
        QP_ACCESS_FLAGS => {
            let idle = match version {
                VerbsVersion::V1 | VerbsVersion::V2 => IDLE_ACCESS | IBV_ACCESS_FLUSH_GLOBAL,
                VerbsVersion::V3 => IDLE_ACCESS,
            };
            wire.qp_access_flags = (attr.qp_access_flags & !idle).into();
        };
        QP_PKEY_INDEX => wire.pkey_index = attr.pkey_index.into();
        QP_PORT => wire.port_num = attr.port_num;
        QP_QKEY => wire.qkey = attr.qkey.into();
        QP_AV => address_to_wire(&attr.ah_attr, &mut wire);
        QP_PATH_MTU => wire.path_mtu = byte(attr.path_mtu)?;
        QP_TIMEOUT => wire.timeout = attr.timeout;
        QP_RETRY_CNT => wire.retry_cnt = attr.retry_cnt;
        QP_RNR_RETRY => wire.rnr_retry = attr.rnr_retry;
        QP_RQ_PSN => wire.rq_psn = attr.rq_psn.into();
        QP_MAX_QP_RD_ATOMIC => wire.max_rd_atomic = attr.max_rd_atomic;
        QP_MIN_RNR_TIMER => wire.min_rnr_timer = attr.min_rnr_timer;
        QP_SQ_PSN => wire.sq_psn = attr.sq_psn.into();
        QP_MAX_DEST_RD_ATOMIC => wire.max_dest_rd_atomic = attr.max_dest_rd_atomic;
        QP_PATH_MIG_STATE => wire.path_mig_state = byte(attr.path_mig_state)?;
        QP_DEST_QPN => wire.dest_qp_num = attr.dest_qp_num.into();
    }
    Ok(wire)
}

fn address_to_wire(address: &ibv_ah_attr, wire: &mut QpAttr) {
    wire.is_global = u8::from(address.is_global != 0);
    wire.dlid = address.dlid.into();
    wire.sl = address.sl;
    wire.src_path_bits = address.src_path_bits;
    wire.static_rate = address.static_rate;
    wire.ah_port = address.port_num;
    if address.is_global != 0 {
        // SAFETY: both variants of the union are plain bytes of the same extent.
        wire.dgid = unsafe { address.grh.dgid.raw };
        wire.flow_label = address.grh.flow_label.into();
        wire.sgid_index = address.grh.sgid_index;
        wire.hop_limit = address.grh.hop_limit;
        wire.traffic_class = address.grh.traffic_class;
    }
}

/// An address without anything.
#[must_use]
pub fn no_address() -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: [0; 16] },
            flow_label: 0,
            sgid_index: 0,
            hop_limit: 0,
            traffic_class: 0,
        },
        dlid: 0,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        is_global: 0,
        port_num: 0,
    }
}

/// The attributes that the backend answered, with the capabilities that the queue pair has.
#[must_use]
pub fn from_wire(wire: &QpAttr, cap: ibv_qp_cap) -> ibv_qp_attr {
    let none = no_address();
    ibv_qp_attr {
        qp_state: wire.qp_state.into(),
        cur_qp_state: wire.cur_qp_state.into(),
        path_mtu: wire.path_mtu.into(),
        path_mig_state: wire.path_mig_state.into(),
        qkey: wire.qkey.get(),
        rq_psn: wire.rq_psn.get(),
        sq_psn: wire.sq_psn.get(),
        dest_qp_num: wire.dest_qp_num.get(),
        qp_access_flags: wire.qp_access_flags.get(),
        cap,
        ah_attr: ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: wire.dgid },
                flow_label: wire.flow_label.get(),
                sgid_index: wire.sgid_index,
                hop_limit: wire.hop_limit,
                traffic_class: wire.traffic_class,
            },
            dlid: wire.dlid.get(),
            sl: wire.sl,
            src_path_bits: wire.src_path_bits,
            static_rate: wire.static_rate,
            is_global: wire.is_global,
            port_num: wire.ah_port,
        },
        alt_ah_attr: none,
        pkey_index: wire.pkey_index.get(),
        alt_pkey_index: 0,
        en_sqd_async_notify: wire.en_sqd_async_notify,
        sq_draining: wire.sq_draining,
        max_rd_atomic: wire.max_rd_atomic,
        max_dest_rd_atomic: wire.max_dest_rd_atomic,
        min_rnr_timer: wire.min_rnr_timer,
        port_num: wire.port_num,
        timeout: wire.timeout,
        retry_cnt: wire.retry_cnt,
        rnr_retry: wire.rnr_retry,
        alt_port_num: 0,
        alt_timeout: 0,
        rate_limit: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_CAP: ibv_qp_cap = ibv_qp_cap {
        max_send_wr: 0,
        max_recv_wr: 0,
        max_send_sge: 0,
        max_recv_sge: 0,
        max_inline_data: 0,
    };

    fn to_wire(attr: &ibv_qp_attr, mask: u32) -> Result<QpAttr, Errno> {
        super::to_wire(VerbsVersion::V3, attr, mask)
    }

    /// Attributes with a different value in each field.
    fn sample() -> QpAttr {
        QpAttr {
            qp_state: rdma::QPS_RTS,
            cur_qp_state: rdma::QPS_RTR,
            path_mtu: 5,
            path_mig_state: 2,
            port_num: 1,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 15,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 6,
            en_sqd_async_notify: 1,
            sq_draining: 0,
            is_global: 1,
            sgid_index: 3,
            hop_limit: 64,
            traffic_class: 8,
            sl: 4,
            src_path_bits: 9,
            static_rate: 10,
            ah_port: 1,
            reserved: [0],
            pkey_index: 2.into(),
            dlid: 77.into(),
            reserved2: 0.into(),
            flow_label: 0x12345.into(),
            qkey: 0x1111_1111.into(),
            rq_psn: 0x22_2222.into(),
            sq_psn: 0x33_3333.into(),
            dest_qp_num: 0x44_4444.into(),
            qp_access_flags: 7.into(),
            dgid: *b"0123456789abcdef",
        }
    }

    #[test]
    fn attributes_survive_the_way_there_and_back() {
        let there = from_wire(&sample(), NO_CAP);
        assert_eq!(to_wire(&there, CARRIED), Ok(sample()));
    }

    #[test]
    fn only_what_the_mask_names_is_read() {
        let mut attr = from_wire(&sample(), NO_CAP);
        attr.path_mtu = u32::MAX;
        let wire = to_wire(&attr, rdma::QP_STATE).unwrap();
        let expected = QpAttr {
            qp_state: rdma::QPS_RTS,
            ..QpAttr::default()
        };
        assert_eq!(wire, expected);
        assert_eq!(to_wire(&attr, rdma::QP_PATH_MTU), Err(Errno::EINVAL));
    }

    #[test]
    fn access_flags_that_allow_a_peer_nothing_are_dropped() {
        let mut attr = from_wire(&sample(), NO_CAP);
        attr.qp_access_flags |= IBV_ACCESS_ON_DEMAND | IBV_ACCESS_FLUSH_PERSISTENT;
        assert_eq!(to_wire(&attr, CARRIED), Ok(sample()));
        attr.qp_access_flags |= IBV_ACCESS_FLUSH_GLOBAL;
        let before = super::to_wire(VerbsVersion::V2, &attr, CARRIED);
        assert_eq!(before, Ok(sample()));
        let flags = to_wire(&attr, CARRIED).unwrap().qp_access_flags;
        assert_eq!(
            flags,
            sample().qp_access_flags.get() | rdma::ACCESS_FLUSH_GLOBAL
        );
    }

    #[test]
    fn what_cannot_be_carried_is_refused() {
        let attr = from_wire(&sample(), NO_CAP);
        for bit in [
            rdma::QP_ALT_PATH,
            rdma::QP_CAP,
            rdma::QP_RATE_LIMIT,
            1 << 31,
        ] {
            assert_eq!(to_wire(&attr, rdma::QP_STATE | bit), Err(Errno::EOPNOTSUPP));
        }
    }
}
