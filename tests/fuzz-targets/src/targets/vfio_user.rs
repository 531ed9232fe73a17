//! A vfio-user client that sends anything, to a device that says what it must not be asked.
//!
//! Input: whether the version is agreed first, then messages, each a command, what is odd about it,
//! descriptors, and a body.

use crate::{Input, format_all_logs};
use farlane_vfio_user::wire::{self, Command, HEADER_BYTES, Header};
use farlane_vfio_user::{
    Client, Counters, Device, DeviceInfo, DmaMap, Errno, IoFd, IoFdKind, IrqInfo, IrqRequest,
    MapArea, Next, RegionInfo, Reply, Session,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Messages of one input.
const MAX_MESSAGES: usize = 64;
const PAGE: u64 = 4096;
const BAR_BYTES: u64 = 4 * PAGE;
const CONFIG: u32 = 7;
const CONFIG_BYTES: u64 = 256;
const MSIX: u32 = 2;
const VECTORS: u32 = 8;

/// What clients send descriptors of.
struct Files {
    memory: OwnedFd,
    short: OwnedFd,
    event: OwnedFd,
    /// What is none of these.
    other: OwnedFd,
}

thread_local! {
    static FILES: Files = {
        format_all_logs();
        let memfd = |bytes| {
            let fd = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
            ftruncate(&fd, bytes).expect("memory");
            fd
        };
        Files {
            memory: memfd(1 << 20),
            short: memfd(PAGE - 1),
            event: eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
            other: UnixStream::pair().expect("a socket").0.into(),
        }
    };
}

/// Checks what it is asked.
#[derive(Default)]
struct Checked {
    connected: bool,
    ranges: BTreeMap<u64, u64>,
    bound: u32,
    client: Option<Client>,
    file: Option<Arc<OwnedFd>>,
    /// Fails every so many calls.
    fail_every: u8,
    calls: u8,
}

impl Checked {
    fn called(&mut self) -> Result<(), Errno> {
        assert!(self.connected, "a call without a client");
        self.calls = self.calls.wrapping_add(1);
        if self.fail_every > 0 && self.calls.is_multiple_of(self.fail_every) {
            return Err(Errno::IO);
        }
        Ok(())
    }

    fn check_access(region: u32, offset: u64, length: usize) {
        let size = match region {
            0 => BAR_BYTES,
            2 => PAGE,
            CONFIG => CONFIG_BYTES,
            _ => panic!("an access to region {region}"),
        };
        assert!(
            length > 0 && offset + length as u64 <= size,
            "{length} bytes at {offset:#x} of region {region}"
        );
    }
}

impl Device for Checked {
    fn connected(&mut self, client: Client) {
        assert!(!self.connected && self.ranges.is_empty());
        self.connected = true;
        self.client = Some(client);
    }

    fn disconnected(&mut self) {
        assert!(self.connected);
        self.connected = false;
        self.client = None;
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo::PCI
    }

    fn region(&mut self, index: u32) -> Option<RegionInfo> {
        let size = match index {
            0 => BAR_BYTES,
            2 => PAGE,
            CONFIG => CONFIG_BYTES,
            _ => return None,
        };
        let file = self.file.iter().filter(|_| index == 0);
        let areas = file.map(|file| MapArea {
            offset: PAGE,
            size: PAGE,
            file: Arc::clone(file),
            file_offset: PAGE,
        });
        Some(RegionInfo {
            size,
            readable: true,
            writable: index != 2,
            areas: areas.collect(),
        })
    }

    fn irq(&self, index: u32) -> Option<IrqInfo> {
        let count = if index == MSIX { VECTORS } else { 1 };
        (index < 4).then_some(IrqInfo {
            count,
            eventfd: index != 3,
            ..IrqInfo::default()
        })
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        Self::check_access(region, offset, data.len());
        data.fill(0xa5);
        self.called()
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        assert_ne!(region, 2, "a write to what can only be read");
        Self::check_access(region, offset, data.len());
        self.called()
    }

    fn io_fds(&mut self, region: u32) -> Result<Vec<IoFd>, Errno> {
        self.called()?;
        let kind = IoFdKind::Eventfd {
            datamatch: Some(1),
            ports: false,
        };
        let file = self.file.iter().filter(|_| region == 0);
        Ok(file
            .map(|file| IoFd {
                offset: 8,
                size: 4,
                fd: Arc::clone(file),
                kind,
            })
            .collect())
    }

    fn set_irqs(&mut self, request: IrqRequest) -> Result<(), Errno> {
        let (index, start, count) = match request {
            IrqRequest::Disable { index } => {
                self.bound &= !(1 << index);
                (index, 0, 0)
            }
            IrqRequest::Bind {
                index,
                start,
                eventfds,
                ..
            } => {
                assert!(index != 3 && !eventfds.is_empty());
                self.bound |= 1 << index;
                (index, start, eventfds.len())
            }
            IrqRequest::Perform {
                index,
                start,
                selected,
                ..
            } => (index, start, selected.len()),
        };
        let known = self.irq(index).expect("an interrupt type that is there");
        assert!(u64::from(start) + count as u64 <= u64::from(known.count));
        self.called()
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let end = map
            .address
            .checked_add(map.size)
            .expect("a range that does not wrap");
        assert!(
            map.size > 0
                && (map.address | map.size).is_multiple_of(PAGE)
                && (map.readable || map.writable)
        );
        let before = self.ranges.range(..end).next_back();
        assert!(
            before.is_none_or(|(start, size)| start + size <= map.address),
            "ranges overlap"
        );
        if let Some((file, offset)) = &map.file {
            let length = rustix::fs::fstat(file).expect("a file").st_size;
            assert!(
                u64::try_from(length).expect("a length") >= offset + map.size && offset % PAGE == 0
            );
        }
        self.called()?;
        self.ranges.insert(map.address, map.size);
        Ok(())
    }

    fn dma_unmap(&mut self, address: u64, size: u64) -> Result<(), Errno> {
        assert_eq!(
            self.ranges.get(&address),
            Some(&size),
            "a range that was not mapped so"
        );
        self.called()?;
        self.ranges.remove(&address);
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.called()
    }
}

/// A command and its body. What is often wanted is at hand: the right `argsz`, capabilities.
fn message(input: &mut Input<'_>) -> (Header, Vec<u8>) {
    let (command, odd) = (input.u8(), input.u8());
    let mut body = input.counted().to_vec();
    if odd & 1 != 0 && body.len() >= 4 {
        let length = u32::try_from(body.len()).expect("a short body");
        body[..4].copy_from_slice(&length.to_le_bytes());
    }
    let header = Header {
        id: input.u16(),
        command: if odd & 2 == 0 {
            u16::from(command) % 20
        } else {
            input.u16()
        },
        size: 0,
        flags: if odd & 4 == 0 {
            u32::from(odd & 8) << 1
        } else {
            input.u32()
        },
        error: 0,
    };
    (header, body)
}

fn descriptors(input: &mut Input<'_>) -> Vec<OwnedFd> {
    let count = input.u8() % 8;
    FILES.with(|files| {
        let kinds = [&files.memory, &files.event, &files.short, &files.other];
        let chosen = (0..count).map(|_| input.pick(&kinds).try_clone().expect("a descriptor"));
        chosen.collect()
    })
}

/// Checks a reply, and whether more messages can follow.
fn check(header: &Header, reply: &Reply, next: Next, agreed: bool) {
    let (head, body) = reply.bytes.split_at(HEADER_BYTES);
    let field = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
    assert_eq!(head[..2], header.id.to_le_bytes());
    assert_eq!(head[2..4], header.command.to_le_bytes());
    assert_eq!(field(4) as usize, reply.bytes.len());
    let failed = field(8) & wire::FLAG_ERROR != 0;
    assert_eq!(field(8) & !wire::FLAG_ERROR, wire::TYPE_REPLY);
    assert_eq!(failed, field(12) != 0);
    assert!(!failed || (body.is_empty() && reply.fds.is_empty()));
    assert_eq!(next, if agreed { Next::Continue } else { Next::End });
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (ours, _theirs) = UnixStream::pair().expect("a socket");
    let client = Client::new(ours.into(), Counters::default());
    let file = FILES.with(|files| {
        Arc::new(
            files
                .memory
                .as_fd()
                .try_clone_to_owned()
                .expect("a descriptor"),
        )
    });
    let mut device = Checked {
        fail_every: input.u8() % 8,
        file: Some(file),
        ..Checked::default()
    };
    let mut session = Session::new(&mut device, client);
    let mut reply = Reply::default();
    let mut agreed = false;
    if !input.u8().is_multiple_of(8) {
        let capabilities: &[u8] =
            b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":8,\"write_multiple\":true}}\0";
        let header = Header {
            command: Command::Version.to_wire(),
            ..Header::default()
        };
        let next = session.handle(&header, capabilities, Vec::new(), false, &mut reply);
        agreed = true;
        check(&header, &reply, next, agreed);
    }
    for _ in 0..MAX_MESSAGES {
        if input.is_empty() {
            break;
        }
        let (header, body) = message(&mut input);
        let fds = descriptors(&mut input);
        let next = session.handle(&header, &body, fds, false, &mut reply);
        agreed |= next == Next::Continue;
        check(&header, &reply, next, agreed);
        if next == Next::End {
            break;
        }
    }
    drop(session);
    assert!(!device.connected && device.bound == 0 && device.client.is_none());
    assert!(device.ranges.is_empty() || device.fail_every > 0);
}
