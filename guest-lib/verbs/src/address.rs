//! Address handles, and groups of queue pairs that receive the same.

use crate::context::shared;
use crate::errno::{answer, fail, pointer};
use crate::memory;
use crate::object::Object;
use crate::parent_domain::Use;
use crate::qp_attr::no_address;
use crate::queue_pair;
use crate::sys::*;
use farlane_abi::Errno;
use farlane_rdma_client::{AddressHandle, CreateAh};
use std::ffi::c_int;

/// What is behind an address handle.
#[derive(Debug)]
pub(crate) struct State {
    address: AddressHandle,
    _domain: Option<Use>,
}

type AhObject = Object<ibv_ah, State>;

/// The handle that requests name it by; `EINVAL` for none.
#[inline]
pub(crate) unsafe fn handle(ah: *mut ibv_ah) -> Result<u32, Errno> {
    if ah.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: by the caller's contract `ah` is one that `create` made.
    Ok(unsafe { AhObject::of(ah) }.address.handle())
}

fn to_wire(attr: &ibv_ah_attr) -> CreateAh {
    let mut wire = CreateAh {
        dlid: attr.dlid.into(),
        is_global: u8::from(attr.is_global != 0),
        sl: attr.sl,
        src_path_bits: attr.src_path_bits,
        static_rate: attr.static_rate,
        port_num: attr.port_num,
        ..CreateAh::default()
    };
    if attr.is_global != 0 {
        // SAFETY: both variants of the union are plain bytes of the same extent.
        wire.dgid = unsafe { attr.grh.dgid.raw };
        wire.flow_label = attr.grh.flow_label.into();
        wire.sgid_index = attr.grh.sgid_index;
        wire.hop_limit = attr.grh.hop_limit;
        wire.traffic_class = attr.grh.traffic_class;
    }
    wire
}

/// `ibv_create_ah`.
pub unsafe fn create(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: by the caller's contract.
    let (domain, attr) = unsafe { (memory::domain(pd), &*attr) };
    pointer(
        AddressHandle::create(&domain.pd, &to_wire(attr))
            .map_err(|error| error.errno())
            .map(|address| {
                let shell = ibv_ah {
                    // SAFETY: by the caller's contract `pd` is valid.
                    context: unsafe { (*pd).context },
                    pd,
                    handle: address.handle(),
                };
                let state = State {
                    address,
                    _domain: domain.enter(),
                };
                AhObject::publish(shell, state)
            }),
    )
}

/// `ibv_destroy_ah`.
pub unsafe fn destroy(ah: *mut ibv_ah) -> c_int {
    // SAFETY: by the caller's contract.
    let result = unsafe { AhObject::of(ah) }.address.destroy();
    if result.is_ok() {
        // SAFETY: it is gone, and by the caller's contract nobody uses it any more.
        unsafe { AhObject::retire(ah) };
    }
    answer(result.map_err(|error| error.errno()))
}

/// What a header before a datagram says.
#[derive(Debug, PartialEq, Eq)]
struct Route {
    from: [u8; 16],
    to: [u8; 16],
    flow_label: u32,
    traffic_class: u8,
}

/// The sum of the 16-bit words of an IPv4 header, 0xffff where its checksum is right (RFC 1071).
fn sum(header: &[u8]) -> u32 {
    let words = header.chunks_exact(2);
    let sum: u32 = words
        .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
        .sum();
    (sum & 0xffff) + (sum >> 16)
}

/// Reads a header: IPv4 in its last 20 bytes where that is one with the right checksum, else IPv6
/// (IBTA annex A17.4.5.1). `EPROTONOSUPPORT` where it is neither.
fn route(header: &[u8; 40]) -> Result<Route, c_int> {
    let (ip, mapped) = (&header[20..], |address: &[u8]| {
        let mut gid = [0; 16];
        gid[10..12].copy_from_slice(&[0xff, 0xff]);
        gid[12..].copy_from_slice(address);
        gid
    });
    if ip[0] == 0x45 && sum(ip) == 0xffff {
        return Ok(Route {
            from: mapped(&ip[12..16]),
            to: mapped(&ip[16..]),
            flow_label: 0,
            traffic_class: ip[1],
        });
    }
    let [a, b, c, d] = [header[0], header[1], header[2], header[3]];
    if a >> 4 != 6 {
        return Err(libc::EPROTONOSUPPORT);
    }
    let gid = |at: usize| {
        let mut gid = [0; 16];
        gid.copy_from_slice(&header[at..at + 16]);
        gid
    };
    Ok(Route {
        from: gid(8),
        to: gid(24),
        flow_label: u32::from_be_bytes([0, b & 0xf, c, d]),
        traffic_class: a << 4 | b >> 4,
    })
}

