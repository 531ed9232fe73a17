//! What a process has that has opened its context: its regions, files and buffers.

use super::connection::Seat;
use super::events::ProcessEvents;
use super::sharing::Job;
use super::{HostState, Sender, file};
use farlane_abi::Errno;
use farlane_abi::arena::OFF_OWNER;
use farlane_abi::control::MAX_REGIONS;
use farlane_abi::ids::RegionId;
use farlane_guest_device::control::{MAX_MAPPINGS, region_errno};
use farlane_guest_device::request::{Kind, NewRegion, WindowRange};
use farlane_rdma_remoting::{BufferMapping, Context, Doorbell, Resource, Share};
use farlane_zero_copy::{Process, Region, SharedMemory};
use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

/// Bytes that are looked at there: a word, and what fills the granule of shared memory.
const OWNER_BYTES: usize = 8;

pub(super) struct Open {
    pub(super) context: Arc<Context>,
    pub(super) events: Arc<ProcessEvents>,
    pub(super) _doorbell: Doorbell,
    /// The files of regions' memory: closing the last descriptor of one may take long.
    pub(super) backings: HashMap<RegionId, Vec<Backing>>,
    /// Files that it has shown.
    pub(super) files: HashMap<RegionId, (OwnedFd, Share)>,
    /// Number of attached regions.
    pub(super) regions: u32,
    /// Number of mapped buffers.
    pub(super) mappings: u32,
}

/// A further descriptor of a file of memory.
pub(crate) struct Backing {
    _file: OwnedFd,
    _share: Share,
}

/// What a request is answered with.
#[derive(Default)]
pub(super) struct Answer {
    pub(super) value: u64,
    pub(super) buffer: Option<BufferMapping>,
}

impl Seat {
    /// Another descriptor of a file of memory, which is to be closed by another thread. However
    /// many wait for that, its process is heard: the share of descriptors bounds them.
    fn keep(&self, file: &OwnedFd) -> Result<Backing, Errno> {
        let share = self.party.take(Resource::Descriptors, 1);
        Ok(Backing {
            _share: share.ok_or(Errno::ENOMEM)?,
            _file: file.try_clone().map_err(|_| Errno::ENOMEM)?,
        })
    }

    /// The same of several, which are closed by another thread where that fails.
    fn keep_all(
        &self,
        host: &HostState,
        sender: Sender,
        files: &mut Vec<OwnedFd>,
    ) -> Result<Vec<Backing>, Errno> {
        let backings: Result<Vec<_>, _> = files.iter().map(|file| self.keep(file)).collect();
        backings.inspect_err(|_| host.closing.close(sender, std::mem::take(files), ()))
    }
}

impl Open {
    /// Makes a region of files, each of which is closed by another thread, after all others of it
    /// here.
    pub(super) fn attach_with(
        &mut self,
        host: &HostState,
        seat: &Seat,
        sender: Sender,
        region: RegionId,
        mut files: Vec<OwnedFd>,
        make: impl FnOnce(&mut Self, Vec<OwnedFd>) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let backings = seat.keep_all(host, sender, &mut files)?;
        let made = make(self, files);
        self.keep(host, region, backings, made)
    }

    /// Keeps the files of a region's memory, where that was made.
    pub(super) fn keep(
        &mut self,
        host: &HostState,
        region: RegionId,
        backings: Vec<Backing>,
        made: Result<(), Errno>,
    ) -> Result<(), Errno> {
        if made.is_ok() && !backings.is_empty() {
            self.backings.insert(region, backings);
        } else if !backings.is_empty() {
            host.closing.free(backings);
        }
        made
    }

    /// Has files looked at. There is no answer yet.
    pub(super) fn look(
        &self,
        host: &HostState,
        seat: &Seat,
        sender: Sender,
        mut job: Job,
    ) -> Result<Option<Answer>, Errno> {
        let backings = if self.regions < MAX_REGIONS {
            job.pieces
                .iter()
                .map(|(file, ..)| seat.keep(file))
                .collect()
        } else {
            Err(Errno::ENOSPC)
        };
        job.backings = backings.inspect_err(|_| {
            let files = job.pieces.drain(..).map(|(file, ..)| file);
            host.closing.close(sender, files.collect(), ());
        })?;
        match host.sharing.start(sender, job) {
            Ok(()) => Ok(None),
            Err(job) => {
                // The others last.
                drop(job.pieces);
                host.closing.free(job.backings);
                Err(Errno::ENOMEM)
            }
        }
    }

