/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause */
/* Generated from zero-copy/abi; do not edit. See zero-copy/abi/src/header.rs. */
#ifndef FARLANE_VERBS_ABI_H
#define FARLANE_VERBS_ABI_H

#include <linux/types.h>
#include <linux/ioctl.h>
#ifdef __KERNEL__
#include <linux/stddef.h>
#include <linux/build_bug.h>
#else
#include <stddef.h>
#endif

#define FARLANE_OFF_BACKEND_STATE 0x40
#define FARLANE_OFF_CALLER_WAITING 0xc0
#define FARLANE_OFF_CALL_SUBMITTED 0x100
#define FARLANE_OFF_CALL_COMPLETED 0x140
#define FARLANE_OFF_ASYNC_PRODUCED 0x180
#define FARLANE_OFF_ASYNC_CONSUMED 0x1c0
#define FARLANE_OFF_ASYNC_RING 0x200
#define FARLANE_OFF_CALL_RING 0x1000
#define FARLANE_OFF_RUNG_SUMMARY 0x5000
#define FARLANE_OFF_RUNG 0x5040
#define FARLANE_RUNG_WORDS 0xa0
#define FARLANE_BACKEND_AWAKE 0x0
#define FARLANE_BACKEND_SLEEPING 0x1
#define FARLANE_ASYNC_ENTRIES 0x40
#define FARLANE_CALL_SLOTS 0x20
#define FARLANE_CALL_SLOT_BYTES 0x200
#define FARLANE_CALL_PAYLOAD_BYTES 0x1f0
#define FARLANE_OP_ADD_GID 0x10
#define FARLANE_OP_DEL_GID 0x11
#define FARLANE_KIND_ALL_MEMORY 0x7
#define FARLANE_FLAG_KERNEL 0x4
#define FARLANE_EVENT_ASYNC 0x1
#define FARLANE_EVENT_FIRST_CHANNEL 0x2
#define FARLANE_HANDLE_SLOT_BITS 0x16
#define FARLANE_MAX_QPS 0x1000
#define FARLANE_MAX_SRQS 0x400
#define FARLANE_MR_SOURCE_PIN 0x1
#define FARLANE_MULTICAST_QPN 0xffffff
#define FARLANE_MAX_FAST_PAGES 0x200
#define FARLANE_QPT_GSI 0x1
#define FARLANE_CONTROL_OFF_BACKEND_STATE 0x0
#define FARLANE_CONTROL_OFF_ARMED 0x0
#define FARLANE_CONTROL_OFF_EVENTS 0x40
#define FARLANE_CONTROL_BYTES 0x80
#define FARLANE_RING_MIN_STRIDE 0x40
#define FARLANE_RING_MAX_STRIDE 0x800
#define FARLANE_WR_REG_MR 0x20
#define FARLANE_WC_OPCODE_REGISTER 0xa

