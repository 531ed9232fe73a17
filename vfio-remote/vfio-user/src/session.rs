//! What one client does to the device, message by message, without the socket.

use crate::capabilities::Capabilities;
use crate::client::Client;
use crate::counters::{Connected, Count};
use crate::mappings::Mappings;
use crate::reply::{self, Reply};
use crate::request::{IrqData, IrqsRequest, MapRequest, Request, Writes, parse};
use crate::wire::{self, Header};
use crate::{Device, DmaMap, IrqInfo, IrqRequest, MAX_IRQ_TYPES, MAX_REGIONS, RegionInfo};
use farlane_abi::width::{size_u32, to_u64, to_usize};
use farlane_sys::eventfd;
use farlane_zero_copy::memory_file::{self, MemoryFileError, Source};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// What becomes of the connection after a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The reply is sent, unless the client wants none, and it goes on.
    Continue,
    /// The reply is sent, and the connection ends.
    End,
}

/// Whether the bytes of an access lie in a region.
#[derive(Clone, Copy, Debug, Default)]
struct Bounds {
    size: u64,
    readable: bool,
    writable: bool,
}

/// What has been agreed with the client, and what it has done.
#[derive(Debug)]
struct Negotiated {
    capabilities: Capabilities,
    regions: Vec<Bounds>,
    irqs: Vec<IrqInfo>,
    /// Interrupt types that have been set up.
    irqs_used: Vec<bool>,
    mappings: Mappings,
    /// For as long as it is there.
    _connected: Connected,
}

/// One client of a device. When it is dropped, all that the client has set up goes, and the device
/// is told.
pub struct Session<'a, D: Device> {
    device: &'a mut D,
    client: Client,
    agreed: Option<Negotiated>,
}

impl<'a, D: Device> Session<'a, D> {
    /// A client that has not said anything yet.
    pub fn new(device: &'a mut D, client: Client) -> Self {
        Self {
            device,
            client,
            agreed: None,
        }
    }

    /// Whether a version has been agreed on.
    pub fn is_agreed(&self) -> bool {
        self.agreed.is_some()
    }

    /// Carries out a command and makes the reply, also where the client wants none.
    ///
    /// `body` is all that follows the header, `fds` all that came along; `fds_lost` says that more
    /// have been lost.
    pub fn handle(
        &mut self,
        header: &Header,
        body: &[u8],
        fds: Vec<OwnedFd>,
        fds_lost: bool,
        reply: &mut Reply,
    ) -> Next {
        reply.start();
        let negotiated = self.agreed.is_some();
        let result = match parse(header, body, fds) {
            Ok(_) if fds_lost => {
                log::debug!("There are too many open files for {}", reply::name(header));
                Err(Errno::MFILE)
            }
            Ok(request) => self.carry_out(request, reply),
            Err(error) => {
                log::debug!("Refused: {error}");
                Err(error.errno())
            }
        };
        if let Err(error) = result {
            log::debug!("{} is answered by {error}", reply::name(header));
            self.client.counters().add(Count::Refused, 1);
        }
        reply.finish(header, result);
        // Nothing can be said to a client with whom no version has been agreed.
        if negotiated || self.agreed.is_some() {
            Next::Continue
        } else {
            Next::End
        }
    }

    fn count(&self, request: &Request<'_>) {
        let (what, count) = match request {
            Request::RegionRead { .. } => (Count::Reads, 1),
            Request::RegionWrite { .. } => (Count::Writes, 1),
            Request::RegionWriteMulti(writes) => (Count::Writes, to_u64(writes.count())),
            _ => (Count::Other, 1),
        };
        self.client.counters().add(what, count);
    }

