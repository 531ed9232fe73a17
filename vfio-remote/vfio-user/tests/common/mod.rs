//! A device that remembers what has been done to it, and a server of its own for each test.

#![allow(dead_code, reason = "each test file uses a part")]

use farlane_vfio_user::wire::{Command, Header};
use farlane_vfio_user::{
    Client, CounterValues, Counters, Device, DeviceInfo, DmaMap, Errno, IoFd, IoFdKind, IrqInfo,
    IrqRequest, MapArea, RegionInfo, Server, Stop,
};
use farlane_vm_front_end::vfio_user::{ClientError, RawClient};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{Shutdown, shutdown};
use std::fmt::Debug;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes as _;

pub const PATIENCE: Duration = Duration::from_secs(20);
pub const PAGE: u64 = 4096;

/// Traps its first page; the rest can be mapped.
pub const BAR: u32 = 0;
pub const BAR_BYTES: u64 = 4 * PAGE;
/// Two pages in two files.
pub const SPLIT: u32 = 1;
/// Can be read only.
pub const FIXED: u32 = 2;
pub const CONFIG: u32 = 7;
pub const CONFIG_BYTES: u64 = 256;
pub const INTX: u32 = 0;
pub const MSIX: u32 = 2;
pub const MSIX_COUNT: u32 = 8;

/// What was done to the device, in words.
#[derive(Debug, Default)]
pub struct Seen {
    pub events: Vec<String>,
    pub client: Option<Client>,
    pub eventfds: Vec<Option<OwnedFd>>,
    /// What a mapping had as its file.
    pub files: Vec<(OwnedFd, u64)>,
    /// Answers the next command of that name by an error.
    pub fail: Option<(&'static str, Errno)>,
    /// Reads memory at this address from within the next write.
    pub read_within: Option<u64>,
}

#[derive(Debug, Default)]
pub struct Log {
    seen: Mutex<Seen>,
    changed: Condvar,
}

impl Log {
    pub fn with<R>(&self, look: impl FnOnce(&mut Seen) -> R) -> R {
        look(&mut self.seen.lock().unwrap())
    }

    /// What has happened since the last time.
    pub fn take(&self) -> Vec<String> {
        self.with(|seen| std::mem::take(&mut seen.events))
    }

    pub fn client(&self) -> Client {
        self.with(|seen| seen.client.clone().unwrap())
    }

    fn add(&self, event: String) {
        self.with(|seen| seen.events.push(event));
        self.changed.notify_all();
    }

    /// Waits until `event` has happened so many times.
    pub fn wait_for(&self, event: &str, times: usize) {
        let deadline = Instant::now() + PATIENCE;
        let mut seen = self.seen.lock().unwrap();
        while seen.events.iter().filter(|e| *e == event).count() < times {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no {event} in {:?}", seen.events);
            seen = self.changed.wait_timeout(seen, left).unwrap().0;
        }
    }

    fn failing(&self, name: &str) -> Result<(), Errno> {
        self.with(|seen| match seen.fail {
            Some((which, errno)) if which == name => {
                seen.fail = None;
                Err(errno)
            }
            _ => Ok(()),
        })
    }
}

pub struct TestDevice {
    pub log: Arc<Log>,
    pub bar: Vec<u8>,
    pub config: Vec<u8>,
    pub file: Arc<OwnedFd>,
    pub second: Arc<OwnedFd>,
    pub doorbell: Arc<OwnedFd>,
}

pub fn memfd(bytes: u64) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

impl TestDevice {
    pub fn new(log: &Arc<Log>) -> Self {
        let mut config = vec![0; usize::try_from(CONFIG_BYTES).unwrap()];
        config[..4].copy_from_slice(&[0x34, 0x12, 0x78, 0x56]);
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Self {
            log: Arc::clone(log),
            bar: vec![0; usize::try_from(BAR_BYTES).unwrap()],
            config,
            file: Arc::new(memfd(BAR_BYTES)),
            second: Arc::new(memfd(2 * PAGE)),
            doorbell: Arc::new(event),
        }
    }

    fn memory(&mut self, region: u32) -> Result<&mut Vec<u8>, Errno> {
        match region {
            BAR => Ok(&mut self.bar),
            CONFIG => Ok(&mut self.config),
            _ => Err(Errno::NXIO),
        }
    }
}

fn area(offset: u64, size: u64, file: &Arc<OwnedFd>, file_offset: u64) -> MapArea {
    MapArea {
        offset,
        size,
        file: Arc::clone(file),
        file_offset,
    }
}

impl Device for TestDevice {
    fn connected(&mut self, client: Client) {
        self.log.with(|seen| seen.client = Some(client));
        self.log.add("connected".into());
    }

    fn disconnected(&mut self) {
        self.log.with(|seen| {
            seen.client = None;
            seen.eventfds.clear();
        });
        self.log.add("disconnected".into());
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo::PCI
    }

    fn region(&mut self, index: u32) -> Option<RegionInfo> {
        let region = |size, writable, areas| RegionInfo {
            size,
            readable: true,
            writable,
            areas,
        };
        match index {
            BAR => {
                let areas = vec![
                    area(PAGE, PAGE, &self.file, PAGE),
                    area(2 * PAGE, 2 * PAGE, &self.file, 2 * PAGE),
                ];
                Some(region(BAR_BYTES, true, areas))
            }
            SPLIT => {
                let areas = vec![
                    area(0, PAGE, &self.file, 0),
                    area(PAGE, PAGE, &self.second, PAGE),
                ];
                Some(region(2 * PAGE, true, areas))
            }
            FIXED => Some(region(PAGE, false, Vec::new())),
            CONFIG => Some(region(CONFIG_BYTES, true, Vec::new())),
            _ => None,
        }
    }

