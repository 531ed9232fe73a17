//! Addresses of ids: their own, and their peers'.

use crate::address::{self, Gid};
use crate::connect::service;
use crate::device::{self, Local};
use crate::errno::{answer, called};
use crate::id::{self, Remote};
use crate::sys::*;
use crate::{channel, errno};
use farlane_abi::Errno;
use farlane_abi::rdma::{CM_BIND_REUSE, CmBind, Gid as WireGid};
use farlane_verbs_sys::{ibv_context, ibv_gid};
use std::ffi::c_int;
use std::hash::{BuildHasher as _, RandomState};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// First port that a program is given, and how many there are, as with Linux.
const EPHEMERAL: (u16, u16) = (32_768, 28_232);

/// A port of who connects and is bound to none. Connections need not have different ones.
fn ephemeral() -> u16 {
    let (first, count) = EPHEMERAL;
    let drawn = RandomState::new().hash_one(0) % u64::from(count);
    first + u16::try_from(drawn).unwrap_or_default()
}

/// `rdma_bind_addr`.
pub unsafe fn bind(id: *mut rdma_cm_id, to: *mut libc::sockaddr) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { address::read(to).and_then(|address| bind_to(id, address)) })
}

/// Binds an id to an address: of one device, or of all.
pub unsafe fn bind_to(id: *mut rdma_cm_id, to: SocketAddr) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let state = id::of(id);
        if !state.inner().bound.is_empty()
            || (*id).verbs.is_null() != state.inner().device.is_none()
        {
            return Err(Errno::EINVAL);
        }
        let ip = to.ip().to_canonical();
        let locals: Vec<Local> = if ip.is_unspecified() {
            let all = device::all().into_iter();
            all.map(|device| (device, [0; 16])).collect()
        } else {
            vec![device::with_address(ip)?]
        };
        if locals.is_empty() {
            return Err(Errno::ENODEV);
        }
        let mut port = to.port();
        for (device, gid) in &locals {
            let bind = CmBind {
                gid: *gid,
                service: service((*id).ps, port).into(),
                event: channel::of_id(id)?.index(device)?.into(),
                flags: match state.inner().options.shares_port {
                    true => CM_BIND_REUSE.into(),
                    false => 0.into(),
                },
            };
            let bound = called(device.context().verbs().cm_bind(&bind));
            let bound = match bound {
                Ok(bound) => bound,
                Err(errno) => {
                    unbind(id);
                    return Err(errno);
                }
            };
            // The others are bound to the port that the first one was given.
            port = u16::try_from(bound.service.get() & 0xffff).unwrap_or_default();
            let handle = bound.id.get();
            let its = id::Address(id);
            device.ids().by_handle.insert(handle, its);
            state.inner().bound.push(Remote {
                device: device.clone(),
                handle,
            });
        }
        let mut own = SocketAddr::new(to.ip(), port);
        if let [(device, gid)] = &locals[..]
            && *gid != [0; 16]
        {
            id::settle(id, device)?;
            own.set_ip(like(address::ip(*gid), to.ip()));
            (*id).route.addr.ibaddr.sgid = ibv_gid { raw: *gid };
        }
        (*id).route.addr.src.src_storage = address::storage(own);
        Ok(())
    }
}

/// An address in the form of another one: an IPv4 address may be given as an IPv6 one.
fn like(ip: IpAddr, other: IpAddr) -> IpAddr {
    match (ip, other) {
        (IpAddr::V4(ip), IpAddr::V6(_)) => ip.to_ipv6_mapped().into(),
        _ => ip,
    }
}

unsafe fn unbind(id: *mut rdma_cm_id) {
    // SAFETY: by the caller's contract.
    let bound = std::mem::take(&mut unsafe { id::of(id) }.inner().bound);
    for remote in bound {
        remote.device.ids().by_handle.remove(&remote.handle);
        let _ = remote
            .device
            .context()
            .verbs()
            .cm_destroy(&remote.handle.into());
    }
}

/// `rdma_resolve_addr`.
pub unsafe fn resolve_address(
    id: *mut rdma_cm_id,
    from: *mut libc::sockaddr,
    to: *mut libc::sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe {
        address::read(to).and_then(|to| {
            let from = match from.is_null() {
                true => None,
                false => Some(address::read(from)?),
            };
            resolve(id, from, to)
        })
    })
}