    fn carry_out(&mut self, request: Request<'_>, reply: &mut Reply) -> Result<(), Errno> {
        self.device.begin_request();
        self.count(&request);
        if let Request::Version {
            major,
            minor,
            capabilities,
        } = request
        {
            return self.negotiate(major, minor, capabilities, reply);
        }
        let Some(agreed) = &mut self.agreed else {
            log::debug!("A command before the version has been agreed");
            return Err(Errno::INVAL);
        };
        let device = &mut *self.device;
        match request {
            // It was taken care of above.
            Request::Version { .. } => Err(Errno::INVAL),
            Request::DmaMap(map) => agreed.map(device, map),
            Request::DmaUnmap { address, size } => {
                agreed.unmap(device, agreed.mappings.within(address, size)?)?;
                push_unmap(reply, 0, address, size);
                Ok(())
            }
            Request::DmaUnmapAll => {
                agreed.unmap(device, agreed.mappings.all())?;
                push_unmap(reply, wire::UNMAP_ALL, 0, 0);
                Ok(())
            }
            Request::DeviceInfo => push_device_info(reply, device, agreed),
            Request::RegionInfo { index, room } => agreed.region_info(device, index, room, reply),
            Request::RegionIoFds { index, room } => agreed.io_fds(device, index, room, reply),
            Request::IrqInfo { index } => agreed.irq_info(index, reply),
            Request::SetIrqs(request) => agreed.set_irqs(device, request),
            Request::RegionRead {
                region,
                offset,
                count,
            } => agreed.read(device, region, offset, count, reply),
            Request::RegionWrite {
                region,
                offset,
                data,
            } => {
                let count = agreed.write(device, region, offset, data)?;
                push_access(reply, region, offset, count);
                Ok(())
            }
            Request::RegionWriteMulti(writes) => agreed.write_multi(device, writes, reply),
            Request::Reset => {
                if !device.info().resettable {
                    return Err(Errno::OPNOTSUPP);
                }
                device.reset()
            }
        }
    }

    fn negotiate(
        &mut self,
        major: u16,
        minor: u16,
        capabilities: &[u8],
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        if self.agreed.is_some() {
            log::debug!("The version has been agreed already");
            return Err(Errno::INVAL);
        }
        if major != wire::MAJOR {
            log::debug!("A client speaks vfio-user {major}.{minor}, which is not known");
            return Err(Errno::INVAL);
        }
        let refuse = |error| {
            log::debug!("A client is refused: {error}");
            Errno::INVAL
        };
        let capabilities = Capabilities::parse(capabilities).map_err(refuse)?;
        let answer = capabilities.answer().map_err(refuse)?;
        reply::version(reply, minor.min(wire::MINOR), &answer);
        self.client.set_max_transfer(capabilities.max_transfer);
        let connected = self.client.counters().connect();
        self.device.connected(self.client.clone());
        let info = self.device.info();
        let regions = (0..info.regions.min(MAX_REGIONS)).map(|index| {
            let region = self.device.region(index).unwrap_or_default();
            Bounds {
                size: region.size,
                readable: region.readable,
                writable: region.writable,
            }
        });
        let regions = regions.collect();
        let irqs = 0..info.irqs.min(MAX_IRQ_TYPES);
        let irqs: Vec<_> = irqs
            .map(|index| self.device.irq(index).unwrap_or_default())
            .collect();
        self.agreed = Some(Negotiated {
            capabilities,
            regions,
            irqs_used: vec![false; irqs.len()],
            irqs,
            mappings: Mappings::default(),
            _connected: connected,
        });
        Ok(())
    }
}

impl<D: Device> Drop for Session<'_, D> {
    /// The client has gone: what it has set up goes too.
    fn drop(&mut self) {
        let Some(agreed) = self.agreed.take() else {
            return;
        };
        self.device.begin_request();
        self.device.disconnecting();
        let ranges = agreed.mappings.all();
        let failed = ranges
            .iter()
            .filter_map(|&(address, size)| self.device.dma_unmap(address, size).err());
        if let Some((error, more)) = first_and_count(failed) {
            log::warn!("Memory could not be unmapped: {error}, and {more} ranges more");
        }
        let used = (0..).zip(&agreed.irqs_used).filter(|(_, used)| **used);
        let failed = used.filter_map(|(index, _)| {
            let request = IrqRequest::Disable { index };
            self.device.set_irqs(request).err()
        });
        if let Some((error, more)) = first_and_count(failed) {
            log::warn!("Interrupts could not be disabled: {error}, and {more} types more");
        }
        self.device.disconnected();
    }
}

fn first_and_count<T>(mut all: impl Iterator<Item = T>) -> Option<(T, usize)> {
    let first = all.next()?;
    Some((first, all.count()))
}

