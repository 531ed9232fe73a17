use super::*;
use crate::{Limits, PeerWindow, WindowLimits};
use proptest::prelude::*;
use rustix::fs::MemfdFlags;
use std::os::fd::{AsFd as _, OwnedFd};

/// A bridge that records its translations and refuses what hardware would.
#[derive(Debug)]
struct Hardware {
    limits: Limits,
    set: Mutex<Vec<Option<Translation>>>,
    event: OwnedFd,
}

impl Hardware {
    fn new(windows: Vec<WindowLimits>) -> Arc<Self> {
        Arc::new(Self {
            set: Mutex::new(vec![None; windows.len()]),
            limits: Limits {
                windows,
                peer_windows: 0,
                scratchpads: 0,
                doorbells: 0,
            },
            event: crate::event::create().unwrap(),
        })
    }

    fn shown(&self) -> Vec<Option<Translation>> {
        self.set.lock().unwrap().clone()
    }
}

impl Ntb for Hardware {
    fn kind(&self) -> &'static str {
        "test"
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn link(&self) -> LinkState {
        LinkState::Up
    }

    fn link_event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn clear_link_event(&self) -> LinkState {
        self.link()
    }

    fn set_translation(&self, window: u32, shown: FileRange<'_>) -> Result<(), NtbError> {
        self.limits.check(window, shown.offset, shown.length)?;
        Examined::new(shown.file)?.check_range(shown.offset, shown.length)?;
        let slot = &mut self.set.lock().unwrap()[usize::try_from(window).unwrap()];
        assert!(slot.is_none(), "window {window} is set twice");
        *slot = Some(Translation {
            file: crate::FileId::of(shown.file)?,
            offset: shown.offset,
            length: shown.length,
            writable: shown.writable,
        });
        Ok(())
    }

    fn clear_translation(&self, window: u32) -> Result<(), NtbError> {
        let slot = &mut self.set.lock().unwrap()[usize::try_from(window).unwrap()];
        assert!(slot.take().is_some(), "window {window} is cleared twice");
        Ok(())
    }

    fn peer_window(&self, _window: u32) -> Result<PeerWindow, NtbError> {
        Err(self.without("windows of the other end"))
    }
}

fn memory(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}

fn limits(alignment: u64, max_size: u64) -> WindowLimits {
    WindowLimits {
        address_alignment: alignment,
        size_alignment: alignment,
        max_size,
    }
}

#[test]
fn what_a_window_shows_already_costs_no_other() {
    let hardware = Hardware::new(vec![limits(0x1000, 0x10000); 2]);
    let space = WindowSpace::new(hardware.clone());
    let file = memory(0x10000);
    let whole = space.allocate(file.as_fd(), 0, 0x10000, true).unwrap();
    let part = space.allocate(file.as_fd(), 0x3000, 0x1000, false).unwrap();
    assert_eq!((part.window, part.offset), (whole.window, 0x3000));
    space.free(whole).unwrap();
    assert!(hardware.shown()[0].is_some());
    space.free(part).unwrap();
    assert_eq!(hardware.shown(), [None, None]);
    assert!(matches!(
        space.free(part),
        Err(NtbError::NotAllocated { .. })
    ));
}

#[test]
fn a_file_with_many_ranges_needs_one_window() {
    let hardware = Hardware::new(vec![limits(0x1000, 0x1000), limits(0x1000, 0x10_0000)]);
    let space = WindowSpace::new(hardware.clone());
    let file = memory(0x10_0800);
    let slices: Vec<_> = (0..0x100)
        .map(|page| space.allocate(file.as_fd(), page * 0x1000, 0x1000, true))
        .map(Result::unwrap)
        .collect();
    assert!(slices.iter().all(|slice| slice.window == 1));
    assert_eq!(slices[7].offset, 0x7000);
    assert_eq!(hardware.shown()[1].unwrap().length, 0x10_0000);
    // Of a larger file just the range is shown, if there is a window for that.
    let larger = memory(0x20_0000);
    let slice = space
        .allocate(larger.as_fd(), 0x8000, 0x1000, true)
        .unwrap();
    assert_eq!((slice.window, slice.offset), (0, 0));
}

#[test]
fn what_may_only_be_read_is_not_used_for_writing() {
    let hardware = Hardware::new(vec![limits(0x1000, 0x10000); 2]);
    let space = WindowSpace::new(hardware.clone());
    let file = memory(0x10000);
    let read = space.allocate(file.as_fd(), 0, 0x1000, false).unwrap();
    let write = space.allocate(file.as_fd(), 0, 0x1000, true).unwrap();
    assert_ne!(read.window, write.window);
    let writable: Vec<_> = hardware
        .shown()
        .iter()
        .map(|t| t.unwrap().writable)
        .collect();
    assert_eq!(writable, [false, true]);
}

