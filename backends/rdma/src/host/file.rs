//! Which file a descriptor is of.

use farlane_rdma_remoting::FileId;
use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, statx};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;

/// How `statx` is asked for what the kernel knows itself, without whoever serves the file.
const UNASKED: AtFlags = AtFlags::EMPTY_PATH.union(AtFlags::STATX_DONT_SYNC);

/// The file of a descriptor: the device and the number that no other file has while this one is
/// open.
///
/// # Errors
/// The kernel does not know the file's number itself. `BADF` of a descriptor that was opened with
/// `O_PATH`, for which nobody needs a right to the file: the kernel takes none for a file either.
pub(crate) fn identify(file: BorrowedFd<'_>) -> Result<FileId, Errno> {
    if fcntl_getfl(file)?.contains(OFlags::PATH) {
        return Err(Errno::BADF);
    }
    let stat = statx(file, "", UNASKED, StatxFlags::INO)?;
    if stat.stx_mask & StatxFlags::INO.bits() == 0 {
        return Err(Errno::NODATA);
    }
    let device = u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor);
    Ok(FileId(device, stat.stx_ino))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, Mode, memfd_create};
    use std::fs::File;
    use std::os::fd::AsFd as _;

    #[test]
    fn a_descriptor_that_opens_nothing_shows_no_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = OFlags::PATH | OFlags::CLOEXEC;
        let path = rustix::fs::open(file.path(), path, Mode::empty()).unwrap();
        assert_eq!(identify(path.as_fd()), Err(Errno::BADF));
        identify(file.as_file().as_fd()).unwrap();
    }

    #[test]
    fn a_file_is_the_same_by_each_of_its_descriptors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("domain");
        let first = File::create(&path).unwrap();
        let again = File::open(&path).unwrap();
        let of = |file: &dyn std::os::fd::AsFd| identify(file.as_fd()).unwrap();
        assert_eq!(of(&first), of(&again));
        assert_eq!(of(&first), of(&first.try_clone().unwrap()));
        // Its path is another one's then.
        std::fs::remove_file(&path).unwrap();
        let successor = File::create(&path).unwrap();
        assert_ne!(of(&first), of(&successor));
        let memory = || memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
        let [one, other] = [memory(), memory()];
        assert_ne!(of(&one), of(&other));
    }
}