impl Negotiated {
    fn map(&mut self, device: &mut impl Device, map: MapRequest) -> Result<(), Errno> {
        let limit = self.capabilities.max_dma_maps;
        self.mappings.check(map.address, map.size, limit)?;
        if let Some((file, offset)) = &map.file {
            let range = (*offset, map.size);
            memory_file::check(file.as_fd(), range, map.writable, Source::Vmm).map_err(|e| {
                log::debug!("Memory at {:#x} is refused: {e}", map.address);
                match e {
                    MemoryFileError::Unreadable
                    | MemoryFileError::Unwritable
                    | MemoryFileError::Sealed => Errno::ACCESS,
                    _ => Errno::INVAL,
                }
            })?;
        }
        let (address, size) = (map.address, map.size);
        device.dma_map(DmaMap {
            address,
            size,
            readable: map.readable,
            writable: map.writable,
            file: map.file,
        })?;
        self.mappings.insert(address, size);
        Ok(())
    }

    /// Takes ranges away, (address, bytes), up to the first that the device does not let go of.
    fn unmap(&mut self, device: &mut impl Device, ranges: Vec<(u64, u64)>) -> Result<(), Errno> {
        for (address, size) in ranges {
            device.dma_unmap(address, size)?;
            self.mappings.remove(address);
        }
        Ok(())
    }

    fn bounds(&self, index: u32) -> Result<&Bounds, Errno> {
        let index = usize::try_from(index).map_err(|_| Errno::INVAL)?;
        self.regions.get(index).ok_or(Errno::INVAL)
    }

    fn check_access(&self, region: u32, offset: u64, count: u32) -> Result<&Bounds, Errno> {
        let bounds = self.bounds(region)?;
        let end = offset.checked_add(u64::from(count)).ok_or(Errno::INVAL)?;
        if end > bounds.size {
            Err(Errno::INVAL)
        } else {
            Ok(bounds)
        }
    }

    fn region_info(
        &self,
        device: &mut impl Device,
        index: u32,
        room: u32,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let bounds = *self.bounds(index)?;
        let info = RegionInfo {
            size: bounds.size,
            readable: bounds.readable,
            writable: bounds.writable,
            areas: device
                .region(index)
                .map_or_else(Vec::new, |region| region.areas),
        };
        let max_fds = self.capabilities.max_msg_fds;
        reply::region_info(reply, index, &info, room, max_fds).map_err(|e| described_wrongly(&e))
    }

    fn io_fds(
        &self,
        device: &mut impl Device,
        index: u32,
        room: u32,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let size = self.bounds(index)?.size;
        let parts = device.io_fds(index)?;
        let max_fds = self.capabilities.max_msg_fds;
        reply::io_fds(reply, index, size, &parts, room, max_fds).map_err(|e| described_wrongly(&e))
    }

    fn irq(&self, index: u32) -> Result<(usize, &IrqInfo), Errno> {
        let number = usize::try_from(index).map_err(|_| Errno::INVAL)?;
        self.irqs
            .get(number)
            .map(|irq| (number, irq))
            .ok_or(Errno::INVAL)
    }

    fn irq_info(&self, index: u32, reply: &mut Reply) -> Result<(), Errno> {
        let (_, irq) = self.irq(index)?;
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        reply.push(&wire::IrqInfo {
            argsz: size_u32::<wire::IrqInfo>(),
            flags: flag(irq.eventfd, wire::IRQ_EVENTFD)
                | flag(irq.maskable, wire::IRQ_MASKABLE)
                | flag(irq.automasked, wire::IRQ_AUTOMASKED)
                | flag(irq.noresize, wire::IRQ_NORESIZE),
            index,
            count: irq.count,
        });
        Ok(())
    }

