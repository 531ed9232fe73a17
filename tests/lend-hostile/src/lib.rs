//! An attacker of lenders: frames that are no messages, messages that are none of a borrower's, leases
//! that are somebody else's. The attacker of borrowers is that of vfio-user servers.

mod messages;
mod peer;

pub use farlane_vfio_client::attack as attack_borrower;
pub use messages::{Kind, Messages};
pub use peer::{Answer, Peer};

use anyhow::{Context as _, Result, bail};
use farlane_vfio_client::Descriptors;
use farlane_vfio_remote::link::message::{Fence, Reply, Request};
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
}

/// Sends `count` frames to the lender at `path`, about its device `target` and none else.
///
/// After each, the lender has to answer a question that is right, or to have ended the link; it has to
/// take the next link then.
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
        let (mut peer, fence) = match link.take() {
            Some(link) => link,
            None => begin(path, target, &mut messages, &mut outcome).context(at.clone())?,
        };
        let (kind, frame) = messages.frame(fence)?;
        let fds = match kind {
            Kind::Descriptors => any_of(&descriptors, &mut messages),
            _ => Vec::new(),
        };
        outcome.sent += 1;
        *outcome.by_kind.entry(kind).or_default() += 1;
        let at = format!("{at}, with {kind:?}");
        if !peer.send(&frame, &fds).context(at.clone())? {
            outcome.ended += 1;
            continue;
        }
        match peer.ask(Request::List { first: 0 }).context(at.clone())? {
            Answer::Ended => outcome.ended += 1,
            Answer::Reply(Ok(Reply::Devices { .. })) => {
                outcome.survived += 1;
                link = Some((peer, fence));
            }
            Answer::Reply(other) => bail!("{at}: the lender answers {other:?}"),
        }
    }
    Ok(outcome)
}

/// A link for some attacks: without a greeting, greeted, attached, or with a lease.
fn begin(
    path: &Path,
    target: &str,
    messages: &mut Messages,
    outcome: &mut Outcome,
) -> Result<(Peer, Option<Fence>)> {
    outcome.links += 1;
    let depth = messages.below(8);
    if depth == 0 {
        return Ok((Peer::connect(path)?, None));
    }
    let mut peer = Peer::greeted(path)?;
    if depth < 3 {
        return Ok((peer, None));
    }
    let device = target.to_owned();
    match peer.ask(Request::Attach { device })? {
        Answer::Reply(Ok(Reply::Attached(_))) => {}
        other => bail!("The lender attaches {target} by {other:?}"),
    }
    if depth < 5 {
        return Ok((peer, None));
    }
    match peer.ask(Request::Take)? {
        Answer::Reply(Ok(Reply::Taken { fence, .. })) => {
            outcome.leases += 1;
            Ok((peer, Some(fence)))
        }
        // The link before has just ended: its device is not on offer yet.
        Answer::Reply(Err(_)) => Ok((peer, None)),
        other => bail!("The lender lends {target} by {other:?}"),
    }
}

fn any_of<'a>(descriptors: &'a Descriptors, messages: &mut Messages) -> Vec<BorrowedFd<'a>> {
    let all = descriptors.all();
    let count = messages.below(100);
    (0..count).map(|_| all[messages.below(all.len())]).collect()
}
