//! A virtual machine's `ivshmem-plain` function and the file behind it.
//!
//! The function's BAR 2 *is* a file of the machine's host. One end of the bridge is in the machine
//! and looks at the file through the BAR; the other has the file itself, which may be the memory
//! of another machine. That is one memory window with one translation, which cannot be changed.
//!
//! `ivshmem-plain` cannot interrupt. A second, small function of that kind can carry scratchpads,
//! doorbells and a link state ([`crate::control`]), which each end looks at a hundred times a
//! second.

use crate::control::{ALL_DOORBELLS, AREA_BYTES, Area, OwnDoorbells, Ringer, SCRATCHPADS};
use crate::file::Examined;
use crate::pci::fixed_limits;
use crate::sysfs::{self, SysfsFunction, open};
use crate::{FileId, Limits, LinkState, Ntb, NtbError, PeerWindow, Translation, event};
use farlane_sys::PciAddress;
use farlane_sys::thread::OwnedThread;
use farlane_zero_copy::{Mapping, SharedMemory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Vendor and device of `ivshmem-plain` (QEMU, "Device Specification for Inter-VM shared memory").
const IVSHMEM: (u16, u16) = (0x1af4, 0x1110);
/// The BAR that is the shared memory.
const MEMORY_BAR: u8 = 2;
/// How often each end looks at the control page.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};
/// After how many ticks without a beat the other end counts as gone.
const SILENT_TICKS: u32 = 200;

/// The element of `list` that a peer or a caller names.
pub(crate) fn get<T>(list: &[T], index: u32) -> Option<&T> {
    list.get(usize::try_from(index).ok()?)
}

/// Where one end of an `ivshmem-plain` region is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the virtual machine: the function.
    Function(PciAddress),
    /// On its host: the file, or a device-dax node whose memory that is.
    File(PathBuf),
}

/// How one end of the bridge is made.
#[derive(Clone, Debug)]
pub struct IvshmemConfig {
    /// The window.
    pub window: Place,
    /// The control page, if there is one: at least 4096 bytes. The two ends are told apart by
    /// whether this is a [`Place::Function`].
    pub control: Option<Place>,
    /// `/sys`.
    pub sysfs: PathBuf,
}

/// One end of a bridge made of `ivshmem-plain`.
#[derive(Debug)]
pub struct IvshmemNtb {
    limits: Limits,
    translation: Option<Translation>,
    window: PeerWindow,
    link_event: Arc<OwnedFd>,
    control: Option<Control>,
}

impl Place {
    fn open(&self, sysfs: &Path) -> Result<(OwnedFd, u64), NtbError> {
        match self {
            Self::Function(address) => {
                let function = SysfsFunction::find(sysfs, *address)?;
                let (vendor, device) = function.identity()?;
                if (vendor, device) != IVSHMEM {
                    return Err(
                        function.unusable(format!("it is {vendor:04x}:{device:04x}, not ivshmem"))
                    );
                }
                function.enable()?;
                function.open_bar(MEMORY_BAR, false)
            }
            Self::File(path) => {
                let file: OwnedFd = open(path)?.into();
                let examined = Examined::new(file.as_fd())?;
                let size = match examined.character_device {
                    Some(number) => sysfs::device_size(sysfs, number)?,
                    None if examined.regular => examined.size,
                    None => 0,
                };
                if size == 0 {
                    return Err(NtbError::File("it is not a file with bytes"));
                }
                Ok((file, size))
            }
        }
    }
}

impl IvshmemNtb {
    /// The end in the machine: the function at `address`. Without a control page.
    ///
    /// # Errors
    /// There is no such function, it is of another kind, or the system failed.
    pub fn open_pci(address: PciAddress) -> Result<Arc<Self>, NtbError> {
        Self::open(&IvshmemConfig {
            window: Place::Function(address),
            control: None,
            sysfs: "/sys".into(),
        })
    }

    /// The end with the file, or with a device-dax node. Without a control page.
    ///
    /// # Errors
    /// It cannot be opened for reading and writing, or has no bytes.
    pub fn open_file(path: &Path) -> Result<Arc<Self>, NtbError> {
        Self::open(&IvshmemConfig {
            window: Place::File(path.into()),
            control: None,
            sysfs: "/sys".into(),
        })
    }

