//! What a process imports of another one's context, by the library that programs link.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "imports/deaths.rs"]
mod deaths;
#[path = "imports/objects.rs"]
mod objects;
#[path = "imports/program.rs"]
mod program;
#[path = "imports/registrations.rs"]
mod registrations;

use common::{Backend, Partner, say, told, until};
use farlane_verbs::sys::*;
use farlane_verbs::{completion, context, device, dmabuf, import, memory, open, queue_pair};
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::Error;
use std::os::fd::{AsRawFd as _, IntoRawFd as _};
use std::ptr::null_mut;

const LENGTH: usize = 4096;
const RIGHTS: c_int = 0x1f;
/// Of `enum ibv_wc_status`.
const REM_ACCESS_ERR: ibv_wc_status = 10;

/// Tells the exporter where the backend is.
const SOCKET: &str = "FARLANE_TEST_IMPORTS_SOCKET";
const NAME: &str = "a_process_uses_memory_of_another_that_has_given_it_its_file";

fn zeroed<T: Copy>() -> T {
    // SAFETY: those that are used here consist of integers, pointers and optional functions.
    unsafe { std::mem::zeroed() }
}

fn errno() -> Option<c_int> {
    Error::last_os_error().raw_os_error()
}

/// Opens the device of the backend at `socket`, in a process that does so once.
unsafe fn open_device(socket: &str) -> *mut ibv_context {
    // SAFETY: no other thread of this test looks at its environment; as a C program calls them.
    unsafe {
        std::env::set_var("FARLANE_SOCKET", socket);
        let list = device::list(null_mut());
        let context = open::device(*list);
        device::free_list(list);
        assert!(!context.is_null());
        context
    }
}

/// The process whose memory it is.
fn exporter(socket: &str) {
    let mut memory = Box::new([0_u8; LENGTH]);
    // SAFETY: as a C program calls them.
    unsafe {
        let context = open_device(socket);
        let [pd, other] = [(); 2].map(|()| memory::alloc_pd(context));
        let address = memory.as_mut_ptr().cast::<c_void>();
        let mr = memory::reg_mr(pd, address, LENGTH, RIGHTS);
        let elsewhere = memory::reg_mr(other, address, LENGTH, RIGHTS);
        say(format!(
            "{} {} {} {} {} {}",
            std::process::id(),
            (*context).cmd_fd,
            (*pd).handle,
            (*mr).handle,
            (*elsewhere).handle,
            address.expose_provenance()
        ));
        loop {
            match told().as_str() {
                "look" => say(std::ptr::read_volatile(memory.as_ptr().add(100))),
                "deallocate" => say(memory::dealloc_pd(pd)),
                "deregister" => say(memory::dereg_mr(mr)),
                _ => return,
            }
        }
    }
}

/// A queue pair of an imported domain that is connected to itself.
struct Writer {
    cq: *mut ibv_cq,
    qp: *mut ibv_qp_ex,
}

impl Writer {
    unsafe fn new(context: *mut ibv_context, pd: *mut ibv_pd) -> Self {
        // SAFETY: as a C program calls them.
        unsafe {
            let cq = completion::create(context, 16, null_mut(), null_mut(), 0);
            let mut init: ibv_qp_init_attr_ex = zeroed();
            init.qp_type = IBV_QPT_RC;
            (init.send_cq, init.recv_cq) = (cq, cq);
            (init.cap.max_send_wr, init.cap.max_send_sge) = (4, 1);
            (init.cap.max_recv_wr, init.cap.max_recv_sge) = (1, 1);
            init.cap.max_inline_data = 8;
            init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            init.pd = pd;
            init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
            let qp = queue_pair::create_ex(context, &raw mut init);
            assert!(!qp.is_null());
            let qp = queue_pair::extended(qp);
            let mut gid = ibv_gid { raw: [0; 16] };
            let mut attr: ibv_qp_attr = zeroed();
            (attr.port_num, attr.path_mtu, attr.timeout) = (1, 3, 14);
            attr.qp_access_flags = 15;
            (attr.ah_attr.is_global, attr.ah_attr.port_num) = (1, 1);
            farlane_verbs::tables::query_gid(context, 1, 0, &raw mut gid);
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
            Self { cq, qp }
        }
    }

    /// Writes a byte to memory of the exporter. Returns the status of that.
    unsafe fn write(&self, rkey: u32, address: u64, byte: u8) -> ibv_wc_status {
        let qp = self.qp;
        // SAFETY: as a C program calls them.
        unsafe {
            ((*qp).wr_start.unwrap())(qp);
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            ((*qp).wr_rdma_write.unwrap())(qp, rkey, address);
            let mut bytes = [byte];
            ((*qp).wr_set_inline_data.unwrap())(qp, bytes.as_mut_ptr().cast(), 1);
            assert_eq!(((*qp).wr_complete.unwrap())(qp), 0);
            let mut wc: ibv_wc = zeroed();
            until("a completion", || {
                completion::poll(self.cq, 1, &raw mut wc) == 1
            });
            wc.status
        }
    }

    unsafe fn end(self) {
        // SAFETY: as a C program calls them.
        unsafe {
            assert_eq!(queue_pair::destroy(self.qp.cast()), 0);
            assert_eq!(completion::destroy(self.cq), 0);
        }
    }
}

