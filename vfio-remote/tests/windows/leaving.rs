//! Memory that is taken away while the device is at something that takes longer than a VMM
//! waits.

use super::super::common::{LENGTH, SLOW, SOURCE, STALL, STATUS, TARGET, memfd, until};
use super::super::unreliable::is_refused;
use super::{BORROWER, CONFIG, MASTER, MORE, RAM, Rig, fill};
use farlane_vfio_user::wire::Command;
use farlane_vm_front_end::vfio_user::{ClientError, RawClient};
use rustix::io::Errno;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const BAR0: u32 = 0;
/// How long a VMM waits for an answer.
const MONITOR: Duration = Duration::from_secs(5);
/// Nearly as long as that, for each range.
const LONG: Duration = Duration::from_millis(2700);

/// A VM whose memory is all reached.
fn reaching() -> (Rig, OwnedFd) {
    let memory = memfd(2 * RAM);
    fill(&memory, 1);
    let shown = memory.try_clone().unwrap();
    let mut rig = Rig::new(&shown, memory);
    rig.map(RAM, 0).unwrap();
    rig.map(MORE, RAM).unwrap();
    rig.master();
    assert_eq!(rig.ways(), ["w 0", "w 0"]);
    (rig, shown)
}

/// One whose device does not let go of it.
fn at_it() -> (Rig, OwnedFd) {
    let (rig, shown) = reaching();
    rig.hooks.unmaps_late.store(true, Ordering::SeqCst);
    (rig, shown)
}

/// One whose device is at something that it does not stop before it has ended.
fn never_stopping() -> (Rig, OwnedFd) {
    let (rig, shown) = reaching();
    rig.hooks.stops_late.store(true, Ordering::SeqCst);
    (rig, shown)
}

/// Longer than two terms and two seconds: after that a lender that is silent has stopped its
/// device.
const SILENCE: Duration = Duration::from_secs(5);

fn let_go(rig: &Rig) {
    until("the device", || rig.hooks.is_stalled());
    rig.hooks.unmaps_late.store(false, Ordering::SeqCst);
    rig.hooks.release();
}

fn is_busy(result: &Result<(), ClientError>) -> bool {
    matches!(result, Err(ClientError::Refused(Errno::BUSY)))
}

fn lease(rig: &Rig) -> Option<u64> {
    rig.lender.status()[0].holder.as_ref().map(|h| h.fence)
}

#[test]
fn a_device_that_is_at_it_for_long_is_not_lost() {
    let (mut rig, _shown) = at_it();
    let before = lease(&rig);
    let unmapped = rig.vmm.unmap(0, MORE, RAM);
    assert!(is_busy(&unmapped), "{unmapped:?}");
    // It is heard of meanwhile, and has what is not taken away.
    assert_eq!(rig.vmm.read(BAR0, STATUS, 8).unwrap(), [0; 8]);
    assert_eq!(rig.ways(), ["w 0", "w 0"]);
    // The same memory is not shown anew, and nothing says that it has been taken away.
    for _ in 0..2 {
        let unmapped = rig.vmm.unmap(0, MORE, RAM);
        assert!(is_busy(&unmapped), "{unmapped:?}");
    }
    let_go(&rig);
    rig.vmm.unmap(0, MORE, RAM).unwrap();
    assert_eq!(rig.ways(), ["w 0"]);
    rig.map(MORE, RAM).unwrap();
    assert_eq!(rig.ways(), ["w 0", "w 0"]);
    assert!(rig.is_there());
    assert_eq!(lease(&rig), before);
}

#[test]
fn a_device_that_becomes_bus_master_again_has_all_memory_again() {
    let (mut rig, _shown) = at_it();
    let before = lease(&rig);
    rig.vmm.write(CONFIG, 4, &[0, 0]).unwrap();
    assert_eq!(rig.ways(), ["w 0", "w 0"]);
    let_go(&rig);
    rig.vmm.write(CONFIG, 4, &MASTER).unwrap();
    assert_eq!(rig.ways(), ["w 0", "w 0"]);
    assert!(rig.is_there());
    assert_eq!(lease(&rig), before);
}

#[test]
fn a_device_that_is_at_it_when_its_vm_ends_is_on_offer_when_it_has_let_go() {
    let (mut rig, _shown) = at_it();
    assert!(is_busy(&rig.vmm.unmap(0, MORE, RAM)));
    let Rig {
        lender, vmm, hooks, ..
    } = rig;
    drop(vmm);
    // It begins nothing more, whatever it is at.
    until("its end", || hooks.is_cut_off.load(Ordering::SeqCst));
    assert!(hooks.is_stalled());
    assert!(lender.status()[0].holder.is_some());
    hooks.unmaps_late.store(false, Ordering::SeqCst);
    hooks.release();
    until("its return", || lender.status()[0].holder.is_none());
    assert!(!hooks.in_use.load(Ordering::SeqCst));
}

/// What the device has begun may still reach memory, also when the VM starts anew there: a reset is
/// an error.
fn is_not_reset(rig: &mut Rig) {
    let reset = rig.vmm.call(Command::DeviceReset, &[], &[]).map(drop);
    assert!(is_refused(&reset), "{reset:?}");
}

