//! Asserts that [`crate::sys`] is laid out as the C headers of rdma-core 44 are on LP64 Linux.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use crate::sys::*;
use std::mem::offset_of;

macro_rules! layout {
    ($($what:expr,)*) => { const _: () = { $(assert!($what);)* }; };
}

// The numbers were printed by a C program compiled against those headers.
layout! {
    size_of::<ibv_device>() == 664,
    offset_of!(ibv_device, name) == 24,
    offset_of!(ibv_device, ibdev_path) == 408,
    size_of::<ibv_context>() == 328,
    offset_of!(ibv_context, ops) == 8,
    offset_of!(ibv_context, cmd_fd) == 264,
    offset_of!(ibv_context, async_fd) == 268,
    offset_of!(ibv_context, abi_compat) == 320,
    size_of::<ibv_context_ops>() == 256,
    offset_of!(ibv_context_ops, poll_cq) == 88,
    offset_of!(ibv_context_ops, req_notify_cq) == 96,
    offset_of!(ibv_context_ops, post_send) == 200,
    offset_of!(ibv_context_ops, post_recv) == 208,
    size_of::<verbs_context>() == 648,
    offset_of!(verbs_context, create_cq_ex) == 200,
    offset_of!(verbs_context, query_device_ex) == 216,
    offset_of!(verbs_context, create_qp_ex) == 264,
    offset_of!(verbs_context, sz) == 312,
    offset_of!(verbs_context, context) == 320,
    size_of::<ibv_device_attr>() == 232,
    offset_of!(ibv_device_attr, max_pkeys) == 224,
    size_of::<ibv_device_attr_ex>() == 400,
    offset_of!(ibv_device_attr_ex, rss_caps) == 296,
    offset_of!(ibv_device_attr_ex, phys_port_cnt_ex) == 396,
    size_of::<ibv_port_attr>() == 52,
    offset_of!(ibv_port_attr, link_layer) == 46,
    offset_of!(ibv_port_attr, flags) == 47,
    size_of::<ibv_gid_entry>() == 32,
    size_of::<ibv_pd>() == 16,
    size_of::<ibv_mr>() == 48,
    offset_of!(ibv_mr, lkey) == 36,
    size_of::<ibv_comp_channel>() == 16,
    size_of::<ibv_cq>() == 128,
    size_of::<ibv_cq_ex>() == 288,
    offset_of!(ibv_cq_ex, start_poll) == 144,
    offset_of!(ibv_cq_ex, read_dlid_path_bits) == 240,
    size_of::<ibv_qp>() == 160,
    offset_of!(ibv_qp, qp_num) == 52,
    offset_of!(ibv_qp, state) == 56,
    size_of::<ibv_wc>() == 48,
    offset_of!(ibv_wc, imm) == 24,
    offset_of!(ibv_wc, wc_flags) == 36,
    size_of::<ibv_sge>() == 16,
    size_of::<ibv_send_wr>() == 128,
    offset_of!(ibv_send_wr, send_flags) == 32,
    offset_of!(ibv_send_wr, wr) == 40,
    size_of::<ibv_recv_wr>() == 32,
    size_of::<ibv_ah_attr>() == 32,
    size_of::<ibv_qp_attr>() == 144,
    offset_of!(ibv_qp_attr, ah_attr) == 56,
    offset_of!(ibv_qp_attr, rate_limit) == 136,
    size_of::<ibv_qp_init_attr>() == 64,
    offset_of!(ibv_qp_init_attr, cap) == 32,
    size_of::<ibv_qp_init_attr_ex>() == 136,
    offset_of!(ibv_qp_init_attr_ex, comp_mask) == 60,
    offset_of!(ibv_qp_init_attr_ex, send_ops_flags) == 128,
    size_of::<ibv_cq_init_attr_ex>() == 56,
    offset_of!(ibv_cq_init_attr_ex, wc_flags) == 32,
    size_of::<ibv_async_event>() == 16,
}