#define FARLANE_CALL_NOP 1
#define FARLANE_CALL_QUERY_DEVICE 2
#define FARLANE_CALL_QUERY_PORT 3
#define FARLANE_CALL_QUERY_GID 4
#define FARLANE_CALL_ALLOC_PD 5
#define FARLANE_CALL_DEALLOC_PD 6
#define FARLANE_CALL_REG_MR 7
#define FARLANE_CALL_DEREG_MR 8
#define FARLANE_CALL_CREATE_CQ 9
#define FARLANE_CALL_DESTROY_CQ 10
#define FARLANE_CALL_CREATE_QP 11
#define FARLANE_CALL_MODIFY_QP 12
#define FARLANE_CALL_QUERY_QP 13
#define FARLANE_CALL_DESTROY_QP 14
#define FARLANE_CALL_ALLOC_BUFFER 15
#define FARLANE_CALL_FREE_BUFFER 16
#define FARLANE_CALL_NEGOTIATE 17
#define FARLANE_CALL_DEVICE_LIMITS 18
#define FARLANE_CALL_CREATE_QP_EX 19
#define FARLANE_CALL_CREATE_AH 21
#define FARLANE_CALL_DESTROY_AH 22
#define FARLANE_CALL_ATTACH_MCAST 23
#define FARLANE_CALL_DETACH_MCAST 24
#define FARLANE_CALL_CREATE_SRQ 25
#define FARLANE_CALL_MODIFY_SRQ 26
#define FARLANE_CALL_QUERY_SRQ 27
#define FARLANE_CALL_DESTROY_SRQ 28
#define FARLANE_CALL_REREG_MR 33
#define FARLANE_CALL_RESIZE_CQ 34
#define FARLANE_CALL_RESIZE_SRQ 35
#define FARLANE_CALL_CREATE_CQ_EX 36
#define FARLANE_CALL_QUERY_CLOCK 37
#define FARLANE_CALL_ALLOC_NULL_MR 38
#define FARLANE_CALL_OPEN_XRCD 29
#define FARLANE_CALL_CLOSE_XRCD 40
#define FARLANE_CALL_OPEN_XRCD_OF 43
#define FARLANE_CALL_OPEN_QP 44
#define FARLANE_CALL_SHARE_CONTEXT 45
#define FARLANE_CALL_IMPORT_CONTEXT 46
#define FARLANE_CALL_IMPORT_PD 47
#define FARLANE_CALL_IMPORT_MR 48
#define FARLANE_CALL_DEREG_IMPORTED_MR 49
#define FARLANE_CALL_CREATE_CQ_RING 50
#define FARLANE_CALL_CREATE_QP_RINGS 51
#define FARLANE_CALL_CREATE_SRQ_RING 52
#define FARLANE_CALL_RESIZE_CQ_RING 53
#define FARLANE_CALL_RESIZE_SRQ_RING 54
#define FARLANE_CALL_ALLOC_FAST_MR 55
#define FARLANE_CALL_PORT_COUNTERS 68
#define FARLANE_CALL_ALLOC_MW 30
#define FARLANE_CALL_DEALLOC_MW 31
#define FARLANE_CALL_CM_REACH 56
#define FARLANE_CALL_CM_BIND 57
#define FARLANE_CALL_CM_LISTEN 58
#define FARLANE_CALL_CM_CONNECT 59
#define FARLANE_CALL_CM_ACCEPT 60
#define FARLANE_CALL_CM_REJECT 61
#define FARLANE_CALL_CM_ESTABLISH 62
#define FARLANE_CALL_CM_DISCONNECT 63
#define FARLANE_CALL_CM_DESTROY 64
#define FARLANE_CALL_CM_MIGRATE 65
#define FARLANE_CALL_CM_QP_ATTR 66
#define FARLANE_CALL_CM_NEXT_EVENT 67

struct farlane_call_header {
	__le32 number;
	__le32 length;
	__le32 status;
	__le32 reserved;
};
_Static_assert(sizeof(struct farlane_call_header) == 16, "size");
_Static_assert(offsetof(struct farlane_call_header, number) == 0, "offset");
_Static_assert(offsetof(struct farlane_call_header, length) == 4, "offset");
_Static_assert(offsetof(struct farlane_call_header, status) == 8, "offset");
_Static_assert(offsetof(struct farlane_call_header, reserved) == 12, "offset");

struct farlane_async_event {
	__le32 kind;
	__le32 object;
	__le32 reserved[2];
};
_Static_assert(sizeof(struct farlane_async_event) == 16, "size");
_Static_assert(offsetof(struct farlane_async_event, kind) == 0, "offset");
_Static_assert(offsetof(struct farlane_async_event, object) == 4, "offset");
_Static_assert(offsetof(struct farlane_async_event, reserved) == 8, "offset");

