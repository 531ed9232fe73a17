//! `rdma_getaddrinfo`: names, and what is made at the addresses that they stand for.

use crate::errno::fail;
use crate::sys::*;
use farlane_abi::Errno;
use farlane_verbs_sys::{IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_XRC_RECV, IBV_QPT_XRC_SEND};
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::null_mut;

/// `rdma_getaddrinfo`.
pub unsafe fn get(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    result: *mut *mut rdma_addrinfo,
) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe {
        let hints = hints.as_ref();
        let is_asked = !node.is_null() || !service.is_null();
        if !is_asked && hints.is_none() {
            return fail(Errno::EINVAL);
        }
        let kind = match kind(hints) {
            Ok(kind) => kind,
            Err(errno) => return fail(errno),
        };
        let flags = hints.map_or(0, |hints| hints.ai_flags);
        let mut found = rdma_addrinfo {
            // As the library of rdma-core: of a name it says only whether that is one's own.
            ai_flags: if is_asked { flags & RAI_PASSIVE } else { flags },
            ai_qp_type: kind.0,
            ai_port_space: kind.1,
            ..NONE
        };
        if is_asked {
            let resolved = resolve(node, service, flags, hints, &mut found);
            if resolved != 0 {
                return resolved;
            }
        }
        if let Some(hints) = hints {
            if !is_asked {
                found.ai_family = hints.ai_family;
                if !hints.ai_dst_addr.is_null() {
                    (found.ai_dst_addr, found.ai_dst_len) =
                        given(&mut found, hints.ai_dst_addr, hints.ai_dst_len);
                }
            }
            if found.ai_src_addr.is_null() && !hints.ai_src_addr.is_null() {
                (found.ai_src_addr, found.ai_src_len) =
                    given(&mut found, hints.ai_src_addr, hints.ai_src_len);
            }
        }
        result.write(Box::into_raw(Box::new(found)));
        0
    }
}

/// A copy of an address of the hints. It says the family where nothing else does.
unsafe fn given(
    found: &mut rdma_addrinfo,
    address: *mut libc::sockaddr,
    length: libc::socklen_t,
) -> (*mut libc::sockaddr, libc::socklen_t) {
    // SAFETY: by the caller's contract.
    unsafe {
        if found.ai_family == 0 {
            found.ai_family = crate::address::family(address);
        }
        (copy(address, length), length)
    }
}

/// Nothing.
const NONE: rdma_addrinfo = rdma_addrinfo {
    ai_flags: 0,
    ai_family: 0,
    ai_qp_type: 0,
    ai_port_space: 0,
    ai_src_len: 0,
    ai_dst_len: 0,
    ai_src_addr: null_mut(),
    ai_dst_addr: null_mut(),
    ai_src_canonname: null_mut(),
    ai_dst_canonname: null_mut(),
    ai_route_len: 0,
    ai_route: null_mut(),
    ai_connect_len: 0,
    ai_connect: null_mut(),
    ai_next: null_mut(),
};

/// Queue pair type and port space: each says the other one where that is zero.
fn kind(hints: Option<&rdma_addrinfo>) -> Result<(c_int, c_int), Errno> {
    let given = |number: c_int| u32::try_from(number).map_err(|_| Errno::EINVAL);
    let (qp_type, ps) = match hints {
        None => (0, 0),
        Some(hints) => (given(hints.ai_qp_type)?, given(hints.ai_port_space)?),
    };
    let (qp_type, ps) = match (qp_type, ps) {
        (0, 0 | RDMA_PS_TCP) => (IBV_QPT_RC, RDMA_PS_TCP),
        (0, RDMA_PS_UDP | RDMA_PS_IPOIB) => (IBV_QPT_UD, ps),
        (0, RDMA_PS_IB) => (IBV_QPT_RC, ps),
        (IBV_QPT_UD, 0) => (qp_type, RDMA_PS_UDP),
        (IBV_QPT_RC | IBV_QPT_UC, 0) => (qp_type, RDMA_PS_TCP),
        (IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV, 0) => (qp_type, RDMA_PS_TCP),
        (_, RDMA_PS_TCP | RDMA_PS_UDP | RDMA_PS_IPOIB | RDMA_PS_IB) => (qp_type, ps),
        _ => return Err(Errno::EOPNOTSUPP),
    };
    Ok((qp_type.cast_signed(), ps.cast_signed()))
}

