//! Address tunnelling (spin-atc17, section 5.1): direct I/O into phony memory, of which the backend
//! of the disk makes I/O into device memory. What the bytes between the two mean is in
//! [`farlane_abi::tunnel`].
//!
//! **What is trusted.** A page that is sent as an envelope and that the backend does not open would
//! be what is on the disk. So tunnelled writes are made only where nothing but disks of the backend
//! lies beneath the file system ([`crate::disks`]), after a read of the same file system has
//! arrived, inside the file's size, and with `RWF_NOWAIT`, which ext4 and xfs refuse where they
//! would go through the page cache instead. Each sector without a receipt is written again at once,
//! and so are all where the layers beneath the file system have changed meanwhile.

mod client;
mod phony;
mod slots;
#[cfg(test)]
mod tests;

use crate::disks::DiskStack;
use crate::files::OpenFile;
use crate::provider::Provider;
use crate::sys::{self, Direction};
use crate::{fork, log, plain};
use client::Tunnel;
use farlane_abi::PAGE_BYTES;
use farlane_sys::chain;
use farlane_transport::{Pin, PinKind};
use phony::PhonyBuffer;
use rustix::io::Errno;
use slots::TokenSet;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(crate) use client::TUNNELS;

/// How often a write is tried: each time what it could have waited for has been done before. That
/// includes the file's modification time, which is due again with the next tick of the kernel's
/// clock: on a machine with other things to do some ticks are missed.
const TRIES: usize = 12;
/// In how many of them pages of its range are dropped from the page cache first.
const DROPS: usize = 4;
/// How far around a range pages are dropped where its own pages could not be: they may be parts of
/// larger ones.
const AROUND: u64 = 2 << 20;

/// The part of a region that tunnels reach.
#[derive(Debug)]
pub struct PinnedDevice {
    /// Address of the first byte.
    start: usize,
    /// Length in bytes.
    length: usize,
    tunnels: Vec<(Arc<Tunnel>, Pin)>,
}

/// Bytes that a transfer has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferReceipt {
    /// Bytes of the request that are where they belong.
    pub bytes: usize,
    /// Of them, those that went past the guest's memory.
    pub landed: usize,
}

/// Makes tunnels to device memory, if there are any to be had and the kernel says that it is some;
/// none to what a handler of a fork registers.
pub(crate) fn pin_device(address: usize, length: usize) -> Option<PinnedDevice> {
    let page = sys::page_bytes();
    if page as u64 != PAGE_BYTES || fork::has_locks() {
        return None;
    }
    let start = address.checked_next_multiple_of(page)?;
    let end = address.checked_add(length)? / page * page;
    let length = end.checked_sub(start).filter(|length| *length > 0)?;
    let tunnels: Vec<_> = client::tunnels()
        .into_iter()
        .filter_map(|tunnel| {
            // SAFETY: the program has registered it as memory that file contents are read to.
            let pin = unsafe { Pin::new(tunnel.transport(), PinKind::Device, start, length, true) };
            match pin {
                Ok(pin) => Some((tunnel, pin)),
                Err(error) => {
                    log::once(&format!(
                        "There is no tunnel to device memory: {}",
                        chain(&error)
                    ));
                    None
                }
            }
        })
        .collect();
    (!tunnels.is_empty()).then_some(PinnedDevice {
        start,
        length,
        tunnels,
    })
}

impl PinnedDevice {
    fn tunnel(&self, beneath: &DiskStack) -> Option<&(Arc<Tunnel>, Pin)> {
        let serials = beneath.stack.serials.as_ref()?;
        let mut tunnels = self.tunnels.iter();
        tunnels.find(|(tunnel, _)| tunnel.is_usable() && tunnel.has_all(serials))
    }

    /// Whether a tunnel leads from the file to this memory.
    pub(crate) fn serves(&self, opened: &OpenFile, direction: Direction) -> bool {
        let file = &opened.file;
        if file.offset_align.is_none() || file.tunnel_off.load(Ordering::Relaxed) {
            return false;
        }
        let beneath = file.disk.stack.now();
        let proven = direction == Direction::Read || beneath.tunnel_proven.load(Ordering::Relaxed);
        proven && self.tunnel(&beneath).is_some()
    }