struct farlane_device_attr {
	__u8 node_guid[8];
	__le64 max_mr_size;
	__le64 device_cap_flags;
	__le32 vendor_id;
	__le32 vendor_part_id;
	__le32 hw_ver;
	__le32 max_qp;
	__le32 max_qp_wr;
	__le32 max_sge;
	__le32 max_cq;
	__le32 max_cqe;
	__le32 max_mr;
	__le32 max_pd;
	__le32 max_qp_rd_atom;
	__le32 max_qp_init_rd_atom;
	__le32 max_res_rd_atom;
	__le32 max_inline_data;
	__le32 max_pkeys;
	__le32 phys_port_cnt;
	__u8 fw_ver[32];
};
_Static_assert(sizeof(struct farlane_device_attr) == 120, "size");
_Static_assert(offsetof(struct farlane_device_attr, node_guid) == 0, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_mr_size) == 8, "offset");
_Static_assert(offsetof(struct farlane_device_attr, device_cap_flags) == 16, "offset");
_Static_assert(offsetof(struct farlane_device_attr, vendor_id) == 24, "offset");
_Static_assert(offsetof(struct farlane_device_attr, vendor_part_id) == 28, "offset");
_Static_assert(offsetof(struct farlane_device_attr, hw_ver) == 32, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_qp) == 36, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_qp_wr) == 40, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_sge) == 44, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_cq) == 48, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_cqe) == 52, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_mr) == 56, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_pd) == 60, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_qp_rd_atom) == 64, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_qp_init_rd_atom) == 68, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_res_rd_atom) == 72, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_inline_data) == 76, "offset");
_Static_assert(offsetof(struct farlane_device_attr, max_pkeys) == 80, "offset");
_Static_assert(offsetof(struct farlane_device_attr, phys_port_cnt) == 84, "offset");
_Static_assert(offsetof(struct farlane_device_attr, fw_ver) == 88, "offset");

struct farlane_device_limits {
	__le64 device_cap_flags;
	__le64 max_dm_size;
	__le64 completion_timestamp_mask;
	__le64 hca_core_clock;
	__le64 odp_general_caps;
	__le32 odp_rc_caps;
	__le32 odp_uc_caps;
	__le32 odp_ud_caps;
	__le32 odp_xrc_caps;
	__le32 atomic_cap;
	__le32 max_srq;
	__le32 max_srq_wr;
	__le32 max_srq_sge;
	__le32 max_ah;
	__le32 max_mw;
	__le32 max_mcast_grp;
	__le32 max_mcast_qp_attach;
	__le32 max_total_mcast_qp_attach;
	__le32 comp_vectors;
	__le32 reserved[16];
};
_Static_assert(sizeof(struct farlane_device_limits) == 160, "size");
_Static_assert(offsetof(struct farlane_device_limits, device_cap_flags) == 0, "offset");
_Static_assert(offsetof(struct farlane_device_limits, max_dm_size) == 8, "offset");
_Static_assert(offsetof(struct farlane_device_limits, completion_timestamp_mask) == 16, "offset");
_Static_assert(offsetof(struct farlane_device_limits, hca_core_clock) == 24, "offset");
_Static_assert(offsetof(struct farlane_device_limits, odp_general_caps) == 32, "offset");
_Static_assert(offsetof(struct farlane_device_limits, odp_rc_caps) == 40, "offset");
_Static_assert(offsetof(struct farlane_device_limits, odp_uc_caps) == 44, "offset");
_Static_assert(offsetof(struct farlane_device_limits, odp_ud_caps) == 48, "offset");
_Static_assert(offsetof(struct farlane_device_limits, odp_xrc_caps) == 52, "offset");
_Static_assert(offsetof(struct farlane_device_limits, atomic_cap) == 56, "offset");
_Static_assert(offsetof(struct farlane_device_limits, max_srq) == 60, "offset");
_Static_assert(offsetof(struct farlane_device_limits, max_srq_wr) == 64, "offset");
_Static_assert(offsetof(struct farlane_device_limits, max_srq_sge) == 68, "offset");
_Static_assert(offsetof(struct farlane_device_limits, max_ah) == 72, "offset");
_Static_assert(offsetof(struct farlane_device_limits, max_mw) == 76, "offset");
_Static_assert(offsetof(struct farlane_device_limits, max_mcast_grp) == 80, "offset");
_Static_assert(offsetof(struct farlane_device_limits, max_mcast_qp_attach) == 84, "offset");
_Static_assert(offsetof(struct farlane_device_limits, max_total_mcast_qp_attach) == 88, "offset");
_Static_assert(offsetof(struct farlane_device_limits, comp_vectors) == 92, "offset");
_Static_assert(offsetof(struct farlane_device_limits, reserved) == 96, "offset");

