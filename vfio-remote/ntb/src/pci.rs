//! NTB endpoints whose translations an administrator has set up.
//!
//! Linux lets user space map the memory BARs of an NTB endpoint, but not program its translation
//! registers: there is no interface for that which all drivers have. Translations are therefore
//! set up beforehand (by the vendor's tool, or `ntb_tool`), to memory that was set aside for this
//! and that user space can map, for instance a device-dax node; they are stated here, and fixed.

use crate::file::Examined;
use crate::sysfs::{SysfsFunction, open};
use crate::{FileId, Limits, LinkState, Ntb, NtbError, PeerWindow, Translation, WindowLimits};
use crate::{event, ivshmem};
use farlane_abi::width::to_usize;
use farlane_sys::PciAddress;
use farlane_sys::sync::{read, write};
use farlane_zero_copy::{Mapping, SharedMemory};
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, RwLock};

/// A window onto this host's memory, which the other end looks through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InboundWindow {
    /// Local memory that it shows: a file, or a device-dax node.
    pub file: PathBuf,
    /// Where in the file the translation begins.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

/// A window onto the other host's memory: a stretch of a BAR of a function of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboundWindow {
    /// The NTB endpoint.
    pub function: PciAddress,
    /// Which BAR.
    pub bar: u8,
    /// Where in the BAR it begins: a multiple of the page size.
    pub offset: u64,
    /// Bytes: a multiple of the page size.
    pub size: u64,
    /// Whether a program's writes may be gathered (`resourceN_wc`).
    pub write_combining: bool,
}

/// An NTB endpoint whose translations are fixed.
#[derive(Debug)]
pub struct PciNtb {
    limits: Limits,
    inbound: Vec<Translation>,
    outbound: Vec<Outbound>,
    link_event: OwnedFd,
}

/// A window onto the other host's memory that is there.
#[derive(Debug)]
struct Outbound {
    window: PeerWindow,
    /// Pages that have been read, by where they are in the file.
    read: RwLock<BTreeMap<u64, SharedMemory>>,
}

/// Pages of a window that stay mapped to be read: one for each device that writes through it.
const MAX_PAGES: usize = 64;
/// Bytes that a flush reads.
const WORD_BYTES: u64 = 4;

const PAGE: u64 = 4096;

impl PciNtb {
    /// An endpoint with these windows. `sysfs` is `/sys`.
    ///
    /// # Errors
    /// A function, BAR or file is not there, or has not the bytes that are said.
    pub fn open(
        sysfs: &Path,
        inbound: &[InboundWindow],
        outbound: &[OutboundWindow],
    ) -> Result<Arc<Self>, NtbError> {
        let translations: Vec<_> = inbound
            .iter()
            .map(InboundWindow::translation)
            .collect::<Result<_, _>>()?;
        Ok(Arc::new(Self {
            limits: Limits {
                windows: translations.iter().map(fixed_limits).collect(),
                peer_windows: outbound.len(),
                scratchpads: 0,
                doorbells: 0,
            },
            inbound: translations,
            outbound: outbound
                .iter()
                .map(|window| window.open(sysfs))
                .collect::<Result<_, _>>()?,
            link_event: event::create()?,
        }))
    }

    fn outbound(&self, window: u32) -> Result<&Outbound, NtbError> {
        ivshmem::get(&self.outbound, window).ok_or(NtbError::Window {
            window,
            count: self.limits.peer_windows,
        })
    }
}

/// The limits of a window that shows one thing for ever.
pub(crate) fn fixed_limits(translation: &Translation) -> WindowLimits {
    WindowLimits {
        address_alignment: PAGE,
        size_alignment: PAGE,
        max_size: translation.length,
    }
}

impl InboundWindow {
    fn translation(&self) -> Result<Translation, NtbError> {
        let file = open(&self.file)?;
        let examined = Examined::new(file.as_fd())?;
        if examined.regular {
            examined.check_range(self.offset, self.size)?;
        } else if self.size == 0 || self.offset.checked_add(self.size).is_none() {
            return Err(NtbError::Range {
                offset: self.offset,
                length: self.size,
            });
        }
        Ok(Translation {
            file: FileId::of(file.as_fd())?,
            offset: self.offset,
            length: self.size,
            writable: true,
        })
    }
}

impl OutboundWindow {
    fn open(&self, sysfs: &Path) -> Result<Outbound, NtbError> {
        let function = SysfsFunction::find(sysfs, self.function)?;
        function.enable()?;
        let (file, bytes) = function.open_bar(self.bar, self.write_combining)?;
        let aligned = self.offset.is_multiple_of(PAGE) && self.size.is_multiple_of(PAGE);
        if !aligned {
            return Err(function.unusable("a window begins and ends at a page"));
        }
        let window = PeerWindow {
            file: Arc::new(file),
            offset: 0,
            size: bytes,
            writable: true,
            sealed: true,
        };
        Ok(Outbound {
            window: PeerWindow {
                offset: window.locate(self.offset, self.size)?,
                size: self.size,
                ..window
            },
            read: RwLock::default(),
        })
    }
}

