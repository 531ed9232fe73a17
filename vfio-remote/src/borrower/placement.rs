//! How stretches of memory get their way to the lender's device, and lose it.

use super::layout::{Backing, Layout, Placement, Requester, Stretch, Way};
use super::resolve::PeerPath;
use super::session::SessionError;
use crate::protocol::message::{PeerName, Place, Refusal, Request};
use farlane_ntb::{NtbError, WindowSlice, WindowSpace};
use farlane_pci::{AccessError, DmaMapping, DmaTarget, RemoteMemory};
use farlane_sys::chain;
use farlane_vfio_user::Client;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

/// Memory of the VMM that has no file.
#[derive(Debug)]
struct ClientMemory(Client);

impl RemoteMemory for ClientMemory {
    fn read(&self, address: u64, data: &mut [u8]) -> io::Result<()> {
        self.0.read(address, data).map_err(io::Error::other)
    }

    fn write(&self, address: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(address, data).map_err(io::Error::other)
    }
}

/// Asks the lender to map a stretch; the inner result is its refusal.
pub(super) fn ask(
    asked: &Requester<'_>,
    stretch: &Stretch,
    place: Place,
    peer: Option<&PeerName>,
) -> Result<Result<(), Refusal>, SessionError> {
    let request = Request::Map {
        fence: asked.user.fence,
        address: stretch.range.address,
        length: stretch.range.length,
        writable: stretch.writable,
        place,
        peer: peer.cloned(),
    };
    match asked.user.session.ask(request, &[], asked.deadline) {
        Ok(()) => Ok(Ok(())),
        Err(SessionError::Refused(refusal)) => Ok(Err(refusal)),
        Err(e) => Err(e),
    }
}

impl Layout {
    /// Has the device reach one stretch: through a window where there is one for it, else by
    /// messages.
    pub(super) fn show(
        &self,
        stretch: &Stretch,
        asked: &Requester<'_>,
    ) -> Result<(Placement, Option<PeerPath>), SessionError> {
        let mut reasons = Vec::new();
        let placed = match stretch.backing {
            Backing::Peer(id) => match self.targets.get(&id) {
                Some(target) => {
                    let found = self.resolve(stretch, target, asked, &mut reasons)?;
                    found.map(|(placed, path)| {
                        let is_reached = !matches!(placed, Placement::Nowhere(_));
                        (placed, is_reached.then_some(path))
                    })
                }
                None => None,
            },
            Backing::Ram => {
                let found = self.show_ram(stretch, asked, &mut reasons)?;
                found.map(|placed| (placed, None))
            }
            Backing::Vmm => {
                let target = self.vmm_memory(asked);
                let found = self.by_messages(stretch, target, None, asked, &mut reasons)?;
                found.map(|placed| (placed, None))
            }
        };
        Ok(placed.unwrap_or_else(|| {
            let why = reasons.join("; ");
            log::warn!("{} does not reach {}: {why}", self.name, stretch.range);
            (Placement::Nowhere(why), None)
        }))
    }

    fn show_ram(
        &self,
        stretch: &Stretch,
        asked: &Requester<'_>,
        reasons: &mut Vec<String>,
    ) -> Result<Option<Placement>, SessionError> {
        let range = self.ranges.get(&stretch.range.address);
        let Some((file, offset)) = range.and_then(|range| range.file.as_ref()) else {
            return Ok(None);
        };
        let found = self.by_window(stretch, (file, *offset), None, asked, reasons)?;
        if found.is_some() {
            return Ok(found);
        }
        let target = DmaTarget::File {
            file: Arc::clone(file),
            offset: *offset,
        };
        let why = reasons.join("; ");
        let found = self.by_messages(stretch, target, None, asked, reasons)?;
        if found.is_some() {
            log::warn!(
                "{} are reached by messages, which is slow: {why}",
                stretch.range
            );
        }
        Ok(found)
    }