struct farlane_port_attr {
	__le32 max_msg_sz;
	__le32 gid_tbl_len;
	__le32 pkey_tbl_len;
	__le32 port_cap_flags;
	__u8 state;
	__u8 max_mtu;
	__u8 active_mtu;
	__u8 link_layer;
	__u8 active_width;
	__u8 active_speed;
	__u8 phys_state;
	__u8 reserved;
	__le16 lid;
	__le16 reserved2;
};
_Static_assert(sizeof(struct farlane_port_attr) == 28, "size");
_Static_assert(offsetof(struct farlane_port_attr, max_msg_sz) == 0, "offset");
_Static_assert(offsetof(struct farlane_port_attr, gid_tbl_len) == 4, "offset");
_Static_assert(offsetof(struct farlane_port_attr, pkey_tbl_len) == 8, "offset");
_Static_assert(offsetof(struct farlane_port_attr, port_cap_flags) == 12, "offset");
_Static_assert(offsetof(struct farlane_port_attr, state) == 16, "offset");
_Static_assert(offsetof(struct farlane_port_attr, max_mtu) == 17, "offset");
_Static_assert(offsetof(struct farlane_port_attr, active_mtu) == 18, "offset");
_Static_assert(offsetof(struct farlane_port_attr, link_layer) == 19, "offset");
_Static_assert(offsetof(struct farlane_port_attr, active_width) == 20, "offset");
_Static_assert(offsetof(struct farlane_port_attr, active_speed) == 21, "offset");
_Static_assert(offsetof(struct farlane_port_attr, phys_state) == 22, "offset");
_Static_assert(offsetof(struct farlane_port_attr, reserved) == 23, "offset");
_Static_assert(offsetof(struct farlane_port_attr, lid) == 24, "offset");
_Static_assert(offsetof(struct farlane_port_attr, reserved2) == 26, "offset");

struct farlane_port_counters {
	__le64 send_wrs;
	__le64 send_bytes;
	__le64 recv_wrs;
	__le64 recv_bytes;
	__le64 rdma_write_wrs;
	__le64 rdma_write_bytes;
	__le64 rdma_write_recv_bytes;
	__le64 rdma_read_wrs;
	__le64 rdma_read_bytes;
	__le64 rdma_read_resp_bytes;
	__le64 atomic_wrs;
	__le64 local_wrs;
	__le64 rx_write_requests;
	__le64 rx_read_requests;
	__le64 rx_atomic_requests;
	__le64 tx_drops;
	__le64 out_of_buffer;
	__le64 rcvd_rnr_err;
	__le64 local_ack_timeout_err;
	__le64 retry_exceeded_err;
	__le64 retry_rnr_exceeded_err;
	__le64 req_cqe_error;
	__le64 resp_cqe_error;
	__le64 req_cqe_flush_error;
	__le64 resp_cqe_flush_error;
	__le64 reserved[7];
};
_Static_assert(sizeof(struct farlane_port_counters) == 256, "size");
_Static_assert(offsetof(struct farlane_port_counters, send_wrs) == 0, "offset");
_Static_assert(offsetof(struct farlane_port_counters, send_bytes) == 8, "offset");
_Static_assert(offsetof(struct farlane_port_counters, recv_wrs) == 16, "offset");
_Static_assert(offsetof(struct farlane_port_counters, recv_bytes) == 24, "offset");
_Static_assert(offsetof(struct farlane_port_counters, rdma_write_wrs) == 32, "offset");
_Static_assert(offsetof(struct farlane_port_counters, rdma_write_bytes) == 40, "offset");
_Static_assert(offsetof(struct farlane_port_counters, rdma_write_recv_bytes) == 48, "offset");
_Static_assert(offsetof(struct farlane_port_counters, rdma_read_wrs) == 56, "offset");
_Static_assert(offsetof(struct farlane_port_counters, rdma_read_bytes) == 64, "offset");
_Static_assert(offsetof(struct farlane_port_counters, rdma_read_resp_bytes) == 72, "offset");
_Static_assert(offsetof(struct farlane_port_counters, atomic_wrs) == 80, "offset");
_Static_assert(offsetof(struct farlane_port_counters, local_wrs) == 88, "offset");
_Static_assert(offsetof(struct farlane_port_counters, rx_write_requests) == 96, "offset");
_Static_assert(offsetof(struct farlane_port_counters, rx_read_requests) == 104, "offset");
_Static_assert(offsetof(struct farlane_port_counters, rx_atomic_requests) == 112, "offset");
_Static_assert(offsetof(struct farlane_port_counters, tx_drops) == 120, "offset");
_Static_assert(offsetof(struct farlane_port_counters, out_of_buffer) == 128, "offset");
_Static_assert(offsetof(struct farlane_port_counters, rcvd_rnr_err) == 136, "offset");
_Static_assert(offsetof(struct farlane_port_counters, local_ack_timeout_err) == 144, "offset");
_Static_assert(offsetof(struct farlane_port_counters, retry_exceeded_err) == 152, "offset");
_Static_assert(offsetof(struct farlane_port_counters, retry_rnr_exceeded_err) == 160, "offset");
_Static_assert(offsetof(struct farlane_port_counters, req_cqe_error) == 168, "offset");
_Static_assert(offsetof(struct farlane_port_counters, resp_cqe_error) == 176, "offset");
_Static_assert(offsetof(struct farlane_port_counters, req_cqe_flush_error) == 184, "offset");
_Static_assert(offsetof(struct farlane_port_counters, resp_cqe_flush_error) == 192, "offset");
_Static_assert(offsetof(struct farlane_port_counters, reserved) == 200, "offset");

