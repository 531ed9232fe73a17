//! The exported names of `libibverbs.so.1`; which version each belongs to is in `libibverbs.map`.
//!
//! What a function does, and what it asks of its caller, is in its manual page (`man 3 ibv_...`).
//! Functions that this library has no backend for are in `unsupported.rs`, the interface between
//! rdma-core's own libraries in `private.rs`.

use crate::sys::*;
use crate::{
    address, attributes, channel, completion, context, device, dmabuf, event, import, memory, open,
    queue_pair, rates, srq, strings, sysfs, tables,
};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Exports functions under their C names.
macro_rules! exports {
    ($($(#[$doc:meta])*
       fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $target:path;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// That of the C function: pointers are NULL where its manual page allows it, else
            /// they point to live objects of this library, or to memory of the right size.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the caller's promise is passed on unchanged.
                unsafe { $target($($arg),*) }
            }
        )*
    };
}

/// Exports functions that any arguments are safe for.
macro_rules! pure_exports {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $target:expr;)*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $ty),*) -> $ret {
                $target
            }
        )*
    };
}
pub(crate) use {exports, pure_exports};

// Devices and contexts.
exports! {
    /// Lists the devices.
    fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device = device::list;
    /// Frees a list of devices.
    fn ibv_free_device_list(list: *mut *mut ibv_device) = device::free_list;
    /// Name of a device.
    fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char = device::name;
    /// GUID of a device.
    fn ibv_get_device_guid(device: *mut ibv_device) -> u64 = device::guid;
    /// Index of a device.
    fn ibv_get_device_index(device: *mut ibv_device) -> c_int = device::index;
    /// Opens a device.
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context = open::device;
    /// Closes a device.
    fn ibv_close_device(context: *mut ibv_context) -> c_int = context::close;
}

// Sysfs.
pure_exports! {
    /// Where sysfs is mounted.
    fn ibv_get_sysfs_path() -> *const c_char = sysfs::mount();
}
exports! {
    /// Reads a file of sysfs.
    fn ibv_read_sysfs_file(folder: *const c_char, file: *const c_char, buffer: *mut c_char,
        size: usize) -> c_int = sysfs::read;
}

// Several structures of one context.
exports! {
    /// Takes over a context.
    fn ibv_import_device(cmd_fd: c_int) -> *mut ibv_context = import::device;
    /// Takes over a protection domain.
    fn ibv_import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd = import::pd;
    /// Gives back a protection domain.
    fn ibv_unimport_pd(pd: *mut ibv_pd) = import::unimport_pd;
    /// Takes over a registration.
    fn ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr = import::mr;
    /// Gives back a registration.
    fn ibv_unimport_mr(mr: *mut ibv_mr) = import::unimport_mr;
    /// Takes over device memory.
    fn ibv_import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm = import::dm;
    /// Gives back device memory.
    fn ibv_unimport_dm(dm: *mut ibv_dm) = import::unimport_dm;
}

// Address handles and multicast.
exports! {
    /// Creates an address handle.
    fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah = address::create;
    /// Fills in an address from a completion.
    fn ibv_init_ah_from_wc(context: *mut ibv_context, port: u8, wc: *mut ibv_wc,
        grh: *mut ibv_grh, attr: *mut ibv_ah_attr) -> c_int = address::from_completion;
    /// Creates an address handle from a completion.
    fn ibv_create_ah_from_wc(pd: *mut ibv_pd, wc: *mut ibv_wc, grh: *mut ibv_grh, port: u8)
        -> *mut ibv_ah = address::create_from_completion;
    /// Destroys an address handle.
    fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int = address::destroy;
    /// Joins a multicast group.
    fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int
        = address::attach;
    /// Leaves a multicast group.
    fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int
        = address::detach;
}

// Attributes.
exports! {
    /// Attributes of a device.
    fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int
        = attributes::query_device;
    /// Attributes of a port, as far as the structure reached in rdma-core 1.0.
    fn ibv_query_port(
        context: *mut ibv_context, port: u8, attr: *mut _compat_ibv_port_attr) -> c_int
        = attributes::query_port_compat;
    /// An entry of a GID table.
    fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int
        = tables::query_gid;
    /// An entry of a GID table, with its type.
    fn _ibv_query_gid_ex(
        context: *mut ibv_context, port: u32, index: u32, entry: *mut ibv_gid_entry,
        flags: u32, entry_size: usize) -> c_int = tables::query_gid_ex;
    /// The GID tables of all ports.
    fn _ibv_query_gid_table(context: *mut ibv_context, entries: *mut ibv_gid_entry,
        max_entries: usize, flags: u32, entry_size: usize) -> isize = tables::query_gid_table;
    /// An entry of a partition table.
    fn ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int
        = tables::query_pkey;
    /// Index of a partition key.
    fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int
        = tables::pkey_index;
}

