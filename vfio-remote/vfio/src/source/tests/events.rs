//! What the kernel says of a function besides its interrupts.

use super::*;

/// Signals an error, or a request for the function, and waits until whoever watches has been told.
fn signal(fake: &Fake, bell: &Bell, which: usize, times: u32) {
    let device = fake.device();
    let event = &device.watched.as_ref().unwrap()[which];
    rustix::io::write(event, &1_u64.to_ne_bytes()).unwrap();
    drop(device);
    bell.wait(times);
}

fn watched() -> (Arc<Fake>, VfioSource, Arc<Bell>) {
    let (fake, source) = source();
    let bell = Arc::new(Bell::default());
    let ring = Arc::clone(&bell);
    source.watch(Arc::new(move || ring.raise()));
    (fake, source, bell)
}

#[test]
fn a_function_that_reports_an_error_is_not_lent_again() {
    let (fake, source, bell) = watched();
    let function = take(&source);
    signal(&fake, &bell, 0, 1);
    let why = source.quarantine().unwrap();
    assert!(why.contains("error"), "{why}");
    drop(function);
    let again = source.take(&Attachment::default());
    assert!(matches!(again, Err(SourceError::Failed { .. })));
    assert!(!fake.device().log.contains(&"close"));
}

#[test]
fn a_function_that_the_kernel_wants_back_is_closed_when_its_use_has_ended() {
    let (fake, source, bell) = watched();
    let function = take(&source);
    signal(&fake, &bell, 1, 1);
    // The kernel says so again and again.
    signal(&fake, &bell, 1, 2);
    assert!(source.quarantine().is_some());
    assert!(!fake.device().log.contains(&"close"));
    drop(function);
    assert_eq!(fake.device().log.last(), Some(&"close"));
    let closed = |fake: &Fake| {
        let device = fake.device();
        device.log.iter().filter(|&&what| what == "close").count()
    };
    signal(&fake, &bell, 1, 3);
    assert_eq!(closed(&fake), 1);

    // At once where nobody uses it.
    let (fake, source, bell) = watched();
    signal(&fake, &bell, 1, 1);
    assert_eq!(closed(&fake), 1);
    let again = source.take(&Attachment::default());
    assert!(matches!(again, Err(SourceError::Failed { .. })));
}
