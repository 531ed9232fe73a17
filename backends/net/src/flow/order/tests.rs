use super::*;

const LIMITS: HoldLimits = HoldLimits {
    settle_us: 100,
    hold_us: 1_000,
    held: 3,
};

/// A frame of one buffer, by where it ends.
fn at(worker: u16, end: u64, now: u64) -> Moment {
    wide(worker, 1, end, now)
}

/// A frame of so many buffers.
fn wide(worker: u16, buffers: u64, end: u64, now: u64) -> Moment {
    let begin = end.saturating_sub(buffers);
    let next = Some(Span { begin, end });
    let worker = PairId(worker);
    Moment { worker, next, now }
}

/// A frame that may have to wait for buffers.
fn aside(worker: u16, now: u64) -> Moment {
    let (worker, next) = (PairId(worker), None);
    Moment { worker, next, now }
}

/// A driver that has consumed this much of every queue.
fn consumed(position: u64) -> impl Fn(PairId) -> u64 {
    move |_| position
}

const FRAME: Ticket = Ticket::of_shard(0);

fn forward(to: u16) -> Route {
    let (to, flow) = (PairId(to), Some(FRAME));
    Route::Forward { to, flow }
}

fn sequence(to: u16) -> Route {
    let (to, flow) = (PairId(to), FRAME);
    Route::Sequence { to, flow }
}

fn hold(on: u16) -> Route {
    let (on, flow) = (PairId(on), FRAME);
    Route::Hold { on, flow }
}

fn received(order: &mut FlowOrder, at: Moment, position: u64) -> Route {
    order.received(at, FRAME, &LIMITS, &consumed(position))
}

fn sequenced(order: &mut FlowOrder, at: Moment, position: u64) -> Route {
    order.sequenced(at, FRAME, &LIMITS, &consumed(position))
}

fn retried(order: &mut FlowOrder, at: Moment, position: u64) -> Route {
    order.retried(at, FRAME, &LIMITS, &consumed(position))
}

#[test]
fn a_new_flow_goes_to_its_target_at_once() {
    let mut order = FlowOrder::placed(PairId(2));
    assert_eq!(received(&mut order, at(0, 1, 0), 0), forward(2));
    let mut order = FlowOrder::placed(PairId(2));
    assert_eq!(received(&mut order, at(2, 1, 0), 0), Route::Deliver);
}

#[test]
fn frames_before_it_was_known_are_waited_for() {
    let mut order = FlowOrder::known(PairId(2));
    assert_eq!(received(&mut order, at(0, 6, 0), 5), hold(0));
    assert_eq!(retried(&mut order, aside(0, 99), 5), hold(0));
    assert_eq!(retried(&mut order, aside(0, 100), 5), forward(2));
}

#[test]
fn a_first_frame_does_not_wait_for_its_own_buffers() {
    let mut order = FlowOrder::known(PairId(2));
    let mut now = 0;
    // It would take five buffers; the driver has all before them.
    let first = received(&mut order, wide(0, 5, 10, now), 5);
    assert_eq!(first, hold(0));
    while retried(&mut order, aside(0, now), 5) == hold(0) {
        now += 1;
    }
    assert_eq!((now, order.home()), (LIMITS.settle_us, Some(PairId(2))));
}

#[test]
fn a_queue_that_is_not_used_any_more_is_not_waited_for() {
    let mut order = FlowOrder::placed(PairId(1));
    // It is never said to be delivered: the worker of queue 1 has gone with it.
    assert_eq!(received(&mut order, at(0, 1, 0), 0), forward(1));
    order.aim(PairId(0));
    assert_eq!(received(&mut order, at(0, 1, 1), u64::MAX), hold(1));
    let mut retry = |now| retried(&mut order, aside(0, now), u64::MAX);
    assert_eq!(retry(50), hold(1));
    assert_eq!(retry(101), forward(0));
}