    /// Either end. With a control page, starts a thread, which ends when this is dropped.
    ///
    /// # Errors
    /// As for [`open_pci`](Self::open_pci) and [`open_file`](Self::open_file).
    pub fn open(config: &IvshmemConfig) -> Result<Arc<Self>, NtbError> {
        let (file, size) = config.window.open(&config.sysfs)?;
        let id = FileId::of(file.as_fd())?;
        // The file may be the memory of a machine of this host; a BAR never is.
        let translation = matches!(config.window, Place::File(_)).then_some(Translation {
            file: id,
            offset: 0,
            length: size,
            writable: true,
        });
        let link_event = Arc::new(event::create()?);
        let control = match &config.control {
            Some(place) => Some(Control::start(
                place,
                &config.sysfs,
                Arc::clone(&link_event),
            )?),
            None => None,
        };
        let has_control = control.is_some();
        Ok(Arc::new(Self {
            limits: Limits {
                windows: translation.iter().map(fixed_limits).collect(),
                peer_windows: 1,
                scratchpads: if has_control { SCRATCHPADS } else { 0 },
                doorbells: if has_control { ALL_DOORBELLS } else { 0 },
            },
            translation,
            window: PeerWindow {
                file: Arc::new(file),
                offset: 0,
                size,
                writable: true,
                sealed: matches!(config.window, Place::Function(_)),
            },
            link_event,
            control,
        }))
    }

    fn control(&self, what: &'static str) -> Result<&Control, NtbError> {
        self.control.as_ref().ok_or_else(|| self.without(what))
    }
}

impl Ntb for IvshmemNtb {
    fn kind(&self) -> &'static str {
        "ivshmem"
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn link(&self) -> LinkState {
        match &self.control {
            Some(control) if !control.shared.up.load(Ordering::Acquire) => LinkState::Down,
            _ => LinkState::Up,
        }
    }

    fn link_event(&self) -> BorrowedFd<'_> {
        self.link_event.as_fd()
    }

    fn clear_link_event(&self) -> LinkState {
        let _ = event::drain(self.link_event.as_fd());
        self.link()
    }

    fn fixed_translation(&self, window: u32) -> Option<Translation> {
        self.translation.filter(|_| window == 0)
    }

    fn peer_window(&self, window: u32) -> Result<PeerWindow, NtbError> {
        if window == 0 {
            Ok(self.window.clone())
        } else {
            Err(NtbError::Window { window, count: 1 })
        }
    }

    fn doorbells(&self) -> Result<u64, NtbError> {
        let shared = &self.control("doorbells")?.shared;
        let _ = event::drain(shared.doorbell_event.as_fd());
        // The next ring raises the event again.
        shared.raised.store(false, Ordering::Release);
        Ok(shared.doorbells.pending())
    }

    fn clear_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        self.control("doorbells")?.shared.doorbells.clear(bits)
    }

    fn mask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        self.control("doorbells")?.shared.doorbells.mask(bits)
    }

    fn doorbell_event(&self) -> Result<BorrowedFd<'_>, NtbError> {
        Ok(self.control("doorbells")?.shared.doorbell_event.as_fd())
    }

    fn ring_peer(&self, bits: u64) -> Result<(), NtbError> {
        let control = self.control("doorbells")?;
        control.ringer.ring(control.peer()?, bits).map(drop)
    }

    fn scratchpad(&self, index: u32) -> Result<u32, NtbError> {
        self.control("scratchpads")?.shared.own.scratchpad(index)
    }

    fn set_scratchpad(&self, index: u32, value: u32) -> Result<(), NtbError> {
        let own = &self.control("scratchpads")?.shared.own;
        own.set_scratchpad(index, value)
    }

    fn peer_scratchpad(&self, index: u32) -> Result<u32, NtbError> {
        self.control("scratchpads")?.peer()?.scratchpad(index)
    }

    fn set_peer_scratchpad(&self, index: u32, value: u32) -> Result<(), NtbError> {
        let peer = self.control("scratchpads")?.peer()?;
        peer.set_scratchpad(index, value)
    }
}

/// The control page and who looks at it.
#[derive(Debug)]
struct Control {
    shared: Arc<Watched>,
    ringer: Ringer,
    _thread: OwnedThread,
}

#[derive(Debug)]
struct Watched {
    own: Area,
    peer: Area,
    doorbells: OwnDoorbells,
    doorbell_event: OwnedFd,
    /// The doorbell event has been raised since it was last cleared.
    raised: AtomicBool,
    up: AtomicBool,
    link_event: Arc<OwnedFd>,
    stop: OwnedFd,
}

