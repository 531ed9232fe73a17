//! A tap interface of the host: one queue of it for each queue pair.

use super::host_interface::{HostInterface, InterfaceRequest, call_by_value, call_with_number};
use super::{FrameRoom, Offloads, Port, PortQueue};
use crate::bits::{FrameHeader, HEADER_BYTES};
use crate::ebpf::{TapSteering, steering};
use crate::flow::FlowKey;
use crate::pairs::{PairCount, PairId};
use farlane_daemon::log_limit::LogLimit;
use farlane_daemon::warn_limited;
use farlane_zero_copy::slices::GuestRuns;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use thiserror::Error;
use zerocopy::IntoBytes as _;

/// What taps are made with.
const DEVICE: &str = "/dev/net/tun";
/// `TUNSETOFFLOAD`'s bits (`linux/if_tun.h`).
const OFFLOAD_CSUM: libc::c_ulong = 1;
const OFFLOAD_TSO4: libc::c_ulong = 2;
const OFFLOAD_TSO6: libc::c_ulong = 4;
const OFFLOAD_ECN: libc::c_ulong = 8;
/// Requests of `linux/if_tun.h` by their numbers, where libc has none.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNGETIFF: libc::c_ulong = 0x8004_54d2;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const TUNSETQUEUE: libc::c_ulong = 0x4004_54d9;
/// Requests of a tap, or of a NIC, that is open, for a filter of system calls.
pub const REQUESTS: &[libc::c_ulong] = &[
    TUNSETOFFLOAD,
    steering::TUNSETSTEERINGEBPF,
    libc::SIOCGIFFLAGS,
];
/// Flags of `TUNSETIFF` and `TUNSETQUEUE`.
const TAP: i32 = 0x0002;
const NO_PACKET_INFORMATION: i32 = 0x1000;
const HEADER: i32 = 0x4000;
const SEVERAL_QUEUES: i32 = 0x0100;
const PERSISTENT: i32 = 0x0800;
const DETACH: i32 = 0x0400;
/// Bytes of the header before a frame, for `TUNSETVNETHDRSZ`.
const HEADER_SIZE: i32 = 12;
const _: () = assert!(HEADER_SIZE.unsigned_abs() as usize == HEADER_BYTES);
/// Most queues of a tap (`MAX_TAP_QUEUES`).
pub const MAX_QUEUES: u16 = 256;
/// Frames of a queue that are thrown away, at most: more than a tap keeps.
const STALE: u64 = 4096;

