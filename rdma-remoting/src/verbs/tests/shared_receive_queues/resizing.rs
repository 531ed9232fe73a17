//! Shared receive queues that get other entries while requests wait in them.

use super::*;
use crate::request::RecvWqe;
use crate::shared_receive_queue::SharedReceives;
use crate::work_queue::MAX_EARLIER_PLACES;
use farlane_abi::queue::{RecvEntry, SrqLayout};
use proptest::prelude::*;
use std::collections::VecDeque;

/// Page of the queue's words, and of its entries at first.
const WORDS: u32 = 1;
/// Pages that entries may be moved to.
const ELSEWHERE: std::ops::Range<u32> = 2..8;

impl Program {
    fn resize(&self, srq: Handle, requests: u32, at: u32) -> Result<u32, Errno> {
        let moved = self.host().resize_srq(ResizeSrq {
            srq,
            region: QUEUES.into(),
            offset: u32::try_from(page(at)).unwrap().into(),
            requests: requests.into(),
        });
        moved.map(U32::get)
    }

    fn receives(&self, srq: Handle) -> Arc<SharedReceives> {
        let objects = self.context.objects();
        Arc::clone(objects.srqs.get(srq.get()).unwrap().turns.engine.receives())
    }

    fn room(&self, srq: Handle) -> u32 {
        self.host().query_srq(srq).unwrap().requests.get()
    }
}

/// The process's end of a queue of one element a request.
struct Posts<'a> {
    program: &'a Program,
    /// Where the next request lies: a page, an offset there, and how many lie from there on.
    place: (u32, usize, u32),
    produced: u32,
}

impl<'a> Posts<'a> {
    fn new(program: &'a Program) -> Self {
        Self {
            program,
            place: (WORDS, QP_OFF_ENTRIES, 8),
            produced: 0,
        }
    }

    fn moved(&mut self, at: u32, requests: u32) {
        self.place = (at, 0, requests.next_power_of_two());
    }

    fn post(&mut self, wr_id: u64) {
        let (at, begin, entries) = self.place;
        let stride = SrqLayout::new(entries, 1).unwrap().stride;
        let index = usize::try_from(self.produced % entries).unwrap();
        let entry = RecvEntry {
            wr_id: wr_id.into(),
            ..RecvEntry::default()
        };
        let offset = page(at) + begin + index * stride;
        self.program.pages.write(offset, &entry).unwrap();
        self.produced = self.produced.wrapping_add(1);
        let produced = self.produced;
        self.program.set(WORDS, QP_OFF_RECV_PRODUCED, produced);
    }
}

fn taken(receives: &SharedReceives) -> Option<u64> {
    let mut request = RecvWqe::default();
    receives
        .take(&mut request)
        .unwrap()
        .then_some(request.wr_id)
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Post,
    Take,
    Resize(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => Just(Step::Post),
        4 => Just(Step::Take),
        2 => (1_u32..40).prop_map(Step::Resize),
    ]
}

proptest! {
    #[test]
    fn what_waits_is_taken_in_order_however_often_it_is_resized(
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let server = Server::without_workers();
        let p = Program::start(&port(&server, 1));
        let srq = p.srq(WORDS);
        let receives = p.receives(srq);
        let mut posts = Posts::new(&p);
        let (mut waits, mut next, mut room) = (VecDeque::new(), 0, 8);
        let mut pages = ELSEWHERE.cycle();
        for step in steps {
            match step {
                Step::Post if waits.len() == usize::try_from(room).unwrap() => {}
                Step::Post => {
                    posts.post(next);
                    waits.push_back(next);
                    next += 1;
                }
                Step::Take => prop_assert_eq!(taken(&receives), waits.pop_front()),
                Step::Resize(requests) => {
                    let at = pages.next().unwrap();
                    let becomes = requests.next_power_of_two();
                    let fits = waits.len() <= usize::try_from(becomes).unwrap();
                    match p.resize(srq, requests, at) {
                        Ok(first) => {
                            prop_assert!(fits);
                            prop_assert_eq!(first, posts.produced);
                            posts.moved(at, requests);
                            room = becomes;
                        }
                        // The page has requests that wait.
                        Err(Errno::EBUSY) => {}
                        Err(error) => prop_assert!(!fits && error == Errno::EINVAL),
                    }
                    prop_assert_eq!(p.room(srq), room);
                }
            }
        }
        for number in waits {
            prop_assert_eq!(taken(&receives), Some(number));
        }
        prop_assert_eq!(taken(&receives), None);
    }
}

