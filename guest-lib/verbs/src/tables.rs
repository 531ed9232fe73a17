//! GID and partition tables of ports.

use crate::attributes::copy_out;
use crate::context::{minus_one, shared};
use crate::errno::{EINVAL, ENODATA, fail};
use crate::sys::*;
use farlane_abi::Errno;
use farlane_abi::width::to_isize;
use farlane_rdma_client::Context;
use std::ffi::c_int;

/// The default partition with full membership (IBTA 10.9.1.2), in network byte order.
const DEFAULT_PKEY: u16 = 0xffff;
/// `enum ibv_gid_type_sysfs`: what is not RoCE v2.
const SYSFS_IB_ROCE_V1: u32 = 0;
/// `enum ibv_gid_type_sysfs`: RoCE v2.
const SYSFS_ROCE_V2: u32 = 1;

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
    let refuse = |errno: c_int| to_isize((-fail(errno)).into());
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
    // A vector has no more.
    found.len().cast_signed()
}

fn gid_table(context: &Context) -> Result<Vec<ibv_gid_entry>, Errno> {
    let errno = |error: farlane_rdma_client::Error| error.errno();
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
        Ok(entry) => {
            // SAFETY: by the caller's contract.
            unsafe { kind.write(sysfs_type(entry.as_ref())) };
            0
        }
        Err(errno) => minus_one(errno),
    }
}

/// The type of an entry in the words of sysfs. rdma-core's `ibv_query_gid_type` says
/// `IBV_GID_TYPE_SYSFS_IB_ROCE_V1` of one that is not in use, too.
fn sysfs_type(entry: Option<&ibv_gid_entry>) -> u32 {
    match entry.map(|entry| entry.gid_type) {
        Some(IBV_GID_TYPE_ROCE_V2) => SYSFS_ROCE_V2,
        _ => SYSFS_IB_ROCE_V1,
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
    fn an_unused_gid_has_a_type_in_sysfs() {
        let entry = |gid_type| ibv_gid_entry {
            gid: ibv_gid { raw: [1; 16] },
            gid_index: 0,
            port_num: 1,
            gid_type,
            ndev_ifindex: 0,
        };
        assert_eq!(sysfs_type(None), SYSFS_IB_ROCE_V1);
        assert_eq!(sysfs_type(Some(&entry(IBV_GID_TYPE_IB))), SYSFS_IB_ROCE_V1);
        assert_eq!(
            sysfs_type(Some(&entry(IBV_GID_TYPE_ROCE_V2))),
            SYSFS_ROCE_V2
        );
    }
}