    fn irq(&self, index: u32) -> Option<IrqInfo> {
        let base = IrqInfo {
            count: 1,
            eventfd: true,
            ..IrqInfo::default()
        };
        match index {
            INTX => Some(IrqInfo {
                maskable: true,
                automasked: true,
                ..base
            }),
            MSIX => Some(IrqInfo {
                count: MSIX_COUNT,
                noresize: true,
                ..base
            }),
            4 => Some(IrqInfo {
                eventfd: false,
                ..base
            }),
            _ => None,
        }
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        self.log.failing("read")?;
        assert!(!data.is_empty());
        if region == FIXED {
            data.fill(0x5a);
            return Ok(());
        }
        let from = usize::try_from(offset).unwrap();
        data.copy_from_slice(&self.memory(region)?[from..from + data.len()]);
        Ok(())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.log.failing("write")?;
        assert!(!data.is_empty());
        let within = self.log.with(|seen| seen.read_within.take());
        if let Some(address) = within {
            let result = self.log.client().read(address, &mut [0; 4]);
            self.log.add(format!("within: {result:?}"));
        }
        let from = usize::try_from(offset).unwrap();
        self.memory(region)?[from..from + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn io_fds(&mut self, region: u32) -> Result<Vec<IoFd>, Errno> {
        self.log.failing("io_fds")?;
        if region != BAR {
            return Ok(Vec::new());
        }
        let part = |offset, kind| IoFd {
            offset,
            size: 4,
            fd: Arc::clone(&self.doorbell),
            kind,
        };
        let eventfd = |datamatch| IoFdKind::Eventfd {
            datamatch,
            ports: false,
        };
        Ok(vec![
            part(0x100, eventfd(None)),
            part(0x104, eventfd(Some(7))),
            IoFd {
                fd: Arc::clone(&self.file),
                size: 0,
                ..part(
                    0x200,
                    IoFdKind::Region {
                        ports: false,
                        posted_writes: true,
                        user_data: 0xabcd,
                    },
                )
            },
        ])
    }

    fn set_irqs(&mut self, request: IrqRequest) -> Result<(), Errno> {
        self.log.failing("set_irqs")?;
        let event = match request {
            IrqRequest::Disable { index } => {
                self.log.with(|seen| seen.eventfds.clear());
                format!("disable {index}")
            }
            IrqRequest::Bind {
                index,
                start,
                action,
                eventfds,
            } => {
                let bound: Vec<_> = eventfds.iter().map(Option::is_some).collect();
                self.log.with(|seen| seen.eventfds = eventfds);
                format!("bind {index} {start} {action:?} {bound:?}")
            }
            IrqRequest::Perform {
                index,
                start,
                action,
                selected,
            } => format!("perform {index} {start} {action:?} {selected:?}"),
        };
        self.log.add(event);
        Ok(())
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        self.log.failing("dma_map")?;
        let DmaMap { address, size, .. } = map;
        let rights = (map.readable, map.writable, map.file.is_some());
        self.log.with(|seen| seen.files.extend(map.file));
        self.log
            .add(format!("map {address:#x} {size:#x} {rights:?}"));
        Ok(())
    }

    fn dma_unmap(&mut self, address: u64, size: u64) -> Result<(), Errno> {
        self.log.failing("dma_unmap")?;
        self.log.add(format!("unmap {address:#x} {size:#x}"));
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.log.failing("reset")?;
        self.bar.fill(0);
        self.log.add("reset".into());
        Ok(())
    }
}

/// That the server has refused something so.
#[track_caller]
pub fn refused<T: Debug>(result: Result<T, ClientError>, errno: Errno) {
    match result {
        Err(ClientError::Refused(got)) => assert_eq!(got, errno),
        other => panic!("{other:?}, not {errno:?}"),
    }
}

/// Says the first `length` bytes of a message of 32, and no more.
pub fn say_a_part(peer: &mut RawClient, length: usize, fds: &[BorrowedFd<'_>]) {
    let header = Header {
        id: 1,
        command: Command::RegionRead.to_wire(),
        size: 32,
        ..Header::default()
    };
    let bytes = [header.as_bytes(), &[0; 16]].concat();
    peer.send_bytes(&bytes[..length], fds).unwrap();
}

/// A server that ends with the test.
pub struct Served {
    pub path: PathBuf,
    pub log: Arc<Log>,
    pub file: Arc<OwnedFd>,
    counters: Counters,
    pub end: Stop,
    stop: OwnedFd,
    thread: Option<JoinHandle<std::io::Error>>,
    _folder: tempfile::TempDir,
}

impl Served {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("device.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let stop = listener.as_fd().try_clone_to_owned().unwrap();
        let log = Arc::new(Log::default());
        let device = TestDevice::new(&log);
        let file = Arc::clone(&device.file);
        let (counters, end) = (Counters::default(), Stop::default());
        let thread = std::thread::spawn({
            let (counters, end) = (counters.clone(), end.clone());
            move || Server::serve_until("test", listener.into(), device, &counters, &end)
        });
        Self {
            path,
            log,
            file,
            counters,
            end,
            stop,
            thread: Some(thread),
            _folder: folder,
        }
    }

    pub fn counters(&self) -> CounterValues {
        self.counters.values()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        shutdown(&self.stop, Shutdown::Both).unwrap();
        // Whoever is connected goes: the server is at the listener then.
        if let Some(client) = self.log.with(|seen| seen.client.clone()) {
            client.disconnect();
        }
        // Where it waits for a message of a client that has not been negotiated with, this does
        // nothing, and the test's own end of the connection has been dropped.
        drop(UnixStream::connect(&self.path));
        let end = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            end.unwrap();
        }
    }
}
