//! `rdma/rdma_cma.h` of rdma-core 44 to 65: structures and numbers that cross the C interface.
//! Names are those of the C header.
#![allow(non_camel_case_types, missing_docs, reason = "the names are C's")]

use farlane_verbs_sys::*;
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

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

pub type rdma_cm_event_type = u32;
pub const RDMA_CM_EVENT_ADDR_RESOLVED: rdma_cm_event_type = 0;
pub const RDMA_CM_EVENT_ADDR_ERROR: rdma_cm_event_type = 1;
pub const RDMA_CM_EVENT_ROUTE_RESOLVED: rdma_cm_event_type = 2;
pub const RDMA_CM_EVENT_CONNECT_REQUEST: rdma_cm_event_type = 4;
pub const RDMA_CM_EVENT_CONNECT_RESPONSE: rdma_cm_event_type = 5;
pub const RDMA_CM_EVENT_CONNECT_ERROR: rdma_cm_event_type = 6;
pub const RDMA_CM_EVENT_UNREACHABLE: rdma_cm_event_type = 7;
pub const RDMA_CM_EVENT_REJECTED: rdma_cm_event_type = 8;
pub const RDMA_CM_EVENT_ESTABLISHED: rdma_cm_event_type = 9;
pub const RDMA_CM_EVENT_DEVICE_REMOVAL: rdma_cm_event_type = 11;
pub const RDMA_CM_EVENT_MULTICAST_JOIN: rdma_cm_event_type = 12;

pub type rdma_port_space = u32;
pub const RDMA_PS_IPOIB: rdma_port_space = 0x0002;
pub const RDMA_PS_TCP: rdma_port_space = 0x0106;
pub const RDMA_PS_UDP: rdma_port_space = 0x0111;
pub const RDMA_PS_IB: rdma_port_space = 0x013f;

/// Q_Key of queue pairs of datagrams that programs find by addresses.
pub const RDMA_UDP_QKEY: u32 = 0x0123_4567;
pub const RDMA_MAX_RESP_RES: u8 = 0xff;
pub const RDMA_MAX_INIT_DEPTH: u8 = 0xff;

pub const RAI_PASSIVE: c_int = 1;
pub const RAI_NUMERICHOST: c_int = 2;

pub const RDMA_OPTION_ID: c_int = 0;
pub const RDMA_OPTION_ID_TOS: c_int = 0;
pub const RDMA_OPTION_ID_REUSEADDR: c_int = 1;
pub const RDMA_OPTION_ID_AFONLY: c_int = 2;
pub const RDMA_OPTION_ID_ACK_TIMEOUT: c_int = 3;

pub const RDMA_CM_JOIN_MC_ATTR_ADDRESS: u32 = 1;
pub const RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS: u32 = 2;

layouts! { union:
    rdma_source {
        src_addr: libc::sockaddr,
        src_sin: libc::sockaddr_in,
        src_sin6: libc::sockaddr_in6,
        src_storage: libc::sockaddr_storage,
    }
    rdma_destination {
        dst_addr: libc::sockaddr,
        dst_sin: libc::sockaddr_in,
        dst_sin6: libc::sockaddr_in6,
        dst_storage: libc::sockaddr_storage,
    }
    rdma_event_param {
        conn: rdma_conn_param,
        ud: rdma_ud_param,
    }
}

layouts! { struct:
    rdma_ib_addr {
        sgid: ibv_gid,
        dgid: ibv_gid,
        pkey: u16,
    }
    rdma_addr {
        src: rdma_source,
        dst: rdma_destination,
        ibaddr: rdma_ib_addr,
    }
    ibv_sa_path_rec {
        dgid: ibv_gid,
        sgid: ibv_gid,
        dlid: u16,
        slid: u16,
        raw_traffic: c_int,
        flow_label: u32,
        hop_limit: u8,
        traffic_class: u8,
        reversible: c_int,
        numb_path: u8,
        pkey: u16,
        sl: u8,
        mtu_selector: u8,
        mtu: u8,
        rate_selector: u8,
        rate: u8,
        packet_life_time_selector: u8,
        packet_life_time: u8,
        preference: u8,
    }
    rdma_route {
        addr: rdma_addr,
        path_rec: *mut ibv_sa_path_rec,
        num_paths: c_int,
    }
    rdma_event_channel {
        fd: c_int,
    }
    rdma_cm_id {
        verbs: *mut ibv_context,
        channel: *mut rdma_event_channel,
        context: *mut c_void,
        qp: *mut ibv_qp,
        route: rdma_route,
        ps: rdma_port_space,
        port_num: u8,
        event: *mut rdma_cm_event,
        send_cq_channel: *mut ibv_comp_channel,
        send_cq: *mut ibv_cq,
        recv_cq_channel: *mut ibv_comp_channel,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        pd: *mut ibv_pd,
        qp_type: ibv_qp_type,
    }
    rdma_conn_param {
        private_data: *const c_void,
        private_data_len: u8,
        responder_resources: u8,
        initiator_depth: u8,
        flow_control: u8,
        retry_count: u8,
        rnr_retry_count: u8,
        srq: u8,
        qp_num: u32,
    }
    rdma_ud_param {
        private_data: *const c_void,
        private_data_len: u8,
        ah_attr: ibv_ah_attr,
        qp_num: u32,
        qkey: u32,
    }
    rdma_cm_event {
        id: *mut rdma_cm_id,
        listen_id: *mut rdma_cm_id,
        event: rdma_cm_event_type,
        status: c_int,
        param: rdma_event_param,
    }
    rdma_addrinfo {
        ai_flags: c_int,
        ai_family: c_int,
        ai_qp_type: c_int,
        ai_port_space: c_int,
        ai_src_len: libc::socklen_t,
        ai_dst_len: libc::socklen_t,
        ai_src_addr: *mut libc::sockaddr,
        ai_dst_addr: *mut libc::sockaddr,
        ai_src_canonname: *mut c_char,
        ai_dst_canonname: *mut c_char,
        ai_route_len: usize,
        ai_route: *mut c_void,
        ai_connect_len: usize,
        ai_connect: *mut c_void,
        ai_next: *mut rdma_addrinfo,
    }
    rdma_cm_join_mc_attr_ex {
        comp_mask: u32,
        join_flags: u32,
        addr: *mut libc::sockaddr,
    }
}

const _: () = {
    assert!(size_of::<rdma_ib_addr>() == 40);
    assert!(size_of::<rdma_addr>() == 296);
    assert!(offset_of!(rdma_addr, ibaddr) == 256);
    assert!(size_of::<rdma_route>() == 312);
    assert!(size_of::<ibv_sa_path_rec>() == 64);
    assert!(offset_of!(rdma_cm_id, route) == 32);
    assert!(offset_of!(rdma_cm_id, ps) == 344);
    assert!(offset_of!(rdma_cm_id, event) == 352);
    assert!(offset_of!(rdma_cm_id, pd) == 400);
    assert!(offset_of!(rdma_cm_id, qp_type) == 408);
    assert!(size_of::<rdma_cm_id>() == 416);
    assert!(size_of::<rdma_conn_param>() == 24);
    assert!(offset_of!(rdma_ud_param, ah_attr) == 16);
    assert!(size_of::<rdma_ud_param>() == 56);
    assert!(size_of::<rdma_cm_event>() == 80);
    assert!(offset_of!(rdma_cm_event, param) == 24);
    assert!(size_of::<rdma_addrinfo>() == 96);
    assert!(offset_of!(rdma_addrinfo, ai_src_addr) == 24);
    assert!(size_of::<rdma_cm_join_mc_attr_ex>() == 16);
};
