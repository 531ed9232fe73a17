//! Frames from the guest to the port.

use super::buffers::{MAX_PIECES, Piece, copy_out, most_bytes, resolve, skip_bytes};
use super::context::Context;
use super::end::End;
use super::{AT_ONCE, Broken, Terms, note, port_failed, vector};
use crate::bits::{FrameHeader, HEADER_BYTES};
use crate::counters::count;
use crate::flow::{FlowTable, PARSE_BYTES, parse};
use crate::header::{MAX_FRAME, check_sent};
use crate::port::PortQueue;
use farlane_daemon::warn_limited;
use farlane_vhost_user::chain::Chain;
use farlane_vhost_user::segment;
use farlane_zero_copy::topology::Node;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros as _, IntoBytes as _};

/// Buffers whose frames are gone are shown to the driver together, when there are so many, or after
/// so long, or before the worker sleeps: no one waits for them, and each showing may cost the guest
/// an interrupt.
const SHOWN_TOGETHER: u16 = 64;
const SHOWN_AFTER: Duration = Duration::from_micros(100);

/// A transmit queue in use.
pub(super) struct Transmit {
    pub end: End,
    terms: Terms,
    /// The port has no room.
    pub blocked: bool,
    /// Where bytes lie that were moved since somebody looked.
    pub moved: Vec<(Node, u64)>,
    chain: Chain,
    pieces: Vec<Piece>,
    vectors: Vec<libc::iovec>,
    /// For frames in more pieces than a port takes.
    scratch: Vec<u8>,
    /// Since when used buffers wait to be shown.
    hidden: Option<Instant>,
}

/// What became of a frame.
enum Sent {
    Yes(usize),
    /// The port has no room now.
    Later,
    /// The port does not take it.
    Refused,
    /// It makes no sense.
    Invalid,
}

impl Transmit {
    pub fn new(end: End, terms: Terms) -> Self {
        Self {
            end,
            terms,
            blocked: false,
            moved: Vec::new(),
            chain: Chain::default(),
            pieces: Vec::new(),
            vectors: Vec::new(),
            scratch: Vec::new(),
            hidden: None,
        }
    }

    /// None wait any more.
    pub fn shown(&mut self) {
        self.hidden = None;
    }

    /// Whether used buffers are to be shown to the driver now.
    pub fn is_to_show(&mut self) -> bool {
        let waiting = self.end.progress.unpublished();
        let since = match self.hidden {
            _ if waiting == 0 => None,
            Some(since) => Some(since),
            None => Some(Instant::now()),
        };
        let many = SHOWN_TOGETHER.min(self.end.size() / 4);
        let now = waiting > 0
            && (self.blocked
                || waiting >= many
                || since.is_some_and(|since| since.elapsed() >= SHOWN_AFTER));
        self.hidden = since.filter(|_| !now);
        now
    }

    /// The pieces from byte `skip` on.
    fn pieces(&self, skip: usize) -> impl Iterator<Item = Piece> {
        skip_bytes(self.pieces.iter(), skip)
    }

    /// Moves frames from the guest. Returns whether there were any.
    pub fn turn(&mut self, context: &Context, port: &mut dyn PortQueue) -> Result<bool, Broken> {
        self.blocked = false;
        if self.end.broken {
            return Ok(false);
        }
        let rings = self.end.rings()?;
        let counters = &context.interface.counters;
        let (mut frames, mut total) = (0, 0);
        let mut worked = false;
        for _ in 0..AT_ONCE {
            let Some(head) = self.end.progress.peek(&rings, 0)? else {
                break;
            };
            self.chain.follow(&rings, head)?;
            self.pieces.clear();
            let readable = &self.chain.readable;
            let sent = if segment::total(readable) > most_bytes() {
                Sent::Invalid
            } else {
                resolve(&rings, readable, false, &context.places, &mut self.pieces)?;
                self.send(context, port)
            };
            match sent {
                Sent::Yes(bytes) => {
                    if let Some(table) = &context.table {
                        self.learn(context, table);
                    }
                    frames += 1;
                    total += u64::try_from(bytes).unwrap_or(0);
                }
                Sent::Later => {
                    self.blocked = true;
                    break;
                }
                Sent::Refused => count(&counters.tx_dropped, 1),
                Sent::Invalid => count(&counters.tx_invalid, 1),
            }
            worked = true;
            self.end.progress.skip(1);
            self.end.progress.put(&rings, head, 0);
        }
        if worked && let Err(e) = port.flush() {
            port_failed(&context.interface, "send", &e);
        }
        if frames > 0 {
            count(&counters.tx_frames, frames);
            count(&counters.tx_bytes, total);
        }
        Ok(worked)
    }

    /// The flow table learns of the frame that was sent last.
    fn learn(&self, context: &Context, table: &FlowTable) {
        // The guest may change its frame: what is learned is of a copy.
        let mut prefix = [0; PARSE_BYTES];
        let length = copy_out(self.pieces(self.terms.header_bytes), &mut prefix);
        let parsed = parse(prefix.get(..length).unwrap_or_default());
        table.transmitted(context.pair.index, &parsed, context.now_us);
    }

    /// Sends the frame that the pieces are.
    fn send(&mut self, context: &Context, port: &mut dyn PortQueue) -> Sent {
        let interface = &context.interface;
        let header_bytes = self.terms.header_bytes;
        let all = self.pieces.iter().map(|piece| piece.bytes);
        let total = all.fold(0, usize::saturating_add);
        let Some(frame) = total.checked_sub(header_bytes) else {
            return Sent::Invalid;
        };
        let mut header = FrameHeader::new_zeroed();
        let bytes = header.as_mut_bytes();
        copy_out(
            self.pieces.iter().copied(),
            bytes.get_mut(..header_bytes).unwrap_or_default(),
        );
        let mut header = match check_sent(header, frame, self.terms.sends) {
            Ok(header) => header,
            Err(e) => {
                log::debug!("Interface {}: {e}", interface.name);
                return Sent::Invalid;
            }
        };
        let mut vectors = std::mem::take(&mut self.vectors);
        vectors.clear();
        vectors.push(vector(std::ptr::from_mut(&mut header).cast(), HEADER_BYTES));
        if self.pieces.len() <= MAX_PIECES {
            vectors.extend(self.pieces(header_bytes).map(|p| vector(p.base, p.bytes)));
        } else {
            let mut scratch = std::mem::take(&mut self.scratch);
            scratch.resize(frame.min(MAX_FRAME), 0);
            copy_out(self.pieces(header_bytes), &mut scratch);
            vectors.push(vector(scratch.as_mut_ptr(), scratch.len()));
            self.scratch = scratch;
        }
        // SAFETY: the header is ours, as is the scratch memory; the pieces are memory of the view
        // that the rings hold, which the caller has.
        let result = unsafe { port.send(&vectors) };
        self.vectors = vectors;
        match result {
            Ok(true) => {
                for piece in &self.pieces {
                    let bytes = u64::try_from(piece.bytes).unwrap_or(0);
                    let locality = &interface.locality.transmit;
                    locality.add(piece.node, context.node, 0, bytes);
                    note(&mut self.moved, piece.node, bytes);
                }
                Sent::Yes(frame)
            }
            Ok(false) => Sent::Later,
            Err(e) => {
                warn_limited!(
                    interface.limit,
                    "Interface {}: a frame of the guest is not taken: {e}",
                    interface.name
                );
                Sent::Refused
            }
        }
    }
}
