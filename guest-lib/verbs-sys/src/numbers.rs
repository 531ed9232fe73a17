//! Numbers, and what enumerations are in C.

use std::ffi::{c_int, c_uint};

pub const IBV_LINK_LAYER_ETHERNET: c_uint = 2;
pub const IBV_WC_STANDARD_FLAGS: c_uint = 127;

enumerations! {
    ibv_gid_type: c_uint {
        IBV_GID_TYPE_IB = 0,
        IBV_GID_TYPE_ROCE_V2 = 2,
    }
    ibv_node_type: c_int { IBV_NODE_CA = 1, }
    ibv_transport_type: c_int { IBV_TRANSPORT_IB = 0, }
    ibv_fork_status: c_uint { IBV_FORK_UNNEEDED = 2, }
    ibv_atomic_cap: c_uint { IBV_ATOMIC_NONE = 0, IBV_ATOMIC_HCA = 1, }
    ibv_mtu: c_uint {}
    ibv_port_state: c_uint {}
    ibv_event_type: c_uint {
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_COMM_EST = 4,
        IBV_EVENT_SQ_DRAINED = 5,
        IBV_EVENT_PATH_MIG = 6,
        IBV_EVENT_PATH_MIG_ERR = 7,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_LID_CHANGE = 11,
        IBV_EVENT_PKEY_CHANGE = 12,
        IBV_EVENT_SM_CHANGE = 13,
        IBV_EVENT_SRQ_ERR = 14,
        IBV_EVENT_SRQ_LIMIT_REACHED = 15,
        IBV_EVENT_QP_LAST_WQE_REACHED = 16,
        IBV_EVENT_CLIENT_REREGISTER = 17,
        IBV_EVENT_GID_CHANGE = 18,
        IBV_EVENT_WQ_FATAL = 19,
    }
    ibv_wc_status: c_uint { IBV_WC_REM_ACCESS_ERR = 10, }
    ibv_wc_opcode: c_uint { IBV_WC_RECV_RDMA_WITH_IMM = 129, }
    ibv_wc_flags: c_uint { IBV_WC_GRH = 1, IBV_WC_WITH_IMM = 2, }
    ibv_access_flags: c_uint {
        IBV_ACCESS_MW_BIND = 16,
        IBV_ACCESS_ZERO_BASED = 32,
        IBV_ACCESS_ON_DEMAND = 64,
        IBV_ACCESS_HUGETLB = 128,
        IBV_ACCESS_FLUSH_GLOBAL = 256,
        IBV_ACCESS_FLUSH_PERSISTENT = 512,
    }
    ibv_advise_mr_advice: c_uint {
        IBV_ADVISE_MR_ADVICE_PREFETCH = 0,
        IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE = 1,
        IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT = 2,
    }
    ibv_advise_mr_flag: u32 { IBV_ADVISE_MR_FLAG_FLUSH = 1, }
    ibv_rereg_mr_flags: c_uint {
        IBV_REREG_MR_CHANGE_TRANSLATION = 1,
        IBV_REREG_MR_CHANGE_PD = 2,
        IBV_REREG_MR_CHANGE_ACCESS = 4,
    }
    ibv_rereg_mr_err_code: c_int { IBV_REREG_MR_ERR_INPUT = -1, IBV_REREG_MR_ERR_CMD = -4, }
    ibv_mw_type: c_uint { IBV_MW_TYPE_1 = 1, IBV_MW_TYPE_2 = 2, }
    ibv_rate: c_uint { IBV_RATE_MAX = 0, }
    ibv_srq_attr_mask: c_uint { IBV_SRQ_MAX_WR = 1, IBV_SRQ_LIMIT = 2, }
    ibv_srq_type: c_uint { IBV_SRQT_BASIC = 0, IBV_SRQT_XRC = 1, }
    ibv_srq_init_attr_mask: c_uint {
        IBV_SRQ_INIT_ATTR_TYPE = 1,
        IBV_SRQ_INIT_ATTR_PD = 2,
        IBV_SRQ_INIT_ATTR_XRCD = 4,
        IBV_SRQ_INIT_ATTR_CQ = 8,
    }
    ibv_xrcd_init_attr_mask: c_uint {
        IBV_XRCD_INIT_ATTR_FD = 1,
        IBV_XRCD_INIT_ATTR_OFLAGS = 2,
    }
    ibv_qp_type: c_uint {
        IBV_QPT_RC = 2,
        IBV_QPT_UC = 3,
        IBV_QPT_UD = 4,
        IBV_QPT_XRC_SEND = 9,
        IBV_QPT_XRC_RECV = 10,
    }
    ibv_qp_init_attr_mask: c_uint {
        IBV_QP_INIT_ATTR_PD = 1,
        IBV_QP_INIT_ATTR_XRCD = 2,
        IBV_QP_INIT_ATTR_CREATE_FLAGS = 4,
        IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 64,
    }
    ibv_qp_create_send_ops_flags: u64 {
        IBV_QP_EX_WITH_RDMA_WRITE = 1,
        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 2,
        IBV_QP_EX_WITH_SEND = 4,
        IBV_QP_EX_WITH_SEND_WITH_IMM = 8,
        IBV_QP_EX_WITH_RDMA_READ = 16,
        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP = 32,
        IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD = 64,
        IBV_QP_EX_WITH_LOCAL_INV = 128,
        IBV_QP_EX_WITH_BIND_MW = 256,
        IBV_QP_EX_WITH_SEND_WITH_INV = 512,
        IBV_QP_EX_WITH_TSO = 1024,
        IBV_QP_EX_WITH_FLUSH = 2048,
        IBV_QP_EX_WITH_ATOMIC_WRITE = 4096,
    }
    ibv_qp_attr_mask: c_uint { IBV_QP_STATE = 1, }
    ibv_qp_open_attr_mask: c_uint {
        IBV_QP_OPEN_ATTR_NUM = 1,
        IBV_QP_OPEN_ATTR_XRCD = 2,
        IBV_QP_OPEN_ATTR_CONTEXT = 4,
        IBV_QP_OPEN_ATTR_TYPE = 8,
    }
    ibv_qp_state: c_uint { IBV_QPS_RESET = 0, IBV_QPS_UNKNOWN = 7, }
    ibv_mig_state: c_uint {}
    ibv_wr_opcode: c_uint {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3,
        IBV_WR_RDMA_READ = 4,
        IBV_WR_ATOMIC_CMP_AND_SWP = 5,
        IBV_WR_ATOMIC_FETCH_AND_ADD = 6,
        IBV_WR_LOCAL_INV = 7,
        IBV_WR_BIND_MW = 8,
        IBV_WR_SEND_WITH_INV = 9,
        IBV_WR_DRIVER1 = 11,
        IBV_WR_ATOMIC_WRITE = 15,
    }
    ibv_send_flags: c_uint {
        IBV_SEND_FENCE = 1,
        IBV_SEND_SIGNALED = 2,
        IBV_SEND_SOLICITED = 4,
        IBV_SEND_INLINE = 8,
        IBV_SEND_IP_CSUM = 16,
    }
    ibv_create_cq_wc_flags: u64 {
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP = 128,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK = 2048,
    }
    ibv_values_mask: u32 { IBV_VALUES_MASK_RAW_CLOCK = 1, }
    ibv_cq_init_attr_mask: c_uint {
        IBV_CQ_INIT_ATTR_MASK_FLAGS = 1,
        IBV_CQ_INIT_ATTR_MASK_PD = 2,
    }
    ibv_create_cq_attr_flags: c_uint {
        IBV_CREATE_CQ_ATTR_SINGLE_THREADED = 1,
        IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 2,
    }
    ibv_parent_domain_init_attr_mask: c_uint {
        IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS = 1,
        IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT = 2,
    }
}
