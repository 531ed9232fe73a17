use super::*;

const PATIENCE: Patience = Patience {
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
    Moment { worker, next, now }
}

/// A frame that may have to wait for buffers.
fn aside(worker: u16, now: u64) -> Moment {
    let next = None;
    Moment { worker, next, now }
}

/// A driver that has consumed this much of every queue.
fn consumed(position: u64) -> impl Fn(u16) -> u64 {
    move |_| position
}

#[test]
fn a_new_course_leads_to_its_target_at_once() {
    let mut course = Course::placed(2);
    assert_eq!(
        course.received(at(0, 1, 0), None, &PATIENCE, consumed(0)),
        Step::Forward(2)
    );
    let mut course = Course::placed(2);
    assert_eq!(
        course.received(at(2, 1, 0), None, &PATIENCE, consumed(0)),
        Step::Deliver
    );
}

#[test]
fn frames_before_it_was_known_are_waited_for() {
    let mut course = Course::known(2);
    assert_eq!(
        course.received(at(0, 6, 0), None, &PATIENCE, consumed(5)),
        Step::Hold(0)
    );
    assert_eq!(
        course.retried(aside(0, 99), None, &PATIENCE, consumed(5)),
        Step::Hold(0)
    );
    assert_eq!(
        course.retried(aside(0, 100), None, &PATIENCE, consumed(5)),
        Step::Forward(2)
    );
}

#[test]
fn a_first_frame_does_not_wait_for_its_own_buffers() {
    let mut course = Course::known(2);
    let mut now = 0;
    // It would take five buffers; the driver has all before them.
    let first = course.received(wide(0, 5, 10, now), None, &PATIENCE, consumed(5));
    assert_eq!(first, Step::Hold(0));
    while course.retried(aside(0, now), None, &PATIENCE, consumed(5)) == Step::Hold(0) {
        now += 1;
    }
    assert_eq!((now, course.home()), (PATIENCE.settle_us, Some(2)));
}

#[test]
fn a_queue_that_is_not_used_any_more_is_not_waited_for() {
    let mut course = Course::placed(1);
    let receive = |course: &mut Course, now, consumed: u64| {
        course.received(at(0, 1, now), None, &PATIENCE, move |_| consumed)
    };
    // It is never said to be delivered: the worker of queue 1 has gone with it.
    assert_eq!(receive(&mut course, 0, 0), Step::Forward(1));
    course.aim(0);
    assert_eq!(receive(&mut course, 1, u64::MAX), Step::Hold(1));
    let mut retry = |now| course.retried(aside(0, now), None, &PATIENCE, |_| u64::MAX);
    assert_eq!(retry(50), Step::Hold(1));
    assert_eq!(retry(101), Step::Forward(0));
}

#[test]
fn another_worker_becomes_sequencer_only_when_nothing_is_under_way() {
    let mut course = Course::placed(1);
    assert_eq!(
        course.received(at(0, 1, 0), None, &PATIENCE, consumed(9)),
        Step::Forward(1)
    );
    // The port has changed: the first goes back to the sequencer, and so do all until it has been
    // taken.
    assert_eq!(
        course.received(at(1, 1, 1), None, &PATIENCE, consumed(9)),
        Step::Sequence(0)
    );
    assert_eq!(
        course.received(at(1, 1, 1), None, &PATIENCE, consumed(9)),
        Step::Sequence(0)
    );
    assert_eq!(
        course.sequenced(aside(0, 2), 1, None, &PATIENCE, consumed(9)),
        Step::Forward(1)
    );
    assert_eq!(
        course.sequenced(aside(0, 2), 1, None, &PATIENCE, consumed(9)),
        Step::Forward(1)
    );
    course.delivered(1);
    course.delivered(2);
    assert_eq!(
        course.received(at(1, 4, 3), None, &PATIENCE, consumed(9)),
        Step::Sequence(0)
    );
    assert_eq!(
        course.sequenced(aside(0, 4), 1, None, &PATIENCE, consumed(9)),
        Step::Forward(1)
    );
    course.delivered(3);
    course.delivered(4);
    assert_eq!(
        course.received(at(1, 5, 5), None, &PATIENCE, consumed(9)),
        Step::Deliver
    );
    assert_eq!(course.sequencer(), Some(1));
}