#[test]
fn a_process_uses_memory_of_another_that_has_given_it_its_file() {
    if let Ok(socket) = std::env::var(SOCKET) {
        return exporter(&socket);
    }
    let mut backend = Backend::start();
    let socket = backend.path("host");
    let mut owner = Partner::start(NAME, SOCKET, &socket);
    let [process, cmd_fd, pd, mr, elsewhere, address] = owner.hear_numbers();
    let [pd, mr, elsewhere] = [pd, mr, elsewhere].map(|handle| u32::try_from(handle).unwrap());
    let copy = || File::open(format!("/proc/{process}/fd/{cmd_fd}")).unwrap();
    // SAFETY: as a C program calls them.
    unsafe {
        let own = open_device(socket.to_str().unwrap());
        // A file that stands for no context.
        let stranger = tempfile::tempfile().unwrap();
        assert!(import::device(stranger.as_raw_fd()).is_null());
        assert_eq!(errno(), Some(libc::EOPNOTSUPP));

        let context = import::device(copy().into_raw_fd());
        assert!(!context.is_null() && context != own);
        for unknown in [pd ^ 1, 0, u32::MAX] {
            assert!(import::pd(context, unknown).is_null());
            assert_eq!(errno(), Some(libc::EINVAL));
        }
        let imported = import::pd(context, pd);
        assert!(!imported.is_null());
        for unknown in [elsewhere, mr ^ 1, 0] {
            assert!(import::mr(imported, unknown).is_null());
            assert_eq!(errno(), Some(libc::EINVAL));
        }
        let region = import::mr(imported, mr);
        assert!(!region.is_null());
        assert_eq!((*region).length, LENGTH);
        assert!((*region).addr.is_null());
        // Memory of one's own can be registered there, too.
        let mut mine = [0_u8; 8];
        let own_region = memory::reg_mr(imported, mine.as_mut_ptr().cast(), 8, RIGHTS);
        assert!(!own_region.is_null());
        let elsewhere = memory::alloc_pd(context);
        let moved = memory::rereg_mr(own_region, 2, elsewhere, null_mut(), 0, 0);
        assert_ne!(moved, 0);
        assert_eq!(errno(), Some(libc::EOPNOTSUPP));
        assert_eq!(memory::dealloc_pd(elsewhere), 0);
        let nothing = null_mut();
        assert_eq!(
            memory::rereg_mr(own_region, 4, nothing, nothing.cast(), 0, 1),
            0
        );
        assert_eq!(memory::dereg_mr(own_region), 0);
        let shared = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&shared, 4096).unwrap();
        let by_file = dmabuf::register(imported, 0, 4096, 0, shared.as_raw_fd(), RIGHTS);
        assert!(!by_file.is_null());
        assert_eq!(memory::dereg_mr(by_file), 0);
        // Without the right to the other context its keys are none of one's own.
        let plain = memory::alloc_pd(own);
        let outside = Writer::new(own, plain);
        let key = (*region).rkey;
        assert_eq!(outside.write(key, address + 100, 1), REM_ACCESS_ERR);
        outside.end();
        assert_eq!(memory::dealloc_pd(plain), 0);

        let writer = Writer::new(context, imported);
        assert_eq!(writer.write(key, address + 100, 77), 0);
        owner.tell("look");
        assert_eq!(owner.hear(), "77");
        owner.tell("deallocate");
        assert_eq!(owner.hear(), libc::EBUSY.to_string());
        // What its owner has ended is open to nobody.
        owner.tell("deregister");
        assert_eq!(owner.hear(), "0");
        assert_eq!(writer.write(key, address + 100, 78), REM_ACCESS_ERR);
        owner.tell("look");
        assert_eq!(owner.hear(), "77");
        assert!(import::mr(imported, mr).is_null());
        writer.end();
        import::unimport_mr(region);
        import::unimport_pd(imported);
        owner.tell("deallocate");
        assert_eq!(owner.hear(), "0");
        assert_eq!(context::close(context), 0);
        assert_eq!(context::close(own), 0);
    }
    drop(owner);
    until("the owner to be gone", || backend.counter("contexts") == 0);
    death_of_either(&mut backend);
}

/// The importer goes on without what has ended, and ends by itself.
fn death_of_either(backend: &mut Backend) {
    let socket = backend.path("host");
    let mut owner = Partner::start(NAME, SOCKET, &socket);
    let [process, cmd_fd, pd, mr, _, address] = owner.hear_numbers();
    let [pd, mr] = [pd, mr].map(|handle| u32::try_from(handle).unwrap());
    let copy = || File::open(format!("/proc/{process}/fd/{cmd_fd}")).unwrap();
    let late = copy();
    // SAFETY: as a C program calls them.
    unsafe {
        let context = import::device(copy().into_raw_fd());
        let imported = import::pd(context, pd);
        let region = import::mr(imported, mr);
        assert!(!region.is_null());
        let writer = Writer::new(context, imported);
        let key = (*region).rkey;
        assert_eq!(writer.write(key, address, 1), 0);
        owner.kill();
        until("the owner's context to end", || {
            backend.counter("contexts") == 1
        });
        assert_eq!(writer.write(key, address, 2), REM_ACCESS_ERR);
        assert!(import::pd(context, pd).is_null());
        assert_eq!(errno(), Some(libc::EINVAL));
        writer.end();
        import::unimport_mr(region);
        import::unimport_pd(imported);
        assert_eq!(context::close(context), 0);
        // The file stands for nothing any more.
        assert!(import::device(late.as_raw_fd()).is_null());
        assert_eq!(errno(), Some(libc::EOPNOTSUPP));
    }
    until("all contexts to be closed", || {
        backend.counter("contexts") == 0
    });
    backend.assert_alive();
}
