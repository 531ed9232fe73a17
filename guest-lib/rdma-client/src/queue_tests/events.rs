//! Completion channels, and asynchronous events.

use super::*;

/// Whether a thread of this process is blocked in a system call.
fn is_blocked(thread: rustix::thread::Pid) -> bool {
    let stat = format!("/proc/self/task/{thread}/stat");
    let stat = std::fs::read_to_string(stat).unwrap();
    // The state follows the name, which is in parentheses (proc_pid_stat(5)).
    stat.rsplit_once(") ").unwrap().1.starts_with('S')
}

#[test]
fn a_channel_gives_each_event_once_and_enodev_to_every_waiter_after_death() {
    let (queues, channel) = queues(true);
    let channel = channel.unwrap();
    assert_eq!(channel.destroy().unwrap_err().errno(), Errno::EBUSY);
    let map = queues.cq.part();
    for event in 1..=2 {
        map.word(abi::CQ_OFF_EVENTS).store(event, Ordering::Release);
        queues.rig.transport.raise(EVENT_FIRST_CHANNEL);
    }
    for _ in 0..2 {
        assert_eq!(channel.wait().unwrap().handle(), queues.cq.handle());
    }
    std::thread::scope(|scope| {
        let (sender, threads) = std::sync::mpsc::channel();
        let waiters = [sender.clone(), sender].map(|sender| {
            let channel = &channel;
            scope.spawn(move || {
                sender.send(rustix::thread::gettid()).unwrap();
                channel.wait().map(drop)
            })
        });
        for thread in threads.iter().take(2) {
            while !is_blocked(thread) {
                std::thread::yield_now();
            }
        }
        queues.rig.transport.die();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), Err(Errno::ENODEV));
        }
    });
}

#[test]
fn a_non_blocking_channel_says_eagain() {
    let (_queues, channel) = queues(true);
    let channel = channel.unwrap();
    rustix::fs::fcntl_setfl(channel.fd(), rustix::fs::OFlags::NONBLOCK).unwrap();
    assert_eq!(channel.wait().map(drop), Err(Errno::EAGAIN));
}

#[test]
fn asynchronous_events_come_one_a_token() {
    let (queues, _) = queues(false);
    let header = queues.rig.transport.segment(0);
    for object in 0..3_u32 {
        let event = AsyncEvent {
            kind: EVENT_QP_FATAL.into(),
            object: object.into(),
            ..AsyncEvent::default()
        };
        let at = OFF_ASYNC_RING + object as usize * size_of::<AsyncEvent>();
        // SAFETY: not published yet.
        unsafe { header.write(at, &event) };
        header
            .word(OFF_ASYNC_PRODUCED)
            .store(object + 1, Ordering::Release);
        queues.rig.transport.raise(EVENT_ASYNC);
    }
    for object in 0..3 {
        let event = queues.rig.context.next_async_event().unwrap();
        assert_eq!(event.object.get(), object);
    }
}

#[test]
fn a_context_that_was_cut_off_says_so_once_and_then_enodev() {
    let (queues, _) = queues(false);
    let header = queues.rig.transport.segment(0);
    let event = AsyncEvent {
        kind: EVENT_DEVICE_FATAL.into(),
        ..AsyncEvent::default()
    };
    // SAFETY: not published yet.
    unsafe { header.write(OFF_ASYNC_RING, &event) };
    header.word(OFF_ASYNC_PRODUCED).store(1, Ordering::Release);
    queues.rig.transport.raise(EVENT_ASYNC);
    let fatal = queues.rig.context.next_async_event().unwrap();
    assert_eq!(fatal.kind.get(), EVENT_DEVICE_FATAL);
    for _ in 0..2 {
        // The backend tells nothing any more: who asks does not wait for that.
        assert_eq!(queues.rig.context.next_async_event(), Err(Errno::ENODEV));
    }
}

#[test]
fn who_has_taken_the_last_event_rings_where_the_backend_sleeps() {
    let (queues, _) = queues(false);
    let transport = &queues.rig.transport;
    let header = transport.segment(0);
    let doorbells = || transport.doorbells.load(Ordering::Relaxed);
    let take = || queues.rig.context.next_async_event().unwrap();
    let mut rung = doorbells();
    for (produced, rings) in [(2, [0, 1]), (4, [0, 0])] {
        let sleeps = produced == 2;
        let state = if sleeps {
            BACKEND_SLEEPING
        } else {
            BACKEND_AWAKE
        };
        header
            .word(OFF_BACKEND_STATE)
            .store(state, Ordering::Relaxed);
        header
            .word(OFF_ASYNC_PRODUCED)
            .store(produced, Ordering::Release);
        transport.raise(EVENT_ASYNC);
        transport.raise(EVENT_ASYNC);
        for more in rings {
            take();
            rung += more;
            assert_eq!(doorbells(), rung);
        }
    }
}
