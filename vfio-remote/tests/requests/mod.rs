//! Requests that make no sense.

use super::common::{Copier, LENGTH, Rig, SLOW, STATUS, until};
use super::{BAR0, Monitor, Raw, map_page};
use farlane_pci::{InterruptKind, Region};
use farlane_vfio_remote::protocol::message::{
    Delivery, Place, Refusal, Reply, Request, ToBorrower, ToLender,
};
use farlane_vfio_remote::protocol::{ConnectionError, Received};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[test]
fn requests_that_make_no_sense_are_refused_one_by_one() {
    let rig = Rig::new();
    let mut raw = Raw::connect(&rig.connector(), "odd");
    assert!(matches!(raw.ask(Request::Take), Err(Refusal::Order(_))));
    let fence = raw.take("mapped");
    let page = |address, length, place| Request::Map {
        fence,
        address,
        length,
        writable: true,
        place,
        peer: None,
    };
    let window = |bridge, window, offset| Place::Window {
        bridge,
        window,
        offset,
    };
    for request in [
        page(0, 0, Place::Messages),
        page(1, 0x1000, Place::Messages),
        page(!0xfff, 0x2000, Place::Messages),
        page(0, 0x1000, window(9, 0, 0)),
        page(0, 0x1000, window(0, 0, 0)),
        page(0, 0x1000, window(0, u32::MAX, u64::MAX)),
        Request::Unmap {
            fence,
            address: 0,
            length: 0x1000,
        },
        Request::Read {
            fence,
            region: Region::Bar0,
            offset: u64::MAX,
            length: 4,
        },
        Request::Read {
            fence,
            region: Region::Bar5,
            offset: 0,
            length: 4,
        },
        Request::Read {
            fence,
            region: Region::Bar0,
            offset: 0,
            length: u32::MAX,
        },
        Request::SetInterrupts {
            fence,
            kind: InterruptKind::Msix,
            first: u16::MAX,
            vectors: vec![Delivery::Message; 3],
        },
        Request::SetInterrupts {
            fence,
            kind: InterruptKind::Msix,
            first: 0,
            vectors: vec![Delivery::Eventfd],
        },
        Request::MaskIntx {
            fence,
            masked: true,
        },
    ] {
        let refusal = raw.ask(request.clone()).unwrap_err();
        assert!(
            matches!(refusal, Refusal::Invalid(_)),
            "{request:?}: {refusal:?}"
        );
    }
    // And it still works.
    raw.ask(page(0, 0x1000, Place::Messages)).unwrap();
}

#[test]
fn interrupts_that_nobody_takes_are_put_together() {
    const COPIES: u64 = 5000;
    let copier = Copier::new(false);
    let copies = Arc::clone(&copier.copies);
    let rig = Rig::with_term(Duration::from_secs(60), copier);
    let mut raw = Raw::connect(&rig.connector(), "busy");
    let fence = raw.take("plain");
    raw.ask(Request::SetInterrupts {
        fence,
        kind: InterruptKind::Msix,
        first: 1,
        vectors: vec![Delivery::Message],
    })
    .unwrap();
    // More than a socket holds.
    for id in 1..=COPIES {
        let post = ToLender::Post {
            fence,
            region: Region::Bar0,
            offset: LENGTH,
            data: vec![0; 8],
        };
        raw.sender.send(&post, &[]).unwrap();
        if id % 100 == 0 {
            until("the copies", || copies.load(Ordering::SeqCst) == id);
        }
    }
    // The link is as good as ever.
    assert!(raw.ask(Request::List { first: 0 }).is_ok());
}

#[test]
fn an_answer_about_memory_that_comes_too_late_is_taken_once() {
    let rig = Rig::with_term(Duration::from_secs(60), Copier::new(false));
    let mut raw = Raw::connect(&rig.connector(), "slow");
    let fence = raw.take("plain");
    raw.ask(map_page(fence, 0)).unwrap();
    let post = ToLender::Post {
        fence,
        region: Region::Bar0,
        offset: LENGTH,
        data: 8_u64.to_le_bytes().to_vec(),
    };
    raw.sender.send(&post, &[]).unwrap();
    let asked: Received<ToBorrower> = raw.receiver.receive(None).unwrap().unwrap();
    let ToBorrower::MemoryRead { id, .. } = asked.message else {
        panic!("{asked:?}");
    };
    // The device has given up when this is answered.
    let status = Request::Read {
        fence,
        region: Region::Bar0,
        offset: STATUS,
        length: 8,
    };
    let answered = raw.ask(status).unwrap();
    assert_eq!(answered, Reply::Data(2_u64.to_le_bytes().to_vec()));
    let late = ToLender::Memory {
        id,
        result: Ok(vec![0; 8]),
    };
    raw.sender.send(&late, &[]).unwrap();
    raw.ask(Request::Renew { fence }).unwrap();
    // Nothing was asked that this would answer.
    raw.sender.send(&late, &[]).unwrap();
    while raw.receiver.receive::<ToBorrower>(None).is_ok() {}
    until("the device", || rig.holder("plain").is_none());
}

#[test]
fn a_lease_is_renewed_while_more_is_written_than_a_slow_device_takes() {
    let rig = Rig::with_term(Duration::from_secs(3), Copier::new(false));
    let mut vm = Monitor::connect(&rig.borrow("a", "plain"));
    // What the lender does not keep of it would take the device longer than a term, and come before
    // the next renewal.
    for value in 0..800_u64 {
        let bytes = value.to_le_bytes();
        vm.client.region_write(BAR0, SLOW, &bytes).unwrap();
    }
    assert_eq!(vm.register(SLOW), 799);
    assert_eq!(vm.vendor(), 0x1b36);
}

#[test]
fn a_frame_that_is_no_message_ends_its_link_and_no_other() {
    let rig = Rig::new();
    let mut good = Raw::connect(&rig.connector(), "good");
    let fence = good.take("plain");
    for junk in [&[0xff; 64][..], &[], &[1, 2, 3], &[0; 4000]] {
        let mut raw = Raw::connect(&rig.connector(), "bad");
        // A list of bytes has the length first: no message begins with one so large.
        raw.sender.send(&junk.to_vec(), &[]).unwrap();
        let end = loop {
            match raw.receiver.receive::<ToBorrower>(None) {
                Ok(_) => {}
                Err(e) => break e,
            }
        };
        assert!(matches!(end, ConnectionError::Closed), "{end:?}");
    }
    good.ask(Request::Renew { fence }).unwrap();
}
