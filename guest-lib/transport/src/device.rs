//! A transport over `/dev/farlaneN`, for processes in a VM.

use crate::guard::{Guarded, InUse, Kind};
use crate::{Map, PinKind, Transport, TransportError, TransportInfo};
use farlane_abi::config::ABI_VERSION;
use farlane_abi::control::{FLAG_PHONY, FLAG_WRITABLE};
use farlane_abi::ioctl as uapi;
use farlane_abi::zerocopy::FromZeros as _;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A transport over the kernel driver. One open file is one context.
#[derive(Debug)]
pub struct DeviceTransport {
    device: Guarded,
    info: TransportInfo,
    /// Set when the driver says so; it stays so.
    dead: AtomicBool,
}

impl DeviceTransport {
    /// Opens the device file at `path`.
    ///
    /// # Errors
    /// When it cannot be opened or the driver speaks another version.
    pub fn open(path: &Path) -> Result<Self, TransportError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let device = rustix::fs::open(path, flags, Mode::empty()).map_err(|source| {
            TransportError::Open {
                path: path.to_owned(),
                source: source.into(),
            }
        })?;
        let mut transport = Self {
            device: Guarded::new(device, Kind::Device),
            info: TransportInfo::default(),
            dead: AtomicBool::new(false),
        };
        let mut info = uapi::Info::new_zeroed();
        // SAFETY: IOC_INFO writes one `Info`.
        unsafe { transport.ioctl("FARLANE_IOC_INFO", uapi::IOC_INFO, &mut info)? };
        if info.version != ABI_VERSION {
            return Err(TransportError::Version {
                path: path.to_owned(),
                found: info.version,
            });
        }
        transport.info = TransportInfo {
            features: info.features,
            window_bytes: info.window_bytes,
            gid: Some(info.gid),
        };
        Ok(transport)
    }

    /// The device in use. A child of the process that opened it does not have it.
    fn device(&self) -> Result<InUse<&Guarded>, TransportError> {
        self.device.enter().ok_or(TransportError::Gone)
    }

    /// # Safety
    /// `argument` is what ioctl `number` reads and writes.
    unsafe fn ioctl<T>(
        &self,
        what: &'static str,
        number: u64,
        argument: &mut T,
    ) -> Result<(), TransportError> {
        let device = self.device()?;
        loop {
            let argument: *mut T = argument;
            // SAFETY: the file is open; `argument` is right for `number`, says the caller.
            let result = unsafe { libc::ioctl(device.number(), number, argument) };
            if result >= 0 {
                return Ok(());
            }
            let error = std::io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::ENODEV) => {
                    self.dead.store(true, Ordering::Release);
                    return Err(TransportError::Gone);
                }
                _ => return Err(TransportError::os(what, error)),
            }
        }
    }

    fn bind(&self, index: u32, fd: i32) -> Result<(), TransportError> {
        let mut argument = uapi::BindEvent { index, fd };
        // SAFETY: IOC_BIND_EVENT reads one `BindEvent`.
        unsafe {
            self.ioctl(
                "FARLANE_IOC_BIND_EVENT",
                uapi::IOC_BIND_EVENT,
                &mut argument,
            )
        }
    }
}

impl Transport for DeviceTransport {
    fn info(&self) -> TransportInfo {
        self.info
    }

    fn attach_segment(&self, length: usize) -> Result<(u32, Arc<Map>), TransportError> {
        let mut segment = uapi::Segment {
            length: length as u64,
            ..uapi::Segment::default()
        };
        // SAFETY: IOC_SEGMENT reads and writes one `Segment`.
        unsafe { self.ioctl("FARLANE_IOC_SEGMENT", uapi::IOC_SEGMENT, &mut segment)? };
        let mapped = usize::try_from(segment.length)
            .map_err(|_| TransportError::Protocol("a segment longer than memory"))
            .and_then(|length| {
                let device = self.device()?;
                Map::shared(device.as_fd(), segment.mmap_offset, length)
            });
        match mapped {
            Ok(map) => Ok((segment.region, Arc::new(map))),
            Err(error) => {
                let _ = self.detach(segment.region);
                Err(error)
            }
        }
    }