/// The address of the sender of a datagram: -1 with `errno` where its header makes no sense, or
/// names no GID of the port as the receiver's.
pub unsafe fn from_completion(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    // SAFETY: by the caller's contract.
    let (shared, wc) = unsafe { (shared(context), &*wc) };
    let mut address = no_address();
    address.dlid = wc.slid;
    address.sl = wc.sl;
    address.src_path_bits = wc.dlid_path_bits;
    address.port_num = port;
    if wc.wc_flags & IBV_WC_GRH != 0 {
        // SAFETY: by the caller's contract 40 bytes, of any alignment.
        let header = unsafe { grh.cast::<[u8; 40]>().read_unaligned() };
        let route = match route(&header) {
            Ok(route) => route,
            Err(errno) => {
                fail(errno);
                return -1;
            }
        };
        let index = shared.context.port_attributes(port.into()).and_then(|of| {
            let index = (0..of.gid_tbl_len.get()).find(|index| {
                let gid = shared.context.gid(port.into(), *index);
                gid.is_ok_and(|gid| gid.raw == route.to)
            });
            Ok(u8::try_from(index.ok_or(Errno::EINVAL)?).map_err(|_| Errno::EINVAL)?)
        });
        let sgid_index = match index {
            Ok(index) => index,
            Err(error) => {
                fail(error.errno().raw_os_error());
                return -1;
            }
        };
        address.is_global = 1;
        address.grh = ibv_global_route {
            dgid: ibv_gid { raw: route.from },
            flow_label: route.flow_label,
            sgid_index,
            hop_limit: u8::MAX,
            traffic_class: route.traffic_class,
        };
    }
    // SAFETY: by the caller's contract.
    unsafe { attr.write(address) };
    0
}

/// `ibv_create_ah_from_wc`.
pub unsafe fn create_from_completion(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    let mut attr = no_address();
    // SAFETY: by the caller's contract.
    unsafe {
        match from_completion((*pd).context, port, wc, grh, &raw mut attr) {
            0 => create(pd, &raw mut attr),
            _ => std::ptr::null_mut(),
        }
    }
}

/// `ibv_attach_mcast`. A group's LID says nothing here.
pub unsafe fn attach(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: by the caller's contract; both variants of the union are plain bytes.
    let (state, gid) = unsafe { (queue_pair::state(qp), (*gid).raw) };
    answer(state.qp.attach(gid).map_err(|error| error.errno()))
}

/// `ibv_detach_mcast`.
pub unsafe fn detach(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: by the caller's contract; both variants of the union are plain bytes.
    let (state, gid) = unsafe { (queue_pair::state(qp), (*gid).raw) };
    answer(state.qp.detach(gid).map_err(|error| error.errno()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_ipv4_where_its_checksum_says_so() {
        let mut header = [0; 40];
        header[20..].copy_from_slice(&[
            0x45, 0x00, 0x00, 0x73, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0xb8, 0x61, 0xc0, 0xa8,
            0x00, 0x01, 0xc0, 0xa8, 0x00, 0xc7,
        ]);
        let read = route(&header).unwrap();
        assert_eq!(
            read.from,
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 192, 168, 0, 1]
        );
        assert_eq!(read.to[12..], [192, 168, 0, 199]);
        header[31] ^= 1;
        assert_eq!(route(&header), Err(libc::EPROTONOSUPPORT));
        // The same bytes are an IPv6 header's where it says that it is one.
        header[..4].copy_from_slice(&[0x61, 0x2a, 0xbc, 0xde]);
        let read = route(&header).unwrap();
        assert_eq!((read.traffic_class, read.flow_label), (0x12, 0xa_bcde));
        assert_eq!(read.from[..], header[8..24]);
        assert_eq!(read.to[..], header[24..]);
    }

    #[test]
    fn an_address_without_a_route_has_no_gid() {
        let mut attr = no_address();
        attr.grh.dgid = ibv_gid { raw: [7; 16] };
        (attr.dlid, attr.sl, attr.port_num) = (5, 3, 1);
        let wire = to_wire(&attr);
        assert_eq!((wire.dgid, wire.is_global), ([0; 16], 0));
        assert_eq!((wire.dlid.get(), wire.sl, wire.port_num), (5, 3, 1));
        attr.is_global = 5;
        let wire = to_wire(&attr);
        assert_eq!((wire.dgid, wire.is_global), ([7; 16], 1));
    }
}
