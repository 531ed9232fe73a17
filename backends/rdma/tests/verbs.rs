//! The library that programs link, called as they do, at a running backend of their host.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, until};
use farlane_verbs::sys::*;
use farlane_verbs::{
    completion, context, device, dmabuf, import, memory, open, parent_domain, queue_pair, xrcd,
};
use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::io::Error;
use std::os::fd::AsRawFd as _;
use std::ptr::null_mut;

const LENGTH: usize = 4096;
const RIGHTS: c_int = 7;
/// Of the backend.
const WORKERS: c_int = 2;

/// A structure of C's of which all bytes are zero, as programs make them.
fn zeroed<T: Copy>() -> T {
    // SAFETY: those that are used here consist of integers, pointers and optional functions.
    unsafe { std::mem::zeroed() }
}

fn errno() -> Option<c_int> {
    Error::last_os_error().raw_os_error()
}

/// Calls a function of the extended structure.
macro_rules! call {
    ($qp:ident.$name:ident($($arg:expr),*)) => { ((*$qp).$name.unwrap())($qp, $($arg),*) };
}

#[path = "verbs/files.rs"]
mod files;
#[path = "verbs/flushes.rs"]
mod flushes;
#[path = "verbs/lists.rs"]
mod lists;
#[path = "verbs/null.rs"]
mod null;
#[path = "verbs/times.rs"]
mod times;

/// An open device, a domain, a completion queue and registered memory of a program.
struct Program {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    mr: *mut ibv_mr,
    memory: Box<[u8; LENGTH]>,
}

impl Program {
    fn start() -> Self {
        let mut memory = Box::new([0; LENGTH]);
        // SAFETY: as a C program calls them.
        unsafe {
            let list = device::list(null_mut());
            let context = open::device(*list);
            device::free_list(list);
            assert!(!context.is_null());
            let pd = memory::alloc_pd(context);
            let cq = completion::create(context, 16, null_mut(), null_mut(), 0);
            let address = memory.as_mut_ptr().cast();
            let mr = memory::reg_mr(pd, address, LENGTH, RIGHTS);
            assert!(!pd.is_null() && !cq.is_null() && !mr.is_null());
            Self {
                context,
                pd,
                cq,
                mr,
                memory,
            }
        }
    }

    /// Ends it: what is left of it would be in the way.
    fn end(self) {
        // SAFETY: nothing uses these any more.
        unsafe {
            assert_eq!(memory::dereg_mr(self.mr), 0);
            assert_eq!(completion::destroy(self.cq), 0);
            assert_eq!(memory::dealloc_pd(self.pd), 0);
            assert_eq!(context::close(self.context), 0);
        }
    }

    /// A queue pair with the interface of `ibv_wr_start`; NULL where it is refused.
    unsafe fn queue_pair(&self, kind: ibv_qp_type, operations: u64) -> *mut ibv_qp_ex {
        let mut init: ibv_qp_init_attr_ex = zeroed();
        init.qp_type = kind;
        init.send_cq = self.cq;
        init.recv_cq = self.cq;
        init.cap.max_send_wr = 4;
        init.cap.max_send_sge = 2;
        init.cap.max_recv_wr = 1;
        init.cap.max_recv_sge = 1;
        init.cap.max_inline_data = 64;
        init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.pd = self.pd;
        init.send_ops_flags = operations;
        // SAFETY: as a C program calls them.
        unsafe {
            match queue_pair::create_ex(self.context, &raw mut init) {
                qp if qp.is_null() => null_mut(),
                qp => queue_pair::extended(qp),
            }
        }
    }

    /// Has a queue pair write to itself.
    unsafe fn connect(&self, qp: *mut ibv_qp_ex) {
        // SAFETY: as below.
        unsafe { self.connect_granting(qp, 15) };
    }