#[test]
fn another_worker_becomes_sequencer_only_when_nothing_is_under_way() {
    let mut order = FlowOrder::placed(PairId(1));
    assert_eq!(received(&mut order, at(0, 1, 0), 9), forward(1));
    // The port has changed: the first goes back to the sequencer, and so do all until it has been
    // taken.
    assert_eq!(received(&mut order, at(1, 1, 1), 9), sequence(0));
    assert_eq!(received(&mut order, at(1, 1, 1), 9), sequence(0));
    assert_eq!(sequenced(&mut order, aside(0, 2), 9), forward(1));
    assert_eq!(sequenced(&mut order, aside(0, 2), 9), forward(1));
    order.delivered(1);
    order.delivered(2);
    assert_eq!(received(&mut order, at(1, 4, 3), 9), sequence(0));
    assert_eq!(sequenced(&mut order, aside(0, 4), 9), forward(1));
    order.delivered(3);
    order.delivered(4);
    assert_eq!(received(&mut order, at(1, 5, 5), 9), Route::Deliver);
    assert_eq!(order.sequencer(), Some(PairId(1)));
}

#[test]
fn what_is_thrown_away_is_waited_for_no_longer() {
    let mut order = FlowOrder::placed(PairId(1));
    assert_eq!(received(&mut order, at(0, 1, 0), 0), forward(1));
    assert!(!order.is_idle(consumed(0)));
    order.dropped(&forward(1));
    assert!(order.is_idle(consumed(0)));
    assert_eq!(received(&mut order, at(2, 1, 0), 0), sequence(0));
    assert!(!order.is_idle(consumed(0)));
    order.dropped(&sequence(0));
    assert!(order.is_idle(consumed(0)));
    order.aim(PairId(0));
    assert_eq!(received(&mut order, at(0, 1, 0), 0), hold(1));
    assert!(!order.is_idle(consumed(0)));
    order.dropped(&hold(1));
    assert!(order.is_idle(consumed(0)));
}

#[test]
fn a_hold_ends_by_time_and_by_number() {
    let mut order = FlowOrder::placed(PairId(1));
    assert_eq!(received(&mut order, at(1, 7, 0), 0), Route::Deliver);
    order.aim(PairId(0));
    for _ in 0..2 {
        assert_eq!(received(&mut order, at(1, 8, 5), 0), hold(1));
    }
    assert_eq!(retried(&mut order, aside(1, 1_004), 0), hold(1));
    assert_eq!(retried(&mut order, aside(1, 1_005), 0), forward(1));
    // What is held goes before what comes.
    assert_eq!(received(&mut order, at(1, 9, 1_006), 0), hold(1));
    for _ in 0..2 {
        assert_eq!(retried(&mut order, aside(1, 1_007), 0), forward(1));
    }
    for position in 8..11 {
        order.delivered(position);
    }
    order.aim(PairId(0));
    for _ in 0..4 {
        assert_eq!(received(&mut order, at(1, 11, 1_008), 0), hold(1));
    }
    assert_eq!(order.target(), PairId(1), "too many are held: it stays");
    assert_eq!(retried(&mut order, aside(1, 1_009), 0), forward(1));
}

#[test]
fn a_frame_that_was_put_aside_is_waited_for_until_the_driver_has_its_last_buffer() {
    let mut order = FlowOrder::placed(PairId(0));
    assert_eq!(received(&mut order, at(0, 1, 0), 1), Route::Deliver);
    assert_eq!(received(&mut order, at(1, 1, 0), 1), sequence(0));
    // It has the whole queue to itself, and may have to wait for buffers all the same.
    assert_eq!(sequenced(&mut order, aside(0, 1), 1), forward(0));
    order.aim(PairId(1));
    assert_eq!(received(&mut order, at(0, 2, 2), 1), hold(0));
    assert_eq!(retried(&mut order, aside(0, 200), 1), hold(0));
    // It took five.
    order.delivered(6);
    assert_eq!(retried(&mut order, aside(0, 300), 5), hold(0));
    assert_eq!(retried(&mut order, aside(0, 400), 6), hold(0));
    assert_eq!(retried(&mut order, aside(0, 500), 6), forward(1));
}

#[test]
fn only_an_acknowledgement_of_the_last_segment_spares_the_wait() {
    let mut order = FlowOrder::placed(PairId(1));
    let end = Some(u32::MAX - 5);
    let first = order.received(at(1, 7, 0), Ticket { end, ..FRAME }, &LIMITS, &consumed(0));
    assert_eq!(first, Route::Deliver);
    order.acknowledged(u32::MAX - 6);
    order.aim(PairId(0));
    assert_eq!(received(&mut order, at(1, 8, 5), 7), hold(1));
    assert_eq!(retried(&mut order, aside(1, 6), 7), hold(1));
    order.acknowledged(3);
    assert_eq!(retried(&mut order, aside(1, 7), 7), forward(0));
}
