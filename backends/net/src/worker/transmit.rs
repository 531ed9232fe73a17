//! Frames from the guest to the port.

use super::buffers::{MAX_BUFFER, MAX_RUNS};
use super::context::Context;
use super::virtqueue::Virtqueue;
use super::{AT_ONCE, Framing, QueueError, note, port_failed};
use crate::bits::FrameHeader;
use crate::counters::count;
use crate::flow::{PARSE_BYTES, parse};
use crate::header::check_sent;
use crate::port::PortQueue;
use farlane_abi::width::to_u64;
use farlane_daemon::warn_limited;
use farlane_vhost_user::chain::Chain;
use farlane_vhost_user::segment;
use farlane_zero_copy::View;
use farlane_zero_copy::slices::{GuestRuns, GuestSlices, SliceList};
use farlane_zero_copy::topology::Node;
use probe::probe;
use std::mem::take;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros as _, IntoBytes as _};

/// Buffers whose frames are gone are shown to the driver together, when there are so many, or after
/// so long, or before the worker sleeps: no one waits for them, and each showing may cost the guest
/// an interrupt.
const SHOWN_TOGETHER: u16 = 64;
const SHOWN_AFTER: Duration = Duration::from_micros(100);

/// A transmit queue in use.
pub(super) struct Transmit {
    pub queue: Virtqueue,
    framing: Framing,
    /// The port has no room.
    pub blocked: bool,
    /// Where bytes lie that were moved since somebody looked.
    pub moved: Vec<(Node, u64)>,
    chain: Chain,
    list: SliceList,
    /// For frames in more runs of memory than a port takes.
    scratch: Vec<u8>,
    /// Since when used buffers wait to be shown.
    hidden: Option<Instant>,
    /// Since when the first frame waits for room in the port.
    waits: Option<Instant>,
}

/// What became of a frame.
enum SendOutcome {
    Yes(u64),
    /// The port has no room now.
    Later,
    /// The port does not take it.
    Refused,
    /// It makes no sense.
    Invalid,
}

impl Transmit {
    pub fn new(queue: Virtqueue, framing: Framing) -> Self {
        Self {
            queue,
            framing,
            blocked: false,
            moved: Vec::new(),
            chain: Chain::default(),
            list: SliceList::default(),
            scratch: Vec::new(),
            hidden: None,
            waits: None,
        }
    }

    /// None wait any more.
    pub fn shown(&mut self) {
        self.hidden = None;
    }

    /// Whether used buffers are to be shown to the driver now.
    pub fn is_to_show(&mut self) -> bool {
        let waiting = self.queue.progress.unpublished();
        let since = match self.hidden {
            _ if waiting == 0 => None,
            Some(since) => Some(since),
            None => Some(Instant::now()),
        };
        let many = SHOWN_TOGETHER.min(self.queue.size() / 4);
        let now = waiting > 0
            && (self.blocked
                || waiting >= many
                || since.is_some_and(|since| since.elapsed() >= SHOWN_AFTER));
        self.hidden = since.filter(|_| !now);
        now
    }