    /// The same, with these rights of the peer.
    unsafe fn connect_granting(&self, qp: *mut ibv_qp_ex, rights: u32) {
        let mut gid = ibv_gid { raw: [0; 16] };
        let mut attr: ibv_qp_attr = zeroed();
        attr.port_num = 1;
        attr.qp_access_flags = rights;
        attr.path_mtu = 3;
        attr.max_dest_rd_atomic = 1;
        attr.max_rd_atomic = 1;
        attr.min_rnr_timer = 12;
        attr.timeout = 14;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        // SAFETY: as a C program calls them.
        unsafe {
            let own = farlane_verbs::tables::query_gid(self.context, 1, 0, &raw mut gid);
            assert_eq!(own, 0);
            attr.ah_attr.grh.dgid = gid;
            attr.dest_qp_num = (*qp).qp_base.qp_num;
            for (state, mask) in [
                (1, farlane_abi::rdma::QP_TO_INIT),
                (2, farlane_abi::rdma::QP_TO_RTR),
                (3, farlane_abi::rdma::QP_TO_RTS),
            ] {
                attr.qp_state = state;
                let mask = mask.cast_signed();
                assert_eq!(queue_pair::modify(qp.cast(), &raw mut attr, mask), 0);
            }
        }
    }

    /// The next completion: number and status.
    unsafe fn completion(&self) -> (u64, ibv_wc_status) {
        // SAFETY: as below.
        let wc = unsafe { self.work_completion() };
        (wc.wr_id, wc.status)
    }

    /// The next completion.
    unsafe fn work_completion(&self) -> ibv_wc {
        let mut wc: ibv_wc = zeroed();
        // SAFETY: as a C program calls it.
        until("a completion", || unsafe {
            completion::poll(self.cq, 1, &raw mut wc) == 1
        });
        wc
    }

    /// Whether there is no completion now.
    unsafe fn has_none(&self) -> bool {
        // SAFETY: as above.
        unsafe {
            let mut wc: ibv_wc = zeroed();
            completion::poll(self.cq, 1, &raw mut wc) == 0
        }
    }
}

unsafe fn a_device_is_described_as_in_sysfs() {
    let program = Program::start();
    // SAFETY: as a C program calls them.
    unsafe {
        let folder = (&raw const (*(*program.context).device).ibdev_path).cast();
        let read = |file: &CStr| {
            let mut buffer = [0_u8; 64];
            let to = buffer.as_mut_ptr().cast();
            let length = farlane_verbs::sysfs::read(folder, file.as_ptr(), to, buffer.len());
            let length = usize::try_from(length).ok()?;
            Some(String::from_utf8(buffer[..length].to_vec()).unwrap())
        };
        let expect = |text: &str| Some(text.to_owned());
        assert_eq!(read(c"node_type"), expect("1: CA"));
        assert_eq!(read(c"ports/1/state"), expect("4: ACTIVE"));
        let gid = "0000:0000:0000:0000:0000:ffff:7f00:0001";
        assert_eq!(read(c"ports/1/gids/0"), expect(gid));
        assert_eq!(
            read(c"ports/1/gids/1").map(|gid| gid.len()),
            Some(gid.len())
        );
        let guid = u64::from_be(device::guid((*program.context).device));
        let digits = read(c"node_guid").unwrap().replace(':', "");
        assert_eq!(u64::from_str_radix(&digits, 16), Ok(guid));
        assert!(read(c"fw_ver").unwrap().starts_with("farlane"));
        for nothing in [
            c"board_id",
            c"ports/1/gids/99",
            c"ports/2/state",
            c"../none",
        ] {
            assert_eq!(read(nothing), None);
        }
        assert_eq!(errno(), Some(libc::ENOENT));
    }
    program.end();
}

