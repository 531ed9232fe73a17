//! A network of this bench's own: a namespace without a name, in which a backend's tap is the only
//! interface.

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use farlane_vm_front_end::net::{HEADER_BYTES, Header};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use zerocopy::IntoBytes as _;

/// The tap's name.
pub const TAP: &str = "octo0";
/// Frames that a tap keeps.
pub const TAP_FRAMES: u32 = 10_000;
/// Frames of one system call.
const AT_ONCE: usize = 64;

/// Takes the calling thread, and the threads and processes that come from it, into a new network.
/// To be called before there are others: processes are started by a thread that was made before.
pub fn enter() -> Result<()> {
    // SAFETY: only the calling thread gets another network; it shares nothing of that with others.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        let error = std::io::Error::last_os_error();
        return Err(anyhow!(error).context("Cannot make a network (only root can)"));
    }
    // Nothing is sent but what is measured.
    let switch = "/proc/sys/net/ipv6/conf/default/disable_ipv6";
    if std::path::Path::new(switch).exists() {
        std::fs::write(switch, "1").with_context(|| format!("Cannot write {switch}"))?;
    }
    Ok(())
}

/// The name of the tap in a request.
fn named() -> [libc::c_char; libc::IFNAMSIZ] {
    let mut name = [0; libc::IFNAMSIZ];
    for (to, from) in name.iter_mut().zip(TAP.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    name
}

fn address(of: Ipv4Addr) -> libc::sockaddr {
    let address = libc::sockaddr_in {
        sin_family: 2,
        sin_port: 0,
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(of.octets()),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: both are 16 bytes of plain data.
    unsafe { std::mem::transmute(address) }
}

fn call<T>(what: &str, number: libc::Ioctl, argument: &mut T) -> Result<()> {
    let socket = socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // SAFETY: each caller gives the request the structure that it takes.
    if unsafe { libc::ioctl(socket.as_raw_fd(), number, std::ptr::from_mut(argument)) } < 0 {
        let error = std::io::Error::last_os_error();
        return Err(anyhow!(error).context(format!("Cannot {what}")));
    }
    Ok(())
}

/// Gives this end of the tap an address, a neighbour who is the guest, and a long queue; returns
/// its MAC address.
pub fn set_up(own: Ipv4Addr, guest: (Ipv4Addr, [u8; 6])) -> Result<[u8; 6]> {
    let mut request = libc::ifreq {
        ifr_name: named(),
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_addr: address(own),
        },
    };
    call("give the tap an address", libc::SIOCSIFADDR, &mut request)?;
    request.ifr_ifru.ifru_metric = i32::try_from(TAP_FRAMES)?;
    call(
        "give the tap a long queue",
        libc::SIOCSIFTXQLEN,
        &mut request,
    )?;
    call(
        "ask for the tap's address",
        libc::SIOCGIFHWADDR,
        &mut request,
    )?;
    // SAFETY: the call has just written this member.
    let data = unsafe { request.ifr_ifru.ifru_hwaddr }.sa_data;
    let mut mac = [0; 6];
    for (to, from) in mac.iter_mut().zip(data) {
        *to = u8::from_ne_bytes(from.to_ne_bytes());
    }
    let mut hardware = address(Ipv4Addr::UNSPECIFIED);
    hardware.sa_family = libc::ARPHRD_ETHER;
    for (to, from) in hardware.sa_data.iter_mut().zip(guest.1) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let mut neighbour = libc::arpreq {
        arp_pa: address(guest.0),
        arp_ha: hardware,
        arp_flags: libc::ATF_PERM | libc::ATF_COM,
        arp_netmask: address(Ipv4Addr::UNSPECIFIED),
        arp_dev: named(),
    };
    call("tell of the guest", libc::SIOCSARP, &mut neighbour)?;
    Ok(mac)
}

/// Frames that the kernel has taken from the tap so far.
pub fn taken() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev")?;
    let line = text
        .lines()
        .find_map(|line| line.trim().strip_prefix(TAP)?.strip_prefix(':'));
    let mut words = line.context("The tap is gone")?.split_whitespace();
    Ok(words.nth(1).context("No count of frames")?.parse()?)
}

/// Sends frames out of the tap, towards the guest, past the protocols.
pub struct Generator {
    socket: OwnedFd,
}

impl Generator {
    /// One for the tap.
    pub fn new() -> Result<Self> {
        // SAFETY: makes a descriptor, which is owned from here on.
        let socket = unsafe {
            let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
            ensure!(
                fd >= 0,
                "No packet socket: {}",
                std::io::Error::last_os_error()
            );
            OwnedFd::from_raw_fd(fd)
        };
        let generator = Self { socket };
        generator.option(libc::PACKET_VNET_HDR)?;
        generator.option(libc::PACKET_QDISC_BYPASS)?;
        let mut request = libc::ifreq {
            ifr_name: named(),
            ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_ifindex: 0 },
        };
        call("ask for the tap's number", libc::SIOCGIFINDEX, &mut request)?;
        let mut link = libc::sockaddr_ll {
            sll_family: u16::try_from(libc::AF_PACKET)?,
            sll_protocol: 0,
            // SAFETY: the call has just written this member.
            sll_ifindex: unsafe { request.ifr_ifru.ifru_ifindex },
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let bytes = libc::socklen_t::try_from(size_of_val(&link))?;
        let fd = generator.socket.as_raw_fd();
        // SAFETY: the address has the size that is said.
        if unsafe { libc::bind(fd, std::ptr::from_mut(&mut link).cast(), bytes) } != 0 {
            bail!(
                "Cannot bind to the tap: {}",
                std::io::Error::last_os_error()
            );
        }
        Ok(generator)
    }

    fn option(&self, option: libc::c_int) -> Result<()> {
        let one: libc::c_int = 1;
        // SAFETY: the option takes an integer.
        let rc = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                option,
                std::ptr::from_ref(&one).cast(),
                4,
            )
        };
        ensure!(
            rc == 0,
            "Packet socket: {}",
            std::io::Error::last_os_error()
        );
        Ok(())
    }

    /// Sends one frame `count` times, as fast as it goes; returns how many went out.
    pub fn send(&self, header: &Header, frame: &[u8], count: usize) -> Result<usize> {
        // This socket's header is the short one, without the number of buffers.
        let short = header
            .as_bytes()
            .get(..HEADER_BYTES - 2)
            .unwrap_or_default();
        let mut parts = [
            libc::iovec {
                iov_base: short.as_ptr().cast_mut().cast(),
                iov_len: short.len(),
            },
            libc::iovec {
                iov_base: frame.as_ptr().cast_mut().cast(),
                iov_len: frame.len(),
            },
        ];
        // SAFETY: all zeroes is an empty message.
        let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
        message.msg_hdr.msg_iov = parts.as_mut_ptr();
        message.msg_hdr.msg_iovlen = parts.len();
        let mut messages = [message; AT_ONCE];
        let mut sent = 0;
        while sent < count {
            let now = u32::try_from(AT_ONCE.min(count - sent))?;
            // SAFETY: the messages and what they point at live throughout the call, which only
            // reads frames.
            let done =
                unsafe { libc::sendmmsg(self.socket.as_raw_fd(), messages.as_mut_ptr(), now, 0) };
            match usize::try_from(done) {
                Ok(done) => sent += done,
                // The tap is full.
                Err(_) if std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOBUFS) => {
                    return Ok(sent);
                }
                Err(_) => bail!("Cannot send: {}", std::io::Error::last_os_error()),
            }
        }
        Ok(sent)
    }
}
