//! An AF_XDP socket on one queue of a NIC: frames without the host's network stack.
//!
//! The frames lie in memory of the process (a UMEM), in chunks. Half of them are lent to the kernel
//! to receive into, the others are there to send from.

use super::rings::{Mapping, Ring};
use crate::bits::{FrameHeader, HEADER_BYTES, index};
use crate::header;
use crate::offload::{self, Outgoing};
use crate::pairs::PairId;
use crate::port::FrameRoom;
use farlane_abi::width::to_u64;
use farlane_daemon::per_node;
use farlane_zero_copy::slices::{GuestRuns, ReadOnly};
use farlane_zero_copy::topology::Node;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

/// Bytes of a chunk.
const CHUNK: usize = index(CHUNK_SIZE);
const CHUNK_SIZE: u32 = 4096;
const CHUNK_BYTES: u64 = to_u64(CHUNK);
/// Bytes of a chunk that the kernel keeps for programs (`XDP_PACKET_HEADROOM`).
const HEADROOM: usize = 256;
pub const MAX_FRAME: usize = CHUNK - HEADROOM - 64;
/// `AF_XDP`, as an address has it.
const FAMILY: libc::sa_family_t = 44;
const _: () = assert!(FAMILY as i32 == libc::AF_XDP);
/// Entries of each ring, and chunks for each direction.
const ENTRIES: u32 = 2048;
const CHUNKS: usize = index(ENTRIES);
/// Where the rings are mapped (`XDP_PGOFF_*`, `XDP_UMEM_PGOFF_*`).
const RX_PAGE: libc::off_t = 0;
const TX_PAGE: libc::off_t = 0x8000_0000;
const FILL_PAGE: libc::off_t = 0x1_0000_0000;
const COMPLETION_PAGE: libc::off_t = 0x1_8000_0000;
/// Times that the kernel is called to send what waits; it takes a few frames a call where it
/// copies.
const CALLS: u32 = ENTRIES / 16;

/// An entry of the rings for frames.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Descriptor {
    address: u64,
    bytes: u32,
    options: u32,
}

/// How frames reach the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMode {
    /// As the driver can.
    Any,
    /// The kernel copies them.
    Copy,
    /// The NIC writes into the UMEM.
    Zero,
}

#[derive(Debug)]
pub struct XdpSocket {
    // The rings and the socket go before the memory that they name.
    rx: Ring<Descriptor>,
    tx: Ring<Descriptor>,
    fill: Ring<u64>,
    completion: Ring<u64>,
    socket: OwnedFd,
    umem: Umem,
    /// Chunks that can be sent from.
    free: Vec<u64>,
    /// A frame that is being sent, and one segment of it.
    frame: Box<[u8]>,
    segment: Box<[u8]>,
    mtu: u16,
}