    fn set_irqs(
        &mut self,
        device: &mut impl Device,
        request: IrqsRequest<'_>,
    ) -> Result<(), Errno> {
        let IrqsRequest {
            index,
            start,
            count,
            action,
            data,
        } = request;
        let (number, irq) = self.irq(index)?;
        // A type of which the device has none cannot be disabled either, as with Linux's VFIO.
        if irq.count == 0 || start.checked_add(count).is_none_or(|end| end > irq.count) {
            return Err(Errno::INVAL);
        }
        let length = usize::try_from(count).map_err(|_| Errno::INVAL)?;
        let request = match data {
            IrqData::None if count == 0 => IrqRequest::Disable { index },
            IrqData::None => IrqRequest::Perform {
                index,
                start,
                action,
                selected: vec![true; length],
            },
            IrqData::Bool(selected) => IrqRequest::Perform {
                index,
                start,
                action,
                selected: selected.iter().map(|&byte| byte != 0).collect(),
            },
            IrqData::Eventfd(fds) => {
                if !irq.eventfd {
                    return Err(Errno::INVAL);
                }
                IrqRequest::Bind {
                    index,
                    start,
                    action,
                    eventfds: adopt(fds, length)?,
                }
            }
        };
        if let Some(used) = self.irqs_used.get_mut(number) {
            *used = true;
        }
        device.set_irqs(request)
    }

    fn read(
        &self,
        device: &mut impl Device,
        region: u32,
        offset: u64,
        count: u32,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        if !self.check_access(region, offset, count)?.readable {
            return Err(Errno::INVAL);
        }
        push_access(reply, region, offset, count);
        let data = reply.reserve(usize::try_from(count).map_err(|_| Errno::INVAL)?);
        if data.is_empty() {
            return Ok(());
        }
        device.read(region, offset, data)
    }

    fn write(
        &self,
        device: &mut impl Device,
        region: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<u32, Errno> {
        let count = u32::try_from(data.len()).map_err(|_| Errno::INVAL)?;
        if !self.check_access(region, offset, count)?.writable {
            return Err(Errno::INVAL);
        }
        if count > 0 {
            device.write(region, offset, data)?;
        }
        Ok(count)
    }

    /// Writes in order, up to the first that fails.
    fn write_multi(
        &self,
        device: &mut impl Device,
        writes: Writes<'_>,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        if !self.capabilities.write_multiple {
            return Err(Errno::OPNOTSUPP);
        }
        let mut done = 0;
        for one in writes.iter() {
            let count = to_usize(one.count.into());
            let data = one.data.get(..count).ok_or(Errno::INVAL)?;
            match self.write(device, one.region, one.offset, data) {
                Ok(_) => done += 1,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        reply.push(&wire::WriteMulti { wr_cnt: done });
        Ok(())
    }
}

/// What a client is told of a device that describes itself wrongly.
fn described_wrongly(error: &reply::DeviceError) -> Errno {
    log::error!("{error}");
    Errno::IO
}

/// Eventfds for so many interrupts: all of them, or none.
fn adopt(fds: Vec<OwnedFd>, count: usize) -> Result<Vec<Option<OwnedFd>>, Errno> {
    if fds.is_empty() {
        return Ok(std::iter::repeat_with(|| None).take(count).collect());
    }
    let adopted = fds.into_iter().map(|fd| match eventfd::adopt(fd) {
        Ok(fd) => Ok(Some(fd)),
        Err(error) => {
            log::debug!("Refused: {error}");
            Err(Errno::INVAL)
        }
    });
    adopted.collect()
}

fn push_access(reply: &mut Reply, region: u32, offset: u64, count: u32) {
    reply.push(&wire::RegionAccess {
        offset,
        region,
        count,
    });
}

fn push_unmap(reply: &mut Reply, flags: u32, address: u64, size: u64) {
    reply.push(&wire::DmaUnmap {
        argsz: size_u32::<wire::DmaUnmap>(),
        flags,
        address,
        size,
    });
}

fn push_device_info(
    reply: &mut Reply,
    device: &impl Device,
    agreed: &Negotiated,
) -> Result<(), Errno> {
    let reset = if device.info().resettable {
        wire::DEVICE_RESET
    } else {
        0
    };
    let count = |length: usize| u32::try_from(length).map_err(|_| Errno::IO);
    reply.push(&wire::DeviceInfo {
        argsz: size_u32::<wire::DeviceInfo>(),
        flags: wire::DEVICE_PCI | reset,
        num_regions: count(agreed.regions.len())?,
        num_irqs: count(agreed.irqs.len())?,
    });
    Ok(())
}
