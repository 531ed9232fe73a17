//! The interface between rdma-core's own libraries (`IBVERBS_PRIVATE_*`).
//!
//! perftest and others link to providers' libraries (libmlx5, libefa, libhns), which import all
//! of this. A provider's constructor registers it, and that is all that is ever called here:
//! there is no device for it. So the rest fails with `ENOSYS`.
//!
//! Arguments are not declared: in the C calling conventions of Linux a callee may ignore them.

use crate::errno::{ENOSYS, fail, fail_null};
use crate::exports::exports;
use crate::sys::ibv_context;
use crate::tables;
use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicBool;

/// A provider's wish that objects of a gone device be destroyed without an error.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the name is C's")]
pub static verbs_allow_disassociate_destroy: AtomicBool = AtomicBool::new(false);

exports! {
    /// Type of a GID as sysfs names it.
    fn ibv_query_gid_type(context: *mut ibv_context, port: u8, index: u32, gid_type: *mut u32)
        -> c_int = tables::query_gid_type_sysfs;
}

macro_rules! stubs {
    ($ret:ty = $answer:expr; $($name:ident)*) => {
        $(
            /// Part of the interface between providers and rdma-core.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> $ret {
                $answer
            }
        )*
    };
}

stubs! {
    () = ();
    verbs_register_driver_34 verbs_register_driver_57 verbs_register_driver_59
    verbs_register_driver_64 verbs_register_driver_65
    verbs_init_cq verbs_set_ops verbs_uninit_context __verbs_log
}

stubs! {
    *mut c_void = fail_null(ENOSYS);
    _verbs_init_and_alloc_context ibv_cmd_create_flow verbs_open_device
}

stubs! {
    c_int = fail(ENOSYS);
    execute_ioctl ibv_cmd_advise_mr ibv_cmd_alloc_dm ibv_cmd_alloc_mw ibv_cmd_alloc_pd
    ibv_cmd_attach_mcast ibv_cmd_close_xrcd ibv_cmd_create_ah ibv_cmd_create_counters
    ibv_cmd_create_cq ibv_cmd_create_cq_ex ibv_cmd_create_cq_ex2 ibv_cmd_create_flow_action_esp
    ibv_cmd_create_qp ibv_cmd_create_qp_ex ibv_cmd_create_qp_ex2 ibv_cmd_create_rwq_ind_table
    ibv_cmd_create_srq ibv_cmd_create_srq_ex ibv_cmd_create_wq ibv_cmd_dealloc_mw
    ibv_cmd_dealloc_pd ibv_cmd_dereg_mr ibv_cmd_destroy_ah ibv_cmd_destroy_counters
    ibv_cmd_destroy_cq ibv_cmd_destroy_flow ibv_cmd_destroy_flow_action ibv_cmd_destroy_qp
    ibv_cmd_destroy_rwq_ind_table ibv_cmd_destroy_srq ibv_cmd_destroy_wq ibv_cmd_detach_mcast
    ibv_cmd_free_dm ibv_cmd_get_context ibv_cmd_modify_cq ibv_cmd_modify_flow_action_esp
    ibv_cmd_modify_qp ibv_cmd_modify_qp_ex ibv_cmd_modify_srq ibv_cmd_modify_wq ibv_cmd_open_qp
    ibv_cmd_open_xrcd ibv_cmd_poll_cq ibv_cmd_post_recv ibv_cmd_post_send ibv_cmd_post_srq_recv
    ibv_cmd_query_context ibv_cmd_query_device_any ibv_cmd_query_mr ibv_cmd_query_port
    ibv_cmd_query_qp ibv_cmd_query_srq ibv_cmd_read_counters ibv_cmd_reg_dmabuf_mr
    ibv_cmd_reg_dm_mr ibv_cmd_reg_mr ibv_cmd_req_notify_cq ibv_cmd_rereg_mr ibv_cmd_resize_cq
    ibv_read_ibdev_sysfs_file __ioctl_final_num_attrs
}
