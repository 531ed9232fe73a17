//! Attributes of devices and ports.
//!
//! What a backend does not offer is zero here, as it says: shared receive queues, address handles,
//! memory windows, atomics, multicast.

use crate::context::{ContextState, shared};
use crate::device::copy_text;
use crate::errno::{EINVAL, answer, fail};
use crate::object::Plain;
use crate::sys::*;
use farlane_abi::rdma::{DeviceAttr, DeviceLimits, PortAttr};
use farlane_abi::width::{at_most, halves};
use farlane_rdma_client::Error;
use std::ffi::c_int;
use std::mem::offset_of;

/// Page sizes that a registration may be made of: 4 KiB and every power of two above.
const PAGE_SIZES: u64 = 0xffff_f000;
/// Time of a local ack, 4.096 us * 2^15, the same as Linux's software RDMA has.
const LOCAL_ACK_DELAY: u8 = 15;
/// Length of `struct _compat_ibv_port_attr`: up to and with `flags`.
const COMPAT_PORT_BYTES: usize = offset_of!(ibv_port_attr, flags) + 1;

/// A limit as C has it: the largest number there for a larger one, as the kernel's is.
fn count(value: u32) -> c_int {
    at_most(value, c_int::MAX)
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
    [attr.device_cap_flags, _] = halves(wire.device_cap_flags.get());
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
    attr.max_pkeys = at_most(wire.max_pkeys.get(), u16::MAX);
    attr.local_ca_ack_delay = LOCAL_ACK_DELAY;
    attr.phys_port_cnt = at_most(wire.phys_port_cnt.get(), u8::MAX);
    attr
}

/// Adds what [`device_attr`] leaves zero.
fn add_limits(attr: &mut ibv_device_attr, limits: &DeviceLimits) {
    let [flags, _] = halves(limits.device_cap_flags.get());
    attr.device_cap_flags |= flags;
    attr.atomic_cap = limits.atomic_cap.get();
    attr.max_srq = count(limits.max_srq.get());
    attr.max_srq_wr = count(limits.max_srq_wr.get());
    attr.max_srq_sge = count(limits.max_srq_sge.get());
    attr.max_ah = count(limits.max_ah.get());
    attr.max_mw = count(limits.max_mw.get());
    attr.max_mcast_grp = count(limits.max_mcast_grp.get());
    attr.max_mcast_qp_attach = count(limits.max_mcast_qp_attach.get());
    attr.max_total_mcast_qp_attach = count(limits.max_total_mcast_qp_attach.get());
}

/// The extended attributes of a device in C's form.
fn device_attr_ex(attr: ibv_device_attr, limits: &DeviceLimits) -> ibv_device_attr_ex {
    let mut full = ibv_device_attr_ex::zeroed();
    full.orig_attr = attr;
    full.odp_caps = ibv_odp_caps {
        general_caps: limits.odp_general_caps.get(),
        per_transport_caps: ibv_odp_transport_caps {
            rc_odp_caps: limits.odp_rc_caps.get(),
            uc_odp_caps: limits.odp_uc_caps.get(),
            ud_odp_caps: limits.odp_ud_caps.get(),
        },
    };
    full.completion_timestamp_mask = limits.completion_timestamp_mask.get();
    full.hca_core_clock = limits.hca_core_clock.get();
    full.device_cap_flags_ex = limits.device_cap_flags.get() | u64::from(attr.device_cap_flags);
    full.max_dm_size = limits.max_dm_size.get();
    full.xrc_odp_caps = limits.odp_xrc_caps.get();
    full.phys_port_cnt_ex = attr.phys_port_cnt.into();
    full
}

/// Both kinds of attributes that the backend knows.
fn known(shared: &ContextState) -> Result<(ibv_device_attr, &DeviceLimits), Error> {
    let mut attr = device_attr(shared.context.device_attributes()?);
    let limits = shared.context.limits()?;
    add_limits(&mut attr, limits);
    Ok((attr, limits))
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
    attr.pkey_tbl_len = at_most(wire.pkey_tbl_len.get(), u16::MAX);
    attr.lid = wire.lid.get();
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
    answer(match known(shared) {
        Ok((known, _)) => {
            // SAFETY: by the caller's contract.
            unsafe { attr.write(known) };
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
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    answer(match known(shared) {
        Ok((known, limits)) => {
            let mut full = device_attr_ex(known, limits);
            // The backend may have a window that the VMM cannot show.
            if !shared.context.has_host_memory() {
                full.max_dm_size = 0;
            }
            // SAFETY: the caller's structure has `length` bytes.
            unsafe { copy_out(&full, attr, length) };
            Ok(())
        }
        Err(error) => Err(error.errno()),
    })
}

/// `ibv_query_rt_values_ex`: as other providers do it, the device's clock in its own units stands
/// in the nanoseconds alone.
pub unsafe extern "C" fn query_rt_values(
    context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    // SAFETY: by the caller's contract.
    let (shared, asked) = unsafe { (shared(context), (*values).comp_mask) };
    if asked & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
        return fail(EINVAL);
    }
    let now = match asked {
        0 => 0,
        _ => match shared.context.clock() {
            Ok(now) => now,
            Err(error) => return answer(Err(error.errno())),
        },
    };
    let known = ibv_values_ex {
        comp_mask: asked,
        raw_clock: timespec {
            tv_sec: 0,
            tv_nsec: now.cast_signed(),
        },
    };
    // SAFETY: by the caller's contract.
    unsafe { values.write(known) };
    0
}

/// Writes the first `length` bytes of a structure, and zero bytes where the caller's is longer.
pub(crate) unsafe fn copy_out<T>(from: &T, to: *mut T, length: usize) {
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
    fn a_device_says_what_it_does_offer() {
        let limits = DeviceLimits {
            device_cap_flags: (1 << 40 | 1 << 17).into(),
            atomic_cap: 1.into(),
            max_mw: 65536.into(),
            max_srq: u32::MAX.into(),
            max_dm_size: (1 << 22).into(),
            ..DeviceLimits::default()
        };
        let mut attr = device_attr(&DeviceAttr {
            phys_port_cnt: 1.into(),
            ..DeviceAttr::default()
        });
        add_limits(&mut attr, &limits);
        assert_eq!((attr.atomic_cap, attr.max_mw), (IBV_ATOMIC_HCA, 65536));
        assert_eq!((attr.max_srq, attr.max_ah), (c_int::MAX, 0));
        assert_eq!(attr.device_cap_flags, 1 << 17);
        let full = device_attr_ex(attr, &limits);
        assert_eq!(full.device_cap_flags_ex, 1 << 40 | 1 << 17);
        assert_eq!((full.max_dm_size, full.phys_port_cnt_ex), (1 << 22, 1));
    }

    #[test]
    fn a_port_has_the_lid_that_the_backend_gives_it() {
        let attr = port_attr(&PortAttr {
            lid: 0x1234.into(),
            ..PortAttr::default()
        });
        assert_eq!(attr.lid, 0x1234);
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
