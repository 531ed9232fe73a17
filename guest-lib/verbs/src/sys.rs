//! `infiniband/verbs.h` of rdma-core 44: structures and numbers that cross the C interface.
//!
//! Made with bindgen and cut to what this library touches. Function pointers that it never fills
//! in are [`Unset`], structures that it never makes are opaque; offsets and sizes are asserted in
//! [`crate::layout`]. Names are those of the C header.
#![allow(
    non_camel_case_types,
    non_snake_case,
    missing_docs,
    reason = "the names are C's"
)]

use std::ffi::{c_char, c_int, c_uint, c_void};

pub use libc::{pthread_cond_t, pthread_mutex_t, timespec};

/// A function pointer that stays NULL: the caller's inline function then reports `EOPNOTSUPP`.
pub type Unset = Option<unsafe extern "C" fn()>;

/// Structures that this library never makes: only pointers to them cross the interface.
macro_rules! opaque {
    ($($name:ident)*) => {
        $(
            #[repr(C)]
            #[derive(Debug)]
            pub struct $name {
                _private: [u8; 0],
            }
        )*
    };
}

/// Structures or unions as C lays them out, with every field public.
macro_rules! layouts {
    ($kind:tt: $($name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub $kind $name {
                $(pub $field: $type,)*
            }
        )*
    };
}

/// C enumerations, and those of their constants that are used.
macro_rules! enumerations {
    ($($name:ident: $type:ty { $($constant:ident = $value:literal,)* })*) => {
        $(
            pub type $name = $type;
            $(pub const $constant: $name = $value;)*
        )*
    };
}

opaque! {
    _compat_ibv_port_attr ibv_rwq_ind_table ibv_wq
    verbs_ex_private
}

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

layouts! { union:
    ibv_gid {
        raw: [u8; 16],
        global: ibv_gid_global,
    }
    ibv_async_event_element {
        cq: *mut ibv_cq,
        qp: *mut ibv_qp,
        srq: *mut ibv_srq,
        wq: *mut ibv_wq,
        port_num: c_int,
    }
    ibv_wc_imm {
        imm_data: u32,
        invalidated_rkey: u32,
    }
    ibv_send_wr_imm {
        imm_data: u32,
        invalidate_rkey: u32,
    }
    ibv_send_wr_target {
        rdma: ibv_send_wr_rdma,
        atomic: ibv_send_wr_atomic,
        ud: ibv_send_wr_ud,
    }
    ibv_send_wr_qp_type {
        xrc: ibv_send_wr_xrc,
    }
    ibv_send_wr_extra {
        bind_mw: ibv_send_wr_bind_mw,
        tso: ibv_send_wr_tso,
    }
}