    /// Whatever the VMM has there.
    pub(super) fn vmm_memory(&self, asked: &Requester<'_>) -> DmaTarget {
        DmaTarget::Remote(Arc::new(ClientMemory(asked.user.client.clone())))
    }

    /// Through a window of a bridge that can show the file.
    pub(super) fn by_window(
        &self,
        stretch: &Stretch,
        (file, offset): (&Arc<OwnedFd>, u64),
        peer: Option<&PeerName>,
        asked: &Requester<'_>,
        reasons: &mut Vec<String>,
    ) -> Result<Option<Placement>, SessionError> {
        for (number, way) in (0_u16..).zip(&self.ways) {
            let Way { name, windows, .. } = way;
            let Some(windows) = windows else {
                continue;
            };
            let slice =
                windows.allocate(file.as_fd(), offset, stretch.range.length, stretch.writable);
            let slice = match slice {
                Ok(slice) => slice,
                Err(e) => {
                    reasons.push(format!("{name}: {}", chain(&e)));
                    continue;
                }
            };
            let place = Place::Window {
                bridge: number,
                window: slice.window,
                offset: slice.offset,
            };
            let is_readable = way.is_compared;
            let readable = (file, offset, peer.is_some());
            if is_readable && let Err(e) = self.let_read(stretch, readable) {
                free(windows, slice);
                reasons.push(format!("{name}: it cannot be compared: {}", chain(&e)));
                continue;
            }
            let answer = ask(asked, stretch, place, peer);
            if !matches!(answer, Ok(Ok(()))) {
                free(windows, slice);
                if is_readable {
                    let _ = self.messages.unmap(stretch.range);
                }
            }
            match answer? {
                Ok(()) => {
                    return Ok(Some(Placement::Window {
                        way: number.into(),
                        slice,
                        is_readable,
                    }));
                }
                // No other way makes good that this one is wrong: whoever has set it up is to know.
                Err(Refusal::Window(why)) => {
                    let why = format!("{name} does not show it: {why}");
                    log::error!("{}: {why}", stretch.range);
                    return Ok(Some(Placement::Nowhere(why)));
                }
                Err(refusal) => reasons.push(format!("{name}: {refusal}")),
            }
        }
        Ok(None)
    }

    /// Lets the lender read memory that it is to see through a window, to compare.
    fn let_read(
        &self,
        stretch: &Stretch,
        (file, offset, is_device): (&Arc<OwnedFd>, u64, bool),
    ) -> Result<(), AccessError> {
        let file = Arc::clone(file);
        let mapping = DmaMapping {
            range: stretch.range,
            writable: false,
            target: match is_device {
                true => DmaTarget::Device { file, offset },
                false => DmaTarget::File { file, offset },
            },
        };
        self.messages.map(&mapping)
    }

    /// By messages over the session, which this end answers with `target`.
    pub(super) fn by_messages(
        &self,
        stretch: &Stretch,
        target: DmaTarget,
        peer: Option<&PeerName>,
        asked: &Requester<'_>,
        reasons: &mut Vec<String>,
    ) -> Result<Option<Placement>, SessionError> {
        let mapping = DmaMapping {
            range: stretch.range,
            writable: stretch.writable,
            target,
        };
        if let Err(e) = self.messages.map(&mapping) {
            reasons.push(format!("messages: {}", chain(&e)));
            return Ok(None);
        }
        let answer = ask(asked, stretch, Place::Messages, peer);
        if let Ok(Ok(())) = answer {
            return Ok(Some(Placement::Messages));
        }
        let _ = self.messages.unmap(stretch.range);
        if let Err(refusal) = answer? {
            reasons.push(format!("messages: {refusal}"));
        }
        Ok(None)
    }
}

pub(super) fn free(windows: &WindowSpace, slice: WindowSlice) {
    match windows.free(slice) {
        // The lender has gone, and the bridge with it.
        Ok(()) | Err(NtbError::LinkDown) => {}
        Err(e) => log::debug!("A window cannot be freed: {}", chain(&e)),
    }
}