/// Asks the C library. Returns what `getaddrinfo` does: zero, or why not.
unsafe fn resolve(
    node: *const c_char,
    service: *const c_char,
    flags: c_int,
    hints: Option<&rdma_addrinfo>,
    found: &mut rdma_addrinfo,
) -> c_int {
    // SAFETY: by the caller's contract; what the C library gives is freed once.
    unsafe {
        let mut asked: libc::addrinfo = std::mem::zeroed();
        let is_passive = flags & RAI_PASSIVE != 0;
        if is_passive {
            asked.ai_flags |= libc::AI_PASSIVE;
        }
        if flags & RAI_NUMERICHOST != 0 {
            asked.ai_flags |= libc::AI_NUMERICHOST;
        }
        // InfiniBand's own addresses have no names.
        let family = hints.map_or(0, |hints| hints.ai_family);
        if family != libc::AF_IB {
            asked.ai_family = family;
        }
        asked.ai_socktype = libc::SOCK_STREAM;
        let mut list = null_mut();
        let resolved = libc::getaddrinfo(node, service, &raw const asked, &raw mut list);
        if resolved != 0 || list.is_null() {
            return if resolved == 0 {
                libc::EAI_NONAME
            } else {
                resolved
            };
        }
        let first = &*list;
        let name = match first.ai_canonname.is_null() {
            true => null_mut(),
            false => CString::from(CStr::from_ptr(first.ai_canonname)).into_raw(),
        };
        let address = copy(first.ai_addr, first.ai_addrlen);
        found.ai_family = first.ai_family;
        if is_passive {
            (found.ai_src_addr, found.ai_src_len) = (address, first.ai_addrlen);
            found.ai_src_canonname = name;
        } else {
            (found.ai_dst_addr, found.ai_dst_len) = (address, first.ai_addrlen);
            found.ai_dst_canonname = name;
        }
        libc::freeaddrinfo(list);
        0
    }
}

/// A copy of an address, to be freed with the rest; room for any.
unsafe fn copy(address: *const libc::sockaddr, length: libc::socklen_t) -> *mut libc::sockaddr {
    // SAFETY: integers alone; by the caller's contract there are so many bytes.
    unsafe {
        let storage = Box::into_raw(Box::new(std::mem::zeroed::<libc::sockaddr_storage>()));
        let room = size_of::<libc::sockaddr_storage>();
        let length = usize::try_from(length).unwrap_or(room).min(room);
        std::ptr::copy_nonoverlapping(address.cast::<u8>(), storage.cast::<u8>(), length);
        storage.cast()
    }
}