    pub(super) fn attach_segment(
        &self,
        process: &Process,
        region: RegionId,
        memory: Region,
    ) -> Result<(), Errno> {
        self.context.attach_segment(region, memory)?;
        let owner = |header: &SharedMemory| header.part(OFF_OWNER, OWNER_BYTES);
        if let Some(Ok(owner)) = self.context.header().map(owner) {
            process.set_owner(owner);
        }
        Ok(())
    }

    pub(super) fn attach(
        &mut self,
        host: &HostState,
        seat: &Seat,
        process: &Arc<Process>,
        new: &NewRegion,
        file: Option<OwnedFd>,
    ) -> Result<(), Errno> {
        if self.regions >= MAX_REGIONS {
            return Err(Errno::ENOSPC);
        }
        match new.kind {
            Kind::Segment => {
                let file = file.ok_or(Errno::EPROTO)?;
                let memory = Region::from_memfd(file, new.length, true);
                let memory = memory.map_err(|e| region_errno(&e))?;
                host.locate(&memory);
                self.attach_segment(process, new.region, memory)?;
            }
            // Nothing is reached that the process of another user does not share.
            Kind::Pin { .. } if seat.another.is_some() => return Err(Errno::EPERM),
            Kind::AddressSpace { .. } if seat.another.is_some() => {
                return Err(Errno::EOPNOTSUPP);
            }
            Kind::Pin { writable } | Kind::AddressSpace { writable } => {
                let memory = Region::from_process(process, new.address, new.length, writable);
                let memory = memory.map_err(|e| region_errno(&e))?;
                self.context.attach_pin(new.region, memory)?;
            }
            Kind::Phony
            | Kind::Device { .. }
            | Kind::Shared { .. }
            | Kind::File
            | Kind::AllMemory { .. } => {
                return Err(Errno::EOPNOTSUPP);
            }
        }
        self.regions += 1;
        Ok(())
    }

    /// Keeps a file that the process has shown, so that no other one is taken for it.
    pub(super) fn attach_file(
        &mut self,
        host: &HostState,
        seat: &Seat,
        sender: Sender,
        region: RegionId,
        file: OwnedFd,
    ) -> Result<(), Errno> {
        let attach = || {
            if self.regions >= MAX_REGIONS {
                return Err(Errno::ENOSPC);
            }
            let share = seat.party.take(Resource::Descriptors, 1);
            let share = share.ok_or(Errno::ENOMEM)?;
            let id = file::identify(file.as_fd()).map_err(|error| match error {
                rustix::io::Errno::BADF => Errno::EBADF,
                _ => Errno::EINVAL,
            })?;
            self.context.attach_file(region, id)?;
            Ok(share)
        };
        match attach() {
            Ok(share) => {
                self.files.insert(region, (file, share));
                self.regions += 1;
                Ok(())
            }
            Err(errno) => {
                host.closing.close(sender, vec![file], ());
                Err(errno)
            }
        }
    }

    pub(super) fn map(&mut self, place: WindowRange) -> Result<BufferMapping, Errno> {
        // Each buffer is a file of its own, so that only its handle tells it from others.
        if place.buffer == 0 {
            return Err(Errno::EINVAL);
        }
        if self.mappings >= MAX_MAPPINGS {
            return Err(Errno::ENOSPC);
        }
        let buffer = self
            .context
            .window_map(place.buffer, place.offset, place.length)?;
        self.mappings += 1;
        Ok(buffer)
    }

    pub(super) fn unmap(&mut self, place: WindowRange) -> Result<(), Errno> {
        self.context
            .window_unmap(place.buffer, place.offset, place.length)?;
        self.mappings = self.mappings.saturating_sub(1);
        Ok(())
    }
}
