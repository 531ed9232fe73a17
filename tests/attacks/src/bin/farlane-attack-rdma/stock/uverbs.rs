//! The commands of the RDMA subsystem (`include/uapi/rdma/ib_user_verbs.h`), by hand: each a
//! `write` of a header and arguments. An answer goes to the address that the arguments begin with.

use crate::Failure;
use crate::raw::{self, last};
use farlane_abi::Errno;
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

/// The device's file.
const PATH: &str = "/dev/infiniband/uverbs0";

/// Where the kernel says which GIDs the device's port has; the entry is that of its IPv4 address.
const GID: &str = "/sys/class/infiniband/rxe_farlane0/ports/1/gids/1";

/// Index of that GID.
pub const GID_INDEX: u8 = 1;

/// `enum ib_uverbs_write_cmds`.
pub mod number {
    pub const GET_CONTEXT: u32 = 0;
    pub const ALLOC_PD: u32 = 3;
    pub const DEALLOC_PD: u32 = 4;
    pub const CREATE_AH: u32 = 5;
    pub const DESTROY_AH: u32 = 8;
    pub const REG_MR: u32 = 9;
    pub const REREG_MR: u32 = 11;
    pub const DEREG_MR: u32 = 13;
    pub const ALLOC_MW: u32 = 14;
    pub const DEALLOC_MW: u32 = 16;
    pub const RESIZE_CQ: u32 = 19;
    pub const DESTROY_CQ: u32 = 20;
    pub const REQ_NOTIFY_CQ: u32 = 23;
    pub const CREATE_QP: u32 = 24;
    pub const MODIFY_QP: u32 = 26;
    pub const DESTROY_QP: u32 = 27;
    pub const POST_SEND: u32 = 28;
    pub const ATTACH_MCAST: u32 = 30;
    pub const CREATE_SRQ: u32 = 32;
    pub const MODIFY_SRQ: u32 = 33;
    pub const DESTROY_SRQ: u32 = 35;
    /// Beyond all that there are.
    pub const END: u32 = 41;
}

/// `RDMA_VERBS_IOCTL`.
const VERBS_IOCTL: libc::Ioctl = 0xc018_1b01;

/// Bytes of `struct ib_uverbs_send_wr` that a doorbell claims to have.
const WQE_BYTES: u32 = 128;

/// Arguments of a command.
#[derive(Clone, Debug, Default)]
pub struct Args(pub Vec<u8>);

impl Args {
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn u16(self, value: u16) -> Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_ne_bytes())
    }
}

/// An answer, read from its beginning.
#[derive(Debug)]
pub struct Answer(Vec<u8>, usize);

impl Answer {
    pub fn of(bytes: Vec<u8>) -> Self {
        Self(bytes, 0)
    }

    pub fn u32(&mut self) -> Result<u32, Failure> {
        let bytes = self.0.get(self.1..self.1 + 4).ok_or("A short answer")?;
        self.1 += 4;
        Ok(u32::from_ne_bytes(bytes.try_into()?))
    }

    pub fn u64(&mut self) -> Result<u64, Failure> {
        let bytes = self.0.get(self.1..self.1 + 8).ok_or("A short answer")?;
        self.1 += 8;
        Ok(u64::from_ne_bytes(bytes.try_into()?))
    }
}

/// A command that should have succeeded.
#[derive(Debug, thiserror::Error)]
#[error("Command {number}: {errno}")]
pub struct Refused {
    pub number: u32,
    pub errno: Errno,
}

/// A context of the device.
#[derive(Debug)]
pub struct Device {
    file: OwnedFd,
    _events: Option<OwnedFd>,
}