/// Why there is no tap.
#[derive(Debug, Error)]
pub enum TapError {
    /// A name that no interface can have.
    #[error("{0:?} is no name of an interface")]
    Name(String),
    /// The system says no.
    #[error("Tap {name}: cannot {what}")]
    System {
        /// Its name.
        name: String,
        /// What was tried.
        what: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// Whether a tap can have this name: what the kernel takes, and no placeholder or quote.
fn is_name(name: &str) -> bool {
    let is_plain = |b: u8| b.is_ascii_graphic() && !b"/%:\"\\".contains(&b);
    !name.is_empty() && name.len() < libc::IFNAMSIZ && name.bytes().all(is_plain)
}

/// A tap.
#[derive(Debug)]
pub struct Tap {
    interface: HostInterface,
    queues: Vec<Arc<OwnedFd>>,
    count: PairCount,
    mtu: u16,
    hardware: [u8; 6],
    in_use: Vec<Arc<AtomicBool>>,
    /// Says which frame comes from which queue. Without it frames come from the first queue only:
    /// by itself the kernel moves flows to the queue that last sent something of them, at once, so
    /// that what waits in another queue is overtaken.
    steering: Option<TapSteering>,
    /// Its log lines that a VMM can cause.
    limit: LogLimit,
}

impl Tap {
    /// Opens a tap with this many queues: one that is there, or a new one, which goes when this
    /// does and is up.
    pub fn open(name: &str, queues: PairCount, mtu: Option<u16>) -> Result<Self, TapError> {
        if !is_name(name) {
            return Err(TapError::Name(name.to_owned()));
        }
        let failed = |what| {
            move |source: io::Error| TapError::System {
                name: name.to_owned(),
                what,
                source,
            }
        };
        // A tap that was made for one queue takes no further flag.
        let mut several = queues > PairCount::ONE;
        let opened = queues.ids().map(|_| open_queue(name, &mut several, queues));
        let opened: Vec<_> = opened
            .collect::<Result<_, _>>()
            .map_err(|(what, e)| failed(what)(e))?;
        let socket = rustix::net::socket_with(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::DGRAM,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        );
        let socket = socket.map_err(|e| failed("ask for its state")(e.into()))?;
        let interface = HostInterface::new(name, socket);
        if let Some(mtu) = mtu {
            interface.set_mtu(mtu).map_err(failed("set its MTU"))?;
        }
        let mut tap = Self {
            mtu: interface.mtu().map_err(failed("ask for its MTU"))?,
            hardware: interface.address().map_err(failed("ask for its address"))?,
            interface,
            in_use: opened.iter().map(|_| Arc::default()).collect(),
            queues: opened,
            count: queues,
            steering: None,
            limit: LogLimit::new(),
        };
        if !tap.is_persistent().map_err(failed("ask for its flags"))? {
            tap.interface.bring_up().map_err(failed("bring it up"))?;
        }
        if queues > PairCount::ONE {
            tap.steering = tap.steered();
            if tap.steering.is_none() {
                tap.keep_one().map_err(failed("take queues out of it"))?;
            }
        }
        Ok(tap)
    }

    fn first(&self) -> io::Result<BorrowedFd<'_>> {
        let first = self.queues.first().ok_or(io::ErrorKind::NotFound)?;
        Ok(first.as_fd())
    }

    fn is_persistent(&self) -> io::Result<bool> {
        let mut answer = InterfaceRequest::new(self.interface.name())?;
        answer.call(self.first()?, TUNGETIFF)?;
        Ok(answer.flags() & PERSISTENT != 0)
    }

    /// A program that says which frame comes from which queue, where the kernel lets us have one.
    fn steered(&self) -> Option<TapSteering> {
        let attached = TapSteering::new(self.queues())
            .map_err(io::Error::other)
            .and_then(|steering| steering.attach(self.first()?).map(|()| steering));
        attached
            .inspect_err(|e| {
                let (name, why) = (self.interface.name(), farlane_sys::chain(e));
                log::info!("Tap {name}: frames come from its first queue only: {why}");
            })
            .ok()
    }

    /// Frames come from the first queue only.
    fn keep_one(&self) -> io::Result<()> {
        let mut others = self.queues.iter().skip(1);
        others.try_for_each(|queue| {
            let mut request = InterfaceRequest::UNNAMED.with_flags(DETACH);
            request.call(queue.as_fd(), TUNSETQUEUE)
        })
    }
}

/// Opens a queue of a tap of `queues`. `several`: whether it is one of `multi_queue`, which is
/// found out with the first. An error says what failed.
fn open_queue(
    name: &str,
    several: &mut bool,
    queues: PairCount,
) -> Result<Arc<OwnedFd>, (&'static str, io::Error)> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = rustix::fs::open(DEVICE, flags, Mode::empty())
        .map_err(|e| ("open /dev/net/tun for it", e.into()))?;
    let attach = |several| {
        let base = TAP | NO_PACKET_INFORMATION | HEADER;
        let flags = if several { base | SEVERAL_QUEUES } else { base };
        let mut request = InterfaceRequest::new(name)?.with_flags(flags);
        request.call(fd.as_fd(), TUNSETIFF)
    };
    let mut result = attach(*several);
    let is_invalid = |e: &io::Error| e.kind() == io::ErrorKind::InvalidInput;
    if queues == PairCount::ONE && result.as_ref().is_err_and(is_invalid) {
        *several = true;
        result = attach(true);
    }
    let what = if queues > PairCount::ONE {
        "take several queues of it (is it a tap, made with multi_queue, and nobody else's?)"
    } else {
        "take a queue of it (is it a tap, and nobody else's?)"
    };
    result.map_err(|e| (what, e))?;
    call_with_number(fd.as_fd(), TUNSETVNETHDRSZ, HEADER_SIZE)
        .map_err(|e| ("set its header's size", e))?;
    Ok(Arc::new(fd))
}

impl Port for Tap {
    fn name(&self) -> String {
        self.interface.name().to_owned()
    }

    fn queues(&self) -> PairCount {
        self.count
    }

    fn offloads(&self) -> Offloads {
        Offloads::ALL
    }

    fn mtu(&self) -> u16 {
        self.mtu
    }

    fn hardware_address(&self) -> Option<[u8; 6]> {
        Some(self.hardware)
    }

    fn link_is_up(&self) -> bool {
        // A carrier is there as long as somebody holds a queue; what changes is whether the
        // interface is up.
        self.interface
            .flags()
            .is_ok_and(|flags| flags & libc::IFF_UP != 0)
    }

    fn set_guest_offloads(&self, offloads: Offloads) -> io::Result<()> {
        let mut bits = 0;
        let wishes = [
            (offloads.checksum, OFFLOAD_CSUM),
            (offloads.tso4, OFFLOAD_TSO4),
            (offloads.tso6, OFFLOAD_TSO6),
            // A kernel takes this with one of the two before it.
            (
                offloads.ecn && (offloads.tso4 || offloads.tso6),
                OFFLOAD_ECN,
            ),
        ];
        // And segmentation with checksums only.
        if offloads.checksum {
            for (wish, bit) in wishes {
                bits |= if wish { bit } else { 0 };
            }
        }
        call_by_value(self.first()?, TUNSETOFFLOAD, bits)
    }

    fn open(&self, queue: PairId) -> io::Result<Box<dyn PortQueue>> {
        let at = queue.index();
        let receives = self.receive_queues().contains(queue);
        let (Some(fd), Some(in_use)) = (
            self.queues.get(if receives { at } else { 0 }),
            self.in_use.get(at),
        ) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        if in_use.swap(true, Ordering::AcqRel) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        Ok(Box::new(TapQueue {
            fd: Arc::clone(fd),
            in_use: Arc::clone(in_use),
            receives,
            vectors: Vectors::default(),
        }))
    }

