//! How much memory a manager has while connections come and go.

#![allow(clippy::unwrap_used)]

use farlane_rdma_cm::{
    Accept, Connect, Event, FlowLabel, Gid, Guid, Limits, Manager, PacketRate, PathMtu, Ports,
    PrivateData, Qpn, RetryCount, Route, ServiceId, ServiceLevel, TimeExponent, Transport,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Counts bytes that are allocated.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all of it is the system's allocator; the counter allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Held by a test while it counts: all share the allocator.
static ALONE: Mutex<()> = Mutex::new(());

const LIMITS: Limits = Limits {
    connections: 1024,
    requests: 256,
    orphans: 256,
    listeners: 8,
    backlog: 128,
    answers: 1024,
};

fn gid(node: u8) -> Gid {
    Gid([node; 16])
}

fn manager() -> Manager {
    let (keys, mut drawn) = (RandomState::new(), 0_u64);
    let draw = move || {
        drawn += 1;
        keys.hash_one(drawn)
    };
    Manager::new(Guid(1), LIMITS, Box::new(draw))
}

fn request(qpn: u32) -> Connect {
    Connect {
        ports: Ports {
            local: gid(1),
            remote: gid(2),
        },
        service_id: ServiceId(5),
        transport: Transport::Reliable,
        qpn: Qpn::of(qpn),
        responder_resources: 1,
        initiator_depth: 1,
        retry_count: RetryCount::of(7),
        rnr_retry_count: RetryCount::of(7),
        srq: false,
        route: Route {
            flow_label: FlowLabel::default(),
            traffic_class: 0,
            hop_limit: 64,
            service_level: ServiceLevel::default(),
            packet_rate: PacketRate::default(),
            path_mtu: PathMtu::Bytes4096,
            partition_key: 0xffff,
            ack_timeout: TimeExponent::of(17),
        },
        private_data: PrivateData::default(),
    }
}

/// What one says reaches the other; both do what they should.
fn exchange(now: Instant, managers: &mut [Manager; 2]) {
    loop {
        let mut is_quiet = true;
        for from in [0, 1] {
            while let Some(transmit) = managers[from].poll_transmit() {
                is_quiet = false;
                let at = Ports {
                    local: transmit.ports.remote,
                    remote: transmit.ports.local,
                };
                let datagram = &transmit.datagram[..];
                managers[1 - from].receive(now, at, datagram).unwrap();
            }
            let manager = &mut managers[from];
            while let Some(event) = manager.poll_event() {
                is_quiet = false;
                let id = event.id();
                match event {
                    Event::ConnectRequest { request, .. } => {
                        let accept = Accept {
                            qpn: request.remote_qpn,
                            responder_resources: 1,
                            initiator_depth: 1,
                            rnr_retry_count: RetryCount::of(7),
                            srq: false,
                            private_data: PrivateData::default(),
                        };
                        manager.accept(now, id, &accept).unwrap();
                    }
                    Event::Reply { .. } => manager.establish(id, PrivateData::default()).unwrap(),
                    Event::Established { .. } => {}
                    _ => manager.destroy(now, id).unwrap(),
                }
            }
            while manager.poll_ended().is_some() {}
        }
        if is_quiet {
            return;
        }
    }
}

#[test]
fn ten_thousand_connections_that_come_and_go_leave_nothing() {
    let _alone = ALONE.lock();
    let start = Instant::now();
    let before = ALLOCATED.load(Relaxed);
    let mut managers = [manager(), manager()];
    managers[1].listen(ServiceId(5), None, 100).unwrap();
    let (mut now, mut greatest, mut later) = (start, 0, 0);
    for number in 0..20_000_u32 {
        let client = managers[0].connect(now, request(number)).unwrap();
        exchange(now, &mut managers);
        managers[0].destroy(now, client).unwrap();
        exchange(now, &mut managers);
        now += Duration::from_micros(100);
        managers.iter_mut().for_each(|one| one.advance(now));
        let used = ALLOCATED.load(Relaxed) - before;
        if number < 10_000 {
            greatest = greatest.max(used);
        } else {
            later = later.max(used);
        }
    }
    // Each has 256 that wait until nothing is under way any more, of less than 1 KiB.
    assert!(greatest < 2 * 256 * 1024, "{greatest} bytes");
    assert!(
        later <= greatest + greatest / 20,
        "{later} bytes after {greatest}"
    );
    managers
        .iter_mut()
        .for_each(|one| one.advance(now + Duration::from_secs(60)));
    assert!(
        managers
            .iter()
            .all(|one| one.counts().orphans == 0 && one.counts().timers == 0)
    );
    let left = ALLOCATED.load(Relaxed) - before;
    assert!(left < 64 * 1024, "{left} bytes are left");
}

#[test]
fn a_connection_keeps_no_room_for_what_it_has_sent() {
    let _alone = ALONE.lock();
    let now = Instant::now();
    let mut one = manager();
    let before = ALLOCATED.load(Relaxed);
    for number in 0..1000_u32 {
        one.connect(now, request(number)).unwrap();
    }
    while one.poll_transmit().is_some() {}
    let each = (ALLOCATED.load(Relaxed) - before) / 1000;
    assert!(each < 1024, "{each} bytes a connection");
}
