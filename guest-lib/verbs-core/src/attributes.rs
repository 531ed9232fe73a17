//! Attributes of devices and ports, GID and partition tables.
//!
//! What no backend offers yet is zero here: shared receive queues, address handles, memory
//! windows, atomics, multicast.

use crate::context::{minus_one, shared};
use crate::device::copy_text;
use crate::errno::{EINVAL, ENODATA, answer, fail};
use crate::object::Plain;
use crate::sys::*;
use farlane_abi::Errno;
use farlane_abi::rdma::{DeviceAttr, PortAttr};
use farlane_client::Context;
use std::ffi::c_int;
use std::mem::offset_of;

/// Page sizes that a registration may be made of: 4 KiB and every power of two above.
const PAGE_SIZES: u64 = 0xffff_f000;
/// Time of a local ack, 4.096 us * 2^15, the same as Linux's software RDMA has.
const LOCAL_ACK_DELAY: u8 = 15;
/// The default partition with full membership (IBTA 10.9.1.2), in network byte order.
const DEFAULT_PKEY: u16 = 0xffff;
/// `enum ibv_gid_type_sysfs`: what is not RoCE v2.
const SYSFS_IB_ROCE_V1: u32 = 0;
/// `enum ibv_gid_type_sysfs`: RoCE v2.
const SYSFS_ROCE_V2: u32 = 1;
/// Length of `struct _compat_ibv_port_attr`: up to and with `flags`.
const COMPAT_PORT_BYTES: usize = offset_of!(ibv_port_attr, flags) + 1;

/// A count as C has it.
fn count(value: u32) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}

/// The attributes of a device in C's form.
fn device_attr(wire: &DeviceAttr) -> ibv_device_attr {
    let mut attr = ibv_device_attr::zeroed();
    let text = wire.fw_ver.split(|b| *b == 0).next().unwrap_or_default();
    copy_text(&mut attr.fw_ver, text);
    attr.node_guid = u64::from_ne_bytes(wire.node_guid);
    attr.sys_image_guid = attr.node_guid;
    attr.max_mr_size = wire.max_mr_size.get();
    attr.page_size_cap = PAGE_SIZES;
    attr.vendor_id = wire.vendor_id.get();
    attr.vendor_part_id = wire.vendor_part_id.get();
    attr.hw_ver = wire.hw_ver.get();
    attr.max_qp = count(wire.max_qp.get());
    attr.max_qp_wr = count(wire.max_qp_wr.get());
    attr.device_cap_flags =
        u32::try_from(wire.device_cap_flags.get() & u64::from(u32::MAX)).unwrap_or_default();
    attr.max_sge = count(wire.max_sge.get());
    attr.max_sge_rd = attr.max_sge;
    attr.max_cq = count(wire.max_cq.get());
    attr.max_cqe = count(wire.max_cqe.get());
    attr.max_mr = count(wire.max_mr.get());
    attr.max_pd = count(wire.max_pd.get());
    attr.max_qp_rd_atom = count(wire.max_qp_rd_atom.get());
    attr.max_res_rd_atom = count(wire.max_res_rd_atom.get());
    attr.max_qp_init_rd_atom = count(wire.max_qp_init_rd_atom.get());
    attr.atomic_cap = IBV_ATOMIC_NONE;
    attr.max_pkeys = u16::try_from(wire.max_pkeys.get()).unwrap_or(u16::MAX);
    attr.local_ca_ack_delay = LOCAL_ACK_DELAY;
    attr.phys_port_cnt = u8::try_from(wire.phys_port_cnt.get()).unwrap_or(u8::MAX);
    attr
}

/// The attributes of a port in C's form.
fn port_attr(wire: &PortAttr) -> ibv_port_attr {
    let mut attr = ibv_port_attr::zeroed();
    attr.state = wire.state.into();
    attr.max_mtu = wire.max_mtu.into();
    attr.active_mtu = wire.active_mtu.into();
    attr.gid_tbl_len = count(wire.gid_tbl_len.get());
    attr.port_cap_flags = wire.port_cap_flags.get();
    attr.max_msg_sz = wire.max_msg_sz.get();
    attr.pkey_tbl_len = u16::try_from(wire.pkey_tbl_len.get()).unwrap_or(u16::MAX);
    attr.max_vl_num = 1;
    attr.active_width = wire.active_width;
    attr.active_speed = wire.active_speed;
    attr.phys_state = wire.phys_state;
    attr.link_layer = wire.link_layer;
    attr
}