#[test]
fn refusals_say_the_numbers() {
    let space = WindowSpace::new(Hardware::new(vec![limits(0x1000, 0x4000)]));
    let (file, other) = (memory(0x10000), memory(0x1000));
    let refusal = |fd: &OwnedFd, offset, length| {
        let error = space.allocate(fd.as_fd(), offset, length, true);
        error.unwrap_err().to_string()
    };
    assert_eq!(
        refusal(&file, 0x800, 0x4000),
        "0x5000 bytes do not fit into a window of 0x4000"
    );
    assert_eq!(
        refusal(&file, 0x8000, 0x8001),
        "0x8001 bytes at 0x8000 end beyond 0x10000"
    );
    assert_eq!(refusal(&file, 5, 0), "0x0 bytes at 0x5 are no range");
    space.allocate(file.as_fd(), 0, 0x4000, true).unwrap();
    assert_eq!(
        refusal(&other, 0, 0x1000),
        "All 1 windows are in use: 0x1000 more bytes cannot be shown"
    );
}

#[test]
fn a_file_that_ends_before_the_alignment_is_refused() {
    let space = WindowSpace::new(Hardware::new(vec![limits(0x2000, 0x4000)]));
    let file = memory(0x3000);
    assert!(matches!(
        space.allocate(file.as_fd(), 0x2000, 0x1000, true),
        Err(NtbError::Beyond { size: 0x3000, .. })
    ));
}

#[derive(Clone, Debug)]
enum Step {
    Allocate {
        file: usize,
        offset: u64,
        length: u64,
        writable: bool,
    },
    Free(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let allocate = (0_usize..3, 0_u64..0x12000, 0_u64..0x9000, any::<bool>()).prop_map(
        |(file, offset, length, writable)| Step::Allocate {
            file,
            offset,
            length,
            writable,
        },
    );
    prop_oneof![3 => allocate, 2 => any::<usize>().prop_map(Step::Free)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn every_slice_shows_its_bytes_until_it_is_freed(
        windows in prop::collection::vec(
            (0_u32..3, 1_u64..9).prop_map(|(shift, size)| limits(0x1000 << shift, size * 0x1000)),
            0..4,
        ),
        steps in prop::collection::vec(step(), 0..60),
    ) {
        let hardware = Hardware::new(windows.clone());
        let space = WindowSpace::new(hardware.clone());
        let files = [memory(0x10000), memory(0x10000), memory(0x7000)];
        let sizes = [0x10000, 0x10000, 0x7000];
        let ids: Vec<_> = files.iter().map(|f| crate::FileId::of(f.as_fd()).unwrap()).collect();
        let mut held: Vec<(WindowSlice, usize, u64, bool)> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate { file, offset, length, writable } => {
                    let in_file = length > 0 && offset + length <= sizes[file];
                    let before = hardware.shown();
                    let covered = before.iter().flatten().any(|t| {
                        t.locate(ids[file], offset, length, writable).is_some()
                    });
                    let fits_free = windows.iter().zip(&before).any(|(w, shown)| {
                        let from = offset / w.address_alignment * w.address_alignment;
                        let bytes = (offset + length - from).next_multiple_of(w.size_alignment);
                        shown.is_none() && bytes <= w.max_size && from + bytes <= sizes[file]
                    });
                    let got = space.allocate(files[file].as_fd(), offset, length, writable);
                    prop_assert_eq!(got.is_ok(), in_file && (covered || fits_free));
                    if covered || got.is_err() {
                        prop_assert_eq!(before, hardware.shown());
                    }
                    if let Ok(slice) = got {
                        held.push((slice, file, offset, writable));
                    }
                }
                Step::Free(_) if held.is_empty() => {}
                Step::Free(which) => {
                    let (slice, ..) = held.swap_remove(which % held.len());
                    space.free(slice).unwrap();
                }
            }
            let shown = hardware.shown();
            for &(slice, file, offset, writable) in &held {
                let translation = shown[usize::try_from(slice.window).unwrap()].unwrap();
                let at = translation.locate(ids[file], offset, slice.length, writable);
                prop_assert_eq!(at, Some(slice.offset));
            }
            for (use_, shown) in space.usage().iter().zip(shown) {
                prop_assert_eq!(use_.translation, shown);
                prop_assert_eq!(use_.users > 0, shown.is_some());
            }
        }
        for (slice, ..) in held {
            space.free(slice).unwrap();
        }
        prop_assert!(hardware.shown().iter().all(Option::is_none));
    }
}
