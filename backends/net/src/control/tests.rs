#![allow(clippy::unwrap_used)]

use super::*;

const MAC: Mac = [0x52, 0x54, 0, 1, 2, 3];
const ALL: u64 = u64::MAX;

fn frame(to: Mac, rest: &[u8]) -> Vec<u8> {
    let mut frame = to.to_vec();
    frame.extend([2, 0, 0, 0, 0, 9]);
    frame.extend(rest);
    frame
}

#[test]
fn a_driver_that_says_nothing_gets_everything() {
    let control = Control::new(ALL, PairCount(4), MAC);
    assert!(control.filter().admits(&frame([2; 6], &[8, 0])));
    assert!(
        control
            .filter()
            .admits(&frame([2; 6], &[0x81, 0, 0, 5, 8, 0]))
    );
    assert!(!control.filter().admits(&[0; 13]));
}

#[test]
fn without_promiscuous_mode_addresses_and_vlans_decide() {
    let mut control = Control::new(ALL, PairCount(4), MAC);
    let set = |control: &mut Control, bytes: &[u8]| control.execute(bytes).unwrap();
    assert_eq!(set(&mut control, &[0, 0, 0]), Effect::Filter);
    let ip = [8, 0];
    let group = [1, 0, 0x5e, 0, 0, 1];
    let other = [2, 2, 2, 2, 2, 2];
    assert!(control.filter().admits(&frame(MAC, &ip)));
    assert!(control.filter().admits(&frame([0xff; 6], &ip)));
    assert!(!control.filter().admits(&frame(group, &ip)));
    assert!(!control.filter().admits(&frame(other, &ip)));

    let mut table = vec![1, 0, 1, 0, 0, 0];
    table.extend(other);
    table.extend([1, 0, 0, 0]);
    table.extend(group);
    set(&mut control, &table);
    assert!(control.filter().admits(&frame(group, &ip)));
    assert!(control.filter().admits(&frame(other, &ip)));
    set(&mut control, &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert!(!control.filter().admits(&frame(group, &ip)));
    set(&mut control, &[0, 1, 1]);
    assert!(control.filter().admits(&frame(group, &ip)));
    set(&mut control, &[0, 5, 1]);
    assert!(!control.filter().admits(&frame([0xff; 6], &ip)));
    set(&mut control, &[0, 4, 1]);
    assert!(!control.filter().admits(&frame(MAC, &ip)));
    set(&mut control, &[0, 4, 0]);

    let tagged = frame(MAC, &[0x81, 0, 0x20, 7, 8, 0]);
    assert!(!control.filter().admits(&tagged));
    set(&mut control, &[2, 0, 7, 0]);
    assert!(control.filter().admits(&tagged));
    set(&mut control, &[2, 1, 7, 0]);
    assert!(!control.filter().admits(&tagged));
    assert!(
        control
            .filter()
            .admits(&frame(MAC, &[0x81, 0, 0x20, 0, 8, 0]))
    );
    assert!(!control.filter().admits(&frame(MAC, &[0x81, 0])));
    // A driver tells of the VLANs of IEEE 802.1Q: those of a provider (802.1ad) it cannot ask for.
    for inside in [&[0x81, 0, 0, 9, 8, 0][..], &[8, 0]] {
        let provider = [&[0x88, 0xa8, 0, 9][..], inside].concat();
        assert!(control.filter().admits(&frame(MAC, &provider)));
    }

    let address = [2, 9, 9, 9, 9, 9];
    set(&mut control, &[1, 1, 2, 9, 9, 9, 9, 9]);
    assert!(control.filter().admits(&frame(address, &ip)));
    assert!(!control.filter().admits(&frame(MAC, &ip)));
    assert_eq!(
        control.execute(&[1, 1, 3, 9, 9, 9, 9, 9]),
        Err(ControlError::Mac)
    );
}

#[test]
fn a_table_that_is_too_long_admits_all_of_its_kind() {
    let mut control = Control::new(ALL, PairCount(4), MAC);
    control.execute(&[0, 0, 0]).unwrap();
    let mut table = vec![1, 0, 0, 0, 0, 0, 65, 0, 0, 0];
    for n in 0..65 {
        table.extend([1, 0, 0, 0, 0, n]);
    }
    control.execute(&table).unwrap();
    assert!(control.filter().admits(&frame([1, 9, 9, 9, 9, 9], &[8, 0])));
    assert!(!control.filter().admits(&frame([2, 9, 9, 9, 9, 9], &[8, 0])));
}

#[test]
fn commands_need_their_feature_and_change_nothing_without() {
    for (bytes, feature) in [
        (&[0, 0, 0][..], feature::CTRL_RX),
        (&[0, 2, 0], feature::CTRL_RX_EXTRA),
        (&[2, 0, 1, 0], feature::CTRL_VLAN),
        (&[3, 0], feature::GUEST_ANNOUNCE),
        (&[4, 0, 1, 0], feature::MQ),
        (
            &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            feature::CTRL_GUEST_OFFLOADS,
        ),
    ] {
        let mut control = Control::new(!feature, PairCount(4), MAC);
        let before = control.clone();
        assert_eq!(
            control.execute(bytes),
            Err(ControlError::NotNegotiated(feature | feature::CTRL_VQ))
        );
        assert_eq!(control, before);
        Control::new(ALL, PairCount(4), MAC).execute(bytes).unwrap();
    }
}

#[test]
fn queue_pairs_and_offloads_are_those_that_there_are() {
    let mut control = Control::new(ALL & !feature::GUEST_TSO6, PairCount(4), MAC);
    assert_eq!(
        control.execute(&[4, 0, 4, 0]),
        Ok(Effect::QueuePairs(PairCount(4)))
    );
    for pairs in [0, 5, 0x8000] {
        let [a, b] = u16::to_le_bytes(pairs);
        assert_eq!(
            control.execute(&[4, 0, a, b]),
            Err(ControlError::QueuePairs {
                pairs: PairCount(pairs),
                most: PairCount(4)
            })
        );
    }
    let offloads = |bits: u64| {
        let mut bytes = vec![5, 0];
        bytes.extend(bits.to_le_bytes());
        bytes
    };
    let some = feature::GUEST_CSUM | feature::GUEST_TSO4;
    assert_eq!(control.execute(&offloads(some)), Ok(Effect::Offloads(some)));
    assert_eq!(
        control.execute(&offloads(feature::GUEST_TSO6)),
        Err(ControlError::Bits(feature::GUEST_TSO6))
    );
    assert_eq!(control.execute(&offloads(1)), Err(ControlError::Bits(1)));
}

#[test]
fn scaling_names_queues_that_there_are() {
    let bytes = |queue: u8, types: u8| {
        let mut bytes = vec![4, 1, types, 0, 0, 0, 1, 0, 0, 0, 0, 0, queue, 0, 2, 0, 40];
        bytes.extend([7; 40]);
        bytes
    };
    let mut control = Control::new(ALL, PairCount(2), MAC);
    let Ok(Effect::Scaling(PairCount(2), scaling)) = control.execute(&bytes(1, 0x3f)) else {
        panic!("not accepted");
    };
    assert_eq!(scaling.indirection, [0, 1].map(PairId));
    assert_eq!(
        control.execute(&bytes(2, 0x3f)),
        Err(ControlError::Queue {
            queue: PairId(2),
            pairs: PairCount(2)
        })
    );
    assert_eq!(
        control.execute(&bytes(1, 0x40)),
        Err(ControlError::Bits(0x40))
    );
}
