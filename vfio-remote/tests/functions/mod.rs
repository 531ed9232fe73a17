//! What a guest sees of a function, and does to it.

use super::common::{Copier, Hooks, LENGTH, Rig, SOURCE, lender_of, until};
use super::{CONFIG, Monitor, is_signalled};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Memory decoding, bus mastering; and no INTx.
const ALL: u16 = 0x0406;

fn rig() -> (Rig, Arc<Hooks>, Monitor) {
    let copier = Copier::with_all_interrupts();
    let hooks = Arc::clone(&copier.hooks);
    let rig = Rig::of(lender_of(
        "lender",
        [("plain", copier)],
        &[],
        BTreeMap::new(),
    ));
    let vm = Monitor::connect(&rig.borrow("a", "plain"));
    (rig, hooks, vm)
}

impl Monitor {
    fn config(&mut self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.client.region_read(CONFIG, at, &mut bytes).unwrap();
        u16::from_le_bytes(bytes)
    }

    /// Where a capability lies.
    fn capability(&mut self, id: u16) -> Option<u64> {
        let mut at = u64::from(self.config(0x34) & 0xff);
        while at != 0 {
            let head = self.config(at);
            if head & 0xff == id {
                return Some(at);
            }
            at = u64::from(head >> 8);
        }
        None
    }
}

#[test]
fn a_function_with_msi_and_msix_interrupts_by_msix_which_is_seen_as_msi() {
    let (_rig, _hooks, mut vm) = rig();
    // The VMM has bound a vector of MSI, and the function takes none but of MSI-X.
    vm.command(ALL);
    assert_eq!(vm.copy(0x10_0000, 0x10_1000, 4), 1);
    until("the interrupt", || is_signalled(&vm.interrupt));
    let msi = vm.capability(0x05).unwrap();
    // Two vectors, as of the MSI-X; the function's own MSI is not seen.
    assert_eq!(vm.config(msi + 2), 0x0002);
    assert!(vm.capability(0x00).is_some());
    assert_eq!(vm.capability(0x11), None);
}

#[test]
fn a_reset_that_the_guest_asks_for_is_one() {
    let (rig, hooks, mut vm) = rig();
    let mappings = || {
        let status = rig.lender.status();
        status[0].holder.as_ref().unwrap().mappings.len()
    };
    vm.command(ALL);
    until("silence", || hooks.is_intx_silent.load(Ordering::SeqCst));
    vm.client
        .region_write(0, SOURCE, &0x1234_u64.to_le_bytes())
        .unwrap();
    assert_eq!(mappings(), 1);
    let before = hooks.resets.load(Ordering::SeqCst);
    // Device Control, Initiate Function Level Reset (PCI Express 3.0, 7.8.4).
    let control = vm.capability(0x10).unwrap() + 8;
    let value = vm.config(control) | 0x8000;
    vm.client
        .region_write(CONFIG, control, &value.to_le_bytes())
        .unwrap();
    assert_eq!(hooks.resets.load(Ordering::SeqCst), before + 1);
    assert_eq!(vm.register(SOURCE), 0);
    // Nothing of it is left in what is virtual, nor of that at the lender.
    assert_eq!(vm.config(4), 0);
    assert_eq!(mappings(), 0);
    assert!(!hooks.is_intx_silent.load(Ordering::SeqCst));
    vm.command(ALL);
    assert_eq!(vm.copy(0x10_0000, 0x10_1000, 4), 1);

    // The VMM's is the same.
    vm.client.reset().unwrap();
    assert!(!hooks.is_intx_silent.load(Ordering::SeqCst));
    assert_eq!(vm.config(4), 0);
    assert_eq!(vm.register(LENGTH), 0);
}