#[test]
fn a_device_that_is_at_it_when_it_is_reset_comes_back_with_the_next_reset() {
    let (mut rig, _shown) = at_it();
    let before = lease(&rig);
    is_not_reset(&mut rig);
    assert!(!rig.is_there());
    // Nor is one that has been lost by then.
    is_not_reset(&mut rig);
    let unmapped = rig.vmm.unmap(0, MORE, RAM);
    assert!(is_refused(&unmapped), "{unmapped:?}");
    let_go(&rig);
    until("its return", || lease(&rig).is_none());
    until("the device", || {
        rig.vmm.call(Command::DeviceReset, &[], &[]).is_ok() && rig.is_there()
    });
    assert!(lease(&rig) > before);
}

#[test]
fn a_vm_that_ends_has_nothing_taken_away_range_by_range() {
    let (rig, _shown) = at_it();
    let Rig { lender, vmm, .. } = rig;
    drop(vmm);
    // What would be taken away would not come to an end.
    until("its return", || lender.status()[0].holder.is_none());
}

#[test]
fn a_device_that_has_let_go_meanwhile_is_reset() {
    let (mut rig, _shown) = at_it();
    let before = lease(&rig);
    assert!(is_busy(&rig.vmm.unmap(0, MORE, RAM)));
    let_go(&rig);
    rig.vmm.call(Command::DeviceReset, &[], &[]).unwrap();
    assert!(rig.is_there());
    assert_eq!(lease(&rig), before);
    assert!(rig.ways().is_empty());
}

#[test]
fn other_memory_is_shown_to_a_device_that_is_at_it() {
    let (mut rig, _shown) = at_it();
    assert!(is_busy(&rig.vmm.unmap(0, MORE, RAM)));
    let memory = rig.memory.try_clone().unwrap();
    let place = Some((memory.as_fd(), 0));
    rig.vmm.map(MORE * 2, RAM / 2, place).unwrap();
    rig.vmm.map(MORE * 4, RAM / 2, None).unwrap();
    let_go(&rig);
    rig.vmm.unmap(0, MORE, RAM).unwrap();
    assert_eq!(rig.ways(), ["w 0", "w 0", "messages"]);
}