/// Each place is room of the backend's, which no limit counts.
#[test]
fn what_waits_lies_in_so_many_places() {
    const MORE: u32 = 2;
    let server = Server::without_workers();
    let p = Program::start(&port(&server, 1));
    let srq = p.srq(WORDS);
    let receives = p.receives(srq);
    let (theirs, more) = shared("more", 64 * PAGE_BYTES);
    p.context.attach_segment(region(MORE), theirs).unwrap();
    let mut at = 0;
    // Room for 32, in a page of its own.
    let mut resize = || {
        at += 1;
        let moved = p.host().resize_srq(ResizeSrq {
            srq,
            region: MORE.into(),
            offset: u32::try_from(page(at)).unwrap().into(),
            requests: 32.into(),
        });
        moved.map(|first| (at, first.get()))
    };
    let post = |(at, number): (u32, u32)| {
        let stride = SrqLayout::new(32, 1).unwrap().stride;
        let index = usize::try_from(number % 32).unwrap();
        let entry = RecvEntry {
            wr_id: u64::from(number).into(),
            ..RecvEntry::default()
        };
        more.write(page(at) + index * stride, &entry).unwrap();
        p.set(WORDS, QP_OFF_RECV_PRODUCED, number + 1);
    };
    let mut posts = Posts::new(&p);
    posts.post(0);
    for _ in 0..MAX_EARLIER_PLACES {
        post(resize().unwrap());
    }
    assert_eq!(resize(), Err(Errno::ENOMEM));
    // What was refused has changed nothing.
    assert_eq!(p.room(srq), 32);
    assert_eq!(taken(&receives), Some(0));
    post(resize().unwrap());
    assert_eq!(resize(), Err(Errno::ENOMEM));
    // Where nothing waits none is kept.
    let last = u64::try_from(MAX_EARLIER_PLACES + 1).unwrap();
    for number in 1..=last {
        assert_eq!(taken(&receives), Some(number));
    }
    for _ in 0..30 {
        resize().unwrap();
    }
    assert_eq!(taken(&receives), None);
}

