//! An interface of the host, and the `ioctl` requests about one (netdevice(7)).

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

/// An interface of the host, by its name.
#[derive(Debug)]
pub(crate) struct HostInterface {
    name: String,
    /// Any socket: requests are about the interface that they name.
    socket: OwnedFd,
}

impl HostInterface {
    pub fn new(name: &str, socket: OwnedFd) -> Self {
        let name = name.to_owned();
        Self { name, socket }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub fn ask(&self, request: libc::Ioctl) -> io::Result<InterfaceRequest> {
        let mut answer = InterfaceRequest::new(&self.name)?;
        answer.call(self.socket(), request)?;
        Ok(answer)
    }

    /// Bytes of payload of the largest frame.
    pub fn mtu(&self) -> io::Result<u16> {
        let mtu = self.ask(libc::SIOCGIFMTU)?.number();
        let invalid = |_| io::Error::new(io::ErrorKind::InvalidData, format!("It is {mtu}"));
        u16::try_from(mtu).map_err(invalid)
    }

    pub fn set_mtu(&self, mtu: u16) -> io::Result<()> {
        let mut request = InterfaceRequest::new(&self.name)?;
        request.value[..4].copy_from_slice(&i32::from(mtu).to_ne_bytes());
        request.call(self.socket(), libc::SIOCSIFMTU)
    }

    pub fn address(&self) -> io::Result<[u8; 6]> {
        // A `sockaddr`: the address lies behind its family.
        let [_, _, a, b, c, d, e, f, ..] = self.ask(libc::SIOCGIFHWADDR)?.value;
        Ok([a, b, c, d, e, f])
    }

    /// `SIOCETHTOOL` with a command and its words, which the answer replaces.
    ///
    /// # Safety
    /// The words are a command's structure, with as much room as the kernel writes for it.
    pub unsafe fn ethtool(&self, words: &mut [u32]) -> io::Result<()> {
        let mut request = InterfaceRequest::new(&self.name)?;
        let address = words.as_mut_ptr().expose_provenance();
        let (place, _) = request.value.split_at_mut(size_of_val(&address));
        place.copy_from_slice(&address.to_ne_bytes());
        request.call(self.socket(), libc::SIOCETHTOOL)
    }

    /// `IFF_UP` and others.
    pub fn flags(&self) -> io::Result<i32> {
        Ok(self.ask(libc::SIOCGIFFLAGS)?.flags())
    }

    pub fn bring_up(&self) -> io::Result<()> {
        let flags = self.flags()? | libc::IFF_UP;
        let mut request = InterfaceRequest::new(&self.name)?.with_flags(flags);
        request.call(self.socket(), libc::SIOCSIFFLAGS)
    }
}

/// `struct ifreq`.
#[repr(C)]
pub(crate) struct InterfaceRequest {
    name: [u8; libc::IFNAMSIZ],
    /// Flags or a number in the first bytes, or an address.
    value: [u8; 24],
}

impl InterfaceRequest {
    /// A request about no interface.
    pub const UNNAMED: Self = Self {
        name: [0; libc::IFNAMSIZ],
        value: [0; 24],
    };

    /// A request about the interface of this name.
    pub fn new(name: &str) -> io::Result<Self> {
        let mut request = Self::UNNAMED;
        // The last byte stays zero.
        if name.is_empty() || name.len() >= libc::IFNAMSIZ {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (to, from) in request.name.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        Ok(request)
    }

    pub fn with_flags(mut self, flags: i32) -> Self {
        let [low, high, ..] = flags.to_ne_bytes();
        self.value[..2].copy_from_slice(&[low, high]);
        self
    }

    pub fn flags(&self) -> i32 {
        i32::from(u16::from_ne_bytes([self.value[0], self.value[1]]))
    }

    pub fn number(&self) -> i32 {
        let [a, b, c, d, ..] = self.value;
        i32::from_ne_bytes([a, b, c, d])
    }

    /// Does a request of netdevice(7) or of `linux/if_tun.h` that takes a `struct ifreq` and
    /// answers in it.
    pub fn call(&mut self, fd: BorrowedFd<'_>, request: libc::Ioctl) -> io::Result<()> {
        // SAFETY: this is an ifreq, and lives throughout the call. An address in it is
        // `ethtool`'s, whose caller vouches for what is there.
        checked(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut *self) })
    }
}

/// Does a request that reads a number at an address.
pub(crate) fn call_with_number(
    fd: BorrowedFd<'_>,
    request: libc::Ioctl,
    number: i32,
) -> io::Result<()> {
    // SAFETY: the number lives throughout the call.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw const number) })
}

/// Does a request whose argument is a number itself.
pub(crate) fn call_by_value(
    fd: BorrowedFd<'_>,
    request: libc::Ioctl,
    number: libc::c_ulong,
) -> io::Result<()> {
    // SAFETY: there is no address.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request, number) })
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