/// `ibv_query_device`.
pub unsafe fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    answer(match shared.context.device_attributes() {
        Ok(wire) => {
            // SAFETY: by the caller's contract.
            unsafe { attr.write(device_attr(wire)) };
            Ok(())
        }
        Err(error) => Err(error.errno()),
    })
}

/// [`query_device`] for old programs, which find it in the context.
pub unsafe extern "C" fn query_device_op(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { query_device(context, attr) }
}

/// `ibv_query_device_ex`, for a structure of `length` bytes: that of another release may be
/// shorter or longer than ours.
pub unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    length: usize,
) -> c_int {
    // SAFETY: by the caller's contract `input` is NULL or valid.
    if !input.is_null() && unsafe { (*input).comp_mask } != 0 {
        return fail(EINVAL);
    }
    if length < size_of::<ibv_device_attr>() {
        return fail(EINVAL);
    }
    let mut full = ibv_device_attr_ex::zeroed();
    // SAFETY: by the caller's contract; the attributes go to our own structure.
    let result = unsafe { query_device(context, &raw mut full.orig_attr) };
    if result == 0 {
        full.phys_port_cnt_ex = full.orig_attr.phys_port_cnt.into();
        full.device_cap_flags_ex = full.orig_attr.device_cap_flags.into();
        // SAFETY: the caller's structure has `length` bytes.
        unsafe { copy_out(&full, attr, length) };
    }
    result
}

/// Writes the first `length` bytes of a structure, and zero bytes where the caller's is longer.
unsafe fn copy_out<T>(from: &T, to: *mut T, length: usize) {
    let known = length.min(size_of::<T>());
    let to = to.cast::<u8>();
    // SAFETY: the caller has `length` bytes at `to`; `from` has `known`. These are two objects.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(from).cast::<u8>(), to, known);
        to.add(known).write_bytes(0, length - known);
    }
}

unsafe fn query_port_bytes(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    length: usize,
) -> c_int {
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    answer(match shared.context.port_attributes(port.into()) {
        Ok(wire) => {
            // SAFETY: the caller's structure has `length` bytes.
            unsafe { copy_out(&port_attr(&wire), attr, length) };
            Ok(())
        }
        Err(error) => Err(error.errno()),
    })
}

/// `ibv_query_port` of today's headers.
pub unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    length: usize,
) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { query_port_bytes(context, port, attr, length) }
}

/// `ibv_query_port` as exported: the structure of rdma-core 1.0, which ends with `flags`.
pub unsafe fn query_port_compat(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: by the caller's contract; both structures begin alike.
    unsafe { query_port_bytes(context, port, attr.cast(), COMPAT_PORT_BYTES) }
}

/// [`query_port_compat`] for old programs, which find it in the context.
pub unsafe extern "C" fn query_port_compat_op(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { query_port_compat(context, port, attr) }
}

/// `ibv_query_gid`.
pub unsafe fn query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    let Ok(index) = u32::try_from(index) else {
        return minus_one(Errno::EINVAL);
    };
    match shared.context.gid(port.into(), index) {
        Ok(found) => {
            // SAFETY: by the caller's contract.
            unsafe { gid.write(ibv_gid { raw: found.raw }) };
            0
        }
        Err(error) => minus_one(error.errno()),
    }
}

/// An entry of a GID table, `None` for a GID of zeros: an entry that is not in use.
fn gid_entry(context: &Context, port: u32, index: u32) -> Result<Option<ibv_gid_entry>, Errno> {
    let gid = context.gid(port, index).map_err(|error| error.errno())?;
    Ok((gid.raw != [0; 16]).then_some(ibv_gid_entry {
        gid: ibv_gid { raw: gid.raw },
        gid_index: index,
        port_num: port,
        gid_type: gid_type(context, port)?,
        ndev_ifindex: 0,
    }))
}

/// What kind of GIDs a port has.
fn gid_type(context: &Context, port: u32) -> Result<ibv_gid_type, Errno> {
    let attr = context
        .port_attributes(port)
        .map_err(|error| error.errno())?;
    Ok(if u32::from(attr.link_layer) == IBV_LINK_LAYER_ETHERNET {
        IBV_GID_TYPE_ROCE_V2
    } else {
        IBV_GID_TYPE_IB
    })
}

/// `ibv_query_gid_ex`.
pub unsafe fn query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    if flags != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    if entry_size < size_of::<ibv_gid_entry>() {
        return fail(EINVAL);
    }
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    match gid_entry(&shared.context, port, index) {
        Ok(Some(found)) => {
            // SAFETY: the caller's entry has `entry_size` bytes.
            unsafe { copy_out(&found, entry, entry_size) };
            0
        }
        Ok(None) => fail(ENODATA),
        Err(errno) => fail(errno.raw_os_error()),
    }
}

