//! How a device reaches memory of another one of its VM: the resolvers of device-lending-2019,
//! section 6, the shortest path first.

use super::layout::{Layout, Placement, Requester, Stretch};
use super::peers::Target;
use super::placement::ask;
use super::session::SessionError;
use crate::protocol::message::{PeerKey, PeerName, Place};
use farlane_pci::{DmaTarget, Region};
use farlane_zero_copy::broker::Origin;
use std::fmt;
use std::sync::Arc;

/// A window of a device's lender that shows a BAR of a device of another lender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerWindow {
    /// Name of the window.
    pub window: String,
    /// The other lender.
    pub lender: String,
    /// Its name of the other device.
    pub device: String,
    /// The BAR, which the window shows from its beginning on.
    pub region: Region,
}

/// By which path a device reaches another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PeerPath {
    /// Both are of one lender.
    SameLender,
    /// The other one's memory is here, and shown to the lender as the VM's own.
    Local,
    /// The lender has a window to the other one's.
    Window,
    /// By messages: of this borrower to the other lender, or of the VMM.
    Messages,
}

impl fmt::Display for PeerPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SameLender => "same lender",
            Self::Local => "local",
            Self::Window => "window",
            Self::Messages => "messages",
        })
    }
}

impl Layout {
    /// Has the device reach memory of another one. None where no path leads there.
    pub(super) fn resolve(
        &self,
        stretch: &Stretch,
        target: &Target,
        asked: &Requester<'_>,
        reasons: &mut Vec<String>,
    ) -> Result<Option<(Placement, PeerPath)>, SessionError> {
        let origin = target.publication.origin.as_ref();
        let peer = name_of(origin);
        let found = match self.same_lender(stretch, origin, &peer, asked, reasons)? {
            Some(placed) => Some((placed, PeerPath::SameLender)),
            None => self.other_lender(stretch, target, &peer, asked, reasons)?,
        };
        if let Some((placed, path)) = &found
            && !matches!(placed, Placement::Nowhere(_))
        {
            log::info!(
                "{} reaches {}/{} ({}): {path}",
                self.name,
                peer.lender,
                peer.device,
                stretch.range
            );
        }
        Ok(found)
    }

    /// The lender maps its own other device.
    fn same_lender(
        &self,
        stretch: &Stretch,
        origin: Option<&Origin>,
        peer: &PeerName,
        asked: &Requester<'_>,
        reasons: &mut Vec<String>,
    ) -> Result<Option<Placement>, SessionError> {
        // The other device's key is for nobody but its own lender, and the one that asks that for a
        // sublease.
        let session = &asked.user.session;
        let is_same = |o: &&Origin| session.is_proved && o.lender == session.lender;
        let Some(origin) = origin.filter(is_same) else {
            return Ok(None);
        };
        let Some(region) = Region::from_index(u32::from(origin.region)) else {
            return Ok(None);
        };
        let place = Place::Device {
            device: origin.device.clone(),
            region,
            offset: origin.offset,
            key: PeerKey(origin.key),
        };
        Ok(match ask(asked, stretch, place, Some(peer))? {
            Ok(()) => Some(Placement::There),
            Err(refusal) => {
                reasons.push(format!("same lender: {refusal}"));
                None
            }
        })
    }

    fn other_lender(
        &self,
        stretch: &Stretch,
        target: &Target,
        peer: &PeerName,
        asked: &Requester<'_>,
        reasons: &mut Vec<String>,
    ) -> Result<Option<(Placement, PeerPath)>, SessionError> {
        let publication = &target.publication;
        // Its bytes are at hand: as memory of the VM.
        if let Some((file, offset)) = &publication.file {
            let place = (file, *offset);
            if let Some(placed) = self.by_window(stretch, place, Some(peer), asked, reasons)? {
                return Ok(Some((placed, PeerPath::Local)));
            }
        }
        // Between the two lenders.
        let is_proved = asked.user.session.is_proved;
        let origin = publication.origin.as_ref().filter(|_| is_proved);
        if let Some(place) = origin.and_then(|o| self.shown(o)) {
            match ask(asked, stretch, place, Some(peer))? {
                Ok(()) => return Ok(Some((Placement::There, PeerPath::Window))),
                Err(refusal) => reasons.push(format!("window: {refusal}")),
            }
        }
        let memory = match (&publication.file, &target.reach) {
            (Some((file, offset)), _) => DmaTarget::Device {
                file: Arc::clone(file),
                offset: *offset,
            },
            (None, Some(reach)) => DmaTarget::Remote(Arc::clone(reach)),
            (None, None) => self.vmm_memory(asked),
        };
        let placed = self.by_messages(stretch, memory, Some(peer), asked, reasons)?;
        Ok(placed.map(|placed| (placed, PeerPath::Messages)))
    }

    /// Which window of the lender shows a place of another lender's device.
    fn shown(&self, origin: &Origin) -> Option<Place> {
        let region = Region::from_index(u32::from(origin.region))?;
        let window = self.peer_windows.iter().find(|w| {
            w.lender == origin.lender && w.device == origin.device && w.region == region
        })?;
        let bridge = self.ways.iter().position(|way| way.name == window.window)?;
        Some(Place::Peer {
            bridge: u16::try_from(bridge).ok()?,
            region,
            offset: origin.offset,
            key: PeerKey(origin.key),
        })
    }
}

fn name_of(origin: Option<&Origin>) -> PeerName {
    let unknown = || "unknown".to_owned();
    PeerName {
        lender: origin.map_or_else(unknown, |o| o.lender.clone()),
        device: origin.map_or_else(unknown, |o| o.device.clone()),
    }
}
