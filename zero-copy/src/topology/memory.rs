//! On which nodes the kernel has this process's pages, and what their policy is.

use super::Node;

/// `get_mempolicy`: the policy of the memory at an address (`MPOL_F_ADDR`).
const OF_ADDRESS: libc::c_ulong = 2;
/// `MPOL_PREFERRED`.
const PREFERRED: i32 = 1;
/// `MPOL_BIND`.
const BIND: i32 = 2;
/// Nodes of a mask that is asked for: the most that Linux can be built for.
const MASK_BITS: usize = 1024;
/// Bytes of a page that is asked about.
const PAGE: usize = 4096;

/// The nodes of pages; `None` for those that have no memory, and for all where the kernel does not
/// say (`CONFIG_MIGRATION`).
///
/// The kernel tells only of pages in this process's page tables. Those that have memory but that
/// this process has not touched are entered there first; those that have none get none.
pub(super) fn nodes(pages: &[*const u8]) -> Vec<Option<Node>> {
    let mut nodes = ask(pages);
    let mut entered = Vec::new();
    for (index, &page) in pages.iter().enumerate() {
        if nodes.get(index).is_some_and(Option::is_none) && is_resident(page) && enter(page) {
            entered.push((index, page));
        }
    }
    if !entered.is_empty() {
        let pages: Vec<_> = entered.iter().map(|&(_, page)| page).collect();
        for ((index, _), node) in entered.into_iter().zip(ask(&pages)) {
            if let Some(known) = nodes.get_mut(index) {
                *known = node;
            }
        }
    }
    nodes
}

/// What `move_pages` tells.
fn ask(pages: &[*const u8]) -> Vec<Option<Node>> {
    let mut status = vec![-1_i32; pages.len()];
    // SAFETY: without target nodes move_pages moves nothing; it reads as many addresses, which it
    // checks itself, and writes as many words of `status`.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr(),
            std::ptr::null::<i32>(),
            status.as_mut_ptr(),
            0,
        )
    };
    let node = |status: i32| u32::try_from(status).ok().filter(|_| rc == 0).map(Node);
    status.into_iter().map(node).collect()
}

fn start_of(page: *const u8) -> *mut libc::c_void {
    page.map_addr(|address| address & !(PAGE - 1))
        .cast_mut()
        .cast()
}

/// Whether the page at an address is in memory, mapped here or not.
fn is_resident(page: *const u8) -> bool {
    let mut residency = 0_u8;
    // SAFETY: mincore checks the address itself, and writes one byte for one page.
    let rc = unsafe { libc::mincore(start_of(page), PAGE, &raw mut residency) };
    rc == 0 && residency & 1 == 1
}

/// Enters a page into this process's page tables, as reading it would (Linux 5.14).
fn enter(page: *const u8) -> bool {
    // SAFETY: this reads a page of a mapping, changes nothing of it, and checks the address itself.
    unsafe { libc::madvise(start_of(page), PAGE, libc::MADV_POPULATE_READ) == 0 }
}

/// The policy at an address: its mode, and its node where it has one only.
fn policy(address: *const u8) -> Option<(i32, Node)> {
    let mut mode = 0_i32;
    let mut mask = [0_u64; MASK_BITS / 64];
    // SAFETY: `mode` and `mask` are written, and have the sizes that are said; the address is only
    // looked up.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            mask.as_mut_ptr(),
            MASK_BITS,
            address.addr(),
            OF_ADDRESS,
        )
    };
    if rc != 0 {
        return None;
    }
    let mut nodes = mask.iter().zip(0_u32..).flat_map(|(word, index)| {
        (0..64_u32)
            .filter(move |bit| word >> bit & 1 == 1)
            .map(move |bit| index * 64 + bit)
    });
    match (nodes.next(), nodes.next()) {
        // The upper bits are flags.
        (Some(node), None) => Some((mode & 0xff, Node(node))),
        _ => None,
    }
}

/// The one node to which memory is bound.
pub(super) fn binding(address: *const u8) -> Option<Node> {
    policy(address)
        .filter(|(mode, _)| *mode == BIND)
        .map(|(_, node)| node)
}

/// The one node from which memory is taken where it has room.
pub(super) fn preference(address: *const u8) -> Option<Node> {
    policy(address)
        .filter(|(mode, _)| matches!(*mode, PREFERRED | BIND))
        .map(|(_, node)| node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::{AsFd as _, OwnedFd};

    fn file(bytes: u64) -> OwnedFd {
        let fd = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    }

    #[test]
    fn looking_gives_no_memory_and_finds_what_others_have_touched() {
        const BYTES: u64 = 1 << 20;
        let fd = file(BYTES);
        let here = Mapping::new(fd.as_fd(), 0, BYTES, true).unwrap();
        let pages: Vec<_> = (0..256)
            .map(|n| here.base().wrapping_add(n * PAGE).cast_const())
            .collect();
        assert!(nodes(&pages).iter().all(Option::is_none));
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_blocks, 0);
        // As the VM does it: by another mapping than this one.
        rustix::io::pwrite(&fd, &[1], 100 * 4096).unwrap();
        let found = nodes(&pages);
        let says = ask(&[std::ptr::from_ref(&found).cast()])[0].is_some();
        assert_eq!(found[100].is_some(), says);
        assert!(rustix::fs::fstat(&fd).unwrap().st_blocks < 256 * 8);
    }

    #[test]
    fn addresses_of_nothing_are_on_no_node() {
        assert_eq!(
            nodes(&[std::ptr::null(), std::ptr::without_provenance(PAGE)]),
            [None, None]
        );
        assert_eq!(binding(std::ptr::null()), None);
    }

    #[test]
    fn a_shared_file_that_one_mapping_has_bound_is_bound_in_all() {
        let fd = file(1 << 20);
        let [monitor, here] = [(); 2].map(|()| Mapping::new(fd.as_fd(), 0, 1 << 20, true).unwrap());
        assert_eq!(binding(here.base()), None);
        let mask = 1_u64;
        // SAFETY: the mapping is this test's own; the mask has 64 bits.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                monitor.base(),
                1_usize << 20,
                BIND,
                &raw const mask,
                64_usize,
                0,
            )
        };
        if rc != 0 {
            let error = std::io::Error::last_os_error();
            // Built without NUMA: there is no such call.
            assert_eq!(error.raw_os_error(), Some(libc::ENOSYS), "{error}");
            return;
        }
        assert_eq!(binding(here.base()), Some(Node(0)));
        assert_eq!(preference(here.base()), Some(Node(0)));
    }
}
