//! Objects that go, against a backend that the test plays.

use crate::arena::Part;
use crate::loopback::{Answer, Rig, agreeable};
use crate::{Cq, Errno, Pd, Qp, QpCaps, QpInit, Srq};
use farlane_sys::sync::lock;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

const NEGOTIATE: u32 = 17;
const DESTROY_CQ: u32 = 10;
const DESTROY_QP: u32 = 14;
const ATTACH: u32 = 23;
const DETACH: u32 = 24;
const DESTROY_SRQ: u32 = 28;

const CAPS: QpCaps = QpCaps {
    send_wr: 4,
    send_sge: 1,
    inline_bytes: 0,
    recv_wr: 4,
    recv_sge: 1,
};

/// A backend of version 2 that first asks `refuses` whether it refuses a call of this number and
/// arguments.
fn rig(mut refuses: impl FnMut(u32, &[u8]) -> Option<Errno> + Send + 'static) -> Rig {
    let answer = move |number, args: &[u8]| match refuses(number, args) {
        Some(errno) => Err(errno),
        None if number == NEGOTIATE => Ok(2_u32.to_le_bytes().to_vec()),
        None => Ok(agreeable(number)),
    };
    let answer: Answer = Box::new(answer);
    let rig = Rig::new(false, answer);
    rig.context.negotiate().unwrap();
    rig
}

/// Where a part lies.
fn place(part: &Part) -> (u32, u32) {
    (part.region(), part.offset().unwrap())
}

#[test]
fn a_queue_pair_that_goes_leaves_its_groups_first() {
    let groups = Arc::<Mutex<BTreeSet<Vec<u8>>>>::default();
    let calls = Arc::<Mutex<Vec<u32>>>::default();
    let rig = rig({
        let (groups, calls) = (Arc::clone(&groups), Arc::clone(&calls));
        move |number, args| {
            let mut groups = lock(&groups);
            lock(&calls).push(number);
            match number {
                ATTACH => {
                    groups.insert(args.to_vec());
                    None
                }
                DETACH => (!groups.remove(args)).then_some(Errno::EINVAL),
                DESTROY_QP => (!groups.is_empty()).then_some(Errno::EBUSY),
                _ => None,
            }
        }
    });
    let pd = Pd::allocate(&rig.context).unwrap();
    let cq = Cq::create(&rig.context, 4, None).unwrap();
    let qp = || Qp::create(&pd, &QpInit::reliable(&cq, CAPS)).unwrap();
    let gid = |last| {
        let mut gid = [0xff; 16];
        gid[15] = last;
        gid
    };
    let first = qp();
    for last in [1, 2, 3, 3] {
        first.attach(gid(last)).unwrap();
    }
    first.detach(gid(2)).unwrap();
    assert_eq!(first.detach(gid(2)).unwrap_err().errno(), Errno::EINVAL);
    // Who destroys it is told, as by other devices.
    assert_eq!(first.destroy().unwrap_err().errno(), Errno::EBUSY);
    let at = place(first.map());
    lock(&calls).clear();
    drop(first);
    assert!(lock(&groups).is_empty());
    assert_eq!(*lock(&calls), [DETACH, DETACH, DESTROY_QP]);
    assert_eq!(place(qp().map()), at);
}

#[test]
fn memory_that_the_backend_has_not_given_up_is_not_taken_again() {
    let busy = |number, _: &[u8]| {
        let destroys = matches!(number, DESTROY_QP | DESTROY_CQ | DESTROY_SRQ);
        destroys.then_some(Errno::EBUSY)
    };
    let rig = rig(busy);
    let pd = Pd::allocate(&rig.context).unwrap();
    // A segment in which nothing lies would be another one.
    let holder = Cq::create(&rig.context, 4, None).unwrap();
    let mut places = BTreeSet::new();
    for round in 1..=3 {
        let cq = Cq::create(&rig.context, 4, None).unwrap();
        let srq = Srq::create(&pd, 4, 1).unwrap();
        let qp = Qp::create(&pd, &QpInit::reliable(&cq, CAPS)).unwrap();
        cq.resize(16).unwrap();
        let parts = [
            place(cq.part()),
            place(&cq.entries_part()),
            place(srq.part()),
            place(qp.map()),
        ];
        places.extend(parts);
        assert_eq!(places.len(), 4 * round);
        let error = qp.destroy().unwrap_err();
        assert_eq!(error.errno(), Errno::EBUSY);
    }
    // With the context all goes.
    let transport = Arc::downgrade(rig.context.transport());
    drop((pd, holder, rig));
    assert!(transport.upgrade().is_none());
}
