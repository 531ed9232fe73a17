//! The kernel's side of a function: everything that is asked of it.

use crate::IommuLimits;
use crate::OpenError;
use crate::descriptor::duplicate_above_all;
use crate::sysfs::BoundFunction;
use farlane_abi::width::{at_most, size_u32, to_usize};
use farlane_pci::{AddressRange, InterruptKind, Region};
use farlane_sys::PciAddress;
use farlane_sys::sync::lock;
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_RESET, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE,
    VFIO_IRQ_SET_ACTION_MASK, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK,
    VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX,
    VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX, VFIO_REGION_INFO_FLAG_READ,
    VFIO_REGION_INFO_FLAG_WRITE, vfio_device_info, vfio_iommu_type1_dma_map,
    vfio_iommu_type1_dma_unmap, vfio_iommu_type1_info,
};
use vfio_ioctls::{VfioContainer, VfioDevice, VfioError};
use vmm_sys_util::ioctl::{
    ioctl, ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref,
};

// `linux/vfio.h`: all requests are _IO(VFIO_TYPE, VFIO_BASE + n).
const fn request(number: u64) -> u64 {
    (0x3b << 8) | (100 + number)
}
const GET_INFO: u64 = request(7);
pub(crate) const SET_IRQS: u64 = request(10);
pub(crate) const RESET: u64 = request(11);
const IOMMU_GET_INFO: u64 = request(12);
pub(crate) const MAP_DMA: u64 = request(13);
pub(crate) const UNMAP_DMA: u64 = request(14);

/// Bytes that the kernel may use to describe an IOMMU.
const MAX_INFO_BYTES: usize = 1 << 20;

/// A region as the kernel describes it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RegionInfo {
    pub size: u64,
    /// Where in the device's file it is.
    pub offset: u64,
    pub readable: bool,
    pub writable: bool,
}

/// What is to become of interrupts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IrqAction<'a> {
    /// These vectors go to these eventfds, or nowhere. Enables the kind, with as many vectors, if
    /// it is not enabled.
    Send(&'a [Option<BorrowedFd<'a>>]),
    /// The kind is disabled.
    Disable,
    /// INTx is masked.
    Mask,
    /// INTx is unmasked.
    Unmask,
}

/// What is asked of the kernel about one function.
pub(crate) trait Kernel: Send + Sync + Debug {
    /// Of BARs, expansion ROM and configuration space; others have no bytes.
    fn region(&self, region: Region) -> RegionInfo;
    fn vectors(&self, kind: InterruptKind) -> u16;
    fn limits(&self) -> &IommuLimits;
    /// Reads all of `data`, or fails. `offset` is in the region.
    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> io::Result<()>;
    fn write(&self, region: Region, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Returns a number of vectors where the host has only so many, and nothing was done.
    fn set_irqs(
        &self,
        kind: InterruptKind,
        start: u16,
        action: IrqAction<'_>,
    ) -> io::Result<Option<u16>>;
    /// Has the device reach the bytes at `memory` by these addresses.
    ///
    /// # Safety
    /// They stay mapped until `unmap_dma` has succeeded, and nobody makes references to them.
    unsafe fn map_dma(
        &self,
        range: AddressRange,
        memory: *mut u8,
        writable: bool,
    ) -> io::Result<()>;
    fn unmap_dma(&self, range: AddressRange) -> io::Result<()>;
    fn reset(&self) -> io::Result<()>;
    /// The device's file, in which its regions are.
    fn file(&self) -> io::Result<OwnedFd>;
    /// Has the kernel signal errors of the device that are not corrected, and that it wants the
    /// device back, as far as it can tell of this one.
    fn watch(&self, error: BorrowedFd<'_>, request: BorrowedFd<'_>) -> io::Result<()>;
    /// Closes the device's file: nothing else of this works any more.
    fn close(&self) -> io::Result<()>;
}

/// A function in VFIO's hands.
pub(crate) struct VfioKernel {
    /// The device's file again, which is released before all others when the process is killed.
    /// None once it is closed.
    first: Mutex<Option<OwnedFd>>,
    // Before the container: it is the container's user.
    device: VfioDevice,
    container: Arc<VfioContainer>,
    regions: Vec<RegionInfo>,
    limits: IommuLimits,
}

impl Debug for VfioKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VfioKernel")
            .field("regions", &self.regions)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn irq_index(kind: InterruptKind) -> u32 {
    match kind {
        InterruptKind::Intx => VFIO_PCI_INTX_IRQ_INDEX,
        InterruptKind::Msi => VFIO_PCI_MSI_IRQ_INDEX,
        InterruptKind::Msix => VFIO_PCI_MSIX_IRQ_INDEX,
    }
}

fn open_error(error: VfioError, address: PciAddress) -> OpenError {
    let what = match &error {
        VfioError::OpenGroup(e, _) if e.kind() == io::ErrorKind::ResourceBusy => format!(
            "use {address}: its IOMMU group is in use, maybe by another function of it, which \
             cannot be isolated from this one"
        ),
        _ => format!("use {address}"),
    };
    OpenError::Failed {
        what,
        source: io::Error::other(error),
    }
}

impl VfioKernel {
    pub fn open(function: &BoundFunction, address: PciAddress) -> Result<Self, OpenError> {
        let container = VfioContainer::new(None).map_err(|e| open_error(e, address))?;
        let container = Arc::new(container);
        let device = VfioDevice::new(&function.folder, container.clone(), false)
            .map_err(|e| open_error(e, address))?;
        if !can_reset(&device).map_err(OpenError::failed(format!("examine {address}")))? {
            return Err(OpenError::NoReset(address));
        }
        let first = duplicate_above_all(borrow(&device));
        let first = first.inspect_err(|e| {
            log::warn!("{address}: a killed lender may be heard of before it has stopped: {e}");
        });
        let regions = (0..=VFIO_PCI_CONFIG_REGION_INDEX)
            .map(|index| {
                let flags = device.get_region_flags(index);
                RegionInfo {
                    size: device.get_region_size(index),
                    offset: device.get_region_offset(index),
                    readable: flags & VFIO_REGION_INFO_FLAG_READ != 0,
                    writable: flags & VFIO_REGION_INFO_FLAG_WRITE != 0,
                }
            })
            .collect();
        let info = iommu_info(&container).map_err(OpenError::failed("examine the IOMMU"))?;
        let limits = IommuLimits::parse(&info).ok_or_else(|| OpenError::Odd {
            function: address,
            why: format!("its IOMMU's description has {} bytes", info.len()),
        })?;
        Ok(Self {
            device,
            container,
            first: Mutex::new(first.ok()),
            regions,
            limits,
        })
    }

