//! Interrupts of a function.

use super::*;

#[test]
fn interrupts_ring_the_bell_of_their_vector() {
    let (fake, source) = source();
    let function = take(&source);
    let bells: Vec<_> = (0..3).map(|_| Arc::new(Bell::default())).collect();
    let set = |number, bell: Option<&Arc<Bell>>| {
        let signal = bell.map(|b| Arc::clone(b) as Arc<dyn Signal>);
        function.set_interrupt(InterruptVector::Msix(number), signal)
    };
    set(0, Some(&bells[0])).unwrap();
    set(8, Some(&bells[1])).unwrap();
    assert_eq!(fake.device().enabled.as_ref().unwrap().1.len(), 9);
    fake.interrupt(8);
    bells[1].wait(1);
    fake.interrupt(0);
    bells[0].wait(1);
    // The same vector, for somebody else.
    set(8, Some(&bells[2])).unwrap();
    fake.interrupt(8);
    bells[2].wait(1);
    assert_eq!(counter(&source, "interrupts"), 3);
    assert!(matches!(
        set(9, Some(&bells[0])),
        Err(AccessError::Interrupt(InterruptVector::Msix(9)))
    ));
    set(0, None).unwrap();
    set(0, None).unwrap();
    assert!(fake.device().enabled.as_ref().unwrap().1[0].is_none());
    set(8, None).unwrap();
    assert!(fake.device().enabled.is_none());
    bells[1].wait(1);
}

#[test]
fn message_signalled_interrupts_take_the_place_of_the_pin() {
    let (fake, source) = source();
    let function = take(&source);
    let bell = Arc::new(Bell::default());
    let set = |vector, on: bool| {
        let signal = on.then(|| Arc::clone(&bell) as Arc<dyn Signal>);
        function.set_interrupt(vector, signal).unwrap();
    };
    let enabled = || {
        let device = fake.device();
        device
            .enabled
            .as_ref()
            .map(|(kind, all)| (*kind, all.len()))
    };
    function.mask_intx(true).unwrap();
    set(InterruptVector::Intx, true);
    assert_eq!(enabled(), Some((InterruptKind::Intx, 1)));
    assert!(fake.device().masked);
    function.mask_intx(false).unwrap();
    assert!(!fake.device().masked);
    set(InterruptVector::Msi(0), true);
    assert_eq!(enabled(), Some((InterruptKind::Msi, 1)));
    set(InterruptVector::Msi(2), true);
    assert_eq!(enabled(), Some((InterruptKind::Msi, 4)));
    fake.interrupt(2);
    bell.wait(1);
    set(InterruptVector::Msix(1), true);
    assert_eq!(enabled(), Some((InterruptKind::Msix, 9)));
    set(InterruptVector::Msix(1), false);
    assert_eq!(enabled(), Some((InterruptKind::Msi, 4)));
    set(InterruptVector::Msi(2), false);
    set(InterruptVector::Msi(0), false);
    assert_eq!(enabled(), Some((InterruptKind::Intx, 1)));
    fake.interrupt(0);
    bell.wait(2);
    set(InterruptVector::Intx, false);
    assert_eq!(enabled(), None);
}
