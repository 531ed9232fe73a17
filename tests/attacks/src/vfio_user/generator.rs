//! Messages that no client should send, of every command.

use crate::Random;
use crate::random::{low16, low32};
use farlane_abi::width::{to_u64, to_usize};
use farlane_vfio_user::wire::{self, Command, HEADER_BYTES, Header};
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, open};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use zerocopy::IntoBytes as _;

/// Numbers at the edges of what fields can hold.
const EDGES: [u64; 20] = [
    0,
    1,
    2,
    7,
    8,
    9,
    0xff,
    0x1000,
    0xfff,
    0x1001,
    0x10_0000,
    0x10_0001,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_f000,
    0xffff_ffff_ffff_ffff,
];

/// What becomes of the stream after a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// The header tells the truth about the length: the next message can follow.
    InStep,
    /// It does not: nothing can follow.
    Torn,
}

/// A message to send.
#[derive(Debug)]
pub struct Attack {
    /// The header's command.
    pub command: u16,
    /// Header and body.
    pub bytes: Vec<u8>,
    /// Which of [`Descriptors`] go along.
    pub fds: Vec<usize>,
    /// What can follow.
    pub stream: Stream,
}

/// Descriptors of all kinds.
#[derive(Debug)]
pub struct Descriptors(Vec<OwnedFd>);

