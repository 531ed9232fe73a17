//! Work requests and completions.

use super::*;
use std::ffi::{c_int, c_uint, c_void};

layouts! { union:
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
    ibv_grh {
        version_tclass_flow: u32,
        paylen: u16,
        next_hdr: u8,
        hop_limit: u8,
        sgid: ibv_gid,
        dgid: ibv_gid,
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
    ibv_data_buf {
        addr: *mut c_void,
        length: usize,
    }
}