    /// Sets up an interrupt by its VFIO number.
    fn set_irq_index(
        &self,
        index: u32,
        start: u16,
        action: IrqAction<'_>,
    ) -> io::Result<Option<u16>> {
        let (flags, fds) = match action {
            IrqAction::Send(fds) => (VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER, fds),
            IrqAction::Disable => (
                VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER,
                &[] as &[_],
            ),
            IrqAction::Mask => (VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_MASK, &[] as _),
            IrqAction::Unmask => (
                VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_UNMASK,
                &[] as _,
            ),
        };
        let masking = matches!(action, IrqAction::Mask | IrqAction::Unmask);
        let count = if masking { 1 } else { fds.len() };
        let count = u32::try_from(count).map_err(io::Error::other)?;
        // A `vfio_irq_set`: five words, then descriptors.
        let argsz = 20 + 4 * u32::try_from(fds.len()).map_err(io::Error::other)?;
        let mut set = vec![argsz, flags, index, u32::from(start), count];
        set.extend(
            fds.iter()
                .map(|fd| fd.map_or(-1, |fd| fd.as_raw_fd()).cast_unsigned()),
        );
        // SAFETY: the request reads a `vfio_irq_set` of `argsz` bytes, which `set` has.
        let result = check(unsafe { ioctl_with_ptr(&self.device, SET_IRQS, set.as_ptr()) })?;
        let fewer = (result > 0).then(|| u16::try_from(result));
        fewer.transpose().map_err(io::Error::other)
    }
}

fn can_reset(device: &VfioDevice) -> io::Result<bool> {
    let mut info = vfio_device_info {
        argsz: size_u32::<vfio_device_info>(),
        ..Default::default()
    };
    // SAFETY: the request writes a `vfio_device_info`, of no more than `argsz` bytes.
    check(unsafe { ioctl_with_mut_ref(device, GET_INFO, &mut info) })?;
    Ok(info.flags & VFIO_DEVICE_FLAGS_RESET != 0)
}

/// A `vfio_iommu_type1_info` with its capabilities.
fn iommu_info(container: &VfioContainer) -> io::Result<Vec<u8>> {
    let mut bytes = size_of::<vfio_iommu_type1_info>();
    loop {
        // For the alignment of the structure.
        let mut buffer = vec![0_u64; bytes.div_ceil(8)];
        let head = u32::try_from(bytes).map_err(io::Error::other)?;
        let mut first = [0; 8];
        first[..4].copy_from_slice(&head.to_ne_bytes());
        buffer[0] = u64::from_ne_bytes(first);
        // SAFETY: the request writes no more than the `argsz` bytes that it finds in the first
        // word, and the buffer has those.
        check(unsafe { ioctl_with_mut_ptr(container, IOMMU_GET_INFO, buffer.as_mut_ptr()) })?;
        let mut all: Vec<u8> = buffer.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let wanted = u32::from_ne_bytes([all[0], all[1], all[2], all[3]]);
        let wanted = to_usize(wanted.into());
        if wanted <= bytes {
            all.truncate(bytes);
            return Ok(all);
        }
        if wanted > MAX_INFO_BYTES {
            return Err(io::Error::other("its description is too long"));
        }
        bytes = wanted;
    }
}

impl Kernel for VfioKernel {
    fn region(&self, region: Region) -> RegionInfo {
        let info = self.regions.get(region.index());
        info.copied().unwrap_or_default()
    }

