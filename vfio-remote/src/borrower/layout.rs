//! Memory of the VM, and how the lender's device reaches it.

use super::session::{Session, SessionError};
use crate::bridge;
use crate::link::message::{Bridge, Fence, Place, Request};
use farlane_ntb::{Ntb, NtbError, WindowSlice, WindowSpace};
use farlane_pci::{DmaMapping, DmaSpace, DmaTarget, RemoteMemory};
use farlane_vfio_user::{Client, DmaMap};
use farlane_zero_copy::chain;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

/// Memory of the monitor that has no file.
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

/// How the device reaches a range.
enum Placed {
    /// Through a window of one of the bridges.
    Window { way: usize, slice: WindowSlice },
    /// By messages.
    Messages,
}

struct Range {
    size: u64,
    writable: bool,
    file: Option<(Arc<OwnedFd>, u64)>,
    placed: Option<Placed>,
}

/// A bridge to the lender; none where only the lender knows it.
struct Way {
    name: String,
    windows: Option<WindowSpace>,
}

/// All memory of the VM.
pub(crate) struct Layout {
    ranges: BTreeMap<u64, Range>,
    ways: Vec<Way>,
    /// What is reached by messages now.
    messages: Arc<DmaSpace>,
}

impl Layout {
    pub fn new() -> Self {
        Self {
            ranges: BTreeMap::new(),
            ways: Vec::new(),
            messages: DmaSpace::new(),
        }
    }

    /// What the lender may reach by messages.
    pub fn messages(&self) -> Arc<DmaSpace> {
        Arc::clone(&self.messages)
    }