impl Control {
    fn start(place: &Place, sysfs: &Path, link_event: Arc<OwnedFd>) -> Result<Self, NtbError> {
        let (file, size) = place.open(sysfs)?;
        let mapping = Mapping::new(file.as_fd(), 0, size, true).map_err(|e| NtbError::Io {
            what: "map a control page".into(),
            source: std::io::Error::other(e),
        })?;
        let memory = SharedMemory::new(mapping);
        let (ours, theirs) = match place {
            Place::File(_) => (0, AREA_BYTES),
            Place::Function(_) => (AREA_BYTES, 0),
        };
        let own = Area::new(memory.clone(), ours)?;
        own.format();
        let shared = Arc::new(Watched {
            doorbells: OwnDoorbells::new(own.clone()),
            own,
            peer: Area::new(memory, theirs)?,
            doorbell_event: event::create()?,
            raised: AtomicBool::new(false),
            up: AtomicBool::new(false),
            link_event,
            stop: event::create()?,
        });
        let serving = Arc::clone(&shared);
        let thread = OwnedThread::spawn("ntb", move || serving.watch());
        let thread = thread.map_err(NtbError::io("start a thread"))?;
        Ok(Self {
            shared,
            ringer: Ringer::default(),
            _thread: thread,
        })
    }

    fn peer(&self) -> Result<&Area, NtbError> {
        if self.shared.up.load(Ordering::Acquire) {
            Ok(&self.shared.peer)
        } else {
            Err(NtbError::LinkDown)
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        event::signal(self.shared.stop.as_fd());
    }
}

impl Watched {
    fn watch(&self) {
        let mut last = self.peer.beat();
        // What an end that has gone long ago left behind is not a beat.
        let mut silent = SILENT_TICKS;
        loop {
            self.beat();
            let beat = self.peer.beat();
            if beat == 0 {
                silent = SILENT_TICKS;
            } else if beat != last {
                silent = 0;
            } else {
                silent = silent.saturating_add(1).min(SILENT_TICKS);
            }
            last = beat;
            let up = silent < SILENT_TICKS && self.peer.is_formatted();
            if self.up.swap(up, Ordering::AcqRel) != up {
                event::signal(self.link_event.as_fd());
            }
            if self.doorbells.due() != 0 && !self.raised.swap(true, Ordering::AcqRel) {
                event::signal(self.doorbell_event.as_fd());
            }
            let mut stop = [PollFd::new(&self.stop, PollFlags::IN)];
            match poll(&mut stop, Some(&TICK)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => break,
                Err(e) => {
                    log::error!("A bridge cannot wait: {e}");
                    break;
                }
            }
        }
        self.own.set_beat(0);
    }