    fn vectors(&self, kind: InterruptKind) -> u16 {
        let info = self.device.get_irq_info(irq_index(kind));
        info.map_or(0, |info| at_most(info.count, u16::MAX))
    }

    fn limits(&self) -> &IommuLimits {
        &self.limits
    }

    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let at = self.region(region).offset + offset;
        // One call: an access of 1, 2, 4 or 8 bytes is one access of the device's.
        match rustix::io::pread(borrow(&self.device), &mut *data, at)? {
            n if n == data.len() => Ok(()),
            n => Err(short(n, data.len())),
        }
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> io::Result<()> {
        let at = self.region(region).offset + offset;
        match rustix::io::pwrite(borrow(&self.device), data, at)? {
            n if n == data.len() => Ok(()),
            n => Err(short(n, data.len())),
        }
    }

    fn set_irqs(
        &self,
        kind: InterruptKind,
        start: u16,
        action: IrqAction<'_>,
    ) -> io::Result<Option<u16>> {
        self.set_irq_index(irq_index(kind), start, action)
    }
    unsafe fn map_dma(
        &self,
        range: AddressRange,
        memory: *mut u8,
        writable: bool,
    ) -> io::Result<()> {
        let write = if writable { VFIO_DMA_MAP_FLAG_WRITE } else { 0 };
        let map = vfio_iommu_type1_dma_map {
            argsz: size_u32::<vfio_iommu_type1_dma_map>(),
            flags: VFIO_DMA_MAP_FLAG_READ | write,
            vaddr: u64::try_from(memory.addr()).map_err(io::Error::other)?,
            iova: range.address,
            size: range.length,
        };
        // SAFETY: the request reads a `vfio_iommu_type1_dma_map`. What it has the device do to the
        // memory, the caller answers for.
        check(unsafe { ioctl_with_ref(&*self.container, MAP_DMA, &map) }).map(drop)
    }

    fn unmap_dma(&self, range: AddressRange) -> io::Result<()> {
        let mut unmap = vfio_iommu_type1_dma_unmap {
            argsz: size_u32::<vfio_iommu_type1_dma_unmap>(),
            iova: range.address,
            size: range.length,
            ..Default::default()
        };
        // SAFETY: the request reads and writes a `vfio_iommu_type1_dma_unmap` without further data.
        check(unsafe { ioctl_with_mut_ref(&*self.container, UNMAP_DMA, &mut unmap) })?;
        if unmap.size == range.length {
            Ok(())
        } else {
            let done = unmap.size;
            Err(io::Error::other(format!(
                "only {done:#x} bytes were mapped"
            )))
        }
    }

    fn file(&self) -> io::Result<OwnedFd> {
        // SAFETY: the device is open while `self` lives.
        let file = unsafe { BorrowedFd::borrow_raw(self.device.as_raw_fd()) };
        file.try_clone_to_owned()
    }

    fn watch(&self, error: BorrowedFd<'_>, request: BorrowedFd<'_>) -> io::Result<()> {
        for (index, event) in [
            (VFIO_PCI_ERR_IRQ_INDEX, error),
            (VFIO_PCI_REQ_IRQ_INDEX, request),
        ] {
            // Functions that are not of PCI Express report no errors.
            if self.device.get_irq_info(index).is_some_and(|i| i.count > 0) {
                self.set_irq_index(index, 0, IrqAction::Send(&[Some(event)]))?;
            }
        }
        Ok(())
    }

    fn close(&self) -> io::Result<()> {
        let first = lock(&self.first).take();
        drop(first);
        // Its number stays: the device's descriptor is closed by it, once, when this is dropped.
        let nothing = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        let (from, to) = (nothing.as_raw_fd(), self.device.as_raw_fd());
        // SAFETY: both are open, and nobody relies on what the second one refers to: what is asked
        // of it fails from now on.
        check(unsafe { libc::dup3(from, to, libc::O_CLOEXEC) }).map(drop)
    }

    fn reset(&self) -> io::Result<()> {
        // SAFETY: the request has no argument.
        check(unsafe { ioctl(&self.device, RESET) }).map(drop)
    }
}

fn short(got: usize, wanted: usize) -> io::Error {
    io::Error::other(format!("the device answered {got} of {wanted} bytes"))
}

fn borrow(device: &VfioDevice) -> BorrowedFd<'_> {
    // SAFETY: the device keeps its descriptor open while it lives, and it is borrowed.
    unsafe { BorrowedFd::borrow_raw(device.as_raw_fd()) }
}

/// What the source of a function at `address` needs of the system.
pub(crate) fn open(
    sysfs: &Path,
    address: PciAddress,
) -> Result<(VfioKernel, BoundFunction), OpenError> {
    let function = BoundFunction::find(sysfs, address)?;
    Ok((VfioKernel::open(&function, address)?, function))
}