unsafe fn a_parent_domain_keeps_what_it_is_of() {
    let program = Program::start();
    // SAFETY: as a C program calls them.
    unsafe {
        let mut none = ibv_td_init_attr { comp_mask: 0 };
        let td = parent_domain::alloc_td(program.context, &raw mut none);
        let pd = memory::alloc_pd(program.context);
        let mut attr: ibv_parent_domain_init_attr = zeroed();
        attr.pd = pd;
        attr.td = td;
        let parent = parent_domain::alloc(program.context, &raw mut attr);
        assert_eq!((*parent).handle, (*pd).handle);
        assert_eq!(memory::dealloc_pd(pd), libc::EBUSY);
        assert_eq!(parent_domain::dealloc_td(td), libc::EBUSY);
        attr.pd = parent;
        assert!(parent_domain::alloc(program.context, &raw mut attr).is_null());
        attr.comp_mask = 1 << 31;
        assert!(parent_domain::alloc(program.context, &raw mut attr).is_null());
        assert_eq!(errno(), Some(libc::EINVAL));

        // Registrations and completion queues are in it.
        let memory = program.memory.as_ptr().cast_mut().cast();
        let mr = memory::reg_mr(parent, memory, LENGTH, RIGHTS);
        assert_eq!(memory::dealloc_pd(parent), libc::EBUSY);
        assert_eq!(memory::dereg_mr(mr), 0);
        let mut init: ibv_cq_init_attr_ex = zeroed();
        init.cqe = 4;
        init.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
        init.parent_domain = pd;
        assert!(farlane_verbs::poll_ex::create(program.context, &raw mut init).is_null());
        assert_eq!(errno(), Some(libc::EINVAL));
        init.parent_domain = parent;
        let cq = farlane_verbs::poll_ex::create(program.context, &raw mut init);
        assert_eq!(memory::dealloc_pd(parent), libc::EBUSY);
        assert_eq!(completion::destroy(cq.cast()), 0);

        assert_eq!(memory::dealloc_pd(parent), 0);
        assert_eq!(parent_domain::dealloc_td(td), 0);
        assert_eq!(memory::dealloc_pd(pd), 0);
    }
    program.end();
}

unsafe fn a_context_is_imported_by_a_copy_of_its_file() {
    let program = Program::start();
    // SAFETY: as a C program calls them.
    unsafe {
        let copy = libc::dup((*program.context).cmd_fd);
        let second = import::device(copy);
        assert!(!second.is_null() && second != program.context);
        assert_eq!((*second).cmd_fd, copy);
        let unknown = (*program.pd).handle ^ 1;
        assert!(import::pd(second, unknown).is_null());
        assert_eq!(errno(), Some(libc::EINVAL));
        let pd = import::pd(second, (*program.pd).handle);
        let mr = import::mr(pd, (*program.mr).handle);
        assert_eq!((*mr).rkey, (*program.mr).rkey);
        assert_eq!((*mr).length, LENGTH);
        assert!((*mr).addr.is_null());
        // They are given back, not destroyed.
        assert_eq!(memory::dereg_mr(mr), libc::EINVAL);
        assert_eq!(memory::dealloc_pd(pd), libc::EINVAL);
        // What is destroyed is known no more.
        let memory = program.memory.as_ptr().cast_mut().cast::<c_void>();
        let gone = memory::reg_mr(program.pd, memory, LENGTH, RIGHTS);
        let handle = (*gone).handle;
        assert_eq!(memory::dereg_mr(gone), 0);
        assert!(import::mr(pd, handle).is_null());
        // Another domain's registration is none of this one's.
        let other = memory::alloc_pd(program.context);
        let other_imported = import::pd(second, (*other).handle);
        assert!(import::mr(other_imported, (*program.mr).handle).is_null());
        import::unimport_pd(other_imported);
        assert_eq!(memory::dealloc_pd(other), 0);
        import::unimport_mr(mr);
        import::unimport_pd(pd);
        assert_eq!(context::close(second), 0);
        assert_eq!(libc::fcntl(copy, libc::F_GETFD), -1);
    }
    program.end();
}