    unsafe fn attach_pin(
        &self,
        kind: PinKind,
        address: usize,
        length: usize,
        writable: bool,
    ) -> Result<u32, TransportError> {
        let (what, number) = match kind {
            PinKind::Memory | PinKind::Phony => ("FARLANE_IOC_PIN", uapi::IOC_PIN),
            PinKind::Device => ("FARLANE_IOC_PIN_DEVICE", uapi::IOC_PIN_DEVICE),
            PinKind::AddressSpace => {
                let what = "Attaching memory";
                let errno = farlane_abi::Errno::EOPNOTSUPP;
                return Err(TransportError::Refused { what, errno });
            }
        };
        let phony = if kind == PinKind::Phony {
            FLAG_PHONY
        } else {
            0
        };
        let mut pin = uapi::Pin {
            address: address as u64,
            length: length as u64,
            flags: phony | if writable { FLAG_WRITABLE } else { 0 },
            region: 0,
        };
        // SAFETY: both read and write one `Pin`; as promised by the caller.
        unsafe { self.ioctl(what, number, &mut pin)? };
        Ok(pin.region)
    }

    fn attach_file(&self, file: BorrowedFd<'_>) -> Result<u32, TransportError> {
        let what = "FARLANE_IOC_FILE";
        let mut argument = uapi::File {
            fd: file.as_raw_fd(),
            region: 0,
        };
        // SAFETY: IOC_FILE reads and writes one `File`.
        match unsafe { self.ioctl(what, uapi::IOC_FILE, &mut argument) } {
            Ok(()) => Ok(argument.region),
            // The driver is an earlier one.
            Err(TransportError::Os { source, .. })
                if source.raw_os_error() == Some(libc::ENOTTY) =>
            {
                let errno = farlane_abi::Errno::EOPNOTSUPP;
                Err(TransportError::Refused { what, errno })
            }
            Err(error) => Err(error),
        }
    }

    fn detach(&self, region: u32) -> Result<(), TransportError> {
        let mut argument = uapi::Detach {
            region,
            reserved: 0,
        };
        // SAFETY: IOC_DETACH reads one `Detach`.
        unsafe { self.ioctl("FARLANE_IOC_DETACH", uapi::IOC_DETACH, &mut argument) }
    }

    fn map_buffer(&self, _handle: u32, offset: u64, length: usize) -> Result<Map, TransportError> {
        let device = self.device()?;
        Map::shared(device.as_fd(), uapi::window_mmap_offset(offset), length)
    }

    fn unmap_buffer(
        &self,
        _handle: u32,
        _offset: u64,
        _length: usize,
    ) -> Result<(), TransportError> {
        // The kernel sees the last mapping go.
        Ok(())
    }

    fn bind_event(&self, index: u32, fd: BorrowedFd<'_>) -> Result<(), TransportError> {
        self.bind(index, fd.as_raw_fd())
    }

    fn unbind_event(&self, index: u32) -> Result<(), TransportError> {
        self.bind(index, -1)
    }

    fn doorbell(&self) {
        if let Ok(device) = self.device() {
            // SAFETY: IOC_DOORBELL takes no argument. A dead device needs no bell.
            let _ = unsafe { libc::ioctl(device.number(), uapi::IOC_DOORBELL) };
        }
    }

    fn wait(&self, timeout: Duration) {
        let Ok(device) = self.device() else {
            return;
        };
        let mut fds = [PollFd::new(&device, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).ok();
        if !poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready > 0) {
            return;
        }
        if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            self.dead.store(true, Ordering::Release);
        }
        // Not blocking; empty when another waiter was faster.
        if let Err(rustix::io::Errno::NODEV) = rustix::io::read(&device, &mut [0; 8]) {
            self.dead.store(true, Ordering::Release);
        }
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }
}