/// `ibv_query_gid_table`: how many entries there were, or an error number below zero.
pub unsafe fn query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let refuse = |errno: c_int| isize::try_from(-fail(errno)).unwrap_or(-1);
    if flags != 0 {
        return refuse(libc::EOPNOTSUPP);
    }
    if entry_size < size_of::<ibv_gid_entry>() {
        return refuse(EINVAL);
    }
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    let found = match gid_table(&shared.context) {
        Ok(found) => found,
        Err(errno) => return refuse(errno.raw_os_error()),
    };
    if found.len() > max_entries {
        return refuse(EINVAL);
    }
    for (at, entry) in found.iter().enumerate() {
        // SAFETY: the caller has `max_entries` of `entry_size` bytes each.
        unsafe { copy_out(entry, entries.byte_add(at * entry_size), entry_size) };
    }
    isize::try_from(found.len()).unwrap_or(isize::MAX)
}

fn gid_table(context: &Context) -> Result<Vec<ibv_gid_entry>, Errno> {
    let errno = |error: farlane_client::Error| error.errno();
    let mut found = Vec::new();
    for port in 1..=ports(context)? {
        let length = context.port_attributes(port).map_err(errno)?.gid_tbl_len;
        for index in 0..length.get() {
            found.extend(gid_entry(context, port, index)?);
        }
    }
    Ok(found)
}

/// How many ports the device has.
fn ports(context: &Context) -> Result<u32, Errno> {
    let attr = context.device_attributes().map_err(|error| error.errno())?;
    Ok(attr.phys_port_cnt.get())
}

/// The type of a GID in the words of sysfs; this function is private to rdma-core and its tools.
pub unsafe fn query_gid_type_sysfs(
    context: *mut ibv_context,
    port: u8,
    index: u32,
    kind: *mut u32,
) -> c_int {
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    match gid_entry(&shared.context, port.into(), index) {
        Ok(Some(entry)) => {
            let value = match entry.gid_type {
                IBV_GID_TYPE_ROCE_V2 => SYSFS_ROCE_V2,
                _ => SYSFS_IB_ROCE_V1,
            };
            // SAFETY: by the caller's contract.
            unsafe { kind.write(value) };
            0
        }
        Ok(None) => minus_one(Errno::ENOENT),
        Err(errno) => minus_one(errno),
    }
}

/// Whether a port's partition table has an entry at `index`: the default partition, alone.
fn has_pkey(context: &Context, port: u8, index: c_int) -> Result<(), Errno> {
    let valid = index == 0 && (1..=ports(context)?).contains(&port.into());
    valid.then_some(()).ok_or(Errno::EINVAL)
}

/// `ibv_query_pkey`.
pub unsafe fn query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    match has_pkey(&shared.context, port, index) {
        Ok(()) => {
            // SAFETY: by the caller's contract.
            unsafe { pkey.write(DEFAULT_PKEY) };
            0
        }
        Err(errno) => minus_one(errno),
    }
}

/// `ibv_get_pkey_index`.
pub unsafe fn pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int {
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    match has_pkey(&shared.context, port, 0) {
        Ok(()) if pkey == DEFAULT_PKEY => 0,
        Ok(()) => minus_one(Errno::EINVAL),
        Err(errno) => minus_one(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_says_what_it_does_not_offer() {
        let attr = device_attr(&DeviceAttr {
            max_qp: u32::MAX.into(),
            fw_ver: *b"0.1.0\0junk\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
            ..DeviceAttr::default()
        });
        assert_eq!(attr.max_qp, c_int::MAX);
        assert_eq!(attr.fw_ver[5..], [0; 59]);
        assert_eq!((attr.max_srq, attr.max_ah, attr.max_mw), (0, 0, 0));
        assert_eq!((attr.max_mcast_grp, attr.atomic_cap), (0, IBV_ATOMIC_NONE));
    }

    #[test]
    fn a_structure_is_written_as_far_as_the_caller_has_it() {
        let from = [1_u8, 2, 3, 4];
        let mut short = [9_u8; 8];
        // SAFETY: both targets have the lengths given.
        unsafe { copy_out(&from, short.as_mut_ptr().cast(), 3) };
        assert_eq!(short, [1, 2, 3, 9, 9, 9, 9, 9]);
        // SAFETY: as above.
        unsafe { copy_out(&from, short.as_mut_ptr().cast(), 6) };
        assert_eq!(short, [1, 2, 3, 4, 0, 0, 9, 9]);
        assert_eq!(COMPAT_PORT_BYTES, 48);
    }
}
