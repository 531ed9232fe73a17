use super::*;
use proptest::prelude::*;

#[test]
fn lengths_are_exact() {
    for (bytes, good) in [
        (&[0, 0][..], false),
        (&[0, 0, 1], true),
        (&[0, 0, 1, 1], false),
        (&[0, 6, 1], false),
        (&[1, 1, 2, 2, 2, 2, 2], false),
        (&[1, 1, 2, 2, 2, 2, 2, 2], true),
        (&[2, 0, 1], false),
        (&[2, 0, 0, 0x10], false),
        (&[3, 0, 0], false),
        (&[3, 1], false),
        (&[4, 0, 1], false),
        (&[5, 0, 1, 0, 0, 0], false),
        (&[6, 0], false),
        (&[3], false),
        (&[], false),
    ] {
        assert_eq!(Command::parse(bytes).is_ok(), good, "{bytes:?}");
    }
}

#[test]
fn a_table_has_as_many_addresses_as_it_says() {
    let mut bytes = vec![1, 0, 2, 0, 0, 0];
    bytes.extend([2; 12]);
    assert!(Command::parse(&bytes).is_err());
    bytes.extend([0; 4]);
    let Ok(Command::MacTable { unicast, multicast }) = Command::parse(&bytes) else {
        panic!("not accepted");
    };
    assert_eq!(unicast.as_slice(), [[2; 6]; 2]);
    assert!(multicast.is_empty());
    bytes.push(0);
    assert!(Command::parse(&bytes).is_err());
    bytes[2..6].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(Command::parse(&bytes).is_err());
}

#[test]
fn a_scaling_has_a_power_of_two_of_queues_and_a_key_that_fits() {
    let bytes = |mask: u16, entries: usize, key: usize| {
        let mut bytes = vec![4, 1, 0, 0, 0, 0];
        bytes.extend(mask.to_le_bytes());
        bytes.extend([0, 0]);
        bytes.extend(vec![0; entries * 2]);
        bytes.extend([1, 0]);
        bytes.push(u8::try_from(key).unwrap_or(0));
        bytes.extend(vec![9; key]);
        bytes
    };
    assert!(Command::parse(&bytes(127, 128, 40)).is_ok());
    assert!(Command::parse(&bytes(0, 1, 0)).is_ok());
    assert!(Command::parse(&bytes(2, 3, 40)).is_err());
    assert!(Command::parse(&bytes(255, 256, 40)).is_err());
    assert!(Command::parse(&bytes(0xffff, 65_536, 40)).is_err());
    assert!(Command::parse(&bytes(127, 127, 40)).is_err());
    assert!(Command::parse(&bytes(1, 2, 41)).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_a_command_or_an_error(
        class in 0_u8..7,
        command in 0_u8..7,
        data in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut bytes = vec![class, command];
        bytes.extend(&data);
        if let Ok(Command::MacTable { unicast, multicast }) = Command::parse(&bytes) {
            prop_assert_eq!(8 + 6 * (unicast.len() + multicast.len()), data.len());
        }
    }
}