#[test]
fn all_that_is_taken_away_at_once_is_one_wait() {
    let (mut rig, _shown) = reaching();
    let memory = rig.memory.try_clone().unwrap();
    let place = Some((memory.as_fd(), 0));
    rig.vmm.map(MORE * 2, RAM / 2, place).unwrap();
    assert_eq!(rig.ways(), ["w 0"; 3]);
    let hooks = Arc::clone(&rig.hooks);
    hooks.unmaps_late.store(true, Ordering::SeqCst);
    let over = Arc::new(AtomicBool::new(false));
    let slow = std::thread::spawn({
        let over = Arc::clone(&over);
        move || {
            while !over.load(Ordering::SeqCst) {
                if hooks.is_stalled() {
                    // For each range: when two are gone, the VMM has waited long enough, and the
                    // third one is not begun, however late it is.
                    std::thread::sleep(Duration::from_millis(2500));
                    hooks.release();
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    });
    rig.vmm.write(CONFIG, 4, &[0, 0]).unwrap();
    let left = rig.ways().len();
    rig.hooks.unmaps_late.store(false, Ordering::SeqCst);
    over.store(true, Ordering::SeqCst);
    slow.join().unwrap();
    rig.hooks.release();
    assert!(left > 0);
    assert!(rig.is_there());
}

#[test]
fn time_proves_nothing_of_a_device_that_is_known_to_be_at_it() {
    let (mut rig, _shown) = at_it();
    is_not_reset(&mut rig);
    assert!(!rig.is_there());
    std::thread::sleep(SILENCE);
    let unmapped = rig.vmm.unmap(0, MORE, RAM);
    assert!(rig.hooks.is_stalled());
    assert!(unmapped.is_err(), "{unmapped:?}");
    let_go(&rig);
    until("its word", || rig.vmm.unmap(0, MORE, RAM).is_ok());
}

#[test]
fn no_vm_gets_a_device_from_a_socket_whose_last_one_has_not_stopped() {
    let (rig, _shown) = never_stopping();
    let Rig {
        lender,
        vmm,
        hooks,
        folder,
        ..
    } = rig;
    drop(vmm);
    until("its end", || hooks.is_stalled());
    std::thread::sleep(SILENCE);
    let path = folder.path().join(BORROWER);
    let mut vmm = RawClient::negotiated(&path).unwrap();
    assert!(hooks.is_stalled());
    // It has no device.
    assert_eq!(vmm.read(CONFIG, 0, 2).ok(), None);
    drop(vmm);
    hooks.stops_late.store(false, Ordering::SeqCst);
    hooks.release();
    until("its return", || lender.status()[0].holder.is_none());
    until("the next one", || {
        let mut vmm = RawClient::negotiated(&path).unwrap();
        vmm.read(CONFIG, 0, 2).is_ok()
    });
}

#[test]
fn memory_of_a_device_that_is_taken_away_and_has_not_stopped_is_not_acknowledged() {
    let (mut rig, _shown) = never_stopping();
    rig.hooks.fail();
    until("its loss", || !rig.is_there());
    std::thread::sleep(SILENCE);
    let unmapped = rig.vmm.unmap(0, MORE, RAM);
    assert!(rig.hooks.is_stalled());
    assert!(unmapped.is_err(), "{unmapped:?}");
    rig.hooks.release();
    until("its word", || rig.vmm.unmap(0, MORE, RAM).is_ok());
}

#[test]
fn memory_that_nobody_was_asked_for_is_not_acknowledged_when_a_device_is_abandoned() {
    let (mut rig, _shown) = at_it();
    let memory = rig.memory.try_clone().unwrap();
    let place = Some((memory.as_fd(), 0));
    rig.vmm.map(MORE * 2, RAM / 2, place).unwrap();
    // Two ranges have gone when there is no time for the third one.
    let hooks = Arc::clone(&rig.hooks);
    let slow = std::thread::spawn(move || {
        hooks.stops_late.store(true, Ordering::SeqCst);
        for _ in 0..2 {
            until("a range", || hooks.is_stalled());
            std::thread::sleep(Duration::from_millis(1600));
            hooks.release();
        }
    });
    is_not_reset(&mut rig);
    slow.join().unwrap();
    assert!(!rig.is_there());
    std::thread::sleep(SILENCE);
    let unmapped = rig.vmm.unmap(0, MORE, RAM);
    assert!(rig.hooks.is_stalled());
    assert!(unmapped.is_err(), "{unmapped:?}");
    rig.hooks.unmaps_late.store(false, Ordering::SeqCst);
    rig.hooks.stops_late.store(false, Ordering::SeqCst);
    until("its word", || {
        rig.hooks.release();
        rig.vmm.unmap(0, MORE, RAM).is_ok()
    });
}

#[test]
fn a_lender_that_is_late_when_it_is_asked_again_does_not_lose_its_device() {
    let (mut rig, _shown) = at_it();
    assert!(is_busy(&rig.vmm.unmap(0, MORE, RAM)));
    // It does these first, which takes it more than half a second.
    for _ in 0..60 {
        rig.vmm.write(BAR0, SLOW, &[0; 8]).unwrap();
    }
    let again = rig.vmm.unmap(0, MORE, RAM);
    assert!(is_busy(&again), "{again:?}");
    assert!(rig.is_there());
    let_go(&rig);
    rig.vmm.unmap(0, MORE, RAM).unwrap();
}

#[test]
fn all_ranges_that_one_request_takes_away_are_over_before_a_monitor_gives_up() {
    let (mut rig, _shown) = at_it();
    rig.vmm.socket().set_read_timeout(Some(MONITOR)).unwrap();
    let hooks = Arc::clone(&rig.hooks);
    let slow = std::thread::spawn(move || {
        for _ in 0..2 {
            until("a range", || hooks.is_stalled());
            std::thread::sleep(LONG);
            hooks.release();
        }
    });
    let unmapped = rig.vmm.unmap(0, 0, MORE + RAM);
    assert!(is_busy(&unmapped), "{unmapped:?}");
    slow.join().unwrap();
    rig.hooks.unmaps_late.store(false, Ordering::SeqCst);
    rig.vmm.unmap(0, 0, MORE + RAM).unwrap();
    assert!(rig.is_there());
}

#[test]
fn a_reset_is_over_before_a_monitor_gives_up() {
    let (mut rig, _shown) = at_it();
    rig.vmm.socket().set_read_timeout(Some(MONITOR)).unwrap();
    let hooks = Arc::clone(&rig.hooks);
    let slow = std::thread::spawn(move || {
        until("a range", || hooks.is_stalled());
        std::thread::sleep(Duration::from_millis(1500));
        hooks.unmaps_late.store(false, Ordering::SeqCst);
        hooks.resets_late.store(true, Ordering::SeqCst);
        hooks.release();
    });
    rig.vmm.call(Command::DeviceReset, &[], &[]).unwrap();
    slow.join().unwrap();
    assert!(rig.hooks.is_stalled());
    rig.hooks.release();
}

#[test]
fn a_device_that_waits_for_the_memory_of_a_monitor_that_resets_it_is_not_lost() {
    let (mut rig, _shown) = reaching();
    rig.vmm.map(MORE * 2, RAM, None).unwrap();
    let writes = [(STALL, 0), (SOURCE, MORE * 2), (TARGET, RAM), (LENGTH, 8)];
    for (register, value) in writes {
        let value: u64 = value;
        rig.vmm.write(BAR0, register, &value.to_le_bytes()).unwrap();
    }
    // It begins when all of that has been said.
    until("the device", || rig.hooks.is_stalled());
    rig.hooks.release();
    // It is answered by nobody.
    let asked = rig.vmm.receive().unwrap().header;
    assert_eq!(asked.command, Command::DmaRead.to_wire());
    rig.vmm.call(Command::DeviceReset, &[], &[]).unwrap();
    assert!(rig.is_there());
    assert_eq!(rig.hooks.resets.load(Ordering::SeqCst), 1);
}
