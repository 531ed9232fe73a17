//! Whether windows between hosts show what they should: when memory is mapped through them, and
//! again before the device becomes a bus master, where they were empty then.

use super::*;

impl Worker {
    /// Compares what a window between hosts shows with what it should. What is returned is to be
    /// looked at again.
    pub(super) fn prove(
        &mut self,
        fence: Fence,
        bridge: u16,
        target: &DmaTarget,
        range: DmaRange,
        other: Reference,
        until: Instant,
    ) -> Result<Option<UnprovedWindow>, Refusal> {
        let (_, held) = self.held(fence)?;
        if let Some(why) = held.refused.get(&bridge) {
            return Err(Refusal::Window(why.clone()));
        }
        let window = window_of(target, range)?;
        let words = self.words(fence, &other, until);
        match proof::compare(&window, range.addresses, words) {
            Ok(Verdict::Proved) => Ok(None),
            Ok(Verdict::Empty) => Ok(Some(UnprovedWindow {
                bridge,
                window,
                other,
            })),
            Err(Fault::NotRead(why)) => Err(range.refused(why)),
            Err(Fault::Differs(why)) => Err(self.refuse_window(bridge, why)),
        }
    }

    /// Reads what a window is compared with, for one request, which is all done by `until`.
    fn words(
        &self,
        fence: Fence,
        other: &Reference,
        until: Instant,
    ) -> impl Fn(&[u64]) -> io::Result<Vec<Word>> + use<> {
        let control = Arc::clone(&self.control);
        let memory = self.memory(fence);
        let other = other.clone();
        let read = move |addresses: &[u64], until| match &other {
            Reference::Borrower => memory.words(addresses, until),
            Reference::Lender {
                device,
                region,
                shift,
            } => {
                let offset = |address: &u64| address.wrapping_add(*shift);
                let offsets: Vec<u64> = addresses.iter().map(offset).collect();
                device.words(*region, &offsets, until)
            }
        };
        proof::asking(until, move || control.ending().is_some(), read)
    }

    /// The device may become a bus master, as far as what it reaches is known.
    pub(in super::super) fn look_before_mastering(&mut self, fence: Fence) -> Result<(), Refusal> {
        self.look_again(fence, Instant::now() + proof::PATIENCE)
    }

    /// Looks again at some of what was empty behind windows when it was mapped. A device that has
    /// reached another memory than its VM's since then is taken away. What is not read is to be
    /// looked at again.
    pub(super) fn look_again(&mut self, fence: Fence, until: Instant) -> Result<(), Refusal> {
        let (_, held) = self.held(fence)?;
        let from = held.looked_at;
        let open = |(_, mapped): &(&u64, &ReachedRange)| {
            let unproved = mapped.unproved.as_ref();
            unproved.is_some_and(|unproved| unproved.other.is_there())
        };
        let mut all: Vec<u64> = held
            .mappings
            .iter()
            .filter(open)
            .map(|(&address, _)| address)
            .collect();
        // Those first that were not looked at last time.
        let first = all.partition_point(|&address| address <= from);
        all.rotate_left(first);
        let mut refused = None;
        for address in all.into_iter().take(LOOKS) {
            self.held_mut(fence)?.looked_at = address;
            let (_, held) = self.held(fence)?;
            let Some(mapped) = held.mappings.get(&address) else {
                continue;
            };
            let Some(unproved) = &mapped.unproved else {
                continue;
            };
            let range = AddressRange::new(address, mapped.length);
            let words = self.words(fence, &unproved.other, until);
            match proof::compare(&unproved.window, range, words) {
                Ok(Verdict::Proved) => {
                    if let Some(mapped) = self.held_mut(fence)?.mappings.get_mut(&address) {
                        mapped.unproved = None;
                    }
                }
                Ok(Verdict::Empty) => {}
                Err(Fault::NotRead(why)) => {
                    log::debug!("{range}: {why}");
                }
                Err(Fault::Differs(why)) => {
                    refused = Some((unproved.bridge, why));
                    break;
                }
            }
        }
        let Some((bridge, why)) = refused else {
            return Ok(());
        };
        let refusal = self.refuse_window(bridge, why);
        self.end_lease(Some(Ending::WrongWindow));
        Err(refusal)
    }

    /// Nothing is reached through a bridge any more under this lease.
    fn refuse_window(&mut self, bridge: u16, why: String) -> Refusal {
        if let Some(attached) = &mut self.attached
            && let Some(held) = &mut attached.held
        {
            let way = attached.ways.get(usize::from(bridge));
            let name = way.map_or("none", |way| way.name.as_str());
            let borrower = &self.borrower.name;
            let what = way.and_then(|way| way.shows.as_ref()).map_or_else(
                || format!("memory of {borrower}'s VM"),
                |bar| format!("{:?} of {}/{}", bar.region, bar.lender, bar.device),
            );
            log::error!("Window {name} does not show {what}: {why}");
            held.refused.insert(bridge, why.clone());
        }
        Refusal::Window(why)
    }
}

/// What the lender sees through a window, at the addresses at which the device is to reach it.
fn window_of(target: &DmaTarget, range: DmaRange) -> Result<Arc<DmaSpace>, Refusal> {
    let window = DmaSpace::new();
    let seen = DmaRange {
        writable: false,
        ..range
    };
    let mapped = window.map(&seen.mapping(target.clone()));
    mapped.map_err(|e| Refusal::Invalid(chain(&e)))?;
    Ok(window)
}
