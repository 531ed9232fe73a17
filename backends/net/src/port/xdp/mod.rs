//! Queues of a NIC, over AF_XDP (`--xdp`): frames come and go without the host's network stack.
//!
//! A program on the interface gives the frames of each queue to its socket
//! ([`ebpf::redirect`](crate::ebpf::redirect)). It is attached by a link, which the kernel takes
//! away when the process ends, however it does; the host's network stack then has the NIC again.
//! While it is there, all frames of the queues go to the guest: the interface is the guest's, with
//! the guest's address. It is put into promiscuous mode for that, as long as the port lives, and
//! its driver is told to leave tags of VLANs in frames.
//!
//! The NIC spreads flows over its queues by itself (RSS) and does not change a flow's queue; they
//! are handed over in user space where they belong elsewhere. Checksums and large segments of the
//! guest are completed and cut here ([`offload`](crate::offload)); towards the guest frames are as
//! they came. A `veth`, which is good for tests, hands over frames whose checksum nobody has
//! completed, unless its peer's offloads are switched off (`ethtool -K PEER tx off`).
//!
//! * [`rings`]: the rings that a socket shares with the kernel.
//! * [`socket`]: a socket, its memory, sending and receiving.
//! * `tags`: VLAN tags stay in received frames.

pub mod rings;
pub mod socket;
mod tags;

use super::host_interface::HostInterface;
use super::{FrameRoom, Offloads, Port, PortQueue};
use crate::bits::FrameHeader;
use crate::ebpf::BpfError;
use crate::ebpf::redirect::{Attachment, Redirect};
use crate::flow::FlowKey;
use crate::pairs::{PairCount, PairId};
use farlane_sys::sync::lock;
use farlane_zero_copy::slices::GuestRuns;
use farlane_zero_copy::topology::{Class, Node, Sysfs};
use socket::{CopyMode, XdpSocket};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tags::Ethtool;
use thiserror::Error;

/// How the NIC's frames are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The best that the driver has.
    #[default]
    Any,
    /// By the driver, copied or not.
    Native,
    /// Before the network stack: with any driver, slowly.
    Generic,
    /// By the driver, copied.
    Copy,
    /// By the driver, not copied.
    ZeroCopy,
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "native" => Self::Native,
            "generic" => Self::Generic,
            "copy" => Self::Copy,
            "zerocopy" => Self::ZeroCopy,
            _ => return Err(format!("{text:?} is not native, generic, copy or zerocopy")),
        })
    }
}

/// Why there is no port.
#[derive(Debug, Error)]
pub enum XdpError {
    /// The system says no.
    #[error("Interface {name}: cannot {what}")]
    System {
        name: String,
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("Interface {name}")]
    Program {
        name: String,
        #[source]
        source: BpfError,
    },
    /// Its driver takes VLAN tags out of received frames: the guest would get them without.
    #[error(
        "Interface {name}: its driver takes VLAN tags out of received frames ({features}) and \
         does not leave them in when it is told to"
    )]
    Tags {
        name: String,
        /// What stays on, as `ethtool -k` and `-K` call it.
        features: String,
        /// Why, where the system says.
        #[source]
        source: Option<io::Error>,
    },
    /// Frames do not fit into a chunk.
    #[error("Interface {name}: an MTU of {mtu} is more than {most}")]
    Mtu { name: String, mtu: u16, most: u16 },
}

pub const MAX_MTU: u16 = 3498;

const _: () = assert!(MAX_MTU as usize + 22 <= socket::MAX_FRAME);

/// `PACKET_MR_PROMISC`, as a request has it.
const PROMISCUOUS: u16 = 1;
const _: () = assert!(PROMISCUOUS as i32 == libc::PACKET_MR_PROMISC);

/// How long a queue is tried for that somebody has.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(10);

/// Takes what may have been a backend's that was killed: the kernel gives a queue back some time
/// after its socket is gone (`xp_release_deferred`), and its successor comes at once.
fn take<T>(mut bind: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let begin = Instant::now();
    loop {
        match bind() {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && begin.elapsed() < PATIENCE => {
                std::thread::sleep(PAUSE);
            }
            result => return result,
        }
    }
}

/// The node of the NIC that an interface is, where the firmware says.
pub fn node_of(sysfs: &Sysfs, interface: &str) -> Option<Node> {
    let functions = sysfs.functions().into_iter();
    let mut nics = functions.filter(|function| function.class == Class::Network);
    nics.find(|nic| nic.names.iter().any(|name| name == interface))?
        .node
}

/// Queues of a NIC.
#[derive(Debug)]
pub struct Xdp {
    /// Its socket keeps it promiscuous.
    interface: HostInterface,
    queues: PairCount,
    mtu: u16,
    hardware: [u8; 6],
    shared: Arc<XdpQueues>,
}

#[derive(Debug)]
struct XdpQueues {
    redirect: Redirect,
    /// Sockets of queues that nobody has open.
    sockets: Vec<Mutex<Option<Box<XdpSocket>>>>,
}

