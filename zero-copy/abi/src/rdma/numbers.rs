//! Numbers that calls have in their arguments and results.

use crate::wire::numbers;

/// Number of the queue pairs of a multicast group, in datagrams that are sent to it.
pub const MULTICAST_QPN: u32 = 0x00ff_ffff;

/// Pages of a registration that requests make.
pub const MAX_FAST_PAGES: u32 = 512;

/// `RegMr::source`: a pin, or all memory of the VM
/// ([`KIND_ALL_MEMORY`](crate::control::KIND_ALL_MEMORY)), of which all is registered:
/// guest-physical address 0 is `iova`; offset and length are not looked at.
pub const MR_SOURCE_PIN: u32 = 1;
/// `RegMr::source`: a host-allocated buffer.
pub const MR_SOURCE_BUFFER: u32 = 2;

// Values of `enum ibv_access_flags`.
numbers! { u32:
    /// The process may be written by its own receives and reads.
    ACCESS_LOCAL_WRITE = 1 << 0,
    /// The peer may write.
    ACCESS_REMOTE_WRITE = 1 << 1,
    /// The peer may read.
    ACCESS_REMOTE_READ = 1 << 2,
    /// The peer may do atomic operations.
    ACCESS_REMOTE_ATOMIC = 1 << 3,
    /// Memory windows may be bound to it.
    ACCESS_MW_BIND = 1 << 4,
    /// The peer may flush it: see to it that what it has written is visible.
    ACCESS_FLUSH_GLOBAL = 1 << 8,
    /// Hints (relaxed ordering, huge pages) that may be ignored: `IBV_ACCESS_OPTIONAL_RANGE`.
    ACCESS_OPTIONAL = 0x3ff0_0000,
}

// Flags of an [`OpenXrcd`](super::OpenXrcd).
numbers! { u32:
    /// A domain is made where there is none.
    XRCD_CREATE = 1,
    /// Where there is one it is not opened.
    XRCD_EXCLUSIVE = 2,
}

// Values of `enum ibv_atomic_cap`.
numbers! { u32:
    /// Atomic operations are atomic among those of the device.
    ATOMIC_HCA = 1,
}

// Device capability flags, of `enum ibv_device_cap_flags` and its extension.
numbers! { u64:
    /// Shared receive queues can be resized.
    DEVICE_SRQ_RESIZE = 1 << 13,
    /// Memory windows of type 1.
    DEVICE_MEM_WINDOW = 1 << 17,
    /// Memory windows of type 2, which belong to a protection domain and the queue pair that binds
    /// them.
    DEVICE_MEM_WINDOW_TYPE_2B = 1 << 24,
    /// Flushes that make visible what was written.
    DEVICE_FLUSH_GLOBAL = 1 << 38,
    /// Writes of 8 bytes at once.
    DEVICE_ATOMIC_WRITE = 1 << 40,
}

// Values of `enum ibv_mw_type`.
numbers! { u32:
    /// Bound again whenever its owner likes.
    MW_TYPE_1 = 1,
    /// Bound once, until its key is invalidated.
    MW_TYPE_2 = 2,
}

/// `CreateCqEx::flags`: its entries are [`TimedCompletion`](crate::queue::TimedCompletion).
pub const CQ_TIMED: u32 = 1 << 0;

// Values of `enum ibv_qp_type`.
numbers! { u32:
    /// General services (`IB_QPT_GSI`), of a context of the kernel: one of a port, number 1. It has
    /// the attributes of an unreliable datagram, and exchanges datagrams with its like.
    QPT_GSI = 1,
    /// Reliable connection.
    QPT_RC = 2,
    /// Unreliable connection.
    QPT_UC = 3,
    /// Unreliable datagram.
    QPT_UD = 4,
    /// Initiator of an extended reliable connection.
    QPT_XRC_SEND = 9,
    /// Target of an extended reliable connection.
    QPT_XRC_RECV = 10,
}

// Values of `enum ibv_qp_state`.
numbers! { u8:
    /// Reset.
    QPS_RESET = 0,
    /// Initialised.
    QPS_INIT = 1,
    /// Ready to receive.
    QPS_RTR = 2,
    /// Ready to send.
    QPS_RTS = 3,
    /// Send queue drained.
    QPS_SQD = 4,
    /// Send queue error.
    QPS_SQE = 5,
    /// Error.
    QPS_ERR = 6,
}