struct farlane_reg_mr {
	__le32 pd;
	__le32 source;
	__le32 object;
	__le32 access;
	__le64 offset;
	__le64 length;
	__le64 iova;
};
_Static_assert(sizeof(struct farlane_reg_mr) == 40, "size");
_Static_assert(offsetof(struct farlane_reg_mr, pd) == 0, "offset");
_Static_assert(offsetof(struct farlane_reg_mr, source) == 4, "offset");
_Static_assert(offsetof(struct farlane_reg_mr, object) == 8, "offset");
_Static_assert(offsetof(struct farlane_reg_mr, access) == 12, "offset");
_Static_assert(offsetof(struct farlane_reg_mr, offset) == 16, "offset");
_Static_assert(offsetof(struct farlane_reg_mr, length) == 24, "offset");
_Static_assert(offsetof(struct farlane_reg_mr, iova) == 32, "offset");

struct farlane_rereg_mr {
	__le32 mr;
	__le32 reserved;
	struct farlane_reg_mr registration;
};
_Static_assert(sizeof(struct farlane_rereg_mr) == 48, "size");
_Static_assert(offsetof(struct farlane_rereg_mr, mr) == 0, "offset");
_Static_assert(offsetof(struct farlane_rereg_mr, reserved) == 4, "offset");
_Static_assert(offsetof(struct farlane_rereg_mr, registration) == 8, "offset");

struct farlane_mr {
	__le32 handle;
	__le32 lkey;
	__le32 rkey;
};
_Static_assert(sizeof(struct farlane_mr) == 12, "size");
_Static_assert(offsetof(struct farlane_mr, handle) == 0, "offset");
_Static_assert(offsetof(struct farlane_mr, lkey) == 4, "offset");
_Static_assert(offsetof(struct farlane_mr, rkey) == 8, "offset");

struct farlane_alloc_mw {
	__le32 pd;
	__le32 mw_type;
};
_Static_assert(sizeof(struct farlane_alloc_mw) == 8, "size");
_Static_assert(offsetof(struct farlane_alloc_mw, pd) == 0, "offset");
_Static_assert(offsetof(struct farlane_alloc_mw, mw_type) == 4, "offset");

struct farlane_mw {
	__le32 handle;
	__le32 rkey;
};
_Static_assert(sizeof(struct farlane_mw) == 8, "size");
_Static_assert(offsetof(struct farlane_mw, handle) == 0, "offset");
_Static_assert(offsetof(struct farlane_mw, rkey) == 4, "offset");

struct farlane_alloc_fast_mr {
	__le32 pd;
	__le32 region;
	__le32 pages;
	__le32 page_bytes;
};
_Static_assert(sizeof(struct farlane_alloc_fast_mr) == 16, "size");
_Static_assert(offsetof(struct farlane_alloc_fast_mr, pd) == 0, "offset");
_Static_assert(offsetof(struct farlane_alloc_fast_mr, region) == 4, "offset");
_Static_assert(offsetof(struct farlane_alloc_fast_mr, pages) == 8, "offset");
_Static_assert(offsetof(struct farlane_alloc_fast_mr, page_bytes) == 12, "offset");