    /// Moves frames from the guest. Returns whether there were any.
    pub fn turn(
        &mut self,
        context: &Context,
        port: &mut dyn PortQueue,
    ) -> Result<bool, QueueError> {
        self.blocked = false;
        if self.queue.broken {
            return Ok(false);
        }
        let rings = self.queue.rings()?;
        let counters = &context.interface.counters;
        // Of the frames, those that have not waited for room.
        let (mut frames, mut total, mut prompt) = (0, 0, 0);
        let (mut worked, mut since) = (false, None);
        for _ in 0..AT_ONCE {
            let Some(head) = self.queue.progress.peek(&rings, 0)? else {
                break;
            };
            self.chain.follow(&rings, head)?;
            let since = *since.get_or_insert_with(Instant::now);
            let interface = Arc::as_ptr(&context.interface);
            let queue = self.queue.index();
            probe!(farlane, net_tx_begin, interface, queue, head);
            match self.send(context, port, rings.view())? {
                SendOutcome::Yes(bytes) => {
                    match self.waits.take() {
                        Some(since) => context.interface.times.transmit.add(since.elapsed()),
                        None => prompt += 1,
                    }
                    frames += 1;
                    total += bytes;
                    probe!(farlane, net_tx_end, interface, queue, head, bytes);
                }
                SendOutcome::Later => {
                    self.waits.get_or_insert(since);
                    self.blocked = true;
                    break;
                }
                SendOutcome::Refused => count(&counters.tx_dropped, 1),
                SendOutcome::Invalid => count(&counters.tx_invalid, 1),
            }
            worked = true;
            self.waits = None;
            self.queue.progress.skip(1);
            self.queue.progress.put(&rings, head, 0);
        }
        if worked && let Err(e) = port.flush() {
            port_failed(&context.interface, "send", &e);
        }
        if let Some(since) = since.filter(|_| prompt > 0) {
            let transmit = &context.interface.times.transmit;
            transmit.add_each(since.elapsed(), prompt);
        }
        if frames > 0 {
            count(&counters.tx_frames, frames);
            count(&counters.tx_bytes, total);
        }
        Ok(worked)
    }

    /// Sends the frame that the chain is.
    fn send(
        &mut self,
        context: &Context,
        port: &mut dyn PortQueue,
        view: &View,
    ) -> Result<SendOutcome, QueueError> {
        let bytes = usize::try_from(segment::total(&self.chain.readable));
        let Some(bytes) = bytes.ok().filter(|bytes| *bytes <= MAX_BUFFER) else {
            return Ok(SendOutcome::Invalid);
        };
        let mut memory = GuestSlices::new(view, take(&mut self.list), false);
        for segment in &self.chain.readable {
            memory.push(segment.address, segment.bytes)?;
        }
        let sent = self.send_memory(context, port, &memory, bytes);
        self.list = memory.into_list();
        Ok(sent)
    }

    fn send_memory(
        &mut self,
        context: &Context,
        port: &mut dyn PortQueue,
        memory: &GuestSlices<&View>,
        bytes: usize,
    ) -> SendOutcome {
        let (interface, header_bytes) = (&context.interface, self.framing.header_bytes);
        let Some(bytes) = bytes.checked_sub(header_bytes) else {
            return SendOutcome::Invalid;
        };
        let mut header = FrameHeader::new_zeroed();
        let to = header.as_mut_bytes().get_mut(..header_bytes);
        memory.copy_to(to.unwrap_or_default());
        let header = match check_sent(header, bytes, self.framing.sends) {
            Ok(header) => header,
            Err(e) => {
                log::debug!("Interface {}: {e}", interface.name);
                return SendOutcome::Invalid;
            }
        };
        let guest = memory.at(header_bytes);
        let result = if memory.vectors().len() <= MAX_RUNS {
            port.send(&header, guest, &[])
        } else {
            self.scratch.resize(bytes, 0);
            guest.copy_to(&mut self.scratch);
            port.send(&header, GuestRuns::default(), &self.scratch)
        };
        match result {
            Ok(true) => (),
            Ok(false) => return SendOutcome::Later,
            Err(e) => {
                warn_limited!(
                    interface.limit,
                    "Interface {}: the port refuses a frame of the guest: {e}",
                    interface.name
                );
                return SendOutcome::Refused;
            }
        }
        for segment in &self.chain.readable {
            context.places.cut(*segment, |node, bytes| {
                let locality = &interface.locality.transmit;
                locality.add(node, context.node, 0, bytes);
                note(&mut self.moved, node, bytes);
            });
        }
        if let Some(table) = &context.table {
            // The guest may change its frame: what is learned is of a copy.
            let mut prefix = [0; PARSE_BYTES];
            let length = guest.copy_to(&mut prefix);
            let parsed = parse(prefix.get(..length).unwrap_or_default());
            table.transmitted(context.pair.id, &parsed, context.now_us);
        }
        SendOutcome::Yes(to_u64(bytes))
    }
}
