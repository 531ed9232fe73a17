//! Datagrams to multicast groups.

use super::*;

fn group(last: u8) -> GroupGid {
    let mut gid = [0; 16];
    (gid[0], gid[15]) = (0xff, last);
    GroupGid::new(gid).unwrap()
}

/// Number by which a group's members are named.
const ALL_MEMBERS: QpNumber = QpNumber::of(MULTICAST_QPN);

#[test]
fn all_members_of_a_group_get_a_copy_once_each() {
    let engine = SoftEngine::new();
    let ends: Vec<End> = (1..=5).map(|gid| end(&engine, gid, &DATAGRAMS)).collect();
    for end in &ends {
        ready(end, QKEY);
        end.post_recv(50, &[end.element(0, 200)]);
        end.post_recv(51, &[end.element(0, 200)]);
    }
    // The sender, too; the last one is in another group, the one before has another key.
    for member in [0, 1, 2, 3] {
        ends[member].qp.attach(group(1)).unwrap();
        ends[member].qp.attach(group(1)).unwrap();
    }
    ends[4].qp.attach(group(2)).unwrap();
    let attr = QpAttr {
        qkey: 9.into(),
        ..Default::default()
    };
    ends[3].qp.modify(QP_QKEY, &attr).unwrap();
    let now = Instant::now();
    let post = |wr_id, number| {
        let request = ends[0].request(Opcode::Send, wr_id, &[ends[0].element(1000, 60)]);
        ends[0]
            .sends
            .post(to(request, Recipients::Group(group(1)), number, QKEY));
    };
    post(1, ALL_MEMBERS);
    // A turn goes on with the next member where the one before has ended.
    let turn = Turn {
        budget: Budget::UNBOUNDED.within(u64::MAX, 1),
        ..Turn::from(now)
    };
    let mut turns = 0;
    while ends[0].qp.progress(turn).worked {
        turns += 1;
    }
    assert!((3..=5).contains(&turns), "{turns}");
    assert_eq!(ends[0].next(), Some((50, WC_STATUS_SUCCESS)));
    assert_eq!(ends[0].next(), Some((1, WC_STATUS_SUCCESS)));
    for (index, end) in ends.iter().enumerate().skip(1) {
        let got = (index < 3).then_some((50, WC_STATUS_SUCCESS));
        assert_eq!(end.next(), got, "{index}");
        assert_eq!(end.next(), None);
    }
    let header = ends[1].contents(0, 40);
    assert_eq!(
        (&header[8..24], &header[24..]),
        (&[1; 16][..], &group(1).raw()[..])
    );
    // Only by their common number.
    post(2, ends[1].qp.number());
    while ends[0].qp.progress(now.into()).worked {}
    assert_eq!(ends[0].next(), Some((2, WC_STATUS_SUCCESS)));
    assert_eq!(ends[1].next(), None);
    // Who has left gets none.
    ends[1].qp.detach(group(1)).unwrap();
    assert_eq!(ends[1].qp.detach(group(1)), Err(Errno::EINVAL));
    ends[2].qp.destroy();
    post(3, ALL_MEMBERS);
    while ends[0].qp.progress(now.into()).worked {}
    assert_eq!(ends[0].next(), Some((51, WC_STATUS_SUCCESS)));
    assert_eq!(ends[0].next(), Some((3, WC_STATUS_SUCCESS)));
    assert_eq!((ends[1].next(), ends[2].next()), (None, None));
}

/// A sender and the members of a group, each with room for several datagrams.
fn sender_and_members(members: u8) -> (SoftEngine, End, Vec<End>) {
    let engine = SoftEngine::new();
    let sender = end(&engine, 1, &DATAGRAMS);
    ready(&sender, QKEY);
    let members: Vec<End> = (0..members).map(|_| end(&engine, 2, &DATAGRAMS)).collect();
    for member in &members {
        join(member);
    }
    (engine, sender, members)
}

/// Has it receive what is sent to the first group.
fn join(member: &End) {
    ready(member, QKEY);
    for wr_id in 0..4 {
        member.post_recv(wr_id, &[member.element(0, 200)]);
    }
    member.qp.attach(group(1)).unwrap();
}