    fn discard(&self, queue: PairId) -> u64 {
        let queue = Some(queue).filter(|queue| self.receive_queues().contains(*queue));
        let Some(fd) = queue.and_then(|queue| self.queues.get(queue.index())) else {
            return 0;
        };
        // Where there is no room for its header a frame is thrown away, too, but with an error, as
        // if there were none.
        let mut header = [0; HEADER_BYTES];
        let mut count = 0;
        while count < STALE && rustix::io::read(&**fd, &mut header).is_ok() {
            count += 1;
        }
        count
    }

    fn receive_queues(&self) -> PairCount {
        if self.steering.is_some() {
            self.queues()
        } else {
            PairCount::ONE
        }
    }

    fn spread(&self, queues: PairCount) {
        if let Some(steering) = &self.steering
            && let Err(e) = steering.set_queues(queues)
        {
            warn_limited!(
                self.limit,
                "Tap {}: {queues} queues are not set: {e}",
                self.interface.name()
            );
        }
    }

    fn steer(&self, flow: &FlowKey, queue: Option<PairId>) -> io::Result<bool> {
        match &self.steering {
            Some(steering) => steering.steer(flow, queue).map(|()| true),
            None => Ok(false),
        }
    }

    /// A tap that stays would keep the program, and whoever opens it next would have frames in the
    /// queues of our choice.
    fn give_back(&self) {
        if self.steering.is_some()
            && let Ok(first) = self.first()
            && let Err(e) = steering::detach(first)
        {
            log::warn!("Tap {}: its program stays: {e}", self.interface.name());
        }
    }

    fn forget_flows(&self) {
        if let Some(steering) = &self.steering
            && let Err(e) = steering.forget()
        {
            warn_limited!(
                self.limit,
                "Tap {}: flows are still steered: {e}",
                self.interface.name()
            );
        }
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// A queue of a tap.
#[derive(Debug)]
struct TapQueue {
    fd: Arc<OwnedFd>,
    in_use: Arc<AtomicBool>,
    /// Or it only sends.
    receives: bool,
    vectors: Vectors,
}

impl Drop for TapQueue {
    fn drop(&mut self) {
        self.in_use.store(false, Ordering::Release);
    }
}

/// Vectors of one system call at a time.
#[derive(Debug, Default)]
struct Vectors(Vec<libc::iovec>);

// SAFETY: what the vectors name is borrowed by whoever sets them, for one system call; between
// two calls they are not looked at.
unsafe impl Send for Vectors {}

impl Vectors {
    /// A header, guest memory and memory of the backend. Returns how many there are.
    fn set(
        &mut self,
        header: *mut u8,
        guest: GuestRuns<'_>,
        own: (*mut u8, usize),
    ) -> io::Result<libc::c_int> {
        let vector = |(base, bytes): (*mut u8, usize)| libc::iovec {
            iov_base: base.cast(),
            iov_len: bytes,
        };
        self.0.clear();
        self.0.push(vector((header, HEADER_BYTES)));
        self.0.extend(guest.vectors());
        self.0.extend((own.1 > 0).then(|| vector(own)));
        let count = libc::c_int::try_from(self.0.len());
        count.map_err(|_| io::ErrorKind::InvalidInput.into())
    }
}

impl PortQueue for TapQueue {
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn receives(&self) -> bool {
        self.receives
    }

    fn receive(&mut self, into: FrameRoom<'_>) -> io::Result<Option<usize>> {
        if !self.receives {
            return Ok(None);
        }
        let own = (into.own.as_mut_ptr(), into.own.len());
        let header = into.header.as_mut_bytes().as_mut_ptr();
        let count = self.vectors.set(header, into.guest, own)?;
        // SAFETY: header and memory of ours are borrowed for writing, and the guest's memory stays
        // mapped as long as its runs are borrowed; where it is not writable the kernel refuses.
        let got = unsafe { libc::readv(self.fd.as_raw_fd(), self.vectors.0.as_ptr(), count) };
        match usize::try_from(got) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(_) => nothing(io::Error::last_os_error()).map(|()| None),
        }
    }

    fn send(&mut self, header: &FrameHeader, guest: GuestRuns<'_>, own: &[u8]) -> io::Result<bool> {
        let header = header.as_bytes().as_ptr().cast_mut();
        let own = (own.as_ptr().cast_mut(), own.len());
        let count = self.vectors.set(header, guest, own)?;
        // SAFETY: as in `receive`; the kernel only reads.
        let sent = unsafe { libc::writev(self.fd.as_raw_fd(), self.vectors.0.as_ptr(), count) };
        if sent >= 0 {
            return Ok(true);
        }
        nothing(io::Error::last_os_error()).map(|()| false)
    }
}

/// Whether an error only says that there is nothing to be done now.
fn nothing(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert!(is_name("tap0"));
        for name in ["", "a-name-that-is-too-long", "a b", "tap%d", "../x"] {
            assert!(!is_name(name), "{name}");
        }
    }
}