impl Device {
    /// The file, without a context.
    pub fn file() -> Result<Self, Failure> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(PATH, flags, Mode::empty())?;
        Ok(Self {
            file,
            _events: None,
        })
    }

    /// A context.
    pub fn open() -> Result<Self, Failure> {
        let mut device = Self::file()?;
        let mut answer = device.make(number::GET_CONTEXT, &Args::default(), 8)?;
        let events = i32::try_from(answer.u32()?)?;
        // SAFETY: the kernel has just made it for this process, and nothing else knows it.
        device._events = Some(unsafe { OwnedFd::from_raw_fd(events) });
        Ok(device)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A command of which nothing is as it should be: what its header says, and what is behind it.
    pub fn raw(&self, header: [u32; 2], behind: &[u8]) -> Result<(), Errno> {
        let bytes = Args::default().u32(header[0]).u32(header[1]).bytes(behind);
        // SAFETY: the kernel reads no more than is there; where it writes, the caller says.
        let written = unsafe {
            libc::write(
                self.file.as_raw_fd(),
                bytes.0.as_ptr().cast(),
                bytes.0.len(),
            )
        };
        if written < 0 { Err(last()) } else { Ok(()) }
    }

    /// A command without an answer.
    pub fn tell(&self, number: u32, args: &Args) -> Result<(), Errno> {
        self.raw([number, words(args.0.len() + 8, 0)], &args.0)
    }

    /// A command whose answer goes to an address of the caller's choice.
    pub fn ask_at(&self, number: u32, args: &Args, to: (u64, usize)) -> Result<(), Errno> {
        let args = Args::default().u64(to.0).bytes(&args.0);
        self.raw([number, words(args.0.len() + 8, to.1)], &args.0)
    }

    /// A command with an answer of so many bytes.
    pub fn ask(&self, number: u32, args: &Args, bytes: usize) -> Result<Answer, Errno> {
        let mut answer = vec![0_u8; bytes];
        let at = answer.as_mut_ptr().expose_provenance() as u64;
        self.ask_at(number, args, (at, bytes))?;
        Ok(Answer(answer, 0))
    }

    /// Creates a completion queue by `UVERBS_METHOD_CQ_CREATE`, as the library does where the
    /// kernel has that; the driver's answer goes to an address of the caller's choice. Returns its
    /// handle.
    pub fn create_cq(
        &self,
        [entries, vector]: [u32; 2],
        (to, bytes): (u64, usize),
    ) -> Result<u32, Errno> {
        const OBJECT: u16 = 3;
        const METHOD: u16 = 0;
        const DRIVER: u32 = 14;
        const DRIVERS_ANSWER: u16 = (1 << 12) + 1;
        const MANDATORY: u16 = 1;
        const HEADER_BYTES: usize = 24;
        let mut had = 0_u32;
        let had: *mut u32 = &raw mut had;
        let attributes = [
            (0, 0, 0),
            (1, 4, u64::from(entries)),
            (2, 8, 1),
            (4, 4, u64::from(vector)),
            (6, 4, had.expose_provenance() as u64),
            (DRIVERS_ANSWER, u16::try_from(bytes).unwrap_or(0), to),
        ];
        let length = HEADER_BYTES + 16 * attributes.len();
        let args = Args::default().u16(u16::try_from(length).unwrap_or(0));
        let args = args.u16(OBJECT).u16(METHOD);
        let args = args.u16(u16::try_from(attributes.len()).unwrap_or(0));
        let mut args = args.u64(0).u32(DRIVER).u32(0);
        for (id, length, data) in attributes {
            args = args.u16(id).u16(length).u16(MANDATORY).u16(0).u64(data);
        }
        let command: *mut u8 = args.0.as_mut_ptr();
        // SAFETY: the kernel reads and writes the command, which is as long as it says, and what it
        // names: a word of this function's, and what the caller says.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), VERBS_IOCTL, command) };
        if result < 0 {
            return Err(last());
        }
        // Where the first attribute has its data.
        let at = HEADER_BYTES + 8;
        let handle = args.0[at..at + 4].try_into().map_err(|_| Errno::EPROTO)?;
        Ok(u32::from_ne_bytes(handle))
    }

    /// A command that must succeed.
    pub fn make(&self, number: u32, args: &Args, bytes: usize) -> Result<Answer, Failure> {
        let answer = self.ask(number, args, bytes);
        Ok(answer.map_err(|errno| Refused { number, errno })?)
    }

    /// A command about one object, which has no answer.
    pub fn end(&self, number: u32, handle: u32) -> Result<(), Errno> {
        self.tell(number, &Args::default().u32(handle))
    }

    /// A command that destroys a queue or a queue pair.
    pub fn destroy(&self, number: u32, handle: u32) -> Result<(), Errno> {
        let args = Args::default().u32(handle).u32(0);
        self.ask(number, &args, 8).map(drop)
    }

    /// Rings for a queue pair: requests are in its queue, and none in the command.
    pub fn ring(&self, qp: u32) -> Result<(), Errno> {
        let args = Args::default().u32(qp).u32(0).u32(0).u32(WQE_BYTES);
        self.ask(number::POST_SEND, &args, 4).map(drop)
    }

    /// Maps it.
    pub fn map(&self, offset: u64, length: usize) -> Result<raw::Mapped, Errno> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let fd = self.file.as_raw_fd();
        raw::mmap(fd, offset, length, protection, libc::MAP_SHARED)
    }
}

/// The second word of a header: the length of the command and of its answer, in words of 4 bytes.
pub fn words(command: usize, answer: usize) -> u32 {
    let [command, answer] = [command, answer].map(|bytes| u16::try_from(bytes / 4));
    let [a, b] = command.unwrap_or(u16::MAX).to_ne_bytes();
    let [c, d] = answer.unwrap_or(u16::MAX).to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}

/// The GID of the device's IPv4 address.
pub fn own_gid() -> Result<[u8; 16], Failure> {
    let text = std::fs::read_to_string(GID)?;
    let digits: String = text.trim().split(':').collect();
    Ok(u128::from_str_radix(&digits, 16)?.to_be_bytes())
}