fn post_to_group(sender: &End, wr_id: u64, length: u32) {
    let request = sender.request(Opcode::Send, wr_id, &[sender.element(1000, length)]);
    let group = Recipients::Group(group(1));
    sender.sends.post(to(request, group, ALL_MEMBERS, QKEY));
}

/// A turn in which at most so many operations begin.
fn turn_of(operations: u64) -> Turn {
    Turn {
        budget: Budget::UNBOUNDED.within(u64::MAX, operations),
        ..Turn::from(Instant::now())
    }
}

/// How many datagrams each has got since this was last asked.
fn got(members: &[End]) -> Vec<usize> {
    let count = |member: &End| std::iter::from_fn(|| member.next()).count();
    members.iter().map(count).collect()
}

#[test]
fn what_is_sent_to_a_group_stops_where_no_operation_is_left() {
    for length in [60, 0] {
        let (_engine, sender, members) = sender_and_members(4);
        post_to_group(&sender, 1, length);
        assert_eq!(sender.qp.progress(turn_of(2)).used.operations, 2);
        for budget in [
            Budget::NO_OPERATION,
            Budget::UNBOUNDED.within(u64::MAX, 0),
            Budget::new(0),
        ] {
            let turn = Turn {
                budget,
                ..turn_of(0)
            };
            let stopped = sender.qp.progress(turn);
            assert!(stopped.more && !stopped.worked, "{stopped:?}");
            assert_eq!((stopped.used.operations, stopped.used.bytes), (0, 0));
        }
        assert_eq!(got(&members), [1, 1, 0, 0]);
        assert_eq!(sender.next(), None);
        assert_eq!(sender.qp.progress(turn_of(9)).used.operations, 2);
        assert_eq!(got(&members), [0, 0, 1, 1]);
        assert_eq!(sender.next(), Some((1, WC_STATUS_SUCCESS)));
    }
}

#[test]
fn who_comes_and_goes_meanwhile_has_nobody_get_a_datagram_twice_or_never() {
    let (engine, sender, mut members) = sender_and_members(4);
    post_to_group(&sender, 1, 60);
    sender.qp.progress(turn_of(2));
    // The others are where they were, and who comes back is not the one that was there.
    let first = &members[0].qp;
    first.detach(group(1)).unwrap();
    first.attach(group(1)).unwrap();
    let late = end(&engine, 3, &DATAGRAMS);
    join(&late);
    members.push(late);
    sender.qp.progress(turn_of(9));
    assert_eq!(got(&members), [1, 1, 1, 1, 0]);
    assert_eq!(sender.next(), Some((1, WC_STATUS_SUCCESS)));
    // Who goes before its turn gets none.
    post_to_group(&sender, 2, 60);
    sender.qp.progress(turn_of(2));
    members[3].qp.detach(group(1)).unwrap();
    sender.qp.progress(turn_of(9));
    assert_eq!(got(&members), [1, 1, 1, 0, 1]);
    assert_eq!(sender.next(), Some((2, WC_STATUS_SUCCESS)));
}

/// Members that come and go in each turn do not keep a request from its end.
#[test]
fn what_is_sent_to_a_group_ends_however_often_its_members_come_back() {
    let (_engine, sender, members) = sender_and_members(2);
    post_to_group(&sender, 1, 60);
    for _ in 0..3 {
        sender.qp.progress(turn_of(1));
        for member in &members {
            member.qp.detach(group(1)).unwrap();
            member.qp.attach(group(1)).unwrap();
        }
    }
    assert_eq!(sender.next(), Some((1, WC_STATUS_SUCCESS)));
    assert_eq!(got(&members), [1, 0]);
}