struct farlane_rxe_addressed {
	__le32 remote_qpn;
	__le32 remote_qkey;
	__le32 reserved;
	__le32 ah_num;
	__u8 dgid[16];
	__le32 flow_label;
	__u8 sgid_index;
	__u8 hop_limit;
	__u8 traffic_class;
	__u8 sl;
};
_Static_assert(sizeof(struct farlane_rxe_addressed) == 40, "size");
_Static_assert(offsetof(struct farlane_rxe_addressed, remote_qpn) == 0, "offset");
_Static_assert(offsetof(struct farlane_rxe_addressed, remote_qkey) == 4, "offset");
_Static_assert(offsetof(struct farlane_rxe_addressed, reserved) == 8, "offset");
_Static_assert(offsetof(struct farlane_rxe_addressed, ah_num) == 12, "offset");
_Static_assert(offsetof(struct farlane_rxe_addressed, dgid) == 16, "offset");
_Static_assert(offsetof(struct farlane_rxe_addressed, flow_label) == 32, "offset");
_Static_assert(offsetof(struct farlane_rxe_addressed, sgid_index) == 36, "offset");
_Static_assert(offsetof(struct farlane_rxe_addressed, hop_limit) == 37, "offset");
_Static_assert(offsetof(struct farlane_rxe_addressed, traffic_class) == 38, "offset");
_Static_assert(offsetof(struct farlane_rxe_addressed, sl) == 39, "offset");

struct farlane_rxe_register {
	__le32 mr;
	__le32 pages;
	__le32 key;
	__le32 access;
	__le64 iova;
	__le64 length;
	__le32 offset;
	__le32 reserved;
};
_Static_assert(sizeof(struct farlane_rxe_register) == 40, "size");
_Static_assert(offsetof(struct farlane_rxe_register, mr) == 0, "offset");
_Static_assert(offsetof(struct farlane_rxe_register, pages) == 4, "offset");
_Static_assert(offsetof(struct farlane_rxe_register, key) == 8, "offset");
_Static_assert(offsetof(struct farlane_rxe_register, access) == 12, "offset");
_Static_assert(offsetof(struct farlane_rxe_register, iova) == 16, "offset");
_Static_assert(offsetof(struct farlane_rxe_register, length) == 24, "offset");
_Static_assert(offsetof(struct farlane_rxe_register, offset) == 32, "offset");
_Static_assert(offsetof(struct farlane_rxe_register, reserved) == 36, "offset");

struct farlane_qp_attr {
	__u8 qp_state;
	__u8 cur_qp_state;
	__u8 path_mtu;
	__u8 path_mig_state;
	__u8 port_num;
	__u8 max_rd_atomic;
	__u8 max_dest_rd_atomic;
	__u8 min_rnr_timer;
	__u8 timeout;
	__u8 retry_cnt;
	__u8 rnr_retry;
	__u8 en_sqd_async_notify;
	__u8 sq_draining;
	__u8 is_global;
	__u8 sgid_index;
	__u8 hop_limit;
	__u8 traffic_class;
	__u8 sl;
	__u8 src_path_bits;
	__u8 static_rate;
	__u8 ah_port;
	__u8 reserved[1];
	__le16 pkey_index;
	__le16 dlid;
	__le16 reserved2;
	__le32 flow_label;
	__le32 qkey;
	__le32 rq_psn;
	__le32 sq_psn;
	__le32 dest_qp_num;
	__le32 qp_access_flags;
	__u8 dgid[16];
};
_Static_assert(sizeof(struct farlane_qp_attr) == 68, "size");
_Static_assert(offsetof(struct farlane_qp_attr, qp_state) == 0, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, cur_qp_state) == 1, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, path_mtu) == 2, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, path_mig_state) == 3, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, port_num) == 4, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, max_rd_atomic) == 5, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, max_dest_rd_atomic) == 6, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, min_rnr_timer) == 7, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, timeout) == 8, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, retry_cnt) == 9, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, rnr_retry) == 10, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, en_sqd_async_notify) == 11, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, sq_draining) == 12, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, is_global) == 13, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, sgid_index) == 14, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, hop_limit) == 15, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, traffic_class) == 16, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, sl) == 17, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, src_path_bits) == 18, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, static_rate) == 19, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, ah_port) == 20, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, reserved) == 21, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, pkey_index) == 22, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, dlid) == 24, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, reserved2) == 26, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, flow_label) == 28, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, qkey) == 32, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, rq_psn) == 36, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, sq_psn) == 40, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, dest_qp_num) == 44, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, qp_access_flags) == 48, "offset");
_Static_assert(offsetof(struct farlane_qp_attr, dgid) == 52, "offset");

