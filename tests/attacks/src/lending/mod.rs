//! An attacker of lenders: frames that are no messages, messages that are none of a borrower's,
//! leases that are somebody else's. The attacker of borrowers is that of vfio-user servers.

mod messages;
mod peer;

pub use messages::{Frame, Kind, Messages, Verdict};
pub use peer::{Answer, Peer};

use crate::vfio_user::Descriptors;
use anyhow::{Context as _, Result, bail, ensure};
use farlane_vfio_remote::protocol::message::{Fence, Reply, Request};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::Path;

/// What has happened.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Frames sent.
    pub sent: u64,
    /// By kind.
    pub by_kind: BTreeMap<Kind, u64>,
    /// After which the lender still answered what is right.
    pub survived: u64,
    /// After which it ended the link.
    pub ended: u64,
    /// Links made.
    pub links: u64,
    /// Leases that were taken, and given up with their link.
    pub leases: u64,
    /// Frames after which the link had to end, and did.
    pub invalid: u64,
    /// Requests that had to be refused, and were, or their link ended.
    pub refused: u64,
}

/// A link, and what the attacker knows of it.
struct Link {
    peer: Peer,
    greeted: bool,
    /// The lease that it holds.
    fence: Option<Fence>,
}

/// Sends `count` frames to the lender at `path`, about its device `target` and none else.
///
/// After each, the lender has to answer a question that is right, or to have ended the link; it has
/// to take the next link then. What [`Verdict`] says must become of a frame does.
///
/// # Errors
/// It does not.
pub fn attack_lender(path: &Path, seed: u64, count: u64, target: &str) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut messages = Messages::new(seed, target);
    let descriptors = Descriptors::new()?;
    let mut link = None;
    while outcome.sent < count {
        let at = format!("After {} frames", outcome.sent);
        let mut now = match link.take() {
            Some(link) => link,
            None => begin(path, target, &mut messages, &mut outcome).context(at.clone())?,
        };
        let Frame {
            kind,
            bytes,
            verdict,
        } = messages.frame(now.greeted, now.fence)?;
        let fds = match kind {
            Kind::Descriptors => any_of(&descriptors, &mut messages),
            _ => Vec::new(),
        };
        outcome.sent += 1;
        *outcome.by_kind.entry(kind).or_default() += 1;
        let at = format!("{at}, with {kind:?}, {verdict:?}");
        let mut answers = Vec::new();
        let answer = if now.peer.send(&bytes, &fds).context(at.clone())? {
            now.peer.ask_after(Request::List { first: 0 }, &mut answers)
        } else {
            Ok(Answer::Ended)
        };
        let ended = match answer.context(at.clone())? {
            Answer::Ended => true,
            Answer::Reply(Ok(Reply::Devices { .. })) => false,
            Answer::Reply(other) => bail!("{at}: the lender answers {other:?}"),
        };
        match verdict {
            Verdict::Any => {}
            Verdict::Ends => {
                ensure!(ended, "{at}: the lender goes on after {bytes:02x?}");
                outcome.invalid += 1;
            }
            Verdict::Refused(id) => {
                let refused = answers
                    .iter()
                    .any(|(to, result)| *to == id && result.is_err());
                ensure!(
                    ended || refused,
                    "{at}: the lender answers {answers:?} to {bytes:02x?}"
                );
                outcome.refused += 1;
            }
        }
        if ended {
            outcome.ended += 1;
            continue;
        }
        outcome.survived += 1;
        for (_, result) in answers {
            // Attacks take and return the device too.
            if let Ok(Reply::Taken { fence, .. }) = result {
                now.fence = Some(fence);
            }
        }
        link = Some(now);
    }
    Ok(outcome)
}

/// A link for some attacks: without a greeting, greeted, attached, or with a lease.
fn begin(
    path: &Path,
    target: &str,
    messages: &mut Messages,
    outcome: &mut Outcome,
) -> Result<Link> {
    let link = |peer, greeted, fence| Link {
        peer,
        greeted,
        fence,
    };
    outcome.links += 1;
    let depth = messages.below(8);
    if depth == 0 {
        return Ok(link(Peer::connect(path)?, false, None));
    }
    let mut peer = Peer::greeted(path)?;
    if depth < 3 {
        return Ok(link(peer, true, None));
    }
    let device = target.to_owned();
    match peer.ask(Request::Attach { device })? {
        Answer::Reply(Ok(Reply::Attached(_))) => {}
        other => bail!("The lender attaches {target} by {other:?}"),
    }
    if depth < 5 {
        return Ok(link(peer, true, None));
    }
    match peer.ask(Request::Take)? {
        Answer::Reply(Ok(Reply::Taken { fence, .. })) => {
            outcome.leases += 1;
            Ok(link(peer, true, Some(fence)))
        }
        // The link before has just ended: its device is not on offer yet.
        Answer::Reply(Err(_)) => Ok(link(peer, true, None)),
        other => bail!("The lender lends {target} by {other:?}"),
    }
}

fn any_of<'a>(descriptors: &'a Descriptors, messages: &mut Messages) -> Vec<BorrowedFd<'a>> {
    let all = descriptors.all();
    let count = messages.below(100);
    (0..count).map(|_| all[messages.below(all.len())]).collect()
}
