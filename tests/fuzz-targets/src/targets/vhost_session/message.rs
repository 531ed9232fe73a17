//! Messages of a VMM, right or wrong, and the descriptors that it sends.

use super::{QUEUES, SIZE};
use crate::{Input, Ram};
use farlane_vhost_user::inflight::make;
use rustix::event::EventfdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg,
    sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

/// Bytes of a message's header.
const HEADER: usize = 12;
const VERSION: u32 = 1;
const REPLY: u32 = 4;
pub const NEED_REPLY: u32 = 8;

/// Requests (vhost-user, "Front-end message types").
pub mod request {
    pub const SET_FEATURES: u32 = 2;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const GET_SHMEM_CONFIG: u32 = 44;
}

/// A message's body, and its descriptors.
#[derive(Default)]
pub struct Message {
    pub request: u32,
    pub body: Vec<u8>,
    files: Vec<OwnedFd>,
}

impl Message {
    pub fn new(request: u32) -> Self {
        Self {
            request,
            ..Self::default()
        }
    }

    pub fn word(mut self, word: u32) -> Self {
        self.body.extend(word.to_ne_bytes());
        self
    }

    pub fn long(mut self, long: u64) -> Self {
        self.body.extend(long.to_ne_bytes());
        self
    }

    pub fn file(mut self, file: OwnedFd) -> Self {
        self.files.push(file);
        self
    }

    /// A region of memory, as the guest's first `pages` pages or so.
    pub fn region(self, [guest, bytes, user, offset]: [u64; 4]) -> Self {
        self.long(guest).long(bytes).long(user).long(offset)
    }

    /// Sends it. The size in the header is wrong by `lie`: then it is the last message.
    pub fn send(&self, vmm: &UnixStream, flags: u32, lie: u32) {
        let bytes = u32::try_from(self.body.len()).expect("a short body");
        let header = [self.request, VERSION | flags, bytes.wrapping_add(lie)];
        let mut all: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
        all.extend(&self.body);
        let files: Vec<_> = self.files.iter().map(|file| file.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let sent = sendmsg(
            vmm,
            &[IoSlice::new(&all)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        assert_eq!(sent.expect("room in a socket"), all.len());
        if lie != 0 {
            // Nobody waits for more.
            vmm.shutdown(Shutdown::Write).expect("a socket");
        }
    }

    /// Reads what the backend has answered: at most one reply, to this message.
    pub fn check_answer(&self, vmm: &UnixStream) {
        let mut bytes = vec![0; 1 << 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let Ok(got) = recvmsg(vmm, parts, &mut control, flags) else {
            return;
        };
        if got.bytes == 0 {
            return;
        }
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four"));
        assert!(got.bytes >= HEADER);
        assert_eq!(word(0), self.request);
        assert_eq!(word(4) & 7, VERSION | REPLY);
        assert_eq!(word(8) as usize, got.bytes - HEADER);
    }
}

/// What a VMM sends descriptors of.
pub struct Files {
    pub ram: OwnedFd,
    short: OwnedFd,
    pub event: OwnedFd,
    /// Its counter is at its limit.
    full: OwnedFd,
    pub inflight: OwnedFd,
    other: OwnedFd,
}

impl Files {
    pub fn new(ram: &Ram) -> Self {
        let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let full = eventfd();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).expect("room");
        Self {
            ram: ram.file().try_clone().expect("a descriptor").into(),
            short: Ram::new(1).file().try_clone().expect("a descriptor").into(),
            event: eventfd(),
            full,
            inflight: make(QUEUES, SIZE).expect("a memfd"),
            other: UnixStream::pair().expect("a socket").0.into(),
        }
    }

    pub fn pick(&self, usual: &OwnedFd, input: &mut Input<'_>) -> OwnedFd {
        let chosen = match input.u8() {
            0xff => &self.other,
            0xfe => &self.short,
            0xfd => &self.event,
            0xfc => &self.ram,
            0xfb => &self.full,
            0xfa => &self.inflight,
            _ => usual,
        };
        chosen.try_clone().expect("a descriptor")
    }
}
