//! Devices, and contexts of them: the tables of functions that a program calls through.

use super::*;
use std::ffi::{c_char, c_int, c_uint, c_void};

layouts! { union:
    ibv_async_event_element {
        cq: *mut ibv_cq,
        qp: *mut ibv_qp,
        srq: *mut ibv_srq,
        wq: *mut ibv_wq,
        port_num: c_int,
    }
}

layouts! { struct:
    ibv_async_event {
        element: ibv_async_event_element,
        event_type: ibv_event_type,
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
