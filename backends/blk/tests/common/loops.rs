//! Loop devices.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const LOOP_SET_STATUS64: libc::c_ulong = 0x4C04;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;

/// `struct loop_info64` (linux/loop.h): where the limit of its size is, and its bytes.
const SIZE_LIMIT_AT: usize = 32;
const INFO_BYTES: usize = 232;

/// A loop device, detached when it is dropped.
pub struct Loop {
    device: PathBuf,
    file: File,
}

impl Loop {
    /// One over `file`, around the page cache.
    ///
    /// # Panics
    /// There are none to be had: what needs them cannot be tested.
    pub fn attach(file: &Path) -> Self {
        let output = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file)
            .output()
            .unwrap_or_else(|e| panic!("Cannot run losetup, which this test needs: {e}"));
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "Cannot attach a loop device to {}: {}; this test needs root and loop devices",
            file.display(),
            why.trim()
        );
        let device = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
        let file = File::open(&device).unwrap();
        Self { device, file }
    }

    pub fn device(&self) -> &Path {
        &self.device
    }

    fn limit(&self, bytes: u64) {
        let mut info = [0_u64; INFO_BYTES / 8];
        let fd = self.file.as_raw_fd();
        // SAFETY: the kernel writes as many bytes as the structure has.
        let got = unsafe { libc::ioctl(fd, LOOP_GET_STATUS64, info.as_mut_ptr()) };
        assert_eq!(got, 0, "{}", std::io::Error::last_os_error());
        info[SIZE_LIMIT_AT / 8] = bytes;
        // SAFETY: the kernel reads as many bytes.
        let set = unsafe { libc::ioctl(fd, LOOP_SET_STATUS64, info.as_ptr()) };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    }

    /// Has almost no blocks from now on; how few is another number for each, as two paths that
    /// agree are a smaller disk.
    pub fn pull(&self, sectors: u64) {
        self.limit(sectors * 512);
    }

    pub fn give_back(&self) {
        self.limit(0);
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("-d").arg(&self.device).status();
        assert!(detached.unwrap().success());
    }
}