    /// Takes the bridges of a new link. `descriptors` begin with theirs, which are taken off.
    pub fn set_bridges(
        &mut self,
        bridges: &[Bridge],
        own: &[(String, Arc<dyn Ntb>)],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<(), SessionError> {
        self.ways.clear();
        for bridge in bridges {
            let way = match bridge {
                Bridge::Shm => {
                    if descriptors.is_empty() {
                        return Err(SessionError::Nonsense);
                    }
                    let socket = descriptors.remove(0);
                    let ntb =
                        bridge::shm(socket).map_err(|e| SessionError::Io(io::Error::other(e)))?;
                    Way {
                        name: "shm".to_owned(),
                        windows: Some(WindowSpace::new(ntb)),
                    }
                }
                Bridge::Named(name) => {
                    let ntb = own.iter().find(|(own, _)| own == name);
                    if ntb.is_none() {
                        log::debug!(
                            "The lender has a window {name}, of which nothing is known here"
                        );
                    }
                    Way {
                        name: name.clone(),
                        windows: ntb.map(|(_, ntb)| WindowSpace::new(Arc::clone(ntb))),
                    }
                }
            };
            self.ways.push(way);
        }
        Ok(())
    }

    /// The VM has memory there.
    pub fn add(&mut self, map: DmaMap) {
        let range = Range {
            size: map.size,
            writable: map.writable,
            file: map.file.map(|(file, offset)| (Arc::new(file), offset)),
            placed: None,
        };
        self.ranges.insert(map.address, range);
    }

    /// The VM has no memory there any more. The device does not reach it when this returns.
    pub fn remove(&mut self, address: u64, user: Option<(&Session, Fence)>) {
        self.hide(address, user);
        self.ranges.remove(&address);
    }

    /// Has the device reach all memory.
    pub fn show_all(
        &mut self,
        session: &Session,
        fence: Fence,
        client: &Client,
    ) -> Result<(), SessionError> {
        let addresses: Vec<u64> = self.ranges.keys().copied().collect();
        addresses
            .into_iter()
            .try_for_each(|address| self.show(address, session, fence, client))
    }

    /// Has the device reach one range: through a window where there is one for it, else by
    /// messages. A range that it cannot reach at all is said to the log, not to the VM: a VM has
    /// ranges, such as its firmware, that no device needs.
    pub fn show(
        &mut self,
        address: u64,
        session: &Session,
        fence: Fence,
        client: &Client,
    ) -> Result<(), SessionError> {
        let Some(range) = self.ranges.get_mut(&address).filter(|r| r.placed.is_none()) else {
            return Ok(());
        };
        let ask = |place| {
            let request = Request::Map {
                fence,
                address,
                length: range.size,
                writable: range.writable,
                place,
            };
            match session.ask(request, &[]) {
                Err(SessionError::Refused(refusal)) => Ok(Err(refusal)),
                other => other.map(Ok),
            }
        };
        let mut reasons = Vec::new();
        if let Some((file, offset)) = &range.file {
            for (way, Way { name, windows }) in self.ways.iter().enumerate() {
                let Some(windows) = windows else {
                    continue;
                };
                let slice =
                    match windows.allocate(file.as_fd(), *offset, range.size, range.writable) {
                        Ok(slice) => slice,
                        Err(e) => {
                            reasons.push(format!("{name}: {}", chain(&e)));
                            continue;
                        }
                    };
                let place = Place::Window {
                    bridge: u16::try_from(way).unwrap_or(u16::MAX),
                    window: slice.window,
                    offset: slice.offset,
                };
                match ask(place) {
                    Ok(Ok(())) => {
                        range.placed = Some(Placed::Window { way, slice });
                        return Ok(());
                    }
                    Ok(Err(refusal)) => {
                        reasons.push(format!("{name}: {refusal}"));
                        free(windows, slice);
                    }
                    Err(e) => {
                        free(windows, slice);
                        return Err(e);
                    }
                }
            }
        }
        let target = match &range.file {
            Some((file, offset)) => DmaTarget::File {
                file: Arc::clone(file),
                offset: *offset,
            },
            None => DmaTarget::Remote(Arc::new(ClientMemory(client.clone()))),
        };
        let mapping = DmaMapping {
            address,
            length: range.size,
            writable: range.writable,
            target,
        };
        if let Err(e) = self.messages.map(&mapping) {
            reasons.push(format!("messages: {}", chain(&e)));
        } else {
            match ask(Place::Messages) {
                Ok(Ok(())) => {
                    if range.file.is_some() {
                        log::warn!(
                            "{:#x} bytes at {address:#x} are reached by messages, which is slow: {}",
                            range.size,
                            reasons.join("; ")
                        );
                    }
                    range.placed = Some(Placed::Messages);
                    return Ok(());
                }
                refused_or_lost => {
                    let _ = self.messages.unmap(address, range.size);
                    reasons.push(format!(
                        "messages: {}",
                        refused_or_lost?.map_or_else(|r| r.to_string(), |()| String::new())
                    ));
                }
            }
        }
        log::warn!(
            "The device does not reach {:#x} bytes at {address:#x}: {}",
            range.size,
            reasons.join("; ")
        );
        Ok(())
    }

    /// Has the device reach one range no more. Without a `user` of the device it does not reach
    /// anything, and there is nobody to be asked.
    fn hide(&mut self, address: u64, user: Option<(&Session, Fence)>) {
        let Some(range) = self.ranges.get_mut(&address) else {
            return;
        };
        let Some(placed) = range.placed.take() else {
            return;
        };
        if let Some((session, fence)) = user {
            let request = Request::Unmap {
                fence,
                address,
                length: range.size,
            };
            if let Err(e) = session.ask(request, &[]) {
                log::debug!("Memory at {address:#x} cannot be taken away: {}", chain(&e));
            }
        }
        match placed {
            Placed::Window { way, slice } => {
                if let Some(windows) = self.ways.get(way).and_then(|w| w.windows.as_ref()) {
                    free(windows, slice);
                }
            }
            Placed::Messages => {
                if let Err(e) = self.messages.unmap(address, range.size) {
                    log::debug!("Memory at {address:#x} was not mapped: {}", chain(&e));
                }
            }
        }
    }

    /// Has the device reach nothing.
    pub fn hide_all(&mut self, user: Option<(&Session, Fence)>) {
        let addresses: Vec<u64> = self.ranges.keys().copied().collect();
        for address in addresses {
            self.hide(address, user);
        }
    }
}

fn free(windows: &WindowSpace, slice: WindowSlice) {
    match windows.free(slice) {
        // The lender has gone, and the bridge with it.
        Ok(()) | Err(NtbError::LinkDown) => {}
        Err(e) => log::debug!("A window cannot be freed: {}", chain(&e)),
    }
}