impl Outbound {
    /// Reads a word of the window. Large windows are not mapped for that: a page is.
    fn read(&self, offset: u64) -> Result<(), NtbError> {
        let at = self.window.locate(offset, WORD_BYTES)?;
        let (page, word) = (at - at % PAGE, at % PAGE);
        let word = to_usize(word);
        let read_word = |memory: &SharedMemory| {
            let word = memory.word(word).map_err(|_| NtbError::Range {
                offset,
                length: WORD_BYTES,
            })?;
            // Writes that this processor has gathered are on their way first.
            fence(Ordering::SeqCst);
            std::hint::black_box(word.load(Ordering::SeqCst));
            Ok(())
        };
        let mapped = read(&self.read);
        if let Some(memory) = mapped.get(&page) {
            return read_word(memory);
        }
        drop(mapped);
        let mapping = Mapping::new(self.window.file.as_fd(), page, PAGE, false);
        let memory = SharedMemory::new(mapping.map_err(|e| NtbError::Io {
            what: "map a window".into(),
            source: std::io::Error::other(e),
        })?);
        read_word(&memory)?;
        let mut mapped = write(&self.read);
        if mapped.len() >= MAX_PAGES {
            mapped.clear();
        }
        mapped.insert(page, memory);
        Ok(())
    }
}

impl Ntb for PciNtb {
    fn kind(&self) -> &'static str {
        "pci"
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn link(&self) -> LinkState {
        // What the other host does cannot be seen from here.
        LinkState::Up
    }

    fn link_event(&self) -> BorrowedFd<'_> {
        self.link_event.as_fd()
    }

    fn clear_link_event(&self) -> LinkState {
        self.link()
    }

    fn fixed_translation(&self, window: u32) -> Option<Translation> {
        ivshmem::get(&self.inbound, window).copied()
    }

    fn peer_window(&self, window: u32) -> Result<PeerWindow, NtbError> {
        Ok(self.outbound(window)?.window.clone())
    }

    fn flush_peer_window(&self, window: u32, offset: u64) -> Result<(), NtbError> {
        self.outbound(window)?.read(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WindowSpace;
    use crate::sysfs::tests::fake;

    const FUNCTION: &str = "0000:65:00.1";

    fn outbound(offset: u64, size: u64, write_combining: bool) -> OutboundWindow {
        OutboundWindow {
            function: FUNCTION.parse().unwrap(),
            bar: 2,
            offset,
            size,
            write_combining,
        }
    }

    #[test]
    fn a_stretch_of_a_bar_is_a_window() {
        let sysfs = fake(
            FUNCTION,
            0x11f8,
            0x4000,
            &[("resource2", 0x10000), ("resource2_wc", 0x10000)],
        );
        let windows = [
            outbound(0x4000, 0x2000, false),
            outbound(0x6000, 0xa000, true),
        ];
        let ntb = PciNtb::open(sysfs.root.path(), &[], &windows).unwrap();
        let window = ntb.peer_window(1).unwrap();
        assert_eq!((window.offset, window.size), (0x6000, 0xa000));
        assert_eq!(window.locate(0x1000, 0x1000).unwrap(), 0x7000);
        window.locate(0x9fff, 2).unwrap_err();
        window.locate(u64::MAX, 2).unwrap_err();
        window.locate(0, 0).unwrap_err();
        ntb.flush_peer_window(1, 0x9ffc).unwrap();
        ntb.flush_peer_window(1, 0x9ffc).unwrap();
        ntb.flush_peer_window(1, 0).unwrap();
        ntb.flush_peer_window(1, 0x9ffe).unwrap_err();
        ntb.flush_peer_window(1, 0x9ffd).unwrap_err();
        ntb.flush_peer_window(2, 0).unwrap_err();
        assert!(matches!(
            ntb.peer_window(2),
            Err(NtbError::Window {
                window: 2,
                count: 2
            })
        ));
        assert!(matches!(
            ntb.ring_peer(1),
            Err(NtbError::Unsupported { .. })
        ));
        assert!(matches!(
            ntb.scratchpad(0),
            Err(NtbError::Unsupported { .. })
        ));
    }

    #[test]
    fn a_window_beyond_its_bar_is_refused() {
        let sysfs = fake(
            FUNCTION,
            1,
            2,
            &[("resource2", 0x10000), ("resource0", 0), ("resource4", 0)],
        );
        for window in [
            outbound(0x8000, 0x9000, false),
            outbound(0x8001, 0x1000, false),
            outbound(0x8000, 0x1001, false),
            outbound(0x8000, 0, false),
            outbound(u64::MAX - 0xfff, 0x1000, false),
            outbound(0, 0x1000, true),
            OutboundWindow {
                bar: 0,
                ..outbound(0, 0x1000, false)
            },
            OutboundWindow {
                function: "0000:65:00.2".parse().unwrap(),
                ..outbound(0, 0x1000, false)
            },
        ] {
            PciNtb::open(sysfs.root.path(), &[], std::slice::from_ref(&window)).unwrap_err();
        }
    }

    #[test]
    fn only_the_memory_behind_the_translation_is_shown() {
        let sysfs = fake(FUNCTION, 1, 2, &[]);
        let path = sysfs.root.path().join("dax0.0");
        std::fs::write(&path, vec![0; 0x8000]).unwrap();
        let inbound = |offset, size| InboundWindow {
            file: path.clone(),
            offset,
            size,
        };
        PciNtb::open(sysfs.root.path(), &[inbound(0x4000, 0x4001)], &[]).unwrap_err();
        let ntb = PciNtb::open(sysfs.root.path(), &[inbound(0x2000, 0x4000)], &[]).unwrap();
        let space = WindowSpace::new(ntb);
        let memory = std::fs::File::open(&path).unwrap();
        let slice = space
            .allocate(memory.as_fd(), 0x3000, 0x3000, true)
            .unwrap();
        assert_eq!((slice.window, slice.offset), (0, 0x1000));
        assert!(matches!(
            space.allocate(memory.as_fd(), 0x1000, 0x2000, true),
            Err(NtbError::NotShown { windows: 1, .. })
        ));
        space.free(slice).unwrap();
        space.free(slice).unwrap_err();
    }
}