    fn beat(&self) {
        let next = self.own.beat().wrapping_add(1);
        self.own.set_beat(next.max(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WindowSpace;
    use crate::event::is_readable;
    use crate::sysfs::tests::{FakeSysfs, fake};

    const WINDOW: &str = "0000:00:05.0";

    /// A function whose BAR is the file `bar`, as QEMU makes it.
    fn sysfs() -> FakeSysfs {
        fake(WINDOW, 0x1af4, 0x1110, &[("resource2", 0x10000)])
    }

    fn both(sysfs: &FakeSysfs, control: bool) -> (Arc<IvshmemNtb>, Arc<IvshmemNtb>) {
        let file = sysfs.folder.join("resource2");
        let page = sysfs.root.path().join("bus/pci/devices/0000:00:06.0");
        std::fs::create_dir_all(&page).unwrap();
        for (name, text) in [("vendor", "0x1af4"), ("device", "0x1110"), ("enable", "1")] {
            std::fs::write(page.join(name), text).unwrap();
        }
        let page_file = page.join("resource2");
        if !page_file.exists() {
            std::fs::write(&page_file, [0; 4096]).unwrap();
        }
        let open = |window, page| {
            IvshmemNtb::open(&IvshmemConfig {
                window,
                control: control.then_some(page),
                sysfs: sysfs.root.path().into(),
            })
            .unwrap()
        };
        (
            open(Place::File(file), Place::File(page_file)),
            open(
                Place::Function(WINDOW.parse().unwrap()),
                Place::Function("0000:00:06.0".parse().unwrap()),
            ),
        )
    }

    #[test]
    fn only_the_file_behind_the_window_can_be_shown() {
        let sysfs = sysfs();
        let (host, machine) = both(&sysfs, false);
        assert_eq!(host.link(), LinkState::Up);
        let space = WindowSpace::new(host.clone());
        // Another descriptor of the same file.
        let ram = std::fs::File::open(sysfs.folder.join("resource2")).unwrap();
        let slice = space.allocate(ram.as_fd(), 0x4000, 0x8000, true).unwrap();
        assert_eq!((slice.window, slice.offset), (0, 0x4000));
        let window = machine.peer_window(slice.window).unwrap();
        assert_eq!(window.size, 0x10000);
        assert_eq!(window.locate(slice.offset, slice.length).unwrap(), 0x4000);
        let other = tempfile::tempfile().unwrap();
        other.set_len(0x10000).unwrap();
        let error = space.allocate(other.as_fd(), 0, 0x1000, true).unwrap_err();
        assert!(matches!(error, NtbError::NotShown { windows: 1, .. }));
        assert!(matches!(
            host.set_translation(0, crate::FileRange::first_page(&other)),
            Err(NtbError::Fixed { window: 0 })
        ));
        assert!(machine.limits().windows.is_empty());
        machine.peer_window(1).unwrap_err();
        assert!(matches!(
            machine.scratchpad(0),
            Err(NtbError::Unsupported { .. })
        ));
    }

    #[test]
    fn a_function_of_another_kind_is_refused() {
        let sysfs = fake(WINDOW, 0x1b36, 0x0010, &[("resource2", 0x10000)]);
        let error = IvshmemNtb::open(&IvshmemConfig {
            window: Place::Function(WINDOW.parse().unwrap()),
            control: None,
            sysfs: sysfs.root.path().into(),
        })
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "0000:00:05.0 cannot be used: it is 1b36:0010, not ivshmem"
        );
    }

    #[test]
    fn the_size_of_memory_with_a_node_is_known_to_sysfs() {
        let sysfs = sysfs();
        // As /dev/dax0.0 is: a character device.
        let node = sysfs.root.path().join("dev/char/1:3");
        std::fs::create_dir_all(&node).unwrap();
        let open = || {
            IvshmemNtb::open(&IvshmemConfig {
                window: Place::File("/dev/null".into()),
                control: None,
                sysfs: sysfs.root.path().into(),
            })
        };
        open().unwrap_err();
        std::fs::write(node.join("size"), "1073741824\n").unwrap();
        let space = WindowSpace::new(open().unwrap());
        let ram = std::fs::File::open("/dev/null").unwrap();
        let slice = space.allocate(ram.as_fd(), 1 << 29, 1 << 29, true);
        assert_eq!(slice.unwrap().offset, 1 << 29);
        space
            .allocate(ram.as_fd(), 1 << 29, (1 << 29) + 0x1000, true)
            .unwrap_err();
    }

    fn wait_for_link(ntb: &IvshmemNtb, wanted: LinkState) {
        while ntb.clear_link_event() != wanted {
            assert!(is_readable(ntb.link_event(), true), "no link event");
        }
    }

    #[test]
    fn a_control_page_carries_scratchpads_doorbells_and_the_link() {
        let sysfs = sysfs();
        let (host, machine) = both(&sysfs, true);
        wait_for_link(&host, LinkState::Up);
        wait_for_link(&machine, LinkState::Up);
        host.set_peer_scratchpad(3, 0x1234).unwrap();
        assert_eq!(machine.scratchpad(3).unwrap(), 0x1234);
        machine.set_scratchpad(4, 5).unwrap();
        assert_eq!(host.peer_scratchpad(4).unwrap(), 5);
        host.peer_scratchpad(32).unwrap_err();

        machine.mask_doorbells(1 << 7).unwrap();
        host.ring_peer(1 << 7 | 1 << 9).unwrap();
        assert!(is_readable(machine.doorbell_event().unwrap(), true));
        assert_eq!(machine.doorbells().unwrap(), 1 << 7 | 1 << 9);
        machine.clear_doorbells(1 << 9).unwrap();
        assert_eq!(machine.doorbells().unwrap(), 1 << 7);
        machine.mask_doorbells(0).unwrap();
        assert!(is_readable(machine.doorbell_event().unwrap(), true));
        host.ring_peer(1 << 40).unwrap_err();

        drop(machine);
        wait_for_link(&host, LinkState::Down);
        assert!(matches!(host.ring_peer(1), Err(NtbError::LinkDown)));
    }
}