#[test]
fn what_is_thrown_away_is_waited_for_no_longer() {
    let mut course = Course::placed(1);
    assert_eq!(
        course.received(at(0, 1, 0), None, &PATIENCE, consumed(0)),
        Step::Forward(1)
    );
    assert!(!course.is_idle(consumed(0)));
    course.dropped(Dropped::Forwarded);
    assert!(course.is_idle(consumed(0)));
    assert_eq!(
        course.received(at(2, 1, 0), None, &PATIENCE, consumed(0)),
        Step::Sequence(0)
    );
    assert!(!course.is_idle(consumed(0)));
    course.dropped(Dropped::Sequenced);
    assert!(course.is_idle(consumed(0)));
    course.aim(0);
    assert_eq!(
        course.received(at(0, 1, 0), None, &PATIENCE, consumed(0)),
        Step::Hold(1)
    );
    assert!(!course.is_idle(consumed(0)));
    course.dropped(Dropped::Held);
    assert!(course.is_idle(consumed(0)));
}

#[test]
fn a_hold_ends_by_time_and_by_number() {
    let mut course = Course::placed(1);
    assert_eq!(
        course.received(at(1, 7, 0), None, &PATIENCE, consumed(0)),
        Step::Deliver
    );
    course.aim(0);
    for _ in 0..2 {
        assert_eq!(
            course.received(at(1, 8, 5), None, &PATIENCE, consumed(0)),
            Step::Hold(1)
        );
    }
    assert_eq!(
        course.retried(aside(1, 1_004), None, &PATIENCE, consumed(0)),
        Step::Hold(1)
    );
    assert_eq!(
        course.retried(aside(1, 1_005), None, &PATIENCE, consumed(0)),
        Step::Forward(1)
    );
    // What is held goes before what comes.
    assert_eq!(
        course.received(at(1, 9, 1_006), None, &PATIENCE, consumed(0)),
        Step::Hold(1)
    );
    for _ in 0..2 {
        assert_eq!(
            course.retried(aside(1, 1_007), None, &PATIENCE, consumed(0)),
            Step::Forward(1)
        );
    }
    for position in 8..11 {
        course.delivered(position);
    }
    course.aim(0);
    for _ in 0..4 {
        assert_eq!(
            course.received(at(1, 11, 1_008), None, &PATIENCE, consumed(0)),
            Step::Hold(1)
        );
    }
    assert_eq!(course.target(), 1, "too many are held: it stays");
    assert_eq!(
        course.retried(aside(1, 1_009), None, &PATIENCE, consumed(0)),
        Step::Forward(1)
    );
}

#[test]
fn a_frame_that_was_put_aside_is_waited_for_until_the_driver_has_its_last_buffer() {
    let mut course = Course::placed(0);
    let received = |course: &mut Course, at, position| {
        course.received(at, None, &PATIENCE, consumed(position))
    };
    assert_eq!(received(&mut course, at(0, 1, 0), 1), Step::Deliver);
    assert_eq!(received(&mut course, at(1, 1, 0), 1), Step::Sequence(0));
    // It has the whole queue to itself, and may have to wait for buffers all the same.
    assert_eq!(
        course.sequenced(aside(0, 1), 1, None, &PATIENCE, consumed(1)),
        Step::Forward(0)
    );
    course.aim(1);
    let retried = |course: &mut Course, now, position| {
        course.retried(aside(0, now), None, &PATIENCE, consumed(position))
    };
    assert_eq!(received(&mut course, at(0, 2, 2), 1), Step::Hold(0));
    assert_eq!(retried(&mut course, 200, 1), Step::Hold(0));
    // It took five.
    course.delivered(6);
    assert_eq!(retried(&mut course, 300, 5), Step::Hold(0));
    assert_eq!(retried(&mut course, 400, 6), Step::Hold(0));
    assert_eq!(retried(&mut course, 500, 6), Step::Forward(1));
}

#[test]
fn only_an_acknowledgement_of_the_last_segment_spares_the_wait() {
    let mut course = Course::placed(1);
    let end = Some(u32::MAX - 5);
    assert_eq!(
        course.received(at(1, 7, 0), end, &PATIENCE, consumed(0)),
        Step::Deliver
    );
    course.acknowledged(u32::MAX - 6);
    course.aim(0);
    assert_eq!(
        course.received(at(1, 8, 5), Some(9), &PATIENCE, consumed(7)),
        Step::Hold(1)
    );
    assert_eq!(
        course.retried(aside(1, 6), Some(9), &PATIENCE, consumed(7)),
        Step::Hold(1)
    );
    course.acknowledged(3);
    assert_eq!(
        course.retried(aside(1, 7), Some(9), &PATIENCE, consumed(7)),
        Step::Forward(0)
    );
}