#[test]
fn a_resize_that_makes_no_sense_is_refused_and_changes_nothing() {
    let server = Server::without_workers();
    let p = Program::start(&port(&server, 1));
    let srq = p.srq(WORDS);
    let mut posts = Posts::new(&p);
    (0..3).for_each(|number| posts.post(number));
    p.host()
        .modify_srq(ModifySrq {
            srq,
            mask: SRQ_LIMIT.into(),
            limit: 3.into(),
            ..ModifySrq::default()
        })
        .unwrap();
    let at = |at: u32| u32::try_from(page(at)).unwrap();
    let good = ResizeSrq {
        srq,
        region: QUEUES.into(),
        offset: at(2).into(),
        requests: 16.into(),
    };
    let with = |change: &dyn Fn(&mut ResizeSrq)| {
        let mut args = good;
        change(&mut args);
        args
    };
    for (bad, error) in [
        (with(&|args| args.requests = 0.into()), Errno::EINVAL),
        (with(&|args| args.requests = 2.into()), Errno::EINVAL),
        (
            with(&|args| args.requests = (MAX_WQ_ENTRIES + 1).into()),
            Errno::EINVAL,
        ),
        (with(&|args| args.requests = u32::MAX.into()), Errno::EINVAL),
        (with(&|args| args.srq = 0.into()), Errno::EBADF),
        (with(&|args| args.srq = 77.into()), Errno::EBADF),
        (with(&|args| args.region = 9.into()), Errno::EINVAL),
        (with(&|args| args.region = 0.into()), Errno::EBUSY),
        (with(&|args| args.offset = 8.into()), Errno::EINVAL),
        (with(&|args| args.offset = at(CQ_PAGE).into()), Errno::EBUSY),
        (with(&|args| args.offset = at(WORDS).into()), Errno::EBUSY),
        (with(&|args| args.offset = at(8).into()), Errno::EINVAL),
    ] {
        assert_eq!(p.host().resize_srq(bad), Err(error), "{bad:?}");
        assert_eq!(p.room(srq), 8);
    }
    // Less than the limit.
    assert_eq!(taken(&p.receives(srq)), Some(0));
    p.host()
        .modify_srq(ModifySrq {
            srq,
            mask: SRQ_LIMIT.into(),
            limit: 2.into(),
            ..ModifySrq::default()
        })
        .unwrap();
    assert_eq!(p.resize(srq, 1, 2), Err(Errno::EINVAL));
    assert_eq!(p.resize(srq, 2, 2), Ok(3));
    let beyond = ModifySrq {
        srq,
        mask: SRQ_LIMIT.into(),
        limit: 3.into(),
        ..ModifySrq::default()
    };
    assert_eq!(p.host().modify_srq(beyond), Err(Errno::EINVAL));
    // A queue that makes no sense.
    p.set(WORDS, QP_OFF_RECV_PRODUCED, 99);
    assert_eq!(p.resize(srq, 64, 3), Err(Errno::EINVAL));
    let mut request = RecvWqe::default();
    assert!(p.receives(srq).take(&mut request).is_err());
    assert_eq!(p.resize(srq, 64, 3), Err(Errno::EINVAL));
    p.resize(srq, 64, 3).unwrap_err();
}

#[test]
fn what_is_consumed_holds_no_memory() {
    let server = Server::without_workers();
    let p = Program::start(&port(&server, 1));
    let srq = p.srq(WORDS);
    let receives = p.receives(srq);
    let mut posts = Posts::new(&p);
    p.resize(srq, 8, 2).unwrap();
    posts.moved(2, 8);
    posts.post(1);
    p.resize(srq, 8, 3).unwrap();
    posts.moved(3, 8);
    assert_eq!(p.resize(srq, 8, 2), Err(Errno::EBUSY));
    assert_eq!(taken(&receives), Some(1));
    p.resize(srq, 8, 2).unwrap();
    posts.moved(2, 8);
    // Its words stay where they are.
    assert_eq!(p.resize(srq, 8, WORDS), Err(Errno::EBUSY));
    posts.post(2);
    assert_eq!(taken(&receives), Some(2));
    drop(receives);
    p.host().destroy_srq(srq).unwrap();
    for at in WORDS..8 {
        p.srq(at);
    }
}

#[test]
fn a_context_of_version_2_resizes_none_and_is_not_told_that_it_could() {
    let server = Server::without_workers();
    let port = port(&server, 1);
    let resizable = |version: u32, id| {
        let context = open(&port, id);
        let mut host = CallHost::new(&context);
        let range = VersionRange {
            min: 1.into(),
            max: version.into(),
        };
        assert_eq!(host.negotiate(range).unwrap().get(), version);
        let flags = host.device_limits(()).unwrap().device_cap_flags.get();
        let refused = host.resize_srq(ResizeSrq::default());
        (flags & DEVICE_SRQ_RESIZE != 0, refused)
    };
    assert_eq!(resizable(2, 0), (false, Err(Errno::EOPNOTSUPP)));
    // Of no queue, that is.
    assert_eq!(resizable(3, 1), (true, Err(Errno::EINVAL)));
}