unsafe fn targets_are_opened_by_their_numbers() {
    let program = Program::start();
    let file = tempfile::tempfile().unwrap();
    // SAFETY: as a C program calls them.
    unsafe {
        let open = |fd, oflags| {
            let mut init: ibv_xrcd_init_attr = zeroed();
            init.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
            (init.fd, init.oflags) = (fd, oflags);
            xrcd::open(program.context, &raw mut init)
        };
        let fd = file.as_raw_fd();
        for (fd, flags, error) in [
            (fd, 0, libc::EAGAIN),
            (-2, libc::O_CREAT, libc::EBADF),
            (c_int::MAX, libc::O_CREAT, libc::EBADF),
        ] {
            assert!(open(fd, flags).is_null());
            assert_eq!(errno(), Some(error), "{fd} {flags}");
        }
        let domain = open(fd, libc::O_CREAT | libc::O_EXCL);
        assert!(!domain.is_null());
        assert!(open(fd, libc::O_CREAT | libc::O_EXCL).is_null());
        assert_eq!(errno(), Some(libc::EINVAL));
        let again = open(fd, 0);

        let mut init: ibv_qp_init_attr_ex = zeroed();
        init.qp_type = IBV_QPT_XRC_RECV;
        init.comp_mask = IBV_QP_INIT_ATTR_XRCD;
        init.xrcd = domain;
        let target = queue_pair::create_ex(program.context, &raw mut init);
        assert!(!target.is_null());
        let mut cookie = 0;
        let attr = ibv_qp_open_attr {
            comp_mask: 15,
            qp_num: (*target).qp_num,
            xrcd: again,
            qp_context: (&raw mut cookie).cast(),
            qp_type: IBV_QPT_XRC_RECV,
        };
        for (bad, error) in [
            (
                ibv_qp_open_attr {
                    comp_mask: 31,
                    ..attr
                },
                libc::EOPNOTSUPP,
            ),
            (
                ibv_qp_open_attr {
                    comp_mask: 14,
                    ..attr
                },
                libc::EINVAL,
            ),
            (
                ibv_qp_open_attr {
                    qp_type: IBV_QPT_RC,
                    ..attr
                },
                libc::EINVAL,
            ),
            (ibv_qp_open_attr { qp_num: 0, ..attr }, libc::EINVAL),
        ] {
            let mut bad = bad;
            assert!(queue_pair::open_target(program.context, &raw mut bad).is_null());
            assert_eq!(errno(), Some(error));
        }
        let mut attr = attr;
        let opened = queue_pair::open_target(program.context, &raw mut attr);
        assert!(!opened.is_null() && opened != target);
        assert_eq!((*opened).qp_num, (*target).qp_num);
        assert_eq!((*opened).qp_context, attr.qp_context);
        assert_eq!((*opened).state, IBV_QPS_UNKNOWN);
        // Each domain is busy by what was made or opened by it.
        assert_eq!(xrcd::close(domain), libc::EBUSY);
        assert_eq!(queue_pair::destroy(target), 0);
        assert_eq!(xrcd::close(domain), 0);
        assert_eq!(xrcd::close(again), libc::EBUSY);
        assert_eq!(queue_pair::destroy(opened), 0);
        assert_eq!(xrcd::close(again), 0);
        assert!(open(fd, 0).is_null());
        assert_eq!(errno(), Some(libc::EAGAIN));
    }
    program.end();
}

#[test]
fn a_program_has_the_extended_interfaces() {
    let backend = Backend::start_with(|_| vec![format!("--workers={WORKERS}")]);
    // SAFETY: no other thread of this test looks at its environment.
    unsafe { std::env::set_var("FARLANE_SOCKET", backend.path("host")) };
    // SAFETY: each keeps the contracts of what it calls.
    unsafe {
        lists::requests_are_posted_whole_or_not_at_all();
        lists::a_datagram_is_for_whom_the_list_says();
        lists::words_are_changed_and_windows_are_bound_in_a_list();
        flushes::what_was_written_is_flushed_or_the_flush_refused();
        null::a_registration_of_no_memory_has_zeroes();
        a_device_is_described_as_in_sysfs();
        times::a_completion_says_when_it_came();
        times::a_vector_is_one_of_those_that_there_are();
        a_parent_domain_keeps_what_it_is_of();
        a_context_is_imported_by_a_copy_of_its_file();
        targets_are_opened_by_their_numbers();
        files::memory_is_registered_by_its_file();
        files::memory_is_unmapped_when_other_memory_takes_its_place();
    }
    until("all contexts to be closed", || {
        backend.counter("contexts") == 0
    });
}