/// A raw socket. Protocol 0: one of `AF_PACKET` receives nothing.
pub(super) fn raw_socket(family: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the descriptor is new.
    unsafe {
        let fd = libc::socket(family, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Sets an option of a socket whose value the kernel only reads.
pub(super) fn set_option<T>(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: &T,
) -> io::Result<()> {
    let address = std::ptr::from_ref(value).cast();
    // SAFETY: the kernel reads as many bytes as the value has.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, address, length_of(value)) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Bytes of a structure, as calls about sockets take them.
#[allow(clippy::cast_possible_truncation)] // As asserted.
const fn length_of<T>(_: &T) -> libc::socklen_t {
    const { assert!(size_of::<T>() < 1 << 16) };
    size_of::<T>() as libc::socklen_t
}

fn offsets(socket: BorrowedFd<'_>) -> io::Result<libc::xdp_mmap_offsets> {
    // SAFETY: all zeroes are offsets.
    let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
    let mut bytes = length_of(&offsets);
    let at = (&raw mut offsets).cast();
    // SAFETY: the kernel writes at most as many bytes as it is told there are.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_MMAP_OFFSETS,
            at,
            &raw mut bytes,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(offsets)
}

impl XdpSocket {
    /// Binds a socket to a queue of the interface of this number. Its memory comes from `node`,
    /// else from the calling thread's.
    pub fn bind(
        (interface, queue): (u32, PairId),
        copying: CopyMode,
        mtu: u16,
        node: Option<Node>,
    ) -> io::Result<Self> {
        let socket = raw_socket(libc::AF_XDP)?;
        let half = u64::from(ENTRIES);
        let umem = Mapping::anonymous(2 * CHUNK * CHUNKS)?;
        if let Some(node) = node {
            let address = umem.begin().as_ptr().addr();
            if let Err(e) = per_node::prefer_for(address, umem.bytes(), node) {
                log::info!("Memory for queue {queue} is not asked for on node {node}: {e}");
            }
        }
        let region = libc::xdp_umem_reg {
            addr: to_u64(umem.begin().as_ptr().expose_provenance()),
            len: to_u64(umem.bytes()),
            chunk_size: CHUNK_SIZE,
            headroom: 0,
            flags: 0,
            tx_metadata_len: 0,
        };
        let fd = socket.as_fd();
        set_option(fd, libc::SOL_XDP, libc::XDP_UMEM_REG, &region)?;
        for ring in [
            libc::XDP_UMEM_FILL_RING,
            libc::XDP_UMEM_COMPLETION_RING,
            libc::XDP_RX_RING,
            libc::XDP_TX_RING,
        ] {
            set_option(fd, libc::SOL_XDP, ring, &ENTRIES)?;
        }
        let offsets = offsets(fd)?;
        let mut made = Self {
            rx: Ring::new(fd, RX_PAGE, &offsets.rx, ENTRIES)?,
            tx: Ring::new(fd, TX_PAGE, &offsets.tx, ENTRIES)?,
            fill: Ring::new(fd, FILL_PAGE, &offsets.fr, ENTRIES)?,
            completion: Ring::new(fd, COMPLETION_PAGE, &offsets.cr, ENTRIES)?,
            free: (half..2 * half)
                .map(|number| number * CHUNK_BYTES)
                .collect(),
            frame: vec![0; header::MAX_FRAME].into(),
            segment: vec![0; MAX_FRAME].into(),
            mtu,
            umem: Umem(umem),
            socket,
        };
        for number in 0..half {
            made.fill.push(number * CHUNK_BYTES);
        }
        made.fill.publish();
        made.bind_to(interface, queue, copying)?;
        Ok(made)
    }

    fn bind_to(&self, interface: u32, queue: PairId, copying: CopyMode) -> io::Result<()> {
        let how = match copying {
            CopyMode::Any => 0,
            CopyMode::Copy => libc::XDP_COPY,
            CopyMode::Zero => libc::XDP_ZEROCOPY,
        };
        let address = libc::sockaddr_xdp {
            sxdp_family: FAMILY,
            sxdp_flags: libc::XDP_USE_NEED_WAKEUP | how,
            sxdp_ifindex: interface,
            sxdp_queue_id: queue.0.into(),
            sxdp_shared_umem_fd: 0,
        };
        let bytes = length_of(&address);
        // SAFETY: the kernel reads as many bytes as the address has.
        let result =
            unsafe { libc::bind(self.socket.as_raw_fd(), (&raw const address).cast(), bytes) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Readable when frames wait, writable when there is room.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Takes a frame and puts it, behind a header of zeroes, into memory. What does not fit is
    /// lost.
    ///
    /// # Errors
    /// The kernel cannot be asked for more.
    pub fn receive(&mut self, into: FrameRoom<'_>) -> io::Result<Option<usize>> {
        let Some(descriptor) = self.rx.take() else {
            if self.fill.needs_wakeup() {
                self.wake()?;
            }
            return Ok(None);
        };
        *into.header = FrameHeader::default();
        let frame = self.umem.chunk(descriptor.address, descriptor.bytes);
        let placed = frame.map_or(Ok(0), |frame| {
            let in_guest = into.guest.copy_from(frame)?;
            let (rest, own) = common(frame.get(in_guest..).unwrap_or_default(), into.own);
            own.copy_from_slice(rest);
            Ok(HEADER_BYTES + in_guest + rest.len())
        });
        // The chunk begins at a multiple of its length (not XDP_UMEM_UNALIGNED_CHUNK_FLAG).
        self.fill
            .push(descriptor.address / CHUNK_BYTES * CHUNK_BYTES);
        self.fill.publish();
        placed
            .map(Some)
            .map_err(|ReadOnly| io::ErrorKind::PermissionDenied.into())
    }

    /// Takes a frame with its header and sends it: with its checksum, in segments if it is a large
    /// one. `false`: there is no room.
    ///
    /// # Errors
    /// The frame asks for what cannot be done.
    pub fn send(
        &mut self,
        header: &FrameHeader,
        guest: GuestRuns<'_>,
        own: &[u8],
    ) -> io::Result<bool> {
        while let Some(address) = self.completion.take() {
            self.free.push(address);
        }
        let bytes = guest.copy_to(&mut self.frame);
        let rest = self.frame.get_mut(bytes..).unwrap_or_default();
        let (own, rest) = common(own, rest);
        rest.copy_from_slice(own);
        let bytes = bytes + own.len();
        let frame = self.frame.get_mut(..bytes).unwrap_or_default();
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
        // An Ethernet header, and up to two tags, come on top of the MTU.
        let most = MAX_FRAME.min(usize::from(self.mtu) + 22);
        match offload::prepare(frame, header, most).map_err(invalid)? {
            Outgoing::Whole(frame) => {
                let Some(address) = self.free.pop() else {
                    return Ok(false);
                };
                put(&mut self.umem, &mut self.tx, &mut self.free, address, frame);
            }
            Outgoing::Segments(mut segments) => {
                if segments.len() > self.free.len() {
                    if segments.len() > CHUNKS {
                        return Err(invalid(offload::OffloadError::NoPayload));
                    }
                    return Ok(false);
                }
                while let Some(bytes) = segments.next_into(&mut self.segment) {
                    let (Some(address), Some(segment)) =
                        (self.free.pop(), self.segment.get(..bytes))
                    else {
                        break;
                    };
                    put(
                        &mut self.umem,
                        &mut self.tx,
                        &mut self.free,
                        address,
                        segment,
                    );
                }
            }
        }
        Ok(true)
    }

    /// Has the kernel send what waits.
    pub fn flush(&mut self) -> io::Result<()> {
        self.tx.publish();
        for _ in 0..CALLS {
            if self.tx.waiting() == 0 || !self.tx.needs_wakeup() {
                break;
            }
            let before = self.tx.waiting();
            self.kick()?;
            if self.tx.waiting() >= before {
                break;
            }
        }
        Ok(())
    }

    /// Throws away what has come.
    pub fn discard(&mut self) {
        let mut header = FrameHeader::default();
        while let Ok(Some(_)) = self.receive(FrameRoom {
            header: &mut header,
            guest: GuestRuns::default(),
            own: &mut [],
        }) {}
    }

    /// Has the kernel send.
    fn kick(&self) -> io::Result<()> {
        // SAFETY: there are no bytes and no address.
        let result = unsafe {
            libc::sendto(
                self.socket.as_raw_fd(),
                std::ptr::null(),
                0,
                libc::MSG_DONTWAIT,
                std::ptr::null(),
                0,
            )
        };
        busy(result)
    }

    /// Has the kernel look for chunks to receive into.
    fn wake(&self) -> io::Result<()> {
        // SAFETY: there are no bytes and no address.
        let result = unsafe {
            libc::recvfrom(
                self.socket.as_raw_fd(),
                std::ptr::null_mut(),
                0,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        busy(result)
    }
}

/// A busy kernel goes on by itself; an interface that is down sends nothing.
fn busy(result: isize) -> io::Result<()> {
    if result >= 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EBUSY | libc::ENOBUFS | libc::ENETDOWN | libc::EINTR) => Ok(()),
        _ => Err(error),
    }
}

/// As much of both as the shorter one has.
fn common<'a>(from: &'a [u8], to: &'a mut [u8]) -> (&'a [u8], &'a mut [u8]) {
    let bytes = from.len().min(to.len());
    (from.split_at(bytes).0, to.split_at_mut(bytes).0)
}

/// Copies a frame into a chunk and produces its descriptor; there is one for every chunk.
fn put(
    umem: &mut Umem,
    tx: &mut Ring<Descriptor>,
    free: &mut Vec<u64>,
    address: u64,
    frame: &[u8],
) {
    let Some(bytes) = umem.fill(address, frame) else {
        return;
    };
    let descriptor = Descriptor {
        address,
        bytes,
        options: 0,
    };
    if !tx.push(descriptor) {
        free.push(address);
    }
}

/// Memory that frames are received into and sent from, in chunks. Whoever has a chunk's address,
/// the kernel or this side, uses it alone: addresses go back and forth through the rings.
#[derive(Debug)]
struct Umem(Mapping);

impl Umem {
    /// A frame that the kernel has received, and does not write before the chunk is given back.
    fn chunk(&self, address: u64, bytes: u32) -> Option<&[u8]> {
        let bytes = usize::try_from(bytes).ok()?;
        let begin = self.0.at(usize::try_from(address).ok()?, bytes)?;
        // SAFETY: `at` has found the bytes in the mapping; nobody writes them meanwhile, as said.
        Some(unsafe { std::slice::from_raw_parts(begin.as_ptr(), bytes) })
    }

    /// Copies a frame, as far as it fits, into a chunk that the kernel does not have. Returns its
    /// bytes there.
    fn fill(&mut self, address: u64, frame: &[u8]) -> Option<u32> {
        let bytes = frame.len().min(CHUNK);
        let begin = self.0.at(usize::try_from(address).ok()?, bytes)?;
        // SAFETY: `at` has found room for the bytes; nobody else uses them, as said.
        unsafe { std::ptr::copy_nonoverlapping(frame.as_ptr(), begin.as_ptr(), bytes) };
        u32::try_from(bytes).ok()
    }
}
