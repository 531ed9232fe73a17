//! A client that checks nothing of what it sends and everything of what it receives.

use farlane_abi::width::size_u32;
use farlane_vfio_user::wire::{self, Command, HEADER_BYTES, Header};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// How long a server may take for a message.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Descriptors that are taken with one message.
const MAX_FDS: usize = 64;
/// Longest message that is taken.
const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// What a client like QEMU says of itself.
pub const CAPABILITIES: &str = concat!(
    r#"{"capabilities":{"migration":{"pgsize":4096,"max_bitmap_size":268435456},"#,
    r#""max_msg_fds":16,"max_data_xfer_size":1048576,"pgsizes":4096,"#,
    r#""max_dma_maps":65535,"write_multiple":true}}"#
);

/// Why there is no answer.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The server has closed the connection.
    #[error("The server has closed the connection")]
    Closed,
    /// It has answered by an error.
    #[error("The server refuses: {0}")]
    Refused(Errno),
    /// It has answered something that the protocol does not allow.
    #[error("Malformed answer: {0}")]
    Malformed(String),
    /// The system failed, or the server does not answer.
    #[error("The socket failed")]
    Io(#[source] std::io::Error),
}

impl From<std::io::Error> for ClientError {
    fn from(error: std::io::Error) -> Self {
        use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match error.kind() {
            BrokenPipe | ConnectionReset | UnexpectedEof => Self::Closed,
            _ => Self::Io(error),
        }
    }
}

impl From<Errno> for ClientError {
    fn from(error: Errno) -> Self {
        std::io::Error::from(error).into()
    }
}

/// A message of the server.
#[derive(Debug)]
pub struct Message {
    /// Its header.
    pub header: Header,
    /// What follows.
    pub body: Vec<u8>,
    /// Descriptors that came with it.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// Whether it is a reply.
    #[must_use]
    pub fn is_reply(&self) -> bool {
        self.header.flags & wire::FLAGS_TYPE == wire::TYPE_REPLY
    }

    /// The error that it carries.
    #[must_use]
    pub fn error(&self) -> Option<Errno> {
        let raw = i32::try_from(self.header.error).unwrap_or(0);
        (self.header.flags & wire::FLAG_ERROR != 0).then(|| Errno::from_raw_os_error(raw))
    }

    /// A structure at the beginning of the body, and what follows it.
    ///
    /// # Errors
    /// It is shorter.
    pub fn split<T: FromBytes + Immutable + KnownLayout>(&self) -> Result<(T, &[u8]), ClientError> {
        T::read_from_prefix(&self.body)
            .map_err(|_| ClientError::Malformed(format!("{} bytes", self.body.len())))
    }
}

/// One end of a connection to a server.
#[derive(Debug)]
pub struct RawClient {
    socket: UnixStream,
    next_id: u16,
}

