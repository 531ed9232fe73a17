//! `ibv_reg_dmabuf_mr`.

use super::*;

/// Memory that is registered by its file is written there.
pub unsafe fn memory_is_registered_by_its_file() {
    const PAGE: usize = 4096;
    let program = Program::start();
    let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 4 * PAGE as u64).unwrap();
    let read_only = File::open(format!("/proc/self/fd/{}", memory.as_raw_fd())).unwrap();
    let device = File::open("/dev/zero").unwrap();
    let fd = memory.as_raw_fd();
    let (offset, iova) = (PAGE as u64 + 24, 0x7000_0018);
    // SAFETY: as a C program calls them.
    unsafe {
        for (offset, length, iova, fd, rights, error) in [
            (0, PAGE, 0, -1, RIGHTS, libc::EOPNOTSUPP),
            (
                0,
                PAGE,
                0,
                fd,
                IBV_ACCESS_ON_DEMAND.cast_signed(),
                libc::EOPNOTSUPP,
            ),
            (0, PAGE, 0, c_int::MAX, RIGHTS, libc::EBADF),
            (0, PAGE, 0, device.as_raw_fd(), RIGHTS, libc::EINVAL),
            (0, PAGE, 0, read_only.as_raw_fd(), RIGHTS, libc::EACCES),
            (0, PAGE, 8, fd, RIGHTS, libc::EINVAL),
            (0, 0, 0, fd, RIGHTS, libc::EINVAL),
            (PAGE as u64, 4 * PAGE, 0, fd, RIGHTS, libc::EINVAL),
            (0, usize::MAX, 0, fd, RIGHTS, libc::EINVAL),
        ] {
            let refused = dmabuf::register(program.pd, offset, length, iova, fd, rights);
            assert!(refused.is_null());
            assert_eq!(errno(), Some(error), "{offset} {length} {iova} {fd}");
        }
        let reads = dmabuf::register(program.pd, 0, PAGE, 0, read_only.as_raw_fd(), 0);
        assert!(!reads.is_null());
        assert_eq!(memory::dereg_mr(reads), 0);

        let mr = dmabuf::register(program.pd, offset, 2 * PAGE, iova, fd, RIGHTS);
        assert!(!mr.is_null());
        assert_eq!((*mr).length, 2 * PAGE);
        let qp = program.queue_pair(IBV_QPT_RC, IBV_QP_EX_WITH_RDMA_WRITE);
        program.connect(qp);
        for at in [0, PAGE as u64, 2 * PAGE as u64 - 8] {
            call!(qp.wr_start());
            (*qp).wr_id = at;
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            call!(qp.wr_rdma_write((*mr).rkey, iova + at));
            let mut bytes = *b"by file.";
            call!(qp.wr_set_inline_data(bytes.as_mut_ptr().cast(), 8));
            assert_eq!(call!(qp.wr_complete()), 0);
            assert_eq!(program.completion(), (at, 0));
            let mut there = [0; 8];
            rustix::io::pread(&memory, &mut there, offset + at).unwrap();
            assert_eq!(there, *b"by file.", "{at}");
        }
        assert_eq!(queue_pair::destroy(qp.cast()), 0);
        assert_eq!(memory::dereg_mr(mr), 0);
    }
    program.end();
}

/// Mappings of a file of memory with that name.
fn mappings(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(name)).count()
}

/// The keys stay, and nothing of the file but what its owner has.
pub unsafe fn memory_is_unmapped_when_other_memory_takes_its_place() {
    const NAME: &str = "registered by its file";
    let program = Program::start();
    let file = rustix::fs::memfd_create(NAME, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, LENGTH as u64).unwrap();
    // SAFETY: as a C program calls them.
    unsafe {
        let mr = dmabuf::register(program.pd, 0, LENGTH, 0, file.as_raw_fd(), RIGHTS);
        assert!(!mr.is_null());
        let (key, null) = ((*mr).rkey, null_mut());
        let rereg = |flags: u32, address: *mut c_void, length, access| {
            memory::rereg_mr(mr, flags.cast_signed(), null, address, length, access)
        };
        // Other rights are those of the same memory.
        assert_eq!(rereg(IBV_REREG_MR_CHANGE_ACCESS, null_mut(), 0, RIGHTS), 0);
        // With an error it is as it was.
        let nowhere = std::ptr::without_provenance_mut(usize::MAX);
        let change = IBV_REREG_MR_CHANGE_TRANSLATION;
        assert_ne!(rereg(change, nowhere, LENGTH, 0), 0);
        assert_eq!(mappings(NAME), 1);

        let mut other = Box::new([0; LENGTH]);
        let address: *mut c_void = other.as_mut_ptr().cast();
        assert_eq!(rereg(change, address, LENGTH, 0), 0);
        assert_eq!(mappings(NAME), 0);
        let qp = program.queue_pair(IBV_QPT_RC, IBV_QP_EX_WITH_RDMA_WRITE);
        program.connect(qp);
        call!(qp.wr_start());
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        call!(qp.wr_rdma_write(key, address.expose_provenance() as u64));
        let mut bytes = *b"elsewhere";
        call!(qp.wr_set_inline_data(bytes.as_mut_ptr().cast(), 9));
        assert_eq!(call!(qp.wr_complete()), 0);
        assert_eq!(program.completion().1, 0);
        assert_eq!(address.cast::<[u8; 9]>().read_volatile(), *b"elsewhere");
        assert_eq!(queue_pair::destroy(qp.cast()), 0);
        assert_eq!(memory::dereg_mr(mr), 0);
    }
    program.end();
}
