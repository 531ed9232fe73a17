//! A driver that writes whatever it likes into the control queue of a network interface, and frames
//! of any kind afterwards.

use crate::{Input, format_all_logs};
use farlane_net::bits::feature;
use farlane_net::control::request::{Command, MAX_COMMAND_BYTES, MAX_INDIRECTION};
use farlane_net::control::{Control, Effect};
use farlane_net::pairs::PairCount;

/// Queue pairs of the device.
const PAIRS: PairCount = PairCount(8);
const MAC: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];
const OFFLOADS: u64 = feature::GUEST_CSUM
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::GUEST_ECN
    | feature::GUEST_UFO;

fn check(effect: &Effect, features: u64) {
    match effect {
        Effect::Filter | Effect::Announced => {}
        Effect::QueuePairs(pairs) => assert!((PairCount::ONE..=PAIRS).contains(pairs)),
        Effect::Scaling(pairs, scaling) => {
            assert!((PairCount::ONE..=PAIRS).contains(pairs));
            let entries = scaling.indirection.len();
            assert!(entries.is_power_of_two() && entries <= MAX_INDIRECTION);
            let mut queues = scaling.indirection.iter().chain([&scaling.unclassified]);
            assert!(queues.all(|queue| PAIRS.contains(*queue)));
        }
        Effect::Offloads(offloads) => assert_eq!(offloads & !(features & OFFLOADS), 0),
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    format_all_logs();
    let mut input = Input::new(data);
    let features = if input.u8().is_multiple_of(4) {
        input.u64()
    } else {
        u64::MAX
    };
    let mut control = Control::new(features, PAIRS, MAC);
    while !input.is_empty() {
        let length = usize::from(input.u16()) % (MAX_COMMAND_BYTES + 2);
        let request = input.bytes(length).to_vec();
        let before = control.clone();
        match control.execute(&request) {
            Ok(effect) => {
                assert!(Command::parse(&request).is_ok());
                check(&effect, features);
            }
            Err(error) => {
                let _ = error.to_string();
                assert_eq!(control, before, "an error has changed something");
            }
        }
        let length = usize::from(input.u8() % 20);
        let frame = input.bytes(length).to_vec();
        let admitted = control.filter().admits(&frame);
        assert!(!admitted || frame.len() >= 14);
    }
}