/// `rdma_freeaddrinfo`.
pub unsafe fn free(mut found: *mut rdma_addrinfo) {
    while !found.is_null() {
        // SAFETY: all were made above, each once.
        unsafe {
            let one = Box::from_raw(found);
            for address in [one.ai_src_addr, one.ai_dst_addr] {
                if !address.is_null() {
                    drop(Box::from_raw(address.cast::<libc::sockaddr_storage>()));
                }
            }
            for name in [one.ai_src_canonname, one.ai_dst_canonname] {
                if !name.is_null() {
                    drop(CString::from_raw(name));
                }
            }
            found = one.ai_next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address;

    fn resolved(node: Option<&str>, hints: rdma_addrinfo) -> (i32, i32, Option<String>) {
        let node = node.map(|node| CString::new(node).unwrap());
        let node = node.as_ref().map_or(std::ptr::null(), |node| node.as_ptr());
        let mut found = null_mut();
        // SAFETY: all strings and structures are whole.
        unsafe {
            let returned = get(node, c"7471".as_ptr(), &raw const hints, &raw mut found);
            assert_eq!(returned, 0);
            let one = &*found;
            let is_passive = hints.ai_flags & RAI_PASSIVE != 0;
            let its = if is_passive {
                one.ai_src_addr
            } else {
                one.ai_dst_addr
            };
            let text = address::read(its).ok().map(|address| address.to_string());
            let kind = (one.ai_qp_type, one.ai_port_space, text);
            free(found);
            kind
        }
    }

    #[test]
    fn a_name_has_an_address_and_a_kind() {
        let (rc, ud) = (IBV_QPT_RC.cast_signed(), IBV_QPT_UD.cast_signed());
        let [tcp, udp] = [RDMA_PS_TCP, RDMA_PS_UDP].map(u32::cast_signed);
        let peer = resolved(Some("10.0.0.7"), NONE);
        assert_eq!(peer, (rc, tcp, Some("10.0.0.7:7471".to_owned())));
        let datagrams = rdma_addrinfo {
            ai_port_space: udp,
            ai_flags: RAI_NUMERICHOST,
            ..NONE
        };
        let peer = resolved(Some("fd00::1"), datagrams);
        assert_eq!(peer, (ud, udp, Some("[fd00::1]:7471".to_owned())));
        let passive = rdma_addrinfo {
            ai_flags: RAI_PASSIVE,
            ai_family: libc::AF_INET,
            ..NONE
        };
        assert_eq!(resolved(None, passive).2, Some("0.0.0.0:7471".to_owned()));
    }

    #[test]
    fn addresses_of_the_hints_are_taken_as_they_are() {
        let [from, to] = ["10.0.0.1:0", "10.0.0.7:7471"]
            .map(|address| Box::new(address::storage(address.parse().unwrap())));
        let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_in>()).unwrap();
        let pointer = |storage: &libc::sockaddr_storage| (&raw const *storage).cast_mut().cast();
        let hints = rdma_addrinfo {
            ai_flags: RAI_NUMERICHOST,
            ai_port_space: RDMA_PS_UDP.cast_signed(),
            ai_src_addr: pointer(&from),
            ai_src_len: length,
            ai_dst_addr: pointer(&to),
            ai_dst_len: length,
            ..NONE
        };
        let without = rdma_addrinfo {
            ai_src_addr: null_mut(),
            ai_src_len: 0,
            ..hints
        };
        let null = std::ptr::null();
        for (hints, source) in [(hints, Some("10.0.0.1:0")), (without, None)] {
            let mut found = null_mut();
            // SAFETY: all structures are whole.
            unsafe {
                assert_eq!(get(null, null, &raw const hints, &raw mut found), 0);
                let one = &*found;
                let text = |its| address::read(its).ok().map(|address| address.to_string());
                assert_eq!(text(one.ai_src_addr).as_deref(), source);
                assert_eq!(text(one.ai_dst_addr).as_deref(), Some("10.0.0.7:7471"));
                assert_eq!(one.ai_dst_len, length);
                assert_eq!(
                    (one.ai_family, one.ai_flags),
                    (libc::AF_INET, RAI_NUMERICHOST)
                );
                assert_eq!(one.ai_port_space, RDMA_PS_UDP.cast_signed());
                free(found);
            }
        }
    }

    #[test]
    fn a_family_alone_says_which_address_a_name_has() {
        for (family, text) in [
            (libc::AF_INET, "0.0.0.0:7471"),
            (libc::AF_INET6, "[::]:7471"),
        ] {
            let passive = rdma_addrinfo {
                ai_flags: RAI_PASSIVE | RAI_NUMERICHOST,
                ai_family: family,
                ..NONE
            };
            assert_eq!(resolved(None, passive).2.as_deref(), Some(text));
        }
    }

    #[test]
    fn what_says_nothing_or_nonsense_is_refused() {
        let mut found = null_mut();
        let nonsense = rdma_addrinfo {
            ai_port_space: 7,
            ..NONE
        };
        let node = c"10.0.0.1".as_ptr();
        let null = std::ptr::null();
        // SAFETY: NULL is allowed.
        unsafe {
            assert_eq!(get(null, null, std::ptr::null(), &raw mut found), -1);
            assert_eq!(get(node, null, &raw const nonsense, &raw mut found), -1);
            let numeric = rdma_addrinfo {
                ai_flags: RAI_NUMERICHOST,
                ..NONE
            };
            let name = c"no number".as_ptr();
            assert_ne!(get(name, null, &raw const numeric, &raw mut found), 0);
            free(null_mut());
        }
    }
}