impl Descriptors {
    /// Opens them.
    ///
    /// # Errors
    /// There are too many open files.
    pub fn new() -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, epoll, eventfd};
        let memfd = |bytes| -> std::io::Result<OwnedFd> {
            let fd = memfd_create("attack", MemfdFlags::CLOEXEC)?;
            ftruncate(&fd, bytes)?;
            Ok(fd)
        };
        let opened = |path, flags| open(path, flags | OFlags::CLOEXEC, Mode::empty());
        let (near, far) = std::os::unix::net::UnixStream::pair()?;
        let (read, write) = rustix::pipe::pipe()?;
        Ok(Self(vec![
            eventfd(0, EventfdFlags::CLOEXEC)?,
            eventfd(u32::MAX, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?,
            memfd(0x10_0000)?,
            memfd(1)?,
            memfd(0)?,
            opened("/dev/null", OFlags::RDWR)?,
            opened("/dev/zero", OFlags::RDONLY)?,
            opened("/", OFlags::RDONLY | OFlags::DIRECTORY)?,
            opened("/proc/self/exe", OFlags::RDONLY)?,
            opened("/proc/self/exe", OFlags::PATH)?,
            epoll::create(epoll::CreateFlags::CLOEXEC)?,
            near.into(),
            far.into(),
            read,
            write,
        ]))
    }

    /// Those of an attack.
    #[must_use]
    pub fn of(&self, attack: &Attack) -> Vec<BorrowedFd<'_>> {
        let chosen = attack.fds.iter().filter_map(|&number| self.0.get(number));
        chosen.map(|fd| fd.as_fd()).collect()
    }

    /// All of them.
    #[must_use]
    pub fn all(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(|fd| fd.as_fd()).collect()
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

/// Makes attacks.
#[derive(Clone, Debug)]
pub struct Generator {
    random: Random,
    descriptors: usize,
    /// Counts through the commands.
    turn: usize,
}

impl Generator {
    /// Attacks that belong to `seed`, with so many [`Descriptors`] to choose from.
    #[must_use]
    pub fn new(seed: u64, descriptors: usize) -> Self {
        Self {
            random: Random::new(seed),
            descriptors,
            turn: 0,
        }
    }

    /// The next one. Each command has its turn, and so have numbers that are none.
    pub fn attack(&mut self) -> Attack {
        let kinds = Command::ALL.len() + 2;
        let turn = self.turn % kinds;
        self.turn += 1;
        let known = Command::ALL.get(turn).copied();
        let command = match (known, turn % 2) {
            (Some(command), _) => command.to_wire(),
            (None, 0) => 0,
            (None, _) => self
                .random
                .bytes(2)
                .iter()
                .fold(19, |n, &b| n * 7 + u16::from(b)),
        };
        let mut body = known.map_or_else(Vec::new, |command| self.plausible(command));
        let mut fds = self.fitting_fds(known);
        let mut header = Header {
            id: low16(self.random.word()),
            command,
            ..Header::default()
        };
        let mut stream = Stream::InStep;
        let mut lie = None;
        for _ in 0..=self.random.below(2) {
            match self.random.below(12) {
                0..=4 => self.spoil_field(&mut body),
                5 => body.truncate(self.random.below(body.len() + 1)),
                6 => {
                    let more = self.random.below(200);
                    body.extend(self.random.bytes(more));
                }
                7 => header.flags = self.number32(),
                8 => {
                    let count = self.random.below(30);
                    let any = self.descriptors;
                    fds = (0..count).map(|_| self.random.below(any)).collect();
                }
                9 => {
                    let length = self.random.below(300);
                    body = self.random.bytes(length);
                }
                10 => header.error = self.number32(),
                _ => lie = Some(self.number32()),
            }
        }
        let length = u32::try_from(HEADER_BYTES + body.len()).unwrap_or(u32::MAX);
        header.size = length;
        // One in eight, because each costs a connection.
        if let Some(size) = lie.filter(|&size| size != length && self.random.below(3) == 0) {
            header.size = size;
            stream = Stream::Torn;
        }
        Attack {
            command,
            bytes: [header.as_bytes(), &body].concat(),
            fds,
            stream,
        }
    }

    fn number(&mut self) -> u64 {
        match self.random.below(4) {
            0 => self.random.word(),
            1 => low16(self.random.word()).into(),
            _ => self.random.pick(&EDGES),
        }
    }

    fn number32(&mut self) -> u32 {
        low32(self.number())
    }

    /// Overwrites 4 or 8 bytes where a field may be.
    fn spoil_field(&mut self, body: &mut [u8]) {
        let value = self.number().to_le_bytes();
        let width = self.random.pick(&[4, 8]);
        let fields = body.len() / 4;
        if fields == 0 {
            return;
        }
        let at = 4 * self.random.below(fields);
        for (byte, new) in body[at..].iter_mut().zip(&value[..width]) {
            *byte = *new;
        }
    }

    fn fitting_fds(&mut self, command: Option<Command>) -> Vec<usize> {
        let count = match command {
            Some(Command::DmaMap) => self.random.below(2),
            Some(Command::DeviceSetIrqs) => self.random.below(4),
            _ => 0,
        };
        (0..count)
            .map(|_| self.random.below(self.descriptors))
            .collect()
    }

    /// A body that may even be right.
    fn plausible(&mut self, command: Command) -> Vec<u8> {
        let index = self.random.below32(12);
        let page = |number: usize| to_u64(number) << 12;
        let (first, pages) = (page(self.random.below(64)), page(1 + self.random.below(16)));
        match command {
            Command::Version => [
                &[0; 4],
                farlane_vm_front_end::vfio_user::CAPABILITIES.as_bytes(),
                &[0],
            ]
            .concat(),
            Command::DmaMap => {
                let map = wire::DmaMap {
                    argsz: 32,
                    flags: 3,
                    offset: page(self.random.below(4)),
                    address: first,
                    size: pages,
                };
                map.as_bytes().to_vec()
            }
            Command::DmaUnmap => {
                let unmap = wire::DmaUnmap {
                    argsz: 24,
                    flags: self.random.pick(&[0, 0, 0, wire::UNMAP_ALL]),
                    address: first,
                    size: pages,
                };
                unmap.as_bytes().to_vec()
            }
            Command::DeviceGetInfo => [16_u32, 0, 0, 0].as_bytes().to_vec(),
            Command::DeviceGetRegionInfo => {
                let ask = wire::RegionInfo {
                    argsz: self.random.pick(&[32, 64, 1000]),
                    index,
                    ..Default::default()
                };
                ask.as_bytes().to_vec()
            }
            Command::DeviceGetRegionIoFds | Command::DeviceGetIrqInfo => {
                [self.random.pick(&[16, 4096]), 0, index, 0]
                    .as_bytes()
                    .to_vec()
            }
            Command::DeviceSetIrqs => self.plausible_irqs(index),
            Command::RegionRead => self.access(index).as_bytes().to_vec(),
            Command::RegionWrite => {
                let access = self.access(index);
                let count = to_usize(access.count.into());
                [access.as_bytes(), &self.random.bytes(count)].concat()
            }
            Command::RegionWriteMulti => {
                let count = self.random.below(8);
                let mut body = page(0).as_bytes().to_vec();
                body[0] = u8::try_from(count).unwrap_or(0);
                for _ in 0..count {
                    let access = self.access(index);
                    let count = access.count % 16;
                    body.extend(access.offset.as_bytes());
                    body.extend([access.region, count].as_bytes());
                    body.extend(self.random.bytes(8));
                }
                body
            }
            Command::DmaRead | Command::DmaWrite => {
                let count = self.random.below(64);
                let access = wire::DmaAccess {
                    address: first,
                    count: to_u64(count),
                };
                [access.as_bytes(), &self.random.bytes(count)].concat()
            }
            Command::DeviceReset => Vec::new(),
            Command::DirtyPages
            | Command::DeviceFeature
            | Command::MigDataRead
            | Command::MigDataWrite => {
                let length = self.random.below(64);
                self.random.bytes(length)
            }
        }
    }

    fn access(&mut self, region: u32) -> wire::RegionAccess {
        wire::RegionAccess {
            offset: to_u64(self.random.below(0x2000)),
            region,
            count: self.random.pick(&[0, 1, 2, 4, 8, 64, 4096]),
        }
    }

    fn plausible_irqs(&mut self, index: u32) -> Vec<u8> {
        let count = self.random.below(4);
        let data = self.random.pick(&[
            wire::IRQ_SET_DATA_NONE,
            wire::IRQ_SET_DATA_BOOL,
            wire::IRQ_SET_DATA_EVENTFD,
        ]);
        let action = self.random.pick(&[
            wire::IRQ_SET_ACTION_MASK,
            wire::IRQ_SET_ACTION_UNMASK,
            wire::IRQ_SET_ACTION_TRIGGER,
        ]);
        let bytes = if data == wire::IRQ_SET_DATA_BOOL {
            count
        } else {
            0
        };
        let set = wire::IrqSet {
            argsz: u32::try_from(20 + bytes).unwrap_or(0),
            flags: data | action,
            index: index % 6,
            start: self.random.below32(3),
            count: u32::try_from(count).unwrap_or(0),
        };
        [set.as_bytes(), &self.random.bytes(bytes)].concat()
    }
}