struct farlane_modify_qp {
	__le32 qp;
	__le32 mask;
	struct farlane_qp_attr attr;
};
_Static_assert(sizeof(struct farlane_modify_qp) == 76, "size");
_Static_assert(offsetof(struct farlane_modify_qp, qp) == 0, "offset");
_Static_assert(offsetof(struct farlane_modify_qp, mask) == 4, "offset");
_Static_assert(offsetof(struct farlane_modify_qp, attr) == 8, "offset");

struct farlane_qp {
	__le32 handle;
	__le32 qp_num;
};
_Static_assert(sizeof(struct farlane_qp) == 8, "size");
_Static_assert(offsetof(struct farlane_qp, handle) == 0, "offset");
_Static_assert(offsetof(struct farlane_qp, qp_num) == 4, "offset");

struct farlane_version_range {
	__le32 min;
	__le32 max;
};
_Static_assert(sizeof(struct farlane_version_range) == 8, "size");
_Static_assert(offsetof(struct farlane_version_range, min) == 0, "offset");
_Static_assert(offsetof(struct farlane_version_range, max) == 4, "offset");

struct farlane_create_ah {
	__le32 pd;
	__le32 flow_label;
	__u8 dgid[16];
	__le16 dlid;
	__u8 is_global;
	__u8 sgid_index;
	__u8 hop_limit;
	__u8 traffic_class;
	__u8 sl;
	__u8 src_path_bits;
	__u8 static_rate;
	__u8 port_num;
	__u8 reserved[2];
};
_Static_assert(sizeof(struct farlane_create_ah) == 36, "size");
_Static_assert(offsetof(struct farlane_create_ah, pd) == 0, "offset");
_Static_assert(offsetof(struct farlane_create_ah, flow_label) == 4, "offset");
_Static_assert(offsetof(struct farlane_create_ah, dgid) == 8, "offset");
_Static_assert(offsetof(struct farlane_create_ah, dlid) == 24, "offset");
_Static_assert(offsetof(struct farlane_create_ah, is_global) == 26, "offset");
_Static_assert(offsetof(struct farlane_create_ah, sgid_index) == 27, "offset");
_Static_assert(offsetof(struct farlane_create_ah, hop_limit) == 28, "offset");
_Static_assert(offsetof(struct farlane_create_ah, traffic_class) == 29, "offset");
_Static_assert(offsetof(struct farlane_create_ah, sl) == 30, "offset");
_Static_assert(offsetof(struct farlane_create_ah, src_path_bits) == 31, "offset");
_Static_assert(offsetof(struct farlane_create_ah, static_rate) == 32, "offset");
_Static_assert(offsetof(struct farlane_create_ah, port_num) == 33, "offset");
_Static_assert(offsetof(struct farlane_create_ah, reserved) == 34, "offset");

struct farlane_mcast_group {
	__le32 qp;
	__u8 gid[16];
	__le32 lid;
};
_Static_assert(sizeof(struct farlane_mcast_group) == 24, "size");
_Static_assert(offsetof(struct farlane_mcast_group, qp) == 0, "offset");
_Static_assert(offsetof(struct farlane_mcast_group, gid) == 4, "offset");
_Static_assert(offsetof(struct farlane_mcast_group, lid) == 20, "offset");

struct farlane_srq {
	__le32 handle;
	__le32 number;
};
_Static_assert(sizeof(struct farlane_srq) == 8, "size");
_Static_assert(offsetof(struct farlane_srq, handle) == 0, "offset");
_Static_assert(offsetof(struct farlane_srq, number) == 4, "offset");

struct farlane_modify_srq {
	__le32 srq;
	__le32 mask;
	__le32 requests;
	__le32 limit;
};
_Static_assert(sizeof(struct farlane_modify_srq) == 16, "size");
_Static_assert(offsetof(struct farlane_modify_srq, srq) == 0, "offset");
_Static_assert(offsetof(struct farlane_modify_srq, mask) == 4, "offset");
_Static_assert(offsetof(struct farlane_modify_srq, requests) == 8, "offset");
_Static_assert(offsetof(struct farlane_modify_srq, limit) == 12, "offset");