impl Xdp {
    /// Takes the first so many queues of an interface, with memory of `node`, where it is to be of
    /// a certain one.
    pub fn open(
        name: &str,
        queues: PairCount,
        mode: Mode,
        node: Option<Node>,
    ) -> Result<Self, XdpError> {
        let failed = |what: &str| {
            let what = what.to_owned();
            move |source: io::Error| XdpError::System {
                name: name.to_owned(),
                what,
                source,
            }
        };
        let socket = socket::raw_socket(libc::AF_PACKET).map_err(failed("open a socket"))?;
        let interface = HostInterface::new(name, socket);
        let index = interface.ask(libc::SIOCGIFINDEX).map(|a| a.number());
        let index = index.map_err(failed("find it"))?;
        let mtu = interface.mtu().map_err(failed("ask for its MTU"))?;
        if mtu > MAX_MTU {
            return Err(XdpError::Mtu {
                name: name.to_owned(),
                mtu,
                most: MAX_MTU,
            });
        }
        let hardware = interface.address().map_err(failed("ask for its address"))?;
        promiscuous(interface.socket(), index).map_err(failed("make it promiscuous"))?;
        let index = index.cast_unsigned();
        tags::leave(&Ethtool(&interface), name)?;
        let (attachment, copying) = match mode {
            Mode::Any => (Attachment::Any, CopyMode::Any),
            Mode::Native => (Attachment::Native, CopyMode::Any),
            Mode::Generic => (Attachment::Generic, CopyMode::Copy),
            Mode::Copy => (Attachment::Native, CopyMode::Copy),
            Mode::ZeroCopy => (Attachment::Native, CopyMode::Zero),
        };
        let redirect =
            Redirect::new(index, queues, attachment).map_err(|source| XdpError::Program {
                name: name.to_owned(),
                source,
            })?;
        let sockets = queues
            .ids()
            .map(|queue| {
                let socket = take(|| XdpSocket::bind((index, queue), copying, mtu, node))
                    .map_err(failed(&format!("take queue {queue}")))?;
                Ok(Mutex::new(Some(Box::new(socket))))
            })
            .collect::<Result<_, XdpError>>()?;
        Ok(Self {
            interface,
            queues,
            mtu,
            hardware,
            shared: Arc::new(XdpQueues { redirect, sockets }),
        })
    }
}

impl Port for Xdp {
    fn name(&self) -> String {
        self.interface.name().to_owned()
    }

    fn queues(&self) -> PairCount {
        self.queues
    }

    fn offloads(&self) -> Offloads {
        Offloads::ALL
    }

    fn mtu(&self) -> u16 {
        self.mtu
    }

    fn link_is_up(&self) -> bool {
        let flags = self.interface.flags();
        flags.is_ok_and(|flags| flags & libc::IFF_RUNNING != 0)
    }

    /// Frames towards the guest need none of them.
    fn set_guest_offloads(&self, _offloads: Offloads) -> io::Result<()> {
        Ok(())
    }

    fn hardware_address(&self) -> Option<[u8; 6]> {
        Some(self.hardware)
    }

    fn open(&self, queue: PairId) -> io::Result<Box<dyn PortQueue>> {
        let place = self
            .shared
            .sockets
            .get(queue.index())
            .ok_or(io::ErrorKind::NotFound)?;
        let mut socket = lock(place).take().ok_or(io::ErrorKind::ResourceBusy)?;
        socket.discard();
        let opened = XdpQueue {
            queue,
            socket: ManuallyDrop::new(socket),
            shared: Arc::clone(&self.shared),
        };
        self.shared.redirect.set(queue, opened.fd())?;
        Ok(Box::new(opened))
    }

    fn steer(&self, _flow: &FlowKey, _queue: Option<PairId>) -> io::Result<bool> {
        Ok(false)
    }
}

/// A queue that is in use.
struct XdpQueue {
    queue: PairId,
    /// Goes back when this is dropped.
    socket: ManuallyDrop<Box<XdpSocket>>,
    shared: Arc<XdpQueues>,
}

impl PortQueue for XdpQueue {
    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    fn receive(&mut self, into: FrameRoom<'_>) -> io::Result<Option<usize>> {
        self.socket.receive(into)
    }

    fn send(&mut self, header: &FrameHeader, guest: GuestRuns<'_>, own: &[u8]) -> io::Result<bool> {
        let sent = self.socket.send(header, guest, own)?;
        if !sent {
            // What waits goes out, so that there will be room.
            self.socket.flush()?;
        }
        Ok(sent)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

impl Drop for XdpQueue {
    fn drop(&mut self) {
        if let Err(error) = self.shared.redirect.clear(self.queue) {
            log::warn!(
                "Queue {} cannot be given back to the host: {error}",
                self.queue
            );
        }
        // SAFETY: once, and nobody uses it afterwards.
        let socket = unsafe { ManuallyDrop::take(&mut self.socket) };
        if let Some(place) = self.shared.sockets.get(self.queue.index()) {
            *lock(place) = Some(socket);
        }
    }
}

/// Keeps an interface promiscuous as long as the socket lives (`PACKET_MR_PROMISC`).
fn promiscuous(socket: BorrowedFd<'_>, interface: i32) -> io::Result<()> {
    // SAFETY: all zeroes is a request.
    let mut request: libc::packet_mreq = unsafe { std::mem::zeroed() };
    request.mr_ifindex = interface;
    request.mr_type = PROMISCUOUS;
    socket::set_option(
        socket,
        libc::SOL_PACKET,
        libc::PACKET_ADD_MEMBERSHIP,
        &request,
    )
}

#[cfg(test)]
mod tests;