impl RawClient {
    /// Connects, and says nothing.
    ///
    /// # Errors
    /// Nobody listens there.
    pub fn connect(path: &Path) -> std::io::Result<Self> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { socket, next_id: 1 })
    }

    /// Connects and agrees on the version.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn negotiated(path: &Path) -> Result<Self, ClientError> {
        let mut client = Self::connect(path)?;
        client.negotiate(CAPABILITIES)?;
        Ok(client)
    }

    /// Proposes version 0.0 as QEMU does, and returns what the server says of itself.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn negotiate(&mut self, capabilities: &str) -> Result<String, ClientError> {
        let mut body = vec![0; size_of::<wire::Version>()];
        body.extend_from_slice(capabilities.as_bytes());
        body.push(0);
        let reply = self.call(Command::Version, &body, &[])?;
        let (version, text) = reply.split::<wire::Version>()?;
        if (version.major, version.minor) != (0, 0) || text.last() != Some(&0) {
            return Err(ClientError::Malformed(format!("{version:?}, {text:?}")));
        }
        Ok(String::from_utf8_lossy(&text[..text.len() - 1]).into_owned())
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Sends bytes, the descriptors with the first of them.
    ///
    /// # Errors
    /// The server has gone, or does not take them.
    pub fn send_bytes(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        let mut sent = 0;
        while sent < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(255))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(Errno::TOOBIG.into());
            }
            let rest = [IoSlice::new(&bytes[sent..])];
            match sendmsg(&self.socket, &rest, &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends a message whose header says what it is told to.
    ///
    /// # Errors
    /// As [`send_bytes`](Self::send_bytes).
    pub fn send(
        &mut self,
        header: &Header,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        self.send_bytes(&[header.as_bytes(), body].concat(), fds)
    }

    /// Sends a command with these flags, and returns its number.
    ///
    /// # Errors
    /// As [`send_bytes`](Self::send_bytes).
    pub fn command(
        &mut self,
        command: Command,
        flags: u32,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<u16, ClientError> {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let header = Header {
            id,
            command: command.to_wire(),
            size: u32::try_from(HEADER_BYTES + body.len()).unwrap_or(u32::MAX),
            flags,
            error: 0,
        };
        self.send(&header, body, fds)?;
        Ok(id)
    }

    /// Waits for the next message.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn receive(&mut self) -> Result<Message, ClientError> {
        let mut bytes = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
        let got = recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            flags,
        )?;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if got.bytes == 0 {
            return Err(ClientError::Closed);
        }
        let header = Header::read_from_bytes(&bytes[..got.bytes])
            .map_err(|_| ClientError::Malformed(format!("a header of {} bytes", got.bytes)))?;
        let length = crate::to_usize(header.size);
        if !(HEADER_BYTES..=MAX_MESSAGE_BYTES).contains(&length) {
            return Err(ClientError::Malformed(format!("{header:?}")));
        }
        let mut body = vec![0; length - HEADER_BYTES];
        (&self.socket).read_exact(&mut body)?;
        Ok(Message { header, body, fds })
    }

    /// Waits for the reply to a command. Other messages are dropped.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn reply(&mut self, command: Command, id: u16) -> Result<Message, ClientError> {
        loop {
            let message = self.receive()?;
            if !message.is_reply() || message.header.id != id {
                continue;
            }
            if message.header.command != command.to_wire() {
                return Err(ClientError::Malformed(format!("{:?}", message.header)));
            }
            return match message.error() {
                Some(_) if !message.body.is_empty() || !message.fds.is_empty() => {
                    Err(ClientError::Malformed("an error with data".into()))
                }
                Some(error) => Err(ClientError::Refused(error)),
                None => Ok(message),
            };
        }
    }

    /// Sends a command and waits for the reply.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn call(
        &mut self,
        command: Command,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Message, ClientError> {
        let id = self.command(command, wire::TYPE_COMMAND, body, fds)?;
        self.reply(command, id)
    }

    /// `VFIO_USER_DEVICE_GET_INFO`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn device_info(&mut self) -> Result<wire::DeviceInfo, ClientError> {
        let ask = wire::DeviceInfo {
            argsz: size_u32::<wire::DeviceInfo>(),
            ..Default::default()
        };
        let reply = self.call(Command::DeviceGetInfo, ask.as_bytes(), &[])?;
        Ok(reply.split::<wire::DeviceInfo>()?.0)
    }

    /// `VFIO_USER_DEVICE_GET_REGION_INFO` with room for so many bytes.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn region_info(&mut self, index: u32, argsz: u32) -> Result<Message, ClientError> {
        let ask = wire::RegionInfo {
            argsz,
            index,
            ..Default::default()
        };
        self.call(Command::DeviceGetRegionInfo, ask.as_bytes(), &[])
    }

    /// `VFIO_USER_DMA_MAP`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn map(
        &mut self,
        address: u64,
        length: u64,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<(), ClientError> {
        let map = wire::DmaMap {
            argsz: size_u32::<wire::DmaMap>(),
            flags: wire::DMA_READ | wire::DMA_WRITE,
            offset: file.map_or(0, |(_, offset)| offset),
            address,
            size: length,
        };
        let fds: Vec<_> = file.iter().map(|(fd, _)| *fd).collect();
        self.call(Command::DmaMap, map.as_bytes(), &fds)?;
        Ok(())
    }

    /// `VFIO_USER_DMA_UNMAP`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn unmap(&mut self, flags: u32, address: u64, length: u64) -> Result<(), ClientError> {
        let unmap = wire::DmaUnmap {
            argsz: size_u32::<wire::DmaUnmap>(),
            flags,
            address,
            size: length,
        };
        let reply = self.call(Command::DmaUnmap, unmap.as_bytes(), &[])?;
        if reply.body == unmap.as_bytes() {
            Ok(())
        } else {
            Err(ClientError::Malformed(format!("{:?}", reply.body)))
        }
    }

    /// `VFIO_USER_REGION_READ`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn read(&mut self, region: u32, offset: u64, count: u32) -> Result<Vec<u8>, ClientError> {
        let access = wire::RegionAccess {
            offset,
            region,
            count,
        };
        let reply = self.call(Command::RegionRead, access.as_bytes(), &[])?;
        match reply.body.strip_prefix(access.as_bytes()) {
            Some(data) if u32::try_from(data.len()) == Ok(count) => Ok(data.to_vec()),
            _ => Err(ClientError::Malformed(format!("{:?}", reply.body))),
        }
    }

    /// `VFIO_USER_REGION_WRITE`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let access = wire::RegionAccess {
            offset,
            region,
            count: u32::try_from(data.len()).unwrap_or(u32::MAX),
        };
        let body = [access.as_bytes(), data].concat();
        let reply = self.call(Command::RegionWrite, &body, &[])?;
        if reply.body == access.as_bytes() {
            Ok(())
        } else {
            Err(ClientError::Malformed(format!("{:?}", reply.body)))
        }
    }

    /// `VFIO_USER_DEVICE_SET_IRQS`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn set_irqs(
        &mut self,
        flags: u32,
        (index, start, count): (u32, u32, u32),
        data: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let body_bytes = u32::try_from(data.len()).map_err(std::io::Error::other)?;
        let set = wire::IrqSet {
            argsz: size_u32::<wire::IrqSet>() + body_bytes,
            flags,
            index,
            start,
            count,
        };
        let body = [set.as_bytes(), data].concat();
        self.call(Command::DeviceSetIrqs, &body, fds)?;
        Ok(())
    }
}