    /// What of `length` bytes at `address` tunnels reach, as offsets.
    pub(crate) fn part(&self, address: usize, length: usize) -> Range<usize> {
        let start = self.start.saturating_sub(address).min(length);
        let end = (self.start + self.length)
            .saturating_sub(address)
            .min(length);
        start..end.max(start)
    }
}

/// Moves as much as it can of a request that is aligned to pages in the file; its buffer lies where
/// [`PinnedDevice::part`] says.
///
/// # Errors
/// When nothing was moved: the caller goes another way.
pub(crate) fn transfer(
    opened: &OpenFile,
    pinned: &PinnedDevice,
    provider: &dyn Provider,
    direction: Direction,
    (address, length): (usize, usize),
    offset: u64,
) -> Result<TransferReceipt, Errno> {
    let beneath = opened.file.disk.stack.now();
    let (tunnel, pin) = pinned.tunnel(&beneath).ok_or(Errno::NODEV)?;
    let mut moved = TransferReceipt::default();
    while moved.bytes < length {
        let left = length - moved.bytes;
        let lent = tunnel
            .phony()
            .lend(tunnel.transport(), left)
            .ok_or(Errno::NOMEM)?;
        let part = PhonyRequest {
            opened,
            beneath: &beneath,
            tunnel,
            region: pin.region(),
            provider,
            address: address + moved.bytes,
            target: (address + moved.bytes - pinned.start) as u64,
            length: left.min(lent.length()),
            offset: offset + moved.bytes as u64,
        };
        let result = match direction {
            Direction::Read => part.read(&lent),
            Direction::Write => part.write(&lent),
        };
        match result {
            Ok(more) => {
                moved.bytes += more.bytes;
                moved.landed += more.landed;
                if more.bytes < part.length {
                    break;
                }
            }
            Err(_) if moved.bytes > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(moved)
}

/// As much of a request as goes into one phony buffer.
struct PhonyRequest<'a> {
    opened: &'a OpenFile,
    /// What lay beneath the file when the tunnel was chosen.
    beneath: &'a Arc<DiskStack>,
    tunnel: &'a Tunnel,
    region: u32,
    provider: &'a dyn Provider,
    address: usize,
    /// Offset of the first byte in the pinned region.
    target: u64,
    length: usize,
    offset: u64,
}

impl PhonyRequest<'_> {
    fn arm(&self, lent: &PhonyBuffer<'_>, direction: Direction) -> Result<TokenSet<'_>, Errno> {
        let slots = self.tunnel.slots();
        slots.arm(lent, self.region, self.target, self.length, direction)
    }

    fn read(&self, lent: &PhonyBuffer<'_>) -> Result<TransferReceipt, Errno> {
        let direct = self.opened.direct()?;
        let armed = self.arm(lent, Direction::Read)?;
        // SAFETY: our own phony memory.
        let bytes = unsafe {
            sys::transfer(
                Direction::Read,
                direct.number(),
                lent.base(),
                self.length,
                self.offset,
            )
        }?;
        if !self.is_over_the_same() {
            // What has arrived may be what a layer was to change first.
            return Err(Errno::STALE);
        }
        let runs = armed.runs(bytes);
        let mut others = runs.iter().filter(|sectors| !sectors.landed);
        if others.any(|sectors| armed.has_envelope(lent, sectors)) {
            // What was read is not in this page, and nobody tells where it is: a device that was
            // reset meanwhile writes no receipts.
            return Err(Errno::STALE);
        }
        let mut landed = 0;
        for sectors in runs {
            if sectors.landed {
                landed += sectors.range.len();
                continue;
            }
            // They came another way: from a hole of the file, or through the page cache.
            let from = lent.bytes(&sectors.range);
            // SAFETY: registered memory.
            unsafe {
                self.provider
                    .copy_in(self.address + sectors.range.start, from)
            }?;
        }
        let file = &self.opened.file;
        let proven = &self.beneath.tunnel_proven;
        if landed > 0 {
            proven.store(true, Ordering::Relaxed);
        } else if bytes > 0 && !proven.load(Ordering::Relaxed) {
            file.tunnel_off.store(true, Ordering::Relaxed);
        }
        Ok(TransferReceipt { bytes, landed })
    }

    fn write(&self, lent: &PhonyBuffer<'_>) -> Result<TransferReceipt, Errno> {
        let direct = self.opened.direct()?;
        let armed = self.arm(lent, Direction::Write)?;
        let mut bytes = Err(Errno::AGAIN);
        for attempt in 0..TRIES {
            let (length, offset) = (self.length, self.offset);
            // SAFETY: our own phony memory.
            bytes = unsafe {
                sys::pwrite_with(
                    direct.number(),
                    lent.base(),
                    length,
                    offset,
                    libc::RWF_NOWAIT,
                )
            };
            // What has moved has used its token up: another attempt would be refused by the disk.
            if bytes != Err(Errno::AGAIN) || self.has_landed(&armed) {
                break;
            }
            match attempt {
                0 => self.make_way(direct.number(), 0),
                _ if attempt < DROPS => self.make_way(direct.number(), AROUND),
                _ => sys::modify(direct.number(), offset),
            }
        }
        if bytes.is_err() && self.has_landed(&armed) {
            // Up to something that cannot be written at once, such as a hole. What was only
            // allocated before stays so (fs/ext4/file.c: `ext4_dio_write_end_io`), though the bytes
            // are there: all of it is written again.
            self.write_out(direct.number(), &(0..self.length))?;
            return Ok(TransferReceipt {
                bytes: self.length,
                landed: 0,
            });
        }
        let bytes = bytes?;
        // Through layers that have come meanwhile it may have gone elsewhere, too.
        let same = self.is_over_the_same();
        let mut landed = 0;
        for sectors in armed.runs(bytes) {
            if sectors.landed && same {
                landed += sectors.range.len();
            } else {
                self.write_again(direct.number(), &sectors.range)?;
            }
        }
        Ok(TransferReceipt { bytes, landed })
    }

    fn has_landed(&self, armed: &TokenSet<'_>) -> bool {
        armed.runs(self.length).iter().any(|run| run.landed)
    }

    /// Whether beneath the file lies what lay there when the tunnel was chosen.
    fn is_over_the_same(&self) -> bool {
        Arc::ptr_eq(self.beneath, &self.opened.file.disk.stack.now())
    }

    /// Removes what keeps a write from being made at once: pages of the range in the page cache, or
    /// parts of larger ones that reach `around` bytes beyond it; a modification time that is due;
    /// and that the file system does not know yet that the file has no rights to be taken away
    /// (ext4 forgets it with the inode, and then writes in turn). `own` is the library's
    /// descriptor: what could not be written back the kernel tells once for each time that the file
    /// was opened, and through its own one the program is to be told.
    fn make_way(&self, own: RawFd, around: u64) {
        let end = self.offset + self.length as u64;
        let start = self.offset.saturating_sub(around);
        let length = end.saturating_add(around) - start;
        let _ = sys::write_back(own, start, length);
        let _ = sys::advise(own, start, length, libc::POSIX_FADV_DONTNEED);
        sys::modify(own, self.offset);
    }

    /// Envelopes of these sectors may be on the disk: puts the bytes in their place, there too,
    /// before anything else. `own` is as in [`make_way`](Self::make_way).
    fn write_again(&self, own: RawFd, range: &Range<usize>) -> Result<(), Errno> {
        self.opened.file.tunnel_off.store(true, Ordering::Relaxed);
        let (major, minor) = self.opened.file.id.device_number();
        log::once(&format!(
            "A tunnelled write of file {} on device {major}:{minor} went another way: no more of \
             them for this file",
            self.opened.file.id.inode,
        ));
        self.write_out(own, range)
    }

    /// Writes a part the plain way, to the disk. `own` is as in [`make_way`](Self::make_way).
    fn write_out(&self, own: RawFd, range: &Range<usize>) -> Result<(), Errno> {
        let offset = self.offset + range.start as u64;
        let mut done = 0;
        while done < range.len() {
            let rest = (self.address + range.start + done, range.len() - done);
            let at = offset + done as u64;
            match plain::transfer(self.opened, self.provider, Direction::Write, rest, at)? {
                0 => return Err(Errno::IO),
                moved => done += moved,
            }
        }
        sys::write_back(own, offset, range.len() as u64)
    }
}
