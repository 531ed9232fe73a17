//! Addresses of sockets, and the GIDs that stand for them: of an IPv4 address the IPv4-mapped one
//! (IBTA annex A17).

use crate::sys::{ibv_sa_path_rec, rdma_addr, rdma_destination, rdma_ib_addr, rdma_source};
use farlane_abi::Errno;
use farlane_verbs_sys::ibv_gid;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A GID in network byte order.
pub type Gid = [u8; 16];

/// No GID.
pub const NO_GID: ibv_gid = ibv_gid { raw: [0; 16] };

/// The GID that stands for an address.
#[must_use]
pub fn gid(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// The address that a GID stands for.
#[must_use]
pub fn ip(gid: Gid) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
}

/// A C address.
///
/// # Errors
/// `EINVAL` for none, and for one of another family than IPv4 and IPv6.
pub unsafe fn read(address: *const libc::sockaddr) -> Result<SocketAddr, Errno> {
    if address.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: by the caller's contract it is as long as its family says.
    unsafe {
        match libc::c_int::from((*address).sa_family) {
            libc::AF_INET => {
                let address = address.cast::<libc::sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
                Ok(SocketAddr::new(ip.into(), u16::from_be(address.sin_port)))
            }
            libc::AF_INET6 => {
                let address = address.cast::<libc::sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
                Ok(SocketAddr::new(ip.into(), u16::from_be(address.sin6_port)))
            }
            _ => Err(Errno::EINVAL),
        }
    }
}

/// The family of a C address, of whatever kind.
pub unsafe fn family(address: *const libc::sockaddr) -> libc::c_int {
    // SAFETY: by the caller's contract.
    unsafe { (*address).sa_family.into() }
}

/// An address as C has it.
#[must_use]
pub fn storage(address: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: integers alone.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let place = &raw mut storage;
    match address {
        SocketAddr::V4(address) => {
            let c = libc::sockaddr_in {
                sin_family: 2,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from(*address.ip()).to_be(),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage has room for every address.
            unsafe { place.cast::<libc::sockaddr_in>().write(c) };
        }
        SocketAddr::V6(address) => {
            let c = libc::sockaddr_in6 {
                sin6_family: 10,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr {
                    s6_addr: address.ip().octets(),
                },
                sin6_scope_id: address.scope_id(),
            };
            // SAFETY: as above.
            unsafe { place.cast::<libc::sockaddr_in6>().write(c) };
        }
    }
    storage
}

const _: () = {
    assert!(size_of::<libc::sockaddr_in>() == 16 && libc::AF_INET == 2);
    assert!(size_of::<libc::sockaddr_in6>() == 28 && libc::AF_INET6 == 10);
};

/// Addresses of an id that has none.
#[must_use]
pub fn none() -> rdma_addr {
    // SAFETY: integers alone.
    let storage = unsafe { std::mem::zeroed() };
    rdma_addr {
        src: rdma_source {
            src_storage: storage,
        },
        dst: rdma_destination {
            dst_storage: storage,
        },
        ibaddr: rdma_ib_addr {
            sgid: NO_GID,
            dgid: NO_GID,
            pkey: 0,
        },
    }
}

/// What an id shows of its path.
#[must_use]
pub fn path(from: Gid, to: Gid) -> ibv_sa_path_rec {
    ibv_sa_path_rec {
        dgid: ibv_gid { raw: to },
        sgid: ibv_gid { raw: from },
        dlid: 0,
        slid: 0,
        raw_traffic: 0,
        flow_label: 0,
        hop_limit: crate::connect::HOP_LIMIT,
        traffic_class: 0,
        reversible: 0x0100_0000_u32.cast_signed(),
        numb_path: 1,
        pkey: u16::MAX,
        sl: 0,
        // Exactly that.
        mtu_selector: 2,
        mtu: 5,
        rate_selector: 2,
        rate: 16,
        packet_life_time_selector: 2,
        packet_life_time: crate::connect::ACK_TIMEOUT - 1,
        preference: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_comes_back_and_has_its_gid() {
        for (text, end) in [("10.0.0.7:7471", 7), ("[fd00::9]:1", 9)] {
            let address: SocketAddr = text.parse().unwrap();
            let c = storage(address);
            // SAFETY: made above.
            assert_eq!(unsafe { read((&raw const c).cast()) }, Ok(address));
            let gid = gid(address.ip());
            assert_eq!((gid[15], ip(gid)), (end, address.ip()));
        }
        // SAFETY: NULL is allowed, and this one is whole.
        unsafe {
            assert_eq!(read(std::ptr::null()), Err(Errno::EINVAL));
            let unix: libc::sockaddr_storage = std::mem::zeroed();
            assert_eq!(read((&raw const unix).cast()), Err(Errno::EINVAL));
        }
    }
}