// Values of `enum ibv_qp_attr_mask`.
numbers! { u32:
    /// `qp_state`.
    QP_STATE = 1 << 0,
    /// `cur_qp_state`.
    QP_CUR_STATE = 1 << 1,
    /// `en_sqd_async_notify`.
    QP_EN_SQD_ASYNC_NOTIFY = 1 << 2,
    /// `qp_access_flags`.
    QP_ACCESS_FLAGS = 1 << 3,
    /// `pkey_index`.
    QP_PKEY_INDEX = 1 << 4,
    /// `port_num`.
    QP_PORT = 1 << 5,
    /// `qkey`.
    QP_QKEY = 1 << 6,
    /// Address vector.
    QP_AV = 1 << 7,
    /// `path_mtu`.
    QP_PATH_MTU = 1 << 8,
    /// `timeout`.
    QP_TIMEOUT = 1 << 9,
    /// `retry_cnt`.
    QP_RETRY_CNT = 1 << 10,
    /// `rnr_retry`.
    QP_RNR_RETRY = 1 << 11,
    /// `rq_psn`.
    QP_RQ_PSN = 1 << 12,
    /// `max_rd_atomic`.
    QP_MAX_QP_RD_ATOMIC = 1 << 13,
    /// Alternate path.
    QP_ALT_PATH = 1 << 14,
    /// `min_rnr_timer`.
    QP_MIN_RNR_TIMER = 1 << 15,
    /// `sq_psn`.
    QP_SQ_PSN = 1 << 16,
    /// `max_dest_rd_atomic`.
    QP_MAX_DEST_RD_ATOMIC = 1 << 17,
    /// `path_mig_state`.
    QP_PATH_MIG_STATE = 1 << 18,
    /// Capabilities.
    QP_CAP = 1 << 19,
    /// `dest_qp_num`.
    QP_DEST_QPN = 1 << 20,
    /// Rate limit.
    QP_RATE_LIMIT = 1 << 25,
}

/// What a connection has to be given to go from Reset to Init (ibv_modify_qp(3)).
pub const QP_TO_INIT: u32 = QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS;
/// What a reliable connection has to be given to go from Init to RTR.
pub const QP_TO_RTR: u32 = QP_STATE
    | QP_AV
    | QP_PATH_MTU
    | QP_DEST_QPN
    | QP_RQ_PSN
    | QP_MAX_DEST_RD_ATOMIC
    | QP_MIN_RNR_TIMER;
/// From RTR to RTS.
pub const QP_TO_RTS: u32 =
    QP_STATE | QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC;
/// What an unreliable connection has to be given to go from Init to RTR.
pub const UC_TO_RTR: u32 = QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN;
/// From RTR to RTS.
pub const UC_TO_RTS: u32 = QP_STATE | QP_SQ_PSN;
/// What an unreliable datagram queue pair has to be given to go from Reset to Init.
pub const UD_TO_INIT: u32 = QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_QKEY;
/// From Init to RTR.
pub const UD_TO_RTR: u32 = QP_STATE;
/// From RTR to RTS.
pub const UD_TO_RTS: u32 = QP_STATE | QP_SQ_PSN;
/// What the target of an extended reliable connection has to be given to go from RTR to RTS; to
/// RTR it takes what a reliable connection does, and the initiator what an unreliable one does.
pub const XRC_TARGET_TO_RTS: u32 = QP_STATE | QP_TIMEOUT | QP_SQ_PSN;

// Bits of `struct ibv_odp_caps`.
numbers! { u64:
    /// On-demand paging of registrations.
    ODP_SUPPORT = 1,
    /// A registration of all memory that the process has.
    ODP_IMPLICIT = 2,
}
numbers! { u32:
    /// Send.
    ODP_SEND = 1,
    /// Receive.
    ODP_RECV = 2,
    /// RDMA write.
    ODP_WRITE = 4,
    /// RDMA read.
    ODP_READ = 8,
    /// Atomics.
    ODP_ATOMIC = 16,
    /// Receive by a request of a shared receive queue.
    ODP_SRQ_RECV = 32,
    /// Flush.
    ODP_FLUSH = 64,
}

/// Bit of device_cap_flags: extended reliable connections.
pub const DEVICE_XRC: u64 = 1 << 20;

// Values of `enum ibv_srq_attr_mask`.
numbers! { u32:
    /// `max_wr`.
    SRQ_MAX_WR = 1 << 0,
    /// `srq_limit`.
    SRQ_LIMIT = 1 << 1,
}

// Values of `enum ibv_event_type`.
numbers! { u32:
    /// A completion queue overran.
    EVENT_CQ_ERR = 0,
    /// A queue pair went to the error state.
    EVENT_QP_FATAL = 1,
    /// The peer sent an invalid request.
    EVENT_QP_REQ_ERR = 2,
    /// The peer violated access rights.
    EVENT_QP_ACCESS_ERR = 3,
    /// First message on a connection.
    EVENT_COMM_EST = 4,
    /// The send queue is drained.
    EVENT_SQ_DRAINED = 5,
    /// The device is gone or unusable.
    EVENT_DEVICE_FATAL = 8,
    /// A shared receive queue is unusable.
    EVENT_SRQ_ERR = 14,
    /// A shared receive queue has fewer requests than its limit.
    EVENT_SRQ_LIMIT_REACHED = 15,
    /// No request of a shared receive queue is with the queue pair any more.
    EVENT_QP_LAST_WQE_REACHED = 16,
}