layouts! { struct:
    ibv_gid_global {
        subnet_prefix: u64,
        interface_id: u64,
    }
    ibv_gid_entry {
        gid: ibv_gid,
        gid_index: u32,
        port_num: u32,
        gid_type: u32,
        ndev_ifindex: u32,
    }
    ibv_device_attr {
        fw_ver: [c_char; 64],
        node_guid: u64,
        sys_image_guid: u64,
        max_mr_size: u64,
        page_size_cap: u64,
        vendor_id: u32,
        vendor_part_id: u32,
        hw_ver: u32,
        max_qp: c_int,
        max_qp_wr: c_int,
        device_cap_flags: c_uint,
        max_sge: c_int,
        max_sge_rd: c_int,
        max_cq: c_int,
        max_cqe: c_int,
        max_mr: c_int,
        max_pd: c_int,
        max_qp_rd_atom: c_int,
        max_ee_rd_atom: c_int,
        max_res_rd_atom: c_int,
        max_qp_init_rd_atom: c_int,
        max_ee_init_rd_atom: c_int,
        atomic_cap: ibv_atomic_cap,
        max_ee: c_int,
        max_rdd: c_int,
        max_mw: c_int,
        max_raw_ipv6_qp: c_int,
        max_raw_ethy_qp: c_int,
        max_mcast_grp: c_int,
        max_mcast_qp_attach: c_int,
        max_total_mcast_qp_attach: c_int,
        max_ah: c_int,
        max_fmr: c_int,
        max_map_per_fmr: c_int,
        max_srq: c_int,
        max_srq_wr: c_int,
        max_srq_sge: c_int,
        max_pkeys: u16,
        local_ca_ack_delay: u8,
        phys_port_cnt: u8,
    }
    ibv_query_device_ex_input {
        comp_mask: u32,
    }
    ibv_values_ex {
        comp_mask: u32,
        raw_clock: timespec,
    }
    ibv_odp_caps {
        general_caps: u64,
        per_transport_caps: ibv_odp_transport_caps,
    }
    ibv_odp_transport_caps {
        rc_odp_caps: u32,
        uc_odp_caps: u32,
        ud_odp_caps: u32,
    }
    ibv_tso_caps {
        max_tso: u32,
        supported_qpts: u32,
    }
    ibv_rss_caps {
        supported_qpts: u32,
        max_rwq_indirection_tables: u32,
        max_rwq_indirection_table_size: u32,
        rx_hash_fields_mask: u64,
        rx_hash_function: u8,
    }
    ibv_packet_pacing_caps {
        qp_rate_limit_min: u32,
        qp_rate_limit_max: u32,
        supported_qpts: u32,
    }
    ibv_tm_caps {
        max_rndv_hdr_size: u32,
        max_num_tags: u32,
        flags: u32,
        max_ops: u32,
        max_sge: u32,
    }
    ibv_cq_moderation_caps {
        max_cq_count: u16,
        max_cq_period: u16,
    }
    ibv_pci_atomic_caps {
        fetch_add: u16,
        swap: u16,
        compare_swap: u16,
    }
    ibv_alloc_dm_attr {
        length: usize,
        log_align_req: u32,
        comp_mask: u32,
    }
    ibv_dm {
        context: *mut ibv_context,
        memcpy_to_dm: Option<
            unsafe extern "C" fn(
                dm: *mut ibv_dm,
                dm_offset: u64,
                host_addr: *const c_void,
                length: usize,
            ) -> c_int,
        >,
        memcpy_from_dm: Option<
            unsafe extern "C" fn(
                host_addr: *mut c_void,
                dm: *mut ibv_dm,
                dm_offset: u64,
                length: usize,
            ) -> c_int,
        >,
        comp_mask: u32,
        handle: u32,
    }
    ibv_device_attr_ex {
        orig_attr: ibv_device_attr,
        comp_mask: u32,
        odp_caps: ibv_odp_caps,
        completion_timestamp_mask: u64,
        hca_core_clock: u64,
        device_cap_flags_ex: u64,
        tso_caps: ibv_tso_caps,
        rss_caps: ibv_rss_caps,
        max_wq_type_rq: u32,
        packet_pacing_caps: ibv_packet_pacing_caps,
        raw_packet_caps: u32,
        tm_caps: ibv_tm_caps,
        cq_mod_caps: ibv_cq_moderation_caps,
        max_dm_size: u64,
        pci_atomic_caps: ibv_pci_atomic_caps,
        xrc_odp_caps: u32,
        phys_port_cnt_ex: u32,
    }
    ibv_port_attr {
        state: ibv_port_state,
        max_mtu: ibv_mtu,
        active_mtu: ibv_mtu,
        gid_tbl_len: c_int,
        port_cap_flags: u32,
        max_msg_sz: u32,
        bad_pkey_cntr: u32,
        qkey_viol_cntr: u32,
        pkey_tbl_len: u16,
        lid: u16,
        sm_lid: u16,
        lmc: u8,
        max_vl_num: u8,
        sm_sl: u8,
        subnet_timeout: u8,
        init_type_reply: u8,
        active_width: u8,
        active_speed: u8,
        phys_state: u8,
        link_layer: u8,
        flags: u8,
        port_cap_flags2: u16,
    }
    ibv_async_event {
        element: ibv_async_event_element,
        event_type: ibv_event_type,
    }
    ibv_wc {
        wr_id: u64,
        status: ibv_wc_status,
        opcode: ibv_wc_opcode,
        vendor_err: u32,
        byte_len: u32,
        imm: ibv_wc_imm,
        qp_num: u32,
        src_qp: u32,
        wc_flags: c_uint,
        pkey_index: u16,
        slid: u16,
        sl: u8,
        dlid_path_bits: u8,
    }
    ibv_mw_bind_info {
        mr: *mut ibv_mr,
        addr: u64,
        length: u64,
        mw_access_flags: c_uint,
    }
    ibv_mw_bind {
        wr_id: u64,
        send_flags: c_uint,
        bind_info: ibv_mw_bind_info,
    }
    ibv_mw {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        rkey: u32,
        handle: u32,
        type_: ibv_mw_type,
    }
    ibv_pd {
        context: *mut ibv_context,
        handle: u32,
    }
    ibv_ah {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        handle: u32,
    }
    ibv_grh {
        version_tclass_flow: u32,
        paylen: u16,
        next_hdr: u8,
        hop_limit: u8,
        sgid: ibv_gid,
        dgid: ibv_gid,
    }
    ibv_mr {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        handle: u32,
        lkey: u32,
        rkey: u32,
    }
    ibv_global_route {
        dgid: ibv_gid,
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
    }
    ibv_ah_attr {
        grh: ibv_global_route,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        static_rate: u8,
        is_global: u8,
        port_num: u8,
    }
    ibv_qp_cap {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
    }
    ibv_qp_init_attr {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: ibv_qp_type,
        sq_sig_all: c_int,
    }
    ibv_srq {
        context: *mut ibv_context,
        srq_context: *mut c_void,
        pd: *mut ibv_pd,
        handle: u32,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        events_completed: u32,
    }
    ibv_srq_attr {
        max_wr: u32,
        max_sge: u32,
        srq_limit: u32,
    }
    ibv_srq_init_attr {
        srq_context: *mut c_void,
        attr: ibv_srq_attr,
    }
    ibv_tm_cap {
        max_num_tags: u32,
        max_ops: u32,
    }
    ibv_srq_init_attr_ex {
        srq_context: *mut c_void,
        attr: ibv_srq_attr,
        comp_mask: u32,
        srq_type: ibv_srq_type,
        pd: *mut ibv_pd,
        xrcd: *mut ibv_xrcd,
        cq: *mut ibv_cq,
        tm_cap: ibv_tm_cap,
    }
    ibv_xrcd {
        context: *mut ibv_context,
    }
    ibv_xrcd_init_attr {
        comp_mask: u32,
        fd: c_int,
        oflags: c_int,
    }
    ibv_qp_open_attr {
        comp_mask: u32,
        qp_num: u32,
        xrcd: *mut ibv_xrcd,
        qp_context: *mut c_void,
        qp_type: ibv_qp_type,
    }
    ibv_rx_hash_conf {
        rx_hash_function: u8,
        rx_hash_key_len: u8,
        rx_hash_key: *mut u8,
        rx_hash_fields_mask: u64,
    }
    ibv_qp_init_attr_ex {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: ibv_qp_type,
        sq_sig_all: c_int,
        comp_mask: u32,
        pd: *mut ibv_pd,
        xrcd: *mut ibv_xrcd,
        create_flags: u32,
        max_tso_header: u16,
        rwq_ind_tbl: *mut ibv_rwq_ind_table,
        rx_hash_conf: ibv_rx_hash_conf,
        source_qpn: u32,
        send_ops_flags: u64,
    }
    ibv_qp_attr {
        qp_state: ibv_qp_state,
        cur_qp_state: ibv_qp_state,
        path_mtu: ibv_mtu,
        path_mig_state: ibv_mig_state,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: c_uint,
        cap: ibv_qp_cap,
        ah_attr: ibv_ah_attr,
        alt_ah_attr: ibv_ah_attr,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        rate_limit: u32,
    }
    ibv_sge {
        addr: u64,
        length: u32,
        lkey: u32,
    }
    ibv_send_wr {
        wr_id: u64,
        next: *mut ibv_send_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
        opcode: ibv_wr_opcode,
        send_flags: c_uint,
        imm: ibv_send_wr_imm,
        wr: ibv_send_wr_target,
        qp_type: ibv_send_wr_qp_type,
        extra: ibv_send_wr_extra,
    }
    ibv_send_wr_rdma {
        remote_addr: u64,
        rkey: u32,
    }
    ibv_send_wr_atomic {
        remote_addr: u64,
        compare_add: u64,
        swap: u64,
        rkey: u32,
    }
    ibv_send_wr_ud {
        ah: *mut ibv_ah,
        remote_qpn: u32,
        remote_qkey: u32,
    }
    ibv_send_wr_xrc {
        remote_srqn: u32,
    }
    ibv_send_wr_bind_mw {
        mw: *mut ibv_mw,
        rkey: u32,
        bind_info: ibv_mw_bind_info,
    }
    ibv_send_wr_tso {
        hdr: *mut c_void,
        hdr_sz: u16,
        mss: u16,
    }
    ibv_recv_wr {
        wr_id: u64,
        next: *mut ibv_recv_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
    }
    ibv_qp {
        context: *mut ibv_context,
        qp_context: *mut c_void,
        pd: *mut ibv_pd,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        handle: u32,
        qp_num: u32,
        state: ibv_qp_state,
        qp_type: ibv_qp_type,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        events_completed: u32,
    }
    ibv_data_buf {
        addr: *mut c_void,
        length: usize,
    }
    ibv_qp_ex {
        qp_base: ibv_qp,
        comp_mask: u64,
        wr_id: u64,
        wr_flags: c_uint,
        wr_atomic_cmp_swp: Option<
            unsafe extern "C" fn(
                qp: *mut ibv_qp_ex,
                rkey: u32,
                remote_addr: u64,
                compare: u64,
                swap: u64,
            ),
        >,
        wr_atomic_fetch_add: Option<
            unsafe extern "C" fn(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, add: u64),
        >,
        wr_bind_mw: Option<
            unsafe extern "C" fn(
                qp: *mut ibv_qp_ex,
                mw: *mut ibv_mw,
                rkey: u32,
                bind_info: *const ibv_mw_bind_info,
            ),
        >,
        wr_local_inv: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, invalidate_rkey: u32)>,
        wr_rdma_read: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64)>,
        wr_rdma_write:
            Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64)>,
        wr_rdma_write_imm: Option<
            unsafe extern "C" fn(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm_data: u32),
        >,
        wr_send: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex)>,
        wr_send_imm: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, imm_data: u32)>,
        wr_send_inv: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, invalidate_rkey: u32)>,
        wr_send_tso: Option<
            unsafe extern "C" fn(qp: *mut ibv_qp_ex, hdr: *mut c_void, hdr_sz: u16, mss: u16),
        >,
        wr_set_ud_addr: Option<
            unsafe extern "C" fn(
                qp: *mut ibv_qp_ex,
                ah: *mut ibv_ah,
                remote_qpn: u32,
                remote_qkey: u32,
            ),
        >,
        wr_set_xrc_srqn: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, remote_srqn: u32)>,
        wr_set_inline_data:
            Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize)>,
        wr_set_inline_data_list: Option<
            unsafe extern "C" fn(
                qp: *mut ibv_qp_ex,
                num_buf: usize,
                buf_list: *const ibv_data_buf,
            ),
        >,
        wr_set_sge:
            Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32)>,
        wr_set_sge_list: Option<
            unsafe extern "C" fn(qp: *mut ibv_qp_ex, num_sge: usize, sg_list: *const ibv_sge),
        >,
        wr_start: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex)>,
        wr_complete: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex) -> c_int>,
        wr_abort: Option<unsafe extern "C" fn(qp: *mut ibv_qp_ex)>,
        wr_atomic_write: Option<
            unsafe extern "C" fn(
                qp: *mut ibv_qp_ex,
                rkey: u32,
                remote_addr: u64,
                atomic_wr: *const c_void,
            ),
        >,
        // Of later releases than 44; programs of older ones do not know that it is there.
        wr_flush: Option<
            unsafe extern "C" fn(
                qp: *mut ibv_qp_ex,
                rkey: u32,
                remote_addr: u64,
                len: usize,
                kind: u8,
                level: u8,
            ),
        >,
    }
    ibv_comp_channel {
        context: *mut ibv_context,
        fd: c_int,
        refcnt: c_int,
    }
    ibv_cq {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        comp_events_completed: u32,
        async_events_completed: u32,
    }
    ibv_poll_cq_attr {
        comp_mask: u32,
    }
    ibv_cq_ex {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        comp_events_completed: u32,
        async_events_completed: u32,
        comp_mask: u32,
        status: ibv_wc_status,
        wr_id: u64,
        start_poll:
            Option<unsafe extern "C" fn(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int>,
        next_poll: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> c_int>,
        end_poll: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex)>,
        read_opcode: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> ibv_wc_opcode>,
        read_vendor_err: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        read_byte_len: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        read_imm_data: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        read_qp_num: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        read_src_qp: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        read_wc_flags: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> c_uint>,
        read_slid: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u32>,
        read_sl: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u8>,
        read_dlid_path_bits: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u8>,
        read_completion_ts: Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u64>,
        read_cvlan: Unset,
        read_flow_tag: Unset,
        read_tm_info: Unset,
        read_completion_wallclock_ns:
            Option<unsafe extern "C" fn(current: *mut ibv_cq_ex) -> u64>,
    }
    _ibv_device_ops {
        _dummy1:
            Option<unsafe extern "C" fn(dev: *mut ibv_device, cmd_fd: c_int) -> *mut ibv_context>,
        _dummy2: Option<unsafe extern "C" fn(context: *mut ibv_context)>,
    }
    ibv_device {
        _ops: _ibv_device_ops,
        node_type: ibv_node_type,
        transport_type: ibv_transport_type,
        name: [c_char; 64],
        dev_name: [c_char; 64],
        dev_path: [c_char; 256],
        ibdev_path: [c_char; 256],
    }
    ibv_context_ops {
        _compat_query_device: Option<
            unsafe extern "C" fn(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int,
        >,
        _compat_query_port: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                port_num: u8,
                port_attr: *mut _compat_ibv_port_attr,
            ) -> c_int,
        >,
        _compat_alloc_pd: Unset,
        _compat_dealloc_pd: Unset,
        _compat_reg_mr: Unset,
        _compat_rereg_mr: Unset,
        _compat_dereg_mr: Unset,
        alloc_mw:
            Option<unsafe extern "C" fn(pd: *mut ibv_pd, type_: ibv_mw_type) -> *mut ibv_mw>,
        bind_mw: Option<
            unsafe extern "C" fn(
                qp: *mut ibv_qp,
                mw: *mut ibv_mw,
                mw_bind: *mut ibv_mw_bind,
            ) -> c_int,
        >,
        dealloc_mw: Option<unsafe extern "C" fn(mw: *mut ibv_mw) -> c_int>,
        _compat_create_cq: Unset,
        poll_cq:
            Option<unsafe extern "C" fn(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int>,
        req_notify_cq:
            Option<unsafe extern "C" fn(cq: *mut ibv_cq, solicited_only: c_int) -> c_int>,
        _compat_cq_event: Unset,
        _compat_resize_cq: Unset,
        _compat_destroy_cq: Unset,
        _compat_create_srq: Unset,
        _compat_modify_srq: Unset,
        _compat_query_srq: Unset,
        _compat_destroy_srq: Unset,
        post_srq_recv: Option<
            unsafe extern "C" fn(
                srq: *mut ibv_srq,
                wr: *mut ibv_recv_wr,
                bad_wr: *mut *mut ibv_recv_wr,
            ) -> c_int,
        >,
        _compat_create_qp: Unset,
        _compat_query_qp: Unset,
        _compat_modify_qp: Unset,
        _compat_destroy_qp: Unset,
        post_send: Option<
            unsafe extern "C" fn(
                qp: *mut ibv_qp,
                wr: *mut ibv_send_wr,
                bad_wr: *mut *mut ibv_send_wr,
            ) -> c_int,
        >,
        post_recv: Option<
            unsafe extern "C" fn(
                qp: *mut ibv_qp,
                wr: *mut ibv_recv_wr,
                bad_wr: *mut *mut ibv_recv_wr,
            ) -> c_int,
        >,
        _compat_create_ah: Unset,
        _compat_destroy_ah: Unset,
        _compat_attach_mcast: Unset,
        _compat_detach_mcast: Unset,
        _compat_async_event: Unset,
    }
    ibv_context {
        device: *mut ibv_device,
        ops: ibv_context_ops,
        cmd_fd: c_int,
        async_fd: c_int,
        num_comp_vectors: c_int,
        mutex: pthread_mutex_t,
        abi_compat: *mut c_void,
    }
    ibv_cq_init_attr_ex {
        cqe: u32,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: u32,
        wc_flags: u64,
        comp_mask: u32,
        flags: u32,
        parent_domain: *mut ibv_pd,
    }
    ibv_td_init_attr {
        comp_mask: u32,
    }
    ibv_td {
        context: *mut ibv_context,
    }
    ibv_parent_domain_init_attr {
        pd: *mut ibv_pd,
        td: *mut ibv_td,
        comp_mask: u32,
        alloc: Unset,
        free: Unset,
        pd_context: *mut c_void,
    }
    verbs_context {
        query_port: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                port_num: u8,
                port_attr: *mut ibv_port_attr,
                port_attr_len: usize,
            ) -> c_int,
        >,
        advise_mr: Option<
            unsafe extern "C" fn(
                pd: *mut ibv_pd,
                advice: ibv_advise_mr_advice,
                flags: u32,
                sg_list: *mut ibv_sge,
                num_sges: u32,
            ) -> c_int,
        >,
        alloc_null_mr: Option<unsafe extern "C" fn(pd: *mut ibv_pd) -> *mut ibv_mr>,
        read_counters: Unset,
        attach_counters_point_flow: Unset,
        create_counters: Unset,
        destroy_counters: Unset,
        reg_dm_mr: Option<
            unsafe extern "C" fn(
                pd: *mut ibv_pd,
                dm: *mut ibv_dm,
                dm_offset: u64,
                length: usize,
                access: c_uint,
            ) -> *mut ibv_mr,
        >,
        alloc_dm: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                attr: *mut ibv_alloc_dm_attr,
            ) -> *mut ibv_dm,
        >,
        free_dm: Option<unsafe extern "C" fn(dm: *mut ibv_dm) -> c_int>,
        modify_flow_action_esp: Unset,
        destroy_flow_action: Unset,
        create_flow_action_esp: Unset,
        modify_qp_rate_limit: Unset,
        alloc_parent_domain: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                attr: *mut ibv_parent_domain_init_attr,
            ) -> *mut ibv_pd,
        >,
        dealloc_td: Option<unsafe extern "C" fn(td: *mut ibv_td) -> c_int>,
        alloc_td: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                init_attr: *mut ibv_td_init_attr,
            ) -> *mut ibv_td,
        >,
        modify_cq: Unset,
        post_srq_ops: Unset,
        destroy_rwq_ind_table: Unset,
        create_rwq_ind_table: Unset,
        destroy_wq: Unset,
        modify_wq: Unset,
        create_wq: Unset,
        query_rt_values: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                values: *mut ibv_values_ex,
            ) -> c_int,
        >,
        create_cq_ex: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                init_attr: *mut ibv_cq_init_attr_ex,
            ) -> *mut ibv_cq_ex,
        >,
        priv_: *mut verbs_ex_private,
        query_device_ex: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                input: *const ibv_query_device_ex_input,
                attr: *mut ibv_device_attr_ex,
                attr_size: usize,
            ) -> c_int,
        >,
        ibv_destroy_flow: Unset,
        ABI_placeholder2: Unset,
        ibv_create_flow: Unset,
        ABI_placeholder1: Unset,
        open_qp: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                qp_open_attr: *mut ibv_qp_open_attr,
            ) -> *mut ibv_qp,
        >,
        create_qp_ex: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                qp_init_attr_ex: *mut ibv_qp_init_attr_ex,
            ) -> *mut ibv_qp,
        >,
        get_srq_num:
            Option<unsafe extern "C" fn(srq: *mut ibv_srq, srq_num: *mut u32) -> c_int>,
        create_srq_ex: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                srq_init_attr_ex: *mut ibv_srq_init_attr_ex,
            ) -> *mut ibv_srq,
        >,
        open_xrcd: Option<
            unsafe extern "C" fn(
                context: *mut ibv_context,
                xrcd_init_attr: *mut ibv_xrcd_init_attr,
            ) -> *mut ibv_xrcd,
        >,
        close_xrcd: Option<unsafe extern "C" fn(xrcd: *mut ibv_xrcd) -> c_int>,
        _ABI_placeholder3: u64,
        sz: usize,
        context: ibv_context,
    }
}
