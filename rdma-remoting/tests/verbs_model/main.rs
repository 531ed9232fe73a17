//! Random programs of verbs on a few queue pairs, beside a reference model: what completes and how,
//! what lies in memory, what events there are, and in which states the queue pairs are.

#![allow(clippy::unwrap_used)]

mod model;
mod objects;
mod program;
#[path = "../reliable_connection/rig.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod rig;
mod scene;

use farlane_abi::rdma::*;
use program::{Step, scenery, step};
use proptest::collection::vec;
use proptest::prelude::*;
use rig::*;
use scene::Scene;

/// Bytes of each side's memory.
const MEMORY: u16 = 256;
/// Protection domain of the queue pairs, and another one.
const PD: u32 = 1;
const OTHER_PD: u32 = 2;
const EVERYTHING: u32 = ALL | ACCESS_REMOTE_ATOMIC | ACCESS_MW_BIND | ACCESS_FLUSH_GLOBAL;
/// Set in the numbers of receive requests.
const RECEIVE: u64 = 1 << 63;
/// No turn carries out more: in one each side gets as far as it can.
const MOST_POSTED: usize = 16;
/// Q_Keys of queue pairs: the first is that of one that is new.
const QKEYS: [u32; 3] = [0x11, 0x22, 1 << 31 | 0x11];
proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn a_program_does_what_the_model_does(
        scenery in scenery(),
        rnr_retry in prop_oneof![Just(0u8), Just(3), Just(7)],
        qp_access in prop_oneof![
            3 => Just(EVERYTHING),
            1 => (0u32..16, any::<bool>())
                .prop_map(|(rights, flush)| rights | (u32::from(flush) * ACCESS_FLUSH_GLOBAL)),
        ],
        first in vec(any::<u8>(), usize::from(MEMORY)),
        steps in vec(step(), 1..100),
    ) {
        let setup = Setup {
            access: EVERYTHING,
            qp_access,
            rnr_retry,
            ..NORMAL
        };
        let mut scene = Scene::new(scenery, setup, &first);
        for step in &steps {
            scene.step(step)?;
        }
        scene.step(&Step::Expire)?;
    }
}