// Protection domains and memory.
exports! {
    /// Allocates a protection domain.
    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd = memory::alloc_pd;
    /// Frees a protection domain.
    fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int = memory::dealloc_pd;
    /// Registers memory.
    fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr
        = memory::reg_mr;
    /// Registers memory under another address.
    fn ibv_reg_mr_iova(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int)
        -> *mut ibv_mr = memory::reg_mr_iova;
    /// Registers memory under another address, with optional access flags.
    fn ibv_reg_mr_iova2(
        pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint)
        -> *mut ibv_mr = memory::reg_mr_iova2;
    /// Registers memory by its file.
    fn ibv_reg_dmabuf_mr(
        pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int)
        -> *mut ibv_mr = dmabuf::register;
    /// Changes a registration.
    fn ibv_rereg_mr(mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void,
        length: usize, access: c_int) -> c_int = memory::rereg_mr;
    /// Ends a registration.
    fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int = memory::dereg_mr;
}

// Completion.
exports! {
    /// Creates a completion channel.
    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel
        = channel::create;
    /// Destroys a completion channel.
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int = channel::destroy;
    /// Waits for an event of a completion channel.
    fn ibv_get_cq_event(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq,
        cq_context: *mut *mut c_void) -> c_int = event::get_cq;
    /// Acknowledges events of a completion queue.
    fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) = completion::ack_events;
    /// Creates a completion queue.
    fn ibv_create_cq(context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void,
        channel: *mut ibv_comp_channel, comp_vector: c_int) -> *mut ibv_cq = completion::create;
    /// Resizes a completion queue.
    fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int = completion::resize;
    /// Destroys a completion queue.
    fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int = completion::destroy;
}

// Queue pairs.
exports! {
    /// Creates a queue pair.
    fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp
        = queue_pair::create;
    /// The extended structure of a queue pair that was made with it.
    fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex = queue_pair::extended;
    /// Changes a queue pair.
    fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int
        = queue_pair::modify;
    /// Attributes of a queue pair.
    fn ibv_query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int,
        init: *mut ibv_qp_init_attr) -> c_int = queue_pair::query;
    /// Destroys a queue pair.
    fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int = queue_pair::destroy;
}

// Shared receive queues.
exports! {
    /// Creates a shared receive queue.
    fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq = srq::create;
    /// Changes a shared receive queue.
    fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int
        = srq::modify;
    /// Attributes of a shared receive queue.
    fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int = srq::query;
    /// Destroys a shared receive queue.
    fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int = srq::destroy;
}

// Asynchronous events.
exports! {
    /// Waits for an asynchronous event.
    fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int
        = event::get;
    /// Acknowledges an asynchronous event.
    fn ibv_ack_async_event(event: *mut ibv_async_event) = event::ack;
}

// Names and rates.
pure_exports! {
    /// Name of a node type.
    fn ibv_node_type_str(value: ibv_node_type) -> *const c_char = strings::node_type(value);
    /// Name of a port state.
    fn ibv_port_state_str(value: ibv_port_state) -> *const c_char = strings::port_state(value);
    /// Name of an event type.
    fn ibv_event_type_str(value: ibv_event_type) -> *const c_char = strings::event_type(value);
    /// Name of a completion status.
    fn ibv_wc_status_str(value: ibv_wc_status) -> *const c_char = strings::wc_status(value);
    /// Name of an opcode.
    fn ibv_wr_opcode_str(value: ibv_wr_opcode) -> *const c_char = strings::wr_opcode(value);
    /// A rate as a multiple of 2.5 Gbit/s.
    fn ibv_rate_to_mult(rate: ibv_rate) -> c_int = rates::to_mult(rate);
    /// The rate that is a multiple of 2.5 Gbit/s.
    fn mult_to_ibv_rate(mult: c_int) -> ibv_rate = rates::from_mult(mult);
    /// A rate in Mbit/s.
    fn ibv_rate_to_mbps(rate: ibv_rate) -> c_int = rates::to_mbps(rate);
    /// The rate of so many Mbit/s.
    fn mbps_to_ibv_rate(mbps: c_int) -> ibv_rate = rates::from_mbps(mbps);
}

// Fork: the child has none of the parent's queues, and the parent's registrations survive its
// writes, so that nothing has to be prepared.
pure_exports! {
    /// Prepares for fork.
    fn ibv_fork_init() -> c_int = 0;
    /// Whether a fork is prepared for.
    fn ibv_is_fork_initialized() -> ibv_fork_status = IBV_FORK_UNNEEDED;
    /// Keeps memory from a child.
    fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int = 0;
    /// Gives memory to a child.
    fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int = 0;
}