/// Finds the port that has an address, and its own that it is reached from.
pub unsafe fn resolve(
    id: *mut rdma_cm_id,
    from: Option<SocketAddr>,
    to: SocketAddr,
) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        if !(*id).route.path_rec.is_null() {
            return Err(Errno::EINVAL);
        }
        let is_bound = !id::of(id).inner().bound.is_empty();
        if let Some(from) = from
            && !is_bound
            && (!from.ip().is_unspecified() || from.port() != 0)
        {
            bind_to(id, from)?;
        }
        let status = match find(id, to) {
            Ok(()) => 0,
            // What no program could have done better is told as an event.
            Err(errno @ (Errno::EHOSTUNREACH | Errno::EACCES | Errno::ENODEV)) => {
                -errno.raw_os_error()
            }
            Err(errno) => return Err(errno),
        };
        let kind = match status {
            0 => RDMA_CM_EVENT_ADDR_RESOLVED,
            _ => RDMA_CM_EVENT_ADDR_ERROR,
        };
        id::tell(id, kind, status)?;
        id::complete(id)
    }
}

/// The port of a peer, and whence it is reached. A loopback address is that of the device itself.
unsafe fn find(id: *mut rdma_cm_id, to: SocketAddr) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let state = id::of(id);
        let ip = to.ip().to_canonical();
        if ip.is_unspecified() {
            return Err(Errno::EINVAL);
        }
        let bound = state.inner().device.clone();
        let own = (*id).route.addr.ibaddr.sgid.raw;
        let loopback = || device::with_address(ip);
        let (device, own, remote): (_, Gid, Gid) = match bound {
            Some(device) if own != [0; 16] => {
                let remote = match ip.is_loopback() {
                    true => loopback().map_or(address::gid(ip), |(_, gid)| gid),
                    false => address::gid(ip),
                };
                (device, own, remote)
            }
            _ if ip.is_loopback() => {
                let (device, gid) = loopback().map_err(|_| Errno::EHOSTUNREACH)?;
                (device, gid, gid)
            }
            _ => {
                let (device, own) = device::towards(ip)?;
                (device, own, address::gid(ip))
            }
        };
        // It is not known whose a group is.
        if !ip.is_multicast() {
            let remote = WireGid { raw: remote };
            called(device.context().verbs().cm_reach(&remote))?;
        }
        id::settle(id, &device)?;
        let port = address::read((&raw const (*id).route.addr.src).cast());
        let port = port.map_or(0, |bound| bound.port());
        let port = if port == 0 { ephemeral() } else { port };
        let from = SocketAddr::new(like(address::ip(own), to.ip()), port);
        let addr = &raw mut (*id).route.addr;
        (*addr).src.src_storage = address::storage(from);
        (*addr).dst.dst_storage = address::storage(to);
        (*addr).ibaddr = rdma_ib_addr {
            sgid: ibv_gid { raw: own },
            dgid: ibv_gid { raw: remote },
            pkey: u16::MAX,
        };
        Ok(())
    }
}

/// `rdma_resolve_route`: there is one, as soon as there is an address.
pub unsafe fn resolve_route(id: *mut rdma_cm_id, _timeout_ms: c_int) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { route(id) })
}

/// Finds the way to an address that was resolved.
pub unsafe fn route(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let ibaddr = (*id).route.addr.ibaddr;
        let (from, to) = (ibaddr.sgid.raw, ibaddr.dgid.raw);
        if (*id).verbs.is_null() || to == [0; 16] {
            return Err(Errno::EINVAL);
        }
        if (*id).route.path_rec.is_null() {
            (*id).route.path_rec = Box::into_raw(Box::new(address::path(from, to)));
            (*id).route.num_paths = 1;
        }
        id::tell(id, RDMA_CM_EVENT_ROUTE_RESOLVED, 0)?;
        id::complete(id)
    }
}

/// Binds an id to all addresses, and a port that is chosen.
pub unsafe fn bind_any(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe { bind_to(id, SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0)) }
}

/// `rdma_get_devices`.
pub unsafe fn devices(count: *mut c_int) -> *mut *mut ibv_context {
    let all = device::all();
    // SAFETY: plain allocation; one more entry than there are devices, so never of zero bytes.
    let list = unsafe { libc::calloc(all.len() + 1, size_of::<*mut ibv_context>()) }
        .cast::<*mut ibv_context>();
    if list.is_null() {
        return errno::pointer(Err(Errno::ENOMEM));
    }
    for (at, device) in all.iter().enumerate() {
        // SAFETY: the list has room for every device, and NULL stays at its end.
        unsafe { list.add(at).write(device.verbs()) };
    }
    if !count.is_null() {
        // SAFETY: by the caller's contract.
        unsafe { count.write(c_int::try_from(all.len()).unwrap_or(c_int::MAX)) };
    }
    list
}

/// `rdma_free_devices`.
pub unsafe fn free_devices(list: *mut *mut ibv_context) {
    // SAFETY: it was allocated above.
    unsafe { libc::free(list.cast()) };
}