#[test]
fn members_with_another_key_cost_the_sender_a_look_each() {
    let (_engine, sender, members) = sender_and_members(40);
    let other = QpAttr {
        qkey: 9.into(),
        ..Default::default()
    };
    for stranger in &members[..38] {
        stranger.qp.modify(QP_QKEY, &other).unwrap();
    }
    let all = || got(&members).iter().sum::<usize>();
    // The operation that the request is pays for the first copy, however late that comes.
    post_to_group(&sender, 1, 60);
    let used = sender.qp.progress(turn_of(1)).used;
    assert_eq!((used.operations, used.bytes, all()), (1, 60, 1));
    assert_eq!(used.cost, OPERATION_COST + 60 + 38 * LOOK_COST);
    let used = sender.qp.progress(turn_of(1)).used;
    assert_eq!((used.operations, used.bytes, all()), (1, 60, 1));
    assert_eq!(sender.next(), Some((1, WC_STATUS_SUCCESS)));
    // Looks are paid: a turn has as many as it can pay, and goes on.
    for length in [60, 0] {
        post_to_group(&sender, 2, length);
        let turn = Turn {
            budget: Budget::new(OPERATION_COST + 20 * LOOK_COST),
            ..turn_of(0)
        };
        let first = sender.qp.progress(turn);
        assert!(first.more && first.worked);
        assert_eq!((first.used.bytes, all()), (0, 0));
        assert_eq!(first.used.cost, OPERATION_COST + 20 * LOOK_COST);
        let rest = sender.qp.progress(Turn::from(Instant::now())).used;
        assert_eq!((rest.operations, rest.bytes), (1, 2 * u64::from(length)));
        assert_eq!(sender.next(), Some((2, WC_STATUS_SUCCESS)));
        assert_eq!(all(), 2);
    }
}

/// Who may do no more for now waits for that where somebody is to have a copy, and for nobody else.
#[test]
fn members_with_another_key_keep_no_sender_waiting_who_is_at_a_limit() {
    let other = QpAttr {
        qkey: 9.into(),
        ..Default::default()
    };
    let limits = [
        Budget::UNBOUNDED.within(u64::MAX, 1),
        Budget::UNBOUNDED.within(60, u64::MAX),
    ];
    for (length, budget) in [(60, limits[0]), (60, limits[1]), (0, limits[0])] {
        let (_engine, sender, members) = sender_and_members(40);
        for stranger in &members[1..39] {
            stranger.qp.modify(QP_QKEY, &other).unwrap();
        }
        members[39].qp.detach(group(1)).unwrap();
        post_to_group(&sender, 1, length);
        let turn = Turn {
            budget,
            ..turn_of(0)
        };
        assert_eq!(sender.qp.progress(turn).used.operations, 1);
        assert_eq!(sender.next(), Some((1, WC_STATUS_SUCCESS)));
        // The last one is to have it, and is met in a turn in which nobody can.
        members[39].qp.attach(group(1)).unwrap();
        post_to_group(&sender, 2, length);
        let first = sender.qp.progress(turn);
        assert_eq!((first.used.operations, sender.next()), (1, None));
        let limited = Turn {
            budget: Budget::NO_OPERATION,
            ..turn
        };
        assert!(!sender.qp.progress(limited).worked);
        assert_eq!(got(&members).iter().sum::<usize>(), 2);
        sender.qp.progress(turn);
        assert_eq!(sender.next(), Some((2, WC_STATUS_SUCCESS)));
        assert_eq!(got(&members)[39], 1);
    }
}

#[test]
fn a_port_fills_no_group_and_connections_are_in_none() {
    let engine = SoftEngine::new();
    let ends: Vec<End> = (0..65).map(|_| end(&engine, 1, &DATAGRAMS)).collect();
    for end in &ends[..64] {
        end.qp.attach(group(1)).unwrap();
        assert!(end.qp.is_attached());
    }
    assert_eq!(ends[64].qp.attach(group(1)), Err(Errno::ENOMEM));
    assert!(!ends[64].qp.is_attached());
    // Another port can, and so can the first one's place.
    let other = end(&engine, 2, &DATAGRAMS);
    other.qp.attach(group(1)).unwrap();
    ends[0].qp.destroy();
    ends[64].qp.attach(group(1)).unwrap();
    // A port has so many memberships of all groups.
    let outcomes = (0..=u16::MAX).map(|number| {
        let mut gid = [0xff; 16];
        gid[..2].copy_from_slice(&[0xff, 0xee]);
        gid[14..].copy_from_slice(&number.to_be_bytes());
        ends[1].qp.attach(GroupGid::new(gid).unwrap())
    });
    let attached = outcomes.take_while(Result::is_ok).count();
    assert_eq!(attached, 4096 - 64);
    other.qp.attach(group(3)).unwrap();
    let connection = end(&engine, 1, &NORMAL);
    assert_eq!(connection.qp.attach(group(1)), Err(Errno::EINVAL));
}