struct farlane_srq_attr {
	__le32 requests;
	__le32 elements;
	__le32 limit;
};
_Static_assert(sizeof(struct farlane_srq_attr) == 12, "size");
_Static_assert(offsetof(struct farlane_srq_attr, requests) == 0, "offset");
_Static_assert(offsetof(struct farlane_srq_attr, elements) == 4, "offset");
_Static_assert(offsetof(struct farlane_srq_attr, limit) == 8, "offset");

struct farlane_ring {
	__le32 region;
	__le32 slots;
	__le32 stride;
};
_Static_assert(sizeof(struct farlane_ring) == 12, "size");
_Static_assert(offsetof(struct farlane_ring, region) == 0, "offset");
_Static_assert(offsetof(struct farlane_ring, slots) == 4, "offset");
_Static_assert(offsetof(struct farlane_ring, stride) == 8, "offset");

struct farlane_control_block {
	__le32 region;
	__le32 offset;
};
_Static_assert(sizeof(struct farlane_control_block) == 8, "size");
_Static_assert(offsetof(struct farlane_control_block, region) == 0, "offset");
_Static_assert(offsetof(struct farlane_control_block, offset) == 4, "offset");

struct farlane_create_cq_ring {
	struct farlane_ring ring;
	struct farlane_control_block control;
	__le32 event;
	__le32 comp_vector;
};
_Static_assert(sizeof(struct farlane_create_cq_ring) == 28, "size");
_Static_assert(offsetof(struct farlane_create_cq_ring, ring) == 0, "offset");
_Static_assert(offsetof(struct farlane_create_cq_ring, control) == 12, "offset");
_Static_assert(offsetof(struct farlane_create_cq_ring, event) == 20, "offset");
_Static_assert(offsetof(struct farlane_create_cq_ring, comp_vector) == 24, "offset");

struct farlane_create_qp_rings {
	__le32 pd;
	__le32 send_cq;
	__le32 recv_cq;
	__le32 qp_type;
	struct farlane_ring send;
	struct farlane_ring recv;
	struct farlane_control_block control;
	__le32 send_sge;
	__le32 inline_bytes;
	__le32 recv_sge;
	__le32 signal_all;
	__le32 srq;
	__le32 xrcd;
};
_Static_assert(sizeof(struct farlane_create_qp_rings) == 72, "size");
_Static_assert(offsetof(struct farlane_create_qp_rings, pd) == 0, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, send_cq) == 4, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, recv_cq) == 8, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, qp_type) == 12, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, send) == 16, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, recv) == 28, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, control) == 40, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, send_sge) == 48, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, inline_bytes) == 52, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, recv_sge) == 56, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, signal_all) == 60, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, srq) == 64, "offset");
_Static_assert(offsetof(struct farlane_create_qp_rings, xrcd) == 68, "offset");

struct farlane_create_srq_ring {
	__le32 pd;
	struct farlane_ring ring;
	struct farlane_control_block control;
	__le32 elements;
	__le32 xrcd;
	__le32 cq;
};
_Static_assert(sizeof(struct farlane_create_srq_ring) == 36, "size");
_Static_assert(offsetof(struct farlane_create_srq_ring, pd) == 0, "offset");
_Static_assert(offsetof(struct farlane_create_srq_ring, ring) == 4, "offset");
_Static_assert(offsetof(struct farlane_create_srq_ring, control) == 16, "offset");
_Static_assert(offsetof(struct farlane_create_srq_ring, elements) == 24, "offset");
_Static_assert(offsetof(struct farlane_create_srq_ring, xrcd) == 28, "offset");
_Static_assert(offsetof(struct farlane_create_srq_ring, cq) == 32, "offset");

struct farlane_move_ring {
	__le32 queue;
	struct farlane_ring ring;
};
_Static_assert(sizeof(struct farlane_move_ring) == 16, "size");
_Static_assert(offsetof(struct farlane_move_ring, queue) == 0, "offset");
_Static_assert(offsetof(struct farlane_move_ring, ring) == 4, "offset");

#endif
